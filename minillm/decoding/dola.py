"""DoLa, decoding by contrasting layers: prefer tokens that the last layers have made likelier.

Chuang et al., "DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language Models", arXiv 2309.03883, as
transformers 4.55 did it, the last version that had it built in. The language model head is also applied to the hidden
states between the layers of `dola_layers`, without the final norm (`runner/early_exits.py`). Of these premature layers
counts the one whose distribution q is farthest from the final one p, by the divergence

    (KL(m || p) + KL(m || q)) / 2,    m = (p + q) / 2

and among the tokens that are at least 0.1 times as likely as the most likely one, each scores log p - log q. There the
divergence is averaged over a batch; here each text has its own layer, as it has alone. Processors and filters see the
scores; a repetition_penalty of 1.2 is recommended.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.token_sampler import TokenSampler
from ..config import ModelConfig
from ..errors import ParameterError
from ..reference.softmax import log_softmax
from .sampling import Sampling, TokenState, rows_per_continuation
from .settings import Settings
from .strategy import Feed, Request, Rows, State, Strategy

RELATIVE_TOP = 0.1
"""Least probability of a token, as a share of the most likely one's"""
DEEP, DEEP_HALF = 40, 20
"""A model of more layers than the first has so many in its lower and in its higher part"""


class DoLa(Strategy):
    """Greedy search and sampling of the scores."""

    shared = True
    independent = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.choice = Sampling(settings)

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt once; continuations fork from it after the first step."""
        state, feeds = self.choice.begin(request)
        return state, self._exiting(feeds)

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Choose a token for every growing continuation and feed it."""
        growing = [(state, c) for state in states if isinstance(state, TokenState) for c in state.growing]
        places = rows_per_continuation(states)
        final = rows.logits[np.asarray(places)]  # [feeds, V] -> [R, V]
        scores = np.stack([contrast_layers(rows.logits[place], rows.exits[place]) for place in places])  # -> [R, V]
        self.choice.extend(sampler, scores, growing, raw=final)
        return [self._exiting(self.choice.next_feeds(state)) for state in states if isinstance(state, TokenState)]

    def _exiting(self, feeds: list[Feed]) -> list[Feed]:
        """The feeds with early exits; their draws are not known in advance."""
        return [feed._replace(draw=None, exits=self.settings.dola_layers) for feed in feeds]


def contrast_layers(final: Any, early: Any) -> Any:
    """The score of each token; -inf for the implausible. Logits [V], and of the premature layers [L, V] -> [V]"""
    log_final, log_early = log_softmax(final, np), log_softmax(early, np)
    premature = divergences(log_final, log_early).argmax()
    plausible = log_final >= log_final.max() + np.float32(np.log(RELATIVE_TOP))
    return np.where(plausible, log_final - log_early[premature], np.float32(-np.inf))


def divergences(log_final: Any, log_early: Any) -> Any:
    """Twice the divergence of each layer's distribution from the final one. [V], [L, V] -> [L]"""
    mean = (np.exp(log_final) + np.exp(log_early)) / 2  # [L, V]
    log_mean = np.log(np.where(mean > 0, mean, 1))
    return (mean * (2 * log_mean - log_final - log_early)).sum(axis=-1)  # [L, V] -> [L]


def premature_layers(value: str | tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The layers that `dola_layers` stands for, each the number of layers before its hidden state.

    "low" is every second one of the lower half, "high" of the higher half, of the first or last 20 in a model of more
    than 40. With a tied embedding the low ones begin at 2, in a model of fewer than four at its middle: what the head
    makes of an embedding is the same token.

    Raises:
        ParameterError: the model has no such layer, or it is a Granite, whose hidden states are scaled otherwise.
    """
    count = config.num_layers
    if config.model_type.startswith("granite"):
        raise ParameterError("dola_layers is not offered with Granite, whose hidden states have a factor: leave it out")
    if isinstance(value, tuple):
        if max(value) >= count:
            raise ParameterError(f"dola_layers: expected numbers below the model's {count} layers, found {max(value)}")
        return tuple(dict.fromkeys(value))
    if value == "high":
        return tuple(range(count // 2 if count <= DEEP else count - DEEP_HALF, count, 2))
    first = min(2, count // 2) if config.tied_head else 0
    return tuple(range(first, count // 2 if count <= DEEP else DEEP_HALF, 2)) or (first,)
