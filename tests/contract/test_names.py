"""Every name of the public contract is there, with the signature that callers were promised."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hotswarm
from hotswarm import CheckpointConfig, CheckpointMetadata, CheckpointType, SpeculativeCheckpointer, errors

REQUIRED = inspect.Parameter.empty

CONSTRUCTOR = {
    "model": REQUIRED,
    "optimizer": REQUIRED,
    "diloco_trainer": None,
    "config": None,
    "node_id": "",
    "p2p_manager": None,
}
KEYWORDS = ("scheduler", "scaler", "dataloader", "extra", "node", "checkpoint_dir")

METHODS = {
    "start": {},
    "stop": {"wait": False},
    "step": {},
    "force_snapshot": {},
    "snapshot": {"kind": CheckpointType.HOT, "wait": False},
    "load_latest_checkpoint": {},
    "load_checkpoint": {"path": REQUIRED},
    "restore_from_checkpoint": {"checkpoint": REQUIRED},
    "fetch_neighbor_snapshot": {"peer_id": REQUIRED},
    "try_auto_recovery": {},
    "recover": {"mode": None, "dry_run": False},
    "verify": {},
    "get_latest_snapshot_for_serving": {},
    "update_training_state": {"training_step": REQUIRED, "outer_step": 0, "inner_step": 0},
    "get_stats": {},
}

DEFAULTS = {
    "snapshot_interval": 120.0,
    "cold_checkpoint_interval": 3600.0,
    "max_hot_snapshots": 5,
    "max_cold_checkpoints": 3,
    "checkpoint_dir": "./checkpoints",
    "compression_level": 6,
    "announce_to_dht": True,
    "serve_to_peers": True,
    "auto_fetch_on_start": True,
    "recovery_timeout": 60.0,
    "snapshot_on_outer_step": True,
    "max_overhead": 0.01,
    "max_bytes": None,
    "replicas": 0,
    "rejoin": "auto",
    "inner": "auto",
    "min_agree": None,
    "linger_seconds": 600,
    "handle_sigterm": True,
}


def defaults(function: object, *, skip: tuple[str, ...] = ("self",)) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {p.name: p.default for p in parameters if p.name not in skip and p.kind is not p.VAR_KEYWORD}


def test_the_constructor_takes_the_old_arguments_in_the_old_order_and_the_new_ones_by_keyword() -> None:
    parameters = inspect.signature(SpeculativeCheckpointer).parameters
    positional = {n: p.default for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(CONSTRUCTOR.items())
    keyword_only = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keyword_only == dict.fromkeys(KEYWORDS)


def test_create_checkpointer_has_its_signature() -> None:
    parameters = inspect.signature(hotswarm.create_checkpointer).parameters
    positional = {n: p.default for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == [
        ("model", REQUIRED),
        ("optimizer", REQUIRED),
        ("checkpoint_dir", "./checkpoints"),
        ("snapshot_interval", 120.0),
        ("node_id", ""),
    ]
    keyword_only = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keyword_only == {"diloco_trainer": None, "p2p_manager": None, "node": None}
    assert any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize("name", METHODS)
def test_the_method_has_its_signature(name: str) -> None:
    assert defaults(getattr(SpeculativeCheckpointer, name)) == METHODS[name]


@pytest.mark.parametrize("name", ["fetch_neighbor_snapshot", "try_auto_recovery"])
def test_the_method_is_a_coroutine(name: str) -> None:
    assert inspect.iscoroutinefunction(getattr(SpeculativeCheckpointer, name))


def test_dry_run_is_keyword_only() -> None:
    assert (
        inspect.signature(SpeculativeCheckpointer.recover).parameters["dry_run"].kind is inspect.Parameter.KEYWORD_ONLY
    )


@pytest.mark.parametrize("function", ["fetch_neighbor_snapshot", "afetch_neighbor_snapshot"])
def test_the_fetch_function_has_its_signature(function: str) -> None:
    parameters = inspect.signature(getattr(hotswarm, function)).parameters
    assert {n: p.default for n, p in parameters.items()} == {
        "peer": None,
        "run": None,
        "node": None,
        "mode": "outer",
        "timeout": 60.0,
    }
    assert [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == ["peer"]
    assert inspect.iscoroutinefunction(hotswarm.afetch_neighbor_snapshot)


def test_every_default_of_the_settings() -> None:
    config = CheckpointConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert set(vars(config)) == set(DEFAULTS)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("snapshot_interval", 0),
        ("snapshot_interval", "often"),
        ("snapshot_interval", float("nan")),
        ("snapshot_interval", True),
        ("cold_checkpoint_interval", -1),
        ("max_hot_snapshots", 0),
        ("max_hot_snapshots", 2.5),
        ("max_cold_checkpoints", -1),
        ("checkpoint_dir", ""),
        ("checkpoint_dir", 7),
        ("compression_level", 10),
        ("announce_to_dht", "yes"),
        ("serve_to_peers", 1),
        ("recovery_timeout", 0.0),
        ("max_overhead", 0.0),
        ("max_overhead", 1.5),
        ("max_bytes", 0),
        ("replicas", -1),
        ("replicas", 1),
        ("rejoin", "always"),
        ("inner", "steal"),
        ("min_agree", 0),
        ("linger_seconds", -0.1),
        ("handle_sigterm", None),
    ],
)
def test_a_bad_value_is_a_config_error_that_names_the_field(field: str, bad: object) -> None:
    with pytest.raises(errors.ConfigError, match=field) as caught:
        CheckpointConfig(**{field: bad})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "good"),
    [
        ("snapshot_interval", "auto"),
        ("snapshot_interval", 1),
        ("max_cold_checkpoints", 0),
        ("linger_seconds", 0),
        ("max_overhead", 1.0),
        ("min_agree", 1),
        ("rejoin", "clone"),
        ("inner", "fresh"),
    ],
)
def test_a_good_value_is_kept(field: str, good: object) -> None:
    assert getattr(CheckpointConfig(**{field: good}), field) == good


def test_checkpoint_types() -> None:
    assert {kind.name: kind.value for kind in CheckpointType} == {"HOT": "hot", "COLD": "cold", "RECOVERY": "recovery"}


def test_metadata_fields_in_order_and_properties() -> None:
    metadata = CheckpointMetadata(
        checkpoint_id="x",
        timestamp=0.0,
        checkpoint_type=CheckpointType.HOT,
        training_step=1,
        outer_step=2,
        inner_step=3,
        model_hash="h",
        num_params=4,
        layer_ids=[0, 1],
        file_path="/p",
        compressed_size=50,
        original_size=100,
        node_id="n",
    )
    assert metadata.compression_ratio == 0.5
    assert metadata.age_seconds > 1e9
    assert (metadata.outer_digest, metadata.snapshot_id) == ("", "")
    metadata.original_size = 0
    assert metadata.compression_ratio == 1.0


def test_the_error_tree() -> None:
    tree = {
        "ConfigError": "HotswarmError",
        "LocalFailure": "HotswarmError",
        "StoreError": "LocalFailure",
        "CaptureError": "LocalFailure",
        "PeerUnavailable": "HotswarmError",
        "PeerMisbehaved": "HotswarmError",
        "RecoveryError": "HotswarmError",
        "NoSnapshot": "RecoveryError",
        "Incompatible": "RecoveryError",
        "Stale": "RecoveryError",
    }
    for child, parent in tree.items():
        assert issubclass(getattr(errors, child), getattr(errors, parent))
    blamed = errors.PeerMisbehaved("peer-1", "chunk 3 has another digest")
    assert (blamed.peer, blamed.evidence) == ("peer-1", "chunk 3 has another digest")


@pytest.mark.parametrize("name", sorted(hotswarm.__all__))
def test_every_exported_name_loads(name: str) -> None:
    assert getattr(hotswarm, name) is not None
    assert name in dir(hotswarm)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SpeculativeCheckpinter'"):
        _ = hotswarm.SpeculativeCheckpinter


REPORT_FIELDS = [
    "mode",
    "reason",
    "donors",
    "bytes",
    "bytes_wasted",
    "seconds",
    "rejected",
    "agreement",
    "snapshot_id",
    "outer_step",
    "inner_step",
    "training_step",
]


def test_the_recovery_report_has_its_fields() -> None:
    report = hotswarm.RecoveryReport()
    for name in REPORT_FIELDS:
        assert hasattr(report, name)
    assert set(report.seconds) >= {"locate", "choose", "fetch", "verify", "restore"}


HEAVY = ("torch", "grpc", "asyncio", "aiohttp", "uvloop", "kademlia", "numpy")


@pytest.mark.parametrize(
    "more", ["", "hotswarm.errors.ConfigError; hotswarm.CheckpointConfig(); hotswarm.CheckpointType.HOT"]
)
def test_importing_hotswarm_is_light(more: str, tmp_path: Path) -> None:
    code = f"import hotswarm, sys; {more or 'pass'}; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert out.stdout.strip() == "[]"


def test_the_trainers_side_loads_no_server(tmp_path: Path) -> None:
    code = (
        "import sys, hotswarm; hotswarm.SpeculativeCheckpointer, hotswarm.fetch_neighbor_snapshot\n"
        "print([m for m in ('grpc', 'aiohttp', 'uvloop', 'kademlia') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert out.stdout.strip() == "[]"
