"""The test that a fresh build of the C kernels passes before it is kept: a program that `compiling` runs.

Every kernel computes small cases, in every format of weights and of the cache, with few and with many rows and on two
threads; the results are compared with the reference's.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...batch import Batch, TokenSequence
from ...reference.attention import AttentionSpec
from ...reference.blocks import BLOCK_FORMATS, BlockFormat, BlockMatrix
from ...reference.philox import Keys
from ...reference.quantize import quantize
from ...reference.rotary import Rotation
from ..formats import CACHE_FORMATS, STORED_FORMATS, Format
from ..low_rank import LowRankWeight
from ..operations import Backend
from ..pages import Pages
from ..storage import Experts, narrow
from ..weights import Weight
from . import compiling
from .backend import ACTIVATIONS, GATES, CpuBackend
from .launching import set_threads
from .memory import Likeliest

TOLERANCE = 2e-5
"""Largest difference, of the largest magnitude in a result: some roundings to float32"""

Case = tuple[str, Callable[[Backend], Any]]
"""A name, and what it computes on a backend."""


def main() -> None:
    """Test the library that is this process's argument; print the first case that differs, and exit with 1."""
    with suppress(ImportError):  # which Windows has not
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # no file is left
    compiling.use(Path(sys.argv[1]))
    set_threads(2)
    for name, compute in _cases():
        with np.errstate(all="ignore"):
            expected, got = compute(Backend()), compute(CpuBackend())
            error = np.abs(np.subtract(got, expected, dtype=np.float64)).max() / max(1e-9, np.abs(expected).max())
        if not error < TOLERANCE:  # also if it is NaN
            print(f"{name}: error {error:.1e} relative to NumPy")
            sys.exit(1)
    print(compiling.PASSED)


