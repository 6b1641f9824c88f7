"""The demo model's corpus: the same for the same seed, true, and without the combinations that are held out.

What a text says is read back from the text alone, with expressions that know nothing of the generator.
"""

import json
import re
from collections.abc import Callable
from itertools import islice

import demo_words as words
import pytest
from demo_corpus import KINDS, Document, held_out_documents, held_out_text, training_documents

from minillm.measure.precision import HELD_OUT

ARITHMETIC = re.compile(
    r"(?P<a>\d+) (?P<sign>[-+x]) (?P<b>\d+) = (?P<c>\d+)\."
    r"|What is (?P<a2>\d+) (?P<sign2>plus|minus|times) (?P<b2>\d+)\? (?P<c2>\d+)\."
    r"|\w+ has (?P<a3>\d+) \w+ and (?P<sign3>gets|gives) (?P<b3>\d+) (?:more|away)\. Now \w+ has (?P<c3>\d+) \w+\."
)
HERO = re.compile(r"\ba (?:\w+) (\w+) (?:named|called) (\w+)")


@pytest.fixture(scope="module")
def training() -> list[Document]:
    return list(islice(training_documents(seed=7), 12_000))


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[Document]]:
    return held_out_documents(per_kind=40)


def of_kind(documents: list[Document], kind: str) -> list[str]:
    return [document.text for document in documents if document.kind == kind]


def sum_terms(text: str) -> tuple[int, int, str, int]:
    match = ARITHMETIC.fullmatch(text)
    assert match, text
    a, b, c = (int(next(match[name + n] for n in ("", "2", "3") if match[name + n])) for name in "abc")
    word = match["sign"] or match["sign2"] or match["sign3"]
    return a, b, {"plus": "+", "gets": "+", "minus": "-", "gives": "-", "times": "x"}.get(word, word), c


def summands(text: str) -> frozenset[int] | None:
    """The two numbers that a sum adds or a difference takes apart; None for a product."""
    a, b, sign, c = sum_terms(text)
    return None if sign == "x" else frozenset((a, b) if sign == "+" else (b, c))


def list_items(text: str) -> list[str]:
    return text.split(": ", 1)[1].removesuffix(".").split(", ")


def hero_and_object(text: str) -> tuple[str, str]:
    (hero,) = {hero for hero, _ in HERO.findall(text)}
    (thing,) = set(re.findall(r"\w+", text)) & set(words.OBJECTS)
    return hero, thing


def name_and_city(text: str) -> tuple[str, str]:
    record = json.loads(text[text.index("{") :])
    return record["name"], record["city"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_texts_and_another_gives_others() -> None:
    first, again, other = ([d.text for d in islice(training_documents(seed), 200)] for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert held_out_text(5) == held_out_text(5) != held_out_text(5, seed=1)


@pytest.mark.slow
def test_every_kind_occurs(training: list[Document], held_out: dict[str, list[Document]]) -> None:
    assert {document.kind for document in training} == set(KINDS) == set(held_out)
    assert all(len({d.text for d in documents}) == len(documents) >= 20 for documents in held_out.values())


@pytest.mark.longer
def test_arithmetic_is_right(training: list[Document]) -> None:
    operations = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}
    for text in of_kind(training, "arithmetic"):
        a, b, sign, c = sum_terms(text)
        assert operations[sign](a, b) == c, text


def test_counts_go_from_their_start_to_their_end_by_their_step(training: list[Document]) -> None:
    steps = {"": 1, "down ": -1, "by twos ": 2, "by tens ": 10}
    for text in of_kind(training, "counting"):
        match = re.fullmatch(r"Count (down |by twos |by tens |)(?:from (\d+) )?to (\d+): (.*)\.", text)
        assert match, text
        numbers = [int(number) for number in match[4].split(", ")]
        step = steps[match[1]]
        assert numbers == list(range(int(match[2] or 1), int(match[3]) + (1 if step > 0 else -1), step)), text


def test_lists_do_not_repeat_and_end_in_the_canonical_order(training: list[Document]) -> None:
    canonical = {name: items.split() for names, items in words.LISTS.items() for name in names}
    unchanged = 0
    for text in of_kind(training, "lists"):
        heading, items = text.split(":")[0], list_items(text)
        name = re.sub(r"^(a list of|some|here is a list of) (?:(?:two|three|four|five|six) )?", "", heading.lower())
        order = canonical[name]
        assert len(set(items)) == len(items), text
        assert items[3:] == [item for item in order if item in items[3:]], text
        unchanged += items == order[: len(items)]
    assert unchanged > len(of_kind(training, "lists")) / 2


def test_a_story_names_one_hero_and_one_object(training: list[Document]) -> None:
    people = {*words.GIRLS, *words.BOYS}
    for text in of_kind(training, "stories"):
        hero_and_object(text)  # exactly one of each, or it fails
        assert set(re.findall(r"\w+", text)) & people == {HERO.findall(text)[0][1]}, text


def test_records_say_what_their_sentence_says(training: list[Document]) -> None:
    for text in of_kind(training, "records"):
        sentence, record = text[: text.index("{")], json.loads(text[text.index("{") :])
        if sentence:
            said = [record["name"], record["age"], record["city"], *record.get("likes", [record.get("pet")])]
            assert all(re.search(rf"\b{word}\b", sentence) for word in said), text


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "combination"),
    [
        ("arithmetic", summands),
        ("stories", hero_and_object),
        ("records", name_and_city),
        ("counting", lambda text: text.split(":")[0]),
        ("questions", lambda text: text),
    ],
)
def test_held_out_combinations_never_occur_in_training(
    kind: str, combination: Callable[[str], object], training: list[Document], held_out: dict[str, list[Document]]
) -> None:
    kept = {combination(document.text) for document in held_out[kind]}
    read = {combination(text) for text in of_kind(training, kind)}
    assert len(kept) > 10 and None not in kept
    assert not kept & read


@pytest.mark.longer
def test_held_out_openings_of_lists_never_occur_in_training(
    training: list[Document], held_out: dict[str, list[Document]]
) -> None:
    def opening(text: str) -> tuple[str, ...]:
        return tuple(list_items(text)[:2])

    kept = {opening(d.text) for d in held_out["lists"] if len(d.combination) == 3}
    assert len(kept) > 10
    assert not kept & {opening(text) for text in of_kind(training, "lists")}


def test_every_fact_is_trained_in_some_form(training: list[Document]) -> None:
    """A held-out question asks for a fact that other sentences have told."""
    told = {document.combination[:2] for document in training if document.kind == "questions"}
    assert told == {(relation, subject) for relation, (_, _, facts) in words.RELATIONS.items() for subject in facts}


@pytest.mark.slow
def test_the_package_ships_some_of_the_held_out_texts():
    documents = held_out_documents(30).values()
    assert HELD_OUT.read_text(encoding="utf-8") == "</s>".join(d.text for several in documents for d in several) + "\n"
