"""Settings as an engine would settle them, for the tests of what may be asked for."""

from typing import Any

from minillm.decoding.fields import FIELDS
from minillm.decoding.resolving import resolve
from minillm.decoding.settings import GenerationConfig, Settings

CONTEXT: dict[str, dict[str, Any]] = {
    "do_sample": {"do_sample": True},
    "strategy": {"strategy": "ranked"},
    "num_beams": {"num_beams": 4},
    "num_beam_groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "stop_strings": {"stop_strings": "."},
    "mirostat": {"do_sample": True, "mirostat": 2},
    "xtc_probability": {"do_sample": True, "xtc_probability": 0.5},
    "max_thinking_tokens": {"max_thinking_tokens": 5},
    "dry_multiplier": {"dry_multiplier": 0.8},
    "num_particles": {"do_sample": True, "num_particles": 4, "potential": len},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 5},
    "lookahead_window": {"lookahead_window": 5},
    "draft": {"models": ("draft",)},
    "amateur": {"models": ("amateur",)},
    "encoder": {"models": ("encoder",)},
}
"""Fields to set so that a field with `needs` has an effect"""


def settle(checkpoint: dict[str, Any] | None = None, eos: Any = 2, models: Any = (), **user: Any) -> Settings:
    return resolve(GenerationConfig(**user), checkpoint or {}, vocab_size=100, eos_token_id=eos, models=models)


def context(name: str) -> dict[str, Any]:
    return {} if FIELDS[name].needs is None else CONTEXT[FIELDS[name].needs]
