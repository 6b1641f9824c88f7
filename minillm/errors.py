"""Exceptions for errors that a user can cause, each with a one-line message.

    MinillmError                      exit code 1
     ├─ UsageError (ValueError)       exit code 2: the request itself is invalid
     │   ├─ ParameterError            a generation field or an engine argument: unknown, impossible, contradictory
     │   ├─ PromptError               an empty or too long prompt, an id outside the vocabulary, no conversation
     │   └─ TaskError                 a call for another kind of model: generation by an encoder
     ├─ ModelError                    the model cannot be loaded
     │   ├─ ModelNotFoundError        no such folder, hub id, revision or file; no network
     │   ├─ CheckpointError           a tensor or file is missing, extra, misshaped, truncated or unsafe
     │   └─ UnsupportedModelError     a family, feature or stored type that minillm does not run
     ├─ DeviceError                   a device, backend or dtype that this machine or version does not offer
     ├─ CacheFullError                the request does not fit into the K/V cache even alone
     ├─ QueueFullError                as many requests wait as the queue takes: try again later
     ├─ SlowReaderError               a request's events were not read, and it was aborted
     ├─ NumericalError                NaN or infinity where numbers should be, with the layer
     ├─ RankError                     another rank of a model on several processes has failed
     └─ EngineStateError              the engine is closed, or called from inside one of its own steps

A message says what was expected, what was found and what to do. The command line prints it as one line and exits
with `exit_code`. `assert` is for our own invariants only.

Messages quote names from untrusted files. So every error, and every record of the logger "minillm", passes through
`printable`: no escape sequence reaches a terminal, and a message stays one line of bounded length.
"""

import logging
import re
import reprlib
from collections.abc import Iterable
from pathlib import Path

MESSAGE_LENGTH = 700
"""Maximum characters of a message; the middle of a longer one is cut out."""
WORD_LENGTH = 300
"""Likewise for a run without spaces, such as a tensor's name."""

_LONG_WORD = re.compile(rf"\S{{{WORD_LENGTH + 1},}}")


def printable(text: str) -> str:
    r"""A text as one short line without control characters.

    Non-printable characters (line breaks, control characters, bidirectional marks, lone surrogates) become escapes such
    as `\x1b`. Long words and long texts lose their middle.
    """
    text = _cut(text, 100 * MESSAGE_LENGTH)  # bounds the time of the rest
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return _cut(_LONG_WORD.sub(lambda word: _cut(word[0], WORD_LENGTH), text), MESSAGE_LENGTH)


def _cut(text: str, length: int) -> str:
    """A text with its middle cut out if it is longer than `length` characters."""
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


class MinillmError(Exception):
    """Base of every error that minillm raises on purpose. Its message is `printable`.

    Example:
        >>> try:
        ...     engine.generate("Monday,", max_tokens=4)
        ... except MinillmError as error:
        ...     print(error)
        unknown generation field 'max_tokens': use max_new_tokens
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class UsageError(MinillmError, ValueError):
    """The request is invalid as written."""

    exit_code = 2

    def __init__(self, problem: object = "", *, field: str | None = None, advice: str | None = None) -> None:
        """Args:
        problem: what was expected and found
        field: the generation field or argument that it is about
        advice: what to do, in the words of Python's calls; the server and the command line may have their own
        """
        super().__init__(problem if advice is None else f"{problem}: {advice}")
        self.problem, self.field, self.advice = str(problem), field, advice


class ParameterError(UsageError):
    """A generation field or an engine argument is unknown, impossible or contradicts another."""


class PromptError(UsageError):
    """A prompt is empty, too long, not text, holds an id outside the vocabulary; or messages are not a conversation."""


class TaskError(UsageError):
    """The model does not do this: an encoder generates no text, a model without labels does not classify."""


class PluginError(MinillmError):
    """A strategy, a logits processor, a potential or a model family of another package failed."""


class ModelError(MinillmError):
    """The model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """There is no such folder, hub id, revision or file, or no network to look there."""


class CheckpointError(ModelError):
    """A weight file or a tensor is missing, extra, misshaped, truncated or unsafe."""


class UnsupportedModelError(ModelError):
    """The model's family, a feature of it, or the stored type of its weights is not supported by minillm."""


class DeviceError(MinillmError):
    """This machine or this version does not offer the device, backend or dtype."""


class CacheFullError(MinillmError):
    """The K/V cache is too small for a request even when it runs alone."""


class QueueFullError(MinillmError):
    """As many requests wait as the queue takes; try again later."""


class SlowReaderError(MinillmError):
    """A request was aborted because its events were not read for too long."""


class NumericalError(MinillmError):
    """NaN or infinity appeared where numbers should be."""


class RankError(MinillmError):
    """A rank of a model on several processes has failed; the message names it and the cause."""


class FollowedError(RankError):
    """As `RankError`, raised on ranks other than 0, which raises it too, and tells its user."""


class ReplicaError(MinillmError):
    """No replica of a batch is left to take its requests, or none can be started; what is written is kept."""


class EngineStateError(MinillmError):
    """The engine is closed, or called from inside one of its own steps."""


DISTRIBUTION = "minillm-engine"
"""The name in pyproject.toml"""
LONGEST_QUOTE = 100
"""Maximum characters of a quoted value in a message."""


def shown(value: object) -> str:
    """A value as short one-line text for a message."""
    try:
        text = " ".join(reprlib.repr(value).split())
    except Exception:  # from a foreign object's repr; before 3.14 an integer of more than 4300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE - 4]} ..."


def listed(names: Iterable[str], width: int = 150) -> str:
    """Names for a message: as many as fit in `width` characters, and the number of the rest."""
    every = list(names)
    fitting = [name for i, name in enumerate(every) if len(", ".join(every[: i + 1])) <= width]
    more = len(every) - len(fitting)
    return ", ".join(fitting) + (f" and {more} more" if more else "")


def install(*extras: str) -> str:
    """The command that installs optional dependencies, for a message.

    In a checkout it is an editable installation of it. Elsewhere it names the packages, as the metadata of the
    installed distribution lists them: the name "minillm" on the Python package index belongs to another project.
    """
    from importlib import metadata  # here, for it takes 20 ms to import

    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        where = "." if checkout == Path.cwd() else checkout
        return f"pip install -e '{where}[{','.join(extras)}]'"
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # the package's folder was copied
        required = []
    endings = tuple(f"extra == {quote}{extra}{quote}" for extra in extras for quote in "'\"")
    packages = [line.partition(";")[0].strip() for line in required if line.endswith(endings)]
    return f"pip install {' '.join(map(repr, packages))}" if packages else f"install what its extra {extras[0]} lists"


def holdable(error: BaseException) -> BaseException:
    """An error, or in place of one that ends an iteration a RuntimeError, as in PEP 479: streams would end without a
    word, and futures refuse it.
    """
    if not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    substitute = RuntimeError(f"a function raised {type(error).__name__}")
    substitute.__cause__ = error  # by hand, since a future raises it later
    return substitute


def one_line(record: logging.LogRecord) -> bool:
    """A logging filter that makes a record's message `printable`."""
    record.msg, record.args = printable(record.getMessage().rstrip()), None
    return True


logging.getLogger("minillm").addFilter(one_line)
