"""The benchmark of servers: its client against a server of known answers, its figures against a hand's."""

import asyncio
import csv
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm.measure import accounting
from minillm.measure.accounting.hardware import Hardware
from minillm.models import opt

from ..shapes import BASE

pytest.importorskip("httptools", reason="the load client needs the extra serve")

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PAUSE = 0.02


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event(choices=[{"text": piece, "index": 0}])


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5})


async def against(pieces: list[bytes], ask: Callable[[int], Awaitable[Any]]) -> Any:
    """What `ask(port)` returns beside a server that writes these pieces, with pauses, and closes the connection."""
    handlers: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        json.loads(await reader.readexactly(length))
        handlers.append(asyncio.current_task())
        with suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(PAUSE)
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        result = await ask(server.sockets[0].getsockname()[1])
        await asyncio.gather(*handlers)
    return result


def answer_to(pieces: list[bytes]) -> Any:
    from serve_client import complete

    return asyncio.run(against(pieces, lambda port: complete(port, {"prompt": "é"})))


def test_the_client_takes_tokens_from_the_usage_and_times_from_the_packets() -> None:
    """Three packets with text, one of them of two events and one that ends amid an event; five tokens by the usage."""
    second = chunk(text("b")) + chunk(text("c"))
    third, rest = chunk(text("d"))[:30], chunk(text("d"))[30:]
    answer = answer_to(
        [
            HEAD + chunk(text("a")),
            second,
            third,
            rest,
            chunk(text("") + USAGE) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
        ]
    )
    assert answer.error == ""
    assert (answer.tokens, answer.prompt_tokens) == (5, 7)
    assert len(answer.arrivals) == 3
    assert answer.sent < answer.arrivals[0] < answer.arrivals[-1] <= answer.ended
    assert answer.first == answer.arrivals[0] - answer.sent
    assert answer.gaps[0] >= 0.5 * PAUSE and answer.gaps[1] >= 1.5 * PAUSE


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull"], "status 429: full"),
        ([HEAD + chunk(text("a"))], "closed early"),
        ([HEAD + chunk(text("a")) + chunk(event(error={"message": "NaN"})) + b"0\r\n\r\n"], "NaN"),
        ([HEAD + chunk(b"data: {[}\n\n")], "not understood"),
        ([b"what?\r\n\r\n"], "not understood"),
    ],
)
def test_a_failure_is_the_answers_error(pieces: list[bytes], words: str) -> None:
    assert words in answer_to(pieces).error


def test_nobody_at_the_port_is_an_error() -> None:
    from serve_client import complete

    assert "no connection" in asyncio.run(complete(1, {})).error


def test_a_closed_loop_has_so_many_open_and_an_open_loop_all_that_are_due() -> None:
    from serve_client import closed_loop, open_loop

    whole = [HEAD + chunk(text("a")), chunk(USAGE) + b"0\r\n\r\n"]

    def most(answers: list[Any]) -> int:
        """The most that were open at once."""
        changes = sorted([(one.sent, 1) for one in answers] + [(one.ended, -1) for one in answers])
        return max(sum(change for _, change in changes[: i + 1]) for i in range(len(changes)))

    requests: list[dict[str, Any]] = [{"prompt": str(number)} for number in range(7)]
    closed = asyncio.run(against(whole, lambda port: closed_loop(port, requests, 3, 60)))
    assert len(closed) == 7 and most(closed) == 3
    opened = asyncio.run(against(whole, lambda port: open_loop(port, requests, [PAUSE / 20] * 7, 60)))
    assert len(opened) == 7 and most(opened) > 3


@pytest.mark.slow
def test_what_is_not_answered_in_time_is_given_up() -> None:
    from serve_client import closed_loop, open_loop

    slow, requests = [HEAD] + [chunk(text("a"))] * 500, [{}] * 3
    closed = asyncio.run(against(slow, lambda port: closed_loop(port, requests, 2, 0.4)))
    opened = asyncio.run(against(slow, lambda port: open_loop(port, requests, [0.0] * 3, 0.4)))
    assert [one.error for one in closed + opened] == ["not answered in time"] * 5  # the third was not even sent
    assert all(one.arrivals for one in closed)


def test_the_prediction_on_a_machine_that_only_computes_is_the_closed_forms_flops_over_its_rate() -> None:
    """Chunks and turns change nothing about FLOPs but that each pass has the rows it returns."""
    from serve_prediction import closed_loop_seconds

    from minillm.engine.scheduler import Limits

    machine = Hardware(name="a", rates={"float32": 1e9}, bandwidth=1e30, memory=1, source="thin air")
    config, storage = opt.read_config(BASE), accounting.Storage()
    analysis: Any = SimpleNamespace(config=config, storage=storage, hardware=machine)
    requests = [(5, 4), (11, 2), (3, 6), (8, 4)]
    expected = sum(accounting.flops(config, accounting.generation([length], new)) for length, new in requests) / 1e9
    for streams, budget in ((1, 512), (2, 512), (4, 6), (3, 4)):
        found = closed_loop_seconds(analysis, requests, streams, Limits(streams, budget, budget))
        assert found == pytest.approx(expected)
    slow: Any = SimpleNamespace(
        config=config,
        storage=storage,
        hardware=Hardware(name="b", rates={"float32": 1e30}, bandwidth=1e9, memory=1, source="thin air"),
    )
    times = [closed_loop_seconds(slow, [(8, 4)] * 4, streams, Limits(4, 64, 64)) for streams in (1, 2, 4)]
    assert times[0] > 1.5 * times[1] > 2 * times[2]  # together they read the weights once


