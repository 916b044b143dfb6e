import heapq
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.book.grading import Exercise
from minitext.compiler import hlo


def pick(t, *choices):
    return choices[int(t.rng.integers(len(choices)))]


def number(t, low, high):
    return int(t.rng.integers(low, high))


# ------------------------------------------------------------------------------- spec_puzzle

spec_puzzle = Exercise(
    "09.spec_puzzle",
    title="Which device holds what",
    function="place",
    minutes=25,
    points=10,
    devices=8,
    forbid=("jax.sharding.NamedSharding", "jax.NamedSharding"),
    statement="""
Write `place(shape, mesh, spec, itemsize, index)`, which computes without JAX how an array is stored on a mesh. It
returns `(shard, bytes, copies, holders)`.

- `mesh` is a dict of axis sizes in the mesh's order. Devices are numbered from 0, and the last axis varies fastest: in
  `{"a": 2, "b": 4}`, device 5 is at a=1, b=1.
- `spec` has an entry for each dimension: None, an axis, or a tuple of axes. In a tuple, the last of *its* axes varies
  fastest over the parts. Dimensions without an entry are whole.
- `shard` is the shape of one device's part, `bytes` its size, and `copies` the number of devices that hold the same
  part. `holders` lists the numbers of all devices that hold the element at `index`, in ascending order. All are Python
  integers or tuples of them.
- Raise `ValueError` if no array can be stored this way: the spec has more entries than the array has dimensions, the
  mesh doesn't have an axis, an axis is named twice, or a dimension doesn't split into equal parts.
""",
    hints=(
        "Start with one dimension. Into how many parts is it cut, and which of them has the element? The part's "
        "number gives the position of its devices on each of the entry's axes.",
        "Go through the devices and check each one's position on all *named* axes. Axes that the spec doesn't name "
        "are free: devices along them hold copies.",
        "`for axis in reversed(entry): number, wanted[axis] = divmod(number, mesh[axis])` splits a part's number into "
        "positions. The same loop over `reversed(mesh)` does it for a device's number.",
    ),
)


