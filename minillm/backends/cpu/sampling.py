"""The sampler of the host, in kernels in C: draws, log-probabilities, and the masks of guides."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import NumericalError
from ...reference.philox import Keys
from ..token_sampler import LogProbs, TokenSampler
from .launching import DRAW, KeepAllowed, Sample, Scratch, TokenLogProbs, Uniforms, filled, kernels, launch, shares_of
from .memory import CpuMemory


def uniforms(keys: Keys, R: int) -> NDArray[Any]:
    """`Keys.uniforms` of R draws, without NumPy's many small operations. [R]"""
    columns = {"seeds": np.uint64, "sequences": np.int64, "positions": np.int64}
    arrays = {name: np.ascontiguousarray(getattr(keys, name), kind) for name, kind in columns.items()}
    numbers = np.empty(R)
    launch("uniforms", filled(Uniforms, numbers=numbers, R=R, purpose=keys.purpose, **arrays))
    return numbers


class HostSampler(TokenSampler):
    """The sampler of the host, with kernels for sampling and log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = Scratch()

    def sample(self, logits: Any, keys: Keys, *, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
        """Sample one token per row from its filtered distribution. [R, V], [R] -> [R]

        Raises:
            NumericalError: a row has NaN or +inf, or only -inf.
        """
        logits = np.ascontiguousarray(logits, np.float32)
        R, V = logits.shape
        draws, tokens = np.empty(R, DRAW), np.empty(R, np.int64)
        for name, value in {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}.items():
            draws[name] = value
        draws["uniform"] = uniforms(keys, R)
        packed = draws.view(np.int64)  # an address is found faster than of structures
        arguments = filled(Sample, logits=logits, draws=packed, tokens=tokens, R=R, V=V)
        self._scratch.serve(arguments, "sample", kernels().sample_scratch(V), np.float64)
        launch("sample", arguments, shares_of(R))
        if (tokens < 0).any():
            row = int(np.argmin(tokens))
            raise NumericalError(
                f"row {row} of the logits cannot be sampled from: its largest value is {float(logits[row].max())}, "
                "not finite"
            )
        return tokens

    def copied(self, logits: Any, rows: Sequence[int]) -> Any:
        """A copy of some rows, in memory that the next copy uses again: new memory costs more than the copy."""
        copy = self._scratch.take("copied", len(rows) * logits.shape[1], logits.dtype).reshape(len(rows), -1)
        return np.take(logits, rows, axis=0, out=copy, mode="clip")  # without a mode NumPy buffers

    def log_probs(self, logits: Any, tokens: Any, top: int = 0) -> LogProbs:
        """Log-probabilities of one token of each row, and of its `top` most likely ones. [R, V], [R] -> `LogProbs`"""
        logits = np.ascontiguousarray(logits, np.float32)
        rows, sums = np.arange(len(logits)), np.empty(len(logits))
        ids = self._search(logits, sums, top)
        chosen = (logits[rows, tokens] - sums).astype(np.float32)  # [R, V] -> [R]
        return LogProbs(chosen, ids, (logits[rows[:, None], ids] - sums[:, None]).astype(np.float32))

    def log_softmax(self, logits: Any) -> Any:
        """The log-probabilities of all tokens, in memory that the next call uses again. [R, V] -> [R, V]"""
        logits = np.ascontiguousarray(logits, np.float32)
        sums, out = np.empty(len(logits)), self._scratch.take("log_softmax", logits.size).reshape(logits.shape)
        self._search(logits, sums, 0)
        return np.subtract(logits, sums.astype(np.float32)[:, None], out=out)

    def top(self, scores: Any, n: int) -> Any:
        """The `n` largest scores of each row without NaN, best first, ties by ascending id. [R, V] -> [R, n]"""
        return self._search(np.ascontiguousarray(scores, np.float32), None, n)

    def _search(self, logits: NDArray[np.float32], sums: NDArray[np.float64] | None, n: int) -> NDArray[np.int64]:
        """The `n` most likely tokens of each row, [R, n]; fills `sums` [R] with the logarithms of the sums of exp."""
        R, V = logits.shape
        ids = np.empty((R, n), np.int64)
        arguments = filled(TokenLogProbs, logits=logits, sums=sums, ids=ids, R=R, V=V, n=n)
        self._scratch.serve(arguments, "log_probs", kernels().log_probs_scratch(V), np.uint8)
        launch("log_probs", arguments, shares_of(R))
        return ids

    def keep_allowed(self, logits: Any, rows: Sequence[int], masks: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Set tokens whose bit is 0 to -inf, in place. Returns whether each row has any other token left."""
        if not logits.flags.c_contiguous or logits.dtype != np.float32:
            return super().keep_allowed(logits, rows, masks)
        (G, W), V = masks.shape, logits.shape[1]
        left: NDArray[np.int64] = np.zeros(G, np.int64)
        places = np.asarray(rows, np.int64)
        arguments = filled(KeepAllowed, logits=logits, rows=places, masks=masks, left=left, G=G, V=V, W=W)
        launch("keep_allowed", arguments, shares_of(G))
        return left.astype(np.bool_)


class CpuSampler(HostSampler):
    """Knows the argmax of a program's own logits."""

    def __init__(self, memory: CpuMemory) -> None:
        super().__init__()
        self._memory = memory
        self._host = HostSampler()

    @property
    def host(self) -> TokenSampler:
        """A sampler without results kept from a pass, since its callers may change logits in place."""
        return self._host

    def finite(self, logits: Any) -> bool:
        """Whether no logit is NaN or plus infinity; already known for a program's own logits. [R, V]"""
        likeliest = self._memory.likeliest
        return super().finite(logits) if likeliest is None or likeliest.logits is not logits else likeliest.finite()

    def argmax(self, logits: Any) -> Any:
        """The most likely token of each row; already known for a program's own logits. [R, V] -> [R]"""
        likeliest = self._memory.likeliest
        return super().argmax(logits) if likeliest is None or likeliest.logits is not logits else likeliest.tokens()
