"""Small OPT shapes of every variant, for tests that need a model and no checkpoint."""

from typing import Any

BASE: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 40,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm": BASE,
    "post-norm": BASE | {"do_layer_norm_before": False},
    "narrow embedding": BASE | {"word_embed_proj_dim": 10, "do_layer_norm_before": False},
    "narrow embedding, pre-norm": BASE | {"word_embed_proj_dim": 10},
    "no final norm": BASE | {"_remove_final_layer_norm": True},
    "no biases": BASE | {"enable_bias": False},
    "gelu": BASE | {"activation_function": "gelu"},
    "no affine": BASE | {"layer_norm_elementwise_affine": False},
    "untied": BASE | {"tie_word_embeddings": False},
    "galactica": BASE | {"enable_bias": False, "activation_function": "gelu", "layer_norm_elementwise_affine": False},
}
