"""lm-eval on an engine in the same process: against its own model of transformers, and against the engine's calls."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm import Engine
from minillm.engine.loading import DEMO_MODEL as MODEL
from minillm.errors import ParameterError, PromptError, TaskError
from minillm.text.chat import ChatTemplate

from . import lm_eval_tasks as tasks
from .seq2seq import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra eval")
HELD_OUT = (MODEL / "held_out.txt").read_text(encoding="utf-8")
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:{% if shout %} LOUD{% endif %}"
)
TEXTS = [HELD_OUT[:700], HELD_OUT[900:1000], "A"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32", max_batch_size=8) as engine:
        yield engine


@pytest.fixture
def model(engine: Engine) -> Any:
    from minillm.lm_eval import MinillmLM

    return MinillmLM(engine)


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_without_lm_eval_a_line_says_what_to_install() -> None:
    block = "import runpy, sys; sys.modules['lm_eval'] = None; "
    command = block + "runpy.run_module('minillm.lm_eval', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert (
        done.returncode == 1 and line.startswith("minillm.lm_eval needs lm-eval 0.4.13 or newer") and "[eval]" in line
    )
    imported = subprocess.run([sys.executable, "-c", block + "import minillm.lm_eval"], capture_output=True, text=True)
    assert imported.stderr.splitlines()[-1] == f"ImportError: {line}"


@needs_lm_eval
@pytest.mark.reference
def test_every_figure_is_that_of_lm_eval_s_own_model(engine: Engine, model: Any, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    own = HFLM(pretrained=str(MODEL), dtype="float32", device="cpu", batch_size=4, max_length=96)
    model.max_length = 96
    chosen = [
        tasks.sums(tmp_path, do_sample=False, top_p=0.9),
        tasks.capitals(tmp_path) | {"num_fewshot": 2, "fewshot_split": "test"},
        tasks.pages(tmp_path, TEXTS),
    ]
    with tasks.offline(tmp_path):
        mine, expected = tasks.evaluated(model, chosen), tasks.evaluated(own, chosen)
    assert tasks.figures(mine) == pytest.approx(tasks.figures(expected), rel=1e-4)
    assert len(tasks.figures(mine)) == 6
    for name in ("sums", "capitals"):
        pairs = zip(mine["samples"][name], expected["samples"][name], strict=True)
        for sample, other in pairs:
            assert sample["arguments"] == other["arguments"]
            if name == "sums":
                assert sample["resps"] == other["resps"]
            else:
                answers, others = (row["filtered_resps"] for row in (sample, other))
                assert [greedy for _, greedy in answers] == [greedy for _, greedy in others]
                assert [value for value, _ in answers] == pytest.approx([value for value, _ in others], abs=1e-4)


@needs_lm_eval
@pytest.mark.slow
def test_texts_are_scored_in_windows(engine: Engine, model: Any) -> None:
    model.max_length = 20
    [total, short, one] = model.loglikelihood_rolling([asked(text) for text in TEXTS], disable_tqdm=True)
    for text, value in zip(TEXTS, (total, short, one), strict=True):
        ids = [model.prefix_token_id, *engine.tokenizer.encode(text)]
        expected = 0.0
        for first in range(1, len(ids), 20):  # the last window has a context as long as it can be
            stop = min(first + 20, len(ids))
            scores = (
                engine.score(ids[max(0, stop - 21) : stop])
                if stop - first < 20
                else engine.score(ids[first - 1 : stop])
            )
            expected += math.fsum(scores.logprobs[first - stop :])
        assert value == pytest.approx(expected, abs=1e-3)


@needs_lm_eval
@pytest.mark.slow
def test_contexts_are_cut_on_the_left_and_may_be_empty(engine: Engine, model: Any) -> None:
    model.max_length = 12
    pairs = [(TEXTS[0], " orange"), ("", "A list"), ("A list of colors: red,", " orange"), ("A list of  ", "colors")]
    for (context, continuation), (value, greedy) in zip(
        pairs, model.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True), strict=True
    ):
        if not context:
            ids, n = [model.prefix_token_id, *engine.tokenizer.encode(continuation, add_special_tokens=False)], 2
        else:
            whole = engine.tokenizer.encode(context + continuation)
            n = len(whole) - len(engine.tokenizer.encode(context.rstrip()))
            ids = whole[-13:]
        assert value == pytest.approx(math.fsum(engine.score(ids).logprobs[-n:]), abs=1e-4)
        likeliest = engine.generate(ids[:-n], max_new_tokens=n, eos_token_id=[]).token_ids
        assert greedy == (likeliest == ids[-n:])
    with pytest.raises(PromptError, match="more than max_length=12"):
        model.loglikelihood([asked("A", TEXTS[0])], disable_tqdm=True)


@needs_lm_eval
@pytest.mark.slow
def test_a_stop_string_is_no_part_of_the_prompt(engine: Engine, model: Any) -> None:
    prompt = "A list of colors: red, orange"
    plain = engine.generate(prompt, max_new_tokens=8).text
    assert plain.startswith(",") and plain.count(",") > 1
    texts = model.generate_until(
        [
            asked(prompt, {"until": ["orange,"], "max_gen_toks": 8}),  # it begins in the prompt
            asked(prompt, {"until": plain[2:6], "max_gen_toks": 8}),
            asked(prompt, {"until": ["never"], "max_gen_toks": 8, "do_sample": True, "temperature": 5.0, "seed": 3}),
            asked(prompt, {"until": ["never"], "max_gen_toks": 8, "do_sample": True, "temperature": 5.0, "seed": 3}),
            asked(prompt, {"until": ["never"], "max_gen_toks": 8, "num_beams": 2}),
        ]
    )
    assert texts[:2] == [plain, plain[:2]] and texts[2] != texts[3]
    assert texts[4] == engine.generate(prompt, max_new_tokens=8, num_beams=2).text
    [cut] = model.generate_until([asked(HELD_OUT, {"max_gen_toks": 3})])
    ids = engine.tokenizer.encode(HELD_OUT)[-(engine.context - 3) :]
    assert cut == engine.generate(ids, max_new_tokens=3).text
    with pytest.raises(ParameterError, match="max_gen_toks should be less than max_length, 512, found 600"):
        model.generate_until([asked(prompt, {"max_gen_toks": 600})])
    with pytest.raises(ParameterError, match="unknown generation field 'top'"):
        model.generate_until([asked(prompt, {"top": 3})])


@needs_lm_eval
@pytest.mark.slow
def test_conversations_are_written_by_the_template(engine: Engine, tmp_path: Path) -> None:
    from minillm.lm_eval import MinillmLM

    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(PromptError, match="no chat template"):
        MinillmLM(engine).apply_chat_template(history)
    with Engine() as chatting:
        chatting.chat_template = TEMPLATE
        model = MinillmLM(chatting, chat_template_kwargs={"shout": True})
        assert model.apply_chat_template(history) == "system: Be brief.\nuser: Hi\nassistant: LOUD"
        assert model.chat_template(True) == TEMPLATE.source and model.chat_template(False) is None
        with tasks.offline(tmp_path):
            results = tasks.evaluated(model, [tasks.sums(tmp_path, 2)], apply_chat_template=True)
        sample = results["samples"]["sums"][0]
        assert sample["arguments"][0][0] == "user: What is 2 plus 1?\nassistant: LOUD"


@needs_lm_eval
@pytest.mark.slow
def test_what_is_scored_is_kept_in_lm_eval_s_cache(model: Any, tmp_path: Path) -> None:
    with tasks.offline(tmp_path):
        chosen = [tasks.sums(tmp_path, 2), tasks.capitals(tmp_path), tasks.pages(tmp_path, TEXTS)]
        first = tasks.evaluated(model, chosen, use_cache=str(tmp_path / "answers"))
        model.loglikelihood = model.loglikelihood_rolling = model.generate_until = None  # nothing is computed
        again = tasks.evaluated(model, chosen, use_cache=str(tmp_path / "answers"))
    assert tasks.figures(again) == tasks.figures(first)


@needs_lm_eval
@pytest.mark.slow
def test_mistakes_are_named(engine: Engine, tmp_path: Path) -> None:
    from minillm.lm_eval import MinillmLM

    with pytest.raises(ParameterError, match="device is an argument of Engine, and there is an engine"):
        MinillmLM(engine, device="cpu")
    with pytest.raises(ParameterError, match="max_length should be a whole number from 2 to 512, found 513"):
        MinillmLM(engine, max_length=513)
    with pytest.raises(ParameterError, match="batch_size should be a whole number or \"auto\", found 'auto:4'"):
        MinillmLM(batch_size="auto:4")
    with pytest.raises(ParameterError, match="leave out pretrained"):
        MinillmLM(engine, pretrained="x")
    with pytest.raises(TaskError, match="models without an encoder"):
        MinillmLM(write_checkpoint(tmp_path / "t5", "t5"))
    with pytest.raises(PromptError, match="no tokenizer"):
        MinillmLM(Engine.random("pythia-70m", max_batch_size=1, cache_bytes=2**22))


@needs_lm_eval
@pytest.mark.slow
def test_the_command_is_lm_eval_s_with_one_model_more(engine: Engine, model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "capitals.yaml").write_text(json.dumps(tasks.capitals(tmp_path)), encoding="utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "minillm.lm_eval", "run", "--model", "minillm", "--include_path", str(folder)]
    command += ["--tasks", "capitals", "--output_path", str(tmp_path / "out"), "--batch_size", "8", "--model_args"]
    with tasks.offline(tmp_path):
        done = subprocess.run([*command, f"model={MODEL},dtype=float32"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [path] = (tmp_path / "out").rglob("results*.json")
        expected = tasks.figures(tasks.evaluated(model, [tasks.capitals(tmp_path)]))
        wrong = subprocess.run([*command, "model=nowhere/at/all"], capture_output=True, text=True)
    results = json.loads(path.read_text(encoding="utf-8"))
    figures = tasks.figures(results)  # with standard errors too
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert results["config"]["model_num_parameters"] == engine.summary()["parameters"]
    assert wrong.returncode == 1 and "Traceback" not in wrong.stderr
    assert wrong.stderr.splitlines()[-1].startswith("minillm.lm_eval: there is no folder 'nowhere/at/all'")
