"""Dynamic rotary scaling: keys depend on the length of their text, so texts share none and no guesses are run."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm import Engine
from minillm.errors import ParameterError

from ..models.test_llama import CONFIG
from ..tiny import TOKENIZER, tiny_tensors

DYNAMIC: dict[str, Any] = CONFIG | {
    "vocab_size": 512,
    "max_position_embeddings": 16,
    "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
}
LINE = np.random.default_rng(0).integers(3, 96, 40).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dynamic")
    (path / "config.json").write_text(json.dumps(DYNAMIC), encoding="utf-8")
    save_file({name: tensor.load() for name, tensor in tiny_tensors(DYNAMIC).items()}, path / "model.safetensors")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, path / name)
    return path


def test_no_prefix_is_kept_and_it_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    greedy: dict[str, Any] = {"max_new_tokens": 10, "no_repeat_ngram_size": 2}
    caplog.set_level(logging.INFO, "minillm")
    with Engine(folder, backend="numpy", prefix_cache=False) as plain, Engine(folder, backend="numpy") as engine:
        assert "the prefix cache is off: with this rotary scaling" in caplog.text
        engine.generate(LINE[:30], **greedy)
        assert engine.generate(LINE, **greedy).token_ids == plain.generate(LINE, **greedy).token_ids


@pytest.mark.parametrize("field", ["prompt_lookup_num_tokens", "lookahead_window"])
def test_guesses_are_refused(folder: Path, field: str) -> None:
    with Engine(folder, backend="numpy") as engine:
        with pytest.raises(ParameterError, match=f"{field} would change the results"):
            engine.generate(LINE, max_new_tokens=5, **{field: 3})
        assert engine.generate(LINE, max_new_tokens=5, **{field: 0}).token_ids


def test_a_draft_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ParameterError, match="draft would change the results"):
        Engine(folder, backend="numpy", draft=folder)
    with caplog.at_level(logging.WARNING), Engine(folder, backend="numpy", amateur=folder) as engine:
        assert engine.generate(LINE, max_new_tokens=5).token_ids
