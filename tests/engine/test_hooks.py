"""Rows of a text inside the model, watched and changed: by every way through the engine the same. Needs no torch."""

import asyncio
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import AsyncEngine, Engine
from minillm.decoding.event import Event
from minillm.decoding.hooks import join_watched
from minillm.decoding.strategy import Request
from minillm.engine.loop import StepLoop
from minillm.errors import EngineStateError, NumericalError, ParameterError
from minillm.measure.accounting import watched_bytes
from minillm.reference.softmax import log_softmax

from ..families import CONFIGS
from ..scheduling import STRATEGIES, check_books, engine_with_helpers, loop_on, requests_of
from ..seq2seq import write_checkpoint
from ..tiny import loop_of, model_of, request_for, runner_of
from .test_ahead import AheadMemory

PROMPT = "A list of colors: red,"
IDS = [40, 41, 42, 43, 44, 45, 46]
QUICK = ("beams", "lookahead", "draft samples", "naive")
WATCHED = ("blocks.1.residual", "blocks.0.attention.pattern", "final")


@pytest.fixture(scope="module", params=[pytest.param("numpy", marks=pytest.mark.slow), "cpu"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(backend=request.param, prefix_cache=True) as engine:
        yield engine


@pytest.fixture(scope="module", params=["numpy", pytest.param("cpu", marks=pytest.mark.slow)])
def helped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_with_helpers(request.param, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def twice(array: Any, place: Any) -> Any:
    return 2 * array


def silent(array: Any, place: Any) -> Any:
    return 0 * array


# --- what is watched --------------------------------------------------------------------------------------------------


def test_each_point_follows_from_those_before_it(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=5, watch=["**"])
    ids = [*answer.prompt_token_ids, *answer.token_ids[:-1]]
    rows, names = answer.watched, engine.names()
    assert [*rows] == [*names]
    for name, shape in names.items():
        assert rows[name].shape == tuple(len(ids) if size in ("T", "S") else size for size in shape)
    stream = rows["embedding"]
    for i in range(engine.config.num_layers):
        block = {name.removeprefix(f"blocks.{i}."): array for name, array in rows.items()}
        middle = stream + block["attention.out"]
        np.testing.assert_allclose(block["residual_mid"], middle, atol=1e-5)
        stream = middle + block["mlp.out"]
        np.testing.assert_allclose(block["residual"], stream, atol=1e-5)
        pattern, v = block["attention.pattern"], block["attention.v"]
        np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-5)
        assert not np.triu(pattern.swapaxes(0, 1), 1).any()
        np.testing.assert_allclose(np.einsum("ths,shd->thd", pattern, v), block["attention.z"], atol=1e-5)
        scores = np.einsum("thd,shd->ths", block["attention.q"], block["attention.k"]) / np.sqrt(v.shape[-1])
        seen = np.where(np.tri(len(ids), dtype=bool)[:, None], scores, -np.inf)
        np.testing.assert_allclose(np.exp(log_softmax(seen, np)), pattern, atol=1e-5)
    np.testing.assert_allclose(rows["final"], engine.hidden_states(ids), atol=1e-4)
    np.testing.assert_allclose(rows["logits"], engine.forward(ids), atol=1e-4)


def test_the_events_of_a_stream_have_the_same_rows(engine: Engine) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 6, "watch": [*WATCHED, "logits"]}
    events = [*engine.stream(PROMPT, **fields)]
    whole = engine.generate(PROMPT, **fields)
    prompt = whole.prompt_tokens
    assert [len(event.watched["final"]) for event in events if event.watched] == [prompt, 1, 1, 1, 1, 1]
    for joined in (join_watched([event.watched for event in events if event.watched]), Event.joined(events).watched):
        for name in fields["watch"]:
            np.testing.assert_allclose(joined[name], whole.watched[name], atol=1e-4)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in STRATEGIES])
