"""Command lines: exit code 0, 1 or 2, an error of one line, and files that are whole or not there."""

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from minillm.cli.main import build_parser
from minillm.cli.main import run as run_command
from minillm.errors import MESSAGE_LENGTH

from ..conversations import TEMPLATES, write_tokenizer
from ..tiny import write_checkpoint
from .mutate import FLOATS, TEXTS, WHOLE
from .outcome import COUNTS, blemish_of, expect

CODES = (0, 1, 2)
MODELS = (
    "model",
    "model",
    "model",
    "raw",
    "broken",
    "nowhere",
    "text.txt",
    ".",
    "",
    "owner/name",
    "a/b/c",
    "/dev/null",
    "model/config.json",
)
OUTPUTS = (
    "out",
    "out.html",
    "out.png",
    "out.json",
    "no/such/folder",
    "model",
    ".",
    "",
    "/dev/null",
    "/dev/full",
    "text.txt",
)
INPUTS = ("text.txt", "bytes.bin", "model", "", "nowhere", "schema.json", "grammar.lark", "empty.txt")
SENSIBLE: dict[str, tuple[str, ...]] = {
    "--model": MODELS,
    "--draft": MODELS,
    "--amateur": MODELS,
    "--dtype": ("auto", "float32", "bfloat16", "int8", "int4", "float16", "float32,int8", "float8", ","),
    "--device": ("cpu", "cuda", "tpu"),
    "--backend": ("numpy", "nonsense"),
    "--cache-dtype": ("auto", "float32", "int8", "bfloat16", "no"),
    "--threads": ("1", "0", "-1"),
    "--html": OUTPUTS,
    "--png": OUTPUTS,
    "--trace": OUTPUTS,
    "--attention": OUTPUTS,
    "--prompt-file": INPUTS,
    "--text": INPUTS,
    "--file": INPUTS,
    "--output": ("out.npy", "no/such/out.npy", *OUTPUTS),
    "--guided-json": ("schema.json", '{"type": "integer"}', '{"type": 5}', "{", "nowhere", "text.txt", "bytes.bin"),
    "--guided-grammar": ("grammar.lark", "text.txt", "nowhere", "bytes.bin"),
    "--guided-regex": ("[a-z]+", "(", "a|b"),
    "--guided-choice": ("red", "green"),
    "--chat-template-kwargs": ("{}", '{"enable_thinking": false}', "[]", "{"),
    "--hardware": ("a100", "h100", "nonsense"),
    "--shape": ("nonsense", "opt-0m"),
    "--early-stopping": ("yes", "no", "never", "maybe"),
    "--max-new-tokens": ("1", "3", "5"),
    "--repeat": ("1", "0"),
    "--batch": ("1", "2", "0"),
    "--new-tokens": ("2", "1", "0"),
    "--prompt-length": ("4", "8", "0"),
    "--group-size": ("32", "64", "7"),
    "--layer": ("0", "1", "2", "-1"),
}
REPEATABLE = ("--prompt", "--stop")
STRANGE = [str(value) for value in (*WHOLE, *FLOATS)] + [
    text for text in TEXTS if "\0" not in text and len(text) < 5000
]
STRANGE += ["--", "-", "-h", "--no-such-option", "@file", "~", "*", "NaN", "0x10", "1_000", "٣", "1e5", "true"]
TASKS = ("translate", "summarize", "classify", "embed")
SEEDS: dict[str, tuple[str, ...]] = {
    "generate": ("--backend", "numpy", "--model", "model", "--max-new-tokens", "3"),
    "chat": ("--backend", "numpy", "--model", "model", "--max-new-tokens", "3"),
    "compare": ("--backend", "numpy", "--model", "model", "--max-new-tokens", "2"),
    "inspect": ("--backend", "numpy", "--model", "model"),
    "tokenize": ("--model", "model"),
    **dict.fromkeys(TASKS, ("--backend", "numpy", "--model", "model")),
    "perplexity": ("--backend", "numpy", "--model", "model", "--text", "text.txt", "--dtype", "float32"),
    "quantize": ("--dtype", "int8"),
    "analyze": ("--hardware", "a100"),
    "profile": (
        *("--backend", "numpy", "--model", "model", "--repeat", "1", "--new-tokens", "2"),
        "--prompt-length",
        "4",
    ),
    "bench": (),
}
COMMON = (
    "generate",
    "generate",
    "generate",
    "chat",
    "compare",
    "inspect",
    "tokenize",
    *TASKS,
    "embed",
    "perplexity",
    "quantize",
    "analyze",
    "bench",
)


