"""The reader of compiled programs, on small ones and on damaged text; test_aot has the real ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitext import hlo

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


def test_what_goes_between_slices_is_a_kind_of_its_own():
    over = LOOP.replace(
        "  %loop =",
        "  %send = (f32[4]{0}, u32[], token[]) send(%v, %after), channel_id=9, is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}\n  %loop =',
    )
    assert hlo.collectives(over) == hlo.collectives(LOOP) | {"all-reduce (dcn)": (1, 16)}


def test_a_trip_count_that_the_compiler_noted_wins():
    noted = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert hlo.collectives(noted)["all-gather"][0] == 7


def test_a_loop_without_a_bound_counts_once():
    unknown = LOOP.replace("s32[]{:T(128)} constant(40)", "s32[]{:T(128)} copy(%other)")
    assert hlo.collectives(unknown)["all-gather"][0] == 1


def test_op_names():
    assert hlo.op_names(LOOP) == {"start": "state['w']"}
    assert hlo.argument_names(LOOP) == {0: "state['w']"}


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


@given(data=st.data())
def test_damaged_text_raises_nothing(data):
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(LOOP))] * 2)))
    noise = data.draw(st.text(alphabet="{}()[]%=,:. \n09az", max_size=8))
    place = data.draw(st.integers(start, end))
    cut = LOOP[start:place] + noise + LOOP[place:end]
    for count, size in hlo.collectives(cut).values():
        assert count >= 0 and size >= 0
    hlo.op_names(cut)
    hlo.argument_names(cut)
