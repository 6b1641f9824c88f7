"""Compiling and keeping the C kernels, with two small sources in place of the real ones."""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from minillm.backends.cpu import compiling
from minillm.errors import DeviceError

from ...children import in_child

pytestmark = pytest.mark.skipif(not compiling.compilers(), reason="needs a C compiler")

NUMBER = '#include "number.h"\nint number(void) { return NUMBER; }\n'
COMPILING = "compiling kernels for this processor; this happens once and takes about 25 s of processor time\n"
ROOT = "#include <math.h>\ndouble root(double x) { return sqrt(x); }\n"


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """A folder of kernels; the cache and temporary files are in folders of the test's own."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "number.c").write_text(NUMBER)
    (folder / "number.h").write_text("#define NUMBER 7\n")
    (folder / "root.c").write_text(ROOT)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(compiling, "SOURCES", folder)
    monkeypatch.setattr(compiling, "_test", lambda library, compiler: None)  # test_selftest.py has the real one
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CC", "MINILLM_MARCH"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level("INFO", "minillm.kernels")
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(sources: Path):
    yield
    compiling._load.cache_clear()  # later tests load the kernels themselves
    assert not list(sources.with_name("scratch").iterdir()), "temporary files are left"


def load(caplog: pytest.LogCaptureFixture) -> tuple[int, bool]:
    """The result of `number` in a library loaded as a new process would, and whether it was compiled."""
    caplog.clear()
    compiling._load.cache_clear()
    loaded = compiling.load()
    return loaded.number(), any(line.startswith("compiled the kernels") for line in caplog.messages)


def stored() -> list[Path]:
    return sorted(compiling.cache_folder().iterdir())


def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda _: None)


# --- compiling --------------------------------------------------------------------------------------------------------


def test_it_is_compiled_once_and_loaded_out_of_the_cache_then(caplog) -> None:
    assert load(caplog) == (7, True)
    assert caplog.messages[0] == COMPILING.strip()
    assert load(caplog) == (7, False)
    assert not caplog.messages
    assert len(stored()) == 1
    assert compiling.load() is compiling.load()


def test_all_sources_are_in_one_library() -> None:
    compiling._load.cache_clear()
    loaded = compiling.load()
    loaded.root.restype, loaded.root.argtypes = ctypes.c_double, [ctypes.c_double]
    assert (loaded.number(), loaded.root(9.0)) == (7, 3.0)


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["number.c", "number.h", "new.h"])
def test_changed_sources_are_compiled_again(name: str, sources: Path, caplog) -> None:
    load(caplog)
    path = sources / name
    path.write_text((path.read_text() if path.exists() else "") + "/* changed */\n")
    assert load(caplog) == (7, True)
    assert len(stored()) == 2
    (sources / "number.h").write_text("#define NUMBER 8\n")
    assert load(caplog) == (8, True)


@pytest.mark.longer
def test_each_target_compiler_processor_and_argument_has_a_library_of_its_own(monkeypatch, caplog, tmp_path) -> None:
    load(caplog)
    with monkeypatch.context() as other:
        other.setattr(compiling, "_processor", lambda: "another one")
        assert load(caplog) == (7, True)
    real = compiling.compilers()[0][0]
    for version in ("1", "2"):
        compiler = tmp_path / "cc"
        compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo version {version} && exit\nexec {real} "$@"\n')
        compiler.chmod(0o700)
        monkeypatch.setenv("CC", str(compiler))
        assert load(caplog) == (7, True)
        assert load(caplog) == (7, False)
    monkeypatch.setenv("CC", f"{compiler} -DNUMBER_OF_ARGUMENTS='1 + 1'")
    assert load(caplog) == (7, True)
    assert len(stored()) == 5


@pytest.mark.longer
@pytest.mark.skipif(compiling.platform.machine() != "x86_64", reason="names a target of x86")
def test_a_target_named_by_the_environment(monkeypatch, sources: Path, caplog) -> None:
    (sources / "number.c").write_text("int number(void) {\n#ifdef __AVX__\nreturn 256;\n#endif\nreturn 128;\n}\n")
    monkeypatch.setenv("MINILLM_MARCH", "x86-64-v2")
    assert load(caplog) == (128, True)
    monkeypatch.setenv("MINILLM_MARCH", "x86-64-v3")
    assert load(caplog) == (256, True)
    monkeypatch.setenv("MINILLM_MARCH", "nonsense")
    with pytest.raises(DeviceError, match=r"do not compile by .*cc: .*error: .*nonsense"):
        load(caplog)


def test_zig_spells_targets_with_underscores(monkeypatch) -> None:
    monkeypatch.setenv("MINILLM_MARCH", "x86-64-v3")
    assert compiling._flags(["python", "-m", "ziglang", "cc"])[-1] == "-march=x86_64_v3"
    assert compiling._flags(["gcc"])[-1] == "-march=x86-64-v3"


# --- no compiler, or one that fails -----------------------------------------------------------------------------------


def test_without_a_compiler_it_says_how_to_get_one(monkeypatch, caplog) -> None:
    assert compiling.available()
    without_compilers(monkeypatch)
    assert not compiling.available()
    with pytest.raises(DeviceError, match=r"need a C compiler: found neither CC nor cc, .* pip install ziglang$"):
        load(caplog)


def test_without_a_compiler_a_stored_library_will_do(monkeypatch, sources: Path, caplog) -> None:
    load(caplog)
    without_compilers(monkeypatch)
    assert compiling.available()
    assert load(caplog) == (7, False)
    (sources / "number.h").write_text("#define NUMBER 8\n")
    assert not compiling.available()


def test_a_compiler_that_does_not_work_gives_way_to_the_next(tmp_path: Path, monkeypatch, caplog) -> None:
    """As macOS's cc without its command line tools, or one that refuses the sources."""
    good = compiling.compilers()[0][0]
    for name, script in {"cc": "exit 1", "gcc": '[ "$1" = --version ] || exit 1', "clang": f'exec {good} "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiling._load.__wrapped__()
    assert len(list(compiling.cache_folder().glob("*.so"))) == 1
    caplog.clear()
    compiling._load.__wrapped__()
    assert not caplog.messages  # it is found without trying the others again
    (tmp_path / "clang").write_text("#!/bin/sh\nexit 2\n")
    shutil.rmtree(tmp_path / "minillm")
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"by .*/cc: exit code 1; pip install ziglang brings a compiler$"):
        compiling._load.__wrapped__()


