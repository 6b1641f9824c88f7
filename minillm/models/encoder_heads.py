"""Heads that encoders build: labels of a text, labels of its tokens, answers in it, and masked tokens.

    token labels, starts and ends of answers    logits = x W_out + b                        of each token
    masked tokens                               logits = norm(activation(x W_dense + b)) W_vocab + b

W_vocab is the token embedding unless config.json unties it; its bias is the head's own. What stands before the labels
of a whole text differs in each family.

Source: transformers 5.23, `BertForTokenClassification`, `BertForQuestionAnswering`, `BertForMaskedLM` and their like.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..backends.weights import Weight
from ..config import ModelConfig
from ..layers.encoder_head import ClassificationHead, Head, NoHead
from ..layers.norm import Norm
from .parameters import Weights

OF_TOKENS = {"token_labels": "classifier", "spans": "qa_outputs"}
"""Results for each token -> the name of their matrix in encoders"""


@dataclass(frozen=True)
class MaskedNames:
    """Names of a masked language model's head in a family's checkpoints."""

    dense: str
    norm: str
    out: str
    """W_vocab, where it is not the embedding"""
    bias: str
    """The bias where it is"""


BERT_MASKED = MaskedNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
ROBERTA_MASKED = MaskedNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


def token_table(config: ModelConfig, weights: Weights, name: str, width: int, bias: str | None) -> Weight:
    """The token embedding [V, W], with the bias of this name if the model's masked head multiplies by it."""
    V = config.vocab_size
    if bias is None or not (config.fills_masks and config.tied_head):
        return weights.table(name, V, width, "vocabulary")
    return weights.table(name, V, width, "vocabulary", bias=bias, published=(V,))


def masked_head(
    config: ModelConfig,
    weights: Weights,
    tokens: Weight,
    names: MaskedNames,
    *,
    width: int,
    activation: str,
    norm: Callable[[str, int], Norm],
    dense_bias: bool = True,
    out_bias: bool = True,
) -> ClassificationHead:
    """The head of masked tokens.

    Args:
        config: the model's
        weights: the model's, from its root
        tokens: the embedding, by `token_table` [V, W]
        names: of the family
        width: W
        activation: after the projection
        norm: makes a norm of a name and a width
        dense_bias: whether the projection has a bias
        out_bias: whether W_vocab has one
    """
    E, V, W = config.hidden_size, config.vocab_size, width
    out = tokens
    if not config.tied_head:
        bias = f"{names.out}.bias" if out_bias else None
        out = weights.table(names.out, V, W, "vocabulary", bias=bias, published=(V,))
    return ClassificationHead(
        dense=weights.linear(names.dense, W, inputs=E, bias=dense_bias),
        activation=activation,
        norm=norm(names.norm, W),
        weight=out,
    )


def head_of_tokens(config: ModelConfig, weights: Weights, name: str) -> ClassificationHead:
    """A head of labels of each token, or of starts and ends of answers: one matrix of this name."""
    return ClassificationHead(
        weights.linear(name, len(config.labels), inputs=config.hidden_size, bias=True, role="labels")
    )


def encoder_head(config: ModelConfig, weights: Weights, labels: Callable[[], Head], masked: Callable[[], Head]) -> Head:
    """The head that a configuration has: `labels` builds the family's of a text, `masked` that of masked tokens."""
    if config.output == "labels":
        return labels()
    if config.output in OF_TOKENS:
        return head_of_tokens(config, weights, OF_TOKENS[config.output])
    return masked() if config.fills_masks else NoHead()
