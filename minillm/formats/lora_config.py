"""adapter_config.json of a LoRA adapter in PEFT's format: which modules it changes, and by which factor.

Every field that PEFT 0.21 writes is honoured, has no effect on a trained adapter (`NO_EFFECT`), or is refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Fields
from ..errors import CheckpointError, UnsupportedModelError, listed
from ..files import read_json
from .weight_files import ADAPTER_CONFIG

_UNSUPPORTED = """
alora_invocation_tokens arrow_config kasa_config layer_replication lora_bias megatron_config monteclora_config
target_parameters trainable_token_indices use_bdlora use_qalora velora_config
"""
UNSUPPORTED = tuple(_UNSUPPORTED.split())
"""Fields of variants of LoRA that are refused unless they are null, false or empty."""

_HONOURED = """
alpha_pattern bias ensure_weight_tying exclude_modules init_lora_weights layers_pattern layers_to_transform lora_alpha
modules_to_save peft_type r rank_pattern target_modules use_dora use_rslora
"""
HONOURED = frozenset(_HONOURED.split())
"""Fields that decide what an adapter computes."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base model's weights, so that the adapter does not fit the published ones."""

_NO_EFFECT = """
auto_mapping base_model_name_or_path corda_config eva_config fan_in_fan_out inference_mode loftq_config lora_dropout
lora_ga_config megatron_core peft_version qalora_group_size revision runtime_config task_type
"""
NO_EFFECT = frozenset(_NO_EFFECT.split())
"""Fields that describe training or the base model; they do not change what a trained adapter computes. The base model's
name is for people: the shapes decide. `fan_in_fan_out` follows from the module, as in PEFT."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The fields of adapter_config.json that matter for what an adapter computes."""

    rank: int
    alpha: float
    rank_stabilised: bool
    """scale = alpha / sqrt r instead of alpha / r (Kalajdzievski, arXiv 2312.03732)"""
    decomposed: bool
    """DoRA (Liu et al., arXiv 2402.09353): the rows of the sum get the lengths of a stored vector"""
    ranks: Mapping[str, int]
    """Ranks that differ, by pattern of a module's name"""
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...]
    """The adapted modules: a regular expression, or the last parts of their names; "all-linear": all but the head"""
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    """The adapted layers; None: all"""
    layers_patterns: tuple[str, ...]
    """Names of the lists that `layers` counts in; empty: any"""
    saved: tuple[str, ...]
    """Modules that the adapter replaces as a whole"""
    biases: bool
    """Whether the adapter replaces biases"""
    tie: bool
    """Whether the embedding and the LM head of a model in which they are one change alike; both are stored then"""

    def scale(self, module: str) -> float:
        """The factor of B A."""
        rank, alpha = _by_pattern(self.ranks, module, self.rank), _by_pattern(self.alphas, module, self.alpha)
        return float(alpha / (rank**0.5 if self.rank_stabilised else rank))

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return int(_by_pattern(self.ranks, module, self.rank))

    def targets_module(self, module: str, *, head: bool) -> bool:
        """Whether a module of this full name ("model.layers.0.mlp.up_proj") is adapted; `head`: it is the LM head."""
        if _named(self.excluded, module) or self.saves(module):
            return False
        if self.targets == "all-linear":
            return not head
        if isinstance(self.targets, str):
            return _named(self.targets, module)
        if self.layers is not None:
            patterns = self.layers_patterns or (r"[^.]*",)
            matches = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in patterns)
            at = next((match for match in matches if match), None)
            if at is None or int(at[1]) not in self.layers:
                return False
        return _named(self.targets, module)

    def replaces(self, module: str) -> bool:
        """Whether the adapter may hold this module as a whole; PEFT takes any end of a name, here "norm" too."""
        return self.saves(module) or module.endswith(self.saved)

    def saves(self, module: str) -> bool:
        """Whether this module is named among those that the adapter replaces, or is inside one of them."""
        return any(re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", module) for name in self.saved)


def _named(names: str | tuple[str, ...], module: str) -> bool:
    """Whether a regular expression matches a module's name, or one of several names is its end."""
    if isinstance(names, str):
        return bool(names and re.fullmatch(names, module))
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(values: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name."""
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_lora_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: another kind of adapter, or a variant of LoRA that is not supported.
    """
    raw = read_json(folder / ADAPTER_CONFIG)
    fields = Fields(raw, str(folder / ADAPTER_CONFIG))
    _refuse_unsupported(fields)
    targets = _names(fields, "target_modules")
    if not targets:
        raise CheckpointError(f"{fields.source}: target_modules is missing")
    layers = raw.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) and not isinstance(layers, bool) else layers or None
    if layers is not None and not (isinstance(layers, list) and all(type(i) is int for i in layers)):
        raise CheckpointError(f"{fields.source}: layers_to_transform should be layer numbers, found {layers!r:.60}")
    if layers is not None and isinstance(targets, str):
        raise CheckpointError(f"{fields.source}: layers_to_transform has no effect beside a pattern in target_modules")
    ranks, alphas = fields.get("rank_pattern", {}), fields.get("alpha_pattern", {})
    for pattern, value in (*ranks.items(), *alphas.items()):
        _check_pattern(fields.source, pattern)
        Fields({pattern: value}, fields.source).number(pattern)
    bias = fields.choice("bias", "none", ("none", "all", "lora_only"))
    patterns, saved = _names(fields, "layers_pattern"), _names(fields, "modules_to_save")
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        _check_pattern(fields.source, pattern)
    return LoraConfig(
        rank=fields.size("r", 8),
        alpha=fields.number("lora_alpha", 8.0),
        rank_stabilised=fields.get("use_rslora", False),
        decomposed=fields.get("use_dora", False),
        ranks=ranks,
        alphas=alphas,
        targets=targets,
        excluded=_names(fields, "exclude_modules"),
        layers=None if layers is None else tuple(layers),
        layers_patterns=((patterns,) if isinstance(patterns, str) else patterns) if patterns else (),
        saved=(saved,) if isinstance(saved, str) and saved else tuple(saved),
        biases=bias != "none",
        tie=fields.get("ensure_weight_tying", False),
    )


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse other kinds of adapters, and fields that are not honoured."""
    raw = fields.raw
    fields.choice("peft_type", "", ("LORA",))
    for name in UNSUPPORTED:
        if raw.get(name):
            raise UnsupportedModelError(f"{fields.source}: {name} is {raw[name]!r:.60}; minillm runs LoRA without it")
    task = raw.get("task_type")
    if task not in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"):
        known = "'CAUSAL_LM', 'SEQ_2_SEQ_LM', 'FEATURE_EXTRACTION'"
        raise UnsupportedModelError(f"{fields.source}: task_type is {task!r:.60}; minillm runs {known}")
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise UnsupportedModelError(
            f"{fields.source}: init_lora_weights is {start!r:.60}, which changes the base model: save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    unknown = [name for name in raw if name not in HONOURED | NO_EFFECT and raw[name]]
    if unknown:
        raise UnsupportedModelError(f"{fields.source}: minillm does not know {listed(unknown)}: set it to null")


def _names(fields: Fields, name: str) -> str | tuple[str, ...]:
    """A regular expression, or names of modules; empty if the field is absent."""
    value = fields.raw.get(name) or ()
    if isinstance(value, str):
        if value != "all-linear":
            _check_pattern(fields.source, value)
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise CheckpointError(f"{fields.source}: {name} should be a text or a list of texts, found {value!r:.60}")
    return tuple(value)


def _check_pattern(source: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{source}: {pattern!r:.60} is no regular expression: {error}") from None
