"""What became of guesses: counts, and the speed-up that the paper's formulas make of them.

With a the probability that a guess is right, a pass of the target over g guesses in a row gives
(1 - a**(g+1)) / (1 - a) tokens on average (Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding", arXiv 2211.17192, equation 1). If a guess costs c passes, generation is faster by that over g c + 1 (theorem
3.8), provided that a pass over g + 1 tokens costs what a pass over one does.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Speculation:
    """Counts over passes of the target, one for each sequence in it."""

    depths: Counter[int] = field(default_factory=Counter)
    """Passes by the number of guesses in a row that they held"""
    judged: int = 0
    """Guesses that were looked at: those accepted, and those at which a pass ended"""
    accepted: int = 0
    tokens: int = 0
    """Tokens that came out"""

    def add(self, other: "Speculation") -> None:
        """Count in what another has counted."""
        self.depths.update(other.depths)
        self.judged += other.judged
        self.accepted += other.accepted
        self.tokens += other.tokens

    @property
    def passes(self) -> int:
        """Passes in all."""
        return self.depths.total()

    @property
    def guesses(self) -> float:
        """Mean number of guesses in a row."""
        return sum(depth * count for depth, count in self.depths.items()) / max(1, self.passes)

    @property
    def acceptance_rate(self) -> float:
        """a: the share of the guesses looked at that were right."""
        return self.accepted / max(1, self.judged)

    @property
    def tokens_per_step(self) -> float:
        """Tokens for each pass of the target, as counted."""
        return self.tokens / max(1, self.passes)

    @property
    def predicted_tokens_per_step(self) -> float:
        """The same by the formula, each pass with its own number of guesses."""
        rate = self.acceptance_rate
        total = sum(count * expected_tokens(rate, depth) for depth, count in self.depths.items())
        return total / max(1, self.passes)

    def predicted_speed_up(self, cost: float) -> float:
        """Against one token a pass. `cost`: c, what one guess costs, in passes of the target."""
        return self.predicted_tokens_per_step / (self.guesses * cost + 1)


def expected_tokens(rate: float, guesses: int) -> float:
    """1 + a + a**2 + ... + a**g = (1 - a**(g+1)) / (1 - a)."""
    return float(guesses + 1) if rate == 1 else (1 - rate ** (guesses + 1)) / (1 - rate)
