"""Computed pages in a folder: prompts find there what a cache has lost, or another process has computed.

Each full page is a file (`prefix_files`). Its name is a digest of what computed it, of the name of the page before it,
and of its tokens; so texts with the same beginning share files, also those of several servers on one folder. The files
of long texts are written when these end, by a thread of its own, whole or not at all. It copies the pages, too, beside
the steps: a copy is good if the page has been known by the same tokens until it was complete. The least recently used
files are removed when all together take too many bytes.
"""

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from ..batch import TokenSequence
from ..errors import CacheFullError, ParameterError, UsageError, one_line, shown
from ..output_files import replace_file, why_unusable
from .paged import PagedCache
from .prefix import Node, PrefixCache
from .prefix_files import Origin, PrefixPages, read_file, read_pages, to_file, write_page

WORTH_STORING = 256
"""Positions of the shortest text whose pages are stored; a shorter one is soon computed"""
WAITING_BYTES = 2**29
"""Bytes of pages that may wait to be written; further ones are stored when their text is used again"""
ABANDONED_SECONDS = 3600
"""Age of an unfinished file that a process has left behind which was killed"""

_FILE = re.compile(r"prefix-[0-9a-f]{40}\.safetensors")
_UNFINISHED = re.compile(r"\.minillm-\d+-[0-9a-f]{8}")

logger = logging.getLogger("minillm")
logger.addFilter(one_line)


class StoredPage(NamedTuple):
    """A page and its place in a text."""

    name: str
    """The file's"""
    before: str
    """Name of the page before it; empty of the first"""
    token_ids: list[int]


def trusted_folder(name: str) -> Path:
    """The folder of a store, which is created if there is none.

    Raises:
        ParameterError: it does not belong to this user, others may write to it, or it cannot be used.
    """
    if os.name != "posix":  # whose owners and modes tell whom to trust
        raise ParameterError("prefix_store needs Linux or macOS: leave it out")
    try:
        folder = Path(name).expanduser().absolute()
        folder.lstat()
    except FileNotFoundError:
        pass
    except (RuntimeError, ValueError, OSError) as error:  # no such user; NUL in the name; too long
        raise ParameterError(f"prefix_store: {shown(name)} is no folder's name ({error})") from None
    if why := why_unusable(folder):
        raise ParameterError(f"prefix_store: {why}: name a folder of your own that nobody else may write to")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ParameterError(f"prefix_store: {folder} cannot be written: name another folder")
    return folder


