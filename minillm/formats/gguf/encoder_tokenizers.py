"""Tokenizers of encoders in the metadata of a GGUF file: `tokenizer.ggml.model` "bert" and "t5".

- "bert", WordPiece: a piece that begins a word begins with a space (U+2581) in the file, one that does not has lost its
  "##", and [CLS] and its like are as they were.
- "t5", a Unigram model of SentencePiece (XLM-RoBERTa): pieces with scores, the likeliest split of a text is taken.

A text becomes [CLS] text [SEP], by the ids of BOS and of the separator as in llama.cpp; of Unigram models, what
`add_bos_token` and `add_eos_token` say.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ...text.tokenizer.settings import SPACE
from .file import GGUF

if TYPE_CHECKING:
    import tokenizers

USUAL = {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103}
"""Ids of BERT's tokens where a file does not name them, by llama.cpp's words (of which one is misspelt)"""
_MAP = "tokenizer.ggml.precompiled_charsmap"


def wordpiece_ids(gguf: GGUF, count: int) -> dict[str, int]:
    """Ids of BERT's tokens by their roles, "cls_token" and so on, of `count` tokens."""
    roles = {"bos": "cls", "unknown": "unk", "seperator": "sep", "padding": "pad", "mask": "mask"}
    stored = {name: gguf.get(f"tokenizer.ggml.{name}_token_id", int, usual) for name, usual in USUAL.items()}
    return {f"{roles[name]}_token": i for name, i in stored.items() if 0 <= i < count}


def wordpiece(gguf: GGUF, tokens: Sequence[str], ids: dict[str, int]) -> "tokenizers.Tokenizer":
    """A WordPiece tokenizer with [CLS] and [SEP] around a text.

    Args:
        gguf: the file
        tokens: as they are in it
        ids: as of `wordpiece_ids`

    Raises:
        CheckpointError: two tokens are the same piece, or one of the three that a text needs is missing.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    if missing := [role for role in ("cls_token", "sep_token", "unk_token") if role not in ids]:
        raise CheckpointError(
            f"{gguf.path}: none of its {len(tokens)} tokens is {', '.join(missing)}, which a WordPiece tokenizer needs"
        )
    special = {tokens[i] for i in ids.values()}
    pieces = [token if token in special else _piece(token) for token in tokens]
    vocab = dict(zip(pieces, range(len(pieces)), strict=True))
    if len(vocab) < len(pieces):
        raise CheckpointError(f"{gguf.path}: tokenizer.ggml.tokens has a piece twice, with a space and without")
    backend = Tokenizer(models.WordPiece(vocab, unk_token=tokens[ids["unk_token"]], max_input_chars_per_word=100))
    lower = gguf.get("tokenizer.ggml.normalizer.lowercase", bool, True)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lower, strip_accents=gguf.get("tokenizer.ggml.normalizer.strip_accents", bool, lower)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    cls, sep = tokens[ids["cls_token"]], tokens[ids["sep_token"]]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, ids["cls_token"]), (sep, ids["sep_token"])],
    )
    return backend


def _piece(token: str) -> str:
    """A token of the file as in a vocab.txt."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(SPACE) and len(token) > 1 else f"##{token}"


def phantom(token: str) -> str:
    """A token of a vocab.txt as in a file."""
    return token.removeprefix("##") if token.startswith("##") and len(token) > 2 else f"{SPACE}{token}"


def unigram(gguf: GGUF, tokens: Sequence[str], scores: NDArray[Any] | None, unknown: int) -> "tokenizers.Tokenizer":
    """A Unigram tokenizer, without tokens around a text.

    Args:
        gguf: the file
        tokens: its pieces
        scores: logarithms of their probabilities
        unknown: id of the token of unknown characters

    Raises:
        CheckpointError: there is no score for each piece, or the table of characters is damaged.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if scores is None or len(scores) != len(tokens) or not np.isfinite(scores).all():
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.scores should have {len(tokens)} finite numbers, found "
            f"{'none' if scores is None else len(scores)}"
        )
    backend = Tokenizer(models.Unigram(list(zip(tokens, scores.tolist(), strict=True)), unknown, False))
    steps: list[Any] = []
    characters = gguf.numbers(_MAP)
    if characters is not None and len(characters):
        try:
            steps.append(normalizers.Precompiled(characters.tobytes()))
        except Exception as error:  # the library's own kind
            raise CheckpointError(f"{gguf.path}: {_MAP} is damaged: {error!s:.100}") from None
    if gguf.get("tokenizer.ggml.remove_extra_whitespaces", bool, False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    spaced = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always" if spaced else "never")
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme="always" if spaced else "never")
    return backend
