"""Shared by the tests of tokenizers: folders, texts, streaming, and the live comparison with transformers."""

import json
import random
import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from minillm.text.tokenizer import Tokenizer

SMALL = Path(__file__).parent / "data" / "tokenizer"
SETTINGS = json.loads((SMALL / "tokenizer_config.json").read_text(encoding="utf-8"))
GOLDEN = json.loads((SMALL / "golden.json").read_text(encoding="utf-8"))
TEXTS = [case["text"] for case in GOLDEN["encode"]]


def folder_with(folder: Path, source: Path, *names: str, **objects: dict) -> Path:
    """A checkpoint folder with copies of the named files, and a JSON file for each object."""
    for name in names:
        shutil.copyfile(source / name, folder / name)
    for name, value in objects.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def streamed(tokenizer: Tokenizer, generated: Sequence[int], context: Sequence[int] = ()) -> str:
    decoder = tokenizer.stream(context)
    return "".join(decoder.push(i) for i in generated) + decoder.flush()


def random_texts(count: int) -> list[str]:
    """Letters, spaces, signs, special tokens spelled out, and characters of one to four bytes."""
    draw = random.Random(8)
    parts = [
        "a",
        "Word",
        " ",
        "  ",
        "\n",
        "\t",
        "'s",
        "'LL",
        "1",
        "42",
        ".",
        "?!",
        "é",
        "e\u0301",
        "ß",
        "€",
        "日本",
        "😀",
    ]
    parts += ["👨\u200d👩", "\u00a0", "\u3000", "\u200b", "я", "ع", "𝔘", "\x00", "\ufffd"]
    parts += ["</s>", "<pad>", "<s>", "<unk>", "<mask>", "<|turn|>", "naïve word"]
    return ["".join(draw.choices(parts, k=draw.randrange(1, 15))) for _ in range(count)]


def random_ids(tokenizer: Tokenizer, draw: random.Random, count: int) -> list[int]:
    """Any ids; only of "<0x41>" and its kin whole characters, or the first bytes of one between other tokens.

    Of longer runs of broken bytes `decode` makes something else than a stream: see StreamDecoder.
    """
    byte_ids, others, ordinary = ids_by_kind(tokenizer)
    if not byte_ids:
        return draw.choices(others, k=count)
    groups = []
    for _ in range(count):
        character = [byte_ids[byte] for byte in draw.choice(" \nAé€😀").encode()]
        broken = [draw.choice(ordinary), *character[:-1], draw.choice(ordinary)]
        groups.append(draw.choice([[draw.choice(others)], [draw.choice(others)], character, broken]))
    return [i for group in groups for i in group]


@cache
def ids_by_kind(tokenizer: Tokenizer) -> tuple[dict[int, int], list[int], list[int]]:
    """The tokens of bytes by their bytes, all others, and those that are not special."""
    tokens = [
        tokenizer._call("id_to_token", i) or "" for i in range(tokenizer.vocab_size)
    ]  # as the vocabulary has them
    byte_ids = {int(text[3:5], 16): i for i, text in enumerate(tokens) if re.fullmatch("<0x[0-9A-F]{2}>", text)}
    others = [i for i in range(tokenizer.vocab_size) if i not in byte_ids.values()]
    return byte_ids, others, [i for i in others if i not in tokenizer.special_ids]


def reference_tokenizer(folder: Path):
    transformers = pytest.importorskip("transformers", reason="the live comparison needs the reference extra")
    return transformers.AutoTokenizer.from_pretrained(folder)


def assert_equal_to_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), reference_tokenizer(folder)
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS + random_texts(200):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
    draw = random.Random(9)
    for _ in range(200):
        ids = random_ids(ours, draw, 20)
        assert ours.decode(ids) == streamed(ours, ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