class PrefixStore:
    """A folder of pages that one model has computed, beside those of others."""

    def __init__(self, folder: Path, max_bytes: int, origins: Mapping[str | None, Origin], page_bytes: int) -> None:
        """Args:
            folder: by `trusted_folder`
            max_bytes: of all its pages, those of other models too
            origins: what computes the pages of each LoRA adapter, and without one (None)
            page_bytes: of a page

        Raises:
            ParameterError: the bytes are less than two pages.
        """
        if max_bytes < 2 * page_bytes:  # a file is a page and its header
            raise ParameterError(
                f"prefix_store_bytes should be at least {2 * page_bytes} (two pages), found {max_bytes}"
            )
        self._folder, self._origins, self._page_bytes = folder, origins, page_bytes
        self._writer = _Writer(folder, max_bytes)
        weakref.finalize(self, self._writer.close)  # when the engine is dropped, or the program ends

    def pages_of(self, token_ids: Sequence[int], adapter: str | None, page_size: int) -> Iterator[StoredPage]:
        """The full pages of a text, from the first on."""
        before, origin = "", hashlib.blake2b(repr(sorted(self._origins[adapter].items())).encode()).digest()
        for first in range(0, len(token_ids) - page_size + 1, page_size):
            tokens = list(token_ids[first : first + page_size])
            key = hashlib.blake2b(origin, digest_size=20)
            key.update(before.encode())
            key.update(np.array(tokens, np.int64).tobytes())
            name = f"prefix-{key.hexdigest()}.safetensors"
            yield StoredPage(name, before, tokens)
            before = name

    def has(self, name: str) -> bool:
        """Whether a page is stored, or will be."""
        return name in self._writer.waiting or (self._folder / name).exists()

    def read(self, page: StoredPage, adapter: str | None, like: PagedCache) -> PrefixPages | None:
        """A page; None if it is not there any more. A damaged one is removed."""
        path = self._folder / page.name
        if not path.exists():
            return None
        try:
            pages, notes, _ = read_file(path, like, lambda _: self._origins[adapter])
            if pages.token_ids == page.token_ids and notes.get("before") == page.before:
                return pages
            why = "it holds another text"
        except UsageError as error:
            why = str(error)
        if path.exists():  # else another process has removed it meanwhile
            logger.warning("a stored prefix is removed: %s", why)
            with contextlib.suppress(OSError):
                path.unlink()
        return None

    # --- writing -----------------------------------------------------------------------------------------------------

    @property
    def takes_more(self) -> bool:
        """Whether further pages may wait to be written."""
        return len(self._writer.waiting) * self._page_bytes < WAITING_BYTES

    def write_soon(self, page: StoredPage, adapter: str | None, copy: Callable[[], PrefixPages | None]) -> None:
        """Queue a page that the thread writes. `copy` is called there: the page, or None if it is lost meanwhile."""
        self._writer.waiting.add(page.name)
        self._writer.do(_Writing(page, self._origins[adapter], copy))

    def use(self, names: Sequence[str]) -> None:
        """Note that a text's pages have been used, once those that wait are written; then remove the oldest ones."""
        self._writer.do(names)

    def close(self) -> None:
        """Write what waits, and end the thread until there is more."""
        self._writer.close()


class _Writing(NamedTuple):
    """A page to be written."""

    page: StoredPage
    origin: Origin
    copy: Callable[[], PrefixPages | None]


class _Writer:
    """Writes the pages of a store in a thread of its own, which does not keep the store alive."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._queue: SimpleQueue[_Writing | Sequence[str] | None] = SimpleQueue()
        self.waiting: set[str] = set()
        """Names of the pages in the queue"""
        self._thread: threading.Thread | None = None
        self._failing = False
        """True if the last file could not be written, which was told"""

    def do(self, task: "_Writing | Sequence[str]") -> None:
        """Queue a page to write, or the names of the pages that a text has used, which come last."""
        self._queue.put(task)
        if self._thread is None and not isinstance(task, _Writing):
            self._thread = threading.Thread(target=self._run, name="minillm-prefix-store", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():  # a collected store's last reference may be there
                thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                if isinstance(task, _Writing):
                    self._write(task)
                    self._failing = False
                else:
                    self._touch(task)
                    self._prune()
            except (OSError, MemoryError) as error:
                if not self._failing:
                    reason = getattr(error, "strerror", None) or error or "no memory is left"
                    logger.warning("prefixes cannot be stored in %s: %s", self._folder, reason)
                self._failing = True

    def _write(self, task: "_Writing") -> None:
        page, origin, copy = task
        try:
            if (pages := copy()) is not None:
                replace_file(self._folder / page.name, to_file(pages, origin, {"before": page.before}), mode=0o600)
        finally:
            self.waiting.discard(page.name)

    def _touch(self, names: Sequence[str]) -> None:
        """Set the time of a text's files, the first page's last: without it those after it are of no use."""
        now = time.time_ns()
        for later, name in enumerate(reversed(names)):
            with contextlib.suppress(OSError):  # another process has removed it
                os.utime(self._folder / name, ns=(now + later, now + later))

    def _prune(self) -> None:
        """Remove the pages that were used longest ago, as long as all take too many bytes; and unfinished files."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                stored = _FILE.fullmatch(entry.name)
                if not stored and not _UNFINISHED.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stored:
                        files.append((status.st_mtime_ns, status.st_size, entry.path))
                    elif status.st_mtime < time.time() - ABANDONED_SECONDS:
                        Path(entry.path).unlink()
        excess = sum(size for _, size, _ in files) - self._max_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                Path(path).unlink()
            excess -= size


