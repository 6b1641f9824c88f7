"""gpt-oss's own checkpoints: experts in MXFP4, of all experts in one tensor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.storage import expand
from minillm.errors import CheckpointError, MinillmError, ParameterError
from minillm.formats.load_model import load_model
from minillm.formats.schemes import read_quantization
from minillm.formats.schemes.mxfp4 import in_halves
from minillm.formats.write_checkpoint import write_checkpoint
from minillm.models.base import Model
from minillm.reference.blocks import BlockMatrix

from ..models.test_gpt_oss import CONFIG
from ..tiny import logits_of, runner_of, std_of

RAW: dict[str, Any] = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
"""The numbers of OCP's FP4 without their sign, by their three low bits"""
LINE = np.random.default_rng(2).integers(3, 96, 20).tolist()


def checkpoint(folder: Path, raw: dict[str, Any] = RAW, **changes: Any) -> dict[str, np.ndarray]:
    """Write one in MXFP4, with random bits. Returns its tensors; `changes` are by the ends of their names."""
    E, F, X, H, K, D = 64, 64, 4, 4, 2, 16
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (96, E), "norm.weight": (E,)}
    for i in range(2):
        layer, experts = f"layers.{i}", f"layers.{i}.mlp.experts"
        for name, heads in {"q": H, "k": K, "v": K}.items():
            shapes |= {f"{layer}.self_attn.{name}_proj.weight": (heads * D, E)}
            shapes |= {f"{layer}.self_attn.{name}_proj.bias": (heads * D,)}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (E, H * D), f"{layer}.self_attn.o_proj.bias": (E,)}
        shapes |= {f"{layer}.self_attn.sinks": (H,)}
        shapes |= {f"{layer}.{name}_layernorm.weight": (E,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.mlp.router.weight": (X, E), f"{layer}.mlp.router.bias": (X,)}
        for name, outputs, inputs in (("gate_up_proj", 2 * F, E), ("down_proj", E, F)):
            shapes[f"{experts}.{name}_bias"] = (X, outputs)
            shapes[f"{experts}.{name}_blocks"] = (X, outputs, inputs // 32, 16)
            shapes[f"{experts}.{name}_scales"] = (X, outputs, inputs // 32)
    shapes["lm_head.weight"] = (96, E)
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        if name.endswith("_blocks"):
            values = rng.integers(0, 256, shape, np.uint8)
        elif name.endswith("_scales"):
            values = rng.integers(121, 125, shape, np.uint8)
        else:
            values = rng.standard_normal(shape, np.float32) * np.float32(std_of(name, raw)) + name.endswith(
                "norm.weight"
            )
        change = next((change for ending, change in changes.items() if name.endswith(ending)), lambda values: values)
        if (changed := change(values)) is not None:
            tensors[name if name == "lm_head.weight" else f"model.{name}"] = changed
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return tensors


def matrix(tensors: dict[str, np.ndarray], name: str, expert: int) -> np.ndarray:
    """A matrix of an expert, by the definition. [outputs, inputs]"""
    blocks, scales = (tensors[f"model.{name}_{kind}"][expert] for kind in ("blocks", "scales"))
    outputs, groups, _ = blocks.shape
    values = np.empty((outputs, groups, 32), np.float32)
    for (o, g, j), byte in np.ndenumerate(blocks):
        for k, nibble in enumerate((byte & 15, byte >> 4)):
            sign = -1 if nibble & 8 else 1
            values[o, g, 2 * j + k] = sign * E2M1[nibble & 7] * 2.0 ** (int(scales[o, g]) - 127)
    return values.reshape(outputs, -1)


def expert_of(model: Model, layer: int, part: str, expert: int) -> Any:
    return getattr(model.layers[layer].mlp, part).data.matrices[expert]  # type: ignore[attr-defined]


def test_experts_stay_in_blocks_and_have_the_values_that_the_bits_stand_for(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path)
    model = load_model(tmp_path, NumpyBackend(weights="auto"))
    gate_up, down = (matrix(tensors, f"layers.1.mlp.experts.{name}", 3) for name in ("gate_up_proj", "down_proj"))
    for ours, theirs in (("gate_up", np.concatenate([gate_up[::2], gate_up[1::2]])), ("down", down)):
        stored = expert_of(model, 1, ours, 3)
        assert isinstance(stored, BlockMatrix) and stored.form.name == "MXFP4"
        np.testing.assert_array_equal(expand(stored), theirs)


def test_nibbles_go_from_neighbours_to_halves() -> None:
    numbers = np.arange(32, dtype=np.uint8) % 16
    numbers[16:] = numbers[16:][::-1]
    packed = numbers[::2] | numbers[1::2] << 4
    ours = in_halves(packed[None])[0]
    assert [*(ours & 15), *(ours >> 4)] == numbers.tolist()


@pytest.mark.slow
def test_the_kernels_in_c_multiply_the_blocks(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    plain, kernels = (
        logits_of(runner_of(load_model(tmp_path, backend), backend=backend), LINE)
        for backend in (NumpyBackend(), CpuBackend(weights="auto"))
    )
    assert np.linalg.norm(plain - kernels) < 0.1 * np.linalg.norm(plain)


@pytest.mark.longer
def test_ranks_have_rows_of_gate_and_up_and_whole_blocks_of_down(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    whole, *shares = (
        load_model(tmp_path, NumpyBackend(weights="auto"), rank=rank, ranks=ranks)
        for rank, ranks in ((0, 1), (0, 2), (1, 2))
    )
    parts = [expand(expert_of(share, 0, "down", 2)) for share in shares]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expand(expert_of(whole, 0, "down", 2)))
    halves = [np.split(expand(expert_of(share, 0, "gate_up", 2)), 2) for share in shares]
    joined = np.concatenate([half for pair in zip(*halves, strict=True) for half in pair])
    expected = expand(expert_of(whole, 0, "gate_up", 2))
    np.testing.assert_array_equal(joined, expected)
    with pytest.raises(ParameterError, match="are not whole groups of 32 weights"):
        load_model(tmp_path, NumpyBackend(), rank=0, ranks=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"down_proj_scales": lambda scales: None}, "lacks tensor .*down_proj_scales, which MXFP4 needs"),
        ({"down_proj_scales": lambda scales: scales[:, :, :1]}, r"blocks should be uint8 of shape .*found .*, 2, 16\]"),
        ({"down_proj_blocks": lambda blocks: blocks.astype(np.int8)}, "blocks should be uint8 of shape .*found int8"),
        ({"down_proj_scales": lambda scales: np.full_like(scales, 255)}, "scales holds 255, which stands for NaN"),
    ],
    ids=["no scales", "too few", "no bytes", "NaN"],
)
def test_damaged_blocks_are_named(changes: Any, message: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_model(tmp_path, NumpyBackend())
    assert "\n" not in str(raised.value)


def test_what_the_configuration_leaves_unquantised_is_refused_in_blocks(tmp_path: Path) -> None:
    everything = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.*"]}
    checkpoint(tmp_path, RAW | {"quantization_config": everything})
    with pytest.raises(CheckpointError, match=r"which modules_to_not_convert leaves unquantised"):
        load_model(tmp_path, NumpyBackend())
    with pytest.raises(CheckpointError, match=r"modules_to_not_convert should be names of modules, found 3"):
        read_quantization({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [3]}})


def test_a_checkpoint_in_mxfp4_is_not_written_anew(tmp_path: Path) -> None:
    checkpoint(tmp_path / "source")
    with pytest.raises(MinillmError, match="is already quantised, to MXFP4"):
        write_checkpoint(tmp_path / "source", tmp_path / "out", "float16")


@pytest.mark.exhaustive  # importing transformers' functions takes longer than all other tests here
@pytest.mark.reference
def test_values_and_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """With the weights that its own function dequantises: the quantiser itself looks for kernels on the hub."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    from .. import huggingface

    stored = checkpoint(tmp_path)
    tensors = {name: torch.from_numpy(values) for name, values in stored.items()}
    for i in range(2):
        for name in (f"layers.{i}.mlp.experts.{stem}_proj" for stem in ("gate_up", "down")):
            blocks, scales = (tensors.pop(f"model.{name}_{kind}") for kind in ("blocks", "scales"))
            values = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            np.testing.assert_array_equal(values[2].numpy().T, matrix(stored, name, 2))
            tensors[f"model.{name}"] = values
    theirs = huggingface.build_model({name: value for name, value in RAW.items() if name != "quantization_config"})
    theirs.load_state_dict(tensors)
    ours = logits_of(runner_of(load_model(tmp_path, NumpyBackend(weights="auto"))), LINE)
    np.testing.assert_allclose(ours, huggingface.logits(theirs, LINE), rtol=0, atol=1e-4 * np.abs(ours).max())
