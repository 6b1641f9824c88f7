"""From settings to the strategy that follows them."""

from dataclasses import replace
from functools import lru_cache

from .beam import BeamSearch
from .contrastive_search import ContrastiveSearch
from .diverse import DiverseBeamSearch
from .greedy import GreedySearch
from .mirostat import Mirostat
from .parameters import Settings
from .sampling import Sampling
from .strategy import Strategy


def strategy_for(settings: Settings) -> Strategy:
    """The strategy for a request.

    Requests that choose alike get the same object, so that one call serves them all; seed, lengths and what concerns
    the text are the request's own business and make no difference.
    """
    return _strategy(replace(settings, seed=0, max_new_tokens=1, stop_strings=(), include_stop=False, echo=False))


@lru_cache(maxsize=64)
def _strategy(settings: Settings) -> Strategy:
    if settings.penalty_alpha > 0.0:
        return ContrastiveSearch(settings)
    if settings.num_beam_groups > 1:
        return DiverseBeamSearch(settings)
    if settings.num_beams > 1:
        return BeamSearch(settings)
    if settings.mirostat:
        return Mirostat(settings)
    return Sampling(settings) if settings.do_sample else GreedySearch(settings)
