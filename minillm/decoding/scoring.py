"""A request without new tokens (max_new_tokens=0): its prompt is computed, for its log-probabilities."""

from collections.abc import Sequence

from ..backends.token_sampler import TokenSampler
from .strategy import Feed, Request, Rows, State, Strategy


class Scoring(Strategy):
    """Choose nothing. The step loop reads the prompt's log-probabilities from the logits, as for every strategy."""

    guided = True  # a guide, as every field about new tokens, has none to act on
    shared = True
    on_device = True  # it does not look at logits

    @property
    def max_sequences(self) -> int:
        """One: the prompt."""
        return 1

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt once."""
        return State(request, [request.continuation(i) for i in request.indices]), [Feed(request.prompt_ids)]

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """End every continuation, empty as it is."""
        for state in states:
            for continuation in state.results:
                continuation.finish("length")
        return [[] for _ in states]
