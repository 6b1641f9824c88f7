"""Sentence embeddings: one vector from the hidden states of a text's tokens, and how two of them are compared.

The vector is the mean of the hidden states, the first token's (CLS), the last one's, ... (Reimers and Gurevych,
"Sentence-BERT", arXiv 1908.10084); in some models projections, division by the length and truncation follow. A
reranker may be a causal LM instead, whose score of a query and a document is a difference of two logits. Which of
these a checkpoint is, its files say: see `sentence_files`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..config import ScoreFunction
from ..errors import ParameterError, UnsupportedModelError, listed, shown
from ..reference.norm import layer_norm

if TYPE_CHECKING:
    from .late_interaction import LateInteraction
    from .reranking import RerankPrompt
    from .sparse_vectors import SparsePooling

Pooling = Literal["mean", "cls", "last", "max", "mean_sqrt_len", "weightedmean"]
"""The vector [E] of a text from its hidden states [T, E]: their mean, the first token's, the last token's, the maximum
of each dimension, their sum divided by the root of their number, or their mean weighted by position (1, 2, ..., T)"""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""How alike two vectors are: their cosine or dot product, or their distance with a minus"""
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)

ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": None,
    "torch.nn.modules.activation.Tanh": np.tanh,
}
"""sentence-transformers' names of the activations of `Dense`"""


@dataclass(frozen=True, eq=False)
class Dense:
    """A projection of the pooled vector, with an activation."""

    weight: NDArray[np.float32]
    """[W, E]"""
    bias: NDArray[np.float32] | None
    """[W]"""
    activation: str

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """activation(x W^T + b). [N, E] -> [N, W]"""
        y = x @ self.weight.T  # [N, E] x [E, W] -> [N, W]
        if self.bias is not None:
            y += self.bias
        activate = ACTIVATIONS[self.activation]
        return y if activate is None else activate(y)


@dataclass(frozen=True, eq=False)
class VectorNorm:
    """A layer norm of the pooled vector."""

    weight: NDArray[np.float32]
    """[W]"""
    bias: NDArray[np.float32]
    """[W]"""

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """[N, W] -> [N, W]"""
        return np.asarray(layer_norm(x, self.weight, self.bias, 1e-5, np, np.empty_like(x)))


