"""Whole generations with processors against transformers' generate, each prompt alone there, a ragged batch here."""

import pytest

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

from minillm.backends.numpy import NumpyBackend
from minillm.formats.load_model import load_model

from .. import huggingface
from ..comparing import first_difference
from ..tiny import generate, random_prompts, runner_of

pytestmark = pytest.mark.reference

EOS = [5, 17, 60]
CASES = [
    {"sequence_bias": [[[9], 3.5], [[17], 6.0], [[20, 21], -4.0]]},
    {"no_repeat_ngram_size": 1, "eos_token_id": EOS},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 0.7},
    {"bad_words_ids": [[i] for i in range(3, 60, 2)] + [[70, 71]], "eos_token_id": EOS},
    {"forced_eos_token_id": 5, "max_new_tokens": 7},
    {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": EOS},
    {"suppress_tokens": list(range(40, 90)), "begin_suppress_tokens": list(range(20, 40))},
    {"prefix_allowed_tokens_fn": lambda batch_id, ids: [int(ids[-1]) * k % 96 for k in (3, 5, 7, 11)]},
    {
        "no_repeat_ngram_size": 2, "bad_words_ids": [[8], [30]], "min_new_tokens": 4, "eos_token_id": EOS,
        "exponential_decay_length_penalty": (6, 1.2), "suppress_tokens": [50], "repetition_penalty": 1.2,
        "sequence_bias": [[[5], 2.0], [[33, 34], 9.0]],
    },
]  # fmt: skip


PROMPTS = random_prompts(4, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    theirs = huggingface.build(seed=4)
    folder = huggingface.save(theirs, tmp_path_factory.mktemp("live"))
    backend = NumpyBackend()
    runner = runner_of(load_model(folder, backend), pages=128, page_size=16, backend=backend)
    plain = {tuple(prompt): huggingface.generate(theirs, prompt, max_new_tokens=16)[0][0] for prompt in PROMPTS}
    return theirs, runner, plain


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("fields", CASES, ids=[" ".join(fields) for fields in CASES])
def test_tokens_are_theirs(fields, num_beams: int, models) -> None:
    theirs, runner, plain = models
    asked = {"max_new_tokens": 16, "num_beams": num_beams} | fields
    if num_beams > 1:
        asked["renormalize_logits"] = True
    ours = generate(runner, PROMPTS, **asked)
    changed = 0
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        (expected,), _ = huggingface.generate(theirs, prompt, **asked)
        assert first_difference(tokens, expected) is None
        changed += tokens != plain[tuple(prompt)][: len(tokens)]
    assert changed >= 3
