import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.book.grading import Exercise
from minitext.compiler import aot
from minitext.compiler.targets import parse_target, topology_devices
from minitext.hardware import CHIPS


def mistaken(exercise, name, hint, fn):
    fn.__name__ = name
    exercise.mutant(hint)(fn)


# --------------------------------------------------------------------------------------- fit

fit = Exercise(
    "22.fit",
    title="Make it fit, and have the compiler say so",
    function="fit",
    minutes=25,
    points=15,
    seconds=110,
    statement="""
Write `fit(rows, devices, available, predict, ask)`. It returns the cheapest settings that the compiler accepts. The
last check gives you a real model and the real compiler for a v5e.

- The settings, also called a *plan*, are a list of four strings. They set `model.remat` to `none`, `dots` or `full`;
  `train.microbatches` to M; and `mesh.data` and `mesh.fsdp`, whose product is `devices`. Each device's part of a
  microbatch is a whole number of rows.
- Recomputing costs most, so try all plans with `none` before any with `dots`, and those before `full`. Among plans with
  the same remat, try fewer microbatches first, and then a smaller `mesh.fsdp`.
- `predict(settings)` is quick, and the compiler's figure is between `predict / 1.1` and `predict * 1.1`.
  `ask(settings)` compiles and returns whether the compiler accepts the step.
- Return only settings that you have asked about and that were accepted. Don't ask about a plan that can't fit, or about
  one that costs more than your answer. Return None if nothing fits.
""",
    hints=(
        "Three nested loops give the plans from the cheapest to the most expensive. Which can you skip without "
        "asking?",
        "The compiler's figure is at least `predict(settings) / 1.1`. If even that is more than `available`, the "
        "plan can't fit. You have to ask about every other plan, even one that seems to fit easily.",
        "`if predict(settings) <= 1.1 * available and ask(settings): return settings`, in the innermost of "
        "three loops. M takes every value with `rows % (M * devices) == 0`.",
    ),
)

REMAT = ("none", "dots", "full")


def settings_of(remat, microbatches, fsdp, devices):
    return [
        f"model.remat={remat}", f"train.microbatches={microbatches}", f"mesh.data={devices // fsdp}",
        f"mesh.fsdp={fsdp}",
    ]  # fmt: skip


def plans(rows, devices, *, uneven=False):
    whole = 1 if uneven else devices
    for remat in REMAT:
        for microbatches in (m for m in range(1, rows + 1) if rows % (m * whole) == 0):
            for fsdp in (size for size in range(1, devices + 1) if devices % size == 0):
                yield remat, microbatches, fsdp


def power_of_two(n):
    return n & (n - 1) == 0


def fit_with(
    *, order=None, slack=1.1, compiles=True, uneven=False, last=False, many=False, sure=0.0,
    tried=lambda microbatches, fsdp: True,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(rows, devices, available, predict, ask):
        taken, settings = [], None
        found = sorted(plans(rows, devices, uneven=uneven), key=order or (lambda plan: 0))
        for plan in found:
            if not tried(*plan[1:]):
                continue
            settings = settings_of(*plan, devices)
            if predict(settings) <= sure * available:
                return settings
            if predict(settings) <= slack * available and (not compiles or ask(settings)):
                taken.append(settings)
                if not many:
                    return settings
        return taken[0] if taken else settings if last else None

    return fn


class Compiler:
    """Answers `predict` and `ask` by a rule of memory, and remembers who asked for what."""

    def __init__(self, t, rows, devices):
        self.rows, self.devices, self.asked = rows, devices, []
        self.state = int(t.rng.integers(20, 60)) * 10**8 + t.learner % 10**8
        self.kept = dict(
            zip(REMAT, (n * int(t.rng.integers(7, 11)) * 10**7 for n in (60, 25, 4)), strict=True)
        )
        self.off = {plan: float(t.rng.uniform(0.92, 1.08)) for plan in plans(rows, devices)}

    def plan(self, settings):
        values = dict(text.split("=") for text in settings)
        plan = (
            values["model.remat"], int(values["train.microbatches"]), int(values["mesh.fsdp"]),
        )  # fmt: skip
        legal = plan in self.off and int(values["mesh.data"]) * plan[2] == self.devices
        return plan if legal else None

    def predict(self, settings):
        plan = self.plan(settings)
        if plan is None:
            return 0.0
        remat, microbatches, fsdp = plan
        summed = self.state / 3 / fsdp if microbatches > 1 else 0
        return (
            self.state / fsdp
            + summed
            + self.kept[remat] * self.rows / (microbatches * self.devices)
        )

    def needed(self, settings):
        return self.predict(settings) * self.off.get(self.plan(settings), 1)

    def answer(self, available):
        """What is right, and how often it asks."""
        right, asked = fit_with(), []
        settings = right(
            self.rows, self.devices, available, self.predict,
            lambda settings: asked.append(settings) or self.needed(settings) <= available,
        )  # fmt: skip
        return settings, len(asked)

    def run(self, t, fn, available, why):
        """The answer's settings, after its questions were looked at."""
        self.asked = []

        def ask(settings):
            self.asked.append(list(settings))
            return self.plan(settings) is not None and self.needed(settings) <= available

        got = fn(self.rows, self.devices, available, self.predict, ask)
        form = ["model.remat", "train.microbatches", "mesh.data", "mesh.fsdp"]
        for settings in [*self.asked, *([] if got is None else [got])]:
            formed = isinstance(settings, (list, tuple)) and len(settings) == 4
            formed = formed and all(isinstance(text, str) and "=" in text for text in settings)
            formed = formed and sorted(text.split("=")[0] for text in settings) == sorted(form)
            t.true(
                formed, f"settings are a list of four strings NAME=VALUE, got {settings}", "form"
            )
        got = None if got is None else list(got)
        where = f"{why}: {self.rows} rows, {self.devices} devices, {available:,.0f} bytes"
        for settings in [*self.asked, *([got] if got else [])]:
            legal = self.plan(settings) is not None
            t.true(legal, f"{where}: {settings} gives a device no whole number of rows", settings)
        return got, where

    def compare(self, t, fn, available, why):
        want, questions = self.answer(available)
        got, where = self.run(t, fn, available, why)
        order = list(self.off)
        places = [-1 if plan is None else order.index(self.plan(plan)) for plan in (got, want)]
        # Which plans were asked for tells mistakes apart that end in the same one.
        asked = [order.index(self.plan(settings)) for settings in self.asked]
        text = f"{where}: got {got}, want {want}"
        if want is not None and want not in self.asked:
            text += f"; you never asked for that one: predict says {self.predict(want):,.0f} bytes"
        elif got is not None and want is not None and places[0] > places[1]:
            text += "; you asked for that one, and it was accepted"
        t.true(places[0] == places[1], text, np.array([*places, *asked]))
        known = got is None or got in self.asked
        t.true(known, f"{where}: {got} was never asked for", "never asked")
        return questions, where


def between(compiler, low, high):
    """Bytes between what two plans need, so that some plans fit and others do not."""
    needs = sorted(compiler.needed(settings_of(*plan, compiler.devices)) for plan in compiler.off)
    return needs[int(len(needs) * low)] * (1 - high) + needs[int(len(needs) * low) + 1] * high


@fit.check("plenty of memory")
def _(fn, t):
    Compiler(t, 32, 8).compare(t, fn, 1e15, "everything fits")


@fit.check("a batch that divides badly")
def _(fn, t):
    for rows, devices in ((24, 4), (36, 6)):
        compiler = Compiler(t, rows, devices)
        compiler.compare(t, fn, between(compiler, 0.3, 0.5), "a batch that divides badly")


@fit.check("sizes that are no powers of two")
def _(fn, t):
    # Where the compiler takes what is predicted, the cheapest plan that fits is the one that the memory is made for.
    for plan in (("none", 1, 3), ("none", 1, 6), ("none", 3, 1), ("dots", 5, 2), ("none", 6, 3)):
        compiler = Compiler(t, 180, 12)
        compiler.off = dict.fromkeys(compiler.off, 1.0)
        compiler.state, compiler.kept = 12 * 10**9, {"none": 36e9, "dots": 9e9, "full": 1e9}
        available = compiler.needed(settings_of(*plan, 12))
        compiler.compare(t, fn, available, "what fits is no power of two")


@fit.check("the cheapest that fits")
def _(fn, t):
    for share in (0.15, 0.35, 0.6, 0.8):
        compiler = Compiler(t, 64, 8)
        compiler.compare(t, fn, between(compiler, share, 0.5), "some plans fit")


@fit.check("plans that nearly fit")
def _(fn, t):
    for side, off in (("below", 0.93), ("above", 1.07)):
        compiler = Compiler(t, 64, 8)
        lowest, needs_less = math.inf, []
        for plan in compiler.off:  # plans that need clearly less than every cheaper one
            predicted = compiler.predict(settings_of(*plan, 8))
            needs_less += [plan] * (predicted < 0.85 * lowest < math.inf)
            lowest = min(lowest, predicted)
            compiler.off[plan] = 1.05
        plan = needs_less[int(t.rng.integers(len(needs_less)))]
        compiler.off[plan] = off
        available = compiler.predict(settings_of(*plan, 8)) * (1 + off) / 2
        compiler.compare(
            t, fn, available, f"a plan for which the compiler's figure lies {side} the prediction"
        )


@fit.check("nothing fits")
def _(fn, t):
    compiler = Compiler(t, 32, 8)
    compiler.compare(t, fn, between(compiler, 0, 0) * 0.5, "nothing fits")


@fit.check("as few compilations as possible")
def _(fn, t):
    for share in (0.15, 0.35, 0.6):
        compiler = Compiler(t, 64, 8)
        questions, where = compiler.compare(t, fn, between(compiler, share, 0.5), "some plans fit")
        asked = len(compiler.asked)
        text = f"{where}: the compiler was asked {asked} times, and {questions} times would do"
        order = list(compiler.off)
        which = [order.index(compiler.plan(settings)) for settings in compiler.asked]
        t.true(asked <= questions, text, np.array(which))
        got, _ = compiler.run(t, fn, between(compiler, share, 0.5), "some plans fit")
        t.true(got in compiler.asked, f"{where}: {got} was never asked for", "never asked")


LAYERS, EMBED, MLP, TOKENS = 8, 256, 512, 1024


def stack_step(settings, rows):
    """A training step of a stack of layers, its arguments and its mesh, on four chips of a v5e that are not there."""
    values = dict(text.split("=") for text in settings)
    remat, microbatches = values["model.remat"], int(values["train.microbatches"])
    shape = int(values["mesh.data"]), int(values["mesh.fsdp"])
    mesh = Mesh(
        np.array(topology_devices(parse_target("v5e:2x2"))).reshape(shape), ("data", "fsdp")
    )

    def spec(dtype, shape, *names):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*names)))

    weights = {
        "up": spec("float32", (LAYERS, EMBED, MLP), None, "fsdp", None),
        "down": spec("float32", (LAYERS, MLP, EMBED), None, None, "fsdp"),
    }
    x = spec(
        "bfloat16", (microbatches, rows * TOKENS // microbatches, EMBED), None, ("data", "fsdp")
    )

    def layer(x_XD, w):
        h_XF = jax.nn.silu(x_XD @ w["up"].astype(x_XD.dtype))
        return x_XD + h_XF @ w["down"].astype(x_XD.dtype), None

    if remat != "none":
        policy = jax.checkpoint_policies.dots_saveable if remat == "dots" else None
        layer = jax.checkpoint(layer, policy=policy)

    def loss(w, x_XD):
        return jnp.mean(jax.lax.scan(layer, x_XD, w)[0].astype(jnp.float32) ** 2)

    def step(w, x_MXD):
        def add(total, x_XD):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x_XD)), None

        zeros = jax.tree.map(jnp.zeros_like, w)
        grads = (
            jax.lax.scan(add, zeros, x_MXD)[0] if microbatches > 1 else jax.grad(loss)(w, x_MXD[0])
        )
        return jax.tree.map(lambda w, g: w - 1e-3 * g, w, grads)

    return jax.jit(step, donate_argnums=0), (weights, x), mesh


