"""lm-eval on the real model, in this process: the figures of its own model of transformers, sooner.

python -m pytest tests/real/test_lm_eval.py -m real
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="lm-eval's own model needs the extra reference")
pytest.importorskip("lm_eval", reason="needs the extra eval")

from minillm.lm_eval import MinillmLM

from .. import lm_eval_tasks as tasks
from .conftest import Engines

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def model(engines: Engines) -> MinillmLM:
    return MinillmLM(engines(), max_length=128)


@pytest.fixture(scope="module")
def own(model_file: Path) -> Any:
    """lm-eval's model "hf" of the same file, in float32."""
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": model_file.parent, "gguf_file": model_file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    return HFLM(loaded, tokenizer=AutoTokenizer.from_pretrained(**where), batch_size=8, max_length=128)


def endings(text: str, count: int, context: int) -> list[dict[str, Any]]:
    """Sentences to be ended: after so many characters of context, one of four endings."""
    found = [match for match in re.finditer(r"[^.?!]{60,200}[.?!]", text) if match.start() > context][:count]
    middles = [match.start() + (len(match[0]) // 2) for match in found]
    middles = [middle + text[middle:].index(" ") for middle in middles]
    choices = [text[middle : match.end()] for middle, match in zip(middles, found, strict=True)]
    return [
        {"ctx": text[middle - context : middle], "choices": [choices[(i + k) % count] for k in (1, 0, 2, 3)]}
        for i, middle in enumerate(middles)
    ]


def test_the_figures_of_three_kinds_of_tasks(model: MinillmLM, own: Any, text: str, tmp_path: Path) -> None:
    choosing = tasks.dataset(tmp_path / "endings.json", endings(text.replace("\n", " "), 8, 120)) | {
        "output_type": "multiple_choice",
        "doc_to_text": "{{ctx}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 1,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    chosen = [
        tasks.sums(tmp_path, 6, until=["\n\n", "."], max_gen_toks=10),
        choosing,
        tasks.pages(tmp_path, [text[:900], text[2000:2100]]),
    ]
    for conversation in (False, True):
        arguments = {"apply_chat_template": True, "system_instruction": "Be brief."} if conversation else {}
        with tasks.offline(tmp_path):
            mine = tasks.evaluated(model, chosen[: 2 if conversation else 3], **arguments)
            expected = tasks.evaluated(own, chosen[: 2 if conversation else 3], **arguments)
        assert tasks.figures(mine) == pytest.approx(tasks.figures(expected), rel=1e-4)
        assert len(tasks.figures(mine)) == (3 if conversation else 6)
        for name, samples in mine["samples"].items():
            for sample, other in zip(samples, expected["samples"][name], strict=True):
                assert sample["arguments"] == other["arguments"]
                if name == "sums":
                    assert sample["resps"] == other["resps"]
        if not conversation:
            assert 0 < mine["results"]["endings"]["acc,none"] <= 1


def test_four_endings_of_a_text_cost_little_more_than_one(
    model: MinillmLM, own: Any, text: str, measured: Callable[[str], None]
) -> None:
    rows = endings(text.replace("\n", " "), 8, 400)
    requests = [SimpleNamespace(args=(row["ctx"], choice)) for row in rows for choice in row["choices"]]

    def score(together: Any, size: int) -> tuple[float, list[float]]:
        began, values = time.process_time(), []
        for i in range(0, len(requests), size):
            values += [value for value, _ in together.loglikelihood(requests[i : i + size], disable_tqdm=True)]
        return time.process_time() - began, values

    score(model, len(requests))  # compiled, and read from the file
    batched, values = score(model, len(requests))
    alone, others = score(model, 1)
    transformers, expected = score(own, len(requests))
    assert values == pytest.approx(others, abs=1e-3) and values == pytest.approx(expected, abs=1e-3)
    measured(
        f"lm-eval, 8 texts with 4 endings each: {batched:.1f} CPU seconds together, {alone:.1f} one request each, "
        f"{transformers:.1f} by lm-eval's own model of transformers"
    )
