"""What users and checkpoints may ask for, what it becomes, and what is refused in which words."""

import copy
import dataclasses
import itertools
import json
import logging
import math
import pickle
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.decoding.fields import NEEDS, NO_MEANING, NOT_OFFERED, RULES
from minillm.decoding.parameters import GenerationConfig, Settings, read_generation_config, resolve
from minillm.errors import CheckpointError, ParameterError

FIELDS = [field.name for field in dataclasses.fields(GenerationConfig)]
CONTEXT: dict[str, dict[str, Any]] = {
    "do_sample": {"do_sample": True},
    "num_beams": {"num_beams": 4},
    "stop_strings": {"stop_strings": "."},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 5},
    "lookahead_window": {"lookahead_window": 5},
    "draft": {"models": ("draft",)},
    "amateur": {"models": ("amateur",)},
}
"""What to set so that a field with `needs` has an effect."""


def settle(defaults: dict[str, Any] | None = None, eos: Any = 2, models: Any = (), **said: Any) -> Settings:
    return resolve(GenerationConfig(**said), defaults or {}, vocab_size=100, eos_token_id=eos, models=models)


def context(name: str) -> dict[str, Any]:
    return {} if RULES[name].needs is None else CONTEXT[RULES[name].needs]


# What is said ---------------------------------------------------------------------------------------------------------


def test_nothing_is_said_unless_set() -> None:
    assert all(getattr(GenerationConfig(), name) is None for name in FIELDS)


def test_fields_rules_and_settings_name_the_same() -> None:
    assert set(FIELDS) == set(RULES)
    settings = {field.name for field in dataclasses.fields(Settings)} - {"explicit", "amateur"}
    assert settings == {"eos_token_ids" if name == "eos_token_id" else name for name in FIELDS}
    assert not set(RULES) & (set(NOT_OFFERED) | NO_MEANING)


def test_from_dict_and_merged() -> None:
    config = GenerationConfig.from_dict({"temperature": 0.5, "do_sample": True, "typical_p": None, "top_k": None})
    assert config == GenerationConfig(temperature=0.5, do_sample=True)
    assert config.merged(temperature=0.7, seed=None, do_sample=None) == GenerationConfig(
        temperature=0.7, do_sample=True
    )
    assert config.temperature == 0.5


def test_a_configuration_is_frozen_and_can_be_copied() -> None:
    config = GenerationConfig(temperature=0.5, stop_strings=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.temperature = 1.0  # type: ignore[misc]
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == dataclasses.replace(config) == config


MAKERS = [
    lambda fields: GenerationConfig(**fields),
    GenerationConfig.from_dict,
    lambda fields: GenerationConfig().merged(**fields),
]


@pytest.mark.parametrize("make", MAKERS, ids=["constructor", "from_dict", "merged"])
def test_unknown_fields_are_refused_by_name(make) -> None:
    with pytest.raises(ParameterError, match=r"'tempurature': did you mean 'temperature'\?"):
        make({"tempurature": 0.5})
    with pytest.raises(ParameterError, match="'zzz': expected one of do_sample, "):
        make({"zzz": None})
    for name in NOT_OFFERED:
        with pytest.raises(ParameterError, match=f"^{name} .* does not do"):
            make({name: 1})
    for name in NO_MEANING:
        with pytest.raises(ParameterError, match=f"^{name} .* means nothing"):
            make({name: 1})


# What it means --------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    settings = settle()
    assert settings.max_new_tokens == 20
    assert settings.max_length is None
    assert (settings.do_sample, settings.num_beams, settings.num_return_sequences) == (False, 1, 1)
    assert settle(do_sample=True).top_k == 50
    assert settings.eos_token_ids == (2,)
    assert settings == settle()
    assert len({settings, settle()}) == 1


def test_the_user_comes_before_the_checkpoint_and_the_checkpoint_before_the_default() -> None:
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [3, 4], "top_k": None}
    settings = settle(defaults, temperature=0.8)
    assert (settings.do_sample, settings.temperature, settings.top_p, settings.top_k) == (True, 0.8, 0.9, 50)
    assert settings.eos_token_ids == (3, 4)
    assert settle(defaults, eos_token_id=7).eos_token_ids == (7,)
    assert settle(defaults, eos_token_id=()).eos_token_ids == ()
    assert settle({"eos_token_id": None}, eos=[5, 6, 5]).eos_token_ids == (5, 6)
    assert settle(eos=None).eos_token_ids == ()
    assert settings.explicit == {"temperature"}


