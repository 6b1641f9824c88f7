"""Each declared field changes a result of a real engine: a witness for each, one line.

That a field is refused where it cannot have an effect, and an impossible value anywhere, is in test_fields.py.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine, PhrasalConstraint
from minillm.decoding.fields import FIELDS
from minillm.decoding.settings import GenerationConfig
from minillm.reference.philox import fold_in

from .. import seq2seq
from ..adapters import write_adapter
from ..tiny import write_checkpoint

Fields = dict[str, Any]
PLUGINS = Path(__file__).parents[1] / "data" / "plugins"
PROMPT = [40, 41, 42, 43]
SAMPLED: Fields = {"do_sample": True, "seed": 1, "top_k": 0}
BEAMS: Fields = {"num_beams": 3}
THINKING: Fields = {"max_thinking_tokens": 3}
DRY: Fields = {"presence_penalty": -50.0, "dry_multiplier": 10.0}
PARTICLES: Fields = {**SAMPLED, "num_particles": 4, "potential": lambda ids: sum(ids) / 500}
CYCLE = [5, 6, 7, 8, 5, 6, 9]
LOOPING: Fields = {
    "prompt": CYCLE * 2,
    "prefix_allowed_tokens_fn": lambda batch_id, ids: [CYCLE[len(ids) % len(CYCLE)]],
    "max_new_tokens": 40,
}
"""A repetitive prompt, for prompt lookup"""


@dataclasses.dataclass(frozen=True)
class Plain:
    """What greedy search generates, so that a witness can name a token that does come."""

    tokens: list[int]
    text: str


def added(context: Fields, **fields: Any) -> tuple[Fields, Fields]:
    """The fields in a context, and the context without them."""
    return context | fields, context


WALK: dict[str, Callable[[Plain], tuple[Fields, Fields]]] = {
    "max_new_tokens": lambda plain: added({}, max_new_tokens=5),
    "max_length": lambda plain: added({}, max_length=9),
    "min_new_tokens": lambda plain: added({"eos_token_id": plain.tokens[2]}, min_new_tokens=6),
    "min_length": lambda plain: added({"eos_token_id": plain.tokens[2]}, min_length=10),
    "do_sample": lambda plain: added({}, do_sample=True, seed=1),
    "temperature": lambda plain: added(SAMPLED, temperature=0.1),
    "top_k": lambda plain: added(SAMPLED, top_k=2),
    "top_p": lambda plain: added(SAMPLED, top_p=0.2),
    "min_p": lambda plain: added(SAMPLED, min_p=0.7),
    "seed": lambda plain: added(SAMPLED, seed=2),
    "repetition_penalty": lambda plain: added({}, repetition_penalty=9.0),
    "presence_penalty": lambda plain: added({}, presence_penalty=-50.0),
    "frequency_penalty": lambda plain: added({}, frequency_penalty=-50.0),
    "watermarking_config": lambda plain: added({}, watermarking_config={"bias": 50.0}),
    "max_thinking_tokens": lambda plain: added({}, **THINKING | {"thinking_tokens": [PROMPT[2], 9]}),
    "thinking_tokens": lambda plain: added(
        THINKING | {"thinking_tokens": [PROMPT[2], 9]}, thinking_tokens=[PROMPT[2], [10, 11]]
    ),
    "xtc_probability": lambda plain: added(SAMPLED, xtc_probability=1.0, xtc_threshold=0.01),
    "xtc_threshold": lambda plain: added(SAMPLED | {"xtc_probability": 1.0}, xtc_threshold=0.0),
    "samplers": lambda plain: added(SAMPLED | {"temperature": 5.0, "top_p": 0.5}, samplers=["top_p", "temperature"]),
    "dry_multiplier": lambda plain: added({"presence_penalty": -50.0}, dry_multiplier=50.0),
    "dry_base": lambda plain: added(DRY, dry_base=9.0),
    "dry_allowed_length": lambda plain: added(DRY, dry_allowed_length=4),
    "dry_penalty_last_n": lambda plain: added(DRY, dry_penalty_last_n=3),
    "dry_sequence_breakers": lambda plain: added(DRY, dry_sequence_breakers=[plain.text[:2]]),
    "num_return_sequences": lambda plain: added(SAMPLED, num_return_sequences=2),
    "eos_token_id": lambda plain: added({}, eos_token_id=plain.tokens[3]),
    "stop_strings": lambda plain: added({}, stop_strings=plain.text[5:7]),
    "include_stop": lambda plain: added({"stop_strings": plain.text[5:7]}, include_stop=True),
    "num_beams": lambda plain: added({}, num_beams=3),
    "strategy": lambda plain: ({"strategy": "ranked", "strategy_options": {"rank": 1}}, {}),
    "strategy_options": lambda plain: added({"strategy": "ranked"}, strategy_options={"rank": 2}),
    "length_penalty": lambda plain: added(BEAMS, length_penalty=-2.0),
    "early_stopping": lambda plain: added(BEAMS | {"eos_token_id": range(0, 512, 5)}, early_stopping=True),
    "num_beam_groups": lambda plain: added({"num_beams": 4}, num_beam_groups=2, diversity_penalty=5.0),
    "diversity_penalty": lambda plain: (
        {"num_beams": 4, "num_beam_groups": 2, "num_return_sequences": 4, "diversity_penalty": 9.0},
        {"num_beams": 4, "num_beam_groups": 2, "num_return_sequences": 4, "diversity_penalty": 0.01},
    ),
    "force_words_ids": lambda plain: added(BEAMS, force_words_ids=[[77, 78], [[5], [6, 7]]]),
    "force_words": lambda plain: added(BEAMS, force_words=["a", ["b", "cd"]]),
    "constraints": lambda plain: added(BEAMS, constraints=[PhrasalConstraint([77, 78])]),
    "guidance_scale": lambda plain: added({}, guidance_scale=4.0),
    "negative_prompt": lambda plain: added({"guidance_scale": 4.0}, negative_prompt="abc"),
    "dola_layers": lambda plain: added({}, dola_layers=[0, 1]),
    "penalty_alpha": lambda plain: added({}, penalty_alpha=0.9, top_k=4),
    "lora": lambda plain: added({"with": "lora"}, lora="one"),
    "use_cache": lambda plain: added({"max_new_tokens": 9}, use_cache=False),
    "logprobs": lambda plain: added({}, logprobs=True),
    "top_logprobs": lambda plain: added({"logprobs": True}, top_logprobs=2),
    "echo": lambda plain: added({}, echo=True),
    "skip_special_tokens": lambda plain: added(
        {"prefix_allowed_tokens_fn": lambda batch_id, ids: [2], "eos_token_id": 7}, skip_special_tokens=False
    ),
    "top_h": lambda plain: added(SAMPLED, top_h=0.2),
    "top_n_sigma": lambda plain: added(SAMPLED, top_n_sigma=0.5),
    "typical_p": lambda plain: added(SAMPLED, typical_p=0.2),
    "epsilon_cutoff": lambda plain: added(SAMPLED, epsilon_cutoff=0.2),
    "eta_cutoff": lambda plain: added(SAMPLED, eta_cutoff=0.9),
    "mirostat": lambda plain: added(SAMPLED, mirostat=2, mirostat_tau=1.0),
    "mirostat_tau": lambda plain: added(SAMPLED | {"mirostat": 2}, mirostat_tau=0.5),
    "mirostat_eta": lambda plain: added(SAMPLED | {"mirostat": 2, "mirostat_tau": 1.0}, mirostat_eta=2.0),
    "num_particles": lambda plain: ({**PARTICLES, "num_particles": 3}, SAMPLED),
    "potential": lambda plain: (PARTICLES, PARTICLES | {"potential": lambda ids: 0.0}),
    "ess_threshold": lambda plain: added(PARTICLES | {"num_return_sequences": 4}, ess_threshold=1.0),
    "sequence_bias": lambda plain: added({}, sequence_bias=[[plain.tokens[:2], -99.0]]),
    "no_repeat_ngram_size": lambda plain: added({"presence_penalty": -50.0}, no_repeat_ngram_size=2),
    "encoder_no_repeat_ngram_size": lambda plain: added(
        {"prompt": [*PROMPT, plain.tokens[0], *PROMPT]}, encoder_no_repeat_ngram_size=1
    ),
    "encoder_repetition_penalty": lambda plain: added({}, encoder_repetition_penalty=99.0),
    "bad_words_ids": lambda plain: added({}, bad_words_ids=[plain.tokens[1:3]]),
    "prefix_allowed_tokens_fn": lambda plain: added({}, prefix_allowed_tokens_fn=lambda batch_id, ids: [5, 6]),
    "forced_bos_token_id": lambda plain: added({"prompt": [40]}, forced_bos_token_id=7),
    "forced_eos_token_id": lambda plain: added({}, forced_eos_token_id=7),
    "exponential_decay_length_penalty": lambda plain: added(
        {"eos_token_id": 7}, exponential_decay_length_penalty=(2, 3.0)
    ),
    "suppress_tokens": lambda plain: added({}, suppress_tokens=[plain.tokens[2]]),
    "begin_suppress_tokens": lambda plain: added({}, begin_suppress_tokens=[plain.tokens[0]]),
    "logits_processor": lambda plain: added({}, logits_processor=[lambda history, logits, xp: -logits]),
    "stopping_criteria": lambda plain: added({}, stopping_criteria=[lambda ids, scores: ids.shape[1] > 7]),
    "guided_json": lambda plain: added({}, guided_json={"type": "integer"}),
    "guided_regex": lambda plain: added({}, guided_regex="[0-9]{3}"),
    "guided_grammar": lambda plain: added({}, guided_grammar='start: "abc"'),
    "guided_choice": lambda plain: added({}, guided_choice=["yes", "no"]),
    "prompt_lookup_num_tokens": lambda plain: added(LOOPING, prompt_lookup_num_tokens=4),
    "max_matching_ngram_size": lambda plain: added(
        LOOPING | {"prompt_lookup_num_tokens": 4}, max_matching_ngram_size=4
    ),
    "lookahead_window": lambda plain: added({}, lookahead_window=4),
    "lookahead_ngram_size": lambda plain: added({"lookahead_window": 4}, lookahead_ngram_size=5),
    "lookahead_guesses": lambda plain: added(LOOPING | {"lookahead_window": 9}, lookahead_guesses=1),
    "decoder_prompt": lambda plain: added({"with": "encoder"}, decoder_prompt=[5, 6]),
    "decoder_start_token_id": lambda plain: added({"with": "encoder"}, decoder_start_token_id=5),
    "num_assistant_tokens": lambda plain: added({"with": "draft"}, num_assistant_tokens=2),
    "contrastive_alpha": lambda plain: added({"with": "amateur"}, contrastive_alpha=0.9),
    "amateur_temperature": lambda plain: added({"with": "amateur"}, amateur_temperature=9.0),
    "renormalize_logits": lambda plain: added(BEAMS | {"repetition_penalty": 2.0}, renormalize_logits=True),
}
"""For each field: a request that sets it, and one that does not, so that the difference can be seen."""


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    """The package with the strategy "ranked", as if installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGINS))
        yield


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_checkpoint(tmp_path_factory.mktemp("model"), seed=3), max_batch_size=4, prefix_cache=False)


