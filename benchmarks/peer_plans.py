"""The plan of `against_peers.py`: engines and formats, tasks, and the engines that are in memory together."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from minillm.config import ModelConfig
from minillm.measure.accounting import Storage, cache_bytes_per_token, looked_up, weights_bytes
from minillm.measure.accounting.memory import parts_held

PACKAGES: dict[str, tuple[str, ...]] = {
    "minillm-numpy": (),
    "minillm-cpu": (),
    "minillm-cpu-rounding": (),
    "transformers": ("torch", "transformers"),
    "ctranslate2": ("ctranslate2", "torch", "transformers"),
    "llama.cpp": ("llama_cpp", "gguf"),
    "ik_llama.cpp": ("ik_llama_cpp", "gguf"),
    "ik_llama.cpp-rtr": ("ik_llama_cpp", "gguf"),
    "onnxruntime": ("onnxruntime_genai", "onnx_ir", "torch", "transformers"),
    "openvino": ("openvino_genai",),
}
"""Engine -> packages that it needs; "minillm-cpu" needs a C compiler, also with activations rounded to bfloat16
("-rounding"). The converters of CTranslate2 and ONNX Runtime
read a checkpoint through torch and transformers."""
LLAMA_CPPS = ("llama.cpp", "ik_llama.cpp", "ik_llama.cpp-rtr")
"""llama.cpp and its fork, which read the same files; the last one has the rows of weights interleaved at load (-rtr)"""

CASES = ("decode", "batch", "prefill", "context", "cold", "memory", "logits", "perplexity")
MXFP4 = "mxfp4"
"""Experts in MXFP4, as gpt-oss is published, and all else in Q8_0: a GGUF file that minillm writes, for all engines"""
FILES = {MXFP4: "MXFP4", "q4_k_m": "Q4_K_M", "q6_k": "Q6_K", "iq4_xs": "IQ4_XS"}
"""Formats of which minillm and llama.cpp run one GGUF file -> what llama.cpp calls them; all but MXFP4 are written by
llama.cpp's own tool"""
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
BITS |= {MXFP4: 4, "q4_k_m": 4, "q6_k": 8, "iq4_xs": 4}
USUAL = tuple(form for form in BITS if form not in FILES)
"""Formats that are measured unless others are named"""
STAND_INS = {"opt": "GPT-2's architecture with the same matrices: GELU for ReLU"}
"""Family that llama.cpp does not support -> its substitute"""
ONNX_FAMILIES = ("llama", "qwen2")
"""Families that ONNX Runtime's model builder converts, of those in `peer_files.PUBLISHED`"""
CTRANSLATE2_FAMILIES = ("opt", "gpt2", "llama", "qwen2", "t5", "bart")
"""The same of CTranslate2's converter"""
OVERHEAD = 400 << 20
"""Approximate bytes of a process without the weights"""


class Plan(NamedTuple):
    """An engine with its weights in a format."""

    engine: str
    form: str
    """minillm's name of the format, the same for all counterparts"""
    label: str
    """The engine's own name of the format"""

    @property
    def name(self) -> str:
        """The name in the tables."""
        return f"{self.engine} {self.label}"

    @property
    def ours(self) -> bool:
        """True for minillm."""
        return self.engine.startswith("minillm-")

    @property
    def same_file(self) -> bool:
        """True for an engine that runs the user's own file as it is."""
        return self not in PLANS

    @property
    def of_a_file(self) -> bool:
        """True for a format of which minillm runs the GGUF file that `peer_files.py` wrote."""
        return self.form in FILES and not self.same_file

    @property
    def slow(self) -> bool:
        """True for NumPy with formats that it converts to float32 at each product."""
        return self.engine == "minillm-numpy" and self.form != "float32"


PLANS = tuple(
    Plan(*words)
    for words in (
        ("minillm-numpy", "float32", "float32"),
        ("minillm-cpu", "float32", "float32"),
        ("llama.cpp", "float32", "f32"),
        ("ik_llama.cpp", "float32", "f32"),
        ("ctranslate2", "float32", "float32"),
        ("transformers", "float32", "fp32"),
        ("onnxruntime", "float32", "fp32"),
        ("minillm-cpu", "float16", "float16"),
        ("llama.cpp", "float16", "f16"),
        ("ik_llama.cpp", "float16", "f16"),
        ("minillm-cpu", "bfloat16", "bfloat16"),
        ("minillm-cpu-rounding", "bfloat16", "bfloat16"),
        ("llama.cpp", "bfloat16", "bf16"),
        ("ik_llama.cpp", "bfloat16", "bf16"),
        ("transformers", "bfloat16", "bf16"),
        ("minillm-numpy", "float16", "float16"),
        ("minillm-numpy", "bfloat16", "bfloat16"),
        ("minillm-cpu", "int8", "int8"),
        ("llama.cpp", "int8", "Q8_0"),
        ("ik_llama.cpp", "int8", "Q8_0"),
        ("ik_llama.cpp-rtr", "int8", "Q8_0"),
        ("ctranslate2", "int8", "int8_float32"),
        ("minillm-numpy", "int8", "int8"),
        ("minillm-cpu", "int4", "int4"),
        ("llama.cpp", "int4", "Q4_0"),
        ("ik_llama.cpp", "int4", "Q4_0"),
        ("ik_llama.cpp-rtr", "int4", "Q4_0"),
        ("onnxruntime", "int4", "int4"),
        ("minillm-numpy", "int4", "int4"),
        *(
            (engine, form, label)
            for form, label in FILES.items()
            for engine in ("minillm-cpu", *LLAMA_CPPS, "minillm-numpy")
        ),
    )
)
"""In the order of their turns, with counterparts next to each other"""


