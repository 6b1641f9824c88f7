"""The CUDA backend: launches the hand-written kernels of `kernels/cuda/*.cu`."""
