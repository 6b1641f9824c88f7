"""The command line as a process: signals at any time, and standard streams that are closed, full or ASCII."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from ..children import DEFAULT_SIGNALS, prepared

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and streams of POSIX")

MODULE = [sys.executable, "-m", "minillm"]
SCRIPT = [sys.executable, "-c", "import sys; from minillm.__main__ import main; sys.exit(main())"]
"""The command `minillm` as its entry point starts it where it is installed"""
PROMPT = ["--prompt", "A list of colors: red,"]
FAST = ["--backend", "numpy"]

SIGNALLED = """
import os, sys
event, wanted, number = sys.argv[1:4]
sys.argv[:4] = ["minillm"]
armed = [True]

def hook(name, arguments):
    if armed and name == event and wanted in str(arguments[0]):
        armed.clear()
        os.kill(os.getpid(), int(number))

sys.addaudithook(hook)
from minillm.__main__ import main
sys.exit(main())
"""
"""Sends itself a signal when it first opens or imports what is named."""


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120} | options
    )


def run_signalled(event: str, wanted: str, number: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SIGNALLED, event, wanted, str(int(number)), *arguments]
    return run(prepared(DEFAULT_SIGNALS, command))


# --- signals ----------------------------------------------------------------------------------------------------------


def cases(cases: Iterable[tuple[Any, ...]], often: Collection[tuple[Any, ...]]) -> Iterator[Any]:
    """Cases of which some run every time; the others are exhaustive."""
    for case in cases:
        yield pytest.param(*case, marks=pytest.mark.slow if case in often else pytest.mark.exhaustive)


MODULES = ["minillm.progress_bar", "minillm.cli.options", "minillm.engine.engine", "numpy", "tokenizers"]
ALTERNATING = list(zip(MODULES, cycle([signal.SIGINT, signal.SIGTERM]), strict=False))


@pytest.mark.parametrize(
    ("module", "number"), cases(product(MODULES, [signal.SIGINT, signal.SIGTERM]), often=ALTERNATING)
)
def test_a_signal_while_importing_ends_at_once(module: str, number: int) -> None:
    result = run_signalled("import", module, number, "generate", *PROMPT, *FAST)
    assert (result.returncode, result.stdout, result.stderr) == (128 + number, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("start", [MODULE, SCRIPT], ids=["module", "script"])
def test_ctrl_c_at_the_prompt_of_a_chat(start: list[str]) -> None:
    with subprocess.Popen(
        prepared(DEFAULT_SIGNALS, [*start, "chat", *FAST]),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert "no chat template" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "")


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing_of_a_checkpoint_half_written(number: int, checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["quantize", str(checkpoint), str(tmp_path / "out"), "--dtype", "int8"]
    result = run_signalled("open", "model.safetensors", number, *arguments)
    assert list(tmp_path.iterdir()) == [], "nor the folder that was to become it"
    assert (result.returncode, result.stderr) == (128 + number, "")


@pytest.mark.slow
def test_a_signal_leaves_nothing_of_a_page_half_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    arguments = ["analyze", "opt-125m", "--html", str(tmp_path / "page.html")]
    result = run_signalled("open", ".minillm-", signal.SIGTERM, *arguments)
    assert (result.returncode, result.stderr) == (143, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_signal_that_was_set_aside_stays_so() -> None:
    command = [sys.executable, "-c", SIGNALLED, "import", "numpy", str(int(signal.SIGINT)), "generate", *PROMPT, *FAST]
    result = run(prepared("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)", command))
    assert result.returncode == 0
    assert "orange" in result.stdout


@pytest.mark.longer
def test_a_benchmark_ends_with_the_command_that_runs_it(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(
        '"""Does it wait?"""\nimport time\nprint("waiting", flush=True)\ntime.sleep(600)\n'
    )
    code = (
        "import sys; from pathlib import Path; from minillm.cli import bench; "
        f"bench.FOLDER = Path({str(tmp_path)!r}); from minillm.__main__ import main; sys.exit(main())"
    )
    with subprocess.Popen(
        prepared(DEFAULT_SIGNALS, [sys.executable, "-c", code, "bench", "wait"]),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
        assert process.stdout.read() == b"", "the pipe is closed: the script has ended, too"


# --- streams ----------------------------------------------------------------------------------------------------------

PRINTING = {
    "help": ["--help"],
    "help of a command": ["generate", "--help"],
    "version": ["--version"],
    "generate": ["generate", *PROMPT, *FAST],
    "generate --json": ["generate", *PROMPT, *FAST, "--json"],
    "chat": ["chat", *FAST],
    "compare": ["compare", *PROMPT, *FAST, "--max-new-tokens", "2"],
    "inspect": ["inspect", *PROMPT, *FAST],
    "tokenize": ["tokenize", *PROMPT],
    "perplexity": ["perplexity", "--dtype", "float32", *FAST],
    "analyze": ["analyze", "opt-125m"],
    "profile": ["profile", "--prompt-length", "4", "--new-tokens", "2", "--repeat", "1", "--hardware", "a100", *FAST],
    "bench": ["bench"],
}


FULL = [
    *((command, "") for command in ("help", "generate", "chat", "compare", "perplexity", "bench")),
    *((command, "1") for command in ("generate", "generate --json", "inspect", "analyze", "profile")),
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(("command", "unbuffered"), cases(product(PRINTING, ["", "1"]), often=FULL))
def test_standard_output_without_room_is_one_line_and_exit_code_1(command: str, unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        result = run([*MODULE, *PRINTING[command]], stdout=full, input="1,\n", env=environment)
    assert result.stderr.splitlines()[-1] == "minillm: standard output cannot be written: No space left on device"
    assert len(result.stderr.splitlines()) == (2 if command == "chat" else 1), result.stderr
    assert result.returncode == 1


@pytest.mark.parametrize(
    "command", cases(((command,) for command in [*PRINTING, "quantize"]), often=[("help",), ("chat",), ("quantize",)])
)
def test_standard_output_that_is_closed_is_one_line_and_exit_code_1(command: str) -> None:
    result = run(prepared("os.close(1)", [*MODULE, *PRINTING.get(command, ["quantize", "a", "b"])]))
    assert result.stderr == "minillm: standard output is closed: there is nowhere to print to\n"
    assert result.returncode == 1


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_standard_input_that_is_closed_is_one_line(command: str) -> None:
    result = run(prepared("os.close(0)", [*MODULE, command, *FAST]))
    assert result.stderr.startswith("minillm: standard input is closed") and result.stderr.count("\n") == 1
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.slow
def test_what_was_to_go_to_a_closed_standard_error_goes_nowhere() -> None:
    good, bad = [*MODULE, "generate", *PROMPT, *FAST, "--stats"], [*MODULE, "generate", *PROMPT, "--temperature", "-1"]
    expected = run([*MODULE, "generate", *PROMPT, *FAST]).stdout
    result = run(prepared("os.close(2)", good))
    assert (result.returncode, result.stdout) == (0, expected)
    result = run(prepared("os.close(2)", bad))
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.longer
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_mistake_keeps_its_exit_code_where_it_cannot_be_told() -> None:
    with Path("/dev/full").open("wb") as full:
        result = run([*MODULE, "generate", *PROMPT, "--temperature", "-1"], stderr=full)
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.slow
def test_what_ascii_does_not_hold_is_replaced_and_json_keeps_it() -> None:
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    arguments = [*MODULE, "generate", "--prompt", "é語", "--echo", "--max-new-tokens", "1", *FAST]
    result = run(arguments, env=ascii_only)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("??")
    result = run([*arguments, "--json"], env=ascii_only)
    assert result.stdout.isascii()
    assert json.loads(result.stdout)["prompt"] == "é語"
    result = run([*MODULE, "generate", "--model", "./é"], env=ascii_only)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and r"\xe9" in result.stderr


@pytest.mark.slow
def test_a_model_does_not_drive_the_terminal() -> None:
    """Its text is shown on a terminal with escapes, and reaches a file or a pipe as it is."""
    command = [*MODULE, "generate", "--prompt", "\x1b]0;owned\x07\r\x9b\tx\n", "--echo", "--max-new-tokens", "1", *FAST]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += (more := os.read(ours, 4096))
            except OSError:  # as Linux says that the other end is closed
                break
            if not more:
                break
        assert process.wait(timeout=60) == 0
    os.close(ours)
    assert shown.startswith(rb"\x1b]0;owned\x07\x0d\x9b" + b"\tx\r\n"), shown
    piped = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
    assert piped.startswith("\x1b]0;owned\x07\r\x9b\tx\n".encode())


def test_tables_quote_tokens_that_are_no_text() -> None:
    """JSON leaves C1 controls and marks of direction as they are, which some terminals act on."""
    from minillm.cli.output import as_json

    text = "\x1b[2J\x9b\u202e\x7f\u2028é語\U000e0001 😀"
    assert as_json(text).isprintable() and "é語" in as_json(text) and "😀" in as_json(text)
    assert json.loads(as_json([text])) == [text]