def test_where_temporary_files_may_not_run_kernels_are_built_where_they_are_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling, "_runs_nothing", lambda folder: True)
    built: list[Path] = []
    monkeypatch.setattr(compiling, "_test", lambda library, compiler: built.append(library))
    compiling._load.__wrapped__()
    folder = compiling.cache_folder()
    assert built[0].parent.parent == folder and [path.suffix for path in folder.iterdir()] == [".so"]


@pytest.mark.longer
def test_kernels_that_cannot_be_loaded_where_they_are_kept_run_from_where_they_were_built(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    """As on a disk from which nothing may be run, or one that is full."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    real = ctypes.CDLL

    def load(path: str) -> ctypes.CDLL:
        if path.startswith(str(tmp_path / "minillm")):
            raise OSError("failed to map segment")
        return real(path)

    monkeypatch.setattr(compiling.ctypes, "CDLL", load)
    for _ in range(2):
        compiling._load.__wrapped__()
    assert "in every run, since none are kept: failed to map segment" in caplog.text


@pytest.mark.slow
def test_children_that_seem_to_succeed_are_not_believed(tmp_path: Path) -> None:
    """Every child ends with 0 for Python if SIGCHLD is ignored, as daemons do."""
    compiler = tmp_path / "empty"  # makes a library without kernels
    library = f'while [ "$1" != -o ]; do shift; done; exec {compiling.compilers()[0][0]} -shared -x c /dev/null -o "$2"'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) {library};; esac\n')
    compiler.chmod(0o700)
    code = "from minillm.backends.cpu.compiling import load; load()"
    for command, expected in (("false", "do not compile by"), (str(compiler), "fail their test: .*undefined symbol")):
        environment = os.environ | {"CC": command, "XDG_CACHE_HOME": str(tmp_path)}
        shell = ["sh", "-c", 'trap "" CHLD; exec "$@"', "sh", sys.executable, "-c", code]
        done = subprocess.run(shell, env=environment, capture_output=True, text=True)
        assert re.search(expected, done.stderr), done.stderr
        assert not list(tmp_path.rglob("*.so"))


def test_a_child_forked_while_a_thread_compiles_compiles_for_itself() -> None:
    with compiling._LOADING:
        assert in_child(lambda: compiling._LOADING.acquire(timeout=5))


def test_the_package_ziglang_is_the_last_resort(monkeypatch) -> None:
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: name == "ziglang" or None)
    assert compiling.compilers()[0][0].endswith("cc")
    monkeypatch.setenv("PATH", "")
    assert compiling.compilers() == [[sys.executable, "-m", "ziglang", "cc"]]
    assert compiling.available()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("false", r"^the C kernels do not compile by .*/false: exit code 1$"),
        ("no-such-compiler -O1", r"^CC should be a compiler's command: there is no program 'no-such-compiler'$"),
        ("cc 'open", r"^CC should be a compiler's command: found .* \(No closing quotation\)$"),
        ("cc --no-such-argument", r"error: unrecognized .*--no-such-argument"),
    ],
    ids=["fails", "missing", "quotation", "argument"],
)
def test_a_wrong_CC_is_one_line(command: str, reason: str, monkeypatch, caplog) -> None:  # noqa: N802
    monkeypatch.setenv("CC", command)
    with pytest.raises(DeviceError, match=reason):
        load(caplog)
    compiling.available()  # raises nothing


def test_a_file_that_is_no_program_is_one_line(tmp_path: Path, monkeypatch, caplog) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"\0\1\2")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(DeviceError, match=r"^the C compiler .*/compiler cannot be run: Exec format error$"):
        load(caplog)


@pytest.mark.longer
def test_the_first_error_of_a_source_is_the_message(sources: Path, caplog) -> None:
    (sources / "number.c").write_text("int unused;\n#warning of something\nint number(void) { return seven; }\n")
    with pytest.raises(DeviceError, match=r": number\.c:3:\d+: error: .*seven.* undeclared") as error:
        load(caplog)
    assert "\n" not in str(error.value)
    assert not stored()


@pytest.mark.longer
def test_a_library_that_fails_its_test_is_not_kept(monkeypatch, caplog) -> None:
    def fail(*_: object) -> None:
        raise DeviceError("fails its test")

    monkeypatch.setattr(compiling, "_test", fail)
    for _ in range(2):
        with pytest.raises(DeviceError, match="fails its test"):
            load(caplog)
        assert not stored()


def test_no_sources_is_one_line(sources: Path, caplog) -> None:
    for path in sources.iterdir():
        path.unlink()
    assert not compiling.available()
    with pytest.raises(DeviceError, match=r"the C kernels are not in .*sources: install minillm again"):
        load(caplog)


SCRIPT = """
import sys, tempfile
from pathlib import Path
from minillm.backends.cpu import compiling
compiling.SOURCES = Path(sys.argv[1])
compiling._test = lambda library, compiler: None
tempfile.tempdir = sys.argv[2]
if sys.argv[3:]:
    from minillm.cli.startup import end_at_signals
    end_at_signals()
try:
    print(compiling.load().number(), flush=True)
except KeyboardInterrupt:
    print("interrupted")
"""


def start(sources: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", SCRIPT, str(sources), str(sources.with_name("scratch")), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_several_processes_at_once(sources: Path, caplog) -> None:
    processes = [start(sources) for _ in range(4)]
    for process in processes:
        output, messages = process.communicate()
        assert output == "7\n" and messages in (COMPILING, "")
    assert load(caplog) == (7, False)
    assert len(stored()) == 1


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize(
    ("as_command", "number"), [(False, signal.SIGINT), (True, signal.SIGINT), (True, signal.SIGTERM)]
)
def test_a_signal_ends_the_compiler_too(as_command: bool, number: int, sources: Path, tmp_path, monkeypatch) -> None:
    compiler, began = tmp_path / "slow", tmp_path / "began"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho $$ >> {began}\nsleep 100\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    process = start(sources, *["command"] * as_command)
    while not began.exists() or len(began.read_text().split()) < 2:  # one compiler for each source
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    output, messages = process.communicate(timeout=20)
    assert (output, messages) == ("" if as_command else "interrupted\n", COMPILING)
    for child in map(int, began.read_text().split()):
        for _ in range(500):
            with contextlib.suppress(FileNotFoundError):
                if Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
                    time.sleep(0.01)
                    continue
            break
        else:
            pytest.fail("a compiler is still running")
    assert not stored()


@pytest.mark.slow
def test_only_the_libraries_used_last_are_kept(sources: Path, caplog) -> None:
    load(caplog)
    [oldest] = stored()
    names = [f"{n:032x}-{n:08x}-{n:032x}.so" for n in range(compiling.KEPT + 2)]
    for days, name in enumerate([oldest.name, *names]):
        path = oldest.with_name(name)
        path.touch()
        os.utime(path, (0, time.time() - 86400 * (100 - days)))
    others = [oldest.with_name(name) for name in ("notes.txt", "numbers.so")]
    for other in others:
        other.touch()
        os.utime(other, (0, 0))
    assert load(caplog) == (7, False)  # which is a use
    assert len(stored()) == 1 + len(names) + len(others)
    (sources / "number.h").write_text("#define NUMBER 8\n")
    assert load(caplog) == (8, True)
    kept = {path.name for path in stored()} - {other.name for other in others}
    assert oldest.name in kept and len(kept) == compiling.KEPT
    assert kept & set(names) == set(names[-(compiling.KEPT - 2) :])


# --- what is damaged, exchanged or another's --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(b""), marks=pytest.mark.slow),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes().replace(b"number", b"nunber")), marks=pytest.mark.slow
        ),
        pytest.param(lambda path: path.write_bytes(os.urandom(9000)), marks=pytest.mark.slow),
        pytest.param(lambda path: path.unlink(), marks=pytest.mark.slow),
        pytest.param(lambda path: (path.unlink(), path.symlink_to("/dev/zero")), marks=pytest.mark.slow),
        pytest.param(lambda path: (path.unlink(), path.symlink_to(path.name)), marks=pytest.mark.slow),
        lambda path: (path.rename(path.with_name("moved")), path.symlink_to("moved")),
        pytest.param(lambda path: (path.unlink(), os.mkfifo(path)), marks=pytest.mark.slow),
    ],
    ids=["empty", "last byte", "changed", "noise", "missing", "link", "loop", "link to itself moved", "pipe"],
)
def test_a_damaged_library_is_compiled_again(damage, caplog) -> None:
    load(caplog)
    [path] = stored()
    content = path.read_bytes()
    path.unlink()  # this process has the file mapped: what is damaged is a copy
    path.write_bytes(content)
    damage(path)
    assert load(caplog) == (7, True)
    assert load(caplog) == (7, False)
    assert not path.is_symlink() and path.read_bytes() == content


@pytest.mark.longer
def test_exchanged_libraries_are_noticed(sources: Path, caplog) -> None:
    """Each is whole, but in the other's place; also under a name made of one's key and the other's digest."""
    load(caplog)
    (sources / "number.h").write_text("#define NUMBER 8\n")
    load(caplog)
    one, other = stored()
    held, kept = one.read_bytes(), other.read_bytes()
    for path, content in ((one, kept), (other, held)):
        path.unlink()
        path.write_bytes(content)
        key, digest = path.name.rpartition("-")[0], (other if path == one else one).name.rpartition("-")[2]
        path.with_name(f"{key}-{digest}").write_bytes(content)
    assert load(caplog) == (8, True)
    assert load(caplog) == (8, False)


@pytest.mark.longer
def test_a_folder_in_its_place_is_one_warning(caplog) -> None:
    load(caplog)
    [path] = stored()
    path.unlink()
    path.mkdir()
    assert load(caplog) == (7, True)
    [line] = [line for line in caplog.messages if "cannot be kept" in line]
    assert "Is a directory" in line


def test_a_disk_without_room_is_one_warning(caplog, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compiling, "replace_file", fail)
    assert load(caplog) == (7, True)
    [line] = [line for line in caplog.messages if "cannot be kept" in line]
    assert "No space left on device" in line


needs_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="gives folders to another user")


