"""A model family: Llama by another name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minillm.models import llama
from minillm.models.llama import NAMES, LlamaConfig, build

__all__ = ["NAMES", "build", "read_config"]


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """The configuration in a config.json."""
    return replace(llama.read_config({**raw, "model_type": "llama"}), model_type="example_llama")
