"""Loads the C kernels of `kernels/cpu/`: the installed package's own, or compiled for this processor, once.

A wheel for one system has libraries (`prebuilt.py`); the one for this processor passes the test below before its first
use, which a file `DIGEST.passed` in the cache notes. The kernels are compiled where there are none, and with
MINILLM_COMPILE=1.

The compiled library is kept in the user's cache folder. Loading it runs its code, so a folder is used only if no one
but its owner, this user, can write to it (`why_unusable`), and a file only if its content has the digest in its name.
That name, `KEY-COMPILER-DIGEST.so`, also says what it was compiled from, for which processor and with which compiler:
machines may share a home directory. The `KEPT` libraries that were used last stay. A fresh build is used, and kept,
only if it passes `selftest.py` in a process of its own, since instructions that the processor does not have end the
process.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import itertools
import logging
import os
import platform
import re
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ...errors import DeviceError, one_line, shown
from ...output_files import replace_file, undone_by_signals, why_unusable
from ...progress import Work, work
from .. import compiling, kernel_sources
from . import prebuilt

_LOGGER = logging.getLogger("minillm.kernels")
_LOGGER.addFilter(one_line)

SOURCES = kernel_sources("cpu")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-Wall")
"""Contraction is off: kernels name their fused multiply-adds, so that a sum has the same bits in every loop."""

KEPT = 32
PATIENCE = 120
"""Seconds after which the test of a build counts as failed; it takes less than one."""
PASSED = "the kernels agree with NumPy"
"""Last line of a test that found nothing"""

_LOADING = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child has none of the threads that may hold it
    os.register_at_fork(after_in_child=lambda: globals().update(_LOADING=threading.Lock()))
_chosen: Path | None = None
"""The file that `use` set"""
_PROCESSOR = re.compile(r"(vendor_id|cpu family|model|model name|flags|Features|CPU \w+)\s*:")
"""The lines of /proc/cpuinfo that name a processor; others change from one moment to the next, such as its clock."""


def load() -> ctypes.CDLL:
    """The library of all C kernels, loaded once per process: the wheel's, a stored one, or compiled.

    Environment variables: MINILLM_COMPILE=1 compiles though the wheel has a library; CC names the compiler, with
    arguments; MINILLM_MARCH a target in place of "native", such as x86-64-v3, for which is compiled; XDG_CACHE_HOME the
    folder that has the cache.

    Raises:
        DeviceError: there is no compiler, it refuses the sources, or what it makes of them fails its test.
    """
    with _LOADING:
        return _load() if _chosen is None else ctypes.CDLL(str(_chosen))


def use(library: Path) -> None:
    """Take a file for the library in this process, for its test."""
    global _chosen
    _chosen = library


def available() -> bool:
    """Whether there is a library for this processor, the wheel's or a stored one, or a compiler. Compiles nothing."""
    try:
        if not _compile_anyway() and prebuilt.library(SOURCES):
            return True
        if os.name != "posix" or not any(SOURCES.glob("*.c")):
            return False
        if compilers():
            return True
        folder = cache_folder()
        return why_unusable(folder) is None and _stored(folder, _key()) is not None
    except (DeviceError, OSError):
        return False


class CompilerError(DeviceError):
    """A compiler cannot be run, or refuses the sources: another one may not."""


@cache
def _load() -> ctypes.CDLL:
    if not _compile_anyway() and (path := prebuilt.library(SOURCES)):
        try:
            return _load_prebuilt(path)
        except (DeviceError, OSError) as error:
            _LOGGER.warning("the wheel's kernels are not used: %s", error)
    if os.name != "posix":
        raise DeviceError(f"the C kernels need Linux or macOS: found {platform.system()}")
    commands = compilers()
    folder = cache_folder()
    why = why_unusable(folder)
    candidates: list[list[str] | None] = [*commands] or [None]  # without a compiler, what one has made before
    stored = (_stored(folder, _key(compiler)) for compiler in candidates if why is None)
    if path := next(filter(None, stored), None):
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:  # a disk from which nothing may be run
            why = str(error)
    if not commands:
        raise DeviceError(
            f"the C kernels need a C compiler: found neither CC nor {', '.join(COMPILERS)}; install gcc "
            "(apt install gcc libc6-dev), clang (xcode-select --install), or pip install ziglang"
        )
    first: CompilerError | None = None
    for command in commands:
        try:
            return _build(command, folder, why)
        except CompilerError as error:  # as macOS's cc without the command line tools, or a gcc before 9
            first = first or error
    assert first is not None
    chosen = os.environ.get("CC", "").strip() or os.environ.get("MINILLM_MARCH") or importlib.util.find_spec("ziglang")
    raise first if chosen else DeviceError(f"{first}; pip install ziglang brings a compiler")


