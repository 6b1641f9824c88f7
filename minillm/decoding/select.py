"""Selection of the strategy for given settings."""

from dataclasses import replace
from functools import lru_cache
from importlib import import_module

from ..errors import ParameterError
from .parameters import Settings
from .strategy import Strategy


def strategy_for(settings: Settings) -> Strategy:
    """The strategy for a request.

    If one call serves several requests (`Strategy.shared`), those with equal settings get the same object; seed,
    lengths and text settings are handled per request and may differ. A request with user code or a guide gets its own
    object, so that a failure there does not affect others.

    Raises:
        ParameterError: a guide is combined with a strategy that does not choose token by token.
    """
    kind = _kind(settings)
    if kind.shared and not (settings.guide or settings.logits_processor or settings.prefix_allowed_tokens_fn):
        alike = replace(settings, seed=0, max_new_tokens=1, stop_strings=(), include_stop=False, echo=False)
        return _shared(kind, alike)
    strategy = kind(settings)
    if settings.guide is not None and not kind.guided:
        name = kind.__name__
        raise ParameterError(f"{settings.guide[0]} goes with greedy search, sampling and beam search, not with {name}")
    return strategy


@lru_cache(maxsize=64)
def _shared(kind: type[Strategy], settings: Settings) -> Strategy:
    return kind(settings)


def _kind(settings: Settings) -> type[Strategy]:
    """The strategy class for the settings; its module is loaded on first use."""
    choices = (
        (settings.amateur, "contrastive", "ContrastiveDecoding"),
        (settings.num_assistant_tokens > 0, "speculative", "SpeculativeDecoding"),
        (settings.prompt_lookup_num_tokens > 0, "speculative", "PromptLookup"),
        (settings.lookahead_window > 0, "lookahead", "Lookahead"),
        (settings.penalty_alpha > 0.0, "contrastive", "ContrastiveSearch"),
        (settings.num_beam_groups > 1, "beam", "DiverseBeamSearch"),
        (settings.num_beams > 1, "beam", "BeamSearch"),
        (settings.mirostat > 0, "mirostat", "Mirostat"),
        (settings.do_sample, "sampling", "Sampling"),
        (True, "sampling", "GreedySearch"),
    )
    module, name = next((module, name) for wanted, module, name in choices if wanted)
    kind: type[Strategy] = getattr(import_module(f".{module}", __package__), name)
    return kind
