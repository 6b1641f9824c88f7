"""Texts to embed or to score that a chat template writes: the user's message, or a query and a document.

Source: sentence-transformers 6.2, `base/modality.py`: the roles of a pair, the prompt as the system's message.
"""

from collections.abc import Sequence
from functools import cached_property

from ..errors import PromptError
from ..text.chat import ChatTemplate
from ..text.tokenizer import EncodedText, Tokenizer
from .pooling import AsMessages

_ARGUMENTS = ("add_generation_prompt", "continue_final_message")
"""Arguments of `ChatTemplate.render` among the variables"""


class TextMessages:
    """Writes texts by a template and encodes them."""

    def __init__(self, how: AsMessages, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        """Set how, by what and for which vocabulary."""
        self._how, self._template, self._tokenizer = how, template, tokenizer

    def encode(self, texts: Sequence[str], prompt: str, limit: int) -> EncodedText:
        """Token ids of a text or a pair of texts, at most `limit`.

        A text that is too long ends as the template ends texts, in place of its last tokens.

        Raises:
            PromptError: the template writes no pairs, or refuses these.
        """
        if len(texts) == 2 and not self._writes_pairs:
            raise PromptError(
                "the chat template leaves out messages of the role query or document, as which a pair is written: give "
                "one text"
            )
        ids = self._ids(texts, prompt)
        if len(ids) <= limit:
            return EncodedText(ids, [0] * len(ids))
        end = self._end(len(texts), prompt)[-limit:]
        ids = ids[: limit - len(end)] + end
        return EncodedText(ids, [0] * len(ids), True)

    def _end(self, count: int, prompt: str) -> list[int]:
        """The tokens that follow texts, whatever they are: two conversations have them in common."""
        if not self._how.keep_end:
            return []
        zeros, digits = (self._ids([filler] * count, prompt) for filler in ("0", "1 2 3 4"))
        shorter = min(len(zeros), len(digits))
        same = next((i for i in range(shorter) if zeros[-1 - i] != digits[-1 - i]), shorter)
        return zeros[len(zeros) - same :] if same < shorter else []

    @cached_property
    def _writes_pairs(self) -> bool:
        """Whether both texts of a pair change what is written."""
        plain, other_query, other_document = (
            self._text(pair, "") for pair in (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
        )
        return plain not in (other_query, other_document)

    def _ids(self, texts: Sequence[str], prompt: str) -> list[int]:
        return self._tokenizer.encode(self._text(texts, prompt), add_special_tokens=False)

    def _text(self, texts: Sequence[str], prompt: str) -> str:
        roles = ("user",) if len(texts) == 1 else ("query", "document")
        said = [*([("system", prompt)] if prompt else []), *zip(roles, texts, strict=True)]
        parts = self._how.parts
        chat = [{"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in said]
        variables = dict(self._how.variables)
        begins, continues = (bool(variables.pop(name, False)) for name in _ARGUMENTS)
        return self._template.render(
            chat,
            add_generation_prompt=begins,
            continue_final_message=continues,
            chat_template_kwargs={name: variables[name] for name in variables.keys() & self._template.variables},
        )
