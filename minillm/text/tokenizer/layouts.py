"""Reads a checkpoint folder's tokenizer files into an object of the `tokenizers` library.

Five layouts are supported; the first one found is used:

- `tokenizer.json`, which says all but what the settings beside it change (see settings.py). `add_bos_token` and
  `add_eos_token` are ignored, as in transformers, but for texts to embed. (If `tokenizer_class` is LlamaTokenizer or
  GPT2Tokenizer, transformers 5 uses only its vocabulary and merges and rebuilds the rest, which changes SmolLM2's
  digits and the text after a special token in TinyLlama; here, as in transformers 4, the file is used as written.)
- `tokenizer.model`, as in Llama 1 and 2: a SentencePiece model, see sentencepiece.py. BOS is prepended unless
  `add_bos_token` is false, as in transformers' documentation and version 4.
- `sentencepiece.bpe.model`, `spiece.model`, `spm.model` or `source.spm`, of encoders and encoder-decoders: see
  seq2seq.py.
- `vocab.json` + `merges.txt`, as in the published OPT, Qwen2 and BART checkpoints: byte-level BPE (Radford et al.,
  "Language models are unsupervised multitask learners", 2019, section 2.2), with the settings of
  `tokenizer_config.json`.
- `vocab.txt`, as in BERT's: see wordpiece.py.

In all layouts, the special tokens are the same as in transformers, and so are the tokens that the settings add (see
added_tokens.py).
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, listed
from ...files import parse_json, read_bytes, read_json, read_optional_json, read_text
from .added_tokens import complete, content_of, mark_special, named_tokens
from .guarded import call
from .hazards import check_ids, check_tokenizer_json
from .seq2seq import BPE_FILE, DEBERTA_FILE, MARIAN_FILE, PIECES_FILE, Languages, find_model, vocabulary_of
from .settings import Manner, adapt, manner_of, read_settings, warn_unknown
from .wordpiece import CLASSES, MODELS, NAMES, VOCABULARY, read_wordpiece, use_roles

if TYPE_CHECKING:
    import tokenizers

SENTENCEPIECE = (BPE_FILE, PIECES_FILE, MARIAN_FILE, DEBERTA_FILE)
_log = logging.getLogger("minillm")

FILES = ("tokenizer.json", "tokenizer.model", *SENTENCEPIECE, "vocab.json", "merges.txt", VOCABULARY)
LAYOUTS = "tokenizer.json, else a SentencePiece model, else vocab.json with merges.txt, else vocab.txt"

_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
_END = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "GPT2Tokenizer": _END,
    "Qwen2Tokenizer": _END | {"bos_token": None, "pad_token": "<|endoftext|>"},
    "BartTokenizer": _NAMES | {"add_bos_token": True, "add_eos_token": True},
    "RobertaTokenizer": _NAMES | {"add_bos_token": True, "add_eos_token": True},
    "XLMRobertaTokenizer": _NAMES | {"add_bos_token": True, "add_eos_token": True},
    "DebertaV2Tokenizer": {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    | {"mask_token": "[MASK]", "add_bos_token": True, "add_eos_token": True},
    "T5Tokenizer": {"bos_token": None, "add_eos_token": True},
    "PegasusTokenizer": {"bos_token": None, "add_eos_token": True},
    "MarianTokenizer": {"bos_token": None, "pad_token": "<pad>", "add_eos_token": True},
}
"""Class -> settings that tokenizer_config.json leaves to it, of special tokens and of those around a text"""
_ROLES = ("bos_token", "eos_token", "pad_token", "mask_token")  # roles that config.json can assign too, by id

# Qwen2's pre-tokenization: at most one sign before a word, single digits, line breaks together.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"GPT2Tokenizer": "", "Qwen2Tokenizer": _QWEN2_PATTERN, "BartTokenizer": "", "RobertaTokenizer": ""}
"""Classes whose vocab.json and merges.txt are supported -> pre-tokenization pattern; "" is GPT-2's own."""
_CLASSES = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer",
    "bart": "BartTokenizer",
    "mbart": "MBartTokenizer",
    "pegasus": "PegasusTokenizer",
    "marian": "MarianTokenizer",
}
_CLASSES |= dict.fromkeys(MODELS, "BertTokenizer")
"""Default class by family if no file names one; GPT2Tokenizer for all others."""


