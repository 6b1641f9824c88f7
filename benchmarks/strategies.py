"""Does speculative decoding pay off? Tokens per forward pass and seconds per token, with guesses and without.

Prompt lookup gets a prompt that its continuation repeats, lookahead lists and counting, the draft model the same (the
model drafts for itself with --draft left out: every guess is right, and each costs as much as a pass: a bound, not a
gain). Greedy tokens are compared with those without guesses; a difference ends the script with exit code 1.

With --model, a real model continues passages of a text, once as new text and once where it repeats what it has read.
Its draft is then itself in int4, and int4 is judged as a format, too: its speed, and the perplexity of the text.
"""

import argparse
import copy
import statistics
import sys
import tempfile
from collections.abc import Sequence
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
    write_csv,
    write_figure,
)

if TYPE_CHECKING:
    from minillm import Engine

COUNTED = "Count from 3 to 20: " + ", ".join(map(str, range(3, 21))) + ".\n"
REPEATING = [COUNTED + "Count from 3 to 20:", COUNTED + "Count from 3 to 20: 3,"]
LISTS = ["A list of colors: red,", "A list of animals: cat,", "Count from 3 to 30:", "Count from 40 to 60:"]

WAYS: "Ways" = {
    "prompt lookup, k = 10": (REPEATING, {"prompt_lookup_num_tokens": 10}),
    "prompt lookup, k = 3": (REPEATING, {"prompt_lookup_num_tokens": 3}),
    "lookahead, W = 5, N = 2": (LISTS, {"lookahead_window": 5, "lookahead_ngram_size": 2}),
    "lookahead, W = 15, N = 2": (LISTS, {"lookahead_window": 15, "lookahead_ngram_size": 2}),
    "lookahead, W = 5, N = 3": (LISTS, {"lookahead_window": 5}),
    "lookahead, W = 15, N = 3": (LISTS, {"lookahead_window": 15}),
    "draft, g = 5": (LISTS, {"num_assistant_tokens": 5}),
}
TEXT = Path(__file__).parents[1] / "tests" / "real" / "alice.txt"
PASSAGES, WORDS = 3, 60
"""Number of passages of the text, and words of each"""
REAL_WAYS: dict[str, dict[str, Any]] = {
    "prompt lookup, k = 10": {"prompt_lookup_num_tokens": 10},
    "lookahead, W = 5, N = 3": {"lookahead_window": 5},
    "draft, g = 5": {"num_assistant_tokens": 5},
}
Ways = dict[str, tuple[list[str], dict[str, Any]]]
"""A measurement's name -> its prompts and fields"""
HEADER = (
    *("way", "acceptance_rate", "positions_per_token", "tokens_per_pass", "tokens_per_pass_formula"),
    *("ms_per_token_median", "ms_per_token_min", "ms_per_token_max"),
    *("without_ms_per_token_median", "without_ms_per_token_min", "without_ms_per_token_max", "speed_up"),
)


