"""SentencePiece models (`tokenizer.model`), run by the `sentencepiece` package.

Llama 1 and 2, TinyLlama and Mistral were published with such a file (Kudo and Richardson, "SentencePiece", 2018,
https://arxiv.org/abs/1808.06226). The package normalises and segments text, so token ids are SentencePiece's own. The
`tokenizers` library does what it does not know: tokens that are added, or spelled out in the text.

Special tokens follow transformers' LlamaTokenizer. Control and unknown pieces become special tokens, which the text may
spell out; the text is split at all of these first. SentencePiece begins a text with a space, the dummy prefix, which
decoding removes again. It is added at the beginning of the text, unless a special token is there; with `legacy` it is
added to each part between them. `add_prefix_space` overrides the model's own setting. One difference is intended:
transformers 5 adds no prefix before a space, and decoding then loses that space; here, as in SentencePiece and in
transformers 4, the prefix is added too.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError, install
from ...files import read_bytes
from .names import BASE
from .seq2seq import Vocabulary
from .settings import SPACE

_LONGEST = 512  # characters of a piece that merges are searched for; SentencePiece makes them 16 long
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* 0\r?\n")  # the first line of another format with the same file name
# The fields of a protocol buffer that is appended to another replace its own: normalizer_spec (3), of 2 bytes, with
# add_dummy_prefix (3), which follows.
_DUMMY_PREFIX = b"\x1a\x02\x18"


class Encoded(NamedTuple):
    """Result of `SentencePieceTokenizer.encode`."""

    ids: list[int]


class SentencePieceTokenizer:
    """A SentencePiece model with the methods of `tokenizers.Tokenizer` that minillm uses.

    Attributes:
        tokens: a `tokenizers.Tokenizer` that has the ids, the special and added tokens, and the decoder. Its own model
            only finds the text between added tokens. Methods that are not defined here are `tokens`' own.
        roles: text of "bos_token", "eos_token", "pad_token" and "unk_token", where the model has them.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], renumber: Callable[[list[str]], Vocabulary] | None = None
    ) -> None:
        """Read a file.

        Args:
            path: the file.
            settings: tokenizer_config.json; `legacy` (false if absent) and `add_prefix_space` are used.
            renumber: the checkpoint's tokens for the model's pieces; None: they are the pieces, with the same ids.

        Raises:
            RuntimeError, ValueError: from the package: the file is not a SentencePiece model, or is broken.
            CheckpointError: the file cannot be read.
            UnsupportedModelError: the package is not installed, or the model has rules of its own for decoded text.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise UnsupportedModelError(
                f"{path} is read by the sentencepiece package, which is not installed: "
                f"{install('sentencepiece')}, or save the tokenizer with transformers as a tokenizer.json"
            ) from None
        from tokenizers import AddedToken, Tokenizer, models

        data = read_bytes(path)
        if _TIKTOKEN.match(data):
            raise UnsupportedModelError(
                f"{path} is a tiktoken vocabulary, and a SentencePiece model was expected; "
                "take the checkpoint's version for transformers, which has a tokenizer.json"
            )
        asked = settings.get("add_prefix_space")
        override = b"" if asked is None else _DUMMY_PREFIX + bytes([bool(asked)])
        self._bare = SentencePieceProcessor(model_proto=data + _DUMMY_PREFIX + b"\0")
        self._prefixed = SentencePieceProcessor(model_proto=data + override)
        self._removes_extra_spaces = self._bare.normalize("  ") != SPACE * 2  # also the one before a word
        self._legacy = bool(settings.get("legacy", False))
        model, ids = self._prefixed, range(len(self._prefixed))
        self._pieces = [str(model.id_to_piece(i)) for i in ids]
        self._unknown = self._pieces[model.unk_id()]
        own = {piece: i for i, piece in enumerate(self._pieces)}
        vocab, names, self._codes = Vocabulary(own) if renumber is None else renumber(self._pieces)
        self._vocab = vocab
        self._unknown_id = vocab[self._unknown]
        self._ids = [vocab.get(piece, self._unknown_id) for piece in self._pieces]  # of each of the model's
        self._byte_fallback = any(model.is_byte(i) for i in ids)
        control = {self._pieces[i] for i in ids if model.is_unknown(i) or model.is_control(i)}
        special = [piece for piece in self._pieces if piece in control and piece in vocab]
        special += [name for name in names if name not in control]
        not_text = control.union(special)
        text_ids = [[i] for i in ids if self._pieces[i] in vocab.keys() - not_text and not model.is_byte(i)]
        spelled = [self._pieces[i].replace(SPACE, " ") for [i] in text_ids]
        decoded = model.decode(text_ids)
        self.tokens = Tokenizer(models.WordLevel(vocab, unk_token=self._unknown))
        self.tokens.decoder = spaces_decoder(self._byte_fallback, leading_space=decoded != spelled)
        self.tokens.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
        if self.tokens.decode_batch([[self._ids[i]] for [i] in text_ids]) != decoded:
            raise UnsupportedModelError(
                f"{path} has rules of its own for decoded text, which are not supported; "
                "a tokenizer.json beside it would be read instead"
            )
        named = {"bos": model.bos_id(), "eos": model.eos_id(), "pad": model.pad_id(), "unk": model.unk_id()}
        self.roles = {f"{role}_token": self._pieces[i] for role, i in named.items() if i >= 0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokens, name)

    @cached_property
    def is_bpe(self) -> bool:
        """True of a byte pair encoding, False of a unigram model, which alone has several segmentations of a text."""
        try:
            self._bare.nbest_encode_as_ids("a", nbest_size=1)
        except RuntimeError:
            return True
        return False

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.tokens.get_added_tokens_decoder())

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """Token ids of a text: added tokens spelled out in it, and SentencePiece's for the parts between them."""
        ids: list[int] = []
        encoded = self.tokens.encode(text, add_special_tokens=add_special_tokens)
        for token_id, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True):
            segment = text[begin:end]
            # `tokens` calls a part unknown, or what it is called if it happens to be one piece
            if token_id in self._added and (token_id != self._unknown_id or segment.strip() == self._unknown):
                ids.append(token_id)
                continue
            code = self._codes.match(segment) if self._codes is not None else None
            if code is not None:
                found_code = self.tokens.token_to_id(code.group())
                ids.append(self._unknown_id if found_code is None else found_code)
                segment = segment[code.end() :]
            prefixed = begin == 0 or self._legacy or (segment.startswith(" ") and self._removes_extra_spaces)
            ids += [self._ids[i] for i in (self._prefixed if prefixed else self._bare).encode(segment)]
        return Encoded(ids)

    def to_str(self) -> str:
        """A tokenizer.json with the same tokens, which splits text as a BPE or unigram model does."""
        processor, vocab = self._bare, self._vocab
        model = {"unk_id": self._unknown_id, "unk_token": self._unknown, "byte_fallback": self._byte_fallback}
        scores = {piece: processor.get_score(i) for i, piece in enumerate(self._pieces)}
        if not self.is_bpe:
            entries = [(token, scores.get(token, 0.0)) for token in sorted(vocab, key=lambda token: vocab[token])]
            model |= {"type": "Unigram", "vocab": entries}
        else:
            pieces = [piece for i, piece in enumerate(self._pieces) if piece in vocab and not processor.is_byte(i)]
            ordinary = {piece: vocab[piece] for piece in pieces if vocab[piece] not in self._added}
            merges = merges_by_score(
                ordinary, [scores.get(token, 0.0) for token in sorted(vocab, key=lambda t: vocab[t])]
            )
            model |= {"type": "BPE", "vocab": vocab, "merges": merges, "fuse_unk": True}
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        whole = json.loads(self.tokens.to_str()) | {"model": model, "normalizer": spaces}
        steps = whole["decoder"]["decoders"]
        if not self._byte_fallback:  # its step, which finds no bytes: llguidance knows SentencePiece's tokens by it
            steps.insert(1, {"type": "ByteFallback"})
        return json.dumps(whole)


