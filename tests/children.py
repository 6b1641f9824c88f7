"""Processes that tests start: forked children, which run no further tests, and commands that set up their process."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

DEFAULT_SIGNALS = """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
"""
"""For `prepared`: a shell's background job ignores Ctrl-C; tests that send it do not."""


def in_child(work: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether `work` is true in a forked child.

    The child ends with `work`, whatever it raises: it would otherwise go on with the tests of the process it is a copy
    of. One that does not end within `seconds` is killed: locks that other threads held when it was forked stay held.
    """
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if work() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise TimeoutError(f"a forked child does not end within {seconds} s")
        time.sleep(0.005)


def prepared(setup: str, command: list[str] | list[str | Path]) -> list[str]:
    """A command that runs some statements of Python in its own process first.

    `preexec_fn` of `subprocess` would run them in a fork of this process, which waits forever if another thread held a
    lock that they need.
    """
    code = f"import os, sys\n{setup}\nos.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-I", "-S", "-c", code, *map(str, command)]
