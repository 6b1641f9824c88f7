"""transformers on the same GPU and shapes, for `gpu.py`: eager, and compiled with a static cache.

A hand-written loop, without the overhead of `generate`, that waits for the device once at the end: each step is faster
than a user's would be. Random weights, float16, greedy.
"""

import gc
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpu_figures import COMPILED, DECODE, EAGER, PREFILL, Figure, Sizes, median_and_best
from harness import token_ids

from minillm.models import published

WARM_UP = 4
"""Steps before the timing: compiled ones trace, then capture their graph."""
BURSTS = 3


def transformers(sizes: Sizes, shapes: list[str], *, emulated: bool) -> Iterator[Figure]:
    """Every shape eager, then compiled at batch 1, then compiled in larger batches, since compiling takes long.

    Emulated, it runs on the CPU, and compiled models are only traced.
    """
    missing = [name for name in ("torch", "transformers") if not _installed(name)]
    if missing:
        yield Figure("transformers", "", "", note=f"left out: without {', '.join(missing)}")
        return
    plans: list[tuple[str, str, tuple[int, ...]]] = [(EAGER, shape, sizes.batches) for shape in shapes]
    plans += [(COMPILED, shape, sizes.batches[:1]) for shape in shapes]
    plans += [(COMPILED, shape, sizes.batches[1:]) for shape in shapes]
    for part, shape, batches in plans:
        try:
            yield from _measure(Peer(shape, "cpu" if emulated else "cuda", sizes), part, shape, batches)
        except Exception as error:  # a failure must not end the others
            words = (str(error).splitlines() or [""])[0][:200]
            yield Figure(part, shape, "", note=f"failed: {type(error).__name__}: {words}")
        gc.collect()  # frees the weights before the next shape


def _measure(peer: "Peer", part: str, shape: str, batches: tuple[int, ...]) -> Iterator[Figure]:
    """Decode in some batches and, if it is eager, prefill."""
    for batch in batches:
        peer.begin(batch, compiled=part == COMPILED)
        yield Figure(part, shape, DECODE.format(batch), **median_and_best(peer.decode()), tokens=batch)
    for prompts in (1, peer.sizes.prefills) if part == EAGER else ():
        what, tokens = PREFILL.format(prompts, peer.sizes.prefill), prompts * peer.sizes.prefill
        yield Figure(part, shape, what, **median_and_best(peer.prefill(prompts)), tokens=tokens)


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


class Peer:
    """One shape in transformers."""

    def __init__(self, shape: str, device: str, sizes: Sizes) -> None:
        import torch
        import transformers

        self.torch, self.transformers, self.device, self.sizes = torch, transformers, device, sizes
        torch.set_grad_enabled(False)
        if device == "cpu":
            torch.set_num_threads(1)  # for so little work, several threads are slower
        torch.manual_seed(0)
        raw = published()[shape]
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            with torch.device(device):
                config = transformers.AutoConfig.for_model(**raw)
                self.model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
        finally:
            torch.set_default_dtype(before)
        self._vocab = int(raw["vocab_size"])
        self._takes_cache_position = "cache_position" in inspect.signature(self.model.forward).parameters

    def begin(self, batch: int, *, compiled: bool) -> None:
        """Compute the prompts, and prepare decode steps."""
        torch = self.torch
        room = self.sizes.prompt + WARM_UP + BURSTS * self.sizes.steps
        self._forward: Callable[..., Any] = self.model.forward
        self._cache: Any = None
        self._mask: Any = None
        if compiled:
            torch.compiler.reset()
            self._cache = self.transformers.StaticCache(config=self.model.config, max_cache_len=room)
            self._mask = torch.ones((batch, room), dtype=torch.long, device=self.device)
            how: dict[str, Any] = {"mode": "reduce-overhead"} if self.device == "cuda" else {"backend": "eager"}
            self._forward = torch.compile(self.model.forward, **how)
        tokens = self._tokens(batch, self.sizes.prompt)
        output = self._call(self.model.forward, tokens, 0)
        self._cache = output.past_key_values
        self._ids, self._length = output.logits[:, -1].argmax(-1, keepdim=True), self.sizes.prompt
        for _ in range(WARM_UP):
            self._step()
        self._wait()

    def decode(self) -> list[float]:
        """Mean seconds of a step, for each burst."""
        seconds = []
        for _ in range(BURSTS):
            began = time.perf_counter()
            for _ in range(self.sizes.steps):
                self._step()
            self._wait()
            seconds.append((time.perf_counter() - began) / self.sizes.steps)
        return seconds

    def prefill(self, prompts: int) -> list[float]:
        """Seconds from some prompts to their first tokens, in one pass."""
        self._cache = self._mask = None
        tokens = self._tokens(prompts, self.sizes.prefill)
        seconds = []
        for _ in range(max(2, self.sizes.repeats // 2)):
            began = time.perf_counter()
            output = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1)
            output.logits[:, -1].argmax(-1).tolist()
            seconds.append(time.perf_counter() - began)
        return seconds[1:]

    def _step(self) -> None:
        if self._mask is not None and self.device == "cuda":
            self.torch.compiler.cudagraph_mark_step_begin()
        output = self._call(self._forward, self._ids, self._length)
        self._ids = output.logits[:, -1].argmax(-1, keepdim=True)
        self._cache = output.past_key_values
        self._length += 1

    def _call(self, forward: Callable[..., Any], ids: Any, first: int) -> Any:
        """One forward pass over tokens from position `first` on."""
        torch = self.torch
        positions = torch.arange(first, first + ids.shape[1], device=self.device)
        options: dict[str, Any] = {"position_ids": positions.expand(ids.shape[0], -1)}
        if self._mask is not None:
            options["attention_mask"] = self._mask
        if self._takes_cache_position:
            options["cache_position"] = positions
        return forward(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **options)

    def _tokens(self, prompts: int, length: int) -> Any:
        rows = [token_ids(i, length, self._vocab) for i in range(prompts)]
        return self.torch.tensor(rows, device=self.device)

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        else:
            self._ids.tolist()
