"""Engines on ranks that are threads."""

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from safetensors.numpy import save_file

from minillm import Engine
from minillm.backends.numpy import NumpyBackend
from minillm.distributed.communicator import Communicator, Traffic
from minillm.distributed.threads import run_ranks
from minillm.models import family_of, tensor_shapes
from minillm.models.building import random_tensors
from minillm.parallel import Parallel

from ..families import CONFIGS, LIKE_GRANITES

Result = TypeVar("Result")

DEGREES = [Parallel(tensor=2), Parallel(pipeline=2), Parallel(tensor=2, pipeline=2)]
NAMES = [f"tensor {degree.tensor}, pipeline {degree.pipeline}" for degree in DEGREES]
WITHOUT_STAGES = ("gemma4_text",)


def on_all_degrees(cases: Iterable[tuple[str, str]], only: Collection[str] | None = None) -> list[Any]:
    """Family, configuration and degrees as parameters: two stages that share matrices; others for a release, and there
    all families that are not in `only`.
    """
    parameters = []
    for family, name in cases:
        shown = DEGREES[0] if family in WITHOUT_STAGES else DEGREES[2]
        for degree, said in zip(DEGREES, NAMES, strict=True):
            chosen = family not in LIKE_GRANITES if only is None else family in only
            marks = [] if degree == shown and chosen else [pytest.mark.exhaustive]
            identity = f"{family}-{name}-{said}".replace(" ", "-")
            parameters.append(pytest.param(family, name, degree, marks=marks, id=identity))
    return parameters


@dataclass
class Shared(Generic[Result]):
    """What rank 0 returned, and what each rank has sent since its engine was made."""

    result: Result
    traffic: list[Traffic]


def on_ranks(
    parallel: Parallel, call: Callable[[Engine], Result], *arguments: Any, make: Any = Engine, **options: Any
) -> Shared[Result]:
    """Call a function with rank 0's engine."""

    def work(communicator: Communicator) -> Any:
        own = {"backend": "numpy", "cache_bytes": 1 << 24} | options
        with make(*arguments, parallel=parallel, communicator=communicator, **own) as engine:
            communicator.traffic.reset()
            return None if engine.rank else call(engine), communicator.traffic

    done = run_ranks(parallel.devices, work)
    return Shared(done[0][0], [traffic for _, traffic in done])


def llama_folder(folder: Path, **fields: Any) -> Path:
    """A checkpoint of a Llama with four heads, of widths that are whole groups of 32 on four ranks."""
    raw = CONFIGS["llama"]["grouped"] | {"hidden_size": 128, "intermediate_size": 256} | fields
    shapes = tensor_shapes(family_of(raw).read_config(raw))
    tensors = {name: t.load() for name, t in random_tensors(shapes, 0, 0.1, NumpyBackend()).items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder
