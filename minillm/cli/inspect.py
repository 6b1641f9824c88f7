"""minillm inspect: the model's predictions after each token of a prompt, and its attention maps."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError
from .options import add_model_options, add_prompt_options, load_engine, read_prompts
from .output import as_json
from .plots import draw_attention, need_matplotlib, write_figure

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

DESCRIPTION = """Show, for each position of a prompt, the token that stands there and what the
model would say next.

The model answers at every position, not only at the last. Read each line on
its own: its answer continues everything down to that line, and knows nothing
of what follows. Read one after the other the answers are gibberish."""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser("inspect", help="what the model would say at each position", description=DESCRIPTION)
    add_prompt_options(parser)
    add_model_options(parser)
    parser.add_argument("--top", type=int, default=3, metavar="N", help="answers shown at each position (default: 3)")
    parser.add_argument("--attention", type=Path, metavar="FILE.png", help="draw the attention maps of a layer")
    parser.add_argument(
        "--layer", type=int, metavar="L", help="which layer, from 0; needs --attention (default: the last)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..inspect import attention_maps, next_tokens
    from ..request import encode_prompt, need_tokenizer

    if args.layer is not None and args.attention is None:
        raise ParameterError("--layer says which maps to draw: add --attention FILE.png")
    if args.attention is not None:
        need_matplotlib()
    prompts = read_prompts(args)
    if args.attention is not None and len(prompts) > 1:
        raise ParameterError("--attention draws one prompt: give one")
    engine = load_engine(args)
    tokenizer, config = need_tokenizer(engine.tokenizer), engine.config
    if not 1 <= args.top <= config.vocab_size:
        raise ParameterError(f"--top should be from 1 to {config.vocab_size}, found {args.top}")
    layer = config.num_layers - 1 if args.layer is None else args.layer
    if not 0 <= layer < config.num_layers:
        raise ParameterError(f"--layer should be from 0 to {config.num_layers - 1}, found {layer}")
    for prompt in prompts:
        ids = encode_prompt(prompt, tokenizer, config)
        for line in _table(next_tokens(engine.runner, ids, args.top), tokenizer):
            print(line)
        if args.attention is not None:
            maps, tokens = attention_maps(engine.runner, ids, layer), [tokenizer.token(i) for i in ids]
            write_figure(args.attention, draw_attention, maps=maps, tokens=tokens, layer=layer)
            print(f"attention of layer {layer}: {args.attention}")


def _table(positions: list[Any], tokenizer: "Tokenizer") -> list[str]:
    """One line per position."""
    shown = [as_json(tokenizer.token(p.token_id)) for p in positions]
    width = max(5, *map(len, shown))
    lines = [f"{'':>4}  {'token':<{width}}  {'p':>5}  would say next"]
    for i, (position, token) in enumerate(zip(positions, shown, strict=True)):
        own = "" if position.logprob is None else f"{math.exp(position.logprob):.3f}"
        answers = "   ".join(f"{as_json(tokenizer.token(t))} {p:.3f}" for t, p in position.next)
        lines.append(f"{i:>4}  {token:<{width}}  {own:>5}  {answers}")
    return lines
