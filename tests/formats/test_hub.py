"""Models by name: the real huggingface_hub client against a hub of one repository on this machine.

Each call runs in a process of its own: see hub_clients.py.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save

from minillm.errors import ModelNotFoundError, ParameterError
from minillm.formats import find_adapter, find_config, find_model, find_tokenizer, open_checkpoint

from .hub_clients import Clients, settings
from .hub_server import COMMIT, REPO_ID, Hub

SMALL = {"config.json", "tokenizer.json", "vocab.json", "merges.txt"}
DECOYS = [
    "README.md",
    "flax_model.msgpack",
    "tf_model.h5",
    "rust_model.ot",
    "onnx/model.onnx",
    "model.fp16.safetensors",
    "consolidated.safetensors",
    "original/config.json",
]
CLIENT = """
import json, logging, sys
from minillm.formats import find_adapter, find_config, find_model, find_tokenizer
from minillm.errors import MinillmError
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger("minillm").addHandler(handler)
try:
    found_by = {"model": find_model, "config": find_config, "tokenizer": find_tokenizer, "adapter": find_adapter}
    find = found_by[sys.argv[3]]
    options = {"revision": sys.argv[2]} if sys.argv[2] else {}
    answer = {"folder": str(find(sys.argv[1], **options))}
except MinillmError as error:
    answer = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(answer | {"log": records}))
