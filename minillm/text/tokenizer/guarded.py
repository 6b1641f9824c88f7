"""Safe use of the `tokenizers` library: input checks that prevent crashes, and error conversion.

The library is written in Rust. Unexpected input causes a panic, which Python sees as a BaseException, and a failed
memory allocation ends the process. So causes of the latter are refused before the library sees a tokenizer.json: ids
far beyond the number of tokens (its tables are indexed by id), rules that make a text many times longer, and a broken
table of Unicode rules. `call` turns everything else into one line.
"""

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ...errors import CheckpointError, MinillmError

T = TypeVar("T")

SPARE_IDS = 2**20
"""Ids may be as large as this plus four times the number of tokens."""
MOST_STEPS = 64
"""Maximum number of steps of normalisation, of pre-tokenization, or of decoding"""
MOST_GROWTH = 64
"""Maximum factor by which all rules together may lengthen a text"""
LONGEST_RULE = 256
"""Maximum bytes by which a table of Unicode rules may replace one character"""


def call(where: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that uses the library, and convert its errors.

    Raises:
        CheckpointError: it fails; `where` begins the message.
        MinillmError: raised by the function itself.
    """
    try:
        return function(*args, **kwargs)
    except (MinillmError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C and the like
        line = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{where}: the tokenizer cannot be used: {line:.200}") from error


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
        steps = list(_steps(value.get(part)))
        growth = 1.0
        for step in steps:
            growth *= _growth(step, where)
        if len(steps) > MOST_STEPS or growth > MOST_GROWTH:
            raise CheckpointError(
                f"{where}: its {part} has {len(steps)} steps, which together make a text {growth:.3g} times longer; "
                f"expected {MOST_STEPS} and {MOST_GROWTH} at most"
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
        _check_unicode_rules(step.get("precompiled_charsmap"), where)
        return 2.0
    return 1.0


def _check_unicode_rules(text: Any, where: str) -> None:
    """Check a table as SentencePiece writes it: size of a trie in bytes, the trie, and the text its leaves point into.

    Raises:
        CheckpointError: the sizes contradict each other, or one character is replaced by a very long text.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        data = b""
    size = int.from_bytes(data[:4], "little")
    rest = data[4 + size :]
    if len(data) < 4 or size % 4 or 4 + size > len(data) or not size:
        raise CheckpointError(f"{where}: precompiled_charsmap is not a table of Unicode rules")
    if max(map(len, rest.split(b"\0"))) > LONGEST_RULE:
        raise CheckpointError(
            f"{where}: precompiled_charsmap puts more than {LONGEST_RULE} bytes in place of a character"
        )
