"""Pipelines: the forms of transformers' results, the fields that a call, the checkpoint and the task set, refusals."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine, GenerationConfig, pipeline
from minillm.decoding.foreign import PIPELINE, WORDS
from minillm.errors import ParameterError, PromptError, TaskError
from minillm.pipelines.inputs import longest_input, truncated
from minillm.pipelines.text_generation import TextGeneration
from minillm.text.chat import ChatTemplate

from .tiny import write_checkpoint

RED, MONDAY = "A list of colors: red,", "Monday,"
GREEDY = {"do_sample": False, "max_new_tokens": 4}
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last or add_generation_prompt %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_batch_size=4) as engine:
        engine.chat_template = TEMPLATE
        yield engine


@pytest.fixture
def write(engine: Engine) -> Any:
    return pipeline("text-generation", engine, **GREEDY)


# --- text-generation --------------------------------------------------------------------------------------------------


def test_a_text_gives_a_list_and_a_list_of_texts_a_list_of_lists(engine: Engine, write: Any) -> None:
    new = [engine.generate(text, max_new_tokens=4).text for text in (RED, MONDAY)]
    assert write(RED) == [{"generated_text": RED + new[0]}]
    assert write([RED, MONDAY]) == [[{"generated_text": RED + new[0]}], [{"generated_text": MONDAY + new[1]}]]
    assert write([]) == []
    assert write(RED, return_full_text=False) == [{"generated_text": new[0]}]


def test_several_sequences_of_a_text_are_records_beside_each_other(engine: Engine, write: Any) -> None:
    found = write(MONDAY, num_beams=3, num_return_sequences=2, return_full_text=False)
    expected = engine.generate(MONDAY, num_beams=3, num_return_sequences=2, max_new_tokens=4).completions
    assert found == [{"generated_text": one.text} for one in expected]


def test_token_ids_in_place_of_text_are_those_of_the_whole(engine: Engine, write: Any) -> None:
    made = engine.generate(RED, max_new_tokens=4)
    assert write(RED, return_tensors=True) == [{"generated_token_ids": made.prompt_token_ids + made.token_ids}]


def test_a_conversation_gets_its_answer_as_a_message(engine: Engine, write: Any) -> None:
    chat = [{"role": "user", "content": RED}]
    answer = engine.chat(chat, max_new_tokens=4).text
    assert write(chat) == [{"generated_text": [*chat, {"role": "assistant", "content": answer}]}]
    assert write([chat, chat], return_full_text=False) == [[{"generated_text": answer}]] * 2


def test_the_last_message_of_the_assistant_is_continued(engine: Engine, write: Any) -> None:
    chat = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": RED}]
    more = engine.chat(chat, max_new_tokens=4, continue_final_message=True).text
    assert write(chat) == [{"generated_text": [chat[0], {"role": "assistant", "content": RED + more}]}]
    answer = engine.chat(chat, max_new_tokens=4).text
    whole = write(chat, continue_final_message=False)[0]["generated_text"]
    assert whole == [*chat, {"role": "assistant", "content": answer}]


def test_a_stop_sequence_stays_in_the_text_as_in_transformers(write: Any) -> None:
    assert write(RED, stop_sequence="yell")[0]["generated_text"].endswith("yell")
    assert write(RED, stop_strings="yell", include_stop=False)[0]["generated_text"].endswith(", ")


def test_a_prefix_stands_before_each_text_and_not_in_the_result(engine: Engine, write: Any) -> None:
    new = engine.generate("A list of days: " + MONDAY, max_new_tokens=4).text
    assert write(MONDAY, prefix="A list of days: ") == [{"generated_text": MONDAY + new}]


def test_without_special_tokens_the_prompt_has_none(engine: Engine, write: Any) -> None:
    plain = engine.tokenizer.encode(RED, add_special_tokens=False)  # type: ignore[union-attr]
    [record] = write(RED, add_special_tokens=False, return_tensors=True)
    assert record["generated_token_ids"][: len(plain)] == plain


def test_truncation_cuts_a_long_text_at_its_end_and_keeps_the_special_tokens(engine: Engine, write: Any) -> None:
    assert engine.tokenizer is not None
    text = MONDAY * 400
    with pytest.raises(PromptError, match="the context holds 512"):
        write(text)
    [record] = write(text, truncation=True, max_new_tokens=1, return_tensors=True)
    assert record["generated_token_ids"][:-1] == engine.tokenizer.encode(text)[: engine.context - 1]
    assert truncated(engine, text, 5) == engine.tokenizer.encode(text)[:5]
    assert truncated(engine, text, 5, add_special_tokens=False) == engine.tokenizer.encode(text)[1:5]
    assert truncated(engine, MONDAY, 500) == engine.tokenizer.encode(MONDAY)


# --- whose fields count -----------------------------------------------------------------------------------------------


def settings_of(pipe: TextGeneration, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The settings of the request that a call makes."""
    made: list[Any] = []
    real = pipe.engine.requests

    def requests(*args: Any, **kwargs: Any) -> Any:
        made.extend(real(*args, **kwargs))
        return made[-1:]

    with monkeypatch.context() as patch:
        patch.setattr(pipe.engine, "requests", requests)
        pipe(MONDAY, **options)
    return made[-1].settings


