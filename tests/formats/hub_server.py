"""A hub of one repository on 127.0.0.1: as much of the hub's HTTP API as huggingface_hub uses to download a model."""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

REPO_ID = "tiny/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The repository, what was asked of it, and what shall go wrong."""

    files: dict[str, bytes]
    gated: bool = False
    breaks_off: str | None = None  # the file whose download ends half-way and is refused from then on
    stalls: str | None = None  # the file of which half is sent, and then no more
    denies_after: int | None = None  # so many downloads, then everything is forbidden
    hidden: set[str] = field(default_factory=set)  # files that are listed but cannot be had
    fetched: list[str] = field(default_factory=list)  # files whose bytes were asked for, in order
    requests: int = 0

    stalled: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Hub":
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Free the port: from now on the connection is refused. May be called twice."""
        self.stopped.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.requests += 1
        path = unquote(urlsplit(self.path).path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        if self.hub.denies_after is not None and len(self.hub.fetched) >= self.hub.denies_after:
            self.refuse(403, "")
        elif match is None or match[1] != REPO_ID:
            self.refuse(404, "RepoNotFound")
        elif (match[3] if api else match[2]) not in (None, "main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif file:
            self.send_file(file[3])
        elif match[2] == "tree":
            self.send_json(
                [{"type": "file", "path": n, "size": len(b), "oid": etag(b)} for n, b in self.hub.files.items()]
            )
        else:
            siblings = [{"rfilename": name} for name in self.hub.files]
            self.send_json(
                {"id": REPO_ID, "sha": COMMIT, "siblings": siblings, "private": False, "gated": self.hub.gated}
            )

    def send_file(self, name: str) -> None:
        hub = self.hub
        if hub.gated:
            return self.refuse(403, "GatedRepo")
        if name not in hub.files or name in hub.hidden:
            return self.refuse(404, "EntryNotFound")
        data, start = hub.files[name], 0
        tag = etag(data)
        if self.command == "GET":
            if hub.breaks_off == name and name in hub.fetched:
                return self.refuse(503, "")
            hub.fetched.append(name)
            if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
                start = int(wanted[1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        body = data[start:]
        if self.command == "GET" and hub.breaks_off == name:
            self.send_header("Connection", "close")
            self.send_body(body, body[: len(body) // 2])
            self.close_connection = True
        elif self.command == "GET" and hub.stalls == name:
            self.send_body(body, body[: len(body) // 2])
            hub.stalled.set()
            hub.stopped.wait()
            self.close_connection = True
        else:
            self.send_body(body, body)
        return None

    def send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_body(body, body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_body(b"", b"")

    def send_body(self, announced: bytes, sent: bytes) -> None:
        self.send_header("Content-Length", str(len(announced)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(sent)


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
