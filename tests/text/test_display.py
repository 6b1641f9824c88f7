"""Engines and results as Python and notebooks show them."""

import copy
import dataclasses
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from minillm import Completion, Engine, Generation, GenerationConfig
from minillm.distributed.communicator import Communicator
from minillm.distributed.threads import run_ranks
from minillm.errors import EngineStateError
from minillm.parallel import Parallel
from minillm.text.display import TokenView, grid_html, percent, results_html

from ..server import chromium
from ..tiny import write_checkpoint

PROMPT = "A list of colors: red,"


class Tokens(HTMLParser):
    """The shaded tokens of a piece of HTML, and its text; a tag that is not closed is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.spans: list[tuple[str, float, str]] = []
        """Text, log-probability, card of each"""
        self.text = ""
        self.tags: set[str] = set()
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._open.append((tag, dict(attrs)))
        if "tok" in (dict(attrs).get("class") or "").split():
            style = re.fullmatch(r"--logprob:(-?[\d.]+)", dict(attrs)["style"] or "")
            assert style
            self.spans.append(("", float(style[1]), dict(attrs)["data-card"] or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1][0] == "style" or "note" in (self._open[-1][1].get("class") or ""):
            return
        self.text += data
        if "tok" in (self._open[-1][1].get("class") or "").split():
            self.spans[-1] = (self.spans[-1][0] + data, *self.spans[-1][1:])


def html_of(shown: Any) -> str:
    html: str = shown._repr_html_()
    assert not re.search(r"<script|<link|<img|https?://|url\(|@import", html)  # nothing from elsewhere
    return html


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


def test_a_generation_is_its_text_and_shows_each_token_with_its_alternatives(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=6, top_logprobs=3)
    assert str(answer) == str(answer.completions[0]) == f"{answer}" == answer.text
    shown = Tokens(html_of(answer))
    assert shown.text == answer.text
    [completion] = answer.completions
    assert completion.logprobs is not None and completion.top_logprobs is not None
    assert len(shown.spans) == 6
    for i, (text, logprob, card) in enumerate(shown.spans):
        assert text == completion.token_bytes[i].decode().strip(" ")
        assert logprob == pytest.approx(completion.logprobs[i], abs=6e-4)
        rows = card.splitlines()
        assert len(rows) == 3
        for row, (token, value) in zip(rows, completion.top_logprobs[i], strict=True):
            assert engine.tokenizer.token(token).replace(" ", "␣") in row
            assert percent(2.718281828459045**value) in row
            assert row.startswith("▸") == (token == completion.token_ids[i])
        assert sum(row.startswith("▸") for row in rows) == 1


def test_a_token_that_is_not_among_the_best_is_named_last(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=1, top_logprobs=1, suppress_tokens=[1211])
    [(_, _, card)] = Tokens(html_of(answer)).spans
    assert [row[0] for row in card.splitlines()] == [" ", "▸"]


def test_without_log_probabilities_the_text_stands_alone(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=6, num_beams=2, num_return_sequences=2)
    shown = Tokens(html_of(answer))
    assert shown.spans == []
    assert shown.text == "".join(one.text for one in answer.completions)


def test_an_echoed_prompt_has_its_shades_and_a_score_too(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=4, top_logprobs=1, echo=True)
    score = engine.score(answer.prompt_token_ids + answer.token_ids)
    echoed, scored = Tokens(html_of(answer)), Tokens(html_of(score))
    assert echoed.text == f"</s>{answer.text}" == scored.text
    assert [one[:2] for one in echoed.spans] == [one[:2] for one in scored.spans]
    assert len(scored.spans) == len(score.token_ids) - 1  # nothing is before the first
    assert repr(score) == f"Score(tokens=12, total={score.total}, perplexity={score.perplexity})"


def test_markup_and_control_characters_stay_text(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>&amp;\n\x1b[31m'
    answer = Generation([1], [Completion(text=evil, token_ids=[7], token_bytes=[evil.encode()])])
    assert Tokens(html_of(answer)).text == evil
    answer.completions[0].logprobs = [-1.0]
    shown = Tokens(html_of(answer))
    assert shown.text == evil
    assert "script" not in shown.tags
    assert shown.spans[0][2].startswith("▸ #7")
    card = Tokens(results_html([([], [TokenView("a", -1.0, [('"><script>', -2.0)], "'>b")], "<i>&")]))
    assert card.tags == {"div", "style", "span"}
    assert card.spans[0][2].splitlines()[0].startswith('  "><script>')
    with Engine(write_checkpoint(tmp_path, seed=1)) as engine:
        engine.name = "<b>&"
        assert "&lt;b&gt;&amp;" in html_of(engine)


def test_characters_of_several_tokens_are_whole(engine: Engine) -> None:
    ids = engine.tokenizer.encode("日本 é 🎉")
    score = engine.score(ids)
    shown = Tokens(html_of(score))
    assert shown.text == "</s>日本 é 🎉"
    assert len(shown.spans) == len(ids) - 1
    assert any(not text for text, _, _ in shown.spans)  # a part of a character


def test_results_without_a_tokenizer_show_ids(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, seed=1)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    with Engine(folder) as engine:
        assert engine.tokenizer is None
        answer = engine.generate([5, 6], max_new_tokens=3, top_logprobs=2, eos_token_id=[])
        shown = Tokens(html_of(answer))
        assert [text.strip() for text, _, _ in shown.spans] == [str(token) for token in answer.token_ids]
        assert f"#{answer.token_ids[0]}" in shown.spans[0][2]
        assert Tokens(html_of(engine.score([5, 6, 7]))).text.split() == ["5", "6", "7"]


def test_a_generation_is_copied_pickled_and_compared_without_the_vocabulary(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=4, top_logprobs=2)
    dumped = pickle.dumps(answer)
    assert len(dumped) < 4000
    for other in (pickle.loads(dumped), copy.deepcopy(answer), dataclasses.replace(answer)):
        assert other == answer
        assert Tokens(html_of(other)).text == answer.text
    assert "tokenizer" not in str(dataclasses.asdict(answer))


@pytest.mark.longer
def test_a_repr_is_brief(engine: Engine) -> None:
    answer = engine.generate("Once upon a time", max_new_tokens=60, eos_token_id=[], logprobs=True)
    assert len(repr(answer)) < 400
    assert "..." in repr(answer)
    assert "logprobs" not in repr(answer)
    first, *_, last = engine.stream("Once upon a time", max_new_tokens=3)
    assert repr(first).startswith(f"Event(request_id={first.request_id}, index=0, text=' there', token_ids=(")
    assert all(word not in repr(first) for word in ("None", "False", "logprobs", "finish_reason"))
    assert "finish_reason='length'" in repr(last) and "request_finished=True" in repr(last)


def test_an_engine_says_what_it_is(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, seed=1)
    with Engine(folder, max_batch_size=3, dtype="float32") as engine:
        facts = engine.summary()
        assert facts["name"] == str(folder)
        assert facts["weight_bytes"] == pytest.approx(4 * facts["parameters"], rel=0.01)
        assert (facts["max_batch_size"], facts["context"]) == (3, engine.config.max_positions)
        assert facts["cached_tokens"] == engine.load().total_pages * engine.runner.cache.page_size
        assert all(f"{name}=" in repr(engine) for name, value in facts.items() if value is not None)
        assert f"{facts['parameters']:,}" in html_of(engine)
    assert repr(engine) == engine._repr_html_() == f"Engine(name={str(folder)!r}, closed=True)"
    with pytest.raises(EngineStateError, match="closed"):
        engine.summary()


@pytest.mark.longer
def test_each_of_several_ranks_says_which_it_is() -> None:
    def look(communicator: Communicator) -> list[str]:
        parallel = Parallel(tensor=2)
        with Engine(parallel=parallel, communicator=communicator, backend="numpy", cache_bytes=1 << 24) as engine:
            shown = repr(engine)
        return [shown, repr(engine)]

    first, second = run_ranks(2, look)
    assert "rank='0 of 2'" in first[0] and "cached_tokens=" in first[0]
    assert "rank='1 of 2'" in second[0] and "parameters=3161472" in second[0]
    assert first[1] == second[1] == "Engine(name='demo', closed=True)"


@pytest.mark.slow
@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_in_a_browser_shades_follow_surprise_and_cards_fit(engine: Engine, tmp_path: Path, theme: str) -> None:
    """In the colours of a light and of a dark notebook: the text can be read on the deepest shade."""
    answer = engine.generate("Once upon a time", max_new_tokens=60, top_logprobs=5, do_sample=True, seed=1)
    answer.completions[0].logprobs[3] = -20.0  # type: ignore[index]
    ink, paper = ("#212121", "#ffffff") if theme == "light" else ("#e0e0e0", "#111111")
    body = f"<!doctype html><meta charset=utf-8><body style='margin:8px;color:{ink};background:{paper}'>"
    (tmp_path / "page.html").write_text(body + html_of(answer), encoding="utf-8")
    with chromium.Page(tmp_path / "chromium") as page:
        for width in (1200, 390):
            page.look(width=width, height=800)
            page.go(f"file://{tmp_path}/page.html")
            assert page.js("document.querySelector('.tokens').textContent") == answer.text
            shades = page.js("""[...document.querySelectorAll('.tok')].map((one) =>
                [Number(one.style.getPropertyValue('--logprob')), getComputedStyle(one).backgroundColor])""")
            depths = [float(re.findall(r"[\d.]+", color)[-1]) / 0.52 for _, color in shades]
            for (logprob, _), depth in zip(shades, depths, strict=True):
                assert depth == pytest.approx(min(1, -logprob / 4.852), abs=0.02)
            colors = zip(bytes.fromhex("dd8a24"), bytes.fromhex(paper[1:]), strict=True)
            mixed = [0.52 * shade + 0.48 * behind for shade, behind in colors]
            assert contrast(bytes.fromhex(ink[1:]), mixed) > 4.5
            for index in (1, 40, len(shades)):
                page.move(f".tok:nth-of-type({index})")
                card = page.js(f"""(() => {{
                    const style = getComputedStyle(document.querySelector(".tok:nth-of-type({index})"), "::after");
                    return {{ content: style.content, position: style.position, color: style.color,
                        background: style.backgroundColor }};
                }})()""")
                assert "%" in card["content"]
                assert card["position"] == "absolute"
                assert card["background"] not in ("rgba(0, 0, 0, 0)", card["color"])
                assert page.js("document.documentElement.scrollHeight <= innerHeight")
                assert page.js("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == []


def contrast(one: Any, other: Any) -> float:
    """WCAG's contrast of two colours, sRGB bytes (https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio)."""

    def luminance(color: Any) -> float:
        linear = [v / 255 / 12.92 if v / 255 <= 0.04045 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in color]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_notebook_shows_the_fields_of_a_configuration_that_are_set() -> None:
    shown = Tokens(GenerationConfig(temperature=0.8, stop_strings=["<b>"], do_sample=False)._repr_html_())
    assert all(words in shown.text for words in ("temperature0.8", "stop strings['<b>']", "do sampleFalse"))
    assert "top k" not in shown.text and "b" not in shown.tags


def test_numbers_of_a_table_stand_to_the_right() -> None:
    html = grid_html("title", ["a", "b"], [["12", "one"], ["-16.7", "-x"], ["< 0.1 %", "-"]])
    assert re.findall(r'<td class="number">(.*?)</td>', html) == ["12", "-16.7", "&lt; 0.1 %", "-"]
