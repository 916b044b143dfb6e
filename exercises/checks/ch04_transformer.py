import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minitext.book.grading import Exercise
from minitext.config.config import load_config
from minitext.config.model import ModelConfig
from minitext.models.transformer import Transformer, make_cache


def equations(fn, *args):
    """Each equation in the jaxpr of fn(*args) and in inner jaxprs, with how often scans run it."""

    def walk(jaxpr, trips):
        for eqn in jaxpr.eqns:
            yield eqn, trips
            inner_trips = (
                trips * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else trips
            )
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(value):
                    yield from walk(getattr(value, "jaxpr", value), inner_trips)

    def is_jaxpr(value):
        return hasattr(getattr(value, "jaxpr", value), "eqns")

    yield from walk(jax.make_jaxpr(fn)(*args).jaxpr, 1)


def jitted(fn, *arrays, **settings):
    """fn(*arrays, **settings) as one program: op by op, each shape would compile a dozen."""
    return jax.jit(lambda *args: fn(*args, **settings))(*arrays)


# ----------------------------------------------------------------------------------- rms_norm

rms_norm = Exercise(
    "04.rms_norm",
    title="RMSNorm in sixteen bits",
    function="rms_norm_f32",
    minutes=15,
    points=10,
    statement="""
Write `rms_norm_f32(x, scale_D, eps)`. Divide each vector (the last dimension of `x`) by the root of
its mean square plus `eps`, and multiply by `scale_D`:

$$
y_d = \\frac{x_d}{\\sqrt{\\tfrac1D \\sum_{e} x_e^2 + \\varepsilon}}\\; s_d .
$$

- `x` has any number of leading dimensions and is float32, bfloat16 or float16. The result has its
  shape and dtype.
- All arithmetic is float32, and the result is rounded to the dtype of `x` **once**, at the end. The
  checks compare with float64, read your jaxpr, and run the function under `jax.jit`.
- A vector of zeros gives zeros. The gradient is that of the formula, and finite, at zeros too.
""",
    hints=(
        "In which dtype is each intermediate result? Print `jax.make_jaxpr(rms_norm_f32)(x, "
        "scale)` for a bfloat16 `x`.",
        "You need one cast at the beginning and one at the end. And check where you add "
        "`eps`: what is a vector of zeros divided by?",
        "`x_f32 = x.astype(jnp.float32)`, then `jnp.mean(jnp.square(x_f32), axis=-1, "
        "keepdims=True)`, then `x_f32 * jax.lax.rsqrt(mean_square + eps) * scale_D`, and "
        "`.astype(x.dtype)` around all of it.",
    ),
)


def rms_norm_f64(x, scale_D, eps):
    x = np.asarray(x).astype(np.float64)
    mean_square = np.mean(x**2, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + eps) * np.asarray(scale_D, np.float64)


def vectors(t, shape, dtype=jnp.float32, size=1.0, middle=0.0):
    return jnp.asarray((middle + size * t.rng.normal(size=shape)).astype(dtype))


def scales(t, width):
    return jnp.asarray(t.rng.uniform(0.5, 2.0, width).astype(np.float32))


@rms_norm.check("float32 vectors, any leading dimensions")
def _(fn, t):
    for shape in ((2, 3, 7), (5,), (4, 1)):
        x, scale_D = vectors(t, shape, size=3.0, middle=0.5), scales(t, shape[-1])
        got, want = jitted(fn, x, scale_D, eps=1e-6), rms_norm_f64(x, scale_D, 1e-6)
        t.close(got, want, rtol=1e-5, dtype=jnp.float32, why=f"x of shape {shape}")


@rms_norm.check("short vectors, where eps counts")
def _(fn, t):
    scale_D = scales(t, 12)
    for size, eps in ((1e-3, 1e-6), (0.1, 1e-2), (0.0, 1e-5)):
        x = vectors(t, (3, 12), size=size)
        got, want = jitted(fn, x, scale_D, eps=eps), rms_norm_f64(x, scale_D, eps)
        t.close(got, want, rtol=1e-4, why=f"entries near {size}, eps={eps}")


@rms_norm.check("vectors don't see each other")
def _(fn, t):
    x, scale_D = vectors(t, (2, 4, 16)), scales(t, 16)
    other = np.array(x)
    other[1, 2] *= 50.0
    before, after = (np.asarray(jitted(fn, y, scale_D, eps=1e-6)) for y in (x, other))
    t.equal(after[0], before[0], why="another row of the batch changed")
    t.equal(after[1, :2], before[1, :2], why="a later vector of the row changed")


@rms_norm.check("bfloat16 is rounded once")
def _(fn, t):
    x, scale_D = vectors(t, (16, 300), jnp.bfloat16, 3.0), scales(t, 300)
    got = np.asarray(jitted(fn, x, scale_D, eps=1e-6))
    want = rms_norm_f64(x, scale_D, 1e-6).astype(jnp.bfloat16)
    t.close(got, want, rtol=0.03, atol=0.01, dtype=jnp.bfloat16, why="the result in bfloat16")
    off = float(np.mean(got != want))
    why = f"{100 * off:.0f}% of the values are not the bfloat16 nearest to the true value"
    t.true(off < 0.01, why=why, observed=got)


@rms_norm.check("float16, whose squares would overflow")
def _(fn, t):
    x, scale_D = vectors(t, (4, 32), jnp.float16, 500.0), scales(t, 32)
    got = jitted(fn, x, scale_D, eps=1e-6)
    t.finite(got)
    t.close(got, rms_norm_f64(x, scale_D, 1e-6), rtol=2e-3, atol=1e-3, dtype=jnp.float16)


@rms_norm.check("no arithmetic in sixteen bits")
def _(fn, t):
    x, scale_D = vectors(t, (3, 16), jnp.bfloat16), scales(t, 16)
    arithmetic = {
        "add",
        "div",
        "dot_general",
        "integer_pow",
        "mul",
        "reduce_sum",
        "rsqrt",
        "square",
    }
    narrow = sorted(
        {
            eqn.primitive.name
            for eqn, _ in equations(lambda x: fn(x, scale_D, 1e-6), x)
            if eqn.primitive.name in arithmetic and eqn.outvars[0].aval.dtype == jnp.bfloat16
        }
    )
    t.equal(narrow, [], why="operations of your jaxpr whose result is bfloat16")


@rms_norm.check("the gradient at a vector of zeros is finite")
def _(fn, t):
    scale_D = scales(t, 8)
    t.finite(
        jitted(jax.grad(lambda x: jnp.sum(fn(x, scale_D, 1e-6))), np.zeros((2, 8), np.float32))
    )


@rms_norm.check("the gradient is the formula's")
def _(fn, t):
    x, g, s = (np.asarray(t.rng.normal(size=(4, 8)), np.float64) for _ in range(3))
    x[3], s, eps = 0.0, 1 + s[0], 0.01
    root = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    of_x = root * g * s - x * root**3 * np.mean(g * s * x, axis=-1, keepdims=True)
    of_scale = np.sum(g * x * root, axis=0)
    loss = lambda x, s: jnp.sum(jnp.asarray(g, jnp.float32) * fn(x, s, eps))  # noqa: E731
    args = (jnp.asarray(x, jnp.float32), jnp.asarray(s, jnp.float32))
    got = jitted(jax.grad(loss, argnums=(0, 1)), *args)
    t.close(got[0], of_x, rtol=1e-4, atol=1e-5, why="the gradient of x, whose last row is zeros")
    t.close(got[1], of_scale, rtol=1e-4, atol=1e-5, why="the gradient of scale_D")


@rms_norm.mutant(
    "You stop the gradient at the root. The root depends on every coordinate of x too, and the "
    "gradient of the formula goes through it."
)
def constant_root(x, scale_D, eps=1e-6):
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * jax.lax.stop_gradient(root) * scale_D).astype(x.dtype)


@rms_norm.mutant(
    "You treat a vector of zeros apart, and its gradient is 0. The formula needs no exception: eps "
    "keeps the root above 0, and the gradient there is `scale_D / sqrt(eps)`."
)
def zeros_apart(x, scale_D, eps=1e-6):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    y = jnp.where(mean == 0, 0.0, wide * jax.lax.rsqrt(mean + eps) * scale_D)
    return y.astype(x.dtype)


def normalised(x_f32, eps, axis=-1):
    return x_f32 * jax.lax.rsqrt(jnp.mean(x_f32**2, axis=axis, keepdims=True) + eps)


@rms_norm.mutant(
    "You square and average in the dtype of x. A bfloat16 square keeps 8 bits, and a float16 "
    "square overflows above 255. Cast x to float32 before the square."
)
def squares_in_the_dtype_of_x(x, scale_D, eps=1e-6):
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True).astype(jnp.float32)
    return (x.astype(jnp.float32) * jax.lax.rsqrt(mean_square + eps) * scale_D).astype(x.dtype)


@rms_norm.mutant(
    "You round to the dtype of x before you multiply by the scale, so the product is rounded "
    "again. (MaxText and Hugging Face do it this way; here one cast at the end is asked for.)"
)
def rounds_twice(x, scale_D, eps=1e-6):
    y = normalised(x.astype(jnp.float32), eps).astype(x.dtype)
    return y * scale_D.astype(x.dtype)


@rms_norm.mutant("You subtract the mean first. That is LayerNorm; RMSNorm leaves the mean alone.")
def subtracts_the_mean(x, scale_D, eps=1e-6):
    x_f32 = x.astype(jnp.float32)
    centred = x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True)
    return (normalised(centred, eps) * scale_D).astype(x.dtype)


@rms_norm.mutant(
    "You add eps outside the root. Add it to the mean square, under the root; outside, its "
    "effect is much smaller for short vectors, and the gradient at zero isn't finite."
)
def eps_outside_the_root(x, scale_D, eps=1e-6):
    x_f32 = x.astype(jnp.float32)
    root = jnp.sqrt(jnp.mean(x_f32**2, axis=-1, keepdims=True))
    return (x_f32 / (root + eps) * scale_D).astype(x.dtype)


@rms_norm.mutant("You add up the squares but don't divide by D: it is the mean square that counts.")
def sum_of_squares(x, scale_D, eps=1e-6):
    x_f32 = x.astype(jnp.float32)
    total = jnp.sum(x_f32**2, axis=-1, keepdims=True)
    return (x_f32 * jax.lax.rsqrt(total + eps) * scale_D).astype(x.dtype)


