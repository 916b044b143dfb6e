import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from minitext.book.grading import Exercise


def shapes_of(tree):
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)


# ------------------------------------------------------------------------------------- adamw

adamw = Exercise(
    "05.adamw",
    title="AdamW from its definition",
    function="adamw_update",
    minutes=25,
    points=10,
    statement="""
Write one update of AdamW, without optax: `adamw_update(grads, state, params, rate, decays, b1, b2,
eps, weight_decay)` returns `(updates, new state)`. For update number $t = 1, 2, \\dots$ of a
parameter $w$ with gradient $g$

$$
m_t = \\beta_1 m_{t-1} + (1 - \\beta_1) g, \\qquad v_t = \\beta_2 v_{t-1} + (1 - \\beta_2) g^2, \\qquad
\\Delta w = -\\eta \\left( \\frac{m_t / (1 - \\beta_1^t)}{\\sqrt{v_t / (1 - \\beta_2^t)} + \\varepsilon}
+ \\lambda w \\right),
$$

where the term $\\lambda w$ applies only to parameters that `decays` marks with True.

- `grads`, `params`, `decays` and both moments are pytrees that all have the same structure. It can
  be any structure, with arrays of any shapes, including scalars and empty arrays.
- `state["count"]` is the number of updates *before* this one, an int32 array. One compiled function
  serves all updates.
- Moments and arithmetic are float32, even if gradients are bfloat16.
- A parameter whose gradients have all been zero moves only if it decays. A gradient of $10^{-12}$
  needs no special treatment: follow the formula.
""",
    hints=(
        "Do one leaf on paper first. Then `jax.tree.map` takes a function of as many arguments as "
        "there are trees. What is t in the very first call, where the count is 0?",
        "Four lines: new moments with `jax.tree.map` over (moment, gradient); the two corrections, "
        "which are the same scalars for all leaves; the updates with `jax.tree.map` over (mu, nu, "
        "params, decays). The state keeps the moments *uncorrected*.",
        "`count = state['count'] + 1`, `t = count.astype(jnp.float32)`. In the last `tree.map`: "
        "`direction = m / (1 - b1**t) / (jnp.sqrt(v / (1 - b2**t)) + eps)`, then "
        "`-rate * (direction + weight_decay * p)` if the leaf decays, else `-rate * direction`.",
    ),
    forbid=("optax", "minitext.training.optim"),
)


SHAPES = {"stack": {"w": (3, 5, 4), "scale": (3, 5), "none": (0, 4)}, "b": (7,), "gain": ()}


class Descent:
    """Ragged parameters, a stream of gradients for them, and the definition in float64.

    Two of the four parameters that have entries decay, or with `turned` the two others.
    """

    def __init__(self, rng, dtype=jnp.float32, turned=False):
        self.rng, self.dtype = rng, dtype
        self.params = self.draw(jnp.float32)
        on, off = not turned, turned
        self.decays = {"stack": {"w": on, "scale": off, "none": on}, "b": on, "gain": off}

    def draw(self, dtype=None, scale=1.0):
        is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
        sizes = lambda s: self.rng.normal(size=s) * scale * 10.0 ** self.rng.integers(-3, 3, s)  # noqa: E731
        new = lambda s: jnp.asarray(sizes(s), dtype or self.dtype)  # noqa: E731
        return jax.tree.map(new, SHAPES, is_leaf=is_shape)

    def zeros(self):
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.params)

    def fresh(self):
        return {"count": jnp.zeros((), jnp.int32), "mu": self.zeros(), "nu": self.zeros()}


def right_bracket(g, m, v, p, decay, eps):
    """What the rate multiplies; m and v are corrected, and `decay` is 0 where nothing decays."""
    return m / (np.sqrt(v) + eps) + decay * p


WRONG_BRACKETS = {
    "The gradient itself is where the corrected average m belongs": lambda g, m, v, p, decay, eps: (
        g / (np.sqrt(v) + eps) + decay * p
    ),
    "Your decay makes parameters grow: it has the other sign": lambda g, m, v, p, decay, eps: (
        m / (np.sqrt(v) + eps) - decay * p
    ),
    "Your decay multiplies the rest; the formula adds it": lambda g, m, v, p, decay, eps: (
        m / (np.sqrt(v) + eps) * (1 + decay * p)
    ),
}


def adamw_by_numpy(
    grads, state, params, rate, decays, b1, b2, eps, weight_decay, bracket=right_bracket
):
    """The update in float64; state is (t, mu, nu)."""
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    t, mu, nu = state
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * wide(g), mu, grads)
    nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * wide(g) ** 2, nu, grads)

    def update(g, m, v, p, decay):
        m, v = m / (1 - b1 ** (t + 1)), v / (1 - b2 ** (t + 1))
        return -rate * bracket(wide(g), m, v, wide(p), weight_decay * decay, eps)

    return jax.tree.map(update, grads, mu, nu, params, decays), (t + 1, mu, nu)


def follow(fn, t, problem, updates, why, rate=0.01, **settings):
    """Compares every update of a short descent with float64."""
    settings = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1} | settings
    step = jax.jit(functools.partial(fn, decays=problem.decays, rate=rate, **settings))
    state = problem.fresh()
    want_state = (0, problem.zeros(), problem.zeros())
    params = problem.params
    for number in range(1, updates + 1):
        grads = problem.draw()
        got, state = step(grads, state, params)
        numpy = functools.partial(
            adamw_by_numpy, grads, want_state, params, rate, problem.decays, **settings
        )
        mistakes = {text: numpy(bracket=wrong)[0] for text, wrong in WRONG_BRACKETS.items()}
        eps = settings["eps"] / math.sqrt(1 - settings["b2"] ** number)
        text = "You add eps before you correct the root; it is added last"
        mistakes[text] = numpy(eps=eps)[0]
        if any(jax.tree.leaves(problem.decays)) and settings["weight_decay"]:
            other = jax.tree.map(lambda d: not d, problem.decays)
            text = "You let exactly those parameters decay where `decays` is False"
            mistakes[text] = adamw_by_numpy(grads, want_state, params, rate, other, **settings)[0]
        (want, want_state), why_here = numpy(), f"update {number}, {why}"
        close = functools.partial(t.close, rtol=2e-4, atol=2e-6 * rate, dtype=np.float32)
        close(got, want, why=why_here, mistakes=mistakes)
        params = jax.tree.map(lambda p, u: p + u, params, got)


@adamw.check("the first step is as long as the rate")
def _(fn, t):
    rate = float(t.rng.uniform(1e-3, 1e-2))
    grads = {"b": jnp.asarray(t.rng.choice([-40.0, -1.0, 0.01, 3.0], (4, 5)), jnp.float32)}
    zeros = jax.tree.map(jnp.zeros_like, grads)
    state = {"count": jnp.zeros((), jnp.int32), "mu": zeros, "nu": zeros}
    got, _ = fn(grads, state, grads, rate, {"b": False})
    told = "you return (new state, updates); the updates come first"
    t.true(not (isinstance(got, dict) and "count" in got), why=told)
    want = -rate * np.sign(grads["b"])
    root = np.sqrt(np.abs(grads["b"]))
    mistakes = {
        "You correct m and leave v as it is": want / math.sqrt(0.05),
        "You correct v and leave m as it is": want * 0.1,
        "You take the root of v before you correct it": want * math.sqrt(0.05),
        "You give the old moment the share 1 - b, and what is new the share b": want
        * 9
        / math.sqrt(19),
        "You correct v with b1; it has b2": want * math.sqrt(2),
        "You correct m with b2; it has b1": want * 2,
        "Your v averages |g|; it is the average of g^2": want * root,
        "Your parameter decays, although `decays` is False": want - rate * 0.1 * grads["b"],
    }
    why = "m / sqrt(v) is the gradient's sign at t = 1"
    t.close(got["b"], want, rtol=1e-4, why=why, mistakes=mistakes)


@adamw.check("five updates without decay")
def _(fn, t):
    follow(fn, t, Descent(t.rng), 5, "b1=0.8, b2=0.99", weight_decay=0.0, b1=0.8, b2=0.99)


@adamw.check("decay, and where there is none")
def _(fn, t):
    follow(fn, t, Descent(t.rng), 3, "with weight_decay=0.3", weight_decay=0.3)


@adamw.check("tiny gradients, and eps outside the root")
def _(fn, t):
    problem = Descent(t.rng)
    problem.draw = functools.partial(problem.draw, scale=1e-6)
    follow(fn, t, problem, 3, "gradients of 1e-9 to 1e-4", weight_decay=0.0, eps=1e-6)


