"""One part of `gpu.py`, in a process of its own: what breaks the GPU for one part must not break it for the others.

    python gpu_part.py PART TASK

TASK is a `Task` as JSON. Each figure goes to standard output as one line of JSON as soon as it is there.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gpu_clock import TINY, Sizes
from gpu_figures import Figure

_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
EMULATED_SHAPES: dict[str, dict[str, Any]] = {
    "emulated-llama": {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 40, **_SIZES},
    "emulated": {"model_type": "opt", "ffn_dim": 64, **_SIZES},
}


class Task(NamedTuple):
    """What a part is to do."""

    shapes: list[str]
    emulated: bool

    @property
    def sizes(self) -> Sizes:
        """How much to measure."""
        return TINY if self.emulated else Sizes()


def machine(task: Task) -> Iterator[Figure]:
    """What the GPU is, as notes. It fails where there is none."""
    from minillm.backends.cuda.compiling import CupyLauncher
    from minillm.backends.cuda.kernels import sources_digest

    CupyLauncher()
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    memory = f"{properties['totalGlobalMem'] / 2**30:.1f} GiB"
    yield Figure("machine", "", "gpu", note=f"{properties['name'].decode()}, {memory}")
    versions = f"CuPy {cupy.__version__}, CUDA {runtime.runtimeGetVersion()}, driver for {runtime.driverGetVersion()}"
    yield Figure("machine", "", "cuda", note=versions)
    yield Figure("machine", "", "kernels", note=f"sources {sources_digest()}")


def _tests(task: Task) -> Iterator[Figure]:
    from gpu_checks import tests

    return tests(emulated=task.emulated)


def _ceilings(task: Task) -> Iterator[Figure]:
    from gpu_kernels import ceilings

    return ceilings(task.sizes)


def _kernels(task: Task) -> Iterator[Figure]:
    from gpu_kernels import kernels

    return kernels(task.sizes, task.shapes)


def _engine(task: Task) -> Iterator[Figure]:
    from gpu_engine import engine

    return engine(task.sizes, task.shapes)


def _transformers(task: Task) -> Iterator[Figure]:
    from gpu_peer import transformers

    return transformers(task.sizes, task.shapes, emulated=task.emulated)


def _sanitizer(task: Task) -> Iterator[Figure]:
    from gpu_checks import sanitizer

    return sanitizer(emulated=task.emulated)


PARTS: dict[str, Callable[[Task], Iterator[Figure]]] = {
    "machine": machine,
    "tests": _tests,
    "ceilings": _ceilings,
    "kernels": _kernels,
    "engine": _engine,
    "transformers": _transformers,
    "sanitizer": _sanitizer,
}


def main() -> int:
    """See the module's text. Exit code 1 and one line for what minillm refuses; else what Python makes of it."""
    from minillm.errors import MinillmError
    from minillm.models import published

    part, task = sys.argv[1], Task(**json.loads(sys.argv[2]))
    if task.emulated:
        for name in task.shapes:
            published()[name] = EMULATED_SHAPES[name]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the replies
    try:
        for figure in PARTS[part](task):
            print(json.dumps(figure._asdict()), file=replies, flush=True)
    except MinillmError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
