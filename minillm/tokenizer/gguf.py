"""The tokenizer in a GGUF file's metadata -> an object of the `tokenizers` library.

`tokenizer.ggml.model` says its kind:

- "gpt2": byte-level BPE with merges. `tokenizer.ggml.pre` names the rules by which a text is split before; `RULES` has
  those of llama.cpp that belong to models run here. A file without that entry is split as llama.cpp splits it, by
  "default", with a warning; a name that is not in the table is refused, as there.
- "llama": a SentencePiece BPE model. Its pieces have scores instead of merges: of all neighbours that make a piece
  together, those whose piece has the best score are merged first.

Token ids are llama.cpp's for a text in which special tokens are parsed, with two exceptions: "qwen2" normalises to NFC,
as its published tokenizer (and transformers) does and llama.cpp does not; and a special token takes no white space
beside it, which files do not say. Any of a token's types but normal text is split off before, the longest first.
"""

import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from numpy.typing import NDArray

from ..errors import CheckpointError, UnsupportedModelError
from .guarded import call
from .layouts import BYTE_SYMBOLS, frame
from .sentencepiece import merges_by_score, spaces_decoder
from .settings import SPACE
from .turn_ends import turn_ends

if TYPE_CHECKING:
    import tokenizers

_log = logging.getLogger("minillm")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""`tokenizer.ggml.token_type`"""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _SYMBOLS
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _SYMBOLS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Rules(NamedTuple):
    """How a text is split before merging, and what goes with it."""

    patterns: tuple[str, ...]
    """Each splits what the one before has left whole"""
    whole: bool = False
    """A part that is a token is one, whatever the merges (`ignore_merges`)"""
    begins: bool = False
    """Texts begin with BOS unless the file says otherwise"""
    nfc: bool = False
    """The text is normalised before"""


_DIGITS = Rules((r"\p{N}", _GPT2))
_BY_RULES = {
    Rules((_GPT2,)): "gpt-2 phi-2 jina-es jina-de mpt olmo jais trillion granite-docling gigachat mellum modern-bert",
    _DIGITS: "smollm starcoder refact command-r codeshell exaone minerva-7b",
    Rules((_LLAMA3,), whole=True, begins=True): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    Rules((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    Rules((_QWEN2,), nfc=True): "qwen2",
    Rules((_QWEN2,)): "deepseek-r1-qwen stablelm2 kormo",
    Rules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
    Rules((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): "falcon",
    Rules((r" ?[^(\s|.,!?…。，、।۔،)]+",)): "bloom gpt3-finnish poro-chat",
    Rules((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")): "viking",
    Rules((_CAMEL % ("", "") + r"\p{N}|" + _PATHS,), whole=True, begins=True): "tekken",
    Rules((_CAMEL % ((_ENDINGS + "?",) * 2) + r"\p{N}{1,3}|" + _PATHS,)): "gpt-4o llama4",
}
RULES = {name: rules for rules, names in _BY_RULES.items() for name in names.split()}
"""`tokenizer.ggml.pre` -> its rules"""

DEFAULT = "default"
"""The rules of a file that names none, as in llama.cpp"""


class Metadata(Protocol):
    """The header of a GGUF file (`checkpoint.gguf.GGUF`)."""

    @property
    def path(self) -> Path: ...

    def get(self, key: str, kind: type, default: Any = None) -> Any: ...

    def strings(self, key: str) -> list[str] | None: ...

    def numbers(self, key: str) -> NDArray[Any] | None: ...


class Vocabulary(NamedTuple):
    """The tokens of a file."""

    where: str
    """The file, for error messages"""
    tokens: list[str]
    types: list[int]

    def of(self, *types: int) -> list[int]:
        """The ids of tokens of these types."""
        return [i for i, kind in enumerate(self.types) if kind in types]


def read_gguf_tokenizer(metadata: Metadata) -> "tuple[tokenizers.Tokenizer, dict[str, int], list[int]] | None":
    """The tokenizer, the ids of its "bos_token" and so on, and the ids that end a text or a turn; None without one.

    Raises:
        CheckpointError: the metadata contradict each other or are of the wrong type.
        UnsupportedModelError: another kind of tokenizer, or unknown rules.
    """
    kind = metadata.get("tokenizer.ggml.model", str)
    if kind is None or kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{metadata.path}: tokenizer.ggml.model is {kind!r:.60}; minillm runs 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece); tokenizer= names another tokenizer"
        )
    return call(str(metadata.path), _read, metadata, kind)


def _read(metadata: Metadata, kind: str) -> "tuple[tokenizers.Tokenizer, dict[str, int], list[int]]":
    from tokenizers import AddedToken

    vocabulary, ids = _vocabulary(metadata), _role_ids(metadata, kind)
    for name, token_id in ids.items():
        if not 0 <= token_id < len(vocabulary.tokens):
            raise CheckpointError(
                f"{metadata.path}: {name} should be one of {len(vocabulary.tokens)} tokens, found {token_id!s:.40}"
            )
    backend, begins = _byte_level(metadata, vocabulary) if kind == "gpt2" else _sentencepiece(metadata, vocabulary)
    special = sorted({*vocabulary.of(UNKNOWN, CONTROL), *ids.values()} - set(vocabulary.of(BYTE)))
    backend.add_special_tokens([AddedToken(vocabulary.tokens[i], normalized=False, special=True) for i in special])
    others = [i for i in vocabulary.of(USER_DEFINED) if i not in ids.values()]
    backend.add_tokens([AddedToken(vocabulary.tokens[i], normalized=False, special=False) for i in others])
    settings = {
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", bool, begins),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", bool, False),
    }
    frame(backend, vocabulary.where, ids, settings, "its metadata name none")
    ends = turn_ends({vocabulary.tokens[i]: i for i in special})
    named = [ids[name] for name in ("eos_token", "eot_token", "eom_token") if name in ids]
    return backend, ids, list(dict.fromkeys(named + ends))


def _vocabulary(metadata: Metadata) -> Vocabulary:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{metadata.path} has a tokenizer without tokens: tokenizer.ggml.tokens is missing")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        [(twice, _)] = Counter(tokens).most_common(1)
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.tokens has the token {twice!r:.60} twice")
    types = metadata.numbers("tokenizer.ggml.token_type")
    if types is not None and len(types) != len(tokens):
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.token_type should have {len(tokens)} numbers, found {len(types)}"
        )
    return Vocabulary(str(metadata.path), tokens, [NORMAL] * len(tokens) if types is None else types.tolist())


def _role_ids(metadata: Metadata, kind: str) -> dict[str, int]:
    """Ids of named tokens. SentencePiece's own ids stand for those that the file does not name, as in llama.cpp."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}
    usual = {"bos": 1, "eos": 2, "unk": 0} if kind == "llama" else {}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id", int, usual.get(name)) for name, key in keys.items()}
    return {f"{name}_token": token_id for name, token_id in found.items() if token_id is not None}


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> "tuple[tokenizers.Tokenizer, bool]":
    """A byte-level BPE tokenizer, and whether its texts begin with BOS."""
    from tokenizers import Tokenizer, decoders, models

    name = metadata.get("tokenizer.ggml.pre", str)
    if name is None:
        _log.warning(
            "%s does not say how a text is split (tokenizer.ggml.pre): read as 'default', as llama.cpp does; "
            "tokens may differ from those of training",
            metadata.path,
        )
        name = DEFAULT
    if name not in RULES:
        raise UnsupportedModelError(
            f"{metadata.path}: tokenizer.ggml.pre is {name!r:.60}; minillm has the rules of "
            f"{', '.join(sorted(RULES))}; tokenizer= names another tokenizer"
        )
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    lacking = sum(symbol not in vocab for symbol in BYTE_SYMBOLS)
    if lacking == len(BYTE_SYMBOLS):
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.tokens has none of the 256 symbols of bytes")
    merges = []
    for i, merge in enumerate(metadata.strings("tokenizer.ggml.merges") or []):
        head, _, right = merge[1:].partition(" ")  # a token may begin with a space
        left = merge[:1] + head
        if left + right not in vocab or left not in vocab or right not in vocab:
            raise CheckpointError(f"{metadata.path}: tokenizer.ggml.merges, {i}: {merge!r:.60} does not make a token")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.decoder = decoders.ByteLevel()
    split_by(backend, metadata, byte_level=True)
    return backend, RULES[name].begins


