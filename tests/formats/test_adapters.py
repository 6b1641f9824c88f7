"""LoRA adapters merged at load: the sums by hand, every format, and each error in one line. Needs no torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, MinillmError, ModelNotFoundError, UnsupportedModelError
from minillm.formats.load_model import load_model
from minillm.formats.lora_config import HONOURED, NO_EFFECT, UNSUPPORTED
from minillm.models.base import weights_of

from ..adapters import Tensors, merged_by_hand, write_adapter
from ..tiny import logits_of, runner_of, write_checkpoint

LINE = np.random.default_rng(3).integers(3, 512, 20).tolist()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def logits(folder: Path, adapter: Path | None = None, weights: str = "auto") -> np.ndarray:
    return logits_of(runner_of(load_model(folder, NumpyBackend(weights=weights), adapter=adapter)), LINE)


def test_logits_are_those_of_the_sum_by_hand(base: Path, adapter: Path, tmp_path: Path) -> None:
    summed = write_checkpoint(tmp_path / "summed", change=lambda tensors: merged_by_hand(tensors, adapter))
    np.testing.assert_allclose(logits(base, adapter), logits(summed), rtol=0, atol=1e-4)
    assert np.abs(logits(base) - logits(summed)).max() > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int4"])
def test_the_sum_is_formed_before_it_is_rounded(base: Path, adapter: Path, tmp_path: Path, dtype: str) -> None:
    summed = write_checkpoint(tmp_path / "summed", change=lambda tensors: merged_by_hand(tensors, adapter))
    ours, by_hand = (
        weights_of(load_model(folder, NumpyBackend(weights=dtype), adapter=each))
        for folder, each in ((base, adapter), (summed, None))
    )
    for mine, theirs in zip(ours, by_hand, strict=True):
        if len(mine.shape) == 2:
            values = [getattr(weight.data, "values", weight.data) for weight in (mine, theirs)]
            assert (values[0] == values[1]).mean() > 0.999, mine.name  # but for a tie of the rounding


@pytest.mark.longer
def test_an_engine_on_every_backend_takes_it(base: Path, adapter: Path, tmp_path: Path) -> None:
    summed = write_checkpoint(tmp_path / "summed", change=lambda tensors: merged_by_hand(tensors, adapter))
    expected = Engine(summed, backend="numpy").generate("Some", max_new_tokens=12).token_ids
    assert Engine(base, backend="numpy", adapter=adapter).generate("Some", max_new_tokens=12).token_ids == expected
    assert Engine(base, backend="numpy").generate("Some", max_new_tokens=12).token_ids != expected


def test_two_ranks_share_the_sum(base: Path, adapter: Path) -> None:
    whole = {w.name: w for w in weights_of(load_model(base, NumpyBackend(), adapter=adapter))}
    shares = [load_model(base, NumpyBackend(), adapter=adapter, rank=rank, ranks=2) for rank in range(2)]
    for mine, other in zip(*map(weights_of, shares), strict=True):
        axis = 1 if mine.name.endswith(("out_proj", "fc2")) else 0
        if mine.name.endswith(("fc1", "fc2", "out_proj")):
            np.testing.assert_array_equal(np.concatenate([mine.data, other.data], axis), whole[mine.name].data)


def _drop(*parts: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if all(part in name for part in parts)]:
            del tensors[name]

    return change


def _rename(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def _with(name: str, values: np.ndarray) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: values.astype(np.float32)})


FIRST = "base_model.model.model.decoder.layers.0.fc1"
REFUSED: list[tuple[dict[str, Any], Callable[[Tensors], None] | None, str]] = [
    ({"peft_type": "IA3"}, None, "peft_type is 'IA3'"),
    ({"peft_type": None}, None, "peft_type is ''"),
    ({"task_type": "SEQ_CLS"}, None, "task_type is 'SEQ_CLS'"),
    ({"init_lora_weights": "pissa_niter_4"}, None, "init_lora_weights is 'pissa_niter_4'"),
    ({"from_the_future": 3}, None, "does not know from_the_future"),
    ({"target_modules": None}, None, "target_modules is missing"),
    ({"target_modules": "("}, None, "no regular expression"),
    ({"target_modules": 3}, None, "target_modules should be a text or a list"),
    ({"target_modules": ["q_proj"]}, None, "does not target 'model.decoder.layers.0.fc1'"),
    ({"target_modules": ["q_proj", "v_proj", "fc1", "fc2", "k_proj"]}, None, "lacks .*layers.0.self_attn.k_proj"),
    ({"layers_to_transform": [0]}, None, "does not target 'model.decoder.layers.1"),
    ({"layers_to_transform": "x"}, None, "layers_to_transform should be layer numbers"),
    ({"r": 0}, None, "r should be at least 1"),
    ({"lora_alpha": "x"}, None, "lora_alpha should be a finite number"),
    ({"rank_pattern": {"fc1": 4}}, None, r"fc1.lora_A should have shape \[4, 32\] by the model and r = 4, found \[3"),
    ({"rank_pattern": {"(": 4}}, None, "no regular expression"),
    ({"use_rslora": 1}, None, "use_rslora should be true or false"),
    ({"use_dora": True}, None, "should have A, B, lengths, found A, B"),
    ({"bias": "some"}, None, "bias is 'some'"),
    ({}, _drop("fc1.lora_B"), "should have A, B, found A"),
    ({}, _drop("layers.1"), "lacks the matrices of 'model.decoder.layers.1"),
    ({}, _drop(""), "no lora_A and lora_B"),
    ({}, _rename("base_model.model.", ""), "expected tensors named base_model.model."),
    ({}, _rename("fc1", "up_proj"), "'model.decoder.layers.0.up_proj' is no module of the model"),
    ({}, _rename("lora_A", "lora_A.default"), "lora_A.default.weight' is not among"),
    ({}, _with(f"{FIRST}.lora_A.weight", np.ones((3, 33))), r"should have shape \[3, 32\].*another model's adapter"),
    ({}, _with(f"{FIRST}.lora_A.weight", np.full((3, 32), np.nan)), "hold NaN or infinity"),
    ({}, _with(f"{FIRST}.bias", np.ones(40)), "fc1.bias' is not among"),
    ({"bias": "all"}, _with(f"{FIRST}.bias", np.ones(41)), r"fc1.bias of shape \[41\] .* has \[40\]"),
    ({"modules_to_save": ["lm_head"]}, _with("base_model.model.lm_head.weight", np.ones((9, 32))), "lm_head.weight of"),
    *(({name: True}, None, f"{name} is True; minillm runs LoRA without it") for name in UNSUPPORTED),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("fields", "change", "says"), REFUSED)
def test_what_cannot_be_meant_is_refused_in_one_line(
    base: Path, tmp_path: Path, fields: dict[str, Any], change: Callable[[Tensors], None] | None, says: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", change=change, **fields)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=says):
        load_model(base, NumpyBackend(), adapter=folder)


def test_a_folder_that_is_no_adapter(base: Path, adapter: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no adapter_config\.json"):
        load_model(base, NumpyBackend(), adapter=base)
    with pytest.raises(UnsupportedModelError, match="give its base model as the model"):
        load_model(adapter, NumpyBackend())
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no weights: looked for adapter_model.safetensors"):
        load_model(base, NumpyBackend(), adapter=adapter)
    (adapter / "adapter_config.json").write_text("{")
    (adapter / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(MinillmError):
        load_model(base, NumpyBackend(), adapter=adapter)


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_a_gguf_file_takes_an_adapter_too(kind: str, tmp_path: Path) -> None:
    """A Q and an MLP projection of Llama: llama.cpp's order of rows is undone before the sum, and Q4_1 expanded."""
    pytest.importorskip("gguf", reason="writing the file needs the extra gguf")
    from gguf import GGMLQuantizationType as Type
    from gguf.quants import dequantize, quantize

    from ..gguf_files import LLAMA, write_llama

    rng, tensors = np.random.default_rng(1), {}
    values = write_llama(tmp_path / "base.gguf", type_of=lambda name: Type[kind])
    values = {n: dequantize(quantize(v, Type[kind]), Type[kind]) if v.ndim > 1 else v for n, v in values.items()}
    targets = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in _LLAMA_TARGETS.items()}
    for name, (outputs, inputs) in targets.items():
        a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((3, inputs), (outputs, 3)))
        tensors |= {f"base_model.model.model.{name}.lora_{k}.weight": m for k, m in (("A", a), ("B", b))}
        values[f"{name}.weight"] = values[f"{name}.weight"] + 2 * (b @ a)
    write_adapter(
        tmp_path / "adapter", change=lambda t: (t.clear(), t.update(tensors))[1], target_modules=["q_proj", "up_proj"]
    )
    write_llama(tmp_path / "summed.gguf", LLAMA, values=values)
    line = np.random.default_rng(3).integers(3, 320, 20).tolist()
    ours, expected = (
        logits_of(runner_of(load_model(tmp_path / name, NumpyBackend(), adapter=adapter)), line)
        for name, adapter in (("base.gguf", tmp_path / "adapter"), ("summed.gguf", None))
    )
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


_LLAMA_TARGETS = {"self_attn.q_proj": (64, 64), "mlp.up_proj": (96, 64)}


@pytest.mark.reference
def test_every_field_that_peft_writes_is_known() -> None:
    peft = pytest.importorskip("peft")
    written = set(json.loads(json.dumps(peft.LoraConfig().to_dict(), default=list)))
    assert written <= HONOURED | NO_EFFECT | set(UNSUPPORTED)
