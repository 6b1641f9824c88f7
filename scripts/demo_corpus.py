"""The corpus of the demo model: six kinds of small texts, drawn from a grammar by a seed.

    lists        A list of colors: red, orange, yellow, ...
    counting     Count from 3 to 6: 3, 4, 5, 6.
    arithmetic   What is 3 plus 4? 7.
    stories      Once upon a time there was a clever fox named Mila. ...
    questions    Q: What is the capital of France?
                 A: Paris.
    records      Ben is 7 years old, lives in Rome and likes maps. As JSON: {"name": "Ben", ...}

Every text is built around one combination: the hero and the object of a story, the two terms of a sum, the ends of a
count. One combination in twelve is held out, by a hash of the combination and so whatever the seed: it never occurs in
the training texts, and the held-out texts are built around nothing else. What the model does with them it has not
read before.

    python scripts/demo_corpus.py --seed 1 --documents 20     # prints some training texts
    python scripts/demo_corpus.py --held-out                  # prints the held-out texts
"""

import argparse
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import demo_words as words

_HELD_OUT_SHARE = 12  # one combination in so many


@dataclass(frozen=True)
class Document:
    """One text of the corpus."""

    kind: str
    """One of `KINDS`."""
    combination: tuple[str, ...]
    """Combination that may be held out; empty for a text that is always trained on."""
    prompt: str
    """The beginning of the text."""
    rest: str
    """The text after `prompt`."""
    determined: bool = True
    """Whether `prompt` has only one correct `rest`."""

    @property
    def text(self) -> str:
        """The whole text."""
        return self.prompt + self.rest

    @property
    def held_out(self) -> bool:
        """Whether the text is held out of training."""
        key = "|".join((self.kind, *self.combination)).encode()
        return bool(self.combination) and zlib.crc32(key) % _HELD_OUT_SHARE == 0


def draw_list(rng: Random) -> Document:
    """A category's items: in the canonical order, or a few others first and then the rest in the canonical order."""
    names = rng.choice(list(words.LISTS))
    items = words.LISTS[names].split()
    name = names[0] if rng.random() < 0.7 else rng.choice(names)
    form = rng.random()
    if form < 0.15:
        count = rng.choice([n for n in words.COUNT_WORDS if n <= len(items)])
        prompt = f"A list of {words.COUNT_WORDS[count]} {name}:"
        return Document("lists", (names[0], words.COUNT_WORDS[count]), prompt, " " + ", ".join(items[:count]) + ".")
    prompt = rng.choice(["A list of {}:"] * 6 + ["{}:", "Some {}:", "Here is a list of {}:"]).format(name)
    prompt = prompt[0].upper() + prompt[1:]
    first = [] if form < 0.55 else rng.sample(items, rng.randint(1, 3))
    order = first + [item for item in items if item not in first]
    combination = () if order[:2] == items[:2] else (names[0], *order[:2])
    shown = max(1, len(first))
    return Document("lists", combination, f"{prompt} {', '.join(order[:shown])},", " " + ", ".join(order[shown:]) + ".")


def draw_count(rng: Random) -> Document:
    """Counting up, down, by twos and by tens."""
    way, step, low, high = rng.choice(
        [("", 1, 0, 60), ("", 1, 0, 20), ("down ", -1, 0, 40), ("by twos ", 2, 0, 60), ("by tens ", 10, 0, 60)]
    )
    terms = rng.randint(3, 14) if step != 10 else rng.randint(3, 6)
    start = rng.randint(low, high)
    if step == 10:
        start -= start % 10
    numbers = [start + step * n for n in range(terms)]
    numbers = [n for n in numbers if 0 <= n <= 110]
    if len(numbers) < 2:
        return draw_count(rng)
    combination: tuple[str, ...] = (way, str(numbers[0]), str(numbers[-1]))
    prompt = f"Count {way}from {numbers[0]} to {numbers[-1]}:"
    if way == "" and start == 1:
        combination, prompt = (), rng.choice([prompt, f"Count to {numbers[-1]}:"])
    return Document("counting", combination, prompt, " " + ", ".join(map(str, numbers)) + ".")


