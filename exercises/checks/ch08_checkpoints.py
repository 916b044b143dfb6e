import contextlib
import hashlib
import itertools
import json
import math
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from minitext.book.grading import Exercise

# --------------------------------------------------------------------------- crash_safe_save

crash_safe = Exercise(
    "08.crash_safe_save",
    title="A save that a crash can't tear",
    function="save_step",
    minutes=30,
    points=10,
    statement="""
Write `save_step(disk, step, files)`. It saves a checkpoint as a folder named after its step, such as `300`, and then
deletes the older steps. A reader takes the folder with the largest number. Whenever the machine stops, that folder must
be whole: either the new step with all its files, or the previous step with all of its own.

You write on a *simulated disk*, which the checks stop between your calls and in the middle of them. A path is a
folder's name, or `folder/file`; `""` is the disk itself.

| call | what it does |
|---|---|
| `disk.list("")` | the names on the disk; `disk.list("300")` those in a folder |
| `disk.mkdir("a")` | makes a folder; `FileExistsError` if there is one |
| `disk.write("a/b", data)` | makes or replaces a file; stopped halfway, it has half of the bytes |
| `disk.fsync("a/b")` | the file's *content* is on the disk when this returns |
| `disk.fsync("a")` | the *names* in this folder are on the disk when this returns; `fsync("")` for the disk itself |
| `disk.rename("a", "b")` | renames a folder; `FileExistsError` if `b` exists |
| `disk.delete("a")` | deletes a folder, file by file |

- After `kill -9` the disk is as your calls left it. A power failure loses content that `fsync` hasn't flushed. And each
  change of a name that wasn't flushed may or may not have happened, whatever the order of your calls.
- When `save_step` returns, the new step survives a power failure, and no other step is left. (A deleted step may come
  back after a power failure.)
- An earlier save that was killed may have left folders whose names end in `.tmp`. They aren't steps and their contents
  are useless; none of them may be left either.
- No other process saves. Don't catch exceptions: the machine is gone.
""",
    hints=(
        "Write down the calls in order, and after each ask what the reader finds if the machine stops here. The name "
        "`300` must not exist before everything in it is on the disk.",
        "Three things need an `fsync` each: the content of each file, the names in the new folder and, after the "
        "rename, the names on the disk. What may you delete before the last of them?",
        "Delete what ends in `.tmp`; `mkdir` a `.tmp` folder; `write` and `fsync` each file; `fsync` "
        'the folder; `rename` it; `fsync("")`; only then delete the older steps.',
    ),
    forbid=("minitext.files", "minitext.checkpoint.checkpointer"),
)


class Stopped(BaseException):
    """The machine has stopped."""