@adamw.check("gradients of zero")
def _(fn, t):
    for turned in (False, True):
        problem = Descent(t.rng, turned=turned)
        got, state = fn(problem.zeros(), problem.fresh(), problem.params, 0.01, problem.decays)
        want = jax.tree.map(lambda p, d: -0.01 * 0.1 * p * d, problem.params, problem.decays)
        t.close(got, want, rtol=1e-5, atol=0, why="only decay is left")
        t.close(state["mu"], problem.zeros(), atol=0, why="the first moment")


@adamw.check("bfloat16 gradients, float32 moments")
def _(fn, t):
    problem = Descent(t.rng, jnp.bfloat16)
    grads, state = problem.draw(), problem.fresh()
    updates, new = fn(grads, state, problem.params, 0.01, problem.decays)
    t.equal(shapes_of(new), shapes_of(state), why="dtypes and shapes of the new state")
    t.equal(shapes_of(updates), shapes_of(state["mu"]), why="dtypes and shapes of the updates")
    want = jax.tree.map(lambda g: 0.05 * np.asarray(g, np.float64) ** 2, grads)
    t.close(new["nu"], want, rtol=1e-4, atol=1e-12, why="the second moment, b2=0.95")


@adamw.check("the state counts, and keeps the averages as they are")
def _(fn, t):
    problem = Descent(t.rng)
    grads, state = problem.draw(), problem.fresh()
    state["count"] = jnp.asarray(int(t.rng.integers(5, 2000)), jnp.int32)
    step = t.traces(functools.partial(fn, decays=problem.decays, rate=0.01))
    _, new = step(grads, state, problem.params)
    t.equal(int(new["count"]), int(state["count"]) + 1, why="the count")
    want = jax.tree.map(lambda g: 0.1 * np.asarray(g, np.float64), grads)
    t.close(new["mu"], want, rtol=1e-4, atol=1e-9, why="the first moment in the state")
    for _ in range(2):
        _, new = step(grads, new, problem.params)
    t.equal(step.count, 1, why="how often three updates were traced")


def adamw_variant(
    correct=lambda m, b, t: m / (1 - b**t),
    first_t=1,
    root=lambda v, eps: jnp.sqrt(v) + eps,
    l2=False,
    masked=True,
    decay_times_rate=True,
    sign=-1,
    keep_corrected=False,
    dtype=jnp.float32,
    own_b1=None,
    own_b2=None,
    new_share=lambda b: 1 - b,
    counts=1,
    swapped=False,
    result=lambda p, u: u,
):
    """A correct adamw_update but for what is passed."""

    def adamw_update(grads, state, params, rate, decays, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1):  # fmt: skip
        b1, b2 = (b2, b1) if swapped else (own_b1 or b1, own_b2 or b2)
        count = state["count"] + counts
        t = (state["count"] + first_t).astype(jnp.float32)
        share = jax.tree.map(lambda d: weight_decay * (d or not masked), decays)
        grads = jax.tree.map(lambda g: g.astype(dtype or g.dtype), grads)
        if l2:
            grads = jax.tree.map(lambda g, p, s: g + s * p, grads, params, share)
        square = lambda g: (g * g).astype(jnp.float32)  # noqa: E731
        mu = jax.tree.map(
            lambda m, g: b1 * m + new_share(b1) * g.astype(jnp.float32), state["mu"], grads
        )
        nu = jax.tree.map(lambda v, g: b2 * v + new_share(b2) * square(g), state["nu"], grads)
        mu_hat = jax.tree.map(lambda m: correct(m, b1, t), mu)
        nu_hat = jax.tree.map(lambda v: correct(v, b2, t), nu)

        def update(m, v, p, s):
            direction = rate * m / root(v, eps)
            if l2:
                return sign * direction
            return sign * (direction + (rate if decay_times_rate else 1.0) * s * p)

        updates = jax.tree.map(update, mu_hat, nu_hat, params, share)
        updates = jax.tree.map(result, params, updates)
        kept = (mu_hat, nu_hat) if keep_corrected else (mu, nu)
        return updates, {"count": count, "mu": kept[0], "nu": kept[1]}

    return adamw_update


def wrong_adamw(name, hint, **changes):
    fn = adamw_variant(**changes)
    fn.__name__ = name
    adamw.mutant(hint)(fn)


wrong_adamw(
    "no_bias_correction",
    "You use the averages as they are. They began at zero, so the first ones are too small, and not "
    "by the same factor: divide m by 1 - b1^t and v by 1 - b2^t.",
    correct=lambda m, b, t: m,
)
wrong_adamw(
    "count_before_the_update",
    "In the first update your t is 0, so 1 - b^t is 0 and you divide by it. t is the number of "
    "updates including this one: the old count plus 1.",
    first_t=0,
)
wrong_adamw(
    "wrong_way",
    "You return what has to be subtracted. An update is *added* to the parameters, as in optax: it "
    "points against the gradient.",
    sign=1,
)
wrong_adamw(
    "corrected_twice",
    "You keep the corrected moments in the state, so the next update corrects them again. The state "
    "holds the plain averages; the corrected ones live for one update only.",
    keep_corrected=True,
)
wrong_adamw(
    "b1_written_in",
    "You use 0.9 as b1, whatever is given. It is an argument, like b2, eps and weight_decay.",
    own_b1=0.9,
)
wrong_adamw(
    "b2_written_in",
    "You use 0.95 as b2, whatever is given. It is an argument, like b1, eps and weight_decay.",
    own_b2=0.95,
)
wrong_adamw(
    "decay_in_the_gradient",
    "You add the decay to the gradient. It then goes into both moments and is divided by the root "
    "of v: where gradients are large, nothing decays. Add weight_decay * w after the division.",
    l2=True,
)
wrong_adamw(
    "everything_decays",
    "You let all parameters decay. Where `decays` is False, weight_decay must not appear.",
    masked=False,
)
wrong_adamw(
    "decay_without_the_rate",
    "Your decay is not multiplied by the learning rate: parameters lose weight_decay of themselves "
    "in every step. The rate stands in front of the whole bracket.",
    decay_times_rate=False,
)
wrong_adamw(
    "eps_inside_the_root",
    "You add eps under the root. There it counts as its own root, ten thousand times as much for "
    "1e-8, and small gradients hardly move anything. Take the root first, then add eps.",
    root=lambda v, eps: jnp.sqrt(v + eps),
)
wrong_adamw(
    "squares_in_bfloat16",
    "You square the gradient in its own dtype. The square of a bfloat16 number is rounded to 8 bits "
    "before it enters v. Convert the gradient to float32 first.",
    dtype=None,
)
wrong_adamw(
    "new_parameters",
    "You return the new parameters. What is asked for is the change alone, which the caller adds to "
    "them.",
    result=lambda p, u: p + u,
)
wrong_adamw(
    "swapped_decays",
    "You use b1 for the second moment and b2 for the first. b1 belongs to m, b2 to v.",
    swapped=True,
)
wrong_adamw(
    "whole_gradient_added",
    "You add the whole gradient to the decayed moment. Both moments are averages: what is new goes in "
    "with the share 1 - b.",
    new_share=lambda b: 1.0,
)
wrong_adamw(
    "no_root",
    "You divide by v itself. It is an average of squares: take its root first, or the step grows as "
    "the gradient shrinks.",
    root=lambda v, eps: v + eps,
)
wrong_adamw(
    "product_for_power",
    "Your correction is right for t = 1 alone. The weight of an average after t updates is 1 - b to "
    "the power of t.",
    correct=lambda m, b, t: m / (1 - b),
)
wrong_adamw(
    "does_not_count",
    "The count in your new state is the old one, so every update takes itself for the first. Return "
    "the count plus 1.",
    counts=0,
)

# -------------------------------------------------------------------------------------- clip

