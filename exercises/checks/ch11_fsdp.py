import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.book.grading import Exercise
from minitext.compiler import hlo


def devices_along(axis, size=8):
    return jax.make_mesh((size,), (axis,), devices=jax.devices()[:size])


def put(mesh, spec, tree):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)


def number(t, low, high):
    return int(t.rng.integers(low, high))


# --------------------------------------------------------------------------- gradient_equality

gradient_equality = Exercise(
    "11.gradient_equality",
    title="One device's gradient, from eight",
    function="make_gradient",
    minutes=30,
    points=15,
    devices=8,
    statement="""
Write `make_gradient(loss_sum, mesh, microbatches)`. It returns a function of `(params, rows)` that gives every device
the loss per target token of the whole batch, and its gradient. `loss_sum` gives a *sum* and a *count*.

- The rows are split over the mesh axis `data`. Each device splits its own rows into `microbatches` equal parts and
  computes them one after another, in a loop. The checks look for arrays that hold activations of more than one part.
- The result equals that of one device with all rows, within rounding. Devices and microbatches differ widely in their
  number of target tokens, and some have none. A batch without any gives a loss and a gradient of 0.
- Each run sums every number of the gradient over the devices **once**, however many microbatches there are, and two
  scalars as well. It sends nothing else: the checks read kinds, runs and bytes in the HLO.
""",
    hints=(
        "Which numbers can you add over microbatches and devices, and which single division then gives the answer? "
        "Then count how often your loop sums over the devices.",
        "Inside a `shard_map` with `in_specs=(P(), P('data'))`, the gradient of the parameters is summed over devices "
        "as soon as you take it, because the parameters are the same on all of them. Apply `jax.lax.pcast(x, 'data', "
        "to='varying')` to every leaf before the loop, and they become the device's own.",
        "Carry `(total, count, grads)` through `jax.lax.scan`. Start from zeros that are `pcast` too (`zeros_like` of "
        "a marked array already is). Then call `jax.lax.psum(sums, 'data')` once, and multiply by `1 / "
        "jnp.maximum(count, 1)`.",
    ),
)

V, D = 11, 6


