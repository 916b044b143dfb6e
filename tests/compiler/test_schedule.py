"""The schedule read back from XLA's text: what takes time, in which order, on which queue."""

import pytest

from minitext.compiler.schedule import Operation, operations, read_schedule

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
# As libtpu writes it, but for the parts that nothing reads.
GATHER = "replica_groups=mesh['x'=8] {'x'}, dimensions={0}, frontend_attributes={chain_id=\"7\"}"
STEP = f"""
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[]{{:T(128)}} parameter(0)
  %b = f32[]{{:T(128)}} parameter(1)
  ROOT %sum = f32[]{{:T(128)}} add(%a, %b)
}}

%begin (p: bf16[16,128]) -> (bf16[16,128], bf16[128,128]) {{
  %p = bf16[16,128]{{1,0}} parameter(0)
  %gather.1 = bf16[128,128]{{1,0}} all-gather(%p), {GATHER}
  ROOT %c.1 = (bf16[16,128]{{1,0}}, u32[]{{:S(2)}}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}}

%along (q: bf16[128,128]) -> bf16[128,128] {{
  %q = bf16[128,128]{{1,0}} parameter(0)
  ROOT %gather.2 = bf16[128,128]{{1,0}} all-gather(%q), {GATHER}
}}

%finish (r: bf16[128,128]) -> bf16[128,128] {{
  %r = bf16[128,128]{{1,0}} parameter(0)
  %gather.3 = bf16[128,128]{{1,0}} all-gather(%r), {GATHER}
  ROOT %c.2 = bf16[128,128]{{1,0}} custom-call(%gather.3), custom_call_target="AsyncCollectiveDone"
}}

%inner (i: f32[4]) -> f32[4] {{
  %i = f32[4]{{0}} parameter(0)
  ROOT %twice = f32[4]{{0}} add(%i, %i)
}}

%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %s = (s32[]{{:T(128)}}, f32[4]{{0}}) parameter(0)
  %x = f32[4]{{0}} get-tuple-element(%s), index=1
  %work = f32[4]{{0}} fusion(%x), kind=kLoop, calls=%inner, {CYCLES % 100}
  %sum.all = f32[1024]{{0}} all-reduce(%work), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %n = s32[]{{:T(128)S(6)}} get-tuple-element(%s), index=0
  ROOT %out = (s32[]{{:T(128)}}, f32[4]{{0}}) tuple(%n, %work)
}}

%test (t: (s32[], f32[4])) -> pred[] {{
  %t = (s32[]{{:T(128)}}, f32[4]{{0}}) parameter(0)
  %m = s32[]{{:T(128)}} get-tuple-element(%t), index=0
  %bound = s32[]{{:T(128)}} constant(5)
  ROOT %less = pred[]{{:T(512)}} compare(%m, %bound), direction=LT
}}

ENTRY %main (w: bf16[16,128], h: f32[1024], z: (s32[], f32[4])) -> f32[4] {{
  %w = bf16[16,128]{{1,0}} parameter(0)
  %h = f32[1024]{{0}} parameter(1)
  %z = (s32[]{{:T(128)}}, f32[4]{{0}}) parameter(2)
  %fetch = (bf16[16,128]{{1,0:S(1)}}, bf16[16,128]{{1,0}}, u32[]{{:S(2)}}) copy-start(%w)
  %offload = (f32[1024]{{0:S(5)}}, f32[1024]{{0}}, u32[]{{:S(2)}}) copy-start(%h)
  %start.f = (bf16[16,128]{{1,0}}, bf16[128,128]{{1,0}}) fusion(%w), kind=kCustom, calls=%begin
  %along.f = bf16[128,128]{{1,0}} fusion(%start.f), kind=kOutput, calls=%along, {CYCLES % 3000}
  %fetched = bf16[16,128]{{1,0:S(1)}} copy-done(%fetch)
  %done.f = bf16[128,128]{{1,0}} fusion(%along.f), kind=kCustom, calls=%finish
  %scalar = s32[]{{:T(128)}} add(%c0, %c0)
  %while.1 = (s32[]{{:T(128)}}, f32[4]{{0}}) while(%z), condition=%test, body=%body
  %kernel.1 = bf16[8,128]{{1,0}} custom-call(%w), custom_call_target="tpu_custom_call", backend_config={{}}
  %large = f32[4096]{{0}} dynamic-update-slice(%h, %h, %scalar)
  %offloaded = f32[1024]{{0:S(5)}} copy-done(%offload)
  ROOT %r1 = f32[4]{{0}} get-tuple-element(%while.1), index=1
}}
"""