clip = Exercise(
    "05.clip",
    title="Clip by the global norm",
    function="clip_tree",
    minutes=15,
    points=10,
    statement="""
Write `clip_tree(grads, limit)`, without optax. The global norm is the norm of all entries of all
arrays together, $\\sqrt{\\sum_i g_i^2}$. If it is above the limit, multiply every entry by the *same*
factor, limit / norm. Return the gradient and the norm it had before, a float32 scalar.

- A gradient that is short enough comes back bit for bit.
- Squares and their sum are float32, even for bfloat16 arrays; each array comes back in its own
  dtype, rounded once.
- A gradient of zeros gives zeros and norm 0. Norms and limits of $10^{-6}$ are treated like any
  others.
- The function is called inside a jitted step.
""",
    hints=(
        "One number for the whole tree: which sum runs over the arrays, and which over the entries "
        "of one? And what is limit / norm for a gradient of zeros?",
        "`sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads))`, then one "
        "root. Under jit you cannot ask `if norm > limit`; choose the factor with `jnp.where`.",
        "`scale = jnp.where(norm > limit, limit / norm, 1.0)`. For a gradient of zeros "
        "`where` picks the 1, and multiplying by exactly 1 changes no bit. Then "
        "`jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(g.dtype), grads)`.",
    ),
    forbid=("optax", "minitext.training.optim"),
)


def ragged_gradient(rng, scale=1.0, dtype=jnp.float32):
    draw = lambda *s: jnp.asarray(rng.normal(size=s) * scale, dtype)  # noqa: E731
    return {"w": draw(6, 5), "layers": [draw(3), draw(2, 4, 1)], "gain": draw(), "none": draw(0, 3)}


def norm_by_numpy(grads):
    return math.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))


def clip_by_numpy(grads, limit):
    factor = min(1.0, limit / norm_by_numpy(grads))
    return jax.tree.map(lambda g: np.asarray(g, np.float64) * factor, grads)


@clip.check("a long gradient is shortened to the limit")
def _(fn, t):
    grads = ragged_gradient(t.rng, scale=float(t.rng.uniform(1, 9)))
    limit = 0.3 * norm_by_numpy(grads)
    got, norm = fn(grads, limit)
    t.close(got, clip_by_numpy(grads, limit), rtol=1e-4, why="the clipped gradient")
    t.close(norm, norm_by_numpy(grads), rtol=1e-5, why="the norm before", dtype=np.float32)


@clip.check("a short gradient is not touched")
def _(fn, t):
    grads = ragged_gradient(t.rng)
    limit = 1.5 * norm_by_numpy(grads)
    got, norm = fn(grads, limit)
    t.equal(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, grads), why="the gradient")
    t.close(norm, norm_by_numpy(grads), rtol=1e-5, why="the norm")


@clip.check("zeros")
def _(fn, t):
    grads = jax.tree.map(jnp.zeros_like, ragged_gradient(t.rng))
    got, norm = fn(grads, 1.0)
    t.close(got, grads, atol=0, why="a gradient of zeros")
    t.close(norm, 0.0, atol=0, why="its norm")


@clip.check("a small norm and a smaller limit")
def _(fn, t):
    grads = ragged_gradient(t.rng, scale=1e-6)
    limit = 0.2 * norm_by_numpy(grads)
    want = clip_by_numpy(grads, limit)
    got = jax.tree.map(lambda g: g / limit, fn(grads, limit)[0])
    t.close(got, jax.tree.map(lambda g: g / limit, want), rtol=1e-4, why="in units of the limit")


@clip.check("bfloat16 arrays")
def _(fn, t):
    for size in (1.0, 0.7, 1.8):  # what is rounded to 8 bits is near enough now and then
        grads = {
            "half": jnp.asarray(t.rng.normal(size=(60, 500)) * size, jnp.bfloat16),
            "full": jnp.asarray(t.rng.normal(size=9), jnp.float32),
        }
        limit = float(t.rng.uniform(20, 40))
        got, norm = fn(grads, limit)
        t.close(norm, norm_by_numpy(grads), rtol=1e-5, why="the norm of 30,009 entries")
        t.equal(shapes_of(got), shapes_of(grads), why="dtypes and shapes")
        want = clip_by_numpy(grads, limit)["half"].astype(jnp.bfloat16)
        same = np.mean(np.asarray(got["half"]) == want)
        why = f"only {same:.1%} of the bfloat16 entries are what one rounding gives"
        t.true(same > 0.995, why=why, observed=same)


@clip.check("inside a jitted step")
def _(fn, t):
    clipped = t.traces(functools.partial(fn, limit=2.0))
    for scale in (0.01, 5.0):
        grads = ragged_gradient(t.rng, scale)
        got, _ = clipped(grads)
        t.close(got, clip_by_numpy(grads, 2.0), rtol=1e-4, why=f"gradients of size {scale:g}")
    t.equal(clipped.count, 1, why="the number of traces")


def squares(grads, dtype=jnp.float32):
    return [jnp.sum(jnp.square(g.astype(dtype or g.dtype))) for g in jax.tree.leaves(grads)]


def scaled(grads, scale):
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(g.dtype), grads)


@clip.mutant(
    "You clip every array by its own norm. That changes the direction of the gradient: large parts "
    "are cut and small ones are not. There is one norm, over all arrays together."
)
def each_array_alone(grads, limit):
    one = lambda g: scaled(g, jnp.minimum(1.0, limit / jnp.maximum(jnp.sqrt(squares(g)[0]), 1e-30)))  # noqa: E731
    return jax.tree.map(one, grads), jnp.sqrt(sum(squares(grads)))


@clip.mutant(
    "You cut entries to the limit one by one. That changes the gradient's direction. Multiply all "
    "entries by one factor."
)
def each_entry_alone(grads, limit):
    cut = lambda g: jnp.clip(g, -limit, limit)  # noqa: E731
    return jax.tree.map(cut, grads), jnp.sqrt(sum(squares(grads)))


@clip.mutant(
    "You add up the norms of the arrays. Lengths at right angles don't add: sum the squares of all "
    "entries, and take one root at the end."
)
def sum_of_norms(grads, limit):
    norm = sum(jnp.sqrt(s) for s in squares(grads))
    return scaled(grads, jnp.where(norm > limit, limit / norm, 1.0)), norm


@clip.mutant(
    "You return the norm after clipping. A training run logs the norm before it, which shows "
    "that a batch was odd."
)
def norm_afterwards(grads, limit):
    norm = jnp.sqrt(sum(squares(grads)))
    clipped = scaled(grads, jnp.where(norm > limit, limit / norm, 1.0))
    return clipped, jnp.minimum(norm, limit)


@clip.mutant(
    "You bring every gradient to the limit, also one that is shorter. The factor is never above 1."
)
def always_to_the_limit(grads, limit):
    norm = jnp.sqrt(sum(squares(grads)))
    return scaled(grads, limit / jnp.maximum(norm, 1e-30)), norm


@clip.mutant(
    "A gradient of zeros gives nan: 0 * (limit / 0). Choose the factor so that it is 1 whenever"
    " the norm is not above the limit."
)
def zero_over_zero(grads, limit):
    norm = jnp.sqrt(sum(squares(grads)))
    unit = jax.tree.map(lambda g: g.astype(jnp.float32) / norm, grads)
    short = norm < limit
    pick = lambda g, u: jnp.where(short & (norm > 0), g, (limit * u).astype(g.dtype))  # noqa: E731
    return jax.tree.map(pick, grads, unit), norm


@clip.mutant(
    "You add a constant such as 1e-6 to the norm, to be safe from zero. Where norms are that small "
    "it changes the result. Ask whether the norm is above the limit instead."
)
def constant_in_the_norm(grads, limit):
    norm = jnp.sqrt(sum(squares(grads)))
    return scaled(grads, jnp.where(norm > limit, limit / (norm + 1e-6), 1.0)), norm


@clip.mutant(
    "You square and sum bfloat16 arrays in their own dtype. Each square and each sum is rounded to 8 "
    "bits. Convert each array to float32 before you square it."
)
def norm_in_bfloat16(grads, limit):
    norm = jnp.sqrt(sum(squares(grads, dtype=None)).astype(jnp.float32))
    return scaled(grads, jnp.where(norm > limit, limit / norm, 1.0)), norm


@clip.mutant(
    "Your arrays come back as float32. Multiply in float32 and convert each array back to its "
    "own dtype, or the step compiles again and takes twice the memory."
)
def comes_back_wide(grads, limit):
    norm = jnp.sqrt(sum(squares(grads)))
    scale = jnp.where(norm > limit, limit / norm, 1.0)
    return jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grads), norm


@clip.mutant(
    "You round the factor to bfloat16 before you multiply, so every entry is rounded twice. "
    "Multiply in float32, then convert the product."
)
def rounded_factor(grads, limit):
    norm = jnp.sqrt(sum(squares(grads)))
    scale = jnp.where(norm > limit, limit / norm, 1.0)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), norm


