"""Tiny encoders of every family, with and without a head of labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minillm.backends.operations import Backend
from minillm.batch import TokenSequence
from minillm.cache import PagedCache
from minillm.models.base import Model
from minillm.runner.runner import Runner

BERT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ROBERTA = BERT | {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}

MODERN = BERT | {
    "model_type": "modernbert",
    "max_position_embeddings": 96,
    "local_attention": 8,
    "num_hidden_layers": 4,
    "hidden_activation": "gelu",
}

DEBERTA = BERT | {
    "model_type": "deberta-v2",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
}
V3 = {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": BERT | {"model_type": "bert"},
    "bert, pairs": BERT
    | {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_act": "gelu_new"}
    | {"id2label": {"0": "no", "1": "yes", "2": "maybe"}, "num_attention_heads": 2},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": 96,
        "dim": 32,
        "hidden_dim": 40,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "architectures": ["DistilBertForSequenceClassification"],
    },
    "roberta": ROBERTA
    | {"model_type": "roberta", "architectures": ["RobertaForSequenceClassification"], "num_labels": 1},
    "xlm-roberta": ROBERTA | {"model_type": "xlm-roberta", "hidden_act": "relu", "layer_norm_eps": 1e-3},
    "camembert": ROBERTA | {"model_type": "camembert", "pad_token_id": 3},
    "mpnet": ROBERTA | {"model_type": "mpnet", "num_attention_heads": 2},
    "mpnet, labels": ROBERTA | {"model_type": "mpnet", "architectures": ["MPNetForSequenceClassification"]},
    "electra": BERT | {"model_type": "electra", "embedding_size": 16, "num_hidden_layers": 2},
    "electra, labels": BERT
    | {"model_type": "electra", "embedding_size": 32, "num_hidden_layers": 2, "num_labels": 3}
    | {"architectures": ["ElectraForSequenceClassification"], "hidden_act": "gelu_new"},
    "nomic_bert": BERT | {"model_type": "nomic_bert", "num_hidden_layers": 2},
    "nomic_bert, labels": BERT
    | {"model_type": "nomic_bert", "num_hidden_layers": 2, "type_vocab_size": 1, "num_labels": 3, "hidden_act": "gelu"}
    | {"architectures": ["NomicBertForSequenceClassification"]}
    | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "jina_bert_v2": BERT | {"model_type": "jina_bert_v2", "num_hidden_layers": 2},
    "gte": ROBERTA | {"model_type": "gte", "num_hidden_layers": 2, "rope_parameters": {"rope_theta": 1000.0}},
    "gte, labels": BERT
    | {"model_type": "gte", "num_hidden_layers": 2, "type_vocab_size": 0, "num_labels": 1}
    | {"architectures": ["GteForSequenceClassification"], "hidden_act": "silu"},
    "deberta": DEBERTA | {"model_type": "deberta", "position_biased_input": False, "max_relative_positions": 12},
    "deberta, labels": DEBERTA
    | {"model_type": "deberta", "pos_att_type": "p2c", "type_vocab_size": 2, "num_labels": 3}
    | {"architectures": ["DebertaForSequenceClassification"], "pooler_hidden_act": "relu"},
    "deberta-v2": DEBERTA | V3,
    "deberta-v2, labels": DEBERTA
    | V3
    | {"architectures": ["DebertaV2ForSequenceClassification"], "num_labels": 3, "conv_kernel_size": 5},
    "deberta-v2, apart": DEBERTA | {"max_relative_positions": 12, "pos_att_type": "c2p", "type_vocab_size": 2},
    "gemma3_text": BERT
    | {"model_type": "gemma3_text", "use_bidirectional_attention": True, "num_key_value_heads": 1, "head_dim": 8}
    | {"sliding_window": 2, "query_pre_attn_scalar": 8, "architectures": ["Gemma3TextModel"]}  # of 2, half and 1 is 2
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "modernbert": MODERN,
    "modernbert, labels": MODERN
    | {"architectures": ["ModernBertForSequenceClassification"], "global_attn_every_n_layers": 2, "norm_bias": True}
    | {"attention_bias": True, "mlp_bias": True, "classifier_bias": True, "local_attention": 2, "num_labels": 3},
}
"""Name -> config.json"""

OF_TRANSFORMERS = [name for name in CONFIGS if name != "jina_bert_v2"]
"""Those of which transformers has a class"""


def texts(count: int, *, seed: int = 0, longest: int = 50) -> list[list[int]]:
    """Token ids of texts of different lengths, without padding tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 96, rng.integers(2, longest + 1)).tolist() for _ in range(count)]


def runner_over(model: Model, backend: Backend, pages: int = 64) -> Runner:
    """A runner in whose cache the layers of an encoder take turns."""
    return Runner(model, backend, PagedCache(model.config, backend, pages, shared=model.config.bidirectional))


def sequence_of(model: Model, token_ids: Sequence[int]) -> TokenSequence:
    """A text, in a model with two token types a pair whose second begins in the middle."""
    middle, count = len(token_ids) // 2, model.config.token_types
    types = [min(int(i >= middle), count - 1) for i in range(len(token_ids))] if count else []
    return TokenSequence(list(token_ids), types=types)


def states(runner: Runner, ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Results of the head for every token of texts that share a pass. [T, W] each"""
    sequences = [sequence_of(runner.model, each) for each in ids]
    counts = [len(each) for each in ids]
    rows = runner.forward(sequences, counts, rows=range(sum(counts))).logits
    runner.cache.clear()
    return np.split(np.array(rows, np.float32), np.cumsum(counts)[:-1])
