"""Counts and times of the steps of an engine."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from .acceptance import Speculation


@dataclass
class Stats:
    """Counts and times of the steps."""

    prompt_tokens: int = 0
    """Tokens of the prompts computed so far"""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache"""
    prefill_tokens: int = 0
    """Prompt tokens computed, and tokens recomputed after a preemption; those found in the cache are not counted"""
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    """Tokens computed after the prompts"""
    decode_seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    """How often a running request gave back its pages of the K/V cache, to be recomputed later"""
    speculation: Speculation = field(default_factory=Speculation)
    """Speculation counts of finished requests"""
    watched_bytes: int = 0
    """Bytes of the rows that finished requests with `watch` have kept in memory while they ran"""
    decode_passes: Counter[str] = field(default_factory=Counter)
    """Forward passes by model in steps without prompts, and their seconds"""
    decode_pass_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    compile_seconds: float = 0.0
    """Seconds of compiling kernels, while loading and in steps; none of the other times counts it"""

    def count_pass(self, model: str, seconds: float) -> None:
        """Add a forward pass of a step without prompts."""
        self.decode_passes[model] += 1
        self.decode_pass_seconds[model] += seconds

    def count_step(self, tokens: int, seconds: float, compile_seconds: float, *, prompts: bool) -> None:
        """Add a step that computed so many tokens, of prompts among others or not."""
        self.steps += 1
        self.compile_seconds += compile_seconds
        if prompts:
            self.prefill_tokens += tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += tokens
            self.decode_seconds += seconds
