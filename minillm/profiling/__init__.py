"""Where the time of a real run goes: each operation, layer and phase, beside the least it could take.

The same requests run twice side by side, once through a `TimingBackend` and once without, and take turns step by step;
what they differ by is what watching costs. Nothing is estimated: parts are summed as they were measured, and what no
operation accounts for is named.

    profile(engine, [[2, 5, 6]], max_new_tokens=32).phases["decode"].rows
"""

from .phases import Ceilings, Layer, Phase, Profile, Row, Span, Step, layer_spans
from .running import probe_with, profile

__all__ = [
    "Ceilings",
    "Layer",
    "Phase",
    "Profile",
    "Row",
    "Span",
    "Step",
    "layer_spans",
    "probe_with",
    "profile",
]
