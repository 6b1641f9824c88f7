"""minillm generate: what reaches standard output, standard error and the shell."""

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minillm import Engine
from minillm.cli.main import COMMANDS, build_parser, run

from ..adapters import write_adapter
from ..children import DEFAULT_SIGNALS, prepared
from ..tiny import write_checkpoint

PROMPT = "A list of colors: red,"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(max_batch_size=4)


def minillm(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    """The command as a process of its own."""
    return subprocess.run([sys.executable, "-m", "minillm", *arguments], capture_output=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.longer
def test_it_prints_what_the_library_returns(engine, capsys):
    assert run(["generate", "--prompt", PROMPT]) == 0
    assert capsys.readouterr().out == engine.generate(PROMPT).text + "\n"


def test_the_demo_model_goes_on_with_other_colours_and_ends(capsys):
    assert run(["generate", "--prompt", PROMPT, "--max-new-tokens", "60"]) == 0
    colours = [word.strip(" .\n") for word in capsys.readouterr().out.split(",")]
    assert len(colours) >= 3
    assert len(set(colours)) == len(colours)
    assert "red" not in colours
    assert {"orange", "yellow", "green", "blue"} & set(colours)


def test_json_carries_tokens_reason_and_log_probabilities(engine, capsys):
    assert run(["generate", "--prompt", PROMPT, "--json", "--top-logprobs", "2", "--max-new-tokens", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {*result} == {"prompt", "prompt_token_ids", "prompt_tokens", "completions"}
    assert {*result["completions"][0]} == {
        *("text", "token_ids", "tokens", "finish_reason", "logprobs", "top_logprobs", "top_tokens")
    }
    expected = engine.generate(PROMPT, max_new_tokens=3, top_logprobs=2)
    assert result["prompt_token_ids"] == expected.prompt_token_ids
    (completion,) = result["completions"]
    assert completion["token_ids"] == expected.token_ids
    assert completion["finish_reason"] == expected.completions[0].finish_reason
    assert [top[0][1] for top in completion["top_logprobs"]] == pytest.approx(completion["logprobs"], abs=1e-6)


@pytest.mark.longer
def test_an_adapter_is_merged_into_the_model(tmp_path, capsys):
    base, adapter = write_checkpoint(tmp_path / "base"), write_adapter(tmp_path / "adapter")
    command = ["generate", "--model", str(base), "--prompt", PROMPT, "--max-new-tokens", "8", "--backend", "numpy"]
    assert run([*command, "--adapter", str(adapter)]) == 0
    engine = Engine(base, backend="numpy", adapter=adapter)
    assert capsys.readouterr().out == engine.generate(PROMPT, max_new_tokens=8).text + "\n"
    assert run([*command, "--adapters", f"it={adapter}", "--lora", "it"]) == 0
    assert capsys.readouterr().out == engine.generate(PROMPT, max_new_tokens=8).text + "\n"
    assert run([*command, "--adapters", f"it={adapter}", "--lora", "other"]) == 2
    assert "no adapter of this name; expected one of it" in capsys.readouterr().err
    assert run([*command, "--adapters", str(adapter), "--lora", "it"]) == 2
    assert "--adapters expects NAME=PATH" in capsys.readouterr().err
    assert run([*command, "--adapter", str(base)]) == 1
    assert "holds no adapter_config.json" in capsys.readouterr().err


@pytest.mark.longer
def test_several_prompts_run_side_by_side(engine, capsys):
    prompts = [PROMPT, "Count from 3 to 9:"]
    assert run(["generate", "--prompt", prompts[0], "--prompt", prompts[1], "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert [line["completions"][0]["text"] for line in lines] == [engine.generate(p).text for p in prompts]


@pytest.mark.longer
def test_a_sampling_option_turns_sampling_on(capsys):
    results = set()
    for seed in ("1", "2", "3"):
        assert run(["generate", "--prompt", "Once upon a time", "--temperature", "2", "--seed", seed]) == 0
        results.add(capsys.readouterr().out)
    assert len(results) > 1
    assert run(["generate", "--prompt", "Once upon a time", "--temperature", "2", "--seed", seed]) == 0
    assert capsys.readouterr().out in results


@pytest.mark.longer
def test_the_naive_way_prints_the_same(capsys):
    assert run(["generate", "--prompt", PROMPT]) == 0
    cached = capsys.readouterr().out
    assert run(["generate", "--prompt", PROMPT, "--no-cache"]) == 0
    assert capsys.readouterr().out == cached


def test_stats_go_to_standard_error(capsys):
    assert run(["generate", "--prompt", PROMPT, "--stats"]) == 0
    report = capsys.readouterr().err
    assert [line.split()[0] for line in report.splitlines()] == [
        *("load", "prefill", "decode", "first"),
        *("prompts", "pages"),
    ]
    assert "tokens, 0 found in the cache" in report
    assert "tokens/s" in report


INTERRUPTIONS = """
import logging, time, warnings
from minillm import progress, progress_bar
from minillm.cli.main import run
from minillm.engine.loop import StepLoop

advance = StepLoop.advance

def speak(loop):
    progress_bar.BAR_DELAY = 0
    logging.getLogger("minillm").warning("a message after %d steps", loop.stats.steps)
    warnings.warn("a warning")
    with progress.work("compiling", 2, "kernels") as compiling:
        compiling.advance()
    advance(loop)

StepLoop.advance = speak
run(["generate", "A list of colors: red,"])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_nothing_lands_in_the_middle_of_the_text(engine):
    from ..terminal import Terminal

    terminal = Terminal([sys.executable, "-W", "always", "-c", INTERRUPTIONS])
    shown = terminal.read_until("never shown")
    assert terminal.close() == 0
    text, *messages = shown.splitlines()
    assert text == engine.generate(PROMPT).text
    assert messages[0] == "minillm: a message after 0 steps"
    assert re.fullmatch(r"minillm: .*UserWarning: a warning.*", messages[1])
    assert len(messages) > 10 and all(message.startswith("minillm: ") for message in messages)


def test_stop_strings_end_the_text_and_stay_out_of_it(engine, capsys):
    whole = engine.generate(PROMPT).text
    stop = whole.split(",")[1] + ","
    assert run(["generate", "--prompt", PROMPT, "--stop", stop]) == 0
    assert capsys.readouterr().out == whole[: whole.index(stop)] + "\n"


@pytest.mark.longer
def test_beams_and_echo_and_a_prompt_file(engine, capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n", encoding="utf-8")
    assert run(["generate", "--prompt-file", str(file), "--num-beams", "3", "--early-stopping", "yes", "--echo"]) == 0
    expected = engine.generate(PROMPT, num_beams=3, early_stopping=True).text
    assert capsys.readouterr().out == PROMPT + expected + "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--temperature", "-1"], 2, ["temperature", "greedy"]),
        (["--temperature", "0", "--top-k", "5"], 2, ["--temperature 0", "--top-k"]),
        (["--top-p", "1.5"], 2, ["top_p"]),
        (["--num-beams", "2", "--num-return-sequences", "3"], 2, ["num_return_sequences", "num_beams"]),
        (["--include-stop"], 2, ["include_stop", "stop_strings"]),
        (["--logprobs"], 2, ["--json"]),
        (["--backend", "abacus"], 1, ["abacus", "cpu", "numpy"]),
        (["--threads", "0"], 2, ["threads", "0"]),
        (["--dtype", "float31"], 1, ["float31"]),
        (["--device", "abacus"], 1, ["abacus"]),
        (["--revision", "main"], 2, ["revision"]),
        (["--model", "./no-such-folder"], 1, ["no-such-folder"]),
        (["--max-new-tokens", "0"], 2, ["max_new_tokens"]),
        (["red"], 2, ["'red'", "--prompt"]),
        (["--guided-json", "no-such-schema.json"], 2, ["no-such-schema.json"]),
        (["--guided-choice", "a", "--guided-regex", "b"], 2, ["guided_choice", "guided_regex"]),
    ],
)
def test_a_mistake_is_one_clear_line(arguments, code, words, capsys):
    assert run(["generate", "--prompt", PROMPT, *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    for word in words:
        assert word in captured.err


@pytest.mark.slow
def test_guides_from_the_command_line_and_from_files(capsys, tmp_path):
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}', encoding="utf-8")
    grammar.write_text('start: "x" "y"+', encoding="utf-8")
    for arguments, expected in (
        (["--guided-json", str(schema)], r"\[[12],[12]\]"),
        (["--guided-json", '{"const": 5}'], "5"),
        (["--guided-regex", "[0-9]{3}"], "[0-9]{3}"),
        (["--guided-grammar", str(grammar), "--max-new-tokens", "9"], "xy+"),
        (["--guided-choice", "red", "--guided-choice", "blue", "--num-beams", "2"], "red|blue"),
    ):
        assert run(["generate", "--prompt", PROMPT, *arguments]) == 0
        assert re.fullmatch(expected, capsys.readouterr().out.removesuffix("\n"))


@pytest.mark.longer
def test_a_prompt_without_a_flag_and_from_standard_input(engine, capsys, monkeypatch):
    expected = engine.generate(PROMPT, max_new_tokens=6).text + "\n"
    assert run(["generate", PROMPT, "-n", "6"]) == 0
    assert capsys.readouterr().out == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPT}\n".encode())))
    assert run(["generate", "--prompt-file", "-", "-n", "6"]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.longer
@pytest.mark.parametrize(("end", "limit"), [(3, 298), (None, 256)])
def test_without_a_limit_a_text_goes_on_to_its_end_or_the_context(end, limit, tmp_path, capsys, caplog):
    """And nothing is said about a limit that nobody has set; 256 tokens are enough of a text that cannot end."""
    folder = write_checkpoint(tmp_path / "model", seed=2, max_position_embeddings=300, eos_token_id=end)
    assert run(["generate", "--model", str(folder), "ab", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    with Engine(folder) as engine:
        room = min(limit, 300 - len(result["prompt_token_ids"]))
        assert result["completions"][0]["token_ids"] == engine.generate("ab", max_new_tokens=room).token_ids
    assert caplog.records == []


@pytest.mark.longer
def test_a_long_prompt_is_refused_and_a_long_answer_cut(capsys, caplog):
    assert run(["generate", "--prompt", "red, " * 600]) == 2
    assert "512" in capsys.readouterr().err
    assert run(["generate", "--prompt", PROMPT, "--max-new-tokens", "9999", "--json"]) == 0
    assert "512" in caplog.text


@pytest.mark.slow
def test_standard_input_is_a_prompt_too(engine):
    result = minillm("generate", input=PROMPT.encode() + b"\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode() == engine.generate(PROMPT).text + "\n"


@pytest.mark.longer
def test_invalid_utf8_on_standard_input_is_one_line():
    result = minillm("generate", input=b"caf\xe9")
    assert result.returncode == 2
    assert result.stderr.decode().splitlines() == ["minillm: standard input should be UTF-8 text; byte 3 is not"]


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback():
    """`minillm ... | head -c 1`"""
    process = subprocess.Popen(
        [sys.executable, "-m", "minillm", "generate", "--prompt", PROMPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert errors == b""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_ends_cleanly():
    options = ["--prompt", "1,", "--max-new-tokens", "490", "--temperature", "5"]
    process = subprocess.Popen(
        prepared(DEFAULT_SIGNALS, [sys.executable, "-m", "minillm", "generate", *options]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.longer
def test_help_of_every_command_reads_well(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            run([command, "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: minillm {command}")
        assert max(map(len, text.splitlines())) <= max(80, int(os.environ.get("COLUMNS", "80")))


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_is_short_and_the_whole_one_has_every_option(command, capsys):
    helps = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            run([command, option])
        assert stop.value.code == 0
        helps.append(capsys.readouterr().out)
    short, whole = (set(re.findall(r"--[a-z][a-z-]+", text)) for text in helps)
    assert len(helps[0].splitlines()) < 70
    assert {"--model", "--temperature", "--max-new-tokens", "--help-all"} <= short < whole
    [parser] = [a.choices[command] for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert {name for action in parser._actions for name in action.option_strings if name.startswith("--")} <= whole
    headings = re.findall(r"^([a-z]+):$", helps[1], re.M)
    assert [*dict.fromkeys(h for h in headings if h not in ("options", "examples", "conversation", "prompt"))] == [
        *("model", "text", "sampling", "search", "guided", "speculation"),
        *(["output"] if command == "generate" else []),
    ]


def test_a_file_that_is_not_there_is_named(capsys, tmp_path):
    missing: Path = tmp_path / "missing.txt"
    assert run(["generate", "--prompt-file", str(missing)]) == 2
    assert "missing.txt" in capsys.readouterr().err


SERVED = {
    "beams": {"num_beams": 2},
    "groups of beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 5},
    "guidance": {"guidance_scale": 2.0, "num_beams": 2},
    "DoLa": {"dola_layers": "low"},
    "several results": {"num_beams": 3, "num_return_sequences": 2},
    "several samples": {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    "mirostat": {"do_sample": True, "seed": 3, "mirostat": 2, "num_beams": 2},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SERVED)
def test_the_checkpoints_own_settings_are_served(name, capsys, tmp_path):
    """The engine is as wide as they ask, which no option of the command line said."""
    folder = write_checkpoint(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(SERVED[name] | {"max_new_tokens": 5}))
    assert run(["generate", "--model", str(folder), "--prompt", "Hi", "--json"]) == 0
    texts = [one["text"] for one in json.loads(capsys.readouterr().out)["completions"]]
    with Engine(folder, max_batch_size=16) as engine:
        assert texts == [one.text for one in engine.generate("Hi").completions]
    assert run(["generate", "--model", str(folder), "--prompt", "Hi"]) == 0
    assert capsys.readouterr().out == "\n".join(texts) + "\n"


def test_options_win_over_the_checkpoints_settings(monkeypatch, tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4, "max_new_tokens": 2}))
    widths = []
    monkeypatch.setattr(
        Engine, "__init__", lambda self, *_, max_batch_size, **__: (widths.append(max_batch_size), exit(3))[0]
    )
    for options in ([], ["--num-beams", "2"], ["--num-beams", "1"], ["--top-k", "5", "--penalty-alpha", "0.5"]):
        with pytest.raises(SystemExit):
            run(["generate", "--model", str(folder), "--prompt", "Hi", *options])
    assert widths == [4, 2, 1, 5]


def test_settings_of_the_checkpoint_that_cannot_be_are_one_line(capsys, tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    for beams in (10**12, -1, "two", 10**400):
        (folder / "generation_config.json").write_text(json.dumps({"num_beams": beams}))
        assert run(["generate", "--model", str(folder), "--prompt", "Hi"]) in (1, 2)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
