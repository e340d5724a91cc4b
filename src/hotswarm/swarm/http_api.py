"""The paths of the daemon's HTTP API; `control` lists them, `http_server` decides who may use them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from hotswarm.errors import ControlError
from hotswarm.swarm import channel
from hotswarm.swarm.channel import Json
from hotswarm.swarm.model import RecoverRequest

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0  # silence on a progress stream; it also finds out that nobody listens any more
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

Progress = Callable[[Json], None]


class Api(Protocol):
    """What the node offers to its clients; every method raises HotswarmError."""

    def status(self) -> Json:
        """`/api/v1/status`."""

    def ready(self) -> bool:
        """Whether the node serves."""

    def peers(self) -> list[Json]:
        """The peers that it knows."""

    def snapshots(self) -> list[Json]:
        """All snapshots, oldest first."""

    def recoveries(self) -> list[Json]:
        """The last recoveries, oldest first."""

    async def clock(self) -> Json | None:
        """The swarm's live round clock."""

    async def flush(self, seq: int, timeout_s: float) -> Json:
        """Wait until a capture is durable."""

    async def recover(self, request: RecoverRequest, progress: Progress) -> Json:
        """Locate, choose, fetch."""

    async def fetch(self, peer: str, request: RecoverRequest, progress: Progress) -> Json:
        """Fetch from one peer."""

    async def verify(self, snapshot_id: str) -> Json:
        """Check every digest of a snapshot."""

    async def pin(self, snapshot_id: str, *, pinned: bool) -> None:
        """Keep a snapshot from retention, or no longer."""

    def request_stop(self) -> None:
        """As SIGTERM does."""


API = web.AppKey("api", Api)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# ---------------------------------------------------------------- reading


async def _healthz(_: web.Request) -> web.StreamResponse:
    """200 as long as the loop turns."""
    return web.Response(text="ok\n")


async def _readyz(request: web.Request) -> web.StreamResponse:
    """200 once the node serves, 503 before that and while it stops."""
    ready = request.app[API].ready()
    return web.Response(text="ready\n" if ready else "not ready\n", status=200 if ready else 503)


async def _metrics(request: web.Request) -> web.StreamResponse:
    """Prometheus text format."""
    from hotswarm.swarm.metrics import render_metrics  # not everybody scrapes

    api = request.app[API]
    body, content_type = render_metrics(api.status(), api.snapshots())
    return web.Response(body=body, headers={"Content-Type": content_type})


async def _status(request: web.Request) -> web.StreamResponse:
    return web.json_response(request.app[API].status())


async def _peers(request: web.Request) -> web.StreamResponse:
    return web.json_response({"peers": request.app[API].peers()})


async def _snapshots(request: web.Request) -> web.StreamResponse:
    return web.json_response({"snapshots": request.app[API].snapshots()})


async def _recoveries(request: web.Request) -> web.StreamResponse:
    return web.json_response({"recoveries": request.app[API].recoveries()})


async def _clock(request: web.Request) -> web.StreamResponse:
    return web.json_response({"clock": await request.app[API].clock()})


def _page(name: str, content_type: str) -> Handler:
    async def page(_: web.Request) -> web.StreamResponse:
        text = importlib.resources.files("hotswarm.web").joinpath(name).read_text(encoding="utf-8")
        return web.Response(text=text, content_type=content_type, headers=PAGE_HEADERS)

    return page


# On the Unix socket and on TCP.
READ_ROUTES: tuple[tuple[str, Handler], ...] = (
    ("/", _page("index.html", "text/html")),
    ("/dashboard.js", _page("dashboard.js", "text/javascript")),
    ("/dashboard.css", _page("dashboard.css", "text/css")),
    ("/healthz", _healthz),
    ("/readyz", _readyz),
    ("/metrics", _metrics),
    ("/api/v1/status", _status),
    ("/api/v1/peers", _peers),
    ("/api/v1/snapshots", _snapshots),
    ("/api/v1/recoveries", _recoveries),
)


CLOCK_ROUTE: tuple[str, Handler] = ("/api/v1/clock", _clock)  # asks other nodes: on the Unix socket only


# ---------------------------------------------------------------- doing


async def _body(request: web.Request) -> Json:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ControlError("the request body is not a JSON object")
    return body


def _field(body: Json, name: str, kind: type[Any] | tuple[type[Any], ...]) -> Any:
    value = body.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ControlError(f"the request's field {name!r} is {value!r}, which does not fit")
    return value


async def _flush(request: web.Request) -> web.StreamResponse:
    body = await _body(request)
    timeout_s = float(_field(body, "timeout", (int, float)))
    return web.json_response({"snapshot": await request.app[API].flush(_field(body, "seq", int), timeout_s)})


async def _verify(request: web.Request) -> web.StreamResponse:
    return web.json_response(await request.app[API].verify(_field(await _body(request), "snapshot_id", str)))


async def _pin(request: web.Request) -> web.StreamResponse:
    body = await _body(request)
    await request.app[API].pin(_field(body, "snapshot_id", str), pinned=_field(body, "pinned", bool))
    return web.json_response({})


async def _stop(request: web.Request) -> web.StreamResponse:
    request.app[API].request_stop()
    return web.json_response({"pid": os.getpid()})


async def _recover(request: web.Request) -> web.StreamResponse:
    api, wanted = request.app[API], RecoverRequest.from_json(await _body(request))

    async def work(progress: Progress) -> Json:
        return {"outcome": await api.recover(wanted, progress)}

    return await _stream(request, work)


async def _fetch(request: web.Request) -> web.StreamResponse:
    api, body = request.app[API], await _body(request)
    peer, wanted = _field(body, "peer", str), RecoverRequest.from_json(_field(body, "request", dict))

    async def work(progress: Progress) -> Json:
        return {"snapshot": await api.fetch(peer, wanted, progress)}

    return await _stream(request, work)


async def _stream(request: web.Request, work: Callable[[Progress], Awaitable[Json]]) -> web.StreamResponse:
    """Progress as JSON lines while `work` runs, then its result or its error. A client that goes away ends it."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    lines: asyncio.Queue[Json] = asyncio.Queue()
    task = asyncio.ensure_future(work(lambda data: lines.put_nowait({"progress": data})))
    task.add_done_callback(lambda _: lines.put_nowait({}))
    try:
        while not (task.done() and lines.empty()):
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    line = await lines.get()
            except TimeoutError:
                line = {"progress": {}}
            if line:
                await response.write(json.dumps(line).encode() + b"\n")
        await response.write(json.dumps(_outcome(task)).encode() + b"\n")
    except ConnectionError:
        log.info("a client went away during %s, which ends it", request.path)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
    return response


def _outcome(task: asyncio.Future[Json]) -> Json:
    if task.cancelled():
        return {"error": channel.error_to_json(ControlError("the daemon is stopping; start it again and retry"))}
    error = task.exception()
    return task.result() if error is None else {"error": channel.error_to_json(error)}


# On the Unix socket only, with POST.
ACTION_ROUTES: tuple[tuple[str, Handler], ...] = (
    ("/api/v1/flush", _flush),
    ("/api/v1/recover", _recover),
    ("/api/v1/fetch", _fetch),
    ("/api/v1/verify", _verify),
    ("/api/v1/pin", _pin),
    ("/api/v1/stop", _stop),
)
