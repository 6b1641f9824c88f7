"""A conversation ends where its template ends a turn, although the checkpoint's EOS ids lack that token."""

import asyncio
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import AsyncEngine, Engine
from minillm.cli.conversation import Conversation
from minillm.cli.main import run
from minillm.server import make_app
from minillm.text.tokenizer.turn_ends import turn_ends

from ..conversations import TEMPLATES, user
from ..server.client import post
from ..tiny import TOKENIZER, write_checkpoint

TALK = [user("Hi")]
TOKEN = 512
"""The first id after the small tokenizer's"""
EOS = 2
FORMS = {"chatml": "<|im_end|>", "headers": "<|eot_id|>", "gemma": "<end_of_turn>", "phi": "<|end|>"}
"""Template -> the token that ends its turns"""


def checkpoint(folder: Path, form: str, end: str, **settings: Any) -> Path:
    """A model that says nothing but `end`, in the form of a real template, with the base model's EOS."""

    def only_that(tensors: dict[str, np.ndarray]) -> None:
        row = tensors["embed_tokens.weight"][TOKEN]
        tensors["final_layer_norm.weight"][:] = 0
        tensors["final_layer_norm.bias"][:] = 200 * row / (row @ row)

    write_checkpoint(folder, vocab_size=520, max_position_embeddings=400, eos_token_id=EOS, change=only_that)
    source = (TEMPLATES / f"{form}.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    own = json.loads((TOKENIZER / "tokenizer_config.json").read_text(encoding="utf-8"))
    changed = own | {"extra_special_tokens": [end]} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(changed), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("ends"), "chatml", "<|im_end|>")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, max_batch_size=4) as engine:
        yield engine


@pytest.mark.parametrize("form", FORMS)
def test_a_chat_ends_at_the_templates_own_token_and_generate_says_that_it_does_not(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(checkpoint(tmp_path, form, FORMS[form])) as engine:
        [completion] = engine.chat(TALK, max_new_tokens=5).completions
        assert (completion.token_ids, completion.finish_reason, completion.text) == ([TOKEN], "stop", "")
        assert [event.finish_reason for event in engine.stream_chat(TALK, max_new_tokens=5)] == ["stop"]
        assert engine.generate("Hi", max_new_tokens=5).completions[0].token_ids == [TOKEN] * 5
        assert (engine.eos_token_ids, engine.turn_end_ids) == ((EOS,), (EOS, TOKEN))
    [line] = [record.getMessage() for record in caplog.records]
    assert f"conversations end at {FORMS[form]}, and other texts go on" in line
    assert "eos_token_id is [2]" in line and "eos_token_id=[2, 512]" in line


def test_a_chat_ends_at_the_tokenizers_end_whatever_its_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "loops", "<that is all>", eos_token="<that is all>", extra_special_tokens=[])
    with Engine(folder) as engine:
        assert engine.chat(TALK, max_new_tokens=5).completions[0].finish_reason == "stop"
        assert engine.generate("Hi", max_new_tokens=5).completions[0].finish_reason == "length"


def test_what_the_user_says_of_the_end_wins(engine: Engine) -> None:
    def tokens(**fields: Any) -> int:
        return len(engine.chat(TALK, max_new_tokens=5, **fields).completions[0].token_ids)

    assert (tokens(), tokens(eos_token_id=7), tokens(eos_token_id=[])) == (1, 5, 5)
    assert (tokens(min_new_tokens=3, suppress_tokens=[]), tokens(defaults={"eos_token_id": 7})) == (4, 5)
    before = engine.generation_defaults
    engine.generation_defaults = {"eos_token_id": []}
    try:
        assert tokens() == 5
    finally:
        engine.generation_defaults = before
    assert tokens() == 1


def test_asyncio_ends_where_the_engine_does(folder: Path) -> None:
    async def both() -> list[int]:
        async with AsyncEngine(Engine(folder)) as engine:
            chat = await engine.chat(TALK, max_new_tokens=5)
            return [len(chat.completions[0].token_ids)]

    assert asyncio.run(both()) == [1]


