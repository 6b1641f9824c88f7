"""The whole engine on the kernels, run by the emulator: the same tokens as NumPy's, step by recorded step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends import compile_seconds
from minillm.backends.cuda import batches
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import counting
from minillm.backends.token_sampler import TokenSampler
from minillm.backends.weights import Weight
from minillm.batch import Batch, TokenSequence
from minillm.decoding.event import Event
from minillm.engine.inspect import all_logits, attention_maps, next_tokens, score_tokens
from minillm.engine.scheduler import Limits
from minillm.errors import NumericalError
from minillm.formats.load_model import load_adapter
from minillm.reference.philox import Keys, uniform
from minillm.reference.sampling import scale
from minillm.reference.sampling_by_sorting import keep_min_p, keep_top_k, keep_top_p
from minillm.runner.runner import Output, Runner
from tests.adapters import write_adapter
from tests.comparing import assert_same_draws, assert_same_tokens
from tests.tiny import (
    VARIANTS,
    generate,
    logits_of,
    loop_of,
    random_prompts,
    request_for,
    run,
    runner_of,
    tiny_model,
    tiny_runner,
)

from .recording import RecordingDevice

PROMPTS = random_prompts(5, seed=3)

Make = Callable[..., Runner]


@pytest.fixture
def backend(device: RecordingDevice) -> CudaBackend:
    return CudaBackend(device, device.recorder, "float32", max_batch_size=8)


@pytest.fixture
def runner(backend: CudaBackend) -> Runner:
    return runner_on(backend)


def runner_on(backend: CudaBackend, variant: str = "pre-norm", *, seed: int = 2, pages: int = 64) -> Runner:
    return runner_of(tiny_model(variant, seed=seed, backend=backend), backend=backend, pages=pages)


def scores_after(prompt: Sequence[int], variant: str = "pre-norm", *, seed: int = 2) -> Callable[[list[int]], Any]:
    """NumPy's logits after a prompt and some tokens."""
    reference = tiny_runner(variant, seed=seed)
    return lambda tokens: logits_of(reference, [*prompt, *tokens])[-1]


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_numpys(variant: str, backend: CudaBackend, device: RecordingDevice) -> None:
    prompts = PROMPTS[:3]
    ours = generate(runner_on(backend, variant), prompts, max_new_tokens=10)
    reference = generate(tiny_runner(variant, seed=2), prompts, max_new_tokens=10)
    for prompt, tokens, expected in zip(prompts, ours, reference, strict=True):
        assert_same_tokens(tokens, expected, scores_after(prompt, variant))
    assert device.replays == 8, "of nine decode steps the first runs plainly, and the second is recorded"


def test_kernels_are_compiled_outside_of_the_times_of_steps(runner: Runner) -> None:
    loop, before = loop_of(target=runner), compile_seconds()
    run(loop, [request_for(PROMPTS[0], max_new_tokens=4)])
    assert loop.stats.compile_seconds == pytest.approx(compile_seconds() - before)
    assert loop.stats.compile_seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"num_beams": 2}, {"lookahead_window": 2}], ids=str)
def test_preempted_requests_say_what_numpy_says(fields: dict[str, Any], backend: CudaBackend) -> None:
    """Pages for two of three at their ends."""
    pages = 4 * fields.get("num_beams", 1)
    loop = loop_of(target=runner_on(backend, pages=pages), headroom=0)
    requests = [request_for([5 + i] * 9, max_new_tokens=22, **fields) for i in range(3)]
    ours, reference = run(loop, requests), run(loop_of(target=tiny_runner(seed=2)), requests)
    assert [result[0].token_ids for result in ours] == [result[0].token_ids for result in reference]
    assert loop.stats.preemptions > 0
    assert loop.load().free_pages == pages


