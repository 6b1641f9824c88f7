"""Each field by itself: values that it takes, those that are refused, and the field without which it does nothing."""

import dataclasses
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from minillm import PhrasalConstraint
from minillm.decoding.field_values import ByIdentity
from minillm.decoding.fields import FIELDS, NEEDS
from minillm.decoding.sampler_order import LLAMA_CPP, TRANSFORMERS
from minillm.decoding.settings import GenerationConfig
from minillm.decoding.watermark_config import GreenList, SynthId
from minillm.errors import ParameterError

from .settled import CONTEXT, context, settle

PHRASE = PhrasalConstraint([5, 6])


def allow(batch_id: int, token_ids: Any) -> list[int]:
    return [5]


def weigh(token_ids: Any) -> float:
    return -len(token_ids) / 2


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
    "watermarking_config": [
        ({}, GreenList()),
        ({"bias": 1, "seeding_scheme": "selfhash"}, GreenList(bias=1.0, seeding_scheme="selfhash")),
        (["ngram_len=5", "keys=[3, 4]"], SynthId(5, (3, 4))),
    ],
    "max_thinking_tokens": [(0, 0), (500, 500)],
    "thinking_tokens": [(["<t>", "</t>"], ("<t>", "</t>")), ([5, [6, 7]], ((5,), (6, 7)))],
    "xtc_probability": [(0, 0.0), (1, 1.0)],
    "xtc_threshold": [(0, 0.0), (0.5, 0.5)],
    "samplers": [
        (["top_k", "temp"], ("top_k", "temperature")),
        ("min-p;xtc; typical", ("min_p", "xtc", "typ_p")),
        ("kxt", ("top_k", "xtc", "temperature")),
        ("llama.cpp", LLAMA_CPP),
        ("transformers", TRANSFORMERS),
        ("", ()),
    ],
    "dry_multiplier": [(0, 0.0), (0.8, 0.8)],
    "dry_base": [(1, 1.0), (1.75, 1.75)],
    "dry_allowed_length": [(0, 0), (5, 5)],
    "dry_penalty_last_n": [(-1, -1), (64, 64)],
    "dry_sequence_breakers": [(".", (".",)), (["a", "\n"], ("a", "\n")), ([], ())],
    "guided_json": [({"type": "null"}, '{"type": "null"}'), ('{"b":1,\n"a":2}', '{"b": 1, "a": 2}'), ({}, "{}")],
    "guided_regex": [("a*", "a*")],
    "guided_grammar": [("start: A", "start: A")],
    "guided_choice": [("a", ("a",)), (["b", "a", "b"], ("b", "a"))],
    "num_return_sequences": [(1, 1)],
    "eos_token_id": [(0, (0,)), ([99, 1, 99], (99, 1)), (np.int64(3), (3,)), ((), ())],
    "stop_strings": [("ab", ("ab",)), (["a", "b", "a"], ("a", "b")), ([], ())],
    "include_stop": [(True, True), (False, False)],
    "num_beams": [(1, 1), (9, 9)],
    "strategy": [("ranked", "ranked")],
    "strategy_options": [({"a": [1, "b"]}, (("a", (1, "b")),)), (["a=1", "b=c"], (("a", 1), ("b", "c"))), ({}, ())],
    "length_penalty": [(-1, -1.0), (0.0, 0.0)],
    "early_stopping": [(True, True), (False, False), ("never", "never")],
    "num_beam_groups": [(1, 1)],
    "diversity_penalty": [(1, 1.0), (0.3, 0.3)],
    "num_particles": [(0, 0)],
    "potential": [(weigh, ByIdentity(weigh))],
    "ess_threshold": [(0, 0.0), (1, 1.0), (0.3, 0.3)],
    "penalty_alpha": [(0, 0.0), (0.0, 0.0)],
    "force_words_ids": [([[5, 6], [[7], [8, 9]]], (((5, 6),), ((7,), (8, 9)))), ([], ())],
    "force_words": [("a", (("a",),)), (["a", ["b", "c"]], (("a",), ("b", "c"))), ([], ())],
    "constraints": [([PHRASE], (ByIdentity(PHRASE),)), ([], ())],
    "lora": [("sql", "sql")],
    "use_cache": [(True, True), (False, False)],
    "logprobs": [(True, True), (False, False)],
    "top_logprobs": [(0, 0), (100, 100)],
    "echo": [(True, True), (False, False)],
    "skip_special_tokens": [(True, True), (False, False)],
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
    "encoder_no_repeat_ngram_size": [(0, 0), (3, 3)],
    "encoder_repetition_penalty": [(0.1, 0.1), (2, 2.0)],
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
    "stopping_criteria": [([allow], (ByIdentity(allow),)), ([], ())],
    "renormalize_logits": [(True, True), (False, False)],
    "prompt_lookup_num_tokens": [(0, 0), (10, 10)],
    "max_matching_ngram_size": [(1, 1), (3, 3)],
    "lookahead_window": [(0, 0), (7, 7)],
    "lookahead_ngram_size": [(2, 2), (5, 5)],
    "lookahead_guesses": [(1, 1), (9, 9)],
    "num_assistant_tokens": [(0, 0), (8, 8)],
    "contrastive_alpha": [(0, 0.0), (1, 1.0)],
    "amateur_temperature": [(1e-8, 1e-8), (2, 2.0)],
    "decoder_prompt": [("ab", "ab"), ("", ""), ([5, np.int64(6)], (5, 6)), ([], ())],
    "decoder_start_token_id": [(0, 0), (np.int64(99), 99)],
}
NOT_WHOLE: list[Any] = [True, 1.0, "1", [1], math.nan]
NOT_A_NUMBER: list[Any] = [True, "0.7", [0.5], math.nan, math.inf, -math.inf, 10**400, -1e31, 1j]
NOT_A_FLAG: list[Any] = [1, 0, "true", 1.0]
INVALID: dict[str, list[Any]] = {
    "max_new_tokens": [-1, *NOT_WHOLE],  # and 0 without echo
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
    "watermarking_config": [
        *(5, "a", [5], {"a": 1}, {"bias": "x"}, {"greenlist_ratio": 1.0}, {"seeding_scheme": "right"}),
        *({"ngram_len": 5}, {"ngram_len": 1, "keys": [1]}, {"ngram_len": 5, "keys": []}, {"bias": 1, "keys": [1]}),
    ],
    "max_thinking_tokens": [-1, *NOT_WHOLE],
    "thinking_tokens": [5, "ab", ["a"], ["a", ""], [5, []], ["a", "b", "c"], [-1, 5], [[["a"]], 5]],
    "xtc_probability": [-0.1, 1.1, *NOT_A_NUMBER],
    "xtc_threshold": [-0.1, 0.6, *NOT_A_NUMBER],
    "samplers": [5, [5], "top_k;top_k", ["top_q"], "kk", {"top_k"}],
    "dry_multiplier": [-0.1, *NOT_A_NUMBER],
    "dry_base": [0.9, *NOT_A_NUMBER],
    "dry_allowed_length": [-1, *NOT_WHOLE],
    "dry_penalty_last_n": [-2, *NOT_WHOLE],
    "dry_sequence_breakers": ["", ["a", ""], 5, [5], b"a"],
    "guided_json": [[], "", "{", "[1]", True, {"a": {1}}, {"a": math.nan}, '{"a":' * 100_000],
    "guided_regex": ["", 5, ["a"], b"a"],
    "guided_grammar": ["", 5, ["start: A"]],
    "guided_choice": [[], "", ["a", ""], 5, [5], {"a"}],
    "num_return_sequences": [0, -1, 2, *NOT_WHOLE],
    "eos_token_id": [-1, 100, [5, 100], True, 2.0, "</s>", [2.0], {2}, np.eye(9)],
    "stop_strings": ["", ["a", ""], 5, [5], b"a", {"a"}],
    "include_stop": NOT_A_FLAG,
    "num_beams": [0, *NOT_WHOLE],
    "strategy": ["", 5, ["a"], b"a"],
    "strategy_options": [5, "a", ["a"], {5: 1}, {"": 1}, {"a": {}}],
    "length_penalty": [51, *NOT_A_NUMBER],
    "early_stopping": [1, "always", 1.0],
    "num_beam_groups": [0, 2, *NOT_WHOLE],
    "diversity_penalty": [0.0, -1.0, *NOT_A_NUMBER],
    "force_words_ids": [5, [5], [[]], [[[5], []]], [["a"]], [[[5], [5, 6]]], [[100]], [[-1]], "ab"],
    "force_words": [5, "", [""], [[]], [[5]], [["a", [""]]], {"a"}],
    "constraints": [5, [5], [[5, 6]], [type(PHRASE)], PHRASE, "ab"],
    "num_particles": [-1, 4, *NOT_WHOLE],
    "potential": [5, [weigh], lambda: 0, lambda ids, text, more: 0, type(PHRASE), "no such potential"],
    "ess_threshold": [-0.1, 1.1, *NOT_A_NUMBER],
    "penalty_alpha": [-0.1, 1.1, 0.5, *NOT_A_NUMBER],
    "lora": ["", 5, ["a"], b"a"],
    "use_cache": NOT_A_FLAG,
    "logprobs": NOT_A_FLAG,
    "top_logprobs": [-1, 101, *NOT_WHOLE],
    "echo": NOT_A_FLAG,
    "skip_special_tokens": NOT_A_FLAG,
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
    "encoder_no_repeat_ngram_size": [-1, *NOT_WHOLE],
    "encoder_repetition_penalty": [0, -1.0, *NOT_A_NUMBER],
    "bad_words_ids": [[5], [[]], [["a"]], "ab", [[100]], [[5, -1]], [[2]]],
    "prefix_allowed_tokens_fn": [5, [allow], lambda batch_id: [5], processor],
    "forced_bos_token_id": [-1, 100, [5], *NOT_WHOLE],
    "forced_eos_token_id": [-1, 100, [5, 100], True, 2.0, "</s>"],
    "exponential_decay_length_penalty": [5, (1,), (1, 2, 3), (1.5, 2), (-1, 2), (1, 0), (1, math.inf)],
    "suppress_tokens": [[-1], [100], [True], 2.0, "ab", range(100)],
    "begin_suppress_tokens": [[-1], [100], [True], 2.0, "ab"],
    "logits_processor": [processor, [5], [lambda logits: logits]],
    "stopping_criteria": [allow, [5], [lambda ids: True], [processor], "stop"],
    "renormalize_logits": NOT_A_FLAG,
    "prompt_lookup_num_tokens": [-1, *NOT_WHOLE],
    "max_matching_ngram_size": [0, *NOT_WHOLE],
    "lookahead_window": [-1, *NOT_WHOLE],
    "lookahead_ngram_size": [1, *NOT_WHOLE],
    "lookahead_guesses": [0, *NOT_WHOLE],
    "num_assistant_tokens": [-1, *NOT_WHOLE],
    "contrastive_alpha": [-0.1, 1.1, *NOT_A_NUMBER],
    "amateur_temperature": [0, -1.0, *NOT_A_NUMBER],
    "decoder_prompt": [5, [-1], [5, "a"], ["a"], b"a", True, {5}],
    "decoder_start_token_id": [-1, 100, [5], *NOT_WHOLE],
}


