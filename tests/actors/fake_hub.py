"""A Hub small enough to start in a test: serves one repository from a folder over the few calls that downloads make."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_COMMIT = "a" * 40


@contextlib.contextmanager
def serving(repo_id: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the endpoint's address and the list, filled as they come, of the files that were fetched."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            content: bytes | None = None
            headers = {"X-Repo-Commit": _COMMIT}
            if path == f"/api/models/{repo_id}/revision/main":
                content = json.dumps({"id": repo_id, "sha": _COMMIT, "siblings": []}).encode()
            elif path == f"/api/models/{repo_id}/tree/{_COMMIT}":
                files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
                rows = [
                    {
                        "type": "file",
                        "path": str(file.relative_to(folder)),
                        "size": file.stat().st_size,
                        "oid": _oid(file),
                    }
                    for file in files
                ]
                content = json.dumps(rows).encode()
            elif path.startswith(f"/{repo_id}/resolve/{_COMMIT}/"):
                file = folder / path.split(f"/resolve/{_COMMIT}/")[1]
                if file.is_file():
                    content = file.read_bytes()
                    headers["ETag"] = f'"{_oid(file)}"'
                    if body:
                        fetched.append(str(file.relative_to(folder)))
            self.send_response(404 if content is None else 200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if body and content:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()
