"""Checkpoint folders and GGUF files that contradict themselves.

A folder gives what transformers makes of it: token ids, text, special tokens, greedy continuations, hidden states. Or
it is refused in one line, or a warning names what the files disagree on. A GGUF file is answered or refused, and never
says a token that it does not have.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from minillm import Engine
from minillm.errors import MinillmError

from . import conflicts_gguf
from .checkpoints import PROMPT, TEXTS, Seed, write_seeds
from .conflicts import contradict
from .outcome import COUNTS, blemish_of, check_message, expect

ENGINE: dict[str, Any] = {"backend": "numpy", "threads": 1, "max_batch_size": 2, "cache_bytes": 1 << 20}
GGUF = 0.2
"""Share of GGUF files; the others are folders"""
LENGTH = 6
"""New tokens of a continuation"""
NEAR = 2e-4
"""Difference of hidden states that rounding explains"""


class Failed(NamedTuple):
    """What raised instead of an answer."""

    error: str


def prepare(folder: Path) -> Callable[[int, Random], None]:
    """What runs an input."""
    import transformers

    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    (folder / "seeds").mkdir()
    seeds = write_seeds(folder / "seeds")
    known: dict[str, dict[str, Any]] = {}

    def run(number: int, rng: Random) -> None:
        target = folder / f"input-{number}"
        if rng.random() < GGUF:
            conflicts_gguf.run(rng, target.with_suffix(".gguf"))
            target.with_suffix(".gguf").unlink()
            return
        try:
            _compare(rng, rng.choice(seeds), target, known)
        finally:
            shutil.rmtree(target)

    return run


def _compare(rng: Random, seed: Seed, target: Path, known: dict[str, dict[str, Any]]) -> None:
    """Compare one folder; `known` has what transformers' models have said."""
    files, words = contradict(rng, seed.files)
    seed.write(target, files)
    said: list[str] = []
    ours = _ours(target, files.kind, said)
    if isinstance(ours, MinillmError):
        check_message(ours)
        COUNTS["refused"] += 1
        return
    theirs = _tried(_tokens_of_theirs, target)
    if files.model() not in known:
        known[files.model()] = _tried(_results_of_theirs, target, files.kind)
    theirs |= known[files.model()]
    for line in said:
        expect(not blemish_of(line), f"a warning {blemish_of(line)}: {line[:200]!r}")
    other = [name for name, value in theirs.items() if name in ours and not _same(ours[name], value)]
    named = [word for word in words if any(word in line for line in said)]
    told = "; ".join(f"{name}: {ours[name]!r:.160}, transformers {theirs[name]!r:.160}" for name in other[:2])
    expect(not other or named, f"{files.kind}, {sorted(words)}: {told}")
    COUNTS["named" if other else "answered" if _is_whole(theirs) else "alone"] += 1


def _is_whole(theirs: dict[str, Any]) -> bool:
    return not any(isinstance(value, Failed) for value in theirs.values())


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, np.ndarray):
        return bool(ours.shape == theirs.shape and np.allclose(ours, theirs, atol=NEAR, rtol=NEAR))
    return bool(ours == theirs)


class _Ear(logging.Handler):
    """Hears the warnings of a logger."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _ours(folder: Path, kind: str, said: list[str]) -> dict[str, Any] | MinillmError:
    """What the engine makes of a folder, or its refusal; `said` gets its warnings."""
    logger, ear = logging.getLogger("minillm"), _Ear(said)
    logger.addHandler(ear)
    try:
        with Engine(folder, **ENGINE) as engine:
            answers = {**_tokens_of_ours(engine.tokenizer), **_results_of_ours(engine, kind)}
            expect(not engine.busy, "the engine is busy after its last request")
            return answers
    except MinillmError as error:
        return error
    finally:
        logger.removeHandler(ear)


def _tokens_of_ours(tokenizer: Any) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "special ids": tokenizer.special_ids,
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "tokens": tokenizer.vocab_size,
    }
    for text in TEXTS:
        ids = tokenizer.encode(text)
        answers[f"ids of {text!r}"] = ids
        answers[f"plain ids of {text!r}"] = tokenizer.encode(text, add_special_tokens=False)
        answers[f"text of {text!r}"] = tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)
    return answers


def _results_of_ours(engine: Engine, kind: str) -> dict[str, Any]:
    if kind == "bert":
        return {"states": engine.embed([PROMPT], pooling="mean", normalize=False)[0]}
    [result] = engine.generate([PROMPT], max_new_tokens=LENGTH, do_sample=False)
    return {"continuation": result.completions[0].token_ids}


def _tried(answer: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    try:
        return answer(*arguments)
    except Exception as error:  # of any kind: transformers checks little
        return {answer.__name__: Failed(repr(error))}


def _tokens_of_theirs(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    added = tokenizer.added_tokens_decoder
    answers: dict[str, Any] = {
        "special ids": {i for i, token in added.items() if token.special or _is_skipped(tokenizer, i)},
        "tokens": len(tokenizer),
    }
    for role in ("bos", "eos"):  # one that the tokenizer's files do not name is here that of config.json
        if (token_id := getattr(tokenizer, f"{role}_token_id")) is not None:
            answers[role] = token_id
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        answers[f"ids of {text!r}"] = ids
        answers[f"plain ids of {text!r}"] = tokenizer.encode(text, add_special_tokens=False)
        answers[f"text of {text!r}"] = tokenizer.decode(ids, skip_special_tokens=True), tokenizer.decode(ids)
    return answers


def _is_skipped(tokenizer: Any, token_id: int) -> bool:
    """True of a token that decoding leaves out: also one that was special before the settings said that it is not."""
    return not tokenizer.decode([token_id], skip_special_tokens=True)


def _results_of_theirs(folder: Path, kind: str) -> dict[str, Any]:
    import torch
    import transformers

    classes = {"bert": transformers.AutoModel, "bart": transformers.AutoModelForSeq2SeqLM}
    model, loaded = classes.get(kind, transformers.AutoModelForCausalLM).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if loaded["missing_keys"] or loaded["mismatched_keys"]:
        raise ValueError("some weights are random")
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        if kind == "bert":
            return {"states": model(prompt).last_hidden_state[0].mean(0).numpy()}
        mask = torch.ones_like(prompt)  # without it, the prompt's tokens that are padding somewhere are left out
        lines = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=LENGTH)
    return {"continuation": lines[0].tolist()[1 if kind == "bart" else len(PROMPT) :]}
