"""The flags of generation fields and of the engine's options: each reaches its own, and its help is the field's."""

import inspect
import re
from functools import cache
from typing import Any

import pytest

from minillm import Engine
from minillm.cli.main import build_parser, run
from minillm.cli.options import engine_options, generation_fields
from minillm.decoding.fields import FIELDS
from minillm.engine.options import OPTIONS
from minillm.parallel import Parallel

parser = cache(build_parser)
"""The parser of all commands, which takes 30 ms to build"""

FLAGS: dict[str, dict[str, Any]] = {
    "--max-new-tokens 5": {"max_new_tokens": 5},
    "--min-new-tokens 5": {"min_new_tokens": 5},
    "--decoder-prompt a": {"decoder_prompt": "a"},
    "--decoder-start-token-id 5": {"decoder_start_token_id": 5},
    "--stop a --stop b": {"stop_strings": ["a", "b"]},
    "--include-stop": {"include_stop": True},
    "--num-return-sequences 2": {"num_return_sequences": 2},
    "--no-repeat-ngram-size 3": {"no_repeat_ngram_size": 3},
    "--encoder-no-repeat-ngram-size 3": {"encoder_no_repeat_ngram_size": 3},
    "--forced-bos-token-id 5": {"forced_bos_token_id": 5},
    "--suppress-tokens 5 6": {"suppress_tokens": [5, 6]},
    "--begin-suppress-tokens 5 6": {"begin_suppress_tokens": [5, 6]},
    "--forced-eos-token-id 5": {"forced_eos_token_id": [5]},
    "--lora sql": {"lora": "sql"},
    "--no-cache": {"use_cache": False},
    "--sample": {"do_sample": True},
    "--temperature 0.5": {"temperature": 0.5, "do_sample": True},
    "--top-k 5": {"top_k": 5, "do_sample": True},
    "--top-p 0.5": {"top_p": 0.5, "do_sample": True},
    "--min-p 0.5": {"min_p": 0.5, "do_sample": True},
    "--seed 5": {"seed": 5, "do_sample": True},
    "--typical-p 0.5": {"typical_p": 0.5, "do_sample": True},
    "--epsilon-cutoff 0.5": {"epsilon_cutoff": 0.5, "do_sample": True},
    "--eta-cutoff 0.5": {"eta_cutoff": 0.5, "do_sample": True},
    "--top-h 0.5": {"top_h": 0.5, "do_sample": True},
    "--top-n-sigma 2": {"top_n_sigma": 2.0, "do_sample": True},
    "--mirostat 2": {"mirostat": 2, "do_sample": True},
    "--mirostat-tau 4": {"mirostat_tau": 4.0, "do_sample": True},
    "--mirostat-eta 0.2": {"mirostat_eta": 0.2, "do_sample": True},
    "--num-particles 4 --potential a": {"num_particles": 4, "potential": "a", "do_sample": True},
    "--ess-threshold 0.25": {"ess_threshold": 0.25},
    "--repetition-penalty 1.5": {"repetition_penalty": 1.5},
    "--encoder-repetition-penalty 1.5": {"encoder_repetition_penalty": 1.5},
    "--presence-penalty 1.5": {"presence_penalty": 1.5},
    "--frequency-penalty -1.5": {"frequency_penalty": -1.5},
    "--watermarking-config bias=2 context_width=3": {"watermarking_config": ["bias=2", "context_width=3"]},
    "--max-thinking-tokens 5": {"max_thinking_tokens": 5},
    "--thinking-tokens <t> </t>": {"thinking_tokens": ["<t>", "</t>"]},
    "--xtc-probability 0.5": {"xtc_probability": 0.5, "do_sample": True},
    "--xtc-threshold 0.2": {"xtc_threshold": 0.2, "do_sample": True},
    "--samplers top_k;temperature": {"samplers": "top_k;temperature", "do_sample": True},
    "--dry-multiplier 0.8": {"dry_multiplier": 0.8},
    "--dry-base 2": {"dry_base": 2.0},
    "--dry-allowed-length 3": {"dry_allowed_length": 3},
    "--dry-penalty-last-n 64": {"dry_penalty_last_n": 64},
    "--dry-sequence-breaker a --dry-sequence-breaker b": {"dry_sequence_breakers": ["a", "b"]},
    "--strategy a": {"strategy": "a"},
    "--strategy a --strategy-options b=1 c=d": {"strategy": "a", "strategy_options": ["b=1", "c=d"]},
    "--logits-processor a --logits-processor b": {"logits_processor": ["a", "b"]},
    "--num-beams 4": {"num_beams": 4},
    "--length-penalty -2": {"length_penalty": -2.0},
    "--early-stopping yes": {"early_stopping": True},
    "--early-stopping no": {"early_stopping": False},
    "--early-stopping never": {"early_stopping": "never"},
    "--num-beam-groups 2": {"num_beam_groups": 2},
    "--diversity-penalty 0.5": {"diversity_penalty": 0.5},
    "--force-words a --force-words b": {"force_words": ["a", "b"]},
    "--guidance-scale 1.5": {"guidance_scale": 1.5},
    "--negative-prompt a": {"negative_prompt": "a"},
    "--dola-layers low": {"dola_layers": "low"},
    "--penalty-alpha 0.5": {"penalty_alpha": 0.5},
    "--penalty-alpha 0.5 --top-k 5": {"penalty_alpha": 0.5, "top_k": 5},
    "--contrastive-alpha 0.5": {"contrastive_alpha": 0.5},
    "--amateur-temperature 0.5": {"amateur_temperature": 0.5},
    "--guided-json {}": {"guided_json": "{}"},
    "--guided-regex a*": {"guided_regex": "a*"},
    "--guided-grammar FILE": {"guided_grammar": "start: A"},
    "--guided-json FILE": {"guided_json": "start: A"},
    "--guided-choice a --guided-choice b": {"guided_choice": ["a", "b"]},
    "--num-assistant-tokens 4": {"num_assistant_tokens": 4},
    "--prompt-lookup-num-tokens 4": {"prompt_lookup_num_tokens": 4},
    "--max-matching-ngram-size 4": {"max_matching_ngram_size": 4},
    "--lookahead-window 4": {"lookahead_window": 4},
    "--lookahead-ngram-size 4": {"lookahead_ngram_size": 4},
    "--lookahead-guesses 4": {"lookahead_guesses": 4},
    "--echo": {"echo": True},
    "--keep-special-tokens": {"skip_special_tokens": False},
    "--logprobs": {"logprobs": True},
    "--top-logprobs 4": {"top_logprobs": 4},
}