def test_every_strategy_reports_the_rows_of_the_tokens_it_returns(helped: Engine, kind: str) -> None:
    request = requests_of(helped, kind, IDS, max_new_tokens=9, seed=3)
    lora = {"lora": "one"} if "adapter" in kind else {}
    for loop in (loop_on(helped, 40, size=16, page_size=64), loop_on(helped, 60, budget=5)):
        plain, watched = run(loop_on(helped, 40, size=16, page_size=64), request), run(loop, hooked(helped, request))
        assert {i: tokens for i, (tokens, _) in watched.items()} == {i: tokens for i, (tokens, _) in plain.items()}
        for tokens, rows in watched.values():
            ids = [*IDS, *tokens[:-1]]
            expected = helped.generate(ids, max_new_tokens=1, watch=WATCHED, **lora).watched
            for name in WATCHED:
                assert rows[name].shape == expected[name].shape
                np.testing.assert_allclose(rows[name], expected[name], atol=1e-4)


@pytest.mark.parametrize("kind", ["beams", "samples", pytest.param("lookahead", marks=pytest.mark.slow)])
def test_a_preempted_request_reports_the_same_rows(helped: Engine, kind: str) -> None:
    request = hooked(helped, requests_of(helped, kind, IDS, max_new_tokens=9, seed=3))
    expected, loop = run(loop_on(helped, 99), request), loop_on(helped, 99, budget=5)
    last: list[list[int]] = []

    def disturb() -> None:
        nonlocal last
        fed = [list(sequence.token_ids) for run in loop.scheduler.running for sequence in run.fed]
        if fed != last and all(run.started for run in loop.scheduler.running):  # it has gone on since
            last = fed
            for running in list(loop.scheduler.running):
                loop.scheduler.preempt(running)

    assert_same(run(loop, request, disturb), expected)
    assert loop.stats.preemptions >= 2


def hooked(engine: Engine, request: Request, functions: Any = None) -> Request:
    return replace(request, hooks=engine.runner.hooks.read(WATCHED, functions))


def run(loop: StepLoop, request: Request, between: Any = None) -> dict[int, tuple[list[int], dict[str, np.ndarray]]]:
    """The tokens and the watched rows of each result."""
    loop.add(request)
    events: dict[int, list[Event]] = {}
    while loop.busy:
        for event in loop.step_or_raise():
            events.setdefault(event.index, []).append(event)
        check_books(loop)
        if between is not None:
            between()
    joined = {index: Event.joined(own) for index, own in events.items()}
    return {index: ([*event.token_ids], event.watched or {}) for index, event in joined.items()}


def assert_same(ours: dict[int, Any], expected: dict[int, Any]) -> None:
    assert {i: tokens for i, (tokens, _) in ours.items()} == {i: tokens for i, (tokens, _) in expected.items()}
    for index, (_, rows) in ours.items():
        for name in WATCHED:
            np.testing.assert_allclose(rows[name], expected[index][1][name], atol=1e-4)


def test_the_encoder_s_rows_come_too(tmp_path: Path) -> None:
    with Engine(write_checkpoint(tmp_path)) as engine:
        answer = engine.generate(PROMPT, max_new_tokens=4, num_beams=2, watch=["**"])
        assert [*answer.watched] == [*engine.names()]
        assert len(answer.watched["encoder.blocks.0.residual"]) == answer.prompt_tokens
        assert answer.watched["blocks.0.cross.pattern"].shape[-1] == answer.prompt_tokens
        assert len(answer.watched["final"]) == len(answer.token_ids)
        other = engine.generate(PROMPT, max_new_tokens=4, num_beams=2, hooks={"encoder.final": silent}, watch=["final"])
        assert np.abs(other.watched["final"][0] - answer.watched["final"][0]).max() > 1e-3


# --- what is changed --------------------------------------------------------------------------------------------------


@pytest.mark.longer
def test_a_change_reaches_what_follows_and_nothing_before(engine: Engine) -> None:
    names = [*engine.names()]
    plain = engine.generate(PROMPT, max_new_tokens=1, watch=["**"]).watched
    for changed in (name for name in names if name.startswith(("embedding", "blocks.2.", "final", "logits"))):
        rows = engine.generate(PROMPT, max_new_tokens=1, watch=["**"], hooks={changed: twice}).watched
        if changed.endswith(("pattern", "residual_mid", "mlp.in", "z", "out", "residual", "final", "logits", "hidden")):
            np.testing.assert_allclose(rows[changed], 2 * plain[changed], rtol=1e-5, atol=1e-6)
        place = names.index(changed)
        for name in names[:place]:
            np.testing.assert_allclose(rows[name], plain[name], atol=1e-5, err_msg=f"{changed} has changed {name}")
        different = [name for name in names[place + 1 :] if not np.allclose(rows[name], plain[name])]
        assert different or changed == "logits", changed


