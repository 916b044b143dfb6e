from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.book.grading import Exercise
from minitext.compiler import hlo


def mesh_of(*sizes):
    """A mesh of the first devices, with the axes a, b, ..."""
    names = tuple("abc"[: len(sizes)])
    return jax.make_mesh(sizes, names, devices=jax.devices()[: int(np.prod(sizes))])


def split(fn, mesh, in_specs, out_specs):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def put(mesh, spec, x):
    return jax.device_put(x, NamedSharding(mesh, spec))


def spec_of(mesh, spec, shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def collectives(program, *args):
    return hlo.Module(program.lower(*args).compile().as_text()).collectives()


def right(n):
    return [(i, (i + 1) % n) for i in range(n)]


# ----------------------------------------------------------------------------- ring_all_reduce

ring_all_reduce = Exercise(
    "10.ring_all_reduce",
    title="All-reduce in a ring",
    function="ring_all_reduce",
    minutes=35,
    points=15,
    devices=8,
    statement="""
Write `ring_all_reduce(x_N, axis)`. It returns the same as `jax.lax.psum(x_N, axis)`, but uses only `jax.lax.ppermute`.
It is called inside a `shard_map`.

- First comes a ring reduce-scatter, then a ring all-gather, over n parts of N/n numbers each.
- Every permute goes to the right neighbour and carries one part. A run has $2(n-1)$ of them, so a device sends
  $2(n-1)/n$ of the array. There is no other collective.
- N is a multiple of n. The result keeps the dtype, and integer sums are exact.
- The axis may be one of several in the mesh, and may have 2, 4 or 8 devices.
""",
    hints=(
        "Reshape x_N to [n, N/n] and follow the list in section 3 for one device. What does device `me` send in step "
        "s, and to which of its parts does it add what arrives?",
        "In step s = 0 ... n-2 of the first phase, it sends part me - s and adds what arrives to part me - 1 - s, all "
        "modulo n. After that, part me + 1 is complete. The second phase sends that part first, and replaces the part "
        "to its left with what arrives.",
        "The second phase is `arriving = jax.lax.ppermute(parts[(me + 1 - s) % n], axis, right)` and `parts.at[(me - "
        "s) % n].set(arriving)` in a `fori_loop(0, n - 1, ...)`.",
    ),
)


def on_rows(mesh, fn, axis):
    """A function of `whole` [devices, N] that runs fn(x_N, axis) where each device has a row of it."""
    names = P(mesh.axis_names)
    program = split(lambda x: fn(x[0], axis)[None], mesh, names, names)
    return lambda whole: np.asarray(program(put(mesh, names, whole)))


def rows_over(mesh, fn, axis, whole):
    return on_rows(mesh, fn, axis)(whole)


def wrong_part(got, x, run):
    """What is in the first wrong part of `got` [n, N], the result for `x`; `run` gives results for other numbers."""
    n = len(x)
    parts, want = got.reshape(n, n, -1), x.astype(np.float64).sum(0).reshape(n, -1)
    for device, part in np.ndindex(n, n):
        same = [np.allclose(parts[device, part], w, rtol=1e-4, atol=1e-4) for w in want]
        if same[part]:
            continue
        where = f"Part {part} of device {device}"
        if any(same):
            return f"{where} is the sum of all parts {same.index(True)}"
        codes = np.broadcast_to(8.0 ** np.arange(n)[:, None], x.shape).astype(np.float32)
        code = run(codes).reshape(n, n, -1)[device, part, 0]
        counts = f"{round(float(code)) % 8**n:0{n}o}"[::-1]
        if counts == "1" * n:
            return f"{where} has numbers of each device once, but in other places"
        added = [f"{count} x device {d}" for d, count in enumerate(counts) if count != "0"]
        return f"{where} is made of {', '.join(added) or 'nothing'}; want each device once"
    return ""


@ring_all_reduce.check("a sum over eight devices")
def _(fn, t):
    N = 8 * int(t.rng.integers(2, 9))
    x = t.rng.normal(size=(8, N)).astype(np.float32)
    want = np.broadcast_to(x.astype(np.float64).sum(0), x.shape)
    run, why = on_rows(mesh_of(8), fn, "a"), f"N = {N}"
    got = run(x)
    if got.shape == x.shape and np.isfinite(got).all():
        why = ". ".join(filter(None, (why, wrong_part(got, x, run))))
    t.close(got, want, rtol=1e-4, atol=1e-4, why=why)


@ring_all_reduce.check("one number a part, and integers")
def _(fn, t):
    x = t.rng.integers(-(10**8), 10**8, (8, 8)).astype(np.int32)  # float32 would round them
    want = np.broadcast_to(x.sum(0, dtype=np.int32), x.shape)
    t.close(rows_over(mesh_of(8), fn, "a", x), want, rtol=0, atol=0, dtype="int32", why="N = n = 8")


@ring_all_reduce.check("one axis of two")
def _(fn, t):
    a, b = ((2, 4), (4, 2))[int(t.rng.integers(2))]
    N = 4 * int(t.rng.integers(2, 9))
    x = t.rng.normal(size=(8, N)).astype(np.float32)
    grid = x.reshape(a, b, N).astype(np.float64)
    want = np.broadcast_to(grid.sum(1, keepdims=True), grid.shape).reshape(8, N)
    why = f"a sum over 'b' of a mesh of {a} by {b}"
    t.close(rows_over(mesh_of(a, b), fn, "b", x), want, rtol=1e-4, atol=1e-4, why=why)


def ring_found(fn, n, N):
    mesh = mesh_of(n)
    program = split(lambda x: fn(x[0], "a")[None], mesh, P("a"), P("a"))
    return collectives(program, spec_of(mesh, P("a"), (n, N)))


@ring_all_reduce.check("only permutes")
def _(fn, t):
    kinds = sorted({c.kind for c in ring_found(fn, 8, 64)})
    t.equal(kinds, ["collective-permute"], why="the collectives in the program")


@ring_all_reduce.check("to the right neighbour")
def _(fn, t):
    mesh = mesh_of(8)
    program = split(lambda x: fn(x[0], "a")[None], mesh, P("a"), P("a"))
    jaxpr = jax.make_jaxpr(program)(spec_of(mesh, P("a"), (8, 24))).jaxpr
    permutes = [e for inner, _ in walk(jaxpr) for e in inner.eqns if e.primitive.name == "ppermute"]
    pairs = [sorted(tuple(int(i) for i in pair) for pair in e.params["perm"]) for e in permutes]
    others = [p for p in pairs if p != right(8)]
    t.equal(others, [], why="permutes on 8 devices, as (from, to), that don't go from i to i + 1")


@ring_all_reduce.check("number and bytes of the permutes")
def _(fn, t):
    for n in (8, 4):
        N = n * int(t.rng.integers(3, 20))
        found = ring_found(fn, n, N)
        runs, moved = sum(c.runs for c in found), sum(c.runs * c.moved for c in found)
        why = f"bytes sent by each of {n} devices, for {N} float32 numbers of {4 * N} bytes"
        t.equal(int(moved), 2 * (n - 1) * 4 * N // n, why=why)
        t.equal(runs, 2 * (n - 1), why=f"permutes in one run on {n} devices")


def ring_with(x, axis, *, first=0, short=0, more=0, again=False, start=1):
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)

    def add(step, parts):
        arriving = jax.lax.ppermute(parts[(me - step) % n], axis, right(n))
        return parts.at[(me - 1 - step) % n].add(arriving)

    def keep(step, parts):
        arriving = jax.lax.ppermute(parts[(me + start - step) % n], axis, right(n))
        place = parts.at[(me + start - 1 - step) % n]
        return place.add(arriving) if again else place.set(arriving)

    parts = jax.lax.fori_loop(first, n - 1 - short + more, add, x.reshape(n, -1))
    return jax.lax.fori_loop(0, n - 1 - short, keep, parts).reshape(-1)


@ring_all_reduce.mutant(
    "Whole arrays go round your ring: you send n - 1 times the array instead of 2(n-1)/n. Cut it into n parts, "
    "and add each part up only once, on its way round."
)
def pass_round(x, axis):
    n = jax.lax.axis_size(axis)

    def trip(_, state):
        moving = jax.lax.ppermute(state[1], axis, right(n))
        return state[0] + moving, moving

    return jax.lax.fori_loop(1, n, trip, (x, x))[0]


@ring_all_reduce.mutant("That is the collective itself. Use only `jax.lax.ppermute`.")
def psum(x, axis):
    return jax.lax.pcast(jax.lax.psum(x, axis), axis, to="varying")


@ring_all_reduce.mutant(
    "Two collectives make an all-reduce, as in section 2. Here you have to build both from permutes."
)
def two_collectives(x, axis):
    return jax.lax.all_gather(jax.lax.psum_scatter(x, axis, tiled=True), axis, tiled=True)


@ring_all_reduce.mutant(
    "Your second phase starts with part `me`. But after the first phase, the complete part on device `me` is part "
    "me + 1."
)
def wrong_start(x, axis):
    return ring_with(x, axis, start=0)


@ring_all_reduce.mutant(
    "Your ring takes one step too few: after n - 2 steps a sum has visited n - 1 devices. Each phase has n - 1 "
    "steps."
)
def a_step_short(x, axis):
    return ring_with(x, axis, short=1)


@ring_all_reduce.mutant(
    "Your first phase takes n steps. After n - 1 all parts are complete, and the extra step sends them for "
    "nothing."
)
def a_step_more(x, axis):
    return ring_with(x, axis, more=1)


@ring_all_reduce.mutant(
    "Your ring turns to the left. The sum is right, but every permute must go from i to i + 1."
)
def to_the_left(x, axis):
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    left = [(b, a) for a, b in right(n)]

    def add(step, parts):
        arriving = jax.lax.ppermute(parts[(me + step) % n], axis, left)
        return parts.at[(me + 1 + step) % n].add(arriving)

    def keep(step, parts):
        arriving = jax.lax.ppermute(parts[(me - 1 + step) % n], axis, left)
        return parts.at[(me + step) % n].set(arriving)

    parts = jax.lax.fori_loop(0, n - 1, add, x.reshape(n, -1))
    return jax.lax.fori_loop(0, n - 1, keep, parts).reshape(-1)


@ring_all_reduce.mutant(
    "Your numbers pass through float32, which rounds large integers. Add in x_N's dtype."
)
def through_float32(x, axis):
    return ring_with(x.astype(jnp.float32), axis).astype(x.dtype)


@ring_all_reduce.mutant(
    "The part that your second phase sends first, me + 1, is still one device's. In step s of the first phase the "
    "neighbour's part me - 1 - s arrives: add it to your part of that number, not to the one that you sent."
)
def added_to_the_sent(x, axis):
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)

    def add(step, parts):
        arriving = jax.lax.ppermute(parts[(me - step) % n], axis, right(n))
        return parts.at[(me - step) % n].add(arriving)

    def keep(step, parts):
        arriving = jax.lax.ppermute(parts[(me + 1 - step) % n], axis, right(n))
        return parts.at[(me - step) % n].set(arriving)

    parts = jax.lax.fori_loop(0, n - 1, add, x.reshape(n, -1))
    return jax.lax.fori_loop(0, n - 1, keep, parts).reshape(-1)