@pytest.mark.parametrize("words", FLAGS)
def test_a_flag_reaches_its_field(words, tmp_path):
    file = tmp_path / "file"
    file.write_text("start: A\n")
    arguments = [str(file) if word == "FILE" else word for word in words.split()]
    assert generation_fields(parser().parse_args(["generate", *arguments])) == FLAGS[words]


@pytest.mark.longer
def test_every_declared_flag_is_tried_and_none_sets_what_was_not_asked_for():
    declared = {setting.flag.split()[0] for setting in FIELDS.values() if setting.flag}
    assert declared == {word for words in FLAGS for word in words.split() if word.startswith("--")}
    assert generation_fields(parser().parse_args(["generate"])) == {}
    assert generation_fields(parser().parse_args(["chat"])) == {}
    assert generation_fields(parser().parse_args(["generate", "--temperature", "0"])) == {"do_sample": False}


def test_help_explains_each_flag_as_its_field(capsys):
    helps = {}
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            run(["generate", option])
        helps[option] = " ".join(capsys.readouterr().out.split())
    assert " PROMPT the prompt, in quotes " in helps["--help"]
    for setting in FIELDS.values():
        if setting.flag:
            line = f" {setting.flag} {setting.help}"
            assert line in helps["--help-all"]
            assert (line in helps["--help"]) == setting.common


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--early-stopping soon", "expected yes, no or never, found 'soon'"),
        ("--top-k many", "argument --top-k: expected a whole number, found 'many'"),
        ("--temp hot", "--temperature: expected a number, found 'hot'"),
        ("--temperature", "expected one argument"),
        ("--no-cache a b", "b is not an argument of this command: put a text of several words in quotes"),
        ("--max-tokns 3", "--max-tokns is not an argument of this command: did you mean --max-tokens?"),
        ("--max-tok 3", "--max-tok is not an argument of this command: did you mean --max-tokens?"),
        ("--temper 1", "--temper is not an argument of this command: did you mean --temperature?"),
        ("--stop-strings x", "--stop-strings is not an argument of this command: did you mean --stop?"),
        ("--num-predict 3", "--num-predict is not an argument of this command: did you mean --max-new-tokens?"),
        ("--zzz", "--zzz is not an argument of this command: --help lists the options"),
        ("a --prompt b --prompt-file c", "not allowed with argument"),
    ],
)
def test_what_is_wrong_is_one_line_and_then_the_usage(words, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        run(["generate", *words.split()])
    assert stop.value.code == 2
    error, usage = capsys.readouterr().err.splitlines()
    assert error.startswith("minillm generate: ") and expected in error
    assert usage == "usage: minillm generate [options] [PROMPT]"


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("nothing", "minillm [options] COMMAND"),
        ("embed", "minillm embed [options] [TEXT] -m MODEL"),
        ("serve --port x", "minillm serve [options]"),
        ("batch", "minillm batch [options] IN.jsonl OUT.jsonl"),
        ("quantize", "minillm quantize [options] SRC DST --dtype DTYPE"),
        ("bench --zzz", "minillm bench [options] [NAME ...]"),
    ],
)
def test_the_usage_is_a_line_that_says_what_is_required(words, usage, capsys):
    with pytest.raises(SystemExit):
        run(words.split())
    assert capsys.readouterr().err.splitlines()[1:] == [f"usage: {usage}"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run model", "minillm: 'run': did you mean chat?"),
        ("ls", "minillm: 'ls': did you mean models?"),
        ("help", "minillm: 'help': did you mean --help?"),
        ("-p Hi", "minillm: -p: a command comes first, as in: minillm generate -p ..."),
        (
            "--temperature 0 Hi",
            "minillm: --temperature: a command comes first, as in: minillm generate --temperature ...",
        ),
        ("chat hello", "minillm chat: hello is not an argument of this command: --help lists the options"),
        ("perplexity hello", "minillm perplexity: hello is not an argument of this command: --help lists the options"),
    ],
)
def test_words_of_other_programs_are_answered_with_ours(words, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        run(words.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[0] == expected


def test_a_misspelt_command_is_told_the_nearest_and_none_shows_the_help(capsys):
    with pytest.raises(SystemExit) as stop:
        run(["genrate"])
    assert stop.value.code == 2
    assert "'genrate': did you mean generate?" in capsys.readouterr().err
    assert run([]) == 0
    shown = capsys.readouterr()
    assert "generate" in shown.out and shown.out.startswith("usage: minillm") and shown.err == ""
    assert 'minillm generate "A list of colors: red,"' in " ".join(shown.out.split())


@pytest.mark.parametrize(
    ("other", "ours"),
    [
        ("-n 3", "--max-new-tokens 3"),
        ("--max-tokens 3", "--max-new-tokens 3"),
        ("--temp 0.5", "--temperature 0.5"),
        ("-p red", "--prompt red"),
        ("-m folder", "--model folder"),
        ("-t 1", "--threads 1"),
        ("--temperature 0 --seed 3", "--temperature 0"),
    ],
)
def test_names_that_other_programs_have_are_ours_too(other, ours):
    one, same = (parser().parse_args(["generate", *words.split()]) for words in (other, ours))
    assert generation_fields(one) == generation_fields(same)
    names = ("prompt", "model", "threads")
    assert [getattr(one, name) for name in names] == [getattr(same, name) for name in names]


ENGINE_FLAGS: dict[str, dict[str, Any]] = {
    "--revision a": {"revision": "a"},
    "--tokenizer a": {"tokenizer": "a"},
    "--draft a": {"draft": "a"},
    "--amateur a": {"amateur": "a"},
    "--adapter a": {"adapter": "a"},
    "--adapters a=b c=d": {"adapters": {"a": "b", "c": "d"}},
    "--no-prefix-cache": {"prefix_cache": False},
    "--dtype int8": {"dtype": "int8"},
    "--device cuda": {"device": "cuda"},
    "--backend numpy": {"backend": "numpy"},
    "--cache-dtype int8": {"cache_dtype": "int8"},
    "--compute-dtype bfloat16": {"compute_dtype": "bfloat16"},
    "--threads 2": {"threads": 2},
    "--deterministic": {"deterministic": True},
    "--max-batch-size 3": {"max_batch_size": 3},
    "--max-batched-tokens 64": {"max_batched_tokens": 64},
    "--prefix-store F": {"prefix_store": "F"},
    "--prefix-store-bytes 9": {"prefix_store_bytes": 9},
    "--cache-bytes 1000": {"cache_bytes": 1000},
    "--tensor-parallel 2": {"parallel": Parallel(tensor=2)},
}


@pytest.mark.parametrize("words", ENGINE_FLAGS)
def test_a_flag_reaches_its_option_of_the_engine(words: str) -> None:
    args = build_parser("serve").parse_args(["serve", *words.split()])
    assert engine_options(args) == {"max_batch_size": 32, "cache_dtype": "weights"} | ENGINE_FLAGS[words]


def test_every_option_of_the_engine_with_a_flag_is_tried_and_documented() -> None:
    flags = {option.flag.partition(" ")[0]: name for name, option in OPTIONS.items() if option.flag is not None}
    tried = {words.split()[0]: name for words, options in ENGINE_FLAGS.items() for name in options}
    assert tried == flags | {"--tensor-parallel": "parallel"}
    entries = re.findall(r"^ {4}(\w+): ", inspect.getdoc(Engine.__init__) or "", re.MULTILINE)
    assert entries[:-4] == ["model", *OPTIONS]
    assert entries[-4:] == ["ModelError", "RankError", "DeviceError", "ParameterError"]


def test_a_batch_of_no_sequences_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--backend", "numpy", "--port", "0", "--max-batch-size", "0"]) == 2
    assert "max_batch_size should be a whole number of at least 1, found 0" in capsys.readouterr().err