def _compile_anyway() -> bool:
    """Whether the user asks for kernels compiled here."""
    return os.environ.get("MINILLM_COMPILE", "0") != "0" or bool(os.environ.get("MINILLM_MARCH"))


def _load_prebuilt(path: Path) -> ctypes.CDLL:
    """A library of the wheel, which passes its test before its first use on this processor.

    Raises:
        DeviceError: it fails.
        OSError: it cannot be loaded.
    """
    folder = cache_folder()
    usable = os.name != "posix" or why_unusable(folder) is None
    passed = folder / f"{hashlib.sha256(_processor().encode() + path.read_bytes()).hexdigest()[:32]}.passed"
    if not (usable and passed.exists()):
        if reason := _failure(path):
            raise DeviceError(f"{path} fails its test: {reason}")
        if usable:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)  # where `why_unusable` has not made it
                replace_file(passed, b"", mode=0o600)
    return ctypes.CDLL(str(path))


def _build(compiler: list[str], folder: Path, why: str | None) -> ctypes.CDLL:
    """The library, compiled, tested, and kept in a folder unless `why` says why not."""
    key = _key(compiler)
    if why is None:
        _LOGGER.warning(
            "compiling kernels for this processor; this happens once and takes about 25 s of processor time"
        )
    else:
        _LOGGER.warning(
            "compiling kernels, in every run, since none are kept: %s; XDG_CACHE_HOME names another folder", why
        )
    import tempfile

    inside = folder if why is None and _runs_nothing(Path(tempfile.gettempdir())) else None
    with _private_folder(inside) as scratch, compiling():
        began = time.perf_counter()
        with work("compiling kernels", len(list(SOURCES.glob("*.c"))) + 2, "steps") as progress:
            compiled = _compile(compiler, scratch, progress)
            seconds = time.perf_counter() - began
            _test(compiled, compiler)
            progress.advance()
        _LOGGER.info("compiled the kernels by %s in %.1f s", compiler[0], seconds)
        stored = _store(folder, key, compiled) if why is None else compiled
        with contextlib.suppress(OSError):  # a disk from which nothing may be run
            return ctypes.CDLL(str(stored))
        try:
            return ctypes.CDLL(str(compiled))
        except OSError as error:
            raise DeviceError(f"the compiled kernels cannot be loaded: {error}") from None


def _runs_nothing(folder: Path) -> bool:
    """Whether nothing in a folder may be run, as systems mount the temporary files."""
    return bool(os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0))


# --- compiling --------------------------------------------------------------------------------------------------------


def compilers() -> list[list[str]]:
    """Commands of C compilers; the first that compiles the sources is used: CC alone if it is set, else those
    on PATH and the Python package ziglang's.

    Raises:
        DeviceError: CC names none.
    """
    if named := os.environ.get("CC", "").strip():
        import shlex  # this and its like below: most runs compile nothing, and start 10 ms sooner

        try:
            program, *arguments = shlex.split(named)
        except ValueError as error:
            raise DeviceError(f"CC should be a compiler's command: found {shown(named)} ({error})") from None
        if (executable := shutil.which(program)) is None:
            raise DeviceError(f"CC should be a compiler's command: there is no program {shown(program)}")
        return [[os.path.abspath(executable), *arguments]]  # noqa: PTH100  a link's own name may matter, as ccache's does
    paths = [os.path.abspath(executable) for name in COMPILERS if (executable := shutil.which(name))]  # noqa: PTH100
    ziglang = importlib.util.find_spec("ziglang") and not getattr(sys, "frozen", False)
    return [*([path] for path in paths), *([[sys.executable, "-m", "ziglang", "cc"]] if ziglang else [])]


