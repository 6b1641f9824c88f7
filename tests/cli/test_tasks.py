"""minillm translate, summarize, classify, embed: texts from everywhere, lines and JSON lines out, mistakes."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine, pipeline
from minillm.cli import options
from minillm.cli.main import run
from minillm.progress import watching
from minillm.tasks.quantized_vectors import quantize_vectors

from ..task_models import BERT, ONE_LABEL, T5, THREE_LABELS, write_task_model
from ..tiny import write_checkpoint

TEXTS = ["the cat sat", "a dog ran on the road", "how are you ?"]
MODELS = {"t5": T5, "vectors": BERT, "topics": BERT | THREE_LABELS, "reranker": BERT | ONE_LABEL}
MODELS["entities"] = BERT | THREE_LABELS | {"architectures": ["BertForTokenClassification"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: str(write_task_model(folder / name, raw)) for name, raw in MODELS.items()}
    yield made | {"decoder": str(write_checkpoint(folder / "decoder"))}


@pytest.fixture
def lines(tmp_path: Path) -> str:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join([TEXTS[0], "", *TEXTS[1:]]) + "\n", encoding="utf-8")
    return str(file)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines on standard output of a command that succeeds."""
    assert run(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line about a mistake."""
    try:
        assert run(list(arguments)) == 2
    except SystemExit as exit:
        assert exit.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()[0]


# --- texts in ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_text_a_file_and_standard_input_say_the_same(
    models: dict[str, str], lines: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [one["summary_text"] for one in pipeline("summarization", models["t5"])(TEXTS)]
    command = ["summarize", "--model", models["t5"]]
    assert printed(capsys, *command, "--file", lines) == expected  # blank lines are left out
    assert printed(capsys, *command, "--file", lines, "-f", lines) == expected * 2
    assert printed(capsys, *command, TEXTS[1]) == expected[1:2]
    text = io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode()))
    monkeypatch.setattr("sys.stdin", text)
    assert printed(capsys, *command) == expected


@pytest.mark.longer
def test_a_whole_file_is_one_text(models: dict[str, str], lines: str, capsys: Any) -> None:
    [record] = pipeline("summarization", models["t5"])("\n".join([TEXTS[0], "", *TEXTS[1:]]))
    found = printed(capsys, "summarize", "--model", models["t5"], "--whole", "--file", lines)
    assert found == [record["summary_text"]]


def test_texts_are_computed_in_blocks_whose_results_are_printed_before_the_next(
    models: dict[str, str], lines: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "TEXTS_AT_ONCE", 2)
    said: list[int] = []
    real = Engine.classify

    def classify(engine: Engine, texts: Any, **more: Any) -> Any:
        said.append(len(capsys.readouterr().out.splitlines()))
        return real(engine, texts, **more)

    monkeypatch.setattr(Engine, "classify", classify)
    assert len(printed(capsys, "classify", "--model", models["topics"], "--file", lines)) == 1
    assert said == [0, 2]


def test_lines_end_where_editors_end_them(models: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    """Not at a form feed or the separators of Unicode, which stand in texts: as many lines as `wc` counts."""
    texts = ["the cat\x0csat", "a dog\u2028ran", "the\x85 road"]
    file = tmp_path / "lines.txt"
    file.write_bytes("\r\n".join(texts).encode())
    found = printed(capsys, "embed", "--model", models["vectors"], "--dimensions", "1", "--file", str(file))
    assert [json.loads(line)["text"] for line in found] == texts


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_translations_are_the_pipelines_with_the_options_of_the_command(
    models: dict[str, str], lines: str, capsys: Any
) -> None:
    translate = pipeline("translation", models["t5"], src_lang="en", tgt_lang="fr")
    command = ["translate", "--model", models["t5"], "--source", "en", "--target", "fr", "--file", lines]
    records = translate(TEXTS)
    assert printed(capsys, *command) == [one["translation_text"] for one in records]
    found = [json.loads(line) for line in printed(capsys, *command, "--json")]
    assert found == [{"text": text} | one for text, one in zip(TEXTS, records, strict=True)]
    several = translate(TEXTS, num_beams=2, num_return_sequences=2, max_new_tokens=4)
    found = printed(capsys, *command, "--num-beams", "2", "--num-return-sequences", "2", "-n", "4")
    assert found == [one["translation_text"] for records in several for one in records]


def test_labels_are_a_line_or_an_object_each(models: dict[str, str], lines: str, capsys: Any) -> None:
    expected: Any = Engine(models["topics"]).classify(TEXTS)
    command = ["classify", "--model", models["topics"], "--file", lines]
    for line, one in zip(printed(capsys, *command), expected, strict=True):
        label, score = line.split()
        assert re.fullmatch(r"\d\.\d{4}", score)
        assert (label, float(score)) == (one.label, pytest.approx(one.score, abs=2e-4))
    assert [len(line.split("  ")) for line in printed(capsys, *command, "--top-k", "2")] == [2, 2, 2]
    for line, text, one in zip(printed(capsys, *command, "--all", "--json"), TEXTS, expected, strict=True):
        found = json.loads(line)
        assert found["text"] == text
        assert [label["label"] for label in found["labels"]] == [label.label for label in one.labels]
        assert [label["score"] for label in found["labels"]] == pytest.approx(
            [label.score for label in one.labels], abs=1e-4
        )
    [raw] = printed(capsys, "classify", "--model", models["topics"], "--function", "none", "--json", TEXTS[0])
    assert json.loads(raw)["labels"][0]["score"] == pytest.approx(float(expected[0].logits.max()), abs=1e-3)


def test_pairs_have_a_tab_between_their_texts(models: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("the cat\ta bird\nthe dog\tthe road\n", encoding="utf-8")
    command = ["classify", "--model", models["reranker"], "--pairs", "--json"]
    found = [json.loads(line) for line in printed(capsys, *command, "--file", str(file))]
    expected: Any = Engine(models["reranker"]).classify([("the cat", "a bird"), ("the dog", "the road")])
    assert [(one["text"], one["text_pair"]) for one in found] == [("the cat", "a bird"), ("the dog", "the road")]
    assert [one["labels"][0]["score"] for one in found] == pytest.approx([one.score for one in expected], abs=1e-4)
    assert "should be two texts with a tab between, found 'the cat'" in refused(capsys, *command, "the cat")


def test_entities_are_a_line_for_each_text(models: dict[str, str], lines: str, capsys: Any) -> None:
    expected: Any = Engine(models["entities"]).classify_tokens(TEXTS, aggregation="average")
    command = ["classify", "--model", models["entities"], "--file", lines, "--aggregation", "average"]
    rows = printed(capsys, *command)
    for row, text, entities in zip(rows, TEXTS, expected, strict=True):
        assert row == "  ".join(f"{text[e.start : e.end]} {e.label} {e.score:.4f}" for e in entities)
    records = [json.loads(line) for line in printed(capsys, *command, "--json")]
    assert [record["text"] for record in records] == TEXTS
    assert [len(record["entities"]) for record in records] == [len(entities) for entities in expected]
    assert records[0]["entities"][0]["word"] == expected[0][0].word
    assert refused(capsys, *command, "--top-k", "2") == (
        "minillm: --top-k is for labels of texts, and this model labels tokens: leave it out"
    )
    assert "--aggregation is for models for token classification" in refused(
        capsys, "classify", "--model", models["topics"], "--aggregation", "max", "a"
    )


def test_vectors_are_json_lines_or_an_array(models: dict[str, str], lines: str, tmp_path: Path, capsys: Any) -> None:
    with Engine(models["vectors"]) as engine:
        plain, short = engine.embed(TEXTS), engine.embed(TEXTS, normalize=True, dimensions=8)
    command = ["embed", "--model", models["vectors"], "--file", lines]
    found = [json.loads(line) for line in printed(capsys, *command)]
    assert [one["text"] for one in found] == TEXTS
    np.testing.assert_allclose([one["embedding"] for one in found], plain, atol=1e-4)
    target = tmp_path / "vectors.npy"
    assert printed(capsys, *command, "--normalize", "--dimensions", "8", "--output", str(target)) == []
    array = np.load(target)
    assert array.dtype == np.float32
    np.testing.assert_allclose(array, short, atol=1e-4)


@pytest.mark.longer
def test_vectors_in_few_bits_are_those_of_quantize_vectors(
    models: dict[str, str], lines: str, tmp_path: Path, capsys: Any
) -> None:
    with Engine(models["vectors"]) as engine:
        vectors = engine.embed(TEXTS)
    command = ["embed", "--model", models["vectors"], "--file", lines, "--precision"]
    target = tmp_path / "vectors.npy"
    for precision in ("int8", "ubinary"):
        expected = quantize_vectors(vectors, precision)  # type: ignore[arg-type]
        rows = [json.loads(line)["embedding"] for line in printed(capsys, *command, precision)]
        assert printed(capsys, *command, precision, "--output", str(target)) == []
        assert (np.load(target).dtype, np.load(target).tolist()) == (expected.dtype, rows)
        np.testing.assert_allclose(rows, expected, atol=1 if precision == "int8" else 0)  # a step, by rounding
    assert "at least two vectors" in refused(
        capsys, "embed", "--model", models["vectors"], "--precision", "int8", "the cat"
    )


@pytest.mark.longer
def test_long_texts_are_refused_or_cut(models: dict[str, str], capsys: Any) -> None:
    long = "cat " * 100
    for command in (["embed", "--model", models["vectors"]], ["classify", "--model", models["topics"]]):
        assert "more than 64 tokens" in refused(capsys, *command, long)
        assert len(printed(capsys, *command, "--truncate", long)) == 1
    assert len(printed(capsys, "summarize", "--model", models["t5"], "--truncate", long)) == 1


@pytest.mark.parametrize(
    ("command", "model", "title"),
    [("embed", "vectors", "embedding"), ("classify", "topics", "classifying"), ("summarize", "t5", "summarizing")],
)
def test_every_text_is_reported_once(
    command: str, model: str, title: str, models: dict[str, str], lines: str, capsys: Any
) -> None:
    reports: list[tuple[str, int, int | None]] = []
    with watching(lambda work: reports.append((work.title, work.done, work.total))):
        printed(capsys, command, "--model", models[model], "--file", lines)
    assert (title, 3, 3) in reports
    assert max(done for name, done, _ in reports if name == title) == 3


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["translate", "a"], "the following arguments are required: -m/--model"),
        (
            ["translate", "-m", "t5", "a", "b"],
            "b is not an argument of this command: put a text of several words in qu",
        ),
        (["translate", "-m", "t5", "a", "--soruce", "en"], "did you mean --source?"),
        (["translate", "-m", "t5", "a", "--source", "en"], "--source and --target belong together here"),
        (
            ["translate", "-m", "t5", "a", "--source", "en", "--target", "it"],
            "no prefix for translation_en_to_it: it h",
        ),
        (["summarize", "-m", "t5", "a", "--file", "b"], "stands beside --file: give one of them"),
        (["summarize", "-m", "t5", "--file", "/nothing"], "/nothing cannot be read"),
        (["classify", "-m", "topics", "a", "--function", "softmx"], "did you mean softmax?"),
        (["classify", "-m", "topics", "a", "--all", "--top-k", "2"], "--all and --top-k exclude each other"),
        (["classify", "-m", "topics", "a", "--top-k", "0"], "top_k should be a whole number of at least 1"),
        (["embed", "-m", "vectors", "a", "--output", "v.txt"], "--output should end in .npy"),
        (["embed", "-m", "vectors", "a", "--dimensions", "33"], "dimensions should be at most 32, found 33"),
        (["embed", "-m", "vectors", "a", "--pooling", "sum"], "expected one of mean, cls, last"),
        (["emded", "-m", "vectors", "a"], "did you mean embed?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, models: dict[str, str], capsys: Any) -> None:
    words = [models.get(word, word) for word in arguments]
    assert message in refused(capsys, *words)


@pytest.mark.longer
def test_a_model_of_another_kind_says_what_it_does(models: dict[str, str], capsys: Any) -> None:
    for command, model, message in (
        ("summarize", "vectors", "does not fit the task summarization: its tasks are feature-extraction"),
        ("translate", "topics", "does not fit the task translation: its tasks are text-classification"),
        ("summarize", "decoder", "does not fit the task summarization: its tasks are text-generation"),
        ("classify", "vectors", "classify needs a checkpoint for sequence classification"),
        ("embed", "t5", "embed needs an encoder or a decoder alone"),
    ):
        assert message in refused(capsys, command, "--model", models[model], "a")
    for model, message in (
        ("vectors", "perplexity needs a model that generates text"),
        ("t5", "perplexity is of a text alone"),
    ):
        assert message in refused(capsys, "perplexity", "--model", models[model])
