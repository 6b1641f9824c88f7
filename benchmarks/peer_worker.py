"""One engine in a process of its own, for `against_peers.py`: messages come in as JSON lines, replies go out.

    python peer_worker.py ENGINE FORMAT FOLDER THREADS

FOLDER is what `peer_files.py` wrote. The engine stays loaded, so that a burst measures the work alone.

    {"do": "time", "batch", "prompt", "new_tokens", "limit", "vocab_size"}    -> {"tokens", "seconds"}
    {"do": "logits", "length", "file", "vocab_size"}                          -> {"file"}, a .npy [T, V]
    {"do": "memory"}                                                          -> {"peak_bytes"}, or null
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peer_engines import Peer


def prompt(number: int, length: int, vocab_size: int) -> list[int]:
    """Token ids that differ from prompt to prompt and avoid the special ones."""
    return [4 + (7919 * i + 104_729 * number) % (vocab_size - 4) for i in range(length)]


def answer(peer: "Peer", message: dict[str, Any]) -> dict[str, Any]:
    """The reply to one message."""
    if message["do"] == "memory":
        return {"peak_bytes": peak_bytes()}
    if message["do"] == "logits":
        import numpy as np

        np.save(message["file"], peer.logits(prompt(0, message["length"], message["vocab_size"])))
        return {"file": message["file"]}
    prompts = [prompt(i, message["prompt"], message["vocab_size"]) for i in range(message["batch"])]
    if message["new_tokens"] == 1:
        return {"tokens": len(prompts[0]), "seconds": peer.prefill(prompts[0])}
    return peer.decode(prompts, message["new_tokens"], message["limit"])._asdict()


def peak_bytes() -> int | None:
    """The most memory that this process has held, files that it mapped included; None where Linux is not there."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def main() -> None:
    """Load, say so, and answer until standard input ends."""
    engine, form, folder, threads = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the replies
    if engine.startswith("minillm-"):
        from minillm.cli.startup import tune_blas

        tune_blas()  # as the command line does, before NumPy is imported
    from peer_engines import make

    peer = make(engine, form, folder, int(threads))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(peer, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
