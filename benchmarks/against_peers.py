"""How fast is minillm beside llama.cpp, CTranslate2 and transformers, in 32, 16, 8 and 4 bits, and at what loss?

A shared machine's memory bandwidth drifts within minutes, so figures taken minutes apart cannot be compared. Each
engine runs in a process of its own, so that its threads do not disturb the others; short bursts take turns, A B C A B
C, and the bandwidth is measured before each burst. Reported are medians, extremes and the ratios within each round.

All have the same weights, drawn at random in a published shape, with one exception that `peer_files.py` explains:
llama.cpp does not run OPT, and computes GPT-2's architecture with its matrices. With --model they are real ones: those
of a checkpoint folder, or of a GGUF file, which llama.cpp runs as it is; then perplexities are compared, too.
"""

import argparse
import importlib.util
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import (
    BenchmarkError,
    bandwidth_probe,
    describe,
    headed,
    make_folder,
    new_parser,
    positive,
    say,
    thread_environment,
    write_csv,
    write_result,
)
from peer_plans import (
    BITS,
    CASES,
    FILES,
    LLAMA_CPPS,
    PACKAGES,
    STAND_INS,
    USUAL,
    Plan,
    Task,
    grouped,
    plans_of,
    position_bytes,
    takes_part,
    tasks,
    unread_bytes,
    weight_bytes,
    why_left_out,
)
from peer_process import Worker, write_files
from peer_report import COLD, LENGTHS, Burst, Results, find, goal_table, other_tables, speed_table

