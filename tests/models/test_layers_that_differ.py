"""Layers of other shapes, layers that read another's keys and values, values made of keys: Gemma 4's attention.

The family here is what transformers' Gemma 4 is without embeddings and scalars of single layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.operations import Backend
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.cache import Concurrency
from minillm.layers.attention import HeadNorms
from minillm.layers.block import Sandwich
from minillm.layers.embedding import Embedding, LMHead
from minillm.layers.shared_attention import SharedAttention
from minillm.models import gemma3_text
from minillm.models.base import Model
from minillm.models.building import build_from, random_tensors, tensor_shapes
from minillm.models.decoder import Decoder
from minillm.models.gemma2 import GemmaConfig
from minillm.models.parameters import Weights
from minillm.reference.attention import AttentionSpec
from minillm.runner.runner import Runner

from ..tiny import Held, runner_of
from . import test_gemma3_text

L, W = 6, 9
KINDS = ["sliding_attention", "full_attention"] * 3
RAW: dict[str, Any] = test_gemma3_text.CONFIG | {
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": W,
    "layer_types": KINDS,
}
LINE = np.random.default_rng(3).integers(0, 96, 50).tolist()
SWITCHES: list[dict[str, Any]] = [
    {"shared": 0, "keys_are_values": False},
    {"shared": 0, "keys_are_values": True},
    {"shared": 2, "keys_are_values": False},
    {"shared": 3, "keys_are_values": True},
]


@dataclass(frozen=True, kw_only=True)
class Config(GemmaConfig):
    """Gemma 3's fields, and whether the values of layers without a window are their keys."""

    keys_are_values: bool


def config_with(*, shared: int, keys_are_values: bool) -> Config:
    """The last `shared` layers read the keys and values of the last layer of their kind before them."""
    config, own = gemma3_text.read_config(RAW), L - shared
    rotaries = tuple(
        replace(rotary, frequencies=proportional(16, 1e6, 0.25) if i % 2 else proportional(8, 1e4, 1.0))
        for i, rotary in enumerate(config.rotaries)
    )
    changed = {
        "kv_shapes": ((2, 8), (1 if keys_are_values else 2, 16)) * 3,
        "kv_sources": tuple(i if i < own else own - 2 + (own + i) % 2 for i in range(L)),
        "rotaries": rotaries,
        "mixed_layers": True,
    }
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    return Config(**given | changed, keys_are_values=keys_are_values)


