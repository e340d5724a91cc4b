"""Settings of a node, and the four layers they come from: defaults < file < environment < flags.

Every option has one name: the field `record_ttl_seconds` is `record-ttl-seconds` or `record_ttl_seconds` in a
`hotswarm.toml` or `hotswarm.yaml`, `HOTSWARM_RECORD_TTL_SECONDS` in the environment and `--record-ttl-seconds` as a
flag. A key that no option has is an error that offers the nearest one: a misspelt setting never passes silently.

A file may hold tables for other parts of hotswarm (`FOREIGN_TABLES`); the node leaves them alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from hotswarm.errors import ConfigError
from hotswarm.ids import check_run

ENV_PREFIX = "HOTSWARM_"
FILE_NAMES = ("hotswarm.toml", "hotswarm.yaml", "hotswarm.yml")
FOREIGN_TABLES = ("checkpoint", "storage", "demo")  # read by other parts of hotswarm, never by the node
FOREIGN_ENV = ("CHECKPOINT_", "S3_", "DEMO_")  # HOTSWARM_CHECKPOINT_…, HOTSWARM_S3_…
OWN_ENV = ("CONFIG", "DEBUG")  # HOTSWARM_CONFIG names the file; HOTSWARM_DEBUG shows tracebacks


class Mode(enum.StrEnum):
    """How a node recovers; design of each in `recovery.py`."""

    AUTO = "auto"
    RESUME = "resume"
    OUTER = "outer"
    CLONE = "clone"


class Inner(enum.StrEnum):
    """Where a joiner's inner optimizer state comes from."""

    AUTO = "auto"
    ADOPT = "adopt"
    OWN = "own"
    FRESH = "fresh"


E = TypeVar("E", bound=enum.StrEnum)


def as_enum(kind: type[E], value: object, name: str) -> E:
    """`value` as a member of `kind`, or ConfigError that lists the members."""
    try:
        return kind(str(value))
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise ConfigError(f"{name} is {value!r}; it must be one of: {allowed}", name) from None


