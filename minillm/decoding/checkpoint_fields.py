"""The generation fields in a checkpoint's files: which there are, which are not offered, and how chats are sampled."""

from collections.abc import Mapping
from typing import Any

from .fields import FIELDS, GUIDES
from .foreign import TRANSFORMERS, WORDS, ignored, refused

# fmt: off
OWN_FIELDS = frozenset({
    "decoder_prompt", "include_stop", "prefix_allowed_tokens_fn", "logits_processor", "stopping_criteria", "lora",
    "seed", "top_n_sigma", "mirostat", "mirostat_tau", "mirostat_eta", "presence_penalty", "frequency_penalty",
    "max_thinking_tokens", "thinking_tokens", "xtc_probability", "xtc_threshold", "samplers",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "contrastive_alpha", "amateur_temperature", *GUIDES, "lookahead_window", "lookahead_ngram_size",
    "lookahead_guesses", "strategy", "strategy_options", "force_words", "num_particles",
    "potential", "ess_threshold",
    "echo", "skip_special_tokens", "logprobs", "top_logprobs",
})
# fmt: on
"""Fields that transformers' GenerationConfig does not have."""


def unsupported(checkpoint: Mapping[str, object]) -> list[str]:
    """Names of the generation fields of a checkpoint that minillm does not support."""
    return [
        name
        for name, value in checkpoint.items()
        if name not in FIELDS and name not in ignored(TRANSFORMERS) and not _has_no_effect(name, value)
    ]


def _has_no_effect(name: str, value: object) -> bool:
    word = WORDS[TRANSFORMERS].get(name)
    return value in (None, [], {}, *(() if word is None else word.neutral))


def model_config_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The generation fields in a config.json, where checkpoints of before transformers 4.26 have them.

    As transformers reads them (`GenerationConfig.from_model_config`): null counts as absent, the fields of a nested
    decoder fill in what the outer ones leave out, and `force_bos_token_to_be_generated`, of older releases of BART,
    forces the token that begins a text. Special tokens are left to the model's configuration, and `use_cache`, which
    training switches off and no text depends on, is left out.
    """
    names = (FIELDS.keys() - OWN_FIELDS - {"eos_token_id", "use_cache"}) | refused(TRANSFORMERS).keys()
    nested = next((raw[name] for name in ("decoder", "generator", "text_config") if raw.get(name)), None)
    forced = {"forced_bos_token_id": raw.get("bos_token_id")} if raw.get("force_bos_token_to_be_generated") else {}
    sources = (nested if isinstance(nested, Mapping) else {}, raw, forced)
    return {name: value for source in sources for name, value in source.items() if name in names and value is not None}


CHAT_SAMPLING: Mapping[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "min_p": 0.05}
"""Sampling of chats where a checkpoint does not say how: greedy search repeats itself, a temperature of 1 strays."""


def chat_sampling(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling of a chat, as generation fields: a checkpoint's generation_config.json, or `CHAT_SAMPLING`.

    A checkpoint says how it is sampled by do_sample, or by a field that needs it; penalties alone do not.
    """
    own = {
        name: value
        for name, value in checkpoint.items()
        if value is not None and name in FIELDS and FIELDS[name].group == "sampling" and name != "seed"
    }
    says = any(name == "do_sample" or FIELDS[name].needs == "do_sample" for name in own)
    return {**({"do_sample": True} if says else CHAT_SAMPLING), **own}