def right_place(shape, mesh, spec, itemsize, index, *, refuse="rank axis twice divide", **wrong):
    if "rank" in refuse and len(spec) > len(shape):
        raise ValueError("rank")
    given = spec
    spec = (*spec, *[None] * (len(shape) - len(spec)))[: len(shape)]
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    named = [a for e in entries for a in e]
    if "axis" in refuse and set(named) - set(mesh):
        raise ValueError("axis")
    if wrong.get("ones"):
        named = [a for a in named if mesh.get(a, 1) > 1]
    if "twice" in refuse and len(set(named)) < len(named):
        raise ValueError("twice")
    if "padded" in refuse and any(e is not None for e in given[len(shape) :]):
        raise ValueError("padded")
    shard, wanted = [], {}
    for size, entry, i in zip(shape, entries, index, strict=True):
        parts = math.prod(mesh.get(a, 1) for a in entry)
        if "divide" in refuse and size % parts:
            raise ValueError("divide")
        if "each" in refuse and any(size % mesh.get(a, 1) for a in entry):
            raise ValueError("each")
        shard.append(max(1, size // parts) if wrong.get("down") else -(-size // parts))
        part = i // shard[-1] if not wrong.get("cyclic") else i % parts
        for a in entry if wrong.get("first_fastest") else reversed(entry):
            part, wanted[a] = divmod(part, mesh.get(a, 1))
    holders = []
    for device in range(math.prod(mesh.values())):
        rest, here = device, {}
        for a in mesh if wrong.get("columns") else reversed(mesh):
            rest, here[a] = divmod(rest, mesh[a])
        if all(here.get(a, 0) == place for a, place in wanted.items()):
            holders.append(device)
    copies = len(holders)
    if wrong.get("parts"):
        copies = math.prod(mesh.values()) // copies
    if wrong.get("one"):
        holders = holders[:1]
    count = math.prod(shape if wrong.get("whole") else shard)
    bytes_of_one = 1 if wrong.get("numbers") else itemsize
    return tuple(shard), count * bytes_of_one, copies, tuple(holders)


def coordinates(device, mesh):
    """Axis -> a device's place on it."""
    found = {}
    for axis in reversed(mesh):
        device, found[axis] = divmod(device, mesh[axis])
    return {axis: found[axis] for axis in mesh}


def lies(t, fn, shape, mesh, spec, why=""):
    itemsize, index = pick(t, 1, 2, 4), tuple(number(t, 0, size) for size in shape)
    want = right_place(shape, mesh, spec, itemsize, index)
    got = fn(shape, dict(mesh), spec, itemsize, index)
    t.equal(len(got), 4, why="how many values are returned")
    said = f"array {shape} on mesh {mesh} with spec {spec}{why}"
    t.equal(tuple(got[0]), want[0], why=f"the part's shape, {said}")
    said_bytes = f"the part's bytes at {itemsize} a number, {said}"
    third = {"That is the number of copies, which comes third": want[2]}
    t.equal(got[1], want[1], why=said_bytes, mistakes=third)
    devices = math.prod(mesh.values())
    parts = f"{devices} devices hold {devices // want[2]} different parts"
    t.equal(got[2], want[2], why=f"copies; {parts}, {said}")
    part = tuple(i // size for i, size in zip(index, want[0], strict=True))
    sits = ", ".join(f"{a}={place}" for a, place in coordinates(want[3][0], mesh).items())
    about = f"the element is in part {part}, and device {want[3][0]} is at {sits or 'no axis'}"
    t.equal(tuple(got[3]), want[3], why=f"holders of element {index}, {said}; {about}")


@spec_puzzle.check("one axis for a dimension")
def _(fn, t):
    for spec in (("a", "b"), ("b", None), (None, "a"), (None, None)):
        mesh = {"a": number(t, 2, 5), "b": number(t, 5, 8)}
        shape = tuple(math.prod(mesh.values()) * number(t, 2, 9) for _ in spec)
        lies(t, fn, shape, mesh, spec)


@spec_puzzle.check("as in JAX, on eight devices")
def _(fn, t):
    mesh, spec = {"a": 2, "b": 2, "c": 2}, pick(t, (("c", "a"), "b"), (("b", "c"), None, "a"))
    shape = (8, 4, 2)[: len(spec)]
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    sharding = NamedSharding(jax.sharding.Mesh(devices, ("a", "b", "c")), P(*spec))
    index = tuple(number(t, 0, size) for size in shape)
    holders = sorted(
        jax.devices().index(d)
        for d, part in sharding.devices_indices_map(shape).items()
        if all(i in range(*s.indices(n)) for i, s, n in zip(index, part, shape, strict=True))
    )
    got = fn(shape, mesh, spec, 4, index)
    t.equal(tuple(got[0]), sharding.shard_shape(shape), why=f"the part's shape for {spec}")
    t.equal(tuple(got[3]), tuple(holders), why=f"holders of {index} for {spec}")


@spec_puzzle.check("several axes for a dimension, in any order")
def _(fn, t):
    for spec in ((("c", "a"), "b"), (("a", "b", "c"),), (None, ("b", "a")), (("b",), None, "c")):
        mesh = {"a": 2, "b": 3, "c": number(t, 4, 6)}
        shape = tuple(math.prod(mesh.values()) * number(t, 1, 4) for _ in spec)
        lies(t, fn, shape, mesh, spec)


@spec_puzzle.check("a short spec, an empty one, axes of size one, a scalar")
def _(fn, t):
    mesh = {"a": 1, "b": number(t, 2, 6), "c": 1}
    size = 6 * mesh["b"]
    lies(t, fn, (size, 5, 7), mesh, ("b",))
    lies(t, fn, (size, 3), mesh, (("c", "a"), "a" if size % 2 else None))
    lies(t, fn, (size,), mesh, ((),), why=", an empty tuple")
    lies(t, fn, (), mesh, ())
    mesh = {"data": number(t, 2, 5), "tensor": number(t, 2, 5)}
    lies(
        t, fn, (math.prod(mesh.values()), 4), mesh, ("tensor", ()), why=", names of several letters"
    )


@spec_puzzle.check("impossible specs")
def _(fn, t):
    for shape, spec, why in (
        ((4,), ("a", "b"), "more entries than dimensions"),
        ((6,), ("a", None), "more entries than dimensions"),
        ((), (None,), "more entries than dimensions"),
        ((6, 6), ("a", "z"), "the mesh has no axis 'z'"),
        ((6, 6), ("b", "b"), "axis 'b' is named twice"),
        ((36,), (("a", "a"),), "axis 'a' is named twice in one entry"),
        ((6, 4), ("a", "b"), "3 parts do not divide 4"),
        ((9,), (("a", "b"),), "6 parts do not divide 9"),
        ((2,), (("b", "a"),), "6 parts do not divide 2"),
        ((12,), (("a", "c"),), "8 parts do not divide 12"),
        ((6, 6), ("one", "one"), "axis 'one' is named twice"),
    ):
        mesh = {"a": 2, "b": 3, "c": 4, "one": 1}
        index = (0,) * len(shape)
        why = f"{why}: array {shape}, mesh {mesh}, spec {spec}"
        t.raises(ValueError, fn, shape, mesh, spec, 4, index, why=why)


@spec_puzzle.mutant(
    "In a tuple, you let the first axis vary fastest over the parts. It is the last one, like a number's digits."
)
def first_axis_fastest(*args):
    return right_place(*args, first_fastest=True)


@spec_puzzle.mutant(
    "You number the devices with the mesh's first axis varying fastest. It is the last."
)
def devices_by_column(*args):
    return right_place(*args, columns=True)


@spec_puzzle.mutant(
    "You return the number of different parts, or of all devices, as the copies. Copies are the devices "
    "that hold the same part: the number of devices divided by the number of parts."
)
def parts_for_copies(*args):
    return right_place(*args, parts=True)


@spec_puzzle.mutant(
    "You return one holder. All devices that differ only on unnamed axes hold the element."
)
def one_holder(*args):
    return right_place(*args, one=True)


@spec_puzzle.mutant(
    "You deal the elements out in turn. A part is a block: element i of a dimension is in part i // (size of a "
    "part)."
)
def dealt_in_turn(*args):
    return right_place(*args, cyclic=True)


@spec_puzzle.mutant("You return the bytes of the whole array instead of one device's part.")
def whole_bytes(*args):
    return right_place(*args, whole=True)


@spec_puzzle.mutant(
    "You round up where a dimension doesn't split into equal parts. Refuse it: ValueError."
)
def rounds_up(*args):
    return right_place(*args, refuse="rank axis twice")


@spec_puzzle.mutant(
    "You accept an axis named in two entries, or twice in one. A device can't have two positions on one axis."
)
def twice(*args):
    return right_place(*args, refuse="rank axis divide")


@spec_puzzle.mutant("You treat an axis that the mesh doesn't have as one of size 1. Refuse it.")
def unknown_axis(*args):
    return right_place(*args, refuse="rank twice divide")


@spec_puzzle.mutant("You ignore entries beyond the array's last dimension. Refuse such a spec.")
def too_long(*args):
    return right_place(*args, refuse="axis twice divide")


@spec_puzzle.mutant(
    "You accept a spec with too many entries if the extra ones are None. They still count as entries."
)
def too_long_of_none(*args):
    return right_place(*args, refuse="padded axis twice divide")


@spec_puzzle.mutant(
    "You check that each axis by itself divides the dimension. The number of parts must divide it: the product of "
    "the axes' sizes."
)
def each_axis_divides(*args):
    return right_place(*args, refuse="rank axis twice each")


@spec_puzzle.mutant(
    "You drop axes of size 1 before you look for axes named twice. Here every name counts."
)
def drops_ones(*args):
    return right_place(*args, ones=True)


@spec_puzzle.mutant("The holders must be in ascending order.")
def descending(*args):
    shard, size, copies, holders = right_place(*args)
    return shard, size, copies, holders[::-1]


@spec_puzzle.mutant(
    "You round down where a dimension doesn't split into equal parts. Refuse it: ValueError."
)
def rounds_down(*args):
    return right_place(*args, refuse="rank axis twice", down=True)


@spec_puzzle.mutant(
    "You return how many numbers a part has. Its bytes are `itemsize` times as many."
)
def numbers_for_bytes(*args):
    return right_place(*args, numbers=True)


@spec_puzzle.mutant(
    "An axis that the mesh doesn't have is a KeyError in your function. Look before you use it, and raise "
    "ValueError."
)
def axis_by_key(shape, mesh, spec, itemsize, index):
    for entry in spec:
        for axis in [entry] if isinstance(entry, str) else entry or ():
            mesh[axis]
    return right_place(shape, mesh, spec, itemsize, index)


@spec_puzzle.mutant(
    "You expect an entry for each dimension. A spec may be shorter: the dimensions without an entry are "
    "whole."
)
def entry_for_each(shape, mesh, spec, itemsize, index):
    if len(spec) < len(shape):
        raise ValueError("entries are missing")
    return right_place(shape, mesh, spec, itemsize, index)


@spec_puzzle.mutant(
    "You take the name of one axis apart: `tuple('data')` has its letters. A name alone is an entry of one axis."
)
def letters(shape, mesh, spec, itemsize, index):
    return right_place(shape, mesh, tuple(e and tuple(e) for e in spec), itemsize, index)


@spec_puzzle.mutant("You return the shape of the whole array. A device's part is smaller.")
def whole_shape(shape, *rest):
    return shape, *right_place(shape, *rest)[1:]


@spec_puzzle.mutant(
    "You divide a dimension by the first of its axes alone. Several axes make as many parts as the product "
    "of their sizes."
)
def first_axis_alone(shape, mesh, spec, itemsize, index):
    right_place(shape, mesh, spec, itemsize, index)
    first = [e if e is None or isinstance(e, str) else (*e, None)[0] for e in spec]
    return right_place(shape, mesh, first, itemsize, index)


# ------------------------------------------------------------------------------- out_sharding

out_sharding = Exercise(
    "09.out_sharding",
    title="One collective",
    function="make_two_layers",
    minutes=25,
    points=15,
    devices=8,
    statement="""
This exercise is about a computation of two layers, `relu(x w) v`. The mesh in use has the Explicit axes `data` and
`tensor`. Write `make_two_layers(case)`. It returns a function of `(x_BD, w_DF, v_FD)` that compiles to exactly one
collective:

| case | x_BD | w_DF | v_FD | result y_BD | collective | on one device it makes |
|---|---|---|---|---|---|---|
| A | `data, -` | `-, tensor` | `tensor, -` | `data, -` | all-reduce | y_BD, [B/data, D] |
| B | `data, -` | `-, tensor` | `-, tensor` | `data, tensor` | all-gather | h_BF, [B/data, F] |
| C | `data, tensor` | `tensor, -` | `-, -` | `data, -` | all-reduce | h_BF, [B/data, F] |
| D | `data, -` | `-, -` | `-, -` | `-, data` | all-to-all | y_BD, [B, D/data] |

Arguments arrive as the table says; a dash is a whole dimension. F is larger than D. The checks compile your function
for eight simulated devices and read the HLO. They reject a different collective, a second one, or one with more bytes.
""",
    hints=(
        "Write each product's result type next to it. If the type follows from the operands, you write nothing. If it "
        "doesn't, or isn't unique, the collective goes there.",
        "You have two tools. `out_sharding=` says how a product's result is sharded, and leaves it to the compiler to "
        "get there. `jax.sharding.reshard` moves an existing array. In B and D you know which array is cheapest to "
        "move.",
        'A: the second product is `jnp.einsum("bf,fd->bd", h, v, out_sharding=P("data", None))`. C: the same '
        'for the first. B: `reshard(h, P("data", None))` between the products. D: `reshard` after the second.',
    ),
)
CASES = {
    "A": (("data", None), (None, "tensor"), ("tensor", None), ("data", None)),
    "B": (("data", None), (None, "tensor"), (None, "tensor"), ("data", "tensor")),
    "C": (("data", "tensor"), ("tensor", None), (None, None), ("data", None)),
    "D": (("data", None), (None, None), (None, None), (None, "data")),
}


def made_by(collectives, B, D, F, data):
    """What each collective of a program makes, as a sentence for the learner."""
    arrays = {
        "x_BD or y_BD, [B/data, D]": B // data * D,
        "x_BD or y_BD, whole": B * D,
        "h_BF, [B/data, F]": B // data * F,
        "h_BF, whole": B * F,
        "w_DF or v_FD, whole": D * F,
    }
    found = []
    for one in collectives:
        names = [name for name, size in arrays.items() if 4 * size == one.bytes]
        found.append(
            f"{'a' if one.kind[0] in 'cr' else 'an'} {one.kind} of {' or '.join(names) or f'{one.bytes} bytes'}"
        )
    return f"Your program has {', '.join(found) or 'none'}"


def compiles_to(t, fn, case):
    data = pick(t, 2, 4)
    mesh = jax.make_mesh((data, 8 // data), ("data", "tensor"))
    B, D = 8 * number(t, 1, 4), 8 * number(t, 1, 4)
    D += 8 * (B // data == D)  # else gathering w_DF costs what gathering h_BF does
    F = D + 8 * number(t, 3, 6)
    *specs, result = CASES[case]
    host = [
        t.rng.standard_normal(shape, np.float32) / math.sqrt(shape[0])
        for shape in ((B, D), (D, F), (F, D))
    ]
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, P(*s)) for x, s in zip(host, specs, strict=True)]
        compiled = t.compiled(fn(case), *args)
        y = compiled(*args)
    want = np.maximum(host[0] @ host[1], 0) @ host[2]
    parts = np.split(host[0], 8 // data, 1), np.split(host[1], 8 // data, 0)
    told = {
        "There is no relu in this: it is (x w) v": host[0] @ host[1] @ host[2],
        "Here relu acts on each device's part of the sum over D; it comes after the sum": sum(
            np.maximum(x @ w, 0) for x, w in zip(*parts, strict=True)
        )
        @ host[2],
        "Here relu acts on the result too, or on it alone; it comes between the products": np.maximum(
            want, 0
        ),
    }
    where = f"case {case}, B={B} D={D} F={F} on {mesh.shape}"
    t.close(y, want, rtol=1e-3, atol=1e-4, why=where, mistakes=told)
    said = ",".join(f"{n}@{a}" if a else str(n) for n, a in zip((B, D), result, strict=True))
    t.equal(str(jax.typeof(y)), f"float32[{said}]", why=f"the result's type in case {case}")
    wide = F if case in "BC" else D
    kind = {"A": "all-reduce", "B": "all-gather", "C": "all-reduce", "D": "all-to-all"}[case]
    found = {k: list(v) for k, v in hlo.collectives(compiled.as_text()).items()}
    why = f"collectives (count, bytes) in case {case}, B={B} D={D} F={F} on {dict(mesh.shape)}. "
    why += made_by(hlo.Module(compiled.as_text()).collectives(), B, D, F, data)
    t.equal(found, {kind: [1, 4 * B // data * wide]}, why=why)


for _case in CASES:
    out_sharding.check(f"case {_case}")(lambda fn, t, case=_case: compiles_to(t, fn, case))


def einsum(subscripts, a, b, *spec):
    return jnp.einsum(subscripts, a, b, out_sharding=P(*spec))


def layers_of(**changed):
    """The right four, with some replaced."""
    relu, reshard = jax.nn.relu, jax.sharding.reshard
    right = {
        "A": lambda x, w, v: einsum("bf,fd->bd", relu(x @ w), v, "data", None),
        "B": lambda x, w, v: reshard(relu(x @ w), P("data", None)) @ v,
        "C": lambda x, w, v: relu(einsum("bd,df->bf", x, w, "data", None)) @ v,
        "D": lambda x, w, v: reshard(relu(x @ w) @ v, P(None, "data")),
    }
    return lambda case: (right | changed)[case]


@out_sharding.mutant(
    "Case A: both operands of the second product are split over the summed dimension. JAX won't guess how to "
    "shard the sum: say it with `out_sharding=`."
)
def guesses(case):
    return layers_of(A=lambda x, w, v: jax.nn.relu(x @ w) @ v)(case)


@out_sharding.mutant(
    "Case A: you make h_BF whole before the second product, and then split its sum again. Leave h_BF split over "
    "`tensor`; relu doesn't mind."
)
def whole_hidden(case):
    def fn(x, w, v):
        h = jax.nn.relu(jax.sharding.reshard(x @ w, P("data", None)))
        return einsum("bf,fd->bd", h, v, "data", None)

    return layers_of(A=fn)(case)


@out_sharding.mutant(
    "Case B: `out_sharding=` on the first product makes the compiler gather the weight w_DF. Compute h_BF in "
    "parts and `reshard` it."
)
def gathers_the_weight(case):
    def fn(x, w, v):
        return jax.nn.relu(einsum("bd,df->bf", x, w, "data", None)) @ v

    return layers_of(B=fn)(case)


@out_sharding.mutant(
    "Case B: the result should stay split over `tensor`. You gather it too, which is a second collective."
)
def gathers_the_result(case):
    def fn(x, w, v):
        y = jax.sharding.reshard(jax.nn.relu(x @ w), P("data", None)) @ v
        return jax.sharding.reshard(y, P("data", None))

    return layers_of(B=fn)(case)


@out_sharding.mutant(
    "Case C: you split h_BF over `tensor` after the sum, so the second product has to sum over devices again. "
    "Leave h_BF whole in F."
)
def splits_the_sum(case):
    def fn(x, w, v):
        h = jax.nn.relu(einsum("bd,df->bf", x, w, "data", "tensor"))
        return einsum("bf,fd->bd", h, v, "data", None)

    return layers_of(C=fn)(case)


@out_sharding.mutant(
    "Case C: you gather x_BD and w_DF instead of summing products of the parts. `out_sharding=` on the first "
    "product is enough."
)
def gathers_the_operands(case):
    def fn(x, w, v):
        x, w = jax.sharding.reshard(x, P("data", None)), jax.sharding.reshard(w, P(None, None))
        return jax.nn.relu(x @ w) @ v

    return layers_of(C=fn)(case)


@out_sharding.mutant(
    "Case D: with `out_sharding=` on the second product, the compiler gathers h_BF, the wider array. Leave the "
    "product's own sharding and `reshard` its result."
)
def turns_too_early(case):
    def fn(x, w, v):
        return einsum("bf,fd->bd", jax.nn.relu(x @ w), v, None, "data")

    return layers_of(D=fn)(case)


@out_sharding.mutant(
    "Case D: your result is still sharded like x_BD. The table wants its columns split."
)
def does_not_turn(case):
    return layers_of(D=lambda x, w, v: jax.nn.relu(x @ w) @ v)(case)


@out_sharding.mutant(
    "Case C: your relu is missing, or acts on each device's partial products. Apply it after their sum."
)
def relu_of_parts(case):
    def fn(x, w, v):
        return einsum("bd,df->bf", x, w, "data", None) @ v

    return layers_of(C=fn)(case)


@out_sharding.mutant(
    "Case D: you reshard h_BF instead of y_BD. It is wider, and its product must then be summed over devices."
)
def turns_the_hidden(case):
    def fn(x, w, v):
        h = jax.sharding.reshard(jax.nn.relu(x @ w), P(None, "data"))
        return jax.sharding.reshard(h @ v, P(None, "data"))

    return layers_of(D=fn)(case)


@out_sharding.mutant(
    "There is a relu between the layers. Without it, the two products could be one."
)
def linear(case):
    def fn(x, w, v):
        return einsum("bf,fd->bd", x @ w, v, "data", None)

    return layers_of(A=fn)(case)


# ----------------------------------------------------------------------------- shard_map_port

shard_map_port = Exercise(
    "09.shard_map_port",
    title="The program of one device",
    function="split_softmax",
    minutes=30,
    points=15,
    devices=8,
    statement="""
A model's vocabulary was padded so that it can be split over devices. Here is the softmax over its real part, as a
global program:

```python
def global_softmax(x_BV, vocab):
    is_token_V = jnp.arange(x_BV.shape[1]) < vocab
    x_BV = jnp.where(is_token_V, x_BV, -jnp.inf)
    e_BV = jnp.exp(x_BV - jnp.max(x_BV, axis=1, keepdims=True))
    return e_BV / jnp.sum(e_BV, axis=1, keepdims=True)
```

Write `split_softmax(x_BV, vocab)`, which does the same inside one `jax.shard_map`.

- `x_BV` is sharded `P("data", "tensor")` on the mesh in use, and so is the result. Either axis may have size 1.
- The compiled program has exactly two collectives. Both are all-reduces over `tensor`, of one number for each of the
  device's rows.
- Numbers, including the padding, may be anything from -1000 to 1000. A device may have nothing but padding.
- Its gradient is right. `jax.lax.pmax` has none, but the softmax doesn't depend on what you subtract from a row. So put
  `jax.lax.stop_gradient` around the argument of `pmax`.
""",
    hints=(
        "Inside, x_BV has only this device's columns. Which three lines of the global program use more than one "
        "column, or a column's number?",
        '`jax.lax.axis_index("tensor")` is this device\'s index on the axis. Multiply it by the number of columns on '
        "each device to get the number of its first column. The maximum of maxima is a `pmax`, the sum of sums a "
        "`psum`.",
        '`first = jax.lax.axis_index("tensor") * x_BV.shape[1]`, then mask by `first + arange`; '
        '`top_B1 = jax.lax.pmax(jax.lax.stop_gradient(max of mine), "tensor")`; divide by '
        '`jax.lax.psum(sum of mine, "tensor")`. `out_specs=P("data", "tensor")`; in_specs follow from the type.',
    ),
)


def draw_rows(t, data, scale=1.0):
    B, V = data * number(t, 1, 5), 8 * number(t, 2, 6)
    x = t.rng.standard_normal((B, V), np.float32) * np.float32(scale)
    return x, np.random.default_rng(int(t.rng.integers(1 << 30)))


def right_softmax(x, vocab):
    x = x.astype(np.float64)[:, :vocab]
    e = np.exp(x - x.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    return p


def padded(p, V):
    return np.pad(p, ((0, 0), (0, V - p.shape[1])))


def softmax_is(t, fn, x, vocab, data, why):
    mesh = jax.make_mesh((data, 8 // data), ("data", "tensor"))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, P("data", "tensor"))
        p = jax.jit(lambda x: fn(x, vocab))(placed)
    where = f"{why}, [B, V] = {x.shape}, vocab={vocab}, mesh {data} x {8 // data}"
    column = np.arange(x.shape[1])
    width, devices = data * x.shape[1] // 8, 8 // data
    each = np.where(column % width < max(vocab // devices, 1), x, -np.inf)
    told = {
        "You put 0 where the padding is, and e to the power of 0 is 1. Put -inf there": right_softmax(
            np.where(column < vocab, x, 0), len(column)
        ),
        "Your sum includes the padding": right_softmax(x, len(column)) * (column < vocab),
        "You keep the first vocab / tensor columns of each device; the padding is all at the end": right_softmax(
            each, len(column)
        ),
    }
    want = padded(right_softmax(x, vocab), len(column))
    t.close(
        p, want, rtol=1e-4, atol=1e-6, why=where, mistakes=told if vocab < len(column) else None
    )
    t.equal(str(jax.typeof(p)), str(jax.typeof(placed)), why=f"the result's type, {where}")


@shard_map_port.check("no padding")
def _(fn, t):
    data = pick(t, 2, 4)
    x, _ = draw_rows(t, data)
    softmax_is(t, fn, x, x.shape[1], data, "no padding")


@shard_map_port.check("padding on the last devices")
def _(fn, t):
    for data in (2, 1):
        x, _ = draw_rows(t, data)
        softmax_is(t, fn, x, x.shape[1] - number(t, 1, 5), data, "some padding")


@shard_map_port.check("devices that have only padding")
def _(fn, t):
    x, _ = draw_rows(t, 2)
    softmax_is(t, fn, x, number(t, 1, x.shape[1] // 4), 2, "tokens on one device only")


@shard_map_port.check("large logits")
def _(fn, t):
    x, rng = draw_rows(t, 2)
    x = np.where(rng.random(x.shape) < 0.5, x + 90, x - 90).astype(np.float32)
    x[0, number(t, 0, x.shape[1])] = 1000
    softmax_is(t, fn, x, x.shape[1], 2, "logits of 90 and 1000")


@shard_map_port.check("padding larger than any token")
def _(fn, t):
    x, _ = draw_rows(t, 2)
    vocab = x.shape[1] - number(t, 1, 5)
    x[:, :vocab] -= 1000
    x[0, vocab:] = 1000
    softmax_is(t, fn, x, vocab, 2, "logits of -1000, and 1000 in the padding")


@shard_map_port.check("an axis of size one")
def _(fn, t):
    x, _ = draw_rows(t, 8)
    softmax_is(t, fn, x, x.shape[1] - 3, 8, "all devices along data")


@shard_map_port.check("the gradient")
def _(fn, t):
    x, rng = draw_rows(t, 2, scale=3)
    vocab = x.shape[1] - number(t, 1, 5)
    g = rng.standard_normal(x.shape).astype(np.float32)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    with jax.set_mesh(mesh):
        placed, weight = (jax.device_put(a, P("data", "tensor")) for a in (x, g))
        got = jax.jit(jax.grad(lambda x: jnp.sum(fn(x, vocab) * weight)))(placed)
    p, g = right_softmax(x, vocab), g[:, :vocab].astype(np.float64)
    want = p * (g - (p * g).sum(1, keepdims=True))
    why = f"the gradient, [B, V] = {x.shape}, vocab={vocab}"
    t.close(got, padded(want, x.shape[1]), rtol=1e-3, atol=1e-5, why=why)


@shard_map_port.check("two all-reduces in a shard_map")
def _(fn, t):
    data = pick(t, 2, 4)
    x, _ = draw_rows(t, data)
    mesh = jax.make_mesh((data, 8 // data), ("data", "tensor"))
    call = lambda x: fn(x, x.shape[1] - 1)  # noqa: E731
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, P("data", "tensor"))
        names, text = t.primitives(call, placed), t.hlo(call, placed)
    t.true("shard_map" in names, why="there is no shard_map in the jaxpr")
    found = {k: list(v) for k, v in hlo.collectives(text).items()}
    want = {"all-reduce": [2, 2 * 4 * len(x) // data]}
    t.equal(found, want, why=f"collectives (count, bytes) for {x.shape} on {data} x {8 // data}")


def ported(
    x, vocab, *, columns=True, top="all", stop=True, total=("tensor",), late=False, gather=False,
    fill=-jnp.inf, past=0, early=False, frozen=False, whole=False,
):  # fmt: skip
    """The right answer, with what mutants change."""

    def one(x):
        width = x.shape[1]
        me = jax.lax.axis_index("tensor")
        first = me * width if columns else 0
        if gather:
            x = jax.lax.all_gather(x, "tensor", axis=1, tiled=True)
            first = 0
        keep = first + jnp.arange(x.shape[1]) < vocab + past
        mine = jnp.max(x, axis=1, keepdims=True)
        if not late:
            x = jnp.where(keep, x, fill)
        mine = mine if early else jnp.max(x, axis=1, keepdims=True)
        mine = jax.lax.stop_gradient(mine) if stop else mine
        if top == "all" and not gather:
            mine = jax.lax.pmax(mine, "tensor")
        e = jnp.exp(x - mine if top else x)
        sums = jnp.sum(jax.lax.psum(e, total) if whole else e, axis=1, keepdims=True)
        total_here = () if whole else total
        sums = jax.lax.psum(sums, total_here) if total_here and not gather else sums
        p = e / (jax.lax.stop_gradient(sums) if frozen else sums)
        if late:
            p = jnp.where(keep, p, 0)
        return jax.lax.dynamic_slice_in_dim(p, me * width, width, axis=1) if gather else p

    return jax.shard_map(one, out_specs=P("data", "tensor"))(x)


@shard_map_port.mutant(
    "Each device divides by the sum of its own columns, so its part of a row adds up to 1. `psum` the sums."
)
def own_sum(x, vocab):
    return ported(x, vocab, total=())


@shard_map_port.mutant(
    "You also sum over `data`, but its devices have other rows. Sum over `tensor` only."
)
def sums_other_rows(x, vocab):
    return ported(x, vocab, total=("data", "tensor"))


@shard_map_port.mutant(
    "You mask by column numbers that start at 0 on every device. Add `axis_index` times the number of columns on "
    "each device."
)
def local_columns(x, vocab):
    return ported(x, vocab, columns=False)


@shard_map_port.mutant(
    "Each device subtracts its own maximum, so the parts of a row are scaled differently. `pmax` it."
)
def own_maximum(x, vocab):
    return ported(x, vocab, top="own")


@shard_map_port.mutant(
    "You don't subtract the maximum. In float32, the exponential of 90 overflows."
)
def no_maximum(x, vocab):
    return ported(x, vocab, top="")


@shard_map_port.mutant(
    "You differentiate through `pmax`, which has no gradient. Put `stop_gradient` around its argument."
)
def through_pmax(x, vocab):
    return ported(x, vocab, stop=False)


@shard_map_port.mutant(
    "You set padding to 0 after dividing by a sum that includes it. Mask before the exponential."
)
def masks_late(x, vocab):
    return ported(x, vocab, late=True)


@shard_map_port.mutant(
    "Your maximum includes the padding. If that is large, the exponential of every token is 0, so mask before the "
    "maximum."
)
def padded_maximum(x, vocab):
    return ported(x, vocab, early=True)


@shard_map_port.mutant(
    "You mask with a large negative number, but a token's logit may be just as small. -inf is below them all."
)
def finite_mask(x, vocab):
    return ported(x, vocab, fill=-1000.0)


@shard_map_port.mutant(
    "You put 0 where the padding is, and e to the power of 0 is 1, which counts in the sum. Put -inf there."
)
def zero_mask(x, vocab):
    return ported(x, vocab, fill=0.0)


@shard_map_port.mutant(
    "You send every column through `psum` and add up the row afterwards. Add up the device's own columns first: then "
    "one number for each row is sent."
)
def sums_late(x, vocab):
    return ported(x, vocab, whole=True)


@shard_map_port.mutant("Column `vocab` is already padding: you keep one column too many.")
def one_column_more(x, vocab):
    return ported(x, vocab, past=1)


@shard_map_port.mutant(
    "Put `stop_gradient` around the maximum alone. The sum and the exponentials depend on the logits."
)
def frozen_sum(x, vocab):
    return ported(x, vocab, frozen=True)


@shard_map_port.mutant(
    "You gather the whole row on every device. Two numbers for each row are enough: its maximum and its sum."
)
def gathers_rows(x, vocab):
    return ported(x, vocab, gather=True)


@shard_map_port.mutant(
    "This is the global program, which the compiler splits. Write the program of one device in `jax.shard_map`."
)
def still_global(x, vocab):
    x = jnp.where(jnp.arange(x.shape[1]) < vocab, x, -jnp.inf)
    return jax.nn.softmax(x, axis=1)


# -------------------------------------------------------------------------------------- rules

rules = Exercise(
    "09.rules",
    title="From names to axes",
    function="spec_of",
    minutes=15,
    points=10,
    forbid=("minitext.sharding.rules",),
    statement="""
Write `spec_of(names, table, sizes, drop=())`, the `PartitionSpec` of an array whose dimensions have names.

- `table` maps a name to a tuple of mesh axes, possibly empty. None instead of a name means that the dimension stays
  whole.
- Remove axes of size 1, and those in `drop`, before you check anything else.
- A dimension's entry is None if no axis is left, the axis itself if one is left, and a tuple in the table's order if
  there are several. Every dimension has an entry.
- If the table doesn't have a name, raise a `ValueError` whose message has the name, whatever the mesh.
- If two dimensions claim a remaining axis, raise a `ValueError` whose message has the axis.
""",
    hints=(
        'For which mesh sizes is `("heads", "mlp")` a collision, if both go to `tensor`? Decide which axes to remove '
        "before you look for collisions.",
        "Keep a dict `taken` from each axis to the name that claimed it, over all dimensions. Check `name not in "
        "table` before you look up `table[name]`: `table.get(name, ())` lets typos through.",
        "`axes = tuple(a for a in table[name] if sizes[a] > 1 and a not in drop)`; the entry is "
        "`None if not axes else axes[0] if len(axes) == 1 else axes`; return `P(*entries)`.",
    ),
)
NAMES = ("batch", "seq", "embed", "heads", "mlp", "vocab", "layers")
TABLE = {
    "batch": ("data", "fsdp"), "seq": ("context",), "embed": ("fsdp",), "heads": ("tensor",),
    "mlp": ("tensor",), "vocab": ("tensor", "context"), "layers": (),
}  # fmt: skip
OTHER_TABLE = {
    "batch": ("context",), "seq": ("tensor", "data"), "embed": ("data",), "heads": (),
    "mlp": ("fsdp", "context"), "vocab": ("fsdp",), "layers": ("data", "tensor"),
}  # fmt: skip


def right_spec(
    names, table, sizes, drop=(), *, unknown=True, clash="raise", ones=False, late=False, ends=True
):
    entries, taken = [], {}
    for name in names:
        if name is not None and name not in table and unknown:
            raise ValueError(name)
        axes = table.get(name, ()) if name is not None else ()
        left = tuple(a for a in axes if (ones or sizes[a] > 1) and a not in drop)
        for a in axes if late else left:
            if a in taken and clash == "raise":
                raise ValueError(a)
            if clash == "skip" and a in taken:
                left = tuple(b for b in left if b != a)
            taken[a] = name
        entries.append(None if not left else left[0] if len(left) == 1 else left)
    while not ends and entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def axis_sizes(t, *ones):
    axes = ("data", "fsdp", "context", "tensor")
    return {axis: 1 if axis in ones else number(t, 2, 9) for axis in axes}


def maps_to(t, fn, names, sizes, drop=(), table=TABLE):
    want = right_spec(names, table, sizes, drop)
    got = fn(names, table, sizes, drop) if drop else fn(names, table, sizes)
    t.true(isinstance(got, P), why=f"got a {type(got).__name__}, want a PartitionSpec")
    why = f"{names} with sizes {sizes}" + (f", without {sorted(drop)}" if drop else "")
    why += "" if table == TABLE else f" and the table {table}"
    t.equal(list(got), list(want), why=why)


@rules.check("one axis, several, none")
def _(fn, t):
    sizes = axis_sizes(t)
    for names in (("embed", "mlp"), ("batch", "seq", None), ("layers", "embed", "heads"), ()):
        maps_to(t, fn, names, sizes)
    maps_to(t, fn, ("vocab", "embed"), sizes)


@rules.check("axes of size one")
def _(fn, t):
    maps_to(t, fn, ("batch", "seq", None), axis_sizes(t, pick(t, "data", "fsdp")))
    maps_to(t, fn, ("batch", "seq", "heads"), axis_sizes(t, "data", "fsdp", "context"))
    maps_to(t, fn, ("embed", "vocab"), axis_sizes(t, "data", "fsdp", "context", "tensor"))


@rules.check("dropped axes")
def _(fn, t):
    for drop in (frozenset({"fsdp"}), {"fsdp", "tensor"}, ["data"]):
        maps_to(t, fn, ("embed", "mlp"), axis_sizes(t), drop)
        maps_to(t, fn, ("batch", None, "heads"), axis_sizes(t), drop)


@rules.check("unknown names")
def _(fn, t):
    typo = pick(t, "mpl", "embd", "Heads")
    for sizes in (axis_sizes(t), axis_sizes(t, "data", "fsdp", "context", "tensor")):
        why = f"{typo!r} is not in the table"
        t.raises(ValueError, fn, ("batch", typo), TABLE, sizes, why=why, match=typo)


@rules.check("collisions")
def _(fn, t):
    sizes = axis_sizes(t)
    for names, axis in (
        (("heads", "mlp"), "tensor"),
        (("batch", "seq", "embed"), "fsdp"),
        (("embed", "embed"), "fsdp"),
        (("vocab", None, "seq"), "context"),
    ):
        why = f"two dimensions of {names} claim {axis!r}"
        t.raises(ValueError, fn, names, TABLE, sizes, why=why, match=axis)


@rules.check("no collision over a removed axis")
def _(fn, t):
    maps_to(t, fn, ("heads", "mlp"), axis_sizes(t, "tensor"))
    maps_to(t, fn, ("embed", "embed", "mlp"), axis_sizes(t, "fsdp"))
    maps_to(t, fn, ("batch", "seq", "embed"), axis_sizes(t), {"fsdp"})


@rules.check("several arrays, and an unchanged table")
def _(fn, t):
    table, sizes = dict(TABLE), axis_sizes(t)
    for names in (("embed", "heads"), ("embed", "mlp"), ("batch", "seq")):
        maps_to(t, fn, names, sizes, table=table)
    t.equal(table, TABLE, why="your function changed the table")


@rules.check("another table")
def _(fn, t):
    for name in NAMES:
        maps_to(t, fn, (name, None), axis_sizes(t), table=OTHER_TABLE)
    maps_to(t, fn, ("layers", "mlp"), axis_sizes(t), table=OTHER_TABLE)


@rules.mutant(
    "You leave a dimension whole as soon as one of its axes is in `drop`. The others still split it."
)
def drops_the_name(names, table, sizes, drop=()):
    table = {name: () if set(axes) & set(drop) else axes for name, axes in table.items()}
    return right_spec(names, table, sizes)


@rules.mutant(
    "An unknown name silently leaves its dimension whole. A typo then wastes memory for weeks: raise ValueError."
)
def typos_survive(names, table, sizes, drop=()):
    return right_spec(names, table, sizes, drop, unknown=False)


@rules.mutant("You keep axes of size 1. They split nothing, but they end up in the array's type.")
def keeps_ones(names, table, sizes, drop=()):
    return right_spec(names, table, sizes, drop, ones=True)


@rules.mutant("You ignore `drop`.")
def ignores_drop(names, table, sizes, drop=()):
    return right_spec(names, table, sizes)


@rules.mutant(
    "If two dimensions claim an axis, you give it to the first and go on. Raise ValueError: the order of "
    "dimensions shouldn't decide which one is split."
)
def first_wins(names, table, sizes, drop=()):
    return right_spec(names, table, sizes, drop, clash="skip")


@rules.mutant(
    "You don't look for collisions. JAX refuses such a spec too, but later and without the dimensions' names."
)
def no_collisions(names, table, sizes, drop=()):
    entries = []
    for name in names:
        if name is not None and name not in table:
            raise ValueError(name)
        axes = tuple(a for a in table.get(name, ()) if sizes[a] > 1 and a not in drop)
        entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return P(*entries)


@rules.mutant(
    "You report a collision over an axis that should have been removed. Remove axes of size 1 and those in `drop` "
    "first."
)
def collides_early(names, table, sizes, drop=()):
    return right_spec(names, table, sizes, drop, late=True)


@rules.mutant("You omit trailing entries for whole dimensions. Give every dimension an entry.")
def short_spec(names, table, sizes, drop=()):
    return right_spec(names, table, sizes, drop, ends=False)


@rules.mutant(
    "A name that the table doesn't have is a KeyError in your function. Look before you use it, and raise a "
    "ValueError with the name."
)
def name_by_key(names, table, sizes, drop=()):
    for name in names:
        if name is not None:
            table[name]
    return right_spec(names, table, sizes, drop)


@rules.mutant(
    "You take one axis where several are left. A dimension's entry is then a tuple of all of them."
)
def last_axis_alone(names, table, sizes, drop=()):
    found = right_spec(names, table, sizes, drop)
    return P(*[e[-1] if isinstance(e, tuple) else e for e in found])


@rules.mutant("Your axes are in another order than in the table. Keep its order.")
def sorted_axes(names, table, sizes, drop=()):
    found = right_spec(names, table, sizes, drop)
    return P(*[tuple(sorted(e)) if isinstance(e, tuple) else e for e in found])


@rules.mutant("You return a tuple or a list. Make a `PartitionSpec` of the entries: `P(*entries)`.")
def tuple_of_entries(names, table, sizes, drop=()):
    return tuple(right_spec(names, table, sizes, drop))


@rules.mutant(
    "A name of None is looked up in the table. None means that the dimension stays whole."
)
def none_is_a_name(names, table, sizes, drop=()):
    if None in names:
        raise ValueError("unknown name None")
    return right_spec(names, table, sizes, drop)


@rules.mutant("You leave whole dimensions out. Each has an entry, None.")
def without_none(names, table, sizes, drop=()):
    return P(*[e for e in right_spec(names, table, sizes, drop) if e is not None])


@rules.mutant(
    "You put the whole list of entries in as one. Give P an argument for each dimension: `P(*entries)`."
)
def one_entry_for_all(names, table, sizes, drop=()):
    flat = [e for e in right_spec(names, table, sizes, drop) if isinstance(e, str)]
    return P(tuple(flat))


# ------------------------------------------------------------------------------------- route

route = Exercise(
    "09.route",
    title="The cheapest way to another sharding",
    function="cheapest_route",
    minutes=40,
    points=20,
    forbid=("jax.sharding.reshard", "jax.device_put"),
    statement="""
`reshard` has to find a way from one sharding to another. There are many, and they differ in the bytes that are sent and
in the memory that they need on the way. Find the best one.

A *layout* is a tuple with a tuple of axes for each dimension: `(("x", "y"), ())` splits the rows along x, and each
part along y. There are three kinds of moves, each of one axis. Let `n` be the axis's size, and a device's *block*
its part of the array before the move.

| move | what happens to the layout | bytes that a device receives |
|---|---|---|
| cut | an axis that splits nothing is added at the end of a dimension's tuple | 0 |
| all-gather | the last axis of a tuple is taken off | `(n - 1)` blocks |
| all-to-all | the last axis of a tuple goes to the end of another dimension's | `(n - 1) / n` of a block |

Write `cheapest_route(shape, itemsize, mesh, source, target, room)`. It returns `(received, layouts)`: the least number
of bytes, summed over the moves, for which `target` can be reached, and the layouts after each move, up to `target`.

- After every move, each dimension must be divisible by the product of its axes' sizes, and a device's block may take
  at most `room` bytes. Both hold for `source` already.
- Bytes are exact ints. If several ways are cheapest, return any of them. If `source` is the target, no move is needed.
- If there is no way, return `None`.
- Your function has at most a few seconds for a mesh of four axes and an array of three dimensions.
""",
    hints=(
        "How do you get from `((\"x\", \"y\"), ())` to `((\"y\", \"x\"), ())`? Find three ways on paper, and count "
        "the bytes of each for axes of 2 and 4. Does it help to go through a layout that's cut finer than both?",
        "Think of layouts as cities and of moves as roads whose lengths are bytes. You're looking for the shortest "
        "way in a network that you needn't build in advance. A function that yields the moves from one layout is "
        "enough.",
        "Dijkstra: a heap of `(received, layout, layouts so far)` that starts with `(0, source, [])`. Take the "
        "cheapest; if it's the target, that's the answer; if it was taken before, drop it; otherwise push all its "
        "moves that divide and fit. When the heap is empty, there is no way.",
    ),
)  # fmt: skip


def block_of(case, layout):
    """Bytes of a device's part, or None if the layout doesn't divide the array."""
    size = case["itemsize"]
    for length, axes in zip(case["shape"], layout, strict=True):
        parts = math.prod(case["mesh"][axis] for axis in axes)
        if length % parts:
            return None
        size *= length // parts
    return size


def put_axes(layout, i, axes):
    return (*layout[:i], tuple(axes), *layout[i + 1 :])


def moves_from(case, layout, any_axis=False, cuts=True, swaps=True):
    """(kind, n, layout) of each move; with any_axis not only the last one comes off."""
    dims = range(len(layout))
    for i in dims:
        for axis in case["mesh"]:
            if cuts and not any(axis in axes for axes in layout):
                yield "cut", case["mesh"][axis], put_axes(layout, i, (*layout[i], axis))
        for axis in layout[i] if any_axis else layout[i][-1:]:
            n = case["mesh"][axis]
            without = put_axes(layout, i, [a for a in layout[i] if a != axis])
            yield "all-gather", n, without
            for j in dims:
                if swaps and j != i:
                    yield "all-to-all", n, put_axes(without, j, (*layout[j], axis))


def price(kind, n, size):
    return {"cut": 0, "all-gather": (n - 1) * size, "all-to-all": size - size // n}[kind]


def search(case, price=price, room=None, divides=True, at_start=False, first=False, **moves):
    """(cost, layouts), the cheapest way by Dijkstra's algorithm, or None."""
    queue, done = [(0, 0, case["source"], [])], set()
    limit = case["room"] if room is None else room
    while queue:
        cost, steps, layout, way = heapq.heappop(queue)
        if layout == case["target"]:
            return cost, way
        if layout in done and not first:
            continue
        done.add(layout)
        for kind, n, new in moves_from(case, layout, **moves):
            size = block_of(case, new)
            if size is None and divides:
                continue
            if size is not None and size > limit:
                continue
            if first and new in done:
                continue
            if first:
                done.add(new)
            now = block_of(case, case["source"] if at_start else layout) or 0
            heapq.heappush(queue, (cost + price(kind, n, now), steps + 1, new, [*way, new]))
    return None


def cost_of(case, way, told=None):
    """The bytes of a way, or what is wrong with it; appends to `told` what each move receives."""
    here, cost = case["source"], 0
    for new in way:
        block, size = block_of(case, here), block_of(case, new)
        found = [(kind, n) for kind, n, there in moves_from(case, here) if there == new]
        if not found:
            return f"there is no move from {here} to {new}"
        if size is None:
            return f"{new} doesn't divide the array"
        if size > case["room"]:
            return f"a block takes {size} bytes in {new}, and the room is {case['room']}"
        (kind, n), paid = found[0], price(*found[0], block)
        if told is not None:
            told.append(f"{kind} over {n} devices with blocks of {block} bytes receives {paid}")
        cost += paid
        here = new
    return cost if here == case["target"] else f"the way ends at {here}"


def why_not(case, got, want):
    """What is wrong with one answer, in words."""
    if got is None:
        return f"you find no way, and {want[1]} receives {want[0]} bytes"
    way, moves = ways_of(got), []
    cost = cost_of(case, way, moves)
    if isinstance(cost, str):
        return f"your way is {way}, but {cost}"
    if cost != got[0]:
        return f"you count {got[0]} bytes, and in your way {', '.join(moves)}"
    return f"your way, {way}, receives {cost} bytes, and {want[1]} receives {want[0]}"


def ways_of(pair):
    return [tuple(tuple(axes) for axes in layout) for layout in pair[1]]


def draw_layout(t, axes, dims):
    layout = [()] * dims
    for axis in t.rng.permutation(axes):
        i = int(t.rng.integers(-1, dims))
        if i >= 0:
            layout[i] = (*layout[i], str(axis))
    return tuple(layout)


def draw_move(t, axes="xyz", dims=2, slack=None):
    """Two layouts that differ; with `slack`, blocks may be that many times the larger of the two."""
    sizes = t.rng.permutation([2, 3, 4, 5])
    mesh = {axis: int(n) for axis, n in zip(axes, sizes, strict=False)}
    parts = math.prod(mesh.values())
    case = {
        "shape": tuple(parts * int(n) for n in t.rng.integers(1, 4, size=dims)),
        "itemsize": int(t.rng.choice([1, 2, 4])), "mesh": mesh,
        "source": draw_layout(t, list(axes), dims), "target": draw_layout(t, list(axes), dims),
    }  # fmt: skip
    ends = [block_of(case, case[name]) for name in ("source", "target")]
    return case | {"room": 10**12 if slack is None else slack * max(ends)}


def moves_where(t, wrong, count=2, **look):
    """Cases in which a wrong rule finds another number of bytes, or none."""
    found = []
    for _ in range(3000):
        case = draw_move(t, **look)
        best = search(case)
        if best is not None and best[0] > 0 and (wrong(case) or (None,))[0] != best[0]:
            found.append(case)
        if len(found) == count:
            return found
    raise AssertionError("no case found")


def routes_are_best(t, fn, cases):
    got = [fn(*case.values()) for case in cases]
    want = [search(case) for case in cases]
    whole = all(pair is None or isinstance(pair[0], int | np.integer) for pair in got)
    t.true(whole, "the bytes that a device receives are ints", observed=[str(pair) for pair in got])
    paid, right = ([None if pair is None else pair[0] for pair in all] for all in (got, want))
    off = next(
        (i for i, pair in enumerate(zip(paid, right, strict=True)) if pair[0] != pair[1]), None
    )
    told = "" if off is None else described(cases[off]) + why_not(cases[off], got[off], want[off])
    t.equal(paid, right, why=f"bytes that a device receives: {told}")
    for case, pair in zip(cases, got, strict=True):
        if pair is None:
            continue
        way = ways_of(pair)
        cost = cost_of(case, way)
        t.true(not isinstance(cost, str), f"{described(case)}{cost}", observed=str(way))
        t.equal(cost, pair[0], why=f"{described(case)}the bytes of the moves {way}")


def described(case):
    return f"{case['shape']} on {case['mesh']}, {case['source']} to {case['target']}: "


def fixed_move(t, source, target, mesh=None, shape=None, slack=None):
    mesh = mesh or dict(zip("xyz", (int(n) for n in t.rng.permutation([2, 3, 5])), strict=True))
    shape = shape or (30 * number(t, 1, 5), 30 * number(t, 1, 5))
    case = {
        "shape": shape,
        "itemsize": pick(t, 1, 2, 4),
        "mesh": mesh,
        "source": source,
        "target": target,
    }
    ends = [block_of(case, source), block_of(case, target)]
    return case | {"room": 10**12 if slack is None else slack * max(ends)}


@route.check("one move")
def _(fn, t):
    rows, both = (("x",), ()), (("x", "y"), ())
    ends = [(rows, both), (both, rows), (rows, ((), ("x",))), (((), ()), ((), ("z",)))]
    routes_are_best(t, fn, [fixed_move(t, *pair) for pair in ends])


@route.check("no move")
def _(fn, t):
    routes_are_best(t, fn, [fixed_move(t, (("y",), ("x",)), (("y",), ("x",)))])


@route.check("the order of two axes")
def _(fn, t):
    ends = [((("x", "y"), ()), (("y", "x"), ())), ((("x", "y"), ()), (("y",), ()))]
    routes_are_best(t, fn, [fixed_move(t, *pair) for pair in ends])


@route.check("two and three dimensions")
def _(fn, t):
    routes_are_best(t, fn, [draw_move(t) for _ in range(5)])
    routes_are_best(t, fn, [draw_move(t, dims=3) for _ in range(3)])


@route.check("a single dimension")
def _(fn, t):
    routes_are_best(t, fn, [draw_move(t, dims=1) for _ in range(4)])


@route.check("where it helps to cut first")
def _(fn, t):
    routes_are_best(t, fn, moves_where(t, lambda case: search(case, cuts=False) or (0,)))
    routes_are_best(t, fn, moves_where(t, fewest_moves, dims=3))


@route.check("where the first move that looks best isn't")
def _(fn, t):
    routes_are_best(t, fn, moves_where(t, by_largest_move))


@route.check("where a cheaper way to the same layout is found later")
def _(fn, t):
    routes_are_best(t, fn, moves_where(t, lambda case: search(case, first=True)))


@route.check("more bytes than a float can count")
def _(fn, t):
    shape = (30 * 3**15 * number(t, 1, 3), 30 * 5**10)
    ends = [((("x", "y"), ()), ((), ())), ((("x",), ("y",)), ((), ("x",)))]
    routes_are_best(t, fn, [fixed_move(t, *pair, shape=shape, slack=100) for pair in ends])


@route.check("little room")
def _(fn, t):
    ends = (("x", "y"),), (("y", "x"),)  # by way of the whole array, six blocks
    look = {"mesh": {"x": 2, "y": 3}, "shape": (6 * number(t, 3, 9),)}
    routes_are_best(t, fn, [fixed_move(t, *ends, slack=slack, **look) for slack in (6, 5)])
    routes_are_best(t, fn, moves_where(t, lambda case: search(case, room=10**12), slack=1))
    routes_are_best(t, fn, moves_where(t, in_half_the_room, slack=3))


@route.check("dimensions that can't be divided by every axis")
def _(fn, t):
    mesh = {"x": 4, "y": 3}
    shape = (12, 2 * number(t, 1, 3))  # the second can't be split four or three ways
    ends = [((("x", "y"), ()), (("y", "x"), ())), ((("x",), ()), (("y",), ()))]
    routes_are_best(t, fn, [fixed_move(t, *pair, mesh=mesh, shape=shape) for pair in ends])


@route.check("no way at all")
def _(fn, t):
    case = fixed_move(t, (("x",),), (("y",),), mesh={"x": 3, "y": 3}, shape=(9,), slack=1)
    t.equal(fn(*case.values()), None, why=f"{described(case)} with room for no other block")


@route.check("four axes")
def _(fn, t):
    routes_are_best(t, fn, [draw_move(t, axes="xyzw", dims=3, slack=3)])


def in_half_the_room(case):
    """The cheapest way in half of `room`, or in all of it if there is none."""
    return search(case, room=case["room"] // 2) or search(case)


def fewest_moves(case):
    """(bytes, layouts) of a way with the fewest moves."""
    found = search(case, price=lambda *move: 1)
    return None if found is None else (cost_of(case, found[1]), found[1])


def by_largest_move(case):
    """A way whose most expensive move is as cheap as possible, found likewise."""
    queue, done = [(0, 0, case["source"], [])], set()
    while queue:
        worst, steps, layout, way = heapq.heappop(queue)
        if layout == case["target"]:
            return cost_of(case, way), way
        if layout in done:
            continue
        done.add(layout)
        for kind, n, new in moves_from(case, layout):
            size = block_of(case, new)
            if size is not None and size <= case["room"]:
                dear = max(worst, price(kind, n, block_of(case, layout)))
                heapq.heappush(queue, (dear, steps + 1, new, [*way, new]))
    return None


def as_case(*args):
    names = ("shape", "itemsize", "mesh", "source", "target", "room")
    return dict(zip(names, args, strict=True))


@route.mutant(
    "You gather the whole array and cut it again. That always works where there's room, and receives the most bytes."
)
def gathers_all(*args):
    case = as_case(*args)
    here, way = case["source"], []
    if here == case["target"]:
        return 0, []
    for i in range(len(here)):
        while here[i]:
            here = put_axes(here, i, here[i][:-1])
            way.append(here)
    for i, axes in enumerate(case["target"]):
        for axis in axes:
            here = put_axes(here, i, (*here[i], axis))
            way.append(here)
    cost, here = 0, case["source"]
    for new in way:
        if sum(map(len, new)) < sum(map(len, here)):
            (axis,) = set(sum(here, ())) - set(sum(new, ()))
            cost += (case["mesh"][axis] - 1) * block_of(case, here)
        here = new
    return cost, way


@route.mutant(
    "You look for the fewest moves. A way with more of them can receive fewer bytes: a cut is free, and makes every "
    "later block smaller."
)
def counts_moves(*args):
    return fewest_moves(as_case(*args))


@route.mutant(
    "You never use an all-to-all. Where an axis goes from one dimension to another, it receives less than a gather."
)
def no_all_to_all(*args):
    return search(as_case(*args), swaps=False)


@route.mutant(
    "You never cut before the end, or not at all. An axis that splits nothing may be added at any time, at no cost."
)
def no_cuts(*args):
    return search(as_case(*args), cuts=False)


@route.mutant(
    "You take any axis off a tuple. A device's part is contiguous only if the last axis, the minor one, goes first."
)
def any_axis_comes_off(*args):
    return search(as_case(*args), any_axis=True)


@route.mutant(
    "You count a whole block for an all-to-all. A device keeps 1/n of its block, the part meant for itself."
)
def whole_block_exchanged(*args):
    return search(as_case(*args), price=lambda k, n, b: b if k == "all-to-all" else price(k, n, b))


@route.mutant(
    "You count n blocks for an all-gather. A device has one of them already and receives the other n - 1."
)
def own_block_counted(*args):
    return search(
        as_case(*args), price=lambda k, n, b: n * b if k == "all-gather" else price(k, n, b)
    )


@route.mutant(
    "You count one block for an all-gather. A device receives one from each of the n - 1 others."
)
def one_block_gathered(*args):
    return search(as_case(*args), price=lambda k, n, b: b if k == "all-gather" else price(k, n, b))


@route.mutant(
    "You count with the block that the source layout has, in every move. A gather makes the block larger, and "
    "a cut smaller."
)
def first_block(*args):
    return search(as_case(*args), at_start=True)


@route.mutant(
    "You charge for a cut. Each device drops what it no longer needs, and receives nothing."
)
def cuts_cost(*args):
    return search(as_case(*args), price=lambda k, n, b: b // n if k == "cut" else price(k, n, b))


@route.mutant("You ignore `room`. A block on the way may not take more, either.")
def no_limit(*args):
    return search(as_case(*args), room=10**18)


@route.mutant("You avoid large blocks where you can. The cheapest way may need all of `room`.")
def half_the_room(*args):
    return in_half_the_room(as_case(*args))


@route.mutant(
    "You forbid every block that's larger than those at both ends. It may be larger, up to `room`."
)
def ends_limit(*args):
    case = as_case(*args)
    ends = [block_of(case, case["source"]), block_of(case, case["target"])]
    return search(case, room=min(case["room"], max(ends)))


@route.mutant(
    "You allow layouts that don't divide the array. Each dimension must be divisible by the product of its "
    "axes' sizes."
)
def divides_anything(*args):
    return search(as_case(*args), divides=False)


@route.mutant("You minimise the most expensive single move. Minimise the sum over all moves.")
def largest_move(*args):
    return by_largest_move(as_case(*args))


@route.mutant(
    "Your way begins with the source layout. The list holds the layouts after each move, so it's empty if "
    "there is none."
)
def source_included(*args):
    case = as_case(*args)
    found = search(case)
    return None if found is None else (found[0], [case["source"], *found[1]])


@route.mutant(
    "Your search follows the cheapest move from each layout, and never goes back to another branch. Keep all layouts "
    "that were reached, and go on from the cheapest of them."
)
def greedy(*args):
    case = as_case(*args)
    here, cost, way, seen = case["source"], 0, [], {case["source"]}
    while here != case["target"]:
        best = None
        for kind, n, new in moves_from(case, here):
            size = block_of(case, new)
            if new in seen or size is None or size > case["room"]:
                continue
            dear = price(kind, n, block_of(case, here))
            agree = sum(a == b for a, b in zip(new, case["target"], strict=True))
            if best is None or (-agree, dear) < best[:2]:
                best = (-agree, dear, new)
        if best is None:
            return None
        cost, here = cost + best[1], best[2]
        seen.add(here)
        way.append(here)
    return cost, way


@route.mutant("If there is no way you return an infinite number of bytes. Return None.")
def infinite(*args):
    found = search(as_case(*args))
    return (math.inf, []) if found is None else found


@route.mutant(
    "You close a layout when you first reach it. A cheaper way to it may be found later: close it when it's the "
    "cheapest of all that are open."
)
def first_way(*args):
    return search(as_case(*args), first=True)


@route.mutant(
    "You divide with `/`, which gives a float. It has 53 bits, and a large model's bytes need more: use `//`."
)
def in_floats(*args):
    def inexact(kind, n, b):
        return {"cut": 0, "all-gather": (n - 1) * b, "all-to-all": b * (n - 1) / n}[kind]

    return search(as_case(*args), price=inexact)


@route.mutant(
    "You convert to an int at the end, but count in floats on the way. They have 53 bits, and a large model's bytes "
    "need more: use `//`."
)
def rounded_at_the_end(*args):
    def inexact(kind, n, b):
        return {"cut": 0, "all-gather": (1 - 1 / n) * b * n, "all-to-all": b * (1 - 1 / n)}[kind]

    found = search(as_case(*args), price=inexact)
    return None if found is None else (round(found[0]), found[1])
