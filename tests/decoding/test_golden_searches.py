"""Diverse and constrained beams, contrastive search, DoLa beside transformers 4.55.4 (make_golden_searches.py)."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.config import ModelConfig
from minillm.decoding import beam, constrained, constraints, contrastive, dola
from minillm.decoding.constraints import DisjunctiveConstraint, Progress
from minillm.decoding.dola import premature_layers
from minillm.decoding.field_values import exit_layers
from minillm.formats.load_model import load_model
from minillm.layers.embedding import LMHead
from minillm.runner.runner import Runner

from ..tiny import Result, loop_of, request_for, run, runner_of

TESTS = Path(__file__).parents[1]
GOLDEN = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (TESTS / "golden_searches").iterdir()}
EXPECTED = {name: golden["cases"] for name, golden in GOLDEN.items()}


def runners(name: str) -> dict[str, Runner]:
    """The models that the cases were made with."""
    found = {}
    for variant, digest in GOLDEN[name]["made_by"]["sha256"].items():
        folder = TESTS / "golden" / "opt" / variant
        assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == digest, "a new model?"
        found[variant] = runner_of(load_model(folder, NumpyBackend()), pages=1500, page_size=8)
    return found


def results(name: str, every: int, **more: Any) -> Iterator[tuple[dict[str, Any], list[Result]]]:
    """Cases, and what ours gives; all cases of a model run side by side."""
    for variant, runner in runners(name).items():
        cases = [case for case in EXPECTED[name][::every] if case["model"] == variant]
        config = runner.model.config
        requests = [request_for(case["prompt"], **settled(case["fields"], config), **more) for case in cases]
        yield from zip(cases, run(loop_of(target=runner, max_batch_size=40), requests), strict=True)
        assert runner.cache.free_pages == runner.cache.num_pages


def settled(fields: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Fields with the numbers of layers that an engine puts in place of "low" and "high"."""
    layers = fields.get("dola_layers")
    return fields | ({"dola_layers": premature_layers(exit_layers(layers), config)} if layers else {})


def differences(name: str, every: int = 1, **more: Any) -> int:
    """Cases in which ours are other tokens or scores."""
    count = 0
    for case, ours in results(name, every, **more):
        ends = set(case["fields"].get("eos_token_id", ()))
        same = [unended(r.token_ids, ends) for r in ours] == [unended(line, ends) for line in case["sequences"]]
        scores = [r.score for r in ours] if case["scores"] else []
        count += not (same and np.allclose(scores, case["scores"], rtol=1e-5, atol=1e-4))
    return count


