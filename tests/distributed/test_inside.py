"""A look inside a model on several ranks: attention maps, profiles, adapters of single requests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm import Engine
from minillm.config import read_config
from minillm.engine.inspect import masked_attention_maps
from minillm.errors import RankError
from minillm.measure.accounting.hardware import CHIPS
from minillm.measure.profiling import profile
from minillm.models import family_of
from minillm.models.building import parameters_of
from minillm.parallel import Parallel

from ..adapters import write_adapter
from ..families import GOLDEN_CASES
from ..tiny import write_checkpoint
from .ranks import DEGREES, NAMES, on_all_degrees, on_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = "A list of colors: red, orange, yellow, green, blue,"
PROMPT = [5, 9, 17, 33, 4, 60, 21]


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("parallel", DEGREES, ids=NAMES)
def test_attention_maps_have_the_heads_of_all_ranks(parallel: Parallel) -> None:
    def run(engine: Engine) -> Any:
        before = engine.generate(TEXT, max_new_tokens=4).token_ids
        maps = [masked_attention_maps(engine.runner, PROMPT * 20, layer) for layer in (0, 5)]
        last = engine.attention(TEXT * 12), engine.attention(TEXT, layers=[4, 1])
        return maps, last, before == engine.generate(TEXT, max_new_tokens=4).token_ids

    ours = on_ranks(parallel, run).result
    theirs = run(Engine(backend="numpy", cache_bytes=1 << 24))
    for (one, masked), (other, expected) in zip(ours[0], theirs[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        np.testing.assert_array_equal(masked, expected)
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert one.shape == other.shape and np.ptp(other[:, 0] - other[:, 1]) > 0.01  # heads that differ
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert ours[2] and theirs[2]


WINDOWED = [case for case in GOLDEN_CASES if case[0] in ("gemma2", "mistral")][:2]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", DEGREES, ids=NAMES)
@pytest.mark.parametrize(("family", "name"), WINDOWED)
def test_masks_of_windows_come_from_the_ranks_that_have_the_layer(family: str, name: str, parallel: Parallel) -> None:
    folder = GOLDEN / family / name.replace(" ", "-")

    def run(engine: Engine) -> Any:
        layers = range(engine.config.num_layers)
        return [masked_attention_maps(engine.runner, PROMPT * 3, layer) for layer in layers]

    ours, theirs = on_ranks(parallel, run, folder).result, run(Engine(folder, backend="numpy", cache_bytes=1 << 24))
    for (one, masked), (other, expected) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        np.testing.assert_array_equal(masked, expected)


# --- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", ["cpu", "numpy"])
@pytest.mark.parametrize("parallel", DEGREES[:2], ids=NAMES[:2])
def test_a_profile_is_of_rank_0_and_shows_its_all_reduces(parallel: Parallel, backend: str) -> None:
    def run(engine: Engine) -> Any:
        found = profile(engine, [PROMPT] * 2, hardware=CHIPS["a100"], max_new_tokens=4, eos_token_id=())
        return found, engine.generate(TEXT, max_new_tokens=4).text

    found, text = on_ranks(parallel, run, backend=backend, threads=1).result
    calls = {(one.place, one.name): one.calls for one in found.phases["decode"].operations}
    layers = 6 // parallel.pipeline
    assert calls["layers", "linear self_attn.qkv"] == layers * 3
    assert calls.get(("layers", "reduce"), 0) == (2 * layers * 3 if parallel.tensor > 1 else 0)
    assert all(one.seconds >= 0 for phase in found.phases.values() for one in phase.operations)
    assert text == Engine(backend="numpy", cache_bytes=1 << 24).generate(TEXT, max_new_tokens=4).text


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["cpu", "numpy"])
@pytest.mark.parametrize("parallel", DEGREES, ids=NAMES)
def test_adapters_of_single_requests(parallel: Parallel, backend: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "base", seed=3)
    adapters = {name: write_adapter(tmp_path / name, seed=i, r=i + 2) for i, name in enumerate(("one", "two"))}

    def run(engine: Engine) -> Any:
        fields: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": []}
        requests = [
            request
            for i, name in enumerate(("one", None, "two", "one"))
            for request in engine.requests([PROMPT[i:]], lora=name, **fields)
        ]
        together = [g.token_ids for g in engine.run(requests)]
        return together, engine.generate(PROMPT, lora="two", num_beams=3, **fields).token_ids, [
            engine.forward(PROMPT, lora=name) for name in ("one", "two", None)
        ]  # fmt: skip

    ours = on_ranks(parallel, run, folder, adapters=adapters, backend=backend).result
    theirs = run(Engine(folder, backend="numpy", adapters=adapters, cache_bytes=1 << 24))
    assert ours[:2] == theirs[:2]
    for one, other in zip(ours[2], theirs[2], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())
    assert np.abs(theirs[2][0] - theirs[2][1]).max() > 0.1  # the adapters change something


def write_adapter_of_all(folder: Path, model: Path) -> Path:
    """An adapter of every projection of a model, and of its LM head if that is its own."""
    config = family_of(raw := read_config(model)).read_config(raw)
    family, rng, tensors, targets = family_of(raw), np.random.default_rng(7), {}, set()
    for name, module in parameters_of(family.build, config).items():
        is_head = name == family.NAMES.head.removesuffix(".weight") and not config.tied_head
        if (module.role == "projection" and not module.is_expert) or is_head:
            where = f"base_model.model.{'lm_head' if is_head else name}"
            tensors[f"{where}.lora_A.weight"] = rng.normal(0, 0.2, (3, module.inputs)).astype(np.float32)
            tensors[f"{where}.lora_B.weight"] = rng.normal(0, 0.2, (module.outputs, 3)).astype(np.float32)
            targets.add(where.rpartition(".")[2])
    raw_adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 3, "bias": "none"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(raw_adapter | {"target_modules": sorted(targets)}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


ONE_OF_EACH = list({family: (family, name) for family, name in reversed(GOLDEN_CASES)}.values())


LAYOUTS = ("opt", "llama", "gpt2", "gpt_neox", "bloom", "phi3", "starcoder2", "mixtral", "deepseek_v2", "lfm2")
LAYOUTS += ("qwen3_5_text", "gemma3_text", "gpt_oss", "granitemoehybrid", "falcon_h1")
"""Families of which each has its own way of storing what an adapter changes; the others have one of these"""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "parallel"), on_all_degrees(ONE_OF_EACH, LAYOUTS))
def test_adapters_of_every_family(family: str, name: str, parallel: Parallel, tmp_path: Path) -> None:
    """Fused projections, blocks, rows head by head, transposed matrices, shared key and value heads."""
    folder = GOLDEN / family / name.replace(" ", "-")
    config = family_of(raw := read_config(folder)).read_config(raw)
    staged = parallel.pipeline > 1 and (config.num_layers < parallel.pipeline or config.per_layer_width)
    if config.num_heads % parallel.tensor or staged:
        pytest.skip("it cannot be shared")
    adapters = {"all": write_adapter_of_all(tmp_path / "all", folder)}

    def run(engine: Engine) -> Any:
        return engine.forward(PROMPT, lora="all"), engine.forward(PROMPT)

    changed, plain = on_ranks(parallel, run, folder, adapters=adapters).result
    expected, expected_plain = run(Engine(folder, backend="numpy", adapters=adapters, cache_bytes=1 << 24))
    np.testing.assert_allclose(changed, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(plain, expected_plain, atol=1e-5 * np.abs(expected_plain).max())
    assert np.abs(expected - expected_plain).max() > 1e-3 * np.abs(expected).max()


def test_an_adapter_that_differs_on_a_rank_is_named(tmp_path: Path) -> None:
    from minillm.distributed.threads import run_ranks

    folder = write_checkpoint(tmp_path / "base", seed=3)
    for rank in range(2):
        write_adapter(tmp_path / str(rank), seed=rank)
    with pytest.raises(RankError, match=r"rank 1 has adapter 1 [0-9a-f]+, rank 0 has [0-9a-f]+"):
        run_ranks(
            2,
            lambda c: Engine(
                folder, backend="numpy", adapters={"a": tmp_path / str(c.rank)}, parallel=Parallel(tensor=2),
                communicator=c,
            ),
        )  # fmt: skip
