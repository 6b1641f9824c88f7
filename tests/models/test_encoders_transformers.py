"""Encoders, and heads of labels on encoders and on every decoder, against transformers as it runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
transformers = pytest.importorskip("transformers", reason="needs the reference extra")

from minillm import Engine  # noqa: E402
from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.formats.load_model import load_model  # noqa: E402
from minillm.models import FAMILIES  # noqa: E402
from minillm.models.heads import without_head  # noqa: E402
from minillm.runner.layer_mean import LayerMean  # noqa: E402
from minillm.text.tokenizer import Tokenizer, encode_texts  # noqa: E402

from .. import families, huggingface  # noqa: E402
from ..encoders import CONFIGS, OF_TRANSFORMERS, runner_over, sequence_of, states, texts  # noqa: E402

pytestmark = pytest.mark.reference

NO_CLASS = {"granite", "lfm2", "olmoe", "cohere", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe", "glm4_moe"}
NO_CLASS |= {"internlm3", "minimax_m2", "qwen3_5_moe_text", "gemma4_text", "glm4_moe_lite", "youtu"}
NO_CLASS |= {"lfm2_moe", "granitemoe", "granitemoeshared", "granitemoehybrid", "bamba", "nemotron_h", "falcon_h1"}
"""Families of which transformers has no classifier"""


def inputs(model: Any, ids: list[int], types: Any) -> dict[str, Any]:
    given = {"input_ids": torch.tensor([ids])}
    if types:
        given["token_type_ids"] = torch.tensor([list(types)])
    return given


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@torch.no_grad()
def test_hidden_states_and_logits(name: str, tmp_path: Path) -> None:
    raw = CONFIGS[name]
    labels = any("SequenceClassification" in each for each in raw.get("architectures", []))
    theirs = huggingface.build_encoder(raw, labels=labels)
    theirs.save_pretrained(tmp_path)
    backend = NumpyBackend()
    model = load_model(tmp_path, backend)
    ids = texts(5, seed=7)
    runner, bare = runner_over(model, backend), runner_over(without_head(model), backend)
    for each, ours in zip(ids, states(bare, ids), strict=True):
        given = inputs(theirs, each, sequence_of(model, each).types)
        expected = theirs.base_model(**given).last_hidden_state[0].numpy()
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
        if labels:
            [rows] = states(runner, [each])
            np.testing.assert_allclose(rows[0], theirs(**given).logits[0].numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@torch.no_grad()
def test_the_mean_over_layers_is_that_of_the_states_of_there(name: str, tmp_path: Path) -> None:
    theirs = huggingface.build_encoder(CONFIGS[name])
    theirs.save_pretrained(tmp_path)
    backend = NumpyBackend()
    model = load_model(tmp_path, backend)
    [ids] = texts(1, seed=7)
    sequence = sequence_of(model, ids)
    expected = theirs.base_model(**inputs(theirs, ids, sequence.types), output_hidden_states=True).hidden_states
    weights = [*(1.5, -0.25, 0.0, 0.5)[: len(expected) - 1], 0.75]
    mean, rows = LayerMean(weights), [0, len(ids) - 1]
    last = runner_over(without_head(model), backend).forward([sequence], [len(ids)], rows=rows, exits=mean).logits
    total = sum(weight * state[0, rows].numpy() for weight, state in zip(weights, expected, strict=True))
    np.testing.assert_allclose(mean.of(np.array(last)), total / sum(weights), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_labels_of_decoders(family: str, tmp_path: Path) -> None:
    """The last token that is no padding is read, whatever stands before it."""
    raw = next(iter(families.CONFIGS[family].values())) | {"num_labels": 3, "pad_token_id": 0}
    try:
        theirs = huggingface.build_encoder(raw, labels=True)
    except ValueError as error:
        assert family in NO_CLASS, error
        pytest.skip(f"transformers has no classifier of {family}")
    theirs.save_pretrained(tmp_path)
    lines = [*texts(4, seed=2), [5, 0, 7, 8], [5, 6, 7, 0, 0]]
    with Engine(tmp_path, backend="numpy") as engine:
        results, near = engine.classify(lines), huggingface.tolerance(engine.config)
        for line, ours, vectors in zip(lines, results, engine.hidden_states(lines), strict=True):
            expected = theirs(torch.tensor([line])).logits[0].numpy()
            np.testing.assert_allclose(ours.logits, expected, rtol=0, atol=near)
            hidden = theirs.base_model(torch.tensor([line])).last_hidden_state[0].numpy()
            if line[-1]:  # transformers may number the positions of padding in another way
                np.testing.assert_allclose(vectors, hidden, rtol=0, atol=near)


WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghij",
    "##a",
    "##b",
    "##c",
    "##ing",
    "run",
    "été",
    "ete",
    "!",
]
TEXTS = ["", "a", "Running ÉTÉ!", "a b c d e f g h i j" * 3, "你好 a", "[SEP] a [MASK]b", "  a\t\nb  ", "x" * 120]


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"strip_accents": False}])
def test_wordpiece_and_pairs_cut_to_a_length(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), **settings)
    ours = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        for other in TEXTS[1:]:  # transformers takes an empty second text for none
            for limit in (None, 4, 9, 16):
                cut = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
                expected = theirs(text, other, **cut)
                found = encode_texts(ours, text, other, limit=limit)
                assert (found.token_ids, found.types) == (expected["input_ids"], expected["token_type_ids"])
