"""The magic `%%minillm`: real IPython runs it in a shell, and a real kernel in a notebook."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.engine.loading import DEMO_MODEL

pytest.importorskip("IPython", reason="IPython's magics")

from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.slow

PROMPT = "A list of colors: red,"


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    shell = InteractiveShell(history_load_length=0, warn_venv=False)
    shell.history_manager.enabled = False
    shell.run_line_magic("load_ext", "minillm")
    yield shell
    shell.magics_manager.magics["cell"]["minillm"].close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


def test_a_cell_is_the_prompt_and_the_generation_its_value(shell: Any, engine: Engine, capsys: Any) -> None:
    value = shell.run_cell(f"%%minillm --max-new-tokens 4 --top-logprobs 2\n{PROMPT}\n").result
    assert value == engine.generate(PROMPT, max_new_tokens=4, top_logprobs=2)
    assert capsys.readouterr().out.startswith(" orange, yellow,\n")
    assert value._repr_html_() == engine.generate(PROMPT, max_new_tokens=4, top_logprobs=2)._repr_html_()


def test_the_text_ends_where_the_command_would_end_it(shell: Any, engine: Engine) -> None:
    generation = shell.run_cell(f"%minillm '{PROMPT}'").result
    assert generation.text == engine.generate(PROMPT, max_length=engine.context).text
    assert generation.completions[0].finish_reason == "stop"


def test_options_are_the_command_s(shell: Any, engine: Engine) -> None:
    sampled = shell.run_cell(f"%minillm --temperature 1.5 --seed 3 -n 8 '{PROMPT}'").result
    assert sampled.text == engine.generate(PROMPT, do_sample=True, temperature=1.5, seed=3, max_new_tokens=8).text
    beams = shell.run_cell(f"%minillm --num-beams 3 --num-return-sequences 2 -n 4 '{PROMPT}'").result
    assert beams == engine.generate(PROMPT, num_beams=3, num_return_sequences=2, max_new_tokens=4, logprobs=True)


def test_a_message_is_answered_by_the_chat_template(shell: Any, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}:")
    with Engine(tmp_path) as engine:
        shell.user_ns["chatting"] = engine
        answer = shell.run_cell("%minillm --model chatting --chat -n 4 'A list of colors'").result
        assert answer == engine.chat([{"role": "user", "content": "A list of colors"}], max_new_tokens=4, logprobs=True)


def test_a_variable_that_holds_an_engine_is_a_model_and_stays_open(shell: Any, engine: Engine) -> None:
    shell.user_ns["mine"] = engine
    before = engine.stats.prompt_tokens
    assert shell.run_cell(f"%minillm --model mine -n 2 '{PROMPT}'").result.text == " orange,"
    assert engine.stats.prompt_tokens == before + 8
    assert shell.run_cell(f"%minillm -n 2 '{PROMPT}'").result.text == " orange,"
    assert engine.generate(PROMPT, max_new_tokens=2).text == " orange,"


def test_the_model_is_loaded_once_for_the_same_options(shell: Any, monkeypatch: Any) -> None:
    magic = shell.magics_manager.magics["cell"]["minillm"]
    shell.run_cell(f"%minillm -n 1 '{PROMPT}'")
    first = magic._engine
    shell.run_cell(f"%minillm -n 2 '{PROMPT}'")
    assert magic._engine is first
    shell.run_cell(f"%minillm -n 1 --backend numpy '{PROMPT}'")
    assert magic._engine is not first and "backend='numpy'" in repr(magic._engine)
    with pytest.raises(Exception, match="closed"):
        first.generate(PROMPT)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%minillm --max-new-token 3 'x'", "did you mean --max-new-tokens?"),
        ("%minillm -m nowhere 'x'", "there is no folder 'nowhere'"),
        ("%minillm --top-p 2 'x'", "top_p"),
        ("%minillm", "the prompt is the text of the cell"),
        ("%%minillm 'x'\ny", "the prompt is the text of the cell"),
        ("%minillm 'x", "No closing quotation"),
        ("%minillm --model mine --dtype int8 'x'", "dtype is an option of Engine, and mine is an engine"),
    ],
)
def test_an_error_is_one_line(shell: Any, engine: Engine, capsys: Any, cell: str, message: str) -> None:
    shell.user_ns["mine"] = engine
    assert shell.run_cell(cell).error_in_exec is not None
    output, error = capsys.readouterr()
    assert output == "" and error.startswith("UsageError: ") and message in error and error.count("\n") == 1


def test_help_is_shown_and_has_no_value(shell: Any, capsys: Any) -> None:
    assert shell.run_cell("%minillm --help").result is None
    assert "--max-new-tokens" in capsys.readouterr().out


def test_a_notebook_shows_shaded_tokens_in_place_of_the_text() -> None:
    nbclient = pytest.importorskip("nbclient", reason="runs a notebook")
    pytest.importorskip("ipykernel", reason="runs a notebook")
    import nbformat

    sources = ["%load_ext minillm", f"%%minillm -n 4\n{PROMPT}", "print(_.text)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    [shown] = notebook.cells[1].outputs
    assert shown["output_type"] == "execute_result" and shown["data"]["text/html"].count('class="tok"') == 4
    assert notebook.cells[2].outputs[0]["text"] == " orange, yellow,\n"
