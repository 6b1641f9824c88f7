"""Sampling filters (top-k, top-p, ...) as logits processors, which run after all the others.

Their order is transformers': temperature, top-h, top-k, top-p, min-p, typical, epsilon, eta; top-n-sigma, which
transformers does not have, comes before top-k, as in llama.cpp, and XTC last. With `samplers` (`sampler_order.py`) it
is the user's, and the penalties are among them. The masks of top-k, top-p and min-p
are in `reference/sampling_by_sorting.py`; a plain draw applies these without building the filtered row.

In beam search every filter keeps at least `least` tokens, one more than there are end-of-sequence tokens, so that a
beam can continue.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from numpy.typing import NDArray

from ..reference.philox import XTC
from ..reference.sampling import scale
from ..reference.sampling_by_sorting import keep_min_p, keep_top_k, keep_top_p
from ..reference.softmax import log_softmax, softmax, top_log_probs
from .history import History
from .processors import InPlace, LogitsProcessor, penalties, watermark_of
from .settings import Settings


@dataclass(frozen=True)
class Temperature:
    """Divide the scores by `temperature`."""

    temperature: float

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return scale(logits, self.temperature)


@dataclass(frozen=True)
class TopNSigma:
    """Keep tokens at most `n` standard deviations of the logits below the best (Tang et al. 2411.07641).

    Forbidden tokens do not count in the deviation. The temperature does not change which tokens are kept.
    """

    n: float

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        possible = logits > -xp.inf
        best = logits.max(axis=-1, keepdims=True)  # [N, V] -> [N, 1]
        below = xp.where(possible, logits, best) - best
        count = possible.sum(axis=-1, keepdims=True)
        mean = below.sum(axis=-1, keepdims=True) / count
        variance = (xp.where(possible, below - mean, 0) ** 2).sum(axis=-1, keepdims=True) / count
        logits[below < -self.n * xp.sqrt(variance)] = -xp.inf
        return logits


@dataclass(frozen=True)
class TopH:
    """Keep the best tokens, at least one, that hold a share `h` of the top 100's entropy (2509.02510, algorithm 1)."""

    h: float
    CANDIDATES = 100

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        ids, log_probs = top_log_probs(logits, min(self.CANDIDATES, logits.shape[-1]), xp)  # [N, V] -> [N, 100] each
        terms = _entropy_terms(log_softmax(log_probs, xp), xp)
        typical = xp.cumsum(terms, axis=-1) <= self.h * terms.sum(axis=-1, keepdims=True)
        typical[:, 0] = True
        result: NDArray[Any] = xp.full_like(logits, -xp.inf)
        rows, ranks = xp.nonzero(typical)
        result[rows, ids[rows, ranks]] = logits[rows, ids[rows, ranks]]
        return result


@dataclass(frozen=True)
class TopK:
    """Keep the `k` best, and ties with the last of them."""

    k: int
    least: int = 1

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return keep_top_k(logits, max(self.k, self.least), xp)


@dataclass(frozen=True)
class TopP:
    """Keep the best tokens that together reach the probability `p` (nucleus sampling, Holtzman et al. 1904.09751)."""

    p: float
    least: int = 1
    """Minimum number of tokens kept."""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return keep_top_p(logits, self.p, xp, self.least)


@dataclass(frozen=True)
class MinP:
    """Keep tokens at least `min_p` times as likely as the best (Nguyen et al. 2407.01082)."""

    min_p: float
    least: int = 1

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return keep_min_p(logits, self.min_p, xp, self.least)


@dataclass(frozen=True)
class Typical:
    """Keep the tokens whose surprise is nearest to the entropy, until they reach the probability `p`.

    Meister et al. 2202.00666, section 4; ties with the last one in distance from the entropy are kept too.
    """

    p: float
    least: int = 1

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        log_probs = log_softmax(logits, xp)
        distance = abs(-log_probs - _entropy_terms(log_probs, xp).sum(axis=-1, keepdims=True))  # [N, V]
        order = xp.argsort(distance, axis=-1)  # ties are kept or dropped together, so their order does not matter
        cumulative = xp.cumsum(xp.exp(xp.take_along_axis(log_probs, order, axis=-1)), axis=-1, dtype=xp.float64)
        last = xp.count_nonzero(cumulative < self.p, axis=-1)  # [N, V] -> [N]: rank of the last kept
        last = xp.clip(last, self.least - 1, logits.shape[-1] - 1)[:, None]
        farthest = xp.take_along_axis(distance, xp.take_along_axis(order, last, axis=-1), axis=-1)
        logits[distance > farthest] = -xp.inf
        return logits


@dataclass(frozen=True)
class EpsilonCutoff:
    """Keep tokens with a probability of at least `epsilon` (Hewitt et al. 2210.15191, section 3)."""

    epsilon: float
    least: int = 1

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return _keep_probable(logits, self.epsilon, self.least, xp)


