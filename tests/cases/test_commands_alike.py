"""Commands that take a prompt and a model take what `generate` takes, and say what their ids stand for."""

import argparse
import json
from typing import Any

import pytest

from minillm import Engine
from minillm.cli.main import build_parser, run
from minillm.decoding.fields import FIELDS
from minillm.engine.inspect import next_tokens
from minillm.engine.loading import DEMO_MODEL
from minillm.measure.comparison import STRATEGIES, compare

PROMPTS = ["A list of colors: red,", "Once upon"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(max_batch_size=4)


def options(command: str, *groups: str) -> dict[str, argparse.Action]:
    """The options in some groups of a command's help, by their names."""
    [commands] = [a for a in build_parser(command)._actions if isinstance(a, argparse._SubParsersAction)]
    parser = commands.choices[command]
    return {
        name: action
        for group in parser._action_groups
        if group.title in groups
        for action in group._group_actions
        for name in action.option_strings or ["PROMPT"]
    }


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run([*words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["compare", "inspect"])
def test_a_command_that_runs_a_model_takes_every_option_of_prompt_and_model(command: str) -> None:
    groups = ("prompt", "model")
    assert options(command, *groups).keys() == options("generate", *groups).keys()


def test_tokenize_takes_every_option_of_a_prompt_and_those_of_a_model_that_name_a_tokenizer() -> None:
    assert options("tokenize", "prompt").keys() == options("generate", "prompt").keys()
    expected = {"-m", "--model", "--revision", "--tokenizer"}
    assert options("tokenize", "model").keys() == expected & options("generate", "model").keys() == expected


def test_compare_takes_every_field_that_no_strategy_sets() -> None:
    taken = {action.dest for action in options("compare", "text", "sampling").values()}
    chosen = {name for variant in STRATEGIES for name in variant.fields}
    for name, action in options("generate", "text", "sampling").items():
        setting = FIELDS.get(action.dest)
        free = setting is not None and (setting.needs in (None, "encoder", "stop_strings") or action.dest == "seed")
        expected = free and action.dest not in chosen | {"num_return_sequences", "use_cache"}
        assert (action.dest in taken) == expected, name


@pytest.mark.slow
def test_the_fields_of_compare_reach_every_strategy(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 6, "presence_penalty": 9.0, "stop_strings": ["green"]}
    words = ["-n", "6", "--presence-penalty", "9", "--stop", "green", "--seed", "3"]
    answer = json.loads(printed(capsys, "compare", "-p", PROMPTS[0], *words, "--json"))
    expected = compare(engine, PROMPTS[0], seed=3, **fields)
    assert answer["prompt"] == PROMPTS[0]
    assert [result["text"] for result in answer["results"]] == [outcome.text for outcome in expected]
    for result in answer["results"]:
        assert "".join(result["tokens"]).startswith(result["text"])
        assert len(result["tokens"]) == len(result["token_ids"]) <= 6


@pytest.mark.longer
def test_every_json_with_ids_has_their_texts(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, [prompt, _] = engine.tokenizer, PROMPTS
    assert tokenizer is not None
    ids = tokenizer.encode(prompt)

    def texts(token_ids: list[int]) -> list[str]:
        return [tokenizer.token(token) for token in token_ids]

    answer = json.loads(printed(capsys, "generate", prompt, "-n", "5", "--json", "--top-logprobs", "2", "--echo"))
    assert (answer["prompt_token_ids"], answer["prompt_tokens"]) == (ids, texts(ids))
    [completion] = answer["completions"]
    assert completion["tokens"] == texts(completion["token_ids"])
    for tops, shown in (
        (completion["top_logprobs"], completion["top_tokens"]),
        (answer["prompt_top_logprobs"], answer["prompt_top_tokens"]),
    ):
        assert shown == [top and texts([token for token, _ in top]) for top in tops] and any(shown)
    answer = json.loads(printed(capsys, "tokenize", prompt, "--json"))
    assert answer == {"prompt": prompt, "token_ids": ids, "tokens": texts(ids)}
    answer = json.loads(printed(capsys, "inspect", prompt, "--json", "--top", "2"))
    for place, expected in zip(answer["positions"], next_tokens(engine.runner, ids, 2), strict=True):
        assert (place["token_id"], place["token"]) == (expected.token_id, tokenizer.token(expected.token_id))
        assert [each["token_id"] for each in place["next"]] == [token for token, _ in expected.next]
        assert [each["token"] for each in place["next"]] == texts([token for token, _ in expected.next])


@pytest.mark.parametrize(
    "words",
    [["tokenize"], ["inspect", "--top", "1"], pytest.param(["compare", "-n", "1"], marks=pytest.mark.slow)],
    ids=lambda w: w[0],
)
def test_results_of_several_prompts_stand_under_their_titles(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    both = printed(capsys, *words, "-p", PROMPTS[0], "-p", PROMPTS[1])
    titles = [line for line in both.splitlines() if " of 2: " in line]
    assert titles == [f'{n} of 2: "{prompt}"' for n, prompt in enumerate(PROMPTS, 1)]
    if words[0] != "compare":  # whose seconds differ
        parts = [printed(capsys, *words, "-p", prompt) for prompt in PROMPTS]
        assert both == f"{titles[0]}\n{parts[0]}\n{titles[1]}\n{parts[1]}"


def test_tokenize_reads_a_model_or_the_tokenizer_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    outs = [printed(capsys, "tokenize", "a b", flag, str(DEMO_MODEL)) for flag in ("-m", "--model", "--tokenizer")]
    assert len(set(outs)) == 1
    assert run(["tokenize", "a", "--json", "--ids"]) == 2
