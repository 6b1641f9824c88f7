"""Every family's tiny models on the kernels, run by the emulator: NumPy's tokens, and every decode step recorded.

A family that is added to the registry is run here as well. OPT's variants run in test_engine.py too, which is quick.
"""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import WrappedBackend, put_between
from minillm.backends.operations import Backend
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.engine.footprint import footprints
from minillm.engine.inspect import all_logits
from minillm.reference.philox import uniform
from minillm.runner.runner import Runner
from tests.comparing import assert_same_draws, assert_same_tokens
from tests.families import CASES, CONFIGS, IDS, LIKE_GRANITES, has_experts
from tests.tiny import generate, logits_of, model_of, random_prompts, runner_of

from .recording import RecordingDevice

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")

pytestmark = pytest.mark.slow
PROMPTS = random_prompts(4, seed=3)
LONG = np.random.default_rng(5).integers(3, 96, 45).tolist()
"""Longer than any window, a tile of the prefill kernel's keys, and the length that a stretched rotation begins at."""


LIKE_OTHERS = ("deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3", "qwen3_next", "qwen3_5_moe_text")
LIKE_OTHERS += (*LIKE_GRANITES, "lfm2_moe", "mistral4")
SAME_KERNELS = {
    "opt": ("gpt2",),
    "llama": ("olmo2", "phi3", "ministral3", "hunyuan_v1_dense", "ernie4_5", "helium", "glm", "glm4", "internlm3"),
    "mixtral": ("olmoe", "glm4_moe", "dots1", "minimax_m2", "ernie4_5_moe"),
    "qwen2": ("olmo3", "exaone4"),
    "qwen3": ("gemma",),
    "gpt_neox": ("phi",),
}
"""A family that is run -> those whose first models launch the same kernels of the same builds"""
LIKE_OTHERS += tuple(family for families in SAME_KERNELS.values() for family in families)
"""Families whose operations are those of one that is run: DeepSeek-V2, Qwen3.5 and Qwen2-MoE, LFM2, Granite 4's
hybrids, and those of `SAME_KERNELS`; the NumPy backend's tests run all, test_the_same_kernels holds the table"""
FIRST = {family: next(iter(configs)) for family, configs in CONFIGS.items() if family not in LIKE_OTHERS}


@pytest.fixture(
    params=[
        pytest.param(CONFIGS[family][name], marks=[] if name == FIRST.get(family) else [pytest.mark.exhaustive])
        for family, name in CASES
    ],
    ids=IDS,
)
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A config.json."""
    return request.param


FEW = [*FIRST][::3]
"""Families for what runs the same kernels in each: a third of them"""


@pytest.fixture(
    params=[
        pytest.param(
            CONFIGS[family][name], marks=[] if family in FEW and name == FIRST[family] else [pytest.mark.exhaustive]
        )
        for family, name in CASES
    ],
    ids=IDS,
)
def one_of_few(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A config.json of few families."""
    return request.param


def runner_on(device: RecordingDevice, raw: dict[str, Any], storage: str = "float32") -> Runner:
    backend = CudaBackend(device, device.recorder, storage, max_batch_size=4)
    return runner_of(model_of(raw, seed=2, backend=backend), backend=backend)


def reference_of(raw: dict[str, Any]) -> Runner:
    return runner_of(model_of(raw, seed=2))


def test_ragged_greedy_tokens_are_numpys_and_steps_are_recorded(raw: dict[str, Any], device: RecordingDevice) -> None:
    reference, prompts = reference_of(raw), [PROMPTS[0], LONG, PROMPTS[1]]
    ours = generate(runner_on(device, raw), prompts, max_new_tokens=10)
    for prompt, tokens, expected in zip(prompts, ours, generate(reference, prompts, max_new_tokens=10), strict=True):
        assert_same_tokens(tokens, expected, lambda said, p=prompt: logits_of(reference, p + said)[-1])
    assert len({token for line in ours for token in line}) > len(prompts), "lines that each repeat one token show less"
    expected = 8
    if "original_max_position_embeddings" in raw:
        expected -= 1  # a text outgrows it, and is computed anew
    assert device.replays == expected, "of nine decode steps the first runs plainly, and the second is recorded"


@pytest.mark.slow
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_texts_longer_than_the_frequencies_were_made_for(scaling: dict[str, Any], device: RecordingDevice) -> None:
    """Dynamic frequencies sink from token to token, in a recorded step too; YaRN scales cosines and sines."""
    raw = CONFIGS["llama"]["grouped"] | {"max_position_embeddings": 32, "rope_scaling": scaling}
    reference, prompts = reference_of(raw), [LONG[:20], LONG[:40], LONG[:8]]
    ours = generate(runner_on(device, raw), prompts, max_new_tokens=20, chunk=16)
    expected = generate(reference, prompts, max_new_tokens=20, chunk=16)
    for prompt, tokens, theirs in zip(prompts, ours, expected, strict=True):
        assert_same_tokens(tokens, theirs, lambda said, p=prompt: logits_of(reference, p + said)[-1])
    assert device.replays > 10
    plain = generate(reference_of(CONFIGS["llama"]["grouped"]), prompts, max_new_tokens=20)
    assert plain != expected, "the scaling matters"


