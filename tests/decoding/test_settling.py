"""Combinations of fields: which exclude or bound each other, and which takes precedence."""

import itertools
import re
from typing import Any

import pytest

from minillm.decoding.resolving import new_token_limit
from minillm.errors import ParameterError

from .settled import settle

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
    for user, expected in (({}, (6, nothing)), ({first: 5}, (5, nothing)), ({second: 9}, (nothing, 9))):
        settings = settle(both, **user)
        assert (getattr(settings, first), getattr(settings, second)) == expected


def test_new_token_limit() -> None:
    assert new_token_limit(settle(), 7) == 20
    assert new_token_limit(settle(max_length=30), 7) == 23
    with pytest.raises(ParameterError, match=r"max_length=7 .* the prompt has 7"):
        new_token_limit(settle(max_length=7), 7)


def test_minima_that_the_maxima_forbid() -> None:
    with pytest.raises(ParameterError, match="min_new_tokens=21 is more than max_new_tokens=20"):
        settle(min_new_tokens=21)
    with pytest.raises(ParameterError, match="min_length=31 is more than max_length=30"):
        settle(min_length=31, max_length=30)
    with pytest.raises(ParameterError, match=r"min_length=30 .* max_new_tokens=20 allows 20"):
        new_token_limit(settle(min_length=30), 9)
    with pytest.raises(ParameterError, match=r"min_new_tokens=22 .* max_length=30 allows 21"):
        new_token_limit(settle(min_new_tokens=22, max_length=30), 9)
    assert new_token_limit(settle(min_length=30), 10) == 20


def test_minima_of_the_checkpoint_are_not_an_error() -> None:
    assert new_token_limit(settle({"min_new_tokens": 56}, max_new_tokens=5), 9) == 5
    assert new_token_limit(settle({"min_length": 56}), 9) == 20
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


@pytest.mark.parametrize(("defaults", "user", "expected"), CHECKPOINTS)
def test_the_users_strategy_wins_over_the_checkpoints(defaults: dict, user: dict, expected: tuple) -> None:
    names = ("num_beams", "num_beam_groups", "diversity_penalty", "penalty_alpha", "do_sample")
    settings = settle(defaults, **user)
    assert tuple(getattr(settings, name) for name in names) == expected


@pytest.mark.parametrize(
    ("checkpoint", "user", "message"),
    [
        ({"num_beams": 4, "diversity_penalty": 0.5}, {"num_beam_groups": 2}, "num_beam_groups=2 does not divide"),
        ({"penalty_alpha": 0.6}, {"top_k": 4}, "top_k=4 has no effect without do_sample=True"),
        ({"num_beams": 4}, {"length_penalty": 2.0}, "length_penalty=2.0 has no effect without num_beams above 1"),
    ],
)
def test_what_the_user_sets_beside_a_dropped_strategy_is_refused(checkpoint: dict, user: dict, message: str) -> None:
    """The draft model wins over the checkpoint's beams or contrastive search, to which the user's field belongs."""
    assert settle(checkpoint, **user).explicit == user.keys()
    with pytest.raises(ParameterError, match=message):
        settle(checkpoint, models=("draft",), **user)


def test_mirostat_wins_over_the_checkpoints_beams_and_the_users_over_its_other_searches() -> None:
    assert settle({"num_beams": 4, "mirostat": 2, "do_sample": True}).mirostat == 2
    assert settle({"lookahead_window": 5, "mirostat": 2, "do_sample": True}).lookahead_window == 5
    for checkpoint in ({"prompt_lookup_num_tokens": 5}, {"lookahead_window": 5}, GROUPS, {"num_beams": 4}):
        settings = settle(checkpoint, do_sample=True, mirostat=2)
        assert (settings.mirostat, settings.num_beams, settings.num_beam_groups) == (2, 1, 1)
        assert (settings.prompt_lookup_num_tokens, settings.lookahead_window) == (0, 0)
    with pytest.raises(ParameterError, match=r"length_penalty=2\.0 has no effect without num_beams above 1"):
        settle({"num_beams": 4}, do_sample=True, mirostat=2, length_penalty=2.0)
    with pytest.raises(ParameterError, match="num_assistant_tokens=5 with mirostat=2"):
        settle(models=("draft",), do_sample=True, mirostat=2)


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
    "xtc_probability": 0.5,
    "samplers": "top_k",
}


def test_an_order_names_what_the_user_sets_and_the_checkpoints_others_give_way() -> None:
    order = ["penalties", "min_p", "temperature"]
    for name, value in {"top_k": 50, "top_p": 0.9, "xtc_probability": 0.5, "dry_multiplier": 0.8}.items():
        with pytest.raises(ParameterError, match=f"^{name}=.* has no effect: samplers does not name"):
            settle(do_sample=True, samplers=order, **{name: value})
    settings = settle({"top_p": 0.9, "top_k": 20}, do_sample=True, samplers=order, top_k=0, typical_p=1.0)
    assert (settings.top_p, settings.samplers) == (1.0, tuple(order))


@pytest.mark.parametrize("name", BESIDE_MIROSTAT)
def test_mirostat_is_alone(name: str) -> None:
    user = {name: BESIDE_MIROSTAT[name]}
    with pytest.raises(ParameterError, match=f"^{name}=.* with (mirostat=2|do_sample=True)"):
        settle(do_sample=True, mirostat=2, **user)
    checkpoint = {"do_sample": True, "mirostat": 2}
    if name != "num_beams":
        assert settle(checkpoint, **user).mirostat == 0
        assert settle(user, do_sample=True, mirostat=2).mirostat == 2


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


GUIDES = {"guided_json": {}, "guided_regex": "a*", "guided_grammar": "start: A", "guided_choice": ["abc", "b"]}


@pytest.mark.parametrize("name", GUIDES)
def test_a_text_has_one_guide_and_can_end(name: str) -> None:
    for other in set(GUIDES) - {name}:
        with pytest.raises(ParameterError, match=f"(?=.*{name}=)(?=.*{other}=).*one guide"):
            settle(**{name: GUIDES[name], other: GUIDES[other]})
        assert settle({other: GUIDES[other]}, **{name: GUIDES[name]}).guide[0] == name  # type: ignore[index]
    for eos, user in ((None, {}), (2, {"eos_token_id": ()})):
        with pytest.raises(ParameterError, match=f"{name} needs an eos_token_id"):
            settle(eos=eos, **{name: GUIDES[name]}, **user)
    hash(settle(**{name: GUIDES[name]}))
    assert settle().guide is None


def test_more_tokens_than_any_choice_has() -> None:
    with pytest.raises(ParameterError, match=r"min_new_tokens=4 is more than the longest guided_choice .*\(3\)"):
        settle(guided_choice=["abc", "b"], min_new_tokens=4)
    assert settle(guided_choice=["aé", "b"], min_new_tokens=3).min_new_tokens == 3
    assert settle({"min_new_tokens": 4}, guided_choice=["abc"]).min_new_tokens == 4
