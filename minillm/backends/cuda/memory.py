"""The memory of the GPU: the K/V cache, and the recording of decode steps.

Each is padded to a bucket and recorded as a CUDA graph, with the workspace that it uses.

A graph repeats launches with the same addresses. So each bucket has its own workspace, reserved when its step first
runs, from which everything that changes between steps is read. The first run launches call by call, and compiles the
kernels; the second is recorded; later ones replay it. What a step computes lies in memory that the steps of all buckets
of a model share, since they run one after the other: when a larger one has it grow, the others are recorded anew.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from numpy.typing import NDArray

from ...batch import Batch
from ...reference.sampling import Draw
from ..formats import Format
from ..group import Group
from ..memory import Arena, Memory
from ..memory_use import MemoryUse
from ..pages import Pages, Shape
from ..recording import DecodeStep, Result, Sealed, TokensRead, attempt, touch
from ..states import States, StateShapes
from . import attention
from .batches import BatchBuffers, Bucket, Layout, bucket_of, bucket_of_prompts, bucket_of_step, known_ids
from .choosing import Choice, CudaSampler
from .deferring import defer
from .device import CACHE, WORKSPACE, Device
from .fusing import fuse
from .kernels import ALL_REDUCE, Kernels, Launch
from .linear import Products
from .persistent import persist
from .weights import Uploader, number_type

MOST_PROMPTS = 32
"""Recorded passes of prompts that an owner keeps; a graph of some hundreds of launches takes about a megabyte"""


class CudaPages(Pages):
    """One model's keys and values, in the storage type."""

    threads_may_read = False  # a graph that is recorded meanwhile would record the copy

    def __init__(self, device: Device, kernels: Kernels, shape: Shape, dtype: Any, value_dim: int = 0) -> None:
        """Reserve keys and values, [L, pages, K, P, D] each; `value_dim` as of `Pages`.

        Raises:
            DeviceError: the device lacks the memory.
        """
        self.keys = device.empty(shape, dtype, CACHE)  # [L, pages, K, P, D]
        self.values = self._values_in_keys(value_dim) if value_dim else device.empty(shape, dtype, CACHE)
        self._device, self._kernels = device, kernels

    @property
    def layers(self) -> Mapping[int, tuple[Any, Any]]:
        """Each layer's keys and values, for operations. 2 x [pages, K, P, D]"""
        touch()
        return super().layers

    def copy(self, source: int, target: int, part: slice) -> None:
        """Copy some positions of a page to the same places of another, in all layers, in one launch."""
        self._device.activate()
        for pages in (self, *self.alike):
            values = None if pages.value_dim else pages.values
            attention.copy_positions(self._kernels, pages.keys, values, source, target, part.start, part.stop)

    @property
    def arrays(self) -> dict[str, Any]:
        """As `Pages.arrays`; numbers of 16 bits as integers, since NumPy has no bfloat16."""
        plain = super().arrays.items()
        return {name: array.view(np.uint16) if array.dtype.itemsize == 2 else array for name, array in plain}

    def read(self, pages: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Copies of some pages in host memory, as they are stored. [L, n, K, P, ...] each"""
        self._device.activate()
        return {name: np.array(self._device.copy_of(array)) for name, array in super().read(pages).items()}

    def write(self, pages: Sequence[int], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Overwrite some pages by what `read` has returned."""
        self._device.activate()
        super().write(pages, {name: self._device.xp.asarray(array) for name, array in arrays.items()})


class StepScratch:
    """Device memory for what a step computes, of steps that run one after the other; it grows to the largest one's."""

    def __init__(self, device: Device, dtype: Any) -> None:
        """`dtype`: of activations."""
        self._device = device
        self.reservations = 0
        """Number of arrays reserved so far; when it changes, addresses may have changed"""
        self.arena = Arena(device.xp, dtype, self._empty)
        self.places = Arena(device.xp, np.int32, self._empty)
        """The routing of experts: the next layer's takes its place"""
        self.heads = Arena(device.xp, dtype, self._empty)
        """Rows sorted by head, and their products: the next call's take their place"""
        self._partials = self._empty((0,), "float32")
        self._arrived = self._empty((0,), "int32")

    def attention(self, N: int, H: int, D: int, positions: int) -> attention.Workspace:
        """Scratch memory of the decode kernel."""
        return attention.Workspace(*self.splits(attention.partials_size(N, H, D, positions), N * H))

    def splits(self, size: int, counters: int) -> tuple[Any, Any]:
        """Scratch memory of blocks that share a result: `size` float32 numbers, and `counters` int32 zeros.

        It serves one launch after the other; each leaves zeros in the counters.
        """
        if self._partials.size < size:
            self._partials = self._empty((size,), "float32")
        if self._arrived.size < counters:
            self._arrived = self._empty((counters,), "int32")
            self._arrived[...] = 0
        return self._partials, self._arrived

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return int(sum(part.nbytes for part in (self.arena, self.places, self.heads, self._partials, self._arrived)))

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self.reservations += 1
        return self._device.empty(shape, dtype, WORKSPACE)


class StepWorkspace:
    """Device memory of steps of one kind: the batch, token choice, and memory for results that others may share."""

    def __init__(self, device: Device, scratch: StepScratch, parcels: int = 1) -> None:
        """`parcels`: batches whose copies may be under way at once; a recorded step reads one place only."""
        self._parcels = [BatchBuffers(device) for _ in range(parcels)]
        self.scratch = scratch
        self.choice = Choice(device)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device, without the scratch memory."""
        return sum(parcel.nbytes for parcel in self._parcels) + self.choice.nbytes

    def next_batch(self) -> BatchBuffers:
        """Memory for the next batch, the one that was filled longest ago."""
        self._parcels.append(self._parcels.pop(0))
        return self._parcels[-1]


class RecordedStep(Generic[Result]):
    """One bucket's step for one owner."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        scratch: StepScratch,
        *,
        dependent: bool,
        prompts: bool = False,
        persistent: bool = False,
        deferred: bool = False,
    ) -> None:
        """`dependent`: whether its kernels may begin early; `prompts`: whether it is a pass of prompts; `persistent`:
        whether its layers may be one kernel; `deferred`: whether products take norms on.
        """
        self._dependent, self.prompts, self._persistent, self._deferred = dependent, prompts, persistent, deferred
        self.workspace = StepWorkspace(device, scratch)
        self.sums: list[int] = []
        """Bytes of each sum over ranks in it"""
        self.plain = False
        """Whether something runs that is no kernel, so that the step is not recorded; set while it runs."""
        self.states: Any = None
        """Hidden states of all its rows, whose numbers are checked after each pass; None if none are"""
        self._device, self._kernels = device, kernels
        self._replay: Callable[[], object] | None = None
        self._launches: list[Launch] = []
        """The launches of `_replay`: a graph has addresses alone, and some arrays of them are nobody else's"""
        self._reservations = 0  # when it was recorded
        self._result: Result | None = None

    @property
    def replays(self) -> bool:
        """Whether it has been recorded, with the addresses that its results still have."""
        return self._replay is not None and self._reservations == self.workspace.scratch.reservations

    @property
    def is_new(self) -> bool:
        """Whether it has not run yet."""
        return self._result is None

    def replay(self) -> None:
        """Launch it, recorded as it is."""
        assert self.replays and self._replay is not None
        self._replay()

    def run(self, launch: Callable[[], Result], launch_sealed: Callable[[], Result | None]) -> Result | None:
        """Run `launch`, or replay it. Returns its result, padded; None, of prompts, where it cannot be recorded.

        `launch_sealed` returns None where something runs that a graph would not hold.
        """
        if not self.replays and self._result is not None and not self.plain:
            self._replay = None
            launches = self._kernels.collect(lambda: self._run_sealed(launch_sealed))
            if not self.plain:
                assert self._result is not None
                results = *self._result, self.states
                launches = fuse(self._kernels, launches, results, self._device.address)
                if self._persistent:
                    launches = persist(self._kernels, self._device, launches, results)
                if self._deferred:
                    launches = defer(self._kernels, launches, results, self._device.address)
                self._launches = launches
                self.sums = [launch.args[0].nbytes for launch in launches if launch.name == ALL_REDUCE]
                run_all = partial(self._device.launch_all, launches, dependent=self._dependent)
                self._replay = self._device.record(run_all)
                self._reservations = self.workspace.scratch.reservations
        if self._replay is not None:
            self._replay()
            self.workspace.choice.repeated()
        elif self.plain or not self._run_sealed(launch_sealed):
            if self.prompts:  # padded for nothing
                return None
            self.workspace.scratch.arena.restart()
            self._result = launch()
        assert self._result is not None
        return self._result

    def _run_sealed(self, launch_sealed: Callable[[], Result | None]) -> bool:
        """Run a step that may be recorded, and whether it was one."""
        result = launch_sealed()
        self._result, self.plain = (self._result, True) if result is None else (result, self.plain)
        return result is not None


