"""Experiments on the parts of a model: attention maps, logit lens, ablation, activation patching, steering vectors.

Each is a few lines on `watch` and `hooks` (`Engine.generate`), and a starting point for experiments of your own. The
variants of a prompt that an experiment needs run side by side, in the engine's batches.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..decoding.hooks import Hook, Place
from ..decoding.prompts import Prompt, is_prompt
from ..errors import ParameterError, listed, shown
from ..reference.softmax import log_softmax, top_log_probs
from .pictures import AttentionMaps

__all__ = ["Lens", "ablate_heads", "attention_maps", "logit_lens", "next_log_probs", "patch", "steering_vector"]

if TYPE_CHECKING:
    from ..engine.engine import Engine


def attention_maps(
    engine: "Engine", prompt: Prompt, layer: int, heads: Sequence[int] | None = None, *, lora: str | None = None
) -> AttentionMaps:
    """The attention of a layer over a prompt, watched at `attention.pattern`: arrays that a notebook shows as maps.

    Args:
        engine: with the model
        prompt: text or token ids
        layer: its number
        heads: their numbers (default: all)
        lora: name of one of the engine's adapters

    Raises:
        PromptError, ParameterError: as `Engine.generate`, or there is no such layer or head.

    Example:
        >>> attention_maps(engine, "A list of colors: red,", layer=0).probabilities.shape  # heads, queries, keys
        (6, 8, 8)
    """
    _check_prompt(prompt)
    if engine.config.encoder_layers:
        raise ParameterError("attention maps are not offered with an encoder-decoder, which has three kinds of them")
    attending = engine.config.layers_with_keys()
    if layer not in attending:
        raise ParameterError(
            f"layer should be one of {listed(map(str, attending))}, which have attention, found {shown(layer)}"
        )
    H = engine.config.num_heads
    heads = range(H) if heads is None else heads
    if not isinstance(heads, Sequence) or not heads or any(head not in range(H) for head in heads):
        raise ParameterError(f"heads should be numbers from 0 to {H - 1}, found {shown(heads)}")
    name = f"blocks.{layer}.attention.pattern"
    answer = engine.generate(prompt, max_new_tokens=1, watch=[name], lora=lora)
    pattern = answer.watched[name]  # [T, H, T]
    chosen = np.ascontiguousarray(pattern[:, list(heads)].swapaxes(0, 1))  # [T, H, T] -> [len(heads), T, T]
    return AttentionMaps(layer, tuple(heads), list(answer.prompt_token_ids), chosen, engine.tokenizer)


@dataclass(frozen=True)
class Lens:
    """The next tokens that a model would say if its layers ended early."""

    token_ids: list[int]
    """[T]"""
    next_ids: NDArray[np.int64]
    """The most likely next tokens, best first. Row 0 is of the embedding, row i of block i - 1. [L + 1, T, top]"""
    log_probs: NDArray[np.float32]
    """Their natural log-probabilities. [L + 1, T, top]"""


def logit_lens(engine: "Engine", prompt: Prompt, top: int = 1, *, lora: str | None = None) -> Lens:
    """The final norm and the head applied to the residual stream after each block (nostalgebraist, 2020).

    Args:
        engine: with the model
        prompt: text or token ids
        top: how many next tokens
        lora: name of one of the engine's adapters

    Raises:
        PromptError, ParameterError: as `Engine.generate`.

    Example:
        >>> lens = logit_lens(engine, "A list of colors: red,")
        >>> [engine.tokenizer.decode(ids) for ids in lens.next_ids[-1:, -1]]
        [' orange']
    """
    _check_prompt(prompt)
    V = engine.config.vocab_size
    if not isinstance(top, int) or not 1 <= top <= V:
        raise ParameterError(f"top should be a whole number from 1 to {V}, found {shown(top)}")
    states = ["embedding", *(f"blocks.{i}.residual" for i in range(engine.config.num_layers))]
    plain = engine.generate(prompt, max_new_tokens=1, watch=states, lora=lora)
    ids, log_probs = [], []
    for state in states:
        rows = plain.watched[state]
        last = {states[-1]: lambda _, place, rows=rows: rows[place.positions]}
        logits = engine.generate(
            plain.prompt_token_ids, max_new_tokens=1, hooks=last, watch=["logits"], lora=lora
        ).watched["logits"]
        best, values = top_log_probs(logits, top, np)  # [T, V] -> 2 x [T, top]
        ids.append(best)
        log_probs.append(values)
    return Lens(plain.prompt_token_ids, np.stack(ids), np.stack(log_probs))


def ablate_heads(engine: "Engine", prompt: Prompt, *, lora: str | None = None) -> tuple[int, NDArray[np.float32]]:
    """The most likely next token, and what each head adds to its log-probability; 0 in layers without any. [L, H]

    What is added is the difference to a pass in which the head's result z is zero at every position; numbers below 0
    are of heads that speak for another token.

    Raises:
        PromptError, ParameterError: as `Engine.generate`.
    """
    _check_prompt(prompt)
    answer = engine.generate(prompt, max_new_tokens=1, do_sample=False, eos_token_id=[], lora=lora)
    [token], ids = answer.token_ids, answer.prompt_token_ids
    L, H = engine.config.num_layers, engine.config.num_heads

    def without(head: int) -> Hook:
        def ablate(z: Any, _: Place) -> Any:
            z[:, head] = 0
            return z

        return ablate

    attending = engine.config.layers_with_keys()
    variants = [{f"blocks.{layer}.attention.z": without(head)} for layer in attending for head in range(H)]
    plain, *ablated = next_log_probs(engine, [(ids, hooks) for hooks in [{}, *variants]], token, lora)
    added = np.zeros((L, H), np.float32)
    added[attending] = np.float32(plain) - np.array(ablated, np.float32).reshape(-1, H)
    return token, added


def patch(
    engine: "Engine", prompt: Prompt, source: Prompt, point: str = "residual", *, lora: str | None = None
) -> tuple[int, NDArray[np.float32]]:
    """The next token after `source`, and how far each patch of `prompt` restores its log-probability. [L, T]

    A patch replaces the row of a point, of one block and one position, by that of `source` (Meng et al., arXiv
    2202.05262, section 2). 0: as likely as after `prompt`; 1: as after `source`.

    Args:
        engine: with the model
        prompt: a text
        source: another, of as many tokens
        point: name of a point without its block's number, such as "attention.z"
        lora: name of one of the engine's adapters

    Raises:
        ParameterError: the texts differ in length, or do not differ for the model; or as `Engine.generate`.
        PromptError: as `Engine.generate`.
    """
    _check_prompt(prompt)
    _check_prompt(source)
    if f"blocks.0.{point}" not in engine.names():
        raise ParameterError(f"point={shown(point)} is no point of a block: expected one such as 'residual'")
    clean = engine.generate(
        source, max_new_tokens=1, do_sample=False, eos_token_id=[], watch=[f"blocks.*.{point}"], lora=lora
    )
    ids = engine.request(prompt, max_new_tokens=1).prompt_ids
    [token], source_ids, L = clean.token_ids, clean.prompt_token_ids, engine.config.num_layers
    if len(ids) != len(source_ids):
        raise ParameterError(
            f"both texts should have the same number of tokens, found {len(ids)} and {len(source_ids)}: choose others, "
            "such as names of one token each"
        )

    def at(layer: int, position: int) -> dict[str, Hook]:
        name = f"blocks.{layer}.{point}"
        row = clean.watched[name][position]

        def replace(array: Any, place: Place) -> Any:
            array[place.positions == position] = row
            return array

        return {name: replace}

    variants = [at(layer, position) for layer in range(L) for position in range(len(ids))]
    runs = [(source_ids, {}), *((ids, hooks) for hooks in [{}, *variants])]
    best, plain, *patched = next_log_probs(engine, runs, token, lora)
    if best - plain < 1e-6:
        raise ParameterError(
            "the next token after `source` is no less likely after `prompt`: there is nothing to restore"
        )
    restored = (np.array(patched, np.float32) - plain) / (best - plain)
    return token, restored.reshape(L, len(ids)).astype(np.float32)


def steering_vector(
    engine: "Engine", positive: Sequence[Prompt], negative: Sequence[Prompt], layer: int
) -> NDArray[np.float32]:
    """The mean difference of two sets of prompts in the residual stream after a block, at their last tokens. [E]

    Add it by a hook (Turner et al., arXiv 2308.10248):

        hooks={f"blocks.{layer}.residual": lambda array, place: array + 4 * vector}

    Raises:
        PromptError, ParameterError: as `Engine.generate`.
    """
    name = f"blocks.{layer}.residual"
    if name not in engine.names():
        raise ParameterError(f"layer should be from 0 to {engine.config.num_layers - 1}, found {shown(layer)}")
    for prompts in (positive, negative):
        if is_prompt(prompts) or not len(prompts):
            raise ParameterError(f"positive and negative should be lists of prompts, found {shown(prompts)}")

    def mean(prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        answers = engine.generate(list(prompts), max_new_tokens=1, watch=[name])
        rows: NDArray[np.float32] = np.mean(
            [answer.watched[name][answer.prompt_tokens - 1] for answer in answers], axis=0
        )
        return rows

    return mean(positive) - mean(negative)


def _check_prompt(prompt: object) -> None:
    """Refuse a list of prompts."""
    if not is_prompt(prompt):
        raise ParameterError(f"this takes one prompt, found {shown(prompt)}")


def next_log_probs(
    engine: "Engine", runs: Iterable[tuple[Prompt, Mapping[str, Hook]]], token: int, lora: str | None = None
) -> list[float]:
    """The log-probability of a token after each of some prompts, each with its hooks."""
    values: list[float] = []
    requests = []
    for prompt, hooks in runs:
        place_of_value = len(values)
        values.append(0.0)

        def note(logits: Any, _: Place, i: int = place_of_value) -> None:
            rows = engine.runner.backend.sampler.to_host(logits[-1:])  # [R, V] -> [1, V]
            values[i] = float(log_softmax(np.asarray(rows, np.float32), np)[0, token])

        requests.append(engine.request(prompt, max_new_tokens=1, hooks={**hooks, "logits": note}, lora=lora))
    engine.run(requests)
    return values