def test_what_takes_time_stands_in_the_order_of_the_text():
    kinds = [(o.name, o.kind, o.queue) for o in read_schedule(STEP)]
    assert kinds == [
        ("fetch", "start", "dma"),
        ("offload", "start", "host"),
        ("gather.1", "start", "ici"),
        ("along.f", "run", "compute"),
        ("fetched", "done", "compute"),
        ("done.f", "done", "compute"),
        ("while.1", "loop", "compute"),
        ("kernel.1", "run", "kernels"),
        ("large", "run", "compute"),
        ("offloaded", "done", "compute"),
    ]


@pytest.fixture
def named() -> dict[str, Operation]:
    return {o.name: o for o in operations(read_schedule(STEP))}


def test_every_done_waits_for_a_start_before_it():
    begun = set()
    for o in operations(read_schedule(STEP)):
        if o.kind == "start":
            begun.add(o.token)
        elif o.kind == "done":
            assert o.token in begun, o.name


def test_bytes_and_cycles(named):
    assert named["fetch"].bytes == 16 * 128 * 2  # into VMEM: read from HBM once
    assert named["offload"].bytes == 1024 * 4
    assert named["gather.1"].bytes == 128 * 128 * 2  # the whole side
    assert named["along.f"].cycles == 3000 and named["work"].cycles == 100
    assert named["large"].bytes == 4096 * 4 and not named["large"].cycles


def test_a_collective_of_a_sparsecore_is_found_behind_its_wrapper():
    """As programs for tpu7x have them: the start calls a computation whose custom call names another."""
    wrapped = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%gathers (p: bf16[16,128]) -> bf16[128,128] {
  %p = bf16[16,128]{1,0} parameter(0)
  ROOT %gather = bf16[128,128]{1,0} all-gather(%p), replica_groups=mesh['x'=8] {'x'}, dimensions={0}
}, execution_thread="sparsecore"

%wrapper (q: bf16[16,128]) -> bf16[128,128] {
  %q = bf16[16,128]{1,0} parameter(0)
  ROOT %call = bf16[128,128]{1,0} custom-call(%q), called_computations={%gathers}
}, execution_thread="sparsecore"

ENTRY %main (w: bf16[16,128]) -> bf16[128,128] {
  %w = bf16[16,128]{1,0} parameter(0)
  %begun = ((), (), u32[]{:S(8)}) async-start(), async_execution_thread="sparsecore", calls=%wrapper
  %goes = ((bf16[16,128]{1,0}), bf16[128,128]{1,0}, u32[]{:S(8)}) async-update(%begun, %w)
  ROOT %ended = bf16[128,128]{1,0} async-done(%goes)
}
"""
    start, done = operations(read_schedule(wrapped))
    assert (start.kind, start.queue, start.opcode) == ("start", "ici", "all-gather")
    assert start.bytes == 128 * 128 * 2 and len(start.members) == 8
    assert done.kind == "done" and done.token == start.token


def test_a_host_transfer_says_its_direction(named):
    assert named["offload"].opcode == "to host"


def test_loops_hold_their_body_and_its_trips(named):
    loop = named["while.1"]
    assert loop.trips == 5
    assert [o.name for o in loop.bodies[0]] == ["work", "sum.all"]


def test_groups_by_mesh_and_by_iota(named):
    assert named["gather.1"].members == tuple(range(8))
    assert named["sum.all"].members == (0, 2, 4, 6)  # [4,2] transposed: the first column


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("replica_groups={{0,3},{1,2}}", (0, 3)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", (0, 4)),
        ("dimensions={0}", tuple(range(8))),
    ],
)
def test_members_of_a_group(text, members):
    found = read_schedule(STEP.replace("replica_groups=[2,4]<=[4,2]T(1,0)", text))
    assert next(o for o in operations(found) if o.name == "sum.all").members == members


def test_of_a_conditional_all_branches_are_read():
    line = "  %choice = f32[4]{0} conditional(%p, %x, %x), branch_computations={%inner, %body}\n"
    found = read_schedule(STEP.replace("  %large =", line + "  %large ="))
    branch = next(o for o in found if o.name == "choice")
    assert branch.kind == "branch" and len(branch.bodies) == 2
    assert [o.name for o in branch.bodies[1]] == ["work", "sum.all"]


@pytest.mark.parametrize("cut", [0, 400, 2000, len(STEP) - 300])
def test_text_that_is_cut_off_gives_less_and_never_fails(cut):
    assert len(list(operations(read_schedule(STEP[:cut])))) <= len(
        list(operations(read_schedule(STEP)))
    )
