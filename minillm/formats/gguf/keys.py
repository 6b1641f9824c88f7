"""The metadata keys of a model: honoured, without effect, refused, or named.

Every key under the architecture's name that llama.cpp knows (`src/llama-arch.cpp`, `LLM_KV_NAMES`; read in
`src/llama-model.cpp`, `load_hparams`, and in `src/models`) is one of

- honoured: a field of config.json, by `Architecture.keys` and by `read_metadata.py` (`HONOURED`);
- without effect on what is computed (`WITHOUT_EFFECT`);
- computed in one way alone (`_computed`): another value is refused;
- any other: named in one warning.

`tokenizer.py` does the same for the tokenizer's keys, `model.py` for sampling's.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from ...errors import UnsupportedModelError, listed
from .architecture import Architecture
from .architectures import ARCHITECTURES
from .file import GGUF, Array
from .translations import translation_of

logger = logging.getLogger("minillm")

HONOURED = frozenset({
    "attention.value_length",
    "pooling_type",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
})  # fmt: skip
"""Keys that are read in every architecture"""

WITHOUT_EFFECT = frozenset({
    "attention.layer_norm_epsilon",  # of the other kind of norm than the architecture's
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",  # llama.cpp reads it in the families that have it in their keys alone
    "attention.sliding_window_pattern",
    "classifier.output_labels",  # of a head, which of encoders is read, and whose tensors are refused of others
    "expert_feed_forward_length",  # the shapes of tensors say it too
    "rope.freq_base",  # of a model without rotary embedding
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "vocab_size",  # the embedding says it too
})  # fmt: skip
"""Keys that change nothing where they are not an architecture's own"""


def check_keys(gguf: GGUF, architecture: Architecture, raw: Mapping[str, Any]) -> None:
    """Refuse a value other than what is computed.

    Args:
        gguf: the file
        architecture: its architecture
        raw: config.json, as read from the file

    Raises:
        UnsupportedModelError: a key asks for something else, or the file is no model.
    """
    kind = gguf.get("general.type", str, "model")
    if kind != "model":
        raise UnsupportedModelError(f"{gguf.path} holds no model but, by general.type, {kind!r:.60}")
    prefix, own = gguf.metadata["general.architecture"], _own_keys(gguf)
    own_keys = translation_of(prefix).keys
    for key, values in _computed(architecture, raw, own).items():
        value = own.get(key)
        if value is None or key in architecture.keys or key in own_keys:
            continue
        numbers = gguf.numbers(f"{prefix}.{key}") if isinstance(value, Array) else None
        stored = [value] if numbers is None else sorted(set(numbers.tolist()))
        if not all(_is_one_of(number, values) for number in stored):
            raise UnsupportedModelError(
                f"{gguf.path}: {prefix}.{key} is {', '.join(map(str, stored)):.80}; in this architecture minillm runs "
                f"{' or '.join(f'{number:.6g}' if type(number) is float else str(number) for number in values)}"
            )


def warn_of_other_keys(gguf: GGUF) -> None:
    """Name the keys that are not known, and change nothing."""
    architecture = ARCHITECTURES[gguf.metadata["general.architecture"]]
    sizes = {"hidden_size": 1, "num_attention_heads": 1}
    prefix = gguf.metadata["general.architecture"]
    known = HONOURED | WITHOUT_EFFECT | architecture.keys.keys() | translation_of(prefix).keys
    known |= _computed(architecture, sizes, {}).keys()
    others = [f"{prefix}.{key}" for key in sorted(_own_keys(gguf).keys() - known)]
    if others:
        logger.warning("%s: not read: %s", gguf.path, listed(others))


def _own_keys(gguf: GGUF) -> dict[str, Any]:
    """The entries under the architecture's name, without it."""
    prefix = f"{gguf.metadata['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Equality, of fractions up to the precision of a float32."""
    if isinstance(value, bool | str):
        return value in values
    return any(math.isclose(value, known, rel_tol=1e-6) for known in values)


def _computed(architecture: Architecture, raw: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Key -> the values that say what is computed anyway."""
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or width // heads
    none, once = (0,), (0, 1)
    normalised = bool(architecture.fields.get("norm_topk_prob", True))
    return {
        "attention.causal": (not architecture.bidirectional,),
        "attention.clamp_kqv": none,
        "attention.head_count_kv": (heads,),
        "attention.key_length": (head_dim,),
        "attention.key_length_swa": (head_dim,),
        "attention.max_alibi_bias": (8.0,) if architecture.model_type in ("bloom", "jina_bert_v2") else none,
        "attention.scale": (0, head_dim**-0.5),
        "attention.temperature_scale": none,
        "attention.value_length_swa": (head_dim,),
        "attn_logit_softcapping": none,
        "embedding_length_out": (width,),
        "embedding_scale": once,
        "expert_count": none,
        "expert_gating_func": once,  # 1: softmax
        "expert_group_count": once,
        "expert_group_used_count": once,
        "expert_shared_count": none,
        "expert_shared_feed_forward_length": none,
        "expert_used_count": none,
        "expert_weights_norm": (normalised,),
        "expert_weights_scale": once,
        "features_length": (width,),
        "final_logit_softcapping": none,
        "interleave_moe_layer_step": once,
        "leading_dense_block_count": none,
        "logit_scale": once,
        "moe_every_n_layers": once,
        "nextn_predict_layers": none,
        "residual_scale": once,
        "rope.dimension_count_swa": (own.get("rope.dimension_count", head_dim),),
        "rope.freq_base_swa": (own.get("rope.freq_base", 10000.0),),
        "rope.scaling.alpha": once,
        "rope.scaling.yarn_beta_fast": (32.0,),
        "rope.scaling.yarn_beta_slow": (1.0,),
        "rope.scaling.yarn_ext_factor": (1.0,),
        "router_logit_softcapping": none,
        "use_parallel_residual": (False,),
    }
