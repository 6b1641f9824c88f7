"""Profiling of a real run: time of each operation, layer and phase, with its roofline floor.

The same requests run twice, with a `TimingBackend` and without, alternating step by step; the difference is the
profiling overhead. Nothing is estimated: parts are summed as measured, and time outside operations is listed
separately.

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