@pytest.fixture(scope="module")
def engines(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """The engine alone, with a draft model, with an amateur, and with an adapter; and one with an encoder."""
    model = write_checkpoint(tmp_path_factory.mktemp("model"), seed=3)
    other = write_checkpoint(tmp_path_factory.mktemp("other"), seed=4)
    adapters = {"one": write_adapter(tmp_path_factory.mktemp("adapter"))}
    return {
        "": engine,
        "draft": Engine(model, draft=other, prefix_cache=False),
        "amateur": Engine(model, amateur=other, prefix_cache=False),
        "lora": Engine(model, adapters=adapters, prefix_cache=False),
        "encoder": Engine(seq2seq.write_checkpoint(tmp_path_factory.mktemp("t5"))),
    }


def outcome(engines: dict[str, Engine], fields: Fields) -> tuple[Any, int, int]:
    """All that comes back, and the numbers of tokens and of steps that it took."""
    fields = dict(fields)
    engine = engines[fields.pop("with", "")]
    before = dataclasses.replace(engine.stats)
    generation = engine.generate(fields.pop("prompt", PROMPT), **fields)
    after = engine.stats
    computed = after.prefill_tokens + after.decode_tokens - before.prefill_tokens - before.decode_tokens
    return generation, computed, after.steps - before.steps


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Plain:
    completion = engine.generate(PROMPT).completions[0]
    return Plain(completion.token_ids, completion.text)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Any, int, int]]:
    """Those of the contexts, each computed twice: they are the same for many fields."""
    return {}


