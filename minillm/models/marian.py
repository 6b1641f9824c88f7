"""MarianMT (Junczys-Dowmunt et al., arXiv 1804.00344): the translation models of OPUS-MT, as transformers has them.

BART with sinusoidal positions, without a norm of the embedding, and with a bias of the logits.
"""

from collections.abc import Mapping
from typing import Any

from .bart import BartConfig, build, read
from .pegasus import NAMES

__all__ = ["NAMES", "build", "read_config"]


def read_config(raw: Mapping[str, Any]) -> BartConfig:
    """MarianMT's configuration from config.json; errors as of `bart.read_config`.

    `decoder_vocab_size` sizes a second vocabulary, which share_encoder_decoder_embeddings refuses.
    """
    special = {"eos_token_id": 0, "decoder_start_token_id": 58100}
    return read(raw, "marian", special, pre_norm=False, embedding_norm=False, learned_positions=False, final_norm=False)
