"""Converts a SentencePiece `tokenizer.model` to an object of the `tokenizers` library.

Llama 1 and 2, TinyLlama and Mistral were published with such a file (Kudo and Richardson, "SentencePiece", 2018,
https://arxiv.org/abs/1808.06226): a protocol buffer of pieces with scores, and of text normalisation. The fields needed
are parsed here, so neither sentencepiece nor protobuf is needed.

Text is normalised in this order. Each space becomes "▁"; with `remove_extra_whitespaces`, runs become one and those at
both ends are removed. One more "▁", the dummy prefix, is prepended, which decoding removes again. Then:

- BPE repeatedly merges the adjacent pair whose union has the highest score;
- unigram takes the segmentation with the highest sum of scores (ties may differ from SentencePiece's).

A character without a piece becomes its bytes ("<0x0A>") if the model has byte fallback, else the unknown token.

Special tokens follow transformers' LlamaTokenizer. Control and unknown pieces become special tokens, which the text may
spell out; user-defined symbols are never split. The text is split at all of these first. The dummy prefix is added at
the beginning of the text, unless one of them is there; with `legacy` it is added before each part between them.
`add_prefix_space` overrides the model's own setting. One difference is intended: transformers 5 adds no prefix before a
space, and decoding then loses that space; here, as in SentencePiece and in transformers 4, the prefix is added too.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, UnsupportedModelError
from .files import read_bytes

if TYPE_CHECKING:
    import tokenizers

SPACE = "▁"  # U+2581, SentencePiece's sign for a space

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of pieces
_UNIGRAM, _BPE, _WORD, _CHAR = range(1, 5)
_MODEL_TYPES = {_UNIGRAM: "unigram", _BPE: "BPE", _WORD: "word", _CHAR: "character"}
_NEVER = -1e6  # a score so low that unigram uses a piece only as a last resort
_LONGEST = 512  # characters of a piece; SentencePiece makes them 16 long
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* 0\r?\n")  # the first line of another format with the same file name


@dataclass(frozen=True)
class _Piece:
    text: str
    score: float
    type: int


@dataclass(frozen=True)
class _Proto:
    """The needed fields of a ModelProto, with the defaults of sentencepiece_model.proto."""

    pieces: list[_Piece]
    model_type: int
    byte_fallback: bool
    whitespace_is_suffix: bool
    special_ids: dict[str, int]  # "unk_token", "bos_token", ... -> id; outside the pieces (-1 as 2**64 - 1): none
    normalization: str  # name of the normalisation rules, "" for none
    dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    denormalization: bool

    def texts(self, *types: int) -> list[str]:
        return [piece.text for piece in self.pieces if piece.type in types]


def read_sentencepiece(path: Path, settings: Mapping[str, Any]) -> "tuple[tokenizers.Tokenizer, dict[str, str]]":
    """The tokenizer in a `tokenizer.model`, and the text of its "bos_token", "eos_token", "pad_token", "unk_token".

    Args:
        path: the file.
        settings: tokenizer_config.json; `legacy` (false if absent) and `add_prefix_space` are used.

    Raises:
        CheckpointError: the file is not a SentencePiece model, or is broken.
        UnsupportedModelError: it uses a feature that the `tokenizers` library does not implement exactly.
    """
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Backend

    proto = _read_proto(path)
    _refuse_unsupported(path, proto)
    pieces = proto.pieces
    unknown = proto.special_ids["unk_token"]
    model: Any
    if proto.model_type == _BPE:
        vocab = {piece.text: token_id for token_id, piece in enumerate(pieces)}
        model = models.BPE(
            vocab,
            _merges(proto),
            unk_token=pieces[unknown].text,
            fuse_unk=True,
            byte_fallback=proto.byte_fallback,
        )
    else:  # a byte spelled out in the text is text
        scores = [(piece.text, _NEVER if piece.type == _BYTE else piece.score) for piece in pieces]
        model = models.Unigram(scores, unknown, proto.byte_fallback)
    backend = Backend(model)
    asked = settings.get("add_prefix_space")
    prefix = proto.dummy_prefix if asked is None else bool(asked)
    scheme = ("always" if settings.get("legacy", False) else "first") if prefix else "never"
    _prepare_text(backend, scheme, remove_extra=proto.remove_extra_whitespaces)
    backend.decoder = _decoder(proto.byte_fallback, leading_space=prefix or proto.remove_extra_whitespaces)
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in proto.texts(_UNKNOWN, _CONTROL)]
    )
    backend.add_tokens([AddedToken(text, normalized=False) for text in proto.texts(_USER_DEFINED)])
    return backend, {role: pieces[i].text for role, i in proto.special_ids.items() if 0 <= i < len(pieces)}


def _merges(proto: _Proto) -> list[tuple[str, str]]:
    """BPE merges, highest priority first: every split of a piece into two pieces, by the score of the piece."""
    ids = {piece.text: token_id for token_id, piece in enumerate(proto.pieces) if piece.type == _NORMAL}
    pairs = [
        (-proto.pieces[token_id].score, ids[text[:cut]], ids[text[cut:]], text[:cut], text[cut:])
        for text, token_id in ids.items()
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _prepare_text(backend: "tokenizers.Tokenizer", scheme: str, *, remove_extra: bool) -> None:
    """Set up the normalisation of spaces; `scheme` says where the dummy prefix is added, as in Metaspace."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[Any] = []
    if remove_extra:
        ends = r"\A +| +\z" if scheme == "never" else r" +\z"  # else a space at the beginning serves as the prefix
        steps = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(ends), "")]
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if scheme != "never":
        # Metaspace adds no prefix before its own sign. No " " is left here, so the first one always adds it.
        signs = [(SPACE, scheme)] if remove_extra else [(" ", scheme), (SPACE, "never")]
        metaspaces = [pre_tokenizers.Metaspace(sign, prepend_scheme=when, split=False) for sign, when in signs]
        backend.pre_tokenizer = pre_tokenizers.Sequence(metaspaces)


