"""A picture of a run: validation accuracy and training reward against step."""

import math
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fp8rl_jax.metrics import read_metrics

PHASE_LABELS = {"warm_start": "supervised warm start", "grpo": "GRPO"}


def plot_learning_curve(
    metrics_path: str | Path,
    output: str | Path | None = None,
    accuracy: str = "validation/accuracy",
    reward: str = "train/reward",
    title: str = "",
) -> Path:
    """Draws the learning curve of a run, its phases one after the other.

    Args:
      metrics_path: The run's ``metrics.jsonl``.
      output: The PNG to write; ``learning_curve.png`` beside the metrics if omitted.
      accuracy: Metric of the upper panel, a fraction, shown in per cent.
      reward: Metric of the lower panel.
      title: Shown above.

    Returns:
      The path of the picture.

    Raises:
      ValueError: if the file has neither metric, or is not valid JSON lines.
    """
    metrics_path = Path(metrics_path)
    output = metrics_path.with_name("learning_curve.png") if output is None else output
    lines = read_metrics(metrics_path)
    phases = _phases(lines)
    present = [name for name in (accuracy, reward) if any(name in x for x in lines)]
    if not present:
        raise ValueError(f"{metrics_path} has neither {accuracy!r} nor {reward!r}")

    figure = Figure(figsize=(8, 2.6 * len(present) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(present), 1, sharex=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, present, strict=True):
        for index, (phase, offset, members) in enumerate(phases):
            points = [
                (offset + line["step"], line[name])
                for line in members
                if math.isfinite(line.get(name, math.nan))
            ]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            scale = 100 if name == accuracy else 1
            panel.plot(
                steps,
                [scale * value for value in values],
                marker="o" if name == accuracy else None,
                markersize=4,
                color=f"C{index}",
                label=PHASE_LABELS.get(phase, phase),
            )
        for _, offset, _ in phases[1:]:
            panel.axvline(offset, color="0.5", linestyle="--", linewidth=1)
        panel.grid(alpha=0.3)
        if name == accuracy:
            panel.set_ylabel("validation accuracy (%)")
            panel.set_ylim(-2, 102)
        else:
            panel.set_ylabel("mean training reward")
    panels[0].legend(loc="best")
    panels[-1].set_xlabel(
        "step" + (" (phases one after the other)" if len(phases) > 1 else "")
    )
    if title:
        panels[0].set_title(title)
    output = Path(output)
    figure.savefig(output, dpi=150)
    return output


def _phases(
    lines: list[dict[str, Any]],
) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """Groups lines into (phase, steps of the phases before it, its lines)."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(line["phase"], []).append(line)
    phases, offset = [], 0
    for phase, members in groups.items():
        phases.append((phase, offset, members))
        offset += members[-1]["step"]
    return phases
