"""Reference implementation of every operation on an array module `xp`, each with its cost."""

from .attention import attend, store_joined, store_kv
from .convolution import convolve, unfold
from .delta_rule import delta_rule
from .experts import Routing, combine, linear_experts, route
from .gates import gate, glu, multiply, scale_logits
from .linear import embed, linear
from .linear_heads import linear_heads
from .low_rank import add_low_rank
from .norm import layer_norm, rms_norm
from .rotary import Rotation, cosines_and_sines, rotary
from .sampling import sample
from .selective_scan import selective_scan

__all__ = ["Rotation", "Routing", "add_low_rank", "attend", "combine", "convolve", "cosines_and_sines", "delta_rule"]
__all__ += ["embed", "gate", "glu", "layer_norm", "linear", "linear_experts", "linear_heads", "multiply"]
__all__ += ["rms_norm", "rotary", "route", "sample", "scale_logits", "selective_scan", "store_joined", "store_kv"]
__all__ += ["unfold"]
