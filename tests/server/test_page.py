"""The page at / in a headless Chromium, with a real server and engine behind it."""

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest

from minillm import Engine
from minillm.engine.async_engine import AsyncEngine
from minillm.server import make_app

from . import chromium
from .chromium import CONTRAST, Page
from .client import TEMPLATE, listening

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
]

IDLE = "document.querySelector('#send') && !document.querySelector('#send.running')"
COLORS = "A list of colors: red,"


class Behind(NamedTuple):
    """A running server: its address, its engine, and the prompts that reached it."""

    address: str
    aio: AsyncEngine
    prompts: list[list[int]]

    @property
    def engine(self) -> Engine:
        return self.aio.engine


@contextmanager
def behind(engine: Engine, **options: Any) -> Iterator[Behind]:
    """A server with a page, until the end of the block."""
    aio, prompts = AsyncEngine(engine), []
    submit = aio.submit_made

    async def recorded(*args: Any, **kwargs: Any) -> Any:
        streams = await submit(*args, **kwargs)
        prompts.extend(stream.prompt_token_ids for stream in streams)
        return streams

    aio.submit_made = recorded  # type: ignore[method-assign]
    with listening(make_app({"demo": aio}, **options)) as address:
        yield Behind(f"{address}/", aio, prompts)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture(scope="module")
def base() -> Iterator[Behind]:
    """A model without a chat template."""
    with behind(Engine(prefix_cache=True)) as server:
        yield server


@pytest.fixture(scope="module")
def chat() -> Iterator[Behind]:
    """The same with one."""
    engine = Engine(prefix_cache=True)
    engine.chat_template = TEMPLATE
    with behind(engine) as server:
        yield server


@contextmanager
def visit(browser: Page, server: Behind, *, allowed: str = "", **look: Any) -> Iterator[Page]:
    """The page, opened anew. At the end: no error in the console but `allowed` ones, no request to another host."""
    browser.errors.clear()
    browser.requests.clear()
    server.prompts.clear()
    browser.look(**({"width": 1280, "height": 800} | look))
    browser.go(server.address)
    browser.wait("document.querySelector('#ideas button') || document.querySelector('#key-dialog[open]')")
    try:
        yield browser
        assert [error for error in browser.errors if not (allowed and allowed in error)] == []
        assert browser.requests
        assert all(request.startswith(server.address) for request in browser.requests)
    finally:
        browser.js("(localStorage.clear(), sessionStorage.clear())")
        browser.go("about:blank")


def send(page: Page, text: str, *, strategy: str = "greedy search", tokens: int = 12) -> None:
    """Type a text, send it by Enter, and wait for the end of the answer."""
    choose(page, strategy, tokens)
    page.click("#prompt")
    page.type(text)
    page.press("Enter")
    page.wait(f"document.querySelector('.tok') && {IDLE}")


def choose(page: Page, strategy: str, tokens: int) -> None:
    page.js(f"""(() => {{
        const {{ strategy, max_tokens }} = document.querySelector("#settings");
        strategy.value = {json.dumps(strategy)};
        max_tokens.value = {tokens};
        strategy.dispatchEvent(new Event("change", {{ bubbles: true }}));
    }})()""")


def said(page: Page, inside: str = "#said") -> str:
    """The text of the answer, as it would be copied."""
    return page.js(f"document.querySelector('{inside} .text').textContent")


def percent(probability: float) -> str:
    value = 100 * probability
    return "< 0.1 %" if value < 0.1 else f"{value:.1f} %" if value < 9.95 else f"{int(value + 0.5)} %"


def signs(text: str) -> str:
    return text.replace(" ", "␣").replace("\n", "⏎")


@cache
def plain() -> Engine:
    """The same model, not behind a server: greedy by default."""
    return Engine()


# --- continuing a text ------------------------------------------------------------------------------------------------


@pytest.fixture
def slowly(base: Behind, monkeypatch) -> None:
    """Steps of a larger model's time."""
    loop = base.engine._driver.loop
    advance = loop.advance

    def slow_advance() -> None:
        time.sleep(0.04)
        advance()

    monkeypatch.setattr(loop, "advance", slow_advance)


