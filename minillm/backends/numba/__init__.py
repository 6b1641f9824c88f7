"""Kernels for a CPU, compiled by Numba. Nothing outside this package imports numba."""
