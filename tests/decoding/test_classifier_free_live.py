"""Classifier-free guidance against transformers' own in greedy search.

In beam search its negative texts do not follow their beams: there a processor computes the text of each beam anew.
"""

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

import torch

from minillm.backends.numpy import NumpyBackend
from minillm.formats.load_model import load_model

from .. import huggingface
from ..comparing import first_difference
from ..tiny import generate, random_prompts, runner_of

pytestmark = pytest.mark.reference

PROMPTS = random_prompts(4, seed=3)
NEGATIVE = [30, 31, 32, 5, 60, 61]
CASES: list[dict[str, Any]] = [
    {"guidance_scale": 1.5},
    {"guidance_scale": 4.0, "negative_prompt": NEGATIVE},
    {"guidance_scale": 0.5, "negative_prompt": NEGATIVE},
    {
        "guidance_scale": 2.0, "negative_prompt": NEGATIVE, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2,
        "sequence_bias": [[[9], 3.5], [[20, 21], -4.0]], "eos_token_id": [5, 17, 60], "min_new_tokens": 4,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    theirs = huggingface.build(seed=4)
    folder = huggingface.save(theirs, tmp_path_factory.mktemp("live"))
    backend = NumpyBackend()
    return theirs, runner_of(load_model(folder, backend), pages=128, page_size=16, backend=backend)


@pytest.mark.parametrize("fields", CASES, ids=["no negative prompt", "away", "towards", "processors"])
def test_greedy_tokens_are_theirs(fields: dict[str, Any], models) -> None:
    theirs, runner = models
    ours = generate(runner, PROMPTS, max_new_tokens=16, **fields)
    changed = 0
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        (expected,), _ = huggingface.generate(theirs, prompt, max_new_tokens=16, use_cache=False, **fields)
        assert first_difference(tokens, expected) is None
        (plain,), _ = huggingface.generate(theirs, prompt, max_new_tokens=16)
        changed += tokens != plain[: len(tokens)]
    assert changed >= 3


@pytest.mark.parametrize("fields", CASES[1:], ids=["away", "towards", "processors"])
def test_beams_are_those_of_the_scores(fields: dict[str, Any], models) -> None:
    theirs, runner = models
    others = {name: value for name, value in fields.items() if name not in ("guidance_scale", "negative_prompt")}

    def first_of_all(ids: Any, scores: Any) -> Any:
        """What theirs does, as the first processor; minillm's beams rank by log-probabilities, as theirs do."""
        new = ids[:, length:]
        negative = torch.cat([torch.tensor([NEGATIVE]).expand(len(ids), -1), new], dim=1)
        with torch.no_grad():
            unconditional = theirs(negative).logits[:, -1].log_softmax(-1)
        return fields["guidance_scale"] * (scores - unconditional) + unconditional

    others.pop("repetition_penalty", None)  # a function of the user's comes after these
    others.pop("sequence_bias", None)
    ours = generate(runner, PROMPTS, max_new_tokens=10, num_beams=3, **others, **dict([*fields.items()][:2]))
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        length = len(prompt)
        (expected,), _ = huggingface.generate(
            theirs, prompt, max_new_tokens=10, num_beams=3, logits_processor=[first_of_all], **others
        )
        assert first_difference(tokens, expected) is None