@pytest.mark.usefixtures("slowly")
def test_a_text_streams_token_by_token_and_is_the_engine_s(browser: Page, base: Behind) -> None:
    with visit(browser, base) as page:
        page.js("""(() => {
            window.seen = new Set();
            new MutationObserver(() => window.seen.add(document.querySelectorAll("#said .tok").length))
                .observe(document.querySelector("#said"), { childList: true, subtree: true });
        })()""")
        send(page, COLORS)
        expected = plain().generate(COLORS, max_new_tokens=12)
        assert said(page) == COLORS + expected.text
        assert page.js("window.seen.size") > 3  # it was drawn while it was generated
        [meta] = page.texts("#said .meta p:first-child")
        assert "12 tokens" in meta and "cut at the limit" in meta and "tokens/s" in meta
        assert page.js("document.querySelector('.tok').tabIndex") == 0
        cache = base.engine.runner.cache
        page.wait(f"document.querySelector('#cache').title.includes('{cache.cached_pages} kept')")
        assert cache.cached_pages > 0


def test_what_is_pointed_at_shows_the_alternatives_of_the_api(browser: Page, base: Behind) -> None:
    with visit(browser, base) as page:
        send(page, "Once upon a time")
        completion = (
            plain().generate("Once upon a time", max_new_tokens=12, logprobs=True, top_logprobs=5).completions[0]
        )
        tokenizer = base.engine.tokenizer
        for index in (0, 3, 11):
            page.js("document.querySelector('#card').hidden = true")
            page.move(f"#said .tok:nth-of-type({index + 2})")  # the first span is what was given
            page.wait("!document.querySelector('#card').hidden")
            best = completion.top_logprobs[index]
            expected = [(signs(tokenizer.token(token)), percent(math.exp(value))) for token, value in best]
            shown = list(zip(page.texts("#card code"), page.texts("#card .figure"), strict=True))
            assert shown == expected
            own = signs(tokenizer.token(completion.token_ids[index]))
            assert page.texts("#card .own code") == [own]
            color = page.js(f"getComputedStyle(document.querySelectorAll('.tok')[{index}]).backgroundColor")
            depth = float(re.findall(r"[\d.]+", color)[-1]) / 0.62 if "/" in color or "a" in color else 1
            assert depth == pytest.approx(min(1, -completion.logprobs[index] / math.log(128)), abs=0.01), color


def test_an_alternative_is_a_branch_that_computes_only_what_is_new(browser: Page, base: Behind) -> None:
    with visit(browser, base) as page:
        prompt = "Once upon a time there was a kind wolf named"
        send(page, prompt)
        before = said(page)
        first = plain().generate(prompt, max_new_tokens=12, logprobs=True, top_logprobs=5)
        index, row = 4, 2
        alternative = first.completions[0].top_logprobs[index][row][0]
        ids = [*first.prompt_token_ids, *first.token_ids[:index], alternative]
        page.move(f"#said .tok:nth-of-type({index + 2})")
        page.wait("!document.querySelector('#card').hidden")
        page.click(f"#card li:nth-child({row + 1}) button")
        page.wait(f"{IDLE} && document.querySelectorAll('#said .tok').length == {index + 13}")
        assert page.js(f"document.activeElement == document.querySelectorAll('#said .tok')[{index}]")
        assert page.js("document.querySelectorAll('#said .tok[tabindex=\"0\"]').length") == 1
        assert base.prompts[-1] == ids
        kept = base.engine.tokenizer.decode([*first.token_ids[:index], alternative])
        assert said(page) == prompt + kept + plain().generate(ids, max_new_tokens=12).text
        cached, computed = page.js(
            "document.querySelector('.meta p').textContent.match(/(\\d+) cached, (\\d+) computed/).slice(1).map(Number)"
        )
        assert cached + computed == len(ids)
        assert cached == len(ids) - 1
        assert page.js("document.querySelectorAll('#tree li.branch').length") == 2
        assert page.js("document.querySelectorAll('#tree li.branch.current').length") == 1

        page.click("#tree li.branch:first-child .node")  # back to what was said first
        assert said(page) == before
        assert "current" in page.js("document.querySelector('#tree li.branch:first-child').className")
        page.move(f"#said .tok:nth-of-type({index + 2})")
        page.wait("!document.querySelector('#card').hidden")
        requests = len(base.prompts)
        page.click(f"#card li:nth-child({row + 1}) button")  # the branch is there already
        assert said(page).startswith(prompt + kept)
        assert len(base.prompts) == requests


