"""Tiny models from random numbers, OPT's variants unless a config.json is given; short ways to run them. No torch."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from minillm.backends.loader import RandomTensor
from minillm.backends.numpy import NumpyBackend
from minillm.backends.operations import Backend
from minillm.backends.storage import Experts
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.cache import Concurrency, PrefixCache, new_cache
from minillm.decoding.resolving import resolve, strategy_for
from minillm.decoding.settings import GenerationConfig
from minillm.decoding.strategy import Request, Strategy
from minillm.engine.loop import StepLoop
from minillm.engine.scheduler import Limits
from minillm.models import build_model, config_of, tensor_shapes
from minillm.models.base import Model
from minillm.runner.runner import Runner

TOKENIZER = Path(__file__).parent / "data" / "tokenizer"

CONFIG: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 40,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"do_layer_norm_before": False, "word_embed_proj_dim": 24},  # opt-350m
    "untied": {"tie_word_embeddings": False},
    "galactica": {"activation_function": "gelu", "enable_bias": False, "layer_norm_elementwise_affine": False},
    "no-final-norm": {"_remove_final_layer_norm": True},
}


STDS = {
    "relative_attention_bias": 1.0,
    "shared": 0.5,
    "Attention.q.": 0.05,
    "mixer.up_proj": 0.2,
    **dict.fromkeys(("conv1d.weight", "mamba.D", "mixer.D"), 1.0),
    **dict.fromkeys(("embed_positions", "wpe", "position_embeddings"), 2.0),
    **dict.fromkeys(("embed_tokens", "embed_in", "wte", "word_embeddings.", "lm_head", "embed_out"), 0.5),
    **dict.fromkeys(("norm", "Norm", "ln_", "scal"), 0.2),
    "bias": 0.1,
    "sinks": 1.0,
}
"""The first that a tensor's name holds is the spread of its numbers. T5 does not scale its scores: its queries are
small. Nemotron-H squares what follows. Mamba's results are normed, so that small ones are as uncertain as their
rounding."""


def std_of(name: str, raw: dict[str, Any]) -> float:
    """Spread of a tensor's random numbers, such that greedy tokens neither repeat nor forget the prompt.

    At the usual 0.02, or with weak positions, a tiny model says one token for ever. Those without learned positions
    tend to do so anyhow, and are made to go on by `NO_REPEATS`.

    Args:
        name: the tensor's
        raw: the model's config.json
    """
    if raw["model_type"] in ("gemma2", "gemma3_text", "gemma4_text") and "embed_tokens." in name:
        return 0.05  # it is multiplied by sqrt(E): a tied head would find the token itself
    if "linear_num_key_heads" in raw and any(part in name for part in ("embed_tokens", "lm_head", "in_proj")):
        return 0.15 if "in_proj" in name else 0.04  # gains are about 2, and a delta net's norm enlarges rounding
    if raw["model_type"] in ("bamba", "nemotron_h") and "lm_head" in name:
        return 0.15  # the norm after Mamba-2's gate enlarges rounding
    if "encoder_layers" in raw and name.endswith(("_proj.weight", "fc1.weight", "fc2.weight")):
        # The source has a say, and scores are no larger than rounding allows.
        return 0.15 if "fc" in name else 0.4 if "encoder_attn" in name else 0.3
    usual = (0.3 if raw.get("do_layer_norm_before", True) else 0.15) if raw["model_type"] == "opt" else 0.35
    return next((std for part, std in STDS.items() if part in name), usual)


NO_REPEATS: dict[str, Any] = {"no_repeat_ngram_size": 2}
"""Greedy search that says no pair of tokens twice"""


def tiny_config(variant: str = "pre-norm", **fields: Any) -> dict[str, Any]:
    """A config.json."""
    return CONFIG | VARIANTS[variant] | fields


def tiny_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, RandomTensor]:
    """Every tensor that the config.json asks for."""
    shapes = tensor_shapes(config_of(raw))
    return {name: RandomTensor(name, shape, seed, std_of(name, raw)) for name, shape in shapes.items()}


def last_of_each_kind(names: Iterable[str]) -> list[str]:
    """Of tensors whose names differ by numbers alone, of layers and experts, the last."""
    return list({re.sub(r"\d+", "", name): name for name in names}.values())


class Held:
    """A float32 array in a tensor's place."""

    dtype = "float32"

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    def load(self) -> np.ndarray:
        return self.values

    stored = load

    def read_into(self, out: np.ndarray) -> None:
        out[...] = self.values

    def chunks(self) -> Iterator[np.ndarray]:
        yield self.values

    def merged_with(self, other: Any) -> None:
        return None

    def part(self, axis: int, first: int, stop: int) -> "Held":
        return Held(self.values[(slice(None),) * axis + (slice(first, stop),)])


def each_expert(weight: Weight) -> list[Weight]:
    """The weights that a projection of experts is made of; of any other, itself."""
    if not isinstance(weight.data, Experts):
        return [weight]
    biases = [None] * weight.shape[0] if weight.bias is None else weight.bias
    return [replace(weight, data=data, bias=bias) for data, bias in zip(weight.data.matrices, biases, strict=True)]


