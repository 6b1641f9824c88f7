"""Readers and checks of config.json fields shared by the families."""

from collections.abc import Callable, Mapping
from typing import Any

from ..config import Fields
from ..errors import CheckpointError, UnsupportedModelError
from ..reference.activation import ACTIVATIONS, ALIASES

MOST_LAYERS = 10_000
"""Upper bound on layers, far above any model's: each layer builds objects of its own."""


def merge_names(raw: Mapping[str, Any], other_names: Mapping[str, str]) -> dict[str, Any]:
    """Rename the fields of config.json that have an alternative name.

    Args:
        raw: config.json
        other_names: alternative name of a field by its canonical name

    Raises:
        CheckpointError: both names are present with different values.
    """
    merged = dict(raw)
    for name, other in other_names.items():
        value = merged.pop(other, None)
        if merged.get(name) is None:
            merged[name] = value
        elif value is not None and value != merged[name]:
            raise CheckpointError(
                f"config.json: {name} is {merged[name]!r:.60} and {other}, its other name, {value!r:.60}: leave one out"
            )
    return merged


def read_heads(fields: Fields, width: str = "hidden_size", heads: str = "num_attention_heads") -> dict[str, int]:
    """H heads that share E: K = H, and D = E / H. The fields of `ModelConfig`, from these fields of config.json.

    Raises:
        CheckpointError: one is missing or invalid, or E is not a multiple of H.
    """
    E, H = fields.size(width), fields.size(heads)
    if E % H:
        raise CheckpointError(f"{fields.source}: {width} {E} should be a multiple of {heads} {H}")
    return {"num_heads": H, "num_kv_heads": H, "head_dim": E // H}


def read_grouped_heads(fields: Fields, kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, int]:
    """H, K and D of grouped-query attention, whose heads may have a width of their own: fields of `ModelConfig`.

    Args:
        fields: config.json
        kv_heads: K if config.json has none; None: H
        head_dim: D if config.json has none; None: E / H

    Raises:
        CheckpointError: one is missing or invalid, H is not a multiple of K, or E of H where D is their quotient.
    """
    H = fields.size("num_attention_heads")
    K = fields.size("num_key_value_heads", kv_heads or H)
    if H % K:
        raise CheckpointError(f"config.json: num_attention_heads {H} should be a multiple of num_key_value_heads {K}")
    if head_dim is None and fields.raw.get("head_dim") is None:
        return read_heads(fields) | {"num_kv_heads": K}
    return {"num_heads": H, "num_kv_heads": K, "head_dim": fields.size("head_dim", head_dim)}


def read_shared(
    fields: Fields, *, width: str = "hidden_size", layers: str = "num_hidden_layers", tied_head: bool
) -> dict[str, Any]:
    """The fields of `ModelConfig` that all families read alike.

    Args:
        fields: config.json
        width: the name of E there
        layers: the name of L
        tied_head: whether the head is tied if config.json does not say

    Raises:
        CheckpointError: a field is missing or invalid.
    """
    return {
        "hidden_size": fields.size(width),
        "num_layers": read_layers(fields, layers),
        "vocab_size": fields.size("vocab_size"),
        "bos_token_id": fields.token_id("bos_token_id"),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        "tied_head": fields.get("tie_word_embeddings", tied_head),
    }


def read_layers(fields: Fields, name: str = "num_hidden_layers") -> int:
    """L, from the field of this name."""
    return fields.size(name, most=MOST_LAYERS)


def read_encoder_sizes(fields: Fields, heads: Mapping[str, int]) -> dict[str, Any]:
    """Sizes that all encoders have: these heads, E, L, V and F. Fields of `ModelConfig`, and of encoders'.

    Raises:
        CheckpointError: one is missing or invalid.
    """
    return dict(heads) | {
        "hidden_size": fields.size("hidden_size"),
        "num_layers": read_layers(fields),
        "vocab_size": fields.size("vocab_size"),
        "intermediate_size": fields.size("intermediate_size"),
    }


def read_activation(fields: Fields, name: str, default: str) -> str:
    """The activation in config.json, by its name in `ACTIVATIONS`.

    Raises:
        UnsupportedModelError: it is not supported; the message lists those that are.
    """
    activation = fields.get(name, default)
    return ALIASES[activation] if activation in ALIASES else fields.choice(name, default, tuple(ACTIVATIONS))


def refuse_experts(fields: Fields) -> None:
    """Refuse a mixture of experts.

    Raises:
        UnsupportedModelError: config.json has more than one expert.
    """
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        if fields.get(name, 0) > 1:
            raise UnsupportedModelError(
                f"{fields.source}: {name} is {fields.raw[name]!r:.60}: this family is run without experts"
            )


def refuse_other_layers(fields: Fields, *, windows: bool = False, kinds: tuple[str, ...] = ("full_attention",)) -> None:
    """Refuse layers of different kinds, and attention other than full causal attention.

    transformers reads these fields in every family, some of them only in its cache.

    Args:
        fields: config.json
        windows: the family reads `sliding_window` and `layer_types` itself
        kinds: else, what `layer_types` may have

    Raises:
        UnsupportedModelError: config.json asks for either.
    """
    if fields.raw.get("is_causal", True) is not True:
        raise UnsupportedModelError(
            f"{fields.source}: is_causal is {fields.raw['is_causal']!r:.60}; minillm runs causal attention"
        )
    if fields.raw.get("per_layer_config"):
        raise UnsupportedModelError(f"{fields.source}: per_layer_config; minillm runs layers of one shape")
    for name in ("attention_chunk_size",) if windows else ("attention_chunk_size", "sliding_window"):
        if fields.raw.get(name) is not None:
            raise UnsupportedModelError(
                f"{fields.source}: {name} is {fields.raw[name]!r:.60}; in this family minillm runs attention to the "
                "whole text"
            )
    if not windows:
        read_layer_types(fields, kinds)


def read_layer_types(fields: Fields, known: tuple[str, ...]) -> list[str]:
    """config.json's `layer_types`, the attention of each layer; empty if absent.

    Raises:
        UnsupportedModelError: one is not in `known`.
    """
    kinds = fields.get("layer_types", [])
    for kind in kinds:
        if kind not in known:
            raise UnsupportedModelError(
                f"{fields.source}: layer_types has {kind!r:.60}; minillm runs {', '.join(map(repr, known))} here"
            )
    return kinds


def read_layer_kinds(fields: Fields, usual: Callable[[int], bool]) -> list[bool]:
    """Whether each layer has a sliding window: by `layer_types`, or `usual` of its number if config.json has none.

    Raises:
        CheckpointError: the list does not have one entry for each layer.
        UnsupportedModelError: another kind of attention.
    """
    layers = read_layers(fields)
    kinds = read_layer_types(fields, ("full_attention", "sliding_attention"))
    if kinds and len(kinds) != layers:
        raise CheckpointError(f"{fields.source}: layer_types should have num_hidden_layers {layers} entries")
    return [kind == "sliding_attention" for kind in kinds] or [usual(i) for i in range(layers)]
