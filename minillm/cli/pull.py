"""minillm pull: fetch a model from the hub into the local cache."""

import argparse
import math
import shlex
from pathlib import Path

from ..errors import ModelNotFoundError, ParameterError
from .options import next_command
from .output import bytes_text
from .parser import Parser

DESCRIPTION = """Fetch a model from the Hugging Face hub into the local cache (HF_HOME). Of a
repository only the files that minillm needs are fetched: configuration,
tokenizer, chat template, and one copy of the weights (safetensors before .bin),
or one GGUF file. An interrupted run can be repeated: complete files are kept."""

EPILOG = """examples:
  minillm pull HuggingFaceTB/SmolLM2-135M-Instruct
  minillm pull Qwen/Qwen3-0.6B-GGUF --file Qwen3-0.6B-Q8_0.gguf
"""


SUFFIX = ".gguf"


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="ID", help="Hugging Face hub id: owner/name")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--file", metavar="NAME", help="a GGUF file of the repository (default: the only one there is)")


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
    from ..formats.gguf.file import choose_file
    from ..formats.weight_files import find_weights

    try:
        present = list_hub_files(model, revision=revision)
    except ModelNotFoundError:
        return None  # the cache may have it; if not, the next step says what is wrong
    return choose_file(list(present), f"model {model!r}") if find_weights(present) is None else None


def _pull_file(model: str, name: str, revision: str | None) -> None:
    """Fetch a GGUF file, and the other files of its model if it is one of several."""
    from ..formats import find_file
    from ..formats.gguf.file import all_shards

    paths = [find_file(model, shard, revision=revision) for shard in all_shards(name)]
    place = f"{model}/{paths[0].name}" if revision is None and "/" not in name else paths[0]
    _report(paths[0], {"folder": paths[0].parent, "file": paths[0].name}, paths, place)


def _pull_checkpoint(model: str, revision: str | None) -> None:
    """Fetch a checkpoint; one of a family that minillm does not run is refused before its weights are fetched."""
    from ..formats import find_config, find_model, open_model

    files = open_model(find_config(model, revision=revision))
    _ = files.config, files.quantization
    folder = find_model(model, revision=revision)
    more = "" if revision is None else f" --revision {shlex.quote(revision)}"
    _report(folder, {"folder": folder}, [path for path in folder.rglob("*") if path.is_file()], model, more)


def _report(path: Path, places: dict[str, Path | str], fetched: list[Path], name: Path | str, more: str = "") -> None:
    """Say what was fetched, and with which command to go on."""
    from ..formats import open_model
    from ..models import tensor_shapes

    files = open_model(path)
    chat, config = files.chat_template is not None, files.config
    facts = places | {
        "size": bytes_text(sum(file.stat().st_size for file in fetched)),
        "family": config.model_type,
        "parameters": f"{sum(map(math.prod, tensor_shapes(config).values())):,}",
        "next": next_command(name, chat=chat, output=config.output) + more,
    }
    for label, value in facts.items():
        print(f"{label:<11} {value}")
