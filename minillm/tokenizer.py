"""Text to token ids and back, whole or token by token.

The merging itself is done by the `tokenizers` library, set up by tokenizer_files.py. Here is what stands around it: the
two special tokens that the engine asks for, one-line errors, and text that comes token by token.

As in transformers, a special token that is spelled out in the text ("</s>") becomes that token, and special tokens are
left out of decoded text.
"""

import codecs
import re
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ParameterError, PromptError, shown
from .tokenizer_files import BYTE_SYMBOLS, FILES, LAYOUTS, read_tokenizer
from .tokenizer_library import call

if TYPE_CHECKING:
    import tokenizers

__all__ = ["LAYOUTS", "StreamDecoder", "Tokenizer"]

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # a SentencePiece token that stands for one byte
_WHERE = "the checkpoint's tokenizer"
_UTF8_LENGTH = 4  # bytes in the longest character
_PIECE = 2**15  # characters of a long text that are tokenized at once


class Tokenizer:
    """The vocabulary of one checkpoint.

    Attributes:
        bos_token_id: what begins a text; None where the checkpoint names none.
        eos_token_id: what ends a text; None where the checkpoint names none.
        special_ids: ids of the tokens that mark something and are not text.
    """

    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]

    def __init__(self, backend: "tokenizers.Tokenizer", role_ids: dict[str, int], model_vocab_size: int = 0) -> None:
        """Wrap a finished `tokenizers.Tokenizer`; `from_folder` is the usual way to get one.

        Args:
            backend: encodes and decodes.
            role_ids: id of each named special token ("bos_token", "eos_token"), where there is one.
            model_vocab_size: rows of the model's LM head. Often padded beyond the vocabulary: the ids in between can
                be generated and decode to nothing.
        """
        self._backend = backend
        self._model_vocab_size = model_vocab_size
        self.bos_token_id = role_ids.get("bos_token")
        self.eos_token_id = role_ids.get("eos_token")
        added = self._call("get_added_tokens_decoder")
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = backend.decoder
        self._byte_level = decoder is not None and call(_WHERE, decoder.decode, ["aĠ"]) == "a "
        self._byte_fallback = decoder is not None and call(_WHERE, decoder.decode, ["<0x41>"]) == "A"

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint folder.

        Raises:
            ModelNotFoundError: no tokenizer.json, tokenizer.model, or vocab.json with merges.txt is there.
            CheckpointError: a file cannot be read, or the files contradict each other.
            UnsupportedModelError: a tokenizer.model that would not be run exactly, or vocab.json and merges.txt of a
                tokenizer that is neither GPT-2's nor Qwen2's.
        """
        return cls(*read_tokenizer(folder))

    @classmethod
    def from_path(cls, path: Path) -> "Tokenizer":
        """Read the tokenizer of a folder, or a tokenizer.json by whatever name with the settings that lie beside it.

        Raises:
            As `from_folder`.
        """
        return cls(*read_tokenizer(path.parent, path.name)) if path.is_file() else cls.from_folder(path)

    @classmethod
    def find(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a checkpoint folder; None where it holds no file of one.

        Raises:
            As `from_folder`, where some files are there.
        """
        return cls.from_folder(folder) if any((folder / name).exists() for name in FILES) else None

    @cached_property
    def vocab_size(self) -> int:
        """Every id is below it, those of added tokens included."""
        return 1 + max(self._call("get_vocab", with_added_tokens=True).values(), default=-1)

    def to_json(self) -> str:
        """All of it as the text of a tokenizer.json."""
        return str(self._call("to_str"))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text. A special token spelled out in it becomes that token.
            add_special_tokens: add what the model expects around a prompt (OPT: `</s>` in front).

        Raises:
            PromptError: it is no text, or holds a lone surrogate, which is how Python reads bytes that are not UTF-8.
            CheckpointError: the tokenizer is broken in a way that shows only now; so for the other methods.
        """
        _check_text(text)
        return list(self._call("encode", text, add_special_tokens=add_special_tokens).ids)

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a long text surely has more than `limit` tokens. It is told with little of the text tokenized.

        False is no promise that it fits. True is said of a text that

        - has more characters than `limit` times four times the bytes of the longest token: normalising to NFC or NFKC
          takes at most three of four bytes away. Longer runs of white space that a tokenizer drops are counted.
        - comes to more than twice the limit where pieces of it are tokenized one by one. A cut changes the tokens
          beside it, a few in each piece.

        Raises:
            PromptError: as `encode`.
        """
        if len(text) <= max(_PIECE, 8 * limit):  # encoding it takes little memory
            return False
        if len(text) > 4 * self._longest_token * limit:
            return True
        _check_text(text)
        found = 0
        for first in range(0, len(text), _PIECE):
            piece = text[first : first + _PIECE]
            found += len(self._call("encode", piece, add_special_tokens=False).ids)
            if found > 2 * limit:
                return True
        return False

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest text that is one token, or more."""
        return max((len(content.encode()) for content in self._call("get_vocab", with_added_tokens=True)), default=1)

    def for_model(self, vocab_size: int) -> "Tokenizer":
        """This tokenizer beside a model with so many rows of its LM head.

        Raises:
            ParameterError: the vocabulary is larger.
        """
        if self.vocab_size > vocab_size:
            raise ParameterError(
                f"the tokenizer has ids up to {self.vocab_size - 1}, and the model takes {vocab_size} tokens: "
                "it belongs to another model"
            )
        twin = copy(self)
        twin._model_vocab_size = vocab_size
        return twin

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD.

        Raises:
            PromptError: an id is in neither the vocabulary nor the rows that the model has beyond it.
        """
        ids = [self._checked(token_id) for token_id in _sequence(token_ids)]
        return str(self._call("decode", ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        r"""One token as text for a table: " red", "</s>", or r"\xe2\x82" for bytes that are no whole character.

        Line breaks are not escaped. An id without a token (a padded row of the model) is its number in brackets.

        Raises:
            PromptError: as `decode`.
        """
        content = self._call("id_to_token", self._checked(token_id))
        if content is None:
            return f"[{token_id}]"
        if self._byte_level:
            return _symbol_bytes(content).decode("utf-8", "backslashreplace")
        return str(content).replace("▁", " ")  # SentencePiece's sign for a space

    def stream(self, context: Sequence[int] = ()) -> "StreamDecoder":
        """Decode generated tokens one by one.

        Args:
            context: the tokens before the first generated one. The last few are enough: a character may be split
                between them and what follows, and only the very first token of a text loses its leading space.
        """
        return StreamDecoder(self, _sequence(context))

    def __deepcopy__(self, memo: dict[int, object]) -> "Tokenizer":
        """A vocabulary never changes: whatever is copied (a stream, for a search that branches) goes on sharing it."""
        return self

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Every use of the library.

        Raises:
            CheckpointError: it fails; the tokenizer is broken in a way that shows only now.
        """
        return call(_WHERE, getattr(self._backend, method), *args, **kwargs)

    def _checked(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise PromptError(f"a token id should be a whole number, found {shown(value)}")
        token_id, size = int(value), max(self.vocab_size, self._model_vocab_size)
        if not 0 <= token_id < size:
            raise PromptError(f"token id {shown(token_id)} is outside the vocabulary: ids are 0 to {size - 1}")
        return token_id

    def _is_text(self, token_id: int) -> bool:
        """Not a special token, nor an id without a token."""
        return token_id not in self.special_ids and self._call("id_to_token", token_id) is not None

    def _bytes(self, token_id: int, previous: int | None) -> bytes:
        """What a token of text adds in UTF-8, perhaps a part of a character; `previous` is the token of text before."""
        content = str(self._call("id_to_token", token_id))
        if self._byte_level:
            return _symbol_bytes(content)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(content):
            byte = int(content[3:5], 16)
            if previous is not None or byte >= 0x80:  # else it may be the space that a text loses at its beginning
                return bytes([byte])
        if previous is None:
            return str(self._call("decode", [token_id])).encode()
        before = self._call("decode", [previous])
        return str(self._call("decode", [previous, token_id]))[len(before) :].encode()


class StreamDecoder:
    """Text of a generation, token by token, in whole characters.

    All pushed texts and the flushed one together are what `Tokenizer.decode` adds when the generated tokens follow the
    context. (A character that the context leaves unfinished belongs to the generation.) Each token is looked at once,
    and at most three bytes wait.

    One difference is left, outside byte-level tokenizers: where bytes of a SentencePiece vocabulary begin with whole
    characters and end in a broken one, `decode` replaces each of those bytes by U+FFFD, and the stream, which has shown
    the whole characters by then, only those of the broken one.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        """Use `Tokenizer.stream`."""
        self._tokenizer = tokenizer
        # A byte-level decoder writes one U+FFFD for a broken character, a SentencePiece decoder one for each byte.
        errors = "minillm.replace_each_byte" if tokenizer._byte_fallback else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._previous: int | None = None
        ids = map(tokenizer._checked, reversed(context))
        textual = (token_id for token_id in ids if tokenizer._is_text(token_id))
        for token_id in reversed(list(islice(textual, _UTF8_LENGTH))):  # an unfinished character is no longer
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Add a generated token; returns the text that is now certain, "" while a character is incomplete."""
        if not self._tokenizer._is_text(token_id):
            return ""
        new = self._tokenizer._bytes(token_id, self._previous)
        self._previous = token_id
        return self._utf8.decode(new)

    def flush(self) -> str:
        """The generation has ended: returns what is left, an incomplete character as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def _sequence(token_ids: Any) -> Sequence[int]:
    """What may hold token ids.

    Raises:
        PromptError: it is no sequence.
    """
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes | bytearray | memoryview):
        return token_ids
    if getattr(token_ids, "ndim", 0) == 1 and getattr(getattr(token_ids, "dtype", None), "kind", "") in ("i", "u"):
        return token_ids.tolist()  # type: ignore[no-any-return]
    raise PromptError(f"token ids should be a list, found {shown(token_ids)}")


def _check_text(text: str) -> None:
    """Refuse what cannot be encoded.

    Raises:
        PromptError: it is no text, or no valid UTF-8.
    """
    if not isinstance(text, str):
        raise PromptError(f"expected text, found {shown(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = f"byte 0x{code - 0xDC00:02X}" if 0xDC80 <= code <= 0xDCFF else f"lone surrogate U+{code:04X}"
        raise PromptError(f"the text is not valid UTF-8: {what} at character {error.start}") from None


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("minillm.replace_each_byte", _replace_each_byte)


def _symbol_bytes(content: str) -> bytes:
    """Bytes of a byte-level token; an added token may hold other characters than the 256 symbols and is then itself."""
    try:
        return bytes([BYTE_SYMBOLS[symbol] for symbol in content])
    except KeyError:
        return content.encode()
