"""Compiled kernels kept between runs, in a folder and in files that nobody else can have written.

Reading a kernel runs it, and unpickles what describes it. So a folder is used only if none but its owner, this user,
can put a file there (`why_unusable`), and a file only if its digest says that it holds this very kernel, whole. Numba's
own cache, which asks none of this, is not used.

Where Numba's inner workings are known (`compiling.py` says with which versions), kernels are read without what only
compiling needs. Numba makes its compiler ready before it looks into its cache: it imports the rules of all that it can
compile, compiles its memory management, and parses, of each kernel, the code that others would inline. A run whose
kernels are all stored uses none of it. Without it such a run of opt-125m in int4 takes 219 MB of memory at most, 272 MB
with it.
"""

import contextlib
import hashlib
import io
import logging
import os
import pickle
import stat
import sys
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult, compile_result
from numba.core.environment import Environment, _rebuild_env, lookup_environment
from numba.core.runtime import _nrt_python
from numba.core.serialize import dumps

from ...errors import one_line
from ...output_files import replace_file

_LOGGER = logging.getLogger("minillm.kernels")
_LOGGER.addFilter(one_line)

SUFFIX = ".kernel"
_VERSIONS = (numba.__version__, llvmlite.__version__, sys.version, "1")
"""What the form of a file depends on; the last is the form's own number."""


def why_unusable(folder: Path) -> str | None:
    """Make a folder ready for kernels. Returns None, or a clause that says why none may be kept there.

    It must belong to this user and be writable by nobody else. The folders above it, whose owners could put another in
    its place, must belong to this user or to root, and others may not write to them unless they are sticky.
    """
    try:
        missing = [path for path in _chain(folder) if not os.path.lexists(path)]
        if missing and (why := _why_unsafe(missing[-1].parent, own=False)):
            return why
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        if not folder.is_dir():
            return f"{folder} is no folder"
        return _why_unsafe(folder, own=True)
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"


def _why_unsafe(folder: Path, *, own: bool) -> str | None:
    """Who else could put files there: `own` is asked of the folder that holds the kernels."""
    if not hasattr(os, "getuid"):
        return None  # Windows keeps users' folders apart
    real = folder.resolve()
    for path in {*_chain(folder), *_chain(real)}:
        status = path.lstat()
        strict = own and path in (folder, real)
        if status.st_uid not in ({os.getuid()} if strict else {os.getuid(), 0}):
            return f"{path} belongs to another user"
        if not stat.S_ISLNK(status.st_mode) and _writable_by_others(status, strict=strict):
            return f"other users may write to {path}"
    return None


def _chain(path: Path) -> list[Path]:
    return [path, *path.parents]


def _writable_by_others(status: os.stat_result, *, strict: bool) -> bool:
    """Whether others may replace what is in a folder.

    Unless this is asked strictly, they may not in one that is sticky, nor by a group of the user's own number: many
    systems give each user such a group, who is alone in it.
    """
    others = stat.S_IWGRP | stat.S_IWOTH
    if not strict:
        if status.st_mode & stat.S_ISVTX:
            return False
        if status.st_gid == os.getgid() == os.getuid():
            others = stat.S_IWOTH
    return bool(status.st_mode & others)


class StoredKernels(_Cache):  # type: ignore[misc]
    """The stored kernels of one function, as Numba's dispatchers and C callbacks ask for them."""

    def __init__(self, function: Any, options: str, folder: Path) -> None:
        """Look for kernels of a function.

        Args:
            function: what is compiled
            options: how, beside its signature
            folder: where files lie; nobody else can write to it
        """
        self._function = function
        self._options = options
        self._folder = folder

    @property
    def cache_path(self) -> str:
        """The folder."""
        return str(self._folder)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The kernel for a signature; None if it is not there, or not as it was written."""
        path, key = self._entry(signature, target_context.codegen())
        content = _read(path)
        digest, data = content[: len(key)], content[len(key) :]
        if digest != hashlib.sha256(key + data).digest():
            return None
        return self._rebuild(data, target_context)

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a kernel, unless it holds addresses of this process. Where that fails, the log says so once."""
        if result.library.has_dynamic_globals or result.lifted:
            return
        path, key = self._entry(signature, result.codegen)
        data = dumps(result._reduce())
        try:
            replace_file(path, hashlib.sha256(key + data).digest() + data, mode=0o600)
        except OSError as error:
            _warn(self._folder, error.strerror)

    def enable(self) -> None:
        """There is no switch."""

    disable = flush = enable

    def _entry(self, signature: Any, codegen: Any) -> tuple[Path, bytes]:
        """The file of a kernel, and a digest of all that its machine code depends on, which its content is bound to."""
        function = self._function
        code, cells = function.__code__, function.__closure__ or ()
        parts = (
            *_VERSIONS,
            function.__module__,
            function.__qualname__,
            self._options,
            signature,
            codegen.magic_tuple(),
        )
        key = hashlib.sha256(repr(parts).encode())
        key.update(_digest_of(code.co_filename))
        key.update(hashlib.sha256(code.co_code).digest())
        key.update(dumps(tuple(cell.cell_contents for cell in cells)))
        module = function.__module__.rpartition(".")[2]
        return self._folder / f"{module}.{function.__name__}-{key.hexdigest()[:32]}{SUFFIX}", key.digest()

    def _rebuild(self, data: bytes, target_context: Any) -> Any:
        """A kernel from a file's content, in Numba's way."""
        target_context.refresh()
        return CompileResult._rebuild(target_context, *pickle.loads(data))


