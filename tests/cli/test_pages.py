"""The pages that the command line writes, in a headless Chromium: on desktops and phones, light, dark and printed."""

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from minillm.cli.main import run

from ..server import chromium
from ..server.chromium import CONTRAST, Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
]
pytest.importorskip("matplotlib", reason="drawing needs the plot extra")

PAGES = {
    "analyze": ["analyze", "opt-13b", "--html"],
    "compare": ["compare", "--prompt", "Once upon a time", "--max-new-tokens", "12", "--html"],
    "attention": ["inspect", "--prompt", "A list of colors: red, é " * 12, "--attention"],
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, arguments in PAGES.items():
        assert run([*arguments, str(folder / f"{name}.html")]) == 0
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def opened(browser: Page, pages: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of the command line. At the end: no error, and no request but for itself and its own data."""
    browser.errors.clear()
    browser.requests.clear()
    address = pages[request.param].as_uri()
    browser.look(1200, 800)
    browser.go(address)
    yield browser
    assert browser.errors == []
    assert {one for one in browser.requests if not one.startswith("data:")} == {address}


every_page = pytest.mark.parametrize("opened", PAGES, indirect=True)


@every_page
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "dark"),
        (1200, "light"),
        pytest.param(390, "light", marks=pytest.mark.exhaustive),
        pytest.param(1200, "dark", marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_is_wider_than_the_window_and_all_text_has_contrast(opened: Page, width: int, scheme: str) -> None:
    opened.look(width, 800, scheme=scheme, phone=width < 500)
    assert opened.js("document.documentElement.scrollWidth") == width
    cut = opened.js("""[...document.querySelectorAll("main *")].filter((each) =>
        each.checkVisibility() && !each.closest(".scroll") && each.getBoundingClientRect().right > innerWidth + 1)
        .map((each) => each.outerHTML.slice(0, 80))""")
    assert cut == []
    assert opened.js(CONTRAST) == {}


@every_page
def test_on_paper_it_is_light_and_whole(opened: Page) -> None:
    opened.look(718, 1000, scheme="dark")  # A4 without its margins
    opened.call(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    try:
        assert opened.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        wide = """[...document.querySelectorAll("main *")].filter((each) => each.checkVisibility()
            && each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML.slice(0, 80))"""
        assert opened.js(wide) == []
        assert opened.js(CONTRAST) == {}
    finally:
        opened.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("opened", ["analyze"], indirect=True)
def test_each_width_has_its_own_roofline(opened: Page) -> None:
    sizes = {}
    for width in (390, 1200):
        opened.look(width, 800, phone=width < 500)
        assert (
            opened.js("[...document.querySelectorAll('.roofline svg')].filter((e) => e.checkVisibility()).length") == 1
        )
        sizes[width] = opened.js("""Math.min(...[...document.querySelectorAll('.roofline text')]
            .filter((e) => e.checkVisibility()).map((e) => e.getBoundingClientRect().height))""")
    assert min(sizes.values()) >= 10  # pixels


@pytest.mark.parametrize("opened", ["compare"], indirect=True)
def test_the_tree_folds_scrolls_and_hides_what_was_pruned(opened: Page) -> None:
    rows = "new Set([...document.querySelectorAll('.steps svg')].map((each) => each.getBoundingClientRect().top)).size"
    wider = "document.querySelector('.steps').scrollWidth > document.querySelector('.steps').clientWidth"
    assert opened.js(rows) == 2
    opened.look(390, 800, phone=True)
    assert opened.js(rows) == 6
    assert not opened.js(wider)
    height = opened.js("document.querySelector('.steps').clientHeight")
    opened.tap("#pruned")
    assert opened.js("document.querySelector('.steps').clientHeight") < 0.7 * height
    assert opened.js("[...document.querySelectorAll('.pruned rect')].every((each) => !each.getClientRects().length)")
    opened.tap("#one-line")
    assert opened.js(rows) == 1
    assert opened.js(wider)
    assert opened.js("document.documentElement.scrollWidth") == 390
    tokens = opened.texts(".winner code")
    assert len(tokens) == 12
    assert not re.search("…", "".join(tokens))


@pytest.mark.parametrize("opened", ["attention"], indirect=True)
def test_one_head_is_large_and_labels_of_its_map_do_not_overlap(opened: Page) -> None:
    drawn = "getComputedStyle(document.querySelector('.large .map')).backgroundImage"
    first = opened.js(drawn)
    opened.click(".heads label:nth-child(3)")
    assert opened.js(drawn) != first
    assert opened.js(drawn) == opened.js(drawn.replace(".large .map", ".heads label:nth-child(3) .map"))
    sizes = "['.large .map', '.heads .map'].map((each) => document.querySelector(each).clientWidth)"
    count = int(re.findall(r"(\d+) tokens", opened.texts("p.soft")[0])[0])
    for width, most in ((390, 20), (640, 32), (800, 32), (1200, 56)):
        opened.look(width, 800, phone=width < 500)
        large, small = opened.js(sizes)
        assert large > 2.5 * small
        for side, (start, end) in {"rows": ("top", "bottom"), "columns": ("left", "right")}.items():
            boxes = opened.js(f"""[...document.querySelectorAll(".{side} span")].flatMap((each) =>
                [...each.getClientRects()]).map((box) => [box.{start}, box.{end}])""")
            assert len(boxes) == math.ceil(count / math.ceil(count / most))
            assert all(one[1] <= other[0] + 0.5 for one, other in pairwise(boxes)), (width, side)
