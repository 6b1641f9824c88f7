"""The tables of `against_peers.py`, from its bursts: speeds, ratios within rounds, and goals."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from peer_plans import CONTEXTS, PLANS, Plan, Task, context_name

COLD = Task("cold start", 1, 32, 1)
LENGTHS = (16, 128)
"""Lengths of the prompts whose logits are compared: one for kernels of few rows, one for those of many"""


class Burst(NamedTuple):
    """One measurement."""

    number: int
    """Number of the round, shared by engines that were loaded together"""
    task: Task
    plan: Plan
    tokens: int
    seconds: float
    bandwidth: float
    """Memory bandwidth in GB/s, measured right before"""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass
class Results:
    """All measurements."""

    weights: dict[Plan, int]
    """Bytes of the weights that one token needs"""
    tables: dict[Plan, int]
    """Bytes of the tables of which a token reads one row"""
    position_bytes: int
    """Bytes of minillm's cache for each position"""
    bursts: list[Burst] = field(default_factory=list)
    peaks: dict[Plan, int] = field(default_factory=dict)
    """Peak memory in bytes of a process that loads and generates"""
    errors: dict[tuple[Plan, int], float] = field(default_factory=dict)
    """Relative rms error of the logits, by the length of the prompt"""
    perplexities: dict[Plan, float] = field(default_factory=dict)
    """Perplexity of the first tokens of a text"""
    by_clock: bool = True
    """Seconds are the clock's, as those of the bandwidth's measurement"""

    def of(self, task: str, plan: Plan) -> list[Burst]:
        """The bursts of a task and an engine, by round."""
        return [burst for burst in self.bursts if burst.task.name == task and burst.plan == plan]

    def speed(self, task: str, plan: Plan) -> float:
        """Median tokens per second; 0 where it was not measured."""
        return statistics.median([burst.speed for burst in self.of(task, plan)] or [0.0])

    def ratio(self, task: str, plan: Plan, other: Plan) -> list[float]:
        """Speed of an engine over that of another, in each round with both."""
        others = {burst.number: burst.speed for burst in self.of(task, other)}
        return [burst.speed / others[burst.number] for burst in self.of(task, plan) if burst.number in others]

    def shares(self, task: str, plan: Plan) -> list[float]:
        """Bytes of weights read per second over the bandwidth measured right before, at batch 1, by the clock."""
        if not self.by_clock:
            return []
        return [burst.speed * self.weights[plan] / 1e9 / burst.bandwidth for burst in self.of(task, plan)]

    def growths(self, plan: Plan) -> list[float]:
        """Seconds per token at the longer context over those at the shorter one, in each round."""
        short, long = (context_name(context) for context in CONTEXTS)
        slower = {burst.number: burst.speed for burst in self.of(long, plan)}
        return [b.speed / slower[b.number] for b in self.of(short, plan) if b.number in slower]

    def byte_growth(self, plan: Plan) -> float:
        """The same ratio for the bytes that a token needs: weights, and the cache of earlier positions."""
        short, long = (self.weights[plan] + context * self.position_bytes for context in CONTEXTS)
        return long / short


def find(engine: str, form: str) -> Plan:
    """A plan by engine and minillm's name of the format."""
    return next(plan for plan in PLANS if (plan.engine, plan.form) == (engine, form))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and extremes in brackets; a dash without measurements."""
    if not values:
        return "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def speed_table(results: Results) -> list[str]:
    """Every task and engine: speed, our two backends' ratio to it in the same format, share of the bandwidth."""
    lines = [
        f"{'task':<22}{'engine':<26}{'tokens/s: median (min-max)':>28}{'cpu is, times':>22}{'numpy is, times':>22}"
        f"{'of bandwidth':>20}"
    ]
    for task in dict.fromkeys(burst.task for burst in results.bursts if burst.task != COLD):
        for plan in results.weights:
            if bursts := results.of(task.name, plan):
                ratios = [
                    spread(results.ratio(task.name, ours, plan) if ours != plan else [])
                    for ours in (_ours(results, backend, plan.form) for backend in ("cpu", "numpy"))
                ]
                one_row = task.batch == 1 and task.new_tokens > 1 and task.prompt == 32
                share = spread(results.shares(task.name, plan)) if one_row else ""
                speed = spread([burst.speed for burst in bursts], 1)
                lines.append(f"{task.name:<22}{plan.name:<26}{speed:>28}{ratios[0]:>22}{ratios[1]:>22}{share:>20}")
    return lines


def _ours(results: Results, backend: str, form: str) -> Plan:
    """Our plan on a backend in a format; the one that runs the user's file as it is, if there is one."""
    engine = f"minillm-{backend}"
    measured = [plan for plan in results.weights if plan.same_file and (plan.engine, plan.form) == (engine, form)]
    return measured[0] if measured else find(engine, form)


