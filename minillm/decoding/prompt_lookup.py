"""Prompt lookup: what followed the newest tokens when they last occurred may follow them again.

The draft of speculative decoding (arXiv 2211.17192) is a search in the text itself. The last max_matching_ngram_size
tokens are looked for in what precedes them, then fewer; after the first place where they stand, the guess is the
prompt_lookup_num_tokens that follow. Summaries, corrections and lists repeat their prompt, and it costs nothing but
the wider pass. Saxena, "Prompt Lookup Decoding", 2023; the rules are those of transformers'
`PromptLookupCandidateGenerator`.
"""

from collections.abc import Sequence

import numpy as np

from .guessing import Guess, Guessing, GuessState, Line
from .processors.sequences import FEW, common_ends


class PromptLookup(Guessing):
    """Guess by looking back."""

    def guess(self, state: GuessState, line: Line, room: int) -> Guess:
        """What followed the newest tokens before."""
        tokens = state.request.prompt_ids + line.continuation.token_ids
        count = min(room, self.settings.prompt_lookup_num_tokens)
        return Guess(look_up(tokens, self.settings.max_matching_ngram_size, count))


def look_up(tokens: Sequence[int], longest: int, count: int) -> list[int]:
    """Up to `count` tokens after the first earlier place of the last n tokens, for the greatest n that has one.

    The cost is linear in the tokens, whatever `longest`.

    Args:
        tokens: all so far
        longest: the greatest n to try
        count: how many tokens are wanted at most
    """
    line = np.asarray(tokens, np.int64)
    ends, n = np.arange(1, len(line)), 0  # places before which stand the last n tokens
    while n < min(longest, FEW):
        longer = ends[ends > n]
        longer = longer[line[longer - 1 - n] == line[-1 - n]]
        if not len(longer):
            break
        ends, n = longer, n + 1
    if n == FEW < longest:
        lengths = common_ends(line)
        ends = np.flatnonzero(lengths >= min(longest, int(lengths.max())))
    if n == 0:
        return []
    return [int(token) for token in line[ends[0] : ends[0] + count]]
