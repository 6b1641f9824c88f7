"""llama.cpp's names of each family: its metadata keys, its tensors, and what it computes in one way alone.

A family is described once, in its own file. This table says only what llama.cpp calls things: each metadata key
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and each tensor by its name in the family's published
checkpoints; and which configurations of the family llama.cpp runs (https://github.com/ggml-org/llama.cpp, `src/models`
and `conversion`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROTARY_FACTORS = "rope_freqs.weight"
"""Tensor by which rotary frequencies are divided, in Llama 3.1 to 3.3"""
LONGROPE = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
"""The same of LongRoPE -> fields of rotary scaling"""


_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_GROUPED = _SIZES | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_EXPERT_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_RMS = _GROUPED | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_STATES = {key: name for key, name in _SIZES.items() if key != "feed_forward_length"} | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
"""Nemotron-H's, beside what `mamba.py` reads and writes"""
_OPTIONAL = """
attention.head_count_kv attention.key_length attention.sliding_window attention.layer_norm_rms_epsilon
attention.layer_norm_epsilon expert_count expert_used_count expert_feed_forward_length rope.freq_base
"""
OPTIONAL = frozenset(_OPTIONAL.split())
"""Keys that may be absent in every architecture"""

_SPLIT_ATTENTION = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "blk.N.attn_norm": "layers.N.input_layernorm",
    "blk.N.attn_q": "layers.N.self_attn.q_proj",
    "blk.N.attn_k": "layers.N.self_attn.k_proj",
    "blk.N.attn_v": "layers.N.self_attn.v_proj",
    "blk.N.attn_output": "layers.N.self_attn.o_proj",
    "blk.N.ffn_norm": "layers.N.post_attention_layernorm",
}
_LLAMA = _SPLIT_ATTENTION | {
    "blk.N.ffn_gate": "layers.N.mlp.gate_proj",
    "blk.N.ffn_up": "layers.N.mlp.up_proj",
    "blk.N.ffn_down": "layers.N.mlp.down_proj",
}
_GEMMA = _LLAMA | {  # gains of norms are as the model uses them, not less 1 as in checkpoints
    "blk.N.post_attention_norm": "layers.N.post_attention_layernorm",
    "blk.N.ffn_norm": "layers.N.pre_feedforward_layernorm",
    "blk.N.post_ffw_norm": "layers.N.post_feedforward_layernorm",
}
_GEMMA_KEYS = _RMS | {
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GEMMA_OPTIONAL = frozenset({"attention.sliding_window_pattern", "final_logit_softcapping"})
_HEAD_NORMS = {
    "blk.N.attn_q_norm": "layers.N.self_attn.q_norm",
    "blk.N.attn_k_norm": "layers.N.self_attn.k_norm",
}
_EXPERTS = {
    "blk.N.ffn_gate_inp": "layers.N.mlp.gate",
    "blk.N.ffn_gate_exps": "layers.N.mlp.experts.*.gate_proj",
    "blk.N.ffn_up_exps": "layers.N.mlp.experts.*.up_proj",
    "blk.N.ffn_down_exps": "layers.N.mlp.experts.*.down_proj",
}
_CONVOLUTIONS = {
    "token_embd": "embed_tokens",
    "token_embd_norm": "embedding_norm",
    "output": "lm_head",
    "blk.N.attn_norm": "layers.N.operator_norm",
    "blk.N.attn_q": "layers.N.self_attn.q_proj",
    "blk.N.attn_k": "layers.N.self_attn.k_proj",
    "blk.N.attn_v": "layers.N.self_attn.v_proj",
    "blk.N.attn_q_norm": "layers.N.self_attn.q_layernorm",
    "blk.N.attn_k_norm": "layers.N.self_attn.k_layernorm",
    "blk.N.attn_output": "layers.N.self_attn.out_proj",
    "blk.N.shortconv.in_proj": "layers.N.conv.in_proj",
    "blk.N.shortconv.conv": "layers.N.conv.conv",
    "blk.N.shortconv.out_proj": "layers.N.conv.out_proj",
    "blk.N.ffn_norm": "layers.N.ffn_norm",
    "blk.N.ffn_gate": "layers.N.feed_forward.w1",
    "blk.N.ffn_up": "layers.N.feed_forward.w3",
    "blk.N.ffn_down": "layers.N.feed_forward.w2",
}
_CONVOLUTION_KEYS = {
    key: name for key, name in _GROUPED.items() if not key.startswith(("expert", "attention.sliding"))
} | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
_SHARED = {
    "blk.N.ffn_gate_shexp": "layers.N.mlp.shared_experts.gate_proj",
    "blk.N.ffn_up_shexp": "layers.N.mlp.shared_experts.up_proj",
    "blk.N.ffn_down_shexp": "layers.N.mlp.shared_experts.down_proj",
}
_LATENT = {name: ours for name, ours in _LLAMA.items() if not re.fullmatch(r"blk\.N\.attn_[qkv]", name)} | {
    "blk.N.attn_q_a": "layers.N.self_attn.q_a_proj",
    "blk.N.attn_q_a_norm": "layers.N.self_attn.q_a_layernorm",
    "blk.N.attn_kv_a_norm": "layers.N.self_attn.kv_a_layernorm",
}
"""Beside the projections that `latent.py` reads and writes"""
_DELTA_NETS = {name: ours for name, ours in _SPLIT_ATTENTION.items() if name not in ("blk.N.attn_q", "blk.N.ffn_norm")}
_DELTA_NETS |= _HEAD_NORMS | {
    "blk.N.post_attention_norm": "layers.N.post_attention_layernorm",
    "blk.N.ssm_norm": "layers.N.linear_attn.norm",
}
"""Beside what `delta_nets.py` reads and writes"""
_PARTS = {"in": "in_proj", "out": "out_proj", "conv1d": "conv1d"}
_MAMBA = {f"blk.N.ssm_{file}": f"layers.N.mamba.{name}" for file, name in _PARTS.items()}
"""Beside what `mamba.py` reads and writes"""
_NEMOTRON = {
    "token_embd": "embeddings",
    "output_norm": "norm_f",
    "output": "lm_head",
    "blk.N.attn_norm": "layers.N.norm",
    "blk.N.attn_q": "layers.N.mixer.q_proj",
    "blk.N.attn_k": "layers.N.mixer.k_proj",
    "blk.N.attn_v": "layers.N.mixer.v_proj",
    "blk.N.attn_output": "layers.N.mixer.o_proj",
    "blk.N.ffn_up": "layers.N.mixer.up_proj",
    "blk.N.ffn_down": "layers.N.mixer.down_proj",
    "blk.N.ffn_gate_inp": "layers.N.mixer.gate",
    "blk.N.exp_probs_b": "layers.N.mixer.gate.e_score_correction_bias",
    "blk.N.ffn_up_exps": "layers.N.mixer.experts.*.up_proj",
    "blk.N.ffn_down_exps": "layers.N.mixer.experts.*.down_proj",
    "blk.N.ffn_up_shexp": "layers.N.mixer.shared_experts.up_proj",
    "blk.N.ffn_down_shexp": "layers.N.mixer.shared_experts.down_proj",
    **{file: name.replace("mamba", "mixer") for file, name in _MAMBA.items()},
}
_GATED_EXPERTS = _EXPERTS | {name: ours.replace("shared_experts", "shared_expert") for name, ours in _SHARED.items()}
_GEMMA4 = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
    "blk.N.inp_gate": "layers.N.per_layer_input_gate",
    "blk.N.proj": "layers.N.per_layer_projection",
    "blk.N.post_norm": "layers.N.post_per_layer_input_norm",
    "blk.N.layer_output_scale": "layers.N.layer_scalar",
    "blk.N.ffn_gate_inp": "layers.N.router.proj",
    "blk.N.ffn_gate_up_exps": "layers.N.experts.*.gate_up_proj",
    "blk.N.ffn_down_exps": "layers.N.experts.*.down_proj",
    "blk.N.post_ffw_norm_1": "layers.N.post_feedforward_layernorm_1",
    "blk.N.pre_ffw_norm_2": "layers.N.pre_feedforward_layernorm_2",
    "blk.N.post_ffw_norm_2": "layers.N.post_feedforward_layernorm_2",
}
_ENCODER = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
}
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
_PERMUTED = {"blk.N.attn_q": "num_attention_heads", "blk.N.attn_k": "num_key_value_heads"}
_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """llama.cpp's words for a family; Llama's where it has no others."""

    model_type: str
    kin: tuple[str, ...] = ()
    """Further families under the same name"""
    keys: Mapping[str, str] = field(default_factory=lambda: _RMS)
    """Metadata key, without the architecture's prefix -> field of config.json"""
    optional: frozenset[str] = frozenset()
    """Keys that may be absent, beside `OPTIONAL`"""
    tensors: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    """Tensor in the file -> in a checkpoint, without ".weight" and ".bias"; N is the number of the layer, and * of
    an expert: the file has all experts' matrices as one tensor [X, out, in]"""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Field of config.json that says whether a tensor is there -> the tensor in the file"""
    permuted: Mapping[str, str] = field(default_factory=dict)
    """Tensors whose rows are in llama.cpp's rotary order -> the field with their number of heads"""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that files do not say: what llama.cpp computes"""
    activation: str = "silu"
    """The family's own, which files do not name; llama.cpp takes the approximation by tanh for every GELU"""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Attribute of the configuration -> the one value that llama.cpp runs"""
    capped: tuple[str, ...] = ()
    """Attributes of the configuration that have to be there"""
    square: bool = False
    """All heads together are as wide as the model"""
    grouped: bool = True
    """Query heads may share keys and values"""
    scalings: frozenset[str] = frozenset({"linear", "yarn"})
    """Kinds of rotary scaling that llama.cpp runs"""
    unrotated: int | None = None
    """Every which layer has no rotary embedding; None: all have"""
    says_rotation: bool = False
    """Files say whether layers have rotary embedding"""
    with_experts: str = ""
    """The name of the architecture where such models have experts; empty: the same"""
    period: int | None = None
    """Every which layer has no sliding window, unless the file says it; None: windows are not run"""
    shared_scale: int | None = None
    """Layers of the one size whose scores are divided by the root of E / H, not of D; files do not say so"""
    whole_ramp: bool = True
    """YaRN's ramp begins and ends at whole pairs, as in llama.cpp; False: not here, though files do not say so"""
    convolves: bool = False
    """Layers without key/value heads, whose number files have for each layer, have a convolution"""
    bidirectional: bool = False
    """An encoder: each token attends to all of its text"""
    needs_output: bool = False
    """The LM head is stored also where it is the embedding"""


