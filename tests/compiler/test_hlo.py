"""The reader of compiled programs, on small ones and on damaged text; test_aot has the real ones."""

from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.compiler import buffers, hlo
from minitext.compiler.hlo import group_size
from minitext.compiler.targets import topology_mesh
from minitext.config.sections import MeshConfig

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
  %all-gather.1 = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=5, frontend_attributes={chain_id="0"}
  %piece = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=5, frontend_attributes={chain_id="0"}
  %fusion.1 = bf16[16,8]{1,0} fusion(%all-gather.1, %all-gather.1), kind=kCustom, calls=%all-reduce-scatter.1
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


SUGARED = """\
HloModule elements, num_partitions=4

%body (carry: (s32[], f32[64,8], (f32[2], bf16[4,8]))) -> (s32[], f32[64,8], (f32[2], bf16[4,8])) {
  %carry = (s32[]{:T(128)}, f32[64,8]{1,0:T(8,128)}, (f32[2]{0}, /*index=1*/bf16[4,8]{1,0})) parameter(0)
  %all-reduce.1 = f32[64,8]{1,0} all-reduce(%carry#1), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  %fusion.1 = f32[64,8]{1,0} fusion(%carry#1, %carry#2, %carry#1), kind=kLoop, calls=%inside
  ROOT %tuple = (s32[], f32[64,8], (f32[2], bf16[4,8])) tuple(%carry#0, %fusion.1, %carry#2)
}

%condition (carry.1: (s32[], f32[64,8], (f32[2], bf16[4,8]))) -> pred[] {
  %carry.1 = (s32[]{:T(128)}, f32[64,8]{1,0}, (f32[2]{0}, bf16[4,8]{1,0})) parameter(0)
  %bound = s32[]{:T(128)} constant(40)
  ROOT %less = pred[]{:T(512)} compare(%carry.1#0, %bound), direction=LT
}

ENTRY %main (x: f32[64,8], y: (f32[2], bf16[4,8])) -> f32[64,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %y = (f32[2]{0}, bf16[4,8]{1,0}) parameter(1)
  %one = s32[] constant(1)
  %start = (s32[], f32[64,8]{1,0}, (f32[2]{0}, bf16[4,8]{1,0})) tuple(%one, %x, %y)
  %loop = (s32[], f32[64,8]{1,0}, (f32[2]{0}, bf16[4,8]{1,0})) while(%start), condition=%condition, body=%body
  ROOT %out = f32[64,8]{1,0} negate(%loop#1)
}
"""


def test_an_element_of_a_tuple_may_be_written_without_an_instruction():
    module = hlo.Module(SUGARED)
    (loop,), (fusion,) = module.loops(), module.fusions()
    assert loop.trips == 39  # counted from 1
    assert fusion.read == 64 * 8 * 4 + (
        2 * 4 + 4 * 8 * 2
    )  # an operand that is read twice counts once
    assert hlo.collectives(SUGARED) == {"all-reduce": (39, 39 * 64 * 8 * 4)}
    body = {i.name: i for i in module.computations["body"]}
    assert body["carry#1"].type == "f32[64,8]{1,0:T(8,128)}"
    assert list(body) == [
        "carry",
        "carry#1",
        "all-reduce.1",
        "carry#2",
        "fusion.1",
        "carry#0",
        "tuple",
    ]


def test_collectives_of_one_channel_count_each():
    """JAX gives all collectives inside shard_map channel 1."""
    again = LOOP.replace(
        "  %permuted =",
        "  %other = f32[4]{0} all-reduce(%v), channel_id=1, to_apply=%add\n"
        "  %third = f32[4]{0} all-reduce(%other), channel_id=1, to_apply=%add\n  %permuted =",
    )
    assert hlo.collectives(again)["all-reduce"] == (3, 48)


def test_groups_of_one_device_send_nothing():
    alone = LOOP.replace("HloModule loop", "HloModule loop, num_partitions=2").replace(
        "all-reduce(%q),", "all-reduce(%q), replica_groups={{0},{1}},"
    )
    assert "all-reduce" not in hlo.collectives(alone)
    # A program with many arguments lists them all before it says how many devices it is for.
    aliases = ", ".join(f"{{{n}}}: ({n}, {{}}, may-alias)" for n in range(1000))
    many = alone.replace(", num", f", input_output_alias={{ {aliases} }}, num")
    assert hlo.Module(many).devices == 2 and "all-reduce" not in hlo.collectives(many)


