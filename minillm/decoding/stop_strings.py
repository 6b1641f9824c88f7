"""Stop strings: found in a growing text, and left out of it.

The text is read one character at a time and ends at the first character that completes a stop string. When that
character completes several at once, the longest wins, since it begins first. The rule depends on the text alone, never
on how the text is split into tokens.

A stop string may begin inside the prompt, but must end in generated text: a match entirely inside the prompt stops
nothing. The stop string is left out of the text, as in OpenAI's API.

For ordinary tokens, transformers stops at the same point (`StopStringCriteria`). The two differ at special tokens and
at ids without a token (the padded rows of a model). Here these have no text, so a stop string matches across them: the
returned text never contains one. transformers counts a special token's spelling as text and matches nothing across an
id without a token. The most common use works here too: a stop string that spells a special token, such as
"<|im_end|>", ends the sequence at that token as if it were in eos_token_id (`request.py`); a longer one matches only
its spelling in ordinary tokens.
"""

import copy
from collections import deque
from collections.abc import Sequence

from ..errors import ParameterError, shown


class StopStrings:
    """Finds the first stop string in a growing text and lets through only text that cannot belong to one.

    The stop strings are held in one trie with failure links (Aho and Corasick, "Efficient string matching", 1975), so
    the whole text costs time linear in its length, however many stop strings there are. A node's depth is the length of
    the longest suffix of the text that is a prefix of a stop string: exactly the text to hold back, and always shorter
    than the longest stop string.

    Args:
        stop_strings: strings that end the text; may be empty.
        prompt_tail: the end of the prompt, as text. Only the last `max(len(stop)) - 1` characters matter.
        include_stop: release the stop string too.

    Raises:
        ParameterError: a stop string is empty or not a string.
    """

    matched: str | None
    """The stop string that was found, or None."""

    def __init__(self, stop_strings: Sequence[str], prompt_tail: str = "", include_stop: bool = False) -> None:
        _check(stop_strings)
        self.matched = None
        self._include_stop = include_stop
        self._grow_trie(stop_strings)
        self._link_failures()
        self._node = 0
        reach = max(self._depth) - 1
        for character in prompt_tail[-reach:] if reach > 0 else "":
            self._node = self._advance(character)
        self._held = ""  # generated, but possibly the beginning of a stop string

    def push(self, text: str) -> str:
        """Add generated text; returns the text released by it, "" if all of it is held back.

        When a stop string is complete, `matched` is set and the rest is dropped. Nothing may be pushed after that.
        """
        assert self.matched is None, "the text has ended: nothing may follow a stop string"
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            self._node = self._advance(character)
            stop = self._complete[self._node]
            if stop is not None:
                self.matched, self._held = stop, ""
                return pending[: position if self._include_stop else max(0, position - len(stop))]
        # The partial match may reach back into the prompt: then all generated text is held.
        released = max(0, len(pending) - self._depth[self._node])
        self._held = pending[released:]
        return pending[:released]

    def flush(self) -> str:
        """End the text without a stop string; returns the text that was held back ("" after a match)."""
        rest, self._held = self._held, ""
        return rest

    def __deepcopy__(self, memo: dict[int, object]) -> "StopStrings":
        """An independent copy. The trie is immutable and shared."""
        return copy.copy(self)

    def _advance(self, character: str) -> int:
        node = self._node
        while node and character not in self._children[node]:
            node = self._failure[node]
        return self._children[node].get(character, 0)

    def _grow_trie(self, stop_strings: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._complete: list[str | None] = [None]  # node -> the longest stop string that ends there
        for stop in stop_strings:
            node = 0
            for character in stop:
                if character not in self._children[node]:
                    self._children[node][character] = len(self._children)
                    self._children.append({})
                    self._depth.append(self._depth[node] + 1)
                    self._complete.append(None)
                node = self._children[node][character]
            self._complete[node] = stop

    def _link_failures(self) -> None:
        """Link each node, in order of depth, to the longest proper suffix of its string that is in the trie."""
        self._failure = [0] * len(self._children)
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._children[node].items():
                fallback = self._failure[node]
                while fallback and character not in self._children[fallback]:
                    fallback = self._failure[fallback]
                self._failure[child] = self._children[fallback].get(character, 0)
                self._complete[child] = self._complete[child] or self._complete[self._failure[child]]
                queue.append(child)


def _check(stop_strings: Sequence[str]) -> None:
    if isinstance(stop_strings, str):
        raise ParameterError(f"stop strings should be a list, found the single string {shown(stop_strings)}")
    for stop in stop_strings:
        if not isinstance(stop, str) or not stop:
            raise ParameterError(f"a stop string should be a string of at least one character, found {shown(stop)}")
