"""Published quantised checkpoints: the same model as the ordinary checkpoint of what their tensors mean."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from minillm import Engine
from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.cpu.compiling import available
from minillm.backends.numpy import NumpyBackend
from minillm.backends.storage import Joined, expand
from minillm.cli.main import run as cli
from minillm.errors import CheckpointError, MinillmError, ParameterError, UnsupportedModelError
from minillm.formats.load_model import load_model
from minillm.formats.schemes import matrix, read_quantization
from minillm.formats.write_checkpoint import write_checkpoint
from minillm.models.base import weights_of
from minillm.reference.blocks import BlockMatrix
from minillm.reference.quantize import Quantized

from ..gguf_files import write_llama
from ..published import ALL, CONFIGS, Parts, Published, awq, compressed, float8, gptq, nf4, write_pair
from ..tiny import logits_of, runner_of

LINE = np.random.default_rng(2).integers(3, 96, 20).tolist()
QUICK = ("gptq-int4-asymmetric", "awq", "compressed-packed-int4-of-128", "fp8-small-blocks", "bitsandbytes-nf4-nested")
"""One of each method; the rest takes long"""
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL]
C = pytest.mark.skipif(not available(), reason="the kernels in C are not compiled here")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read 7 at a time, which divides nothing that is packed."""
    monkeypatch.setattr(matrix, "CHUNK", 7 * 64)


def pair_of(tmp_path: Path, published: str | Published, family: str = "llama", **options: Any) -> tuple[Path, Path]:
    return write_pair(tmp_path / family, family, ALL[published] if isinstance(published, str) else published, **options)


def logits(folder: Path, dtype: str = "auto") -> np.ndarray:
    return logits_of(runner_of(load_model(folder, NumpyBackend(weights=dtype))), LINE)


def projections(folder: Path, backend: Any) -> list[Any]:
    found = weights_of(load_model(folder, backend))
    return [w.data for w in found if w.role == "projection" and w.data is not None and len(w.shape) == 2]


EXPANDED = ("float32", "float16", "bfloat16")


def format_of(data: Any) -> str:
    if isinstance(data, BlockMatrix | Joined):
        (name,) = {part.form.name for part in getattr(data, "parts", [data])}
        return name
    if isinstance(data, Quantized):
        kind = "zero points" if data.has_zeros else "offsets"
        return f"int{data.bits}{'' if data.offsets is None else f' with {kind}'}"
    return "bfloat16" if data.dtype == np.uint16 else str(data.dtype)


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_the_dequantised_one(name: str, tmp_path: Path) -> None:
    """Integers are kept where that is exact; what NumPy expands are the same float32 numbers."""
    quantised, plain = pair_of(tmp_path, name)
    found, expected = projections(quantised, NumpyBackend(weights="auto")), projections(plain, NumpyBackend())
    assert len(found) == len(expected) == 8
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(expand(one), other, rtol=2e-7)
        assert format_of(one) == ("float32" if ALL[name].dtype in EXPANDED else ALL[name].dtype)
    np.testing.assert_allclose(logits(quantised), logits(plain), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=() if (i - j) % 3 == 0 else pytest.mark.exhaustive)
        for i, name in enumerate(
            ["gptq-int4", "gptq-int8-rows", "awq", "compressed-int8", "fp8-blocks", "bitsandbytes-nf4", "mlx-nvfp4"]
        )
        for j, family in enumerate(CONFIGS)
    ],
)
def test_every_kind_of_family(name: str, family: str, tmp_path: Path) -> None:
    """With biases, with other names, and with Q, K and V head by head in one matrix."""
    quantised, plain = pair_of(tmp_path, name, family)
    np.testing.assert_allclose(logits(quantised), logits(plain), atol=1e-5)
    for one in projections(quantised, NumpyBackend(weights="auto")):
        assert format_of(one) == ("float32" if ALL[name].dtype in EXPANDED else ALL[name].dtype)
    greedy: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": [], "no_repeat_ngram_size": 2}
    with Engine(quantised, backend="numpy") as engine, Engine(plain, backend="numpy") as other:
        assert engine.generate(LINE, **greedy).token_ids == other.generate(LINE, **greedy).token_ids