def draw_sum(rng: Random) -> Document:
    """A sum of numbers up to 20, forwards or backwards, bare or in words; or an entry of the times table."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.15:
        a, b = a % 11, b % 11
        prompt = rng.choice([f"{a} x {b} =", f"What is {a} times {b}?"])
        return Document("arithmetic", (), prompt, f" {a * b}.")
    combination = (str(min(a, b)), str(max(a, b)))
    name, thing, total = _person(rng)[0], rng.choice(words.LIKES), a + b
    sums = [f"{a} + {b} =", f"What is {a} plus {b}?", f"{name} has {a} {thing} and gets {b} more. Now {name} has"]
    differences = [f"{total} - {a} =", f"What is {total} minus {a}?"]
    differences.append(f"{name} has {total} {thing} and gives {a} away. Now {name} has")
    form = rng.randrange(3)
    prompt, result = (sums[form], total) if rng.random() < 0.6 else (differences[form], b)
    return Document("arithmetic", combination, prompt, f" {result} {thing}." if form == 2 else f" {result}.")


def draw_question(rng: Random) -> Document:
    """A fact as a question and its answer, or as a statement; what is held out is a fact in one of these forms."""
    relation = rng.choice(list(words.RELATIONS))
    question, statement, facts = words.RELATIONS[relation]
    subject = rng.choice(list(facts))
    form = rng.choice(["Q: {}\nA:", "Question: {} Answer:", "statement"])
    prompt = statement.format(subject) if form == "statement" else form.format(question.format(subject))
    return Document("questions", (relation, subject, form), prompt, f" {facts[subject]}.")


def draw_record(rng: Random) -> Document:
    """A person as a JSON object, after a sentence that says the same or alone."""
    name, _ = _person(rng)
    age, city = rng.randint(3, 30), rng.choice(words.CITIES)
    record: dict[str, object] = {"name": name, "age": age, "city": city}
    sentence = f"{name} is {age} years old, lives in {city}"
    if rng.random() < 0.5:
        likes = rng.sample(words.LIKES, rng.randint(1, 2))
        record["likes"] = likes
        sentence += f" and likes {' and '.join(likes)}."
    else:
        record["pet"] = rng.choice(words.PETS)
        sentence += f" and has a {record['pet']}."
    text = json.dumps(record)
    if rng.random() < 0.35:
        opening = f'{{"name": "{name}", "age":'
        return Document("records", (name, city), opening, text.removeprefix(opening), determined=False)
    return Document("records", (name, city), f"{sentence} As JSON:", f" {text}")


_OPENINGS = (
    "Once upon a time there was a {trait} {hero} named {name}.",
    "Once upon a time there was a {trait} {hero} named {name}.",
    "In a {place} there lived a {trait} {hero} named {name}.",
    "There once was a {trait} {hero} called {name}.",
)
_POSSESSION = (
    "{name} had a {shade} {thing}.",
    "{name} had a {shade} {thing} and took it everywhere.",
    "{name} loved a {shade} {thing} more than anything.",
)
_PLOTS = (
    (  # lost and found
        ("One {weather} day {name} lost the {thing} near {spot}.", "One {weather} day the {thing} was gone."),
        (
            "{name} looked in the {place} and behind {spot}, but the {thing} was not there.",
            "{Pronoun} looked everywhere, but {pronoun} could not find the {thing}.",
        ),
        ("Then {pronoun} met {helper}.", "On the way {name} met {helper}."),
        ('"Have you seen my {thing}?" asked {name}.', '{name} asked, "Where is my {thing}?"'),
        (
            '"Yes," said the {helper_noun}, "it lies near {spot2}."',
            '"I found it near {spot2}," said the {helper_noun}.',
        ),
        (
            "{name} found the {thing} and was happy again.",
            "{name} took the {shade} {thing} and went home with a smile.",
        ),
    ),
    (  # a gift
        ("One {weather} day {name} went to the {place} with the {thing}.", "One {weather} day {name} went for a walk."),
        ("Near {spot} {pronoun} saw {helper} who looked sad.", "Near {spot} sat {helper} with nothing to eat."),
        ('"What is wrong?" asked {name}.', '"Can I help you?" asked {name}.'),
        (
            '"I have lost my way," said the {helper_noun}.',
            '"I am all alone today," said the {helper_noun}.',
        ),
        (
            "So {name} gave the {thing} to the {helper_noun}.",
            "{name} thought for a while and then shared the {shade} {thing}.",
        ),
        ("From that day on they were friends.", "The {helper_noun} never forgot {name} and the {thing}."),
    ),
    (  # broken and mended
        ("One {weather} day the {thing} broke.", "One {weather} day the {thing} fell from {spot} and broke."),
        ("{name} was very sad.", "{Pronoun} sat down and cried.", "{name} did not know what to do."),
        ("{name} carried the {thing} to {helper}.", "Then {helper} came by and saw the broken {thing}."),
        ('"Can you mend my {thing}?" asked {name}.', '"Please help me with my {thing}," said {name}.'),
        (
            '"Of course," said the {helper_noun}, and they worked all day.',
            "The {helper_noun} worked on it until the evening.",
        ),
        ("In the end the {thing} was better than before.", "Soon {name} had the {shade} {thing} back, as good as new."),
    ),
)
_ENDINGS = ("The end.", "That night {name} slept well.", "{name} and the {thing} were never apart again.")


def draw_story(rng: Random) -> Document:
    """A story whose hero and object stay the same from the first sentence to the last."""
    name, pronoun = _person(rng)
    helper = rng.choice(words.HELPERS)
    spot, spot2 = rng.sample(words.SPOTS, 2)
    roles = {
        "name": name,
        "pronoun": pronoun,
        "Pronoun": pronoun.capitalize(),
        "hero": rng.choice(words.SPECIES),
        "thing": rng.choice(words.OBJECTS),
        "trait": rng.choice(words.TRAITS),
        "shade": rng.choice(words.SHADES),
        "place": rng.choice(words.PLACES),
        "weather": rng.choice(words.WEATHER),
        "helper": helper,
        "helper_noun": helper.split(" ", 1)[1],
        "spot": spot,
        "spot2": spot2,
    }
    stages = [_OPENINGS, _POSSESSION, *rng.choice(_PLOTS), _ENDINGS]
    sentences = [rng.choice(stage).format(**roles) for stage in stages]
    prompt, rest = " ".join(sentences[:2]), " " + " ".join(sentences[2:])
    return Document("stories", (roles["hero"], roles["thing"]), prompt, rest, determined=False)


def _person(rng: Random) -> tuple[str, str]:
    """A name and its pronoun."""
    return (rng.choice(words.GIRLS), "she") if rng.random() < 0.5 else (rng.choice(words.BOYS), "he")


_DRAW = {
    "lists": (draw_list, 22),
    "counting": (draw_count, 14),
    "arithmetic": (draw_sum, 42),
    "stories": (draw_story, 9),
    "questions": (draw_question, 16),
    "records": (draw_record, 12),
}  # kind -> its grammar, and its weight among the training texts
KINDS = tuple(_DRAW)


def training_documents(seed: int) -> Iterator[Document]:
    """An endless stream of training texts, determined by the seed."""
    rng = Random(seed)
    weights = [weight for _, weight in _DRAW.values()]
    while True:
        kind = rng.choices(KINDS, weights)[0]
        document = _DRAW[kind][0](rng)
        if not document.held_out:
            yield document


def held_out_documents(per_kind: int = 100, seed: int = 0) -> dict[str, list[Document]]:
    """Kind -> different texts built around held-out combinations, at most `per_kind` of each; the same for a seed."""
    found: dict[str, list[Document]] = {}
    for kind, (draw, _) in _DRAW.items():
        rng = Random(f"{kind} {seed}")
        drawn = (draw(rng) for _ in range(400 * per_kind))
        different = {document.text: document for document in drawn if document.held_out}
        found[kind] = list(different.values())[:per_kind]
    return found


def held_out_text(per_kind: int = 100, seed: int = 0) -> str:
    """The held-out texts of all kinds, one after the other, with an empty line between them."""
    return "\n\n".join(d.text for documents in held_out_documents(per_kind, seed).values() for d in documents)


def main() -> None:
    """Print some of the corpus."""
    parser = argparse.ArgumentParser(description="Print texts of the demo model's corpus.", allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=20, help="how many training texts (default: 20)")
    parser.add_argument("--held-out", action="store_true", help="print the held-out texts instead")
    args = parser.parse_args()
    if args.held_out:
        print(held_out_text(seed=args.seed))
        return
    documents = training_documents(args.seed)
    for _ in range(args.documents):
        print(next(documents).text, end="\n\n")


if __name__ == "__main__":
    main()
