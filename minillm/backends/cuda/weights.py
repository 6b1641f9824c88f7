"""The loader of the GPU: rounds parameters to the storage type, or to 8 or 4 bits, and sends them as it reads more."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError, install
from ...reference.quantize import Quantized
from ..formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, STORED_FORMATS, Format, Role, WeightFormats
from ..loader import BLOCKS_IN_8_BITS, INTEGERS, Loader, RandomTensor, Tensor, gather, join, kept_format
from ..storage import Experts, narrow
from ..weights import Weight
from .device import WEIGHTS, Device, Wait
from .integers import interleave
from .kernels import Kernels
from .random import DrawnTensor, draw, draw_integers

STAGE_BYTES = 8 << 20
"""Bytes of one copy, and of each of two staging buffers: one is filled while the other is sent."""


class CudaLoader(Loader):
    """Rounds matrices to the storage type of the kernels, or to 8 or 4 bits, and sends them to the device."""

    def __init__(
        self, device: Device, kernels: Kernels, settle: Callable[[Format], None], weights: WeightFormats
    ) -> None:
        """Set the formats of matrices.

        Args:
            device: where they go
            kernels: compiled for the storage type, when it is settled
            settle: called with the storage type of the first matrix, if it has not been set
            weights: a format for each role; None keeps 8 and 4 bits as a checkpoint has them, and blocks in 8 bits,
                where activations have 16 bits, and is otherwise the storage type
        """
        super().__init__(weights, kept=(), xp=device.xp)
        self.storage: Format | None = None
        """Type of activations and of matrices that are not quantised; None: not settled"""
        self.uploader = Uploader(device)
        self._device, self._kernels, self._settle = device, kernels, settle

    def prepare(
        self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor] = (), role: Role = "projection"
    ) -> Weight:
        """Round to the format of its role and send to the device. Vectors (biases, gains) stay float32.

        Raises:
            DeviceError: the device lacks the memory.
        """
        self._device.activate()
        bias = self.uploader.vector(biases) if biases else None
        if len(tensors[0].shape) == 1:
            return Weight(name, self.uploader.vector(tensors), bias, role)
        if self.storage is None:
            rounded = self.formats.projection is not None  # to 8 or 4 bits
            self._settle(storage_of(FORMATS.get(tensors[0].dtype), rounded=rounded))
        form = self._format(tensors, role)
        if form.scale_bits:
            return Weight(name, self.uploader.integers(tensors, form, self._kernels), bias, role)
        return Weight(name, self.uploader.matrix(tensors, self._kernels), bias, role)

    def _format(self, tensors: Sequence[Tensor], role: Role) -> Format:
        """The format of a matrix: the storage type, or one of 8 or 4 bits."""
        assert self.storage is not None
        form = self.formats.of(role)
        if form is None and role in ("projection", "vocabulary") and self.storage != FLOAT32:
            form = kept_format(tensors, tuple(INTEGERS))
            stored = {STORED_FORMATS.get(tensor.dtype) for tensor in tensors}
            if not form.scale_bits and len(stored) == 1:
                form = BLOCKS_IN_8_BITS.get(stored.pop(), form)  # type: ignore[arg-type]  # None is no key
        return form if form is not None and form.scale_bits else self.storage

    def prepare_experts(
        self, name: str, experts: Sequence[Sequence[Tensor]], biases: Sequence[Sequence[Tensor]] = ()
    ) -> Weight:
        """One projection of several experts, below one another in memory: of each expert the tensors that it becomes.

        Raises:
            DeviceError: the device lacks the memory.
        """
        stacked, added = ([tensor for tensors in each for tensor in tensors] for each in (experts, biases))
        weight = self.prepare(name, stacked, added)
        whole, bias = weight.data, weight.bias  # [X out, in], [X out]
        outputs = len(experts) and whole.shape[0] // len(experts)
        parts = [slice(i * outputs, (i + 1) * outputs) for i in range(len(experts))]
        if isinstance(whole, Quantized):
            matrices = tuple(whole.each(lambda array, part=part: array[part]) for part in parts)  # type: ignore[misc]
        else:
            matrices = tuple(whole[part] for part in parts)
        return Weight(name, Experts(matrices, whole), None if bias is None else bias.reshape(len(experts), -1))

    def constant(self, name: str, values: NDArray[np.float32]) -> Weight:
        """A vector on the device."""
        self._device.activate()
        return super().constant(name, values)

    def computed_table(self, name: str, values: NDArray[np.float32]) -> Weight:
        """As the base class, in the format of activations, in which the kernel looks vectors up."""
        if self.storage is None or self.storage == FLOAT32:
            return self.constant(name, values)
        self._device.activate()
        return Weight(name, self.uploader.table(narrow(values, self.storage), self._kernels))

    def random(self, name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
        """Random numbers: matrices are drawn on the device, with other values than on the host; vectors on the host."""
        return DrawnTensor(name, shape, seed, std) if len(shape) == 2 else RandomTensor(name, shape, seed, std)


class Uploader:
    """Sends arrays of any size through two pinned staging buffers."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stages: list[NDArray[np.uint8]] = []
        self._sent: list[Wait] = []
        self._next = 0
        self.sent_bytes = 0
        """Bytes that parameters take on the device so far"""

    def matrix(self, tensors: Sequence[Tensor], kernels: Kernels) -> Any:
        """Concatenate tensors [out_i, in] along the first axis, in the storage type of `kernels`.

        They are sent, or generated on the device if all of them are to be.
        """
        shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
        dtype = number_type(kernels.storage)
        drawn = [tensor for tensor in tensors if isinstance(tensor, DrawnTensor)]
        if len(drawn) < len(tensors):
            return self._send(shape, dtype, (piece for each in tensors for piece in stored_as(each, kernels.storage)))
        out = self._empty(shape, dtype)
        draw(kernels, drawn, out)
        return out

    def table(self, values: NDArray[Any], kernels: Kernels) -> Any:
        """A matrix that is in the storage type of `kernels` already, bfloat16 as its bits."""
        return self._send(values.shape, number_type(kernels.storage), [values])

    def integers(self, tensors: Sequence[Tensor], form: Format, kernels: Kernels) -> Quantized:
        """Concatenate tensors [out_i, in] along the first axis, in 8 or 4 bits: rounded if they are not stored so.

        The device has the bytes of a row in another order (`integers.interleave`).
        """
        if all(isinstance(tensor, DrawnTensor) for tensor in tensors):
            return self._drawn_integers(tensors, form, kernels)
        stored = gather(tensors, form)
        matrix: Quantized = stored.each(lambda array: self._send(array.shape, array.dtype, [array]))
        interleave(kernels, matrix)
        return matrix

    def _drawn_integers(self, tensors: Sequence[Tensor], form: Format, kernels: Kernels) -> Quantized:
        rows, inputs = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        groups = -(-inputs // form.group)
        values = self._empty((rows, groups * form.group * form.bits // 8), form.dtype)
        scales = self._empty((rows, groups), np.dtype(np.float16))
        draw_integers(kernels, [tensor for tensor in tensors if isinstance(tensor, DrawnTensor)], values, scales)
        return Quantized(values, scales, inputs)

    def vector(self, tensors: Sequence[Tensor]) -> Any:
        """Concatenate tensors [n_i], as float32."""
        values = join(tensors)
        return self._send(values.shape, np.dtype(np.float32), [values])

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        out = self._device.empty(shape, dtype, WEIGHTS)
        self.sent_bytes += out.nbytes
        return out

    def _send(self, shape: tuple[int, ...], dtype: Any, pieces: Iterable[NDArray[Any]]) -> Any:
        target = self._empty(shape, dtype)
        offset = 0
        for piece in pieces:
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            for first in range(0, data.size, STAGE_BYTES):
                part = data[first : first + STAGE_BYTES]
                self._device.send(self._staged(part), target, offset)
                self._sent[self._next] = self._device.mark()
                self._next ^= 1
                offset += part.size
        assert offset == target.nbytes
        return target

    def _staged(self, part: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Copy the bytes to the next staging buffer, once its last copy to the device is done."""
        if not self._stages:
            self._stages = [self._device.pinned((STAGE_BYTES,), np.uint8) for _ in range(2)]
            self._sent = [self._device.mark() for _ in range(2)]
        self._sent[self._next]()
        stage = self._stages[self._next][: part.size]
        stage[...] = part
        return stage


def stored_as(tensor: Tensor, storage: str) -> Iterator[NDArray[Any]]:
    """A tensor's numbers in a storage type (bfloat16 as its bits), in pieces that are valid one at a time."""
    if tensor.dtype == storage:
        yield tensor.stored()
        return
    for chunk in tensor.chunks():
        yield chunk if storage == FLOAT32.name else narrow(chunk, FORMATS[storage])


def storage_of(stored: Format | None, *, rounded: bool = False) -> Format:
    """The storage type for weights of a checkpoint: their own, or float16 for 8 and 4 bits.

    Where matrices are `rounded` to 8 or 4 bits, it has 16: bfloat16, or float16 for float32.
    """
    return stored if stored == BFLOAT16 or (stored == FLOAT32 and not rounded) else FLOAT16


def number_type(storage: str) -> Any:
    """The NumPy dtype of "float32", "float16" or "bfloat16".

    Raises:
        DeviceError: ml_dtypes, which has bfloat16, is not installed.
    """
    if storage == "bfloat16":
        try:
            import ml_dtypes  # NumPy and CuPy have no bfloat16 of their own
        except ImportError as error:
            raise DeviceError(f"dtype 'bfloat16' needs ml_dtypes ({error}): {install('cuda13')}") from None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(storage)
