"""Other people's clients against a real server: openai, litellm, langchain-openai.

Answers are those of an engine alone. The clients are those of the extra "clients".
"""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server needs the extra serve")

from minillm import Engine
from minillm.server import make_app

from .client import LEFT_OPEN, TEMPLATE, listening

pytestmark = [pytest.mark.slow, LEFT_OPEN]

PROMPT = "A list of colors: red,"
TALK: list[Any] = [{"role": "user", "content": "A list of animals: cat,"}]
KEY = "a key"


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    """An engine for the expected answers."""
    with Engine() as engine:
        engine.chat_template = TEMPLATE
        yield engine


@pytest.fixture(scope="module")
def url(alone: Engine) -> Iterator[str]:
    """A server with a key."""
    engine = Engine(max_batch_size=32, prefix_cache=True)
    engine.chat_template = TEMPLATE
    with listening(make_app({"demo": engine}, keys=[KEY])) as url:
        yield f"{url}/v1"


# --- openai -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    openai = pytest.importorskip("openai", reason="the client is in the extra clients")
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_openai_lists_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "minillm"


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_openai_completions_of_prompts_in_each_form(form: str, client: Any, alone: Engine) -> None:
    texts = [PROMPT, "Count from 3 to 9:"]
    results = alone.generate(texts, max_new_tokens=9)
    ids = [result.prompt_token_ids for result in results]
    prompt = {"text": texts[0], "texts": texts, "ids": ids[0], "lists of ids": ids}[form]
    answer = client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=9)
    expected = results[: len(answer.choices)]
    assert len(expected) == (1 if form in ("text", "ids") else 2)
    assert [choice.text for choice in answer.choices] == [result.text for result in expected]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * len(expected)
    assert answer.usage.prompt_tokens == sum(len(result.prompt_token_ids) for result in expected)
    assert answer.usage.completion_tokens == 9 * len(expected)


def test_openai_echoes_a_prompt_with_its_log_probabilities(client: Any, alone: Engine) -> None:
    for new in (0, 4):
        answer = client.completions.create(
            model="demo", prompt=PROMPT, temperature=0, max_tokens=new, echo=True, logprobs=2
        )
        found = answer.choices[0].logprobs
        score = alone.score(alone.generate(PROMPT, max_new_tokens=1).prompt_token_ids)
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1 : len(score.logprobs)] == pytest.approx(score.logprobs[1:], abs=1e-4)
        assert len(found.tokens) == len(found.text_offset) == len(score.logprobs) + new
        assert answer.choices[0].text.startswith(PROMPT)


def test_openai_parameters_of_sampling(client: Any, alone: Engine) -> None:
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"seed": 4, "n": 3}, {"seed": 4, "num_return_sequences": 3}),
        ({"seed": 5, "top_p": 0.8, "temperature": 0.7}, {"seed": 5, "top_p": 0.8, "temperature": 0.7}),
        ({"seed": 6, "frequency_penalty": 0.5}, {"seed": 6, "frequency_penalty": 0.5}),
        ({"seed": 6, "presence_penalty": 0.5}, {"seed": 6, "presence_penalty": 0.5}),
        ({"seed": 7, "stop": ["e", "an"]}, {"seed": 7, "stop_strings": ["e", "an"]}),
        ({"seed": 8, "extra_body": {"top_k": 3, "min_p": 0.02}}, {"seed": 8, "top_k": 3, "min_p": 0.02}),
    ]
    for fields, ours in ways:
        for _ in range(2):  # a seed repeats its answer
            answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=12, **fields)
            expected = alone.generate(PROMPT, max_new_tokens=12, **{"do_sample": True, "top_k": 0} | ours)
            assert [choice.text for choice in answer.choices] == [one.text for one in expected.completions], fields


def test_openai_best_of_is_the_best_of_so_many(client: Any, alone: Engine) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, best_of=4, n=2, seed=1, logprobs=0)
    drawn = alone.generate(
        PROMPT, do_sample=True, top_k=0, seed=1, num_return_sequences=4, max_new_tokens=8, logprobs=True
    ).completions
    drawn.sort(key=lambda one: -sum(one.logprobs) / len(one.logprobs))
    assert [choice.text for choice in answer.choices] == [one.text for one in drawn[:2]]


def test_openai_bias(client: Any, alone: Engine) -> None:
    token = alone.tokenizer.encode(" gold", add_special_tokens=False)[0]
    answer = client.completions.create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=3, logit_bias={str(token): 100}
    )
    assert answer.choices[0].text == 3 * alone.tokenizer.decode([token])


def test_openai_streams_what_it_answers(client: Any, alone: Engine) -> None:
    options = {"include_usage": True}
    *chunks, last = client.completions.create(
        model="demo", prompt=[PROMPT, "Monday,"], temperature=0, max_tokens=8, stream=True, stream_options=options
    )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [alone.generate(prompt, max_new_tokens=8).text for prompt in (PROMPT, "Monday,")]
    assert (last.choices, last.usage.completion_tokens) == ([], 16)
    *chunks, last = client.chat.completions.create(
        model="demo", messages=TALK, temperature=0, max_tokens=8, stream=True, stream_options=options
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    expected = alone.chat(TALK, max_new_tokens=8)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.completions[0].finish_reason
    assert last.usage.completion_tokens == len(expected.token_ids)


def test_openai_chats_with_log_probabilities(client: Any, alone: Engine) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=TALK, max_completion_tokens=6, n=2, seed=3, logprobs=True, top_logprobs=3
    )
    expected = alone.chat(
        TALK, do_sample=True, top_k=0, seed=3, num_return_sequences=2, max_new_tokens=6, top_logprobs=3
    )
    for choice, one in zip(answer.choices, expected.completions, strict=True):
        assert choice.message.content == one.text
        assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(one.logprobs, abs=1e-4)
        assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == one.text
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


