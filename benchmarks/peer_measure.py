"""The measuring of `against_peers.py`: engines in processes, turns, cold starts, memory and logits."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import bandwidth_probe, say
from peer_plans import STAND_INS, Plan, Task, grouped, takes_part, tasks
from peer_process import Worker
from peer_report import COLD, LENGTHS, Burst, Results, find

REST_SECONDS = 0.2
"""Before each probe, for the threads of the burst before to stop spinning"""
LIMIT_SECONDS = 2.0
"""For an engine that decodes so slowly; it generates fewer tokens in a burst."""
MEMORY_SHARE = 0.75
"""Of the free memory, for engines that are loaded together"""


class Session:
    """What one run works with."""

    def __init__(self, args: argparse.Namespace, config: Any, environment: dict[str, str], folder: str) -> None:
        self.args, self.config, self.environment, self.folder = args, config, environment, folder
        self.probe: Callable[[], float] = bandwidth_probe(args.threads)

    def worker(self, plan: Plan) -> Worker:
        """A process that loads an engine."""
        return Worker(plan, self.folder, self.args.threads, self.environment)

    def bandwidth(self) -> float:
        """GB/s, when nobody's threads spin any more."""
        time.sleep(REST_SECONDS)
        return self.probe()

    def burst(self, worker: Worker, task: Task) -> dict[str, Any]:
        """Tokens and seconds of one burst."""
        limit = LIMIT_SECONDS / 4 if worker.plan.slow else LIMIT_SECONDS
        return worker.ask(do="time", limit=limit, vocab_size=self.config.vocab_size, **task._asdict())


def measure(session: Session, group: int, workers: Sequence[Worker], case: str) -> Iterator[Burst]:
    """Let the engines of a group take turns at a case. The first turn warms up and is not kept."""
    args = session.args
    timed = tasks(case, args.prefill, args.new_tokens)
    present = [worker for worker in workers if takes_part(case, worker.plan)]
    for number in range(args.rounds + 1):
        if timed and present:
            say(f"{timed[-1].name}: " + (f"round {number} of {args.rounds}" if number else "warming up"))
        for worker in present:
            for task in timed:
                if not number:
                    session.burst(worker, task._replace(new_tokens=min(task.new_tokens, 3)))
                    continue
                bandwidth = session.bandwidth()
                reply = session.burst(worker, task)
                in_all = group * args.rounds + number
                yield Burst(in_all, task, worker.plan, reply["tokens"], reply["seconds"], bandwidth)


def measure_loaded(session: Session, plans: Sequence[Plan], results: Results) -> None:
    """All cases whose engines stay loaded, group by group."""
    from minillm.backends.memory import free_memory

    cases = [case for case in session.args.cases if case not in ("cold", "memory")]
    used = [plan for plan in plans if any(takes_part(case, plan) for case in cases)]
    if not cases or not used:
        return
    for group, together in enumerate(grouped(used, results.weights, int(MEMORY_SHARE * free_memory()))):
        with ExitStack() as stack:
            workers = []
            for plan in together:
                say(f"loading {plan.name}")
                workers.append(stack.enter_context(session.worker(plan)))
            for case in cases:
                results.bursts += measure(session, group, workers, case)
            if "logits" in cases:
                for worker in workers:
                    if takes_part("logits", worker.plan):
                        ask_for_logits(session, worker)
    if "logits" in cases:
        compare_logits(session, used, results)


def ask_for_logits(session: Session, worker: Worker) -> None:
    """Have an engine write the logits of each prompt."""
    for length in LENGTHS:
        file = logits_file(session, worker.plan, length)
        worker.ask(do="logits", length=length, file=file, vocab_size=session.config.vocab_size)


def logits_file(session: Session, plan: Plan, length: int) -> str:
    """Where an engine writes the logits of a prompt."""
    return str(Path(session.folder) / f"{plan.name} {length}.npy")


def compare_logits(session: Session, plans: Sequence[Plan], results: Results) -> None:
    """Relative rms error of each engine's logits.

    Of a reduced format against the same engine in float32; in float32 against minillm on NumPy, which shows that they
    compute the same model, where they do.
    """
    import numpy as np

    for plan in (plan for plan in plans if takes_part("logits", plan)):
        engine = plan.engine if plan.form != "float32" else "minillm-numpy"
        reference = find(engine, "float32")
        stands_in = session.config.model_type in STAND_INS and (plan.engine, plan.form) == ("llama.cpp", "float32")
        if reference == plan or reference not in plans or stands_in:
            continue
        for length in LENGTHS:
            logits, expected = (np.load(logits_file(session, which, length)) for which in (plan, reference))
            results.errors[plan, length] = relative_rms(logits, expected)


def relative_rms(values: Any, expected: Any) -> float:
    """Root of the mean square error over that of the expected values."""
    import numpy as np

    return float(np.sqrt(np.square(values - expected).mean() / np.square(expected).mean()))


def measure_fresh(session: Session, plans: Sequence[Plan], results: Results) -> None:
    """Cold start and peak memory: each time in a new process, whose files are in the page cache."""
    args, vocab_size = session.args, session.config.vocab_size
    cold = [plan for plan in plans if "cold" in args.cases and takes_part("cold", plan)]
    for number in range(args.rounds + 1 if cold else 0):
        say("cold start: " + (f"round {number} of {args.rounds}" if number else "warming up"))
        for plan in cold:
            bandwidth = session.bandwidth()
            began = time.perf_counter()
            with session.worker(plan) as worker:
                worker.ask(do="time", limit=LIMIT_SECONDS, vocab_size=vocab_size, **COLD._asdict())
                seconds = time.perf_counter() - began
            if number:
                results.bursts.append(Burst(number, COLD, plan, 1, seconds, bandwidth))
    for plan in plans:
        if "memory" in args.cases and takes_part("memory", plan):
            say(f"peak memory: {plan.name}")
            with session.worker(plan) as worker:
                session.burst(worker, Task("", 1, 32, 4))
                peak = worker.ask(do="memory")["peak_bytes"]
            if peak is not None:
                results.peaks[plan] = peak
