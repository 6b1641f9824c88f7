"""Text to token ids and back, whole or token by token.

The encoding itself is done by the `tokenizers` library, configured by layouts.py. This module adds the two
special tokens that the engine needs, one-line errors, and incremental decoding.

As in transformers, a special token that is spelled out in the text ("</s>") becomes that token, unless the checkpoint
has `split_special_tokens`, and special tokens are left out of decoded text.
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

from ...errors import ParameterError, PromptError, shown
from .cleaning import Cleaner, cleaned
from .guarded import call
from .layouts import BYTE_SYMBOLS, FILES, read_tokenizer
from .seq2seq import Languages
from .settings import Manner
from .turn_ends import turn_ends

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # a SentencePiece token for one byte
_WHERE = "the checkpoint's tokenizer"
_UTF8_LENGTH = 4  # bytes in the longest character
PIECE = 2**15  # characters of a long text tokenized at once
_PLAIN = Manner()


class Tokenizer:
    """The tokenizer of one checkpoint.

    Attributes:
        bos_token_id: beginning-of-sequence token; None if the checkpoint names none.
        eos_token_id: end-of-sequence token; None if the checkpoint names none.
        mask_token_id: the token that masked language models fill; None if the checkpoint names none.
        special_ids: ids of the special tokens, which are not text.
        added_ids: ids of the added tokens, special or not, by their text: each is one token wherever a text has it.
        end_ids: tokens that end a text or a turn, where a file says so of several (GGUF); else empty.
        languages: code and token of each language of an mBART; else empty. The token of the language to translate into
            is a request's `forced_bos_token_id`.
    """

    bos_token_id: int | None
    eos_token_id: int | None
    mask_token_id: int | None
    special_ids: frozenset[int]
    added_ids: dict[str, int]
    end_ids: tuple[int, ...] = ()

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        role_ids: dict[str, int],
        model_vocab_size: int = 0,
        languages: Languages | None = None,
        manner: Manner = _PLAIN,
        fresh: int = 0,
    ) -> None:
        """Wrap a finished `tokenizers.Tokenizer`; `from_folder` is the usual way to get one.

        Args:
            backend: encodes and decodes.
            role_ids: id of each named special token ("bos_token", "eos_token") that exists.
            model_vocab_size: rows of the model's LM head. Often padded beyond the vocabulary: the extra ids can be
                generated and decode to nothing.
            languages: an mBART's, which puts the token of a text's language beside it.
            manner: what its settings change around encoding and decoding.
            fresh: number of its last ids that the vocabulary has from its settings.
        """
        self._backend = backend
        self._manner, self._fresh = manner, fresh
        self._languages = languages
        self.languages: dict[str, int] = {} if languages is None else languages.ids
        self._model_vocab_size = model_vocab_size
        self._contents: dict[int, str | None] = {}
        self._text_bytes: dict[int, bytes] = {}
        self.bos_token_id = role_ids.get("bos_token")
        self.eos_token_id = role_ids.get("eos_token")
        self.mask_token_id = role_ids.get("mask_token")
        added = self._call("get_added_tokens_decoder")
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_ids = {str(token.content): token_id for token_id, token in sorted(added.items())}
        decoder = backend.decoder
        self._byte_level = decoder is not None and call(_WHERE, decoder.decode, ["aĠ"]) == "a "
        self._byte_fallback = decoder is not None and call(_WHERE, decoder.decode, ["<0x41>"]) == "A"

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint folder.

        Raises:
            As `read_tokenizer`.
        """
        return cls(*read_tokenizer(folder))

    @classmethod
    def from_path(cls, path: Path) -> "Tokenizer":
        """Read the tokenizer of a folder, or a tokenizer.json of any name with the settings files in its folder.

        Raises:
            As `from_folder`.
        """
        return cls(*read_tokenizer(path.parent, path.name)) if path.is_file() else cls.from_folder(path)

    @classmethod
    def find(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a checkpoint folder; None if it has no tokenizer files.

        Raises:
            As `from_folder`, if there are some.
        """
        return cls.from_folder(folder) if any((folder / name).exists() for name in FILES) else None

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: the largest id + 1."""
        return 1 + max(self._call("get_vocab", with_added_tokens=True).values(), default=-1)

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """Tokens that end a turn of a conversation: the EOS token, `end_ids`, and tokens with such a name."""
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        return tuple(dict.fromkeys([*own, *self.end_ids, *turn_ends(self.added_ids)]))

    @property
    def splits_special(self) -> bool:
        """True if a special token that is spelled out in a text is split as any other (`split_special_tokens`)."""
        return bool(self._backend.encode_special_tokens)

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return str(self._call("to_str"))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text. A special token spelled out in it becomes that token, unless `splits_special`.
            add_special_tokens: add the special tokens that the model expects around a prompt (OPT: `</s>` in front).

        Raises:
            PromptError: it is not text, or has a lone surrogate, which is how Python reads bytes that are not UTF-8.
            CheckpointError: the tokenizer is broken in a way detected only on use; likewise in the other methods.
        """
        check_text(text)
        languages = self._languages if add_special_tokens else None
        framed = add_special_tokens and languages is None
        ids = list(self._call("encode", text, add_special_tokens=framed).ids)
        return ids if languages is None else languages.around(ids)

    def reading(self, language: str) -> "Tokenizer":
        """This tokenizer of an mBART for texts in another language than `src_lang` of tokenizer_config.json.

        Args:
            language: one of `languages`, such as "en_XX"

        Raises:
            ParameterError: it is none of them.
        """
        if self._languages is None:
            raise ParameterError(f"language {shown(language)}: this tokenizer has no languages, which are mBART's")
        twin = copy(self)
        twin._languages = self._languages.read_as(language)
        return twin

    @cached_property
    def lacks_end(self) -> bool:
        """True if texts to embed should end in the EOS token, and the rules for special tokens add none."""
        return self._manner.ends_embedded and self.encode("a")[-1:] != [self.eos_token_id]

    def exceeds(self, text: str, limit: int) -> bool:
        """True if a long text certainly has more than `limit` tokens, found without tokenizing most of it.

        False does not guarantee that it fits.

        Raises:
            PromptError: as `encode`.
        """
        if len(text) <= max(PIECE, 8 * limit):  # encoding it takes little memory
            return False
        from .long_texts import exceeds  # seldom needed

        return exceeds(self, text, limit)

    @cached_property
    def longest_token(self) -> int:
        """Upper bound of the bytes of text in one token."""
        return max((len(content.encode()) for content in self._call("get_vocab", with_added_tokens=True)), default=1)

    def for_model(self, vocab_size: int) -> "Tokenizer":
        """This tokenizer for a model whose LM head has `vocab_size` rows.

        Raises:
            ParameterError: the tokenizer's vocabulary is larger.
        """
        if self.vocab_size - self._fresh > vocab_size:
            raise ParameterError(
                f"the tokenizer has ids up to {self.vocab_size - 1}, and the model takes {vocab_size} tokens: "
                "it belongs to another model"
            )
        twin = copy(self)
        twin._model_vocab_size = vocab_size
        return twin

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Invalid UTF-8 becomes U+FFFD.

        Raises:
            PromptError: an id is outside the vocabulary and the model's padded rows.
        """
        ids = [self._checked(token_id) for token_id in _sequence(token_ids)]
        text = str(self._call("decode", ids, skip_special_tokens=skip_special_tokens))
        return cleaned(text) if self._manner.cleaned else text

    def token(self, token_id: int) -> str:
        r"""One token as text for display: " red", "</s>", or r"\xe2\x82" for bytes that are not a whole character.

        Line breaks are not escaped. An id without a token (a padded row of the model) is its number in brackets.

        Raises:
            PromptError: as `decode`.
        """
        content = self._content(self._checked(token_id))
        if content is None:
            return f"[{token_id}]"
        if self._byte_level:
            return _symbol_bytes(content).decode("utf-8", "backslashreplace")
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(content):
            return bytes([int(content[3:5], 16)]).decode("utf-8", "backslashreplace")
        return str(content).replace("▁", " ")  # SentencePiece's sign for a space

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token within a text, perhaps of a part of a character.

        A special token's bytes are its name's. An id without a token (a padded row of the model)
        has none.

        Raises:
            PromptError: as `decode`.
        """
        if token_id not in self._text_bytes:
            token_id = self._checked(token_id)
            if self._is_text(token_id):
                content = self._bytes(token_id, None if self._byte_level else self._some_word)
            else:
                content = (self._content(token_id) or "").encode()
            self._text_bytes[token_id] = content
        return self._text_bytes[token_id]

    @cached_property
    def _some_word(self) -> int | None:
        """A token of letters, after which a token's bytes are those that it has within a text."""
        texts = ((token, self._call("decode", [token])) for token in range(self.vocab_size) if self._is_text(token))
        return next((token for token, text in texts if text.isalpha()), None)

    def stream(self, context: Sequence[int] = (), hidden: frozenset[int] | None = None) -> "StreamDecoder":
        """A decoder for generated tokens one by one.

        Args:
            context: the tokens before the first generated one. The last few suffice: a character may be split
                    between them and the generated ones, and only the first token of a text loses its leading space.
            hidden: special tokens that are left out of the text; by default all
        """
        return StreamDecoder(self, _sequence(context), self.special_ids if hidden is None else hidden)

    def __deepcopy__(self, memo: dict[int, object]) -> "Tokenizer":
        """The tokenizer itself: it is immutable, so copies (of a stream, for a search that branches) share it."""
        return self

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the library's tokenizer.

        Raises:
            CheckpointError: it fails: the tokenizer is broken in a way detected only on use.
        """
        return call(_WHERE, getattr(self._backend, method), *args, **kwargs)

    def token_id(self, token: str) -> int | None:
        """The id of a token by the library's name of it; None if there is none."""
        token_id = self._call("token_to_id", token)
        return None if token_id is None else int(token_id)

    def _content(self, token_id: int) -> str | None:
        """The library's name of a token, asked for once; None if the id has no token."""
        if token_id not in self._contents:
            self._contents[token_id] = self._call("id_to_token", token_id)
        return self._contents[token_id]

    def _checked(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise PromptError(f"a token id should be a whole number, found {shown(value)}")
        token_id, size = int(value), max(self.vocab_size, self._model_vocab_size)
        if not 0 <= token_id < size:
            raise PromptError(f"token id {shown(token_id)} is outside the vocabulary: ids are 0 to {size - 1}")
        return token_id

    def _is_text(self, token_id: int) -> bool:
        """True unless the id is a special token or has no token."""
        return token_id not in self.special_ids and self._content(token_id) is not None

    def _bytes(self, token_id: int, previous: int | None) -> bytes:
        """UTF-8 bytes that a text token adds, possibly part of a character; `previous` is the token before it."""
        content = str(self._content(token_id))
        if self._byte_level:
            return _symbol_bytes(content)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(content):
            byte = int(content[3:5], 16)
            if previous is not None or byte >= 0x80:  # else it may be the leading space that a text loses
                return bytes([byte])
        before = [] if previous is None else [previous]
        first = len(self._call("decode", before, skip_special_tokens=False))
        return str(self._call("decode", [*before, token_id], skip_special_tokens=False))[first:].encode()


class StreamDecoder:
    """Incremental decoder: text of a generation, token by token, in whole characters.

    The concatenated results of `push` and `flush` are the text that `Tokenizer.decode` adds when the generated tokens
    follow the context. (A character left unfinished by the context belongs to the generation.) Each token is decoded
    once, and at most three bytes are held back.

    One difference remains, outside byte-level tokenizers: if byte tokens of a SentencePiece vocabulary begin with whole
    characters and end in a broken one, `decode` replaces all of these bytes by U+FFFD, and the stream, which has
    already emitted the whole characters, only the broken one's.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], hidden: frozenset[int]) -> None:
        """Use `Tokenizer.stream` instead."""
        self._tokenizer = tokenizer
        self._written = tokenizer.special_ids - hidden  # special tokens whose names are text
        # A byte-level decoder writes one U+FFFD for a broken character, a SentencePiece decoder one for each byte.
        errors = "minillm.replace_each_byte" if tokenizer._byte_fallback else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._previous: int | None = None
        self._cleaner = Cleaner() if tokenizer._manner.cleaned else None
        ids = map(tokenizer._checked, reversed(context))
        textual = (token_id for token_id in ids if tokenizer._is_text(token_id))
        for token_id in reversed(list(islice(textual, _UTF8_LENGTH))):  # an unfinished character is no longer
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Add a generated token; returns the text completed by it, "" while a character is incomplete.

        Raises:
            PromptError: as `Tokenizer.decode`.
        """
        text = self._text(token_id)
        return text if self._cleaner is None else self._cleaner.push(text)

    def flush(self) -> str:
        """End the generation; returns the remaining text, an incomplete character as U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        return text if self._cleaner is None else self._cleaner.push(text) + self._cleaner.flush()

    def _text(self, token_id: int) -> str:
        """The text that a token completes, as the library decodes it."""
        tokenizer = self._tokenizer
        token_id = tokenizer._checked(token_id)
        if tokenizer._byte_level and token_id not in tokenizer.special_ids:
            return self._utf8.decode(tokenizer.token_bytes(token_id))  # which are kept: they depend on nothing before
        if token_id in self._written:
            self._previous = token_id
            return self._utf8.decode(b"", final=True) + str(tokenizer._content(token_id))
        if not tokenizer._is_text(token_id):
            return ""
        new = tokenizer._bytes(token_id, self._previous)
        self._previous = token_id
        return self._utf8.decode(new)


def _sequence(token_ids: Any) -> Sequence[int]:
    """Check that a value is a sequence or 1-d integer array, and return it as a sequence.

    Raises:
        PromptError: it is neither.
    """
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes | bytearray | memoryview):
        return token_ids
    if getattr(token_ids, "ndim", 0) == 1 and getattr(getattr(token_ids, "dtype", None), "kind", "") in ("i", "u"):
        return token_ids.tolist()  # type: ignore[no-any-return]
    raise PromptError(f"token ids should be a list, found {shown(token_ids)}")


def check_text(text: str) -> None:
    """Refuse text that cannot be encoded.

    Raises:
        PromptError: it is not a string, or not valid Unicode.
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
    """Bytes of a byte-level token; an added token with characters other than the 256 symbols is encoded as it is."""
    try:
        return bytes([BYTE_SYMBOLS[symbol] for symbol in content])
    except KeyError:
        return content.encode()
