import hashlib
import itertools
import math
import posixpath

import jax
import jax.numpy as jnp
import numpy as np

from minitext.book.grading import Exercise


def mistaken(exercise, name, hint, fn):
    fn.__name__ = name
    exercise.mutant(hint)(fn)


# ----------------------------------------------------------------------------------- symbolic

symbolic = Exercise(
    "27.symbolic",
    title="One program for every size",
    function="export_means",
    minutes=25,
    points=15,
    statement="""
A service takes the moving mean of whatever it's sent. For each text b and position t, that's the mean of row t and the
rows before it, `window` rows in all, or fewer at the beginning. In NumPy, with B and T known:

    mean[b, t] = x[b, max(t - window + 1, 0) : t + 1].mean(0)   if t < length[b]
    mean[b, t] = 0                                               otherwise

Write `export_means(window, width, platforms)`. It returns the bytes of *one* program, exported and serialized with
`jax.export`, that computes this for any number of texts B and, independently of B, any length T.

- The program takes x [B, T, width] in float32 and length [B] in int32, and returns [B, T, width] in float32. `B` and
  `T` are symbolic; `window` and `width` are plain ints, fixed when you export.
- It's lowered for exactly the platforms in `platforms`, in that order.
- At or beyond a text's length, x may hold anything, even NaN.
- A row of very large numbers changes only the means that it is in. (So don't subtract two long sums: a large number
  in both would wipe out the small ones.)
- `T` may be smaller than `window`, and as small as 1.
""",
    hints=(
        "`jax.export.symbolic_shape('b, t')` makes two sizes. Where do you use a size as a Python number: in `range`, "
        "`len`, `if`, a slice?",
        "Sum with something that slides a window: `jax.lax.reduce_window` with padding (window - 1, 0) in time, or "
        "`window` shifted copies. Counts are `jnp.minimum(jnp.arange(T) + 1, window)`.",
        "`jax.export.export(jax.jit(means), platforms=platforms)(ShapeDtypeStruct((b, t, width), float32), "
        "ShapeDtypeStruct((b,), int32)).serialize()`; in `means`, select with `jnp.where(arange(T) < length[:, None])` "
        "at the end.",
    ),
)


