"""Guides and stop strings, hostile ones among them: what comes out keeps to them, or they are refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from minillm import Engine

from ..tiny import write_checkpoint
from .mutate import TEXTS, mutate_json, to_json
from .outcome import attempt, expect

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"
HOSTILE_REGEXES = (
    *(
        "(a{1,1000}){1,1000}",
        "((a*)*)*b",
        "(a|a)*" * 50,
        "(" * 10_000 + ")" * 10_000,
        "a{1000000000}",
        "[",
        "(?=a)",
        r"\1",
    ),
    *(r"\p{L}{500}", "(.|\n){0,100000}", "x" * 100_000, "|".join(f"w{i}" for i in range(20_000)), "(?i)" + "k" * 5000),
    *(
        r"[^\x00-\U0010ffff]",
        "(?P<a>a)(?P<a>b)",
        "a**",
        "^$",
        "\\",
        "\ud800",
        "\0",
        "[a-z]{0,5000}" * 20,
        "(((.{9}){9}){9}){9}",
    ),
)
HOSTILE_GRAMMARS = (
    *(
        "start: start",
        "start: a\na: b\nb: a",
        'start: "a" start start start | ""',
        "start: /(a{1,1000}){1,1000}/",
        "start:",
    ),
    *(
        "",
        "start: x",
        "start: " + "(" * 5000 + '"a"' + ")" * 5000,
        'start: "a"{100000}',
        "start: /[/",
        "%import common.INT",
    ),
    *(
        "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"\nstart: r0',
        'start: "\\ud800"',
        "start: " * 9999,
    ),
    *(
        'start: %json {"type": "object"}',
        "start: <[999999999]>",
        "start: <|no such token|>",
        'start[max_tokens=-1]: "a"',
    ),
)


def _deep_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def hostile_schema(rng: Random) -> Any:
    """A schema that asks for much, or for nothing that there is."""
    many = rng.choice([10, 1000, 20_000])
    return rng.choice(
        [
            lambda: {"$ref": "#"},
            lambda: {"$ref": "https://example.invalid/schema"},
            lambda: {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            lambda: {"allOf": [{"type": "string"}, {"type": "integer"}]},
            lambda: {"anyOf": [{"const": i} for i in range(many)]},
            lambda: {"enum": [f"value {i}" for i in range(many)]},
            lambda: {"type": "string", "minLength": 10**9},
            lambda: {"type": "string", "minLength": 5, "maxLength": 2},
            lambda: {"type": "string", "pattern": rng.choice(HOSTILE_REGEXES)},
            lambda: {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
            lambda: {"type": "number", "multipleOf": 1e-300},
            lambda: {"type": "integer", "minimum": 10**400, "maximum": -1},
            lambda: {"type": "object", "properties": {f"k{i}": {} for i in range(many // 10)}, "required": ["zz"]},
            lambda: {
                "type": "object",
                "patternProperties": {"(a+)+$": {"type": "null"}},
                "additionalProperties": False,
            },
            lambda: _deep_schema(rng.choice([10, 100, 300])),
            lambda: {"not": {}},
            lambda: False,
            lambda: {"type": rng.choice(TEXTS)},
        ]
    )()


def regex(rng: Random, depth: int = 0) -> str:
    """A regular expression that Rust and Python read alike."""
    if depth > 3 or rng.random() < 0.3:
        return rng.choice(["[a-z]", "[0-9]", "[^x]", "a", " ", "red", "(?:a|b)", "é", r"\."])
    inner = regex(rng, depth + 1)
    return rng.choice(
        [
            f"(?:{inner})*",
            f"(?:{inner}){{{rng.randrange(4)},{rng.randrange(4, 9)}}}",
            f"(?:{inner})?",
            f"(?:{inner})+",
            inner + regex(rng, depth + 1),
            f"(?:{inner}|{regex(rng, depth + 1)})",
        ]
    )


def schema(rng: Random, depth: int = 0) -> dict[str, Any]:
    """A JSON schema of few levels."""
    kind = rng.randrange(5 if depth > 2 else 7)
    if kind == 5:
        return {"type": "array", "items": schema(rng, depth + 1), "maxItems": rng.randrange(1, 4)}
    if kind == 6:
        names = rng.sample(["a", "b", "key", "é", ""], rng.randrange(1, 4))
        return {"type": "object", "properties": {name: schema(rng, depth + 1) for name in names}, "required": names[:1]}
    simple: tuple[dict[str, Any], ...] = (
        {"type": "integer", "minimum": 0, "maximum": rng.randrange(1, 1000)},
        {"type": "string", "maxLength": rng.randrange(1, 6)},
        {"enum": ["red", 1, None, True]},
        {"type": "boolean"},
        {"const": rng.choice(["x", 5, None, [1], {"a": 1}])},
    )
    return simple[kind]


def grammar(rng: Random) -> str:
    """A grammar in Lark's notation."""
    names = [f"r{i}" for i in range(rng.randrange(1, 5))]
    rules = []
    for name in ["start", *names]:
        parts = [
            rng.choice([*names, '"a"', '"red"', "/[a-z]+/", '"b"?', '("c" | "d")*', *names])
            for _ in range(rng.randrange(1, 4))
        ]
        rules.append(f"{name}: {rng.choice([' ', ' | ']).join(parts)}")
    return "\n".join(rules)


