"""The table of other programs' words, and errors that carry their advice as data."""

import pickle
from collections import Counter

import pytest

from minillm.cli.main import COMMANDS as OUR_COMMANDS
from minillm.decoding.fields import FIELDS
from minillm.decoding.foreign import API, COMMANDS, OLLAMA_OPTIONS, PYTHON, TABLE, WORDS, ignored, refused, renamed
from minillm.decoding.resolving import read_field
from minillm.errors import ParameterError


def test_no_word_stands_twice_for_one_reader() -> None:
    counts = Counter((word.reader, name) for word in TABLE for name in word.names.split())
    assert not [both for both, count in counts.items() if count > 1]


@pytest.mark.parametrize("reader", WORDS)
def test_a_word_is_renamed_or_refused_or_ignored(reader: str) -> None:
    fates = [*renamed(reader), *refused(reader), *ignored(reader)]
    assert sorted(fates) == sorted(WORDS[reader])


def test_names_of_ours_exist() -> None:
    assert {*renamed(API).values()} <= FIELDS.keys()
    assert {*renamed(OLLAMA_OPTIONS).values()} <= FIELDS.keys() | renamed(API).keys()
    assert {*renamed(COMMANDS).values()} <= {*OUR_COMMANDS, "--help"}
    assert not renamed(PYTHON).keys() & FIELDS.keys()


def test_an_error_carries_its_field_and_advice_also_to_other_processes() -> None:
    with pytest.raises(ParameterError) as caught:
        read_field("temperature", 0)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.field, str(error)) == ("temperature", f"{error.problem}: {error.advice}")
    assert error.problem.startswith("temperature=0: expected a number above 0")
