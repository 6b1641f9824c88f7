"""minillm models: the models on this machine, whether they run here and how fast."""

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MinillmError, printable
from .analyze import analyze
from .output import Table, as_json, bytes_text, number_text, print_report, terminal_width
from .parser import Parser

if TYPE_CHECKING:
    from ..measure.accounting.hardware import Hardware

DESCRIPTION = """List the models in the Hugging Face cache (HF_HOME), in minillm's own and in
folders: size on disk, format, parameters, and the tokens per second of one
sequence that are predicted for this machine. The prediction is an upper bound,
from a short measurement of the memory's bandwidth: a step reads every weight
once."""

EPILOG = """examples:
  minillm models
  minillm models ~/checkpoints --hardware h100 --json
"""

LEAST = 20
"""Columns that a name needs beside the other columns; else it has a line of its own"""


@dataclass
class Entry:
    """A model on this machine."""

    name: str
    """As `--model` takes it"""
    path: str
    bytes: int
    """On disk"""
    format: str = ""
    """Format of most of its numbers: "bfloat16", "int4", "GPTQ 4 bits", "GGUF" """
    family: str | None = None
    parameters: int | None = None
    tokens_per_second: float | None = None
    """Predicted for decoding one sequence; None if it does not run here"""
    problem: str | None = None
    """The reason why it does not, in one line"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument("folders", nargs="*", metavar="DIR", type=Path, help="folders to search too")
    parser.add_argument(
        "--hardware", default="this", help="predict for this machine (this, the default), or a100, h100, h200, ..."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object for each model")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..backends.cpu.compiling import cache_folder
    from ..measure.accounting.hardware import find_hardware

    own = cache_folder().with_name("models")  # where scripts/fetch_smollm2.py puts its model
    checkpoints = sorted(places(dict.fromkeys([*([own] if own.is_dir() else []), *args.folders])))
    if not checkpoints:
        if args.hardware != "this":
            find_hardware(args.hardware)  # refuses an unknown one
        if not args.json:
            print("no models here: minillm pull ID fetches one from the hub")
        return
    hardware = find_hardware(args.hardware)
    entries = [describe(name, path, problem, hardware) for name, path, problem in checkpoints]
    if args.json:
        print("\n".join(as_json(asdict(entry)) for entry in entries))
    else:
        print_report(report(entries, hardware, terminal_width()))


def places(folders: Iterable[Path]) -> Iterator[tuple[str, Path, str]]:
    """Name, path and problem, if any, of each model in the hub's cache and in these folders.

    Raises:
        ModelNotFoundError: a folder does not exist.
    """
    from ..errors import ModelNotFoundError
    from ..formats import cached_models
    from ..formats.search import checkpoints_in, gguf_files

    for cached in cached_models():
        files = [] if cached.problem else gguf_files(cached.folder)
        yield from ((f"{cached.name}/{file.name}", file, "") for file in files)
        if not files or (cached.folder / "config.json").exists():
            yield cached.name, cached.folder, cached.problem
    for top in folders:
        if not top.is_dir():
            raise ModelNotFoundError(f"there is no folder {str(top)!r:.200}")
        yield from ((str(path), path, "") for path in checkpoints_in(top))


def describe(name: str, path: Path, problem: str, hardware: "Hardware") -> Entry:
    """An entry of the list; what cannot be read or does not run gets a `problem`, never an exception."""
    from ..formats.search import bytes_of

    entry = Entry(printable(name), str(path), bytes_of(path), "GGUF" if path.suffix == ".gguf" else "")
    try:
        problem = problem or _examine(entry, path, hardware)
    except MinillmError as error:
        problem = str(error)
    except (OSError, ValueError, KeyError, TypeError) as error:  # a file that no program has written
        problem = f"{type(error).__name__}: {error}"
    entry.problem = printable(problem) or None
    return entry


def _examine(entry: Entry, path: Path, hardware: "Hardware") -> str:
    """Fill in what is known of a model. Returns the reason why it does not run here, or nothing.

    Raises:
        MinillmError: it is damaged, or of a kind that minillm does not run.
    """
    from ..formats import ADAPTER_CONFIG, open_model
    from ..measure.accounting.memory import needed
    from ..models import tensor_shapes

    if (path / ADAPTER_CONFIG).exists():
        entry.format = "adapter"
        return "an adapter: give it as --adapter beside its base model"
    files = open_model(path)
    entry.family, entry.format = files.family, files.description
    if files.raw.get("quantization_config") is None:
        entry.parameters = files.counts.total()  # unless the family says better
    entry.parameters = sum(map(math.prod, tensor_shapes(files.config).values()))
    files.check_complete()
    dtype = files.counts.most_common(1)[0][0] if files.kept_dtype is None else "auto"
    analysis = analyze(str(path), dtype=dtype, hardware=hardware)
    work, free = analysis.workload, hardware.memory
    bytes_needed = needed(analysis.config, analysis.storage, 1, work.decode_context)
    if bytes_needed > free:
        return f"needs {bytes_text(bytes_needed)} of memory, {bytes_text(free)} are free"
    phase, tokens = (analysis.decode, 1) if analysis.generates else (analysis.prefill, work.prompt_length)
    entry.tokens_per_second = tokens / phase.seconds
    return ""


def report(entries: list[Entry], hardware: "Hardware", width: int | None) -> list[str | Table]:
    """The list, for `print_report`: names are shortened to fit into `width` columns, if it is given."""
    head = ("name", "size", "format", "parameters", "tokens/s")
    cells = [
        [
            bytes_text(entry.bytes),
            entry.format or "-",
            "-" if entry.parameters is None else number_text(entry.parameters),
            "-" if entry.tokens_per_second is None else _rate(entry.tokens_per_second),
        ]
        for entry in entries
    ]
    others = sum(2 + max(len(head[i + 1]), *(len(row[i]) for row in cells)) for i in range(4))
    room = None if width is None else width - others if width - others >= LEAST else width
    rows = [[_shortened(entry.name, room), *row] for entry, row in zip(entries, cells, strict=True)]
    source = f"{hardware.name}, {bytes_text(hardware.bandwidth)}/s"
    note = f"tokens/s: predicted for one sequence, at best, on {source}"
    problems = [f"{entry.name} does not run: {entry.problem}" for entry in entries if entry.problem]
    return [Table(head, rows, note=note), *(["", *problems] if problems else [])]


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _shortened(name: str, room: int | None) -> str:
    """A name without its middle, if it is longer than `room`: its end tells more."""
    if room is None or len(name) <= room:
        return name
    end = (room - 1) * 2 // 3
    return f"{name[: room - 1 - end]}…{name[-end:]}"
