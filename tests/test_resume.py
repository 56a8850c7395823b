import pytest

from fp8rl_jax.checkpoint import CheckpointError
from fp8rl_jax.resume import check_config_compatible


def test_config_compatibility():
    saved = {
        "model": {"layers": 4, "heads": [2, 1]},
        "optimizer": {"lr": 1e-6, "b2": 0.95},
        "steps": 100,
    }
    keys = ("model", "optimizer.b2")
    changed = {
        "model": {"layers": 4, "heads": (2, 1)},
        "optimizer": {"lr": 2e-6, "b2": 0.95},
        "steps": 200,
    }
    check_config_compatible(saved, changed, keys)
    changed["model"] = {"layers": 6, "heads": (2, 1), "bias": False}
    changed["optimizer"]["b2"] = 0.99
    with pytest.raises(CheckpointError) as error:
        check_config_compatible(saved, changed, keys)
    text = str(error.value)
    assert "model.layers: 4 in the checkpoint, 6 now" in text
    assert "model.bias: 'absent' in the checkpoint, False now" in text
    assert "optimizer.b2: 0.95 in the checkpoint, 0.99 now" in text
    assert "lr" not in text and "heads" not in text
    with pytest.raises(ValueError, match="no 'tasks'"):
        check_config_compatible(saved, saved, ("tasks",))
