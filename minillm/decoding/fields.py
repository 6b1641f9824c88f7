"""The rules of every generation field: what it may be, its default, and the field without which it has no effect."""

import difflib
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from ..errors import ParameterError


class Rule(NamedTuple):
    """What holds for one field; `read` turns a value into the type of Settings, or raises ValueError."""

    default: Any
    expected: str
    read: Callable[[object], Any]
    needs: str | None = None


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _whole(least: float, below: float = math.inf) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) < below:
            raise ValueError
        return int(value)

    return read


def _number(allowed: Callable[[Any], bool]) -> Callable[[object], float]:
    """A number that `allowed` bounds on both sides, so that neither NaN nor infinity passes."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not allowed(value):
            raise ValueError
        return float(value)

    return read


def _several(kind: type, read_one: Callable[[object], Any]) -> Callable[[object], tuple[Any, ...]]:
    """One value of `kind` or a sequence of them, each read by `read_one`, without repetitions."""

    def read(value: object) -> tuple[Any, ...]:
        values = [value] if isinstance(value, kind) else value
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise ValueError
        return tuple(dict.fromkeys(read_one(one) for one in values))

    return read


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _stopping_rule(value: object) -> bool | str:
    return "never" if value == "never" else _flag(value)


_SMALL, _LARGE = 1e-30, 1e30
"""Logits multiplied or divided by these stay within the range of float32."""

_AT_LEAST_1 = "a whole number of at least 1"
_AT_LEAST_0 = "a whole number of at least 0"
_TRUE_OR_FALSE = "True or False"
_ANY_NUMBER = f"a number from -{_LARGE} to {_LARGE}"

RULES: dict[str, Rule] = {
    "do_sample": Rule(False, _TRUE_OR_FALSE, _flag),
    "num_beams": Rule(1, _AT_LEAST_1, _whole(1)),
    "stop_strings": Rule((), "a text or a sequence of texts, none of them empty", _several(str, _text)),
    "temperature": Rule(
        1.0,
        f"a number above 0 ({_SMALL} to {_LARGE}); for greedy decoding set do_sample=False and no temperature",
        _number(lambda t: _SMALL <= t <= _LARGE),
        needs="do_sample",
    ),
    "top_k": Rule(50, "a whole number of at least 1, or 0 for no limit", _whole(0), needs="do_sample"),
    "top_p": Rule(1.0, "a number above 0 and at most 1", _number(lambda p: 0 < p <= 1), needs="do_sample"),
    "min_p": Rule(0.0, "a number from 0 to 1", _number(lambda p: 0 <= p <= 1), needs="do_sample"),
    "seed": Rule(None, "a whole number from 0 to 2**64 - 1", _whole(0, 2**64), needs="do_sample"),
    "length_penalty": Rule(1.0, "a number from -50 to 50", _number(lambda x: -50 <= x <= 50), needs="num_beams"),
    "early_stopping": Rule(False, "True, False or 'never'", _stopping_rule, needs="num_beams"),
    "include_stop": Rule(False, _TRUE_OR_FALSE, _flag, needs="stop_strings"),
    "max_new_tokens": Rule(None, _AT_LEAST_1, _whole(1)),
    "max_length": Rule(None, _AT_LEAST_1, _whole(1)),
    "min_new_tokens": Rule(0, _AT_LEAST_0, _whole(0)),
    "min_length": Rule(0, _AT_LEAST_0, _whole(0)),
    "repetition_penalty": Rule(
        1.0, f"a number above 0 ({_SMALL} to {_LARGE})", _number(lambda x: _SMALL <= x <= _LARGE)
    ),
    "presence_penalty": Rule(0.0, _ANY_NUMBER, _number(lambda x: -_LARGE <= x <= _LARGE)),
    "frequency_penalty": Rule(0.0, _ANY_NUMBER, _number(lambda x: -_LARGE <= x <= _LARGE)),
    "num_return_sequences": Rule(1, _AT_LEAST_1, _whole(1)),
    "eos_token_id": Rule((), "a token id or a sequence of token ids", _several(Integral, _whole(-math.inf))),
    "use_cache": Rule(True, _TRUE_OR_FALSE, _flag),
    "logprobs": Rule(False, _TRUE_OR_FALSE, _flag),
    "top_logprobs": Rule(0, _AT_LEAST_0, _whole(0)),
    "echo": Rule(False, _TRUE_OR_FALSE, _flag),
    "prompt_lookup_num_tokens": Rule(0, "a whole number of at least 1, or 0 for none", _whole(0)),
    "max_matching_ngram_size": Rule(2, _AT_LEAST_1, _whole(1), needs="prompt_lookup_num_tokens"),
    "lookahead_window": Rule(0, "a whole number of at least 1, or 0 for none", _whole(0)),
    "lookahead_ngram_size": Rule(3, "a whole number of at least 2", _whole(2), needs="lookahead_window"),
    "lookahead_guesses": Rule(5, _AT_LEAST_1, _whole(1), needs="lookahead_window"),
    "num_assistant_tokens": Rule(
        5, "a whole number of at least 1, or 0 to leave the draft model out", _whole(0), needs="draft"
    ),
    "contrastive_alpha": Rule(0.1, "a number from 0 to 1", _number(lambda a: 0 <= a <= 1), needs="amateur"),
    "amateur_temperature": Rule(
        1.0, f"a number above 0 ({_SMALL} to {_LARGE})", _number(lambda t: _SMALL <= t <= _LARGE), needs="amateur"
    ),
}


class Need(NamedTuple):
    """What `Rule.needs` asks of the field that it names."""

    words: str
    met: Callable[[Any], bool]


NEEDS = {
    "do_sample": Need("do_sample=True", bool),
    "num_beams": Need("num_beams above 1", lambda num_beams: bool(num_beams > 1)),
    "stop_strings": Need("stop_strings", bool),
    "prompt_lookup_num_tokens": Need("prompt_lookup_num_tokens", bool),
    "lookahead_window": Need("lookahead_window", bool),
    "draft": Need("a draft model: Engine(..., draft=...)", bool),
    "amateur": Need("an amateur model: Engine(..., amateur=...)", bool),
}

MODELS = ("draft", "amateur")
"""Models that an engine may have beside its own; what `Rule.needs` asks of them is that they are there."""

SEARCHES = {
    "num_beams": "set num_beams=1",
    "prompt_lookup_num_tokens": "leave it out",
    "lookahead_window": "leave it out",
    "num_assistant_tokens": "set num_assistant_tokens=0 to leave the draft model out",
    "amateur": "use an engine without an amateur",
}
"""What says how tokens are found, of which a request has at most one -> how to have another one instead."""

NOT_OFFERED: dict[str, object] = {
    "typical_p": 1,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "dola_layers": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "decoder_start_token_id": None,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "watermarking_config": None,
    "token_healing": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
    "constraints": None,
    "force_words_ids": None,
    "max_time": None,
    "use_mtp": False,
    "assistant_early_exit": None,
    "assistant_ensemble_weight": None,
    "speculation_type": None,
}
"""Fields of transformers that change the result and that this version does not do -> the value without effect."""

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
"""Fields of transformers that never change the tokens: how it pads, what it hands back, how it runs."""


def shown(value: object) -> str:
    """A value for an error message: short, and in one line."""
    return " ".join(reprlib.repr(value).split())


def refuse_unknown(given: Mapping[str, object]) -> None:
    """Raise ParameterError for a name that is no field, or a transformers field that minillm does not do.

    The latter are let through with the value None, which says nothing: a configuration of transformers, written out in
    full, holds many of them.
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
        nearest = difflib.get_close_matches(name, RULES, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"expected one of {', '.join(RULES)}"
        raise ParameterError(f"unknown generation field {name!r}: {hint}")


def unfulfilled(defaults: Mapping[str, object]) -> list[str]:
    """Names of the fields in a checkpoint's generation_config.json that ask for what minillm does not do."""
    return [
        name
        for name, value in defaults.items()
        if not (name in RULES or name in NO_MEANING or value in (None, [], {}, NOT_OFFERED.get(name)))
    ]