class StoringPrefixCache(PrefixCache):
    """A prefix cache whose long texts are stored in a folder when they end, and read when a prompt begins with them."""

    store: PrefixStore | None = None

    def match(self, sequence: TokenSequence, limit: int | None = None) -> int:
        """As `PrefixCache.match`; what a new sequence does not find in the cache is read from the store."""
        if self.store is not None and not sequence.cached and self._shares(sequence):
            self._restore(sequence, self.store)
        return super().match(sequence, limit)

    def retire(self, sequence: TokenSequence) -> None:
        """As `PrefixCache.retire`; the full pages of a long text are stored."""
        stores = self.store is not None and sequence.line >= WORTH_STORING and self._shares(sequence)
        tokens, pages = (sequence.token_ids[: sequence.line], [*sequence.pages]) if stores else ([], [])
        super().retire(sequence)
        if self.store is not None and stores:
            self._keep(tokens, pages, sequence.adapter, self.store)

    def _shares(self, sequence: TokenSequence) -> bool:
        return self.prefix_cache and not self.apart and not sequence.private

    def _restore(self, sequence: TokenSequence, store: PrefixStore) -> None:
        """Read the pages with which a sequence begins, after those that the cache has, as if they were computed."""
        P, node = self.page_size, self._known.root(sequence.adapter)
        tokens = sequence.token_ids[: len(sequence.token_ids) - len(sequence.tree)]
        prefix = TokenSequence(adapter=sequence.adapter)
        if self.windows:  # what is known may lack what a window sees
            prefix.token_ids = [*tokens]
            super().match(prefix, len(tokens) // P * P)
            self.truncate(prefix, prefix.cached // P * P)
            del prefix.token_ids[prefix.cached :]
        for number, page in enumerate(store.pages_of(tokens, sequence.adapter, P)):
            if number < len(prefix.token_ids) // P and self.windows:
                continue
            child, common = self._known.find(node, tuple(page.token_ids))
            if child is not None and common == P and not prefix.pages and not self.windows:
                node = child
                prefix.token_ids += page.token_ids
                continue
            pages = store.read(page, sequence.adapter, self)
            if pages is None:
                break
            if not prefix.pages and not self.windows:
                super().match(prefix, len(prefix.token_ids))
                if prefix.pending:  # a state is known before them only
                    break
            prefix.token_ids += page.token_ids
            try:
                self.reserve(prefix, len(prefix.token_ids))
            except CacheFullError:
                break
            write_page(self, prefix, pages.arrays, 0)
            self.advance(prefix, P)
        super().retire(prefix)

    def _keep(self, tokens: list[int], numbers: list[int], adapter: str | None, store: PrefixStore) -> None:
        """Store those of a text's full pages that are not stored, and note their use."""
        names = []
        for page, number in zip(store.pages_of(tokens, adapter, self.page_size), numbers, strict=False):
            if not store.has(page.name):
                node = self._known.node(number)
                if node is None or not store.takes_more:
                    break
                copy = partial(self._copy_of, number, node, page.token_ids)
                if not self.storage.threads_may_read:
                    copy = partial(_same, copy())
                store.write_soon(page, adapter, copy)
            names.append(page.name)
        store.use(names)

    def _copy_of(self, number: int, node: Node, token_ids: list[int]) -> PrefixPages | None:
        """A copy of a full page, in any thread; None if it has other tokens by now.

        Whoever writes to a known page has it forgotten first. So if it is still known, all of it was copied before.
        """
        parts = [window.parts[number] for window in self.windows]
        pages = PrefixPages(token_ids, read_pages(self, [number]))
        for window, part in zip(self.windows, parts, strict=True):
            if window.parts[number] != part:  # left meanwhile, so that others may have written there
                for name in window.storage.arrays:
                    pages.arrays[f"{name}.{window.group}"] = pages.arrays[f"{name}.{window.group}"][:, :0]
        return pages if self._known.node(number) is node else None


def _same(pages: PrefixPages | None) -> PrefixPages | None:
    return pages
