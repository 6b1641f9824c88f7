"""minillm inspect: the model's predictions after each token of a prompt, and its attention maps."""

import argparse
import base64
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError
from ..output_files import check_writable
from ..text.display import token_text
from .experiments import EXPERIMENTS, add_experiments, check_experiments, run_experiments
from .options import (
    add_generation_options,
    add_model_options,
    add_prompt_options,
    generation_fields,
    load_engine,
    read_prompts,
)
from .output import (
    Table,
    as_json,
    columns_of,
    flow,
    print_report,
    quoted,
    terminal_width,
    title,
    tokens_of,
    write_page,
)
from .parser import Parser
from .plots import (
    POWER,
    TICKS,
    colour_stops,
    draw_attention,
    map_image,
    need_matplotlib,
    pooled,
    with_glyphs,
    write_figure,
)

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.explain import Explanation
    from ..engine.inspect import Position
    from ..text.tokenizer import Tokenizer

DESCRIPTION = """Show, for each position of a prompt, the token that stands there and what the
model would say next.

The model answers at every position, not only at the last. Read each line on
its own: its answer continues everything down to that line, and knows nothing
of what follows. Read one after the other the answers are gibberish.

With options of sampling, or penalties, it also shows the distribution of the
next token before and after each of their steps."""

EPILOG = """examples:
  minillm inspect --prompt "A list of colors: red,"
  minillm inspect --prompt "A list of colors:" --temperature 0.7 --top-p 0.9
"""

STEPS = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "seed", "top_h", "top_n_sigma", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "xtc_probability", "xtc_threshold", "samplers", "watermarking_config"),
    *("repetition_penalty", "encoder_repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"),
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "suppress_tokens"),
    *("begin_suppress_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "logits_processor", "max_thinking_tokens"),
)
"""Generation fields whose steps are shown"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    add_prompt_options(parser)
    add_model_options(parser, parallel=True, chosen="--lora")
    add_generation_options(parser, only=["lora", *STEPS])
    parser.add_argument("--json", action="store_true", help="print a JSON object for each prompt")
    parser.add_argument("--top", type=int, default=3, metavar="N", help="answers shown at each position (default: 3)")
    parser.add_argument(
        "--attention",
        type=Path,
        metavar="FILE",
        help="draw the attention maps of a layer: a page (.html), .png, .svg ...",
    )
    parser.add_argument(
        "--layer", type=int, metavar="L", help="which layer, from 0; needs --attention (default: the last)"
    )
    parser.add_argument(
        "--head", type=int, metavar="H", help="the head that is drawn large, from 0; needs --attention (default: 0)"
    )
    add_experiments(parser)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..decoding.prompts import encode_prompt, need_tokenizer
    from ..decoding.request import check_lora
    from ..engine.inspect import next_tokens

    _check(args)
    prompts = read_prompts(args)
    check_experiments(args, len(prompts))
    engine = load_engine(args)
    tokenizer, config = need_tokenizer(engine.tokenizer), engine.config
    if config.encoder_layers:
        raise ParameterError("inspect shows what continues a prompt: an encoder-decoder's text does not")
    if not 1 <= args.top <= config.vocab_size:
        raise ParameterError(f"--top should be from 1 to {config.vocab_size}, found {args.top}")
    layer, head = (config.num_layers - 1 if args.layer is None else args.layer), args.head or 0
    for name, number, count in (("layer", layer, config.num_layers), ("head", head, config.num_heads)):
        if not 0 <= number < count:
            raise ParameterError(f"--{name} should be from 0 to {count - 1}, found {number}")
    check_lora(args.lora, engine.adapters)
    fields = {name: value for name, value in generation_fields(args).items() if name in STEPS}
    for count, prompt in enumerate(prompts):
        ids = encode_prompt(prompt, tokenizer, config)
        positions = next_tokens(engine.runner, ids, args.top, args.lora)
        results = run_experiments(args, engine, ids)
        figures = {f"attention of layer {layer}": args.attention} if args.attention is not None else {}
        if args.attention is not None:
            model = args.model or "the model inside minillm"
            _draw(args.attention, engine, ids, layer, head, model=model, lora=args.lora)
        explanation = engine.explain(ids, lora=args.lora, **fields) if fields else None
        figures |= {EXPERIMENTS[name]: getattr(args, name) for name in results}
        if args.json:
            places = [_as_dict(place, tokenizer) for place in positions]
            steps = {} if explanation is None else {"steps": _steps_as_dicts(explanation, tokenizer, args.top)}
            print(as_json({"prompt": prompt, "positions": places, **results, **steps}))
            continue
        title(prompt, count, len(prompts))
        print("\n".join(_table(positions, tokenizer, terminal_width())))
        if explanation is not None:
            print_report(["", Table(explanation.head, explanation.rows(max(args.top, SHOWN)), "the next token")])
        for name, path in figures.items():
            print(f"{name}: {path}")


def _as_dict(position: "Position", tokenizer: "Tokenizer") -> dict[str, Any]:
    """A position in the output of --json."""
    ids = [token for token, _ in position.next]
    answers = zip(ids, tokens_of(tokenizer, ids) or (), (chance for _, chance in position.next), strict=True)
    return {
        "token_id": position.token_id,
        "token": tokenizer.token(position.token_id),
        "logprob": position.logprob,
        "next": [{"token_id": i, "token": text, "probability": chance} for i, text, chance in answers],
    }


SHOWN = 8
"""Likeliest tokens of the distributions, at least"""


def _steps_as_dicts(explanation: "Explanation", tokenizer: "Tokenizer", top: int) -> list[dict[str, Any]]:
    """The distributions in the output of --json."""
    tokens = explanation.likeliest(max(top, SHOWN))
    names = tokens_of(tokenizer, tokens) or []
    return [
        {
            "name": step.name,
            "tokens_left": step.tokens_left,
            "entropy": step.entropy,
            "next": [
                {"token_id": token, "token": name, "probability": float(step.probabilities[token])}
                for token, name in zip(tokens, names, strict=True)
            ],
        }
        for step in explanation.steps
    ]


def _check(args: argparse.Namespace) -> None:
    """Check what can be checked before the model is loaded.

    Raises:
        ParameterError: --layer or --head without --attention.
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    if args.attention is not None:
        check_writable(args.attention)
        need_matplotlib(None if args.attention.suffix in PAGES else args.attention)
        return
    for name in ("layer", "head"):
        if getattr(args, name) is not None:
            raise ParameterError(f"--{name} says which maps to draw: add --attention FILE.html")


