r"""Reasoning in a model's text: the thoughts before an answer, in the formats of published models.

    think       <think> ... </think>                                   Qwen3, DeepSeek-R1, GLM-4.5, SmolLM3 and others
    mistral     [THINK] ... [/THINK]                                   Magistral
    seed        <seed:think> ... </seed:think>                         Seed-OSS
    cohere      <|START_THINKING|> ... <|END_THINKING|>                Command A Reasoning; the answer has markers, too
    granite     Here is my thought process: ... Here is my response:   Granite 3.2
    harmony     <|channel|>analysis<|message|> ... <|end|>             gpt-oss; the answer is in the channel "final"

A template may open the section at the end of the prompt; then the text begins within it. Otherwise a section counts at
the beginning of the text alone: a marker that a model writes in the midst of an answer is part of the answer. White
space around thoughts, and before the answer, belongs to neither.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..tokenizer import Tokenizer
from .calls import AddedTokens, ContentDelta, ReasoningDelta


@dataclass(frozen=True)
class ReasoningFormat:
    """The form in which a family of models writes thoughts."""

    name: str
    begin: str
    """The marker before thoughts"""
    end: str
    """The marker after them"""
    answers: tuple[str, ...] = ()
    """Texts that may stand before the answer, and mean nothing"""
    after_answer: str = ""
    """A marker that may stand after the answer"""
    sign: str = ""
    """A text by which a template's format is known; by default the end marker"""

    def hidden_by(self, tokenizer: AddedTokens | None) -> bool:
        """True if some of its markers are special tokens, which decoded text leaves out."""
        markers = "".join((self.begin, self.end, *self.answers, self.after_answer))
        special = () if tokenizer is None else tokenizer.added_ids.items()
        return any(token in markers and i in tokenizer.special_ids for token, i in special)  # type: ignore[union-attr]

    def opened_by(self, prompt: str) -> bool:
        """True if a prompt ends within thoughts that it begins."""
        return prompt.rstrip().endswith(self.begin)

    def parser(self, *, opened: bool = False) -> "ReasoningParser":
        """A parser of one text. `opened`: the prompt has begun the thoughts."""
        return ReasoningParser(self, opened=opened)


_FINAL = "<|channel|>final<|message|>"
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    form.name: form
    for form in (
        ReasoningFormat(
            "harmony",
            "<|channel|>analysis<|message|>",
            "<|end|>",
            (f"<|start|>assistant{_FINAL}", _FINAL),
            sign="<|channel|>analysis",
        ),
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat(
            "cohere", "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>",), "<|END_RESPONSE|>"
        ),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}
"""Formats by name"""


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """The format of the thoughts that a chat template writes or removes; None if it has none."""
    return next((form for form in REASONING_FORMATS.values() if (form.sign or form.end) in template), None)


Deltas = list[ReasoningDelta | ContentDelta]


