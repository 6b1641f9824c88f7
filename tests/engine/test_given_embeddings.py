"""Requests whose prompt is given by vectors, `inputs_embeds`: the same engine, other rows in the first place."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from minillm import AsyncEngine, Engine
from minillm.decoding.hooks import Hooks
from minillm.errors import MinillmError, ParameterError, PromptError

from ..tiny import loop_of, request_for, run, tiny_runner, write_checkpoint
from .test_arrays import Foreign

IDS = [5, 7, 9, 11, 300, 4, 6]
FIELDS: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_checkpoint(tmp_path_factory.mktemp("embeddings"), seed=3)


@pytest.fixture(scope="module")
def table(folder: Any) -> np.ndarray:
    return load_file(folder / "model.safetensors")["model.decoder.embed_tokens.weight"]


@pytest.fixture(scope="module")
def engine(folder: Any) -> Iterator[Engine]:
    with Engine(folder) as engine:
        yield engine


def soft(table: np.ndarray, tokens: int = 9, seed: int = 0) -> np.ndarray:
    """Vectors that are no token's."""
    return (np.random.default_rng(seed).standard_normal((tokens, table.shape[1])) * table.std()).astype(np.float32)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_the_model_s_own_vectors_are_its_tokens(folder: Any, table: np.ndarray, backend: str) -> None:
    with Engine(folder, backend=backend) as engine:
        near = np.testing.assert_allclose
        near(engine.forward(inputs_embeds=table[IDS]), engine.forward(IDS), rtol=0, atol=1e-5)
        near(engine.forward(IDS, inputs_embeds=table[IDS]), engine.forward(IDS), rtol=0, atol=1e-5)
        for fields in ({}, {"num_beams": 3}, {"do_sample": True, "seed": 4}, {"use_cache": False}):
            given = engine.generate(inputs_embeds=table[IDS], **fields, **FIELDS)
            assert given.token_ids == engine.generate(IDS, **fields, **FIELDS).token_ids


@pytest.mark.longer
def test_arrays_of_any_library_and_float_type_are_taken(engine: Engine, table: np.ndarray) -> None:
    rows = soft(table)
    expected = engine.generate(inputs_embeds=rows, **FIELDS).token_ids
    assert engine.generate(inputs_embeds=Foreign(rows), **FIELDS).token_ids == expected
    assert engine.generate(inputs_embeds=rows.astype(np.float64), **FIELDS).token_ids == expected
    several = np.stack([rows, soft(table, seed=1)])
    both = engine.generate(inputs_embeds=several, **FIELDS)
    assert both == engine.generate(inputs_embeds=[*several], **FIELDS)
    assert [answer.token_ids for answer in both] == [
        engine.generate(inputs_embeds=rows, **FIELDS).token_ids for rows in several
    ]
    assert "".join(event.text for event in engine.stream(inputs_embeds=rows, **FIELDS)) == both[0].text


def test_other_texts_of_the_batch_keep_every_bit(folder: Any, table: np.ndarray) -> None:
    """On the backend that promises it: the bits of a product in BLAS depend on the number of rows."""
    rows = soft(table)
    with Engine(folder, backend="cpu", deterministic=True) as engine:
        ordinary = [engine.request(IDS, logprobs=True, **FIELDS), engine.request([8, 9], logprobs=True, **FIELDS)]
        given = engine.request(inputs_embeds=rows, logprobs=True, **FIELDS)
        alone, mixed = engine.run(ordinary), engine.run([ordinary[0], given, ordinary[1]])
        assert mixed[0] == alone[0] and mixed[2] == alone[1]
        assert mixed[1] == engine.run([given])[0]


def test_no_other_text_takes_over_their_keys(engine: Engine, table: np.ndarray) -> None:
    ids = list(range(40, 80))
    expected = engine.generate(ids, **FIELDS)
    given = engine.generate(ids, inputs_embeds=soft(table, len(ids)), **FIELDS)
    again = engine.generate(ids, **FIELDS)
    assert given.cached_tokens == 0 and given.token_ids != expected.token_ids
    assert again.token_ids == expected.token_ids and again.cached_tokens > 0


@pytest.mark.longer
def test_a_preempted_request_and_one_in_chunks_go_on_with_its_vectors() -> None:
    width = tiny_runner(seed=2).model.embedding.tokens.shape[1]  # type: ignore[attr-defined]
    arrays = [np.random.default_rng(seed).standard_normal((20, width)).astype(np.float32) for seed in range(4)]
    requests = [
        replace(request_for([0] * 20, max_new_tokens=24, num_beams=beams), hooks=Hooks(embeddings=rows))
        for rows, beams in zip(arrays, (1, 2, 1, 1), strict=True)
    ]
    expected = run(loop_of(target=tiny_runner(seed=2)), requests)
    assert len({tuple(result[0].token_ids) for result in expected}) == 4
    tight = loop_of(target=tiny_runner(seed=2, pages=30, page_size=4), chunk=16, headroom=0)
    assert [result[0].token_ids for result in run(tight, requests)] == [result[0].token_ids for result in expected]
    assert tight.stats.preemptions > 0


