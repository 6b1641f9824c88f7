"""The figures of `gpu.py`: how much is measured, one figure per line of its table, the ceilings and the goals."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """How much is measured."""

    batches: tuple[int, ...] = (1, 8, 64)
    prompt: int = 128
    """Tokens before a decode step is timed"""
    new_tokens: int = 128
    """Generated at most; with the prompt they stay within one bucket of 256 positions"""
    steps: int = 64
    prefill: int = 2000
    """Tokens of a prompt"""
    prefills: int = 4
    """Prompts in one pass"""
    context: int = 1024
    """Positions in the cache when attention is timed alone"""
    window: int = 256
    """Of these, the last that a query sees where it has a window"""
    copy: int = 4 << 30
    """Bytes that the copy reads"""
    product: int = 8192
    cold: int = 512 << 20
    """Bytes that launches of one kernel read in turn, so that no cache holds them"""
    repeats: int = 11


TINY = Sizes(
    batches=(1, 3), prompt=5, new_tokens=30, steps=3, prefill=20, prefills=2, context=40, window=24,
    copy=1 << 16, product=64, cold=1 << 14, repeats=2,
)  # fmt: skip
"""For a run without a GPU, which only shows that everything runs."""


class Figure(NamedTuple):
    """One measurement, or why there is none."""

    part: str
    shape: str
    what: str
    seconds: float = 0.0
    """The median time of one call, step or pass; of checks the time they took in all"""
    best: float = 0.0
    """The shortest of them"""
    tokens: int = 0
    """That come out of a decode step, or go into a prefill"""
    bytes: int = 0
    """That must be read and written, at least"""
    flops: int = 0
    launches: int = 0
    note: str = ""

    @property
    def speed(self) -> float:
        """Tokens per second; 0 where there are no tokens or no time."""
        return self.tokens / self.seconds if self.seconds else 0.0


def median_and_best(seconds: Sequence[float]) -> dict[str, Any]:
    """Fields of a `Figure`."""
    return {"seconds": statistics.median(seconds), "best": min(seconds)}


class Ceilings(NamedTuple):
    """What the machine can do at most, measured in the same run; 0 is not known."""

    bandwidth: float
    """Bytes read and written per second by a large copy"""
    rate: float
    """FLOPs per second of a large library product of 16-bit numbers"""

    @classmethod
    def of(cls, figures: Iterable[Figure]) -> "Ceilings":
        """The ceilings among some figures."""
        bandwidth = rate = 0.0
        for figure in figures:
            if figure.part == "ceilings" and figure.seconds:
                if figure.what == COPY:
                    bandwidth = figure.bytes / figure.seconds
                if figure.what == PRODUCT.format("float16"):
                    rate = figure.flops / figure.seconds
        return cls(bandwidth, rate)

    def floor(self, figure: Figure) -> float:
        """The least seconds that a figure's bytes and FLOPs take; 0 where that is not known."""
        floors = []
        for amount, ceiling in ((figure.bytes, self.bandwidth), (figure.flops, self.rate)):
            if amount and not ceiling:
                return 0.0
            if amount:
                floors.append(amount / ceiling)
        return max(floors, default=0.0)

    def share(self, figure: Figure) -> float:
        """Which part of the ceiling a figure reaches: its floor over its time."""
        return self.floor(figure) / figure.seconds if figure.seconds else 0.0


COPY, PRODUCT = "copy, read and written", "product {}, by the library"
OURS, EAGER, COMPILED = "engine", "transformers eager", "transformers compiled"
DECODE, PREFILL, DEVICE_TIME = "decode, batch {}", "prefill, {} x {}", "decode, batch {}, on the device"
PREFILL_ATTENTION = "attention, prefill {}"
HEADER = (
    "part", "shape", "what", "median_us", "best_us", "floor_us", "of_ceiling", "tokens_per_second", "gb_per_second",
    "tflop_per_second", "launches", "note",
)  # fmt: skip


