"""Log records of the command line: plain lines, and for a server lines with times and levels, or JSON."""

import json
import logging
import time
from typing import Any

from ..errors import one_line
from ..progress_bar import bars_aside

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMATS = ("text", "json")
PLAIN = "minillm: %(message)s"


class Messages(logging.StreamHandler[Any]):
    """Prints log records, above the bars that are drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        with bars_aside():
            super().emit(record)


class TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.123+01:00 INFO minillm: message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s minillm: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """The time by the machine's clock, with its distance from UTC."""
        return time_of(record)


class JsonFormatter(logging.Formatter):
    """{"time": ..., "level": "info", "logger": ..., "message": ...}, and the fields that the record has."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        return json.dumps(line | getattr(record, "fields", {}))


def time_of(record: logging.LogRecord) -> str:
    """A record's time in ISO 8601, with milliseconds."""
    local = time.localtime(record.created)
    zone = time.strftime("%z", local)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', local)}.{int(record.msecs):03d}{zone[:3]}:{zone[3:]}"


def begin() -> None:
    """Let warnings through as plain lines on standard error, and how the first compilation of kernels goes."""
    if not _handlers():
        handler = Messages()
        handler.addFilter(one_line)
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for handler in _handlers():
        handler.setFormatter(logging.Formatter(PLAIN))
    for name in ("minillm", "minillm.access"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.getLogger("minillm.kernels").setLevel(logging.INFO)


def serve(level: str, form: str, *, quiet: bool) -> None:
    """Set the log of a server.

    Args:
        level: one of `LEVELS`, the least that is shown
        form: one of `FORMATS`
        quiet: no line for each request
    """
    for handler in _handlers():
        handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.getLogger("minillm").setLevel(LEVELS[level])
    logging.getLogger("minillm.kernels").setLevel(LEVELS[level])
    logging.getLogger("minillm.access").setLevel(max(LEVELS[level], logging.WARNING) if quiet else LEVELS[level])


def failure(message: str) -> str:
    """The line about an error with which a command ends."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in _handlers()):
        return JsonFormatter().format(logging.LogRecord("minillm", logging.ERROR, "", 0, message, None, None))
    return f"minillm: {message}"


def _handlers() -> list[Messages]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, Messages)]
