"""The cost of a model in closed form: parameters, FLOPs, bytes, and the memory of activations.

What `minillm.measure.accounting` and the counting observer are held against, exactly. Nothing here runs a model or
reads a cost function: a model is given by an outline of its components (`outlines.py`), and each kind of component has
its formulas. `reference/cost.py` defines what counts as a FLOP.

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
    sinks       3 T H
    experts     2 T E X + 4 T X + 2 n T k             router; softmax (3 T X of sigmoids); weights normalised
                + b T X + g T + s T k                 biases of the choice; sums of g groups' best; s factors
                + 4 k T E F + (a + 1) k T F           gate and up of k experts; activation, product
                + 2 k T F E + 2 k T E + T E           down; weighted sum, residual
                + b (2 k T F + k T E + T X)           biases of the projections and of the router
    latents     2 T Q (E + H (r + n)) or 2 T E H (r + n)  queries of low rank, or of full rank; their RMS norm
                + 2 T E (r + C) + T (4 C + 4)         latent and rotated key, RMS norm of the latent
                + 3 T (H + 1) r + 3 T r / 2           rotary
                + 2 T H n C + 2 T H C V               absorbed into queries and results
                + T H (r + C) + (2 (r + 2 C) + 4) H pairs    as attention, keys of r + C and values of C numbers
    scan        T H (5 P N + 3 P + 6) + H             H states of P N numbers
    gate        3 T n + T F                           n sigmoids of a row, and its product with them
    factor      T F                                   of a row by another, by one number, or by one a column
    a bias      H pairs, by distance; cross-attention as attention, its pairs those of a token and its source
    soft cap    3 H pairs of scores, 3 R V of logits      (+ R V if logits are scaled)
    T E where the embedding is scaled, and where a norm adds the residual, in place of the product before it

and fewer pairs with a sliding window.

Bytes are those of each operation alone: every array in its formula is read or written once, the weights once for all
rows, each sequence's keys and values once for all its queries and all heads that share them. Of X experts those that
some token chose are read, X (1 - (1 - k / X)^T) if tokens choose at random. Bias, activation and residual are fused
with their product, and attention's scores are never in memory. `fusion_saves` is the saving: the
bytes that would move if each of these steps read and wrote its own arrays.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

from minillm.backends.formats import Role
from minillm.config import ModelConfig
from minillm.measure.accounting import Conventions, Row, Step, Storage
from minillm.measure.accounting.storage import BYTES

from .components import (
    Attend,
    Combine,
    Component,
    Convolve,
    DeltaRule,
    Embed,
    ExpertLinear,
    Gate,
    HeadLinear,
    Linear,
    Multiply,
    Norm,
    Rotate,
    Route,
    ScaleLogits,
    Scan,
    Sigmoids,
    Spread,
    StoreKV,
    TakeRows,
)
from .outlines import encoder_outline_of, outline_of

ACTIVATION_FLOPS = {"relu": 1, "gelu": 20, "gelu_new": 9, "silu": 3, "tanh": 1, "swiglu_oai": 8, "relu2": 2}
"""a, per element: ReLU is one comparison; GELU uses the erf of Abramowitz and Stegun, 7.1.26, or tanh; SiLU is an
exponential, a sum and a division. gpt-oss's gate is SiLU with a product, after three comparisons, and a sum."""
LOGITS = ("vocabulary", "router", "labels")
"""Roles of matrices whose products are always float32"""
BITS = {"int8": 8, "int4": 4}
"""Bits of a number in a group that shares a scale of 2 bytes"""
ID_BYTES = 8
"""Bytes of a token id or a position"""
VECTOR_BYTES = 4
"""Bytes of a number in a bias or gain, and of a logit: always float32"""


Used = Literal["expected", "fewest", "most"]
"""Number of experts whose matrices a step reads"""


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