@ring_all_reduce.mutant(
    "You add in the second phase too. The parts that arrive there are complete, so replace your own with them."
)
def adds_twice(x, axis):
    return ring_with(x, axis, again=True)


@ring_all_reduce.mutant(
    "You stop after the first phase. Each device has one complete part, and still has to gather the others."
)
def only_scattered(x, axis):
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)

    def add(step, parts):
        arriving = jax.lax.ppermute(parts[(me - step) % n], axis, right(n))
        return parts.at[(me - 1 - step) % n].add(arriving)

    return jax.lax.fori_loop(0, n - 1, add, x.reshape(n, -1)).reshape(-1)


# ------------------------------------------------------------------------------ byte_predictor

byte_predictor = Exercise(
    "10.byte_predictor",
    title="Predict the bytes of a collective",
    function="predicted_bytes",
    minutes=15,
    points=10,
    devices=8,
    statement="""
Write `predicted_bytes(kind, group, shape, dtype)`: the number of bytes that each device sends in one collective. The
checks compare your numbers with compiled programs.

- `shape` is that of the **operand on one device**, as written in a jaxpr: one part for an all-gather, the whole for a
  reduce-scatter.
- All-gather, reduce-scatter and all-reduce use this chapter's ring algorithms. For an all-to-all, count only the bytes
  that a device originates, not those that it passes on. In a `"collective-permute"` each device sends its operand to
  one other device.
- A group of one device sends nothing.
- Shapes may be far larger than any memory, and `shape` may be `()`.
""",
    hints=(
        "For each collective, is the whole side the operand or the result? Write down both sides' bytes for a group "
        "of 8 and an operand of 1,000 bytes.",
        "With an operand of s bytes, an all-gather's whole side is group times s. A device sends (group - 1)/group of "
        "the whole side, or twice that in an all-reduce.",
        "`jnp.dtype(dtype).itemsize` is the size of a number. All-gather: (group - 1) s; reduce-scatter and "
        "all-to-all: s (group - 1)/group; all-reduce: twice that; permute: s.",
    ),
)

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def right_bytes(
    kind, group, shape, dtype, *, gathered=True, twice=2, rest=True, item=None, alone=0
):
    if group == 1 and alone == 0:
        return 0
    own = item or jnp.dtype(dtype).itemsize
    for size in shape:
        own *= int(size)
    if kind == "collective-permute":
        return own
    whole = own * group if kind == "all-gather" and gathered else own
    part = whole * (group - 1) / group if rest else whole
    return part * twice if kind == "all-reduce" else part


