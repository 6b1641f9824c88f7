"""From settings to the strategy that follows them."""

from dataclasses import replace
from functools import lru_cache

from ..errors import ParameterError
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
    the text (what guides it, too) are the request's own business and make no difference.

    Raises:
        ParameterError: a guide, and a strategy that does not choose token by token.
    """
    alike = replace(settings, seed=0, max_new_tokens=1, stop_strings=(), include_stop=False, echo=False)
    alike = replace(alike, guided_json=None, guided_regex=None, guided_grammar=None, guided_choice=None)
    strategy = _strategy(alike)
    if settings.guide is not None and not strategy.guided:
        name = type(strategy).__name__
        raise ParameterError(f"{settings.guide[0]} goes with greedy search, sampling and beam search, not with {name}")
    return strategy


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