@dataclass(frozen=True)
class LogitScore:
    """The score of a text by a causal LM: the next token's logit of "yes" minus its logit of "no"."""

    true_token_id: int
    false_token_id: int | None = None

    def __call__(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """[V] -> [1]"""
        score = logits[self.true_token_id : self.true_token_id + 1]
        return score if self.false_token_id is None else score - logits[self.false_token_id]


@dataclass(frozen=True)
class AsMessages:
    """Texts are written as a conversation by the chat template: the prompt is the system's message."""

    parts: bool = False
    """The template reads content as a list of parts"""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, with `add_generation_prompt` and `continue_final_message`"""
    keep_end: bool = True
    """A text that is cut ends as the template ends texts"""


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """Settings of embedding and scoring, for calls that do not say otherwise."""

    pooling: Pooling | tuple[Pooling, ...] = "mean"
    """Several: their vectors one after another"""
    layer_weights: tuple[float, ...] = ()
    """If there are any, pooled is the mean of the hidden states before each layer and after the last, so weighted"""
    include_prompt: bool = True
    """Whether the prompt's tokens count in the mean"""
    dense: tuple[Dense | VectorNorm, ...] = ()
    """Projections and norms of the pooled vector, in order"""
    normalize: bool = False
    max_tokens: int | None = None
    """The longest text in tokens; None: the model's context"""
    lowercase: bool = False
    special_tokens: bool = True
    """Whether the tokenizer's special tokens stand around a text"""
    strip: bool = False
    """Remove white space around each text, as sentence-transformers does"""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Text that goes before each text, by name: "query", "document" """
    default_prompt: str | None = None
    """The name of the one that is used if none is asked for"""
    truncate_dim: int | None = None
    """Only so many leading numbers of each vector, cut after all other steps"""
    similarity: Similarity = "cosine"
    messages: AsMessages | None = None
    """None: texts are read as they are"""
    logit_score: LogitScore | None = None
    """The two tokens that a causal LM reranks by"""
    rerank_prompt: "RerankPrompt | None" = None
    """The prompt that it reads a query and a document in; None: as a pair of the tokenizer's or the template's"""
    score_function: ScoreFunction | None = None
    """The function of a cross-encoder's logits; None: the one of the model's configuration"""
    late: "LateInteraction | None" = None
    """Tokens have vectors, and texts have none"""
    sparse: "SparsePooling | None" = None
    """A text's vector has a weight for each token of the vocabulary"""
    refused: str = ""
    """Why texts are neither embedded nor scored, where the checkpoint asks for what minillm does not run"""

    def check(self) -> None:
        """Refuse to embed or to score texts.

        Raises:
            UnsupportedModelError: the checkpoint asks for what minillm does not run.
        """
        if self.refused:
            raise UnsupportedModelError(self.refused)

    def labels(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the labels that texts are scored for, if any. `own`: the labels of the model's head."""
        return own if self.logit_score is None else ("LABEL_0",)

    def prompt_text(self, prompt: str | None, name: str | None) -> str:
        """The prompt of a call: the given one, the one of a name, or the default.

        Raises:
            ParameterError: both are given, or there is none of this name.
        """
        if prompt is not None and name is not None:
            raise ParameterError("prompt and prompt_name both say what goes before a text: leave one out")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise ParameterError(f"prompt should be text, found {shown(prompt)}")
            return prompt
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.prompts:
            known = (
                f"expected one of {listed(self.prompts)}" if self.prompts else "the checkpoint names none: give prompt"
            )
            raise ParameterError(f"prompt_name {shown(name)} is not known: {known}")
        return self.prompts[name]

    def finished(
        self, vectors: NDArray[np.float32], *, normalize: bool | None, dimensions: int | None
    ) -> NDArray[np.float32]:
        """The steps after pooling: projections, the first `dimensions` of the result, normalisation. [N, E] -> [N, W]

        Fewer dimensions than the model's suit models trained for it (Kusupati et al., "Matryoshka representation
        learning", arXiv 2205.13147). Vectors are cut to the checkpoint's `truncate_dim` after its normalisation, as in
        sentence-transformers, so that such vectors have a length of 1 only if the call asks for it.

        Raises:
            ParameterError: the vectors have no so many dimensions.
        """
        for dense in self.dense:
            vectors = dense(vectors)
        if dimensions is not None:
            if dimensions > vectors.shape[-1]:
                raise ParameterError(f"dimensions should be at most {vectors.shape[-1]}, found {dimensions}")
            vectors = vectors[..., :dimensions]
        if self.normalize if normalize is None else normalize:
            vectors = normalized(vectors)
        if dimensions is None and self.truncate_dim is not None:
            vectors = vectors[..., : self.truncate_dim]
            if normalize:
                vectors = normalized(vectors)
        return np.ascontiguousarray(vectors, np.float32)

    def compare(self, a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
        """How alike two vectors are, by `similarity`; the larger the more. [W], [W]"""
        match self.similarity:
            case "cosine":
                return float(np.dot(normalized(a), normalized(b)))
            case "dot":
                return float(np.dot(a, b))
            case "euclidean":
                return -float(np.linalg.norm(a - b))
            case "manhattan":
                return -float(np.abs(a - b).sum())


def normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors divided by their lengths. [..., W] -> [..., W]"""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12)), np.float32)


def pooled(hidden: NDArray[np.float32], pooling: Pooling, skipped: int = 0) -> NDArray[np.float32]:
    """One vector of a text's hidden states; `skipped` leading ones do not count. [T, E] -> [E]

    Source: sentence-transformers 6.2, `sentence_transformer/modules/pooling.py`.
    """
    states = hidden[skipped:]
    match pooling:
        case "mean":
            return np.asarray(states.mean(axis=0))
        case "cls":
            return np.asarray(states[0])
        case "last":
            return np.asarray(states[-1])
        case "max":
            return np.asarray(states.max(axis=0))
        case "mean_sqrt_len":
            return np.asarray(states.sum(axis=0) / np.float32(len(states) ** 0.5))
        case "weightedmean":
            weights = np.arange(1 + skipped, 1 + len(hidden), dtype=np.float32)
            return np.asarray(weights @ states / weights.sum())  # [T] x [T, E] -> [E]