def test_no_field_is_left_out() -> None:
    assert WALK.keys() == FIELDS.keys()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FIELDS)
def test_the_field_changes_something(
    name: str, engines: dict[str, Engine], plain: Plain, outcomes: dict[str, Any]
) -> None:
    with_it, without = WALK[name](plain)
    assert name in with_it
    if repr(without) not in outcomes:
        outcomes[repr(without)] = outcome(engines, without)
        assert outcome(engines, without) == outcomes[repr(without)]
    assert outcome(engines, with_it) != outcomes[repr(without)]


TOGETHER = [
    {"no_repeat_ngram_size": 1, "suppress_tokens": [5], "forced_eos_token_id": 7, "begin_suppress_tokens": [9]},
    {"sequence_bias": [[[5, 6], 3.0], [[9], -1.0]], "exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 7},
    {"bad_words_ids": [[5], [9, 5]], "min_new_tokens": 3, "eos_token_id": [7, 8], **SAMPLED, "typical_p": 0.8},
    {"prefix_allowed_tokens_fn": lambda batch_id, ids: [5 + batch_id, 9 + len(ids) % 4], **SAMPLED, "eta_cutoff": 0.1},
    {**SAMPLED, "mirostat": 2, "mirostat_tau": 2.0, "repetition_penalty": 1.2, "num_return_sequences": 2},
    {
        "num_beams": 3,
        "no_repeat_ngram_size": 2,
        "forced_eos_token_id": 7,
        "eos_token_id": 7,
        "renormalize_logits": True,
    },
]


@pytest.mark.parametrize("fields", TOGETHER, ids=[" ".join(fields) for fields in TOGETHER])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "naive"])
@pytest.mark.slow
def test_ragged_prompts_with_different_limits_give_what_each_gives_alone(
    fields: Fields, use_cache: bool, engine: Engine
) -> None:
    """Also streamed."""
    prompts = [PROMPT, PROMPT[:1], list(range(50, 67))]
    config = GenerationConfig.from_dict(fields | {"use_cache": use_cache})
    together = engine.generate(prompts, config)
    for batch_id, (prompt, generation) in enumerate(zip(prompts, together, strict=True)):
        if "prefix_allowed_tokens_fn" in fields:
            allow = fields["prefix_allowed_tokens_fn"]
            config = config.merged(prefix_allowed_tokens_fn=lambda _, ids, i=batch_id, allow=allow: allow(i, ids))
        if "seed" in fields:
            config = config.merged(seed=fold_in(fields["seed"], batch_id))
        alone = engine.generate(prompt, config)
        assert [c.token_ids for c in alone.completions] == [c.token_ids for c in generation.completions]
        streamed: list[list[int]] = [[] for _ in generation.completions]
        for event in engine.stream(prompt, config):
            streamed[event.index] += event.token_ids
        assert streamed == [c.token_ids for c in generation.completions]


def test_requests_with_different_limits_share_a_step_and_keep_their_ends(engine: Engine) -> None:
    limits = {engine.add(PROMPT, forced_eos_token_id=7, max_new_tokens=limit): limit for limit in (3, 5, 8)}
    tokens: dict[int, list[int]] = {request_id: [] for request_id in limits}
    steps = itertools.count()
    while engine.busy:
        next(steps)
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert next(steps) == 8
    for request_id, limit in limits.items():
        assert len(tokens[request_id]) == limit
        assert tokens[request_id].index(7) == limit - 1
