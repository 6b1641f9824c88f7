"""Weights and K/V cache of fewer bits on the real model, measured by the perplexity of a real text.

The model's file has 4 bits already (Q4_1, with an offset in each group), so int4 rounds a second time. "auto" keeps
them, and differs by the rounding of activations alone, as int8 does: these move a mean of 0.003 nats from the exact
predictions, and the perplexity by about as much, up or down.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.measure.precision import relative_error

from .conftest import Engines

pytestmark = pytest.mark.real

WEIGHTS = {"auto": 0.006, "float16": 0.001, "bfloat16": 0.002, "int8": 0.01, "int4": 0.25}
"""Format of the weights -> by which part it may change the perplexity"""
CACHES = {"bfloat16": 0.002, "int8": 0.005, "int4": 0.08}
PART = 2_500
"""Characters of the text, of 600 tokens"""


@pytest.fixture(scope="module")
def exact(engine: Engine, text: str) -> float:
    """The perplexity in float32, which test_against_transformers.py compares with that of transformers."""
    return engine.score(text[:PART]).perplexity


def cases(formats: dict[str, float], often: Collection[str]) -> Iterator[Any]:
    """Formats and limits, of which some run every time."""
    for name, limit in formats.items():
        yield name, limit, () if name in often else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        *(
            pytest.param({"dtype": name}, limit, id=name, marks=marks)
            for name, limit, marks in cases(WEIGHTS, often=["auto", "bfloat16", "int8", "int4"])
        ),
        *(
            pytest.param({"cache_dtype": name}, limit, id=f"cache in {name}", marks=marks)
            for name, limit, marks in cases(CACHES, often=["int8"])
        ),
    ],
)
def test_perplexity_in_fewer_bits(
    options: dict[str, str], limit: float, engines: Engines, exact: float, text: str, measured: Callable[[str], None]
) -> None:  # fmt: skip
    perplexity = engines(**options).score(text[:PART]).perplexity
    change = perplexity / exact - 1
    measured(f"perplexity with {' '.join(options)} {' '.join(options.values())}: {perplexity:.3f} ({change:+.2%})")
    assert 0 < abs(change) < limit, "the format makes a difference, and a small one"


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        ("auto", 0.06),
        ("int8", 0.06),
        pytest.param("bfloat16", 0.002, marks=pytest.mark.exhaustive),
        pytest.param("int4", 0.06, marks=pytest.mark.exhaustive),
    ],
)
def test_numpy_and_the_kernels_in_c_agree_in_fewer_bits(
    dtype: str, most: float, engines: Engines, expected: dict[str, Any]
) -> None:
    """The same rounded weights. With 8 and 4 bits the kernels round activations to 8 bits too, NumPy does not."""
    prompt = expected["continuations"][-1]["prompt"]
    ours, theirs = (engines(backend=backend, dtype=dtype).forward(prompt) for backend in ("cpu", "numpy"))
    assert relative_error(ours, theirs) < most
    assert np.mean(ours.argmax(axis=-1) == theirs.argmax(axis=-1)) > 0.9
