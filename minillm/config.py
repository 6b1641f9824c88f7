"""The configuration shared by all model families, and the reader of a checkpoint's config.json.

Each family adds its own fields in a subclass next to its model (`models/opt.py`); the engine, the cache and the
decoding strategies use only the fields defined here.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from .errors import CheckpointError, ModelNotFoundError, ParameterError, UnsupportedModelError
from .files import read_json, read_optional_json

_LOGGER = logging.getLogger("minillm")

C = TypeVar("C", bound="ModelConfig")
Output = Literal["tokens", "labels", "token_labels", "spans", "states"]
"""The result of a model: logits of the next token, of the labels of a text, of the labels of each token, of each token
as start and end of an answer, or hidden states alone"""
ScoreFunction = Literal["softmax", "sigmoid", "none"]
"""Turns the logits of labels into scores"""
SCORE_FUNCTIONS: dict[str, ScoreFunction] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""Torch's names of them, by which sentence-transformers names a cross-encoder's function"""
T = TypeVar("T", int, float, bool, str, dict[str, Any], list[Any])


class KVGroup(NamedTuple):
    """Layers whose keys and values have one shape and are kept equally long."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None
    """Positions that a query sees, its own included; None: all before it"""
    value_dim: int = 0
    """Values are the last numbers of the keys, so many; 0: values of their own"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a transformer, or of an encoder-decoder's decoder. Letters as in `layers/__init__.py`."""

    model_type: str
    """Hugging Face's name of the family."""
    hidden_size: int
    """E"""
    num_layers: int
    """L"""
    num_heads: int
    """H"""
    num_kv_heads: int
    """K"""
    head_dim: int
    """D"""
    intermediate_size: int
    """F"""
    vocab_size: int
    """V"""
    max_positions: int
    """The longest context, in tokens."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    keys_follow_length: bool = False
    """Keys depend on the length of the text they were computed in ("dynamic" and "longrope" rotary scaling): they
    cannot be reused for another text, and guesses computed together differ from tokens computed one by one."""

    keys_change_beyond: int | None = None
    """Length in tokens; a text that outgrows it has other keys ("longrope" rotary scaling), and is computed anew."""

    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer: positions that a query sees, its own included; None: no window. Empty: no layer
    has one"""
    kv_shapes: tuple[tuple[int, int], ...] = ()
    """K and D of each layer; empty: `num_kv_heads` and `head_dim` in all"""
    value_dim: int = 0
    """Values are the last numbers of the keys, so many (latent attention); 0: values of their own, of width D"""
    kv_sources: tuple[int, ...] = ()
    """The layer whose keys and values each layer reads, itself or an earlier one; empty: each its own"""
    tied_head: bool = False
    """The LM head is the token embedding"""
    num_experts: int = 0
    """X: experts of a layer; 0: each layer has one MLP"""
    experts_per_token: int = 0
    """k: experts that compute each token"""
    per_layer_width: int = 0
    """Numbers of a token's embedding that layers have beside its vector, L P in all; 0: none"""
    further_layers: int = 0
    """Layers in checkpoints after the last, which predict further tokens: they are not run"""
    mixed_layers: bool = False
    """Layers differ in their results: some have experts, or do not rotate queries and keys"""
    layer_states: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Shapes of the arrays, float32, that each layer keeps of a sequence; no entries: none keeps any"""
    attends: tuple[bool, ...] = ()
    """Whether each layer keeps keys and values; empty: those do that keep no states"""
    encoder_layers: int = 0
    """Layers of the encoder of an encoder-decoder; 0: decoder-only"""
    max_source_positions: int = 0
    """The longest text that the encoder reads, in tokens"""
    frame_width: int = 0
    """M: numbers of each frame of sound that the encoder reads, two frames for each position; 0: it reads token ids"""
    median_filter_width: int = 7
    """Positions of a sound under the filter that finds when words were said (Whisper)"""
    decoder_start_token_id: int | None = None
    """The token with which the decoder's text begins"""
    source_wraps: bool = False
    """In a classifier it begins with the source's last token in its place (mBART)"""
    bidirectional: bool = False
    """An encoder: each token attends to all of its text"""
    token_types: int = 0
    """Token types: a text's tokens have the first, a second text's the second; 0: the model has none"""
    output: Output = "tokens"
    labels: tuple[str, ...] = ()
    """Names of the labels of a classification"""
    fills_masks: bool = False
    """A model of hidden states has a head of masked tokens besides"""
    labels_of_mean: bool = False
    """The head of labels reads the mean of all tokens' hidden states, not one token's"""
    score_function: ScoreFunction = "none"
    """Turns their logits into scores, unless a call names another"""
    pad_token_id: int | None = None

    def window_of(self, layer: int) -> int | None:
        """A layer's sliding window; None: it has none, or one that no text outgrows."""
        window = self.windows[layer] if self.windows else None
        return None if window is None or window >= self.max_positions or self.bidirectional else window

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """K and D of a layer."""
        return self.kv_shapes[layer] if self.kv_shapes else (self.num_kv_heads, self.head_dim)

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        return self.kv_sources[layer] if self.kv_sources else layer

    @cached_property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers with keys and values of their own, in groups; those without a window first.

        The first group has no window; it is empty where all layers have one.
        """
        groups: dict[tuple[int | None, int, int], list[int]] = {}
        for layer in range(self.num_layers):
            if self.kv_source(layer) == layer and self.has_keys(layer):
                groups.setdefault((self.window_of(layer), *self.kv_shape(layer)), []).append(layer)
        V = self.value_dim
        whole = [KVGroup(tuple(layers), K, D, None, V) for (window, K, D), layers in groups.items() if window is None]
        windowed = [KVGroup(tuple(layers), K, D, window, V) for (window, K, D), layers in groups.items() if window]
        return (*(whole or [KVGroup((), self.num_kv_heads, self.head_dim, None, V)]), *windowed)

    def kv_group(self, layer: int) -> int:
        """Number of the group that has the keys and values of a layer."""
        source = self.kv_source(layer)
        return next(i for i, group in enumerate(self.kv_groups) if source in group.layers)

    def has_keys(self, layer: int) -> bool:
        """Whether a layer keeps keys and values."""
        if self.attends:
            return self.attends[layer]
        return not (self.layer_states and self.layer_states[layer])

    @property
    def expanded_widths(self) -> tuple[int, ...]:
        """Widths of a head's key and value where the cache has neither, but what they are expanded from."""
        return ()

    @property
    def layer_parts(self) -> int:
        """Parts of a layer whose results are added to the residual stream, each of which ranks share."""
        return 3 if self.encoder_layers else 2

    @property
    def shared_expert_layers(self) -> int:
        """Number of layers with an expert that all tokens share, beside those that are chosen."""
        return 0

    def layers_with_keys(self, layers: range | None = None) -> list[int]:
        """Numbers of the layers, or of those of a range, that keep keys and values."""
        own = range(self.num_layers) if layers is None else layers
        return [i for i in own if self.has_keys(i)]

    def within_vocabulary(self: C) -> C:
        """The configuration without special tokens that the vocabulary does not have."""
        bos, pad = (
            i if i is not None and i < self.vocab_size else None for i in (self.bos_token_id, self.pad_token_id)
        )
        ends = tuple(i for i in self.eos_token_ids if i < self.vocab_size)
        return replace(self, bos_token_id=bos, eos_token_ids=ends, pad_token_id=pad)

    def sharded(self: C, ranks: int) -> C:
        """The configuration of one of `ranks` that share each layer: its heads of the whole.

        Where there are fewer key/value heads than ranks, several ranks have the same one.

        Raises:
            ParameterError: the heads cannot be shared equally.
        """
        if ranks == 1:
            return self
        H, K = self.num_heads, self.num_kv_heads
        if H % ranks:
            raise ParameterError(f"tensor_parallel {ranks} should divide the model's num_heads {H}")
        for heads in {K, *(heads for heads, _ in self.kv_shapes)}:
            if heads % ranks and ranks % heads:
                raise ParameterError(
                    f"tensor_parallel {ranks} should divide the model's num_kv_heads {heads}, or be a multiple of it"
                )
        shapes = tuple((max(1, heads // ranks), width) for heads, width in self.kv_shapes)
        return replace(self, num_heads=H // ranks, num_kv_heads=max(1, K // ranks), kv_shapes=shapes)


def warn_of_unknown_tokens(fields: Mapping[str, Any], vocab_size: int, where: Path) -> None:
    """Name the special tokens of a configuration file that the vocabulary does not have; they are never produced."""
    unknown = []
    for name in SPECIAL_IDS:
        value = fields.get(name)
        ids = value if isinstance(value, list) else [value]
        unknown += [f"{name} {i}" for i in ids if type(i) is int and not 0 <= i < vocab_size]
    if unknown:
        _LOGGER.warning(
            "%s: not among the %d tokens of the vocabulary, and left out: %s", where, vocab_size, ", ".join(unknown)
        )


SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "forced_bos_token_id", "forced_eos_token_id")
"""Fields of config.json and generation_config.json that name special tokens"""

LARGEST = 2**24
"""Upper bound of any size in a config; a larger one would fill the memory before the tensors could contradict it."""

LARGEST_NUMBER = 1e30
"""Upper bound of any other number in a config; finite in float32 computations."""


class Fields:
    """Reads typed fields of config.json; errors name fields that are absent, of another type or out of range."""

    def __init__(self, raw: Mapping[str, Any], source: str = "config.json") -> None:
        self.raw = raw
        self.source = source

    def get(self, name: str, default: T) -> T:
        """The field, or `default` if it is absent or null; the default's type is the expected one."""
        value = self.raw.get(name)
        if value is None:
            return default
        kind = type(default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < _FLOAT_MAX:
            return kind(value)
        if (
            not isinstance(value, kind)
            or (kind is int and isinstance(value, bool))
            or (kind is float and not math.isfinite(value))
        ):
            raise CheckpointError(f"{self.source}: {name} should be {_KIND_NAMES[kind]}, found {value!r:.60}")
        return value

    def size(self, name: str, default: int | None = None, *, most: int = LARGEST) -> int:
        """An integer from 1 to `most`; required without a default."""
        if default is None and self.raw.get(name) is None:
            raise CheckpointError(f"{self.source}: {name} is missing")
        value = self.get(name, default or 0)
        if not 1 <= value <= most:
            bound = "at least 1" if value < 1 else f"at most {most}"
            raise CheckpointError(f"{self.source}: {name} should be {bound}, found {value!s:.60}")
        return value

    def number(
        self, name: str, default: float | None = None, *, above: float = 0.0, most: float = LARGEST_NUMBER
    ) -> float:
        """A number > `above` and <= `most`; required without a default."""
        if default is None and self.raw.get(name) is None:
            raise CheckpointError(f"{self.source}: {name} is missing")
        value = self.get(name, default or 0.0)
        if value <= above:
            raise CheckpointError(f"{self.source}: {name} should be above {above:g}, found {value}")
        if value > most:
            raise CheckpointError(f"{self.source}: {name} should be at most {most:g}, found {value}")
        return value

    def choice(self, name: str, default: str, known: tuple[str, ...]) -> str:
        """One of the `known` words; any other is an unsupported feature."""
        value = self.get(name, default)
        if value not in known:
            raise UnsupportedModelError(
                f"{self.source}: {name} is {value!r:.60}; minillm runs {', '.join(map(repr, known))}"
            )
        return value

    def token_id(self, name: str) -> int | None:
        """One token id, or None if the field is absent or null."""
        ids = self.token_ids(name)
        return ids[0] if ids else None

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Token ids written as a number, a list of numbers or null; negative ones stand for none."""
        value = self.raw.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise CheckpointError(f"{self.source}: {name} should be token ids, found {value!r:.60}")
        return tuple(i for i in ids if i >= 0)


_FLOAT_MAX = 2**1023
_KIND_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    dict: "a table",
    list: "a list",
}


def read_score_function(fields: Fields, name: str = "") -> ScoreFunction | None:
    """The function that sentence-transformers applies to a cross-encoder's logits; None if nothing is said.

    Args:
        fields: a file's fields
        name: the field that says it; by default config.json's, newer and older

    Raises:
        UnsupportedModelError: it is another one.
    """
    if name:
        said = fields.get(name, "")
    else:
        newer = fields.get("sentence_transformers", {})
        name = "sentence_transformers.activation_fn"
        said = Fields(newer, f"{fields.source}: sentence_transformers").get("activation_fn", "")
        if "activation_fn" not in newer:
            name = "sbert_ce_default_activation_function"
            said = fields.get(name, "")
    if not said:
        return None
    function = SCORE_FUNCTIONS.get(said.rpartition(".")[2]) if said.startswith("torch.") else None
    if function is None:
        raise UnsupportedModelError(
            f"{fields.source}: the activation function {said!r:.80}; minillm applies {', '.join(SCORE_FUNCTIONS)}"
        )
    return function


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint folder; `quantization_config` may be from a file beside it, or as MLX writes it.

    Raises:
        ModelNotFoundError: the folder has none.
        CheckpointError: it cannot be read, or is not JSON.
        UnsupportedModelError: the folder holds an adapter, which changes a model's weights.
    """
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{folder} holds an adapter (adapter_config.json): give its base model as the model, and this folder as "
            "adapter (--adapter)"
        )
    path = folder / "config.json"
    if not path.exists():
        raise ModelNotFoundError(f"{folder} holds no config.json: expected a Hugging Face checkpoint folder")
    raw = read_json(path)
    of_mlx = raw.get("quantization")  # newer releases also write it as quantization_config
    if isinstance(of_mlx, dict) and raw.get("quantization_config", of_mlx) == of_mlx:
        raw["quantization_config"] = of_mlx | {"quant_method": "mlx", "file": "config.json: quantization"}
    return raw if raw.get("quantization_config") is not None else raw | _quantisation_beside(folder)


QUANTISATION_FILES: dict[str, tuple[str, dict[str, str]]] = {
    "hf_quant_config.json": ("modelopt", {}),
    "quantize_config.json": ("gptq", {}),
    "quant_config.json": ("awq", {"w_bit": "bits", "q_group_size": "group_size"}),
}
"""File that older releases of ModelOpt, AutoGPTQ and AutoAWQ wrote instead of a field in config.json -> its
quant_method, and names of fields that differ from those in config.json"""


def _quantisation_beside(folder: Path) -> dict[str, Any]:
    """`quantization_config` from a file beside config.json, with its name as "file"; empty without one."""
    for name, (method, names) in QUANTISATION_FILES.items():
        stored = read_optional_json(folder / name)
        fields = stored.get("quantization", stored) if method == "modelopt" else stored
        if isinstance(fields, dict) and fields:
            renamed = {names.get(field, field): value for field, value in fields.items()}
            return {"quantization_config": {"quant_method": method, "file": name} | renamed}
    return {}
