"""Files of requests over several engines, the replicas: each a Ray actor, on one machine or on those of a cluster.

Each replica is given as many requests at a time as one engine is in `batches.py`; results are written in the order of
the input. A replica that dies, or whose machine does, loses nothing: its requests are given to others, and another one
takes its place. A request over which `MOST_TRIES` replicas have died fails; before its last try it is alone, so that no
other one fails with it.

Source: Ray's user guide, "Actors", "Fault tolerance".
"""

import asyncio
import heapq
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.engine import Engine
from ..errors import MinillmError, ParameterError, ReplicaError, install
from ..progress import work
from . import Limits, make_app
from .batches import AT_ONCE, Done, answer_of, id_of, results_file, resumed, write_result

MOST_TRIES = 3
"""Replicas that a request is given to at most"""
MOST_LOST = 3
"""Replicas that are replaced, for each that was asked for"""
PLACE_SECONDS = 120.0
"""Time for the cluster to find a place for the first replica, or for one when all have died"""

logger = logging.getLogger("minillm")

MakeEngine = Callable[[int | None], Engine]
"""Makes the engine of a replica with so many threads; it is sent there, so it has to be picklable"""


class Replica:
    """An engine in a process of its own, behind the application of the server."""

    async def place(self) -> str:
        """The machine and the process, once there is one."""
        return f"{socket.gethostname()}, process {os.getpid()}"

    async def load(self, make: MakeEngine, threads: int | None) -> None:
        """Make the engine."""
        engine = await asyncio.to_thread(make, threads)
        self._app = make_app(engine, max_waiting=AT_ONCE * Limits().max_prompts)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """A request's line of the output."""
        return await answer_of(self._app, request)


def run_replicas(
    make: MakeEngine, replicas: int, source: Path, target: Path, *, threads: int | None = None, gpu: bool = False
) -> Done:
    """As `batches.run_batch`, on several engines.

    They run in the Ray cluster of RAY_ADDRESS or of this machine, and if there is none in one that is started for them.

    Args:
        make: makes each engine, where it runs: checkpoints lie at the same path on each machine
        replicas: number of engines
        source: the input
        target: the output; what it has is kept
        threads: threads of each engine; by default the replicas share the cores of the cluster evenly
        gpu: whether each has a GPU of its own

    Raises:
        UsageError: as `run_batch`.
        ParameterError: there are more replicas than cores.
        ReplicaError: no replica is left, or the cluster has no place for one.
        MinillmError: Ray is not installed, or the engine cannot be made.
    """
    try:
        import ray
    except ImportError:
        raise MinillmError(f"replicas need Ray: {install('ray')}") from None
    requests, done = resumed(source, target)
    if not requests:
        return done
    joined = ray.is_initialized()
    if not joined:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        cores = threads
        if threads is None:
            nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
            cores = cores_of_each(nodes, replicas)
        fleet = _Fleet(ray, make, replicas, requests, {"num_cpus": cores, "num_gpus": int(gpu)})
        with results_file(source, target) as out, work("running requests", len(requests), "requests") as progress:
            for result in fleet.results():
                write_result(result, out, done)
                progress.advance()
    finally:
        if not joined:
            ray.shutdown()
    return done


