"""The tokenizer in the metadata of a GGUF file.

`tokenizer.ggml.model` says its kind:

- "gpt2": byte-level BPE with merges. `tokenizer.ggml.pre` names the rules by which a text is split before; `RULES` has
  those of llama.cpp that belong to models run here. A file without that entry is split as llama.cpp splits it, by
  "default", with a warning; a name that is not in the table is refused, as there.
- "llama": a SentencePiece BPE model. Its pieces have scores instead of merges: of all neighbours that make a piece
  together, those whose piece has the best score are merged first.
- "gemma4": such pieces with merges.
- "bert" and "t5": WordPiece and Unigram models, of encoders (`encoder_tokenizers.py`).

Token ids are llama.cpp's for a text in which special tokens are parsed, with three exceptions: "qwen2" normalises to
NFC, as its published tokenizer (and transformers) does and llama.cpp does not; likewise letters and white space beyond
ASCII have their class in Unicode, where llama.cpp takes some for others ("gpt-4o", "tekken", "deepseek-llm"); and a
special token takes no white space beside it, which files do not say. Any of a token's types but normal text is split
off before, the longest first.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, UnsupportedModelError, listed
from ...text.tokenizer import Tokenizer
from ...text.tokenizer.guarded import call
from ...text.tokenizer.layouts import BYTE_SYMBOLS, frame
from ...text.tokenizer.names import Names
from ...text.tokenizer.partial import PartialTokenizer
from ...text.tokenizer.sentencepiece import merges_by_score, spaces_decoder
from ...text.tokenizer.settings import SPACE
from ...text.tokenizer.turn_ends import turn_ends
from .encoder_tokenizers import unigram, wordpiece, wordpiece_ids
from .file import GGUF, NAMED_TOKENS

if TYPE_CHECKING:
    import tokenizers

_log = logging.getLogger("minillm")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""`tokenizer.ggml.token_type`"""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _SYMBOLS
_SEED = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _SYMBOLS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_CASED = """
41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c 38e-3a1 3a3-3f5
3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15
1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3
1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139
213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787
a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2
118a0-118df 1e900-1e943
"""
"""Letters with case, as DeepSeek's first tokenizer lists them"""
_CASED_CLASS = "".join(rf"\x{{{ends.replace('-', '}-' + chr(92) + 'x{')}}}" for ends in _CASED.split())
_HAN = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK_SIGNS = r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+"
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
    Rules((_GPT2,)): """gpt-2 phi-2 jina-es jina-de mpt olmo jais trillion granite-docling gigachat mellum modern-bert
    jina-v2-es jina-v2-de a.x-4.0 exaone4""",
    _DIGITS: "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    Rules((_LLAMA3,), whole=True, begins=True): """llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2
    jina-v5-nano""",
    Rules((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe glm4",
    Rules((_QWEN2,), nfc=True): "qwen2",
    Rules((_QWEN2,)): "deepseek-r1-qwen stablelm2 kormo f2llmv2 megrez hunyuan solar-open grok-2",
    Rules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
    Rules((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): "falcon",
    Rules((r" ?[^(\s|.,!?…。，、।۔،)]+",)): "bloom gpt3-finnish poro-chat",
    Rules((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")): "viking",
    Rules((_CAMEL % ("", "") + r"\p{N}|" + _PATHS,), whole=True, begins=True): "tekken",
    Rules((_CAMEL % ((_ENDINGS + "?",) * 2) + r"\p{N}{1,3}|" + _PATHS,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    Rules((r"[\r\n]", rf"\s?[{_CASED_CLASS}]+", _DEEPSEEK_SIGNS, r"\s+$", _HAN, r"\p{N}+")): "deepseek-llm",
    Rules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")): "deepseek-coder",
    Rules((_SEED,)): "seed-coder",
    Rules((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), whole=True): "minicpm5",
}
RULES = {name: rules for rules, names in _BY_RULES.items() for name in names.split()}
"""`tokenizer.ggml.pre` -> its rules"""

DEFAULT = "default"
"""The rules of a file that names none, as in llama.cpp"""


_HONOURED = """
model pre tokens token_type scores merges add_bos_token add_eos_token add_space_prefix suppress_tokens
bos_token_id eos_token_id eot_token_id eom_token_id unknown_token_id padding_token_id
"""
_WITHOUT_EFFECT = """
token_type_count add_sep_token remove_extra_whitespaces precompiled_charsmap
seperator_token_id cls_token_id mask_token_id
fim_pre_token_id fim_suf_token_id fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id
prefix_token_id suffix_token_id middle_token_id
"""
_KEYS = frozenset(f"tokenizer.ggml.{name}" for name in (_HONOURED + _WITHOUT_EFFECT).split())
"""The entries that are read, and those without effect on the kinds of tokenizers that are read: names of tokens of no
use here, and what llama.cpp reads for pairs of texts, and for Unigram and WordPiece models"""
_SWITCHES = frozenset(f"tokenizer.ggml.{name}" for name in ("normalizer.lowercase", "normalizer.strip_accents"))
"""Entries that change something where they are true"""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a file."""

    where: str
    """The file, for error messages"""
    tokens: Sequence[str]
    types: NDArray[Any]

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids of all tokens."""
        return {token: i for i, token in enumerate(self.tokens)}

    def of(self, *types: int, among: Iterable[int] | None = None) -> list[int]:
        """The ids of tokens of these types, in order; of all, or of those `among` them."""
        if among is not None:
            return [i for i in sorted(among) if self.types[i] in types]
        ids: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return ids


def read_tokenizer(gguf: GGUF, model_vocab_size: int = 0) -> Tokenizer | None:
    """The tokenizer of a file; None if there is none. `model_vocab_size` is as of `Tokenizer`.

    Raises:
        CheckpointError, UnsupportedModelError: as `read_backend`.
    """
    kind = _kind(gguf)
    if kind is None:
        return None
    backend, role_ids, ends = call(str(gguf.path), _read, gguf, kind, at_once=kind != "llama")
    tokenizer = Tokenizer(backend, role_ids, model_vocab_size)
    tokenizer.end_ids = tuple(ends)
    if isinstance(backend, PartialTokenizer):  # which need not list all tokens for it
        tokenizer.vocab_size, tokenizer.longest_token = len(backend.names), backend.names.longest
    return tokenizer


def read_backend(gguf: GGUF) -> "tuple[tokenizers.Tokenizer, dict[str, int], list[int]] | None":
    """The tokenizer, the ids of its "bos_token" and so on, and the ids that end a text or a turn; None without one.

    Raises:
        CheckpointError: the metadata contradict each other or are of the wrong type.
        UnsupportedModelError: another kind of tokenizer, or unknown rules.
    """
    kind = _kind(gguf)
    return None if kind is None else call(str(gguf.path), _read, gguf, kind, at_once=True)


def _kind(gguf: GGUF) -> str | None:
    """The kind of the tokenizer; None without one."""
    kind: str | None = gguf.get("tokenizer.ggml.model", str)
    if kind is None or kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama", "gemma4", "bert", "t5"):
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.model is {kind!r:.60}; minillm runs 'gpt2' (byte-level BPE), 'llama' "
            "(SentencePiece), 'gemma4', 'bert' (WordPiece) and 't5' (Unigram); tokenizer= names another tokenizer"
        )
    _warn_of_other_keys(gguf, kind)
    return kind


def _warn_of_other_keys(gguf: GGUF, kind: str) -> None:
    """Name the entries that are not known, and change nothing."""
    if kind == "bert":
        return  # whose switches are read, or are always on
    others = {key for key in gguf.metadata if key.startswith("tokenizer.ggml.")} - _KEYS
    named = sorted(key for key in others if key not in _SWITCHES or gguf.metadata[key])
    if named:
        _log.warning("%s: not read: %s", gguf.path, listed(named))


def _read(gguf: GGUF, kind: str, *, at_once: bool) -> "tuple[Any, dict[str, int], list[int]]":
    """As `read_backend`; not `at_once` gives a `PartialTokenizer`, if hashes of the tokens tell them apart."""
    names = None if at_once else gguf.names("tokenizer.ggml.tokens")
    vocabulary = _vocabulary(gguf, names)
    ids = _role_ids(gguf, kind, len(vocabulary.tokens))
    if kind == "bert":
        ids = ids | wordpiece_ids(gguf, len(vocabulary.tokens))
    special = sorted({*vocabulary.of(UNKNOWN, CONTROL), *ids.values()} - set(vocabulary.of(BYTE)))
    others = [i for i in vocabulary.of(USER_DEFINED) if i not in ids.values()]

    def build(chosen: list[int] | None) -> "tokenizers.Tokenizer":
        """The tokenizer of these tokens, single bytes and special tokens; None: of all."""
        from tokenizers import AddedToken

        if kind == "gpt2":
            backend, begins = _byte_level(gguf, vocabulary)
        elif kind == "bert":
            backend, begins = wordpiece(gguf, vocabulary.tokens, ids), False
        elif kind == "t5":
            scores = gguf.numbers("tokenizer.ggml.scores")
            backend, begins = unigram(gguf, vocabulary.tokens, scores, ids.get("unk_token", 0)), False
        elif kind == "gemma4":
            backend, begins = _merged_pieces(gguf, vocabulary), True
        else:
            always = [*special, *vocabulary.of(BYTE)]
            backend, begins = _sentencepiece(gguf, vocabulary, None if chosen is None else {*chosen, *always}), True
        named = (AddedToken(vocabulary.tokens[i], normalized=False, special=True) for i in special)
        backend.add_special_tokens(list(named))
        added = others if chosen is None else sorted({*others}.intersection(chosen))
        backend.add_tokens([AddedToken(vocabulary.tokens[i], normalized=False, special=False) for i in added])
        if kind == "bert":
            return backend  # with tokens around a text
        settings = {
            "add_bos_token": kind == "gemma4" or gguf.get("tokenizer.ggml.add_bos_token", bool, begins),
            "add_eos_token": gguf.get("tokenizer.ggml.add_eos_token", bool, False),
        }
        frame(backend, vocabulary.where, ids, settings, "its metadata name none")
        return backend

    ends = turn_ends({vocabulary.tokens[i]: i for i in special})
    named = [ids[name] for name in ("eos_token", "eot_token", "eom_token") if name in ids]
    backend = build(None) if names is None else PartialTokenizer(names, build, others)
    return backend, ids, list(dict.fromkeys(named + ends))


def _vocabulary(gguf: GGUF, names: Names | None) -> Vocabulary:
    """The tokens, as `names` if they have been read so."""
    tokens = gguf.strings("tokenizer.ggml.tokens") if names is None else names
    if not tokens:
        raise CheckpointError(f"{gguf.path} has a tokenizer without tokens: tokenizer.ggml.tokens is missing")
    if names is None and "" in tokens:
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if names is None and len(set(tokens)) < len(tokens):
        [(twice, _)] = Counter(tokens).most_common(1)
        raise CheckpointError(f"{gguf.path}: tokenizer.ggml.tokens has the token {twice!r:.60} twice")
    types = gguf.numbers("tokenizer.ggml.token_type")
    if types is not None and len(types) != len(tokens):
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.token_type should have {len(tokens)} numbers, found {len(types)}"
        )
    return Vocabulary(str(gguf.path), tokens, np.full(len(tokens), NORMAL) if types is None else types)


def _role_ids(gguf: GGUF, kind: str, count: int) -> dict[str, int]:
    """Ids of named tokens, of `count` that there are.

    SentencePiece's own ids stand for those that the file does not name, or names wrongly, as in llama.cpp.
    """
    usual = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    ids = gguf.token_ids(count)
    stored = {name: gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in NAMED_TOKENS}
    if wrong := [f"{name}_token_id {i}" for name, i in stored.items() if i is not None and name not in ids]:
        _log.warning("%s: not among its %d tokens, and left out: %s", gguf.path, count, ", ".join(wrong))
    short = {"unknown": "unk", "padding": "pad"}
    return {f"{short.get(name, name)}_token": i for name, i in (usual | ids).items() if i < count}


def _byte_level(gguf: GGUF, vocabulary: Vocabulary) -> "tuple[tokenizers.Tokenizer, bool]":
    """A byte-level BPE tokenizer, and whether its texts begin with BOS."""
    from tokenizers import decoders

    name = gguf.get("tokenizer.ggml.pre", str)
    if name is None:
        _log.warning(
            "%s does not say how a text is split (tokenizer.ggml.pre): read as 'default', as llama.cpp does; "
            "tokens may differ from those of training",
            gguf.path,
        )
        name = DEFAULT
    if name not in RULES:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.pre is {name!r:.60}; minillm has the rules of "
            f"{', '.join(sorted(RULES))}; tokenizer= names another tokenizer"
        )
    vocab = vocabulary.ids
    lacking = sum(symbol not in vocab for symbol in BYTE_SYMBOLS)
    if lacking == len(BYTE_SYMBOLS):
        raise CheckpointError(f"{gguf.path}: tokenizer.ggml.tokens has none of the 256 symbols of bytes")
    backend = _of_merges(gguf, vocab, "byte-level BPE", "bytes")
    backend.decoder = decoders.ByteLevel()
    split_by(backend, gguf, byte_level=True)
    return backend, RULES[name].begins


def _of_merges(gguf: GGUF, vocab: dict[str, int], kind: str, parts: str, **options: Any) -> "tokenizers.Tokenizer":
    """A BPE tokenizer of the file's merges.

    Raises:
        CheckpointError: there are none, or one does not make a token.
    """
    from tokenizers import Tokenizer, models

    listed = gguf.strings("tokenizer.ggml.merges")
    if listed is None:
        raise CheckpointError(
            f"{gguf.path} has a {kind} tokenizer without merges: tokenizer.ggml.merges is missing, and "
            f"without it every text falls into single {parts}: convert the model again, or name another tokenizer "
            "(tokenizer=)"
        )
    merges: list[Any] = list(map(tuple, (merge.split(" ", 1) for merge in listed)))
    for number, merge in enumerate(listed):
        if merge[:1] == " " or " " not in merge:
            merges[number] = _after_a_space(merge)
    try:
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception:  # the library's own kind
        unmade = (i for i, (a, b) in enumerate(merges) if not {a, b, a + b} <= vocab.keys())
        if (i := next(unmade, None)) is None:
            raise
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.merges, {i}: {listed[i]!r:.60} does not make a token"
        ) from None


def _merged_pieces(gguf: GGUF, vocabulary: Vocabulary) -> "tokenizers.Tokenizer":
    """Gemma 4's tokenizer: SentencePiece's pieces with merges; runs of newlines stand apart, as in llama.cpp."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    unknown = next((vocabulary.tokens[i] for i in vocabulary.of(UNKNOWN)), None)
    byte_fallback = bool(vocabulary.of(BYTE))
    options: dict[str, Any] = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": byte_fallback}
    backend = _of_merges(gguf, vocabulary.ids, "BPE", "letters", **options)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("\\n+"), "isolated")
    backend.decoder = spaces_decoder(byte_fallback, leading_space=False)
    return backend


