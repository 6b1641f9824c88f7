"""What users and checkpoints may ask for, what it becomes, and what is refused in which words."""

import copy
import dataclasses
import itertools
import math
import pickle
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from minillm.decoding.fields import NEEDS, NO_MEANING, NOT_OFFERED, RULES
from minillm.decoding.parameters import GenerationConfig, Settings
from minillm.decoding.readers import ByIdentity
from minillm.decoding.resolving import resolve
from minillm.errors import ParameterError

FIELDS = [field.name for field in dataclasses.fields(GenerationConfig)]
CONTEXT: dict[str, dict[str, Any]] = {
    "do_sample": {"do_sample": True},
    "num_beams": {"num_beams": 4},
    "num_beam_groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "stop_strings": {"stop_strings": "."},
    "mirostat": {"do_sample": True, "mirostat": 2},
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
    config = GenerationConfig.from_dict({"temperature": 0.5, "do_sample": True, "max_time": None, "top_k": None})
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


def allow(batch_id: int, token_ids: Any) -> list[int]:
    return [5]


def processor(history: Any, logits: Any, xp: Any) -> Any:
    return logits


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
    "guided_json": [({"type": "null"}, '{"type": "null"}'), ('{"b":1,\n"a":2}', '{"b": 1, "a": 2}'), ({}, "{}")],
    "guided_regex": [("a*", "a*")],
    "guided_grammar": [("start: A", "start: A")],
    "guided_choice": [("a", ("a",)), (["b", "a", "b"], ("b", "a"))],
    "num_return_sequences": [(1, 1)],
    "eos_token_id": [(0, (0,)), ([99, 1, 99], (99, 1)), (np.int64(3), (3,)), ((), ())],
    "stop_strings": [("ab", ("ab",)), (["a", "b", "a"], ("a", "b")), ([], ())],
    "include_stop": [(True, True), (False, False)],
    "num_beams": [(1, 1), (9, 9)],
    "length_penalty": [(-1, -1.0), (0.0, 0.0)],
    "early_stopping": [(True, True), (False, False), ("never", "never")],
    "num_beam_groups": [(1, 1)],
    "diversity_penalty": [(1, 1.0), (0.3, 0.3)],
    "penalty_alpha": [(0, 0.0), (0.0, 0.0)],
    "use_cache": [(True, True), (False, False)],
    "logprobs": [(True, True), (False, False)],
    "top_logprobs": [(0, 0), (100, 100)],
    "echo": [(True, True), (False, False)],
    "top_h": [(0.4, 0.4), (1, 1.0)],
    "top_n_sigma": [(0, 0.0), (1, 1.0)],
    "typical_p": [(1e-9, 1e-9), (1, 1.0)],
    "epsilon_cutoff": [(0, 0.0), (3e-4, 3e-4)],
    "eta_cutoff": [(0, 0.0), (3e-4, 3e-4)],
    "mirostat": [(2, 2), (0, 0)],
    "mirostat_tau": [(3, 3.0)],
    "mirostat_eta": [(0.2, 0.2)],
    "sequence_bias": [
        ([[[10, 45], -2.0], [[64], 7]], (((10, 45), -2.0), ((64,), 7.0))),
        ({(10, 45): -math.inf}, (((10, 45), -math.inf),)),
        ([[[1], 2], [[1], 3]], (((1,), 3.0),)),
        ([], ()),
    ],
    "no_repeat_ngram_size": [(0, 0), (3, 3)],
    "bad_words_ids": [([[5], [6, 7], [2]], ((5,), (6, 7))), ([[2, 2]], ((2, 2),)), ([], ())],
    "prefix_allowed_tokens_fn": [(allow, ByIdentity(allow))],
    "forced_bos_token_id": [(0, 0), (np.int64(99), 99)],
    "forced_eos_token_id": [(0, (0,)), ([99, 1], (99, 1))],
    "exponential_decay_length_penalty": [((15, 1.5), (15, 1.5)), ([0, 2], (0, 2.0))],
    "suppress_tokens": [([5, 6, 5], (5, 6)), ([], ())],
    "begin_suppress_tokens": [([5, 6, 5], (5, 6)), ([], ())],
    "logits_processor": [
        ([processor], (ByIdentity(processor),)),
        ((processor, max), (ByIdentity(processor), ByIdentity(max))),
        ([], ()),
    ],
    "renormalize_logits": [(True, True), (False, False)],
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
    "guided_json": [[], "", "{", "[1]", True, {"a": {1}}, {"a": math.nan}, '{"a":' * 100_000],
    "guided_regex": ["", 5, ["a"], b"a"],
    "guided_grammar": ["", 5, ["start: A"]],
    "guided_choice": [[], "", ["a", ""], 5, [5], {"a"}],
    "num_return_sequences": [0, -1, 2, *NOT_WHOLE],
    "eos_token_id": [-1, 100, [5, 100], True, 2.0, "</s>", [2.0], {2}, np.eye(9)],
    "stop_strings": ["", ["a", ""], 5, [5], b"a", {"a"}],
    "include_stop": NOT_A_FLAG,
    "num_beams": [0, *NOT_WHOLE],
    "length_penalty": [51, *NOT_A_NUMBER],
    "early_stopping": [1, "always", 1.0],
    "num_beam_groups": [0, 2, *NOT_WHOLE],
    "diversity_penalty": [0.0, -1.0, *NOT_A_NUMBER],
    "penalty_alpha": [-0.1, 1.1, 0.5, *NOT_A_NUMBER],
    "use_cache": NOT_A_FLAG,
    "logprobs": NOT_A_FLAG,
    "top_logprobs": [-1, 101, *NOT_WHOLE],
    "echo": NOT_A_FLAG,
    "top_h": [0.0, 1.1, *NOT_A_NUMBER],
    "top_n_sigma": [-0.1, *NOT_A_NUMBER],
    "typical_p": [0.0, 1.1, *NOT_A_NUMBER],
    "epsilon_cutoff": [-0.1, 1, *NOT_A_NUMBER],
    "eta_cutoff": [-0.1, 1, *NOT_A_NUMBER],
    "mirostat": [1, 3, -1, *NOT_WHOLE],
    "mirostat_tau": [0, *NOT_A_NUMBER],
    "mirostat_eta": [0, *NOT_A_NUMBER],
    "sequence_bias": [
        5,
        [5],
        [[5, 1.0]],
        [[[], 1.0]],
        [[[5], math.nan]],
        [[[5], math.inf]],
        [[[5]]],
        {5: 1.0},
        [[[100], 1.0]],
        [[[-1], 1.0]],
    ],
    "no_repeat_ngram_size": [-1, *NOT_WHOLE],
    "bad_words_ids": [[5], [[]], [["a"]], "ab", [[100]], [[5, -1]], [[2]]],
    "prefix_allowed_tokens_fn": [5, [allow], lambda batch_id: [5], processor],
    "forced_bos_token_id": [-1, 100, [5], *NOT_WHOLE],
    "forced_eos_token_id": [-1, 100, [5, 100], True, 2.0, "</s>"],
    "exponential_decay_length_penalty": [5, (1,), (1, 2, 3), (1.5, 2), (-1, 2), (1, 0), (1, math.inf)],
    "suppress_tokens": [[-1], [100], [True], 2.0, "ab", range(100)],
    "begin_suppress_tokens": [[-1], [100], [True], 2.0, "ab"],
    "logits_processor": [processor, [5], [lambda history, logits: logits]],
    "renormalize_logits": NOT_A_FLAG,
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


def test_beams_may_sample() -> None:
    settings = settle(num_beams=4, do_sample=True, num_return_sequences=4)
    assert (settings.num_beams, settings.do_sample, settings.top_k) == (4, True, 50)
    with pytest.raises(ParameterError, match="num_return_sequences=5 is more than num_beams=4"):
        settle(num_beams=4, do_sample=True, num_return_sequences=5)


GROUPS = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}


