"""Options shared by several commands, and their conversion to engine, settings and prompts."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..decoding.fields import FIELDS, GROUPS, Setting
from ..decoding.settings import GenerationConfig
from ..engine.options import DEFAULTS, HELPERS, OPTIONS, Option
from ..errors import ParameterError, PromptError, UsageError, listed
from ..progress import work

if TYPE_CHECKING:
    from ..config import Output
    from ..decoding.settings import Settings
    from ..engine.engine import Engine

T = TypeVar("T")

MAX_BATCH_SIZE: int = DEFAULTS["max_batch_size"]
"""Prompts that run in one batch; more are queued."""

COMMON = frozenset(("help", "help_all", "text", "prompt", "prompt_file", "system", "model", "json", "stats")) | {
    *(name for name, option in OPTIONS.items() if option.common),
    *(name for name, setting in FIELDS.items() if setting.common),
}
"""Options in the short help of `generate` and `chat`, by their `dest`."""

EARLY_STOPPING: dict[str, bool | str] = {"yes": True, "no": False, "never": "never"}


def add_model_options(
    parser: argparse.ArgumentParser,
    *,
    dtypes: str | None = None,
    several: bool = False,
    parallel: bool = False,
    needed: str | None = None,
    chosen: str | None = None,
    execution: bool = True,
    cache_dtype: str | None = None,
) -> None:
    """Add options for the model and its execution.

    Args:
        parser: the command's parser
        dtypes: the default of a command that takes several
        several: whether the command takes several models
        parallel: whether several processes may share a model
        needed: the kind of model that must be named, since the one in the package is of another
        chosen: what chooses among several LoRA adapters, in a command that has a choice
        execution: whether the command runs the model; otherwise only its tokenizer is read
        cache_dtype: the default of a command that has its own
    """
    group = parser.add_argument_group("model")
    words = "checkpoint folder, GGUF file or hub id (default: the model in the package)"
    if several:
        words += "; repeated for several, each NAME=MODEL"
        group.add_argument("-m", "--model", action="append", metavar="[NAME=]MODEL", help=words)
    else:
        words = words if needed is None else f"{needed}: checkpoint folder or hub id"
        group.add_argument("-m", "--model", metavar="MODEL", help=words, required=needed is not None)
    for name in ("revision", "tokenizer"):
        add_engine_flag(group, name)
    if not execution:
        return
    add_engine_flag(group, "adapter")
    if chosen is not None:
        add_engine_flag(group, "adapters", lora=chosen)
    add_engine_flag(group, "dtype", default=dtypes, more="" if dtypes is None else "; several, with commas")
    for name in ("device", "backend", "cache_dtype", "compute_dtype", "threads", "deterministic"):
        add_engine_flag(group, name, default=cache_dtype if name == "cache_dtype" else None)
    if parallel:
        group.add_argument(
            "--tensor-parallel", type=int, metavar="N", help="processes that share each layer; start them with mpiexec"
        )
        group.add_argument("--pipeline-parallel", type=int, metavar="N", help="stages of layers, a process for each")


def add_generation_options(
    parser: argparse.ArgumentParser,
    *,
    output: bool = False,
    words: Mapping[str, str] | None = None,
    only: Collection[str] = FIELDS,
) -> Any:
    """Add the flags that the generation fields declare; those about output only if `output`. Returns the last group.

    `words` replaces the help of a field, or the line below a group's name, where a command has defaults of its own;
    `only` are the fields that a command takes.
    """
    words, section = words or {}, None
    for group in GROUPS if output else GROUPS[:-1]:
        if not any(FIELDS[name].group == group.name for name in only):
            continue
        section = parser.add_argument_group(group.name, words.get(group.name, group.about) or None)
        helpers = {*HELPERS}
        for name, setting in FIELDS.items():
            if setting.group == group.name and setting.flag is not None and name in only:
                if setting.needs in helpers:  # the model's flag comes before those of the fields that need it
                    helpers.remove(setting.needs)
                    add_engine_flag(section, setting.needs)
                _add_flag(section, name, setting, words.get(name, setting.help), switched=not setting.default)
    return section


def add_engine_flag(group: Any, name: str, *, default: Any = None, lora: str = "", more: str = "") -> None:
    """Add the flag that an option of the engine declares.

    Args:
        group: of a parser
        name: of the option
        default: the command's own, if it has one
        lora: what chooses among several LoRA adapters
        more: what the help says more about the values
    """
    help = OPTIONS[name].help.format(default=default or DEFAULTS[name], lora=lora)
    help = help.replace(" (default", f"{more} (default")
    _add_flag(group, name, OPTIONS[name], help, switched=not DEFAULTS[name]).default = default


def _add_flag(group: Any, name: str, declared: Setting | Option, help: str, *, switched: bool) -> argparse.Action:
    """Add the flag that a field or an option declares; one without a value is a switch, which sets `switched`."""
    flag, _, value = (declared.flag or "").partition(" ")
    arguments: dict[str, Any] = {"dest": name, "help": help}
    if not value:
        arguments |= {"action": "store_const", "const": switched}
    else:
        arguments["type"] = _early_stopping if name == "early_stopping" else declared.read.word
        arguments["metavar"] = value.partition(" ")[0]
        if value.endswith(" ...]"):
            arguments["nargs"] = "+"
        elif declared.read.many:
            arguments |= {"action": "append", "help": f"{help}; may be repeated"}
    action: argparse.Action = group.add_argument(*declared.aliases, flag, **arguments)
    return action


def _early_stopping(word: str) -> bool | str:
    if word not in EARLY_STOPPING:
        raise argparse.ArgumentTypeError(f"expected yes, no or never, found {word!r}")
    return EARLY_STOPPING[word]


def generation_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `GenerationConfig` that the command line sets.

    A field that needs sampling turns it on, but --top-k with --penalty-alpha, the candidates of contrastive search.
    --temperature 0 is greedy search, as in other programs.

    Raises:
        ParameterError: --temperature 0 stands beside a field of sampling.
        PromptError: a file named by an option is not valid UTF-8.
        UsageError: such a file cannot be read.
    """
    fields = {name: value for name, value in vars(args).items() if name in FIELDS and value is not None}
    sampling = {name for name in fields if FIELDS[name].needs in ("do_sample", "mirostat", "xtc_probability")}
    sampling -= {"top_k"} if "penalty_alpha" in fields else set()
    if fields.get("temperature") == 0:
        del fields["temperature"]
        if others := sampling - {"temperature", "seed"} | {"do_sample"} & fields.keys():
            flags = listed((FIELDS[name].flag or name).partition(" ")[0] for name in sorted(others))
            raise ParameterError(f"--temperature 0 is greedy search: leave {flags} out, or raise it")
        fields |= {"do_sample": False}
        fields.pop("seed", None)
    elif sampling:
        fields["do_sample"] = True
    for name in ("guided_json", "guided_grammar"):
        if name in fields and not (name == "guided_json" and fields[name].lstrip().startswith("{")):
            fields[name] = decode(Path(fields[name]).read_bytes, fields[name])
    return fields