@C
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_the_kernels_in_c_take_the_same_formats(name: str, tmp_path: Path) -> None:
    """An expanded matrix has the checkpoint's 16 bits there. Products with integers round activations to 8 bits."""
    quantised, plain = pair_of(tmp_path, name)
    for one, other in zip(projections(quantised, CpuBackend()), projections(plain, NumpyBackend()), strict=True):
        np.testing.assert_allclose(expand(one), other, rtol=2e-7)
        assert format_of(one) == ALL[name].dtype
    greedy: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": [], "no_repeat_ngram_size": 2}
    with Engine(quantised, backend="cpu") as engine, Engine(plain, backend="numpy") as other:
        found, expected = engine.forward(LINE), other.forward(LINE)
        near = 1e-5 if ALL[name].dtype in (*EXPANDED, "NF4", "FP4") else 0.1
        assert np.linalg.norm(found - expected) < near * np.linalg.norm(expected)
        if near == 1e-5:
            assert engine.generate(LINE, **greedy).token_ids == other.generate(LINE, **greedy).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["gptq-int4-v2", "compressed-int8-asymmetric"])
def test_the_dtype_that_is_asked_for_wins(name: str, dtype: str, tmp_path: Path) -> None:
    quantised, plain = pair_of(tmp_path, name)
    found, expected = (projections(each, NumpyBackend(weights=dtype)) for each in (quantised, plain))
    for one, other in zip(found, expected, strict=True):
        assert format_of(one) == dtype
        if dtype == ALL[name].dtype or (dtype == "int8" and ALL[name].dtype == "int4"):  # nothing is rounded
            np.testing.assert_array_equal(
                expand(one), expand(projections(quantised, NumpyBackend())[0])[: len(expand(one))]
            )
            break
        np.testing.assert_array_equal(expand(one), expand(other))


