"""Options shared by several commands, and their conversion to engine, settings and prompts."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PromptError, UsageError
from ..progress import loading_bar

if TYPE_CHECKING:
    from ..decoding.parameters import Settings
    from ..engine import Engine

COMMON = frozenset(
    [
        "help",
        "help_all",
        "prompt",
        "prompt_file",
        "system",
        "model",
        "dtype",
        "device",
        "threads",
        "max_new_tokens",
        "stop_strings",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "num_beams",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "draft",
        "echo",
        "json",
        "stats",
    ]
)
"""Options in the short help of `generate` and `chat`."""

MAX_BATCH_SIZE = 16
"""Prompts that run in one batch; more are queued."""

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("top_h", "top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
)
"""Options that turn sampling on; --top-k with --penalty-alpha is the number of candidates of contrastive search."""


def add_model_options(parser: argparse.ArgumentParser, *, dtypes: str | None = None) -> None:
    """Add options for the model and its execution. `dtypes` is the default of a command that takes several."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="MODEL", help="checkpoint folder or Hugging Face hub id (default: the model in the package)"
    )
    group.add_argument("--revision", help="branch, tag or commit on the hub")
    group.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer folder, tokenizer.json or hub id (default: the model's)"
    )
    several = "" if dtypes is None else "; several, with commas"
    group.add_argument(
        "--dtype",
        default=dtypes or "auto",
        help=f"of weights: float32, float16, bfloat16, int8, int4{several} (default: {dtypes or 'auto'})",
    )
    group.add_argument("--device", default="cpu", help="cpu (default), or cuda: an NVIDIA GPU")
    group.add_argument("--backend", default="auto", help="numpy, or numba where it is installed (default: auto)")
    group.add_argument("--cache-dtype", default="auto", help="of the KV cache: float32 (default), bfloat16, int8")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one for each core)")


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Add generation options, with the names and meanings of `GenerationConfig`."""
    _add_text_options(parser)
    _add_sampling_options(parser)
    _add_search_options(parser)
    _add_guide_options(parser)
    _add_speculation_options(parser)


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add options for length, stopping and words. Fields of token id lists or functions are only in Python."""
    group = parser.add_argument_group("text")
    group.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="tokens to generate at most (default: the model's own, else 20)"
    )
    group.add_argument("--min-new-tokens", type=int, metavar="N", help="tokens to generate at least")
    group.add_argument(
        "--stop", dest="stop_strings", action="append", metavar="TEXT", help="stop before this text; may be repeated"
    )
    group.add_argument("--include-stop", action="store_true", default=None, help="keep the stop text in the result")
    group.add_argument(
        "--num-return-sequences", type=int, metavar="N", help="results for each prompt, sampled or beams (default: 1)"
    )
    group.add_argument("--no-repeat-ngram-size", type=int, metavar="N", help="never repeat a sequence of N tokens")
    group.add_argument("--suppress-tokens", type=int, nargs="+", metavar="ID", help="never generate these tokens")
    group.add_argument(
        "--begin-suppress-tokens", type=int, nargs="+", metavar="ID", help="never begin with these tokens"
    )
    group.add_argument(
        "--forced-eos-token-id", type=int, metavar="ID", help="the last token, if the limit of length is reached"
    )
    group.add_argument(
        "--no-cache", dest="use_cache", action="store_false", default=None, help="recompute all K/V at every step"
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling", "Greedy search by default. Each of these but the penalties turns sampling on."
    )
    group.add_argument("--temperature", type=float, metavar="T", help="divide logits by T: above 1 flattens")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens (default: 50; 0: all)")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that sum to P")
    group.add_argument("--min-p", type=float, metavar="P", help="keep tokens P times as likely as the best, or more")
    group.add_argument("--seed", type=int, help="random seed (default: a fresh one)")
    group.add_argument(
        "--sample", dest="do_sample", action="store_true", default=None, help="sample with the model's own settings"
    )
    group.add_argument("--typical-p", type=float, metavar="P", help="keep the most typical tokens that sum to P")
    group.add_argument("--epsilon-cutoff", type=float, metavar="P", help="keep tokens of probability P or more")
    group.add_argument(
        "--eta-cutoff", type=float, metavar="P", help="as --epsilon-cutoff, with a threshold that falls with entropy"
    )
    group.add_argument("--top-h", type=float, metavar="H", help="keep the likeliest tokens with a share H of entropy")
    group.add_argument(
        "--top-n-sigma", type=float, metavar="N", help="keep logits within N standard deviations of the largest"
    )
    group.add_argument("--mirostat", type=int, metavar="2", help="Mirostat 2.0: hold surprise at --mirostat-tau")
    group.add_argument("--mirostat-tau", type=float, metavar="BITS", help="target surprise (default: 5)")
    group.add_argument("--mirostat-eta", type=float, metavar="X", help="learning rate (default: 0.1)")
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1 makes tokens seen so far less likely"
    )
    group.add_argument(
        "--presence-penalty", type=float, metavar="X", help="subtract this from the logit of every generated token"
    )
    group.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="the same, times how often it was generated"
    )


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument("--num-beams", type=int, metavar="N", help="beam search with N beams")
    group.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="exponent of the length in a beam's score: above 0 favours long",
    )
    group.add_argument(
        "--early-stopping", type=_early_stopping, metavar="WHEN", help="stop beam search early: yes, no or never"
    )
    group.add_argument("--num-beam-groups", type=int, metavar="N", help="diverse beam search with N groups of beams")
    group.add_argument(
        "--diversity-penalty", type=float, metavar="X", help="subtracted from tokens that earlier groups chose"
    )
    group.add_argument(
        "--penalty-alpha", type=float, metavar="A", help="contrastive search among --top-k tokens, with this weight"
    )
    group.add_argument(
        "--amateur", metavar="MODEL", help="contrastive decoding: a weaker model with the same vocabulary"
    )
    group.add_argument(
        "--contrastive-alpha", type=float, metavar="A", help="keep tokens A times as likely as the best (default: 0.1)"
    )
    group.add_argument("--amateur-temperature", type=float, metavar="T", help="of the weaker model (default: 1)")


