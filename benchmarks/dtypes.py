"""What do fewer bits save, and what do they cost? Speed, bytes and error of each format of weights, on each backend.

A decode step reads all weights, so with half the bits it should take half the time, as long as a kernel reads them as
they are stored. The NumPy backend does not: it expands a matrix to float32 at each product; it is included
for comparison, not for use. Engines of all formats stay loaded and take turns.

The error is that of the model inside minillm, which is trained: the mean Kullback-Leibler divergence of its predictions
after each token of a text from those with float32 weights. With --model, speed and error are those of a real model, a
checkpoint folder or a GGUF file, and the text is a page of English.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import (
    BenchmarkError,
    describe,
    execute,
    headed,
    make_folder,
    need_matplotlib,
    new_parser,
    positive,
    say,
    spread,
    token_ids,
    write_csv,
    write_figure,
)

if TYPE_CHECKING:
    from minillm import Engine

HEADER = (
    *("backend", "dtype", "bytes_read_per_step", "step_seconds_median", "step_seconds_min", "step_seconds_max"),
    *("decode_speed_up", "prefill_seconds_median", "prefill_seconds_min", "prefill_seconds_max", "prefill_speed_up"),
    "kl_nats_per_token",
)
FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")
COLOURS = {"numpy": "#8a8a8a", "cpu": "#1f6fb2"}
REST_SECONDS = 0.2
"""Pause before each burst, so that the previous backend's threads stop spinning"""
REAL_TEXT = Path(__file__).parents[1] / "tests" / "real" / "alice.txt"
TEXT_TOKENS = 256
TEXT = "Once upon a time there was a gentle frog named Sam. Sam had a white coat and took it everywhere."


class Kind(NamedTuple):
    """A backend and a format of weights."""

    backend: str
    dtype: str


