"""Loading the parts of an engine: models, tokenizer, chat template, the checkpoint's defaults.

Also the choice of backend, device and dtype.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from .backends.formats import CACHE_FORMATS, WEIGHT_FORMATS
from .backends.low_rank import AdapterWeights
from .backends.numpy import NumpyBackend
from .backends.operations import Backend
from .chat import ChatTemplate
from .checkpoint import find_adapter, find_model, find_tokenizer
from .checkpoint.gguf import GGUF, is_gguf, read_gguf
from .config import ModelConfig, warn_of_unknown_tokens
from .decoding.settings import model_config_fields, unsupported
from .errors import CheckpointError, DeviceError, ModelNotFoundError, ParameterError, UnsupportedModelError, shown
from .files import read_optional_json, read_text
from .models import load_adapter, load_model, read_model_config
from .models.base import Model
from .pooling import EmbeddingSettings, Pooling
from .sentence_files import read_embedding_settings
from .tokenizer import Tokenizer
from .tokenizer.settings import read_settings

_LOGGER = logging.getLogger("minillm")


TOOL_USE = "additional_chat_templates/tool_use.jinja"
BACKENDS = ("auto", "cpu", "numpy")
"""Backends of device "cpu": kernels in C, and NumPy"""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Device, backend, dtypes and threads of a model, as documented in `Engine`."""

    device: str = "cpu"
    dtype: str = "auto"
    backend: str = "auto"
    cache_dtype: str = "auto"
    threads: int | None = None


class PlacementFields(TypedDict, total=False):
    """`Placement` as keyword arguments, for type checkers."""

    device: str
    dtype: str
    backend: str
    cache_dtype: str
    threads: int | None


def choose_backend(placement: Placement, max_batch_size: int) -> Backend:
    """Make the backend for a placement.

    Raises:
        DeviceError: a value is unknown or not available here.
    """
    _one_of("device", placement.device, ("cpu", "cuda"))
    check_dtype(placement.dtype)
    _one_of("backend", placement.backend, BACKENDS)
    _one_of("cache_dtype", placement.cache_dtype, ("auto", *CACHE_FORMATS))
    if placement.threads is not None:
        _set_threads(placement.threads)
    if placement.device == "cuda":
        return _cuda(placement, max_batch_size)
    name = _default_backend() if placement.backend == "auto" else placement.backend
    return _cpu(placement) if name == "cpu" else _numpy(placement, max_batch_size)


def _default_backend() -> str:
    """The backend that "auto" stands for: that of MINILLM_BACKEND, else the kernels in C, else NumPy.

    A warning says why the kernels cannot run, which includes how to get a compiler.
    """
    if named := os.environ.get("MINILLM_BACKEND"):
        _one_of("MINILLM_BACKEND", named, BACKENDS[1:])
        return named
    from .backends.cpu.compiling import load

    try:
        load()
    except DeviceError as error:
        _LOGGER.warning("%s; minillm computes with NumPy, which is slower", error)
        return "numpy"
    return "cpu"


def _numpy(placement: Placement, max_batch_size: int) -> Backend:
    """The NumPy backend. It computes in float32; "auto" keeps quantised weights, and converts the rest to float32.

    For a single sequence, weights stay as stored: they are mapped, and one row's product is bound by memory in any
    layout. For several rows they are column-major: at 8 rows 1.0 to 1.35 times as fast by shape, each product timed
    alone; no gain of a whole step has been shown.
    """
    if placement.cache_dtype not in ("auto", "float32"):
        raise DeviceError(f"cache_dtype {placement.cache_dtype!r} needs backend 'cpu', that is, a C compiler")
    return NumpyBackend(weights=placement.dtype, weight_order="C" if max_batch_size == 1 else "F")


def _cpu(placement: Placement) -> Backend:
    """The backend of kernels in C. Weights and cache keep their stored type unless another is set."""
    from .backends.cpu.backend import CpuBackend
    from .backends.cpu.launching import set_threads

    if placement.threads is not None:
        set_threads(placement.threads)
    cache_dtype = "float32" if placement.cache_dtype == "auto" else placement.cache_dtype
    return CpuBackend(weights=placement.dtype, cache=cache_dtype)


