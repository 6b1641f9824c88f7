"""One forward pass as a table: each operation with the shapes that it reads and writes, its FLOPs and its bytes.

The operations are those that ran, seen by the observer that `accounting/costs.py` counts with. A prompt's pass is
prefill; the pass of the one token that follows it is decode (the two tables of COMP4901Y's lecture "Generative
Inference").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..backends.observe import put_between
from ..backends.weights import Weight
from ..batch import TokenSequence
from ..decoding.prompts import Prompt
from ..engine.inspect import cache_for
from ..errors import ParameterError, shown
from ..runner.runner import Runner
from ..text.display import grid_html
from .accounting.costs import Conventions, Row, RowBackend

if TYPE_CHECKING:
    from ..engine.engine import Engine

Shape = tuple[int, ...]
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class PassOperation:
    """An operation of a pass; the same one of all layers together."""

    name: str
    """The weight's place in the model ("attention.qkv"), or the operation's name if it has none"""
    layers: tuple[int, ...]
    """Layers that have it; empty before the first and after the last"""
    inputs: dict[str, Shape]
    """Arrays that it reads, by name; `keys` and `values` are those in the cache"""
    weight: Shape | None
    """As it is stored: a projection's is [out, in]"""
    output: tuple[Shape, ...]
    """Arrays that it makes; empty if it writes to the cache alone"""
    flops: int
    """FLOPs of all `layers`, as are the bytes"""
    bytes_read: int
    bytes_written: int

    @property
    def times(self) -> int:
        """How often it runs."""
        return max(1, len(self.layers))


@dataclass(frozen=True)
class PassTable:
    """The operations of one forward pass, in the order of their first run. A notebook shows them as a table."""

    phase: str
    tokens: int
    """T, tokens that the pass computes"""
    context: int
    """S, tokens that its last token sees, itself included"""
    operations: tuple[PassOperation, ...]

    @property
    def flops(self) -> int:
        """FLOPs of the pass."""
        return sum(operation.flops for operation in self.operations)

    @property
    def bytes(self) -> int:
        """Bytes read and written by the pass."""
        return sum(operation.bytes_read + operation.bytes_written for operation in self.operations)

    head = ("operation", "times", "input", "weight", "output", "FLOPs", "read", "written")

    def rows(self) -> list[list[str]]:
        """The cells of the table, below `head`, with a row of sums."""
        rows = [
            [
                operation.name,
                str(operation.times),
                ", ".join(f"{name} {shape_text(shape)}" for name, shape in operation.inputs.items()),
                "" if operation.weight is None else shape_text(operation.weight),
                ", ".join(map(shape_text, operation.output)) or "to the cache",
                f"{operation.flops:,}",
                f"{operation.bytes_read:,}",
                f"{operation.bytes_written:,}",
            ]
            for operation in self.operations
        ]
        read, written = (
            sum(getattr(operation, name) for operation in self.operations) for name in ("bytes_read", "bytes_written")
        )
        return [*rows, ["total", "", "", "", "", f"{self.flops:,}", f"{read:,}", f"{written:,}"]]

    @property
    def title(self) -> str:
        """The phase and its sizes in words."""
        plural = "" if self.tokens == 1 else "s"
        return f"{self.phase}: {self.tokens} token{plural} at context {self.context}"

    def _repr_html_(self) -> str:
        note = f"{self.flops / self.bytes:.2f} FLOPs per byte; FLOPs and bytes of all layers together"
        return grid_html(self.title, self.head, self.rows(), note)


def pass_table(engine: "Engine", prompt: Prompt, phase: Literal["prefill", "decode"] = "prefill") -> PassTable:
    """Run a prompt's pass, or that of the likeliest token after it, and return its operations.

    Args:
        engine: on one process
        prompt: text or token ids
        phase: "prefill" or "decode"

    Raises:
        PromptError: as `Engine.generate`.
        TaskError: the model generates no text.
        ParameterError: the phase is another, or the model is an encoder-decoder.

    Example:
        >>> table = pass_table(engine, "A list of colors: red,")
        >>> table.operations[2].name, table.operations[2].inputs["x"], table.operations[2].weight
        ('attention.qkv', (8, 192), (576, 192))
    """
    if phase not in PHASES:
        raise ParameterError(f"phase should be 'prefill' or 'decode', found {shown(phase)}")
    if engine.config.encoder_layers:
        raise ParameterError("shapes are those of a decoder's pass: an encoder-decoder has two, and is not offered")
    return pass_of(engine.runner, engine.request(prompt, max_new_tokens=1).prompt_ids, phase)


def pass_of(runner: Runner, token_ids: Sequence[int], phase: str) -> PassTable:
    """As `pass_table`, of a runner and token ids, at least one."""
    sequence = TokenSequence(list(token_ids))
    apart = runner.apart(cache_for(runner, [*token_ids, 0]))
    if phase == "decode":
        logits = apart.prefill(sequence).logits
        sequence.token_ids.append(int(runner.backend.sampler.argmax(logits)[0]))
    tokens = sequence.pending
    with put_between(apart, _ShapeRecorder(runner.backend, runner.model, Conventions())) as recorder:
        apart.prefill(sequence)
    return PassTable(phase, tokens, sequence.cached, _merged(recorder.calls, runner.model.config.num_layers))


def shape_text(shape: Shape) -> str:
    """A shape as text: `[8, 192]`."""
    return f"[{', '.join(map(str, shape))}]"


Call = tuple[Row, dict[str, Shape], Shape | None, tuple[Shape, ...]]
"""A row, and the shapes of inputs, weight and outputs"""


class _ShapeRecorder(RowBackend):
    """Notes the shapes of each operation beside its row."""

    only_looks = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[Call] = []

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Add a call."""
        super().observe(operation, weight, result, **arguments)
        inputs = {name: shape for name, value in arguments.items() if (shape := _shape(value))}
        inputs = {name: inputs[name] for name in sorted(inputs, key=lambda name: (name != "x", name != "ids"))}
        if operation == "attend":
            batch, pages = arguments["batch"], arguments["cache"]
            S, D = batch.spans[0].context_len, arguments["q"].shape[2]
            inputs |= {"keys": (S, pages.heads, D), "values": (S, pages.heads, result.shape[2])}
        outputs = tuple(
            shape for item in (result if isinstance(result, tuple) else (result,)) if (shape := _shape(item))
        )
        self.calls.append((self.rows[-1], inputs, _shape(weight) or None, outputs))


def _shape(value: Any) -> Shape:
    """The shape of an array or a weight; () of anything else."""
    return tuple(getattr(value, "shape", ()))


def _merged(calls: list[Call], num_layers: int) -> tuple[PassOperation, ...]:
    """The calls, those of the same name and shapes in several layers as one operation."""
    groups: dict[Any, list[Call]] = {}
    for call in calls:
        row, inputs, weight, outputs = call
        inside = row.layer is not None and row.layer < num_layers
        groups.setdefault((row.name, inside, tuple(inputs.items()), weight, outputs), []).append(call)
    return tuple(
        PassOperation(
            row.name,
            tuple(call[0].layer for call in group if call[0].layer is not None and call[0].layer < num_layers),
            inputs,
            weight,
            outputs,
            sum(call[0].flops for call in group),
            sum(call[0].bytes_read for call in group),
            sum(call[0].bytes_written for call in group),
        )
        for group in groups.values()
        for row, inputs, weight, outputs in group[:1]
    )
