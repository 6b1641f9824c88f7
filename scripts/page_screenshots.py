"""Screenshots of the page at /, for the README: python scripts/page_screenshots.py MODEL [FOLDER]

MODEL is a chat model's folder, GGUF file or hub id. Needs Chromium.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minillm import Engine  # noqa: E402
from minillm.server import make_app  # noqa: E402
from tests.server.chromium import Page  # noqa: E402
from tests.server.client import listening  # noqa: E402

IDLE = "!document.querySelector('#send.running')"
PROMPT = "Why do leaves fall in autumn?"


def converse(page: Page) -> None:
    """An answer, a branch of it, and the attention of one of its tokens."""
    page.wait("document.querySelector('#ideas button')")
    page.js("document.querySelector('[name=strategy]').value = 'greedy search'")
    page.js("document.querySelector('[name=strategy]').dispatchEvent(new Event('change'))")
    page.js("document.querySelector('[name=max_tokens]').value = 60")
    page.js(f"document.querySelector('#prompt').value = {PROMPT!r}")
    page.click("#send")
    page.wait(f"document.querySelector('.tok') && {IDLE}")
    for token, row in ((14, 2), (30, 2)):
        page.move(f"#said .tok:nth-of-type({token})")
        page.wait("!document.querySelector('#card').hidden")
        page.click(f"#card li:not(.own):nth-of-type(n + {row}) button")
        page.wait(f"document.querySelectorAll('#said .tok').length > {token + 2} && {IDLE}")
    page.click("#said .tok:nth-of-type(22)")
    page.wait("document.querySelector('.flow')")


def main() -> None:
    """Write page_light.png, page_dark.png and page_phone.png."""
    model = sys.argv[1]
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "benchmarks" / "results"
    name = Path(model).name.removesuffix(".gguf")
    app = make_app({name: Engine(model, prefix_cache=True)})
    with listening(app) as address, tempfile.TemporaryDirectory() as profile, Page(Path(profile)) as page:
        page.look(1280, 800)
        page.go(address)
        converse(page)
        page.move("#said .tok:nth-of-type(26)")
        page.wait("!document.querySelector('#card').hidden")
        page.screenshot(folder / "page_light.png")
        page.move("#new")
        page.wait("document.querySelector('#card').hidden")
        page.look(1280, 800, scheme="dark")
        page.screenshot(folder / "page_dark.png")
        page.look(390, 780, phone=True, scale=1.5)
        page.tap("#said .tok:nth-of-type(26)")
        page.wait("document.querySelector('#side-panel.open .flow')")
        page.js("new Promise((done) => setTimeout(done, 400))")  # the panel moves in
        page.screenshot(folder / "page_phone.png")
    for look in ("light", "dark", "phone"):
        path = folder / f"page_{look}.png"
        Image.open(path).quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