class Disk:
    """Folders of files that remember what was flushed, and stop in or before a chosen call."""

    def __init__(self, folders, stop=None):
        # A folder: the names that are seen, and those that are on the disk. A file: its content.
        self.folders, self.flushed, self.pending = {}, {}, []
        self.stop, self.calls, self.stopped = stop, 0, False
        for name, files in folders.items():
            made = {n: {"now": d, "flushed": d} for n, d in files.items()}
            self.folders[name] = {"now": dict(made), "flushed": dict(made)}
        self.flushed = dict(self.folders)

    def _begin(self):
        """Whether this call is stopped in the middle."""
        if self.stopped or (self.stop is not None and self.calls == self.stop // 2):
            if self.stopped or self.stop % 2 == 0:
                self.stopped = True
                raise Stopped
            return True
        self.calls += 1
        return False

    def _end(self, half):
        if half:
            self.stopped = True
            raise Stopped

    def _folder(self, name):
        if name not in self.folders:
            raise FileNotFoundError(f"there is no folder {name!r}")
        return self.folders[name]

    def _change(self, *changes):
        """Changes names on the disk itself: pairs of name and folder, or None to remove it."""
        self.pending.append(changes)
        _apply(self.folders, changes)

    def list(self, folder):
        half = self._begin()
        found = sorted(self.folders if folder == "" else self._folder(folder)["now"])
        self._end(half)
        return found

    def mkdir(self, name):
        half = self._begin()
        if not name or "/" in name:
            raise ValueError(f"{name!r} is not a folder's name")
        if name in self.folders:
            raise FileExistsError(f"{name!r} exists")
        if not half:
            self._change((name, {"now": {}, "flushed": {}}))
        self._end(half)

    def write(self, path, data):
        half = self._begin()
        folder, _, name = path.partition("/")
        if not name or "/" in name:
            raise ValueError(f"{path!r} is not a file in a folder")
        files = self._folder(folder)["now"]
        data = bytes(data)
        # A file that is written again is emptied first, so nothing of what it held can be relied on.
        files[name] = {"now": data[: len(data) // 2] if half else data, "flushed": b""}
        self._end(half)

    def fsync(self, path):
        half = self._begin()
        folder, _, name = path.partition("/")
        if name:
            files = self._folder(folder)["now"]
            if name not in files:
                raise FileNotFoundError(f"there is no file {path!r}")
            if not half:
                files[name]["flushed"] = files[name]["now"]
        elif folder:
            found = self._folder(folder)
            if not half:
                found["flushed"] = dict(found["now"])
        elif not half:
            self.flushed, self.pending = dict(self.folders), []
        self._end(half)

    def rename(self, old, new):
        half = self._begin()
        folder = self._folder(old)
        if new in self.folders:
            raise FileExistsError(f"{new!r} exists")
        if not half:
            self._change((old, None), (new, folder))
        self._end(half)

    def delete(self, name):
        half = self._begin()
        folder = self._folder(name)
        for file in sorted(folder["now"])[: len(folder["now"]) // 2 + 1 if half else None]:
            del folder["now"][file]
        if not half:
            self._change((name, None))
        self._end(half)

    def killed(self):
        """What is there after kill -9: all that was done."""
        return {n: {f: c["now"] for f, c in d["now"].items()} for n, d in self.folders.items()}

    def content_lost(self):
        """After a power failure: every name is there, and no content that was not flushed."""
        return {n: {f: c["flushed"] for f, c in d["now"].items()} for n, d in self.folders.items()}

    def names_in_folders_lost(self):
        return {n: _files(d) for n, d in self.folders.items()}

    def names_lost(self):
        """After power failures in which none, or any one, of the changes of names got through."""
        for changes in [(), *self.pending]:
            folders = dict(self.flushed)
            _apply(folders, changes)
            for when in ("flushed", "now"):  # deleting a folder's files may have got further
                yield {n: _files(d, when) for n, d in folders.items()}


def _apply(folders, changes):
    for name, folder in changes:
        if folder is None:
            folders.pop(name, None)
        else:
            folders[name] = folder


def _files(folder, when="flushed"):
    names = folder[when]
    return {f: c["flushed"] for f, c in names.items() if f in folder["flushed"]}


def numbered(found):
    return sorted((name for name in found if name.isdigit()), key=int)


def look(found, old_step, old, step, new):
    """What a reader finds: "old", "new", "nothing", or what is wrong with the newest step."""
    names = numbered(found)
    if not names:
        return "nothing"
    files = found[names[-1]]
    for name, want, word in ((str(old_step), old, "old"), (str(step), new, "new")):
        if names[-1] == name:
            if files == want:
                return word
            lacks = "without some of its files" if set(files) < set(want) else "with other content"
            return f"the {word} step {lacks}"
    return f"a step {names[-1]} that nobody saved"


def some_files(t, count):
    names = t.rng.choice(["weights", "moments", "facts", "place", "manifest", "key"], count, False)
    return {str(n): t.rng.bytes(int(t.rng.integers(8, 40))) for n in names}


def crash_everywhere(fn, t, views, why, leftovers=None):
    """Stops the machine before and in every call, and looks at the disk in each of `views`."""
    old_step = int(t.rng.integers(1, 9)) * 100 - int(t.rng.integers(0, 2))
    step = old_step + int(t.rng.integers(1, 3)) * 100
    old, new = some_files(t, 3), some_files(t, 4)
    before = {str(old_step): old} | (leftovers(step, t) if leftovers else {})
    disk = Disk(before)
    fn(disk, step, dict(new))
    calls = disk.calls
    t.true(calls > 0, "you made no call of the disk", observed=0)
    for stop in range(2 * calls + 1):
        disk = Disk(before, stop)
        with contextlib.suppress(Stopped):
            fn(disk, step, dict(new))
        for found in views(disk):
            seen = look(found, old_step, old, step, new)
            place = f"{'in' if stop % 2 else 'before'} call {stop // 2 + 1} of {calls}"
            t.true(
                seen in ("old", "new"),
                f"{why}: stopped {place}, the reader finds {seen}",
                observed=[ord(c) for c in seen],
            )


@crash_safe.check("nothing stops it")
def _(fn, t):
    old, new, step = some_files(t, 2), some_files(t, 5), int(t.rng.integers(100, 900))
    disk = Disk({"9": old, "50": old, "90": old})
    fn(disk, step, dict(new))
    found = disk.killed()
    t.true(str(step) in found, f"there is no folder {step}", observed=sorted(found)[:1] == [])
    t.true(found[str(step)] == new, "the new step holds other files than those given", observed=1)
    t.equal(numbered(found), [str(step)], why="the steps that are left")
    disk, new = Disk({}), some_files(t, 3)
    new |= {next(iter(new)): b""}
    fn(disk, 0, dict(new))
    t.true(disk.killed() == {"0": new}, "the very first step, step 0", observed=2)


@crash_safe.check("killed at every call")
def _(fn, t):
    crash_everywhere(fn, t, lambda disk: [disk.killed()], "kill -9")


@crash_safe.check("the power fails, and content is lost")
def _(fn, t):
    crash_everywhere(
        fn, t, lambda disk: [disk.content_lost()], "content that was not flushed is lost"
    )


@crash_safe.check("the power fails, and names in a folder are lost")
def _(fn, t):
    why = "names in unflushed folders are lost"
    crash_everywhere(fn, t, lambda disk: [disk.names_in_folders_lost()], why)


@crash_safe.check("the power fails, and names on the disk are lost")
def _(fn, t):
    why = "unflushed changes of names may or may not happen"
    crash_everywhere(fn, t, lambda disk: disk.names_lost(), why)


@crash_safe.check("the power fails after the save returned")
def _(fn, t):
    old, new = some_files(t, 2), some_files(t, 3)
    disk = Disk({"70": old})
    fn(disk, 80, dict(new))
    for found in (disk.content_lost(), disk.names_in_folders_lost(), *disk.names_lost()):
        seen = look(found, 70, old, 80, new)
        t.true(seen == "new", f"the reader finds {seen}", observed=[ord(c) for c in seen])


@crash_safe.check("leftovers of a killed save")
def _(fn, t):
    def leftovers(step, t):
        return {f"{step}.tmp": {"stale": b"half of someth"}, "7.tmp": some_files(t, 2)}

    disk = Disk({"70": some_files(t, 2)} | leftovers(80, t))
    new = some_files(t, 3)
    fn(disk, 80, dict(new))
    found = disk.killed()
    t.true(
        "stale" not in found.get("80", {}), "a file of the killed save is in step 80", observed=3
    )
    t.equal(sorted(found), ["80"], why="the names that are left")
    crash_everywhere(
        fn, t, lambda disk: [disk.killed(), disk.content_lost()], "leftovers", leftovers
    )


def save_variant(
    clean="all",
    draft=lambda step: f"{step}.tmp",
    make=lambda disk, name: disk.mkdir(name),
    sync_files=True,
    sync_late=False,
    sync_folder=True,
    sync_disk="before",
    delete="after",
):
    """A correct save_step but for what is passed."""

    def save_step(disk, step, files):
        old = [name for name in disk.list("") if name.isdigit()]
        if clean:
            for name in disk.list(""):
                if name.endswith(".tmp") and (clean == "all" or name == draft(step)):
                    disk.delete(name)
        if delete == "first":
            for name in old:
                disk.delete(name)
        name = draft(step)
        make(disk, name)
        for file, data in files.items():
            disk.write(f"{name}/{file}", data)
            if sync_files and not sync_late:
                disk.fsync(f"{name}/{file}")
        if sync_folder:
            disk.fsync(name)
        if name != str(step):
            disk.rename(name, str(step))
        if sync_late:
            for file in files:
                disk.fsync(f"{step}/{file}")
        if sync_disk == "before":
            disk.fsync("")
        if delete == "after":
            for other in old:
                disk.delete(other)
        if sync_disk == "after":
            disk.fsync("")

    return save_step


def wrong_save(name, hint, **changes):
    fn = save_variant(**changes)
    fn.__name__ = name
    crash_safe.mutant(hint)(fn)


wrong_save(
    "in_place",
    "You write straight into the folder that the reader looks for. If you're stopped halfway, it exists but isn't "
    "whole. Write under another name that ends in `.tmp`, and rename once everything is written.",
    draft=str,
)
wrong_save(
    "deletes_first",
    "You delete the old step before the new one has its name. If you're stopped between the two, the reader finds "
    "nothing, because a `.tmp` folder isn't a step yet. Rename, flush, and only then delete.",
    delete="first",
)
wrong_save(
    "no_fsync_of_files",
    "You never flush the files. Their names may reach the disk before their content, and after a power failure "
    "the files exist but are empty. fsync each file before the rename.",
    sync_files=False,
)
wrong_save(
    "files_flushed_after_the_rename",
    "You flush the files after the rename. In between, the new name exists but its content may not. Flush all the "
    "content first, then rename.",
    sync_late=True,
)
wrong_save(
    "no_fsync_of_the_folder",
    "You flush the files' content but not their names. A file's name belongs to its folder: fsync "
    "the new folder too, before the rename.",
    sync_folder=False,
)
wrong_save(
    "no_fsync_of_the_disk",
    'You never flush the rename. The steps\' names belong to the disk itself: call fsync("") after the rename, '
    "before you delete anything.",
    sync_disk=None,
)
wrong_save(
    "disk_flushed_after_deleting",
    "You delete the old step before you flush the rename. The disk may carry out the later change but not the "
    'earlier one. Call fsync("") between the rename and the deletion.',
    sync_disk="after",
)
wrong_save(
    "keeps_old_steps",
    "You leave the older steps. Delete them once the new one is on the disk.",
    delete=None,
)
wrong_save(
    "leftovers_stay",
    "The `.tmp` folder of a killed save gets in your way or stays forever. Delete every name that ends in `.tmp` "
    "before you start.",
    clean=None,
)
wrong_save(
    "deletes_only_its_own",
    "A `.tmp` folder of an earlier save is left over. Delete every name that ends in `.tmp`, not only your own.",
    clean="own",
)
wrong_save(
    "writes_into_leftovers",
    "You continue in the `.tmp` folder that a killed save left, so its contents become part of your step. Delete "
    "such folders first, and make a new one.",
    clean=None,
    make=lambda disk, name: None if name in disk.list("") else disk.mkdir(name),
)


@crash_safe.mutant(
    "You delete the step that you have just saved together with the older ones. List the old steps *before* "
    "the rename, or leave out the new one."
)
def deletes_the_new_one(disk, step, files):
    save_variant(delete="never")(disk, step, files)
    for name in disk.list(""):
        disk.delete(name)


@crash_safe.mutant(
    "You put `.tmp` folders and steps together when you look for older steps, or you compare names as "
    "numbers without asking whether they are digits. Only a name made of digits is a step."
)
def takes_all_names_for_steps(disk, step, files):
    [int(name) for name in disk.list("")]
    save_variant()(disk, step, files)


# ----------------------------------------------------------------------------------- reshard

reshard = Exercise(
    "08.reshard",
    title="From any devices to any others",
    function="read_piece",
    minutes=30,
    points=10,
    statement="""
Eight devices saved an array, each its own piece. Now the array is wanted on two devices, or three, or one, split in a
different way. Write `read_piece(saved, read, want, dtype)`, which builds one new device's piece from the saved pieces.

A *region* says which part of the whole array a piece is: a tuple with one `(start, stop)` for each dimension, as in a
slice. `saved` lists the regions of the pieces on the disk, and `read(i)` reads the whole piece `saved[i]`, a NumPy
array of that region's shape.

- Read only pieces that have an element in common with `want`, and read each of them once: the checks count.
- If devices held copies of a piece, its region is in `saved` several times. Read only one of them.
- The result has the shape of `want` and the given `dtype`, which may be one of JAX's own, such as bfloat16.
- Arrays have any number of dimensions. A scalar's region is `()`. A region with `start == stop` has no elements.
- If an element of `want` is in no saved piece, raise a `ValueError`. Otherwise the array would have a hole filled with
  arbitrary memory, and training would continue with it.
""",
    hints=(
        "Draw one dimension: a saved piece from 4 to 8, a wanted one from 6 to 12. Which elements are in both? Where "
        "are they in the saved piece, and where in the wanted one?",
        "In each dimension, the overlap goes from `max(starts)` to `min(stops)`. If any dimension has no overlap, "
        "there is none at all. Subtract the wanted start to index the result, and the saved start to index what you "
        "read.",
        "`piece[tuple(slice(a - c, b - c) ...)] = read(i)[tuple(slice(a - e, b - e) ...)]`, where (a, b) is the "
        "overlap, c the wanted start and e the saved one. Count the elements that you fill, and keep a set of the "
        "regions that you have read.",
    ),
    forbid=("jax", "tensorstore", "orbax"),
)


class Pieces:
    """An array that was saved in pieces; counts what is read."""

    def __init__(self, t, array, splits, copies=1, leave_out=()):
        self.array = array
        cuts = [
            list(itertools.pairwise(edges))
            for edges in (
                [0, *sorted(int(x) for x in t.rng.choice(np.arange(1, n), s - 1, False)), n]
                for n, s in zip(array.shape, splits, strict=True)
            )
        ]
        places = [()]
        for ranges in cuts:
            places = [(*place, r) for place in places for r in ranges]
        places = [p for i, p in enumerate(places) if i not in leave_out] * copies
        self.places = [places[i] for i in t.rng.permutation(len(places))]
        self.reads = []

    def read(self, index):
        self.reads.append(int(index))
        found = self.part(self.places[index]).copy()
        found.setflags(write=False)
        return found

    def part(self, place):
        return self.array[tuple(slice(a, b) for a, b in place)]

    def needed(self, want):
        """The bytes that must be read: those of the pieces that overlap, without copies."""
        found = {
            p
            for p in self.places
            if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(p, want, strict=True))
        }
        return sum(self.part(p).nbytes for p in found)

    def read_bytes(self):
        return sum(self.part(self.places[i]).nbytes for i in self.reads)


def random_array(t, shape, dtype=np.float32):
    return t.rng.integers(-99, 99, shape).astype(dtype)


def random_place(t, shape):
    return tuple(tuple(sorted(int(x) for x in t.rng.choice(n + 1, 2, False))) for n in shape)


def compare_piece(fn, t, pieces, want, why):
    pieces.reads.clear()
    got = fn(list(pieces.places), pieces.read, want, pieces.array.dtype)
    t.equal(isinstance(got, np.ndarray), True, why=f"it should be a NumPy array, {why}")
    t.equal(str(got.dtype), str(pieces.array.dtype), why=f"the dtype, {why}")
    if got.dtype.kind == "i":
        t.equal(got, pieces.part(want), why=why)
    else:
        part = pieces.part(want).astype(np.float64)
        t.close(got.astype(np.float64), part, atol=0, rtol=0, why=why)
    t.equal(pieces.read_bytes(), pieces.needed(want), why=f"bytes read, {why}")


@reshard.check("eight rows of pieces, two devices")
def _(fn, t):
    array = random_array(t, (16, 5))
    pieces = Pieces(t, array, (1, 1))
    pieces.places = [((2 * i, 2 * i + 2), (0, 5)) for i in range(8)]
    for want in (((0, 8), (0, 5)), ((8, 16), (0, 5)), ((0, 16), (0, 5))):
        compare_piece(fn, t, pieces, want, f"rows {want[0]} of pieces of two rows")


@reshard.check("pieces that don't line up")
def _(fn, t):
    for shape, splits in (((23,), (5,)), ((13, 17), (4, 3)), ((5, 7, 6), (2, 3, 2))):
        pieces = Pieces(t, random_array(t, shape), splits)
        for _ in range(6):
            compare_piece(fn, t, pieces, random_place(t, shape), f"shape {list(shape)} in {splits}")


@reshard.check("neighbours that only touch")
def _(fn, t):
    pieces = Pieces(t, random_array(t, (12, 12)), (1, 1))
    pieces.places = [((i, i + 3), (j, j + 4)) for i in range(0, 12, 3) for j in range(0, 12, 4)]
    compare_piece(fn, t, pieces, ((3, 6), (4, 8)), "exactly one piece")
    compare_piece(fn, t, pieces, ((4, 5), (5, 7)), "inside one piece")


@reshard.check("copies of a piece")
def _(fn, t):
    pieces = Pieces(t, random_array(t, (11, 8)), (3, 2), copies=4)
    for _ in range(3):
        compare_piece(fn, t, pieces, random_place(t, (11, 8)), "each piece saved by four devices")


@reshard.check("scalars, empty pieces and other dtypes")
def _(fn, t):
    scalar = Pieces(t, np.asarray(t.rng.integers(1, 99), np.int32), ())
    compare_piece(fn, t, scalar, (), "a scalar")
    for dtype in (ml_dtypes.bfloat16, np.int8, np.float64):
        pieces = Pieces(t, random_array(t, (9, 6), dtype), (3, 2))
        compare_piece(fn, t, pieces, random_place(t, (9, 6)), f"dtype {np.dtype(dtype)}")
        compare_piece(fn, t, pieces, ((4, 4), (0, 6)), "a piece without elements")
    large = Pieces(t, t.rng.integers(2**60, 2**62, (9, 6)), (3, 2))
    compare_piece(fn, t, large, ((2, 8), (1, 6)), "int64 beyond what a float holds")


@reshard.check("a hole")
def _(fn, t):
    pieces = Pieces(t, random_array(t, (8, 6)), (4, 2), leave_out=(3,))
    places, whole = list(pieces.places), ((0, 8), (0, 6))
    for there, why in ((places, "one saved piece is missing"), ([], "nothing was saved at all")):
        t.raises(ValueError, fn, there, pieces.read, whole, pieces.array.dtype, why=why)
    pieces = Pieces(t, random_array(t, (8, 6)), (1, 1))
    places = [((2 * i, 2 * i + 2), (j, j + 3)) for i in range(4) for j in (0, 3)]
    pieces.places = [place for place in places if place != ((2, 4), (0, 3))]
    want, why = ((2, 4), (0, 6)), "enough was saved, but not of this piece"
    t.raises(ValueError, fn, list(pieces.places), pieces.read, want, np.float32, why=why)
    t.raises(ValueError, fn, [], pieces.read, (), np.float32, why="a scalar that was never saved")


def read_variant(
    overlaps=lambda a, b: a < b,
    every=any,
    copies=False,
    offset_here=lambda want: want,
    offset_there=lambda place: place,
    checks_holes=True,
    skips_elsewhere=True,
    make=np.empty,
    read_first=False,
):
    """A correct read_piece but for what is passed."""

    def read_piece(saved, read, want, dtype):
        shape = tuple(b - a for a, b in want)
        piece, filled, seen = make(shape, dtype), np.zeros(shape, bool), set()
        for index, place in enumerate(saved):
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(place, want, strict=True)]
            if place in seen and not copies:
                continue
            found = read(index) if read_first else None
            if skips_elsewhere and every(not overlaps(a, b) for a, b in both):
                continue
            seen.add(place)
            found = read(index) if found is None else found
            both = [(a, max(a, b)) for a, b in both]
            first = [start for start, _ in offset_here(want)]
            other = [start for start, _ in offset_there(place)]
            here = tuple(slice(a - o, b - o) for (a, b), o in zip(both, first, strict=True))
            there = tuple(slice(a - o, b - o) for (a, b), o in zip(both, other, strict=True))
            piece[here] = found[there]
            filled[here] = True
        if checks_holes and not filled.all():
            raise ValueError(f"{(~filled).sum()} elements are in no saved piece")
        return piece

    return read_piece


right_read = read_variant()
lenient_read = read_variant(checks_holes=False, make=np.zeros)


def zero_corner(place):
    return [(0, 0) for _ in place]


def wrong_read(name, hint, **changes):
    fn = read_variant(**changes)
    fn.__name__ = name
    reshard.mutant(hint)(fn)


wrong_read(
    "reads_everything",
    "You read every saved piece and only then check whether you need it. On a thousand devices, each would read "
    "the whole checkpoint. Compare the regions first.",
    read_first=True,
)


@reshard.mutant(
    "You compare only how many elements were saved in all. They may be others than those that you "
    "want: note which elements of `want` you have filled."
)
def counts_what_was_saved(saved, read, want, dtype):
    enough = sum(math.prod(b - a for a, b in place) for place in set(saved))
    if enough < math.prod(b for _, b in want):
        raise ValueError(f"{enough} elements were saved")
    return lenient_read(saved, read, want, dtype)


@reshard.mutant(
    "The numbers go through a float on their way. An int64 has more digits than a float64: copy each "
    "piece as it is, into an array of the given `dtype`."
)
def through_a_float(saved, read, want, dtype):
    return right_read(saved, lambda i: read(i).astype(np.float64), want, dtype)


@reshard.mutant(
    "You accept a scalar that was never saved. `()` has no dimensions but one element: treat it like "
    "any other region."
)
def scalars_need_nothing(saved, read, want, dtype):
    return (right_read if want else lenient_read)(saved, read, want, dtype)


@reshard.mutant(
    "You read a piece twice. Reading is what takes time here: keep what `read(i)` returned."
)
def reads_twice(saved, read, want, dtype):
    return right_read(saved, lambda i: (read(i), read(i))[1], want, dtype)


wrong_read(
    "reads_neighbours",
    "You read pieces that only touch the wanted one: a piece that stops at 4 and one that starts at 4 have no "
    "common element. They overlap where max(starts) < min(stops).",
    overlaps=lambda a, b: a <= b,
)
wrong_read(
    "one_dimension_is_enough",
    "You read a piece if *some* dimension overlaps. A common part needs an overlap in *every* dimension.",
    every=all,
)
wrong_read(
    "reads_copies",
    "You read all copies of a piece. Keep a set of the regions that you have read.",
    copies=True,
)
wrong_read(
    "indexes_the_saved_piece_as_the_whole",
    "You index what you read as if it were the whole array. Its first element is at the region's start, so "
    "subtract that.",
    offset_there=zero_corner,
)
wrong_read(
    "indexes_the_result_as_the_whole",
    "You index the result as if it were the whole array. Its first element is at the start of `want`, so subtract "
    "that.",
    offset_here=zero_corner,
)
wrong_read(
    "ignores_holes",
    "For elements that no saved piece has, you return arbitrary memory, or zeros. Count what you fill, and raise "
    "a ValueError if something is missing.",
    checks_holes=False,
)
wrong_read(
    "always_float32",
    "Your result is float32, or float64, whatever was saved. Create it with the given `dtype`.",
    make=lambda shape, dtype: np.zeros(shape, np.float32),
)


@reshard.mutant(
    "You join pieces in the order of the list. But the list has no particular order, and pieces are cut in every "
    "dimension: put each part where its region says."
)
def joins_in_order(saved, read, want, dtype):
    parts = [
        read(i)[
            tuple(
                slice(max(a, c) - a, min(b, d) - a) for (a, b), (c, d) in zip(p, want, strict=True)
            )
        ]
        for i, p in enumerate(saved)
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(p, want, strict=True))
    ]
    return np.concatenate(parts).astype(dtype)


@reshard.mutant(
    "You leave the loop after the first piece that fits. A piece that is wanted may be made of several."
)
def first_piece_alone(saved, read, want, dtype):
    pieces = list(saved)
    for index, place in enumerate(saved):
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(place, want, strict=True)):
            return right_read(pieces[: index + 1], read, want, dtype)
    return right_read(saved, read, want, dtype)