TEXT = Path(__file__).parents[1] / "tests" / "real" / "alice.txt"
TEXT_TOKENS = 1024
HEADER = ("round", "task", "engine", "tokens", "seconds", "tokens_per_second", "bandwidth_gb_per_second")
VERSIONS = (
    *("minillm", "numpy", "torch", "transformers", "ctranslate2", "llama_cpp_python"),
    *("onnxruntime_genai", "openvino_genai"),
)
REST_SECONDS = 0.2
"""Pause before each bandwidth measurement, so that the last burst's threads stop spinning"""
LIMIT_SECONDS = 2.0
"""Longest burst; an engine that is too slow for it generates fewer tokens."""
MEMORY_SHARE = 0.75
"""Share of the free memory that engines loaded together may take"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure minillm beside other engines, in turns.", "CSV and the table")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--shape",
        default="opt-125m",
        help="published shape, random weights; NAME:N: its first N layers (default: opt-125m)",
    )
    model.add_argument("--model", type=Path, help="real weights: a checkpoint folder or a GGUF file")
    parser.add_argument(
        "--requantize", choices=("Q4_K_M", "Q6_K", "IQ4_XS"), help="let llama.cpp convert the GGUF file first"
    )
    parser.add_argument("--text", type=Path, help="a text for perplexities of --model (default: a page of English)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="turns of each engine (default: 5)")
    for name, known, usual in (
        ("cases", CASES, CASES),
        ("engines", tuple(PACKAGES), tuple(PACKAGES)),
        ("formats", tuple(BITS), USUAL),
    ):
        others = ", ".join(word for word in known if word not in usual)
        text = f"default: {','.join(usual)}" + (f"; also {others}" if others else "")
        parser.add_argument(f"--{name}", type=chosen(known), metavar="A,B", help=text)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="seconds of the processor in place of the clock's: for a machine that others use; with one thread",
    )
    parser.add_argument(
        "--prefill", type=positive, default=512, metavar="N", help="tokens of the prompt (default: 512)"
    )
    parser.add_argument("--new-tokens", type=positive, default=32, metavar="N", help="in a burst (default: 32)")
    args = parser.parse_args(arguments)
    real = args.model is not None
    args.cases = args.cases or tuple(case for case in CASES if real or case != "perplexity")
    args.engines, args.formats = args.engines or tuple(PACKAGES), args.formats or USUAL
    if not real and ("perplexity" in args.cases or args.text is not None):
        parser.error("the perplexity of a text is compared on real weights: name a --model")
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time counts the seconds of all threads: name --threads 1")
    if args.cpu_time:  # neither a process's start nor OpenVINO's own measurement has it
        args.cases = tuple(case for case in args.cases if case != "cold")
        args.engines = tuple(engine for engine in args.engines if engine != "openvino")
    if real and (of_files := [form for form in args.formats if form in FILES]):
        parser.error(f"--formats {','.join(of_files)} is for a --shape; a GGUF file runs as it is")
    if args.requantize is not None and not (real and args.model.is_file()):
        parser.error("--requantize is for a --model that is a GGUF file")
    args.text = args.text or TEXT
    return args


def chosen(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A reader for argparse of comma-separated words, each of them one of `known`."""

    def read(text: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not known: expected {', '.join(known)}")
        return words

    return read


def sort_out(engines: Sequence[str], family: str, gguf: Path | None) -> tuple[list[str], str]:
    """The engines that can run a model here, and a line about those that cannot."""
    from minillm.backends.cpu.compiling import available
    from minillm.errors import install

    reasons = {engine: why_left_out(engine, family, gguf) for engine in engines}
    unable = [f"{engine} ({reason})" for engine, reason in reasons.items() if reason]
    engines = [engine for engine in engines if not reasons[engine]]
    missing: dict[str, list[str]] = {}
    for engine in engines:
        absent = [name for name in PACKAGES[engine] if importlib.util.find_spec(name) is None]
        if engine.startswith("minillm-cpu") and not available():
            absent = ["a C compiler"]
        if absent:
            missing[engine] = absent
    words = [f"{engine} (without {', '.join(absent)})" for engine, absent in missing.items()]
    line = f"{'; '.join(words)}: {install('fast', 'peers')}" if words else ""
    line = "; ".join(filter(None, (*unable, line))) or "none"
    return [engine for engine in engines if engine not in missing], line


def check(args: argparse.Namespace) -> Any:
    """The configuration of the shape or of the model.

    Raises:
        ParameterError: no family publishes the shape.
        ModelError: the model cannot be read.
        BenchmarkError: the family has no counterpart, or the arguments do not fit the model.
    """
    from peer_files import PUBLISHED, config_of, raw_config

    name = args.model or args.shape
    if gguf_of(args) is not None:
        from minillm.formats import open_model

        config = open_model(args.model).config
    else:
        config = config_of(raw_config(str(name)))
        if config.model_type not in PUBLISHED:
            raise BenchmarkError(f"{name} is of {config.model_type}: expected one of {', '.join(PUBLISHED)}")
    if args.new_tokens < 2:
        raise BenchmarkError("--new-tokens should be at least 2: decode begins after the first")
    timed = [task for case in args.cases for task in tasks(case, args.prefill, args.new_tokens)]
    longest = max((task.prompt + task.new_tokens for task in timed), default=0)
    if longest > config.max_positions:
        raise BenchmarkError(f"{longest} tokens are asked for, and the context of {name} is {config.max_positions}")
    return config


def gguf_of(args: argparse.Namespace) -> Path | None:
    """The GGUF file that is to run, if it is one.

    Raises:
        BenchmarkError: the model is neither a folder nor a GGUF file.
    """
    from minillm.formats.gguf.file import is_gguf

    if args.model is None or args.model.is_dir():
        return None
    if not (args.model.is_file() and is_gguf(args.model)):
        raise BenchmarkError(f"--model {args.model} is neither a checkpoint folder nor a GGUF file")
    path: Path = args.model
    return path


def text_ids(args: argparse.Namespace, config: Any) -> list[int]:
    """The first tokens of the text whose perplexity is compared.

    Raises:
        BenchmarkError: the text cannot be read, is too short, or the model has no tokenizer.
    """
    from minillm.formats import open_model

    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"--text {args.text} cannot be read: {error}") from None
    tokenizer = open_model(args.model).tokenizer
    if tokenizer is None:
        raise BenchmarkError(f"{args.model} has no tokenizer: leave the case perplexity out")
    ids = tokenizer.encode(text)[: min(TEXT_TOKENS, config.max_positions)]
    if len(ids) < 2:
        raise BenchmarkError(f"--text {args.text} has {len(ids)} tokens: expected at least 2")
    return ids