def prepare(folder: Path) -> Callable[[int, Random], None]:
    """What runs an input."""
    os.environ["MINILLM_BACKEND"] = "numpy"  # kernels would be compiled first
    place = folder / "place"
    _furnish(place)
    before = _listing(place)
    options = _options()

    def run(number: int, rng: Random) -> None:
        os.chdir(place)
        vector, stdin = (
            arguments(rng, options),
            rng.choice([b"", b"red, green", b"a\nb\n\n", b"\xff\xfe", b"a" * 5000, b"\0\n"]),
        )
        call = _real if rng.random() < 0.04 else _within
        try:
            code, out, err = call(rng, vector, stdin)
            _check(vector, code, out, err, place, before)
        finally:
            if _listing(place) != before:
                os.chdir(folder)
                shutil.rmtree(place)
                _furnish(place)
                before.clear()
                before.update(_listing(place))

    return run


def _furnish(place: Path) -> None:
    """The folder in which commands run."""
    model = write_checkpoint(place / "model", seed=2)
    write_tokenizer(model, (TEMPLATES / "qwen3.jinja").read_text())
    write_checkpoint(place / "raw", seed=3)
    (place / "broken").mkdir()
    (place / "broken" / "config.json").write_text('{"model_type": "llama", "hidden_size": "\\u001b[31m"}')
    (place / "text.txt").write_text("red, green, blue\nand yellow\n")
    (place / "empty.txt").write_text("")
    (place / "bytes.bin").write_bytes(bytes(range(256)))
    (place / "schema.json").write_text('{"type": "boolean"}')
    (place / "grammar.lark").write_text('start: "red" | "green"')


