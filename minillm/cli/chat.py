"""minillm chat: an interactive loop that keeps the K/V cache between turns."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError, PromptError
from .options import (
    COMMON,
    add_generation_options,
    add_model_options,
    generation_fields,
    load_engine,
    sequences_of,
    settle,
)
from .output import show

if TYPE_CHECKING:
    from ..engine import Engine

PROMPT = "> "

RAW_TOKENS = 64
"""Default max_new_tokens without a chat template: raw text rarely ends by itself"""

ANSWER_TOKENS = 512
"""Default max_new_tokens of an answer"""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "chat",
        help="chat with the model, turn by turn",
        description="Chat with the model, turn by turn, in the format of its chat template; a model without one "
        "continues each line as raw text. The model sees the whole conversation, of which only the new part is "
        "computed. An empty line or Ctrl-D ends the chat.",
    )
    group = parser.add_argument_group("conversation", "For models with a chat template.")
    group.add_argument("--system", metavar="TEXT", help="system message, before the first turn")
    group.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="""more variables for the chat template, such as '{"enable_thinking": false}'""",
    )
    add_model_options(parser)
    add_generation_options(parser)
    parser.add_argument("--stats", action="store_true", help="after each turn: tokens computed and found in the cache")
    parser.shorten(COMMON)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..request import need_tokenizer

    if sys.stdin is None:
        raise PromptError("standard input is closed: a chat reads its lines from it")
    fields, variables = generation_fields(args), _variables(args.chat_template_kwargs)
    if fields.get("num_return_sequences", 1) > 1:
        raise ParameterError("--num-return-sequences: a chat continues with one answer: leave it out")
    fields["num_return_sequences"] = 1  # overrides the checkpoint's default
    engine = load_engine(args, sequences=sequences_of(settle(args, fields)), prefix_cache=True)
    need_tokenizer(engine.tokenizer)  # before a line is read
    if engine.chat_template is not None:
        messages = [] if args.system is None else [{"role": "system", "content": args.system}]
        while line := _read_line():
            answer(engine, messages, line, fields, variables, show_stats=args.stats)
        return
    for option in ("system", "chat_template_kwargs"):
        if getattr(args, option) is not None:
            raise ParameterError(f"--{option.replace('_', '-')}: this model has no chat template: leave it out")
    print("This model has no chat template: each line is continued as raw text.", file=sys.stderr)
    conversation: list[int] = []
    while line := _read_line():
        conversation = turn(engine, conversation, line, fields, show_stats=args.stats)


def _variables(text: str | None) -> dict[str, Any]:
    """Parse --chat-template-kwargs."""
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ParameterError(f'--chat-template-kwargs should be a JSON object, such as {{"a": 1}}, found {text!r:.40}')
    return value


def _read_line() -> str:
    """One line from the user; empty at end of input."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "")
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input should be UTF-8 text; byte {error.start} is not") from None


def answer(
    engine: "Engine",
    messages: list[dict[str, str]],
    line: str,
    fields: dict[str, Any],
    variables: dict[str, Any] | None = None,
    *,
    show_stats: bool = False,
) -> None:
    """Append the user's line and the model's answer to the messages; print the answer as it is generated.

    Args:
        engine: has `prefix_cache=True` and a chat template
        messages: the conversation so far
        line: the user's input
        fields: fields of `GenerationConfig`
        variables: additional template variables
        show_stats: print statistics
    """
    from ..request import encode_text

    messages.append({"role": "user", "content": line})
    text = engine.render_chat(messages, chat_template_kwargs=variables)
    prompt = encode_text(text, engine.tokenizer, engine.config, add_special_tokens=False)
    _, said = _print_answer(engine, prompt, {"max_new_tokens": ANSWER_TOKENS, **fields}, show_stats=show_stats)
    messages.append({"role": "assistant", "content": said})


def turn(
    engine: "Engine", conversation: list[int], line: str, fields: dict[str, Any], *, show_stats: bool = False
) -> list[int]:
    """Append the user's line and the model's answer to raw text; print the answer as it is generated.

    Args:
        engine: has `prefix_cache=True`
        conversation: token ids of all turns so far
        line: the user's input
        fields: fields of `GenerationConfig`
        show_stats: print statistics

    Returns:
        Token ids of the conversation with this turn.
    """
    from ..request import encode_text

    text = line if not conversation else "\n" + line
    special = not conversation
    prompt = conversation + encode_text(text, engine.tokenizer, engine.config, add_special_tokens=special)
    token_ids, _ = _print_answer(engine, prompt, {"max_new_tokens": RAW_TOKENS, **fields}, show_stats=show_stats)
    return prompt + token_ids


def _print_answer(
    engine: "Engine", prompt: list[int], fields: dict[str, Any], *, show_stats: bool
) -> tuple[list[int], str]:
    """Generate an answer and print it as it is generated. Returns its tokens and text."""
    before = engine.stats.prefill_tokens
    token_ids: list[int] = []
    text = ""
    for event in engine.stream(prompt, **fields):
        token_ids += event.token_ids
        text += event.text
        show(event.text, end="")
    print(flush=True)
    if show_stats:
        computed = engine.stats.prefill_tokens - before
        print(f"prompt of {len(prompt)} tokens, {computed} computed, {len(prompt) - computed} cached", file=sys.stderr)
    return token_ids, text
