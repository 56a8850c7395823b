import jax
import pytest
from jax.sharding import AxisType

from fp8rl_jax.parallel.mesh import check_divides, make_abstract_mesh, make_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (8, 1, 1)),
        ({"fsdp": 4, "tensor": 2}, (1, 4, 2)),
        ({"data": 2, "fsdp": -1, "tensor": 2}, (2, 2, 2)),
        ({"data": 1, "fsdp": 1, "tensor": 8}, (1, 1, 8)),
    ],
)
def test_sizes(sizes, shape):
    mesh = make_mesh(**sizes)
    assert tuple(mesh.shape.items()) == tuple(
        zip(("data", "fsdp", "tensor"), shape, strict=True)
    )
    assert mesh.axis_types == (AxisType.Auto,) * 3


def test_a_subset_of_the_devices():
    devices = jax.devices()[2:6]
    mesh = make_mesh(tensor=2, devices=devices)
    assert mesh.devices.shape == (2, 1, 2)
    assert set(mesh.devices.flat) == set(devices)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 3}, "a multiple of 3 devices and there are 8"),
        ({"data": 2, "fsdp": 2, "tensor": 1}, "needs 4 devices and there are 8"),
        ({"data": 16}, "needs 16 devices and there are 8"),
        ({"data": -1, "fsdp": -1}, "only one axis may be -1"),
        ({"tensor": 0}, "sizes are positive"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


def test_a_mesh_of_devices_that_are_not_there():
    mesh = make_abstract_mesh(data=4, fsdp=-1, tensor=2, num_devices=64)
    assert tuple(mesh.shape.items()) == (("data", 4), ("fsdp", 8), ("tensor", 2))
    assert mesh.axis_types == make_mesh().axis_types
    with pytest.raises(ValueError, match="needs 4 devices and there are 64"):
        make_abstract_mesh(data=1, fsdp=4, tensor=1, num_devices=64)


QWEN3_8B = {"heads": 32, "kv_heads": 8, "mlp": 12288, "embed": 4096, "vocab": 151936}


def test_a_model_that_fits():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    check_divides(mesh, DEFAULT_RULES, {**QWEN3_8B, "batch": 512})


def test_every_misfit_is_named_with_its_numbers():
    mesh = make_mesh(data=1, fsdp=2, tensor=4)
    sizes = {**QWEN3_8B, "kv_heads": 2, "heads": 6, "batch": 7}
    with pytest.raises(ValueError) as error:
        check_divides(mesh, DEFAULT_RULES, sizes)
    text = str(error.value)
    assert "kv_heads=2 does not divide into 4 shards (tensor=4); 2 would do" in text
    assert "heads=6 does not divide into 4 shards (tensor=4); 2 would do" in text
    assert "batch=7 does not divide into 2 shards (data=1 * fsdp=2)" in text
    assert "mlp" not in text
