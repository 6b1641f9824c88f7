"""Tiny models of every family on the kernels in C, against the reference with the same weights."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.operations import Backend
from minillm.backends.storage import Experts, Joined
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.reference.experts import Routing

from ...comparing import assert_same_tokens
from ...families import CASES, CONFIGS, IDS, LIKE_GRANITES, has_experts
from ...tiny import chunks, generate, logits_of, model_of, random_prompts, runner_of
from .test_linear import exact_x

pytestmark = pytest.mark.slow  # the default backend: what else runs engines tests it too

LINE = np.random.default_rng(5).integers(3, 96, 60).tolist()
ROUNDING = 2e-5
"""The largest error if both compute in float32: a random model of these sizes carries a last bit that far."""
LOOKS_BACK = [("mistral", "window"), ("bloom", "four heads")]


LIKE_OTHERS = ("deepseek_v3", "glm4_moe_lite", "minicpm3", "mistral4", *LIKE_GRANITES)
"""Families whose operations are those of one that is run: DeepSeek-V2, GLM-4.5's router, and Granite 4's hybrids"""
FIRST = [(family, next(iter(configs))) for family, configs in CONFIGS.items() if family not in LIKE_OTHERS]


@pytest.fixture(
    params=[pytest.param(case, marks=[] if case in FIRST else [pytest.mark.exhaustive]) for case in CASES], ids=IDS
)
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    family, name = request.param
    return CONFIGS[family][name]


class Rounding(NumpyBackend):
    """The reference, with x rounded as the kernels round it where weights are integers."""

    def linear(self, x: Any, weight: Weight, **how: Any) -> Any:
        return super().linear(_rounded(x, weight), weight, **how)

    def linear_experts(self, x: Any, weight: Weight, routing: Routing) -> Any:
        return super().linear_experts(_rounded(x, weight), weight, routing)

    def linear_heads(self, x: Any, weight: Weight) -> Any:
        inputs = weight.shape[1]
        last = _rounded(x[..., -inputs:].reshape(-1, inputs), weight).reshape(*x.shape[:-1], inputs)
        return super().linear_heads(np.concatenate([x[..., :-inputs], last], axis=-1), weight)


def _rounded(x: Any, weight: Weight) -> Any:
    data = weight.data
    first = data.matrices[0] if isinstance(data, Experts) else data.parts[0] if isinstance(data, Joined) else data
    return exact_x(x, first).astype(np.float32)


def all_logits(raw: dict[str, Any], backend: Backend, chunk: int) -> np.ndarray:
    """The logits of every position, computed in chunks. [T, V]"""
    runner = runner_of(model_of(raw, backend=backend), backend=backend, page_size=16)
    return chunks(runner, LINE, chunk)


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest one, as a share of the largest logit."""
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("chunk", [1, 11, 60])
def test_the_logits_are_the_references(raw: dict[str, Any], chunk: int) -> None:
    expected = all_logits(raw, NumpyBackend(), len(LINE))
    assert error(all_logits(raw, CpuBackend(), chunk), expected) < ROUNDING


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("chunk", [1, 60])
def test_the_logits_are_the_references_with_rounded_weights(raw: dict[str, Any], weights: str, chunk: int) -> None:
    """With 8 and 4 bits as those of the reference that rounds activations as the kernels do, to 8 bits.

    Here and there a last bit rounds a number up that the other rounds down, and a token chooses another expert. That
    changes the logits from there on, no more than the rounding itself does: by 0.01 to 0.05 of their size.
    """
    expected = all_logits(raw, Rounding(weights=weights), len(LINE))
    ours = all_logits(raw, CpuBackend(weights=weights), chunk)
    if weights == "bfloat16":
        assert error(ours, expected) < ROUNDING
        return
    errors = np.sqrt(((ours - expected) ** 2).mean(axis=1)) / expected.std()
    assert np.quantile(errors, 0.05) < 1e-5 and np.median(errors) < 0.03
    assert np.quantile(errors, 0.9 if has_experts(raw) else 1) < 0.1


def test_greedy_tokens_are_the_references(raw: dict[str, Any]) -> None:
    """Ragged prompts side by side, with the cache and without."""
    prompts = random_prompts(5, seed=3)
    reference = runner_of(model_of(raw), pages=128, page_size=16)
    backend = CpuBackend()
    runner = runner_of(model_of(raw, backend=backend), backend=backend, pages=128, page_size=16)
    expected = generate(reference, prompts, max_new_tokens=20)
    for use_cache in (True, False):
        for ours, theirs, prompt in zip(
            generate(runner, prompts, max_new_tokens=20, use_cache=use_cache), expected, prompts, strict=True
        ):
            assert_same_tokens(ours, theirs, lambda tokens, p=prompt: logits_of(reference, p + tokens)[-1])


def test_a_tree_of_guesses_gives_the_logits_of_its_branches(raw: dict[str, Any]) -> None:
    """Guesses 4-9, 4-8 and 5 after a line: each sees its own ancestors, at its own position."""
    backend, line = CpuBackend(), LINE[:30]
    runner, reference = (
        runner_of(model_of(raw, backend=backend), backend=backend, page_size=16),
        runner_of(model_of(raw)),
    )
    sequence = TokenSequence([*line, 4, 9, 8, 5], tree=(-1, 0, 0, -1))
    rows = runner.forward([sequence], [sequence.pending], rows=range(30, 34)).logits.copy()
    for row, branch in zip(rows, ([4], [4, 9], [4, 8], [5]), strict=True):
        np.testing.assert_allclose(row, logits_of(reference, line + branch)[-1], rtol=0, atol=1e-4)


@pytest.mark.slow  # compiles attention for each way to look back and each dtype
@pytest.mark.parametrize(("cache_dtype", "within"), [("bfloat16", 0.03), ("int8", 0.05), ("int4", 0.05 * 127 / 7)])
@pytest.mark.parametrize("chunk", [1, 60])
@pytest.mark.parametrize("raw", [CONFIGS[family][name] for family, name in LOOKS_BACK], ids=[f for f, _ in LOOKS_BACK])
def test_a_narrower_cache_moves_the_logits_a_little(
    raw: dict[str, Any], cache_dtype: str, within: float, chunk: int
) -> None:
    expected = all_logits(raw, NumpyBackend(), len(LINE))
    got = all_logits(raw, CpuBackend(cache=cache_dtype), chunk)
    assert 1e-5 < error(got, expected) < within


def test_an_activation_without_a_kernel_runs_as_the_reference_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm import reference

    for table in (reference.activation.ACTIVATIONS, reference.activation.LINEAR_ACTIVATIONS):
        monkeypatch.setitem(table, "cube", lambda y, xp: xp.power(y, 3, out=y))
    backend, rng = CpuBackend(weights="float32"), np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 64)).astype(np.float32), rng.standard_normal((2, 6)).astype(np.float32)
    weight = backend.loader.prepare("w", [backend.loader.random("w", (6, 64), 0, 0.1)])
    plain = backend.linear(x, weight).copy()
    got = backend.linear(x, weight, activation="cube", residual=residual)
    np.testing.assert_allclose(got, plain**3 + residual, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(backend.glu(plain, "cube"), plain[:, :3] ** 3 * plain[:, 3:], rtol=1e-5)
