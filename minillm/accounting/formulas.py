"""The cost of each kind of component in closed form: parameters, FLOPs, bytes.

The formulas are independent of the operations' own cost functions. `backends/observe.py` sums those over the calls
really made; tests and benchmarks check that both agree exactly. `reference/cost.py` defines what counts as a FLOP.

With W the width of the token embedding (E except in opt-350m), and b, g, a = 1 or 0 where the model has biases, gains
in its norms, and so on, an OPT step of T new tokens, of which R go through the head, takes these FLOPs:

    embedding   T E                                       (+ 2 T W E where W < E)
    norm        T (5 E + 5) + 2 g T E                     each of them
    attention   2 T E (H + 2 K) D + b T (H + 2 K) D       project Q, K, V
                + T H D + (4 D + 4) H pairs               scale Q; scores, softmax, values
                + 2 T H D E + b T E + T E                 project out, residual
    MLP         2 T E F + b T F + a T F                   up, activation
                + 2 T F E + b T E + T E                   down, residual
    head        2 R W V                                   (+ 2 R E W where W < E)

where `pairs` counts, over all sequences, the pairs of a new token and a visible position. Other families have, with r
of each head's D numbers rotated,

    RMS norm    T (3 E + 4) + g T E                       of each head: H T (3 D + 4) + g H T D, and K for H
    rotary      3 T (H + K) r + 3 T r / 2                 (+ T r if scaled, + T r if frequencies follow the length)
    gated MLP   4 T E F + 2 b T F                         gate and up
                + (a + 1) T F + 2 T F E + b T E + T E     activation, product; down, residual
    ALiBi       2 H pairs

and fewer pairs with a sliding window.

Bytes are those of each operation alone: every array in its formula is read or written once, the weights once for all
rows, each sequence's keys and values once for all its queries and all heads that share them. Bias, activation and
residual are fused with their product, and attention's scores are never in memory. `fusion_saves` is the saving: the
bytes that would move if each of these steps read and wrote its own arrays.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..models.outline import Attend, Component, Embed, Gate, Linear, Norm, Outline, Rotate, StoreKV, TakeRows
from .schedule import Step
from .storage import ID_BYTES, VECTOR_BYTES, Storage

ACTIVATION_FLOPS = {"relu": 1, "gelu": 20, "gelu_new": 9, "silu": 3}
"""a, per element: ReLU is one comparison; GELU uses the erf of Abramowitz and Stegun, 7.1.26, or tanh; SiLU is an
exponential, a sum and a division."""


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """Counting conventions in which tools differ. The defaults are minillm's."""

    full_square: bool = False
    """Count all pairs of a query and a key in attention, not only the causal ones"""
    products_only: bool = False
    """Count only matrix products: no norms, softmax, activations, biases or sums"""
    multiply_add: int = 2
    """FLOPs of a multiply-add; 1 counts MACs"""


class Amounts(NamedTuple):
    """Cost of one component in one step."""

    products: int = 0
    """Multiply-adds of matrix products"""
    other: int = 0
    """All other FLOPs"""
    read: int = 0
    """Bytes"""
    written: int = 0
    """Bytes"""
    fusion_saves: int = 0
    """Bytes"""


class Row(NamedTuple):
    """One operation of a step."""

    name: str
    kind: str
    """Name of the backend's operation"""
    layer: int | None
    """None before the first layer, the number of layers after the last, as in `backends.observe`"""
    flops: int
    bytes_read: int
    bytes_written: int
    fusion_saves: int

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0


def operations(
    outline: Outline, step: Step, storage: Storage | None = None, conventions: Conventions | None = None
) -> list[Row]:
    """The operations of one forward pass in execution order."""
    storage, conventions = storage or Storage(), conventions or Conventions()

    def rows(parts: tuple[Component, ...], layer: int | None, T: int) -> list[Row]:
        found = []
        for part in parts:
            if isinstance(part, TakeRows) and step.tokens == T:
                continue
            amounts = amounts_of(part, T, step, storage, conventions)
            flops = conventions.multiply_add * amounts.products + (not conventions.products_only) * amounts.other
            found.append(Row(part.name, part.kind, layer, flops, *amounts[2:]))
        return found

    L = len(outline.layers)
    layers = [row for i, layer in enumerate(outline.layers) for row in rows(layer, i, step.tokens)]
    ends = rows(outline.after, L, step.tokens) + rows(outline.head, L, step.rows)
    return rows(outline.before, None, step.tokens) + layers + ends


def amounts_of(part: Component, T: int, step: Step, storage: Storage, conventions: Conventions) -> Amounts:
    """Cost of one component for T rows of a step."""
    match part:
        case Embed():
            return _embed(part, T, storage)
        case Linear():
            return _linear(part, T, storage)
        case Norm():
            return _norm(part, T, storage)
        case Rotate():
            return _rotate(part, T, storage)
        case Gate():
            result = storage.activation_bytes * T * part.width
            flops = T * part.width * (ACTIVATION_FLOPS[part.activation] + 1)
            return Amounts(other=flops, read=2 * result, written=result, fusion_saves=2 * result)
        case StoreKV():
            numbers = 2 * T * part.kv_heads * part.head_dim
            written = T * storage.position_bytes(part.kv_heads, part.head_dim)
            return Amounts(read=storage.activation_bytes * numbers, written=written)
        case Attend():
            return _attend(part, T, step, storage, step.square if conventions.full_square else step.pairs(part.window))
        case TakeRows():
            numbers = storage.activation_bytes * T * part.width
            return Amounts(read=ID_BYTES * T + numbers, written=numbers)


