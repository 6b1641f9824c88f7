"""The tokens by which Whisper is told what to write, and tells when it was said.

A decoder's text begins with <|startoftranscript|>, of a model of several languages a language and a task, and
<|notimestamps|> unless times are wanted. Which ids these are is in generation_config.json (`lang_to_id`, `task_to_id`,
`no_timestamps_token_id`), or follows from the tokenizer's names of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from ..errors import ParameterError, TaskError, listed, shown
from ..text.languages import CODES
from ..text.tokenizer import Tokenizer

TASKS = ("transcribe", "translate")
SECONDS_PER_POSITION = 0.02
"""From one token of a time to the next"""
SEVERAL_LANGUAGES = 51865
"""The smallest vocabulary of a model of several languages"""


@dataclass(frozen=True)
class SpeechTokens:
    """The ids of these tokens in a model's vocabulary."""

    start: int
    eos: int
    languages: Mapping[str, int]
    """By their codes; empty of a model of one language"""
    tasks: Mapping[str, int]
    no_timestamps: int | None
    """Tokens of times follow it; None: the model has none"""
    previous: int | None
    """Begins what was said before"""
    latest_start: int | None
    """As of `TimestampRules`"""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Layer and head of the cross-attention that follows the speech"""

    @classmethod
    def of(cls, config: ModelConfig, fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> "SpeechTokens":
        """The tokens of a checkpoint.

        Args:
            config: the model's configuration
            fields: of generation_config.json
            tokenizer: for the ids that this does not have

        Raises:
            TaskError: the model does not read sound, or the token that begins a transcript is not known.
        """
        if not config.frame_width:
            raise TaskError("this model does not read sound: transcribe with a model of the family whisper")
        start = config.decoder_start_token_id
        if start is None or not config.eos_token_ids:
            raise TaskError("config.json has no decoder_start_token_id or no eos_token_id: transcribing needs both")

        def named(name: str, text: str) -> int | None:
            value = fields.get(name)
            if isinstance(value, int):
                return value
            return None if tokenizer is None else tokenizer.token_id(text)

        by_name = fields.get("lang_to_id") or {}
        if not by_name and tokenizer is not None:
            ids = {code: tokenizer.token_id(f"<|{code}|>") for code in CODES.values()}
            by_name = {f"<|{code}|>": token for code, token in ids.items() if token is not None}
        several = fields.get("is_multilingual")
        if several is None:
            several = bool(fields.get("lang_to_id")) or config.vocab_size >= SEVERAL_LANGUAGES
        languages = {re.sub(r"[<|>]", "", name): int(token) for name, token in by_name.items()} if several else {}
        known = fields.get("task_to_id") or {}
        tasks = {
            task: known.get(task, None if tokenizer is None else tokenizer.token_id(f"<|{task}|>")) for task in TASKS
        }
        latest = fields.get("max_initial_timestamp_index")
        return cls(
            start,
            config.eos_token_ids[0],
            languages,
            {task: token for task, token in tasks.items() if token is not None} if several else {},
            named("no_timestamps_token_id", "<|notimestamps|>"),
            named("prev_sot_token_id", "<|startofprev|>"),
            latest if isinstance(latest, int) else None,
            tuple((int(layer), int(head)) for layer, head in fields.get("alignment_heads") or ()),
        )

    @property
    def first_timestamp(self) -> int:
        """The token of 0 seconds."""
        assert self.no_timestamps is not None
        return self.no_timestamps + 1

    def code(self, language: str) -> str:
        """The code of a language by its code or English name.

        Raises:
            ParameterError: the model does not know it, or knows one alone.
        """
        if not self.languages:
            raise ParameterError("language has no effect: the model knows one language; leave it out")
        name = language.lower() if isinstance(language, str) else ""
        code = CODES.get(name, name)
        if code not in self.languages:
            raise ParameterError(f"language {shown(language)} is not known: expected one of {listed(self.languages)}")
        return code

    def beginning(self, language: str | None, task: str, *, timestamps: bool) -> list[int]:
        """The tokens that the decoder's text begins with; `language` is a code, or None of a model of one language.

        Raises:
            ParameterError: there is no such task, or the model has no token for it.
        """
        if task not in TASKS:
            raise ParameterError(f"task should be one of {', '.join(TASKS)}, found {shown(task)}")
        ids = [self.start]
        if language is not None:
            if task not in self.tasks:
                raise ParameterError(f"the checkpoint has no token for the task {task}: no task_to_id, nor <|{task}|>")
            ids += [self.languages[language], self.tasks[task]]
        elif task != "transcribe":
            raise ParameterError(f"task {task} is not offered by a model of one language: leave it out")
        if timestamps and self.no_timestamps is None:
            raise ParameterError(
                "timestamps need a checkpoint with no_timestamps_token_id, or the token <|notimestamps|>"
            )
        return ids if timestamps or self.no_timestamps is None else [*ids, self.no_timestamps]
