"""Properties of every encoder-decoder: different paths through the engine give the same results. Needs no torch."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.numpy import NumpyBackend
from minillm.backends.operations import Backend
from minillm.batch import TokenSequence
from minillm.encoder_input import EncoderInput
from minillm.engine.scheduler import num_pages
from minillm.errors import NumericalError, ParameterError, PromptError
from minillm.measure.accounting.hardware import CHIPS
from minillm.measure.profiling import profile
from minillm.models import build_model, family_of, published_config, tensor_shapes
from minillm.reference.softmax import log_softmax
from minillm.runner.runner import Runner

from .. import tiny
from ..comparing import assert_same_tokens
from ..scheduling import STRATEGIES, Outcome, alone, check_books, loop_on, requests_of
from ..seq2seq import CASES, CONFIGS, GOLDEN_CASES, PARAMETERS, generate, logits_of, request_for, write_checkpoint
from ..tiny import Held, last_of_each_kind, loop_of, model_of, random_prompts, run, runner_of, tiny_tensors

SOURCES = random_prompts(5, seed=3, longest=30)
LINE = np.random.default_rng(5).integers(3, 96, 40).tolist()


def backends() -> list[Any]:
    from minillm.backends.cpu.backend import CpuBackend

    return [NumpyBackend, pytest.param(CpuBackend, marks=pytest.mark.slow)]


EACH_FAMILY = pytest.mark.parametrize(
    "raw",
    [
        pytest.param(case, marks=pytest.mark.slow if case in GOLDEN_CASES else pytest.mark.exhaustive)
        if case != CASES[0]
        else case
        for case in CASES
    ],
    indirect=True,
    ids="-".join,
)
"""The first configuration of each family, where no other has more to show"""


@pytest.fixture(params=[CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])], ids="-".join)
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    family, name = request.param
    return CONFIGS[family][name]


@pytest.fixture(params=backends(), ids=lambda kind: kind.name)
def runner(raw: dict[str, Any], request: pytest.FixtureRequest) -> Runner:
    backend: Backend = request.param()
    return runner_of(model_of(raw, backend=backend), pages=128, page_size=8, backend=backend)


def assert_same(runner: Runner, sources: list[list[int]], ours: list[list[int]], expected: list[list[int]]) -> None:
    start = [runner.model.config.decoder_start_token_id]
    for source, a, b in zip(sources, ours, expected, strict=True):
        assert_same_tokens(a, b, lambda tokens, s=source: logits_of(runner, s, start + tokens)[-1])


@pytest.mark.longer
def test_cached_naive_chunked_and_single_sources_are_the_same(runner: Runner) -> None:
    """A ragged batch: no source sees another one."""
    single = [generate(runner, [source], max_new_tokens=12)[0] for source in SOURCES]
    assert len({tuple(line) for line in single}) > 3, "what is said depends on the source"
    for fields in ({}, {"use_cache": False}, {"chunk": 3}):
        assert_same(runner, SOURCES, generate(runner, SOURCES, max_new_tokens=12, **fields), single)
    assert runner.cache.free_pages == runner.cache.num_pages


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_pages_of_any_size_give_the_same_logits(raw: dict[str, Any], page_size: int) -> None:
    model = model_of(raw)
    sequence, apart = TokenSequence(LINE[:9], encoder_input=EncoderInput(LINE)), runner_of(model, page_size=page_size)
    rows = []
    while sequence.pending:  # by threes
        rows.append(apart.forward([sequence], [3], rows=range(3)).logits.copy())
    np.testing.assert_allclose(np.concatenate(rows), logits_of(apart, LINE, LINE[:9]), rtol=0, atol=1e-4)


@pytest.mark.longer
@pytest.mark.sampled(2)
@EACH_FAMILY
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_lookup_num_tokens": 3},
        {"lookahead_window": 3},
        {"penalty_alpha": 0.0, "top_k": None},
        {"decoder_prompt": [7, 8, 9]},
    ],
    ids=str,
)
def test_guesses_change_nothing(runner: Runner, fields: dict[str, Any]) -> None:
    fields = {name: value for name, value in fields.items() if value is not None}
    prompt = {"decoder_prompt": fields["decoder_prompt"]} if "decoder_prompt" in fields else {}
    ours, plain = (generate(runner, SOURCES, max_new_tokens=12, **each) for each in (fields, prompt))
    start = [runner.model.config.decoder_start_token_id, *prompt.get("decoder_prompt", ())]
    for source, a, b in zip(SOURCES, ours, plain, strict=True):
        assert_same_tokens(a, b, lambda tokens, s=source: logits_of(runner, s, start + tokens)[-1])


@EACH_FAMILY
def test_beams_and_samples_share_their_source(runner: Runner) -> None:
    """The encoder runs once for each request, whatever its width, and its pages are counted once."""
    for fields in ({"num_beams": 4, "num_return_sequences": 4}, {"do_sample": True, "num_return_sequences": 3}):
        encoded: list[int] = []
        encode = type(runner.model).encode

        def counting(
            model: Any, backend: Any, batch: Any, cache: Any, to: list[int] = encoded, run: Any = encode
        ) -> Any:
            to.append(batch.num_tokens)
            return run(model, backend, batch, cache)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(runner.model), "encode", counting)
            loop = loop_of(target=runner)
            request = request_for(LINE, max_new_tokens=10, **fields)
            loop.add(request)
            most = 0
            while loop.busy:
                loop.step_or_raise()
                most = max(most, runner.cache.num_pages - runner.cache.free_pages)
        assert encoded == [len(LINE)]
        assert 5 < most <= 5 + 4 * 2  # 40 tokens of the source, and 11 of each sequence, in pages of 8
    assert runner.cache.free_pages == runner.cache.num_pages


@pytest.mark.slow
@EACH_FAMILY
def test_a_recorded_step_takes_sequences_of_one_source_and_of_several(raw: dict[str, Any]) -> None:
    """Four sequences are one kind of step, whether they are four beams, two of each source, or of four sources."""
    from minillm.backends.cpu.backend import CpuBackend

    recorded, plain = (
        runner_of(model_of(raw, backend=backend), pages=128, page_size=8, backend=backend)
        for backend in (CpuBackend(), NumpyBackend())
    )
    for beams, count in [(4, 1), (1, 4), (2, 2), (4, 1), (1, 4)]:
        few = SOURCES[:count]
        ours, expected = (generate(each, few, max_new_tokens=12, num_beams=beams) for each in (recorded, plain))
        if beams == 1:
            assert_same(plain, few, ours, expected)
        else:
            assert ours == expected


def test_pages_of_a_source_are_counted_once() -> None:
    runner = runner_of(model_of(CONFIGS["t5"]["original"]), page_size=8)
    source = EncoderInput(list(range(3, 23)))
    lines = [TokenSequence([0] * 9, encoder_input=source) for _ in range(2)]
    for line in lines:
        runner.cache.reserve(line, 9)
    assert num_pages(lines) == 2 + 2 + 3 == runner.cache.num_pages - runner.cache.free_pages
    runner.cache.free(lines[0])
    assert num_pages(lines) == 2 + 3
    runner.cache.free(lines[1])
    assert runner.cache.free_pages == runner.cache.num_pages


@pytest.mark.slow
@EACH_FAMILY
def test_a_preempted_request_reads_its_source_again(runner: Runner) -> None:
    roomy = generate(runner, SOURCES, max_new_tokens=30)
    apart = runner_of(runner.model, pages=15, page_size=8, backend=runner.backend)
    loop = loop_of(target=apart, headroom=1)
    start = runner.model.config.decoder_start_token_id
    requests = [request_for(source, start=start, max_new_tokens=30) for source in SOURCES]
    ours = [results[0].token_ids for results in run(loop, requests)]
    assert loop.stats.preemptions
    assert_same(runner, SOURCES, ours, roomy)
    assert apart.cache.free_pages == apart.cache.num_pages


def test_a_source_with_nan_ends_its_request_alone(raw: dict[str, Any]) -> None:
    """The error names the encoder's operation."""
    family, tensors = family_of(raw), dict(tiny_tensors(raw))
    embedding = family.NAMES.embedding
    values = tensors[embedding].load()
    values[95] = np.nan
    tensors[embedding] = Held(values)
    model = build_model(family.read_config(raw), tensors, NumpyBackend())
    loop = loop_of(target=runner_of(model))
    ids = [loop.add(r) for r in (request_for([5, 95, 6]), request_for([5, 6]))]
    errors: dict[int, Any] = {}
    while loop.busy:
        for event in loop.step():
            errors[event.request_id] = event.error
    assert isinstance(errors[ids[0]], NumericalError)
    assert "embed" in str(errors[ids[0]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "which", [last_of_each_kind, pytest.param(list, marks=pytest.mark.exhaustive)], ids=["last", "all"]
)
def test_every_weight_has_a_say(raw: dict[str, Any], which: Callable[[Iterable[str]], list[str]]) -> None:
    """Each tensor of the table, changed alone, changes the logits: none is loaded and left out."""
    family, tensors = family_of(raw), {name: Held(tensor.load()) for name, tensor in tiny_tensors(raw).items()}
    config = family.read_config(raw)
    plain = logits_of(runner_of(model_of(raw)), LINE, LINE[:9])
    for name in which(tensor_shapes(config)):
        changed = tensors | {name: Held(tensors[name].values * np.float32(1.1))}
        logits = logits_of(runner_of(build_model(config, changed, NumpyBackend())), LINE, LINE[:9])
        assert np.abs(logits - plain).max() > 0 or "k_proj.bias" in name, name


@pytest.mark.parametrize("shape", PARAMETERS)
def test_published_shapes_have_their_number_of_parameters(shape: str) -> None:
    config = published_config(shape)
    assert sum(math.prod(size) for size in tensor_shapes(config).values()) == PARAMETERS[shape]


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(write_checkpoint(tmp_path_factory.mktemp("t5")), backend="numpy", max_batch_size=4) as engine:
        yield engine


def test_text_goes_to_the_encoder_and_the_decoders_comes_back(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    text = "Once upon a time"
    answer = engine.generate(text, max_new_tokens=6)
    assert answer.prompt_token_ids == tokenizer.encode(text)
    assert answer.text == tokenizer.decode(answer.token_ids)
    by_hand = generate(engine.runner, [tokenizer.encode(text)], vocab_size=512, max_new_tokens=6)
    assert answer.token_ids == by_hand[0]
    assert "".join(event.text for event in engine.stream(text, max_new_tokens=6)) == answer.text


def test_a_decoder_prompt_is_text_or_token_ids_after_the_start_token(engine: Engine) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(" there was", add_special_tokens=False)
    [by_text, by_ids, with_start] = (
        engine.generate("Once", decoder_prompt=given, max_new_tokens=5) for given in (" there was", ids, [0, *ids])
    )
    assert by_text.token_ids == by_ids.token_ids == with_start.token_ids
    assert engine.request("Once", decoder_prompt=ids).prompt_ids == [0, *ids]
    assert engine.request("Once", decoder_prompt="", decoder_start_token_id=7).prompt_ids == [7]
    with pytest.raises(PromptError, match="token id 512 is outside the vocabulary of 512"):
        engine.generate("Once", decoder_prompt=[512])


def test_the_same_decoder_prompt_after_another_source_is_computed_anew() -> None:
    """A prefix cache does not share it: its keys and values depend on the source."""
    runner = runner_of(model_of(CONFIGS["t5"]["gated, untied"]), page_size=4)
    loop = loop_of(target=runner, prefix_cache=True)
    prompt, start = [5, 6, 7, 8, 9, 10], [runner.model.config.decoder_start_token_id]
    for source in ([11, 12, 13], [14, 15, 16, 17]):
        [[result]] = run(loop, [request_for(source, decoder_prompt=prompt, max_new_tokens=1, logprobs=True)])
        logits = logits_of(runner, source, start + prompt)[-1:]
        assert result.log_probs == pytest.approx([float(log_softmax(logits, np)[0, result.token_ids[0]])], abs=1e-4)
    assert not runner.cache.cached_pages


def test_score_and_forward_take_a_source(engine: Engine) -> None:
    source, answer = [5, 6, 7, 8], engine.generate([5, 6, 7, 8], max_new_tokens=6, logprobs=True)
    score = engine.score(answer.token_ids, source=source)
    assert score.token_ids == [0, *answer.token_ids]
    assert score.logprobs[0] is None
    np.testing.assert_allclose(score.logprobs[1:], answer.completions[0].logprobs, rtol=0, atol=1e-4)
    logits = engine.forward(answer.token_ids, source=source)
    assert logits[:-1].argmax(axis=1).tolist() == answer.token_ids
    other = engine.forward(answer.token_ids, source=[9, 8])
    assert np.abs(other - logits).max() > 1e-2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.score([5]), "source is missing: the model's encoder reads it"),
        (lambda engine: engine.attention([5]), "attention is not offered with an encoder-decoder"),
        (lambda engine: engine.generate([5], echo=True), "echo is not offered with an encoder-decoder"),
    ],
    ids=["score", "attention", "echo"],
)
def test_what_is_not_offered_is_refused_in_one_line(engine: Engine, call: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as error:
        call(engine)
    assert "\n" not in str(error.value)


def test_sources_are_refused_without_an_encoder() -> None:
    with Engine(backend="numpy") as engine:
        with pytest.raises(ParameterError, match="source has no effect: the model has no encoder"):
            engine.score("one", source="two")
        with pytest.raises(ParameterError, match="decoder_prompt='a' has no effect without an encoder-decoder"):
            engine.generate("one", decoder_prompt="a")


def test_an_empty_source_and_one_that_is_too_long_are_refused(engine: Engine) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        engine.request([])
    with pytest.raises(PromptError, match=f"the prompt has {4096 + 1} tokens; the context holds 4096"):
        engine.generate([5] * 4097)


def test_a_profile_has_the_encoders_pass_in_the_prefill(engine: Engine) -> None:
    hardware = next(iter(CHIPS.values()))
    steps = profile(engine, [[*range(5, 300)]], max_new_tokens=3, repeat=1, progress=False, hardware=hardware).steps
    attends = [sum(call.operation == "attend" for call in step.calls) for step in steps]
    assert attends == [3 + 2 * 2, 2 * 2, 2 * 2]  # three layers of the encoder, two of the decoder with two each


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("role", ["draft", "amateur"])
def test_helpers_with_an_encoder_read_the_source_too(role: str, tmp_path: Path) -> None:
    """A draft of the same model guesses all tokens; an amateur that is a decoder alone is refused."""
    folder = write_checkpoint(tmp_path / "t5")
    with Engine(folder, backend="numpy") as engine:
        plain = engine.generate([5, 6, 7, 8], max_new_tokens=12)
    helper = folder if role == "draft" else write_checkpoint(tmp_path / "other", "t5", "other sizes")
    with Engine(folder, backend="numpy", **{role: helper}) as engine:
        ours = engine.generate([5, 6, 7, 8], max_new_tokens=12)
        if role == "draft":
            assert ours.token_ids == plain.token_ids
            assert engine.stats.speculation.accepted == engine.stats.speculation.judged > 0
        else:
            assert len(ours.token_ids) == 12
        for runner in (engine.runner,):
            assert runner.cache.free_pages == runner.cache.num_pages
    with pytest.raises(ParameterError, match="should both have an encoder, or neither"):
        Engine(folder, backend="numpy", **{role: tiny.write_checkpoint(tmp_path / "opt")})


# --- preemption -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["numpy", pytest.param("cpu", marks=pytest.mark.slow)])
def helped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with a draft."""
    folders = [write_checkpoint(tmp_path_factory.mktemp("t5"), "t5", name) for name in ("gated, untied", "other sizes")]
    with Engine(folders[0], backend=request.param, draft=folders[1], max_batch_size=1) as engine:
        yield engine


KINDS = [kind for kind in STRATEGIES if "adapter" not in kind and kind.split()[0] not in ("guidance", "dola")]
"""Kinds of requests that an encoder-decoder takes without an adapter"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind", [kind if kind in ("beams", "draft") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_every_strategy_gives_the_same_if_it_is_preempted(helped: Engine, kind: str) -> None:
    """Again and again, in a cache with no page more than it may need; the books of pages are in order at each step."""
    request = requests_of(helped, kind, [40, 41, 42, 43, 44, 45, 46], max_new_tokens=14, seed=3)
    expected, _ = alone(helped, request)
    roomy = loop_on(helped, 99)
    roomy.add(request)
    loop = loop_on(helped, roomy.scheduler.waiting[0].max_pages, budget=5)
    outcome, steps, last = Outcome(), 0, []
    loop.add(request)
    while loop.busy:
        for event in loop.step():
            outcome.add(event)
        check_books(loop)
        steps += 1
        fed = [list(sequence.token_ids) for run in loop.scheduler.running for sequence in run.fed]
        if steps % 3 == 0 and fed != last:  # it has gone on since
            last = fed
            for run in list(loop.scheduler.running):
                loop.scheduler.preempt(run)
            check_books(loop)
            assert all(runner.cache.free_pages == runner.cache.num_pages for runner in loop.runners.values())
    assert outcome == expected
    assert loop.stats.preemptions


@pytest.mark.slow
def test_many_requests_of_every_kind_on_a_small_cache(helped: Engine) -> None:
    """Side by side, what each gives alone."""
    rng = np.random.default_rng(4)
    requests = [
        requests_of(helped, kind, rng.integers(3, 500, rng.integers(1, 30)).tolist(), max_new_tokens=10, seed=3)
        for kind in KINDS
    ]
    loop = loop_on(helped, 45, budget=8, headroom=1)
    ids = {loop.add(request): request for request in requests}
    outcomes = {request_id: Outcome() for request_id in ids}
    while loop.busy:
        for event in loop.step():
            outcomes[event.request_id].add(event)
        check_books(loop)
    for request_id, request in ids.items():
        assert outcomes[request_id] == alone(helped, request)[0]
    assert all(runner.cache.free_pages == runner.cache.num_pages for runner in loop.runners.values())
