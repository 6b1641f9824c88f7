"""A conversation with a model: its messages, which of them the model still sees, and its answers as they come."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PromptError, UsageError
from ..output_files import write_file

if TYPE_CHECKING:
    from ..decoding.event import Event
    from ..engine.engine import Engine
    from ..text.chat.reasoning import ReasoningParser

ANSWER_ROOM = 512
"""Tokens that are kept free for an answer, or a quarter of the context where that is less"""
RAW_TOKENS = 256
"""Default max_new_tokens without a chat template: raw text rarely ends by itself"""
LARGEST_FILE = 16 << 20
"""Bytes of a saved conversation that is read"""
WITH_CACHE = ".safetensors"
"""End of the name of a saved conversation with its keys and values"""
CONVERSATION = "minillm.conversation"
"""Name of the note that has the conversation in such a file"""


@dataclass
class Message:
    """One side's turn."""

    role: str
    content: str
    token_ids: list[int] = field(default_factory=list)
    """Raw text: the tokens that were typed or generated. A template writes a conversation anew each time"""
    reasoning: str = ""
    """The thoughts before an answer"""
    parser: "ReasoningParser | None" = field(default=None, repr=False, compare=False)
    """Reads an answer that may go on"""


class Thought(str):
    """A piece of a model's thoughts, not of its answer."""


