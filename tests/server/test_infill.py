"""Text between a prefix and a suffix: /v1/completions with `suffix`, llama.cpp's /infill, Ollama's `suffix`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from tokenizers import AddedToken
from tokenizers import Tokenizer as PublishedTokenizer

import minillm
from minillm import Engine
from minillm.errors import PromptError
from minillm.server import make_app
from minillm.text.infill import FORMS, infill_form, infill_prompt

from ..tiny import write_checkpoint
from .client import error_of, post

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|fim_pad|>"]
DEMO = Path(minillm.__file__).parent / "assets" / "demo-opt"
BEFORE, AFTER = "def add(a, b):\n    ", "\n    return c\n"


def published(tokens: list[str]) -> PublishedTokenizer:
    """A vocabulary with further special tokens, in the library that publishes tokenizers."""
    tokenizer = PublishedTokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return tokenizer


def checkpoint(folder: Path, tokens: list[str]) -> Path:
    """A model with it."""
    tokenizer = published(tokens)
    write_checkpoint(folder, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(checkpoint(tmp_path_factory.mktemp("code"), QWEN), max_batch_size=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    return make_app(engine)


def test_the_prompt_is_the_text_that_the_models_card_writes(engine: Engine) -> None:
    written = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    expected = published(QWEN).encode(written).ids
    made = infill_prompt(engine.tokenizer, BEFORE, AFTER)
    assert made.token_ids == expected
    assert [engine.tokenizer.token(token) for token in made.end_ids] == ["<|fim_pad|>", "<|file_sep|>"]
    repository = f"<|file_sep|>sum.py\ndef f(): pass\n<|file_sep|>{written}"
    made = infill_prompt(engine.tokenizer, BEFORE, AFTER, [("sum.py", "def f(): pass")])
    assert made.token_ids == published(QWEN).encode(repository).ids


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.models.split(",")[0])
def test_each_form_is_known_by_its_tokens(form: Any, tmp_path: Path) -> None:
    tokens = [form.prefix, form.suffix, form.middle]
    with Engine(checkpoint(tmp_path, tokens)) as engine:
        assert infill_form(engine.tokenizer) is form
        parts = [(form.prefix, BEFORE), (form.suffix, AFTER)]
        written = "".join(marker + text for marker, text in (reversed(parts) if form.suffix_first else parts))
        written += "" if form.suffix_first else form.middle
        assert infill_prompt(engine.tokenizer, BEFORE, AFTER).token_ids == published(tokens).encode(written).ids


def test_a_model_without_such_tokens_is_refused(tmp_path: Path) -> None:
    with Engine(write_checkpoint(tmp_path)) as engine:
        with pytest.raises(PromptError, match="this model inserts no text"):
            infill_prompt(engine.tokenizer, "a", "b")
        app = make_app(engine)
        asked = {"prompt": "a", "suffix": "b", "max_tokens": 2}
        assert "Qwen2.5-Coder" in error_of(post(app, "/v1/completions", asked))["message"]
        assert error_of(post(app, "/infill", {"input_prefix": "a", "input_suffix": "b"}))["param"] == "input_prefix"
        assert post(app, "/api/generate", {"model": "minillm", "prompt": "a", "suffix": "b"}).status_code == 400


def test_every_door_gives_the_text_that_the_engine_writes(app: Starlette, engine: Engine) -> None:
    made = infill_prompt(engine.tokenizer, BEFORE, AFTER)
    ends = [*engine.eos_token_ids, *made.end_ids]
    text = engine.generate(made.token_ids, max_new_tokens=6, do_sample=False, eos_token_id=ends).text
    assert text
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 6, "temperature": 0}
    assert post(app, "/v1/completions", body).json()["choices"][0]["text"] == text
    body = {"input_prefix": BEFORE[:3], "prompt": BEFORE[3:], "input_suffix": AFTER, "n_predict": 6, "temperature": 0}
    answer = post(app, "/infill", body | {"samplers": ["top_k", "infill"], "cache_prompt": True, "n_indent": 4}).json()
    assert answer["content"] == text and answer["stop"] is True
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (6, len(made.token_ids))
    assert answer["stop_type"] == "limit" and answer["timings"]["predicted_n"] == 6
    stream = post(app, "/infill", body | {"stream": True}).text
    pieces = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n") if line.startswith("data")]
    assert "".join(piece["content"] for piece in pieces) == text
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    options = {"num_predict": 6, "temperature": 0}
    body = {"model": "minillm", "prompt": BEFORE, "suffix": AFTER, "options": options, "stream": False}
    assert post(app, "/api/generate", body).json()["response"] == text
    assert "insert" in post(app, "/api/show", {"model": "minillm"}).json()["capabilities"]


def test_a_token_after_the_suffix_ends_the_text(app: Starlette, engine: Engine) -> None:
    bias = {str(engine.tokenizer.added_ids["<|fim_pad|>"]): 100}
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 6, "temperature": 0, "logit_bias": bias}
    [choice] = post(app, "/v1/completions", body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    [choice] = post(app, "/v1/completions", body | {"ignore_eos": True}).json()["choices"]
    assert choice["finish_reason"] == "length"


def test_a_request_for_no_token_computes_the_prompt(app: Starlette) -> None:
    body = {"input_prefix": "x = 1\n" * 40, "input_suffix": "y", "n_predict": 0}
    answer = post(app, "/infill", body).json()
    assert answer["content"] == ""
    again = post(app, "/infill", body | {"n_predict": 2}).json()
    assert again["tokens_cached"] > 0.8 * again["tokens_evaluated"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": [5, 6], "suffix": "b"}, "text, found token ids"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True, "max_tokens": 2}, "leave one of them out"),
        ("/v1/chat/completions", {"messages": [], "suffix": "b"}, "/v1/completions inserts text"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "prompt": [5]}, "before the cursor"),
        ("/infill", {"input_prefix": "a " * 9999, "input_suffix": "b"}, "context"),
    ],
)
def test_one_line_about_a_mistake(app: Starlette, path: str, body: dict[str, Any], words: str) -> None:
    assert words in error_of(post(app, path, body))["message"]