@reshard.mutant("An element that no piece has must be a ValueError. You raise another exception.")
def another_exception(saved, read, want, dtype):
    try:
        return right_read(saved, read, want, dtype)
    except ValueError as error:
        raise KeyError(str(error)) from None


@reshard.mutant("Your array has NumPy's default dtype. Make it with the `dtype` that is given.")
def default_dtype(saved, read, want, dtype):
    return right_read(saved, read, want, np.float64)


@reshard.mutant(
    "You count the elements of every copy. A piece that was saved twice fills its elements once: count them "
    "once."
)
def counts_copies(saved, read, want, dtype):
    if len(set(saved)) < len(saved):
        raise ValueError("more elements than there are")
    return right_read(saved, read, want, dtype)


# --------------------------------------------------------------------------------- retention

retention = Exercise(
    "08.retention",
    title="Which checkpoints to delete",
    function="names_to_delete",
    minutes=15,
    points=10,
    statement="""
Write `names_to_delete(names, saved, keep, keep_every)`, which is called after each save. `names` are all names in the
checkpoint folder. Return those to delete, the oldest step first.

- Only a name made of digits alone is a step. Leave `300.tmp`, `300.damaged` and `notes` alone.
- Keep the `keep` newest steps, counted among *all* steps. Keep all multiples of `keep_every` too, unless it is None.
- Always keep the step `saved`. It needn't be among the newest: if you start again from step 100, an earlier attempt may
  have left steps 200 and 300.
- Step 0 is a multiple of every number.
""",
    hints=(
        "First turn the names that are steps into numbers, and sort them. Which must never be deleted?",
        'As text, "90" is larger than "100", so sort numbers. The candidates are all but the last `keep`. Remove '
        "`saved` and the multiples from them.",
        "`steps = sorted(int(n) for n in names if n.isdigit())`, then a list over `steps[:-keep]` with `step != saved "
        "and (keep_every is None or step % keep_every)`, converted back to text.",
    ),
    forbid=("minitext.checkpoint.checkpointer",),
)


