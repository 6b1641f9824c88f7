"""Pipelines of encoder-decoders: forms of results, parameters of tasks in config.json, prefixes and languages."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine, pipeline
from minillm.errors import ParameterError, PromptError, TaskError
from minillm.text.tokenizer import Tokenizer

from .models.test_marian import MARIAN
from .models.test_mbart import MBART
from .task_models import LANGUAGES, T5, write_task_model, write_weights
from .text.test_tokenizer_seq2seq import folder_of as mbart_files
from .text.test_tokenizer_seq2seq import marian as marian_files

CAT, DOG = "the cat sat on the mat", "a dog ran"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(write_task_model(tmp_path_factory.mktemp("t5"), T5), max_batch_size=8) as engine:
        yield engine


@pytest.mark.longer
def test_one_text_gives_a_list_and_several_a_dict_each_unless_each_has_several(engine: Engine) -> None:
    write = pipeline("text2text-generation", engine, max_new_tokens=5, num_beams=3)
    texts = [CAT, DOG]
    made = engine.generate(texts, max_new_tokens=5, num_beams=3, num_return_sequences=2)
    records = [[{"generated_text": one.text} for one in each.completions] for each in made]
    assert write(CAT) == records[0][:1]
    assert write(texts) == [each[0] for each in records]
    assert write(texts, num_return_sequences=2) == records
    assert write(CAT, num_return_sequences=2) == records[0]
    assert write([]) == []


def test_without_other_settings_it_is_beam_search_of_width_4(engine: Engine) -> None:
    [record] = pipeline("text2text-generation", engine, max_new_tokens=6)(CAT)
    assert record["generated_text"] == engine.generate(CAT, num_beams=4, max_new_tokens=6).text
    [greedy] = pipeline("text2text-generation", engine)(CAT, num_beams=1, max_new_tokens=6)
    assert greedy["generated_text"] == engine.generate(CAT, max_new_tokens=6).text


@pytest.mark.parametrize(
    ("task", "key", "fields"),
    [
        ("summarization", "summary_text", {"num_beams": 2, "max_length": 9, "min_length": 3}),
        ("translation_en_to_fr", "translation_text", {"max_length": 12, "num_beams": 3, "early_stopping": True}),
        ("translation_en_to_de", "translation_text", {"max_length": 12, "num_beams": 4}),
    ],
)
def test_config_json_names_the_prefix_and_the_search_of_a_task(
    task: str, key: str, fields: dict[str, Any], engine: Engine
) -> None:
    prefix = T5["task_specific_params"][task]["prefix"]
    assert pipeline(task, engine)(CAT) == [{key: engine.generate(prefix + CAT, **fields).text}]
    assert engine.generation_defaults.get("max_length") is None  # another task's are not this one's


def test_a_call_wins_over_what_config_json_says(engine: Engine) -> None:
    summarize = pipeline("summarization", engine)
    made = engine.generate("the big: " + CAT, max_new_tokens=4, min_length=0)
    assert summarize(CAT, num_beams=1, max_new_tokens=4, min_length=0) == [{"summary_text": made.text}]


def test_languages_may_be_named_by_the_call(engine: Engine) -> None:
    translate = pipeline("translation", engine)
    assert translate(DOG, src_lang="en", tgt_lang="fr") == pipeline("translation_en_to_fr", engine)(DOG)
    [plain] = translate(DOG, max_new_tokens=4)  # none: the text as it is
    assert plain["translation_text"] == engine.generate(DOG, num_beams=4, max_new_tokens=4).text
    with pytest.raises(
        ParameterError, match="no prefix for translation_en_to_it: it has translation_en_to_fr, transla"
    ):
        translate(DOG, src_lang="en", tgt_lang="it")
    with pytest.raises(ParameterError, match=re.escape("src_lang and tgt_lang should be names of languages, found 3")):
        translate(DOG, tgt_lang=3)


def test_a_text_longer_than_the_tokenizers_length_is_cut_with_truncation(engine: Engine) -> None:
    write = pipeline("text2text-generation", engine, max_new_tokens=3, num_beams=1)
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode("cat " * 200)
    cut = [*ids[:63], ids[-1]]  # </s> stays
    assert write("cat " * 200, truncation=True) == [{"generated_text": engine.generate(cut, max_new_tokens=3).text}]


def test_languages_as_tokens_stand_beside_the_text_and_begin_the_translation(tmp_path: Path) -> None:
    """mBART's form: the source's language after the text, the target's forced as the translation's first token."""
    folder = write_task_model(tmp_path / "m", T5 | {"task_specific_params": None}, added=LANGUAGES)
    with Engine(folder) as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.added_ids
        assert engine.tokenizer.encode("cat")[1:] == [1, ids["en_XX"]]
        translate = pipeline("translation", engine, max_new_tokens=4, num_beams=1, skip_special_tokens=False)
        prompt = [*engine.tokenizer.encode("cat", add_special_tokens=False), 1, ids["ro_RO"]]
        made = engine.generate(prompt, max_new_tokens=4, forced_bos_token_id=ids["fr_XX"], skip_special_tokens=False)
        assert translate("cat", src_lang="ro", tgt_lang="fr_XX") == [{"translation_text": made.text}]
        assert made.text.startswith("fr_XX")
        for languages, message in {
            ("ro", "fr"): "language 'fr' is not one of this model's: it has fr_XX, fr_CA",
            ("ro", "de"): "language 'de' is not one of this model's: it has en_XX, fr_XX, fr_CA, ro_RO",
            (None, None): "this model needs src_lang and tgt_lang: it has en_XX, fr_XX, fr_CA, ro_RO",
            ("ro", None): "this model needs src_lang and tgt_lang: it has en_XX, fr_XX, fr_CA, ro_RO",
        }.items():
            with pytest.raises(ParameterError, match=re.escape(message)):
                translate("cat", src_lang=languages[0], tgt_lang=languages[1])
        engine.generation_defaults = {"forced_bos_token_id": ids["ro_RO"]}  # a checkpoint of one direction
        assert translate("cat")[0]["translation_text"].startswith("ro_RO")


def test_a_token_of_the_target_before_the_text_as_in_marian(tmp_path: Path) -> None:
    folder = write_task_model(tmp_path / "m", T5 | {"task_specific_params": None}, added=(">>fra<<",))
    with Engine(folder) as engine:
        translate = pipeline("translation", engine, max_new_tokens=4, num_beams=1)
        made = engine.generate(">>fra<< cat", max_new_tokens=4)
        assert made.prompt_token_ids != engine.generate("cat", max_new_tokens=1).prompt_token_ids
        assert translate("cat", tgt_lang="fra") == [{"translation_text": made.text}]


@pytest.mark.parametrize("kind", ["MBartTokenizer", "MBart50Tokenizer"])
def test_the_languages_of_mbarts_own_files_are_found(kind: str, tmp_path: Path) -> None:
    folder = mbart_files(tmp_path, "mbart", tokenizer_class=kind)
    write_published(folder, MBART | {"decoder_start_token_id": 2})
    with Engine(folder) as engine:
        assert engine.tokenizer is not None
        translate = pipeline("translation", engine, max_new_tokens=4, num_beams=1)
        fields = {"max_new_tokens": 4, "forced_bos_token_id": engine.tokenizer.languages["de_DE"]}
        made = engine.generate(engine.tokenizer.reading("fr_XX").encode("A list of colors"), **fields)
        for source, target in (("fr_XX", "de_DE"), ("fr", "de")):
            found = translate("A list of colors", src_lang=source, tgt_lang=target)
            assert found == [{"translation_text": made.text}]
        english = engine.generate("A list of colors", **fields)
        assert english.prompt_token_ids != made.prompt_token_ids


def test_the_token_of_marians_own_files_is_found(tmp_path: Path) -> None:
    folder = marian_files(tmp_path)
    write_published(folder, MARIAN | {"decoder_start_token_id": 3})
    with Engine(folder) as engine:
        translate = pipeline("translation", engine, max_new_tokens=4, num_beams=1)
        made = engine.generate(">>fra<< a list of colors", max_new_tokens=4)
        assert translate("a list of colors", tgt_lang="fra") == [{"translation_text": made.text}]
        plain = engine.generate("a list of colors", max_new_tokens=4)
        assert pipeline("translation_en_to_fr", engine)("a list of colors", max_new_tokens=4, num_beams=1) == [
            {"translation_text": plain.text}  # a model of one direction is not told
        ]


def write_published(folder: Path, raw: dict[str, Any]) -> None:
    """config.json and random weights beside tokenizer files."""
    size = Tokenizer.from_folder(folder).vocab_size
    raw = json.loads((folder / "config.json").read_text()) | raw | {"vocab_size": size}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    write_weights(folder, raw)


def test_an_encoder_decoder_does_not_fit_what_decoders_do(engine: Engine) -> None:
    with pytest.raises(TaskError, match=r"its tasks are text2text-generation, translation, summarization$"):
        pipeline("text-generation", engine)


def test_a_mistake_is_one_line(engine: Engine) -> None:
    write = pipeline("text2text-generation", engine)
    with pytest.raises(PromptError, match="expected a list of texts, found 3 in it"):
        write([3])
    with pytest.raises(ParameterError, match="return_tensors"):
        write(CAT, return_tensors=True)