@rms_norm.mutant(
    "You average over the whole array, so each vector's result depends on all the others, later "
    "positions included. Use axis=-1 with keepdims=True."
)
def over_the_whole_array(x, scale_D, eps=1e-6):
    return (normalised(x.astype(jnp.float32), eps, axis=None) * scale_D).astype(x.dtype)


@rms_norm.mutant("Your result stays float32. It must have the dtype of x.")
def stays_float32(x, scale_D, eps=1e-6):
    return normalised(x.astype(jnp.float32), eps) * scale_D


@rms_norm.mutant("You divide by the mean square itself. Divide by its root.")
def no_root(x, scale_D, eps=1e-6):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide / (mean + eps) * scale_D).astype(x.dtype)


@rms_norm.mutant("You never multiply by the scale.")
def not_scaled(x, scale_D, eps=1e-6):
    return normalised(x.astype(jnp.float32), eps).astype(x.dtype)


@rms_norm.mutant("You multiply by 1 + scale, as Gemma does. Here the scale itself is the factor.")
def one_plus_scale(x, scale_D, eps=1e-6):
    return (normalised(x.astype(jnp.float32), eps) * (1 + scale_D)).astype(x.dtype)


@rms_norm.mutant("You use 1e-6 as eps, whatever is given, or leave it out. It is an argument.")
def own_eps(x, scale_D, eps=1e-6):
    return (normalised(x.astype(jnp.float32), 1e-6) * scale_D).astype(x.dtype)


@rms_norm.mutant(
    "You add no eps. Short vectors are scaled up too much, and a vector of zeros gives 0 / 0: add eps "
    "to the mean square."
)
def no_eps(x, scale_D, eps=1e-6):
    return (normalised(x.astype(jnp.float32), 0.0) * scale_D).astype(x.dtype)


@rms_norm.mutant("You average over the wrong axis. A vector is the *last* dimension of x: axis=-1.")
def over_the_first_axis(x, scale_D, eps=1e-6):
    return (normalised(x.astype(jnp.float32), eps, axis=0) * scale_D).astype(x.dtype)


# --------------------------------------------------------------------------------------- leak

leak = Exercise(
    "04.leak",
    title="Find the leak",
    function="find_leaks",
    minutes=20,
    points=10,
    seconds=90,
    statement="""
A language model that can see the token it has to predict trains beautifully and is worthless. Write
the test that catches it. `find_leaks(model, x_TD)` returns a boolean array `[T, T]`. Its entry
`[t, s]` is True if `s > t` and some output at position `t` depends on some input at position `s`.

- Compute the gradient at `x_TD` itself, because a leak may be invisible at other points, such as
  zeros.
- A leak counts however small it is. It may go through a single position, a single feature or a
  single head, and its effects on several outputs may cancel in the sum.
- Depending on an earlier position, or on the position itself, isn't a leak.
- Trace `model` once or twice, not once for each position.
""",
    hints=(
        "Which array holds the derivative of every output with respect to every input, and "
        "what is its shape?",
        "`jax.jacrev(model)(x_TD)` is `[T, V, T, D]`: output position, output feature, input "
        "position, input feature. You need one number for each pair of positions, and numbers "
        "of opposite sign can add up to zero.",
        "Sum `jnp.abs(jacobian)` over axes 1 and 3, compare with 0, and keep the entries "
        "above the diagonal with `jnp.triu(..., k=1)`.",
    ),
)


def weights(t, *shape):
    return (t.rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def attention_model(t, heads, holes=()):
    """A small causal attention; `holes` are (head, t, s) that its mask lets through by mistake."""
    q_NDH, k_NDH, v_NDH = (np.swapaxes(weights(t, 4, heads, 4), 0, 1) for _ in range(3))
    out_NHV = np.reshape(weights(t, heads * 4, 4), (heads, 4, 4))

    @jax.jit  # the derivative of a jitted model is compiled in one piece too
    def model(x_TD):
        T = x_TD.shape[0]
        mask_NTS = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (heads, T, T))
        for hole in holes:
            mask_NTS = mask_NTS.at[hole].set(True)
        q_NTH, k_NSH, v_NSH = (jnp.einsum("TD,NDH->NTH", x_TD, w) for w in (q_NDH, k_NDH, v_NDH))
        logits_NTS = jnp.where(mask_NTS, jnp.einsum("NTH,NSH->NTS", q_NTH, k_NSH), -1e30)
        mixed_NTH = jnp.einsum("NTS,NSH->NTH", jax.nn.softmax(logits_NTS), v_NSH)
        return jnp.einsum("NTH,NHV->TV", mixed_NTH, out_NHV)

    return model


def at(T, *pairs):
    want = np.zeros((T, T), bool)
    for pair in pairs:
        want[pair] = True
    return want


def later(T):
    return np.triu(np.ones((T, T), bool), 1)


@leak.check("causal models don't leak")
def _(fn, t):
    x_TD, w_DV = vectors(t, (6, 4)), weights(t, 4, 4)
    got = fn(attention_model(t, heads=4), x_TD)
    t.equal(np.shape(got), (6, 6), why="the shape of the answer for 6 positions")
    t.equal(str(np.asarray(got).dtype), "bool", why="the dtype of the answer")
    t.equal(got, at(6), why="causal attention")
    running = jax.jit(lambda x: jnp.tanh(jnp.cumsum(x, axis=0) @ w_DV))
    t.equal(fn(running, x_TD), at(6), why="a running sum")
    t.equal(fn(running, x_TD[:1]), at(1), why="a text of one token")


@leak.check("one hole in the mask of one head")
def _(fn, t):
    row = int(t.rng.integers(0, 4))
    hole = (int(t.rng.integers(4)), row, row + 1)
    got = fn(attention_model(t, 4, [hole]), vectors(t, (6, 4)))
    t.equal(got, at(6, hole[1:]), why=f"position {row} sees position {row + 1} in one head of 4")


@leak.check("everything is a leak when positions are normalised together")
def _(fn, t):
    w_DV = weights(t, 4, 4)

    @jax.jit
    def model(x_TD):
        return x_TD / jnp.sqrt(jnp.mean(x_TD**2, axis=0) + 1e-6) @ w_DV

    t.equal(fn(model, vectors(t, (6, 4))), later(6), why="a mean over time")


@leak.check("effects that cancel in a sum of outputs are leaks all the same")
def _(fn, t):
    w_D = weights(t, 4)

    @jax.jit
    def outputs_cancel(x_TD):
        u_T = jnp.tanh(x_TD @ w_D).at[1].add(jnp.sin(x_TD[3, 2]))
        return jnp.stack([u_T, -u_T, u_T, -u_T], axis=1)

    got = fn(outputs_cancel, vectors(t, (6, 4)))
    t.equal(got, at(6, (1, 3)), why="outputs of opposite signs")


@leak.check("so are effects that cancel in a sum of inputs")
def _(fn, t):
    @jax.jit
    def inputs_cancel(x_TD):
        return jnp.cumsum(x_TD, axis=0).at[1, 1].add(x_TD[3, 0] - x_TD[3, 2])

    got = fn(inputs_cancel, vectors(t, (6, 4)))
    t.equal(got, at(6, (1, 3)), why="a difference of two features")


@leak.check("a leak that only lowers an output")
def _(fn, t):
    @jax.jit
    def lowered(x_TD):
        return jnp.cumsum(x_TD, axis=0).at[1, 1].add(-x_TD[3, 0])

    got = fn(lowered, vectors(t, (6, 4)))
    t.equal(got, at(6, (1, 3)), why="a derivative of -1, and no other")


@leak.check("a small leak is a leak")
def _(fn, t):
    w_DV = weights(t, 4, 4)

    @jax.jit
    def model(x_TD):
        return (100 * x_TD @ w_DV).at[0, 1].add(1e-30 * x_TD[3, 2])

    t.equal(fn(model, vectors(t, (6, 4))), at(6, (0, 3)), why="a derivative of 1e-30")


@leak.check("a leak that shows only at the given point")
def _(fn, t):
    @jax.jit
    def model(x_TD):
        leaks = x_TD.at[1].add(x_TD[2] ** 2)  # everywhere but at zero
        leaks = leaks.at[2].add(jax.nn.relu(x_TD[4, 1] - 5.0))  # beyond 5
        return leaks.at[0].add(jax.nn.relu(x_TD[3] + 3.0))  # beyond -3: for zeros and ones too

    x_TD = vectors(t, (6, 4)).at[4, 1].set(t.rng.uniform(6.0, 9.0)).at[3].set(-7.0)
    why = "leaks of a square, and of ReLUs that are on and off at x_TD"
    t.equal(fn(model, x_TD), at(6, (1, 2), (2, 4)), why=why)


@leak.check("the model is traced, and not once for each position")
def _(fn, t):
    w_DV, calls = weights(t, 4, 4), []

    def model(x_TD):
        calls.append(isinstance(x_TD, jax.core.Tracer))
        return x_TD @ w_DV

    fn(model, vectors(t, (6, 4)))
    t.true(all(calls), why="the model was called with numbers instead of being differentiated")
    t.true(len(calls) <= 3, why="the model was traced many times for one text", observed=len(calls))


@leak.mutant(
    "Your axes are swapped: you report where the past reaches the present. In the Jacobian the "
    "first position belongs to the output, the second to the input; the future is above the "
    "diagonal."
)
def below_the_diagonal(model, x_TD):
    return jnp.tril(jnp.sum(jnp.abs(jax.jacrev(model)(x_TD)), axis=(1, 3)) > 0, k=-1)


@leak.mutant(
    "You report the diagonal too. A position may see itself: it predicts the token after it. Use "
    "k=1."
)
def diagonal_too(model, x_TD):
    return jnp.triu(jnp.sum(jnp.abs(jax.jacrev(model)(x_TD)), axis=(1, 3)) > 0)


@leak.mutant(
    "You differentiate the sum of a position's outputs. If one output gains what another loses "
    "(as probabilities do), the sum doesn't change. Differentiate every output by itself."
)
def gradient_of_a_sum(model, x_TD):
    jacobian_TTD = jax.jacrev(lambda x: jnp.sum(model(x), axis=-1))(x_TD)
    return jnp.triu(jnp.sum(jnp.abs(jacobian_TTD), axis=-1) > 0, k=1)