def test_steps_with_heads_wider_than_the_prefill_kernel_takes_are_recorded(device: RecordingDevice) -> None:
    """As Gemma 4's layers without a window have: prompts are the array library's, decode steps the kernels'."""
    raw = CONFIGS["gemma4_text"]["keys are values"] | {"global_head_dim": 512}
    reference, prompts = reference_of(raw), [PROMPTS[0], LONG]
    ours = generate(runner_on(device, raw), prompts, max_new_tokens=6)
    for prompt, tokens, expected in zip(prompts, ours, generate(reference, prompts, max_new_tokens=6), strict=True):
        assert_same_tokens(tokens, expected, lambda said, p=prompt: logits_of(reference, p + said)[-1])
    assert device.replays == 4, "of five decode steps the first runs plainly, and the second is recorded"


def test_sampled_tokens_and_beams_are_numpys(one_of_few: dict[str, Any], device: RecordingDevice) -> None:
    runner, reference, prompt = runner_on(device, one_of_few), reference_of(one_of_few), LONG[:37]
    drawing: dict[str, Any] = {"do_sample": True, "seed": 9, "temperature": 1.0, "top_k": 0, "max_new_tokens": 6}
    ours, expected = (generate(each, [prompt], **drawing)[0] for each in (runner, reference))
    assert_same_draws(
        ours,
        expected,
        lambda said: logits_of(reference, prompt + said)[-1],
        lambda i: float(uniform(drawing["seed"], 0, len(prompt) + i)),
    )
    beams: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 5}
    assert generate(runner, PROMPTS[2:3], **beams) == generate(reference, PROMPTS[2:3], **beams)
    assert runner.cache.free_pages == runner.cache.num_pages


def test_a_tree_of_guesses_has_numpys_logits(one_of_few: dict[str, Any], device: RecordingDevice) -> None:
    def logits(runner: Runner) -> Any:
        sequences = [TokenSequence([*LONG, 7, 8, 9, 8, 7], tree=(-1, 0, -1, 2, 0)), TokenSequence(PROMPTS[2])]
        counts = [sequence.pending for sequence in sequences]
        return runner.backend.sampler.to_host(runner.forward(sequences, counts, rows=range(sum(counts))).logits)

    np.testing.assert_allclose(logits(runner_on(device, one_of_few)), logits(reference_of(one_of_few)), atol=2e-4)


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.slow
def test_sixteen_bits_stay_near_the_reference(
    one_of_few: dict[str, Any], storage: str, device: RecordingDevice
) -> None:
    runner, expected = runner_on(device, one_of_few, storage), all_logits(reference_of(one_of_few), LONG)
    host = NumpyBackend(weights=storage)
    rounded = runner_of(model_of(one_of_few, seed=2, backend=host), backend=host)
    with put_between(rounded, Rounding(host, storage)):
        allowed = spread(all_logits(rounded, LONG) - expected, one_of_few)
    assert 0.7 * allowed < spread(all_logits(runner, LONG) - expected, one_of_few) < 1.4 * allowed
    assert len(generate(runner, PROMPTS[:2], max_new_tokens=4)[0]) == 4


def launches_of(family: str, device: RecordingDevice) -> set[tuple[str, ...]]:
    """File, constants and name of each kernel that a prompt and a decode step launch."""
    raw, compiled = CONFIGS[family][next(iter(CONFIGS[family]))], device.recorder.compiled
    compiled.clear()
    runner, sequence = runner_on(device, raw), TokenSequence(list(LONG))
    runner.prefill(sequence)
    sequence.token_ids.append(5)
    runner.decode([sequence])
    return set(compiled)


@pytest.mark.parametrize("family", SAME_KERNELS)
def test_the_same_kernels(family: str, device: RecordingDevice) -> None:
    for other in SAME_KERNELS[family]:
        assert launches_of(other, device) == launches_of(family, device), other


class Rounding(WrappedBackend):
    """Computes in float32 and rounds every result to 16 bits, but logits: what kernels that store 16 bits lose.

    In bfloat16 the errors on the kernels had 0.87 to 1.09 times the size of these in all of 40 families.
    """

    only_looks = False

    def __init__(self, inner: Backend, storage: str) -> None:
        super().__init__(inner)
        self.dtype = np.dtype(ml_dtypes.bfloat16 if storage == "bfloat16" else np.float16)

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Round a result in place."""
        if operation in ("route", "scale_logits") or (weight is not None and weight.makes_logits):
            return
        for array in result if isinstance(result, tuple) else () if result is None else (result,):
            array[...] = array.astype(self.dtype).astype(np.float32)


def spread(errors: np.ndarray, raw: dict[str, Any]) -> float:
    """The root of the mean square; with experts the median of the positions', for a token may choose another one."""
    squares = (errors**2).mean(axis=1)
    return float(np.sqrt(np.median(squares) if has_experts(raw) else squares.mean()))


def test_memory_is_what_the_shape_predicts(one_of_few: dict[str, Any], device: RecordingDevice) -> None:
    """On the NumPy backend every family's is."""
    runner = runner_on(device, one_of_few, "float16")
    backend = runner.backend
    assert isinstance(backend, CudaBackend)
    runner.forward([TokenSequence(list(LONG))], [len(LONG)], rows=range(1))
    taken = {kind: (taken, predicted) for kind, taken, predicted in footprints([runner])}
    assert taken["weights"][0] == taken["weights"][1]
    assert taken["cache"][0] == taken["cache"][1]
    assert backend.memory._plain.scratch.arena.nbytes == taken["workspace"][1]
