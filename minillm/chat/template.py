"""A checkpoint's chat template, which formats a conversation as one text.

The text is the same as that of transformers' `apply_chat_template`. As there, special tokens spelled out in a message
become those tokens: check untrusted input for them first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, ParameterError, PromptError, listed, shown
from .messages import Messages, plain, read_messages, refuse_tools

if TYPE_CHECKING:
    from .sandbox import Compiled

_MARK = "MINILLM_CONTINUES_HERE "
"""Marker appended to a message to be continued. It ends in a space, which templates that trim messages remove."""

RENDER_ARGUMENTS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Arguments of `ChatTemplate.render` besides the messages"""

_OWN = {"messages", "add_generation_prompt"}


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template, compiled on first use."""

    source: str
    origin: str = "the chat template"
    """Its source, for error messages"""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of "bos_token", "eos_token" etc., available to the template"""

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation in the model's prompt format, special tokens spelled out.

        Args:
            messages: the conversation
            add_generation_prompt: end with the prefix of an answer; by default unless the last message is continued
            continue_final_message: leave the last message open, as if unfinished
            chat_template_kwargs: further variables for the template

        Raises:
            PromptError: the messages are malformed, or the template refuses or cannot write them.
            ParameterError: the arguments contradict each other, or the template does not use a variable.
            CheckpointError: the template is not valid Jinja, or violates the sandbox.
        """
        begins = _begins_answer(add_generation_prompt, continue_final_message)
        chat = read_messages(messages, self._compiled.names)
        if continue_final_message:
            _mark_end(chat[-1])
        given = self._checked({} if chat_template_kwargs is None else chat_template_kwargs)
        text = self._write({"messages": chat, "add_generation_prompt": begins, **given})
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def _compiled(self) -> "Compiled":
        from .sandbox import compile_template

        try:
            return compile_template(self.source)
        except Exception as error:  # Jinja's errors, and those of Python's compiler
            number = getattr(error, "lineno", None)
            line = "" if number is None else f", line {number}"
            raise CheckpointError(f"{self.origin}{line}: not a valid Jinja template: {_one_line(error)}") from error

    def _checked(self, variables: Any) -> dict[str, Any]:
        """The user's variables as plain values, all of which the template must use."""
        if not isinstance(variables, Mapping):
            raise ParameterError(f"chat_template_kwargs should be a dict of variables, found {shown(variables)}")
        refuse_tools(variables)
        for name in variables:
            if name in _OWN:
                raise ParameterError(f"{name} is an argument of its own, not a variable for the chat template")
            if name not in self._compiled.variables:
                known = listed(sorted(self._compiled.variables - _OWN - {"tools", "documents"})) or "none"
                raise ParameterError(f"the chat template does not use {shown(name)}; its variables: {known}")
        try:
            return {name: plain(value) for name, value in variables.items()}
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError(f"variables of a chat template should be plain values: {error!s:.100}") from None

    def _write(self, variables: Mapping[str, Any]) -> str:
        from jinja2.exceptions import SecurityError

        from .sandbox import Refused

        nothing = {"tools": None, "documents": None}
        try:
            return self._compiled.render(nothing | dict(self.special_tokens) | dict(variables))
        except Refused as refusal:
            raise PromptError(f"{self.origin} refuses the messages: {_one_line(refusal)}") from None
        except SecurityError as error:
            raise CheckpointError(f"{self.origin} does what a template may not: {_one_line(error)}") from error
        except Exception as error:  # a template is a program and may raise anything
            raise PromptError(f"{self.origin} cannot write these messages: {_one_line(error)}") from error


def _begins_answer(add_generation_prompt: object, continue_final_message: object) -> bool:
    """True if the text ends with the prefix of an answer."""
    if not isinstance(continue_final_message, bool):
        raise ParameterError(f"continue_final_message should be True or False, found {shown(continue_final_message)}")
    if add_generation_prompt is None:
        return not continue_final_message
    if not isinstance(add_generation_prompt, bool):
        raise ParameterError(f"add_generation_prompt should be True or False, found {shown(add_generation_prompt)}")
    if add_generation_prompt and continue_final_message:
        raise ParameterError(
            "add_generation_prompt begins a new message, continue_final_message goes on with the last one: "
            "leave one of them out"
        )
    return add_generation_prompt


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= 300 else line[:300] + " ..."


def _mark_end(message: dict[str, Any]) -> None:
    """Append the mark to the message's text, or to its last part."""
    if isinstance(message["content"], str):
        message["content"] += _MARK
    elif message["content"]:
        message["content"][-1]["text"] += _MARK


def _cut_at_mark(text: str) -> str:
    """The text before the mark, stripped at the end if the template trims messages."""
    found = text.count(_MARK.rstrip())
    if found != 1:
        how = "leaves out the end of the last message" if found == 0 else "writes the last message more than once"
        raise PromptError(f"the chat template {how}: it cannot be continued")
    end = text.index(_MARK.rstrip())
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()
