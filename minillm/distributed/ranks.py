"""A rank's place among all ranks, and what all of them agree on before they compute."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..backends.placement import Placement, available_cores
from ..backends.shapes import ShapeBackend
from ..config import ModelConfig
from ..errors import FollowedError, MinillmError, ParameterError, RankError, shown
from ..formats import open_model
from ..models import shape_model
from ..models.base import Model, weights_of
from ..parallel import Parallel
from .communicator import Communicator

Result = TypeVar("Result")
SAMPLE = 1 << 16
"""Bytes at a file's beginning, middle and end that are compared between ranks"""


class Held(NamedTuple):
    """A rank's share of the weights."""

    bytes: int
    first_layer: int
    stop_layer: int

    @property
    def layers(self) -> range:
        """The layers that they are of."""
        return range(self.first_layer, self.stop_layer)


class Ranks:
    """One rank's place: its stage, and the ranks that share it."""

    config: ModelConfig
    """Configuration of the whole model"""
    layers: range
    """Layers of this rank's stage"""
    width: int
    """W, numbers of a hidden state that the head multiplies"""
    weights: "tuple[Held, ...]"
    """Each rank's share of the weights"""

    def __init__(self, world: Communicator, parallel: Parallel, *, owned: bool = False) -> None:
        """Join the group of the stage; `owned`: `close` frees the world too.

        Raises:
            ParameterError: there are not as many processes as the degrees ask for.
        """
        if world.size != parallel.devices:
            if owned:
                world.free()
            kind = FollowedError if world.rank else ParameterError
            raise kind(
                f"tensor_parallel {parallel.tensor} times pipeline_parallel {parallel.pipeline} needs "
                f"{parallel.devices} processes, found {world.size}: start them with mpiexec -n {parallel.devices}"
            )
        self.world, self.parallel, self.rank = world, parallel, world.rank
        self._owned = owned
        stage = parallel.stage_of(world.rank)
        self.group = world.group(parallel.ranks_of(stage))
        """The ranks that share this rank's layers"""
        self.is_first, self.is_last = stage == 0, stage == parallel.pipeline - 1
        self.before, self.after = world.rank - parallel.tensor, world.rank + parallel.tensor
        """The ranks with this one's share of the stages before and after"""
        self.last = parallel.ranks_of(parallel.pipeline - 1)
        """The ranks of the last stage, which compute the logits"""
        self._compared = {"the source of minillm": _source_digest()}

    def _layers_of(self, config: ModelConfig) -> range:
        """The layers of this rank's stage; stages are balanced by the bytes of the weights that a token reads.

        Raises:
            ParameterError: the ranks cannot share the model.
        """
        from ..models.points import operators_of

        config.sharded(self.parallel.tensor)
        self.parallel.check_layers(config.num_layers, config.encoder_layers, config.per_layer_width)
        model = shape_model(config, ShapeBackend())
        projected = model.embedding.project_normed
        self.width = model.embedding.tokens.shape[1] if projected is None else projected.shape[0]
        used = config.experts_per_token / config.num_experts if config.num_experts else 1.0
        sizes = [
            sum(map(_bytes_read, operators_of(layer)))
            + (int(_bytes_read(layer.mlp) * used) if hasattr(layer, "mlp") else 0)
            for layer in model.layers
        ]
        return self.parallel.layers_of(self.rank, [*sizes, _bytes_read(model.head)])

    def share(self, path: Path, adapters: Sequence[Path] = ()) -> dict[str, Any]:
        """Arguments of `load_model` for this rank's share of a checkpoint.

        The checkpoint and the adapters are compared by `check_equal`.

        Raises:
            ModelError, ParameterError: the configuration cannot be read, or the ranks cannot share the model.
        """
        self._compared["the checkpoint"] = fingerprint(path)
        self._compared |= {f"adapter {i + 1}": fingerprint(folder) for i, folder in enumerate(adapters)}
        return self.share_of(open_model(path).config)

    def share_of(self, config: ModelConfig) -> dict[str, Any]:
        """As `share`, from a configuration."""
        self.config, self.layers = config, self._layers_of(config)
        return {"rank": self.group.rank, "ranks": self.group.size, "layers": self.layers}

    def close(self) -> None:
        """Free the communicators that were made for these ranks; each of them calls it. May be called twice."""
        self.group.free()
        if self._owned:
            self.world.free()

    def agree(self, call: Callable[[], Result]) -> Result:
        """Call a function on every rank. If it fails on any of them, all raise.

        Raises:
            MinillmError: on rank 0, its own.
            RankError: another error of rank 0, or one of another rank, which it names; on other ranks than 0
                FollowedError.
        """
        failed: Exception | None = None
        try:
            result = call()
        except Exception as error:
            failed = error
        known = isinstance(failed, MinillmError)
        cause = None if failed is None else str(failed) if known else f"{type(failed).__name__}: {failed}"
        told = self.world.all_gather(cause)
        if any(cause is not None for cause in told):
            self.close()
        if failed is not None and known and self.rank == 0:
            raise failed
        for rank, cause in enumerate(told):
            if cause is not None:
                raise self._error(f"rank {rank}: {cause}") from failed
        return result

    def _error(self, message: str) -> RankError:
        return FollowedError(message) if self.rank else RankError(message)

    def note_weights(self, model: Model) -> None:
        """Tell all ranks how much of the weights this one has."""
        own = sum(weight.nbytes for weight in weights_of(model))
        self.weights = tuple(
            Held(*share) for share in self.world.all_gather((own, self.layers.start, self.layers.stop))
        )

    def check_equal(self, **values: Any) -> None:
        """Compare what all ranks must have alike: the checkpoint, the release of minillm, and other values by name.

        Raises:
            RankError: a rank's value is not rank 0's.
        """
        told = self.world.all_gather(self._compared | values)
        for rank, theirs in enumerate(told):
            for name, value in theirs.items():
                if value != told[0][name]:
                    self.close()
                    raise self._error(
                        f"rank {rank} has {name} {value!s:.100}, rank 0 has {told[0][name]!s:.100}: install and copy "
                        "the same on every machine"
                    )

    def least(self, count: Callable[[], int]) -> int:
        """The least of all ranks' numbers; errors as of `agree`."""
        return int(min(self.world.all_gather(self.agree(count))))

    def placed(self, placement: Placement) -> Placement:
        """A placement in which the processes of this machine share its cores, unless it says how many threads."""
        neighbours = self.world.on_this_machine
        if placement.threads is not None or neighbours == 1:
            return placement
        return replace(placement, threads=max(1, available_cores() // neighbours))

    def stage_config(self, config: ModelConfig) -> ModelConfig:
        """A configuration with as many layers as this stage, to count the memory of its cache.

        Raises:
            ParameterError: a layer reads the keys and values of a layer of another stage.
        """
        for layer in self.layers:
            if (source := config.kv_source(layer)) not in self.layers:
                raise ParameterError(
                    f"layer {layer} reads the keys and values of layer {source}, which is in another stage: lower "
                    "pipeline_parallel"
                )
        states = tuple(config.layer_states[i] for i in self.layers) if config.layer_states else ()
        return replace(
            config,
            num_layers=len(self.layers),
            windows=tuple(config.windows[i] for i in self.layers) if config.windows else (),
            kv_shapes=tuple(config.kv_shape(i) for i in self.layers) if config.kv_shapes else (),
            kv_sources=tuple(config.kv_source(i) - self.layers.start for i in self.layers) if config.kv_sources else (),
            layer_states=states if any(states) else (),
            attends=tuple(config.has_keys(i) for i in self.layers) if config.attends else (),
        )


def _bytes_read(component: Any) -> int:
    return sum(
        weight.nbytes for weight in weights_of(component) if weight.data is not None and weight.role != "positions"
    )


def joined(parallel: Parallel | None, communicator: Communicator | None, device: str = "cpu") -> Ranks | None:
    """The ranks that share a model; None if this process has all of it.

    They are connected by MPI, and if the device is a GPU by NCCL, unless a communicator is given.

    Raises:
        ParameterError: `parallel` is no `Parallel`, or there are other numbers of processes.
        DeviceError: there is no MPI, no NCCL, or no GPU for each process.
    """
    if parallel is not None and not isinstance(parallel, Parallel):
        raise ParameterError(f"parallel should be Parallel(tensor=..., pipeline=...), found {shown(parallel)}")
    if parallel is None or parallel.devices == 1:
        return None
    owned = communicator is None
    if communicator is None:
        from .mpi import world

        communicator = world().copy()  # each engine's, so that several can run at the same time
        if device == "cuda":
            from .nccl import NcclCommunicator, use_own_gpu

            use_own_gpu(communicator)
            communicator = NcclCommunicator(communicator)
    return Ranks(communicator, parallel, owned=owned)


@cache
def _source_digest() -> str:
    package = Path(__file__).parents[1]
    files = sorted(file.relative_to(package).as_posix() for file in package.rglob("*.py"))
    return hashlib.sha256(b"".join(file.encode() + (package / file).read_bytes() for file in files)).hexdigest()[:16]


def fingerprint(path: Path) -> str:
    """A digest of a checkpoint: its files' names and sizes, and samples of their contents."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(path.iterdir())
    for file in files:
        if file.is_file() and file.suffix in (".json", ".safetensors", ".bin", ".gguf"):
            size = file.stat().st_size
            digest.update(f"{'' if path.is_file() else file.name} {size}\n".encode())
            with file.open("rb") as opened:
                for offset in (0, size // 2, max(0, size - SAMPLE)):
                    opened.seek(offset, os.SEEK_SET)
                    digest.update(opened.read(SAMPLE))
    return digest.hexdigest()[:16]
