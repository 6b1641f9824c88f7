"""Published quantised checkpoints against the packages that define them: their own writers, and their own reading."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file as save_arrays

from minillm.backends.formats import STORED_FORMATS
from minillm.backends.numpy import NumpyBackend
from minillm.backends.storage import expand
from minillm.formats import open_checkpoint
from minillm.formats.load_model import load_model
from minillm.formats.schemes import read_quantization
from minillm.formats.schemes.matrix import Scheme

from ..families import in_turn
from ..published import ALL, CONFIGS, write_pair
from ..tiny import logits_of, runner_of

LINE = np.random.default_rng(2).integers(3, 96, 20).tolist()
PACKED = Path(__file__).parents[1] / "data" / "packed_elsewhere.npz"


def read(folder: Path, config: dict[str, Any], dtype: str = "float32") -> Any:
    """The matrix "a.weight" of a folder's weights."""
    scheme = read_quantization({"quantization_config": config, "dtype": dtype})
    assert isinstance(scheme, Scheme)
    return scheme.join(open_checkpoint(folder))["a.weight"]


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("gptq-4", {"bits": 4, "sym": True}),
        ("gptq-4-asymmetric-desc_act", {"bits": 4, "sym": False, "desc_act": True}),
        ("gptq-8-asymmetric", {"bits": 8, "sym": False}),
        ("awq-4", {"bits": 4, "version": "gemm"}),
    ],
)
def test_matrices_that_autogptq_and_autoawq_packed(case: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Packed by AutoGPTQ 0.7.1 (`QuantLinear.pack`) and AutoAWQ 0.2.9 (`WQLinear_GEMM.from_linear`); read by both."""
    found = {name.removeprefix(case): array for name, array in np.load(PACKED).items() if name.startswith(f"{case}.")}
    expected = found.pop(".weight")
    save_arrays({f"a{name}": array for name, array in found.items()}, tmp_path / "model.safetensors")
    tensor = read(tmp_path, {"quant_method": case.split("-")[0], "group_size": 32} | config)
    assert tensor.dtype == {"gptq-4": "int4", "awq-4": "int4 with zero points"}.get(case, "float32")
    np.testing.assert_array_equal(tensor.load(), expected)
    np.testing.assert_array_equal(expand(tensor.stored()), expected)


@pytest.mark.parametrize(("bits", "size"), [(2, 64), (3, 32), (4, 64), (5, 64), (6, 64), (8, 64)])
def test_matrices_that_mlx_packed(bits: int, size: int, tmp_path: Path) -> None:
    """Packed by MLX 0.32.4 (`mlx.core.quantize`) in float16, read by its `dequantize` in float32."""
    arrays = np.load(PACKED)
    parts = {f"a.{part}": arrays[f"mlx-{bits}.{part}"] for part in ("weight", "scales", "biases")}
    save_arrays(parts, tmp_path / "model.safetensors")
    tensor = read(tmp_path, {"quant_method": "mlx", "bits": bits, "group_size": size})
    assert tensor.dtype == ("int4 with offsets" if bits <= 4 else "float32")
    np.testing.assert_allclose(expand(tensor.stored()), arrays[f"mlx-{bits}.dequantized"], atol=1e-7)


@pytest.mark.parametrize(("mode", "size"), [("mxfp4", 32), ("nvfp4", 16)])
def test_floats_of_4_bits_that_mlx_packed(mode: str, size: int, tmp_path: Path) -> None:
    """Packed by MLX 0.32.4 in bfloat16, read by its `dequantize` in float32."""
    arrays = np.load(PACKED)
    parts = {f"a.{part}": arrays[f"mlx-{mode}.{part}"] for part in ("weight", "scales")}
    save_arrays(parts, tmp_path / "model.safetensors")
    tensor = read(tmp_path, {"quant_method": "mlx", "bits": 4, "group_size": size, "mode": mode})
    assert tensor.dtype == mode.upper()
    np.testing.assert_array_equal(expand(tensor.stored()), arrays[f"mlx-{mode}.dequantized"])
    np.testing.assert_array_equal(tensor.load(), arrays[f"mlx-{mode}.dequantized"])


@pytest.mark.reference
@pytest.mark.parametrize("layout", ["nvfp4", "mxfp4", "modelopt"])
def test_compressed_tensors_own_floats_of_4_bits(layout: str, tmp_path: Path) -> None:
    """modelopt's NVFP4 as compressed-tensors converts it, with scales that it inverts: of a power of two, exactly."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from safetensors.torch import save_file

    size, kind = (32, "mxfp4") if layout == "mxfp4" else (16, "nvfp4")
    strategy = "group" if size == 32 else "tensor_group"
    weights = {"num_bits": 4, "type": "float", "strategy": strategy, "symmetric": True, "group_size": size}
    types = {"scale_dtype": torch.uint8 if size == 32 else torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights, **types))
    compressor = BaseCompressor.get_value_from_registry(f"{kind}-pack-quantized")
    matrix = torch.randn((48, 256), generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = torch.tensor([512.0 if layout == "modelopt" else 448 * 6 / matrix.abs().max().item()])
    largest = matrix.float().reshape(48, -1, size).abs().amax(dim=2) / 6
    scale = (largest * whole).to(torch.float8_e4m3fn).float() if size == 16 else torch.exp2(largest.log2().floor())
    state = {"weight": matrix, "weight_scale": scale} | ({"weight_global_scale": whole} if size == 16 else {})
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"].float().numpy()
    parts = {f"a.{name}": array.contiguous() for name, array in packed.items()}
    group = {"targets": ["Linear"], "weights": weights}
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": f"{kind}-pack-quantized"}
    config["config_groups"] = {"group_0": group}
    if layout == "modelopt":
        names = {"a.weight_packed": "a.weight", "a.weight_global_scale": "a.weight_scale_2"}
        parts = {names.get(name, name): array for name, array in parts.items()}
        parts["a.weight_scale_2"] = (1 / whole).reshape(())
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    save_file(parts, tmp_path / "model.safetensors")
    tensor = read(tmp_path, config, "bfloat16")
    assert tensor.dtype == kind.upper()
    for values in (tensor.load(), expand(tensor.stored())):
        np.testing.assert_array_equal(torch.from_numpy(values).bfloat16().float().numpy(), expected)


def bits_equal(tensor: Any, expected: Any, dtype: str) -> None:
    """The stored numbers are those of a torch tensor, which is read as float32 where integers are kept."""
    if STORED_FORMATS[tensor.dtype].scale_bits:
        exact = expected.float().numpy()
        np.testing.assert_allclose(tensor.load(), exact, rtol=2**-8 if dtype == "bfloat16" else 2**-11)
    else:
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(tensor.load(), expected.float().numpy())


ZEROS = "int4 with zero points"
INT = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


@pytest.mark.reference
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("layout", "weights", "kept"),
    [
        ("pack-quantized", INT | {"num_bits": 4, "strategy": "group", "group_size": 32}, "int4"),
        ("pack-quantized", INT | {"num_bits": 4, "strategy": "group", "group_size": 128}, "int4"),
        ("pack-quantized", INT | {"num_bits": 4}, "int4"),
        ("pack-quantized", INT | {"strategy": "group", "group_size": 64}, "int8"),
        ("pack-quantized", INT | {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, ZEROS),
        ("pack-quantized", INT | {"num_bits": 4, "symmetric": False}, ZEROS),
        ("pack-quantized", INT | {"num_bits": 8, "symmetric": False}, ""),
        ("int-quantized", INT, "int8"),
        ("int-quantized", INT | {"symmetric": False}, ""),
        ("naive-quantized", INT | {"strategy": "tensor"}, "int8"),
        ("naive-quantized", INT | {"strategy": "group", "group_size": 32}, "int8"),
        ("float-quantized", INT | {"type": "float"}, ""),
        ("float-quantized", INT | {"type": "float", "strategy": "tensor"}, ""),
        ("float-quantized", INT | {"type": "float", "strategy": "block", "block_structure": [64, 32]}, ""),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_compressed_tensors_own_compressors(
    layout: str, weights: dict[str, Any], kept: str, dtype: str, tmp_path: Path
) -> None:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import save_file

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(layout)
    matrix = torch.randn(96 if args.strategy != "block" else 128, 256, generator=torch.Generator().manual_seed(1))
    matrix = matrix.to(getattr(torch, dtype))
    low, high = ranges(matrix, args)
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": matrix, "weight_scale": scale.to(matrix.dtype), "weight_zero_point": zero}
    packed = compressor.compress(state, scheme)
    save_file({f"a.{name}": array.contiguous() for name, array in packed.items()}, tmp_path / "model.safetensors")
    expected = compressor.decompress(packed, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    tensor = read(tmp_path, config, dtype)
    if kept and dtype != "float32":
        assert tensor.dtype == kept
    bits_equal(tensor, expected, dtype)


def ranges(matrix: Any, args: Any) -> tuple[Any, Any]:
    """Smallest and largest values of what shares a scale, in the shape of the scales."""
    rows, columns = matrix.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, args.group_size),
        "block": args.block_structure,
    }[args.strategy]
    blocks = matrix.reshape(rows // height, height, columns // width, width)
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    return (low.reshape(1), high.reshape(1)) if args.strategy == "tensor" else (low, high)


SHAPES = [((96, 256), 64), ((7, 33), 64), ((130, 130), 4096), ((600, 128), 32)]


@pytest.mark.reference
@pytest.mark.parametrize(
    ("layout", "dtype"),
    in_turn(list(itertools.product(["nf4", "fp4"], [False, True], SHAPES)), ["float16", "bfloat16", "float32"]),
)
def test_bitsandbytes_own_4_bits(
    layout: tuple[str, bool, tuple[tuple[int, int], int]], dtype: str, tmp_path: Path
) -> None:
    """Each kind, nested or not, of each shape in blocks of each size."""
    kind, nested, (shape, block) = layout
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from safetensors.torch import save_file

    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    packed, state = quantize_4bit(matrix, blocksize=block, quant_type=kind, compress_statistics=nested)
    parts = {f"a.weight.{name}": array for name, array in state.as_dict(packed=True).items()}
    save_file({"a.weight": packed} | parts, tmp_path / "model.safetensors")
    expected = dequantize_4bit(packed, state)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    tensor = read(tmp_path, config, dtype)
    in_blocks = shape[1] % 64 == 0 and block % 64 == 0
    assert (tensor.shape, tensor.dtype) == (shape, kind.upper() if in_blocks else dtype)
    if in_blocks and not nested:  # whose scales bitsandbytes may add up in another order
        rounded = torch.from_numpy(expand(tensor.stored())).to(expected.dtype)
        np.testing.assert_array_equal(rounded.float().numpy(), expected.float().numpy())
    near = 2**-8 if in_blocks and dtype != "float32" else 3e-7
    np.testing.assert_allclose(tensor.load(), expected.float().numpy(), rtol=near, atol=1e-7)


@pytest.mark.reference
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bitsandbytes_own_8_bits(dtype: str, tmp_path: Path) -> None:
    import torch
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant
    from safetensors.torch import save_file

    matrix = torch.randn((96, 256), generator=torch.Generator().manual_seed(1)).half()
    packed, largest, _ = int8_vectorwise_quant(matrix)
    parts = {"a.weight": packed, "a.SCB": largest, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    save_file(parts, tmp_path / "model.safetensors")
    expected = int8_vectorwise_dequant(packed, largest).numpy()
    tensor = read(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True}, dtype)
    np.testing.assert_allclose(tensor.load(), expected, rtol=2**-11 if dtype == "float16" else 3e-7)


@pytest.mark.reference
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale_type", ["float32", "bfloat16", "float8_e8m0fnu"])
def test_transformers_own_float8_blocks(scale_type: str, dtype: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((256, 384), generator=generator).mul(100).to(torch.float8_e4m3fn)
    scale = torch.rand((2, 3), generator=generator).add(0.1).to(getattr(torch, scale_type))
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    expected = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=getattr(torch, dtype))
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    tensor = read(tmp_path, config, dtype)
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.load(), expected.float().numpy())


def transformers_logits(folder: Path) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    return logits_in_float32(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def logits_in_float32(model: Any) -> np.ndarray:
    """The logits of `LINE`, whose products with bitsandbytes' matrices are in float32 on every processor.

    On those with AVX512-BF16 its own are in bfloat16, of matrices packed anew, which blocks of 4096 are not made for.
    """
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state).float()
            module.forward = partial(torch.nn.functional.linear, weight=weight, bias=module.bias)
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([LINE])).logits[0].float().numpy()
    return logits


def our_logits(folder: Path) -> np.ndarray:
    return logits_of(runner_of(load_model(folder, NumpyBackend(weights="auto"))), LINE)


@pytest.mark.reference
@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
@pytest.mark.parametrize(
    "name",
    [
        "compressed-packed-int4",
        "compressed-packed-int4-rows",
        "compressed-packed-int8-float16",
        "bitsandbytes-nf4-of-4096",
    ],
)
def test_transformers_reads_the_same_model(name: str, family: str, tmp_path: Path) -> None:
    """The quantised folder itself, read by both."""
    quantised, _ = write_pair(tmp_path, family, ALL[name])
    expected = transformers_logits(quantised)
    np.testing.assert_allclose(our_logits(quantised), expected, atol=2e-6 * np.abs(expected).max() * len(LINE))


@pytest.mark.reference
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_checkpoint_that_transformers_has_quantised_with_bitsandbytes(
    family: str, kind: str, nested: bool, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    _, plain = write_pair(tmp_path, family, ALL["bitsandbytes-nf4-of-4096"])
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=how, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    assert (
        raw["quantization_config"]["quant_method"] == "bitsandbytes"
        and raw["vocab_size"] == CONFIGS[family]["vocab_size"]
    )
    expected = logits_in_float32(model)
    np.testing.assert_allclose(our_logits(tmp_path / "saved"), expected, atol=2e-6 * np.abs(expected).max() * len(LINE))
