"""Reference implementation of every operation on an array module `xp`, each with its cost."""

from .activation import glu
from .attention import attend, store_kv
from .linear import embed, linear
from .low_rank import add_low_rank
from .norm import layer_norm, rms_norm
from .rotary import Rotation, cosines_and_sines, rotary
from .sampling import sample

__all__ = ["Rotation", "add_low_rank", "attend", "cosines_and_sines", "embed", "glu", "layer_norm", "linear"]
__all__ += ["rms_norm", "rotary", "sample", "store_kv"]