@fit.check("the compiler for a v5e")
def _(fn, t):
    rows, asked = 32 * (206 + t.learner % 9), []
    stream = (
        2 * rows * TOKENS * EMBED / 4
    )  # bytes of the batch's hidden states on one of four chips

    def predict(settings):
        values = dict(text.split("=") for text in settings)
        kept, work = {"none": (9, 4), "dots": (3, 4), "full": (1, 6)}[values["model.remat"]]
        return stream * (1 + (LAYERS * kept + work) / int(values["train.microbatches"]))

    def ask(settings):
        asked.append(list(settings))
        if len(asked) > 4:
            return False
        step, args, mesh = stack_step(settings, rows)
        return aot.compile_step(step, args, mesh).fits

    got = fn(rows, 4, CHIPS["v5e"].usable_bytes, predict, ask)
    t.true(
        len(asked) <= 4, f"{len(asked)} compilations for a v5e: four are enough here", len(asked)
    )
    where = f"for {rows} rows on four chips of a v5e you return {got}"
    t.true(
        got is not None and list(got) == asked[-1], f"{where}, not what was asked for last", "other"
    )
    t.true("model.remat=none" in got, f"{where}, and without remat there is a way", "remat")


mistaken(
    fit,
    "believes_the_prediction",
    "You return a plan because the prediction says that it fits, without asking the compiler. The compiler has the "
    "last word: ask for the plan before you return it.",
    fit_with(compiles=False, slack=1.0),
)
mistaken(
    fit,
    "sure_of_what_fits_with_room",
    "You return a plan without asking if the prediction leaves enough room. Ask for every plan before you return it, "
    "even if you're sure.",
    fit_with(sure=1 / 1.1),
)
mistaken(
    fit,
    "microbatches_in_powers_of_two",
    "You try 1, 2, 4, 8 microbatches and leave out the numbers between. Try every M for which M times `devices` "
    "divides `rows`.",
    fit_with(tried=lambda microbatches, fsdp: power_of_two(microbatches)),
)
mistaken(
    fit,
    "fsdp_in_powers_of_two",
    "You try 1, 2, 4, 8 for `mesh.fsdp` and leave out the other divisors of `devices`, such as 3 and 6 of 12.",
    fit_with(tried=lambda microbatches, fsdp: power_of_two(fsdp)),
)
mistaken(
    fit,
    "skips_what_may_fit",
    "You skip every plan whose prediction is more than `available`. The compiler may need a tenth less than "
    "that: skip those above 1.1 times `available`.",
    fit_with(slack=1.0),
)
mistaken(
    fit,
    "asks_for_everything",
    "You ask the compiler for plans that cannot fit. Look at the prediction first: it takes milliseconds, a "
    "compilation minutes.",
    fit_with(slack=1e9),
)
mistaken(
    fit,
    "asks_to_the_end",
    "You go on asking after a plan has been accepted. The cheapest plans come first, so the first one accepted is the "
    "answer.",
    fit_with(many=True),
)
mistaken(
    fit,
    "rows_do_not_divide",
    "A microbatch's rows are divided over all devices, along data and fsdp. So M times `devices` must divide "
    "`rows`.",
    fit_with(uneven=True),
)
mistaken(
    fit,
    "fsdp_before_microbatches",
    "Your loop over `mesh.fsdp` is outside the one over microbatches. Fewer microbatches go first, and a smaller "
    "`mesh.fsdp` only among plans with equally many.",
    fit_with(order=lambda plan: (REMAT.index(plan[0]), plan[2], plan[1])),
)
mistaken(
    fit,
    "many_microbatches_first",
    "Your loop begins with many microbatches. Fewer go first.",
    fit_with(order=lambda plan: (REMAT.index(plan[0]), -plan[1], plan[2])),
)
mistaken(
    fit,
    "large_fsdp_first",
    "Among plans with equally many microbatches you try a large `mesh.fsdp` first, or you exchange it with "
    "`mesh.data`. The smallest goes first.",
    fit_with(order=lambda plan: (REMAT.index(plan[0]), plan[1], -plan[2])),
)
mistaken(
    fit,
    "most_remat_first",
    "You begin with `full`. Recomputing costs most, so `none` goes first.",
    fit_with(order=lambda plan: (-REMAT.index(plan[0]), plan[1], plan[2])),
)
mistaken(
    fit,
    "asks_only_what_surely_fits",
    "You ask only for plans that fit even at the compiler's highest figure. Skip a plan only if not even the lowest, "
    "predict / 1.1, fits.",
    fit_with(slack=1 / 1.1),
)
mistaken(
    fit,
    "remat_first",
    "You try more remat before more microbatches. Recomputing costs most here, so all plans with less of it go first.",
    fit_with(order=lambda plan: (plan[1], plan[2], REMAT.index(plan[0]))),
)
mistaken(
    fit,
    "most_careful_plan",
    "You return the plan that needs the least memory. It is also the slowest: begin with the cheapest, and stop "
    "at the first that fits.",
    fit_with(order=lambda plan: (-REMAT.index(plan[0]), -plan[1], -plan[2])),
)
mistaken(
    fit,
    "never_none",
    "You return the last plan even if nothing fits. Return None.",
    fit_with(last=True),
)

# ------------------------------------------------------------------------------- choose_mesh

