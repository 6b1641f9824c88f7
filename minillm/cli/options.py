"""Options that several commands share, and what they become."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PromptError, UsageError
from .loading_bar import loading_bar

if TYPE_CHECKING:
    from ..decoding.parameters import Settings
    from ..engine import Engine

MAX_BATCH_SIZE = 16
"""Prompts side by side; more of them wait."""

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("top_h", "top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
)
"""Any of these turns sampling on; but --top-k beside --penalty-alpha counts the candidates of contrastive search."""


def add_model_options(parser: argparse.ArgumentParser, *, dtypes: str | None = None) -> None:
    """Which model, and how it runs. `dtypes` are the default of a command that takes several."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="MODEL", help="checkpoint folder or Hugging Face hub id (default: the small model inside)"
    )
    group.add_argument("--revision", help="branch, tag or commit on the hub")
    group.add_argument(
        "--tokenizer", metavar="PATH", help="folder, tokenizer.json or hub id in place of the model's own tokenizer"
    )
    several = "" if dtypes is None else "; several, with commas"
    group.add_argument(
        "--dtype",
        default=dtypes or "auto",
        help=f"how weights are kept: float32, float16, bfloat16, int8, int4{several} (default: {dtypes or 'auto'})",
    )
    group.add_argument("--device", default="cpu", help="cpu (default), or cuda: an NVIDIA GPU")
    group.add_argument("--backend", default="auto", help="numpy, or numba where it is installed (default: auto)")
    group.add_argument("--cache-dtype", default="auto", help="of keys and values: float32 (default), bfloat16, int8")
    group.add_argument("--threads", type=int, metavar="N", help="of the processor (default: its cores)")


