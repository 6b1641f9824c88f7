"""The files of sentence-transformers in a checkpoint's folder: how its texts are embedded or scored.

modules.json lists the steps; the first is the model:

    1_Pooling       the mean of the hidden states, the first token's (CLS), the last one's, ...; or several, joined
    2_Dense         a projection with an activation, in some; or LayerNorm
    3_Normalize     division by the length

before 1_Pooling in some WeightedLayerPooling, a mean over the layers; or the model alone, a cross-encoder; or, of a
causal LM that scores, `1_LogitScore`: a difference of two logits; or, of a masked language model, `1_SpladePooling`: a
weight for each token of the vocabulary.
config_sentence_transformers.json has prompts, the cross-encoder's function of logits, how two vectors are compared, and
their length; sentence_bert_config.json the longest text, and whether the chat template writes texts. A checkpoint
without modules.json is pooled by the mean if it is an encoder, and by the last token if not.

What changes results and is not run is refused by name, what is not read is named in one warning.
"""

import json
import logging
import re
import string
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import Fields, ModelConfig, read_score_function
from ..errors import CheckpointError, UnsupportedModelError
from ..files import read_json, read_optional_json, read_text
from ..tasks.late_interaction import Expansion, LateInteraction
from ..tasks.pooling import (
    ACTIVATIONS,
    SIMILARITIES,
    AsMessages,
    Dense,
    EmbeddingSettings,
    LogitScore,
    Pooling,
    VectorNorm,
    normalized,
)
from ..tasks.sparse_vectors import SparsePooling
from .weight_files import open_checkpoint

logger = logging.getLogger("minillm")

MODEL_FILE = "config_sentence_transformers.json"
TEXTS_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_xlm-roberta_config.json",
)
"""Names of one file in the order of preference; all but the first are old releases'"""

_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_WORDS: dict[str, Pooling] = {
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
}
_JOINED = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")
"""Order of the vectors of several flags"""
_KINDS = (
    *("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "LogitScore", "MultiVectorMask", "StaticEmbedding"),
    *("WeightedLayerPooling", "SpladePooling", "Dropout"),
)
_STATIC_ORDER = re.compile("StaticEmbedding( Dense| LayerNorm)*( Normalize)*")
_ORDER = re.compile("Transformer( WeightedLayerPooling)? Pooling( Dense| LayerNorm)*( Normalize)*")
"""Modules in the order in which they are run. Dropout does nothing but in training"""
_LATE = ("MultiVectorEncoder", "ColBERT")
"""`model_type` of late-interaction models: sentence-transformers', and PyLate's"""
_LATE_ORDER = re.compile("Transformer( Dense| Normalize| MultiVectorMask)*")
_OF_PYLATE = {
    *("query_length", "document_length", "query_expansion", "do_query_expansion", "attend_to_expansion_tokens"),
    *("query_prefix", "document_prefix", "skiplist_words"),
}
"""Fields of PyLate beside the prompts"""
_RENAMED = {"MLMTransformer": "Transformer"}
"""Modules of old releases, and what they are now"""
_RESULTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
    "fill-mask": ("logits", "token_embeddings"),
}
"""`transformer_task`: what the model returns, and the name under which the modules after it find that"""
_WITHOUT_EFFECT = {
    MODEL_FILE: {"__version__", "model_type", "keep_in_fp32_modules", "requirements"},
    TEXTS_FILES[0]: {"unpad_inputs"},
    "text": {"padding", "logits_to_keep"},
}
_OF_TOKENIZERS = ("padding", "truncation", "max_length", "return_tensors", "tokenize", "return_dict")
"""Arguments of transformers' `apply_chat_template` that no template sees"""
_PARTS = ("content[0]", ".type", "'type'", '"type"', "message.content[")
"""A template with one of these reads content as a list of parts, to sentence-transformers"""


