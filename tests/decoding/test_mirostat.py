"""Mirostat against its algorithm, token by token, and the surprise that it should hold."""

import numpy as np
import pytest

from minillm.backends.token_sampler import TokenSampler
from minillm.decoding.mirostat import Mirostat
from minillm.decoding.resolving import resolve, strategy_for
from minillm.decoding.settings import GenerationConfig
from minillm.decoding.strategy import Request, Rows
from minillm.reference.philox import uniform

V = 400
CHOOSER = TokenSampler()


def request(length: int, **fields: object) -> Request:
    config = GenerationConfig(do_sample=True, mirostat=2, max_new_tokens=length, **fields)
    settings = resolve(config, {}, vocab_size=V, eos_token_id=None)
    return Request([0], settings, strategy_for(settings))


def zipf(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Logits of the shape that Mirostat's derivation assumes (2007.14966, section 3), about 7 bits wide."""
    logits = -1.1 * np.log(np.arange(1, V + 1)) + rng.normal(0, 0.3, (rows, V))
    return rng.permuted(logits, axis=1).astype(np.float32)


def surprises(requests: list[Request], steps: list[np.ndarray]) -> tuple[list[list[int]], np.ndarray]:
    """Run the strategy over given logits. Returns tokens, and their surprise in what each was drawn from, in bits."""
    strategy = Mirostat(requests[0].settings)
    states = [strategy.begin(r)[0] for r in requests]
    seen = []
    for logits in steps:
        mus = [max(0.0, state.mu[0]) for state in states]
        strategy.step(CHOOSER, states, Rows(logits.copy(), list(range(len(states) + 1))))
        for state, row, mu in zip(states, logits, mus, strict=True):
            bits = -np.log2(np.exp(row.astype(float)) / np.exp(row.astype(float)).sum())
            kept = bits <= max(mu, bits.min()) + 1e-5
            token = state.results[0].token_ids[-1]
            assert kept[token]
            seen.append(bits[token] + np.log2((2.0 ** -bits[kept]).sum()))
    return [state.results[0].token_ids for state in states], np.reshape(seen, (len(steps), -1))


def test_it_is_its_algorithm() -> None:
    """Algorithm 2, in Python floats: sort, cut at mu, renormalise, draw by inverse CDF, correct mu."""
    tau, eta, temperature, length = 3.0, 0.3, 0.9, 40
    steps = [zipf(np.random.default_rng(i), 1) for i in range(length)]
    asked = request(length, mirostat_tau=tau, mirostat_eta=eta, temperature=temperature, seed=5)
    strategy = Mirostat(asked.settings)
    state, _ = strategy.begin(asked)
    mu, expected, cuts = 2 * tau, [], set()
    for position, logits in enumerate(steps):
        weights = np.exp(logits[0].astype(float) / temperature)
        p = weights / weights.sum()
        order = sorted(range(V), key=lambda token: -p[token])
        kept = [token for token in order if -np.log2(p[token]) <= mu] or order[:1]
        cuts.add(len(kept))
        cumulative = np.cumsum([p[token] for token in kept])
        u = float(uniform(5, 0, position + 1)) * cumulative[-1]
        token = kept[int(np.searchsorted(cumulative, u))]
        mu -= eta * (-np.log2(p[token] / cumulative[-1]) - tau)
        expected.append(token)
        strategy.step(CHOOSER, [state], Rows(logits.copy(), [0, 1]))
        assert state.mu[0] == pytest.approx(mu, abs=1e-3)
    assert state.results[0].token_ids == expected
    assert len(cuts) > 10


@pytest.mark.parametrize("tau", [2.0, 3.0, 4.5])
@pytest.mark.slow
def test_the_mean_surprise_comes_to_tau(tau: float) -> None:
    rng = np.random.default_rng(3)
    steps = [zipf(rng, 4) for _ in range(700)]
    _, bits = surprises([request(701, mirostat_tau=tau, seed=i) for i in range(4)], steps)
    # Summing mu's corrections: the mean error is (mu at the end - mu at first) / (eta * steps), whatever is drawn.
    np.testing.assert_allclose(bits[100:].mean(axis=0), tau, atol=0.1)
    assert bits.std() > 0.5


@pytest.mark.slow
def test_without_correction_the_surprise_misses_tau() -> None:
    """The same test finds out a Mirostat that does not correct."""
    rng = np.random.default_rng(3)
    _, bits = surprises([request(701, mirostat_tau=3.0, mirostat_eta=1e-9, seed=1)], [zipf(rng, 1) for _ in range(700)])
    assert abs(bits[100:].mean() - 3.0) > 0.2


@pytest.mark.longer
def test_rows_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(4)
    steps = [zipf(rng, 3) for _ in range(60)]
    requests = [request(61, seed=i, mirostat_tau=2.0) for i in range(3)]
    together, _ = surprises(requests, steps)
    alone = [surprises([r], [logits[i : i + 1] for logits in steps])[0][0] for i, r in enumerate(requests)]
    assert together == alone
    assert len({tuple(line) for line in alone}) == 3


def test_the_best_token_stays_however_small_mu_is() -> None:
    asked = request(3, mirostat_tau=1e-6, mirostat_eta=1e-6, seed=1)
    tokens, _ = surprises([asked], [np.linspace(0, 2, V, dtype=np.float32)[None]] * 3)
    assert tokens == [[V - 1] * 3]
