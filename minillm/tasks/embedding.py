"""Texts to vectors and to labels: how a text is encoded, and what its rows become (`packed_texts.py` computes them)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig, ScoreFunction
from ..decoding.prompts import Prompt, encode_prompt, is_prompt, need_tokenizer
from ..encoder_input import AudioFeatures
from ..errors import ParameterError, PromptError, TaskError, shown
from ..reference.softmax import softmax
from ..runner.runner import Runner
from ..text.chat import ChatTemplate
from ..text.tokenizer import EncodedText, Tokenizer, encode_texts
from .late_interaction import Role
from .packed_texts import PackedTexts, Turn, every_position
from .pooling import POOLINGS, EmbeddingSettings, Pooling, pooled
from .sparse_vectors import SparsePooling, SparseVector
from .text_messages import TextMessages

logger = logging.getLogger("minillm")

Text = Prompt | EncodedText
"""A text to embed: text, its token ids, or what `Engine.encode` made of it"""
Pair = tuple[str, str]
"""Two texts that are judged together, as rerankers do: a query and a document"""


@dataclass(frozen=True)
class Label:
    """A label of a classification."""

    label: str
    """Its name"""
    score: float
    """Its logit after the score function: a probability, unless the function is "none" """
    index: int
    """Its row in the classification head"""


@dataclass(frozen=True)
class Classification:
    """The labels of a text.

    Example:
        >>> engine.classify("An excellent film").label  # doctest: +SKIP
        'POSITIVE'
    """

    labels: list[Label]
    """Best first: all of them, or as many as were asked for"""
    logits: NDArray[np.float32] = field(compare=False, repr=False)
    """Logits of all labels, in the order of the head. [labels]"""
    prompt_tokens: int = 0
    """Number of tokens of the text"""

    @property
    def label(self) -> str:
        """Name of the best label."""
        return self.labels[0].label

    @property
    def score(self) -> float:
        """Score of the best label."""
        return self.labels[0].score


class TextPasses(PackedTexts):
    """Runs whole texts through a model."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        settings: EmbeddingSettings,
        budget: int,
        turn: Turn = nullcontext,
        template: ChatTemplate | None = None,
    ) -> None:
        """Set the model.

        Args:
            runner: has the model and its backend; its cache is not used
            tokenizer: for texts
            settings: how texts are embedded
            budget: tokens of a pass, which a longer text of an encoder exceeds
            turn: in which each pass is computed
            template: for texts that are messages
        """
        super().__init__(runner, budget, turn)
        self.settings = settings
        self._tokenizer, self._template = tokenizer, template
        self._told = False

    @property
    def context(self) -> int:
        """Tokens of the longest text."""
        config, longest = self.config, self.settings.max_tokens
        most = min(config.max_positions, config.max_source_positions) if config.encoder_layers else config.max_positions
        return most if longest is None else min(longest, most)

    # --- texts --------------------------------------------------------------------------------------------------------

    def encode(
        self, text: Text | Pair, *, prompt: str = "", truncate: bool = True, role: Role | None = None
    ) -> EncodedText:
        """Token ids and types of a text or a pair of texts as the model reads them; `prompt` goes before the first.

        `role` is what a text is to a late-interaction model.

        Raises:
            PromptError: it is empty, of another type, has ids outside the vocabulary, or is too long and `truncate` is
                False; or a text, and there is no tokenizer.
            UnsupportedModelError: as `EmbeddingSettings.check`.
        """
        self.settings.check()
        if isinstance(text, EncodedText):
            encoded = self._checked(text)
        elif isinstance(text, AudioFeatures):
            raise PromptError("this model reads text, found frames of sound: give text or token ids")
        elif isinstance(text, str) or _is_pair(text):
            first, *more = [text] if isinstance(text, str) else [str(member) for member in text]
            encoded = self._encoded(first, more[0] if more else None, prompt, truncate=truncate, role=role)
        else:
            if prompt:
                raise ParameterError("a prompt goes before text, and token ids were given: put its ids before them")
            ids = self._given_ids(text, truncate=truncate)
            encoded = EncodedText(ids, [0] * len(ids), len(ids) < len(text))
        if not encoded.token_ids:
            raise PromptError("the text is empty: give at least one token")
        if encoded.truncated:
            self.note_cut(truncate=True)
        return encoded

    def _encoded(
        self, first: str, second: str | None, prompt: str, *, truncate: bool, role: Role | None
    ) -> EncodedText:
        tokenizer, settings = need_tokenizer(self._tokenizer), self.settings
        texts = [first] if second is None else [first, second]
        reranks = settings.rerank_prompt is not None and second is not None
        if settings.messages is None and not reranks:
            texts[0] = prompt + texts[0]
        if settings.strip:
            texts = [text.strip() for text in texts]
        if settings.lowercase:
            texts = [text.lower() for text in texts]
        if settings.rerank_prompt is not None and reranks:
            query, document = texts
            encoded = settings.rerank_prompt.encode(tokenizer, query, document, prompt, self.context)
        elif settings.late is not None and role is not None:
            encoded = settings.late.encode(tokenizer, texts[0], role, self.context)
        elif not settings.special_tokens and second is None:
            ids = tokenizer.encode(texts[0], add_special_tokens=False)
            encoded = EncodedText(ids[: self.context], [0] * min(len(ids), self.context), len(ids) > self.context)
        elif self._messages is not None:
            encoded = self._messages.encode(texts, prompt, self.context)
        else:
            ended = second is None and settings.pooling == "last" and self.config.output != "labels"
            encoded = encode_texts(tokenizer, *texts, limit=self.context, ended=ended)
            if prompt and second is None and not settings.include_prompt:
                encoded = encoded._replace(prompt_tokens=self._prompt_tokens(prompt))
        if encoded.truncated and not truncate:
            late = None if role is None else settings.late
            limit = self.context if late is None or role is None else late.limit(role, self.context)
            raise PromptError(f"the text has more than {limit} tokens, the most that this model reads")
        return encoded

    @cached_property
    def _messages(self) -> TextMessages | None:
        """The writer of texts as messages; None if they are read as they are."""
        if self.settings.messages is None or self._template is None:
            return None
        return TextMessages(self.settings.messages, self._template, need_tokenizer(self._tokenizer))

    def _checked(self, text: EncodedText) -> EncodedText:
        """A text that is already encoded, perhaps by another model's tokenizer."""
        if len(text.types) != len(text.token_ids) or any(kind < 0 for kind in text.types):
            raise PromptError(
                f"an encoded text should have a type from 0 on for each of its {len(text.token_ids)} tokens, found "
                f"{shown(text.types)}"
            )
        self._given_ids(text.token_ids, truncate=False)
        return text

    def _given_ids(self, ids: Any, *, truncate: bool) -> list[int]:
        is_series = isinstance(ids, Sequence) or (isinstance(ids, np.ndarray) and ids.ndim > 0)
        limited = ids[: self.context] if truncate and is_series else ids
        return encode_prompt(limited, None, replace(self.config, max_positions=self.context), begin=False)

    def _prompt_tokens(self, prompt: str) -> int:
        """Leading tokens that a prompt makes: all but a special one at its end."""
        tokenizer = need_tokenizer(self._tokenizer)
        ids = encode_texts(tokenizer, prompt, limit=self.context).token_ids
        return len(ids) - (bool(ids) and ids[-1] in tokenizer.special_ids)

    # --- results ------------------------------------------------------------------------------------------------------

    def embed(
        self,
        texts: Sequence[EncodedText],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        lora: str | None = None,
    ) -> NDArray[np.float32]:
        """The vectors of texts. [N, E]

        Raises:
            ParameterError: an argument is impossible.
            NumericalError: the hidden states contain NaN or infinity.
        """
        self.settings.check()
        if self.settings.late is not None:
            raise TaskError("this late-interaction model has vectors of tokens, none of a text: use embed_tokens")
        if self.settings.sparse is not None:
            if pooling is not None or dimensions is not None:
                raise ParameterError("pooling and dimensions are for dense vectors, and this model's are sparse")
            rows = self._sparse(texts, self.settings.sparse, lora)
            stacked = np.stack(rows) if rows else np.empty((0, self.config.vocab_size), np.float32)  # N x [V] -> [N, V]
            return self.settings.finished(stacked, normalize=normalize, dimensions=None)
        chosen = self.settings.pooling if pooling is None else pooling
        modes = chosen if isinstance(chosen, tuple) else (chosen,)
        if any(mode not in POOLINGS for mode in modes):
            raise ParameterError(f"pooling {shown(pooling)} is not known: expected one of {', '.join(POOLINGS)}")
        if dimensions is not None and not _is_count(dimensions):
            raise ParameterError(f"dimensions should be a whole number of at least 1, found {shown(dimensions)}")

        def wanted(text: EncodedText) -> range:
            n = len(text.token_ids)
            if modes == ("last",):
                return range(n - 1, n)
            first = min(text.prompt_tokens, n - 1)
            return range(first, first + 1) if modes == ("cls",) else range(n)

        def vector(i: int, rows: NDArray[np.float32]) -> NDArray[np.float32]:
            skipped = min(texts[i].prompt_tokens, len(rows) - 1)
            return np.concatenate([pooled(rows, mode, skipped) for mode in modes])  # of each mode [E] -> [W]

        vectors = self._run(texts, False, wanted, vector, "embedding", lora, self.settings.layer_weights)
        width = self.width * len(modes)
        stacked = np.stack(vectors) if vectors else np.empty((0, width), np.float32)  # N x [E] -> [N, E]
        return self.settings.finished(stacked, normalize=normalize, dimensions=dimensions)

    def embed_sparse(
        self, texts: Sequence[EncodedText], *, most: int | None = None, lora: str | None = None
    ) -> list[SparseVector]:
        """The sparse vectors of texts, of `most` tokens each.

        Raises:
            TaskError: the model fills no masks.
            ParameterError: `most` is impossible.
            NumericalError: the logits contain NaN or infinity.
        """
        self.settings.check()
        sparse = self.settings.sparse
        if not self.config.fills_masks:
            raise TaskError("embed_sparse needs a sparse encoder (SPLADE) or another masked language model; use embed")
        if most is not None and not _is_count(most):
            raise ParameterError(f"most should be a whole number of at least 1, or None, found {shown(most)}")
        pooling = sparse or SparsePooling()
        return [self._of_tokens(row) for row in self._sparse(texts, replace(pooling, most=most or pooling.most), lora)]

    def _sparse(self, texts: Sequence[EncodedText], pooling: SparsePooling, lora: str | None) -> list[Any]:
        """The weights of all tokens. [V] each"""
        return self._run(texts, True, every_position, lambda i, logits: pooling(logits), "embedding", lora)

    def _of_tokens(self, weights: NDArray[np.float32]) -> SparseVector:
        """[V] -> the tokens with a weight"""
        ids = np.argsort(-weights, kind="stable")[: np.count_nonzero(weights)]
        tokenizer = self._tokenizer
        names = () if tokenizer is None else tuple(tokenizer.token(int(i)) for i in ids)
        return SparseVector(ids, weights[ids], names)

    @property
    def width(self) -> int:
        """Dimensions of a pooled vector, before the projections of `EmbeddingSettings`."""
        return self.config.hidden_size

    def hidden_states(self, texts: Sequence[EncodedText], *, lora: str | None = None) -> list[NDArray[np.float32]]:
        """The hidden states of the tokens of each text. [T, E] each

        Raises:
            NumericalError: they contain NaN or infinity.
        """
        return self._run(texts, False, every_position, lambda i, rows: rows, "embedding", lora)

    def embed_tokens(
        self, texts: Sequence[EncodedText], role: Role, *, lora: str | None = None
    ) -> list[NDArray[np.float32]]:
        """The vectors of the tokens of each text, for late interaction. [k, W] each

        Raises:
            TaskError: the checkpoint is not made for late interaction.
            NumericalError: the hidden states contain NaN or infinity.
        """
        late = self.settings.late
        if late is None:
            raise TaskError(
                "embed_tokens needs a late-interaction checkpoint (ColBERT); hidden_states gives the states of tokens"
            )
        states = self._run(texts, False, every_position, lambda i, rows: rows, "embedding", lora)
        return [late.vectors(rows, text, role, self._tokenizer) for rows, text in zip(states, texts, strict=True)]

    def classify(
        self,
        texts: Sequence[EncodedText],
        *,
        top_k: int | None = None,
        function: ScoreFunction | None = None,
        lora: str | None = None,
    ) -> list[Classification]:
        """The labels of texts.

        Raises:
            ParameterError: an argument is impossible.
            NumericalError: the logits contain NaN or infinity.
        """
        chosen = (self.settings.score_function or self.config.score_function) if function is None else function
        if chosen not in SCORES:
            raise ParameterError(f"function {shown(function)} is not known: expected one of {', '.join(SCORES)}")
        if top_k is not None and not _is_count(top_k):
            raise ParameterError(f"top_k should be a whole number of at least 1, or None for all, found {shown(top_k)}")
        score, names = self.settings.logit_score, self.settings.labels(self.config.labels)

        def logits_of(i: int, rows: NDArray[np.float32]) -> NDArray[np.float32]:
            return rows[0] if score is None else score(rows[0])  # [V] -> [1]

        if self.config.labels_of_mean:
            results = self._labels_of_mean(texts, lora)
        else:
            results = self._run(texts, True, self._judged, logits_of, "classifying", lora)
        classifications = []
        for text, logits in zip(texts, results, strict=True):
            scores = SCORES[chosen](logits)
            order = np.argsort(-scores, kind="stable")[:top_k].tolist()
            labels = [Label(names[i], float(scores[i]), i) for i in order]
            classifications.append(Classification(labels, logits, len(text.token_ids)))
        return classifications

    def _labels_of_mean(self, texts: Sequence[EncodedText], lora: str | None) -> list[NDArray[np.float32]]:
        """Logits of texts by a head that reads the mean of all tokens' hidden states. [labels] each"""
        if lora is not None:
            raise ParameterError("lora is not offered for labels of the mean of all tokens: merge the adapter")

        def mean(i: int, rows: NDArray[np.float32]) -> NDArray[np.float32]:
            return np.asarray(rows.mean(axis=0))  # [T, E] -> [E]

        means = self._run(texts, False, every_position, mean, "classifying", lora)
        if not means:
            return []
        with self._turn():
            return list(self._runner.head_of(np.stack(means)))  # N x [E] -> [N, labels]

    def token_logits(
        self, texts: Sequence[EncodedText], *, places: range | None = None, lora: str | None = None
    ) -> list[NDArray[np.float32]]:
        """The results of the model's head for each token, or for those at some places of every text. [k, W] each

        Raises:
            NumericalError: they contain NaN or infinity.
        """
        if any(not text.token_ids for text in texts):
            raise PromptError("the text is empty: give at least one token")

        def positions_of(text: EncodedText) -> range:
            return every_position(text) if places is None else places

        return self._run(texts, True, positions_of, lambda i, rows: rows, "reading", lora)

    def note_cut(self, truncate: bool) -> None:
        """Say once that a text was cut.

        Raises:
            PromptError: it was not to be.
        """
        if not truncate:
            raise PromptError(f"the text has more than {self.context} tokens, the most that this model reads")
        if not self._told:
            self._told = True
            logger.warning("a text was cut to %d tokens, the most that this model reads; told once", self.context)

    def _judged(self, text: EncodedText) -> range:
        """The position whose hidden state the head reads: an encoder's first, a decoder's last.

        As in transformers, a padding token at the end of a classified text does not count; an encoder-decoder's is that
        of the last end-of-sequence token.
        """
        if self.config.encoder_layers:
            ends = [i for i, token in enumerate(text.token_ids) if token in self.config.eos_token_ids]
            if not ends:
                raise PromptError(
                    "an encoder-decoder classifies a text at its end-of-sequence token: this one has none"
                )
            return range(ends[-1], ends[-1] + 1)
        if self.config.bidirectional:
            return range(1)
        if self.settings.logit_score is not None:
            return range(len(text.token_ids) - 1, len(text.token_ids))
        padding = self.config.pad_token_id
        real = [i for i, token in enumerate(text.token_ids) if token != padding]
        last = (real[-1] if real else 0) if padding is not None else len(text.token_ids) - 1
        return range(last, last + 1)


