"""minillm chat: an interactive loop that keeps its cache between turns."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError, PromptError
from .options import add_generation_options, add_helper_options, add_model_options, generation_fields, load_engine

if TYPE_CHECKING:
    from ..engine import Engine

PROMPT = "> "


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "chat",
        help="write with the model, turn by turn",
        description="Write with the model, turn by turn. It reads the whole conversation, of which only what is new is "
        "computed. An empty line or Ctrl-D ends it.",
    )
    add_model_options(parser)
    add_helper_options(parser)
    add_generation_options(parser)
    parser.add_argument("--stats", action="store_true", help="after each turn: tokens computed and found in the cache")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    fields = {"max_new_tokens": 64, **generation_fields(args)}
    if fields.get("num_return_sequences", 1) > 1:
        raise ParameterError("--num-return-sequences: a chat goes on with one answer; leave it out")
    engine = load_engine(args, fields=fields, prefix_cache=True)
    print("This model has no chat template: each line is continued as raw text.", file=sys.stderr)
    conversation: list[int] = []
    while line := _read_line():
        conversation = turn(engine, conversation, line, fields, show_stats=args.stats)


def _read_line() -> str:
    """One line from the user; empty at the end."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "")
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input should be UTF-8 text; byte {error.start} is not") from None


def turn(
    engine: "Engine", conversation: list[int], line: str, fields: dict[str, Any], *, show_stats: bool = False
) -> list[int]:
    """Continue the conversation by the user's line and the model's answer, which is printed as it comes.

    Args:
        engine: made with `prefix_cache=True`
        conversation: token ids of all turns so far
        line: what the user wrote
        fields: of `GenerationConfig`
        show_stats: print what was computed

    Returns:
        The longer conversation.
    """
    assert engine.tokenizer is not None
    text = line if not conversation else "\n" + line
    prompt = conversation + engine.tokenizer.encode(text, add_special_tokens=not conversation)
    before = engine.stats.prefill_tokens
    answer: list[int] = []
    for event in engine.stream(prompt, **fields):
        answer += event.token_ids
        print(event.text, end="", flush=True)
    print(flush=True)
    if show_stats:
        computed = engine.stats.prefill_tokens - before
        print(f"prompt of {len(prompt)} tokens, {computed} computed, {len(prompt) - computed} cached", file=sys.stderr)
    return prompt + answer