"""


class Answer(NamedTuple):
    folder: Path | None
    error: str
    log: list[str]
    progress: str


def weights(seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    return save({"w": rng.standard_normal((64, 64)).astype(np.float32)})


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {name: f"{name} of the model".encode() for name in SMALL} | dict.fromkeys(DECOYS, b"not wanted" * 9)
    with Hub(files | {"model.safetensors": weights(), "pytorch_model.bin": b"not wanted either"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    clients = Clients(tmp_path_factory.mktemp("clients"))
    yield clients
    clients.close()


@pytest.fixture
def ask(hub: Hub, clients: Clients, tmp_path: Path) -> Callable[..., Answer]:
    def ask(
        name: str = REPO_ID, revision: str = "", offline: bool = False, what: str = "model", room: int | None = None
    ) -> Answer:
        environment = settings(hub, tmp_path / "hf") | {"HF_HUB_OFFLINE": str(int(offline))}
        done = clients.run(CLIENT, name, revision, what, environment=environment, room=room)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        folder = Path(answer["folder"]) if "folder" in answer else None
        return Answer(folder, answer.get("error", ""), answer["log"], done.stderr)

    return ask


@pytest.mark.slow
def test_first_download_fetches_what_is_needed_and_nothing_else(hub, ask):
    first = ask()
    assert sorted(hub.fetched) == sorted(SMALL | {"model.safetensors"})
    assert {path.name for path in first.folder.iterdir()} == SMALL | {"model.safetensors"}
    assert (first.folder / "config.json").read_bytes() == hub.files["config.json"]
    assert open_checkpoint(first.folder)["w"].load().tobytes() == hub.files["model.safetensors"][-64 * 64 * 4 :]
    assert (first.log, first.progress) == ([], "")


@pytest.mark.slow
def test_the_configuration_alone(hub, ask):
    found = ask(what="config")
    assert hub.fetched == ["config.json"]
    assert (found.folder / "config.json").read_bytes() == hub.files["config.json"]
    assert ask(what="config", offline=True).folder == found.folder
    assert "no public model 'tiny/none'" in ask("tiny/none", what="config").error


@pytest.mark.slow
def test_the_tokenizer_alone(hub, ask):
    found = ask(what="tokenizer")
    assert set(hub.fetched) == SMALL
    assert (found.folder / "tokenizer.json").read_bytes() == hub.files["tokenizer.json"]
    assert ask(what="tokenizer", offline=True).folder == found.folder
    assert "no public model 'tiny/none'" in ask("tiny/none", what="tokenizer").error
    assert "there is no folder" in ask("none", what="tokenizer").error


@pytest.mark.slow
def test_an_adapter_is_its_configuration_and_its_weights(hub, ask):
    hub.files |= {"adapter_config.json": b"{}", "adapter_model.bin": b"weights"}
    found = ask(what="adapter")
    assert sorted(hub.fetched) == ["adapter_config.json", "adapter_model.bin"]
    assert ask(what="adapter", offline=True).folder == found.folder
    assert "no public model 'tiny/none'" in ask("tiny/none", what="adapter").error


@pytest.mark.slow
def test_second_time_nothing_is_fetched(hub, ask):
    first = ask()
    hub.fetched.clear()
    hub.requests = 0
    assert ask().folder == first.folder
    assert (hub.fetched, hub.requests) == ([], 1)  # which commit is the branch at?
    assert ask(revision=COMMIT).folder == first.folder
    assert hub.requests == 1  # a commit never changes: nobody is asked


@pytest.mark.slow
def test_offline(hub, ask):
    refused = ask(offline=True)
    assert "HF_HUB_OFFLINE" in refused.error and REPO_ID in refused.error and "'main'" in refused.error
    assert hub.requests == 0
    first = ask()
    hub.stop()
    offline = ask(offline=True)
    assert (offline.folder, offline.log) == (first.folder, [])
    unplugged = ask()  # not told to be offline, but there is no hub
    assert unplugged.folder == first.folder
    assert len(unplugged.log) == 1 and "cached copy" in unplugged.log[0] and hub.endpoint in unplugged.log[0]


def test_no_network_and_not_cached(hub, ask):
    hub.stop()
    answer = ask()
    assert answer.error.startswith("ModelNotFoundError") and hub.endpoint in answer.error and REPO_ID in answer.error


@pytest.mark.slow
def test_bin_weights_are_taken_where_there_are_no_safetensors(hub, ask):
    del hub.files["model.safetensors"]
    ask()
    assert sorted(hub.fetched) == sorted(SMALL | {"pytorch_model.bin"})


@pytest.mark.slow
def test_shards_are_those_of_the_index(hub, ask):
    shards = {f"model-0000{i}-of-00002.safetensors": weights(i) for i in (1, 2)}
    index = json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(shards)}})
    del hub.files["model.safetensors"]
    hub.files |= shards | {"model.safetensors.index.json": index.encode(), "model-00001-of-00009.safetensors": b"old"}
    folder = ask().folder
    assert sorted(hub.fetched) == sorted(SMALL | set(shards) | {"model.safetensors.index.json"})
    hub.fetched.clear()
    assert ask(offline=True).folder == folder


@pytest.mark.slow
def test_a_shard_that_the_repository_lacks(hub, ask):
    del hub.files["model.safetensors"]
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"w": "model-2.safetensors"}}).encode()
    assert "lacks 'model-2.safetensors'" in ask().error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("tiny/none", "", ["ModelNotFoundError", "no public model 'tiny/none'", "spelling"]),
        (REPO_ID, "v9", ["ModelNotFoundError", "no revision 'v9'", REPO_ID]),
        ("not valid/id", "", ["ModelNotFoundError", "nor a valid hub id"]),
    ],
)
def test_what_does_not_exist(ask, name, revision, says):
    answer = ask(name, revision)
    assert all(word in answer.error for word in says), answer
    assert "\n" not in answer.error and answer.folder is None


@pytest.mark.slow
def test_gated(hub, ask):
    hub.gated = True
    error = ask().error
    assert "is gated" in error and "HF_TOKEN" in error and REPO_ID in error


@pytest.mark.slow
def test_access_denied(hub, ask):
    hub.denies_after = 0
    error = ask().error
    assert "denies access" in error and "HF_TOKEN" in error and REPO_ID in error


@pytest.mark.slow
def test_access_denied_between_the_small_files_and_the_weights(hub, ask):
    """Versions of the client differ in what they do here; some hand out the folder as it is."""
    hub.denies_after = len(SMALL)
    answer = ask()
    assert answer.folder is None and answer.error.startswith("ModelNotFoundError")


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "says"), [("config.json", "no config.json"), ("model.safetensors", "no weights")])
def test_a_repository_that_is_no_model(hub, ask, missing, says):
    del hub.files[missing], hub.files["pytorch_model.bin"]
    assert says in ask().error
    assert hub.fetched == []


@pytest.mark.slow
def test_a_file_that_is_listed_and_cannot_be_had(hub, ask):
    hub.hidden.add("model.safetensors")
    error = ask().error
    assert error.startswith("ModelNotFoundError") and "model.safetensors" in error


@pytest.mark.slow
def test_a_download_that_breaks_off_is_no_model_and_the_next_one_succeeds(hub, ask):
    hub.breaks_off = "model.safetensors"
    broken = ask()
    assert broken.error.startswith("ModelNotFoundError") and "try again" in broken.error
    assert "HF_HUB_OFFLINE" in ask(offline=True).error  # what is there in part is not taken for the model
    hub.breaks_off = None
    hub.fetched.clear()
    folder = ask().folder
    assert hub.fetched == ["model.safetensors"]  # the small files were kept
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.slow
def test_a_disk_without_room_is_one_line_and_the_next_download_succeeds(hub, ask):
    answer = ask(room=4096)
    assert answer.error.startswith(f"ModelNotFoundError: model {REPO_ID!r} (revision 'main') could not be fetched")
    assert "File too large" in answer.error and answer.error.count("\n") == 0
    assert ask().folder is not None


def test_a_local_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model(tmp_path) == tmp_path
    assert find_model("owner/name") == Path("owner/name")
    assert find_model("~/owner") == tmp_path / "owner"
    with pytest.raises(ParameterError, match="no effect on the local folder"):
        find_model(tmp_path, revision="main")


@pytest.mark.parametrize(
    "name", ["", ".", "./none", "/none/at/all", "~/none", "none", "a/b/c", "../x", "a\0b/c", "~nobody/x"]
)
def test_a_path_that_is_no_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == ".":
        assert find_model(name) == Path()
        return
    with pytest.raises(ModelNotFoundError):
        find_model(name)


@pytest.mark.parametrize("name", ["none.gguf", "./none.gguf", "/none/at.gguf", "a/b/c/d.GGUF"])
def test_a_gguf_file_that_is_not_there_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ModelNotFoundError, match=r"there is no file .*; .* owner/name/file.gguf"):
        find_model(name)


def test_what_kept_a_tokenizer_from_coming_is_told_without_the_clients_words_about_its_cache(monkeypatch):
    from huggingface_hub import errors

    def no_network(*_: object, **__: object) -> None:
        try:
            raise ConnectionError("no such host")
        except ConnectionError as error:
            raise errors.LocalEntryNotFoundError("An error happened while trying to locate the files") from error

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(ModelNotFoundError, match=r"could not be fetched from \S+ \(no such host\); try again"):
        find_tokenizer("owner/name")


@pytest.mark.longer
def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFoundError, match="not a folder: give the folder"):
        find_model(tmp_path / "model.safetensors")


GGUF = b"GGUF" + bytes(100)


@pytest.mark.slow
def test_a_repository_with_one_gguf_file(hub, ask):
    hub.files = {"README.md": b"a model", "config.json": b"{}", "tiny-Q8_0.gguf": GGUF}
    first = ask()
    assert first.folder.name == "tiny-Q8_0.gguf"
    assert first.folder.read_bytes() == GGUF
    assert hub.fetched == ["tiny-Q8_0.gguf"]
    assert ask(offline=True).folder == first.folder
    assert ask(f"{REPO_ID}/tiny-Q8_0.gguf", offline=True).folder == first.folder


@pytest.mark.slow
def test_of_several_gguf_files_one_is_named(hub, ask):
    names = ("b.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf")
    hub.files = {name: GGUF + name.encode() for name in names}
    assert "holds several GGUF files: name one of a-00001-of-00002.gguf, b.gguf" in ask().error
    assert hub.fetched == []
    assert ask(f"{REPO_ID}/a-00001-of-00002.gguf").folder.name == "a-00001-of-00002.gguf"
    assert sorted(hub.fetched) == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    assert ask(f"{REPO_ID}/b.gguf", what="config").folder.name == "b.gguf"
    assert ask(f"{REPO_ID}/b.gguf", what="tokenizer").folder.name == "b.gguf"
    assert "c.gguf" in ask(f"{REPO_ID}/c.gguf").error


@pytest.mark.parametrize("find", [find_model, find_config, find_tokenizer, find_adapter])
def test_a_name_that_no_model_can_have_is_refused_in_one_line(find):
    with pytest.raises(ModelNotFoundError, match=r"'٣' is neither a folder nor a valid hub id: [^\n]*$"):
        find("٣")