def operations(
    config: ModelConfig,
    step: Step,
    storage: Storage | None = None,
    conventions: Conventions | None = None,
    *,
    used: Used = "expected",
) -> list[Row]:
    """The operations of one forward pass in execution order."""
    storage, conventions = storage or Storage(), conventions or Conventions()
    outline = encoder_outline_of(config) if config.encoder_layers and step.encodes else outline_of(config)

    def rows(parts: tuple[Component, ...], layer: int | None, T: int) -> list[Row]:
        found = []
        for part in parts:
            if isinstance(part, TakeRows) and step.tokens == T:
                continue
            amounts = amounts_of(part, T, step, storage, conventions, used)
            flops = conventions.multiply_add * amounts.products + (not conventions.products_only) * amounts.other
            found.append(Row(part.name, part.kind, layer, flops, *amounts[2:]))
        return found

    L = len(outline.layers)
    layers = [row for i, layer in enumerate(outline.layers) for row in rows(layer, i, step.tokens)]
    ends = rows(outline.after, L, step.tokens) + rows(outline.head, L, step.rows)
    return rows((*outline.before, *outline.for_pass), None, step.tokens) + layers + ends


def amounts_of(
    part: Component, T: int, step: Step, storage: Storage, conventions: Conventions, used: Used = "expected"
) -> Amounts:
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
            result = storage.activation_bytes * T * part.rows * part.width
            flops = T * part.rows * part.width * (ACTIVATION_FLOPS[part.activation] + 1)
            read = result if part.alone else 2 * result
            return Amounts(other=flops, read=read, written=result, fusion_saves=2 * result)
        case StoreKV():
            numbers = (1 if part.joined else 2) * T * part.kv_heads * part.head_dim
            written = T * position_bytes(storage, part.kv_heads, part.head_dim, joined=part.joined)
            return Amounts(read=storage.activation_bytes * numbers, written=written)
        case Attend() | Convolve() | DeltaRule() | Scan():
            return _of_several_tokens(part, T, step, storage, conventions)
        case TakeRows() | Route() | Spread() | ExpertLinear() | HeadLinear() | Combine() | Sigmoids() | Multiply():
            return _of_chosen(part, T, storage, used)
        case ScaleLogits():
            numbers, steps = VECTOR_BYTES * T * part.width, part.scaled + part.capped
            flops = T * part.width * (part.scaled + 3 * part.capped)
            return Amounts(other=flops, read=numbers, written=numbers, fusion_saves=(steps - 1) * 2 * numbers)


def _of_several_tokens(
    part: Attend | Convolve | DeltaRule | Scan, T: int, step: Step, storage: Storage, conventions: Conventions
) -> Amounts:
    """Attention, a convolution, a linear attention, or a recurrence."""
    if isinstance(part, DeltaRule):
        return _delta_rule(part, T, step, storage)
    if isinstance(part, Scan):
        return _scan(part, T, step, storage)
    if isinstance(part, Convolve):
        return _convolve(part, T, step, storage)
    step = step.over_sources if part.cross else step
    every = conventions.full_square or not part.causal
    return _attend(part, T, step, storage, step.square if every else step.pairs(part.window))


