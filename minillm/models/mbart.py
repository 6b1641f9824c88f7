"""mBART and mBART-50 (Liu et al., arXiv 2001.08210; Tang et al., arXiv 2008.00401): BART with pre-norm.

Each stack has a final norm. A language's token ends or begins the source, and begins the decoder's text: a request's
`forced_bos_token_id` names the language to translate into.
"""

from collections.abc import Mapping
from typing import Any

from .bart import NAMES, BartConfig, build, read

__all__ = ["NAMES", "build", "read_config"]


def read_config(raw: Mapping[str, Any]) -> BartConfig:
    """mBART's configuration from config.json; errors as of `bart.read_config`."""
    special = {"bos_token_id": 0, "eos_token_id": 2}
    norms = {"pre_norm": True, "embedding_norm": True, "final_norm": True}
    return read(raw, "mbart", special, **norms, learned_positions=True, source_wraps=True)
