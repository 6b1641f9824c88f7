"""Messages: one printable line of bounded length, whatever names they quote."""

import logging

import pytest

from minillm import errors
from minillm.errors import CheckpointError, MinillmError, ParameterError, printable

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MinillmError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_says_a_foreign_name_in_one_printable_line(kind: type[MinillmError]) -> None:
    name = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202e\u2028\udce9 é 語"
    expected = r"tensor \x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202e\u2028\udce9 é 語 is missing"
    assert str(kind(f"tensor {name} is missing")) == expected


def test_an_error_in_an_error_is_quoted_once() -> None:
    inner = CheckpointError("a\nb")
    assert str(ParameterError(f"tensor x: {inner}")) == r"tensor x: a\nb"
    assert str(ParameterError(inner)) == r"a\nb"
    assert str(ParameterError()) == ""


def test_long_names_and_long_messages_lose_their_middle() -> None:
    message = str(CheckpointError(f"tensor {'n' * 5000} should not be there"))
    assert message.startswith("tensor nnn") and message.endswith("nnn should not be there")
    assert "…" in message and len(message) < 400
    assert len(str(CheckpointError("word " * 10**6))) <= errors.MESSAGE_LENGTH
    assert len(str(CheckpointError("\x1b " * 10**6))) <= errors.MESSAGE_LENGTH


def test_an_ordinary_message_stays_as_it_is() -> None:
    text = "model.layers.11.weight: expected [768, 768], found [768] — “quoted”, été, 模型"
    assert printable(text) is text


def test_records_of_the_logger_are_printable_for_every_handler(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("minillm").warning("%s: of %d none", "a\x1b[2J\nb", 3)
    assert caplog.messages == [r"a\x1b[2J\nb: of 3 none"]