@pytest.mark.parametrize(
    "fields",
    [{"dola_layers": "low"}, {"guidance_scale": 1.5}, {"guidance_scale": 1.5, "num_beams": 2}],
    ids=["dola", "guidance", "guided beams"],
)
def test_a_change_reaches_passes_with_early_exits_or_two_texts(engine: Engine, fields: dict[str, Any]) -> None:
    plain = engine.generate(PROMPT, max_new_tokens=5, **fields)
    changed = engine.generate(
        PROMPT, max_new_tokens=5, watch="blocks.*.mlp.out", hooks={"blocks.*.mlp.out": silent}, **fields
    )
    assert len(changed.watched) == engine.config.num_layers and changed.token_ids != plain.token_ids
    assert all(not rows.any() for rows in changed.watched.values())


def test_experts_read_what_the_router_reads() -> None:
    runner = runner_of(model_of(CONFIGS["mixtral"]["two of four"]), pages=64)
    request = request_for(IDS, max_new_tokens=1)

    def rows(hook: Any) -> dict[str, np.ndarray]:
        inside = runner.hooks.read("blocks.1.**", {"blocks.1.mlp.in": hook})
        return run(loop_of(target=runner), replace(request, hooks=inside))[0][1]

    assert not rows(silent)["blocks.1.mlp.out"].any()  # they have no biases
    assert rows(lambda array, _: None)["blocks.1.mlp.out"].any()


@pytest.mark.parametrize("family", ["glm4_moe", "qwen2_moe"])
def test_a_shared_expert_has_a_point_and_reads_what_the_router_reads(family: str) -> None:
    runner = runner_of(model_of(next(iter(CONFIGS[family].values()))), pages=64)
    request = request_for(IDS, max_new_tokens=1)

    def rows(hook: Any) -> dict[str, np.ndarray]:
        inside = runner.hooks.read("blocks.1.**", {"blocks.1.mlp.in": hook})
        return run(loop_of(target=runner), replace(request, hooks=inside))[0][1]

    plain = rows(lambda array, _: None)
    parts = [plain[f"blocks.1.{point}"] for point in ("residual_mid", "experts.shared", "mlp.out")]
    np.testing.assert_allclose(np.sum(parts, axis=0), plain["blocks.1.residual"], rtol=1e-5, atol=1e-5)
    assert all(part.any() for part in parts)
    silenced = rows(silent)
    assert not silenced["blocks.1.experts.shared"].any() and not silenced["blocks.1.mlp.out"].any()


def test_functions_run_in_their_order_and_know_their_place(engine: Engine) -> None:
    places: list[Any] = []

    def note(array: Any, place: Any) -> None:
        places.append(place)
        array[...] = 0  # its own copy

    plain = engine.generate(PROMPT, max_new_tokens=3, watch=["blocks.1.mlp.out"])
    answer = engine.generate(
        PROMPT,
        max_new_tokens=3,
        watch=["blocks.1.mlp.out"],
        hooks={"blocks.1.mlp.out": note, "blocks.*.mlp.out": note},
    )
    assert answer.token_ids == plain.token_ids
    assert {place.name for place in places} == {f"blocks.{i}.mlp.out" for i in range(engine.config.num_layers)}
    ours = [place for place in places if place.layer == 1]
    assert len(ours) == 2 * 3
    positions = np.concatenate([place.positions for place in ours[::2]])
    assert positions.tolist() == [*range(answer.prompt_tokens + 2)]
    assert len({place.request for place in places}) == 1

    def one_more(array: Any, place: Any) -> Any:
        return array + 1

    both = engine.generate(
        PROMPT, max_new_tokens=1, watch=["final"], hooks={"final": silent, "fin*": one_more}
    ).watched["final"]
    np.testing.assert_array_equal(both, np.ones_like(both))


