"""The tests of single kernels on an emulated processor with NEON: with and without its dot products of integers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import emulated

LONG = ("query_alone", "same_bits", "real_size", "caps_biases", "windows_and_slopes", "any_heads", "same_tokens")
"""Tests that meet no kernel or format that the others do not, and take most of the time"""
OTHERS = ["test_blocks.py", "test_rows.py", "test_attention.py", "test_sample.py"]


@pytest.mark.slow
@pytest.mark.skipif(emulated.missing() is not None, reason=emulated.missing() or "")
@pytest.mark.parametrize(
    ("cpu", "others", "but_for"),
    [
        ("generic+dotprod", OTHERS, LONG),
        *(
            pytest.param(*more, (), marks=pytest.mark.exhaustive)
            for more in (("generic", OTHERS), ("generic+dotprod", []))
        ),
    ],
    ids=["each kernel and format", "all without dot products", "products"],
)
def test_kernels_with_neon(cpu: str, others: list[str], but_for: tuple[str, ...], tmp_path: Path) -> None:
    """Products of integers are what the two differ in."""
    target = f"aarch64:{cpu}"
    environment = {"MINILLM_TEST_TARGET": target, "MINILLM_TEST_PROGRAM": str(emulated.build(target, tmp_path))}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | environment
    options = [
        "-n",
        "0",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        " and ".join(f"not {name}" for name in ("tangent", *but_for)),
    ]
    command = [sys.executable, "-m", "pytest", *options, "test_linear.py", *others]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