@pytest.mark.parametrize(("here", "buffer"), [("64", "512"), ("512", "64")])
def test_a_ragged_all_to_all_sends_rows_and_not_its_buffer(here, buffer):
    text = f"""\
ENTRY %main (rows: bf16[{here},2,128], room: bf16[{buffer},2,128], n: s32[8]) -> bf16[{buffer},2,128] {{
  %rows = bf16[{here},2,128]{{2,1,0}} parameter(0)
  %room = bf16[{buffer},2,128]{{2,1,0}} parameter(1)
  %n = s32[8]{{0}} parameter(2)
  ROOT %sent = bf16[{buffer},2,128]{{2,1,0}} ragged-all-to-all(%rows, %room, %n, %n, %n, %n), replica_groups={{{{0,1}}}}
}}
"""
    (found,) = hlo.Module(text).collectives()
    assert (found.kind, found.arrays) == ("ragged-all-to-all", (("bf16", 64 * 2 * 128 * 2),))


def test_what_goes_between_slices_is_a_kind_of_its_own():
    over = LOOP.replace(
        "  %loop =",
        "  %send = (f32[4]{0}, u32[], token[]) send(%v, %after), channel_id=9, is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}\n  %loop =',
    )
    assert hlo.collectives(over) == hlo.collectives(LOOP) | {"all-reduce (dcn)": (1, 16)}
    # A gather's send has one slice's part of it.
    target = "_xla_megascale_target={{100000,300000},{200000,400000}},"
    gather = over.replace(
        '_xla_megascale_transfer_type="ALL_REDUCE"',
        f'{target}_xla_megascale_transfer_type="ALL_GATHER"',
    )
    (found,) = (c for c in hlo.Module(gather).collectives() if c.kind == "all-gather (dcn)")
    assert (found.group, found.bytes, found.moved) == (2, 32, 16)


def test_a_trip_count_that_the_compiler_noted_wins():
    noted = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert hlo.collectives(noted)["all-gather"][0] == 7


@pytest.mark.parametrize(("first", "turns"), [(0, 40), (1, 39)])
def test_turns_that_the_compiler_took_out_of_a_loop_are_not_in_its_count(first, turns):
    """A TPU's compiler does the first turn before the loop where gradients cross slices."""
    peeled = LOOP.replace(
        "while(%start)", "while(%carried)"
    ).replace(
        "  %loop =",
        f"  %one = s32[]{{:T(128)}} constant({first})\n  %counter = s32[]{{:T(128)}} copy(%one)\n"
        "  %carried = (s32[]{:T(128)}, bf16[16,8]{1,0}) tuple(%counter, %x)\n  %loop =",
    )  # fmt: skip
    assert hlo.collectives(peeled)["all-gather"][0] == turns
    assert [loop.trips for loop in hlo.Module(peeled).loops()] == [turns]


@pytest.mark.parametrize(("step", "turns"), [(1, 40), (2, 20), (3, 14)])
def test_a_loop_whose_counter_goes_on_by_more_than_one_turns_fewer_times(step, turns):
    """A TPU's compiler takes two turns at once in a product that gathers or scatters while it goes on."""
    unrolled = LOOP.replace(
        "  ROOT %tuple = (s32[]{:T(128)}, bf16[16,8]{1,0:T(8,128)(2,1)}) tuple(%i, ",
        "  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0\n"
        f"  %turns = s32[]{{:T(128)}} constant({step})\n  %next = s32[]{{:T(128)}} add(%i, %turns)\n"
        "  ROOT %tuple = (s32[]{:T(128)}, bf16[16,8]{1,0:T(8,128)(2,1)}) tuple(%next, ",
    )
    assert [loop.trips for loop in hlo.Module(unrolled).loops()] == [turns]