def retention_by_sets(names, saved, keep, keep_every):
    steps = sorted({int(n) for n in names if n.isdigit()})
    stay = set(steps[max(0, len(steps) - keep) :]) | {saved}
    if keep_every is not None:
        stay |= {step for step in steps if step % keep_every == 0}
    return [str(step) for step in steps if step not in stay]


def compare_retention(fn, t, names, saved, keep, keep_every, why):
    shuffled = [str(n) for n in t.rng.permutation(np.array(names, object))]
    got = fn(list(shuffled), saved, keep, keep_every)
    t.equal(got, retention_by_sets(shuffled, saved, keep, keep_every), why=why)


@retention.check("the newest stay")
def _(fn, t):
    first = int(t.rng.integers(2, 8))
    steps = [first + 10 * i for i in range(9)]
    for keep in (1, 3, 8, 9, 20):
        compare_retention(fn, t, steps, steps[-1], keep, None, f"keep={keep} of 9 steps")


@retention.check("numbers of different length")
def _(fn, t):
    steps = [8, 9, 10, 90, 99, 100, 900, 1000, 12000]
    for keep in (1, 2, 4):
        compare_retention(fn, t, steps, 12000, keep, None, f"keep={keep} of {steps}")


@retention.check("multiples stay as well")
def _(fn, t):
    every = int(t.rng.integers(3, 6))
    steps = list(range(0, 40))
    for keep in (1, 2, 5):
        compare_retention(fn, t, steps, 39, keep, every, f"keep={keep}, keep_every={every}")
    compare_retention(fn, t, [0, 7, 14, 21], 21, 1, 7, "nothing but multiples, step 0 among them")
    compare_retention(fn, t, steps, 39, 2, 1, "keep_every=1 keeps all")


