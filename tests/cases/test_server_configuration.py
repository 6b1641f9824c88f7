"""Every flag of the server in a file and in the environment, and its log: times, levels, JSON, and no probes."""

import argparse
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

import minillm
from minillm import Engine
from minillm.cli import configuration, logs
from minillm.cli.main import build_parser, run
from minillm.server import make_app

from ..cli.test_serve import LOG_LINE, ask, serving
from ..server.client import get, post


def parser() -> argparse.ArgumentParser:
    [commands] = [a for a in build_parser("serve")._actions if isinstance(a, argparse._SubParsersAction)]
    return commands.choices["serve"]


FLAGS = {
    max(action.option_strings, key=len): action
    for action in parser()._actions
    if action.option_strings and action.dest not in ("help", "config")
}
"""Every flag of the command -> its action"""


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("MINILLM_"):
            monkeypatch.delenv(name)


def parsed(*words: str) -> argparse.Namespace:
    return build_parser("serve").parse_args(["serve", *words])


def values(action: argparse.Action) -> tuple[Any, Any, Any]:
    """Three different values of a flag, as the command line takes them: a list of its words."""
    if action.nargs == 0:
        return [], [], []
    if action.choices is not None:
        first, second, *_ = [choice for choice in action.choices if choice != action.default] * 2
        return [first], [second], [first]
    if action.type in (int, float):
        return ["3"], ["5"], ["7"]
    if configuration.repeats(action):
        return ["a=b", "c=d"], ["e=f"], ["g=h", "i=j"]
    return ["one"], ["two"], ["three"]


