"""The mathematics of every operation on an array module `xp`, and beside each what it costs."""

from .attention import attend, attention_map
from .embed import embed
from .kv import store_kv
from .linear import linear
from .norm import layer_norm, rms_norm
from .sampling import sample

__all__ = ["attend", "attention_map", "embed", "layer_norm", "linear", "rms_norm", "sample", "store_kv"]