# ---------------------------------------------------------------- addresses


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name, IPv4, or IPv6 without brackets) and a port, 0 to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the host is this machine by definition (names other than localhost are not resolved)."""
        return self.host in {"localhost", "::1"} or self.host.startswith("127.")


def parse_address(text: str, name: str, *, port_zero: bool = False) -> Address:
    """`host:port` or `[v6]:port`; ConfigError names the option `name` and what is wrong with `text`."""
    host, colon, port_text = text.strip().rpartition(":")
    if not colon or not host:
        raise ConfigError(f"{name}: {text!r} is not HOST:PORT; write for example 10.0.0.5:7411", name)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{name}: {text!r} is ambiguous; write an IPv6 address in brackets, like [::1]:7411", name)
    if not host or any(char.isspace() or char in "/@,[]" for char in host):
        raise ConfigError(f"{name}: {text!r} has no usable host; write for example 10.0.0.5:7411", name)
    lowest = 0 if port_zero else 1
    if not (port_text.isascii() and port_text.isdigit() and lowest <= int(port_text) <= 65535):
        raise ConfigError(f"{name}: {text!r} has no usable port; it is a number from {lowest} to 65535", name)
    return Address(host, int(port_text))


# ---------------------------------------------------------------- the node's settings


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One field per flag of `swarm-node`, underscores for dashes. Values are checked and normalised when it is built:
    `peers` may be given as one comma-separated string, paths as strings, numbers as digits.

    Raises ConfigError, whose `field` names the option.
    """

    peers: tuple[str, ...] = ()
    run: str = "default"
    listen: str = "127.0.0.1:7411"
    advertise: str | None = None
    state_dir: Path = Path("checkpoints")
    swarm_key: Path | None = None
    join_file: Path | None = None
    name: str = ""
    http: str | None = None
    http_allow_hosts: tuple[str, ...] = ()
    http_token_file: Path | None = None
    socket_group: str | None = None
    linger_seconds: float = 600.0
    record_ttl_seconds: int = 600
    max_upload_bytes_per_s: int | None = None
    upload_slots: int = 4
    allow_rollback: bool = False
    max_hot_snapshots: int = 5
    max_cold_checkpoints: int = 3
    max_bytes: int | None = None
    log_format: str = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name, normalise in _NORMALISE.items():
            object.__setattr__(self, name, normalise(getattr(self, name), name))
        if self.swarm_key is not None and self.join_file is not None:
            raise ConfigError("swarm_key and join_file are both given; the join file has a key, give one", "join_file")
        exposed = self.http is not None and not parse_address(self.http, "http", port_zero=True).is_loopback
        if exposed and self.http_token_file is None:
            raise ConfigError(
                f"http {self.http} is reachable from other machines; give --http-token-file, or bind 127.0.0.1", "http"
            )

    def replace(self, **changes: object) -> NodeConfig:
        """A copy with `changes`, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, object]:
        """Plain JSON values; `NodeConfig(**config.to_json())` is the same configuration."""
        plain: dict[str, object] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, tuple):
                value = list(value)
            plain[item.name] = str(value) if isinstance(value, Path) else value
        return plain


def as_int(value: object, name: str, *, lowest: int = 0) -> int:
    """A whole number of at least `lowest`; digits in a string count (environment, flags)."""
    if isinstance(value, str):
        try:
            value = int(value.strip())
        except ValueError:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number", name) from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number", name)
    if value < lowest:
        raise ConfigError(f"{name} is {value}; it must be at least {lowest}", name)
    return value


def as_float(value: object, name: str, *, lowest: float = 0.0) -> float:
    """A finite number of at least `lowest`; digits in a string count."""
    if isinstance(value, str):
        try:
            value = float(value.strip())
        except ValueError:
            raise ConfigError(f"{name} is {value!r}; it must be a number", name) from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be a finite number", name)
    if value < lowest:
        raise ConfigError(f"{name} is {value}; it must be at least {lowest:g}", name)
    return float(value)


def as_bool(value: object, name: str) -> bool:
    """A bool, or one of true/false, yes/no, on/off, 1/0 in a string."""
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    raise ConfigError(f"{name} is {value!r}; it must be true or false", name)


def as_text(value: object, name: str) -> str:
    """A string without control characters (it goes into logs and tables)."""
    if not isinstance(value, str) or any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise ConfigError(f"{name} is {value!r}; it must be text without control characters", name)
    return value


def _words(value: object, name: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in (piece.strip() for piece in value.split(",")) if part]
    if not isinstance(value, Iterable) or isinstance(value, Mapping | bytes):
        raise ConfigError(f"{name} is {value!r}; it must be a list, or text separated by commas", name)
    return tuple(as_text(part, name) for part in value)


def _peers(value: object, name: str) -> tuple[str, ...]:
    given = [str(parse_address(part, name)) for part in _words(value, name)]
    return tuple(dict.fromkeys(given))  # the order given, each once


def _path(value: object, name: str) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise ConfigError(f"{name} is {value!r}; it must be a path", name)
    return Path(value).expanduser()


def _listen(value: object, name: str) -> str:
    return str(parse_address(as_text(value, name), name, port_zero=True))


def _one_of(*allowed: str) -> Callable[[object, str], str]:
    def check(value: object, name: str) -> str:
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; it must be one of: {', '.join(allowed)}", name)
        return str(value)

    return check


def _optional(check: Callable[[object, str], object]) -> Callable[[object, str], object]:
    return lambda value, name: None if value is None else check(value, name)


_NORMALISE: dict[str, Callable[[object, str], object]] = {
    "peers": _peers,
    "run": lambda value, name: check_run(as_text(value, name)),
    "listen": _listen,
    "advertise": _optional(lambda value, name: str(parse_address(as_text(value, name), name))),
    "state_dir": _path,
    "swarm_key": _optional(_path),
    "join_file": _optional(_path),
    "name": as_text,
    "http": _optional(_listen),
    "http_allow_hosts": _words,
    "http_token_file": _optional(_path),
    "socket_group": _optional(as_text),
    "linger_seconds": as_float,
    "record_ttl_seconds": lambda value, name: as_int(value, name, lowest=3),
    "max_upload_bytes_per_s": _optional(lambda value, name: as_int(value, name, lowest=1)),
    "upload_slots": lambda value, name: as_int(value, name, lowest=1),
    "allow_rollback": as_bool,
    "max_hot_snapshots": lambda value, name: as_int(value, name, lowest=1),
    "max_cold_checkpoints": as_int,
    "max_bytes": _optional(lambda value, name: as_int(value, name, lowest=1)),
    "log_format": _one_of("text", "json"),
    "log_level": _one_of("debug", "info", "warning", "error"),
}


# ---------------------------------------------------------------- layers


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration and, per field, where its value came from ("default", "file …", "env …", "flag --…")."""

    config: NodeConfig
    origins: Mapping[str, str]


