"""Prompts that are recorded by buckets of tokens: the same bits as launched call by call, and NumPy's tokens."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda import library, memory
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.batches import TOKENS, Bucket, Layout, bucket_of_prompts
from minillm.backends.cuda.choosing import CudaSampler
from minillm.backends.cuda.compiling import CupyLauncher
from minillm.backends.cuda.device import CupyDevice
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.linear import Product, Products
from minillm.backends.cuda.weights import number_type
from minillm.backends.numpy import NumpyBackend
from minillm.batch import Batch, TokenSequence
from minillm.errors import DeviceError, NumericalError
from minillm.runner.runner import Runner
from tests.comparing import assert_same_tokens
from tests.encoders import CONFIGS as ENCODERS
from tests.encoders import runner_over, states, texts
from tests.families import CONFIGS
from tests.tiny import logits_of, loop_of, model_of, random_prompts, request_for, run, runner_of, tiny_model

from .launchers import missing
from .recording import Recorder, RecordingDevice

PROMPTS = random_prompts(6, seed=3)


class CallByCall(RecordingDevice):
    """Records nothing."""

    def record(self, launch: Callable[[], object]) -> Any:
        return None


def batch_of(*counts: int, cached: int = 3) -> Batch:
    """Sequences of so many new tokens, each after some that are in the cache."""
    lines = [TokenSequence([5] * (cached + count), cached, [i]) for i, count in enumerate(counts)]
    return Batch.of(lines, counts, 1024)


def runner_on(device: RecordingDevice, raw: dict[str, Any] | None = None, **options: Any) -> Runner:
    backend = CudaBackend(device, device.recorder, "float32", max_batch_size=8, prompt_tokens=TOKENS[-1], **options)
    model = tiny_model(seed=2, backend=backend) if raw is None else model_of(raw, seed=2, backend=backend)
    return runner_of(model, backend=backend, pages=64)


def mixed_passes(runner: Runner) -> list[np.ndarray]:
    """The logits of a prompt alone, of several, of chunks, and of prompts beside sequences that decode; each thrice."""
    outputs = []

    def forward(lines: list[TokenSequence], counts: list[int]) -> None:
        logits = runner.forward(lines, counts).logits
        outputs.append(np.array(runner.backend.sampler.to_host(logits)))

    for _ in range(3):
        lines = [TokenSequence(list(prompt)) for prompt in PROMPTS[:3]]
        forward(lines[:1], [lines[0].pending])
        forward(lines[1:], [lines[1].pending, lines[2].pending - 1])
        forward(lines[2:], [1])
        for line in lines:
            line.token_ids.append(7)
        chunk = TokenSequence(list(PROMPTS[3]))
        forward([*lines, chunk], [1, 1, 1, 4])
        lines[0].token_ids.append(8)
        forward([lines[0], chunk], [1, chunk.pending])
        for line in (*lines, chunk):
            runner.cache.free(line)
    return outputs


# --- the same bits, the same tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_replays_have_the_bits_of_passes_launched_call_by_call(prefix_cache: bool, device: RecordingDevice) -> None:
    runners = [runner_on(device), runner_on(CallByCall(device.recorder))]
    for runner in runners:
        runner.cache.prefix_cache = prefix_cache
    ours, expected = map(mixed_passes, runners)
    for logits, theirs in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(logits, theirs)
    assert len(device.records) >= 4 and device.replays >= 8


def test_logits_are_those_without_padding(device: RecordingDevice) -> None:
    plain = CudaBackend(RecordingDevice(Recorder(device.recorder.inner)), device.recorder, "float32", max_batch_size=8)
    unpadded = runner_of(tiny_model(seed=2, backend=plain), backend=plain, pages=64)
    for logits, theirs in zip(mixed_passes(runner_on(device)), mixed_passes(unpadded), strict=True):
        np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-5)


FAMILIES = {
    "opt": None,
    "llama": CONFIGS["llama"]["grouped"],
    "gemma2": next(iter(CONFIGS["gemma2"].values())),
    "mixtral": next(iter(CONFIGS["mixtral"].values())),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_beside_decoding_sequences_say_what_numpy_says(family: str, device: RecordingDevice) -> None:
    raw = FAMILIES[family]
    runner, reference = runner_on(device, raw), runner_of(tiny_model(seed=2) if raw is None else model_of(raw, seed=2))
    for _ in range(2):
        requests = [request_for(prompt, max_new_tokens=5, vocab_size=runner.model.config.vocab_size)
                    for prompt in (*PROMPTS, PROMPTS[0] + PROMPTS[1])]  # fmt: skip
        ours = run(loop_of(target=runner, chunk=12, max_batch_size=4, prefix_cache=True), requests)
        expected = run(loop_of(target=reference, chunk=12, max_batch_size=4, prefix_cache=True), requests)
        for request, result, theirs in zip(requests, ours, expected, strict=True):
            prompt = list(request.prompt_ids)
            assert_same_tokens(
                result[0].token_ids, theirs[0].token_ids, lambda said, p=prompt: logits_of(reference, p + said)[-1]
            )
    backend: Any = runner.backend
    recorded = [bucket for bucket, step in backend.memory._steps[runner].items() if step.replays]
    assert any(bucket.tokens and bucket.singles for bucket in recorded), "a pass with a chunk and decoding sequences"
    assert runner.cache.free_pages == runner.cache.num_pages


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_the_graphs_of_prompts_are_bounded(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that ran longest ago goes; decode steps stay."""
    monkeypatch.setattr(memory, "MOST_PROMPTS", 2)
    runner = runner_on(device)
    backend: Any = runner.backend

    def prefill(tokens: int) -> None:
        line = TokenSequence([5] * tokens)
        runner.prefill(line)
        line.token_ids.append(7)
        runner.decode([line])
        runner.cache.free(line)

    def recorded() -> list[int]:
        return [bucket.tokens for bucket in backend.memory._steps[runner]]

    for tokens in (10, 10, 20, 20, 10):
        prefill(tokens)
    assert sorted(recorded()) == [0, 16, 32]
    prefill(40)
    assert sorted(recorded()) == [0, 16, 64], "32 ran longest ago"
    before = device.replays
    prefill(10)
    assert device.replays == before + 2, "the prompt, and the step after it"


