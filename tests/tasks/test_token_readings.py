"""Readings of tokens: entities and windows by hand, what is refused, and heads that a checkpoint lacks."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine, pipeline
from minillm.errors import ParameterError, PromptError, TaskError
from minillm.tasks.answering import answers_of
from minillm.tasks.token_labels import entities_of
from minillm.text.tokenizer import Tokenizer
from minillm.text.tokenizer.aligned import align_texts

from ..task_models import BERT, WORDS, write_task_model

NAMES = ("O", "B-X", "I-X", "I-Y")
TEXT = "the cat sat on the big red mat"


def head(name: str, labels: int = len(NAMES)) -> dict[str, Any]:
    return BERT | {"architectures": [f"Bert{name}"], "num_labels": labels}


@pytest.fixture(scope="module")
def labeller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    raw = head("ForTokenClassification") | {"id2label": {str(i): name for i, name in enumerate(NAMES)}}
    with Engine(write_task_model(tmp_path_factory.mktemp("labels"), raw)) as engine:
        yield engine


@pytest.fixture(scope="module")
def answerer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(write_task_model(tmp_path_factory.mktemp("answers"), head("ForQuestionAnswering", 2))) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(labeller: Engine) -> Tokenizer:
    assert labeller.tokenizer is not None
    return labeller.tokenizer


def logits(rows: str) -> np.ndarray:
    """A digit is the likeliest label of a token; special tokens have the first. [T, labels]"""
    return np.eye(len(NAMES), dtype=np.float32)[[0, *map(int, rows), 0]] * 9


def test_neighbours_of_one_label_are_an_entity_and_b_begins_another(tokenizer: Tokenizer) -> None:
    windows = align_texts(tokenizer, TEXT, limit=64)
    entities = entities_of(TEXT, windows, [logits("12011233")], NAMES, tokenizer, "simple", ("O",))
    spans = [(entity.label, TEXT[entity.start : entity.end]) for entity in entities]
    assert spans == [("X", "the cat"), ("X", "on"), ("X", "the big"), ("Y", "red mat")]


def test_windows_share_tokens_and_their_entities_are_those_of_the_longer(tokenizer: Tokenizer) -> None:
    windows = align_texts(tokenizer, TEXT, limit=7, stride=2)
    assert [[TEXT[a:b] for a, b in window.spans[1:-1]] for window in windows] == [
        ["the", "cat", "sat", "on", "the"],
        ["on", "the", "big", "red", "mat"],
    ]
    rows = [logits("10003"), logits("03332")]
    entities = entities_of(TEXT, windows, rows, NAMES, tokenizer, "simple", ("O",))
    assert [TEXT[entity.start : entity.end] for entity in entities] == ["the", "the big red", "mat"]


def test_labels_of_tokens_are_those_of_one_pass_and_any_company(labeller: Engine) -> None:
    alone = labeller.classify_tokens(TEXT, ignore_labels=())
    [_, among, _] = labeller.classify_tokens(["a dog", TEXT, "you ?"], ignore_labels=())
    assert [(entity.label, entity.start, pytest.approx(entity.score, abs=1e-5)) for entity in alone] == [
        (entity.label, entity.start, entity.score) for entity in among
    ]
    assert [entity.word for entity in alone] == TEXT.split()
    assert [entity.index for entity in alone] == [*range(1, 9)]
    assert labeller.classify_tokens([]) == []
    assert labeller.embed(TEXT).shape == (32,)  # and its vectors are as ever


def test_an_answer_is_the_likeliest_span_in_the_text_alone(tokenizer: Tokenizer) -> None:
    [window] = align_texts(tokenizer, "a dog", TEXT, limit=64, cut="second")
    rows = np.zeros((len(window.tokens), 2), np.float32)
    rows[1] = 99  # the question
    rows[5:7, 0], rows[6, 1], rows[8, 1] = (9, 8), 8, 9
    given: dict[str, Any] = {"top_k": 2, "allow_none": False, "whole_words": True, "first_stands_for_none": True}
    best = answers_of(TEXT, [window], [rows], max_answer_tokens=9, **given)
    assert (best[0].answer, best[0].start) == ("cat sat on the", 4)
    short = answers_of(TEXT, [window], [rows], max_answer_tokens=2, **given)
    assert short[0].answer == "cat sat"


def test_a_long_text_is_asked_in_windows(answerer: Engine) -> None:
    context = " ".join(WORDS * 4)
    whole = answerer.answer("how ?", context, top_k=3, window=30, stride=4, allow_none=True)
    assert len(whole) == 3
    assert all(context[answer.start : answer.end] == answer.answer for answer in whole)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.classify_tokens("a", aggregation="mean"), ParameterError, "aggregation 'mean' is not known"),
        (
            lambda e: e.classify_tokens("a", stride=2),
            ParameterError,
            "a stride joins entities, and aggregation is none",
        ),
        (
            lambda e: e.classify_tokens("a " * 80, aggregation="simple", stride=62),
            ParameterError,
            "stride should be less than the 62 tokens of the text in a window, found 62",
        ),
        (lambda e: e.classify_tokens("a " * 80, truncate=False), PromptError, "more than 64 tokens"),
        (lambda e: e.classify_tokens(None), PromptError, "expected a text or a list of texts, found None"),
        (lambda e: e.classify_tokens("a", ignore_labels=3), ParameterError, "ignore_labels should be texts, found 3"),
        (lambda e: e.classify("a"), TaskError, "this bert model labels tokens: use classify_tokens"),
        (lambda e: e.answer("a", "b"), TaskError, "answer needs a checkpoint for question answering; this bert model"),
        (lambda e: e.fill_masks("a"), TaskError, "fill_masks needs a masked language model"),
        (lambda e: pipeline("fill-mask", e), TaskError, "its tasks are token-classification, ner, feature-extraction"),
        (lambda e: pipeline("ner", e, is_split_into_words=True), ParameterError, "join the words to a text"),
    ],
)
def test_a_mistake_is_one_line(call: Any, error: type[Exception], message: str, labeller: Engine) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(labeller)


def test_questions_are_refused_in_one_line(answerer: Engine) -> None:
    for options, message in (
        ({"top_k": 0}, "top_k should be a whole number of at least 1, found 0"),
        ({"window": 99}, "window should be at most 64"),
        ({"window": 3}, "3 tokens have no room for a text beside the other"),
    ):
        with pytest.raises((ParameterError, PromptError), match=message):
            answerer.answer("a dog", TEXT, **options)  # type: ignore[arg-type]
    for question, context in ((None, "a"), (np.array(["a", "b"]), "a"), ("a", 3)):
        with pytest.raises(PromptError, match="expected text, found"):
            answerer.answer(question, context)  # type: ignore[arg-type]
    answers = pipeline("question-answering", answerer)
    for inputs in (3, {1, 2}):
        with pytest.raises(PromptError, match='expected a dict with the texts "question" and "context", or a list'):
            answers(inputs)
    for question, context in ((3, "a"), ("a", 3), (np.array(["a", "b"]), "a"), ({"a": 1}, "a")):
        with pytest.raises(ParameterError, match="question and context should be two texts, or lists of as many"):
            answers(question=question, context=context)
    with pytest.raises(ParameterError, match="give question and context"):
        answers()
    with pytest.raises(PromptError, match='"question" and "context"'):
        answers({"question": "a"})


def test_masks_are_filled_where_the_files_have_the_head(tmp_path: Path) -> None:
    with Engine(write_task_model(tmp_path / "whole", head("ForMaskedLM"))) as engine:
        with pytest.raises(PromptError, match="names no mask token"):
            engine.fill_masks("the cat")
        assert engine.embed(TEXT).shape == (32,)
    # the configuration of a masked model with the weights of a plain one, as some for embedding are
    plain, folder = write_task_model(tmp_path / "plain", BERT), tmp_path / "whole"
    (folder / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    with Engine(folder) as engine:
        assert not engine.config.fills_masks
        assert engine.embed(TEXT).shape == (32,)
        with pytest.raises(TaskError, match="its tasks are feature-extraction"):
            pipeline("fill-mask", engine)


def test_a_sparse_vector_has_the_weights_of_its_formula(tmp_path: Path) -> None:
    with Engine(write_task_model(tmp_path, head("ForMaskedLM")), backend="numpy") as engine:
        [encoded] = engine.encode([TEXT])
        [logits] = engine._passes("tokens").token_logits([encoded])
        weights = np.log1p(np.maximum(logits, 0)).max(axis=0)  # [T, V] -> [V]
        vector: Any = engine.embed_sparse(TEXT)
        np.testing.assert_allclose(vector.weights, np.sort(weights[weights > 0])[::-1], rtol=1e-6)
        np.testing.assert_allclose(vector.weights, weights[vector.token_ids], rtol=1e-6)
        assert vector.tokens[0] == engine.tokenizer.token(int(weights.argmax()))  # type: ignore[union-attr]
        np.testing.assert_allclose(vector.dot(vector), float(weights @ weights), rtol=1e-6)
        shorter: Any = engine.embed_sparse([TEXT], most=2)[0]  # type: ignore[index]
        assert shorter.tokens == vector.tokens[:2]
        with pytest.raises(ParameterError, match="most should be a whole number of at least 1, or None, found 0"):
            engine.embed_sparse(TEXT, most=0)


def test_one_ignored_label_needs_no_list(labeller: Engine) -> None:
    labels = {entity.label for entity in entities_of_all(labeller, [])}
    for label in labels:
        assert {entity.label for entity in entities_of_all(labeller, label)} == labels - {label}


def entities_of_all(engine: Engine, ignored: Any) -> list[Any]:
    """The tokens of a text whose labels are not left out."""
    return list(engine.classify_tokens(TEXT, ignore_labels=ignored))
