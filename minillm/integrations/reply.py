"""The answer to a conversation as other tools want it: thoughts, text and calls apart; and the fields of a request."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..cli.generate import limited
from ..decoding.event import Event
from ..engine.engine import Engine
from ..engine.results import Completion
from ..errors import ParameterError, PromptError, listed, shown
from ..tasks.late_interaction import Role, role_prompt
from ..text.chat import AnswerParser, call_grammar, parser_of
from ..text.chat.calls import Answer, AnswerDelta, CallFormat
from ..text.chat.reasoning import Thoughts

Message = Mapping[str, Any]
"""A message, or a tool, as OpenAI's API has it"""

SAMPLING = frozenset(("temperature", "top_p", "top_k", "min_p", "seed"))
"""Fields of which any asks for sampling"""


class Reply:
    """The answer to a conversation, generated while it is iterated over: new thoughts, text and calls.

    After that `answer` has them all, `completion` the tokens. Without a chat template the messages are one text, which
    is continued. Without a limit among the fields the answer ends where the model ends it, or with the context.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        choice: str = "auto",
        **fields: Any,
    ) -> None:
        """Begin the answer.

        Args:
            engine: to run
            messages: the conversation
            tools: those that may be called
            choice: "auto"; "none": no call; "required": nothing else; or the name of the tool to call
            **fields: generation fields

        Raises:
            MinillmError: as `Engine.stream_chat`; the model's calls are not read, or not held by a grammar.
        """
        self.answer, self.completion, self.event = Answer(), Completion(), Event(0, 0, "", ())
        tools = () if choice == "none" else tools
        template, fields = engine.chat_template, limited(engine, fields)
        if template is None and not tools:
            self._parser = AnswerParser()
            self._events = engine.stream("".join(message["content"] for message in messages), **fields)
            return
        form = template.call_format if tools and template is not None else None
        fields |= fields_of_calls(engine, form, tools, choice)
        self._parser = _parser(engine, messages, tools, form)
        self._events = engine.stream_chat(messages, tools=tools or None, **fields)

    def __iter__(self) -> Iterator[AnswerDelta]:
        """Yield what is new after each step.

        Raises:
            Exception: the error that ended the request.
        """
        for event in self._events:
            self.event = event
            self.completion.add(event)
            deltas = self._parser.push(event.text)
            self.answer.add(deltas)
            yield from deltas
        ended = self.completion.finish_reason == "stop" and not isinstance(self.completion.stop_reason, str)
        deltas = self._parser.finish(cut=not ended)
        self.answer.add(deltas)
        yield from deltas

    def close(self) -> None:
        """Abort the request, if it is not done."""
        self._events.close()


def sampling_fields(**fields: Any) -> dict[str, Any]:
    """The fields of a request from a tool's own, None where it says nothing: any of sampling asks for it.

    A temperature of 0 is greedy search, whatever the others say.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if given.get("temperature") == 0:
        return {name: value for name, value in given.items() if name not in SAMPLING} | {"do_sample": False}
    return given | ({"do_sample": True} if given.keys() & SAMPLING else {})


def embed(engine: Engine, texts: Sequence[str], role: Role) -> list[list[float]]:
    """The vectors of texts, [E] each, with the prompt that the checkpoint names for their role, if it does.

    Raises:
        PromptError: they are no list of texts.
    """
    members: list[Any] = [*texts] if isinstance(texts, Iterable) and not isinstance(texts, str) else [None]
    if not all(isinstance(text, str) for text in members):
        raise PromptError(f"expected a list of texts, found {shown(texts)}")
    if not members:
        return []
    prompt = role_prompt(engine.embedding_prompts, role) or None
    vectors: list[list[float]] = engine.embed(members, prompt=prompt, progress=False).tolist()
    return vectors


def fields_of_calls(
    engine: Engine, form: CallFormat | None, tools: Sequence[Message], choice: str = "auto"
) -> dict[str, Any]:
    """The fields that a request with tools needs: a grammar of the calls, if there have to be some.

    Raises:
        ParameterError: there is no such tool, or the model's calls are not read, or held by no grammar.
    """
    if not tools or form is None:
        if tools and engine.chat_template is not None:
            raise ParameterError(f"minillm does not read the calls of this model, {engine.chat_template.unread_calls}")
        return {}
    if choice == "auto":
        return {}
    names = [tool["function"]["name"] for tool in tools]
    callable_ = [tool for tool in tools if choice in ("required", tool["function"]["name"])]
    if not callable_:
        raise ParameterError(f"there is no tool {shown(choice)}; there is {listed(names)}")
    added = {} if engine.tokenizer is None else engine.tokenizer.added_ids
    return {"guided_grammar": call_grammar(form, callable_, added, single=choice != "required")}


def _parser(
    engine: Engine, messages: Sequence[Message], tools: Sequence[Message], form: CallFormat | None
) -> AnswerParser:
    """A parser of the answer to a conversation."""
    template = engine.chat_template
    thoughts = None if template is None else template.reasoning_format
    opened = thoughts is not None and thoughts.opened_by(engine.render_chat(messages, tools=tools or None))
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls = None if form is None else parser_of(form, [*schemas], schemas=schemas)
    return AnswerParser(None if thoughts is None else Thoughts(thoughts, opened).parser(), calls)
