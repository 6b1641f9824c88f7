"""The tables, the goals and the figure of `serve.py`, from its runs. Run with a CSV, it draws the figure anew."""

import csv
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import write_figure
from peer_report import Goal, goal_lines

if TYPE_CHECKING:
    from serve_client import Answer

OURS, PEER = "minillm", "llama-server"
HEADER = (
    *("round", "load", "server", "requests", "failed", "prompt_tokens", "tokens", "seconds", "tokens_per_second"),
    *("predicted_tokens_per_second", "ttft_p50_seconds", "ttft_p99_seconds", "itl_p50_seconds", "itl_p99_seconds"),
    *("server_cpu_seconds", "tokens_per_cpu_second", "main_thread_cpu_seconds", "client_cpu_seconds"),
)


@dataclass(frozen=True)
class Load:
    """A way of asking."""

    streams: int | None = None
    """Requests that are open at once, each followed by the next; None: requests arrive at a rate"""
    rate: float = 0.0
    """Mean requests a second, at the times of a Poisson process"""

    @property
    def name(self) -> str:
        """Such as "8 streams" or "0.5/s"."""
        if self.streams is None:
            return f"{self.rate:g}/s"
        return f"{self.streams} stream{'s' * (self.streams > 1)}"


@dataclass(frozen=True)
class Run:
    """One load on one server."""

    number: int
    """Of the round"""
    load: Load
    server: str
    answers: "Sequence[Answer]"
    predicted: float | None = None
    """Generated tokens a second that the roofline allows (`serve_prediction.py`)"""
    cpu: float = 0.0
    """CPU seconds of the server's process"""
    main_cpu: float = 0.0
    """CPU seconds of its main thread: of minillm's the event loop, that is HTTP and JSON"""
    client_cpu: float = 0.0
    """CPU seconds of the client"""

    @property
    def good(self) -> "list[Answer]":
        """The answers without an error."""
        return [answer for answer in self.answers if not answer.error]

    @property
    def failed(self) -> int:
        """Number of errors."""
        return len(self.answers) - len(self.good)

    @property
    def tokens(self) -> int:
        """Generated tokens of the answers without an error."""
        return sum(answer.tokens for answer in self.good)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of their prompts."""
        return sum(answer.prompt_tokens for answer in self.good)

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return max(answer.ended for answer in self.answers) - min(answer.sent for answer in self.answers)

    @property
    def speed(self) -> float:
        """Generated tokens a second."""
        return self.tokens / self.seconds

    def first(self, share: float) -> float:
        """Seconds to the first text that this share of the requests did not exceed; NaN without any."""
        return percentile([answer.first for answer in self.good if answer.arrivals], share)

    def gap(self, share: float) -> float:
        """Seconds between arrivals of text that this share of them did not exceed; NaN without any."""
        return percentile([gap for answer in self.good for gap in answer.gaps], share)

    def row(self) -> list[object]:
        """The run as a row under `HEADER`."""
        latencies = [self.first(0.5), self.first(0.99), self.gap(0.5), self.gap(0.99)]
        return [
            *(self.number, self.load.name, self.server, len(self.answers), self.failed, self.prompt_tokens),
            *(self.tokens, f"{self.seconds:.3f}", f"{self.speed:.2f}"),
            "" if self.predicted is None else f"{self.predicted:.2f}",
            *(f"{value:.4f}" for value in latencies),
            *(f"{self.cpu:.2f}", f"{self.tokens / self.cpu:.2f}" if self.cpu else ""),
            *(f"{self.main_cpu:.4f}", f"{self.client_cpu:.4f}"),
        ]


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least this share of the values does not exceed (nearest rank); NaN without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def saturated(run: Run) -> bool:
    """True if the load was too much: more than a tenth of the requests failed, or they arrived faster than they were
    answered, so that the last answer came after half as long again as the arrivals took.
    """
    sent = [answer.sent for answer in run.answers]
    return run.failed > len(run.answers) / 10 or (
        run.load.streams is None and run.seconds > 1.5 * (max(sent) - min(sent))
    )


def speed_table(runs: Sequence[Run]) -> list[str]:
    """A line for each run."""
    lines = [
        f"{'load':<12}{'server':<16}{'tokens/s':>10}{'at best':>9}{'TTFT p50, s':>13}{'p99':>8}{'ITL p50, ms':>13}"
        f"{'p99':>8}{'tokens/CPU s':>14}{'front, us':>11}{'client, us':>12}{'failed':>10}"
    ]
    return [*lines, *map(_line_of, runs)]


def _line_of(run: Run) -> str:
    front = _per(1e6 * run.main_cpu, run.tokens, 0) if run.server == OURS else "-"
    return (
        f"{run.load.name:<12}{run.server:<16}{run.speed:>10.1f}{_number(run.predicted, 1):>9}"
        f"{_number(run.first(0.5), 2):>13}{_number(run.first(0.99), 2):>8}"
        f"{_number(1e3 * run.gap(0.5), 1):>13}{_number(1e3 * run.gap(0.99), 1):>8}"
        f"{_per(run.tokens, run.cpu, 1):>14}{front:>11}{_per(1e6 * run.client_cpu, run.tokens, 0):>12}"
        f"{f'{run.failed} of {len(run.answers)}':>10}"
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _per(amount: float, unit: float, digits: int) -> str:
    return f"{amount / unit:.{digits}f}" if unit else "-"


def failures(runs: Sequence[Run]) -> list[str]:
    """The first error of each run with one."""
    found = [(run, [answer.error for answer in run.answers if answer.error]) for run in runs]
    return [f"{run.server}, {run.load.name}: {errors[0]}" for run, errors in found if errors]


def goal_table(runs: Sequence[Run]) -> list[str]:
    """Goals and results, from the ratios within each round."""
    goals: list[Goal] = []
    loads = list(dict.fromkeys(run.load for run in runs))
    for load in loads:
        pairs = list(_pairs(runs, load))
        if load.streams is not None and load.streams >= 8:
            ratios = [ours.speed / theirs.speed for ours, theirs in pairs if theirs.speed]
            goals.append((f"{load.name}: tokens/s, {OURS} / {PEER}", ratios, ">=", 1.5))
        for words, latency in (("TTFT p99", Run.first), ("inter-token p99", Run.gap)):
            ratios = [latency(ours, 0.99) / latency(theirs, 0.99) for ours, theirs in pairs]
            ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
            goals.append((f"{load.name}: {words}, {OURS} / {PEER}", ratios, "<=", 1.0))
    for load in loads:  # with few streams each token wakes the event loop on its own
        if load.streams is not None and load.streams >= 32:
            fronts = [1e6 * r.main_cpu / r.tokens for r in runs if r.server == OURS and r.load == load and r.tokens]
            goals.append((f"{load.name}: {OURS}'s event loop, us of CPU a token", fronts, "<=", 40.0))
    return goal_lines(goals)


def _pairs(runs: Sequence[Run], load: Load) -> Iterator[tuple[Run, Run]]:
    """Our run and the peer's of each round."""
    peers = {run.number: run for run in runs if run.server == PEER and run.load == load}
    for run in runs:
        if run.server == OURS and run.load == load and run.number in peers:
            yield run, peers[run.number]


