"""Arguments of the library: whatever they are, the engine afterwards is as it was before."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from minillm import Engine, GenerationConfig
from minillm.decoding.fields import FIELDS
from minillm.text.chat import RENDER_ARGUMENTS

from ..conversations import TEMPLATES, write_tokenizer
from ..tiny import write_checkpoint
from .mutate import TEXTS, WHOLE
from .outcome import PlantedError, attempt, expect
from .values import BadRepr, odd

CONSTRUCTOR = ("model", "revision", "dtype", "device", "backend", "cache_dtype", "threads", "max_batch_size")
CONSTRUCTOR += ("cache_bytes", "prefix_cache", "draft", "amateur")


SENSIBLE: dict[str, tuple[Any, ...]] = {
    "guided_json": ({"type": "integer"}, '{"type": "string", "maxLength": 3}', {"enum": ["a", 1, None]}),
    "guided_regex": ("[a-z]{1,4}", "(red|green)+", "."),
    "guided_grammar": ('start: "red" | "green"', "start: /[a-c]+/"),
    "guided_choice": (["red", "green"], "blue"),
    "stop_strings": ("e", ["a", "re"], [" "]),
    "eos_token_id": (2, [2, 7], []),
    "early_stopping": (True, False, "never"),
    "strategy": ("ranked", "no such strategy", "beams"),
    "strategy_options": ({"rank": 1}, ["rank=1", "name=a"], {}),
    "sequence_bias": ([[[10, 45], -2.0]], {(7,): 7.5}, [[[3], float("-inf")]]),
    "bad_words_ids": ([[5], [6, 7]],),
    "force_words_ids": ([[5], [6, 7]], [[[5], [6, 7]], [8]]),
    "force_words": ("a", ["red", ["green", "blue"]]),
    "potential": (len, lambda ids, text: "e" not in text, "no such potential"),
    "forced_eos_token_id": (2, [2, 3]),
    "suppress_tokens": ([3, 4],),
    "begin_suppress_tokens": ([5],),
    "exponential_decay_length_penalty": ((2, 1.5),),
    "watermarking_config": ({"bias": 9.0}, {"seeding_scheme": "selfhash"}, {"ngram_len": 3, "keys": [5, 6]}),
    "thinking_tokens": ([3, 4], ["e", "a"], [[3, 4], 5]),
    "samplers": ("llama.cpp", ["top_k", "temperature", "penalties"], "min_p;xtc"),
    "dry_sequence_breakers": ("e", ["a", "re"], []),
}
POOL = (1, 2, 3, 4, 0, 0.1, 0.5, 0.9, 1.5, True, False)


def _readable(name: str) -> list[Any]:
    """Values of the pool that a field takes by itself."""
    taken = []
    for value in POOL:
        try:
            FIELDS[name].read(value)
        except ValueError:
            continue
        taken.append(value)
    return taken or [None]


SENSIBLE |= {name: tuple(_readable(name)) for name in FIELDS.keys() - SENSIBLE.keys()}


def _raise(*arguments: Any) -> Any:
    raise PlantedError("as planted")


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(_raise, lambda *a: None, lambda *a: [], lambda *a: [3, 4], lambda *a: [10**9], lambda *a: "x", lambda *a: [1.5]),
    *(
        lambda history, logits, xp: logits,
        lambda history, logits, xp: logits * xp.nan,
        lambda history, logits, xp: logits[:0],
    ),
    *(
        lambda history, logits, xp: logits - xp.inf,
        lambda history, logits, xp: logits.astype("int64"),
        lambda batch, ids: ids,
    ),
    *(lambda: 0, lambda batch, ids: [-1], lambda history, logits, xp: logits.fill(0), lambda batch, ids: BadRepr()),
)


def field_value(rng: Random, name: str) -> Any:
    """A value of a field, sensible or not."""
    if name == "logits_processor" and rng.random() < 0.8:
        return [rng.choice(FUNCTIONS) for _ in range(rng.randrange(3))]
    if name == "prefix_allowed_tokens_fn" and rng.random() < 0.8:
        return rng.choice(FUNCTIONS)
    return rng.choice(SENSIBLE[name]) if rng.random() < 0.75 else odd(rng)


def fields(rng: Random) -> dict[str, Any]:
    """One to four generation fields."""
    names = rng.sample(list(FIELDS), rng.choice([1, 1, 2, 3, 4]))
    said = {name: field_value(rng, name) for name in names if name not in ("draft", "amateur")}
    for needed in {FIELDS[name].needs for name in said} & FIELDS.keys():
        if rng.random() < 0.8:
            said.setdefault(str(needed), rng.choice(SENSIBLE[str(needed)][1:]))
    if rng.random() < 0.05:
        said[rng.choice([*TEXTS, "max_tokens", "pad_token_id", "tools", "constraints"])] = odd(rng)
    return said


def prompt(rng: Random) -> Any:
    """Mostly a sensible prompt, or a list of such."""
    if rng.random() < 0.12:
        return odd(rng)
    tokens = [rng.randrange(3, 512) for _ in range(rng.randrange(1, 20))]
    return rng.choice(
        ["red, green", "", tokens, ["a", "b c"], [tokens, "red"], np.array(tokens), tuple(tokens), "a" * 50]
    )


def messages(rng: Random) -> Any:
    """Mostly something like a conversation."""
    if rng.random() < 0.2:
        return odd(rng)
    chat: list[Any] = []
    for _ in range(rng.randrange(4)):
        message = {"role": rng.choice(["user", "assistant", "system"]), "content": rng.choice(TEXTS)}
        if rng.random() < 0.4:
            message[rng.choice(["role", "content", "name", "thinking", "tool_calls", "", "text"])] = odd(rng)
        if rng.random() < 0.2:
            message["content"] = [
                {"type": "text", "text": "a"},
                {"type": rng.choice(["text", "image"]), "text": odd(rng)},
            ]
        chat.append(message if rng.random() < 0.9 else odd(rng))
    return chat


class Bench:
    """Three engines, and what each answers and holds while all is well."""

    def __init__(self, folder: Path) -> None:
        self.model = write_checkpoint(folder / "model", seed=2)
        helper = write_checkpoint(folder / "helper", seed=3)
        write_tokenizer(self.model, (TEMPLATES / "qwen3.jinja").read_text())
        options = {"backend": "numpy", "threads": 1, "max_batch_size": 4, "cache_bytes": 1 << 20}
        kinds: list[dict[str, Any]] = [{}, {"draft": helper}, {"amateur": helper}, {"prefix_cache": True}]
        self.engines = [Engine(self.model, **options, **more) for more in kinds]
        self.texts = [engine.generate(**_greedy()).text for engine in self.engines]

    def engine(self, rng: Random) -> Engine:
        return self.engines[rng.choice([0, 0, 0, 1, 2, 3])]

    def check(self, engine: Engine) -> None:
        """The engine is as it was."""
        expect(not engine.busy, "the engine is busy after its last request")
        caches = {name: runner.cache for name, runner in engine._driver.loop.runners.items()}
        i = self.engines.index(engine)
        kept = i == 3  # what finished stays in a prefix cache
        lost = {name: cache.num_pages - cache.free_pages for name, cache in caches.items()}
        expect(kept or not any(lost.values()), f"pages are not free after the last request: {lost}")
        text = engine.generate(**_greedy()).text
        expect(text == self.texts[i], f"the greedy text was {self.texts[i]!r} and is now {text!r}")


def _greedy() -> dict[str, Any]:
    return {"prompts": "red, green", "max_new_tokens": 3}


def prepare(folder: Path) -> Callable[[int, Random], None]:
    """What runs an input."""
    bench = Bench(folder)

    def run(number: int, rng: Random) -> None:
        engine = bench.engine(rng)
        call = rng.choice(CALLS)
        with suppress(PlantedError):  # raised by a function of the user's, or by what was given in its place
            attempt(lambda: call(rng, engine, bench))
        for request in list(engine._driver._mail):
            engine.abort(request)
        engine.step()
        bench.check(engine)

    return run


def _generate(rng: Random, engine: Engine, bench: Bench) -> None:
    said = fields(rng)
    said.setdefault("max_new_tokens", 4)
    config = odd(rng) if rng.random() < 0.03 else None
    engine.generate(prompt(rng), config, **said)


def _stream(rng: Random, engine: Engine, bench: Bench) -> None:
    stream = engine.stream(prompt(rng), **fields(rng))
    for _ in itertools.islice(stream, rng.choice([0, 1, 3, 100])):
        pass
    stream.close()


def _steps(rng: Random, engine: Engine, bench: Bench) -> None:
    ids = [attempt(lambda: engine.add(prompt(rng), **fields(rng))) for _ in range(rng.randrange(1, 4))]
    for _ in range(rng.choice([0, 2, 70])):
        engine.step()
    engine.abort(rng.choice([*ids, odd(rng)]))


def _chat(rng: Random, engine: Engine, bench: Bench) -> None:
    said = fields(rng) if rng.random() < 0.3 else {"max_new_tokens": 2}
    said |= {name: odd(rng) for name in RENDER_ARGUMENTS if rng.random() < 0.2}
    if rng.random() < 0.5:
        engine.chat(messages(rng), **said)
    else:
        list(engine.stream_chat(messages(rng), **said))


def _render(rng: Random, engine: Engine, bench: Bench) -> None:
    engine.render_chat(messages(rng), **{name: odd(rng) for name in RENDER_ARGUMENTS if rng.random() < 0.3})


def _look(rng: Random, engine: Engine, bench: Bench) -> None:
    if rng.random() < 0.5:
        engine.forward(prompt(rng))
    else:
        engine.score(prompt(rng))


def _tokenize(rng: Random, engine: Engine, bench: Bench) -> None:
    tokenizer = engine.tokenizer
    match rng.randrange(4):
        case 0:
            tokenizer.decode(tokenizer.encode(rng.choice([*TEXTS, odd(rng)])))
        case 1:
            tokenizer.decode(odd(rng) if rng.random() < 0.5 else [rng.choice([*WHOLE, odd(rng)])])
        case 2:
            tokenizer.token(odd(rng))
        case _:
            stream = tokenizer.stream(odd(rng) if rng.random() < 0.5 else [5])
            stream.push(odd(rng) if rng.random() < 0.7 else 6)
            stream.flush()


def _configure(rng: Random, engine: Engine, bench: Bench) -> None:
    match rng.randrange(3):
        case 0:
            config = GenerationConfig(**fields(rng))
        case 1:
            config = GenerationConfig.from_dict(odd(rng) if rng.random() < 0.5 else fields(rng))
        case _:
            config = GenerationConfig(**fields(rng)).merged(**fields(rng))
    config = config.merged(max_new_tokens=2) if config.max_length is None else config
    engine.generate("red", config)


def _construct(rng: Random, engine: Engine, bench: Bench) -> None:
    said: dict[str, Any] = {"backend": "numpy", "threads": 1, "max_batch_size": 1, "cache_bytes": 1 << 18}
    said |= {name: odd(rng) for name in rng.sample(CONSTRUCTOR, rng.choice([1, 1, 2, 3]))}
    model = said.pop("model", bench.model)
    if rng.random() < 0.2:
        said = {
            name: value for name, value in said.items() if name not in ("revision", "draft", "amateur", "prefix_cache")
        }
        Engine.random(odd(rng), **{name: odd(rng) for name in ("seed", "std") if rng.random() < 0.3}, **said)
        return
    with Engine(model, **said) as built:
        built.generate("red", max_new_tokens=1)


CALLS = (
    _generate,
    _generate,
    _generate,
    _generate,
    _stream,
    _steps,
    _chat,
    _render,
    _look,
    _tokenize,
    _configure,
    _construct,
)
