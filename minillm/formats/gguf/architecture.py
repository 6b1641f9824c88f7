"""The form of the entries of `architectures.py`, and the names that several of them share.

Each metadata key (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and each tensor is named beside its name
in the family's published checkpoints (https://github.com/ggml-org/llama.cpp, `src/models` and `conversion`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROTARY_FACTORS = "rope_freqs.weight"
"""Tensor by which rotary frequencies are divided, in Llama 3.1 to 3.3"""
LONGROPE = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
"""The same of LongRoPE -> fields of rotary scaling"""


SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
GROUPED = SIZES | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
EXPERT_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
RMS = GROUPED | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
STATES = {key: name for key, name in SIZES.items() if key != "feed_forward_length"} | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
"""Nemotron-H's, beside what `mamba.py` reads and writes"""
_ABSENT = """
attention.head_count_kv attention.key_length attention.sliding_window attention.layer_norm_rms_epsilon
attention.layer_norm_epsilon expert_count expert_used_count expert_feed_forward_length rope.freq_base
"""
OPTIONAL = frozenset(_ABSENT.split())
"""Keys that may be absent in every architecture"""

SPLIT_ATTENTION = {
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
LLAMA = SPLIT_ATTENTION | {
    "blk.N.ffn_gate": "layers.N.mlp.gate_proj",
    "blk.N.ffn_up": "layers.N.mlp.up_proj",
    "blk.N.ffn_down": "layers.N.mlp.down_proj",
}
POST_NORMED = {name: ours for name, ours in LLAMA.items() if name != "blk.N.ffn_norm"} | {
    "blk.N.post_attention_norm": "layers.N.post_attention_layernorm",
}
"""The norm before the MLP has the name of one behind attention"""
GEMMA = LLAMA | {  # gains of norms are as the model uses them, not less 1 as in checkpoints
    "blk.N.post_attention_norm": "layers.N.post_attention_layernorm",
    "blk.N.ffn_norm": "layers.N.pre_feedforward_layernorm",
    "blk.N.post_ffw_norm": "layers.N.post_feedforward_layernorm",
}
GEMMA_KEYS = RMS | {
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA_OPTIONAL = frozenset({"attention.sliding_window_pattern", "final_logit_softcapping"})
HEAD_NORMS = {
    "blk.N.attn_q_norm": "layers.N.self_attn.q_norm",
    "blk.N.attn_k_norm": "layers.N.self_attn.k_norm",
}
OUTPUT_NORMED = {name: ours for name, ours in LLAMA.items() if name not in ("blk.N.attn_norm", "blk.N.ffn_norm")}
OUTPUT_NORMED |= HEAD_NORMS | {
    "blk.N.post_attention_norm": "layers.N.post_attention_layernorm",
    "blk.N.post_ffw_norm": "layers.N.post_feedforward_layernorm",
}
"""OLMo 2's, whose norms come after attention and MLP"""
EXPERTS = {
    "blk.N.ffn_gate_inp": "layers.N.mlp.gate",
    "blk.N.ffn_gate_exps": "layers.N.mlp.experts.*.gate_proj",
    "blk.N.ffn_up_exps": "layers.N.mlp.experts.*.up_proj",
    "blk.N.ffn_down_exps": "layers.N.mlp.experts.*.down_proj",
}
CONVOLUTIONS = {
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
CONVOLUTION_KEYS = {
    key: name for key, name in GROUPED.items() if not key.startswith(("expert", "attention.sliding"))
} | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
SHARED = {
    "blk.N.ffn_gate_shexp": "layers.N.mlp.shared_experts.gate_proj",
    "blk.N.ffn_up_shexp": "layers.N.mlp.shared_experts.up_proj",
    "blk.N.ffn_down_shexp": "layers.N.mlp.shared_experts.down_proj",
}
MIXTRAL = {
    "blk.N.ffn_gate_inp": "layers.N.block_sparse_moe.gate",
    "blk.N.ffn_gate_exps": "layers.N.block_sparse_moe.experts.*.w1",
    "blk.N.ffn_up_exps": "layers.N.block_sparse_moe.experts.*.w3",
    "blk.N.ffn_down_exps": "layers.N.block_sparse_moe.experts.*.w2",
}
CORRECTED = {"blk.N.exp_probs_b": "layers.N.mlp.gate.e_score_correction_bias"}
LATENT = {name: ours for name, ours in LLAMA.items() if not re.fullmatch(r"blk\.N\.attn_[qkv]", name)} | {
    "blk.N.attn_q_a": "layers.N.self_attn.q_a_proj",
    "blk.N.attn_q_a_norm": "layers.N.self_attn.q_a_layernorm",
    "blk.N.attn_kv_a_norm": "layers.N.self_attn.kv_a_layernorm",
}
"""Beside the projections that `latent.py` reads and writes"""
DELTA_NETS = {name: ours for name, ours in SPLIT_ATTENTION.items() if name not in ("blk.N.attn_q", "blk.N.ffn_norm")}
DELTA_NETS |= HEAD_NORMS | {
    "blk.N.post_attention_norm": "layers.N.post_attention_layernorm",
    "blk.N.ssm_norm": "layers.N.linear_attn.norm",
}
"""Beside what `delta_nets.py` reads and writes"""
_PARTS = {"in": "in_proj", "out": "out_proj", "conv1d": "conv1d"}
GRANITE_EXPERTS = {name: ours.replace("mlp.", "block_sparse_moe.") for name, ours in EXPERTS.items()}
MAMBA = {f"blk.N.ssm_{file}": f"layers.N.mamba.{name}" for file, name in _PARTS.items()}
"""Beside what `mamba.py` reads and writes"""
NEMOTRON = {
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
    **{file: name.replace("mamba", "mixer") for file, name in MAMBA.items()},
}
GATED_EXPERTS = EXPERTS | {name: ours.replace("shared_experts", "shared_expert") for name, ours in SHARED.items()}
GEMMA4 = {
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
ENCODER = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
}
GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
PERMUTED = {"blk.N.attn_q": "num_attention_heads", "blk.N.attn_k": "num_key_value_heads"}
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """llama.cpp's words for a family; Llama's where it has no others."""

    model_type: str
    kin: tuple[str, ...] = ()
    """Further families under the same name"""
    keys: Mapping[str, str] = field(default_factory=lambda: RMS)
    """Metadata key, without the architecture's prefix -> field of config.json"""
    optional: frozenset[str] = frozenset()
    """Keys that may be absent, beside `OPTIONAL`"""
    tensors: Mapping[str, str] = field(default_factory=lambda: LLAMA)
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
    windows_by_layer: bool = False
    """Files say of each layer whether it has a sliding window, which the architecture's `Translation` reads"""
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
