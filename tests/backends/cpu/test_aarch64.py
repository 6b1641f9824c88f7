"""The tests of single kernels on an emulated processor with NEON: by which instructions it multiplies integers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
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
        ("generic+dotprod+i8mm+bf16", ["test_blocks.py"], LONG),
        *(
            pytest.param(*more, (), marks=pytest.mark.exhaustive)
            for more in (
                ("generic", OTHERS),
                ("generic+dotprod", []),
                ("generic+dotprod+i8mm+bf16", ["test_blocks.py"]),
            )
        ),
    ],
    ids=[
        "each kernel and format",
        "each format with products of matrices",
        "all without dot products",
        "products",
        "all with products of matrices",
    ],
)
def test_kernels_with_neon(cpu: str, others: list[str], but_for: tuple[str, ...], tmp_path: Path) -> None:
    """Products of integers are what they differ in."""
    target = f"aarch64:{cpu}"
    program = emulated.build(target, tmp_path)
    content = program.read_bytes()
    words = np.frombuffer(content[: len(content) // 4 * 4], "<u4")
    instructions = {"dotprod": 0x4E809400, "i8mm": 0x4E80A400, "bf16": 0x6E40FC00}  # sdot, smmla, bfdot
    for name, instruction in instructions.items():  # of any registers
        assert ((words & 0xFFE0FC00 == instruction).sum() > 100) == (name in cpu)
    environment = {"MINILLM_TEST_TARGET": target, "MINILLM_TEST_PROGRAM": str(program)}
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