@retention.check("the step just saved stays")
def _(fn, t):
    saved = int(t.rng.integers(101, 150))
    compare_retention(fn, t, [saved, 200, 300, 400], saved, 2, None, "an earlier attempt's steps")
    compare_retention(fn, t, [50, saved, 200, 300], saved, 1, 100, "and multiples of 100")


@retention.check("names that aren't steps")
def _(fn, t):
    strange = [
        "400.tmp",
        "300.damaged",
        "300.damaged.2",
        "notes",
        "-5",
        "1e3",
        "tensorboard",
        ".300-x",
    ]
    compare_retention(fn, t, [100, 200, 300, *strange], 300, 2, None, "names that are no steps")
    compare_retention(fn, t, [100, *strange], 100, 1, 7, "one step among other names")


def retention_variant(
    order=int,
    is_step=str.isdigit,
    newest=lambda steps, keep: steps[:-keep],
    multiple=lambda step, every: every is not None and step % every == 0,
    spare_saved=True,
    joined=lambda is_multiple, is_newest: is_multiple or is_newest,
    result=lambda steps: [str(step) for step in steps],
):
    """A correct names_to_delete but for what is passed."""

    def names_to_delete(names, saved, keep, keep_every=None):
        steps = [int(n) for n in sorted((n for n in names if is_step(n)), key=order)]
        old = newest(steps, keep)
        gone = [
            s
            for s in steps
            if not joined(multiple(s, keep_every), s not in old)
            and not (spare_saved and s == saved)
        ]
        return result(gone)

    return names_to_delete


def wrong_retention(name, hint, **changes):
    fn = retention_variant(**changes)
    fn.__name__ = name
    retention.mutant(hint)(fn)


wrong_retention(
    "sorted_as_text",
    'You sort the names as text, in which "90" comes after "100". Turn them into numbers first.',
    order=str,
)
wrong_retention(
    "one_too_few",
    "You keep one step too few, or too many. The newest `keep` are the end of the sorted list, `steps[-keep:]`; "
    "you may delete those before, `steps[:-keep]`.",
    newest=lambda steps, keep: steps[: len(steps) - keep + 1],
)
wrong_retention(
    "keeps_the_oldest",
    "You keep the oldest steps and delete the newest.",
    newest=lambda steps, keep: steps[keep:],
)
wrong_retention(
    "deletes_what_was_saved",
    "You delete the step just saved if older attempts left larger numbers. Always keep `saved`.",
    spare_saved=False,
)
wrong_retention(
    "multiples_only_if_newest",
    "You delete steps that aren't newest *or* aren't multiples. Keep a step if it is either.",
    joined=lambda is_multiple, is_newest: is_multiple and is_newest,
)
wrong_retention(
    "never_keeps_multiples",
    "You ignore `keep_every`: keep its multiples however old they are.",
    multiple=lambda step, every: False,
)
wrong_retention(
    "step_0_is_no_multiple",
    "You don't count step 0 as a multiple. 0 % n is 0 for every n.",
    multiple=lambda step, every: every is not None and step > 0 and step % every == 0,
)
wrong_retention(
    "newest_first",
    "You return the right steps, but newest first. The oldest must be deleted first, so a kill in between costs "
    "the steps that matter least.",
    result=lambda steps: [str(step) for step in reversed(steps)],
)


@retention.mutant(
    "You count the newest `keep` only among non-multiples. Count them among *all* steps."
)
def newest_without_multiples(names, saved, keep, keep_every=None):
    steps = sorted(int(n) for n in names if n.isdigit())
    others = [s for s in steps if keep_every is None or s % keep_every]
    return [str(s) for s in others[:-keep] if s != saved]


@retention.mutant(
    "You treat the number before a dot as a step. `300.damaged` and `400.tmp` aren't steps: they don't count "
    "among the newest, and you mustn't delete them."
)
def counts_other_names(names, saved, keep, keep_every=None):
    steps = {}
    for name in names:
        head = name.partition(".")[0]
        if head.isdigit():
            steps[name] = int(head)
    old = sorted(steps, key=lambda n: (steps[n], n))[:-keep]
    return [n for n in old if steps[n] != saved and (keep_every is None or steps[n] % keep_every)]


wrong_retention(
    "one_too_many",
    "You keep one step more than `keep`. The newest `keep` are the end of the sorted list; all before them "
    "may go.",
    newest=lambda steps, keep: steps[: -keep - 1],
)
wrong_retention(
    "returns_numbers",
    "You return numbers. The *names* are asked for, as they are in the folder.",
    result=lambda steps: steps,
)


@retention.mutant(
    "The step just saved doesn't count among your newest. Count all steps first, then leave `saved` out of "
    "what you delete."
)
def newest_without_the_saved(names, saved, keep, keep_every=None):
    steps = sorted(int(n) for n in names if n.isdigit() and int(n) != saved)
    return [str(s) for s in steps[:-keep] if keep_every is None or s % keep_every]


@retention.mutant(
    "You take a remainder of `keep_every`, which may be None. None keeps no multiples."
)
def none_is_a_number(names, saved, keep, keep_every=None):
    steps = sorted(int(n) for n in names if n.isdigit())
    return [str(s) for s in steps[:-keep] if s != saved and s % keep_every]


@retention.mutant(
    "You turn every name into a number. Some aren't made of digits alone: leave those out first."
)
def every_name_is_a_number(names, saved, keep, keep_every=None):
    [int(name) for name in names]
    return retention_variant()(names, saved, keep, keep_every)


@retention.mutant(
    "You delete steps above `saved` because they are of an earlier attempt. They are the newest all the same: "
    "count them like the others."
)
def later_ones_too(names, saved, keep, keep_every=None):
    gone = retention_variant()(names, saved, keep, keep_every)
    later = [n for n in names if n.isdigit() and int(n) > saved]
    return sorted({*gone, *later}, key=int)


@retention.mutant("You return what is kept. The names to delete are asked for.")
def what_is_kept(names, saved, keep, keep_every=None):
    gone = retention_variant()(names, saved, keep, keep_every)
    return sorted((n for n in names if n.isdigit() and n not in gone), key=int)


# ------------------------------------------------------------------------------ find_damaged

