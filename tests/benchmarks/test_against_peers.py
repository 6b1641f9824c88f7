"""The comparison's arithmetic, its workers, and what it says about what is missing. No test looks at a speed."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script() -> Any:
    import against_peers

    return against_peers


def test_ratios_are_those_of_the_same_round(script: Any) -> None:
    """A machine that halves its speed from round to round changes the speeds and not the ratio."""
    task = script.Task("decode, batch 1", 1, 32, 11)
    bursts = []
    for number, drift in ((1, 1.0), (2, 2.0), (3, 4.0)):
        for engine, seconds in ((script.OURS, 0.1), ("transformers", 0.3)):
            bursts.append(script.Burst(number, task, engine, seconds * drift, 40 / drift))
    lines = script.table(bursts, weight_bytes=200_000_000)
    ours, peer = (line.split() for line in lines[1:3])
    assert ours[-3:] == ["50.0", "(25.0-100.0)", "0.50"]  # 10 tokens in 0.1 s; 20 GB/s of 40
    assert peer[-5:-1] == ["16.7", "(8.3-33.3)", "3.00", "x"]


def test_a_burst_is_credited_with_what_it_measures(script: Any) -> None:
    assert script.Task("", 8, 32, 64).tokens == 8 * 63  # the first of each came out of the prompt
    assert script.Task("", 1, 512, 1).tokens == 512


def test_missing_peers_are_named(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ctranslate2" else name)
    peers, line = script.sort_out(["transformers", "ctranslate2"])
    assert peers == ["transformers"]
    assert line == "ctranslate2 (without ctranslate2): pip install 'minillm[peers]'"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "opt-1"], "shape 'opt-1' is not known"),
        (["--new-tokens", "1"], "--new-tokens should be at least 2"),
        (["--prefill", "4000"], "4001 tokens are asked for, and the context of opt-125m is 2048"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    script: Any, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_unknown_peer(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(["--peers", "transformers,llama"])
    assert ended.value.code == 2
    assert "'llama' is not known: expected transformers or ctranslate2" in capsys.readouterr().err


def test_a_worker_that_dies_says_why(subprocess_environment: dict[str, str]) -> None:
    from harness import BenchmarkError
    from peer_process import Worker

    with pytest.raises(BenchmarkError, match=r"minillm ended before it answered: .*shape 'opt-1' is not known"):
        Worker("minillm", "minillm", "opt-1", 1, subprocess_environment).__enter__()


def test_minillm_as_a_peer(tiny: str) -> None:
    """Any order of batch sizes, and each task leaves the engine idle."""
    from peer_worker import Minillm, prompt

    peer = Minillm(tiny, 1)
    for size in (1, 3, 1):
        assert peer.decode([prompt(i, 5, 50) for i in range(size)], 4) > 0
        assert not peer._engine.busy
    assert peer.prefill(prompt(0, 9, 50)) > 0


@pytest.mark.reference
def test_the_peers_run_the_same_weights(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers and CTranslate2 give every token that was asked for, and the same ones."""
    pytest.importorskip("transformers", reason="needs the peers extra")
    ctranslate2 = pytest.importorskip("ctranslate2", reason="needs the peers extra")
    from peer_worker import CTranslate2, Transformers, prompt, write_checkpoint

    from minillm.models import opt

    monkeypatch.setitem(opt.SHAPES, "tiny", opt.SHAPES["tiny"] | {"vocab_size": 56})  # CTranslate2 wants eights
    write_checkpoint("tiny", str(tmp_path))
    prompts = [prompt(i, 5, 50) for i in range(3)]
    ours = Transformers(str(tmp_path), 1)
    theirs = CTranslate2(str(tmp_path), 1)
    assert ours.decode(prompts, 4) > 0
    assert ours.prefill(prompts[0]) > 0
    assert theirs.decode(prompts, 4) > 0
    assert theirs.prefill(prompts[0]) > 0
    assert len(theirs._generate(prompts, 4)) == 12
    ids, past = ours._step(ours._torch.tensor(prompts), None)
    expected = [ids.tolist()]
    for _ in range(3):
        ids, past = ours._step(ids, past)
        expected.append(ids.tolist())
    words = [[f"t{i}" for i in line] for line in prompts]
    generator = ctranslate2.Generator(str(tmp_path / "ctranslate2"), compute_type="float32")
    results = generator.generate_batch(
        words, max_length=4, min_length=4, sampling_topk=1, include_prompt_in_result=False
    )
    assert [result.sequences_ids[0] for result in results] == [[step[i][0] for step in expected] for i in range(3)]


@pytest.mark.slow
def test_the_whole_comparison_without_peers(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    subprocess_environment: dict[str, str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", subprocess_environment["PYTHONPATH"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code = script.main(
        ["--rounds", "2", "--new-tokens", "3", "--prefill", "8", "--threads", "1", "--out", str(tmp_path)]
    )
    assert code == 0
    out = capsys.readouterr().out
    assert "left out: transformers (without torch, transformers); ctranslate2 (without" in out
    assert (tmp_path / "against_peers_opt-125m.txt").read_text(encoding="utf-8") in out
    rows = (tmp_path / "against_peers_opt-125m.csv").read_text(encoding="utf-8").splitlines()
    engines = 2 if script.has_avx512() else 1
    assert len([row for row in rows if not row.startswith("#")]) == 1 + 2 * 3 * engines
    assert sys.modules["against_peers"] is script