class Task(NamedTuple):
    """A task to time."""

    name: str
    batch: int
    prompt: int
    new_tokens: int


def tasks(case: str, prefill: int, new_tokens: int) -> tuple[Task, ...]:
    """The tasks of a case, timed one after the other in each turn."""
    if case == "decode":
        return (Task("decode, batch 1", 1, 32, new_tokens),)
    if case == "batch":
        return tuple(Task(f"decode, batch {size}", size, 32, new_tokens) for size in (8, 32))
    if case == "prefill":
        return (Task(f"prefill of {prefill}", 1, prefill, 1),)
    if case == "context":
        return tuple(Task(context_name(c), 1, c - new_tokens // 2, new_tokens) for c in CONTEXTS)
    return ()


CONTEXTS = (100, 2000)
"""Context lengths in the middle of a burst"""


def context_name(context: int) -> str:
    """The name of the task of decoding at a context length."""
    return f"decode, context {context}"


def plans_of(gguf: Path | None) -> tuple[Plan, ...]:
    """The engines and formats that run a model: all, or those that read the user's own GGUF file.

    minillm and transformers dequantise the file and convert it to each format; minillm (dtype "auto") and llama.cpp
    also run it as it is, OpenVINO converts it to a form of its own. These stand under the format of the nearest
    number of bits, into which minillm then does not convert it.
    """
    if gguf is None:
        return PLANS
    from minillm.formats.gguf.file import FILE_TYPES, read_gguf

    file = read_gguf(gguf)
    tensors = file.tensors.values()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.type.name] += math.prod(tensor.shape)
    bits = 8 * gguf.stat().st_size / sizes.total()
    form = next((form for form, most in (("int4", 6.5), ("int8", 10), ("float16", 20)) if bits < most), "float32")
    name = FILE_TYPES.get(file.metadata.get("general.file_type", -1), sizes.most_common(1)[0][0])
    label = f"{name}, the file"
    converted = [plan for plan in PLANS if plan.form in USUAL and (plan.ours or plan.engine == "transformers")]
    as_it_is = [Plan(engine, form, label) for engine in ("minillm-cpu", *LLAMA_CPPS, "openvino")]
    return (*(plan for plan in converted if (plan.engine, plan.form) != ("minillm-cpu", form)), *as_it_is)


def why_left_out(engine: str, family: str, gguf: Path | None) -> str:
    """Why an engine cannot run a model, in a few words; empty if it can."""
    if engine == "openvino" and gguf is None:
        return "without optimum-intel, which needs a hub, it reads GGUF files with a tokenizer alone"
    if engine in ("ctranslate2", "onnxruntime") and gguf is not None:
        return "it reads no GGUF files"
    if engine == "onnxruntime" and family not in ONNX_FAMILIES:
        return f"its model builder has no {family}"
    if engine.startswith("ik_llama.cpp") and family in ("opt", "gpt2"):
        return "its GPT-2 needs a head of its own and fails at an epsilon of 0"
    if engine == "ctranslate2" and family not in CTRANSLATE2_FAMILIES:
        return f"its converter has no {family}"
    return ""


def takes_part(case: str, plan: Plan) -> bool:
    """Whether a case measures an engine and format."""
    if case == "context":
        return plan.ours and not plan.slow
    if case == "cold":
        return plan.same_file or (plan.form == "float32" and (plan.ours or plan.engine == "ctranslate2"))
    if case == "memory":
        return (plan.ours and plan.form in USUAL) or plan.same_file
    if case in ("logits", "perplexity") and plan.engine == "openvino":
        return False
    return case == "decode" or not plan.slow


def weight_bytes(plan: Plan, config: ModelConfig, gguf: Mapping[str, int]) -> int:
    """Bytes of the weights that one token needs: all but the tables of which it reads one row, and other experts.

    Args:
        plan: an engine and format
        config: the model's shape
        gguf: the same of llama.cpp's files, and of the user's, by label
    """
    if plan.engine in LLAMA_CPPS or plan.same_file or plan.form in FILES:
        return gguf[plan.label]
    return weights_bytes(config, Storage(weights=plan.form)) - unread_bytes(plan, config)


def unread_bytes(plan: Plan, config: ModelConfig) -> int:
    """Bytes that a token does not need: experts that it does not choose, and tables of which it reads one row.

    Such tables are positions, and tokens if the head is not tied. Of a GGUF file none are counted.
    """
    if plan.form in FILES:
        return 0
    storage = Storage(weights=plan.form)
    experts = sum(part.bytes - part.bytes * part.active // part.parameters for part in parts_held(config, storage))
    return experts + looked_up(config, storage).bytes


def position_bytes(config: ModelConfig) -> int:
    """Bytes of minillm's float32 K/V cache per position."""
    return cache_bytes_per_token(config, Storage())


def grouped(plans: Sequence[Plan], sizes: Mapping[Plan, int], limit: int) -> list[list[Plan]]:
    """Groups of engines that are loaded together: all, or those of equal bits, or some peers with minillm.

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