class Conversation:
    """The messages of both sides. A model without a chat template continues them as raw text, a line each.

    When the context is full, the oldest exchanges fall out until half of it is free: the model sees the rest. Less each
    time would make it compute everything anew with each message.
    """

    def __init__(self, engine: "Engine", system: str | None = None, variables: Mapping[str, Any] | None = None) -> None:
        """Args:
        engine: best with `prefix_cache=True`, so that only what is new is computed
        system: the system message; needs a chat template
        variables: further variables for the template
        """
        self.engine = engine
        self.system = system
        self.variables = dict(variables or {})
        self.messages: list[Message] = []
        self.forgotten = 0
        """Messages at the beginning that the model no longer sees"""
        self.finish_reason: str | None = None
        """Why the last answer ended; "abort" if it was stopped"""
        self.prompt_tokens = 0
        """Tokens of the last answer's prompt"""
        self.computed_tokens = self.cached_tokens = 0
        """Tokens of the last answer's prompt that were computed, and that the cache held"""
        self.answer_tokens = 0
        self.used_tokens = 0
        """Tokens of the messages that the model sees"""
        self._opened = False
        """True if the last prompt ends within thoughts"""

    @property
    def raw(self) -> bool:
        """True if the model has no chat template."""
        return self.engine.chat_template is None

    # --- asking --------------------------------------------------------------------------------------------------

    def ask(self, text: str, fields: Mapping[str, Any]) -> Iterator[str]:
        """Add the user's message and generate the answer, in pieces. Stopped early, it stays as it is by then.

        Raises:
            PromptError: the message alone does not fit into the context, or the template refuses it. It is not added.
            MinillmError: the answer failed.
        """
        newline = "\n" if self.raw and self.messages else ""
        ids = self._encode(newline + text, begin=not self.messages) if self.raw else []
        self.messages.append(Message("user", text, ids))
        try:
            prompt = self._prompt(fields)
        except Exception:
            self.messages.pop()
            raise
        yield from self._answer(prompt, Message("assistant", ""), fields)

    def retry(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """Generate the last answer anew.

        Raises:
            UsageError: nothing was asked.
            MinillmError: the answer failed.
        """
        self._need_messages()
        if self.messages[-1].role == "assistant":
            self.messages.pop()
        yield from self._answer(self._prompt(fields), Message("assistant", ""), fields)

    def more(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """Continue the last answer where it ended.

        Raises:
            UsageError: there is no answer, or the model itself has ended it.
            PromptError: the context is full.
            MinillmError: the continuation failed.
        """
        if not self.messages or self.messages[-1].role != "assistant":
            raise UsageError("there is no answer to continue")
        if self.finish_reason == "stop":
            raise UsageError("the model has ended its answer: ask something")
        answer = self.messages.pop()
        try:
            prompt = self._prompt(fields) + answer.token_ids
        except Exception:
            self.messages.append(answer)
            raise
        yield from self._answer(prompt, answer, fields)

    def _answer(self, prompt: list[int], answer: Message, fields: Mapping[str, Any]) -> Iterator[str]:
        """Generate text that continues a prompt, and add it to the messages as `answer`."""
        limit: dict[str, Any] = {}
        if "max_new_tokens" not in fields and "max_length" not in fields:
            room = self.engine.context - len(prompt)
            limit = {"max_new_tokens": max(1, min(room, RAW_TOKENS) if self.raw else room)}
        template = self.engine.chat_template
        form = None if template is None else template.reasoning_format
        if form is not None and not answer.content:
            from ..text.chat.reasoning import Thoughts

            answer.parser = answer.parser or form.parser(opened=self._opened)
            limit["thoughts"] = Thoughts(form, answer.parser.thinking)
            if form.hidden_by(self.engine.tokenizer):
                limit["skip_special_tokens"] = fields.get("skip_special_tokens", False)
        defaults = None if self.raw else self.engine.chat_defaults
        stream = self.engine.stream(prompt, defaults=defaults, **{**fields, **limit})
        self.messages.append(answer)
        before, computed = len(answer.token_ids), self.engine.stats.prefill_tokens
        self.finish_reason, self.prompt_tokens, self.answer_tokens = "abort", len(prompt), 0
        self.cached_tokens = 0
        self.used_tokens = len(prompt)
        try:
            for event in stream:
                self.cached_tokens = event.cached_tokens
                answer.token_ids += event.token_ids
                pieces = _read(answer, event)
                self.answer_tokens = len(answer.token_ids) - before
                self.used_tokens = len(prompt) + self.answer_tokens
                self.finish_reason = event.finish_reason or "abort"
                yield from pieces
        finally:
            stream.close()
            self.computed_tokens = self.engine.stats.prefill_tokens - computed

    # --- what the model sees -------------------------------------------------------------------------------------

    def _prompt(self, fields: Mapping[str, Any]) -> list[int]:
        """The messages as token ids, without the oldest ones if all of them leave no room for an answer."""
        context = self.engine.context
        room = min(fields.get("max_new_tokens") or ANSWER_ROOM, ANSWER_ROOM, context // 4)
        longest, forgotten = context - room, self.forgotten
        while True:
            following = [i for i, message in enumerate(self.messages) if i > forgotten and message.role == "user"]
            try:
                ids = self._encode_all(self.messages[forgotten:])
            except _TooLongError:
                if not following:
                    raise
                ids = None
            if ids is not None and (len(ids) <= longest or (not following and len(ids) < context)):
                self.forgotten = forgotten  # only now: a message that is refused leaves all as it was
                return ids
            if not following:
                assert ids is not None
                added = "" if self.raw else ", with what the chat template adds"
                raise PromptError(f"the message has {len(ids)} tokens{added}; the context holds {context}")
            forgotten, longest = following[0], context // 2

    def _encode_all(self, messages: list[Message]) -> list[int]:
        if self.raw:
            return [token for message in messages for token in message.token_ids]
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        from ..text.chat.template import REASONING_KEYS

        template = self.engine.chat_template
        assert template is not None
        key = next((key for key in REASONING_KEYS if key in template.names), None)
        turns = [_as_dict(message, key) for message in messages]
        text = self.engine.render_chat(first + turns, chat_template_kwargs=self.variables)
        self._opened = template.reasoning_format is not None and template.reasoning_format.opened_by(text)
        return self._encode(text, begin=False)

    def _next_prefix(self) -> list[int]:
        """The tokens with which the prompt of any next message begins: templates write a last answer anew."""
        from ..batch import common_prefix

        seen = self.messages[self.forgotten :]
        if self.raw or seen[-1].role == "user":
            return self._encode_all(seen)
        first, second = (self._encode_all([*seen, Message("user", text)]) for text in ("a", "b"))
        return first[: common_prefix(first, second)]

    def _count(self) -> None:
        """Count the tokens in use, after the messages were changed by something else than an answer."""
        try:
            self.used_tokens = len(self._encode_all(self.messages[self.forgotten :])) if self.messages else 0
        except _TooLongError:  # the next message lets the oldest ones fall out
            self.used_tokens = self.engine.context

    def _encode(self, text: str, *, begin: bool) -> list[int]:
        from ..decoding.prompts import encode_text

        try:
            return encode_text(text, self.engine.tokenizer, self.engine.config, add_special_tokens=begin)
        except PromptError as error:
            raise _TooLongError(str(error)) from None

    # --- changing it ---------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything that was said; the system message stays."""
        self.messages.clear()
        self.forgotten = self.prompt_tokens = self.answer_tokens = self.used_tokens = 0
        self.finish_reason = None

    def undo(self) -> str:
        """Take back the last message and its answer. Returns the message.

        Raises:
            UsageError: nothing was asked.
        """
        self._need_messages()
        if self.messages[-1].role == "assistant":
            self.messages.pop()
        self.forgotten = min(self.forgotten, max(0, len(self.messages) - 1))
        undone = self.messages.pop().content
        self._count()
        return undone

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None removes it.

        Raises:
            UsageError: the model has no chat template.
            PromptError: its template refuses a system message. The one before stays.
        """
        if self.raw:
            raise UsageError("this model has no chat template, and so no system message")
        before, self.system = self.system, text
        try:
            self._encode_all(self.messages or [Message("user", "")])
        except PromptError:
            self.system = before
            raise

    def save(self, path: Path, lora: str | None = None) -> None:
        """Write the conversation to a JSON file; with its keys and values if the file is called *.safetensors.

        Args:
            path: of the file
            lora: name of the adapter that answers, if one does

        Raises:
            UsageError: it cannot be written; or nothing was said that has keys and values.
            MinillmError: as `Engine.save_prefix`.
        """
        messages = [_as_dict(message, "reasoning_content") for message in self.messages]
        saved: dict[str, Any] = {"system": self.system, "messages": messages}
        if path.suffix != WITH_CACHE:
            write_file(path, json.dumps(saved, ensure_ascii=False, indent=1) + "\n")
            return
        self._need_messages()
        saved["forgotten"], saved["token_ids"] = self.forgotten, [message.token_ids for message in self.messages]
        notes = {CONVERSATION: json.dumps(saved)}
        self.engine.save_prefix(path, self._next_prefix()[: self.engine.context - 1], lora=lora, notes=notes)

    def load(self, path: Path) -> None:
        """Replace the conversation by a file's, which `save` has written or which is a list of messages.

        Raises:
            UsageError: it cannot be read, or is no conversation. The one before stays.
            MinillmError: as `Engine.load_prefix`.
        """
        saved = self._read_with_cache(path) if path.suffix == WITH_CACHE else _read_json(path)
        entries: Any = saved.get("messages") if isinstance(saved, dict) else saved
        system = saved.get("system") if isinstance(saved, dict) else None
        if self.raw and isinstance(system, str) and system:
            raise UsageError(f"{path} has a system message, and this model has no chat template to say it with")
        if not _is_conversation(entries) or not isinstance(system, str | None):
            raise UsageError(
                f'{path}: expected {{"system": ..., "messages": [...]}} as /save writes it: a message of the user, '
                "then an answer, in turns"
            )
        messages = [
            Message(entry["role"], entry["content"], reasoning=entry.get("reasoning_content") or "")
            for entry in entries
        ]
        for i, message in enumerate(messages):
            text = f"\n{message.content}" if i and message.role == "user" else message.content
            message.token_ids = self._encode(text, begin=not i)
        forgotten = 0
        if path.suffix == WITH_CACHE:
            forgotten, ids = saved.get("forgotten"), saved.get("token_ids")
            if (
                not isinstance(forgotten, int)
                or not 0 <= forgotten <= len(messages)
                or not self._are_ids(ids, messages)
            ):
                raise UsageError(f"{path} has keys and values, and no conversation as /save writes it")
            for message, token_ids in zip(messages, ids, strict=True):
                message.token_ids = token_ids or message.token_ids  # none of a model with a chat template
        self.clear()
        self.messages, self.system, self.forgotten = messages, system, forgotten
        self._count()

    def _are_ids(self, saved: Any, messages: list[Message]) -> bool:
        """True for a list of token ids of each message."""
        V = self.engine.config.vocab_size
        return (
            isinstance(saved, list)
            and len(saved) == len(messages)
            and all(isinstance(ids, list) and all(type(i) is int and 0 <= i < V for i in ids) for ids in saved)
        )

    def _read_with_cache(self, path: Path) -> Any:
        """The conversation of a file with keys and values, which are in the cache then."""
        notes = self.engine.load_prefix(path).notes
        try:
            saved = json.loads(notes[CONVERSATION])
            if not isinstance(saved, dict):
                raise ValueError
        except (KeyError, ValueError, RecursionError):
            raise UsageError(
                f"{path} has the keys and values of a text, and no conversation: name a file of /save"
            ) from None
        return saved

    def _need_messages(self) -> None:
        if not self.messages:
            raise UsageError("nothing was said yet")


class _TooLongError(PromptError):
    """A text that has far more tokens than the context."""


def _read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    try:
        with path.open("rb") as file:
            return json.loads(file.read(LARGEST_FILE))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not a conversation in JSON, as /save writes it") from None


def _as_dict(message: Message, reasoning: str | None) -> dict[str, str]:
    """A message for a template or a file; `reasoning`: its key of thoughts, if it has one."""
    thoughts = {} if reasoning is None or not message.reasoning else {reasoning: message.reasoning}
    return {"role": message.role, "content": message.content} | thoughts


def _read(answer: Message, event: "Event") -> list[str]:
    """Add an event's text to an answer. Returns the pieces that are new, those of thoughts as `Thought`."""
    from ..text.chat.calls import ReasoningDelta

    if answer.parser is None:
        answer.content += event.text
        return [event.text]
    deltas = answer.parser.push(event.text)
    if event.finish_reason == "stop":
        deltas += answer.parser.finish()
    pieces = [Thought(delta.text) if isinstance(delta, ReasoningDelta) else delta.text for delta in deltas]
    for piece in pieces:
        if isinstance(piece, Thought):
            answer.reasoning += piece
        else:
            answer.content += piece
    return pieces or [""]


def _is_conversation(messages: Any) -> bool:
    """True for a list of the user's messages and answers in turns."""
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.get("role") == ("assistant" if i % 2 else "user")
        and isinstance(message.get("content"), str)
        and isinstance(message.get("reasoning_content"), str | None)
        for i, message in enumerate(messages)
    )
