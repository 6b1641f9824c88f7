"""The tokens that end a turn of a conversation, whatever a checkpoint's `eos_token_id` says.

Fine-tunes often have a template that ends a turn by a token of its own, `<|im_end|>`, and the base model's EOS in
config.json. transformers' `generate` goes on there; llama.cpp goes by the names in `NAMES`, vLLM by the tokenizer's
`eos_token`. Conversations here end at all of them, with folders as with GGUF files.
"""

from collections.abc import Mapping

_NAMES = """
<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> <|end_of_text|> <|return|> <|call|>
_<EOT> [EOT] <｜end▁of▁sentence｜> <|end_of_turn|> <end_of_utterance> <turn|>
"""
NAMES = frozenset(_NAMES.split())
"""Control tokens that end a turn, whatever the files say of them, as in llama.cpp"""
_HARMONY = {"<|return|>", "<|call|>"}
"""Beside these, of gpt-oss, `<|end|>` ends one of several messages of a turn"""


def turn_ends(ids: Mapping[str, int]) -> list[int]:
    """Control tokens of a vocabulary, given by their text, that end a turn; lowest first."""
    names = NAMES & ids.keys()
    return sorted(ids[name] for name in (names - {"<|end|>"} if names >= _HARMONY else names))
