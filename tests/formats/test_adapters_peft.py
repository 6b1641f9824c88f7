"""LoRA adapters against PEFT as it runs: logits of the same folder, for every family."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")
peft = pytest.importorskip("peft", reason="needs the reference extra")

from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.batch import TokenSequence  # noqa: E402
from minillm.cache import PagedCache, new_cache  # noqa: E402
from minillm.errors import UnsupportedModelError  # noqa: E402
from minillm.formats.load_model import load_adapter, load_model  # noqa: E402
from minillm.formats.write_checkpoint import write_checkpoint  # noqa: E402
from minillm.models import FAMILIES  # noqa: E402
from minillm.runner.runner import Runner  # noqa: E402

from .. import huggingface  # noqa: E402
from ..families import CONFIGS, one_in  # noqa: E402
from ..tiny import logits_of, runner_of  # noqa: E402

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]

LINE = np.random.default_rng(3).integers(0, 96, 40).tolist()

TARGETS = {
    "opt": ["q_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "starcoder2": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
    "lfm2": ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"],
    "qwen3_5_text": ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "up_proj"],
}
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MIXTURES = ["mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "glm4_moe", "dots1", "minimax_m2", "ernie4_5_moe"]
MIXTURES += ["qwen3_next", "qwen3_5_moe_text"]
TARGETS |= dict.fromkeys(MIXTURES, LLAMA[:4])
TARGETS["lfm2_moe"] = TARGETS["lfm2"]
LATENTS = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
TARGETS |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3", "mistral4"), LATENTS)
"""Experts are no modules of transformers 5: PEFT names them in target_parameters"""


class Pair:
    """A model in transformers, and its adapter in PEFT, both also in folders."""

    def __init__(self, raw: dict[str, Any], folder: Path, **fields: Any) -> None:
        self.base, self.adapter = folder / "base", folder / "adapter"
        huggingface.save(huggingface.build_model(raw, 5), self.base)
        model = huggingface.build_model(raw, 5)
        self.model = peft.get_peft_model(model, peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 3} | fields))
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_magnitude" in name:
                    parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
                elif "lora_" in name:
                    parameter.normal_(0, 0.2, generator=generator)
                elif parameter.requires_grad:  # modules_to_save, biases
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        self.model.eval()
        self.model.save_pretrained(self.adapter, **({"safe_serialization": False} if fields.get("r") == 5 else {}))

    def expected(self) -> np.ndarray:
        return huggingface.logits(self.model, LINE)

    def ours(self, base: Path | None = None, **formats: Any) -> np.ndarray:
        return logits_of(runner_of(load_model(base or self.base, NumpyBackend(**formats), adapter=self.adapter)), LINE)

    def without(self) -> np.ndarray:
        return logits_of(runner_of(load_model(self.base, NumpyBackend())), LINE)


def config_of(family: str) -> dict[str, Any]:
    return next(iter(CONFIGS[family].values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_logits_are_those_of_peft(family: str, tmp_path: Path) -> None:
    pair = Pair(config_of(family), tmp_path, target_modules=TARGETS.get(family, LLAMA), lora_alpha=7)
    np.testing.assert_allclose(pair.ours(), pair.expected(), rtol=0, atol=1e-4)
    assert np.abs(pair.without() - pair.expected()).max() > 0.1


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_matrices_of_experts_are_refused_by_name(family: str, tmp_path: Path) -> None:
    pair = Pair(config_of(family), tmp_path, target_modules=LLAMA)
    with pytest.raises(UnsupportedModelError, match=r"target_parameters is .* minillm runs LoRA without it"):
        pair.ours()


FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "rslora": ("llama", {"target_modules": LLAMA, "use_rslora": True, "r": 4}),
    "bin": ("llama", {"target_modules": LLAMA, "r": 5}),
    "dora": ("llama", {"target_modules": LLAMA, "use_dora": True}),
    "dora of transposed": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "use_dora": True, "fan_in_fan_out": True}),
    "dora by head": ("gpt_neox", {"target_modules": ["query_key_value"], "use_dora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": LLAMA,
            "rank_pattern": {r"layers\.1\.mlp\.up_proj": 6, "k_proj": 2},
            "alpha_pattern": {"v_proj": 30},
        },
    ),
    "regular expression": ("llama", {"target_modules": r".*\.1\.(self_attn\.[qv]|mlp\.up)_proj"}),
    "all linear": ("opt", {"target_modules": "all-linear"}),
    "layers": ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "a layer": ("gpt2", {"target_modules": ["c_attn"], "layers_to_transform": 0, "layers_pattern": "h"}),
    "excluded": ("llama", {"target_modules": LLAMA, "exclude_modules": ["k_proj"]}),
    "all biases": ("opt", {"target_modules": ["q_proj", "fc1"], "bias": "all"}),
    "their biases": ("gpt2", {"target_modules": ["c_attn"], "bias": "lora_only"}),
    "biases by head": ("gpt_neox", {"target_modules": ["query_key_value"], "bias": "lora_only"}),
    "tied head": ("gpt2", {"target_modules": ["c_attn", "lm_head"]}),
    "untied head": ("gpt_neox", {"target_modules": ["dense", "lm_head"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied embedding": ("opt", {"target_modules": ["embed_tokens", "q_proj"]}),
    "saved head": ("opt", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "saved modules": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "norm"]}),
    "saved transposed": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["c_fc"]}),
}


@pytest.fixture(params=FIELDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    family, fields = FIELDS[request.param]
    return Pair(config_of(family), tmp_path, **fields)


def test_every_field_does_what_it_does_in_peft(pair: Pair) -> None:
    np.testing.assert_allclose(pair.ours(), pair.expected(), rtol=0, atol=1e-4)
    assert np.abs(pair.without() - pair.expected()).max() > 0.01


@pytest.mark.parametrize("name", ["dora by head", "dora of transposed", "saved transposed", "biases by head"])
def test_a_quantised_checkpoint_has_its_own_order_of_rows(name: str, tmp_path: Path) -> None:
    """The adapter changes a quantised model's logits as it changes those of the base; rows astray would not."""
    family, fields = FIELDS[name]
    pair = Pair(config_of(family), tmp_path, **fields)
    write_checkpoint(pair.base, tmp_path / "int8", "int8", None)
    plain = logits_of(runner_of(load_model(tmp_path / "int8", NumpyBackend(weights="auto"))), LINE)
    change, expected = pair.ours(tmp_path / "int8", weights="auto") - plain, pair.expected() - pair.without()
    assert np.linalg.norm(change - expected) < 0.2 * np.linalg.norm(expected)


