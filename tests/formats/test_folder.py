"""A folder of weights: one file or shards, the index between them, and which format comes first."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm.errors import CheckpointError
from minillm.formats import Checkpoint, open_checkpoint

from . import torch_archive as archive

VALUES = {f"layer.{i}.weight": np.full((2, 3), i, np.float32) for i in range(4)}


def write_shards(folder: Path, weight_map: dict[str, str] | None = None) -> None:
    names = list(VALUES)
    shards = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for shard, inside in shards.items():
        save_file({name: VALUES[name] for name in inside}, folder / shard)
    write_index(folder, weight_map or {name: shard for shard, inside in shards.items() for name in inside})


def write_index(folder: Path, weight_map: object, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": weight_map}))


def write_bin(path: Path, values: dict[str, np.ndarray]) -> None:
    notes = {name: archive.tensor(store=archive.storage(key=str(i))) for i, name in enumerate(values)}
    storages = {str(i): value.tobytes() for i, value in enumerate(values.values())}
    archive.write(path, archive.dictionary(notes), storages)


def assert_holds(checkpoint: Checkpoint, values: dict[str, np.ndarray]) -> None:
    assert set(checkpoint) == set(values) and len(checkpoint) == len(values)
    for name, value in values.items():
        np.testing.assert_array_equal(checkpoint[name].load(), value)


def test_single_file(tmp_path):
    save_file(VALUES, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, VALUES)
    assert checkpoint.files == (tmp_path / "model.safetensors",) and checkpoint.folder == tmp_path
    with pytest.raises(KeyError):
        checkpoint["none"]


def test_shards(tmp_path):
    write_shards(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, VALUES)
    assert [path.name[:11] for path in checkpoint.files] == ["model-00001", "model-00002"]


def test_bin_shards(tmp_path):
    first, second = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    names = list(VALUES)
    write_bin(tmp_path / first, {name: VALUES[name] for name in names[:1]})
    write_bin(tmp_path / second, {name: VALUES[name] for name in names[1:]})
    shard_of = {name: first if name == names[0] else second for name in names}
    write_index(tmp_path, shard_of, "pytorch_model.bin.index.json")
    assert_holds(open_checkpoint(tmp_path), VALUES)


def test_order_of_formats(tmp_path):
    """safetensors before .bin, one file before shards: each step removes the winner."""
    write_bin(tmp_path / "shard.bin", {"bin shard": VALUES["layer.0.weight"]})
    write_index(tmp_path, {"bin shard": "shard.bin"}, "pytorch_model.bin.index.json")
    write_bin(tmp_path / "pytorch_model.bin", {"bin": VALUES["layer.0.weight"]})
    save_file({"shard": np.ones(1, np.float32)}, tmp_path / "shard.safetensors")
    write_index(tmp_path, {"shard": "shard.safetensors"})
    save_file({"single": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    for winner, file in [
        ("single", "model.safetensors"),
        ("shard", "model.safetensors.index.json"),
        ("bin", "pytorch_model.bin"),
        ("bin shard", "pytorch_model.bin.index.json"),
    ]:
        assert list(open_checkpoint(tmp_path)) == [winner]
        (tmp_path / file).unlink()


def test_links_into_a_blob_store_as_in_the_hub_cache(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_shards(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), snapshot))
    assert_holds(open_checkpoint(snapshot), VALUES)


def test_a_tensor_outside_the_index_is_kept_for_the_model_to_judge(tmp_path):
    write_shards(tmp_path, {"layer.0.weight": "model-00001-of-00002.safetensors"})
    assert list(open_checkpoint(tmp_path)) == list(VALUES)[:3]


def test_no_weights(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"holds no weights: looked for model\.safetensors, .*found no file at all"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "tf_model.h5").touch()
    (tmp_path / "model.safetensors").mkdir()  # a folder is no file
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin\.index\.json; found tf_model\.h5"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        open_checkpoint(tmp_path / "none")


def test_missing_shard(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 files that .*index\.json lists.*'model-00002-of-00002"):
        open_checkpoint(tmp_path)


def test_tensor_missing_from_its_shard(tmp_path):
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    write_shards(tmp_path, {"layer.0.weight": shards[0], "layer.3.weight": shards[1], "layer.4.weight": shards[1]})
    with pytest.raises(CheckpointError, match=r"'layer\.4\.weight' is missing from .*model-00002-of-00002"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({"tied": np.ones(1, np.float32), shard: np.ones(1, np.float32)}, tmp_path / shard)
    listed = {"a.safetensors": "a.safetensors", "b.safetensors": "b.safetensors"}
    write_index(tmp_path, listed | {"tied": "b.safetensors"})
    assert open_checkpoint(tmp_path)["tied"].file.path.name == "b.safetensors"  # the index decides
    write_index(tmp_path, listed)
    with pytest.raises(CheckpointError, match=r"'tied' is both in .*a\.safetensors and in .*b\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "..", ".", "", "..\\x", 7, None]
)
def test_an_index_that_leaves_the_folder(tmp_path, shard):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.ones(1, np.float32)}, tmp_path / "x.safetensors")
    write_index(folder, {"w": shard})
    with pytest.raises(CheckpointError, match=r"index\.json places tensor 'w' in .* expected a file name"):
        open_checkpoint(folder)


@pytest.mark.parametrize("shard", ["x" * 5000, "a\0b", "\ud800"])
def test_shard_names_that_no_file_can_have(tmp_path, shard):
    write_index(tmp_path, {"w": shard})
    with pytest.raises(CheckpointError, match=r"lacks 1 files|half a surrogate pair") as raised:
        open_checkpoint(tmp_path)
    str(raised.value).encode()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a JSON text"),
        ("[]", "expected a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": "b", "a": "c"}}', "key 'a' twice"),
    ],
)
def test_an_unusable_index(tmp_path, text, says):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"(?=.*model\.safetensors\.index\.json).*{says}"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path):
    save_file(VALUES, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").chmod(0)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Permission denied"):
        open_checkpoint(tmp_path)
