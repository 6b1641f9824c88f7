"""What is watched and changed inside each family against hooks on transformers' modules."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.decoding.hooks import join_watched  # noqa: E402
from minillm.formats.load_model import load_model  # noqa: E402
from minillm.layers.experts import ExpertMLP  # noqa: E402
from minillm.layers.mlp import MLP  # noqa: E402
from minillm.models.points import RECURRENT, operator_of  # noqa: E402
from minillm.runner.runner import Runner  # noqa: E402

from .. import huggingface, seq2seq  # noqa: E402
from ..families import CASES, CONFIGS, IDS, marks_of_further  # noqa: E402
from ..tiny import loop_of, request_for, runner_of  # noqa: E402

pytestmark = pytest.mark.reference

LINE = np.random.default_rng(3).integers(3, 96, 40).tolist()
SOURCE = np.random.default_rng(4).integers(3, 96, 30).tolist()

ALONE = (MLP, ExpertMLP)
"""Parts of Nemotron-H's layers without attention or Mamba-2"""
FIRST = [(family, next(iter(configs))) for family, configs in CONFIGS.items()]
# Names of transformers' modules, the first group being the layer's number: what each reads or returns.
OUTPUT_PROJECTION = (
    r"layers?\.(\d+)\..*?(?:self_attn|attn|conv|attention|self_attention|SelfAttention|mixer|mamba)\."
    r"(?:o_proj|out_proj|c_proj|dense|o)"
)
MLP_DOWN = r"layers?\.(\d+)\.(?:.*\.)?(?:down_proj|fc2|c_proj|dense_4h_to_h|wo|w2|shared_mlp\.output_linear)"


def load(folder: Path) -> Runner:
    return runner_of(load_model(folder, NumpyBackend()), pages=128, page_size=16)


def watched(runner: Runner, request: Any, watch: Any = "**", functions: Any = None) -> dict[str, np.ndarray]:
    """The rows of the points of a request that generates one token. In two chunks of the prompt."""
    loop = loop_of(target=runner, chunk=24)
    loop.add(replace(request, hooks=runner.hooks.read(watch, functions)))
    chunks = []
    while loop.busy:
        chunks += [event.watched for event in loop.step_or_raise() if event.watched is not None]
    return join_watched(chunks) or {}


def modules(model: Any, pattern: str) -> dict[int, Any]:
    """The modules whose names end as a pattern does, by layer."""
    found = re.compile(rf"(?:.*\.)?{pattern}")
    names = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Module)}
    matches = ((found.fullmatch(name.replace(".h.", ".layers.")), module) for name, module in names.items())
    return {int(match[1]): module for match, module in matches if match is not None and hasattr(module, "weight")}