@leak.mutant(
    "You add up signed derivatives over the input's features, and they can cancel. Take absolute "
    "values before any sum."
)
def signed_sum(model, x_TD):
    jacobian_TVT = jnp.sum(jax.jacrev(model)(x_TD), axis=3)
    return jnp.triu(jnp.sum(jnp.abs(jacobian_TVT), axis=1) > 0, k=1)


@leak.mutant(
    "Your threshold lets small leaks through. An honest mask gives a derivative of exactly 0, so "
    "compare with 0."
)
def threshold(model, x_TD):
    return jnp.triu(jnp.sum(jnp.abs(jax.jacrev(model)(x_TD)), axis=(1, 3)) > 1e-10, k=1)


@leak.mutant(
    "You look at a point of your own choosing, zeros, instead of x_TD. There the derivative of a "
    "square, a product or a ReLU can be zero."
)
def at_zeros(model, x_TD):
    jacobian = jax.jacrev(model)(jnp.zeros_like(x_TD))
    return jnp.triu(jnp.sum(jnp.abs(jacobian), axis=(1, 3)) > 0, k=1)


@leak.mutant(
    "You look at a point of your own choosing, ones, instead of x_TD. A leak may be there only on one "
    "side of a threshold: differentiate at x_TD."
)
def at_ones(model, x_TD):
    jacobian = jax.jacrev(model)(jnp.ones_like(x_TD))
    return jnp.triu(jnp.sum(jnp.abs(jacobian), axis=(1, 3)) > 0, k=1)


@leak.mutant(
    "You ask only about the last position. A leak from t + 1 to t at a single t is the common one: "
    "look at every pair."
)
def last_position_only(model, x_TD):
    influence = jnp.sum(jnp.abs(jax.jacrev(model)(x_TD)), axis=(1, 3))
    last = jnp.arange(len(x_TD)) == len(x_TD) - 1
    return jnp.triu((influence > 0) & last, k=1)


@leak.mutant(
    "You change inputs and compare outputs. A small effect is lost in rounding, and the model runs "
    "once for each position. A derivative shows every effect, however small, and all at once."
)
def changes_the_inputs(model, x_TD):
    x_TD = np.asarray(x_TD)
    before, found = np.asarray(model(x_TD)), np.zeros((len(x_TD), len(x_TD)), bool)
    for position in range(len(x_TD)):
        other = x_TD.copy()
        other[position] += 0.1
        found[:, position] = np.any(np.asarray(model(other)) != before, axis=1)
    return np.triu(found, k=1)


@leak.mutant(
    "You look only from each position to the next one. A leak may come from any later position: keep everything above "
    "the diagonal."
)
def next_position_only(model, x_TD):
    influence = jnp.sum(jnp.abs(jax.jacrev(model)(x_TD)), axis=(1, 3))
    return (influence > 0) & jnp.eye(len(x_TD), k=1, dtype=bool)


@leak.mutant(
    "You leave out the next position. It is the one that a model must not see above all: keep everything above the "
    "diagonal, k=1."
)
def next_position_left_out(model, x_TD):
    return jnp.triu(jnp.sum(jnp.abs(jax.jacrev(model)(x_TD)), axis=(1, 3)) > 0, k=2)


@leak.mutant("You look at a single output of each position. A leak may be in any of them.")
def first_output_only(model, x_TD):
    jacobian_TTD = jax.jacrev(lambda x: model(x)[:, 0])(x_TD)
    return jnp.triu(jnp.any(jacobian_TTD != 0, axis=-1), k=1)


@leak.mutant(
    "You count a leak only if all outputs depend on all features. One that depends on one is enough: any, not all."
)
def all_of_them(model, x_TD):
    return jnp.triu(jnp.all(jax.jacrev(model)(x_TD) != 0, axis=(1, 3)), k=1)


@leak.mutant(
    "You return one yes or no. The answer is an array [T, T] that says which position sees which."
)
def yes_or_no(model, x_TD):
    influence = jnp.sum(jnp.abs(jax.jacrev(model)(x_TD)), axis=(1, 3))
    return jnp.any(jnp.triu(influence > 0, k=1))


@leak.mutant(
    "You go through the positions in a Python loop, and each iteration traces the model again. "
    "jax.jacrev traces it once and gives all rows together."
)
def one_position_at_a_time(model, x_TD):
    rows = []
    for position in range(len(x_TD)):
        jacobian_VTD = jax.jacrev(lambda x, p=position: model(x)[p])(x_TD)
        rows.append(jnp.sum(jnp.abs(jacobian_VTD), axis=(0, 2)))
    return jnp.triu(jnp.stack(rows) > 0, k=1)


@leak.mutant(
    "You report every dependence, the allowed ones too. A leak is one on a *later* position: keep the "
    "entries above the diagonal."
)
def every_dependence(model, x_TD):
    return jnp.sum(jnp.abs(jax.jacrev(model)(x_TD)), axis=(1, 3)) > 0


@leak.mutant(
    "Your result has the axes the other way round: entry [t, s] belongs to *output* t and *input* s."
)
def transposed(model, x_TD):
    influence = jnp.sum(jnp.abs(jax.jacrev(model)(x_TD)), axis=(1, 3))
    return jnp.triu(influence > 0, k=1).T


@leak.mutant("You return how strong each leak is. The answer is boolean: compare with 0.")
def strengths(model, x_TD):
    return jnp.triu(jnp.sum(jnp.abs(jax.jacrev(model)(x_TD)), axis=(1, 3)), k=1)


@leak.mutant(
    "You ask whether the derivative is positive. A negative one is an effect too: take absolute values."
)
def positive_ones(model, x_TD):
    return jnp.triu(jnp.any(jax.jacrev(model)(x_TD) > 0, axis=(1, 3)), k=1)


# --------------------------------------------------------------------------------------- rope

rope = Exercise(
    "04.rope",
    title="Rotary positions",
    function="rotate",
    minutes=20,
    points=10,
    forbid=("minitext.models.layers", "minitext.models.rope"),
    statement="""
Write `rotate(x_BTNH, positions_BT, theta)`. Pair feature $i$ of each head with feature $i + H/2$,
for $i = 0, \\ldots, H/2 - 1$, and rotate each pair by the angle $p\\,\\theta^{-2i/H}$, where $p$ is
the position of the token:

$$
\\begin{pmatrix} a' \\\\ b' \\end{pmatrix} =
\\begin{pmatrix} \\cos & -\\sin \\\\ \\sin & \\cos \\end{pmatrix}
\\begin{pmatrix} a \\\\ b \\end{pmatrix},
\\qquad a = x_i,\\; b = x_{i + H/2} .
$$

- The checks run your function under `jax.jit`.
- The positions come from the caller. They may begin anywhere, start again in the middle of a row
  (as in packed documents), differ from row to row, and reach 100,000.
- Compute angles, cosines, sines and the rotation in float32. Round only the result to the dtype of
  `x`, once. bfloat16 can't tell position 257 from 256.
""",
    hints=(
        "Which dimensions of `x` does an angle depend on? Give the angles a shape that broadcasts "
        "against `[B, T, N, H/2]`.",
        "`theta ** (-jnp.arange(half) / half)` gives the H/2 frequencies, because 2i/H = "
        "i/(H/2). Split x into its two halves with `jnp.split(x, 2, axis=-1)`, rotate, and put "
        "them together again.",
        "With `angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency`, the "
        "result is `jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)`, cast to "
        "`x.dtype`, where a and b are the halves of x in float32.",
    ),
)


