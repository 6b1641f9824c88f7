"""minillm classify: the labels of texts, or the entities in them, a line for each."""

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError, UsageError
from ..progress_bar import bars_aside
from .options import add_model_options, add_text_options, each_block, load_engine, read_texts
from .output import as_json, show
from .parser import Parser

if TYPE_CHECKING:
    from ..engine.engine import Engine

DESCRIPTION = """\
Label texts with a model for sequence classification (sentiment, topics, ...)
or a reranker: a line for each, of its best label and the label's score. A model
for token classification lists the entities of each text."""
EPILOG = """examples:
  minillm classify -m siebert/sentiment-roberta-large-english "A fine film."
  minillm classify -m cross-encoder/ms-marco-MiniLM-L6-v2 --pairs -f pairs.tsv
  minillm classify -m dslim/bert-base-NER "Wolfgang lives in Berlin."
"""
FUNCTIONS = ("softmax", "sigmoid", "none")
AGGREGATIONS = ("none", "simple", "first", "average", "max")


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    texts = add_text_options(parser)
    texts.add_argument("--pairs", action="store_true", help="a line is two texts with a tab between, as rerankers take")
    add_model_options(parser, needed="a model for sequence classification", parallel=True, chosen="--lora")
    group = parser.add_argument_group("labels")
    group.add_argument("-k", "--top-k", type=int, metavar="N", help="show the best N labels (default: 1)")
    group.add_argument("--all", action="store_true", help="show all labels")
    group.add_argument(
        "--function", choices=FUNCTIONS, help="of logits to scores: softmax, sigmoid, none (default: the checkpoint's)"
    )
    group.add_argument(
        "--aggregation",
        choices=AGGREGATIONS,
        help="of tokens to entities: none, simple, first, average, max (default: simple)",
    )
    group.add_argument("--lora", metavar="NAME", help="adapter of --adapters to use")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each text, with its labels")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.all and args.top_k is not None:
        raise ParameterError("--all and --top-k exclude each other: give one")
    texts = read_texts(args)
    pairs: list[Any] = [_pair(text) for text in texts] if args.pairs else [*texts]
    top_k = None if args.all else 1 if args.top_k is None else args.top_k
    with load_engine(args, any_task=True, prefix_cache=False) as engine:
        if engine.config.output == "token_labels":
            _refuse_of_texts(args)
            for block in each_block(texts, "classifying", counted=False):
                _show_entities(engine, block, args)
            return
        if args.aggregation is not None:
            raise ParameterError("--aggregation is for models for token classification: leave it out")
        for block in each_block(pairs, "classifying", counted=False):
            options = {"top_k": top_k, "function": args.function, "truncate": args.truncate, "lora": args.lora}
            results: Any = engine.classify(block, **options)
            with bars_aside():
                for text, result in zip(block, results, strict=True):
                    labels = [{"label": label.label, "score": label.score} for label in result.labels]
                    if args.json:
                        source = {"text": text} if isinstance(text, str) else {"text": text[0], "text_pair": text[1]}
                        show(as_json(source | {"labels": labels}))
                    else:
                        show("  ".join(f"{label.label} {label.score:.4f}" for label in result.labels))


def _refuse_of_texts(args: argparse.Namespace) -> None:
    """Refuse options that are for labels of texts."""
    given = {"--pairs": args.pairs, "--all": args.all, "--top-k": args.top_k, "--function": args.function}
    name = next((name for name, value in given.items() if value), None)
    if name is not None:
        raise ParameterError(f"{name} is for labels of texts, and this model labels tokens: leave it out")


def _show_entities(engine: "Engine", texts: list[str], args: argparse.Namespace) -> None:
    """A line of entities, or a JSON object, for each text."""
    results: Any = engine.classify_tokens(
        texts, aggregation=args.aggregation or "simple", truncate=args.truncate, lora=args.lora
    )
    with bars_aside():
        for text, entities in zip(texts, results, strict=True):
            if args.json:
                names = ("label", "score", "word", "start", "end")
                show(
                    as_json({"text": text, "entities": [{n: getattr(entity, n) for n in names} for entity in entities]})
                )
            else:
                show(
                    "  ".join(
                        f"{text[entity.start : entity.end]} {entity.label} {entity.score:.4f}" for entity in entities
                    )
                )


def _pair(line: str) -> tuple[str, str]:
    first, tab, second = line.partition("\t")
    if not (tab and first.strip() and second.strip()):
        raise UsageError(f"--pairs: a line should be two texts with a tab between, found {line!r:.60}")
    return first, second
