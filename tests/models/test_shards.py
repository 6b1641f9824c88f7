"""Shares of a model: what each rank reads of a file, and that the ranks together have the whole."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm.backends.loader import RandomTensor, Tensor
from minillm.backends.numpy import NumpyBackend
from minillm.backends.storage import expand
from minillm.backends.weights import Weight
from minillm.batch import Batch, TokenSequence
from minillm.cache import PagedCache, new_cache
from minillm.errors import ParameterError
from minillm.formats import open_checkpoint
from minillm.formats.load_model import load_model
from minillm.formats.schemes.minillm import MinillmScheme
from minillm.formats.tensors import WeightFile
from minillm.formats.write_checkpoint import write_checkpoint
from minillm.models import build_model, family_of, tensor_shapes
from minillm.models.base import weight_paths
from minillm.models.building import random_tensors
from minillm.models.parameters import by_block, transpose
from minillm.models.points import operators_of
from minillm.reference.quantize import dequantize, quantize

from ..families import CASES, CONFIGS, GOLDEN_CASES, GOLDEN_IDS, IDS, marks_of
from ..tiny import each_expert

GOLDEN = Path(__file__).parents[1] / "golden"
MATRIX = np.random.default_rng(0).standard_normal((12, 1024)).astype(np.float32)


class Watched:
    """A file that notes which bytes are read."""

    def __init__(self, file: Any, read: set[int]) -> None:
        self.file, self.read_bytes = file, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def readinto(self, out: Any) -> int:
        first = self.file.tell()
        count = self.file.readinto(out)
        self.read_bytes.update(range(first, first + count))
        return count


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The bytes that are read of weight files from now on; nothing may be mapped."""
    found: set[int] = set()
    opened = WeightFile.opened

    @contextmanager
    def watched(self: WeightFile) -> Iterator[Watched]:
        with opened(self) as file:
            yield Watched(file, found)

    monkeypatch.setattr(WeightFile, "opened", watched)
    return found


def values_of(tensor: Tensor, dtype: Any = np.float32) -> np.ndarray:
    out = np.empty(tensor.shape, dtype)
    tensor.read_into(out)
    return out


def bytes_of(offset: int, shape: tuple[int, ...], taken: Any, itemsize: int) -> set[int]:
    """Offsets in a file of the bytes of the elements that `taken` picks from a C-ordered array of this shape."""
    picked = np.arange(np.prod(shape)).reshape(shape)[taken].ravel()
    return {offset + int(i) * itemsize + byte for i in picked for byte in range(itemsize)}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_stored_tensor_reads_its_part_alone(axis: int, dtype: Any, tmp_path: Path, read: set[int]) -> None:
    stored = MATRIX.astype(dtype)
    save_file({"a": stored}, tmp_path / "model.safetensors")
    whole: Any = open_checkpoint(tmp_path)["a"]
    for rank in range(2):
        read.clear()
        size = MATRIX.shape[axis] // 2
        taken = (slice(None),) * axis + (slice(rank * size, (rank + 1) * size),)
        part = whole.part(axis, rank * size, (rank + 1) * size)
        np.testing.assert_array_equal(values_of(part), stored[taken].astype(np.float32), strict=True)
        assert read == bytes_of(whole.offset, MATRIX.shape, taken, stored.itemsize)
        np.testing.assert_array_equal(np.concatenate([chunk.copy() for chunk in part.chunks()]), values_of(part))
        np.testing.assert_array_equal(np.asarray(part.stored()).view(stored.dtype), stored[taken])


