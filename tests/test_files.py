"""The manifest sees every altered byte; system errors are explained, with how to mend them."""

import errno
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext import files


@pytest.fixture
def sealed(tmp_path):
    (tmp_path / "a" / "empty folder").mkdir(parents=True)
    (tmp_path / "a" / "é").write_bytes(random.Random(0).randbytes(5000))
    (tmp_path / "nothing").write_bytes(b"")
    (tmp_path / "one").write_bytes(b"1")
    files.seal(tmp_path)
    return tmp_path


def test_what_was_sealed_is_whole_and_other_files_are_of_no_concern(sealed):
    assert files.verify(sealed) is None
    (sealed / "a" / "note").write_text("mine")
    assert files.verify(str(sealed)) is None


@pytest.mark.parametrize("name", ["one", "a/é", files.MANIFEST])
def test_every_flipped_bit_is_seen(sealed, name):
    path = sealed / name
    good = path.read_bytes()
    rng = random.Random(name)
    for place in rng.sample(range(len(good)), min(len(good), 300)):
        bad = bytearray(good)
        bad[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        fault = files.verify(sealed)
        assert fault is not None and fault.startswith(f"{name} "), (place, fault)
    path.write_bytes(good)
    assert files.verify(sealed) is None


@pytest.mark.parametrize(
    ("name", "size", "fault"),
    [
        ("a/é", 4999, "a/é has 4999 bytes, not 5000"),
        ("a/é", 5001, "a/é has 5001 bytes, not 5000"),
        ("one", 0, "one has 0 bytes, not 1"),
        ("nothing", 1, "nothing has 1 bytes, not 0"),
        (files.MANIFEST, 0, "manifest.json is not what was written"),
        (files.MANIFEST, 100, "manifest.json is not what was written"),
    ],
)
def test_every_other_length_is_seen(sealed, name, size, fault):
    os.truncate(sealed / name, size)
    assert files.verify(sealed) == fault


@pytest.mark.parametrize("name", ["one", "nothing", files.MANIFEST])
def test_every_missing_file_is_seen(sealed, name):
    (sealed / name).unlink()
    assert files.verify(sealed) == f"{name} is missing"
    (sealed / name).mkdir()
    assert files.verify(sealed) == f"{name} cannot be read (Is a directory)"


@settings(max_examples=200, deadline=None)
@given(
    text=st.one_of(st.binary(), st.sampled_from([b"[]", b"1", b'{"files": 1}', b'{"files": []}']))
)
def test_no_content_of_the_manifest_is_an_exception(tmp_path_factory, text):
    directory = tmp_path_factory.getbasetemp()
    (directory / files.MANIFEST).write_bytes(text)
    assert files.verify(directory) == "manifest.json is not what was written"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_errors_of_the_system_and_of_tensorstore_are_explained_alike(number):
    from_store = ValueError(
        f"UNKNOWN: Failed to write: {os.strerror(number)} [os_error_code='{number}']"
    )
    told = files.explain(OSError(number, "said otherwise", "/a/path"))
    assert told == files.explain(from_store)
    assert told is not None and told.startswith(
        f"{os.strerror(number)} ({errno.errorcode[number]}): "
    )
    assert ("free some space" in told) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert "choose a run.dir that can be written" in told


@pytest.mark.parametrize(
    "error", [ValueError("no number"), TimeoutError("a barrier"), KeyError(28)]
)
def test_other_errors_are_not_explained_away(error):
    assert files.explain(error) is None


def test_open_files_are_seen_also_when_they_are_deleted(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (tmp_path / "ab").write_text("")
    with (tmp_path / "ab").open():
        assert not files.has_open_files(folder)
    with (folder / "b").open("w"):
        (folder / "b").unlink()
        assert files.has_open_files(folder) == Path("/proc/self/fd").exists()
    assert not files.has_open_files(folder)
