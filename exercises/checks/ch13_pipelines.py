import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.book.grading import Exercise
from minitext.compiler import hlo

FORBIDDEN = tuple(f"minitext.sharding.pipeline{part}" for part in ("", "_schedule", "_stages"))

# -------------------------------------------------------------------------------------- gpipe

gpipe = Exercise(
    "13.gpipe",
    title="The tick loop",
    function="gpipe",
    minutes=35,
    points=15,
    devices=8,
    forbid=FORBIDDEN,
    statement="""
Write `gpipe(layer, w_LDD, x_MBD)`. It passes M microbatches through L layers that are cut into S stages, on a mesh
whose only axis is `stage`. The naive version above repeats its code in every tick, and its waiting stages compute
rubbish. Yours does neither:

- The ticks are one `jax.lax.scan`, so the program doesn't get longer with more microbatches.
- A stage that has nothing to do calls no layer: the layers are in a branch that it doesn't take. The check also uses a
  layer whose gradient at zero is not a number.
- It has a gradient, for w and for x. Autodiff makes the backward pass; you don't write one.
- In the forward pass the stages exchange only **one microbatch in each tick**, by collective permute, and at the end
  the result, in one collective.
- M may be 1, or smaller than S. The checks call `gpipe` inside `jax.jit` and `jax.set_mesh`.

A scan's carry must keep its type. The result of `ppermute` is *varying*: it differs between stages. Zeros aren't
varying until `jax.lax.pcast(zeros, "stage", to="varying")` declares them so.
""",
    hints=(
        "In tick t stage s works on microbatch t - s, if there is one. Where does its input come from if s "
        "is 0, and where if not?",
        "Carry the activations that arrived. In a tick: choose the input with `jnp.where`, compute in a "
        "`jax.lax.cond`, `ppermute` the result and return it also as the scan's output, which stacks it over ticks.",
        "The last stage finishes microbatch m in tick m + S - 1: `y = jnp.where(stage == S - 1, y_tBD[S - 1 :], "
        '0.0)`, then `jax.lax.psum(y, "stage")`.',
    ),
)


def stage_mesh(S):
    return jax.make_mesh(
        (S,), ("stage",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:S]
    )


def plain_layer(w_DD, x_BD):
    return x_BD + jnp.tanh(x_BD @ w_DD)


def dividing_layer(w_DD, x_BD):
    size = jnp.sqrt(jnp.sum(jnp.square(x_BD), axis=-1, keepdims=True))
    return (x_BD / size) @ w_DD + x_BD


@jax.custom_vjp
def counting_layer(w_DD, x_BD):
    """The plain layer, but each call adds 1 to the gradient of its weights, whatever becomes of its result."""
    return plain_layer(w_DD, x_BD)


def counting_forward(w_DD, x_BD):
    return plain_layer(w_DD, x_BD), w_DD


counting_layer.defvjp(counting_forward, lambda w_DD, g_BD: (0 * w_DD + 1, g_BD))


def right_stack(layer, w_LDD, x_MBD):
    def run(x_BD):
        for w_DD in w_LDD:
            x_BD = layer(w_DD, x_BD)
        return x_BD

    return jnp.stack([run(x_BD) for x_BD in x_MBD])


def draw_stack(t, S, M):
    """A mesh, arguments on it, and the same as NumPy arrays."""
    L, B, D = S * int(t.rng.integers(2, 4)), *(int(n) for n in t.rng.integers(3, 9, 2))
    mesh = stage_mesh(S)
    w, x = (t.rng.normal(size=s).astype(np.float32) for s in ((L, D, D), (M, B, D)))
    w /= D
    args = (
        jax.device_put(w, NamedSharding(mesh, P("stage"))),
        jax.device_put(x, NamedSharding(mesh, P())),
    )
    return mesh, args, (w, x)


def run_on(t, mesh, fn, *args):
    with jax.set_mesh(mesh):
        compiled = t.compiled(lambda *args: fn(*args), *args)
        return compiled, compiled(*args)


def wrong_microbatch(got, w_LDD, x_MBD, S):
    """Says what the first wrong microbatch holds instead."""
    after = [x_MBD]  # one layer, two layers, ...
    for w_DD in w_LDD:
        after.append(np.asarray(plain_layer(w_DD, after[-1])))
    close = lambda a, b: np.allclose(a, b, rtol=1e-4, atol=1e-4)  # noqa: E731
    wrong = [m for m, y in enumerate(after[-1]) if not close(got[m], y)]
    if not wrong:
        return ""
    m, L = wrong[0], len(w_LDD)
    other = [f"that of microbatch {o}" for o, y in enumerate(after[-1]) if close(got[m], y)]
    early = [
        f"microbatch {o} after {n} of {L} layers"
        for n, y_MBD in enumerate(after[:-1])
        for o, y in enumerate(y_MBD)
        if close(got[m], y)
    ]
    stages = np.split(np.asarray(w_LDD), S)
    alone = [
        f"microbatch {o} after stage {s} alone"
        for s, w_lDD in enumerate(stages)
        for o, y_BD in enumerate(right_stack(plain_layer, w_lDD, x_MBD))
        if close(got[m], y_BD)
    ]
    times = [f"{n} times what it should be" for n in (2, S) if close(got[m], n * after[-1][m])]
    zero = [] if got[m].any() else ["zeros"]
    found = (other + early + alone + times + zero)[:1]
    return f"Result {m} is {found[0]}" if found else f"The first wrong result is number {m}"


def stack_is_right(t, fn, S, M):
    mesh, args, plain = draw_stack(t, S, M)
    _, got = run_on(t, mesh, lambda w, x: fn(plain_layer, w, x), *args)
    why = f"{S} stages, {len(plain[0])} layers, M = {M}"
    if got.shape == plain[1].shape:
        why = ". ".join(filter(None, (why, wrong_microbatch(np.asarray(got), *plain, S))))
    t.close(got, right_stack(plain_layer, *plain), rtol=1e-4, atol=1e-4, why=why)
    t.equal(list(got.addressable_shards[0].data.shape), list(plain[1].shape), why="on one device")


@gpipe.check("values, four stages and six microbatches")
def _(fn, t):
    stack_is_right(t, fn, 4, 6)


@gpipe.check("one microbatch, eight stages")
def _(fn, t):
    stack_is_right(t, fn, 8, 1)


