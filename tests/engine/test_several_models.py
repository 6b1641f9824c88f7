"""An engine with a draft or an amateur model."""

from pathlib import Path

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.numpy import NumpyBackend
from minillm.cli.main import run
from minillm.engine.loading import affordable_pages
from minillm.errors import ParameterError

from ..tiny import tiny_model, write_checkpoint

PROMPTS = ["Hello", "one two three four", [5, 6, 7, 5, 6]]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def loosen(tensors: dict[str, np.ndarray]) -> None:
        table = tensors["embed_tokens.weight"]
        table += 0.02 * np.random.default_rng(0).standard_normal(table.shape, np.float32)

    return write_checkpoint(tmp_path_factory.mktemp("other"), seed=2, change=loosen)


@pytest.mark.longer
def test_a_draft_changes_the_steps_and_not_the_tokens(checkpoint: Path, other: Path) -> None:
    with Engine(checkpoint) as plain, Engine(checkpoint, draft=other) as engine:
        expected = plain.generate(PROMPTS, max_new_tokens=30)
        assert [g.token_ids for g in engine.generate(PROMPTS, max_new_tokens=30)] == [g.token_ids for g in expected]
        assert engine.stats.speculation.accepted > 0
        assert "".join(event.text for event in engine.stream(PROMPTS[1], max_new_tokens=30)) == expected[1].text
        before = engine.stats.speculation.passes
        engine.generate(PROMPTS, max_new_tokens=5, num_assistant_tokens=0)
        assert engine.stats.speculation.passes == before
        request = engine.add(PROMPTS[1], max_new_tokens=30)
        for _ in range(4):
            engine.step()
        engine.abort(request)
        assert all(r.cache.free_pages == r.cache.num_pages for r in engine._driver.loop.runners.values())


def test_an_amateur_changes_the_tokens(checkpoint: Path, other: Path) -> None:
    with Engine(checkpoint) as plain, Engine(checkpoint, amateur=other) as engine:
        assert engine.generate(PROMPTS[1]).token_ids != plain.generate(PROMPTS[1]).token_ids


def test_models_that_do_not_go_together_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    from minillm.engine.loading import DEMO_MODEL

    with pytest.raises(ParameterError, match=r"draft .* has a vocabulary of 2048 tokens, the model one of 512"):
        Engine(checkpoint, draft=DEMO_MODEL)
    with pytest.raises(ParameterError, match="draft and amateur"):
        Engine(checkpoint, draft=checkpoint, amateur=checkpoint)


def test_fields_that_contradict_the_engines_models(checkpoint: Path) -> None:
    with Engine(checkpoint, draft=checkpoint) as engine:
        with pytest.raises(ParameterError, match="num_beams=4 and num_assistant_tokens=5"):
            engine.generate("Hello", num_beams=4)
        assert engine.generate("Hello", num_beams=4, num_assistant_tokens=0).completions[0].score is not None
    with (
        Engine(checkpoint, amateur=checkpoint) as engine,
        pytest.raises(ParameterError, match="prompt_lookup_num_tokens=3 and amateur=True"),
    ):
        engine.generate("Hello", prompt_lookup_num_tokens=3)


def test_the_shortest_context_counts(checkpoint: Path, tmp_path: Path) -> None:
    short = write_checkpoint(tmp_path / "short", seed=2, max_position_embeddings=20)
    with Engine(checkpoint, draft=short) as engine:
        assert len(engine.generate([5, 6, 7], max_new_tokens=60).token_ids) == 17


def test_models_share_the_memory_for_their_caches() -> None:
    config, backend = tiny_model().config, NumpyBackend()
    page = (
        config.num_layers
        * backend.memory.position_bytes(config.num_kv_heads, config.head_dim)
        * backend.memory.page_size
    )
    assert affordable_pages(config, backend, 16, 6 * page, [config]) == 3
    with pytest.raises(ParameterError, match=f"at least {2 * page}"):
        affordable_pages(config, backend, 16, page, [config])


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "flags", [["--prompt-lookup-num-tokens", "4"], ["--lookahead-window", "4"], ["--draft", "itself"]], ids=str
)
def test_stats_say_what_guesses_brought(flags: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [str(checkpoint) if flag == "itself" else flag for flag in flags]
    common = ["generate", "--model", str(checkpoint), "--prompt", "Hello", "--max-new-tokens", "30"]
    assert run(common) == 0
    plain = capsys.readouterr().out
    assert run([*common, "--stats", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == plain
    for words in ("in a row", "accepted", "by the formula", "speed-up", "measured"):
        assert words in captured.err
