"""python -m tests.fuzz SUBJECT NUMBER [COUNT]: run inputs again, and show what they are and where they fail."""

import sys

from .harness import run_batch

if __name__ == "__main__":
    subject, number, count = sys.argv[1], int(sys.argv[2]), int((sys.argv[3:] or ["1"])[0])
    faults = run_batch(subject, number, number + count, verbose=True).faults
    print("\n".join(map(str, faults)) or "no fault")
    sys.exit(bool(faults))