def predicts(t, fn, cases, why):
    got = np.array([float(fn(*case)) for case in cases])
    want = np.array([float(right_bytes(*case)) for case in cases])
    off = {}
    for case, g, w in zip(cases, got, want, strict=True):
        if not np.isclose(g, w, rtol=1e-9, atol=0):
            kind, group, shape, dtype = case
            times = (
                f"{Fraction(g / w).limit_denominator(9999)} times the right number"
                if w
                else f"{g:g}, want 0"
            )
            off.setdefault(kind, (f"{kind} of {dtype}{list(shape)} in a group of {group}", times))
    factors = {times for _, times in off.values()}
    if len(off) == len(KINDS) and len(factors) == 1:
        why = f"{why}; all kinds are {factors.pop()}"
    elif off:
        why = f"{why}; " + "; ".join(f"{case}: {times}" for case, times in off.values())
    t.close(got, want, rtol=1e-9, atol=0, why=why)


@byte_predictor.check("float32, all kinds")
def _(fn, t):
    cases = []
    for kind in KINDS:
        group = (2, 4, 8)[int(t.rng.integers(3))]
        shape = (8 * int(t.rng.integers(1, 30)), int(t.rng.integers(1, 30)))
        cases.append((kind, group, shape, "float32"))
    predicts(t, fn, cases, "bytes")


