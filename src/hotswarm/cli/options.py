"""The flags of a node, one per field of NodeConfig, from one table; and how a verb gets its settings from them."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hotswarm.config import NodeConfig, Settings, load_settings, option_names
from hotswarm.errors import ConfigError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

HELP = {
    "peers": "Other nodes, HOST:PORT, separated by commas.",
    "run": "The training job that nodes rendezvous on.",
    "listen": "Own HOST:PORT: TCP for gRPC, UDP for the DHT. Port 0: a free one.",
    "advertise": "HOST:PORT that others reach this node at.",
    "state_dir": "Folder of this node's key and snapshots.",
    "swarm_key": "File with the key that all members share.",
    "join_file": "File with addresses and key, made by keygen.",
    "name": "A label for people; never an identity.",
    "http": "HOST:PORT of the read-only HTTP API and dashboard.",
    "http_allow_hosts": "Further Host header values that --http answers to.",
    "http_token_file": "File with the bearer token; needed for --http off loopback.",
    "socket_group": "Group that may use the control socket.",
    "linger_seconds": "How long a daemon that a trainer started outlives it.",
    "record_ttl_seconds": "Life of an announcement, renewed every third of it.",
    "max_upload_bytes_per_s": "Cap on what all joiners together may fetch from here.",
    "upload_slots": "Streams served at once.",
    "allow_rollback": "Accept a state older than this node's own last outer step.",
    "max_hot_snapshots": "Hot snapshots kept, unless the trainer says otherwise.",
    "max_cold_checkpoints": "Cold checkpoints kept, unless the trainer says otherwise.",
    "max_bytes": "Disk quota of this run's snapshots, in bytes.",
    "log_format": "text or json, on stderr.",
    "log_level": "debug, info, warning or error.",
}
_DEFAULTS = {item.name: item.default for item in dataclasses.fields(NodeConfig)}
_LISTS = ("peers", "http_allow_hosts")
_FLAGS = ("allow_rollback",)
_MAX_JOIN_BYTES = 65536

F = TypeVar("F", bound=Callable[..., Any])


def node_options(verb: F) -> F:
    """Give a typer command all flags of a node; its parameter `settings: Settings` gets what they and the other
    layers say. Values are strings here: NodeConfig checks them, with the same words for every layer.
    """
    own = [item for item in inspect.signature(verb, eval_str=True).parameters.values() if item.name != "settings"]

    def wrapper(**given: Any) -> Any:
        rest = {item.name: given.pop(item.name) for item in own}
        return verb(settings=gather(given), **rest)

    parameters = [*own, *(_parameter(name) for name in option_names()), _CONFIG, _JOIN]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {item.name: item.annotation for item in parameters}
    wrapper.__name__, wrapper.__doc__ = verb.__name__, verb.__doc__
    return wrapper  # type: ignore[return-value]


def _keyword(name: str, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _parameter(name: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    if name in _FLAGS:
        return _keyword(name, Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=HELP[name])])
    kind: Any = list[str] | None if name in _LISTS else str | None
    default = _DEFAULTS[name]
    shown = str(default) if default not in {None, "", ()} else False
    return _keyword(name, Annotated[kind, typer.Option(flag, help=HELP[name], show_default=shown)])


_CONFIG = _keyword("config", Annotated[str | None, typer.Option("--config", help="Settings file, TOML or YAML.")])
_JOIN = _keyword("join", Annotated[str | None, typer.Option("--join", help="'-': read a join file from stdin.")])


def gather(given: dict[str, Any]) -> Settings:
    """Settings of all layers, the given flags on top. Raises ConfigError, NotAuthorised (a bad join token)."""
    config_file, join = given.pop("config", None), given.pop("join", None)
    flags = {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = load_settings(flags, config_file=config_file)
    return settings if join is None else _joined(settings, join)


def _joined(settings: Settings, join: str) -> Settings:
    """Keep the join token from stdin in the state directory, so that a restart needs no token."""
    from hotswarm.swarm.swarmkey import parse_key_text

    if join != "-":
        raise ConfigError("--join takes '-' (stdin) only: other users can read a token in the arguments", "join")
    text = sys.stdin.read(_MAX_JOIN_BYTES)
    parse_key_text(text, "the join token on stdin")
    path = settings.config.state_dir / "swarm.join"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot keep the join token in {path}: {error}", "join") from None
    config = settings.config.replace(join_file=path, swarm_key=None)
    return Settings(config, {**settings.origins, "join_file": "flag --join"})


def state_dir_of(settings: Settings) -> Path:
    """The state directory, absolute, for messages."""
    return settings.config.state_dir.absolute()
