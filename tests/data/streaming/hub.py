"""A server on loopback that answers as the Hub does for the data sets in a local directory, `org/name` in it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Yield the address of a server of the data sets below `root`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (Answers,), {"root": root}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Answers(BaseHTTPRequestHandler):
    """The Hub's answers: what a data set is, what is in it, and its files."""

    root: Path

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """Answer `paths-info`, which asks for some paths at once."""
        form = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        wanted = json.loads(form)["paths"] if form[:1] == b"{" else [
            unquote(pair[6:].replace("+", " ")) for pair in form.decode().split("&") if pair.startswith("paths=")
        ]  # fmt: skip
        repository = self._repository(urlsplit(self.path).path.split("/")[3:5])
        found = [path for path in (repository / name for name in wanted) if path.exists()]
        self._json([self._entry(repository, path) for path in found])

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "api":
            repository = self._repository(parts[2:4])
            self._api(repository, parts[4:]) if repository.is_dir() else self._missing("RepoNotFound")
            return
        path = self._repository(parts[1:3]).joinpath(*parts[5:])  # datasets/ORG/NAME/resolve/REVISION/PATH
        is_known = parts[4:5] in (["main"], [COMMIT])
        self._file(path) if is_known and path.is_file() else self._missing("EntryNotFound")

    def _repository(self, names: list[str]) -> Path:
        return self.root.joinpath(*names)

    def _api(self, repository: Path, rest: list[str]) -> None:
        files = sorted(path for path in repository.rglob("*") if path.is_file())
        if rest[:1] in (["revision"], ["tree"]) and rest[1] not in ("main", COMMIT):
            return self._missing("RevisionNotFound")
        if rest[:1] == ["tree"]:
            below = repository.joinpath(*rest[2:])
            inside = sorted(below.rglob("*")) if "recursive=True" in self.path else sorted(below.glob("*"))
            return self._json([self._entry(repository, path) for path in inside])
        siblings = [{"rfilename": path.relative_to(repository).as_posix()} for path in files]
        name = "/".join(repository.parts[-2:])
        self._json({"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0})

    def _entry(self, repository: Path, path: Path) -> dict[str, Any]:
        name = path.relative_to(repository).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "d" * 40, "size": 0}
        return {"type": "file", "path": name, "oid": _hash(path), "size": path.stat().st_size}

    def _file(self, path: Path) -> None:
        content = path.read_bytes()
        first, status = 0, 200
        if self.headers.get("Range"):
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            content, status = content[int(first) : int(last) + 1 if last else None], 206
        headers = {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(content) - 1}/{path.stat().st_size}"
        self._send(content, "application/octet-stream", status, headers)

    def _missing(self, code: str) -> None:
        self._send(b"{}", "application/json", 404, {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: Any) -> None:
        self._send(json.dumps(value).encode(), "application/json", 200, {})

    def _send(self, content: bytes, kind: str, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _hash(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