@pytest.mark.longer
def test_a_fused_matrix_of_two_formats_is_quantised_where_it_is_not(tmp_path: Path) -> None:
    """Q stays as it is, in groups half as large; K, which is asymmetric, is rounded anew."""
    even, odd = gptq(size=64), gptq(size=64, symmetric=False)

    def write(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        return (odd if values.shape == (64, 128) else even).write(values)  # K and V

    quantised, plain = pair_of(tmp_path, Published(even.config, write, "int4", "float32"), hidden_size=128)
    (qkv, *_), (exact, *_) = (projections(quantised, NumpyBackend(weights=dtype)) for dtype in ("int4", "float32"))
    assert (format_of(qkv), qkv.group) == ("int4", 32)
    np.testing.assert_array_equal(expand(qkv)[:128], exact[:128])
    error = np.linalg.norm(expand(qkv)[128:] - exact[128:]) / np.linalg.norm(exact[128:])
    assert 0 < error < 0.15
    np.testing.assert_allclose(exact, projections(plain, NumpyBackend())[0], rtol=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq-int4", "awq", "fp8-small-blocks", "bitsandbytes-nf4-of-32", "compressed-nvfp4"])
def test_ranks_share_a_matrix(name: str, tmp_path: Path) -> None:
    """Rows and columns of a rank are those of the whole."""
    quantised, _ = pair_of(tmp_path, name)
    backend = NumpyBackend(weights="float32")
    wholes = projections(quantised, backend)
    shares = []
    for rank in (0, 1):
        part = weights_of(load_model(quantised, NumpyBackend(weights="auto"), rank=rank, ranks=2))
        shares.append(
            [expand(w.data) for w in part if w.role == "projection" and w.data is not None and len(w.shape) == 2]
        )
    for whole, *parts in zip(wholes, *shares, strict=True):
        if len(parts[0]) == len(whole):  # by columns
            np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
        else:
            assert sum(map(len, parts)) == len(whole)
            assert {row.tobytes() for part in parts for row in part} == {row.tobytes() for row in whole}


def stack_experts(parts: dict[str, np.ndarray]) -> None:
    """The tensors of each expert as one, as mlx-lm has them: Mixtral's w1, w3 and w2 are gate, up and down."""
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name in [name for name in parts if ".experts.0." in name]:
        layer, _, rest = name.partition(".experts.0.")
        projection, _, part = rest.partition(".")
        each = [parts.pop(f"{layer}.experts.{expert}.{rest}") for expert in range(4)]
        parts[f"{layer}.switch_mlp.{names[projection]}.{part}"] = np.stack(each)


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["mlx-int4", "mlx-nvfp4", "mlx-6-bits"])
def test_experts_that_mlx_stacks(name: str, tmp_path: Path) -> None:
    """Also with settings of their own in config.json, by the name that they have together."""
    published = ALL[name]
    module = "model.layers.1.block_sparse_moe.switch_mlp.down_proj"
    own = {field: published.config[field] for field in ("bits", "group_size", "mode") if field in published.config}
    published = replace(published, config=published.config | {"bits": 4, module: own} | own)
    quantised, plain = pair_of(tmp_path, published, "mixtral", change=stack_experts)
    np.testing.assert_allclose(logits(quantised), logits(plain), atol=1e-5)
    wrong = replace(published, config=published.config | {module: False})
    with pytest.raises(CheckpointError, match=r"experts\.0\.w2 are quantised, but config.json says that it is not"):
        logits(pair_of(tmp_path / "wrong", wrong, "mixtral", change=stack_experts)[0])


@pytest.mark.parametrize(("part", "says"), [("global_scale", "minillm reads MLX's nvfp4 without one")])
def test_a_scale_of_the_matrix_in_mlx_is_refused(part: str, says: str, tmp_path: Path) -> None:
    def add(parts: dict[str, np.ndarray]) -> None:
        parts[DOWN + part] = np.ones(1, np.float32)

    with pytest.raises(UnsupportedModelError, match=says):
        logits(pair_of(tmp_path, "mlx-nvfp4", change=add)[0])


def test_an_exponent_that_stands_for_nan_is_refused(tmp_path: Path) -> None:
    def spoil(parts: dict[str, np.ndarray]) -> None:
        parts[DOWN + "weight_scale"][3, 1] = 255

    with pytest.raises(CheckpointError, match=r"a scale of tensor .*down_proj\.weight is 255, which stands for NaN"):
        logits(pair_of(tmp_path, "compressed-mxfp4", change=spoil)[0])


def test_columns_of_ranks_that_are_no_whole_blocks_are_expanded(tmp_path: Path) -> None:
    quantised, _ = pair_of(tmp_path, "bitsandbytes-nf4")
    whole = expand(projections(quantised, NumpyBackend(weights="auto"))[1])
    part = weights_of(load_model(quantised, NumpyBackend(weights="auto"), rank=1, ranks=2))
    (own,) = [w.data for w in part if w.role == "projection" and w.data is not None and w.shape == (64, 32)][:1]
    assert format_of(own) == "float32"
    np.testing.assert_allclose(own, whole[:, 32:], rtol=2**-11)


def test_ranks_do_not_share_a_group(tmp_path: Path) -> None:
    quantised, _ = pair_of(tmp_path, "gptq-int4-of-128")
    with pytest.raises(ParameterError, match=r"o_proj\.weight: columns 0 to 32 of 64 are not whole groups of 64"):
        load_model(quantised, NumpyBackend(weights="auto"), rank=0, ranks=2)


@pytest.mark.longer
def test_the_extremes_of_8_bits_run_in_c(tmp_path: Path) -> None:
    """-128, which our own rounding never writes, among them."""
    if not available():
        pytest.skip("the kernels in C are not compiled here")

    def spread(parts: dict[str, np.ndarray]) -> None:
        for name, array in parts.items():
            if array.dtype == np.int8:
                parts[name] = np.where(array < 0, -128, 127).astype(np.int8)
            elif name.endswith("weight_scale"):
                parts[name] = (np.ones(array.shape) / 2048).astype(array.dtype)

    quantised, _ = pair_of(tmp_path, "compressed-int8", change=spread)
    with Engine(quantised, backend="cpu") as engine, Engine(quantised, backend="numpy") as other:
        found, expected = engine.forward(LINE), other.forward(LINE)
        assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


# --- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "level", "says"),
    [
        (gptq(), "INFO", "quantised by GPTQ, 4 bits, groups of 32; 14 matrices kept exactly as int4"),
        (awq(), "INFO", "quantised by AWQ, 4 bits, groups of 32; 14 matrices kept exactly as int4 with zero points"),
        (
            awq(16, dtype="float16"),
            "WARNING",
            "quantised by AWQ, 4 bits, groups of 16; 14 matrices expanded to float16",
        ),
        (
            float8("compressed-tensors", scale_shape="rows"),
            "WARNING",
            "quantised by compressed-tensors, float8 rows; 14 matrices expanded to bfloat16; activations are not",
        ),
    ],
)
def test_one_line_says_what_was_read(
    published: Published, level: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = pair_of(tmp_path, published)
    with caplog.at_level(logging.INFO, "minillm"):
        load_model(quantised, NumpyBackend(weights="auto"))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("minillm", level)
    assert record.getMessage().startswith(f"{quantised}: {says}")


def test_scales_that_float16_does_not_hold_are_not_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of 14 matrices is expanded, and its values are those of its own scales."""

    def shrink(parts: dict[str, np.ndarray]) -> None:
        scales = parts[DOWN + "weight_scale"]
        scales *= np.asarray(1e-7, scales.dtype)

    quantised, _ = pair_of(tmp_path, "compressed-packed-int4-rows", change=shrink)
    found = projections(quantised, NumpyBackend(weights="auto"))
    assert [format_of(one) for one in found] == ["int4"] * 7 + ["float32"]
    assert 0 < np.abs(found[-1]).max() < 1e-5
    assert "1 matrices expanded to bfloat16, 13 matrices kept exactly as int4" in caplog.text


@pytest.mark.parametrize(
    ("name", "field", "value", "scales"),
    [
        ("modelopt-nvfp4", "kv_cache_quant_algo", "FP8", ("k_proj.k_scale", "v_proj.v_scale")),
        ("compressed-float8-blocks", "kv_cache_scheme", {"num_bits": 8, "type": "float"}, ("k_scale", "v_scale")),
    ],
)
def test_scales_of_a_cache_in_8_bits_are_left_out_with_a_word(
    name: str, field: str, value: Any, scales: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As NVIDIA publishes its own: the cache here is at least as exact."""

    def add(parts: dict[str, np.ndarray]) -> None:
        parts.update({f"model.layers.0.self_attn.{scale}": np.float32(0.5).reshape(()) for scale in scales})

    published = replace(ALL[name], config=ALL[name].config | {field: value})
    quantised, plain = pair_of(tmp_path, published, change=add)
    np.testing.assert_allclose(logits(quantised), logits(plain), atol=1e-5)
    assert f"{field} has no effect: cache_dtype says" in caplog.text
    assert "left out, for the model has no place for them: layers.0.self_attn.k" in caplog.text


@pytest.mark.parametrize("given", [0.0, 1.0])
def test_biases_of_zeros_that_the_model_does_not_have(given: float, tmp_path: Path) -> None:
    """AutoGPTQ gave every projection one. Others than zeros would be left out in error."""

    def add(parts: dict[str, np.ndarray]) -> None:
        parts["model.layers.0.mlp.up_proj.bias"] = np.full(128, given, np.float16)

    quantised, plain = pair_of(tmp_path, "gptq-int4", change=add)
    if given:
        with pytest.raises(
            CheckpointError, match=r"holds tensor layers\.0\.mlp\.up_proj\.bias, which its config\.json"
        ):
            load_model(quantised, NumpyBackend())
    else:
        np.testing.assert_allclose(logits(quantised), logits(plain), atol=1e-5)


def test_it_is_not_quantised_once_more(tmp_path: Path) -> None:
    quantised, _ = pair_of(tmp_path, "gptq-int4")
    with pytest.raises(
        ParameterError, match="is already quantised, to GPTQ, 4 bits, groups of 32: quantise what it was"
    ):
        write_checkpoint(quantised, tmp_path / "out", "int8")


# --- what is refused -------------------------------------------------------------------------------------------------


DOWN = "model.layers.1.mlp.down_proj."


DAMAGE: list[tuple[str, str, Callable[[np.ndarray], np.ndarray] | None, str]] = [
    ("gptq-int4", "qzeros", None, r"lacks tensor .*down_proj\.qzeros, which GPTQ, 4 bits, groups of 32 needs"),
    ("gptq-int4", "qweight", None, r"lacks tensor .*down_proj\.qweight"),
    (
        "gptq-int4",
        "scales",
        lambda a: a[:3],
        r"scales should be .* of shape \[4, 64\] by GPTQ.*found float16 of .*3, 64",
    ),
    ("gptq-int4", "qweight", lambda a: a[:8], r"scales should be .* of shape \[2, 64\]"),
    (
        "gptq-int4",
        "qweight",
        lambda a: a.astype(np.int64),
        r"qweight should be int32 of shape \[any, any\].*found int64",
    ),
    (
        "gptq-int4",
        "g_idx",
        lambda a: a + 1,
        r"down_proj\.weight: the groups of its columns should be from 0 to 3, .*4",
    ),
    ("gptq-int4", "g_idx", lambda a: a - 1, "should be from 0 to 3, found -1 to 2"),
    ("awq", "qzeros", lambda a: a[:, :5], r"qzeros should be int32 of shape \[4, 8\] by AWQ.*found .*\[4, 5\]"),
    (
        "compressed-int8",
        "weight_scale",
        lambda a: a[:-1],
        r"weight_scale should be .* of shape \[64, 1\].*\[63, 1\]",
    ),
    ("compressed-int8", "weight", lambda a: a.astype(np.uint8), r"down_proj\.weight should be int8 .*found uint8"),
    ("compressed-packed-int8-float16", "weight_shape", None, r"lacks tensor .*weight_shape"),
    ("compressed-packed-int8-float16", "weight_scale", None, r"lacks tensor .*weight_scale"),
    (
        "compressed-packed-int8-float16",
        "weight_shape",
        lambda a: a * 2,
        r"weight_packed should hold a matrix of shape \[128, 256\] by .*weight_shape, found \[64, 32\]",
    ),
    ("compressed-packed-int4-asymmetric", "weight_zero_point", None, r"lacks tensor .*weight_zero_point"),
    ("fp8-small-blocks", "weight_scale_inv", lambda a: a[:, 1:], r"weight_scale_inv should be .*\[2, 4\] by FP8"),
    (
        "fp8-small-blocks",
        "weight_scale_inv",
        None,
        r"lacks scales for tensor .*down_proj\.weight, stored as float8",
    ),
    ("bitsandbytes-nf4", "weight.quant_map", lambda a: a[:8], r"quant_map should be float32 of shape \[16\]"),
    ("bitsandbytes-nf4", "weight.absmax", lambda a: a[1:], r"absmax should be float32 of shape \[128\].*\[127\]"),
    ("bitsandbytes-nf4", "weight", lambda a: a[1:], r"down_proj\.weight should be uint8 of shape \[4096, 1\]"),
    (
        "bitsandbytes-nf4",
        "weight.quant_state.bitsandbytes__nf4",
        lambda a: a[:9],
        "quant_state.*expected a JSON text",
    ),
    ("bitsandbytes-nf4", "weight.quant_state.bitsandbytes__nf4", None, r"lacks tensor .*quant_state"),
    ("bitsandbytes-nf4-nested", "weight.nested_quant_map", None, r"lacks tensor .*nested_quant_map"),
    ("bitsandbytes-int8", "SCB", lambda a: a[1:], r"SCB should be float32 of shape \[64\]"),
    ("bitsandbytes-int8", "weight_format", lambda a: a + np.uint8(2), "weight_format is 2; minillm reads 0, rows"),
    ("bitsandbytes-int8", "SCB", None, r"'.*down_proj\.weight' .* is stored as int8"),
]
"""Checkpoint, part of a module, what becomes of it (None: it is missing), and what is said"""


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [pytest.param(*case, marks=pytest.mark.slow if i % 8 else ()) for i, case in enumerate(DAMAGE)],
)
def test_a_damaged_part_is_named(
    name: str, part: str, change: Callable[[np.ndarray], np.ndarray] | None, message: str, tmp_path: Path
) -> None:
    def damage(parts: dict[str, np.ndarray]) -> None:
        found = parts.pop(DOWN + part)
        if change is not None:
            parts[DOWN + part] = change(found)
        elif part == "SCB":
            del parts[DOWN + "weight_format"]

    quantised, _ = pair_of(tmp_path, name, change=damage)
    with pytest.raises(MinillmError, match=message) as raised:
        load_model(quantised, NumpyBackend(weights="auto"))
    assert "\n" not in str(raised.value)


