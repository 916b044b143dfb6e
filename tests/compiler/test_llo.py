"""Machine code of kernels: what is read of libtpu's dumps, and that kernels keep their quality.

`tests/llo/tiny-v5e` is what libtpu 0.0.51 wrote of a kernel with a grid of four steps, an inner loop and a product.
`tests/llo/goldens.json` is what this command printed, by which a change of kernels that is meant is recorded:

    minitext llo chip=v5e,v6e --json > tests/llo/goldens.json
"""

import functools
import importlib.util
import inspect
import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from minitext.cli import main
from minitext.compiler import llo
from minitext.compiler.llo import UNITS, Kernel, compile_kernels, read_dump
from minitext.errors import DoesNotFit, UserError
from minitext.hardware import CHIPS
from minitext.kernels import cases

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
HERE = Path(__file__).parent / "llo"
GOLDENS = json.loads((HERE / "goldens.json").read_text())
BAND = 0.05  # by which bundles, shares and memory may differ from the goldens
compile_case = functools.cache(llo.compile_case)
TPUS = [chip.name for chip in CHIPS.values() if chip.platform == "tpu"]


def check_counts(kernel):
    """What holds of any kernel."""
    assert kernel.bundles == len(kernel.code) == len(kernel.busy) == len(kernel.depth)
    assert (kernel.busy <= np.array([*kernel.capacity.values()])).all()
    assert all(0 <= kernel.share(unit) <= 1 and 0 <= kernel.occupancy(unit) <= 1 for unit in UNITS)
    # A cycle in which nothing starts is part of the bundle before it.
    assert kernel.bundles <= kernel.cycles and 0 < kernel.step_cycles <= kernel.cycles
    assert kernel.vmem_bytes > 0 and (kernel.spilled_bytes > 0) == (kernel.spills > 0)
    assert json.loads(json.dumps(kernel.to_json()))["bundles"] == kernel.bundles


def test_a_kernel_in_a_loop_has_the_name_of_its_fusion():
    """As libtpu writes the program of `jax.lax.map` over a kernel, and of `jax.vmap` over prefetched scalars."""
    call = 'custom-call(%param_2.6), custom_call_target="tpu_custom_call", backend_config={}'
    program = f"""
%fused_computation.1.clone.1 (param_0.6: f32[3,8,128], param_2.6: f32[24,512]) -> f32[3,8,128] {{
  %param_2.6 = f32[24,512] parameter(1)
  %closed_call.5 = f32[8,128]{{1,0}} {call}
}}
%body (arg: (s32[], f32[3,8,128])) -> (s32[], f32[3,8,128]) {{
  %closed_call.6 = f32[3,8,128] fusion(%a, %b), kind=kCustom, calls=%fused_computation.1.clone.1, metadata={{}}
}}
ENTRY %main.6 (x.1: f32[3,24,512]) -> f32[3,8,128] {{
  %plain.1 = f32[8,128] {call}
  ROOT %last = f32[8,128] {call}
}}
"""
    assert llo._kernel_names(program) == ["closed_call.6", "plain.1", "last"]


@needs_libtpu
@pytest.mark.audit
def test_a_mapped_kernel_is_compiled_and_read():
    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    def fn(x):
        return jax.lax.map(lambda x: pl.pallas_call(double, out_shape=x)(x), x)

    (kernel,) = compile_kernels(fn, jax.ShapeDtypeStruct((3, 8, 128), jnp.float32), chip="v5e")
    check_counts(kernel)


