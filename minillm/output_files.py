"""Output files and folders of commands: written completely or not at all, also when a signal ends the process.

`why_unusable` judges folders of files that are read again and trusted, such as compiled kernels.
"""

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from .errors import CheckpointError, ParameterError, UsageError

_undos: list[Callable[[], object]] = []


@contextmanager
def undone_by_signals(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if a signal ends the command line inside the `with` block."""
    _undos.append(undo)
    try:
        yield
    finally:
        _undos.remove(undo)


def undo_unfinished() -> None:
    """Call the registered undo functions, latest first."""
    for undo in reversed(_undos):
        with contextlib.suppress(OSError):
            undo()


def write_file(path: Path, content: str | bytes) -> None:
    """Write a user's file atomically.

    A regular file is replaced by a complete one with the same mode; if `path` is a symbolic link, its target is. Pipes,
    devices and this process's own standard output are opened and written, never replaced.

    Args:
        path: the file; its folder must exist
        content: bytes, or text, which is written as UTF-8

    Raises:
        UsageError: it cannot be written: a folder, no permission, a full disk.
    """
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    with _one_line(path):
        try:
            there = path.stat()
        except FileNotFoundError:  # or a dangling link
            replace_file(Path(os.path.realpath(path)), data)
            return
        regular = stat.S_ISREG(there.st_mode)
        descriptor = _standard_stream(there) if regular else os.open(path, os.O_WRONLY)
        if descriptor is not None:
            _write_all(descriptor, data)
        elif os.access(path, os.W_OK):
            replace_file(Path(os.path.realpath(path)), data, like=there)
        else:
            raise PermissionError(errno.EACCES, "it is read-only")


def check_writable(*paths: Path | None) -> None:
    """Check that `write_file` can write these files, before work that takes time; None is no file.

    Raises:
        UsageError: one cannot be written: it is a folder, its folder is missing, no permission.
    """
    for path in filter(None, paths):
        with _one_line(path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            there = path if path.exists() else Path(os.path.realpath(path)).parent
            if there != path and not there.is_dir():
                path.stat()  # raises
            if not os.access(there, os.W_OK):
                raise PermissionError(errno.EACCES, "it is read-only" if there == path else os.strerror(errno.EACCES))


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turn the system's errors into one line."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise UsageError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def replace_file(target: Path, data: bytes, *, mode: int = 0o666, like: os.stat_result | None = None) -> None:
    """Replace `target` by a new file atomically; if it is a link, the link is replaced.

    Args:
        target: its path
        data: the content
        mode: permissions, before the umask
        like: status of a file whose permissions and, if allowed, owner to copy instead

    Raises:
        OSError: it cannot be written. The old file is unchanged.
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


def check_absent(folder: Path) -> None:
    """Check that `folder` can be created.

    Raises:
        ParameterError: `folder` exists, or its parent does not.
    """
    if os.path.lexists(folder):
        raise ParameterError(f"{folder} exists already: name a folder that does not, or remove it")
    if not folder.parent.is_dir():
        raise ParameterError(f"there is no folder {folder.parent} to write {folder.name!r} into")


def new_folder(folder: Path) -> AbstractContextManager[Path]:
    """Create a folder atomically: it gets its name when it is complete.

    Until then it is called ".NAME.partial-" and the process id, in the same parent folder. It is removed on any error,
    and if a signal ends the command line; only a process that is killed (SIGKILL) leaves it behind.

    Raises:
        ParameterError: as `check_absent`.
        CheckpointError: it cannot be written, for example because the disk is full.
    """
    return _new(folder, Path.mkdir, lambda partial: shutil.rmtree(partial, ignore_errors=True))


def new_file(path: Path) -> AbstractContextManager[Path]:
    """Create a file of any size atomically, as `new_folder` does; it is empty at first."""
    return _new(path, Path.touch, lambda partial: partial.unlink(missing_ok=True))


@contextmanager
def _new(target: Path, make: Callable[[Path], object], remove: Callable[[Path], object]) -> Iterator[Path]:
    check_absent(target)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        with undone_by_signals(lambda: remove(partial)):
            make(partial)
            try:
                yield partial
                check_absent(target)
                partial.rename(target)
            except BaseException:
                remove(partial)
                raise
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror or error}; nothing of it was left behind"
        ) from error


def why_unusable(folder: Path) -> str | None:
    """Create a folder for files that are trusted when they are read again. Returns None, or why none may be kept there.

    It must belong to this user and be writable by nobody else. The folders above it, whose owners could replace it,
    must belong to this user or to root, and others may not write to them unless they are sticky.
    """
    try:
        missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
        if missing and (why := _why_unsafe(missing[-1].parent)):  # nothing is made in another user's folder
            return why
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is no folder"
        if status.st_uid != os.getuid():
            return f"{folder} belongs to another user"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"other users may write to {folder}"
        return _why_unsafe(folder)
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"


def _why_unsafe(folder: Path) -> str | None:
    """Why other users could replace a folder or one above it, on the way of its name or of what links there lead to.

    A sticky folder is safe, and so is write access for a group with the user's own number: many systems give each user
    a private group of that number.
    """
    real = folder.resolve()
    for path in {folder, *folder.parents, real, *real.parents}:
        status = path.lstat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{path} belongs to another user"
        private = status.st_gid == os.getgid() == os.getuid()
        others = stat.S_IWOTH if private else stat.S_IWGRP | stat.S_IWOTH
        if status.st_mode & others and not status.st_mode & stat.S_ISVTX and not stat.S_ISLNK(status.st_mode):
            return f"other users may write to {path}"
    return None


def _standard_stream(there: os.stat_result) -> int | None:
    """A descriptor of standard output or error, flushed, if one of them is this file, where /dev/stdout leads.

    If the file were replaced, later output would be lost with the old one.
    """
    for stream in (sys.stdout, sys.stderr):
        same = False
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or without a descriptor
            same = os.path.samestat(os.fstat(stream.fileno()), there)
        if same:
            stream.flush()
            return os.dup(stream.fileno())
    return None


def _write_all(descriptor: int, data: bytes) -> None:
    """Write everything and close."""
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