def guide(rng: Random) -> tuple[str, Any, Callable[[str], bool]]:
    """A field, its value, and what holds for a text that ended by itself."""
    hostile = rng.random() < 0.3
    match rng.randrange(4):
        case 0:
            pattern = rng.choice(HOSTILE_REGEXES) if hostile else regex(rng)
            return "guided_regex", pattern, lambda text: hostile or re.fullmatch(pattern, text, re.DOTALL) is not None
        case 1:
            value = hostile_schema(rng) if hostile else schema(rng)
            if rng.random() < 0.2:
                value = to_json(mutate_json(rng, value)) if isinstance(value, dict) else value
            return "guided_json", value, _is_json
        case 2:
            return "guided_grammar", rng.choice(HOSTILE_GRAMMARS) if hostile else grammar(rng), lambda text: True
        case _:
            count = rng.choice([1, 2, 20, 5000]) if hostile else rng.randrange(1, 6)
            words = ["".join(rng.choices(LETTERS, k=rng.randrange(1, 9))) for _ in range(count)]
            choices = [*words, rng.choice(TEXTS) or "x"] if hostile else words
            return "guided_choice", choices, lambda text: text in choices


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def prepare(folder: Path) -> Callable[[int, Random], None]:
    """What runs an input."""
    model = write_checkpoint(folder / "model", seed=2, max_position_embeddings=256)
    engine = Engine(model, backend="numpy", threads=1, max_batch_size=8, cache_bytes=4 << 20)
    usual = engine.generate("red", max_new_tokens=3).text

    def run(number: int, rng: Random) -> None:
        if rng.random() < 0.7:
            _guided(rng, engine)
        else:
            _stopped(rng, engine)
        cache = engine.runner.cache
        expect(not engine.busy and cache.free_pages == cache.num_pages, "a request is left behind")
        expect(engine.generate("red", max_new_tokens=3).text == usual, "the greedy text has changed")

    return run


def _guided(rng: Random, engine: Engine) -> None:
    field, value, holds = guide(rng)
    more = rng.choice(
        [{}, {}, {"do_sample": True, "seed": 5}, {"num_beams": 3}, {"stop_strings": ["a"]}, {"min_new_tokens": 5}]
    )
    result = attempt(
        lambda: engine.generate("red, green", max_new_tokens=rng.choice([1, 10, 40]), **{field: value}, **more)
    )
    for completion in result.completions if result is not None else []:
        if completion.finish_reason == "stop" and "stop_strings" not in more:
            expect(holds(completion.text), f"{field} {str(value)[:80]!r} gave {completion.text[:80]!r}")


def _stopped(rng: Random, engine: Engine) -> None:
    """The text with stop strings is that without, cut before the first of them."""
    more = rng.choice([{}, {"do_sample": True, "temperature": 2.0, "top_k": 0, "seed": rng.randrange(100)}])
    free = engine.generate("red, green", max_new_tokens=30, **more).text
    stops = [_stop_string(rng, free) for _ in range(rng.choice([1, 2, 5, 500]))]
    keep = rng.random() < 0.3
    found = attempt(
        lambda: engine.generate("red, green", max_new_tokens=30, stop_strings=stops, include_stop=keep, **more)
    )
    if found is None:
        return
    ends = [(free.index(stop) + len(stop), free.index(stop)) for stop in stops if stop in free]
    end, start = min(ends, default=(len(free), len(free)))
    expected = free[:end] if keep else free[:start]
    expect(found.text == expected, f"stopped by {stops[:3]!r}: {found.text[-60:]!r}, expected {expected[-60:]!r}")


def _stop_string(rng: Random, text: str) -> str:
    if text and rng.random() < 0.5:
        at = rng.randrange(len(text))
        return text[at : at + rng.randrange(1, 6)]
    return rng.choice([*(t for t in TEXTS if t), *LETTERS, "ab", "\ufffd", "zz" * 5000])