VALID: dict[str, list[tuple[Any, Any]]] = {
    "max_new_tokens": [(1, 1), (np.int64(7), 7)],
    "max_length": [(1, 1), (30, 30)],
    "min_new_tokens": [(0, 0), (20, 20)],
    "min_length": [(0, 0), (500, 500)],
    "do_sample": [(True, True), (False, False)],
    "temperature": [(1e-8, 1e-8), (2, 2.0), (np.float32(0.5), 0.5), (Fraction(1, 2), 0.5)],
    "top_k": [(0, 0), (1, 1), (10**9, 10**9)],
    "top_p": [(1e-9, 1e-9), (1, 1.0)],
    "min_p": [(0, 0.0), (1.0, 1.0)],
    "seed": [(0, 0), (2**64 - 1, 2**64 - 1)],
    "repetition_penalty": [(0.1, 0.1), (2, 2.0)],
    "presence_penalty": [(-2, -2.0), (0.0, 0.0)],
    "frequency_penalty": [(-2, -2.0), (0.0, 0.0)],
    "num_return_sequences": [(1, 1)],
    "eos_token_id": [(0, (0,)), ([99, 1, 99], (99, 1)), (np.int64(3), (3,)), ((), ())],
    "stop_strings": [("ab", ("ab",)), (["a", "b", "a"], ("a", "b")), ([], ())],
    "include_stop": [(True, True), (False, False)],
    "num_beams": [(1, 1), (9, 9)],
    "length_penalty": [(-1, -1.0), (0.0, 0.0)],
    "early_stopping": [(True, True), (False, False), ("never", "never")],
    "use_cache": [(True, True), (False, False)],
    "logprobs": [(True, True), (False, False)],
    "top_logprobs": [(0, 0), (100, 100)],
    "echo": [(True, True), (False, False)],
    "prompt_lookup_num_tokens": [(0, 0), (10, 10)],
    "max_matching_ngram_size": [(1, 1), (3, 3)],
    "lookahead_window": [(0, 0), (7, 7)],
    "lookahead_ngram_size": [(2, 2), (5, 5)],
    "lookahead_guesses": [(1, 1), (9, 9)],
    "num_assistant_tokens": [(0, 0), (8, 8)],
    "contrastive_alpha": [(0, 0.0), (1, 1.0)],
    "amateur_temperature": [(1e-8, 1e-8), (2, 2.0)],
}
NOT_WHOLE: list[Any] = [True, 1.0, "1", [1], math.nan]
NOT_A_NUMBER: list[Any] = [True, "0.7", [0.5], math.nan, math.inf, -math.inf, 10**400, -1e31, 1j]
NOT_A_FLAG: list[Any] = [1, 0, "true", 1.0]
INVALID: dict[str, list[Any]] = {
    "max_new_tokens": [0, -1, *NOT_WHOLE],
    "max_length": [0, *NOT_WHOLE],
    "min_new_tokens": [-1, 21, *NOT_WHOLE],
    "min_length": [-1, *NOT_WHOLE],
    "do_sample": NOT_A_FLAG,
    "temperature": [0, 0.0, -1.0, 1e-40, *NOT_A_NUMBER],
    "top_k": [-1, *NOT_WHOLE],
    "top_p": [0.0, -0.1, 1.1, *NOT_A_NUMBER],
    "min_p": [-0.1, 1.1, *NOT_A_NUMBER],
    "seed": [-1, 2**64, *NOT_WHOLE],
    "repetition_penalty": [0, -1.0, *NOT_A_NUMBER],
    "presence_penalty": NOT_A_NUMBER,
    "frequency_penalty": NOT_A_NUMBER,
    "num_return_sequences": [0, -1, 2, *NOT_WHOLE],
    "eos_token_id": [-1, 100, [5, 100], True, 2.0, "</s>", [2.0], {2}, np.eye(9)],
    "stop_strings": ["", ["a", ""], 5, [5], b"a", {"a"}],
    "include_stop": NOT_A_FLAG,
    "num_beams": [0, *NOT_WHOLE],
    "length_penalty": [51, *NOT_A_NUMBER],
    "early_stopping": [1, "always", 1.0],
    "use_cache": NOT_A_FLAG,
    "logprobs": NOT_A_FLAG,
    "top_logprobs": [-1, 101, *NOT_WHOLE],
    "echo": NOT_A_FLAG,
    "prompt_lookup_num_tokens": [-1, *NOT_WHOLE],
    "max_matching_ngram_size": [0, *NOT_WHOLE],
    "lookahead_window": [-1, *NOT_WHOLE],
    "lookahead_ngram_size": [1, *NOT_WHOLE],
    "lookahead_guesses": [0, *NOT_WHOLE],
    "num_assistant_tokens": [-1, *NOT_WHOLE],
    "contrastive_alpha": [-0.1, 1.1, *NOT_A_NUMBER],
    "amateur_temperature": [0, -1.0, *NOT_A_NUMBER],
}


