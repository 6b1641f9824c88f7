"""Measure the demo model on the held-out texts, and write its model card."""

import json
import re
import textwrap
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import demo_words as words
import torch
import transformers
from demo_corpus import KINDS, Document, held_out_documents, training_documents
from tokenizers import Tokenizer
from transformers import OPTForCausalLM

EOS = 2
MAX_NEW_TOKENS = 200


@dataclass
class Training:
    """Facts about the training of a model."""

    seed: int
    threads: int
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0


@dataclass
class Measures:
    """Results of a model on the held-out texts of one kind."""

    documents: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    """Negative log-likelihood in nats, summed over the tokens; the closing `</s>` is one of them."""
    right: int = 0
    """Documents whose greedy continuation is right (`is_right`)."""
    known: int = 0
    """Number of texts built around combinations of the training set"""
    known_right: int = 0
    """How many of these the model continues correctly."""


def measure(model: OPTForCausalLM, tokenizer: Tokenizer, per_kind: int = 100) -> dict[str, Measures]:
    """Kind -> its measures, over at most `per_kind` held-out texts of each."""
    found = {kind: Measures() for kind in KINDS}
    for kind, documents in held_out_documents(per_kind).items():
        for document in documents:
            tokens, loss = document_loss(model, tokenizer, document)
            found[kind].documents += 1
            found[kind].tokens += tokens
            found[kind].loss_sum += loss
            found[kind].right += is_right(document, greedy(model, tokenizer, document.prompt))
        for document in known_documents(kind, len(documents)):
            found[kind].known += 1
            found[kind].known_right += is_right(document, greedy(model, tokenizer, document.prompt))
    return found


def known_documents(kind: str, count: int) -> list[Document]:
    """The first texts of a kind from a seed that is not used for training."""
    return list(islice((d for d in training_documents(seed=10**9) if d.kind == kind), count))


def document_loss(model: OPTForCausalLM, tokenizer: Tokenizer, document: Document) -> tuple[int, float]:
    """Number of tokens of the document, with the closing `</s>`, and their total loss in nats."""
    ids = torch.tensor([[*tokenizer.encode(document.text).ids, EOS]])  # [1, length]
    with torch.inference_mode():
        logits = model(input_ids=ids[:, :-1]).logits[0]  # [length - 1, V]
    return len(logits), torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()


def greedy(model: OPTForCausalLM, tokenizer: Tokenizer, prompt: str) -> str | None:
    """The greedy continuation up to `</s>`; None where that does not come within `MAX_NEW_TOKENS`."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    with torch.inference_mode():
        output = model.generate(ids, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)[0, ids.shape[1] :].tolist()
    return str(tokenizer.decode(output[:-1], skip_special_tokens=False)) if output[-1] == EOS else None


def is_right(document: Document, continuation: str | None) -> bool:
    """Whether a continuation of the document's prompt is what the grammar asks for.

    Where the prompt determines the rest, the rest; else of a record that it is JSON with the right fields, and of a
    story that it names its hero and its object, no other person and no other object.
    """
    if continuation is None or document.determined:
        return continuation == document.rest
    text = document.prompt + continuation
    if document.kind == "records":
        try:
            record = json.loads(text)
        except ValueError:
            return False
        return list(record) in (["name", "age", "city", "likes"], ["name", "age", "city", "pet"])
    nouns = set(re.findall(r"\w+", text))
    kept = set(re.findall(r"\w+", continuation))
    named = re.search(r"(?:named|called) (\w+)", document.prompt)
    assert named is not None
    people, things = {named[1]}, {document.combination[1]}
    same = nouns & {*words.GIRLS, *words.BOYS} == people and nouns & set(words.OBJECTS) == things
    return same and people | things <= kept


_CARD = """---
license: mit
language: en
library_name: transformers
pipeline_tag: text-generation
---

# demo-opt

The model that ships with minillm, so that the first command works without a network. It is an OPT (Zhang et al., "OPT:
Open Pre-trained Transformer Language Models", 2022) of {parameters:,} parameters: width 192, 6 layers, 6 heads,
MLP width 768, 512 positions, a byte-level BPE vocabulary of 2,048, weights in float16.

## What it was trained on

Texts that a seeded grammar generates (`scripts/demo_corpus.py` in minillm's repository): lists, counting, small
arithmetic, short stories, questions and answers, small JSON records. No text of anyone else is in it. A text ends with
`</s>`, and a prompt begins with it.

{training}

## How good it is

One combination in twelve (a hero with an object, two terms of a sum, the ends of a count, ...) is held out: it never
occurs in a training text. The figures are for texts built around these, with the weights as stored, computed in
float32. Loss is in nats per token, the closing `</s>` counted. *Right* counts the greedy continuations that are what
the grammar asks for: the one right answer where there is one, a record that parses as JSON with its four fields, a
story that keeps its hero and its object and names no other. The last column is the same count over as many texts around
combinations that were trained on.

{table}

A text begins with words that nothing foretells, and a story goes on with such words, so no perplexity can reach 1.

## Limits

It is a demo. It knows the grammar's few hundred words and facts, and nothing else: it cannot chat, follow instructions
or answer other questions, and other prompts get nonsense in the grammar's forms. Numbers go up to about 110.

## Training it again

    {command}

The schedule follows the clock, so another run gives a model of the same kind, not the same weights.

Licence: MIT, as the rest of minillm.
"""


def write_card(out: Path, training: Training, measures: dict[str, Measures]) -> None:
    """Write README.md of the model in the folder `out`."""
    parameters = OPTForCausalLM.from_pretrained(out).num_parameters()
    sentence = (
        f"{training.tokens:,} tokens in {training.steps:,} steps, {training.seconds / 60:.0f} minutes on a CPU with "
        f"{training.threads} threads (torch {torch.__version__}, transformers {transformers.__version__}), in windows "
        f"of 256 and 512 tokens, seed {training.seed}."
    )
    command = f"python scripts/train_demo_model.py --seconds {training.seconds:.0f} --seed {training.seed}"
    card = _CARD.format(
        parameters=parameters,
        training=textwrap.fill(sentence, 120),
        table=_table(measures),
        command=f"{command} --threads {training.threads}",
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def _table(measures: dict[str, Measures]) -> str:
    total = Measures()
    lines = [
        "| kind | texts | tokens | loss | perplexity | right | right if trained on |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for kind, m in [*measures.items(), ("all", total)]:
        loss = torch.tensor(m.loss_sum / m.tokens)
        lines.append(
            f"| {kind} | {m.documents} | {m.tokens:,} | {loss:.3f} | {loss.exp():.2f} | {m.right} of {m.documents} "
            f"| {m.known_right} of {m.known} |"
        )
        total.documents, total.tokens = total.documents + m.documents, total.tokens + m.tokens
        total.loss_sum, total.right = total.loss_sum + m.loss_sum, total.right + m.right
        total.known, total.known_right = total.known + m.known, total.known_right + m.known_right
    return "\n".join(lines)