def _after_a_space(merge: str) -> tuple[str, str]:
    """The parts of a merge whose first token begins with a space, or which has no second one."""
    head, _, right = merge[1:].partition(" ")
    return merge[:1] + head, right


def split_by(backend: "tokenizers.Tokenizer", gguf: GGUF, *, byte_level: bool) -> None:
    """Set what is done to a text before merging, by `tokenizer.ggml.pre` or `tokenizer.ggml.add_space_prefix`."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if not byte_level:
        spaced = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
        steps: list[Any] = [normalizers.Prepend(SPACE)] if spaced else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        return
    rules = RULES[gguf.get("tokenizer.ggml.pre", str, DEFAULT)]
    backend.model.ignore_merges = rules.whole
    backend.normalizer = normalizers.NFC() if rules.nfc else None
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])


def _sentencepiece(gguf: GGUF, vocabulary: Vocabulary, chosen: set[int] | None) -> "tokenizers.Tokenizer":
    """A SentencePiece BPE tokenizer of the tokens `chosen`, with their ids; None: of all."""
    from tokenizers import Tokenizer, models

    tokens = vocabulary.tokens
    scores = gguf.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.scores should have {len(tokens)} numbers, found "
            f"{'none' if scores is None else len(scores)}"
        )
    mergeable = vocabulary.of(NORMAL, USER_DEFINED, UNUSED, among=chosen)
    unknown = next((tokens[i] for i in vocabulary.of(UNKNOWN)), None)
    byte_fallback = bool(vocabulary.of(BYTE))
    model = models.BPE(
        vocab=vocabulary.ids if chosen is None else {tokens[i]: i for i in chosen},
        merges=merges_by_score({tokens[i]: i for i in mergeable}, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    backend = Tokenizer(model)
    split_by(backend, gguf, byte_level=False)
    spaced = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
    backend.decoder = spaces_decoder(byte_fallback, leading_space=spaced)
    return backend
