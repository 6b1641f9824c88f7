"""Names of a vocabulary as bytes, looked up by hashes, beside a dict of strings."""

import random

import numpy as np

from minillm.text.tokenizer.names import Names

ALPHABET = "abé▁🙂\0"


def names_of(words: list[str]) -> Names:
    data = [word.encode() for word in words]
    lengths = np.array(list(map(len, data)))
    return Names(b"".join(data), np.cumsum(lengths) - lengths, lengths)


def test_all_names_in_a_text_are_those_that_a_dict_has() -> None:
    rng = random.Random(1)
    words = list(dict.fromkeys("".join(rng.choices(ALPHABET, k=rng.randrange(1, 6))) for _ in range(900)))
    names, ids = names_of(words), {word: i for i, word in enumerate(words)}
    assert names.unique and list(names) == words and names[-3:] == words[-3:]
    for _ in range(40):
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(40)))
        parts = {text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
        for before in ("", "▁", "ba"):
            behind = {before + part for part in parts}
            assert set(names.inside(text, before)) == {ids[part] for part in parts | behind if part in ids}
        assert names.id_of(text) == ids.get(text)
    assert names.id_of("") is names.id_of("a" * 500) is names.id_of("\ud800") is None
    assert [names.id_of(word) for word in words] == list(range(len(words)))


def test_names_that_stand_twice_are_not_unique() -> None:
    assert not names_of(["a", "bc", "a"]).unique


def test_texts_of_one_hash_are_told_apart() -> None:
    """The sequence of Thue and Morse and its opposite have one hash modulo 2^64, whatever the base."""
    first, second = "a", "b"
    for _ in range(10):
        first, second = first + second, second + first
    assert len(first) == 1024
    assert not names_of([first, second]).unique
    assert names_of([first]).id_of(second) is None
