"""The cost of each operation, from the arguments of its call: what is counted, checked and timed (`observe.py`).

The formulas stand in `reference/`, beside the mathematics; here the shapes and types of a call are put into them.
"""

from collections.abc import Callable
from typing import Any

from ..reference.attention import attention_cost, kv_cost
from ..reference.convolution import convolution_cost, unfold_cost
from ..reference.cost import Cost
from ..reference.delta_rule import delta_rule_cost
from ..reference.experts import combine_cost, linear_experts_cost, route_cost
from ..reference.gates import gate_cost, glu_cost, multiply_cost, scale_logits_cost
from ..reference.linear import embed_cost, linear_cost, reduce_cost
from ..reference.linear_heads import linear_heads_cost
from ..reference.low_rank import low_rank_cost
from ..reference.norm import layer_norm_cost, rms_norm_cost
from ..reference.rotary import rotary_cost
from ..reference.selective_scan import selective_scan_cost


def _embed(call: Any) -> Cost:
    tables = (call.weight, call.position_table, call.type_table)
    row, positions, types = (0 if table is None else table.data.nbytes // table.shape[0] for table in tables)
    (T, E), scaled = call.result.shape, call.scale != 1
    return embed_cost(T, E, row, positions, call.result.itemsize, type_row_bytes=types, scaled=scaled)


def _linear(call: Any) -> Cost:
    outputs, inputs = call.weight.shape
    return linear_cost(
        len(call.result),
        inputs,
        outputs,
        call.weight.nbytes,
        bias=call.weight.bias is not None,
        activation=call.activation,
        residual=call.residual is not None,
        number_bytes=call.x.itemsize,
        result_bytes=call.result.itemsize,
    )


def _linear_heads(call: Any) -> Cost:
    (T, H, D), number_bytes = call.x.shape, call.x.itemsize
    rows, inputs = call.weight.shape
    return linear_heads_cost(T, H, inputs, rows // H, D - inputs, call.weight.nbytes, number_bytes)


def _add_low_rank(call: Any) -> Cost:
    (T, inputs), outputs = call.x.shape, call.result.shape[1]
    parts = [(len(rows), change.down.shape[0]) for rows, change in call.parts]
    residual, number_bytes = call.residual is not None, call.x.itemsize
    return low_rank_cost(
        T, inputs, outputs, parts, activation=call.activation, residual=residual, number_bytes=number_bytes
    )


def _layer_norm(call: Any) -> Cost:
    T, E = call.result.shape
    gain, bias = call.weight.data is not None, call.weight.bias is not None
    return layer_norm_cost(T, E, gain=gain, bias=bias, number_bytes=call.result.itemsize)


def _rms_norm(call: Any) -> Cost:
    width = call.result.shape[-1]
    affine, residual = call.weight.data is not None, call.residual is not None
    rows, gains = call.result.size // width, call.weight.data.size // width if affine else 0
    number_bytes = call.result.itemsize
    return rms_norm_cost(rows, width, affine=affine, residual=residual, gains=gains, number_bytes=number_bytes)


def _rotary(call: Any) -> Cost:
    (T, H, D), rotation = call.q.shape, call.rotation
    scaled, stretched = rotation.scale != 1, rotation.stretch is not None
    (_, K, key_dim), number_bytes = call.k.shape, call.q.itemsize
    sizes: dict[str, int] = {"number_bytes": number_bytes, "row": H * D + K * key_dim}
    return rotary_cost(T, H + K, D, rotation.pairs, scaled=scaled, stretched=stretched, **sizes)


def _glu(call: Any) -> Cost:
    T, F = call.result.shape
    return glu_cost(T, F, call.activation, call.result.itemsize, alone=call.alone)


def _gate(call: Any) -> Cost:
    T, F = call.result.shape
    return gate_cost(T, F, call.logits.shape[1], call.result.itemsize)


def _multiply(call: Any) -> Cost:
    T, F = call.result.shape
    factors = 0 if call.factor is None else call.factor.shape[0]
    return multiply_cost(T, F, by_others=call.others is not None, factors=factors, number_bytes=call.result.itemsize)


def _route(call: Any) -> Cost:
    T, X = call.logits.shape
    weights = {"biased": call.bias is not None, "by_factors": call.factors is not None}
    return route_cost(T, X, call.k, normalised=call.normalised, spec=call.spec, **weights)


def _linear_experts(call: Any) -> Cost:
    experts, outputs, inputs = call.weight.shape
    expert_bytes, number_bytes = call.weight.nbytes // experts, call.result.itemsize
    rows, bias = len(call.x), call.weight.bias is not None
    return linear_experts_cost(rows, inputs, outputs, expert_bytes, call.routing.used, number_bytes, bias=bias)


def _combine(call: Any) -> Cost:
    (T, k), E = call.routing.weights.shape, call.result.shape[1]
    return combine_cost(T, E, k, residual=call.residual is not None, number_bytes=call.result.itemsize)


def _convolve(call: Any) -> Cost:
    T, C = call.result.shape
    return convolution_cost(
        T,
        C,
        call.weight.shape[0] // C,
        len(call.batch.spans),
        bias=call.weight.bias is not None,
        gated=call.gated,
        activation=call.activation,
        number_bytes=call.result.itemsize,
    )


def _unfold(call: Any) -> Cost:
    (R, E), sizes = call.x.shape, {"number_bytes": call.x.itemsize, "result_bytes": call.result.itemsize}
    return unfold_cost(R, E, call.width, stride=call.stride, **sizes)


def _delta_rule(call: Any) -> Cost:
    (T, width), V, (K, dk) = call.result.shape, call.weight.shape[0], call.keys
    return delta_rule_cost(T, K, V, dk, width // V, len(call.batch.spans), call.result.itemsize)


def _selective_scan(call: Any) -> Cost:
    (T, width), H = call.result.shape, call.steps.shape[1]
    G, N = call.groups
    return selective_scan_cost(T, H, width // H, G, N, len(call.batch.spans), call.result.itemsize)


def _store_kv(call: Any) -> Cost:
    (T, K, D), V, memory = call.k.shape, call.v.shape[2], call.backend.memory
    if call.cache.value_dim:  # k and v become one vector
        return kv_cost(T, K, D, memory.position_bytes(K, D + V, V), call.k.itemsize, V)
    return kv_cost(T, K, D, memory.position_bytes(K, D), call.k.itemsize)


def _attend(call: Any) -> Cost:
    _, H, D = call.q.shape
    batch = call.batch.over_sources if call.spec.cross else call.batch
    V = call.cache.value_dim
    position_bytes = call.backend.memory.position_bytes(call.cache.heads, D, V)
    return attention_cost(batch, H, D, position_bytes, call.spec, call.q.itemsize, V)


def _take_rows(call: Any) -> Cost:
    rows, width = call.result.shape
    return embed_cost(rows, width, call.result.itemsize * width, 0, call.result.itemsize)


def _scale_logits(call: Any) -> Cost:
    R, V = call.result.shape
    return scale_logits_cost(R, V, scaled=call.scale != 1, capped=call.cap is not None)


def _reduce(call: Any) -> Cost:
    return reduce_cost(call.result.size, call.backend.ranks, call.result.itemsize)


COSTS: dict[str, Callable[[Any], Cost]] = {
    "embed": _embed,
    "linear": _linear,
    "linear_heads": _linear_heads,
    "add_low_rank": _add_low_rank,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "glu": _glu,
    "gate": _gate,
    "multiply": _multiply,
    "route": _route,
    "linear_experts": _linear_experts,
    "combine": _combine,
    "convolve": _convolve,
    "unfold": _unfold,
    "delta_rule": _delta_rule,
    "selective_scan": _selective_scan,
    "store_kv": _store_kv,
    "attend": _attend,
    "take_rows": _take_rows,
    "scale_logits": _scale_logits,
    "reduce": _reduce,
}
"""Operation -> the cost of a call, whose fields are the operation's arguments by name, its `weight` or table, its
`result`, and the `backend` that ran it. An operation that is missing here fails rather than going uncounted."""
