import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.book.grading import Exercise
from minitext.compiler import hlo

TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def sizes(t, count, low, high):
    return (int(n) for n in t.rng.integers(low, high, count))


def noted(trips):
    """How XLA writes a trip count behind a `while`."""
    return f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'


def kernels(text):
    """(bytes read, bytes written) of every kernel of the entry computation."""
    computations, entry = hlo.computations(text)
    size = {i.name: i.bytes for i in computations[entry]}
    return [
        (sum(size[operand] for operand in set(i.operands)), i.bytes)
        for i in computations[entry]
        if i.opcode not in hlo.FREE
    ]


# -------------------------------------------------------------------------------- count_bytes

count_bytes = Exercise(
    "02.count_bytes",
    title="Count the bytes of a compiled program",
    function="bytes_moved",
    minutes=25,
    points=10,
    forbid=("minitext.compiler.hlo.Module",),
    statement="""
Write `bytes_moved(text)`, which reads the text of a compiled program and returns how many bytes one
run reads and writes. `hlo.computations(text)` parses the text for you. It returns a dictionary from
each computation's name to its instructions, and the entry's name. An instruction has `name`,
`opcode`, `bytes` (of its result), `operands` (names) and `line` (the text after its equals sign). A
`call` runs another computation once, and a `while` runs its body again and again (section 4). The
text may contain both.

- Begin at the entry. An instruction whose opcode is in `hlo.FREE` moves nothing. Any other is a
  kernel: it reads each of its operands once and in full, and writes its result. An operand that is
  named twice is still one array.
- A `fusion` is one kernel. The instructions inside it move nothing.
- A `call` moves nothing itself. The computation named after `to_apply=%` does.
- A `while` moves nothing itself. The computation named after `body=%` does, as often as the line
  says in `"known_trip_count":{"n":"12"}`, or once if it has no such note. The condition doesn't
  count. Loops can be nested.
- Return exact Python integers, `(read, written)`.
""",
    hints=(
        "Which computations in the text does the entry run, and how often? Which are there "
        "only because a fusion or a reduction uses them?",
        "Write an inner function `count(name)` that returns the bytes of one run of one computation. It "
        "calls itself for a `call` and, multiplied, for a `while`.",
        "Inside it, `size = {i.name: i.bytes for i in instructions}`; a kernel reads "
        "`sum(size[o] for o in set(i.operands))`. The names and the trip counts are in "
        '`i.line`: `re.search(r"\\bbody=%([\\w.\\-]+)", i.line)[1]`.',
    ),
)

LOOPS = """\
HloModule by_hand, is_scheduled=true

%scaled (p0: f32[{M},{N}], p1: f32[{M},{N}]) -> f32[{M},{N}] {{
  %p0 = f32[{M},{N}]{{1,0}} parameter(0)
  %p1 = f32[{M},{N}]{{1,0}} parameter(1)
  %e = f32[{M},{N}]{{1,0}} exponential(%p0)
  ROOT %m = f32[{M},{N}]{{1,0}} multiply(%e, %p1)
}}

%called (q: f32[{M},{N}]) -> f32[{M},{N}] {{
  %q = f32[{M},{N}]{{1,0}} parameter(0)
  %neg = f32[{M},{N}]{{1,0}} negate(%q)
  ROOT %abs = f32[{M},{N}]{{1,0}} abs(%neg)
}}

%inner_body (c: (s32[], f32[{M},{N}])) -> (s32[], f32[{M},{N}]) {{
  %c = (s32[], f32[{M},{N}]{{1,0}}) parameter(0)
  %ci = s32[] get-tuple-element(%c), index=0
  %cx = f32[{M},{N}]{{1,0}} get-tuple-element(%c), index=1
  %cy = f32[{M},{N}]{{1,0}} fusion(%cx, %cx), kind=kLoop, calls=%scaled
  ROOT %ct = (s32[], f32[{M},{N}]{{1,0}}) tuple(%ci, %cy)
}}

%inner_condition (d: (s32[], f32[{M},{N}])) -> pred[] {{
  %d = (s32[], f32[{M},{N}]{{1,0}}) parameter(0)
  %di = s32[] get-tuple-element(%d), index=0
  %bound = s32[] constant({inner})
  ROOT %less = pred[] compare(%di, %bound), direction=LT
}}

%outer_body (f: (s32[], f32[{M},{N}])) -> (s32[], f32[{M},{N}]) {{
  %f = (s32[], f32[{M},{N}]{{1,0}}) parameter(0)
  %fx = f32[{M},{N}]{{1,0}} get-tuple-element(%f), index=1
  %fc = f32[{M},{N}]{{1,0}} call(%fx), to_apply=%called
  %fi = s32[] get-tuple-element(%f), index=0
  %ft = (s32[], f32[{M},{N}]{{1,0}}) tuple(%fi, %fc)
  ROOT %fw = (s32[], f32[{M},{N}]{{1,0}}) while(%ft), condition=%inner_condition, body=%inner_body{inner_note}
}}

%outer_condition (g: (s32[], f32[{M},{N}])) -> pred[] {{
  %g = (s32[], f32[{M},{N}]{{1,0}}) parameter(0)
  %gi = s32[] get-tuple-element(%g), index=0
  %gbound = s32[] constant({outer})
  ROOT %gless = pred[] compare(%gi, %gbound), direction=LT
}}

ENTRY %main (x: f32[{M},{N}]) -> f32[{M},{N}] {{
  %x = f32[{M},{N}]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[{M},{N}]{{1,0}}) tuple(%zero, %x)
  %loop = (s32[], f32[{M},{N}]{{1,0}}) while(%start), condition=%outer_condition, body=%outer_body, \
backend_config={{"known_trip_count":{{"n":"{outer}"}}}}
  ROOT %out = f32[{M},{N}]{{1,0}} get-tuple-element(%loop), index=1
}}
"""