def test_a_dump_is_read():
    (kernel,) = read_dump(HERE / "tiny-v5e", "v5e")
    check_counts(kernel)
    assert kernel.name == "tiny"
    assert set(kernel.depth) == {0, 1, 2}
    # Two buffers each for the blocks of x, w and the result.
    assert kernel.vmem_bytes == 2 * (32 * 128 * 4 + 128 * 128 * 2 + 8 * 128 * 4) - 128 * 128 * 2
    # libtpu's table and its code tell of the same operations; some units are busy from the next bundle on.
    for word, unit, later in (
        ("vmatmul|vmatpush", "MXU", 1),
        ("vexp2", "EUP", 1),
        ("vst ", "stores", 0),
    ):
        started = [n for n, bundle in enumerate(kernel.code) if re.search(word, bundle)]
        assert started and kernel.uses(unit)[np.array(started) + later].all(), unit
    assert kernel.uses("EUP").sum() == 1
    # 8 rows through one matrix unit; its cycles are all there, also those that are no bundles.
    assert kernel.occupancy("MXU") * kernel.cycles * 4 == pytest.approx(16)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("1-TLP-hlo.txt", "ENTRY", "no Pallas kernel"),
        ("1-TLP-hlo.txt", None, r"wrote no file \*-hlo.txt"),
        ("1-TLP-05-vmem_report.html", "const DATA = {};\n", "no report of its memory"),
        ("2-tiny.1-04-final_bundles.txt", "   0   :  { nop }\n", "1 bundles and 90 rows"),
        ("2-tiny.1-02-final_hlo-static-per-bundle-utilization.txt", "== CAPACITY:\n", "no columns"),
    ],
)
def test_a_dump_that_is_not_as_expected_is_refused(tmp_path, file, text, reason):
    shutil.copytree(HERE / "tiny-v5e", tmp_path, dirs_exist_ok=True)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=reason):
        read_dump(tmp_path, "v5e")


@pytest.mark.parametrize("said", ["null", "{}"])
def test_a_kernel_may_take_no_vector_memory(tmp_path, said):
    """XLA's own kernel that sorts a grouped product's tiles is one: it works in the scalar core's memory."""
    shutil.copytree(HERE / "tiny-v5e", tmp_path, dirs_exist_ok=True)
    report = f'const DATA = {{"hlo_breakdowns": {said}}};\n'
    (tmp_path / "1-TLP-05-vmem_report.html").write_text(report)
    (kernel,) = read_dump(tmp_path, "v5e")
    assert kernel.vmem_bytes == kernel.spilled_bytes == 0 and kernel.cycles > 0


@given(parts=st.integers(1, 120))
def test_the_parts_of_a_strip_make_the_whole(parts):
    (kernel,) = read_dump(HERE / "tiny-v5e", "v5e")
    strip = kernel.strip(parts)
    lengths = np.diff(np.linspace(0, kernel.bundles, min(parts, kernel.bundles) + 1).astype(int))
    for unit in UNITS:
        assert len(strip[unit]) == len(lengths)
        np.testing.assert_allclose(np.dot(strip[unit], lengths), kernel.uses(unit).sum())


def test_a_strip_shows_what_is_there(capsys):
    (kernel,) = read_dump(HERE / "tiny-v5e", "v5e")
    llo.print_kernels([kernel], strips=True)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert not set(lines["XLU"]) & set("▁▂▃▄▅▆▇█") and "█" in lines["MXU"]
    # One bundle with an exponential is a low bar, not nothing.
    assert lines["EUP"].strip("EUP ") in "▁▂▃▄▅▆▇█"


def scratch_of(rows):
    def body(x_ref, out_ref, scratch_ref):
        # The compiler does without memory whose use it can follow.
        scratch_ref[pl.ds(pl.program_id(0) * 8, 8)] = x_ref[...]
        out_ref[...] = scratch_ref[:8]

    def fn(x):
        scratch = [pltpu.VMEM((rows, 128), jnp.float32)]
        return pl.pallas_call(body, grid=2, out_shape=x, scratch_shapes=scratch, name="scratch")(x)

    return fn


X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


@needs_libtpu
def test_a_kernel_of_ones_own_is_compiled_and_read():
    (kernel,) = compile_kernels(scratch_of(512), X, chip="v5e")
    check_counts(kernel)
    assert (kernel.name, kernel.chip) == ("scratch", "v5e")
    assert kernel.vmem_bytes >= 512 * 128 * 4
    assert kernel.share("MXU") == 0 and kernel.uses("loads").any() and kernel.uses("stores").any()


@needs_libtpu
def test_what_the_compiler_refuses_is_one_line():
    with pytest.raises(
        DoesNotFit, match=r"^scratch needs 32.0\dMiB .* may use 16.00MiB on v5e: [^\n]*$"
    ):
        compile_kernels(scratch_of(2**16), X, chip="v5e")
    with pytest.raises(UserError, match="no Pallas kernel"):
        compile_kernels(lambda x: x + 1, X, chip="v5e")
    with pytest.raises(UserError, match="chip=h100 is not a TPU"):
        compile_kernels(scratch_of(8), X, chip="h100")