damage = Exercise(
    "08.find_damaged",
    title="The newest step that is whole",
    function="newest_whole",
    minutes=25,
    points=10,
    statement="""
Write `newest_whole(folder)`. The folder has one folder for each step, named by its number, and each of those has a
`manifest.json`:

```
{"files": {"facts.json": "9f86d0...", "state/a": "60303a..."}, "sha256": "2c26b4..."}
```

`files` maps each file's path within the step to the SHA-256 of its content, in hexadecimal. `sha256` is the SHA-256
of `json.dumps(files)`, encoded as UTF-8, so the manifest vouches for itself too.

Return `(step, damaged)`: the newest step whose listed files are all as written, and a list of the damaged steps that
are newer, newest first. If no step is whole, the step is None.

- Files may be missing, cut short, or altered without changing size. So may the manifest: it may not be JSON at all, or
  it may be JSON of another kind.
- Ignore files that the manifest doesn't list. A name that isn't made of digits alone isn't a step.
- Don't write or delete anything, raise no exception, and don't look at steps older than the one you return.
""",
    hints=(
        "Write a function that tells whether one step is whole. Then call it for the newest step, the one before, and "
        "so on.",
        "`hashlib.sha256(path.read_bytes()).hexdigest()` is a file's digest. What does each line of your function "
        "raise if the manifest is missing, cut short, or just the list `[]`?",
        "In one `try`: read, `json.loads`, compare `hashlib.sha256(json.dumps(files).encode())` with "
        "`manifest['sha256']`, then each file. Return False on `OSError`, `ValueError`, `KeyError`, "
        "`TypeError`, `AttributeError`. Sort steps as numbers.",
    ),
    forbid=("minitext.files", "minitext.checkpoint.checkpointer"),
)


def write_step(t, folder, step):
    """Writes a step of four files and its manifest."""
    path = folder / str(step)
    (path / "state" / "d").mkdir(parents=True)
    files = {}
    for name in ("facts.json", "state/_METADATA", "state/d/a", "state/d/b"):
        data = t.rng.bytes(int(t.rng.integers(20, 300)))
        (path / name).write_bytes(data)
        files[name] = hashlib.sha256(data).hexdigest()
    write_manifest(path, files)
    return path


def write_manifest(path, files):
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"files": files, "sha256": digest}))


def flip(t, path):
    data = bytearray(path.read_bytes())
    data[int(t.rng.integers(len(data)))] ^= 1 << int(t.rng.integers(7))
    path.write_bytes(data)


def cut(t, path):
    data = path.read_bytes()
    path.write_bytes(data[: int(t.rng.integers(len(data)))])


def compare_steps(fn, t, steps, harm, want, why):
    """Writes `steps`, lets `harm(folder)` do its work, and compares what is found."""
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "checkpoints"
        folder.mkdir()
        for step in steps:
            write_step(t, folder, step)
        harm(folder)
        before = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
        step, damaged = fn(folder)
        t.equal((step, list(damaged)), want, why=why)
        after = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
        t.true(before == after, "files were made or deleted", observed=[len(after) - len(before)])


FILES = ("facts.json", "state/_METADATA", "state/d/a", "state/d/b")


@damage.check("nothing is damaged")
def _(fn, t):
    compare_steps(fn, t, [100, 200, 300], lambda folder: None, (300, []), "three whole steps")
    compare_steps(fn, t, [9, 90, 100, 1000], lambda folder: None, (1000, []), "9, 90, 100, 1000")
    compare_steps(fn, t, [0], lambda folder: None, (0, []), "step 0 alone")
    compare_steps(fn, t, [], lambda folder: None, (None, []), "no step at all")


@damage.check("a manifest in an order of its own")
def _(fn, t):
    def turn_round(folder):
        files = json.loads((folder / "200" / "manifest.json").read_text())["files"]
        write_manifest(folder / "200", dict(reversed(files.items())))

    compare_steps(fn, t, [100, 200], turn_round, (200, []), "files listed from z to a")


@damage.check("missing files")
def _(fn, t):
    for name in FILES:
        harm = lambda folder, name=name: (folder / "300" / name).unlink()  # noqa: E731
        compare_steps(fn, t, [100, 200, 300], harm, (200, [300]), f"{name} is missing in step 300")


@damage.check("files cut short")
def _(fn, t):
    for name in FILES:
        harm = lambda folder, name=name: cut(t, folder / "80" / name)  # noqa: E731
        compare_steps(fn, t, [80, 9], harm, (9, [80]), f"{name} is cut short in step 80")


@damage.check("files altered")
def _(fn, t):
    for name in FILES:
        harm = lambda folder, name=name: flip(t, folder / "300" / name)  # noqa: E731
        compare_steps(fn, t, [200, 300], harm, (200, [300]), f"one bit of {name} is flipped")


@damage.check("the manifest itself")
def _(fn, t):
    def alters_a_digest(path):  # to that of the damaged file
        flip(t, path / "state/d/a")
        manifest = json.loads((path / "manifest.json").read_text())
        digest = hashlib.sha256((path / "state/d/a").read_bytes()).hexdigest()
        manifest["files"]["state/d/a"] = digest
        (path / "manifest.json").write_text(json.dumps(manifest))

    def forgets_a_file(path):
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["files"]["facts.json"]
        (path / "facts.json").unlink()
        (path / "manifest.json").write_text(json.dumps(manifest))

    harms = {
        "is missing": lambda path: (path / "manifest.json").unlink(),
        "is cut short": lambda path: cut(t, path / "manifest.json"),
        "is empty": lambda path: (path / "manifest.json").write_text(""),
        "is a list": lambda path: (path / "manifest.json").write_text("[]"),
        "is a number": lambda path: (path / "manifest.json").write_text("3"),
        "has a list of files": lambda path: write_manifest(path, ["facts.json"]),
        "has a number for a digest": lambda path: write_manifest(path, {"facts.json": 3}),
        "is no UTF-8": lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"),
        "forgot a file": forgets_a_file,
        "was altered together with a file": alters_a_digest,
    }
    for told, harm in harms.items():
        hurt = lambda folder, harm=harm: harm(folder / "300")  # noqa: E731
        compare_steps(fn, t, [100, 200, 300], hurt, (200, [300]), f"the manifest {told}")


@damage.check("several damaged steps, and all of them")
def _(fn, t):
    def harm(folder):
        cut(t, folder / "1000" / "state/d/b")
        (folder / "900" / "manifest.json").unlink()
        flip(t, folder / "20" / "facts.json")  # older than the one that is found: not looked at

    compare_steps(fn, t, [20, 90, 900, 1000], harm, (90, [1000, 900]), "two newer ones are damaged")

    def all_of_them(folder):
        for path in folder.iterdir():
            flip(t, path / "state/d/a")

    compare_steps(fn, t, [7, 10, 30], all_of_them, (None, [30, 10, 7]), "all are damaged")


@damage.check("names that aren't steps, and unlisted files")
def _(fn, t):
    def harm(folder):
        write_step(t, folder, "400.tmp")
        write_step(t, folder, "300.damaged")
        (folder / "notes").write_text("of no concern")
        (folder / "200" / "state" / "extra").write_text("not in the manifest")

    compare_steps(fn, t, [100, 200], harm, (200, []), "other names, and a file that is not listed")

    def a_folder_for_a_file(folder):
        (folder / "200" / "facts.json").unlink()
        (folder / "200" / "facts.json").mkdir()

    compare_steps(
        fn, t, [100, 200], a_folder_for_a_file, (100, [200]), "a folder in a file's place"
    )


EVERYTHING = (OSError, ValueError, KeyError, TypeError, AttributeError)


def damage_variant(
    key=int,
    is_step=str.isdigit,
    own=True,
    digest=lambda path: hashlib.sha256(path.read_bytes()).hexdigest(),
    same=lambda path, found, digest: found == digest,
    catch=EVERYTHING,
    go_on=True,
    skip=lambda name: False,
    extra=False,
    order=list,
):
    """A correct newest_whole but for what is passed."""

    def whole(path):
        try:
            manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
            files = manifest["files"]
            if own and manifest["sha256"] != hashlib.sha256(json.dumps(files).encode()).hexdigest():
                return False
            if extra:
                there = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
                if there - {"manifest.json"} != set(files):
                    return False
            return all(
                same(path / n, digest(path / n), want) for n, want in files.items() if not skip(n)
            )
        except catch:
            return False

    def newest_whole(folder):
        names = sorted((p.name for p in folder.iterdir() if is_step(p.name)), key=key)
        damaged = []
        for name in reversed(names):
            if whole(folder / name):
                return int(name.partition(".")[0]), order(damaged)
            damaged.append(int(name.partition(".")[0]))
            if not go_on:
                return None, damaged
        return None, order(damaged)

    return newest_whole


