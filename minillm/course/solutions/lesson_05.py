"""Answers to the exercises of lesson 5."""


def intensity(T: int, n: int, m: int, size: int) -> float:
    """The weight is read once for all rows."""
    return 2 * T * n * m / (size * n * m + 4 * T * (n + m))


def least_seconds(flops: float, moved: float, peak: float, bandwidth: float) -> float:
    """The roofline."""
    return max(flops / peak, moved / bandwidth)