def on_the_command_line(flag: str, action: argparse.Action, words: list[str]) -> list[str]:
    if isinstance(action, argparse._AppendAction):
        return [part for word in words for part in (flag, word)]
    return [flag, *words]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("spelling", ["-", "_"])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_counts_on_the_command_line_before_the_environment_before_the_file(
    flag: str, spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    action, name = FLAGS[flag], flag.removeprefix("--")
    here, around, written = values(action)
    file, variable = tmp_path / "serve.toml", f"MINILLM_{name.replace('-', '_').upper()}"

    def value_of(words: list[str], *before: str) -> Any:
        return getattr(parsed(*before, *on_the_command_line(flag, action, words)), action.dest)

    plain, config = getattr(parsed(), action.dest), ("--config", str(file))
    if action.nargs == 0:
        content: Any = True
    elif action.type in (int, float):
        content = int(written[0])
    else:
        content = written if configuration.repeats(action) else written[0]
    file.write_text(f"{name.replace('-', spelling)} = {json.dumps(content)}\n")
    said_in_file = value_of(written)
    assert getattr(parsed(*config), action.dest) == said_in_file != plain
    monkeypatch.setenv("MINILLM_CONFIG", str(file))
    assert getattr(parsed(), action.dest) == said_in_file
    monkeypatch.setenv(variable, "0" if action.nargs == 0 else ",".join(around))
    if action.nargs == 0:
        assert getattr(parsed(*config), action.dest) == action.default
        assert getattr(parsed(*config, flag), action.dest) == action.const
        return
    with monkeypatch.context() as without:
        without.delenv(variable)
        without.delenv("MINILLM_CONFIG")
        said_around, said_here = value_of(around), value_of(here)
    assert getattr(parsed(*config), action.dest) == said_around
    assert value_of(here, *config) == said_here


def test_models_by_their_names_may_be_a_table(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 8080\nrequest_timeout = 2.5\n[model]\nsmall = "a.gguf"\nlarge = "b"\n')
    args = parsed("--config", str(file))
    assert (args.port, args.request_timeout, args.model) == (8080, 2.5, ["small=a.gguf", "large=b"])


def test_the_page_on_deployment_names_flags_that_there_are(tmp_path: Path) -> None:
    page = (Path(minillm.__file__).parent / "server" / "DEPLOYMENT.md").read_text(encoding="utf-8")
    [toml] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    [command] = re.findall(r"^ExecStart=.*-m minillm serve (.*)$", page, re.MULTILINE)
    file = tmp_path / "serve.toml"
    file.write_text(toml)
    args = parsed(*command.replace("/etc/minillm/serve.toml", str(file)).split())
    assert args.model == ["small=/srv/models/SmolLM2-135M-Instruct.Q4_1.gguf"] and args.log_format == "json"
    table = page[page.index("| what | flag |") :].split("\n\n", 1)[0]
    names = {f"--{name}" for row in table.splitlines()[2:] for name in re.findall(r"`([a-z-]+)`", row.split("|")[2])}
    assert len(names) >= 12 and names <= FLAGS.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "prot is not a flag of this command: did you mean port?"),
        ("max-batchsize = 1", "did you mean max-batch-size?"),
        ("zzz = 1", "zzz is not a flag of this command"),
        ("[server]\nport = 1", "server is not a flag of this command"),
        ("port = 'x'", "port: expected a whole number, found 'x'"),
        ("port = true", "port: expected a text or a number, found True"),
        ("port = [1]", "port: expected a text or a number, found [1]"),
        ("quiet = 1", "quiet: expected true or false, found 1"),
        ("log-level = 'loud'", "log-level: 'loud': expected one of debug, info, warning, error"),
        ("port = ", "should be TOML"),
        (None, "cannot be read"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    if text is not None:
        file.write_text(text)
    assert run(["serve", "--config", str(file)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line and str(file) in line


def test_a_mistake_in_the_environment_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name, value, words in (("PORT", "x", "expected a whole number"), ("QUIET", "perhaps", "expected 1 or 0")):
        with monkeypatch.context() as context:
            context.setenv(f"MINILLM_{name}", value)
            assert run(["serve"]) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert f"MINILLM_{name}: {words}" in line
    monkeypatch.setenv("MINILLM_PORTT", "1")
    monkeypatch.setenv("MINILLM_MARCH", "x86-64-v3")  # is read elsewhere
    monkeypatch.setenv("MINILLM_PORT", "tcp://10.0.0.1:8000")  # Kubernetes sets it beside a service of this name
    assert parsed().port == 8000
    assert [record.getMessage() for record in caplog.records] == [
        "MINILLM_PORTT is not read: did you mean MINILLM_PORT?"
    ]


# --- the log ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def plain_again() -> Iterator[None]:
    yield
    logs.begin()


@pytest.mark.usefixtures("plain_again")
def test_probes_are_logged_only_where_they_fail_or_are_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app({"demo": Engine(backend="numpy")})
    caplog.set_level(logging.INFO, "minillm.access")
    for path in ("/health", "/metrics", "/v1/models", "/health/more"):
        get(app, path)
    paths = [record.fields["path"] for record in caplog.records]  # type: ignore[attr-defined]
    assert paths == ["/v1/models", "/health/more"]
    app.state.server.draining = True
    assert get(app, "/health").status_code == 503
    assert caplog.records[-1].fields["status"] == 503  # type: ignore[attr-defined]
    app.state.server.draining = False
    caplog.set_level(logging.DEBUG, "minillm.access")
    get(app, "/health")
    assert caplog.records[-1].levelno == logging.DEBUG


@pytest.mark.longer
@pytest.mark.usefixtures("plain_again")
def test_a_line_of_json_has_the_numbers_of_a_request_and_none_of_its_text(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app({"demo": Engine(backend="numpy")})
    caplog.set_level(logging.INFO, "minillm.access")
    post(app, "/v1/completions", {"prompt": "my secret", "max_tokens": 3}, headers={"X-Request-Id": "one"})
    line = json.loads(logs.JsonFormatter().format(caplog.records[-1]))
    assert line.items() >= {"level": "info", "logger": "minillm.access", "status": 200, "request_id": "one"}.items()
    assert line["method"] == "POST" and line["path"] == "/v1/completions" and line["generated"] == 3
    assert re.fullmatch(r"[-\d]{10}T[:\d]{8}\.\d{3}[+-]\d\d:\d\d", line["time"])
    assert "secret" not in json.dumps(line)


@pytest.mark.slow
def test_the_process_writes_times_and_levels_or_json(tmp_path: Path) -> None:
    body = {"prompt": "A", "max_tokens": 2}
    with serving() as (process, url):
        ask(url, body).read()
        assert process.stderr is not None
        log = [*process.said, process.stderr.readline()]  # type: ignore[attr-defined]
        assert all(re.match(LOG_LINE, line) for line in log) and "POST /v1/completions 200" in log[-1]
    with serving("--log-format", "json", environment={"MINILLM_HOST": "0.0.0.0"}) as (process, url):
        ask(url, body).read()
        assert process.stderr is not None
        log = [json.loads(line) for line in [*process.said, process.stderr.readline()]]  # type: ignore[attr-defined]
        assert log[0]["level"] == "warning" and log[-1]["generated"] == 2
