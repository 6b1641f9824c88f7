"""Tests of the GPU backend, most of them without a GPU."""