@byte_predictor.check("other dtypes")
def _(fn, t):
    group, rows = 4, 4 * int(t.rng.integers(1, 99))
    cases = [(k, group, (rows, 3), d) for k in KINDS for d in ("bfloat16", "int8", "bool")]
    predicts(t, fn, cases, "bytes")


@byte_predictor.check("a group of one, a scalar, and a very large array")
def _(fn, t):
    predicts(t, fn, [(kind, 1, (64, 5), "float32") for kind in KINDS], "a group of one")
    predicts(
        t, fn, [("all-reduce", 8, (), "float32"), ("all-gather", 8, (), "float32")], "a scalar"
    )
    odd = 3_000_017, 2_999_999, 1_777_777  # neither int64 nor float32 has their product
    for shape, why in (((2**20, 2**20, 512), "2^49 numbers"), (odd, "more than 2^63 numbers")):
        predicts(t, fn, [(kind, 512, shape, "bfloat16") for kind in KINDS], why)


@byte_predictor.check("compiled programs")
def _(fn, t):
    mesh = mesh_of(2, 4)
    for axis, group in (("a", 2), ("b", 4)):
        programs = {
            "all-gather": lambda x, axis=axis: jax.lax.all_gather(x, axis, tiled=True),
            "reduce-scatter": lambda x, axis=axis: jax.lax.psum_scatter(x, axis, tiled=True),
            "all-reduce": lambda x, axis=axis: jax.lax.psum(x, axis),
            "collective-permute": lambda x, axis=axis, n=group: jax.lax.ppermute(x, axis, right(n)),
        }
        kind = list(programs)[int(t.rng.integers(4))]
        shape = (4 * int(t.rng.integers(1, 9)), int(t.rng.integers(1, 9)))
        names = P(("a", "b"))
        program = split(programs[kind], mesh, names, names)
        whole = spec_of(mesh, names, (8 * shape[0], shape[1]))
        (found,) = collectives(program, whole)
        why = f"{kind} over {axis!r} of a mesh of 2 by 4, float32{list(shape)} on each device"
        t.close(float(fn(kind, group, shape, "float32")), found.moved, rtol=1e-9, why=why)


@byte_predictor.mutant(
    "You treat an all-gather's operand as the whole. It is one part; the whole is `group` times as large."
)
def operand_is_whole(kind, group, shape, dtype):
    return right_bytes(kind, group, shape, dtype, gathered=False)


@byte_predictor.mutant("An all-reduce is a reduce-scatter and an all-gather: twice (n-1)/n.")
def reduced_once(kind, group, shape, dtype):
    return right_bytes(kind, group, shape, dtype, twice=1)


@byte_predictor.mutant(
    "You forgot that a device keeps its own part: it sends (group - 1)/group of the whole."
)
def sends_to_itself(kind, group, shape, dtype):
    return right_bytes(kind, group, shape, dtype, rest=False)


@byte_predictor.mutant("You count 4 bytes for every number. The dtype determines how many it has.")
def always_four(kind, group, shape, dtype):
    return right_bytes(kind, group, shape, dtype, item=4)


@byte_predictor.mutant("A permute to no other device sends nothing either: handle a group of one.")
def permutes_alone(kind, group, shape, dtype):
    return right_bytes(kind, group, shape, dtype, alone=1)


@byte_predictor.mutant(
    "A permute has no parts: each device sends its whole operand, without (group - 1)/group."
)
def permute_in_parts(kind, group, shape, dtype):
    kind = "all-to-all" if kind == "collective-permute" else kind
    return right_bytes(kind, group, shape, dtype)


@byte_predictor.mutant(
    "You treat a reduce-scatter's operand as one part. It is the whole; the result is the part."
)
def scatter_from_part(kind, group, shape, dtype):
    kind = "all-gather" if kind == "reduce-scatter" else kind
    return right_bytes(kind, group, shape, dtype)


@byte_predictor.mutant(
    "You multiply the sizes in 32 bits, as `jnp.prod` does. Python's integers have no limit."
)
def overflows(kind, group, shape, dtype):
    numbers = int(np.prod(np.array(shape, np.int32), dtype=np.int32)) if shape else 1
    return right_bytes(kind, group, (numbers,), dtype)


@byte_predictor.mutant(
    "You multiply in 64 bits, as `np.prod` does, and 2^63 doesn't fit. `math.prod` has no limit."
)
def overflows_late(kind, group, shape, dtype):
    with np.errstate(over="ignore"):
        s = np.prod(np.array(shape, np.int64), dtype=np.int64) * np.int64(jnp.dtype(dtype).itemsize)
    return right_bytes(kind, group, (int(s),), "int8")


@byte_predictor.mutant("You compute in float32, which has 7 digits. Return a Python number.")
def rounds(kind, group, shape, dtype):
    numbers = float(np.prod(np.array(shape, np.float32), dtype=np.float32))
    return right_bytes(kind, group, (int(numbers),), dtype)


