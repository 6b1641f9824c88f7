"""The CPU backend: compiles and calls the kernels of `kernels/cpu/*.c`."""
