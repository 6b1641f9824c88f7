"""The course: its form; each exercise refuses a stub and takes its solution; each lesson runs in Jupyter's kernel."""

import ast
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.emulator import missing
from minillm.cli.main import run
from minillm.course.exercises import check, exercises, problem_of
from minillm.course.launching import run_gemv
from minillm.course.lesson import LESSONS, Lesson, lessons
from minillm.errors import UsageError

ALL = lessons()
IDS = [lesson.path.stem for lesson in ALL]
EMULATED = {13}
"""Lessons that compile CUDA for this processor"""
KINDS = Path(__file__).with_name("outputs.json")
"""The kinds of each cell's outputs; MINILLM_WRITE_OUTPUTS=1 writes them anew"""


def stubs(lesson: Lesson) -> dict[str, str]:
    """Name of each function that a lesson leaves to the learner -> its code."""
    functions = {}
    for cell in lesson.cells:
        for node in ast.parse(cell.text).body if cell.is_code else ():
            if isinstance(node, ast.FunctionDef) and ast.unparse(node.body[-1]) == "pass":
                functions[node.name] = ast.unparse(node)
    return functions


# --- form -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lesson", ALL, ids=IDS)
def test_a_lesson_is_an_hour_at_most_in_short_cells(lesson: Lesson) -> None:
    assert lesson.path.stem.startswith(f"{lesson.number:02}_")
    assert 10 <= lesson.minutes <= 60
    assert all(len(cell.text.splitlines()) <= 10 for cell in lesson.cells if cell.is_code)
    assert lesson.path.stat().st_size < 9_000
    assert max(map(len, lesson.path.read_text(encoding="utf-8").splitlines())) <= 120


def test_lessons_have_two_exercises_each() -> None:
    assert len({lesson.number for lesson in ALL}) == len(ALL)
    named = [name for lesson in ALL for name in stubs(lesson)]
    assert sorted(named) == sorted(exercises())
    assert all(len(stubs(lesson)) >= 2 for lesson in ALL)


@pytest.mark.parametrize("lesson", ALL, ids=IDS)
def test_files_and_functions_that_a_lesson_names_are_there(lesson: Lesson) -> None:
    root = LESSONS.parents[2]
    prose = "".join(cell.text for cell in lesson.cells if not cell.is_code)
    paths = re.findall(r"`((?:\w+/)*\w+\.(?:py|cu|c|md))`", prose)
    for path in paths:
        assert any((root / path).exists() or list((root / folder).rglob(path)) for folder in ("minillm", "kernels"))


def test_a_lesson_imports_what_serves_and_defines_no_module_of_its_own() -> None:
    """Its own modules are for the lessons' form and figures, and for running a learner's kernel."""
    files = {path.stem for path in LESSONS.parent.glob("*.py")}
    assert files == {"__init__", "lesson", "drawing", "launching"}


# --- exercises --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lesson",
    [pytest.param(lesson, marks=[pytest.mark.slow] if lesson.number in EMULATED else []) for lesson in ALL],
    ids=IDS,
)
def test_an_exercise_refuses_its_stub_and_takes_its_solution(
    lesson: Lesson, capsys: pytest.CaptureFixture[str]
) -> None:
    if lesson.number in EMULATED and (reason := missing()):
        pytest.skip(reason)
    solutions = vars(import_module(f"minillm.course.solutions.lesson_{lesson.number:02}"))
    for name, code in stubs(lesson).items():
        names: dict[str, Any] = {}
        exec(code, names)
        problem = problem_of(names[name])
        assert problem is not None and len(problem) > 20 and problem.endswith(".")
        assert "raises" not in problem
        check(names[name])
        assert capsys.readouterr().out == f"{name}: not yet. {problem}\n"
        assert problem_of(solutions[name]) is None
        check(solutions[name])
        assert capsys.readouterr().out == f"{name}: right.\n"
        own = [argument.arg for argument in ast.parse(code).body[0].args.args]  # type: ignore[attr-defined]
        code_of_solution = solutions[name].__code__
        assert list(code_of_solution.co_varnames[: code_of_solution.co_argcount]) == own


def test_an_answer_that_raises_is_wrong() -> None:
    def nearest(table: object, token: int, count: int) -> None:
        raise KeyError("x")

    assert problem_of(nearest) == "It raises KeyError: 'x'"


