"""Encoder-decoders that classify texts: BART, mBART, T5 and mT5."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.errors import PromptError, TaskError, UnsupportedModelError
from minillm.models import config_of

from ..seq2seq import CONFIGS, write_checkpoint
from ..tiny import random_prompts

CLASSES = {"bart": "Bart", "mbart": "MBart", "t5": "T5", "mt5": "MT5"}
END = 2


def fields_of(family: str) -> dict[str, Any]:
    labels = {"0": "no", "1": "maybe", "2": "yes"}
    return {"architectures": [f"{CLASSES[family]}ForSequenceClassification"], "eos_token_id": END, "id2label": labels}


def sources() -> list[list[int]]:
    """Texts of different lengths, with one end or two, and tokens after the last in some."""
    texts = [[*(token for token in ids if token != END), END] for ids in random_prompts(4, seed=5, longest=30)]
    return [*texts, [7, 8, END, 9, END, 11], [7, END, END, 5]]


@pytest.mark.reference
@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("family", CLASSES)
def test_labels_are_theirs(family: str, backend: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the reference extra")
    from .. import huggingface

    raw = next(iter(CONFIGS[family].values())) | fields_of(family)
    theirs = huggingface.build_encoder(raw | {"num_labels": 3}, labels=True)
    theirs.save_pretrained(tmp_path)
    with Engine(tmp_path, backend=backend, progress=False) as engine, torch.no_grad():
        results: Any = engine.classify(sources())
        for ids, result in zip(sources(), results, strict=True):
            expected = theirs(torch.tensor([ids])).logits[0].numpy()
            np.testing.assert_allclose(result.logits, expected, rtol=0, atol=2e-4)
            assert result.label == theirs.config.id2label[int(expected.argmax())]


def test_a_text_has_the_same_labels_in_any_company(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "t5", **fields_of("t5"))
    with Engine(tmp_path, backend="numpy", progress=False) as engine:
        assert engine.labels == ("no", "maybe", "yes")
        together: Any = engine.classify(sources())
        for ids, result in zip(sources(), together, strict=True):
            alone: Any = engine.classify(ids)
            np.testing.assert_allclose(result.logits, alone.logits, rtol=0, atol=1e-5)
        assert np.ptp([result.logits for result in together], axis=0).max() > 0.01
        with pytest.raises(PromptError, match="at its end-of-sequence token: this one has none"):
            engine.classify([[5, 6, 7]])
        for call in (engine.embed, engine.hidden_states):
            with pytest.raises(TaskError, match="is an encoder-decoder: it classifies text"):
                call([[5, 6, END]])
        with pytest.raises(TaskError, match="classifies texts: use classify"):
            engine.generate([5, 6, END])


def test_another_head_of_an_encoder_decoder_is_refused_by_name() -> None:
    raw = next(iter(CONFIGS["bart"].values()))
    for kind in ("BartForQuestionAnswering", "BartForTokenClassification"):
        with pytest.raises(UnsupportedModelError, match=f"{kind}.*generates text, and ...ForSequenceClassification"):
            config_of(raw | {"architectures": [kind]})