def resolve_settings(
    args: argparse.Namespace, fields: Mapping[str, Any], task: Mapping[str, Any] | None = None
) -> "Settings":
    """The settings of a request with these fields, with the checkpoint's defaults for all others, and then the task's.

    A hub id in `args` is replaced by its local folder, so that the hub is queried once.

    Raises:
        ModelError: the model cannot be found.
        ParameterError: a field is invalid or without effect. Checks against the vocabulary are left to the engine.
    """
    from ..decoding.resolving import resolve
    from ..files import read_optional_json
    from ..formats import find_model, open_model
    from ..models import ENCODER_DECODERS

    defaults, models = dict(task or {}), [name for name in HELPERS if getattr(args, name) is not None]
    if args.model is not None:
        folder = find_model(args.model, revision=args.revision)
        args.model, args.revision = str(folder), None
        defaults |= open_model(folder).generation_fields()[1]
        if read_optional_json(folder / "config.json").get("model_type") in ENCODER_DECODERS:
            models.append("encoder")
    return resolve(GenerationConfig(**fields), defaults, vocab_size=sys.maxsize, eos_token_id=0, models=models)


def sequences_of(settings: "Settings") -> int:
    """The most concurrent sequences of a request with these settings."""
    from ..decoding.resolving import strategy_for

    return strategy_for(settings).max_sequences