def _cuda(placement: Placement, max_batch_size: int) -> Backend:
    """The CUDA backend on CuPy. "auto" keeps the stored type of weights and computes in it (float16, bfloat16 or
    float32), so it never rounds float32. With weights in 8 or 4 bits it computes in bfloat16 if the checkpoint is
    stored in it, else in float16.

    With MINILLM_CUDA_DEBUG=1 in the environment the kernels check indices against their bounds; with
    MINILLM_CUDA_DEPENDENT=0 those of a recorded step are not launched dependently, with 1 they must be.
    """
    if placement.backend != "auto":
        raise DeviceError(f"backend {placement.backend!r} computes on a CPU: leave it out with device 'cuda'")
    if placement.cache_dtype != "auto":
        raise DeviceError(
            f"cache_dtype {placement.cache_dtype!r} is for a CPU: on 'cuda' the K/V cache has the type of activations, "
            "which dtype says"
        )
    from .backends.cuda.backend import CudaBackend
    from .backends.cuda.compiling import CupyLauncher
    from .backends.cuda.dependent import check_architecture, has_dependent_launches
    from .backends.cuda.device import CupyDevice

    launcher = CupyLauncher()  # checks first for a GPU
    debug, dependent = (os.environ.get(f"MINILLM_CUDA_{name}", "") for name in ("DEBUG", "DEPENDENT"))
    if dependent == "1":
        check_architecture(launcher.architecture)
    early = dependent == "1" or (dependent != "0" and has_dependent_launches(launcher.architecture))
    switches = {"debug": debug == "1", "dependent": early}
    return CudaBackend(CupyDevice(), launcher, placement.dtype, max_batch_size=max_batch_size, **switches)


def _set_threads(threads: int) -> None:
    """Set the number of BLAS threads of this process. Warns if it exceeds the number of cores."""
    from threadpoolctl import threadpool_limits

    cores = available_cores()
    if threads > cores:
        _LOGGER.warning("threads=%d is more than the %d cores there are: it will be slower", threads, cores)
    threadpool_limits(threads, user_api="blas")


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_dtype(dtype: str) -> None:
    """Refuse an unknown dtype.

    Raises:
        DeviceError: it is unknown; the message lists the known ones.
    """
    _one_of("dtype", dtype, tuple(WEIGHT_FORMATS))


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise DeviceError(f"{name} {shown(value)} is not known: expected {', '.join(map(repr, known))}")


logger = logging.getLogger("minillm")

DEMO_MODEL = Path(__file__).parent / "assets" / "demo-opt"

Name = str | os.PathLike[str]
"""A checkpoint folder, a GGUF file or a Hugging Face hub id."""


@dataclass(frozen=True)
class Parts:
    """The loaded parts of an engine, without its cache."""

    backend: Backend
    model: Model
    tokenizer: Tokenizer | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Generation fields of the checkpoint"""
    helpers: Mapping[str, Model] = field(default_factory=dict)
    """Additional models by role, "draft" or "amateur" """
    chat_template: ChatTemplate | None = None
    adapters: Mapping[str, AdapterWeights] = field(default_factory=dict)
    """LoRA adapters for single requests, by name"""
    helper_backend: Backend | None = None
    """Of the helper models, where ranks share the model"""
    embedding: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    """Settings of embedding"""
    path: Path | None = None
    """The checkpoint's folder or GGUF file; None of random weights"""


def load_parts(
    model: Name | None,
    revision: str | None,
    helpers: Mapping[str, Name],
    backend: Backend,
    tokenizer: Name | Tokenizer | None = None,
    adapter: Name | None = None,
    adapters: Mapping[str, Name] | None = None,
    *,
    share: Callable[[Path, Sequence[Path]], dict[str, Any]] | None = None,
    helper_backend: Backend | None = None,
) -> Parts:
    """Load a model (the demo model if none is named) and its helper models.

    Args:
        model: folder, GGUF file or hub id
        revision: on the hub
        helpers: names of the "draft" and "amateur" models
        backend: the backend
        tokenizer: replaces the model's own; a chat template in its folder takes precedence over the model's
        adapter: a LoRA adapter to merge into the model: folder or hub id
        adapters: LoRA adapters for single requests, by name
        share: of the paths of the model and of its adapters: arguments of `load_model` for this process's share
        helper_backend: backend of the helper models, which are not shared; by default `backend`

    Raises:
        ModelError: a model, the adapter or the tokenizer cannot be loaded (see `errors`).
        ParameterError: the arguments contradict each other, or a helper or the tokenizer has another vocabulary.
    """
    if model is None and revision is not None:
        raise ParameterError("revision applies to a hub id, and no model is given: leave it out")
    if len(helpers) > 1:
        raise ParameterError("draft and amateur select different decoding strategies: leave one of them out")
    path = DEMO_MODEL if model is None else find_model(model, revision=revision)
    named, template = named_tokenizer(tokenizer)
    own = read_tokenizer(path) if named is None else None
    merged = None if adapter is None else find_adapter(adapter)
    folders = {name: find_adapter(where) for name, where in (adapters or {}).items()}
    part = {} if share is None else share(path, [*([] if merged is None else [merged]), *folders.values()])
    loaded = load_model(path, backend, adapter=merged, **part)
    if named is not None:
        own = named.for_model(loaded.config.vocab_size)
    helping = {
        name: _load_helper(name, where, loaded.config, helper_backend or backend) for name, where in helpers.items()
    }
    defaults = read_generation_config(path)
    if (
        named_in := path / "generation_config.json"
    ).exists():  # config.json, which may stand for it, has been looked at
        warn_of_unknown_tokens(defaults, loaded.config.vocab_size, named_in)
    if own is not None and own.end_ids:
        defaults = {"eos_token_id": list(own.end_ids)} | defaults
    template = template or read_chat_template(path)
    whole = loaded.config if share is None or not folders else read_model_config(path)
    lora = {name: load_adapter(folder, whole, backend, **part) for name, folder in folders.items()}
    source = None if template is None else template.source
    embedding = read_embedding_settings(path, loaded.config, source)
    if is_gguf(path):
        embedding = replace(embedding, pooling=_gguf_pooling(read_gguf(path), embedding.pooling))
    return Parts(backend, loaded, own, defaults, helping, template, lora, helper_backend, embedding, path)


