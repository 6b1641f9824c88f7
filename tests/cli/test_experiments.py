"""minillm inspect --lens, --ablate and --patch: figures, and the library's numbers."""

import json
from pathlib import Path

import numpy as np
import pytest

from minillm import Engine
from minillm.cli.main import run
from minillm.measure.inside import ablate_heads, logit_lens, patch

PROMPT, SOURCE = "Count: 3, 4, 5,", "Count: 6, 7, 8,"


@pytest.mark.slow
def test_each_figure_is_written_and_json_has_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    files = {"lens": tmp_path / "lens.svg", "ablate": tmp_path / "heads.png", "patch": tmp_path / "patch.svg"}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert run(["inspect", "--prompt", PROMPT, "--source", SOURCE, *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    with Engine() as engine:
        lens, (token, effects), (answer, restored) = (
            logit_lens(engine, PROMPT),
            ablate_heads(engine, PROMPT),
            patch(engine, PROMPT, SOURCE),
        )
        words = [engine.tokenizer.decode([token]) for token in (token, answer)]
    assert said["lens"]["token_ids"] == lens.next_ids[..., 0].tolist()
    assert (said["ablate"]["token_id"], said["patch"]["token_id"]) == (token, answer)
    np.testing.assert_allclose(said["ablate"]["effects"], effects, atol=1e-5)
    np.testing.assert_allclose(said["patch"]["restored"], restored, atol=1e-5)
    assert files["ablate"].read_bytes().startswith(b"\x89PNG")
    drawn = files["patch"].read_text(encoding="utf-8")
    assert f"“{words[1].replace(' ', '␣')}”" in drawn
    assert "layer 5" in files["lens"].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--patch", "a.png"], "--patch FILE and --source TEXT belong together"),
        (["--source", "a"], "--patch FILE and --source TEXT belong together"),
        (["--patch", "a.png", "--source", "Monday,"], "same number of tokens"),
        (["--lens", "no/a.png"], "no/a.png"),
        (["--lens", "a.png", "--ablate", "a.png"], "a.png is named for several figures"),
        (["--ablate", "a.txt"], "a drawing ends in one of"),
        (["--prompt", "B", "--lens", "a.png"], "--lens draws one prompt: give one"),
    ],
)
def test_a_mistake_is_named(
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    monkeypatch.chdir(tmp_path)
    assert run(["inspect", "--prompt", PROMPT, *options]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
