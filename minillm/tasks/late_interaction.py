"""Late interaction: a vector for each token, and the sum over a query's tokens of the best match in a document.

    score(q, d) = sum_i max_j q_i . d_j        (MaxSim)

Queries may be filled up with [MASK] tokens, whose vectors are scored too (query expansion); in most checkpoints no
token attends to them, and they attend to the query alone. Some tokens of documents, such as punctuation, are left out.

Sources: Khattab and Zaharia, "ColBERT", arXiv 2004.12832; sentence-transformers 6.2, `multi_vector_encoder`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from ..text.tokenizer import EncodedText, Tokenizer, encode_texts

Role = Literal["query", "document"]
"""The part of a text in a search"""
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Expansion:
    """How queries are filled up."""

    length: int
    """Tokens of a query, filled up to this"""
    fixed: bool
    """Longer queries are cut to it"""
    attend: bool
    """Whether the model attends to the tokens that fill up"""
    token: str | None = None
    """The token that fills up; None: the mask token, or the end-of-sequence token if there is none"""


@dataclass(frozen=True, kw_only=True)
class LateInteraction:
    """The settings of a late-interaction checkpoint."""

    steps: tuple[Callable[[NDArray[np.float32]], NDArray[np.float32]], ...]
    """Projections and normalisation of the tokens' vectors. [T, E] -> [T, W]"""
    longest: dict[Role, int] = field(default_factory=dict)
    """Tokens of the longest text of each role, where one is set"""
    expansion: Expansion | None = None
    markers: dict[Role, str] = field(default_factory=dict)
    """The token that stands before each text of a role, if the vocabulary has it; else it is text (PyLate)"""
    skipped: tuple[str, ...] = ()
    """Tokens without a vector"""
    skipped_in: tuple[str, ...] = ("document",)
    """The roles in which they have none"""
    only_ids: tuple[int, ...] = ()
    """If not empty, documents have vectors of these tokens alone"""
    mean: bool = False
    """Scores are divided by the number of the query's vectors (MeanMaxSim)"""

    def limit(self, role: Role, context: int) -> int:
        """Tokens of the longest text of a role, of a model that reads `context`."""
        limit = min(context, self.longest.get(role, context))
        if self.expansion is None or role != "query":
            return limit
        return self.expansion.length if self.expansion.fixed else max(limit, self.expansion.length)

    def encode(self, tokenizer: Tokenizer, text: str, role: Role, limit: int) -> EncodedText:
        """Token ids of a text, with the marker of its role, filled up if it is a query."""
        expansion = self.expansion if role == "query" else None
        limit = self.limit(role, limit)
        marker = self.markers.get(role, "")
        token = self._token(tokenizer, marker)
        encoded = encode_texts(tokenizer, text if token is not None else marker + text, limit=limit)
        if token is not None:
            encoded = self._marked(tokenizer, text, token, limit)
        if expansion is None or len(encoded.token_ids) >= expansion.length:
            return encoded
        fill = self._filler(tokenizer, expansion)
        more = expansion.length - len(encoded.token_ids)
        return encoded._replace(
            token_ids=[*encoded.token_ids, *[fill] * more],
            types=[*encoded.types, *[0] * more],
            unseen=0 if expansion.attend else more,
        )

    def _marked(self, tokenizer: Tokenizer, text: str, token: int, limit: int) -> EncodedText:
        """A text with a token after the special one that begins it."""
        encoded = encode_texts(tokenizer, text, limit=limit - 1)
        first = bool(encoded.token_ids) and encoded.token_ids[0] in tokenizer.special_ids
        ids, types = [*encoded.token_ids], [*encoded.types]
        ids.insert(first, token)
        types.insert(first, 0)
        return encoded._replace(token_ids=ids, types=types)

    def _token(self, tokenizer: Tokenizer, marker: str) -> int | None:
        for name in (marker, *marker.split()[:1]):
            if name and (token := tokenizer.token_id(name)) is not None:
                return token
        return None

    def _filler(self, tokenizer: Tokenizer, expansion: Expansion) -> int:
        if expansion.token is not None:
            token = tokenizer.token_id(expansion.token)
        else:
            token = tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
        if token is None:
            raise CheckpointError(f"queries are filled up with {expansion.token or 'a mask token'}: there is none")
        return token

    def vectors(
        self, states: NDArray[np.float32], text: EncodedText, role: Role, tokenizer: Tokenizer | None
    ) -> NDArray[np.float32]:
        """The vectors of a text's tokens, without those that are left out. [T, E] -> [k, W]"""
        for step in self.steps:
            states = step(states)
        ids = np.array(text.token_ids)
        scored = np.ones(len(ids), np.bool_)
        if role in self.skipped_in and self.skipped and tokenizer is not None:
            skipped = [tokenizer.token_id(word) for word in self.skipped]
            scored &= ~np.isin(ids, [token for token in skipped if token is not None])
        if role == "document" and self.only_ids:
            scored &= np.isin(ids, self.only_ids)
        return np.asarray(states[scored], np.float32)

    def compare(self, query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
        """MaxSim of a query's vectors and a document's. [q, W], [d, W]"""
        if not (len(query) and len(document)):
            return 0.0
        score = float((query @ document.T).max(axis=1).sum(dtype=np.float64))  # [q, d] -> [q]
        return score / len(query) if self.mean else score


def role_prompt(prompts: Mapping[str, str], role: Role) -> str:
    """The prompt that the checkpoint has for texts of a role."""
    names: Sequence[str] = ("query",) if role == "query" else ("document", "passage", "corpus")
    return next((prompts[name] for name in names if name in prompts), "")
