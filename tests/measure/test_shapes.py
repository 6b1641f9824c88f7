"""The table of a pass: shapes by arithmetic, sums as in closed form, on models of several kinds."""

import json

import pytest

from minillm import Engine
from minillm.cli.main import run
from minillm.errors import ParameterError
from minillm.measure.accounting import Part, Step, operations
from minillm.measure.shapes import pass_of, pass_table

from ..families import CONFIGS, has_experts
from ..tiny import model_of, runner_of

PROMPT = "A list of colors: red,"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize(("phase", "T", "S"), [("prefill", 8, 8), ("decode", 1, 9)])
def test_shapes_and_flops_are_those_of_the_lectures_formulas(engine: Engine, phase: str, T: int, S: int) -> None:
    table = pass_table(engine, PROMPT, phase)
    rows = {operation.name: operation for operation in table.operations}
    config = engine.config
    E, H, L, F, V = config.hidden_size, config.num_heads, config.num_layers, 4 * config.hidden_size, config.vocab_size
    assert (table.tokens, table.context) == (T, S)
    assert rows["attention.qkv"].inputs["x"] == (T, E)
    assert (rows["attention.qkv"].weight, rows["attention.qkv"].output) == ((3 * E, E), ((T, 3 * E),))
    assert rows["attention.qkv"].flops == L * T * (2 * E * 3 * E + 3 * E)  # products, and the bias
    assert rows["attend"].inputs == {"q": (T, H, E // H), "keys": (S, H, E // H), "values": (S, H, E // H)}
    assert rows["attend"].output == ((T, H, E // H),)
    assert (rows["mlp.up"].weight, rows["mlp.up"].output) == ((F, E), ((T, F),))
    assert rows["mlp.down"].bytes_read >= L * F * E * 2  # float16
    assert (rows["head.weight"].inputs["x"], rows["head.weight"].output) == ((1, E), ((1, V),))
    assert rows["mlp.up"].layers == tuple(range(L)) and rows["head.weight"].layers == ()


@pytest.mark.parametrize("family", ["opt", "llama", "gemma3_text", "deepseek_v2", "qwen3_next"])
def test_the_sums_are_those_of_the_same_pass_on_shapes(family: str) -> None:
    raw = next(iter(CONFIGS[family].values()))
    runner = runner_of(model_of(raw))
    for phase, part in (("prefill", Part(7, 7)), ("decode", Part(1, 8))):
        table = pass_of(runner, [3, 9, 4, 11, 5, 6, 8], phase)
        rows = operations(runner.model.config, Step((part,), 1))
        assert table.flops == sum(row.flops for row in rows)
        if not has_experts(raw):  # on shapes the number of experts that are read is an expected one
            assert table.bytes == sum(row.bytes for row in rows)
        assert sum(operation.times for operation in table.operations) == len(rows)


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str], engine: Engine) -> None:
    table = pass_table(engine, PROMPT, "decode")
    assert run(["shapes", "--prompt", PROMPT, "--phase", "decode"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("decode: 1 token at context 9\n")
    [row] = [line.split() for line in printed.splitlines() if line.startswith("attend")]
    assert row[-3:] == ["43,920", "87,552", "4,608"]
    assert run(["shapes", "--prompt", PROMPT, "--phase", "decode", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["flops"] == table.flops
    assert [operation["name"] for operation in data["operations"]] == [row.name for row in table.operations]
    assert "<td>attention.qkv</td>" in table._repr_html_()


def test_another_phase_is_refused(engine: Engine) -> None:
    with pytest.raises(ParameterError, match="phase should be 'prefill' or 'decode', found 'naive'"):
        pass_table(engine, PROMPT, "naive")  # type: ignore[arg-type]
