"""Compiles programs for an H200, down to SASS, on a machine without a GPU.

    python tests/deviceless.py REPORT.json

Needs no GPU and no driver, only these beside JAX of the same version (the exit status
is 77 where they are missing):

    pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt \
        nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm

The report maps the name of a program to an object with

    hlo: the optimised HLO.
    temp_bytes, alias_bytes: of its device memory.
    kernels: for each of its Pallas kernels, registers a thread, bytes of spilled
        registers, warnings of ptxas, and how often each SASS opcode occurs.
    error: the traceback, instead of all these, if it did not compile.
"""

import collections
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile
import traceback

MISSING = 77


def _toolkit() -> pathlib.Path:
    """The folder that holds ptxas and nvdisasm; exits where a piece is missing."""
    for module in ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13"):
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # not even the package around it
            spec = None
        if spec is None:
            print(f"{module} is not installed")
            sys.exit(MISSING)
    toolkit = pathlib.Path(spec.submodule_search_locations[0])
    for tool in ("ptxas", "nvdisasm"):
        if not (toolkit / "bin" / tool).exists():
            print(f"{tool} is not installed in {toolkit / 'bin'}")
            sys.exit(MISSING)
    return toolkit


# All read when JAX or its plugin loads.
_TOOLKIT = _toolkit()
_DUMPS = tempfile.TemporaryDirectory()
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached kernel dumps nothing
    "PATH": f"{_TOOLKIT / 'bin'}:{os.environ['PATH']}",
    "CUDA_ROOT": str(_TOOLKIT),
    "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={_TOOLKIT}",
    "MOSAIC_GPU_DUMP_TO": _DUMPS.name,
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_SASS": "1",
}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from fp8rl_jax.attention import (  # noqa: E402
    KVCache,
    Rotation,
    SharedPrefix,
    attention,
    decode_step,
)
from fp8rl_jax.fp8 import (  # noqa: E402
    ACTIVATION_BLOCK,
    WEIGHT_BLOCK,
    ScaledArray,
    fp8_dot_general,
    get_recipe,
)
from fp8rl_jax.fp8.matmul import add_scaled_matmul_nt, scaled_matmul_nt  # noqa: E402
from fp8rl_jax.fp8.quantize import quantize, quantize_weight  # noqa: E402
from fp8rl_jax.fp8.weights import quantize_weights, sampling_weights  # noqa: E402
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES  # noqa: E402
from fp8rl_jax.models.qwen3.model import abstract_params  # noqa: E402
from fp8rl_jax.rollout import programs  # noqa: E402

BF16, F32, E4M3 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn

# What XLA and ptxas need to know of the device.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""


@functools.cache
def _sharding() -> jax.sharding.NamedSharding:
    """Everything on the one device that does not exist."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=_H200, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _kernels(before: set[pathlib.Path]) -> list[dict]:
    """Of the kernels compiled since only ``before`` was in the folder of dumps."""
    kernels = []
    for path in sorted(set(pathlib.Path(_DUMPS.name).iterdir()) - before):
        if path.suffix != ".ptxas":
            continue
        log, sass = path.read_text(), path.with_suffix(".sass_ctrl").read_text()
        # An address, perhaps a predicate, the opcode without its suffixes.
        opcode = r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)"
        kernels.append(
            {
                "registers": int(re.search(r"Used (\d+) registers", log)[1]),
                "spilled": int(re.search(r"(\d+) bytes spill stores", log)[1]),
                "warnings": re.findall(r".*(?:\(C\d+\)|warning).*", log),
                "opcodes": dict(collections.Counter(re.findall(opcode, sass))),
            }
        )
    return kernels


def report(fn, *structs, donate=()) -> dict:
    """Compiles ``fn`` for arguments of these shapes; see the module's docstring."""
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding()), structs
    )
    before = set(pathlib.Path(_DUMPS.name).iterdir())
    compiled = jax.jit(fn, donate_argnums=donate).lower(*structs).compile()
    memory = compiled.memory_analysis()
    return {
        "hlo": compiled.as_text(),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "kernels": _kernels(before),
    }


