"""Arrays of other libraries in and out: token ids from any, logits to each without a copy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.errors import ParameterError, PromptError

from ..tiny import write_checkpoint

IDS = [5, 7, 9, 11]


class Foreign:
    """An array of a library that NumPy knows only by DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array, self.ndim = array, array.ndim

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, i: int) -> "Foreign":
        return Foreign(self._array[i])

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(write_checkpoint(tmp_path_factory.mktemp("arrays"), seed=3)) as engine:
        yield engine


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint64])
def test_ids_of_any_library_and_integer_type_are_a_prompt(engine: Engine, dtype: Any) -> None:
    ids = Foreign(np.array(IDS, dtype))
    assert engine.generate(ids, max_new_tokens=3) == engine.generate(IDS, max_new_tokens=3)
    assert np.array_equal(engine.forward(ids), engine.forward(IDS))
    several = engine.generate(Foreign(np.array([IDS, IDS[::-1]], dtype)), max_new_tokens=3)
    assert several == engine.generate([IDS, IDS[::-1]], max_new_tokens=3)
    assert engine.generate([ids, [3]], max_new_tokens=3) == engine.generate([IDS, [3]], max_new_tokens=3)


def test_arrays_that_are_no_ids_are_refused(engine: Engine) -> None:
    for array, message in [
        (np.array([1.5, 2.0]), "one dimension of integers, found 1 dimensions of float64"),
        (np.array(7), "a prompt should be text or a list of token ids"),
        (np.array([600]), "token id 600 is outside the vocabulary"),
    ]:
        with pytest.raises(PromptError, match=message):
            engine.generate(Foreign(array))


def test_another_library_for_logits_is_refused(engine: Engine) -> None:
    with pytest.raises(ParameterError, match="like should be one of numpy, torch, cupy, found 'jax'"):
        engine.forward(IDS, like="jax")  # type: ignore[call-overload]
    with pytest.raises(ParameterError, match="like='cupy' needs an engine on a GPU"):
        engine.forward(IDS, like="cupy")


@pytest.mark.slow
def test_tensors_go_in_and_come_out(engine: Engine) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch's tensors")
    expected = engine.forward(IDS)
    for ids in (torch.tensor(IDS), torch.tensor(IDS, dtype=torch.int32), torch.tensor([IDS])[0]):
        logits = engine.forward(ids, like="torch")
        assert isinstance(logits, torch.Tensor) and logits.dtype == torch.float32
        assert np.array_equal(logits.numpy(), expected)
    with pytest.raises(PromptError, match="one dimension of integers"):
        engine.forward(torch.tensor([1.5], requires_grad=True))
    rows = torch.linspace(-1, 1, 3 * 32).reshape(3, 32).to(torch.bfloat16)  # as most published models' are
    whole = engine.forward(inputs_embeds=rows.float())
    np.testing.assert_array_equal(engine.forward(inputs_embeds=rows), whole)


@pytest.mark.slow
def test_a_tensor_shares_the_memory_of_the_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch's tensors")
    made = []
    from_dlpack = torch.from_dlpack
    monkeypatch.setattr(torch, "from_dlpack", lambda array: made.append(array) or from_dlpack(array))
    logits = engine.forward(IDS, like="torch")
    logits[0, 0] = 42.0
    assert made[0][0, 0] == 42.0 and logits.data_ptr() == made[0].ctypes.data


def test_without_pytorch_the_error_says_so(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ParameterError, match="like='torch' needs PyTorch"):
        engine.forward(IDS, like="torch")
