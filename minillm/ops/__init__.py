"""One operation per file: the reference mathematics, written for any array module `xp` (NumPy or CuPy)."""
