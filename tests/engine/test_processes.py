"""An engine with other processes and threads: forked children, pools of them, and engines in several threads.

Each case is a process of its own, since what is tested is what a process leaves to its children.
"""

import os
import subprocess
import sys

import pytest

HEAD = """
import multiprocessing, os, sys, threading, warnings
warnings.simplefilter("ignore")  # that a process with threads forks
from minillm import Engine

def new():
    return Engine(backend=sys.argv[1], threads=2)

def text(engine, prompt="A list of colors: red,"):
    return engine.generate(prompt, max_new_tokens=8).text

def child(work):
    pid = os.fork()
    if not pid:
        os._exit(0 if work() else 3)
    return os.waitpid(pid, 0)[1]
"""
CASES = {
    "a child that leaves it alone": """
text(new())
print(child(lambda: True))
""",
    "a child that goes on with it": """
engine = new()
before = text(engine)
print(child(lambda: text(engine) == before), text(engine) == before)
""",
    "a child with a long prompt": """
engine, prompt = new(), "A list of colors: red, green, blue, yellow." * 20
before = text(engine, prompt)
print(child(lambda: text(engine, prompt) == before))
""",
    "a child with an engine of its own": """
before = text(new())
print(child(lambda: text(new()) == before))
""",
    "a child's child": """
engine = new()
before = text(engine)
print(child(lambda: text(engine) == before and child(lambda: text(engine) == before) == 0))
""",
    "a pool of forked children": """
engine = new()
before = text(engine)
def same(_):
    return text(engine) == before
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(0 if all(pool.map(same, range(4))) else 1)
""",
    "a child of a process whose other thread generates": """
engine, other, stop = new(), new(), threading.Event()
before = text(engine)
def run():
    while not stop.is_set():
        text(other)
thread = threading.Thread(target=run)
thread.start()
print(max(child(lambda: text(engine) == before) for _ in range(5)))
stop.set()
thread.join()
""",
    "engines in several threads": """
before, results = text(new()), []
def run():
    engine = new()
    results.extend(text(engine) for _ in range(10))
threads = [threading.Thread(target=run) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(0 if results == [before] * 30 else 1)
""",
}
NUMPY = ("a child that goes on with it", "a pool of forked children", "engines in several threads")
"""What shows with NumPy, whose threads are those of OpenBLAS, that a child and a thread compute"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *(pytest.param(case, "cpu", marks=pytest.mark.slow) for case in CASES),
        *(pytest.param(case, "numpy", marks=pytest.mark.slow) for case in NUMPY),
        *(pytest.param(case, "numpy", marks=pytest.mark.exhaustive) for case in CASES if case not in NUMPY),
    ],
)
def test_an_engine_beside(case: str, backend: str) -> None:
    if backend == "numpy" and "whose other thread generates" in case:
        pytest.skip("a product of OpenBLAS does not outlive a fork by another thread: it hangs, with NumPy alone too")
    command = [sys.executable, "-c", HEAD + CASES[case], backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"0", "True"}, done.stdout + done.stderr
