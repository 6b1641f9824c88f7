"""A real encoder, all-MiniLM-L6-v2, against transformers; and what its vectors say of sentences.

The first run fetches it (84 MB).
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from minillm import Engine

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fetch_minilm import fetch

pytestmark = pytest.mark.real

SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "Someone has a meal.",
    "The girl is carrying a baby.",
    "A cheetah is running behind its prey.",
    "Ein Mann isst.  ÉTÉ 你好!",
    "",
    "a long text " * 200,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch()


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
def test_vectors_are_those_of_transformers(folder: Path, backend: str) -> None:
    torch = pytest.importorskip("torch", reason="needs the reference extra")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    given = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**given).last_hidden_state
    mask = given["attention_mask"][..., None].float()
    mean = (hidden * mask).sum(1) / mask.sum(1)
    expected = torch.nn.functional.normalize(mean, dim=1).numpy()
    with Engine(folder, backend=backend, dtype="float32") as engine:
        np.testing.assert_allclose(engine.embed(SENTENCES), expected, rtol=0, atol=1e-4)
        ids = [encoded.token_ids for encoded in engine.encode(SENTENCES)]
        assert ids == [
            [token for token, kept in zip(line, mask, strict=True) if kept]
            for line, mask in zip(given["input_ids"].tolist(), given["attention_mask"].tolist(), strict=True)
        ]


LEAST = {"float16": 0.9999, "bfloat16": 0.999, "int8": 0.995, "int4": 0.88}
"""The least cosine of a sentence's vector with that in float32; the empty sentence has it"""


@pytest.mark.parametrize(("dtype", "least"), LEAST.items())
def test_fewer_bits_keep_the_directions(folder: Path, dtype: str, least: float) -> None:
    with Engine(folder, dtype="float32") as exact, Engine(folder, dtype=dtype) as engine:
        similarity = (exact.embed(SENTENCES) * engine.embed(SENTENCES)).sum(axis=1)
        assert similarity.min() > least


def test_sentences_alike_are_near(folder: Path) -> None:
    with Engine(folder) as engine:
        vectors = engine.embed(SENTENCES[:5])
        near = vectors @ vectors.T
        assert near[0, 1] > 0.7
        assert near[0, 2] > 0.5
        assert near[0, 1:3].min() > near[0, 3:].max() + 0.2


def test_a_vocab_txt_gives_the_tokens_of_tokenizer_json(folder: Path, tmp_path: Path) -> None:
    from minillm.text.tokenizer import Tokenizer, encode_texts

    for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    old, new = Tokenizer.from_folder(tmp_path), Tokenizer.from_folder(folder)
    for text in SENTENCES:
        assert old.encode(text) == new.encode(text)
        assert encode_texts(old, text, "another, 'quoted' text") == encode_texts(new, text, "another, 'quoted' text")
