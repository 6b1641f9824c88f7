"""minillm compare: the table, the JSON and the page."""

import json
import math
import re
import shlex
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from minillm import Engine
from minillm.cli.compare import EPILOG
from minillm.cli.main import run
from minillm.measure.comparison import STRATEGIES

ARGUMENTS = ["compare", "--prompt", "Once upon <a> time", "--max-new-tokens", "6"]
VOID = {"meta", "input"}


class Elements(HTMLParser):
    """Every element is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.longer
def test_the_table_has_a_line_and_a_text_for_each_strategy(capsys):
    assert run(ARGUMENTS) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["strategy", "log", "p", "per", "token", "tokens", "steps", "seconds", "settings"]
    numbers = [line for line in lines if not line.startswith("    ")]
    for variant, line in zip(STRATEGIES, numbers, strict=True):
        assert re.match(rf"{variant.name} +-\d+\.\d\d +-\d+\.\d{{3}} +\d+ +\d+ +\d+\.\d{{3}}", line)
        assert line.endswith(variant.settings)


@pytest.mark.longer
def test_strategies_by_name_and_values_of_a_field(capsys):
    assert run([*ARGUMENTS, "--strategies", "beam search, greedy search", "--json"]) == 0
    assert [r["name"] for r in json.loads(capsys.readouterr().out)["results"]] == ["beam search", "greedy search"]
    assert run([*ARGUMENTS, "--vary", "temperature=0,0.7", "--seed", "3", "--json"]) == 0
    cold, warm = json.loads(capsys.readouterr().out)["results"]
    assert cold["settings"] == {"do_sample": False} and warm["settings"] == {"do_sample": True, "temperature": 0.7}
    with Engine() as engine:
        prompt = ARGUMENTS[2]
        expected = [
            engine.generate(prompt, max_new_tokens=6, do_sample=False),
            engine.generate(prompt, max_new_tokens=6, temperature=0.7, do_sample=True, seed=3),
        ]
    assert [cold["token_ids"], warm["token_ids"]] == [generation.token_ids for generation in expected]


@pytest.mark.slow
def test_strategies_differ_in_the_example_of_the_help(capsys):
    example, *_ = (shlex.split(line)[1:] for line in EPILOG.splitlines() if line.startswith("  minillm"))
    assert run([*example, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert len({result["text"] for result in results}) >= 8


@pytest.mark.slow
def test_json_holds_the_results_in_full_and_the_seed_counts(capsys):
    results = []
    for seed in ("1", "1", "2"):
        assert run([*ARGUMENTS, "--json", "--seed", seed]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["prompt"] == "Once upon <a> time"
        results.append([result["text"] for result in report["results"]])
    assert results[0] == results[1] != results[2]
    assert [result["name"] for result in report["results"]] == [variant.name for variant in STRATEGIES]
    for result in report["results"]:
        assert result["logprob_per_token"] == pytest.approx(result["logprob"] / len(result["token_ids"]))


@pytest.mark.slow
def test_the_page_stands_alone_and_shows_everything(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert run([*ARGUMENTS, "--html", str(page), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    elements = Elements()
    elements.feed(text)
    assert elements.open == []
    assert not re.search(r"https?:|src=|href=|@import|url\(|<script", text)
    assert "Once upon &lt;a&gt; time" in text
    assert "<a>" not in text
    assert len([1 for tag, _ in elements.seen if tag == "article"]) == len(STRATEGIES)
    assert all(f"{result['logprob']:.2f}" in text for result in report["results"])

    steps = [ElementTree.fromstring(svg) for svg in re.findall("<svg.*?</svg>", text, re.DOTALL)]
    beams = next(result for result in report["results"] if result["name"] == "beam search")
    assert len(steps) == len(beams["token_ids"])
    for number, step in enumerate(steps, 1):
        boxes = [element.get("class") for element in step.iter("g")]
        assert len(boxes) == len(list(step.iter("path"))) == 8
        assert sum("best" in kind for kind in boxes) == 1
        assert number == len(steps) or sum("pruned" in kind for kind in boxes) == 4
    winner = re.findall("<li><code>(.*?)</code><small>(.*?)%</small>", text)
    assert "".join(token for token, _ in winner).replace("␣", " ") == beams["text"]
    probabilities = [float(percent) / 100 for _, percent in winner]
    scores = Engine().score(ids := Engine().tokenizer.encode(report["prompt"]) + beams["token_ids"]).logprobs
    expected = [math.exp(score) for score in scores[len(ids) - len(winner) :]]
    assert probabilities == pytest.approx(expected, abs=6e-4)
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "another", "--html", "page.html"], ["--html", "one prompt"]),
        (["--html", "no-such-folder/page.html"], ["no-such-folder", "cannot be written"]),
        (["--max-new-tokens", "0"], ["max_new_tokens"]),
        (["--seed", "-1"], ["seed"]),
        (["--strategies", "beam search,greedy"], ["'greedy' is not known", "greedy search, sampling"]),
        (["--vary", "temperature=0,warm"], ["--vary temperature", "found 'warm'"]),
        (["--vary", "top_k=1,5", "--vary", "top_p=0.5,0.9"], ["--vary is given 2 times", "one field at a time"]),
        (["--vary", "warmth=1"], ["FIELD=VALUE,...", "'warmth=1'"]),
        (["--vary", "temperature"], ["FIELD=VALUE,...", "'temperature'"]),
        (["--vary", "stop_strings=a,b"], ["--vary stop_strings", "several values at once"]),
        (["--vary", "top_k=1,5, 1"], ["--vary top_k", "'1' stands there twice"]),
        (["--vary", "repetition_penalty=1,1.2", "--repetition-penalty", "1.1"], ["leave one out"]),
        (["--vary", "top_k=1", "--strategies", "sampling"], ["--vary", "--strategies"]),
    ],
)
def test_a_mistake_is_one_clear_line(arguments, words, capsys):
    assert run([*ARGUMENTS, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert all(word in captured.err for word in words)