def _of_chosen(
    part: TakeRows | Route | Spread | ExpertLinear | HeadLinear | Combine | Sigmoids | Multiply,
    T: int,
    storage: Storage,
    used: Used,
) -> Amounts:
    """Some of all rows; the choice of experts, T k rows instead of T, and their sum; factors; the rows of all heads."""
    match part:
        case Multiply():
            numbers = storage.activation_bytes * T * part.width
            read = numbers * (1 + part.by_rows) + VECTOR_BYTES * part.factors * (not part.by_rows)
            return Amounts(other=T * part.width, read=read, written=numbers)
        case HeadLinear():
            a, rows = storage.activation_bytes, T * part.heads
            read = a * rows * (part.copied + part.inputs) + bool(T) * head_bytes(part, storage)
            written = a * rows * (part.copied + part.outputs)
            return Amounts(products=rows * part.inputs * part.outputs, read=read, written=written)
        case Sigmoids():
            numbers, logits = T * part.width, T * part.logits
            a = storage.activation_bytes
            return Amounts(other=3 * logits + numbers, read=a * (numbers + logits), written=a * numbers)
        case TakeRows() | Spread():
            rows = T * part.chosen if isinstance(part, Spread) else T
            numbers = storage.activation_bytes * rows * part.width
            return Amounts(read=ID_BYTES * rows + numbers, written=numbers)
        case Route():
            choices = T * part.chosen
            written = choices * (VECTOR_BYTES + 3 * ID_BYTES) + ID_BYTES * (part.experts + 1)
            flops = (3 if part.sigmoid else 4) * T * part.experts + 2 * choices * part.normalised
            flops += T * part.experts * part.biased + T * part.groups * (part.groups > 1)
            flops += choices * (part.scaled + part.by_factors)
            read = VECTOR_BYTES * part.experts * (T + part.biased + part.by_factors)
            return Amounts(other=flops, read=read, written=written)
        case ExpertLinear():
            a, rows = storage.activation_bytes, T * part.chosen
            read = a * rows * part.inputs + round(used_experts(part, T, used) * expert_bytes(part, storage))
            results = rows * part.outputs
            return Amounts(results * part.inputs, results * part.bias, read, a * results, 2 * a * results * part.bias)
        case Combine():
            sums = T * part.width * (part.chosen + part.residual)
            a, choices = storage.activation_bytes, T * part.chosen
            return Amounts(
                other=sums + choices * part.width,
                read=a * sums + choices * (VECTOR_BYTES + ID_BYTES),
                written=a * T * part.width,
                fusion_saves=2 * a * sums,
            )


def used_experts(part: ExpertLinear, T: int, used: Used) -> float:
    """Experts that T tokens read: in the expectation, if each chooses at random; the fewest; the most."""
    X, k = part.experts, part.chosen
    most = min(X, T * k)
    return {"expected": X * (1 - (1 - k / X) ** T), "fewest": min(k, most), "most": most}[used]


def _embed(part: Embed, T: int, storage: Storage) -> Amounts:
    """Copies a row of each table per token; T E additions for each but the first, T E products if scaled."""
    read = 0
    if part.vectors:
        read += T * (ID_BYTES + row_bytes(storage, "vocabulary", part.width))
    if part.positions:
        row = VECTOR_BYTES * part.width if part.computed else row_bytes(storage, "positions", part.width)
        read += T * (ID_BYTES + row)
    if part.types:
        read += T * (ID_BYTES + row_bytes(storage, "positions", part.width))
    result = storage.activation_bytes * T * part.width
    steps = bool(part.vectors and part.positions) + bool(part.types) + part.scaled
    return Amounts(other=steps * T * part.width, read=read, written=result, fusion_saves=steps * 2 * result)


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
        written=(VECTOR_BYTES if part.role in LOGITS else a) * results,
        fusion_saves=passes * 2 * a * results,
    )


def _norm(part: Norm, T: int, storage: Storage) -> Amounts:
    """Five FLOPs per element: the mean's sum, the difference, the square and its sum, the scaling; gain and bias.

    Five per row: two divisions by E, epsilon's addition, the root, its reciprocal. RMS norm saves two FLOPs per
    element, one per row and the bias. A residual is one more per element, and one more array that is read.
    """
    E, rows = part.width, T * part.rows
    result = storage.activation_bytes * rows * E
    affine = part.affine * (1 + part.mean) * E
    own = 5 * E + 5 if part.mean else 3 * E + 4
    return Amounts(
        other=rows * (own + affine + part.residual * E),
        read=result * (1 + part.residual) + VECTOR_BYTES * affine * part.gains,
        written=result,
        fusion_saves=part.residual * 2 * result,
    )