class Figures(NamedTuple):
    """Measurements of one kind, by round."""

    bytes_read: int
    """Bytes read by a decode step, weights included"""
    step: list[float]
    """Seconds of a decode step"""
    prefill: list[float]
    """Seconds of the prompt"""
    divergence: float
    """Nats a token"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure each format of weights on each backend.", "CSV and the plot")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", default="opt-125m", help="published shape, random weights (default: opt-125m)")
    model.add_argument("--model", help="real weights: a checkpoint folder, GGUF file or hub id")
    parser.add_argument("--prompt-length", type=positive, default=128, metavar="N", help="prompt tokens (default: 128)")
    parser.add_argument("--steps", type=positive, default=16, metavar="N", help="timed decode steps (default: 16)")
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="timed rounds (default: 5)")
    parser.add_argument(
        "--backends", default=None, metavar="A,B", help="default: numpy, and cpu where there is a C compiler"
    )
    return parser.parse_args(arguments)


def burst(engine: "Engine", prompt: list[int], steps: int) -> tuple[float, float]:
    """Seconds of the prompt, and of one of the decode steps after it."""
    moments = [time.perf_counter()]
    events = engine.stream(prompt, max_new_tokens=steps + 1, eos_token_id=())
    moments += (time.perf_counter() for _ in events)
    return moments[1] - moments[0], (moments[-1] - moments[1]) / steps


def bytes_per_step(engine: "Engine", prompt: list[int]) -> int:
    """Bytes that the first decode step after a prompt reads."""
    from minillm.backends.observe import counting

    events = engine.stream(prompt, max_new_tokens=3, eos_token_id=())
    next(events)
    with counting(engine.runner) as counted:
        next(events)
        return counted.total.bytes_read


def log_probs(engine: "Engine", text: str) -> Any:
    """Log-probabilities of a trained model after each of the first tokens of a text, [T, V]."""
    import numpy as np

    if engine.tokenizer is None:
        raise BenchmarkError("the model has no tokenizer, which the error of a format is measured with")
    logits = engine.forward(engine.tokenizer.encode(text)[:TEXT_TOKENS]).astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def divergence(reference: Any, found: Any) -> float:
    """Kullback-Leibler, the mean over positions, in nats. [T, V], [T, V]"""
    import numpy as np

    return float((np.exp(reference) * (reference - found)).sum(axis=-1).mean())


def measure(args: argparse.Namespace, kinds: Sequence[Kind]) -> dict[Kind, Figures]:
    """Load all engines, and measure all kinds in turns. The first round is a warm-up and is not kept."""
    from minillm import Engine

    engines: dict[Kind, Engine] = {}
    figures: dict[Kind, Figures] = {}
    prompt: list[int] = []
    reference: Any = None
    for kind in kinds:
        say(f"loading {kind.dtype} on {kind.backend}")
        placement = {"backend": kind.backend, "dtype": kind.dtype, "threads": args.threads}
        if args.model is None:
            engine = Engine.random(args.shape, max_batch_size=1, **placement)
        else:
            engine = Engine(args.model, max_batch_size=1, prefix_cache=False, **placement)
        engines[kind] = engine
        longest, context = args.prompt_length + args.steps + 1, engine.config.max_positions
        if longest > context:
            raise BenchmarkError(f"prompt and new tokens come to {longest}, and the model's context is {context}")
        prompt = token_ids(0, args.prompt_length, engine.config.vocab_size)
        if args.model is None:
            with Engine(max_batch_size=1, prefix_cache=False, **placement) as trained:
                found = log_probs(trained, TEXT)
        else:
            found = log_probs(engine, REAL_TEXT.read_text(encoding="utf-8"))
        reference = found if kind.dtype == "float32" else reference  # the first of each backend
        error = divergence(reference, found)
        figures[kind] = Figures(bytes_per_step(engine, prompt), [], [], error)
    for number in range(args.repeat + 1):
        say(f"round {number} of {args.repeat}")
        for kind, engine in engines.items():
            time.sleep(REST_SECONDS)
            prefill, step = burst(engine, prompt, args.steps)
            if number:
                figures[kind].prefill.append(prefill)
                figures[kind].step.append(step)
    return figures


def speed_up(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def rows(figures: dict[Kind, Figures]) -> Iterator[list[object]]:
    """Rows of the CSV, in the order of `HEADER`. Speed-ups are over float32 on the same backend."""
    for kind, one in figures.items():
        plain = figures[Kind(kind.backend, "float32")]
        step, prefill = ([f"{seconds:.6f}" for seconds in spread(times)] for times in (one.step, one.prefill))
        gains = [f"{speed_up(plain.step, one.step):.3f}", f"{speed_up(plain.prefill, one.prefill):.3f}"]
        yield [*kind, one.bytes_read, *step, gains[0], *prefill, gains[1], f"{one.divergence:.6f}"]


def table(figures: dict[Kind, Figures]) -> list[str]:
    """The figures as lines of text."""
    lines = [
        f"{'backend':<9}{'dtype':<10}{'MB a step':>10}{'step, ms (min-max)':>26}{'speed-up':>10}"
        f"{'prefill, ms (min-max)':>30}{'speed-up':>10}{'KL, nats':>11}"
    ]
    for kind, one in figures.items():
        plain = figures[Kind(kind.backend, "float32")]
        times = []
        for values in (one.step, one.prefill):
            middle, low, high = spread(values)
            times.append(f"{1e3 * middle:.2f} ({1e3 * low:.2f}-{1e3 * high:.2f})")
        lines.append(
            f"{kind.backend:<9}{kind.dtype:<10}{one.bytes_read / 1e6:>10.1f}{times[0]:>26}"
            f"{speed_up(plain.step, one.step):>8.2f} x{times[1]:>30}{speed_up(plain.prefill, one.prefill):>8.2f} x"
            f"{one.divergence:>11.6f}"
        )
    return lines


def conclusion(figures: dict[Kind, Figures]) -> str:
    """The result for the last backend, in one sentence."""
    backend = list(figures)[-1].backend
    plain = figures[Kind(backend, "float32")]
    parts = []
    for dtype in ("bfloat16", "int8", "int4"):
        one = figures[Kind(backend, dtype)]
        parts.append(
            f"{dtype} decodes {speed_up(plain.step, one.step):.2f} times as fast as float32 while it reads "
            f"{one.bytes_read / plain.bytes_read:.2f} of the bytes, at {one.divergence:.0e} nats"
        )
    return f"On {backend} {'; '.join(parts)}."


def plot(path: Path, figures: dict[Kind, Figures], prompt_length: int, name: str, facts: dict[str, str]) -> None:
    """Draw tokens per second of decode and prefill, a bar for each format and backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots(1, 2)
    backends = list(dict.fromkeys(kind.backend for kind in figures))
    width = 0.8 / len(backends)
    for i, backend in enumerate(backends):
        places = [number + (i - (len(backends) - 1) / 2) * width for number in range(len(FORMATS))]
        mine = [figures[Kind(backend, dtype)] for dtype in FORMATS]
        decode = [[1 / seconds for seconds in one.step] for one in mine]
        prefill = [[prompt_length / seconds for seconds in one.prefill] for one in mine]
        for axis, speeds in zip(axes, (decode, prefill), strict=True):
            spreads = [spread(values) for values in speeds]
            reach = [[mid - low for mid, low, _ in spreads], [high - mid for mid, _, high in spreads]]
            middle = [mid for mid, *_ in spreads]
            axis.bar(places, middle, width, yerr=reach, capsize=3, color=COLOURS[backend], label=backend)
    for axis, title in zip(axes, ("Decode", "Prefill"), strict=True):
        axis.set_xticks(range(len(FORMATS)), FORMATS)
        axis.set_title(title)
        axis.set_ylabel("tokens a second")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.suptitle(f"Formats of weights: {name}")
    figure.supxlabel(
        f"Medians, whiskers from min to max. {facts['cpu']}; cores: {facts['cores']}", fontsize=8, color="0.35"
    )
    write_figure(path, figure)


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results."""
    from minillm.backends.cpu.compiling import available

    need_matplotlib()
    backends = args.backends.split(",") if args.backends else ["numpy", *(["cpu"] if available() else [])]
    if unknown := [name for name in backends if name not in COLOURS]:
        raise BenchmarkError(f"backend {unknown[0]!r} is not known: expected {' or '.join(COLOURS)}")
    make_folder(args.out)
    figures = measure(args, [Kind(backend, dtype) for backend in backends for dtype in FORMATS])
    model = args.shape if args.model is None else Path(args.model).stem
    name = f"{model}, batch 1, prompt of {args.prompt_length} tokens"
    facts = {"question": f"formats of weights, {name}", "rounds": str(args.repeat), "timed steps": str(args.steps)}
    facts |= describe(args.threads)
    stem = args.out / f"dtypes_{model}"
    write_csv(stem.with_name(stem.name + ".csv"), facts, HEADER, rows(figures))
    plot(stem.with_name(stem.name + ".png"), figures, args.prompt_length, name, facts)
    print("\n".join([*headed(facts), *table(figures), ""]))
    print(conclusion(figures))
    print(f"written: {stem}.csv, {stem}.png")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("dtypes", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