def _listing(place: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and its time."""
    paths = sorted(place.rglob("*"))
    return {str(path.relative_to(place)): (stat.st_size, stat.st_mtime_ns) for path in paths if (stat := path.lstat())}


def _options() -> dict[str, list[argparse.Action]]:
    """The options of each command."""
    subparsers = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: [a for a in parser._actions if a.option_strings] for name, parser in subparsers.choices.items()}


def arguments(rng: Random, options: dict[str, list[argparse.Action]]) -> list[str]:
    """The words of one command line."""
    if rng.random() < 0.03:
        return [rng.choice([*STRANGE, *SEEDS, "--version", "--help"]) for _ in range(rng.randrange(3))]
    command = rng.choice(COMMON) if rng.random() < 0.99 else "profile"
    words = [*_positionals(rng, command), *SEEDS[command]]
    if command not in ("quantize", "analyze", "bench", "profile", "perplexity", *TASKS) and rng.random() < 0.9:
        words += ["--prompt", rng.choice(["red, green", "a", "", rng.choice(STRANGE)])] if command != "chat" else []
    for action in rng.sample(options[command], min(len(options[command]), rng.choice([0, 1, 1, 2, 3]))):
        words += _said(rng, action)
    if rng.random() < 0.08:
        at = rng.randrange(len(words) + 1)
        words[at : at + rng.randrange(2)] = [rng.choice(STRANGE)]
    return [command, *words]


HELP = {"-h", "--help", "--help-all"}


def _said(rng: Random, action: argparse.Action) -> list[str]:
    name = rng.choice(action.option_strings)
    if name in HELP and rng.random() < 0.9:
        return []
    if action.nargs == 0:
        return [name]
    if name in SENSIBLE and rng.random() < 0.85:
        value = rng.choice(SENSIBLE[name])
    elif rng.random() < 0.6:
        value = rng.choice(["1", "2", "3", "0", "0.5", "0.9", "1.5", "7"])
    else:
        value = rng.choice(STRANGE)
    return [name, value] if rng.random() < 0.8 else [f"{name}={value}"]


def _positionals(rng: Random, command: str) -> list[str]:
    match command:
        case "quantize":
            return [rng.choice(MODELS), rng.choice(OUTPUTS)]
        case "analyze":
            return [rng.choice([*MODELS, "opt-125m", "opt-13b", "llama-7b"])]
        case "bench":
            return rng.choice([[], ["no_such_benchmark"], ["../x"], ["--help"], [""]])
        case "translate" | "summarize" | "classify" | "embed":
            return rng.choice([[], [], ["red, green"], [rng.choice(STRANGE)]])
        case _:
            return []


def _within(rng: Random, vector: list[str], stdin: bytes) -> tuple[int, bytes, bytes]:
    """Run a command in this process. Returns its exit code, stdout and stderr."""
    streams = [
        io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors=e)
        for data, e in ((stdin, "surrogateescape"), (b"", "strict"), (b"", "backslashreplace"))
    ]
    usual, sys.stdin = sys.stdin, streams[0]
    try:
        with contextlib.redirect_stdout(streams[1]), contextlib.redirect_stderr(streams[2]):
            code: Any = 0
            try:
                code = run_command(vector)
            except SystemExit as ending:
                code = ending.code
    finally:
        sys.stdin = usual
    for stream in streams[1:]:
        stream.flush()
    return code, *(stream.buffer.getvalue() for stream in streams[1:])  # type: ignore[attr-defined]


def _real(rng: Random, vector: list[str], stdin: bytes) -> tuple[int, bytes, bytes]:
    """Run a command in a process of its own, now and then with a stdout that is full or of another encoding."""
    words = [word.encode("utf-8", "replace") for word in vector]
    command = [os.fsencode(sys.executable), b"-m", b"minillm", *words]
    encoding = rng.choice(["utf-8", "utf-8", "ascii", "latin-1"])
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": encoding}
    with open("/dev/full", "wb") if rng.random() < 0.2 else contextlib.nullcontext(subprocess.PIPE) as stdout:  # noqa: PTH123
        ended = subprocess.run(command, input=stdin, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=50)
    return ended.returncode, ended.stdout or b"", ended.stderr


def _check(
    vector: list[str], code: Any, out: bytes, err: bytes, place: Path, before: dict[str, tuple[int, int]]
) -> None:
    shown = " ".join(vector)[:120]
    said = err.decode("utf-8", "replace")
    expect(code in CODES, f"exit code {code!r} of {shown!r}: {said[-200:]!r}")
    expect("Traceback" not in said, f"a traceback of {shown!r}: {said[-300:]!r}")
    COUNTS["answered" if code == 0 else "refused"] += 1
    after = _listing(place)
    new = {name for name in after if after[name] != before.get(name) and (place / name).is_file()}
    if code != 0:
        expect(said.strip(), f"{shown!r} failed without a word")
        expect(
            not new and before.keys() <= after.keys(), f"{shown!r} failed and left {sorted(new)[:5]} ({said[-100:]!r})"
        )
        last = said.rstrip("\n").split("\n")[-1]
        by_argparse = (
            " error: " in last[: len("minillm perplexity: error: ")]
        )  # it quotes all words that it does not know
        blemish = blemish_of(last, 100_000 if by_argparse else MESSAGE_LENGTH)
        expect(not blemish, f"{shown!r}: the error {blemish}: {last[:300]!r}")
    for name in new:
        _check_file(place / name, vector)
    if code == 0 and "--json" in vector and out.strip() and not HELP & set(vector):
        for line in [out] if vector[0] in ("compare", "analyze", "profile") else out.splitlines():
            _check_json(line, f"stdout of {shown!r}")


def _check_file(path: Path, vector: list[str]) -> None:
    """A file that a command wrote is whole."""
    content = path.read_bytes()
    option = next((option for option, word in pairwise(vector) if word == path.name), "")
    if option == "--trace" or (path.suffix == ".json" and option not in ("--html", "--png", "--attention")):
        _check_json(content, path.name)
    elif path.suffix == ".html":
        expect(content.rstrip().endswith(b"</html>"), f"{path.name} ends in {content[-40:]!r}")
    elif option in ("--png", "--attention"):
        expect(content.startswith(b"\x89PNG") and b"IEND" in content[-12:], f"{path.name} is no PNG")


def _check_json(content: bytes, what: str) -> None:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        json.loads(content, parse_constant=refuse)
    except ValueError as error:
        expect(False, f"{what} is not valid JSON: {error}")