def wrong_damage(name, hint, **changes):
    fn = damage_variant(**changes)
    fn.__name__ = name
    damage.mutant(hint)(fn)


wrong_damage(
    "sorted_as_text",
    'You take the last name in text order, in which "90" comes after "100". Compare the steps as numbers.',
    key=str,
)
wrong_damage(
    "only_asks_whether_it_exists",
    "You only check that the files exist. A file that was cut short or altered exists too: compare its SHA-256.",
    digest=lambda path: path.stat().st_size >= 0,
    same=lambda path, found, digest: True,
)
wrong_damage(
    "only_asks_for_content",
    "You accept any file that isn't empty. Half a file isn't empty either: compare its SHA-256.",
    digest=lambda path: len(path.read_bytes()),
    same=lambda path, found, digest: found > 10,
)
wrong_damage(
    "trusts_the_manifest",
    "You trust the manifest. It may have lost a line, or been altered together with a file. Compare the SHA-256 "
    "of json.dumps(files) with the manifest's own.",
    own=False,
)
wrong_damage(
    "gives_up",
    "You only look at the newest step. If it's damaged, the one before may be whole: keep going.",
    go_on=False,
)
wrong_damage(
    "a_missing_manifest_is_an_error",
    "You raise an exception if a file is missing. That's one way for a step to be damaged: catch OSError, and "
    "keep going.",
    catch=(ValueError, KeyError, TypeError, AttributeError),
)
wrong_damage(
    "a_manifest_cut_short_is_an_error",
    "You raise an exception if the manifest isn't JSON. json.loads raises a ValueError, which means that the step "
    "is damaged.",
    catch=(OSError,),
)
wrong_damage(
    "a_strange_manifest_is_an_error",
    "Your manifest is valid JSON but not what you expect: a list or a number. Your code then raises a TypeError "
    "or an AttributeError, which means that the step is damaged.",
    catch=(OSError, ValueError, KeyError),
)
wrong_damage(
    "extra_files_are_damage",
    "You treat an unlisted file as damage. Ignore it, and check only what the manifest lists.",
    extra=True,
)
wrong_damage(
    "only_the_top_folder",
    "You don't look at all the files: not into a step's subfolders, or no further than the first file. The "
    "manifest's names are paths: `step / name`.",
    skip=lambda name: "/" in name,
)
wrong_damage(
    "counts_unfinished_steps",
    "You treat `400.tmp` as a step. It was left by a killed save or set aside as damaged: a step's name is digits "
    "alone.",
    is_step=lambda name: name.partition(".")[0].isdigit(),
    key=lambda name: int(name.partition(".")[0]),
)
wrong_damage(
    "oldest_first",
    "You list the damaged steps oldest first. List them newest first.",
    order=lambda damaged: damaged[::-1],
)


@damage.mutant("You look at the steps from the oldest on. The newest that is whole is wanted.")
def from_the_oldest_on(folder):
    steps = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())
    for step in steps:
        if damage_variant()(folder)[0] is not None:
            return step, []
    return damage_variant()(folder)


@damage.mutant(
    "You list damaged steps that are older than the one you return. Stop at the first whole step."
)
def older_ones_too(folder):
    step, damaged = damage_variant()(folder)
    steps = sorted((int(p.name) for p in folder.iterdir() if p.name.isdigit()), reverse=True)
    for other in steps:
        if step is not None and other < step:
            with tempfile.TemporaryDirectory() as room:
                alone = Path(room) / "one"
                alone.mkdir()
                (alone / str(other)).symlink_to(folder / str(other))
                damaged += damage_variant()(alone)[1]
    return step, damaged


@damage.mutant("You return the steps as text. They are numbers.")
def steps_as_text(folder):
    step, damaged = damage_variant()(folder)
    return None if step is None else str(step), [str(other) for other in damaged]


@damage.mutant(
    "You sort the manifest's names before you hash it. `sha256` is that of json.dumps(files), in the order "
    "in which they are written."
)
def sorts_the_names(folder):
    def own(path):
        manifest = json.loads((path / "manifest.json").read_text())
        text = json.dumps(manifest["files"], sort_keys=True)
        return manifest["sha256"] == hashlib.sha256(text.encode()).hexdigest()

    step, damaged = damage_variant()(folder)
    while step is not None and not own(folder / str(step)):
        damaged.append(step)
        older = [int(p.name) for p in folder.iterdir() if p.name.isdigit() and int(p.name) < step]
        step = max(older, default=None)
    return step, damaged


@damage.mutant(
    "You hash something else than json.dumps(files), such as the whole manifest or its text, so no step is "
    "ever whole."
)
def hashes_the_whole(folder):
    steps = sorted((int(p.name) for p in folder.iterdir() if p.name.isdigit()), reverse=True)
    return None, steps


@damage.mutant(
    "You turn every name into a number. Some aren't made of digits alone: leave those out first."
)
def every_name_is_a_step(folder):
    [int(path.name) for path in folder.iterdir()]
    return damage_variant()(folder)


# ---------------------------------------------------------------------------------- interval

interval = Exercise(
    "08.interval",
    title="How often to save",
    function="best_save_every",
    minutes=15,
    points=10,
    statement=r"""
Write `best_save_every(stall, step_seconds, devices, hours_per_device)`. A save stalls the loop for `stall` seconds, a
step takes `step_seconds`, and a device fails once in `hours_per_device` hours on average. The job stops when *any* of
its devices fails. How many steps should there be between two saves?

With $n$ steps between saves, the share of time lost is, to first order,

$$
w(n) = \frac{\delta}{n s} + \frac{n s}{2 M}
$$

with $\delta$ the stall, $s$ the seconds of a step and $M$ the *job's* mean time between failures.

- Return the $n \ge 1$ that minimises $w(n)$, as a Python int. Rounding doesn't always give the best $n$, so compare
  the neighbours. If two are equally good, return the smaller.
- If a save costs nothing, save after every step.
- Don't search through all n: a job with short steps may have a best n of a million.
""",
    hints=(
        "If one device fails once in 1,000 hours, how long do 100 devices run until the first failure? How many "
        "seconds is that?",
        "Young's interval is the square root of $2 \\delta M$, in seconds. Divide it by the seconds of a step. The "
        "best whole number is the one below or the one above, whichever has the smaller w.",
        "`M = 3600 * hours_per_device / devices`; `n = math.floor(math.sqrt(2 * stall * M) / "
        "step_seconds)`, at least 1; then `min((n, n + 1), key=w)`.",
    ),
)


def waste_of(n, stall, step_seconds, seconds):
    return stall / (n * step_seconds) + n * step_seconds / (2 * seconds)


def compare_interval(fn, t, stall, step_seconds, devices, hours, why):
    """The answer, compared by its waste and as a number, in exact arithmetic where it matters."""
    seconds = 3600 * hours / devices
    root = math.sqrt(2 * stall * seconds) / step_seconds
    near = range(max(1, math.floor(root) - 2), math.floor(root) + 4)
    want = min(near, key=lambda n: (waste_of(n, stall, step_seconds, seconds), n))
    got = fn(stall, step_seconds, devices, hours)
    t.true(isinstance(got, int) and not isinstance(got, bool),
           f"got {got!r}, want a Python int, {why}", observed=got)  # fmt: skip
    wastes = "".join(
        f"; w({n}) is {waste_of(n, stall, step_seconds, seconds):.10g}"
        for n in (got, want)
        if n > 0
    )
    told = "" if got == want else interval_told(got, root, stall, step_seconds, devices, seconds)
    t.equal(got, want, why=f"{why}; M is {seconds:.6g} s{wastes}{told}")


