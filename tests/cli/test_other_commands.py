"""minillm tokenize, inspect and chat."""

import io
import json
import math
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from minillm import Engine
from minillm.cli import chat
from minillm.cli.main import run
from minillm.cli.plots import draw_attention, write_figure
from minillm.loading import DEMO_MODEL

PROMPT = "A list of colors: red,"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(max_batch_size=1, prefix_cache=True)


def test_tokenize_shows_ids_and_texts_that_join_to_the_prompt(engine, capsys):
    assert run(["tokenize", "--prompt", PROMPT]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [int(i) for i, _ in lines] == engine.tokenizer.encode(PROMPT)
    assert "".join(json.loads(text) for _, text in lines[1:]) == PROMPT  # the first is the special token in front


def test_tokenize_ids_alone(engine, capsys):
    assert run(["tokenize", "--prompt", PROMPT, "--ids", "--no-special"]) == 0
    assert capsys.readouterr().out.split() == [
        str(i) for i in engine.tokenizer.encode(PROMPT, add_special_tokens=False)
    ]


def test_inspect_shows_the_argmax_of_every_position_and_how_surely(engine, capsys):
    assert run(["inspect", "--prompt", PROMPT, "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    ids = engine.tokenizer.encode(PROMPT)
    logits = engine.forward(ids).astype(np.float64)
    probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    assert len(lines) == len(ids)
    for line, row in zip(lines, probabilities, strict=True):
        text, p = line.rsplit(maxsplit=1)
        assert float(p) == pytest.approx(row.max(), abs=6e-4)
        assert text.endswith(json.dumps(engine.tokenizer.token(int(row.argmax())), ensure_ascii=False))
    own = [float(line.split('"')[2].split()[0]) for line in lines[1:]]
    assert own == pytest.approx([math.exp(lp) for lp in engine.score(PROMPT).logprobs[1:]], abs=6e-4)


def test_inspect_draws_attention(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    picture = tmp_path / "attention.png"
    assert run(["inspect", "--prompt", PROMPT, "--attention", str(picture), "--layer", "0"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_labels_of_tokens_are_no_formulas(tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    tokens = ["$x$", "_{", " a", "\x1b", "中"]
    picture = tmp_path / "attention.svg"
    write_figure(picture, draw_attention, maps=np.zeros((1, 5, 5), np.float32), tokens=tokens, layer=0)
    texts = [one.text for one in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"$x$", "_{", "␣a", "\\x1b", "中"} <= set(texts)


def test_the_size_of_the_maps_of_a_long_prompt_is_limited(tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    picture = tmp_path / "attention.svg"
    write_figure(picture, draw_attention, maps=np.zeros((1, 250, 250), np.float32), tokens=["t"] * 250, layer=0)
    root = ElementTree.parse(picture).getroot()
    assert root.get("width") == f"{72 * 12}pt"
    labels = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text") if one.text == "t"]
    assert len(labels) == 2 * 84  # every third, on both axes


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--top", "0"], "--top"),
        (["--layer", "0"], "--attention"),
        (["--attention", "a.png", "--layer", "6"], "--layer"),
        (["--attention", "no/such/folder/a.png"], "cannot be written"),
        (["--attention", "a.nonsense"], "cannot be written"),
    ],
)
def test_inspect_names_what_is_wrong(arguments, word, capsys, tmp_path, monkeypatch):
    if "--attention" in arguments:
        pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    monkeypatch.chdir(tmp_path)
    assert run(["inspect", "--prompt", PROMPT, *arguments]) == 2
    assert word in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_chat_computes_only_what_is_new(engine, capsys):
    conversation = chat.turn(engine, [], "A list of colors: red,", {"max_new_tokens": 8})
    before = engine.stats.prefill_tokens
    longer = chat.turn(engine, conversation, "A list of animals: cat,", {"max_new_tokens": 8})
    line = engine.tokenizer.encode("\nA list of animals: cat,", add_special_tokens=False)
    assert engine.stats.prefill_tokens - before == len(line) + 1  # and the last token of the answer before
    assert longer[: len(conversation)] == conversation
    fresh = Engine(max_batch_size=1).generate(longer[: len(conversation) + len(line)], max_new_tokens=8)
    assert longer[len(conversation) + len(line) :] == fresh.token_ids
    assert capsys.readouterr().out.endswith(fresh.text + "\n")


def test_chat_reads_lines_and_says_that_it_continues_raw_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("A list of colors: red,\nCount from 3 to 9:\n"))
    assert run(["chat", "--max-new-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) >= 2
    assert "raw text" in captured.err


def test_a_chat_that_outgrows_the_context_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("red, " * 300 + "\n"))
    assert run(["chat"]) == 2
    assert "512" in capsys.readouterr().err


def test_starting_imports_only_what_is_needed():
    """The first token comes within 0.4 s of the start only if nothing heavy is imported."""
    code = "import sys, minillm.cli.main as m; m.run(['tokenize', '--prompt', 'a', '--ids']); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(result.stdout.splitlines()[1].split())
    assert not loaded & {"huggingface_hub", "matplotlib", "torch", "transformers", "jinja2", "requests", "httpx"}


# --- a model without a tokenizer --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The model inside minillm without its tokenizer."""
    ignored = shutil.ignore_patterns("tokenizer*.json")
    return str(shutil.copytree(DEMO_MODEL, tmp_path_factory.mktemp("bare") / "model", ignore=ignored))


@pytest.mark.parametrize("command", ["generate", "inspect", "compare", "chat", "perplexity"])
def test_text_needs_a_tokenizer_which_an_option_names(command, bare, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPT}\n".encode())))
    arguments = [] if command in ("chat", "perplexity") else ["--prompt", PROMPT]
    arguments += ["--dtype", "float32"] if command == "perplexity" else []
    arguments += ["--max-new-tokens", "2"] if command in ("generate", "chat", "compare") else []
    assert run([command, *arguments, "--backend", "numpy", "--model", bare]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.strip().splitlines()
    assert "this model has no tokenizer" in line
    assert run([command, *arguments, "--backend", "numpy", "--model", bare, "--tokenizer", str(DEMO_MODEL)]) == 0
    assert len(capsys.readouterr().out) > len(captured.out)


def test_a_profile_needs_no_tokenizer(bare, capsys):
    assert run(["profile", "--model", bare, "--prompt-length", "4", "--new-tokens", "2", "--hardware", "h100"]) == 0
    assert "decode" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["profile", "perplexity"])
def test_random_weights_have_no_tokenizer(command, capsys):
    assert run([command, "--shape", "opt-125m", "--tokenizer", str(DEMO_MODEL)]) == 2
    assert "--tokenizer" in capsys.readouterr().err
