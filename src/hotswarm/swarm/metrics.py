"""`/metrics`: the node's status in Prometheus' text format. Names end in their unit; counters in `_total`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from hotswarm.swarm.channel import Json


class _Collector:
    def __init__(self, status: Json, snapshots: list[Json]) -> None:
        self._status = status
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        yield from _gauges(self._status)
        yield from _counters(self._status)
        yield from _stored(self._snapshots)


def _gauges(status: Json) -> Iterable[Metric]:
    clock = status.get("clock") or {}
    values = {
        "hotswarm_up_seconds": ("Time since the daemon started", status["uptime_s"]),
        "hotswarm_trainer_attached": ("1 while a trainer is attached", int(status["trainer"] is not None)),
        "hotswarm_healthy": ("1 when nothing needs attention", int(status["health"]["state"] == "green")),
        "hotswarm_work_at_risk_seconds": (
            "Training done since the newest durable snapshot",
            status["work_at_risk_s"],
        ),
        "hotswarm_persist_last_seconds": (
            "Time to hash and write the last snapshot",
            status["persist"]["last_seconds"],
        ),
        "hotswarm_outer_step": ("Finished rounds of the attached trainer", clock.get("outer_step")),
        "hotswarm_inner_step": ("Position in the round of the attached trainer", clock.get("inner_step")),
    }
    for name, (text, value) in values.items():
        if value is not None:
            yield GaugeMetricFamily(name, text, value=float(value))


def _counters(status: Json) -> Iterable[Metric]:
    persist = status["persist"]
    yield CounterMetricFamily("hotswarm_snapshots_stored", "Snapshots made durable", value=persist["stored"])
    yield CounterMetricFamily("hotswarm_snapshots_failed", "Snapshots that could not be", value=persist["failures"])
    for name, value in sorted((status.get("swarm", {}).get("counters") or {}).items()):
        yield CounterMetricFamily(f"hotswarm_swarm_{name}", f"Swarm: {name.replace('_', ' ')}", value=float(value))


def _stored(snapshots: list[Json]) -> Iterable[Metric]:
    count = GaugeMetricFamily("hotswarm_snapshots", "Snapshots on disk", labels=["kind"])
    for kind in ("hot", "cold", "recovery"):
        count.add_metric([kind], sum(1 for item in snapshots if item["kind"] == kind))
    yield count
    total = sum(item["stored_bytes"] for item in snapshots)
    yield GaugeMetricFamily("hotswarm_snapshots_disk_bytes", "Disk space of all snapshots", value=total)


def render_metrics(status: Json, snapshots: list[Json]) -> tuple[bytes, str]:
    """(body, content type) for a status and the snapshots as `/api/v1/status` and `/api/v1/snapshots` give them."""
    registry = CollectorRegistry()
    registry.register(_Collector(status, snapshots))
    return generate_latest(registry), CONTENT_TYPE_LATEST