class QuickKernels(StoredKernels):
    """The same, read in a way that leaves the compiler asleep until something is not stored."""

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """As above; the linker has to be ready before anything is compiled, too."""
        _make_linker_ready(target_context.codegen())
        return super().load_overload(signature, target_context)

    def _rebuild(self, data: bytes, target_context: Any) -> Any:
        codegen = target_context.codegen()
        content = _Unpickler(io.BytesIO(data)).load()
        code, description, environment, signature, _, lifted, _, preparations, others = content
        for prepare in preparations:  # start the threads
            prepare()
        library = StoredLibrary(codegen, code)
        function = target_context.get_executable(library, description, environment)
        for other in others:
            codegen.set_env(other.env_name, other)
        return compile_result(
            target_context=target_context, typing_context=target_context.typing_context, library=library,
            environment=environment, entry_point=function, fndesc=description, signature=signature, objectmode=False,
            lifted=lifted, reload_init=preparations, referenced_envs=others,
        )  # fmt: skip


class StoredLibrary:
    """The machine code of a kernel. What another one would inline is dropped, since kernels call no kernels."""

    def __init__(self, codegen: Any, stored: Any) -> None:
        """Link what a library of Numba's has written."""
        _, _, (machine_code, _) = stored
        self.codegen = codegen
        self._engine = codegen._engine
        self._engine._ee.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
        self._engine.finalize_object()

    def get_pointer_to_function(self, name: str) -> int:
        """The address of a function that is in it, 0 if it is not."""
        return int(self._engine.get_function_address(name))


def _read(path: Path) -> bytes:
    """The content of a file of this user's own; nothing where there is none, or something else."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with contextlib.suppress(OSError), os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and (not hasattr(os, "getuid") or status.st_uid == os.getuid()):
            return file.read()
    return b""


@cache
def _warn(folder: Path, reason: str) -> None:
    _LOGGER.warning("kernels cannot be kept for the next run: %s: %s", folder, reason)


@cache
def _digest_of(source: str) -> bytes:
    """Of a file of Python; of nothing where it is not there to be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(source).read_bytes()).digest()
    return b""


class _Unpickler(pickle.Unpickler):
    """Reads a kernel without importing the modules of the functions that were compiled into it.

    Each brings along its module's names (an environment), which only the interpreter would look up. Numba imports the
    module for that, and the one of its own functions for arrays is the largest part of its compiler.
    """

    def find_class(self, module: str, name: str) -> Any:
        """What the file calls by its name."""
        usual = super().find_class(module, name)
        return _environment_of if usual is _rebuild_env else usual


def _environment_of(module: str, constants: list[Any], name: str) -> Any:
    """As Numba makes it, of a module that is there; else without names."""
    if module in sys.modules:
        return _rebuild_env(module, constants, name)
    found = lookup_environment(name)
    if found is None:
        found = Environment({"__name__": module})
        found.consts[:] = constants
        found.env_name = name
        Environment._memo[name] = found
    return found


@cache
def _make_linker_ready(codegen: Any) -> None:
    """Say where the functions of Numba's memory management are, as its compiler does when it is made ready.

    And take away the empty module with which LLVM's engine begins: it would be compiled, for 5 MB of LLVM's pages.
    """
    for name, address in _nrt_python.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
    codegen._engine._ee.remove_module(codegen._llvm_module)