LABELS = {"wide": 56, "middle": 32, "narrow": 20}
"""Labels that fit on a side of the large map, on pages of three widths"""
PAGES = (".html", ".htm")
LONGEST = 12
"""Characters of a label"""


def _draw(path: Path, engine: "Engine", ids: list[int], layer: int, head: int, model: str, lora: str | None) -> None:
    """Write the attention maps of a layer, as a page if the file's name says so."""
    from ..decoding.prompts import need_tokenizer
    from ..engine.inspect import masked_attention_maps

    tokenizer = need_tokenizer(engine.tokenizer)
    maps, masked = masked_attention_maps(engine.runner, ids, layer, lora)
    tokens = [tokenizer.token(i) for i in ids]
    if path.suffix not in PAGES:
        drawn = tokens if path.suffix == ".svg" else list(map(with_glyphs, tokens))  # who shows an SVG has fonts
        write_figure(path, draw_attention, maps=maps, masked=masked, tokens=drawn, layer=layer, head=head)
        return
    pixels, size = pooled(maps, masked)
    steps = {name: -(-len(ids) // most) for name, most in LABELS.items()}
    labels = []
    for i, token in enumerate(tokens):
        if on := [name for name, step in steps.items() if i % step == 0]:
            labels.append({"text": token_text(token, LONGEST), "place": (i + 0.5) / len(ids), "on": on})
    write_page(
        path,
        "attention.html",
        model=model,
        layer=layer,
        head=head,
        count=len(ids),
        size=size,
        labels=labels,
        longest=LONGEST,
        images=[base64.b64encode(map_image(head_pixels)).decode() for head_pixels in pixels],
        stops=colour_stops(),
        ticks=[(f"{tick:g}", tick**POWER) for tick in TICKS],
    )


def _table(positions: list[Any], tokenizer: "Tokenizer", width: int | None) -> list[str]:
    """A line for each position, folded if it is wider than `width`."""
    shown = [quoted(tokenizer, p.token_id) for p in positions]
    most = max(5, *map(columns_of, shown))
    lines = flow(f"{'':>4}  {'token':<{most}}  {'p':>5}  ", ["would say next"], width)
    for i, (position, token) in enumerate(zip(positions, shown, strict=True)):
        own = "" if position.logprob is None else f"{math.exp(position.logprob):.3f}"
        answers = [f"{quoted(tokenizer, t)} {p:.3f}" for t, p in position.next]
        space = " " * (most - columns_of(token))
        lines += flow(f"{i:>4}  {token}{space}  {own:>5}  ", answers, width, gap=" " * 3)
    return lines
