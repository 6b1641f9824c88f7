"""PyTorch on the same GPU, for `gpu.py`: its products and attention in CUDA graphs, and a decode loop it compiles.

The loop is what a small engine on `torch.compile` would be: a Llama or Qwen2 of plain functions, a static cache, one
graph for each step. Random weights, greedy. Emulated, it runs on the CPU, uncompiled.
"""

import gc
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from gpu_figures import DECODE, LOOP, Figure, Sizes, median_and_best

from minillm.config import ModelConfig
from minillm.models import published_config

COPIES = 512 << 20
"""Bytes that the calls of a graph read together, more than a cache holds"""
GROUP = 32
"""Numbers of a scale in 4 bits"""


def torch_peers(sizes: Sizes, shapes: list[str], *, emulated: bool) -> Iterator[Figure]:
    """Products and attention of every shape, then the loop."""
    if not find_spec("torch"):
        yield Figure("torch", "", "", note="left out: without torch")
        return
    for measure in (products, attention, four_bits, loop):  # which compiles for most of a minute
        for shape in shapes:
            try:
                peer = Torch("cpu" if emulated else "cuda", sizes)
                for figure in measure(peer, published_config(shape)):
                    yield figure._replace(shape=shape)
            except Exception as error:  # a failure must not end the others
                words = (str(error).splitlines() or [""])[0][:200]
                yield Figure("torch", shape, measure.__name__, note=f"failed: {type(error).__name__}: {words}")
            gc.collect()  # frees the weights before the next shape


class Torch:
    """PyTorch on a device, with random numbers of 16 bits."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        import torch

        self.torch, self.device, self.sizes = torch, device, sizes
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        if device == "cpu":
            torch.set_num_threads(1)

    def normal(self, *shape: int, std: float = 0.02) -> Any:
        """Normal numbers in bfloat16."""
        return self.torch.randn(shape, dtype=self.torch.bfloat16, device=self.device) * std

    def captured(self, calls: list[Callable[[], object]]) -> list[float]:
        """Seconds of one of `calls`, captured one after the other in one graph."""
        for call in calls[:2]:
            call()
        if self.device == "cpu":
            return [self._seconds(lambda: [call() for call in calls]) / len(calls) for _ in range(self.sizes.repeats)]
        graph = self.torch.cuda.CUDAGraph()
        self.torch.cuda.synchronize()
        with self.torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        return [self._seconds(graph.replay) / len(calls) for _ in range(self.sizes.repeats)]

    def _seconds(self, call: Callable[[], object]) -> float:
        if self.device == "cpu":
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(1e-3 * start.elapsed_time(stop))

    def copies(self, size: int) -> int:
        """Number of matrices of `size` bytes that a cache cannot hold."""
        return 2 if self.device == "cpu" else max(2, min(64, -(-COPIES // size)))


def widths(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's products."""
    E, F, D, H, K = (
        config.hidden_size,
        config.intermediate_size,
        config.head_dim,
        config.num_heads,
        config.num_kv_heads,
    )
    return {"qkv": ((H + 2 * K) * D, E), "out": (E, H * D), "up": (2 * F, E), "down": (E, F)}


def products(peer: Torch, config: ModelConfig) -> Iterator[Figure]:
    """torch.mm, which calls cuBLAS, without the host."""
    for name, (outputs, inputs) in widths(config).items():
        weights = [peer.normal(outputs, inputs) for _ in range(peer.copies(2 * outputs * inputs))]
        for T in (*peer.sizes.batches, peer.sizes.prefill):
            x = peer.normal(T, inputs)
            seconds = peer.captured([lambda w=w, x=x: peer.torch.mm(x, w.T) for w in weights])  # type: ignore[misc]
            moved = 2 * (outputs * inputs + T * inputs + T * outputs)
            amounts: dict[str, Any] = {"bytes": moved, "flops": 2 * T * outputs * inputs}
            yield Figure("torch", "", f"{name}, {T} rows, torch.mm in a graph", **median_and_best(seconds), **amounts)


def attention(peer: Torch, config: ModelConfig) -> Iterator[Figure]:
    """scaled_dot_product_attention: decode steps over a context, and prompts."""
    H, K, D, S = config.num_heads, config.num_kv_heads, config.head_dim, peer.sizes.context
    attend = peer.torch.nn.functional.scaled_dot_product_attention
    for N in peer.sizes.batches:
        q, k, v = peer.normal(N, H, 1, D), peer.normal(N, K, S, D), peer.normal(N, K, S, D)
        seconds = peer.captured([lambda q=q, k=k, v=v: attend(q, k, v, enable_gqa=H != K)] * 8)  # type: ignore[misc]
        what = f"attention, decode, batch {N}, context {S}, SDPA in a graph"
        yield Figure("torch", "", what, **median_and_best(seconds), bytes=4 * N * S * K * D)
    for T in (peer.sizes.prefill, 4 * peer.sizes.prefill):
        q, k, v = peer.normal(1, H, T, D), peer.normal(1, K, T, D), peer.normal(1, K, T, D)
        run = lambda q=q, k=k, v=v: attend(q, k, v, is_causal=True, enable_gqa=H != K)  # noqa: E731
        seconds = peer.captured([run] * 2)
        flops = 4 * D * H * T * (T + 1) // 2
        yield Figure("torch", "", f"attention, prefill {T}, SDPA in a graph", **median_and_best(seconds), flops=flops)


