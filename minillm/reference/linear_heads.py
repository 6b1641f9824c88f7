"""The product of each head's numbers with a matrix of its own: how latent attention absorbs its projections."""

from typing import Any

from .cost import Cost


def linear_heads(x: Any, matrix: Any, xp: Any, out: Any) -> Any:
    """The last numbers of each head times a matrix of its own; the numbers before them are copied in front.

    Latent attention absorbs its keys' and values' projections so (DeepSeek-AI, arXiv 2405.04434, section 2.1.2): the
    numbers that are copied are those that rotary position embedding has turned.

    Args:
        x: [T, H, r + in]
        matrix: [H out, in], the heads' matrices below one another
        xp: the array module
        out: [T, H, r + out], filled and returned
    """
    H, inputs = x.shape[1], matrix.shape[1]
    copied = x.shape[2] - inputs  # r
    by_head = matrix.reshape(H, -1, inputs)  # [H out, in] -> [H, out, in]
    out[..., :copied] = x[..., :copied]
    products = xp.matmul(x[..., copied:].transpose(1, 0, 2), by_head.transpose(0, 2, 1))  # [H, T, in] -> [H, T, out]
    out[..., copied:] = products.transpose(1, 0, 2)  # [H, T, out] -> [T, H, out]
    return out


def linear_heads_cost(
    T: int, H: int, inputs: int, outputs: int, copied: int, weight_bytes: int, number_bytes: int = 4
) -> Cost:
    """2 in out FLOPs per head; all matrices are read once, and `copied` numbers of each head copied."""
    read = number_bytes * T * H * (copied + inputs) + (weight_bytes if T else 0)
    return Cost(2 * T * H * inputs * outputs, read, number_bytes * T * H * (copied + outputs))
