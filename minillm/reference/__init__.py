"""Reference implementation of every operation on an array module `xp`, each with its cost."""

from .activation import glu, scale_logits
from .attention import attend, store_kv
from .experts import Routing, combine, linear_experts, route
from .linear import embed, linear
from .norm import layer_norm, rms_norm
from .rotary import Rotation, cosines_and_sines, rotary
from .sampling import sample

__all__ = ["Rotation", "Routing", "attend", "combine", "cosines_and_sines", "embed", "glu", "layer_norm", "linear"]
__all__ += ["linear_experts", "rms_norm", "rotary", "route", "sample", "scale_logits", "store_kv"]