def tiny_model(variant: str = "pre-norm", *, seed: int = 0, backend: Backend | None = None, **fields: Any) -> Model:
    """A variant of OPT in memory."""
    return model_of(tiny_config(variant, **fields), seed=seed, backend=backend)


def model_of(raw: dict[str, Any], *, seed: int = 0, backend: Backend | None = None) -> Model:
    """A model of any family in memory, from its config.json."""
    return build_model(config_of(raw), tiny_tensors(raw, seed), backend or NumpyBackend())


def write_checkpoint(
    folder: Path,
    variant: str = "pre-norm",
    *,
    seed: int = 0,
    change: Callable[[dict[str, np.ndarray]], None] | None = None,
    **fields: Any,
) -> Path:
    """A checkpoint folder with the small tokenizer, whose 512 tokens the model has unless `fields` say otherwise."""
    raw = tiny_config(variant, **{"vocab_size": 512} | fields)
    tensors = {name: tensor.load() for name, tensor in tiny_tensors(raw, seed).items()}
    if change is not None:
        change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file({f"model.decoder.{name}": array for name, array in tensors.items()}, folder / "model.safetensors")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def runner_of(
    model: Model,
    *,
    pages: int = 64,
    page_size: int | None = None,
    backend: Backend | None = None,
    concurrency: Concurrency | None = None,
) -> Runner:
    """A runner with a cache of its own; with a `concurrency` its layers with a window keep what these see."""
    backend, options = backend or NumpyBackend(), {"prefix_cache": False, "concurrency": concurrency}
    return Runner(model, backend, new_cache(PrefixCache, model.config, backend, pages, page_size, **options))


def tiny_runner(variant: str = "pre-norm", *, seed: int = 0, pages: int = 64, page_size: int | None = None) -> Runner:
    """A random model, ready to run."""
    return runner_of(tiny_model(variant, seed=seed), pages=pages, page_size=page_size)


def random_prompts(count: int, *, seed: int = 0, longest: int = 20, vocab_size: int = 96) -> list[list[int]]:
    """Prompts of different lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@dataclass
class Result:
    """What one continuation came to."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    score: float | None = None


def loop_of(
    *,
    max_batch_size: int = 16,
    chunk: int = 512,
    headroom: int | None = 32,
    prefix_cache: bool = False,
    **runners: Runner,
) -> StepLoop:
    """A step loop over runners by their names, with `chunk` tokens a step, and with a prefix cache or without."""
    for runner in runners.values():
        runner.cache.prefix_cache = prefix_cache
    return StepLoop(runners, Limits(max_batch_size, chunk, chunk, headroom))


def request_for(
    prompt: Sequence[int], *, vocab_size: int = 96, max_new_tokens: int = 20, models: Sequence[str] = (), **fields: Any
) -> Request:
    """A request without text; nothing ends it but `eos_token_id`. `models` are the helpers that there are."""
    config = GenerationConfig(max_new_tokens=max_new_tokens, **fields)
    settings = resolve(config, {}, vocab_size=vocab_size, eos_token_id=None, models=models)
    settings = replace(settings, max_length=None)
    return Request(list(prompt), settings, strategy_for(settings))


def run(loop: StepLoop, requests: Sequence[Request], strategy: Strategy | None = None) -> list[list[Result]]:
    """Run requests to their ends. Returns each one's continuations."""
    results = {
        loop.add(replace(request, strategy=strategy or request.strategy)): [
            Result() for _ in range(request.settings.num_return_sequences)
        ]
        for request in requests
    }
    while loop.busy:
        for event in loop.step_or_raise():
            result = results[event.request_id][event.index]
            result.token_ids += event.token_ids
            result.log_probs += event.logprobs
            result.finish_reason, result.score = event.finish_reason, event.score
    return list(results.values())


def generate(runner: Runner, prompts: Sequence[Sequence[int]], *, chunk: int = 512, **fields: Any) -> list[list[int]]:
    """The first continuation's tokens of each prompt, all run side by side."""
    requests = [request_for(p, vocab_size=runner.model.config.vocab_size, **fields) for p in prompts]
    return [results[0].token_ids for results in run(loop_of(target=runner, chunk=chunk), requests)]


def logits_of(runner: Runner, token_ids: Sequence[int]) -> np.ndarray:
    """The logits of every position in one pass, with a cache of their own. [T] -> [T, V]"""
    apart = runner_of(runner.model, backend=NumpyBackend(), pages=1, page_size=len(token_ids))
    output = apart.forward([TokenSequence(list(token_ids))], [len(token_ids)], rows=range(len(token_ids)))
    return output.logits.copy()


def chunks(runner: Runner, line: list[int], size: int) -> np.ndarray:
    """The logits of every position of a line, computed `size` tokens at a time. [T, V]"""
    sequence, rows = TokenSequence(list(line)), []
    while sequence.pending:
        count = min(size, sequence.pending)
        rows.append(runner.forward([sequence], [count], rows=range(count)).logits.copy())
    return np.concatenate(rows)
