"""How many guesses of speculative decoding are accepted, and what that predicts."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Speculation:
    """Statistics of speculative decoding, counted per sequence and pass of the target, and predictions from them.

    If a guess is accepted with probability a, a pass over g guesses in a row gives (1 - a**(g+1)) / (1 - a) tokens
    on average (Leviathan et al., arXiv 2211.17192, equation 1). If a guess costs c passes, generation is faster by that
    over g c + 1 (theorem 3.8), provided that a pass over g + 1 tokens costs what a pass over one does.
    """

    depths: Counter[int] = field(default_factory=Counter)
    """Number of passes by their number of guesses in a row"""
    judged: int = 0
    """Guesses examined: those accepted, and those rejected, where a pass ended"""
    accepted: int = 0
    tokens: int = 0
    """Tokens generated"""

    def add(self, other: "Speculation") -> None:
        """Add another's counts."""
        self.depths.update(other.depths)
        self.judged += other.judged
        self.accepted += other.accepted
        self.tokens += other.tokens

    @property
    def passes(self) -> int:
        """Total number of passes."""
        return self.depths.total()

    @property
    def guesses(self) -> float:
        """Mean number of guesses in a row."""
        return sum(depth * count for depth, count in self.depths.items()) / max(1, self.passes)

    @property
    def acceptance_rate(self) -> float:
        """a: the share of examined guesses that were accepted."""
        return self.accepted / max(1, self.judged)

    @property
    def tokens_per_step(self) -> float:
        """Tokens for each pass of the target, as counted."""
        return self.tokens / max(1, self.passes)

    @property
    def predicted_tokens_per_step(self) -> float:
        """Tokens per pass by the formula, each pass with its own number of guesses."""
        rate = self.acceptance_rate
        total = sum(count * expected_tokens(rate, depth) for depth, count in self.depths.items())
        return total / max(1, self.passes)

    def predicted_speed_up(self, cost: float) -> float:
        """Predicted speed-up over one token per pass. `cost`: c, the cost of one guess in passes of the target."""
        return self.predicted_tokens_per_step / (self.guesses * cost + 1)


def expected_tokens(rate: float, guesses: int) -> float:
    """1 + a + a**2 + ... + a**g = (1 - a**(g+1)) / (1 - a)."""
    return float(guesses + 1) if rate == 1 else (1 - rate ** (guesses + 1)) / (1 - rate)
