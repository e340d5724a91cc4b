"""Who may use the HTTP API: everything on the Unix socket, a read-only part of it on `--http`.

On TCP a browser on this machine is a possible attacker's tool, so the rules are: GET only; the Host header must be on
an allow-list (against DNS rebinding); away from loopback a bearer token for all but `/healthz` and `/metrics`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aiohttp import web

from hotswarm.config import Address, NodeConfig, parse_address
from hotswarm.errors import ConfigError, ControlError, HotswarmError, LockedError, NotAuthorised
from hotswarm.swarm import channel
from hotswarm.swarm.access import listen_unix, may_use
from hotswarm.swarm.http_api import ACTION_ROUTES, API, CLOCK_ROUTE, READ_ROUTES, Api, Handler

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 1024 * 1024  # a recover request names every tensor of the model
MIN_TOKEN_CHARS = 16  # shorter ones can be guessed over a network
OPEN_PATHS = ("/healthz", "/metrics")
STATUS_OF_EXIT_CODE = {2: 400, 3: 409, 10: 404, 11: 409, 12: 403, 75: 503}  # else 500


def _failure(error: BaseException) -> web.Response:
    data = channel.error_to_json(error)
    return web.json_response({"error": data}, status=STATUS_OF_EXIT_CODE.get(data["exit_code"], 500))


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure leaves as `{"error": …}`."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}"
        return web.json_response({"error": channel.error_to_json(ControlError(text))}, status=error.status)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except HotswarmError as error:
        log.info("%s %s: %s", request.method, request.path, error)  # an ordinary answer
        return _failure(error)
    except Exception as error:  # the one place where a request's failure becomes its answer
        log.exception("%s %s failed", request.method, request.path)
        return _failure(error)


def unix_guard(gid: int | None) -> Any:
    """Only this user, root and the configured group (SO_PEERCRED)."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        sock = request.get_extra_info("socket")
        if sock is None or not may_use(sock, gid):
            raise NotAuthorised("this user may not use this daemon; run as its user, or see --socket-group")
        return await handler(request)

    return guard


def tcp_guard(bound: Address, allow_hosts: Iterable[str], token: str | None) -> Any:
    """GET only, known Host headers only, and the bearer token where one is needed."""
    hosts = {"localhost", "127.0.0.1", "::1", bound.host.lower(), *(host.lower() for host in allow_hosts)}

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in {"GET", "HEAD"}:
            raise web.HTTPMethodNotAllowed(request.method, ["GET"])
        if _host_name(request.headers.get("Host", "")) not in hosts:
            return _failure(NotAuthorised("this Host header is not allowed; see --http-allow-hosts"))
        if token is not None and request.path not in OPEN_PATHS:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
                refusal = _failure(NotAuthorised("a bearer token is needed here; it lies in --http-token-file"))
                refusal.set_status(401)
                refusal.headers["WWW-Authenticate"] = "Bearer"
                return refusal
        return await handler(request)

    return guard


def _host_name(header: str) -> str:
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def read_token(path: Path | None) -> str | None:
    """The bearer token in a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read http_token_file {path}: {error}", "http_token_file") from None
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"the token in {path} is shorter than {MIN_TOKEN_CHARS} characters; make a longer one", "http_token_file"
        )
    return token


# ---------------------------------------------------------------- servers


class HttpServers:
    """The API on the Unix socket and, when configured, on TCP."""

    def __init__(self, api: Api, config: NodeConfig, path: Path, gid: int | None) -> None:
        self._api = api
        self._config = config
        self._path = path
        self._gid = gid
        self._runners: list[web.AppRunner] = []
        self._unix: asyncio.Server | None = None
        self.address: str | None = None  # of the TCP part, as bound

    async def start(self) -> None:
        """Listen. Raises LocalFailure, LockedError (the TCP port is taken), ConfigError."""
        if self._config.http is not None:
            await self._start_tcp(parse_address(self._config.http, "http", port_zero=True))
        runner = await self._runner(unix_guard(self._gid), [*READ_ROUTES, CLOCK_ROUTE], ACTION_ROUTES)
        sock = listen_unix(self._path, socket.SOCK_STREAM, self._gid)
        assert runner.server is not None
        self._unix = await asyncio.get_running_loop().create_unix_server(runner.server, sock=sock)

    async def _start_tcp(self, wanted: Address) -> None:
        token = read_token(self._config.http_token_file)
        guard = tcp_guard(wanted, self._config.http_allow_hosts, token)
        runner = await self._runner(guard, READ_ROUTES, ())
        site = web.TCPSite(runner, wanted.host, wanted.port, reuse_port=False)
        try:
            await site.start()
        except OSError as error:
            text = f"cannot listen on http {wanted}: {error.strerror or error}; another program uses it, choose another"
            raise LockedError(text) from None
        self.address = str(Address(wanted.host, runner.addresses[0][1]))

    async def _runner(
        self, guard: Any, reads: Iterable[tuple[str, Handler]], actions: Iterable[tuple[str, Handler]]
    ) -> web.AppRunner:
        app = web.Application(middlewares=[errors_as_json, guard], client_max_size=MAX_REQUEST_BYTES)
        app[API] = self._api
        app.add_routes([web.get(path, handler) for path, handler in reads])
        app.add_routes([web.post(path, handler) for path, handler in actions])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handle_signals=False)
        await runner.setup()
        self._runners.append(runner)
        return runner

    async def stop(self) -> None:
        """Stop listening; requests under way get a second to end."""
        if self._unix is not None:
            self._unix.close()
        for runner in reversed(self._runners):
            await runner.cleanup()
        self._path.unlink(missing_ok=True)
