"""Kernels timed by their machine code: branches, grids, and what is made of a custom call."""

import base64
import functools
import json
from types import SimpleNamespace

import pytest

from minitext.compiler.schedule import KERNEL, Operation
from minitext.errors import UserError
from minitext.hardware import CHIPS
from minitext.perf import kernel_time


def bundles(*lines: str) -> str:
    """Final bundles as libtpu writes them: address, label, a mark for the loop, operations."""
    return "".join(
        f"  {hex(i)} {line[:2]} {': > {' if line[2] == '>' else ': {'} %x = {line[3:]} }}\n"
        for i, line in enumerate(lines)
    )


WORK = ["  >vadd"] * 10
SKIP, OTHER = (f"  >sbr.rel ({p}) target = $region4" for p in ("%p1", "!%p2"))
JOIN = "PF>scmp"


def test_a_step_without_branches_takes_all_its_cycles():
    assert kernel_time.step_cycles(200, bundles("   start", *WORK)) == 200


def test_of_branches_only_the_longest_counts():
    # 10 bundles always, then a branch of 10 and one of 5: of 27 in the loop the 5 and its skip run seldom.
    for skip in (SKIP, OTHER):
        text = bundles("   start", *WORK, SKIP, *WORK, JOIN, skip, *WORK[:5], JOIN)
        assert kernel_time.step_cycles(280, text) == pytest.approx(280 * (1 - 6 / 29), rel=0.05)
    one = bundles("   start", *WORK, SKIP, *WORK, JOIN)
    assert kernel_time.step_cycles(220, one) == 220


def test_a_jump_back_is_no_branch():
    text = bundles(*WORK, OTHER, "PF the loop's end", *WORK)
    assert kernel_time.step_cycles(110, text) == 110


def test_the_schedule_without_kernels_needs_no_compiler():
    assert kernel_time.kernel_seconds([Operation("r", "run", cycles=5)], "v5e") == {}


@pytest.mark.parametrize(("chip", "cores"), [("v5e", 1), ("v5p", 2), ("tpu7x", 1)])
def test_the_cores_of_a_device_share_a_kernels_steps(monkeypatch, chip, cores):
    """A chip of tpu7x has two cores too, but each is a device of its own."""
    code = SimpleNamespace(key="key", steps=10)
    monkeypatch.setattr(kernel_time, "_Code", lambda line: code)
    monkeypatch.setattr(kernel_time, "_step_cycles", lambda codes, chip: {"key": 100.0})
    found = kernel_time.kernel_seconds([Operation("k", "run", KERNEL)], chip)
    assert found["k"] == pytest.approx(10 * 100 / CHIPS[chip].clock / cores)


def test_cycles_are_kept_for_the_versions_that_found_them(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path))
    version, counted = {"libtpu": "1", "minitext": "1"}, []
    monkeypatch.setattr(kernel_time.metadata, "version", version.get)
    monkeypatch.setattr(kernel_time, "_compile", lambda code, chip: counted.append(code) or 5)
    for name in (None, None, "libtpu", "minitext"):
        version |= {name: "2"} if name else {}
        assert kernel_time._step_cycles({"key": "code"}, "v5e") == {"key": 5}
    assert len(counted) == 3


def test_a_kernel_alone_has_its_operands_and_not_their_places():
    """In a step for tpu7x, a product of float8 may read from vector memory, where no argument of a program is."""
    places = [{"color": "1", "operand_index": "0"}]
    kernel = {"body": base64.b64encode(b"module {}").decode()}
    for side in ("input", "output"):
        kernel[f"{side}_memory_space_colors"] = places
    line = (
        "f32[8,16] custom-call(%a, %b), "
        "operand_layout_constraints={f8e4m3fn[8,4]{1,0}, u8[4,16]{1,0}}, metadata={}, "
        f"backend_config={json.dumps({'custom_call_config': kernel})}"
    )
    text = kernel_time._Code(line).module()
    assert "(tensor<8x4xf8E4M3FN>, tensor<4x16xui8>) -> (tensor<8x16xf32>)" in text
    assert "colors" not in text


def test_a_custom_call_without_its_program_says_so():
    line = 'bf16[8] custom-call(%w), custom_call_target="tpu_custom_call"'
    with pytest.raises(UserError, match="backend_config"):
        kernel_time.kernel_seconds([Operation("k", "run", KERNEL, opcode=line)], "v5e")


def seconds_of_kernels(fn, shape, folder):
    """Compiles a function of a bfloat16 array for a v5e and returns the seconds of its kernels."""
    import jax
    import jax.numpy as jnp

    from minitext.compiler.aot import dump_to, no_cache, read_largest
    from minitext.compiler.schedule import operations, read_schedule
    from minitext.compiler.targets import Target, topology_devices
    from minitext.sharding.mesh import make_mesh

    mesh = make_mesh(None, topology_devices(Target(CHIPS["v5e"], (1, 1)))[:1])
    spec = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh), no_cache():
        jax.jit(fn).lower(spec).compile(compiler_options=dump_to(str(folder)))
    text = read_largest(str(folder), "after_codegen.txt")
    return [*kernel_time.kernel_seconds(operations(read_schedule(text)), "v5e").values()]


@pytest.mark.audit
def test_a_causal_grid_has_the_blocks_that_its_mask_leaves(tmp_path, monkeypatch):
    """A kernel compiled from its custom call has the steps of its plan, and takes longer the more of them it has."""
    from minitext.kernels.attention.mask import Mask
    from minitext.kernels.attention.tpu import flash_attention
    from minitext.kernels.attention.tpu_grid import BlockShape

    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path))
    seconds = {}
    for name, mask in (("causal", Mask()), ("all", Mask(causal=False))):
        attention = functools.partial(flash_attention, mask=mask, blocks=BlockShape(512, 512))
        (seconds[name],) = seconds_of_kernels(
            lambda q, f=attention: f(q, q, q), (1, 2048, 2, 128), tmp_path / name
        )
    # Of 4 x 4 blocks 10 are seen.
    assert seconds["causal"] / seconds["all"] == pytest.approx(10 / 16, rel=0.25)


@pytest.mark.audit
def test_a_kernel_keeps_the_vector_memory_that_it_asked_for(tmp_path, monkeypatch):
    """24 MiB, where a kernel that asks for none may use 16."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def body(x_ref, out_ref, scratch_ref):
        rows = pl.ds(pl.program_id(0) * 8, 8)
        scratch_ref[rows] = x_ref[...].astype(jnp.float32)
        out_ref[...] = scratch_ref[:8].astype(x_ref.dtype)

    def fn(x):
        return pl.pallas_call(
            body,
            grid=2,
            out_shape=x,
            scratch_shapes=[pltpu.VMEM((3 * 2**14, 128), jnp.float32)],
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=2**25),
        )(x)

    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path))
    (seconds,) = seconds_of_kernels(fn, (8, 128), tmp_path / "dump")
    assert 0 < seconds < 1e-3
