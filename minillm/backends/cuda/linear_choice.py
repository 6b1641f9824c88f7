"""Selects the faster product for a shape: our GEMM or the library's (cuBLAS, through CuPy's matmul).

Both are timed once, on the first call of a shape with more rows than gemv takes; the result is kept for all row counts
up to the next power of two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .kernels import Kernels
from .linear import FEW_ROWS, finish_product, linear

Timer = Callable[[Callable[[], object]], float]
"""Calls a function several times, and returns the seconds that one call takes on the device."""


@dataclass(frozen=True)
class Timing:
    """Seconds for one product of `rows` rows, epilogue included."""

    rows: int
    ours: float
    theirs: float

    @property
    def chosen(self) -> str:
        """The faster one: "ours" or "library"."""
        return "ours" if self.ours <= self.theirs else "library"


class Products:
    """The matrix products of a backend, each by the faster implementation."""

    def __init__(self, kernels: Kernels, xp: Any, timer: Timer | None) -> None:
        """`xp` is the array module whose matmul is the library's; without a `timer` only our kernels run."""
        self.timings: dict[tuple[int, int, int], Timing] = {}
        """Measured times, by (rows rounded up to a power of two, out, in)."""
        self._kernels = kernels
        self._xp = xp
        self._timer = timer
        self._only_ours = False

    @contextmanager
    def only_ours(self) -> Iterator[None]:
        """Within the block, time nothing and do not call the library.

        For the capture of a CUDA graph: CuPy raises NotImplementedError for every cuBLAS call in it.
        """
        before, self._only_ours = self._only_ours, True
        try:
            yield
        finally:
            self._only_ours = before

    def linear(
        self,
        x: Any,
        weight: Any,
        bias: Any | None,
        out: Any,
        *,
        activation: str | None = None,
        residual: Any | None = None,
    ) -> Any:
        """y = activation(x W^T + b) + residual; arguments and result as those of `linear.linear`."""

        def ours() -> Any:
            return linear(self._kernels, x, weight, bias, out, activation=activation, residual=residual)

        def library() -> Any:
            self._xp.matmul(x, weight.T, out=out)  # [T, in] x [in, out] -> [T, out]
            return finish_product(self._kernels, bias, out, activation=activation, residual=residual)

        # The library has no product of 16-bit inputs with float outputs.
        if self._timer is None or self._only_ours or len(x) <= FEW_ROWS or out.dtype != x.dtype:
            return ours()
        shape = (1 << (len(x) - 1).bit_length(), *weight.shape)
        if shape not in self.timings:
            self.timings[shape] = Timing(len(x), self._timer(ours), self._timer(library))
        return ours() if self.timings[shape].chosen == "ours" else library()

    def table(self) -> str:
        """The measured times as text: a line for each shape, with both times and the rate of the faster one."""
        lines = [f"{'rows':>6} {'out':>6} {'in':>6} {'ours us':>9} {'library us':>10} {'TFLOP/s':>8}  chosen"]
        for (_, outputs, inputs), timing in sorted(self.timings.items()):
            rate = 2e-12 * timing.rows * outputs * inputs / min(timing.ours, timing.theirs)
            times = f"{timing.ours * 1e6:9.1f} {timing.theirs * 1e6:10.1f} {rate:8.1f}"
            lines.append(f"{timing.rows:6} {outputs:6} {inputs:6} {times}  {timing.chosen}")
        return "\n".join(lines)
