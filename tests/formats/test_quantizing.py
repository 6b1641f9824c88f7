"""Checkpoints written in 16, 8 or 4 bits, and what is loaded from them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from minillm import Engine
from minillm.backends.formats import FORMATS
from minillm.backends.numpy import NumpyBackend
from minillm.backends.placement import Placement, choose_backend
from minillm.backends.storage import expand, narrow
from minillm.batch import TokenSequence
from minillm.formats import open_checkpoint
from minillm.formats.load_model import load_model
from minillm.formats.write_checkpoint import DTYPES, write_checkpoint
from minillm.models.base import weights_of
from minillm.progress import watching
from minillm.reference.quantize import Quantized, quantize

from ..tiny import logits_of, runner_of
from ..tiny import write_checkpoint as write_source

VARIANTS = ["pre-norm", "post-norm", "untied", "galactica"]
LINE = [3, 4, 5, 6, 7, 3, 90, 500]


def logits(folder: Path, dtype: str) -> np.ndarray:
    return logits_of(runner_of(load_model(folder, NumpyBackend(weights=dtype))), LINE)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_is_what_would_be_rounded_at_load(tmp_path: Path, variant: str, dtype: str) -> None:
    """Bit by bit: the folder loads to the weights that the source gives with the same dtype, fused and padded alike.

    Widths of 40 and 24 are no multiples of 32.
    """
    source = write_source(tmp_path / "source", variant)
    write_checkpoint(source, tmp_path / "out", dtype)
    loaded = weights_of(load_model(tmp_path / "out", NumpyBackend(weights=dtype)))
    expected = weights_of(load_model(source, NumpyBackend(weights=dtype)))
    assert [weight.name for weight in loaded] == [weight.name for weight in expected]
    for weight, other in zip(loaded, expected, strict=True):
        if other.data is None:
            assert weight.data is None
            continue
        assert isinstance(weight.data, Quantized) == isinstance(other.data, Quantized)
        np.testing.assert_array_equal(expand(weight.data), expand(other.data), strict=True)
        assert (weight.bias is None) == (other.bias is None)
        if other.bias is not None:
            np.testing.assert_array_equal(weight.bias, other.bias)
    auto = logits(tmp_path / "out", "auto")
    np.testing.assert_allclose(auto, logits(source, dtype), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits(tmp_path / "out", "float32"), auto, atol=1e-5)
    assert np.abs(auto - logits(source, "float32")).max() > 1e-4


@pytest.mark.parametrize(("dtype", "group"), [("int8", 32), ("int4", 64)])
def test_what_the_files_hold(tmp_path: Path, dtype: str, group: int) -> None:
    source = write_source(tmp_path / "source")
    write_checkpoint(source, tmp_path / "out", dtype, group)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    bits = int(dtype[3:])
    assert config.pop("quantization_config") == {"quant_method": "minillm", "bits": bits, "group_size": group}
    assert config == json.loads((source / "config.json").read_text())
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    stored, original = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    assert kinds["embed_tokens.weight"] == "int8", "the vocabulary has 8 bits beside projections of 4"
    assert kinds["embed_positions.weight"] == "float32"
    assert kinds["layers.0.fc1.weight"] == ("int8" if bits == 8 else "uint8")
    assert {kind for name, kind in kinds.items() if name.endswith("bias") or "norm" in name} == {"float32"}
    fc2 = quantize(original["model.decoder.layers.1.fc2.weight"].load(), bits, group)  # [32, 40], padded to 64
    np.testing.assert_array_equal(stored["layers.1.fc2.weight"].map(), fc2.values)
    np.testing.assert_array_equal(stored["layers.1.fc2.weight_scale"].map(), fc2.scales)
    assert stored["layers.1.fc2.weight"].shape == (32, 64 * bits // 8)
    assert stored["layers.1.fc2.weight_scale"].shape == (32, 64 // group)


def test_weights_are_mapped_and_not_copied(tmp_path: Path) -> None:
    """Those that are fused too: they lie side by side. What is rounded at load is a copy, so the test can tell."""
    source = write_source(tmp_path / "source", hidden_size=64, ffn_dim=64, word_embed_proj_dim=64)
    for dtype in ("int8", "int4", "bfloat16"):
        write_checkpoint(source, tmp_path / dtype, dtype)
        backend = NumpyBackend(weights="auto")
        backend.loader.kept = tuple(FORMATS[name] for name in ("int8", "int4", "bfloat16"))
        matrices = [w.data for w in weights_of(load_model(tmp_path / dtype, backend)) if len(w.shape) == 2]
        assert len(matrices) == 2 + 2 * 4
        for data in matrices:
            for array in (data.values, data.scales) if isinstance(data, Quantized) else (data,):
                assert not array.flags.owndata and not array.flags.writeable
                assert array.ctypes.data % 64 == 0
    copies = [w.data for w in weights_of(load_model(source, NumpyBackend(weights="int8"))) if len(w.shape) == 2]
    assert any(data.values.flags.owndata for data in copies if isinstance(data, Quantized))


@pytest.mark.parametrize("dtype", ["int8", "int4", "bfloat16"])
def test_the_kernels_of_a_cpu_compute_with_it(tmp_path: Path, dtype: str) -> None:
    """On mapped, read-only and padded weights, for one row, a few and many: near the reference on the same folder."""
    write_checkpoint(write_source(tmp_path / "source", "post-norm"), tmp_path / "out", dtype)
    backend, line = choose_backend(Placement(backend="cpu"), 1), LINE * 3
    model = load_model(tmp_path / "out", backend)
    assert {kind_of(w.data) for w in weights_of(model) if len(w.shape) == 2} >= {dtype}
    exact = logits_of(runner_of(load_model(tmp_path / "out", NumpyBackend(weights="auto"))), line)
    for count in (24, 8):
        sequence = TokenSequence(line[:count])
        output = runner_of(model, backend=backend).forward([sequence], [count], rows=range(count))
        np.testing.assert_allclose(output.logits, exact[:count], atol=0.02 * np.abs(exact).max())
    with Engine(tmp_path / "out", backend="cpu") as engine, Engine(tmp_path / "out", backend="numpy") as plain:
        fields = {"max_new_tokens": 10, "eos_token_id": [], "logprobs": True}
        first, second = (e.generate(LINE[:5], **fields).completions[0] for e in (engine, plain))
        assert first.logprobs[0] == pytest.approx(second.logprobs[0], abs=0.05)


def kind_of(data: Any) -> str:
    return f"int{data.bits}" if isinstance(data, Quantized) else {"uint16": "bfloat16"}.get(data.dtype.name, "float32")


@pytest.mark.slow
def test_loading_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    """Of 50 MB of weights a process that has loaded them holds less than 10 MB."""
    fields = {"hidden_size": 1024, "ffn_dim": 4096, "word_embed_proj_dim": 1024, "num_hidden_layers": 4}
    write_checkpoint(write_source(tmp_path / "source", **fields), tmp_path / "out", "int8")
    code = (
        "import sys; from pathlib import Path; from minillm.backends.numpy import NumpyBackend\n"
        "from minillm.formats.load_model import load_model\n"
        "peak = lambda: int(next(l for l in open('/proc/self/status') if 'VmHWM' in l).split()[1])\n"
        "before = peak(); model = load_model(Path(sys.argv[1]), NumpyBackend(weights='auto')); print(peak() - before)"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of a process's memory is read from /proc")
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], capture_output=True, text=True, check=True)
    assert sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors")) > 50e6
    assert int(result.stdout) < 10_000


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_keeps_what_is_quantised_and_computes_in_float32_with_the_rest(tmp_path: Path, dtype: str) -> None:
    write_checkpoint(write_source(tmp_path / "source"), tmp_path / "out", dtype)
    with Engine(tmp_path / "out", backend="numpy") as engine:
        kinds = {kind_of(weight.data) for weight in weights_of(engine.runner.model)}
    assert kinds == ({"float32"} if dtype.endswith("16") else {"float32", "int8", dtype})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_folder_expands_piece_by_piece(tmp_path: Path, monkeypatch, dtype: str) -> None:
    write_checkpoint(write_source(tmp_path / "source"), tmp_path / "out", "int4")
    monkeypatch.setattr("minillm.formats.schemes.minillm.CHUNK", 100)  # numbers: three rows
    kept, loaded = (weights_of(load_model(tmp_path / "out", NumpyBackend(weights=word))) for word in ("auto", dtype))
    for weight, whole in zip(loaded, kept, strict=True):
        exact = expand(whole.data)
        expected = narrow(exact, FORMATS[dtype]) if dtype == "bfloat16" and exact.ndim == 2 else exact
        np.testing.assert_array_equal(weight.data, expected, strict=True)


def test_shards_and_other_formats_of_the_source(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    write_checkpoint(source, tmp_path / "half", "float16")
    write_checkpoint(tmp_path / "half", tmp_path / "whole", "int4")
    write_checkpoint(tmp_path / "half", tmp_path / "sharded", "int4", shard_bytes=5000)
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    sharded, whole = (logits(tmp_path / name, "auto") for name in ("sharded", "whole"))
    np.testing.assert_allclose(sharded, whole, rtol=1e-4, atol=1e-5)
    write_checkpoint(tmp_path / "half", tmp_path / "sharded halves", "bfloat16", shard_bytes=20_000)
    write_checkpoint(tmp_path / "sharded halves", tmp_path / "again", "int8")
    assert np.isfinite(logits(tmp_path / "again", "auto")).all()


def test_sixteen_bits_make_an_ordinary_checkpoint(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", torch_dtype="float32")
    write_checkpoint(source, tmp_path / "out", "bfloat16")
    stored, original = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    assert set(stored) == set(original)
    assert {t.dtype for t in stored.values() if len(t.shape) == 2} == {"bfloat16"}
    assert {t.dtype for t in stored.values() if len(t.shape) == 1} == {"float32"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_the_errors_are_those_of_what_is_stored(dtype: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    found = {one.name.removeprefix("model.decoder."): one for one in write_checkpoint(source, tmp_path / "out", dtype)}
    before = load_file(source / "model.safetensors")
    for name, one in found.items():
        exact = before[f"model.decoder.{name}"].astype(np.float64)
        if dtype == "int8":
            after = load_file(tmp_path / "out" / "model.safetensors")
            scales = np.repeat(after[f"{name}_scale"].astype(np.float64), 32, axis=1)
            values = (after[name] * scales)[:, : exact.shape[1]]
        else:
            values = open_checkpoint(tmp_path / "out")[f"model.decoder.{name}"].load()
        assert one.error == pytest.approx(np.linalg.norm(values - exact) / np.linalg.norm(exact), rel=1e-4)
        assert one.format.name == dtype
    matrices = {name for name, array in before.items() if array.ndim > 1 and "positions" not in name}
    assert {f"model.decoder.{name}" for name in found} - {"model.decoder.embed_positions.weight"} == matrices


def test_progress_ends_with_every_number(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    told: list[tuple[int, int]] = []
    with watching(lambda work: told.append((work.done, work.total))):
        write_checkpoint(source, tmp_path / "out", "int4")
    total = sum(int(np.prod(tensor.shape)) for tensor in open_checkpoint(source).values())
    assert told[-1] == (total, total) and {of for _, of in told} == {total}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
