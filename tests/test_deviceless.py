"""What ptxas and XLA make of the kernels and of the programs around them."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from fp8rl_jax.kernels.hopper_gemm import choose_config


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Those of deviceless.py, which must set the environment before JAX loads."""
    path = tmp_path_factory.mktemp("deviceless") / "reports.json"
    script = pathlib.Path(__file__).with_name("deviceless.py")
    command = [sys.executable, str(script), str(path)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode == 77:
        pytest.skip(f"{run.stdout.strip()}: see {script.name}")
    assert run.returncode == 0, run.stderr
    return json.loads(path.read_text())


@pytest.fixture
def report(reports):
    """report(name) of a program that compiled."""

    def get(name):
        assert "error" not in reports[name], reports[name]["error"]
        return reports[name]

    return get


def products(report):
    return [k for k in report["kernels"] if k["opcodes"].get("QGMMA")]


def pool_bytes(recipe):
    """Of 2000 pages of 3 layers."""
    values = 2 * 3 * 2000 * 8 * 128 * 128
    # One float32 scale for the 128 codes of a token and head.
    return values + values // 32 if recipe == "fp8" else 2 * values


def kernel_calls(report):
    return report["hlo"].count('custom_call_target="mosaic_gpu')


@pytest.mark.parametrize(
    ("name", "shape", "wgrad"),
    [
        ("forward", (8192, 24576, 4096), False),
        ("wgrad", (24576, 4096, 8192), True),
        ("decode 64x4096", (64, 4096, 4096), False),
        ("decode 64x24576", (64, 24576, 4096), False),
        ("decode 256x4096", (256, 4096, 4096), False),
        ("decode 256x24576", (256, 24576, 4096), False),
        ("wgrad in place", (24576, 4096, 8192), True),
    ],
)
def test_products_multiply_in_fp8_and_spill_nothing(name, shape, wgrad, report):
    (kernel,) = report(name)["kernels"]
    assert kernel["spilled"] == 0
    # Here ptxas would tell of wgmma instructions that it had to put in sequence.
    assert kernel["warnings"] == []
    opcodes = kernel["opcodes"]
    assert not opcodes.keys() & {"LDL", "STL"}
    # Four of 32 codes for each block of K that the loop unrolls.
    assert opcodes["QGMMA"] == 4 * choose_config(*shape, wgrad).unroll
    assert opcodes["UTMALDG"] >= 3
    assert ("UTMAREDG" in opcodes) == (name == "wgrad in place")
    assert ("UTMASTG" in opcodes) == (name != "wgrad in place")


def test_a_product_in_place_needs_no_memory(report):
    in_place = report("wgrad in place")
    assert in_place["alias_bytes"] == 3 * 24576 * 4096 * 4
    # The scales, transposed.
    assert in_place["temp_bytes"] < 0.01 * in_place["alias_bytes"]


def test_a_scan_over_layers_copies_no_weights(report):
    layers = report("layers")
    assert kernel_calls(layers) == 2  # in the loop: quantisation, product
    assert not re.search(r"= f8e4m3fn\[[\d,]*4096,4096\]\S* copy\(", layers["hlo"])
    # A layer's slice is read in place by the call that it is fused with: 16 MiB of
    # codes would show.
    assert "%dynamic-slice-fusion" in layers["hlo"]
    assert layers["temp_bytes"] < 2**20


def test_nested_scans_accumulate_in_one_buffer(report):
    accumulation = report("accumulation")
    assert kernel_calls(accumulation) == 1
    assert accumulation["alias_bytes"] == 4 * 4096 * 4096 * 4
    assert accumulation["temp_bytes"] < 0.01 * accumulation["alias_bytes"]


def test_a_checkpointed_layer_multiplies_three_times(report):
    gradient = report("checkpointed gradient")
    # The recomputed product, dgrad and wgrad; both layouts of w, x and dy.
    assert len(products(gradient)) == 3
    assert kernel_calls(gradient) == 6
    assert all(k["spilled"] == 0 for k in gradient["kernels"])


@pytest.mark.parametrize(
    ("name", "opcode"),
    [
        ("decode loop fp8", "QGMMA"),
        ("decode loop bf16", "HGMMA"),
        ("attention fp8", "QGMMA"),
        ("attention bf16", "HGMMA"),
    ],
)
def test_attention_multiplies_in_its_dtype_and_spills_nothing(name, opcode, report):
    kernels = report(name)["kernels"]
    assert sum(k["opcodes"].get(opcode, 0) > 0 for k in kernels) == 1
    assert not any(k["spilled"] for k in kernels)
    assert not any(k["warnings"] for k in kernels)


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_a_decode_loop_writes_into_the_donated_pool(recipe, report):
    found = report(f"decode loop {recipe}")
    pool = pool_bytes(recipe)
    assert found["alias_bytes"] >= pool
    assert found["temp_bytes"] < pool / 100
    assert not re.search(r"= \S*\[3,2000,8,\S* copy\(", found["hlo"])
    # Split, norm, RoPE, quantisation and store are one kernel, attention the other.
    assert kernel_calls(found) == 2


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_a_burst_copies_neither_pages_nor_weights(recipe, report):
    found = report(f"burst {recipe}")
    pool = pool_bytes(recipe)
    assert found["alias_bytes"] >= pool
    assert not re.search(r"= \S*\[3,2000,8,\S* copy\(", found["hlo"])
    # A layer's gate and up projection alone would be 100 MB in FP8.
    assert found["temp_bytes"] < 5e7
    assert not any(k["spilled"] for k in found["kernels"])


@pytest.mark.parametrize(("recipe", "opcode"), [("fp8", "QGMMA"), ("bf16", "HGMMA")])
def test_shared_pages_take_one_more_kernel_and_no_copy(recipe, opcode, report):
    found = report(f"shared {recipe}")
    assert kernel_calls(found) == 3
    assert sum(k["opcodes"].get(opcode, 0) > 0 for k in found["kernels"]) == 2
    assert not any(k["spilled"] for k in found["kernels"])
    assert not any(k["warnings"] for k in found["kernels"])
    assert found["alias_bytes"] >= pool_bytes(recipe)
    assert not re.search(r"= \S*\[3,2000,8,\S* copy\(", found["hlo"])


def test_copies_of_pages_are_made_in_the_donated_pool(report):
    found = report("page copies")
    assert found["alias_bytes"] >= pool_bytes("fp8")
    assert found["temp_bytes"] < pool_bytes("fp8") / 30
