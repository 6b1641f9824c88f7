"""Generation settings that stand in config.json, as in checkpoints of before transformers 4.26."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.cli.main import run
from minillm.decoding.checkpoint_fields import OWN_FIELDS, model_config_fields
from minillm.decoding.fields import FIELDS
from minillm.decoding.foreign import TRANSFORMERS, WORDS, ignored
from minillm.formats import open_model

from ..families import CONFIGS as DECODERS
from ..seq2seq import CONFIGS as ENCODER_DECODERS
from ..tiny import write_checkpoint

SOURCE = [5, 17, 60, 25, 42, 7, 33, 9]
SETTINGS: list[dict[str, Any]] = [
    {"forced_bos_token_id": 33},
    {"force_bos_token_to_be_generated": True, "bos_token_id": 44},
    {"forced_eos_token_id": 21},
    {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1},
    {"repetition_penalty": 1.9, "encoder_repetition_penalty": 1.3},
    {"suppress_tokens": list(range(20, 60)), "begin_suppress_tokens": list(range(60, 80))},
    {"bad_words_ids": [[token] for token in range(3, 70)]},
    {"max_length": 14, "min_length": 12, "num_beams": 3},
    {"decoder_start_token_id": 44},
    {"do_sample": False, "temperature": 0.2, "top_k": 3, "top_p": 0.5},
    {"task_specific_params": {"summarization": {"num_beams": 4, "no_repeat_ngram_size": 1}}},
]
MODELS = [
    *(pytest.param(ENCODER_DECODERS[family], id=family) for family in ("bart", "t5")),
    pytest.param(ENCODER_DECODERS["marian"], id="marian", marks=pytest.mark.exhaustive),
    pytest.param(DECODERS["llama"], id="llama"),
]


@pytest.mark.reference
@pytest.mark.parametrize("configs", MODELS)
def test_settings_in_config_json_give_the_tokens_of_transformers(configs: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from .. import huggingface

    folder = huggingface.save(huggingface.build_model(next(iter(configs.values())), seed=7), tmp_path)
    (folder / "generation_config.json").unlink()
    path = folder / "config.json"
    plain = json.loads(path.read_text())
    texts = []
    for fields in ({}, *SETTINGS):
        path.write_text(json.dumps(plain | fields))
        seq2seq = "decoder_start_token_id" in plain
        kind = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
        model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        limit = {} if "max_length" in fields else {"max_new_tokens": 10}
        theirs = model.generate(torch.tensor([SOURCE]), **limit)[0].tolist()[1 if seq2seq else len(SOURCE) :]
        with Engine(folder, backend="numpy", progress=False) as engine:
            ours = engine.generate(SOURCE, **limit).token_ids
        assert ours == theirs, fields
        texts.append(ours)
    assert len({tuple(text) for text in texts}) > 5  # they have an effect


@pytest.mark.reference
def test_every_field_of_transformers_is_read_as_it_reads_it() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = set(vars(transformers.GenerationConfig()))
    assert FIELDS.keys() - theirs == OWN_FIELDS
    assert theirs <= FIELDS.keys() | WORDS[TRANSFORMERS].keys()
    numbers: dict[str, Any] = {"num_beams": 4, "top_k": 7, "max_length": 33, "forced_eos_token_id": 3, "top_p": 0.5}
    for raw in (
        numbers | {"hidden_size": 5, "seed": 4, "max_new_tokens": None},
        {"text_config": numbers, "num_beams": 2, "top_p": None},
        {"generator": numbers, "text_config": {"num_beams": 9}, "decoder": {}},
        numbers | {"force_bos_token_to_be_generated": True, "bos_token_id": 6, "forced_bos_token_id": 8},
        {"force_bos_token_to_be_generated": True},
    ):
        read = transformers.GenerationConfig.from_model_config(json.loads(json.dumps(raw)))
        fields = {name: getattr(read, name) for name in theirs - ignored(TRANSFORMERS) - {"_original_object_hash"}}
        assert model_config_fields(raw) == {name: value for name, value in fields.items() if value is not None}


def test_generation_config_json_replaces_all_settings_in_config_json(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, num_beams=4, repetition_penalty=1.5)
    assert open_model(folder).generation_defaults() == {"num_beams": 4, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    assert open_model(folder).generation_defaults() == {"top_k": 3}
    (folder / "generation_config.json").write_text("{}")
    assert open_model(folder).generation_defaults() == {}


def test_what_is_not_supported_is_named_and_a_model_s_own_fields_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, num_beams=2, token_healing=True, constraints=[], use_cache=False, seed_=4)
    with Engine(folder, backend="numpy", progress=False) as engine:
        assert engine.request("Hi").settings.use_cache
    [record] = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "config.json: minillm does not support token_healing;" in record.getMessage()


def test_the_command_line_makes_room_for_the_beams_of_config_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path, num_beams=3, num_return_sequences=3, max_length=9)
    assert run(["generate", "--model", str(folder), "--prompt", "Hi", "--json"]) == 0
    texts = [one["text"] for one in json.loads(capsys.readouterr().out)["completions"]]
    with Engine(folder, max_batch_size=16) as engine:
        assert texts == [one.text for one in engine.generate("Hi").completions]
    assert len(texts) == 3
