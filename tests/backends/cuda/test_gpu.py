"""The engine on a real GPU: streams, graphs and memory of CuPy's, which the emulator does not have."""

from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.batches import TOKENS
from minillm.backends.cuda.compiling import CupyLauncher
from minillm.backends.cuda.device import CupyDevice
from minillm.backends.cuda.linear import SPLIT_ROWS
from minillm.backends.cuda.tensor_maps import TensorMaps
from minillm.backends.cuda.weights import number_type
from minillm.batch import TokenSequence
from tests.comparing import assert_same_tokens
from tests.families import CONFIGS
from tests.tiny import generate, logits_of, model_of, runner_of, tiny_model

from .launchers import ON_GPU

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: MINILLM_TEST_GPU=1")

PROMPTS = ["A list of colors: red,", "Once", "The sea was calm that day, and nobody"]


def generations(fields: dict[str, Any], **placement: Any) -> list[list[str]]:
    with Engine(max_batch_size=4, **placement) as engine:
        return [[c.text for c in g.completions] for g in engine.generate(PROMPTS, max_new_tokens=12, **fields)]


@pytest.mark.parametrize(
    "fields",
    [{}, {"do_sample": True, "seed": 3, "top_p": 0.9}, {"do_sample": True, "seed": 4, "num_return_sequences": 3}],
    ids=["greedy", "sampled", "several"],
)
def test_the_demo_model_says_what_it_says_on_a_cpu(fields: dict[str, Any]) -> None:
    """In float32, where the two differ by rounding alone."""
    assert generations(fields, device="cuda", dtype="float32") == generations(fields, backend="numpy", dtype="float32")


def test_beams_are_those_of_a_cpu() -> None:
    fields = {"num_beams": 3}
    assert generations(fields, device="cuda", dtype="float32") == generations(fields, backend="numpy", dtype="float32")


@pytest.mark.parametrize(("storage", "most"), [("float32", 1e-3), ("float16", 0.02), ("bfloat16", 0.15)])
def test_logits_are_near_those_of_a_cpu(storage: str, most: float) -> None:
    tokens = list(range(5, 45))
    with Engine(device="cuda", dtype=storage) as ours, Engine(backend="numpy", dtype="float32") as reference:
        expected = reference.forward(tokens)
        error = np.abs(ours.forward(tokens) - expected).max()
    assert 0 < error < most * expected.std()


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_products_of_the_library_are_those_of_matmul(storage: str) -> None:
    """The same bits, also where the rows of x and out are parts of longer ones; what is beside them stays."""
    device = CupyDevice()
    device.activate()
    cupy, rng = device.xp, np.random.default_rng(0)
    dtype = number_type(storage)
    x = cupy.asarray(rng.standard_normal((70, 200)).astype(dtype))[:, 40:168]
    weight = cupy.asarray(rng.standard_normal((48, 128)).astype(dtype))
    out = cupy.zeros((70, 64), dtype)
    device.multiply(x, weight, out[:, 8:56])
    there, expected = device.copy_of(out), device.copy_of(cupy.matmul(x, weight.T))
    assert there[:, 8:56].tobytes() == expected.tobytes()
    assert not there[:, :8].any() and not there[:, 56:].any()


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_on_arrays_of_the_device(family: str) -> None:
    """Greedy tokens of captured steps, and a tree of guesses: CuPy's arrays beside the host's."""
    raw = next(iter(CONFIGS[family].values()))
    backend = CudaBackend(CupyDevice(), CupyLauncher(), "float32", max_batch_size=4)
    ours, reference = runner_of(model_of(raw, backend=backend), backend=backend), runner_of(model_of(raw))
    line = np.random.default_rng(5).integers(3, 96, 40).tolist()
    prompts = [line, line[:7]]
    both = [generate(runner, prompts, max_new_tokens=12) for runner in (ours, reference)]
    for prompt, tokens, expected in zip(prompts, *both, strict=True):
        assert_same_tokens(tokens, expected, lambda said, p=prompt: logits_of(reference, p + said)[-1])
    logits = []
    for runner in (ours, reference):
        sequence = TokenSequence([*line, 7, 8, 9], tree=(-1, 0, -1))
        logits.append(
            runner.backend.sampler.to_host(runner.forward([sequence], [sequence.pending], rows=range(3)).logits).copy()
        )
    np.testing.assert_allclose(*logits, atol=1e-3)


def test_a_step_as_one_kernel_has_the_bits_of_its_launches() -> None:
    """Over many steps, of one sequence and of four."""
    raw = next(iter(CONFIGS["llama"].values()))
    for batch in 1, 4:
        logits: list[Any] = []
        for persistent in False, True:
            device = CupyDevice()
            backend = CudaBackend(device, CupyLauncher(), "float16", max_batch_size=4, persistent=persistent)
            runner = runner_of(model_of(raw, seed=2, backend=backend), backend=backend)
            sequences = [TokenSequence([5 + i, 9, 11, 30 + i]) for i in range(batch)]
            runner.forward(sequences, [4] * batch)
            steps = []
            for step in range(40):
                for sequence in sequences:
                    sequence.token_ids.append(7 + step)
                steps.append(device.copy_of(runner.decode(sequences).logits))
            logits.append(steps)
        np.testing.assert_array_equal(*logits)


def test_a_captured_prompt_whose_products_the_memory_accelerator_feeds() -> None:
    """With the driver's maps: logits near those of the library's products, and the same bits in each replay."""
    tokens = np.random.default_rng(1).integers(3, 96, SPLIT_ROWS + 5).tolist()
    logits: list[Any] = []
    for with_maps in False, True:
        device, launcher = CupyDevice(), CupyLauncher()
        if launcher.architecture != "90":
            pytest.skip("needs an H100 or H200")
        more: dict[str, Any] = (
            {"tensor_maps": TensorMaps(device.address), "prompt_tokens": TOKENS[-1]} if with_maps else {}
        )
        backend = CudaBackend(device, launcher, "float16", max_batch_size=4, **more)
        runner = runner_of(tiny_model(seed=2, backend=backend, max_position_embeddings=160), backend=backend, pages=64)
        for _ in range(4 if with_maps else 1):
            sequence = TokenSequence(list(tokens))
            logits.append(device.copy_of(runner.forward([sequence], [len(tokens)]).logits))
            runner.cache.free(sequence)
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-2)
    for replayed in logits[2:]:
        np.testing.assert_array_equal(replayed, logits[1])


def test_decode_steps_are_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    record = CupyDevice.record

    def counting(device: CupyDevice, launch: Any) -> Any:
        recorded.append(0)
        replay = record(device, launch)

        def counted() -> None:
            recorded[-1] += 1
            replay()

        return counted

    monkeypatch.setattr(CupyDevice, "record", counting)
    with Engine(device="cuda", dtype="float32", max_batch_size=2) as engine:
        engine.generate(PROMPTS[0], max_new_tokens=10)
    assert recorded == [8], "of nine decode steps the first runs plainly"


def test_memory_that_is_not_there_is_one_line_and_harms_nothing() -> None:
    from minillm.errors import DeviceError

    with Engine(device="cuda", dtype="float32") as engine:
        before = engine.generate(PROMPTS[0], max_new_tokens=3).text
        backend = engine.runner.backend
        assert isinstance(backend, CudaBackend)
        with pytest.raises(DeviceError, match=r"out of device memory for the K/V cache:.* are free: lower"):
            backend.memory.new_pages((1, 1 << 20, 1 << 12, backend.memory.page_size, 1 << 10))
        assert engine.generate(PROMPTS[0], max_new_tokens=3).text == before