def four_bits(peer: Torch, config: ModelConfig) -> Iterator[Figure]:
    """The product of PyTorch's own kernel for weights of 4 bits."""
    torch, tiles = peer.torch, 8
    outputs, inputs = widths(config)["up"]
    if peer.device == "cpu":  # another layout, so only its name and figures are tried
        packed = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.zeros(32, 64, dtype=torch.int32), 1)]
        (outputs, inputs), multiply = (32, 64), torch.ops.aten._weight_int4pack_mm_for_cpu
    else:
        raw = [torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device="cuda") for _ in range(8)]
        packed = [torch.ops.aten._convert_weight_to_int4pack(each, tiles) for each in raw]
        multiply = torch.ops.aten._weight_int4pack_mm
    scales = peer.normal(inputs // GROUP, outputs, 2)
    for T in peer.sizes.batches:
        x = peer.normal(T, inputs)
        seconds = peer.captured([lambda w=w, x=x: multiply(x, w, GROUP, scales) for w in packed])  # type: ignore[misc]
        what = f"up, {T} rows, int4, _weight_int4pack_mm in a graph"
        moved = outputs * inputs // 2 + 4 * outputs * inputs // GROUP + 2 * T * (inputs + outputs)
        yield Figure("torch", "", what, **median_and_best(seconds), bytes=moved)


def loop(peer: Torch, config: ModelConfig) -> Iterator[Figure]:
    """Decode steps at batch 1 and the next larger one, compiled."""
    for batch in peer.sizes.batches[:2]:
        decoder = Decoder(peer, config, batch)
        seconds = decoder.bursts()
        yield Figure(LOOP, "", DECODE.format(batch), **median_and_best(seconds), tokens=batch)


class Decoder:
    """A decoder of Llama's kind: RMS norms, rotation, grouped queries, a gated MLP; without biases."""

    def __init__(self, peer: Torch, config: ModelConfig, batch: int) -> None:
        torch = self.torch = peer.torch
        self.peer, self.config, self.batch = peer, config, batch
        E, V, K, D = config.hidden_size, config.vocab_size, config.num_kv_heads, config.head_dim
        self.room = peer.sizes.prompt + 8 + 3 * peer.sizes.steps
        self.table = peer.normal(V, E)
        self.layers = [
            {name: peer.normal(*shape) for name, shape in widths(config).items()} for _ in range(config.num_layers)
        ]
        self.keys, self.values = (
            torch.zeros(config.num_layers, batch, K, self.room, D, dtype=torch.bfloat16, device=peer.device)
            for _ in "kv"
        )
        angles = torch.arange(self.room, device=peer.device)[:, None] / 10_000 ** (
            torch.arange(0, D, 2, device=peer.device) / D
        )
        self.cosines, self.sines = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.places = torch.arange(self.room, device=peer.device)
        compiled: dict[str, Any] = {"backend": "eager"} if peer.device == "cpu" else {"mode": "reduce-overhead"}
        torch.compiler.reset()
        self._step = torch.compile(self.step, fullgraph=True, **compiled)

    def step(self, ids: Any, place: Any) -> Any:
        """The next token of each sequence. [N, 1], [1] -> [N, 1]"""
        F, H, K, D = self.torch.nn.functional, self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        x = self.table[ids]  # [N, 1] -> [N, 1, E]
        seen = (self.places <= place)[None, None, None]  # -> [1, 1, 1, S]
        for i, layer in enumerate(self.layers):
            heads = (
                F.linear(F.rms_norm(x, x.shape[-1:]), layer["qkv"]).view(self.batch, 1, H + 2 * K, D).transpose(1, 2)
            )
            q, k, v = heads.split((H, K, K), dim=1)
            self.keys[i].index_copy_(2, place, self.turned(k, place))
            self.values[i].index_copy_(2, place, v)
            z = F.scaled_dot_product_attention(
                self.turned(q, place), self.keys[i], self.values[i], attn_mask=seen, enable_gqa=H != K
            )
            x = x + F.linear(z.transpose(1, 2).reshape(self.batch, 1, H * D), layer["out"])
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:]), layer["up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(F.rms_norm(x, x.shape[-1:]), self.table).argmax(dim=-1)

    def turned(self, x: Any, place: Any) -> Any:
        """Queries or keys rotated by their position. [N, heads, 1, D]"""
        low, high = x.chunk(2, dim=-1)
        cosines, sines = self.cosines[place], self.sines[place]
        return self.torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)

    def bursts(self) -> list[float]:
        """Mean seconds of a step, for each of three bursts that wait for the device at the end alone."""
        torch, seconds = self.torch, []
        ids = torch.ones(self.batch, 1, dtype=torch.long, device=self.peer.device)
        place = torch.tensor([self.peer.sizes.prompt], device=self.peer.device)
        for burst in (4, *(self.peer.sizes.steps,) * 3):  # the first compiles, and captures
            began = time.perf_counter()
            for _ in range(burst):
                if self.peer.device == "cuda":
                    torch.compiler.cudagraph_mark_step_begin()
                ids = self._step(ids, place).clone()
                place += 1
            ids.tolist()
            seconds.append((time.perf_counter() - began) / burst)
        return seconds[1:]