@pytest.mark.parametrize("name", FIELDS)
def test_valid_values_arrive_with_their_type(name: str) -> None:
    for value, expected in VALID[name]:
        got = getattr(settle(**context(name) | {name: value}), "eos_token_ids" if name == "eos_token_id" else name)
        assert (got, type(got)) == (expected, type(expected))


@pytest.mark.parametrize("name", FIELDS)
def test_invalid_values_are_refused_by_name(name: str) -> None:
    for value in INVALID[name]:
        with pytest.raises(ParameterError) as error:
            settle(**context(name) | {name: value})
        assert name in str(error.value)
        assert "\n" not in str(error.value)


def test_temperature_zero_points_to_greedy_decoding() -> None:
    with pytest.raises(ParameterError, match=r"temperature=0.*for greedy decoding set do_sample=False"):
        settle(do_sample=True, temperature=0)


def test_invalid_values_of_the_checkpoint_are_refused_where_they_apply() -> None:
    with pytest.raises(ParameterError, match=r"top_p=3 \(from the checkpoint\)"):
        settle({"do_sample": True, "top_p": 3})
    assert settle({"top_p": 3}).top_p == 1.0


# Fields that need another ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FIELDS if RULES[name].needs])
def test_a_field_without_effect_is_refused_with_both_names(name: str) -> None:
    needs = NEEDS[str(RULES[name].needs)].words.partition(":")[0]
    for value in (VALID[name][0][0], RULES[name].default):  # its neutral value is no exception
        if value is not None:
            with pytest.raises(ParameterError, match=f"^{name}=.* has no effect without {needs}"):
                settle(**{name: value})


def test_a_field_without_effect_in_the_checkpoint_is_not_an_error() -> None:
    settings = settle({"temperature": 0.6, "top_p": 0.9, "length_penalty": 2.0, "early_stopping": True})
    assert dataclasses.replace(settings) == settle()


@pytest.mark.parametrize("fields", [{"do_sample": False}, {"num_beams": 1}, {"num_return_sequences": 1}])
def test_naming_the_plain_mode_is_allowed(fields: dict[str, Any]) -> None:
    assert settle(**fields) == settle()


def test_the_fields_that_others_need_are_those_with_a_context() -> None:
    assert set(NEEDS) == set(CONTEXT) == {rule.needs for rule in RULES.values()} - {None}


# Ways to find tokens --------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 4},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 5},
    "lookahead_window": {"lookahead_window": 5},
    "num_assistant_tokens": {"models": ("draft",)},
    "amateur": {"models": ("amateur",)},
}


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(WAYS, 2))[:-1])
def test_two_ways_to_find_tokens_are_refused_by_both_names(first: str, second: str) -> None:
    with pytest.raises(ParameterError) as error:
        settle(**WAYS[first] | WAYS[second])
    assert {first, second} <= set(re.findall(r"\w+", str(error.value)))
    assert "\n" not in str(error.value)


def test_a_draft_can_be_left_out_and_wins_over_the_checkpoint() -> None:
    assert settle(models=("draft",), num_assistant_tokens=0, num_beams=4).num_beams == 4
    settings = settle({"num_beams": 4}, models=("draft",))
    assert (settings.num_beams, settings.num_assistant_tokens) == (1, 5)
    assert settle({"num_assistant_tokens": 20}).num_assistant_tokens == 0


# Lengths --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")])
def test_two_names_of_one_limit(first: str, second: str) -> None:
    with pytest.raises(ParameterError, match=f"{first}=5 and {second}=9"):
        settle(**{first: 5, second: 9})
    both = {first: 6, second: 10}
    nothing = {"max": None, "min": 0}[first[:3]]
    for said, expected in (({}, (6, nothing)), ({first: 5}, (5, nothing)), ({second: 9}, (nothing, 9))):
        settings = settle(both, **said)
        assert (getattr(settings, first), getattr(settings, second)) == expected


def test_new_token_limit() -> None:
    assert settle().new_token_limit(7) == 20
    assert settle(max_length=30).new_token_limit(7) == 23
    with pytest.raises(ParameterError, match=r"max_length=7 .* the prompt has 7"):
        settle(max_length=7).new_token_limit(7)