def test_narrow_columns_are_read_with_their_gaps(tmp_path: Path, read: set[int]) -> None:
    """A call for each of a few bytes would cost more than it saves."""
    save_file({"a": MATRIX}, tmp_path / "model.safetensors")
    part = open_checkpoint(tmp_path)["a"].part(1, 3, 7)
    np.testing.assert_array_equal(values_of(part), MATRIX[:, 3:7])
    assert len(read) == (11 * 1024 + 4) * 4


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_tensor_reads_its_part_alone(bits: int, tmp_path: Path, read: set[int]) -> None:
    matrix = np.tile(MATRIX, (1, 4))[:, :4064]  # 127 groups of 32
    stored = quantize(matrix, bits)
    save_file({"a.weight": stored.values, "a.weight_scale": stored.scales}, tmp_path / "model.safetensors")
    files = open_checkpoint(tmp_path)
    (whole,) = MinillmScheme(bits, 32).join_matrices(files, {"a.weight": matrix.shape}).values()
    for first, stop in ((0, 6), (6, 12)):
        rows = whole.part(0, first, stop).stored()  # mapped: those pages alone
        np.testing.assert_array_equal(rows.values, stored.values[first:stop])
        np.testing.assert_array_equal(rows.scales, stored.scales[first:stop])
    for first, stop in ((0, 2048), (2048, 4064)):
        read.clear()
        np.testing.assert_array_equal(
            values_of(whole.part(1, first, stop)), dequantize(stored)[:, first:stop], strict=True
        )
        columns = slice(first * bits // 8, stop * bits // 8)
        values = bytes_of(files["a.weight"].offset, stored.values.shape, (slice(None), columns), 1)
        scales = files["a.weight_scale"].offset  # 128 bytes of each row, which are read with their gaps
        assert read - set(range(scales, scales + stored.scales.nbytes)) == values
    with pytest.raises(ParameterError, match=r"columns 0 to 2032 of 4064 are not whole groups of 32 weights: share"):
        whole.part(1, 0, 2032)


def test_tensors_in_another_order_read_their_part_alone(tmp_path: Path, read: set[int]) -> None:
    half = MATRIX.astype(np.float16)  # float32 would be mapped
    save_file({"a": half}, tmp_path / "model.safetensors")
    whole: Any = open_checkpoint(tmp_path)["a"]
    offset = whole.offset
    rows = transpose(whole.part(1, 512, 1024))  # outputs of a projection that is stored as [in, out]
    np.testing.assert_array_equal(values_of(rows), half.T[512:].astype(np.float32))
    assert read == bytes_of(offset, MATRIX.shape, (slice(None), slice(512, 1024)), 2)
    read.clear()
    heads = by_block(whole.part(0, 6, 12), heads=1)  # the second of two heads, two wide
    np.testing.assert_array_equal(values_of(heads), half[6:].astype(np.float32))
    assert read == bytes_of(offset, MATRIX.shape, slice(6, 12), 2)


def test_random_numbers_of_a_part_are_those_of_the_whole() -> None:
    whole = RandomTensor("a.weight", (12, 40), seed=3, std=0.1)
    np.testing.assert_array_equal(values_of(whole.part(0, 4, 8)), whole.load()[4:8])
    np.testing.assert_array_equal(values_of(whole.part(1, 10, 20)), whole.load()[:, 10:20])


def joined(whole: Weight, shares: list[Weight], sections: list[int]) -> tuple[np.ndarray, np.ndarray | None]:
    """The ranks' shares of a weight put together; of one with `sections` of rows, section by section."""
    if whole.data is None:
        assert all(share.data is None for share in shares)
        return np.zeros(0), None
    data, biases = [expand(share.data) for share in shares], [share.bias for share in shares]
    if data[0].shape == whole.shape:  # a norm or a table
        for share in shares:
            np.testing.assert_array_equal(expand(share.data), data[0])
        return data[0], biases[0]
    if data[0].shape[0] == whole.shape[0]:
        assert not any(bias is not None for bias in biases[1:])
        return np.concatenate(data, axis=1), biases[0]
    stops = np.cumsum([0, *(size // len(shares) for size in sections or [whole.shape[0]])])

    def stacked(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([array[a:b] for a, b in itertools.pairwise(stops) for array in arrays])

    return stacked(data), None if biases[0] is None else stacked(biases)


def projected_rows(config: Any, place: str, rows: int) -> list[int]:
    """Rows of the parts of a convolution's projection, or of those of a delta net or Mamba-2."""
    if place == "convolution.projection":
        return [rows // 3] * 3
    if place == "delta_net.projection":
        V, dv = config.values
        return [*mixed_widths(config), V * dv, V, V]
    inner, wide = config.mamba.inner, config.mamba.groups * config.mamba.state_size
    return [inner, inner, wide, wide, config.mamba.num_heads]


def mixed_widths(config: Any) -> list[int]:
    """Widths of what a delta net or Mamba-2 convolves: queries, keys and values, or x, B and C."""
    if hasattr(config, "mamba"):
        wide = config.mamba.groups * config.mamba.state_size
        return [config.mamba.inner, wide, wide]
    (K, dk), (V, dv) = config.keys, config.values
    return [K * dk, K * dk, V * dv]


def qkv_rows(config: Any, layer: int, rows: int) -> list[int]:
    """The rows of queries, of their gates, and of keys and values as far as the layer has its own."""
    (K, D), H = config.kv_shape(layer), config.num_heads
    queries = [H * D] * (2 if hasattr(config, "linear") else 1)
    return [*queries, *[K * D] * ((rows - sum(queries)) // (K * D))]


def assert_shares_are_the_whole(whole: Any, shares: list[Any]) -> None:
    config, split = whole.config, 0
    mambas = sum(bool(states[1:]) for states in config.layer_states) if hasattr(config, "mamba") else 0
    for (path, weight), *others in zip(weight_paths(whole), *map(weight_paths, shares), strict=True):
        if path.endswith(("slopes", "frequencies")):
            continue
        place = path.split(".", 2)[-1]
        place = place.replace("part.qkv", "attention.qkv").replace("part.", "mamba.")  # of layers with one part
        if path in ("embedding.tokens", "head.weight", "per_layer.table"):
            rows = [expand(each.data) for each in (other for _, other in others)]
            np.testing.assert_array_equal(np.concatenate(rows), expand(weight.data), err_msg=path)
            assert [other.first for _, other in others] == np.cumsum([0, *map(len, rows)])[:-1].tolist()
            continue
        halves = [weight.shape[-2] // 2] * 2 if place.endswith("gate_up") and place != "mamba.gate_up" else []
        sections = qkv_rows(config, int(path.split(".")[1]), weight.shape[0]) if place == "attention.qkv" else halves
        if place.endswith(".factors"):
            sections = {"attention": qkv_rows(config, 0, weight.shape[0]), "mlp": [weight.shape[0] // 2] * 2}.get(
                place.partition(".")[0], projected_rows(config, place, weight.shape[0])
            )
            np.testing.assert_array_equal(joined(weight, [other for _, other in others], sections)[0], weight.data)
            continue
        if place.endswith(".projection"):
            sections = projected_rows(config, place, weight.shape[0])
        if place in ("mamba.taps", "mamba.rates"):
            assert_vectors_are_shared(config.mamba, weight, [other for _, other in others])
            continue
        if place.endswith(".taps"):
            k = config.taps
            blocks = [weight.shape[0] // k] if place == "convolution.taps" else mixed_widths(config)
            taps, _ = joined(weight, [replace(other, data=other.data.reshape(k, -1).T) for _, other in others], blocks)
            np.testing.assert_array_equal(taps.T, weight.data.reshape(k, -1))
            continue
        for one, *parts in zip(*(each_expert(each) for each in (weight, *(other for _, other in others))), strict=True):
            data, bias = joined(one, parts, sections)
            if one.data is not None:
                np.testing.assert_array_equal(data, expand(one.data), err_msg=path)
                np.testing.assert_equal(bias, one.bias, err_msg=path)
        split += others[0][1].data is not None and others[0][1].shape != weight.shape
    whole_qkv = config.model_type in ("olmoe", "olmo2", "olmo3", "minimax_m2")  # whose norms of queries span all heads
    mlps = [getattr(layer, "mlp", getattr(layer, "part", None)) for layer in whole.layers]
    shared = sum(getattr(mlp, "shared", None) is not None for mlp in mlps)
    latent = 2 * bool(config.value_dim)  # the matrices of heads by which latents are expanded
    parts = 4 - whole_qkv + latent + getattr(config, "sinks", False)  # both projections of attention and of each MLP
    parts += {"nemotron_h": -2, "falcon_h1": 2}.get(config.model_type, 0)  # whose layers have one part, or three
    norms = sum(getattr(config, "linear", ())) + mambas * (not mambas or config.mamba.normed)
    assert split == parts * config.num_layers + 2 * shared + norms


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("family", "name"), GOLDEN_CASES, ids=GOLDEN_IDS)
def test_ranks_of_a_checkpoint_have_the_whole(family: str, name: str) -> None:
    """Matrices as published: GPT-2's are transposed, the rows of GPT-NeoX and BLOOM go head by head."""
    folder = GOLDEN / family / name.replace(" ", "-")
    shares = [load_model(folder, NumpyBackend(), rank=rank, ranks=2) for rank in range(2)]
    assert_shares_are_the_whole(load_model(folder, NumpyBackend()), shares)


def assert_vectors_are_shared(mamba: Any, whole: Any, shares: list[Any]) -> None:
    """The taps of a convolution, by blocks of channels, or the rates of heads: those of ranks make up the whole."""
    wide = mamba.groups * mamba.state_size
    by_block = [mamba.inner, wide, wide] if whole.shape[0] > 2 * mamba.num_heads else [mamba.num_heads]
    rows = whole.shape[0] // sum(by_block)
    stops = np.cumsum([0, *by_block]) // len(shares)

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(
            [array.reshape(-1, stops[-1])[:, a:b] for a, b in itertools.pairwise(stops) for array in arrays], axis=1
        )

    np.testing.assert_array_equal(joined([share.data for share in shares]), whole.data.reshape(rows, -1))
    if whole.bias is not None:
        np.testing.assert_array_equal(joined([share.bias for share in shares])[0], whole.bias)


def is_shared(family: str, name: str, ranks: int = 2) -> bool:
    """Whether a configuration's heads, or groups of them, can be shared."""
    raw = CONFIGS[family][name]
    try:
        family_of(raw).read_config(raw).sharded(ranks)
    except ParameterError:
        return False
    return True


SHARED = [
    pytest.param(*case, marks=marks_of(case), id=name)
    for case, name in zip(CASES, IDS, strict=True)
    if is_shared(*case) and case[0] != "nemotron_h"  # whose layers have one part
]


@pytest.mark.parametrize(("family", "name"), SHARED)
@pytest.mark.slow
@pytest.mark.sampled(1, slow=2)
def test_ranks_attend_with_whole_heads_and_their_results_add_up(family: str, name: str) -> None:
    """Attention, or a convolution, and MLP of a layer: the sum of what the ranks compute is what the whole computes."""
    raw = CONFIGS[family][name]
    config, backend = family_of(raw).read_config(raw), NumpyBackend()
    tensors = random_tensors(tensor_shapes(config), 0, 0.3, backend)
    x = np.random.default_rng(1).standard_normal((20, config.hidden_size)).astype(np.float32)

    def attended(rank: int, ranks: int) -> tuple[np.ndarray, ...]:
        model = build_model(config, tensors, backend, rank=rank, ranks=ranks)
        cache = new_cache(PagedCache, model.config, backend, 4, 16)
        sequence = TokenSequence(list(range(20)))
        cache.reserve(sequence, 20)
        batch = cache.with_states(Batch.of([sequence], [20], 16), [sequence], [20])
        residual, layers = np.zeros_like(x), model.layers[1:]
        operators = [
            operator(backend, x, cache.storage, batch, residual=residual).copy()
            for layer in layers
            for operator in operators_of(layer)
        ]
        return *operators, layers[0].mlp(backend, x, residual=residual).copy()

    for ranks in (2, 4) if is_shared(family, name, 4) else (2,):
        sums = [np.sum(parts, axis=0) for parts in zip(*(attended(rank, ranks) for rank in range(ranks)), strict=True)]
        for ours, expected in zip(sums, attended(0, 1), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_ranks_of_a_quantised_checkpoint_have_the_whole(tmp_path: Path) -> None:
    raw = CONFIGS["llama"]["grouped"] | {"hidden_size": 128, "intermediate_size": 192}
    config, backend = family_of(raw).read_config(raw), NumpyBackend()
    tensors = {name: t.load() for name, t in random_tensors(tensor_shapes(config), 0, 0.1, backend).items()}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    write_checkpoint(tmp_path / "in", tmp_path / "out", "int4")
    shares = [load_model(tmp_path / "out", NumpyBackend(weights="auto"), rank=rank, ranks=2) for rank in range(2)]
    assert_shares_are_the_whole(load_model(tmp_path / "out", NumpyBackend(weights="auto")), shares)


@pytest.mark.parametrize(
    ("ranks", "words", "fields"),
    [
        (3, "tensor_parallel 3 should divide the model's num_heads 4", {}),
        (
            2,
            "tensor_parallel 2 should divide the model's num_kv_heads 3, or be a multiple",
            {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
        ),
    ],
)
def test_heads_that_cannot_be_shared_are_named(ranks: int, words: str, fields: dict[str, Any]) -> None:
    raw = CONFIGS["llama"]["grouped"] | fields
    config, backend = family_of(raw).read_config(raw), NumpyBackend()
    with pytest.raises(ParameterError, match=words):
        build_model(config, random_tensors(tensor_shapes(config), 0, 0.1, backend), backend, ranks=ranks)


def test_an_mlp_that_cannot_be_shared_is_refused() -> None:
    raw = CONFIGS["llama"]["grouped"] | {"intermediate_size": 41}
    config, backend = family_of(raw).read_config(raw), NumpyBackend()
    with pytest.raises(ParameterError, match="2 ranks cannot share 41 rows, columns or heads equally"):
        build_model(config, random_tensors(tensor_shapes(config), 0, 0.1, backend), backend, ranks=2)