def export_means_with(
    *, sizes="b, t", fixed=(None, None), past=0, side="before", count="seen", mask="where", how="window", edge=0,
    only=None, length_type=jnp.int32, least=False,
):  # fmt: skip
    def fn(window, width, platforms):
        def means(x_BTD, length_B):
            T = len(x_BTD[0]) if how == "len" else x_BTD.shape[1]
            w = window + past
            if how == "cumsum":
                total = jnp.pad(jnp.cumsum(x_BTD, 1), ((0, 0), (w, 0), (0, 0)))
                sum_BTD = total[:, w:] - total[:, :T]
            elif how == "roll":
                sum_BTD = sum(jnp.roll(x_BTD, k, 1) for k in range(w))
            else:
                pad = {"before": (w - 1, 0), "ahead": (0, w - 1), "centre": (w // 2, (w - 1) // 2)}
                ones = (1, 1, 1)
                x_BTD = jnp.where(jnp.isnan(x_BTD), 0, x_BTD) if side == "ahead" else x_BTD
                if mask == "rows":
                    x_BTD = jnp.where((jnp.arange(T) < length_B[:, None])[..., None], x_BTD, 0)
                sum_BTD = jax.lax.reduce_window(
                    x_BTD, 0.0, jax.lax.add, (1, w, 1), ones, ((0, 0), pad[side], (0, 0))
                )
            at_T = jnp.arange(T)
            n_T = jnp.minimum(at_T + 1, w) if count == "seen" else jnp.full(T, w)
            mean_BTD = sum_BTD / n_T[:, None]
            inside = (at_T < length_B[:, None] + edge)[..., None]
            if mask in ("none", "rows"):
                return mean_BTD
            return jnp.where(inside, mean_BTD, 0) if mask == "where" else mean_BTD * inside

        held = [f"t >= {window}"] if least else []
        b, t = jax.export.symbolic_shape(sizes, constraints=held)
        b, t = (s if f is None else f for s, f in zip((b, t), fixed, strict=True))
        args = (
            jax.ShapeDtypeStruct((b, t, width), jnp.float32),
            jax.ShapeDtypeStruct((b,), length_type),
        )
        names = platforms if only is None else only(platforms)
        return bytes(jax.export.export(jax.jit(means), platforms=names)(*args).serialize())

    return fn


def moving_means(x, length, window):
    out = np.zeros(x.shape, np.float32)
    for b, t in np.ndindex(*x.shape[:2]):
        if t < length[b]:
            out[b, t] = x[b, max(t - window + 1, 0) : t + 1].mean(0)
    return out


def read_program(fn, t, *args):
    data = fn(*args)
    why = (
        f"the result is of type {type(data).__name__}, want bytes: the exported program, serialized"
    )
    t.true(isinstance(data, bytes), why, str(type(data)))
    return jax.export.deserialize(bytearray(data))


def asked(t, B, T, D, scale=1.0):
    x = t.rng.normal(size=(B, T, D)).astype(np.float32) * scale
    return x, t.rng.integers(0, T + 1, B).astype(np.int32)


@symbolic.check("what the program takes")
def _(fn, t):
    for window, width, platforms in ((3, 5, ("cpu",)), (1, 2, ("cpu", "tpu"))):
        program = read_program(fn, t, window, width, platforms)
        shapes = [tuple(map(str, a.shape)) for a in program.in_avals]
        free = sorted({s for shape in shapes for s in shape if not s.isdigit()})
        why = (
            f"{free} are the symbolic sizes in {shapes}: want two, one for texts, one for positions"
        )
        t.true(len(free) == 2, why, f"{shapes}")
        want = [(free[0], free[1], str(width)), (free[0],)]
        if shapes[0][0] != free[0]:
            want = [(free[1], free[0], str(width)), (free[1],)]
        t.equal(shapes, want, "the shapes that the program takes")
        dtypes = [str(a.dtype) for a in program.in_avals]
        t.equal(dtypes, ["float32", "int32"], "the types that the program takes")


@symbolic.check("the platforms")
def _(fn, t):
    for platforms in (("cpu",), ("tpu", "cpu"), ("cpu", "cuda", "tpu")):
        program = read_program(fn, t, 2, 3, platforms)
        t.equal(tuple(program.platforms), platforms, "the platforms of the program")


@symbolic.check("any batch, any length")
def _(fn, t):
    for window, width, sizes in (
        (4, 3, ((1, 1), (5, 4), (3, 33))), (1, 2, ((2, 3),)), (9, 1, ((1, 5), (4, 17))),
    ):  # fmt: skip
        program = read_program(fn, t, window, width, ("cpu",))
        for B, T in sizes:
            x, _ = asked(t, B, T, width)
            length = np.full(B, T, np.int32)
            why = f"window = {window}, batch = {B}, T = {T}, full length"
            t.close(program.call(x, length), moving_means(x, length, window), 1e-4, 1e-5, why)


@symbolic.check("beyond a text's end")
def _(fn, t):
    program = read_program(fn, t, 3, 4, ("cpu",))
    for B, T in ((4, 8), (2, 21)):
        x, length = asked(t, B, T, 4)
        length[:2] = T // 2, 0
        why = f"lengths {length.tolist()}, T = {T}"
        t.close(program.call(x, length), moving_means(x, length, 3), 1e-4, 1e-5, why)
        x[np.arange(T) >= length[:, None]] = np.nan
        got = program.call(x, length)
        t.close(got, moving_means(x, length, 3), 1e-4, 1e-5, f"{why}, NaN beyond the lengths")


@symbolic.check("one very large row")
def _(fn, t):
    program = read_program(fn, t, 3, 2, ("cpu",))
    x, _ = asked(t, 2, 40, 2)
    x[:, 1] = 3e7
    length = np.full(2, 40, np.int32)
    got = np.asarray(program.call(x, length))[:, 5:]
    want = moving_means(x, length, 3)[:, 5:]
    t.close(got, want, 1e-4, 1e-4, "row 1 is 3e7; means of rows that don't include it")


for name, hint, options in (
    ("one_letter", "You gave both sizes one letter. The program then takes only texts as long as there are texts.",
     {"sizes": "b, b"}),
    ("fixed_batch", "The batch is a number in your program. The next caller has another one.", {"fixed": (8, None)}),
    ("fixed_length", "The length is a number in your program. Texts differ in length.", {"fixed": (None, 128)}),
    ("all_fixed", "Your program takes arrays of one size: neither batch nor length is symbolic.", {"fixed": (4, 64)}),
    ("by_len", "`len` and `range` need an int, and a symbolic size isn't one. Use `x.shape`, and do to "
     "all positions at once what a Python loop would do to one.", {"how": "len"}),
    ("here_only", "You lower for the machine you're on. `platforms` says which ones are wanted.",
     {"only": lambda p: ("cpu",)}),
    ("sorted_platforms", "The platforms are sorted. Keep the order you're given.",
     {"only": lambda p: tuple(sorted(p))}),
    ("one_more_row", "Your window has one row too many.", {"past": 1}),
    ("ahead", "Your window looks ahead: pad at the beginning, not at the end.", {"side": "ahead"}),
    ("whole_windows", "At the beginning there are fewer rows than `window`. Divide by how many there are.",
     {"count": "window"}),
    ("no_end", "You don't use `length`: beyond a text's end the mean is 0.", {"mask": "none"}),
    ("times_mask", "0 times NaN is NaN. Select with `jnp.where` instead of multiplying.", {"mask": "times"}),
    ("one_past_the_end", "Position `length[b]` is the first one beyond the end, not the last one inside.",
     {"edge": 1}),
    ("cumulative", "The difference of two running sums loses what is small beside everything before. Sum each "
     "window by itself.", {"how": "cumsum"}),
    ("float_lengths", "Lengths come as int32.", {"length_type": jnp.float32}),
    ("wraps_round", "`roll` brings the last rows back to the beginning. The window of an early row holds only rows "
     "before it.", {"how": "roll"}),
    ("centred", "Your window has the row in its middle. It must be the window's last row.", {"side": "centre"}),
    ("rows_beyond_are_zero", "You clear the rows beyond a text's end before taking means. The mean at a position "
     "beyond the end then still has rows of the text in it: it must be 0.", {"mask": "rows"}),
    ("no_short_texts", "Your program refuses texts shorter than `window`. T may be as small as 1.", {"least": True}),
):  # fmt: skip
    mistaken(symbolic, name, hint, export_means_with(**options))


# ----------------------------------------------------------------------------------- manifest

manifest_ = Exercise(
    "27.manifest",
    title="Refuse what isn't the artefact",
    function="faults",
    minutes=30,
    points=15,
    statement="""
Write `faults(manifest, files, wanted)`: everything that's wrong with an artefact, as a sorted list of pairs
(kind, name). Nothing is loaded unless this list is empty.

`manifest["files"]` has the files as they were written, with their size in `bytes` and `sha256` (hexadecimal). A name
in it uses `/` between folders. Per file there's at most one fault, the first of these:

- `"unsafe"`: the name has a backslash, or one of its parts between slashes is empty, `.` or `..`. Such a name could
  leave the folder.
- `"missing file"`: it isn't in `files`. `"size"`: its length differs. `"hash"`: its SHA-256 differs.

A file that the manifest doesn't list is an `"extra file"`, whatever its name.

`manifest["arrays"]` has each array's `file`, `offset` in bytes, `dtype` and `shape`. `wanted` has the dtype and shape
that the program takes. Per array there's at most one fault, the first of these:

- `"missing array"`: the program wants it and the manifest doesn't have it. `"extra array"`: the other way round.
- `"dtype"`, then `"shape"`: they differ from what's wanted.
- `"outside"`: it begins before its file does, or ends after it. The file's size is the one in the manifest; a file that
  the manifest doesn't list has no bytes.

Types are float32, int32 (4 bytes), bfloat16, float16 (2) and int8 (1). A shape may be a list or a tuple, and `[]` is
one number.
""",
    hints=(
        "Write down who must be compared with whom: manifest with folder, both ways; manifest with program, both ways; "
        "and each array with its file.",
        "An `if`/`elif` chain per name gives only the first fault. `name.split('/')` of an absolute path begins with "
        "an empty part.",
        "An array ends at `offset + size * math.prod(shape)`, with the bytes of its dtype; `math.prod([])` is 1. "
        "Compare `tuple(shape)` with `tuple(wanted_shape)`, never their products.",
    ),
)  # fmt: skip

BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def faults_with(
    *, unsafe="parts", missing=True, sizes=True, hashes=True, both=False, extra=True, extra_array=True,
    missing_array=True, dtype="name", shape="tuple", outside="end", first=False, order=True, also=False,
    trusts=False, folder_size=False, extra_unsafe=False, one_a_name=False, skips=False, digest="hexdigest",
):  # fmt: skip
    def is_unsafe(name):
        parts = name.split("/")
        bad = any(part in ("", ".", "..") for part in parts)
        return {"parts": "\\" in name or bad, "starts": name.startswith(("..", "/", "./")) or "\\" in name,
                "dots": "\\" in name or ".." in parts or "." in parts, "slash": bad, "never": False,
                "anywhere": "\\" in name or bad or ".." in name,
                "normal": "\\" in name or posixpath.normpath(name) != name}[unsafe]  # fmt: skip

    def fn(manifest, files, wanted):
        found = []
        for name, said in manifest["files"].items():
            if is_unsafe(name):
                found.append(("unsafe", name))
                if not also:
                    continue
            if name not in files:
                found += [("missing file", name)] if missing else []
                continue
            wrong = len(files[name]) != said["bytes"]
            if sizes and wrong:
                found.append(("size", name))
            differs = getattr(hashlib.sha256(files[name]), digest)() != said["sha256"]
            if hashes and differs and (both or not (sizes and wrong)):
                found.append(("hash", name))
        if extra:
            for name in files.keys() - manifest["files"].keys():
                kind = "unsafe" if extra_unsafe and is_unsafe(name) else "extra file"
                found.append((kind, name))
        spoiled = {name for _, name in found}
        arrays = manifest["arrays"]
        if extra_array:
            found += [("extra array", n) for n in arrays if n not in wanted]
        for name, (kind, sides) in wanted.items():
            if name not in arrays:
                found += [("missing array", name)] if missing_array else []
                continue
            said = arrays[name]
            same = said["dtype"] == kind
            if dtype == "bytes":
                same = BYTES[said["dtype"]] == BYTES[kind]
            a, b = tuple(said["shape"]), tuple(sides)
            alike = math.prod(a) == math.prod(b) if shape == "product" else a == b
            alike = len(a) == len(b) if shape == "rank" else alike
            if dtype != "none" and not same:
                found.append(("dtype", name))
                if not both:
                    continue
            if shape != "none" and not alike:
                found.append(("shape", name))
                continue
            many = 0 if outside == "no number" and not a else math.prod(a)
            size = many * {"items": 1, "four": 4}.get(outside, BYTES[said["dtype"]])
            other = {} if trusts == "listed" else {"bytes": math.inf if trusts else 0}
            room = manifest["files"].get(said["file"], other)["bytes"]
            if folder_size:
                room = len(files.get(said["file"], b""))
            start = said["offset"]
            end = size if outside == "size" else start + size
            beyond = end >= room if outside == "exact" else end > room
            beyond = beyond or (outside == "begins" and start >= room)
            if outside == "none" or (skips and said["file"] in spoiled):
                continue
            if beyond or (start < 0 and outside != "after"):
                found.append(("outside", name))
        if first:
            found = found[:1]
        if order == "names":
            return sorted(found, key=lambda fault: fault[1])
        if one_a_name:
            found = [(kind, name) for name, kind in {name: kind for kind, name in found}.items()]
        return sorted(found) if order else found

    return fn


def artefact_of(t):
    """A right artefact: two files of weights, a program, and the arrays that it takes."""
    n, m = (int(x) for x in t.rng.choice(range(4, 10), 2, replace=False))
    shapes = {"embed": ("bfloat16", [n, m]), "scale": ("float32", [m]), "codes": ("int8", [7 + n]),
              "step": ("int32", []), "half": ("float16", [2, m])}  # fmt: skip
    names = [str(n) for n in t.rng.permutation(list(shapes))]
    where = {n: f"weights/{i % 2}.bin" for i, n in enumerate(names)}
    files, arrays = {"program.bin": t.rng.bytes(40)}, {}
    for file in ("weights/0.bin", "weights/1.bin"):
        size = 0
        for name in (n for n in names if where[n] == file):
            dtype, shape = shapes[name]
            size += int(t.rng.integers(0, 4))
            arrays[name] = {"file": file, "offset": size, "dtype": dtype, "shape": list(shape)}
            size += BYTES[dtype] * math.prod(shape)
        files[file] = t.rng.bytes(size)
    listed = {
        n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()
    }
    return (
        {"files": listed, "arrays": arrays},
        files,
        {n: (d, tuple(s)) for n, (d, s) in shapes.items()},
    )


KINDS = {
    "unsafe", "missing file", "size", "hash", "extra file", "missing array", "extra array", "dtype", "shape", "outside",
}  # fmt: skip


def finds(fn, t, artefact, why):
    got, want = [tuple(f) for f in fn(*artefact)], faults_with()(*artefact)
    lacks, more = ([f for f in a if f not in b] for a, b in ((want, got), (got, want)))
    odd = sorted({str(f[0]) for f in got if f and f[0] not in KINDS})
    told = "the right faults, not sorted by kind and then by name"
    if any(f[::-1] in want for f in more):
        told = "yours are pairs (name, kind), want (kind, name)"
    elif odd:
        told = f"{odd} aren't kinds of the statement"
    elif len(got) > len(set(got)) and not lacks + more:
        told = "the right faults, but some are in the list twice"
    elif lacks or more:
        told = "; ".join(
            f"{k} {f[:3]}" for k, f in (("yours lacks", lacks), ("yours has", more)) if f
        )
    t.equal(got, want, f"{told}: {why}")


def listing(data):
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@manifest_.check("an artefact that is right")
def _(fn, t):
    for _ in range(3):
        finds(fn, t, artefact_of(t), "nothing is wrong")
    empty = {"files": {}, "arrays": {}}, {}, {}
    finds(fn, t, empty, "nothing at all, which is right")


@manifest_.check("changed files")
def _(fn, t):
    manifest, files, wanted = artefact_of(t)
    name = "weights/0.bin"
    at, by = int(t.rng.integers(len(files[name]))), int(t.rng.integers(1, 256))
    changed = bytearray(files[name])
    changed[at] ^= by
    finds(fn, t, (manifest, files | {name: bytes(changed)}, wanted), f"byte {at} changed by {by}")
    finds(fn, t, (manifest, files | {name: files[name][:-1]}, wanted), "a byte is cut off")
    longer = {"program.bin": files["program.bin"] + b"\0"}
    finds(fn, t, (manifest, files | longer, wanted), "a byte was added to the program")


@manifest_.check("files missing and extra")
def _(fn, t):
    manifest, files, wanted = artefact_of(t)
    fewer = {n: d for n, d in files.items() if n != "weights/1.bin"}
    finds(fn, t, (manifest, fewer, wanted), "a file of weights is missing")
    finds(fn, t, (manifest, files | {"run_me.py": b"x"}, wanted), "a file that wasn't written")
    finds(fn, t, (manifest, {}, wanted), "an empty folder")
    odd = {"notes\\old.txt": b"x", "a//b": b"x"}
    finds(fn, t, (manifest, files | odd, wanted), f"files that weren't written: {sorted(odd)}")


@manifest_.check("names that leave the folder")
def _(fn, t):
    manifest, files, wanted = artefact_of(t)
    for name in (
        "../weights.bin", "weights/../../x", "/etc/passwd", "a//b", "./a", "a/.", "b\\..\\c", "d\\e", "a/", "",
        "notes..txt", ".hidden", "a/b.c/d",
    ):  # fmt: skip
        manifest["files"][name], files[name] = listing(b"w"), b"w"
    why = f"a manifest with the files {sorted(manifest['files'])}"
    finds(fn, t, (manifest, files, wanted), why)
    for name in ("../gone", "b\\gone", "/gone"):
        manifest["files"][name] = listing(b"")
    finds(fn, t, (manifest, files, wanted), "an unsafe name that is also missing has one fault")


@manifest_.check("arrays missing and extra")
def _(fn, t):
    manifest, files, wanted = artefact_of(t)
    gone, new = (str(n) for n in t.rng.choice(sorted(wanted), 2, replace=False))
    less = {n: a for n, a in manifest["arrays"].items() if n != gone}
    fewer = {n: a for n, a in wanted.items() if n != new}
    why = f"the manifest hasn't got {gone}, and the program doesn't take {new}"
    finds(fn, t, (manifest | {"arrays": less}, files, fewer), why)


def relisted(t, changes):
    manifest, files, wanted = artefact_of(t)
    changes = changes(wanted) if callable(changes) else changes
    for name, changed in changes.items():
        manifest["arrays"][name] |= changed
    return manifest, files, wanted


@manifest_.check("types")
def _(fn, t):
    for changes in (
        {"half": {"dtype": "bfloat16"}, "step": {"dtype": "int8"}}, {"step": {"dtype": "float32"}},
        {"embed": {"dtype": "float16", "shape": [15]}, "half": {"dtype": "float32"}},
    ):  # fmt: skip
        finds(fn, t, relisted(t, changes), f"listed with {changes}")


@manifest_.check("shapes")
def _(fn, t):
    def changes(wanted):
        (n, m), (codes,) = wanted["embed"][1], wanted["codes"][1]
        return {"embed": {"shape": [m, n]}, "half": {"shape": [2 * m]}, "scale": {"shape": [m - 1]},
                "step": {"shape": [1]}, "codes": {"shape": [1, codes]}}  # fmt: skip

    artefact = relisted(t, changes)
    listed = {name: said["shape"] for name, said in artefact[0]["arrays"].items()}
    finds(fn, t, artefact, f"the shapes listed are {listed}")
    changes = {"scale": {"shape": []}}
    finds(fn, t, relisted(t, changes), f"listed with {changes}, and the program takes more")
    manifest, files, wanted = artefact_of(t)
    wanted["codes"] = ("int8", (0,))
    manifest["arrays"]["codes"] |= {"shape": (0,)}
    finds(fn, t, (manifest, files, wanted), "an array of no numbers, its shape a tuple")
    said = manifest["arrays"]["codes"]
    said["offset"] = manifest["files"][said["file"]]["bytes"]
    finds(fn, t, (manifest, files, wanted), "an array of no numbers where its file ends")


@manifest_.check("an array that is too large, and one that begins too early")
def _(fn, t):
    manifest, files, wanted = relisted(t, {"codes": {"shape": [999]}, "scale": {"offset": -1}})
    wanted["codes"] = ("int8", (999,))
    finds(
        fn,
        t,
        (manifest, files, wanted),
        "codes alone is larger than a file, scale begins at byte -1",
    )


@manifest_.check("arrays outside their file")
def _(fn, t):
    for beyond in (0, 1, 1000):
        manifest, files, wanted = artefact_of(t)
        for name in wanted:
            said = manifest["arrays"][name]
            size = BYTES[said["dtype"]] * math.prod(said["shape"])
            said["offset"] = len(files[said["file"]]) - size + beyond
        finds(fn, t, (manifest, files, wanted), f"all end {beyond} bytes after their file's end")
    changes = {"scale": {"offset": -1}, "embed": {"file": "other.bin"}, "step": {"offset": 90}}
    manifest, files, wanted = relisted(t, changes)
    longer = {n: d + bytes(100) for n, d in files.items()}
    why = f"listed with {changes}, and files that are longer than the manifest says"
    finds(fn, t, (manifest, longer, wanted), why)


@manifest_.check("several faults at once")
def _(fn, t):
    manifest, files, wanted = artefact_of(t)
    manifest["files"]["/z"] = listing(b"")
    manifest["arrays"]["step"]["dtype"] = "int8"
    manifest["arrays"]["codes"]["shape"] = [70]
    files["zz"] = b""
    files["program.bin"] = bytes(40)
    del files["weights/1.bin"]
    finds(fn, t, (manifest, files, wanted), "seven things are wrong")
    manifest["arrays"]["zz"] = manifest["arrays"]["scale"]
    finds(fn, t, (manifest, files, wanted), "an extra file and an extra array have one name")


for name, hint, options in (
    ("without_hash", "A byte that changed leaves the size as it was. Compute the SHA-256 of what is there.",
     {"hashes": False}),
    ("without_size", "A file of another length has the fault \"size\", before anything is hashed.", {"sizes": False}),
    ("every_fault", "One fault per name: the first in the statement's order.", {"both": True}),
    ("ignores_missing_files", "Files that are listed and not there are a fault.", {"missing": False}),
    ("ignores_extra_files", "You go through the manifest alone. What is in the folder and not in the manifest?",
     {"extra": False}),
    ("starts_with", "A name can leave the folder in the middle: `weights/../../x`. Look at each part.",
     {"unsafe": "starts"}),
    ("only_dots", "An absolute path has no `..` at all. Its first part, before the first slash, is empty.",
     {"unsafe": "dots"}),
    ("no_backslash", "On Windows a backslash goes between folders too.", {"unsafe": "slash"}),
    ("trusts_names", "You open whatever the manifest names. Look at names before files.", {"unsafe": "never"}),
    ("dots_anywhere", "`notes..txt` is a harmless name. Two dots count only as a whole part.",
     {"unsafe": "anywhere"}),
    ("unsafe_and_more", "A name that's unsafe has that fault alone: don't look for the file.", {"also": True}),
    ("ignores_extra_arrays", "The manifest may have arrays that the program doesn't take.", {"extra_array": False}),
    ("ignores_missing_arrays", "The program wants an array that the manifest hasn't got.", {"missing_array": False}),
    ("as_many_bytes", "float16 and bfloat16 have as many bytes, and mean other numbers. Compare the names.",
     {"dtype": "bytes"}),
    ("any_dtype", "The types of the arrays aren't compared.", {"dtype": "none"}),
    ("as_many_numbers", "[3, 5] and [5, 3] have as many numbers, in another order. Compare each dimension.",
     {"shape": "product"}),
    ("rank_only", "You compare how many dimensions there are, not how long they are.", {"shape": "rank"}),
    ("any_shape", "The shapes of the arrays aren't compared.", {"shape": "none"}),
    ("counts_numbers", "Offsets are in bytes: a number takes as many as its type says.", {"outside": "items"}),
    ("four_bytes", "Not every number takes four bytes.", {"outside": "four"}),
    ("without_offset", "An array ends at its offset plus its bytes.", {"outside": "size"}),
    ("exact_is_outside", "An array may end exactly where its file ends.", {"outside": "exact"}),
    ("negative_offset", "An offset can be negative: then the array begins before its file does.",
     {"outside": "after"}),
    ("anywhere_in_the_file", "Nothing checks that an array is inside its file.", {"outside": "none"}),
    ("unlisted_file", "An array in a file that the manifest doesn't list has no bytes there.", {"trusts": True}),
    ("size_of_the_folder", "The size of a file is what the manifest says, not what is in the folder.",
     {"folder_size": True}),
    ("first_only", "You stop at the first fault. Whoever repairs it wants to know all of them.", {"first": True}),
    ("unsorted", "The list is sorted, by kind and then by name.", {"order": False}),
    ("normal_path", "`normpath` leaves `../weights.bin` and `/etc/passwd` as they are. Look at each part of the name.",
     {"unsafe": "normal"}),
    ("unsafe_extra", "A file that the manifest doesn't list is an \"extra file\", whatever its name.",
     {"extra_unsafe": True}),
    ("one_fault_a_name", "A file and an array may have the same name, and then each can have a fault.",
     {"one_a_name": True}),
    ("nothing_begins_there", "An array of no numbers may begin where its file ends. Only its end counts.",
     {"outside": "begins"}),
    ("bytes_of_the_hash", "`digest()` gives bytes, which never equal the manifest's hexadecimal text.",
     {"digest": "digest"}),
    ("no_number", "A shape of [] has one number, not none.", {"outside": "no number"}),
    ("file_must_be_listed", "An array may name a file that the manifest doesn't list. Then it's outside.",
     {"trusts": "listed"}),
    ("sorted_by_name", "Your list is sorted by name alone. The kind comes first.", {"order": "names"}),
    ("arrays_of_good_files", "An array's place is compared with the manifest, even if its file has a fault.",
     {"skips": True}),
):  # fmt: skip
    mistaken(manifest_, name, hint, faults_with(**options))


# ------------------------------------------------------------------------------------ buckets

buckets = Exercise(
    "27.buckets",
    title="Which sizes to compile for",
    function="choose_buckets",
    minutes=40,
    points=25,
    statement="""
*A design exercise.* Each new size that a program sees costs a compilation, so a server pads requests to one of a few
sizes, the smallest that's long enough. Write `choose_buckets(count, seconds, most, compile_seconds, multiple)`, which
chooses the sizes for a known day of requests.

- `count[length]` is how many requests have a length; lengths are at least 1. A request that's padded to `size` takes
  `seconds(size)`, which never falls as size grows. Each size that you choose costs `compile_seconds` once.
- The day costs the time of all requests, plus the compilations. Return a list of sizes, ascending, for which it costs
  least. The checks compare the cost, so any of several best lists is right.
- At most `most` sizes (at least 1), each a multiple of `multiple`. Fewer may be better. Each length has a size that's
  long enough.
- Without requests there are no sizes. A length with a count of 0 needs none.
- There may be 250 lengths and 12 sizes. Trying all choices would take millions of years.
""",
    hints=(
        "Why is every size of a best choice some request's own length, rounded up to `multiple`? How many sizes does "
        "that leave?",
        "Say you know the best cost of serving the shortest i lengths with k sizes, for all i. The next size covers "
        "lengths i to j. How do you get the best cost for j with k + 1 sizes from that?",
        "`best[k + 1][j] = min over i < j of best[k][i] + requests(i, j) * seconds(size_j) + compile_seconds`. Keep "
        "which i it was, and in the end take the best k.",
    ),
)


def price_of(chosen, count, seconds, compile_seconds):
    total = compile_seconds * len(chosen)
    for length, many in count.items():
        if many:
            total += many * seconds(min(s for s in chosen if s >= length))
    return total


def chosen_buckets(
    count, seconds, most, compile_seconds, multiple, *, price=None, weigh=True, exactly=False, how="best",
    rounded=True, each=False,
):  # fmt: skip
    def up(n):
        return -(-n // multiple) * multiple if rounded else n

    kept = {n: c for n, c in count.items() if c}
    sizes = sorted({up(n) for n in kept})
    if not sizes:
        return []
    many = [sum((c if weigh else 1) for n, c in kept.items() if up(n) == s) for s in sizes]
    cost = [(price or seconds)(s) for s in sizes]
    if how == "powers":
        grid = [up(2**k) for k in range(int(np.ceil(np.log2(sizes[-1]))) + 1)]
        return sorted(set(grid[-most:]))
    if how == "even":
        return sorted({up(math.ceil(sizes[-1] * (k + 1) / most)) for k in range(most)})
    if how == "quantiles":
        total = np.cumsum(many)
        at = [np.searchsorted(total, total[-1] * (k + 1) / most) for k in range(most)]
        return sorted({sizes[min(a, len(sizes) - 1)] for a in at})
    if how == "largest":
        return sizes[-1:]
    if how == "commonest":
        top = sorted(range(len(sizes)), key=lambda i: (-many[i], i))[: most - 1]
        return sorted({*(sizes[i] for i in top), sizes[-1]})
    if how == "greedy":
        chosen = [sizes[-1]]
        while len(chosen) < most:
            tries = [sorted([*chosen, s]) for s in sizes if s not in chosen]
            if not tries:
                break
            new = min(tries, key=lambda c: price_of(c, kept, seconds, compile_seconds))
            if price_of(new, kept, seconds, compile_seconds) >= price_of(
                chosen, kept, seconds, compile_seconds
            ):
                break
            chosen = new
        return chosen
    total = [0, *itertools.accumulate(many)]
    fixed = compile_seconds * total[-1] if each else compile_seconds
    best, answers = [(0.0, [])] + [(math.inf, [])] * len(sizes), []
    for _ in range(min(most, len(sizes))):
        new = [(math.inf, [])]
        for j in range(1, len(sizes) + 1):
            value, i = min((best[i][0] + (total[j] - total[i]) * cost[j - 1], i) for i in range(j))
            new.append((value + fixed, [*best[i][1], sizes[j - 1]]))
        best = new
        answers.append(best[-1])
    return (answers[-1] if exactly else min(answers))[1]


def cheapest(fn, t, why, count, seconds, most, compile_seconds, multiple):
    got = fn(dict(count), seconds, most, compile_seconds, multiple)
    ok = isinstance(got, (list, tuple)) and all(isinstance(s, (int, np.integer)) for s in got)
    t.true(ok, f"want a list of ints, got {str(got)[:60]}, {why}", str(type(got)))
    got = [int(s) for s in got]
    t.true(got == sorted(set(got)), f"want sizes that ascend, got {got[:9]}, {why}", got)
    t.true(len(got) <= most, f"{len(got)} sizes, at most {most} are allowed, {why}", got)
    bad = [s for s in got if s % multiple or s < 1]
    t.true(not bad, f"{bad[:3]} are no multiples of {multiple}, {why}", got)
    used = [n for n, c in count.items() if c]
    long = [n for n in used if not got or n > got[-1]]
    t.true(not long, f"no size is long enough for length {long[:1]}, {why}", got)
    want = chosen_buckets(count, seconds, most, compile_seconds, multiple)
    mine, best = (price_of(c, count, seconds, compile_seconds) for c in (got, want))
    ends = {-(-n // multiple) * multiple for n in used}
    spare = [s for s in got if not any(n <= s and not any(n <= o < s for o in got) for n in used)]
    large = [s for s in got if s not in ends and s not in spare]
    text = f"{got[:12]} costs {mine:.6g} s, {compile_seconds * len(got):.6g} s of it for compilations; "
    text += f"{want} costs {best:.6g} s, {compile_seconds * len(want):.6g} s of it for compilations"
    if spare:
        text += f"; no request is padded to {spare[0]}"
    elif large:
        need = max(e for e in ends if e < large[0])
        text += f"; the longest request that is padded to {large[0]} would fit into {need}"
    text += f", {why}"
    t.true(mine <= best * (1 + 1e-9) + 1e-9, text, got)


def line(a, b):
    return lambda size: a + b * size


def day(t, lengths, most_of_one=90):
    drawn = t.rng.choice(range(1, 12 * lengths), lengths, replace=False)
    return {
        int(n): int(c) for n, c in zip(drawn, t.rng.integers(1, most_of_one, lengths), strict=True)
    }


@buckets.check("one size")
def _(fn, t):
    for multiple in (1, 8):
        cheapest(
            fn, t, f"most = 1, multiple = {multiple}", day(t, 9), line(0, 0.01), 1, 1.0, multiple
        )


@buckets.check("a few sizes")
def _(fn, t):
    for n in range(6):
        count = day(t, 14)
        cheapest(
            fn,
            t,
            f"{len(count)} lengths, most = {2 + n % 3}",
            count,
            line(0.3, 0.02),
            2 + n % 3,
            0.5,
            1,
        )


@buckets.check("a few very common lengths")
def _(fn, t):
    for _ in range(3):
        count = {n: c * (100 if t.rng.random() < 0.2 else 1) for n, c in day(t, 20).items()}
        cheapest(
            fn, t, "some lengths are a hundred times as common", count, line(0, 0.01), 4, 0.5, 1
        )


@buckets.check("expensive compilations")
def _(fn, t):
    why = "a request takes 2 s whatever its size, a compilation 90 s"
    cheapest(fn, t, why, day(t, 12, 9), line(2.0, 0), 3, 90.0, 1)
    for most in (3, 12):
        count = day(t, 12, 9)
        cheapest(
            fn, t, f"a compilation takes 90 s, most = {most}", count, line(0.1, 0.03), most, 90.0, 1
        )
    cheapest(fn, t, "compilations are free", day(t, 6), line(0, 1), 9, 0.0, 1)


@buckets.check("multiples")
def _(fn, t):
    for multiple in (8, 50, 128):
        cheapest(fn, t, f"multiples of {multiple}", day(t, 25), line(0, 0.01), 3, 2.0, multiple)
    count = dict.fromkeys((10, 65, 128), int(t.rng.integers(50, 200)))
    cheapest(fn, t, "lengths 10, 65 and 128, multiples of 64", count, line(0, 0.01), 2, 1.0, 64)


@buckets.check("attention's square")
def _(fn, t):
    def square(size):
        return 1e-4 * size**2 + 0.001 * size

    def steps(size):
        return 0.5 * math.ceil(size / 96)

    for seconds, name in ((square, "1e-4 size^2 + 0.001 size"), (steps, "0.5 ceil(size / 96)")):
        for most in (2, 5):
            cheapest(fn, t, f"seconds = {name}, most = {most}", day(t, 22), seconds, most, 3.0, 1)


@buckets.check("no requests, one, and lengths that didn't come")
def _(fn, t):
    cheapest(fn, t, "no requests", {}, line(1, 1), 3, 1.0, 4)
    cheapest(fn, t, "only counts of 0", {5: 0, 9: 0}, line(1, 1), 3, 1.0, 4)
    cheapest(fn, t, "one length", {int(t.rng.integers(1, 99)): 3}, line(1, 1), 3, 1.0, 4)
    cheapest(fn, t, "the longest has a count of 0", {7: 5, 12: 3, 4000: 0}, line(0, 1), 2, 1.0, 1)


@buckets.check("a long day")
def _(fn, t):
    cheapest(fn, t, "250 lengths, 12 sizes", day(t, 250), line(0.02, 0.001), 12, 5.0, 1)


def buckets_with(**options):
    def fn(count, seconds, most, compile_seconds, multiple):
        changed = dict(options)
        if changed.pop("waste", False):
            changed["price"] = float
        most += changed.pop("more", 0)
        return chosen_buckets(count, seconds, most, compile_seconds, multiple, **changed)

    return fn


def too_small(count, seconds, most, compile_seconds, multiple):
    got = chosen_buckets(count, seconds, most, compile_seconds, multiple)
    return [s - multiple for s in got if s > multiple]


def rounded_late(count, seconds, most, compile_seconds, multiple):
    got = chosen_buckets(count, seconds, most, compile_seconds, 1)
    return sorted({-(-size // multiple) * multiple for size in got})


def free_compilations(count, seconds, most, compile_seconds, multiple):
    def choose(k):
        return chosen_buckets(count, seconds, k, 0.0, multiple, exactly=True)

    tries = map(choose, range(1, most + 1))
    return min(tries, key=lambda chosen: price_of(chosen, count, seconds, 0.0))


def with_zeros(count, seconds, most, compile_seconds, multiple):
    got = chosen_buckets(
        {n: max(c, 1) for n, c in count.items()}, seconds, most, compile_seconds, multiple
    )
    return got


for name, hint, fn in (
    ("powers_of_two", "Powers of two know nothing of your requests.", buckets_with(how="powers")),
    ("even_steps", "You cut the range into equal steps. Where are the requests?", buckets_with(how="even")),
    ("quantiles", "Equally many requests for each size doesn't mean the least waste: among long ones a gap costs "
     "more.",
     buckets_with(how="quantiles")),
    ("the_largest", "One size for all is right only if compilations are very expensive, or `most` is 1.",
     buckets_with(how="largest")),
    ("the_commonest", "The commonest lengths may be neighbours. A size is worth what it saves those below it.",
     buckets_with(how="commonest")),
    ("greedy", "The best single addition isn't always part of the best set. Two sizes can be good only together.",
     buckets_with(how="greedy")),
    ("unweighted", "Each length counts once in your sum. It counts as often as it's asked for.",
     buckets_with(weigh=False)),
    ("padding_only", "You minimise the padded size. The time is `seconds(size)`, which needn't be in proportion.",
     buckets_with(waste=True)),
    ("all_of_them", "You always use as many sizes as are allowed. Each costs `compile_seconds`: fewer may be "
     "cheaper.", buckets_with(exactly=True)),
    ("compiled_for_each_request", "A size costs `compile_seconds` once, not for each request.",
     buckets_with(each=True)),
    ("not_rounded", "Sizes are multiples of `multiple`: round a length up.", buckets_with(rounded=False)),
    ("one_too_many", "You choose one size more than `most` allows.", buckets_with(more=1)),
    ("rounded_down", "A size must be long enough: round up, and keep the largest.", too_small),
    ("lengths_that_never_came", "A length with a count of 0 needs no size.", with_zeros),
    ("rounded_late", "You choose among the lengths and round afterwards. Round first: two lengths may become one size.",
     rounded_late),
    ("free_compilations", "You leave `compile_seconds` out when you compare choices. Fewer sizes may be cheaper.",
     free_compilations),
):  # fmt: skip
    mistaken(buckets, name, hint, fn)


# ------------------------------------------------------------------------------------ batcher

batcher = Exercise(
    "27.batcher",
    title="A server that waits for company",
    function="batches",
    minutes=25,
    points=15,
    statement="""
A server computes one batch at a time. Write `batches(arrivals, most, wait, seconds)`, which follows it through requests
that arrive at known times.

- The server always takes the oldest requests, up to `most` of them, as one batch. A batch of n takes `seconds(n)`.
- It begins a batch as soon as it's free *and* either `most` requests are there, or the oldest has waited for `wait`
  since it arrived.
- A request that arrives at the very moment that a batch begins is part of it, if there's room.
- Return the sizes of the batches in order, and each request's latency, from its arrival to the end of its batch. The
  server doesn't know what will arrive, or that nothing will.

Times are floats of any sign, in ascending order, and several may be equal.
""",
    hints=(
        "When does a batch begin? Three times decide: when the server is free, when the oldest request has waited "
        "enough, and when the last one that fits arrives.",
        "`start = max(free, min(arrivals[first] + wait, arrivals[first + most - 1]))`, if there is such a request.",
        "Who is in the batch: those of `arrivals[first : first + most]` that arrived at or before `start`. Then "
        "`free = start + seconds(n)`, and `first += n`.",
    ),
)


def batches_with(
    *, cap=True, full=True, busy=True, clock="arrival", tie=True, who="start", alone=False, time="n", since="arrival",
    end=True, first_free=-math.inf, foresees=False, impatient=False,
):  # fmt: skip
    def fn(arrivals, most, wait, seconds):
        sizes, latency, free, first = [], [], first_free, 0
        while first < len(arrivals):
            last = first + most - 1
            ready = arrivals[last] if full and last < len(arrivals) else math.inf
            newest = arrivals[min(last, len(arrivals) - 1)]
            opened = {
                "arrival": arrivals[first],
                "free": max(free, arrivals[first]),
                "newest": newest,
            }[clock]
            due = opened + wait
            if foresees and last >= len(arrivals):
                ready = arrivals[-1]
            if alone or (impatient and free > arrivals[first]):
                due = opened
            start = min(ready, due)
            start = max(free, start) if busy else start
            seen = due if who == "due" else start
            batch = arrivals[first : first + most] if cap else arrivals[first:]
            batch = [a for a in batch if (a <= seen if tie else a < seen)] or [arrivals[first]]
            takes = seconds(most if time == "most" else 1 if time == "one" else len(batch))
            takes *= len(batch) if time == "one" else 1
            free = start + takes
            sizes.append(len(batch))
            origin = {"arrival": None, "start": start, "oldest": arrivals[first]}[since]
            stop = free if end else start
            latency += [stop - (a if origin is None else origin) for a in batch]
            first += len(batch)
        return sizes, latency

    return fn


def beginnings(arrivals, most, wait, seconds):
    """When each batch begins and ends, and why then."""
    sizes, _ = batches_with()(arrivals, most, wait, seconds)
    free, first = -math.inf, 0
    for size in sizes:
        full = arrivals[first + most - 1] if first + most <= len(arrivals) else math.inf
        due = arrivals[first] + wait
        start = max(free, min(full, due))
        reason = "`most` requests are there" if full < due else "the oldest has waited for `wait`"
        reason = "the server is free again" if start == free > min(full, due) else reason
        free = start + seconds(size)
        yield f"begins at {start:g}, when {reason}, takes {size} and ends at {free:g}"
        first += size


def serves(fn, t, why, arrivals, most, wait, seconds):
    got = fn(list(arrivals), most, wait, seconds)
    ok = isinstance(got, (tuple, list)) and len(got) == 2
    t.true(ok, f"want (sizes, latency), {why}", str(type(got)))
    want = batches_with()(list(arrivals), most, wait, seconds)
    numbers = isinstance(got[0], (list, tuple, np.ndarray)) and np.ndim(got[0]) == 1
    whole = numbers and all(float(n).is_integer() for n in got[0])
    t.true(
        whole, f"the first result, {str(got[0])[:60]}, isn't a list of sizes, {why}", str(got[0])
    )
    sizes, latency = [int(n) for n in got[0]], np.array(got[1], float)
    t.true(
        0 not in sizes, f"the sizes are {sizes[:9]}: a batch has at least one request, {why}", sizes
    )
    told = list(beginnings(list(arrivals), most, wait, seconds))
    of = np.repeat(np.arange(len(want[0])), want[0])
    off = [k for k, n in enumerate(want[0]) if k >= len(sizes) or sizes[k] != n]
    if not off and latency.shape == of.shape:
        off = list(of[~np.isclose(latency, want[1], 1e-9, 1e-9)])
    told = f"batch {off[0]} {told[off[0]]}, {why}" if off else why
    t.equal(sizes, want[0], f"sizes of the batches: {told}")
    t.close(latency, np.array(want[1], float), 1e-9, 1e-9, f"latencies: {told}")


def arrive(t, many, gap):
    """Times on a grid of eighths, which are exact, with ties."""
    return np.cumsum(np.round(t.rng.exponential(gap, many) * 8) / 8).tolist()


def work(n):
    return 0.5 + 0.25 * n


@batcher.check("one request, and none")
def _(fn, t):
    for wait in (0.0, 1.5):
        serves(fn, t, f"one request at 3.0, wait = {wait}", [3.0], 4, wait, work)
    serves(fn, t, "no requests", [], 4, 1.0, work)


@batcher.check("an idle server waits for company")
def _(fn, t):
    serves(fn, t, "0, 1, 2, 10 with wait = 2.5", [0.0, 1.0, 2.0, 10.0], 8, 2.5, work)
    for wait in (0.5, 2.0):
        serves(fn, t, f"far apart, wait = {wait}", arrive(t, 12, 4.0), 8, wait, lambda n: 0.125)


@batcher.check("a full batch doesn't wait")
def _(fn, t):
    serves(fn, t, "3 of 3 at 0, 0.5 and 1, wait = 9", [0.0, 0.5, 1.0, 7.0], 3, 9.0, work)
    for most in (1, 2, 5):
        serves(fn, t, f"most = {most}, wait = 30", arrive(t, 23, 1.0), most, 30.0, work)


@batcher.check("arrivals while the server is busy")
def _(fn, t):
    serves(fn, t, "a batch takes 4", [0.0, 1.0, 2.0, 3.0, 5.0], 8, 0.5, lambda n: 4.0)
    for most, wait in ((3, 0.25), (6, 1.0)):
        why = f"many at once, most = {most}, wait = {wait}"
        serves(fn, t, why, arrive(t, 40, 0.3), most, wait, work)


@batcher.check("ties")
def _(fn, t):
    serves(fn, t, "5 at the same time, most = 3", [1.0] * 5, 3, 1.0, work)
    serves(fn, t, "one arrives when the wait ends", [0.0, 2.0, 2.0, 4.0], 8, 2.0, work)
    serves(fn, t, "one arrives when the server gets free", [0.0, 1.0, 1.5], 8, 0.0, lambda n: 1.5)


@batcher.check("work that costs in other ways")
def _(fn, t):
    for seconds, name in (
        (lambda n: 0.25 * n * n, "0.25 n^2"), (lambda n: 1.0 if n < 3 else 2.5, "steps"), (lambda n: 0.0, "0"),
    ):  # fmt: skip
        start = [a - 20.0 for a in arrive(t, 30, 0.7)]
        serves(fn, t, f"seconds(n) = {name}, times from -20", start, 4, 0.75, seconds)


for name, hint, options in (
    ("no_limit", "A batch has at most `most` requests.", {"cap": False}),
    ("waits_when_full", "When `most` requests are there, waiting longer brings nothing: begin.", {"full": False}),
    ("two_at_a_time", "The server computes one batch at a time. It may still be busy when the wait is over.",
     {"busy": False}),
    ("waits_from_free", "The wait counts from the oldest request's arrival, also while the server was busy.",
     {"clock": "free"}),
    ("waits_from_the_newest", "The wait counts from the arrival of the oldest request in a batch, not of the newest.",
     {"clock": "newest"}),
    ("not_those_at_the_moment", "A request that arrives at the very moment that a batch begins is part of it.",
     {"tie": False}),
    ("door_closed", "While the server was busy, more have come than by the end of the wait. All that are there when "
     "the batch begins may be in it.", {"who": "due"}),
    ("never_waits", "The oldest waits for others, up to `wait`.", {"alone": True}),
    ("padded_time", "A batch of n takes `seconds(n)`, also when it isn't full.", {"time": "most"}),
    ("one_by_one", "A batch takes `seconds(n)`, not n times `seconds(1)`.", {"time": "one"}),
    ("without_the_queue", "Latency counts from the arrival, so waiting is part of it.", {"since": "start"}),
    ("of_the_oldest", "Each request has its own arrival. The latest of a batch waited least.", {"since": "oldest"}),
    ("until_it_begins", "Latency lasts until the batch is done.", {"end": False}),
    ("free_from_zero", "Your server is busy until time 0. Times may be negative.", {"first_free": 0.0}),
    ("knows_the_last", "Your server knows that nothing more will arrive. A real one doesn't: the last requests "
     "wait too.", {"foresees": True}),
    ("no_wait_after_work", "A server that just became free still waits, if fewer than `most` are there and the oldest "
     "hasn't waited for `wait`.", {"impatient": True}),
):  # fmt: skip
    mistaken(batcher, name, hint, batches_with(**options))


# -------------------------------------------------------------------------------- scaling_law

law_ = Exercise(
    "27.scaling_law",
    title="Fit a law with a floor",
    function="fit_law",
    minutes=30,
    points=15,
    statement="""
Write `fit_law(sizes, losses)`, which fits loss = floor + a size^(-alpha) to a few runs and returns (floor, a, alpha) as
floats.

- It minimises the sum over runs of ((floor + a size^(-alpha)) / loss - 1)^2, with floor >= 0 and 0 < alpha <= 2.
- Sizes may be as small as 3 or as large as 10^23, may span several orders of magnitude, and come in any order. There
  are at least three. Losses fall with size, up to noise.
- The checks compare what your law says, at the runs and at ten times the largest size, and not its three numbers,
  which can make up for each other.
""",
    hints=(
        "If somebody gave you alpha, what kind of problem would remain for floor and a?",
        "With alpha known it's linear least squares: columns 1 / loss and size^(-alpha) / loss, right side 1. If the "
        "floor comes out negative, the best allowed one is 0, and a alone is left to fit.",
        "That leaves one number to search for: try 100 values of alpha in (0, 2], then 100 around the best, and "
        "again. Divide sizes by the smallest first, and multiply a by smallest^alpha at the end.",
    ),
)


def fitted(
    sizes, losses, *, floor="fit", weights="relative", rounds=5, allowed=True, refit=True, low=1e-3, top=2.0,
):  # fmt: skip
    sizes, losses = (np.asarray(x, np.float64) for x in (sizes, losses))
    unit = sizes.min()
    small = sizes / unit
    w = 1 / losses if weights == "relative" else np.ones(len(losses))

    def best(alpha):
        powers = small**-alpha
        if floor == "fit":
            f, a = np.linalg.lstsq(np.stack([w, powers * w], 1), losses * w)[0]
        else:
            f = floor(losses)
            a = ((losses - f) * powers * w * w).sum() / (powers * powers * w * w).sum()
        if f < 0 and allowed:
            f = 0.0
            if refit:
                a = (losses * powers * w * w).sum() / (powers * powers * w * w).sum()
        return np.sum(((f + a * powers - losses) * w) ** 2), f, a

    high = top
    for _ in range(rounds):
        grid = np.linspace(low, high, 101)
        at = int(np.argmin([best(x)[0] for x in grid]))
        low, high = grid[max(at - 1, 0)], grid[min(at + 1, 100)]
    _, f, a = best(grid[at])
    return float(f), float(a * unit ** grid[at]), float(grid[at])


def said_by(law, sizes):
    floor, a, alpha = (float(np.asarray(x)) for x in law)
    with np.errstate(all="ignore"):
        return (
            floor + np.exp(np.log(a) - alpha * np.log(sizes))
            if a > 0
            else floor + a * sizes**-alpha
        )


def fits(fn, t, sizes, losses, why, rtol=1e-3):
    law = fn(np.array(sizes, float), np.array(losses, float))
    t.true(
        isinstance(law, (tuple, list)) and len(law) == 3,
        f"want three numbers, {why}",
        str(type(law)),
    )
    law = tuple(float(np.asarray(x)) for x in law)
    want = fitted(sizes, losses)
    at = np.array([*sizes, 10 * max(sizes)])
    errors = [np.sum((said_by(one, np.array(sizes)) / losses - 1) ** 2) for one in (law, want)]
    told = f"floor = {law[0]:.4g} and alpha = {law[2]:.4g} leave {errors[0]:.3g} of the sum that you minimise"
    told += f", and {errors[1]:.3g} is possible, with a floor of {want[0]:.4g}"
    if 0 < law[2] <= 2:
        linear = fitted(sizes, losses, low=law[2], top=law[2], rounds=1)
        same = np.allclose(said_by(linear, at), said_by(law, at), 1e-6)
        told += f"; your floor and a are {'' if same else 'not '}the best for your alpha"
    others = list(itertools.permutations(law))[1:]
    if any(one[2] > 0 and np.allclose(said_by(one, at), said_by(want, at), rtol) for one in others):
        told = "your numbers are right in another order than (floor, a, alpha)"
    t.close(
        said_by(law, at),
        said_by(want, at),
        rtol,
        0,
        f"the losses that your law says; {told}, {why}",
    )
    good = law[0] >= 0 and 0 < law[2] <= 2
    t.true(
        good, f"floor = {law[0]:.4g} and alpha = {law[2]:.4g} break the rules, {why}", np.array(law)
    )


def runs(t, law, smallest, most, many):
    floor, a, alpha = law
    sizes = smallest * np.exp(np.linspace(0, np.log(most), many))
    return sizes, floor + a * (sizes / smallest) ** -alpha


@law_.check("runs without noise")
def _(fn, t):
    for _ in range(3):
        law = t.rng.uniform(0.5, 2), t.rng.uniform(1, 4), t.rng.uniform(0.2, 0.9)
        sizes, losses = runs(t, law, 1e4, 300, 6)
        fits(fn, t, sizes, losses, f"6 runs of a law with floor {law[0]:.3f}")


@law_.check("three runs")
def _(fn, t):
    law = t.rng.uniform(1, 2), t.rng.uniform(1, 2), t.rng.uniform(0.3, 0.6)
    sizes, losses = runs(t, law, 5e3, 40, 3)
    fits(fn, t, sizes[::-1], losses[::-1], "three runs, the largest first")


@law_.check("any magnitude")
def _(fn, t):
    for smallest, most in ((3.0, 50), (1e9, 1e4), (1e19, 1e4)):
        law = t.rng.uniform(1, 2), t.rng.uniform(1, 3), t.rng.uniform(0.3, 1.2)
        sizes, losses = runs(t, law, smallest, most, 7)
        fits(fn, t, sizes, losses, f"sizes from {smallest:.0e} to {sizes[-1]:.0e}")


@law_.check("noise")
def _(fn, t):
    for _ in range(3):
        law = t.rng.uniform(0.1, 0.5), t.rng.uniform(4, 6), t.rng.uniform(0.4, 0.7)
        sizes, losses = runs(t, law, 1e3, 500, 8)
        losses = losses * np.exp(0.02 * t.rng.normal(size=8))
        fits(fn, t, sizes, losses, "8 runs with 2% of noise", 2e-3)


@law_.check("no floor")
def _(fn, t):
    # Falls faster and faster on a log-log plot: the best floor would be negative.
    sizes = 1e5 * np.exp(np.linspace(0, 5, 6))
    losses = t.rng.uniform(4, 6) * np.exp(
        -0.02 * np.linspace(0, 5, 6) ** 2 - 0.05 * np.linspace(0, 5, 6)
    )
    fits(fn, t, sizes, losses, "runs that fall ever faster: the best floor allowed is 0")
    sizes, losses = runs(t, (0.0, 5.0, t.rng.uniform(0.1, 0.3)), 1e6, 1e3, 5)
    fits(fn, t, sizes, losses, "runs of a law with floor 0")


@law_.check("steep")
def _(fn, t):
    sizes, losses = runs(t, (t.rng.uniform(1, 2), 3.0, t.rng.uniform(1.5, 1.9)), 100.0, 30, 6)
    fits(fn, t, sizes, losses, "alpha above 1.5")


def straight(sizes, losses, unweighted=False):
    slope, start = np.polyfit(np.log(sizes), np.log(losses), 1)
    return 0.0, float(np.exp(start)), float(-slope)


def shifted(share):
    def fn(sizes, losses):
        floor = share * np.min(losses)
        slope, start = np.polyfit(np.log(sizes), np.log(losses - floor), 1)
        return float(floor), float(np.exp(start)), float(-slope)

    return fn


def ends(sizes, losses):
    at = np.argsort(sizes)[[0, len(sizes) // 2, -1]]
    return fitted(np.asarray(sizes)[at], np.asarray(losses)[at])


def other_sign(sizes, losses):
    floor, a, alpha = fitted(sizes, losses)
    return floor, a, -alpha


def in_units_of(unit):
    def fn(sizes, losses):
        floor, a, alpha = fitted(sizes, losses)
        return floor, a * float(unit(sizes)) ** -alpha, alpha

    return fn


def other_order(sizes, losses):
    floor, a, alpha = fitted(sizes, losses)
    return a, floor, alpha


def law_with(**options):
    return lambda sizes, losses: fitted(sizes, losses, **options)


for name, hint, fn in (
    ("straight_line", "A straight line on a log-log plot has no floor. What does it say of a model that's large "
     "enough?", straight),
    ("best_is_the_floor", "Your floor is nearly the lowest loss. A larger model would be below it.",
     shifted(0.99)),
    ("half_the_best", "You guess the floor. It's one of the three numbers to be fitted.", shifted(0.5)),
    ("three_of_the_runs", "Only three of the runs decide in your fit. With noise, all of them should.", ends),
    ("absolute_errors", "You minimise absolute errors. In a relative error each run counts the same.",
     law_with(weights="absolute")),
    ("one_coarse_grid", "Your values of alpha are too coarse. Search again around the best.",
     lambda s, y: fitted(s, y, rounds=1, top=200.0)),
    ("negative_floor", "A loss can't be negative: where the best floor is below 0, it is 0, and a must be fitted "
     "again.", law_with(allowed=False)),
    ("never_a_floor", "Your floor is always 0, however the losses bend.", law_with(floor=lambda y: 0.0)),
    ("flat_only", "Your search ends at an alpha of 1. It may be up to 2.", law_with(top=1.0)),
    ("signs", "The exponent in the law is -alpha, so alpha is positive.", other_sign),
    ("order", "The result is (floor, a, alpha), in this order.", other_order),
    ("clipped_floor", "You set a negative floor to 0 and keep the a that went with it. Fit a again, without a floor.",
     law_with(refit=False)),
    ("in_units_of_the_smallest", "Your a belongs to sizes divided by the smallest. Multiply it by smallest^alpha.",
     in_units_of(np.min)),
    ("in_units_of_the_largest", "Your a belongs to sizes divided by the largest. Multiply it by largest^alpha.",
     in_units_of(np.max)),
):  # fmt: skip
    mistaken(law_, name, hint, fn)


# ------------------------------------------------------------------------------------- budget

budget_ = Exercise(
    "27.budget",
    title="Spend a budget",
    function="plan",
    minutes=35,
    points=20,
    statement="""
A model of N parameters, trained on D tokens, has the loss floor + a N^(-alpha) + b D^(-beta). Training it takes 6 N D
FLOPs, and each token that it writes later takes 2 N. Write `plan(flops, served, tokens, law)`: the (N, D) that
has the lowest loss among those whose training and use cost exactly `flops`.

- The model will write `served` tokens in its life, 0 or more. So 6 N D + 2 N `served` = `flops`.
- There are only `tokens` different tokens, and none is trained on twice: D <= `tokens`. If data runs out, the rest of
  the budget goes into a larger model.
- `law` is (floor, a, alpha, b, beta), all positive. N and D are floats; the checks accept 0.1% in each.
""",
    hints=(
        "The budget leaves one free number. Say it's N: what's D then? And what happens to the two terms of the loss "
        "as N grows?",
        "Along the budget the loss has one valley in log N. D <= `tokens` says that N is at least flops / (6 tokens + "
        "2 served); if the valley's bottom is below that, the bound is the answer.",
        "Halve an interval of log N, between that bound and where D becomes 0, by the sign of -alpha a N^(-alpha) + "
        "b D^(-beta - 1) (D + served / 3), 100 times. Golden section on the loss does as well.",
    ),
)


def plan_with(
    *, train=6, use=2, bound="grow", how="law", swap=False, epochs=1.0, fixed=20.0, apart=False
):
    def fn(flops, served, tokens, law):
        _, a, alpha, b, beta = law
        if swap:
            a, alpha, b, beta = b, beta, a, alpha
        limit = tokens * epochs if bound == "grow" else math.inf

        def data(n):
            return (flops / n - use * served) / train

        low = math.log(flops / (train * limit + use * served)) if limit < math.inf else -700.0
        high = math.log(flops / max(use * served, 1e-9))
        if how == "ratio":
            # fixed * N tokens: train fixed N^2 + use N served = flops
            n = (-use * served + math.sqrt((use * served) ** 2 + 4 * train * fixed * flops)) / (
                2 * train * fixed
            )
            return (n, fixed * n) if fixed * n <= tokens else (math.exp(low), tokens)
        if how == "equal":

            def steep(n, d):
                return b * d**-beta - a * n**-alpha
        else:

            def steep(n, d):
                share = d if apart else d + served * use / train
                return b * beta * d ** (-beta - 1) * share - a * alpha * n**-alpha

        low, high = max(low, -60.0), min(high, 300.0)
        for step in range(300):
            n = math.exp(low if step == 0 else (low + high) / 2)
            d = data(n)
            rises = d <= 0 or steep(n, d) >= 0
            if step == 0 and (rises or how == "all"):
                break
            low, high = (
                (low, high) if step == 0 else (low, math.log(n)) if rises else (math.log(n), high)
            )
        n = math.exp(low)
        d = data(n)
        if bound == "cut":
            d = min(d, tokens)
        return n, d

    return fn


def training_first(keep):
    """The best model for training alone, which then has to pay for its use with its size or with its data."""

    def fn(flops, served, tokens, law):
        n, d = plan_with()(flops, 0, tokens, law)
        if keep == "size":
            d = max((flops / n - 2 * served) / 6, 1.0)
        return flops / (6 * d + 2 * served), d

    return fn


def equal_terms(flops, served, tokens, law):
    """The plan for which both terms of the loss are the same, and not their slopes."""
    _, a, alpha, b, beta = law
    low, high = 0.0, math.log(tokens)
    for _ in range(200):
        d = math.exp((low + high) / 2)
        n = flops / (6 * d + 2 * served)
        low, high = (
            ((low + high) / 2, high) if b * d**-beta > a * n**-alpha else (low, (low + high) / 2)
        )
    return n, d


def plans(fn, t, flops, served, tokens, law, why):
    got = fn(flops, served, tokens, law)
    t.true(isinstance(got, (tuple, list)) and len(got) == 2, f"want (N, D), {why}", str(type(got)))
    want = plan_with()(flops, served, tokens, law)
    N, D = (float(x) for x in got)
    cost = 6 * N * D + 2 * N * served
    if abs(cost / flops - 1) > 1e-3:
        told = f"it costs {cost:.4g} FLOPs, {6 * N * D:.4g} of them for training, and is to cost {flops:.4g}"
    elif tokens * (1 + 1e-3) < D:
        told = f"it trains on more than {tokens:.4g} tokens"
    else:
        better = "larger model on fewer" if want[0] > N else "smaller model on more"
        told = f"it costs what it should, but a {better} tokens has a lower loss"
    n = (flops / 120) ** 0.5
    mistakes = {
        "You return (D, N)": want[::-1],
        "20 tokens for each parameter is a rule for one law; this law says something else": (
            n,
            20 * n,
        ),
        "You minimise for twice the budget: training takes 6 N D": plan_with()(
            flops * 2, served, tokens, law
        ),
        "You minimise for a sixth of the budget": plan_with()(flops / 6, served, tokens, law),
        "You share the budget equally between the two terms of the loss": equal_terms(
            flops, served, tokens, law
        ),
    }
    t.close(
        np.array(got, float), np.array(want), 1e-3, 0, f"(N, D); {told}, {why}", mistakes=mistakes
    )


def some_law(t):
    return tuple(
        float(t.rng.uniform(*r))
        for r in ((1, 2), (200, 600), (0.25, 0.4), (300, 2000), (0.22, 0.38))
    )


@budget_.check("training alone")
def _(fn, t):
    for flops in (1e19, 1e21, 3e24):
        law = some_law(t)
        plans(fn, t, flops, 0, 1e30, law, f"{flops:.0e} FLOPs, no use, tokens without end")


@budget_.check("a model that will be used")
def _(fn, t):
    for served in (1e9, 1e12, 1e14):
        law = some_law(t)
        plans(fn, t, 1e22, served, 1e30, law, f"1e22 FLOPs, {served:.0e} tokens served")


@budget_.check("data runs out")
def _(fn, t):
    for tokens, served in ((1e9, 0), (3e8, 1e9), (2e10, 1e11)):
        law = some_law(t)
        plans(
            fn,
            t,
            1e23,
            served,
            tokens,
            law,
            f"1e23 FLOPs, {served:.0e} served, {tokens:.0e} tokens",
        )


@budget_.check("small worlds")
def _(fn, t):
    for flops, served in ((1e9, 0), (1e12, 1e6)):
        law = 0.3, 5.0, 0.3, 20.0, 0.4
        plans(fn, t, flops, served, 1e7, law, f"{flops:.0e} FLOPs, {served:.0e} served, 1e7 tokens")


@budget_.check("laws in which data counts for more, or less")
def _(fn, t):
    for alpha, beta in ((0.2, 0.6), (0.6, 0.2), (0.34, 0.28), (1.2, 0.9)):
        a, b = float(t.rng.uniform(50, 500)), float(t.rng.uniform(500, 5000))
        plans(fn, t, 1e21, 1e10, 1e13, (1.7, a, alpha, b, beta), f"alpha = {alpha}, beta = {beta}")


for name, hint, options in (
    ("twenty_each", "Twenty tokens a parameter is what one law gave, for one text and for training alone. Your law "
     "is in `law`.",
     {"how": "ratio"}),
    ("training_only", "Use costs 2 N for each token that is served. It's part of the budget.", {"use": 0}),
    ("use_like_training", "Writing a token takes 2 N, a third of training on one.", {"use": 6}),
    ("forward_only", "Training takes 6 N for each token: forward and backward.", {"train": 2}),
    ("endless_data", "D is larger than the tokens that there are.", {"bound": "none"}),
    ("cut_data", "You cut D down to `tokens` and leave the rest of the budget unspent. A larger model can use it.",
     {"bound": "cut"}),
    ("all_tokens", "You always train on all the tokens there are. Their number is only a bound.", {"how": "all"}),
    ("four_epochs", "None of the tokens is trained on twice here.", {"epochs": 4.0}),
    ("equal_terms", "You make both terms of the loss equal. At the minimum their *slopes* cancel: the exponents count "
     "too.", {"how": "equal"}),
    ("swapped", "alpha and a belong to the size, beta and b to the tokens.", {"swap": True}),
    ("half_a_slope", "When N grows, D falls faster than in proportion, since use takes its share of the budget too.",
     {"apart": True}),
):  # fmt: skip
    mistaken(budget_, name, hint, plan_with(**options))

for name, hint, keep in (
    ("use_from_the_size", "You keep the D that is best for training alone and pay for use with a smaller model. Use "
     "moves the best D too: look for the minimum along the whole budget.", "data"),
    ("use_from_the_data", "You keep the N that is best for training alone and pay for use with fewer tokens. Use makes "
     "a smaller model better: look for the minimum along the whole budget.", "size"),
):  # fmt: skip
    mistaken(budget_, name, hint, training_first(keep))


# ------------------------------------------------------------------------------------- resume

resume_ = Exercise(
    "27.resume",
    title="Run what must be run",
    function="resume",
    minutes=30,
    points=15,
    statement="""
A pipeline has stages that read files and write files. Write `resume(stages, record, digest, run, save)`. It
runs the stages that must be run, in a valid order, and returns their names in that order.

- A stage comes after every stage that writes a file it reads. `stages` may be listed in any order; a valid one always
  exists. No file has two writers.
- A stage needn't be run if `record` has an entry for it with the same `settings` and the same digests of all its
  `reads` and `writes` as now, and all its `writes` exist. A file that the entry doesn't have counts as changed.
  `digest(file)` is the digest now, None if the file isn't there. "Now" means when the stage's turn comes: stages before
  it may have written the same bytes again, and then it needn't be run.
- `run(name)` runs a stage. It may raise an exception; let it through.
- `save(name, entry)` writes an entry to disk, where the next `record` comes from. Call it once for each stage that was
  run, as soon as it's done: the machine may stop at any moment. Don't change `record`.
- An entry has exactly `settings`, `reads` and `writes`, the last two as {file: digest}. Somebody may change a source
  file *while* a stage is running. The entry then has the digest from before the run, so the stage runs again next time.
""",
    hints=(
        "When is it a stage's turn? Which files will still be written by stages that haven't had theirs?",
        "Just before a stage, take the digests of its reads and writes and compare them with the entry. After it, the "
        "entry has the digests of the reads from before, and those of the writes from after.",
        "`while left:` take the first stage that reads nothing the others in `left` write. Call `save` right after "
        "`run(name)` returns, before you go on to the next.",
    ),
)


def resume_with(
    *, order="reads", settings=True, reads=True, writes=True, there=True, early=True, when="before", saved="each",
    all_after=False, keep=True, known=False, quiet=False, swallows=False, needs_entry=False, skipped=False,
):  # fmt: skip
    def fn(stages, record, digest, run, save):
        def now(files):
            return {file: digest(file) for file in files}

        def fresh(stage, read, wrote):
            entry = record[stage["name"]] if needs_entry else record.get(stage["name"])
            if entry is None:
                return False
            if settings and entry["settings"] != stage["settings"]:
                return False
            if known:
                read = now(entry["reads"])
            if reads and entry["reads"] != read:
                return False
            if writes and entry["writes"] != wrote:
                return False
            return not there or None not in wrote.values()

        left, ran, finished, dirty = list(stages), [], {}, set()
        plan = {s["name"]: fresh(s, now(s["reads"]), now(s["writes"])) for s in left}
        while left:
            to_come = {file for stage in left for file in stage["writes"]}
            ready = (s for s in left if not to_come & set(s["reads"]))
            stage = left[0] if order == "given" else next(ready)
            left.remove(stage)
            name, read, wrote = stage["name"], now(stage["reads"]), now(stage["writes"])
            good = (
                fresh(stage, read, wrote)
                if early
                else plan[name] and not dirty & set(stage["reads"])
            )
            if all_after and ran:
                good = False
            if good:
                ran += [name] if skipped else []
                continue
            if saved == "first":
                save(name, {"settings": stage["settings"], "reads": read, "writes": wrote})
            try:
                run(name)
            except OSError:
                if quiet:
                    break
                if swallows:
                    return []
                raise
            dirty |= set(stage["writes"])
            if when == "after":
                read = now(stage["reads"])
            entry = {"settings": stage["settings"], "reads": read, "writes": now(stage["writes"])}
            if saved == "old":
                entry["writes"] = wrote
            finished[name] = entry
            if saved in ("each", "first", "old"):
                save(name, entry)
            ran.append(name)
        if saved == "end":
            for name, entry in finished.items():
                save(name, entry)
        return ran if keep else sorted(ran)

    return fn


class Workshop:
    """A pipeline of stages whose outputs are functions of what they read."""

    def __init__(self, t, names=("data", "tokens", "train", "tune", "report", "card")):
        self.names = names
        data, tokens, train, tune, report, card = names
        self.files = {"raw.txt": int(t.rng.integers(1000, 9999)), "code.py": 7}
        self.stages = [
            self.stage(data, ["raw.txt"], ["a"], "v1"), self.stage(tokens, ["a"], ["b", "b2"], "v1"),
            self.stage(train, ["b", "code.py"], ["c"], "lr=1"), self.stage(tune, ["c", "b2"], ["d"], "lr=2"),
            self.stage(report, ["c", "d"], ["e"], "html"), self.stage(card, ["raw.txt"], ["f"], "md"),
        ]  # fmt: skip
        self.log, self.record, self.fails, self.meanwhile, self.same = [], {}, None, {}, set()

    def save(self, name, entry):
        self.log.append(f"save {name}")
        self.record[name] = {k: dict(v) if isinstance(v, dict) else v for k, v in entry.items()}

    @staticmethod
    def stage(name, reads, writes, settings):
        return {"name": name, "reads": reads, "writes": writes, "settings": settings}

    def digest(self, file):
        return None if file not in self.files else f"sha{self.files[file]}"

    def run(self, name):
        if not isinstance(name, str):
            raise TypeError(f"`run` takes a stage's name, not a {type(name).__name__}")
        self.log.append(name)
        stage = next(s for s in self.stages if s["name"] == name)
        if any(file not in self.files for file in stage["reads"]):
            raise FileNotFoundError(f"{name} was run before what it reads was written")
        seen = [self.files[file] for file in stage["reads"]]
        if self.fails == name:
            self.files[stage["writes"][0]] = -1
            raise OSError(f"{name} was interrupted")
        self.files |= self.meanwhile.pop(name, {})
        for number, file in enumerate(stage["writes"]):
            if name in self.same and file in self.files:
                continue
            self.files[file] = hash((number, stage["settings"], *seen)) % 100_000

    def twin(self):
        other = object.__new__(Workshop)
        other.__dict__ = {
            k: {**v}
            if isinstance(v, dict)
            else set(v)
            if isinstance(v, set)
            else list(v)
            if k == "log"
            else v
            for k, v in self.__dict__.items()
        }
        return other


def go(fn, t, shop, why, shuffle=False):
    """Runs the answer and the right one on equal workshops, and compares all there is to see."""
    stages = [dict(s) for s in shop.stages]
    if shuffle:
        stages = stages[::-1]
    twin = shop.twin()
    outcomes, before = [], len(shop.log)
    for answer, place in ((fn, shop), (resume_with(), twin)):
        try:
            known = {n: dict(e) for n, e in place.record.items()}
            args = [dict(s) for s in stages], known, place.digest, place.run, place.save
            outcomes.append(list(answer(*args)))
        except OSError as error:
            outcomes.append(str(error))
    ran = [call for call in shop.log[before:] if not call.startswith("save ")]
    if isinstance(outcomes[0], list):
        text = f"you return {outcomes[0]}, and called `run` for {ran}: {why}"
        t.true(outcomes[0] == ran, text, outcomes[0])
    t.equal(outcomes[0], outcomes[1], f"the stages that were run, {why}")
    t.equal(shop.log, twin.log, f"the calls of run and save, {why}")
    t.equal(shop.record, twin.record, f"what was saved, {why}")


@resume_.check("from nothing, and again")
def _(fn, t):
    shop = Workshop(t)
    go(fn, t, shop, "nothing was run before")
    go(fn, t, shop, "all is done")
    go(fn, t, Workshop(t), "the stages are listed from last to first", shuffle=True)


@resume_.check("something changed")
def _(fn, t):
    for change in ("code.py", "raw.txt", "b2"):
        shop = Workshop(t)
        go(fn, t, shop, "nothing was run before")
        shop.files[change] = 5
        go(fn, t, shop, f"{change} has changed", shuffle=True)
    for nth, settings in ((2, "lr=9"), (4, "pdf")):
        shop = Workshop(t)
        go(fn, t, shop, "nothing was run before")
        shop.stages[nth] = shop.stages[nth] | {"settings": settings}
        go(fn, t, shop, f"the settings of {shop.stages[nth]['name']} have changed")


@resume_.check("a stage that reads one more file")
def _(fn, t):
    shop = Workshop(t)
    go(fn, t, shop, "nothing was run before")
    shop.stages[2] = shop.stages[2] | {"reads": ["b", "code.py", "raw.txt"]}
    go(fn, t, shop, "train now reads raw.txt too")


@resume_.check("files that are gone")
def _(fn, t):
    for gone in ("a", "b2", "e"):
        shop = Workshop(t)
        go(fn, t, shop, "nothing was run before")
        del shop.files[gone]
        go(fn, t, shop, f"{gone} was deleted")
    shop = Workshop(t)
    shop.same = {"report"}
    go(fn, t, shop, "nothing was run before")
    shop.record["report"]["writes"] = {"e": None}
    del shop.files["e"]
    go(fn, t, shop, "the record says that e isn't there, and it isn't")


@resume_.check("the same bytes again")
def _(fn, t):
    shop = Workshop(t)
    go(fn, t, shop, "nothing was run before")
    shop.same = {"data", "train"}
    shop.files["raw.txt"] = 6
    go(fn, t, shop, "raw.txt has changed, and `data` writes what it wrote before")
    shop.files["code.py"] = 8
    go(fn, t, shop, "code.py has changed, and `train` writes what it wrote before", shuffle=True)


@resume_.check("an interruption")
def _(fn, t):
    for fails in ("tokens", "tune"):
        shop = Workshop(t)
        shop.fails = fails
        go(fn, t, shop, f"{fails} is interrupted")
        shop.fails = None
        go(fn, t, shop, f"after {fails} was interrupted")
    shop = Workshop(t)
    go(fn, t, shop, "nothing was run before")
    shop.files["code.py"], shop.fails = 9, "train"
    go(fn, t, shop, "train is interrupted when it's run again")
    shop.fails = None
    go(fn, t, shop, "after train was interrupted when it was run again")


@resume_.check("a change while a stage runs")
def _(fn, t):
    shop = Workshop(t)
    shop.meanwhile = {"train": {"code.py": 70}}
    go(fn, t, shop, "code.py is changed while `train` runs")
    go(fn, t, shop, "code.py was changed while `train` ran")


@resume_.check("stages of the past, and other names")
def _(fn, t):
    shop = Workshop(t, tuple(str(n) for n in t.rng.permutation(list("pqrstu"))))
    shop.record["no longer"] = {"settings": "x", "reads": {}, "writes": {"z": "1"}}
    go(fn, t, shop, "a stage in the record that the pipeline doesn't have")
    go(fn, t, shop, "all is done, and one is no longer there")


for name, hint, options in (
    ("as_listed", "You run the stages as they're listed. A stage must come after those that write what it reads.",
     {"order": "given"}),
    ("any_settings", "A stage whose settings changed must be run.", {"settings": False}),
    ("any_inputs", "A stage must be run when something that it reads has changed.", {"reads": False}),
    ("any_outputs", "A stage must be run when something that it wrote has changed or is gone.", {"writes": False}),
    ("none_is_none", "A file that isn't there has the digest None, and two Nones are equal. All writes must be there.",
     {"there": False}),
    ("decided_beforehand", "You decide before anything is run. If a stage writes the same bytes again, those after "
     "it needn't be run.", {"early": False}),
    ("everything_after", "After the first stage that's run you run all others. Some read nothing that has changed.",
     {"all_after": True}),
    ("digests_afterwards", "You take the digests of the reads after the run. A file that changed meanwhile looks as if "
     "the stage had read it.", {"when": "after"}),
    ("saved_at_the_end", "You save the entries when all is done. An interruption then loses what was finished.",
     {"saved": "end"}),
    ("never_saved", "You don't call `save`. The next time everything is run again.", {"saved": "never"}),
    ("needs_an_entry", "You look for a stage that `record` lacks. One that was never finished has no entry.",
     {"needs_entry": True}),
    ("swallows", "You catch what `run` raises. Let it through: the caller must know that the pipeline didn't finish.",
     {"swallows": True}),
    ("saved_beforehand", "You save an entry before the stage has run. If it's interrupted, it counts as done.",
     {"saved": "first"}),
    ("old_outputs", "The entry's writes are the digests from after the run.", {"saved": "old"}),
    ("recorded_reads", "You compare the files in the entry. A stage may now read one that the entry doesn't have.",
     {"known": True}),
    ("swallowed", "You catch what `run` raises. Let it through: whoever called you must know.", {"quiet": True}),
    ("names_of_all", "Return only the names of the stages that were run.", {"skipped": True}),
    ("sorted_names", "Return the names in the order in which the stages were run.", {"keep": False}),
):  # fmt: skip
    mistaken(resume_, name, hint, resume_with(**options))
