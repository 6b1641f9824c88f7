"""Chats on the page and in the terminal sample as the checkpoint says, and sensibly where it does not."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.cli.main import run
from minillm.decoding.checkpoint_fields import CHAT_SAMPLING, chat_sampling

from ..tiny import write_checkpoint

SENSIBLE = dict(CHAT_SAMPLING)
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, SENSIBLE),
    ({"eos_token_id": 2, "max_new_tokens": 9, "num_beams": 4}, SENSIBLE),
    ({"repetition_penalty": 1.2}, SENSIBLE | {"repetition_penalty": 1.2}),
    ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
    ({"do_sample": True}, {"do_sample": True}),
    ({"do_sample": False}, {"do_sample": False}),
    ({"do_sample": True, "top_k": 20, "seed": 4, "min_p": None}, {"do_sample": True, "top_k": 20}),
]


@pytest.mark.parametrize(("checkpoint", "expected"), SETTINGS, ids=[str(checkpoint) for checkpoint, _ in SETTINGS])
def test_the_checkpoint_s_own_sampling_counts_else_temperature_08_with_min_p_005(
    checkpoint: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert chat_sampling(checkpoint) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("chat"))


def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, lines: str = "Hi") -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines + "\n"))
    assert run(["chat", "--max-new-tokens", "12", "--backend", "numpy", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("said", [{}, {"do_sample": True, "temperature": 3.0, "top_k": 0}], ids=["nothing", "own"])
def test_a_chat_in_the_terminal_draws_as_a_request_with_these_fields(
    said: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(said))
    monkeypatch.setattr("os.urandom", lambda count: b"\7" * count)  # an unset seed
    seed = int.from_bytes(b"\7" * 8, "little")
    with Engine(model, backend="numpy") as engine:
        sampled = engine.generate("Hi", max_new_tokens=12, seed=seed, **(said or SENSIBLE)).text
        greedy = engine.generate("Hi", max_new_tokens=12, do_sample=False).text
        beams = engine.generate("Hi", max_new_tokens=12, do_sample=False, num_beams=3).text
    assert sampled != greedy
    words = ["--model", str(model)]
    assert answer(monkeypatch, capsys, *words) == sampled + "\n"
    assert answer(monkeypatch, capsys, *words, "--temperature", "0") == greedy + "\n"
    assert answer(monkeypatch, capsys, *words, lines="/set temperature 0\nHi") == greedy + "\n"
    assert (
        answer(monkeypatch, capsys, *words, lines="/set temperature 0\n/set temperature default\nHi") == sampled + "\n"
    )
    assert answer(monkeypatch, capsys, *words, "--num-beams", "3") == beams + "\n"
