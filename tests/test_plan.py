"""The planning command, the same check at start-up, and the page of its results."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from fp8rl_jax import loop
from fp8rl_jax.memory_plan import GB
from fp8rl_jax.parallel.mesh import make_abstract_mesh
from fp8rl_jax.sizing import check_fits, device_memory_gb, plan_run, print_plan

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs/qwen3_8b.py"
PAGE = (ROOT / "docs/sizing.md").read_text()


def config_of(path=CONFIG, **changes):
    """A configuration, with options given as ``grpo__num_steps=1``."""
    config = runpy.run_path(str(path))["get_config"]()
    with config.unlocked():
        config.update_from_flattened_dict(
            {name.replace("__", "."): value for name, value in changes.items()}
        )
    return config


def plan_command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "fp8rl_jax.plan", *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def table_of(text):
    """Cells of a printed table by part and column."""
    lines = [line[1:-1] for line in text.splitlines() if line[:1] in ("│", "┃")]
    cells = [[cell.strip() for cell in re.split("[│┃]", line)] for line in lines]
    return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[1:]}


def test_the_command_plans_for_devices_that_are_not_there():
    done = plan_command(f"--config={CONFIG}", "--devices=8")
    assert done.returncode == 0, done.stderr
    table = table_of(done.stdout)
    assert "Mesh {'data': 1, 'fsdp': 8, 'tensor': 1}" in done.stdout
    masters = 8_190_735_360 * 4 / 8 / 1e9
    assert table["masters"]["update"] == f"{masters:.1f}"
    assert table["of"]["sampling"] == "138.7"
    assert "512 sequences of 8,192 tokens at once" in done.stdout


# What takes more than the configuration does.
LARGE = {
    "optimizer__mu_dtype": "float32",
    "optimizer__nu_dtype": "float32",
    "train__tokens_per_micro_batch": 0,
    "train__micro_batch_size": 8,
}


def test_the_command_ends_with_one_line_where_a_run_would():
    done = plan_command(
        f"--config={CONFIG}",
        "--devices=1",
        "--device_memory_gb=150.7",
        *(f"--config.{k.replace('__', '.')}={v}" for k, v in LARGE.items()),
    )
    assert done.returncode == 1
    assert table_of(done.stdout)["of"]["update"] == "150.7"
    (line,) = done.stderr.splitlines()
    assert re.match(
        r"error: out of memory before it starts: the update phase needs \d+\.\d GB per "
        r"device and JAX has 150\.7 GB \(XLA_PYTHON_CLIENT_MEM_FRACTION\); what would "
        r"help: "
        r"optimizer\.mu_dtype=bfloat16 and optimizer\.nu_dtype=bfloat16 \(32\.8 GB "
        r"less\), train\.keep_codes=False \(13\.9 GB less\), "
        r"train\.micro_batch_size=1 \(\d+\.\d GB less\), 2 devices with "
        r"mesh\.fsdp=2 \(\d+\.\d GB less\)\.$",
        line,
    )


def test_bad_flags():
    done = plan_command(f"--config={CONFIG}")
    assert done.returncode == 1 and done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "--devices must have a value" in done.stderr
    with pytest.raises(ValueError, match="--device=abacus: choose one of h200, h100"):
        device_memory_gb("abacus")


@pytest.mark.parametrize(
    ("devices", "changes", "message"),
    [
        (6, {}, "embed=4096 does not divide into 6 shards"),
        (
            16,
            {"train__tokens_per_micro_batch": 0, "train__micro_batch_size": 8},
            "batch=8 does not divide into 16 shards",
        ),
        (8, {"mesh__fsdp": 4}, "needs 4 devices and there are 8"),
        (8, {"model__size": "9b"}, "model.size='9b': choose one of 0.6b"),
        (8, {"recipe": "fp9"}, "Unknown recipe 'fp9'"),
    ],
)
def test_bad_options(devices, changes, message):
    with pytest.raises(ValueError, match=message):
        print_plan(config_of(**changes), devices, 138.7)


def refusal(devices, device_gb, **changes):
    config = config_of(**LARGE | changes)
    mesh = make_abstract_mesh(**config.mesh, num_devices=devices)
    plan = plan_run(config, mesh, int(device_gb * GB))
    with pytest.raises(ValueError) as error:
        check_fits(config, mesh, plan)
    return str(error.value)


def test_options_that_save_nothing_are_not_named():
    message = refusal(
        1,
        60,
        optimizer__mu_dtype="bfloat16",
        optimizer__nu_dtype="bfloat16",
        train__micro_batch_size=1,
        train__remat="none",
        train__keep_codes=False,
    )
    assert "mu_dtype" not in message and "micro_batch" not in message
    assert "train.remat=full" in message
    message = refusal(1, 60, train__tokens_per_micro_batch=2**15)
    assert "train.tokens_per_micro_batch=8192" in message
    assert "the update phase" in message


def test_the_saving_is_what_the_option_saves():
    message = refusal(1, 138.7)
    (saved,) = re.findall(r"train\.micro_batch_size=1 \((.*?) GB less", message)
    peaks = [
        plan_run(
            config_of(**LARGE | {"train__micro_batch_size": rows}),
            make_abstract_mesh(1, 1, 1, 1),
            int(138.7 * GB),
        ).peak("update")
        for rows in (8, 1)
    ]
    assert float(saved) == round((peaks[0] - peaks[1]) / GB, 1)


def test_sampling_without_room_beside_its_pages_names_their_share():
    message = refusal(8, 138.7, model__size="32b", train__tokens_per_micro_batch=8192)
    assert "the sampling phase needs" in message
    assert "sampling.memory_fraction=0.5" in message


class Device:
    def __init__(self, gigabytes):
        self._stats = {"bytes_limit": int(gigabytes * GB), "bytes_in_use": 0}

    def memory_stats(self):
        return self._stats


@pytest.fixture
def tiny():
    return config_of(
        ROOT / "tests/tiny_config.py",
        train__micro_batch_size=8,
        grpo__num_prompts_per_step=8,
    )


def test_a_run_without_room_is_refused_before_anything_is_compiled(
    monkeypatch, tiny, tmp_path, capsys, caplog
):
    devices = [Device(80), Device(1e-4)]  # the smallest counts
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)
    tiny.run_dir = str(tmp_path / "run")
    with jax.log_compiles(), pytest.raises(ValueError, match="out of memory before"):
        loop.train(tiny)
    assert not [r for r in caplog.records if "compil" in r.getMessage().lower()]
    assert not (tmp_path / "run").exists()
    assert "Memory plan" in capsys.readouterr().out


def test_a_run_with_room_prints_its_plan(monkeypatch, tiny, capsys):
    monkeypatch.setattr(jax, "local_devices", lambda **_: [Device(80)])
    mesh = make_abstract_mesh(**tiny.mesh, num_devices=8)
    loop.check_memory(tiny, mesh)
    assert table_of(capsys.readouterr().out)["of"]["update"] == "80.0"


def test_nothing_is_planned_where_devices_do_not_say(tiny, capsys):
    loop.check_memory(tiny, make_abstract_mesh(**tiny.mesh, num_devices=8))
    assert capsys.readouterr().out == ""


def cells(size, gpus, kind, data, fsdp, moments, fraction):
    """A row of the page, as computed."""
    dtype = {"f32": "float32", "bf16": "bfloat16"}[moments]
    config = config_of(
        model__size=size.lower(),
        mesh__data=int(data),
        mesh__fsdp=int(fsdp),
        train__tokens_per_micro_batch=8192,
        grpo__num_prompts_per_step=max(32, int(gpus)),
        optimizer__mu_dtype=dtype,
        optimizer__nu_dtype=dtype,
        sampling__memory_fraction=float(fraction),
    )
    mesh = make_abstract_mesh(**config.mesh, num_devices=int(gpus))
    memory = device_memory_gb(kind.lower()) * GB
    plan = plan_run(config, mesh, int(memory))
    fits = plan.peak("sampling") <= memory
    capacity = plan.capacity
    resident = (
        min(
            capacity.num_slots,
            capacity.num_pages // (capacity.max_length // capacity.page_size),
        )
        * capacity.num_shards
    )
    tokens = capacity.num_pages * capacity.page_size * capacity.num_shards
    return (
        *(f"{plan.peak(phase) / GB:.1f}" for phase in ("sampling", "update")),
        f"{tokens:,}" if fits else "-",
        f"{resident:,}" if fits else "-",
        "yes" if plan.fits else "no",
    )


INPUTS = 7  # columns of a row; the others are computed
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in re.findall(r"^\|.*B \|.*\|$", PAGE, re.MULTILINE)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:INPUTS]))
def test_the_page_says_what_the_code_computes(row):
    assert cells(*row[:INPUTS]) == row[INPUTS:]


def test_the_page_has_every_size():
    assert {row[:3] for row in ROWS} >= {
        (size, gpus, kind)
        for size in ("8B", "14B", "32B")
        for gpus in ("8", "16", "64")
        for kind in ("H200", "H100")
    }
