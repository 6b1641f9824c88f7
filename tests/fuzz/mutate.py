"""Damage to bytes, to text and to the structure of JSON, and values that no field expects."""

import copy
import json
from random import Random
from typing import Any

EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
WHOLE = (0, 1, 2, 3, 5, 7, 8, 63, 64, 65, 1000, 10**6, -1, -2, *EXTREMES, 2**64, -(2**31), -(2**63), 10**30)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-300, 1e-6, 1e6, 1e38, 1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *(
        "",
        " ",
        "a",
        "user",
        "</s>",
        "default",
        "float16",
        "\n",
        "a\nb",
        "\r\n",
        "\t",
        "\0",
        "\x1b[31mred\x1b[0m",
        "\x9b2J",
    ),
    *(
        "\u2028",
        "\u202e",
        "\ufeff",
        "\ud800",
        "\udcff",
        "e\u0301",
        "😀",
        "日本" * 30,
        "%s%n{0}",
        "{{ 7 * 7 }}",
        "../../etc",
    ),
    *("/dev/zero", "-1", "1e999", "null", "a" * 1000, "a " * 20_000, "\n" * 500),
)
HUGE = "9" * 5000


class Raw:
    """Text that stands in JSON as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


class Pairs(list):  # type: ignore[type-arg]
    """A JSON object as pairs, in which a key may come twice."""


def odd_value(rng: Random, depth: int = 0) -> Any:
    """A value in JSON's types, as no field expects it."""
    kind = rng.randrange(9 if depth < 2 else 6)
    if kind < 5:
        return rng.choice((WHOLE, WHOLE, FLOATS, TEXTS, (None, True, False, [], {}, [[]], [None], {"": ""}))[kind])
    if kind == 5:
        deep = rng.choice([50, 1000, 100_000])
        return rng.choice(
            [Raw(HUGE), Raw("-" + HUGE), Raw("1" + "0" * 400), Raw("[" * deep + "]" * deep), Raw('{"a":' * deep)]
        )
    if kind == 6:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(1, 5))]
    if kind == 7:
        return {rng.choice(TEXTS): odd_value(rng, depth + 1) for _ in range(rng.randrange(1, 4))}
    return [rng.choice(WHOLE)] * rng.choice([1, 2, 100, 10_000])


def near(rng: Random, value: Any) -> Any:
    """Another value of the same type, not far away."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, -value, 2 * value, value // 2, value * 2**16, float(value)])
    if isinstance(value, float):
        return rng.choice([value * 2, -value, value / 1e10, value * 1e10, int(value) if abs(value) < 1e9 else 0])
    if isinstance(value, str):
        return rng.choice([value.upper(), value + rng.choice(TEXTS), value[:-1], value[1:], value * 3, [value]])
    if isinstance(value, list):
        return rng.choice([value + value, value[:-1], value[::-1], value[1:], {"a": value}, [value]])
    return odd_value(rng)


def mutate_json(rng: Random, value: Any) -> Any:
    """One to three changes of structure: a value of another kind or size, a key gone, twice, new, two swapped."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        holder, key = _place(rng, value)
        if holder is None:
            return odd_value(rng)
        match rng.randrange(8):
            case 0 | 1 | 2:
                holder[key] = odd_value(rng)
            case 3 | 4:
                holder[key] = near(rng, holder[key])
            case 5:
                del holder[key]
            case 6:
                other, there = _place(rng, value)
                if other is not None:
                    holder[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(holder[key])
            case _:
                if isinstance(holder, dict):
                    name = rng.choice([key, key + "s", rng.choice(TEXTS)])
                    holder[name] = odd_value(rng) if rng.random() < 0.5 else Pairs([(name, 1), (name, odd_value(rng))])
    if isinstance(value, dict) and value and rng.random() < 0.1:
        pairs = list(value.items())
        return Pairs([*pairs, (rng.choice(pairs)[0], odd_value(rng))])
    return value


def _place(rng: Random, value: Any) -> tuple[Any, Any]:
    """A random container within, and a key or index of it; (None, None) if there is none."""
    here: tuple[Any, Any] = (None, None)
    while isinstance(value, dict | list) and value and not isinstance(value, Pairs):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        here = value, rng.choice(keys)
        value = here[0][here[1]]
        if rng.random() < 0.3:
            break
    return here


def to_json(value: Any) -> str:
    """JSON text, with what only `Raw` and `Pairs` can say."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(name)}: {to_json(item)}" for name, item in value) + "}"
    if isinstance(value, dict):
        return to_json(Pairs(value.items()))
    if isinstance(value, list):
        return "[" + ", ".join(map(to_json, value)) + "]"
    return json.dumps(value)


def mutate_bytes(rng: Random, data: bytes, head: int | None = None) -> bytes:
    """One to four changes of bytes, most of them within the first `head`."""
    if rng.random() < 0.03:
        return rng.choice([b"", b"\0" * 8, b"\xff" * 64, b"\0" * len(data), rng.randbytes(100), b"{}", b"[]", b"null"])
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if changed:
            reach = min(head, len(changed)) if head and rng.random() < 0.8 else len(changed)
            _change_once(rng, changed, rng.randrange(reach))
    return bytes(changed)


def _change_once(rng: Random, changed: bytearray, at: int) -> None:
    length = rng.choice([1, 2, 3, 8, 16, 100])
    match rng.randrange(8):
        case 0:
            changed[at] ^= 1 << rng.randrange(8)
        case 1:
            changed[at] = rng.choice(b'\0\xff"\\{}[],:()RbQtu.]}0129-e[\x7f\x80\n' + bytes([rng.randrange(256)]))
        case 2:
            size = rng.choice([2, 4, 8])
            changed[at : at + size] = (rng.choice(EXTREMES) % (1 << 8 * size)).to_bytes(size, "little")
        case 3:
            del changed[at : at + length]
        case 4:
            changed[at:at] = rng.choice([rng.randbytes(length), bytes(length), b"9" * 400, b"\xed\xa0\x80", b"\r"])
        case 5:
            changed[at:at] = changed[rng.randrange(len(changed)) :][:length]
        case 6:
            changed[at:] = rng.choice([b"", bytes(changed[at:]) + rng.randbytes(length)])
        case _:
            _change_number(rng, changed, at)


def _change_number(rng: Random, changed: bytearray, at: int) -> None:
    """Put another number in the place of the digits that follow; of a header these are shapes and offsets."""
    digits = next((i for i in range(at, min(at + 200, len(changed))) if 48 <= changed[i] <= 57), None)
    if digits is None:
        return
    end = digits
    while end < len(changed) and 48 <= changed[end] <= 57:
        end += 1
    changed[digits:end] = str(rng.choice(WHOLE)).encode()