def right_bytes(
    text,
    *,
    once=set,
    loops=int,
    loop_itself=False,
    free=hlo.FREE,
    calls=True,
    also=(),
):
    """The bytes, or wrong ones: `loops` makes a number of trips of the digits in a note."""
    computations, entry = hlo.computations(text)

    def count(name):
        size = {i.name: i.bytes for i in computations[name]}
        read = written = 0
        for i in computations[name]:
            if i.opcode == "while" or (i.opcode == "call" and calls):
                role = "body" if i.opcode == "while" else "to_apply"
                inner = count(re.search(rf"\b{role}=%([\w.\-]+)", i.line)[1])
                found = TRIPS.search(i.line)
                runs = loops(found[1]) if found else 1
                read, written = read + runs * inner[0], written + runs * inner[1]
                if loop_itself and i.opcode == "while":
                    read, written = read + i.bytes, written + i.bytes
            elif i.opcode not in free:
                read += sum(size[operand] for operand in once(i.operands))
                written += i.bytes
            for other in re.findall(rf"\b(?:{'|'.join(also)})=%([\w.\-]+)", i.line) if also else ():
                inner = count(other)
                read, written = read + inner[0], written + inner[1]
        return read, written

    return count(entry)


def bytes_by_mistake(text):
    """What wrong counts give, with what to say."""
    wrong = {
        "you count the instructions inside a fusion as well": right_bytes(text, also=["calls"]),
        "you count a loop's condition as well": right_bytes(text, also=["condition"]),
        "you count each loop one trip short": right_bytes(text, loops=lambda n: int(n) - 1),
        "you read only the first digit of a loop's trips": right_bytes(
            text, loops=lambda n: int(n[0])
        ),
        "you count a loop's body once": right_bytes(text, loops=lambda n: 1),
    }
    return {text: list(moved) for text, moved in wrong.items()}


def counts_bytes(t, fn, text, why):
    got = fn(text)
    t.equal(len(got), 2, why="how many numbers are returned")
    t.equal([int(n) for n in got], list(right_bytes(text)),
            why=f"bytes read and written by {why}", mistakes=bytes_by_mistake(text))  # fmt: skip
    t.equal([type(n).__name__ for n in got], ["int", "int"], why="the types of the two numbers")


def gated(a, b):
    return a * (1 / (1 + jnp.exp(-a))) * b


@count_bytes.check("one fusion")
def _(fn, t):
    M, F = sizes(t, 2, 40, 400)
    counts_bytes(t, fn, t.hlo(gated, spec(M, F), spec(M, F)), f"a gate of [{M}, {F}]")


@count_bytes.check("several kernels and a value that is also returned")
def _(fn, t):
    M, D, F = sizes(t, 3, 20, 90)

    def two(x, w):
        h = x @ w
        return jnp.tanh(h), h

    counts_bytes(t, fn, t.hlo(two, spec(M, D), spec(D, F)), f"a product of [{M}, {D}]")


@count_bytes.check("by hand: an operand that is named twice, and a call")
def _(fn, t):
    M, N = sizes(t, 2, 3, 90)
    text = LOOPS.format(M=M, N=N, inner=1, outer=1, inner_note="")
    counts_bytes(t, fn, text, f"loops that run once, over [{M}, {N}]")


@count_bytes.check("a compiled scan")
def _(fn, t):
    B, D, L = sizes(t, 3, 5, 40)
    stack = lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]  # noqa: E731
    text = t.hlo(stack, spec(B, D), spec(L, D, D))
    counts_bytes(t, fn, text, f"a scan of {L} layers")


@count_bytes.check("by hand: a loop in a loop")
def _(fn, t):
    M, N, inner, outer = sizes(t, 4, 3, 60)
    note = noted(inner)
    text = LOOPS.format(M=M, N=N, inner=inner, outer=outer, inner_note=note)
    counts_bytes(t, fn, text, f"{outer} times {inner} trips over [{M}, {N}]")


@count_bytes.mutant(
    "You count every line of the text. But values inside a fusion's computation never go to "
    "memory: follow only the entry, loops and calls."
)
def every_line(text):
    computations, _ = hlo.computations(text)
    read = written = 0
    for instructions in computations.values():
        size = {i.name: i.bytes for i in instructions}
        for i in instructions:
            if i.opcode not in hlo.FREE:
                read += sum(size.get(operand, 0) for operand in set(i.operands))
                written += i.bytes
    return read, written


@count_bytes.mutant(
    "You count an operand as often as it is named. `fusion(%x, %x)` reads one array: take the set of the "
    "operands' names."
)
def named_twice(text):
    return right_bytes(text, once=tuple)


@count_bytes.mutant(
    "You count a loop's body once. The line of the `while` says how many trips it makes."
)
def body_once(text):
    return right_bytes(text, loops=lambda n: 1)


@count_bytes.mutant(
    "You count tuples, parameters or get-tuple-elements as kernels. They give names to memory and move "
    "nothing: they are in `hlo.FREE`."
)
def nothing_is_free(text):
    return right_bytes(text, free=set())


@count_bytes.mutant(
    "You count the `while` itself, as if it read and wrote its tuple. Only the kernels in its body do."
)
def loop_as_kernel(text):
    return right_bytes(text, loop_itself=True)


@count_bytes.mutant("You return the written bytes first. The order is (read, written).")
def written_first(text):
    return right_bytes(text)[::-1]


@count_bytes.mutant(
    "A `call` is not a kernel: count the computation after `to_apply=%`. It may have several kernels."
)
def call_as_kernel(text):
    return right_bytes(text, calls=False)


@count_bytes.mutant(
    "You pass over each `call`. It moves nothing itself, but the computation after `to_apply=%` runs, and "
    "its kernels count."
)
def call_is_free(text):
    return right_bytes(text, calls=False, free=hlo.FREE | {"call"})


@count_bytes.mutant(
    "You count only the entry's own kernels, and stop at a `while` or a `call`. Their computations run "
    "too."
)
def entry_only(text):
    moved = [
        (r, w)
        for (r, w), i in zip(kernels(text), _busy(text), strict=True)
        if i.opcode not in ("while", "call")
    ]
    return sum(r for r, _ in moved), sum(w for _, w in moved)