def read_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder or a GGUF file; None if it has none.

    Raises:
        ModelError: it cannot be read.
    """
    if not is_gguf(path):
        return Tokenizer.find(path)
    gguf = read_gguf(path)
    table = gguf.tensors.get("token_embd.weight")
    return Tokenizer.from_gguf(gguf, table.shape[0] if table is not None else 0)


def named_tokenizer(tokenizer: Name | Tokenizer | None) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The tokenizer that a user names, and the chat template in its folder."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer, None
    path = find_tokenizer(tokenizer)
    if is_gguf(path):
        found = read_tokenizer(path)
        if found is None:
            raise ModelNotFoundError(f"{path} holds no tokenizer")
        return found, read_chat_template(path)
    return Tokenizer.from_path(path), read_chat_template(path.parent if path.is_file() else path)


def _load_helper(name: str, where: Name, config: ModelConfig, backend: Backend) -> Model:
    """Load a draft or amateur model, which must have the main model's vocabulary."""
    helper = load_model(find_model(where), backend)
    if helper.config.vocab_size != config.vocab_size:
        raise ParameterError(
            f"{name} {os.fspath(where)!r:.100} has a vocabulary of {helper.config.vocab_size} tokens, the model one of "
            f"{config.vocab_size}: they should be equal"
        )
    if bool(helper.config.encoder_layers) != bool(config.encoder_layers):
        raise ParameterError(f"{name} {os.fspath(where)!r:.100} and the model should both have an encoder, or neither")
    return helper


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's defaults, as `generation_fields`; unsupported ones are named in a warning of "minillm".

    Raises:
        CheckpointError: a file cannot be read, or is not a JSON object.
    """
    path, defaults = generation_fields(folder)
    if names := unsupported(defaults):
        logger.warning(
            "%s: minillm does not support %s; results may differ from those of transformers", path, ", ".join(names)
        )
    return defaults


def generation_fields(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The generation fields of a checkpoint, and their file: generation_config.json, in older ones config.json.

    As in transformers, the one replaces all such fields of the other. Empty without either.
    Those of a GGUF file are in its metadata.

    Raises:
        CheckpointError: a file cannot be read, or is not a JSON object.
    """
    if is_gguf(folder):
        return folder, _gguf_defaults(read_gguf(folder))
    path = folder / "generation_config.json"
    if path.exists():
        return path, read_optional_json(path)
    path = folder / "config.json"
    return path, model_config_fields(read_optional_json(path))


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key of a GGUF file, after "general.sampling." -> field of generation_config.json"""


def _gguf_defaults(gguf: GGUF) -> dict[str, Any]:
    """`general.sampling.*` and `tokenizer.ggml.suppress_tokens`, as fields of generation_config.json."""
    prefix = "general.sampling."
    stored = {key.removeprefix(prefix): gguf.metadata[key] for key in gguf.metadata if key.startswith(prefix)}
    defaults = {name: _as_written(stored[key]) for key, name in _SAMPLING.items() if key in stored}
    if defaults:
        defaults["do_sample"] = defaults.get("temperature", 1) > 0
    if not defaults.get("temperature", 1):
        del defaults["temperature"]
    if others := sorted(key for key, value in stored.items() if key not in _SAMPLING and value):
        logger.warning("%s: not read: %s", gguf.path, ", ".join(prefix + key for key in others))
    suppressed = gguf.numbers("tokenizer.ggml.suppress_tokens")
    return defaults if suppressed is None else defaults | {"suppress_tokens": suppressed.tolist()}


def _as_written(value: float) -> float:
    """A fraction as it was before it became a float32: 0.9, not 0.8999999762."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


