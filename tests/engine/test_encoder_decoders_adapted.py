"""Encoder-decoders with LoRA adapters, merged or of single requests, and written in 8 bits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minillm import Engine
from minillm.backends.numpy import NumpyBackend
from minillm.formats.load_model import load_model
from minillm.formats.write_checkpoint import write_checkpoint as quantise

from .. import seq2seq
from ..adapters import LORA
from ..models.test_golden_encoder_decoders import folder_of
from ..seq2seq import GOLDEN_CASES, logits_of
from ..tiny import runner_of

SOURCE, LINE = [9, 8, 7, 6, 5], [0, 5, 6, 7]
CHANGED = (
    "encoder.block.0.layer.0.SelfAttention.q",
    "decoder.block.1.layer.1.EncDecAttention.v",
    "decoder.block.0.layer.2.DenseReluDense.wo",
)
"""Parts of fused projections of both stacks, and of cross-attention"""


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A model, an adapter of it, and the model with the adapter added by hand."""
    base = seq2seq.write_checkpoint(tmp_path / "base", "t5", "original")
    rng, tensors, adapter = np.random.default_rng(0), load_file(base / "model.safetensors"), {}
    for module in CHANGED:
        outputs, inputs = tensors[f"{module}.weight"].shape
        a, b = rng.normal(0, 0.3, (3, inputs)), rng.normal(0, 0.3, (outputs, 3))
        adapter[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
        adapter[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"] + 2 * b @ a).astype(np.float32)
    merged = seq2seq.write_checkpoint(tmp_path / "merged", "t5", "original")
    save_file(tensors, merged / "model.safetensors")
    (tmp_path / "adapter").mkdir()
    fields: dict[str, Any] = {"task_type": "SEQ_2_SEQ_LM", "target_modules": list(CHANGED)}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(LORA | fields), encoding="utf-8")
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")
    return {"base": base, "adapter": tmp_path / "adapter", "merged": merged}


def test_an_adapter_changes_encoder_and_decoder_of_its_requests_alone(folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {"backend": "numpy", "progress": False}
    with Engine(folders["merged"], **options) as engine:
        expected, tokens = engine.forward(LINE, source=SOURCE), engine.generate(SOURCE, max_new_tokens=8).token_ids
    with Engine(folders["base"], adapters={"one": folders["adapter"]}, **options) as engine:
        np.testing.assert_allclose(engine.forward(LINE, source=SOURCE, lora="one"), expected, rtol=0, atol=1e-4)
        plain = engine.forward(LINE, source=SOURCE)
        assert np.abs(plain - expected).max() > 1e-2
        requests = [engine.add(SOURCE, max_new_tokens=8, lora=name) for name in ("one", None)]
        found: dict[int, list[int]] = {request: [] for request in requests}
        while engine.busy:
            for event in engine.step():
                found[int(event.request_id)] += event.token_ids
        assert found[requests[0]] == tokens
        assert found[requests[1]] == engine.generate(SOURCE, max_new_tokens=8).token_ids
    with Engine(folders["base"], adapter=folders["adapter"], **options) as engine:
        np.testing.assert_allclose(engine.forward(LINE, source=SOURCE), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", GOLDEN_CASES, ids="-".join)
@pytest.mark.slow
def test_what_is_written_in_8_bits_is_what_would_be_rounded_at_load(case: tuple[str, str], tmp_path: Path) -> None:
    quantise(folder_of(case), tmp_path / "out", "int8", progress=False)
    written, rounded, exact = (
        logits_of(runner_of(load_model(folder, NumpyBackend(weights=dtype))), SOURCE, LINE)
        for folder, dtype in ((tmp_path / "out", "auto"), (folder_of(case), "int8"), (folder_of(case), "float32"))
    )
    np.testing.assert_allclose(written, rounded, rtol=1e-4, atol=1e-4)
    assert 1e-5 < np.linalg.norm(written - exact) / np.linalg.norm(exact) < 0.2
