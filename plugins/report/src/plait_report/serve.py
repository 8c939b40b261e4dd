"""Serves the page of live runs to browsers on this machine, and to nobody else."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from plait import misfit
from plait_report.page import without_library

HOSTS = ("127.0.0.1", "localhost")  # a page from elsewhere, whose name leads here, may not read it


class Server:
    """Answers `/` with a whole page and `/live` with the same without the library."""

    def __init__(self, port: int) -> None:
        """port: 0 for a free one. Raises PlaitError if it is taken or not allowed."""
        self._pages: dict[str, bytes] = {}
        self._asked = 0.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server._answer(self)

            def log_message(self, *_: Any) -> None:
                """Nothing: the console belongs to the command."""

        try:
            self._server = ThreadingHTTPServer((HOSTS[0], port), Handler)
        except OSError:
            raise misfit("--port", port, "a port that is free and that you may use, or 0 for any") from None
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://{HOSTS[0]}:{self._server.server_port}/"

    def show(self, page: str) -> None:
        """What it answers from now on."""
        self._pages = {"/": page.encode(), "/live": without_library(page).encode()}

    def close(self, seconds: float) -> None:
        """End it; if a page is open, after the `seconds` in which it asks for the last state."""
        if time.monotonic() - self._asked < 2 * seconds:
            time.sleep(seconds + 1)
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        host = (request.headers.get("Host") or "").rpartition(":")[0] or request.headers.get("Host")
        body = self._pages.get(request.path.partition("?")[0])
        if host not in HOSTS or body is None:
            request.send_error(403 if host not in HOSTS else 404)
            return
        self._asked = time.monotonic()
        request.send_response(200)
        request.send_header("Content-Type", "text/html; charset=utf-8")
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Cache-Control", "no-store")
        request.end_headers()
        request.wfile.write(body)