@pytest.mark.parametrize("name", FIELDS)
def test_valid_values_arrive_with_their_type(name: str) -> None:
    for value, expected in VALID[name]:
        got = getattr(settle(**context(name) | {name: value}), name)
        assert (got, type(got)) == (expected, type(expected))


@pytest.mark.parametrize("name", FIELDS)
def test_values_that_are_json_may_come_as_json(name: str) -> None:
    for value, expected in VALID[name]:
        try:
            fields = json.loads(json.dumps({name: value}))
        except TypeError:  # functions, keys of tuples, numbers of NumPy
            continue
        sent = GenerationConfig.from_dict(fields)
        assert getattr(settle(**context(name) | {name: getattr(sent, name)}), name) == expected


@pytest.mark.sampled(8)
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


# Fields that need another ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FIELDS if FIELDS[name].needs])
def test_a_field_without_effect_is_refused_with_both_names(name: str) -> None:
    needs = NEEDS.get(str(FIELDS[name].needs), FIELDS[name].needs).partition(":")[0]
    for value in (VALID[name][0][0], FIELDS[name].default):  # its neutral value is no exception
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
    assert set(CONTEXT) == {setting.needs for setting in FIELDS.values()} - {None}
    assert set(NEEDS) <= set(CONTEXT)


# Texts ----------------------------------------------------------------------------------------------------------------

