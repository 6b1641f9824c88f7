r"""A parser of gpt-oss's harmony: an answer is a sequence of messages, of which some are calls.

    <|channel|>analysis<|message|> ... <|end|>                                                       thoughts
    <|start|>assistant<|channel|>commentary<|message|> ... <|end|>                                   content
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>           the same
    <|start|>assistant<|channel|>final<|message|> ... <|return|>                                     content

The prompt ends with `<|start|>assistant`, so that the first message begins after it; a text that begins with none of
the markers is content, the marker before which has been read. A message to another recipient than a function, such as a
tool that gpt-oss was trained with, is a call of that name.

Source: https://github.com/openai/harmony (`docs/format.md`), and the template in gpt-oss's checkpoints.
"""

import re
from collections.abc import Callable

from .calls import AnswerDelta, ArgumentsDelta, CallBegin, CallFormat, ContentDelta, ReasoningDelta

MESSAGE = "<|message|>"
"""The marker between the head of a message and its text"""
HEADS = ("<|start|>", "<|channel|>", "to=")
"""Texts with which the head of a message may begin"""
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
"""Ends of a message: its own marker, or the beginning of the next one"""
FUNCTIONS = "functions."
"""Namespace of the functions that a request offers"""
LONGEST_HEAD = 1000
"""Characters beyond which a text that begins as a head does is none"""

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """Reads thoughts, content and calls from a text that comes in pieces; the interface is `CallParser`'s.

    The sum of its deltas does not depend on the pieces. Messages of thoughts, and those of content, are joined by empty
    lines.
    """

    done: bool = False
    """True once nothing that follows can matter: one call was wanted and is complete"""

    def __init__(self, form: CallFormat, *, single: bool = False) -> None:
        """`single`: report one call at most, and nothing after it."""
        self._form, self._single = form, single
        self._state: Callable[[], bool] = self._start
        self._pending = ""  # text that no state has used yet
        self._deltas: list[AnswerDelta] = []
        self._calls = 0
        self._name = ""  # of the call at hand; "" if the message is none
        self._begun = False  # the call at hand is reported
        self._thinks = False  # the message at hand has thoughts
        self._fresh = True  # nothing of the message at hand is passed on
        self._written = {ReasoningDelta: False, ContentDelta: False}  # some of these is passed on

    @property
    def called(self) -> bool:
        """True once a call has begun."""
        return self._calls > 0

    def begin_thoughts(self) -> None:
        """Read the text as thoughts at first: the prompt has begun them."""
        self._thinks, self._state = True, self._text

    def push(self, text: str) -> list[AnswerDelta]:
        """Add text; returns what is new."""
        self._pending += text
        while self._pending and not self.done and self._state():
            pass
        return self._taken()

    def finish(self, *, cut: bool = False) -> list[AnswerDelta]:
        """End the text; returns what was held back: the end of a message's text, but for the beginning of a marker.

        Args:
            cut: the text does not end by itself
        """
        if not self.done and self._pending:
            if self._state == self._text:
                waiting = max(_begun(self._pending, end) for end in ENDS) if cut or self._name else 0
                self._pass_on(self._pending[: len(self._pending) - waiting])
            elif self._state == self._start and not cut and not any(mark in self._pending for mark in HEADS):
                self._pass_on(self._pending)
        if self._state == self._text and self._name and not cut and not self.done:
            self._end_call()
        self._pending, self.done = "", True
        return self._taken()

    def _taken(self) -> list[AnswerDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # --- states: each uses some of the pending text; False if it needs more -------------------------------------------

    def _start(self) -> bool:
        """The beginning of an answer: a head, or content."""
        text = self._pending.lstrip()
        if text.startswith(HEADS):
            self._pending, self._state = text, self._head
            return True
        if not text or any(mark.startswith(text) for mark in HEADS):
            return False
        self._state = self._text
        return True

    def _between(self) -> bool:
        """After a message: a head; what does not begin as one is content."""
        self._pending = self._pending.lstrip()
        return bool(self._pending) and self._start()

    def _head(self) -> bool:
        """The head of a message, up to its text: who it is for, and its channel."""
        head, marker, rest = self._pending.partition(MESSAGE)
        if not marker and len(head) > LONGEST_HEAD:
            self._name, self._thinks, self._fresh, self._state = "", False, True, self._text
            return True
        if not marker:
            return False
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        self._name = "" if recipient is None else recipient[1].removeprefix(FUNCTIONS)
        self._thinks = not self._name and channel is not None and channel[1] == "analysis"
        self._begun, self._fresh = False, True
        self._pending, self._state = rest, self._text
        return bool(rest)

    def _text(self) -> bool:
        """The text of a message, up to the marker after it."""
        text = self._pending
        at, end = min(((at, end) for end in ENDS if (at := text.find(end)) >= 0), default=(-1, ""))
        if at < 0:
            free = len(text) - max(_begun(text, marker) for marker in ENDS)
            self._pass_on(text[:free])
            self._pending = text[free:]
            return False
        self._pass_on(text[:at])
        self._pending = text[at:] if end == HEADS[0] else text[at + len(end) :]
        if self._name:
            self._end_call()
        self._name, self._thinks, self._fresh, self._state = "", False, True, self._between
        return True

    # --- the message at hand ------------------------------------------------------------------------------------------

    def _pass_on(self, text: str) -> None:
        """Report some of the message's text."""
        if self._name:
            text = text if self._begun else text.lstrip()
            if text and not self._begun:
                self._begin_call()
            if text:
                self._deltas.append(ArgumentsDelta(self._calls - 1, text))
        elif text:
            kind: type[ReasoningDelta | ContentDelta] = ReasoningDelta if self._thinks else ContentDelta
            apart = "\n\n" if self._written[kind] and self._fresh else ""
            self._deltas.append(kind(apart + text))
            self._written[kind], self._fresh = True, False

    def _begin_call(self) -> None:
        self._deltas.append(CallBegin(self._calls, self._form.new_id(), self._name))
        self._calls += 1
        self._begun = True

    def _end_call(self) -> None:
        """Complete the call; one whose message is empty has no arguments."""
        if not self._begun:
            self._begin_call()
            self._deltas.append(ArgumentsDelta(self._calls - 1, "{}"))
        self._name, self.done = "", self._single


def _begun(text: str, marker: str) -> int:
    """The number of characters at the end of a text that may be the beginning of a marker."""
    return next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))
