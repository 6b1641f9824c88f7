"""From settings to the strategy that follows them."""

from dataclasses import replace
from functools import lru_cache

from ..errors import ParameterError
from .beam import BeamSearch
from .contrastive_decoding import ContrastiveDecoding
from .contrastive_search import ContrastiveSearch
from .diverse import DiverseBeamSearch
from .greedy import GreedySearch
from .lookahead import Lookahead
from .mirostat import Mirostat
from .parameters import Settings
from .prompt_lookup import PromptLookup
from .sampling import Sampling
from .speculative import SpeculativeDecoding
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
    for wanted, strategy in (
        (settings.amateur, ContrastiveDecoding),
        (settings.num_assistant_tokens > 0, SpeculativeDecoding),
        (settings.prompt_lookup_num_tokens > 0, PromptLookup),
        (settings.lookahead_window > 0, Lookahead),
        (settings.penalty_alpha > 0.0, ContrastiveSearch),
        (settings.num_beam_groups > 1, DiverseBeamSearch),
        (settings.num_beams > 1, BeamSearch),
        (settings.mirostat > 0, Mirostat),
        (settings.do_sample, Sampling),
    ):
        if wanted:
            return strategy(settings)
    return GreedySearch(settings)
