"""DoLa: which layers it reads, how it draws, what it costs, and how it runs beside others.

`test_golden_searches.py` has transformers' own results, `test_dola_live.py` the formula in every family.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.observe import counting
from minillm.decoding.dola import premature_layers
from minillm.errors import ParameterError
from minillm.reference.softmax import log_softmax
from minillm.runner.runner import Runner

from .. import seq2seq
from ..adapters import write_adapter
from ..comparing import assert_same_results
from ..reference.chi_square import p_value
from ..tiny import loop_of, random_prompts, request_for, run, runner_of, tiny_model, tiny_runner, write_checkpoint

LENGTH: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": []}


def test_the_layers_are_those_of_transformers() -> None:
    expected = {
        (True, 1): ((0,), (0,)),
        (True, 2): ((1,), (1,)),
        (True, 4): ((2,), (2,)),
        (True, 6): ((2,), (3, 5)),
        (True, 32): (range(2, 16, 2), range(16, 32, 2)),
        (False, 32): (range(0, 16, 2), range(16, 32, 2)),
        (True, 48): (range(2, 20, 2), range(28, 48, 2)),
        (False, 2): ((0,), (1,)),
    }
    for (tied, count), (low, high) in expected.items():
        config = replace(tiny_model().config, tied_head=tied, num_layers=count)
        assert premature_layers("low", config) == (*low,)
        assert premature_layers("high", config) == (*high,)
    assert premature_layers((1, 0, 1), config) == (1, 0)
    with pytest.raises(ParameterError, match="expected numbers below the model's 2 layers, found 2"):
        premature_layers((0, 2), config)


def formula(runner: Runner, tokens: list[int], layers: tuple[int, ...]) -> np.ndarray:
    """The scores of the next token, by the layers' hidden states as hooks see them, in float64. -> [V]"""
    request = request_for(tokens, max_new_tokens=1)
    names = {layer: f"blocks.{layer - 1}.residual" if layer else "embedding" for layer in layers}
    loop = loop_of(target=runner)
    loop.add(replace(request, hooks=runner.hooks.read([*names.values(), "logits"], None)))
    [event] = [event for event in loop.step() if event.watched is not None]
    rows = {name: array[-1].astype(np.float64) for name, array in (event.watched or {}).items()}
    table = runner.model.head.weight.data  # type: ignore[attr-defined]
    final = log_softmax(rows["logits"], np)
    best, scores = -1.0, final
    for name in names.values():
        early = log_softmax(table.astype(np.float64) @ rows[name], np)
        middle = (np.exp(final) + np.exp(early)) / 2
        distance = float((middle * (2 * np.log(middle) - final - early)).sum())
        if distance > best:
            best, scores = distance, final - early
    return np.where(final >= final.max() + np.log(0.1), scores, -np.inf)


@pytest.mark.longer
def test_samples_are_drawn_from_the_softmax_of_the_scores() -> None:
    runner, draws, layers = tiny_runner(seed=2, pages=400), 3000, (0, 1)
    sampling: dict[str, Any] = {"do_sample": True, "top_k": 0, "num_return_sequences": 300, "temperature": 3.0}
    requests = [
        request_for([5, 6, 7], seed=seed, max_new_tokens=1, dola_layers=layers, **sampling)
        for seed in range(draws // 300)
    ]
    results = run(loop_of(target=runner, max_batch_size=300), requests)
    drawn = Counter(result.token_ids[0] for several in results for result in several)
    scores = formula(runner, [5, 6, 7], layers) / 3
    weights = np.exp(scores - scores.max())
    assert np.count_nonzero(weights) > 3
    assert p_value([drawn[token] for token in range(len(scores))], draws * weights / weights.sum()) > 0.001


def test_the_products_of_early_exits_are_counted() -> None:
    """Two layers, one row each: twice 2 V W more than greedy search in each pass."""
    prompts, flops = random_prompts(3, seed=1), {}
    for layers in (None, (0, 1)):
        runner = tiny_runner(seed=2)
        with counting(runner) as counted:
            run(loop_of(target=runner), [request_for(p, max_new_tokens=1, dola_layers=layers) for p in prompts])
        flops[layers] = counted.total.flops
    config = runner.model.config
    assert flops[0, 1] - flops[None] == len(prompts) * 2 * 2 * config.vocab_size * config.hidden_size


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.2},
    "high": {"dola_layers": "high"},
    "embedding": {"dola_layers": [0, 1], "use_cache": False},
    "samples": {"do_sample": True, "seed": 3, "num_return_sequences": 3, "top_logprobs": 2},
    "processors": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 1},
    "adapter": {"lora": "one", "dola_layers": [0, 1]},
    "watched": {"watch": ["logits", "final"]},
}


