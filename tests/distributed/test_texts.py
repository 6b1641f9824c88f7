"""Vectors and labels of texts, and texts of encoder-decoders, on several ranks: as on one, and what is sent."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.errors import NumericalError, ParameterError
from minillm.formats import open_model
from minillm.parallel import Parallel
from minillm.text.tokenizer import EncodedText

from .. import seq2seq
from ..engine.test_encoder_decoders_adapted import folders  # noqa: F401
from ..models.test_golden_encoder_decoders import folder_of
from ..task_models import BERT, THREE_LABELS, write_task_model
from ..tiny import write_checkpoint
from .ranks import DEGREES, NAMES, on_ranks
from .test_traffic import analysis_of

ENCODERS = sorted(path.name for path in (Path(__file__).parents[1] / "golden_encoders").iterdir())
SLOW = [pytest.mark.slow]
FURTHER = ("deberta", "deberta-labels", "deberta-v2-apart", "deberta-v2-labels")
"""Encoders whose layers another one's test shares too"""


def marks_of(name: str, i: int) -> list[pytest.MarkDecorator]:
    """When a case runs: by default, with slow ones, or before a release."""
    if name in FURTHER:
        return [*SLOW, pytest.mark.exhaustive]
    return [] if i and name == "bert-pairs" else SLOW


CASES = [
    pytest.param(name, parallel, id=f"{name}-{of_ranks}", marks=marks_of(name, i))
    for name in ENCODERS
    for i, (parallel, of_ranks) in enumerate(zip(DEGREES, NAMES, strict=True))
]
TEXTS = [np.random.default_rng(n).integers(4, 90, n).tolist() for n in (9, 3, 30, 17, 5, 40)]
SOURCES = [[9, 8, 7, 6, 5, 4, 3], [40, 41], [60, 50, 40, 30, 20, 10, 11, 12, 13]]
LINE = [5, 6, 7]


def golden_encoder(name: str) -> Path:
    return Path(__file__).parents[1] / "golden_encoders" / name


def assert_close(ours: Any, theirs: Any) -> None:
    """Equal but for what a BLAS that rounds otherwise in other numbers of rows makes of these layers."""
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-5 * max(1, np.abs(other).max()))


# --- vectors and labels -----------------------------------------------------------------------------------------------


def vectors_and_labels(engine: Engine) -> list[Any]:
    """With more texts than one pass takes, and a cache that grows."""
    found = [engine.embed(TEXTS[:1]), engine.embed(TEXTS * 20), *engine.hidden_states(TEXTS)]
    if engine.config.output == "labels":
        found += [each.logits for each in engine.classify(TEXTS)]
    return found


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "parallel"), CASES)
def test_vectors_and_labels_of_every_encoder(name: str, parallel: Parallel) -> None:
    shared = on_ranks(parallel, vectors_and_labels, golden_encoder(name))
    assert_close(shared.result, vectors_and_labels(Engine(golden_encoder(name), backend="numpy")))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", DEGREES, ids=NAMES)
def test_labels_of_tokens_are_those_of_one_process(parallel: Parallel, tmp_path: Path) -> None:
    raw = BERT | THREE_LABELS | {"architectures": ["BertForTokenClassification"]}
    folder = write_task_model(tmp_path / "m", raw)

    def entities(engine: Engine) -> list[tuple[str, int]]:
        texts: Any = engine.classify_tokens(["the cat sat on the mat", "a dog ran"])
        return [(entity.label, entity.start) for text in texts for entity in text]

    assert on_ranks(parallel, entities, folder).result == entities(Engine(folder, backend="numpy"))


