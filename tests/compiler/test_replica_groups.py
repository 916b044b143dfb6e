"""Sizes of groups, in every way that compilers write them, and in text that none has written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitext.compiler.replica_groups import group_size


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