@clip.mutant(
    "Python's `if` asks for the norm's value, which does not exist while the step is traced. "
    "Choose with jnp.where."
)
def asks_python(grads, limit):
    norm = jnp.sqrt(sum(squares(grads)))
    return (scaled(grads, limit / norm) if norm > limit else grads), norm


@clip.mutant(
    "You use the sum of squares as the norm. Take its root, once, after everything is added up."
)
def no_root(grads, limit):
    norm = sum(squares(grads))
    return scaled(grads, jnp.where(norm > limit, limit / norm, 1.0)), norm


@clip.mutant(
    "You take the mean of the squares. The norm is the root of their *sum*, however many there are."
)
def mean_of_squares(grads, limit):
    size = sum(g.size for g in jax.tree.leaves(grads))
    norm = jnp.sqrt(sum(squares(grads)) / size)
    return scaled(grads, jnp.where(norm > limit, limit / norm, 1.0)), norm


@clip.mutant(
    "You use the largest entry as the norm. The norm is the root of the sum of all squares."
)
def largest_entry(grads, limit):
    sizes = [jnp.max(jnp.abs(g), initial=0.0) for g in jax.tree.leaves(grads)]
    norm = jnp.max(jnp.stack([size.astype(jnp.float32) for size in sizes]))
    return scaled(grads, jnp.where(norm > limit, limit / norm, 1.0)), norm


@clip.mutant(
    "Your factor is upside down: a gradient above the limit grows. The factor is limit / norm, below 1."
)
def upside_down(grads, limit):
    norm = jnp.sqrt(sum(squares(grads)))
    return scaled(grads, jnp.where(norm > limit, norm / limit, 1.0)), norm


@clip.mutant(
    "You divide by the norm and forget the limit: a long gradient comes back with norm 1. Its norm "
    "must be the limit."
)
def unit_norm(grads, limit):
    norm = jnp.sqrt(sum(squares(grads)))
    return scaled(grads, jnp.where(norm > limit, 1 / norm, 1.0)), norm


# --------------------------------------------------------------------------------------- wsd

wsd = Exercise(
    "05.wsd",
    title="Warm-up, stable, decay",
    function="wsd_rate",
    minutes=20,
    points=10,
    statement="""
Write `wsd_rate(step, steps, peak, warmup, decay, final)`: the learning rate of step 0, 1, ... of a
run of `steps` steps.

- In the first `warmup` steps it rises in a straight line. Step 0 already moves: its rate is peak /
  (warmup + 1), and step `warmup` is the first at the peak. With `warmup=0` that is step 0.
- Then it stays at the peak.
- The last `decay` steps fall in a straight line: step `steps - decay` is the last at the peak, and
  at step `steps` the rate would be `final`. If the run continues beyond that, the rate stays at
  `final`.
- If the decay is longer than the steps left after the warm-up, it begins at the end of the warm-up
  and ends at `steps`.
- `step` is an int32 array of any shape, or traced. All other arguments are Python numbers.
""",
    hints=(
        "Draw the curve for steps=10, warmup=2, decay=4, and write the rate at each step. There are "
        "two straight lines and a flat part that joins them.",
        "Write both lines as formulas that hold for every step, and choose between them with "
        "`jnp.where(step < warmup, ...)`. `jnp.clip` makes the flat part and the end.",
        "`begin = max(warmup, steps - decay)`; `done = jnp.clip((step - begin) / (steps - "
        "begin), 0, 1)`. From step `warmup` on the rate is `peak + (final - peak) * done`, "
        "and before that `peak * (step + 1) / (warmup + 1)`.",
    ),
    forbid=("optax", "minitext.training.optim"),
)


def wsd_by_hand(steps, peak, warmup, decay, final, until):
    """The rate at steps 0 .. until - 1, one by one in Python."""
    begin, rates = max(warmup, steps - decay), []
    for step in range(until):
        if step < warmup:
            rates.append(peak * (step + 1) / (warmup + 1))
        elif step <= begin:
            rates.append(peak)
        elif step < steps:
            rates.append(peak + (final - peak) * (step - begin) / (steps - begin))
        else:
            rates.append(final)
    return np.array(rates)


def check_rates(fn, t, why, steps, warmup, decay, until=None, share=0.1):
    peak = float(t.rng.uniform(1e-3, 1e-1))
    until = until or steps
    got = fn(jnp.arange(until), steps, peak, warmup, decay, share * peak)
    want = wsd_by_hand(steps, peak, warmup, decay, share * peak, until)
    if np.shape(got) == want.shape:
        step, begin = np.arange(until), max(warmup, steps - decay)
        off = np.abs(np.asarray(got) - want) > 1e-5 * peak
        phases = {
            "the warm-up": step < warmup,
            "the stable phase": (step >= warmup) & (step <= begin),
            "the decay": (step > begin) & (step < steps),
            "what comes after the run": step >= steps,
        }
        wrong = [name for name, within in phases.items() if (off & within).any()]
        why += f"; off in {' and in '.join(wrong)}" if wrong else ""
    t.close(got, want, rtol=1e-5, atol=1e-6 * peak, why=why, dtype=np.float32)


@wsd.check("warm-up, and what is stable")
def _(fn, t):
    warmup, decay = int(t.rng.integers(4, 9)), int(t.rng.integers(5, 12))
    check_rates(fn, t, "before the decay", 60, warmup, decay, until=60 - decay)


@wsd.check("the decay")
def _(fn, t):
    warmup, decay = int(t.rng.integers(4, 9)), int(t.rng.integers(5, 12))
    check_rates(fn, t, "the whole run", 60, warmup, decay)
    check_rates(fn, t, "a decay of one step", 60, warmup, 1)


@wsd.check("no warm-up")
def _(fn, t):
    check_rates(fn, t, "warmup=0", 40, 0, int(t.rng.integers(5, 12)))


@wsd.check("a decay longer than what is left")
def _(fn, t):
    warmup = int(t.rng.integers(10, 15))
    check_rates(fn, t, f"decay=90 of 40 steps, warmup={warmup}", 40, warmup, 90)
    check_rates(fn, t, f"decay=36 of 40 steps, warmup={warmup}", 40, warmup, 36)


@wsd.check("after the end")
def _(fn, t):
    check_rates(fn, t, "a run that is continued", 30, 5, int(t.rng.integers(6, 12)), until=50)
    check_rates(fn, t, "a final rate of 0", 30, 5, 10, until=50, share=0.0)


@wsd.check("a traced step")
def _(fn, t):
    rate = t.traces(lambda step: fn(step, 30, 0.5, 4, 10, 0.1))
    got = [float(rate(jnp.asarray(step))) for step in (0, 10, 25)]
    t.close(got, wsd_by_hand(30, 0.5, 4, 10, 0.1, 30)[[0, 10, 25]], rtol=1e-5, why="one by one")
    t.equal(rate.count, 1, why="the number of traces")


def wsd_variant(
    rising=lambda step, warmup: (step + 1) / (warmup + 1),
    begin=lambda steps, warmup, decay: max(warmup, steps - decay),
    end=lambda steps, begin, decay: steps,
    done=lambda x: jnp.clip(x, 0.0, 1.0),
    fall=lambda peak, final, done: peak + (final - peak) * done,
    early=lambda step, warmup: step < warmup,
):
    """A correct wsd_rate but for what is passed."""

    def wsd_rate(step, steps, peak, warmup, decay, final=0.0):
        step = jnp.asarray(step, jnp.float32)
        first = begin(steps, warmup, decay)
        last = end(steps, first, decay)
        falling = fall(peak, final, done((step - first) / (last - first)))
        return jnp.where(early(step, warmup), peak * rising(step, warmup), falling)

    return wsd_rate


def wrong_wsd(name, hint, **changes):
    fn = wsd_variant(**changes)
    fn.__name__ = name
    wsd.mutant(hint)(fn)


