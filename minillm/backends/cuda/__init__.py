"""The CUDA backend: launches the hand-written kernels of `kernels/*.cu`."""