def load_engine(
    args: argparse.Namespace, *, prompts: int = 1, sequences: int = 1, any_task: bool = False, **options: Any
) -> "Engine":
    """The engine of the model options, with a batch size for these prompts and the sequences of each.

    `options` are further arguments of `Engine`. Another rank than 0 computes its share here until the program ends.

    Raises:
        TaskError: the model generates no text, and it has to unless `any_task`.
    """
    from ..engine.arguments import refuse_task

    engine = leading(make_engine(args, prompts=prompts, sequences=sequences, **options))
    if not any_task:
        refuse_task(engine.config, "tokens", "this command")
    return engine


def make_engine(args: argparse.Namespace, *, prompts: int = 1, sequences: int = 1, **options: Any) -> "Engine":
    """As `load_engine`, on each rank, with a model for any task; with random weights if --shape names a shape.

    Raises:
        ParameterError: --shape stands beside an option of a model.
    """
    from ..engine.engine import Engine

    size = max(1, min(prompts, MAX_BATCH_SIZE), sequences)
    options = {"max_batch_size": size} | engine_options(args) | options
    if getattr(args, "shape", None) is None:
        return Engine(**{"model": args.model} | options)
    if any(getattr(args, name) is not None for name in ("model", "revision", "adapter", "tokenizer")):
        raise ParameterError(
            "--shape stands in place of a model: leave out --model and its --revision, --adapter, --tokenizer"
        )
    return Engine.random(args.shape, **{name: value for name, value in options.items() if name != "prefix_cache"})


def leading(engine: "Engine") -> "Engine":
    """The engine of rank 0. Another rank computes its share here, and the program ends when rank 0 is done."""
    if engine.rank:
        engine.follow()
        raise SystemExit
    return engine


def has_ranks(args: argparse.Namespace) -> bool:
    """Whether this is one of several processes that the command line asks for, started by mpiexec."""
    asked = any(getattr(args, f"{name}_parallel", None) for name in ("tensor", "pipeline"))
    return asked and any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"))


def leads(args: argparse.Namespace) -> bool:
    """Whether this process takes the requests: it is alone, or rank 0."""
    if not has_ranks(args):
        return True
    from ..distributed.mpi import world

    return world().rank == 0


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


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of an engine that the command line sets."""
    from ..parallel import Parallel

    options = {name: value for name in OPTIONS if (value := getattr(args, name, None)) is not None}
    if "adapters" in options:
        options["adapters"] = _named(options["adapters"])
    degrees = {name: getattr(args, f"{name}_parallel", None) for name in ("tensor", "pipeline")}
    given = {name: degree for name, degree in degrees.items() if degree is not None}
    return options | ({"parallel": Parallel(**given)} if given else {})


def next_command(model: str | Path, *, chat: bool, output: "Output" = "tokens") -> str:
    """A command line to go on with: a chat, a text for a model without a chat template, or what a model does else."""
    if output != "tokens":
        return (
            f"minillm {'classify' if output in ('labels', 'token_labels') else 'embed'} --model "
            f'{shlex.quote(str(model))} "A good film."'
        )
    command = f"minillm {'chat' if chat else 'generate'} --model {shlex.quote(str(model))}"
    return command if chat else f'{command} --prompt "Once upon a time"'


def add_prompt_options(parser: argparse.ArgumentParser, *, several: str = "; may be repeated") -> None:
    """Add options for the prompt; `several` is what the help says of several."""
    group = parser.add_argument_group("prompt", "Read from standard input by default.")
    group.add_argument("text", nargs="?", metavar="PROMPT", help="the prompt, in quotes")
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", action="append", metavar="TEXT", help=f"the prompt{several}")
    source.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="a file that is one prompt, or - for standard input"
    )


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of `add_prompt_options`, without the last line break of a file or of standard input.

    Raises:
        PromptError: the text is not valid UTF-8, or standard input is closed.
        UsageError: the file cannot be read.
    """
    if args.text is not None and (args.prompt is not None or args.prompt_file is not None):
        raise PromptError(f"the prompt {args.text!r:.40} stands beside --prompt or --prompt-file: give one of them")
    if args.text is not None or args.prompt is not None:
        return [args.text] if args.prompt is None else list(args.prompt)
    return [_read_source(args.prompt_file or "-", "prompt", "--prompt or --prompt-file")]


