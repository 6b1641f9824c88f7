"""Process setup of the command line, before any other import."""

import contextlib
import os
import signal
import sys
from types import FrameType


def end_at_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP end this process at once.

    Unfinished output files are undone. No exception is raised, since it could hit an import, or a compiler that loses
    it. Signals that the parent process ignores, as `nohup` does, stay ignored.
    """
    for name, usual in (
        ("SIGINT", signal.default_int_handler),
        ("SIGTERM", signal.SIG_DFL),
        ("SIGHUP", signal.SIG_DFL),
    ):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is usual:
            signal.signal(number, EndProcess())


class EndProcess:
    """A signal handler that ends the process with exit code 128 + signal number."""

    ends_process = True
    """Tells an engine not to defer the signal to the end of its step (`turns.py`): it will not be used again."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Undo unfinished output files and exit."""
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once
        files = sys.modules.get("minillm.output_files")  # not imported: no file is unfinished
        if files is not None and hasattr(files, "undo_unfinished"):
            files.undo_unfinished()
        with contextlib.suppress(OSError):
            if os.isatty(2):
                os.write(2, b"\n")
        os._exit(128 + number)


def open_streams() -> None:
    """Make standard input, output and error safe to use, even if they are closed.

    The next file opened would take the descriptor of a closed one, and libraries would print into it. Characters
    outside the terminal's encoding are replaced.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def tune_blas() -> None:
    """Make OpenBLAS use AVX-512 on AMD processors that have it.

    Some builds of OpenBLAS take such a processor for an older one. The gain depends on the build and the machine: 1 to
    1.05 times for a prefill of 512 in `benchmarks/results`. A setting of the user takes precedence.
    """
    from pathlib import Path

    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return
    if "AuthenticAMD" in cpu and all(f"avx512{extension}" in cpu for extension in ("f", "dq", "bw", "vl", "cd")):
        os.environ.setdefault("OPENBLAS_CORETYPE", "SKYLAKEX")
