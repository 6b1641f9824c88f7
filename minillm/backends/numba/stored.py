"""Compiled kernels out of Numba's cache, without what only compiling needs.

Numba makes its compiler ready before it looks into its cache: it imports the rules of all that it can compile, compiles
its memory management, and parses, of each kernel, the code that others would inline. A run whose kernels all come from
the cache uses none of it. Without it such a run of opt-125m in int4 takes 219 MB of memory at most, 272 MB with it.

This leans on Numba's inner workings: `compiling.py` says with which versions it is used.
"""

import pickle
import sys
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.compiler import compile_result
from numba.core.environment import Environment, _rebuild_env, lookup_environment
from numba.core.runtime import _nrt_python


class StoredKernel:
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


class StoredResult(CompileResultCacheImpl):  # type: ignore[misc]
    """What Numba writes into its cache, read in our way."""

    def rebuild(self, target_context: Any, stored: Any) -> Any:
        """A kernel as the compiler would give it."""
        code, description, environment, signature, _, lifted, _, preparations, others = stored
        for prepare in preparations:  # start the threads
            prepare()
        library = StoredKernel(target_context.codegen(), code)
        function = target_context.get_executable(library, description, environment)
        for other in others:
            library.codegen.set_env(other.env_name, other)
        return compile_result(
            target_context=target_context, typing_context=target_context.typing_context, library=library,
            environment=environment, entry_point=function, fndesc=description, signature=signature, objectmode=False,
            lifted=lifted, reload_init=preparations, referenced_envs=others,
        )  # fmt: skip


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


class KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, which leaves the compiler asleep until something is not in it."""

    _impl_class = StoredResult

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file._load_data = self._read

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The kernel for a signature, None if it is not there."""
        _make_linker_ready(target_context.codegen())
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, target_context)

    def _read(self, name: str) -> Any:
        """What the cache holds of a kernel."""
        with Path(self._cache_file._data_path(name)).open("rb") as file:
            return _Unpickler(file).load()


@cache
def _make_linker_ready(codegen: Any) -> None:
    """Say where the functions of Numba's memory management are, as its compiler does when it is made ready.

    And take away the empty module with which LLVM's engine begins: it would be compiled, for 5 MB of LLVM's pages.
    """
    for name, address in _nrt_python.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
    codegen._engine._ee.remove_module(codegen._llvm_module)
