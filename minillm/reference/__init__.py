"""Reference implementation of every operation on an array module `xp`, each with its cost."""

from .activation import gate, glu, scale_logits
from .attention import attend, store_kv
from .convolution import convolve
from .experts import Routing, combine, linear_experts, route
from .linear import embed, linear
from .low_rank import add_low_rank
from .norm import layer_norm, rms_norm
from .rotary import Rotation, cosines_and_sines, rotary
from .sampling import sample
from .selective_scan import selective_scan

__all__ = ["Rotation", "Routing", "add_low_rank", "attend", "combine", "convolve", "cosines_and_sines"]
__all__ += ["embed", "gate", "glu", "layer_norm", "linear", "linear_experts", "rms_norm", "rotary", "route"]
__all__ += ["sample", "scale_logits", "selective_scan", "store_kv"]
