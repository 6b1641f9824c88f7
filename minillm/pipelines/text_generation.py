"""text-generation: decoders that continue texts and answer conversations."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..decoding.prompts import encode_text
from ..engine.engine import Engine
from ..errors import ParameterError
from .generating import Generating
from .inputs import config_json, listed_inputs, truncated


class TextGeneration(Generating):
    """text-generation: continue a text, or answer a conversation, a list of messages.

    The result of a text is a list with a dict for each of `num_return_sequences`: {"generated_text": ...}, the prompt
    included unless `return_full_text` is False. That of a conversation has the messages with the answer after them, or
    the answer alone. Without other settings it samples at a temperature of 0.7, 256 tokens, as in transformers.

    Arguments of a call besides generation fields: return_full_text, return_text, return_tensors (token ids), prefix
    (before each text), stop_sequence, truncation, add_special_tokens, continue_final_message, tools, generation_config.
    """

    OPTIONS = Generating.OPTIONS | {
        *("return_full_text", "return_text", "prefix", "add_special_tokens", "continue_final_message", "tools"),
    }
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"max_new_tokens": 256, "do_sample": True, "temperature": 0.7}

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Decoders with a language model head do."""
        config = engine.config
        return config.output == "tokens" and not config.encoder_layers and not config.bidirectional

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """Continue one text or conversation, or each of a list of them: a list of results, or one for each.

        Raises:
            ParameterError: an option is unknown, impossible or contradicts another.
            PromptError: an input is neither a text nor a conversation, or does not fit into the context.
        """
        self.check(options)
        options = self.options | options
        single = isinstance(inputs, str) or _is_chat(inputs)
        texts = listed_inputs([inputs] if single else inputs, "texts or conversations", lambda value: _is_chat(value))
        full, as_ids = options.pop("return_full_text", None), bool(options.pop("return_tensors", None))
        as_text = options.pop("return_text", None)
        if (full is not None and (as_ids or as_text is not None)) or (as_ids and as_text):
            raise ParameterError("return_full_text, return_text and return_tensors exclude each other: give one")
        limit, prefix = self._limit(options), options.pop("prefix", None) or self._configured_prefix()
        limit = None if limit is None else min(limit, self.engine.context - 1)  # room for a token
        options.pop("truncation", None)
        special = options.pop("add_special_tokens", None)
        continued, tools = options.pop("continue_final_message", None), options.pop("tools", None)
        if (continued is not None or tools) and not all(map(_is_chat, texts)):
            name = "tools" if tools else "continue_final_message"
            raise ParameterError(f"{name} is for conversations: leave it out for a text")
        prompts: list[Any] = []
        for text in texts:
            if isinstance(text, str):
                text, added = prefix + text, special is not False
            else:
                text = self._rendered(text, continued, tools)
                added = False  # the template has written the special tokens
            prompts.append(text if added and limit is None else self._encoded(text, added, limit))
        results = self._generate(prompts, options, progress)
        outputs = []
        for text, generation in zip(texts, results, strict=True):
            records: list[dict[str, Any]] = []
            for completion in generation.completions:
                if as_ids:
                    records.append({"generated_token_ids": generation.prompt_token_ids + completion.token_ids})
                elif full is False:
                    records.append({"generated_text": completion.text})
                elif isinstance(text, str):
                    records.append({"generated_text": text + completion.text})
                else:
                    records.append({"generated_text": _with_answer(text, completion.text, continued)})
            outputs.append(records)
        return outputs[0] if single else outputs

    def _configured_prefix(self) -> str:
        prefix = config_json(self.engine).get("prefix")
        return prefix if isinstance(prefix, str) else ""

    def _rendered(self, messages: Any, continued: bool | None, tools: Any) -> str:
        ends = _continues(messages, continued)
        return self.engine.render_chat(
            list(messages), tools=tools, add_generation_prompt=not ends, continue_final_message=ends
        )

    def _encoded(self, text: str, added: bool, limit: int | None) -> list[int]:
        if limit is not None:
            return truncated(self.engine, text, limit, add_special_tokens=added)
        return encode_text(text, self.engine.tokenizer, self.engine.config, add_special_tokens=False)


def _is_chat(value: Any) -> bool:
    """Whether a value is a conversation: a list of messages, each a mapping with a role."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _continues(messages: Sequence[Mapping[str, Any]], continued: bool | None) -> bool:
    """Whether the answer continues the last message; by default if that is the assistant's."""
    return messages[-1].get("role") == "assistant" if continued is None else continued


def _with_answer(messages: Sequence[Mapping[str, Any]], answer: str, continued: bool | None) -> list[Mapping[str, Any]]:
    if not _continues(messages, continued):
        return [*messages, {"role": "assistant", "content": answer}]
    *before, last = messages
    return [*before, {"role": last["role"], "content": last["content"] + answer}]