def text_loss(params, rows):
    h = jnp.tanh(params["table"][rows["ids"]] @ params["layers"]["w"] + params["layers"]["b"])
    logits = h @ params["table"].T
    right = jnp.take_along_axis(logits, rows["targets"][..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - right
    return jnp.sum(nll * rows["mask"]), jnp.sum(rows["mask"])


def distance_loss(params, rows):
    h = params["table"][rows["ids"]] @ params["layers"]["w"] + params["layers"]["b"]
    away = jnp.sum(jnp.square(h - params["table"][rows["targets"]]), axis=-1)
    return jnp.sum(away * rows["mask"]), jnp.sum(rows["mask"])


def text_params(t):
    draw = lambda *shape: t.rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {"table": draw(V, D), "layers": {"w": draw(D, D), "b": draw(D)}}


def text_rows(t, B, T=5, empty=False):
    kept = np.zeros(B, int) if empty else t.rng.integers(0, T + 1, B)
    if not empty:
        kept[: B // 8] = 0  # the first device has nothing to predict
        kept[-1] = T
    mask = (np.arange(T) < kept[:, None]).astype(np.float32)
    ids, targets = (t.rng.integers(0, V, (B, T)).astype(np.int32) for _ in range(2))
    return {"ids": ids, "targets": targets, "mask": mask}


def on_one(params, rows, loss_sum):
    def mean(params):
        total, count = loss_sum(params, rows)
        return total / jnp.maximum(count, 1.0)

    return jax.jit(jax.value_and_grad(mean))(params)


def graded_gradient(fn, t, size, microbatches, rows_each, empty=False, loss_sum=text_loss):
    mesh, params = devices_along("data", size), text_params(t)
    rows = text_rows(t, size * microbatches * rows_each, empty=empty)
    call = jax.jit(fn(loss_sum, mesh, microbatches))
    got = call(put(mesh, P(), params), put(mesh, P("data"), rows))
    return got, None if empty else on_one(params, rows, loss_sum)


def times(got, want):
    """By which number all of `want` was multiplied to make `got`, in words, if it was."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return ""
    got, want = (
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
        for tree in (got, want)
    )
    if got.shape != want.shape:
        return ""
    factor = (got @ want) / (want @ want)
    scale = np.abs(got).max()
    if abs(factor - 1) < 1e-3 or not np.allclose(got, factor * want, rtol=1e-3, atol=1e-3 * scale):
        return ""
    return f", all of it {factor:.4g} times the right one (8 devices, 3 microbatches)"


@gradient_equality.check("loss and gradient of one device")
def _(fn, t):
    rows_each = number(t, 1, 4)
    (loss, grads), (want, want_grads) = graded_gradient(fn, t, 8, 3, rows_each)
    t.close(loss, want, rtol=1e-5, why=f"the loss{times(loss, want)}")
    why = f"the gradient{times(grads, want_grads)}"
    t.close(grads, want_grads, rtol=1e-4, atol=1e-6, why=why, dtype=np.float32)


@gradient_equality.check("four devices, one microbatch")
def _(fn, t):
    (loss, grads), (want, want_grads) = graded_gradient(fn, t, 4, 1, 2, loss_sum=distance_loss)
    t.close(loss, want, rtol=1e-5, why="the loss on four devices")
    t.close(grads, want_grads, rtol=1e-4, atol=1e-6, why="the gradient on four devices")


@gradient_equality.check("a batch without target tokens")
def _(fn, t):
    (loss, grads), _ = graded_gradient(fn, t, 8, 2, 1, empty=True)
    t.close(loss, 0.0, rtol=0, atol=0, why="the loss of nothing")
    want = jax.tree.map(np.zeros_like, text_params(t))
    t.close(grads, want, rtol=0, atol=0, why="the gradient of nothing")


@gradient_equality.check("each number is sent once, and one part is computed at a time")
def _(fn, t):
    mesh, params = devices_along("data"), text_params(t)
    rows = text_rows(t, 8 * 4 * 2)
    text = t.hlo(fn(text_loss, mesh, 4), put(mesh, P(), params), put(mesh, P("data"), rows))
    found = hlo.Module(text).collectives()
    kinds = sorted({c.kind for c in found})
    t.equal(kinds, ["all-reduce"], why="kinds of collectives in the program")
    numbers = sum(x.size for x in jax.tree.leaves(params))
    sent = sum(c.runs * c.bytes for c in found)
    why = f"bytes all-reduced in one run with 4 microbatches; the gradient has {4 * numbers}, two scalars 8"
    t.equal(sent, 4 * numbers + 8, why=why)
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\bf32\[([\d,]+)\]", text)}
    largest, logits = max(map(math.prod, shapes)), 2 * rows["mask"].shape[1] * V
    why = f"numbers in a device's largest array; one of its 4 parts has {logits} logits"
    t.true(largest < 2 * logits, why=f"{largest} {why}", observed=largest / logits)


def gradient_with(
    *, own=True, divide="all", guard=True, gather=False, last=False, again=False, parts=None,
):  # fmt: skip
    def make(loss_sum, mesh, microbatches):
        n = mesh.shape["data"]

        def varying(tree):
            return jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), tree)

        def of_one_device(params, rows):
            if gather:
                rows = jax.tree.map(lambda x: jax.lax.all_gather(x, "data", tiled=True), rows)
            params = varying(params) if own else params
            split = jax.tree.map(lambda x: x.reshape(parts or microbatches, -1, *x.shape[1:]), rows)

            def add(sums, part):
                (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, part)
                if divide == "micro":
                    share = 1 / jnp.maximum(count, 1.0) / microbatches
                    total, grads = total * share, jax.tree.map(lambda g: g * share, grads)
                if divide == "at least 1 each":
                    count = jnp.maximum(count, 1.0)
                new = (total, count, grads)
                return (new if last else jax.tree.map(jnp.add, sums, new)), None

            zero = jax.tree.map(jnp.zeros_like, params)
            zeros = varying((jnp.zeros(()), jnp.zeros(())))
            sums = jax.lax.scan(add, (*zeros, zero), split)[0]
            total, count, grads = sums
            if divide in ("own", "micro"):
                share = (1 / jnp.maximum(count, 1.0) if divide == "own" else 1.0) / n
                total, grads = total * share, jax.tree.map(lambda g: g * share, grads)
            mean = jax.lax.pmean if gather else jax.lax.psum
            total, count = mean((total, count), "data")
            grads = mean(grads, "data") if own or again else grads
            if divide not in ("own", "micro"):
                share = 1 / (jnp.maximum(count, 1.0) if guard else count)
                total = total if divide == "gradient" else total * share
                grads = jax.tree.map(lambda g: g * share, grads)
            return total, grads

        return jax.shard_map(of_one_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())

    return make


def gradient_mutant(hint, **wrong):
    def mutant(*args):
        return gradient_with(**wrong)(*args)

    mutant.__name__ = "_".join(f"{name}_{value}".lower() for name, value in wrong.items())
    gradient_equality.mutant(hint)(mutant)


gradient_mutant(
    "You average the devices' means, so a token weighs more on a device that has few. Sum losses, counts and "
    "gradients over the devices, and divide once.",
    divide="own",
)
gradient_mutant(
    "You average the microbatches' means, so a token weighs more in a microbatch that has few. Keep sums and "
    "counts to the end.",
    divide="micro",
)
gradient_mutant(
    "The values are right, but every iteration of the loop sums the gradient over the devices: inside "
    "`shard_map`, `jax.value_and_grad` does that for parameters that are the same on all devices. Before the "
    "loop, mark them as the device's own with `jax.lax.pcast(..., 'data', to='varying')`.",
    own=False,
)
gradient_mutant(
    "Your gradient is too large by a factor of the number of devices: `jax.value_and_grad` sums it over them "
    "once, and then you do. Mark the parameters as the device's own before you differentiate.",
    own=False,
    again=True,
)
gradient_mutant(
    "A batch without target tokens divides 0 by 0. Divide by the larger of count and 1.",
    guard=False,
)
gradient_mutant(
    "Every device gathers the whole batch and computes all of it. That is eight times the work, and an all-gather "
    "of rows. Let each device use only its own rows.",
    gather=True,
)
gradient_mutant(
    "The values are right, but a device computes all its rows at once, so you save none of the memory that "
    "microbatches should save. Split the rows into `microbatches` parts and go through them with `jax.lax.scan`, "
    "not `vmap`.",
    parts=1,
)
gradient_mutant(
    "You take the larger of count and 1 for each part or device, so an empty one counts as a token. Do this only "
    "for the count of the whole batch.",
    divide="at least 1 each",
)
gradient_mutant(
    "Your loss is a sum. Divide it by the count, as you do the gradient.", divide="gradient"
)
gradient_mutant(
    "Only the last microbatch is left, because your loop overwrites its carry. Add to it.",
    last=True,
)


# --------------------------------------------------------------------------------- fsdp_rules

fsdp_rules = Exercise(
    "11.fsdp_rules",
    title="Who stores what, by scheme",
    function="place_state",
    minutes=20,
    points=10,
    devices=8,
    statement="""
Write `place_state(params, scheme, devices)`. For each parameter, give the specs of the parameter itself, of its
gradient and of its moments under `dp`, `zero1`, `zero2` or `fsdp`. Also count the bytes that all of them take on one
device.

- Schemes cut along the dimension named `embed`, over the mesh axis `fsdp`. A parameter without such a dimension stays
  whole on every device, in every scheme.
- `zero1` cuts the moments, `zero2` also the gradients, `fsdp` also the parameters. All are float32, and there are two
  moments.
- A spec has an entry for each dimension: `"fsdp"` or None. With one device, no entry names an axis.
- If a scheme would have to cut a dimension into unequal parts, or cut two dimensions of one parameter, raise
  `ValueError` with the parameter's name. `dp` cuts nothing, so it never raises.
""",
    hints=(
        "Take one parameter and one scheme, and answer three questions: is the parameter cut, is its gradient, are "
        "its moments? Only then look at dimensions.",
        "Add up bytes parameter by parameter: a device holds an n-th of a cut one, but all of an uncut one. If you "
        "divide the total by n, you forget the second kind.",
        '`P(*("fsdp" if i in split else None for i in range(len(dims))))`, where `split` has the positions of '
        "`embed`. It is empty if the scheme doesn't cut, or if there is one device.",
    ),
)

CUT = {"dp": "", "zero1": "m", "zero2": "gm", "fsdp": "pgm"}


def right_state(
    params, scheme, devices, *, cut=None, axis="embed", moments=2, even=False, one=False, lazy=False,
    two=False, uneven="refused", short=False, nameless=False, strict=False,
):  # fmt: skip
    cuts = (cut or CUT)[scheme]
    specs, totals, everything = {}, [0, 0, 0], [0, 0, 0]
    for name, (dims, shape) in params.items():
        places = [i for i, dim in enumerate(dims) if dim == axis]
        if axis == "first":
            places = [0]
        if strict and cuts and len(places) > 1:
            raise ValueError(name)
        places = places if devices > 1 or one else []
        if two:
            places = places[:1]
        odd = places and (len(places) > 1 or shape[places[0]] % devices)
        if odd and (cuts or lazy) and devices > 1:
            if uneven == "refused":
                raise ValueError("cannot be cut" if nameless else name)
            places = [] if uneven == "whole" else places[:1]
        found = []
        for k, (thing, each) in enumerate(zip("pgm", (4, 4, 4 * moments), strict=True)):
            split = places if thing in cuts else []
            entries = [] if short and not split else range(len(dims))
            found.append(P(*("fsdp" if i in split else None for i in entries)))
            size = each * math.prod(shape)
            totals[k] += size // (devices if split else 1)
            everything[k] += size // (devices if thing in cuts else 1)
        specs[name] = tuple(found)
    return specs, tuple(everything if even else totals)


def drawn_params(t, devices):
    D, F, L, V = devices * number(t, 2, 9), number(t, 3, 40), number(t, 2, 7), number(t, 9, 99)
    return {
        "embed.table": (("vocab", "embed"), (V, D)),
        "blocks.up": (("layers", "embed", "mlp"), (L, D, F)),
        "blocks.down": (("layers", "mlp", "embed"), (L, F, D)),
        "blocks.scale": (("layers", "embed"), (L, D)),
        "bias": (("mlp",), (8 * F,)),  # no embed: whole everywhere
        "router": (("layers", "heads"), (8, 8 * number(t, 2, 9))),
        "temperature": ((), ()),
    }


def plain_specs(specs):
    return {
        name: tuple(tuple(None if e is None else str(e) for e in spec) for spec in found)
        for name, found in specs.items()
    }


@fsdp_rules.check("specs of every scheme")
def _(fn, t):
    params = drawn_params(t, 8)
    for scheme in CUT:
        got, want = fn(params, scheme, 8)[0], right_state(params, scheme, 8)[0]
        t.equal(sorted(got), sorted(want), why=f"the names, {scheme}")
        for name in want:
            three = len(got[name]) == 3 and all(isinstance(x, (tuple, P)) for x in got[name])
            why = f"{name}: got {got[name]}, want the specs of the parameter, its gradient and its moments"
            t.true(three, why=why, observed=str(got[name]))
            one, other = (plain_specs({name: x[name]})[name] for x in (got, want))
            things = zip(("the parameter", "the gradient", "the moments"), one, other, strict=True)
            off = [f"{thing}: got {a}, want {b}" for thing, a, b in things if a != b]
            why = f"{scheme}, {name} {params[name]}; {'; '.join(off)}"
            t.true(not off, why=why, observed=str((scheme, one)))


@fsdp_rules.check("bytes on one device")
def _(fn, t):
    params = drawn_params(t, 4)
    for scheme in CUT:
        totals = fn(params, scheme, 4)[1]
        t.true(
            isinstance(totals, (tuple, list)),
            f"got {totals}, want three numbers of bytes",
            str(totals),
        )
        kinds = sorted({type(x).__name__ for x in totals if not isinstance(x, (int, np.integer))})
        t.true(not kinds, f"the bytes have the type {', '.join(kinds)}; want Python ints", kinds)
        got = tuple(int(x) for x in totals)
        want = right_state(params, scheme, 4)[1]
        t.equal(got, want, why=f"{scheme} on 4 devices: parameters, gradients, moments in bytes")


@fsdp_rules.check("arrays with these specs take these bytes")
def _(fn, t):
    params, mesh = drawn_params(t, 8), devices_along("fsdp")
    scheme = ("zero1", "zero2", "fsdp")[number(t, 0, 3)]
    specs, told = fn(params, scheme, 8)
    held = [0, 0, 0]
    for name, (_, shape) in params.items():
        for k, each in enumerate((1, 1, 2)):
            array = jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, specs[name][k]))
            held[k] += each * array.addressable_shards[3].data.nbytes
    why = f"{scheme}: what one device holds with your specs"
    t.equal([int(x) for x in told], held, why=why)


@fsdp_rules.check("one device")
def _(fn, t):
    size = number(t, 3, 12)
    params = drawn_params(t, 1) | {"odd": (("embed", "embed"), (size, size))}
    got = fn(params, "fsdp", 1)
    want = right_state(params, "fsdp", 1)
    t.equal(plain_specs(got[0]), plain_specs(want[0]), why="an axis of one device isn't named")
    t.equal([int(x) for x in got[1]], list(want[1]), why="bytes on one device")


@fsdp_rules.check("dimensions that can't be cut")
def _(fn, t):
    bad = {"odd.w": (("layers", "embed"), (8, 8 * number(t, 2, 99) + 4))}
    size = 8 * number(t, 1, 99)
    square = {"square.w": (("embed", "embed"), (size, size))}
    for scheme in ("zero1", "zero2", "fsdp"):
        t.raises(ValueError, fn, bad, scheme, 8, why=f"{scheme}: uneven parts", match="odd.w")
        t.raises(ValueError, fn, square, scheme, 8, why=f"{scheme}: cut twice", match="square.w")
    for params in (bad, square):
        got, want = fn(params, "dp", 8), right_state(params, "dp", 8)
        t.equal(plain_specs(got[0]), plain_specs(want[0]), why="dp")
        t.equal([int(x) for x in got[1]], list(want[1]), why="bytes on each device under dp")


def state_mutant(hint, **wrong):
    fsdp_rules.mutant(hint)(functools.partial(right_state, **wrong))


state_mutant(
    "You cut the gradients in `zero1`. Stage 1 cuts only the optimizer state; the gradients follow in stage 2.",
    cut=CUT | {"zero1": "gm"},
)
state_mutant(
    "In `fsdp` you cut the parameters but leave gradients and moments whole. Each stage also cuts everything that "
    "the one before it cut.",
    cut=CUT | {"fsdp": "p"},
)
state_mutant(
    "You divide the total by the number of devices. Parameters without `embed` are whole on every device, so "
    "count all their bytes.",
    even=True,
)
state_mutant(
    "You cut the first dimension, whatever its name. Cut only `embed`: `layers` and `vocab` stay whole.",
    axis="first",
)
state_mutant(
    "You count one moment for each parameter. AdamW has two, 8 bytes a parameter.", moments=1
)
state_mutant("You name the axis although there is only one device. Then nothing is cut.", one=True)
state_mutant(
    "Your spec is empty where nothing is cut. Give it an entry for each dimension: None for each that stays "
    "whole.",
    short=True,
)
state_mutant(
    "If a parameter has two dimensions called `embed`, you cut the first. One mesh axis can't cut two dimensions, "
    "and you can't know which one to cut: refuse.",
    two=True,
)
state_mutant(
    "You leave a parameter whole if it can't be cut. It takes more memory than the scheme promises, and the user "
    "never learns why: raise a ValueError.",
    uneven="whole",
)
state_mutant(
    "You cut dimensions that the number of devices doesn't divide, and count bytes of rounded parts. Check the "
    "remainder first, and raise a ValueError.",
    uneven="rounded",
)
state_mutant(
    "Your ValueError doesn't name the parameter. In a model with a hundred, `embed does not divide` doesn't help.",
    nameless=True,
)
state_mutant(
    "You refuse on one device. Nothing is cut there, so it doesn't matter what divides.",
    strict=True,
)
state_mutant(
    "You refuse in `dp` too. It cuts nothing, so it doesn't matter what divides: check first what the scheme "
    "cuts.",
    lazy=True,
)


# --------------------------------------------------------------------------------- hlo_budget

hlo_budget = Exercise(
    "11.hlo_budget",
    title="A layer within its budget",
    function="thrifty_layer",
    minutes=35,
    points=15,
    devices=8,
    statement="""
`wasteful_layer` is a feed-forward layer whose weights are stored in parts. Its values are right, but its program
gathers float32, gathers activations, and in a gradient keeps what it gathered. Write `thrifty_layer`, which gives the
same values within the budget below. The checks put L layers in a scan and compile the gradient of its weights for eight
devices.

- **Gathers**: each of a layer's three weights is gathered twice, once in the forward pass and once in the backward
  pass. That makes 6 L all-gathers of D x F numbers, and no others. So nothing gathered is kept for the backward pass,
  and activations are never gathered.
- **Type**: all gathers are in bfloat16, in the forward *and* the backward pass. (XLA's CPU backend sends bfloat16 as
  float32, so the checks read this in the jaxpr: from `jax.sharding.reshard` or `jax.lax.all_gather`.)
- **Kinds**: apart from all-gathers, the program has only all-reduces or reduce-scatters, for the gradients. No
  all-to-all, no permute.
- The gradient of a weight is float32 and sharded like the weight.
""",
    hints=(
        "Go through `wasteful_layer` line by line. For each `reshard`, say what moves and in which type. In the last "
        "product, which single array should move instead?",
        "For all three weights, cast first and then reshard; the tokens stay on their devices. That fixes the forward "
        "pass. For the backward pass, look at the four versions of section 3.",
        "Put the whole layer into a function under `jax.checkpoint`: its backward pass runs it again, gathers "
        "included. Or write a `custom_vjp` that keeps x and the parts. If you do both, each "
        "weight is gathered three times.",
    ),
    seconds=90.0,
)

SPECS = P("fsdp", None), P("fsdp", None), P(None, "fsdp")


def stack_sizes(t):
    return 3, 8 * number(t, 1, 3), 8 * number(t, 2, 4), 8 * number(t, 5, 8) + 4  # L, B, D, F


def stack_loss(fn):
    def loss(weights, x_BD):
        y_BD = jax.lax.scan(lambda x, w: (fn(x, *w), None), x_BD, weights)[0]
        return jnp.mean(jnp.square(y_BD.astype(jnp.float32)))

    return loss


def stack_specs(mesh, sizes):
    L, B, D, F = sizes
    place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    shapes = (L, D, F), (L, D, F), (L, F, D)
    weights = tuple(
        jax.ShapeDtypeStruct(shape, "float32", sharding=place(P(None, *spec)))
        for shape, spec in zip(shapes, SPECS, strict=True)
    )
    return weights, jax.ShapeDtypeStruct((B, D), "bfloat16", sharding=place(P("fsdp", None)))


def plain_layer(x, gate, up, down):
    gate, up, down = (w.astype(x.dtype) for w in (gate, up, down))
    return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down


def drawn_stack(t, sizes):
    L, B, D, F = sizes
    draw = lambda fan, *s: (t.rng.normal(size=s) / np.sqrt(fan)).astype(np.float32)  # noqa: E731
    return (draw(D, L, D, F), draw(D, L, D, F), draw(F, L, F, D)), draw(1, B, D)


@hlo_budget.check("values and gradients")
def _(fn, t):
    mesh, sizes = devices_along("fsdp"), stack_sizes(t)
    weights, x = drawn_stack(t, sizes)
    want, want_grads = jax.jit(jax.value_and_grad(stack_loss(plain_layer)))(
        tuple(map(jnp.asarray, weights)), jnp.asarray(x)
    )
    with jax.set_mesh(mesh):
        placed = tuple(
            jax.device_put(w, P(None, *spec)) for w, spec in zip(weights, SPECS, strict=True)
        )
        x = jax.device_put(jnp.asarray(x, jnp.bfloat16), P("fsdp", None))
        one = jax.jit(fn)(x, *(w[0] for w in placed))
        t.equal((str(one.dtype), one.shape), ("bfloat16", x.shape), why="the result's type")
        t.equal(str(one.sharding.spec[0]), "fsdp", why="the tokens stay on their devices")
        got, grads = jax.jit(jax.value_and_grad(stack_loss(fn)))(placed, x)
    t.close(
        got / want,
        1.0,
        rtol=0,
        atol=0.03,
        why="mean square of the result, divided by the right one",
    )
    for name, g, w in zip(("gate", "up", "down"), grads, want_grads, strict=True):
        scale = np.abs(w).max()
        t.close(np.asarray(g) / scale, np.asarray(w) / scale, rtol=0, atol=0.05,
                why=f"gradient of {name}, over its largest number", dtype=np.float32)  # fmt: skip
    lying = [tuple(g.sharding.spec)[1:] for g in grads]
    lying = [tuple(map(str, (*spec, None, None)[:2])) for spec in lying]
    t.equal(lying, [tuple(map(str, s)) for s in SPECS], why="a gradient is sharded like its weight")


def inner_jaxprs(eqn):
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value


def gathers(jaxpr):
    """Types and sizes of what is gathered, as it is written."""
    for eqn in jaxpr.eqns:
        out = eqn.outvars[0].aval if eqn.outvars else None
        if eqn.primitive.name == "reshard":
            before, after = (str(v.sharding.spec) for v in (eqn.invars[0].aval, out))
            if "fsdp" in before and "fsdp" not in after:
                yield str(out.dtype), out.size
        elif eqn.primitive.name.startswith("all_gather"):
            yield str(out.dtype), out.size
        for inner in inner_jaxprs(eqn):
            yield from gathers(inner)


@hlo_budget.check("gathers are bfloat16")
def _(fn, t):
    mesh, sizes = devices_along("fsdp"), stack_sizes(t)
    _, _, D, F = sizes
    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(jax.grad(stack_loss(fn)))(*stack_specs(mesh, sizes))
    found = [kind for kind, size in gathers(traced.jaxpr) if size == D * F]
    t.equal(
        sorted(set(found)), ["bfloat16"], why="types of gathered weights in the gradient's jaxpr"
    )


@hlo_budget.check("gathers, their number and size")
def _(fn, t):
    mesh, sizes = devices_along("fsdp"), stack_sizes(t)
    L, _, D, F = sizes
    with jax.set_mesh(mesh):
        text = t.hlo(jax.grad(stack_loss(fn)), *stack_specs(mesh, sizes))
    found = hlo.Module(text).collectives()
    allowed = {"all-gather", "all-reduce", "reduce-scatter"}
    others = sorted({c.kind for c in found} - allowed)
    t.equal(others, [], why="kinds of collectives that aren't in the budget")
    counted = {}
    for c in found:
        if c.kind == "all-gather":
            for kind, size in c.arrays:
                numbers = size // {"f32": 4, "bf16": 2}.get(kind, 1)
                counted[numbers] = counted.get(numbers, 0) + c.runs
    others = sorted(size for size in counted if size != D * F)
    t.equal(others, [], why=f"sizes of gathered arrays other than a weight's {D} x {F}")
    why = f"all-gathers of weights in the gradient of {L} layers; the budget is 2 x 3 x {L}"
    t.equal(counted.get(D * F, 0), 6 * L, why=why)


def whole(w, dtype=None):
    return jax.sharding.reshard(w if dtype is None else w.astype(dtype), P(None, None))


def gathered_layer(x, *weights):
    gate, up, down = (whole(w, x.dtype) for w in weights)
    return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def ruled_product(x, w, wide):
    return x @ whole(w, x.dtype)


def _ruled_backward(wide, kept, grad):
    x, w = kept
    w_whole = whole(w).astype(x.dtype) if wide else whole(w, x.dtype)
    spec = jax.typeof(w).sharding.spec
    grad_w = jnp.einsum("bd,bf->df", x, grad, out_sharding=spec)
    return grad @ w_whole.T, grad_w.astype(w.dtype)


ruled_product.defvjp(lambda x, w, wide: (ruled_product(x, w, wide), (x, w)), _ruled_backward)


def ruled_layer(x, gate, up, down, wide=False):
    h = jax.nn.silu(ruled_product(x, gate, wide)) * ruled_product(x, up, wide)
    return x + ruled_product(h, down, wide)


@hlo_budget.mutant(
    "You gather float32 and cast afterwards, which sends twice the bytes. Cast on each device, then gather."
)
def casts_late(x, *weights):
    @jax.checkpoint
    def layer(x, *weights):
        gate, up, down = (whole(w).astype(x.dtype) for w in weights)
        return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down

    return layer(x, *weights)


@hlo_budget.mutant(
    "Your forward pass is right. But the gradient gathers each weight once and keeps the gathered weights of all "
    "layers until the backward pass, so you lose the memory that cutting saved. Put the layer under "
    "`jax.checkpoint`."
)
def keeps(x, *weights):
    return gathered_layer(x, *weights)


@hlo_budget.mutant(
    "You use both a rule that gathers again *and* `jax.checkpoint`, so three gathers are written, and with "
    "bfloat16 this compiler can't see that two are the same. Use one or the other."
)
def both(x, *weights):
    return jax.checkpoint(ruled_layer)(x, *weights)


@hlo_budget.mutant(
    "You gather float32 in the backward pass. Both passes must cast before they gather."
)
def wide_backward(x, *weights):
    return ruled_layer(x, *weights, wide=True)


@hlo_budget.mutant(
    "You gather two weights as one array. The bytes are right, but the budget asks for an all-gather for each "
    "weight: gather them one by one, and let the compiler combine them."
)
def gathers_a_pair(x, *weights):
    @jax.checkpoint
    def layer(x, gate, up, down):
        pair = jnp.stack([gate, up]).astype(x.dtype)
        gate, up = jax.sharding.reshard(pair, P(None, None, None))
        return x + (jax.nn.silu(x @ gate) * (x @ up)) @ whole(down, x.dtype)

    return layer(x, *weights)


@hlo_budget.mutant("You forgot the residual: a layer adds its result to x.")
def no_residual(x, *weights):
    return jax.checkpoint(gathered_layer)(x, *weights) - x


@hlo_budget.mutant(
    "The last product still gathers all tokens and then re-splits its result with an all-to-all. Gather `down_FD` "
    "like the other weights; the tokens stay on their devices."
)
def gathers_tokens(x, *weights):
    @jax.checkpoint
    def layer(x, gate, up, down):
        gate, up = (whole(w, x.dtype) for w in (gate, up))
        h = jax.nn.silu(x @ gate) * (x @ up)
        y = whole(h) @ down.astype(x.dtype)
        return x + jax.sharding.reshard(y, P("fsdp", None))

    return layer(x, *weights)


@hlo_budget.mutant(
    "That is `wasteful_layer`. Start at its first line, and for each `reshard` say what moves and in which type."
)
def unchanged(x, gate, up, down):
    gate, up = (whole(w).astype(x.dtype) for w in (gate, up))
    h = jax.nn.silu(x @ gate) * (x @ up)
    y = whole(h) @ down.astype(x.dtype)
    return x + jax.sharding.reshard(y, P("fsdp", None))


# -------------------------------------------------------------------------------- zero_stages

zero_stages = Exercise(
    "11.zero_stages",
    title="The cost of each stage",
    function="stage_costs",
    minutes=20,
    points=10,
    statement="""
Write `stage_costs(cut, whole, devices, scheme, microbatches)`. It returns four Python integers: the bytes of
parameters, gradients and optimizer state on one device, and the bytes that this device sends in one step. The checks
use other numbers for each learner.

- Schemes can cut the `cut` parameters, and never cut the `whole` ones. Parameters, gradients and AdamW's two moments
  are float32.
- With ring algorithms, a step sends:

| | `cut` parameters | how often a step |
|---|---|---|
| `dp` | all-reduce of the gradients | once |
| `zero1` | reduce-scatter of the gradients; all-gather of the new parameters | once; once |
| `zero2` | reduce-scatter of the gradients; all-gather of the new parameters | each microbatch; once |
| `fsdp` | two all-gathers of the weights, reduce-scatter of the gradients | each microbatch |

- The gradients of `whole` parameters are all-reduced once a step in every scheme; they are never gathered.
- Gradients, and weights gathered for use, are sent in bfloat16; new parameters in float32.
- Both counts are multiples of `devices`. Numbers can be too large for 64 bits.
""",
    hints=(
        "Start with the three kinds of memory: which stage is the first to cut each? The `whole` parameters always "
        "take 16 bytes each.",
        "An all-gather or a reduce-scatter of S bytes sends S (n-1)/n, and an all-reduce twice that. Which rows of "
        "the table depend on the number of microbatches?",
        "With `ring(numbers, each) = each * numbers * (n - 1) // n`, dp sends 2 ring(cut, 2). zero1 sends ring(cut, "
        "2) + ring(cut, 4), and zero2 sends the first of these M times. fsdp sends 3 M ring(cut, 2). Every scheme "
        "adds 2 ring(whole, 2).",
    ),
)


def right_costs(
    cut, whole, devices, scheme, microbatches, *, update=4, ones=2, scatter=1, often=True, rest=True,
    moments=2, uncut=True, keep=True, fetched=2, new="once", whole_often=False, used=2, held_as=4,
    floats=False,
):  # fmt: skip
    stage = list(CUT).index(scheme)
    held = []
    for each, start in ((4, 3), (held_as, 2), (4 * moments, 1)):
        n = devices if stage >= start else 1
        held.append(each * (cut // n) + each * whole // (1 if uncut else n))

    def ring(numbers, each):
        if floats:
            return int(each * numbers * ((devices - 1) / devices))
        return each * numbers * (devices - 1) // devices if keep else each * numbers

    M = microbatches if often else 1
    gather, scattered = ring(cut, update), scatter * ring(cut, 2)
    sent = {
        "dp": ones * ring(cut, 2),
        "zero1": scattered + gather,
        "zero2": M * scattered + (M if new == "each" else 1) * gather,
        "fsdp": M * (fetched * ring(cut, used) + scattered),
    }[scheme]
    ones *= M if whole_often else 1
    return (*held, sent + (ones * ring(whole, 2) if rest else 0))


def own_numbers(t):
    draw = np.random.default_rng(t.learner)
    n = 2 ** int(draw.integers(2, 8))
    cut, rest = (n * int(draw.integers(low, 2 * low)) for low in (10**6, 10**3))
    return cut, rest, n, int(draw.integers(2, 9))


def held_as(got, cut, whole, n):
    """How many bytes for each number, and which of them cut, make `got`, in words."""
    ways = {
        "nothing cut": cut + whole,
        f"the `cut` ones cut into {n}": cut // n + whole,
        f"all of them cut into {n}": (cut + whole) // n,
        "the `whole` ones missing": cut,
        f"the `whole` ones missing and the others cut into {n}": cut // n,
    }
    found = [
        (each, way) for way, size in ways.items() for each in (2, 4, 8, 12) if each * size == got
    ]
    return f". Yours are {found[0][0]} bytes for each number, {found[0][1]}" if found else ""


def sent_as(got, cut, whole, n):
    """How many bytes for each number make the bytes sent, in words, or "" if no number does."""
    cut, whole = ((n - 1) * size // n for size in (cut, whole))
    for b in range(17):
        a, rest = divmod(got - b * whole, max(cut, 1))
        if rest == 0 and 0 <= a <= 200:
            return (
                f"{a} bytes for each of the `cut` parameters and {b} for each of the `whole` ones"
            )
    return ""


def costs_agree(t, fn, cut, whole, n, M, why):
    for scheme in CUT:
        numbers = fn(cut, whole, n, scheme, M)
        t.equal(len(numbers), 4, why=f"how many numbers are returned, {scheme}")
        kinds = sorted({type(x).__name__ for x in numbers if not isinstance(x, int)})
        t.true(not kinds, f"{scheme}: {', '.join(kinds)} among the results; want four ints", kinds)
        # As text: the numbers may be too large for an array.
        right = right_costs(cut, whole, n, scheme, M)
        got, want = ([f"{int(x):,}" for x in found] for found in (numbers, right))
        told = f"{scheme}, {why}: {cut:,} + {whole:,} parameters on {n} devices, {M} microbatches"
        names = "parameters", "gradients", "optimizer state"
        for name, g, w in zip(names, got, want, strict=False):
            plain = int(g.replace(",", ""))
            wrong = held_as(plain, cut, whole, n) if g != w else ""
            t.equal(f"{name}: {g} bytes", f"{name}: {w} bytes", why=f"{told}{wrong}")
        text = told
        if got[3] != want[3]:
            mine, right = (int(x[3].replace(",", "")) for x in (got, want))
            each, wanted = (sent_as(x, cut, whole, n) for x in (mine, right))
            text += f". Yours are (n-1)/n of {each}; want {wanted}" if each else ""
            text += f". Yours are {n} times as many" if mine == n * right else ""
        t.equal(f"sent: {got[3]} bytes", f"sent: {want[3]} bytes", why=text)


@zero_stages.check("your own numbers")
def _(fn, t):
    costs_agree(t, fn, *own_numbers(t), "your numbers")


@zero_stages.check("one microbatch, and every parameter cut")
def _(fn, t):
    n = 2 ** number(t, 1, 6)
    costs_agree(t, fn, n * number(t, 3, 999), 0, n, 1, "one microbatch")


@zero_stages.check("one device sends nothing")
def _(fn, t):
    costs_agree(t, fn, number(t, 3, 999), number(t, 3, 999), 1, 4, "one device")


@zero_stages.check("very large numbers, exactly")
def _(fn, t):
    n = 512
    costs_agree(t, fn, n * (10**18 + number(t, 1, 99)), n * 12345, n, 3, "large")


def costs_mutant(hint, **wrong):
    zero_stages.mutant(hint)(functools.partial(right_costs, **wrong))


costs_mutant(
    "You send the new parameters in bfloat16. They are the float32 parameters themselves, 4 bytes each.",
    update=2,
)
costs_mutant("An all-reduce sends twice (n-1)/n of the array, and you count it once.", ones=1)
costs_mutant(
    "You count an all-reduce for a scheme that has a reduce-scatter, which sends half as much.",
    scatter=2,
)
costs_mutant(
    "You forgot the microbatches: `zero2` scatters after each, and `fsdp` gathers and scatters in each.",
    often=False,
)
costs_mutant(
    "You forgot the parameters that no scheme cuts: every scheme all-reduces their gradients.",
    rest=False,
)
costs_mutant("You count one moment. AdamW has two, 8 bytes a parameter.", moments=1)
costs_mutant(
    "You also divide the `whole` parameters by the number of devices. They are whole on every device.",
    uncut=False,
)
costs_mutant("A device keeps its own part, so it sends only (n-1)/n of an array.", keep=False)
costs_mutant(
    "You gather each weight once. It is gathered for the forward pass and again for the backward pass.",
    fetched=1,
)
costs_mutant(
    "Your `zero2` gathers the new parameters after each microbatch. They change only once a step; only the "
    "scatter is repeated.",
    new="each",
)
costs_mutant(
    "You all-reduce the gradients of `whole` parameters in each microbatch. Each device adds them up and sends "
    "them once a step.",
    whole_often=True,
)
costs_mutant(
    "Your `fsdp` gathers float32. Weights are cast before they're gathered for use: 2 bytes each.",
    used=4,
)
costs_mutant(
    "You count 2 bytes for each gradient on a device. They're sent in bfloat16 but stored in float32.",
    held_as=2,
)
costs_mutant(
    "You divide with `/`, and a float has 53 bits. Multiply first, then divide integers with `//`.",
    floats=True,
)
