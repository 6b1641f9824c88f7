"""The data files of a wheel: the kernels' sources, the templates of pages and the packaged model."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from minillm.errors import install

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel would install."""
    pytest.importorskip("hatchling", reason="builds a wheel with hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def files_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_kernels_are_found_inside_the_package(installed: Path) -> None:
    code = "from minillm.backends.cuda.kernels import kernel_folder; print(kernel_folder())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, check=True, capture_output=True, text=True, env={"PATH": ""}
    )
    folder = Path(result.stdout.strip())
    assert folder == installed / "minillm" / "kernels" / "cuda"
    assert list(folder.glob("*.cu"))
    assert files_below(folder.parent) == files_below(ROOT / "kernels")


@pytest.mark.longer
def test_the_benchmark_of_the_cache_is_inside(installed: Path) -> None:
    code = "from minillm.cli import bench; print(*bench.find(bench.FOLDER))"
    result = subprocess.run([sys.executable, "-c", code], cwd=installed, check=True, capture_output=True, text=True)
    assert result.stdout.split() == ["naive_vs_cached"]


@pytest.mark.longer
def test_the_course_is_inside(installed: Path) -> None:
    code = "from minillm.course.lesson import lessons; print(len(lessons()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=installed, check=True, capture_output=True, text=True)
    assert int(result.stdout) == len([*(ROOT / "minillm" / "course" / "lessons").glob("*.md")])


def test_the_pages_are_inside(installed: Path) -> None:
    names = {path.name for path in (ROOT / "minillm" / "cli" / "templates").iterdir()}
    assert {path.name for path in (installed / "minillm" / "cli" / "templates").iterdir()} == names


@pytest.mark.longer
def test_a_missing_package_is_named_with_the_command_that_installs_it(installed: Path) -> None:
    """Outside of a checkout it is the package's own name: "minillm" on the index is another project."""
    code = "from minillm.errors import install; print(install('guided')); print(install('plot'))"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, check=True, capture_output=True, text=True, env={"PATH": ""}
    ).stdout.splitlines()
    assert printed[0] == "pip install 'llguidance>=1.0'"
    assert re.fullmatch("pip install 'matplotlib.*'", printed[1])


def test_in_a_checkout_the_command_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install("guided") == f"pip install -e '{ROOT}[guided]'" or Path.cwd() == ROOT
    monkeypatch.chdir(ROOT)
    assert install("guided", "plot") == "pip install -e '.[guided,plot]'"


def test_no_hint_names_a_distribution_that_the_index_does_not_have() -> None:
    """It has another project's minillm, and no minillm-engine: hints come from `install`."""
    for source in sorted((ROOT / "minillm").rglob("*.py")):
        assert not re.search("pip install [^\n]*minillm", source.read_text(encoding="utf-8")), source


def test_the_server_s_page_is_inside(installed: Path) -> None:
    names = {path.name for path in (ROOT / "minillm" / "server" / "page").iterdir() if path.is_file()}
    assert {path.name for path in (installed / "minillm" / "server" / "page").iterdir()} == names
    assert (installed / "minillm" / "text" / "tokens.css").is_file()


def test_the_small_model_is_inside(installed: Path) -> None:
    assert (installed / "minillm" / "assets" / "demo-opt" / "model.safetensors").stat().st_size > 2**20


@pytest.mark.longer
def test_the_lock_file_is_of_these_requirements_and_names_the_public_index_alone() -> None:
    """After a change of the requirements: `uv lock`."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (package,) = (package for package in lock["package"] if package["name"] == project["name"])
    locked = {(canonical(entry["name"]), entry.get("specifier", "")) for entry in package["metadata"]["requires-dist"]}
    extras = project["optional-dependencies"]
    assert set(package["metadata"]["provides-extras"]) == set(extras)
    lines = {line.partition(";")[0].strip() for line in sum(extras.values(), project["dependencies"])}
    matches = {line: re.fullmatch(r"([\w.-]+)(?:\[.*\])?(.*)", line) for line in lines if project["name"] not in line}
    assert {(canonical(match[1]), match[2]) for match in matches.values() if match} == locked
    sources = [package["source"] for package in lock["package"] if package["name"] != project["name"]]
    assert {source["registry"] for source in sources} == {"https://pypi.org/simple"}
    assert lock["requires-python"] == project["requires-python"]


def canonical(name: str) -> str:
    """A name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