def option_names() -> tuple[str, ...]:
    """All option names, with underscores."""
    return tuple(item.name for item in fields(NodeConfig))


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or an empty string when nothing is near."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def find_config_file(start: Path) -> Path | None:
    """The `hotswarm.toml` or `hotswarm.yaml` in `start` or the nearest folder above it."""
    for folder in (start, *start.parents):
        found = [folder / name for name in FILE_NAMES if (folder / name).is_file()]
        if len(found) > 1:
            names = " and ".join(path.name for path in found)
            raise ConfigError(f"{folder} holds {names}; keep one, or name one with --config", "config")
        if found:
            return found[0]
    return None


def read_config_file(path: Path) -> dict[str, object]:
    """The file's top level, keys with underscores. ConfigError names the file and what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings file {path}: {error}", "config") from None
    data: object
    if path.suffix == ".toml":
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}", "config") from None
    else:
        import yaml  # here: the trainer's side never needs it

        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}", "config") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__} at the top; it must hold settings by name", "config")
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    config_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Settings:
    """Build a NodeConfig from all layers. Flags whose value is None were not given.

    The file is `config_file`, else `$HOTSWARM_CONFIG`, else the nearest one upwards of `cwd`. Paths in a file are
    relative to that file's folder, others to the working directory. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    names = option_names()
    values: dict[str, object] = {}
    origins = dict.fromkeys(names, "default")

    chosen = config_file if config_file is not None else environ.get(ENV_PREFIX + "CONFIG")
    path = Path(chosen) if chosen else find_config_file(cwd or Path.cwd())
    if path is not None:
        for key, value in read_config_file(path).items():
            if key in FOREIGN_TABLES and isinstance(value, Mapping):
                continue
            if key not in names:
                raise ConfigError(f"{path}: unknown setting {key!r}{nearest(key, names)}", key)
            values[key] = _relative_to(path.parent, key, value)
            origins[key] = f"file {path}"

    for variable in sorted(environ):
        key = variable.removeprefix(ENV_PREFIX)
        if key == variable or key in OWN_ENV or key.startswith(FOREIGN_ENV):
            continue
        if key.lower() not in names or key != key.upper():
            known = [ENV_PREFIX + name.upper() for name in names]
            raise ConfigError(f"unknown setting {variable} in the environment{nearest(variable, known)}", variable)
        values[key.lower()] = environ[variable]
        origins[key.lower()] = f"env {variable}"

    for key, value in (flags or {}).items():
        if value is None:
            continue
        if key not in names:
            raise ConfigError(f"unknown setting {key!r}{nearest(key, names)}", key)
        values[key] = value
        origins[key] = "flag --" + key.replace("_", "-")

    if origins["join_file"].startswith("flag") and not origins["swarm_key"].startswith("flag"):
        values.pop("swarm_key", None)  # a flag overrides what a lower layer said in other words
    if origins["swarm_key"].startswith("flag") and not origins["join_file"].startswith("flag"):
        values.pop("join_file", None)
    try:
        return Settings(NodeConfig(**values), origins)  # type: ignore[arg-type]
    except ConfigError as error:
        origin = origins.get(error.field, "default")
        where = "" if origin.startswith(("default", "flag")) else f" (from {origin})"
        raise ConfigError(f"{error}{where}", error.field) from None


def _relative_to(folder: Path, key: str, value: object) -> object:
    if key in ("state_dir", "swarm_key", "join_file", "http_token_file") and isinstance(value, str) and value:
        return folder / Path(value).expanduser()
    return value
