"""llama.cpp's mixtures of types, written of the real model: its perplexity in them, and what llama.cpp computes.

The model's width of 576 is no multiple of 256: most matrices have the types that stand in for K-quants.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minillm.formats.gguf.write import write_gguf

from .conftest import Engines

pytestmark = pytest.mark.real

PART = 2_500
"""Characters of the text, of 600 tokens"""
PROMPT = "The capital of France is"


@pytest.mark.parametrize(
    ("mixture", "limit"),
    [
        ("Q6_K", 0.03),
        ("Q4_K_M", 0.07),
        pytest.param("Q5_K_M", 0.03, marks=pytest.mark.exhaustive),
        pytest.param("IQ4_XS", 0.15, marks=pytest.mark.exhaustive),
    ],
)
def test_a_mixture_changes_the_perplexity_by_little_and_llama_cpp_runs_it(
    mixture: str,
    limit: float,
    model_file: Path,
    engines: Engines,
    text: str,
    tmp_path: Path,
    measured: Callable[[str], None],
) -> None:
    path = tmp_path / f"{mixture}.gguf"
    write_gguf(model_file, path, mixture, progress=False)
    exact, engine = engines(), engines(path)
    perplexity = engine.score(text[:PART]).perplexity
    change = perplexity / exact.score(text[:PART]).perplexity - 1
    measured(f"perplexity in {mixture}: {perplexity:.3f} ({change:+.2%}), {path.stat().st_size >> 20} MiB")
    assert 0 < abs(change) < limit
    package = pytest.importorskip("llama_cpp")
    llama = package.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, flash_attn=False)
    ids = engine.tokenizer.encode(PROMPT)
    llama.eval(ids)
    ours, theirs = engine.forward(ids), llama.scores[: len(ids)]
    assert np.array_equal(ours.argmax(axis=-1), theirs.argmax(axis=-1))
    assert np.linalg.norm(ours - theirs) < 0.15 * np.linalg.norm(ours)  # it rounds activations to 8 bits