def seen_by_modules(model: Any, call: Callable[[], Any], pattern: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """What the modules of a name read and return while a model runs, by layer."""
    seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def note(layer: int) -> Any:
        def hook(_: Any, inputs: Any, result: Any) -> None:
            seen[layer] = (
                inputs[0].reshape(-1, inputs[0].shape[-1]).numpy(),
                result.reshape(-1, result.shape[-1]).numpy(),
            )

        return hook

    handles = [module.register_forward_hook(note(layer)) for layer, module in modules(model, pattern).items()]
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def assert_close(ours: np.ndarray, theirs: Any, *, times: float = 1) -> None:
    expected = np.asarray(theirs).reshape(ours.shape)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * times * max(10, np.abs(expected).max()))


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of_further(case)) for case in CASES], ids=IDS)
def test_every_point_of_a_decoder(case: tuple[str, str], tmp_path: Path) -> None:
    family, name = case
    model = huggingface.build_model(CONFIGS[family][name], 5)
    huggingface.save(model, tmp_path)
    runner = load(tmp_path)
    ours = watched(runner, request_for(LINE, max_new_tokens=1))
    assert [*ours] == [*runner.hooks.shapes]
    for point, shape in runner.hooks.shapes.items():
        assert ours[point].shape == tuple(len(LINE) if size in ("T", "S") else size for size in shape), point
    ids = torch.tensor([LINE])
    with torch.no_grad():
        theirs = model(ids, output_hidden_states=True, output_attentions=True)
    close = partial(assert_close, times=huggingface.tolerance(runner.model.config) / 1e-4)
    layers = len(runner.model.layers)
    factor = getattr(model.config, "residual_multiplier", 1)  # of Granite, whose stream is computed without
    factor = getattr(model.config, "scale_depth", factor * layers**0.5) / layers**0.5  # of MiniCPM3
    factor = getattr(model.config, "ssm_out_multiplier", factor)  # of Falcon-H1
    close(factor * ours["embedding"], theirs.hidden_states[0])
    for i in range(layers - 1):
        close(factor * ours[f"blocks.{i}.residual"], theirs.hidden_states[i + 1])
    attending = runner.model.config.layers_with_keys()
    for i, pattern in zip(attending, theirs.attentions, strict=True):
        close(ours[f"blocks.{i}.attention.pattern"], pattern[0].transpose(0, 1))
    close(ours["logits"], theirs.logits)
    compare_mixtures(ours, runner, model, ids, close)
    if runner.model.head.project_out is None:  # else theirs is projected already
        close(ours["final"], last_hidden_state(model, ids))
    if runner.model.config.model_type == "falcon_h1":
        compare_parallel_mambas(ours, model, ids, close)
        return
    products = seen_by_modules(model, lambda: model(ids), OUTPUT_PROJECTION)
    assert [*products] == [i for i in range(layers) if not isinstance(operator_of(runner.model.layers[i]), ALONE)]
    for i, (z, out) in products.items():
        compare_operators(i, runner.model.layers[i], ours, z, out, close)
    compare_mlps(ours, runner, seen_by_modules(model, lambda: model(ids), MLP_DOWN), close)


def compare_mixtures(
    ours: dict[str, np.ndarray], runner: Runner, model: Any, ids: Any, close: Callable[..., None]
) -> None:
    """The routers' probabilities, of which transformers has the logits, or in some families the probabilities."""
    if not hasattr(model.config, "output_router_logits") or not runner.model.config.num_experts:
        return
    with torch.no_grad():
        router = model(ids, output_router_logits=True).router_logits
    mixtures = [name for name in ours if name.endswith("experts.probabilities")]
    for name, scores in zip(mixtures, router, strict=True):
        if runner.model.config.router.sigmoid:
            close(ours[name], scores.sigmoid())
        else:
            close(ours[name], scores if abs(scores.sum(-1) - 1).max() < 1e-4 else scores.softmax(-1))


def compare_mlps(
    ours: dict[str, np.ndarray], runner: Runner, products: dict[int, Any], close: Callable[..., None]
) -> None:
    """What the last products of MLPs read and return; of mixtures, those of the shared experts."""
    for i, (hidden, out) in products.items():
        if f"blocks.{i}.experts.shared" not in ours:
            close(ours[f"blocks.{i}.mlp.hidden"], hidden)
            close(ours[f"blocks.{i}.mlp.out"], out)
        elif not getattr(runner.model.config, "shared_gate", False):  # else with a factor
            close(ours[f"blocks.{i}.experts.shared"], out)


def compare_operators(
    i: int, block: Any, ours: dict[str, np.ndarray], z: Any, out: Any, close: Callable[..., None]
) -> None:
    """What attention's output projection reads and returns, or what is in its place returns."""
    [result] = {f"blocks.{i}.{kind}.out" for kind in ("attention", *RECURRENT.values())} & ours.keys()
    close(ours[result], out)
    if "attention" in result and not operator_of(block).gated:  # else theirs is multiplied by the gates
        close(ours[f"blocks.{i}.attention.z"], z)