@dataclass(frozen=True)
class EtaCutoff:
    """Keep tokens of probability >= min(epsilon, sqrt(epsilon) * exp(-entropy)) (2210.15191, section 4)."""

    epsilon: float
    least: int = 1

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        entropy = _entropy_terms(log_softmax(logits, xp), xp).sum(axis=-1, keepdims=True)  # [N, V] -> [N, 1]
        return _keep_probable(logits, xp.minimum(self.epsilon, self.epsilon**0.5 * xp.exp(-entropy)), self.least, xp)


@dataclass(frozen=True)
class Xtc:
    """Exclude top choices: with a probability, drop all tokens of at least `threshold` but the least likely of them.

    llama.cpp's rules, after p-e-w's proposal for text-generation-webui (pull request 6335). The draw whether to do so
    is keyed as the token's own (`reference/philox.py`), and leaves that as it is.
    """

    probability: float
    threshold: float
    least: int = 1

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        rows = xp.flatnonzero(xp.asarray(history.uniforms(XTC) <= self.probability))
        scores = logits[rows]  # [N, V] -> [R, V]
        possible = scores > -xp.inf
        top = possible & (softmax(scores, xp) >= self.threshold)
        lowest = xp.where(top, scores, xp.inf).min(axis=-1, keepdims=True)  # [R, V] -> [R, 1]
        last = scores.shape[-1] - 1 - (top & (scores == lowest))[:, ::-1].argmax(axis=-1)  # of equals the last
        top[xp.arange(len(rows)), last] = False
        top &= (possible.sum(axis=-1) - top.sum(axis=-1) >= self.least)[:, None]
        scores[top] = -xp.inf
        logits[rows] = scores
        return logits


READERS = (InPlace, Xtc)
"""Classes that read the history; the filters proper do not"""


@dataclass(frozen=True)
class Renormalize:
    """Renormalise the scores to log-probabilities. Matters in beam search, which adds up scores of different steps."""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return log_softmax(logits, xp)


def _entropy_terms(log_probs: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
    """-p log p of each token; 0 for forbidden ones. [N, V] -> [N, V]"""
    terms: NDArray[Any] = -xp.exp(log_probs) * xp.where(log_probs > -xp.inf, log_probs, 0)
    return terms


def _keep_probable(logits: NDArray[Any], floor: Any, least: int, xp: ModuleType) -> NDArray[Any]:
    """Set tokens less probable than `floor` to -inf, except the `least` best (and ties with the last of them)."""
    V = logits.shape[-1]
    rank = V - min(least, V)
    nth = xp.partition(logits, rank, axis=-1)[:, rank, None]  # [N, V] -> [N, 1]
    logits[(softmax(logits, xp) < floor) & (logits < nth)] = -xp.inf
    return logits


def build_filters(settings: Settings) -> tuple[LogitsProcessor, ...]:
    """The filters that have an effect, in order, then the renormalisation. Without sampling only the latter."""
    least = 1 if settings.num_beams == 1 else max(2, 1 + len(settings.eos_token_ids))  # every beam can continue
    in_order: dict[str, LogitsProcessor | Literal[False]] = {
        "temperature": settings.temperature != 1.0 and Temperature(settings.temperature),
        "top_h": settings.top_h is not None and TopH(settings.top_h),
        "top_n_sigma": settings.top_n_sigma > 0.0 and TopNSigma(settings.top_n_sigma),
        "top_k": settings.top_k > 0 and TopK(settings.top_k, least),
        "top_p": settings.top_p < 1.0 and TopP(settings.top_p, least),
        "min_p": settings.min_p > 0.0 and MinP(settings.min_p, least),
        "typ_p": settings.typical_p < 1.0 and Typical(settings.typical_p, least),
        "epsilon_cutoff": settings.epsilon_cutoff > 0.0 and EpsilonCutoff(settings.epsilon_cutoff, least),
        "eta_cutoff": settings.eta_cutoff > 0.0 and EtaCutoff(settings.eta_cutoff, least),
        "xtc": settings.xtc_probability > 0.0 and Xtc(settings.xtc_probability, settings.xtc_threshold, least),
    }
    chain = [*in_order.values()]
    if settings.samplers:
        named = {name: [filter_] for name, filter_ in in_order.items()}
        *lowered, dry = penalties(settings)
        named |= {"penalties": lowered, "dry": [dry]}
        chain = [filter_ for name in settings.samplers for filter_ in named[name]]
    filters = [filter_ for filter_ in chain if settings.do_sample and filter_]
    if settings.watermarking_config is not None and settings.do_sample:
        filters.append(watermark_of(settings))
    return (*filters, Renormalize()) if settings.renormalize_logits else tuple(filters)