@pytest.mark.parametrize("kind", ["u32", "s64"])
def test_a_counter_may_have_another_type(kind):
    other = LOOP.replace("s32[]{:T(128)} constant(40)", f"{kind}[]{{:T(128)}} constant(40)")
    assert other != LOOP and hlo.collectives(other) == hlo.collectives(LOOP)


def test_a_loop_without_a_bound_counts_once():
    unknown = LOOP.replace("s32[]{:T(128)} constant(40)", "s32[]{:T(128)} copy(%other)")
    assert hlo.collectives(unknown)["all-gather"][0] == 1


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "uint8", "bool"])
def test_a_type_is_shown_as_compilers_write_it(dtype):
    x = jax.ShapeDtypeStruct((2, 3), dtype)
    text = jax.jit(lambda x: x).lower(x).as_text("hlo")
    assert f"{hlo.show_type(x)}{{1,0}} parameter(0)" in text


PRODUCTS = """\
HloModule products

%fused (p0: s8[16,32], p1: s8[32,8]) -> s32[16,8] {
  %p0 = s8[16,32]{1,0:T(8,128)(4,1)} parameter(0)
  %p1 = s8[32,8]{1,0:T(8,128)(4,1)} parameter(1)
  ROOT %convolution.1 = s32[16,8]{1,0:T(8,128)} convolution(%p0, %p1), metadata={op_name="jit(f)/forward"}
}

ENTRY %main (a: s8[16,32], b: s8[32,8], n: s32[4], c: f8e4m3fn[16,32]) -> f32[16,8] {
  %a = s8[16,32]{1,0} parameter(0)
  %b = s8[32,8]{1,0} parameter(1)
  %n = s32[4]{0} parameter(2)
  %c = f8e4m3fn[16,32]{1,0} parameter(3)
  %fusion = s32[16,8]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused
  %wide = bf16[16,32]{1,0} convert(%a)
  %narrow = bf16[32,8]{1,0} convert(%b)
  %dot = f32[16,8]{1,0} dot(%wide, %narrow), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %library = (f32[16,8]{1,0}, s8[64]{0}) custom-call(%c, %narrow), custom_call_target="__cublas$lt$matmul$f8"
  %ragged-dot-metadata = s32[4]{0} custom-call(%n), custom_call_target="tpu_custom_call"
  ROOT %ragged-dot-none.1 = s32[16,8] custom-call(%ragged-dot-metadata, %a, %b), custom_call_target="tpu_custom_call"
}
"""


def test_products_are_read_with_the_types_that_they_multiply():
    found = hlo.Module(PRODUCTS).products()
    assert {p.name: (p.types, p.result, p.where, p.runs) for p in found} == {
        "convolution.1": (("s8", "s8"), "s32[16,8]", "jit(f)/forward", 1),
        "dot": (("bf16", "bf16"), "f32[16,8]", "", 1),  # a conversion before it is one
        "library": (("f8e4m3fn", "bf16"), "f32[16,8]", "", 1),
        "ragged-dot-none.1": (("s8", "s8"), "s32[16,8]", "", 1),
    }


def test_a_module_knows_its_loops_fusions_and_what_overlaps():
    module = hlo.Module(LOOP)
    assert module.loops() == [hlo.Loop("loop", "body", 40, 1)]
    (fusion,) = module.fusions()
    assert (fusion.kind, fusion.read, fusion.written, fusion.runs) == ("kCustom", 1024, 256, 40)
    assert [i.opcode for i in fusion.inside] == ["parameter", "all-reduce", "dynamic-slice"]
    found = {c.kind: c for c in module.collectives()}
    assert found["all-gather"].overlapped is None
    assert found["collective-permute"].overlapped == ()
    late = LOOP.replace("  %permuted =", "  %work = f32[4]{0} negate(%v)\n  %permuted =")
    found = {c.kind: c for c in hlo.Module(late).collectives()}
    assert found["collective-permute"].overlapped == ("work",)


