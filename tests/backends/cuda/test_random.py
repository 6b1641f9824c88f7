"""Random weights drawn on the device: Philox and Box-Muller number for number, and no matrix drawn on the host."""

import zlib
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.device import Device
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.random import DrawnTensor, draw, fill_normal
from minillm.backends.loader import RandomTensor
from minillm.measure.accounting import Storage, weights_bytes
from minillm.models import published, random_model
from minillm.reference.philox import philox4x32
from tests.reference.chi_square import p_value
from tests.shapes import BASE

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes (the extra test)")

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def formula(size: int, seed: int, std: float) -> np.ndarray:
    """The numbers in float64. [size]"""
    quads = -(-size // 4)
    counters = np.zeros((quads, 4), np.uint32)
    counters[:, 0] = np.arange(quads)
    keys = np.tile(np.array([seed], np.uint64).view(np.uint32), (quads, 1))
    uniforms = ((philox4x32(counters, keys) >> 9) + 0.5) / 2**23  # [quads, 4]
    radius, angle = std * np.sqrt(-2 * np.log(uniforms[:, ::2])), 2 * np.pi * uniforms[:, 1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(-1)[:size]


@pytest.mark.parametrize("size", [0, 1, 6, 1031])
@pytest.mark.parametrize("storage", STORAGE)
def test_numbers_are_those_of_the_formula(any_emulator: Emulator, storage: str, size: int) -> None:
    around = np.full(size + 8, 77, STORAGE[storage])
    fill_normal(Kernels(any_emulator, storage), around[4 : size + 4], 2**63 + 12345, 0.5)
    np.testing.assert_allclose(
        around[4 : size + 4].astype(np.float64), formula(size, 2**63 + 12345, 0.5), rtol=UNIT[storage], atol=2e-5
    )
    assert (around[:4] == 77).all() and (around[size + 4 :] == 77).all()


def test_they_do_not_depend_on_the_grid(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = np.zeros((2, 5000), np.float32)
    fill_normal(Kernels(emulator, "float32"), one, 3, 1.0)
    monkeypatch.setattr("minillm.backends.cuda.random.BLOCKS", 2)
    fill_normal(Kernels(emulator, "float32"), other, 3, 1.0)
    np.testing.assert_array_equal(one, other)


def test_they_are_normal(emulator: Emulator) -> None:
    numbers = np.zeros(40_000, np.float32)
    fill_normal(Kernels(emulator, "float32"), numbers, 7, 0.02)
    edges = [NormalDist(0, 0.02).inv_cdf(i / 20) for i in range(1, 20)]
    counts = np.bincount(np.searchsorted(edges, numbers), minlength=20)
    assert p_value(counts, np.full(20, len(numbers) / 20)) > 1e-3
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


@pytest.fixture
def drawn(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the weights of a tiny model on an emulated GPU, and allows the host vectors only."""
    monkeypatch.setitem(published(), "tiny", BASE)
    chunks = RandomTensor.chunks

    def only_vectors(tensor: RandomTensor) -> Any:
        assert len(tensor.shape) == 1, f"{tensor.name} is drawn on the host"
        return chunks(tensor)

    monkeypatch.setattr(RandomTensor, "chunks", only_vectors)

    def model(seed: int) -> tuple[Any, CudaBackend]:
        backend = CudaBackend(Device(), emulator, "float16")
        return random_model("tiny", seed, 0.02, backend), backend

    return model


def test_a_models_matrices_are_drawn_on_the_device(drawn: Any) -> None:
    (model, backend), (other, _), (same, _) = drawn(1), drawn(2), drawn(1)
    layers = [layer.mlp.up.data for layer in model.layers]
    assert layers[0].dtype == np.float16
    assert float(np.std(layers[0].astype(np.float64))) == pytest.approx(0.02, rel=0.1)
    assert (layers[0] != layers[1]).mean() > 0.9
    assert (layers[0] != other.layers[0].mlp.up.data).mean() > 0.9
    np.testing.assert_array_equal(layers[0], same.layers[0].mlp.up.data)
    parts = np.split(model.layers[0].attention.qkv.data, 3)
    assert (parts[0] != parts[1]).mean() > 0.9, "Q, K and V are tensors of their own"
    assert backend.memory.use().weights == weights_bytes(model.config, Storage.all_in("float16")), (
        "what is drawn counts as what is sent"
    )


def test_names_decide_as_seeds_do(emulator: Emulator) -> None:
    out = np.zeros((5, 8), np.float32)
    draw(Kernels(emulator, "float32"), [DrawnTensor("a", (2, 8), 4, 1.0), DrawnTensor("b", (3, 8), 4, 1.0)], out)
    for name, part in ("a", out[:2]), ("b", out[2:]):
        key = np.random.SeedSequence([4, zlib.crc32(name.encode())]).generate_state(1, np.uint64)[0]
        np.testing.assert_allclose(part.reshape(-1), formula(part.size, int(key), 1.0), rtol=1e-5, atol=2e-5)
