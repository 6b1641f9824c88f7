"""A tokenizer of a GGUF file of which each text gets a part: the same tokens as from the whole one."""

import random
from pathlib import Path

import pytest

from minillm.formats.gguf.file import read_gguf
from minillm.formats.gguf.tokenizer import read_backend, read_tokenizer
from minillm.text.tokenizer import partial

from ..gguf_files import LLAMA, write_llama

ALPHABET = "abé▁🙂\n"
TEXTS = [
    "",
    " ",
    "a",
    "  ab",
    "ab<mid>ba",
    "<s>ab</s> ba",
    "<mid> <mid>",
    "abab\0ba",
    "zzz ab Z",
    "é\n\n🙂 ba",
    "<0x41>a▁b",
    "ab abé",
]


def file_of(folder: Path, *, spaced: bool = True, with_bytes: bool = True) -> Path:
    """A file with a SentencePiece vocabulary of random pieces, most of which no text has."""
    rng = random.Random(3)
    pieces = {"".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 6))): 0 for _ in range(600)}
    named = ["<unk>", "<s>", "</s>", "<mid>", "b a", *(f"<0x{i:02X}>" for i in range(256 * with_bytes))]
    tokens = [*named, *ALPHABET, *(piece for piece in pieces if piece not in ALPHABET)]
    types = [2, 3, 3, 4, 4, *(6,) * (256 * with_bytes), *(1,) * (len(tokens) - len(named))]
    scores = [float(rng.randrange(-9, 1)) for _ in tokens]
    tokenizer = {"model": "llama", "pre": None, "merges": None, "tokens": tokens, "token_type": types, "scores": scores}
    tokenizer |= {"add_space_prefix": spaced, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    write_llama(folder / "m.gguf", LLAMA | {"vocab_size": len(tokens)}, tokenizer=tokenizer)
    return folder / "m.gguf"


@pytest.mark.longer
@pytest.mark.sampled(4)
@pytest.mark.parametrize("with_bytes", [True, False])
@pytest.mark.parametrize("spaced", [True, False])
def test_each_text_has_the_tokens_of_the_whole_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spaced: bool, with_bytes: bool
) -> None:
    monkeypatch.setattr(partial, "MOST_TEXTS", 10_000)
    header = read_gguf(file_of(tmp_path, spaced=spaced, with_bytes=with_bytes))
    tokenizer = read_tokenizer(header)
    whole, _, _ = read_backend(header)
    rng = random.Random(5)
    pieces = [*ALPHABET, "<mid>", "</s>", " ", "  ", "z"]
    texts = TEXTS + ["".join(rng.choices(pieces, k=rng.randrange(30))) for _ in range(150)]
    for text in texts:
        for framed in (True, False):
            assert (
                tokenizer.encode(text, add_special_tokens=framed) == whole.encode(text, add_special_tokens=framed).ids
            )
    for _ in range(100):
        ids = rng.choices(range(whole.get_vocab_size()), k=rng.randrange(6))
        for skipped in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skipped) == whole.decode(ids, skip_special_tokens=skipped)
    assert "whole" not in vars(tokenizer._backend)
    assert tokenizer.vocab_size == whole.get_vocab_size()
    assert [tokenizer._content(i) for i in range(300)] == [whole.id_to_token(i) for i in range(300)]
    assert tokenizer.to_json() == whole.to_str()


def test_the_whole_tokenizer_is_built_after_a_few_texts_or_for_a_long_one(tmp_path: Path) -> None:
    header = read_gguf(file_of(tmp_path))
    tokenizer = read_tokenizer(header)
    for number in range(partial.MOST_TEXTS + 1):
        assert ("whole" in vars(tokenizer._backend)) == (number > partial.MOST_TEXTS)
        tokenizer.encode("ab")
    assert "whole" in vars(tokenizer._backend)
    another = read_tokenizer(header)
    another.encode("ab " * partial.MOST_CHARACTERS)
    assert "whole" in vars(another._backend)
