"""Causal LMs that score a query and a document by the next token: "yes" or "no" after a prompt of the publisher's.

Sentence-transformers' folders say both in files (`formats/sentence_files.py`). The checkpoints of this page have been
published without such files; they are known by the name of their folder or repository.

Sources: the model cards of Qwen/Qwen3-Reranker-0.6B (Zhang et al., "Qwen3 Embedding", arXiv 2506.05176) and of
BAAI/bge-reranker-v2-gemma (Chen et al., "BGE M3-Embedding", arXiv 2402.03216).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import ModelConfig
from ..errors import CheckpointError
from ..text.tokenizer import EncodedText, Tokenizer
from .pooling import EmbeddingSettings, LogitScore


@dataclass(frozen=True, kw_only=True)
class RerankPrompt:
    """The text around a query and a document. Its parts are encoded apart from each other and joined as tokens.

    In each part {instruction}, {query} and {document} stand for these texts.
    """

    before: str = ""
    parts: tuple[str, ...]
    """The last is cut if the whole is too long"""
    after: tuple[str, ...]
    instruction: str = ""
    """The task, unless the call's prompt says another"""
    begins: bool = False
    """Whether the beginning-of-sequence token comes first"""

    def encode(self, tokenizer: Tokenizer, query: str, document: str, instruction: str, limit: int) -> EncodedText:
        """Token ids of a query and a document, at most `limit`."""
        texts = {"instruction": instruction or self.instruction, "query": query, "document": document}

        def ids_of(part: str) -> list[int]:
            filled = re.sub(r"\{(instruction|query|document)\}", lambda name: texts[name[1]], part)
            return tokenizer.encode(filled, add_special_tokens=False) if filled else []

        begin = [tokenizer.bos_token_id] if self.begins and tokenizer.bos_token_id is not None else []
        *first, last = [ids_of(part) for part in self.parts]
        head = sum([begin, ids_of(self.before), *first], start=list[int]())
        tail = sum(map(ids_of, self.after), start=list[int]())
        room = max(0, limit - len(head) - len(tail))
        ids = [*head, *last[:room], *tail]
        if len(ids) > limit:  # a query that fills the context: the question after it stays
            ids = ids[: max(0, limit - len(tail))] + tail[-limit:]
        return EncodedText(ids, [0] * len(ids), len(last) > room)


QWEN3_RERANKER = RerankPrompt(
    before="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    parts=("<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",),
    after=("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",),
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
BGE_RERANKER = RerankPrompt(
    parts=("A: {query}", "\n", "B: {document}"),
    after=("\n", "{instruction}"),
    instruction="Given a query A and a passage B, determine whether the passage contains an answer to the query by "
    "providing a prediction of either 'Yes' or 'No'.",
    begins=True,
)
PUBLISHED: Sequence[tuple[re.Pattern[str], str, RerankPrompt, tuple[str, ...]]] = (
    (re.compile(r"qwen3-reranker", re.IGNORECASE), "qwen3", QWEN3_RERANKER, ("yes", "no")),
    (re.compile(r"bge-reranker-v2-gemma", re.IGNORECASE), "gemma", BGE_RERANKER, ("Yes",)),
)
"""The name, the family, the prompt, and the tokens whose logit counts: the first minus the second"""


def published_reranker(
    path: Path, config: ModelConfig, settings: EmbeddingSettings, tokenizer: Tokenizer | None
) -> EmbeddingSettings:
    """The settings of a folder without files of sentence-transformers, if its name is a published reranker's.

    The name is the folder's, or the repository's in the cache of the hub ("models--Qwen--Qwen3-Reranker-0.6B").

    Raises:
        CheckpointError: the words that it answers with are not tokens of its tokenizer.
    """
    name = path.parent.parent.name if path.parent.name == "snapshots" else path.name
    for pattern, family, prompt, words in PUBLISHED:
        if not (pattern.search(name) and config.model_type == family and config.output == "tokens"):
            continue
        if tokenizer is None:
            return settings
        ids = [tokenizer.encode(word, add_special_tokens=False) for word in words]
        if any(len(of_word) != 1 for of_word in ids):
            raise CheckpointError(
                f"{path}: a reranker of this name answers with {' or '.join(words)}, and its tokenizer has no "
                "token for each"
            )
        score = LogitScore(*(of_word[0] for of_word in ids))
        return replace(
            settings, logit_score=score, rerank_prompt=prompt, score_function="sigmoid" if len(ids) == 2 else "none"
        )
    return settings
