"""README.md and the guides beside the code: their commands and examples run as printed, and what they name is there."""

import ast
import doctest
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from functools import cache
from typing import Any

import pytest

from minillm import Engine
from minillm.cli.main import COMMANDS, build_parser, run
from minillm.decoding.fields import FIELDS
from minillm.models import ENCODER_DECODERS, ENCODERS, FAMILIES, SPEECH

from .adapters import write_adapter
from .pages import PAGES, ROOT, block, blocks, page
from .task_models import BERT, ONE_LABEL, write_task_model
from .tiny import write_checkpoint
from .whisper import speech_tensors, tone, wav_of, write_speech

SETUP, TEST, _ = re.findall(r"^\$ (pip install .*)$", page("README.md"), re.MULTILINE)

EXAMPLES = {
    ("minillm/README.md", "from minillm import Engine"): "tests/test_readme.py",
    ("minillm/engine/README.md", "from minillm import Engine, GenerationConfig"): "tests/test_readme.py",
    ("minillm/engine/README.md", "import asyncio"): "tests/test_readme.py",
    ("minillm/engine/README.md", "messages = ["): "tests/engine/test_chat_engine.py",
    ("minillm/engine/README.md", "from minillm.text.chat import"): "tests/text/chat/test_call_grammar.py",
    ("minillm/engine/README.md", 'with Engine("sentence-transformers'): "tests/test_readme.py",
    ("minillm/engine/README.md", "from minillm import Engine\nfrom minillm.tasks.sound_files"): "tests/test_readme.py",
    ("minillm/formats/README.md", 'Engine("facebook/opt-1.3b", adapter='): "tests/test_readme.py",
    ("minillm/formats/README.md", 'engine = Engine("facebook/opt-1.3b", adapters='): "tests/test_readme.py",
    ("minillm/formats/README.md", "class Arrays(ModelFiles)"): "tests/formats/test_open_model.py",
    ("minillm/integrations/README.md", "from minillm.integrations.langchain"): "tests/integrations/test_langchain.py",
    ("minillm/integrations/README.md", "from llama_index"): "tests/integrations/test_llama_index.py",
    ("minillm/server/README.md", "import openai"): "tests/test_readme.py",
    ("minillm/distributed/README.md", "from minillm.parallel import Parallel"): "tests/distributed/test_commands.py",
}
"""Page, and how a Python example in it begins -> the tests that run it. Interactive Python, sessions of the console and
commands run, or are read, on whatever page they stand."""


# --- what is run ------------------------------------------------------------------------------------------------------


def sessions() -> list[tuple[str, str]]:
    """Each `$ command` of a console block that shows what it prints, with that text."""
    shown = []
    for text in (text for name in PAGES for text in blocks(name, "console")):
        for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            if printed:
                shown.append((command, printed))
    return shown


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        pytest.param(*session, id=session[0], marks=[pytest.mark.slow] if "perplexity" in session[0] else [])
        for session in sessions()
    ],
)
def test_a_session_prints_what_the_page_shows(command, printed, monkeypatch, capsys):
    python, _, program, *arguments = shlex.split(command)
    assert (python, program) == ("python", "minillm")
    monkeypatch.chdir(ROOT)
    assert run(arguments) == 0
    output, messages = capsys.readouterr()
    assert [line for line in messages.splitlines() if not line.startswith("minillm: compil")] == []  # a first run
    pieces = re.split(r"^\.\.\.\n", printed, flags=re.MULTILINE)  # such a line stands for any lines
    assert re.fullmatch("(?:.*\n)*".join(map(re.escape, pieces)), output)


def test_the_first_command_generates_text():
    command = SETUP.split("&&")[1]
    result = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], capture_output=True, cwd=ROOT, check=False, timeout=120
    )
    assert result.returncode == 0
    assert result.stdout.decode().strip()


def test_ci_runs_the_two_commands():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in (*SETUP.split(" && "), TEST.split(" && ")[1]):
        assert command.removeprefix("pip install ") in script


INTERACTIVE = [name for name in PAGES if any(text.startswith(">>>") for text in blocks(name, "python"))]


@pytest.mark.parametrize("name", INTERACTIVE)
def test_the_python_session_says_what_it_shows(name):
    module = type(sys)("page")
    module.__doc__ = "\n".join(text for text in blocks(name, "python") if text.startswith(">>>"))
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.attempted > 3
    assert results.failed == 0


def test_every_python_example_is_in_the_table_of_what_is_run():
    shown = [(name, text) for name in PAGES for text in blocks(name, "python") if not text.startswith(">>>")]
    assert len(shown) == len(EXAMPLES)
    for (name, beginning), tests in EXAMPLES.items():
        ast.parse(block(name, "python", beginning))
        assert name in (ROOT / tests).read_text(encoding="utf-8")


def test_the_python_example_runs(capsys):
    """The plain example, with the names it leaves open filled in and the demo model in place of a folder."""
    code = block("minillm/engine/README.md", "python", "from minillm import Engine, GenerationConfig")
    code = code.replace('"path/to/checkpoint"', "None").replace('Engine.random("opt-1.3b")', "None")
    names = {"prompt": "A list of colors: red,", "prompt_a": "1, 2,", "prompt_b": "Monday,", "text": "a b c"}
    exec(code, {**names, "token_ids": [2, 5, 6]})
    assert capsys.readouterr().out


