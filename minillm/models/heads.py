"""Results of a model besides the next token: heads of texts and of tokens, and models whose hidden states are wanted.

Which head a checkpoint has follows from `architectures` in config.json: `BertForSequenceClassification`,
`LlamaForTokenClassification`. Encoders build their heads themselves (`encoder_heads.py`); the head of a decoder is one
matrix, which takes the place of the LM head in any family. An encoder-decoder classifies a text that both stacks read,
the decoder one token later, by the decoder's hidden state at the last end-of-sequence token:

    logits = tanh(x W_dense + b) W_out + b
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backends.operations import Backend
from ..config import Fields, ModelConfig, Output, ScoreFunction, read_score_function
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.embedding import LMHead
from ..layers.encoder_head import ClassificationHead, Head, NoHead
from .base import Model
from .decoder import Decoder
from .parameters import Build, Weights

CLASSIFIER = "ForSequenceClassification"
MASKED = "ForMaskedLM"
HEADS: Mapping[str, Output] = {
    CLASSIFIER: "labels",
    "ForTokenClassification": "token_labels",
    "ForQuestionAnswering": "spans",
}
"""Endings of architectures, and what their models compute"""
PLAIN = ("Model", MASKED, "ForPreTraining", "LMHeadModel", "ForCausalLM")
"""Endings of an encoder's architecture whose hidden states are read"""
SPAN = ("start", "end")
TWO_STACKS_HEAD = ("classification_head.dense", "classification_head.out_proj")
"""Names of the head of an encoder-decoder that classifies texts"""
DECODER_HEADS = {"labels": ("score", False), "token_labels": ("score", True), "spans": ("qa_outputs", True)}
"""Name of a decoder's head, and whether it has a bias"""
MOST_LABELS = 2**20


def read_head(config: ModelConfig, raw: Mapping[str, Any], *, masked: bool = False) -> ModelConfig:
    """The configuration with what the model computes, from config.json. `masked`: the family fills masked tokens.

    Raises:
        CheckpointError: a field of the classification is invalid.
        UnsupportedModelError: an encoder with another head, such as one that compares choices.
    """
    fields = Fields(raw)
    named = fields.get("architectures", [])
    architecture = named[0] if named and isinstance(named[0], str) else ""
    others = (*(ending for ending in HEADS if ending != CLASSIFIER or config.frame_width), "EncoderModel")
    if config.encoder_layers and architecture.endswith(others):
        raise UnsupportedModelError(
            f"config.json: architectures is {architecture!r:.80}; of this family minillm runs the encoder-decoder that "
            f"generates text{'' if config.frame_width else f', and ...{CLASSIFIER}'}"
        )
    output = next((HEADS[ending] for ending in HEADS if architecture.endswith(ending)), None)
    if output is not None:
        labels = _labels(fields)
        if config.encoder_layers and config.decoder_start_token_id is None and not config.source_wraps:
            raise CheckpointError("config.json: decoder_start_token_id is missing: the decoder's text begins with it")
        if output == "spans":
            if len(labels) != len(SPAN):
                raise CheckpointError(
                    f"config.json: {architecture:.80} should have 2 labels, start and end, found {len(labels)}"
                )
            labels = SPAN
        return replace(
            config,
            output=output,
            labels=labels,
            labels_of_mean=config.labels_of_mean and output == "labels",
            score_function=_score_function(fields, len(labels)) if output == "labels" else "none",
            pad_token_id=fields.token_id("pad_token_id"),
            tied_head=False,
        )
    config = replace(config, labels_of_mean=False)
    if config.bidirectional:
        if architecture and not architecture.endswith(PLAIN):
            *endings, last = (f"...{ending}" for ending in (*HEADS, MASKED))
            raise UnsupportedModelError(
                f"config.json: architectures is {architecture!r:.80}; of this family minillm runs {', '.join(endings)} "
                f"and {last}, and the hidden states alone"
            )
        if masked and architecture.endswith(MASKED):
            tied = fields.get("tie_word_embeddings", True)
            padding = fields.token_id("pad_token_id")
            return replace(config, output="states", fills_masks=True, tied_head=tied, pad_token_id=padding)
        return replace(config, output="states")
    without = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    if without and not config.tied_head and not config.encoder_layers:
        return replace(config, output="states")  # has no LM head
    return config


def _labels(fields: Fields) -> tuple[str, ...]:
    """Names of the labels, by `id2label`, or as many as `num_labels` (2 by default, as in transformers)."""
    named = fields.get("id2label", {})
    if not named:
        return tuple(f"LABEL_{i}" for i in range(fields.size("num_labels", 2, most=MOST_LABELS)))
    if set(named) != {str(i) for i in range(len(named))} or not all(isinstance(label, str) for label in named.values()):
        raise CheckpointError(
            f"{fields.source}: id2label should name the labels 0 to {len(named) - 1}, found {named!r:.80}"
        )
    return tuple(named[str(i)] for i in range(len(named)))


def _score_function(fields: Fields, labels: int) -> ScoreFunction:
    """The function from logits to scores: sentence-transformers' for a reranker, else as in transformers' pipeline."""
    named = read_score_function(fields)
    if named is not None:
        return named
    kinds = ("", "regression", "single_label_classification", "multi_label_classification")
    problem = fields.choice("problem_type", "", kinds)
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"


def builder(build: Build, config: ModelConfig) -> Build:
    """A family's `build` for what a configuration's model computes."""
    if config.output == "tokens":
        return build

    def build_other(config: Any, weights: Weights, backend: Backend) -> Decoder:
        # with a tied head no family asks for another matrix
        model = build(config if config.fills_masks else replace(config, tied_head=True), weights, backend)
        if not isinstance(model.head, LMHead):  # an encoder, which builds its own
            if config.output != "states" and isinstance(model.head, NoHead):
                raise UnsupportedModelError(
                    f"config.json: of the family {config.model_type} minillm runs no head of {config.output}"
                )
            return model
        before, width = model.head.project_out, model.head.weight.shape[1]
        head: Head = NoHead(before)
        if config.encoder_layers:
            dense, out = TWO_STACKS_HEAD
            head = ClassificationHead(
                weights.linear(out, len(config.labels), inputs=width, bias=True, role="labels"),
                dense=weights.linear(dense, width, inputs=width, bias=True),
                activation="tanh",
            )
        elif config.output != "states":
            name, bias = DECODER_HEADS[config.output]
            score = weights.linear(name, len(config.labels), inputs=width, bias=bias, role="labels")
            head = ClassificationHead(score, dense=before)
        return replace(model, config=replace(model.config, tied_head=False), head=head)

    return build_other


def without_head(model: Model) -> Decoder:
    """The same model, whose results are its hidden states after the final norm; weights are shared."""
    assert isinstance(model, Decoder)
    head = model.head
    if isinstance(head, NoHead):
        return model
    before = head.project_out if isinstance(head, LMHead) else None if model.config.bidirectional else head.dense
    return replace(model, head=NoHead(before))
