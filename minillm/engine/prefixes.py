"""Beginnings of texts in files: their keys and values, which another process then need not compute."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ..batch import TokenSequence
from ..cache import PrefixCache
from ..cache.prefix_files import Origin, PrefixPages, read_file, read_pages, to_file, write_page
from ..decoding.prompts import Prompt
from ..decoding.settings import GenerationConfig
from ..errors import CacheFullError, ParameterError
from ..output_files import check_writable, write_file
from .arguments import read, refuse_task
from .origins import origins_of
from .readings import EngineReadings


@dataclass(frozen=True)
class Prefix:
    """The beginning of a text in a file."""

    tokens: int
    bytes: int
    """Bytes of its keys and values, whole pages"""
    lora: str | None = None
    """Name of the adapter that has computed it"""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Texts that were saved with it"""


class EnginePrefixes(EngineReadings):
    """The files of an engine's prefixes, beside the texts that `Engine` generates."""

    def save_prefix(
        self,
        path: str | os.PathLike[str],
        prompt: Prompt,
        *,
        lora: str | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> Prefix:
        """Write the keys and values of a prompt to a file, for `load_prefix`. What the cache lacks is computed first.

        A draft or amateur model computes its own. Of a model whose layers keep states only whole pages are written:
        `Prefix.tokens` says how many tokens.

        Args:
            path: of the file, in safetensors' format; one that exists is replaced, whole or not at all
            prompt: text or token ids, as for `generate`
            lora: name of the adapter that computes it, if one does
            notes: texts to keep with it

        Raises:
            PromptError, ParameterError: as `add`; the engine has no prefix cache, hooks change its results, or the
                prompt is shorter than a page of a model with states.
            UsageError: the file cannot be written.
            CacheFullError: the cache cannot hold the prompt, or has lost it to other requests.

        Example:
            >>> engine.save_prefix(folder / "colors.safetensors", "A list of colors: red,")
            Prefix(tokens=8, bytes=1179648, lora=None, notes={})
        """
        path, notes = Path(read("path", path)), read("notes", notes) or {}
        cache = self._cache_of_prefixes("save_prefix")
        if cache.apart:
            raise ParameterError("save_prefix: hooks change what the model computes: save the prefix outside of them")
        config = GenerationConfig(max_new_tokens=1, do_sample=False, lora=lora)
        request = replace(self._maker, defaults={}).make(prompt, config)
        length, every = len(request.prompt_ids), cache.whole_positions
        token_ids = request.prompt_ids[: length // every * every]
        if not token_ids:
            raise ParameterError(
                "save_prefix: the layers of this model keep states, which are saved after every "
                f"{every} tokens, and the prompt has {length}: give a longer one"
            )
        check_writable(path)
        pages = self._known_pages(token_ids, lora)
        if pages is None:
            self._driver.run([request])
            pages = self._known_pages(token_ids, lora)
        if pages is None:
            raise CacheFullError("the prompt's pages have gone to other requests: raise cache_bytes, or try again")
        write_file(path, to_file(pages, self._origins[lora], notes))
        return Prefix(len(pages.token_ids), pages.nbytes, lora, notes)

    def load_prefix(self, path: str | os.PathLike[str]) -> Prefix:
        """Put the keys and values of a file that `save_prefix` has written into the prefix cache.

        Prompts that begin with its tokens take them over, and get the same tokens as if they had computed them, until
        the cache needs the memory for others. The file's origin must be this model with the same weights, merged
        adapters, formats and backend.

        Raises:
            UsageError: the file cannot be read, is damaged, or was computed by something else.
            ParameterError: the engine has no prefix cache.
            CacheFullError: the cache has too few free pages.

        Example:
            >>> saved = engine.save_prefix(folder / "days.safetensors", "Monday,")
            >>> engine.load_prefix(folder / "days.safetensors").tokens == saved.tokens
            True
        """
        cache, path = self._cache_of_prefixes("load_prefix"), Path(read("path", path))
        pages, notes, origin = read_file(path, cache, self._origin_like)
        lora = next(name for name, own in self._origins.items() if own is origin)
        with self._driver.turn():
            try:
                put(cache, pages, lora)
            except CacheFullError:
                needed, free = cache.pages_for(len(pages.token_ids)), cache.free_pages
                raise CacheFullError(
                    f"{path} takes {needed} pages of the K/V cache, of which {free} are free: raise cache_bytes, or "
                    "load it while less runs"
                ) from None
        return Prefix(len(pages.token_ids), pages.nbytes, lora, notes)

    def _cache_of_prefixes(self, call: str) -> PrefixCache:
        """The prefix cache of the model.

        Raises:
            TaskError: the model generates no text.
            ParameterError: there is none.
            EngineStateError: the engine is closed, or another rank leads.
        """
        refuse_task(self.config, "tokens", call)
        if self.config.encoder_layers:
            raise ParameterError(f"{call}: with an encoder-decoder keys and values depend on the source: none are kept")
        if self.ranks is not None:
            raise ParameterError(f"{call} is not offered where several processes share the model")
        cache = self._target.cache
        if not isinstance(cache, PrefixCache) or not cache.prefix_cache:
            why = "keys depend on the text's length" if self.config.keys_follow_length else "make one with it"
            raise ParameterError(f"{call} needs the prefix cache, which this engine has not: {why}")
        return cache

    def _known_pages(self, token_ids: list[int], lora: str | None) -> PrefixPages | None:
        """Copies of the pages of a text; None if the cache does not have all of it."""
        with self._driver.turn():
            cache, text = self.runner.cache, TokenSequence(list(token_ids), adapter=lora)
            try:
                cache.match(text, len(token_ids))
                if text.cached < len(token_ids):
                    return None
                return PrefixPages(list(token_ids), read_pages(cache, text.pages))
            finally:
                cache.free(text)

    @cached_property
    def _origins(self) -> dict[str | None, Origin]:
        return origins_of(self._target)

    def _origin_like(self, origin: Origin) -> Origin:
        """The engine's own origin with the same adapter as another one; without any if the engine does not have it."""
        same = (own for own in self._origins.values() if own["adapter"] == origin.get("adapter"))
        return next(same, self._origins[None])


def put(cache: PrefixCache, pages: PrefixPages, lora: str | None) -> None:
    """Make pages known to a prefix cache as if they had been computed, those that it has not.

    Raises:
        CacheFullError: too few pages are free.
    """
    text = TokenSequence(list(pages.token_ids), adapter=lora)
    cache.match(text, len(text.token_ids))
    try:
        while text.pending:
            number = text.cached // cache.page_size
            stop = min(len(text.token_ids), (number + 1) * cache.page_size)
            cache.reserve(text, stop)
            write_page(cache, text, pages.arrays, number)
            cache.advance(text, stop - text.cached)
    except CacheFullError:
        cache.free(text)
        raise
    cache.retire(text)