def test_a_batch_that_shrinks_within_and_below_its_bucket(runner: Runner, device: RecordingDevice) -> None:
    lengths = [3, 12, 7, 16, 9]
    requests = [request_for(p, max_new_tokens=n) for p, n in zip(PROMPTS, lengths, strict=True)]
    ours = run(loop_of(target=runner), requests)
    reference = run(loop_of(target=tiny_runner(seed=2)), requests)
    for prompt, result, expected in zip(PROMPTS, ours, reference, strict=True):
        assert_same_tokens(result[0].token_ids, expected[0].token_ids, scores_after(prompt))
    assert len(device.records) == 4, "buckets of 8, 4, 2 and 1 sequences"
    assert runner.cache.free_pages == runner.cache.num_pages


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.7, "top_k": 12}, {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05}],
    ids=["plain", "top-k", "top-p, min-p"],
)
def test_sampled_tokens_are_numpys(filters: dict[str, Any], runner: Runner) -> None:
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    seeds = {"do_sample": True, "seed": 2**40 + 7, "max_new_tokens": 8}
    ours = generate(runner, PROMPTS[:3], **fields, **seeds)
    reference = generate(tiny_runner(seed=2), PROMPTS[:3], **fields, **seeds)
    for prompt, tokens, expected in zip(PROMPTS, ours, reference, strict=False):

        def filtered(said: list[int], prompt: list[int] = prompt) -> np.ndarray:
            scores = scale(scores_after(prompt)(said)[None].copy(), fields["temperature"])
            scores = keep_top_p(keep_top_k(scores, fields["top_k"], np), fields["top_p"], np)
            return keep_min_p(scores, fields["min_p"], np)[0]

        def drawn_with(i: int, prompt: list[int] = prompt) -> float:
            return float(uniform(seeds["seed"], 0, len(prompt) + i))

        assert_same_draws(tokens, expected, filtered, drawn_with)
    assert len({token for line in ours for token in line}) > 8


def test_several_continuations_and_requests_that_choose_otherwise_share_a_step(runner: Runner) -> None:
    def requests() -> list[Any]:
        sampled = {"do_sample": True, "seed": 5, "top_k": 0}
        return [
            request_for(PROMPTS[0], max_new_tokens=6, num_return_sequences=3, **sampled),
            request_for(PROMPTS[1], max_new_tokens=6),
            request_for(PROMPTS[2], max_new_tokens=6, repetition_penalty=1.2),
            request_for(PROMPTS[3], max_new_tokens=6, logprobs=True),
        ]

    ours, reference = run(loop_of(target=runner), requests()), run(loop_of(target=tiny_runner(seed=2)), requests())
    assert [[r.token_ids for r in results] for results in ours] == [[r.token_ids for r in rs] for rs in reference]
    np.testing.assert_allclose(ours[3][0].log_probs, reference[3][0].log_probs, atol=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True, "seed": 4},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prompt_lookup_num_tokens": 3},
        {"lookahead_window": 3, "lookahead_ngram_size": 3},
        {"do_sample": True, "seed": 3, "mirostat": 2},
        {"guidance_scale": 2.0, "negative_prompt": (7, 8, 9)},
        {"dola_layers": (0, 1)},
    ],
    ids=["beams", "sampled beams", "contrastive", "prompt lookup", "lookahead", "mirostat", "guidance", "dola"],
)
def test_every_strategy_has_numpys_tokens(fields: dict[str, Any], runner: Runner) -> None:
    prompt = PROMPTS[4] * 2
    ours = generate(runner, [prompt], max_new_tokens=8, **fields)
    assert ours == generate(tiny_runner(seed=2), [prompt], max_new_tokens=8, **fields)
    assert runner.cache.free_pages == runner.cache.num_pages


def test_a_draft_model_on_the_same_device(backend: CudaBackend) -> None:
    from dataclasses import replace

    from minillm.decoding.resolving import resolve, strategy_for
    from minillm.decoding.settings import GenerationConfig
    from minillm.decoding.strategy import Request

    def tokens(target: Runner, draft: Runner) -> list[int]:
        config = GenerationConfig(max_new_tokens=8, num_assistant_tokens=3)
        settings = replace(resolve(config, {}, vocab_size=96, eos_token_id=None, models=("draft",)), max_length=None)
        request = Request(PROMPTS[1], settings, strategy_for(settings))
        return run(loop_of(target=target, draft=draft), [request])[0][0].token_ids

    expected = tokens(tiny_runner(seed=2), tiny_runner(seed=7))
    assert tokens(runner_on(backend), runner_on(backend, seed=7)) == expected