@gpipe.check("what the stages exchange")
def _(fn, t):
    S, M = 4, 5
    mesh, args, (_, x) = draw_stack(t, S, M)
    compiled, _ = run_on(t, mesh, lambda w, x: fn(plain_layer, w, x), *args)
    found = hlo.Module(compiled.as_text()).collectives()
    sends = [c for c in found if c.kind == "collective-permute"]
    others = [c for c in found if c.kind != "collective-permute"]
    small = all(c.bytes == x[0].nbytes for c in sends)
    few = M + S - 2 <= sum(c.runs for c in sends) <= M + S - 1
    listed = ", ".join(f"{c.runs} x {c.kind} of {c.bytes:,} bytes" for c in found) or "nothing"
    once = sum(c.runs for c in others) <= 1 and all(c.bytes <= x.nbytes for c in others)
    why = (
        f"the stages exchange {listed}; want {M + S - 1} collective permutes of one microbatch, "
        f"{x[0].nbytes} bytes, and one collective of the result, {x.nbytes} bytes"
    )
    t.true(small and few and once, why=why, observed=str(sorted((c.kind, c.runs) for c in found)))


@gpipe.check("the program is no longer for more microbatches")
def _(fn, t):
    def equations(M):
        mesh = stage_mesh(4)
        w = jax.device_put(np.zeros((4, 3, 3), np.float32), NamedSharding(mesh, P("stage")))
        x = jax.device_put(np.zeros((M, 2, 3), np.float32), NamedSharding(mesh, P()))
        with jax.set_mesh(mesh):
            names = t.primitives(lambda w, x: fn(plain_layer, w, x), w, x)
        return names.count("ppermute"), names.count("dot_general")

    few, many = equations(2), equations(9)
    why = f"(ppermutes, products) in the program: {few} for 2 microbatches, {many} for 9"
    t.true(few == many, why=why, observed=str((few, many)))


def outside_branches(jaxpr):
    """Names of the primitives that stand in no `cond`."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        held = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns"))
        for value in held if eqn.primitive.name != "cond" else []:
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from outside_branches(inner)


@gpipe.check("a waiting stage calls no layer")
def _(fn, t):
    mesh, args, _ = draw_stack(t, 4, 5)
    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(lambda w, x: fn(plain_layer, w, x))(*args)
    count = list(outside_branches(traced.jaxpr)).count("dot_general")
    why = f"{count} products of layers stand outside of every branch, and so run in every tick"
    t.true(count == 0, why=why, observed=min(count, 1))
    S, M = 4, int(t.rng.integers(3, 8))
    mesh, args, _ = draw_stack(t, S, M)
    calls = jax.grad(lambda w, x: jnp.sum(fn(counting_layer, w, x)))
    found = np.asarray(run_on(t, mesh, calls, *args)[1])[:, 0, 0].tolist()
    firsts = [found[s * len(found) // S] for s in range(S)]
    why = f"calls of a layer by stages 0 to {S - 1} in one pass: {firsts}; want {M}, one for each microbatch"
    t.equal(found, len(found) * [float(M)], why=why)


@gpipe.check("gradients, of a layer that must not see zeros")
def _(fn, t):
    layer = dividing_layer
    mesh, args, plain = draw_stack(t, 4, 5)
    weight = t.rng.normal(size=plain[1].shape).astype(np.float32)

    def total(stack):
        return jax.grad(lambda w, x: jnp.sum(stack(layer, w, x) * weight), argnums=(0, 1))

    got = run_on(t, mesh, total(fn), *args)[1]
    want = jax.jit(total(right_stack))(*plain)
    for name, g, w in zip("wx", got, want, strict=True):
        scale = float(np.abs(w).max())
        why = f"the gradient of {name}, with a layer that divides by its input's size"
        if np.isnan(np.asarray(g)).any():
            why += ", which a stage has called on zeros while it had nothing to do"
        t.close(g, w, rtol=1e-3, atol=1e-4 * scale, why=why)


def pipeline_with(
    first=None, step=1, send=None, always=False, mask=True, unrolled=False, early=0, ahead=0, every=False,
    order=slice(None), on_data=False, busy=None,
):  # fmt: skip
    """The tick loop, with one mistake."""

    def fn(layer, w_LDD, x_MBD):
        def on_each_stage(w_lDD, x_MBD):
            stage, S, M = jax.lax.axis_index("stage"), jax.lax.axis_size("stage"), len(x_MBD)
            ring = [(s, (s + step) % S) for s in range(S)]

            def stack(x_BD):
                for w_DD in w_lDD[order]:
                    x_BD = layer(w_DD, x_BD)
                return x_BD

            def tick(arrived, t):
                x_BD = jnp.where(stage == 0, x_MBD[jnp.clip(t + ahead, 0, M - 1)], arrived)
                working = (t >= stage) & (t < stage + M - early)
                working = busy(t, stage, M) if busy else working
                if on_data:
                    x_BD = jnp.where(working, x_BD, x_MBD[0])
                y_BD = stack(x_BD) if always else jax.lax.cond(working, stack, lambda x: x, x_BD)
                if send:
                    return send(y_BD, stage, S), y_BD
                done = y_BD
                if every:
                    done = jax.lax.psum(jnp.where(stage == S - 1, y_BD, 0.0), "stage")
                return jax.lax.ppermute(y_BD, "stage", ring), done

            ticks, carry = M + S - 1, jnp.zeros_like(x_MBD[0])
            if unrolled:
                ys = []
                for t in range(ticks):
                    carry, y = tick(carry, t)
                    ys.append(y)
                y_tBD = jnp.stack(ys)
            else:
                y_tBD = jax.lax.scan(tick, carry, jnp.arange(ticks))[1]
            y_MBD = y_tBD[S - 1 :] if first is None else y_tBD[first : first + M]
            if every:
                return y_MBD
            return jax.lax.psum(jnp.where(stage == S - 1, y_MBD, 0.0) if mask else y_MBD, "stage")

        return jax.shard_map(
            on_each_stage, in_specs=(P("stage"), P()), out_specs=P(), check_vma=False
        )(w_LDD, x_MBD)

    return fn


@gpipe.mutant(
    "You add the outputs of all stages. Only the last stage's are results: replace the others by zeros before "
    "the `psum`."
)
def adds_all_stages(layer, w_LDD, x_MBD):
    return pipeline_with(mask=False)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "You take the outputs of the first M ticks. The last stage has nothing to do in the first S-1 of them: "
    "microbatch m leaves it in tick m + S - 1."
)
def takes_the_first_ticks(layer, w_LDD, x_MBD):
    return pipeline_with(first=0)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "Your stages send to the one before them. A pair (source, destination) of `ppermute` is (s, s + 1)."
)
def sends_backwards(layer, w_LDD, x_MBD):
    return pipeline_with(step=-1)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "You gather what all stages computed and take your predecessor's. Every device then receives S-1 "
    "microbatches and throws all but one away: use `ppermute`."
)
def gathers(layer, w_LDD, x_MBD):
    def send(y_BD, stage, S):
        return jax.lax.all_gather(y_BD, "stage")[(stage - 1) % S]

    return pipeline_with(send=send)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "You write the ticks as a Python loop, so the program repeats the layers for each tick. Put the tick in a "
    "`jax.lax.scan` over `jnp.arange(M + S - 1)`."
)
def repeats_the_code(layer, w_LDD, x_MBD):
    return pipeline_with(unrolled=True)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "Your waiting stages call the layers on zeros and throw the result away. A `jnp.where` doesn't stop a "
    "gradient that is not a number: 0 times NaN is NaN. Compute inside `jax.lax.cond`."
)
def computes_rubbish(layer, w_LDD, x_MBD):
    return pipeline_with(always=True)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "Your waiting stages compute layers on some real microbatch. That saves the gradient but not the work: a stage "
    "that waits should take a branch of `jax.lax.cond` without layers."
)
def computes_on_other_rows(layer, w_LDD, x_MBD):
    return pipeline_with(always=True, on_data=True)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "You stop one tick early: stage s has microbatch t - s while 0 <= t - s < M, and your last one is cut off."
)
def stops_early(layer, w_LDD, x_MBD):
    return pipeline_with(early=1)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "Your stages go on computing after their last microbatch, and throw it away. Stage s has microbatch t - s, and is "
    "done when t - s reaches M."
)
def never_done(layer, w_LDD, x_MBD):
    return pipeline_with(busy=lambda t, stage, M: t >= stage)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "Your stages compute before their first microbatch arrives. It reaches stage s in tick s: until then the stage "
    "waits."
)
def too_soon(layer, w_LDD, x_MBD):
    return pipeline_with(busy=lambda t, stage, M: t < stage + M)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "All your stages stop when stage 0 has taken its last microbatch. Stage s lags s ticks behind: it works while "
    "0 <= t - s < M."
)
def all_stop_together(layer, w_LDD, x_MBD):
    return pipeline_with(busy=lambda t, stage, M: t < M)(layer, w_LDD, x_MBD)


@gpipe.mutant("Stage 0 takes the wrong microbatch: in tick t it takes number t, beginning with 0.")
def one_behind(layer, w_LDD, x_MBD):
    return pipeline_with(ahead=-1)(layer, w_LDD, x_MBD)


@gpipe.mutant(
    "You send the last stage's output to all stages in every tick. Let the scan stack the outputs, and send the "
    "results at the end, in one collective."
)
def sends_each_result(layer, w_LDD, x_MBD):
    return pipeline_with(every=True)(layer, w_LDD, x_MBD)


@gpipe.mutant("A stage computes only the first of its layers. It holds L/S of them in `w_LDD`.")
def first_layer_only(layer, w_LDD, x_MBD):
    return pipeline_with(order=slice(1))(layer, w_LDD, x_MBD)


@gpipe.mutant("Your stages go through their layers from the last to the first.")
def layers_reversed(layer, w_LDD, x_MBD):
    return pipeline_with(order=slice(None, None, -1))(layer, w_LDD, x_MBD)


# ----------------------------------------------------------------------------------- circular

circular = Exercise(
    "13.circular",
    title="Round the ring",
    function="circular_work",
    minutes=20,
    points=10,
    forbid=FORBIDDEN,
    statement="""