def _decoder(byte_fallback: bool, *, leading_space: bool) -> "tokenizers.decoders.Decoder":
    """The decoder: restores spaces and bytes, and strips the space of the dummy prefix."""
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(SPACE, " ")]
    if byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if leading_space:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _refuse_unsupported(path: Path, proto: _Proto) -> None:
    symbols = proto.texts(_USER_DEFINED)
    refused = {
        f"a {_MODEL_TYPES.get(proto.model_type, proto.model_type)} model": proto.model_type not in (_UNIGRAM, _BPE),
        f"normalisation by {proto.normalization}": bool(proto.normalization),  # the library drops combining marks
        "rules of its own for decoded text": proto.denormalization,
        "spaces at the end of words (treat_whitespace_as_suffix)": proto.whitespace_is_suffix,
        "spaces that stay spaces (escape_whitespaces off)": not proto.escape_whitespaces,
        "unused pieces": bool(proto.texts(_UNUSED)),
        "user-defined symbols that hold a space": any(SPACE in symbol for symbol in symbols),
        "user-defined symbols with remove_extra_whitespaces": bool(symbols) and proto.remove_extra_whitespaces,
    }
    for what, found in refused.items():
        if found:
            raise UnsupportedModelError(
                f"{path} asks for {what}, which is not supported: SentencePiece models are read where they are BPE or "
                "unigram without normalisation; a tokenizer.json beside it would be read instead"
            )


# --- the protocol buffer ----------------------------------------------------------------------------------------------


def _read_proto(path: Path) -> _Proto:
    data = read_bytes(path)
    if _TIKTOKEN.match(data):
        raise UnsupportedModelError(
            f"{path} is a tiktoken vocabulary, and a SentencePiece model was expected; "
            "take the checkpoint's version for transformers, which has a tokenizer.json"
        )
    try:
        proto = _parse(data)
    except (ValueError, TypeError, AttributeError, struct.error) as error:  # a field of another kind than expected
        raise CheckpointError(f"{path} is not a SentencePiece model: {error}") from None
    if any(len(piece.text) > _LONGEST for piece in proto.pieces):  # merges are searched at every split of a piece
        raise CheckpointError(f"{path} holds a piece of more than {_LONGEST} characters")
    if len({piece.text for piece in proto.pieces}) < len(proto.pieces):
        raise CheckpointError(f"{path} holds a piece twice")
    if not 0 <= proto.special_ids["unk_token"] < len(proto.pieces):
        raise CheckpointError(f"{path} is not a SentencePiece model: it has no unknown piece")
    return proto


def _parse(data: bytes) -> _Proto:
    """Parse the needed fields of sentencepiece_model.proto by their numbers."""
    pieces, trainer, normalizer, denormalizer = [], b"", b"", b""
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece.get(2, bytes(4)))[0]
            pieces.append(_Piece(piece[1].decode() if 1 in piece else "", score, piece.get(3, _NORMAL)))
        elif number == 2:
            trainer = value
        elif number == 3:
            normalizer = value
        elif number == 5:
            denormalizer = value
    if not (pieces and trainer and normalizer):
        raise ValueError("its pieces, its training or its normalisation are missing")
    training, normalizing = dict(_fields(trainer)), dict(_fields(normalizer))
    roles = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, -1)}
    return _Proto(
        pieces=pieces,
        model_type=training.get(3, _UNIGRAM),
        byte_fallback=bool(training.get(35, False)),
        whitespace_is_suffix=bool(training.get(24, False)),
        special_ids={role: training.get(number, default) for role, (number, default) in roles.items()},
        normalization=normalizing.get(1, b"rules of its own").decode() if normalizing.get(2) else "",
        dummy_prefix=bool(normalizing.get(3, True)),
        remove_extra_whitespaces=bool(normalizing.get(4, True)),
        escape_whitespaces=bool(normalizing.get(5, True)),
        denormalization=bool(dict(_fields(denormalizer)).get(2)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message: an int for a varint, else its bytes.

    Source: https://protobuf.dev/programming-guides/encoding/

    Raises:
        ValueError: the bytes are not a message.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire_type = key & 7
        if wire_type == 0:
            value: int | bytes
            value, at = _varint(data, at)
        else:
            if wire_type == 2:
                length, at = _varint(data, at)
            elif wire_type in (1, 5):
                length = 8 if wire_type == 1 else 4
            else:
                raise ValueError(f"unknown wire type {wire_type} at byte {at}")
            if at + length > len(data):
                raise ValueError(f"it ends within a field of {length} bytes at byte {at}")
            value, at = data[at : at + length], at + length
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint of up to ten bytes of seven bits, and the offset after it."""
    value = 0
    for n, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            return value, at + n + 1
    raise ValueError(f"no number at byte {at}")
