"""Reading in chunks: any destination, any view, and no more memory than the destination and one chunk."""

import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm.errors import CheckpointError
from minillm.formats import open_checkpoint
from minillm.formats.tensors import StoredTensor, WeightFile

LOAD = """
import json, sys
from pathlib import Path
import numpy as np
from minillm.formats import open_checkpoint

def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

checkpoint = open_checkpoint(Path(sys.argv[1]))
before, loaded = peak(), []
for tensor in checkpoint.values():
    loaded.append(np.empty(tensor.shape[::-1], np.float32))
    tensor.read_into(loaded[-1].T if len(loaded) % 2 else loaded[-1].reshape(tensor.shape))
checks = [float(array.reshape(-1)[0]) for array in loaded]
print(json.dumps({"peak": peak() - before, "size": sum(array.nbytes for array in loaded), "checks": checks}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of the memory is read from Linux's /proc")
def test_peak_memory_is_the_destination_and_one_chunk(tmp_path):
    """100 MB of fp16 become 200 MB of fp32, half of the tensors transposed on the way."""
    save_file({f"w{i}": np.full((4096, 4096), i, np.float16) for i in range(3)}, tmp_path / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", LOAD, tmp_path], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert sorted(result["checks"]) == list(range(3)) and result["size"] == 3 * 4096 * 4096 * 4
    assert result["peak"] < 1.1 * result["size"]  # the mapping would add half of it, a whole fp16 tensor a sixth


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("as_stored", [False, True])
def test_rows_of_a_fused_weight(tmp_path, dtype, as_stored):
    """Q, K and V read beside each other into one weight, in either layout, and nothing else of it is touched."""
    rng = np.random.default_rng(0)
    parts = {name: rng.standard_normal((5, 7)).astype(dtype) for name in "qkv"}
    save_file(parts, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    kept = dtype if as_stored else np.float32
    rows, columns = np.full((17, 7), 9, kept), np.full((7, 17), 9, kept)
    for i, name in enumerate("qkv"):
        for out in (rows, columns.T):
            out = out.view(np.uint16) if kept == ml_dtypes.bfloat16 else out  # its bits
            checkpoint[name].read_into(out[1 + 5 * i : 6 + 5 * i])
    expected = np.concatenate([np.full((1, 7), 9, dtype), *parts.values(), np.full((1, 7), 9, dtype)]).astype(kept)
    np.testing.assert_array_equal(rows, expected, strict=True)
    np.testing.assert_array_equal(columns, expected.T, strict=True)


def test_a_file_that_became_shorter_is_named(tmp_path):
    """Read straight to where it belongs, and in chunks."""
    save_file({"w": np.ones((64, 64), np.float32)}, tmp_path / "model.safetensors")
    tensor = open_checkpoint(tmp_path)["w"]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    for out in (np.empty((64, 64), np.float32), np.empty((64, 64), np.float32, order="F")):
        with pytest.raises(CheckpointError, match="is shorter than when it was opened"):
            tensor.read_into(out)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_random_views_in_small_chunks(tmp_path, monkeypatch, seed):
    """Against NumPy's own indexing: a random slice of a random permutation of a random array."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(rng.integers(1, 7, size=rng.integers(1, 5))).astype(np.float32)
    steps = tuple(slice(int(rng.integers(0, n)), None, int(rng.integers(1, 3))) for n in base.shape)
    view = base[steps].transpose(rng.permutation(base.ndim))
    (tmp_path / "raw").write_bytes(b"\0" * 8 + base.tobytes())
    offset = 8 + view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    strides = tuple(stride // 4 for stride in view.strides)
    tensor = StoredTensor("view", view.shape, "float32", WeightFile(tmp_path / "raw"), offset, strides)
    monkeypatch.setattr("minillm.formats.tensors.CHUNK_BYTES", 4 * int(rng.integers(1, 20)))
    out = np.full(view.shape, np.nan, np.float32)
    tensor.read_into(out)
    np.testing.assert_array_equal(out, view)
    assert (tensor.map() is not None) == view.flags.c_contiguous
    np.testing.assert_array_equal(tensor.load(), view)


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_each_byte_is_read_once_and_in_order(tmp_path, monkeypatch, axes):
    base = np.arange(40 * 30 * 20, dtype=np.float32).reshape(40, 30, 20)
    (tmp_path / "raw").write_bytes(base.tobytes())
    file, reads = WeightFile(tmp_path / "raw"), []

    class Recorder(io.BufferedReader):
        def readinto(self, buffer):
            reads.append((self.tell(), len(bytes(buffer))))
            return super().readinto(buffer)

    monkeypatch.setattr(file, "opened", lambda: Recorder(io.FileIO(file.path)))
    monkeypatch.setattr("minillm.formats.tensors.CHUNK_BYTES", 10_000)
    view = base.transpose(axes)
    tensor = StoredTensor("view", view.shape, "float32", file, 0, tuple(s // 4 for s in view.strides))
    tensor.read_into(np.empty(view.shape, np.float32))
    assert all(start + size == following for (start, size), (following, _) in itertools.pairwise(reads))
    assert sum(size for _, size in reads) == base.nbytes
    if axes == (0, 1, 2):  # straight to where it belongs
        assert len(reads) == 1
    else:
        assert 10 <= len(reads) <= 20


@pytest.mark.longer
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much of a mapping is resident")
def test_released_pages_leave_memory_and_are_read_again(tmp_path: Path) -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssFile"))  # MiB

    numbers = np.arange(16 << 20, dtype=np.int32)
    numbers.tofile(tmp_path / "numbers")
    tensor = StoredTensor("x", numbers.shape, "int32", WeightFile(tmp_path / "numbers"), 0, (1,))
    tensor.release()  # nothing is mapped yet
    before = resident()
    mapped = tensor.map()
    assert mapped is not None
    assert np.array_equal(mapped, numbers)
    assert resident() > before + 50
    tensor.release()
    assert resident() < before + 10
    assert np.array_equal(mapped, numbers)