_POOLINGS: dict[int, Pooling | None] = {0: None, 1: "mean", 2: "cls", 3: "last"}


def _gguf_pooling(gguf: GGUF, usual: Pooling) -> Pooling:
    """The pooling that a GGUF file names, or the usual one.

    Raises:
        UnsupportedModelError: another pooling, such as that of a head that scores pairs of texts.
    """
    key = f"{gguf.get('general.architecture', str)}.pooling_type"
    code = gguf.get(key, int, 0)
    if code not in _POOLINGS:
        raise UnsupportedModelError(f"{gguf.path}: {key} is {code}; minillm runs {', '.join(map(str, _POOLINGS))}")
    return _POOLINGS[code] or usual


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a checkpoint folder or a GGUF file; None if it has none.

    In a folder it is chat_template.jinja, else the one in tokenizer_config.json.

    Of several named templates "default" is used, and "tool_use" for conversations with tools, as in transformers. They
    are in tokenizer_config.json, or in the folder additional_chat_templates/; in a GGUF file under keys of their own.

    Raises:
        CheckpointError: a file cannot be read, or a template is not text.
    """
    if is_gguf(folder):
        return _gguf_template(read_gguf(folder))
    config = folder / "tokenizer_config.json"
    settings = read_settings(folder)
    path = folder / "chat_template.jinja"
    source: str | None
    if path.exists():
        source, other = read_text(path), folder / TOOL_USE
        tool_use = read_text(other) if other.exists() else None
    else:
        path, (source, tool_use) = config, _named_templates(config, settings.get("chat_template"))
    if source is None:
        return None
    return ChatTemplate(source, f"the chat template of {path}", _special_tokens(settings), tool_use)


def _gguf_template(gguf: GGUF) -> ChatTemplate | None:
    """`tokenizer.chat_template`, with the special tokens that the metadata name."""
    source = gguf.get("tokenizer.chat_template", str)
    if source is None:
        return None
    tokens, special = gguf.strings("tokenizer.ggml.tokens") or [], {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token_id = gguf.get(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is not None and 0 <= token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    tool_use = gguf.get("tokenizer.chat_template.tool_use", str)
    return ChatTemplate(source, f"the chat template of {gguf.path}", special, tool_use)


def _named_templates(path: Path, value: Any) -> tuple[str | None, str | None]:
    """One template, or "default" and "tool_use" of `[{"name": ..., "template": ...}]`."""
    tool_use = None
    if isinstance(value, list) and all(
        isinstance(item, dict) and {"name", "template"} <= item.keys() for item in value
    ):
        named = {str(item["name"]): item["template"] for item in value}
        if "default" not in named:
            logger.warning("%s: no chat template is named default; ignored: %s", path, ", ".join(named))
        value, tool_use = named.get("default"), named.get("tool_use")
    for source in (value, tool_use):
        if source is not None and not isinstance(source, str):
            found = f"found {source!r:.60}"
            raise CheckpointError(
                f"{path}: chat_template should be text, or a list of objects with name and template; {found}"
            )
    return value, tool_use


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that transformers passes to a template, as text: `..._token` fields, and named extra ones."""
    further = settings.get("extra_special_tokens")
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    tokens = named | (further if isinstance(further, dict) else {})
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def affordable_pages(
    config: ModelConfig,
    backend: Backend,
    sequences: int,
    budget: int | None,
    others: Iterable[ModelConfig] = (),
    processes: int = 1,
) -> int:
    """Number of pages for `sequences` full contexts plus a few guesses, or as many as the budget allows.

    By default they take at most one byte in `Memory.cache_share` of the free memory, or one full context if that is
    more, for which half of the memory may be taken.

    Args:
        config: the model's shape
        backend: decides the page size
        sequences: number that run at once
        budget: bytes; None for the default
        others: shapes of further models, each of which needs as many pages
        processes: number of them that share this machine's memory

    Raises:
        ParameterError: the budget is less than one page.
    """
    models = (config, *others)
    memory = backend.memory
    position = sum(m.num_layers * memory.position_bytes(m.num_kv_heads, m.head_dim) for m in models)
    page = position * memory.page_size
    context = config.max_positions // memory.page_size + 1
    if config.encoder_layers:
        context += config.max_source_positions // memory.page_size + 1
    if budget is None:
        free = memory.free_bytes() // processes
        budget = max(page, free // memory.cache_share, min(context * page, free // 2))
    if budget < page:
        raise ParameterError(f"cache_bytes should be at least {page} (one page of {memory.page_size}), found {budget}")
    return min(sequences * context, budget // page)
