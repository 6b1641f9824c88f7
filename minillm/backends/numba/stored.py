"""Cache of compiled kernels between runs, in a folder and files that no other user can have written.

Loading a kernel runs its code, and unpickles its description. So a folder is used only if no one but its owner, this
user, can write to it (`why_unusable`), and a file only if its digest matches this kernel and the whole content. Numba's
own cache, which checks none of this, is not used.

For versions of Numba whose internals are known (`compiling.py`), kernels are loaded without initialising the compiler.
Numba does that before it looks into its cache: it imports the rules of all that it can compile, compiles its memory
management, and parses each kernel's code for inlining. A run whose kernels are all stored needs none of it, and saves
53 MB of memory with opt-125m in int4.
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
"""The versions that the file format depends on; the last is the format's own."""


class StoredKernels(_Cache):  # type: ignore[misc]
    """The stored kernels of one function, with the interface of Numba's cache."""

    def __init__(self, function: Any, options: str, folder: Path) -> None:
        """Set up the cache of a function.

        Args:
            function: that is compiled
            options: of the compiler, apart from the signature
            folder: of the files; not writable by others
        """
        self._function = function
        self._options = options
        self._folder = folder

    @property
    def cache_path(self) -> str:
        """The folder."""
        return str(self._folder)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Load the kernel for a signature; None if it is missing, or its file was changed."""
        path, key = self._entry(signature, target_context.codegen())
        content = _read(path)
        digest, data = content[: len(key)], content[len(key) :]
        if digest != hashlib.sha256(key + data).digest():
            return None
        return self._rebuild(data, target_context)

    def save_overload(self, signature: Any, result: Any) -> None:
        """Store a kernel, unless it holds addresses of this process. A failure is logged once."""
        if result.library.has_dynamic_globals or result.lifted:
            return
        path, key = self._entry(signature, result.codegen)
        data = dumps(result._reduce())
        try:
            replace_file(path, hashlib.sha256(key + data).digest() + data, mode=0o600)
        except OSError as error:
            _warn(self._folder, error.strerror)

    def enable(self) -> None:
        """Does nothing: the cache is always on."""

    disable = flush = enable

    def _entry(self, signature: Any, codegen: Any) -> tuple[Path, bytes]:
        """The file of a kernel, and a digest of everything its machine code depends on, to check the content by."""
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
        """Rebuild a kernel from a file's content, as Numba does."""
        target_context.refresh()
        return CompileResult._rebuild(target_context, *pickle.loads(data))


class QuickKernels(StoredKernels):
    """The same, loading kernels without initialising the compiler."""

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """As `StoredKernels`; also prepares the linker, which compiling needs too."""
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
    """The machine code of a kernel, without the part that other kernels would inline, since kernels call no kernels."""

    def __init__(self, codegen: Any, stored: Any) -> None:
        """Link the machine code that a library of Numba's has serialised."""
        _, _, (machine_code, _) = stored
        self.codegen = codegen
        self._engine = codegen._engine
        self._engine._ee.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
        self._engine.finalize_object()

    def get_pointer_to_function(self, name: str) -> int:
        """The address of a function in the library, 0 if it is not there."""
        return int(self._engine.get_function_address(name))


def _read(path: Path) -> bytes:
    """The content of a regular file of this user; empty if there is none."""
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
    """Digest of a Python source file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(source).read_bytes()).digest()
    return b""


class _Unpickler(pickle.Unpickler):
    """Unpickles a kernel without importing the modules of the functions that were compiled into it.

    Each function refers to its module's names (an environment), which only the interpreter would look up. Numba imports
    the module for that, and that of its own array functions is the largest part of its compiler.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global of the file by its name."""
        usual = super().find_class(module, name)
        return _environment_of if usual is _rebuild_env else usual


def _environment_of(module: str, constants: list[Any], name: str) -> Any:
    """Make an environment as Numba does if the module is imported, else one without names."""
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
    """Register the addresses of Numba's memory management functions, as initialising its compiler does.

    Also remove the empty module that LLVM's engine begins with: compiling it would take 5 MB of memory.
    """
    for name, address in _nrt_python.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
    codegen._engine._ee.remove_module(codegen._llvm_module)
