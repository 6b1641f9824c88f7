"""pytorch_model.bin files as torch itself writes them."""

import numpy as np
import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats import open_checkpoint
from minillm.formats.pytorch import read_torch_zip

from . import torch_archive as archive

torch = pytest.importorskip("torch", reason="writes and reads the .bin format with torch itself")
pytestmark = pytest.mark.reference


def assert_equal(path, tensors):
    ours = read_torch_zip(path)
    assert list(ours) == list(tensors)
    for name, tensor in tensors.items():
        assert ours[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(ours[name].load(), tensor.detach().float().numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_state_dict(tmp_path, dtype):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 5), torch.nn.LayerNorm(5))
    state = module.to(getattr(torch, dtype)).state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_equal(tmp_path / "pytorch_model.bin", state)
    opened = open_checkpoint(tmp_path)
    assert {tensor.dtype for tensor in opened.values()} == {dtype}
    assert all(tensor.map() is not None for tensor in opened.values())


def test_views_parameters_and_tied_weights(tmp_path):
    base = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    state = {
        "base": base,
        "tied": base,
        "transposed": base.T,
        "rows": base[3:9],
        "columns": base[:, ::3],
        "permuted": base.reshape(4, 10, 30).permute(2, 0, 1),
        "parameter": torch.nn.Parameter(base[:2].clone()),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "cut empty": base[5:5],
        "after": torch.randn(3),
    }
    torch.save(state, tmp_path / "m.bin")
    assert_equal(tmp_path / "m.bin", state)


def test_many_tensors(tmp_path):
    """More than 256 memo entries and 1000 items: LONG_BINPUT, and SETITEMS in batches."""
    state = {f"t{i}": torch.full((2,), float(i)) for i in range(1200)}
    torch.save(state, tmp_path / "m.bin")
    assert_equal(tmp_path / "m.bin", state)


def test_other_types_are_refused_when_read(tmp_path):
    torch.save(
        {"w": torch.ones(2), "ids": torch.arange(3), "mask": torch.ones(2, dtype=torch.bool)}, tmp_path / "m.bin"
    )
    ours = read_torch_zip(tmp_path / "m.bin")
    assert (ours["ids"].dtype, ours["mask"].dtype) == ("int64", "bool")
    with pytest.raises(UnsupportedModelError, match=r"'ids'.*int64"):
        ours["ids"].load()


def test_what_is_refused(tmp_path):
    path = tmp_path / "m.bin"
    for content, says in [
        (torch.nn.Linear(2, 2), r"asks for torch\.nn\.modules\.linear\.Linear"),
        ({"state_dict": {"w": torch.ones(2)}}, "holds a Dictionary under 'state_dict', expected a flat dictionary"),
        ([torch.ones(2)], "holds a list"),
        ({"w": torch.ones(1).expand(3)}, "share memory: save it with .contiguous"),
        ({"w": torch.ones(2, dtype=torch.float8_e4m3fn)}, r"'w'|asks for torch\."),
        ({"w": torch.complex(torch.ones(2), torch.ones(2)).conj()}, "holds more than tensors"),
    ]:
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=says):
            read_torch_zip(path)


def test_the_format_of_torch_before_version_1_6_is_refused_by_name(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old\.bin is in the format that torch wrote before version 1\.6"):
        read_torch_zip(tmp_path / "old.bin")


def test_torch_reads_the_archives_of_the_other_tests_as_we_do(tmp_path):
    """So what those tests call valid is."""
    values = np.arange(6, dtype=np.float32)
    content = {"w": archive.tensor(), "t": archive.tensor(archive.tuple_of(3, 2), archive.tuple_of(1, 3))}
    path = archive.write(tmp_path / "m.bin", archive.dictionary(content), {"0": values.tobytes()})
    assert_equal(path, torch.load(path, weights_only=True))
