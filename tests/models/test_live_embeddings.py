"""Vectors in the place of tokens (`inputs_embeds`) against transformers': logits, tokens, beams."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

from minillm import Engine  # noqa: E402

from .. import huggingface  # noqa: E402
from ..families import CONFIGS  # noqa: E402

pytestmark = pytest.mark.reference

FAMILIES = (
    "opt",  # learned positions
    "bloom",  # a norm of the embedding
    "llama",
    "gemma2",  # a factor of the tokens' vectors, not of given ones
    "granite",  # a factor of both
    "minicpm3",  # the stream is computed without a factor
    "falcon_h1",  # likewise; states beside keys
)


def narrow_opt() -> dict[str, Any]:
    """OPT-350m's shape: vectors narrower than the model."""
    return next(raw for raw in CONFIGS["opt"].values() if raw.get("word_embed_proj_dim") != raw["hidden_size"])


def vectors(model: Any, tokens: int, seed: int) -> np.ndarray:
    """Random ones, about as long as the model's own are where its blocks read them."""
    table = model.get_input_embeddings()
    own = table(torch.arange(3, 40)).detach().numpy()
    return (np.random.default_rng(seed).standard_normal((tokens, own.shape[1])) * own.std()).astype(np.float32)


def theirs(model: Any, rows: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(inputs_embeds=torch.from_numpy(rows)[None]).logits[0].numpy()


def tokens_of(model: Any, rows: np.ndarray, **fields: Any) -> list[int]:
    given = torch.from_numpy(rows)[None]
    tokens = model.generate(inputs_embeds=given, do_sample=False, max_new_tokens=8, eos_token_id=None, **fields)
    return tokens[0].tolist()


@pytest.mark.parametrize("family", [*FAMILIES, "opt, narrow"])
def test_logits_and_tokens(family: str, tmp_path: Path) -> None:
    raw = narrow_opt() if family == "opt, narrow" else next(iter(CONFIGS[family].values()))
    model = huggingface.build_model(raw, 7)
    huggingface.save(model, tmp_path)
    with Engine(tmp_path, max_batched_tokens=16) as engine:
        rows, short = vectors(model, 37, 1), vectors(model, 5, 2)
        near = huggingface.tolerance(engine.config)
        np.testing.assert_allclose(engine.forward(inputs_embeds=rows), theirs(model, rows), rtol=0, atol=near)
        own = model.get_input_embeddings()(torch.tensor([4, 9, 7, 30, 11]))
        given = engine.forward(inputs_embeds=own, like="torch")
        np.testing.assert_allclose(given.numpy(), theirs(model, own.detach().numpy()), rtol=0, atol=near)
        fields = {"max_new_tokens": 8, "eos_token_id": []}
        if family == "falcon_h1":  # transformers' generate does not take its vectors
            return
        both = engine.generate(inputs_embeds=[rows, short], **fields)
        assert [answer.token_ids for answer in both] == [tokens_of(model, array) for array in (rows, short)]
        beams = engine.generate(inputs_embeds=short, num_beams=3, **fields)
        assert beams.token_ids == tokens_of(model, short, num_beams=3)