def other_tables(results: Results) -> list[str]:
    """Tables of cold start, context, memory and logits, as far as measured."""
    lines: list[str] = []
    if any(results.of(COLD.name, plan) for plan in results.weights):
        lines += ["", f"{'cold start to first token':<40}{'seconds: median (min-max)':>28}"]
        lines += [
            f"{plan.name:<40}{spread([b.seconds for b in bursts]):>28}"
            for plan in results.weights
            if (bursts := results.of(COLD.name, plan))
        ]
    if any(results.growths(plan) for plan in PLANS):
        lines += ["", f"{f'context {CONTEXTS[1]} over {CONTEXTS[0]}':<40}{'time':>28}{'bytes':>8}"]
        lines += [
            f"{plan.name:<40}{spread(growths):>28}{results.byte_growth(plan):>8.2f}"
            for plan in PLANS
            if (growths := results.growths(plan))
        ]
    if results.peaks:
        lines += ["", f"{'peak memory':<40}{'MB':>8}{'weights, MB':>14}"]
        lines += [
            f"{plan.name:<40}{peak / 1e6:>8.0f}{_stored(results, plan) / 1e6:>14.0f}"
            for plan, peak in results.peaks.items()
        ]
    if results.errors:
        lines += ["", f"{'relative rms error of logits':<40}" + "".join(f"{f'{n} tokens':>14}" for n in LENGTHS)]
        for plan in dict.fromkeys(plan for plan, _ in results.errors):
            lines.append(f"{plan.name:<40}" + "".join(f"{results.errors[plan, n]:>14.2e}" for n in LENGTHS))
    if results.perplexities:
        exact = results.perplexities.get(find("minillm-numpy", "float32"))
        lines += ["", f"{'perplexity of the text':<40}{'':>8}{'change':>14}"]
        for plan, value in results.perplexities.items():
            change = f"{value / exact - 1:>+14.2%}" if exact else f"{'-':>14}"
            lines.append(f"{plan.name:<40}{value:>8.3f}{change}")
    return lines


def _stored(results: Results, plan: Plan) -> int:
    """Bytes of all weights in their format."""
    return results.weights[plan] + results.tables[plan]


def goal_table(results: Results) -> list[str]:
    """Goals and results. A case without measurements has no line."""
    return goal_lines([*_decode_goals(results), *_speed_goals(results), *_other_goals(results)])


def goal_lines(goals: Sequence["Goal"]) -> list[str]:
    """A line for each goal with measured values: their median and extremes, the aim, and whether it was missed."""
    lines = [f"{'goal':<64}{'is':>22}{'aim':>10}"]
    for words, values, compare, aim in goals:
        if values:
            value = statistics.median(values)
            reached = value >= aim if compare == ">=" else value <= aim
            lines.append(f"{words:<64}{spread(values):>22}{f'{compare} {aim:.2f}':>10}{'' if reached else '  missed'}")
    return lines if len(lines) > 1 else []


Goal = tuple[str, list[float], str, float]
"""Name, measured values, ">=" or "<=", goal"""


def _decode_goals(results: Results) -> list[Goal]:
    task = "decode, batch 1"
    goals: list[Goal] = []
    for forms, peer_form, aim, share in (
        (("float32",), "float32", 1.0, 0.85),
        (("bfloat16", "float16"), "float16", 1.1, 0.85),
        (("int8",), "int8", 1.25, 0.80),
        (("int4",), "int4", 1.0, 0.60),
    ):
        ours = _fastest(results, task, [find("minillm-cpu", form) for form in forms])
        peer = find("llama.cpp", peer_form)
        goals.append((f"{task}: {ours.name} / {peer.name}", results.ratio(task, ours, peer), ">=", aim))
        goals.append((f"{task}: {ours.name}, share of bandwidth", results.shares(task, ours), ">=", share))
    return goals


def _speed_goals(results: Results) -> list[Goal]:
    goals: list[Goal] = []
    prefill = next((b.task.name for b in results.bursts if b.task.name.startswith("prefill")), "")
    mine = [plan for plan in PLANS if plan.ours]
    for task, ours, theirs in (
        *((f"decode, batch {size}", mine, [plan for plan in PLANS if plan.engine == "llama.cpp"]) for size in (8, 32)),
        (prefill, [plan for plan in mine if plan.form == "float32"], [find("ctranslate2", "float32")]),
        (prefill, mine, [find("ctranslate2", "int8")]),
    ):
        best, peer = _fastest(results, task, ours), _fastest(results, task, theirs)
        goals.append((f"{task}: {best.name} / {peer.name}", results.ratio(task, best, peer), ">=", 1.0))
    numpy, cpu, peer = (find(e, "float32") for e in ("minillm-numpy", "minillm-cpu", "ctranslate2"))
    goals.append((f"cold start: {numpy.name} / {peer.name}", results.ratio(COLD.name, numpy, peer), ">=", 1.2))
    goals.append((f"cold start: {cpu.name}, seconds", [b.seconds for b in results.of(COLD.name, cpu)], "<=", 0.7))
    return goals


def _fastest(results: Results, task: str, plans: Sequence[Plan]) -> Plan:
    """The plan with the highest median; plans without measurements count as slowest."""
    return max(plans, key=lambda plan: results.speed(task, plan))


def _other_goals(results: Results) -> list[Goal]:
    """Memory and context of every format; logits against the peer's format."""
    goals: list[Goal] = []
    for plan, peak in results.peaks.items():
        over = (peak - 100e6) / _stored(results, plan)
        goals.append((f"peak memory: {plan.name}, (peak - 100 MB) / weights", [over], "<=", 1.25))
    for plan in PLANS:
        growths = [growth / results.byte_growth(plan) for growth in results.growths(plan)]
        goals.append((f"context: {plan.name}, time ratio / byte ratio", growths, "<=", 1.15))
    for form in ("float16", "bfloat16", "int8", "int4"):
        ours, peer = find("minillm-cpu", form), find("llama.cpp", form)
        for length in LENGTHS:
            if (ours, length) in results.errors and (peer, length) in results.errors:
                ratio = results.errors[ours, length] / results.errors[peer, length]
                goals.append((f"error of {length} logits: {ours.name} / {peer.name}", [ratio], "<=", 1.0))
    return goals
