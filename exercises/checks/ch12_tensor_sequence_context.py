import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.book.grading import Exercise
from minitext.compiler import hlo


def mesh_of(**sizes):
    count = math.prod(sizes.values())
    axes = (AxisType.Explicit,) * len(sizes)
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axes, devices=devices)


def put(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def normal(t, *shape, scale=1.0):
    return (scale * t.rng.normal(size=shape)).astype(np.float32)


def program(t, mesh, fn, *args):
    """The answer's compiled program, and its collectives."""
    with jax.set_mesh(mesh):
        compiled = t.compiled(lambda *args: fn(*args), *args)
    return compiled, hlo.Module(compiled.as_text()).collectives()


def listed(found):
    return ", ".join(f"{c.runs} x {c.kind} of {c.bytes:,} bytes" for c in found) or "none"


# ------------------------------------------------------------------------------------- tp_mlp

tp_mlp = Exercise(
    "12.tp_mlp",
    title="A gated layer with one all-reduce",
    function="tp_mlp",
    minutes=20,
    points=10,
    devices=8,
    forbid=("minitext.models.ffn", "minitext.models.layers"),
    statement="""
Write `tp_mlp(x_BTD, gate_DF, up_DF, down_FD)`, the gated feed-forward layer
`(silu(x @ gate) * (x @ up)) @ down`, for a mesh with the axes `data` and `tensor`. The batch is split over
`data`. Over `tensor`, both first matrices are split along their columns, and the last along its rows.

- The compiled forward pass has exactly **one** collective: an all-reduce over the devices of `tensor`. It adds
  up the result for one part of the batch, and no weight is gathered.
- The result is split over `data` and whole over `tensor`.
- It has a gradient with respect to x and to all three weights.
- It is called inside `jax.jit` and `jax.set_mesh`; both axes are Explicit. Write it with `out_sharding=`, or
  with `jax.shard_map`.
""",
    hints=(
        "Which of the three products contracts over a dimension that is split? Only that one has partial "
        "sums.",
        "Each feature of the gate is on the same device as the feature that it gates. Multiply them there, and "
        "leave the result there.",
        'The last product is `jnp.einsum("BTF,FD->BTD", hidden, down, out_sharding=P("data", None, '
        "None))`; the first two need no `out_sharding`.",
    ),
)

MLP_SPECS = (("data",), (None, "tensor"), (None, "tensor"), ("tensor",))


def draw_mlp(t, mesh, scale=1.0):
    """Arguments on the mesh, and as NumPy arrays."""
    B, (T, D) = mesh.shape["data"] * int(t.rng.integers(1, 4)), 2 * t.rng.integers(2, 6, 2)
    F = mesh.shape["tensor"] * int(t.rng.integers(2, 6))
    plain = (
        normal(t, B, T, D, scale=scale),
        normal(t, D, F),
        normal(t, D, F),
        normal(t, F, D, scale=F**-0.5),
    )
    return [put(mesh, x, *spec) for x, spec in zip(plain, MLP_SPECS, strict=True)], plain


def right_mlp(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def other_layers(x, gate, up, down, n):
    """Results of layers that are taken for a gated one on n devices, under what is to be said of them."""
    g, u, silu = x @ gate, x @ up, jax.nn.silu
    hidden = np.asarray(silu(g) * u)
    added = np.tile(hidden.reshape(*x.shape[:2], n, -1).sum(axis=2), n)
    return {
        "Hidden features of different devices are added: only the last product gives partial sums": (
            added @ down
        ),
        "That is gelu of the gate; silu(z) is z * sigmoid(z)": (jax.nn.gelu(g) * u) @ down,
        "That is relu of the gate; silu(z) is z * sigmoid(z)": (jax.nn.relu(g) * u) @ down,
        "That is the gate's sigmoid; silu(z) is z * sigmoid(z)": (jax.nn.sigmoid(g) * u) @ down,
        "That is the layer without silu": (g * u) @ down,
        "That is silu of both factors; `up` goes in as it is": (silu(g) * silu(u)) @ down,
        "That adds the two factors; they are multiplied": (silu(g) + u) @ down,
        "That is silu(x @ gate) @ down; `up` has no part in it": silu(g) @ down,
    }


def mlp_is_right(t, fn, mesh, why, scale=1.0):
    args, plain = draw_mlp(t, mesh, scale)
    got = program(t, mesh, fn, *args)[0](*args)
    want = np.asarray(right_mlp(*plain))
    size = float(np.abs(want).max())
    mistakes = other_layers(*plain, mesh.shape["tensor"])
    t.close(got, want, rtol=1e-4, atol=1e-4 * size, why=why, mistakes=mistakes)


@tp_mlp.check("values, eight devices along tensor")
def _(fn, t):
    mlp_is_right(t, fn, mesh_of(data=1, tensor=8), "a mesh of 1 by 8")


@tp_mlp.check("values, with a batch that is split too")
def _(fn, t):
    mlp_is_right(t, fn, mesh_of(data=2, tensor=4), "a mesh of 2 by 4")


@tp_mlp.check("large activations")
def _(fn, t):
    mlp_is_right(t, fn, mesh_of(data=1, tensor=8), "gates of 90 and -90", scale=40.0)


@tp_mlp.check("where the result lies")
def _(fn, t):
    mesh = mesh_of(data=4, tensor=2)
    args, plain = draw_mlp(t, mesh)
    got = program(t, mesh, fn, *args)[0](*args)
    B, T, D = plain[0].shape
    want = [B // 4, T, D]
    t.equal(list(got.addressable_shards[0].data.shape), want, why="one device's part of the result")


@tp_mlp.check("one all-reduce, and nothing else")
def _(fn, t):
    mesh = mesh_of(data=2, tensor=4)
    args, plain = draw_mlp(t, mesh)
    found = program(t, mesh, fn, *args)[1]
    want = [("all-reduce", 4, 4 * plain[0].size // 2)]
    got = [(c.kind, c.group, c.bytes) for c in found]
    why = f"collectives of the forward pass: {listed(found)}; want one all-reduce of {want[0][2]:,} bytes"
    t.true(got == want, why=why, observed=sorted(got))


@tp_mlp.check("gradients")
def _(fn, t):
    mesh = mesh_of(data=2, tensor=4)
    args, plain = draw_mlp(t, mesh)
    weight = normal(t, *plain[0].shape)

    def total(layer, weight):
        return jax.grad(lambda *args: jnp.sum(layer(*args) * weight), argnums=(0, 1, 2, 3))

    got = program(t, mesh, total(fn, put(mesh, weight, "data")), *args)[0](*args)
    want = jax.jit(total(right_mlp, weight))(*plain)
    for name, g, w in zip(("x", "gate", "up", "down"), got, want, strict=True):
        w = np.asarray(w)
        t.close(g, w, rtol=1e-3, atol=1e-4 * float(np.abs(w).max()), why=f"the gradient of {name}")


def mlp_by_hand(combine):
    def layer(x, gate, up, down):
        def part(x, gate, up, down):
            return combine(right_mlp(x, gate, up, down))

        specs = tuple(P(*spec) for spec in MLP_SPECS)
        return jax.shard_map(part, in_specs=specs, out_specs=P("data"), check_vma=False)(
            x, gate, up, down
        )

    return layer


@tp_mlp.mutant(
    "You return each device's own sum over its own features. The last product gives partial sums: add them "
    "over `tensor`."
)
def never_adds(x_BTD, gate_DF, up_DF, down_FD):
    return mlp_by_hand(lambda y: y)(x_BTD, gate_DF, up_DF, down_FD)


@tp_mlp.mutant(
    "You average the partial results. Each device has other features of the same sum, so add them and don't "
    "divide."
)
def averages(x_BTD, gate_DF, up_DF, down_FD):
    return mlp_by_hand(lambda y: jax.lax.pmean(y, "tensor"))(x_BTD, gate_DF, up_DF, down_FD)


@tp_mlp.mutant(
    "You add over both axes of the mesh. Along `data` there are other rows of the batch, which must not be added."
)
def adds_other_rows(x_BTD, gate_DF, up_DF, down_FD):
    both = ("data", "tensor")
    return mlp_by_hand(lambda y: jax.lax.psum(y, both))(x_BTD, gate_DF, up_DF, down_FD)


@tp_mlp.mutant(
    "You gather the weights. That is FSDP: each device then multiplies by the whole matrices, and tensor "
    "parallelism has saved nothing."
)
def gathers_weights(x_BTD, gate_DF, up_DF, down_FD):
    whole = [jax.sharding.reshard(w, P(None, None)) for w in (gate_DF, up_DF, down_FD)]
    return right_mlp(x_BTD, *whole)


@tp_mlp.mutant(
    "You gather the hidden features before the last product. They are finished where they are, and the rows "
    "of `down` that they meet are on the same device."
)
def gathers_hidden(x_BTD, gate_DF, up_DF, down_FD):
    hidden = jax.nn.silu(jnp.einsum("BTD,DF->BTF", x_BTD, gate_DF))
    hidden = hidden * jnp.einsum("BTD,DF->BTF", x_BTD, up_DF)
    hidden = jax.sharding.reshard(hidden, P("data", None, None))
    return jnp.einsum("BTF,FD->BTD", hidden, jax.sharding.reshard(down_FD, P(None, None)))


@tp_mlp.mutant(
    "You gather both products before the gate. Gate and `up` of one feature are on the same device: multiply them "
    "there, and let the last product contract over the split dimension."
)
def gathers_both_products(x_BTD, gate_DF, up_DF, down_FD):
    whole = P("data", None, None)
    gate, up = (
        jax.sharding.reshard(jnp.einsum("BTD,DF->BTF", x_BTD, w), whole) for w in (gate_DF, up_DF)
    )
    down = jax.sharding.reshard(down_FD, P(None, None))
    return jnp.einsum("BTF,FD->BTD", jax.nn.silu(gate) * up, down)


@tp_mlp.mutant(
    "You leave the result split over `tensor`, a part of the tokens on each device. Sequence parallelism "
    "wants that, but here each device needs all of it."
)
def leaves_parts(x_BTD, gate_DF, up_DF, down_FD):
    gate, up = (jnp.einsum("BTD,DF->BTF", x_BTD, w) for w in (gate_DF, up_DF))
    down = jnp.einsum(
        "BTF,FD->BTD", jax.nn.silu(gate) * up, down_FD, out_sharding=P("data", None, None)
    )
    if down.shape[1] % jax.sharding.get_abstract_mesh().shape["tensor"]:
        return down
    return jax.sharding.reshard(down, P("data", "tensor", None))


def whole_result(hidden, down):
    return jnp.einsum("BTF,FD->BTD", hidden, down, out_sharding=P("data", None, None))


@tp_mlp.mutant("You apply silu to `up`. It belongs to `gate`.")
def silu_of_up(x_BTD, gate_DF, up_DF, down_FD):
    return whole_result(jax.nn.silu(x_BTD @ up_DF) * (x_BTD @ gate_DF), down_FD)


@tp_mlp.mutant(
    "You apply silu to the product of both. It belongs to `gate` alone, before the two are multiplied."
)
def silu_of_both(x_BTD, gate_DF, up_DF, down_FD):
    return whole_result(jax.nn.silu((x_BTD @ gate_DF) * (x_BTD @ up_DF)), down_FD)


@tp_mlp.mutant(
    "You gather the batch. Its rows stay split over `data`, so `out_sharding` names `data` for the first dimension."
)
def gathers_rows(x_BTD, gate_DF, up_DF, down_FD):
    hidden = jax.nn.silu(x_BTD @ gate_DF) * (x_BTD @ up_DF)
    return jax.sharding.reshard(whole_result(hidden, down_FD), P(None, None, None))


# ------------------------------------------------------------------------ vocab_parallel_loss

vocab_loss = Exercise(
    "12.vocab_parallel_loss",
    title="A loss without the logits",
    function="vocab_parallel_loss",
    minutes=25,
    points=15,
    devices=8,
    forbid=("minitext.training.loss", "optax"),
    statement="""
Write `vocab_parallel_loss(x_XD, w_DV, targets_X)`: the cross-entropy $\\log \\sum_v e^{\\ell_{xv}} -
\\ell_{x,\\text{target}}$ of the logits $\\ell = xw$. The mesh has the Explicit axis `tensor`, and the columns of
`w_DV` are split over it.

- No device ever has a float array with V columns or rows.
- All collectives of the forward pass together carry at most three numbers for each token: a maximum, a sum,
  and the target's logit.
- Logits of ±90 and of ±1000 give finite losses that are correct to within float32 rounding.
- `jax.grad` works with respect to `x_XD` and `w_DV`.
- It is called inside `jax.jit` and `jax.set_mesh`. Under `jax.shard_map` the collectives are `jax.lax.pmax` and
  `jax.lax.psum`, and `jax.lax.axis_index` says which part of the vocabulary a device has.
""",
    hints=(
        "Write the formula with $m_i$ and $s_i$ of section 4 for one device's part. Which of the three "
        "numbers must all devices know before they can compute the next?",
        "The maximum first, by `pmax`. Then all devices subtract the same number, and `psum` adds their sums. A "
        "target in another device's part contributes 0 to the third number.",
        "`first + jnp.arange(v) == targets[:, None]` with `first = axis_index * v` marks the target, and "
        "`psum(sum(where(mark, logits, 0)))` is its logit. `pmax` has no gradient rule: "
        "`pmax(stop_gradient(...))`.",
    ),
)


def draw_loss(t, devices, scale=1.0, tokens=None):
    X, D = (int(n) for n in t.rng.integers(5, 20, 2))
    X, V = tokens or X, devices * int(t.rng.integers(11, 40))
    mesh = mesh_of(tensor=devices)
    plain = normal(t, X, D, scale=scale), normal(t, D, V), t.rng.integers(0, V, X).astype(np.int32)
    return mesh, plain


def on_mesh(mesh, plain):
    x, w, targets = plain
    return put(mesh, x, None, None), put(mesh, w, None, "tensor"), put(mesh, targets, None)


def normaliser(x, w, targets):
    logits = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    top = logits.max(axis=1)
    return top + np.log(np.exp(logits - top[:, None]).sum(axis=1))


def right_loss(x, w, targets):
    targets_logits = (np.asarray(x, np.float64) * np.asarray(w, np.float64).T[targets]).sum(axis=1)
    return normaliser(x, w, targets) - targets_logits


def device_0s(x, w, targets, n):
    """Losses where only device 0's part is right, by the sentence that describes the mistake."""
    logits = np.asarray(x, np.float64) @ w
    parts = logits.reshape(len(x), n, -1)
    tops, hit = parts.max(axis=2), logits[np.arange(len(x)), targets]
    top, own = tops.max(axis=1), np.exp(parts - tops[..., None]).sum(axis=2)
    size = np.exp(parts - top[:, None, None]).sum(axis=2)
    here = np.where(targets < logits.shape[1] // n, hit, 0)
    return {
        "Each device's sum is relative to its own maximum: share the maximum first": (
            np.log(own.sum(axis=1)) + tops[:, 0] - hit
        ),
        "Each device's sum and maximum are its own": np.log(own[:, 0]) + tops[:, 0] - hit,
        "The sums of exponentials aren't added up over devices": np.log(size[:, 0]) + top - hit,
        "The target's logit is on one device only: add it up over devices": (
            np.log(size.sum(axis=1)) + top - here
        ),
    }


def loss_is(t, fn, mesh, plain, why):
    args = on_mesh(mesh, plain)
    got = program(t, mesh, fn, *args)[0](*args)
    size = float(np.abs(plain[0] @ plain[1]).max())
    want = right_loss(*plain)
    with np.errstate(divide="ignore"):
        others = device_0s(*plain, mesh.shape["tensor"])
    mistakes = {
        "That is their sum: return each token's own": want.sum(),
        "That is their mean: return each token's own": want.mean(),
        "The sign is wrong: a loss is the normaliser minus the target's logit": -want,
        "That is the normaliser: the target's logit is still to be subtracted": normaliser(*plain),
    } | others
    t.close(got, want, rtol=1e-4, atol=1e-5 * max(1.0, size), why=why, mistakes=mistakes)


@vocab_loss.check("losses, eight parts of the vocabulary")
def _(fn, t):
    mesh, plain = draw_loss(t, 8, scale=0.2)
    loss_is(t, fn, mesh, plain, f"X = {len(plain[2])}, V = {plain[1].shape[1]}")


@vocab_loss.check("targets at the ends of each part")
def _(fn, t):
    mesh, (x, w, _) = draw_loss(t, 8, scale=0.2, tokens=16)
    ends = np.arange(w.shape[1], dtype=np.int32).reshape(8, -1)[:, [0, -1]].reshape(-1)
    loss_is(t, fn, mesh, (x, w, ends), "the first and the last token of every device")


@vocab_loss.check("hostile logits, three parts")
def _(fn, t):
    mesh, (x, w, targets) = draw_loss(t, 3)
    x[:, 0] = t.rng.choice([-1, 1], len(x)) * t.rng.permutation(
        np.where(np.arange(len(x)) % 2, 90, 1000)
    )
    w[0] = np.where(np.arange(w.shape[1]) % 3, -1, 1)
    w[1:] *= 0.1
    loss_is(t, fn, mesh, (x, w, targets), "logits of 90 and 1000, and of the opposite sign")


@vocab_loss.check("no logits of the whole vocabulary")
def _(fn, t):
    mesh, plain = draw_loss(t, 8, tokens=13)
    X, V = 13, plain[1].shape[1]
    compiled, found = program(t, mesh, fn, *on_mesh(mesh, plain))
    shapes = set(re.findall(r"\b(?:f|bf)\d+\[([\d,]+)\]", compiled.as_text()))
    wide = sorted(shape for shape in shapes if str(V) in shape.split(","))
    t.equal(len(wide), 0, why=f"float arrays with a dimension of V = {V}: {wide}")
    numbers = sum(c.runs * c.bytes for c in found) / (4 * X)
    why = f"{numbers:.1f} numbers for each token in all collectives, at most 3: {listed(found)}"
    t.true(numbers <= 3, why=why, observed=numbers)


@vocab_loss.check("gradients")
def _(fn, t):
    mesh, plain = draw_loss(t, 8, scale=0.2)
    weight = normal(t, len(plain[2]))

    def total(loss):
        return jax.grad(lambda x, w, targets: jnp.sum(loss(x, w, targets) * weight), argnums=(0, 1))

    def dense(x, w, targets):
        logits = x @ w
        target = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(logits, axis=1) - target

    args = on_mesh(mesh, plain)
    got = program(t, mesh, total(fn), *args)[0](*args)
    want = jax.jit(total(dense))(*plain)
    for name, g, w in zip(("x", "w"), got, want, strict=True):
        t.close(g, np.asarray(w), rtol=1e-3, atol=1e-4, why=f"the gradient of {name}")


def loss_by_hand(
    *, top=True, shared=True, stop=True, add=jax.lax.psum, offset=True, look_up=None, back=True, for_all=False,
    collect=False,
):  # fmt: skip
    """The solution with some of its parts left out."""

    def part(x, w, targets):
        logits = x @ w
        v = logits.shape[1]
        highest = jnp.max(logits, axis=1) * (1.0 if top else 0.0)
        highest = jax.lax.stop_gradient(highest) if stop else highest
        highest = jnp.full_like(highest, jnp.max(highest)) if for_all else highest
        if collect:
            everywhere = jnp.max(jax.lax.all_gather(highest, "tensor"), axis=0)
        else:
            everywhere = jax.lax.pmax(highest, "tensor")
        base = everywhere if shared else highest
        size = add(jnp.sum(jnp.exp(logits - base[:, None]), axis=1), "tensor")
        first = jax.lax.axis_index("tensor") * v if offset else 0
        if look_up is None:
            hit = first + jnp.arange(v) == targets[:, None]
            target = jnp.sum(jnp.where(hit, logits, 0.0), axis=1)
        else:
            target = look_up(logits, targets - first)
        log_size = jnp.log(size) + (everywhere if back else 0.0)
        return log_size - jax.lax.psum(target, "tensor")

    def loss(x, w, targets):
        specs = P(), P(None, "tensor"), P()
        return jax.shard_map(part, in_specs=specs, out_specs=P(), check_vma=False)(x, w, targets)

    return loss


@vocab_loss.mutant(
    "You gather the logits, or the weights that make them. Each device then has all V columns, which is what "
    "splitting the vocabulary should avoid."
)
def gathers_logits(x_XD, w_DV, targets_X):
    logits = jax.sharding.reshard(jnp.einsum("XD,DV->XV", x_XD, w_DV), P(None, None))
    hit = jnp.arange(logits.shape[1]) == targets_X[:, None]
    target = jnp.sum(jnp.where(hit, logits, 0.0), axis=1)
    return jax.nn.logsumexp(logits, axis=1) - target


@vocab_loss.mutant(
    "You subtract each device's own maximum and then add the sums: they are relative to different numbers. "
    "Share the maximum first."
)
def own_maximum(x_XD, w_DV, targets_X):
    return loss_by_hand(shared=False)(x_XD, w_DV, targets_X)


@vocab_loss.mutant(
    "You subtract nothing, and exp overflows float32 from 89 on. First subtract the largest logit of all devices."
)
def nothing_subtracted(x_XD, w_DV, targets_X):
    return loss_by_hand(top=False)(x_XD, w_DV, targets_X)


@vocab_loss.mutant(
    "You compare targets with 0 .. v-1 on every device. Device i has the tokens from i*v on, so add "
    "`axis_index` times v."
)
def forgets_offset(x_XD, w_DV, targets_X):
    return loss_by_hand(offset=False)(x_XD, w_DV, targets_X)


@vocab_loss.mutant(
    "You look the target up on every device, even where it isn't: an index outside is clipped to an end, and "
    "that logit is added. Use zero there."
)
def clipped_index(x_XD, w_DV, targets_X):
    def clipped(logits, index):
        index = jnp.clip(index, 0, logits.shape[1] - 1)
        return jnp.take_along_axis(logits, index[:, None], axis=1)[:, 0]

    return loss_by_hand(look_up=clipped)(x_XD, w_DV, targets_X)


@vocab_loss.mutant(
    "Your losses are NaN because a target in another device's part is not an index into this part's logits, and "
    "`jnp.take_along_axis` fills in NaN for it. Look up an index that exists, and use 0 where the target isn't here."
)
def index_outside(x_XD, w_DV, targets_X):
    def filled(logits, index):
        return jnp.take_along_axis(logits, index[:, None], axis=1)[:, 0]

    return loss_by_hand(look_up=filled)(x_XD, w_DV, targets_X)


@vocab_loss.mutant(
    "You index this part's logits with targets of other parts too. JAX counts a negative index from the end and clips "
    "one that is too large, so another token's logit is added: use 0 where the target isn't here."
)
def index_wraps(x_XD, w_DV, targets_X):
    def wrapped(logits, index):
        return logits[jnp.arange(len(index)), index]

    return loss_by_hand(look_up=wrapped)(x_XD, w_DV, targets_X)


@vocab_loss.mutant(
    "You average the sums of exponentials over the devices. They are parts of one sum, so your losses are too "
    "low by the logarithm of the number of devices."
)
def averages_sums(x_XD, w_DV, targets_X):
    return loss_by_hand(add=jax.lax.pmean)(x_XD, w_DV, targets_X)


@vocab_loss.mutant(
    "`pmax` has no gradient rule and doesn't need one, because the loss doesn't depend on what you subtract. Put "
    "`jax.lax.stop_gradient` around its argument, not around its result."
)
def differentiates_maximum(x_XD, w_DV, targets_X):
    return loss_by_hand(stop=False)(x_XD, w_DV, targets_X)


@vocab_loss.mutant(
    "You gather the maxima of all devices, n numbers for each token. One is enough: `pmax` of a stopped gradient."
)
def gathers_maxima(x_XD, w_DV, targets_X):
    return loss_by_hand(collect=True)(x_XD, w_DV, targets_X)


@vocab_loss.mutant(
    "You subtract the maximum and never add it back: the normaliser is the maximum plus the logarithm of the sum."
)
def never_adds_back(x_XD, w_DV, targets_X):
    return loss_by_hand(back=False)(x_XD, w_DV, targets_X)


@vocab_loss.mutant(
    "You subtract one maximum for all tokens. Where a token's own logits are far below it, all exponentials are 0 and "
    "their logarithm is minus infinity. Give each token its own maximum."
)
def one_maximum_for_all(x_XD, w_DV, targets_X):
    return loss_by_hand(for_all=True)(x_XD, w_DV, targets_X)


# ----------------------------------------------------------------------------- ring_attention

ring = Exercise(
    "12.ring_attention",
    title="Causal attention around a ring",
    function="ring_attention",
    minutes=35,
    points=20,
    devices=8,
    forbid=("minitext.sharding.context_parallel", "minitext.kernels", "minitext.models.attention"),
    statement="""
Write `ring_attention(q_BTNH, k_BTNH, v_BTNH)`: causal attention, with logits divided by $\\sqrt{H}$, on a mesh
with the Explicit axis `context`. Tokens are split over it **in order**: with t tokens on each device, device
i has the positions i·t to (i+1)·t - 1.

- Keys and values go around a ring by `jax.lax.ppermute`. On n devices each device sends n - 1 parts of keys
  and n - 1 of values to its neighbour, and there is no other collective.
- Blocks are merged by an online softmax: one running `out`, `top` and `size`, divided at the end. Nothing is
  collected: a device computes the scores of one block [t, t] at a time. The check uses t < H, so a block's
  scores are smaller than its keys. It allows no array larger than a device's keys and values together.
- Logits of ±90 give finite and correct results. t may be 1, and n need not be even.
- You needn't balance the load: a device may compute blocks that it masks completely.
- It is called inside `jax.jit` and `jax.set_mesh`; you write the `jax.shard_map`.
""",
    hints=(
        "Start from `ring_without_mask`: it already passes keys and values on and merges blocks the way you need. It "
        "only lacks a mask for each block. Whose keys does a device hold after r turns?",
        "If every device sends to the next one, device i holds the keys of device (i - r) mod n after r turns. A "
        "query at position p sees a key at position s if p >= s, counted in the whole row.",
        "Begin with the device's own block, in which every query sees itself. Mask with -1e30: a block without "
        "visible keys is then scaled by exp(-1e30 - top) = 0, where -inf would give NaN. Let the scan run "
        "n - 1 times, with `ppermute` first.",
    ),
)


def draw_qkv(t, n, per_device=None, scale=1.0):
    # With one head, or as many heads as a device has tokens or a head has numbers, mistakes in the axes don't show.
    B, N = int(t.rng.integers(1, 3)), int(t.rng.integers(2, 4))
    part, H = per_device or int(t.rng.integers(4, 9)), int(t.rng.integers(4, 12))
    q, k, v = (normal(t, B, n * part, N, H) for _ in range(3))
    return mesh_of(context=n), (scale * q, k, v)


def right_attention(q, k, v, seen=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    logits = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    seen = np.tri(q.shape[1], dtype=bool) if seen is None else seen
    logits = np.where(seen, logits, -np.inf)
    exps = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("BNTS,BSNH->BTNH", exps / exps.sum(axis=-1, keepdims=True), v)


def other_attentions(q, k, v, n):
    """Results of other masks than the causal one on n devices, under what is to be said of them."""
    T, H = q.shape[1], q.shape[-1]
    device = np.arange(T) // (T // n)
    ours, theirs = device[:, None], device
    causal = np.tri(T, dtype=bool)
    return {
        "That is attention without a mask": right_attention(q, k, v, np.ones((T, T), bool)),
        "Each query sees its own device's keys alone": right_attention(
            q, k, v, causal & (ours == theirs)
        ),
        "Each query sees all keys of its own device, later ones too": right_attention(
            q, k, v, ours >= theirs
        ),
        "The keys of the first device, which go furthest, are missing on the last: turn n - 1 "
        "times": right_attention(q, k, v, causal & (ours - theirs < n - 1)),
        "The mask is upside down: each query sees itself and later tokens": right_attention(
            q, k, v, causal.T
        ),
        "The logits are divided by H, not by its square root": right_attention(
            q / math.sqrt(H), k, v
        ),
        "The logits are divided by the square root of all heads' width, not of one's": (
            right_attention(q / math.sqrt(q.shape[2]), k, v)
        ),
        "A query doesn't see its own key": right_attention(q, k, v, np.tri(T, k=-1, dtype=bool)),
    }


def unscaled(q, k, v, n):
    """Results of online softmaxes that don't rescale or divide, under what is to be said of them."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    logits = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    logits = np.where(np.tri(q.shape[1], dtype=bool), logits, -np.inf)
    t = q.shape[1] // n
    seen = {
        "When the maximum rises, neither sum is rescaled": (0, 0, 1),
        "When the maximum rises, the sum of values isn't rescaled": (0, 1, 1),
        "When the maximum rises, the sum of exponentials isn't rescaled": (1, 0, 1),
        "The result isn't divided by the sum of exponentials": (1, 1, 0),
    }
    found = {}
    for told, (rescales_out, rescales_size, divides) in seen.items():
        rows = []
        for me in range(n):
            top, size, out = np.full((*q.shape[::2], t, 1), -1e30), 0.0, 0.0
            for turn in range(n):
                part = slice((me - turn) % n * t, ((me - turn) % n + 1) * t)
                block = logits[:, :, me * t : (me + 1) * t, part]
                new = np.maximum(top, block.max(axis=-1, keepdims=True))
                exps, fade = np.exp(block - new), np.exp(top - new)
                size = size * (fade if rescales_size else 1) + exps.sum(axis=-1, keepdims=True)
                out = out * (fade if rescales_out else 1) + np.einsum(
                    "BNTS,BSNH->BNTH", exps, v[:, part]
                )
                top = new
            rows.append(out / size if divides else out)
        found[told] = np.swapaxes(np.concatenate(rows, axis=2), 1, 2)
    return found


def attention_is(t, fn, mesh, plain, why):
    args = [put(mesh, x, None, "context") for x in plain]
    got = program(t, mesh, fn, *args)[0](*args)
    want, n = right_attention(*plain), mesh.shape["context"]
    with np.errstate(invalid="ignore"):
        mistakes = other_attentions(*plain, n) | unscaled(*plain, n)
    t.close(got, want, rtol=2e-3, atol=2e-3, why=why, mistakes=mistakes)


@ring.check("values, a ring of four")
def _(fn, t):
    mesh, plain = draw_qkv(t, 4)
    attention_is(t, fn, mesh, plain, f"shapes {plain[0].shape}")


@ring.check("a ring of three, and one token on each device")
def _(fn, t):
    attention_is(t, fn, *draw_qkv(t, 3), "three devices")
    attention_is(t, fn, *draw_qkv(t, 8, per_device=1), "eight devices with one token each")


@ring.check("hostile logits")
def _(fn, t):
    mesh, (q, k, v) = draw_qkv(t, 4)
    # Each token's keys have one sign for a whole device, so maxima jump from block to block.
    n, H = k.shape[1] // 4, q.shape[-1]
    signs = np.repeat(np.float32([-1, 1, -1, 1]), n)[None, :, None]
    q[..., 0], k[..., 0] = 90 * math.sqrt(H), signs
    attention_is(t, fn, mesh, (q, k, v), "blocks whose logits are all near 90 or all near -90")


@ring.check("what is sent")
def _(fn, t):
    mesh, plain = draw_qkv(t, 8)
    args = [put(mesh, x, None, "context") for x in plain]
    found = program(t, mesh, fn, *args)[1]
    kinds = sorted({c.kind for c in found})
    t.equal(kinds, ["collective-permute"], why=f"the kinds of collectives: {listed(found)}")
    sent, part = sum(c.runs * c.moved for c in found), plain[1].nbytes // 8
    why = f"{sent / part:g} parts of {part:,} bytes sent by each of 8 devices, want 14: {listed(found)}"
    t.true(sent == 14 * part, why=why, observed=sent / part)


@ring.check("what a device holds")
def _(fn, t):
    # A part of keys is then larger than the scores of a block, and the scores of a whole row are larger than two.
    n, B, N, per_device, H = 8, 2, 1, 8, 16
    plain = [normal(t, B, n * per_device, N, H) for _ in "qkv"]
    mesh = mesh_of(context=n)
    args = [put(mesh, x, None, "context") for x in plain]
    compiled, _ = program(t, mesh, fn, *args)
    found = re.findall(r"\bf32\[([\d,]+)\]", compiled.as_text())
    shapes = {tuple(map(int, dims.split(","))) for dims in found}
    largest, part = max(shapes, key=math.prod), B * per_device * N * H
    share = math.prod(largest) / part
    why = f"the largest array on a device, {list(largest)}, is {share:g} times as large as its keys; at most 2"
    t.true(share <= 2, why=why, observed=share)


def ring_by_hand(
    *, owner=lambda me, turn, n: (me - turn) % n, masked=-1e30, top=True, rescale=True, resize=True,
    average=False, extra=0, scale=lambda q: math.sqrt(q.shape[3]), gather=False, collect=False, own=True,
    twice=False, values=True, heads_last=lambda out: jnp.swapaxes(out, 1, 2),
):  # fmt: skip
    """The solution with some of its parts changed."""

    def part(q, k, v):
        n, me = jax.lax.axis_size("context"), jax.lax.axis_index("context")
        t = q.shape[1]
        place = jnp.arange(t)
        onwards = [(device, (device + 1) % n) for device in range(n)]

        def block(k, v, first, keys=t):
            logits = jnp.einsum("BTNH,BSNH->BNTS", q, k) / scale(q)
            seen = (me * t + place)[:, None] - (not own) >= first + jnp.arange(keys)
            logits = jnp.where(seen, logits, masked)
            highest = jnp.max(logits, axis=-1) * (1.0 if top else 0.0)
            exps = jnp.exp(logits - highest[..., None])
            out, size = jnp.einsum("BNTS,BSNH->BNTH", exps, v), jnp.sum(exps, axis=-1)
            if average or twice:
                out = out / size[..., None]
            return out, highest, jnp.ones_like(size) if average else size

        def turn(carry, number):
            (out, high, size), held = carry
            k, v = jax.lax.ppermute(held, "context", onwards)
            held = k, v if values else held[1]
            out_2, high_2, size_2 = block(*held, owner(me, number, n) * t)
            new = jnp.maximum(high, high_2)
            a, b = jnp.exp(high - new), jnp.exp(high_2 - new)
            out = out * (a[..., None] if rescale else 1.0) + out_2 * b[..., None]
            size = size * a + size_2 * b if resize else size + size_2
            return ((out, new, size), held), None

        if collect:
            hands = [(k, v)]
            for _ in range(n - 1):
                hands.append(jax.lax.ppermute(hands[-1], "context", onwards))
            # In the row's order: what device 0 has, what device 1 has, and so on.
            turn_of = (me - jnp.arange(n)) % n
            k, v = (
                jnp.reshape(
                    jnp.swapaxes(jnp.stack(x)[turn_of], 0, 1), (q.shape[0], n * t, *q.shape[2:])
                )
                for x in zip(*hands, strict=True)
            )
            out, _, size = block(k, v, 0, n * t)
        elif gather:
            k, v = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v))
            out, _, size = block(k, v, 0, n * t)
        else:
            carry = block(k, v, me * t), (k, v)
            (state, held), _ = jax.lax.scan(turn, carry, jnp.arange(1, n))
            out, _, size = state
            if extra:  # home again, and in use so that the compiler keeps it
                held = jax.lax.ppermute(held, "context", onwards)
                size = size + 0.0 * jnp.sum(held[0] * held[1])
        return heads_last(out / size[..., None])

    def attention(q, k, v):
        spec = P(None, "context")
        return jax.shard_map(part, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(q, k, v)

    return attention


@ring.mutant(
    "You rescale the sum of exponentials when the maximum grows, but not the weighted sum of values. Both are "
    "relative to the old maximum."
)
def accumulator_not_rescaled(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(rescale=False)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You subtract no maximum: exp overflows float32 from 89 on. Keep a running maximum, and rescale what you "
    "have when it grows."
)
def no_maximum(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(top=False)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You apply the triangle of a device's own block to every block. Positions count in the whole row: all your "
    "queries see an earlier device's keys, and none of them a later one's."
)
def triangle_everywhere(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(owner=lambda me, turn, n: me)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You have the direction of the ring wrong: if every device sends to the next one, you hold the keys of "
    "device (i - r) mod n after r turns, not of (i + r)."
)
def other_direction(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(owner=lambda me, turn, n: (me + turn) % n)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You mask with minus infinity. In a block where a query sees nothing, the maximum is minus infinity too, "
    "and their difference is not a number. Use -1e30."
)
def minus_infinity(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(masked=-jnp.inf)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You normalise each block and then weight the blocks by their maxima alone. A block's weight is its sum of "
    "exponentials: divide once, at the end."
)
def divides_each_block(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(average=True)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You divide each block by its own sum, and the merged blocks by the sum over all. Divide once, at the end."
)
def divides_twice(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(twice=True)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You pass on the keys, but the values stay on their device. A device needs both of the same tokens: `ppermute` "
    "them together."
)
def values_stay(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(values=False)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You reshape [B, N, t, H] to [B, t, N, H], which leaves the numbers in the order of heads. To change the order of "
    "two axes, swap them: `jnp.swapaxes(out, 1, 2)`."
)
def reshaped(q_BTNH, k_BTNH, v_BTNH):
    B, _, N, H = q_BTNH.shape
    return ring_by_hand(heads_last=lambda out: out.reshape(B, -1, N, H))(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant("You forget to divide the logits by the square root of H.")
def not_scaled(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(scale=lambda q: 1.0)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You divide the logits by the square root of the number of heads. H is the width of a head, the last dimension."
)
def scaled_by_heads(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(scale=lambda q: math.sqrt(q.shape[2]))(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You rescale the sum of values when the maximum grows, but not the sum of exponentials. Both are relative to "
    "the old maximum."
)
def size_not_rescaled(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(resize=False)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "Your mask hides a query's own position. A query at position p sees a key at position s if p >= s."
)
def hides_itself(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(own=False)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You count your turns from 0, but the keys have moved before you use them: after the first `ppermute` you hold "
    "the keys of device i - 1."
)
def one_turn_behind(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(owner=lambda me, turn, n: (me - turn + 1) % n)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You collect all keys that come round and compute with them at the end. The bytes sent are right, but each device "
    "holds the whole row's keys: merge each block when it arrives."
)
def collects_keys(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(collect=True)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You send n parts of keys and of values. The last turn brings every device its own keys again, which it "
    "doesn't need. Start with the own block and turn n - 1 times."
)
def one_turn_too_many(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(extra=1)(q_BTNH, k_BTNH, v_BTNH)


@ring.mutant(
    "You gather all keys and values. The answer is right, but each device holds the whole row: pass on one "
    "part at a time by `ppermute`."
)
def gathers_keys(q_BTNH, k_BTNH, v_BTNH):
    return ring_by_hand(gather=True)(q_BTNH, k_BTNH, v_BTNH)


# -------------------------------------------------------------------------------------- zigzag

zigzag = Exercise(
    "12.zigzag",
    title="The order that shares the work equally",
    function="zigzag_order",
    minutes=15,
    points=10,
    forbid=(
        "minitext.sharding.context_parallel",
        "minitext.sharding.collective_matmul",
    ),
    statement="""
Write `zigzag_order(T, devices)` in NumPy. It cuts a row of T tokens into `2 * devices` pieces of equal length
and returns `(pieces, order, back)`:

- `pieces` [devices, 2]: the two pieces of each device, the earlier one first. A token at position p costs p + 1,
  and every device must have the same work, for any T and any number of devices. Device i's earlier piece is
  piece i.
- `order` [T]: `row[order]` has the tokens of device 0, then those of device 1, and so on. Within a piece, tokens
  keep their order.
- `back` [T]: undoes `order`, so `row[order][back]` is `row`.
- If T can't be cut into `2 * devices` equal pieces, raise a `ValueError`.
""",
    hints=(
        "The cost of a piece grows by the same amount from each piece to the next. Which pairs of 0 .. 2n-1 "
        "have the same sum?",
        "Device i has the pieces i and 2n-1-i. Reshape `np.arange(T)` to a table with one row for each piece, and "
        "pick rows.",
        "`tokens = np.arange(T).reshape(2 * devices, -1)`, then `tokens[pieces.reshape(-1)].reshape(-1)`. "
        "The inverse of a permutation is its `np.argsort`.",
    ),
)


def right_order(T, devices):
    first = np.arange(devices)
    pieces = np.stack([first, 2 * devices - 1 - first], axis=1)
    order = np.arange(T).reshape(2 * devices, -1)[pieces.reshape(-1)].reshape(-1)
    return pieces, order, np.argsort(order)


def draw_row(t):
    devices = int(t.rng.integers(3, 12))
    return 2 * devices * int(t.rng.integers(2, 9)), devices


def order_is(t, fn, T, devices, parts=("pieces", "order", "back")):
    got, want = fn(T, devices), right_order(T, devices)
    t.equal(len(got), 3, why="how many arrays are returned")
    for name, g, w in zip(("pieces", "order", "back"), got, want, strict=True):
        if name in parts:
            t.equal(np.asarray(g), w, why=f"{name} of T = {T}, devices = {devices}")


@zigzag.check("pieces")
def _(fn, t):
    T, devices = draw_row(t)
    pieces, last = np.asarray(fn(T, devices)[0]), 2 * devices - 1
    t.equal(list(pieces.shape), [devices, 2], why="the shape of pieces")
    why = f"{devices} devices share the pieces 0 to {last}; yours go from {pieces.min()} to {pieces.max()}"
    t.true(pieces.min() >= 0 and pieces.max() <= last, why=why, observed=pieces)
    order_is(t, fn, T, devices, parts=("pieces",))


@zigzag.check("the same work for every device")
def _(fn, t):
    T, devices = draw_row(t)
    pieces, order = (np.asarray(x) for x in fn(T, devices)[:2])
    t.equal(
        order.size, T, why="how many entries `order` has: one for each token, not for each piece"
    )
    t.equal(sorted(order.reshape(-1).tolist()), list(range(T)), why="each token once")
    for device, tokens in enumerate(order.reshape(devices, -1)):
        held = sorted(set((tokens // (T // (2 * devices))).tolist()))
        why = f"`order` gives device {device} tokens of the pieces {held}, `pieces` says {pieces[device].tolist()}"
        t.true(held == sorted(pieces[device].tolist()), why=why, observed=order)
    work = (order.reshape(devices, -1) + 1).sum(axis=1)
    why = f"work of each of {devices} devices for T = {T}: {work.tolist()}"
    t.true(np.ptp(work) == 0, why=why, observed=work)


@zigzag.check("the order of tokens")
def _(fn, t):
    order_is(t, fn, *draw_row(t), parts=("order",))


@zigzag.check("the way back")
def _(fn, t):
    T, devices = draw_row(t)
    row = t.rng.normal(size=(T, 2))
    _, order, back = fn(T, devices)
    t.close(row[np.asarray(order)][np.asarray(back)], row, why="row[order][back]")
    order_is(t, fn, T, devices)


@zigzag.check("one device, and pieces of one token")
def _(fn, t):
    order_is(t, fn, 2 * int(t.rng.integers(2, 9)), 1)
    devices = int(t.rng.integers(3, 12))
    order_is(t, fn, 2 * devices, devices)


@zigzag.check("rows that cannot be cut")
def _(fn, t):
    T, devices = draw_row(t)
    t.raises(ValueError, fn, T + devices, devices, why=f"T = {T + devices}, devices = {devices}")
    t.raises(ValueError, fn, T + 1, devices, why=f"T = {T + 1}, devices = {devices}")


@zigzag.check("integer arrays, for long rows too")
def _(fn, t):
    devices = int(t.rng.integers(3, 6))
    arrays = fn(2 * devices * 7000, devices)
    kinds = ["integers" if x.dtype.kind in "iu" else str(x.dtype) for x in map(np.asarray, arrays)]
    t.equal(kinds, ["integers"] * 3, why="the dtypes of pieces, order and back")
    t.equal([isinstance(x, np.ndarray) for x in arrays], [True] * 3, why="are they NumPy arrays?")
    order_is(t, fn, 2 * devices * 7000, devices)


def with_pieces(T, devices, pieces):
    tokens = np.arange(T).reshape(2 * devices, -1)
    order = tokens[np.asarray(pieces).reshape(-1)].reshape(-1)
    return np.asarray(pieces), order, np.argsort(order)


@zigzag.mutant(
    "You give device i the pieces 2i and 2i+1. That is the order of the row, so the last device works most."
)
def in_row_order(T, devices):
    return with_pieces(T, devices, np.arange(2 * devices).reshape(devices, 2))


@zigzag.mutant(
    "You give device i the pieces i and i + n. Both grow with i, so its work does too: the second must fall as the "
    "first rises."
)
def both_rise(T, devices):
    return with_pieces(T, devices, np.arange(2 * devices).reshape(2, devices).T)


@zigzag.mutant(
    "Your pairs are right, but you deal them to the devices in another order. Device 0 has the first piece of the row, "
    "device 1 the second."
)
def pairs_in_another_order(T, devices):
    return with_pieces(T, devices, right_order(T, devices)[0][::-1])


@zigzag.mutant("Your pieces are floats. They are numbers of pieces, so make them integers.")
def float_pieces(T, devices):
    pieces, order, back = right_order(T, devices)
    return pieces.astype(np.float64), order, back


@zigzag.mutant(
    "Your integers are too narrow for long rows, and wrap around to negative positions. Rows may have "
    "a hundred thousand tokens: leave NumPy's own integers as they are."
)
def too_narrow(T, devices):
    return tuple(x.astype(np.int16) for x in right_order(T, devices))


@zigzag.mutant("You return lists. NumPy arrays are asked for: `row[order]` needs an array.")
def returns_lists(T, devices):
    return tuple(x.tolist() for x in right_order(T, devices))


@zigzag.mutant("You put the later piece of a device first.")
def later_first(T, devices):
    return with_pieces(T, devices, right_order(T, devices)[0][:, ::-1])


@zigzag.mutant(
    "You deal tokens out one by one. That's nearly even, but the last device always has the later token: use pieces."
)
def deals_tokens(T, devices):
    order = np.arange(T).reshape(-1, devices).T.reshape(-1)
    return right_order(T, devices)[0], order, np.argsort(order)


@zigzag.mutant(
    "You reverse the tokens of the later piece. Only the order of pieces goes back and forth; within a piece "
    "tokens keep theirs."
)
def tokens_turned(T, devices):
    pieces, order, _ = right_order(T, devices)
    halves = order.reshape(devices, 2, -1).copy()
    halves[:, 1] = halves[:, 1, ::-1]
    order = halves.reshape(-1)
    return pieces, order, np.argsort(order)


@zigzag.mutant(
    "You apply the order again to undo it. This permutation isn't its own inverse: `back` says where each token "
    "went, `np.argsort(order)`."
)
def own_inverse(T, devices):
    pieces, order, _ = right_order(T, devices)
    return pieces, order, order


@zigzag.mutant(
    "You accept rows that divide by the number of devices but not by twice as many: T must be divisible by "
    "2 * devices."
)
def accepts_odd_pieces(T, devices):
    if T % devices:
        raise ValueError(T)
    return right_order(T - T % (2 * devices), devices)