@pytest.mark.parametrize(
    ("groups", "size"), [("[4,2]<=[8]", 2), ("{{0,1,2,3},{4,5,6,7}}", 4), ("{}", 8)]
)
def test_what_a_ring_moves_follows_from_its_size(groups, size):
    text = LOOP.replace("HloModule loop", "HloModule loop, num_partitions=8").replace(
        "channel_id=5,", f"channel_id=5, replica_groups={groups},"
    )
    gather = next(c for c in hlo.Module(text).collectives() if c.kind == "all-gather")
    assert gather.group == size and gather.moved == 1024 * (size - 1) / size
    reduce = gather._replace(kind="all-reduce")
    assert reduce.moved == 2 * gather.moved


RECORDED = Path(__file__).parent / "hlo"


def devices_of(kind):
    """Eight devices of this machine, or of another by ahead-of-time compilation; None if that isn't installed."""
    if kind == "cpu":
        return jax.devices()
    if kind == "tpu":
        pytest.importorskip("libtpu")
        return list(topology_mesh("v5e:2x4", MeshConfig()).devices.flatten())
    if find_spec("jax_cuda13_plugin") is None:
        return None
    return list(topology_mesh("h100:1x1x8", MeshConfig()).devices.flatten())


def compiled(name, kind, make):
    """The text of a program from a real compiler; the GPU's, where it isn't installed, as it once was."""
    devices = devices_of(kind)
    if devices is None:
        return (RECORDED / f"{kind}_{name}.txt").read_text()
    return make(devices)


def scanned_layers(devices):
    """Five layers in a loop, on one device."""

    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) * 2 + jnp.sin(x), None), x, w)[0]

    place = jax.sharding.SingleDeviceSharding(devices[0])
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=place) for s in ((8, 64), (5, 64, 64))]
    return jax.jit(layers).lower(*shapes).compile().as_text()


@pytest.mark.parametrize("kind", ["cpu", "tpu", "gpu"])
def test_a_compiled_scan_is_read_back(kind):
    module = hlo.Module(compiled("scan", kind, scanned_layers))
    assert [loop.trips for loop in module.loops()] == [5]
    fused = {i.opcode: fusion for fusion in module.fusions() for i in fusion.inside}
    assert fused["tanh"].runs == fused["sine"].runs == 5
    if kind == "cpu":
        assert fused["tanh"] == fused["sine"]
        assert (fused["tanh"].read, fused["tanh"].written) == (2 * 8 * 64 * 4, 8 * 64 * 4)


def sharded_products(devices):
    """A product whose weights are gathered over 4 devices and whose sum is over 2."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), devices=devices, axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("a", "b")))
    w = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("b", "a")))

    def product(x, w):
        w = jax.sharding.reshard(w, P("b", None))
        return jnp.einsum("xd,df->xf", x, w, out_sharding=P("a", None))

    with jax.set_mesh(mesh):
        return jax.jit(product).lower(x, w).compile().as_text()


@pytest.mark.parametrize("kind", ["cpu", "tpu", "gpu"])
def test_collectives_of_real_compilers(kind):
    module = hlo.Module(compiled("product", kind, sharded_products))
    assert module.devices == 8
    found = {c.kind: c for c in module.collectives()}
    gather, reduce = found["all-gather"], found["all-reduce"]
    # XLA's CPU backend multiplies bfloat16 as float32, and gathers what it has converted.
    assert gather.group == 4 and gather.bytes in (128 * 512 * 2, 128 * 512 * 4)
    assert gather.moved == 0.75 * gather.bytes
    assert reduce.group == 2 and reduce.bytes in (16 * 512 * 2, 16 * 512 * 4)
    assert reduce.moved == reduce.bytes and gather.runs == reduce.runs == 1
    assert module.fusions()
    assert (gather.overlapped is None) == (kind == "cpu" or "-start" not in gather.name)


def sums_and_gathers(devices):
    """An array over 4 x 2 devices, summed and gathered over each axis."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), devices=devices, axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh, P("a", "b")))

    def everything(x):
        gathered = [jax.sharding.reshard(x, spec) for spec in (P(None, "b"), P("a", None))]
        return *(jnp.sum(x, axis=axis) for axis in (0, 1)), gathered

    with jax.set_mesh(mesh):
        return jax.jit(everything).lower(x).compile().as_text()