def split_by(backend: "tokenizers.Tokenizer", metadata: Metadata, *, byte_level: bool) -> None:
    """Set what is done to a text before merging, by `tokenizer.ggml.pre` or `tokenizer.ggml.add_space_prefix`."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if not byte_level:
        spaced = metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
        steps: list[Any] = [normalizers.Prepend(SPACE)] if spaced else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        return
    rules = RULES[metadata.get("tokenizer.ggml.pre", str, DEFAULT)]
    backend.model.ignore_merges = rules.whole
    backend.normalizer = normalizers.NFC() if rules.nfc else None
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])


def _sentencepiece(metadata: Metadata, vocabulary: Vocabulary) -> "tuple[tokenizers.Tokenizer, bool]":
    """A SentencePiece BPE tokenizer, and whether its texts begin with BOS: yes."""
    from tokenizers import Tokenizer, models

    scores = metadata.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.scores should have {len(vocabulary.tokens)} numbers, found "
            f"{'none' if scores is None else len(scores)}"
        )
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    pieces = {vocabulary.tokens[i]: i for i in vocabulary.of(NORMAL, USER_DEFINED, UNUSED)}
    unknown = next((vocabulary.tokens[i] for i in vocabulary.of(UNKNOWN)), None)
    byte_fallback = bool(vocabulary.of(BYTE))
    merges = merges_by_score(pieces, scores.tolist())
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )
    split_by(backend, metadata, byte_level=False)
    spaced = metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
    backend.decoder = spaces_decoder(byte_fallback, leading_space=spaced)
    return backend, True
