"""The GPU benchmark without a GPU: every part runs, its arithmetic is right, and what goes wrong is named.

No test looks at a speed: what the emulator takes is no measurement, and the script says so itself.
"""

import csv
import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from minillm.backends.cuda.emulator import missing

ROOT = Path(__file__).parents[2]
emulated = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SANITIZER = """#!/bin/sh
echo "3 passed, 9 deselected in 1.00s"
echo "========= ERROR SUMMARY: 2 errors"
case "$*" in *" race "*) exit 86;; esac
"""
TABLE = """==PROF== Connected to process 7
"ID","Kernel Name","dram__bytes.sum","gpu__time_duration.sum","launch__grid_size","launch__registers_per_thread"
"","","Mbyte","usecond","block","register/thread"
"0","gemv_fma(float *)","1.5","2,000.5","128","40"
"1","layer_norm(float *, int)","0","3","1","30"
"2","gemv_fma(float *)","2.5","1.5","64","41"
==PROF== Disconnected from process 7
"""
NCU = f"""#!/bin/sh
while [ "$1" != raw ]; do shift; done; shift
"$@" || exit 1
cat <<'END'
{TABLE}END
"""


def program(folder: Path, name: str, text: str) -> None:
    """Put a program in place of one of NVIDIA's."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def unpacked(path: Path) -> dict[str, str]:
    """The files of an archive."""
    with tarfile.open(path) as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]


@pytest.fixture
def script() -> Any:
    import gpu

    return gpu


@pytest.fixture
def figures() -> Any:
    import gpu_figures

    return gpu_figures


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


@emulated
@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        "correct",
        "sanitize",
        *(pytest.param(part, marks=pytest.mark.exhaustive) for part in "ABD"),
        *(pytest.param(part, marks=pytest.mark.exhaustive) for part in ("profile", "speed", "dependent")),
    ],
)
def test_everything_runs_emulated(part: str, tmp_path: Path, subprocess_environment: dict[str, str]) -> None:
    """Every stage as on a GPU: a slip of the pen must not cost the one call on a real one."""
    program(tmp_path / "bin", "compute-sanitizer", SANITIZER)
    program(tmp_path / "bin", "ncu", NCU)
    environment = subprocess_environment | {"PATH": os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), part, "--emulated", "--out", str(tmp_path / "out")]
    if part == "speed":
        command += ["--stages", "ceilings,kernels,engine"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "EMULATED: no GPU: these are not measurements" in done.stdout
    for word in ("failed:", "stopped", "left out", "without"):
        assert word not in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"gpu_{part}_emulated.tar.gz"]
    files = unpacked(tmp_path / "out" / f"gpu_{part}_emulated.tar.gz")
    text = files[f"gpu_{part}_emulated.txt"]
    assert text.splitlines()[-1] == done.stdout.splitlines()[-2], "what is printed is what is written"
    rows = rows_of(files[f"gpu_{part}_emulated.csv"])
    found = {(row["part"], row["what"]): row for row in rows}
    if part == "A":
        verdicts = [row["note"] for row in rows if row["part"] == "verify"]
        assert len(verdicts) > 100 and all(verdict.startswith("right: ") for verdict in verdicts)
        assert [row["note"] for row in rows if row["part"] == "planted"] == ["found, as it should be"]
        assert found["engine", "decode, batch 3, int4"]["median_us"]
    elif part == "B":
        assert [row["note"] for row in rows if row["what"] == "dependently"] == ["the same bits"] * 2
        notes = [row["note"] for row in rows if row["part"] == "prompts"]
        assert len(notes) == 30 and all(note.startswith("logits within ") for note in notes), "and no other bits"
    elif part == "D":
        notes = [row["note"] for row in rows]
        assert len(notes) == 4 and all(note.startswith("right: the tokens of one process, 4 of 4") for note in notes)
        assert notes[:2] == notes[2:], "called and recorded, as many sums"
    elif part == "correct":
        assert found["compile", "kernels"]["note"] == "3 builds, 0 failed"
        assert "passed" in found["device tests", "tests/backends/cuda/test_gpu.py"]["note"]
        assert "passed" in found["tests", "tests/backends/cuda"]["note"]
        assert "passed" in files["gpu_correct_emulated_tests.log"]
    elif part == "profile":
        assert "waits for" in found["host", "sampling, batch 2"]["note"]
        row = found["launches", "batch 3, context 37: gemv_fma"]
        assert (row["median_us"], row["launches"]) == ("2002.00", "2")
    elif part == "speed":
        assert not [row for row in rows if row["part"] in ("ceilings", "kernels") and not row["median_us"]]
        assert {"qkv, 1 rows", "head, 3 rows", "up, 20 rows, by the library", "attention, decode, batch 3, context 40",
                "attention, prefill 20", "store K and V, 1 tokens", "copy a page of all layers", "layer norm, 3 rows",
                "RMS norm, 20 rows", "embedding, 1 tokens", "likeliest of 3 rows", "draw for 1 rows"} <= {
            what for part, what in found if part == "kernels"
        }  # fmt: skip
        assert found["engine", "decode, batch 3"]["launches"] == "19", "2 layers of 7, and 5 around them"
        assert float(found["engine", "decode, batch 1, on the device"]["median_us"]) > 0
        assert float(found["engine", "prefill, 1 x 10"]["tokens_per_second"]) > 0
        assert float(found["engine", "prefill, 2 x 20"]["tokens_per_second"]) > 0
    elif part == "dependent":
        notes = [row["note"] for row in rows if row["what"] in ("plainly", "dependently", "plainly again")]
        assert notes == ["the same bits"] * 6, "of two shapes"
        notes = [row["note"] for row in rows if row["what"] in ("int4, plainly", "int4, persistently")]
        assert notes == ["the same bits"] * 2, "of Llama's"
        assert [row["note"] for row in rows if row["what"] == "persistently"] == ["the same bits"], "of Llama's"
        assert found["dependent", "decode, batch 3, persistently"]["launches"] == "4", "one for all layers, 3 around it"
        assert found["dependent", "deferred, dependently"]["note"] == "other bits, as it should be"
        steps = "decode, batch 3, on the device, {}"
        assert all(found["dependent", steps.format(how)]["median_us"] for how in ("plainly", "dependently"))
        assert found["carve-out", steps.format("carve-out of 44 %")]["median_us"]
    else:
        assert [row["part"] for row in rows] == ["memcheck", "racecheck", "synccheck", "initcheck"]
        assert {row["note"] for row in rows} == {"3 passed, 9 deselected; ERROR SUMMARY: 2 errors"}


def test_kernels_in_the_table_of_ncu() -> None:
    import gpu_profile

    found = gpu_profile.read_table(TABLE.splitlines())
    gemv, norm = found["gemv_fma"], found["layer_norm"]
    assert (gemv.seconds, gemv.bytes, gemv.launches) == (pytest.approx(2002e-6), 4_000_000, 2)
    assert gemv.note == "last launch: registers 41, blocks 64"
    assert (norm.seconds, norm.bytes, norm.launches) == (pytest.approx(3e-6), 0, 1)
    assert gpu_profile.read_table(["==ERROR== No kernels were profiled."]) == {}


@pytest.mark.slow
@emulated
def test_a_stage_that_takes_too_long_is_stopped_and_the_others_go_on(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(script.PARTS, "speed", {"engine": 0.05, "ceilings": 60})
    assert script.main(["speed", "--emulated", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "failed: stopped after 0 s, its limit" in out
    assert "copy, read and written" in unpacked(tmp_path / "gpu_speed_emulated.tar.gz")["gpu_speed_emulated.txt"]


@pytest.mark.slow
@emulated
def test_a_budget_that_is_spent_and_a_stage_that_fails_are_named(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(script.PARTS, "correct", {"nonsense": 60})
    assert script.main(["correct", "--emulated", "--out", str(tmp_path), "--budget", "60"]) == 0
    assert "failed: KeyError: 'nonsense'" in capsys.readouterr().out
    assert script.main(["correct", "--emulated", "--out", str(tmp_path), "--budget", "1"]) == 0
    assert "left out: the budget of 1 s is spent" in capsys.readouterr().out


def test_a_reply_that_is_none_costs_nothing_that_was_measured(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = script.Run("A", tmp_path, tmp_path, [], emulated=True)
    run.figures.append(figure := script.Figure("engine", "", "decode", 1.0))
    monkeypatch.setattr(script.json, "loads", lambda text: 1 // 0)
    monkeypatch.setattr(script.sys, "executable", "/bin/echo")
    assert run.stage("engine", 60) == "ZeroDivisionError: integer division or modulo by zero"
    run.pack()
    assert run.figures == [figure] and "decode" in unpacked(run.archive)["gpu_A_emulated.txt"]


def test_the_parts_of_a_quarter_of_an_hour_fit_in_it(script: Any) -> None:
    """With the start of a machine."""
    assert script.plan(script.QUARTER, script.BUDGET).endswith(": 890 s")


@emulated
@pytest.mark.slow
def test_a_part_that_is_told_to_end_leaves_what_it_has_found(
    tmp_path: Path, subprocess_environment: dict[str, str]
) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "speed", "--emulated", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--stages", "ceilings,kernels"], env=subprocess_environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("kernels: "):  # the ceilings are done
            process.terminate()
            break
    process.stderr.close()
    assert process.wait() == 128 + 15
    assert "copy, read and written" in unpacked(tmp_path / "gpu_speed_emulated.tar.gz")["gpu_speed_emulated.txt"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--emulated", "--out", "RESULTS"], "emulated figures are no results: name another folder with --out"),
        (["--shapes", "opt-1", "--out", "x"], "shape 'opt-1' is not known"),
        (
            ["kernels", "--out", "x"],
            "part 'kernels' is not known: expected some of A, B, C, D, correct, profile, speed, dependent, sanitize",
        ),
        (["--stages", "beer", "--out", "x"], "stage 'beer' is not known: expected some of compile, verify, device"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    script: Any, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(script.RESULTS) if one == "RESULTS" else one for one in arguments]
    assert script.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.longer
def test_a_machine_without_a_gpu_gets_one_line(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("cupy"):
        import cupy

        if cupy.cuda.is_available():
            pytest.skip("there is a GPU")
    assert script.main(["correct", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gpu: device 'cuda' needs ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_a_share_is_the_floor_over_the_time(figures: Any) -> None:
    copy = figures.Figure("ceilings", "", figures.COPY, seconds=2e-3, bytes=8_000_000_000)
    product = figures.Figure("ceilings", "", figures.PRODUCT.format("float16"), seconds=1e-3, flops=800_000_000_000)
    ceilings = figures.Ceilings.of([copy, product])
    assert ceilings == (4e12, 8e14, 0)
    by_memory = figures.Figure("kernels", "", "", seconds=4e-6, bytes=8_000_000, flops=800_000_000)
    assert ceilings.floor(by_memory) == pytest.approx(2e-6)
    assert ceilings.share(by_memory) == pytest.approx(0.5)
    by_products = by_memory._replace(flops=3_200_000_000)
    assert ceilings.share(by_products) == pytest.approx(1.0)
    assert figures.Ceilings(4e12, 0.0).share(by_products) == 0, "with one ceiling unknown, so is the share"
    cells = dict(zip(figures.HEADER, figures.row(by_memory, ceilings), strict=True))
    assert cells["floor_us"] == "2.00" and cells["of_ceiling"] == "0.500" and cells["gb_per_second"] == "2000.0"
    assert figures.row(copy, ceilings)[figures.HEADER.index("of_ceiling")] == ""
    by_name = figures.Ceilings.of([copy, product], "NVIDIA H100 80GB HBM3, 79.2 GiB")
    cells = dict(zip(figures.HEADER, figures.row(by_memory, by_name), strict=True))
    assert by_name.datasheet == 3.35e12 and cells["of_datasheet"] == "0.597"


def test_goals_are_reached_missed_or_open(figures: Any) -> None:
    copy = figures.Figure("ceilings", "", figures.COPY, seconds=1.0, bytes=1000)
    product = figures.Figure("ceilings", "", figures.PRODUCT.format("float16"), seconds=1.0, flops=1000)
    measured = [
        copy,
        product,
        figures.Figure("engine", "opt-6.7b", "decode, batch 1", seconds=1.0, bytes=900, tokens=1),
        figures.Figure("engine", "opt-1.3b", "decode, batch 1", seconds=1.0, bytes=500, tokens=1),
        figures.Figure("transformers compiled", "opt-1.3b", "decode, batch 1", seconds=0.5, tokens=1),
        figures.Figure("engine", "opt-6.7b", "prefill, 1 x 9", seconds=1.0, flops=600, tokens=9),
        figures.Figure("engine", "opt-6.7b", "prefill, 4 x 9", seconds=1.0, flops=800, tokens=36),
        figures.Figure("kernels", "opt-13b", "attention, prefill 9", seconds=1.0, flops=2 * 10**14),
        figures.Figure("engine", "opt-125m", "decode, batch 1", seconds=200e-6, tokens=1),
    ]
    verdicts = {str(goal).split(None, 1)[1].split(":")[0]: str(goal).split()[0] for goal in figures.goals(measured)}
    assert verdicts["opt-6.7b, decode, batch 1"] == "reached"
    assert verdicts["opt-13b, decode, batch 1"] == "open"
    assert verdicts["opt-6.7b, prefill"] == "reached", "the best of its prefills"
    assert verdicts["opt-13b, prefill"] == "open"
    assert verdicts["opt-13b, prefill attention with heads of 128"] == "reached"
    assert verdicts["opt-6.7b, prefill attention with heads of 128"] == "open"
    lines = [str(goal) for goal in figures.goals(measured)]
    assert (
        "missed   opt-1.3b, decode, batch 1: share of the copy bandwidth: at least 0.75 are aimed at, 0.5 measured"
        in lines
    )
    assert any(line.startswith("missed   opt-1.3b, decode, batch 1: times as fast as transformers") for line in lines)
    assert "missed   opt-125m, decode, batch 1: microseconds a step: at most 150 are aimed at, 200 measured" in lines
    assert all(str(goal).startswith("open") for goal in figures.goals([]))
    checked = [figures.Figure("verify", "", str(i), note=note) for i, note in enumerate(("right: 0.5", "WRONG: 9"))]
    assert "missed   results at real sizes that are wrong: at most 0 are aimed at, 1 measured" in [
        str(goal) for goal in figures.goals(checked)
    ]


@pytest.mark.reference
def test_compiled_transformers_say_what_eager_ones_do(tiny: str) -> None:
    """On a CPU, where what would be compiled is only traced; in one graph, without a break."""
    torch = pytest.importorskip("torch", reason="needs the peers extra")
    pytest.importorskip("transformers", reason="needs the peers extra")
    from gpu_figures import COMPILED, EAGER, TINY
    from gpu_peer import BURSTS, Peer, transformers

    peer = Peer(tiny, "cpu", TINY)

    def tokens(batch: int, *, compiled: bool) -> list[list[int]]:
        peer.begin(batch, compiled=compiled)
        said = []
        for _ in range(BURSTS * TINY.steps):
            peer._step()
            said.append(peer._ids.tolist())
        return said

    counters = torch._dynamo.utils.counters
    for batch in TINY.batches:
        expected = tokens(batch, compiled=False)
        counters.clear()
        assert tokens(batch, compiled=True) == expected
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    measured = list(transformers(TINY, [tiny], emulated=True))
    assert not [figure.note for figure in measured if figure.note]
    assert [(figure.part, figure.what) for figure in measured] == [
        *((EAGER, f"decode, batch {batch}") for batch in TINY.batches),
        *((EAGER, f"prefill, {prompts} x 20") for prompts in (1, 2)),
        *((COMPILED, f"decode, batch {batch}") for batch in TINY.batches),
    ]
    assert all(figure.speed > 0 for figure in measured)
