"""Tokenizer files that would end the process are refused before the `tokenizers` library sees them.

A failed memory allocation in Rust ends the process. Its causes are ids far beyond the number of tokens (tables are
indexed by id), rules that make a text many times longer, and a table of Unicode rules that claims to be larger than it
is.
"""

import base64
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ...errors import CheckpointError

SPARE_IDS = 2**20
"""Ids may be as large as this plus four times the number of tokens."""

MOST_GROWTH = 64
"""Maximum factor by which all rules together may lengthen a text"""


def check_ids(ids: Iterator[Any], count: int, where: str) -> None:
    """Refuse invalid ids, and ids far beyond the number of tokens.

    Raises:
        CheckpointError: there is one.
    """
    limit = SPARE_IDS + 4 * count
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < limit:
            raise CheckpointError(
                f"{where} should map each token to its id, a whole number from 0; for {count} tokens below {limit}, "
                f"found {token_id!r:.40}"
            )


def check_tokenizer_json(value: Mapping[str, Any], where: str) -> None:
    """Refuse a tokenizer.json that would crash the process. Other errors are left to the library.

    Raises:
        CheckpointError: it would crash.
    """
    model, added = value.get("model"), value.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(vocab, dict | list) or not isinstance(added, list):
        raise CheckpointError(f"{where} is not a valid tokenizer file: it has no model with a vocabulary")
    count = len(vocab) + len(added)
    if isinstance(vocab, dict):
        check_ids(iter(vocab.values()), count, where)
    check_ids((token.get("id") for token in added if isinstance(token, dict)), count, where)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = prod(_growth(step, where) for step in _steps(value.get(part)))
        if growth > MOST_GROWTH:
            raise CheckpointError(
                f"{where}: the steps of its {part} make a text up to {growth:.3g} times longer, expected {MOST_GROWTH} "
                "at most"
            )
    for step in _steps(value.get("post_processor")):
        special = step.get("special_tokens")
        for token in special.values() if isinstance(special, dict) else ():
            ids = token.get("ids") if isinstance(token, dict) else None
            check_ids(iter(ids if isinstance(ids, list) else ()), count, f"{where}, post_processor")


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Steps of a part of the file, with sequences flattened."""
    if not isinstance(part, dict):
        return
    inside = [part[name] for name in ("normalizers", "pretokenizers", "decoders", "processors") if name in part]
    if not inside:
        yield part
    for steps in inside:
        for step in steps if isinstance(steps, list) else ():
            yield from _steps(step)


def _growth(step: Mapping[str, Any], where: str) -> float:
    """Maximum factor by which a step can lengthen a text, in bytes."""
    kind = step.get("type")
    if kind == "Replace":
        content, pattern = step.get("content"), step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        length = len(content.encode()) if isinstance(content, str) else 0
        if isinstance(text, str) and text:
            return max(1.0, length / len(text.encode()))
        return 1.0 + length  # a regular expression, or an empty pattern, may match between any two characters
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")))
    if kind == "ByteLevel":
        return 2.0
    if kind == "Precompiled":
        return max(2.0, _longest_rule(step.get("precompiled_charsmap"), where) / 4)  # for a character of 4 bytes
    return 1.0


def _longest_rule(text: Any, where: str) -> int:
    """Bytes of the longest text in a table as SentencePiece writes it: size of a trie in bytes, the trie, the texts.

    Raises:
        CheckpointError: the trie is larger than the table.
    """
    data = base64.b64decode(text) if isinstance(text, str) else b""
    size = int.from_bytes(data[:4], "little")
    if 4 + size > len(data):
        raise CheckpointError(f"{where}: precompiled_charsmap is not a table of Unicode rules")
    return max(map(len, data[4 + size :].split(b"\0")))
