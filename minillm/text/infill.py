"""Prompts for the text between a prefix and a suffix ("fill in the middle", Bavarian et al., arXiv 2207.14255).

A model trained for it has tokens that mark the parts of a prompt; by these its form is known. Sources: the cards and
tokenizer files of the models that each form names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import PromptError


@dataclass(frozen=True)
class InfillForm:
    """The tokens with which a family of models marks what is before and after the text that it writes."""

    models: str
    prefix: str
    suffix: str
    middle: str
    """After all parts, where the model goes on"""
    ends: tuple[str, ...] = ()
    """Tokens that end the text, besides the model's own"""
    suffix_first: bool = False
    """True if the suffix comes first, and `middle` is not written"""
    file: str = ""
    """Before the name of each file, where other files may be given"""


FORMS = (
    InfillForm(
        "Qwen2.5-Coder, Qwen3-Coder, CodeGemma",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|im_end|>"),
        file="<|file_sep|>",
    ),
    InfillForm(
        "StarCoder, StarCoder2, Granite Code, SmolLM",
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<file_sep>", "<fim_pad>"),
        file="<file_sep>",
    ),
    InfillForm("SantaCoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    InfillForm(
        "DeepSeek-Coder, DeepSeek-Coder-V2",
        "<｜fim▁begin｜>",
        "<｜fim▁hole｜>",
        "<｜fim▁end｜>",
        ("<|EOT|>",),
    ),
    InfillForm("Code Llama", "▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    InfillForm("Codestral, Devstral", "[PREFIX]", "[SUFFIX]", "[MIDDLE]", suffix_first=True),
    InfillForm("GLM-4", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|endoftext|>", "<|user|>")),
)


class Vocabulary(Protocol):
    """The part of a tokenizer that matters here."""

    @property
    def added_ids(self) -> Mapping[str, int]: ...

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class InfillPrompt:
    """The prompt of a text between a prefix and a suffix, and what ends it."""

    token_ids: list[int]
    end_ids: list[int]
    """Tokens that end the text, besides the model's own"""


def infill_form(vocabulary: Vocabulary | None) -> InfillForm | None:
    """The form of a model's vocabulary; None if it has no such tokens."""
    added = {} if vocabulary is None else vocabulary.added_ids
    return next((form for form in FORMS if {form.prefix, form.suffix} <= added.keys()), None)


def infill_prompt(
    vocabulary: Vocabulary | None, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()
) -> InfillPrompt:
    """The prompt for the text between `prefix` and `suffix`.

    Args:
        vocabulary: the model's tokenizer
        prefix: the text before
        suffix: the text after
        files: names and texts of other files that matter, which come first

    Raises:
        PromptError: the model has no tokens for it.
    """
    form = infill_form(vocabulary)
    if vocabulary is None or form is None:
        known = "; ".join(known.models for known in FORMS)
        raise PromptError(f"this model inserts no text: its vocabulary should have the tokens of one of these: {known}")

    def part(marker: str, text: str) -> list[int]:
        return [vocabulary.added_ids[marker], *vocabulary.encode(text, add_special_tokens=False)]

    begin = [token for token in vocabulary.encode("")[:1] if token == vocabulary.bos_token_id]
    if form.file in vocabulary.added_ids:
        others = [token for name, text in files for token in part(form.file, f"{name}\n{text}\n")]
        others += part(form.file, "") if files else []
    else:
        others = vocabulary.encode("".join(f"{text}\n" for _, text in files), add_special_tokens=False) if files else []
    before, after = part(form.prefix, prefix), part(form.suffix, suffix)
    middle = [] if form.suffix_first else [vocabulary.added_ids[form.middle]]
    parts = after + before if form.suffix_first else before + after + middle
    ends = [vocabulary.added_ids[end] for end in form.ends if end in vocabulary.added_ids]
    return InfillPrompt(begin + others + parts, ends)