class Figures(NamedTuple):
    """Measurements of one kind of speculation."""

    name: str
    counts: Any
    """`Speculation`: guesses and what became of them"""
    without: list[float]
    """Milliseconds for each token, round by round"""
    guessed: list[float]
    same: bool
    """Whether the tokens equal those without guesses"""
    positions: float
    """Positions computed for each token, the draft's too; 1 without guesses"""

    @property
    def speed_up(self) -> float:
        """The median of the ratios within each round."""
        return statistics.median(slow / fast for slow, fast in zip(self.without, self.guessed, strict=True))

    def row(self) -> list[object]:
        """A row of the CSV, in the order of `HEADER`."""
        counts = self.counts
        rates = (counts.acceptance_rate, self.positions, counts.tokens_per_step, counts.predicted_tokens_per_step)
        times = [*spread(self.guessed), *spread(self.without)]
        return [self.name, *(f"{rate:.4f}" for rate in rates), *(f"{ms:.4f}" for ms in times), f"{self.speed_up:.3f}"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure generation with guesses against generation without.", "CSV and the plot")
    parser.add_argument("--model", help="checkpoint folder, GGUF file or hub id (default: the demo model)")
    parser.add_argument("--draft", help="draft model (default: the demo model itself; of --model, itself in int4)")
    parser.add_argument("--text", type=Path, help="a text for --model to continue (default: a page of English)")
    parser.add_argument("--batch", type=positive, default=1, help="sequences side by side (default: 1)")
    parser.add_argument("--repeat", type=positive, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--max-new-tokens", type=positive, default=60, help="of each prompt (default: 60)")
    args = parser.parse_args(arguments)
    if args.text is not None and args.model is None:
        parser.error("--text is for a real model: name a --model")
    return args


def read_text(path: Path | None) -> str:
    """The text of a file, or of the page of English.

    Raises:
        BenchmarkError: it cannot be read, or is too short.
    """
    try:
        text = (path or TEXT).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"--text {path} cannot be read: {error}") from None
    if (words := len(text.split())) < PASSAGES * WORDS:
        raise BenchmarkError(f"--text {path} has {words} words: expected at least {PASSAGES * WORDS}")
    return text


def real_ways(text: str) -> Ways:
    """Each of `REAL_WAYS` on passages of a text, and on passages of which the beginning comes again."""
    words = text.split()
    passages = [" ".join(words[i * WORDS : (i + 1) * WORDS]) for i in range(PASSAGES)]
    repeating = [f"{passage}\n\n{' '.join(passage.split()[:8])}" for passage in passages]
    kinds = {"new text": passages, "repetition": repeating}
    return {f"{way}: {kind}": (prompts, fields) for way, fields in REAL_WAYS.items() for kind, prompts in kinds.items()}


def timed(engine: "Engine", prompts: list[str], fields: dict[str, Any]) -> tuple[Any, Any, list[list[int]]]:
    """One run: the statistics before and after, and the tokens."""
    before = copy.deepcopy(engine.stats)
    tokens = [generation.token_ids for generation in engine.generate(prompts, **fields)]
    return before, copy.deepcopy(engine.stats), tokens


def seconds_per_token(before: Any, after: Any, tokens: list[list[int]]) -> float:
    """Seconds per token, after each sequence's first."""
    seconds: float = after.decode_seconds - before.decode_seconds
    return seconds / sum(len(line) - 1 for line in tokens)


def positions_per_token(before: Any, after: Any, tokens: list[list[int]]) -> float:
    """Positions computed for each token, after each sequence's first."""
    positions: int = after.decode_tokens - before.decode_tokens
    return positions / sum(len(line) - 1 for line in tokens)


def measure(args: argparse.Namespace, name: str, prompts: list[str], fields: dict[str, Any]) -> Figures:
    """Measure one kind of speculation and plain generation in turns. The first round is a warm-up and is not kept."""
    from minillm import Engine
    from minillm.engine.loading import DEMO_MODEL

    model = args.model or DEMO_MODEL
    drafting = "num_assistant_tokens" in fields
    options = {"max_new_tokens": args.max_new_tokens}
    plain = options | ({"num_assistant_tokens": 0} if drafting else {})
    draft = (args.draft or model) if drafting else None
    same = True
    with Engine(model, max_batch_size=args.batch, prefix_cache=False, draft=draft, threads=args.threads) as engine:
        slow, fast = [], []
        for _ in range(args.repeat + 1):
            before, after, expected = timed(engine, prompts, plain)
            slow.append(1e3 * seconds_per_token(before, after, expected))
            before, after, tokens = timed(engine, prompts, options | fields)
            fast.append(1e3 * seconds_per_token(before, after, tokens))
            same = same and tokens == expected
        positions = positions_per_token(before, after, tokens)
        return Figures(name, engine.stats.speculation, slow[1:], fast[1:], same, positions)


def judge_int4(args: argparse.Namespace, exact: str, int4: Path) -> str:
    """Gain and cost of int4: speed of plain generation in turns, and perplexity of the text."""
    from minillm import Engine
    from minillm.measure.precision import perplexity

    text = read_text(args.text)
    (prompts, _), *_ = real_ways(text).values()
    ratios, tokens = [], {"max_new_tokens": args.max_new_tokens, "eos_token_id": ()}
    with (
        Engine(exact, max_batch_size=args.batch, prefix_cache=False, threads=args.threads) as plain,
        Engine(int4, max_batch_size=args.batch, prefix_cache=False, threads=args.threads) as small,
    ):
        for _ in range(args.repeat + 1):
            slow, fast = (seconds_per_token(*timed(engine, prompts, tokens)) for engine in (plain, small))
            ratios.append(slow / fast)
        before, after = (perplexity(engine, text) for engine in (plain, small))
    speed = statistics.median(ratios[1:])
    return (
        f"{speed:.2f} times the speed; perplexity of the text {before:.3f} -> {after:.3f} ({after / before - 1:+.2%})"
    )


def table(figures: Sequence[Figures]) -> list[str]:
    """The figures as lines of text."""
    lines = [
        f"{'':<36}{'accepted':>9}{'positions/token':>17}{'tokens/pass':>13}{'formula':>9}{'ms/token':>10}{'without':>9}"
        f"{'speed-up':>10}"
    ]
    for one in figures:
        counts = one.counts
        lines.append(
            f"{one.name:<36}{counts.acceptance_rate:>9.2f}{one.positions:>17.2f}{counts.tokens_per_step:>13.2f}"
            f"{counts.predicted_tokens_per_step:>9.2f}{statistics.median(one.guessed):>10.2f}"
            f"{statistics.median(one.without):>9.2f}{one.speed_up:>10.2f}"
        )
    return lines


def conclusion(figures: Sequence[Figures]) -> str:
    """The result in one sentence."""
    best = max(figures, key=lambda one: one.speed_up)
    slower = sum(one.speed_up < 1 for one in figures)
    return (
        f"{best.name} gains most, {best.speed_up:.2f} times the speed at {best.counts.tokens_per_step:.2f} tokens a "
        f"pass; {slower} of {len(figures)} ways are slower than no guesses."
    )


def plot(path: Path, figures: Sequence[Figures], facts: dict[str, str]) -> None:
    """Draw tokens per pass and the resulting speed, a pair of bars for each kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axis = figure.subplots()
    places = range(len(figures))
    for shift, label, colour, values in (
        (-0.2, "tokens a pass", "#b9cfe4", [one.counts.tokens_per_step for one in figures]),
        (0.2, "speed-up", "#1f6fb2", [one.speed_up for one in figures]),
    ):
        bars = axis.barh([place + shift for place in places], values, 0.4, color=colour, label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=3)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(places, [one.name for one in figures])
    axis.invert_yaxis()
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Guessing ahead beside plain greedy generation (1: the same)")
    figure.supxlabel(f"Medians. {facts['cpu']}; cores: {facts['cores']}", fontsize=8, color="0.35")
    write_figure(path, figure)


def run(args: argparse.Namespace) -> int:
    """Measure and write. Returns the exit code."""
    need_matplotlib()
    ways = WAYS if args.model is None else real_ways(read_text(args.text))
    make_folder(args.out)
    remarks = []
    with tempfile.TemporaryDirectory(prefix="minillm-int4-") as folder:
        if args.model is not None:
            from minillm.formats import find_model
            from minillm.formats.gguf.write import write_gguf

            say("writing the model in int4")
            int4 = Path(folder) / "int4.gguf"
            write_gguf(find_model(args.model), int4, "int4")
            say("int4")
            remarks.append(judge_int4(args, args.model, int4))
            args.draft = args.draft or int4
        figures = []
        for name, (prompts, fields) in ways.items():
            say(name)
            figures.append(measure(args, name, prompts, fields))
    facts = {"question": f"greedy generation with guesses and without, {args.model or 'the model inside minillm'}"}
    facts |= {"rounds": str(args.repeat), "batch": str(args.batch)} | describe(args.threads)
    if remarks:
        facts["weights in int4"] = remarks[0]
    stem = str(args.out / ("strategies" if args.model is None else f"strategies_{Path(args.model).stem}"))
    write_csv(Path(f"{stem}.csv"), facts, HEADER, [one.row() for one in figures])
    plot(Path(f"{stem}.png"), figures, facts)
    same = all(one.same for one in figures)
    print("\n".join([*headed(facts), *table(figures), ""]))
    print("tokens: the same with and without guesses" if same else "tokens DIFFER")
    print(conclusion(figures))
    print(f"written: {stem}.csv, {stem}.png")
    return 0 if same else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if the tokens differ, 2 for invalid arguments."""
    return execute("strategies", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