def _rotate(part: Rotate, T: int, storage: Storage) -> Amounts:
    """Per pair and head four products, two sums; per pair and token an angle, its cosine and sine.

    Scaling takes two more per pair and token, a stretch a power and a division.
    """
    heads = part.heads + part.kv_heads
    row = part.heads * part.head_dim + part.kv_heads * (part.key_dim or part.head_dim)
    numbers = storage.activation_bytes * T * row
    flops = T * part.pairs * (6 * heads + 3 + 2 * part.scaled + 2 * part.stretched)
    known = bool(T) * (ID_BYTES * T + VECTOR_BYTES * part.pairs)
    return Amounts(other=flops, read=numbers + known, written=numbers)


def _convolve(part: Convolve, T: int, step: Step, storage: Storage) -> Amounts:
    """Per number k products and k - 1 sums, a product for each of both gates, a sum for the bias, an activation.

    A number is read, with gates three, and one is written; the state of a sequence, k - 1 numbers of float32, both.
    """
    a, C, k = storage.activation_bytes, part.width, part.taps
    states = VECTOR_BYTES * len(step.parts) * (k - 1) * C
    flops = ACTIVATION_FLOPS[part.activation] if part.activation else 0
    return Amounts(
        other=T * C * (2 * k - 1 + 2 * part.gated + part.bias + flops),
        read=(3 if part.gated else 1) * a * T * C + VECTOR_BYTES * C * (k + part.bias) + states,
        written=a * T * C + states,
        fusion_saves=(2 * part.gated + part.bias + (part.activation is not None)) * 2 * a * T * C,
    )


def _delta_rule(part: DeltaRule, T: int, step: Step, storage: Storage) -> Amounts:
    """Of each number of a matrix a product for its decay, and a multiply-add each to ask, correct and ask it again.

    A correction is a difference and a product; beta an exponential, a sum and a division; the decay a sum, softplus'
    exponential, logarithm, comparison and sum, a product and an exponential; its rate an exponential once. A query and
    a key have a square, a sum and a division of each number, and a sum and a root; a query's numbers a product besides.
    The state of a sequence is read and written. Unfused, queries and keys of unit length, and the state after each
    token, would be written and read.
    """
    a, V, dk, dv = storage.activation_bytes, part.heads, part.key_dim, part.head_dim
    matrix, values, keys = V * dk * dv, T * V * dv, T * part.key_heads * dk
    states, sequences = VECTOR_BYTES * matrix, len(step.parts)
    lengths = 2 * (3 * keys + 2 * T * part.key_heads) + keys
    return Amounts(
        other=7 * T * matrix + 2 * values + T * V * (3 + 7) + V + lengths,
        read=a * (2 * keys + values + 2 * T * V) + 2 * VECTOR_BYTES * V + sequences * states,
        written=a * values + sequences * states,
        fusion_saves=2 * a * 2 * keys + 2 * (T - sequences) * states,
    )


def _scan(part: Scan, T: int, step: Step, storage: Storage) -> Amounts:
    """Per number of the state a product for its decay, a multiply-add to add to it, another to read it.

    Per value a product with the step, a product and a sum to skip; per head a sum, an exponential, a logarithm and a
    sum for the step, a product and an exponential for the decay; of each rate an exponential. The state of a sequence,
    float32, is read and written.
    """
    a, H, P, N = storage.activation_bytes, part.heads, part.head_dim, part.state_size
    state = VECTOR_BYTES * H * P * N
    states, results = len(step.parts) * state, a * T * H * P
    return Amounts(
        other=5 * T * H * P * N + 3 * T * H * P + 6 * T * H + H,
        read=results + a * T * (2 * part.groups * N + H) + 3 * VECTOR_BYTES * H + states,
        written=results + states,
        fusion_saves=2 * (T * state - states),
    )