def _busy(text):
    computations, entry = hlo.computations(text)
    return [i for i in computations[entry] if i.opcode not in hlo.FREE]


# ----------------------------------------------------------------------------- restore_fusion

restore_fusion = Exercise(
    "02.restore_fusion",
    title="Restore a broken fusion",
    function="make_one_pass",
    minutes=15,
    points=10,
    statement="""
Someone has been debugging this function for a week, and it has got slower each day:

```python
gate = jax.jit(lambda a_XF: a_XF / (1 + jnp.exp(-a_XF)))


def broken(a_XF, b_XF, scale_F, limit):
    gate_XF = gate(a_XF)
    h_XF = gate_XF * b_XF
    jax.debug.callback(watch, h_XF[0, 0])
    y_XF = h_XF @ jnp.diag(scale_F)
    return jnp.clip(y_XF, -limit, limit), h_XF
```

`watch` printed its argument. Its output is no longer needed, nor is the second result. Write
`make_one_pass(limit)`. It returns a function `fn(a_XF, b_XF, scale_F)` that returns only the first
result, the clipped `y_XF`.

- Calling `fn` runs **one program**: it is jitted as a whole.
- The compiled program is **one kernel**: it reads `a_XF`, `b_XF` and `scale_F` once, and writes the
  result once. For `X` rows of `F` numbers in float32 that is $4(3XF + F)$ bytes.
- The results equal those of `broken`, up to rounding, for every shape.

All arrays are float32, and finite.
""",
    hints=(
        "Go through `broken` line by line. For each intermediate array, ask what needs it "
        "apart from the next operation.",
        "Four things keep it from being one pass: a jit that ends too early, a callback, a result that is "
        "returned, and a product. A product with a diagonal matrix multiplies column j by one number.",
        "`h_XF * scale_F` is `h_XF @ jnp.diag(scale_F)`. Put all of it into one inner function under "
        "`@jax.jit`, return the clipped array alone, and return that function.",
    ),
)


def normal(t, *shape, scale=1.0):
    return jnp.asarray(scale * t.rng.normal(size=shape), jnp.float32)


def right_pass(a, b, scale, limit):
    a, b, scale = (np.asarray(x, np.float64) for x in (a, b, scale))
    with np.errstate(over="ignore"):
        return np.clip(a / (1 + np.exp(-a)) * b * scale, -limit, limit)


@restore_fusion.check("the first result, and only that")
def _(fn, t):
    X, F = sizes(t, 2, 5, 60)
    limit = float(t.rng.uniform(0.3, 2.0))
    a, b, scale = normal(t, X, F, scale=2), normal(t, X, F), normal(t, F)
    got = fn(limit)(a, b, scale)
    t.true(isinstance(got, jax.Array), why="one array is wanted, not a tuple", observed=0)
    want = right_pass(a, b, scale, limit)
    t.close(got, want, rtol=1e-4, atol=1e-5, dtype=np.float32, why=f"[{X}, {F}], limit {limit:.2f}")
    a, b = normal(t, F, F, scale=2), normal(t, F, F)
    want = right_pass(a, b, scale, limit)
    t.close(fn(limit)(a, b, scale), want, rtol=1e-4, atol=1e-5, why=f"as many rows as columns, {F}")


@restore_fusion.check("one row, one column, and activations of -90 and 90")
def _(fn, t):
    limit = float(t.rng.uniform(50.0, 60.0))
    a = jnp.asarray([[-90.0, 90.0, 0.0, -30.0]], jnp.float32)
    b, scale = normal(t, 1, 4), normal(t, 4)
    got = fn(limit)(a, b, scale)
    t.close(got, right_pass(a, b, scale, limit), rtol=1e-4, atol=1e-5, why="one row")
    a, b, scale = normal(t, 7, 1), normal(t, 7, 1), normal(t, 1)
    t.close(fn(limit)(a, b, scale), right_pass(a, b, scale, limit), rtol=1e-4, why="one column")


@restore_fusion.check("one program")
def _(fn, t):
    X, F = sizes(t, 2, 30, 60)
    jaxpr = jax.make_jaxpr(fn(1.0))(spec(X, F), spec(X, F), spec(F)).jaxpr
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    t.true(
        names == ["jit"],
        why=f"a call starts {len(names)} programs: {', '.join(names)[:80]}. Jit the whole function",
        observed=len(names),
    )
    t.equal(len(jaxpr.eqns[0].outvars), 1, why="arrays that the program returns, so writes")


@restore_fusion.check("only elementwise operations")
def _(fn, t):
    X, F = sizes(t, 2, 30, 60)
    found = t.primitives(fn(1.0), spec(X, F), spec(X, F), spec(F))
    callbacks = ("debug_callback", "pure_callback", "io_callback")
    breaks = ("dot_general", *callbacks, "optimization_barrier")
    left = [name for name in breaks if name in found]
    t.true(
        not left,
        why=f"your function still has what ends a fusion: {', '.join(left)}",
        observed=[name in left for name in breaks],
    )


@restore_fusion.check("one kernel, and no more bytes than needed")
def _(fn, t):
    X, F = 8 * int(t.rng.integers(40, 80)), 8 * int(t.rng.integers(10, 30))
    moved = kernels(t.hlo(fn(1.0), spec(X, F), spec(X, F), spec(F)))
    total, least = sum(map(sum, moved)), 4 * (3 * X * F + F)
    t.true(
        len(moved) == 1,
        why=f"{len(moved)} kernels, which move {total:,} bytes where {least:,} are enough",
        observed=len(moved),
    )
    t.equal(total, least, why="bytes read and written")


def gate_of(a):
    return a / (1 + jnp.exp(-a))


@restore_fusion.mutant(
    "You left the gate as a program of its own. Its result is written to memory, and the next "
    "program has to read it: put everything under one jit."
)
def two_programs(limit):
    gate = jax.jit(gate_of)
    rest = jax.jit(lambda g, b, scale: jnp.clip(g * b * scale, -limit, limit))
    return lambda a, b, scale: rest(gate(a), b, scale)


