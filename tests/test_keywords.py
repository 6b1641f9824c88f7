"""Typed keyword arguments: those of the methods that take them, and read by mypy."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from minillm import AsyncEngine, Engine
from minillm.backends.placement import Placement
from minillm.decoding.fields import GenerationFields
from minillm.decoding.keywords import ChatFields, RequestFields
from minillm.engine.options import EngineKeywords
from minillm.text.chat import RENDER_ARGUMENTS

ROOT = Path(__file__).parent.parent


def test_the_other_arguments_are_those_of_the_methods_that_take_them() -> None:
    parameters = inspect.signature(Engine.requests).parameters
    own = {name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert get_type_hints(RequestFields).keys() - get_type_hints(GenerationFields).keys() == own
    assert get_type_hints(ChatFields).keys() - get_type_hints(RequestFields).keys() == {*RENDER_ARGUMENTS}
    rendering = get_type_hints(Engine.render_chat)
    assert {name: get_type_hints(ChatFields)[name] for name in RENDER_ARGUMENTS} == {
        name: rendering[name] for name in RENDER_ARGUMENTS
    }
    hints = get_type_hints(EngineKeywords)
    assert {one.name: one.type for one in dataclasses.fields(Placement)}.items() <= hints.items()


@pytest.mark.parametrize("name", ["generate", "stream", "chat", "stream_chat"])
def test_the_engine_for_asyncio_takes_what_the_engine_takes(name: str) -> None:
    of = [get_type_hints(getattr(kind, name))["fields"] for kind in (Engine, AsyncEngine)]
    assert of[0] == of[1]


@pytest.mark.parametrize("name", ["generate", "stream", "chat", "stream_chat"])
@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
def test_a_notebook_completes_the_fields(kind: type, name: str) -> None:
    """IPython offers the parameters of the signature."""
    fields = ChatFields if "chat" in name else RequestFields
    parameters = inspect.signature(getattr(kind, name)).parameters
    assert [*parameters][-len(get_type_hints(fields)) :] == [*get_type_hints(fields)]
    assert {"temperature", "timeout"} < parameters.keys()


WRONG = {
    'engine.generate("a", temprature=1.0)': 'Unexpected keyword argument "temprature" .* did you mean "temperature"',
    'engine.generate("a", temperature="hot")': 'No overload variant .* argument types "str", "str"',
    'engine.stream("a", max_tokens=4)': 'Unexpected keyword argument "max_tokens"',
    "engine.chat([], tols=[])": 'Unexpected keyword argument "tols"',
    'engine.stream_chat([], priority="high")': '"priority" .* incompatible type "str"',
    'aio.generate("a", top_kk=3)': 'Unexpected keyword argument "top_kk"',
    'aio.stream("a", top_k=0.5)': '"top_k" .* incompatible type "float"',
    'aio.chat([], stop_string="a")': 'Unexpected keyword argument "stop_string"',
    "aio.stream_chat([], request_id=3)": '"request_id" .* incompatible type "int"',
    "GenerationConfig(temprature=1.0)": 'Unexpected keyword argument "temprature"',
    "GenerationConfig(top_k=[1])": '"top_k" .* incompatible type "list',
    "config.merged(num_beam=2)": 'Unexpected keyword argument "num_beam"',
    'Engine.random("opt-125m", dtyp="int8")': 'Unexpected keyword argument "dtyp"',
}
RIGHT = """
from typing import Any
from minillm import AsyncEngine, Engine, GenerationConfig

engine, aio, config = Engine(), AsyncEngine(Engine()), GenerationConfig(temperature=0.5, stop_strings="a")
text: str = engine.generate("a", config, top_k=5, seed=None, timeout=2.0, eos_token_id=[1, 2]).text
texts: list[str] = [one.text for one in engine.generate(["a", [1, 2]], priority=-1)]
engine.chat([{"role": "user", "content": "a"}], tools=None, guided_choice=["a", "b"], early_stopping="never")
fields: dict[str, Any] = {"top_k": 3}
engine.stream("a", **fields)
engine.stream_chat([], config, chat_template_kwargs={"enable_thinking": False})
aio.stream("a", request_id="mine", **fields)
Engine.random("opt-125m", dtype="int8", threads=2)
"""


@pytest.mark.slow
def test_mypy_finds_misspelt_fields_and_wrong_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is in the extra dev")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(RIGHT + "\n".join(WRONG))
    command = [sys.executable, "-m", "mypy", str(snippet)]  # what `mypy` has found out about the package is not again
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"MYPYPATH": "."})
    found: dict[str, str] = {}
    for line, message in re.findall(r"snippet\.py:(\d+): (.*)", result.stdout):
        found[line] = f"{found.get(line, '')}{message} "
    first = RIGHT.count("\n") + 1
    for line, (call, expected) in enumerate(WRONG.items(), first):
        assert re.search(expected, found.pop(str(line), "")), (call, result.stdout)
    assert found == {}, result.stdout
