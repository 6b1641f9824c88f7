"""A parser of whole answers: thoughts first, then content and tool calls."""

from collections.abc import Iterable

from .call_parser import CallParser
from .calls import Answer, AnswerDelta, ContentDelta, ReasoningDelta
from .harmony import HarmonyParser
from .reasoning import ReasoningParser


class AnswerParser:
    """Reads thoughts, content and calls from a text that comes in pieces. Calls within thoughts are thoughts."""

    def __init__(
        self, reasoning: ReasoningParser | None = None, calls: CallParser | HarmonyParser | None = None
    ) -> None:
        """Without a parser of thoughts there are none; without one of calls all of the answer is content.

        Harmony's reads all of an answer, whose messages may be thoughts again after others.
        """
        self._thinks, self._calls = reasoning is not None, calls
        self._reasoning = reasoning
        if isinstance(calls, HarmonyParser):
            self._reasoning = None
            if reasoning is not None and reasoning.thinking:
                calls.begin_thoughts()

    @property
    def called(self) -> bool:
        """True once a call has begun."""
        return self._calls is not None and self._calls.called

    @property
    def done(self) -> bool:
        """True once nothing that follows can matter: one call was wanted and is complete."""
        return self._calls is not None and self._calls.done

    def push(self, text: str) -> list[AnswerDelta]:
        """Add text; returns what is new."""
        if self._reasoning is not None:
            return self._read_calls(self._reasoning.push(text))
        return self._read_calls([ContentDelta(text)] if text else [])

    def finish(self, *, cut: bool = False) -> list[AnswerDelta]:
        """End the text; returns what was held back.

        `cut`: it does not end by itself, so that what may be the beginning of a marker is one.
        """
        deltas = [] if self._reasoning is None else self._read_calls(self._reasoning.finish(cut=cut))
        return deltas if self._calls is None else [*deltas, *self._apart(self._calls.finish(cut=cut))]

    def read(self, text: str, *, cut: bool = False) -> Answer:
        """A finished text."""
        answer = Answer()
        answer.add(self.push(text))
        answer.add(self.finish(cut=cut))
        return answer

    def _read_calls(self, deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
        calls = self._calls
        if calls is None:
            return [*deltas]
        read: list[AnswerDelta] = []
        for delta in deltas:
            read += self._apart(calls.push(delta.text)) if isinstance(delta, ContentDelta) else [delta]
        return read

    def _apart(self, deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
        """Deltas of the parser of calls, whose thoughts, harmony's, are content where none are told apart."""
        if self._thinks:
            return [*deltas]
        return [ContentDelta(delta.text) if isinstance(delta, ReasoningDelta) else delta for delta in deltas]