@pytest.mark.parametrize("kind", ["cpu", "tpu"])
def test_groups_named_by_axes_of_a_mesh(kind):
    text = sums_and_gathers(devices_of(kind))
    assert "replica_groups=mesh[" in text
    found = {(c.kind, c.group): c.bytes for c in hlo.Module(text).collectives()}
    assert found == {
        ("all-reduce", 4): 128 * 4,
        ("all-reduce", 2): 16 * 4,
        ("all-gather", 4): 64 * 128 * 4,
        ("all-gather", 2): 16 * 256 * 4,
    }


def test_what_a_tpu_computes_while_it_gathers_is_read():
    """The next layer's weights arrive in pieces of the chain, the first of which no product goes before."""
    devices = devices_of("tpu")
    mesh = jax.make_mesh((8,), ("f",), devices=devices, axis_types=(AxisType.Explicit,))
    place = lambda *names: NamedSharding(mesh, P(*names))  # noqa: E731
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16, sharding=place("f"))
    w = jax.ShapeDtypeStruct((3, 1024, 1024), jnp.bfloat16, sharding=place(None, "f"))

    def layers(x, w):
        for k in range(3):
            whole = jax.sharding.reshard(w[k], P())
            x = jnp.tanh(jnp.einsum("bd,df->bf", x, whole, out_sharding=P("f")))
        return x

    with jax.set_mesh(mesh):
        module = hlo.Module(jax.jit(layers).lower(x, w).compile().as_text())
    gathers = [c for c in module.collectives() if c.kind == "all-gather"]
    assert len(gathers) == 3 and {c.bytes for c in gathers} == {2 * 1024 * 1024}
    fusions = {f.name: f for f in module.fusions()}
    hidden = [c for c in gathers if c.overlapped]
    assert hidden, "the compiler hides none of the gathers behind a product"
    for gather in hidden:
        between = [fusions[name] for name in gather.overlapped if name in fusions]
        opcodes = {i.opcode for fusion in between for i in fusion.inside}
        assert opcodes & {"dot", "convolution", "fusion"}, gather


def cut_and_noise(data, text):
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    noise = data.draw(st.text(alphabet="{}()[]%=,:. \n09az", max_size=8))
    place = data.draw(st.integers(start, end))
    return text[start:place] + noise + text[place:end]


@pytest.mark.parametrize("name", ["gpu_product", "gpu_scan"])
@given(data=st.data())
def test_damaged_text_of_a_compiler_raises_nothing(name, data):
    module = hlo.Module(cut_and_noise(data, (RECORDED / f"{name}.txt").read_text()))
    assert all(c.moved >= 0 for c in module.collectives())
    assert all(f.written >= 0 for f in module.fusions())
    assert all(loop.trips >= 0 for loop in module.loops())


@given(data=st.data())
def test_damaged_text_raises_nothing(data):
    cut = cut_and_noise(data, LOOP)
    for count, size in hlo.collectives(cut).values():
        assert count >= 0 and size >= 0
    module = hlo.Module(cut)
    assert all(f.runs >= 0 and f.read >= 0 for f in module.fusions())
    assert all(loop.trips >= 0 for loop in module.loops())
    assert all(c.moved >= 0 and c.group >= 1 for c in module.collectives())
    buffers.op_names(cut)
    buffers.argument_names(cut)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[4,2]<=[8]", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups={}", 8),
        ("", 8),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2] {'axis_1'}", 4),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(1,0,2)) {'axis_0'}", 2),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", 4),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
        ('replica_groups={{0,1}}, frontend_attributes={_xla_megascale_target="{0,1,2}"}', 3),
        ("frontend_attributes={_xla_megascale_target={{100000,200000},{100001,200001}}}", 2),
    ],
)
def test_every_way_of_writing_groups_is_read(written, size):
    line = f"bf16[64,8]{{1,0}} all-gather(%w), channel_id=5, {written}, dimensions={{0}}"
    assert group_size(line, 8) == size


@given(
    st.sampled_from(["replica_groups=", "replica_groups=[", "replica_groups=mesh[", ""]),
    st.text("0123456789,'=[]{}()<T: abz_", max_size=60),
    st.integers(0, 9),
)
def test_any_text_has_a_group_of_at_least_one(begin, text, devices):
    assert group_size(begin + text, devices) >= 1