@pytest.mark.parametrize("backend", [pytest.param("numpy", marks=pytest.mark.slow), "cpu"])
def test_a_request_gives_the_same_alone_and_beside_others_that_stay_the_same(tmp_path: Path, backend: str) -> None:
    folder = write_checkpoint(tmp_path / "model", seed=3)
    adapters = {"one": write_adapter(tmp_path / "one")}
    engine = Engine(folder, backend=backend, max_batch_size=9, adapters=adapters)
    asked = [("a list of colors", {"dola_layers": "low"} | LENGTH | fields) for fields in KINDS.values()]
    asked += [("hello", LENGTH), ("the end", LENGTH | {"num_beams": 2}), ("hello", LENGTH | {"lora": "one"})]
    alone = [engine.generate(prompt, **fields) for prompt, fields in asked]
    together = engine.run([engine.request(prompt, **fields) for prompt, fields in asked])
    for expected, result in zip(alone, together, strict=True):
        assert_same_results(result, expected)
    texts = {result.text for result in together}
    assert len(texts) > 6
    watched = together[[*KINDS].index("watched")].watched
    assert {name: len(rows) for name, rows in watched.items()} == dict.fromkeys(watched, len(watched["final"]))


def test_what_it_does_not_go_with_is_refused(tmp_path: Path) -> None:
    engine = Engine()
    for fields, message in (
        ({"num_beams": 2}, "num_beams=2 and dola_layers=low each select a strategy"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0 and dola_layers=low each select a strategy"),
        ({"do_sample": True, "mirostat": 2}, "dola_layers='low' with mirostat=2"),
        ({"guided_regex": "a"}, "guided_regex goes with greedy search, sampling, beam search and particles"),
    ):
        with pytest.raises(ParameterError, match=message):
            engine.request("hello", dola_layers="low", **fields)  # type: ignore[arg-type]
    t5 = Engine(seq2seq.write_checkpoint(tmp_path))
    with pytest.raises(ParameterError, match="dola_layers='low' is not offered with an encoder-decoder: leave it out"):
        t5.request([5], dola_layers="low")


def test_a_number_that_is_none_is_an_error_of_the_request_alone() -> None:
    """A hidden state that overflows with the head, which the final norm would have made small."""
    model = tiny_model("untied", seed=2)
    model.embedding.tokens.data[6] *= 1e18  # type: ignore[attr-defined]
    model.head.weight.data[...] *= 1e22  # type: ignore[attr-defined]
    loop = loop_of(target=runner_of(model))
    failing, other = (
        loop.add(request_for([5, 6], max_new_tokens=2, **fields)) for fields in ({"dola_layers": (0,)}, {})
    )
    events = [event for _ in range(8) for event in loop.step()]
    assert {event.request_id for event in events if event.error is not None} == {failing}
    assert {event.request_id for event in events if event.finish_reason == "length"} == {other}


@pytest.mark.longer
def test_preempted_requests_go_on_as_they_would_have() -> None:
    asked = [request_for(p, dola_layers=(0, 1)) for p in random_prompts(8, seed=4)]
    small, roomy = (runner_of(tiny_model(seed=2), pages=pages, page_size=4) for pages in (24, 300))
    loop = loop_of(target=small, headroom=1, chunk=9)
    together = run(loop, asked)
    assert loop.stats.preemptions > 2
    for request, [result] in zip(asked, together, strict=True):
        assert result.token_ids == run(loop_of(target=roomy), [request])[0][0].token_ids
