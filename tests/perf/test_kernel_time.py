"""Kernels timed by their machine code: branches, grids, and what is made of a custom call."""

import functools

import pytest

from minitext.compiler.schedule import KERNEL, Operation
from minitext.errors import UserError
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


def test_a_custom_call_without_its_program_says_so():
    line = 'bf16[8] custom-call(%w), custom_call_target="tpu_custom_call"'
    with pytest.raises(UserError, match="backend_config"):
        kernel_time.kernel_seconds([Operation("k", "run", KERNEL, opcode=line)], "v5e")


@pytest.mark.audit
def test_a_causal_grid_has_the_blocks_that_its_mask_leaves(tmp_path, monkeypatch):
    """A kernel compiled from its custom call has the steps of its plan, and takes longer the more of them it has."""
    import jax
    import jax.numpy as jnp

    from minitext.compiler.aot import dump_to, no_cache
    from minitext.compiler.schedule import operations, read_schedule
    from minitext.compiler.targets import Target, topology_devices
    from minitext.hardware import CHIPS
    from minitext.kernels.attention.mask import Mask
    from minitext.kernels.attention.tpu import flash_attention
    from minitext.kernels.attention.tpu_grid import BlockShape
    from minitext.sharding.mesh import make_mesh

    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path))
    mesh = make_mesh(None, topology_devices(Target(CHIPS["v5e"], (1, 1)))[:1])
    spec = jax.ShapeDtypeStruct(
        (1, 2048, 2, 128), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P())
    )
    seconds = {}
    for name, mask in (("causal", Mask()), ("all", Mask(causal=False))):
        folder = tmp_path / name
        with jax.set_mesh(mesh), no_cache():
            attention = functools.partial(flash_attention, mask=mask, blocks=BlockShape(512, 512))
            lowered = jax.jit(lambda q, f=attention: f(q, q, q)).lower(spec)
            lowered.compile(compiler_options=dump_to(str(folder)))
        text = max(folder.glob("*after_codegen.txt"), key=lambda p: p.stat().st_size).read_text()
        (found,) = kernel_time.kernel_seconds(operations(read_schedule(text)), "v5e").values()
        seconds[name] = found
    # Of 4 x 4 blocks 10 are seen.
    assert seconds["causal"] / seconds["all"] == pytest.approx(10 / 16, rel=0.25)
