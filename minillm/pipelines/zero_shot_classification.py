"""zero-shot-classification: which of some labels suits a text, by a model that tells whether it entails a sentence.

Each label makes a hypothesis, "This example is sports."; its logit of entailment is the label's (Yin et al., arXiv
1909.00161).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..decoding.prompts import need_tokenizer
from ..engine.engine import Engine
from ..errors import ParameterError, TaskError, listed, shown
from ..reference.softmax import softmax
from ..text.tokenizer.aligned import align_texts
from .base import Pipeline
from .inputs import listed_inputs, longest_input

TEMPLATE = "This example is {}."


class ZeroShotClassification(Pipeline):
    """zero-shot-classification: {"sequence", "labels", "scores"} of a text, the best label first.

    `candidate_labels` are a list, or a text with commas between them. The scores of the labels sum to 1, unless
    `multi_label` is True: then each is the probability of entailment rather than contradiction. A long text is cut, and
    the hypothesis remains.

    Arguments of a call: candidate_labels, hypothesis_template ("This example is {}."), multi_label.
    """

    OPTIONS = frozenset({"candidate_labels", "hypothesis_template", "multi_label"})

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Classifiers of text pairs with a label of entailment do."""
        return engine.config.output == "labels" and _entailment(engine.labels) is not None

    def __call__(self, inputs: Any, candidate_labels: Any = None, *, progress: bool = True, **options: Any) -> Any:
        """Score the labels for one text, or for each of a list.

        Raises:
            ParameterError: an option is unknown or impossible.
            PromptError: an input is not text.
            TaskError: the model has no label of entailment.
        """
        if candidate_labels is not None:
            options["candidate_labels"] = candidate_labels
        self.check(options)
        options = self.options | options
        single = isinstance(inputs, str)
        texts = listed_inputs([inputs] if single else inputs, "texts")
        labels = _labels(options.get("candidate_labels"))
        if not texts:
            return []
        template = options.get("hypothesis_template")
        hypotheses = _hypotheses(TEMPLATE if template is None else template, labels)
        tokenizer, limit = need_tokenizer(self.engine.tokenizer), longest_input(self.engine)
        pairs = [
            align_texts(tokenizer, text, hypothesis, limit=limit)[0].encoded
            for text in texts
            for hypothesis in hypotheses
        ]
        results = self.engine.classify(pairs, function="none", progress=progress)
        assert isinstance(results, list)
        logits = np.array([result.logits for result in results]).reshape(len(texts), len(labels), -1)  # [N, labels, W]
        entailment = _entailment(self.engine.labels)
        if entailment is None:
            raise TaskError(f"this model's labels name no entailment: {listed(self.engine.labels)}")
        own = logits[:, :, entailment]  # [N, labels]
        if options.get("multi_label") or len(labels) == 1:
            contradiction = logits[:, :, -1 if entailment == 0 else 0]
            scores = 1 / (1 + np.exp(contradiction - own))  # [N, labels]
        else:
            scores = softmax(own, np)  # [N, labels]
        records = []
        for text, row in zip(texts, scores, strict=True):
            order = np.argsort(-row, kind="stable").tolist()
            ranked, values = [labels[i] for i in order], [float(row[i]) for i in order]
            records.append({"sequence": text, "labels": ranked, "scores": values})
        return records[0] if single else records


def _entailment(labels: Sequence[str]) -> int | None:
    """The label that a text entails another."""
    return next((i for i, label in enumerate(labels) if label.lower().startswith("entail")), None)


def _labels(value: Any) -> list[str]:
    labels = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(labels, list | tuple) or not labels or not all(isinstance(label, str) for label in labels):
        raise ParameterError(f"candidate_labels should be at least one text, found {shown(value)}")
    return list(labels)


def _hypotheses(template: Any, labels: Sequence[str]) -> list[str]:
    if not isinstance(template, str):
        raise ParameterError(f"hypothesis_template should be text with {{}} for the label, found {shown(template)}")
    try:
        hypotheses = [template.format(label) for label in labels]
    except (AttributeError, IndexError, KeyError, ValueError):
        hypotheses = [template]
    if hypotheses[0] == template:
        raise ParameterError(f"hypothesis_template should be text with {{}} for the label, found {shown(template)}")
    return hypotheses