wrong_wsd(
    "warm_up_from_zero",
    "Your first rate is 0, so the first step is wasted. Warm-up begins at peak / (warmup + 1): "
    "count step + 1 of warmup + 1.",
    rising=lambda step, warmup: step / max(warmup, 1),
)
wrong_wsd(
    "peak_one_step_early",
    "Your warm-up reaches the peak one step early: step `warmup` is the first at the peak, and "
    "there are warmup + 1 equal rises.",
    rising=lambda step, warmup: (step + 1) / max(warmup, 1),
)
wrong_wsd(
    "no_stable_phase",
    "Your rate falls from the end of warm-up on. The decay takes only the last `decay` steps; before "
    "that the rate stays at the peak.",
    begin=lambda steps, warmup, decay: warmup,
)
wrong_wsd(
    "decays_to_zero",
    "Your decay ends at 0, whatever `final` is. It goes from the peak to `final`.",
    fall=lambda peak, final, done: peak * (1 - done),
)
wrong_wsd(
    "along_a_cosine",
    "Your decay follows a cosine. A straight line is asked for.",
    fall=lambda peak, final, done: final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * done)),
)
wrong_wsd(
    "ends_one_step_early",
    "Your decay reaches `final` at step steps - 1. It would be reached at step `steps`, the first "
    "one after the run: there are `decay` equal falls.",
    end=lambda steps, begin, decay: max(begin + 1, steps - 1),
)
wrong_wsd(
    "decay_cuts_the_warm_up_short",
    "With a decay longer than what is left your rate jumps down at the end of warm-up: the line has "
    "begun to fall before. A decay begins no earlier than warm-up ends: max(warmup, steps - decay).",
    begin=lambda steps, warmup, decay: steps - decay,
)
wrong_wsd(
    "falls_for_ever",
    "After the last step your rate goes on falling, below `final` and below 0. Keep it at `final`.",
    done=lambda x: jnp.maximum(x, 0.0),
)


wrong_wsd(
    "decay_one_step_early",
    "Your decay begins one step early: step `steps - decay` is the last one at the peak.",
    begin=lambda steps, warmup, decay: max(warmup, steps - decay - 1),
)
wrong_wsd(
    "decay_one_step_late",
    "Your decay begins one step late: the step after `steps - decay` is the first below the peak.",
    begin=lambda steps, warmup, decay: max(warmup, steps - decay + 1),
)
wrong_wsd(
    "decay_written_as_its_own_length",
    "A decay that is cut short still takes `decay` steps in your line, so it never reaches `final`. "
    "Divide by the steps that it really has: from where it begins to `steps`.",
    end=lambda steps, begin, decay: begin + decay,
)
wrong_wsd(
    "whole_numbers",
    "You divide whole numbers with `//`, or make the fraction whole, so the line is a staircase of "
    "one step. Divide in float32.",
    rising=lambda step, warmup: (step + 1) // (warmup + 1),
)
wrong_wsd(
    "final_as_a_share",
    "You treat `final` as a share of the peak. It is a rate, like the peak.",
    fall=lambda peak, final, done: peak * (1 + (final - 1) * done),
)
wrong_wsd(
    "falls_exponentially",
    "Your decay falls by the same factor in each step. A straight line is asked for: by the same "
    "amount.",
    fall=lambda peak, final, done: peak * (final / peak) ** done,
)
wrong_wsd(
    "final_at_once",
    "Your rate is `final` as soon as the decay begins. It falls there in a straight line of `decay` "
    "steps.",
    done=lambda x: jnp.where(x > 0, 1.0, 0.0),
)


@wsd.mutant(
    "Python's `if` asks for the value of the step, which may be an array or traced. Choose with "
    "jnp.where."
)
def asks_python_for_the_step(step, steps, peak, warmup, decay, final=0.0):
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return wsd_variant()(step, steps, peak, warmup, decay, final)


# ----------------------------------------------------------------------------- orthogonalize

orthogonalize = Exercise(
    "05.orthogonalize",
    title="Orthogonalise by Newton-Schulz",
    function="newton_schulz",
    minutes=20,
    points=10,
    statement="""
Write `newton_schulz(x, rounds, a, b, c)`. Divide each matrix by its Frobenius norm, which brings
all its singular values $s$ into $[0, 1]$. Then apply the polynomial $p(s) = a s + b s^3 + c s^5$ to
the singular values `rounds` times, without ever computing them:

$$
X \\leftarrow a X + (b A + c A^2) X, \\qquad A = X X^\\mathsf{T} .
$$

- `x` has shape [..., M, N]: any number of stacked matrices, tall or wide, each with a norm of its
  own. The result has the same shape and is float32. All arithmetic is float32 too, even for
  bfloat16.
- $A$ sums over the *longer* side, so it has the size of the shorter one squared: transpose a tall
  matrix first. The checks look at the shapes in your jaxpr.
- A matrix of zeros gives zeros. Apart from that, the scale of `x` doesn't matter.
- No singular value decomposition, and no optax.
""",
    hints=(
        "For one wide matrix it is three lines in a loop. What must you do with a tall one "
        "before and after? And over which axes do you take the norm of each matrix in a "
        "stack?",
        "`jnp.swapaxes(x, -2, -1)` transposes every matrix of a stack; `.T` reverses *all* "
        "axes. The norm is `jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)`. For zeros, add"
        " 1e-7 to the norm.",
        "`tall = x.shape[-2] > x.shape[-1]` is known while tracing, so a Python `if` is right. In the "
        "loop: `A = x @ jnp.swapaxes(x, -2, -1)` and `x = a * x + (b * A + c * A @ A) @ x`.",
    ),
    forbid=(
        "optax", "minitext.training.optim", "jax.numpy.linalg.svd", "numpy.linalg.svd", "jax.scipy.linalg",
        "jax.lax.linalg",
    ),
)  # fmt: skip


GIVEN = 3.4445, -4.7750, 2.0315


def newton_schulz_by_svd(x, rounds=5, coefficients=GIVEN):
    """What the polynomial does to the singular values, in float64."""
    x = np.asarray(x, np.float64)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    norm = np.sqrt((s**2).sum(axis=-1, keepdims=True))
    s = s / np.where(norm > 0, norm, 1.0)
    for _ in range(rounds):
        s = sum(c * s**power for c, power in zip(coefficients, (1, 3, 5), strict=True))
    return (u * s[..., None, :]) @ vt


def matrices(t, *shape, dtype=jnp.float32):
    return jnp.asarray(t.rng.normal(size=shape), dtype)


def compare_with_svd(fn, t, x, why, rounds=5, atol=1e-3):
    got = fn(x, rounds) if rounds != 5 else fn(x)
    want = newton_schulz_by_svd(x, rounds)
    t.close(got, want, rtol=0, atol=atol, why=why, dtype=np.float32)


@orthogonalize.check("one round, and five")
def _(fn, t):
    x = matrices(t, 6, 10)
    compare_with_svd(fn, t, x, "one round on a wide matrix", rounds=1)
    compare_with_svd(fn, t, x, "five rounds on a wide matrix")


@orthogonalize.check("other coefficients")
def _(fn, t):
    for coefficients in ((2.0, -1.5, 0.5), (1.5, -0.5, 0.0), (3.0, -3.2, 1.2)):
        x = matrices(t, 6, 10)
        want = newton_schulz_by_svd(x, 3, coefficients)
        why = f"three rounds with a, b, c = {coefficients}"
        t.close(fn(x, 3, *coefficients), want, rtol=0, atol=1e-3, why=why, dtype=np.float32)


@orthogonalize.check("a tall matrix, a row and a column")
def _(fn, t):
    for shape in ((11, 4), (1, 9), (7, 1), (5, 5)):
        compare_with_svd(fn, t, matrices(t, *shape), f"shape {list(shape)}")


@orthogonalize.check("a stack, each matrix with its own norm")
def _(fn, t):
    scales = 10.0 ** jnp.arange(-2, 2).reshape(2, 2, 1, 1)
    compare_with_svd(fn, t, matrices(t, 2, 2, 4, 7) * scales, "shape [2, 2, 4, 7]")
    compare_with_svd(fn, t, matrices(t, 2, 2, 7, 4) * scales, "shape [2, 2, 7, 4]")


@orthogonalize.check("large, small and zero")
def _(fn, t):
    for scale in (1e4, 2e-5):
        compare_with_svd(fn, t, scale * matrices(t, 5, 8), f"a matrix times {scale:g}", atol=5e-3)
    x = matrices(t, 3, 5, 8).at[1].set(0.0)
    compare_with_svd(fn, t, x, "a stack with a matrix of zeros")


@orthogonalize.check("bfloat16 in, float32 arithmetic")
def _(fn, t):
    compare_with_svd(fn, t, matrices(t, 12, 20, dtype=jnp.bfloat16), "a bfloat16 matrix", atol=5e-4)