@pytest.mark.usefixtures("slowly")
def test_stop_ends_the_request_on_the_server(browser: Page, base: Behind) -> None:
    with visit(browser, base) as page:
        choose(page, "greedy search", 400)
        page.click("#prompt")
        page.type("Once upon a time")
        page.press("Enter")
        page.wait("document.querySelectorAll('.tok').length > 5")
        assert base.aio.load().running == 1
        page.press("Escape")
        page.wait(IDLE)
        assert "stopped" in page.texts("#said .meta p:first-child")[0]
        count = page.js("document.querySelectorAll('.tok').length")
        deadline = time.monotonic() + 20
        while base.aio.load().running and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not base.aio.load().running
        assert not base.engine.busy
        assert count < 300
        assert page.js("document.querySelectorAll('.tok').length") == count
        page.click("#send")  # an empty text continues it
        page.wait(f"document.querySelectorAll('.tok').length > {count + 3}")
        page.click("#send")  # now it stops
        page.wait(IDLE)


def test_the_steps_of_the_settings_are_the_engines(browser: Page, base: Behind) -> None:
    """The distribution before and after each step, of the settings as they are when a token is clicked."""
    with visit(browser, base, width=390, height=760) as page:
        send(page, COLORS)
        first = plain().generate(COLORS, max_new_tokens=12)
        ids = first.prompt_token_ids + first.token_ids[:2]
        choose(page, "nucleus sampling", 12)
        page.click("#said .tok:nth-of-type(4)")
        page.wait("document.querySelector('.steps table')")
        explanation = plain().explain(ids, do_sample=True, top_k=0, top_p=0.9)
        assert page.texts(".steps thead th") == [step.name for step in explanation.steps]
        tokens = explanation.likeliest()
        assert page.texts(".steps tbody th") == [signs(plain().tokenizer.token(token)) for token in tokens]
        chances = [step.probabilities[token] for token in tokens for step in explanation.steps]
        shown = [percent(chance) if chance else "–" for chance in chances]
        assert page.texts(".steps tbody td") == shown
        assert page.texts(".steps tfoot tr:first-child td") == [f"{step.tokens_left:,}" for step in explanation.steps]
        assert page.texts(".steps .own th") == [signs(plain().tokenizer.token(first.token_ids[2]))]
        assert page.texts(".steps .note") == ["The token is drawn from the last column."]
        assert page.js("document.documentElement.scrollWidth <= innerWidth")


def test_a_token_s_attention_is_the_engine_s(browser: Page, base: Behind) -> None:
    with visit(browser, base) as page:
        send(page, COLORS)
        page.click("#said .tok:nth-of-type(6)")
        page.wait("document.querySelector('.flow')")
        first = plain().generate(COLORS, max_new_tokens=12)
        ids = first.prompt_token_ids + first.token_ids[:5]
        weights = base.engine.attention(ids)  # [L, H, T]
        answer = page.js(f"""fetch("inspect/attention", {{ method: "POST",
            headers: {{ "Content-Type": "application/json" }}, body: JSON.stringify({{ token_ids: {ids} }}) }})
            .then((response) => response.json())""")
        assert len(answer["weights"]) == base.engine.config.num_layers
        for layer in answer["weights"]:
            for row in layer:
                assert sum(row) == pytest.approx(1, abs=1e-4)
        assert len(page.texts(".flow .seen")) == len(ids)

        def drawn() -> list[float]:
            return page.js("[...document.querySelectorAll('.seen')].map((s) => +s.style.getPropertyValue('--weight'))")

        for layer, head in ((-1, -1), (2, 3), (5, -1)):
            page.js(f"""(() => {{ for (const [key, value] of [["layer", {layer}], ["head", {head}]]) {{
                const select = document.querySelector(`#attention-${{key}}`);
                select.value = value;
                select.dispatchEvent(new Event("change"));
            }} }})()""")
            chosen = weights if layer < 0 else weights[layer : layer + 1]
            chosen = chosen if head < 0 else chosen[:, head : head + 1]
            row = chosen.mean((0, 1))
            expected = [min(1.0, float(value / row[1:].max())) for value in row]
            assert drawn() == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("pair", [("greedy search", "beam search"), ("contrastive search", "diverse beam search")])