class ReasoningParser:
    """Tells thoughts from the answer in a text that comes in pieces. The sum of its deltas does not depend on them."""

    def __init__(self, form: ReasoningFormat, *, opened: bool = False) -> None:
        """`opened`: the prompt has begun the thoughts."""
        self._form = form
        self._state: Callable[[], Deltas] = self._thoughts if opened else self._start
        self._pending = ""
        """Text that no state has used yet"""
        self._written = False
        """Some of the thoughts are passed on"""

    @property
    def thinking(self) -> bool:
        """True from the begin marker to the end marker."""
        return self._state == self._thoughts

    @property
    def answering(self) -> bool:
        """True once the text can have no more thoughts."""
        return self._state == self._answer

    def push(self, text: str) -> Deltas:
        """Add text; returns what is new."""
        self._pending += text
        deltas: Deltas = []
        state: Callable[[], Deltas] | None = None
        while self._pending and self._state != state:  # a state that stays waits for more text
            state = self._state
            deltas += state()
        return deltas

    def finish(self, *, cut: bool = False) -> Deltas:
        """End the text; returns what was held back.

        `cut`: it does not end by itself, so that what may be the beginning of a marker is one.
        """
        rest, self._pending = self._pending, ""
        if self._state == self._thoughts:
            waiting = _beginning_of(self._form.end, rest) if cut else 0
            return self._thought(rest[: len(rest) - waiting].rstrip())
        if self._state == self._start and rest.strip() and not cut:
            return [ContentDelta(rest)]
        if self._state == self._answer and rest:
            return [ContentDelta(rest)]
        return []

    def _start(self) -> Deltas:
        """Before anything but white space."""
        text = self._pending.lstrip()
        for marker, state in (
            (self._form.begin, self._thoughts),
            *((lead, self._answer) for lead in self._form.answers),
        ):
            if text.startswith(marker):
                self._pending, self._state = text[len(marker) :], state
                return []
        if any(marker.startswith(text) for marker in (self._form.begin, *self._form.answers)):
            return []  # more may come of it
        self._state = self._answer
        return []

    def _thoughts(self) -> Deltas:
        thoughts, marker, rest = self._pending.partition(self._form.end)
        if marker:
            self._pending, self._state = rest, self._between
            return self._thought(thoughts.rstrip())
        waiting = max(_beginning_of(self._form.end, thoughts), len(thoughts) - len(thoughts.rstrip()))
        if waiting:  # white space before what may be a marker may be the thoughts' last
            waiting = len(thoughts) - len(thoughts[: len(thoughts) - waiting].rstrip())
        self._pending = thoughts[len(thoughts) - waiting :]
        return self._thought(thoughts[: len(thoughts) - waiting])

    def _thought(self, text: str) -> Deltas:
        text = text if self._written else text.lstrip()
        self._written = self._written or bool(text)
        return [ReasoningDelta(text)] if text else []

    def _between(self) -> Deltas:
        """After the thoughts, before anything of the answer."""
        self._pending = text = self._pending.lstrip()
        for lead in self._form.answers:
            if text.startswith(lead):
                self._pending, self._state = text[len(lead) :], self._answer
                return []
        if not text or any(lead.startswith(text) for lead in self._form.answers):
            return []
        self._state = self._answer
        return []

    def _answer(self) -> Deltas:
        text, end = self._pending, self._form.after_answer
        waiting = 0
        if end:
            text, marker, _ = text.partition(end)
            waiting = 0 if marker else _beginning_of(end, text)
        self._pending = text[len(text) - waiting :]
        text = text[: len(text) - waiting]
        return [ContentDelta(text)] if text else []


def _beginning_of(marker: str, text: str) -> int:
    """Length of the longest end of a text with which a marker begins."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def split_reasoning(text: str, form: ReasoningFormat, *, opened: bool = False, cut: bool = False) -> tuple[str, str]:
    """Thoughts and answer of a finished text.

    Args:
        text: the model's
        form: the format of its thoughts
        opened: the prompt has begun them
        cut: the text does not end by itself
    """
    parser = form.parser(opened=opened)
    deltas = [*parser.push(text), *parser.finish(cut=cut)]
    return _joined(deltas, ReasoningDelta), _joined(deltas, ContentDelta)


def _joined(deltas: Iterable[ReasoningDelta | ContentDelta], kind: type) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))


@dataclass(frozen=True)
class Thoughts:
    """How the answer to a conversation tells its thoughts."""

    form: ReasoningFormat
    opened: bool
    """The prompt has begun them"""

    def markers(self, tokenizer: Tokenizer) -> tuple[int, tuple[int, ...]] | None:
        """The token of the begin marker, and those of what is last before the answer; None unless these are tokens.

        Markers that are plain text may come in any tokens: what begins after them could be missed.
        """
        form, ids = self.form, tokenizer.added_ids
        begin, end = (
            tokenizer.encode(marker, add_special_tokens=False)
            for marker in (form.begin, form.answers[-1] if form.answers else form.end)
        )
        return (begin[0], tuple(end)) if begin and end and {begin[0], end[-1]} <= {*ids.values()} else None

    def parser(self) -> ReasoningParser:
        """A parser of one text."""
        return self.form.parser(opened=self.opened)

    def split(self, text: str, *, cut: bool) -> tuple[str, str]:
        """Thoughts and answer of a finished text. `cut`: it does not end by itself."""
        return split_reasoning(text, self.form, opened=self.opened, cut=cut)