def largest_array(fn, *args):
    """Shape of the largest array that any equation of fn(*args) makes."""
    found = [(0, ())]

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            for out in eqn.outvars:
                found.append((math.prod(out.aval.shape), out.aval.shape))
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(value):
                    walk(getattr(value, "jaxpr", value))

    def is_jaxpr(value):
        return hasattr(getattr(value, "jaxpr", value), "eqns")

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return max(found)


@orthogonalize.check("nothing larger than the matrix itself")
def _(fn, t):
    for shape in ((64, 3), (2, 3, 64)):
        size, found = largest_array(fn, jnp.zeros(shape))
        why = f"for x of shape {list(shape)} you make an array of shape {list(found)}"
        t.true(size <= math.prod(shape), why=why)


@orthogonalize.check("inside a jitted step")
def _(fn, t):
    jitted = t.traces(fn)
    for _ in range(2):
        x = matrices(t, 9, 4)
        t.close(jitted(x), newton_schulz_by_svd(x), rtol=0, atol=1e-3, why="under jit")
    t.equal(jitted.count, 1, why="the number of traces")


def turned(x):
    return jnp.swapaxes(x, -2, -1)


def schulz_variant(
    coefficients=None,
    norm=lambda x: jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7,
    turn=turned,
    turn_tall=True,
    turn_back=True,
    square=lambda gram: gram @ gram,
    dtype=jnp.float32,
    always=None,
    each_round=lambda x: x,
    apply=lambda a, x, rest: a * x + rest @ x,
):
    """A correct newton_schulz but for what is passed."""

    def newton_schulz(x, rounds=5, a=GIVEN[0], b=GIVEN[1], c=GIVEN[2]):
        a, b, c = coefficients or (a, b, c)
        x = x.astype(dtype or x.dtype)
        tall = turn_tall and x.shape[-2] > x.shape[-1]
        x = turn(x) if tall else x
        x = x / norm(x)
        for _ in range(rounds if always is None else always):
            x = each_round(x)
            gram = x @ turned(x)
            x = apply(a, x, b * gram + c * square(gram))
        return (turn(x) if tall and turn_back else x).astype(jnp.float32)

    return newton_schulz


def wrong_schulz(name, hint, **changes):
    fn = schulz_variant(**changes)
    fn.__name__ = name
    orthogonalize.mutant(hint)(fn)


wrong_schulz(
    "not_normalised",
    "You don't divide by the norm. Above about 1.3 the polynomial throws singular values away from "
    "1, and after five rounds they are infinite. Divide by the Frobenius norm first.",
    norm=lambda x: jnp.ones(()),
)
wrong_schulz(
    "rows_normalised",
    "You normalise each row. That changes the singular vectors. Divide each matrix by one number, "
    "the root of the sum of all its squares.",
    norm=lambda x: jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-7,
)
wrong_schulz(
    "cubic",
    "You use the classical polynomial 1.5 s - 0.5 s^3. It needs many more rounds to lift a small "
    "singular value; take the three coefficients that are given.",
    coefficients=(1.5, -0.5, 0.0),
)
wrong_schulz(
    "coefficients_written_in",
    "You write the three coefficients into the loop. They are arguments, `a`, `b` and `c`; only their "
    "defaults are those of the paper.",
    coefficients=GIVEN,
)
wrong_schulz(
    "gram_not_squared",
    "In the last term you use A instead of A times A, so s is raised to 3 again and not to 5.",
    square=lambda gram: gram,
)
wrong_schulz(
    "squared_entry_by_entry",
    "You square the entries of A. The term is a matrix product, A @ A.",
    square=jnp.square,
)
wrong_schulz(
    "always_five_rounds",
    "You always do five rounds. `rounds` is an argument.",
    always=5,
)
wrong_schulz(
    "stays_turned",
    "You turn a tall matrix over and don't turn the result back: its shape is that of the transpose.",
    turn_back=False,
)
wrong_schulz(
    "one_norm_for_the_stack",
    "You divide the whole stack by one norm. The matrices of a stack are different layers' and have "
    "nothing to do with each other: take the norm over the last two axes only, with keepdims=True.",
    norm=lambda x: jnp.sqrt(jnp.sum(x * x)) + 1e-7,
)
wrong_schulz(
    "all_axes_turned",
    "`.T` reverses all axes, also those of the stack. jnp.swapaxes(x, -2, -1) transposes each matrix.",
    turn=lambda x: x.T,
)
wrong_schulz(
    "zero_by_zero",
    "A matrix of zeros gives nan: you divide it by its norm, which is 0. A parameter that got no "
    "gradient has such a matrix. Add 1e-7 to the norm.",
    norm=lambda x: jnp.linalg.norm(x, axis=(-2, -1), keepdims=True),
)
wrong_schulz(
    "in_bfloat16",
    "You compute in the dtype of x. In bfloat16 each round is rounded to 8 bits. Convert to float32 "
    "first, as is asked.",
    dtype=None,
)
wrong_schulz(
    "gram_of_the_longer_side",
    "For a tall matrix your A has the longer side squared. The result is the same and the work many "
    "times as much: turn a tall matrix over first, and turn the result back.",
    turn_tall=False,
)
wrong_schulz(
    "largest_singular_value",
    "You divide by the largest singular value, or by another norm. The Frobenius norm is the root of "
    "the sum of all squares.",
    norm=lambda x: jnp.sqrt(jnp.linalg.eigvalsh(x @ turned(x))[..., -1:, None] + 1e-14),
)
wrong_schulz(
    "norm_without_its_root",
    "You divide by the sum of squares. The norm is its root.",
    norm=lambda x: jnp.sum(x * x, axis=(-2, -1), keepdims=True) + 1e-7,
)
wrong_schulz(
    "normalised_in_each_round",
    "You divide by the norm in each round. It is done once, before the loop: the polynomial keeps the "
    "singular values in range, and dividing again pushes them away from 1.",
    each_round=lambda x: x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7),
)
wrong_schulz(
    "only_the_rest",
    "Your new X lacks a X. Each round gives a X + (b A + c A^2) X.",
    apply=lambda a, x, rest: rest @ x,
)
wrong_schulz(
    "large_constant_in_the_norm",
    "You add so much to the norm that a small matrix is scaled wrongly. Add about 1e-7, or divide by "
    "1 where the norm is 0.",
    norm=lambda x: jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-4,
)


# -------------------------------------------------------------------------------------- skip

skip = Exercise(
    "05.skip",
    title="A step that never was",
    function="skip_spikes",
    minutes=40,
    points=20,
    forbid=(
        "optax.apply_if_finite", "optax.skip_not_finite", "optax.skip_large_updates", "optax.MultiSteps",
        "optax.conditionally_mask", "optax.conditionally_transform",
    ),
    statement="""
Once in ten thousand steps a batch gives a gradient that's a hundred times too long, or not a number. Clipping doesn't
help against the second, and Adam's averages remember the first for a long time. Wrap any optimizer so that it
skips such a step, as if the batch had never been drawn.

`skip_spikes(inner, window, factor, patience)` returns two functions, `init(params)` and `update(grads, state, params)`,
like the optimizer `inner` that it wraps. You decide what the state holds.

- A step is *skipped* if the gradient's global norm, computed in float32, isn't finite. It's also skipped if it's a
  spike: if the norm is greater than `factor` times the median of the norms of the last `window` steps that weren't
  skipped. Until there have been `window` such steps, no norm is a spike.
- In some runs the norms rise and stay high. So if the last `patience` steps were all skipped, for either reason, a
  finite norm is accepted, however large, and remembered like any other.
- A skipped step returns updates of exactly 0. Afterwards the optimizer does what it would have done without that step:
  moments, counters and schedules are as before, and its norm isn't remembered.
- A step that isn't skipped returns exactly the updates of `inner`, in their dtypes. `inner` may use `params`.
- Gradients and params are pytrees of any structure. The state is a pytree of arrays whose shapes and dtypes stay the
  same, and one compiled `update` serves all steps.
""",
    hints=(
        "Suppose step 7 is skipped. List everything that must be the same before step 8 as before step 7, and the "
        "little that must not. In which of these could a NaN survive?",
        "The state needs the inner state, the last `window` accepted norms, how many steps were accepted, and how "
        "many were skipped in a row. Let `inner` compute its step in any case. Then choose, leaf by leaf, between "
        "the new and the old.",
        "`good = jnp.isfinite(norm) & ~spike`, where a spike also needs `accepted >= window` and `skipped < "
        "patience`. `jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)` chooses a whole state. The norm "
        "goes to `norms.at[accepted % window]`.",
    ),
)  # fmt: skip


