"""Pipelines beside those of transformers: text-generation, text-classification, feature-extraction, as it still has."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

import torch
import transformers

from minillm import pipeline

from . import huggingface
from .task_models import BERT, ONE_LABEL, T5, THREE_LABELS, write_task_model
from .tiny import NO_REPEATS, write_checkpoint

pytestmark = pytest.mark.reference

TEXTS = ["A list of colors: red,", "Once upon a time", "a"]
CHAT = [{"role": "user", "content": "Count to 3."}]
STARTED = [*CHAT, {"role": "assistant", "content": "1, 2"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% if not loop.last or add_generation_prompt %}\\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = {"do_sample": False, "max_new_tokens": 6, **NO_REPEATS}


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Their pipeline and ours, of one tiny OPT."""
    folder = write_checkpoint(tmp_path_factory.mktemp("opt"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("\\n", "\n"), encoding="utf-8")
    theirs = transformers.pipeline("text-generation", str(folder), device="cpu", dtype=torch.float32)
    with pipeline("text-generation", folder) as ours:
        yield theirs, ours


@pytest.mark.parametrize(
    "inputs",
    [TEXTS[0], TEXTS, [TEXTS[0]], CHAT, [CHAT, STARTED], STARTED],
    ids=["one", "many", "list", "chat", "chats", "started"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_full_text": False},
        {"num_beams": 3, "num_return_sequences": 2},
        {"return_tensors": True},
        {"add_special_tokens": False},
        {"repetition_penalty": 1.3},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_texts_and_conversations_give_what_theirs_gives(inputs: Any, options: dict[str, Any], writers: Any) -> None:
    theirs, ours = writers
    assert ours(inputs, **GREEDY | options) == theirs(inputs, **GREEDY | options)


def test_a_prefix_acts_as_theirs(writers: Any) -> None:
    theirs, ours = writers
    options = GREEDY | {"prefix": "Here is "}
    assert ours(TEXTS[0], **options) == theirs(TEXTS[0], **options)


def test_a_stop_sequence_stays_in_the_text_as_in_theirs(writers: Any) -> None:
    """Theirs ends with the token that completes it, ours with its own last character."""
    theirs, ours = writers
    options = GREEDY | {"return_full_text": False}
    whole = ours(TEXTS[0], **options)[0]["generated_text"]
    stop = re.findall("[a-z]+", whole)[0][:2]
    found = ours(TEXTS[0], **options, stop_sequence=stop)[0]["generated_text"]
    assert found.endswith(stop)
    assert len(found) < len(whole)
    assert theirs(TEXTS[0], **options, stop_sequence=stop)[0]["generated_text"].startswith(found)


# --- labels and features ----------------------------------------------------------------------------------------------

REVIEWS = ["the cat was good", "bad dog", "how are you ? the road is red and the house is blue"]
PAIR = {"text": "the cat", "text_pair": "a small bird"}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "single": THREE_LABELS,
    "multi": THREE_LABELS | {"problem_type": "multi_label_classification"},
    "regression": ONE_LABEL | {"problem_type": "regression"},
    "one": ONE_LABEL,
}


def write_by_torch(folder: Path, raw: dict[str, Any], kind: Any) -> Path:
    """A checkpoint with random weights, as transformers writes it."""
    write_task_model(folder, raw)
    torch.manual_seed(0)
    model = kind.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1 if "norm.weight" in name.lower() else 0, 0.15 if raw is not T5 else 0.4)
    return huggingface.save(model, folder)


@pytest.fixture(scope="module", params=CLASSIFIERS)
def classifiers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    raw = BERT | CLASSIFIERS[request.param]
    folder = write_by_torch(tmp_path_factory.mktemp("bert"), raw, transformers.AutoModelForSequenceClassification)
    theirs = transformers.pipeline("text-classification", str(folder), device="cpu", dtype=torch.float32)
    with pipeline("sentiment-analysis", folder) as ours:
        yield theirs, ours


@pytest.mark.parametrize("inputs", [REVIEWS[0], REVIEWS, PAIR, [PAIR, PAIR]], ids=["one", "many", "pair", "pairs"])
@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 1}, {"top_k": None}, {"top_k": 2}, {"function_to_apply": "sigmoid"}, {"function_to_apply": "NONE"}],
    ids=str,
)
def test_labels_and_scores_are_theirs(inputs: Any, options: dict[str, Any], classifiers: Any) -> None:
    theirs, ours = classifiers
    assert_same(ours(inputs, **options), theirs(inputs, **options))


def test_all_labels_for_every_call_are_theirs(classifiers: Any) -> None:
    theirs, ours = classifiers
    theirs = transformers.pipeline(
        "text-classification", theirs.model, tokenizer=theirs.tokenizer, top_k=None, device="cpu"
    )
    with_all = pipeline("text-classification", ours.engine, top_k=None)
    for inputs in (REVIEWS[0], REVIEWS):
        assert_same(with_all(inputs), theirs(inputs))


def assert_same(ours: Any, theirs: Any) -> None:
    """Two results: the same lists, the same labels in the same order, scores to 1e-4."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        assert ours["label"] == theirs["label"]
        assert ours["score"] == pytest.approx(theirs["score"], abs=1e-4)
    else:
        assert isinstance(ours, list)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


def test_features_are_the_last_hidden_states_of_theirs(tmp_path: Path) -> None:
    folder = write_by_torch(tmp_path / "bert", BERT, transformers.AutoModel)
    theirs = transformers.pipeline("feature-extraction", str(folder), device="cpu", dtype=torch.float32)
    with pipeline("feature-extraction", folder) as ours:
        for text, mine in zip(REVIEWS, ours(REVIEWS), strict=True):
            np.testing.assert_allclose(mine, theirs(text), atol=1e-4)
            np.testing.assert_allclose(ours(text, return_tensors=True), mine, atol=1e-5)


def test_features_of_a_decoder_are_those_after_its_final_norm(writers: Any) -> None:
    of_text, ours = writers
    theirs = transformers.pipeline("feature-extraction", of_text.model.model, tokenizer=of_text.tokenizer, device="cpu")
    mine = pipeline("feature-extraction", ours.engine)
    np.testing.assert_allclose(mine(TEXTS[0]), theirs(TEXTS[0]), atol=1e-4)


# --- encoder-decoders: transformers 5 has no pipelines of them, so its generate ---------------------------------------


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_by_torch(tmp_path_factory.mktemp("t5"), T5, transformers.AutoModelForSeq2SeqLM)


@pytest.mark.parametrize("task", T5["task_specific_params"])
def test_a_task_of_config_json_is_generate_with_its_prefix_and_fields(task: str, t5: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(t5)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(t5).eval()
    fields = {"num_beams": 4} | T5["task_specific_params"][task]
    prefix = fields.pop("prefix")
    with pipeline(task, t5) as ours:
        records = ours(REVIEWS)
    assert len({text for record in records for text in record.values()}) > 1
    for text, record in zip(REVIEWS, records, strict=True):
        with torch.no_grad():
            ids = model.generate(**tokenizer(prefix + text, return_tensors="pt"), do_sample=False, **fields)
        assert [*record.values()] == [tokenizer.decode(ids[0], skip_special_tokens=True)]