def compare_parallel_mambas(ours: dict[str, np.ndarray], model: Any, ids: Any, close: Callable[..., None]) -> None:
    """What the last products of Falcon-H1's parts return; ours are times their factors, less Mamba-2's own."""
    config = model.config
    factors = {"self_attn.o_proj": config.attention_out_multiplier, "mamba.out_proj": config.ssm_out_multiplier}
    points = {"self_attn.o_proj": "attention", "mamba.out_proj": "mamba", "feed_forward.down_proj": "mlp"}
    for module, point in points.items():
        products = seen_by_modules(model, lambda: model(ids), r"layers\.(\d+)\." + re.escape(module))
        assert [*products] == [0, 1]
        factor = factors.get(module, config.mlp_multipliers[1]) / config.ssm_out_multiplier
        for i, (_, out) in products.items():
            close(ours[f"blocks.{i}.{point}.out"], factor * out)


def last_hidden_state(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model.base_model(ids).last_hidden_state


@pytest.mark.parametrize("case", FIRST, ids="-".join)
def test_a_head_is_ablated_as_by_a_hook_on_the_output_projection(case: tuple[str, str], tmp_path: Path) -> None:
    family, name = case
    model = huggingface.build_model(CONFIGS[family][name], 6)
    huggingface.save(model, tmp_path)
    runner = load(tmp_path)

    def without_head(z: Any, place: Any) -> Any:
        z[:, 1] = 0
        return z

    before = watched(runner, request_for(LINE, max_new_tokens=1), ["logits"])["logits"]
    ours = watched(runner, request_for(LINE, max_new_tokens=1), ["logits"], {"blocks.1.attention.z": without_head})
    attention = operator_of(runner.model.layers[1])
    D = attention.out.shape[1] // attention.num_heads

    def mask(_: Any, inputs: Any) -> Any:
        changed = inputs[0].clone()
        changed.view(-1, changed.shape[-1])[:, D : 2 * D] = 0
        return (changed, *inputs[1:])

    handle = modules(model, OUTPUT_PROJECTION)[1].register_forward_pre_hook(mask)
    theirs = huggingface.logits(model, LINE)
    handle.remove()
    assert np.abs(before - theirs).max() > 1e-3
    assert_close(ours["logits"], theirs)


@pytest.mark.parametrize("case", seq2seq.CASES, ids="-".join)
def test_every_point_of_an_encoder_decoder(case: tuple[str, str], tmp_path: Path) -> None:
    family, name = case
    model = huggingface.build_model(seq2seq.CONFIGS[family][name], 5)
    huggingface.save(model, tmp_path)
    runner = load(tmp_path)
    start = runner.model.config.decoder_start_token_id
    request = seq2seq.request_for(SOURCE, start=start, decoder_prompt=LINE, max_new_tokens=1)
    ours = watched(runner, request)
    assert {*ours} == {*runner.hooks.shapes}
    inputs = {"input_ids": torch.tensor([SOURCE]), "decoder_input_ids": torch.tensor([[start, *LINE]])}
    with torch.no_grad():
        theirs = model(**inputs, output_hidden_states=True, output_attentions=True)
    close = partial(assert_close, times=2)  # transformers' own logits of BART are 1.2e-4 from those in float64
    for prefix, states, patterns in (
        ("encoder.", theirs.encoder_hidden_states, theirs.encoder_attentions),
        ("", theirs.decoder_hidden_states, theirs.decoder_attentions),
    ):
        close(ours[f"{prefix}embedding"], states[0])
        for i, pattern in enumerate(patterns):
            close(ours[f"{prefix}blocks.{i}.attention.pattern"], pattern[0].transpose(0, 1))
            if i + 1 < len(patterns):
                close(ours[f"{prefix}blocks.{i}.residual"], states[i + 1])
    for i in range(len(runner.model.layers)):
        close(ours[f"blocks.{i}.cross.pattern"], theirs.cross_attentions[i][0].transpose(0, 1))
    close(ours["encoder.final"], theirs.encoder_last_hidden_state)
    close(ours["logits"], theirs.logits)