Write `circular_work(tick, stage, S, M, R)`. It returns the microbatch that a stage of a circular pipeline works on in a
tick of the forward pass, and which of its R groups of layers it uses. If the stage has nothing to do, return `None`.

- Microbatch 0 enters stage 0 in tick 0. Microbatches enter in order.
- **Nothing waits**: after a stage has worked on a microbatch, the next stage works on it in the next tick. From stage
  S-1 it goes to stage 0, which uses its next group.
- S consecutive microbatches go round R times before the next S enter. From its first slot to its last a stage is never
  idle.
- Raise `ValueError` if M is not a multiple of S.
""",
    hints=(
        "Stage s does what stage 0 did s ticks ago. So solve it for stage 0, and use tick - stage instead of "
        "tick.",
        "Stage 0 works in laps of S ticks. In lap 0 microbatches 0 to S-1 meet group 0; in lap 1 the same "
        "ones meet group 1. After R laps the next S enter.",
        "With `lap, offset = divmod(tick - stage, S)` the group is `lap % R`, and the microbatch is number "
        "`offset` of set `lap // R`, which has S microbatches.",
    ),
)


def right_work(tick, stage, S, M, R):
    if M % S:
        raise ValueError("not a multiple")
    number = tick - stage
    lap, place = divmod(number, S)
    return (lap // R * S + place, lap % R) if 0 <= number < R * M else None


def grid(fn, S, M, R, more=2):
    found = [
        [fn(tick, stage, S, M, R) for stage in range(S)] for tick in range(R * M + S - 1 + more)
    ]
    return [[work if unset(work) else [int(n) for n in work] for work in row] for row in found]


def unset(work):
    """Whether a slot has no work: None, or a pair of them, which isn't what is asked for."""
    return work is None or any(n is None for n in work)


def grid_is_right(t, fn, S, M, R):
    got, want = grid(fn, S, M, R), grid(right_work, S, M, R)
    wrong = [(n, s) for n, row in enumerate(want) for s in range(S) if got[n][s] != row[s]]
    at = wrong[0] if wrong else (0, 0)
    one, other = got[at[0]][at[1]], want[at[0]][at[1]]
    why = f"S={S}, M={M}, R={R}: in tick {at[0]} stage {at[1]} has {one}, want {other}"
    if [[work and work[::-1] for work in row] for row in got] == want:
        why += ". You return (group, microbatch), and (microbatch, group) is asked for"
    elif wrong and got[1:] == want[:-1]:
        why += ". All of it is one tick too late"
    elif wrong and got[:-1] == want[1:]:
        why += ". All of it is one tick too early"
    elif not unset(one) and other and len(one) == 2:
        off = [
            name for name, a, b in zip(("microbatch", "group"), one, other, strict=True) if a != b
        ]
        why += f". The {off[0]} is wrong" if len(off) == 1 else ". Both are wrong"
        above = any(not unset(work) and work[1] >= R for row in got for work in row)
        why += f". A stage's groups are counted from 0 to {R - 1}" if above else ""
        if one[1] == R - 1 - other[1] != other[1]:
            why += ". A microbatch meets group 0 in its first lap, and the last group in its last"
        first = other[0] // S * S
        if one[0] != other[0]:
            why += f". In this lap microbatches {first} to {first + S - 1} go round, in order, on every stage"
    elif one is not None and len(one) == 2 and unset(one):
        why += ". Where there is nothing to do, return None alone"
    elif wrong:
        why += f". Stage {at[1]} works in ticks {at[1]} to {at[1] + R * M - 1}"
    t.true(not wrong, why=why, observed=str(got))