CHAT: dict[str, Any] = {"model": "minillm", "messages": TALK, "max_tokens": 5, "temperature": 0}


def finish(engine: Engine, **more: Any) -> tuple[str, Any, int]:
    """Of /v1/chat/completions: why an answer ended, which stop was met, and the number of its tokens."""
    answer = post(make_app(engine), "/v1/chat/completions", CHAT | more).json()
    choice = answer["choices"][0]
    return choice["finish_reason"], choice["stop_reason"], answer["usage"]["completion_tokens"]


def test_over_http_a_chat_ends_there_and_a_completion_goes_on(engine: Engine) -> None:
    assert finish(engine) == ("stop", None, 1)
    assert finish(engine, ignore_eos=True) == ("length", None, 5)
    assert finish(engine, stop_token_ids=[9]) == ("stop", None, 1)
    app = make_app(engine)
    body = {"model": "minillm", "prompt": "Hi", "max_tokens": 5, "temperature": 0}
    assert post(app, "/v1/completions", body).json()["choices"][0]["finish_reason"] == "length"
    ended = post(app, "/v1/completions", body | {"stop_token_ids": [TOKEN]}).json()["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", TOKEN)


def test_over_http_a_stream_ends_there(engine: Engine) -> None:
    text = post(make_app(engine), "/v1/chat/completions", CHAT | {"stream": True}).text
    assert '"finish_reason":"stop","stop_reason":null' in text and "im_end" not in text


def test_a_response_ends_there(engine: Engine) -> None:
    body = {"model": "minillm", "input": "Hi", "max_output_tokens": 16, "temperature": 0}
    answer = post(make_app(engine), "/v1/responses", body).json()
    assert (answer["status"], answer["usage"]["output_tokens"]) == ("completed", 1)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_answers_end_there(engine: Engine, path: str) -> None:
    body = {"model": "minillm", "messages": TALK, "prompt": "Hi", "stream": False, "options": {"num_predict": 5}}
    body.pop("prompt" if path == "/api/chat" else "messages")
    answer = post(make_app(engine), path, body).json()
    assert (answer["done_reason"], answer["eval_count"]) == ("stop", 1)


@pytest.mark.parametrize(("fields", "tokens", "reason"), [({}, 1, "stop"), ({"eos_token_id": []}, 6, "length")])
def test_a_conversation_of_the_command_line_ends_there(
    engine: Engine, fields: dict[str, Any], tokens: int, reason: str
) -> None:
    conversation = Conversation(engine)
    assert "".join(conversation.ask("Hi", {"max_new_tokens": 6} | fields)) == ""
    assert (conversation.answer_tokens, conversation.finish_reason) == (tokens, reason)


def test_the_command_line_knows_that_the_model_has_ended_its_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/more\n"))
    run(["chat", "--model", str(folder), "--max-new-tokens", "6"])
    assert "the model has ended its answer" in capsys.readouterr().err


def test_the_names_are_those_of_llama_cpp() -> None:
    assert turn_ends({"<|im_end|>": 5, "</s>": 2, "<|eot_id|>": 3, "im_end": 1}) == [3, 5]
    assert turn_ends({"<|end|>": 4}) == [4]
    assert turn_ends({"<|end|>": 4, "<|return|>": 2, "<|call|>": 7}) == [2, 7]  # gpt-oss: a message, not the turn


def test_a_gguf_file_ends_a_turn_at_a_token_that_it_does_not_mark_as_control(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from ..gguf_files import LLAMA, write_llama

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "i", "<|im_end|>"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 4]
    entries = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens), "token_type": types}
    write_llama(tmp_path / "m.gguf", LLAMA | {"vocab_size": len(tokens)}, tokenizer=entries)
    with Engine(tmp_path / "m.gguf") as engine:
        assert engine.eos_token_ids == (2,)
        assert engine.turn_end_ids == (2, len(tokens) - 1)
