"""Watermarked texts, their detection, and requests beside them; the marks themselves are in test_watermark_live.py."""

from typing import Any

import pytest

from minillm import Engine
from minillm.errors import ParameterError
from minillm.measure.watermark import detect

from ..tiny import write_checkpoint

V = 512
GREEN: dict[str, dict[str, Any]] = {
    "lefthash": {"bias": 2.5},
    "other share": {"greenlist_ratio": 0.6, "bias": 1.5, "hashing_key": 2**40 + 7},
    "selfhash": {"bias": 2.0, "seeding_scheme": "selfhash"},
    "wide selfhash": {"bias": 2.0, "seeding_scheme": "selfhash", "context_width": 3, "hashing_key": 99},
}
SYNTH: dict[str, dict[str, Any]] = {
    "three keys": {"ngram_len": 3, "keys": [654, 400, 836]},
    "short memory": {"ngram_len": 2, "keys": [7] * 9, "context_history_size": 2, "sampling_table_size": 1000},
    "later": {"ngram_len": 4, "keys": [1, 2**62], "skip_first_ngram_calls": True, "sampling_table_seed": 5},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_checkpoint(tmp_path_factory.mktemp("model"), seed=3), max_batch_size=4, prefix_cache=False)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"no_repeat_ngram_size": 1},
    "sampled": {"do_sample": True, "seed": 1, "temperature": 1.5},
    "beams": {"num_beams": 2, "no_repeat_ngram_size": 1},
    "order": {"do_sample": True, "seed": 1, "samplers": "llama.cpp", "temperature": 1.5},
}


@pytest.mark.longer
@pytest.mark.parametrize(
    ("way", "config"),
    [
        ("greedy", GREEN["lefthash"] | {"bias": 9.0}),
        ("sampled", GREEN["selfhash"]),
        ("beams", GREEN["lefthash"] | {"bias": 9.0}),
        ("order", SYNTH["three keys"]),
    ],
    ids=WAYS,
)
def test_generated_texts_are_detected_and_others_are_not(engine: Engine, config: Any, way: str) -> None:
    fields = WAYS[way] | {"max_new_tokens": 40, "eos_token_id": []}
    marked = engine.generate([40, 41], watermarking_config=config, **fields).token_ids
    plain = engine.generate([40, 41], **fields).token_ids
    assert detect(marked, config, V).z_score > 4
    assert abs(detect(plain, config, V).z_score) < 3.5
    assert marked != plain


@pytest.mark.longer
def test_watermarked_requests_are_the_same_beside_others(engine: Engine) -> None:
    each = [WAYS["sampled"] | {"watermarking_config": config} for config in (*GREEN.values(), *SYNTH.values())]
    each = [fields | {"max_new_tokens": 8, "eos_token_id": []} for fields in [*each, {}, WAYS["sampled"]]]
    ids = [engine.add([40, 41], **fields) for fields in each]
    tokens: dict[Any, list[int]] = {request_id: [] for request_id in ids}
    while engine.busy:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert [*tokens.values()] == [engine.generate([40, 41], **fields).token_ids for fields in each]


def test_texts_and_settings_that_fit_no_watermark_are_refused() -> None:
    with pytest.raises(ParameterError, match="the text has 1 tokens: its watermark needs at least 2"):
        detect([5], {}, V)
    with pytest.raises(ParameterError, match=r"watermarking_config=.*'a' is none of its settings"):
        detect([5], {"a": 1}, V)
    with pytest.raises(ParameterError, match=r"watermarking_config=.*bias should be a number .*, found 'x'"):
        detect([5, 6], {"bias": "x"}, V)
    with pytest.raises(ParameterError, match=r"keys should be a sequence of 1 to 64 whole numbers"):
        detect([5, 6], {"ngram_len": 2, "keys": list(range(65))}, V)
    for ids, size in (("hello", V), ([[1, 2]], V), ([1.5, 2], V), ([-1, 2], V), ([1, 2], "x"), ([1, 2], 0)):
        with pytest.raises(ParameterError, match="detect takes token ids and the size of their vocabulary"):
            detect(ids, {}, size)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="token 9000 is not among the vocabulary's 512 tokens"):
        detect([5, 9000], {}, V)
