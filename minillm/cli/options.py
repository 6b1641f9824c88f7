"""Options shared by several commands, and their conversion to engine, settings and prompts."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..decoding.settings import FIELDS, GROUPS, MODELS, GenerationConfig, Setting
from ..errors import PromptError, UsageError
from ..progress import loading_bar

if TYPE_CHECKING:
    from ..decoding.settings import Settings
    from ..engine import Engine

MAX_BATCH_SIZE = 16
"""Prompts that run in one batch; more are queued."""

COMMON = (
    frozenset(("help", "help_all", "prompt", "prompt_file", "system", "model", "dtype", "device", "threads", "draft"))
    | {"json", "stats"}
    | {name for name, setting in FIELDS.items() if setting.common}
)
"""Options in the short help of `generate` and `chat`, by their `dest`."""

MODEL_FLAGS = {
    "draft": "a smaller draft model with the same vocabulary",
    "amateur": "contrastive decoding: a weaker model with the same vocabulary",
}
"""Additional models of the engine -> the help of their flags, which come before those of the fields that need them."""

EARLY_STOPPING: dict[str, bool | str] = {"yes": True, "no": False, "never": "never"}


def add_model_options(parser: argparse.ArgumentParser, *, dtypes: str | None = None) -> None:
    """Add options for the model and its execution. `dtypes` is the default of a command that takes several."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="MODEL", help="checkpoint folder, GGUF file or hub id (default: the model in the package)"
    )
    group.add_argument("--revision", help="branch, tag or commit on the hub")
    group.add_argument("--adapter", metavar="PATH", help="LoRA adapter to merge into the weights: folder or hub id")
    group.add_argument(
        "--adapters", nargs="+", metavar="NAME=PATH", help="LoRA adapters for --lora to choose from; not merged"
    )
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
    group.add_argument("--backend", default="auto", help="cpu: kernels in C (default, with a C compiler); numpy")
    group.add_argument("--cache-dtype", default="auto", help="of the KV cache: float32 (default), bfloat16, int8")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one for each core)")


def add_generation_options(parser: argparse.ArgumentParser, *, output: bool = False) -> Any:
    """Add the flags that the generation fields declare; those about output only if `output`. Returns the last group."""
    for group in GROUPS if output else GROUPS[:-1]:
        section = parser.add_argument_group(group.name, group.about or None)
        models = set(MODELS)
        for name, setting in FIELDS.items():
            if setting.group == group.name and setting.flag is not None:
                if setting.needs in models:
                    models.remove(setting.needs)
                    section.add_argument(f"--{setting.needs}", metavar="MODEL", help=MODEL_FLAGS[setting.needs])
                flag, _, value = setting.flag.partition(" ")
                section.add_argument(flag, dest=name, **_flag_arguments(name, setting, value))
    return section


def _flag_arguments(name: str, setting: Setting, value: str) -> dict[str, Any]:
    """How argparse reads the value of a field's flag, which the help calls `value`; without one it is a switch."""
    if not value:
        return {"action": "store_const", "const": not setting.default, "help": setting.help}
    read = _early_stopping if name == "early_stopping" else setting.read.word
    if value.endswith(" ...]"):
        return {"type": read, "nargs": "+", "metavar": value.partition(" ")[0], "help": setting.help}
    if setting.read.many:
        return {"type": read, "action": "append", "metavar": value, "help": f"{setting.help}; may be repeated"}
    return {"type": read, "metavar": value, "help": setting.help}


def _early_stopping(word: str) -> bool | str:
    if word not in EARLY_STOPPING:
        raise argparse.ArgumentTypeError(f"expected yes, no or never, found {word!r}")
    return EARLY_STOPPING[word]


def generation_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `GenerationConfig` that the command line sets.

    A field that needs sampling turns it on, but --top-k with --penalty-alpha, the candidates of contrastive search.

    Raises:
        PromptError: a file named by an option is not valid UTF-8.
        UsageError: such a file cannot be read.
    """
    fields = {name: value for name, value in vars(args).items() if name in FIELDS and value is not None}
    sampling = {name for name in fields if FIELDS[name].needs in ("do_sample", "mirostat")}
    if sampling - ({"top_k"} if "penalty_alpha" in fields else set()):
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
    from ..decoding.resolving import strategy_for

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
            adapter=args.adapter,
            adapters=_named(args.adapters or ()),
            **placement_fields(args),
        )


def _named(words: Sequence[str]) -> dict[str, str]:
    """NAME=PATH of `--adapters`, by name.

    Raises:
        UsageError: a word is not of this form, or a name occurs twice.
    """
    named: dict[str, str] = {}
    for word in words:
        name, _, path = word.partition("=")
        if not (name and path) or name in named:
            raise UsageError(f"--adapters expects NAME=PATH, each name once, found {word!r:.100}")
        named[name] = path
    return named


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