def _byte_symbols() -> dict[str, int]:
    """GPT-2's symbol of each byte -> the byte: printable Latin-1 characters are themselves, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_SYMBOLS = _byte_symbols()


class Parts(NamedTuple):
    """The parts of a `Tokenizer`."""

    backend: "tokenizers.Tokenizer"
    role_ids: dict[str, int]
    """Ids of "bos_token", "eos_token", "pad_token" and "mask_token", where there are some"""
    rows: int = 0
    """Rows of the model's LM head: config.json's `vocab_size`, 0 if absent"""
    languages: Languages | None = None
    """Languages of mBART"""
    manner: Manner = Manner()
    """Further changes to ids and text"""
    fresh: int = 0
    """Number of the last ids that the vocabulary has from the settings beside it"""


def read_tokenizer(folder: Path, file: str = FILES[0]) -> Parts:
    """The tokenizer of a checkpoint folder; `file` is the name of tokenizer.json in it.

    Raises:
        ModelNotFoundError: the folder holds none of the layouts.
        CheckpointError: a file cannot be read, or the files contradict each other.
        UnsupportedModelError: a tokenizer.model that would not be run exactly, or vocab.json and merges.txt of a
            tokenizer whose pre-tokenization is not known here.
    """
    return call(str(folder), _read_tokenizer, folder, file)


class _Layout(NamedTuple):
    """A tokenizer as the files of one layout give it."""

    model: Any
    """A `tokenizers.Tokenizer`, or a `SentencePieceTokenizer`"""
    settings: dict[str, Any]
    """The folder's settings over the defaults of the class"""
    framed: bool = False
    """Whether the settings say which tokens go around a text; else the files of the layout have said it"""
    cut: Any = None
    """`truncation` of tokenizer.json"""

    @property
    def backend(self) -> "tokenizers.Tokenizer":
        """The object with the ids and the added tokens."""
        backend: tokenizers.Tokenizer = getattr(self.model, "tokens", self.model)
        return backend


def _read_tokenizer(folder: Path, file: str) -> Parts:
    config, settings = read_optional_json(folder / "config.json"), read_settings(folder)
    kind = _class_name(settings, config)
    warn_unknown(folder, kind)
    rows = config.get("vocab_size")
    rows = rows if isinstance(rows, int) else 0
    layout = _read_layout(folder, file, kind, settings, config)
    backend = layout.backend
    fresh = complete(backend, folder, settings, rows, strict=not (folder / file).exists())
    settings = layout.settings
    if kind in CLASSES and type(backend.model).__name__ == "WordPiece":
        use_roles(backend, settings)
    role_ids = _role_ids(backend, settings, config)
    mark_special(backend, named_tokens(settings))
    if layout.framed:
        mark_special(backend, [str(backend.id_to_token(token_id)) for token_id in role_ids.values()])
        frame(backend, str(folder), role_ids, settings)
    backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    of_words = kind == "MarianTokenizer" or not _is_bpe(layout.model)
    manner = manner_of(settings, kind, of_words=of_words, cut=layout.cut)
    return Parts(layout.model, role_ids, rows, Languages.of(kind, backend, settings, role_ids), manner, fresh)


def _read_layout(folder: Path, file: str, kind: str, settings: dict[str, Any], config: Mapping[str, Any]) -> _Layout:
    if (folder / file).exists():
        backend, cut = _read_tokenizer_json(folder / file, kind, str(config.get("model_type")), settings)
        return _Layout(backend, settings, cut=cut)
    if (folder / VOCABULARY).exists() and not any((folder / name).exists() for name in FILES[1:-1]):
        pad = {"pad_token": NAMES["pad_token"]}
        return _Layout(read_wordpiece(folder / VOCABULARY, kind, settings), pad | settings)
    path = folder / "tokenizer.model"
    if path.exists():
        model = _read_sentencepiece(path, settings)
        return _Layout(model, {"add_bos_token": True} | model.roles | settings, framed=True)
    spm = find_model(folder, kind)
    if spm is not None:
        if kind == "XLMRobertaTokenizer" and settings.get("add_prefix_space") is False:
            _log.warning("%s: add_prefix_space=false is not run with %s", folder, BPE_FILE)
        options = {"legacy": True}
        model = _read_sentencepiece(spm, options, lambda pieces: vocabulary_of(spm, kind, settings, pieces))
        return _Layout(model, model.roles | _DEFAULTS.get(kind, {}) | settings, framed=True)
    begins = {"add_bos_token": config.get("model_type") == "opt"}
    backend = _read_vocab_and_merges(folder, settings, kind)
    return _Layout(backend, begins | _DEFAULTS.get(kind, {}) | settings, framed=True)


def _is_bpe(model: Any) -> bool:
    """True of a byte pair encoding, whose tokens have their own spaces."""
    own = getattr(model, "is_bpe", None)  # a SentencePiece model
    return type(model.model).__name__ == "BPE" if own is None else bool(own)


def _read_sentencepiece(path: Path, *arguments: Any) -> Any:
    """A `SentencePieceTokenizer`, with its errors in one line."""
    from .sentencepiece import SentencePieceTokenizer

    return call(f"{path} is not a usable SentencePiece model", SentencePieceTokenizer, path, *arguments)


