"""What makes a large vocabulary quick to load gives what the plain rules give."""

import random
import tracemalloc

import gguf
import numpy as np
import pytest

from minillm.cli.models import describe
from minillm.formats.gguf.file import FILE_TYPES
from minillm.measure.accounting.hardware import Hardware
from minillm.text.tokenizer import sentencepiece
from minillm.text.tokenizer.sentencepiece import merges_by_score

from ..gguf_files import write_llama


def by_the_rule(pieces, scores):
    """Every split into two pieces, by the score of the whole, then by ids."""
    splits = [(text, text[:cut], text[cut:]) for text in pieces for cut in range(1, len(text))]
    known = [split for split in splits if split[1] in pieces and split[2] in pieces]
    known.sort(key=lambda split: (-scores[pieces[split[0]]], pieces[split[1]], pieces[split[2]]))
    return [(left, right) for _, left, right in known]


def some_pieces(rng, count, alphabet="ab\0é▁🙂"):
    texts = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 7))) for _ in range(count)]
    return {text: 3 * i + 1 for i, text in enumerate(dict.fromkeys(texts))}


@pytest.mark.parametrize("count", [0, 1, 2, 30, 3000])
def test_merges_are_every_split_into_two_pieces(count):
    rng = random.Random(count)
    pieces = some_pieces(rng, count)
    scores = [float(rng.randrange(-4, 1)) for _ in range(3 * len(pieces) + 1)]
    assert merges_by_score(pieces, scores) == by_the_rule(pieces, scores)
    assert merges_by_score(pieces, np.float32(scores)) == by_the_rule(pieces, scores)


@pytest.mark.parametrize("base", [0, 1, 2])
def test_texts_of_one_hash_change_nothing(monkeypatch, base):
    """With base 1 the hash of a text is that of its letters in any order; with base 0 that of its last letter."""
    monkeypatch.setattr(sentencepiece, "_BASE", np.uint64(base))
    rng = random.Random(7)
    pieces = some_pieces(rng, 400, "abc")
    scores = [float(rng.randrange(-4, 1)) for _ in range(3 * len(pieces) + 1)]
    assert merges_by_score(pieces, scores) == by_the_rule(pieces, scores)


def test_slots_that_many_hashes_share_are_told_apart():
    hashes = np.arange(1, 2000, dtype=np.uint64) * np.uint64(2**22) + np.uint64(5)
    table = sentencepiece._Table(hashes)
    assert table.unique
    np.testing.assert_array_equal(table.find(hashes), np.arange(len(hashes)))
    np.testing.assert_array_equal(table.find(hashes + np.uint64(2**40)), -1)
    assert not sentencepiece._Table(np.append(hashes, hashes[3])).unique


def test_a_very_long_piece_takes_no_memory():
    pieces = {"a" * n: n for n in (1, 2, 3, 100_000)}
    tracemalloc.start()
    assert merges_by_score(pieces, [0.0] * 100_001) == [("a", "a"), ("a", "aa"), ("aa", "a")]
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


def test_file_types_have_llama_cpps_names():
    theirs = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in gguf.LlamaFileType}
    assert FILE_TYPES.items() <= theirs.items()


@pytest.mark.parametrize(("code", "name"), [(15, "Q4_K_M"), (7, "Q8_0"), (None, "F32"), (999, "F32")])
def test_a_file_is_listed_by_its_own_type(tmp_path, monkeypatch, code, name):
    """That of most numbers is the embedding's, in a small model with many tokens."""
    if code is not None:
        original = gguf.GGUFWriter.write_header_to_file

        def with_type(writer):
            writer.add_file_type(code)
            original(writer)

        monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_type)
    write_llama(tmp_path / "m.gguf")
    machine = Hardware(name="a machine", rates={"float32": 1e12}, bandwidth=1e11, memory=10**10, source="made up")
    assert describe("m", tmp_path / "m.gguf", "", machine).format == f"GGUF {name}"