def test_minima_that_the_maxima_forbid() -> None:
    with pytest.raises(ParameterError, match="min_new_tokens=21 is more than max_new_tokens=20"):
        settle(min_new_tokens=21)
    with pytest.raises(ParameterError, match="min_length=31 is more than max_length=30"):
        settle(min_length=31, max_length=30)
    with pytest.raises(ParameterError, match=r"min_length=30 .* max_new_tokens=20 allows 20"):
        settle(min_length=30).new_token_limit(9)
    with pytest.raises(ParameterError, match=r"min_new_tokens=22 .* max_length=30 allows 21"):
        settle(min_new_tokens=22, max_length=30).new_token_limit(9)
    assert settle(min_length=30).new_token_limit(10) == 20


def test_minima_of_the_checkpoint_are_not_an_error() -> None:
    assert settle({"min_new_tokens": 56}, max_new_tokens=5).new_token_limit(9) == 5
    assert settle({"min_length": 56}).new_token_limit(9) == 20
    assert settle({"min_length": 56}, eos=None).min_length == 56


@pytest.mark.parametrize("name", ["min_new_tokens", "min_length"])
def test_a_minimum_needs_a_token_to_hold_back(name: str) -> None:
    with pytest.raises(ParameterError, match=f"{name}=3 has no effect without eos_token_id"):
        settle(eos=None, **{name: 3})


def test_end_of_sequence_ids_of_the_checkpoint_outside_the_vocabulary_never_match() -> None:
    assert settle({"eos_token_id": [3, 100, -1]}).eos_token_ids == (3,)


# Modes ----------------------------------------------------------------------------------------------------------------


def test_results_per_prompt() -> None:
    with pytest.raises(ParameterError, match="num_return_sequences=2 is more than num_beams=1"):
        settle(num_return_sequences=2)
    with pytest.raises(ParameterError, match="num_return_sequences=5 is more than num_beams=4"):
        settle(num_return_sequences=5, num_beams=4)
    assert settle(num_return_sequences=4, num_beams=4).num_return_sequences == 4
    assert settle(num_return_sequences=4, do_sample=True).num_return_sequences == 4
    assert settle({"num_return_sequences": 4}).num_return_sequences == 1


def test_beam_search_does_not_sample(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ParameterError, match="num_beams=4 with do_sample=True"):
        settle(num_beams=4, do_sample=True)
    assert not caplog.records
    for defaults, said, expected in (
        ({"num_beams": 4, "do_sample": True}, {}, (True, 1)),
        ({"num_beams": 4}, {"do_sample": True}, (True, 1)),
        ({"do_sample": True}, {"num_beams": 4}, (False, 4)),
    ):
        caplog.clear()
        settings = settle(defaults, **said)
        assert (settings.do_sample, settings.num_beams) == expected
        assert len(caplog.records) == 1


def test_seeds() -> None:
    assert settle(do_sample=True, seed=5).seed == 5
    fresh = {settle(do_sample=True).seed for _ in range(8)}
    assert len(fresh) == 8
    assert all(0 <= seed < 2**64 for seed in fresh)


def test_log_probabilities() -> None:
    assert (settle(top_logprobs=3).logprobs, settle(top_logprobs=3).top_logprobs) == (True, 3)
    assert not settle(top_logprobs=0).logprobs
    with pytest.raises(ParameterError, match="top_logprobs=3 has no effect with logprobs=False"):
        settle(top_logprobs=3, logprobs=False)


# The checkpoint's file ------------------------------------------------------------------------------------------------


def write(folder: Path, text: str | bytes) -> Path:
    (folder / "generation_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_reading_the_defaults_of_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_generation_config(tmp_path) == {}
    stored = {"_from_model_config": True, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "typical_p": 1.0}
    assert read_generation_config(write(tmp_path, json.dumps(stored))) == stored
    assert not caplog.records


def test_what_is_not_done_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = {"temperature": 0.6, "typical_p": 0.5, "suppress_tokens": [], "forced_eos_token_id": 0, "zzz": 1}
    defaults = read_generation_config(write(tmp_path, json.dumps(stored)))
    settle(defaults)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("minillm", logging.WARNING)
    assert "typical_p, forced_eos_token_id, zzz;" in record.getMessage()


@pytest.mark.parametrize("text", ["", "{", "[1]", b"\xff\xfe{}"], ids=["empty", "cut off", "a list", "not UTF-8"])
def test_an_unreadable_file_is_named(text: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: expected a JSON"):
        read_generation_config(write(tmp_path, text))


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)
