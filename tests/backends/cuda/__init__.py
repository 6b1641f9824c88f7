"""Tests of the GPU back end, most of them without a GPU."""