choose_mesh = Exercise(
    "22.choose_mesh",
    title="Choose a mesh by its collectives",
    function="choose_mesh",
    minutes=35,
    points=20,
    statement="""
Write `choose_mesh(sizes, slices, chips, memory, ici, dcn)`. Consider all meshes (data, fsdp, tensor) of powers of
two over `slices` times `chips` chips, and find the one whose collectives take the least time. Return it with that time
and the bytes that are sent.

- Chips are numbered slice by slice and fill the mesh in order: tensor is the innermost axis, data the outermost.
  tensor stays within a slice.
- A group with m members in each of s slices works in two stages. To gather an array of X bytes, or to
  reduce-scatter it, a chip sends $X (m-1)/m$ within its slice and $(X/m)(s-1)/s$ to other slices. An
  all-reduce is both, one after the other.
- Let W = `sizes["weights"]`. In a step, fsdp gathers W / tensor twice and reduce-scatters it once; data
  all-reduces W / (tensor fsdp); and tensor all-reduces `sizes["sums"]` / (data fsdp).
- A chip stores `sizes["state"]` / (fsdp tensor), which may be at most `memory`.
- The bytes within slices are sent at `ici` bytes/s, the others at `dcn`. The time is the sum of both.
- Don't round bytes: half a byte stays half a byte, and a quarter of a byte too much doesn't fit.
""",
    hints=(
        "Take one mesh and one axis at a time. Which array is gathered or reduced, and how often? How far apart are "
        "two neighbours of a group, and how many of its members are therefore in one slice?",
        "Neighbours in a tensor group are 1 chip apart, in an fsdp group `tensor` chips, and in a data group "
        "`tensor * fsdp` chips. A group of n with that stride has m = min(n, max(1, chips // stride)) members in a "
        "slice.",
        "`gather(X, m, s)` returns the pair `X * (m - 1) / m, X / m * (s - 1) / s` with s = n / m. Add three gathers "
        "for fsdp, two for data and two for tensor, and take the `min` over all meshes that fit.",
    ),
)


