"""DoLa against its formula on the hidden states of transformers' models, of each family, six layers deep."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

import torch

from minillm.backends.numpy import NumpyBackend
from minillm.decoding.dola import premature_layers
from minillm.errors import ParameterError
from minillm.formats.load_model import load_model

from .. import huggingface
from ..comparing import assert_same_tokens
from ..families import CONFIGS
from ..tiny import loop_of, request_for, run, runner_of

pytestmark = pytest.mark.reference

PROMPT = [40, 41, 42, 7, 8, 60]
FAMILIES = [family for family in CONFIGS if not family.startswith("granite")]


def deeper(raw: dict[str, Any]) -> dict[str, Any]:
    """A config.json of six layers."""
    name = "n_layer" if "n_layer" in raw else "num_hidden_layers"
    lists = [field for field in ("layer_types", "layers_block_type") if field in raw]
    kinds = {field: (raw[field] * 6)[:6] for field in lists}
    return raw | {name: 6} | kinds


@torch.no_grad()
def formula(model: Any, tokens: list[int], layers: list[int]) -> np.ndarray:
    """The scores of the next token. -> [V] float64"""
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    head = model.get_output_embeddings()
    final = out.logits[0, -1].double().log_softmax(-1)
    early = torch.stack([head(out.hidden_states[layer][0, -1]) for layer in layers]).double().log_softmax(-1)  # [L, V]
    middle = (final.exp() + early.exp()) / 2
    distance = (middle * (middle.log() - final) + middle * (middle.log() - early)).sum(-1)  # [L]
    scores = final - early[distance.argmax()]
    scores[final < final.max() + np.log(0.1)] = -torch.inf
    return scores.numpy()


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.exhaustive if i % 4 else []) for i, name in enumerate(FAMILIES)],
)
def test_greedy_tokens_are_the_formulas(family: str, tmp_path: Any) -> None:
    theirs = huggingface.build_model(deeper(next(iter(CONFIGS[family].values()))), seed=4)
    runner = runner_of(load_model(huggingface.save(theirs, tmp_path), NumpyBackend()), pages=300, page_size=16)
    config = runner.model.config
    choices = [premature_layers(value, config) for value in ("low", "high", (0, 1, 3, 5))]
    requests = [
        request_for(PROMPT, max_new_tokens=8, dola_layers=layers, vocab_size=config.vocab_size) for layers in choices
    ]
    for layers, [result] in zip(choices, run(loop_of(target=runner), requests), strict=True):

        def scores(tokens: list[int], layers: Any = layers) -> np.ndarray:
            return formula(theirs, PROMPT + tokens, [*layers])

        expected: list[int] = []
        while len(expected) < 8:
            expected.append(int(scores(expected).argmax()))
        assert_same_tokens(result.token_ids, expected, scores)


def test_granite_is_refused(tmp_path: Any) -> None:
    theirs = huggingface.build_model(next(iter(CONFIGS["granite"].values())))
    model = load_model(huggingface.save(theirs, tmp_path), NumpyBackend())
    with pytest.raises(ParameterError, match="dola_layers is not offered with Granite"):
        premature_layers("low", model.config)
