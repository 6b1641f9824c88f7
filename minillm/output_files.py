"""Files that a command writes for its user, and what becomes of unfinished ones when a signal ends the process."""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UsageError

_undos: list[Callable[[], object]] = []


@contextmanager
def undone_by_signals(undo: Callable[[], object]) -> Iterator[None]:
    """Have `undo` called if a signal ends the command line inside the `with` block, which it leaves no more."""
    _undos.append(undo)
    try:
        yield
    finally:
        _undos.remove(undo)


def undo_unfinished() -> None:
    """Undo what is unfinished, the latest first."""
    for undo in reversed(_undos):
        with contextlib.suppress(OSError):
            undo()


def write_file(path: Path, content: str | bytes) -> None:
    """Write a user's file whole or not at all.

    A regular file is replaced by a finished one with the same mode; where `path` is a symbolic link, the file that it
    points to is. Pipes, devices and this process's own standard output are opened and written, never replaced.

    Args:
        path: where to; the folder must exist
        content: bytes, or text to be written as UTF-8

    Raises:
        UsageError: it cannot be written: a folder, no permission, a full disk.
    """
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    try:
        try:
            there = path.stat()
        except FileNotFoundError:
            there = None  # or a link to where nothing is yet
        if there is None or (stat.S_ISREG(there.st_mode) and not _write_to_standard_stream(there, data)):
            if there is not None and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, "it is read-only")
            replace_file(Path(os.path.realpath(path)), data, like=there)
        elif not stat.S_ISREG(there.st_mode):
            _write_all(os.open(path, os.O_WRONLY), data)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise UsageError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def replace_file(target: Path, data: bytes, *, mode: int = 0o666, like: os.stat_result | None = None) -> None:
    """Put a new file in the place of `target`, all at once; a link there is replaced too.

    Args:
        target: its path
        data: the content
        mode: permissions, less those that the umask takes
        like: of a file whose permissions and, where that is allowed, owner it gets instead

    Raises:
        OSError: it cannot be written. The old one stays as it was.
    """
    temporary = target.parent / f".minillm-{os.getpid()}-{os.urandom(4).hex()}"

    def remove() -> None:
        temporary.unlink(missing_ok=True)

    with undone_by_signals(remove):
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
            if like is not None and hasattr(os, "fchown"):
                with contextlib.suppress(OSError):
                    os.fchown(file, like.st_uid, like.st_gid)
                os.fchmod(file, stat.S_IMODE(like.st_mode))
            _write_all(file, data)
            temporary.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                remove()
            raise


def _write_to_standard_stream(there: os.stat_result, data: bytes) -> bool:
    """Write through standard output or error where one of them is this very file; else return False.

    /dev/stdout leads there. With a new file in its place, what is printed later would be lost with the old one.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            descriptor = stream.fileno()
            same = os.path.samestat(os.fstat(descriptor), there)
        except (AttributeError, OSError, ValueError):  # closed, or not of the system
            continue
        if same:
            stream.flush()
            _write_all(os.dup(descriptor), data)
            return True
    return False


def _write_all(descriptor: int, data: bytes) -> None:
    """Write everything and close."""
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
