"""The loss curves of a run as a PNG, with the kills and comebacks marked."""

from __future__ import annotations

from pathlib import Path

from hotswarm.demo.record import Event, Life, Record

COLOURS = ("#1b6ca8", "#d1762a", "#3b8f4f", "#8a4fa3")
HALF_WINDOW = 7  # losses to either side in the mean that is drawn over the raw ones
TOGETHER_S = 2.0  # kills on one node that close to each other get one label


def draw(record: Record, path: Path) -> None:
    """Writes the PNG. Raises ModuleNotFoundError when matplotlib (extra `demo`) is not installed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colour = {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(record.labels)}
    began_at = min((step.at for _, step in record.events("step")), default=record.began_at)
    figure, axes = plt.subplots(figsize=(11, 5.5), dpi=110)
    for life in record.lives:
        times, losses = _curve(life, began_at)
        if not times:
            continue
        means = _smooth(losses)
        axes.plot(times, losses, color=colour[life.label], alpha=0.18, linewidth=0.7)
        name = f"trainer {life.label}" if life.number == 1 else None
        axes.plot(times, means, color=colour[life.label], linewidth=1.6, label=name)
        if life.number > 1:
            axes.plot(times[0], means[0], "o", color=colour[life.label], zorder=5)
    for _, sync in record.events("sync"):
        axes.axvline(sync.at - began_at, color="#000000", alpha=0.07, linewidth=1)
    top = axes.get_ylim()[1]
    for at, label, what in _kills(record.marked("kill")):
        axes.axvline(at - began_at, color=colour.get(label), linestyle="--", linewidth=1)
        axes.text(at - began_at, top, f"{what} {label} ", rotation=90, va="top", ha="right", fontsize=8)
    axes.set_xlabel("seconds of training; dashed: kill, dot: back, grey: outer step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("Three DiLoCo trainers lose a process, a machine and a donor")
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _curve(life: Life, began_at: float) -> tuple[list[float], list[float]]:
    steps = life.of("step")
    return [step.at - began_at for step in steps], [float.fromhex(str(step.data["loss"])) for step in steps]


def _kills(marks: list[Event]) -> list[tuple[float, str, str]]:
    """(time, label, "kill -9 trainer + daemon") with kills of one moment on one node together."""
    found: list[tuple[float, str, str]] = []
    for mark in marks:
        label, what = str(mark.data["label"]), str(mark.data["what"])
        if found and found[-1][1] == label and mark.at - found[-1][0] < TOGETHER_S:
            at, _, before = found.pop()
            found.append((at, label, f"{before} + {what}"))
        else:
            found.append((mark.at, label, f"kill -9 {what}"))
    return found


def _smooth(values: list[float]) -> list[float]:
    """The mean over a window around each value; shorter at the ends."""
    windows = (values[max(0, i - HALF_WINDOW) : i + HALF_WINDOW + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