def _flags(compiler: Collection[str] = ()) -> tuple[str, ...]:
    """The flags for a compiler, with the target; zig spells x86-64-v3 with underscores."""
    if target := os.environ.get("MINILLM_MARCH"):
        zig = "ziglang" in compiler or Path([*compiler, ""][0]).name.startswith("zig")
        return (*FLAGS, f"-march={target.replace('-', '_') if zig else target}")
    return (*FLAGS, "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native")


def _compile(compiler: list[str], scratch: Path, progress: Work) -> Path:
    """Compile every source by a process of its own, and link the library. -> its path, in `scratch`"""
    names = sorted(path.name for path in SOURCES.glob("*.c"))
    objects = [str(scratch / f"{name}.o") for name in names]
    library = scratch / "kernels.so"
    flags = _flags(compiler)
    _run(compiler, [[*flags, "-c", name, "-o", to] for name, to in zip(names, objects, strict=True)], scratch, progress)
    _run(compiler, [[*flags, "-shared", *objects, "-o", str(library), "-lm"]], scratch, progress)
    if not library.exists():  # where this process ignores SIGCHLD, all children seem to succeed
        raise CompilerError(f"the C kernels do not compile by {_command_line(compiler)}: it says nothing")
    return library


def _command_line(compiler: list[str]) -> str:
    """A compiler's command as a shell takes it."""
    import shlex

    return shlex.join(compiler)


