import matplotlib.axes
import matplotlib.image
import pytest

from fp8rl_jax.learning_curve import plot_learning_curve
from fp8rl_jax.metrics import open_metrics


@pytest.fixture
def run_dir(tmp_path):
    with open_metrics(tmp_path, "warm_start", ("jsonl",)) as writer:
        writer.write(5, {"loss": 2.0, "validation/accuracy": 0.1})
        writer.write(10, {"loss": 1.0, "validation/accuracy": 0.3})
    with open_metrics(tmp_path, "grpo", ("jsonl",)) as writer:
        writer.write(0, {"validation/accuracy": 0.3})
        writer.write(1, {"train/reward": 0.4})
        writer.write(2, {"train/reward": float("nan"), "validation/accuracy": 0.8})
        writer.write(3, {"train/reward": 0.9})
    return tmp_path


def test_the_lines_drawn(run_dir, monkeypatch):
    drawn = {}
    plot = matplotlib.axes.Axes.plot

    def record(axes, x, y, **options):
        drawn[(axes.get_subplotspec().rowspan.start, options["label"])] = (
            list(x),
            [round(value, 6) for value in y],
            options["color"],
        )
        return plot(axes, x, y, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", record)
    plot_learning_curve(run_dir / "metrics.jsonl")
    assert drawn == {
        (0, "supervised warm start"): ([5, 10], [10, 30], "C0"),
        (0, "GRPO"): ([10, 12], [30, 80], "C1"),  # after the 10 steps of warm start
        (1, "GRPO"): ([11, 13], [0.4, 0.9], "C1"),  # the NaN is left out
    }


def test_the_picture(run_dir):
    path = plot_learning_curve(run_dir / "metrics.jsonl", title="tiny")
    assert path == run_dir / "learning_curve.png"
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 500 and pixels.shape[1] == 1200
    assert pixels[..., :3].std() > 0.02  # something is drawn


def test_one_metric_gives_one_panel(run_dir, tmp_path):
    output = tmp_path / "accuracy.png"
    path = plot_learning_curve(run_dir / "metrics.jsonl", output, reward="absent")
    assert path == output and matplotlib.image.imread(path).shape[0] < 600


def test_nothing_to_draw(run_dir):
    with pytest.raises(ValueError, match="has neither 'a' nor 'b'"):
        plot_learning_curve(run_dir / "metrics.jsonl", accuracy="a", reward="b")