def some_answer(**fields: Any) -> Any:
    from serve_client import Answer

    return Answer(**{"sent": 0.0, "arrivals": [1.0, 1.5, 3.5], "ended": 4.0, "tokens": 8, "prompt_tokens": 3} | fields)


def test_figures_worked_out_by_hand() -> None:
    from serve_report import Load, Run, percentile

    assert [percentile(range(1, 101), share) for share in (0.5, 0.99, 1)] == [50, 99, 100]
    assert percentile([3], 0.99) == 3 and math.isnan(percentile([], 0.5))
    answers = [some_answer(), some_answer(sent=1.0, arrivals=[3.0], ended=5.0), some_answer(error="x", ended=8.0)]
    run = Run(1, Load(8), "minillm", answers, 10.0, cpu=4.0, main_cpu=0.0016, client_cpu=0.01)
    assert (run.failed, run.tokens, run.prompt_tokens, run.seconds, run.speed) == (1, 16, 6, 8.0, 2.0)
    assert (run.first(0.5), run.first(0.99), run.gap(0.5), run.gap(0.99)) == (1.0, 2.0, 0.5, 2.0)
    assert dict(zip(__import__("serve_report").HEADER, run.row(), strict=True))["tokens_per_cpu_second"] == "4.00"


def test_goals_are_ratios_within_a_round() -> None:
    from serve_report import Load, Run, failures, goal_table, speed_table

    runs = [
        Run(1, Load(32), "minillm", [some_answer(ended=2.0)], cpu=1.0, main_cpu=8 * 50e-6),
        Run(1, Load(32), "llama-server", [some_answer(ended=6.0, arrivals=[0.5, 2.5])]),
        Run(1, Load(rate=2.0), "minillm", [some_answer(error="status 500: no"), some_answer()]),
    ]
    lines = goal_table(runs)
    found = {line[:64].strip(): line[64:].split() for line in lines[1:]}
    assert found["32 streams: tokens/s, minillm / llama-server"][0] == "3.00"
    assert found["32 streams: TTFT p99, minillm / llama-server"][0] == "2.00"
    assert found["32 streams: TTFT p99, minillm / llama-server"][-1] == "missed"
    assert found["32 streams: inter-token p99, minillm / llama-server"][-1] == "1.00"
    assert found["32 streams: minillm's event loop, us of CPU a token"][-1] == "missed"
    assert failures(runs) == ["minillm, 2/s: status 500: no"]
    assert len(speed_table(runs)) == 4


def test_a_server_falls_behind_when_the_last_answer_is_late_or_one_failed() -> None:
    from serve_report import Load, Run, saturated

    def run(*ends: float, error: str = "") -> Run:
        return Run(
            1, Load(rate=1), "a", [some_answer(sent=float(i), ended=end, error=error) for i, end in enumerate(ends)]
        )

    assert not saturated(run(1, 2, 3, 4))
    assert saturated(run(1, 2, 3, 5))
    assert saturated(run(1, 2, 3, 4, error="status 429"))
    assert not saturated(Run(1, Load(2), "a", [some_answer(ended=9.0)]))


def test_arrivals_have_the_rate() -> None:
    import serve

    delays = serve.arrivals(50.0, 40)
    assert delays == serve.arrivals(50.0, 40)
    assert len(delays) / sum(delays) == pytest.approx(50, rel=0.1)
    assert sum(delay > 1 / 50 for delay in delays) / len(delays) == pytest.approx(math.exp(-1), abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engines", "vllm"], "server 'vllm' is not known"),
        (["--engines", "llama-server", "--llama-server", "no/such"], "no/such is not found"),
        (["--engines", "transformers"], "--transformers-model"),
        (["--text", "no/such/text"], "no/such/text"),
        (["--text", "tests/__init__.py"], "expected at least 1024"),
        (["--engines", "minillm"], "beyond the context of 512"),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments: list[str], words: str, tmp_path: Path, capsys: Any) -> None:
    import serve

    from minillm.engine.loading import DEMO_MODEL

    assert serve.main(["--model", str(DEMO_MODEL), "--out", str(tmp_path), *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("serve: ")]
    assert words in line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With the server alone, and prompts that fit into the context of the model in the package."""
    pytest.importorskip("matplotlib", reason="plots need the plot extra")
    import serve

    from minillm.engine.loading import DEMO_MODEL

    monkeypatch.setattr(serve, "LONGEST", 100)
    options = [
        "--streams",
        "2",
        "--requests",
        "4",
        "--rates",
        "5",
        "--seconds",
        "1",
        "--new-tokens",
        "6",
        "--slots",
        "4",
    ]
    assert (
        serve.main(["--model", str(DEMO_MODEL), "--out", str(tmp_path), "--engines", "minillm,llama-server", *options])
        == 0
    )
    lines = (tmp_path / "serve_demo-opt.csv").read_text(encoding="utf-8").splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert facts["left out"].startswith("llama-server (")
    assert [(row["load"], row["server"], row["failed"]) for row in rows] == [
        ("2 streams", "minillm", "0"),
        ("5/s", "minillm", "0"),
    ]
    for row in rows:
        assert 3 * int(row["requests"]) <= int(row["tokens"]) <= 9 * int(row["requests"])
        assert 0 < float(row["ttft_p50_seconds"]) <= float(row["ttft_p99_seconds"]) < float(row["seconds"])
        assert 0 < float(row["itl_p50_seconds"]) <= float(row["itl_p99_seconds"])
    assert float(rows[0]["predicted_tokens_per_second"]) > 0
    assert (tmp_path / "serve_demo-opt.png").read_bytes().startswith(b"\x89PNG")
    assert "2 streams" in capsys.readouterr().out