@pytest.mark.parametrize(
    ("name", "answer", "problem"),
    [
        ("embed", lambda ids, table, positions, start: table[ids] + positions[start], "row 1 should be [202. 303.]"),
        ("embed", lambda ids, table: table[ids], "cannot use it: .* takes 2 positional arguments but 4 were given."),
        ("nearest", lambda table, token, count: 3, "The exercise cannot use it: .*int.* is not iterable."),
        ("greedy", lambda forward, ids, end, most: np.array([4, 5, 6]), "should be [4, 5, 6, 7], found [4, 5, 6]."),
        ("log_probabilities", lambda logits, ids: np.exp([-0.239545, -1.551445]), "These are probabilities"),
        ("tokens_that_fit", lambda memory, L, K, D, size: memory // (2 * L * K * D), "A number takes `size` bytes."),
        ("tokens_that_fit", lambda memory, L, K, D, size: memory // (L * K * D * size), "a key and a value"),
        ("acceptance", np.minimum, "It should be one number"),
        ("read_off", lambda row, gain, bias, table: (table @ (row * gain + bias)).argmax(), "Is the row normalised"),
        (
            "read_off",
            lambda row, gain, bias, table: ((row - 2) * gain + bias).argmax(),
            "the largest number of the row",
        ),
        ("read_off", lambda row, gain, bias, table: table @ row, "one token, found an array [4]"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(name: str, answer: Any, problem: str) -> None:
    assert re.search(re.sub(r"([\[\]])", r"\\\1", problem), str(problem_of(answer, name)))


def test_lists_arrays_and_tuples_are_alike_in_an_answer() -> None:
    assert problem_of(lambda table, position, P: [table[position // P], position % P], "slot") is None
    solution = import_module("minillm.course.solutions.lesson_03").greedy
    assert problem_of(lambda *given: np.array(solution(*given)), "greedy") is None


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.mark.longer
def test_the_command_lists_writes_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["course"]) == 0
    assert "1  Tokens and embeddings" in capsys.readouterr().out
    assert run(["course", "1", "--write", "--folder", str(tmp_path)]) == 0
    path = Path(capsys.readouterr().out.strip())
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert [cell["cell_type"] for cell in notebook["cells"]][:2] == ["markdown", "code"]
    path.write_text("a learner's", encoding="utf-8")
    assert run(["course", "1", "--write", "--folder", str(tmp_path)]) == 0
    assert path.read_text(encoding="utf-8") == "a learner's"
    capsys.readouterr()
    assert run(["course", "1", "--text"]) == 0
    text = capsys.readouterr().out
    assert ">>> ids = tokenizer.encode" in text
    assert "(8, 192)" in text and "nearest: not yet." in text
    assert run(["course", "1", "--solutions"]) == 0
    assert "def nearest(" in capsys.readouterr().out
    assert run(["course", "99"]) == 2
    assert "there is no lesson 99: expected one of 1, 2" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 3])
def test_jupyter_gets_the_notebook_and_the_options_after_two_dashes_and_its_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    """With a program in Jupyter's place."""
    (tmp_path / "jupyterlab.py").write_text(f"import sys; print(*sys.argv[1:]); sys.exit({code})", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    folder = tmp_path / "own"
    assert run(["course", "--folder", str(folder), "1", "--", "--port", "1", "--text"]) == (1 if code else 0)
    captured = capfd.readouterr()
    path, arguments = captured.out.splitlines()
    assert Path(path) == folder / "01_tokens_and_embeddings.ipynb" and Path(path).exists()
    assert arguments == f"{path} --LabApp.default_url=/lab/tree/{Path(path).name} --port 1 --text"
    assert ("ended with exit code 3: see above" in captured.err) == bool(code)


def test_options_after_two_dashes_are_refused_where_jupyter_is_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["course", "1", "--text"], ["course"]):
        assert run([*words, "--", "--allow-root"]) == 2
        assert "what follows -- is for Jupyter" in capsys.readouterr().err


@pytest.mark.longer
def test_without_matplotlib_a_lesson_goes_on_without_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["course", "9", "--text"]) == 0
    text = capsys.readouterr().out
    assert "[a figure, drawn with matplotlib (pip install -e '" in text and "]'): Continuous: 18 steps]" in text
    assert "continuous_steps: not yet." in text


@pytest.fixture(scope="module")
def executed() -> dict[str, list[Any]]:
    """Path of each lesson -> its cells with their outputs; all run in one kernel, since starting one takes longest."""
    nbclient = pytest.importorskip("nbclient", reason="runs notebooks with the extra course")
    pytest.importorskip("ipykernel", reason="runs notebooks with the extra course")
    pytest.importorskip("matplotlib", reason="the lessons draw with the extra plot")
    import nbformat

    cells, bounds = [], {}
    for lesson in ALL:
        notebook = nbformat.reads(json.dumps(lesson.notebook()), as_version=4)
        nbformat.validate(notebook)
        cells.append(nbformat.v4.new_code_cell("%reset -f"))
        bounds[lesson.path.stem] = len(cells), len(cells) + len(notebook.cells)
        cells += notebook.cells
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    whole = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(whole, timeout=120, kernel_name="python3", allow_errors=True).execute()
    return {stem: whole.cells[first:stop] for stem, (first, stop) in bounds.items()}


def is_bar(output: Any) -> bool:
    """Whether an output is a progress bar, which only a slow machine shows."""
    return output.get("name") == "stderr" and (output.text.startswith("\r") or not output.text.strip())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stem", IDS)
def test_a_lesson_runs_as_a_notebook_and_shows_what_it_did(stem: str, executed: dict[str, list[Any]]) -> None:
    if int(stem[:2]) in EMULATED and (reason := missing()):
        pytest.skip(reason)
    kinds = []
    for cell in executed[stem]:
        outputs = [output for output in cell.get("outputs", ()) if not is_bar(output)]
        assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
        named = [name for output in outputs for name in output.get("data", {output.output_type: 0})]
        kinds.append([*dict.fromkeys(named)])  # a stream may come in parts
    stored = json.loads(KINDS.read_text(encoding="utf-8"))
    if os.environ.get("MINILLM_WRITE_OUTPUTS"):
        KINDS.write_text(json.dumps(stored | {stem: kinds}) + "\n", encoding="utf-8")
    assert kinds == json.loads(KINDS.read_text(encoding="utf-8"))[stem]


# --- a learner's kernel -----------------------------------------------------------------------------------------------

W, X = np.arange(12.0).reshape(3, 4), np.arange(4.0)


def test_without_a_compiler_a_kernel_says_what_is_missing_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.course.launching.missing", lambda: "the CUDA emulator needs g++")
    with pytest.raises(UsageError, match=r"^the lesson compiles CUDA for this processor: the .* g\+\+$"):
        run_gemv("", W, X)
    assert problem_of(lambda: "", "transposed") == (
        "It cannot be tried here: the lesson compiles CUDA for this processor: the CUDA emulator needs g++."
    )


def test_an_answers_sectors_are_held_to_each_kind_of_load() -> None:
    assert "should be 4, found 32" in str(problem_of(lambda addresses, size: len(addresses), "sectors"))

    def of_first_bytes(addresses: list[int], size: int) -> int:
        return len({address // 32 for address in addresses})

    assert problem_of(of_first_bytes, "sectors") == "sectors([24], 16), which crosses a border, should be 2, found 1."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("for (int r = 0; r < rows; r++) sum += x[r] * W[c * rows + r];", r"y\[\d+\] should be .*, found"),
        ("if (c > 100) return;", "99 of the 200 numbers of y are not written"),
        (
            "for (int r = 0; r <= rows; r++) sum += x[r] * W[r * n + c];",
            "raises LaunchError: gemv: .*beyond the end",
        ),
        ("sum += y;", "It raises BuildError: g\\+\\+ refuses it"),
    ],
)
def test_a_wrong_kernel_is_told_what_is_wrong(body: str, problem: str) -> None:
    if reason := missing():
        pytest.skip(reason)
    head = 'extern "C" __global__ void gemv(const float* W, const float* x, float* y, int rows, int n)'
    index = "int c = blockIdx.x * blockDim.x + threadIdx.x; if (c >= n) return; float sum = 0;"
    assert re.search(problem, str(problem_of(lambda: f"{head} {{ {index} {body} y[c] = sum; }}", "transposed")))


@pytest.mark.slow
def test_a_right_kernel_that_reads_far_apart_is_sent_back() -> None:
    """Each thread has a column, but neighbours' columns are 8 apart."""
    if reason := missing():
        pytest.skip(reason)
    source = """extern "C" __global__ void gemv(const float* W, const float* x, float* y, int rows, int n) {
        int t = blockIdx.x * blockDim.x + threadIdx.x, c = t % 25 * 8 + t / 25;
        if (t >= n) return;
        float sum = 0;
        for (int r = 0; r < rows; r++) sum += x[r] * W[r * n + c];
        y[c] = sum;
    }"""
    assert re.search(r"takes \d\d sectors: read neighbours", str(problem_of(lambda: source, "transposed")))
