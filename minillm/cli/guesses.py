"""Speculation statistics for --stats."""

import copy
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine import Engine

GUESSING = (
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "lookahead_window",
    "lookahead_ngram_size",
    "lookahead_guesses",
    "num_assistant_tokens",
)
"""Fields of `GenerationConfig` that control speculation."""


def print_speculation(engine: "Engine", prompts: list[str], fields: dict[str, Any]) -> None:
    """Print acceptance rate, tokens per pass and speed-up, measured and by the formulas.

    The measured speed-up is relative to generation without speculation, so the prompts run once more.
    """
    guessed = copy.deepcopy(engine.stats)
    engine.generate(prompts, **plain_fields(fields, has_draft="draft" in guessed.decode_passes))
    seconds = engine.stats.decode_seconds - guessed.decode_seconds
    tokens = engine.stats.decode_tokens - guessed.decode_tokens
    passes = engine.stats.decode_passes["target"] - guessed.decode_passes["target"]
    if not tokens or not passes:  # nothing after the first tokens to compare
        return
    counts = guessed.speculation
    target_pass = (engine.stats.decode_pass_seconds["target"] - guessed.decode_pass_seconds["target"]) / passes
    draft_pass = guessed.decode_pass_seconds["draft"] / max(1, guessed.decode_passes["draft"])
    measured = (seconds / tokens) / (guessed.decode_seconds / counts.tokens)
    speed_up = counts.predicted_speed_up(draft_pass / target_pass)
    rate = 100 * counts.acceptance_rate
    lines = [
        f"{'guesses':<12}{counts.guesses:.1f} in a row, {rate:.0f} % of those looked at accepted",
        f"{'per pass':<12}{counts.tokens_per_step:.2f} tokens, {counts.predicted_tokens_per_step:.2f} by the formula",
        f"{'speed-up':<12}{measured:.2f} measured, {speed_up:.2f} by the formula",
    ]
    print("\n".join(lines), file=sys.stderr)


def plain_fields(fields: dict[str, Any], *, has_draft: bool) -> dict[str, Any]:
    """The same request without speculation."""
    plain = {name: value for name, value in fields.items() if name not in GUESSING}
    return plain | ({"num_assistant_tokens": 0} if has_draft else {})
