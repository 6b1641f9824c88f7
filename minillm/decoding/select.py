"""From settings to the strategy that follows them."""

from dataclasses import replace
from functools import lru_cache

from .beam import BeamSearch
from .contrastive_decoding import ContrastiveDecoding
from .greedy import GreedySearch
from .lookahead import Lookahead
from .parameters import Settings
from .prompt_lookup import PromptLookup
from .sampling import Sampling
from .speculative import SpeculativeDecoding
from .strategy import Strategy


def strategy_for(settings: Settings) -> Strategy:
    """The strategy for a request.

    Requests that choose alike get the same object, so that one call serves them all; seed, lengths and what concerns
    the text are the request's own business and make no difference.
    """
    return _strategy(replace(settings, seed=0, max_new_tokens=1, stop_strings=(), include_stop=False, echo=False))


@lru_cache(maxsize=64)
def _strategy(settings: Settings) -> Strategy:
    if settings.amateur:
        return ContrastiveDecoding(settings)
    if settings.num_assistant_tokens > 0:
        return SpeculativeDecoding(settings)
    if settings.prompt_lookup_num_tokens > 0:
        return PromptLookup(settings)
    if settings.lookahead_window > 0:
        return Lookahead(settings)
    if settings.num_beams > 1:
        return BeamSearch(settings)
    return Sampling(settings) if settings.do_sample else GreedySearch(settings)