def read_embedding_settings(
    folder: Path, config: ModelConfig, settings: EmbeddingSettings, template: str | None = None
) -> EmbeddingSettings:
    """Read the settings with which a checkpoint's texts are embedded or scored.

    Args:
        folder: the checkpoint's folder
        config: its model's configuration
        settings: the settings of a folder without such files
        template: source of its chat template

    Raises:
        CheckpointError: a file cannot be read, a field is invalid, or a projection is of vectors of another width.
        UnsupportedModelError: a step that minillm does not run, such as pooling by the maximum, another order, or a
            module whose file is missing. A model that generates text does so all the same: then a warning says it, and
            `refused`.
    """
    longest = read_optional_json(folder / "tokenizer_config.json").get("model_max_length")
    settings = replace(settings, max_tokens=longest if isinstance(longest, int) and longest > 0 else None)
    try:
        modules = read_modules(folder)
        return _Reader(folder, config, template).settings(settings, modules) if modules else settings
    except UnsupportedModelError as error:
        if config.output != "tokens":
            raise
        logger.warning("%s; so texts are neither embedded nor scored here, only generated", error)
        return replace(settings, refused=str(error))


def read_modules(folder: Path, *, check: bool = True) -> list[tuple[str, Path]]:
    """Kind and folder of each module in modules.json, in order; empty if there is no such file.

    Without `check` a file that cannot be read gives none, and no kind is refused.
    """
    path = folder / "modules.json"
    if not path.exists():
        return []
    try:
        modules = json.loads(read_text(path))
        named = [(str(module["type"]).rpartition(".")[2], folder / str(module["path"])) for module in modules]
    except (ValueError, TypeError, KeyError, RecursionError):
        named = []
    listed_modules = [(_RENAMED.get(kind, kind), path) for kind, path in named]
    if not check:
        return listed_modules
    if not listed_modules:
        raise CheckpointError(f"{path} should be a list of modules with type and path")
    for kind, _ in listed_modules:
        if kind not in _KINDS:
            *first, last = [name for name in _KINDS if name != "Dropout"]
            raise UnsupportedModelError(f"{path}: the module {kind!r:.60}; minillm runs {', '.join(first)} and {last}")
    return [(kind, path) for kind, path in listed_modules if kind != "Dropout"]


def _module_fields(path: Path) -> Fields:
    """The configuration of a module."""
    if not path.exists():
        raise UnsupportedModelError(f"{path} is missing, and modules.json lists this module")
    return Fields(read_json(path), str(path))


