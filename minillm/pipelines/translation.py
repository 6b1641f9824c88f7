"""translation: encoder-decoders, told the languages by a prefix, by tokens, or not at all."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..decoding.prompts import need_tokenizer
from ..errors import ParameterError, listed, shown
from ..text.tokenizer import Tokenizer
from .inputs import config_json, framed, truncated
from .text2text import Text2Text

DIRECTION = re.compile(r"translation_([A-Za-z_]+?)_to_([A-Za-z_]+)")
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}|__[a-z]{2,3}__")
"""A token that names a language: en_XX (mBART), eng_Latn (NLLB), __en__ (M2M100)"""


class Translation(Text2Text):
    """translation: {"translation_text": ...} for a text; else as `Text2Text`.

    The languages are those of the task (translation_en_to_fr), or `src_lang` and `tgt_lang`. How a model is told them
    differs: T5 by a prefix that config.json names, mBART by tokens of the languages ("en_XX", "en" if there is one such
    language), Marian models of several languages by a token before the text. A model that knows one direction, as most
    of Marian's, and one without a prefix is not told: then the text is given as it is, as in transformers.
    """

    KEY = "translation_text"
    OPTIONS = Text2Text.OPTIONS | {"src_lang", "tgt_lang"}

    def _reader(
        self, options: dict[str, Any], limit: int | None
    ) -> tuple[Callable[[str], str | list[int]], dict[str, Any]]:
        named = DIRECTION.fullmatch(self.task)
        explicit = [options.pop(name, None) for name in ("src_lang", "tgt_lang")]
        source, target = named.groups() if named and explicit == [None, None] else explicit
        for language in (source, target):
            if language is not None and not isinstance(language, str):
                raise ParameterError(f"src_lang and tgt_lang should be names of languages, found {shown(language)}")
        tokenizer = need_tokenizer(self.engine.tokenizer)
        languages = _languages(tokenizer)
        if languages and (source or target or "forced_bos_token_id" not in self.engine.generation_defaults):
            return self._between_tokens(languages, source, target, limit)
        if source or target:
            mark = f">>{target}<<"
            if [tokenizer.token(i) for i in tokenizer.encode(mark, add_special_tokens=False)] == [mark]:
                return lambda text: self._cut(f"{mark} {text}", limit), self._configured(self.task)
            if not (source and target):
                raise ParameterError("src_lang and tgt_lang belong together here: give both, or neither")
            direction = f"translation_{source}_to_{target}"
            if configured := self._configured(direction):
                prefix = str(configured.pop("prefix", None) or "")
                return lambda text: self._cut(prefix + text, limit), configured
            if explicit != [None, None]:
                raise ParameterError(self._unknown(direction))
        return super()._reader(options, limit)

    def _between_tokens(
        self, languages: Mapping[str, int], source: str | None, target: str | None, limit: int | None
    ) -> tuple[Callable[[str], str | list[int]], dict[str, Any]]:
        """The languages as tokens: the source's beside the text, the target's first in the translation (mBART)."""
        if not (source and target):
            raise ParameterError("this model needs src_lang and tgt_lang: it has " + listed(languages, 300))
        of, to = _language(source, languages), _language(target, languages)
        known = set(languages.values())

        def encode(text: str) -> list[int]:
            before, inside, after = framed(self.engine, text, limit)
            before, after = ([of if token in known else token for token in side] for side in (before, after))
            return [*before, *inside, *after]

        return encode, self._configured(self.task) | {"forced_bos_token_id": to}

    def _cut(self, text: str, limit: int | None) -> str | list[int]:
        return text if limit is None else truncated(self.engine, text, limit)

    def _unknown(self, direction: str) -> str:
        tasks = config_json(self.engine).get("task_specific_params")
        named = [name for name in tasks if DIRECTION.fullmatch(name)] if isinstance(tasks, dict) else []
        if named:
            return f"config.json names no prefix for {direction}: it has {listed(named)}; or write it into the text"
        return f"{direction}: this model is not told languages; leave src_lang and tgt_lang out"


def _languages(tokenizer: Tokenizer) -> Mapping[str, int]:
    """The tokens of an mBART's languages, by their codes; empty if there are none."""
    codes = tokenizer.languages
    return codes or {token: i for token, i in tokenizer.added_ids.items() if _LANGUAGE.fullmatch(token)}


def _language(name: str, codes: Mapping[str, int]) -> int:
    """The token of a language: its own name, or the only one that begins with it."""
    matches = [name] if name in codes else [code for code in codes if code.strip("_").split("_")[0] == name]
    if len(matches) == 1:
        return codes[matches[0]]
    hint = f"it has {listed(matches or codes, 300)}"
    raise ParameterError(f"language {shown(name)} is not one of this model's: {hint}")
