"""minillm pull: the real client against a hub of one repository on this machine, in processes of their own."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..children import DEFAULT_SIGNALS, prepared
from ..formats.hub_clients import Clients, settings
from ..formats.hub_server import REPO_ID, Hub
from ..terminal import Terminal
from ..tiny import write_checkpoint

Pull = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_checkpoint(tmp_path / "published")
    with Hub({path.name: path.read_bytes() for path in folder.iterdir()} | {"README.md": b"not wanted"}) as hub:
        yield hub


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return settings(hub, tmp_path / "hf")


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    clients = Clients(tmp_path_factory.mktemp("clients"))
    yield clients
    clients.close()


@pytest.fixture
def minillm(clients: Clients, environment: dict[str, str]) -> Pull:
    def minillm(*arguments: str, room: int | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
        code = "from minillm.__main__ import main; main()"
        return clients.run(code, *arguments, environment=environment | settings, room=room)

    return minillm


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failed command says, after the progress bars."""
    assert done.returncode in (1, 2) and done.stdout == "", done
    lines = [line for line in done.stderr.splitlines() if line.startswith("minillm: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0]


@pytest.mark.slow
def test_downloads_show_bars_on_a_terminal_unless_they_are_turned_off(environment: dict[str, str]) -> None:
    code = f"""from minillm import Engine
try: Engine({REPO_ID!r}, backend="numpy", progress=PROGRESS).close()
finally: print("END")"""
    for progress in ("False", "True"):
        settings = environment | {"HF_HOME": f"{environment['HF_HOME']}-{progress}"}
        terminal = Terminal([sys.executable, "-c", code.replace("PROGRESS", progress)], **settings)
        shown = terminal.read_until("END").strip()
        assert terminal.close() == 0
        assert shown == "END" if progress == "False" else "100%" in shown


@pytest.mark.slow
def test_what_is_fetched_and_what_is_said(hub: Hub, minillm: Pull) -> None:
    done = minillm("pull", REPO_ID)
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert "README.md" not in hub.fetched and "model.safetensors" in hub.fetched
    folder = Path(facts["folder"])
    assert {path.name for path in folder.iterdir()} == set(hub.files) - {"README.md"}
    assert facts["family"] == "opt"
    V, P, E, F, L = 512, 64 + 2, 32, 40, 2
    assert facts["parameters"] == f"{V * E + P * E + 2 * E + L * (4 * E * (E + 1) + 2 * E * F + F + E + 4 * E):,}"
    assert facts["next"] == f'minillm generate --model {REPO_ID} --prompt "Once upon a time"'
    assert done.stderr == ""
    generated = minillm("generate", "--model", REPO_ID, "--prompt", "Once", "--backend", "numpy", HF_HUB_OFFLINE="1")
    assert generated.returncode == 0 and generated.stdout.strip()


@pytest.mark.slow
def test_after_an_interruption_complete_files_are_kept_and_parts_removed(
    hub: Hub, minillm: Pull, environment: dict[str, str], tmp_path: Path
) -> None:
    hub.stalls = "model.safetensors"
    command = prepared(DEFAULT_SIGNALS, [sys.executable, "-m", "minillm", "pull", REPO_ID])
    process = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert hub.stalled.wait(30)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors
    assert not list((tmp_path / "hf").rglob("*.incomplete"))
    hub.stalls = None
    hub.fetched.clear()
    done = minillm("pull", REPO_ID)
    assert done.returncode == 0, done.stderr
    assert hub.fetched == ["model.safetensors"]
    folder = Path(done.stdout.splitlines()[0].split(maxsplit=1)[1])
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.slow
def test_a_gguf_file_is_named_or_the_only_one(hub: Hub, minillm: Pull, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="writing the file needs the extra gguf")
    from ..gguf_files import LLAMA, write_llama

    values = write_llama(tmp_path / "tiny.gguf")
    for name in list(hub.files):
        del hub.files[name]
    hub.files |= {"README.md": b"not wanted", "tiny-F32.gguf": (tmp_path / "tiny.gguf").read_bytes()}
    done = minillm("pull", REPO_ID)
    assert hub.fetched == ["tiny-F32.gguf"]
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert facts["file"] == "tiny-F32.gguf" and facts["family"] == LLAMA["model_type"]
    assert facts["parameters"] == f"{sum(array.size for array in values.values()):,}"
    assert facts["next"].startswith(f"minillm generate --model {REPO_ID}/tiny-F32.gguf ")
    hub.files["other.gguf"] = b"GGUF"
    assert "several GGUF files: name one of other.gguf, tiny-F32.gguf" in error_of(minillm("pull", REPO_ID))
    assert minillm("pull", REPO_ID, "--file", "tiny-F32.gguf").stdout == done.stdout
    assert "has no file 'tiny-Q9.gguf'" in error_of(minillm("pull", REPO_ID, "--file", "tiny-Q9.gguf"))
    assert "should be the name of a .gguf file" in error_of(minillm("pull", REPO_ID, "--file", "config.json"))
    assert "truncated" in error_of(minillm("pull", REPO_ID, "--file", "other.gguf"))


@pytest.mark.slow
def test_each_failure_is_one_line(hub: Hub, minillm: Pull, tmp_path: Path) -> None:
    assert "no public model 'tiny/none'" in error_of(minillm("pull", "tiny/none"))
    assert "no revision 'v9'" in error_of(minillm("pull", REPO_ID, "--revision", "v9"))
    assert "HF_HUB_OFFLINE" in error_of(minillm("pull", REPO_ID, HF_HUB_OFFLINE="1"))
    assert "is on this machine already" in error_of(minillm("pull", str(tmp_path)))
    assert "there is no folder 'none'" in error_of(minillm("pull", "none"))
    assert "File too large" in error_of(minillm("pull", REPO_ID, room=1024))
    hub.gated = True
    assert "is gated: accept its terms" in error_of(minillm("pull", REPO_ID))
    hub.gated, hub.denies_after = False, 0
    assert "denies access" in error_of(minillm("pull", REPO_ID))
    hub.denies_after = None
    hub.stop()
    assert f"could not be fetched from {hub.endpoint}" in error_of(minillm("pull", REPO_ID))


@pytest.mark.slow
def test_a_family_that_is_not_run_is_refused_before_its_weights_are_fetched(hub: Hub, minillm: Pull) -> None:
    raw = json.loads(hub.files["config.json"])
    hub.files["config.json"] = json.dumps(raw | {"model_type": "mamba"}).encode()
    assert "model_type is 'mamba'" in error_of(minillm("pull", REPO_ID))
    assert hub.fetched == ["config.json"]


@pytest.mark.slow
def test_the_second_time_and_without_a_network_the_cache_is_described(hub: Hub, minillm: Pull) -> None:
    first = minillm("pull", REPO_ID).stdout
    hub.fetched.clear()
    assert minillm("pull", REPO_ID).stdout == first and hub.fetched == []
    hub.stop()
    assert minillm("pull", REPO_ID, HF_HUB_OFFLINE="1").stdout == first
