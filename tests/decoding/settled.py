"""Settings as an engine would settle them, for the tests of what may be asked for."""

import dataclasses
from typing import Any

from minillm.decoding.fields import RULES
from minillm.decoding.parameters import GenerationConfig, Settings
from minillm.decoding.resolving import resolve

FIELDS = [field.name for field in dataclasses.fields(GenerationConfig)]
CONTEXT: dict[str, dict[str, Any]] = {
    "do_sample": {"do_sample": True},
    "num_beams": {"num_beams": 4},
    "num_beam_groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "stop_strings": {"stop_strings": "."},
    "mirostat": {"do_sample": True, "mirostat": 2},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 5},
    "lookahead_window": {"lookahead_window": 5},
    "draft": {"models": ("draft",)},
    "amateur": {"models": ("amateur",)},
}
"""Fields to set so that a field with `needs` has an effect"""


def settle(defaults: dict[str, Any] | None = None, eos: Any = 2, models: Any = (), **said: Any) -> Settings:
    return resolve(GenerationConfig(**said), defaults or {}, vocab_size=100, eos_token_id=eos, models=models)


def context(name: str) -> dict[str, Any]:
    return {} if RULES[name].needs is None else CONTEXT[RULES[name].needs]