@circular.check("as many microbatches as stages")
def _(fn, t):
    grid_is_right(t, fn, 3, 3, 2)


@circular.check("several sets of microbatches")
def _(fn, t):
    S, R = int(t.rng.integers(2, 5)), int(t.rng.integers(2, 5))
    grid_is_right(t, fn, S, 3 * S, R)


@circular.check("one group, and one stage")
def _(fn, t):
    grid_is_right(t, fn, 4, 8, 1)
    grid_is_right(t, fn, 1, 5, 3)


@circular.check("nothing is early, and nothing waits")
def _(fn, t):
    S, M, R = 4, 8, 3
    when = {
        (*work, stage): tick
        for tick, row in enumerate(grid(fn, S, M, R))
        for stage, work in enumerate(row)
        if work is not None
    }
    t.equal(len(when), S * M * R, why="pieces of work, each a microbatch, a group and a stage")
    way = list(itertools.product(range(R), range(S)))
    for m in range(M):
        ticks = [when.get((m, group, stage), -1) for group, stage in way]
        want = list(range(ticks[0], ticks[0] + S * R))
        t.equal(ticks, want, why=f"ticks of microbatch {m}, from its first layer to its last")


@circular.check("the idle share")
def _(fn, t):
    for S, M, R in ((4, 8, 2), (5, 5, 4), (2, 6, 3)):
        slots = [work for row in grid(fn, S, M, R, more=0) for work in row]
        want = Fraction(S - 1, R * M + S - 1)
        t.equal(Fraction(slots.count(None), len(slots)), want, why=f"S={S}, M={M}, R={R}")


@circular.check("a number of microbatches that does not go round")
def _(fn, t):
    t.raises(ValueError, fn, 0, 0, 4, 6, 2, why="6 microbatches, 4 stages")
    t.raises(
        ValueError, fn, 0, 3, 4, 6, 2, why="6 microbatches, 4 stages, where stage 3 still waits"
    )