def test_openai_forms_of_answers(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Cat(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=12)
        age: int = pydantic.Field(ge=0, le=30)
        indoor: bool

    talk = [{"role": "user", "content": "Ben is 7 years old. As JSON:"}]
    answer = client.chat.completions.parse(model="demo", messages=talk, response_format=Cat, max_tokens=100, seed=2)
    cat = answer.choices[0].message.parsed
    assert isinstance(cat, Cat) and 0 <= cat.age <= 30
    answer = client.chat.completions.create(
        model="demo", messages=talk, response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_openai_eighty_at_once(url: str, alone: Engine) -> None:
    """Twice 40, chats and completions, half of them streamed; each is what the engine alone draws with its seed."""
    openai = pytest.importorskip("openai", reason="the client is in the extra clients")

    async def complete(client: Any, seed: int) -> str:
        answer = await client.completions.create(model="demo", prompt=PROMPT, seed=seed, max_tokens=10)
        return answer.choices[0].text

    async def chat(client: Any, seed: int) -> str:
        chunks = await client.chat.completions.create(
            model="demo", messages=TALK, seed=seed, max_tokens=10, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def both() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(40) for one in (complete, chat)))

    fields: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 10}
    expected = [
        text
        for seed in range(40)
        for text in (alone.generate(PROMPT, seed=seed, **fields).text, alone.chat(TALK, seed=seed, **fields).text)
    ]
    assert asyncio.run(both()) == expected
    assert len(set(expected)) > 20


def test_openai_errors_are_the_clients_own(client: Any, url: str) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model="demo", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="nonsense"):
        client.chat.completions.create(model="demo", messages=TALK, extra_body={"nonsense": 1})
    with (
        openai.OpenAI(base_url=url, api_key="another", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_openai_leaves_a_stream(client: Any) -> None:
    with client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    assert client.completions.create(model="demo", prompt=PROMPT, max_tokens=1).usage.completion_tokens == 1


# --- litellm ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def litellm(url: str) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network
    with patch.context():
        return pytest.importorskip("litellm", reason="the client is in the extra clients")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.filterwarnings("ignore")
def test_litellm(provider: str, litellm: Any, url: str, alone: Engine) -> None:
    where = {"model": f"{provider}/demo", "api_base": url, "api_key": KEY}
    alone_answer = alone.chat(TALK, max_new_tokens=8)
    expected = alone_answer.text
    answer = litellm.completion(**where, messages=TALK, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == len(alone_answer.token_ids)
    chunks = litellm.completion(**where, messages=TALK, temperature=0, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    answer = asyncio.run(litellm.acompletion(**where, messages=TALK, temperature=0, max_tokens=8, top_k=5))
    assert answer.choices[0].message.content == expected
    with pytest.raises(litellm.BadRequestError, match="nonsense"):
        litellm.completion(**where, messages=TALK, max_tokens=8, extra_body={"nonsense": 1})


@pytest.mark.filterwarnings("ignore")
def test_litellm_completes_a_text(litellm: Any, url: str, alone: Engine) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/demo", api_base=url, api_key=KEY, prompt=PROMPT, temperature=0, max_tokens=8
    )
    assert answer.choices[0].text == alone.generate(PROMPT, max_new_tokens=8).text


# --- langchain --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def langchain() -> Any:
    return pytest.importorskip("langchain_openai", reason="the client is in the extra clients")


@pytest.mark.filterwarnings("ignore")
def test_langchain_chats(langchain: Any, url: str, alone: Engine) -> None:
    model = langchain.ChatOpenAI(model="demo", base_url=url, api_key=KEY, temperature=0, max_tokens=8)
    alone_answer = alone.chat(TALK, max_new_tokens=8)
    expected, count = alone_answer.text, len(alone_answer.token_ids)
    answer = model.invoke(TALK[0]["content"])
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] == count
    assert "".join(chunk.content for chunk in model.stream(TALK[0]["content"])) == expected
    assert [one.content for one in model.batch([TALK[0]["content"]] * 3)] == [expected] * 3
    usages = [chunk.usage_metadata for chunk in model.stream(TALK[0]["content"], stream_usage=True)]
    assert [usage["output_tokens"] for usage in usages if usage] == [count]


@pytest.mark.filterwarnings("ignore")
def test_langchain_completes_texts(langchain: Any, url: str, alone: Engine) -> None:
    model = langchain.OpenAI(model="demo", base_url=url, api_key=KEY, temperature=0, max_tokens=8)
    prompts = [PROMPT, "Monday,"]
    found = [generation[0].text for generation in model.generate(prompts).generations]
    assert found == [alone.generate(prompt, max_new_tokens=8).text for prompt in prompts]
    assert "".join(model.stream(PROMPT)) == alone.generate(PROMPT, max_new_tokens=8).text


@pytest.mark.filterwarnings("ignore")
def test_langchain_reads_a_structure(langchain: Any, url: str) -> None:
    schema = {
        "title": "Person",
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    model = langchain.ChatOpenAI(model="demo", base_url=url, api_key=KEY, temperature=0, max_tokens=100)
    person = model.with_structured_output(schema, method="json_schema").invoke("Ben is 7 years old. As JSON:")
    assert person.keys() == {"name", "age"}
    assert isinstance(person["age"], int) and math.isfinite(person["age"])
