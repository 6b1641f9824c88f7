"""question-answering: the span of a text that answers a question."""

from collections.abc import Mapping
from typing import Any

from ..engine.engine import Engine
from ..errors import ParameterError, PromptError, shown
from .base import Pipeline


class QuestionAnswering(Pipeline):
    """question-answering: {"score", "start", "end", "answer"} for a question and its context.

    They are given as `question=` and `context=`, both texts or lists, or as a dict with these keys, or a list of such.
    One question gives a dict, or a list of dicts if it has several answers (`top_k`); several questions a list.

    Arguments of a call: top_k (1), max_answer_len (15 tokens), handle_impossible_answer (whether "" is an answer),
    max_seq_len (tokens of a window, 384), doc_stride (tokens that windows share, 128), align_to_words (True).
    """

    OPTIONS = frozenset(
        {"top_k", "max_answer_len", "handle_impossible_answer", "max_seq_len", "doc_stride", "align_to_words"}
    )

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Models with a head of starts and ends do."""
        return engine.config.output == "spans"

    def __call__(
        self, inputs: Any = None, *, question: Any = None, context: Any = None, progress: bool = True, **options: Any
    ) -> Any:
        """Answer one question, or each of a list.

        Raises:
            ParameterError: an option is unknown or impossible.
            PromptError: an input is not a question with its context.
        """
        self.check(options)
        options = self.options | options
        given = {
            "top_k": options.get("top_k"),
            "max_answer_tokens": options.get("max_answer_len"),
            "allow_none": options.get("handle_impossible_answer"),
            "whole_words": options.get("align_to_words"),
            "window": options.get("max_seq_len"),
            "stride": options.get("doc_stride"),
        }
        arguments = {name: value for name, value in given.items() if value is not None}
        outputs: list[Any] = []
        for pair in _pairs(inputs, question, context):
            answers = self.engine.answer(pair["question"], pair["context"], progress=progress, **arguments)
            records = [
                {"score": answer.score, "start": answer.start, "end": answer.end, "answer": answer.answer}
                for answer in answers
            ]
            outputs.append(records[0] if len(records) == 1 else records)
        return outputs[0] if len(outputs) == 1 else outputs


def _pairs(inputs: Any, question: Any, context: Any) -> list[Mapping[str, str]]:
    """Questions and their contexts from any of the forms of a call."""
    if (inputs is None) == (question is None and context is None):
        raise ParameterError("give question and context, or dicts of them")
    if inputs is None:
        questions = [question] if isinstance(question, str) else question
        if not isinstance(questions, list | tuple) or not isinstance(context, str | list | tuple):
            raise ParameterError("question and context should be two texts, or lists of as many")
        contexts = [context] * len(questions) if isinstance(context, str) else context
        if not questions or len(questions) != len(contexts):
            raise ParameterError("question and context should be two texts, or lists of as many")
        inputs = [{"question": own, "context": text} for own, text in zip(questions, contexts, strict=True)]
    pairs = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(pairs, list | tuple):
        raise PromptError(f'expected a dict with the texts "question" and "context", or a list, found {shown(pairs)}')
    for pair in pairs:
        if not isinstance(pair, Mapping) or not all(isinstance(pair.get(key), str) for key in ("question", "context")):
            raise PromptError(f'expected a dict with the texts "question" and "context", found {shown(pair)}')
    return list(pairs)