class Session:
    """The arguments, model, environment and files of one run."""

    def __init__(self, args: argparse.Namespace, config: Any, environment: dict[str, str], folder: str) -> None:
        self.args, self.config, self.environment, self.folder = args, config, environment, folder
        self.source = str(gguf_of(args) or folder)
        """The folder or file that the engines load"""
        self.probe: Callable[[], float] = bandwidth_probe(args.threads)

    def worker(self, plan: Plan) -> Worker:
        """A process that loads an engine."""
        return Worker(plan, self.source, self.args.threads, self.environment, cpu_time=self.args.cpu_time)

    def bandwidth(self) -> float:
        """Memory bandwidth in GB/s, measured once all threads are idle."""
        time.sleep(REST_SECONDS)
        return self.probe()

    def burst(self, worker: Worker, task: Task) -> dict[str, Any]:
        """Run one burst; its tokens and seconds."""
        limit = LIMIT_SECONDS / 4 if worker.plan.slow else LIMIT_SECONDS
        return worker.ask(do="time", limit=limit, vocab_size=self.config.vocab_size, **task._asdict())


def measure(session: Session, group: int, workers: Sequence[Worker], case: str) -> Iterator[Burst]:
    """Run one case with the engines of a group in turns. The first turn is a warm-up and is not kept."""
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
    """Measure all cases for which engines stay loaded, group by group."""
    from minillm.backends.memory_use import free_memory

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
                results.bursts += (bursts := list(measure(session, group, workers, case)))
                say_speeds(bursts)
            for worker in workers:
                if "logits" in cases and takes_part("logits", worker.plan):
                    ask_for_logits(session, worker)
                if "perplexity" in cases and takes_part("perplexity", worker.plan):
                    say(f"perplexity: {worker.plan.name}")
                    reply = worker.ask(do="score", ids=text_ids(session.args, session.config))
                    results.perplexities[worker.plan] = reply["perplexity"]
    if "logits" in cases:
        compare_logits(session, used, results)


def say_speeds(bursts: Sequence[Burst]) -> None:
    """Say the median speed of each engine in a case that has ended, should the run not come to its tables."""
    for task, plan in dict.fromkeys((burst.task, burst.plan) for burst in bursts):
        speeds = [burst.speed for burst in bursts if (burst.task, burst.plan) == (task, plan) and burst.seconds]
        if speeds:
            say(f"{task.name}: {plan.name} {statistics.median(speeds):.1f} tokens/s")


def ask_for_logits(session: Session, worker: Worker) -> None:
    """Have an engine write the logits of each prompt."""
    for length in LENGTHS:
        file = logits_file(session, worker.plan, length)
        worker.ask(do="logits", length=length, file=file, vocab_size=session.config.vocab_size)


def logits_file(session: Session, plan: Plan, length: int) -> str:
    """Path of the file for an engine's logits of a prompt."""
    return str(Path(session.folder) / f"{plan.name} {length}.npy")


def compare_logits(session: Session, plans: Sequence[Plan], results: Results) -> None:
    """Relative rms error of each engine's logits.

    A reduced format is compared with the same engine in float32; float32, and llama.cpp on the user's own file, with
    minillm on NumPy, to show that both compute the same model.
    """
    import numpy as np

    for plan in (plan for plan in plans if takes_part("logits", plan)):
        engine = "minillm-numpy" if plan.form == "float32" or plan.same_file else plan.engine
        if engine == "ik_llama.cpp-rtr":
            engine = "ik_llama.cpp"
        reference = find(engine, "float32")
        stands_in = session.config.model_type in STAND_INS and (plan.engine, plan.form) == ("llama.cpp", "float32")
        if reference == plan or reference not in plans or stands_in:
            continue
        for length in LENGTHS:
            logits, expected = (np.load(logits_file(session, which, length)) for which in (plan, reference))
            results.errors[plan, length] = relative_rms(logits, expected)


def relative_rms(values: Any, expected: Any) -> float:
    """Root mean square of the error over that of the expected values."""
    import numpy as np

    return float(np.sqrt(np.square(values - expected).mean() / np.square(expected).mean()))


def measure_fresh(session: Session, plans: Sequence[Plan], results: Results) -> None:
    """Measure cold start and peak memory, each time in a new process, with the files in the page cache."""
    args, vocab_size = session.args, session.config.vocab_size
    real = [plan for plan in plans if args.model and plan.ours and not plan.slow]
    cold = [plan for plan in plans if "cold" in args.cases and (takes_part("cold", plan) or plan in real)]
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


