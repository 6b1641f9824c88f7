"""Strategies, processors and families of another package (`data/plugins`), which is on the path as if installed."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm import Engine, GenerationConfig
from minillm.cli.main import run
from minillm.errors import ParameterError, PluginError, UnsupportedModelError

from .families import CONFIGS
from .tiny import tiny_tensors

PROMPT = "A list of colors: red,"
PACKAGE = Path(__file__).parent / "data" / "plugins"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PACKAGE))
    yield
    for name in [name for name in sys.modules if name.startswith("minillm_example")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.mark.longer
@pytest.mark.usefixtures("installed")
def test_a_strategy_runs_beside_others_and_takes_its_options(engine: Engine) -> None:
    greedy = engine.generate(PROMPT, max_new_tokens=6)
    assert engine.generate(PROMPT, max_new_tokens=6, strategy="ranked").token_ids == greedy.token_ids
    config = GenerationConfig(strategy="ranked", strategy_options={"rank": 1}, max_new_tokens=4, stop_strings=".")
    ids, mine = engine.add(PROMPT, config), []
    other = engine.add(PROMPT, max_new_tokens=6, num_beams=2)
    while engine.busy:
        mine += [token for event in engine.step() if event.request_id == ids for token in event.token_ids]
    assert other != ids
    for i, token in enumerate(mine):
        logits = engine.forward([*greedy.prompt_token_ids, *mine[:i]])[-1]
        assert token == np.argsort(-logits)[1]
    watched = engine.generate(PROMPT, config, watch=["final"]).watched["final"]
    assert len(watched) == greedy.prompt_tokens + len(mine) - 1
    checkpoint = {"num_return_sequences": 3}  # gives way
    assert len(engine.generate(PROMPT, config, defaults=checkpoint).completions) == 1


@pytest.mark.usefixtures("installed")
def test_a_strategy_reads_the_fields_that_it_names(engine: Engine) -> None:
    first = engine.generate(PROMPT, strategy="ranked", max_new_tokens=2).token_ids
    fields: dict[str, Any] = {"strategy": "ranked", "max_new_tokens": 6, "eos_token_id": [first[1]]}
    assert len(engine.generate(PROMPT, **fields).token_ids) == 2
    assert len(engine.generate(PROMPT, min_new_tokens=4, **fields).token_ids) >= 4


@pytest.mark.usefixtures("installed")
def test_a_processor_is_named_like_a_function_is_given(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=8, logits_processor="even", eos_token_id=[])
    assert not np.any(np.array(answer.token_ids) % 2)
    beams = engine.generate(PROMPT, max_new_tokens=8, logits_processor=["even"], num_beams=2, eos_token_id=[])
    assert not np.any(np.array(beams.token_ids) % 2)


@pytest.mark.usefixtures("installed")
def test_a_potential_is_named_too(engine: Engine) -> None:
    fields: dict[str, Any] = {"do_sample": True, "seed": 1, "num_particles": 2, "eos_token_id": []}
    assert np.all(np.array(engine.generate(PROMPT, max_new_tokens=8, potential="odd", **fields).token_ids) % 2)


@pytest.mark.longer
@pytest.mark.usefixtures("installed")
def test_a_family_is_loaded_by_its_model_type(tmp_path: Path) -> None:
    raw = next(iter(CONFIGS["llama"].values()))
    logits = []
    for model_type in ("llama", "example_llama"):
        folder = tmp_path / model_type
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw | {"model_type": model_type}), encoding="utf-8")
        save_file({name: tensor.load() for name, tensor in tiny_tensors(raw).items()}, folder / "model.safetensors")
        with Engine(folder) as engine:
            assert engine.config.model_type == model_type
            logits.append(engine.forward([5, 6, 7]))
            assert "blocks.0.attention.z" in engine.names()
    np.testing.assert_array_equal(*logits)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "failing"}, "the strategy 'failing' failed: ZeroDivisionError: nothing here"),
        ({"logits_processor": "failing"}, "the logits processor 'failing' failed: ZeroDivisionError: nothing here"),
        (
            {"potential": "failing", "num_particles": 2, "do_sample": True, "max_new_tokens": 3},
            "the potential 'failing' failed: StopIteration: nothing here",
        ),
    ],
    ids=["strategy", "processor", "potential"],
)
def test_an_error_of_a_plug_in_has_its_name_and_ends_its_request_alone(
    engine: Engine, fields: dict[str, Any], message: str
) -> None:
    plain = engine.generate("Monday,", max_new_tokens=6)
    failing, other = engine.add(PROMPT, **fields), engine.add("Monday,", max_new_tokens=6)
    tokens, errors = [], []
    while engine.busy:
        for event in engine.step():
            tokens += event.token_ids if event.request_id == other else ()
            errors += [event] if event.error is not None else []
    assert tokens == plain.token_ids
    [event] = errors
    assert event.request_id == failing
    assert isinstance(event.error, PluginError)
    assert str(event.error) == message


@pytest.mark.longer
@pytest.mark.usefixtures("installed")
def test_an_error_of_a_family_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm_example import family  # type: ignore[import-not-found]

    raw = next(iter(CONFIGS["llama"].values()))
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "example_llama"}), encoding="utf-8")
    save_file({name: tensor.load() for name, tensor in tiny_tensors(raw).items()}, tmp_path / "model.safetensors")

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("nothing here")

    for function in ("read_config", "build"):
        with monkeypatch.context() as patch, pytest.raises(PluginError) as error:
            patch.setattr(family, function, fail)
            Engine(tmp_path)
        assert str(error.value) == "the model family 'example_llama' failed: ZeroDivisionError: nothing here"
    monkeypatch.delattr(family, "NAMES")
    with pytest.raises(ParameterError, match="should have read_config, build and NAMES, found none called NAMES"):
        Engine(tmp_path)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "rank"}, "there is no strategy 'rank': those installed: even, failing, missing, ranked"),
        (
            {"strategy": "missing"},
            "the strategy 'missing' of minillm-example 1.0 cannot be imported: ModuleNotFoundError",
        ),
        ({"strategy": "even"}, "the strategy 'even' should be a subclass of Strategy, found"),
        ({"strategy": "ranked", "strategy_options": {"size": 1}}, "strategy 'ranked' refuses {'size': 1}"),
        ({"strategy": "ranked", "strategy_options": {"rank": -1}}, "refuses {'rank': -1}: rank should be at least 0"),
        ({"strategy": "ranked", "strategy_options": 3}, "expected a dict of options by name"),
        ({"strategy": "ranked", "strategy_options": {"rank": {}}}, "is not hashable"),
        ({"strategy_options": {"rank": 1}}, "has no effect without strategy"),
        ({"strategy": "ranked", "num_beams": 2}, "each select a strategy"),
        (
            {"strategy": "ranked", "num_return_sequences": 2},
            "num_return_sequences has no effect on the strategy 'ranked': leave one of them",
        ),
        ({"strategy": "ranked", "guided_regex": "a+"}, "guided_regex has no effect on the strategy 'ranked'"),
        (
            {"strategy": "ranked", "logprobs": True},
            "logprobs has no effect on the strategy 'ranked': leave one of them",
        ),
        ({"strategy": "ranked", "do_sample": True}, "do_sample has no effect on the strategy 'ranked'"),
        ({"strategy": "ranked", "logits_processor": "even"}, "logits_processor has no effect on the strategy 'ranked'"),
        ({"logits_processor": "odd"}, "there is no logits processor 'odd': those installed: even, failing"),
    ],
)
def test_a_mistake_is_named(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        engine.generate(PROMPT, **fields)
    assert message in str(error.value)


def test_without_the_package_its_names_are_unknown(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="there is no strategy 'ranked': no installed package has a strategy"):
        engine.generate(PROMPT, strategy="ranked")
    (tmp_path / "config.json").write_text('{"model_type": "example_llama"}', encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="model_type is 'example_llama'"):
        Engine(tmp_path)


@pytest.mark.longer
@pytest.mark.usefixtures("installed")
def test_the_command_line_lists_and_runs_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["strategies"]) == 0
    said = capsys.readouterr().out
    assert "minillm_example.ranked:Ranked (minillm-example 1.0)" in said
    assert "BeamSearch" in said
    assert run(["strategies", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["plugins"]["minillm.models"]] == ["example_llama"]
    options = ["--strategy", "ranked", "--strategy-options", "rank=1", "--max-new-tokens", "3"]
    assert run(["generate", "--prompt", PROMPT, *options]) == 0
    second = capsys.readouterr().out
    assert run(["generate", "--prompt", PROMPT, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out != second


@pytest.mark.longer
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_requests_name_the_logits_processors_that_the_server_allows(path: str) -> None:
    pytest.importorskip("starlette", reason="needs the extra `serve`")
    from minillm.server import Limits, make_app

    from .server.client import TEMPLATE, error_of, post, talk

    with Engine(max_batch_size=2) as engine:
        engine.chat_template = TEMPLATE
        text = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
        body = text | {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        app = make_app(engine, limits=Limits(logits_processors=("even",)))
        kinds = ({}, {"logits_processors": ["even"]}, {"logits_processors": "even"})

        async def ask(client: Any) -> list[list[int]]:
            replies = [await client.post(path, json=body | names) for names in kinds]
            return [reply.json()["choices"][0]["token_ids"] for reply in replies]

        free, restricted, also = talk(app, ask)
        assert any(token % 2 for token in free) and restricted == also and len(restricted) == 5
        assert not any(token % 2 for token in restricted)
        error = error_of(post(app, path, body | {"logits_processors": ["even", "odd"]}))
        assert error["message"] == "logits_processors: this server does not allow 'odd': it allows even"
        assert error["param"] == "logits_processors"


@pytest.mark.usefixtures("installed")
def test_a_server_is_not_started_with_a_processor_that_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--logits-processor", "even", "--logits-processor", "odd"]) == 2
    assert "there is no logits processor 'odd'" in capsys.readouterr().err