def _embed(part: Embed, T: int, storage: Storage) -> Amounts:
    """Copies a row of each table per token; T E additions with two tables."""
    read = 0
    if part.vectors:
        read += T * (ID_BYTES + storage.row_bytes("vocabulary", part.width))
    if part.positions:
        read += T * (ID_BYTES + storage.row_bytes("positions", part.width))
    result = storage.activation_bytes * T * part.width
    both = bool(part.vectors and part.positions)
    return Amounts(other=both * T * part.width, read=read, written=result, fusion_saves=both * 2 * result)


def _linear(part: Linear, T: int, storage: Storage) -> Amounts:
    """T in out multiply-adds; per result one FLOP each for bias and residual, and the activation's."""
    results = T * part.outputs
    extra = part.bias + part.residual + (ACTIVATION_FLOPS[part.activation] if part.activation else 0)
    a = storage.activation_bytes
    read = a * T * part.inputs + part.residual * a * results + bool(T) * matrix_bytes(part, storage)
    passes = part.bias + part.residual + (part.activation is not None)
    return Amounts(
        products=results * part.inputs,
        other=results * extra,
        read=read,
        written=(VECTOR_BYTES if part.role == "vocabulary" else a) * results,
        fusion_saves=passes * 2 * a * results,
    )


def _norm(part: Norm, T: int, storage: Storage) -> Amounts:
    """Five FLOPs per element: the mean's sum, the difference, the square and its sum, the scaling; gain and bias.

    Five per row: two divisions by E, epsilon's addition, the root, its reciprocal. RMS norm saves two FLOPs per
    element, one per row and the bias.
    """
    E, rows = part.width, T * part.rows
    result = storage.activation_bytes * rows * E
    affine = part.affine * (1 + part.mean) * E
    own = 5 * E + 5 if part.mean else 3 * E + 4
    return Amounts(other=rows * (own + affine), read=result + VECTOR_BYTES * affine, written=result)


def _rotate(part: Rotate, T: int, storage: Storage) -> Amounts:
    """Per pair and head four products, two sums; per pair and token an angle, its cosine and sine.

    Scaling takes two more per pair and token, a stretch a power and a division.
    """
    heads = part.heads + part.kv_heads
    numbers = storage.activation_bytes * T * heads * part.head_dim
    flops = T * part.pairs * (6 * heads + 3 + 2 * part.scaled + 2 * part.stretched)
    known = bool(T) * (ID_BYTES * T + VECTOR_BYTES * part.pairs)
    return Amounts(other=flops, read=numbers + known, written=numbers)


def _attend(part: Attend, T: int, step: Step, storage: Storage, pairs: int) -> Amounts:
    """Per pair and head D multiply-adds for the score, 4 FLOPs for softmax, D multiply-adds for the value.

    Softmax's four are subtraction, exponential, sum and division. ALiBi's two are a product and a subtraction. Q is
    scaled once. Unfused, scores would be written by the first product, read and written by ALiBi and softmax, and read
    by the second product.
    """
    H, D, a = part.heads, part.head_dim, storage.activation_bytes
    queries = T * H * D
    cached = step.reach(part.window) * storage.position_bytes(part.kv_heads, D)
    return Amounts(
        products=2 * D * H * pairs,
        other=(4 + 2 * part.biased) * H * pairs + queries,
        read=a * queries + cached + VECTOR_BYTES * H * part.biased,
        written=a * queries,
        fusion_saves=(4 + 2 * part.biased) * a * H * pairs,
    )


def parameters_of(part: Component) -> int:
    """Parameters of one component; a tied head has none of its own."""
    match part:
        case Embed():
            return (part.vectors + part.positions) * part.width
        case Linear():
            return 0 if part.tied else part.outputs * (part.inputs + part.bias)
        case Norm():
            return (1 + part.mean) * part.width * part.affine
    return 0


def weight_bytes_of(part: Component, storage: Storage) -> int:
    """Bytes of one component's parameters."""
    match part:
        case Embed():
            vectors = part.vectors * storage.row_bytes("vocabulary", part.width)
            return vectors + part.positions * storage.row_bytes("positions", part.width)
        case Linear():
            return 0 if part.tied else matrix_bytes(part, storage)
        case Norm():
            return VECTOR_BYTES * parameters_of(part)
    return 0


def matrix_bytes(part: Linear, storage: Storage) -> int:
    """Bytes of a stored matrix and its bias."""
    return part.outputs * (storage.row_bytes(part.role, part.inputs) + VECTOR_BYTES * part.bias)
