"""Streaming: text piece by piece, against decoding the whole."""

import copy
import random
from itertools import chain

import pytest
import tokenizers
from tokenizers import decoders, models

from minillm.errors import PromptError
from minillm.text.tokenizer import Tokenizer

from ..tokenizing import SMALL, TEXTS, streamed


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.from_folder(SMALL)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte, whatever the merges would do."""
    alphabet = {tokenizer.token(i): i for i in range(4, 260)}
    return [alphabet[bytes([byte]).decode("utf-8", "backslashreplace")] for byte in data]


def test_stream_gives_what_decode_gives(small):
    draw = random.Random(4)
    for _ in range(500):
        ids = [draw.randrange(small.vocab_size) for _ in range(draw.randrange(1, 30))]  # mostly broken UTF-8
        assert streamed(small, ids) == small.decode(ids)


def test_stream_writes_special_tokens_out_as_decode_does(small):
    draw = random.Random(6)
    for _ in range(300):
        ids = [
            draw.choice([draw.randrange(small.vocab_size), *small.special_ids]) for _ in range(draw.randrange(1, 20))
        ]
        decoder = small.stream((), frozenset())
        shown = "".join(map(decoder.push, ids)) + decoder.flush()
        assert shown == small.decode(ids, skip_special_tokens=False)
    (special,) = sorted(small.special_ids)[:1]
    decoder = small.stream((), frozenset({special}))
    assert decoder.push(special) == ""  # as the one that ends a text


@pytest.mark.slow
def test_stream_of_single_bytes_gives_what_decode_gives(small):
    draw = random.Random(5)
    telling = b"a\x80\x9f\xa0\xbf\xc0\xc3\xe0\xe2\xed\xf0\xf4\xf5\xff"  # where UTF-8's rules differ
    for _ in range(1000):
        ids = byte_ids(small, bytes(draw.choices(telling, k=draw.randrange(1, 12))))
        assert streamed(small, ids) == small.decode(ids)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", [text for text in TEXTS if "\ufffd" not in text])
def test_stream_gives_whole_characters_after_any_context(small, text):
    ids = small.encode(text)
    text = small.decode(ids)
    for cut in range(len(ids) + 1):
        settled = small.decode(ids[:cut]).rstrip("\ufffd")  # what the context says, without an unfinished character
        decoder = small.stream(ids[:cut])
        shown = settled
        for n in range(cut, len(ids)):
            shown += decoder.push(ids[n])
            assert shown == small.decode(ids[: n + 1]).rstrip("\ufffd")
        assert shown + decoder.flush() == text


def test_stream_shows_broken_bytes_as_soon_as_they_cannot_become_a_character(small):
    decoder = small.stream()
    lead, follow, letter = byte_ids(small, b"\xe2\x82a")
    assert decoder.push(follow) == "\ufffd"  # nothing begins with it
    assert decoder.push(lead) == ""
    assert decoder.push(follow) == ""
    assert decoder.push(lead) == "\ufffd"
    assert decoder.push(letter) == "\ufffda"
    assert all(decoder.push(follow) == "\ufffd" for _ in range(1000))
    assert decoder.push(lead) == ""
    assert decoder.flush() == "\ufffd"


def test_stream_skips_special_tokens_even_inside_a_character(small):
    first, *rest = byte_ids(small, "€".encode())
    ids = [2, first, 1, *rest, 2]
    assert streamed(small, ids) == small.decode(ids) == "€"


def test_a_copied_stream_goes_its_own_way(small):
    first, *rest = byte_ids(small, "€".encode())
    one = small.stream()
    assert one.push(first) == ""
    other = copy.deepcopy(one)
    assert [one.push(i) for i in rest] == ["", "€"]
    assert other.flush() == "\ufffd"
    assert other._tokenizer is small  # a large vocabulary is not copied with each branch of a search


SPACE = decoders.Replace("▁", " ")
SENTENCEPIECE_DECODERS = {
    "metaspace": decoders.Metaspace(),
    "llama": decoders.Sequence([SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence([SPACE, decoders.ByteFallback(), decoders.Fuse()]),
    "suffix": decoders.BPEDecoder(suffix="e"),
    "none": None,
}
PIECES = ["▁", "▁a", "▁the", "b", "e", "▁▁", "é", "日", "<0x41", ".", "the", "a▁b"]


def sentencepiece(decoder, inner=lambda backend: backend) -> Tokenizer:
    """Token 0 is special; 1 to 256 are the bytes; the rest are pieces."""
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return Tokenizer(inner(backend), {"bos_token": 0})


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SENTENCEPIECE_DECODERS)
def test_stream_of_other_decoders_gives_what_decode_gives(name):
    tokenizer = sentencepiece(SENTENCEPIECE_DECODERS[name])
    draw = random.Random(6)
    for _ in range(500):
        groups = []
        for _ in range(draw.randrange(1, 12)):
            character = [1 + byte for byte in draw.choice("é€😀").encode()]
            piece = 257 + draw.randrange(len(PIECES))
            # A broken character may only follow a piece: see StreamDecoder on runs of bytes.
            groups.append(draw.choice([[0], [piece], [piece], character, [piece, *character[:-1], piece]]))
        cut = draw.randrange(len(groups) + 1)
        context, generated = list(chain(*groups[:cut])), list(chain(*groups[cut:]))
        whole, before = tokenizer.decode(context + generated), tokenizer.decode(context)
        assert streamed(tokenizer, generated, context) == whole[len(before) :]
        assert streamed(tokenizer, context + generated) == whole


def test_stream_decodes_a_bounded_number_of_tokens_at_a_time():
    seen = []

    class Watched:
        def __init__(self, backend):
            self.backend = backend

        def __getattr__(self, name):
            return getattr(self.backend, name)

        def decode(self, ids, **options):
            seen.append(len(ids))
            return self.backend.decode(ids, **options)

    tokenizer = sentencepiece(SENTENCEPIECE_DECODERS["llama"], inner=Watched)
    draw = random.Random(7)
    streamed(tokenizer, draw.choices(range(len(PIECES) + 257), k=500), context=[258] * 500)
    assert max(seen) <= 2
    assert sum(seen) <= 3 * (500 + 4)


@pytest.mark.parametrize("token_id", [{}, [5], 1.5, True, None, -1, 10**30, "a"], ids=repr)
def test_an_id_that_is_none_is_one_line(small: Tokenizer, token_id) -> None:
    with pytest.raises(PromptError, match="token id"):
        small.stream().push(token_id)