def test_naive_cached_chunked_and_a_prefix_that_is_reused(runner: Runner) -> None:
    prompt = PROMPTS[0] + PROMPTS[1] + PROMPTS[2]
    (expected,) = generate(tiny_runner(seed=2), [prompt], max_new_tokens=6)
    assert generate(runner, [prompt], max_new_tokens=6, use_cache=False) == [expected]
    assert generate(runner, [prompt], max_new_tokens=6, chunk=5) == [expected]
    loop = loop_of(target=runner, prefix_cache=True)
    assert run(loop, [request_for(prompt, max_new_tokens=6)])[0][0].token_ids == expected
    computed = loop.stats.prefill_tokens
    assert run(loop, [request_for(prompt, max_new_tokens=6)])[0][0].token_ids == expected
    assert loop.stats.prefill_tokens - computed == 1


def test_a_context_that_outgrows_its_block_table_gets_a_larger_one(
    runner: Runner, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "LEAST_PAGES", 1)
    prompt = PROMPTS[0][:4]
    ours = generate(runner, [prompt], max_new_tokens=40)
    assert_same_tokens(ours[0], generate(tiny_runner(seed=2), [prompt], max_new_tokens=40)[0], scores_after(prompt))
    assert len(device.records) == 3, "contexts within 1, 2 and 4 pages"


@pytest.mark.parametrize("max_rows", [4, 128])
def test_log_probabilities_of_prompts_out_of_the_batch(
    runner: Runner, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.engine.scheduler.MAX_ROWS", max_rows)
    plain, loop = tiny_runner(seed=2), loop_of(target=runner)
    requests = [request_for(prompt, echo=True, top_logprobs=2, max_new_tokens=2) for prompt in PROMPTS[:3]]
    prompts = {loop.add(request): request.prompt_ids for request in requests}
    scored: dict[int | str, Event] = {}
    while loop.busy:
        scored |= {event.request_id: event for event in loop.step_or_raise() if event.prompt_logprobs is not None}
    assert scored.keys() == prompts.keys()
    for request_id, event in scored.items():
        prompt = prompts[request_id]
        np.testing.assert_allclose(event.prompt_logprobs[1:], score_tokens(plain, prompt)[1:], atol=1e-4)
        likeliest = [[token for token, _ in position.next] for position in next_tokens(plain, prompt, 2)]
        assert [[token for token, _ in top] for top in event.prompt_top_logprobs[1:]] == likeliest[:-1]


def test_logits_scores_and_attention_maps(runner: Runner) -> None:
    line, plain = PROMPTS[0] + PROMPTS[1], tiny_runner(seed=2)
    logits = all_logits(runner, line)
    np.testing.assert_allclose(logits, all_logits(plain, line), atol=1e-4)
    stays = all_logits(runner, line, host=False)
    assert isinstance(stays, runner.backend.xp.ndarray) and np.array_equal(
        runner.backend.sampler.to_host(stays), logits
    )
    np.testing.assert_allclose(score_tokens(runner, line)[1:], score_tokens(plain, line)[1:], atol=1e-4)
    np.testing.assert_allclose(attention_maps(runner, line, 1), attention_maps(plain, line, 1), atol=1e-5)
    ours, theirs = next_tokens(runner, line, 2), next_tokens(plain, line, 2)
    assert [[token for token, _ in p.next] for p in ours] == [[token for token, _ in p.next] for p in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_vectors_stand_in_the_place_of_tokens(storage: str, device: RecordingDevice) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
    runner, plain = runner_on(CudaBackend(device, device.recorder, storage, max_batch_size=4)), tiny_runner(seed=2)
    width = plain.model.embedding.tokens.shape[1]
    rows = np.random.default_rng(1).standard_normal((7, width)).astype(np.float32)
    expected = all_logits(plain, [0] * 7, embeddings=rows)
    assert np.abs(expected - all_logits(plain, [0] * 7)).max() > 0.1
    most = 1e-4 if storage == "float32" else 0.15 * expected.std()
    np.testing.assert_allclose(all_logits(runner, [0] * 7, embeddings=rows), expected, rtol=0, atol=most)


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "most"), [("float16", 0.02), ("bfloat16", 0.15)])
def test_sixteen_bits_stay_near_the_reference(storage: str, most: float, device: RecordingDevice) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
    backend = CudaBackend(device, device.recorder, storage, max_batch_size=4)
    runner = runner_on(backend)
    expected = all_logits(tiny_runner(seed=2), PROMPTS[0])
    error = np.abs(all_logits(runner, PROMPTS[0]) - expected).max()
    assert 0 < error < most * expected.std(), "rounding shows, and no more"
    batch, alone = generate(runner, PROMPTS[:3], max_new_tokens=6), generate(runner, PROMPTS[:1], max_new_tokens=6)
    assert len(batch[0]) == len(alone[0]) == 6
    assert runner.cache.storage.keys.dtype.name == storage


