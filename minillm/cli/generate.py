"""minillm generate: continue a prompt and print the text as it is generated."""

import argparse
import copy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..backends import working_time
from ..decoding.fields import FIELDS
from ..errors import MinillmError, ParameterError
from ..progress import showing
from .options import (
    COMMON,
    add_generation_options,
    add_model_options,
    add_prompt_options,
    generation_fields,
    load_engine,
    read_prompts,
    resolve_settings,
    sequences_of,
)
from .output import as_json, flow, note, read_first, show, terminal_width, text_alone, tokens_of
from .parser import Parser

if TYPE_CHECKING:
    from ..decoding.prompt_scores import TopLogProbs
    from ..engine.engine import Engine
    from ..engine.results import Generation
    from ..text.tokenizer import Tokenizer

SPECULATION = [name for name, setting in FIELDS.items() if setting.group == "speculation"]
"""Fields of `GenerationConfig` that control speculation"""

ENDLESS_TOKENS = 256
"""Default max_new_tokens of a model without an end-of-sequence token"""

DESCRIPTION = "Continue a prompt, and print the text as it is generated."
EPILOG = """examples:
  minillm generate "A list of colors: red,"
  minillm generate "Once upon a time" --temperature 0.8 --stats
  echo "Count to 9:" | minillm generate --model facebook/opt-125m --json
"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    add_prompt_options(parser, several="; may be repeated: prompts run as one batch")
    add_model_options(parser, parallel=True, chosen="--lora")
    output = add_generation_options(parser, output=True)
    output.add_argument("--json", action="store_true", help="print a JSON object for each prompt")
    output.add_argument(
        "--stats",
        action="store_true",
        help="print times, rates and GPU memory to standard error; speculation is compared with a run without it",
    )
    parser.shorten(COMMON)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if (args.logprobs or args.top_logprobs is not None) and not args.json:
        raise ParameterError("--logprobs and --top-logprobs need --json: add it")
    prompts, fields = read_prompts(args), generation_fields(args)
    settings = resolve_settings(args, fields)
    engine = load_engine(args, prompts=len(prompts), sequences=sequences_of(settings))
    fields = limited(engine, fields)
    began = working_time()
    if len(prompts) == 1 and not args.json and settings.num_return_sequences == 1:
        first = _stream(engine, prompts[0], fields)
    else:
        first = None
        for prompt, generation in zip(prompts, engine.generate(prompts, **fields), strict=True):
            if args.json:
                print(as_json(_as_dict(prompt, generation, engine.tokenizer)), flush=True)
            else:
                show(_as_text(generation))
    if args.stats:
        _print_stats(engine, None if first is None else first - began)
        if engine.stats.speculation.passes:
            _print_speculation(engine, prompts, fields)


def limited(engine: "Engine", fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with a limit, where neither the user nor the checkpoint has set one.

    Only the context limits a text that can end.
    """
    if not {"max_new_tokens", "max_length"}.isdisjoint(fields.keys() | engine.generation_defaults.keys()):
        return fields
    if not engine.config.eos_token_ids:
        return fields | {"max_new_tokens": ENDLESS_TOKENS}
    return fields | {"max_length": engine.context}


def _stream(engine: "Engine", prompt: str, fields: dict[str, Any]) -> float | None:
    """Print the text as it is generated. Returns the `working_time` of the first token."""
    first, reason, tokens = None, None, 0
    with text_alone():
        events = read_first(engine.stream(prompt, **fields))
        try:
            with showing(False):
                for event in events:
                    if event.token_ids and first is None:
                        first = working_time()
                    tokens, reason = tokens + len(event.token_ids), event.finish_reason
                    show(event.text, end="")
        except MinillmError:
            if tokens:  # the error has a line of its own
                print()
            raise
        print()
    if reason == "length" and sys.stdout.isatty():
        note(f"stopped at the limit, after {tokens} token{'s' * (tokens > 1)}: -n sets another")
    return first


def _as_text(generation: "Generation") -> str:
    return "\n".join(completion.text for completion in generation.completions)


