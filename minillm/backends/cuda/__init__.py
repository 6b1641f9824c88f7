"""The model on a GPU: kernels written by hand in `kernels/*.cu`, and the back end that launches them."""