def _read_tokenizer_json(
    path: Path, kind: str, family: str, settings: Mapping[str, Any]
) -> "tuple[tokenizers.Tokenizer, Any]":
    """A tokenizer.json, changed as the settings beside it say, and how it truncates."""
    from tokenizers import Tokenizer as Backend

    data = read_bytes(path)
    value = parse_json(data, str(path))
    check_tokenizer_json(value, str(path))
    where = f"{path} is not a valid tokenizer file"
    if call(where, adapt, value, kind, family, settings):
        data = json.dumps(value).encode()
    backend = call(where, Backend.from_buffer, data)
    backend.no_truncation()
    backend.no_padding()
    return backend, value.get("truncation")


def _read_vocab_and_merges(folder: Path, settings: dict[str, Any], kind: str) -> "tokenizers.Tokenizer":
    """Byte-level BPE from vocab.json and merges.txt."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    missing = [name for name in ("vocab.json", "merges.txt") if not (folder / name).exists()]
    if missing:
        raise ModelNotFoundError(
            f"{folder} holds no tokenizer: looked for {LAYOUTS}; "
            f"missing: tokenizer.json, tokenizer.model, {', '.join(missing)}"
        )
    if kind not in _BYTE_LEVEL:
        raise UnsupportedModelError(
            f"{folder}: vocab.json and merges.txt are read for {listed(_BYTE_LEVEL)}, and this is a {kind}; "
            "save it with transformers to get a tokenizer.json"
        )
    vocab = read_json(folder / "vocab.json")
    _check_vocab(folder / "vocab.json", vocab)
    merges = _read_merges(folder / "merges.txt", vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    pattern = _BYTE_LEVEL[kind]
    to_bytes = pre_tokenizers.ByteLevel(bool(settings.get("add_prefix_space", False)), use_regex=not pattern)
    if pattern:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), to_bytes])
    else:
        backend.pre_tokenizer = to_bytes
    backend.decoder = decoders.ByteLevel()
    return backend


def _class_name(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The checkpoint's tokenizer class in transformers."""
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return str(named or _CLASSES.get(str(config.get("model_type")), "GPT2Tokenizer")).removesuffix("Fast")


def _check_vocab(path: Path, vocab: dict[str, Any]) -> None:
    check_ids(iter(vocab.values()), len(vocab), str(path))
    if len(set(vocab.values())) < len(vocab):
        raise CheckpointError(f"{path} gives one id to two tokens")
    lacking = sum(symbol not in vocab for symbol in BYTE_SYMBOLS)
    if lacking:  # the library would silently drop such bytes from the text
        raise CheckpointError(f"{path} is not a byte-level vocabulary: {lacking} of the 256 byte symbols are missing")


def _read_merges(path: Path, vocab: dict[str, Any]) -> list[tuple[str, str]]:
    """The pairs of merges.txt, highest priority first, checked against the vocabulary."""
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line or line.startswith("#version"):
            continue
        left, space, right = line.partition(" ")
        if not (space and left in vocab and right in vocab and left + right in vocab):
            raise CheckpointError(f"{path}, line {number}: {line!r} is not two tokens whose union is in vocab.json")
        merges.append((left, right))
    return merges


def _role_ids(
    backend: "tokenizers.Tokenizer", settings: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, int]:
    """Token id of each role: from the tokenizer's settings, else from config.json.

    A role that the settings set to null has no token, even if config.json has one.
    """
    role_ids = {}
    for role in _ROLES:
        if settings.get(role, "unsaid") is None:
            continue
        token_id = backend.token_to_id(content_of(settings[role])) if settings.get(role) else None
        if token_id is None:
            token_id = config.get(f"{role}_id")
            if isinstance(token_id, list):  # of several EOS ids the first is the tokenizer's
                token_id = token_id[0] if token_id else None
        if type(token_id) is int and 0 <= token_id < 2**32 and backend.id_to_token(token_id) is not None:
            role_ids[role] = token_id
    return role_ids


def frame(
    backend: "tokenizers.Tokenizer",
    where: str,
    role_ids: Mapping[str, int],
    settings: Mapping[str, Any],
    unnamed: str = "neither tokenizer_config.json nor config.json names one that is in the vocabulary",
) -> None:
    """Add the BOS token before the text and the EOS token after it, if `add_bos_token` and `add_eos_token` say so.

    Raises:
        CheckpointError: there is no such token; `where` begins the message, and `unnamed` ends it.
    """
    from tokenizers import processors

    template, special_tokens = ["$A"], []
    for role, verb in (("bos_token", "begin"), ("eos_token", "end")):
        if not settings.get(f"add_{role}", False):
            continue
        if role not in role_ids:
            raise CheckpointError(f"{where}: prompts {verb} with the {role[:3].upper()} token, and {unnamed}")
        token = str(backend.id_to_token(role_ids[role]))
        template.insert(0 if role == "bos_token" else len(template), token)
        special_tokens.append((token, role_ids[role]))
    if special_tokens:
        second = ["$B" if symbol == "$A" else template[-1] for symbol in template]  # <s> A </s> </s> B </s>
        pair = [*template, *second] if len(template) == 3 else None
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=pair, special_tokens=special_tokens
        )