def cut(result: Result, rows: int, padded: int) -> Result:
    """The first rows of each array of a padded result."""
    if rows == padded:
        return result
    shorter: Result = type(result)(*(array[:rows] for array in result))
    return shorter


class CudaMemory(Memory):
    """The device's memory. Results and cache have the storage type of the kernels."""

    page_size = 16
    max_batched_tokens = 512
    """The others' next token waits for this many: on an H100 6 ms at 1.3B, 14 ms at 6.7B. With 2,000 it would be 13 and
    52 ms."""
    runs_ahead = True
    cache_share = 2
    committed_late = False
    records_adapters = True
    max_prompt_tokens = 2048
    """Alone, a prompt of 2,000 tokens takes 13 ms at 1.3B and 52 ms at 6.7B on an H100, four of 512 take 26 and 54:
    products of more rows come nearer to the peak, and the host launches a quarter as much."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        uploader: Uploader,
        sampler: CudaSampler,
        products: Products,
        max_batch_size: int,
    ) -> None:
        """`max_batch_size`: decode steps of more sequences are not recorded. `settle` must follow."""
        super().__init__(device.xp)
        self.clock = device.clock
        self.step: RecordedStep[Any] | None = None
        """The recorded step that runs; None in other passes"""
        self.prompt_tokens = 0
        """Rows of a pass of prompts up to which it is recorded"""
        self.dependent_rows: int | None = None
        """Sequences of a step up to which its kernels may begin early; None: any number"""
        self.group: Group | None = None
        """The ranks whose decode steps are recorded with this one's"""
        self.persistent = False
        """Whether the layers of a step of few sequences are one kernel (`persistent.py`)"""
        self.deferred = False
        """Whether products of a recorded step take on the norms before them (`deferring.py`)"""
        self.adapter_numbers: dict[str, int] = {}
        self.adapter_bytes = 0
        """Bytes of the adapters' matrices as recorded steps read them"""
        self.row_adapters: Any = None
        """[T] on the device, the numbers of the rows' adapters in a decode step with adapters; None in other passes"""
        self._device, self._kernels, self._uploader = device, kernels, uploader
        self._sampler, self._products, self._max_batch_size = sampler, products, max_batch_size
        self._caches: WeakSet[CudaPages] = WeakSet()
        self._steps: WeakKeyDictionary[object, dict[Bucket, RecordedStep[Any]]] = WeakKeyDictionary()
        self._scratch: WeakKeyDictionary[object, tuple[StepScratch, StepScratch]] = WeakKeyDictionary()
        """Memory of decode steps, and of passes of prompts, which need more and would have the others recorded anew"""
        self._largest = (0, 0)  # tokens and rows of a pass
        self._chosen: Any = None  # on the device: the tokens of the last pass, if `launch` has launched it

    def settle(self, form: Format) -> None:
        """Set the storage type of activations and cache, and reserve the workspace of unrecorded passes."""
        self.activations = self.cache = form
        self._dtype = number_type(form.name)
        # Two parcels: the host fills one while the device still computes the chunk of a prompt from the other.
        scratch = StepScratch(self._device, self._dtype)
        self.workspace = self._plain = StepWorkspace(self._device, scratch, parcels=2)

    def new_pages(self, shape: Shape, value_dim: int = 0) -> Pages:
        """A K/V cache on the device; `value_dim` as of `Pages`.

        Raises:
            DeviceError: the device lacks the memory.
        """
        assert shape[3] == self.page_size, "slots are numbered by this backend's page size"
        self._device.activate()
        pages = CudaPages(self._device, self._kernels, shape, self._dtype, value_dim)
        self._caches.add(pages)
        return pages

    def new_states(self, layers: Mapping[int, StateShapes], slots: int) -> States:
        """The states of some layers on the device.

        Raises:
            DeviceError: the device lacks the memory.
        """
        self._device.activate()
        return States(self._device.xp, layers, slots, lambda shape, dtype: self._device.empty(shape, dtype, CACHE))

    def free_bytes(self) -> int:
        """Free bytes of the device's memory."""
        return self._device.free_bytes()

    @property
    def recorded_bytes(self) -> int:
        """Bytes of the workspaces of recorded steps; those of a model are freed with its runner."""
        steps = [step for steps in self._steps.values() for step in steps.values()]
        scratch = [part for parts in self._scratch.values() for part in parts]
        return sum(step.workspace.nbytes for step in steps) + sum(part.nbytes for part in scratch)

    def use(self) -> MemoryUse:
        """Memory in use on the device."""
        return MemoryUse(
            self._uploader.sent_bytes,
            sum(pages.nbytes for pages in self._caches),
            self._plain.nbytes
            + self._plain.scratch.nbytes
            + self.recorded_bytes
            + self._sampler.nbytes
            + self._products.nbytes
            + self.adapter_bytes,
            int(self._dtype.itemsize),
            *self._largest,
        )

    def _results(self) -> Arena:
        """The arena of unrecorded passes."""
        self._device.activate()
        return self._plain.scratch.arena

    def upload(self, batch: Batch, rows: Any) -> tuple[Batch, Any]:
        """Send a batch without padding."""
        self._largest = max(self._largest[0], batch.num_tokens), max(self._largest[1], len(rows))
        return self._begin(None, batch, rows)

    def _begin(
        self, step: RecordedStep[Any] | None, batch: Batch, rows: Any, bucket: Bucket | None = None
    ) -> tuple[Batch, Any]:
        """Send a batch to the workspace of a step, or to that of all unrecorded passes if `step` is None."""
        self._device.activate()
        self._sampler.forget()
        self._chosen = None
        self.step = step
        if bucket is not None and bucket.tokens:
            self._largest = max(self._largest[0], bucket.tokens), max(self._largest[1], bucket.logits)
        self.workspace = self._plain if step is None else step.workspace
        self.arena = self.workspace.scratch.arena
        self.arena.restart()
        sent, wanted = self.workspace.next_batch().fill(batch, rows, self.page_size, bucket, self.adapter_numbers)
        self.row_adapters = sent.row_adapters
        return sent, wanted

    def run(
        self,
        owner: object,
        batch: Batch,
        rows: Any,
        compute: Callable[[Batch, Any], Result],
        draws: Sequence[Draw | None] = (),
    ) -> Result:
        """Run a decode step padded and recorded, and prompts if `prompt_tokens` says so; any other pass as it is. Then
        choose tokens.

        Raises:
            DeviceError: the device lacks the memory. Only this pass is lost.
        """

        def complete(result: Result) -> Result:
            if result[0].dtype == np.float32:  # logits, not the hidden states of a model without a head
                self.workspace.choice.take_likeliest(self._kernels, result[0])
            return result

        def launch() -> Result:
            return complete(compute(*arrays))

        def launch_sealed() -> Result | None:
            result = attempt(compute, arrays[0], Sealed(arrays[1]))  # rows too are at the same address each time
            if step is not None:
                step.states = self._sampler.watched
            return None if result is None else complete(result)

        with self._device.out_of_memory(WORKSPACE):
            bucket = bucket_of(batch, rows, self._max_batch_size, len(self.adapter_numbers))
            bucket = bucket or bucket_of_prompts(batch, rows, self.prompt_tokens)
            step = None if bucket is None else self._step_of(owner, bucket)
            result = None
            if bucket is not None and step is not None and not (step.prompts and step.plain):
                arrays = self._begin(step, batch, rows, bucket)
                with contextlib.nullcontext() if step.prompts and not bucket.rows else self._products.only_ours():
                    run_step = partial(step.run, launch, launch_sealed)
                    result = run_step() if self.group is None else self._run_with_others(self.group, step, run_step)
            if bucket is None or step is None or result is None:
                arrays = self.upload(batch, rows)
                result = launch()
            else:
                self._sampler.watch(step.states, Layout.of(batch, bucket).computed(batch.num_tokens))
                result = cut(result, len(rows), bucket.logits)
            self._sampler.follow(self.workspace.choice, draws)
            return result

    def _run_with_others(self, group: Group, step: RecordedStep[Any], run: Callable[[], Result | None]) -> Any:
        """Run a step that all ranks of a group run."""
        is_new, replays, before = step.is_new, step.replays, step.workspace.scratch.reservations
        result = run()
        if is_new:
            self._agree(group, step, before)
        for nbytes in step.sums if replays else ():
            group.repeated(nbytes)
        return result

    def _agree(self, group: Group, step: RecordedStep[Any], before: int) -> None:
        """Have all ranks record in the same steps, as NCCL demands: those of a first run, which is none of them, agree.

        Ranks run the same passes, padded to the same buckets. What they may differ in is whether memory has moved,
        which is what has steps recorded anew, and whether something ran that is no launch.
        """
        scratch = step.workspace.scratch
        moved, plain = map(any, zip(*group.all_gather((scratch.reservations != before, step.plain)), strict=True))
        if moved and scratch.reservations == before:
            scratch.reservations += 1
        step.plain = plain

    def _step_of(self, owner: object, bucket: Bucket) -> RecordedStep[Any]:
        """The step of a bucket. A new one of prompts has the place of the one that ran longest ago."""
        steps = self._steps.setdefault(owner, {})
        step = steps.pop(bucket, None)
        if step is None:
            if owner not in self._scratch:
                self._scratch[owner] = StepScratch(self._device, self._dtype), StepScratch(self._device, self._dtype)
            prompts = bucket.tokens > 0
            if prompts and sum(each.tokens > 0 for each in steps) >= MOST_PROMPTS:
                self._device.wait()  # its memory may be read yet
                del steps[next(each for each in steps if each.tokens)]
            few = self.dependent_rows is None or bucket.sequences <= self.dependent_rows
            early = self._kernels.dependent and few and not prompts
            scratch = self._scratch[owner][prompts]
            switches = {"dependent": early, "prompts": prompts, "persistent": self.persistent and not prompts}
            step = RecordedStep(self._device, self._kernels, scratch, deferred=self.deferred, **switches)
        steps[bucket] = step  # the last of a dictionary is the latest
        return step

    def launch(self, owner: object, step: DecodeStep) -> TokensRead | None:
        """As `Memory.launch`: the step's graph, with the launches before and after it.

        Raises:
            DeviceError: the device lacks the memory. The step may be launched again, or run.
        """
        if len(step.positions) > self._max_batch_size:
            return None
        bucket = bucket_of_step(step, self.page_size, self._max_batch_size, len(self.adapter_numbers))
        recorded = self._steps.get(owner, {}).get(bucket)
        chosen, self._chosen = self._chosen, None
        if recorded is None or not recorded.replays or (chosen is None and step.token_ids.min() < 0):
            return None
        with self._device.out_of_memory(WORKSPACE):
            self._device.activate()
            self._sampler.forget()
            token_ids = recorded.workspace.next_batch().fill_step(step, self.page_size, bucket, self.adapter_numbers)
            if chosen is not None:
                known_ids(self._kernels, token_ids, chosen)
            recorded.replay()
            self._chosen, read = recorded.workspace.choice.send(self._kernels, step.draws)
        return read