@restore_fusion.mutant(
    "You did not jit the function. Each operation is a program, and each result goes to memory."
)
def no_jit(limit):
    return lambda a, b, scale: jnp.clip(a / (1 + jnp.exp(-a)) * b * scale, -limit, limit)


@restore_fusion.mutant(
    "You kept the callback. It needs h as an array in memory, so the fusion ends there."
)
def still_watched(limit):
    @jax.jit
    def fn(a, b, scale):
        h = gate_of(a) * b
        jax.debug.callback(lambda x: None, h[0, 0])
        return jnp.clip(h * scale, -limit, limit)

    return fn


@restore_fusion.mutant(
    "You kept the product with the diagonal matrix. A matrix product reads its whole operand from memory, "
    "so h is written. Multiply by `scale_F` instead."
)
def still_a_product(limit):
    fn = lambda a, b, s: jnp.clip((gate_of(a) * b) @ jnp.diag(s), -limit, limit)  # noqa: E731
    return jax.jit(fn)


@restore_fusion.mutant(
    "You return h as well, and every result has to be written. Return only `y_XF`."
)
def still_returned(limit):
    fn = lambda a, b, s: (jnp.clip(gate_of(a) * b * s, -limit, limit), gate_of(a) * b)  # noqa: E731
    return jax.jit(fn)


@restore_fusion.mutant(
    "Your program returns h as well, and you drop it after the call. By then it has been written: "
    "the jitted function itself must return only `y_XF`."
)
def dropped_too_late(limit):
    fn = jax.jit(lambda a, b, s: (jnp.clip(gate_of(a) * b * s, -limit, limit), gate_of(a) * b))
    return lambda a, b, s: fn(a, b, s)[0]


@restore_fusion.mutant(
    "You put a barrier between two operations. It forbids the compiler to fuse across it, so on an "
    "accelerator `h_XF` is written to memory."
)
def keeps_a_barrier(limit):
    def fn(a, b, s):
        h = jax.lax.optimization_barrier(gate_of(a) * b)
        return jnp.clip(h * s, -limit, limit)

    return jax.jit(fn)


@restore_fusion.mutant("You clip only from above. `jnp.clip(y, -limit, limit)` has two sides.")
def clips_one_side(limit):
    return jax.jit(lambda a, b, s: jnp.minimum(gate_of(a) * b * s, limit))


@restore_fusion.mutant(
    "You clip before you scale. The limit is for the scaled array, so the order matters."
)
def clips_first(limit):
    return jax.jit(lambda a, b, s: jnp.clip(gate_of(a) * b, -limit, limit) * s)


@restore_fusion.mutant(
    "You multiply row i by `scale[i]`. `h @ jnp.diag(scale)` multiplies column j by `scale[j]`: "
    "`h_XF * scale_F`, without a new axis."
)
def scales_rows(limit):
    def fn(a, b, s):
        rows = jnp.resize(s, a.shape[0])[:, None]
        return jnp.clip(gate_of(a) * b * rows, -limit, limit)

    return jax.jit(fn)


@restore_fusion.mutant(
    "Your gate is the sigmoid alone. It is a / (1 + exp(-a)): a times its sigmoid."
)
def sigmoid_alone(limit):
    return jax.jit(lambda a, b, s: jnp.clip(b * s / (1 + jnp.exp(-a)), -limit, limit))


@restore_fusion.mutant("Your exponential has the wrong sign: the gate is a / (1 + exp(-a)).")
def exponential_turned_round(limit):
    return jax.jit(lambda a, b, s: jnp.clip(a / (1 + jnp.exp(a)) * b * s, -limit, limit))


@restore_fusion.mutant("You left `b_XF` out. The gate is multiplied by it.")
def without_b(limit):
    return jax.jit(lambda a, b, s: jnp.clip(gate_of(a) * s + 0 * b, -limit, limit))


@restore_fusion.mutant(
    "You gate b with a. It is a that goes through the gate, and b that is multiplied."
)
def gates_the_other(limit):
    return jax.jit(lambda a, b, s: jnp.clip(gate_of(b) * a * s, -limit, limit))


@restore_fusion.mutant("You never clip.")
def never_clips(limit):
    return jax.jit(lambda a, b, s: gate_of(a) * b * s)


@restore_fusion.mutant(
    "You never scale: the product with the diagonal matrix became nothing at all."
)
def never_scales(limit):
    return jax.jit(lambda a, b, s: jnp.clip(gate_of(a) * b + 0 * s, -limit, limit))


# ---------------------------------------------------------------------------- read_collective

read_collective = Exercise(
    "02.read_collective",
    title="Read the collectives of a program",
    function="bytes_sent",
    minutes=40,
    points=15,
    devices=8,
    forbid=("minitext.compiler.hlo.Module", "minitext.compiler.hlo.collectives"),
    statement="""
Write `bytes_sent(text)`. For each kind of collective in a compiled program, it returns how many
collectives one run executes, and how many bytes *one device* sends in all of them. Use
`hlo.computations(text)`; the kinds are in `hlo.COLLECTIVES`. An `all-gather` puts the parts of all
devices together and gives the whole to each. A `reduce-scatter` adds up the arrays of all devices,
and gives each device one part of the sum. In a `collective-permute` each device sends its array to
one other.

- With $n$ devices in a group, and $s$ the bytes of the **whole side** (the larger of the operand
  and the result), a device sends $s\\,(n-1)/n$; in an `all-reduce` twice that; in a
  `collective-permute` $s$.
- The text after `replica_groups=` says how large a group is. It has one of four forms:

  | text | groups | n |
  |---|---|---|
  | `{{0,1,2,3},{4,5,6,7}}` | two, written out | 4 |
  | `[4,2]<=[8]`, possibly followed by more | four of two | 2 |
  | `mesh['x'=2,'y'=4] {'y'}` | along the named axes of a mesh; there may be other text between `]` and `{` | 4 |
  | `{}`, or nothing | all devices in one: `num_partitions=` in the first line | that number |

  If there are several names in the braces, as in `{'x','y'}`, multiply their sizes.
- Count through loops as in `02.count_bytes`: a body runs `"known_trip_count":{"n":"12"}` times, or
  once if there is no note, and loops can be nested. There is no `call` here, and nothing
  asynchronous.
- A count is a Python int. Leave out kinds that don't occur.
""",
    hints=(
        "Start with the loops. Write an inner function `walk(name, runs)` that knows how "
        "often its computation is run. You can test it with a count alone, before you count "
        "bytes.",
        "The whole side of an all-gather is its result, and that of a reduce-scatter is its "
        "operand. `max(i.bytes, sum(size[o] for o in i.operands))` is right for every kind.",
        'For the mesh: `re.search(r"replica_groups=mesh\\[([^\\]]*)\\].*?\\{(\'[^}]*)\\}", line)`. '
        "Then `dict(re.findall(r\"'(\\w+)'=(\\d+)\", found[1]))` has the sizes, and "
        "`re.findall(r\"'(\\w+)'\", found[2])` the names of the axes.",
    ),
)

