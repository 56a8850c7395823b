"""What requests and sampling parameters refuse."""

import pytest

from fp8rl_jax.rollout.types import Request, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1.0, "temperature must be >= 0, got -1.0"),
        ("max_new_tokens", 0, "max_new_tokens must be >= 1, got 0"),
        ("num_samples", 0, "num_samples must be >= 1, got 0"),
        ("stop_ids", (), "stop_ids is empty"),
        ("top_k", -1, "top_k must be >= 0"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\]"),
        ("top_p", float("nan"), r"top_p must be in \(0, 1\]"),
        ("min_p", 1.5, r"min_p must be in \[0, 1\]"),
        ("stop_strings", ("",), "stop_strings must be a tuple of strings"),
        ("stop_strings", "END", "stop_strings must be a tuple of strings"),
    ],
)
def test_bad_parameters(field, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**({"stop_ids": (1,)} | {field: value}))


@pytest.mark.parametrize(
    ("fields", "truncated"),
    [({}, False), ({"top_k": 3}, True), ({"top_p": 0.9}, True), ({"min_p": 0.1}, True)],
)
def test_truncated(fields, truncated):
    assert SamplingParams(stop_ids=(1,), **fields).truncated is truncated


def test_bad_requests():
    sampling = SamplingParams(stop_ids=(1,), num_samples=2)
    with pytest.raises(ValueError, match="The prompt is empty"):
        Request([], sampling, (0, 1))
    with pytest.raises(ValueError, match="1 sample_ids were given for num_samples=2"):
        Request([5], sampling, (0,))