@needs_libtpu
def test_the_command_compiles_a_kernel(monkeypatch, capsys):
    def minitext(*words):
        monkeypatch.setattr(sys, "argv", ["minitext", *words])
        with pytest.raises(SystemExit) as stop:
            main.main()
        return stop.value.code, *capsys.readouterr()

    code, out, _ = minitext("llo", "matmul", "chip=v5e", "m=128", "n=128", "k=256", "--json")
    (found,) = json.loads(out)
    assert code == 0 and found["case"] == "matmul" and found["mxu_share"] > 0
    for words, reason in (
        (["matmull"], "did you mean matmul?"), (["matmul", "q=3"], "blocks m, k, n"),
        (["matmul", "m=x"], "whole number"), (["matmul", "m=7"], "tile m=7"), (["matmul", "chip=v9"], "chip=v9"),
    ):  # fmt: skip
        code, _, err = minitext("llo", *words)
        assert code == 2 and reason in err and err.count("\n") == 1


def test_every_golden_is_of_a_case():
    assert {golden["case"] for golden in GOLDENS} <= set(cases.CASES)


def by_case(goldens):
    key = lambda golden: (golden["case"], golden["chip"])  # noqa: E731
    return [(*names, list(rows)) for names, rows in itertools.groupby(goldens, key)]


@needs_libtpu
@pytest.mark.audit
@pytest.mark.parametrize(
    ("case", "chip", "goldens"), by_case(GOLDENS), ids=lambda x: x if isinstance(x, str) else ""
)
def test_kernels_keep_their_quality(case, chip, goldens):
    kernels = compile_case(case, chip)
    assert [kernel.name for kernel in kernels] == [golden["kernel"] for golden in goldens]
    for kernel, golden in zip(kernels, goldens, strict=True):
        check_counts(kernel)
        for name, value in kernel.to_json().items():
            if isinstance(value, (int, float)):
                # Small counts may differ by a few.
                room = 0.02 if name.endswith("share") else 1024 if name.endswith("bytes") else 8
                assert abs(value - golden[name]) <= max(BAND * golden[name], room), (
                    f"{name} of {kernel.name}"
                )


# Our kernels, and JAX's for the same work.
RIVALS = {
    "flash_attention": ["jax_splash_attention"],
    "flash_attention_backward": ["jax_splash_attention_backward"],
    "grouped_matmul": ["jax_megablox_gmm"],
    "grouped_matmul_backward": ["jax_megablox_gmm", "jax_megablox_tgmm"],
}


def test_rivals_have_equal_blocks():
    for name in itertools.chain(RIVALS, *RIVALS.values()):
        lengths = inspect.signature(cases.CASES[name]).parameters.values()
        assert {length.default for length in lengths} == {512}


@needs_libtpu
@pytest.mark.audit
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("case", RIVALS)
def test_kernels_use_the_matrix_units_as_much_as_jax_s(case, chip):
    rivals = [kernel for rival in RIVALS[case] for kernel in compile_case(rival, chip)]
    for ours, theirs in zip(compile_case(case, chip), rivals, strict=True):
        names = f"{ours.name} and {theirs.name}"
        assert ours.share("MXU") >= theirs.share("MXU"), names
        # Attention's columns of logits are meant to be larger than the registers.
        assert ours.spills <= theirs.spills or "attention" in case, names


@needs_libtpu
@pytest.mark.audit
@pytest.mark.parametrize("chip", TPUS)
def test_the_matmul_compiles_for_every_chip_by_the_table(chip):
    from minitext.kernels.matmul.tpu import matmul

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 4096), (4096, 14336))]
    bias = jax.ShapeDtypeStruct((14336,), jnp.bfloat16)
    (kernel,) = compile_kernels(
        lambda *args: matmul(*args, activation="silu"), *shapes, bias, chip=chip
    )
    check_counts(kernel)
    assert kernel.uses("MXU").any() and kernel.uses("EUP").any()


def test_kernels_are_compared_by_their_counts():
    kernel, again = (read_dump(HERE / "tiny-v5e", "v5e")[0] for _ in range(2))
    assert kernel == again and isinstance(kernel, Kernel)
