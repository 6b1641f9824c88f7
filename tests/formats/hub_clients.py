"""Clients of the hub in processes of their own, forked from one that has imported what they need.

huggingface_hub reads its settings when it is imported: each client does that itself, with its own.
"""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from .hub_server import Hub

SERVER = """
import json, os, sys, traceback
from resource import RLIMIT_FSIZE, setrlimit
import huggingface_hub, numpy
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
import minillm, minillm.cli.main, minillm.formats
for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
    del sys.modules[name]

def client(code, words, environment, room, out, errors):
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if room is not None:
        setrlimit(RLIMIT_FSIZE, (room, room))
    sys.argv = ["minillm", *words]
    ended = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        ended = end.code or 0
    except BaseException:
        traceback.print_exc()
        ended = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        client(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Clients:
    """Runs programs, one after another."""

    def __init__(self, folder: Path) -> None:
        """The folder is for what they print."""
        self._out, self._errors = folder / "out", folder / "errors"
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, code: str, *words: str, environment: dict[str, str], room: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program with these arguments and variables; no file may be larger than `room` bytes."""
        assert self._server.stdin is not None and self._server.stdout is not None
        asked = {"code": code, "words": words, "environment": environment, "room": room}
        self._server.stdin.write(json.dumps(asked | {"out": str(self._out), "errors": str(self._errors)}) + "\n")
        self._server.stdin.flush()
        assert select.select([self._server.stdout], [], [], 300)[0], f"{words} does not end"
        ended = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(words, ended, self._out.read_text(), self._errors.read_text())

    def close(self) -> None:
        """End the process that they are forked from."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)
        self._server.stdout.close()


def settings(hub: Hub, folder: Path) -> dict[str, str]:
    """The environment of a client of a hub whose cache is in a folder."""
    own = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(folder),
        "HF_HUB_DOWNLOAD_TIMEOUT": "2",
        "HF_HUB_ETAG_TIMEOUT": "2",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    return {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))} | own