def _sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))), np.float32)


SCORES: Mapping[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "softmax": lambda logits: softmax(logits, np),
    "sigmoid": _sigmoid,
    "none": lambda logits: logits,
}
"""Functions of logits by their names in `Engine.classify`. [labels] -> [labels]"""


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def _is_pair(value: Any) -> bool:
    """Whether a value is a pair of texts rather than a list of two."""
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(member, str) for member in value)


def is_one_text(value: Any, *, pairs: bool) -> bool:
    """Whether a value is one text to embed or classify, rather than a list of such; `pairs`: a pair is one too."""
    return isinstance(value, EncodedText) or (pairs and _is_pair(value)) or is_prompt(value)


def refuse_two_stacks(config: ModelConfig, call: str) -> None:
    """Refuse a call that is for an encoder or a decoder alone.

    Raises:
        TaskError: the model is an encoder-decoder, unless it classifies texts and the call does.
    """
    labels = config.output == "labels"
    if config.encoder_layers and not (labels and call in ("classify", "encode")):
        raise TaskError(
            f"{call} needs an encoder or a decoder alone; this {config.model_type} model is an encoder-decoder: it "
            f"{'classifies' if labels else 'generates'} text"
        )


def listed_texts(texts: Any, *, single: bool) -> list[Any]:
    """The texts of a call as a list."""
    return [texts] if single else list(texts)