def row(figure: Figure, ceilings: Ceilings) -> list[str]:
    """A line of the CSV; what is not known is left empty."""
    seconds = figure.seconds
    floor, share = (0.0, 0.0) if figure.part == "ceilings" else (ceilings.floor(figure), ceilings.share(figure))
    return [
        figure.part,
        figure.shape,
        figure.what,
        _number(1e6 * seconds, ".2f"),
        _number(1e6 * figure.best, ".2f"),
        _number(1e6 * floor, ".2f"),
        _number(share, ".3f"),
        _number(figure.speed, ".1f"),
        _number(figure.bytes / seconds / 1e9 if seconds else 0, ".1f"),
        _number(figure.flops / seconds / 1e12 if seconds else 0, ".2f"),
        _number(figure.launches, "d"),
        figure.note,
    ]


def table(figures: Sequence[Figure]) -> list[str]:
    """The lines that are printed."""
    ceilings = Ceilings.of(figures)
    heads = ("us", "floor us", "of ceiling", "tokens/s", "GB/s", "TFLOP/s", "launches")
    lines = [f"{'':44}" + "".join(f"{head:>11}" for head in heads)]
    before = None
    for figure in figures:
        if (figure.part, figure.shape) != before:
            before = figure.part, figure.shape
            lines.append(" ".join(filter(None, before)))
        _, _, what, median, _, floor, share, speed, bandwidth, rate, launches, note = row(figure, ceilings)
        cells = "".join(f"{cell:>11}" for cell in (median, floor, share, speed, bandwidth, rate, launches))
        lines.append(f"  {what:<42}{cells}  {note}".rstrip())
    return lines


def _number(value: float, form: str) -> str:
    return format(value, form) if value else ""


class Goal(NamedTuple):
    """What is aimed at on an H200, and what came of it."""

    text: str
    value: float | None
    """None: not measured"""
    aim: float
    at_most: bool = False
    """The aim is the most that the value may be, and not the least"""

    def __str__(self) -> str:
        aimed = f"at {'most' if self.at_most else 'least'} {self.aim:g} {'is' if self.aim == 1 else 'are'} aimed at"
        if self.value is None:
            return f"open     {self.text}: {aimed}, not measured"
        reached = self.value <= self.aim if self.at_most else self.value >= self.aim
        return f"{'reached' if reached else 'missed':<8} {self.text}: {aimed}, {self.value:.3g} measured"


def goals(figures: Sequence[Figure]) -> Iterator[Goal]:
    """Every goal that was set."""
    ceilings = Ceilings.of(figures)
    found = {(figure.part, figure.shape, figure.what): figure for figure in figures if figure.seconds}

    def shares(shape: str, what: str) -> list[float]:
        ours = [f for f in found.values() if f.part == OURS and f.shape == shape and f.what.startswith(what)]
        return [share for share in map(ceilings.share, ours) if share]

    first = DECODE.format(1)
    for shape, aim in (("opt-6.7b", 0.85), ("opt-13b", 0.85), ("opt-1.3b", 0.75)):
        share = ceilings.share(found[OURS, shape, first]) if (OURS, shape, first) in found else 0.0
        yield Goal(f"{shape}, {first}: share of the copy bandwidth", share or None, aim)
    for (part, shape, what), theirs in found.items():
        if part == COMPILED:
            ours = found.get((OURS, shape, what))
            ratio = ours.speed / theirs.speed if ours else None
            yield Goal(f"{shape}, {what}: times as fast as compiled transformers", ratio, 1)
    for shape in dict.fromkeys(["opt-6.7b", "opt-13b", *(f.shape for f in figures if f.part == OURS)]):
        prefill = max(shares(shape, "prefill"), default=None)
        yield Goal(f"{shape}, prefill: share of the library product's rate", prefill, 0.7)
    for shape in ("opt-6.7b", "opt-13b"):
        alone = [f for f in found.values() if f.shape == shape and f.what.startswith(PREFILL_ATTENTION.format(""))]
        rate = max((f.flops / f.seconds / 1e12 for f in alone), default=None)
        yield Goal(f"{shape}, prefill attention with heads of 128: TFLOP/s", rate, 175)
    step = found.get((OURS, "opt-125m", first))
    yield Goal(f"opt-125m, {first}: microseconds a step", 1e6 * step.seconds if step else None, 150, at_most=True)
