"""From settings to the strategy that follows them."""

from dataclasses import replace
from functools import lru_cache
from importlib import import_module

from ..errors import ParameterError
from .parameters import Settings
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
    choices = (
        (settings.amateur, "contrastive_decoding", "ContrastiveDecoding"),
        (settings.num_assistant_tokens > 0, "speculative", "SpeculativeDecoding"),
        (settings.prompt_lookup_num_tokens > 0, "prompt_lookup", "PromptLookup"),
        (settings.lookahead_window > 0, "lookahead", "Lookahead"),
        (settings.penalty_alpha > 0.0, "contrastive_search", "ContrastiveSearch"),
        (settings.num_beam_groups > 1, "diverse", "DiverseBeamSearch"),
        (settings.num_beams > 1, "beam", "BeamSearch"),
        (settings.mirostat > 0, "mirostat", "Mirostat"),
        (settings.do_sample, "sampling", "Sampling"),
        (True, "greedy", "GreedySearch"),
    )
    module, name = next((module, name) for wanted, module, name in choices if wanted)
    strategy: Strategy = getattr(import_module(f".{module}", __package__), name)(settings)  # loaded when first needed
    return strategy