SENT = """\
HloModule by_hand, is_scheduled=true, num_partitions={devices}

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

%body (c: (s32[], f32[{N}])) -> (s32[], f32[{N}]) {{
  %c = (s32[], f32[{N}]{{0}}) parameter(0)
  %ci = s32[] get-tuple-element(%c), index=0
  %cx = f32[{N}]{{0}} get-tuple-element(%c), index=1
  %part = f32[{part}]{{0}} reduce-scatter(%cx), channel_id=1, replica_groups={groups}, dimensions={{0}}, to_apply=%add
  %whole = f32[{N}]{{0}} all-gather(%part), channel_id=2, replica_groups={groups}, dimensions={{0}}
  ROOT %ct = (s32[], f32[{N}]{{0}}) tuple(%ci, %whole)
}}

%condition (d: (s32[], f32[{N}])) -> pred[] {{
  %d = (s32[], f32[{N}]{{0}}) parameter(0)
  %di = s32[] get-tuple-element(%d), index=0
  %bound = s32[] constant({trips})
  ROOT %less = pred[] compare(%di, %bound), direction=LT
}}

ENTRY %main (a: f32[{N}]) -> f32[{N}] {{
  %a = f32[{N}]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %near = f32[{N}]{{0}} collective-permute(%a), channel_id=3, source_target_pairs={{{{0,1}},{{1,0}}}}
  %total = f32[{N}]{{0}} all-reduce(%near), channel_id=4, replica_groups={groups}, to_apply=%add
  %start = (s32[], f32[{N}]{{0}}) tuple(%zero, %total)
  %loop = (s32[], f32[{N}]{{0}}) while(%start), condition=%condition, body=%body{note}
  ROOT %out = f32[{N}]{{0}} get-tuple-element(%loop), index=1
}}
"""


NESTED = SENT.replace("body=%body{note}", "body=%outer_body{outer_note}").replace(
    "ENTRY",
    """\
%outer_body (f: (s32[], f32[{N}])) -> (s32[], f32[{N}]) {{
  %f = (s32[], f32[{N}]{{0}}) parameter(0)
  %fi = s32[] get-tuple-element(%f), index=0
  %fx = f32[{N}]{{0}} get-tuple-element(%f), index=1
  %fs = f32[{N}]{{0}} all-reduce(%fx), channel_id=5, replica_groups={groups}, to_apply=%add
  %ft = (s32[], f32[{N}]{{0}}) tuple(%fi, %fs)
  ROOT %fw = (s32[], f32[{N}]{{0}}) while(%ft), condition=%condition, body=%body{note}
}}

ENTRY""",
)

PERMUTED = """\
HloModule by_hand, is_scheduled=true, num_partitions={devices}

ENTRY %main (a: f32[{N}]) -> f32[{N}] {{
  %a = f32[{N}]{{0}} parameter(0)
  ROOT %near = f32[{N}]{{0}} collective-permute(%a), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}
}}
"""


