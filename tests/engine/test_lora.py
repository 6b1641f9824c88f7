"""LoRA adapters of single requests: each row computes what the merged model would, whatever shares its batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.observe import counting
from minillm.errors import ParameterError, UnsupportedModelError
from minillm.reference.low_rank import low_rank_cost

from ..adapters import write_adapter
from ..tiny import NO_REPEATS, write_checkpoint

BACKENDS = [pytest.param("numpy", marks=pytest.mark.slow), "cpu"]
PROMPTS = [[40, 41, 42, 43], list(range(50, 67)), [7], [90, 80, 70, 60, 50, 40]]
NAMES = ["one", "two", None, "three"]
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": [], **NO_REPEATS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("lora")
    adapters = {name: write_adapter(at / name, seed=i, r=i + 2) for i, name in enumerate(("one", "two", "three"))}
    return {"base": write_checkpoint(at / "base", seed=3), **adapters}


def adapters_of(folders: dict[str, Path]) -> dict[str, Path]:
    return {name: folder for name, folder in folders.items() if name != "base"}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path], backend: str) -> Engine:
    return Engine(folders["base"], backend=backend, adapters=adapters_of(folders), max_batch_size=8, prefix_cache=True)


@pytest.fixture(scope="module")
def merged(folders: dict[str, Path], backend: str) -> dict[str | None, Engine]:
    """By the name of the adapter: an engine with it merged."""
    found: dict[str | None, Engine] = {None: Engine(folders["base"], backend=backend)}
    return found | {
        name: Engine(folders["base"], backend=backend, adapter=folder) for name, folder in adapters_of(folders).items()
    }


def together(engine: Engine, requests: list[tuple[list[int], dict[str, Any]]]) -> list[list[int]]:
    """The tokens of the first result of each request, all run side by side."""
    ids = [engine.add(prompt, **fields) for prompt, fields in requests]
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            if event.index == 0:
                tokens[event.request_id] += event.token_ids
    return [tokens[i] for i in ids]


@pytest.mark.longer
def test_logits_are_those_of_the_merged_model(engine: Engine, merged: dict[str | None, Engine]) -> None:
    plain = engine.forward(PROMPTS[1])
    for name in ("one", "two", "three", None):
        np.testing.assert_allclose(
            engine.forward(PROMPTS[1], lora=name), merged[name].forward(PROMPTS[1]), rtol=0, atol=1e-4
        )
        assert name is None or np.abs(engine.forward(PROMPTS[1], lora=name) - plain).max() > 0.5
        assert engine.score(PROMPTS[1], lora=name).total == pytest.approx(merged[name].score(PROMPTS[1]).total, 1e-4)


STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 5, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "contrastive": {"penalty_alpha": 0.4, "top_k": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "lookahead": {"lookahead_window": 3},
    "naive": {"use_cache": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_of_three_adapters_and_none_equals_each_merged_alone(
    engine: Engine, merged: dict[str | None, Engine], strategy: str
) -> None:
    fields = GREEDY | STRATEGIES[strategy]
    if strategy == "contrastive":
        fields = {name: value for name, value in fields.items() if name not in NO_REPEATS}
    requests = [(prompt, fields | {"lora": name}) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    expected = [merged[name].generate(prompt, **fields).token_ids for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    for _ in range(2):  # the second time from the prefix cache
        assert together(engine, requests) == expected


@pytest.mark.slow
def test_the_same_prompt_with_other_adapters_shares_no_keys_and_values(
    engine: Engine, merged: dict[str | None, Engine]
) -> None:
    prompt = list(range(100, 140))
    expected = {name: merged[name].generate(prompt, **GREEDY).token_ids for name in NAMES}
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    for name in (*NAMES, *reversed(NAMES)):
        assert engine.generate(prompt, lora=name, **GREEDY).token_ids == expected[name], name


@pytest.mark.slow
def test_a_recorded_step_without_adapters_is_not_replayed_with_them(
    engine: Engine, merged: dict[str | None, Engine]
) -> None:
    """Decode steps of the same kind, by turns with adapters and without."""
    for name in (None, "one", None, "two", "one"):
        found = engine.generate(PROMPTS[0], lora=name, **GREEDY).token_ids
        assert found == merged[name].generate(PROMPTS[0], **GREEDY).token_ids


@pytest.mark.slow
def test_chunks_streams_and_echoed_log_probabilities(
    folders: dict[str, Path], merged: dict[str | None, Engine], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.backends.memory.Memory.max_prompt_tokens", 5)
    small = Engine(
        folders["base"], backend="numpy", max_batch_size=5, max_batched_tokens=5, adapters=adapters_of(folders)
    )
    expected = merged["two"].generate(PROMPTS[1], echo=True, logprobs=True, **GREEDY)
    for each in (small, engine):
        found = each.generate(PROMPTS[1], lora="two", echo=True, logprobs=True, **GREEDY)
        assert found.token_ids == expected.token_ids
        assert found.prompt_logprobs is not None and expected.prompt_logprobs is not None
        np.testing.assert_allclose(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], rtol=0, atol=1e-3)
        streamed = [i for event in each.stream(PROMPTS[1], lora="two", **GREEDY) for i in event.token_ids]
        assert streamed == expected.token_ids


@pytest.mark.slow
def test_a_draft_model_guesses_for_an_adapted_one(folders: dict[str, Path], tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", seed=9)
    engine = Engine(folders["base"], backend="numpy", draft=draft, adapters=adapters_of(folders))
    expected = Engine(folders["base"], backend="numpy", adapter=folders["one"]).generate(PROMPTS[0], **GREEDY)
    assert engine.generate(PROMPTS[0], lora="one", **GREEDY).token_ids == expected.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_weights_of_fewer_bits_are_left_as_they_are(folders: dict[str, Path], dtype: str) -> None:
    """Merging rounds the sum, per request W alone is rounded: the logits are near, and those without are the same."""
    engine = Engine(folders["base"], backend="cpu", dtype=dtype, adapters=adapters_of(folders))
    plain = Engine(folders["base"], backend="cpu", dtype=dtype)
    exact = Engine(folders["base"], backend="numpy", adapter=folders["one"]).forward(PROMPTS[1])
    np.testing.assert_array_equal(engine.forward(PROMPTS[1]), plain.forward(PROMPTS[1]))
    error = np.linalg.norm(engine.forward(PROMPTS[1], lora="one") - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.05


@pytest.mark.longer
def test_decode_steps_with_adapters_are_recorded_once_and_replayed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU: two adapters side by side are one kind of step, in another order another."""
    from minillm.backends.cpu.memory import RecordedStep

    options: dict[str, Any] = {"adapters": adapters_of(folders), "max_batch_size": 8, "prefix_cache": False}
    engine = Engine(folders["base"], backend="cpu", **options)
    plain = Engine(folders["base"], backend="numpy", **options)
    ran: dict[str, list[bool]] = {"record": [], "run": []}
    for method in ran:
        original = getattr(RecordedStep, method)

        def watched(step: Any, *args: Any, original: Any = original, into: str = method, **kwargs: Any) -> Any:
            result = original(step, *args, **kwargs)
            ran[into].append(step.complete)
            return result

        monkeypatch.setattr(RecordedStep, method, watched)
    requests = [(PROMPTS[1], GREEDY | {"lora": "one"}), (PROMPTS[1], GREEDY | {"lora": "two"})]
    assert together(engine, requests) == together(plain, requests)
    assert ran == {"record": [True], "run": [True] * 14}
    assert together(engine, requests[::-1]) == together(plain, requests[::-1])
    assert ran == {"record": [True] * 2, "run": [True] * 28}