def test_the_asyncio_example_runs(capsys):
    exec(block("minillm/engine/README.md", "python", "import asyncio"), {})
    printed = capsys.readouterr().out
    assert printed.startswith(" ")
    assert "Load(waiting=0, running=0" in printed


def test_the_vectors_and_labels_example_runs(tmp_path):
    """On tiny models in place of those of the hub."""
    code = block("minillm/engine/README.md", "python", "with Engine(")
    encoder = write_task_model(tmp_path / "encoder", BERT)
    reranker = write_task_model(tmp_path / "reranker", BERT | ONE_LABEL)
    code = code.replace("sentence-transformers/all-MiniLM-L6-v2", str(encoder))
    code = code.replace("cross-encoder/ms-marco-MiniLM-L6-v2", str(reranker))
    names: dict[str, Any] = {"Engine": Engine}
    exec(code, names)
    assert names["vectors"].shape == (2, 32)
    assert names["scores"].shape == (2,)
    assert ((names["scores"] > 0) & (names["scores"] < 1)).all()


def test_the_sound_example_runs(tmp_path, capsys):
    """On a tiny model in place of the hub's."""
    (tmp_path / "talk.wav").write_bytes(wav_of(tone(0.3, seed=1)))
    code = block("minillm/engine/README.md", "python", "from minillm import Engine\nfrom minillm.tasks.sound_files")
    code = code.replace("openai/whisper-base", str(write_speech(tmp_path / "m", speech_tensors())))
    exec(code.replace("talk.wav", str(tmp_path / "talk.wav")), {})
    assert capsys.readouterr().out.startswith("0.")


def test_the_adapter_examples_run(tmp_path):
    """On a tiny OPT in place of the hub's."""
    model, adapter = write_checkpoint(tmp_path / "model"), write_adapter(tmp_path / "adapter")
    for beginning in ('Engine("', 'engine = Engine("'):
        code = block("minillm/formats/README.md", "python", beginning)
        for name, path in (("facebook/opt-1.3b", model), ("path/to/adapter", adapter), ("owner/name", adapter)):
            code = code.replace(name, str(path))
        names: dict[str, Any] = {"Engine": Engine}
        exec(code, names)
    assert names["engine"].generate("SELECT", lora="sql", max_new_tokens=4).token_ids


def test_the_loop_of_the_guide_generates(capsys):
    names: dict[str, Any] = {}
    exec(block("minillm/README.md", "python", "from minillm import Engine"), names)
    expected = names["engine"].generate("A list of colors: red,", max_new_tokens=8).token_ids
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.slow
def test_the_served_examples_answer_as_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """The server on a free port: curl's answer, and that of OpenAI's client."""
    pytest.importorskip("starlette", reason="the server needs the extra serve")
    shell = block("minillm/server/README.md", "sh", "pip install")
    code = block("minillm/server/README.md", "python", "import openai")
    _, serve, curl = shell.replace("\\\n", "").splitlines()
    with Engine() as engine, socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        colors = engine.generate("A list of colors: red,", max_new_tokens=4).text
        count = engine.generate("Count from 3 to 9:", max_new_tokens=6).text
        story = engine.generate("Once upon a time", do_sample=True, top_k=20, seed=2, max_new_tokens=12).text
    command = [sys.executable, *shlex.split(serve.replace("8000", str(port)))[1:]]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("listening" in line for line in process.stderr)  # reads as far as that line
        if shutil.which("curl"):
            done = subprocess.run(
                ["curl", "-s", *shlex.split(curl.replace("8000", str(port)))[1:]], capture_output=True
            )
            assert json.loads(done.stdout)["choices"][0]["text"] == colors
        pytest.importorskip("openai", reason="the client is in the extra reference")
        names: dict[str, Any] = {}
        exec(code.replace("8000", str(port)), names)
        names["client"].close()
        assert capsys.readouterr().out == f"{count}\n{story}"
    finally:
        process.terminate()
        process.communicate(timeout=60)


# --- commands that need a model of the hub, a GPU or other machines are only read -------------------------------------


def commands() -> list[str]:
    """The words after `python -m minillm` in every block that is not Python."""
    texts = [text for name in PAGES for language in ("console", "sh", "") for text in blocks(name, language)]
    pattern = re.compile(r"python -m minillm (.*?)(?: && |$)", re.MULTILINE)
    return sorted({command for text in texts for command in pattern.findall(text)})


parser = cache(build_parser)


@pytest.mark.parametrize("command", commands())
def test_a_command_is_understood(command):
    words = shlex.split(command, comments=True)
    assert parser().parse_args(words).run


def test_the_commands_for_tasks_are_shown():
    shown = {command.split()[0] for command in commands()}
    assert {"translate", "summarize", "classify", "embed", "batch", "serve", "analyze", "profile", "pull"} <= shown


