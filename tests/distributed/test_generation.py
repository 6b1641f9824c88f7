"""A model on several ranks generates what it generates on one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.batch import TokenSequence
from minillm.config import read_config
from minillm.errors import EngineStateError, NumericalError, ParameterError, RankError
from minillm.formats import open_model
from minillm.models import family_of
from minillm.parallel import Parallel

from ..families import GOLDEN_CASES
from ..tiny import write_checkpoint
from .ranks import DEGREES, NAMES, on_all_degrees, on_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPT = [5, 9, 17, 33, 4, 60, 21]
TEXT = "A list of colors: red,"

FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without the cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "diverse beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "beams that sample": {"num_beams": 3, "do_sample": True, "seed": 3},
    "sampling": {"do_sample": True, "temperature": 0.9, "seed": 3},
    "top k": {"do_sample": True, "top_k": 20, "seed": 3, "temperature": 1.5},
    "top k, several": {"do_sample": True, "top_k": 5, "seed": 3, "num_return_sequences": 3},
    "top p, min p": {"do_sample": True, "top_p": 0.9, "min_p": 0.05, "seed": 4},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "guided": {"guided_regex": "( [a-z]+,)*"},
    "log-probabilities": {"logprobs": True, "top_logprobs": 3},
    "those of the prompt": {"logprobs": True, "top_logprobs": 2, "echo": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "lookahead": {"lookahead_window": 3, "lookahead_ngram_size": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "mirostat": {"mirostat": 2, "do_sample": True, "seed": 1},
    "guidance": {"guidance_scale": 2.0, "negative_prompt": "Once upon a time"},
    "guidance, beams": {"guidance_scale": 2.0, "num_beams": 2},
}


def results(engine: Engine, fields: dict[str, dict[str, Any]] = FIELDS) -> dict[str, Any]:
    return {name: engine.generate(TEXT, max_new_tokens=8, **each).completions for name, each in fields.items()}


@pytest.fixture(scope="module")
def alone() -> Engine:
    return Engine(backend="numpy", cache_bytes=1 << 24)


def assert_close(ours: Any, theirs: Any) -> None:
    """Completions are equal, but for the rounding of log-probabilities."""
    for name, completions in theirs.items():
        for one, other in zip(ours[name], completions, strict=True):
            assert one.token_ids == other.token_ids, name
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason), name
            if other.logprobs is not None:
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("parallel", DEGREES[:2], ids=NAMES[:2])
def test_quick_strategies(parallel: Parallel, alone: Engine) -> None:
    fields = {name: FIELDS[name] for name in ("greedy", "top k, several", "beams")}
    assert_close(on_ranks(parallel, lambda engine: results(engine, fields)).result, results(alone, fields))


@pytest.mark.longer
def test_early_exits_are_refused() -> None:
    def refusal(engine: Engine) -> str:
        with pytest.raises(ParameterError) as error:
            engine.generate(TEXT, dola_layers="low")
        return str(error.value)

    message = on_ranks(DEGREES[0], refusal).result
    assert message == "dola_layers is not offered where several processes share a model: use one"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [DEGREES[0], Parallel(tensor=3, pipeline=2)], ids=[NAMES[0], "six"])
def test_every_strategy(parallel: Parallel, alone: Engine) -> None:
    assert_close(on_ranks(parallel, results).result, results(alone))


@pytest.mark.slow
def test_requests_in_one_batch_share_prefixes_and_stream(alone: Engine) -> None:
    """Many requests at once: queued, in chunks, with pages that are shared and copied, in a small cache."""
    prompts = [TEXT + " blue," * (i % 4) for i in range(9)]

    def run(engine: Engine) -> Any:
        batch = [g.token_ids for g in engine.generate(prompts, max_new_tokens=6)]
        stream = [event.text for event in engine.stream(TEXT, max_new_tokens=6, num_return_sequences=1)]
        return batch, stream, engine.generate(prompts[:3], do_sample=True, top_k=7, seed=2, max_new_tokens=5)

    ours = on_ranks(Parallel(tensor=2), run, max_batch_size=4, max_batched_tokens=8).result
    theirs = run(Engine(backend="numpy", cache_bytes=1 << 24, max_batch_size=4, max_batched_tokens=8))
    assert ours[:2] == theirs[:2]
    assert [g.token_ids for g in ours[2]] == [g.token_ids for g in theirs[2]]


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("parallel", DEGREES, ids=NAMES)
def test_forward_and_score(parallel: Parallel, alone: Engine) -> None:
    def run(engine: Engine) -> Any:
        return engine.forward(TEXT * 12), engine.score(TEXT * 12).logprobs

    (logits, scores), (expected, expected_scores) = on_ranks(parallel, run).result, run(alone)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(scores[1:], expected_scores[1:], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", DEGREES[:2], ids=NAMES[:2])
@pytest.mark.parametrize("helper", ["draft", "amateur"])
def test_helper_models_run_on_rank_0(helper: str, parallel: Parallel, tmp_path: Path) -> None:
    model, other = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b", seed=1)

    def run(engine: Engine) -> Any:
        return engine.generate([PROMPT, PROMPT[:3]], max_new_tokens=12)

    ours = on_ranks(parallel, run, model, **{helper: other}).result
    theirs = run(Engine(model, backend="numpy", cache_bytes=1 << 24, **{helper: other}))
    assert [g.token_ids for g in ours] == [g.token_ids for g in theirs]


def shared_by_two(family: str, name: str) -> bool:
    raw = read_config(GOLDEN / family / name.replace(" ", "-"))
    config = family_of(raw).read_config(raw)
    return config.num_heads % 2 == 0 and config.num_layers > 1


SHARED = [case for case in GOLDEN_CASES if shared_by_two(*case)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "parallel"), on_all_degrees(SHARED))
def test_every_family(family: str, name: str, parallel: Parallel) -> None:
    folder = GOLDEN / family / name.replace(" ", "-")
    if parallel.pipeline > 1 and open_model(folder).config.per_layer_width:
        pytest.skip("stages do not share per-layer embeddings")

    def run(engine: Engine) -> Any:
        tokens = engine.generate([PROMPT, PROMPT[2:]], max_new_tokens=6, eos_token_id=[])
        beams = engine.generate(PROMPT, max_new_tokens=5, num_beams=3)
        return engine.forward(PROMPT), [*tokens, beams]

    logits, generations = on_ranks(parallel, run, folder).result
    expected, others = run(Engine(folder, backend="numpy", cache_bytes=1 << 24))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert [g.token_ids for g in generations] == [g.token_ids for g in others]


def test_nan_ends_its_request_alone(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["embed_positions.weight"][2 + 9] = np.nan  # of the tenth position

    def run(engine: Engine) -> Any:
        with pytest.raises(NumericalError, match="NaN or infinity before the first layer, made by embed"):
            engine.generate([*PROMPT, *PROMPT], max_new_tokens=3)
        return engine.generate(PROMPT, max_new_tokens=3).token_ids

    folder = write_checkpoint(tmp_path / "m", change=spoil)
    shared = on_ranks(Parallel(tensor=2), run, folder).result
    assert len(shared) == 3


@pytest.mark.longer
def test_other_ranks_take_no_requests() -> None:
    def refused(engine: Engine) -> None:
        with pytest.raises(EngineStateError, match="rank 0 takes the requests"):
            engine.follow()

    def make(**options: Any) -> Engine:
        engine = Engine(**options)
        if engine.rank:
            with pytest.raises(EngineStateError, match="rank 1 takes no requests"):
                engine.generate(TEXT)
        return engine

    on_ranks(Parallel(tensor=2), refused, make=make)


@pytest.mark.longer
def test_a_failure_on_one_rank_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.distributed.runner import RankRunner

    compute = RankRunner.compute

    def failing(self: RankRunner, *arguments: Any) -> Any:
        if self.part.ranks.rank == 1:
            raise MemoryError("no memory for this")
        return compute(self, *arguments)

    monkeypatch.setattr(RankRunner, "compute", failing)
    with pytest.raises(RankError, match="rank 1: MemoryError: no memory for this"):
        on_ranks(Parallel(tensor=2), lambda engine: engine.generate(TEXT, max_new_tokens=3))


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (Parallel(tensor=4), "tensor_parallel 4 should divide the model's num_heads 6"),
        (Parallel(pipeline=7), "pipeline_parallel 7 is more than the model's num_layers 6"),
    ],
)
def test_degrees_that_do_not_fit_are_named(parallel: Parallel, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        on_ranks(parallel, lambda engine: None)


@pytest.mark.longer
def test_prefixes_of_a_shared_model_go_to_no_file(tmp_path: Path) -> None:
    def refused(engine: Engine) -> list[str]:
        said = []
        for call in (lambda: engine.save_prefix(tmp_path / "a", TEXT), lambda: engine.load_prefix(tmp_path / "a")):
            with pytest.raises(ParameterError) as error:
                call()
            said.append(str(error.value))
        return said

    words = "is not offered where several processes share the model"
    said = on_ranks(Parallel(tensor=2), refused).result
    assert said == [f"save_prefix {words}", f"load_prefix {words}"]
    with pytest.raises((ParameterError, RankError), match=f"prefix_store {words}"):
        on_ranks(Parallel(tensor=2), refused, prefix_store=tmp_path / "store")


def test_other_numbers_of_processes_are_named() -> None:
    from minillm.distributed.threads import run_ranks

    with pytest.raises((ParameterError, RankError), match="needs 2 processes, found 3: start them with mpiexec -n 2"):
        run_ranks(3, lambda communicator: Engine(parallel=Parallel(tensor=2), communicator=communicator))


def test_different_checkpoints_are_found(tmp_path: Path) -> None:
    from minillm.distributed.threads import run_ranks

    folders = [write_checkpoint(tmp_path / str(seed), seed=seed) for seed in range(2)]
    with pytest.raises(RankError, match=r"rank 1 has the checkpoint [0-9a-f]+, rank 0 has [0-9a-f]+"):
        run_ranks(2, lambda c: Engine(folders[c.rank], backend="numpy", parallel=Parallel(tensor=2), communicator=c))


def test_a_checkpoint_that_one_rank_lacks_is_named(tmp_path: Path) -> None:
    from minillm.distributed.threads import run_ranks

    folder = write_checkpoint(tmp_path / "0")
    with pytest.raises(RankError, match=r"rank 1: .*nowhere"):
        run_ranks(
            2,
            lambda c: Engine(
                folder if c.rank == 0 else tmp_path / "nowhere", parallel=Parallel(tensor=2), communicator=c
            ),
        )


@pytest.mark.longer
def test_equal_logits_are_chosen_from_as_on_one_rank() -> None:
    """Of equals the smallest id is the most likely; a draw among the k best takes in all equals of the k-th."""
    from minillm.backends.token_sampler import TokenSampler
    from minillm.distributed.logits import RankSampler, RemoteRows, largest
    from minillm.reference.philox import Keys

    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 3, (64, 11)).astype(np.float32)  # many equals
    k = np.tile([1, 2, 3, 8], 16)
    best = [int(each) + 1 for each in k]
    sent = [largest(logits[:, a:b], best, a, TokenSampler()) for a, b in ((0, 4), (4, 11))]
    starts = np.cumsum([0, *best])

    class Source:
        fetched = 0

        def fetch(self, what: str, rows: Any) -> np.ndarray:
            self.fetched += 1
            return logits[list(rows)]

        def best(self, row: int) -> np.ndarray:
            return np.stack([each[starts[row] : starts[row + 1]] for each in sent])

    source = Source()
    remote, sampler = RemoteRows(source, "logits", np.arange(64), 11), RankSampler(TokenSampler())
    np.testing.assert_array_equal(sampler.argmax(remote), logits.argmax(axis=1))
    for row in range(64):
        for place in range(3):
            keys = Keys(np.array([7], np.uint64), np.array([row]), np.array([place]), 0)
            filters = {"temperature": 0.9, "top_k": k[row], "top_p": 0.95, "min_p": 0.02}
            ours = sampler.sample(remote[row : row + 1], keys, **filters)
            assert int(ours[0]) == int(TokenSampler().sample(logits[row : row + 1], keys, **filters)[0])
    assert 0 < source.fetched < 64 * 3  # equals beyond what was sent are fetched


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_micro_batches(tensor: int) -> None:
    """Parts of prompts and of several sequences, with scores of the prompts and rows in any order."""
    prompts = [TEXT * count for count in (20, 1, 7, 2, 11)]

    def run(engine: Engine) -> Any:
        several = engine.generate(prompts, max_new_tokens=4, logprobs=True, top_logprobs=2, echo=True)
        return several, engine.forward(prompts[0])

    parallel = Parallel(tensor=tensor, pipeline=3, micro_batches=5)
    shared = on_ranks(parallel, run, max_batched_tokens=256)
    theirs, logits = run(Engine(backend="numpy", cache_bytes=1 << 24, max_batched_tokens=256))
    for one, other in zip(shared.result[0], theirs, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.prompt_logprobs[1:], other.prompt_logprobs[1:], atol=1e-4)
    np.testing.assert_allclose(shared.result[1], logits, atol=1e-5 * np.abs(logits).max())
    forward = on_ranks(parallel, lambda engine: engine.forward(prompts[0]))  # 128 tokens, and 13
    assert forward.traffic[0].of("stage").messages == 4 + 1


@pytest.mark.slow
def test_trees_stay_whole_in_micro_batches() -> None:
    """Guesses that are computed together, in more parts than there are sequences."""
    fields = {"lookahead_window": 8, "lookahead_ngram_size": 4, "max_new_tokens": 12}
    shared = on_ranks(Parallel(pipeline=2, micro_batches=6), lambda engine: engine.generate([TEXT] * 5, **fields))
    theirs = Engine(backend="numpy", cache_bytes=1 << 24).generate([TEXT] * 5, **fields)
    assert [g.token_ids for g in shared.result] == [g.token_ids for g in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", DEGREES, ids=NAMES)
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_gguf(kind: str, parallel: Parallel, tmp_path: Path) -> None:
    """Columns of quantised types are shared in whole blocks of 32."""
    pytest.importorskip("gguf")
    from ..gguf_files import LLAMA, Type, write_llama

    write_llama(tmp_path / "model.gguf", LLAMA | {"intermediate_size": 128}, type_of=lambda name: Type[kind])

    def run(engine: Engine) -> Any:
        return engine.forward(PROMPT), engine.generate(PROMPT, max_new_tokens=8).token_ids

    logits, tokens = on_ranks(parallel, run, tmp_path / "model.gguf").result
    expected, others = run(Engine(tmp_path / "model.gguf", backend="numpy", cache_bytes=1 << 24))
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    assert tokens == others


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_a_key_value_head(ranks: int, tmp_path: Path) -> None:
    """Multi-query attention: every rank has the only key and value head."""
    from .ranks import llama_folder

    folder = llama_folder(tmp_path / "llama", num_key_value_heads=1)

    def run(engine: Engine) -> Any:
        return engine.runner.cache.storage.heads, engine.forward(PROMPT), engine.generate(PROMPT, num_beams=3).token_ids

    heads, logits, tokens = on_ranks(Parallel(tensor=ranks), run, folder).result
    one, expected, others = run(Engine(folder, backend="numpy", cache_bytes=1 << 24))
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    assert (heads, tokens) == (one, others)


@pytest.mark.slow
def test_rows_of_micro_batches_come_in_the_order_asked_for() -> None:
    ids = list(range(3, 163))
    rows = [150, 3, 3, 90, 159, 31, 32]

    def run(engine: Engine) -> np.ndarray:
        runner = engine.runner
        output = runner.forward([TokenSequence(ids)], [len(ids)], rows=rows)
        return runner.backend.sampler.to_host(output.logits).copy()

    ours = on_ranks(Parallel(tensor=2, pipeline=2, micro_batches=5), run).result
    theirs = run(Engine(backend="numpy", cache_bytes=1 << 24))
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
