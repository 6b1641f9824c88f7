"""The README's table of names: the rows of each point are those that TransformerLens has under its own name.

TransformerLens is in no extra, since it wants some forty packages more: `pip install "transformer-lens==4.3.0"` beside
the extra `reference`.
"""

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")
transformer_lens = pytest.importorskip("transformer_lens", reason="needs TransformerLens")

from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from minillm import Engine  # noqa: E402

from .. import huggingface  # noqa: E402
from ..families import CONFIGS  # noqa: E402

pytestmark = pytest.mark.reference

PAGE = Path(__file__).parents[2] / "minillm" / "measure" / "README.md"
LINE = np.random.default_rng(3).integers(3, 96, 12).tolist()


def names_of_the_table() -> list[tuple[str, str]]:
    """Names of minillm and of TransformerLens, without what is in brackets."""
    table = PAGE.read_text(encoding="utf-8").partition("| point | TransformerLens")[2].partition("\n\n")[0]
    names: list[tuple[str, str]] = []
    for row in table.splitlines()[2:]:
        ours, theirs = (re.findall(r"`([^`]+)`", re.sub(r"\(.*?\)", "", cell)) for cell in row.strip("|").split("|"))
        stem = ours[0].rpartition(".")[0]
        names += zip([stem + name if name.startswith(".") else name for name in ours], theirs, strict=True)
    return names


def with_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer in a checkpoint's folder: TransformerLens wants one."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma2"])
def test_the_names_of_the_table_are_those_of_the_same_rows(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = huggingface.build_model(next(iter(CONFIGS[family].values())), 5)
    huggingface.save(model, tmp_path)
    with Engine(tmp_path, backend="numpy", dtype="float32") as engine:
        watched = engine.generate(LINE, max_new_tokens=1, eos_token_id=[], watch=["**"]).watched
    bridge = transformer_lens.TransformerBridge.boot_transformers(
        str(tmp_path), hf_model=model, device="cpu", tokenizer=with_tokenizer(tmp_path)
    )
    with torch.no_grad():
        _, cache = bridge.run_with_cache(torch.tensor([LINE]))
    compared = 0
    for ours, theirs in names_of_the_table():
        point, name = ours.replace(".3.", ".1."), theirs.replace(".3.", ".1.")
        if point == "blocks.1.mlp.hidden" and family == "mixtral":  # experts have none
            assert point not in watched
            continue
        if point == "logits" and family == "gemma2":
            continue
        rows = cache[name if name in cache else name.replace("hook_rot_", "hook_")][0].numpy()
        rows = rows.swapaxes(0, 1) if point.endswith("pattern") else rows
        expected = rows.reshape(watched[point].shape)
        np.testing.assert_allclose(watched[point], expected, rtol=0, atol=1e-5 * max(10, abs(expected).max()))
        compared += 1
    assert compared >= 12
