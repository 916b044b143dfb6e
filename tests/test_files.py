"""Writes are whole or not at all; the manifest sees every altered byte; system errors are explained, with a fix."""

import errno
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext import files
from minitext.errors import UserError


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
    (tmp_path / "disk" / "a").mkdir(parents=True)
    (tmp_path / "home").symlink_to("disk")
    folder = tmp_path / "home" / "a"
    (tmp_path / "home" / "ab").write_text("")
    with (tmp_path / "home" / "ab").open():
        assert not files.has_open_files(folder)
    with (folder / "b").open("w"):
        (folder / "b").unlink()
        assert files.has_open_files(folder) == Path("/proc/self/fd").exists()
    assert not files.has_open_files(folder)


def test_a_draft_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.txt"
    files.write(path, "old")
    with pytest.raises(ZeroDivisionError), files.draft(path) as new:
        new.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    files.write(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127, "𝄞" * 63])
def test_the_longest_names_can_be_written(tmp_path, name):
    files.check_new_file("--plot", tmp_path / name)
    files.write(tmp_path / name, "text")
    assert os.listdir(tmp_path) == [name]


def test_a_file_is_not_written_where_its_folder_has_gone(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.write(tmp_path / "gone" / "a.txt", "new")
    assert os.listdir(tmp_path) == []


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "above" / "folder"
    with pytest.raises(ZeroDivisionError), files.new_folder(path) as new:
        (new / "a").write_text("half")
        raise ZeroDivisionError
    assert os.listdir(path.parent) == []
    with files.new_folder(path) as new:
        (new / "a").write_text("whole")
        assert not path.exists()
    assert (path / "a").read_text() == "whole"
    with pytest.raises(OSError, match="not empty"), files.new_folder(path) as new:
        (new / "a").write_text("other")
    assert (path / "a").read_text() == "whole" and os.listdir(path.parent) == ["folder"]


def test_of_two_that_write_a_cache_entry_the_first_provides_it(tmp_path):
    path = tmp_path / "entry"
    with files.new_cache_entry(path) as slow:
        with files.new_cache_entry(path) as fast:
            (fast / "a").write_text("fast")
        (slow / "a").write_text("slow")
    assert (path / "a").read_text() == "fast" and os.listdir(tmp_path) == ["entry"]


def test_a_cache_file_that_is_damaged_or_cannot_be_written_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITEXT_CACHE", "~nobodyhere/x")
    with pytest.raises(UserError, match="~nobodyhere/x is in no user's home"):
        files.cache_dir()
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path / "cache"))
    assert files.read_cache("a.json") == {}
    files.write_cache("a.json", {"b": 1.5})
    assert files.read_cache("a.json") == {"b": 1.5}
    for damage in ("", "{", "[1]", "null", "\0"):
        (tmp_path / "cache" / "a.json").write_text(damage)
        assert files.read_cache("a.json") == {}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path / "file" / "below"))
    files.write_cache("a.json", {"b": 1.5})
    assert files.read_cache("a.json") == {}
