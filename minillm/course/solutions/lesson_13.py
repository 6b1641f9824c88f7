"""Answers to the exercises of lesson 13."""


def sectors(addresses: list[int], size: int) -> int:
    """Each thread touches the sectors from its first byte's to its last one's; those of all threads, once."""
    touched: set[int] = set()
    for address in addresses:
        touched.update(range(address // 32, (address + size - 1) // 32 + 1))
    return len(touched)


def transposed() -> str:
    """A thread a column: in each step the threads of a warp read neighbours of one row."""
    return """extern "C" __global__ void gemv(const float* W, const float* x, float* y, int rows, int n) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= n) return;
    float sum = 0;
    for (int row = 0; row < rows; row++) sum += x[row] * W[row * n + column];
    y[column] = sum;
}
"""
