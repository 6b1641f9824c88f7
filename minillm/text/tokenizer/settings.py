"""The settings beside a tokenizer's vocabulary: tokenizer_config.json and special_tokens_map.json.

`HONOURED` names the keys that have an effect here, `WITHOUT_EFFECT` those that can have none on token ids or text: they
are about padding, where the files came from, or tokenizers that transformers no longer runs. A warning names others.

Some settings change what tokenizer.json says (`adapt`), since the class in transformers 5 rebuilds that part from them:

| settings | classes | part of tokenizer.json |
|---|---|---|
| `do_lower_case`, `strip_accents`, `tokenize_chinese_chars` | BERT's | the normalizer, whatever the file has |
| `added_tokens_decoder`, where it is set | BERT's | the added tokens: those of the file are none |
| `cls_token`, `sep_token`, `unk_token` | BERT's | the tokens around a text and of unknown words (see wordpiece.py) |
| `add_prefix_space`, where it is set | byte-level, Llama's, XLM-RoBERTa's | the space before a text |

Of families whose class transformers ignores (`AS_WRITTEN`), and of its general class, the file is used as written.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ...files import read_optional_json

_log = logging.getLogger("minillm")

CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
SPACE = "▁"  # U+2581, SentencePiece's sign for a space

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens with a name of their own, in the order in which transformers adds them to a vocabulary"""
FURTHER = ("extra_special_tokens", "additional_special_tokens")
"""Keys of more special tokens; the second is the older name"""

_CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_HONOURED = """
added_tokens_decoder extra_special_tokens additional_special_tokens model_specific_special_tokens tokenizer_class
split_special_tokens add_bos_token add_eos_token add_prefix_space do_lower_case strip_accents tokenize_chinese_chars
legacy clean_up_tokenization_spaces chat_template truncation_side model_input_names model_max_length
src_lang extra_ids separate_vocabs
"""
HONOURED = frozenset(_HONOURED.split()) | {_CLEANS_BPE}
_WITHOUT_EFFECT = """
padding_side padding padding_strategy pad_to_multiple_of pad_token_type_id pad_token_id max_length max_len stride
truncation truncation_strategy return_token_type_ids
name_or_path special_tokens_map_file tokenizer_file vocab_file merges_file full_tokenizer_file fast_tokenizer_files
target_vocab_file auto_map processor_class backend is_local local_files_only from_slow use_fast tokenizer_type
transformers_version trust_remote_code init_inputs device_map revision cache_dir model_type architectures
files_loaded _commit_hash vocab_size
do_basic_tokenize never_split errors spaces_between_special_tokens sp_model_kwargs trim_offsets wordpieces_prefix
clean_text keep_accents remove_space unk_id use_default_system_prompt verbose deprecation_warnings
language_codes tgt_lang source_lang target_lang mask_token_sent legacy_behaviour num_madeup_words
response_template response_schema chat_control_tokens tool_parser_type
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
_USUAL: dict[str, Any] = {"offset": 103, "fix_mistral_regex": False, "split_by_punct": False, "vocab_type": "spm"}
"""Keys -> the value with which they say nothing new; with another one they are not run"""
_CASING = frozenset({"do_lower_case", "strip_accents", "tokenize_chinese_chars", "keep_accents", "remove_space"})
_CASED_ELSEWHERE = frozenset(
    {"AlbertTokenizer", "DebertaV2Tokenizer", "FNetTokenizer", "FunnelTokenizer", "RemBertTokenizer"}
    | {"RoFormerTokenizer", "SplinterTokenizer", "XLNetTokenizer"}
)
"""Classes in which these settings change the normalizer in a way of their own, which is not done here"""

BERT = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", "MPNetTokenizer")
"""Classes that build their normalizer from the settings"""
_PREFIXED = frozenset(
    {"GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "RobertaTokenizer", "BartTokenizer"}
    | {"LlamaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer"}
)
"""Classes that `add_prefix_space` changes"""
AS_WRITTEN = frozenset({"mistral", "mixtral", "olmo2", "granite", "phi3"})
"""Families whose tokenizer.json transformers runs by its general class, whatever `tokenizer_class` says"""


class Manner(NamedTuple):
    """Changes that the settings make after encoding and before decoding."""

    ends_embedded: bool = False
    """`add_eos_token` is set; for a tokenizer.json, which decides for prompts, it applies only to texts to embed"""
    cuts_left: bool = False
    """A text that is too long loses its beginning"""
    typed: bool = True
    """The model is told which of two texts a token belongs to"""
    cleaned: bool = False
    """Decoded text loses the spaces before punctuation"""


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a folder, as transformers merges its files.

    tokenizer_config.json is all there is if it has `added_tokens_decoder`, the newer layout; else what
    special_tokens_map.json says replaces its keys. The further special tokens are under `extra_special_tokens`.
    """
    settings = _named_anew(read_optional_json(folder / CONFIG))
    if settings.get("added_tokens_decoder") is None:
        older = read_optional_json(folder / SPECIAL)
        mine, theirs = (table.get(FURTHER[0]) for table in (settings, older))
        settings |= older
        if isinstance(theirs, list):  # special, all of them
            theirs = [token | {"special": True} if isinstance(token, dict) else token for token in theirs]
            known = mine if isinstance(mine, list) else []
            settings[FURTHER[0]] = [*known, *(token for token in theirs if token not in known)]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            settings[FURTHER[0]] = {**mine, **theirs}
        elif isinstance(mine, dict) and theirs is not None:
            settings["model_specific_special_tokens"] = mine
    return _named_anew(settings)