def give_away(path: Path) -> None:
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: folder.chmod(0o777), "other users may write to"),
        pytest.param(lambda folder: folder.chmod(0o720), "other users may write to", marks=pytest.mark.slow),
        pytest.param(lambda folder: folder.parent.chmod(0o777), "other users may write to", marks=pytest.mark.slow),
        pytest.param(give_away, "belongs to another user", marks=needs_root),
        *(
            pytest.param(change, "belongs to another user", marks=[needs_root, pytest.mark.slow])
            for change in (lambda folder: give_away(folder.parent), lambda folder: give_away(folder.parents[1]))
        ),
    ],
    ids=["others write", "a group writes", "others write above", "another's", "in another's", "above another's"],
)
def test_a_folder_that_others_could_write_to_is_not_used(change, reason: str, caplog, monkeypatch) -> None:
    load(caplog)
    change(compiling.cache_folder())
    before = stored()
    assert load(caplog) == load(caplog) == (7, True)
    [line] = [line for line in caplog.messages if line.startswith("compiling")]
    assert reason in line and "XDG_CACHE_HOME" in line
    assert stored() == before
    without_compilers(monkeypatch)
    assert not compiling.available()


@needs_root
def test_a_link_into_another_s_folder_is_not_followed_and_nothing_is_made_there(tmp_path: Path, caplog) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    give_away(theirs)
    compiling.cache_folder().parents[1].mkdir()
    compiling.cache_folder().parent.symlink_to(theirs)
    assert load(caplog) == (7, True)
    assert "theirs belongs to another user" in caplog.text
    assert not list(theirs.iterdir())


@pytest.mark.longer
@needs_root
def test_another_s_file_in_a_folder_of_one_s_own_is_not_loaded(caplog) -> None:
    load(caplog)
    [path] = stored()
    give_away(path)
    assert load(caplog) == (7, True)
    assert path.stat().st_uid == 0


def test_folders_are_made_for_this_user_alone(caplog) -> None:
    before = os.umask(0)
    try:
        load(caplog)
    finally:
        os.umask(before)
    made = [compiling.cache_folder().parent, compiling.cache_folder(), *stored()]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700, 0o700, 0o600]


def test_a_sticky_folder_above_will_do(tmp_path: Path, caplog) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    assert load(caplog) == (7, True)
    assert load(caplog) == (7, False)
