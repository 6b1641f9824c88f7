"""Calls that read heads of each token: labels of tokens, answers in a text, and masked tokens."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..decoding.prompts import need_tokenizer
from ..decoding.request import check_lora
from ..decoding.values import whole
from ..errors import ParameterError, PromptError, TaskError, shown
from ..progress import showing
from ..tasks.answering import LARGEST_STRIDE, LONGEST_WINDOW, Answer, answers_of
from ..tasks.embedding import TextPasses, refuse_two_stacks
from ..tasks.masked import Filling, fillings_of, masks_of, target_ids
from ..tasks.token_labels import AGGREGATIONS, Aggregation, Entity, entities_of
from ..text.tokenizer.aligned import align_texts
from ..text.tokenizer.encoding import check_text
from .arguments import optional, read, refuse_task
from .lifecycle import EngineLifecycle


class EngineTokenReadings(EngineLifecycle):
    """The readings of each token, by checkpoints whose heads are made for them."""

    def classify_tokens(
        self,
        texts: str | Sequence[str],
        *,
        aggregation: Aggregation = "none",
        ignore_labels: Collection[str] = ("O",),
        stride: int | None = None,
        truncate: bool = True,
        lora: str | None = None,
        progress: bool = True,
    ) -> list[Entity] | list[list[Entity]]:
        """The labels of the tokens of a text, or the entities in it (names, places, parts of speech).

        Args:
            texts: a text, or a list
            aggregation: "none": each token by itself; "simple": neighbours of one label are an entity, and "B-" begins
                one; "first", "average", "max": likewise of words, whose label is their first token's, the likeliest in
                the mean of their tokens, or their surest token's
            ignore_labels: labels that are left out
            stride: compute a longer text in windows that share so many tokens, and join their entities
            truncate: without a stride, cut a longer text; False: refuse it
            lora: name of one of the engine's adapters
            progress: show a bar on a terminal or in a notebook

        Returns:
            A list of entities in the order of the text, or one for each text.

        Raises:
            TaskError: the model has no labels of tokens.
            PromptError: a text is too long, or not text.
            ParameterError: an argument is impossible.
            NumericalError: the logits contain NaN or infinity.
        """
        refuse_task(self.config, "token_labels", "classify_tokens")
        if aggregation not in AGGREGATIONS:
            raise ParameterError(
                f"aggregation {shown(aggregation)} is not known: expected one of {', '.join(AGGREGATIONS)}"
            )
        stride = read("stride", stride, optional(whole(0)))
        if stride is not None and aggregation == "none":
            raise ParameterError("a stride joins entities, and aggregation is none: name one")
        ignored = _names("ignore_labels", ignore_labels)
        single = isinstance(texts, str)
        if not isinstance(texts, Iterable):
            raise PromptError(f"expected a text or a list of texts, found {shown(texts)}")
        members: list[str] = [texts] if isinstance(texts, str) else list(texts)
        check_lora(lora, self._maker.adapters)
        passes, tokenizer = self._passes("classify_tokens"), need_tokenizer(self.tokenizer)
        windows = []
        for text in members:
            own = align_texts(tokenizer, text, limit=passes.context, stride=stride)
            if own[0].encoded.truncated and stride is None:
                passes.note_cut(truncate)
            windows.append(own)
        encoded = [window.encoded for own in windows for window in own]
        with showing(read("progress", progress)):
            logits = iter(passes.token_logits(encoded, lora=lora))
        labels = self.config.labels
        results = [
            entities_of(text, own, [next(logits) for _ in own], labels, tokenizer, aggregation, ignored)
            for text, own in zip(members, windows, strict=True)
        ]
        return results[0] if single else results

    def answer(
        self,
        question: str,
        context: str,
        *,
        top_k: int = 1,
        max_answer_tokens: int = 15,
        allow_none: bool = False,
        whole_words: bool = True,
        window: int | None = None,
        stride: int | None = None,
        lora: str | None = None,
        progress: bool = True,
    ) -> list[Answer]:
        """The spans of a text that answer a question, by a checkpoint for question answering.

        Args:
            question: text
            context: the text with the answer; a long one is computed in windows
            top_k: answers at most
            max_answer_tokens: tokens of an answer at most
            allow_none: whether "" may be an answer, with the probability that there is none
            whole_words: widen answers to whole words
            window: tokens of a window, the question's included; by default 384, or fewer if the model reads fewer
            stride: tokens of the text that neighbouring windows share; by default 128, or half a window
            lora: name of one of the engine's adapters
            progress: show a bar on a terminal or in a notebook

        Returns:
            The answers, the likeliest first; fewer than `top_k` if there are no more.

        Raises:
            TaskError: the model answers no questions.
            PromptError: a text is empty or not text, or the question fills a window.
            ParameterError: an argument is impossible.
            NumericalError: the logits contain NaN or infinity.
        """
        refuse_task(self.config, "spans", "answer")
        top_k, most = read("top_k", top_k, whole(1)), read("max_answer_tokens", max_answer_tokens, whole(1))
        check_text(question)
        check_text(context)
        if not context or not question:
            raise PromptError("the question and the text should not be empty")
        check_lora(lora, self._maker.adapters)
        passes, tokenizer = self._passes("answer"), need_tokenizer(self.tokenizer)
        limit = min(passes.context, LONGEST_WINDOW) if window is None else read("window", window, whole(0))
        if limit > passes.context:
            raise ParameterError(f"window should be at most {passes.context}, which the model reads, found {limit}")
        shared = min(limit // 2, LARGEST_STRIDE) if stride is None else read("stride", stride, whole(0))
        windows = align_texts(tokenizer, question, context, limit=limit, cut="second", stride=shared)
        with showing(read("progress", progress)):
            logits = passes.token_logits([own.encoded for own in windows], lora=lora)
        return answers_of(
            context,
            windows,
            logits,
            top_k=top_k,
            max_answer_tokens=most,
            allow_none=allow_none,
            whole_words=whole_words,
            first_stands_for_none=self.config.bidirectional,
        )

    def fill_masks(
        self,
        text: str,
        *,
        top_k: int = 5,
        targets: str | Sequence[str] | None = None,
        truncate: bool = True,
        lora: str | None = None,
        progress: bool = True,
    ) -> list[list[Filling]]:
        """The likeliest tokens in the places of a text's masks, each by itself, by a masked language model.

        Args:
            text: with one mask or several, written as the tokenizer names it: "[MASK]", "<mask>"
            top_k: tokens of each mask at most
            targets: texts or names of tokens among which to choose; by default the whole vocabulary
            truncate: cut a text that is longer than the model reads; False: refuse it
            lora: name of one of the engine's adapters
            progress: show a bar on a terminal or in a notebook

        Returns:
            A list for each mask, the best first.

        Raises:
            TaskError: the checkpoint has no head of masked tokens.
            PromptError: the text has no mask, is too long or not text.
            ParameterError: an argument is impossible.
            NumericalError: the logits contain NaN or infinity.
        """
        if not self.config.fills_masks:
            raise TaskError(
                "fill_masks needs a masked language model (...ForMaskedLM) with its head; this "
                f"{self.config.model_type} checkpoint is none"
            )
        top_k = read("top_k", top_k, whole(1))
        passes, tokenizer = self._passes("fill_masks"), need_tokenizer(self.tokenizer)
        check_lora(lora, self._maker.adapters)
        chosen = None if targets is None else target_ids(_names("targets", targets), tokenizer)
        if chosen is not None and not chosen:
            raise ParameterError("targets should name at least one token")
        check_text(text)
        [window] = align_texts(tokenizer, text, limit=passes.context)
        if window.encoded.truncated:
            passes.note_cut(truncate)
        ids = window.encoded.token_ids
        places = masks_of(ids, tokenizer, cut=window.encoded.truncated)
        with showing(read("progress", progress)):
            [rows] = passes.token_logits([window.encoded], places=range(places[0], places[-1] + 1), lora=lora)
        logits: NDArray[np.float32] = rows[[place - places[0] for place in places]]  # [k, V]
        padding = self.config.pad_token_id
        return fillings_of(ids, places, logits, tokenizer, top_k=top_k, targets=chosen, padding=padding)

    def _passes(self, call: str) -> TextPasses:
        """The passes over whole texts, for the call of this name."""
        refuse_two_stacks(self.config, call)
        with self._driver.turn():
            assert self._text_passes is not None
            return self._text_passes


def _names(name: str, value: str | Collection[str]) -> list[str]:
    """Texts of an argument, of which one may be given without a list.

    Raises:
        ParameterError: they are none.
    """
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise ParameterError(f"{name} should be texts, found {shown(value)}")
    return texts
