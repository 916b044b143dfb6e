"""Event files are those of tensorboardX, byte for byte."""

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.observability.events import EventsWriter, _checksum

TIME = 1.8e9 + 1 / 3  # of every event
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)
NUMBERS = st.floats() | st.integers(-(2**63), 2**63) | st.sampled_from([1e39, -1e300, 0, 0.0, -0.0])
RECORDS = st.lists(
    st.tuples(st.integers(1, 2**63 - 1), st.dictionaries(NAMES, NUMBERS, max_size=30)), max_size=5
)


def by_tensorboardx(directory, first_step, records):
    from tensorboardX.event_file_writer import EventsWriter as Theirs
    from tensorboardX.proto import event_pb2

    proto: Any = event_pb2  # its classes are created at import
    writer = Theirs(str(directory / "events"))
    log = proto.SessionLog(status=proto.SessionLog.START)
    writer.write_event(proto.Event(wall_time=TIME, step=first_step, session_log=log))
    for step, scalars in records:
        event = proto.Event(wall_time=TIME, step=step)
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=value)
        event.summary.SetInParent()
        writer.write_event(event)
    writer.close()
    (path,) = directory.iterdir()
    return path.read_bytes()


@settings(max_examples=30)
@given(first_step=st.integers(1, 10**12), records=RECORDS)
def test_files_are_those_of_tensorboardx(tmp_path_factory, first_step, records):
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: TIME)
        with EventsWriter(ours, first_step) as writer:
            for step, scalars in records:
                writer.write(step, scalars)
        (path,) = ours.iterdir()
        assert "tfevents" in path.name  # by which TensorBoard knows an event file
        assert path.read_bytes() == by_tensorboardx(theirs, first_step, records)


def test_a_checksum_is_that_of_the_standard():
    """RFC 3720, appendix B.4: 32 bytes of zeros."""
    crc = 0x8A9136AA
    assert _checksum(bytes(32)) == struct.pack(
        "<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 2**32 - 1
    )


def test_a_run_that_goes_on_at_once_keeps_the_file_before_its_own(tmp_path):
    for step in (1, 2):
        EventsWriter(tmp_path, step).close()
    assert len(list(tmp_path.iterdir())) == 2
