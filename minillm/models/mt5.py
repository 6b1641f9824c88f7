"""mT5 (Xue et al., arXiv 2010.11934): T5 v1.1 for 101 languages. Only its defaults differ from T5's."""

from collections.abc import Mapping
from typing import Any

from .t5 import NAMES, T5Config, build, read

__all__ = ["NAMES", "build", "read_config"]


def read_config(raw: Mapping[str, Any]) -> T5Config:
    """mT5's configuration from config.json; errors as of `t5.read_config`."""
    return read(raw, "mt5", "gated-gelu", scaled=False)
