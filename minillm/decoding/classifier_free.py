"""Classifier-free guidance: prefer tokens that the prompt makes likelier than another, negative prompt does.

Sanchez et al., "Stay on topic with classifier-free guidance", arXiv 2306.17806, equation 7: each token scores

    log p(token | negative prompt) + scale (log p(token | prompt) - log p(token | negative prompt))

so 1 is no guidance, more leads away from the negative prompt, less towards it; 0 is the negative prompt alone. Both
texts go on with the same tokens. Without a negative prompt the second one begins with the last token of the prompt, as
in transformers. Processors, guides and filters see the scores; with beams, these are what is summed.
"""

from collections.abc import Sequence
from typing import Any

from ..backends.token_sampler import TokenSampler
from ..config import ModelConfig
from ..errors import PromptError
from ..reference.softmax import log_softmax
from ..text.tokenizer import Tokenizer
from .beam import BeamSearch, BeamState
from .paired import PairedSampling
from .prompts import Prompt, encode_prompt
from .strategy import Feed, Request, State


class ClassifierFreeGuidance(PairedSampling):
    """Greedy search and sampling of the scores."""

    guided = True
    sequences_per_result = 2

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed both prompts; continuations fork from each after the first step."""
        state, _ = self.choice.begin(request)
        return state, [Feed(token_ids) for token_ids in request.beginnings]

    def second_feeds(self, feeds: list[Feed], sequences: int) -> list[Feed]:
        """The same after the negative prompt."""
        return _after_negative_prompt(feeds, sequences)

    def combined(self, first: Any, second: Any, xp: Any) -> Any:
        """The scores. Logits [R, V] after both prompts -> [R, V]"""
        return guidance(log_softmax(first, xp), log_softmax(second, xp), self.settings.guidance_scale)


class GuidanceBeamSearch(BeamSearch):
    """Beam search by the sums of the scores."""

    sequences_per_result = 2

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed both prompts once."""
        return self.first_beams(request), [Feed(token_ids) for token_ids in request.beginnings]

    def extend(self, sampler: TokenSampler, state: BeamState, logits: Any, handicap: Any = None) -> list[Feed]:
        """As of `BeamSearch`. logits: [2 beams, V], those after the negative prompt last"""
        feeds = super().extend(sampler, state, logits, handicap)
        return [*feeds, *_after_negative_prompt(feeds, len(logits) // 2)]

    def first_scores(self, sampler: TokenSampler, logits: Any) -> tuple[Any, Any]:
        """The scores of each beam, and the model's log-probabilities. [2 beams, V] -> [beams, V] each"""
        log_probs = sampler.log_softmax(logits)
        first, second = log_probs[: len(logits) // 2], log_probs[len(logits) // 2 :]
        return guidance(first, second, self.settings.guidance_scale), first


def guidance(log_probs: Any, negative: Any, scale: float) -> Any:
    """The score of each token, from its log-probabilities after both prompts. [R, V] each -> [R, V]"""
    return scale * (log_probs - negative) + negative


def _after_negative_prompt(feeds: Sequence[Feed], sequences: int) -> list[Feed]:
    """The feeds of the sequences after the negative prompt, which come after `sequences` others."""
    return [feed._replace(parent=sequences + (feed.parent or 0)) for feed in feeds]


def negative_ids(prompt: Prompt, tokenizer: Tokenizer | None, config: ModelConfig) -> tuple[int, ...]:
    """The tokens of a negative prompt, with room for one more in the context.

    Raises:
        PromptError: as of the prompt itself.
    """
    try:
        return tuple(encode_prompt(prompt, tokenizer, config, room=1))
    except PromptError as error:
        raise PromptError(f"negative_prompt: {error}", field="negative_prompt") from None
