"""Which tensor of a GGUF file has which type: llama.cpp's mixtures, by the names under which it knows them.

    Q6_K, Q5_K_S, Q4_K_S, Q5_1, Q5_0    one type, and the LM head in Q6_K; it may be the embedding, too
    Q5_K_M, Q4_K_M                      Q5_K or Q4_K; half of the values' and of the MLPs' last matrices in Q6_K
    IQ4_XS, IQ4_NL                      4 bits with a code book; some of these in Q5_K
    MXFP4                               experts MXFP4, everything else Q8_0; without experts, all projections MXFP4

A matrix that says more about the output gets more bits: the LM head; the values' projection, which several heads share;
the MLP's last one, whose inputs have outliers. `more_bits` says in which layers: the first eighth, the last eighth and
a third of those between.

Rows that are not whole blocks of 256 have a type of blocks of 32 instead, and F16 if they are not whole blocks of
these. Norms, biases, positions and routers are not rounded.

Source: https://github.com/ggml-org/llama.cpp (`src/llama-quant.cpp`, `llama_tensor_get_type`), where MXFP4 is
MXFP4_MOE and has experts alone. tests/formats/test_mixtures.py compares with its files.
"""

import re
from dataclasses import dataclass

from ...config import ModelConfig
from .file import FILE_TYPES, TYPES, Type

MIXTURES = {
    "Q6_K": "Q6_K",
    "Q5_K_M": "Q5_K",
    "Q5_K_S": "Q5_K",
    "Q4_K_M": "Q4_K",
    "Q4_K_S": "Q4_K",
    "Q5_1": "Q5_1",
    "Q5_0": "Q5_0",
    "IQ4_XS": "IQ4_XS",
    "IQ4_NL": "IQ4_NL",
    "MXFP4": "MXFP4",
}
"""A mixture -> the type of most of its matrices"""
FALLBACKS = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0", "IQ4_XS": "IQ4_NL"}
"""Types of blocks of 256 -> those for rows that are not whole blocks"""
TYPE_OF = {kind.name: kind for kind in TYPES.values()}
FILE_TYPE_OF = {name: code for code, name in FILE_TYPES.items()} | {"MXFP4": 38}
"""A mixture -> `general.file_type`"""


@dataclass(frozen=True)
class Mixture:
    """The types of a model's matrices in a mixture."""

    name: str
    """One of `MIXTURES`"""
    config: ModelConfig
    architecture: str
    tied: bool
    """The embedding is the LM head, too"""

    def type_of(self, name: str, width: int) -> Type:
        """The type of a matrix by its name in the file, with rows of `width` numbers."""
        kind = self._preferred(name)
        if width % TYPE_OF[kind].numbers:
            kind = FALLBACKS.get(kind, kind)
        return TYPE_OF["F16" if width % TYPE_OF[kind].numbers else kind]

    def _preferred(self, name: str) -> str:
        """The type of a matrix with rows of any width."""
        usual, experts = MIXTURES[self.name], self.config.num_experts
        block = re.match(r"blk\.(\d+)\.(\w+?)(_exps|_shexp)?\.", name)
        if self.name == "MXFP4":
            return usual if block and (block[3] == "_exps" or not experts) else "Q8_0"
        if block is None:
            return "Q6_K" if name == "output.weight" or (self.tied and name == "token_embd.weight") else usual
        layer, matrix = int(block[1]), block[2]
        if experts == 8 and matrix in ("attn_k", "attn_v", "attn_qkv", "attn_kv_b"):
            return "Q8_0"
        if experts == 8 and matrix == "attn_output":
            return "Q5_K" if usual in ("Q4_K", "IQ4_XS", "IQ4_NL") else usual
        if matrix in ("attn_v", "attn_qkv", "attn_kv_b", "ffn_down"):
            return self._important(layer, usual, is_values=matrix != "ffn_down")
        return usual

    def _important(self, layer: int, usual: str, *, is_values: bool) -> str:
        """The type of the values' projection, or of the last matrix of an MLP."""
        config = self.config
        if self.name.endswith("_M") and more_bits(layer, config.num_layers):
            return "Q6_K"
        if not is_values:
            return "Q5_K" if layer < config.num_layers // 8 and self.name in ("Q4_K_S", "IQ4_XS", "IQ4_NL") else usual
        if self.name in ("IQ4_XS", "IQ4_NL"):
            return "Q5_K" if config.num_heads >= 4 * config.num_kv_heads else usual
        return "Q5_K" if usual == "Q4_K" and (self._is_70b or (self.name == "Q4_K_S" and layer < 4)) else usual

    @property
    def _is_70b(self) -> bool:
        """Whether llama.cpp takes the model for one of 70 billion parameters, whose values few heads have."""
        config = self.config
        return config.num_layers == 80 and (
            self.architecture == "qwen2" or (self.architecture == "llama" and config.num_heads > config.num_kv_heads)
        )


def more_bits(layer: int, layers: int) -> bool:
    """Whether a layer is one of those with more bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
