"""Float64 attention over quantised operands, and the bounds on the blocked one."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.fp8 import Precision, dequantize, quantize
from fp8rl_jax.fp8.recipe import BF16, FP8, FP8_LINEAR

PRECISIONS = {
    "bf16": BF16,
    "fp8_kv": Precision(FP8_LINEAR, kv_cache=True, attention=False),
    "fp8": FP8,
}
UNIT_BF16, UNIT_E4M3 = 2.0**-8, 2.0**-4
BLOCK = 128


def f64(x):
    return np.asarray(x, np.float64)


@jax.jit
def _quantise(x):
    q = quantize(x, (1, x.shape[-1]), power_of_two=True)
    return dequantize(q, jnp.float32), q.scales


@dataclasses.dataclass(frozen=True)
class Reference:
    """Plain softmax attention [B, T, N, H] of the quantised operands, float64.

    Attributes:
      q: [B, T, N, H], the queries that the products see.
      k: [B, S, N, H], keys repeated for their query heads.
      v: likewise.
      v_scales: [B, S, N, 1], ones without FP8 attention.
      visible: [B, T, S] or [T, S].
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    v_scales: np.ndarray
    visible: np.ndarray
    fp8: bool

    @classmethod
    def make(cls, q, k, v, visible, name):
        precision = PRECISIONS[name]
        v_scales = jnp.ones((*v.shape[:-1], 1))
        if precision.kv_cache:
            k, _ = _quantise(k)
            v, v_scales = _quantise(v)
        if precision.attention:
            q, _ = _quantise(q)
        repeats = q.shape[2] // k.shape[2]
        k, v, v_scales = (np.repeat(f64(x), repeats, 2) for x in (k, v, v_scales))
        return cls(f64(q), k, v, v_scales, np.asarray(visible), precision.attention)

    def probs(self):
        """[B, N, T, S]."""
        s = np.einsum("btnh,bsnh->bnts", self.q, self.k) / math.sqrt(self.q.shape[-1])
        visible = np.expand_dims(self.visible, -3)
        s = np.where(visible, s, -np.inf)
        s = s - s.max(-1, keepdims=True)
        return np.exp(s) / np.exp(s).sum(-1, keepdims=True)

    def out(self):
        return np.einsum("bnts,bsnh->btnh", self.probs(), self.v)

    def product_bound(self):
        """Bound on the output's error before its own rounding, [B, T, N, H].

        bfloat16: each probability is off by 2^-8 of itself. FP8: each product w = p
        times value scale by 2^-4 of itself or, where the code is subnormal, by half a
        step of 2^-9, of which 2^8 make the largest probability so far times the largest
        visible scale of the block.
        """
        p = self.probs()
        if not self.fp8:
            return 1.001 * UNIT_BF16 * np.einsum("bnts,bsnh->btnh", p, abs(self.v))
        scales = self.v_scales[..., 0].transpose(0, 2, 1)[:, :, None]
        visible = np.broadcast_to(np.expand_dims(self.visible, -3), p.shape)

        def largest(x):
            """Of every block, [B, N, T, blocks]."""
            x = np.pad(x, [(0, 0)] * 3 + [(0, -x.shape[-1] % BLOCK)])
            return x.reshape(*x.shape[:3], -1, BLOCK).max(-1)

        so_far = np.maximum.accumulate(largest(p), -1)
        one = so_far * largest(np.where(visible, scales, 0.0))
        one = one.repeat(BLOCK, -1)[..., : p.shape[-1]]
        error = (p * scales * UNIT_E4M3 + one * 2.0**-18) * visible
        codes = abs(self.v) / self.v_scales
        return 1.001 * np.einsum("bnts,bsnh->btnh", error, codes)

    def out_bound(self):
        """As `product_bound`, with the output's rounding to bfloat16."""
        error = self.product_bound()
        return error + UNIT_BF16 * (abs(self.out()) + error)


@pytest.fixture
def reference():
    return Reference.make


@pytest.fixture(params=PRECISIONS)
def name(request):
    return request.param


@pytest.fixture(scope="session")
def precisions():
    return PRECISIONS


@pytest.fixture
def qkv():
    """Queries, keys, values as the model makes them; scales spread over 2^+-6."""

    def make(length, batch=2, heads=4, kv_heads=2, head_dim=64, seed=0):
        rng = np.random.default_rng(seed)

        def normal(heads, spread):
            shape = (batch, length, heads, head_dim)
            sizes = 2.0 ** rng.uniform(-spread, spread, (*shape[:-1], 1))
            return jnp.asarray(rng.standard_normal(shape) * sizes, jnp.bfloat16)

        return normal(heads, 0.5), normal(kv_heads, 1), normal(kv_heads, 6)

    return make


def causal(length):
    return np.tril(np.ones((length, length), bool))


@pytest.fixture(name="causal")
def causal_fixture():
    return causal
