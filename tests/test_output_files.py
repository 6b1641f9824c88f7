"""Users' files: whole or not at all, links and modes kept, pipes and devices written and never replaced."""

import errno
import importlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.cli.main import run
from minillm.errors import CheckpointError, ParameterError, UsageError
from minillm.output_files import check_writable, new_folder, undo_unfinished, undone_by_signals, write_file

from .children import prepared

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links, pipes and devices of POSIX")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "new.html", "é\n")
    finally:
        os.umask(before)
    assert (tmp_path / "new.html").read_bytes() == b"\xc3\xa9\n"
    assert stat.S_IMODE((tmp_path / "new.html").stat().st_mode) == 0o640


def test_the_target_of_a_link_is_written_and_keeps_its_mode_and_owner(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "page.html", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    owner = 65534 if os.getuid() == 0 else os.getuid()
    os.chown(target, owner, -1)
    link.symlink_to("folder/page.html")
    write_file(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert (stat.S_IMODE(target.stat().st_mode), target.stat().st_uid) == (0o600, owner)
    assert names(tmp_path / "folder") == ["page.html"]


def test_a_link_to_nothing_stays_and_gets_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "later.html")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "later.html").read_text() == "new"


def test_a_pipe_is_written_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (tmp_path / "copy").open("wb") as copy, subprocess.Popen(["cat", str(pipe)], stdout=copy) as reader:
        write_file(pipe, b"x" * 200_000)
        assert reader.wait(timeout=60) == 0
    assert (tmp_path / "copy").read_bytes() == b"x" * 200_000
    assert pipe.is_fifo()


def test_a_device_is_written_and_stays_one(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        write_file(device, "new")
    except PermissionError:
        pytest.skip("no device can be made here")
    except UsageError as error:
        assert "Permission denied" in str(error), error  # a file system mounted without devices
    assert device.is_char_device()
    assert names(tmp_path) == ["null"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_that_takes_nothing_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"^/dev/full cannot be written: No space left on device$"):
        write_file(Path("/dev/full"), "new")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_standard_output_that_is_a_file_keeps_what_is_printed_before_and_after(stream: str, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from minillm.output_files import write_file; s = sys." + stream + "\n"
        f"s.write('before '); write_file(Path('/dev/{stream}'), 'page'); s.write(' after')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], **{stream: out}, check=True, timeout=60)
    assert (tmp_path / "out").read_text() == "before page after"


def test_what_cannot_be_written_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("old")
    for name, reason in (
        (".", "Is a directory"),
        ("missing/page", "No such file or directory"),
        ("file/page", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("n" * 300, "File name too long"),
        ("a\0b", "null"),
    ):
        with pytest.raises(UsageError, match=f"cannot be written: .*{reason}") as caught:
            write_file(tmp_path / name, "new")
        assert str(caught.value).isprintable()
        if name not in ("loop", "n" * 300):  # which only the attempt finds out
            with pytest.raises(UsageError, match=f"cannot be written: .*{reason}"):
                check_writable(None, tmp_path / name)
    check_writable(None, tmp_path / "file", tmp_path / "new", Path("/dev/stdout"), Path("/dev/null"))
    assert names(tmp_path) == ["file", "loop"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write everything")
def test_a_file_that_may_only_be_read_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o444)
    with pytest.raises(UsageError, match="it is read-only"):
        write_file(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.longer
def test_a_disk_that_fills_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    code = (
        "import sys; from pathlib import Path; from minillm.output_files import write_file\n"
        f"write_file(Path({str(tmp_path / 'file')!r}), b'x' * 100_000)"
    )
    result = subprocess.run(
        prepared(
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))", [sys.executable, "-c", code]
        ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "UsageError" in result.stderr.splitlines()[-1] and "File too large" in result.stderr.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_what_is_unfinished_is_undone_the_latest_first_and_errors_stop_nothing() -> None:
    undone = []

    def fail() -> None:
        raise PermissionError

    with undone_by_signals(lambda: undone.append("first")), undone_by_signals(fail):
        with undone_by_signals(lambda: undone.append("finished")):
            pass
        with undone_by_signals(lambda: undone.append("last")):
            undo_unfinished()
    assert undone == ["last", "first"]


@pytest.mark.parametrize(
    ("option", "starts"), [("--html", b"<!DOCTYPE html>"), ("--png", b"\x89PNG")], ids=["page", "picture"]
)
@pytest.mark.slow
def test_commands_write_through_links_and_leave_devices(option: str, starts: bytes, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `plot`")
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    assert run(["analyze", "opt-125m", option, str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes().lower().startswith(starts.lower())
    if option == "--png":
        return
    assert run(["analyze", "opt-125m", option, "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()
    assert run(["analyze", "opt-125m", option, "/dev/full"]) == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err


def test_benchmarks_write_through_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    harness = importlib.import_module("harness")
    (tmp_path / "link.csv").symlink_to("target.csv")
    harness.write_csv(tmp_path / "link.csv", {"question": "which?"}, ["a"], [["x,y"]])
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "target.csv").read_bytes() == b'# question: which?\na\n"x,y"\n'
    with pytest.raises(harness.BenchmarkError, match="cannot be written: Is a directory"):
        harness.write_result(tmp_path, "")


# --- folders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_nothing_is_left_of_a_folder_that_was_not_finished(tmp_path: Path, error: BaseException) -> None:
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught, new_folder(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
        assert not (tmp_path / "out").exists()
        raise error
    assert list(tmp_path.iterdir()) == []
    if isinstance(error, OSError):
        assert str(caught.value) == (
            f"{tmp_path / 'out'} cannot be written: No space left on device; nothing of it was left behind"
        )


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "a").read_text() == "1"
    with pytest.raises(ParameterError, match="out exists already"), new_folder(tmp_path / "out"):
        pass
    with pytest.raises(ParameterError, match=r"there is no folder .*no to write 'such' into"):
        new_folder(tmp_path / "no" / "such").__enter__()


def test_what_came_in_between_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="exists already"), new_folder(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
