"""The site: what is public has docstrings, and links of the repository's pages lead to the site's."""

from importlib import import_module

import build_site
import pytest


@pytest.mark.parametrize("module", build_site.PUBLIC)
def test_a_public_name_is_defined_and_has_a_docstring(module: str) -> None:
    homes = build_site.public_names(module)
    names = [name for name in homes if name != "__version__"]
    assert module == "minillm.errors" or names == sorted({*names}, key=lambda name: (not name[0].isupper(), name))
    for name in names:
        assert getattr(import_module(module), name).__doc__, name
        assert hasattr(import_module(homes[name].rpartition(".")[0]), name)


def test_every_page_of_the_repository_stands_in_the_site() -> None:
    pages = {page for section in build_site.PAGES.values() for page in section.values()}
    folders = ("minillm", "kernels", "benchmarks", "tests")
    written = {path.relative_to(build_site.ROOT).as_posix() for path in build_site.ROOT.glob("*.md")}
    for folder in folders:
        under = (build_site.ROOT / folder).rglob("*.md")
        written |= {path.relative_to(build_site.ROOT).as_posix() for path in under}
    inputs = ("minillm/course/lessons/", "tests/data/")
    assert pages == {page for page in written if not page.startswith(inputs)}


def test_links_to_pages_lead_to_the_sites_and_others_are_text() -> None:
    text = (
        "[engine](../engine/README.md#vectors), [`code`](app.py), [out](https://a.b/c.md), [here](#below)\n"
        "![page](../../benchmarks/results/page.png) [folder](../engine)\n```sh\n[a](../engine/README.md)\n```\n"
    )
    said, pictures = build_site.rewritten(text, "minillm/server/README.md")
    assert said == (
        "[engine](../engine/index.md#vectors), `code`, [out](https://a.b/c.md), [here](#below)\n"
        "![page](../../benchmarks/results/page.png) [folder](../engine/index.md)\n"
        "```sh\n[a](../engine/README.md)\n```\n"
    )
    assert pictures == {"benchmarks/results/page.png"}
