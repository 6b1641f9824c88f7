"""The model on a GPU: kernels written by hand in `kernels/*.cu`, and the backend that launches them."""