def test_the_task_samples_unless_the_checkpoint_or_the_call_says_otherwise(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pipeline("text-generation", engine, max_new_tokens=1)
    settings = settings_of(plain, monkeypatch)
    assert (settings.do_sample, settings.temperature) == (True, 0.7)
    assert not settings_of(plain, monkeypatch, do_sample=False).do_sample
    assert settings_of(plain, monkeypatch, temperature=1.5).temperature == 1.5
    engine.generation_defaults = {"temperature": 0.3}
    try:
        assert settings_of(plain, monkeypatch).temperature == 0.3
        settings = settings_of(plain, monkeypatch, penalty_alpha=0.6, top_k=4)  # a search that does not sample
        assert (settings.penalty_alpha, settings.do_sample) == (0.6, False)
    finally:
        engine.generation_defaults = {}
    assert engine.generation_defaults == {}


def test_a_length_of_the_call_or_of_the_checkpoint_replaces_the_tasks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pipeline("text-generation", engine, do_sample=False)
    prompt = len(engine.generate(MONDAY, max_new_tokens=1).prompt_token_ids)
    assert settings_of(plain, monkeypatch, max_length=prompt + 3).max_new_tokens == 3


def test_options_of_the_pipeline_are_those_of_its_calls_and_a_config_is_taken(engine: Engine) -> None:
    short = pipeline("text-generation", engine, return_full_text=False, generation_config=GenerationConfig(seed=3))
    one = short(RED, max_new_tokens=6)
    assert one == short(RED, max_new_tokens=6)  # the seed of the pipeline's configuration
    assert not one[0]["generated_text"].startswith(RED)


def test_a_model_is_loaded_with_the_engines_arguments_and_closed_with_the_pipeline(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    with pipeline("text-generation", folder, max_batch_size=2, backend="numpy", **GREEDY) as write:
        assert write.engine.runner.backend.name == "numpy"
        assert write.engine.path == folder
        assert write("a")[0]["generated_text"].startswith("a")
    assert "closed" in repr(write.engine)


def test_the_limit_of_truncation_is_the_tokenizers_where_that_is_shorter(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 7}))
    with Engine(folder) as engine:
        assert longest_input(engine) == 7
        [record] = pipeline("text-generation", engine, **GREEDY)("a " * 40, truncation=True, return_tensors=True)
        assert len(record["generated_token_ids"]) == 7 + 4


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("text-generator", "task 'text-generator' is not known: did you mean 'text-generation'?"),
        ("sing", "task 'sing' is not known: expected text-generation, text2text-generation, translation, summ"),
        (None, "task should be text, found None"),
    ],
)
def test_an_unknown_task_is_told_the_tasks(task: Any, message: str, engine: Engine) -> None:
    with pytest.raises(ParameterError, match="^" + re.escape(message)):
        pipeline(task, engine)


@pytest.mark.parametrize("task", ["summarization", "translation_en_to_fr", "text-classification"])
def test_a_model_that_does_not_fit_the_task_is_told_its_tasks(task: str, engine: Engine) -> None:
    with pytest.raises(TaskError, match=f"family opt, does not fit the task {task}: its tasks are te"):
        pipeline(task, engine)


@pytest.mark.parametrize("name", sorted(WORDS[PIPELINE]))
def test_an_argument_of_transformers_that_is_not_done_says_what_to_do(name: str, write: Any) -> None:
    with pytest.raises(ParameterError, match=f"{name} is not offered: "):
        write(MONDAY, **{name: 1})


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (3, {}, "expected a text or a list of texts or conversations, found 3"),
        (["a", 3], {}, "expected a list of texts or conversations, found 3 in it"),
        ("a", {"tools": [{}]}, "tools is for conversations: leave it out for a text"),
        ("a", {"return_full_text": True, "return_tensors": True}, "exclude each other: give one"),
        ("a", {"truncation": "left"}, "truncation should be True or False, found 'left'"),
        ("a", {"generation_config": {}}, "generation_config should be a minillm.GenerationConfig, found {}"),
        ("a", {"max_tokens": 3}, "unknown generation field 'max_tokens': use max_new_tokens"),
    ],
)
def test_a_mistake_is_one_line(inputs: Any, options: dict[str, Any], message: str, write: Any) -> None:
    with pytest.raises((ParameterError, PromptError), match=re.escape(message)):
        write(inputs, **options)


def test_an_unknown_argument_is_refused_before_the_model_is_loaded() -> None:
    for options in ({"max_tokens": 3}, {"defaults": {}}, {"batch_size": 2}):
        with pytest.raises(ParameterError, match=next(iter(options))):
            pipeline("text-generation", "no/such-model-here", **options)  # type: ignore[arg-type]


def test_arguments_of_an_engine_beside_an_engine_are_refused(engine: Engine) -> None:
    with pytest.raises(ParameterError, match="dtype is an argument of Engine, and the model is an engine"):
        pipeline("text-generation", engine, dtype="int8")