def cost_with(
    *, gathers=3, reduces=2, sums_reduces=2, divided=True, stride=True, parts=True, shard=True, flat=False,
    spread=lambda d, f: d * f, slow=True, fsdp_divided=True, data_divided=True, add=lambda a, b: a + b,
    divide=lambda a, b: a / b, distances=lambda d, f, t: (t * f, t, 1), swapped=False,
    parts_alone=False, whole_within=False, whole_across=False,
):  # fmt: skip
    """What a mesh's collectives take, with a mistake that is asked for: seconds, and bytes within and across slices."""

    def cost(sizes, chips, mesh, ici, dcn):
        d, f, t = mesh

        def gather(whole, m, s):
            if flat:  # one ring through all, which crosses between slices
                n = m * s
                return (0.0, whole * (n - 1) / n) if s > 1 else (whole * (m - 1) / m, 0.0)
            across = divide(whole, m) if parts else whole
            within = whole * (m - 1) if whole_within else divide(whole * (m - 1), m)
            return within, across * (s - 1) if whole_across else divide(across * (s - 1), s)

        def group(n, distance):
            m = min(n, max(1, chips // (distance if stride else 1)))
            return m, n // m

        gathered = divide(sizes["weights"], t if divided and fsdp_divided else 1)
        reduced = divide(
            sizes["weights"], (t if divided and data_divided else 1) * (f if shard else 1)
        )
        sums = divide(sizes["sums"], spread(d, f))
        of_data, of_fsdp, of_tensor = distances(d, f, t)
        terms = (
            (gathers, gather(gathered, *group(f, of_fsdp))),
            (reduces, gather(reduced, *group(d, of_data))),
            (sums_reduces, gather(sums, *group(t, of_tensor))),
        )
        if parts_alone:
            return [[n * pair[i] for n, pair in terms] for i in range(2)]
        within, across = (sum(n * pair[i] for n, pair in terms) for i in range(2))
        rates = (dcn, ici) if swapped else (ici, dcn if slow else ici)
        return add(within / rates[0], across / rates[1]), within, across

    return cost


right_cost, parts_of_cost = cost_with(), cost_with(parts_alone=True)
MISCOUNTED = {
    "fsdp gathers twice and reduce-scatters once, three in all; you count four": cost_with(
        gathers=4
    ),
    "A chip sends X (m-1)/m within its slice; you don't divide by m": cost_with(whole_within=True),
    "A chip sends (X/m) (s-1)/s to other slices; you don't divide by s": cost_with(
        whole_across=True
    ),
    "You treat all slices as one: a group has at most as many members in a slice as fit there": None,
}


def mesh_with(
    *, memory_of=lambda d, f, t: f * t, tensors=True, wide=False, spare=False, cost=right_cost,
    divide=lambda a, b: a / b, pick=min, axes=(0, 1, 2), always=False,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(sizes, slices, chips, memory, ici, dcn):
        devices, found = slices * chips, []
        powers = [2**i for i in range(devices.bit_length())]
        for t, f in itertools.product(powers, powers):
            d = devices // (t * f)
            if d < 1 or (t > chips and not wide) or (t > 1 and not tensors):
                continue
            needed = divide(sizes["state"], memory_of(d, f, t))
            if needed > memory or (spare and needed == memory):
                continue
            named = tuple((d, f, t)[axis] for axis in axes)
            found.append((named, *cost(sizes, chips, (d, f, t), ici, dcn)))
        return pick(found, key=lambda mesh: mesh[1]) if found or always else None

    return fn


right_mesh = mesh_with()


def drawn_sizes(t, sums):
    weights = int(t.rng.integers(10, 200)) * 10**9 + t.learner % 10**9
    return {
        "weights": weights, "state": 6 * weights, "sums": int(weights * sums * t.rng.uniform(0.9, 1.1)),
    }  # fmt: skip


def case(why, sizes, slices, chips, room, ici=90e9, dcn=3e9, memory=None):
    """Arguments, and what they are for. `room` is the least number of parts of the state that fit."""
    memory = -(-sizes["state"] // room) if memory is None else memory
    text = f"{why}: {slices} slices of {chips} chips, at least {room} parts of the state"
    return text, (sizes, slices, chips, memory, ici, dcn)


def chooses(fn, t, *cases):
    """All the answers are observed, not the first wrong one alone: two mistakes often agree on one."""
    answers = [fn(*args) for _, args in cases]
    seen = np.zeros((len(cases), 6))
    for row, got in zip(seen, answers, strict=True):
        if got is not None:
            formed = isinstance(got, (tuple, list)) and len(got) == 4
            formed = formed and isinstance(got[0], (tuple, list)) and len(got[0]) == 3
            form = "((data, fsdp, tensor), seconds, bytes within a slice, bytes to other slices)"
            t.true(formed, f"got {got}, want the form {form}", "form")
            row[:] = [float(n) for n in (*got[0], *got[1:])]
    like = seen.copy()  # numbers of like size, so that each counts
    like[:, :3] = np.log2(np.maximum(seen[:, :3], 1))
    for row, (_, args) in zip(like, cases, strict=True):
        row[3:] /= args[0]["weights"] / args[4], args[0]["weights"], args[0]["weights"]
    for (where, args), got, row in zip(cases, answers, seen, strict=True):
        sizes, slices, chips, _, ici, dcn = args
        want = right_mesh(*args)
        if want is None or got is None:
            t.true(got is want, f"{where}: got {got}, want {want}", like)
            continue
        mesh = tuple(int(n) for n in row[:3])
        if math.prod(mesh) == slices * chips and 1 <= mesh[2] <= chips:
            # What is wrong in the bytes says more than the mesh that follows from it.
            right = right_cost(sizes, chips, mesh, ici, dcn)
            names = "seconds", "bytes within a slice", "bytes to other slices"
            for name, g, w in [*zip(names, row[3:], right, strict=True)][::-1]:
                near = abs(g - w) <= 1e-6 * (name != "seconds") + 1e-9 * abs(w)
                told = f"{where}: {name} for the mesh {mesh}: got {g:.12g}, want {w:.12g}"
                if name != "seconds":
                    sent = parts_of_cost(sizes, chips, mesh, ici, dcn)[name == names[2]]
                    told += "; fsdp's collectives send {:.6g} of it, data's {:.6g} and tensor's {:.6g}".format(
                        *sent
                    )
                for text, cost in MISCOUNTED.items():
                    other = (cost or right_cost)(
                        sizes, chips if cost else slices * chips, mesh, ici, dcn
                    )
                    if not near and abs(
                        g - dict(zip(names, other, strict=True))[name]
                    ) <= 1e-9 * abs(g):
                        told += f". {text}"
                        break
                t.true(near, told, seen)
        text = f"{where}: got the mesh {mesh}, want {want[0]}"
        if math.prod(mesh) != slices * chips:
            text += f"; {mesh} is not a mesh of {slices * chips} chips"
        elif mesh[2] > chips:
            text += "; tensor spans slices"
        elif sizes["state"] > args[3] * mesh[1] * mesh[2]:
            text += f"; in {mesh} the state doesn't fit: a chip stores state / (fsdp tensor)"
        elif mesh != want[0]:
            part = want[0][1] * want[0][2]
            text += f"; bytes and seconds of {mesh} are right, but {want[0]} takes less, "
            text += f"and its 1/{part} of the state fits"
        t.true(mesh == want[0], text, like)


@choose_mesh.check("one slice, no sums worth naming")
def _(fn, t):
    shapes = (16, 8), (64, 16), (64, 4), (32, 1)
    cases = (case("one slice", drawn_sizes(t, 1e3), 1, chips, room) for chips, room in shapes)
    chooses(fn, t, *cases)


@choose_mesh.check("one slice, few tokens")
def _(fn, t):
    sums = 0.02, 0.5, 3.0
    chooses(fn, t, *(case("few tokens", drawn_sizes(t, share), 1, 64, 8) for share in sums))


@choose_mesh.check("several slices, the state fits into one")
def _(fn, t):
    shapes = (2, 16, 8), (4, 64, 64), (8, 16, 2)
    chooses(fn, t, *(case("several slices", drawn_sizes(t, 1e3), *shape) for shape in shapes))


@choose_mesh.check("a state that needs more than a slice")
def _(fn, t):
    shapes = itertools.product(((4, 16, 32), (8, 8, 64), (8, 4, 16)), (1e3, 2.0))
    chooses(fn, t, *(case("a large state", drawn_sizes(t, sums), *shape) for shape, sums in shapes))


@choose_mesh.check("nothing fits, and what just fits")
def _(fn, t):
    sizes = drawn_sizes(t, 5.0)
    to_the_byte = sizes | {"state": sizes["state"] - sizes["state"] % 16}
    chooses(
        fn, t,
        case("nothing fits", sizes, 2, 8, 17),
        case("it fits to the byte", to_the_byte, 2, 8, 16),
    )  # fmt: skip


@choose_mesh.check("fractions of a byte")
def _(fn, t):
    sizes = {"weights": 1001, "state": 16 * 63 + 1, "sums": 333}
    few = {"weights": 1001, "state": 1000, "sums": 33}
    chooses(
        fn, t,
        case("a sixteenth of a byte does not fit", sizes, 2, 16, 17, memory=63),
        case("small numbers", sizes, 4, 16, 4),
        case("small numbers", few, 4, 16, 2),
    )  # fmt: skip


@choose_mesh.check("networks of other speeds")
def _(fn, t):
    chooses(fn, t, *(
        case(f"{dcn:.0e} bytes/s between slices", drawn_sizes(t, sums), 4, 32, 4, dcn=dcn)
        for dcn in (1e8, 3e10, 4e11) for sums in (0.3, 4.0, 60.0)
    ))  # fmt: skip
    chooses(fn, t, *(
        case(f"{ici:.0e} bytes/s within a slice", drawn_sizes(t, 4.0), 4, 32, 4, ici=ici)
        for ici in (5e9, 4.5e10, 1.2e12)
    ))  # fmt: skip


mistaken(
    choose_mesh,
    "one_ring_for_all",
    "You use one ring through all slices. A group that spans slices works in two stages, one within the slice and "
    "one across, and only 1/m of the array crosses.",
    mesh_with(cost=cost_with(flat=True)),
)
mistaken(
    choose_mesh,
    "whole_array_crosses",
    "You send the whole array between slices. A gather crosses first and a reduce-scatter last, so a chip sends only "
    "parts of its own 1/m of the array across.",
    mesh_with(cost=cost_with(parts=False)),
)
mistaken(
    choose_mesh,
    "neighbours_of_every_axis",
    "You treat every group's members as adjacent chips. In an fsdp group they are tensor chips apart, in a data group "
    "tensor times fsdp, so fewer of them share a slice.",
    mesh_with(cost=cost_with(stride=False)),
)
mistaken(
    choose_mesh,
    "gathered_once",
    "fsdp gathers the weights for the forward pass and again for the backward pass: with the gradients' "
    "reduce-scatter that is three times.",
    mesh_with(cost=cost_with(gathers=2)),
)
mistaken(
    choose_mesh,
    "gradients_reduced_once",
    "An all-reduce is a reduce-scatter and an all-gather: count data's twice.",
    mesh_with(cost=cost_with(reduces=1)),
)
mistaken(
    choose_mesh,
    "whole_gradient_over_data",
    "In your count, data sums the whole gradient. But fsdp has left each chip only a part of it: W / (tensor fsdp).",
    mesh_with(cost=cost_with(shard=False)),
)
mistaken(
    choose_mesh,
    "state_divided_by_data",
    "You divide the state over data too. But data makes copies: a chip stores state / (fsdp tensor).",
    mesh_with(memory_of=lambda d, f, t: d * f * t),
)
mistaken(
    choose_mesh,
    "room_to_spare",
    "You leave out a mesh whose state fits exactly. A chip stores state / (fsdp tensor) and nothing else, and that may "
    "equal `memory`.",
    mesh_with(spare=True),
)
mistaken(
    choose_mesh,
    "memory_forgotten",
    "You accept meshes whose state doesn't fit: a chip has `memory` bytes for state / (fsdp tensor).",
    mesh_with(memory_of=lambda d, f, t: math.inf),
)
mistaken(
    choose_mesh,
    "whole_weights",
    "tensor divides the weights, too: what fsdp gathers is W / tensor, and data sums a part of that.",
    mesh_with(cost=cost_with(divided=False)),
)
mistaken(
    choose_mesh,
    "fsdp_gathers_whole_weights",
    "tensor divides what fsdp gathers, too: W / tensor. You have that right for data alone.",
    mesh_with(cost=cost_with(fsdp_divided=False)),
)
mistaken(
    choose_mesh,
    "data_reduces_every_tensor_part",
    "tensor divides what data sums, too: W / (tensor fsdp). You divide by fsdp alone.",
    mesh_with(cost=cost_with(data_divided=False)),
)
mistaken(
    choose_mesh,
    "slower_network_alone",
    "You take the longer of the two networks' times. Here the stages follow each other: the time is their sum.",
    mesh_with(cost=cost_with(add=max)),
)
mistaken(
    choose_mesh,
    "rounded_bytes",
    "You round the bytes that are sent: `//` is not `/`.",
    mesh_with(cost=cost_with(divide=lambda a, b: a // b)),
)
mistaken(
    choose_mesh,
    "rounded_state",
    "You round the bytes of the state down, and so accept a mesh that lacks a fraction of a byte. Divide with `/`.",
    mesh_with(divide=lambda a, b: a // b),
)
mistaken(
    choose_mesh,
    "sums_reduced_once",
    "An all-reduce is a reduce-scatter and an all-gather: count tensor's twice.",
    mesh_with(cost=cost_with(sums_reduces=1)),
)
mistaken(
    choose_mesh,
    "sums_not_divided_by_fsdp",
    "fsdp divides the batch as data does: tensor sums `sizes['sums']` / (data fsdp).",
    mesh_with(cost=cost_with(spread=lambda d, f: d)),
)
mistaken(
    choose_mesh,
    "sums_not_divided_by_data",
    "data divides the batch as fsdp does: tensor sums `sizes['sums']` / (data fsdp).",
    mesh_with(cost=cost_with(spread=lambda d, f: f)),
)
mistaken(
    choose_mesh,
    "sums_of_the_whole_batch",
    "A chip sums its own rows' activations with tensor's other members: `sizes['sums']` / (data fsdp).",
    mesh_with(cost=cost_with(spread=lambda d, f: 1)),
)
mistaken(
    choose_mesh,
    "fsdp_innermost",
    "In your numbering fsdp is the innermost axis. It is tensor: neighbours in an fsdp group are tensor chips apart.",
    mesh_with(cost=cost_with(distances=lambda d, f, t: (t * f, 1, f))),
)
mistaken(
    choose_mesh,
    "data_innermost",
    "You number the chips with data innermost and tensor outermost. It is the other way round, so data is the first "
    "axis to span slices.",
    mesh_with(cost=cost_with(distances=lambda d, f, t: (1, d, d * f))),
)
mistaken(
    choose_mesh,
    "state_divided_by_fsdp_alone",
    "You divide the state by fsdp alone. tensor divides it too: a chip stores state / (fsdp tensor).",
    mesh_with(memory_of=lambda d, f, t: f),
)
mistaken(
    choose_mesh,
    "rates_swapped",
    "You divide the bytes within a slice by `dcn` and the others by `ici`. `ici` is the rate within a slice.",
    mesh_with(cost=cost_with(swapped=True)),
)
mistaken(
    choose_mesh,
    "axes_turned_around",
    "Your mesh has its axes in another order than (data, fsdp, tensor).",
    mesh_with(axes=(2, 1, 0)),
)
mistaken(
    choose_mesh,
    "the_slowest_mesh",
    "You return the mesh that takes the most time. Look for the least.",
    mesh_with(pick=max),
)
mistaken(
    choose_mesh,
    "an_error_where_nothing_fits",
    "You look for the best of no meshes at all. If the state fits on none, return None.",
    mesh_with(always=True),
)
mistaken(
    choose_mesh,
    "no_tensor",
    "You choose no tensor axis where it would be faster. With few tokens and many weights it sends less than fsdp: try "
    "it as well, and compare the seconds.",
    mesh_with(tensors=False),
)
mistaken(
    choose_mesh,
    "one_network",
    "You send the bytes between slices at the rate of those within. They have their own rate, `dcn`.",
    mesh_with(cost=cost_with(slow=False)),
)
mistaken(
    choose_mesh,
    "tensor_across_slices",
    "You let tensor span slices. It must stay within one, because it sums several times in every layer.",
    mesh_with(wide=True),
)

# ----------------------------------------------------------------------------------- overlap

overlap = Exercise(
    "22.overlap",
    title="Read the overlap from a schedule",
    function="overlap",
    minutes=25,
    points=15,
    statement="""
Write `overlap(schedule, seconds)`. Walk along a schedule with one clock for the arithmetic and a queue for each
link, and find how much of each transfer is hidden and how much is exposed.

- An opcode that ends in `-start` begins a transfer and takes none of the arithmetic's time. `copy-start` uses the link
  to the host, all others the interconnect. A link carries one transfer after the other, in the order of their starts.
- The opcode that ends in `-done` has the start as its first operand and waits until that transfer has arrived. It takes
  no time of its own, even if `seconds` has an entry for it. Every start has its done.
- A plain `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all` or `collective-permute` is a transfer too, and the
  arithmetic waits for it at once.
- Everything else takes `seconds[name]` of the arithmetic's time, or none if it has no entry.
- `exposed` is how long the arithmetic waits for a transfer. `hidden` is the rest of that transfer's seconds, and never
  less than 0.
""",
    hints=(
        "Keep three things while you walk: the clock, when each link will be free, and when each transfer that has "
        "been started will arrive.",
        "A transfer begins once it has been started *and* its link is free. At its done, if the arrival is later than "
        "the clock, the difference is the wait, and the clock moves on by it.",
        "`arrival[name] = max(clock, free.get(link, 0.0)) + seconds[name]`, and the link is free again at that time. "
        "At the done: `exposed = max(0.0, arrival[start] - clock)`, `hidden = max(0.0, seconds[start] - exposed)`.",
    ),
)

BLOCKING = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def overlap_with(
    *, queue=True, links=True, blocking=True, hides=True, last=False, advance=True, negative=False, own=True,
    late=False, ahead=False, done_takes=0.0, early=False, each=False, start_takes=0.0, own_part=1.0, oldest=False,
    held=False, kinds=BLOCKING, stops=True, frees=False, start_stops=False, copies=False,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(schedule, seconds):
        clock, free, arrival, waits, begun = 0.0, {}, {}, {}, []
        seconds = {name: seconds.get(name, 0.0) for name, _, _ in schedule}
        for name, opcode, operands in schedule:
            if opcode.endswith("-done"):
                start = begun.pop(0 if oldest else -1) if last or oldest else operands[0]
                clock += done_takes * seconds.get(name, 0.0)
                if late:
                    arrival[start] = clock + seconds[start]
            elif opcode.endswith("-start") or opcode in kinds or (copies and opcode == "copy"):
                start = name
                begun.append(name)
                link = "host" if opcode.startswith("copy") and links else "ici"
                link = opcode.removesuffix("-start") if each else link
                clock += start_takes * seconds[name] * opcode.endswith("-start")
                pushes_in = ahead and opcode in BLOCKING
                begins = max(clock, free.get(link, 0.0)) if queue and not pushes_in else clock
                begins = free.get(link, 0.0) if early else begins
                arrival[name] = begins + seconds[name]
                free[link] = arrival[name] if frees else max(free.get(link, 0.0), arrival[name])
                clock += start_stops * seconds[name] * opcode.endswith("-start")
                if opcode.endswith("-start"):
                    continue
                begun.pop()
                if not blocking:
                    waits[name] = seconds[name], 0.0
                    continue
            else:
                clock += seconds.get(name, 0.0)
                continue
            exposed = arrival[start] - clock if hides else seconds[start]
            exposed = exposed if negative else max(0.0, exposed)
            hidden = seconds[start] - own_part * exposed
            waits[start] = (max(0.0, hidden) if own else hidden), exposed
            clock += exposed if advance and (stops or opcode.endswith("-done")) else 0.0
            if held and opcode.endswith("-done"):
                free["host" if opcode == "copy-done" else "ici"] = clock
        return clock, waits

    return fn


right_overlap = overlap_with()


def with_entries(schedule, seconds):
    return {name: seconds[name] for name, opcode, _ in schedule if not opcode.endswith("-done")}


def only_with_time(total, waits):
    return total, {name: pair for name, pair in waits.items() if any(pair)}


def without_waits(total, waits):
    return total - sum(exposed for _, exposed in waits.values()), waits


def turned_around(total, waits):
    return total, {name: pair[::-1] for name, pair in waits.items()}


def course(schedule, seconds):
    """For each transfer its start, when its link carries it, and its done, in words."""
    clock, free, begun, told = 0.0, {}, {}, {}
    before = {}  # the last transfer of each link
    for name, opcode, operands in schedule:
        took = seconds.get(name, 0.0)
        if opcode.endswith("-start") or opcode in BLOCKING:
            link = "host" if opcode == "copy-start" else "ici"
            begins = max(clock, free.get(link, 0.0))
            behind = f", after {before[link]}," if begins > clock else ""
            begun[name], before[link] = (clock, begins, begins + took, behind), name
            free[link] = begins + took
        if opcode.endswith("-done") or opcode in BLOCKING:
            start = operands[0] if opcode.endswith("-done") else name
            at, begins, arrives, behind = begun[start]
            told[start] = (
                f"its start comes at {at:g} s, it begins on its link{behind} at {begins:g} s and arrives "
            )
            told[start] += f"at {arrives:g} s, and the arithmetic needs it at {clock:g} s"
            clock = max(clock, arrives)
        elif not opcode.endswith("-start"):
            clock += took
    return told


def named_after_dones(schedule, total, waits):
    done = {operands[0]: name for name, opcode, operands in schedule if opcode.endswith("-done")}
    return total, {done.get(name, name): pair for name, pair in waits.items()}


def without_blocking(schedule, total, waits):
    return total, {name: waits[name] for name, opcode, _ in schedule if opcode.endswith("-start")}


def walked(t, fn, schedule, seconds, why):
    total, waits = fn(schedule, seconds)
    t.true(
        isinstance(waits, dict),
        f"{why}: waits is {type(waits).__name__}, want a dict",
        type(waits).__name__,
    )
    right_total, right_waits = right_overlap(schedule, seconds)
    for name, opcode, _ in schedule:
        if name in waits and name not in right_waits:
            kind = "no transfer"
            if "-done" in opcode:
                kind = "a done; a transfer has the name of its start"
            told = f"{why}: {name} ({opcode}) is in your dict, but it is {kind}"
            t.true(False, told, sorted(waits))
    for name, opcode, _ in schedule:
        if name in right_waits:
            told = f"{why}: {name} ({opcode}) is a transfer, and your dict lacks it"
            t.true(name in waits, told, sorted(waits))
    t.equal(sorted(waits), sorted(right_waits), why=f"{why}: the transfers that are reported")
    # In the order of the schedule: what is wrong first says more than what follows from it.
    names = [name for name, _, _ in schedule if name in right_waits]
    for name in names:
        pair = isinstance(waits[name], (tuple, list)) and len(waits[name]) == 2
        t.true(pair, f"{why}: {name} has {waits[name]!r}, want a pair (hidden, exposed)", "no pair")
    got = np.array([[float(x) for x in waits[name]] for name in names])
    want = np.array([right_waits[name] for name in names])
    t.equal(got.shape, want.shape, why=f"{why}: a pair (hidden, exposed) for each transfer")
    off = ~np.isclose(got, want, 1e-9, 1e-12).all(axis=1)
    if off.any():
        i = int(np.argmax(off))
        text = f"(hidden, exposed) of {names[i]} are ({got[i][0]:g}, {got[i][1]:g})"
        text += f", want ({want[i][0]:g}, {want[i][1]:g}); {off.sum()} of {len(names)} transfers are off"
        (hidden, exposed), took = got[i], seconds.get(names[i], 0.0)
        times = float(got.sum() / want.sum()) if want.any() else 0.0
        if any(np.isclose(times, 10.0**n) for n in (-9, -6, -3, 3, 6, 9)) and np.allclose(
            got, times * want
        ):
            text += f"; all pairs are {times:g} times what they should be: times are in seconds"
        elif hidden > took and np.isclose(exposed, want[i][1]):
            text += f"; a transfer of {took:g} s can't hide more than that"
        elif np.isclose(exposed, want[i][1]):
            text += f"; the wait is right, and hidden is the rest of the transfer's {took:g} s"
        elif exposed <= took < want[i][1]:
            text += f"; it takes {took:g} s, but the arithmetic also waits while the link carries those before it"
        elif np.isclose(hidden + exposed, took):
            much = "long" if exposed > want[i][1] else "briefly"
            text += f"; they sum to its {took:g} s, but the arithmetic waits too {much}"
        t.true(False, f"{why}: {text}. {course(schedule, seconds)[names[i]].capitalize()}", got)
    waited = sum(exposed for _, exposed in right_waits.values())
    told = (
        "every pair is right, but not the total, the clock at the end: here the arithmetic takes "
    )
    told += f"{right_total - waited:g} s, and waits for {waited:g} s"
    t.close(float(total), right_total, 1e-9, 1e-12, f"{why}: {told}")


def ticks(t, count):
    """Seconds that are sums of powers of two, so that no order of adding rounds them."""
    return [int(n) / 1024 for n in t.rng.integers(100, 900, count)]


@overlap.check("one transfer, behind enough arithmetic and behind too little")
def _(fn, t):
    a, b = ticks(t, 2)
    schedule = [
        ("s.1", "all-gather-start", ("p.1",)),
        ("f.1", "fusion", ("p.2",)),
        ("d.1", "all-gather-done", ("s.1",)),
        ("f.2", "fusion", ("d.1",)),
    ]
    for long, why in ((a + b, "too little arithmetic"), (a / 4, "enough arithmetic")):
        walked(t, fn, schedule, {"s.1": long, "f.1": a, "f.2": b}, why)


@overlap.check("a collective that blocks")
def _(fn, t):
    a, b, c = ticks(t, 3)
    schedule = [
        ("f.1", "fusion", ()),
        ("r.1", "all-reduce", ("f.1",)),
        ("f.2", "fusion", ("r.1",)),
        ("g.1", "all-gather", ("f.2",)),
        ("r.2", "reduce-scatter", ("g.1",)),
    ]
    why = "neither f.2 nor r.2 takes time"
    walked(t, fn, schedule, {"f.1": a, "r.1": b, "g.1": c}, why)


@overlap.check("every kind that blocks")
def _(fn, t):
    for opcode in BLOCKING:
        a, b = ticks(t, 2)
        schedule = [("f.1", "fusion", ()), ("r.1", opcode, ("f.1",)), ("f.2", "fusion", ("r.1",))]
        walked(t, fn, schedule, {"f.1": a, "r.1": b, "f.2": a}, f"{opcode} without start and done")


@overlap.check("two transfers over one link")
def _(fn, t):
    a, b, c, d = ticks(t, 4)
    schedule = [
        ("s.1", "all-gather-start", ("p.1",)),
        ("s.2", "collective-permute-start", ("p.2",)),
        ("f.1", "fusion", ()),
        ("d.1", "all-gather-done", ("s.1",)),
        ("f.2", "fusion", ()),
        ("d.2", "collective-permute-done", ("s.2",)),
    ]
    walked(t, fn, schedule, {"s.1": a + d, "s.2": b + d, "f.1": c / 4, "f.2": d / 4}, "one link")


@overlap.check("a collective that blocks behind others")
def _(fn, t):
    a, b, c, d = ticks(t, 4)
    schedule = [
        ("s.1", "all-gather-start", ("p.1",)),
        ("f.1", "fusion", ()),
        ("r.1", "all-reduce", ("f.1",)),
        ("f.2", "fusion", ("r.1",)),
        ("d.1", "all-gather-done", ("s.1",)),
        ("g.1", "all-to-all", ("d.1",)),
    ]
    seconds = {"s.1": 1 + a, "f.1": a / 2, "r.1": b, "f.2": c, "g.1": d}
    walked(t, fn, schedule, seconds, "an all-reduce while the link is busy")


@overlap.check("a done with seconds of its own")
def _(fn, t):
    a, b, c, d = ticks(t, 4)
    schedule = [
        ("s.1", "reduce-scatter-start", ("p.1",)),
        ("c.1", "copy-start", ("p.2",)),
        ("f.1", "fusion", ()),
        ("d.1", "reduce-scatter-done", ("s.1",)),
        ("e.1", "copy-done", ("c.1",)),
    ]
    seconds = {"s.1": a + b, "c.1": d / 8, "f.1": a, "d.1": b, "e.1": c}
    walked(t, fn, schedule, seconds, "seconds has the dones as well")


@overlap.check("arithmetic of every kind")
def _(fn, t):
    a, b, c, d = ticks(t, 4)
    schedule = [
        ("s.1", "collective-permute-start", ("p.1",)),
        ("f.1", "fusion", ()),
        ("v.1", "convolution", ("f.1",)),
        ("k.1", "custom-call", ("v.1",)),
        ("b.1", "bitcast", ("k.1",)),
        ("c.1", "copy", ("b.1",)),
        ("d.1", "collective-permute-done", ("s.1",)),
    ]
    seconds = {"s.1": a + b + c + d, "f.1": a / 2, "v.1": b, "k.1": c, "c.1": d / 2}
    walked(t, fn, schedule, seconds, "a copy within the chip takes time of the arithmetic's")


@overlap.check("three transfers over one link")
def _(fn, t):
    a, b, c, d = ticks(t, 4)
    schedule = [
        ("s.1", "all-gather-start", ("p.1",)),
        ("s.2", "all-gather-start", ("p.2",)),
        ("f.1", "fusion", ()),
        ("d.1", "all-gather-done", ("s.1",)),
        ("s.3", "all-gather-start", ("p.3",)),
        ("f.2", "fusion", ()),
        ("d.3", "all-gather-done", ("s.3",)),
        ("d.2", "all-gather-done", ("s.2",)),
    ]
    seconds = {"s.1": a, "s.2": 1 + b, "s.3": c, "f.1": a / 2, "f.2": d / 8}
    walked(t, fn, schedule, seconds, "a third begins while the second is under way")


@overlap.check("a copy to the host beside them")
def _(fn, t):
    a, b, c = ticks(t, 3)
    schedule = [
        ("c.1", "copy-start", ("p.1",)),
        ("s.1", "reduce-scatter-start", ("p.2",)),
        ("f.1", "fusion", ()),
        ("d.1", "reduce-scatter-done", ("s.1",)),
        ("e.1", "copy-done", ("c.1",)),
    ]
    walked(t, fn, schedule, {"c.1": 3 + a, "s.1": 1 + b, "f.1": c}, "two links")


@overlap.check("a collective that blocks beside a copy")
def _(fn, t):
    a, b, c = ticks(t, 3)
    schedule = [
        ("r.1", "all-reduce", ("p.1",)),
        ("c.1", "copy-start", ("p.2",)),
        ("r.2", "all-gather", ("p.3",)),
        ("c.2", "copy-start", ("p.4",)),
        ("e.1", "copy-done", ("c.1",)),
        ("e.2", "copy-done", ("c.2",)),
    ]
    seconds = {"r.1": a, "c.1": b / 4, "r.2": 1 + b, "c.2": c}
    walked(t, fn, schedule, seconds, "copies to the host, and collectives that block")


@overlap.check("dones in another order than the starts")
def _(fn, t):
    a, b, c, d = ticks(t, 4)
    schedule = [
        ("s.1", "all-gather-start", ("p.1",)),
        ("f.1", "fusion", ()),
        ("s.2", "all-gather-start", ("p.2",)),
        ("f.2", "fusion", ()),
        ("d.1", "all-gather-done", ("s.1", "f.2")),
        ("f.3", "fusion", ()),
        ("d.2", "all-gather-done", ("s.2",)),
        ("r.1", "all-reduce", ("d.2",)),
    ]
    seconds = {"s.1": 1 + a, "s.2": 1 + b, "f.1": c / 8, "f.2": d / 8, "f.3": a / 8, "r.1": b}
    walked(t, fn, schedule, seconds, "dones out of order")
    order = [0, 2, 1, 3, 6, 5, 4, 7]
    walked(t, fn, [schedule[i] for i in order], seconds, "the second one's done first")


@overlap.check("a schedule of your own")
def _(fn, t):
    draw = t.learner
    schedule, seconds, open_ = [], {}, []
    kinds = ("all-gather", "reduce-scatter", "collective-permute", "copy")
    for i in range(60):
        draw = (draw * 1103515245 + 12345) % 2**31
        choice, ticks_ = draw // 2**16 % 4, 1 + draw // 2**8 % 700
        if choice == 0:
            kind = kinds[draw // 2**20 % 4]
            schedule.append((f"s.{i}", f"{kind}-start", (f"p.{i}",)))
            open_.append((f"s.{i}", kind))
            seconds[f"s.{i}"] = 3 * ticks_ / 1024
        elif choice == 1 and open_:
            start, kind = open_.pop(draw // 2**20 % len(open_))
            schedule.append((f"d.{i}", f"{kind}-done", (start,)))
        elif choice == 2 and i % 5 == 0:
            schedule.append((f"r.{i}", "all-reduce", ()))
            seconds[f"r.{i}"] = ticks_ / 1024
        else:
            schedule.append((f"f.{i}", "fusion", ()))
            seconds[f"f.{i}"] = ticks_ / 1024
    schedule += [(f"z.{start}", f"{kind}-done", (start,)) for start, kind in open_]
    walked(t, fn, schedule, seconds, "sixty instructions")


mistaken(
    overlap,
    "no_queue",
    "You let all transfers run at once. A link carries one after the other: a transfer begins when its link is free.",
    overlap_with(queue=False),
)
mistaken(
    overlap,
    "one_queue_for_all",
    "Your copy to the host waits for the interconnect, or the other way round. They are two links, each with its own "
    "queue.",
    overlap_with(links=False),
)
mistaken(
    overlap,
    "nothing_blocks",
    "You treat a collective without start and done as hidden. The arithmetic waits for it at once.",
    overlap_with(blocking=False),
)
mistaken(
    overlap,
    "nothing_hides",
    "You count each whole transfer as exposed. The part that overlapped with arithmetic since the start is hidden: at "
    "the done, wait only for the rest.",
    overlap_with(hides=False),
)
mistaken(
    overlap,
    "begins_at_the_done",
    "You begin the transfer at its done. It has been under way since its start.",
    overlap_with(late=True),
)
mistaken(
    overlap,
    "latest_start",
    "You match a done with the latest start. Its first operand says which start is meant.",
    overlap_with(last=True),
)
mistaken(
    overlap,
    "oldest_start",
    "You match a done with the oldest start that is open. Dones come in any order: the first operand says which start "
    "is meant.",
    overlap_with(oldest=True),
)
mistaken(
    overlap,
    "held_until_the_done",
    "Your done sets the time at which the link is free. The link is free once the transfer has arrived, and may have "
    "more in its queue by then.",
    overlap_with(held=True),
)
mistaken(
    overlap,
    "no_permute",
    "You leave out a kind of collective that blocks; there are five.",
    overlap_with(kinds=BLOCKING[:4]),
)
mistaken(
    overlap,
    "clock_stands",
    "You record the wait but don't advance the clock. Time goes on while the arithmetic waits.",
    overlap_with(advance=False),
)
mistaken(
    overlap,
    "goes_on_beside_one_that_blocks",
    "You record the wait for a collective that blocks, but your clock doesn't move on by it.",
    overlap_with(stops=False),
)
mistaken(
    overlap,
    "waits_twice",
    "Your total counts the waits twice: the clock has moved on by them already.",
    lambda *args: (2 * (a := right_overlap(*args))[0] - without_waits(*a)[0], a[1]),
)
mistaken(
    overlap,
    "waits_less_than_nothing",
    "A transfer that arrived long ago exposes nothing. You count a negative wait, and turn the clock back.",
    overlap_with(negative=True),
)
mistaken(
    overlap,
    "blocks_ahead_of_the_queue",
    "You begin a blocking collective at once, ahead of transfers that its link still carries. It queues like the "
    "others, and the arithmetic waits for all of them.",
    overlap_with(ahead=True),
)
mistaken(
    overlap,
    "blocks_and_clears_the_queue",
    "You begin a blocking collective at once, and forget what its link still carries. It queues like the others, and "
    "the arithmetic waits for all of them.",
    overlap_with(ahead=True, frees=True),
)
mistaken(
    overlap,
    "start_stops_the_clock",
    "Your clock moves on by a transfer's seconds at its start. The arithmetic goes on at once: only a done waits.",
    overlap_with(start_stops=True),
)
mistaken(
    overlap,
    "a_copy_is_no_transfer",
    "You treat a plain `copy` as a transfer. It's arithmetic within the chip; only `copy-start` begins a transfer.",
    overlap_with(copies=True),
)
mistaken(
    overlap,
    "leaves_out_what_takes_no_time",
    "You leave out transfers that take no time. Every transfer has its (hidden, exposed), if only (0, 0).",
    lambda schedule, seconds: only_with_time(*right_overlap(schedule, seconds)),
)
mistaken(
    overlap,
    "both_turned_around",
    "Your pairs are turned around: first the seconds that are hidden, then those that are exposed.",
    lambda schedule, seconds: turned_around(*right_overlap(schedule, seconds)),
)
mistaken(
    overlap,
    "needs_an_entry",
    "You look for a name in `seconds` that isn't there. A name without an entry takes no time, whether "
    "it computes or is a transfer: `seconds.get(name, 0.0)`.",
    lambda *args: right_overlap(args[0], with_entries(*args)),
)
mistaken(
    overlap,
    "done_takes_time",
    "You charge the done with the seconds under its name. It only waits for its transfer and takes no time of its own.",
    overlap_with(done_takes=1.0),
)
mistaken(
    overlap,
    "a_link_for_each_kind",
    "You give each kind of transfer a link of its own. All but copies to the host share the interconnect.",
    overlap_with(each=True),
)
mistaken(
    overlap,
    "start_takes_time",
    "Your clock moves on by a transfer's seconds at its start. The arithmetic goes on at once: only a done waits.",
    overlap_with(start_takes=1.0),
)
mistaken(
    overlap,
    "begins_before_its_start",
    "You begin a transfer when its link is free, even if that is before its start. It begins at the later of the two.",
    overlap_with(early=True),
)
mistaken(
    overlap,
    "nothing_taken_off",
    "You count a transfer's whole time as hidden, also what is exposed. Hidden is the rest.",
    overlap_with(own_part=0.0),
)
mistaken(
    overlap,
    "total_of_all_seconds",
    "Your total sums all seconds, as if nothing overlapped. It is the clock at the end: what is hidden takes no time.",
    lambda schedule, seconds: (sum(seconds.values()), right_overlap(schedule, seconds)[1]),
)
mistaken(
    overlap,
    "total_without_waits",
    "Your total is the arithmetic's time alone. The waits are part of the schedule too.",
    lambda *args: without_waits(*right_overlap(*args)),
)
mistaken(
    overlap,
    "an_error_without_an_entry",
    "Your answer fails at a name that `seconds` lacks. A name without an entry takes no time.",
    lambda *args: right_overlap(args[0], {name: args[1][name] for name, _, _ in args[0]}),
)
mistaken(
    overlap,
    "done_by_name",
    "You look for a done's start by its name or opcode. Names say nothing: its first operand is the start.",
    lambda schedule, seconds: right_overlap(
        [(a, b, (a.replace("done", "start"),) if b.endswith("-done") else c) for a, b, c in schedule], seconds
    ),
)  # fmt: skip
mistaken(
    overlap,
    "named_after_dones",
    "You report a transfer under the name of its done. It has the name of its start.",
    lambda *args: named_after_dones(args[0], *right_overlap(*args)),
)
mistaken(
    overlap,
    "starts_alone",
    "You report only transfers that have a start and a done. A collective that blocks is a transfer too.",
    lambda *args: without_blocking(args[0], *right_overlap(*args)),
)
mistaken(
    overlap,
    "exposes_its_own_seconds_at_most",
    "A collective that blocks waits for the transfers before it on its link as well: `exposed` is all of that wait, "
    "and may be longer than its own seconds.",
    lambda schedule, seconds: (
        (found := right_overlap(schedule, seconds))[0],
        {name: (h, min(e, seconds.get(name, 0.0))) for name, (h, e) in found[1].items()},
    ),
)
mistaken(
    overlap,
    "hides_less_than_nothing",
    "A transfer that had to queue can expose more than its own seconds. Then its hidden part is 0, not negative.",
    overlap_with(own=False),
)

# ---------------------------------------------------------------------------------- interval

interval = Exercise(
    "22.interval",
    title="The fastest and the slowest that a step can be",
    function="interval",
    minutes=20,
    points=10,
    statement="""
Write `interval(program, rates)`. It returns the time of a step if everything overlaps, and if nothing does.

- `program["main"]` is a list of (opcode, what). For a `"while"`, `what` is (body, trips): the name of another list in
  `program`, and how many times it runs. A body may contain loops, two loops may share a body, and trips may be 0.
- A `"fusion"` takes `what` cycles of the clock. A `"copy"` moves `what` bytes over the link to the host, and a
  `"send"` moves them between slices over DCN. `"all-gather"`, `"all-reduce"`, `"reduce-scatter"`, `"all-to-all"` and
  `"collective-permute"` move theirs over ICI.
- A transfer may be one opcode, or a pair of opcodes that end in `-start` and `-done`. Then the start has the bytes, and
  the done's `what` is None.
- If everything overlaps, a step takes as long as the part that is busiest over the whole step: the arithmetic or one of
  the three links. If nothing overlaps, their times add up.
""",
    hints=(
        "Add up four numbers over the whole step: the seconds of the arithmetic and of each link. How do the two "
        "ends of the interval follow from them?",
        "An instruction runs as often as its computation does, which is the product of the trips of all loops around "
        "it. Pass that number to a function that walks along one computation.",
        "`def walk(computation, runs)`: for a `while` call `walk(body, runs * trips)`, else add `runs * what / "
        "rates[link]` to `busy[link]`. At the end `max(busy.values()), sum(busy.values())`.",
    ),
)

LINKS = {"fusion": "clock", "copy": "host", "send": "dcn"}


def interval_with(
    *, trips=True, nested=True, locally=False, two=False, dones=False, merged=(), dead=False, longest=max,
    async_free=False, once=False, per_second=True, times=lambda runs, trips: runs * trips, add=lambda a, b: a + b,
    links=LINKS, paired=True, divide=lambda a, b: a / b, read_dones=False, swap=False,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(program, rates):
        busy, seen, ends = dict.fromkeys(rates, 0.0), set(), []

        def walk(computation, runs, depth=0):
            if once and computation in seen:
                return
            seen.add(computation)
            here = dict.fromkeys(rates, 0.0)
            size = 0
            for opcode, what in program[computation]:
                if opcode == "while":
                    body, turns = what
                    factor = turns if trips else 1
                    walk(body, times(runs if nested else 1, factor), depth + 1)
                    continue
                if opcode.endswith("-done"):
                    what = what if read_dones else size if dones else 0
                size = what
                kind = opcode.removesuffix("-start").removesuffix("-done")
                link = links.get(kind if paired else opcode, "ici")
                link = "ici" if link in merged else link
                rate = rates[link] if per_second or link != "clock" else 1.0
                if not (async_free and opcode.endswith("-start")):
                    busy[link] = add(busy[link], divide(runs * what, rate))
                here[link] += runs * what / rate
            ends.append(max(here.values()))

        walk("main", 1)
        if dead:
            for name in program:
                if name not in seen:
                    walk(name, 1)
        if two:
            sent = sum(s for link, s in busy.items() if link != "clock")
            return max(busy["clock"], sent), busy["clock"] + sent
        fastest = sum(ends) if locally else longest(busy.values())
        ends = fastest, sum(busy.values())
        return ends[::-1] if swap else ends

    return fn


right_interval = interval_with()


def drawn_rates(t):
    rates = {"clock": 1.75e9, "ici": 9e10, "dcn": 3e9, "host": 1.6e10}
    return {name: rate * float(t.rng.uniform(0.85, 1.15)) for name, rate in rates.items()}


def bounds(t, fn, program, why):
    rates = drawn_rates(t)
    got = [float(x) for x in fn(program, rates)]
    want = list(right_interval(program, rates))
    told = "(fastest, slowest) in s"
    if np.isclose(got[1], want[1], 1e-9, 0):
        told = "the sum is right; the fastest is the largest of the four sums over the whole step"
    elif np.isclose(got[0], want[0], 1e-9, 0):
        told = "the busiest part is right, but not the sum of all four"
    elif got[1] < got[0]:
        told = "the first number is the smaller one: (fastest, slowest)"
    t.close(got, want, 1e-9, 1e-15, f"{why}: {told}")


def sizes_of(t):
    """Cycles and bytes of a few milliseconds each, in which no link is always the busiest."""
    scale = t.rng.uniform(1, 3, 8)
    return [int(n) for n in scale * (5e6, 4e6, 3e8, 2e8, 9e6, 6e6, 5e7, 4e7)]


@interval.check("one instruction")
def _(fn, t):
    links = LINKS | dict.fromkeys(BLOCKING, "ici")
    rates = drawn_rates(t)
    programs = {kind: [(kind, int(t.rng.integers(10**6, 10**7)))] for kind in links}
    for kind in list(links)[1:]:
        size = int(t.rng.integers(10**6, 10**7))
        programs[f"{kind}-start"] = [(f"{kind}-start", size), (f"{kind}-done", None)]
    # All of them are seen together: two mistakes often agree on the first.
    got = [[float(x) for x in fn({"main": main}, rates)] for main in programs.values()]
    for (kind, main), pair in zip(programs.items(), got, strict=True):
        rate, what = links[kind.removesuffix("-start")], main[0][1]
        seconds = what / rates[rate]
        told = f"one {kind} of {what} alone takes {seconds:.6g} s, at the rate of {rate!r}"
        t.true(
            np.allclose(pair, seconds, 1e-9, 0),
            f"{told}; both ends of the interval are that, got {tuple(pair)}",
            np.array(got),
        )


@interval.check("no loops")
def _(fn, t):
    c1, c2, i1, i2, d1, _, h1, _ = sizes_of(t)
    main = [
        ("fusion", c1), ("all-gather-start", i1), ("fusion", c2), ("all-gather-done", None), ("all-reduce", i2),
        ("send-start", d1), ("copy-start", h1), ("send-done", None), ("copy-done", None),
    ]  # fmt: skip
    bounds(t, fn, {"main": main}, "no loops")


@interval.check("a link that is busiest")
def _(fn, t):
    c1, _, i1, _, d1, _, h1, _ = sizes_of(t)
    for scale in ((9, 1, 1, 1), (1, 9, 1, 1), (1, 1, 9, 1), (1, 1, 1, 9)):
        kinds = ("fusion", "reduce-scatter", "send", "copy")
        program = {
            "main": [(k, n * s) for k, n, s in zip(kinds, (c1, i1, d1, h1), scale, strict=True)]
        }
        bounds(t, fn, program, f"{kinds[scale.index(9)]} is busiest")


@interval.check("a loop")
def _(fn, t):
    c1, c2, i1, i2, *_ = sizes_of(t)
    body = [("all-gather-start", i1), ("fusion", c1), ("all-gather-done", None)]
    main = [
        ("fusion", c2),
        ("while", ("body", int(t.rng.integers(20, 90)))),
        ("all-reduce", 40 * i2),
    ]
    bounds(t, fn, {"main": main, "body": body}, "a loop")


@interval.check("loops within loops")
def _(fn, t):
    c1, c2, i1, i2, d1, _, h1, _ = sizes_of(t)
    program = {
        "main": [("while", ("outer", int(t.rng.integers(3, 9)))), ("send", d1)],
        "outer": [("fusion", c1), ("while", ("inner", int(t.rng.integers(3, 9)))), ("copy", h1)],
        "inner": [("fusion", c2), ("all-to-all", i1), ("collective-permute", i2)],
    }
    bounds(t, fn, program, "a loop in a loop")


@interval.check("a body that is shared, one that never runs, and none")
def _(fn, t):
    c1, c2, i1, i2, *_ = sizes_of(t)
    program = {
        "main": [("while", ("a", 3)), ("fusion", c2), ("while", ("a", 5)), ("while", ("b", 0))],
        "a": [("fusion", c1), ("all-gather", i1)],
        "b": [("fusion", 10 * c1)],
        "unused": [("all-reduce", 20 * i2)],
    }
    bounds(t, fn, program, "bodies shared and unused")


@interval.check("a program of your own")
def _(fn, t):
    draw = [1 + (t.learner >> shift) % 64 for shift in range(0, 25, 6)]
    body = [
        ("all-gather-start", draw[0] * 10**7), ("fusion", draw[1] * 10**5), ("all-gather-done", None),
        ("copy-start", draw[2] * 10**5), ("copy-done", None),
    ]  # fmt: skip
    program = {
        "main": [
            ("while", ("body", draw[3])),
            ("while", ("back", draw[3])),
            ("send", draw[4] * 10**6),
        ],
        "body": body,
        "back": [*body, *body, ("reduce-scatter", draw[0] * 10**7)],
    }
    bounds(t, fn, program, "your program")


mistaken(
    interval,
    "loops_run_once",
    "You count a loop's body once. It runs `trips` times.",
    interval_with(trips=False),
)
mistaken(
    interval,
    "inner_loops_forget_the_outer",
    "You multiply by the trips of the loop itself and forget the loops around it. The inner loop runs again in every "
    "iteration of the outer one.",
    interval_with(nested=False),
)
mistaken(
    interval,
    "busiest_of_each_body",
    "You take the busiest of every computation and add those up. If everything overlaps, one body's transfers may run "
    "beside another's arithmetic: add up over the step first, then take the busiest.",
    interval_with(locally=True),
)
mistaken(
    interval,
    "links_one_after_another",
    "You overlap transfers with the arithmetic, but not with each other. The three links run at the same time too.",
    interval_with(two=True),
)
mistaken(
    interval,
    "one_link",
    "You send everything over ICI. A copy goes to the host and a send over DCN, each at its own rate.",
    interval_with(merged=("dcn", "host")),
)
mistaken(
    interval,
    "send_over_ici",
    "A `send` goes between slices, over DCN. You give it ICI's rate.",
    interval_with(merged=("dcn",)),
)
mistaken(
    interval,
    "copy_over_ici",
    "A `copy` goes to the host, over a link of its own. You give it ICI's rate.",
    interval_with(merged=("host",)),
)
mistaken(
    interval,
    "done_counted_again",
    "You count a transfer at its start and again at its done.",
    interval_with(dones=True),
)
mistaken(
    interval,
    "async_is_free",
    "You leave out what has a start and a done. It may be hidden, but its link is busy all the same.",
    interval_with(async_free=True),
)
mistaken(
    interval,
    "what_nobody_runs",
    "You add up every computation in the program. One that no loop names never runs: begin at `main`.",
    interval_with(dead=True),
)
mistaken(
    interval,
    "shared_body_once",
    "You go through each computation once. Two loops may share a body, and both run it.",
    interval_with(once=True),
)
mistaken(
    interval,
    "the_least_busy",
    "You return the smallest of the four as the fastest time. A step can't be faster than its busiest part.",
    interval_with(longest=min),
)
mistaken(
    interval,
    "slowest_first",
    "Your pair is turned around: the fastest time comes first.",
    interval_with(swap=True),
)
mistaken(
    interval,
    "trips_added",
    "Your body runs once too often. If you add a loop's trips to those of the loops around it: multiply them.",
    interval_with(times=lambda runs, trips: runs + trips),
)
mistaken(
    interval,
    "no_trips_is_one",
    "You run a body once where trips is 0. Then it never runs.",
    interval_with(times=lambda runs, trips: runs * max(1, trips)),
)
mistaken(
    interval,
    "starts_of_other_links_over_ici",
    "You recognise `copy` and `send`, but not `copy-start` and `send-start`. They use the same links.",
    interval_with(paired=False),
)
mistaken(
    interval,
    "reads_the_bytes_of_a_done",
    "You compute with the `what` of a done, which is None. Its start has the bytes.",
    interval_with(read_dones=True),
)
mistaken(
    interval,
    "cycles_for_seconds",
    "You treat a fusion's cycles as seconds. Divide them by the clock's rate.",
    interval_with(per_second=False),
)
mistaken(
    interval,
    "largest_instruction",
    "You keep the longest instruction of each part. Those of one part follow one another: add them up.",
    interval_with(add=max),
)
mistaken(
    interval,
    "send_and_copy_exchanged",
    "You exchange two links: a copy goes to the host and a send over DCN.",
    interval_with(links={"fusion": "clock", "copy": "dcn", "send": "host"}),
)
mistaken(
    interval,
    "whole_seconds",
    "You round down to whole seconds: `//` is not `/`.",
    interval_with(divide=lambda a, b: a // b),
)
