"""text-classification: the labels of texts."""

from collections.abc import Mapping
from typing import Any

from ..engine.engine import Engine
from ..errors import ParameterError, PromptError, shown
from .base import Pipeline
from .inputs import listed_inputs, truncates


class TextClassification(Pipeline):
    """text-classification, also called sentiment-analysis: the labels of a text, {"label": ..., "score": ...}.

    One text gives a list with its best label, a list of texts one dict each. With `top_k` each text gives a list of its
    best labels, of all for None. A pair of texts is a dict {"text": ..., "text_pair": ...}.

    Arguments of a call: top_k, function_to_apply ("softmax", "sigmoid", "none"; by default what the model's config
    implies), return_all_scores (all labels in the model's order), truncation.
    """

    OPTIONS = frozenset({"top_k", "function_to_apply", "return_all_scores", "truncation"})

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Models with a classification head do."""
        return engine.config.output == "labels"

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """Label one text or pair, or each of a list.

        Raises:
            ParameterError: an option is unknown or impossible.
            PromptError: an input is not text, or is too long; `truncation=True` cuts it.
        """
        self.check(options)
        in_call = "top_k" in options
        options = self.options | options
        function = options.get("function_to_apply")
        chosen: Any = function.lower() if isinstance(function, str) else function
        all_scores = options.get("return_all_scores")
        if all_scores and options.get("top_k") is not None:
            raise ParameterError("return_all_scores and top_k exclude each other: give one")
        single = isinstance(inputs, str | Mapping)
        texts = [inputs] if single else listed_inputs(inputs, 'texts, or of {"text", "text_pair"}', _is_pair)
        classifications = self.engine.classify(
            [text if isinstance(text, str) else _pair(text) for text in texts],
            top_k=1 if "top_k" not in options and not all_scores else options.get("top_k"),
            function=chosen,
            truncate=truncates(options),
            progress=progress,
        )
        assert isinstance(classifications, list)
        records: list[Any] = []
        for result in classifications:
            labels = sorted(result.labels, key=lambda label: label.index) if all_scores else result.labels
            records.append([{"label": label.label, "score": label.score} for label in labels])
        if "top_k" not in options and not all_scores:
            records = [record[0] for record in records]
        # of one text a list, of one pair not, and none around the labels that a call asks for: as transformers has it
        return records[0] if single and (in_call or not isinstance(inputs, str)) else records


def _is_pair(value: Any) -> bool:
    return isinstance(value, Mapping) and "text" in value and value.keys() <= {"text", "text_pair"}


def _pair(value: Any) -> str | tuple[str, str]:
    """A text or a pair of texts from a dict."""
    if not _is_pair(value):
        raise PromptError(f'a pair should be a dict with "text" and "text_pair", found {shown(value)}')
    return value["text"] if value.get("text_pair") is None else (value["text"], value["text_pair"])
