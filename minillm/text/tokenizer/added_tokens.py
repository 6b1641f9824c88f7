"""Tokens that checkpoints have added to a vocabulary after training: which there are, and which are special.

tokenizer.json lists its own. Beside it, and beside every other layout, tokens stand in `added_tokens_decoder` of
tokenizer_config.json (in older folders in added_tokens.json), under the names of roles (`bos_token`, `image_token`),
and in `extra_special_tokens`. As in transformers all of them are added, in this order, and what `added_tokens_decoder`
says of a token (`lstrip`, `normalized`) replaces what tokenizer.json says.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from ...files import read_optional_json
from .settings import FURTHER, ROLES

if TYPE_CHECKING:
    import tokenizers

_log = logging.getLogger("minillm")

Token = str | dict[str, Any]  # a token in settings: its text, or an object with the text as "content"


def complete(
    backend: "tokenizers.Tokenizer", folder: Path, settings: Mapping[str, Any], rows: int, *, strict: bool
) -> int:
    """Add the tokens that the settings name and the vocabulary lacks, and mark the special ones.

    A token that would come after the model's last row is left out, with a warning: text that spells it is read as any
    other.

    Args:
        backend: gets the tokens
        folder: the checkpoint's folder
        settings: as `read_settings` returns them
        rows: rows of the model's embedding; 0 if unknown
        strict: refuse a token whose id would not be the one that the files say; else warn

    Returns:
        Number of the ids that are new.

    Raises:
        CheckpointError: the tokens are no table of ids and tokens, or an id is impossible.
    """
    named, stated = named_tokens(settings), _stated(folder, settings)
    further = settings.get(FURTHER[0])
    further = further if isinstance(further, list) else []  # objects say themselves whether they are special
    of_roles = {content_of(token) for token in named[: len(named) - len(further)]}
    names = of_roles | {token for token in further if isinstance(token, str)}
    before = backend.get_added_tokens_decoder()
    known = {token.content: token for token in before.values()}
    if settings.get("added_tokens_decoder") is None:  # then the vocabulary's own tokens are what it would say
        stated = dict(sorted((stated | {i: _as_object(token) for i, token in before.items()}).items()))
    added: dict[str, tokenizers.AddedToken] = {}
    for token in stated.values():
        content, own = content_of(token), isinstance(token, dict) and bool(token.get("special", False))
        named_so = content in (of_roles if isinstance(token, dict) else names)
        made = added_token(token, special=own or named_so or (content in known and known[content].special))
        if content not in known or _flags(made) != _flags(known[content]):
            added[content] = made
    listed = {*known, *map(content_of, stated.values())}
    for token in named:  # of one that is named twice, the flags that are named last
        content = content_of(token)
        if content not in listed:
            special = content in of_roles or not isinstance(token, dict) or bool(token.get("special", False))
            added[content] = added_token(token, special=special)
    fresh = max(backend.get_vocab_size(with_added_tokens=False), 1 + max(before, default=-1))
    lacking = _without_row(backend, added, fresh, rows)
    if lacking:
        _log.warning("%s: no row of the model's embedding is left for %s: read as text", folder, _listed(lacking))
    backend.add_tokens([token for content, token in added.items() if content not in lacking])
    _check_ids(backend, folder, {i: content_of(t) for i, t in stated.items()}, lacking, strict=strict)
    return sum((backend.token_to_id(content) or 0) >= fresh for content in added if content not in lacking)


def _without_row(backend: "tokenizers.Tokenizer", added: Iterable[str], fresh: int, rows: int) -> list[str]:
    """The new tokens that would come after the model's last row."""
    new = [content for content in added if content and backend.token_to_id(content) is None]
    return new[max(0, rows - fresh) :] if rows else []


def _check_ids(
    backend: "tokenizers.Tokenizer", folder: Path, stated: Mapping[int, str], lacking: list[str], *, strict: bool
) -> None:
    """Check that each token has the id that the files say."""
    other = []
    for token_id, content in sorted(stated.items()):
        if content not in lacking and backend.token_to_id(content) != token_id:
            if strict:
                raise CheckpointError(f"{folder}: added token {content!r} cannot have id {token_id}: ids have a gap")
            other.append(f"{content} ({backend.token_to_id(content)}, not {token_id!s:.20})")
    if other:
        _log.warning(
            "%s: added tokens have other ids than the files say, as in transformers: %s", folder, _listed(other)
        )


def _stated(folder: Path, settings: Mapping[str, Any]) -> dict[int, Token]:
    """The tokens whose ids the files say, lowest first."""
    stated: dict[int, Token]
    try:
        if (table := settings.get("added_tokens_decoder")) is not None:
            stated = {int(token_id): token for token_id, token in table.items()}
        else:
            older = read_optional_json(folder / "added_tokens.json")
            stated = {int(token_id): content for content, token_id in older.items()}
            if len(stated) < len(older):
                raise CheckpointError(f"{folder}: added_tokens.json gives one id to two tokens")
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: the added tokens should be a table of ids and tokens: {error}") from error
    return dict(sorted(stated.items(), key=lambda item: item[0]))


def _listed(names: list[str]) -> str:
    return ", ".join(f"{name:.60}" for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def added_token(token: Token, *, special: bool) -> "tokenizers.AddedToken":
    """A token of the settings as the library's object."""
    from tokenizers import AddedToken

    options = token if isinstance(token, dict) else {}
    flags = {name: bool(options.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
    normalized = bool(options.get("normalized", not special))
    return AddedToken(content_of(token), special=special, normalized=normalized, **flags)


def _as_object(token: "tokenizers.AddedToken") -> Token:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": token.content} | {name: getattr(token, name) for name in flags}


def _flags(token: "tokenizers.AddedToken") -> tuple[bool, ...]:
    return (token.single_word, token.lstrip, token.rstrip, token.normalized, token.special)


def content_of(token: Token) -> str:
    """The text of a token of the settings.

    Raises:
        CheckpointError: it has none.
    """
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise CheckpointError(
            f"a special token should be text, or an object with its text as content; got {token!r:.60}"
        )
    return content


def named_tokens(settings: Mapping[str, Any]) -> list[Token]:
    """The `..._token` fields of the settings, and the further special tokens, in transformers' order.

    Raises:
        CheckpointError: the further ones are no list or table of tokens.
    """
    further = settings.get(FURTHER[0]) or []
    if not isinstance(further, dict | list):
        raise CheckpointError(f"further special tokens should be a list or a table of tokens; got {further!r:.60}")
    others = [key for key in settings if key.endswith("_token") and key not in ROLES]
    named = [settings.get(key) for key in (*ROLES, *others)]
    own = settings.get("model_specific_special_tokens")
    named += [*(own.values() if isinstance(own, dict) else ())]
    texts = [value for value in named if isinstance(value, str | dict)]
    return texts + list(further.values() if isinstance(further, dict) else further)


def mark_special(backend: "tokenizers.Tokenizer", tokens: Iterable[Token]) -> None:
    """Mark tokens of the vocabulary as special, unless they are added tokens, or not in it."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in tokens:
        content = content_of(token)
        if content not in marked and backend.token_to_id(content) is not None:
            backend.add_special_tokens([added_token(token, special=True)])
            marked.add(content)
