"""The web server of the live page: a program of its own that needs nothing else of offbeat.

    python serve.py SOCKET PARENT

SOCKET is the number of an open, listening socket. Standard input brings the token in its first
line and then pictures of the run, one JSON object a line; its end is the end of the run.
"""

import asyncio
import ctypes
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

RETRY = 1000  # milliseconds after which a page tries again
HEARTBEAT = 5.0  # seconds after which a silent stream says that it is alive
LINE = 2**24  # bytes of the largest picture
PROVE = 5.0  # seconds in which a connection has to show the token
STRANGERS, KNOWN = 64, 64  # connections that have not shown it, and that have
LOOPBACK = ("127.0.0.1", "localhost")
FILES = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "chart.js": ("chart.js", "text/javascript"),
}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class News:
    """The latest picture, and a way to wait for a later one."""

    def __init__(self) -> None:
        self.number = 0
        self.picture = b""
        self.over = False
        self.changed = asyncio.Condition()

    async def tell(self, picture: bytes | None) -> None:
        """A new picture, or None: there will be no more."""
        async with self.changed:
            if picture is None:
                self.over = True
            else:
                self.number, self.picture = self.number + 1, picture
            self.changed.notify_all()

    async def later(self, than: int) -> bool:
        """Wait until there is a later one; False if there will be none."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.number > than or self.over)
            return self.number > than

    async def stream(self) -> AsyncIterator[bytes]:
        """The latest picture at once, then every later one; who is slow misses some."""
        yield b"retry: %d\n\n" % RETRY
        seen = 0
        while True:
            try:
                more = await asyncio.wait_for(self.later(seen), HEARTBEAT)
            except TimeoutError:
                yield b": still here\n\n"
                continue
            if not more:
                return
            seen = self.number
            yield b"id: %d\ndata: %b\n\n" % (seen, self.picture)


class Timer(Protocol):
    def cancel(self) -> None:
        """It is not to ring any more."""


# Calls a function after so many seconds.
Later = Callable[[float, Callable[[], None]], Timer]
Address = tuple[str, int]


class Visitors:
    """The connections by their addresses: those that have shown the token, and the others.

    The others are closed after a while, or when there are too many of them, the first one first;
    so they take no place of one that has the token.
    """

    def __init__(self, later: Later):
        self.later = later
        self.strangers: dict[Address, tuple[Callable[[], None], Timer]] = {}
        self.known: set[Address] = set()

    def came(self, who: Address, close: Callable[[], None]) -> None:
        if len(self.strangers) >= STRANGERS:
            self._close(next(iter(self.strangers)))
        self.strangers[who] = (close, self.later(PROVE, lambda: self._close(who)))

    def proved(self, who: Address) -> bool:
        """It has shown the token; False if there is no place even so."""
        if who in self.known:
            return True
        if len(self.known) >= KNOWN:
            return False
        self._forget(who)
        self.known.add(who)
        return True

    def left(self, who: Address) -> None:
        self._forget(who)
        self.known.discard(who)

    def _close(self, who: Address) -> None:
        found = self._forget(who)
        if found is not None:
            found()

    def _forget(self, who: Address) -> Callable[[], None] | None:
        close, timer = self.strangers.pop(who, (None, None))
        if timer is not None:
            timer.cancel()
        return close


def watched_by(visitors: Visitors) -> type[asyncio.Protocol]:
    """uvicorn's connections, of which the visitors hear when they come and go."""

    class VisitorProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            visitors.came(transport.get_extra_info("peername"), transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            visitors.left(self.transport.get_extra_info("peername"))
            super().connection_lost(exc)

    return VisitorProtocol


class Guard:
    """Lets in only requests from this machine, to this address, with the token, that only read."""

    def __init__(self, app: ASGIApp, token: str, port: int, visitors: Visitors | None = None):
        self.app, self.token, self.visitors = app, token.encode(), visitors
        self.hosts = {f"{name}:{port}".encode() for name in LOOPBACK}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refused = self.refusal(scope)
        if refused is not None:
            refused.headers["Connection"] = "close"
            await refused(scope, receive, with_headers(send))
            return
        # What lies behind sees the path without the token, so that it cannot repeat it.
        scope["path"] = "/" + scope["path"].split("/", 2)[2]
        scope["raw_path"] = scope["path"].encode()
        await self.app(scope, receive, with_headers(send))

    def refusal(self, scope: Scope) -> Response | None:
        client = scope.get("client")
        if client is None or client[0] != LOOPBACK[0]:
            return PlainTextResponse("only from this machine", 403)
        # Another name for this address would let a web page of that name read this one.
        if [value for name, value in scope["headers"] if name == b"host"] not in (
            [host] for host in self.hosts
        ):
            return PlainTextResponse("wrong host", 403)
        _, first, *rest = scope["path"].split("/", 2)
        if not secrets.compare_digest(first.encode(), self.token):
            return PlainTextResponse("not found", 404)
        if self.visitors is not None and not self.visitors.proved(tuple(client)):
            return PlainTextResponse("too many pages are open", 503)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET", 405, {"Allow": "GET, HEAD"})
        if not rest:  # relative addresses need the slash
            return RedirectResponse(f"/{first}/", 308)
        return None


def with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [*message.get("headers", ()), *own]
        await send(message)

    return sending


def make_app(news: News, token: str, port: int, visitors: Visitors) -> ASGIApp:
    """The page, its parts, and the stream of pictures."""
    here = Path(__file__).parent

    def file(name: str) -> Route:
        path, kind = FILES[name]
        content = (here / path).read_bytes()

        async def answer(request: Request) -> Response:
            return Response(content, media_type=kind)

        return Route(f"/{name}", answer)

    async def events(request: Request) -> Response:
        return StreamingResponse(news.stream(), media_type="text/event-stream")

    pages = Starlette(routes=[*map(file, FILES), Route("/events", events)])
    return Guard(pages, token, port, visitors)


async def serve(listening: socket.socket) -> None:
    """Serve from the first line of standard input to its end."""
    reader = asyncio.StreamReader(limit=LINE)
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    token = (await reader.readline()).decode().strip()
    if not token:  # the run was over at once
        return
    news, visitors = News(), Visitors(loop.call_later)
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(news, token, listening.getsockname()[1], visitors),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            http=watched_by(visitors),
            ws="none",
            loop="asyncio",
            proxy_headers=False,  # nobody may say that he is somebody else
            timeout_graceful_shutdown=1,
        )
    )

    async def follow() -> None:
        while line := await reader.readline():
            await news.tell(line.rstrip())
        await news.tell(None)
        server.should_exit = True

    following = asyncio.create_task(follow())
    with suppress(asyncio.CancelledError):
        await server.serve([listening])
    following.cancel()
    pipe.close()


def main() -> None:
    number, parent = map(int, sys.argv[1:])
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_NAME, b"offbeat watch")
    if os.getppid() != parent:  # it died before the line above
        return
    os.nice(5)  # the run comes first
    with socket.socket(fileno=number) as listening:
        asyncio.run(serve(listening))


if __name__ == "__main__":
    main()
