"""The loss curves of a run as a PNG, with the kills and comebacks marked."""

from __future__ import annotations

from pathlib import Path

from hotswarm.demo.record import Record

COLOURS = ("#1b6ca8", "#d1762a", "#3b8f4f", "#8a4fa3")
SMOOTH = 0.9  # weight of the past in the running mean that is drawn over the raw losses


def draw(record: Record, path: Path) -> None:
    """Writes the PNG. Raises ModuleNotFoundError when matplotlib (extra `demo`) is not installed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 5.5), dpi=110)
    for index, label in enumerate(record.labels):
        colour = COLOURS[index % len(COLOURS)]
        for life in record.lives_of(label):
            steps = life.of("step")
            if not steps:
                continue
            times = [step.at - record.began_at for step in steps]
            losses = [float.fromhex(str(step.data["loss"])) for step in steps]
            axes.plot(times, losses, color=colour, alpha=0.2, linewidth=0.7)
            name = f"trainer {label}" if life.number == 1 else None
            axes.plot(times, _running_mean(losses), color=colour, linewidth=1.6, label=name)
    top = axes.get_ylim()[1]
    for mark in record.marked("kill"):
        label = str(mark.data["label"])
        colour = COLOURS[record.labels.index(label) % len(COLOURS)]
        at = mark.at - record.began_at
        axes.axvline(at, color=colour, linestyle="--", linewidth=1)
        axes.text(at, top, f" kill -9 {mark.data['what']} {label}", rotation=90, va="top", ha="right", fontsize=8)
    for life in record.lives:
        first = life.first("step")
        if life.number > 1 and first is not None:
            colour = COLOURS[record.labels.index(life.label) % len(COLOURS)]
            axes.plot(first.at - record.began_at, float.fromhex(str(first.data["loss"])), "o", color=colour, zorder=5)
    for _, sync in record.events("sync"):
        axes.axvline(sync.at - record.began_at, color="#000000", alpha=0.07, linewidth=1)
    axes.set_xlabel("seconds since the first step; dashed: kill, dot: back, grey: outer step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("Three DiLoCo trainers lose a process, a machine and a donor")
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _running_mean(values: list[float]) -> list[float]:
    mean, found = values[0], []
    for value in values:
        mean = SMOOTH * mean + (1 - SMOOTH) * value
        found.append(mean)
    return found