COMPRESSED = compressed("int-quantized").config
GROUP = COMPRESSED["config_groups"]["group_0"]


def with_weights(**fields: Any) -> dict[str, Any]:
    group = GROUP | {"weights": GROUP["weights"] | fields}
    return COMPRESSED | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("gptq", UnsupportedModelError, "quantised by 'gptq'.*those quantised by gptq, awq, compressed-tensors, fp8,"),
        *(
            (
                {"quant_method": method},
                UnsupportedModelError,
                f"quantised by '{method}'; minillm reads .*modelopt, bits",
            )
            for method in ("hqq", "aqlm", "exl2", "quark", "torchao", "fbgemm_fp8", "auto-round", "eetq")
        ),
        ({"quant_method": ["gptq"]}, UnsupportedModelError, "quantised by .'gptq'."),
        (gptq().config | {"bits": 3}, UnsupportedModelError, "bits is 3; minillm reads 4 and 8"),
        (gptq().config | {"group_size": 0}, CheckpointError, "group_size should be at least 1, found 0"),
        (gptq().config | {"group_size": None}, CheckpointError, "group_size is missing"),
        (
            gptq().config | {"checkpoint_format": "marlin"},
            UnsupportedModelError,
            "checkpoint_format is 'marlin'.*'gptq_v2'",
        ),
        (gptq().config | {"is_marlin_format": True}, UnsupportedModelError, "is_marlin_format is true"),
        (
            gptq().config | {"dynamic": {"+:.*up": {"bits": 8}}},
            UnsupportedModelError,
            "dynamic gives .* other settings",
        ),
        (awq().config | {"version": "GEMV"}, UnsupportedModelError, "version is 'gemv'; minillm runs 'gemm'"),
        (awq().config | {"bits": 8}, UnsupportedModelError, "bits is 8; minillm reads 4"),
        (COMPRESSED | {"format": "marlin-24"}, UnsupportedModelError, "format is 'marlin-24'; minillm runs 'int-quant"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, UnsupportedModelError, "of symmetric floats in groups of 16"),
        (COMPRESSED | {"format": "mxfp8-quantized"}, UnsupportedModelError, "format is 'mxfp8-quantized'"),
        (
            COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            UnsupportedModelError,
            "sparsity_config: format",
        ),
        (COMPRESSED | {"transform_config": {"config_groups": {}}}, UnsupportedModelError, "transform_config rotates"),
        (
            COMPRESSED | {"quantization_status": "calibration"},
            UnsupportedModelError,
            "quantization_status is 'calibration'",
        ),
        (COMPRESSED | {"config_groups": {}}, CheckpointError, "config_groups should describe the weights, found none"),
        (with_weights(num_bits=6), UnsupportedModelError, "weights: num_bits is 6; minillm reads 4 and 8"),
        (with_weights(type="float", num_bits=4), UnsupportedModelError, "num_bits is 4; minillm reads 8"),
        (with_weights(strategy="tensor_group"), UnsupportedModelError, "strategy is 'tensor_group'"),
        (with_weights(strategy="block"), CheckpointError, "block_structure is missing"),
        (with_weights(strategy="block", block_structure=[128]), CheckpointError, "block_structure should be two sizes"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, UnsupportedModelError, "fmt is 'e3m4'"),
        ({"quant_method": "fp8", "weight_block_size": 128}, CheckpointError, "weight_block_size should be two sizes"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            UnsupportedModelError,
            "quant_algo is 'W4A8_AWQ'; minillm runs",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            UnsupportedModelError,
            "reads NVFP4 in groups of 16",
        ),
        (
            {"quant_method": "mlx", "mode": "nvfp4", "bits": 4, "group_size": 32},
            UnsupportedModelError,
            "nvfp4 has 4 bits in groups of 16, found 4 bits in groups of 32",
        ),
        ({"quant_method": "modelopt"}, UnsupportedModelError, "quant_algo is ''"),
        ({"quant_method": "bitsandbytes"}, CheckpointError, "one of load_in_4bit and load_in_8bit should be true"),
        (nf4().config | {"bnb_4bit_quant_storage": "float64"}, UnsupportedModelError, "bnb_4bit_quant_storage is"),
    ],
    ids=lambda value: None if isinstance(value, dict | type) else re.sub(r"\W+", "-", str(value))[:40],
)
def test_what_is_not_read_is_refused_by_name(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        read_quantization({"dtype": "float16", "quantization_config": config})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (COMPRESSED | {"ignore": ["re:.*down_proj"]}, "down_proj.* that config.json leaves unquantised"),
        (COMPRESSED | {"ignore": ["re:("]}, "'re:.' is no regular expression"),
        (
            COMPRESSED | {"config_groups": {"group_0": GROUP | {"targets": ["re:.*self_attn.*"]}}},
            r"mlp\.\w+\.weight_scale belongs to a module that is in none of config_groups",
        ),
    ],
    ids=["ignored", "no regular expression", "in no group"],
)
def test_modules_that_the_configuration_does_not_mean(config: Any, message: str, tmp_path: Path) -> None:
    quantised, _ = pair_of(tmp_path, Published(config, ALL["compressed-int8"].write, "int8"))
    with pytest.raises(CheckpointError, match=message):
        load_model(quantised, NumpyBackend())


