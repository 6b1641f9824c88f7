"""Safe use of the `tokenizers` library, which is written in Rust.

`call` turns its errors into one line: unexpected input causes a panic, which Python sees as a BaseException. What would
end the process is refused before (`hazards.py`).
"""

from collections.abc import Callable
from typing import Any, TypeVar

from ...errors import CheckpointError, MinillmError

T = TypeVar("T")


def call(where: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that uses the library, and convert its errors.

    Raises:
        CheckpointError: it fails; `where` begins the message.
        MinillmError: raised by the function itself.
    """
    try:
        return function(*args, **kwargs)
    except (MinillmError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C and the like
        line = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{where}: the tokenizer cannot be used: {line:.200}") from error
