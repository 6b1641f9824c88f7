"""The spine: the files of which a function runs while an engine answers. A change that lets it grow fails."""

import json
import subprocess
import sys

LINES, FILES, CALLS = 11_350, 53, 11_250
"""Ceilings, lowered whenever the spine gets shorter; the aim is 6,000 lines in 36 files, and 6,000 calls"""

TRACE = """
import collections, json, os, sys
import minillm
root = os.path.dirname(minillm.__file__) + os.sep
calls = collections.Counter()
def watch(frame, event, arg):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        calls[frame.f_code.co_filename] += 1
engine = minillm.Engine(backend="numpy")
engine.generate("A", max_new_tokens=2)
sys.setprofile(watch)
engine.generate("A list of colors: red,", max_new_tokens=8)
engine.generate("Once upon a time", do_sample=True, temperature=0.8, top_p=0.9, seed=1, max_new_tokens=8)
sys.setprofile(None)
lines = {path[len(root):]: sum(1 for _ in open(path, encoding="utf-8")) for path in calls}
print(json.dumps({"lines": lines, "calls": sum(calls.values())}))
"""
"""Counts lines and calls for 16 tokens of the packaged model, greedy and sampled, on NumPy; loading is not counted."""


def test_the_spine_does_not_grow() -> None:
    done = subprocess.run([sys.executable, "-c", TRACE], capture_output=True, text=True, check=True)
    spine = json.loads(done.stdout)
    lines = spine["lines"]
    assert sum(lines.values()) <= LINES, lines
    assert len(lines) <= FILES, sorted(lines)
    assert spine["calls"] <= CALLS