def _read_source(name: Path | str, what: str, instead: str) -> str:
    """The text of a file, or of standard input if its name is -; `instead` is what may be given in its place.

    Raises:
        PromptError: it is not valid UTF-8, or standard input is closed.
        UsageError: the file cannot be read.
    """
    if str(name) != "-":
        return decode(Path(name).read_bytes, str(name))
    if sys.stdin is None:
        raise PromptError(f"standard input is closed: give {instead}")
    if sys.stdin.isatty():
        print(f"Type the {what}; Ctrl-D on a line of its own ends it.", file=sys.stderr)
    return decode(sys.stdin.buffer.read, "standard input")


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


TEXTS_AT_ONCE = 64
"""Texts of a file that are computed together; their results are printed before the next are begun"""


def add_text_options(parser: argparse.ArgumentParser) -> Any:
    """Add options for many texts. Returns their group."""
    group = parser.add_argument_group("texts", "A text on each line of standard input by default.")
    group.add_argument("text", nargs="?", metavar="TEXT", help="one text, in quotes")
    group.add_argument(
        "-f", "--file", action="append", metavar="FILE", help="a file with a text on each line, or -; may be repeated"
    )
    group.add_argument("--whole", action="store_true", help="a file is one text, not one on each line")
    group.add_argument("--truncate", action="store_true", help="cut texts that the model cannot hold at their ends")
    return group


def read_texts(args: argparse.Namespace) -> list[str]:
    """The texts of `add_text_options`; blank lines are left out. None on other ranks than 0, whose input is closed.

    Raises:
        PromptError: there is none, a source is not valid UTF-8, or standard input is closed.
        UsageError: a file cannot be read.
    """
    if args.text is not None:
        if args.file is not None:
            raise PromptError(f"the text {args.text!r:.40} stands beside --file: give one of them")
        return [args.text]
    if not leads(args):
        return []
    texts: list[str] = []
    for name in args.file or ["-"]:
        text = _read_source(name, "texts, one on each line", "the text on the command line or a file")
        texts += [text] if args.whole else re.split("\r\n|\r|\n", text)  # splitlines knows ten other ends of lines
    if not (nonempty := [text for text in texts if text.strip()]):
        raise PromptError("there is no text: give one in quotes, --file, or lines on standard input")
    return nonempty


def each_block(texts: Sequence[T], title: str, *, counted: bool = True) -> Iterator[list[T]]:
    """The texts, some at a time, with a bar on a terminal. What is printed for a block stands above the bar.

    `counted` is False where the call that computes a block reports its texts under the same title.
    """
    with work(title, len(texts), "texts") as progress:
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            block = [*texts[first : first + TEXTS_AT_ONCE]]
            yield block
            if counted:
                progress.advance(len(block))
