"""The throughput that the roofline allows a server, for `serve.py`."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minillm.backends.placement import Placement, choose_backend
from minillm.cli.analyze import analyze
from minillm.cli.main import build_parser
from minillm.engine.scheduler import Limits
from minillm.measure.accounting import Part, Step, operations
from minillm.measure.accounting.hardware import Hardware
from minillm.measure.accounting.roofline import Analysis
from minillm.measure.profiling import probe_with


def analysis_of(model: Path, threads: int) -> Analysis:
    """The model's configuration and formats, and this machine's peak rates with the kernels of its format, probed."""
    here = Hardware(name="this machine", rates={"float32": 1.0}, bandwidth=1.0, memory=1, source="no measurement")
    formats = analyze(str(model), hardware=here).storage  # its rates do not matter for them
    backend = choose_backend(Placement(dtype=formats.weights.split()[0], threads=threads), 1)
    return analyze(str(model), hardware=probe_with(backend, threads))


def limits_of(model: Path, threads: int, slots: int, options: Sequence[str]) -> Limits:
    """The limits of a forward pass of `minillm serve` with these options."""
    args = build_parser().parse_args(["serve", "--model", str(model), *options])
    backend = choose_backend(Placement(threads=threads, device=args.device or "cpu"), slots)
    return Limits.of(backend.memory, slots, args.max_batched_tokens)


@dataclass
class _Sequence:
    prompt_left: int
    new_left: int
    context: int = 0


def closed_loop_seconds(analysis: Analysis, requests: Sequence[tuple[int, int]], streams: int, limits: Limits) -> float:
    """The least time in which so many streams (`serve_client.closed_loop`) get their answers.

    It is the sum of the floors of the forward passes that continuous batching makes: in each the decoding sequences
    take a token each, and chunks of prompts, in order, what is left of the limit. A pass's floor is the sum of those
    of its operations; nothing is counted for what stands between the passes.

    Args:
        analysis: the model and the machine
        requests: tokens of each prompt, and those generated after it
        streams: requests that are open at once
        limits: tokens of one forward pass
    """
    waiting, live, seconds = deque(_Sequence(*lengths) for lengths in requests), list[_Sequence](), 0.0
    while waiting or live:
        while waiting and len(live) < streams:
            live.append(waiting.popleft())
        decoding = sum(not one.prompt_left for one in live)
        left = limits.max_batched_tokens - decoding if decoding else limits.max_prompt_tokens
        parts, rows = [], 0
        for one in live:
            count = 1
            if one.prompt_left:
                count = min(one.prompt_left, left)
                one.prompt_left -= count
                left -= count
            if count:
                one.context += count
                parts.append(Part(count, one.context))
            if not one.prompt_left:
                one.new_left -= 1
                rows += 1
        seconds += floor(analysis, Step(tuple(parts), rows))
        live = [one for one in live if one.new_left]
    return seconds


def floor(analysis: Analysis, step: Step) -> float:
    """Seconds of one forward pass by the roofline."""
    dtype = analysis.storage.activations
    rows = operations(analysis.config, step, analysis.storage)
    return sum(analysis.hardware.seconds(row.flops, row.bytes, dtype) for row in rows)
