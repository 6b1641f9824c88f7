"""How fast are encoder-decoders beside CTranslate2? CPU time of whole translations, and its ratio.

Both run the same random weights, T5-small and BART-base by default, and translate the same sources into texts of one
length: greedily and with four beams, one source and sixteen. The two take turns, so that other load affects both; a
ratio is the median of the ratios within each turn. CPU time is that of the process, all its threads together: a shared
machine takes time away, but adds none. How many of the tokens are the same says that both did the same work; rounding
to 8 bits, which each does in its own way, makes them part.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness import (
    BenchmarkError,
    describe,
    execute,
    headed,
    make_folder,
    new_parser,
    positive,
    positives,
    say,
    token_ids,
    write_csv,
)

if TYPE_CHECKING:
    from minillm import Engine

HEADER = (
    "shape", "dtype", "batch", "beams", "minillm_s_median", "minillm_s_min", "minillm_s_max", "ctranslate2_s_median",
    "ctranslate2_s_min", "ctranslate2_s_max", "ratio_median", "ratio_quartile_1", "ratio_quartile_3", "same_tokens",
)  # fmt: skip
TYPES = {"float32": "float32", "int8": "int8_float32"}
"""Our dtype -> CTranslate2's compute type"""
GOAL = 1.2
"""CTranslate2's CPU time over minillm's"""

Translate = Callable[[list[list[int]], int, int], list[list[int]]]
"""Translates sources: (their token ids, beams, new tokens) -> the tokens of the best result of each"""


