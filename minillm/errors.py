"""Everything that a user can cause, as exceptions with one clear line each.

    MinillmError                      exit code 1
     ├─ UsageError (ValueError)       exit code 2: the request itself cannot be meant
     │   ├─ ParameterError            a generation field or an engine argument: unknown, impossible, contradictory
     │   └─ PromptError               an empty or too long prompt, an id outside the vocabulary, no conversation
     ├─ ModelError                    the model cannot be had
     │   ├─ ModelNotFoundError        no such folder, hub id, revision or file; no network
     │   ├─ CheckpointError           a tensor or file is missing, extra, misshaped, truncated or unsafe
     │   └─ UnsupportedModelError     a family, feature or stored type that minillm does not run
     ├─ DeviceError                   a device, back end or dtype that this machine or version does not offer
     ├─ CacheFullError                the K/V cache cannot hold the request even alone
     ├─ NumericalError                NaN or infinity where numbers should be, with the layer
     └─ EngineStateError              the engine is closed, or called from inside one of its own steps

A message says what was expected, what was found and what to do. The command line prints it as one line and exits
with `exit_code`. `assert` is for our own invariants only.
"""

import reprlib
from collections.abc import Iterable


class MinillmError(Exception):
    """Base of every error that minillm raises on purpose."""

    exit_code = 1


class UsageError(MinillmError, ValueError):
    """The request cannot be meant as it is written."""

    exit_code = 2


class ParameterError(UsageError):
    """A generation field or an engine argument is unknown, impossible or contradicts another."""


class PromptError(UsageError):
    """A prompt is empty, too long, not text, holds an id outside the vocabulary; or messages are no conversation."""


class ModelError(MinillmError):
    """The model cannot be had."""


class ModelNotFoundError(ModelError):
    """There is no such folder, hub id, revision or file, or no network to look there."""


class CheckpointError(ModelError):
    """A weight file or a tensor is missing, extra, misshaped, truncated or unsafe."""


class UnsupportedModelError(ModelError):
    """The family, a feature of it, or the type its weights are stored in is not run by minillm."""


class DeviceError(MinillmError):
    """This machine or this version does not offer the device, back end or dtype."""


class CacheFullError(MinillmError):
    """The K/V cache is too small for a request even when it runs alone."""


class NumericalError(MinillmError):
    """NaN or infinity appeared where numbers should be."""


class EngineStateError(MinillmError):
    """The engine is closed, or called from inside one of its own steps."""


LONGEST_QUOTE = 100
"""Characters of a foreign value in a message."""


def shown(value: object) -> str:
    """A value for a message: short, and in one line."""
    try:
        text = " ".join(reprlib.repr(value).split())
    except Exception:  # whatever a foreign object does; a whole number of more than 4300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE - 4]} ..."


def listed(names: Iterable[str], width: int = 150) -> str:
    """Names for a message: those that fit in `width` characters, and how many more there are."""
    every = list(names)
    kept = [name for i, name in enumerate(every) if len(", ".join(every[: i + 1])) <= width]
    more = len(every) - len(kept)
    return ", ".join(kept) + (f" and {more} more" if more else "")