TEXTS = ["stop_strings", "guided_regex", "guided_grammar", "guided_choice", "guided_json"]


def text_for(name: str, content: str) -> Any:
    """A value of the field that holds a text."""
    return {"const": content} if name == "guided_json" else content


@pytest.mark.parametrize("name", TEXTS)
def test_half_a_surrogate_pair_is_no_text(name: str) -> None:
    values = [text_for(name, "a\udc80b")]
    values += [["a", "\ud800"]] if name in ("stop_strings", "guided_choice") else []
    values += ['{"const": "\\ud800"}', {"\ud800": {}}] if name == "guided_json" else []
    for value in values:
        with pytest.raises(ParameterError, match=rf"^{name}=.* is '.ud[8c][80]0', half a surrogate pair") as error:
            settle(**{name: value})
        assert str(error.value).isprintable()


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_not_too_long(name: str) -> None:
    settle(**{name: text_for(name, "a" * 99_000)})
    with pytest.raises(ParameterError, match=f"^{name}=.* has 100[0-9]{{3}} characters, and may have 100000$") as error:
        settle(**{name: text_for(name, "a" * 100_001)})
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", ["stop_strings", "guided_choice"])
def test_texts_are_not_too_many_nor_together_too_long(name: str) -> None:
    settle(**{name: [f"{i:09}" for i in range(10_000)]})
    with pytest.raises(ParameterError, match=f"^{name}=.* there are 10001 texts, and may be 10000$"):
        settle(**{name: [str(i) for i in range(10_001)]})
    with pytest.raises(ParameterError, match=f"^{name}=.* have 100010 characters together, and may have 100000$"):
        settle(**{name: [f"{i:010001}" for i in range(10)]})


@pytest.mark.parametrize("name", ["top_k", "seed", "max_new_tokens", "num_beams", "guided_json", "suppress_tokens"])
def test_a_number_that_python_does_not_write_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ParameterError, match=rf"{name}=.*(<int>|<list>|expected)") as raised:
        settle(**{name: [-(10**5000)] if name == "suppress_tokens" else -(10**5000)})
    assert len(str(raised.value)) < 300
