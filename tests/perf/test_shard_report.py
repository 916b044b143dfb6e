"""The table of where parameters lie, against the arrays themselves."""

import json
import math

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from minitext.checkpoint import leaves
from minitext.cli.main import app
from minitext.config.config import load_config
from minitext.errors import UserError
from minitext.perf import figures, shard_report
from minitext.sharding.mesh import make_mesh
from minitext.training.step import init_state
from tests.conftest import audit_but

LAYOUTS = [
    ("sharding.rules=dp", "mesh.data=8"),
    ("sharding.rules=zero1", "mesh.fsdp=8", "mesh.data=1"),
    ("sharding.rules=fsdp", "mesh.fsdp=4", "mesh.data=2"),
    ("mesh.fsdp=2", "mesh.tensor=2", "mesh.context=2", "mesh.data=1"),
]


@pytest.mark.parametrize("layout", audit_but([LAYOUTS[1], LAYOUTS[3]], LAYOUTS))
def test_the_table_is_what_the_devices_hold(tiny, layout):
    cfg = tiny(*layout)
    state = init_state(cfg, make_mesh(cfg.mesh))
    arrays = leaves.named({"params": state.params, "opt_state": state.opt_state})
    found = {p.name: p for p in shard_report.parameters(cfg)}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        part = array.addressable_shards[0].data
        assert found[name].shape == array.shape and found[name].shard == part.shape
        assert (found[name].bytes, found[name].device_bytes) == (array.nbytes, part.nbytes)
        assert len(found[name].spec) == len(found[name].shape)
        assert not found[name].axes or len(found[name].axes) == array.ndim


def test_fsdp_over_eight_leaves_an_eighth_and_what_cannot_be_split(tiny):
    found = shard_report.parameters(tiny("sharding.rules=fsdp", "mesh.fsdp=8", "mesh.data=1"))
    for part in ("params.", "opt_state."):
        of = [p for p in found if p.name.startswith(part)]
        split = [p for p in of if p.axes]
        assert sum(p.bytes for p in split) == 8 * sum(p.device_bytes for p in split)
        assert sum(p.bytes for p in of if not p.axes) <= 16  # the counts of steps


def test_a_large_model_on_a_large_mesh_needs_no_device():
    cfg = load_config("llama3-8b", ["mesh.fsdp=64", "mesh.tensor=8", "mesh.data=8"])
    table = next(p for p in shard_report.parameters(cfg) if p.name == "params.embed.table")
    assert table.spec == (("tensor",), ("fsdp",)) and table.bytes == 512 * table.device_bytes


def test_the_command_prints_a_table_json_or_a_picture(tmp_path):
    run, file = CliRunner().invoke, tmp_path / "a.svg"
    words = ["shard", "laptop", "mesh.fsdp=4", "mesh.tensor=2", "mesh.data=1"]
    text = run(app, [*words, "--plot", str(file)]).stdout
    assert "8 device(s)" in text and "embed=128" in text and b"<svg" in file.read_bytes()
    answer = json.loads(run(app, [*words, "--json"]).stdout)
    assert answer[0]["device_bytes"] * 8 == answer[0]["bytes"]
    four = ["mesh.data=4", "mesh.fsdp=2", "mesh.dcn.data=2", "mesh.dcn.fsdp=2"]
    assert (
        "8 device(s) in 4 slices, mesh.dcn.data=2, mesh.dcn.fsdp=2"
        in run(app, ["shard", "laptop", *four]).stdout
    )
    refused = run(app, ["shard", "laptop", "mesh.tensor=3", "mesh.data=1"]).exception
    assert isinstance(refused, UserError) and "model.heads=" in str(refused)


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_the_picture_names_the_devices_that_hold_a_part(tiny, layout):
    plt = pytest.importorskip("matplotlib.pyplot")
    cfg = tiny(*layout)
    mesh = make_mesh(cfg.mesh)
    found = [p for p in shard_report.parameters(cfg) if p.name == "params.blocks.ffn.down.w"]
    (axes,) = figures.draw_sharding(found, mesh).axes[:1]
    drawn = axes.collections[0].get_array()
    (parameter,) = found
    whole = jax.ShapeDtypeStruct(parameter.shape, np.float32)
    array = leaves.named({"params": init_state(cfg, mesh).params})[parameter.name]
    numbers = {device: i for i, device in enumerate(mesh.devices.flat)}
    rows, columns = drawn.shape
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            at = [
                (s.start or 0) * n // size
                for s, n, size in zip(
                    shard.index[-2:], (rows, columns), whole.shape[-2:], strict=True
                )
            ]
            assert drawn[tuple(at)] == numbers[shard.device]
    assert math.prod(drawn.shape) == parameter.bytes // parameter.device_bytes
    plt.close("all")
