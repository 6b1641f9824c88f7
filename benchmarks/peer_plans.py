"""What `against_peers.py` compares: engines and formats, tasks, and which engines are in memory together."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minillm.accounting import parameter_count, position_parameters
from minillm.models.opt import OPTConfig

PACKAGES: dict[str, tuple[str, ...]] = {
    "minillm-numpy": (),
    "minillm-numba": ("numba",),
    "transformers": ("torch", "transformers"),
    "ctranslate2": ("ctranslate2", "torch", "transformers"),
    "llama.cpp": ("llama_cpp", "gguf"),
}
"""Engine -> what must be installed; CTranslate2's converter reads a checkpoint through torch and transformers."""

CASES = ("decode", "batch", "prefill", "context", "cold", "memory", "logits")
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
MATRIX_BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "int8": 8.5, "int4": 4.5}
"""Of a weight in a matrix, a float16 scale for each 32 included."""
OVERHEAD = 400 << 20
"""Bytes that a process takes beside the weights, roughly."""


class Plan(NamedTuple):
    """An engine with its weights in a format."""

    engine: str
    form: str
    """As minillm calls it, so that counterparts have the same one"""
    label: str
    """As the engine calls it"""

    @property
    def name(self) -> str:
        """As the tables have it."""
        return f"{self.engine} {self.label}"

    @property
    def ours(self) -> bool:
        """It is minillm."""
        return self.engine.startswith("minillm-")

    @property
    def slow(self) -> bool:
        """NumPy, where it converts all weights anew for each product."""
        return self.engine == "minillm-numpy" and self.form != "float32"


PLANS = tuple(
    Plan(*words)
    for words in (
        ("minillm-numpy", "float32", "float32"),
        ("minillm-numba", "float32", "float32"),
        ("llama.cpp", "float32", "f32"),
        ("ctranslate2", "float32", "float32"),
        ("transformers", "float32", "fp32"),
        ("minillm-numba", "float16", "float16"),
        ("llama.cpp", "float16", "f16"),
        ("minillm-numba", "bfloat16", "bfloat16"),
        ("llama.cpp", "bfloat16", "bf16"),
        ("transformers", "bfloat16", "bf16"),
        ("minillm-numpy", "float16", "float16"),
        ("minillm-numpy", "bfloat16", "bfloat16"),
        ("minillm-numba", "int8", "int8"),
        ("llama.cpp", "int8", "Q8_0"),
        ("ctranslate2", "int8", "int8_float32"),
        ("minillm-numpy", "int8", "int8"),
        ("minillm-numba", "int4", "int4"),
        ("llama.cpp", "int4", "Q4_0"),
        ("minillm-numpy", "int4", "int4"),
    )
)
"""In the order of their turns: counterparts side by side."""


class Task(NamedTuple):
    """One thing that is measured."""

    name: str
    batch: int
    prompt: int
    new_tokens: int


def tasks(case: str, prefill: int, new_tokens: int) -> tuple[Task, ...]:
    """What is timed in a case, one after the other in each turn."""
    if case == "decode":
        return (Task("decode, batch 1", 1, 32, new_tokens),)
    if case == "batch":
        return (Task("decode, batch 8", 8, 32, new_tokens),)
    if case == "prefill":
        return (Task(f"prefill of {prefill}", 1, prefill, 1),)
    if case == "context":
        return tuple(Task(context_name(c), 1, c - new_tokens // 2, new_tokens) for c in CONTEXTS)
    return ()


CONTEXTS = (100, 2000)
"""Tokens before those in the middle of a burst."""


def context_name(context: int) -> str:
    """The task of decoding at a context."""
    return f"decode, context {context}"


def takes_part(case: str, plan: Plan) -> bool:
    """Whether a case measures an engine and format."""
    if case == "context":
        return plan.ours and not plan.slow
    if case == "cold":
        return plan.form == "float32" and (plan.ours or plan.engine == "ctranslate2")
    if case == "memory":
        return plan.ours
    return case == "decode" or not plan.slow


def weight_bytes(plan: Plan, config: OPTConfig, gguf: Mapping[str, int]) -> int:
    """Bytes of the weights that one token needs: all but the position table.

    Args:
        plan: an engine and format
        config: the model's shape
        gguf: the same of llama.cpp's files, by label
    """
    if plan.engine == "llama.cpp":
        return gguf[plan.label]
    vocabulary = config.vocab_size * config.embedding_size
    E = config.hidden_size
    projections = config.num_layers * (4 * E * E + 2 * E * config.intermediate_size)
    vectors = parameter_count(config) - position_parameters(config) - vocabulary - projections
    table_form = "int8" if plan.form == "int4" else plan.form
    bits = projections * MATRIX_BITS[plan.form] + vocabulary * MATRIX_BITS[table_form]
    return round(bits / 8) + 4 * vectors


def position_bytes(config: OPTConfig) -> int:
    """Bytes of minillm's cache that decoding reads for each position before it, in float32."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4


def grouped(plans: Sequence[Plan], sizes: Mapping[Plan, int], limit: int) -> list[list[Plan]]:
    """Engines that are loaded together: all, or else those of a width in bits, or else some peers and ours beside them.

    Args:
        plans: in the order of their turns
        sizes: bytes of weights
        limit: bytes that a group may take; a single peer is measured even if it takes more
    """

    def taken(group: Sequence[Plan]) -> int:
        return sum(sizes[plan] + OVERHEAD for plan in group)

    groups: list[list[Plan]] = []
    for bits in dict.fromkeys(BITS[plan.form] for plan in plans):
        same = [plan for plan in plans if BITS[plan.form] == bits]
        ours = [plan for plan in same if plan.ours]
        parts: list[list[Plan]] = [[]]
        for peer in (plan for plan in same if not plan.ours):
            if parts[-1] and taken([*ours, *parts[-1], peer]) > limit:
                parts.append([])
            parts[-1].append(peer)
        groups += [[plan for plan in same if plan.ours or plan in part] for part in parts]
    merged = groups[-1:]
    for group in reversed(groups[:-1]):
        together = [plan for plan in plans if plan in group or plan in merged[0]]
        if taken(together) <= limit:
            merged[0] = together
        else:
            merged.insert(0, group)
    return merged