def _cases() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    yield from _products(rng)
    yield from _attention(rng)
    x, gain, bias = (rng.standard_normal(shape, np.float32) for shape in ((3, 100), 100, 100))
    yield "layer_norm", methodcaller("layer_norm", x, Weight("", gain, bias), 1e-5)
    yield "rms_norm", methodcaller("rms_norm", x, Weight("", gain), 1e-5)
    yield from _convolutions(rng)
    yield from _delta_rules(rng)
    yield from _selective_scans(rng)
    yield "take_rows", methodcaller("take_rows", x, np.array([2, 0]))
    down, up = (Weight("", rng.standard_normal(shape, np.float32)) for shape in ((5, 100), (100, 5)))
    yield (
        "add_low_rank",
        lambda on: on.add_low_rank(
            x.copy(), x, [(np.array([2]), LowRankWeight(down, up))], activation="relu", residual=x
        ),
    )
    ids = np.array([4, 0, 4])
    for form in STORED_FORMATS.values():
        width = 256 if form.block else 100
        table, places = (Weight("", rng.standard_normal((rows, width), np.float32)) for rows in (5, 9))
        table = Weight("", _stored(table.data, form))
        yield f"embed, {form.name}", methodcaller("embed", ids, table, ids + 1, places)
    for activation in filter(None, GATES):
        yield f"glu, {activation}", methodcaller("glu", x, activation)
    yield "glu, alone", methodcaller("glu", x, "relu", alone=True)
    factors = rng.standard_normal((3, 3, 37), np.float32)[:, 1]
    yield "multiply", lambda on: on.multiply(x[:, :37], factors, factor=Weight("", gain[:1]))
    yield "multiply, columns", lambda on: on.multiply(x[:, :37], factor=Weight("", gain[:37]))
    logits = 3 * rng.standard_normal((4, 5000), np.float32)
    yield "argmax", lambda on: Likeliest(logits).tokens() if on.name == "cpu" else on.sampler.argmax(logits)
    yield "scale_logits", lambda on: on.scale_logits(logits.copy(), 0.3, 2.0)
    masks = rng.integers(0, 2**32, (2, -(-5000 // 32)), np.uint32)
    yield "keep_allowed", partial(_keep_allowed, logits=logits, masks=masks)
    experts = Experts(tuple(rng.standard_normal((7, 100), np.float32) for _ in range(5)))
    yield "experts", partial(_experts, x=x, logits=logits[:3, :5], weight=Weight("", experts))
    keys, filters = Keys(np.arange(4, dtype=np.uint64), np.arange(4), np.arange(4)), {"top_p": 0.9, "min_p": 0.01}
    yield "log_probs", lambda on: np.hstack(on.sampler.log_probs(logits, keys.positions, 7)[1:])
    yield "sample", lambda on: on.sampler.sample(logits, keys, temperature=0.8, top_k=50, **filters)


def _products(rng: np.random.Generator) -> Iterator[Case]:
    """Whole numbers with 127 in every group of 32, which rounding to int8 does not change."""
    activations = cycle(ACTIVATIONS)
    for form in STORED_FORMATS.values():
        for inputs, outputs in ((256, 37), (1792, 19)) if form.block else ((100, 37), (1701, 19)):
            values = rng.standard_normal((outputs, inputs), np.float32)
            weight = Weight("", _stored(values, form), rng.standard_normal(outputs, np.float32))
            for rows in (1, 2, 3, 16, 17, 70):
                x = rng.integers(-127, 128, (rows, inputs)).astype(np.float32)
                x[:, ::32] = 127
                residual = rng.standard_normal((rows, outputs), np.float32)
                compute = methodcaller("linear", x, weight, activation=next(activations), residual=residual)
                yield f"linear, {form.name}, {rows} rows", compute
                if rows > 16 and not form.scale_bits:
                    yield f"linear, {form.name}, {rows} rows, deterministic", partial(_deterministic, compute)


def _deterministic(compute: Callable[[Backend], Any], on: Backend) -> Any:
    return compute(CpuBackend(deterministic=True) if on.name == "cpu" else on)


def _attention(rng: np.random.Generator) -> Iterator[Case]:
    """Queries and keys turned, keys and values stored, attention of a prefill and a decode step over shuffled pages."""
    for D in (20, 64):  # of whole vectors or not
        yield from _attention_of(rng, D)
    yield from _latents(rng)


def _attention_of(rng: np.random.Generator, D: int) -> Iterator[Case]:
    H, K, P = 4, 2, 32
    prompt, line = (
        TokenSequence([0] * 70, 0, [3, 0, 9]),
        TokenSequence([0] * 300, 299, [1, 2, *range(4, 9), 10, 11, 12]),
    )
    batch = Batch.of([prompt, line], [70, 1], P)
    q, k, v = (rng.standard_normal((batch.num_tokens, heads, D), np.float32) for heads in (H, K, K))
    rotation = Rotation(frequencies=Weight("", rng.uniform(0, 1, D // 2).astype(np.float32)))
    slopes = Weight("", rng.uniform(0.01, 0.5, H).astype(np.float32))
    bias = Weight("", rng.standard_normal((H, 2 * 40 + 1), np.float32))
    sinks = Weight("", rng.standard_normal(H, np.float32))
    variants: list[dict[str, Any]] = [
        {}, {"window": 50, "sinks": sinks}, {"slopes": slopes, "bias": bias}, {"softcap": 0.7, "causal": False},
    ]  # fmt: skip
    yield "rotary", lambda on: np.concatenate(on.rotary(q, k, batch, rotation), axis=1)
    for name, form in CACHE_FORMATS.items():
        pages = Pages(np, (1, 13, K, P, D), form)
        for stored in pages.layers[0]:
            stored[:] = rng.standard_normal(stored.shape, np.float32)
        yield f"store_kv, {name}", partial(_store, k=k, v=v, pages=pages, batch=batch)
        for variant in variants:
            spec = AttentionSpec(0.2, **variant)
            yield f"attend, {name}, {D}, {[*variant]}", methodcaller("attend", q, pages, 0, batch, spec)


def _latents(rng: np.random.Generator) -> Iterator[Case]:
    """Attention to keys whose last numbers are the values, and products of heads with matrices of their own."""
    H, r, C, P = 4, 8, 20, 32
    prompt, line = TokenSequence([0] * 20, 0, [3]), TokenSequence([0] * 300, 299, [1, 2, *range(4, 12)])
    batch = Batch.of([prompt, line], [20, 1], P)
    q, k, c = (rng.standard_normal((21, heads, width), np.float32) for heads, width in ((H, r + C), (1, r), (1, C)))
    for name, form in CACHE_FORMATS.items():
        if form.group:  # which such vectors are not stored in
            continue
        pages = Pages(np, (1, 12, 1, P, r + C), form, C)
        pages.layers[0][0][:] = rng.standard_normal((12, 1, P, r + C), np.float32)
        yield f"store_kv of latents, {name}", partial(_store, k=k, v=c, pages=pages, batch=batch)
        yield f"attend, values in keys, {name}", methodcaller("attend", q, pages, 0, batch, AttentionSpec(0.2))
    weight = Weight("", rng.standard_normal((H * 12, C), np.float32))
    yield "linear_heads", methodcaller("linear_heads", q, weight)


def _store(on: Backend, k: Any, v: Any, pages: Pages, batch: Batch) -> Any:
    """Store keys and values. -> those that are read then, in one row"""
    for stored in pages.layers[0]:
        stored[batch.slot_pages, :, batch.slot_offsets] = np.zeros((len(k), k.shape[1], stored.shape[3]), np.float32)
    on.store_kv(k, v, pages, 0, batch)
    return np.concatenate([stored[:].ravel() for stored in pages.layers[0]])


def _convolutions(rng: np.random.Generator) -> Iterator[Case]:
    """A text that begins, one that goes on from a state, and a tree of guesses."""
    before = np.array([-1, 0, 1, 2, -2 - 3, 4, 4, 5])
    after = np.array([-1, 5, -1, 1, -1, 0, -1, -1])
    for gated, k, activation in ((False, 4, "silu"), (True, 3, None)):
        C = 37
        states = rng.standard_normal((7, k - 1, C), np.float32)
        taps = Weight("", rng.standard_normal(k * C, np.float32), rng.standard_normal(C, np.float32))
        x = rng.standard_normal((8, 3 * C if gated else C), np.float32)
        variant: dict[str, Any] = {"gated": gated, "activation": activation}
        yield f"convolve, {variant}", partial(_convolve, x, taps, states, before, after, variant)


def _convolve(x: Any, taps: Weight, states: Any, before: Any, after: Any, variant: dict[str, Any], on: Backend) -> Any:
    """Results and states of a convolution. [T + slots (k - 1), C]"""
    held = states.copy()
    cache: Any = SimpleNamespace(states_of=lambda layer: (held,))
    batch: Any = SimpleNamespace(state_before=before, state_after=after)
    out = on.convolve(x, taps, cache, 0, batch, **variant)
    return np.concatenate([out, held.reshape(-1, out.shape[1])])


def _delta_rules(rng: np.random.Generator) -> Iterator[Case]:
    """The same of the gated delta rule, with two value heads of a key head and odd sizes."""
    before = np.array([-1, 0, 1, 2, -2 - 3, 4, 4, 5])
    after = np.array([-1, 5, -1, 1, -1, 0, -1, -1])
    K, V, dk, dv = 2, 4, 21, 37
    states = rng.standard_normal((7, V, dk, dv), np.float32)
    weight = Weight("", rng.standard_normal(V, np.float32), rng.standard_normal(V, np.float32))
    x, gates = (rng.standard_normal((8, width), np.float32) for width in (2 * K * dk + V * dv, 2 * V))
    yield "delta_rule", partial(_delta_rule, x, gates, weight, states, before, after, (K, dk))


def _delta_rule(
    x: Any, gates: Any, weight: Weight, states: Any, before: Any, after: Any, keys: tuple[int, int], on: Backend
) -> Any:
    """Results and states of a gated delta rule. [T + slots dk, V dv]"""
    new_states = states.copy()
    cache: Any = SimpleNamespace(states_of=lambda layer: (None, new_states))
    batch: Any = SimpleNamespace(state_before=before, state_after=after)
    out = on.delta_rule(x, gates, weight, cache, 0, batch, keys=keys)
    return np.concatenate([out, new_states.reshape(-1, out.shape[1])])


def _selective_scans(rng: np.random.Generator) -> Iterator[Case]:
    """The same of Mamba-2's recurrence, with two heads of a group and odd sizes, and of a norm by groups."""
    before, after = np.array([-1, 0, 1, 2, -2 - 3, 4, 4, 5]), np.array([-1, 5, -1, 1, -1, 0, -1, -1])
    H, P, G, N = 4, 21, 2, 37
    states = rng.standard_normal((7, H, P, N), np.float32)
    weight = Weight("", rng.standard_normal(2 * H, np.float32), rng.standard_normal(H, np.float32))
    x, steps = (rng.standard_normal((8, width), np.float32) for width in (H * P + 2 * G * N, H))
    yield "selective_scan", partial(_selective_scan, x, steps, weight, states, before, after, G)
    gain = Weight("", rng.standard_normal(H * P, np.float32))
    yield "rms_norm by groups", methodcaller("rms_norm", x[:, : H * P].reshape(8, H, P).copy(), gain, 1e-5)


def _selective_scan(
    x: Any, steps: Any, weight: Weight, states: Any, before: Any, after: Any, groups: int, on: Backend
) -> Any:
    """Results and states of Mamba-2's recurrence. [T H P + slots H P N]"""
    new_states = states.copy()
    cache: Any = SimpleNamespace(states_of=lambda layer: (None, new_states))
    batch: Any = SimpleNamespace(state_before=before, state_after=after)
    out = on.selective_scan(x, steps, weight, cache, 0, batch, groups=(groups, states.shape[3]), limits=(0.1, 2.0))
    return np.concatenate([out.ravel(), new_states.ravel()])


def _keep_allowed(on: Backend, logits: Any, masks: Any) -> Any:
    """Logits with two masked rows. [R, V]"""
    changed = logits.copy()
    on.sampler.keep_allowed(changed, [2, 0], masks)
    return np.maximum(changed, -1e3)  # in place of -inf


def _experts(on: Backend, x: Any, logits: Any, weight: Weight) -> Any:
    """A mixture of experts of one matrix each. [T, in], [T, X] -> [T, out]"""
    routing = on.route(np.ascontiguousarray(logits), 2, normalised=True)
    return on.combine(on.linear_experts(x[routing.tokens], weight, routing), routing)


def random_blocks(rng: np.random.Generator, form: BlockFormat, outputs: int, inputs: int) -> BlockMatrix:
    """Blocks of any integers, with scales of a size that weights have. [out, in]"""
    blocks = rng.integers(0, 256, (outputs, inputs // form.numbers, form.bytes), np.uint8)
    places = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "MXFP4": (), "NVFP4": (), "NF4": (), "FP4": ()}.get(
        form.name
    )
    if places is None:
        places = (0, 2) if form.name in ("Q4_K", "Q5_K", "Q5_1", "Q5_0X2") else (0,)
    for place in places:
        blocks[..., place : place + 2] = rng.uniform(1e-4, 1e-3, (*blocks.shape[:2], 1)).astype("<f2").view(np.uint8)
    if form.name == "MXFP4":
        blocks[..., 0] = rng.integers(110, 125, blocks.shape[:2])
    for place in {"NVFP4": (0, 4), "NF4": (0,), "FP4": (0,)}.get(form.name, ()):
        scales = rng.uniform(1e-3, 1e-2, (*blocks.shape[:2], 1)).astype("<f4")
        blocks[..., place : place + 4] = scales.view(np.uint8)
    return BlockMatrix(blocks.reshape(outputs, -1), form)


def _stored(values: Any, form: Format) -> Any:
    """A matrix in a format, as backends keep it; in blocks, other numbers."""
    if form.block:
        return random_blocks(np.random.default_rng(0), BLOCK_FORMATS[form.block], *values.shape)
    if form.scale_bits:
        stored = quantize(values, form.bits, form.group)
        if not form.offset_bits:
            return stored
        zeros = (np.arange(stored.scales.size) % 16).astype(np.uint8).reshape(stored.scales.shape)
        return replace(stored, offsets=zeros if form.offset_bits == 8 else -stored.scales * zeros)
    return values if form.bits == 32 else narrow(values, form)
