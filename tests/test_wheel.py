"""The data files of a wheel: the kernels' sources, the templates of pages and the packaged model."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


def test_kernels_are_found_inside_the_package(installed: Path) -> None:
    code = "from minillm.backends.cuda.kernels import kernel_folder; print(kernel_folder())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, check=True, capture_output=True, text=True, env={"PATH": ""}
    )
    folder = Path(result.stdout.strip())
    assert folder == installed / "minillm" / "kernels" / "cuda"
    assert list(folder.glob("*.cu"))
    assert files_below(folder.parent) == files_below(ROOT / "kernels")


def test_the_pages_are_inside(installed: Path) -> None:
    names = {path.name for path in (ROOT / "minillm" / "cli" / "templates").iterdir()}
    assert {path.name for path in (installed / "minillm" / "cli" / "templates").iterdir()} == names


def test_the_small_model_is_inside(installed: Path) -> None:
    assert (installed / "minillm" / "assets" / "demo-opt" / "model.safetensors").stat().st_size > 2**20
