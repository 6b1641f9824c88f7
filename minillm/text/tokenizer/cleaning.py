"""The spaces before punctuation that `clean_up_tokenization_spaces` of tokenizer_config.json removes from decoded text.

Tokenizers of words, such as BERT's, decode "I don't." as "I don ' t ." The rules are transformers', one after the other
over the whole text, so that a later one sees what an earlier one has left.
"""

RULES = (
    *((f" {sign}", sign) for sign in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
"""Text -> what replaces it, in turn"""


def cleaned(text: str) -> str:
    """A whole text without these spaces."""
    for old, new in RULES:
        text = text.replace(old, new)
    return text


class Cleaner:
    """The same for a text that comes in pieces: what may be the beginning of such a space waits for what follows."""

    def __init__(self) -> None:
        self._waiting = [""] * len(RULES)

    def push(self, text: str) -> str:
        """Add a piece; returns what no further piece can change."""
        for i, (old, new) in enumerate(RULES):
            *before, last = (self._waiting[i] + text).split(old)
            begun = next((k for k in range(len(old) - 1, 0, -1) if last.endswith(old[:k])), 0)
            self._waiting[i] = last[len(last) - begun :]
            text = new.join([*before, last[: len(last) - begun]])
        return text

    def flush(self) -> str:
        """End the text; returns the rest of it."""
        rest = ""
        for i, (old, new) in enumerate(RULES):
            rest = (self._waiting[i] + rest).replace(old, new)
            self._waiting[i] = ""
        return rest
