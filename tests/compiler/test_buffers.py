"""The reader of memory plans and refusals, on real programs and on damaged text."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitext.compiler import buffers
from minitext.compiler.aot import read_dump
from minitext.compiler.buffers import Buffer, allocated, parse_out_of_memory, read_buffers


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
    return (lowered.compile(compiler_options=options), *read_dump(folder))


def test_buffers_agree_with_the_compiler(program):
    compiled, traced, module, assignment = program
    stats = compiled.memory_analysis()
    sums = allocated(assignment)
    assert sums["argument"] == stats.argument_size_in_bytes
    assert sums["alias"] == stats.alias_size_in_bytes == 5 * 64 * 64 * 4
    assert sums["temporary"] <= stats.temp_size_in_bytes
    pieces = read_buffers(assignment, buffers.op_names(module), buffers.argument_names(traced))
    arguments = {piece.op: piece for piece in pieces if piece.kind == "argument"}
    assert {"state['w']", "batch['x']"} <= set(arguments)
    assert arguments["state['w']"] == Buffer(81920, "f32[5,64,64]", "argument", "state['w']")
    assert [p.bytes for p in pieces] == sorted((p.bytes for p in pieces), reverse=True)


@given(data=st.data())
def test_damaged_text_raises_nothing(program, data):
    _, _, module, assignment = program
    text = data.draw(st.sampled_from([assignment, SHORT, EARLY, DETAILED]))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    noise = data.draw(st.text(alphabet="{}()[]<>@%=,:. \n09azG", max_size=8))
    place = data.draw(st.integers(start, end))
    cut = text[start:place] + noise + text[place:end]
    assert all(size >= 0 for size in allocated(cut).values())
    for piece in read_buffers(cut, buffers.op_names(module)):
        assert piece.bytes >= 0
    found = parse_out_of_memory(cut)
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
    found = parse_out_of_memory(message)
    assert found is not None
    assert found.used == round(46.87 * 2**30) and found.available == round(15.75 * 2**30)
    assert bool(found.buffers) == (message is DETAILED)


def test_out_of_memory_with_a_list():
    found = parse_out_of_memory(DETAILED)
    assert found is not None
    assert found.buffers == (
        Buffer(8 * 2**30, "f32[1,8,4,8192,8192]", "temporary", "jit(f)/jvp()/dot_general"),
        Buffer(512 * 2**20, "bf16[32,8192]", "argument", "params.4"),
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
    assert parse_out_of_memory(message) is None


def test_names_are_those_of_jax():
    text = """\
HloModule names

ENTRY %main (start: f32[4]) -> f32[4] {
  %start = f32[4]{0} parameter(0), metadata={op_name="state[\\'w\\']"}
  ROOT %twice = f32[4]{0} add(%start, %start), metadata={op_name="jit(f)/add"}
}
"""
    assert buffers.op_names(text) == {"start": "state['w']", "twice": "jit(f)/add"}
    assert buffers.argument_names(text) == {0: "state['w']"}