@pytest.mark.longer
def test_strangers_in_the_batch_are_neither_seen_nor_changed(engine: Engine) -> None:
    def run_beside(**inside: Any) -> tuple[list[Any], set[int]]:
        seen: set[int] = set()

        def change(array: Any, place: Any) -> Any:
            seen.add(place.request)
            return 2 * array

        fields: dict[str, Any] = {"max_new_tokens": 8, "logprobs": True, "eos_token_id": []}
        functions = {"blocks.*.attention.*": change, "blocks.*.mlp.*": change, "logits": change} if inside else None
        with Engine(backend=engine.runner.backend.name) as fresh:
            ids = [fresh.add(text, **fields) for text in ("Once upon a time", "Monday,")]
            ids.insert(1, fresh.add(PROMPT, hooks=functions, **fields))
            events: dict[Any, list[Event]] = {i: [] for i in ids}
            while fresh.busy:
                for event in fresh.step():
                    events[event.request_id].append(event)
        joined = [Event.joined(events[i]) for i in ids]
        assert seen <= {ids[1]}
        return [(event.token_ids, event.logprobs) for event in joined], seen

    (first, changed, last), seen = run_beside(hooks=True)
    (first_alone, plain, last_alone), _ = run_beside()
    assert seen
    assert changed != plain
    if engine.runner.backend.name == "cpu":  # to the last bit; NumPy's sums depend on the addresses of their arrays
        assert (first, last) == (first_alone, last_alone)
    for (tokens, logprobs), (tokens_alone, logprobs_alone) in ((first, first_alone), (last, last_alone)):
        assert tokens == tokens_alone
        np.testing.assert_allclose(logprobs, logprobs_alone, atol=1e-4)


def test_hooks_for_all_requests_equal_hooks_of_each_and_end_with_the_block(engine: Engine) -> None:
    def logits(**inside: Any) -> list[np.ndarray]:
        answers = engine.generate([PROMPT, "Monday,"], max_new_tokens=1, watch=["logits"], **inside)
        return [answer.watched["logits"] for answer in answers]

    def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
        for rows, expected in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(rows, expected, atol=1e-4)

    ids = engine.tokenizer.encode(PROMPT)
    plain, changed = logits(), logits(hooks={"blocks.*.mlp.out": silent})
    with engine.hooks({"blocks.*.mlp.out": silent}):
        assert_close(logits(), changed)
        with engine.hooks({"blocks.*.mlp.out": silent, "final": twice}):
            assert np.abs(engine.forward(ids) - changed[0]).max() > 1e-2
        assert_close([engine.forward(ids)], changed[:1])
    assert np.abs(plain[0] - changed[0]).max() > 1e-2
    assert_close(logits(), plain)
    assert_close([engine.forward(ids)], plain[:1])


@pytest.mark.longer
def test_a_request_with_hooks_takes_no_pages_of_others_and_leaves_none(engine: Engine) -> None:
    text = "The owl and the fox lived in a wood of oak trees. " * 4
    plain = engine.generate(text, max_new_tokens=4)
    assert engine.generate(text, max_new_tokens=4).cached_tokens > 0
    changed = engine.generate(text, max_new_tokens=4, hooks={"blocks.0.residual": silent}, watch=["final"])
    assert changed.cached_tokens == 0
    assert len(changed.watched["final"]) == changed.prompt_tokens + 3
    other = text.replace("owl", "cat")
    engine.generate(other, max_new_tokens=4, hooks={"blocks.0.residual": silent})
    with engine.hooks({"blocks.0.residual": silent}):
        engine.generate(other, max_new_tokens=4)
    answer = engine.generate(other, max_new_tokens=4)
    assert answer.cached_tokens < 8  # what the two texts have in common
    assert engine.generate(text, max_new_tokens=4) == plain


def test_a_request_that_watches_and_changes_nothing_is_an_ordinary_one(engine: Engine) -> None:
    engine.generate(PROMPT, max_new_tokens=2)
    for fields in ({"watch": []}, {"hooks": {}}, {"watch": (), "hooks": {}}):
        assert engine.request(PROMPT, **fields).hooks is None  # type: ignore[arg-type]
        before = engine.stats.cached_tokens
        assert engine.generate(PROMPT, max_new_tokens=2, **fields).watched == {}  # type: ignore[arg-type]
        assert engine.stats.cached_tokens > before


