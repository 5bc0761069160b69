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
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY = 1000  # milliseconds after which a page tries again
HEARTBEAT = 5.0  # seconds after which a silent stream says that it is alive
LINE = 2**24  # bytes of the largest picture
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


class Guard:
    """Lets in only requests from this machine, to this address, with the token, that only read."""

    def __init__(self, app: ASGIApp, token: str, port: int):
        self.app, self.token = app, token.encode()
        self.hosts = {f"{name}:{port}".encode() for name in LOOPBACK}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refused = self.refusal(scope)
        if refused is not None:
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


def make_app(news: News, token: str, port: int) -> ASGIApp:
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

    return Guard(Starlette(routes=[*map(file, FILES), Route("/events", events)]), token, port)


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
    news = News()
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(news, token, listening.getsockname()[1]),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            http="h11",
            ws="none",
            loop="asyncio",
            proxy_headers=False,  # nobody may say that he is somebody else
            limit_concurrency=64,
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