class Figures(NamedTuple):
    """Measurements of one case."""

    shape: str
    dtype: str
    batch: int
    beams: int
    ours: list[float]
    """Seconds of CPU time, a turn each"""
    theirs: list[float]
    same: float
    """Share of tokens that are the same at the same place"""

    @property
    def ratios(self) -> list[float]:
        """Theirs over ours, turn by turn."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    def row(self) -> list[object]:
        """A row of the CSV, in the order of `HEADER`."""
        times = [f"{f(side):.4f}" for side in (self.ours, self.theirs) for f in (statistics.median, min, max)]
        ratios = self.ratios if len(self.ratios) > 1 else self.ratios * 2
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        case = [self.shape, self.dtype, self.batch, self.beams]
        return [*case, *times, f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}", f"{self.same:.2f}"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure encoder-decoders beside CTranslate2.", "CSV")
    shapes = ("t5-small", "bart-base")
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="NAME", help=f"(default: {' '.join(shapes)})")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(TYPES), default=tuple(TYPES), help="(default: both)")
    parser.add_argument("--batches", type=positives, default=(1, 16), metavar="N,N,...", help="sources (default: 1,16)")
    parser.add_argument("--beams", type=positives, default=(1, 4), metavar="N,N,...", help="1 is greedy (default: 1,4)")
    parser.add_argument("--source", type=positive, default=64, metavar="N", help="tokens of a source (default: 64)")
    parser.add_argument("--new", type=positive, default=64, metavar="N", help="tokens of a translation (default: 64)")
    parser.add_argument("--turns", type=positive, default=5, metavar="N", help="(default: 5)")
    parser.set_defaults(threads=1)
    return parser.parse_args(arguments)


def check_shapes(shapes: Sequence[str]) -> None:
    """Refuse what is no encoder-decoder.

    Raises:
        BenchmarkError: a shape is that of another kind of model.
    """
    from minillm.models import published_config

    for shape in shapes:
        if not published_config(shape).encoder_layers:
            raise BenchmarkError(f"--shapes {shape}: encoder-decoders are measured, such as t5-small or bart-base")


def written(shape: str, folder: Path) -> None:
    """Write a checkpoint of random weights and its conversion, in a process of its own.

    Raises:
        BenchmarkError: CTranslate2's converter failed, or needs a package that is not installed.
    """
    command = [sys.executable, str(Path(__file__).with_name("peer_files.py")), shape, str(folder), "ctranslate2"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise BenchmarkError(f"{shape} cannot be converted (needs ctranslate2, transformers, torch): {lines[-1]:.200}")


def with_minillm(engine: "Engine") -> Translate:
    """Translation by minillm; nothing ends a text early."""

    def translate(sources: list[list[int]], beams: int, new: int) -> list[list[int]]:
        results = engine.generate(sources, max_new_tokens=new, min_new_tokens=new, num_beams=beams, progress=False)
        return [result.token_ids for result in results]

    return translate


def with_ctranslate2(folder: Path, dtype: str, threads: int) -> Translate:
    """Translation by CTranslate2."""
    import ctranslate2

    options = {"compute_type": TYPES[dtype], "inter_threads": 1, "intra_threads": threads}
    translator = ctranslate2.Translator(str(folder / "ctranslate2"), **options)

    def translate(sources: list[list[int]], beams: int, new: int) -> list[list[int]]:
        words = [[f"t{token}" for token in source] for source in sources]
        limits = {"max_decoding_length": new, "min_decoding_length": new}
        results = translator.translate_batch(words, beam_size=beams, **limits)
        return [[int(word[1:]) for word in result.hypotheses[0]] for result in results]

    return translate


def measure(
    ours: Translate, theirs: Translate, sources: list[list[int]], beams: int, new: int, turns: int
) -> tuple[list[float], list[float], float]:
    """Seconds of CPU time of each, in turns, and the share of tokens that are the same. One turn warms up."""
    seconds: dict[Translate, list[float]] = {ours: [], theirs: []}
    results: dict[Translate, list[list[int]]] = {}
    for turn in range(turns + 1):
        for translate in (ours, theirs)[:: 1 if turn % 2 else -1]:
            began = time.process_time()
            results[translate] = translate(sources, beams, new)
            seconds[translate] += [time.process_time() - began] if turn else []
    lines = zip(results[ours], results[theirs], strict=True)
    same = sum(a == b for mine, other in lines for a, b in zip(mine, other, strict=False))
    return seconds[ours], seconds[theirs], same / (len(sources) * new)


def measured(shape: str, folder: Path, args: argparse.Namespace) -> Iterator[Figures]:
    """The cases of one shape."""
    from minillm import Engine

    written(shape, folder)
    for dtype in args.dtypes:
        theirs, width = with_ctranslate2(folder, dtype, args.threads), max(args.batches) * max(args.beams)
        with Engine(folder, dtype=dtype, threads=args.threads, max_batch_size=width, progress=False) as engine:
            ours, V = with_minillm(engine), engine.config.vocab_size
            for batch in args.batches:
                sources = [token_ids(number, args.source, V) for number in range(batch)]
                for beams in args.beams:
                    say(f"{shape}, {dtype}, {batch} sources, {beams} beams: {args.turns} turns")
                    yield Figures(
                        shape, dtype, batch, beams, *measure(ours, theirs, sources, beams, args.new, args.turns)
                    )


def table(figures: Sequence[Figures]) -> list[str]:
    """The figures as text."""
    lines = [f"{'':30}{'minillm, CPU s':>24}{'CTranslate2, CPU s':>24}{'ratio (quartiles)':>22}{'same':>6}"]
    for one in figures:
        row = [str(cell) for cell in one.row()]
        times = "".join(f"{f'{row[i]} ({row[i + 1]}-{row[i + 2]})':>24}" for i in (4, 7))
        case = f"{one.shape} {one.dtype}, {one.batch} x {one.beams}"
        lines.append(f"{case:30}{times}{f'{row[10]} ({row[11]}-{row[12]})':>22}{row[13]:>6}")
    return lines


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results."""
    check_shapes(args.shapes)
    try:
        import ctranslate2  # noqa: F401
    except ImportError:
        raise BenchmarkError("CTranslate2 is not installed: pip install ctranslate2 transformers torch") from None
    make_folder(args.out)
    figures: list[Figures] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            figures += measured(shape, Path(folder) / shape, args)
    facts = {"question": f"sources of {args.source} tokens into {args.new}, greedy and with beams; CPU time"}
    facts |= {"turns": str(args.turns)} | describe(args.threads, ("minillm", "numpy", "ctranslate2"))
    write_csv(args.out / "seq2seq.csv", facts, HEADER, [one.row() for one in figures])
    print("\n".join([*headed(facts), *table(figures), ""]))
    worst = min(statistics.median(one.ratios) for one in figures)
    print(f"CTranslate2 takes {worst:.2f} times minillm's CPU time at least; {GOAL} is aimed at.")
    print(f"written: {args.out / 'seq2seq.csv'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("seq2seq", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
