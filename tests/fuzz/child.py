"""One process that runs a batch of inputs: `python -m tests.fuzz.child SUBJECT START STOP JOURNAL FOLDER`.

It says in the journal which input comes next before it runs it, so that an input that takes the process with it is
known by its number.
"""

import faulthandler
import importlib
import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from .outcome import COUNTS, place_of


class Journal:
    """Lines of JSON, each written at once: they outlive a crash."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, **entry: Any) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")


def generator(subject: str, number: int) -> random.Random:
    """The random generator of an input."""
    return random.Random(f"{subject}-{number}")


def fault_of(error: BaseException) -> dict[str, str]:
    """What the parent reports of an input that raised."""
    text = " ".join(str(error).split())[:300]
    return {"kind": type(error).__name__, "place": place_of(error), "text": text.encode("utf-8", "replace").decode()}


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main(subject: str, start: int, stop: int, journal: Journal, folder: Path) -> None:
    """Run the inputs `start` to `stop`, the latter not included."""
    verbose = bool(os.environ.get("MINILLM_FUZZ_VERBOSE"))
    prepare = importlib.import_module(f"tests.fuzz.{subject}").prepare
    run = None
    for number in range(start, stop):
        if run is None:  # also after a fault, whose consequences are no faults of the next input
            run = prepare(_new(folder / f"from-{number}"))
        journal.write(begin=number)
        try:
            run(number, generator(subject, number))
        except BaseException as error:
            if verbose:
                traceback.print_exc()
            journal.write(end=number, **fault_of(error))
            run = None
        else:
            journal.write(end=number, counts=COUNTS)
            COUNTS.clear()


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the parent asks where a hanging input is
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Journal(sys.argv[4]), Path(sys.argv[5]))
    os._exit(0)  # threads that an input left behind do not keep the process