def _add_guide_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("guided", "Only text of a given form; needs the extra 'guided'.")
    group.add_argument("--guided-json", metavar="SCHEMA", help="a JSON schema: {...}, or a file with one")
    group.add_argument("--guided-regex", metavar="REGEX", help="a regular expression")
    group.add_argument("--guided-grammar", metavar="FILE", help="a file with a grammar in Lark's notation")
    group.add_argument("--guided-choice", action="append", metavar="TEXT", help="one of these; may be repeated")


def _add_speculation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation", "The same distribution in fewer forward passes.")
    group.add_argument("--draft", metavar="MODEL", help="a smaller draft model with the same vocabulary")
    group.add_argument("--num-assistant-tokens", type=int, metavar="N", help="drafted tokens (default: 5; 0: none)")
    group.add_argument(
        "--prompt-lookup-num-tokens", type=int, metavar="N", help="draft N tokens by looking back in the text"
    )
    group.add_argument(
        "--max-matching-ngram-size", type=int, metavar="N", help="... for the last N tokens (default: 2)"
    )
    group.add_argument("--lookahead-window", type=int, metavar="W", help="draft by Jacobi iteration W positions ahead")
    group.add_argument("--lookahead-ngram-size", type=int, metavar="N", help="... in N-grams (default: 3)")
    group.add_argument("--lookahead-guesses", type=int, metavar="G", help="... of which G are verified (default: 5)")


def _early_stopping(word: str) -> bool | str:
    words: dict[str, bool | str] = {"yes": True, "no": False, "never": "never"}
    if word not in words:
        raise argparse.ArgumentTypeError(f"expected yes, no or never, found {word!r}")
    return words[word]


def generation_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `GenerationConfig` that the command line sets.

    Raises:
        PromptError: a file named by an option is not valid UTF-8.
        UsageError: such a file cannot be read.
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
    """The settings of a request with these fields, with the checkpoint's defaults for all others.

    A hub id in `args` is replaced by its local folder, so that the hub is queried once.

    Raises:
        ModelError: the model cannot be found.
        ParameterError: a field is invalid or without effect. Checks against the vocabulary are left to the engine.
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
    """The most concurrent sequences of a request with these settings."""
    from ..decoding.select import strategy_for

    return strategy_for(settings).max_sequences


def load_engine(
    args: argparse.Namespace, *, prompts: int = 1, sequences: int = 1, prefix_cache: bool = False
) -> "Engine":
    """The engine of the model options, with a batch size for these prompts and the sequences of each."""
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
    """`Engine`'s arguments for device, backend, threads and dtypes."""
    return {name: getattr(args, name) for name in ("dtype", "device", "backend", "cache_dtype", "threads")}


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add options for the prompt."""
    group = parser.add_argument_group("prompt", "Read from standard input by default.")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated: prompts run as one batch")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file that is one prompt")


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of `add_prompt_options`, without the last line break of a file or of standard input.

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
        PromptError: the text is not valid UTF-8.
        UsageError: the source cannot be read.
    """
    try:
        text = read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} should be UTF-8 text; byte {error.start} is not") from None
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from None
    return text.removesuffix("\n").removesuffix("\r")