@circular.mutant(
    "You send all M microbatches through a group before the next group begins. Then the microbatch that stage S-1 "
    "sends back has to wait: let the same S microbatches go on with the next group."
)
def all_before_the_next_group(tick, stage, S, M, R):
    right_work(0, 0, S, M, R)
    number = tick - stage
    return (number % M, number // M) if 0 <= number < R * M else None


@circular.mutant(
    "All your stages do the same at the same time. Stage s lags s ticks behind stage 0: use tick - stage."
)
def no_lag(tick, stage, S, M, R):
    return right_work(tick, 0, S, M, R)


@circular.mutant(
    "Your group changes with every tick. It should change with every lap of S ticks, when a microbatch has been on "
    "all stages."
)
def groups_too_fast(tick, stage, S, M, R):
    work = right_work(tick, stage, S, M, R)
    return work and (work[0], (tick - stage) % R)


@circular.mutant(
    "You refuse an M that is a multiple of S. It is M that must be divisible: S microbatches go round at a time."
)
def refuses_what_goes_round(tick, stage, S, M, R):
    if S % M:
        raise ValueError("not a multiple")
    return right_work(tick, stage, S, M, R) if M % S == 0 else None


@circular.mutant("Your work never ends: after R * M slots a stage is done, and returns None.")
def never_ends(tick, stage, S, M, R):
    right_work(0, 0, S, M, R)
    return right_work(tick, stage, S, 100 * M, R)


@circular.mutant(
    "You check M only where there is work. Refuse an M that can't go round in every tick and on every stage."
)
def refuses_late(tick, stage, S, M, R):
    return right_work(tick, stage, S, M, R) if 0 <= tick - stage < R * M else None


@circular.mutant(
    "Your stages begin too early: before tick s nothing has reached stage s, and it returns None."
)
def no_beginning(tick, stage, S, M, R):
    right_work(0, 0, S, M, R)
    lap, place = divmod(tick - stage, S)
    return (lap // R * S + place, lap % R) if tick - stage < R * M else None


@circular.mutant(
    "Your laps have R ticks. A lap goes once round all stages: S ticks. After R laps the next set enters."
)
def laps_of_groups(tick, stage, S, M, R):
    if right_work(tick, stage, S, M, R) is None:
        return None
    lap, place = divmod(tick - stage, R)
    return lap // R * S + place, lap % R


@circular.mutant(
    "You start over with microbatch 0 in each set. After R laps the next S enter: add S for each earlier "
    "set."
)
def same_set_again(tick, stage, S, M, R):
    work = right_work(tick, stage, S, M, R)
    return work and (work[0] % S, work[1])


@circular.mutant("You return (group, microbatch), and (microbatch, group) is asked for.")
def pair_swapped(tick, stage, S, M, R):
    work = right_work(tick, stage, S, M, R)
    return work and work[::-1]


GROUPS_END = (
    "Your groups are counted past R - 1, and a stage has only R of them. After R laps the next S microbatches enter, "
    "and they begin with group 0: the group is the lap modulo R."
)


@circular.mutant(GROUPS_END)
def groups_go_on(tick, stage, S, M, R):
    work = right_work(tick, stage, S, M, R)
    return work and (work[0], (tick - stage) // S)


@circular.mutant(GROUPS_END)
def groups_go_on_with_one_set(tick, stage, S, M, R):
    work = right_work(tick, stage, S, M, R)
    return work and (work[0] % S, (tick - stage) // S)


@circular.mutant(
    "Your stage uses its R groups on one microbatch in R consecutive ticks. Between two groups of a stage a microbatch "
    "has to go through all the other stages: S ticks later it is back, and meets the next group."
)
def all_groups_at_once(tick, stage, S, M, R):
    work = right_work(tick, stage, S, M, R)
    return work and divmod(tick - stage, R)


@circular.mutant(
    "Your stages stop after M ticks of work. Each microbatch comes to a stage R times, once for each group: a stage "
    "works for R * M ticks."
)
def one_lap_each(tick, stage, S, M, R):
    work = right_work(tick, stage, S, M, R)
    return work if tick - stage < M else None


@circular.mutant(
    "All your stages stop in the same tick. Stage s begins s ticks later than stage 0, and ends s ticks later: compare "
    "tick - stage with R * M, not tick."
)
def all_end_together(tick, stage, S, M, R):
    work = right_work(tick, stage, S, M, R)
    return work if tick < R * M else None


@circular.mutant(
    "You add 1 for each earlier set of microbatches. A set has S of them: set number lap // R begins with microbatch "
    "lap // R * S."
)
def sets_of_one(tick, stage, S, M, R):
    work = right_work(tick, stage, S, M, R)
    return work and (work[0] // S + work[0] % S, work[1])


@circular.mutant(
    "You refuse an M that is smaller than S, but not every M that isn't a multiple: 6 microbatches on 4 stages leave "
    "a set of 2, which would have to wait for itself."
)
def refuses_only_few(tick, stage, S, M, R):
    if M < S:
        raise ValueError("too few")
    number = tick - stage
    lap, place = divmod(number, S)
    return (lap // R * S + place, lap % R) if 0 <= number < R * M else None


# ------------------------------------------------------------------------------------- bubble

bubble = Exercise(
    "13.bubble",
    title="How many microbatches",
    function="plan",
    minutes=20,
    points=10,
    forbid=FORBIDDEN,
    statement="""
Write `plan(schedule, S, R, wanted, forward, backward, send)`. It returns `(M, seconds, idle)`.

- **M** is the smallest number of microbatches whose bubble, counted in slots, is at most `wanted`. A bubble of exactly
  `wanted` is fine. A circular pipeline takes only multiples of S.
- **seconds** is the length of a step. All slots come one after another. A step has one forward slot for each tick of
  a forward pass, and just as many backward slots. `forward` and `backward` are the seconds of one microbatch in *all*
  layers of a stage; a circular pipeline's slot has one of its R groups. After every slot all stages send for `send`
  seconds, and compute nothing meanwhile.
- 1F1B computes the layers again in its backward slots.
- **idle** is the share of those seconds in which a stage computes nothing. Computing again counts as computing.

`R` matters only in `"circular"`. `wanted` is a `fractions.Fraction`, so you can be exact.
""",
    hints=(
        "Solve (S-1) / (RM + S-1) <= wanted for M by hand, then round up: to an integer, and for circular "
        "to a multiple of S.",
        "A forward pass has RM + S-1 slots, and so has the backward pass. A slot lasts (seconds of all "
        "layers) / R + send. What a stage computes in a step does not depend on R.",
        "least = ceil((S-1) * (1 - wanted) / (wanted * R)); seconds = (RM + S-1) * ((forward + backward) / "
        "R + 2 * send); idle = 1 - M * (forward + backward) / seconds, with 1F1B's longer backward.",
    ),
)


def right_plan(schedule, S, R, wanted, forward, backward, send, **wrong):
    groups, step = (R, S) if schedule == "circular" or "all_r" in wrong else (1, 1)
    if schedule != "circular" or "any_m" in wrong:
        step = 1
    busy_only = "busy" in wrong
    M = step
    counted = 1 if "no_groups" in wrong else groups
    while Fraction(S - 1, counted * M + (0 if busy_only else S - 1)) > wanted:
        M += step
    if "below" in wrong and S > 1 and Fraction(S - 1, groups * M + S - 1) == wanted:
        M += step
    if "floats" in wrong:
        least = math.ceil((S - 1) * (1 - float(wanted)) / (float(wanted) * groups))
        M = max(1, -(-least // step)) * step
    if "zero" in wrong and S == 1:
        raise ZeroDivisionError("M is 0")
    if schedule == "1f1b" and "no_remat" not in wrong:
        backward = forward + backward
    slots = groups * M + S - 1
    length = (forward + backward) / (1 if "long_slots" in wrong else groups)
    sends = (1 if "one_send" in wrong else 2) / (groups if "short_sends" in wrong else 1)
    sends = 0 if "no_send" in wrong else sends
    if "again_everywhere" in wrong and schedule != "1f1b":
        length += forward / groups
    counted = groups * M if "no_bubble" in wrong else slots + ("one_more" in wrong)
    counted = groups * (M + S - 1) if "long_bubble" in wrong else counted
    seconds = counted * (length + sends * send)
    seconds -= (slots - 1) * 2 * send if "one_pair" in wrong else 0
    seconds -= 2 * send if "between" in wrong else 0
    seconds -= (S - 1) * sends * send if "busy_sends" in wrong else 0
    busy = forward + backward
    if schedule == "1f1b" and "again_idle" in wrong:
        busy -= forward
    if "busy_groups" in wrong:
        busy /= groups
    idle = (S - 1) / slots if "slots" in wrong else 1 - M * busy / seconds
    idle = seconds / (M * busy) - 1 if "of_the_work" in wrong else idle
    idle *= seconds if "in_seconds" in wrong else 1
    return M // S if "sets" in wrong else M, seconds, 1 - idle if "working" in wrong else idle


# One mistake in one of the three numbers, and what to say of it.
PARTS = {
    "sets": "that counts sets of S microbatches",
    "one_more": "a pass has S-1 more slots than microbatches, and you have S more",
    "again_everywhere": "only 1F1B computes the layers again",
    "one_pair": "there is a send after every slot, not one in a pass",
    "between": "there is a send after the last slot too",
    "long_bubble": "a stage waits for S-1 slots, and each has one of R groups: R doesn't multiply them",
    "busy": "that is from (S-1) / M, not from (S-1) / (M + S-1)",
    "any_m": "a circular pipeline takes only multiples of S",
    "no_groups": "a microbatch fills R slots of a circular pipeline's stage",
    "below": "a bubble of exactly `wanted` is fine",
    "floats": "a float was rounded up",
    "no_remat": "1F1B computes the layers again in its backward slots",
    "long_slots": "a circular pipeline's slot has one of its R groups",
    "one_send": "there is a send after every backward slot too",
    "no_send": "the sends are missing",
    "busy_sends": "you send after each microbatch; send after every slot: a pass has S-1 more slots than microbatches",
    "short_sends": "a message is as large in a circular pipeline: R doesn't divide `send`",
    "no_bubble": "that counts only the slots with work: a pass has S-1 more",
    "all_r": "R counts in `circular` only",
    "slots": "that is a share of slots: stages are idle while they send, too",
    "again_idle": "computing again counts as computing",
    "busy_groups": "in R slots of 1/R each a stage computes all its layers",
    "of_the_work": "that is divided by the time of work, not by the length of the step",
    "working": "that is the share in which it computes",
    "in_seconds": "that is in seconds, not as a share of the step",
}


def explains(args, wrong, name, got):
    with np.errstate(all="ignore"):
        value = dict(zip(("M", "seconds", "idle"), right_plan(*args, **{wrong: 1}), strict=True))
    return np.isclose(float(got), value[name], rtol=1e-6, atol=1e-9)


def plan_is_right(t, fn, *args):
    got = fn(*args)
    schedule, S, R, wanted, *times = args
    send = times[2]
    case = f"{schedule}, S={S}, R={R}, wanted {wanted}, forward, backward, send = {times}"
    t.true(len(got) == 3, why="return (M, seconds, idle)")
    want = right_plan(*args)
    for name, g, w in zip(("M", "seconds", "idle"), got, want, strict=True):
        if not np.isclose(float(g), w, rtol=1e-6, atol=1e-9):
            case += f". {name} is {float(g):.6g}, want {w:.6g}"
            alike = (
                text
                for wrong, text in PARTS.items()
                if explains(args, wrong, name, g)
                and (name == "M" or right_plan(*args, **{wrong: 1})[0] == want[0])
            )
            told = next((f": {text}" for text in alike), "")
            if name == "seconds" and not told:
                groups = R if schedule == "circular" else 1
                slots = groups * want[0] + S - 1
                again = times[0] if schedule == "1f1b" else 0
                pair = f"{times[0] / groups + send:.6g} + {(times[1] + again) / groups + send:.6g}"
                told = f", {slots} times a forward and a backward slot: {slots} * ({pair})"
            case += told
            break
    if got[0] != want[0] and float(got[0]).is_integer() and got[0] > 0:
        slots = (R if schedule == "circular" else 1) * int(got[0]) + S - 1
        share = Fraction(S - 1, slots)
        case += f". The bubble of {int(got[0])} microbatches is {share}"
        case += f", more than {wanted}" if share > wanted else ": fewer would do"
    elif np.allclose([float(g) for g in got], [want[0], want[2], want[1]]):
        case += ". The order is (M, seconds, idle)"
    seen = np.array(got, float)
    t.true(np.allclose(seen, want, rtol=1e-6, atol=1e-9), why=case, observed=seen)


@bubble.check("GPipe, equal times, nothing to wait for")
def _(fn, t):
    plan_is_right(t, fn, "gpipe", 4, 1, Fraction(1, 6), 1.0, 1.0, 0.0)
    plan_is_right(t, fn, "gpipe", int(t.rng.integers(3, 9)), 3, Fraction(1, 7), 1.0, 2.0, 0.0)


@bubble.check("1F1B")
def _(fn, t):
    plan_is_right(t, fn, "1f1b", int(t.rng.integers(3, 9)), 2, Fraction(1, 9), 1.0, 2.0, 0.0)


@bubble.check("circular")
def _(fn, t):
    for R in (1, 2, 5):
        plan_is_right(t, fn, "circular", 4, R, Fraction(1, 10), 1.0, 2.0, 0.0)


@bubble.check("messages that take time")
def _(fn, t):
    send = float(t.rng.uniform(0.1, 0.5))
    for schedule in ("gpipe", "1f1b", "circular"):
        plan_is_right(t, fn, schedule, 4, 3, Fraction(1, 8), 1.5, 2.5, send)


@bubble.check("exactly the wanted share")
def _(fn, t):
    for S, M in itertools.product((2, 4, 7, 8), (1, 3, 12, 17, 49)):
        plan_is_right(t, fn, "gpipe", S, 1, Fraction(S - 1, M + S - 1), 1.0, 2.0, 0.01)


@bubble.check("rounded up")
def _(fn, t):
    # Of these M is 8.5, 10.1 and 10.9 before it is rounded, and 12 in a circular pipeline of one group.
    for wanted in (Fraction(6, 23), Fraction(30, 131), Fraction(30, 139)):
        plan_is_right(t, fn, "gpipe", 4, 1, wanted, 1.0, 2.0, 0.01)
        plan_is_right(t, fn, "circular", 4, 1, wanted, 1.0, 2.0, 0.01)
        plan_is_right(t, fn, "circular", 4, 2, wanted, 1.0, 2.0, 0.01)


@bubble.check("a single stage")
def _(fn, t):
    for schedule in ("gpipe", "1f1b", "circular"):
        plan_is_right(t, fn, schedule, 1, 2, Fraction(1, 100), 1.0, 2.0, 0.0)


@bubble.check("your own cluster")
def _(fn, t):
    draw = np.random.default_rng(t.learner)
    S, R = int(draw.integers(4, 13)), int(draw.integers(2, 6))
    wanted = Fraction(int(draw.integers(5, 20)), 100)
    forward, backward, send = (float(x) for x in draw.uniform((0.1, 0.3, 0.001), (0.2, 0.5, 0.02)))
    for schedule in ("gpipe", "1f1b", "circular"):
        plan_is_right(t, fn, schedule, S, R, wanted, forward, backward, send)


@bubble.mutant(
    "You divide the waiting time by the busy time. Divide it by the whole step: (S-1) / (RM + S-1)."
)
def of_the_busy_time(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, busy=1)


@bubble.mutant(
    "Your 1F1B doesn't compute the layers again. Its backward slot takes forward + backward, because only the "
    "microbatch's input was kept."
)
def no_second_forward(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, no_remat=1)


@bubble.mutant("You divide by R in every schedule. GPipe and 1F1B have one group, whatever R says.")
def groups_everywhere(schedule, S, R, wanted, forward, backward, send):
    if schedule == "1f1b":
        backward += forward
    return right_plan(
        "circular" if R > 1 and S > 1 else schedule, S, R, wanted, forward, backward, send, any_m=1
    )


@bubble.mutant(
    "Your circular M is any number. Microbatches go round in sets of S: round up to a multiple."
)
def any_number(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, any_m=1)


@bubble.mutant(
    "Your circular slots are as long as GPipe's. Each slot has one of R groups, so it lasts 1/R of the time."
)
def long_slots(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, long_slots=1)


@bubble.mutant(
    "You count only the sends of the forward pass. Gradients are sent back as often as activations are sent on: "
    "2 * send for each pair of slots."
)
def sends_once(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, one_send=1)


@bubble.mutant(
    "Your idle share counts only slots. It is a share of seconds, and stages compute nothing while they send."
)
def counts_slots(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, slots=1)


@bubble.mutant(
    "You want a bubble below `wanted`. One of exactly `wanted` is fine: round up, don't add one."
)
def strictly_below(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, below=1)


@bubble.mutant(
    "With one stage there is no bubble, and your M is 0. A step has at least one microbatch."
)
def no_microbatch(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, zero=1)


@bubble.mutant(
    "You count 1F1B's second forward pass as idle. A stage computes in it, and computing again is computing."
)
def again_is_idle(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, again_idle=1)


@bubble.mutant(
    "You divide the sends by R as well. A message has the size of a microbatch, whatever the slot computes: `send` "
    "seconds after every slot."
)
def short_sends(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, short_sends=1)


@bubble.mutant(
    "You divide a stage's work in a step by R. Its slots are shorter, but there are R times as many: it computes all "
    "its layers for each microbatch."
)
def less_work(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, busy_groups=1)


@bubble.mutant(
    "Your circular M is GPipe's. Each microbatch fills R slots, so fewer microbatches give the same bubble: "
    "(S-1) / (RM + S-1)."
)
def m_without_groups(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, no_groups=1)


@bubble.mutant(
    "You round a float up. If the bubble is exactly what was wanted, 12.000000000000002 becomes 13: stay "
    "in fractions until you have rounded."
)
def rounds_floats(schedule, S, R, wanted, forward, backward, send):
    return right_plan(schedule, S, R, wanted, forward, backward, send, floats=1)


# ------------------------------------------------------------------------------------ balance

balanced = Exercise(
    "13.balance",
    title="Where to cut",
    function="balance",
    minutes=25,
    points=10,
    forbid=FORBIDDEN,
    statement="""
Write `balance(costs, S)`. `costs` are positive integers: the embedding, the layers in order, the head. Cut them into S
stages of consecutive pieces, none of them empty. A tick lasts as long as the **slowest stage**, so make that stage as
fast as possible.

Return the S+1 positions of the cuts: stage s has `costs[b[s]:b[s+1]]`. If several answers are equally good, return any
of them. There may be a hundred pieces and a dozen stages, so trying all ways to cut takes too long.
""",
    hints=(
        "Let f(i, s) be the best possible slowest stage for the first i pieces in s stages. If the last of these "
        "stages begins at piece j, what is f(i, s)?",
        "f(i, s) is the smallest, over j, of max(f(j, s-1), sum(costs[j:i])). Keep the sum of the first i costs "
        "for every i, so each of these sums is one subtraction.",
        "Begin with one stage: f(i, 1) = sum(costs[:i]), cuts [0, i]. Add stages one at a time, and keep "
        "(value, cuts) for each i; j must leave a piece for each earlier stage: j >= s-1.",
    ),
)


def slowest(costs, cuts):
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(cuts))


def best_slowest(costs, S):
    """The least limit that a greedy cut keeps, by bisection; never fewer stages than S matter."""
    low, high = max(costs), sum(costs)
    while low < high:
        limit, stages, filled = (low + high) // 2, 1, 0
        for cost in costs:
            if filled + cost > limit:
                stages, filled = stages + 1, 0
            filled += cost
        low, high = (low, limit) if stages <= S else (limit + 1, high)
    return low


def rule_of(costs, cuts):
    """What a list of cuts may have been chosen by, for a message; several rules often agree on the cuts."""
    S, sums = len(cuts) - 1, [0, *itertools.accumulate(costs)]
    lengths = [b - a for a, b in itertools.pairwise(cuts)]
    rules = []
    if max(lengths) - min(lengths) <= 1:
        rules.append("all stages should have the same number of pieces, whatever these cost")
    if sorted(lengths)[-2] == 1:
        rules.append("the largest stage didn't count")
    inner = [0, *costs[1:-1], 0]
    if len(costs) > 2 and slowest(inner, cuts) == best_slowest(inner, S):
        rules.append("the embedding and the head cost nothing")
    shares = [(cuts[s], sums[-1] * s / S) for s in range(1, S)]
    if all(sums[cut - 1] <= share <= sums[cut + 1] for cut, share in shares):
        rules.append("each cut should be near an even share of the sum")
    average = sums[-1] / S
    full = list(itertools.pairwise(cuts))[:-1]
    if all(sums[b - 1] - sums[a] <= average <= sums[b + 1] - sums[a] for a, b in full):
        rules.append("each stage should be as full as the average, and the last take what is left")
    return f". It looks as if {', or '.join(rules)}" if rules else ""


def cuts_are_best(t, fn, costs, S, why):
    found = list(fn(list(costs), S))
    whole = all(isinstance(b, (int, np.integer)) for b in found)
    text = f"{why}: your cuts are {found}, and positions are integers"
    if any(isinstance(b, (list, tuple)) for b in found):
        text += ". Return the positions alone, in one list"
    t.true(whole, text, observed=found)
    cuts = [int(b) for b in found]
    text = f"{why}: {cuts} does not cut {len(costs)} pieces into {S} stages"
    many = f"{text}: these are {len(cuts)} positions, want {S + 1}"
    t.true(len(cuts) == S + 1, why=many, observed=cuts)
    ends = f"{text}: the first position is 0, the last {len(costs)}"
    t.true((cuts[0], cuts[-1]) == (0, len(costs)), why=ends, observed=cuts)
    empty = [s for s in range(S) if cuts[s] >= cuts[s + 1]]
    t.true(not empty, why=f"{text}, none empty: nothing is in stage {empty[:1]}", observed=cuts)
    got, want = slowest(costs, cuts), best_slowest(costs, S)
    why = f"{why}: your slowest stage costs {got}, and {want} is possible; you cut at {cuts}"
    why += rule_of(costs, cuts) if got != want else ""
    moved = [
        [*cuts[:k], at, *cuts[k + 1 :]]
        for k in range(1, S)
        for at in range(cuts[k - 1] + 1, cuts[k + 1])
    ]
    better = [other for other in moved if slowest(costs, other) < got]
    if better:
        k = [a != b for a, b in zip(cuts, better[0], strict=True)].index(True)
        why += f". Moving the cut at {cuts[k]} to {better[0][k]} alone makes it faster"
    else:
        why += ". No single cut can be moved to improve it: several have to move together"
    t.true(got == want, why=why, observed=cuts)


@balanced.check("a head as heavy as several layers")
def _(fn, t):
    cuts_are_best(t, fn, [1, *[10] * 12, 35], 4, "twelve equal layers, and a head of 3.5")


@balanced.check("layers of different cost")
def _(fn, t):
    for _ in range(12):
        costs = t.rng.integers(1, 30, int(t.rng.integers(6, 20))).tolist()
        cuts_are_best(t, fn, costs, int(t.rng.integers(2, 6)), f"{costs}")


@balanced.check("only the slowest stage counts")
def _(fn, t):
    # Of these, cuts by the sum of squares or at even shares of the sum have a slower stage.
    costs = (int(t.rng.integers(1, 9)) * np.array([7, 3, 11, 11, 1])).tolist()
    cuts_are_best(t, fn, costs, 4, f"{costs} in 4")


@balanced.check("one stage, and as many stages as pieces")
def _(fn, t):
    costs = t.rng.integers(1, 9, 6).tolist()
    cuts_are_best(t, fn, costs, 1, f"{costs} in 1")
    cuts_are_best(t, fn, costs, 6, f"{costs} in 6")


@balanced.check("one piece that outweighs the others")
def _(fn, t):
    cuts_are_best(t, fn, [1, 1, 1, 1000, 1, 1], 4, "no stage may be empty")
    cuts_are_best(t, fn, [1000, 1, 1, 1, 1], 3, "no stage may be empty")


@balanced.check("a hundred pieces")
def _(fn, t):
    for _ in range(3):
        costs = t.rng.integers(50, 150, 100).tolist()
        cuts_are_best(t, fn, costs, 12, "a hundred pieces in 12")


@balanced.mutant(
    "You give every stage the same number of pieces. Pieces differ in cost: the head alone may cost as much as "
    "several layers."
)
def same_number(costs, S):
    return [round(s * len(costs) / S) for s in range(S + 1)]


@balanced.mutant(
    "You balance the layers alone and then add the embedding to the first stage and the head to the last. They "
    "are pieces too: count them before you cut."
)
def without_the_ends(costs, S):
    layers = len(costs) - 2
    inner = [1 + round(s * layers / S) for s in range(1, S)]
    return [0, *inner, len(costs)]


@balanced.mutant(
    "You fill each stage up to the average. The rest piles up in the last stage, and you never reconsider a cut: "
    "compare all positions of the last cut."
)
def fills_to_the_average(costs, S):
    average, cuts, filled = sum(costs) / S, [0], 0
    for i, cost in enumerate(costs):
        left = len(costs) - i  # pieces from here on; every stage to come needs one
        full = filled > 0 and filled + cost > average
        if len(cuts) < S and filled and (full or left == S - len(cuts)):
            cuts.append(i)
            filled = 0
        filled += cost
    return [*cuts, len(costs)]


@balanced.mutant(
    "You cut where the sum so far is nearest to its even share. That's close, but one cut that is a little off moves "
    "all others: compare all positions of the last cut."
)
def nearest_share(costs, S):
    sums, cuts = [0, *itertools.accumulate(costs)], [0]
    for s in range(1, S):
        legal = range(cuts[-1] + 1, len(costs) - (S - s) + 1)
        cuts.append(min(legal, key=lambda i: abs(sums[i] - sums[-1] * s / S)))
    return [*cuts, len(costs)]


@balanced.mutant(
    "Your cuts have fewer stages than S. With a limit for the slowest stage fewer may be enough; split some of them, "
    "because no stage may be empty."
)
def too_few_stages(costs, S):
    limit, cuts, filled = best_slowest(costs, S), [0], 0
    for i, cost in enumerate(costs):
        if filled + cost > limit:
            cuts.append(i)
            filled = 0
        filled += cost
    return [*cuts, len(costs)]


@balanced.mutant(
    "With a limit for the slowest stage fewer than S stages may be enough, and you repeat the last position for those "
    "that are left: they are empty. Split stages that have several pieces instead; that makes none slower."
)
def the_rest_empty(costs, S):
    cuts = too_few_stages(costs, S)
    return cuts + [len(costs)] * (S + 1 - len(cuts))


@balanced.mutant(
    "You balance the layers as if the embedding and the head cost nothing. They are pieces too, and belong in the sums."
)
def ends_for_nothing(costs, S):
    inner = [0, *costs[1:-1], 0] if len(costs) > 2 else costs
    return cut_by(inner, S, first=lambda cost: cost, join=max)


def cut_by(costs, S, *, first, join, empty=False):
    """The best cuts, stages added one at a time, by a value of a stage and a way to join two values."""
    sums, n = [0, *itertools.accumulate(costs)], len(costs)
    best = {i: (first(sums[i]), [0, i]) for i in range(0 if empty else 1, n + 1)}
    for s in range(2, S + 1):
        best = {
            i: min(
                (join(best[j][0], first(sums[i] - sums[j])), [*best[j][1], i])
                for j in range(0 if empty else s - 1, i + empty)
            )
            for i in range(0 if empty else s, n + 1)
        }
    return best[n][1]


@balanced.mutant(
    "Some of your stages are empty: two cuts are at the same position. Before the last of s stages there are at least "
    "s - 1 pieces, and the last stage has at least one."
)
def empty_stages(costs, S):
    return cut_by(costs, S, first=lambda cost: cost, join=max, empty=True)


@balanced.mutant("Your cuts are floats. They are positions, and `costs[a:b]` takes only integers.")
def floats_for_cuts(costs, S):
    return [float(b) for b in cut_by(costs, S, first=lambda cost: cost, join=max)]


@balanced.mutant(
    "You return how many pieces each stage has. The positions of the cuts are asked for: S+1 numbers, "
    "from 0 to the number of pieces."
)
def lengths_of_stages(costs, S):
    cuts = cut_by(costs, S, first=lambda cost: cost, join=max)
    return [b - a for a, b in itertools.pairwise(cuts)]


@balanced.mutant(
    "You halve the slowest stage again and again. An earlier cut then stays where it was, although a better "
    "one exists now that there are more stages: compare all positions of the last cut."
)
def halves_the_slowest(costs, S):
    cuts = [0, len(costs)]
    while len(cuts) <= S:
        long = [k for k in range(len(cuts) - 1) if cuts[k + 1] - cuts[k] > 1]
        k = max(long, key=lambda k: sum(costs[cuts[k] : cuts[k + 1]]))
        between = range(cuts[k] + 1, cuts[k + 1])
        cuts.append(min(between, key=lambda i: slowest(costs, [cuts[k], i, cuts[k + 1]])))
        cuts.sort()
    return cuts


@balanced.mutant(
    "You minimise the sum of squares. That keeps stages alike, but a tick lasts as long as the slowest alone: take "
    "the larger of two values, don't add them."
)
def least_squares(costs, S):
    return cut_by(costs, S, first=lambda cost: cost**2, join=lambda a, b: a + b)
