"""A tokenizer as the entries of a GGUF file's metadata: the inverse of `tokenizer.py`.

Nothing is written that llama.cpp would read as another tokenizer: what the entries say is read again, and must split
`PROBES` as the tokenizer itself does. By the same texts the rules are found by which a text is split before merging
(`tokenizer.ggml.pre`), whatever a tokenizer.json calls them.
"""

import base64
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, UnsupportedModelError
from ...text.tokenizer import Tokenizer
from .encoder_tokenizers import phantom
from .file import GGUF
from .tokenizer import BYTE, CONTROL, NORMAL, RULES, UNKNOWN, UNUSED, USER_DEFINED, read_backend, split_by

if TYPE_CHECKING:
    import tokenizers

PROBES = (
    "Hello, world! It's 12345 o'clock; I'LL pay $3.50 (or €4) for 1/2 of it.",
    "def f(x_1):\n\treturn {'a': [x ** 2, 0xFF]}  # comment\r\n\r\n\n  end",
    "camelCase MixedCASE HTTPServer naïve Ångström straße Ωmega жизнь 日本語 テスト 한국어 हिन्दी العربية",
    "🙂👩‍👩‍👧 x   y \u00a0z ٣٤٥ Ⅷ² … — “quoted” a.b,c;d:e!f?g。、 3rd 2nd 1000000 http://a.b/c?d=e&f#g",
    "   leading and trailing   ",
)
"""Texts on which two ways of splitting are told apart"""


class Entries(GGUF):
    """Entries that are to be written, read as a file's."""

    def strings(self, key: str) -> list[str] | None:
        """The strings of this key."""
        return self.metadata.get(key)

    def numbers(self, key: str) -> NDArray[Any] | None:
        """The numbers of this key."""
        value = self.metadata.get(key)
        return (
            np.frombuffer(value, np.uint8) if isinstance(value, bytes) else None if value is None else np.array(value)
        )


def gguf_entries(tokenizer: Tokenizer, vocab_size: int, where: Path) -> dict[str, Any]:
    """The metadata entries of a tokenizer, for a model whose embedding has `vocab_size` rows.

    Args:
        tokenizer: the tokenizer
        vocab_size: tokens that occur in no text are added up to that number
        where: its folder, for error messages

    Raises:
        UnsupportedModelError: GGUF files have no such tokenizer, or llama.cpp would split texts otherwise.
    """
    described = json.loads(tokenizer.to_json())
    model = described["model"]
    if model["type"] not in ("BPE", "WordPiece", "Unigram"):
        raise UnsupportedModelError(
            f"{where}: the tokenizer is of type {model['type']}; GGUF files are written with BPE, WordPiece and Unigram"
        )
    if model["type"] == "Unigram":
        return _unigram_entries(tokenizer, described, vocab_size, where)
    if model["type"] == "WordPiece":
        return _wordpiece_entries(tokenizer, described, vocab_size, where)
    byte_level = _holds(described.get("decoder"), "ByteLevel")
    tokens, types = _tokens(described, vocab_size, where, byte_level=byte_level)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    entries: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    entries |= {f"tokenizer.ggml.{role}_token_id": i for role, i in ids.items() if i is not None}
    plain, framed = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    extra = len(framed) - len(plain)
    begins = bool(extra) and framed[0] == ids["bos"]
    entries["tokenizer.ggml.add_bos_token"] = begins
    entries["tokenizer.ggml.add_eos_token"] = extra > begins and framed[-1] == ids["eos"]
    candidates: list[dict[str, Any]]
    if byte_level:
        entries |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
        different = {rules: name for name, rules in reversed(RULES.items())}  # the first name of each
        candidates = [{"tokenizer.ggml.pre": name} for name in RULES if different[RULES[name]] == name]
    else:
        unknown = tokens.index(model["unk_token"]) if model.get("unk_token") in tokens else None
        if unknown is not None:
            types[unknown] = UNKNOWN
            entries["tokenizer.ggml.unknown_token_id"] = unknown
        entries["tokenizer.ggml.scores"] = _scores(tokens, merges)
        entries |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        candidates = [{"tokenizer.ggml.add_space_prefix": prefix} for prefix in (True, False)]
    written = read_backend(Entries(where, entries | candidates[0], {}))
    assert written is not None
    for candidate in candidates:
        split_by(written[0], Entries(where, candidate, {}), byte_level=byte_level)
        if _same(tokenizer, written[0]):
            return entries | candidate
    raise UnsupportedModelError(
        f"{where}: llama.cpp has no rules that split texts as this tokenizer does: it cannot be written to a GGUF file"
    )


def _same(tokenizer: Tokenizer, written: "tokenizers.Tokenizer") -> bool:
    """True if both have the same tokens for all probes."""
    names = [] if tokenizer.splits_special else sorted(tokenizer.special_ids)[:2]  # which a GGUF file cannot say
    special = [tokenizer.token(i) for i in names]
    probes = (*PROBES, *(f"a{text}b {text} c" for text in special))
    return all(written.encode(text).ids == tokenizer.encode(text) for text in probes)