def _named_anew(settings: dict[str, Any]) -> dict[str, Any]:
    """The same with the older name of the further special tokens replaced, unless the newer one lists some.

    A table of them gives names to tokens, and leaves the list, or further names, to the older key.
    """
    further, older = settings.get(FURTHER[0]), settings.get(FURTHER[1])
    if older and not (further and isinstance(further, list)):
        settings[FURTHER[0]] = settings.pop(FURTHER[1])
        if isinstance(further, dict) and isinstance(older, dict):
            settings[FURTHER[0]] = older | further
        elif isinstance(further, dict):
            settings["model_specific_special_tokens"] = further
    return settings


def warn_unknown(folder: Path, kind: str) -> None:
    """Name the keys of the files that are neither honoured nor known to be without effect."""
    for name in (CONFIG, SPECIAL):
        unknown = [key for key, value in read_optional_json(folder / name).items() if not _is_known(key, value, kind)]
        if unknown:
            _log.warning(
                "%s: minillm does not know %s; tokens may differ from those of transformers",
                folder / name,
                ", ".join(f"{key:.60}" for key in unknown[:16]) + (" and more" if len(unknown) > 16 else ""),
            )


def _is_known(key: str, value: Any, kind: str) -> bool:
    if value is None or (key in _USUAL and value == _USUAL[key]):
        return True
    if key in _CASING and kind in _CASED_ELSEWHERE:
        return kind == "DebertaV2Tokenizer" and value is False
    named = key.endswith("_token") and isinstance(value, str | dict)
    return named or key.endswith("_token_id") or key in HONOURED or key in WITHOUT_EFFECT


def manner_of(settings: Mapping[str, Any], kind: str, *, of_words: bool, cut: Any = None) -> Manner:
    """Args:
    settings: as `read_settings` returns them
    kind: the tokenizer's class
    of_words: whether the vocabulary is of words or unigrams, not of a byte pair encoding, whose text keeps its spaces
    cut: `truncation` of tokenizer.json
    """
    side = settings.get("truncation_side") or (cut.get("direction") if isinstance(cut, Mapping) else None)
    if side is not None and str(side).lower() not in ("left", "right"):
        raise CheckpointError(f"{CONFIG}: truncation_side should be left or right, found {side!r:.60}")
    inputs = settings.get("model_input_names")
    typed = "token_type_ids" in inputs if isinstance(inputs, list) else kind != "TokenizersBackend"
    cleans = bool(settings.get("clean_up_tokenization_spaces"))
    return Manner(
        ends_embedded=bool(settings.get("add_eos_token")),
        cuts_left=str(side).lower() == "left",
        typed=typed,
        cleaned=cleans and (of_words or bool(settings.get(_CLEANS_BPE))),
    )


def bert_normalizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The normalizer of BERT's classes, as tokenizer.json writes it."""
    accents = settings.get("strip_accents")
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": bool(settings.get("tokenize_chinese_chars", True)),
        "strip_accents": None if accents is None else bool(accents),
        "lowercase": bool(settings.get("do_lower_case", True)),
    }


_PARTS = ("normalizer", "pre_tokenizer", "decoder")


def adapt(value: dict[str, Any], kind: str, family: str, settings: Mapping[str, Any]) -> bool:
    """Change a tokenizer.json by the settings that its class builds it from. Returns whether there was anything to."""
    if family in AS_WRITTEN:
        return False
    before = {part: value.get(part) for part in (*_PARTS, "added_tokens")}
    if kind in BERT and value["model"].get("type", "WordPiece") == "WordPiece":
        value["normalizer"] = bert_normalizer(settings)
        if settings.get("added_tokens_decoder") is not None:
            value["added_tokens"] = []
    prefix = settings.get("add_prefix_space")
    if prefix is not None and kind in _PREFIXED:
        value |= {part: _prefixed(value.get(part), part, bool(prefix)) for part in _PARTS}
    return any(value.get(part) != before[part] for part in before)


def _prefixed(part: Any, name: str, prefix: bool) -> Any:
    """A part of tokenizer.json, changed so that a text begins with a space or does not."""
    steps = list(_steps(part))
    kinds = [step.get("type") for step in steps]
    changed = [_with_space(step, name, prefix) for step in steps]
    if not prefix:
        changed = [step for step in changed if step.get("type") != "Prepend" and not _strips(step, name)]
    elif name == "normalizer" and "Prepend" not in kinds and any(map(_writes_spaces, steps)):
        changed.insert(0, {"type": "Prepend", "prepend": SPACE})
    elif name == "decoder" and any(map(_reads_spaces, steps)) and not any(_strips(step, name) for step in steps):
        changed.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if changed == steps:
        return part
    inside = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[name]
    return changed[0] if len(changed) == 1 else {"type": "Sequence", inside: changed} if changed else None


def _with_space(step: Mapping[str, Any], part: str, prefix: bool) -> Mapping[str, Any]:
    if step.get("type") == "ByteLevel" and part == "pre_tokenizer":
        return {**step, "add_prefix_space": prefix}
    if step.get("type") == "Metaspace":
        scheme = step.get("prepend_scheme", "always")
        chosen = "never" if not prefix else "first" if scheme == "never" else scheme
        return {**{key: field for key, field in step.items() if key != "add_prefix_space"}, "prepend_scheme": chosen}
    return step


def _strips(step: Mapping[str, Any], part: str) -> bool:
    """True of the step of a decoder that removes the space before a text."""
    return part == "decoder" and step.get("type") == "Strip" and step.get("content") == " " and bool(step.get("start"))


def _writes_spaces(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("content") == SPACE


def _reads_spaces(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("content") == " "


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Steps of a part, with sequences flattened."""
    inside = [part[name] for name in ("normalizers", "pretokenizers", "decoders") if name in (part or {})]
    if part is not None and not inside:
        yield part
    for steps in inside:
        for step in steps:
            yield from _steps(step)