def run(args: argparse.Namespace) -> None:
    """Convert the model where that is asked for, measure, and write the results."""
    if args.requantize is None:
        return compare(args)
    with tempfile.TemporaryDirectory(prefix="minillm-peers-") as folder:
        say(f"converting {args.model} to {args.requantize}")
        write_files(str(args.model), folder, [args.requantize], os.environ | thread_environment(args.threads))
        written = Path(folder) / f"{args.requantize}.gguf"
        args.model = written.rename(written.with_name(f"{args.model.stem.partition('.')[0]}.{written.name}"))
        return compare(args)


def compare(args: argparse.Namespace) -> None:
    """Measure the model that the arguments name, and write the results."""
    config = check(args)
    make_folder(args.out)
    file = gguf_of(args)
    engines, missing = sort_out(args.engines, config.model_type, file)
    plans = [
        plan
        for plan in plans_of(file)
        if plan.engine in engines and plan.form in args.formats and any(takes_part(case, plan) for case in args.cases)
    ]
    environment = os.environ | thread_environment(args.threads) | {"HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every cold start would compile Python files
    with tempfile.TemporaryDirectory(prefix="minillm-peers-") as folder:
        if file is None:
            say("writing the same weights for every engine")
            wanted = ["ctranslate2"] * any(plan.engine == "ctranslate2" for plan in plans)
            wanted += dict.fromkeys(plan.label for plan in plans if plan.engine in LLAMA_CPPS or plan.form in FILES)
            wanted += [f"onnx-{plan.form}" for plan in plans if plan.engine == "onnxruntime"]
            gguf = write_files(str(args.model or args.shape), folder, wanted, environment)
        else:
            from peer_files import gguf_bytes

            gguf = {plan.label: gguf_bytes(file) for plan in plans if plan.same_file}
        weights = {plan: weight_bytes(plan, config, gguf) for plan in plans}
        tables = {plan: unread_bytes(plan, config) for plan in plans}
        results = Results(weights, tables, position_bytes(config), by_clock=not args.cpu_time)
        session = Session(args, config, environment, folder)
        measure_loaded(session, plans, results)
        measure_fresh(session, plans, results)
    write(args, config.model_type, missing, results)


def write(args: argparse.Namespace, family: str, missing: str, results: Results) -> None:
    """Print the tables; write them, and every burst as CSV."""
    name = args.model.stem if args.model else args.shape.replace(":", "-")
    weights = "the weights of a file" if args.model else "random weights"
    stands_in = "the same file" if gguf_of(args) else STAND_INS.get(family, "the same model")
    facts = {"question": f"minillm beside other engines, {name}, {weights}, greedy"}
    facts |= {"llama.cpp": f"{stands_in}; its cache is float16"}
    facts |= {"rounds": str(args.rounds), "left out": missing}
    facts |= {"seconds": "of the processor, not the clock's"} if args.cpu_time else {}
    facts |= describe(args.threads, VERSIONS)
    probes = [burst.bandwidth for burst in results.bursts] or [0.0]
    facts["bandwidth"] = f"median {statistics.median(probes):.1f} GB/s ({min(probes):.1f}-{max(probes):.1f})"
    lines = [*headed(facts), *goal_table(results), ""]
    lines += [*speed_table(results), *other_tables(results)]
    stem = args.out / f"against_peers_{name}"
    rows = (
        [b.number, b.task.name, b.plan.name, b.tokens, f"{b.seconds:.6f}", f"{b.speed:.2f}", f"{b.bandwidth:.1f}"]
        for b in results.bursts
    )
    write_csv(stem.with_name(stem.name + ".csv"), facts, HEADER, rows)
    write_result(stem.with_name(stem.name + ".txt"), "\n".join(lines) + "\n")
    print("\n".join([*lines, f"written: {stem}.csv, {stem}.txt"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    args = parse(arguments)
    for name in [name for name in os.environ if name.startswith("OPENBLAS_")]:
        del os.environ[name]  # minillm's command line sets its own
    os.environ.update(thread_environment(1))  # for this process only: the bandwidth measurement starts its own threads
    from minillm.errors import MinillmError

    try:
        run(args)
    except (MinillmError, BenchmarkError) as error:
        print(f"against_peers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the large temporary files are removed
    sys.exit(main())