def _attend(part: Attend, T: int, step: Step, storage: Storage, pairs: int) -> Amounts:
    """Per pair and head D multiply-adds for the score, 4 FLOPs for softmax, V multiply-adds for the value.

    Softmax's four are subtraction, exponential, sum and division. ALiBi's two are a product and a subtraction, a soft
    cap's three a division, a hyperbolic tangent and a product. Q is scaled once. Unfused, scores would be written by
    the first product, read and written by soft cap, ALiBi and softmax, and read by the second product. A bias by
    distance is one sum. A sink is one more score of each query and head: a subtraction, an exponential, a sum.
    """
    H, D, a, V = part.heads, part.head_dim, storage.activation_bytes, part.value_dim or part.head_dim
    queries, steps = T * H * D, 4 + 2 * part.biased + 3 * part.capped + bool(part.distances)
    position = position_bytes(storage, part.kv_heads, D, joined=bool(part.value_dim))
    cached = step.reach(part.window) * position
    return Amounts(
        products=(D + V) * H * pairs,
        other=steps * H * pairs + queries + 3 * T * H * part.sunk,
        read=a * queries + cached + VECTOR_BYTES * H * (part.biased + part.sunk + part.distances),
        written=a * T * H * V,
        fusion_saves=steps * a * H * pairs,
    )


def parameters_of(part: Component) -> int:
    """Parameters of one component; a tied head has none of its own but a bias."""
    match part:
        case Embed():
            return (part.vectors + part.positions * (not part.computed) + part.types) * part.width
        case Linear():
            return part.outputs * (part.inputs * (not part.tied) + part.bias)
        case ExpertLinear():
            return part.experts * part.outputs * (part.inputs + part.bias)
        case HeadLinear():
            return part.heads * part.outputs * part.inputs
        case Route():
            return part.experts * (part.biased + part.by_factors)
        case Attend() | DeltaRule() | Scan():
            return part.heads * numbers_of_heads(part)
        case Convolve():
            return part.width * (part.taps + part.bias)
        case Multiply():
            return not part.by_rows and part.factors == 1  # those of columns are in no checkpoint
        case Norm():
            return (1 + part.mean) * part.width * part.affine * part.gains
    return 0


def numbers_of_heads(part: Attend | DeltaRule | Scan) -> int:
    """A head's own parameters: biases by distance and a sink; or rates, a step's bias and a factor to skip."""
    if isinstance(part, Attend):
        return part.buckets + part.sunk
    return 2 if isinstance(part, DeltaRule) else 3


def weight_bytes_of(part: Component, storage: Storage) -> int:
    """Bytes of one component's parameters."""
    match part:
        case Embed():
            vectors = part.vectors * row_bytes(storage, "vocabulary", part.width)
            tables = part.positions * (not part.computed) + part.types
            return vectors + tables * row_bytes(storage, "positions", part.width)
        case Linear():
            return VECTOR_BYTES * part.outputs * part.bias if part.tied else matrix_bytes(part, storage)
        case ExpertLinear():
            return part.experts * expert_bytes(part, storage)
        case HeadLinear():
            return head_bytes(part, storage)
        case Attend():
            buckets = part.buckets * row_bytes(storage, "positions", part.heads)
            return buckets + VECTOR_BYTES * part.sunk * part.heads
        case Norm() | Route() | Convolve() | DeltaRule() | Scan() | Multiply():
            return VECTOR_BYTES * parameters_of(part)
    return 0


def matrix_bytes(part: Linear, storage: Storage) -> int:
    """Bytes of a stored matrix and its bias."""
    return part.outputs * (row_bytes(storage, part.role, part.inputs) + VECTOR_BYTES * part.bias)


def expert_bytes(part: ExpertLinear, storage: Storage) -> int:
    """Bytes of one expert's stored matrix and bias."""
    return part.outputs * (row_bytes(storage, "projection", part.inputs) + VECTOR_BYTES * part.bias)


def head_bytes(part: HeadLinear, storage: Storage) -> int:
    """Bytes of all heads' stored matrices."""
    return part.heads * part.outputs * row_bytes(storage, "projection", part.inputs)