@byte_predictor.mutant(
    "You round down before you double. Half of what a device sends in an all-reduce needn't be a whole number."
)
def floors(kind, group, shape, dtype):
    if kind == "all-reduce":
        return 2 * (right_bytes("reduce-scatter", group, shape, dtype) // 1)
    return right_bytes(kind, group, shape, dtype)


@byte_predictor.mutant(
    "In an all-to-all a device keeps one of its n parts: it sends (group - 1)/group of its operand."
)
def all_to_all_whole(kind, group, shape, dtype):
    kind = "collective-permute" if kind == "all-to-all" and group > 1 else kind
    return right_bytes(kind, group, shape, dtype)


@byte_predictor.mutant(
    "You treat an all-to-all's operand as one part of a whole, as in an all-gather. It has a part for every "
    "device, so it is the whole side."
)
def all_to_all_from_part(kind, group, shape, dtype):
    kind = "all-gather" if kind == "all-to-all" else kind
    return right_bytes(kind, group, shape, dtype)


# ------------------------------------------------------------------------- all_to_all_transpose

all_to_all_transpose = Exercise(
    "10.all_to_all_transpose",
    title="Transpose a split matrix",
    function="distributed_transpose",
    minutes=20,
    points=10,
    devices=8,
    statement="""
A matrix [M, N] is split by rows over n devices. Write `distributed_transpose(x_RN, axis)`, which is called inside a
`shard_map` and returns this device's rows of the *transpose* [N, M].

- Use one `all-to-all` and no other collective, so a device sends (n-1)/n of what it has.
- M and N are multiples of n and needn't be equal. The result keeps the dtype.
- Applied twice, it returns the original matrix.
""",
    hints=(
        "Which numbers of the matrix does device d need? Which does it already have, and which devices have the "
        "others?",
        "It needs columns d N/n to (d + 1) N/n of *all* rows. So each device cuts its columns into n blocks and sends "
        "block d to device d. The blocks that arrive are stacked as rows. A transpose within a device sends nothing.",
        "`jax.lax.all_to_all(x_RN, axis, split_axis=1, concat_axis=0, tiled=True)` has the shape [M, N/n].",
    ),
)


def transposes(fn, mesh, axis, whole):
    program = split(lambda x: fn(x, axis), mesh, P(axis), P(axis))
    return np.asarray(program(put(mesh, P(axis), whole)).astype(jnp.float32))


@all_to_all_transpose.check("a square matrix on eight devices")
def _(fn, t):
    x = np.arange(64, dtype=np.float32).reshape(8, 8) + float(t.rng.integers(100))
    got, why = transposes(fn, mesh_of(8), "a", x), "[8, 8]: one row each"
    if got.shape == x.shape and (got != x.T).any():
        row, column = (int(i) for i in np.argwhere(got != x.T)[0])
        found = np.argwhere(x == got[row, column]).tolist()
        held = f"x{found[0]}" if found else "no number of x"
        why += f"; device {row} has {held} in column {column}, where x[{column}, {row}] belongs"
    t.close(got, x.T, rtol=0, atol=0, why=why)


@all_to_all_transpose.check("sizes that differ")
def _(fn, t):
    for n in (4, 8):
        M, N = n * t.rng.choice(np.arange(2, 7), 2, replace=False)
        x = t.rng.normal(size=(M, N)).astype(np.float32)
        t.close(transposes(fn, mesh_of(n), "a", x), x.T, rtol=0, atol=0, why=f"[{M}, {N}] on {n}")
    n, mesh = 4, mesh_of(2, 4)
    x = t.rng.normal(size=(n * M, n * N)).astype(np.float32)
    t.close(transposes(fn, mesh, "b", x), x.T, rtol=0, atol=0, why="the axis b of a mesh of 2 by 4")


@all_to_all_transpose.check("there and back, in bfloat16")
def _(fn, t):
    x = jnp.asarray(t.rng.normal(size=(16, 40)), jnp.bfloat16)
    twice = lambda x, axis: fn(fn(x, axis), axis)  # noqa: E731
    got = transposes(twice, mesh_of(8), "a", x)
    t.close(got, np.asarray(x, np.float32), rtol=0, atol=0, why="transposed twice")
    program = split(lambda x: fn(x, "a"), mesh_of(8), P("a"), P("a"))
    t.equal(str(program(put(mesh_of(8), P("a"), x)).dtype), "bfloat16", why="the dtype")


@all_to_all_transpose.check("one all-to-all and its bytes")
def _(fn, t):
    M, N = 8 * int(t.rng.integers(2, 7)), 8 * int(t.rng.integers(2, 7))
    program = split(lambda x: fn(x, "a"), mesh_of(8), P("a"), P("a"))
    found = collectives(program, spec_of(mesh_of(8), P("a"), (M, N)))
    t.equal(
        [(c.kind, c.runs) for c in found], [("all-to-all", 1)], why="collectives and their runs"
    )
    sent = int(sum(c.runs * c.moved for c in found))
    t.equal(sent, 4 * M * N // 8 * 7 // 8, why=f"bytes sent by each device for [{M}, {N}]")
    narrow = collectives(program, spec_of(mesh_of(8), P("a"), (M, N), "int8"))
    sent = int(sum(c.runs * c.moved for c in narrow))
    t.equal(sent, M * N // 8 * 7 // 8, why=f"bytes sent by each device for [{M}, {N}] in int8")


@all_to_all_transpose.mutant(
    "You gather the whole matrix on every device and keep a part: that takes n times the bytes and the memory of "
    "a whole matrix. An all-to-all sends each number once."
)
def gather_and_cut(x, axis):
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    whole = jax.lax.all_gather(x, axis, tiled=True)
    width = x.shape[1] // n
    return jax.lax.dynamic_slice_in_dim(whole, me * width, width, axis=1).T


@all_to_all_transpose.mutant(
    "You return this device's columns, [M, N/n]. Transpose them to get its rows of the transpose."
)
def columns_only(x, axis):
    return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=0, tiled=True)


@all_to_all_transpose.mutant(
    "You transpose each device's own rows and leave them there, so no number has changed devices."
)
def local_only(x, axis):
    n = jax.lax.axis_size(axis)
    return x.T.reshape(x.shape[1] // n, n * x.shape[0])


@all_to_all_transpose.mutant(
    "You deal out columns like cards: device d gets columns d, d + n, d + 2n. Its rows of the transpose must be "
    "adjacent, so cut [N] into n blocks, not N/n."
)
def dealt(x, axis):
    n = jax.lax.axis_size(axis)
    R, N = x.shape
    blocks = x.reshape(R, N // n, n).transpose(2, 0, 1)
    arrived = jax.lax.all_to_all(blocks, axis, 0, 0, tiled=True)
    return arrived.reshape(n * R, N // n).T


@all_to_all_transpose.mutant(
    "You send float32 where the matrix has fewer bits, which takes more bytes. Nothing is computed here, so keep "
    "the type."
)
def sent_wide(x, axis):
    wide = jax.lax.all_to_all(x.astype(jnp.float32), axis, split_axis=1, concat_axis=0, tiled=True)
    return wide.T.astype(x.dtype)


@all_to_all_transpose.mutant(
    "The bytes are right, but you send n - 1 messages with permutes. Use one all-to-all."
)
def by_permutes(x, axis):
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    R, C = x.shape[0], x.shape[1] // n
    out = jnp.tile(jnp.zeros_like(x[None, :, :C]), (n, 1, 1))
    for s in range(n):
        block = jax.lax.dynamic_slice_in_dim(x, (me + s) % n * C, C, axis=1)
        if s:
            block = jax.lax.ppermute(block, axis, [(i, (i + s) % n) for i in range(n)])
        out = out.at[(me - s) % n].set(block)
    return out.reshape(n * R, C).T


@all_to_all_transpose.mutant(
    "You only reshape what arrives from [M, N/n] to [N/n, M]. Use a transpose to turn rows into columns."
)
def reshaped(x, axis):
    columns = jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=0, tiled=True)
    return columns.reshape(columns.shape[::-1])


@all_to_all_transpose.mutant(
    "The blocks that arrive are in the wrong order: one sender's rows are adjacent in the result, so the sender's "
    "index must come before the row's."
)
def interleaved(x, axis):
    n = jax.lax.axis_size(axis)
    R, N = x.shape
    blocks = x.reshape(R, n, N // n).transpose(1, 0, 2)
    arrived = jax.lax.all_to_all(blocks, axis, 0, 0, tiled=True)
    return arrived.transpose(1, 0, 2).reshape(n * R, N // n).T


# ---------------------------------------------------------------------------- collective_matmul

collective_matmul = Exercise(
    "10.collective_matmul",
    title="Multiply while rows go round the ring",
    function="gather_while_multiplying",
    minutes=30,
    points=15,
    devices=8,
    statement="""
The first half of a feed-forward layer gathers and then multiplies: `jax.lax.all_gather(x_RD, axis, tiled=True) @ w_DC`.
Write `gather_while_multiplying(x_RD, w_DC, axis)`, which returns the same but overlaps the two. It is called inside a
`shard_map`.

- Each device multiplies the rows that it has while sending them to the next device. That makes n products of [B/n, D]
  by [D, F/n], and $n-1$ permutes of [B/n, D].
- In a loop, an iteration's product must not need what arrives in that iteration; otherwise it waits.
- The gathered [B, D] never exists. There is no other collective.
""",
    hints=(
        "Start from section 3's ring gather. In each iteration it moves rows and stores them at the right index. What "
        "do you store here, and whose rows does it belong to?",
        "Let the loop carry the result [B, F/n] and the rows that are here now. In iteration s these belong to device "
        "me - s. Start their permute, multiply *them* (not what arrives), and put the product at rows (me - s) B/n.",
        "After n - 1 iterations the last rows are here, and you still have to multiply them, after the loop. The "
        "initial result in the carry must vary over the axis as the products do, so make it from the arguments: for "
        "example `jnp.tile(jnp.zeros_like(x_RD[:, :1] * w_DC[:1]), (n, 1))`.",
    ),
)

MATMUL = P("a", None), P(None, "a")


def multiplies(fn, mesh, axis="a"):
    specs = P(axis, None), P(None, axis)
    return split(lambda x, w: fn(x, w, axis), mesh, specs, P(None, axis))


def drawn_matrices(t, n):
    R, D, C = (int(size) for size in t.rng.integers(2, 7, 3))
    x = t.rng.normal(size=(n * R, D)).astype(np.float32)
    return x, t.rng.normal(size=(D, n * C)).astype(np.float32)


def wrong_rows(got, want, n):
    """What is in the first wrong part of [B, F] on n devices: [B/n, F/n], the product of one with another's."""
    got, want = (
        a.reshape(n, len(a) // n, n, -1).swapaxes(1, 2).astype(np.float64) for a in (got, want)
    )
    for rows, device in np.ndindex(n, n):
        part = got[rows, device]
        same = [np.allclose(part, w, rtol=1e-4, atol=1e-4) for w in want[:, device]]
        if same[rows]:
            continue
        found = "something else"
        if not part.any():
            found = "zeros"
        elif any(same):
            found = f"the product for the rows of device {same.index(True)}"
        elif np.allclose(part, 2 * want[rows, device], rtol=1e-4, atol=1e-4):
            found = "twice their product"
        return f"Device {device} has {found} where the rows of device {rows} belong"
    return ""


@collective_matmul.check("equal to the plain product")
def _(fn, t):
    for n in (8, 4):
        mesh = mesh_of(n)
        x, w = drawn_matrices(t, n)
        got = np.asarray(multiplies(fn, mesh)(put(mesh, MATMUL[0], x), put(mesh, MATMUL[1], w)))
        want = x.astype(np.float64) @ w
        why = f"{x.shape} by {w.shape} on {n} devices"
        if got.shape == want.shape:
            why = ". ".join(filter(None, (why, wrong_rows(got, want, n))))
        t.close(got, want, rtol=1e-4, atol=1e-4, why=why)
    both = mesh_of(2, 4)
    got = np.asarray(multiplies(fn, both, "b")(put(both, P("b"), x), put(both, P(None, "b"), w)))
    t.close(got, want, rtol=1e-4, atol=1e-4, why="over the axis b of a mesh of 2 by 4")
    args = [spec_of(mesh, s, a.shape, "bfloat16") for s, a in zip(MATMUL, (x, w), strict=True)]
    found = str(jax.eval_shape(multiplies(fn, mesh), *args).dtype)
    t.equal(found, "bfloat16", why="the result's dtype for bfloat16 arguments")


@collective_matmul.check("one row a device, and a row of infinities")
def _(fn, t):
    mesh = mesh_of(8)
    x, w = t.rng.normal(size=(8, 3)).astype(np.float32), np.ones((3, 8), np.float32)
    x[int(t.rng.integers(8))] = np.inf
    got = np.asarray(multiplies(fn, mesh)(put(mesh, MATMUL[0], x), put(mesh, MATMUL[1], w)))
    t.close(got, x.astype(np.float64) @ w, rtol=1e-4, atol=1e-4, why="only its own row is infinite")


SHAPES = (8 * 4, 96), (96, 8 * 8)  # [B, D], [D, F]


def matmul_args(mesh):
    return [spec_of(mesh, spec, shape) for spec, shape in zip(MATMUL, SHAPES, strict=True)]


@collective_matmul.check("permutes and their bytes")
def _(fn, t):
    mesh = mesh_of(8)
    found = collectives(multiplies(fn, mesh), *matmul_args(mesh))
    t.equal(sorted({c.kind for c in found}), ["collective-permute"], why="kinds of collectives")
    t.equal(sum(c.runs for c in found), 7, why="permutes in one run on 8 devices")
    sent = int(sum(c.runs * c.moved for c in found))
    t.equal(sent, 7 * 4 * 4 * 96, why="bytes that each device sends; its rows have 4 x 96 float32")


def inner_jaxprs(eqn):
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value


def walk(jaxpr, runs=1):
    """(jaxpr, runs) of it and of all that it calls."""
    yield jaxpr, runs
    for eqn in jaxpr.eqns:
        trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in inner_jaxprs(eqn):
            yield from walk(inner, runs * trips)


def holds(eqn, name):
    return eqn.primitive.name == name or any(
        holds(e, name) for inner in inner_jaxprs(eqn) for e in inner.eqns
    )


def traced(fn):
    mesh = mesh_of(8)
    return list(walk(jax.make_jaxpr(multiplies(fn, mesh))(*matmul_args(mesh)).jaxpr))


@collective_matmul.check("no more arithmetic, no gathered array")
def _(fn, t):
    flops, largest = 0, 0
    for jaxpr, runs in traced(fn):
        for eqn in jaxpr.eqns:
            largest = max([largest, *(v.aval.size for v in eqn.outvars)])
            if eqn.primitive.name == "dot_general":
                (over, _), _ = eqn.params["dimension_numbers"]
                inner = int(np.prod([eqn.invars[0].aval.shape[i] for i in over]))
                flops += runs * 2 * inner * eqn.outvars[0].aval.size
    t.equal(flops, 2 * 32 * 96 * 8, why="FLOPs of all products on one device")
    why = f"an array of {largest} numbers: [B, D] has {32 * 96} and mustn't exist"
    t.true(largest < 32 * 96, why=why, observed=largest)


@collective_matmul.check("a product doesn't wait for its own iteration's permute")
def _(fn, t):
    waits = 0
    for jaxpr, _ in traced(fn):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name not in ("scan", "while"):
                continue
            for body in inner_jaxprs(eqn):
                arrived = set()
                for e in body.eqns:
                    needs = any(id(v) in arrived for v in e.invars)
                    waits += needs and holds(e, "dot_general")
                    if needs or holds(e, "ppermute"):
                        arrived |= {id(v) for v in e.outvars}
    t.equal(
        int(waits), 0, why="products in a loop's body that need what arrives in the same iteration"
    )


@collective_matmul.check("rows go to a neighbour")
def _(fn, t):
    pairs = [
        pair
        for jaxpr, _ in traced(fn)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "ppermute"
        for pair in eqn.params["perm"]
    ]
    hops = sorted({min((a - b) % 8, (b - a) % 8) for a, b in pairs})
    t.true(max(hops, default=0) < 2, why=f"hops that rows are sent by: {hops}", observed=hops)


def multiply_with(x, w, axis, *, sign=-1, trips=None, wait=False):
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    rows = x.shape[0]

    def place(out, x, step):
        return jax.lax.dynamic_update_slice_in_dim(out, x @ w, (me + sign * step) % n * rows, 0)

    def trip(step, state):
        out, here = state
        arriving = jax.lax.ppermute(here, axis, right(n))
        if wait:
            return place(out, arriving, step + 1), arriving
        return place(out, here, step), arriving

    out = jnp.tile(jnp.zeros_like(x[:, :1] * w[:1]), (n, 1))
    if wait:
        return jax.lax.fori_loop(0, n - 1, trip, (place(out, x, 0), x))[0]
    out, last = jax.lax.fori_loop(0, trips or n - 1, trip, (out, x))
    return out if trips else place(out, last, n - 1)


@collective_matmul.mutant(
    "You gather first and then multiply. That is the plain version, and nothing overlaps. Move the rows with "
    "permutes and multiply those that are here."
)
def plain(x, w, axis):
    return jax.lax.all_gather(x, axis, tiled=True) @ w


@collective_matmul.mutant(
    "Your products go to the wrong rows. Rows come from the left, so after s steps you hold those of device me - "
    "s, not me + s."
)
def other_way_round(x, w, axis):
    return multiply_with(x, w, axis, sign=1)


@collective_matmul.mutant(
    "You send your own rows to every device, further and further away. On a ring they cross all links on the way: "
    "send to the next device what you have just multiplied."
)
def sends_its_own_rows(x, w, axis):
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    rows, out = x.shape[0], jnp.tile(jnp.zeros_like(x[:, :1] * w[:1]), (jax.lax.axis_size(axis), 1))
    for s in range(n):
        far = [(i, (i + s) % n) for i in range(n)]
        here = jax.lax.ppermute(x, axis, far) if s else x
        out = jax.lax.dynamic_update_slice_in_dim(out, here @ w, (me - s) % n * rows, 0)
    return out


@collective_matmul.mutant(
    "You permute n times. After n - 1 permutes the last rows are here; the n-th only sends them home."
)
def one_too_many(x, w, axis):
    return multiply_with(x, w, axis, trips=jax.lax.axis_size(axis))


@collective_matmul.mutant(
    "Your loop multiplies what has just arrived, so each product waits for its permute. Multiply the rows that "
    "were already here, and pass on what arrives to the next iteration."
)
def waits_for_it(x, w, axis):
    return multiply_with(x, w, axis, wait=True)


@collective_matmul.mutant(
    "You collect all rows with permutes and multiply at the end. The bytes are right, but [B, D] exists and "
    "nothing overlaps. Multiply each part as soon as you have it."
)
def collect_first(x, w, axis):
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    rows = x.shape[0]
    place = jax.lax.dynamic_update_slice_in_dim

    def trip(step, state):
        whole, here = state
        here = jax.lax.ppermute(here, axis, right(n))
        return place(whole, here, (me - step) % n * rows, 0), here

    whole = place(jnp.tile(jnp.zeros_like(x), (n, 1)), x, me * rows, 0)
    return jax.lax.fori_loop(1, n, trip, (whole, x))[0] @ w


@collective_matmul.mutant(
    "Your result is float32 whatever x_RD is. Make the initial result from the arguments, or with x_RD's dtype."
)
def always_wide(x, w, axis):
    return multiply_with(x, w, axis).astype(jnp.float32)


@collective_matmul.mutant(
    "You forgot the last rows: n - 1 iterations make n - 1 products, so one part of the result stays zero."
)
def last_missing(x, w, axis):
    n = jax.lax.axis_size(axis)
    return multiply_with(x, w, axis, trips=n - 1)
