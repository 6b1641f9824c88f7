"""minillm tokenize and inspect, and what holds for several commands."""

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
from minillm.cli.main import run
from minillm.cli.plots import PIXELS, draw_attention, map_image, pooled, with_glyphs, write_figure
from minillm.engine.loading import DEMO_MODEL

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


@pytest.mark.slow
def test_inspect_draws_attention(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    picture = tmp_path / "attention.png"
    assert run(["inspect", "--prompt", PROMPT, "--attention", str(picture), "--layer", "0"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_labels_of_tokens_are_no_formulas(tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    tokens = ["$x$", "_{", " a", "\x1b", "中"]
    picture = tmp_path / "attention.svg"
    write_figure(picture, draw_attention, **maps_of(1, 5), tokens=tokens, layer=0)
    texts = [one.text for one in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"$x$", "_{", "␣a", "\\x1b", "中"} <= set(texts)


def test_characters_without_a_glyph_are_no_boxes():
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    assert with_glyphs("é␣日\n") == r"é␣\u65e5\n"


def maps_of(heads, length):
    """Maps and the mask of a drawing."""
    masked = np.triu(np.ones((length, length), bool), 1)
    return {"maps": np.zeros((heads, length, length), np.float32), "masked": masked}


@pytest.mark.slow
def test_the_size_of_the_maps_of_a_long_prompt_is_limited(tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    picture = tmp_path / "attention.svg"
    write_figure(picture, draw_attention, **maps_of(3, 250), tokens=["t"] * 250, layer=0, head=1)
    root = ElementTree.parse(picture).getroot()
    assert root.get("width") == f"{72 * 13}pt"
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("t") == 2 * 50  # every fifth, on both sides of the large map
    assert [text for text in texts if text and text.startswith("head")] == ["head 1", "head 0", "head 2"]


def test_pixels_of_a_map_keep_the_largest_weight_and_the_mask():
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    image = pytest.importorskip("PIL.Image")
    T = 2 * PIXELS + 1
    maps = np.zeros((1, T, T), np.float32)
    masked = np.triu(np.ones((T, T), bool), 1)
    maps[0, 600, 31], maps[0, 0, 0], maps[0, 700, 3] = 1, 1, 1e-3
    pixels, size = pooled(maps, masked)
    assert size == 3
    assert pixels.shape == (1, 342, 342)
    drawn = np.asarray(image.open(io.BytesIO(map_image(pixels[0]))).convert("RGBA"))
    assert drawn[..., 3].all() == drawn[0, 1, 3] == 0  # transparent where the mask hides
    np.testing.assert_array_equal(drawn[..., 3] == 0, np.triu(np.ones((342, 342), bool), 1))
    colours = {tuple(drawn[row, column]) for row, column in ((200, 10), (0, 0))}
    assert len(colours) == 1  # of weight 1
    zero, small, one = (tuple(drawn[place]) for place in ((300, 5), (233, 1), (0, 0)))
    assert len({zero, small, one}) == 3  # a weight of a thousandth can be told from zero


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--top", "0"], "--top"),
        (["--layer", "0"], "--attention"),
        (["--head", "0"], "--attention"),
        (["--attention", "a.png", "--layer", "6"], "--layer"),
        (["--attention", "a.html", "--head", "6"], "--head"),
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "--shape", "opt-125m", "--trace", "no/a.json"],
        ["profile", "--shape", "opt-125m", "--png", "no/a.png"],
        ["profile", "--shape", "opt-125m", "--png", "a.nonsense"],
        ["compare", "a", "--html", "no/a.html"],
        ["inspect", "a", "--attention", "no/a.html"],
        ["embed", "a", "--model", "m", "--output", "no/a.npy"],
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(arguments, capsys, tmp_path, monkeypatch):
    """A profile of half a minute was lost for a folder that was not there."""
    if {"--png", "--attention"} & {*arguments}:
        pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minillm.engine.engine.Engine.__init__", pytest.fail)
    monkeypatch.setattr("minillm.engine.engine.Engine.random", pytest.fail)
    assert run(arguments) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.longer
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


@pytest.mark.slow
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


@pytest.mark.longer
def test_a_profile_needs_no_tokenizer(bare, capsys):
    assert run(["profile", "--model", bare, "--prompt-length", "4", "--new-tokens", "2", "--hardware", "h100"]) == 0
    assert "decode" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["profile", "perplexity"])
def test_random_weights_have_no_tokenizer(command, capsys):
    assert run([command, "--shape", "opt-125m", "--tokenizer", str(DEMO_MODEL)]) == 2
    assert "--tokenizer" in capsys.readouterr().err