def test_pairs_have_token_types(tmp_path: Path) -> None:
    """Rank 0 alone adds them: the all-reduce would count them twice."""
    folder = write_task_model(tmp_path / "m", BERT | THREE_LABELS)

    def run(engine: Engine) -> Any:
        return [each.logits for each in engine.classify([("the cat", "a dog ran"), ("the red house", "sat")])]

    assert_close(on_ranks(Parallel(tensor=2), run, folder).result, run(Engine(folder, backend="numpy")))


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("parallel", DEGREES[1:], ids=NAMES[1:])
def test_vectors_of_a_decoder_between_its_requests(parallel: Parallel, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", num_hidden_layers=4, word_embed_proj_dim=32)

    def run(engine: Engine) -> Any:
        before = engine.generate(TEXTS[0], max_new_tokens=5).token_ids
        found = [engine.embed(TEXTS, pooling="mean"), engine.embed(TEXTS * 9), *engine.hidden_states(TEXTS[:2])]
        contrastive = engine.generate(TEXTS[1], max_new_tokens=5, penalty_alpha=0.6, top_k=4).token_ids
        return found, before, engine.generate(TEXTS[0], max_new_tokens=5).token_ids, contrastive

    ours = on_ranks(parallel, run, folder).result
    theirs = run(Engine(folder, backend="numpy", cache_bytes=1 << 24))
    assert_close(ours[0], theirs[0])
    assert ours[1:] == theirs[1:]


@pytest.mark.parametrize("parallel", DEGREES, ids=NAMES)
def test_bytes_of_texts(parallel: Parallel) -> None:
    """All-reduces as `analyze` says and by T (2 L + 1) E; the results go to rank 0 if another stage has them."""
    folder = golden_encoder("bert-pairs")
    config, (T,) = open_model(folder).config, {len(text) for text in TEXTS[2:3]}
    shared = on_ranks(parallel, lambda engine: engine.classify(TEXTS[2:3]), folder)
    analysis = analysis_of(config, parallel, T)
    E, L, tensor = config.hidden_size, config.num_layers, parallel.tensor
    for i in range(tensor):
        own = [shared.traffic[stage * tensor + i] for stage in range(parallel.pipeline)]
        reduced = [traffic.of("all-reduce") for traffic in own]
        assert sum(sent.bytes for sent in reduced) == analysis.all_reduce_bytes(analysis.prefill)
        assert sum(sent.messages for sent in reduced) == analysis.prefill.all_reduces == (2 * L + 1) * (tensor > 1)
        assert sum(sent.bytes for sent in reduced) == 4 * T * E * (2 * L + 1) * (tensor > 1)
        assert own[0].of("stage").bytes == 4 * T * E * (parallel.pipeline > 1)
    sender = parallel.tensor * (parallel.pipeline - 1)
    for rank, traffic in enumerate(shared.traffic):
        assert traffic.of("logits").bytes == (4 * len(config.labels) if rank == sender > 0 else 0)


def test_texts_of_an_encoder_stay_whole_in_micro_batches() -> None:
    """A token sees those after it: parts of some 40 tokens are cut between texts of 30."""
    parallel, folder = Parallel(pipeline=2, micro_batches=3), golden_encoder("bert")
    ids = TEXTS[2]
    texts = [EncodedText(each, [i // first % 2 for i in range(30)]) for first in (7, 12) for each in (ids, ids[::-1])]
    shared = on_ranks(parallel, lambda engine: engine.hidden_states(texts), folder)
    assert_close(shared.result, Engine(folder, backend="numpy").hidden_states(texts))
    assert shared.traffic[0].of("stage").messages == 3


def test_nan_in_a_text_is_an_error_and_the_next_text_goes_on(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["embed_positions.weight"][2 + 9] = np.nan

    def run(engine: Engine) -> Any:
        with pytest.raises(NumericalError, match="NaN or infinity"):
            engine.embed([TEXTS[2]])
        return engine.embed([TEXTS[1]])

    folder = write_checkpoint(tmp_path / "m", num_hidden_layers=2, change=spoil)
    for parallel in DEGREES[:2]:
        assert np.isfinite(on_ranks(parallel, run, folder).result).all()


# --- encoder-decoders -------------------------------------------------------------------------------------------------


def generations(engine: Engine) -> tuple[list[Any], list[list[int]]]:
    """Numbers, and tokens: in a batch, of beams that share a source, and of guesses."""
    several = engine.generate(SOURCES, max_new_tokens=6, eos_token_id=[])
    others = [
        engine.generate(SOURCES[0], max_new_tokens=6, **fields)
        for fields in ({"num_beams": 3}, {"do_sample": True, "seed": 1, "top_k": 9}, {"prompt_lookup_num_tokens": 2})
    ]
    numbers = [engine.forward(LINE, source=SOURCES[0]), engine.score(LINE, source=SOURCES[1]).logprobs[1:]]
    return numbers, [each.token_ids for each in (*several, *others)]


QUICK = ("t5", "original")
OTHERS = [pytest.param(*case, marks=SLOW) for case in seq2seq.GOLDEN_CASES if case != QUICK]


@pytest.mark.longer
@pytest.mark.parametrize("backend", ["numpy", pytest.param("cpu", marks=SLOW)])
@pytest.mark.parametrize(("family", "name"), [QUICK, *OTHERS])
def test_every_encoder_decoder(family: str, name: str, backend: str) -> None:
    folder = folder_of((family, name))
    numbers, tokens = on_ranks(Parallel(tensor=2), generations, folder, backend=backend, threads=1).result
    expected, others = generations(Engine(folder, backend="numpy", cache_bytes=1 << 24))
    assert_close(numbers, expected)
    assert tokens == others


@pytest.mark.parametrize(("family", "name"), [QUICK, *OTHERS])
def test_bytes_of_a_source_and_a_step(family: str, name: str) -> None:
    """The encoder's two all-reduces a layer, the decoder's three, and one of each embedding."""
    folder, parallel, T = folder_of((family, name)), Parallel(tensor=2), len(SOURCES[0])
    config = open_model(folder).config

    def generated(engine: Engine) -> Any:
        engine.generation_defaults = {}  # a forced EOS token would need all logits of its step
        return engine.generate(SOURCES[0], max_new_tokens=3, eos_token_id=[], num_beams=1)

    shared = on_ranks(parallel, generated, folder)
    analysis = analysis_of(config, parallel, T)
    E, passes = config.hidden_size, 3  # of the decoder, each of one token
    messages = analysis.prefill.all_reduces + passes * analysis.decode.all_reduces
    size = analysis.all_reduce_bytes(analysis.prefill) + passes * analysis.all_reduce_bytes(analysis.decode)
    assert messages == 2 * config.encoder_layers + 1 + passes * (3 * config.num_layers + 1)
    assert size == 4 * E * (T * (2 * config.encoder_layers + 1) + passes * (3 * config.num_layers + 1))
    for rank, traffic in enumerate(shared.traffic):
        assert traffic.of("all-reduce") == (messages, size)
        assert traffic.of("logits").bytes == (passes * analysis.choice_bytes(analysis.decode) if rank else 0)
    assert analysis.choice_bytes(analysis.prefill) == 0
    assert shared.traffic[0].of("step").messages == passes + 2  # the source, the passes, and the end


@pytest.mark.longer
def test_adapters_of_an_encoder_decoder(folders: dict[str, Path]) -> None:  # noqa: F811
    def run(engine: Engine) -> Any:
        return [engine.forward(LINE, source=SOURCES[0], lora=name) for name in ("one", None)]

    ours = on_ranks(Parallel(tensor=2), run, folders["base"], adapters={"one": folders["adapter"]}).result
    assert_close(ours[:1], [Engine(folders["merged"], backend="numpy").forward(LINE, source=SOURCES[0])])
    assert_close(ours[1:], [Engine(folders["base"], backend="numpy").forward(LINE, source=SOURCES[0])])


def test_heads_that_cannot_be_shared_and_stages_are_refused_by_name() -> None:
    with pytest.raises(ParameterError, match="pipeline_parallel 2 is not offered with an encoder-decoder"):
        on_ranks(Parallel(pipeline=2), generations, folder_of(("t5", "original")))
    with pytest.raises(ParameterError, match="tensor_parallel 3 should divide the model's num_heads 4"):
        on_ranks(Parallel(tensor=3), generations, folder_of(("t5", "original")))