def interval_told(got, root, stall, step, devices, seconds):
    """What a wrong number of steps would be right for."""
    if got < 1:
        return "; n is at least 1"
    if abs(got - root) <= max(2, 4e-3 * root):
        off = "; n is the whole number below {0} or the one above" * (abs(got - root) > 1)
        return off.format(f"{root:.8g}")
    length = root * step
    mistakes = {
        "that is the interval in seconds": length,
        "you multiply by the seconds of a step": length * step,
        "you divide by the seconds of a step under the root": math.sqrt(length**2 / step),
        "you divide by the stall and a step together": length / (step + stall),
        "your stall has a step in it": math.sqrt(2 * (stall + step) * seconds) / step,
        "your root is not of twice stall times M, but of that product once": root / math.sqrt(2),
        "you take the root of M's part alone": math.sqrt(2 * seconds) / step,
        "so many steps fit between two failures": seconds / step,
        "so many steps take as long as a stall": stall / step,
        "you take no root": length**2 / step,
    }
    for text, wrong in mistakes.items():
        if abs(got - wrong) <= 1 + 1e-4 * wrong:
            return f"; {text}"
    much = (got * step) ** 2 / (2 * stall) if stall else math.inf
    return f"; {got} would be right if M were {much:.4g} s, {much / seconds:.4g} times what it is"


def own_hours(t):
    """Hours between the failures of one device, another number for each learner."""
    return 20_000.0 + t.learner % 30_011


@interval.check("one device, hundreds, thousands")
def _(fn, t):
    hours = own_hours(t)
    for devices, stall, step in ((1, 0.9, 0.37), (256, 2.3, 1.7), (16_384, 6.1, 4.3)):
        compare_interval(fn, t, stall, step, devices, hours,
                         f"{devices} device{'s' * (devices > 1)} of {hours:.0f} hours each, "
                         f"a stall of {stall} s, a step of {step} s")  # fmt: skip


def compare_near_root(fn, t, n, low, high, why):
    """Compares where the root of 2 stall M is n + low to n + high steps."""
    root = n + low + (high - low) * float(t.rng.uniform(0.2, 0.8))
    seconds, step = float(t.rng.uniform(900, 4000)), float(t.rng.uniform(3, 30))
    stall = (root * step) ** 2 / (2 * seconds)
    compare_interval(fn, t, stall, step, 1, seconds / 3600, why)


@interval.check("between two whole numbers")
def _(fn, t):
    for n in (5, 3, 2, 1):
        compare_near_root(fn, t, n, 0.1, 0.35, f"a root a little above {n}")
        compare_near_root(fn, t, n, 0.6, 0.9, f"a root a little below {n + 1}")


@interval.check("nearly in the middle")
def _(fn, t):
    for n in (1, 2, 3):  # n + 1 is better than n from the root of n (n + 1) on
        compare_near_root(fn, t, n, math.sqrt(n * (n + 1)) - n, 0.5, f"a root just below {n + 0.5}")


@interval.check("two that are equally good")
def _(fn, t):
    # w is 7/224 + 224/7200 = 225/7200 + 7/225, to the last bit.
    for times in (1, int(t.rng.integers(2, 9))):
        compare_interval(fn, t, 7.0, 1.0, times, float(times), "224 and 225 steps waste the same")


@interval.check("saves that cost nothing, or too much")
def _(fn, t):
    compare_interval(fn, t, 0.0, 2.5, 8, 1000.0, "a stall of 0 s")
    compare_interval(fn, t, 1e-9, 30.0, 5000, 1000.0, "a stall far below a step")
    compare_interval(fn, t, 60.0, 600.0, 1000, 50.0, "steps longer than the time between failures")


@interval.check("a million steps")
def _(fn, t):
    step = float(t.rng.uniform(0.01, 0.02))
    compare_interval(fn, t, 30.0, step, 4, 9000.0, "steps of a hundredth of a second")


def interval_variant(
    mtbf=lambda hours, devices: 3600 * hours / devices,
    factor=2.0,
    whole=None,
    least=1,
    per_step=True,
    tie=1,
):
    """A correct best_save_every but for what is passed."""

    def best_save_every(stall, step_seconds, devices, hours_per_device):
        seconds = mtbf(hours_per_device, devices)
        best = math.sqrt(factor * stall * seconds) / (step_seconds if per_step else 1.0)
        if whole is not None:
            return max(least, whole(best)) if least else whole(best)
        below = max(1, math.floor(best))
        return min((below, below + 1)[::tie], key=lambda n: stall / (n * step_seconds)
                   + n * step_seconds / (factor * seconds))  # fmt: skip

    return best_save_every


def wrong_interval(name, hint, **changes):
    fn = interval_variant(**changes)
    fn.__name__ = name
    interval.mutant(hint)(fn)


wrong_interval(
    "one_device",
    "You use the time between failures of one device. With many, the first fails much earlier: divide by their "
    "number.",
    mtbf=lambda hours, devices: 3600 * hours,
)
wrong_interval(
    "multiplies_by_devices",
    "You multiply by the number of devices. More devices fail more often, so divide the time between failures by "
    "it.",
    mtbf=lambda hours, devices: 3600 * hours * devices,
)
wrong_interval(
    "hours_for_seconds",
    "You use hours where you need seconds. Multiply by 3600.",
    mtbf=lambda hours, devices: hours / devices,
)
wrong_interval(
    "without_the_two",
    "You left out the 2. On average a failure comes in the middle of an interval, so half of it is lost: the "
    "interval is the root of 2 times stall times M.",
    factor=1.0,
)
wrong_interval(
    "seconds_for_steps",
    "You return seconds. Divide by the seconds of a step.",
    per_step=False,
)
wrong_interval(
    "rounded",
    "You round to the nearest whole number. But w isn't symmetric: it falls steeply and rises slowly. Compute it "
    "for the numbers below and above, and take the better.",
    whole=round,
)
wrong_interval(
    "rounded_down",
    "You always take the number below. Also compute w for the one above, and take the better.",
    whole=math.floor,
)
wrong_interval(
    "rounded_up",
    "You always take the number above. Compute w for both.",
    whole=math.ceil,
)
wrong_interval(
    "never_less_than_nothing",
    "If a save costs next to nothing, you return 0. There is at least one step between two saves.",
    whole=math.floor,
    least=0,
)
wrong_interval(
    "the_larger_of_two",
    "Two numbers of steps are equally good, and you return the larger. Take the smaller.",
    tie=-1,
)
wrong_interval(
    "minutes_for_seconds",
    "An hour of yours has 60 seconds. It has 3600.",
    mtbf=lambda hours, devices: 60 * hours / devices,
)
wrong_interval(
    "half_for_two",
    "Your root is of half of stall times M. The minimum of w is at the root of *2* stall M.",
    factor=0.5,
)


@interval.mutant(
    "If a save costs nothing, your best n is 0, and you divide by it or return it. There is at least one step "
    "between saves."
)
def no_step_between(stall, step_seconds, devices, hours_per_device):
    seconds = 3600 * hours_per_device / devices
    below = math.floor(math.sqrt(2 * stall * seconds) / step_seconds)
    return min((below, below + 1), key=lambda n: waste_of(n, stall, step_seconds, seconds))


@interval.mutant(
    "You return a float, or an integer of NumPy's. The number of steps is a Python int."
)
def as_a_float(*args):
    return float(interval_variant()(*args))


@interval.mutant(
    "You return stall times M without a root. The minimum is where both terms of w are equal: n s is the root of "
    "2 stall M."
)
def no_root(stall, step_seconds, devices, hours_per_device):
    return max(1, round(2 * stall * 3600 * hours_per_device / devices / step_seconds))