def falling_rate():
    """Momentum with decay and a rate that falls with each step: everything in it can go wrong."""

    def init(params):
        return {"count": jnp.int32(0), "m": jax.tree.map(jnp.zeros_like, params)}

    def update(grads, state, params):
        m = jax.tree.map(lambda m, g: 0.5 * m + g.astype(m.dtype), state["m"], grads)
        rate = 1.0 / (1.0 + state["count"])
        updates = jax.tree.map(lambda m, p: -rate * (m + 0.25 * p), m, params)
        return updates, {"count": state["count"] + 1, "m": m}

    return optax.GradientTransformation(init, update)


START = {"w": [[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]], "b": {"none": [], "gain": 3.0}}


def gradient_of_norm(t, norm):
    """A gradient like START of this norm, of 7 entries; which are large is drawn."""
    entries = t.rng.normal(size=7)
    entries = (norm * entries / np.linalg.norm(entries)).astype(np.float32)
    none = np.zeros(0, np.float32)
    return {"w": entries[:6].reshape(2, 3), "b": {"none": none, "gain": entries[6]}}


def replay(grads, skipped):
    """The updates of falling_rate in float64, without the skipped steps, which get 0."""
    flat = [np.concatenate([g["w"].ravel(), [g["b"]["gain"]]]).astype(np.float64) for g in grads]
    params = np.array([*np.ravel(START["w"]), START["b"]["gain"]])
    m, count, updates = np.zeros(7), 0, []
    for g, skip_it in zip(flat, skipped, strict=True):
        if skip_it:
            updates.append(np.zeros(7))
            continue
        m = 0.5 * m + g
        updates.append(-(m + 0.25 * params) / (1 + count))
        count += 1
    return np.array(updates)


def steps_of(fn, grads, window, factor, patience, inner=None, params=None):
    """The updates of all steps and the states before and after each, by one compiled update."""
    if params is None:
        params = jax.tree.map(np.float32, START, is_leaf=lambda x: isinstance(x, list))
    init, update = fn(inner or falling_rate(), window, factor, patience)
    state, traces = init(params), []

    def counted(*args):
        traces.append(None)
        return update(*args)

    # Small programs run a few times: optimising them takes longer than running them.
    step = jax.jit(counted, compiler_options={"xla_backend_optimization_level": 0})
    states, updates = [state], []
    for g in grads:
        got, state = step(g, state, params)
        updates.append(got)
        states.append(state)
    return updates, states, len(traces)


def skips(t, fn, norms, skipped, window, factor, patience, spoil=None):
    """Steps of these norms are skipped where `skipped` has a 1, and only there."""
    grads = [gradient_of_norm(t, norm) for norm in norms]
    for i, value in (spoil or {}).items():
        grads[i]["w"][1, int(t.rng.integers(3))] = value
    updates, _, _ = steps_of(fn, grads, window, factor, patience)
    got = [np.concatenate([np.ravel(u["w"]), np.ravel(u["b"]["gain"])]) for u in updates]
    got, want = np.array(got), replay(grads, skipped)
    why = f"norms {norms}, window {window}, factor {factor}, patience {patience}"
    run = norms, skipped, window, factor, patience, spoil or {}
    t.close(got, want, rtol=1e-5, atol=1e-6, why=f"{why}. {first_wrong_step(got, want, *run)}")


def first_wrong_step(got, want, norms, skipped, window, factor, patience, spoil):
    """Which step is the first with wrong updates, and why it is skipped or not."""
    off = [not np.allclose(g, w, rtol=1e-5, atol=1e-6) for g, w in zip(got, want, strict=True)]
    if not any(off):
        return ""
    i = off.index(True)
    known = [norm for norm, skip_it in zip(norms[:i], skipped, strict=False) if not skip_it]
    last, in_a_row = known[-window:], skipped[:i][::-1].index(0) if 0 in skipped[:i] else i
    reason = f"only {len(known)} norms are known and the window has {window}"
    if i in spoil:
        reason = "its gradient isn't finite"
    elif in_a_row >= patience:
        reason = f"the last {in_a_row} steps were skipped and its norm is finite"
    elif len(known) >= window:
        compared = "is" if norms[i] > factor * np.median(last) else "isn't"
        reason = f"its norm {compared} greater than {factor} times the median of {last}"
    if skipped[i]:
        return f"Step {i} (counted from 0) must be skipped: {reason}"
    if not got[i].any():
        return f"Step {i} (counted from 0) mustn't be skipped: {reason}"
    before = [j for j in range(i) if skipped[j]]
    trace = f" The inner optimizer must not have seen steps {before}" if before else ""
    return f"Step {i} (counted from 0) isn't skipped, but its updates are wrong.{trace}"


@skip.check("ordinary steps")
def _(fn, t):
    norms = [float(x) for x in t.rng.uniform(1.0, 1.5, 7).round(2)]
    skips(t, fn, norms, [0] * 7, 3, 2.0, 2)


@skip.check("gradients that aren't finite")
def _(fn, t):
    spoil = {1: np.nan, 3: np.inf, 4: -np.inf}
    norms = [1.0, 1.2, 1.1, 0.9, 1.0, 1.3, 1.1]
    skips(t, fn, norms, [0, 1, 0, 1, 1, 0, 0], 5, 3.0, 5, spoil)


@skip.check("spikes")
def _(fn, t):
    skips(t, fn, [1.0, 1.2, 1.1, 4.5, 1.0, 1.3, 30.0, 1.1], [0, 0, 0, 1, 0, 0, 1, 0], 3, 4.0, 9)


@skip.check("a median, of the last accepted norms only")
def _(fn, t):
    # A mean of 1, 2, 7 would let 5 pass; a skipped 5 would lift the median; 1, 2 and 7 must be forgotten.
    norms = [1.0, 2.0, 7.0, 5.0, 5.0, 1.5, 3.5, 2.5, 4.5, 6.0]
    skips(t, fn, norms, [0, 0, 0, 1, 1, 0, 0, 0, 0, 0], 3, 2.0, 9)


@skip.check("no spike before there are enough norms")
def _(fn, t):
    skips(t, fn, [1.0, 2.0, 1.0, 8.0, 9.0, 12.0, 9.0], [0, 0, 0, 0, 0, 1, 0], 5, 5.0, 9)


@skip.check("a norm at the limit is accepted")
def _(fn, t):
    one = {"w": np.float32([[0, 0, 2], [0, 0, 0]])}
    one["b"] = {"none": np.zeros(0, np.float32), "gain": np.float32(0)}
    grads = [one, jax.tree.map(lambda x: np.float32(4) * x, one)]
    updates, _, _ = steps_of(fn, grads, 1, 4.0, 9)
    got = [np.concatenate([np.ravel(u["w"]), np.ravel(u["b"]["gain"])]) for u in updates]
    t.close(np.array(got), replay(grads, [0, 0]), why="norms 2 and 8, window 1, factor 4")


@skip.check("the norm of all arrays together")
def _(fn, t):
    grads = []
    for of_w, of_gain in ((2, 0), (3, 4), (3, 2)):  # norms 2, 5 and 3.6; the limit is 4
        g = gradient_of_norm(t, 0.0)
        g["w"][int(t.rng.integers(2)), 1] = of_w
        g["b"]["gain"] = np.float32(of_gain)
        grads.append(g)
    updates, _, _ = steps_of(fn, grads, 1, 2.0, 9)
    got = [np.concatenate([np.ravel(u["w"]), np.ravel(u["b"]["gain"])]) for u in updates]
    t.close(np.array(got), replay(grads, [0, 1, 0]), why="norms 2, 5 and 3.6, window 1, factor 2")


@skip.check("patience")
def _(fn, t):
    norms = [1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 1.0, 9.0, 9.0, 9.0, 9.0]
    skipped = [0, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0]
    skips(t, fn, norms, skipped, 3, 4.0, 2)


@skip.check("patience ends with a finite norm, and any skipped step uses it up")
def _(fn, t):
    norms = [1.0, 1.0, 1.0, 9.0, 1.0, 9.0, 9.0, 1.0, 1.0]
    skipped = [0, 0, 0, 1, 1, 0, 1, 0, 0]
    skips(t, fn, norms, skipped, 3, 4.0, 2, {4: np.nan})
    skips(t, fn, norms, [0, 0, 0, 1, 1, 1, 0, 0, 0], 3, 4.0, 2, {4: np.nan, 5: np.inf})