def test_groups_of_beams() -> None:
    settings = settle(**GROUPS)
    assert (settings.num_beams, settings.num_beam_groups, settings.diversity_penalty) == (4, 2, 0.5)
    for change, message in (
        ({"num_beam_groups": 3}, "num_beam_groups=3 does not divide num_beams=4"),
        ({"num_beams": 1}, "num_beam_groups=2 does not divide num_beams=1"),
        ({"do_sample": True}, "num_beam_groups=2 with do_sample=True"),
        ({"diversity_penalty": None}, "num_beam_groups=2 needs a diversity_penalty"),
        ({"num_beam_groups": None}, "diversity_penalty=0.5 has no effect without num_beam_groups above 1"),
        ({"num_return_sequences": 5}, "num_return_sequences=5 is more than num_beams=4"),
    ):
        with pytest.raises(ParameterError, match=message):
            settle(**GROUPS | change)


def test_contrastive_search() -> None:
    settings = settle(penalty_alpha=0.6, top_k=4)
    assert (settings.penalty_alpha, settings.top_k, settings.do_sample) == (0.6, 4, False)
    for fields, message in (
        ({}, "penalty_alpha=0.6 needs top_k, .*; none is set"),
        ({"top_k": 1}, "penalty_alpha=0.6 needs top_k, .* at least 2; found 1"),
        ({"top_k": 4, "do_sample": True}, "penalty_alpha=0.6 with do_sample=True"),
        ({"top_k": 4, "num_beams": 2}, "penalty_alpha=0.6 with num_beams=2"),
        ({"top_k": 4, "num_return_sequences": 2}, "num_return_sequences=2 is more than num_beams=1"),
        ({"top_k": 4, "temperature": 0.5}, "temperature=0.5 has no effect without do_sample=True"),
    ):
        with pytest.raises(ParameterError, match=message):
            settle(penalty_alpha=0.6, **fields)
    with pytest.raises(ParameterError, match="top_k=4 has no effect without do_sample=True"):
        settle(penalty_alpha=0, top_k=4)


