"""Does guessing ahead pay? Tokens for each pass and seconds for each token, with guesses and without.

Prompt lookup gets a prompt that its continuation repeats, lookahead lists and counting, the draft model the same (the
model drafts for itself with --draft left out: every guess is right, and each costs as much as a pass: a bound, not a
gain). Greedy tokens are compared with those without guesses; a difference ends the script with exit code 1.
"""

import argparse
import copy
import os
import statistics
import sys
from typing import TYPE_CHECKING, Any

from harness import positive, thread_environment

if TYPE_CHECKING:
    from minillm import Engine

COUNTED = "Count from 3 to 20: " + ", ".join(map(str, range(3, 21))) + ".\n"
REPEATING = [COUNTED + "Count from 3 to 20:", COUNTED + "Count from 3 to 20: 3,"]
LISTS = ["A list of colors: red,", "A list of animals: cat,", "Count from 3 to 30:", "Count from 40 to 60:"]

WAYS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "prompt lookup, k = 10": (REPEATING, {"prompt_lookup_num_tokens": 10}),
    "prompt lookup, k = 3": (REPEATING, {"prompt_lookup_num_tokens": 3}),
    "lookahead, W = 5, N = 2": (LISTS, {"lookahead_window": 5, "lookahead_ngram_size": 2}),
    "lookahead, W = 15, N = 2": (LISTS, {"lookahead_window": 15, "lookahead_ngram_size": 2}),
    "lookahead, W = 5, N = 3": (LISTS, {"lookahead_window": 5}),
    "lookahead, W = 15, N = 3": (LISTS, {"lookahead_window": 15}),
    "draft, g = 5": (LISTS, {"num_assistant_tokens": 5}),
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure generation with guesses against generation without.")
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the demo model)")
    parser.add_argument("--draft", help="draft model (default: the model itself)")
    parser.add_argument("--batch", type=positive, default=1, help="sequences side by side (default: 1)")
    parser.add_argument("--repeat", type=positive, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--max-new-tokens", type=positive, default=60)
    parser.add_argument("--threads", type=positive, default=1)
    return parser.parse_args()


def timed(engine: "Engine", prompts: list[str], fields: dict[str, Any]) -> tuple[Any, Any, list[list[int]]]:
    """One run: the statistics before and after, and the tokens."""
    before = copy.deepcopy(engine.stats)
    tokens = [generation.token_ids for generation in engine.generate(prompts, **fields)]
    return before, copy.deepcopy(engine.stats), tokens


def seconds_per_token(before: Any, after: Any, tokens: list[list[int]]) -> float:
    """Of those that come after each sequence's first."""
    seconds: float = after.decode_seconds - before.decode_seconds
    return seconds / sum(len(line) - 1 for line in tokens)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code."""
    from minillm import Engine
    from minillm.loading import DEMO_MODEL

    model = args.model or DEMO_MODEL
    print(f"{'':<26}{'accepted':>9}{'tokens/pass':>13}{'formula':>9}{'ms/token':>10}{'without':>9}{'speed-up':>10}")
    same = True
    for name, (prompts, fields) in WAYS.items():
        drafting = "num_assistant_tokens" in fields
        options = {"max_new_tokens": args.max_new_tokens}
        plain = options | ({"num_assistant_tokens": 0} if drafting else {})
        with Engine(model, max_batch_size=args.batch, draft=(args.draft or model) if drafting else None) as engine:
            slow, fast = [], []
            for _ in range(args.repeat + 1):  # the first round is not counted
                before, after, expected = timed(engine, prompts, plain)
                slow.append(seconds_per_token(before, after, expected))
                before, after, tokens = timed(engine, prompts, options | fields)
                fast.append(seconds_per_token(before, after, tokens))
                same = same and tokens == expected
            counts = engine.stats.speculation
        without, guessed = (1000 * statistics.median(times[1:]) for times in (slow, fast))
        print(
            f"{name:<26}{counts.acceptance_rate:>9.2f}{counts.tokens_per_step:>13.2f}"
            f"{counts.predicted_tokens_per_step:>9.2f}{guessed:>10.2f}{without:>9.2f}{without / guessed:>10.2f}"
        )
    print("tokens: the same with and without guesses" if same else "tokens DIFFER")
    return 0 if same else 1


def main() -> int:
    """Exit code 0; 1 if the tokens differ."""
    args = parse()
    os.environ.update(thread_environment(args.threads))  # before anything imports NumPy
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