def by_hand(t, groups, n, devices, trips=1, note=True, outer=0):
    N = n * int(t.rng.integers(3, 300))
    note = noted(trips) if note else ""
    fields = {"N": N, "part": N // n, "groups": groups, "devices": devices, "trips": trips}
    text = (NESTED if outer else SENT).format(**fields, note=note, outer_note=noted(outer))
    return text.replace(" replica_groups=nothing,", "").replace(", replica_groups=nothing", "")


def right_group(line, devices, mesh=True, number=1, axes_of=lambda sizes: sizes, everyone=None):
    """How many devices one group has; what is passed can make it wrong."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(counted[1 + number])
    if mesh and (axes := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{('[^}]*)\}", line)):
        size = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return int(np.prod(axes_of([int(size[name]) for name in re.findall(r"'(\w+)'", axes[2])])))
    return devices if everyone is None else everyone


def wrong_group(**changes):
    return lambda line, devices: right_group(line, devices, **changes)


def right_sent(
    text,
    *,
    group=right_group,
    loops=True,
    side=max,
    twice=2,
    rest=True,
    permuted=lambda n: 1.0,
    within=lambda runs, trips: runs * trips,
):
    computations, entry = hlo.computations(text)
    devices = int(re.search(r"\bnum_partitions=(\d+)", text)[1])
    sent = {}

    def walk(name, runs):
        size = {i.name: i.bytes for i in computations[name]}
        for i in computations[name]:
            if i.opcode == "while":
                found = TRIPS.search(i.line)
                inner = int(found[1]) if found and loops else 1
                inside = within(runs, inner) if name != entry else inner
                if inside:
                    walk(re.search(r"\bbody=%([\w.\-]+)", i.line)[1], inside)
            elif i.opcode in hlo.COLLECTIVES:
                moved = side(i.bytes, sum(size[operand] for operand in i.operands))
                if i.opcode == "collective-permute":
                    moved *= permuted(devices)
                else:
                    n = group(i.line, devices)
                    moved *= (n - 1) / n if rest else 1
                moved *= twice if i.opcode == "all-reduce" else 1
                count, total = sent.get(i.opcode, (0, 0.0))
                sent[i.opcode] = (count + runs, total + runs * moved)

    walk(entry, 1)
    return sent


def sends(t, fn, text, why):
    want, got = right_sent(text), fn(text)
    t.equal(sorted(got), sorted(want), why=f"the kinds of {why}")
    t.equal(
        [int(got[k][0]) for k in sorted(got)],
        [want[k][0] for k in sorted(want)],
        why=f"counts, {why}",
    )
    kinds = sorted({type(got[k][0]).__name__ for k in got})
    t.equal(kinds, ["int"], why="the types of the counts")
    sent = np.array([float(got[k][1]) for k in sorted(got)])
    right = np.array([want[k][1] for k in sorted(want)])
    t.close(sent, right, rtol=1e-9, why=f"bytes of {', '.join(sorted(want))}, {why}")


@read_collective.check("a collective-permute")
def _(fn, t):
    devices = int(t.rng.integers(3, 30))
    text = PERMUTED.format(N=int(t.rng.integers(3, 300)), devices=devices)
    sends(t, fn, text, f"between two of {devices} devices")


@read_collective.check("groups written out")
def _(fn, t):
    sends(t, fn, by_hand(t, "{{0,1,2,3},{4,5,6,7}}", 4, 8), "two groups of four")


@read_collective.check("groups in brackets")
def _(fn, t):
    sends(t, fn, by_hand(t, "[4,2]<=[8]", 2, 8), "four groups of two")
    sends(t, fn, by_hand(t, "[2,4]<=[4,2]T(1,0)", 4, 8), "two groups of four, across")


@read_collective.check("all devices")
def _(fn, t):
    devices = int(t.rng.integers(3, 30))
    sends(t, fn, by_hand(t, "{}", devices, devices), f"one group of {devices}")
    text = by_hand(t, "nothing", devices, devices)
    sends(t, fn, text, f"no replica_groups, {devices} devices")


@read_collective.check("groups along one axis of a mesh")
def _(fn, t):
    mesh = "mesh['axis_0'=1,'axis_1'=%d,'axis_2'=%d] {'axis_1'}"
    n, m = sizes(t, 2, 2, 9)
    sends(t, fn, by_hand(t, mesh % (n, m), n, n * m), f"{m} groups of {n}")


@read_collective.check("groups along two axes of a mesh")
def _(fn, t):
    n, m = sizes(t, 2, 2, 9)
    mesh = "mesh['x'=%d,'y'=%d,'z'=3], device_ids=([4,2]T(1,0)) {'x','y'}"
    sends(t, fn, by_hand(t, mesh % (n, m), n * m, 3 * n * m), f"three groups of {n * m}")


@read_collective.check("through a loop")
def _(fn, t):
    trips = int(t.rng.integers(3, 90))
    sends(t, fn, by_hand(t, "[2,4]<=[8]", 4, 8, trips), f"a loop of {trips} trips")
    sends(
        t, fn, by_hand(t, "[2,4]<=[8]", 4, 8, trips, note=False), "a loop whose trips nobody noted"
    )


@read_collective.check("through a loop within a loop")
def _(fn, t):
    trips, outer = sizes(t, 2, 3, 40)
    text = by_hand(t, "[2,4]<=[8]", 4, 8, trips, outer=outer)
    sends(t, fn, text, f"{outer} times {trips} trips")


@read_collective.check("a program for eight devices, compiled")
def _(fn, t):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    L, D = int(t.rng.integers(3, 9)), 64
    axis = ("a", "b")[int(t.rng.integers(2))]
    placed = lambda p, *s: jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p))  # noqa: E731

    def layers(x_BD, w_LDD):
        def layer(x_BD, w_DD):
            h_BD = jnp.einsum("bd,df->bf", x_BD, w_DD, out_sharding=P(None, None))
            return jax.sharding.reshard(jnp.tanh(h_BD), P(None, axis)), None

        return jax.lax.scan(layer, x_BD, w_LDD)[0]

    with jax.set_mesh(mesh):
        args = placed(P(None, axis), 32, D), placed(P(None, axis, None), L, D, D)
        text = jax.jit(layers).lower(*args).compile().as_text()
    t.true("all-reduce" in right_sent(text), why="this compiler makes no all-reduce of it")
    sends(t, fn, text, f"{L} layers over {axis!r} of a mesh of 4 by 2")


@read_collective.mutant(
    "You count all devices of the program as the group. `replica_groups` says who takes part."
)
def everyone(text):
    return right_sent(text, group=lambda line, devices: devices)


@read_collective.mutant(
    "You do not read groups that are axes of a mesh, and take all devices for them."
)
def no_mesh(text):
    return right_sent(text, group=wrong_group(mesh=False))


@read_collective.mutant(
    "In `[4,2]` the *second* number is the size of a group. The first counts groups."
)
def first_number(text):
    return right_sent(text, group=wrong_group(number=0))


@read_collective.mutant(
    "You take the first named axis alone. Multiply the sizes of *all* of them: `{'x','y'}` names two."
)
def first_axis(text):
    return right_sent(text, group=wrong_group(axes_of=lambda sizes: sizes[:1]))


@read_collective.mutant(
    "You take the last named axis alone. Multiply the sizes of *all* of them: `{'x','y'}` names two."
)
def last_axis(text):
    return right_sent(text, group=wrong_group(axes_of=lambda sizes: sizes[-1:]))


@read_collective.mutant(
    "An empty list is one group of all devices, and so is none at all: `num_partitions=` in the first "
    "line says how many they are."
)
def empty_is_alone(text):
    return right_sent(text, group=wrong_group(everyone=1))


@read_collective.mutant("A `collective-permute` sends all of s; there is no (n-1)/n.")
def permute_in_parts(text):
    return right_sent(text, permuted=lambda n: (n - 1) / n)


@read_collective.mutant(
    "You treat a `collective-permute`, which lists no groups, as a group of one. It sends all of s."
)
def permute_alone(text):
    return right_sent(text, permuted=lambda n: 0.0)


@read_collective.mutant("You count a loop's collectives once. They run once in every trip.")
def loop_once(text):
    return right_sent(text, loops=False)


@read_collective.mutant("A loop within a loop runs trips x trips times: pass the product on.")
def inner_trips_only(text):
    return right_sent(text, within=lambda runs, trips: trips)


@read_collective.mutant(
    "You count an inner loop's collectives as often as the outer loop runs. A loop within a loop runs "
    "trips x trips times: pass the product on."
)
def outer_trips_only(text):
    return right_sent(text, within=lambda runs, trips: runs)


@read_collective.mutant(
    "You look for loops only in the entry. Loops can be nested: let the function that walks "
    "through a computation call itself."
)
def no_inner_loop(text):
    return right_sent(text, within=lambda runs, trips: 0)


@read_collective.mutant(
    "You use the result's bytes for every kind. A reduce-scatter's result is one part: its whole side "
    "is the operand."
)
def result_only(text):
    return right_sent(text, side=lambda result, operands: result)


@read_collective.mutant(
    "You count an all-reduce once. Around a ring it is a reduce-scatter and then an all-gather, and each "
    "sends the same."
)
def one_way(text):
    return right_sent(text, twice=1)


@read_collective.mutant(
    "You forget the factor (n-1)/n: a device does not send its own part to itself."
)
def sends_to_itself(text):
    return right_sent(text, rest=False)


# ---------------------------------------------------------------------------------- roll_loop

roll_loop = Exercise(
    "02.roll_loop",
    title="One body for all layers",
    function="rolled",
    minutes=25,
    points=10,
    statement="""
The layers of this model alternate between tanh and relu, so its author wrote a Python loop:

```python
def unrolled(x_BD, w_LDD, b_LD):
    sizes = []
    for number, (w_DD, b_D) in enumerate(zip(w_LDD, b_LD)):
        h_BD = x_BD @ w_DD + b_D
        sizes.append(jnp.sqrt(jnp.mean(h_BD * h_BD)))
        x_BD = x_BD + (jax.nn.relu(h_BD) if number % 2 else jnp.tanh(h_BD))
    return x_BD, jnp.stack(sizes)
```

Write `rolled(x_BD, w_LDD, b_LD)` with the same results.

- The program has as many HLO instructions for 24 layers as for 8, and as many for 25 as for 9.
- Every layer still does one matrix product, so a run of 24 layers does 24 products.
- `L` may be odd. It may also be 1.
""",
    hints=(
        "A scan needs one body that is the same in every trip. Apart from the weights, how do"
        " the layers differ? Either the body makes that choice, or each trip does more than "
        "one layer.",
        "There are two ways. Give the body the layer's number as well, and let `jax.lax.cond`"
        " choose the activation. Or let a trip do two layers: reshape the weights from [L, "
        "...] to [L/2, 2, ...]; if L is odd, do the last layer after the scan.",
        "`jax.lax.scan(layer, x_BD, (jnp.arange(L), w_LDD, b_LD))`, and in it `jax.lax.cond(number % 2 == 1, "
        "jax.nn.relu, jnp.tanh, h_BD)`. In pairs: `w_LDD[: L - L % 2].reshape(-1, 2, D, D)`; the scan's "
        "second result is [L/2, 2], and `reshape(-1)` puts it in order.",
    ),
)


def draw_layers(t, L):
    B, D = sizes(t, 2, 3, 12)
    return normal(t, B, D), normal(t, L, D, D, scale=D**-0.5), normal(t, L, D)


def right_layers(x, w, b):
    x, w, b = (np.asarray(array, np.float64) for array in (x, w, b))
    found = []
    for number in range(len(w)):
        h = x @ w[number] + b[number]
        found.append(np.sqrt(np.mean(h * h)))
        x = x + (np.maximum(h, 0) if number % 2 else np.tanh(h))
    return x, np.array(found)


def layers_are(t, fn, L):
    args = draw_layers(t, L)
    got, want = fn(*args), right_layers(*args)
    t.equal(len(got), 2, why="how many values are returned")
    t.close(got[1], want[1], rtol=1e-3, atol=1e-4, why=f"the sizes of {L} layers", dtype=np.float32)
    t.close(
        got[0], want[0], rtol=1e-3, atol=1e-4, why=f"the result of {L} layers", dtype=np.float32
    )


@roll_loop.check("an even number of layers")
def _(fn, t):
    layers_are(t, fn, 2 * int(t.rng.integers(2, 6)))


@roll_loop.check("an odd number of layers")
def _(fn, t):
    layers_are(t, fn, 2 * int(t.rng.integers(2, 6)) + 1)


@roll_loop.check("one layer, and two")
def _(fn, t):
    layers_are(t, fn, 1)
    layers_are(t, fn, 2)


def instructions(t, fn, L):
    text = t.hlo(fn, spec(4, 16), spec(L, 16, 16), spec(L, 16))
    return sum(map(len, hlo.computations(text)[0].values()))


@roll_loop.check("a program that does not grow")
def _(fn, t):
    for few, many in ((8, 24), (9, 25)):
        small, large = instructions(t, fn, few), instructions(t, fn, many)
        why = f"{small} HLO instructions for {few} layers, {large} for {many}"
        t.true(small == large, why=why, observed=large / small)


def products(closed):
    total = 0
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        if eqn.primitive.name == "dot_general":
            total += 1
        elif eqn.primitive.name == "scan":
            total += eqn.params["length"] * products(eqn.params["jaxpr"])
        elif eqn.primitive.name == "cond":
            total += max(products(branch) for branch in eqn.params["branches"])
        elif "jaxpr" in eqn.params:
            total += products(eqn.params["jaxpr"])
    return total


@roll_loop.check("one product for each layer")
def _(fn, t):
    for L in (8, 9):
        found = products(jax.make_jaxpr(fn)(spec(4, 16), spec(L, 16, 16), spec(L, 16)))
        t.equal(found, L, why=f"matrix products that {L} layers run")


def one_layer(x, w, b, activation):
    h = x @ w + b
    return x + activation(h), jnp.sqrt(jnp.mean(h * h))


def scanned(layer):
    """The layers in one scan, with a layer of its own."""

    def rolled(x, w, b):
        def body(x, inputs):
            number, w, b = inputs
            act = lambda h: jax.lax.cond(number % 2 == 1, jax.nn.relu, jnp.tanh, h)  # noqa: E731
            return layer(x, w, b, act)

        return jax.lax.scan(body, x, (jnp.arange(len(w)), w, b))

    return rolled


def wrong_layer(name, hint, new_x=None, size=None):
    """A mutant whose layers are right but for the function that is passed."""

    def layer(x, w, b, act):
        h = x @ w + b
        y = x + act(h) if new_x is None else new_x(x, h, act)
        return y, jnp.sqrt(jnp.mean(h * h)) if size is None else size(x, h, act)

    fn = scanned(layer)
    fn.__name__ = name
    roll_loop.mutant(hint)(fn)


def paired(
    x,
    w,
    b,
    *,
    unroll=1,
    activations=(jnp.tanh, jax.nn.relu),
    tail=True,
    last_activation=0,
    order="C",
    whole=False,
):
    def body(x, weights):
        x, first = one_layer(x, weights[0][0], weights[1][0], activations[0])
        x, second = one_layer(x, weights[0][1], weights[1][1], activations[1])
        return x, jnp.stack([first, second])

    L, D = b.shape
    even = L if whole else L - L % 2
    pairs = w[:even].reshape(-1, 2, D, D), b[:even].reshape(-1, 2, D)
    x, found = jax.lax.scan(body, x, pairs, unroll=unroll)
    found = found.reshape(-1, order=order)
    if L % 2 and tail:
        x, last = one_layer(x, w[-1], b[-1], activations[last_activation])
        found = jnp.append(found, last)
    return x, found


@roll_loop.mutant(
    "The loop still runs while tracing, so every layer is in the program. Use `jax.lax.scan`."
)
def python_loop(x, w, b):
    found = []
    for number in range(len(w)):
        x, size = one_layer(x, w[number], b[number], (jnp.tanh, jax.nn.relu)[number % 2])
        found.append(size)
    return x, jnp.stack(found)


@roll_loop.mutant(
    "You use tanh in every layer. The layers alternate: choose by the layer's number, or let one trip of "
    "the scan do two of them."
)
def all_tanh(x, w, b):
    return paired(x, w, b, activations=(jnp.tanh, jnp.tanh))


@roll_loop.mutant("Your alternation begins with relu. Layer 0 has tanh.")
def relu_first(x, w, b):
    return paired(x, w, b, activations=(jax.nn.relu, jnp.tanh))


@roll_loop.mutant("An odd number of layers leaves one over. You drop it: do it after the scan.")
def drops_the_last(x, w, b):
    return paired(x, w, b, tail=False)


@roll_loop.mutant("A pair needs two layers. With an odd L one is left over: tanh, after the scan.")
def pairs_of_an_odd_number(x, w, b):
    return paired(x, w, b, whole=True)


@roll_loop.mutant(
    "The layer that an odd L leaves over has an even number, counted from 0: it takes tanh."
)
def relu_at_the_end(x, w, b):
    return paired(x, w, b, last_activation=1)


@roll_loop.mutant(
    "You put all the first sizes before all the second ones. `reshape(-1)` of [L/2, 2] keeps the layers' "
    "order; transposing it does not."
)
def sizes_out_of_order(x, w, b):
    return paired(x, w, b, order="F")


@roll_loop.mutant(
    "You compute both kinds of layer in each trip and pick one, so every layer does two products. Compute "
    "h once and choose the activation with `jax.lax.cond`, or let a trip do two layers."
)
def both_and_pick(x, w, b):
    def body(x, step):
        number, w, b = step
        tanh, size = one_layer(x, w, b, jnp.tanh)
        relu, _ = one_layer(x, w, b, jax.nn.relu)
        return jnp.where(number % 2 == 1, relu, tanh), size

    return jax.lax.scan(body, x, (jnp.arange(len(w)), w, b))


wrong_layer(
    "residual_forgotten",
    "A layer of yours replaces x. It adds its activation to x.",
    new_x=lambda x, h, act: act(h),
)
wrong_layer(
    "adds_before_the_activation",
    "You add x inside the activation. The activation takes h alone, and x is added afterwards.",
    new_x=lambda x, h, act: act(x + h),
)
wrong_layer(
    "adds_to_h",
    "You add the activation to h. It is added to x.",
    new_x=lambda x, h, act: h + act(h),
)
wrong_layer(
    "size_of_the_result",
    "Your sizes are those of the layers' results. The size is of h, before its activation.",
    size=lambda x, h, act: jnp.sqrt(jnp.mean((x + act(h)) ** 2)),
)
wrong_layer(
    "size_of_the_activation",
    "Your sizes are those of the activations. The size is of h, before its activation.",
    size=lambda x, h, act: jnp.sqrt(jnp.mean(act(h) ** 2)),
)
wrong_layer(
    "size_of_the_input",
    "Your sizes are those of x. The size is of h, the product plus the bias.",
    size=lambda x, h, act: jnp.sqrt(jnp.mean(x * x)),
)
wrong_layer(
    "size_without_root",
    "Your sizes are mean squares. Take the root.",
    size=lambda x, h, act: jnp.mean(h * h),
)
wrong_layer(
    "size_of_a_sum",
    "Your sizes are roots of sums. It is the root of the *mean* square.",
    size=lambda x, h, act: jnp.sqrt(jnp.sum(h * h)),
)


@roll_loop.mutant(
    "You return the sizes first. The last layer's result comes first, then the sizes."
)
def sizes_first(x, w, b):
    return scanned(one_layer)(x, w, b)[::-1]


@roll_loop.mutant("You return the last layer's size alone. All of them are asked for, [L].")
def last_size_alone(x, w, b):
    x, sizes = scanned(one_layer)(x, w, b)
    return x, sizes[-1]


@roll_loop.mutant("Your layers have no bias. h is x w + b.")
def no_bias(x, w, b):
    return scanned(one_layer)(x, w, 0 * b)