def test_a_tree_of_guesses_is_seen_branch_by_branch(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel: nothing is the reference's."""
    monkeypatch.delattr("minillm.backends.cuda.attention.attend_by_reference")

    def logits(runner: Runner) -> np.ndarray:
        sequences = [TokenSequence([*PROMPTS[1], 7, 8, 9, 8, 7], tree=(-1, 0, -1, 2, 0)), TokenSequence(PROMPTS[2])]
        counts = [sequence.pending for sequence in sequences]
        return runner.backend.sampler.to_host(runner.forward(sequences, counts, rows=range(sum(counts))).logits)

    np.testing.assert_allclose(logits(runner), logits(tiny_runner(seed=2)), atol=1e-4)


def test_a_pass_after_one_with_a_tree_finds_its_pages(device: RecordingDevice) -> None:
    """The second has the same shape and pages, so that the table is the one of before, which may lie elsewhere now."""
    buffers = batches.BatchBuffers(device)
    for tree in ((), (-1, 0, -1), ()):
        sequence = TokenSequence([5, 6, 7, 8, 9], pages=[3, 1], tree=tree)
        sent, _ = buffers.fill(Batch.of([sequence], [5], 4), [4], 4)
        assert sent.block_table[0, :2].tolist() == [3, 1]
        assert (sent.trees is not None) == bool(tree)
        if tree:
            assert sent.trees.seen[-3:, 0].tolist() == [0b001, 0b011, 0b100] and sent.trees.sizes.tolist() == [3]


def test_the_likeliest_tokens_are_those_of_the_logits_at_hand(runner: Runner) -> None:
    """The logits are a pass's that nobody recorded, where the last one's lay, and a copy of some rows."""
    runner.prefill(TokenSequence(PROMPTS[4][::-1]))
    with counting(runner):
        output = runner.prefill(TokenSequence(PROMPTS[4]))
        expected = logits_of(tiny_runner(seed=2), PROMPTS[4])[-1].argmax()
        assert runner.backend.sampler.argmax(output.logits).tolist() == [expected]
    batch = runner.forward(
        [TokenSequence(PROMPTS[0]), TokenSequence(PROMPTS[4])], [len(PROMPTS[0]), len(PROMPTS[4])]
    ).logits
    argmax = runner.backend.sampler.argmax
    assert argmax(batch[1:].copy()).tolist() == argmax(batch)[1:].tolist() == [expected]


def test_the_square_of_relu_is_a_launch_after_a_product_and_within_a_gate(backend: CudaBackend) -> None:
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((3, 12), np.float32), rng.standard_normal((3, 10), np.float32)
    weight = Weight("", rng.standard_normal((10, 12), np.float32), rng.standard_normal(10, np.float32))
    for add in (None, residual):
        expected = NumpyBackend().linear(x, weight, activation="relu2", residual=add)
        found = backend.linear(x, weight, activation="relu2", residual=add)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(backend.glu(x, "relu2"), np.maximum(x[:, :6], 0) ** 2 * x[:, 6:], rtol=1e-6)


def test_a_row_that_is_no_distribution_is_not_drawn_from(backend: CudaBackend) -> None:
    logits = np.zeros((3, 96), np.float32)
    logits[1, 5] = np.nan
    keys = Keys(np.zeros(3, np.uint64), np.arange(3), np.arange(3))
    with pytest.raises(NumericalError, match="row 1 of the logits cannot be sampled from"):
        backend.sampler.sample(logits, keys, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_the_host_waits_once_for_all_chunks_of_a_prompt(runner: Runner, device: RecordingDevice) -> None:
    """So while the device computes one chunk, the host launches the next."""
    prompt = [1 + i % 90 for i in range(45)]
    generate(runner, [prompt], chunk=10, max_new_tokens=1)
    assert device.waits == 1


def test_a_prompt_alone_is_computed_in_larger_chunks_than_one_beside_others(backend: CudaBackend) -> None:
    assert Limits.of(backend.memory, 8) == Limits(8, 512, 2048)
    assert Limits.of(backend.memory, 8, 4096) == Limits(8, 4096, 4096)


# --- the decode step --------------------------------------------------------------------------------------------------


def decode(runner: Runner, sequences: list[TokenSequence]) -> Output:
    for sequence in sequences:
        sequence.token_ids.append(5)
    return runner.decode(sequences)


def test_a_decode_step_reserves_nothing_launches_the_same_and_waits_once(
    runner: Runner, device: RecordingDevice
) -> None:
    sequences = [TokenSequence(list(prompt)) for prompt in PROMPTS[:3]]
    for sequence in sequences:
        runner.prefill(sequence)
    launched = []
    for step in range(6):
        device.recorder.launches.clear()
        device.reserved.clear()
        waits = device.waits
        assert decode(runner, sequences).logits.shape == (3, 96)
        launched.append(
            [(launch.name, launch.grid, launch.block, addresses(launch.args)) for launch in device.recorder.launches]
        )
        assert device.waits == waits + 1
        assert not (step and device.reserved)
    assert launched[2:] == launched[1:-1]
    plain = ["layer_norm", "gemv_fma", "store_kv", "attention_decode", "gemv_fma", "layer_norm", "gemv_fma", "gemv_fma"]
    fused = ["layer_norm", "fused_fma", "attention_decode", "gemv_fma", "layer_norm", "gemv_fma", "gemv_fma"]
    for found, layer in zip(launched[:2], (plain, fused), strict=True):
        expected = ["embed", *layer * 2, "layer_norm", "gemv_fma", "best_of_chunks", "take_best"]
        assert [name for name, *_ in found] == expected


def addresses(args: Sequence[Any]) -> list[int]:
    """The addresses of the arguments that are arrays, and the values of the others."""
    return [arg.ctypes.data if isinstance(arg, np.ndarray) else arg.item() for arg in args]


def test_a_step_with_something_that_has_no_kernel_is_not_recorded(
    runner: Runner, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.backends.cuda.attention.has_kernel", lambda *widths, **more: False)
    ours = generate(runner, PROMPTS[:3], max_new_tokens=6)
    assert not device.records
    for prompt, tokens, expected in zip(
        PROMPTS, ours, generate(tiny_runner(seed=2), PROMPTS[:3], max_new_tokens=6), strict=False
    ):
        assert_same_tokens(tokens, expected, scores_after(prompt))


def test_attention_in_a_variant_without_a_kernel_is_the_references(runner: Runner, device: RecordingDevice) -> None:
    plain = tiny_runner(seed=2)
    slopes = Weight("", np.linspace(0.5, 0.1, plain.model.config.num_heads, dtype=np.float32))
    for backend in (runner.backend, plain.backend):
        attend = backend.attend
        backend.attend = lambda *given, own=attend: own(*given[:-1], replace(given[-1], softcap=0.5, slopes=slopes))
    sequences = TokenSequence(list(PROMPTS[0])), TokenSequence(list(PROMPTS[0]))
    for token in (5, 6, 7, 8):
        ours, theirs = (r.forward([s], [s.pending]).logits for r, s in zip((runner, plain), sequences, strict=True))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        for sequence in sequences:
            sequence.token_ids.append(token)
    assert not device.records


def test_more_sequences_than_were_foreseen_are_computed_as_they_come(
    device: RecordingDevice,
) -> None:
    backend = CudaBackend(device, device.recorder, "float32", max_batch_size=2)
    ours = generate(runner_on(backend), PROMPTS[:3], max_new_tokens=4)
    assert ours == generate(tiny_runner(seed=2), PROMPTS[:3], max_new_tokens=4)
    assert not device.records


def test_a_pass_may_want_no_logits(runner: Runner, device: RecordingDevice) -> None:
    for _ in range(3):
        assert runner.forward([TokenSequence([5])], [1], rows=[]).logits.shape == (0, 96)
    assert not device.records


def test_recorded_steps_of_all_sizes_share_the_memory_of_the_largest(
    backend: CudaBackend, device: RecordingDevice
) -> None:
    """One that has it grow moves it: what was recorded before is recorded anew when it runs next."""
    runner, expected = runner_on(backend), tiny_runner(seed=2)

    def run(prompts: list[list[int]]) -> tuple[int, int]:
        """Recordings so far, and bytes of results."""
        assert generate(runner, prompts, max_new_tokens=5) == generate(expected, prompts, max_new_tokens=5)
        ((scratch, _),) = backend.memory._scratch.values()
        return len(device.records), scratch.nbytes

    (one, few), (two, more), (again, same) = run(PROMPTS[:1]), run(PROMPTS[:2]), run(PROMPTS[:1])
    assert (one, two, again) == (1, 2, 3)
    assert few < more == same
    assert run(PROMPTS[:2]) == run(PROMPTS[:1]) == (3, more)


def test_recorded_steps_go_with_their_runner(backend: CudaBackend) -> None:
    runner = runner_on(backend)
    generate(runner, PROMPTS[:1], max_new_tokens=4)
    before = backend.memory.use()
    assert backend.memory.recorded_bytes > 0
    del runner
    after = backend.memory.use()
    assert backend.memory.recorded_bytes == 0
    assert after.cache == 0 < before.cache
    assert after.workspace < before.workspace


def test_operations_are_counted_as_they_are_on_a_cpu(runner: Runner) -> None:
    def flops(runner: Runner) -> int:
        with counting(runner) as counted:
            generate(runner, PROMPTS[:2], max_new_tokens=3)
        return counted.total.flops

    generate(runner, PROMPTS[:2], max_new_tokens=5)  # a step that is recorded must still be seen
    assert flops(runner) == flops(tiny_runner(seed=2))
    assert type(runner.backend.sampler.host) is TokenSampler


@pytest.mark.parametrize("fields", [{}, {"do_sample": True, "seed": 4}, {"num_beams": 2}], ids=str)
def test_nan_in_one_requests_rows_ends_it_alone(backend: CudaBackend, fields: dict[str, Any]) -> None:
    """Behind recorded steps, and with pages that held NaN used again."""
    runner = runner_on(backend, pages=4)
    model: Any = runner.model
    model.embedding.positions.data[14] = np.nan
    short, long = request_for([5, 6, 7], max_new_tokens=6, **fields), request_for([9] * 8, max_new_tokens=9, **fields)
    [expected] = run(loop_of(target=runner), [short])
    for _ in range(2):
        loop = loop_of(target=runner)
        ids = [loop.add(request) for request in (short, long, short)]
        tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
        errors: dict[int, Any] = {}
        while loop.busy:
            for event in loop.step():
                tokens[event.request_id] += event.token_ids
                errors[event.request_id] = event.error
        assert tokens[ids[0]] == tokens[ids[2]] == expected[0].token_ids
        assert isinstance(errors[ids[1]], NumericalError)
        assert runner.cache.free_pages == 4


def test_rows_with_a_lora_adapter_are_numpys(backend: CudaBackend, runner: Runner, tmp_path: Path) -> None:
    """Steps with an adapter are not recorded; those before and after are."""
    folder, reference = write_adapter(tmp_path), tiny_runner(seed=2)
    for each, on in ((runner, backend), (reference, NumpyBackend())):
        each.adapters = {"it": load_adapter(folder, each.model.config, on)}
    for name in (None, "it", None):
        outputs = []
        for each in (runner, reference):
            lines = [TokenSequence([5, 6, 7], adapter=name), TokenSequence([9, 8], adapter=None)]
            each.prefill(lines[0])
            each.prefill(lines[1])
            for _ in range(3):
                for line in lines:
                    line.token_ids.append(11)
                outputs.append(each.backend.sampler.to_host(each.decode(lines).logits).copy())
            for line in lines:
                each.cache.free(line)
        np.testing.assert_allclose(outputs[:3], outputs[3:], rtol=0, atol=1e-4)