def proportional(width: int, base: float, share: float) -> tuple[float, ...]:
    """Angles of the whole head's width, of which the first share turn."""
    turning = int(share * width // 2)
    turns = 1 / base ** (np.arange(0, 2 * turning, 2) / width)
    return (*turns.astype(np.float32).tolist(), *[0.0] * (width // 2 - turning))


def build(config: Config, weights: Weights, backend: Backend) -> Decoder:
    E, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    tokens = weights.table("embed_tokens", V, E, "vocabulary")
    layers = []
    for i in range(L):
        own, (K, D), H = weights.at(f"layers.{i}"), config.kv_shape(i), config.num_heads
        reads, merged = config.kv_source(i) != i, config.keys_are_values and i % 2 == 1
        rows = {"self_attn.q_proj": H * D} | ({} if reads else {"self_attn.k_proj": K * D})
        rows |= {} if reads or merged else {"self_attn.v_proj": K * D}
        norms = [own.norm(f"self_attn.{name}_norm", D) for name in ("q" if reads else "qk")]
        attention = own.attention(
            config,
            i,
            AttentionSpec(1.0, window=config.windows[i]),
            qkv=own.linear("self_attn.qkv", rows, inputs=E, split="outputs", units=(H, K, K)[: len(rows)]),
            out=own.linear("self_attn.o_proj", E, inputs=H * D, split="inputs"),
            kind=SharedAttention,
            rotation=config.rotaries[i].rotation(backend),
            head_norms=HeadNorms(norms[0], norms[-1], config.epsilon),
            only_reads=reads,
            keys_are_values=merged,
            value_norm=Weight("value norm", None),
        )
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        before, after, mlp_before, mlp_after = (own.rms_norm(f"{name}_layernorm", E, config.epsilon) for name in names)
        mlp = own.gated_mlp(E, F, config.activation)
        layers.append(Sandwich(before, attention, after, mlp_before, mlp, mlp_after))
    norm = weights.rms_norm("norm", E, config.epsilon)
    embedding = Embedding(tokens, scale=E**0.5)
    return Decoder(config.sharded(weights.ranks), embedding, tuple(layers), norm, LMHead(tokens))


def model_with(backend: Backend, config: Config, tensors: Mapping[str, Any] | None = None) -> Model:
    if tensors is None:
        tensors = random_tensors(tensor_shapes(build, config), 2, 0.2, backend)
    return build_from(build, config, tensors, backend)


def all_logits(runner: Runner, chunk: int) -> np.ndarray:
    sequence, rows = TokenSequence(list(LINE)), []
    while sequence.pending:
        count = min(chunk, sequence.pending)
        rows.append(runner.forward([sequence], [count], rows=range(count)).logits.copy())
    return np.concatenate(rows)


def test_the_groups_are_those_of_equal_shape_and_window() -> None:
    config = config_with(shared=2, keys_are_values=True)
    assert [(g.layers, g.num_kv_heads, g.head_dim, g.window) for g in config.kv_groups] == [
        ((1, 3), 1, 16, None),
        ((0, 2), 2, 8, W),
    ]
    assert [config.kv_group(i) for i in range(L)] == [1, 0] * 3
    assert [config.kv_source(i) for i in range(L)] == [0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize(
    "switches", [*(pytest.param(these, marks=pytest.mark.slow) for these in SWITCHES[:3]), SWITCHES[3]]
)
def test_cached_chunked_and_on_the_kernels_the_same(switches: dict[str, Any]) -> None:
    config = config_with(**switches)
    expected = all_logits(runner_of(model_with(NumpyBackend(), config), page_size=4), 50)
    for backend in (NumpyBackend(), CpuBackend()):
        for concurrency in (None, Concurrency(2, 8)):
            model = model_with(backend, config)
            runner = runner_of(model, page_size=4, backend=backend, concurrency=concurrency)
            for chunk in (1, 7):
                np.testing.assert_allclose(all_logits(runner, chunk), expected, rtol=0, atol=1e-4)
            if backend.name == "cpu":
                assert all(step.complete for step in backend.memory._steps[runner].values())


@pytest.mark.longer
def test_a_fork_copies_the_pages_of_all_shapes() -> None:
    config = config_with(shared=2, keys_are_values=True)
    for concurrency in (None, Concurrency(2, 8)):
        runner = runner_of(model_with(NumpyBackend(), config), page_size=4, concurrency=concurrency)
        first = TokenSequence(LINE[:30])
        runner.prefill(first)
        second = runner.cache.fork(first)
        for sequence, token in ((first, 5), (second, 6), (first, 7), (second, 8)):
            sequence.token_ids.append(token)
            logits = runner.prefill(sequence).logits[0]
            apart = runner_of(runner.model, page_size=64)
            expected = apart.prefill(TokenSequence(list(sequence.token_ids))).logits[0]
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.reference
def test_the_logits_are_transformers(switches: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="needs the reference extra")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    config = config_with(**switches)
    theirs = transformers.Gemma4ForCausalLM(
        transformers.Gemma4TextConfig(
            **{name: RAW[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
            **{name: RAW[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "layer_types")},
            sliding_window=W,
            max_position_embeddings=64,
            global_head_dim=16,
            num_global_key_value_heads=1,
            attention_k_eq_v=switches["keys_are_values"],
            num_kv_shared_layers=switches["shared"],
            hidden_size_per_layer_input=0,
            rms_norm_eps=config.epsilon,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.5 * (parameter.ndim == 1), 0.3)
        # with all hidden states: transformers 5.24 fails to leave out rows of layers that share, without embeddings
        expected = theirs(torch.tensor([LINE]), output_hidden_states=True).logits[0].numpy()
    tensors = {name: tensor.detach().numpy() for name, tensor in theirs.model.named_parameters()}
    held = {name: Held(array) for name, array in tensors.items()}
    runner = runner_of(model_with(NumpyBackend(), config, held), page_size=4, concurrency=Concurrency(1, 8))
    np.testing.assert_allclose(all_logits(runner, 7), expected, rtol=0, atol=1e-4)
