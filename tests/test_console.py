import io

import pytest
from rich.console import Console

from fp8rl_jax.console import Reporter, Sample, print_table, printable


def plain():
    return Console(file=io.StringIO(), force_terminal=False, width=100)


def test_plain_lines_one_per_step():
    console = plain()
    with Reporter(40, label="grpo", console=console) as reporter:
        reporter.step(1, {"train/reward": 0.25, "validation/accuracy": 0.5})
        reporter.step(2, {"train/reward": 0.5, "performance/tokens_per_sec": 12345.6})
    first, second = console.file.getvalue().splitlines()
    assert first == "grpo 1/40  reward 0.25  accuracy 0.5"
    assert second.startswith("grpo 2/40  reward 0.5  accuracy 0.5  tok/s 12,346  ETA 0")


def test_eta_is_the_median_step_times_what_is_left(monkeypatch):
    times = iter([0.0, 60.0, 70.0, 80.0])  # the first step compiles
    monkeypatch.setattr("fp8rl_jax.console.time.monotonic", lambda: next(times))
    console = plain()
    with Reporter(400, console=console) as reporter:
        for step in range(1, 5):
            reporter.step(step, {})
    assert console.file.getvalue().splitlines()[-1].endswith("ETA 1:06:00")


def test_a_terminal_gets_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Reporter(4, label="grpo", console=console) as reporter:
        reporter.step(3, {"train/reward": 0.25})
    text = console.file.getvalue()
    assert "3/4" in text and "reward 0.25" in text and "━" in text


def test_samples_are_shown_literally():
    console = plain()
    completion = "[bold]7[/bold] [/x]\x1b[2J\n#### 7\x07"
    reporter = Reporter(1, console=console)
    reporter.samples([Sample("3 + 4 = ", completion, 1.0)])
    text = console.file.getvalue()
    assert "3 + 4 = [bold]7[/bold] [/x]\\x1b[2J" in text
    assert "#### 7\\x07" in text and "reward 1" in text
    assert "\x1b" not in text and "\x07" not in text


def test_printable_keeps_letters_of_every_script():
    assert printable("2×3 = 六\n") == "2×3 = 六\n"
    assert printable("\ud800\r\u202e") == "\\ud800\\r\\u202e"


def test_table():
    console = plain()
    rows = [
        {"": "before", "accuracy": 0.0},
        {"": "after GRPO", "accuracy": 0.83125},
    ]
    print_table(rows, title="[held-out] problems", console=console)
    text = console.file.getvalue()
    assert "[held-out] problems" in text
    assert "after GRPO" in text and "0.8313" in text and "accuracy" in text
    with pytest.raises(ValueError, match="same columns"):
        print_table([{"a": 1.0}, {"b": 1.0}], console=console)