def _as_dict(prompt: str, generation: "Generation", tokenizer: "Tokenizer | None") -> dict[str, Any]:
    """The output of --json, without absent values: beside all ids the texts of their tokens."""

    def texts(tops: "Sequence[TopLogProbs | None]") -> list[list[str] | None]:
        return [None if top is None else tokens_of(tokenizer, [token for token, _ in top]) for top in tops]

    result: dict[str, Any] = {"prompt": prompt, "prompt_token_ids": generation.prompt_token_ids}
    result["prompt_tokens"] = tokens_of(tokenizer, generation.prompt_token_ids)
    for name in ("prompt_logprobs", "prompt_top_logprobs"):
        if (values := getattr(generation, name)) is not None:
            result[name] = values
    if generation.prompt_top_logprobs is not None:
        result["prompt_top_tokens"] = texts(generation.prompt_top_logprobs)
    result["completions"] = [
        {name: value for name, value in vars(completion).items() if value is not None and name != "token_bytes"}
        | {"tokens": tokens_of(tokenizer, completion.token_ids)}
        | ({} if completion.top_logprobs is None else {"top_tokens": texts(completion.top_logprobs)})
        for completion in generation.completions
    ]
    return result


def _print_stats(engine: "Engine", first_token: float | None) -> None:
    stats = engine.stats
    rows = [
        *([("compile", stats.compile_seconds, "of kernels")] if stats.compile_seconds else []),
        ("load", engine.load_seconds, ""),
        ("prefill", stats.prefill_seconds, _rate(stats.prefill_tokens, stats.prefill_seconds)),
        ("decode", stats.decode_seconds, _rate(stats.decode_tokens, stats.decode_seconds)),
    ]
    if first_token is not None:
        rows.append(("first token", first_token, "after the request"))
    for name, seconds, more in rows:
        _tell(f"{name:<12}{seconds:>8.3f} s   ", more)
    _tell(f"{'prompts':<12}", f"{stats.prompt_tokens} tokens, {stats.cached_tokens} found in the cache")
    for rank, share in enumerate(() if engine.ranks is None else engine.ranks.weights):
        layers = f"layers {share.first_layer} to {share.stop_layer - 1}"
        _tell(f"{f'rank {rank}':<12}", f"{share.bytes / 2**20:.1f} MiB of weights, {layers}")
    cache = engine.runner.cache
    used, cached = cache.num_pages - cache.free_pages, cache.cached_pages
    pages = f"{used} used, {cached} cached, {cache.free_pages - cached} free, of {cache.page_size} positions"
    _tell(f"{'pages':<12}", pages)
    for kind, taken, predicted in engine.device_memory:
        _tell(f"{kind:<12}{taken / 2**20:>8.1f} ", f"MiB on the device; predicted {predicted / 2**20:.1f}")


def _tell(first: str, text: str) -> None:
    """Print a line on standard error, folded on a narrow terminal."""
    print("\n".join(flow(first, text.split(), terminal_width(sys.stderr))), file=sys.stderr)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens, {tokens / seconds:.1f} tokens/s" if tokens else "no tokens"


def _print_speculation(engine: "Engine", prompts: list[str], fields: dict[str, Any]) -> None:
    """Print acceptance rate, tokens per pass and speed-up, measured and by the formulas.

    The measured speed-up is relative to generation without speculation, so the prompts run once more.
    """
    before = copy.deepcopy(engine.stats)
    plain = {name: value for name, value in fields.items() if name not in SPECULATION}
    if "draft" in before.decode_passes:
        plain["num_assistant_tokens"] = 0
    engine.generate(prompts, **plain)
    seconds = engine.stats.decode_seconds - before.decode_seconds
    tokens = engine.stats.decode_tokens - before.decode_tokens
    passes = engine.stats.decode_passes["target"] - before.decode_passes["target"]
    if not tokens or not passes:  # nothing after the first tokens to compare
        return
    counts = before.speculation
    target_pass = (engine.stats.decode_pass_seconds["target"] - before.decode_pass_seconds["target"]) / passes
    draft_pass = before.decode_pass_seconds["draft"] / max(1, before.decode_passes["draft"])
    measured = (seconds / tokens) / (before.decode_seconds / counts.tokens)
    predicted = counts.predicted_speed_up(draft_pass / target_pass)
    rows = {
        "guesses": f"{counts.guesses:.1f} in a row, {100 * counts.acceptance_rate:.0f} % of those looked at accepted",
        "per pass": f"{counts.tokens_per_step:.2f} tokens, {counts.predicted_tokens_per_step:.2f} by the formula",
        "speed-up": f"{measured:.2f} measured, {predicted:.2f} by the formula",
    }
    for name, text in rows.items():
        _tell(f"{name:<12}", text)