def merges_by_score(pieces: Mapping[str, int], scores: Sequence[float] | NDArray[Any]) -> list[tuple[str, str]]:
    """Every split of a piece of text into two pieces, by the score of the whole, highest first, then by ids.

    Splits are found by the hashes of all beginnings and ends of all pieces at once: 262,144 pieces have some millions.

    Args:
        pieces: text and id of each piece that merges may make or take
        scores: scores of all ids
    """
    texts, numbers = list(pieces), np.fromiter(pieces.values(), np.intp, len(pieces))
    if too_long := [row for row, text in enumerate(texts) if len(text) > _LONGEST]:
        texts, numbers = [text for text in texts if len(text) <= _LONGEST], np.delete(numbers, too_long)
    splits = _splits(texts)
    if splits is None:  # two different texts have one hash, by chance or on purpose
        rows = {piece: row for row, piece in enumerate(texts)}
        every = ((piece, cut) for piece in texts for cut in range(1, len(piece)))
        parts = ((rows[piece], rows.get(piece[:cut]), rows.get(piece[cut:])) for piece, cut in every)
        splits = np.array([triple for triple in parts if None not in triple], np.intp).reshape(-1, 3).T
    whole, left, right = splits
    gained = np.asarray(scores, np.float64)[numbers[whole]] if texts else np.empty(0)
    order = np.lexsort((numbers[right], numbers[left], -gained))
    strings = np.array(texts, object)
    return list(zip(strings[left[order]].tolist(), strings[right[order]].tolist(), strict=True))


