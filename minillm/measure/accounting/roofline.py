"""Roofline model of prefill and decode on given hardware: bound and minimum time (floor) of each operation.

An operation that makes F FLOPs and moves M bytes takes at least max(F / peak rate, M / bandwidth) seconds (Williams,
Waterman and Patterson, "Roofline", CACM 52(4), 2009). It is compute-bound if the first is larger, that is if its
arithmetic intensity F / M is above the ridge, peak rate / bandwidth; else memory-bound. A phase's floor is the sum over
its operations, since each depends on the one before.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ...backends.shapes import ShapeBackend
from ...config import ModelConfig
from ...errors import ParameterError
from ...models import shape_model
from ...parallel import Parallel
from .costs import Conventions, Row, operations
from .hardware import Hardware
from .memory import largest_batch, largest_context
from .schedule import Part, Step
from .storage import Storage

CHOICE_BYTES = 16
"""A logit and its token, as `distributed.logits` sends them"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Batch size and lengths."""

    batch: int = 1
    prompt_length: int = 512
    context: int | None = None
    """S of a decode step, its own token included; None: one more than the prompt"""

    @property
    def decode_context(self) -> int:
        """The context of the decode step."""
        return self.prompt_length + 1 if self.context is None else self.context


class Operation(NamedTuple):
    """One operation of a phase, summed over layers."""

    name: str
    calls: int
    flops: int
    bytes_read: int
    bytes_written: int
    fusion_saves: int
    bound: str
    """Bound of its first call: "compute" or "memory\""""
    seconds: float
    """Its floor"""

    @property
    def intensity(self) -> float:
        """FLOPs per byte; 0 if it moves none."""
        moved = self.bytes_read + self.bytes_written
        return self.flops / moved if moved else 0.0