def draw(rows: Sequence[Mapping[str, object]], title: str) -> Any:
    """A figure: tokens/s, TTFT and inter-token latency against streams, and TTFT against the rate of arrivals.

    Args:
        rows: of runs, by the names of `HEADER`, as they are or as the CSV has them
        title: above it
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    figure.suptitle(title)
    (speed, first), (gap, arriving) = figure.subplots(2, 2)
    closed = [row for row in rows if "stream" in str(row["load"])]
    opened = [row for row in rows if "stream" not in str(row["load"])]
    for color, server in enumerate(dict.fromkeys(row["server"] for row in rows)):
        look = {"color": f"C{color}", "marker": "o", "markersize": 4}
        mine = [row for row in closed if row["server"] == server]
        _line(speed, mine, "tokens_per_second", label=server, **look)
        for share, more in (("p50", {"linestyle": "--", "markerfacecolor": "white"}), ("p99", {})):
            for axes, name, some in ((first, "ttft", closed), (gap, "itl", closed), (arriving, "ttft", opened)):
                mine = [row for row in some if row["server"] == server]
                _line(axes, mine, f"{name}_{share}_seconds", label=f"{server} {share}", **look, **more)
    _line(speed, closed, "predicted_tokens_per_second", label="roofline", color="gray", linestyle=":")
    for axes, x, y in (
        (speed, "streams", "generated tokens/s"),
        (first, "streams", "time to first token, s"),
        (gap, "streams", "time between tokens, s"),
        (arriving, "requests a second (Poisson)", "time to first token, s"),
    ):
        axes.set(xlabel=x, ylabel=y)
        if axes.lines:
            loads = sorted({place for line in axes.lines for place in line.get_xdata()})
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(loads, [f"{load:g}" for load in loads])
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(LogFormatter())
            axes.legend(fontsize=8, handlelength=4)
    return figure


def _line(axes: Any, rows: Sequence[Mapping[str, object]], name: str, **look: Any) -> None:
    """Draw a column against the load; of runs with the same load, the mean."""
    values: dict[float, list[float]] = {}
    for row in rows:
        if row[name] not in ("", "nan"):
            load = float(str(row["load"]).split()[0].removesuffix("/s"))
            values.setdefault(load, []).append(float(str(row[name])))
    if values:
        axes.plot(sorted(values), [sum(values[x]) / len(values[x]) for x in sorted(values)], **look)


def redraw(results: Path) -> None:
    """Draw the figure of a CSV anew, beside it."""
    lines = results.read_text(encoding="utf-8").splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = [*csv.DictReader(line for line in lines if not line.startswith("# "))]
    title = f"{results.stem.removeprefix('serve_')}, {facts['cores'].partition('used: ')[2]} threads"
    write_figure(results.with_suffix(".png"), draw(rows, title))


if __name__ == "__main__":
    redraw(Path(sys.argv[1]))