def rotate_f64(x, positions, theta=10_000.0):
    x = np.asarray(x).astype(np.float64)
    half = x.shape[-1] // 2
    angle = np.asarray(positions)[:, :, None, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def positions(t, B, T, end=50):
    return t.rng.integers(0, end, (B, T)).astype(np.int32)


@rope.check("position 0 turns nothing")
def _(fn, t):
    x = vectors(t, (2, 3, 2, 8))
    t.close(jitted(fn, x, np.zeros((2, 3), np.int32)), x, rtol=1e-6, why="the angle is 0")


@rope.check("lengths are kept")
def _(fn, t):
    x = vectors(t, (2, 5, 3, 8))
    got = jitted(fn, x, positions(t, 2, 5))
    lengths = np.linalg.norm(np.asarray(x), axis=-1)
    t.close(
        np.linalg.norm(np.asarray(got), axis=-1), lengths, rtol=1e-4, why="a rotation keeps lengths"
    )


@rope.check("the right pairs turn by the right angles")
def _(fn, t):
    x, where = np.zeros((1, 4, 1, 8), np.float32), np.arange(4)[None]
    x[..., 1] = 1.0
    got = jitted(fn, x, where)
    t.close(got, rotate_f64(x, where), atol=1e-5, why="feature 1 of 8 at positions 0 to 3")
    for shape in ((1, 7, 2, 16), (3, 2, 1, 2), (2, 1, 4, 6)):
        x, where = vectors(t, shape), positions(t, *shape[:2])
        got, want = jitted(fn, x, where), rotate_f64(x, where)
        t.close(got, want, rtol=1e-4, atol=1e-4, why=f"x of shape {shape}")


@rope.check("positions are the caller's")
def _(fn, t):
    x = vectors(t, (2, 6, 2, 8))
    where = np.array([[0, 1, 2, 0, 1, 2], [7, 8, 9, 10, 11, 0]])
    got, want = jitted(fn, x, where), rotate_f64(x, where)
    t.close(got, want, rtol=1e-4, atol=1e-4, why="two packed rows")


@rope.check("theta is the caller's")
def _(fn, t):
    x, where = vectors(t, (1, 5, 2, 16)), positions(t, 1, 5)
    got, want = jitted(fn, x, where, theta=500_000.0), rotate_f64(x, where, 500_000.0)
    t.close(got, want, rtol=1e-4, atol=1e-4, why="theta=500,000")


@rope.check("the product depends on the distance alone")
def _(fn, t):
    q, k = (np.tile(vectors(t, (1, 1, 1, 32)), (1, 4, 1, 1)) for _ in "qk")
    where = np.array([[5, 17, 300, 1000]])
    got = np.sum(np.asarray(jitted(fn, q, where)) * np.asarray(jitted(fn, k, where - 5)), (0, 2, 3))
    t.close(got, np.full(4, got[0]), rtol=1e-3, atol=2e-3, why="distance 5 at four places")


@rope.check("bfloat16 far from the beginning")
def _(fn, t):
    x, where = vectors(t, (1, 40, 2, 16), jnp.bfloat16), positions(t, 1, 40, 100_000)
    got, want = jitted(fn, x, where), rotate_f64(x, where)
    t.close(got, want, rtol=0.01, atol=0.06, dtype=jnp.bfloat16, why="positions to 100,000")


@rope.check("bfloat16 is rounded once")
def _(fn, t):
    x, where = vectors(t, (2, 30, 4, 32), jnp.bfloat16), positions(t, 2, 30)
    got = np.asarray(jitted(fn, x, where))
    want = rotate_f64(x, where).astype(jnp.bfloat16)
    t.close(got, want, rtol=0.03, atol=0.06, dtype=jnp.bfloat16, why="the result in bfloat16")
    off = float(np.mean(got != want))
    why = f"{100 * off:.0f}% of the values are not the bfloat16 nearest to the true value"
    t.true(off < 0.01, why=why, observed=got)


def turn(x, angle, sign=1.0, dtype=jnp.float32):
    cos, sin = jnp.cos(angle).astype(dtype), (sign * jnp.sin(angle)).astype(dtype)
    a, b = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def angles(x, positions_BT, theta, dtype=jnp.float32):
    half = x.shape[-1] // 2
    frequency = (theta ** (-jnp.arange(half, dtype=jnp.float32) / half)).astype(dtype)
    return positions_BT[:, :, None, None].astype(dtype) * frequency


@rope.mutant(
    "You rotate neighbours, features 2i and 2i + 1, as the paper and Llama's original weights "
    "do. This stack pairs i with i + H/2: split the head in two halves."
)
def interleaved(x_BTNH, positions_BT, theta=10_000.0):
    halves = jnp.concatenate([x_BTNH[..., 0::2], x_BTNH[..., 1::2]], axis=-1)
    turned = turn(halves, angles(x_BTNH, positions_BT, theta))
    a, b = jnp.split(turned, 2, axis=-1)
    return jnp.stack([a, b], axis=-1).reshape(x_BTNH.shape)


@rope.mutant(
    "You rotate backwards. Products of queries and keys come out the same, so no model would "
    "show it, but weights trained with the other direction wouldn't fit. Check the sign of sin."
)
def backwards(x_BTNH, positions_BT, theta=10_000.0):
    return turn(x_BTNH, angles(x_BTNH, positions_BT, theta), sign=-1.0)


@rope.mutant(
    "Your frequencies fall too slowly: the exponent is -2i/H, and you have -i/H. With half = H "
    "// 2 it is -i/half."
)
def half_the_exponent(x_BTNH, positions_BT, theta=10_000.0):
    return turn(x_BTNH, angles(x_BTNH, positions_BT, theta**0.5))


@rope.mutant(
    "You number the tokens yourself, from 0 to T - 1. In a packed row, and with a cache, positions "
    "begin elsewhere: use positions_BT."
)
def own_positions(x_BTNH, positions_BT, theta=10_000.0):
    B, T = positions_BT.shape
    return turn(x_BTNH, angles(x_BTNH, jnp.broadcast_to(jnp.arange(T), (B, T)), theta))


@rope.mutant("You use 10,000 whatever theta is given.")
def own_theta(x_BTNH, positions_BT, theta=10_000.0):
    return turn(x_BTNH, angles(x_BTNH, positions_BT, 10_000.0))


@rope.mutant(
    "You compute the angles in the dtype of x. In bfloat16 position 1001 is 1000, and 100,000 is "
    "off by hundreds: cast positions and frequencies to float32."
)
def angles_in_the_dtype_of_x(x_BTNH, positions_BT, theta=10_000.0):
    return turn(x_BTNH, angles(x_BTNH, positions_BT, theta, x_BTNH.dtype))


@rope.mutant(
    "You round cos and sin to the dtype of x. In bfloat16 they are off by up to a part in 500, and so is "
    "every value that they turn. Keep them in float32 and round the result."
)
def rounds_cos_and_sin(x_BTNH, positions_BT, theta=10_000.0):
    angle = angles(x_BTNH, positions_BT, theta)
    cos, sin = (f(angle).astype(x_BTNH.dtype).astype(jnp.float32) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


@rope.mutant(
    "You multiply and add in the dtype of x. In bfloat16 both products and their sum are rounded to 8 "
    "bits. Convert x to float32 before you turn it."
)
def turns_in_the_dtype_of_x(x_BTNH, positions_BT, theta=10_000.0):
    return turn(x_BTNH, angles(x_BTNH, positions_BT, theta), dtype=x_BTNH.dtype)


@rope.mutant("Your result is float32 for a bfloat16 x. Cast it back to the dtype of x at the end.")
def returns_float32(x_BTNH, positions_BT, theta=10_000.0):
    return turn(x_BTNH.astype(jnp.float32), angles(x_BTNH, positions_BT, theta))


@rope.mutant(
    "The second half is wrong: a reflection, not a rotation, and it changes lengths. It is b * "
    "cos + a * sin."
)
def not_a_rotation(x_BTNH, positions_BT, theta=10_000.0):
    angle = angles(x_BTNH, positions_BT, theta)
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([a * cos - b * sin, b * cos - a * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


@rope.mutant(
    "Your frequencies grow with i. The first pair turns by one radian for each position and the last "
    "hardly at all: the exponent is negative."
)
def growing_frequencies(x_BTNH, positions_BT, theta=10_000.0):
    return turn(x_BTNH, angles(x_BTNH, positions_BT, 1 / theta))


@rope.mutant(
    "Your frequencies are those of the next pair: i counts from 0, so the first frequency is 1."
)
def pairs_from_one(x_BTNH, positions_BT, theta=10_000.0):
    half = x_BTNH.shape[-1] // 2
    frequency = theta ** (-jnp.arange(1, half + 1, dtype=jnp.float32) / half)
    return turn(x_BTNH, positions_BT[:, :, None, None].astype(jnp.float32) * frequency)


@rope.mutant(
    "Your frequencies fall too fast: the exponent is -2i/H, and you have -4i/H. With half = H // 2 it "
    "is -i/half."
)
def twice_the_exponent(x_BTNH, positions_BT, theta=10_000.0):
    return turn(x_BTNH, angles(x_BTNH, positions_BT, theta**2))


@rope.mutant(
    "All rows of your batch turn by the first row's positions. Each row has its own: positions_BT has the shape [B, T]."
)
def first_row_for_all(x_BTNH, positions_BT, theta=10_000.0):
    return turn(x_BTNH, angles(x_BTNH, positions_BT[:1], theta))


@rope.mutant(
    "Your exponents go from 0 to -1 in equal steps, both ends included. The last one is -(H - 2)/H: divide by H/2, not "
    "by H/2 - 1."
)
def exponents_to_the_end(x_BTNH, positions_BT, theta=10_000.0):
    half = x_BTNH.shape[-1] // 2
    return turn(x_BTNH, angles(x_BTNH, positions_BT, theta ** (half / max(half - 1, 1))))


@rope.mutant(
    "You turn the first half and leave the second as it is. A rotation changes both: b' = b * cos + a * sin."
)
def second_half_left(x_BTNH, positions_BT, theta=10_000.0):
    half = x_BTNH.shape[-1] // 2
    turned = turn(x_BTNH, angles(x_BTNH, positions_BT, theta))
    return jnp.concatenate([turned[..., :half], x_BTNH[..., half:]], axis=-1)


@rope.mutant(
    "Each half is multiplied by its own sum or difference of cosine and sine. A rotation mixes the two: a' = a * cos - "
    "b * sin, and b' = b * cos + a * sin."
)
def halves_apart(x_BTNH, positions_BT, theta=10_000.0):
    angle = angles(x_BTNH, positions_BT, theta)
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * (cos - sin), b * (cos + sin)], axis=-1).astype(x_BTNH.dtype)


@rope.mutant("You put the halves back in the wrong order: a' comes first, then b'.")
def halves_swapped(x_BTNH, positions_BT, theta=10_000.0):
    turned = turn(x_BTNH, angles(x_BTNH, positions_BT, theta))
    return jnp.concatenate(jnp.split(turned, 2, axis=-1)[::-1], axis=-1)


@rope.mutant(
    "You take neighbours, features 2i and 2i + 1, and put the results into the two halves. Pair i with "
    "i + H/2 when you read x too."
)
def half_interleaved(x_BTNH, positions_BT, theta=10_000.0):
    halves = jnp.concatenate([x_BTNH[..., 0::2], x_BTNH[..., 1::2]], axis=-1)
    return turn(halves, angles(x_BTNH, positions_BT, theta))


@rope.mutant("You turn by the same angle in every pair. The frequency depends on i.")
def one_frequency(x_BTNH, positions_BT, theta=10_000.0):
    return turn(x_BTNH, angles(x_BTNH, positions_BT, 1.0))


@rope.mutant(
    "Your angles follow the heads, not the positions: give them the shape [B, T, 1, H/2], so that they "
    "broadcast over axis 2, the heads."
)
def by_head(x_BTNH, positions_BT, theta=10_000.0):
    angle = jnp.swapaxes(angles(x_BTNH, positions_BT, theta), 1, 2)
    return turn(x_BTNH, angle)


# ---------------------------------------------------------------------------------------- gqa

gqa = Exercise(
    "04.gqa",
    title="Grouped-query attention",
    function="grouped_attention",
    minutes=30,
    points=15,
    seconds=90,
    forbid=("minitext.kernels", "minitext.models.attention", "jax.nn.dot_product_attention"),
    statement="""
Write `grouped_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS)`. For each query, take the softmax of its
scaled scores $q \\cdot k / \\sqrt{H}$ over the keys that the mask lets it see, and return the mean of
the values with these weights. $N = GK$ query heads share $K$ key and value heads: head $n$ uses
$\\lfloor n / G \\rfloor$.

- Use keys and values as they are. No array in your program may hold them more than once, because
  that would undo the savings of grouping. Two contractions do all the work.
- Scores and softmax are float32 whatever the dtype of `q`, and they stay finite for scaled scores
  of ±90.
- The mask comes from the caller, and T may differ from S. A query that may see nothing gets zeros,
  and gradients stay finite.
- The result has the dtype of `q`. The checks run your function under `jax.jit`.
""",
    hints=(
        "The keys have no axis G. Can the queries get one, so that a single einsum contracts "
        "over H?",
        "`q.reshape(B, T, K, N // K, H)` puts head n = kG + g at [k, g]. Then the scores are "
        "`BTKGH,BSKH->BKGTS`. For the mask use a large finite negative number. What does "
        "softmax make of a row that holds nothing else?",
        "Pass `preferred_element_type=jnp.float32` to the first einsum, divide by "
        "`math.sqrt(H)`, apply `jnp.where(mask, logits, -1e30)` and softmax, then multiply by"
        " the mask once more, which clears the rows that see nothing. The second einsum is "
        "`BKGTS,BSKH->BTKGH`; then reshape and cast.",
    ),
)


def attention_f64(q, k, v, mask):
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    mask, G = np.asarray(mask)[:, None], q.shape[2] // k.shape[2]
    k, v = np.repeat(k, G, axis=2), np.repeat(v, G, axis=2)
    logits = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1])
    logits = np.where(mask, logits, -np.inf)
    top = np.max(logits, axis=-1, keepdims=True)
    weights = np.where(mask, np.exp(logits - np.where(np.isfinite(top), top, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights / np.where(total > 0, total, 1), v)


def attention_inputs(t, B, T, S, N, K, H, dtype=jnp.float32, size=1.0):
    q = vectors(t, (B, T, N, H), dtype, size)
    return q, vectors(t, (B, S, K, H), dtype), vectors(t, (B, S, K, H), dtype)


def causal(B, T, S):
    return np.tile(np.arange(T)[:, None] + S - T >= np.arange(S), (B, 1, 1))


@gqa.check("as many key heads as query heads")
def _(fn, t):
    args = (*attention_inputs(t, 2, 6, 6, 3, 3, 8), causal(2, 6, 6))
    got, want = jitted(fn, *args), attention_f64(*args)
    t.close(got, want, rtol=1e-4, atol=1e-5, why="causal attention, 3 heads")


@gqa.check("query heads share key heads in order")
def _(fn, t):
    for N, K in ((6, 2), (4, 1)):
        args = (*attention_inputs(t, 2, 5, 5, N, K, 4), causal(2, 5, 5))
        got, want = jitted(fn, *args), attention_f64(*args)
        t.close(got, want, rtol=1e-4, atol=1e-5, why=f"{N} heads share {K}")


@gqa.check("any mask, any lengths")
def _(fn, t):
    for T, S in ((3, 11), (1, 1), (7, 2)):
        q, k, v = attention_inputs(t, 3, T, S, 4, 2, 6)
        mask = t.rng.random((3, T, S)) < 0.5
        mask[..., 0] = True
        got, want = jitted(fn, q, k, v, mask), attention_f64(q, k, v, mask)
        t.close(got, want, rtol=1e-4, atol=1e-5, why=f"{T} queries, {S} keys")


@gqa.check("what is masked cannot change a bit")
def _(fn, t):
    segments = np.array([[1, 1, 1, 2, 2, 2, 2]])
    mask = causal(1, 7, 7) & (segments[:, :, None] == segments[:, None, :])
    q, k, v = attention_inputs(t, 1, 7, 7, 4, 2, 8)
    shift = np.where(segments == 1, 5.0, 0.0).astype(np.float32)[:, :, None, None]
    before = np.asarray(jitted(fn, q, k, v, mask))
    after = np.asarray(jitted(fn, q, np.asarray(k) + shift, np.asarray(v) + shift, mask))
    t.equal(after[:, 3:], before[:, 3:], why="the other document of a packed row changed")


@gqa.check("scores of plus and minus 90")
def _(fn, t):
    q, k, v = attention_inputs(t, 2, 5, 8, 4, 2, 4)
    signs = t.rng.choice([-1.0, 1.0], (2, 8, 2, 1))
    q = np.full_like(q, 9.5)
    k = (signs * 4.75 * np.ones((2, 8, 2, 4))).astype(np.float32)  # scaled scores of +-90.25
    mask = causal(2, 5, 8)
    got = jitted(fn, q, k, v, mask)
    t.finite(got)
    t.close(got, attention_f64(q, k, v, mask), rtol=1e-4, atol=1e-5)


@gqa.check("a query that sees nothing gets zeros")
def _(fn, t):
    q, k, v = attention_inputs(t, 2, 4, 6, 4, 2, 8)
    mask = causal(2, 4, 6)
    mask[:, 1] = mask[1, 3] = False
    got = jitted(fn, q, k, v, mask)
    t.close(got, attention_f64(q, k, v, mask), rtol=1e-4, atol=1e-5)
    grad = jax.grad(lambda *qkv: jnp.sum(fn(*qkv, mask) ** 2), argnums=(0, 1, 2))
    t.finite(jitted(grad, q, k, v), why="the gradient")


@gqa.check("bfloat16 in, scores in float32")
def _(fn, t):
    q, k, v = attention_inputs(t, 2, 64, 64, 4, 2, 64, jnp.bfloat16, size=30.0)
    mask = causal(2, 64, 64)
    want = attention_f64(q, k, v, mask)
    got = jitted(fn, q, k, v, mask)
    t.close(got, want, rtol=0.02, atol=0.03, dtype=jnp.bfloat16, why="large scores")


@gqa.check("neither K nor V is repeated")
def _(fn, t):
    q, k, v = attention_inputs(t, 2, 3, 64, 8, 2, 16)
    found = list(equations(fn, q, k, v, causal(2, 3, 64)))
    largest = max(math.prod(x.aval.shape) for eqn, _ in found for x in eqn.outvars)
    why = f"the largest array in your program has {largest} entries, K has {k.size}"
    t.true(largest <= k.size, why=why, observed=largest)
    dots = sum(trips for eqn, trips in found if eqn.primitive.name == "dot_general")
    t.equal(dots, 2, why="the number of contractions")


def grouped(q, k, v, mask, scale=None, weigh=None, fold="KG", scores=jnp.float32):
    """The parts of grouped attention that most wrong answers share."""
    B, T, N, H = q.shape
    K = k.shape[2]
    weigh = weigh or (lambda logits, m: jax.nn.softmax(jnp.where(m, logits, -1e30)) * m)
    shape = (B, T, K, N // K, H) if fold == "KG" else (B, T, N // K, K, H)
    folded = q.reshape(shape)
    logits = jnp.einsum(f"BT{fold}H,BSKH->BKGTS", folded, k, preferred_element_type=scores)
    weights = weigh(logits * (H**-0.5 if scale is None else scale), mask[:, None, None])
    out = jnp.einsum(f"BKGTS,BSKH->BT{fold}H", weights.astype(v.dtype), v)
    return out.reshape(B, T, N, H).astype(q.dtype)


@gqa.mutant(
    "Your heads are shared in the wrong order: head n uses key head n % K, and should use n // "
    "G. Fold the queries to [B, T, K, G, H], with K before G."
)
def heads_interleaved(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, fold="GK")


@gqa.mutant(
    "You repeat K and V for each query head. The values are right, and the memory that grouping "
    "saves is gone. Fold the queries instead of unfolding the keys."
)
def repeats_the_keys(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    G = q_BTNH.shape[2] // k_BSKH.shape[2]
    repeated = (jnp.repeat(x, G, axis=2) for x in (k_BSKH, v_BSKH))
    return grouped(q_BTNH, *repeated, mask_BTS)


@gqa.mutant("Your scores are not scaled: divide them by the root of H.")
def no_scale(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale=1.0)


@gqa.mutant(
    "You divide the scores by H. Their standard deviation is the root of H: divide by that."
)
def scale_by_width(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale=1 / q_BTNH.shape[-1])


@gqa.mutant(
    "You mask with -inf. In a row that sees nothing softmax computes inf - inf, which is nan, "
    "and nan times zero stays nan. Use a large finite number."
)
def masks_with_infinity(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    def weigh(logits, mask):
        return jax.nn.softmax(jnp.where(mask, logits, -jnp.inf)) * mask

    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, weigh=weigh)


@gqa.mutant(
    "You mask after the softmax, so hidden keys still take their share of the sum. Mask the scores "
    "before it."
)
def masks_after_softmax(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    def weigh(logits, mask):
        return jax.nn.softmax(logits) * mask

    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, weigh=weigh)


@gqa.mutant(
    "A query that sees nothing gets the mean of all values: softmax of a row of equal numbers is "
    "1/S everywhere. Multiply the weights by the mask once more."
)
def mean_of_everything(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    def weigh(logits, mask):
        return jax.nn.softmax(jnp.where(mask, logits, -1e30))

    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, weigh=weigh)


@gqa.mutant(
    "You take exp of the scores as they are, and exp(90) is more than float32 holds. Subtract each "
    "row's largest score first, or let jax.nn.softmax do it."
)
def exp_of_large_scores(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    def weigh(logits, mask):
        e = jnp.where(mask, jnp.exp(jnp.where(mask, logits, 0.0)), 0.0)
        return e / jnp.maximum(jnp.sum(e, axis=-1, keepdims=True), 1e-30)

    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, weigh=weigh)


@gqa.mutant(
    "Your scores are bfloat16. A score near 60 is then off by up to an eighth, and its weight by "
    "a tenth. Pass preferred_element_type=jnp.float32 to the einsum of queries and keys."
)
def scores_in_bfloat16(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scores=q_BTNH.dtype)


@gqa.mutant(
    "Your softmax runs over the queries. The weights of one query must sum to 1 over the keys."
)
def softmax_over_queries(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    def weigh(logits, mask):
        return jax.nn.softmax(jnp.where(mask, logits, -1e30), axis=-2) * mask

    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, weigh=weigh)


@gqa.mutant("You ignore the mask. A query may look only at the keys where its mask is True.")
def no_mask(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    return grouped(q_BTNH, k_BSKH, v_BSKH, jnp.ones_like(mask_BTS))


@gqa.mutant("Your mask is upside down: True marks the keys that may be seen.")
def mask_upside_down(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    return grouped(q_BTNH, k_BSKH, v_BSKH, ~jnp.asarray(mask_BTS))


@gqa.mutant(
    "A hidden key's score is 0 in your softmax. That is a score like any other, and e^0 is 1: give it a "
    "large negative number."
)
def masked_scores_are_zero(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    weigh = lambda logits, m: jax.nn.softmax(logits * m)  # noqa: E731
    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, weigh=weigh)


@gqa.mutant(
    "You mask the future yourself. The mask comes from the caller, who may show other keys than the "
    "earlier ones."
)
def own_causal_mask(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    mask = jnp.broadcast_to(jnp.tril(jnp.ones(mask_BTS.shape[1:], bool)), mask_BTS.shape)
    return grouped(q_BTNH, k_BSKH, v_BSKH, mask)


@gqa.mutant(
    "The scale is wrong: it is the root of H, the width of *one* head, neither of all heads together "
    "nor of the number of heads."
)
def scale_by_all_heads(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    scale = (q_BTNH.shape[2] * q_BTNH.shape[3]) ** -0.5
    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale=scale)


@gqa.mutant(
    "You take the weights from the scores without softmax: they must be positive and sum to 1."
)
def no_softmax(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, weigh=lambda logits, m: logits * m)


@gqa.mutant("You multiply the scores instead of dividing them by the root of H.")
def scaled_up(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale=q_BTNH.shape[-1] ** 0.5)


@gqa.mutant("Your result is not in the queries' dtype. Cast it at the end.")
def stays_in_float32(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    return grouped(q_BTNH, k_BSKH, v_BSKH, mask_BTS).astype(jnp.float32)


@gqa.mutant(
    "You fold the heads with G before K and read them as if K came first, so query heads meet the wrong "
    "key heads. Head n is [n // G, n % G]."
)
def folded_and_swapped(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    turned = q_BTNH.reshape(B, T, N // K, K, H).swapaxes(2, 3).reshape(B, T, N, H)
    return grouped(turned, k_BSKH, v_BSKH, mask_BTS)


# -------------------------------------------------------------------------------------- count

count = Exercise(
    "04.count",
    title="Predict a model's cost",
    function="predict_cost",
    minutes=25,
    points=15,
    forbid=("minitext.models.transformer", "minitext.models.attention"),
    statement="""
Before you rent a machine, you should know how much of it a model needs. Write
`predict_cost(cfg, new, cached)`. It takes a model's sizes and returns three Python integers, exact
to the last digit:

1. **parameters**: everything that is trained, including norm scales and both tables. With
   `cfg.tie_embeddings` there is one table.
2. **cache_bytes**: keys and values of `new + cached` tokens of one text, in bfloat16.
3. **flops**: those of all matrix products when the model reads `new` tokens (2 for a multiplication
   and its addition). Each new token is scored against all `new + cached` positions in the cache,
   masked or not, and gets its logits. Norms, rotations, softmax and table look-ups count as zero.

The checks build a model with sizes drawn for you and measure: the leaves of its pytree, the bytes
of its cache, the `dot_general`s of its jaxpr. `cfg.K` and `cfg.H` are the number of key heads and
the head width; $NH$ may differ from $D$.
""",
    hints=(
        "List the matrices of one layer with their shapes: q, k, v, o, gate, up, down. Which "
        "of them depend on K?",
        "A token through a matrix of P entries costs 2P. Apart from the matrices, each token "
        "costs two products with the cache in each layer: H multiplications for each query "
        "head and position, once with the keys and once with the values.",
        "Per layer: `2*D*N*H + 2*D*K*H + 3*D*F` entries in matrices and `2*D` in norms. Cache: "
        "`L*S*2*K*H*2` with S = new + cached. FLOPs: `new * (2*(L*matrices + V*D) + L*4*N*H*S)`.",
    ),
)


def learner_config(t, **changes):
    draw = np.random.default_rng(t.learner)
    K, G, H = (int(draw.choice(options)) for options in ((1, 2, 3), (2, 3, 4), (4, 6, 10)))
    sizes = {"layers": 2 + int(draw.integers(6)), "embed": 1 + 4 * int(draw.integers(20, 40))}
    sizes |= {"vocab": 300 + int(draw.integers(200)), "mlp": 50 + int(draw.integers(100))}
    return ModelConfig(**(sizes | {"heads": K * G, "kv_heads": K, "head_dim": H} | changes))


def abstract_model(cfg):
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))))
    return graphdef, params


def measured_parameters(cfg):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_model(cfg)[1]))


def measured_flops(cfg, new, cached):
    graphdef, params = abstract_model(cfg)
    cache = jax.eval_shape(lambda: make_cache(cfg, 1, cached))
    tokens = jax.ShapeDtypeStruct((1, new), jnp.int32)
    total = 0

    def run(params, tokens, cache):
        return nnx.merge(graphdef, params)(tokens, cache=cache)

    for eqn, trips in equations(run, params, tokens, cache):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape
            size = math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[i] for i in contracted)
            total += 2 * size * trips
    return total


def difference(cfg, got, want, new, cached):
    """Names what is too much or too little in a number of parameters (new is 0) or of FLOPs."""
    V, L, D, N, F, K, H = cfg.vocab, cfg.layers, cfg.embed, cfg.heads, cfg.mlp, cfg.K, cfg.H
    each = 2 if new else 1
    parts = {
        "a table of V by D": V * D,
        "a matrix of D by F in each layer": L * D * F,
        "a matrix of D by N*H in each layer": L * D * N * H,
        "a matrix of D by K*H in each layer": L * D * K * H,
    }
    if new:
        parts["one of the two products with the cache"] = L * N * H * (new + cached)
    else:
        parts["one scale of D"] = D
    tokens = max(new, 1)
    for count in (tokens, 2 * tokens, 3 * tokens, *range(1, tokens), *range(4, 2 * L + 2)):
        for name, size in parts.items():
            if isinstance(got, int) and abs(got - want) == count * each * size:
                of = f" for {count} tokens" if new else f", {count} times" if count > 1 else ""
                return f"; too {'much' if got > want else 'little'} by {name}{of}"
    return ""


def compare_parameters(t, fn, cfg, why):
    got, want = whole(t, fn, cfg, 10, 0, 0), measured_parameters(cfg)
    t.equal(got, want, why=why + difference(cfg, got, want, 0, 0))


def compare_flops(t, fn, cfg, new, cached, why):
    got, want = whole(t, fn, cfg, new, cached, 2), measured_flops(cfg, new, cached)
    t.equal(got, want, why=why + difference(cfg, got, want, new, cached))


def whole(t, fn, cfg, new, cached, which):
    got = fn(cfg, new, cached)
    t.true(
        isinstance(got, tuple) and len(got) == 3,
        why="the answer is three numbers",
        observed=str(got),
    )
    value = got[which]
    t.true(isinstance(value, int), why=f"got {value!r}, want a Python int", observed=value)
    return int(value)


@count.check("parameters")
def _(fn, t):
    cfg = learner_config(t)
    compare_parameters(t, fn, cfg, "your model's pytree")


@count.check("parameters with tied embeddings")
def _(fn, t):
    cfg = learner_config(t, tie_embeddings=True)
    compare_parameters(t, fn, cfg, "your model with one table")


@count.check("bytes of the cache")
def _(fn, t):
    cfg = learner_config(t, dtype="bfloat16")
    for new, cached in ((7, 0), (1, 30)):
        cache = jax.eval_shape(lambda n=new + cached: make_cache(cfg, 1, n))
        want = sum(2 * math.prod(x.shape) for x in (cache.k, cache.v))
        got = whole(t, fn, cfg, new, cached, 1)
        t.equal(got, want, why=f"{new} new tokens and {cached} cached")


@count.check("FLOPs of a prompt")
def _(fn, t):
    cfg = learner_config(t)
    compare_flops(t, fn, cfg, 13, 0, "13 tokens, empty cache")


@count.check("FLOPs of one more token")
def _(fn, t):
    cfg = learner_config(t)
    compare_flops(t, fn, cfg, 1, 40, "1 token after 40")


@count.check("FLOPs with tied embeddings")
def _(fn, t):
    cfg = learner_config(t, tie_embeddings=True)
    compare_flops(t, fn, cfg, 5, 4, "the logits are a product too")


@count.check("a model of 70 billion parameters")
def _(fn, t):
    cfg = load_config("llama2-70b").model
    compare_parameters(t, fn, cfg, "llama2-70b: parameters")
    compare_flops(t, fn, cfg, 64, 192, "llama2-70b: FLOPs")


def cost(
    cfg,
    new,
    cached,
    K=None,
    H=None,
    norms=None,
    tables=None,
    lookups=0,
    ops=2,
    item=4,
    keys=None,
    mlp=3,
    out=2,
    held=None,
    products=2,
):
    """The right answer, with the places where one goes wrong as arguments."""
    K, H = K or cfg.K, H or cfg.H
    norms = 2 * cfg.layers + 1 if norms is None else norms
    tables = tables or (1 if cfg.tie_embeddings else 2)
    keys = new + cached if keys is None else keys
    matrices = cfg.layers * (cfg.embed * H * (out * cfg.heads + 2 * K) + mlp * cfg.embed * cfg.mlp)
    table = cfg.vocab * cfg.embed
    flops = new * (ops * (matrices + (1 + lookups) * table))
    flops += new * cfg.layers * products * ops * cfg.heads * H * keys
    parameters = matrices + norms * cfg.embed + tables * table
    return parameters, cfg.layers * (held or new + cached) * K * H * item, flops


@count.mutant(
    "You give keys and values N heads. They have K: their projections and the cache shrink by "
    "N/K, the scores don't."
)
def no_grouping(cfg, new, cached):
    return cost(cfg, new, cached, K=cfg.heads)


@count.mutant(
    "You assume that H is D/N. It is a size of its own: read cfg.H. The projections are D by N*H and "
    "back."
)
def head_from_embed(cfg, new, cached):
    return cost(
        cfg, new, cached, H=max(cfg.embed // cfg.heads, 1) + (cfg.embed == cfg.heads * cfg.H)
    )


@count.mutant("You left out the norms: two scales of D in each layer, and one at the end.")
def no_norms(cfg, new, cached):
    return cost(cfg, new, cached, norms=0)


@count.mutant("You left out the last norm, the one before the logits.")
def no_last_norm(cfg, new, cached):
    return cost(cfg, new, cached, norms=2 * cfg.layers)


@count.mutant(
    "You count two tables although the embeddings are tied. Then the output layer is the embedding "
    "table: no parameters of its own, but its product costs as much."
)
def two_tables(cfg, new, cached):
    return cost(cfg, new, cached, tables=2)


@count.mutant(
    "You count the look-up of a token as a product. It copies one row of the table: no FLOPs."
)
def lookup_is_a_product(cfg, new, cached):
    return cost(cfg, new, cached, lookups=1)


@count.mutant("You count one for each multiplication. The addition that follows counts too: 2.")
def one_per_product(cfg, new, cached):
    return cost(cfg, new, cached, ops=1)


@count.mutant("Your cache is float32. In bfloat16 a number takes two bytes.")
def cache_in_float32(cfg, new, cached):
    return cost(cfg, new, cached, item=8)


@count.mutant("Your cache holds the keys and no values, or values and no keys. It is both.")
def cache_of_keys(cfg, new, cached):
    return cost(cfg, new, cached, item=2)


@count.mutant(
    "You score new tokens only against each other. They see the cached ones too: new + cached "
    "positions."
)
def ignores_the_cache(cfg, new, cached):
    return cost(cfg, new, cached, keys=new)


@count.mutant(
    "You count only the half of the square that the causal mask leaves. That is right for what "
    "the model needs, but this program computes every score and masks it afterwards."
)
def half_the_square(cfg, new, cached):
    return cost(cfg, new, cached, keys=cached + (new + 1) / 2)


@count.mutant("Your cache holds N heads. Keys and values have K, which is what grouping saves.")
def cache_of_all_heads(cfg, new, cached):
    parameters, cache, flops = cost(cfg, new, cached)
    return parameters, cache // cfg.K * cfg.heads, flops


@count.mutant(
    "You assume that the query and output projections are D by D. They lead from D to N*H and back, which needn't be D."
)
def square_projections(cfg, new, cached):
    parameters, cache, flops = cost(cfg, new, cached)
    more = 2 * cfg.layers * cfg.embed * (cfg.embed - cfg.heads * cfg.H)
    return parameters + more, cache, flops + 2 * new * more


@count.mutant("You count the logits of one token. Here each new token gets its logits.")
def logits_of_one(cfg, new, cached):
    parameters, cache, flops = cost(cfg, new, cached)
    return parameters, cache, flops - 2 * (new - 1) * cfg.vocab * cfg.embed


@count.mutant("You give the scores K heads. Every one of the N query heads has scores of its own.")
def scores_of_key_heads(cfg, new, cached):
    parameters, cache, flops = cost(cfg, new, cached)
    less = 4 * cfg.layers * new * (new + cached) * cfg.H * (cfg.heads - cfg.K)
    return parameters, cache, flops - less


@count.mutant(
    "You multiply the cached tokens by the matrices again. What a cache is for is that their keys and values are there "
    "already."
)
def cached_tokens_again(cfg, new, cached):
    parameters, cache, flops = cost(cfg, new, cached)
    matrices = parameters - cfg.vocab * cfg.embed * (1 if cfg.tie_embeddings else 2)
    matrices -= (2 * cfg.layers + 1) * cfg.embed
    return parameters, cache, flops + 2 * cached * matrices


@count.mutant("You count two matrices in the feed-forward. It has three: gate, up and down.")
def two_matrices(cfg, new, cached):
    return cost(cfg, new, cached, mlp=2)


@count.mutant("You left out the output projection, which leads from N*H back to D.")
def no_output_projection(cfg, new, cached):
    return cost(cfg, new, cached, out=1)


@count.mutant("You count one norm in each layer. There are two, one before each half.")
def one_norm_per_layer(cfg, new, cached):
    return cost(cfg, new, cached, norms=cfg.layers + 1)


@count.mutant("Your cache holds the new tokens alone. It also holds those that were in it before.")
def cache_of_new_tokens(cfg, new, cached):
    return cost(cfg, new, cached, held=new)


@count.mutant(
    "You count one product with the cache. There are two: queries with keys, and weights with values."
)
def scores_alone(cfg, new, cached):
    return cost(cfg, new, cached, products=1)


@count.mutant("You left out the product that gives the logits, D by V for each new token.")
def no_logits(cfg, new, cached):
    return cost(cfg, new, cached, lookups=-1)


@count.mutant(
    "With tied embeddings you left out the logits' product. One table is stored, and it is multiplied "
    "all the same."
)
def tied_logits_for_nothing(cfg, new, cached):
    return cost(cfg, new, cached, lookups=-1 if cfg.tie_embeddings else 0)


@count.mutant(
    "You count the FLOPs of training, three times those of a forward pass. This only reads."
)
def training(cfg, new, cached):
    parameters, size, flops = cost(cfg, new, cached)
    return parameters, size, 3 * flops


# ------------------------------------------------------------------------------------- window

window = Exercise(
    "04.window",
    title="A cache that forgets",
    function="attend_window",
    minutes=40,
    points=20,
    statement="""
A cache that keeps every token grows with the text. Several models have layers in which a token sees only the last few
thousand tokens. Such a layer needs no cache longer than that, however long the text gets. Design it.

Write `attend_window(q_BTNH, k_BTKH, v_BTKH, cache, window)`. It reads T new tokens of each of B texts and returns
`(out_BTNH, cache)`. The new tokens may be a text's first ones or later ones, a whole prompt or a single token.

- A token at position $t$ sees positions $t - \\text{window} + 1$ to $t$ of its own text, as far as they exist, in
  whatever pieces they were read. Scores are divided by $\\sqrt{H}$, and heads are shared as in exercise 04.gqa. You may
  use `jax.nn.dot_product_attention`.
- The cache is `None` before the first call. After that it's any pytree of arrays that you like: the next call gets what
  you returned. Each text has a cache of its own, and all B texts of a batch are equally long.
- The cache takes at most the bytes that the keys and values of `window` tokens take in their own dtype, plus 256. Its
  shapes and dtypes never change, so one compiled function reads one token after another.
- What is kept isn't moved. If a call reads T tokens, at most the keys and values of T tokens change in the cache.
- The checks run your function under `jax.jit`, with `window` a Python int.
""",
    hints=(
        "With a window of 3, write down which tokens the cache holds after each of the first seven tokens. Which token "
        "does each new one replace? Then read the same seven in pieces of two and of five.",
        "Let position p choose one of `window` slots by its remainder, `p % window`. From the number of tokens read so "
        "far, you can compute which position each slot holds now. The mask only compares positions. When a piece has "
        "several tokens, must its first token still see something that its last one replaces?",
        "Keep keys, values and the count. Slot j holds position `newest - (newest - j) % window`, and nothing if that "
        "is negative. Attend to the cache and the new tokens side by side, with a mask `0 <= t - position < window`. "
        "Only then write the last `window` new tokens, with `.at[:, positions % window].set(...)`.",
    ),
)  # fmt: skip


def window_text(t, length, B=2, N=6, K=2, dtype=jnp.float32):
    """(q, k, v) of whole texts."""
    heads = (N, K, K)
    return [vectors(t, (B, length, n, 8), dtype, 2.0) for n in heads]


def windowed(q_BTNH, k_BSKH, v_BSKH, window):
    """Attention of whole texts in float64."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q_BTNH, k_BSKH, v_BSKH))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1])
    age = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    scores = np.where((age >= 0) & (age < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, v)


def read_pieces(fn, text, window, lengths):
    """What fn returns for a text read in pieces: the outputs joined, the caches, the traces."""
    traces = []

    def counted(*args):
        traces.append(None)
        return fn(*args, window)

    # Many small programs run once: optimising them takes longer than running them.
    step = jax.jit(counted, compiler_options={"xla_backend_optimization_level": 0})
    cache, outs, caches, begin = None, [], [], 0
    for length in lengths:
        out, cache = step(*(x[:, begin : begin + length] for x in text), cache)
        outs.append(np.asarray(out))
        caches.append(cache)
        begin += length
    return np.concatenate(outs, axis=1), caches, len(traces)


def sees_its_window(t, fn, window, lengths, **sizes):
    text = window_text(t, sum(lengths), **sizes)
    got, _, traces = read_pieces(fn, text, window, lengths)
    why = f"window {window}, read in pieces of {', '.join(map(str, lengths))}"
    t.close(got, windowed(*text, window), rtol=1e-4, atol=1e-5, dtype=jnp.float32, why=why)
    return traces


@window.check("one token at a time, by one program")
def _(fn, t):
    traces = sees_its_window(t, fn, 4, [1] * 11)
    why = f"11 single tokens took {traces} traces: the first has no cache, the others are alike"
    t.true(traces <= 2, why, observed=traces)


@window.check("a prompt longer than the window, then single tokens")
def _(fn, t):
    sees_its_window(t, fn, 4, [9, 1, 1, 1, 1, 1, 1])


@window.check("pieces shorter than the window, as long, and longer")
def _(fn, t):
    sees_its_window(t, fn, 3, [2, 3, 2, *(int(n) for n in t.rng.permutation([7, 3])), 2], K=3)


@window.check("a window of one token")
def _(fn, t):
    sees_its_window(t, fn, 1, [2, 1, 1], B=1)


@window.check("a window longer than the text")
def _(fn, t):
    sees_its_window(t, fn, 12, [3, 3, 3], B=3, K=1)


@window.check("bfloat16, and a small cache in which little moves")
def _(fn, t):
    lengths = [9, 1, 1, 1, 1]
    text = window_text(t, sum(lengths), dtype=jnp.bfloat16)
    got, caches, _ = read_pieces(fn, text, 4, lengths)
    want = windowed(*text, 4)
    t.close(got, want, rtol=0.03, atol=0.05, dtype=jnp.bfloat16, why="window 4, in bfloat16")
    sizes = [sum(x.nbytes for x in jax.tree.leaves(cache)) for cache in caches]
    token = 2 * text[1][:, 0].nbytes
    why = f"bytes of the cache after each piece are {sizes}; {4 * token} hold 4 tokens"
    t.true(max(sizes) <= 4 * token + 256, why, observed=sizes)
    shapes = [str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), cache)) for cache in caches]
    t.equal(shapes, shapes[:1] * len(shapes), why="shapes and dtypes of the cache")
    changed = []
    for before, after in itertools.pairwise(caches):
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        pairs = [(np.asarray(x), np.asarray(y)) for x, y in pairs if x.dtype == jnp.bfloat16]
        changed.append(sum(int(np.sum(x != y)) for x, y in pairs))
    why = f"numbers of the cache that changed with each token are {changed}; it has {token // 2}"
    t.true(max(changed) <= token // 2, why, observed=changed)


def ring(
    q, k, v, cache, window, *, sees=None, slots=None, last=True, size=None, held=None,
    step=None, dtype=None, scale=None, grouping=None,
):  # fmt: skip
    """The right answer, with what one gets wrong as arguments."""
    B, T, K, H = k.shape
    size = size or window
    if cache is None:
        empty = jnp.zeros((B, size, K, H), dtype or k.dtype)
        cache = empty, empty, jnp.int32(0)
    k_old, v_old, count = cache
    newest = count - 1
    slot = jnp.arange(size)
    held_W = held(count, slot) if held else newest - (newest - slot) % size
    new = count + jnp.arange(T)
    s = jnp.concatenate([held_W, new])
    is_new = jnp.arange(size + T) >= size
    age = new[:, None] - s
    seen = (age >= 0) & (age < window) & (s >= 0)
    if sees:
        seen = sees(age, s, is_new)
    parts = k_old.astype(k.dtype), k
    k_all, v_all = jnp.concatenate(parts, 1), jnp.concatenate([v_old.astype(v.dtype), v], 1)
    if grouping:
        k_all, v_all = grouping(k_all), grouping(v_all)
    out = jax.nn.dot_product_attention(q, k_all, v_all, mask=seen[None, None], scale=scale)
    keep = min(T, size)
    where = (slots(count, new) if slots else new % size)[-keep:]
    if last:
        k, v = k[:, -keep:], v[:, -keep:]
    else:
        k, v = k[:, :keep], v[:, :keep]
    cache = (
        k_old.at[:, where].set(k.astype(k_old.dtype)),
        v_old.at[:, where].set(v.astype(v_old.dtype)),
    )
    return out, (*cache, count + (T if step is None else step))


def joined(q, k, v, cache, window, keep):
    """A cache in the order of the text, that keeps the last `keep` tokens, or all."""
    if cache is not None:
        k, v = jnp.concatenate([cache[0], k], 1), jnp.concatenate([cache[1], v], 1)
    T, S = q.shape[1], k.shape[1]
    age = jnp.arange(S - T, S)[:, None] - jnp.arange(S)
    seen = (age >= 0) & (age < window)
    out = jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])
    return out, (k[:, -keep:], v[:, -keep:])


@window.mutant(
    "Your cache keeps every token, and only the mask forgets. Tokens that no one will see again need no memory."
)
def keeps_all(q, k, v, cache, window):
    return joined(q, k, v, cache, window, 10**6)


@window.mutant(
    "Your cache grows until the window is full. Under `jax.jit` each length is another shape, and another compilation. "
    "Make it full-sized from the start, and mask what isn't filled."
)
def grows(q, k, v, cache, window):
    return joined(q, k, v, cache, window, window)


@window.mutant(
    "You move all the kept tokens along when a new one comes. That reads and writes the whole window for each token. "
    "Put the new token where the one that nobody will see again is stored."
)
def shifts(q, k, v, cache, window):
    B, T, K, H = k.shape
    if cache is None:
        empty = jnp.zeros((B, window, K, H), k.dtype)
        cache = empty, empty, jnp.int32(0)
    k_all, v_all = (jnp.concatenate([old, new], 1) for old, new in zip(cache, (k, v), strict=False))
    position = cache[2] + jnp.arange(-window, T)
    age = position[window:, None] - position
    seen = (age >= 0) & (age < window) & (position >= 0)
    out = jax.nn.dot_product_attention(q, k_all, v_all, mask=seen[None, None])
    return out, (k_all[:, -window:], v_all[:, -window:], cache[2] + T)


@window.mutant(
    "Your tokens see one token too many. The window counts the token itself: it sees `window - 1` before it."
)
def one_too_many(q, k, v, cache, window):
    def sees(age, s, is_new):
        return (age >= 0) & (age <= window) & (s >= 0)

    return ring(q, k, v, cache, window, size=window + 1, sees=sees)


@window.mutant(
    "Your tokens see one token too few. The window counts the token itself, and `window - 1` before it."
)
def one_too_few(q, k, v, cache, window):
    def sees(age, s, is_new):
        return (age >= 0) & (age < max(1, window - 1)) & (s >= 0)

    return ring(q, k, v, cache, window, sees=sees)


@window.mutant(
    "Your new tokens see all others that are read with them, the later ones too. That's the leak of section 4."
)
def sees_later_ones(q, k, v, cache, window):
    def sees(age, s, is_new):
        return (is_new | (age >= 0)) & (age < window) & (s >= 0)

    return ring(q, k, v, cache, window, sees=sees)


@window.mutant(
    "Among tokens that are read together you mask only the later ones. In a piece longer than the window, the first "
    "tokens are too old for the last ones."
)
def no_window_in_a_piece(q, k, v, cache, window):
    def sees(age, s, is_new):
        return (age >= 0) & (is_new | (age < window)) & (s >= 0)

    return ring(q, k, v, cache, window, sees=sees)


@window.mutant(
    "Every token of a piece sees the whole cache. For the first one that's right; for each later one, the oldest token "
    "in the cache has left the window."
)
def whole_cache(q, k, v, cache, window):
    def sees(age, s, is_new):
        oldest = jnp.maximum(age[:1] - window + 1, 0) == 0
        return (age >= 0) & jnp.where(is_new, age < window, oldest) & (s >= 0)

    return ring(q, k, v, cache, window, sees=sees)


@window.mutant(
    "Slots that are still empty take part in the softmax: a key of zeros has a score of 0, which isn't a weight of 0. "
    "Mask them."
)
def sees_empty_slots(q, k, v, cache, window):
    def sees(age, s, is_new):
        return (age >= 0) & (age < window)

    return ring(q, k, v, cache, window, sees=sees)


@window.mutant(
    "You write the new tokens into the cache before you attend. The last of them replace tokens that the first of them "
    "still see. Read first, then write."
)
def writes_first(q, k, v, cache, window):
    B, T, K, H = k.shape
    if cache is None:
        empty = jnp.zeros((B, window, K, H), k.dtype)
        cache = empty, empty, jnp.int32(0)
    k_ring, v_ring, count = cache
    new = count + jnp.arange(T)
    slots = new[-window:] % window
    k_ring = k_ring.at[:, slots].set(k[:, -window:])
    v_ring = v_ring.at[:, slots].set(v[:, -window:])
    newest = count + T - 1
    held = newest - (newest - jnp.arange(window)) % window
    age = new[:, None] - held
    seen = (age >= 0) & (age < window) & (held >= 0)
    out = jax.nn.dot_product_attention(q, k_ring, v_ring, mask=seen[None, None])
    return out, (k_ring, v_ring, count + T)


@window.mutant(
    "You count calls, not tokens. A call that reads T tokens moves the next position by T."
)
def counts_calls(q, k, v, cache, window):
    return ring(q, k, v, cache, window, step=1)


@window.mutant(
    "Of a piece longer than the window you keep the beginning. The next token sees the end of it."
)
def keeps_the_beginning(q, k, v, cache, window):
    return ring(q, k, v, cache, window, last=False)


@window.mutant(
    "Your pieces don't wrap around the end of the cache: `dynamic_update_slice` moves back a slice that would stick "
    "out, onto tokens that are still needed. Write to `(count + arange) % window`."
)
def does_not_wrap(q, k, v, cache, window):
    keep = min(k.shape[1], window)

    def slots(count, new):
        return jnp.minimum(new[-keep] % window, window - keep) + jnp.arange(keep)

    return ring(q, k, v, cache, window, slots=slots)


@window.mutant(
    "You write each piece to the beginning of the cache. It belongs in the slots of the oldest tokens; where those are "
    "depends on how many were read before."
)
def writes_to_the_front(q, k, v, cache, window):
    def slots(count, new):
        return (new - count) % window

    return ring(q, k, v, cache, window, slots=slots)


@window.mutant(
    "Your mask takes the slots for the text's order, oldest first. Once the cache is full, the oldest token is in "
    "another slot after each call."
)
def takes_slots_for_order(q, k, v, cache, window):
    def held(count, slot):
        return jnp.where(count < window, jnp.where(slot < count, slot, -1), count - window + slot)

    return ring(q, k, v, cache, window, held=held)


@window.mutant(
    "Your cache is float32 though keys and values are bfloat16, which takes twice the memory. Keep their own dtype."
)
def wide_cache(q, k, v, cache, window):
    return ring(q, k, v, cache, window, dtype=jnp.float32)


@window.mutant(
    "Your query heads take turns: head n uses key head n % K. Heads of a group are neighbours, n // G, as in 04.gqa."
)
def heads_take_turns(q, k, v, cache, window):
    def grouping(x):
        return jnp.tile(x, (1, 1, q.shape[2] // x.shape[2], 1))

    return ring(q, k, v, cache, window, grouping=grouping)


@window.mutant("You don't divide the scores by the root of H.")
def not_divided(q, k, v, cache, window):
    return ring(q, k, v, cache, window, scale=1.0)


@window.mutant(
    "Your cache has as many slots as the first piece has tokens. A short prompt then shortens the window for the whole "
    "text; only `window` decides."
)
def as_long_as_the_prompt(q, k, v, cache, window):
    size = min(window, q.shape[1]) if cache is None else cache[0].shape[1]
    return ring(q, k, v, cache, window, size=size)


@window.mutant(
    "A window of one token leaves your cache without a slot, and you divide by the number of slots. Treat an empty "
    "cache apart, or keep one slot more than you need."
)
def no_slot_for_one(q, k, v, cache, window):
    if window == 1:
        raise ZeroDivisionError("integer modulo by zero")
    return ring(q, k, v, cache, window, size=window - 1)