CHECKPOINTS: list[tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]] = [
    (GROUPS | {"penalty_alpha": 0.6}, {}, (4, 2, 0.5, 0.0, False)),
    (GROUPS, {"do_sample": True}, (4, 1, 0.0, 0.0, True)),
    (GROUPS, {"num_beams": 3}, (3, 1, 0.0, 0.0, False)),
    (GROUPS, {"penalty_alpha": 0.6, "top_k": 4}, (1, 1, 0.0, 0.6, False)),
    ({"do_sample": True}, GROUPS, (4, 2, 0.5, 0.0, False)),
    ({"do_sample": True, "num_beams": 3}, {"penalty_alpha": 0.6, "top_k": 4}, (1, 1, 0.0, 0.6, False)),
    ({"penalty_alpha": 0.6, "top_k": 4}, {}, (1, 1, 0.0, 0.6, False)),
    ({"penalty_alpha": 0.6}, {}, (1, 1, 0.0, 0.0, False)),
    ({"penalty_alpha": 0.6, "top_k": 4}, {"do_sample": True}, (1, 1, 0.0, 0.0, True)),
    ({"penalty_alpha": 0.6, "top_k": 4}, {"num_beams": 2}, (2, 1, 0.0, 0.0, False)),
    ({"diversity_penalty": 0.0, "num_beam_groups": 1}, {"num_beams": 2}, (2, 1, 0.0, 0.0, False)),
]


@pytest.mark.parametrize(("defaults", "said", "expected"), CHECKPOINTS)
def test_the_users_strategy_wins_over_the_checkpoints(defaults: dict, said: dict, expected: tuple) -> None:
    names = ("num_beams", "num_beam_groups", "diversity_penalty", "penalty_alpha", "do_sample")
    settings = settle(defaults, **said)
    assert tuple(getattr(settings, name) for name in names) == expected


BESIDE_MIROSTAT = {
    "num_beams": 4,
    "top_h": 0.5,
    "top_n_sigma": 1,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
}


@pytest.mark.parametrize("name", BESIDE_MIROSTAT)
def test_mirostat_is_alone(name: str) -> None:
    said = {name: BESIDE_MIROSTAT[name]}
    with pytest.raises(ParameterError, match=f"^{name}=.* with (mirostat=2|do_sample=True)"):
        settle(do_sample=True, mirostat=2, **said)
    inherited = {"do_sample": True, "mirostat": 2}
    if name != "num_beams":
        assert settle(inherited, **said).mirostat == 0
        assert settle(said, do_sample=True, mirostat=2).mirostat == 2


