"""WordPiece tokenizers of BERT and DistilBERT from a vocab.txt, the layout before there was a tokenizer.json.

A word is split into the longest pieces of the vocabulary; all but the first begin with "##" (Devlin et al.,
arXiv 1810.04805, section 3). Words are what white space, punctuation and Chinese characters leave; text is lower-cased
unless tokenizer_config.json says otherwise. A text becomes [CLS] text [SEP], a pair [CLS] first [SEP] second [SEP].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, UnsupportedModelError
from ...files import read_text
from .settings import bert_normalizer

if TYPE_CHECKING:
    import tokenizers

VOCABULARY = "vocab.txt"
CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
"""Classes in tokenizer_config.json that are run so"""
MODELS = ("bert", "distilbert", "electra")
"""Families whose class this is where no file names one"""
NAMES = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
"""Role -> token, unless the settings say otherwise"""


def read_wordpiece(path: Path, kind: str, settings: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    """The tokenizer of a vocab.txt.

    Args:
        path: path of the file
        kind: the checkpoint's tokenizer class
        settings: tokenizer_config.json

    Raises:
        CheckpointError: the file cannot be read, has a token twice, or lacks [CLS], [SEP] or [UNK].
        UnsupportedModelError: another class of tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if kind not in CLASSES:
        raise UnsupportedModelError(
            f"{path} is read for {', '.join(CLASSES)}, and this is a {kind}; save it with transformers to get a "
            "tokenizer.json"
        )
    lines = read_text(path).split("\n")
    tokens = [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise CheckpointError(f"{path} has a token twice: expected each on one line")
    named = _named(settings)
    missing = [named[role] for role in ("unk_token", "cls_token", "sep_token") if named[role] not in vocab]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}, which a BERT tokenizer puts around a text")
    backend = Tokenizer(models.WordPiece(vocab, unk_token=named["unk_token"], max_input_chars_per_word=100))
    options = {name: value for name, value in bert_normalizer(settings).items() if name != "type"}
    backend.normalizer = normalizers.BertNormalizer(**options)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens([AddedToken(token, special=True) for token in named.values() if token in vocab])
    return backend


def use_roles(backend: "tokenizers.Tokenizer", settings: Mapping[str, Any]) -> None:
    """Set the tokens around a text and the one of unknown words by the settings, whatever tokenizer.json says."""
    from tokenizers import processors

    named = _named(settings)
    cls, sep = named["cls_token"], named["sep_token"]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((cls, sep))]
    if any(token_id is None for _, token_id in ids) or backend.token_to_id(named["unk_token"]) is None:
        return
    backend.model.unk_token = named["unk_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0", pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", special_tokens=ids
    )


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    """The text of each role's token."""
    return {role: _text(settings.get(role) or token) for role, token in NAMES.items()}


def _text(token: Any) -> str:
    """A token in the settings: its text, or an object with it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise CheckpointError(f"a special token should be text, found {token!r:.60}")
    return text
