"""Rules of every generation field: allowed values, default, and the field that it depends on."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

from ..errors import ParameterError, listed, shown
from .readers import (
    LARGE,
    SMALL,
    RefusedError,
    biases,
    choices,
    each,
    flag,
    function,
    number,
    one_of,
    pair,
    schema,
    several,
    stopping_rule,
    text,
    texts,
    token_ids,
    whole,
)


class Rule(NamedTuple):
    """Default, type and dependency of a field; `read` converts a value to the type in Settings or raises ValueError."""

    default: Any
    expected: str
    read: Callable[[object], Any]
    needs: str | None = None


_AT_LEAST_1 = "a whole number of at least 1"
_AT_LEAST_0 = "a whole number of at least 0"
_TRUE_OR_FALSE = "True or False"
_CUTOFF = "a number from 0 (no limit) to below 1"
_ANY_NUMBER = f"a number from -{LARGE} to {LARGE}"

RULES: dict[str, Rule] = {
    "do_sample": Rule(False, _TRUE_OR_FALSE, flag),
    "num_beams": Rule(1, _AT_LEAST_1, whole(1)),
    "stop_strings": Rule((), "a text or a sequence of texts, none of them empty", texts),
    "temperature": Rule(
        1.0,
        f"a number above 0 ({SMALL} to {LARGE}); for greedy decoding set do_sample=False and no temperature",
        number(lambda t: SMALL <= t <= LARGE),
        needs="do_sample",
    ),
    "top_k": Rule(50, "a whole number of at least 1, or 0 for no limit", whole(0), needs="do_sample"),
    "top_p": Rule(1.0, "a number above 0 and at most 1", number(lambda p: 0 < p <= 1), needs="do_sample"),
    "min_p": Rule(0.0, "a number from 0 to 1", number(lambda p: 0 <= p <= 1), needs="do_sample"),
    "seed": Rule(None, "a whole number from 0 to 2**64 - 1", whole(0, 2**64), needs="do_sample"),
    "length_penalty": Rule(1.0, "a number from -50 to 50", number(lambda x: -50 <= x <= 50), needs="num_beams"),
    "early_stopping": Rule(False, "True, False or 'never'", stopping_rule, needs="num_beams"),
    "num_beam_groups": Rule(1, _AT_LEAST_1, whole(1)),
    "diversity_penalty": Rule(
        0.0, f"a number above 0 and at most {LARGE}", number(lambda x: 0 < x <= LARGE), needs="num_beam_groups"
    ),
    "penalty_alpha": Rule(0.0, "a number from 0 to 1", number(lambda x: 0 <= x <= 1)),
    "include_stop": Rule(False, _TRUE_OR_FALSE, flag, needs="stop_strings"),
    "max_new_tokens": Rule(None, _AT_LEAST_1, whole(1)),
    "max_length": Rule(None, _AT_LEAST_1, whole(1)),
    "min_new_tokens": Rule(0, _AT_LEAST_0, whole(0)),
    "min_length": Rule(0, _AT_LEAST_0, whole(0)),
    "repetition_penalty": Rule(1.0, f"a number above 0 ({SMALL} to {LARGE})", number(lambda x: SMALL <= x <= LARGE)),
    "presence_penalty": Rule(0.0, _ANY_NUMBER, number(lambda x: -LARGE <= x <= LARGE)),
    "frequency_penalty": Rule(0.0, _ANY_NUMBER, number(lambda x: -LARGE <= x <= LARGE)),
    "guided_json": Rule(None, "a JSON schema: an object, or its text", schema),
    "guided_regex": Rule(None, "a regular expression, as a text that is not empty", text),
    "guided_grammar": Rule(None, "a grammar in Lark's notation, as a text that is not empty", text),
    "guided_choice": Rule(None, "a text or a sequence of texts, at least one and none empty", choices),
    "num_return_sequences": Rule(1, _AT_LEAST_1, whole(1)),
    "eos_token_id": Rule((), "a token id or a sequence of token ids", several(Integral, whole(-math.inf))),
    "use_cache": Rule(True, _TRUE_OR_FALSE, flag),
    "logprobs": Rule(False, _TRUE_OR_FALSE, flag),
    "top_logprobs": Rule(0, _AT_LEAST_0, whole(0)),
    "echo": Rule(False, _TRUE_OR_FALSE, flag),
    # further filters of sampling, and mirostat
    "top_h": Rule(None, "a number above 0 and at most 1", number(lambda h: 0 < h <= 1), needs="do_sample"),
    "top_n_sigma": Rule(
        0.0, "a number above 0, or 0 for no limit", number(lambda n: 0 <= n <= LARGE), needs="do_sample"
    ),
    "typical_p": Rule(1.0, "a number above 0 and at most 1", number(lambda p: 0 < p <= 1), needs="do_sample"),
    "epsilon_cutoff": Rule(0.0, _CUTOFF, number(lambda x: 0 <= x < 1), needs="do_sample"),
    "eta_cutoff": Rule(0.0, _CUTOFF, number(lambda x: 0 <= x < 1), needs="do_sample"),
    "mirostat": Rule(0, "2 for Mirostat 2.0, or 0 for none", one_of(0, 2), needs="do_sample"),
    "mirostat_tau": Rule(5.0, "a number of bits above 0", number(lambda x: 0 < x <= LARGE), needs="mirostat"),
    "mirostat_eta": Rule(0.1, "a number above 0", number(lambda x: 0 < x <= LARGE), needs="mirostat"),
    # further processors
    "sequence_bias": Rule((), "pairs of token ids and a bias, such as [[[10, 45], -2.0], [[64], 7.5]]", biases),
    "no_repeat_ngram_size": Rule(0, _AT_LEAST_0, whole(0)),
    "bad_words_ids": Rule((), "a sequence of sequences of token ids, none empty", each(token_ids)),
    "prefix_allowed_tokens_fn": Rule(None, "a function (batch_id, token_ids) -> allowed token ids", function(2)),
    "forced_bos_token_id": Rule(None, "a token id", whole(0)),
    "forced_eos_token_id": Rule((), "a token id or a sequence of token ids", several(Integral, whole(0))),
    "exponential_decay_length_penalty": Rule(
        None,
        f"a pair: a whole number of tokens, and a factor ({SMALL} to {LARGE})",
        pair(whole(0), number(lambda x: SMALL <= x <= LARGE)),
    ),
    "suppress_tokens": Rule((), "a sequence of token ids", several(Integral, whole(0))),
    "begin_suppress_tokens": Rule((), "a sequence of token ids", several(Integral, whole(0))),
    "logits_processor": Rule((), "a sequence of functions (history, logits, xp) -> logits", each(function(3))),
    "renormalize_logits": Rule(False, _TRUE_OR_FALSE, flag, needs="num_beams"),
    "prompt_lookup_num_tokens": Rule(0, "a whole number of at least 1, or 0 for none", whole(0)),
    "max_matching_ngram_size": Rule(2, _AT_LEAST_1, whole(1), needs="prompt_lookup_num_tokens"),
    "lookahead_window": Rule(0, "a whole number of at least 1, or 0 for none", whole(0)),
    "lookahead_ngram_size": Rule(3, "a whole number of at least 2", whole(2), needs="lookahead_window"),
    "lookahead_guesses": Rule(5, _AT_LEAST_1, whole(1), needs="lookahead_window"),
    "num_assistant_tokens": Rule(
        5, "a whole number of at least 1, or 0 to leave the draft model out", whole(0), needs="draft"
    ),
    "contrastive_alpha": Rule(0.1, "a number from 0 to 1", number(lambda a: 0 <= a <= 1), needs="amateur"),
    "amateur_temperature": Rule(
        1.0, f"a number above 0 ({SMALL} to {LARGE})", number(lambda t: SMALL <= t <= LARGE), needs="amateur"
    ),
}


class Need(NamedTuple):
    """The condition that `Rule.needs` puts on the field it names."""

    words: str
    met: Callable[[Any], bool]


NEEDS = {
    "do_sample": Need("do_sample=True", bool),
    "num_beams": Need("num_beams above 1", lambda num_beams: bool(num_beams > 1)),
    "num_beam_groups": Need("num_beam_groups above 1", lambda groups: bool(groups > 1)),
    "stop_strings": Need("stop_strings", bool),
    "mirostat": Need("mirostat=2", bool),
    "prompt_lookup_num_tokens": Need("prompt_lookup_num_tokens", bool),
    "lookahead_window": Need("lookahead_window", bool),
    "draft": Need("a draft model: Engine(..., draft=...)", bool),
    "amateur": Need("an amateur model: Engine(..., amateur=...)", bool),
}

MODELS = ("draft", "amateur")
"""Additional models that an engine may have; `Rule.needs` requires them to be loaded."""

SEARCHES = {
    "num_beams": "set num_beams=1",
    "penalty_alpha": "leave it out",
    "prompt_lookup_num_tokens": "leave it out",
    "lookahead_window": "leave it out",
    "num_assistant_tokens": "set num_assistant_tokens=0 to leave the draft model out",
    "amateur": "use an engine without an amateur",
}
"""Fields that select a search strategy, at most one per request -> how to switch it off in favour of another."""

NOT_OFFERED: dict[str, object] = {
    "guidance_scale": 1,
    "dola_layers": None,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "decoder_start_token_id": None,
    "remove_invalid_values": False,
    "watermarking_config": None,
    "token_healing": False,
    "constraints": None,
    "force_words_ids": None,
    "max_time": None,
    "use_mtp": False,
    "assistant_early_exit": None,
    "assistant_ensemble_weight": None,
    "speculation_type": None,
}
"""Fields of transformers that change the result and are not supported -> the value without effect."""

NO_MEANING = frozenset(
    {
        "pad_token_id",
        "bos_token_id",
        "max_cache_len",
        "cache_implementation",
        "cache_config",
        "low_memory",
        "prefill_chunk_size",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "is_assistant",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "transformers_version",
        "_from_model_config",
        "_commit_hash",
    }
)
"""Fields of transformers that never change the tokens: padding, return format, execution."""


def read_field(name: str, said: Mapping[str, object], inherited: Mapping[str, object]) -> Any:
    """The value of a field by precedence, checked on its own."""
    rule = RULES[name]
    value = said.get(name, inherited.get(name))
    if value is None:
        return rule.default
    try:
        return rule.read(value)
    except ValueError as error:
        origin = "" if name in said else " (from the checkpoint)"
        reason = str(error) if isinstance(error, RefusedError) else f"expected {rule.expected}"
        raise ParameterError(f"{name}={shown(value)}{origin}: {reason}") from None


def refuse_unknown(given: Mapping[str, object]) -> None:
    """Raise ParameterError for an unknown name, or a transformers field that minillm does not support.

    The latter are accepted with the value None, which means unset: a full configuration written by transformers has
    many of them.
    """
    for name, value in given.items():
        if name in RULES or (value is None and (name in NOT_OFFERED or name in NO_MEANING)):
            continue
        if name in NOT_OFFERED:
            raise ParameterError(
                f"{name} is a field of transformers that this version of minillm does not do: leave it out"
            )
        if name in NO_MEANING:
            raise ParameterError(f"{name} is a field of transformers that means nothing to minillm: leave it out")
        import difflib  # only needed here

        nearest = difflib.get_close_matches(name, RULES, n=1) if isinstance(name, str) else []
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"expected one of {listed(RULES)}"
        raise ParameterError(f"unknown generation field {shown(name)}: {hint}")


def unfulfilled(defaults: Mapping[str, object]) -> list[str]:
    """Names of the fields in a checkpoint's generation_config.json that minillm does not support."""
    return [
        name
        for name, value in defaults.items()
        if not (name in RULES or name in NO_MEANING or value in (None, [], {}, NOT_OFFERED.get(name)))
    ]
