"""Results as a notebook shows them: texts, with log-probabilities their tokens in shades, and a line about each."""

import math
from typing import TYPE_CHECKING

from ..text.display import TokenView, results_html, view_tokens
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .results import Completion, Generation


def results_in_html(generation: "Generation", tokenizer: Tokenizer | None) -> str:
    """The results of a prompt; `tokenizer` names the alternatives of tokens."""
    prompt = []
    if generation.prompt_logprobs is not None and tokenizer is not None:
        ids = generation.prompt_token_ids
        spelled = [tokenizer.token_bytes(token) for token in ids]
        prompt = view_tokens(ids, spelled, generation.prompt_logprobs, generation.prompt_top_logprobs, tokenizer)
    return results_html((prompt, _views(result, tokenizer), _note(result)) for result in generation.completions)


def _views(completion: "Completion", tokenizer: Tokenizer | None) -> list[TokenView]:
    """The tokens; the text in one piece if there are no log-probabilities."""
    if completion.logprobs is None:
        return [TokenView(completion.text)]
    ids, spelled = completion.token_ids, completion.token_bytes
    return view_tokens(ids, spelled, completion.logprobs, completion.top_logprobs, tokenizer)


def _note(completion: "Completion") -> str:
    """The line below the text."""
    parts = [f"{len(completion.token_ids)} tokens"]
    if completion.finish_reason is not None:
        reason = "" if completion.stop_reason is None else f" at {completion.stop_reason!r}"
        parts.append(completion.finish_reason + reason)
    if completion.score is not None:
        parts.append(f"score {completion.score:.4g}")
    if completion.logprobs:
        parts.append(f"log-probability {math.fsum(completion.logprobs):.4g}")
    return " · ".join(parts)