def row_bytes(storage: Storage, role: Role, width: int) -> int:
    """Bytes of one row of a matrix, padded to whole groups if quantised.

    With 4-bit projections the vocabulary has 8 bits; positions and routers are never quantised.
    """
    stored = storage.weights
    if stored in BITS and role in ("positions", "router", "labels"):
        stored = storage.checkpoint
    elif stored == "int4" and role == "vocabulary":
        stored = "int8"
    if stored in BYTES:
        return BYTES[stored] * width
    groups = -(-width // storage.group)
    return groups * (storage.group * BITS[stored] // 8 + 2)


def position_bytes(storage: Storage, K: int, D: int, *, joined: bool = False) -> int:
    """Bytes of one position's keys and values in one layer: 2 K D numbers; int8 adds a 4-byte scale per vector.

    int4 has 16 bytes for each 32 numbers begun, and a 2-byte scale.

    Where they are joined it is K vectors of D numbers in all.
    """
    vectors = K if joined else 2 * K
    if storage.cache == "int4":
        return vectors * -(-D // 32) * 18
    return vectors * (D + 4) if storage.cache == "int8" else vectors * D * BYTES[storage.cache]


def activation_bytes(config: ModelConfig, storage: Storage, T: int, R: int) -> int:
    """Bytes of a forward pass's results in minillm's arena.

    The n-th results of all layers share one buffer, as large as the largest of them. If that buffer still holds the
    previous layer's last result, a second one is used. Results that stay for the pass have buffers of their own.

    Args:
        config: the model
        storage: format of activations
        T: new tokens of all sequences
        R: rows that go through the head
    """
    stay = enumerate(outline_of(config).for_pass)
    places = {(-1 - i, True): sum(result_bytes(part, storage, T)) for i, part in stay}
    for outline in (outline_of(config), *((encoder_outline_of(config),) if config.encoder_layers else ())):
        last = (-1, False)
        ends = (*((part, T) for part in outline.after), *((part, R) for part in outline.head))
        for turn in (*([(part, T) for part in parts] for parts in (outline.before, *outline.layers)), ends):
            kept, number = last, 0
            for part, rows in turn:
                if isinstance(part, TakeRows) and R == T:
                    continue
                for size in result_bytes(part, storage, rows):
                    last = number, kept == (number, False)
                    places[last] = max(size, places.get(last, 0))
                    number += not getattr(part, "given_back", False)
    return sum(places.values())


def result_bytes(part: Component, storage: Storage, rows: int) -> tuple[int, ...]:
    """Bytes of each array that a component's operation returns."""
    a = storage.activation_bytes * rows
    match part:
        case Embed() | TakeRows() | Combine() | Sigmoids() | Convolve() | Multiply():
            return (a * part.width,)
        case Gate() | Norm():
            return (a * part.rows * part.width,)
        case Spread():
            return (a * part.chosen * part.width,)
        case ExpertLinear():
            return (a * part.chosen * part.outputs,)
        case Linear():
            return ((VECTOR_BYTES * rows if part.role in LOGITS else a) * part.outputs,)
        case Rotate():
            return a * part.heads * part.head_dim, a * part.kv_heads * (part.key_dim or part.head_dim)
        case Attend() | HeadLinear():
            width = part.copied + part.outputs if isinstance(part, HeadLinear) else part.value_dim or part.head_dim
            return (a * part.heads * width,)
        case Scan() | DeltaRule():
            return (a * part.heads * part.head_dim,)
        case StoreKV() | Route() | ScaleLogits():
            return ()


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters; a tied head counts once, as the token embedding."""
    return sum(parameters_of(part) for part in _all_parts(config))


def weights_bytes(config: ModelConfig, storage: Storage) -> int:
    """Bytes of all weights."""
    return sum(weight_bytes_of(part, storage) for part in _all_parts(config))


def _all_parts(config: ModelConfig) -> list[Component]:
    outlines = [outline_of(config)]
    if config.encoder_layers:
        encoder = encoder_outline_of(config)
        embed, *rest = encoder.before
        assert isinstance(embed, Embed)
        outlines.append(replace(encoder, before=(replace(embed, vectors=0), *rest)))  # the tokens are the decoder's
    return [
        part
        for outline in outlines
        for parts in (outline.before, outline.for_pass, *outline.layers, outline.after, outline.head)
        for part in parts
    ]