def add_helper_options(parser: argparse.ArgumentParser) -> None:
    """Models that work beside the first."""
    group = parser.add_argument_group("several models", "Folder or hub id, with the same vocabulary.")
    group.add_argument("--draft", metavar="MODEL", help="a smaller one that guesses ahead (speculative decoding)")
    group.add_argument("--amateur", metavar="MODEL", help="a weaker one to differ from (contrastive decoding)")


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """How the tokens are chosen. Names and meanings are those of `GenerationConfig`."""
    lengths = parser.add_argument_group("length and end")
    lengths.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="tokens to generate (default: the model's own, else 20)"
    )
    lengths.add_argument("--min-new-tokens", type=int, metavar="N", help="tokens before the text may end")
    lengths.add_argument(
        "--stop", dest="stop_strings", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    lengths.add_argument("--include-stop", action="store_true", default=None, help="keep the stop text")
    choice = parser.add_argument_group("choice of tokens", "Greedy by default; any of the first five options samples.")
    choice.add_argument("--temperature", type=float, metavar="T", help="above 1 flattens, below 1 sharpens")
    choice.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest (default: 50; 0: all)")
    choice.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest that together reach P")
    choice.add_argument("--min-p", type=float, metavar="P", help="draw from what is P times as likely as the best")
    choice.add_argument("--seed", type=int, help="of the draws")
    choice.add_argument("--sample", dest="do_sample", action="store_true", default=None, help="sample as it is")
    choice.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 avoids tokens seen before")
    choice.add_argument("--presence-penalty", type=float, metavar="X", help="off each token generated before")
    choice.add_argument("--frequency-penalty", type=float, metavar="X", help="off each token, times its count")
    choice.add_argument("--num-beams", type=int, metavar="N", help="beam search over N beams")
    choice.add_argument("--length-penalty", type=float, metavar="X", help="of beams: above 0 favours long results")
    choice.add_argument(
        "--early-stopping", type=_early_stopping, metavar="WHEN", help="of beams: yes, no (default) or never"
    )
    choice.add_argument("--num-beam-groups", type=int, metavar="N", help="groups of beams that avoid each other")
    choice.add_argument("--diversity-penalty", type=float, metavar="X", help="how much they do")
    choice.add_argument(
        "--penalty-alpha", type=float, metavar="A", help="contrastive search among the --top-k likeliest: its weight"
    )
    choice.add_argument("--num-return-sequences", type=int, metavar="N", help="results for each prompt (default: 1)")
    choice.add_argument(
        "--no-cache", dest="use_cache", action="store_false", default=None, help="compute everything at every step"
    )
    _add_filter_options(parser)
    _add_word_options(parser)
    _add_guide_options(parser)
    _add_guess_options(parser)


def _add_filter_options(parser: argparse.ArgumentParser) -> None:
    """Less common ways to sample."""
    group = parser.add_argument_group("further ways to sample", "Any of these samples too.")
    group.add_argument("--typical-p", type=float, metavar="P", help="draw from the most typical that together reach P")
    group.add_argument("--epsilon-cutoff", type=float, metavar="P", help="draw from what has at least probability P")
    group.add_argument("--eta-cutoff", type=float, metavar="P", help="the same, falling with the entropy")
    group.add_argument("--top-h", type=float, metavar="H", help="draw from the best with a share H of the entropy")
    group.add_argument("--top-n-sigma", type=float, metavar="N", help="draw from N deviations below the best upwards")
    group.add_argument("--mirostat", type=int, metavar="2", help="Mirostat 2.0: hold the text's surprise at tau")
    group.add_argument("--mirostat-tau", type=float, metavar="BITS", help="the surprise to hold (default: 5)")
    group.add_argument("--mirostat-eta", type=float, metavar="X", help="how fast it corrects (default: 0.1)")


def _add_word_options(parser: argparse.ArgumentParser) -> None:
    """What is never said. Fields that are made of many token ids, or of functions, are the library's."""
    group = parser.add_argument_group("words")
    group.add_argument("--no-repeat-ngram-size", type=int, metavar="N", help="say no N tokens in a row twice")
    group.add_argument("--suppress-tokens", type=int, nargs="+", metavar="ID", help="tokens that never come")
    group.add_argument("--begin-suppress-tokens", type=int, nargs="+", metavar="ID", help="that do not come first")
    group.add_argument("--forced-eos-token-id", type=int, metavar="ID", help="the last token at the limit of length")


def _add_guide_options(parser: argparse.ArgumentParser) -> None:
    """A form that the text keeps to."""
    group = parser.add_argument_group(
        "guided generation", "Only tokens that keep the text within a form; needs the extra 'guided'."
    )
    group.add_argument("--guided-json", metavar="SCHEMA", help="a JSON schema: {...}, or the name of its file")
    group.add_argument("--guided-regex", metavar="REGEX", help="a regular expression")
    group.add_argument("--guided-grammar", metavar="FILE", help="a grammar in Lark's notation")
    group.add_argument("--guided-choice", action="append", metavar="TEXT", help="one of these; may be repeated")


def _add_guess_options(parser: argparse.ArgumentParser) -> None:
    """Several tokens in one pass, and two models against each other."""
    ahead = parser.add_argument_group("guessing ahead", "The same tokens in fewer passes.")
    ahead.add_argument("--num-assistant-tokens", type=int, metavar="N", help="of the draft model (default: 5; 0: none)")
    ahead.add_argument(
        "--prompt-lookup-num-tokens", type=int, metavar="N", help="guess N tokens by what followed before"
    )
    ahead.add_argument("--max-matching-ngram-size", type=int, metavar="N", help="... the last N tokens (default: 2)")
    ahead.add_argument("--lookahead-window", type=int, metavar="W", help="guess by Jacobi iteration W positions ahead")
    ahead.add_argument("--lookahead-ngram-size", type=int, metavar="N", help="... in N-grams (default: 3)")
    ahead.add_argument("--lookahead-guesses", type=int, metavar="G", help="... of which G are verified (default: 5)")
    contrast = parser.add_argument_group("contrastive decoding", "Of the amateur model.")
    contrast.add_argument("--contrastive-alpha", type=float, metavar="A", help="who is eligible (default: 0.1)")
    contrast.add_argument("--amateur-temperature", type=float, metavar="T", help="of its distribution (default: 1)")


def _early_stopping(word: str) -> bool | str:
    words: dict[str, bool | str] = {"yes": True, "no": False, "never": "never"}
    if word not in words:
        raise argparse.ArgumentTypeError(f"expected yes, no or never, found {word!r}")
    return words[word]


def generation_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `GenerationConfig` that the command line sets.

    Raises:
        PromptError: a file that one of them names is not valid UTF-8.
        UsageError: it cannot be read.
    """
    from ..decoding.parameters import GenerationConfig

    names = {field.name for field in dataclasses.fields(GenerationConfig)}
    fields = {name: value for name, value in vars(args).items() if name in names and value is not None}
    contrastive = {"top_k"} if "penalty_alpha" in fields else set()
    if fields.keys() & set(SAMPLING) - contrastive:
        fields["do_sample"] = True
    for name in ("guided_json", "guided_grammar"):
        if name in fields and not (name == "guided_json" and fields[name].lstrip().startswith("{")):
            fields[name] = decode(Path(fields[name]).read_bytes, fields[name])
    return fields


def settle(args: argparse.Namespace, fields: Mapping[str, Any]) -> "Settings":
    """What a request with these fields will run with, the checkpoint's own defaults below them.

    A hub id in `args` becomes the folder that was found, so that the hub is asked once.

    Raises:
        ModelError: the model is not to be had.
        ParameterError: a field is impossible or without effect. What depends on the vocabulary is left to the engine.
    """
    from ..checkpoint import find_model
    from ..decoding.fields import MODELS
    from ..decoding.parameters import GenerationConfig
    from ..decoding.resolving import resolve
    from ..files import read_optional_json

    defaults = {}
    if args.model is not None:
        with loading_bar():
            folder = find_model(args.model, revision=args.revision)
        args.model, args.revision = str(folder), None
        defaults = read_optional_json(folder / "generation_config.json")
    models = [name for name in MODELS if getattr(args, name) is not None]
    return resolve(GenerationConfig(**fields), defaults, vocab_size=sys.maxsize, eos_token_id=0, models=models)


def sequences_of(settings: "Settings") -> int:
    """Sequences that a request with these settings takes at once."""
    from ..decoding.select import strategy_for

    return strategy_for(settings).max_sequences


def load_engine(
    args: argparse.Namespace, *, prompts: int = 1, sequences: int = 1, prefix_cache: bool = False
) -> "Engine":
    """The engine that the model options ask for, wide enough for these prompts and the sequences that each takes."""
    from ..engine import Engine

    with loading_bar():
        return Engine(
            args.model,
            revision=args.revision,
            max_batch_size=max(1, min(prompts, MAX_BATCH_SIZE), sequences),
            prefix_cache=prefix_cache,
            draft=getattr(args, "draft", None),
            amateur=getattr(args, "amateur", None),
            tokenizer=args.tokenizer,
            **placement_fields(args),
        )


def placement_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Where the model runs and how its numbers are kept, as `Engine` takes them."""
    return {name: getattr(args, name) for name in ("dtype", "device", "backend", "cache_dtype", "threads")}


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Where the text comes from."""
    group = parser.add_argument_group("prompt", "Without one of these it is read from standard input.")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated: all run side by side")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="the whole file is one prompt")


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of `add_prompt_options`; the last line break of a file or of standard input is not part of it.

    Raises:
        PromptError: the text is not valid UTF-8, or standard input is closed.
        UsageError: the file cannot be read.
    """
    if args.prompt is not None:
        return list(args.prompt)
    if args.prompt_file is None:
        if sys.stdin is None:
            raise PromptError("standard input is closed: give --prompt or --prompt-file")
        return [decode(sys.stdin.buffer.read, "standard input")]
    return [decode(args.prompt_file.read_bytes, str(args.prompt_file))]


def decode(read: Callable[[], bytes], source: str) -> str:
    """UTF-8 text without its last line break.

    Raises:
        PromptError: it is not valid UTF-8.
        UsageError: it cannot be read.
    """
    try:
        text = read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} should be UTF-8 text; byte {error.start} is not") from None
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from None
    return text.removesuffix("\n").removesuffix("\r")