@pytest.mark.parametrize("name", PAGES)
def test_what_is_installed_is_an_extra(name):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for words in re.findall(r"""pip install -e ["']\.\[([a-z0-9,]+)\]""", page(name)):
        assert set(words.split(",")) <= set(extras)


# --- what is named is there -------------------------------------------------------------------------------------------

SOURCE = re.compile(r"[\w./*-]+\.(?:py|c|h|cu|cuh|css|js|html|md)|(?:\w+/)+[\w.*-]*")
"""A path in backticks: a file of source, or a folder with its slash"""


ELSEWHERE = {"maps.html", "owner/name", "owner/name/FILE.gguf", "FOLDER/gpu_PART.tar.gz"}
ELSEWHERE |= {"results/against_peers_SHAPE.txt", "results/against_peers_SHAPE.csv"}
"""Names that stand for a user's files"""


@pytest.mark.parametrize("name", PAGES)
def test_files_in_backticks_are_there(name):
    """Relative to the page, to minillm/, or to the repository."""
    folders = ((ROOT / name).parent, ROOT / "minillm", ROOT, ROOT / "kernels" / "cpu", ROOT / "kernels" / "cuda")
    for path in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page(name), flags=re.DOTALL | re.MULTILINE)):
        if SOURCE.fullmatch(path) and path not in ELSEWHERE:
            assert any(any(folder.glob(path.rstrip("/"))) for folder in folders), path


def anchors(name: str) -> set[str]:
    """What a link to a page may end with: its headings in lower case, without signs, with dashes for spaces."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page(name), flags=re.DOTALL | re.MULTILINE), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_what_it_links_to_is_there(name):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", page(name)):
        if target.startswith("http"):
            continue
        path = ((ROOT / name).parent / target).resolve() if target else ROOT / name
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.relative_to(ROOT).as_posix()), (target, anchor)


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_whole(name):
    """An empty line ends a table: the rows below it would be shown as text."""
    lines = ["", *page(name).splitlines()]
    for above, line, below in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|") and not above.startswith("|"):
            assert re.fullmatch(r"\|[-:| ]+\|", below), line


@pytest.mark.parametrize(
    ("name", "rows"), [("README.md", 8), ("minillm/README.md", 15), ("minillm/server/README.md", 11)]
)
def test_the_files_to_read_have_the_lines_that_are_said(name, rows):
    """Within a tenth."""
    said = re.findall(r"`([\w/]+\.\w+)`(?:\]\([^)]*\))? \| (\d+) \|", page(name))
    assert len(said) == rows
    for path, lines in said:
        file = ROOT / path if (ROOT / path).exists() else ROOT / "minillm" / path
        assert int(lines) == pytest.approx(len(file.read_text(encoding="utf-8").splitlines()), rel=0.1), path


def test_the_guides_first_reading_is_short():
    guide = page("minillm/README.md")
    order = guide[guide.index("## Where to begin") : guide.index("Without the last four")]
    assert sum(int(lines) for lines in re.findall(r"\| (\d+) \|", order)) <= 3880


def test_the_map_has_every_folder():
    guide = page("minillm/README.md")
    folders = {path.parent.name for path in (ROOT / "minillm").glob("*/__init__.py")} | {"assets"}
    assert set(re.findall(r"^\| `(\w+)/` \|", guide, re.MULTILINE)) == folders
    for file in (ROOT / "minillm").glob("*.py"):
        assert file.name.startswith("__") or f"`{file.name}`" in guide


def test_the_figures_beside_llama_cpp_are_those_of_the_benchmarks():
    figures, benchmarks = page("README.md"), page("benchmarks/README.md")
    rows = re.findall(r"^\| (?:SmolLM2|OPT).*$", figures, re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        for ours, theirs in re.findall(r"(\d+) / (\d+)", row):
            assert re.search(rf"^\| minillm\b.*\| {ours} \|", benchmarks, re.MULTILINE)
            assert re.search(rf"^\| llama.cpp\b.*\| {theirs}(?: \(.*?\))? \|", benchmarks, re.MULTILINE)


def test_the_tables_have_every_family_field_and_command():
    table = page("minillm/models/README.md").split("| family |")[1].split("\n\n")[0]
    families = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE)
    names = re.findall(r"\w+", " ".join(families))
    assert sorted(names) == sorted((*FAMILIES, *ENCODER_DECODERS, *SPEECH, *ENCODERS))
    assert f"[{len(names)} families]" in page("README.md")
    table = page("minillm/decoding/README.md").split("| group | fields |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(FIELDS)
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page("minillm/cli/README.md"), re.MULTILINE)
    assert sorted(re.findall(r"\w+", " ".join(rows))) == sorted(COMMANDS)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short(name):
    """The front door, the guide to the source, and what stands beside the code. Benchmarks have figures."""
    limits = {"README.md": 10_000, "minillm/README.md": 7_000}
    limits |= dict.fromkeys(("minillm/GLOSSARY.md", "minillm/models/README.md"), 14_000)  # a row for each
    if name != "benchmarks/README.md":
        assert (ROOT / name).stat().st_size <= limits.get(name, 12_000)
