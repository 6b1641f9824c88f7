"""minillm serve as a process: what it says, what it refuses, how it ends."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.placement import AS_WEIGHTS
from minillm.cli import serve
from minillm.cli.main import build_parser, run
from minillm.errors import MinillmError
from minillm.server import Limits

from ..children import DEFAULT_SIGNALS, prepared
from ..tiny import write_checkpoint

MODULE = [sys.executable, "-m", "minillm", "serve", "--backend", "numpy"]
LOG_LINE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (INFO|WARNING) minillm: "
LONG = {"prompt": "A list of colors: red,", "max_tokens": 480, "ignore_eos": True, "stream": True}


@pytest.fixture(autouse=True)
def nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: what should be refused would wait for requests for ever."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise MinillmError("it was to be refused, and was served")

    monkeypatch.setattr("minillm.server.process.serve", refuse)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one line with which the command ends."""
    assert run(["serve", "--backend", "numpy", *arguments]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("minillm: ")
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ssl-keyfile", "x"], "both --ssl-keyfile and --ssl-certfile"),
        (["--ssl-keyfile", "x", "--ssl-certfile", "y"], "No such file"),
        (["--port", "99999"], "--port 99999"),
        (["--prefix-store-bytes", "99"], "prefix_store_bytes is for prefix_store: name its folder, or leave it out"),
        (["--prefix-store", "F", "--no-prefix-cache"], "prefix_store keeps what the prefix cache has, and prefix_cac"),
        (["--prefix-store", "/dev/null"], "prefix_store: /dev/null is no folder: name a folder of your own"),
        (["--host", "256.1.1.1"], "--host 256.1.1.1"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
        (["--max-n", "0"], "--max-n should be a number above 0"),
        (["--request-timeout", "nan"], "--request-timeout"),
        (["--api-key", "ключ"], "ASCII"),
        (["--api-key-file", "nowhere"], "nowhere cannot be read"),
        (["--model", "a=x", "--model", "a=y"], "two models are called 'a'"),
        (["--model", "a=x", "--model", "b=y", "--alias", "c"], "--alias goes with one --model, found 2"),
        (["--otlp-endpoint", "localhost:4318"], "--otlp-endpoint should be a URL such as http://localhost:4318"),
        (["--models", "nowhere"], "there is no folder 'nowhere' of models"),
        (["--models", ".ci"], "has no models: expected GGUF files"),
        (["--models", ".", "--alias", "a"], "--alias goes with one --model, found 0 and --models"),
        (["--models", "minillm/assets", "--idle-timeout", "-1"], "--idle-timeout should be a number of at least 0"),
        (["--max-loaded", "2"], "--max-loaded has no effect without --models"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_one_line_about_a_mistake(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in fails(capsys, *arguments)


def test_one_line_about_a_port_that_is_taken_and_a_model_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "it is taken: choose another --port" in fails(capsys, "--port", port)
    assert "absent" in fails(capsys, "--port", "0", "--model", f"name={tmp_path / 'absent'}", code=1)
    (tmp_path / "keys").write_text("\n \n")
    assert "no API key" in fails(capsys, "--api-key-file", str(tmp_path / "keys"))


def test_one_line_about_missing_packages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("minillm.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "starlette.requests", None)
    assert "serving needs" in fails(capsys, code=1)


@contextlib.contextmanager
def serving(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its URL."""
    process = subprocess.Popen(
        prepared(DEFAULT_SIGNALS, [*MODULE, "--port", "0", *arguments]),
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (environment or {}),
    )
    assert process.stderr is not None
    said = []
    try:
        while "try: curl" not in (line := process.stderr.readline()):
            assert line, said
            said.append(line)
        process.said = [*said, line]  # type: ignore[attr-defined]
        [url] = re.findall(r"listening at ([^\s\"]+)", "".join(said))
        yield process, url
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def ask(url: str, body: dict[str, Any], **headers: str) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"} | headers
    )
    return urllib.request.urlopen(request, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_the_first_signal_drains(number: signal.Signals) -> None:
    with serving() as (process, url):
        response = ask(url, LONG)
        response.readline()
        process.send_signal(number)
        rest = response.read().decode()
        assert rest.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in rest
        assert process.wait(30) == 0
        assert process.stderr is not None
        log = process.stderr.read().splitlines()
        assert all(re.match(LOG_LINE, line) for line in log), log
        assert sum("POST /v1/completions 200" in line for line in log) == 1


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once() -> None:
    with serving("--backend", "numpy") as (process, url):
        responses = [ask(url, LONG) for _ in range(8)]
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
        for response in responses:
            response.close()


@pytest.mark.slow
def test_a_store_of_prefixes_outlives_the_process(tmp_path: Path) -> None:
    prompt = "A list of colors: red, blue, green. " * 30
    counts = []
    for _ in range(2):
        with serving("--prefix-store", str(tmp_path), "--prefix-store-bytes", "9000000") as (process, url):
            answer = json.load(ask(url, {"prompt": prompt, "max_tokens": 2}))
            counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert counts[0] == 0 and counts[1] >= 256


@pytest.mark.slow
def test_drain_timeout() -> None:
    with serving("--drain-timeout", "0.1") as (process, url):
        response = ask(url, LONG)
        response.readline()
        process.send_signal(signal.SIGTERM)
        assert response.read().decode().endswith("data: [DONE]\n\n")
        assert process.wait(30) == 0


@pytest.mark.slow
def test_what_it_says_and_the_line_to_try() -> None:
    key = {"MINILLM_API_KEY": "open sesame"}
    with serving("--alias", "mine", "--quiet", environment=key) as (process, url):
        said = "".join(process.said)  # type: ignore[attr-defined]
        assert "minillm: mine: opt, weights " in said and "context 512 tokens" in said and f"listening at {url}" in said
        assert re.search(r"KV cache \d+ tokens, \d+ MiB, float32\n", said)
        [command] = re.findall("try: (curl.*)", said)
        answer = subprocess.run(command, shell=True, capture_output=True, text=True, env=os.environ | key, timeout=60)
        assert json.loads(answer.stdout)["model"] == "mine", answer.stdout
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(url, LONG)
        lines: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
        reader.start()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        reader.join()
        assert lines == []  # --quiet


@pytest.mark.slow
def test_models_of_a_folder_and_the_line_to_try(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_checkpoint(tmp_path / name)
    with serving("--models", str(tmp_path), "--quiet") as (process, url):
        said = "".join(process.said)  # type: ignore[attr-defined]
        assert "loaded on request: one, two" in said
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(url, LONG | {"model": "three"})
        [command] = re.findall("try: (curl.*)", said)
        answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert json.loads(answer.stdout)["model"] == "one", answer.stdout


@pytest.mark.longer
def test_the_cache_has_16_bits_unless_a_flag_a_file_or_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cache_dtype(*arguments: str) -> str:
        name: str = build_parser().parse_args(["serve", *arguments]).cache_dtype
        return name

    assert cache_dtype() == serve.CACHE_DTYPE == AS_WEIGHTS
    assert build_parser().parse_args(["generate"]).cache_dtype is None  # as the library
    (tmp_path / "serve.toml").write_text('cache-dtype = "float32"')
    assert cache_dtype("--config", str(tmp_path / "serve.toml")) == "float32"
    monkeypatch.setenv("MINILLM_CACHE_DTYPE", "int8")
    assert cache_dtype() == "int8"
    assert cache_dtype("--cache-dtype", "float32") == "float32"


@pytest.mark.slow
def test_each_model_has_a_cache_as_its_weights_which_is_told(tmp_path: Path) -> None:
    def halve(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({name: tensor.astype(np.float16) for name, tensor in tensors.items()})

    folder = tmp_path / "models"
    for name in ("half", "on/request"):
        write_checkpoint(folder / name, change=halve)
    write_checkpoint(folder / "whole")
    options = ["--backend", "cpu", "--cache-bytes", "9000000", "--model", f"mine={folder / 'half'}"]
    with serving(*options, "--models", str(folder), "--quiet") as (process, url):
        assert re.search(r"mine: opt, .*KV cache \d+ tokens, \d+ MiB, bfloat16\n", "".join(process.said))  # type: ignore[attr-defined]
        for name in ("on/request", "whole"):
            ask(url, {"model": name, "prompt": [5, 6, 7], "max_tokens": 2}).close()
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            lines = response.read().decode()
        made = re.findall(r'minillm:cache_config_info{.*cache_dtype="(\w+)",model_name="([^"]+)"', lines)
        assert sorted(made) == [("bfloat16", "mine"), ("bfloat16", "on/request"), ("float32", "whole")]


@pytest.mark.slow
def test_a_warning_where_everyone_may_use_it() -> None:
    with serving("--host", "0.0.0.0") as (process, url):
        assert "everyone who reaches 0.0.0.0" in "".join(process.said)  # type: ignore[attr-defined]
        assert "127.0.0.1" in url
    with serving("--host", "0.0.0.0", "--api-key", "k") as (process, _):
        assert "everyone" not in "".join(process.said)  # type: ignore[attr-defined]


def test_the_help_tells_each_limit() -> None:
    others = {"logits_processors"}  # --logits-processor, which is no number
    assert {field.name for field in dataclasses.fields(Limits)} == serve.LIMITS.keys() | others
    for name, (_, _, words) in serve.LIMITS.items():
        value = getattr(Limits(), name)
        assert (
            ("default: no limit" in words or "context" in words)
            if value is None
            else f"(default: {value:.0f})" in words
        )


def test_where_keys_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(*arguments: str) -> list[str]:
        return serve._keys(build_parser().parse_args(["serve", *arguments]))

    monkeypatch.setenv("MINILLM_API_KEY", "of the environment")
    (tmp_path / "keys").write_text("one\n\n two \n")
    assert keys() == ["of the environment"]
    assert keys("--api-key", "a", "--api-key", "b") == ["a", "b"]
    assert keys("--api-key", "a", "--api-key-file", str(tmp_path / "keys")) == ["a", "one", "two"]
    monkeypatch.delenv("MINILLM_API_KEY")
    assert keys() == []