def cores_of_each(nodes: Sequence[int], replicas: int) -> int:
    """The most cores that each of some replicas can have, on nodes of so many cores.

    Raises:
        ParameterError: there are more replicas than cores.
    """
    for cores in range(max(nodes, default=0), 0, -1):
        if sum(node // cores for node in nodes) >= replicas:
            return cores
    raise ParameterError(f"{replicas} replicas need as many cores, and the Ray cluster has {sum(nodes)}: ask for fewer")


@dataclass(eq=False)
class _Member:
    """A replica as the driver sees it."""

    number: int
    actor: Any
    where: str = "no machine yet"
    loaded: bool = False
    given: set[int] = field(default_factory=set)
    """Numbers of the requests that it works on"""


class _Fleet:
    """The replicas of a run, and which of them has which request."""

    def __init__(
        self, ray: Any, make: MakeEngine, replicas: int, requests: Sequence[dict[str, Any]], resources: dict[str, Any]
    ) -> None:
        self._ray, self._make, self._requests = ray, make, requests
        self._threads = None if resources["num_gpus"] else resources["num_cpus"]
        options = {"max_concurrency": 2 * AT_ONCE, "scheduling_strategy": "SPREAD"}
        self._actor = ray.remote(Replica).options(**options, **resources)
        self._replicas = replicas
        self._members: list[_Member] = []
        """The replicas that are not known to be dead"""
        self._calls: dict[Any, tuple[_Member, str, int]] = {}
        """The calls under way: a replica, its method, and the number of a request"""
        self._waiting = list(range(len(requests)))
        """A heap: the first requests first, also when they come back"""
        self._tries = [0] * len(requests)
        self._started = 0

    def results(self) -> Iterator[dict[str, Any]]:
        """The result of each request, in their order."""
        for _ in range(self._replicas):
            self._start()
        results: dict[int, dict[str, Any]] = {}
        for number in range(len(self._requests)):
            while number not in results:
                self._give()
                results |= self._next()
            yield results.pop(number)

    def _start(self) -> None:
        self._started += 1
        member = _Member(self._started, self._actor.remote())
        self._members.append(member)
        self._calls[member.actor.place.remote()] = member, "place", -1

    def _give(self) -> None:
        """Give requests to the replicas that are ready, the fewest first to those with the fewest."""
        for member in sorted(self._members, key=lambda member: len(member.given)):
            while member.loaded and self._waiting and len(member.given) < AT_ONCE:
                number = self._waiting[0]
                apart = {number, *member.given}
                if len(apart) > 1 and any(self._tries[other] == MOST_TRIES - 1 for other in apart):
                    break  # it may be what ends replicas
                member.given.add(heapq.heappop(self._waiting))
                self._calls[member.actor.answer.remote(self._requests[number])] = member, "answer", number

    def _next(self) -> dict[int, dict[str, Any]]:
        """Wait for the next call to end. Returns the results that it brings, by the numbers of their requests."""
        placed = any(member.where for member in self._members if member.where != _Member.where)
        timeout = None if placed else PLACE_SECONDS
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=timeout)
        if not ready:
            raise ReplicaError(
                f"the Ray cluster has found no place for a replica in {PLACE_SECONDS:.0f} s: ask for fewer threads, or "
                "wait until others have left it"
            )
        return self._taken(ready[0])

    def _taken(self, call: Any) -> dict[int, dict[str, Any]]:
        member, method, number = self._calls.pop(call)
        try:
            value = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if method != "answer":
                raise error.cause from None
            member.given.discard(number)
            return {number: self._failure(number, f"{type(error.cause).__name__}: {error.cause}")}
        except self._ray.exceptions.RayError:
            return self._lost(member, number)
        if method == "place":
            member.where = value
            self._calls[member.actor.load.remote(self._make, self._threads)] = member, "load", -1
        elif method == "load":
            member.loaded = True
        else:
            member.given.discard(number)
            return {number: value}
        return {}

    def _lost(self, member: _Member, number: int) -> dict[int, dict[str, Any]]:
        """Take note of a dead replica, and of a request that it had."""
        if member in self._members:
            self._members.remove(member)
            logger.warning(
                "replica %d (%s) has died; its %d requests are given to others", member.number, member.where,
                len(member.given)
            )  # fmt: skip
            if self._started < (1 + MOST_LOST) * self._replicas:
                self._start()
        if not self._members:
            raise ReplicaError(f"{self._started} replicas have died, the last of them on {member.where}: none is left")
        if number < 0:
            return {}
        self._tries[number] += 1
        if self._tries[number] == MOST_TRIES:
            return {number: self._failure(number, f"{MOST_TRIES} replicas have died while they computed it")}
        heapq.heappush(self._waiting, number)
        return {}

    def _failure(self, number: int, message: str) -> dict[str, Any]:
        """A result without a response."""
        request = self._requests[number]
        error = {"code": "replica_failed", "message": message}
        return {"id": id_of(request), "custom_id": request["custom_id"], "response": None, "error": error}
