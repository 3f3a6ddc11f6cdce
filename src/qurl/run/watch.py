"""`qurl watch`: the page of a run, live.

A read-only server of two addresses: the page, and a stream of server-sent events that bring what
is new in the run directory. It serves no files and writes nothing. On loopback, the Host header
must name this machine, so that no web page can read it by rebinding its own name. On any other
address, the URL must carry a random token.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from qurl.errors import ConfigError, QurlError
from qurl.run.report import open_runs, page_title
from qurl.run.report.compare import compare
from qurl.run.report.page import render_page

POLL_SECONDS = 0.5
SILENCE_SECONDS = 10.0
"""A stream without news sends a comment this often: a closed page is noticed when it fails."""
MAX_STREAMS = 32
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def watch(run_dirs: Sequence[str | Path], *, host: str, port: int) -> None:
    """Serve the page until Ctrl-C."""
    with WatchServer(run_dirs, host, port) as server:
        print(f"watching on {server.url}  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


class WatchServer(ThreadingHTTPServer):
    """Serves the page of these runs; `url` is where."""

    daemon_threads = True

    def __init__(self, run_dirs: Sequence[str | Path], host: str = "127.0.0.1", port: int = 0):
        self.run_dirs = list(run_dirs)
        runs = open_runs(self.run_dirs)  # complains before anything is served
        data = {"live": True, "runs": [None] * len(runs), "comparison": None}
        self.page, policy = render_page(page_title(runs), data)
        self.policy = f"{policy}; frame-ancestors 'none'"
        self.is_local = _is_loopback(host)
        self.token = "" if self.is_local else secrets.token_urlsafe(24)
        self.is_closing = threading.Event()
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        self.reading = threading.Lock()  # in turn: a long run takes much memory while it is read
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--host {host} --port {port} cannot be used: {error}; give others, or leave "
                "--port out to get any that is free"
            ) from error
        name = f"[{host}]" if ":" in host else host
        query = f"?token={self.token}" if self.token else ""
        self.url = f"http://{name}:{self.server_address[1]}/{query}"

    def server_close(self) -> None:
        self.is_closing.set()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error; anything else is told."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    timeout = 30
    """Seconds for a request to come in."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if refusal := self._refusal(parse_qs(query).get("token", [""])[0]):
            self._answer(*refusal)
        elif path == "/":
            self._answer(HTTPStatus.OK, self.server.page, "text/html")
        elif path == "/events":
            self._stream()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "There is only the page, at /.")

    def _refuse_method(self) -> None:
        self.close_connection = True  # a body may follow, which nobody reads
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "This page can only be read (GET).")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method
    do_TRACE = do_CONNECT = _refuse_method

    def _refusal(self, token: str) -> tuple[HTTPStatus, str] | None:
        if self.server.token:
            if hmac.compare_digest(token.encode(), self.server.token.encode()):
                return None
            return HTTPStatus.FORBIDDEN, "The token is missing or wrong: use the printed address."
        name = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        if name in LOCAL_NAMES:  # at any port, which a tunnel may change; browsers leave out 80
            return None
        return HTTPStatus.MISDIRECTED_REQUEST, "This server answers to localhost only."

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        content = text.encode()
        self._start(status, f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _start(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Security-Policy": self.server.policy,
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET"
        for name, value in headers.items():
            self.send_header(name, value)

    def _stream(self) -> None:
        """Everything that there is, then what is new, until the page or the server closes."""
        if not self.server.streams.acquire(blocking=False):
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_STREAMS} pages are open already.")
            return
        self.close_connection = True
        try:
            self._start(HTTPStatus.OK, "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self._send_news()
        finally:
            self.server.streams.release()

    def _send_news(self) -> None:
        runs, told, quiet = None, None, 0.0
        while not self.server.is_closing.is_set():
            message: dict[str, Any] | None = None
            try:
                with self.server.reading:
                    runs = runs or open_runs(self.server.run_dirs)
                    updates = [(index, run.read()) for index, run in enumerate(runs)]
                new = [update | {"index": index} for index, update in updates if update]
                if new:
                    message, told = {"updates": new, "comparison": compare(runs)}, None
            except (QurlError, OSError) as error:  # a directory in disorder may be mended
                runs = None
                if str(error) != told:
                    told = str(error)
                    message = {"error": told}
            quiet = 0.0 if message else quiet + POLL_SECONDS
            if message:
                self._send(f"data: {json.dumps(message, allow_nan=False)}\n\n")
            elif quiet >= SILENCE_SECONDS:
                self._send(": nothing new\n\n")
                quiet = 0.0
            self.server.is_closing.wait(POLL_SECONDS)

    def _send(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the URL may hold the token."""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