ARCHITECTURES = {
    "bert": Architecture(
        model_type="bert",
        keys=_SIZES | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        tensors=_ENCODER
        | {
            "position_embd": "embeddings.position_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
            "blk.N.attn_q": "encoder.layer.N.attention.self.query",
            "blk.N.attn_k": "encoder.layer.N.attention.self.key",
            "blk.N.attn_v": "encoder.layer.N.attention.self.value",
            "blk.N.attn_output": "encoder.layer.N.attention.output.dense",
            "blk.N.attn_output_norm": "encoder.layer.N.attention.output.LayerNorm",
            "blk.N.ffn_up": "encoder.layer.N.intermediate.dense",
            "blk.N.ffn_down": "encoder.layer.N.output.dense",
            "blk.N.layer_output_norm": "encoder.layer.N.output.LayerNorm",
        },
        activation="gelu",
        bidirectional=True,
    ),
    "nomic-bert": Architecture(
        model_type="nomic_bert",
        keys=_SIZES | {"attention.layer_norm_epsilon": "layer_norm_eps", "rope.freq_base": "rope_theta"},
        tensors=_ENCODER
        | {
            "token_embd_norm": "emb_ln",
            "blk.N.attn_qkv": "encoder.layers.N.attn.Wqkv",
            "blk.N.attn_output": "encoder.layers.N.attn.out_proj",
            "blk.N.attn_output_norm": "encoder.layers.N.norm1",
            "blk.N.ffn_up": "encoder.layers.N.mlp.fc11",
            "blk.N.ffn_gate": "encoder.layers.N.mlp.fc12",
            "blk.N.ffn_down": "encoder.layers.N.mlp.fc2",
            "blk.N.layer_output_norm": "encoder.layers.N.norm2",
        },
        square=True,
        bidirectional=True,
    ),
    "modern-bert": Architecture(
        model_type="modernbert",
        keys=_SIZES
        | {
            "attention.layer_norm_epsilon": "norm_eps",
            "attention.sliding_window": "local_attention",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
            "hidden_activation": "hidden_activation",
            "rope.freq_base": "global_rope_theta",
            "rope.freq_base_swa": "local_rope_theta",
        },
        optional=frozenset({"attention.sliding_window_pattern", "hidden_activation", "rope.freq_base_swa"}),
        tensors={
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
            "blk.N.attn_norm": "layers.N.attn_norm",
            "blk.N.attn_qkv": "layers.N.attn.Wqkv",
            "blk.N.attn_output": "layers.N.attn.Wo",
            "blk.N.ffn_norm": "layers.N.mlp_norm",
            "blk.N.ffn_up": "layers.N.mlp.Wi",
            "blk.N.ffn_down": "layers.N.mlp.Wo",
        },
        activation="gelu",
        needs={"attention_bias": False, "mlp_bias": False, "norm_bias": False},
        square=True,
        bidirectional=True,
    ),
    "gemma-embedding": Architecture(
        model_type="gemma3_text",
        keys=_GEMMA_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"},
        optional=_GEMMA_OPTIONAL | {"rope.freq_base_swa"},
        tensors=_GEMMA | _HEAD_NORMS,
        fields={"use_bidirectional_attention": True},
        activation="gelu_new",
        needs={"bias": False},
        scalings=frozenset({"linear"}),
        period=6,
        bidirectional=True,
    ),
    "llama": Architecture(
        model_type="llama",
        kin=("mistral", "mixtral"),
        tensors=_LLAMA
        | {
            "blk.N.ffn_gate_inp": "layers.N.block_sparse_moe.gate",
            "blk.N.ffn_gate_exps": "layers.N.block_sparse_moe.experts.*.w1",
            "blk.N.ffn_up_exps": "layers.N.block_sparse_moe.experts.*.w3",
            "blk.N.ffn_down_exps": "layers.N.block_sparse_moe.experts.*.w2",
        },
        flags=_BIASES,
        permuted=_PERMUTED,
        scalings=frozenset({"linear", "yarn", "llama3"}),
    ),
    "qwen2": Architecture(model_type="qwen2", square=True),
    "qwen3": Architecture(
        model_type="qwen3",
        tensors=_LLAMA | _HEAD_NORMS,
        flags={"attention_bias": "blk.0.attn_q.bias"},
        needs={"qkv_bias": False},
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        keys=_GROUPED | {"attention.layer_norm_epsilon": "norm_epsilon"},
        tensors=_SPLIT_ATTENTION | {"blk.N.ffn_up": "layers.N.mlp.c_fc", "blk.N.ffn_down": "layers.N.mlp.c_proj"},
        flags={"use_bias": "blk.0.ffn_up.bias"},
        activation="gelu_new",
        needs={"biases": True},
        square=True,
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        keys=_SIZES | {"feed_forward_length": "n_inner", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        tensors={
            "token_embd": "wte",
            "position_embd": "wpe",
            "output_norm": "ln_f",
            "output": "lm_head",
            "blk.N.attn_norm": "h.N.ln_1",
            "blk.N.attn_qkv": "h.N.attn.c_attn",
            "blk.N.attn_output": "h.N.attn.c_proj",
            "blk.N.ffn_norm": "h.N.ln_2",
            "blk.N.ffn_up": "h.N.mlp.c_fc",
            "blk.N.ffn_down": "h.N.mlp.c_proj",
        },
        activation="gelu_new",
    ),
    "gptneox": Architecture(
        model_type="gpt_neox",
        keys=_SIZES
        | {
            "rope.freq_base": "rotary_emb_base",
            "use_parallel_residual": "use_parallel_residual",
            "attention.layer_norm_epsilon": "layer_norm_eps",
        },
        optional=frozenset({"use_parallel_residual"}),
        tensors={
            "token_embd": "embed_in",
            "output_norm": "final_layer_norm",
            "output": "embed_out",
            "blk.N.attn_norm": "layers.N.input_layernorm",
            "blk.N.attn_qkv": "layers.N.attention.query_key_value",
            "blk.N.attn_output": "layers.N.attention.dense",
            "blk.N.ffn_norm": "layers.N.post_attention_layernorm",
            "blk.N.ffn_up": "layers.N.mlp.dense_h_to_4h",
            "blk.N.ffn_down": "layers.N.mlp.dense_4h_to_h",
        },
        flags={"attention_bias": "blk.0.attn_qkv.bias"},
        activation="gelu",
        needs={"attention_bias": True},
        needs_output=True,
    ),
    "bloom": Architecture(
        model_type="bloom",
        keys=_SIZES | {"context_length": "seq_length", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        tensors={
            "token_embd": "word_embeddings",
            "token_embd_norm": "word_embeddings_layernorm",
            "output_norm": "ln_f",
            "output": "lm_head",
            "blk.N.attn_norm": "h.N.input_layernorm",
            "blk.N.attn_qkv": "h.N.self_attention.query_key_value",
            "blk.N.attn_output": "h.N.self_attention.dense",
            "blk.N.ffn_norm": "h.N.post_attention_layernorm",
            "blk.N.ffn_up": "h.N.mlp.dense_h_to_4h",
            "blk.N.ffn_down": "h.N.mlp.dense_4h_to_h",
        },
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        keys=_GEMMA_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"},
        optional=_GEMMA_OPTIONAL | {"attn_logit_softcapping"},
        tensors=_GEMMA,
        activation="gelu_new",
        needs={"bias": False, "tied_head": True},
        capped=("score_cap", "logit_cap"),
        scalings=frozenset({"linear"}),
        period=2,
        shared_scale=46,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        keys=_GEMMA_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"},
        optional=_GEMMA_OPTIONAL | {"rope.freq_base_swa"},
        tensors=_GEMMA | _HEAD_NORMS,
        activation="gelu_new",
        needs={"bias": False},
        scalings=frozenset({"linear"}),
        period=6,
        shared_scale=62,
    ),
    "gemma": Architecture(
        model_type="gemma",
        activation="gelu_new",
        needs={"bias": False, "tied_head": True},
    ),
    "seed_oss": Architecture(
        model_type="seed_oss",
        tensors={name: ours for name, ours in _LLAMA.items() if name != "blk.N.ffn_norm"}
        | {"blk.N.post_attention_norm": "layers.N.post_attention_layernorm"},
        flags={"attention_bias": "blk.0.attn_q.bias"},
        needs={"out_bias": False, "mlp_bias": False},
    ),
    "ernie4_5": Architecture(model_type="ernie4_5", permuted=_PERMUTED, needs={"qkv_bias": False}),
    "stablelm": Architecture(
        model_type="stablelm",
        keys=_GROUPED
        | {
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        optional=frozenset({"use_parallel_residual"}),
        flags={"use_qkv_bias": "blk.0.attn_q.bias"},
        square=True,
        needs_output=True,
    ),
    "command-r": Architecture(
        model_type="cohere",
        keys=_GROUPED | {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        tensors={name: ours for name, ours in _LLAMA.items() if name != "blk.N.ffn_norm"},
        permuted=_PERMUTED,
        needs={"bias": False, "tied_head": True},
        square=True,
    ),
    "cohere2": Architecture(
        model_type="cohere2",
        keys=_GROUPED | {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        tensors={name: ours for name, ours in _LLAMA.items() if name != "blk.N.ffn_norm"},
        permuted=_PERMUTED,
        needs={"bias": False, "tied_head": True},
        square=True,
        unrotated=4,
        period=4,
    ),
    "hunyuan-dense": Architecture(
        model_type="hunyuan_v1_dense",
        tensors=_LLAMA | _HEAD_NORMS,
        needs={"qkv_bias": False},
    ),
    "phi2": Architecture(
        model_type="phi",
        keys=_GROUPED | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        tensors={
            "token_embd": "embed_tokens",
            "output_norm": "final_layernorm",
            "output": "lm_head",
            "blk.N.attn_norm": "layers.N.input_layernorm",
            "blk.N.attn_q": "layers.N.self_attn.q_proj",
            "blk.N.attn_k": "layers.N.self_attn.k_proj",
            "blk.N.attn_v": "layers.N.self_attn.v_proj",
            "blk.N.attn_output": "layers.N.self_attn.dense",
            "blk.N.ffn_up": "layers.N.mlp.fc1",
            "blk.N.ffn_down": "layers.N.mlp.fc2",
        },
        activation="gelu_new",
        needs={"tied_head": False},
        square=True,
    ),
    "phi3": Architecture(
        model_type="phi3",
        keys=_RMS | {"rope.scaling.original_context_length": "original_max_position_embeddings"},
        optional=frozenset({"rope.scaling.original_context_length"}),
        tensors={
            "token_embd": "embed_tokens",
            "output_norm": "norm",
            "output": "lm_head",
            "blk.N.attn_norm": "layers.N.input_layernorm",
            "blk.N.attn_qkv": "layers.N.self_attn.qkv_proj",
            "blk.N.attn_output": "layers.N.self_attn.o_proj",
            "blk.N.ffn_norm": "layers.N.post_attention_layernorm",
            "blk.N.ffn_up": "layers.N.mlp.gate_up_proj",
            "blk.N.ffn_down": "layers.N.mlp.down_proj",
        },
        square=True,
        scalings=frozenset({"longrope"}),
    ),
    "smollm3": Architecture(
        model_type="smollm3",
        permuted=_PERMUTED,
        needs={"qkv_bias": False, "mlp_bias": False},
        unrotated=4,
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        tensors={name: ours for name, ours in _LLAMA.items() if name not in ("blk.N.attn_norm", "blk.N.ffn_norm")}
        | _HEAD_NORMS
        | {
            "blk.N.post_attention_norm": "layers.N.post_attention_layernorm",
            "blk.N.post_ffw_norm": "layers.N.post_feedforward_layernorm",
        },
        needs={"bias": False},
        square=True,
        needs_output=True,
    ),
    "granite": Architecture(
        model_type="granite",
        keys=_RMS | _GRANITE,
        optional=frozenset({"embedding_scale", "residual_scale", "attention.scale"}),
        flags=_BIASES,
        permuted=_PERMUTED,
        scalings=frozenset({"linear", "yarn", "llama3"}),
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        keys=_RMS | {"expert_feed_forward_length": "moe_intermediate_size"},
        tensors=_SPLIT_ATTENTION | _HEAD_NORMS | _EXPERTS,
        flags={"attention_bias": "blk.0.attn_q.bias"},
        fields={"norm_topk_prob": True},
        needs={"qkv_bias": False, "normalised": True, "mixed_layers": False},
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        tensors=_SPLIT_ATTENTION | _HEAD_NORMS | _EXPERTS,
        fields={"norm_topk_prob": False},
        needs={"qkv_bias": False, "normalised": False},
        square=True,
        grouped=False,
        needs_output=True,
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        keys=_CONVOLUTION_KEYS,
        tensors=_CONVOLUTIONS,
        fields={"block_auto_adjust_ff_dim": False},
        needs={"conv_bias": False},
        square=True,
        convolves=True,
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        keys=_CONVOLUTION_KEYS
        | {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        tensors=_CONVOLUTIONS
        | {
            "blk.N.ffn_gate_inp": "layers.N.feed_forward.gate",
            "blk.N.ffn_gate_exps": "layers.N.feed_forward.experts.*.w1",
            "blk.N.ffn_up_exps": "layers.N.feed_forward.experts.*.w3",
            "blk.N.ffn_down_exps": "layers.N.feed_forward.experts.*.w2",
            "blk.N.exp_probs_b": "layers.N.feed_forward.expert_bias",
        },
        needs={"conv_bias": False, "normalised": True, "corrected": True},
        square=True,
        convolves=True,
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        keys=_RMS
        | {
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window_pattern": "sliding_window_pattern",
        },
        optional=frozenset({"attention.sliding_window_pattern"}),
        tensors={name: ours for name, ours in _SPLIT_ATTENTION.items() if name != "blk.N.ffn_norm"}
        | _EXPERTS
        | {
            "blk.N.attn_sinks": "layers.N.self_attn.sinks",
            "blk.N.post_attention_norm": "layers.N.post_attention_layernorm",
            "blk.N.ffn_gate_inp": "layers.N.mlp.router",
        },
        activation="swiglu_oai",
        needs={"qkv_bias": True},
        scalings=frozenset({"yarn"}),
        period=2,
        needs_output=True,
        whole_ramp=False,
    ),
    "deepseek2": Architecture(
        model_type="deepseek_v3",
        kin=("deepseek_v2", "glm4_moe_lite", "youtu"),
        keys=_SIZES | {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"},
        tensors=_LATENT | _EXPERTS | _SHARED | {"blk.N.exp_probs_b": "layers.N.mlp.gate.e_score_correction_bias"},
        needs={"qkv_bias": False, "out_bias": False, "mlp_bias": False},
        scalings=frozenset({"yarn"}),
    ),
    "minicpm3": Architecture(
        model_type="minicpm3",
        keys=_SIZES
        | {
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
            "rope.freq_base": "rope_theta",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        optional=frozenset({"rope.scaling.original_context_length"}),
        tensors=_LATENT,
        needs={"qkv_bias": False, "out_bias": False, "mlp_bias": False},
        scalings=frozenset({"longrope"}),
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        keys={key: name for key, name in _SIZES.items() if key != "feed_forward_length"}
        | {
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
            "rope.freq_base": "rope_theta",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        optional=frozenset({"rope.freq_base_swa"}),
        tensors=_GEMMA | _HEAD_NORMS | _GEMMA4,
        activation="gelu_new",
        needs={"bias": False},
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        keys=_RMS | _EXPERT_SIZES,
        optional=frozenset({"feed_forward_length", "expert_shared_feed_forward_length"}),
        tensors=_DELTA_NETS | _GATED_EXPERTS,
        fields={"norm_topk_prob": True},
        needs={"qkv_bias": False, "normalised": True},
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        tensors=_DELTA_NETS
        | {name: ours for name, ours in _LLAMA.items() if name.startswith("blk.N.ffn_") and "norm" not in name},
        needs={"qkv_bias": False},
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        keys=_RMS | _EXPERT_SIZES,
        optional=frozenset({"feed_forward_length", "expert_shared_feed_forward_length"}),
        tensors=_DELTA_NETS | _GATED_EXPERTS,
        needs={"qkv_bias": False, "normalised": True},
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        keys=_RMS | _GRANITE,
        optional=frozenset(_GRANITE),
        tensors=_SPLIT_ATTENTION
        | _MAMBA
        | {name: ours.replace("mlp.", "block_sparse_moe.") for name, ours in _EXPERTS.items()},
        permuted=_PERMUTED,
        needs={"qkv_bias": False, "out_bias": False},
        says_rotation=True,
    ),
    "nemotron_h": Architecture(
        model_type="nemotron_h",
        keys=_STATES,
        tensors=_NEMOTRON,
        activation="relu2",
        with_experts="nemotron_h_moe",
    ),
    "nemotron_h_moe": Architecture(model_type="nemotron_h", keys=_STATES, tensors=_NEMOTRON, activation="relu2"),
    "falcon-h1": Architecture(
        model_type="falcon_h1",
        tensors=_LLAMA | _MAMBA,
        needs={"qkv_bias": False, "out_bias": False, "mlp_bias": False},
    ),
}
"""By `general.architecture`. To add a family, add its entry."""
