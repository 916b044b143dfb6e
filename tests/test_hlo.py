"""Readers of what XLA writes, on real programs, on small hand-written ones and on damaged text."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitext import hlo
from minitext.aot import _read_dump

LOOP = """\
HloModule loop

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (p: bf16[64,8]) -> bf16[16,8] {
  %p = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.9 = bf16[64,8]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=4, to_apply=%add
  ROOT %slice = bf16[16,8]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.9, %zero), dynamic_slice_sizes={16,8}
}

%on_another_core (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %all-reduce.2 = f32[4]{0} all-reduce(%q), to_apply=%add
}, execution_thread="sparsecore"

%asynchronous (r: f32[4]) -> f32[4] {
  %r = f32[4]{0} parameter(0)
  ROOT %custom = f32[4]{0} custom-call(%r), called_computations={%on_another_core}
}

%body (carry: (s32[], bf16[16,8])) -> (s32[], bf16[16,8]) {
  %carry = (s32[]{:T(128)}, bf16[16,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %w = bf16[16,8]{1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=1
  %all-gather.1 = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=5, dimensions={0}
  %piece = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=5, dimensions={0}
  %fusion.1 = bf16[16,8]{1,0:T(8,128)(2,1)} fusion(%all-gather.1), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %tuple = (s32[]{:T(128)}, bf16[16,8]{1,0:T(8,128)(2,1)}) tuple(%i, %fusion.1)
}

%condition (carry.1: (s32[], bf16[16,8])) -> pred[] {
  %carry.1 = (s32[]{:T(128)}, bf16[16,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %bound = s32[]{:T(128)} constant(40)
  %i.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %bound), direction=LT
}

ENTRY %main (start: (s32[], bf16[16,8]), v: f32[4]) -> bf16[16,8] {
  %start = (s32[]{:T(128)}, bf16[16,8]{1,0:T(8,128)(2,1)}) parameter(0), metadata={op_name="state[\\'w\\']"}
  %v = f32[4]{0} parameter(1)
  %begin = ((f32[4]{0}), f32[4]{0}, u32[]) async-start(%v), calls=%asynchronous
  %end = f32[4]{0} async-done(%begin), calls=%asynchronous
  %permute = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%v), source_target_pairs={{0,1}}
  %permuted = f32[4]{0} collective-permute-done(%permute)
  %loop = (s32[]{:T(128)}, bf16[16,8]{1,0:T(8,128)(2,1)}) while(%start), condition=%condition, body=%body
  ROOT %out = bf16[16,8]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""


def test_collectives_of_a_loop_count_as_often_as_it_turns():
    assert hlo.collectives(LOOP) == {
        "all-gather": (40, 40 * 64 * 8 * 2),
        "all-reduce": (1, 16),
        "reduce-scatter": (40, 40 * 64 * 8 * 2),
        "collective-permute": (1, 16),
    }


def test_a_trip_count_that_the_compiler_noted_wins():
    noted = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert hlo.collectives(noted)["all-gather"][0] == 7


def test_a_loop_without_a_bound_counts_once():
    unknown = LOOP.replace("s32[]{:T(128)} constant(40)", "s32[]{:T(128)} copy(%other)")
    assert hlo.collectives(unknown)["all-gather"][0] == 1


def test_op_names():
    assert hlo.op_names(LOOP) == {"start": "state['w']"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[8,128]{1,0:T(8,128)}", 4096),
        ("bf16[3]", 6),
        ("(f32[4], s4[3], pred[5])", 16 + 2 + 5),
        ("f8e4m3fn[2,2]{1,0}", 4),
        ("u32[]", 4),
        ("token[]", 0),
        ("f32[0,7]", 0),
        ("", 0),
    ],
)
def test_type_bytes(text, size):
    assert hlo.type_bytes(text) == size


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A program compiled for this CPU, with its dump."""
    folder = str(tmp_path_factory.mktemp("dump"))

    def step(state, batch):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        loss = lambda s: jax.lax.scan(layer, batch["x"], s["w"])[0].sum()  # noqa: E731
        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))

    state = {"w": jax.ShapeDtypeStruct((5, 64, 64), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    return (lowered.compile(compiler_options=options), *_read_dump(folder))


def test_buffers_agree_with_the_compiler(program):
    compiled, module, assignment = program
    stats = compiled.memory_analysis()
    sums = hlo.allocated(assignment)
    assert sums["argument"] == stats.argument_size_in_bytes
    assert sums["alias"] == stats.alias_size_in_bytes == 5 * 64 * 64 * 4
    assert sums["temporary"] <= stats.temp_size_in_bytes
    pieces = hlo.buffers(assignment, hlo.op_names(module))
    arguments = {piece.op: piece for piece in pieces if piece.kind == "argument"}
    assert {"state['w']", "batch['x']"} <= set(arguments)
    assert arguments["state['w']"] == hlo.Buffer(81920, "f32[5,64,64]", "argument", "state['w']")
    assert [p.bytes for p in pieces] == sorted((p.bytes for p in pieces), reverse=True)


@given(data=st.data())
def test_damaged_text_raises_nothing(program, data):
    _, module, assignment = program
    text = data.draw(st.sampled_from([LOOP, module, assignment, DETAILED, EARLY]))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    place = data.draw(st.integers(0, end - start))
    noise = data.draw(st.text(alphabet="{}()[]%=,:.\\n 09az", max_size=8))
    cut = text[start:end][:place] + noise + text[start:end][place:]
    hlo.collectives(cut)
    hlo.allocated(cut)
    for piece in hlo.buffers(cut, hlo.op_names(cut)):
        assert piece.bytes >= 0
    found = hlo.parse_out_of_memory(cut)
    assert found is None or (found.used >= 0 and found.available >= 0)


# The three forms in which the TPU compiler refuses a program, in libtpu 0.0.51 and before.
SHORT = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (46.87G) exceeds available HBM (15.75G). HLO module: jit_f.\n"
    "See https://openxla.org/xla/errors/error_1000 for more details."
)
EARLY = (
    "Compilation failure: Aborting compilation early because it's unlikely to have enough device "
    "memory. Requires 46.87G, has 15.75G available. If more detailed logging is desired, set "
    "--xla_tpu_impure_oom_fast_exit_threshold=-1"
)
DETAILED = """\
RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 46.87G of 15.75G hbm. Exceeded hbm capacity by 31.12G.

Total hbm usage >= 47.12G:
    reserved        258.00M
    program          24.43G
    arguments        22.44G

Output size 22.44G; shares 22.44G with arguments.

  Largest program allocations in hbm:

  1. Size: 8.00G
     Operator: op_name="jit(f)/jvp()/dot_general" source_file="f.py" source_line=3
     Shape: f32[1,8,4,8192,8192]{4,3,2,1,0:T(8,128)}
     Unpadded size: 8.00G
     XLA label: fusion.3 = fusion(copy.1, copy.2), kind=kOutput
     Allocation type: HLO temp
     ==========================

  2. Size: 512.0M
     Shape: bf16[32,8192]{1,0:T(8,128)(2,1)}
     Unpadded size: 500.0K
     Extra memory due to padding: 12.0K (1.0x expansion)
     XLA label: params.4 = parameter(4)
     Allocation type: Parameter
     ==========================
"""


@pytest.mark.parametrize("message", [SHORT, EARLY, DETAILED], ids=["short", "early", "detailed"])
def test_out_of_memory(message):
    found = hlo.parse_out_of_memory(message)
    assert found is not None
    assert found.used == round(46.87 * 2**30) and found.available == round(15.75 * 2**30)
    assert bool(found.buffers) == (message is DETAILED)


def test_out_of_memory_with_a_list():
    found = hlo.parse_out_of_memory(DETAILED)
    assert found is not None
    assert found.buffers == (
        hlo.Buffer(8 * 2**30, "f32[1,8,4,8192,8192]", "temporary", "jit(f)/jvp()/dot_general"),
        hlo.Buffer(512 * 2**20, "bf16[32,8192]", "argument", "params.4"),
    )


@pytest.mark.parametrize(
    "message",
    [
        "",
        "INVALID_ARGUMENT: something else",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem.",
    ],
)
def test_other_errors_are_not_about_hbm(message):
    assert hlo.parse_out_of_memory(message) is None
