"""Reference implementation of every operation on an array module `xp`, each with its cost."""

from .activation import glu, scale_logits
from .attention import attend, store_kv
from .linear import embed, linear
from .norm import layer_norm, rms_norm
from .rotary import Rotation, cosines_and_sines, rotary
from .sampling import sample

__all__ = ["Rotation", "attend", "cosines_and_sines", "embed", "glu", "layer_norm", "linear"]
__all__ += ["rms_norm", "rotary", "sample", "scale_logits", "store_kv"]
