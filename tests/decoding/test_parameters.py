"""Generation fields of users and checkpoints, and the settings resolved from them."""

import copy
import dataclasses
import inspect
import pickle
import re
from collections.abc import Sequence

import pytest

from minillm.decoding.fields import FIELDS, NEEDS
from minillm.decoding.foreign import PYTHON, TRANSFORMERS, WORDS, ignored, refused, renamed
from minillm.decoding.settings import GenerationConfig, Settings
from minillm.errors import ParameterError

from .settled import settle

# What is said ---------------------------------------------------------------------------------------------------------


def test_nothing_is_said_unless_set() -> None:
    assert all(getattr(GenerationConfig(), name) is None for name in FIELDS)


def test_the_repr_has_what_is_set_and_makes_an_equal_configuration() -> None:
    assert repr(GenerationConfig()) == "GenerationConfig()"
    config = GenerationConfig(num_beams=4, stop_strings=["a", "'"], echo=False)
    assert repr(config) == """GenerationConfig(stop_strings=['a', "'"], num_beams=4, echo=False)"""
    assert eval(repr(config)) == config


def test_configuration_and_settings_have_the_declared_fields() -> None:
    assert [field.name for field in dataclasses.fields(GenerationConfig)] == list(FIELDS)
    assert {field.name for field in dataclasses.fields(Settings)} == {*FIELDS, "amateur", "explicit"}
    assert not FIELDS.keys() & WORDS[TRANSFORMERS].keys()


def test_the_docstring_and_the_signature_have_every_field() -> None:
    text = " ".join(str(GenerationConfig.__doc__).split())
    for name, setting in FIELDS.items():
        assert f"{name}: " in text
        assert setting.help in text
        assert setting.needs is None or f"{setting.help}; needs {NEEDS.get(setting.needs, setting.needs)}" in text
    parameters = inspect.signature(GenerationConfig).parameters
    assert list(parameters) == list(FIELDS)
    assert parameters["temperature"].annotation == float | None
    assert parameters["stop_strings"].annotation == str | Sequence[str] | None


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
    with pytest.raises(ParameterError, match="'zzz': expected one of max_new_tokens, "):
        make({"zzz": None})
    for name, ours in renamed(PYTHON).items():
        assert name not in FIELDS
        assert not ours.isidentifier() or ours in {*FIELDS, "timeout"}
        with pytest.raises(ParameterError, match=f"{name}.*: use {re.escape(ours)}$"):
            make({name: 1})
    for name in refused(TRANSFORMERS):
        with pytest.raises(ParameterError, match=f"^{name} .* does not support"):
            make({name: 1})
    for name in ignored(TRANSFORMERS):
        with pytest.raises(ParameterError, match=f"^{name} .* has no effect"):
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
