"""Run the Dockerfile's commands without Docker: each stage in an environment of its own, then entry and health check.

What needs a system of its own is left out: images, accounts. A path of the image is one below a scratch folder.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
SYSTEM = ("useradd",)
"""Commands that are left out"""
SECONDS = 300
"""Time for the server to compile its kernels and become healthy"""


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    words = [line.split(None, 1) for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()]
    return [(name, argument) for name, argument in words]


def copy_context(target: Path) -> None:
    """Copy the files that git knows and .dockerignore does not name."""
    ignored = set((ROOT / ".dockerignore").read_text().split())
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0"):
        if name and name.split("/")[0] not in ignored:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


class Image:
    """The image that the instructions make, below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workdir, self.user = folder, folder, "root"
        self.environment: dict[str, str] = {}
        self.commands: dict[str, list[str]] = {}
        """ENTRYPOINT and HEALTHCHECK"""
        self._stages = 0

    def inside(self, text: str) -> str:
        """A command, with the image's paths below the folder."""
        return re.sub(r"(?<![\w.:/])/(?=(src|wheels|home)\b)", f"{self.folder}/", text)

    def run(self, name: str, argument: str) -> None:
        """Follow one instruction."""
        if name == "FROM":
            self._begin_stage()
        elif name == "WORKDIR":
            self.workdir = Path(self.inside(argument))
            self.workdir.mkdir(parents=True, exist_ok=True)
        elif name == "COPY" and not argument.startswith("--from"):
            copy_context(self.workdir)
        elif name == "RUN" and argument.split()[0] not in SYSTEM:
            print("+", argument, flush=True)
            subprocess.run(self.inside(argument), shell=True, check=True, cwd=self.workdir, env=self.environment)
        elif name == "ENV":
            for pair in shlex.split(argument):
                variable, _, value = pair.partition("=")
                self.environment[variable] = self.inside(value)
        elif name == "USER":
            self.user = argument
        elif name in ("ENTRYPOINT", "HEALTHCHECK"):
            self.commands[name] = json.loads(argument[argument.index("[") :])

    def _begin_stage(self) -> None:
        self._stages += 1
        environment = self.folder / f"stage{self._stages}"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MINILLM"))}
        self.environment = own | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
        self.environment |= {"HOME": str(self.folder / "home" / "minillm"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.environment.pop("XDG_CACHE_HOME", None)

    def serve(self) -> None:
        """Start the server, wait until it is healthy, ask it for a text, and end it."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.environment |= {"MINILLM_HOST": "127.0.0.1", "MINILLM_PORT": str(port)}
        process = subprocess.Popen(self._command("ENTRYPOINT"), cwd=self.workdir, env=self.environment)
        try:
            end = time.monotonic() + SECONDS
            while subprocess.run(self._command("HEALTHCHECK"), env=self.environment, capture_output=True).returncode:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit("run_dockerfile: the server did not become healthy: see above")
                time.sleep(0.5)
            body = json.dumps({"prompt": "A list of colors: red,", "max_tokens": 4, "temperature": 0}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                print(json.load(answer)["choices"][0]["text"])
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
        if status:
            raise SystemExit(f"run_dockerfile: the server ended with exit code {status}, expected 0")

    def _command(self, name: str) -> list[str]:
        """A command of the image: of its own environment's Python."""
        program, *arguments = self.commands[name]
        return [shutil.which(program, path=self.environment["PATH"]) or program, *arguments]


def main() -> None:
    """Run the Dockerfile."""
    with tempfile.TemporaryDirectory() as folder:
        image = Image(Path(folder))
        for name, argument in instructions((ROOT / "Dockerfile").read_text()):
            image.run(name, argument)
        if image.user == "root":
            raise SystemExit("run_dockerfile: the server would run as root: the Dockerfile has no USER")
        image.serve()


if __name__ == "__main__":
    main()