@dataclass(frozen=True)
class Phase:
    """One forward pass of prefill or decode."""

    rows: list[Row]
    tokens: int
    """New tokens of all sequences"""
    width: int
    """E"""
    hardware: Hardware
    storage: Storage
    conventions: Conventions
    parallel: Parallel
    all_reduces: int = 0
    """Sums over the ranks of tensor parallelism"""
    choices: int = 0
    """Tokens that are chosen by its logits"""

    @property
    def flops(self) -> int:
        """FLOPs of all operations."""
        return sum(row.flops for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes read and written by all operations."""
        return sum(row.bytes for row in self.rows)

    @property
    def fusion_saves(self) -> int:
        """Bytes saved by fusion in all operations."""
        return sum(row.fusion_saves for row in self.rows)

    @property
    def peak(self) -> float:
        """The hardware's peak rate, in the FLOPs of the counting conventions."""
        return self.hardware.rate(self.storage.activations) * self.conventions.multiply_add / 2

    @property
    def ridge(self) -> float:
        """The arithmetic intensity above which an operation is compute-bound."""
        return self.peak / self.hardware.bandwidth

    def bound(self, row: Row) -> str:
        """An operation's bound: "compute" or "memory"."""
        return "compute" if row.intensity > self.ridge else "memory"

    def row_seconds(self, row: Row) -> float:
        """The floor of one operation. Tensor parallelism is assumed to split work and data evenly."""
        flops = row.flops * 2 / self.conventions.multiply_add
        return self.hardware.seconds(flops, row.bytes, self.storage.activations) / self.parallel.tensor

    @cached_property
    def seconds(self) -> float:
        """The floor of the phase. Pipeline stages run in turn and do not shorten it; communication is not counted."""
        return sum(self.row_seconds(row) for row in self.rows)

    @property
    def operations(self) -> list[Operation]:
        """The operations in the order of their first call, each summed over layers."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.name, []).append(row)
        return [self._sum(name, rows) for name, rows in groups.items()]

    @property
    def total(self) -> Operation:
        """The sum of all operations."""
        return self._sum("total", self.rows)._replace(bound="")

    def _sum(self, name: str, rows: list[Row]) -> Operation:
        return Operation(
            name,
            len(rows),
            sum(row.flops for row in rows),
            sum(row.bytes_read for row in rows),
            sum(row.bytes_written for row in rows),
            sum(row.fusion_saves for row in rows),
            self.bound(rows[0]),
            sum(self.row_seconds(row) for row in rows),
        )

    @property
    def message_bytes(self) -> int:
        """Bytes of the hidden states of all new tokens: T E numbers (the lecture's 2 L D bytes in 16 bits).

        This is the size of each all-reduce of tensor parallelism in the layers, and of each message between pipeline
        stages.
        """
        return self.storage.activation_bytes * self.tokens * self.width


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Roofline analysis of a model and a workload on given hardware."""

    config: ModelConfig
    storage: Storage
    workload: Workload
    hardware: Hardware
    conventions: Conventions = field(default_factory=Conventions)
    parallel: Parallel = field(default_factory=Parallel)
    scheme: str = ""
    """The scheme of a published quantised checkpoint, for people; "" if it is none"""

    def __post_init__(self) -> None:
        """Check sizes.

        Raises:
            ParameterError: a number is below 1 or beyond the model, or heads or layers do not divide evenly.
        """
        work, config, parallel = self.workload, self.config, self.parallel
        sizes = {
            "batch": work.batch,
            "prompt_length": work.prompt_length,
            "context": work.decode_context,
            "tensor_parallel": parallel.tensor,
            "pipeline_parallel": parallel.pipeline,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ParameterError(f"{name} should be at least 1, found {size}")
        for name in ("prompt_length", "context"):
            if sizes[name] > config.max_positions:
                raise ParameterError(f"{name} {sizes[name]} is beyond the model's {config.max_positions} positions")
        config.sharded(parallel.tensor)
        parallel.check_layers(config.num_layers, config.encoder_layers, config.per_layer_width)

    @cached_property
    def prefill(self) -> Phase:
        """All prompts in one pass; logits of the last token of each. Of an encoder-decoder the encoder's pass."""
        return self._phase(Part(self.workload.prompt_length, self.workload.prompt_length))

    @cached_property
    def decode(self) -> Phase:
        """A decode step: one new token of each sequence; after a source of the prompt's length, if there is one."""
        source = self.workload.prompt_length if self.config.encoder_layers else 0
        return self._phase(Part(1, self.workload.decode_context, source=source))

    @property
    def generates(self) -> bool:
        """Whether there is a decode step: not of an encoder, nor of a model with another head."""
        return self.config.output == "tokens"

    @property
    def phases(self) -> dict[str, Phase]:
        """The phases by name."""
        return {"prefill": self.prefill} | ({"decode": self.decode} if self.generates else {})

    def _phase(self, part: Part) -> Phase:
        encodes = self.config.encoder_layers and not part.source
        step = Step((part,) * self.workload.batch, 0 if encodes else self.workload.batch)
        return Phase(
            operations(self.config, step, self.storage, self.conventions),
            step.tokens,
            self.config.hidden_size,
            self.hardware,
            self.storage,
            self.conventions,
            self.parallel,
            self._all_reduces(encodes=bool(encodes)),
            step.rows if self.generates else 0,
        )

    def _all_reduces(self, *, encodes: bool) -> int:
        """All-reduces of a pass: of embeddings, and of each part of a layer, shared experts among them."""
        if self.parallel.tensor == 1:
            return 0
        if encodes:
            return 2 * self.config.encoder_layers + 1
        in_layers = self.config.layer_parts * self.config.num_layers
        return in_layers + self.config.shared_expert_layers + 1 + bool(self.config.per_layer_width)

    def all_reduce_bytes(self, phase: Phase) -> int:
        """Bytes that the ranks of one share of the heads give to all of them: T (2 L E + W) numbers of most decoders.

        W is the width of the token embedding, and of that of all layers if these have their own.
        """
        if not phase.all_reduces:
            return 0
        width = shape_model(self.config, ShapeBackend()).embedding.tokens.shape[1]  # W
        own = self.config.per_layer_width
        embedded = self.storage.activation_bytes * phase.tokens * (width + own)
        return (phase.all_reduces - 1 - bool(own)) * phase.message_bytes + embedded

    def all_reduce_seconds(self, phase: Phase) -> float | None:
        """The least time of a phase's all-reduces on the hardware's link; None: no link is known.

        Each of n ranks sends 2 (n - 1) / n of a message at least (Patarasuk and Yuan, 2009), as a ring does.
        """
        n, link = self.parallel.tensor, self.hardware.link
        return 2 * (n - 1) / n * self.all_reduce_bytes(phase) / link if link else None

    def stage_seconds(self, phase: Phase) -> float | None:
        """The least time in which one stage sends a phase's hidden states to the next; None: no link is known."""
        return phase.message_bytes / self.hardware.link if self.hardware.link else None

    def choice_bytes(self, phase: Phase) -> int:
        """Bytes that each rank with logits, but rank 0, sends it for the most likely tokens: 16 for each, and 16."""
        return CHOICE_BYTES * (phase.choices + 1) if phase.choices and self.parallel.devices > 1 else 0

    @property
    def memory(self) -> int:
        """Memory of all devices in bytes."""
        return self.hardware.memory * self.parallel.devices

    @property
    def largest_batch(self) -> int:
        """The most sequences of the decode context that fit into memory."""
        return largest_batch(self.config, self.storage, self.workload.decode_context, self.memory)

    @property
    def largest_context(self) -> int:
        """The longest context of the batch that fits into memory; the model may have fewer positions."""
        return largest_context(self.config, self.storage, self.workload.batch, self.memory)