def test_passes_of_an_encoder_whose_attention_has_a_kernel_are_recorded(device: RecordingDevice) -> None:
    raw, ids = ENCODERS["modernbert"], texts(3, seed=6, longest=20)
    expected = states(runner_over(model_of(raw), NumpyBackend()), ids)
    backend = CudaBackend(device, device.recorder, "float32", max_batch_size=4, prompt_tokens=TOKENS[-1])
    runner = runner_over(model_of(raw, backend=backend), backend)
    for _ in range(3):
        for ours, theirs in zip(states(runner, ids), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert device.records


def test_experts_of_many_rows_are_not_recorded(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads there whose rows they are; the results are those of few."""
    raw = FAMILIES["mixtral"]
    assert raw is not None
    expected = mixed_passes(runner_on(device, raw))
    prompts = len(device.records) - 1  # and a decode step
    assert prompts >= 4
    monkeypatch.setattr("minillm.backends.cuda.experts.GROUPED_ROWS", 4)
    for logits, theirs in zip(mixed_passes(runner_on(device, raw)), expected, strict=True):
        np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-5)
    assert len(device.records) == prompts + 2


def test_states_that_are_not_finite_are_noticed_in_a_replay(device: RecordingDevice) -> None:
    runner = runner_on(device)
    runner.cache.prefix_cache = True
    model: Any = runner.model
    model.embedding.positions.data[14] = np.nan
    for length in (9, 9, 9):
        line = TokenSequence([*range(5, 5 + length)])
        runner.prefill(line)
        runner.cache.free(line)
    assert device.replays
    line = TokenSequence([*range(25, 25 + 16)])
    with pytest.raises(NumericalError):
        runner.prefill(line)


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_the_device_looks_for_states_that_are_not_finite(storage: str) -> None:
    if storage == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="has bfloat16")
    device = RecordingDevice(Recorder(Nowhere()))
    sampler = CudaSampler(device, Kernels(device.recorder))
    states = np.ones((6, 4), number_type(storage))
    states[5] = np.finfo(np.float16).max  # large numbers are finite
    states[2, 3] = -65504
    for number, finite in ((1.0, True), (np.nan, False), (np.inf, False), (-np.inf, False)):
        states[4, 3] = number
        sampler.watch(states)
        assert sampler.states_finite() == finite
        assert sampler.states_finite(), "it is asked once"
        sampler.watch(states, (slice(4), slice(5, 6)))
        assert sampler.states_finite(), "that row is padding"


class Nowhere:
    """A GPU without kernels."""

    architecture, processors = "90", 1

    def module(self, path: Any, options: Any) -> Any:
        raise AssertionError


# --- buckets and places ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "bucket"),
    [
        ((9,), Bucket(2, 16, 0, 16, 0)),
        ((16,), Bucket(2, 16, 0, 16, 0)),
        ((17,), Bucket(2, 16, 0, 32, 0)),
        ((100, 100, 56), Bucket(4, 16, 0, 256, 0)),
        ((1, 1, 1, 60), Bucket(6, 16, 0, 64, 4)),
        ((1, 1, 1, 61), Bucket(6, 16, 0, 128 - 32, 4)),
        ((2,) * 9, Bucket(16, 16, 0, 32, 0)),
        ((1,) * 5 + (507,), Bucket(10, 16, 0, 576, 8)),
        ((577,), None),
    ],
)
def test_buckets_of_passes(counts: tuple[int, ...], bucket: Bucket | None) -> None:
    batch = batch_of(*counts)
    assert bucket_of_prompts(batch, range(len(counts)), TOKENS[-1]) == bucket
    if bucket is not None:
        assert bucket.sequences < bucket.tokens, "else all rows' logits would be wanted"
        assert bucket_of_prompts(batch, range(len(counts)), sum(counts) - 1) is None
        assert bucket_of_prompts(batch, range(len(counts) + 1), TOKENS[-1]) is None


def test_each_row_has_its_place_and_each_sequence_its_rows(device: RecordingDevice) -> None:
    batch = batch_of(1, 1, 1, 5, 3)
    bucket = bucket_of_prompts(batch, range(5), 64)
    assert bucket == Bucket(8, 16, 0, 16, 4)
    sent, rows = memory.BatchBuffers(device).fill(batch, [0, 2, 7, 10], 1024, bucket)
    assert sent.query_starts.tolist() == [0, 1, 2, 3, 4, 9, 12, 16, 16]
    assert sent.context_lens.tolist() == [4, 4, 4, 0, 8, 6, 0, 0]
    assert sent.positions.tolist() == [3, 3, 3, 0, 3, 4, 5, 6, 7, 3, 4, 5, 0, 0, 0, 0]
    assert (sent.slots >= 0).tolist() == [True] * 3 + [False] + [True] * 8 + [False] * 4
    assert sent.block_table[:, 0].tolist() == [0, 1, 2, 0, 3, 4, 0, 0]
    assert rows[:4].tolist() == [0, 2, 8, 11]
    assert Layout.of(batch, bucket).computed(11) == (slice(3), slice(4, 12))


# --- guesses that are verified ---------------------------------------------------------------------------------------


def test_buckets_of_passes_with_all_logits() -> None:
    for counts, bucket in (
        ((5, 1, 4), Bucket(4, 16, tokens=16, rows=16)),
        ((1, 5), Bucket(4, 16, tokens=8, rows=8)),
        ((100, 28), Bucket(4, 16, tokens=128, rows=128)),
        ((100, 29), None),
    ):
        batch = batch_of(*counts)
        assert bucket_of_prompts(batch, range(sum(counts)), TOKENS[-1]) == bucket
        assert bucket_of_prompts(batch, range(sum(counts) - 1), TOKENS[-1]) is None
        assert bucket_of_prompts(batch, range(sum(counts)), sum(counts) - 1) is None
    tree = TokenSequence([5] * 40, 3, [0], tree=range(-1, 34))  # type: ignore[arg-type]
    assert bucket_of_prompts(Batch.of([tree], [37], 1024), range(37), 64) == Bucket(2, 16, tokens=48, rows=48, words=2)


def verified(runner: Runner) -> list[np.ndarray]:
    """All logits of passes that verify lines and trees of guesses, among them one after another of the same shape."""
    outputs = []
    for tree in ((-1, 0, -1, 2, 0), (-1, 0, 1, 1, -1), (), (), (-1, -1, -1, 0, 1), ()):
        lines = [TokenSequence(list(prompt)) for prompt in PROMPTS[:3]]
        runner.forward(lines, [line.pending for line in lines])
        for line, guesses in zip(lines, ([], [7, 8, 9, 8, 7], [6, 5]), strict=True):
            line.token_ids += [4, *guesses]
        lines[1].tree = tree
        counts = [line.pending for line in lines]
        logits = runner.forward(lines, counts, rows=range(sum(counts))).logits
        outputs.append(np.array(runner.backend.sampler.to_host(logits)))
        for line in lines:
            runner.cache.discard(line)
    return outputs


def test_passes_that_verify_guesses_are_repeated(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of passes launched call by call, each query seeing what NumPy's does."""
    monkeypatch.delattr("minillm.backends.cuda.attention.attend_by_reference")
    runner = runner_on(device)
    ours, by_calls = verified(runner), verified(runner_on(CallByCall(device.recorder)))
    for logits, calls, expected in zip(ours, by_calls, verified(runner_of(tiny_model(seed=2))), strict=True):
        np.testing.assert_array_equal(logits, calls)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    steps = {bucket: step.replays for bucket, step in runner.backend.memory._steps[runner].items() if bucket.rows}
    assert steps == {Bucket(4, 16, tokens=16, rows=16, words=words): True for words in (0, 1)}


@pytest.mark.parametrize(
    "fields", [{"prompt_lookup_num_tokens": 4}, {"lookahead_window": 3, "lookahead_ngram_size": 3}], ids=str
)
def test_speculation_on_recorded_passes_says_what_numpy_says(device: RecordingDevice, fields: dict[str, Any]) -> None:
    runner, reference = runner_on(device), runner_of(tiny_model(seed=2))
    requests = [request_for([*prompt, *prompt], max_new_tokens=10, **fields) for prompt in PROMPTS[:2]]
    ours, expected = run(loop_of(target=runner), requests), run(loop_of(target=reference), requests)
    assert [result[0].token_ids for result in ours] == [result[0].token_ids for result in expected]
    assert any(bucket.rows and step.replays for bucket, step in runner.backend.memory._steps[runner].items())


# --- the library -----------------------------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> CupyDevice:
    cupy: Any = import_module("tests.cupy_standin.cupy")
    monkeypatch.setattr("minillm.backends.cuda.device.import_cupy", lambda: cupy)
    monkeypatch.setattr(library, "load", lambda version: cupy.cuda.cublas.OwnLibrary())
    return CupyDevice(own_library=True)


def test_a_capture_takes_up_the_librarys_products_in_their_order(own: CupyDevice) -> None:
    """On the stand-in, which refuses CuPy's own handle there."""
    xp = own.xp
    kernels = Kernels(Recorder(import_module("minillm.backends.cuda.emulator").Emulator()))
    products = Products(kernels, own.multiply)
    rng = np.random.default_rng(0)
    x, first, second = (xp.asarray(rng.integers(-4, 5, shape).astype("f")) for shape in ((40, 8), (6, 8), (8, 6)))
    y, z = xp.zeros((40, 6), "f"), xp.zeros((40, 8), "f")

    def run() -> None:
        products.linear(Product(x, first, None, y))
        products.linear(Product(y, second, None, z))

    launches = kernels.collect(run)
    assert [launch.name for launch in launches] == ["library_product"] * 2
    assert launches[0].args[0] is y, "what is written comes first"
    replay = own.record(lambda: own.launch_all(launches))
    assert not z.any(), "a capture runs nothing"
    replay()
    np.testing.assert_array_equal(z, x @ first.T @ second.T)
    x[...] = 2 * x
    replay()
    np.testing.assert_array_equal(z, x @ first.T @ second.T)
    with pytest.raises(NotImplementedError, match="a library call while a stream is captured"):
        own.record(lambda: CupyDevice().multiply(x, first, y))


@pytest.mark.longer
def test_prompts_whose_products_are_the_librarys_are_captured(own: CupyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole passes on the stand-in, which allows nothing in a capture but launches."""
    if reason := missing():
        pytest.skip(reason)
    monkeypatch.setattr("minillm.backends.cuda.compiling.import_cupy", lambda: own.xp)
    for name in ("cupyx", "cupy.cuda.compiler"):
        monkeypatch.setitem(sys.modules, name, import_module(f"tests.cupy_standin.{name}"))
    backend = CudaBackend(own, CupyLauncher(), "float32", max_batch_size=4, prompt_tokens=TOKENS[-1])
    runner = runner_of(tiny_model(seed=2, backend=backend), backend=backend, pages=64)
    runner.cache.prefix_cache = True
    calls: list[Any] = []
    monkeypatch.setattr(backend.products, "_multiply", lambda *arrays: (calls.append(0), own.multiply(*arrays)))
    reference = runner_of(tiny_model(seed=2))
    for first in range(4):
        prompt = [*range(first, first + 30)]
        line = TokenSequence(prompt)
        logits = backend.sampler.to_host(runner.prefill(line).logits)
        np.testing.assert_allclose(logits[0], logits_of(reference, prompt)[-1], rtol=0, atol=1e-4)
        runner.cache.free(line)
    (step,) = (step for bucket, step in backend.memory._steps[runner].items() if bucket.tokens)
    assert step.replays
    assert len(calls) == 16, "in two layers with four products, launched once and captured once"


def test_parts_of_rows_are_multiplied_by_the_handle(own: CupyDevice) -> None:
    numbers = np.random.default_rng(0).integers(-4, 5, (13, 20)).astype("f")
    x, weight = own.xp.asarray(numbers[:5], "float16")[:, 3:11], own.xp.asarray(numbers[7:, 12:], "float16")
    out = own.xp.zeros((5, 9), "float16")
    own.multiply(x, weight, out[:, 2:8])
    assert (out[:, 2:8].astype("f") == numbers[:5, 3:11] @ numbers[7:, 12:].T).all()
    assert not out[:, :2].any() and not out[:, 8:].any()


def test_a_library_that_is_missing_or_refuses_is_told_in_a_line(
    own: CupyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: 14 if name == "cublasSetWorkspace_v2" else 0

    monkeypatch.setattr(library, "load", lambda version: Refusing())
    with pytest.raises(DeviceError, match=r"cuBLAS refuses cublasSetWorkspace_v2 \(status 14\): leave"):
        CupyDevice(own_library=True)
    monkeypatch.undo()
    cupy: Any = import_module("tests.cupy_standin.cupy")
    monkeypatch.setattr("minillm.backends.cuda.device.import_cupy", lambda: cupy)
    monkeypatch.setattr(cupy.cuda.cublas, "getVersion", lambda handle: 990_000)
    with pytest.raises(DeviceError, match=r"MINILLM_CUDA_PROMPTS=1 needs cuBLAS \(libcublas\.so\.99"):
        CupyDevice(own_library=True)