@pytest.fixture(autouse=True)
def ranked_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers ranks texts that lack a phrase among the others as soon as too few were cut off with all."""

    def add_cut_off(search: Any, state: Any, extensions: Any, cut_off: list[int]) -> None:
        full = [i for i in cut_off if search.fulfils(extensions.beams[i].token_ids)]
        others = [i for i in cut_off if i not in full] if len(full) < search.settings.num_return_sequences else []
        search.add_results(state, extensions, full + others)

    monkeypatch.setattr(constrained.ConstrainedBeamSearch, "add_cut_off", add_cut_off)
    monkeypatch.setattr(constrained.ConstrainedBeamSearch, "return_best", beam.BeamSearch.return_best)


def unended(line: list[int], ends: set[int]) -> list[int]:
    """Without the token that ended it: transformers 4.55 writes the first of several there, whichever it was."""
    return [-1 if token in ends else token for token in line]


def test_the_cases_cover_what_they_should() -> None:
    assert {golden["made_by"]["transformers"] for golden in GOLDEN.values()} == {"4.55.4"}
    fields = [case["fields"] for case in EXPECTED["diverse"]]
    assert len(fields) > 80
    assert {f["early_stopping"] for f in fields} == {True, False, "never"}
    assert {np.sign(f["length_penalty"]) for f in fields} == {-1, 0, 1}
    ended = [case for case in EXPECTED["diverse"] if len(set(map(len, case["sequences"]))) > 1]
    assert len(ended) > 15
    lines = [case["sequences"][0] for case in EXPECTED["contrastive"]]
    assert sum(len(set(line)) > 8 for line in lines) > 30
    lines = [case["sequences"][0] for case in EXPECTED["dola"]]
    assert sum(len(set(line)) > 5 for line in lines) > 20
    words = [case["fields"]["force_words_ids"] for case in EXPECTED["constrained"]]
    assert len(words) > 100
    assert {len(forced) for forced in words} == {1, 2, 3}
    assert sum(isinstance(word[0], list) for forced in words for word in forced) > 50


@pytest.mark.slow
def test_ours_give_the_texts_with_all_phrases_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of transformers come in the same order; where it gives none, or fewer, others displaced some."""
    monkeypatch.undo()
    displaced = 0
    for case, ours in results("constrained", 2):
        ends = set(case["fields"].get("eos_token_id", ()))
        words = [DisjunctiveConstraint(w if isinstance(w[0], list) else [w]) for w in case["fields"]["force_words_ids"]]

        def full(line: list[int], words: list[Any] = words) -> bool:
            progress = Progress.of(words)
            for token in line:
                progress = progress.after(token)
            return progress.done

        lines = [unended(result.token_ids, ends) for result in ours]
        marks = [full(result.token_ids) for result in ours]
        theirs = [unended(line, ends) for line in case["sequences"] if full(line)]
        assert marks == sorted(marks, reverse=True)
        assert lines[: len(theirs)] == theirs
        assert len(lines) == len(case["sequences"])
        displaced += sum(marks) > len(theirs)
    assert displaced > 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EXPECTED)
def test_same_sequences_and_scores(name: str, every: int) -> None:
    assert differences(name, every) == 0


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXPECTED)
def test_the_same_without_a_cache(name: str) -> None:
    assert differences(name, every=11, use_cache=False) == 0


def states_before_project_out(patch: pytest.MonkeyPatch) -> None:
    states, logits = LMHead.states, LMHead.__call__
    patch.setattr(LMHead, "states", lambda self, backend, x: x)
    patch.setattr(LMHead, "__call__", lambda self, backend, x: logits(self, backend, states(self, backend, x)))


divergences = dola.divergences

BREAKAGES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "groups take no notice of each other": (
        "diverse",
        lambda patch: patch.setattr(beam.DiverseBeamSearch, "extend", lambda self, *a: super(
            beam.DiverseBeamSearch, self).extend(*a[:3])),
    ),
    "today's rule for the end of a search": (
        "diverse",
        lambda patch: patch.setattr(beam.DiverseBeamSearch, "goes_on", beam.BeamSearch.goes_on),
    ),
    "a context without the prompt": (
        "contrastive",
        lambda patch: patch.setattr(contrastive.ContrastiveState, "line", property(
            lambda self: self.continuation.token_ids or self.request.prompt_ids)),
    ),
    "the best of the furthest bank alone": (
        "constrained",
        lambda patch: patch.setattr(constraints.Progress, "bank", property(lambda self: 0)),
    ),
    "a text may end without its phrases": (
        "constrained",
        lambda patch: patch.setattr(constrained.ConstrainedBeamSearch, "collect", lambda self, state, extensions:
            self.add_results(state, extensions, self.ended(extensions, "stop"))),
    ),
    "states before project_out": ("contrastive", states_before_project_out),
    "the nearest layer": ("dola", lambda patch: patch.setattr(dola, "divergences", lambda *a: -divergences(*a))),
    "no token is implausible": ("dola", lambda patch: patch.setattr(dola, "RELATIVE_TOP", 1e-9)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_they_would_tell(breakage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, apply = BREAKAGES[breakage]
    apply(monkeypatch)
    assert differences(name, every=5) > 0
