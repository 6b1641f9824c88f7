"""Build the project's site: the pages of Markdown as they are, and a reference of all that is public.

    pip install -e ".[site]"
    python scripts/build_site.py OUT

A warning is an error: of a link that leads nowhere, of a docstring that cannot be read. The site is not published.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from posixpath import normpath, relpath

ROOT = Path(__file__).parents[1]
PAGES = {
    "minillm": {"Home": "README.md"},
    "Use": {
        "Engine": "minillm/engine/README.md",
        "Decoding": "minillm/decoding/README.md",
        "Models": "minillm/models/README.md",
        "Formats": "minillm/formats/README.md",
        "Commands": "minillm/cli/README.md",
        "Server": "minillm/server/README.md",
        "Deployment": "minillm/server/DEPLOYMENT.md",
        "Other tools": "minillm/integrations/README.md",
        "Ranks": "minillm/distributed/README.md",
        "The small model": "minillm/assets/demo-opt/README.md",
    },
    "Read": {
        "Inside": "minillm/README.md",
        "Glossary": "minillm/GLOSSARY.md",
        "Course": "minillm/course/README.md",
        "Backends": "minillm/backends/README.md",
        "Kernels": "kernels/README.md",
        "CUDA kernels": "kernels/cuda/README.md",
        "Tests": "tests/README.md",
    },
    "Measure": {"Measuring": "minillm/measure/README.md", "Benchmarks": "benchmarks/README.md"},
    "Extend": {"Own strategies": "minillm/decoding/EXTENDING.md", "Contributing": "CONTRIBUTING.md"},
    "Project": {"Changes": "CHANGELOG.md", "Security": "SECURITY.md"},
}
"""Section -> title -> page of the repository"""
PUBLIC = (
    "minillm",
    "minillm.errors",
    "minillm.parallel",
    "minillm.server",
    "minillm.measure.inside",
    "minillm.measure.comparison",
    "minillm.measure.pictures",
    "minillm.measure.accounting",
    "minillm.distributed.threads",
    "minillm.decoding.strategy",
)
"""Modules whose `__all__` is a promise, or whose classes are; all else may change from version to version"""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CONFIG = """\
site_name: minillm
docs_dir: docs
strict: true
use_directory_urls: false
theme: {name: mkdocs, color_mode: auto, user_color_mode_toggle: true, navigation_depth: 3}
markdown_extensions: [tables, fenced_code, {toc: {permalink: true}}]
validation: {links: {anchors: warn}}
plugins:
  - search
  - mkdocstrings:
      handlers:
        python:
          paths: [ROOT]
          options:
            extensions: [ROOT/scripts/site_docstrings.py]
            docstring_style: google
            docstring_section_style: list
            show_source: false
            show_root_heading: true
            show_root_full_path: false
            separate_signature: true
            show_signature_annotations: true
            inherited_members: true
            members_order: source
            filters: ["!^_"]
            heading_level: 2
"""


def public_names(module: str) -> dict[str, str]:
    """The names that a module promises, and where each is defined."""
    loaded = import_module(module)
    own = [name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == module]
    homes = {}
    for name in getattr(loaded, "__all__", [name for name in own if isinstance(getattr(loaded, name), type)]):
        value = getattr(loaded, name)
        home = getattr(value, "__module__", None)
        homes[name] = f"{home}.{name}" if home and home.startswith("minillm") else f"{module}.{name}"
    return homes


def place_of(page: str) -> str:
    """Place of a page of the repository in the site: a folder's README is its index."""
    return page.removesuffix("README.md") + "index.md" if page.endswith("README.md") else page


def rewritten(text: str, page: str) -> tuple[str, set[str]]:
    """A page whose links lead to other pages of the site, and the pictures that it shows.

    What a link to another file of the repository says stays, without the link.
    """
    pictures: set[str] = set()
    pages = {page for section in PAGES.values() for page in section.values()}

    def link(match: re.Match[str]) -> str:
        mark, said, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        path = normpath((Path(page).parent / path).as_posix())
        path = f"{path}/README.md" if f"{path}/README.md" in pages else path
        if mark:
            pictures.add(path)
        elif path not in pages:
            return said
        place = relpath(place_of(path), Path(place_of(page)).parent.as_posix())
        return f"{mark}[{said}]({place}{'#' * bool(anchor)}{anchor})"

    pieces, at = [], 0
    for code in FENCED.finditer(text):
        pieces += [LINK.sub(link, text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*pieces, LINK.sub(link, text[at:])]), pictures


def write_pages(docs: Path) -> list[str]:
    """Write all pages. Returns the lines of the navigation."""
    lines = ["nav:"]
    for section, titles in PAGES.items():
        lines.append(f"  - {section}:")
        for title, page in titles.items():
            text, pictures = rewritten((ROOT / page).read_text(encoding="utf-8"), page)
            contents = {place_of(page): text.encode()} | {path: (ROOT / path).read_bytes() for path in pictures}
            for name, content in contents.items():
                (docs / name).parent.mkdir(parents=True, exist_ok=True)
                (docs / name).write_bytes(content)
            lines.append(f"    - {title}: {place_of(page)}")
    lines.append("  - Reference:")
    shown: set[str] = set()  # a name stands once, on the first page that has it
    for module in PUBLIC:
        name = f"reference/{module}.md"
        (docs / name).parent.mkdir(exist_ok=True)
        homes = public_names(module)
        blocks = [f"::: {home}" for public, home in homes.items() if public != "__version__" and home not in shown]
        shown.update(homes.values())
        (docs / name).write_text("\n\n".join([f"# {module}", *blocks]) + "\n", encoding="utf-8")
        lines.append(f"    - {module}: {name}")
    return lines


def main() -> int:
    """Build the site into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the site; what is in it is replaced")
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder, "docs")
        docs.mkdir()
        config = CONFIG.replace("ROOT", str(ROOT)) + "\n".join(write_pages(docs)) + "\n"
        Path(folder, "mkdocs.yml").write_text(config, encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
        return subprocess.run(command, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
