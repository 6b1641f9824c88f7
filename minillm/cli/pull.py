"""minillm pull: fetch a model from the hub into the local cache."""

import argparse
import math
import shlex
from pathlib import Path
from typing import Any

from ..errors import ModelNotFoundError, ParameterError
from .options import next_command
from .output import bytes_text

DESCRIPTION = """Fetch a model from the Hugging Face hub into the local cache (HF_HOME). Of a
repository only the files that minillm needs are fetched: configuration,
tokenizer, chat template, and one copy of the weights (safetensors before .bin),
or one GGUF file. An interrupted run can be repeated: complete files are kept."""

EPILOG = """examples:
  minillm pull HuggingFaceTB/SmolLM2-135M-Instruct
  minillm pull Qwen/Qwen3-0.6B-GGUF --file Qwen3-0.6B-Q8_0.gguf
"""


SUFFIX = ".gguf"


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "pull", help="fetch a model from the hub into the local cache", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("model", metavar="ID", help="Hugging Face hub id: owner/name")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--file", metavar="NAME", help="a GGUF file of the repository (default: the only one there is)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if Path(args.model).exists():
        raise ParameterError(f"{args.model!r:.200} is on this machine already: expected the id of a model on the hub")
    if args.file is not None and not args.file.endswith(SUFFIX):
        raise ParameterError(f"file should be the name of a {SUFFIX} file, found {args.file!r:.100}")
    name = args.file or _only_gguf(args.model, args.revision)
    if name is None:
        _pull_checkpoint(args.model, args.revision)
    else:
        _pull_file(args.model, name, args.revision)


def _only_gguf(model: str, revision: str | None) -> str | None:
    """The GGUF file of a repository without other weights; None if it has some, or if the hub cannot be asked.

    Raises:
        CheckpointError: there are several.
    """
    from ..formats import list_hub_files
    from ..formats.folder import find_weights
    from ..formats.gguf.file import choose_file

    try:
        present = list_hub_files(model, revision=revision)
    except ModelNotFoundError:
        return None  # the cache may have it; if not, the next step says what is wrong
    return choose_file(list(present), f"model {model!r}") if find_weights(present) is None else None


def _pull_file(model: str, name: str, revision: str | None) -> None:
    """Fetch a GGUF file, and the other files of its model if it is one of several."""
    from ..formats import find_file
    from ..formats.gguf.file import all_shards, read_gguf
    from ..formats.gguf.read_model import read_gguf_config
    from ..formats.tokenizer_and_defaults import read_chat_template
    from ..models import config_of, tensor_shapes

    paths = [find_file(model, each, revision=revision) for each in all_shards(name)]
    raw = read_gguf_config(read_gguf(paths[0]))
    config = config_of(raw)
    place = f"{model}/{paths[0].name}" if revision is None and "/" not in name else paths[0]
    _report(
        folder=paths[0].parent,
        file=paths[0].name,
        size=bytes_text(sum(path.stat().st_size for path in paths)),
        family=config.model_type,
        parameters=f"{sum(math.prod(shape) for shape in tensor_shapes(config).values()):,}",
        next=next_command(place, chat=read_chat_template(paths[0]) is not None),
    )


def _pull_checkpoint(model: str, revision: str | None) -> None:
    """Fetch a checkpoint; one of a family that minillm does not run is refused before its weights are fetched."""
    from ..config import read_config
    from ..formats import find_config, find_model
    from ..formats.schemes import read_quantization
    from ..formats.tokenizer_and_defaults import read_chat_template
    from ..models import config_of, tensor_shapes

    raw = read_config(find_config(model, revision=revision))
    config = config_of(raw)
    read_quantization(raw)
    folder = find_model(model, revision=revision)
    parameters = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    more = "" if revision is None else f" --revision {shlex.quote(revision)}"
    _report(
        folder=folder,
        size=bytes_text(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())),
        family=config.model_type,
        parameters=f"{parameters:,}",
        next=next_command(model, chat=read_chat_template(folder) is not None, output=config.output) + more,
    )


def _report(**facts: object) -> None:
    for name, value in facts.items():
        print(f"{name:<11} {value}")