def test_two_strategies_side_by_side(browser: Page, base: Behind, pair: tuple[str, str]) -> None:
    fields: dict[str, dict[str, Any]] = {
        "greedy search": {},
        "beam search": {"num_beams": 4},
        "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
        "diverse beam search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    }
    with visit(browser, base) as page:
        choose(page, "sampling", 10)
        page.click(".modes label:has([value=compare])")
        for side, name in enumerate(pair, 1):
            page.js(f"document.querySelector('.side:nth-child({side}) select').value = {json.dumps(name)}")
        page.click("#prompt")
        page.type(COLORS)
        page.press("Enter")
        page.wait(f"document.querySelectorAll('.mean:not(:empty)').length == 2 && {IDLE}")
        for side, name in enumerate(pair, 1):
            expected = plain().generate(COLORS, max_new_tokens=10, **fields[name])
            assert said(page, f".side:nth-child({side})") == expected.text
            page.js("document.querySelector('#card').hidden = true")
            page.move(f".side:nth-child({side}) .tok:nth-child(3)")  # a search's have alternatives too
            page.wait("!document.querySelector('#card').hidden")
            assert page.js("document.querySelectorAll('#card li').length") >= 5
            assert page.js("document.querySelectorAll('#card button').length") == 0


@pytest.mark.usefixtures("slowly")
def test_a_reader_who_scrolls_up_stays_there(browser: Page, base: Behind) -> None:
    with visit(browser, base, width=400, height=500) as page:
        choose(page, "greedy search", 60)
        page.js("document.querySelector('#prompt').value = 'Once upon a time there was a kind wolf. '.repeat(30)")
        page.click("#send")
        page.wait("document.querySelectorAll('.tok').length > 30")
        box, place = "document.querySelector('#transcript')", "document.querySelector('#transcript').scrollTop"
        assert page.js(place) > 100
        assert page.js(f"{box}.scrollHeight - {place} - {box}.clientHeight") < 48  # the end is in view
        page.js("document.querySelector('#transcript').scrollTop = 10")
        count = page.js("document.querySelectorAll('.tok').length")
        page.wait(f"document.querySelectorAll('.tok').length > {count + 5}")
        assert page.js(place) == 10
        page.wait(IDLE)
        assert page.js(place) == 10


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_new_text_ends_the_one_that_grows(browser: Page, base: Behind, monkeypatch, tokens: int) -> None:
    loop, allowed = base.engine._driver.loop, threading.Semaphore(tokens)
    advance = loop.advance

    def held_advance() -> None:
        assert allowed.acquire(timeout=60)
        advance()

    monkeypatch.setattr(loop, "advance", held_advance)
    with visit(browser, base) as page:
        choose(page, "greedy search", 100)
        page.click("#prompt")
        page.type("Once upon a time")
        page.press("Enter")
        page.wait("document.querySelector('#send.running') && document.querySelector('#tree .user')")
        page.wait(f"document.querySelectorAll('.tok').length == {tokens}")
        page.click("#new")
        allowed.release(1000)
        page.wait(IDLE)
        assert page.texts(".tok") == page.texts(".node") == []
        page.js("document.querySelector('#prompt').value = ''")
        send(page, COLORS, tokens=3)
        assert said(page).startswith(COLORS)
        assert len(page.texts(".tok")) == 3
        assert len(page.texts("#tree .node")) == 2


# --- conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_is_the_template_s(browser: Page, chat: Behind) -> None:
    engine = chat.engine
    with visit(browser, chat) as page:
        assert page.js("document.body.dataset.mode") == "chat"
        page.js("document.querySelector('[name=system]').value = 'Be kind.'")
        send(page, "Count from 3 to 9:", tokens=6)
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Count from 3 to 9:"}]
        ids = engine.tokenizer.encode(engine.render_chat(messages), add_special_tokens=False)
        assert chat.prompts == [ids]
        answer = plain().generate(ids, max_new_tokens=6).text
        assert page.texts(".turn.user p") == ["Count from 3 to 9:"]
        assert said(page) == answer
        page.click("#prompt")
        page.type("And")
        page.press("Enter", shift=True)
        page.type("then?")
        page.press("Enter")
        page.wait(f"document.querySelectorAll('.turn.model').length == 2 && {IDLE}")
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And\nthen?"}]
        ids = engine.tokenizer.encode(engine.render_chat(messages), add_special_tokens=False)
        assert chat.prompts[-1] == ids
        cached = page.js("+[...document.querySelectorAll('.meta p')].at(-2).textContent.match(/(\\d+) cached/)[1]")
        assert cached > 0
        page.click("#new")
        assert page.texts(".turn") == []
        assert page.js("getComputedStyle(document.querySelector('#welcome')).display") != "none"


def test_a_model_without_a_template_only_continues_texts(browser: Page, base: Behind) -> None:
    with visit(browser, base) as page:
        assert page.js("document.body.dataset.mode") == "completion"
        for choice in ("#chat-choice", "#system"):
            assert page.js(f"getComputedStyle(document.querySelector('{choice}')).display") == "none"


def test_several_models_can_be_chosen(browser: Page, base: Behind) -> None:
    second = AsyncEngine(Engine())
    with listening(make_app({"first": Engine(), "second": second})) as address:
        several = Behind(f"{address}/", second, [])
        with visit(browser, several) as page:
            assert page.texts("#model-select option") == ["first", "second"]
            page.js("""(() => {
                const select = document.querySelector("#model-select");
                select.value = "second";
                select.dispatchEvent(new Event("change"));
            })()""")
            page.wait("location.search === '?model=second' && document.querySelector('#ideas button')")
            send(page, COLORS, tokens=4)
            assert second.engine.stats.decode_tokens == 3
            assert said(page) == COLORS + plain().generate(COLORS, max_new_tokens=4).text


# --- keys, errors, hostile text ---------------------------------------------------------------------------------------


def test_the_keyboard_reaches_every_token(browser: Page, base: Behind) -> None:
    with visit(browser, base) as page:
        send(page, COLORS)
        page.js("document.querySelector('#new').focus()")
        while not page.js("document.activeElement.classList.contains('tok')"):
            page.press("Tab")
        page.press("ArrowRight")
        page.press("ArrowRight")
        page.wait("!document.querySelector('#card').hidden")
        third = "document.activeElement == document.querySelectorAll('.tok')[2]"
        assert page.js(third)
        assert page.js("document.activeElement.getAttribute('aria-label')").endswith("%")
        assert page.js("document.activeElement.getAttribute('role')") == "button"
        page.press("Enter")  # its panel, and there its first alternative
        page.wait("document.querySelector('#token .alternatives button') == document.activeElement")
        assert page.js("document.activeElement.getAttribute('aria-label')").startswith("Branch with ")


def test_an_error_is_one_line_and_the_text_is_not_lost(browser: Page, base: Behind) -> None:
    with visit(browser, base, allowed="400 (Bad Request)") as page:
        text = "Once upon a time " * 150
        choose(page, "sampling", 5)
        page.click("#prompt")
        page.type(text)
        page.press("Enter")
        page.wait("document.querySelector('#error').textContent")
        [message] = page.texts("#error")
        assert "512" in message and "\n" not in message
        page.wait(IDLE)
        assert page.js("document.querySelector('#prompt').value") == text
        assert page.texts("#tree .node") == []
        page.js("document.querySelector('#prompt').value = 'Once'")
        page.press("Enter")
        page.wait(f"document.querySelectorAll('.tok').length == 5 && {IDLE}")
        assert page.texts("#error") == [""]


def test_text_of_the_model_and_of_the_user_is_never_markup(browser: Page, base: Behind, monkeypatch) -> None:
    hostile = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    kind = type(base.engine.tokenizer)
    monkeypatch.setattr(kind, "token_bytes", lambda self, token: hostile.encode())
    monkeypatch.setattr(kind, "token", lambda self, token: hostile)
    with visit(browser, base) as page:
        send(page, hostile, tokens=3)
        assert said(page).startswith(hostile + hostile)
        page.move("#said .tok")
        page.wait("!document.querySelector('#card').hidden")
        page.click("#said .tok")
        page.wait("document.querySelector('.flow')")
        for place in ("#said", "#card", "#token", "#tree"):
            assert "<img src=x" in page.js(f"document.querySelector('{place}').textContent").replace("␣", " ")
        assert page.js("document.querySelectorAll('body img, body script').length") == 0
        assert page.js("document.title") == "minillm"


def test_a_server_with_a_key_is_asked_for_it_once(browser: Page) -> None:
    with behind(Engine(prefix_cache=True), keys=["right"]) as server, visit(browser, server, allowed="401") as page:
        page.wait("document.querySelector('#key-dialog[open]')")
        page.type("wrong")
        page.press("Enter")
        page.wait("document.querySelector('#key-error').textContent.includes('wrong')")
        page.type("right")
        page.press("Enter")
        page.wait("document.querySelector('#ideas button')")
        send(page, COLORS, tokens=4)
        assert len(page.texts(".tok")) == 4
        assert page.js("sessionStorage.length") == 1
        assert "right" not in page.js("JSON.stringify(localStorage)")


# --- looks ------------------------------------------------------------------------------------------------------------

SIZES = {"desktop": (1280, 800, False), "tablet": (820, 1100, True), "phone": (360, 740, True)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_is_legible_and_does_not_jump(browser: Page, chat: Behind, size: str, scheme: str) -> None:
    width, height, phone = SIZES[size]
    with visit(browser, chat, width=width, height=height, phone=phone, scheme=scheme) as page:
        scrolling = "[document.documentElement, ...document.querySelectorAll('body, #transcript, .panel, .flow')]"
        fits = f"{scrolling}.every((each) => each.scrollWidth <= each.clientWidth)"
        assert page.js(fits)
        assert page.js(CONTRAST) == {}
        assert page.js("document.querySelector('#settings #cache') !== null") == (width < 1024)
        page.js("""(() => {
            window.shifts = [];
            const keep = (list) => window.shifts.push(...list.getEntries());
            new PerformanceObserver(keep).observe({ type: "layout-shift" });
            new MutationObserver(() => { window.first ??= document.querySelector(".tok") && performance.now(); })
                .observe(document.querySelector("#said"), { childList: true, subtree: true });
        })()""")
        choose(page, "sampling", 60)
        page.js("document.querySelector('#prompt').value = 'Once upon a time ' + 'verylong'.repeat(30)")
        (page.tap if phone else page.click)("#send")
        page.wait(f"document.querySelector('.tok') && {IDLE}")
        assert page.js(fits)
        # while an answer grows, nothing else may move; before it, the field of what was sent shrinks
        moved = page.js("""window.shifts.filter(({ startTime }) => startTime > window.first)
            .flatMap(({ sources }) => sources.map(({ node }) => node))
            .filter((node) => node && !document.querySelector("#said").contains(node))
            .map((node) => `${node.nodeName} ${node.id} ${node.className}`)""")
        assert moved == []
        page.js("document.querySelector('.tok').style.setProperty('--depth', 1)")  # the deepest shade there is
        (page.tap if phone else page.click)("#said .tok:nth-of-type(2)")
        page.wait("document.querySelector('.flow')")
        page.js("document.querySelectorAll('.seen')[1].style.setProperty('--weight', 1)")
        time.sleep(0.3)  # a panel moves in
        assert page.js("document.querySelector('.flow').checkVisibility({ visibilityProperty: true })")
        assert page.js(fits)
        assert page.js(CONTRAST) == {}


def test_light_and_dark_by_the_button_stay(browser: Page, base: Behind) -> None:
    with visit(browser, base) as page:
        color = "getComputedStyle(document.body).backgroundColor"
        light = page.js(color)
        page.click("#theme")
        dark = page.js(color)
        assert dark != light
        page.go(base.address)
        assert page.js(color) == dark
        page.click("#theme")
        assert page.js(color) == light