def test_mirostat_takes_the_place_of_every_other_truncation() -> None:
    settings = settle(do_sample=True, mirostat=2, temperature=0.7, top_k=0, top_p=1.0)
    assert (settings.mirostat, settings.mirostat_tau, settings.mirostat_eta) == (2, 5.0, 0.1)
    assert (settings.temperature, settings.top_k, settings.top_p) == (0.7, 0, 1.0)
    assert settle(do_sample=True, mirostat=2).top_k == 0
    with pytest.raises(ParameterError, match=r"^mirostat=2 has no effect without do_sample=True"):
        settle(mirostat=2)
    with pytest.raises(ParameterError, match=r"^mirostat_tau=3 has no effect without mirostat=2"):
        settle(do_sample=True, mirostat_tau=3)
    with pytest.raises(ParameterError, match=r"^mirostat_tau=3 has no effect without mirostat=2"):
        settle(do_sample=True, mirostat=0, mirostat_tau=3)


def test_ids_outside_the_vocabulary_in_the_checkpoint_never_match() -> None:
    settings = settle(
        {
            "sequence_bias": [[[5], 1.0], [[5, 100], 1.0]],
            "bad_words_ids": [[2], [100], [7]],
            "suppress_tokens": [100, 9],
            "forced_bos_token_id": 100,
            "forced_eos_token_id": 100,
            "exponential_decay_length_penalty": [1, 2.0],
        },
        eos=None,
        eos_token_id=2,
    )
    assert (settings.sequence_bias, settings.bad_words_ids) == ((((5,), 1.0),), ((7,),))
    assert (settings.suppress_tokens, settings.forced_bos_token_id, settings.forced_eos_token_id) == ((9,), None, ())


def test_what_needs_an_end_is_refused_without_one() -> None:
    with pytest.raises(ParameterError, match=r"^exponential_decay_length_penalty=.* without eos_token_id"):
        settle(eos=None, exponential_decay_length_penalty=(1, 2.0))
    with pytest.raises(ParameterError, match=r"^bad_words_ids=.*eos_token_id"):
        settle(bad_words_ids=[[2]])


def test_settings_with_functions_are_equal_when_the_functions_are_the_same() -> None:
    first, again = (settle(logits_processor=[processor], prefix_allowed_tokens_fn=allow) for _ in range(2))
    assert (
        len(
            {
                first,
                again,
                settle(logits_processor=[lambda history, logits, xp: logits], prefix_allowed_tokens_fn=allow),
            }
        )
        == 2
    )


GUIDES = {"guided_json": {}, "guided_regex": "a*", "guided_grammar": "start: A", "guided_choice": ["abc", "b"]}


@pytest.mark.parametrize("name", GUIDES)
def test_a_text_has_one_guide_and_can_end(name: str) -> None:
    for other in set(GUIDES) - {name}:
        with pytest.raises(ParameterError, match=f"(?=.*{name}=)(?=.*{other}=).*one guide"):
            settle(**{name: GUIDES[name], other: GUIDES[other]})
        assert settle({other: GUIDES[other]}, **{name: GUIDES[name]}).guide[0] == name  # type: ignore[index]
    for eos, said in ((None, {}), (2, {"eos_token_id": ()})):
        with pytest.raises(ParameterError, match=f"{name} needs an eos_token_id"):
            settle(eos=eos, **{name: GUIDES[name]}, **said)
    hash(settle(**{name: GUIDES[name]}))
    assert settle().guide is None


def test_more_tokens_than_any_choice_has() -> None:
    with pytest.raises(ParameterError, match=r"min_new_tokens=4 is more than the longest guided_choice .*\(3\)"):
        settle(guided_choice=["abc", "b"], min_new_tokens=4)
    assert settle(guided_choice=["aé", "b"], min_new_tokens=3).min_new_tokens == 3
    assert settle({"min_new_tokens": 4}, guided_choice=["abc"]).min_new_tokens == 4


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