def scaled(rows: int, k: int, block: tuple[int, int], lead: tuple[int, ...] = ()):
    """The shapes of a ScaledArray."""
    blocks = tuple(-(-n // b) for n, b in zip((rows, k), block, strict=True))
    codes = jax.ShapeDtypeStruct((*lead, rows, k), E4M3)
    return ScaledArray(codes, jax.ShapeDtypeStruct((*lead, *blocks), F32), block)


def product(m: int, n: int, k: int, dtype=BF16, block=WEIGHT_BLOCK) -> dict:
    """a b^T, with a weight or, of 1x128 blocks, in wgrad."""
    fn = functools.partial(scaled_matmul_nt, out_dtype=dtype)
    return report(fn, scaled(m, k, ACTIVATION_BLOCK), scaled(n, k, block))


def wgrad_in_place(m: int, n: int, k: int) -> dict:
    """buffer[layer] += a b^T in a donated buffer of three layers."""
    return report(
        add_scaled_matmul_nt,
        jax.ShapeDtypeStruct((3, m, n), F32),
        jax.ShapeDtypeStruct((), jnp.int32),
        scaled(m, k, ACTIVATION_BLOCK),
        scaled(n, k, ACTIVATION_BLOCK),
        donate=0,
    )


def layers(num_layers: int, m: int, d: int) -> dict:
    """A scan over stacked codes [d, d]."""

    def fn(x, weights):
        def layer(x, weight):
            return scaled_matmul_nt(quantize(x), weight, BF16), None

        return lax.scan(layer, x, weights)[0]

    weights = scaled(d, d, WEIGHT_BLOCK, (num_layers,))
    return report(fn, jax.ShapeDtypeStruct((m, d), BF16), weights)


def accumulation(num_layers: int, micro_batches: int, d: int, tokens: int) -> dict:
    """Wgrad of every layer and micro-batch, added in one buffer [layers, d, d]."""

    def fn(buffer, dy, x):
        def layer(buffer, inputs):
            return add_scaled_matmul_nt(buffer, *inputs), None

        def micro_batch(buffer, _):
            indices = jnp.arange(num_layers, dtype=jnp.int32)
            return lax.scan(layer, buffer, (indices, dy, x))[0], None

        return lax.scan(micro_batch, buffer, length=micro_batches)[0]

    operand = scaled(d, tokens, ACTIVATION_BLOCK, (num_layers,))
    buffer = jax.ShapeDtypeStruct((num_layers, d, d), F32)
    return report(fn, buffer, operand, operand, donate=0)


def checkpointed_gradient(m: int, n: int, k: int) -> dict:
    """Both gradients of a linear layer under `jax.checkpoint`, ready-made codes."""

    def loss(x, w, codes, transposed):
        dims = (((1,), (1,)), ((), ()))
        y = fp8_dot_general(x, w, dims, codes=codes, transposed_codes=transposed)
        return jnp.sum(y.astype(F32) ** 2)

    def fn(x, w):
        codes, transposed = quantize_weight(w)
        gradient = jax.grad(jax.checkpoint(loss), argnums=(0, 1))
        return gradient(x, w, codes, transposed)

    return report(
        fn, jax.ShapeDtypeStruct((m, k), BF16), jax.ShapeDtypeStruct((n, k), F32)
    )


def decode_loop(
    recipe: str, num_layers: int, num_pages: int, batch: int, group: int = 0
) -> dict:
    """Steps of attention over a donated paged cache, Qwen3-8B's heads.

    Groups of so many sequences share pages, unless it is 0.
    """
    precision = get_recipe(recipe).rollout
    heads, kv_heads, head_dim = 32, 8, 128
    table = jax.ShapeDtypeStruct((batch, 8), jnp.int32)
    groups = jax.ShapeDtypeStruct((batch // 4, group), jnp.int32)
    num_shared = jax.ShapeDtypeStruct((batch // 4,), jnp.int32)

    def create(groups, num_shared, table):
        shape = num_layers, num_pages, kv_heads, head_dim, head_dim
        cache = KVCache.create(*shape, table, precision)
        if not group:
            return cache
        shared = SharedPrefix.create(groups, num_shared, table)
        return cache.with_table(table, shared)

    def fn(cache, qkv, rotation, lengths):
        def step(state):
            t, cache, qkv = state
            where = cache.place((lengths + t)[:, None])

            def layer(carry, layer):
                cache, qkv = carry
                groups = heads // kv_heads
                out, cache = decode_step(
                    qkv, rotation, groups, 1e-6, cache, layer, where, precision
                )
                width = heads * head_dim
                return (
                    cache,
                    qkv.at[..., :width].set(out.reshape(batch, 1, width)),
                ), None

            indices = jnp.arange(num_layers, dtype=jnp.int32)
            (cache, qkv), _ = lax.scan(layer, (cache, qkv), indices)
            return t + 1, cache, qkv

        state = jnp.int32(0), cache, qkv
        return lax.while_loop(lambda state: state[0] < 100, step, state)[1:]

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, F32)

    angles = f32(batch, 1, head_dim // 2)
    return report(
        fn,
        jax.eval_shape(create, groups, num_shared, table),
        jax.ShapeDtypeStruct((batch, 1, (heads + 2 * kv_heads) * head_dim), BF16),
        Rotation(f32(head_dim), f32(head_dim), angles, angles),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        donate=0,
    )


def causal_attention(recipe: str, batch: int, length: int) -> dict:
    """Attention of training, forward, Qwen3-8B's heads."""
    precision = get_recipe(recipe).train

    def fn(q, k, v, positions):
        return attention(q, k, v, positions, None, precision)

    shapes = [(batch, length, n, 128) for n in (32, 8, 8)]
    operands = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    return report(fn, *operands, jax.ShapeDtypeStruct((batch, length), jnp.int32))


# Products as in Qwen3-8B: gate and up, o, and their gradients.
def _policy_and_pool(recipe: str, num_layers: int, num_pages: int):
    """A Qwen3-8B with fewer layers, and its pages."""
    config = dataclasses.replace(QWEN3_SIZES["8b"], num_layers=num_layers)
    policy = programs.Policy(config, get_recipe(recipe).rollout, 151_669)
    create = functools.partial(programs.create_pool, policy, num_pages, 128)
    return policy, jax.eval_shape(create)


def decode_burst(recipe: str, num_layers: int, num_pages: int, batch: int) -> dict:
    """The rollout engine's decode steps: all layers, head and sampling."""
    policy, pool = _policy_and_pool(recipe, num_layers, num_pages)
    linear = policy.precision.linear
    weights = jax.eval_shape(
        lambda params: sampling_weights(params, quantize_weights(params), linear),
        abstract_params(policy.config),
    )
    ints = jax.ShapeDtypeStruct((batch,), jnp.int32)
    floats = jax.ShapeDtypeStruct((batch,), F32)
    rows = programs.Rows(
        *(ints for _ in range(4)),
        temperature=floats,
        top_k=ints,
        top_p=floats,
        min_p=floats,
        stop_ids=jax.ShapeDtypeStruct((batch, 2), jnp.int32),
        page_table=jax.ShapeDtypeStruct((batch, 64), jnp.int32),
    )
    key = (jax.ShapeDtypeStruct((), jnp.uint32),) * 2
    static = dict(num_steps=16, truncated=False, policy=policy)
    return report(
        lambda pool, weights, rows, key: programs.decode(
            weights, pool, rows, key, **static
        ),
        *(pool, weights, rows, key),
        donate=0,
    )


def page_copies(recipe: str, num_layers: int, num_pages: int) -> dict:
    """The rollout engine's copies of pages."""
    policy, pool = _policy_and_pool(recipe, num_layers, num_pages)
    pages = jax.ShapeDtypeStruct((32,), jnp.int32)
    return report(
        functools.partial(programs.copy_pages, policy=policy),
        *(pool, programs.Copies(pages, pages)),
        donate=0,
    )


PROGRAMS = {
    "forward": functools.partial(product, 8192, 24576, 4096),
    "wgrad": functools.partial(product, 24576, 4096, 8192, F32, ACTIVATION_BLOCK),
    "decode 64x4096": functools.partial(product, 64, 4096, 4096),
    "decode 64x24576": functools.partial(product, 64, 24576, 4096),
    "decode 256x4096": functools.partial(product, 256, 4096, 4096),
    "decode 256x24576": functools.partial(product, 256, 24576, 4096),
    "wgrad in place": functools.partial(wgrad_in_place, 24576, 4096, 8192),
    "layers": functools.partial(layers, 4, 64, 4096),
    "accumulation": functools.partial(accumulation, 4, 2, 4096, 1024),
    "checkpointed gradient": functools.partial(checkpointed_gradient, 1024, 512, 384),
    "decode loop fp8": functools.partial(decode_loop, "fp8", 3, 2000, 64),
    "decode loop bf16": functools.partial(decode_loop, "bf16", 3, 2000, 64),
    "shared fp8": functools.partial(decode_loop, "fp8", 3, 2000, 64, 16),
    "shared bf16": functools.partial(decode_loop, "bf16", 3, 2000, 64, 16),
    "attention fp8": functools.partial(causal_attention, "fp8", 2, 1024),
    "attention bf16": functools.partial(causal_attention, "bf16", 2, 1024),
    "burst fp8": functools.partial(decode_burst, "fp8", 3, 2000, 256),
    "burst bf16": functools.partial(decode_burst, "bf16", 3, 2000, 256),
    "page copies": functools.partial(page_copies, "fp8", 3, 2000),
}


def main(path: str) -> None:
    """Writes the report of all programs."""
    reports = {}
    for name, program in PROGRAMS.items():
        try:
            reports[name] = program()
        except Exception:
            reports[name] = {"error": traceback.format_exc()}
    pathlib.Path(path).write_text(json.dumps(reports))


if __name__ == "__main__":
    main(sys.argv[1])
