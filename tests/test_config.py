"""Settings: four layers, one name per option, and one clear line for each kind of mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswarm.config import Address, Inner, Mode, NodeConfig, as_enum, load_settings, option_names, parse_address
from hotswarm.errors import ConfigError


def load(tmp_path: Path, flags=None, env=None, **files):
    for name, text in files.items():
        (tmp_path / f"hotswarm.{name}").write_text(text)
    return load_settings(flags, environ=env or {}, cwd=tmp_path)


# ---------------------------------------------------------------- values


def test_the_defaults_are_those_of_the_contract():
    config = NodeConfig()
    assert (config.peers, config.run, config.listen) == ((), "default", "127.0.0.1:7411")
    assert config.state_dir == Path("checkpoints")
    assert (config.linger_seconds, config.record_ttl_seconds, config.upload_slots) == (600, 600, 4)
    assert (config.max_upload_bytes_per_s, config.allow_rollback) == (None, False)


def test_values_are_normalised_however_they_are_given():
    config = NodeConfig(
        peers=" a:1, b:2,a:1 ,", state_dir="x", linger_seconds="2.5", upload_slots="3", allow_rollback="yes"
    )
    assert config.peers == ("a:1", "b:2")
    assert config.state_dir == Path("x")
    assert (config.linger_seconds, config.upload_slots, config.allow_rollback) == (2.5, 3, True)
    assert NodeConfig(peers=["a:1", "b:2"]).peers == ("a:1", "b:2")
    assert NodeConfig(**config.to_json()) == config


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("peers", "nonsense", "HOST:PORT"),
        ("peers", "host:0", "port"),
        ("peers", "host:65536", "port"),
        ("peers", "host:http", "port"),
        ("peers", "::1:7411", "brackets"),
        ("peers", "a b:1", "host"),
        ("peers", 5, "list"),
        ("run", "../x", "usable"),
        ("run", "", "usable"),
        ("run", "a" * 65, "usable"),
        ("listen", "7411", "HOST:PORT"),
        ("advertise", "host:0", "port"),
        ("state_dir", "", "path"),
        ("state_dir", "a\0b", "path"),
        ("name", "line\nbreak", "control characters"),
        ("linger_seconds", -1, "at least 0"),
        ("linger_seconds", "nan", "finite"),
        ("record_ttl_seconds", 2, "at least 3"),
        ("upload_slots", 0, "at least 1"),
        ("upload_slots", True, "whole number"),
        ("upload_slots", 1.5, "whole number"),
        ("max_upload_bytes_per_s", "lots", "whole number"),
        ("allow_rollback", "perhaps", "true or false"),
        ("max_hot_snapshots", 0, "at least 1"),
        ("log_format", "xml", "text, json"),
        ("log_level", "loud", "debug"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_field(field, value, says):
    with pytest.raises(ConfigError) as caught:
        NodeConfig(**{field: value})
    assert caught.value.field == field
    assert field in str(caught.value) or "run name" in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_themselves_are_accepted():
    assert NodeConfig(record_ttl_seconds=3, upload_slots=1, linger_seconds=0, max_cold_checkpoints=0)
    assert NodeConfig(run="a" * 64, listen="0.0.0.0:0", peers="h:1,h:65535")


def test_http_off_loopback_needs_a_token():
    assert NodeConfig(http="127.0.0.1:0").http == "127.0.0.1:0"
    assert NodeConfig(http="[::1]:80").http == "[::1]:80"
    with pytest.raises(ConfigError, match="http-token-file"):
        NodeConfig(http="0.0.0.0:8080")
    assert NodeConfig(http="0.0.0.0:8080", http_token_file="t")


def test_key_and_join_file_are_one_or_the_other():
    with pytest.raises(ConfigError, match="both given"):
        NodeConfig(swarm_key="a", join_file="b")


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_configuration_error(text):
    try:
        address = parse_address(text, "peers")
    except ConfigError:
        return
    assert 1 <= address.port <= 65535
    assert parse_address(str(address), "peers") == address


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("h", False)],
)
def test_loopback_is_known_without_resolving_names(host, loopback):
    assert Address(host, 1).is_loopback is loopback


def test_enums_list_their_members_when_they_refuse():
    assert as_enum(Mode, "outer", "mode") is Mode.OUTER
    assert as_enum(Inner, Inner.OWN, "inner") is Inner.OWN
    with pytest.raises(ConfigError, match="auto, resume, outer, clone"):
        as_enum(Mode, "best", "mode")


# ---------------------------------------------------------------- layers


def test_flags_beat_the_environment_beats_the_file_beats_defaults(tmp_path):
    toml = 'run = "file"\nname = "file"\nupload-slots = 7\nmax_bytes = 9\n'
    env = {"HOTSWARM_RUN": "env", "HOTSWARM_NAME": "env", "OTHER": "x"}
    settings = load(tmp_path, {"run": "flag", "peers": None}, env, toml=toml)
    config, origins = settings.config, settings.origins
    assert (config.run, config.name, config.upload_slots, config.max_bytes) == ("flag", "env", 7, 9)
    assert origins["run"] == "flag --run"
    assert origins["name"] == "env HOTSWARM_NAME"
    assert origins["upload_slots"] == f"file {tmp_path / 'hotswarm.toml'}"
    assert origins["peers"] == "default"


def test_every_option_can_be_set_in_all_three_layers(tmp_path):
    sample = {
        "peers": "a:1", "run": "r", "listen": "127.0.0.1:1", "advertise": "h:2", "state_dir": "/s", "swarm_key": "/k",
        "join_file": "/j", "name": "n", "http": "127.0.0.1:3", "http_allow_hosts": "x", "http_token_file": "/t",
        "socket_group": "g", "linger_seconds": "1", "record_ttl_seconds": "9", "max_upload_bytes_per_s": "8",
        "upload_slots": "2", "allow_rollback": "true", "max_hot_snapshots": "6", "max_cold_checkpoints": "4",
        "max_bytes": "7", "log_format": "json", "log_level": "debug",
    }  # fmt: skip
    assert set(sample) == set(option_names())
    for name, value in sample.items():
        wanted = getattr(NodeConfig(**{name: value}), name)
        assert wanted != getattr(NodeConfig(), name)
        in_file = load(tmp_path, toml=f'{name.replace("_", "-")} = "{value}"\n').config
        assert getattr(in_file, name) == wanted, name
        (tmp_path / "hotswarm.toml").unlink()
        assert getattr(load(tmp_path, env={f"HOTSWARM_{name.upper()}": value}).config, name) == wanted
        assert getattr(load(tmp_path, {name: value}).config, name) == wanted


def test_yaml_says_the_same_as_toml(tmp_path):
    config = load(tmp_path, yaml="peers:\n  - a:1\n  - b:2\nallow-rollback: true\nlinger_seconds: 3\n").config
    assert (config.peers, config.allow_rollback, config.linger_seconds) == (("a:1", "b:2"), True, 3.0)


def test_the_file_is_found_upwards_and_its_paths_are_relative_to_it(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "hotswarm.toml").write_text('state_dir = "state"\n')
    assert load_settings(environ={}, cwd=deep).config.state_dir == tmp_path / "state"
    other = tmp_path / "other.toml"
    other.write_text('run = "other"\n')
    assert load_settings(config_file=other, environ={}, cwd=deep).config.run == "other"
    assert load_settings(environ={"HOTSWARM_CONFIG": str(other)}, cwd=deep).config.run == "other"


def test_tables_of_other_parts_are_left_alone(tmp_path):
    assert (
        load(tmp_path, toml='run = "r"\n[checkpoint]\nsnapshot_interval = 5\n[storage]\ntype = "s3"\n').config.run
        == "r"
    )
    assert load(tmp_path, env={"HOTSWARM_CHECKPOINT_MAX_BYTES": "1", "HOTSWARM_S3_KEY": "k"})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda tmp: load(tmp, toml="pears = 1\n"), "unknown setting 'pears'; did you mean 'peers'?"),
        (lambda tmp: load(tmp, toml="[peers]\na = 1\n"), "peers"),
        (lambda tmp: load(tmp, env={"HOTSWARM_PERS": "a:1"}), "HOTSWARM_PERS in the environment; did you mean"),
        (lambda tmp: load(tmp, env={"HOTSWARM_peers": "a:1"}), "unknown setting HOTSWARM_peers"),
        (lambda tmp: load(tmp, {"lisen": "x"}), "did you mean 'listen'?"),
        (lambda tmp: load(tmp, toml="run ="), "not valid TOML"),
        (lambda tmp: load(tmp, yaml="run: [1"), "not valid YAML"),
        (lambda tmp: load(tmp, yaml="- 1\n"), "settings by name"),
        (lambda tmp: load(tmp, toml='run = "a"', yaml="run: b"), "keep one"),
        (lambda tmp: load_settings(config_file=tmp / "no.toml", environ={}), "cannot read the settings file"),
        (lambda tmp: load(tmp, toml='run = "a b"\n'), "hotswarm.toml"),
        (lambda tmp: load(tmp, env={"HOTSWARM_UPLOAD_SLOTS": "x"}), "(from env HOTSWARM_UPLOAD_SLOTS)"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_layer_is_one_line_that_says_where(tmp_path, call, says):
    with pytest.raises(ConfigError) as caught:
        call(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flag_for_the_key_overrides_a_join_file_of_a_lower_layer(tmp_path):
    settings = load(tmp_path, {"swarm_key": "k"}, toml='join_file = "j"\n')
    assert settings.config.join_file is None
    assert settings.config.swarm_key == Path("k")