@pytest.mark.slow
def test_groups_of_modules_may_differ(tmp_path: Path) -> None:
    """Attention in packed int4, by the first group; the MLP in int8, by the second; each in its own format."""
    four = compressed("pack-quantized", bits=4, strategy="group", size=32)
    eight = compressed("int-quantized")
    first, second = (each.config["config_groups"]["group_0"] for each in (four, eight))
    groups = {
        "attention": first | {"targets": ["re:.*self_attn"], "format": "pack-quantized"},
        "mlp": second | {"targets": ["Linear"], "format": "int-quantized"},
    }

    def write(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        return (four if values.shape in ((64, 64), (32, 64)) else eight).write(values)

    config = four.config | {"format": "mixed-precision", "config_groups": groups}
    quantised, plain = pair_of(tmp_path, Published(config, write, "int4", "bfloat16"))
    found = projections(quantised, NumpyBackend(weights="auto"))
    assert [format_of(one) for one in found] == ["int4", "int4", "int8", "int8"] * 2
    np.testing.assert_allclose(logits(quantised), logits(plain), atol=1e-5)


@C
@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1])
def test_analyze_counts_the_bytes_of_a_gguf_file(
    kind: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the vocabulary in Q8_0, as llama.cpp's tool writes it."""
    write_llama(tmp_path / "m.gguf", type_of=lambda name: Type.Q8_0 if "embed" in name or "head" in name else kind)
    assert cli(["analyze", str(tmp_path / "m.gguf"), "--json"]) == 0
    loaded = weights_of(load_model(tmp_path / "m.gguf", CpuBackend()))
    parameters = {id(weight): weight.nbytes for weight in loaded if "rotary" not in weight.name}
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == sum(parameters.values())


@C
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme"),
    [("gptq-int4-of-128", "GPTQ, 4 bits, groups of 128"), ("awq", "AWQ, 4 bits, groups of 32")],
)
def test_analyze_counts_the_bytes_that_are_loaded(
    name: str, scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From config.json alone; the embedding and the head have the checkpoint's 16 bits."""
    quantised, _ = pair_of(tmp_path, name)
    assert cli(["analyze", str(quantised), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["scheme"], found["storage"]["weights"]) == (scheme, ALL[name].dtype)
    loaded = weights_of(load_model(quantised, CpuBackend()))
    parameters = {id(weight): weight.nbytes for weight in loaded if "rotary" not in weight.name}
    assert found["weights_bytes"] == sum(parameters.values())
