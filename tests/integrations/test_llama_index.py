"""The models of LlamaIndex: its own package runs them, and an index of documents, with the packaged model."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from minillm import Engine

pytest.importorskip("llama_index.core", reason="LlamaIndex's interfaces")

from llama_index.core import Document, PromptHelper, Settings, VectorStoreIndex, get_response_synthesizer
from llama_index.core.llms import ChatMessage

from minillm.integrations import llama_index
from minillm.integrations.llama_index import MinillmEmbedding, MinillmLLM

from ..pages import block
from .models import PLAIN, write_encoder, write_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPT = "A list of colors: red,"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: Any) -> Iterator[Engine]:
    with Engine(write_model(tmp_path_factory.mktemp("plain"), PLAIN)) as engine:
        yield engine


def test_a_text_goes_on_whole_or_in_pieces(engine: Engine) -> None:
    model = MinillmLLM(engine=engine, max_tokens=6)
    expected = engine.generate(PROMPT, max_new_tokens=6).text
    assert model.complete(PROMPT).text == expected
    pieces = list(model.stream_complete(PROMPT))
    assert pieces[-1].text == expected == "".join(piece.delta for piece in pieces) and len(pieces) == 6
    assert asyncio.run(model.acomplete(PROMPT)).text == expected


def test_a_conversation_is_answered_by_the_chat_template(engine: Engine) -> None:
    model = MinillmLLM(engine=engine, max_tokens=4)
    talk = [ChatMessage(role="system", content="A list "), ChatMessage(role="user", content="of colors: red,")]
    given = [{"role": "system", "content": "A list "}, {"role": "user", "content": "of colors: red,"}]
    expected = engine.chat(given, max_new_tokens=4).text
    assert model.chat(talk).message.content == expected
    assert "".join(piece.delta for piece in model.stream_chat(talk)) == expected
    assert model.metadata.is_chat_model and model.metadata.context_window == engine.context


def test_fields_stand_in_the_model_or_in_the_call(engine: Engine) -> None:
    model = MinillmLLM(engine=engine, temperature=1.5, max_tokens=8, fields={"seed": 3})
    drawn = engine.generate(PROMPT, do_sample=True, temperature=1.5, seed=3, max_new_tokens=8)
    assert model.complete(PROMPT).text == drawn.text
    assert model.complete(PROMPT, temperature=0, max_tokens=2).text == " orange,"
    ended = MinillmLLM(engine=engine).complete(PROMPT)
    assert ended.raw.finish_reason == "stop"


def test_an_index_of_documents_answers_with_the_nearest(engine: Engine, tmp_path: Any) -> None:
    texts = ["the good film", "a bad day", "the cat"]
    with Engine(write_encoder(tmp_path)) as encoder:
        vectors = MinillmEmbedding(engine=encoder)
        documents = [Document(text=text) for text in texts]
        index = VectorStoreIndex.from_documents(documents, embed_model=vectors, show_progress=False)
        asked = index.as_retriever(similarity_top_k=3).retrieve("film")
        rows = encoder.embed(texts, prompt="bad ") @ encoder.embed("film", prompt="good ")
        scores = dict(zip(texts, rows.tolist(), strict=True))
        assert [node.text for node in asked] == sorted(texts, key=scores.__getitem__, reverse=True)
        helper = PromptHelper(context_window=4096, num_output=4)  # its own prompts fill the small model's context
        model = MinillmLLM(engine=engine, max_tokens=4)
        answerer = get_response_synthesizer(llm=model, prompt_helper=helper)
        answer = index.as_query_engine(llm=model, response_synthesizer=answerer).query("film")
        assert str(answer) and len(answer.source_nodes) == 2
        assert asyncio.run(vectors.aget_query_embedding("film")) == vectors.get_query_embedding("film")


def test_the_page_s_example_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_index, "Engine", lambda model: engine)
    monkeypatch.setattr(Settings, "_llm", None)
    monkeypatch.setattr(Settings, "_embed_model", None)
    exec(block("minillm/integrations/README.md", "python", "from llama_index"), {})
    assert Settings.llm.complete(PROMPT, max_tokens=2).text == " orange,"
    assert len(Settings.embed_model.get_query_embedding("film")) == 192