_BASE = np.uint64(BASE)
"""Base of the hash of a text c_1 .. c_n of characters, as `names.py` has it of bytes"""


def _splits(texts: list[str]) -> NDArray[np.intp] | None:
    """The rows (whole, left, right) of every text that is two others. [3, N]; None if two have one hash."""
    lengths = np.fromiter(map(len, texts), np.intp, len(texts))
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64) + np.uint64(1)
    first = np.cumsum(lengths) - lengths
    longest = int(lengths.max(initial=0))
    powers = np.multiply.accumulate(np.concatenate([np.ones(1, np.uint64), np.full(longest, _BASE)]))
    begun = np.zeros(len(codes), np.uint64)  # the hash of a text up to and with each character
    hashes = np.zeros(len(texts), np.uint64)
    for at in range(longest):
        rows = np.flatnonzero(lengths > at)
        hashes[rows] = hashes[rows] * _BASE + codes[first[rows] + at]
        begun[first[rows] + at] = hashes[rows]
    table = _Table(hashes)
    if not table.unique:
        return None
    row_of = np.repeat(np.arange(len(texts)), lengths)
    rest = lengths[row_of] - (np.arange(len(codes)) - first[row_of]) - 1  # characters after this one
    cuts = np.flatnonzero(rest > 0)
    left = table.find(begun[cuts])
    cuts, left = cuts[left >= 0], left[left >= 0]
    whole = row_of[cuts]
    right = table.find(hashes[whole] - begun[cuts] * powers[rest[cuts]])
    whole, left, right = whole[right >= 0], left[right >= 0], right[right >= 0]
    fits = lengths[left] + lengths[right] == lengths[whole]
    whole, left, right = whole[fits], left[fits], right[fits]
    strings = np.array(texts, object)
    halves = strings[np.stack([left, right], axis=1).ravel()]
    if "".join(halves.tolist()) != "".join(strings[whole].tolist()):  # as long as each other: so each is exact
        return None
    return np.array([whole, left, right])


class _Table:
    """Rows by their hash: in a slot by its lowest bits, or, where another row has that slot, in order."""

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self.hashes, rows = hashes, np.arange(len(hashes), dtype=np.int32)
        self.slots = np.full(2**22, -1, np.int32)
        self.slots[self._slot(hashes)] = rows
        others = np.flatnonzero(self.slots[self._slot(hashes)] != rows)
        self.others = others[np.argsort(hashes[others], kind="stable")]
        self.sorted = hashes[self.others]
        beside = self.hashes[self.slots[self._slot(self.sorted)]]
        self.unique = not ((beside == self.sorted).any() or (self.sorted[1:] == self.sorted[:-1]).any())
        """No two rows have one hash"""

    def _slot(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        return (hashes & np.uint64(len(self.slots) - 1)).astype(np.intp)

    def find(self, hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """The row of each hash; -1 where there is none."""
        rows = self.slots[self._slot(hashes)]
        wrong = np.flatnonzero((rows >= 0) & (self.hashes[rows] != hashes))
        rows[wrong] = -1
        if len(self.others):
            places = np.minimum(np.searchsorted(self.sorted, hashes[wrong]), len(self.others) - 1)
            same = self.sorted[places] == hashes[wrong]
            rows[wrong[same]] = self.others[places[same]]
        return rows


def spaces_decoder(byte_fallback: bool, *, leading_space: bool) -> Any:
    """The decoder: restores spaces and bytes, and strips the space of the dummy prefix."""
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(SPACE, " ")]
    if byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if leading_space:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