def test_without_hooks_no_code_of_theirs_runs(engine: Engine) -> None:
    modules = ("hooked_backend.py", "model_hooks.py")

    def calls(**fields: Any) -> set[str]:
        codes: set[str] = set()

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.endswith(modules):
                codes.add(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            engine.generate([PROMPT, "Monday,"], max_new_tokens=4, **fields)
        finally:
            sys.setprofile(None)
        return codes

    assert calls() == set()
    assert {"look", "attend"} <= calls(watch=["final"])
    assert calls() == set()


def test_a_pass_that_a_hook_ends_says_nothing_of_the_next(engine: Engine) -> None:
    """Its hidden states were not finite, and nobody has asked."""

    def overflow(array: Any, place: Any) -> Any:
        return np.full_like(array, 3.3e38)

    def failing(array: Any, place: Any) -> Any:
        raise ValueError("not here")

    expected = engine.generate([5], max_new_tokens=2).text
    hooks = {"blocks.*.mlp.out": overflow, "logits": failing}
    with engine.hooks(hooks), pytest.raises(ValueError, match="not here"):
        engine.generate(PROMPT, max_new_tokens=1)
    assert engine.generate([5], max_new_tokens=2).text == expected


@pytest.mark.longer
def test_a_step_is_not_launched_ahead_of_a_hook() -> None:
    with Engine(backend="numpy") as engine:
        memory = engine.runner.backend.memory
        ahead = AheadMemory()
        engine.runner.backend.memory = ahead
        loop = loop_on(engine, 40)
        engine.runner.backend.memory = memory
        for runner in loop.runners.values():
            runner.backend.memory = ahead
        loop = StepLoop(loop.runners, loop.scheduler.limits)
        request = engine.request(IDS, max_new_tokens=6)
        plain = run(loop, request)
        launched = ahead.launched
        assert launched > 0
        changed = run(loop, hooked(engine, request, {"blocks.*.mlp.out": silent}))
        assert ahead.launched == launched
        assert changed[0][0] != plain[0][0]
        for runner in loop.runners.values():
            runner.hooks.functions.update(runner.hooks.read((), {"blocks.*.mlp.out": silent}).functions)
        assert run(loop, request)[0][0] == changed[0][0]
        assert ahead.launched == launched


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_the_error_of_a_function_ends_its_request_alone(engine: Engine) -> None:
    def fails(array: Any, place: Any) -> Any:
        if 9 in place.positions:
            raise RuntimeError("nothing here")

    def narrow(array: Any, place: Any) -> Any:
        return array[:, :3]

    plain = engine.generate("Monday,", max_new_tokens=6)
    for function, message in (
        (fails, "nothing here"),
        (narrow, r"narrow at blocks.2.residual should return None or an array of numbers of shape \(8, 192\), found"),
    ):
        request = engine.add(PROMPT, max_new_tokens=6, hooks={"blocks.2.residual": function})
        stranger = engine.add("Monday,", max_new_tokens=6)
        tokens, errors = [], []
        while engine.busy:
            for event in engine.step():
                errors += [event] if event.error is not None else []
                tokens += event.token_ids if event.request_id == stranger else ()
        assert tokens == plain.token_ids
        assert [event.request_id for event in errors] == [request]
        with pytest.raises((RuntimeError, ParameterError), match=message):
            raise errors[0].error
    with pytest.raises(NumericalError, match=r"at blocks\.0\.residual returned NaN or infinity"):
        engine.generate(PROMPT, max_new_tokens=2, hooks={"blocks.0.residual": lambda array, _: array * np.nan})
    for kind in ("M8[s]", "U3", complex, [("a", "f4")]):
        with pytest.raises(ParameterError, match="should return None or an array of numbers"):
            engine.generate(
                PROMPT, max_new_tokens=1, hooks={"final": lambda array, _, k=kind: np.zeros(array.shape, k)}
            )


def test_a_change_that_is_not_returned_is_told_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def forgets(z: Any, place: Any) -> None:
        z[:, 0] = 0

    def reads(z: Any, place: Any) -> None:
        z.sum()

    for _ in range(2):
        engine.generate(PROMPT, max_new_tokens=2, hooks={"blocks.*.attention.z": forgets, "*": reads})
    [message] = caplog.messages
    assert re.search(r"the hook .*forgets changed its rows and returned None", message)


def test_an_error_of_a_function_notes_the_hook_and_its_point(engine: Engine) -> None:
    def fails(array: Any, place: Any) -> Any:
        raise RuntimeError("nothing here")

    with pytest.raises(RuntimeError) as error:
        engine.generate(PROMPT, max_new_tokens=2, hooks={"blocks.*.mlp.out": fails})
    with engine.hooks({"blocks.*.mlp.out": fails}), pytest.raises(RuntimeError) as shared:
        engine.forward(PROMPT)
    for raised in (error, shared):
        [note] = raised.value.__notes__
        assert re.fullmatch(r"in the hook .*fails at blocks\.0\.mlp\.out", note)


def test_hooks_of_another_model_are_refused(engine: Engine, helped: Engine) -> None:
    request = engine.request([5, 6, 7], watch=["blocks.0.residual", "blocks.5.residual"])
    with pytest.raises(ParameterError, match=r"for another model: this one has no point 'blocks\.5\.residual'"):
        helped.run([request])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"watch": ["blocks.9.residual"]},
            r"watch: 'blocks.9.residual' names no point .* blocks up to 5: embedding, blocks.\*.attention",
        ),
        (
            {"watch": "hook_resid_post"},
            r"names of Engine.names\(\) \(measure/README.md has TransformerLens's beside them",
        ),
        ({"watch": "blocks.*"}, "watch: 'blocks.*' names no point"),
        ({"watch": [3]}, "watch: 3 names no point"),
        ({"watch": 3}, "watch should be a list of names of points, found 3"),
        ({"hooks": ["final"]}, r"hooks should be a dict of names of points and functions, found \['final'\]"),
        ({"hooks": {"final": 3}}, r"hooks\['final'\] should be a function \(array, place\), found 3"),
        ({"hooks": {"final": lambda array: array}}, r"hooks\['final'\] should be a function \(array, place\), found"),
        ({"watch": {}}, "watch should be a list of names of points, found {}"),
        ({"watch": "**a" * 40}, "names no point"),
        ({"hooks": {"last": silent}}, "hooks: 'last' names no point"),
    ],
)
def test_a_mistake_is_named(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        engine.generate(PROMPT, **fields)


def test_a_closed_engine_says_so() -> None:
    engine = Engine()
    with pytest.raises(EngineStateError, match="closed"), engine.hooks({"final": silent}):
        engine.close()
        engine.generate(PROMPT)
    with pytest.raises(EngineStateError, match="closed"):
        engine.names()


def test_a_request_that_is_cut_off_has_what_was_computed(engine: Engine) -> None:
    answer = engine.generate("Once upon a time", max_new_tokens=400, timeout=0.05, watch=["final"])
    assert answer.completions[0].finish_reason in ("timeout", "stop", "length")
    if answer.token_ids:
        assert len(answer.watched["final"]) == answer.prompt_tokens + len(answer.token_ids) - 1


@pytest.mark.longer
@pytest.mark.parametrize("fields", [{}, {"use_cache": False}, {"prompt_lookup_num_tokens": 3}])
def test_the_bytes_of_watched_rows_are_those_predicted(engine: Engine, fields: dict[str, Any]) -> None:
    for watch in (["**"], ["blocks.*.residual", "blocks.2.attention.pattern"], "final"):
        before = engine.stats.watched_bytes
        answer = engine.generate(PROMPT, max_new_tokens=6, watch=watch, eos_token_id=[], **fields)
        tokens = answer.prompt_tokens + len(answer.token_ids) - 1
        predicted = watched_bytes(engine.config, [watch] if isinstance(watch, str) else watch, tokens)
        kept = engine.stats.watched_bytes - before
        guesses = fields.get("prompt_lookup_num_tokens", 0)  # rows of wrong ones are kept too
        assert kept == predicted if not guesses else kept >= predicted
        returned = {name: rows.nbytes for name, rows in answer.watched.items() if "pattern" not in name}
        assert sum(returned.values()) == watched_bytes(engine.config, returned, tokens)
    with pytest.raises(ParameterError, match="names no point"):
        watched_bytes(engine.config, ["nowhere"], 3)


def test_the_bytes_of_an_encoder_s_watched_rows_are_those_predicted(tmp_path: Path) -> None:
    with Engine(write_checkpoint(tmp_path / "t5"), max_batch_size=2) as engine:
        answer = engine.generate([5, 6, 7, 8, 9], max_new_tokens=4, watch=["**"], eos_token_id=[])
        tokens = 1 + len(answer.token_ids) - 1
        assert engine.stats.watched_bytes == watched_bytes(engine.config, ["**"], tokens, source=5)


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_an_aborted_request_has_the_rows_of_the_tokens_that_were_computed(fields: dict[str, Any]) -> None:
    ids = [*range(40, 61)]
    with Engine(backend="numpy", max_batch_size=4, max_batched_tokens=8) as engine:
        whole = engine.generate(ids, max_new_tokens=1, watch=["final"]).watched["final"]
        for steps, computed in ((0, 0), (2, 14), (4, 21)):  # 7 tokens a step beside the other request, which decodes
            engine.add(IDS, max_new_tokens=9)
            engine.step()
            number = engine.add(ids, max_new_tokens=9, watch=["final"], **fields)
            events = [event for _ in range(steps) for event in engine.step()]
            engine.abort(number)
            while engine.busy:
                events += engine.step()
            mine = [event for event in events if event.request_id == number]
            assert {event.index for event in mine if event.finish_reason == "abort"} == {
                *range(len({e.index for e in mine}))
            }
            rows = join_watched([event.watched for event in mine if event.index == 0 and event.watched])
            assert len(() if rows is None else rows["final"]) in (computed, computed + 1)
            if rows is not None:
                np.testing.assert_allclose(rows["final"][: len(ids)], whole[:computed], atol=1e-4)


def test_an_async_engine_offers_the_same() -> None:
    async def main() -> Any:
        async with AsyncEngine(Engine()) as engine:
            fields: dict[str, Any] = {"max_new_tokens": 4, "watch": ["final"], "hooks": {"blocks.1.mlp.out": silent}}
            events = [event async for event in engine.stream(PROMPT, **fields)]
            return Event.joined(events).watched, (await engine.generate(PROMPT, **fields)).watched

    streamed, whole = asyncio.run(main())
    np.testing.assert_allclose(streamed["final"], whole["final"], atol=1e-4)


@pytest.mark.longer
def test_an_async_engine_has_hooks_for_all_requests() -> None:
    functions = {"blocks.1.mlp.out": silent}

    async def main() -> Any:
        async with AsyncEngine(Engine()) as engine:
            names = engine.names()
            async with engine.hooks(functions):
                inside = await engine.generate(PROMPT, max_new_tokens=4, watch=["final"])
            with pytest.raises(ParameterError, match="nowhere"):
                async with engine.hooks({"nowhere": silent}):
                    pass
            task = asyncio.ensure_future(_with_hooks(engine))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return names, inside, await engine.generate(PROMPT, max_new_tokens=4, watch=["final"])

    async def _with_hooks(engine: AsyncEngine) -> None:
        async with engine.hooks(functions):
            await asyncio.sleep(60)

    names, inside, after = asyncio.run(main())
    with Engine() as engine:
        assert names == engine.names()
        plain = engine.generate(PROMPT, max_new_tokens=4, watch=["final"])
        with engine.hooks(functions):
            changed = engine.generate(PROMPT, max_new_tokens=4, watch=["final"])
    np.testing.assert_allclose(inside.watched["final"], changed.watched["final"], atol=1e-4)
    np.testing.assert_allclose(after.watched["final"], plain.watched["final"], atol=1e-4)
    assert abs(changed.watched["final"] - plain.watched["final"])[: plain.prompt_tokens].max() > 0.1
