"""XLM-RoBERTa (Conneau et al., arXiv 1911.02116): RoBERTa for many languages, with a larger vocabulary."""

from collections.abc import Mapping
from typing import Any

from .encoder import EncoderConfig, read_encoder
from .roberta import NAMES, build

__all__ = ["NAMES", "build", "read_config"]


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """The configuration from config.json; errors as of RoBERTa's."""
    return read_encoder(raw, "xlm-roberta", padded_positions=True)
