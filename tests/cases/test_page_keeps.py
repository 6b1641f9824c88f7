"""The page: how it samples at first, what it keeps over a reload and hands over, and the speed of a search."""

import json
import time
from pathlib import Path

import pytest

from minillm import Engine
from minillm.decoding.checkpoint_fields import CHAT_SAMPLING
from minillm.measure.comparison import STRATEGIES

from ..server import chromium
from ..server.chromium import Page
from ..server.test_page import IDLE, Behind, base, behind, browser, chat, choose, said, send, visit  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
]

OWN = {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
FIELDS = ("temperature", "top_p", "top_k", "min_p")


def shown(page: Page) -> dict[str, float]:
    form = "document.querySelector('#settings')"
    return {name: float(page.js(f"{form}.{name}.value")) for name in FIELDS}


def test_it_samples_at_first_as_the_checkpoint_says_or_sensibly(browser: Page, chat: Behind) -> None:  # noqa: F811
    with visit(browser, chat) as page:
        assert shown(page) == {"temperature": 0.8, "top_p": 1, "top_k": 0, "min_p": 0.05}
        page.js("document.querySelector('[name=seed]').value = 7")
        page.click("#prompt")
        page.type("Count from 3 to 9:")
        page.press("Enter")
        page.wait(f"document.querySelector('.tok') && {IDLE}")
        with Engine() as engine:
            fields = dict(CHAT_SAMPLING) | {"seed": 7, "max_new_tokens": 200}
            assert said(page) == engine.generate(chat.prompts[-1], **fields).text
        choose(page, STRATEGIES[1].name, 5)  # others are what they were
        assert shown(page)["temperature"] == 1 and shown(page)["min_p"] == 0
    engine = Engine(prefix_cache=True)
    engine.generation_defaults = engine.generation_defaults | OWN
    with behind(engine) as own, visit(browser, own) as page:
        assert shown(page) == {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": 0}


def test_what_was_said_is_there_after_a_reload_with_its_branches(browser: Page, chat: Behind) -> None:  # noqa: F811
    with visit(browser, chat) as page:
        send(page, "Count from 3 to 9:")
        page.move("#said .tok:nth-of-type(3)")
        page.wait("!document.querySelector('#card').hidden")
        page.click("#card button")
        page.wait(f"{IDLE} && document.querySelectorAll('#tree li.branch').length == 2")
        before = page.texts(".turn"), page.texts("#tree .node"), page.texts("#tree .current")
        requests = len(chat.prompts)
        page.go(chat.address)
        page.wait("document.querySelectorAll('#tree li.branch').length == 2")
        assert (page.texts(".turn"), page.texts("#tree .node"), page.texts("#tree .current")) == before
        assert len(chat.prompts) == requests  # nothing was computed
        page.move("#said .tok:nth-of-type(3)")
        page.wait("!document.querySelector('#card').hidden")  # alternatives are kept too
        page.click("#prompt")
        page.type("And then?")
        page.press("Enter")
        page.wait(f"document.querySelectorAll('.turn.model').length == 2 && {IDLE}")  # and it goes on
        page.click("#new")
        page.go(chat.address)
        page.wait("document.querySelector('#ideas button')")
        assert page.texts(".turn") == []


def test_what_is_stored_is_bounded_and_strange_contents_do_no_harm(browser: Page, chat: Behind) -> None:  # noqa: F811
    with visit(browser, chat) as page:
        send(page, "Count from 3 to 9:")
        stored = page.js("localStorage.getItem('minillm.said')")
        many = json.loads(stored) | {"another model": "x" * 1_999_990}
        page.js(f"localStorage.setItem('minillm.said', {json.dumps(json.dumps(many))})")
        page.click("#prompt")
        page.type("And then?")
        page.press("Enter")
        page.wait(f"document.querySelectorAll('.turn.model').length == 2 && {IDLE}")
        kept = page.js("localStorage.getItem('minillm.said')")
        assert len(kept) < 2_000_000 and "another model" not in kept and "And then?" in kept
        [name] = json.loads(kept)
        bad = ["", "null", "[1]", "{", json.dumps({name: {"chat": {"root": 5}, "completion": None}})]
        for text in bad:
            page.js(f"localStorage.setItem('minillm.said', {json.dumps(text)})")
            page.go(chat.address)
            page.wait("document.querySelector('#ideas button')")
            assert page.texts(".turn") == page.texts("#error:not(:empty)") == []


def test_a_question_without_an_answer_stands_in_the_field_again(browser: Page, chat: Behind) -> None:  # noqa: F811
    with visit(browser, chat) as page:
        send(page, "Count from 3 to 9:")
        stored = json.loads(page.js("localStorage.getItem('minillm.said')"))
        [trees] = stored.values()
        trees["chat"]["root"]["children"][0]["children"] = []
        trees["chat"]["leaf"] = [0]
        page.js(f"localStorage.setItem('minillm.said', {json.dumps(json.dumps(stored))})")
        page.go(chat.address)
        page.wait("document.querySelector('#ideas button')")
        assert page.js("document.querySelector('#prompt').value") == "Count from 3 to 9:"
        assert page.texts("#tree .node") == []


def test_it_is_copied_and_saved(browser: Page, chat: Behind, tmp_path: Path) -> None:  # noqa: F811
    with visit(browser, chat) as page:
        page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        page.js("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        page.js("document.querySelector('[name=system]').value = 'Be kind.'")
        send(page, "Count from 3 to 9:")
        answer = said(page).strip()
        page.click("#said .meta button:last-child")
        page.wait("window.copied")
        assert page.js("window.copied") == answer
        page.click("#copy")
        markdown = f"## System\n\nBe kind.\n\n## You\n\nCount from 3 to 9:\n\n## Model\n\n{answer}\n"
        page.wait(f"window.copied == {json.dumps(markdown)} && document.querySelector('#copy').textContent == 'Copied'")
        for kind in ("markdown", "json"):
            page.click(f"#save-{kind}")
        deadline = time.monotonic() + 30
        files = [tmp_path / "conversation.md", tmp_path / "conversation.json"]
        while not all(file.exists() and file.stat().st_size for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert files[0].read_text() == markdown
        taken = json.loads(files[1].read_text())
        assert [message["role"] for message in taken["messages"]] == ["system", "user", "assistant"]
        assert taken["messages"][2]["content"].strip() == answer and taken["model"] == "demo"
        [question] = taken["tree"]["root"]["children"]
        assert [token[0] for token in question["children"][0]["tokens"]]


def test_the_speed_of_a_search_is_its_tokens_over_its_time(browser: Page, base: Behind) -> None:  # noqa: F811
    with visit(browser, base) as page:
        send(page, "Once upon a time", strategy="beam search", tokens=40)
        [meta] = page.texts("#said .meta p:first-child")
        assert "40 tokens" in meta and "tokens/s" in meta and "first after" not in meta
        speed = "import('/page/transcript.js').then(({ speed }) => speed(%s))"
        search, stream = ({"tokens": 40, "first": 1.9, "total": 2.0, "whole": whole} for whole in (True, False))
        assert page.js(speed % json.dumps(search)) == "20.0 tokens/s"
        assert page.js(speed % json.dumps(stream)) == "390.0 tokens/s"
