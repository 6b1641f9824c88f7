"""The spine: the files of which a function runs while an engine answers. A change that lets it grow fails."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType

import minillm
from minillm.cli.main import run as run_command

LINES, FILES, CALLS = 7_860, 44, 7_750
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


def test_the_walks_in_the_guide_are_those_of_the_calls() -> None:
    """A prompt and `top_p`, from the command line on: the guide's functions are called in its order."""
    guide = Path(minillm.__file__).with_name("README.md").read_text(encoding="utf-8")
    walks = guide[guide.index("Two walks") : guide.index("## Modules")]
    for walk, top_p in zip(re.findall(r"^- \*\*(?:.|\n  )+", walks, re.MULTILINE), ("0.87", "0.93"), strict=True):
        stations = [*re.findall(r"`([\w/]+\.py)`\s+\(`(\w+)`", walk)]
        assert len(stations) == len({file for file, _ in stations}) <= 14
        calls = iter(calls_of("generate", "--backend", "numpy", "--top-p", top_p, "--seed", "1", "-n", "2", "Hello"))
        missed = [station for station in stations if station not in calls]  # a search that goes on where it ended
        assert not missed, missed


def calls_of(*command: str) -> list[tuple[str, str]]:
    """The calls that a command makes, in order: file and function."""
    calls: list[tuple[str, str]] = []
    root = f"{Path(minillm.__file__).parent}{os.sep}"

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls.append((frame.f_code.co_filename.removeprefix(root), frame.f_code.co_name))

    sys.setprofile(watch)
    try:
        run_command(command)
    finally:
        sys.setprofile(None)
    return calls
