"""Parameters in each format: what is kept, what it stands for, and what the model makes of it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm.backends.formats import FLOAT16, FORMATS, INT4, INT4_OFFSETS, INT4_ZEROS, INT8, STORED_FORMATS
from minillm.backends.loader import HugePages, Loader, RandomTensor, gather, kept_format
from minillm.backends.numpy import NumpyBackend
from minillm.backends.storage import expand, narrow
from minillm.formats.load_model import load_model
from minillm.formats.safetensors import read_safetensors
from minillm.formats.write_checkpoint import write_checkpoint
from minillm.models.base import weight_paths
from minillm.reference.quantize import Quantized, quantize

from ..tiny import logits_of, runner_of, tiny_model
from ..tiny import write_checkpoint as write_tiny

RNG = np.random.default_rng(0)


def random_tensors(*rows: int, inputs: int = 70) -> list[RandomTensor]:
    return [RandomTensor(f"part {i}", (n, inputs), 0, 1.0) for i, n in enumerate(rows)]


@pytest.mark.parametrize(
    ("wanted", "step"), [("float16", 2**-11), ("bfloat16", 2**-8), ("int8", 2**-8), ("int4", 0.13)]
)
def test_several_tensors_in_one_format(wanted: str, step: float) -> None:
    """Each number is within half a step of what it was; a step is relative to the largest of its group."""
    tensors = random_tensors(3, 5)
    whole = np.concatenate([tensor.load() for tensor in tensors])
    data = gather(tensors, FORMATS[wanted])
    assert data.shape == (8, 70)
    assert data.nbytes < {"float16": 2.01, "bfloat16": 2.01, "int8": 1.5, "int4": 0.8}[wanted] * whole.size
    np.testing.assert_allclose(expand(data), whole, atol=step * np.abs(whole).max())
    np.testing.assert_array_equal(expand(data, np.array([6, 0, 6])), expand(data)[[6, 0, 6]])


def test_rounding_to_16_bits_is_that_of_the_field() -> None:
    bits = RNG.integers(0, 2**32, 100_000, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), np.float32([0, -0.0, np.inf, -np.inf, np.nan, 65519.9, 65520])])
    with np.errstate(all="ignore"):
        for wanted, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
            expected = values.astype(dtype)
            got = narrow(values, FORMATS[wanted]).view(np.uint16)
            numbers = ~np.isnan(values)
            np.testing.assert_array_equal(got[numbers], expected.view(np.uint16)[numbers])
            assert np.isnan(got.view(dtype)[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits_stay_in_their_file(tmp_path: Path, dtype: Any) -> None:
    values = RNG.standard_normal((6, 8)).astype(dtype)
    save_file({"a": values, "b": values}, tmp_path / "m.safetensors")
    stored = read_safetensors(tmp_path / "m.safetensors")
    alone = gather([stored["a"]], None)
    assert not alone.flags.owndata and not alone.flags.writeable
    np.testing.assert_array_equal(expand(alone), values.astype(np.float32))
    for names in ("ab", "ba"):  # side by side in the file, and not
        both = expand(gather([stored[name] for name in names], None))
        np.testing.assert_array_equal(both, np.concatenate([values, values]).astype(np.float32))
    other = "float16" if dtype == ml_dtypes.bfloat16 else "bfloat16"
    np.testing.assert_array_equal(
        gather([stored["a"], stored["b"]], FORMATS[other])[:6], narrow(values.astype(np.float32), FORMATS[other])
    )


def test_a_float32_matrix_stays_in_its_file_and_a_vector_does_not(tmp_path: Path) -> None:
    """A vector that is mapped would keep the pages around it in memory."""
    arrays = {"w": np.zeros((6, 8), np.float32), "b": RNG.standard_normal(6).astype(np.float32)}
    save_file(arrays, tmp_path / "m.safetensors")
    stored = read_safetensors(tmp_path / "m.safetensors")
    for order in ("C", "F"):
        weight = NumpyBackend(weights="float32", weight_order=order).loader.prepare("w", [stored["w"]], [stored["b"]])
        assert weight.data.flags.owndata is (order == "F")
        assert weight.bias.flags.owndata
        np.testing.assert_array_equal(weight.bias, arrays["b"])


def test_rows_side_by_side_in_a_file_are_mapped_as_one(tmp_path: Path) -> None:
    """Only where they are: in another order, with something between, of another width or file, they are copied."""
    arrays = {name: RNG.standard_normal((rows, 8)).astype(np.float16) for name, rows in (("a", 3), ("b", 5), ("c", 2))}
    arrays["d"] = RNG.standard_normal((2, 4)).astype(np.float16)
    for file in ("m.safetensors", "n.safetensors"):
        save_file(arrays, tmp_path / file)
    first, second = (read_safetensors(tmp_path / file) for file in ("m.safetensors", "n.safetensors"))
    assert [t.name for t in sorted(first.values(), key=lambda t: t.offset)] == ["a", "b", "c", "d"]
    for names, one_piece in (("ab", True), ("abc", True), ("ba", False), ("ac", False)):
        whole = gather([first[name] for name in names], None)
        np.testing.assert_array_equal(whole, np.concatenate([arrays[name] for name in names]))
        assert (not whole.flags.owndata) is one_piece
    assert first["c"].merged_with(first["d"]) is None
    assert first["a"].merged_with(second["b"]) is None
    assert gather([first["a"], second["b"]], None).flags.owndata


linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="of Linux")


@linux
def test_matrices_that_are_converted_lie_side_by_side_in_huge_pages() -> None:
    pages = HugePages()
    loader = Loader("int8", empty=pages.empty)
    tensors = [RandomTensor(name, (96, 1000), 0, 1.0) for name in ("one", "two")]
    plain = [Loader("int8").prepare(each.name, [each]).data.values for each in tensors]
    values = [loader.prepare(each.name, [each]).data.values for each in tensors]
    first, second = map(address_of, values)
    assert second - first == 96 * 1024  # the scales between them are NumPy's: too small for a place there
    assert first % HugePages.PAGE == 0
    for array, same in zip(values, plain, strict=True):
        assert np.array_equal(array, same)
    odd = pages.empty((70_001,), np.uint8)
    assert address_of(pages.empty((70_001,), np.uint8)) == address_of(odd) + 70_016
    larger = pages.empty((HugePages.BLOCK + 1,), np.uint8)
    larger[-1] = 1
    assert larger.size == HugePages.BLOCK + 1


@linux
def test_the_system_is_asked_for_huge_pages() -> None:
    array = HugePages().empty((1 << 20,), np.uint8)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if word == "VmFlags:" and inside:
            assert "hg" in line.split()
            return
        if "-" in word:
            first, last = (int(end, 16) for end in word.split("-"))
            inside = first <= address_of(array) < last
    pytest.fail("the array is in no mapping")


@linux
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_what_could_be_mapped_is_copied_into_huge_pages_and_a_table_that_is_looked_up_is_not(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "source", "untied")
    if dtype != "float32":
        write_checkpoint(folder, tmp_path / "folder", dtype, progress=False)
        folder = tmp_path / "folder"
    logits, mapped = [], []
    for copies in (False, True):
        pages = HugePages()
        monkeypatch.setattr(pages, "copies", lambda nbytes, copies=copies: copies)
        backend = NumpyBackend()
        backend.loader = Loader("auto", empty=pages.empty, copies=pages.copies)
        model = load_model(folder, backend)
        logits.append(logits_of(runner_of(model), [3, 4, 5]))
        arrays = {name: _numbers_of(weight.data) for name, weight in weight_paths(model) if weight.data is not None}
        mapped.append({name for name, array in arrays.items() if array.ndim == 2 and not array.flags.writeable})
    assert np.array_equal(*logits)
    tables = {"embedding.tokens", "embedding.positions"}
    assert mapped[1] == tables & mapped[0] and len(mapped[0]) > len(mapped[1]) > 0


@linux
def test_a_matrix_is_copied_while_half_of_the_memory_stays_available(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [9 << 30]
    monkeypatch.setattr("minillm.backends.loader.total_memory", lambda: 16 << 30)
    monkeypatch.setattr("minillm.backends.loader.free_memory", lambda: free[0])
    pages = HugePages()
    monkeypatch.setattr(pages, "_has_pages", True)
    assert pages.copies(512 << 20) and not pages.copies(2 << 30)  # 8.5 and 7 GiB would stay
    assert not pages.copies(1000)  # too small for a place there
    free[0] = 8 << 30
    assert not pages.copies(512 << 20)
    pages.empty((1 << 20,), np.uint8)
    assert pages.copies(1 << 20)  # there is room in a block
    monkeypatch.setattr(pages, "_has_pages", False)
    assert not pages.copies(1 << 20)


def _numbers_of(data: Any) -> Any:
    return data.values if isinstance(data, Quantized) else data


def address_of(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@pytest.mark.longer
def test_random_numbers_are_the_same_in_parts() -> None:
    tensor = RandomTensor("a", (5000, 700), 0, 0.5)
    parts = list(tensor.chunks())
    assert len(parts) > 2
    np.testing.assert_array_equal(np.concatenate(parts), tensor.load())
    assert tensor.load().std() == pytest.approx(0.5, rel=0.01)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("variant", ["pre-norm", "untied", "post-norm"])
def test_a_model_computes_with_what_its_weights_stand_for(weights: str, variant: str) -> None:
    """In each format the logits are those of a float32 model that holds the expanded numbers."""
    model = tiny_model(variant, backend=NumpyBackend(weights=weights))
    runner, line = runner_of(model), [3, 4, 5, 6, 7, 3]
    logits = logits_of(runner, line)
    kept = {id(value): value for value in _weights(model)}.values()
    assert {w.data.dtype for w in kept if getattr(w.data, "ndim", 0) == 1} <= {np.dtype(np.float32)}
    for weight in kept:
        if weight.data is not None:
            object.__setattr__(weight, "data", np.ascontiguousarray(expand(weight.data)))
    np.testing.assert_allclose(logits, logits_of(runner_of(model), line), atol=1e-5)
    plain = logits_of(runner_of(tiny_model(variant)), line)
    assert (np.abs(logits - plain).max() > 0) == (weights != "float32")


def _weights(part: Any) -> list[Any]:
    """All parameters of a model, by walking its fields."""
    if hasattr(part, "bias") and hasattr(part, "data"):
        return [part]
    parts = part if isinstance(part, tuple) else vars(part).values() if hasattr(part, "__dict__") else ()
    return [weight for child in parts for weight in _weights(child)]


@dataclass(frozen=True)
class Kept:
    """A tensor of a checkpoint in integers."""

    data: Quantized
    dtype: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape

    def stored(self) -> Quantized:
        return self.data

    def load(self) -> Any:
        return expand(self.data)

    def read_into(self, out: Any) -> None:
        out[...] = self.load()

    def chunks(self) -> Any:
        yield self.load()

    def merged_with(self, other: Any) -> None:
        """Never."""


def kept(form: Any, rows: int, group: int = 32) -> Any:
    made = quantize(RandomTensor(form.name, (rows, 128), rows, 1.0).load(), form.bits, group)
    if form.offset_bits:
        zeros = np.random.default_rng(rows).integers(0, 16, made.scales.shape).astype(np.uint8)
        made = replace(made, offsets=zeros if form == INT4_ZEROS else (-made.scales * zeros).astype(np.float16))
    return Kept(made, form.name)


@pytest.mark.parametrize(
    ("forms", "becomes"),
    [
        ((INT4_OFFSETS, INT4_OFFSETS), INT4_OFFSETS),
        ((INT4_ZEROS, INT4_ZEROS), INT4_ZEROS),
        ((INT4, INT4_ZEROS), INT4_ZEROS),
        ((INT4, INT8), INT8),
        ((INT4, INT4_OFFSETS), FLOAT16),
        ((INT8, INT4_ZEROS), FLOAT16),
    ],
)
def test_matrices_of_two_formats_become_one_that_holds_both(forms: Any, becomes: Any) -> None:
    """Bit for bit, or rounded to float16; as experts of one projection too."""
    tensors = [kept(form, 3 + 2 * i) for i, form in enumerate(forms)]
    assert kept_format(tensors, STORED_FORMATS.values()) == becomes
    exact = np.concatenate([tensor.load() for tensor in tensors])
    exact = exact.astype(np.float16).astype(np.float32) if becomes == FLOAT16 else exact
    one = gather(tensors, None)
    np.testing.assert_array_equal(expand(one), exact)
    assert one.nbytes == 8 * becomes.row_bytes(128)
    experts = [kept(form, 4) for form in forms]
    matrices = Loader("auto").prepare_experts("experts", [[expert] for expert in experts]).data.matrices
    assert {matrix.nbytes for matrix in matrices} == {4 * becomes.row_bytes(128)}
    for matrix, expert in zip(matrices, experts, strict=True):
        np.testing.assert_allclose(expand(matrix), expert.load(), rtol=2**-11 if becomes == FLOAT16 else 0, atol=1e-7)


def test_zero_points_of_larger_groups_stay_exact_beside_smaller_groups() -> None:
    tensors = [kept(INT4_ZEROS, 3, 64), kept(INT4, 5, 32)]
    one = gather(tensors, None)
    assert one.group == 32
    np.testing.assert_array_equal(expand(one), np.concatenate([tensor.load() for tensor in tensors]))


def test_bits_of_a_weight() -> None:
    widths = {name: form.row_bytes(3328) * 8 / 3328 for name, form in STORED_FORMATS.items() if form.scale_bits}
    assert widths == {
        "int8": 8.5, "int4": 4.5, "int4 with offsets": 5, "int4 with zero points": 4.75, "Q2_K": 2.625, "Q3_K": 3.4375,
        "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "Q5_0": 5.5, "Q5_1": 6, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "MXFP4": 4.25,
        "NVFP4": 6, "Q5_0X2": 5.5, "NF4": 4.5, "FP4": 4.5,
    }  # fmt: skip
