"""GGUF files whose entries contradict one another or their tensors, and what is expected of them."""

from pathlib import Path
from random import Random
from typing import Any

from gguf import GGMLQuantizationType as Type

from minillm import Engine

from ..gguf_files import LLAMA, arrays, byte_tokens, write_llama
from .outcome import attempt, expect

ROWS = LLAMA["vocab_size"]
VALUES = arrays(LLAMA)
IDS = ("bos", "eos", "padding", "unknown", "eot", "eom")
"""Keys `tokenizer.ggml.<name>_token_id`"""
ENTRIES: dict[str, list[Any]] = {
    "vocab_size": [ROWS - 1, ROWS + 1, 10**6],
    "context_length": [1, 8, 2**31],
    "attention__head_count_kv": [0, 1, 4, 3],
    "attention__key_length": [8, 16, 32],
    "attention__value_length": [8, 16],
    "rope__dimension_count": [8, 16, 32, 7],
    "rope__freq_base": [0.0, 500000.0],
    "rope__scaling__type": ["none", "linear", "yarn", "longrope", "odd"],
    "rope__scaling__factor": [0.0, 2.0, -1.0],
    "rope__scale_linear": [2.0, 4.0],
    "rope__scaling__original_context_length": [0, 16, 128],
    "rope__scaling__attn_factor": [0.5, 1.0],
    "expert_count": [0, 4],
    "expert_used_count": [0, 2],
    "block_count": [1, 3],
    "feed_forward_length": [95, 96],
    "embedding_length": [32, 64],
    "logit_scale": [0.5, 1.0],
    "pooling_type": [0, 1, 4, 9],
    "tensor_data_layout": ["odd"],
}
"""Entries of the architecture, "__" for a dot"""
TOKENIZER: dict[str, list[Any]] = {
    "add_bos_token": [True, False],
    "add_eos_token": [True, False],
    "add_space_prefix": [True, False],
    "pre": ["gpt-2", "llama-bpe", "qwen2", "default", "odd"],
    "model": ["gpt2", "gpt2", "gpt2", "llama", "bert", "odd"],
    "merges": [["a b"], ["Ġ a", "a b"], None],
    "scores": [[0.0] * ROWS, [1.0]],
    "suppress_tokens": [[3, ROWS - 1], [ROWS], [-1]],
    "remove_extra_whitespaces": [True, False],
}
"""Entries of the tokenizer"""


def run(rng: Random, path: Path) -> None:
    """Write a file with 1 to 4 contradictions and use it."""
    _write(rng, path)
    engine = attempt(lambda: Engine(path, backend="numpy", threads=1, max_batch_size=2, cache_bytes=1 << 20))
    if engine is None:
        return
    with engine:
        rows, tokenizer = engine.config.vocab_size, engine.tokenizer
        for role in ("bos", "eos") if tokenizer is not None else ():
            token_id = getattr(tokenizer, f"{role}_token_id")
            expect(token_id is None or 0 <= token_id < rows, f"{role} is {token_id} of {rows} tokens")
        for prompt in ("ab <extra 3>", [3, 77, 12]) if tokenizer is not None else ([3, 77, 12],):
            result = attempt(lambda prompt=prompt: engine.generate(prompt, max_new_tokens=4))
            if result is not None:
                expect(all(0 <= i < rows for i in result.token_ids), f"{result.token_ids} of {rows} tokens")
        expect(not engine.busy, "the engine is busy after its last request")


def _write(rng: Random, path: Path) -> None:
    raw, entries, types = dict(LLAMA), {}, [Type.F32]
    tokenizer: dict[str, Any] = {"tokens": byte_tokens(ROWS), "merges": ["a b"]}
    tokenizer["tokens"][-1] = "ab"
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(7):
            case 0:
                tokenizer[f"{rng.choice(IDS)}_token_id"] = rng.choice([0, 1, 5, ROWS - 1, ROWS, 10**6, 2**32 - 1])
            case 1:
                tokenizer["token_type"] = [rng.randint(1, 6) for _ in range(rng.choice([ROWS, ROWS, ROWS - 1]))]
            case 2:
                tokenizer["tokens"] = byte_tokens(rng.choice([ROWS - 2, ROWS + 3]))
            case 3 | 4:
                name = rng.choice(list(TOKENIZER))
                tokenizer[name] = rng.choice(TOKENIZER[name])
            case 5:
                types = [Type.F32, rng.choice([Type.F16, Type.Q8_0])]
            case _:
                name = rng.choice(list(ENTRIES))
                entries[name] = rng.choice(ENTRIES[name])
    write_llama(path, raw, type_of=lambda name: rng.choice(types), values=VALUES, tokenizer=tokenizer, **entries)