def _wordpiece_entries(
    tokenizer: Tokenizer, described: Mapping[str, Any], vocab_size: int, where: Path
) -> dict[str, Any]:
    """The entries of a WordPiece tokenizer with one token before a text and one after it.

    Raises:
        UnsupportedModelError: llama.cpp would split texts otherwise.
    """
    tokens, types = _tokens(described, vocab_size, where, byte_level=True)
    unknown = described["model"]["unk_token"]
    framed = tokenizer.encode("")
    roles = {"unknown": tokens.index(unknown) if unknown in tokens else None, "mask": tokenizer.mask_token_id}
    if len(framed) == 2:
        roles |= {"bos": framed[0], "cls": framed[0], "eos": framed[1], "seperator": framed[1]}
    roles["padding"] = next((i for i, token in enumerate(tokens) if token == "[PAD]" and types[i] == CONTROL), None)
    ids = {f"tokenizer.ggml.{role}_token_id": i for role, i in roles.items() if i is not None}
    normalizer = described.get("normalizer") or {}
    lower = bool(normalizer.get("lowercase", False))
    strips = normalizer.get("strip_accents")
    pieces = [phantom(token) if types[i] not in (CONTROL, UNUSED) else token for i, token in enumerate(tokens)]
    entries = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.normalizer.lowercase": lower,
        "tokenizer.ggml.normalizer.strip_accents": lower if strips is None else bool(strips),
        **ids,
    }
    written = read_backend(Entries(where, entries, {}))
    if written is None or len(framed) != 2 or not _same(tokenizer, written[0]):
        raise UnsupportedModelError(
            f"{where}: llama.cpp would split texts otherwise than this WordPiece tokenizer does: it cannot be written "
            "to a GGUF file"
        )
    return entries


def _unigram_entries(
    tokenizer: Tokenizer, described: Mapping[str, Any], vocab_size: int, where: Path
) -> dict[str, Any]:
    """The entries of a Unigram tokenizer with one token before a text and one after it (XLM-RoBERTa).

    Raises:
        UnsupportedModelError: llama.cpp would split texts otherwise.
    """
    model, framed = described["model"], tokenizer.encode("")
    pieces = {piece: i for i, (piece, _) in enumerate(model["vocab"])}
    tokens, types = _tokens({**described, "model": model | {"vocab": pieces}}, vocab_size, where, byte_level=True)
    scores = [score for _, score in model["vocab"]]
    roles = {"unknown": model["unk_id"], "mask": tokenizer.mask_token_id}
    if model["unk_id"] is not None:
        types[model["unk_id"]] = UNKNOWN
    if len(framed) == 2:
        roles |= {"bos": framed[0], "cls": framed[0], "eos": framed[1], "seperator": framed[1]}
    roles["padding"] = next((i for i, token in enumerate(tokens) if token == "<pad>" and types[i] == CONTROL), None)
    entries: dict[str, Any] = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores + [0.0] * (len(tokens) - len(scores)),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        **{f"tokenizer.ggml.{role}_token_id": i for role, i in roles.items() if i is not None},
    }
    if characters := _characters(described.get("normalizer")):
        entries["tokenizer.ggml.precompiled_charsmap"] = characters
    for removed, spaced in product((True, False), repeat=2):
        own = {"tokenizer.ggml.remove_extra_whitespaces": removed, "tokenizer.ggml.add_space_prefix": spaced}
        written = read_backend(Entries(where, entries | own, {})) if len(framed) == 2 else None
        if written is not None and _same(tokenizer, written[0]):
            return entries | own
    raise UnsupportedModelError(
        f"{where}: llama.cpp would split texts otherwise than this Unigram tokenizer does: it cannot be written to a "
        "GGUF file"
    )


def _characters(normalizer: Any) -> bytes:
    """SentencePiece's table of characters in the normaliser of a tokenizer.json; empty if there is none."""
    steps = [normalizer, *(normalizer or {}).get("normalizers", [])]
    tables = (step["precompiled_charsmap"] for step in steps if step and step.get("type") == "Precompiled")
    return base64.b64decode(next(tables, ""))


def _tokens(
    described: Mapping[str, Any], vocab_size: int, where: Path, *, byte_level: bool
) -> tuple[list[str], list[int]]:
    """Text and type of every token of a tokenizer.json.

    Raises:
        CheckpointError: the tokenizer has more than the model.
    """
    vocab = {i: token for token, i in described["model"]["vocab"].items()}
    added = {token["id"]: token for token in described.get("added_tokens", [])}
    vocab |= {i: token["content"] for i, token in added.items()}
    size = max(vocab_size, 1 + max(vocab, default=-1))
    tokens, types = [], []
    for i in range(size):
        tokens.append(vocab.get(i, f"[PAD{i}]"))
        if i not in vocab:
            types.append(UNUSED)
        elif i in added:
            types.append(CONTROL if added[i].get("special") else USER_DEFINED)
        else:
            is_byte = not byte_level and len(vocab[i]) == 6 and vocab[i].startswith("<0x") and vocab[i].endswith(">")
            types.append(BYTE if is_byte else NORMAL)
    if len(tokens) > vocab_size:
        raise CheckpointError(f"{where}: the tokenizer has {len(tokens)} tokens, the model {vocab_size} rows")
    return tokens, types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Scores by which neighbours are merged in the order of the merges."""
    rank: dict[str, int] = {}
    for i, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), i)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _holds(part: Any, kind: str) -> bool:
    """True if a part of a tokenizer.json has a step of this kind."""
    if not isinstance(part, dict):
        return False
    inside = [step for name in ("decoders", "pretokenizers", "normalizers") for step in part.get(name, [])]
    return part.get("type") == kind or any(_holds(step, kind) for step in inside)
