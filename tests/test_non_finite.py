import json
import time

import numpy as np

from fp8rl_jax.non_finite import SkippedUpdates


def skip(updates, step, count=1):
    batch = {
        "tokens": np.arange(step),
        "advantages": np.array([np.nan]),
        "old_log_probs": None,
        "prompts": ["1+1=", "2+2="],
    }
    updates.skipped(step, count, "loss nan", batch, [{"loss": float("nan")}])


def test_counts_in_a_row_and_in_all(tmp_path, caplog):
    updates = SkippedUpdates(tmp_path / "kept", max_steps_in_a_row=2)
    updates.total = 10  # of a checkpoint
    skip(updates, 3, count=4)
    assert not updates.too_many()
    updates.applied()
    skip(updates, 7)
    assert not updates.too_many()
    skip(updates, 8)
    assert updates.too_many() and updates.total == 16
    text = str(updates.error(8))
    assert "last 2 step(s)" in text and "Step 8 is saved" in text
    assert str(tmp_path / "kept") in text and "\n" not in text
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and "\n" not in "".join(lines)
    assert "Step 3 skipped 4 update(s)" in lines[0]
    assert f"loss nan; its batch is in {tmp_path}/kept/step_3.npz" in lines[0]


def test_the_newest_three_batches_stay_and_can_be_read(tmp_path):
    updates = SkippedUpdates(tmp_path, max_steps_in_a_row=1)
    for step in (8, 9, 10, 100):
        skip(updates, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_10.npz",
        "step_100.npz",
        "step_9.npz",
    ]
    time.sleep(0.01)
    skip(updates, 2)  # of a run resumed from further back
    assert {p.name for p in tmp_path.iterdir()} == {
        "step_2.npz",
        "step_10.npz",
        "step_100.npz",
    }
    with np.load(tmp_path / "step_10.npz") as file:  # without pickle
        kept = dict(file)
    assert kept.keys() == {"tokens", "advantages", "prompts", "metrics"}
    np.testing.assert_array_equal(kept["tokens"], np.arange(10))
    assert kept["prompts"].tolist() == ["1+1=", "2+2="]
    assert np.isnan(json.loads(kept["metrics"].item())[0]["loss"])


def test_a_batch_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    updates = SkippedUpdates(tmp_path / "file", max_steps_in_a_row=2)
    skip(updates, 1)
    assert updates.total == 1 and "could not be written" in caplog.text
    quiet = SkippedUpdates(tmp_path / "other", max_steps_in_a_row=2, writes=False)
    skip(quiet, 1)
    assert quiet.total == 1 and not (tmp_path / "other").exists()