def _identity(compiler: list[str]) -> str:
    """A digest of a compiler's file and arguments: another version has another size or date."""
    status = Path(compiler[0]).stat()
    parts = (compiler, status.st_size, status.st_mtime_ns)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def _run(compiler: list[str], calls: list[list[str]], scratch: Path, progress: Work) -> None:
    """Run a compiler among the sources, with the arguments of all calls at once. Temporary files go to `scratch`.

    The processes form a group, which is killed with their children on Ctrl-C or when one fails.

    Raises:
        CompilerError: a call fails; with the first line that says why.
    """
    import subprocess

    folders = dict.fromkeys(("TMPDIR", "ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(scratch))
    environment = os.environ | folders | {"LC_ALL": "C"}
    running: list[subprocess.Popen[str]] = []

    def kill() -> None:
        if any(process.returncode is None for process in running):
            with contextlib.suppress(OSError):
                os.killpg(running[0].pid, signal.SIGKILL)

    with undone_by_signals(kill), contextlib.ExitStack() as ended:
        try:
            for arguments in calls:
                process = subprocess.Popen(
                    [*compiler, *arguments],
                    cwd=SOURCES,
                    env=environment,
                    process_group=running[0].pid if running else 0,
                    text=True,
                    errors="replace",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
                running.append(ended.enter_context(process))
            for process in running:
                _, messages = process.communicate()
                if process.returncode:
                    reason = _first_error(messages) or f"exit code {process.returncode}"
                    raise CompilerError(f"the C kernels do not compile by {_command_line(compiler)}: {reason}")
                progress.advance()
        except OSError as error:
            raise CompilerError(f"the C compiler {_command_line(compiler)} cannot be run: {error.strerror}") from None
        finally:
            kill()


def _first_error(messages: str) -> str:
    """The first error in a compiler's messages, else their first line."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[0] if lines else "")


def _test(library: Path, compiler: list[str]) -> None:
    """Test a compiled library in a child process.

    Raises:
        DeviceError: the child died, or a result differs from the reference's.
    """
    if (reason := _failure(library)) is None:
        return
    target = os.environ.get("MINILLM_MARCH")
    wrong = "MINILLM_MARCH should name what this processor has" if target else "CC names another compiler"
    by = _command_line(compiler) + (f" for {target}" if target else "")
    raise DeviceError(f"the C kernels, compiled by {by}, fail their test: {reason}; {wrong}")


def _failure(library: Path) -> str | None:
    """Why a library fails the test, which runs in a child process; None if it passes."""
    if not sys.executable or getattr(sys, "frozen", False):  # Python inside of another program
        return None
    import subprocess

    places = [place for place in sys.path if isinstance(place, str)]  # others mean nothing to Python
    code = f"import sys; sys.path[:] = {places!r}; from {__package__}.selftest import main; main()"
    try:
        child = subprocess.run(
            [sys.executable, "-c", code, str(library)],
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {PATIENCE} s"
    except OSError as error:
        return f"{sys.executable} cannot be run: {error.strerror}"
    if child.returncode == 0 and PASSED in child.stdout:  # 0 too where the parent ignores SIGCHLD
        return None
    if child.returncode < 0:
        return f"the process died of {signal.Signals(-child.returncode).name}"
    return (child.stdout.strip() or child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]


# --- the cache --------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The folder of the compiled library, in the user's cache folder."""
    try:
        if named := os.environ.get("XDG_CACHE_HOME"):
            base = Path(named)
        else:
            base = Path.home() / {"darwin": "Library/Caches", "win32": "AppData/Local"}.get(sys.platform, ".cache")
    except RuntimeError:  # neither HOME nor an entry for this user
        import tempfile

        base = Path(tempfile.gettempdir()) / f"minillm-{os.getuid()}"
    return base.absolute() / "minillm" / "kernels"


def _key(compiler: list[str] | None = None) -> str:
    """Digests of what the library depends on: sources, flags, processor and C library; and the compiler, if given."""
    sources = sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])
    if not sources:
        raise DeviceError(f"the C kernels are not in {SOURCES}: install minillm again")
    parts = (
        [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sources],
        _flags(),
        _processor(),
        platform.libc_ver(),
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return key if compiler is None else f"{key}-{_identity(compiler)}"


def _processor() -> str:
    system = platform.uname()
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        first = itertools.takewhile(str.strip, file)  # the others are alike
        return system.machine + "".join(line for line in first if _PROCESSOR.match(line))
    return system.machine + system.version  # on macOS with the chip's name


def _name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(key.encode() + content).hexdigest()[:32]}.so"


def _stored(folder: Path, key: str) -> Path | None:
    """The stored library whose name begins with `key`; removes those whose content has changed."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        if path.name == _name(path.name.rpartition("-")[0], _read(path)):
            with contextlib.suppress(OSError):
                os.utime(path)  # its last use: the system's own record of reads is often off
            return path
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _store(folder: Path, key: str, compiled: Path) -> Path:
    """Keep a compiled library for the next run. -> its path, or `compiled`'s if it cannot be kept"""
    content = compiled.read_bytes()
    path = folder / _name(key, content)
    try:
        replace_file(path, content, mode=0o600)
    except OSError as error:
        _LOGGER.warning("kernels cannot be kept for the next run: %s: %s", folder, error.strerror)
        return compiled
    _prune(folder)
    return path


def _prune(folder: Path) -> None:
    """Remove all libraries but the last used."""
    used = []
    for path in folder.glob("*-*-*.so"):
        with contextlib.suppress(OSError):  # another process removed it
            used.append((path.lstat().st_mtime, path))
    for _, path in sorted(used)[:-KEPT]:
        with contextlib.suppress(OSError):
            path.unlink()


def _read(path: Path) -> bytes:
    """The content of a regular file of this user; empty if there is none."""
    with (
        contextlib.suppress(OSError),
        os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file,
    ):
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            return file.read()
    return b""


@contextmanager
def _private_folder(inside: Path | None = None) -> Iterator[Path]:
    """A new folder for this process alone, removed at the end; `inside` another one, or among the temporary files, from
    which a system may refuse to run anything.
    """
    import tempfile

    try:
        scratch = Path(tempfile.mkdtemp(prefix="minillm-kernels-", dir=inside))
    except OSError as error:
        raise DeviceError(f"the C kernels need a temporary folder to be compiled in: {error}") from None
    try:
        with undone_by_signals(lambda: shutil.rmtree(scratch, ignore_errors=True)):
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
