"""The report of a compiled step, as JSON and as tables."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from minitext.compiler import aot
from minitext.compiler.report import _short, print_report
from minitext.compiler.targets import topology_mesh
from minitext.config.sections import MeshConfig
from minitext.terminal import show_bytes

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")


@pytest.fixture(scope="module", params=[2**20, 2**32], ids=["fits", "too large"])
def report(request):
    mesh = topology_mesh("v5e:2x2", MeshConfig(data=1, fsdp=4))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((4, request.param), jnp.float32, sharding=sharding)

    def normalise(state):
        return state / jnp.sum(state)

    return aot.compile_step(normalise, (x,), mesh, target="v5e:2x2")


@needs_libtpu
def test_json(report):
    read = json.loads(json.dumps(report.to_json()))
    assert read["fits"] is report.fits and read["mesh"] == {"fsdp": 4}
    assert read["largest"][0] == {
        "bytes": report.largest[0].bytes,
        "shape": report.largest[0].shape,
        "kind": report.largest[0].kind,
        "op": report.largest[0].op,
    }
    count, size = report.collectives["all-reduce"]
    sent = report.sent["all-reduce"]
    assert read["collectives"] == {"all-reduce": {"count": count, "bytes": size, "sent": sent}}
    assert sent == 2 * size * 3 / 4
    assert read["networks"]["ici"] == {"count": count, "bytes": size, "sent": sent}
    assert read["networks"]["dcn"] == {"count": 0, "bytes": 0, "sent": 0}


@needs_libtpu
def test_tables(report, capsys):
    print_report(report)
    shown = capsys.readouterr().out
    assert shown.startswith(f"v5e:2x2: {'fits' if report.fits else 'does not fit'}  (4 devices")
    for word in ("mesh.fsdp=4", "temporaries", "all-reduce", "of 15.75 GiB available", "f32[1,"):
        assert word in shown
    # Whoever pipes the tables into a file gets whole lines.
    assert report.largest[0].shape in shown


@needs_libtpu
def test_networks_are_told_apart(capsys):
    """A sum over two slices of four: each chip scatters and gathers within, and sends its quarter across."""
    mesh = topology_mesh("v5e:2x2 slices=2", MeshConfig(data=2, fsdp=4))
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    x = jax.ShapeDtypeStruct((8, 2**20), jnp.float32, sharding=sharding)
    report = aot.compile_step(lambda x: jnp.sum(x, 0), (x,), mesh, target="two")
    report = dataclasses.replace(report, slices=2, across={"data": 2})
    (_, within, _), (count, across, sent) = report.networks["ici"], report.networks["dcn"]
    assert within >= 4 * 2**20 > across >= 2**20 and count >= 1
    assert sent == across  # an all-reduce of two: each slice sends half, twice
    print_report(report)
    shown = capsys.readouterr().out
    assert "within a slice (ICI)" in shown and "across 2 slices (DCN)" in shown
    assert "across 2 slices: mesh.data by 2" in shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (512, "512 B"), (2048, "2.00 KiB"), (2**30, "1.00 GiB"), (2**41, "2,048.00 GiB")],
)
def test_show_bytes(size, shown):
    assert show_bytes(size) == shown


@pytest.mark.parametrize(
    ("op", "shown"),
    [
        ("state.params['w'].value", "state.params['w'].value"),
        ("jit(step)/jvp()/while/body/closed_call/sub", "forward sub"),
        (
            "jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/dot",
            "backward recomputed/dot",
        ),
        ("jit(step)/jvp(XD,DF->XF)/dot_general", "forward XD,DF->XF/dot_general"),
    ],
)
def test_names_of_operations(op, shown):
    assert _short(op) == shown