def _arrays(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[NDArray[np.float32]]:
    """The tensors of a module, in this order.

    Raises:
        CheckpointError: it has others, or of other shapes.
    """
    stored = open_checkpoint(folder)
    if {name: tensor.shape for name, tensor in stored.items()} != shapes:
        raise CheckpointError(f"{folder} should hold {shapes} by its config.json, found {sorted(stored)!s:.100}")
    return [np.array(stored[name].load(), np.float32) for name in shapes]


class _Reader:
    """The files of one folder, and the names of their fields that are not read."""

    def __init__(self, folder: Path, config: ModelConfig, template: str | None) -> None:
        self.folder, self.config, self.template = folder, config, template
        self.unread: list[str] = []

    def settings(self, settings: EmbeddingSettings, modules: list[tuple[str, Path]]) -> EmbeddingSettings:
        """The settings by these modules."""
        kinds, output = [kind for kind, _ in modules], self.config.output
        if kinds == ["Transformer"] and output == "labels":
            task, own = "sequence-classification", dict[str, Any]()
        elif kinds == ["Transformer", "LogitScore"] and output == "tokens" and not self.config.encoder_layers:
            task, own = "text-generation", {"logit_score": self.logit_score(modules[1][1])}
        elif kinds == ["Transformer", "SpladePooling"]:
            task, own = "fill-mask", {"strip": True, "sparse": self.sparse(modules[1][1])}
        elif self.is_late(kinds):
            task, own = "feature-extraction", {"strip": True, "late": self.late(modules)}
        elif _STATIC_ORDER.fullmatch(" ".join(kinds)) and not self.config.num_layers:
            task, own = "feature-extraction", self.steps(modules)
        elif _ORDER.fullmatch(" ".join(kinds)):
            task, own = "feature-extraction", {"strip": True} | self.steps(modules)
        else:
            raise UnsupportedModelError(
                f"{self.folder / 'modules.json'}: {', '.join(kinds)}; minillm runs Transformer, Pooling, then "
                "Dense and LayerNorm, then Normalize; WeightedLayerPooling before Pooling; StaticEmbedding in place of "
                "the first two; Transformer alone if it classifies texts; Transformer, LogitScore if it generates "
                "them; Transformer, SpladePooling if it fills masks"
            )
        late = "late" in own
        settings = replace(settings, **self.model(task, late), **own)
        settings = replace(settings, **self.texts(task, settings.max_tokens, late))
        if self.unread:
            logger.warning(
                "%s: minillm does not read %s; results may differ from those of sentence-transformers",
                self.folder,
                ", ".join(self.unread),
            )
        return settings

    def not_read(self, where: str, raw: Mapping[str, Any], known: set[str]) -> None:
        """Note the fields of a table that say something and are not known."""
        self.unread += [f"{where}: {name}" for name in raw if name not in known and raw[name] not in (None, {}, [])]

    # --- modules ------------------------------------------------------------------------------------------------------

    def steps(self, modules: list[tuple[str, Path]]) -> dict[str, Any]:
        """Pooling, projections and normalisation."""
        fields: dict[str, Any] = {}
        dense: list[Dense | VectorNorm] = []
        pooled_width = self.config.hidden_size
        for kind, path in modules:
            if kind == "WeightedLayerPooling":
                fields["layer_weights"] = self.layer_weights(path)
            elif kind == "Pooling":
                fields |= self.pooling(path / "config.json")
                pooled_width *= len(fields["pooling"]) if isinstance(fields["pooling"], tuple) else 1
            elif kind == "Dense":
                dense.append(self.dense(path, dense[-1].weight.shape[0] if dense else pooled_width))
            elif kind == "LayerNorm":
                dense.append(self.norm(path, dense[-1].weight.shape[0] if dense else pooled_width))
            elif kind == "Normalize":
                self.of_vectors(Fields(read_optional_json(path / "config.json"), str(path / "config.json")))
                fields["normalize"] = True
        return fields | {"dense": tuple(dense)}

    def layer_weights(self, folder: Path) -> tuple[float, ...]:
        """A WeightedLayerPooling module: the weights of the states before each layer and after the last.

        They count only if config.json says that the model returns all states, as in sentence-transformers.
        """
        fields = _module_fields(folder / "config.json")
        widths = ("embedding_dimension", "word_embedding_dimension")
        self.not_read(fields.source, fields.raw, {"layer_start", "num_hidden_layers", *widths})
        if not Fields(read_optional_json(self.folder / "config.json")).get("output_hidden_states", False):
            return ()
        if not self.config.bidirectional:
            raise UnsupportedModelError(f"{fields.source}: minillm runs WeightedLayerPooling of encoders alone")
        states, start = self.config.num_layers + 1, fields.get("layer_start", 4)
        if not 0 <= start < states:
            raise CheckpointError(f"{fields.source}: layer_start should be from 0 to {states - 1}, found {start}")
        [weights] = _arrays(folder, {"layer_weights": (states - start,)})
        return (*[0.0] * start, *weights.tolist())

    def pooling(self, path: Path) -> dict[str, Any]:
        """The settings in the configuration of a Pooling module: flags, or one word in newer releases."""
        fields = _module_fields(path)
        word = fields.raw.get("pooling_mode")
        words = word if isinstance(word, list) else [word] if word else []
        flags = [name for name in fields.raw if name.startswith("pooling_mode_") and fields.raw[name]]
        modes, known = (words, _WORDS) if words else (flags or ["pooling_mode_mean_tokens"], _MODES)
        if any(str(mode) not in known for mode in modes):
            raise UnsupportedModelError(
                f"{path}: pooling by {', '.join(map(str, modes))!r:.80}; minillm runs {', '.join(known)}"
            )
        read = {"pooling_mode", "include_prompt", "word_embedding_dimension", "embedding_dimension"}
        self.not_read(str(path), fields.raw, read | {name for name in fields.raw if name.startswith("pooling_mode_")})
        poolings = [known[str(mode)] for mode in modes]
        if not words:
            poolings.sort(key=_JOINED.index)
        chosen: Any = poolings[0] if len(poolings) == 1 else tuple(poolings)
        return {"pooling": chosen, "include_prompt": fields.get("include_prompt", True)}

    def dense(self, folder: Path, width: int, of: str = "sentence_embedding") -> Dense:
        """A Dense module for vectors of some width, texts' or tokens': its configuration and its tensors."""
        fields = _module_fields(folder / "config.json")
        self.of_vectors(fields, of)
        inputs, outputs, bias = fields.size("in_features"), fields.size("out_features"), fields.get("bias", True)
        if inputs != width:
            raise CheckpointError(
                f"{fields.source}: in_features should be {width}, the width before it; found {inputs}"
            )
        if fields.get("use_residual", False):
            raise UnsupportedModelError(f"{fields.source}: use_residual is true; minillm runs projections without it")
        activation = fields.choice("activation_function", "torch.nn.modules.activation.Tanh", tuple(ACTIVATIONS))
        names = {"module_input_name", "module_output_name", "in_features", "out_features", "bias", "use_residual"}
        self.not_read(fields.source, fields.raw, names | {"activation_function"})
        weight, *biases = _arrays(
            folder, {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if bias else {})
        )
        return Dense(weight, biases[0] if biases else None, activation)

    def norm(self, folder: Path, width: int) -> VectorNorm:
        """A LayerNorm module for vectors of some width: its configuration and its tensors."""
        fields = _module_fields(folder / "config.json")
        self.not_read(fields.source, fields.raw, {"dimension"})
        if fields.size("dimension") != width:
            raise CheckpointError(f"{fields.source}: dimension should be {width}, the width before it")
        return VectorNorm(*_arrays(folder, {"norm.weight": (width,), "norm.bias": (width,)}))

    def sparse(self, folder: Path) -> SparsePooling:
        """A SpladePooling module."""
        fields = _module_fields(folder / "config.json")
        names = ("pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension")
        self.not_read(fields.source, fields.raw, {*names, "chunk_size"})
        if not self.config.fills_masks:
            raise UnsupportedModelError(
                f"{fields.source}: SpladePooling reads logits of masked tokens, and config.json names no model that "
                "has some and that minillm runs (...ForMaskedLM)"
            )
        whole = Fields(read_optional_json(self.folder / MODEL_FILE), MODEL_FILE)
        return SparsePooling(
            summed=fields.choice("pooling_strategy", "max", ("max", "sum")) == "sum",
            twice=fields.choice("activation_function", "relu", ("relu", "log1p_relu")) == "log1p_relu",
            most=whole.size("max_active_dims") if whole.raw.get("max_active_dims") is not None else None,
        )

    def of_vectors(self, fields: Fields, of: str = "sentence_embedding") -> None:
        """Refuse a module that computes something else from something else than the pooled vector, or than `of`."""
        for name in ("module_input_name", "module_output_name"):
            fields.choice(name, of, (of,))

    # --- late interaction ---------------------------------------------------------------------------------------------

    def is_late(self, kinds: list[str]) -> bool:
        """Whether the modules make vectors of tokens, in the form of sentence-transformers or PyLate."""
        kind = read_optional_json(self.folder / MODEL_FILE).get("model_type")
        return kind in _LATE and _LATE_ORDER.fullmatch(" ".join(kinds)) is not None and self.config.output != "labels"

    def late(self, modules: list[tuple[str, Path]]) -> LateInteraction:
        """The modules and fields of a late-interaction checkpoint."""
        whole = Fields(read_optional_json(self.folder / MODEL_FILE), MODEL_FILE)
        pylate = whole.raw.get("model_type") == "ColBERT"
        steps: list[Any] = []
        masked: dict[str, Any] = {}
        width = self.config.hidden_size
        for kind, path in modules[1:]:
            if kind == "Dense":
                steps.append(self.dense(path, width, "token_embeddings"))
                width = steps[-1].weight.shape[0]
            elif kind == "Normalize":
                fields = Fields(read_optional_json(path / "config.json"), str(path / "config.json"))
                fields.choice("module_input_name", "sentence_embedding", ("token_embeddings",))
                steps.append(normalized)
            else:
                masked = read_optional_json(path / "config.json")
        if pylate:
            steps.append(normalized)
            masked = {"skiplist_words": whole.raw.get("skiplist_words", list(string.punctuation))}
        texts = Fields(self.texts_file()[1], self.texts_file()[0])
        expansion = self.expansion(whole, texts)
        longest: dict[Any, int] = {}
        for role, field_name in (("query", "query_length"), ("document", "document_length")):
            source = texts if texts.raw.get(field_name) is not None else whole
            if source.raw.get(field_name) is not None and not (role == "query" and expansion is not None and pylate):
                longest[role] = source.size(field_name)
        markers: dict[Any, str] = {
            role: str(whole.raw[f"{role}_prefix"]) for role in ("query", "document") if whole.raw.get(f"{role}_prefix")
        }
        words, ids = Fields(masked, "MultiVectorMask"), masked.get("keep_only_token_ids") or []
        return LateInteraction(
            steps=tuple(steps),
            longest=longest,
            expansion=expansion,
            markers=markers,
            skipped=tuple(words.get("skiplist_words", []) or ()),
            skipped_in=tuple(words.get("skiplist_tasks", ["document"]) or ("document",)),
            only_ids=tuple(ids),
            mean=whole.raw.get("similarity_fn_name") == "meanmaxsim",
        )

    def expansion(self, whole: Fields, texts: Fields) -> Expansion | None:
        """How queries are filled up: in the new form, or by PyLate's fields."""
        raw = texts.raw.get("query_expansion", whole.raw.get("query_expansion"))
        if raw is None and not (_OF_PYLATE & whole.raw.keys() and whole.get("do_query_expansion", True)):
            return None
        if raw is None:
            attend = whole.get("attend_to_expansion_tokens", False)
            raw = {"strategy": "fixed", "attend": attend, "length": whole.size("query_length", 32)}
        fields = Fields(raw, f"{texts.source}: query_expansion")
        strategy, length = fields.choice("strategy", "", ("fixed", "min")), fields.size("length")
        attend = fields.get("attend", False)
        if not attend and not self.config.bidirectional:
            raise UnsupportedModelError(
                f"{fields.source}: attend is false; of a decoder minillm runs queries whose expansion it attends to"
            )
        return Expansion(length, strategy == "fixed", attend, fields.get("token", "") or None)

    def logit_score(self, folder: Path) -> LogitScore:
        """A LogitScore module."""
        fields = _module_fields(folder / "config.json")
        fields.choice("module_input_name", "causal_logits", ("causal_logits",))
        self.not_read(fields.source, fields.raw, {"true_token_id", "false_token_id", "module_input_name"})
        true, false = fields.token_id("true_token_id"), fields.token_id("false_token_id")
        if true is None or max(true, false or 0) >= self.config.vocab_size:
            raise CheckpointError(
                f"{fields.source}: true_token_id and false_token_id should be below {self.config.vocab_size}, the size "
                f"of the vocabulary; found {true} and {false}"
            )
        return LogitScore(true, false)

    # --- files of the whole -------------------------------------------------------------------------------------------

    def model(self, task: str, late: bool = False) -> dict[str, Any]:
        """config_sentence_transformers.json: prompts, the comparison of vectors, the function of logits."""
        fields = Fields(read_optional_json(self.folder / MODEL_FILE), MODEL_FILE)
        prompts: dict[str, Any] = {name: text for name, text in fields.get("prompts", {}).items() if text is not None}
        if not all(isinstance(text, str) for text in prompts.values()):
            raise CheckpointError(f"{MODEL_FILE}: prompts should be texts, found {prompts!r:.60}")
        for role in ("query", "document") if late else ():
            if role in prompts:  # the marker goes before it as a token
                prompts[role] = str(prompts[role]).removeprefix(str(fields.raw.get(f"{role}_prefix") or ""))
        default = fields.get("default_prompt_name", "") or None
        if default is not None and default not in prompts:
            raise CheckpointError(f"{MODEL_FILE}: default_prompt_name is {default!r:.60}, and there is no such prompt")
        settings: dict[str, Any] = {"prompts": prompts, "default_prompt": default}
        read = {"prompts", "default_prompt_name"} | _WITHOUT_EFFECT[MODEL_FILE]
        if late:
            read |= _OF_PYLATE | {"similarity_fn_name", "model_type"}
        if task in ("feature-extraction", "fill-mask"):
            read |= {"activation_fn"} | ({"max_active_dims"} if task == "fill-mask" else {"truncate_dim"})
            if task == "fill-mask":
                settings["similarity"] = "dot"
            elif fields.raw.get("truncate_dim") is not None:
                settings["truncate_dim"] = fields.size("truncate_dim")
            if fields.raw.get("similarity_fn_name") in SIMILARITIES:
                read, settings["similarity"] = read | {"similarity_fn_name"}, fields.raw["similarity_fn_name"]
        else:
            read |= {"similarity_fn_name", "truncate_dim", "activation_fn"}
            settings["score_function"] = self.score_function(fields, task)
        self.not_read(MODEL_FILE, fields.raw, read)
        return settings

    def score_function(self, fields: Fields, task: str) -> Any:
        """The function of a cross-encoder's logits: the file's, else config.json's, else sigmoid for one label."""
        single = task == "text-generation" or len(self.config.labels) == 1
        named = read_score_function(fields, "activation_fn")
        named = named or read_score_function(Fields(read_optional_json(self.folder / "config.json")))
        return named or ("sigmoid" if single else "none")

    def texts_file(self) -> tuple[str, dict[str, Any]]:
        """Name and content of sentence_bert_config.json, or of the file that an old release wrote."""
        paths = [path for name in TEXTS_FILES if (path := self.folder / name).exists()]
        raw = next((raw for path in paths if (raw := read_json(path))), {})
        return next((path.name for path in paths), TEXTS_FILES[0]), raw

    def texts(self, task: str, max_tokens: int | None, late: bool = False) -> dict[str, Any]:
        """sentence_bert_config.json: how texts are read."""
        name, raw = self.texts_file()
        fields = Fields(raw, name)
        result, key = _RESULTS[task]
        fields.choice("transformer_task", task, (task,))
        fields.choice("module_output_name", key, (key,))
        modalities = fields.get("modality_config", {})
        if isinstance(of_text := modalities.get("text"), dict):
            Fields(of_text, f"{name}: modality_config.text").choice("method_output_name", result, (result,))
        calls = Fields(fields.get("processing_kwargs", {}), f"{name}: processing_kwargs")
        of_texts = Fields(calls.get("text", {}), f"{name}: processing_kwargs.text")
        self.not_read(of_texts.source, of_texts.raw, _WITHOUT_EFFECT["text"] | {"max_length"})
        self.not_read(calls.source, calls.raw, {"text", "chat_template", "image", "audio", "video"})
        read = {"transformer_task", "module_output_name", "modality_config", "processing_kwargs"}
        if late:
            read |= {"query_length", "document_length", "query_expansion"}
        self.not_read(name, raw, read | {"max_seq_length", "do_lower_case"} | _WITHOUT_EFFECT[TEXTS_FILES[0]])
        if raw.get("max_seq_length") is not None:
            max_tokens = fields.size("max_seq_length")
        if of_texts.raw.get("max_length") is not None:
            max_tokens = of_texts.size("max_length")
        settings: dict[str, Any] = {"max_tokens": max_tokens, "lowercase": fields.get("do_lower_case", False)}
        if "message" in modalities:
            settings |= {"messages": self.messages(modalities["message"], calls), "strip": False}
        return settings

    def messages(self, modality: Any, calls: Fields) -> AsMessages:
        """How the chat template writes texts."""
        if self.template is None:
            raise CheckpointError(f"{self.folder} has no chat template, and its texts are messages")
        variables = dict(calls.get("chat_template", {}))
        keep_end = variables.pop("restore_suffix", True) is not False
        calls_tokenizer = {name: variables.pop(name) for name in _OF_TOKENIZERS if name in variables}
        self.not_read(f"{calls.source}.chat_template", calls_tokenizer, set())
        said = modality.get("format", "auto") if isinstance(modality, dict) else "auto"
        parts = said == "structured" or (said == "auto" and any(text in self.template for text in _PARTS))
        return AsMessages(parts, variables, keep_end)