def apart(pair: Pair, name: str | None) -> np.ndarray:
    """The logits of a line beside two others in one batch, of which one has the adapter and one has none."""
    backend = NumpyBackend()
    model = load_model(pair.base, backend)
    cache = new_cache(PagedCache, model.config, backend, 16, 16)
    runner = Runner(model, backend, cache, adapters={"it": load_adapter(pair.adapter, model.config, backend)})
    lines = [TokenSequence(LINE[:9], adapter="it"), TokenSequence(list(LINE), adapter=name), TokenSequence(LINE[3:11])]
    rows = range(9, 9 + len(LINE))
    return runner.forward(lines, [line.pending for line in lines], rows).logits.copy()


@pytest.mark.parametrize("family", one_in(4, FAMILIES))
def test_single_requests_get_the_logits_of_peft(family: str, tmp_path: Path) -> None:
    """What merges into a family's weights is added to its products: test_lora.py holds each against the other."""
    pair = Pair(config_of(family), tmp_path, target_modules=TARGETS.get(family, LLAMA), lora_alpha=7)
    np.testing.assert_allclose(apart(pair, "it"), pair.expected(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(apart(pair, None), pair.without(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["rslora", "patterns", "regular expression", "layers", "untied head"])
def test_fields_do_the_same_for_single_requests(name: str, tmp_path: Path) -> None:
    family, fields = FIELDS[name]
    pair = Pair(config_of(family), tmp_path, **fields)
    pair.model.save_pretrained(pair.adapter, save_embedding_layers=False)  # else with a copy of the head
    np.testing.assert_allclose(apart(pair, "it"), pair.expected(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(apart(pair, None), pair.without(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["dora", "all biases", "tied head", "embedding", "saved modules"])
def test_what_can_only_be_merged_is_refused_for_single_requests(name: str, tmp_path: Path) -> None:
    family, fields = FIELDS[name]
    pair = Pair(config_of(family), tmp_path, **fields)
    with pytest.raises(UnsupportedModelError, match="cannot be done for single requests: merge it"):
        apart(pair, "it")