def test_the_products_are_counted(folders: dict[str, Path]) -> None:
    """Rows of an adapter cost 2 r (in + out) FLOPs in each projection; other rows nothing."""
    engine = Engine(folders["base"], backend="numpy", adapters=adapters_of(folders), prefix_cache=False)
    with counting(engine.runner) as counted:
        engine.generate(PROMPTS, max_new_tokens=1, eos_token_id=[])
        plain = counted.total
        assert "add_low_rank" not in counted.by_operation()
        counted.reset()
        engine.generate(PROMPTS[1], max_new_tokens=1, eos_token_id=[])
        alone = counted.total
        counted.reset()
        engine.generate(PROMPTS[1], max_new_tokens=1, eos_token_id=[], lora="one")
        T, E, F, r = len(PROMPTS[1]), 32, 40, 2
        qkv, up, down = 2 * 2 * r * (E + 3 * E) + 3 * E, 2 * r * (E + F) + F, 2 * r * (F + E) + E
        moved = T * (F + E)  # activation and residual are added after the change, not in the product before
        assert counted.total.flops - alone.flops == 2 * T * (qkv + up + down)
        assert counted.by_operation()["add_low_rank"].flops == 2 * (T * (qkv + up + down) + moved)
    assert plain.flops > alone.flops
    cost = low_rank_cost(5, 32, 40, [(2, 3), (1, 4)], activation=None, residual=False)
    assert cost.flops == 2 * 2 * 3 * 72 + 2 * 1 * 4 * 72 + 3 * 40
    assert cost.bytes_read == 4 * (3 * 32 + 3 * 40 + (3 + 4) * 72)
    assert cost.bytes_written == 4 * 3 * 40


def test_what_cannot_be_done_for_single_requests_is_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    base = folders["base"]
    engine = Engine(base, backend="numpy", adapters=adapters_of(folders))
    with pytest.raises(ParameterError, match=r"lora='four': .* expected one of one, two, three"):
        engine.generate(PROMPTS[0], lora="four")
    with pytest.raises(ParameterError, match=r"lora='four'"):
        engine.forward(PROMPTS[0], lora="four")
    with pytest.raises(ParameterError, match=r"load some: Engine\(..., adapters="):
        Engine(base, backend="numpy").generate(PROMPTS[0], lora="one")
    with pytest.raises(ParameterError, match="adapters should be a dict of names and folders"):
        Engine(base, backend="numpy", adapters=[folders["one"]])  # type: ignore[arg-type]
    biased = write_adapter(
        tmp_path / "biased",
        bias="all",
        change=lambda t: t.update({"base_model.model.model.decoder.layers.0.fc1.bias": np.ones(40, np.float32)}),
    )
    with pytest.raises(UnsupportedModelError, match=r"replaces layers.0.fc1.bias, .* merge it, as adapter"):
        Engine(base, backend="numpy", adapters={"biased": biased})