def test_the_prompt_beside_them_is_what_fields_read(engine: Engine, table: np.ndarray) -> None:
    fields = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2} | FIELDS
    given = engine.generate(IDS, inputs_embeds=table[IDS], **fields)
    assert given == engine.generate(IDS, **fields) and given.prompt_token_ids == IDS
    watched = engine.generate(IDS, inputs_embeds=soft(table, 7), watch=["embedding"], **FIELDS).watched["embedding"]
    assert len(watched) == len(IDS) + 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"repetition_penalty": 1.5},
            "repetition_penalty=1.5 reads the prompt's tokens, and inputs_embeds alone has none",
        ),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 reads"),
        ({"echo": True}, "echo=True reads"),
        ({"logits_processor": [lambda ids, scores: scores]}, "logits_processor=.* reads"),
        ({"guidance_scale": 2.0}, "guidance_scale is not offered with inputs_embeds"),
    ],
)
def test_fields_that_need_tokens_are_refused_by_name(
    engine: Engine, table: np.ndarray, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        engine.generate(inputs_embeds=soft(table), **fields)


def test_arrays_that_are_no_vectors_are_refused(engine: Engine, table: np.ndarray) -> None:
    width, rows = table.shape[1], soft(table)
    cases: list[tuple[Any, type[MinillmError], str]] = [
        (rows[:, :-1], ParameterError, rf"should have the shape \[T, {width}\], found \[9, {width - 1}\]"),
        (rows[:0], ParameterError, r"should have the shape .* found \[0, "),
        (rows * np.nan, ParameterError, "inputs_embeds holds NaN"),
        (rows.astype(str), ParameterError, "should be an array of numbers"),
        (soft(table, 100), PromptError, "inputs_embeds has 100 rows; the context holds 64"),
    ]
    for array, kind, message in cases:
        for call in (engine.forward, engine.generate):
            with pytest.raises(kind, match=message):
                call(inputs_embeds=array)  # type: ignore[operator]
    for value in (3, object(), "", [], (row for row in rows), np.float32(3)):
        with pytest.raises(ParameterError, match=r"inputs_embeds should be an array \[T, E\] for each prompt"):
            engine.generate(inputs_embeds=value)
    with pytest.raises(ParameterError, match="inputs_embeds has 9 rows, the prompt 2 tokens"):
        engine.generate([1, 2], inputs_embeds=rows)
    with pytest.raises(ParameterError, match=r"an array \[T, E\] for each prompt \(2\), found 1"):
        engine.generate([[1], [2]], inputs_embeds=rows)
    with pytest.raises(PromptError, match="a prompt should be text or a list of token ids, found None"):
        engine.generate()
    with pytest.raises(PromptError, match="there is no prompt"):
        engine.forward()


def test_models_that_read_tokens_elsewhere_are_refused(
    engine: Engine, table: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minillm.engine.given_embeddings import read_embeddings

    for fields, message in [
        ({"encoder_layers": 2}, "not offered with an encoder-decoder"),
        (
            {"encoder_layers": 0, "per_layer_width": 8, "model_type": "gemma4_text"},
            "this gemma4_text model, whose layers",
        ),
    ]:
        config: Any = SimpleNamespace(**fields)
        with pytest.raises(ParameterError, match=message):
            read_embeddings(soft(table), config, table.shape[1])
    monkeypatch.setattr(Engine, "ranks", object())
    with pytest.raises(ParameterError, match="where several processes share the model"):
        engine.generate(inputs_embeds=soft(table))


@pytest.mark.longer
def test_the_async_engine_takes_vectors_as_the_engine_does(folder: Any, table: np.ndarray) -> None:
    async def main() -> None:
        engine = Engine(folder)
        one, several = soft(table), [soft(table, 4, 1), soft(table, 7, 2)]
        expected = [engine.generate(inputs_embeds=rows, **FIELDS).token_ids for rows in (one, *several)]
        async with AsyncEngine(engine) as aio:
            assert (await aio.generate(inputs_embeds=one, **FIELDS)).token_ids == expected[0]
            answers = await aio.generate(inputs_embeds=several, **FIELDS)
            assert [answer.token_ids for answer in answers] == expected[1:]
            events = [event async for event in aio.stream(inputs_embeds=one, **FIELDS)]
            assert [token for event in events for token in event.token_ids] == expected[0]
            with pytest.raises(MinillmError):
                await aio.generate()

    asyncio.run(main())
