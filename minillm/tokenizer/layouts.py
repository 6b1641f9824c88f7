"""Reads a checkpoint folder's tokenizer files into an object of the `tokenizers` library.

Five layouts are supported; the first one found is used:

- `tokenizer.json`, which is self-contained. `add_bos_token` and `add_eos_token` of `tokenizer_config.json`
  are ignored, as in transformers. (If `tokenizer_class` is LlamaTokenizer or GPT2Tokenizer, transformers 5 uses only
  its vocabulary and merges and rebuilds the rest, which changes SmolLM2's digits and the text after a special token
  in TinyLlama; here, as in transformers 4, the file is used as written.)
- `tokenizer.model`, as in Llama 1 and 2: a SentencePiece model, see sentencepiece.py. BOS is prepended unless
  `add_bos_token` is false, as in transformers' documentation and version 4.
- `sentencepiece.bpe.model`, `spiece.model` or `source.spm`, as in mBART, XLM-RoBERTa, T5, Pegasus and MarianMT: see
  seq2seq.py.
- `vocab.json` + `merges.txt`, as in the published OPT, Qwen2 and BART checkpoints: byte-level BPE (Radford et al.,
  "Language models are unsupervised multitask learners", 2019, section 2.2), with the settings of
  `tokenizer_config.json`.
- `vocab.txt`, as in BERT's: see wordpiece.py.

In all layouts, the special tokens are the same as in transformers.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, listed
from ..files import parse_json, read_bytes, read_json, read_optional_json, read_text
from .guarded import call, check_ids, check_tokenizer_json
from .seq2seq import BPE_FILE, MARIAN_FILE, PIECES_FILE, Languages, find_model, vocabulary_of
from .wordpiece import MODELS, NAMES, VOCABULARY, read_wordpiece

if TYPE_CHECKING:
    import tokenizers

SENTENCEPIECE = (BPE_FILE, PIECES_FILE, MARIAN_FILE)
FILES = ("tokenizer.json", "tokenizer.model", *SENTENCEPIECE, "vocab.json", "merges.txt", VOCABULARY)
LAYOUTS = "tokenizer.json, else a SentencePiece model, else vocab.json with merges.txt, else vocab.txt"

Token = str | dict[str, Any]  # a token in settings: its text, or an object with the text as "content"

_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "BartTokenizer": _NAMES | {"add_bos_token": True, "add_eos_token": True},
    "RobertaTokenizer": _NAMES | {"add_bos_token": True, "add_eos_token": True},
    "XLMRobertaTokenizer": _NAMES | {"add_bos_token": True, "add_eos_token": True},
    "T5Tokenizer": {"bos_token": None, "add_eos_token": True},
    "PegasusTokenizer": {"bos_token": None, "add_eos_token": True},
    "MarianTokenizer": {"bos_token": None, "pad_token": "<pad>", "add_eos_token": True},
}
"""Class -> settings that tokenizer_config.json leaves to it, of special tokens and of those around a text"""
_ROLES = ("bos_token", "eos_token", "pad_token")  # roles that config.json can assign too, by id

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
    """Ids of "bos_token", "eos_token" and "pad_token", where there are some"""
    rows: int = 0
    """Rows of the model's LM head: config.json's `vocab_size`, 0 if absent"""
    languages: Languages | None = None
    """Of mBART"""


def read_tokenizer(folder: Path, file: str = FILES[0]) -> Parts:
    """The tokenizer of a checkpoint folder; `file` is the name of tokenizer.json in it.

    Raises:
        ModelNotFoundError: the folder holds none of the layouts.
        CheckpointError: a file cannot be read, or the files contradict each other.
        UnsupportedModelError: a tokenizer.model that would not be run exactly, or vocab.json and merges.txt of a
            tokenizer whose pre-tokenization is not known here.
    """
    return call(str(folder), _read_tokenizer, folder, file)


def _read_tokenizer(folder: Path, file: str) -> Parts:
    settings = read_optional_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # the newer layout; before it, special_tokens_map.json wins
        settings |= read_optional_json(folder / "special_tokens_map.json")
    config = read_optional_json(folder / "config.json")
    kind = _class_name(settings, config)
    model: Any = None
    if (folder / file).exists():
        backend = _read_tokenizer_json(folder / file)
        role_ids = _role_ids(backend, settings, config)
        _mark_special(backend, _named_tokens(settings))
    elif (folder / VOCABULARY).exists() and not any((folder / name).exists() for name in FILES[1:-1]):
        backend = read_wordpiece(folder / VOCABULARY, kind, settings)
        role_ids = _role_ids(backend, {"pad_token": NAMES["pad_token"]} | settings, config)
        _mark_special(backend, _named_tokens(settings))
    else:
        path = folder / "tokenizer.model"
        if path.exists():
            model = _read_sentencepiece(path, settings)
            settings = {"add_bos_token": True} | model.roles | settings
        elif (found := find_model(folder, kind)) is not None:
            path, given = found, settings
            model = _read_sentencepiece(path, {"legacy": True}, lambda pieces: vocabulary_of(path, kind, given, pieces))
            settings = model.roles | _DEFAULTS.get(kind, {}) | settings
        if model is not None:
            backend = model.tokens
            _add_tokens(backend, folder, settings)
        else:
            backend = _read_vocab_and_merges(folder, settings, kind)
            settings = {"add_bos_token": config.get("model_type") == "opt"} | _DEFAULTS.get(kind, {}) | settings
        role_ids = _role_ids(backend, settings, config)
        _mark_special(backend, _named_tokens(settings))
        _mark_special(backend, [str(backend.id_to_token(token_id)) for token_id in role_ids.values()])
        frame(backend, str(folder), role_ids, settings)
    rows = config.get("vocab_size")
    languages = Languages.of(kind, backend, settings, role_ids)
    return Parts(model or backend, role_ids, rows if isinstance(rows, int) else 0, languages)


def _read_sentencepiece(path: Path, *arguments: Any) -> Any:
    """A `SentencePieceTokenizer`, with its errors in one line."""
    from .sentencepiece import SentencePieceTokenizer

    return call(f"{path} is not a usable SentencePiece model", SentencePieceTokenizer, path, *arguments)


def _read_tokenizer_json(path: Path) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend

    data = read_bytes(path)
    check_tokenizer_json(parse_json(data, str(path)), str(path))
    backend = call(f"{path} is not a valid tokenizer file", Backend.from_buffer, data)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_vocab_and_merges(folder: Path, settings: dict[str, Any], kind: str) -> "tokenizers.Tokenizer":
    """Byte-level BPE from vocab.json and merges.txt, with the added tokens of older checkpoints."""
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
    _add_tokens(backend, folder, settings)
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


def _add_tokens(backend: "tokenizers.Tokenizer", folder: Path, settings: dict[str, Any]) -> None:
    """Add the tokens added after training: `added_tokens_decoder`, or added_tokens.json in older checkpoints."""
    added: dict[int, Token]
    try:
        if "added_tokens_decoder" in settings:
            added = {int(token_id): token for token_id, token in settings["added_tokens_decoder"].items()}
        else:
            added = {
                int(token_id): content for content, token_id in read_optional_json(folder / "added_tokens.json").items()
            }
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: the added tokens should be a table of ids and tokens: {error}") from error
    for token_id, token in sorted(added.items(), key=lambda item: item[0]):
        special = isinstance(token, dict) and bool(token.get("special", False))
        backend.add_tokens([_added_token(token, special=special)])
        if backend.token_to_id(_content(token)) != token_id:
            raise CheckpointError(
                f"{folder}: added token {_content(token)!r} cannot have id {token_id}: ids have a gap"
            )


def _added_token(token: Token, *, special: bool) -> "tokenizers.AddedToken":
    from tokenizers import AddedToken

    options = token if isinstance(token, dict) else {}
    flags = {name: bool(options.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
    normalized = bool(options.get("normalized", not special))
    return AddedToken(_content(token), special=special, normalized=normalized, **flags)


def _content(token: Token) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise CheckpointError(
            f"a special token should be text, or an object with its text as content; got {token!r:.60}"
        )
    return content


def _named_tokens(settings: Mapping[str, Any]) -> list[Token]:
    """The `..._token` fields of tokenizer_config.json, and its further special tokens."""
    named = [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str | dict)]
    further = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if not isinstance(further, dict | list):
        raise CheckpointError(f"further special tokens should be a list or a table of tokens; got {further!r:.60}")
    return named + list(further.values() if isinstance(further, dict) else further)


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
        token_id = backend.token_to_id(_content(settings[role])) if settings.get(role) else None
        if token_id is None:
            token_id = config.get(f"{role}_id")
            if isinstance(token_id, list):  # of several EOS ids the first is the tokenizer's
                token_id = token_id[0] if token_id else None
        if type(token_id) is int and 0 <= token_id < 2**32 and backend.id_to_token(token_id) is not None:
            role_ids[role] = token_id
    return role_ids


def _mark_special(backend: "tokenizers.Tokenizer", tokens: Iterable[Token]) -> None:
    """Mark tokens of the vocabulary as special; names not in it have no row in the model and are skipped."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for token in tokens:
        content = _content(token)
        if content not in marked and backend.token_to_id(content) is not None:
            backend.add_special_tokens([_added_token(token, special=True)])
            marked.add(content)


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
        second = ["$B" if part == "$A" else template[-1] for part in template]  # <s> A </s> </s> B </s>
        pair = [*template, *second] if len(template) == 3 else None
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=pair, special_tokens=special_tokens
        )
