"""Keys and values of the beginning of a text in a file, so that another process need not compute them.

A safetensors file: the tokens, the pages as they are stored (`Pages.read`), and in its metadata what computed them.
Only the same model in the same formats computes the same bits, so a file of any other is refused by the first thing
that differs. A checksum tells damage; of the last, partly filled page nothing but the text's positions is written.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..batch import TokenSequence
from ..errors import UsageError, shown
from .paged import PagedCache

VERSION = "1"
"""Changes with the layout of the files"""

Origin = Mapping[str, str]
"""The origin of keys and values: name of each of `ORIGIN` -> its value"""
ORIGIN = {
    "backend": "backend {}",
    "weights": "weights in {}",
    "cache": "a K/V cache in {}",
    "page_size": "pages of {} positions",
    "deterministic": "deterministic={}",
    "model": "another model, or other weights of this one",
    "adapter": "a LoRA adapter that this engine has not",
}
"""Names of all that must be equal, in the order in which it is compared -> words; models and adapters have digests"""


Arrays = dict[str, NDArray[Any]]


class PrefixPages(NamedTuple):
    """The tokens of n pages, and the pages."""

    token_ids: list[int]
    """T, of which the last page may have fewer than P"""
    arrays: Arrays
    """As `read_pages` returns them, [L, n, K, P, ...] each; with states the last page's, [...] each"""

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return sum(array.nbytes for array in self.arrays.values())


class ForeignError(UsageError):
    """The file is whole, and was written by another model, or in other formats."""


def read_pages(cache: PagedCache, pages: Sequence[int]) -> Arrays:
    """Copies of some pages in host memory, as they are stored, [L, n, K, P, ...] each (`Pages.read`).

    Arrays of layers with a window have the group's number in their names, and only the last pages, as many as have
    their part (`windows.py`). In a cache with states also the state after the last page (`states.py`), [...] each.
    """
    arrays = cache.storage.read(pages)
    for window in cache.windows:
        parts = window.last_parts(pages)
        arrays |= {f"{name}.{window.group}": array for name, array in window.storage.read(parts).items()}
    return arrays | cache.state_after(pages[-1])


def write_page(cache: PagedCache, sequence: TokenSequence, arrays: Arrays, number: int) -> None:
    """Overwrite the last page of a sequence, which it alone has, by page `number` of what `read_pages` has returned."""
    page, count, firsts = sequence.pages[-1], arrays["keys"].shape[1], []
    cache.storage.write([page], {name: arrays[name][:, number : number + 1] for name in cache.storage.arrays})
    for window in cache.windows:
        own = {name: arrays[f"{name}.{window.group}"] for name in window.storage.arrays}
        at = number - (count - own["keys"].shape[1])
        if at < 0:
            firsts.append(window.lose(sequence))
        else:
            window.storage.write([window.parts[page]], {name: array[:, at : at + 1] for name, array in own.items()})
            firsts.append(window.first(sequence))
    sequence.first_parts = tuple(firsts)
    if number == count - 1:
        cache.keep_state(page, arrays)


def to_file(pages: PrefixPages, origin: Origin, notes: Mapping[str, str]) -> bytes:
    """The content of a file. `notes` are texts to keep with it."""
    from safetensors.numpy import save

    used = len(pages.token_ids) % pages.arrays["keys"].shape[3]
    arrays = {name: np.ascontiguousarray(array) for name, array in pages.arrays.items()}
    if used:
        for array in arrays.values():  # others' texts may have been there
            array[:, -1:, :, used:] = 0
    tensors = {"tokens": np.array(pages.token_ids, np.int64)} | arrays
    words = json.dumps(dict(notes))
    header = {"minillm.prefix": VERSION, "checksum": _checksum(tensors, words), "notes": words}
    content: bytes = save(tensors, header | dict(origin))
    return content


def read_file(
    path: Path, like: PagedCache, origin_of: Callable[[Mapping[str, str]], Origin]
) -> tuple[PrefixPages, dict[str, str], Origin]:
    """Pages and notes of a file, and what computes them here.

    Args:
        path: of the file
        like: a cache into which the pages fit
        origin_of: what would compute these pages here, given what has computed them

    Raises:
        ForeignError: something else has computed them; the message says what differs.
        UsageError: there is no such file, or it is damaged.
    """
    with _opened(path) as file:
        header = file.metadata() or {}
        version = header.get("minillm.prefix")
        if version != VERSION:
            what = "no stored prefix" if version is None else f"a prefix in the version {shown(version)} of its format"
            raise ForeignError(f"{path} is {what}: expected a file that save_prefix of this version has written")
        origin = origin_of(header)
        for name, words in ORIGIN.items():
            if header.get(name) != origin[name]:
                stored, here = words.format(shown(header.get(name))), words.format(shown(origin[name]))
                but = "" if stored == here else f", and this engine has {here}"
                raise ForeignError(f"{path} was computed with {stored}{but}: save it anew with this engine")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    checksum, tokens = _checksum(tensors, header.get("notes", "")), tensors.pop("tokens", np.zeros(0, np.int64))
    if header.get("checksum") != checksum or not _fit(tensors, tokens, like):
        raise UsageError(f"{path} is damaged: its content has another checksum; save it anew")
    return PrefixPages(tokens.tolist(), tensors), json.loads(header["notes"]), origin


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, whose errors become one line."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb"):  # the system's own words where it cannot be opened
            pass
        with safe_open(path, "np") as file:
            yield file
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, TypeError, ValueError) as error:  # a dtype that NumPy has not
        if isinstance(error, UsageError):
            raise
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} is truncated, damaged or no stored prefix ({reason:.100})") from None


def _checksum(tensors: Mapping[str, NDArray[Any]], words: str) -> str:
    checksum = zlib.crc32(words.encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].reshape(-1).view(np.uint8).data, zlib.crc32(name.encode(), checksum))
    return f"{checksum:08x}"


def _fit(arrays: Mapping[str, NDArray[Any]], tokens: NDArray[Any], like: PagedCache) -> bool:
    """True if arrays are pages of this cache, as many as the tokens take, and the state after them."""
    if tokens.dtype != np.int64 or tokens.ndim != 1 or not tokens.size:
        return False
    states = {} if like.storage.states is None else like.storage.states.arrays
    if any(name not in arrays or arrays[name].shape != state.shape[1:] for name, state in states.items()):
        return False
    pages = {name: array for name, array in arrays.items() if name not in states}
    count, expected = like.pages_for(tokens.size), _forms(like.storage.arrays)
    for window in like.windows:
        expected |= _forms({f"{name}.{window.group}": array for name, array in window.storage.arrays.items()})
    fewer = {f"{name}.{window.group}" for window in like.windows for name in window.storage.arrays}
    if _forms(pages) != expected or any(arrays[name].dtype != state.dtype for name, state in states.items()):
        return False
    return all(array.shape[1] == count or (name in fewer and array.shape[1] < count) for name, array in pages.items())


def _forms(arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[Any, ...]]:
    """The shapes of arrays of pages but for the number of pages, and their types."""
    return {name: (array.shape[:1], array.shape[2:], array.dtype) for name, array in arrays.items()}
