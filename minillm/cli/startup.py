"""What has to happen in a process of the command line before anything else is imported."""

import contextlib
import os
import signal
import sys
from types import FrameType


def end_at_signals() -> None:
    """Have Ctrl-C, a request to terminate and the end of the terminal end this process at once.

    What is unfinished is undone. No exception is raised: that could come in the middle of an import, or inside a
    compiler that loses it. A signal that whoever started this process has set aside, as `nohup` does, stays so.
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
    """A signal handler that ends the process, with the code by which a shell tells of a signal."""

    ends_process = True
    """An engine need not hold the signal back until its step has ended (`turns.py`): nobody will use it again."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Undo what is unfinished, and end."""
        signal.signal(number, signal.SIG_DFL)  # a second one waits for nothing
        files = sys.modules.get("minillm.output_files")  # if nothing has imported it, nothing is unfinished
        if files is not None and hasattr(files, "undo_unfinished"):
            files.undo_unfinished()
        with contextlib.suppress(OSError):
            if os.isatty(2):
                os.write(2, b"\n")
        os._exit(128 + number)


def open_streams() -> None:
    """Make standard input, output and error safe to use, whatever this process was started with.

    Where one is closed, the next file that is opened would get its number, and what libraries print would go into that.
    Characters that the terminal's encoding does not hold are replaced.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def tune_blas() -> None:
    """Tell OpenBLAS to use AVX-512 where an AMD processor has it.

    Some builds of OpenBLAS take such a processor for an older one. What it brings depends on the build and the machine:
    between nothing and 1.05 times for a prefill of 512 in `benchmarks/results`. A setting of the user's own stays.
    """
    from pathlib import Path

    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return
    if "AuthenticAMD" in cpu and all(f"avx512{part}" in cpu for part in ("f", "dq", "bw", "vl", "cd")):
        os.environ.setdefault("OPENBLAS_CORETYPE", "SKYLAKEX")
