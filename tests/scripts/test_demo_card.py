"""The demo model's card: what counts as right, and that its figures are those of the committed weights."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the card's figures are made with torch and transformers")
transformers = pytest.importorskip("transformers", reason="the card's figures are made with torch and transformers")

from demo_card import document_loss, is_right  # noqa: E402
from demo_corpus import KINDS, Document, held_out_documents  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

pytestmark = pytest.mark.reference

MODEL = Path(__file__).parents[2] / "minillm" / "assets" / "demo-opt"
STORY = Document("stories", ("fox", "kite"), "There once was a shy fox named Ida. Ida had a red kite.", "", False)
RECORD = Document("records", ("Ida", "Rome"), '{"name": "Ida", "age":', "", False)
SUM = Document("arithmetic", ("3", "4"), "3 + 4 =", " 7.")


@pytest.mark.parametrize(
    ("document", "continuation", "right"),
    [
        (SUM, " 7.", True),
        (SUM, " 8.", False),
        (SUM, None, False),
        (STORY, " One day Ida lost the kite.", True),
        (STORY, " One day Ida lost the drum.", False),
        (STORY, " One day Ida lost the kite and the drum.", False),
        (STORY, " One day Ben lost the kite.", False),
        (STORY, " She was sad.", False),
        (RECORD, ' 7, "city": "Rome", "pet": "cat"}', True),
        (RECORD, ' 7, "city": "Rome"}', False),
        (RECORD, ' 7, "city": "Rome", "pet": "cat"', False),
    ],
)
def test_what_counts_as_right(document: Document, continuation: str | None, right: bool) -> None:
    assert is_right(document, continuation) is right


SHORT = ("questions", "arithmetic")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in SHORT else [pytest.mark.exhaustive]) for kind in KINDS]
)
def test_the_card_gives_the_losses_of_the_committed_weights(kind: str) -> None:
    rows = re.findall(r"^\| (\w+) \| (\d+) \| ([\d,]+) \| ([\d.]+) \|", (MODEL / "README.md").read_text(), re.MULTILINE)
    said = {kind: (int(texts), int(tokens.replace(",", "")), float(loss)) for kind, texts, tokens, loss in rows}
    assert set(said) == {*KINDS, "all"}
    model = transformers.OPTForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    documents = held_out_documents()[kind]
    losses = [document_loss(model, tokenizer, document) for document in documents]
    tokens = sum(count for count, _ in losses)
    assert said[kind][:2] == (len(documents), tokens)
    assert said[kind][2] == pytest.approx(sum(loss for _, loss in losses) / tokens, abs=1e-3)
