"""The entries of `architectures.py` that have experts in place of an MLP."""

from .architecture import (
    CONVOLUTION_KEYS,
    CONVOLUTIONS,
    CORRECTED,
    DELTA_NETS,
    EXPERT_SIZES,
    EXPERTS,
    GATED_EXPERTS,
    GRANITE,
    GRANITE_EXPERTS,
    HEAD_NORMS,
    LATENT,
    LLAMA,
    MIXTRAL,
    PERMUTED,
    POST_NORMED,
    RMS,
    SHARED,
    SIZES,
    SPLIT_ATTENTION,
    Architecture,
)

EXPERT_ARCHITECTURES = {
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        keys=RMS | {"expert_feed_forward_length": "moe_intermediate_size"},
        tensors=SPLIT_ATTENTION | HEAD_NORMS | EXPERTS,
        flags={"attention_bias": "blk.0.attn_q.bias"},
        fields={"norm_topk_prob": True},
        needs={"qkv_bias": False, "normalised": True, "mixed_layers": False},
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        tensors=SPLIT_ATTENTION | HEAD_NORMS | EXPERTS,
        fields={"norm_topk_prob": False},
        needs={"qkv_bias": False, "normalised": False},
        square=True,
        grouped=False,
        needs_output=True,
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        keys=CONVOLUTION_KEYS
        | {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        tensors=CONVOLUTIONS
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
        keys=RMS
        | {
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window_pattern": "sliding_window_pattern",
        },
        optional=frozenset({"attention.sliding_window_pattern"}),
        tensors={name: ours for name, ours in SPLIT_ATTENTION.items() if name != "blk.N.ffn_norm"}
        | EXPERTS
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
        keys=SIZES | {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"},
        tensors=LATENT | EXPERTS | SHARED | CORRECTED,
        needs={"qkv_bias": False, "out_bias": False, "mlp_bias": False},
        scalings=frozenset({"yarn"}),
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        keys=RMS | EXPERT_SIZES,
        optional=frozenset({"feed_forward_length", "expert_shared_feed_forward_length"}),
        tensors=DELTA_NETS | GATED_EXPERTS,
        fields={"norm_topk_prob": True},
        needs={"qkv_bias": False, "normalised": True},
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        keys=RMS | EXPERT_SIZES,
        optional=frozenset({"feed_forward_length", "expert_shared_feed_forward_length"}),
        tensors=DELTA_NETS | GATED_EXPERTS,
        needs={"qkv_bias": False, "normalised": True},
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        tensors=POST_NORMED | HEAD_NORMS | EXPERTS | SHARED | CORRECTED,
        flags={"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        keys=RMS | EXPERT_SIZES,
        optional=frozenset({"expert_shared_feed_forward_length"}),
        tensors=SPLIT_ATTENTION | GATED_EXPERTS,
        flags={"qkv_bias": "blk.0.attn_q.bias"},
        fields={"norm_topk_prob": False},
        needs={"normalised": False},
        square=True,
        needs_output=True,
    ),
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe",
        keys=RMS | {"expert_feed_forward_length": "moe_intermediate_size"},
        tensors=LLAMA | EXPERTS | SHARED | {"blk.N.exp_probs_b": "layers.N.mlp.moe_statics.e_score_correction_bias"},
        permuted=PERMUTED,
    ),
    "dots1": Architecture(
        model_type="dots1",
        tensors=LLAMA | HEAD_NORMS | EXPERTS | SHARED | CORRECTED,
        needs={"qkv_bias": False},
        grouped=False,
        needs_output=True,
    ),
    "minimax-m2": Architecture(
        model_type="minimax_m2",
        keys=RMS | {"expert_feed_forward_length": "intermediate_size"},
        tensors=SPLIT_ATTENTION
        | HEAD_NORMS
        | MIXTRAL
        | {"blk.N.exp_probs_b": "layers.N.block_sparse_moe.e_score_correction_bias"},
        needs_output=True,
    ),
    "granitemoe": Architecture(
        model_type="granitemoeshared",
        kin=("granitemoe",),
        keys=RMS | GRANITE,
        optional=frozenset({"embedding_scale", "residual_scale", "attention.scale"}),
        tensors=SPLIT_ATTENTION | GRANITE_EXPERTS,
        flags={"attention_bias": "blk.0.attn_q.bias"},
        permuted=PERMUTED,
        scalings=frozenset({"linear", "yarn", "llama3"}),
    ),
    "mistral4": Architecture(
        model_type="mistral4",
        keys=SIZES | {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"},
        tensors=LATENT | EXPERTS | SHARED,
        needs={"qkv_bias": False, "out_bias": False, "mlp_bias": False},
        scalings=frozenset({"yarn"}),
    ),
}
"""By `general.architecture`"""
