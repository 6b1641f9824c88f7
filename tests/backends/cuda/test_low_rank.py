"""LoRA adapters of single rows on the kernels, run by the emulator: against float64, and whole engines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cuda import low_rank
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.low_rank import LowRankWeight
from minillm.backends.weights import Weight
from tests.adapters import write_adapter
from tests.tiny import write_checkpoint

from .recording import RecordingDevice

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy needs ml_dtypes")

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(("inputs", "outputs"), [(704, 130), (33, 7)])
def test_rows_of_several_adapters_and_none(any_emulator: Emulator, storage: str, inputs: int, outputs: int) -> None:
    """Three adapters of different ranks, one of which leaves this projection alone, and rows without any."""
    rng, dtype = np.random.default_rng(inputs), STORAGE[storage]

    def change(r: int) -> LowRankWeight:
        down, up = rng.standard_normal((r, inputs)), rng.standard_normal((outputs, r))
        return LowRankWeight(*(Weight("", (each / 8).astype(np.float32)) for each in (down, up)))

    changes, numbers = (change(3), None, change(9)), np.array([2, -1, 0, 0, 1, 2], np.int32)
    T, stride = len(numbers), inputs + 8
    x = np.full((T, stride), np.nan, dtype)[:, :inputs]  # with an odd number of inputs not aligned
    x[:] = rng.standard_normal((T, inputs))
    y, residual = (rng.standard_normal((T, outputs)).astype(dtype) for _ in range(2))
    around = np.full((T + 2, outputs), -77.0, dtype)
    stack = low_rank.stack(changes, lambda shape, form: np.full(shape, np.nan, form), np)
    h = np.full((T, 9), np.nan, np.float32)
    options: dict[str, Any] = {"activation": "relu", "residual": residual}
    low_rank.add_low_rank(Kernels(any_emulator, storage, debug=True), y, x, stack, numbers, h, around[1:-1], **options)
    expected = y.astype(np.float64)
    for t, number in enumerate(numbers):
        if number >= 0 and (one := changes[number]) is not None:
            expected[t] += one.up.data.astype(np.float64) @ (one.down.data.astype(np.float64) @ x[t].astype(np.float64))
    expected = np.maximum(expected, 0) + residual.astype(np.float64)
    np.testing.assert_allclose(around[1:-1].astype(np.float64), expected, rtol=UNIT[storage], atol=1e-4)
    assert (around[[0, -1]] == -77).all()


def test_logits_stay_float(emulator: Emulator) -> None:
    """The language model head's change is added to float32, whatever the type of x."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 40)).astype(np.float16), rng.standard_normal((2, 30)).astype(np.float32)
    change = LowRankWeight(*(Weight("", rng.standard_normal(shape).astype(np.float32)) for shape in ((4, 40), (30, 4))))
    stack, out = low_rank.stack([change], np.empty, np), np.empty_like(y)
    h = np.empty((2, 4), np.float32)
    low_rank.add_low_rank(Kernels(emulator, "float16"), y, x, stack, np.array([0, -1], np.int32), h, out)
    np.testing.assert_allclose(out[0], y[0] + change.up.data @ (change.down.data @ x[0].astype(np.float32)), rtol=1e-4)
    np.testing.assert_array_equal(out[1], y[1])


PROMPTS = [[40, 41, 42, 43], list(range(50, 67)), [7], [90, 80, 70, 60, 50, 40]]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": []}


@pytest.mark.slow
def test_decode_steps_of_any_mixture_of_adapters_are_one_recorded_step(
    device: RecordingDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy's tokens, each launched ahead of the host's reading; steps without adapters have a record of their own."""
    folders = {name: write_adapter(tmp_path / name, seed=i, r=i + 2) for i, name in enumerate(("one", "two", "three"))}
    options: dict[str, Any] = {"adapters": folders, "max_batch_size": 4, "prefix_cache": False}
    base = write_checkpoint(tmp_path / "base", seed=3)
    with monkeypatch.context() as patch:
        backend = CudaBackend(device, device.recorder, "float32", max_batch_size=4)
        patch.setattr("minillm.engine.assembly.choose_backend", lambda *_: backend)
        ours = Engine(base, device="cuda", **options)
    numpy = Engine(base, backend="numpy", **options)
    launched: list[bool] = []
    launch = ours.runner.backend.memory.launch

    def counting(*arguments: Any) -> Any:
        launched.append((read := launch(*arguments)) is not None)
        return read

    monkeypatch.setattr(ours.runner.backend.memory, "launch", counting)
    for names in (["one", "two", None, "three"], [None, "three", "one", "one"], [None] * 4, ["two"] * 4):
        found = []
        for engine in (ours, numpy):
            ids = [engine.add(prompt, lora=name, **GREEDY) for prompt, name in zip(PROMPTS, names, strict=True)]
            tokens: dict[int, list[int]] = {i: [] for i in ids}
            while engine.busy:
                for event in engine.step():
                    assert event.error is None
                    tokens[event.request_id] += event.token_ids
            found.append([*tokens.values()])
        assert found[0] == found[1], names
    assert len(device.records) == 3, "steps with adapters, without, and with: those without had their memory grow"
    names = [[launch.name for launch in record] for record in device.records]
    assert [each.count("low_rank_up") for each in names] == [6, 0, 6]
    assert device.replays > 4 * 5
    assert sum(launched) > 4 * 4