@skip.check("AdamW inside, and gradients in bfloat16")
def _(fn, t):
    params = {"w": t.rng.normal(size=(64, 5)).astype(np.float32)}
    inner = optax.adamw(optax.linear_schedule(0.1, 0.0, 6), weight_decay=0.1)
    grads = [{"w": t.rng.normal(size=(64, 5)).astype(jnp.bfloat16)} for _ in range(6)]
    grads[3] = {"w": grads[3]["w"] * np.float32(30).astype(jnp.bfloat16)}
    grads[4] = {"w": np.full((64, 5), 1e25).astype(jnp.bfloat16)}  # the squares overflow
    updates, states, traces = steps_of(fn, grads, 3, 4.0, 9, inner, params)
    state, step, want = inner.init(params), jax.jit(inner.update), []
    for i, g in enumerate(grads):
        ours, new = step(g, state, params)
        state = state if i in (3, 4) else new
        want.append(np.zeros((64, 5)) if i in (3, 4) else np.asarray(ours["w"]))
    t.close(np.array([u["w"] for u in updates]), np.array(want), rtol=1e-4, atol=1e-5, why="AdamW")
    shapes = [str(shapes_of(jax.tree.map(jnp.asarray, state))) for state in states]
    t.equal(shapes, shapes[:1] * len(shapes), why="shapes and dtypes of the state")
    t.equal(traces, 1, why="traces of update")


def guarded(
    inner, window, factor, patience, *, choose=jnp.where, zero=jnp.zeros_like, center=jnp.median, early=False,
    remembers_all=False, slot=lambda accepted, window: accepted % window, norm_of=None, finite=jnp.isfinite,
    above=jnp.greater, in_a_row=True, patient=True, keep_inner=None, shown=lambda grads, good: grads,
    use=lambda params: params, hurry=False, only_spikes_count=False,
):  # fmt: skip
    """The right answer, with what one gets wrong as arguments."""

    def init(params):
        zero = jnp.int32(0)
        return inner.init(params), jnp.zeros(window), zero, zero

    def update(grads, state, params):
        inner_state, norms, accepted, skipped = state
        wide = [g.astype(jnp.float32) for g in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in wide))
        if norm_of:
            norm = norm_of(grads)
        spike = above(norm, factor * center(norms))
        if not early:
            spike &= accepted >= window
        if patient:
            spike &= skipped < patience
        good = finite(norm) & ~spike
        if hurry:
            good = good | (skipped >= patience)
        updates, new_inner = inner.update(shown(grads, good), inner_state, use(params))
        updates = jax.tree.map(lambda u: choose(good, u, zero(u)), updates)
        keep = keep_inner or (lambda n, o: jnp.where(good, n, o))
        new_inner = jax.tree.map(keep, new_inner, inner_state)
        remember = jnp.isfinite(norm) if remembers_all else good
        norms = jnp.where(remember, norms.at[slot(accepted, window)].set(norm), norms)
        counts = ~good & (jnp.isfinite(norm) if only_spikes_count else True)
        more = skipped + counts.astype(jnp.int32)
        skipped = jnp.where(good, 0, more) if in_a_row else more
        return updates, (new_inner, norms, accepted + remember.astype(jnp.int32), skipped)

    return init, update


@skip.mutant(
    "You multiply the updates by 0 to skip a step. 0 times NaN is NaN: choose between the update and 0, with "
    "`jnp.where`."
)
def multiplies(*args):
    return guarded(*args, choose=lambda good, u, zero: u * good)


@skip.mutant(
    "A skipped step changes the inner optimizer's state: its moments have seen the bad gradient. Keep the old state."
)
def state_moves_on(*args):
    return guarded(*args, keep_inner=lambda n, o: n)


@skip.mutant(
    "A skipped step restores the moments, but the counters of the inner optimizer move on, and with them its "
    "schedule and its corrections. Choose for every leaf of the state."
)
def counters_move_on(*args):
    inner, *rest = args
    init, update = guarded(inner, *rest)

    def counted(grads, state, params):
        updates, new = update(grads, state, params)
        stepped = inner.update(jax.tree.map(jnp.zeros_like, grads), state[0], params)[1]
        kept = jax.tree.map(lambda n, s: s if n.dtype == jnp.int32 else n, new[0], stepped)
        return updates, (kept, *new[1:])

    return init, counted


@skip.mutant(
    "You give the inner optimizer a gradient of 0 for a step that's skipped. Its moments still shrink and its count "
    "goes on, and momentum and decay still move the parameters. Keep its old state, and return 0."
)
def zero_gradient(*args):
    def shown(grads, good):
        return jax.tree.map(lambda g: jnp.where(good, g, jnp.zeros_like(g)), grads)

    return guarded(*args, shown=shown, keep_inner=lambda n, o: n, choose=lambda good, u, zero: u)


@skip.mutant(
    "You remember the norms of skipped steps. A few spikes then make the next one look ordinary."
)
def remembers_spikes(*args):
    return guarded(*args, remembers_all=True)


@skip.mutant("You compare with the mean. One large norm lifts it far more than the median.")
def mean_of_norms(*args):
    return guarded(*args, center=jnp.mean)


@skip.mutant(
    "You compare with the largest of the remembered norms. The statement asks for their median."
)
def largest_norm(*args):
    return guarded(*args, center=jnp.max)


@skip.mutant(
    "You look for spikes before `window` norms are known. The slots that are still empty pull the median down."
)
def spikes_from_the_start(*args):
    return guarded(*args, early=True)


@skip.mutant(
    "Your memory holds the first `window` norms forever. The newest accepted norm replaces the oldest."
)
def first_norms(*args):
    def slot(accepted, window):
        return jnp.where(accepted < window, accepted, window)  # beyond the end: not written

    return guarded(*args, slot=slot)


@skip.mutant(
    "Your memory fills only one slot again and again once it is full. The newest accepted norm replaces the oldest."
)
def last_slot(*args):
    return guarded(*args, slot=lambda accepted, window: jnp.minimum(accepted, window - 1))


@skip.mutant("You skip what isn't finite, and no spikes.")
def no_spikes(*args):
    return guarded(*args, above=lambda norm, limit: jnp.zeros((), bool))


@skip.mutant(
    "You only ask whether the norm is too large. Any comparison with NaN is False, so a NaN passes. Ask "
    "`jnp.isfinite` too."
)
def nan_passes(*args):
    return guarded(*args, finite=lambda norm: ~jnp.isinf(norm))


@skip.mutant("You skip a norm that's equal to the limit. A spike is greater.")
def skips_at_the_limit(*args):
    return guarded(*args, above=jnp.greater_equal)


@skip.mutant(
    "You never lose patience. If gradients have become larger for good, your optimizer skips for the rest of the run."
)
def no_patience(*args):
    return guarded(*args, patient=False)


@skip.mutant(
    "You count all skipped steps of the run. Patience is about steps in a row: an accepted step sets the "
    "count back to 0."
)
def counts_all(*args):
    return guarded(*args, in_a_row=False)


@skip.mutant(
    "When patience is over you accept anything, even a gradient that isn't finite. Only a finite one may pass."
)
def accepts_anything(*args):
    return guarded(*args, hurry=True)


@skip.mutant(
    "You count only spikes as skipped. A step that isn't finite is skipped too, and uses up patience."
)
def counts_spikes_only(*args):
    return guarded(*args, only_spikes_count=True)


@skip.mutant(
    "You lose patience a step too late: after `patience` skipped steps, the next one is accepted."
)
def one_step_late(inner, window, factor, patience):
    return guarded(inner, window, factor, patience + 1)


@skip.mutant(
    "You compute each array's norm and take the largest. The global norm is the root of the sum of all squares."
)
def one_array(*args):
    def norm_of(grads):
        norms = [jnp.sqrt(jnp.sum(g.astype(jnp.float32) ** 2)) for g in jax.tree.leaves(grads)]
        return jnp.max(jnp.stack(norms))

    return guarded(*args, norm_of=norm_of)


@skip.mutant(
    "You don't pass the parameters to the inner optimizer. One with weight decay needs them."
)
def no_params(*args):
    return guarded(*args, use=lambda params: None)


@skip.mutant(
    "You decide with a Python `if`. Under `jax.jit` the norm isn't known yet: choose with `jnp.where` or "
    "`jax.lax.cond`."
)
def python_if(*args):
    return guarded(*args, choose=lambda good, u, zero: u if good else zero)
