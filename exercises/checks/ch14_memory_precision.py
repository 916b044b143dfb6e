import functools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from minitext.book.grading import Exercise
from minitext.compiler import hlo

POLICIES = jax.checkpoint_policies


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def normal(t, *shape, scale=1.0):
    return (scale * t.rng.normal(size=shape)).astype(np.float32)


def residual_bytes(fn, *args):
    """Bytes that the forward pass keeps for the backward pass."""
    kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(fn, *a)[1], *args))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in kept)


def tree_bytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


# ----------------------------------------------------------------------------- remat_policy

remat_policy = Exercise(
    "14.remat_policy",
    title="Keep one tensor of each layer",
    function="keep_one",
    minutes=20,
    points=10,
    statement="""
Here is a stack of layers, written by someone with memory to spare:

```python
def layer(x_XD, w):
    a_XF = x_XD @ w["up"]
    y_XD = jax.nn.silu(a_XF) @ w["down"]
    return x_XD + jnp.tanh(y_XD), None


def keep_everything(x_XD, weights):
    return jax.lax.scan(layer, x_XD, weights)[0]
```

Write `keep_one(x_XD, weights)` with the same result, as a scan over the layers.

- For its backward pass each layer keeps its input and **one** other tensor: the product `a_XF`, before
  the silu. For L layers that is $4LX(D + F)$ bytes, apart from the weights.
- Kept tensors are not computed again: the gradient's jaxpr has 7 products in its scans' bodies.
""",
    hints=(
        "`jax.checkpoint` around one layer keeps the layer's input. A policy says what else it keeps, and "
        "tensors can be named.",
        "`checkpoint_name(x, name)` returns x, marked. `jax.checkpoint_policies.save_only_these_names(name)` "
        "keeps the tensors with this mark. Mark the product itself, not the output of silu.",
        'In the layer: `a_XF = checkpoint_name(x_XD @ w["up"], "a")`. Around it: `jax.checkpoint(layer, '
        'policy=jax.checkpoint_policies.save_only_these_names("a"))`. Then scan that.',
    ),
)


def draw_stack(t):
    L, X, D, F = (int(t.rng.integers(*ends)) for ends in ((3, 7), (20, 40), (5, 12), (13, 20)))
    weights = {"up": normal(t, L, D, F, scale=D**-0.5), "down": normal(t, L, F, D, scale=F**-0.5)}
    return normal(t, X, D), weights


def right_stack(x, weights):
    for up, down in zip(weights["up"], weights["down"], strict=True):
        x = x + jnp.tanh(jax.nn.silu(x @ up) @ down)
    return x


def grad_of(fn):
    """The gradient of a sum whose terms are not all of one weight."""

    def loss(x, weights):
        found = fn(x, weights)
        found = found if isinstance(found, tuple) else (found,)
        return sum(jnp.sum(jnp.sin(y)) for y in found)

    return jax.grad(loss, argnums=(0, 1))


@remat_policy.check("values")
def _(fn, t):
    args = draw_stack(t)
    t.close(fn(*args), jax.jit(right_stack)(*args), rtol=1e-3, atol=1e-4, why="the stack's result")


@remat_policy.check("gradients")
def _(fn, t):
    args = draw_stack(t)
    want = jax.jit(grad_of(right_stack))(*args)
    t.close(
        jax.jit(grad_of(fn))(*args), want, rtol=1e-3, atol=1e-3, why="gradients of x and weights"
    )


@remat_policy.check("the layers are scanned")
def _(fn, t):
    args = draw_stack(t)
    count = t.primitives(fn, *args).count("dot_general")
    why = f"products in the jaxpr, want those of one layer; the stack has {len(args[1]['up'])}"
    t.equal(count, 2, why=why)


@remat_policy.check("what is kept")
def _(fn, t):
    x, weights = draw_stack(t)
    (L, D, F), X = weights["up"].shape, len(x)
    kept = residual_bytes(fn, x, weights) - tree_bytes(weights)
    want = 4 * L * X * (D + F)
    why = f"{kept} bytes are kept in addition to the weights, want {want} for L={L}, X={X}, D={D}, F={F}"
    fits = [
        f"{a} of [X, D] and {b} of [X, F]"
        for b in range(9)
        for a in range(9)
        if kept == 4 * L * X * (a * D + b * F)
    ]
    why += f"; that is {fits[0]} for each layer" if fits else ""
    t.true(kept == want, why=why, observed=kept / want)


@remat_policy.check("what is computed again")
def _(fn, t):
    args = draw_stack(t)
    count = t.primitives(grad_of(fn), *args).count("dot_general")
    again = (
        f", so {count - 6} of a layer's forward products are computed again" if count > 6 else ""
    )
    why = f"products in the gradient's jaxpr; without `jax.checkpoint` there are 6{again}"
    t.equal(count, 7, why=why)


def a_stack(x, weights, *, policy=None, inner=True, outer=False, mark="a"):
    def layer(x, w):
        a = x @ w["up"]
        a = checkpoint_name(a, "a") if mark == "a" else a
        h = jax.nn.silu(a)
        h = checkpoint_name(h, "a") if mark == "h" else h
        y = h @ w["down"]
        y = checkpoint_name(y, "a") if mark == "y" else y
        return x + jnp.tanh(y), None

    layer = jax.checkpoint(layer, policy=policy) if inner else layer
    whole = lambda x, weights: jax.lax.scan(layer, x, weights)[0]  # noqa: E731
    return (jax.checkpoint(whole) if outer else whole)(x, weights)


NAMED = POLICIES.save_only_these_names("a")


@remat_policy.mutant(
    "Nothing is rematerialised: put `jax.checkpoint` around the layer that you scan."
)
def keeps_everything(x, weights):
    return a_stack(x, weights, inner=False)


@remat_policy.mutant(
    "You keep only each layer's input. Without a policy, `jax.checkpoint` computes all else again, and a "
    "policy of names keeps nothing if no tensor has the name."
)
def keeps_nothing(x, weights):
    return a_stack(x, weights)


@remat_policy.mutant(
    "You keep both products. JAX's policies for products keep each of them; only names can choose one."
)
def keeps_both(x, weights):
    return a_stack(x, weights, policy=POLICIES.dots_saveable)


@remat_policy.mutant(
    "You marked the output of silu. Its size is right, but silu's gradient needs its *input*, so the product "
    "is computed again all the same."
)
def keeps_the_wrong_one(x, weights):
    return a_stack(x, weights, policy=NAMED, mark="h")


@remat_policy.mutant(
    "`jax.checkpoint` is around the whole scan. Then all layers are computed again at once, and meanwhile "
    "they keep everything. Put it around one layer."
)
def around_everything(x, weights):
    return a_stack(x, weights, inner=False, outer=True)


@remat_policy.mutant(
    "You named the result of `down`. That is the other product; keep the one with `up`."
)
def names_the_other(x, weights):
    return a_stack(x, weights, policy=NAMED, mark="y")


@remat_policy.mutant("Your program repeats the layers one by one. Use `jax.lax.scan`.")
def python_loop(x, weights):
    @partial(jax.checkpoint, policy=NAMED)
    def layer(x, up, down):
        return x + jnp.tanh(jax.nn.silu(checkpoint_name(x @ up, "a")) @ down)

    for up, down in zip(weights["up"], weights["down"], strict=True):
        x = layer(x, up, down)
    return x


# ----------------------------------------------------------------------------- scanned_stack

scanned_stack = Exercise(
    "14.scanned_stack",
    title="An unrolled stack, scanned",
    function="scanned",
    minutes=25,
    points=10,
    statement="""
The author of this stack put `jax.checkpoint` around each layer and wonders why nothing got smaller:

```python
@jax.checkpoint
def layer(x_XD, number, norm_D, up_DF, down_FD):
    mean_X1 = jnp.mean(x_XD**2, axis=1, keepdims=True)
    y_XD = x_XD * jax.lax.rsqrt(mean_X1 + 1e-6) * norm_D
    a_XF = y_XD @ up_DF
    h_XF = jnp.sin(a_XF) * jax.nn.silu(a_XF)
    return x_XD + (h_XF @ down_FD) / (number + 1)


def unrolled(x_XD, weights):
    sizes = []
    stacks = zip(weights["norm"], weights["up"], weights["down"])
    for number, w in enumerate(stacks):
        x_XD = layer(x_XD, number, *w)
        sizes.append(jnp.mean(x_XD**2))
    return x_XD, jnp.stack(sizes)
```

Write `scanned(x_XD, weights)` with the same two results and the same gradients.

- The gradient's program has as many HLO instructions for 12 layers as for 5.
- For the backward pass each layer keeps its input, [X, D], and at most a few more numbers.
- `L` may be 1.
""",
    hints=(
        "A scan's body gets one layer's slice of each stack. What else differs from layer to layer here, and "
        "what does each layer return?",
        "The number of the layer is one more thing to scan over: `jnp.arange(L)`. The sizes are the body's "
        "second result, which the scan stacks. `jax.checkpoint` goes around the body.",
        "`jax.lax.scan(jax.checkpoint(body), x_XD, (jnp.arange(L), weights))` returns both results, if "
        "`body(x_XD, (number, w))` returns `(x_XD, jnp.mean(x_XD**2))`.",
    ),
)


def draw_normed(t, L=None, X=24, D=8, F=16):
    L = L or int(t.rng.integers(3, 8))
    weights = {
        "norm": normal(t, L, D) + 1,
        "up": normal(t, L, D, F, scale=D**-0.5),
        "down": normal(t, L, F, D, scale=F**-0.5),
    }
    return normal(t, X, D), weights


def normed_layer(x, number, w):
    y = x * jax.lax.rsqrt(jnp.mean(x**2, axis=1, keepdims=True) + 1e-6) * w["norm"]
    a = y @ w["up"]
    return x + ((jnp.sin(a) * jax.nn.silu(a)) @ w["down"]) / (number + 1)


def right_normed(x, weights):
    found = []
    for number in range(len(weights["norm"])):
        x = normed_layer(x, number, jax.tree.map(lambda w, n=number: w[n], weights))
        found.append(jnp.mean(x**2))
    return x, jnp.stack(found)


@scanned_stack.check("values")
def _(fn, t):
    for L in (None, 1):
        args = draw_normed(t, L)
        got, want = fn(*args), jax.jit(right_normed)(*args)
        t.equal(len(got), 2, why="how many values are returned")
        mistakes = {"Those are sums": want[1] * args[0].size, "Those are roots": jnp.sqrt(want[1])}
        t.close(got[1], want[1], rtol=1e-3, atol=1e-4, why="the mean squares", mistakes=mistakes)
        t.close(got[0], want[0], rtol=1e-3, atol=1e-4, why="the last layer's result")


@scanned_stack.check("gradients")
def _(fn, t):
    args = draw_normed(t)
    got, want = (jax.jit(grad_of(run))(*args) for run in (fn, right_normed))
    t.close(got, want, rtol=2e-3, atol=2e-3, why="gradients")


@scanned_stack.check("a program that does not grow")
def _(fn, t):
    counts = []
    for L in (5, 12):
        args = jax.tree.map(lambda a: spec(*a.shape), draw_normed(t, L))
        text = t.hlo(grad_of(fn), *args)
        counts.append(sum(map(len, hlo.computations(text)[0].values())))
    why = f"{counts[0]} HLO instructions for 5 layers, {counts[1]} for 12"
    t.true(counts[0] == counts[1], why=why, observed=counts[1] / counts[0])


@scanned_stack.check("what is kept")
def _(fn, t):
    L, X, D, F = 8, 64, 8, 32
    args = jax.tree.map(lambda a: spec(*a.shape), draw_normed(t, L, X, D, F))
    kept = residual_bytes(fn, *args) - tree_bytes(args[1])
    want = 4 * L * X * D
    why = f"{kept} bytes are kept in addition to the weights; the inputs of {L} layers are {want}"
    t.true(want <= kept <= 1.1 * want, why=why, observed=kept / want)


@scanned_stack.check("temporaries")
def _(fn, t):
    L, X, D, F = 16, 512, 16, 32
    args = jax.tree.map(lambda a: spec(*a.shape), draw_normed(t, L, X, D, F))
    used = t.temp_bytes(grad_of(fn), *args)
    bound = 4 * (3 * L * X * D + 12 * X * F)
    why = f"{used} bytes of temporaries; three stacks of inputs and twelve [X, F] are {bound}"
    t.true(used <= bound, why=why, observed=used / bound)


def a_scan(x, weights, *, first=0, inner=True, outer=False, late=True, constant=False):
    def body(x, inputs):
        number, w = inputs
        y = normed_layer(x, 0 if constant else number, w)
        return y, jnp.mean((y if late else x) ** 2)

    body = jax.checkpoint(body) if inner else body
    numbers = jnp.arange(first, first + len(weights["norm"]))
    whole = lambda x, weights: jax.lax.scan(body, x, (numbers, weights))  # noqa: E731
    return (jax.checkpoint(whole) if outer else whole)(x, weights)


@scanned_stack.mutant(
    "The loop runs while tracing, so the program repeats each layer. Use `jax.lax.scan`."
)
def still_unrolled(x, weights):
    layer, found = jax.checkpoint(normed_layer), []
    for number in range(len(weights["norm"])):
        x = layer(x, number, jax.tree.map(lambda w, n=number: w[n], weights))
        found.append(jnp.mean(x**2))
    return x, jnp.stack(found)


@scanned_stack.mutant(
    "A scan alone keeps everything that each layer's gradient needs. Put `jax.checkpoint` around the body."
)
def no_remat(x, weights):
    return a_scan(x, weights, inner=False)


@scanned_stack.mutant(
    "`jax.checkpoint` is around the whole scan, so its backward pass runs a forward pass that keeps "
    "everything. Put it around the body."
)
def remat_outside(x, weights):
    return a_scan(x, weights, inner=False, outer=True)


@scanned_stack.mutant("Your layers count from 1. `enumerate` counts from 0.")
def counts_from_one(x, weights):
    return a_scan(x, weights, first=1)


@scanned_stack.mutant(
    "Each of your layers is divided by the same number. Scan over the layers' numbers as well."
)
def same_number(x, weights):
    return a_scan(x, weights, constant=True)


@scanned_stack.mutant(
    "You stack every layer's result and take the mean squares afterwards, which keeps [L, X, D] more. Take them in "
    "the body."
)
def means_afterwards(x, weights):
    def body(x, inputs):
        x = normed_layer(x, *inputs)
        return x, x

    x, all_x = jax.lax.scan(jax.checkpoint(body), x, (jnp.arange(len(weights["norm"])), weights))
    return x, jnp.mean(all_x**2, axis=(1, 2))


@scanned_stack.mutant(
    "You unroll all iterations of the scan, so the program repeats each layer again. Leave `unroll` out."
)
def unrolled_scan(x, weights):
    def body(x, inputs):
        x = normed_layer(x, *inputs)
        return x, jnp.mean(x**2)

    numbers = jnp.arange(len(weights["norm"]))
    return jax.lax.scan(jax.checkpoint(body), x, (numbers, weights), unroll=True)


@scanned_stack.mutant("You take the mean square of a layer's input, not of its result.")
def sizes_too_early(x, weights):
    return a_scan(x, weights, late=False)


# ----------------------------------------------------------------------------- chunked_loss

chunked_loss = Exercise(
    "14.chunked_loss",
    title="A loss without its logits",
    function="chunked_nll",
    minutes=30,
    points=15,
    statement="""
Write `chunked_nll(x_XD, w_DV, targets_X, chunks)`: the sum of the targets' negative log-likelihoods, for the
logits `x_XD @ w_DV`.

- Only the logits of X/chunks tokens exist at a time, **in the gradient's program too**: no array in the compiled
  program of value and gradient has X times V numbers.
- A token with target -1 doesn't count, neither in the loss nor in the gradient.
- Logits may be $\\pm 10^4$. The product's result, everything computed from it and the sum are float32, whatever
  the type of x_XD and w_DV.
- The program has the same size for any number of chunks.
""",
    hints=(
        "For its backward pass, a scan over chunks keeps what each chunk's gradient needs: all chunks' logits, "
        "stacked. How can you prevent that?",
        "Scan `jax.checkpoint(add)` over `x_XD.reshape(chunks, -1, D)` and the targets, with the sum as carry. "
        "In it: `preferred_element_type=jnp.float32` for the product, and `jax.nn.logsumexp`.",
        "The target's logit: `jnp.sum(jnp.where(jnp.arange(V) == targets_t[:, None], logits_tV, 0.0), axis=1)`. "
        "Then `jnp.sum(jnp.where(targets_t >= 0, logsumexp - target, 0.0))`.",
    ),
)


def draw_tokens(t, X=24, D=6, V=50, scale=1.0, dtype=np.float32):
    x = jnp.asarray(normal(t, X, D, scale=scale), dtype)
    w = jnp.asarray(normal(t, D, V), dtype)
    targets = t.rng.integers(0, V, size=X).astype(np.int32)
    targets[1] = 0
    return x, w, targets


def right_nll(x, w, targets):
    """(loss, gradient of x, gradient of w, sum of normalizers, each token's loss) in float64."""
    x, w = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, w))
    logits = x @ w
    top = logits.max(1, keepdims=True)
    p = np.exp(logits - top)
    total = p.sum(1, keepdims=True)
    counts = targets >= 0
    rows = np.arange(len(x))[counts]
    nll = (np.log(total) + top)[:, 0] - logits[np.arange(len(x)), targets]
    g = p / total
    g[rows, targets[counts]] -= 1
    g[~counts] = 0
    normalizers = (np.log(total) + top)[:, 0]
    return nll[counts].sum(), g @ w.T, x.T @ g, normalizers[counts].sum(), nll


@chunked_loss.check("values and gradients")
def _(fn, t):
    x, w, targets = draw_tokens(t)
    want = right_nll(x, w, targets)
    for chunks in (1, 6):
        both = jax.value_and_grad(lambda x, w, c=chunks: fn(x, w, targets, c), argnums=(0, 1))
        got, grads = jax.jit(both)(x, w)
        mistakes = {
            "That is the mean over tokens: return the sum": want[0] / len(x),
            "That is the mean over chunks: return the sum": want[0] / chunks,
            "The sign is wrong": -want[0],
            "That is the sum of the normalizers: the targets' logits are to be subtracted": want[3],
            "Only the first chunk counts": want[4][: len(x) // chunks].sum(),
            "Only the last chunk counts": want[4][-len(x) // chunks :].sum(),
        }
        why = f"{chunks} chunks"
        t.close(got, want[0], rtol=1e-4, atol=1e-3, dtype="float32", why=why, mistakes=mistakes)
        t.close(grads[0], want[1], rtol=1e-3, atol=1e-3, why=f"the gradient of x, {chunks} chunks")
        t.close(grads[1], want[2], rtol=1e-3, atol=1e-3, why=f"the gradient of w, {chunks} chunks")


@chunked_loss.check("tokens without a target")
def _(fn, t):
    x, w, targets = draw_tokens(t)
    targets[t.rng.random(len(targets)) < 0.5] = -1
    targets[:4] = -1
    targets[-2:] = 0, 7
    want = right_nll(x, w, targets)
    got, grad = jax.jit(jax.value_and_grad(lambda x, w: fn(x, w, targets, 6)))(x, w)
    mistakes = {
        "Targets of -1 count as the last token": want[4].sum(),
        "Targets of -1 count with their normalizer": want[0]
        + right_nll(x, w, 0 * targets)[3]
        - want[3],
        "Targets of -1 count as token 0": right_nll(x, w, np.maximum(targets, 0))[0],
        "Targets of 0 don't count": want[4][targets > 0].sum(),
    }
    t.close(got, want[0], rtol=1e-4, atol=1e-3, why="the loss, many targets -1", mistakes=mistakes)
    t.close(grad, want[1], rtol=1e-3, atol=1e-3, why="the gradient of x, many targets -1")


@chunked_loss.check("large logits")
def _(fn, t):
    x, w, targets = draw_tokens(t, scale=5e3)
    got, grad = jax.jit(jax.value_and_grad(lambda x, w: fn(x, w, targets, 4)))(x, w)
    t.finite((got, grad), why="logits of about 10000")
    t.close(got, right_nll(x, w, targets)[0], rtol=1e-3, why="the loss of logits of about 10000")


@chunked_loss.check("a program that does not grow")
def _(fn, t):
    counts = []
    for chunks in (4, 16):
        both = jax.value_and_grad(lambda x, w, y, c=chunks: fn(x, w, y, c))
        text = t.hlo(both, spec(64, 8), spec(8, 128), spec(64, dtype="int32"))
        counts.append(sum(map(len, hlo.computations(text)[0].values())))
    why = f"{counts[0]} HLO instructions for 4 chunks, {counts[1]} for 16"
    t.true(counts[1] < 1.2 * counts[0], why=why, observed=counts[1] / counts[0])


@chunked_loss.check("bfloat16")
def _(fn, t):
    x, w, targets = draw_tokens(t, X=1024, D=16, V=40, scale=0.5, dtype=jnp.bfloat16)
    got = jax.jit(lambda x, w: fn(x, w, targets, 256))(x, w)
    want = right_nll(x, w, targets)[0]
    t.close(got, want, rtol=3e-4, dtype="float32", why="1,024 tokens in bfloat16, 256 chunks")


def largest_array(text):
    """Numbers of the largest array that an instruction of the program makes."""
    shapes = re.findall(r"\b(?:f32|bf16|pred|s32|f64)\[([\d,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@chunked_loss.check("no array of X times V in the forward pass")
def _(fn, t):
    X, D, V, chunks = 256, 8, 512, 32
    alone = lambda x, w, y: fn(x, w, y, chunks)  # noqa: E731
    found = largest_array(t.hlo(alone, spec(X, D), spec(D, V), spec(X, dtype="int32")))
    why = f"an array of {found:,} numbers, X x V = {X * V:,}, in the loss alone"
    t.true(found < X * V // 8, why=why, observed=found / (X * V))


@chunked_loss.check("no array of X times V")
def _(fn, t):
    X, D, V, chunks = 256, 8, 512, 32
    both = jax.value_and_grad(lambda x, w, y: fn(x, w, y, chunks), argnums=(0, 1))
    text = t.hlo(both, spec(X, D), spec(D, V), spec(X, dtype="int32"))
    found = largest_array(text)
    why = f"an array of {found:,} numbers, X x V = {X * V:,}; in {chunks} chunks {X * V // chunks:,} do"
    t.true(found < X * V // 8, why=why, observed=found / (X * V))


@chunked_loss.check("logits in float32")
def _(fn, t):
    X, D, V, chunks = 48, 4, 40, 6
    args = spec(X, D, dtype="bfloat16"), spec(D, V, dtype="bfloat16"), spec(X, dtype="int32")
    narrow = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            for out in equation.outvars:
                behind = out.aval.shape[:1] in ((X // chunks,), (X,), ()) and out.aval.shape[
                    1:
                ] != (D,)
                if behind and out.aval.dtype == jnp.bfloat16:
                    narrow.append(f"{equation.primitive.name} of {list(out.aval.shape)}")
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(inner):
                    walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(lambda x, w, y: fn(x, w, y, chunks))(*args).jaxpr)
    why = f"the product or what is behind it is bfloat16 here: {', '.join(narrow[:4])}"
    t.true(not narrow, why=why, observed=float("dot_general" in "".join(narrow)))


def any_nll(
    x, w, y, chunks, *, again=True, wide=jnp.float32, stable=True, mask=True, mean=False, total=None,
    first=0, behind=None, turned=False,
):  # fmt: skip
    total_type = total or jnp.float32

    def add(total, chunk):
        x, y = chunk
        logits = jnp.einsum("td,dv->tv", x, w, preferred_element_type=wide)
        logits = logits.astype(behind or jnp.float32)
        top = jnp.max(logits, axis=1, keepdims=True) if stable else jnp.zeros((len(x), 1))
        top = jax.lax.stop_gradient(top)
        normalizer = jnp.log(jnp.sum(jnp.exp(logits - top), axis=1)) + top[:, 0]
        target = jnp.take_along_axis(logits, y[:, None] % w.shape[1], axis=1)[:, 0]
        nll = normalizer - target
        nll = jnp.where(y >= first, nll.astype(jnp.float32), 0.0) if mask else nll
        found = jnp.mean(nll) if mean else jnp.sum(nll)
        return (total + found).astype(total_type), None

    add = jax.checkpoint(add) if again else add
    chunks = len(x) // chunks if turned else chunks
    parts = x.reshape(chunks, -1, x.shape[1]), y.reshape(chunks, -1)
    found = jax.lax.scan(add, jnp.zeros((), total_type), parts)[0].astype(jnp.float32)
    return found / chunks if mean else found


@chunked_loss.mutant(
    "The forward pass is in chunks, but the scan stacks all logits for the backward pass. Put "
    "`jax.checkpoint` around its body."
)
def keeps_logits(x, w, y, chunks):
    return any_nll(x, w, y, chunks, again=False)


@chunked_loss.mutant(
    "exp of a large logit overflows. `jax.nn.logsumexp` subtracts the largest first."
)
def overflows(x, w, y, chunks):
    return any_nll(x, w, y, chunks, stable=False)


@chunked_loss.mutant(
    "A target of -1 counts in your loss, as the vocabulary's last token or as none. Mask the "
    "negative log-likelihood."
)
def counts_all(x, w, y, chunks):
    return any_nll(x, w, y, chunks, mask=False)


@chunked_loss.mutant("You return a mean. Return the sum: a mean of means is not the mean.")
def mean_of_means(x, w, y, chunks):
    return any_nll(x, w, y, chunks, mean=True)


@chunked_loss.mutant(
    "You add up in bfloat16, where the sum is soon so large that a chunk's share vanishes. Begin with a "
    "float32 zero."
)
def narrow_sum(x, w, y, chunks):
    return any_nll(x, w, y, chunks, total=x.dtype)


@chunked_loss.mutant(
    "You compute the product in bfloat16 and widen it afterwards, when it has already been rounded. Ask the product "
    "for float32, by `preferred_element_type`."
)
def rounded_product(x, w, y, chunks):
    return any_nll(x, w, y, chunks, wide=x.dtype)


@chunked_loss.mutant(
    "The product is float32, and then you round it: the normalizer and the target's logit must be float32 too."
)
def narrow_behind(x, w, y, chunks):
    return any_nll(x, w, y, chunks, behind=x.dtype)


@chunked_loss.mutant(
    "You leave out the tokens whose target is 0. That's a token like any other: only negative targets don't "
    "count."
)
def skips_token_0(x, w, y, chunks):
    return any_nll(x, w, y, chunks, first=1)


@chunked_loss.mutant(
    "Your chunks have `chunks` tokens each. Make `chunks` of them, of X/chunks tokens each."
)
def turned_chunks(x, w, y, chunks):
    return any_nll(x, w, y, chunks, turned=True)


@chunked_loss.mutant(
    "You compute all logits at once, before you cut them into chunks. Cut the tokens, and multiply in the loop."
)
def cut_too_late(x, w, y, chunks):
    logits = jnp.einsum("xd,dv->xv", x, w, preferred_element_type=jnp.float32)

    def add(total, chunk):
        logits, y = chunk
        target = jnp.take_along_axis(logits, y[:, None] % w.shape[1], axis=1)[:, 0]
        nll = jax.nn.logsumexp(logits, axis=1) - target
        return total + jnp.sum(jnp.where(y >= 0, nll, 0.0)), None

    parts = logits.reshape(chunks, -1, w.shape[1]), y.reshape(chunks, -1)
    return jax.lax.scan(jax.checkpoint(add), jnp.zeros(()), parts)[0]


@chunked_loss.mutant(
    "Your loop over chunks runs while tracing, so the program repeats each chunk. Use `jax.lax.scan`."
)
def python_chunks(x, w, y, chunks):
    @jax.checkpoint
    def one(x, y):
        return any_nll(x, w, y, 1)

    parts = zip(jnp.split(x, chunks), jnp.split(y, chunks), strict=True)
    return sum((one(*part) for part in parts), jnp.zeros(()))


# ----------------------------------------------------------------------------- f32_accumulators

f32_accumulators = Exercise(
    "14.f32_accumulators",
    title="A sum that does not stop",
    function="mean_gradient",
    minutes=20,
    points=10,
    statement="""
Write `mean_gradient(grad_fn, params, parts)`. It adds up the gradients of M microbatches and divides once,
by the number of all tokens.

- `grad_fn(params, part)` returns the gradient *summed* over the part's tokens, and their number. Both come
  from a model that computes in bfloat16: a leaf of the gradient is bfloat16 or float32, and the number is a
  bfloat16 scalar.
- Sums lose nothing: M may be 3,000, and parts may have different numbers of tokens.
- The result has the types of `params`, rounded once, at the end.
- Only one microbatch's gradients exist at a time: apart from `parts`, no array of the program has the leading
  dimension M.
""",
    hints=(
        "You add up two things here, and both sums can stop. In which type must you add them, and what type "
        "does `jnp.zeros_like(params)` have?",
        "A scan over `parts` whose carry is float32: zeros of each parameter's *shape*, and a float32 zero for "
        "the count. Cast what `grad_fn` returns before you add it.",
        "`add(total, part)`: `jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, grad_fn(params, "
        "part)), None`. At the end `(g / count).astype(p.dtype)`.",
    ),
)


def linear_grads(params, part):
    """The gradient of sum of mask * b * (w @ x), as a bfloat16 model would return it; all of it is exact."""
    x, mask = part
    total = jnp.sum(mask[:, None] * x, axis=0, dtype=jnp.float32)
    w = (params["b"] * total).astype(jnp.bfloat16)
    b = jnp.sum(params["w"] * total).astype(params["b"].dtype)
    return {"w": w, "b": b}, jnp.sum(mask).astype(jnp.bfloat16)


def draw_parts(t, M, rows=4, width=5):
    x = (1 + 0.25 * t.rng.integers(0, 3, size=(M, rows, width))).astype(np.float32)
    mask = (t.rng.random((M, rows)) < 0.5).astype(np.float32)
    mask[:, 0] = 1
    w = np.zeros(width, np.float32)
    w[t.rng.integers(width)] = 1
    b = jnp.asarray(2.0 ** t.rng.integers(-2, 3), jnp.bfloat16)
    return {"w": jnp.asarray(w), "b": b}, (jnp.asarray(x), jnp.asarray(mask))


def mean_of(parts):
    x, mask = (np.asarray(a, np.float64) for a in parts)
    return (mask[..., None] * x).sum((0, 1)) / mask.sum()


def right_mean(params, parts):
    return float(params["b"]) * mean_of(parts)


@f32_accumulators.check("a few microbatches")
def _(fn, t):
    for M in (5, 1):
        params, parts = draw_parts(t, M)
        got = fn(linear_grads, params, parts)
        t.equal(sorted(got), ["b", "w"], why="the leaves of the result")
        x, mask = (np.asarray(a, np.float64) for a in parts)
        sums, counts, b = (mask[..., None] * x).sum(1), mask.sum(1), float(params["b"])
        mistakes = {
            "That is the sum: divide by the number of tokens": b * sums.sum(0),
            "That is divided by the number of microbatches, not of tokens": b * sums.mean(0),
            "That is the mean of the microbatches' means": b * (sums / counts[:, None]).mean(0),
            "That is divided by tokens and by microbatches": b * sums.mean(0) / counts.sum(),
            "That is the last microbatch's alone": b * sums[-1] / counts[-1],
            "All rows count, masked or not": b * sums.sum(0) / mask.size,
        }
        want = right_mean(params, parts)
        why = f"the mean over {M} parts"
        t.close(got["w"], want, rtol=1e-2, why=why, mistakes=mistakes)


@f32_accumulators.check("the types of the parameters")
def _(fn, t):
    params, parts = draw_parts(t, 4)
    got = fn(linear_grads, params, parts)
    found = {name: str(jnp.asarray(leaf).dtype) for name, leaf in sorted(got.items())}
    t.equal(found, {"b": "bfloat16", "w": "float32"}, why="dtypes of the result")


@f32_accumulators.check("many microbatches")
def _(fn, t):
    for M in (700, 3000):
        params, parts = draw_parts(t, M)
        got = fn(linear_grads, params, parts)
        want = right_mean(params, parts)
        t.close(got["w"], want, rtol=1e-4, why=f"the mean over {M} parts, parameters float32")
        b = float(np.asarray(params["w"], np.float64) @ mean_of(parts))
        t.close(got["b"].astype(jnp.float32), b, rtol=4e-3, why=f"{M} parts, a bfloat16 leaf")


@f32_accumulators.check("rounded once")
def _(fn, t):
    def grads(params, part):
        count = jnp.sum(part[1])
        total = jnp.sum(part[1] * part[0].T, axis=1)
        return {"e": params["e"].astype(jnp.float32) * total}, count.astype(jnp.bfloat16)

    x = (1 + 0.25 * t.rng.integers(0, 30, size=(40, 3, 200))).astype(np.float32)
    mask = (t.rng.random((40, 3)) < 0.7).astype(np.float32)
    mask[:, 0] = 1
    e = 2.0 ** t.rng.integers(-3, 4, 200)
    params = {"e": jnp.asarray(e, jnp.bfloat16)}
    got = fn(grads, params, (jnp.asarray(x), jnp.asarray(mask)))
    got = np.asarray(got["e"].astype(jnp.float32))
    want = np.asarray(jnp.asarray(e * mean_of((x, mask)), jnp.bfloat16).astype(jnp.float32))
    off = int(np.sum(got != want))
    why = f"{off} of 200 numbers differ from the mean rounded once to bfloat16"
    t.true(off <= 4, why=why, observed=off / 200)


@f32_accumulators.check("float32 gradients keep their digits")
def _(fn, t):
    M = int(t.rng.integers(20, 60))
    x = 1 + t.rng.integers(0, 2**12, size=(M, 7)) / 2**12  # bfloat16 keeps 7 bits of the 12

    def grads(params, part):
        return {"f": part + 0 * params["f"]}, jnp.bfloat16(1)

    got = fn(grads, {"f": jnp.zeros(7)}, jnp.asarray(x, jnp.float32))["f"]
    t.close(got, x.mean(axis=0), rtol=1e-6, why="a float32 leaf whose gradients are float32")


@f32_accumulators.check("unequal parts")
def _(fn, t):
    params, (x, mask) = draw_parts(t, 64, rows=8)
    mask = mask.at[:32, 1:].set(0)
    mask = mask.at[32:].set(1)
    x = x.at[32:].multiply(4)
    got = fn(linear_grads, params, (x, mask))
    want = right_mean(params, (x, mask))
    t.close(got["w"], want, rtol=1e-4, why="half of the parts have one token, half have eight")


@f32_accumulators.check("one microbatch at a time")
def _(fn, t):
    M = 37
    params, parts = draw_parts(t, M)
    names = t.primitives(lambda p, b: fn(linear_grads, p, b), params, parts)
    t.true("scan" in names or "while" in names, why="no loop: use `jax.lax.scan`", observed=0.0)

    stacked = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            for out in equation.outvars:
                if out.aval.shape[:1] == (M,):
                    stacked.append(out.aval.shape)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(inner):
                    walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(lambda p, b: fn(linear_grads, p, b))(params, parts).jaxpr)
    why = f"the program makes {len(stacked)} arrays with a leading dimension of {M}, such as {stacked[:1]}"
    t.true(not stacked, why=why, observed=1.0)


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def any_mean(
    grad_fn, params, parts, *, sums=jnp.float32, counts=jnp.float32, result=None, means=False,
    early=False, ones=False, rounded=False,
):  # fmt: skip
    def add(total, part):
        grads, count = grad_fn(params, part)
        if rounded:
            grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
        if means:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / count, grads)
        if means or ones:
            count = jnp.ones_like(count)
        new = grads, count
        return jax.tree.map(lambda a, b: (a + b).astype(a.dtype), total, new), None

    zero = jax.tree.map(lambda p: jnp.zeros(p.shape, sums or p.dtype), params)
    (grads, count), _ = jax.lax.scan(add, (zero, jnp.zeros((), counts)), parts)
    if early:
        return jax.tree.map(lambda g, p: g.astype(p.dtype) / count.astype(p.dtype), grads, params)
    return jax.tree.map(lambda g, p: (g / count).astype(result or p.dtype), grads, params)


@f32_accumulators.mutant(
    "Your sums have the types of the parameters. The leaf that is bfloat16 stops at 256. Add up in float32 "
    "and round at the end."
)
def sums_like_params(grad_fn, params, parts):
    return any_mean(grad_fn, params, parts, sums=None)


@f32_accumulators.mutant("All your sums are bfloat16: they stop. Begin with float32 zeros.")
def narrow_sums(grad_fn, params, parts):
    return any_mean(grad_fn, params, parts, sums=jnp.bfloat16)


@f32_accumulators.mutant(
    "The gradients are added in float32, the tokens in bfloat16. That count stops, and the mean grows."
)
def narrow_count(grad_fn, params, parts):
    return any_mean(grad_fn, params, parts, counts=jnp.bfloat16)


@f32_accumulators.mutant("The result must have the type of each parameter; yours is all float32.")
def all_float32(grad_fn, params, parts):
    return any_mean(grad_fn, params, parts, result=jnp.float32)


@f32_accumulators.mutant(
    "You average the microbatches' means. A part with one token then counts as much as one with eight: "
    "divide once, at the end."
)
def mean_of_part_means(grad_fn, params, parts):
    return any_mean(grad_fn, params, parts, means=True)


@f32_accumulators.mutant(
    "You round the sum and then divide, so you round twice. Divide in float32 and round the result."
)
def rounds_early(grad_fn, params, parts):
    return any_mean(grad_fn, params, parts, early=True)


@f32_accumulators.mutant(
    "You round each microbatch's gradient to bfloat16 before you add it. Some leaves are float32: widen, never "
    "narrow."
)
def rounds_each_part(grad_fn, params, parts):
    return any_mean(grad_fn, params, parts, rounded=True)


@f32_accumulators.mutant(
    "You divide by the number of microbatches. The gradients are sums over tokens: divide by all tokens."
)
def divides_by_parts(grad_fn, params, parts):
    return any_mean(grad_fn, params, parts, ones=True)


@f32_accumulators.mutant(
    "You compute all microbatches' gradients and then add them, so M gradients are in memory. Scan, and carry the "
    "sum."
)
def all_at_once(grad_fn, params, parts):
    def one(_, part):
        return None, grad_fn(params, part)

    grads, count = jax.lax.scan(one, None, parts)[1]
    count = jnp.sum(count.astype(jnp.float32))
    mean = lambda g, p: (jnp.sum(g.astype(jnp.float32), axis=0) / count).astype(p.dtype)  # noqa: E731
    return jax.tree.map(mean, grads, params)


# ----------------------------------------------------------------------------- fit_plan

fit_plan = Exercise(
    "14.fit_plan",
    title="Make it fit, as cheaply as you can",
    function="fit_plan",
    minutes=20,
    points=10,
    statement="""
You have three ways to make a step smaller, and each has a price. Write `fit_plan(sizes, seconds, memory, rows)`,
which returns the fastest `(remat, microbatches, offload)` whose peak is at most `memory`, or None.

`remat` is `"none"` or `"full"`; `microbatches` M divides `rows`; `offload` is a bool. Let P be
`sizes["parameters"]`, O `sizes["optimizer"]`, and A `sizes["kept_none"]` or `sizes["kept_full"]` plus
`sizes["logits"]`, all for the batch at once.

- P is always in memory, and so is O unless offloaded.
- At the loss and in the backward pass, add A/M, and P more for the sum of the gradients if M > 1.
- At the update, add P for the gradients, and O if offloaded, because it has to come back.
- The peak is what is always there plus the larger of these two. Divide without rounding: half a byte more than
  `memory` is too much.
- A step takes 3 times `seconds["forward"]`, or 4 times with remat `"full"`; `seconds["microbatch"]` more for
  each microbatch after the first; and with offload 2 times `seconds["transfer"]` more.
""",
    hints=(
        "There are not many plans: two kinds of remat, the divisors of `rows`, offload or not. Try them all.",
        "Write the peak as `always + max(activations, update)`. Offloading takes O out of `always` and puts it "
        "into `update`: it helps only if the peak is not at the update.",
        "For each plan: skip it if its peak is above memory; else keep the one with the least time. `best` "
        "begins as None. M runs over `[m for m in range(1, rows + 1) if rows % m == 0]`.",
    ),
)


def all_plans(
    sizes, seconds, memory, rows, *, back=True, summed=True, divide=True, cheap=True, steps=None,
    strict=False, both=False, once=False, first=False, offloads=(False, True), gradients=1, logits=1,
    again=1, always_summed=False, rounded=False,
):  # fmt: skip
    P, O = sizes["parameters"], sizes["optimizer"]
    found = []
    for remat in ("none", "full"):
        for M in [m for m in range(1, rows + 1) if rows % m == 0 and (steps is None or m in steps)]:
            for offload in offloads:
                held = sizes[f"kept_{remat}"]
                all_logits = logits * sizes["logits"]
                held = (held + all_logits) / M if divide else held / M + all_logits
                held = int(held) if rounded else held
                held += P if (M > 1 or always_summed) and summed else 0
                update = gradients * P + (O if offload and back else 0)
                peak = P + (0 if offload else O) + (held + update if both else max(held, update))
                time = seconds["forward"] * (3 + again * (remat == "full"))
                time += (M - 1) * seconds["microbatch"]
                time += (1 if once else 2) * offload * seconds["transfer"]
                if peak < memory or (peak == memory and not strict):
                    found.append((time if cheap else peak, (remat, M, offload)))
    if first and found:
        return found[0][1]
    return min(found)[1] if found else None


def plan_as_numbers(plan):
    return [0, 0, 0] if plan is None else [1 + (plan[0] == "full"), int(plan[1]), int(plan[2])]


def fate(plan, sizes, seconds, memory, rows):
    """What a plan needs, and which moment decides."""
    remat, M, offload = plan
    if remat not in ("none", "full") or M not in range(1, rows + 1) or rows % M:
        return f"{plan} is not one of the plans: M divides {rows}"
    P, O = sizes["parameters"], sizes["optimizer"]
    always, update = P + (0 if offload else O), P + (O if offload else 0)
    loss = (sizes[f"kept_{remat}"] + sizes["logits"]) / M + (P if M > 1 else 0)
    time = seconds["forward"] * (3 + (remat == "full")) + (M - 1) * seconds["microbatch"]
    time += 2 * offload * seconds["transfer"]
    when = "at the loss" if loss > update else "at the update"
    fits = "doesn't fit" if always + max(loss, update) > memory else "fits"
    return f"{plan} {fits}: its peak is {always + max(loss, update):,.10g}, {when}. It takes {time:.4g} s"


def planned(t, fn, *cases):
    """A case is (sizes, seconds, memory, rows, why). All plans are observed: two mistakes often agree on one."""
    plans = [fn(*case[:4]) for case in cases]
    for plan in plans:
        why = f"got {plan}, want (remat, microbatches, offload); the first is a string"
        t.true(plan is None or isinstance(plan[0], str), why, str(plan))
    seen = np.array([plan_as_numbers(plan) for plan in plans], float)
    for got, (sizes, seconds, memory, rows, why) in zip(plans, cases, strict=True):
        want = all_plans(sizes, seconds, memory, rows)
        text = f"{why}: got {got}, want {want} for {sizes}, {seconds}, memory {memory}, {rows} rows"
        told = [
            fate(plan, sizes, seconds, memory, rows) for plan in (got, want) if plan is not None
        ]
        text = ". ".join([text, *told])
        t.true(plan_as_numbers(got) == plan_as_numbers(want), text, seen)


def draw_sizes(t):
    unit = 15 * 4096  # every number of microbatches divides it
    P = unit * int(t.rng.integers(50, 150))
    none = int(t.rng.integers(2000, 4000))
    sizes = {"parameters": P, "optimizer": P * int(t.rng.integers(1, 4))}
    sizes |= {"kept_none": unit * none, "kept_full": unit * (none // 20)}
    sizes["logits"] = unit * int(t.rng.integers(200, 400))
    seconds = {"forward": 1.0 + t.rng.random(), "microbatch": 0.1 * (0.5 + t.rng.random())}
    seconds["transfer"] = 0.2 + t.rng.random()
    return sizes, seconds


@fit_plan.check("more and more memory")
def _(fn, t):
    sizes = {"parameters": 1000, "optimizer": 2900, "kept_none": 31_007, "kept_full": 2003}
    sizes["logits"] = 4009
    cases = []
    for microbatch, transfer in ((0.11, 0.03), (0.02, 0.4), (0.6, 0.3)):
        seconds = {"forward": 1.0, "microbatch": microbatch, "transfer": transfer}
        for memory in range(4500, 42_000, 1500):
            why = f"a microbatch of {microbatch} s and transfers of {transfer} s"
            cases.append((sizes, seconds, memory, 12, why))
    planned(t, fn, *cases)


@fit_plan.check("plenty of memory")
def _(fn, t):
    planned(t, fn, (*draw_sizes(t), 10**12, 12, "everything fits"))


@fit_plan.check("no memory")
def _(fn, t):
    sizes, seconds = draw_sizes(t)
    why = "not even the parameters and gradients"
    planned(t, fn, (sizes, seconds, sizes["parameters"], 12, why))


@fit_plan.check("exactly enough")
def _(fn, t):
    sizes, seconds = draw_sizes(t)
    update = 2 * sizes["parameters"] + sizes["optimizer"]
    planned(
        t, fn,
        (sizes, seconds, update, 4096, "P, O and the gradients, no more"),
        (sizes, seconds, update - 1, 4096, "one byte less"),
    )  # fmt: skip


@fit_plan.check("half a byte too many")
def _(fn, t):
    seconds = {"forward": 1.0, "microbatch": 0.01, "transfer": 9.0}
    sizes = {"parameters": 1000, "optimizer": 3500, "kept_none": 20_001, "kept_full": 19_001}
    sizes["logits"] = 1000
    memory = 5500 + 21_001 // 2
    planned(t, fn, (sizes, seconds, memory, 2, "21,001 bytes of activations, in two halves"))


@fit_plan.check("microbatches cost memory")
def _(fn, t):
    sizes, seconds = draw_sizes(t)
    state = sizes["parameters"] + sizes["optimizer"]
    memory = state + (sizes["kept_none"] + sizes["logits"]) // 4 + sizes["parameters"] // 2
    planned(t, fn, (sizes, seconds, memory, 64, "a quarter of the activations and half of P"))


@fit_plan.check("the way there and the way back")
def _(fn, t):
    sizes, seconds = draw_sizes(t)
    sizes["logits"] += 4 * sizes["parameters"]
    memory = sizes["parameters"] + sizes["optimizer"] + sizes["kept_none"] + sizes["logits"] - 1
    cases = []
    for transfer, why in ((0.4, "less"), (0.6, "more")):
        slower = seconds | {"transfer": transfer * seconds["forward"]}
        why = f"one row, and both ways cost {why} than a forward pass"
        cases.append((sizes, slower, memory, 1, why))
    planned(t, fn, *cases)


@fit_plan.check("one row, and a byte more")
def _(fn, t):
    sizes, seconds = draw_sizes(t)
    sizes["logits"] += 4 * sizes["parameters"]
    seconds["transfer"] = seconds["forward"]
    cases = []
    for kind in ("none", "full"):
        least = sizes["parameters"] + sizes["optimizer"] + sizes[f"kept_{kind}"] + sizes["logits"]
        cases.append((sizes, seconds, least, 1, f"one row; remat {kind} fits exactly"))
    planned(t, fn, *cases)


@fit_plan.check("small activations, one row")
def _(fn, t):
    sizes, seconds = draw_sizes(t)
    P = sizes["parameters"]
    sizes |= {"kept_none": P // 4, "kept_full": P // 8, "logits": P // 4}
    update = 2 * P + sizes["optimizer"]
    planned(
        t, fn,
        (sizes, seconds, update - 1, 1, "the update needs 2P + O, a byte more than there is"),
        (sizes, seconds, update, 1, "the update needs 2P + O, and so much there is"),
    )  # fmt: skip


@fit_plan.check("between")
def _(fn, t):
    cases = []
    for rows in (12, 30, 64):
        sizes, seconds = draw_sizes(t)
        most = sum(sizes[name] for name in ("parameters", "optimizer", "kept_none", "logits"))
        for share in (0.9, 0.6, 0.4, 0.3, 0.2):
            why = f"{share:.0%} of what the step takes"
            cases.append((sizes, seconds, int(share * most), rows, why))
    planned(t, fn, *cases)


@fit_plan.check("large activations, one row")
def _(fn, t):
    sizes, seconds = draw_sizes(t)
    sizes["logits"] += 3 * sizes["parameters"]
    memory = sizes["parameters"] + sizes["kept_full"] + sizes["logits"]
    planned(t, fn, (sizes, seconds, memory, 1, "one row: offload makes room at the loss"))


@fit_plan.mutant(
    "At the update the offloaded state is back on the device, but your offload makes room even there."
)
def never_comes_back(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, back=False)


@fit_plan.mutant(
    "With more than one microbatch, the sum of the gradients needs its own memory: P bytes more."
)
def no_place_for_the_sum(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, summed=False)


@fit_plan.mutant(
    "The logits shrink with the microbatches too: they belong to a microbatch's tokens."
)
def whole_logits(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, divide=False)


@fit_plan.mutant(
    "You refuse a plan whose peak is exactly `memory`. A peak of at most `memory` fits."
)
def strict(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, strict=True)


@fit_plan.mutant(
    "You add the loss's memory and the update's. They aren't there at the same time: take the larger."
)
def both_at_once(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, both=True)


@fit_plan.mutant("The offloaded state travels twice in each step: to the device, and back.")
def one_way(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, once=True)


@fit_plan.mutant("You return the first plan that fits. Look at every plan and return the fastest.")
def first_that_fits(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, first=True)


@fit_plan.mutant(
    "You never offload. It's one of the three ways, and if only it helps you find nothing."
)
def no_offload(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, offloads=(False,))


@fit_plan.mutant("At the update the gradients are there too: P bytes more than the parameters.")
def update_without_gradients(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, gradients=0)


@fit_plan.mutant("A is the kept activations plus the logits. You left out the logits.")
def no_logits(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, logits=0)


@fit_plan.mutant(
    "With remat `full` a step takes the time of 4 forward passes, with none 3. Yours take the same."
)
def remat_for_nothing(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, again=0)


@fit_plan.mutant(
    "You count the sum of the gradients for one microbatch too. With M = 1 there is nothing to add up."
)
def sum_of_one(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, always_summed=True)


@fit_plan.mutant(
    "You round A / M down, and accept a plan that is half a byte too large: `//` is not `/`."
)
def rounded_down(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, rounded=True)


@fit_plan.mutant("You return the smallest plan. Return the fastest one that fits.")
def smallest(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, cheap=False)


@fit_plan.mutant("You try only powers of two. M can be any divisor of `rows`, 3 and 5 among them.")
def powers_of_two(sizes, seconds, memory, rows):
    return all_plans(sizes, seconds, memory, rows, steps={2**k for k in range(20)})


# ------------------------------------------------------------------------------------- groups

groups = Exercise(
    "14.groups",
    title="Which layers to compute again",
    function="choose_groups",
    minutes=40,
    points=20,
    seconds=20.0,
    statement="""
The layers of a stack aren't all alike. You can put `jax.checkpoint` around any group of neighbouring layers, and leave
other layers as they are. Write `choose_groups(inputs, kept, times, memory)`, which returns the groups that fit into
`memory` and take the least time, or None if no choice fits.

For its backward pass, layer i needs `kept[i]` bytes; its input is `inputs[i]` of them. Its forward pass takes
`times[i]` microseconds. A group `(a, b)` has the layers `a` to `b - 1`, at least one.

- In the forward pass, a group keeps the input of its first layer, and a layer outside all groups keeps all its bytes.
  Nothing is given back before the backward pass, which goes from the last layer to the first.
- When the backward pass comes to a group, the group runs again, which takes the times of all its layers. Then the
  bytes that all its layers need are in memory at once. The input of its first layer is one part of them, so don't
  count it twice.
- At that moment, what earlier layers and groups keep is in memory too. Nothing is left of what comes after the group.
- The peak is the largest number of bytes at any moment: at the end of the forward pass, or when a group has run again.
  It must be at most `memory`.

Return a list of tuples `(a, b)` from first to last; it's empty if nothing has to run again. If several choices take
the least time, any of them will do.

An example: with four layers, `inputs = [1, 1, 1, 1]`, `kept = [10, 10, 10, 10]`, `times = [3, 1, 2, 3]` and
`memory = 24`, the answer is `[(1, 2), (2, 3)]`. The forward pass ends with 10 + 1 + 1 + 10 bytes, and layers 1 and 2
take 3 microseconds again. One group `(1, 3)` would keep a byte less, but need 10 + 20 bytes when it runs again.

All numbers are Python integers. Sizes may have twelve digits, but there are at most 30 layers, and all their times
together are at most 300. There are far too many choices to try them all.
""",
    hints=(
        "Go through the layers from first to last. What must you know about your choices for the "
        "layers before `a` to decide whether the group `(a, b)` fits? Not which groups they are.",
        "Only two numbers count: the bytes that the layers before `a` keep, and the time of what "
        "runs again. Of two choices with the same time, the one that keeps more is never better. "
        "So for each layer and each time up to 300 it's enough to remember one choice.",
        "`least[a]` maps a time to (bytes, groups), and `least[0]` is `{0: (0, [])}`. From each "
        "entry go to `least[a + 1]` with `kept[a]` more bytes, and to every `least[b]` with "
        "`inputs[a]` more bytes, if bytes plus `sum(kept[a:b])` is at most memory. The answer is "
        "the entry of `least[L]` with the least time, among those with at most `memory` bytes.",
    ),
)


@functools.cache
def choices(L):
    """All choices of groups among L layers; there are 89 for five."""
    if L == 0:
        return ((),)
    grouped = [(*before, (a, L)) for a in range(L) for before in choices(a)]
    return (*choices(L - 1), *grouped)


def moments(
    found, inputs, kept, times, *, keeps="first", before=True, after=False, twice=False, end=True,
    inside=sum, price=sum,
):  # fmt: skip
    """The time of what runs again, and (bytes, moment) of all moments that can be the peak."""
    past, at, held, spent, seen = dict(found), 0, 0, 0, []
    while at < len(kept):
        if at not in past:
            held += kept[at]
            at += 1
            continue
        group = slice(at, past[at])
        need = inside(kept[group]) + (inputs[at] if twice else 0) + (held if before else 0)
        seen.append((need, f"when {(at, past[at])} has run again"))
        own = {"first": inputs[at : at + 1], "last": inputs[group][-1:], "all": inputs[group]}
        held += sum(own.get(keeps, []))
        spent += price(times[group])
        at = past[at]
    if after:
        seen = [(size + held, when) for size, when in seen]
    if end:
        seen.append((held, "at the end of the forward pass"))
    return spent, seen


def least_by_trying(
    inputs, kept, times, memory, *, allowed=choices, strict=False, small=False, **mistake
):
    """The choice of the least time that fits, by trying all of them; with a mistake if that is asked for."""
    found = []
    if len(kept) > 5:  # a wrong answer gives up where this would take years
        return None
    for number, choice in enumerate(allowed(len(kept))):
        spent, seen = moments(choice, inputs, kept, times, **mistake)
        peak = max((size for size, _ in seen), default=0)
        if peak < memory or (peak == memory and not strict):
            found.append(((peak if small else spent), number, list(choice)))
    return min(found)[2] if found else None


def least_time(inputs, kept, times, memory):
    """The least time of a choice that fits, or None: for each time, the least bytes that are kept."""
    least = [{0: 0}, *({} for _ in kept)]
    for a, entries in enumerate(least[:-1]):
        for spent, held in entries.items():
            reached = [(a + 1, spent, held + kept[a])]
            for b in range(a + 1, len(kept) + 1):
                if held + sum(kept[a:b]) <= memory:
                    reached.append((b, spent + sum(times[a:b]), held + inputs[a]))
            for b, time, size in reached:
                least[b][time] = min(size, least[b].get(time, size))
    return min((time for time, held in least[-1].items() if held <= memory), default=None)


def malformed(got, L):
    """What is wrong with the form of an answer for L layers, or ""."""
    if got is None:
        return ""
    if not isinstance(got, (list, tuple)):
        return f"got {got}, want a list of tuples (a, b), or None"
    past = 0
    for group in got:
        if not isinstance(group, (list, tuple)) or len(group) != 2:
            return f"got {got}, want a list of tuples (a, b)"
        if not all(isinstance(x, (int, np.integer)) for x in group):
            return f"got {got}, want a list of tuples of integers"
        a, b = group
        if a >= b:
            return f"{tuple(group)} in {got} has no layer: (a, b) has the layers a to b - 1"
        if a < 0 or b > L:
            return f"{tuple(group)} in {got} has a layer that isn't one of 0 to {L - 1}"
        if a < past:
            return f"{tuple(group)} in {got} begins before the end of the group before it"
        past = b
    return ""


def told_of(choice, inputs, kept, times):
    """What a choice costs, in words."""
    spent, seen = moments(choice, inputs, kept, times)
    size, when = max(seen)
    return f"{list(choice)} takes {spent} microseconds, and its peak is {size:,} bytes, {when}"


def chosen(t, fn, *cases):
    """A case is (inputs, kept, times, memory, why). All answers are observed: two mistakes often agree on one."""
    seen, text = [], ""
    for inputs, kept, times, memory, why in cases:
        got = fn(list(inputs), list(kept), list(times), memory)
        form = malformed(got, len(kept))
        t.true(not form, form, observed=form.split(f"{got}")[-1])
        spent, found = (None, [(0, "")]) if got is None else moments(got, inputs, kept, times)
        over, least = max(0, max(found)[0] - memory), least_time(inputs, kept, times, memory)
        seen.append((-1 if spent is None else spent, over))
        if text or (spent == least and not over):
            continue
        stack = inputs, kept, times
        text = (
            f"{why}: inputs {inputs}, kept {kept}, times {times}, memory {memory:,}. Your answer "
        )
        text += "is None" if got is None else told_of(got, *stack)
        if least is None:
            text += ". No choice fits"
        elif len(kept) <= 5:
            text += f". Better: {told_of(least_by_trying(*stack, memory), *stack)}"
        else:
            text += f". The least time of a choice that fits is {least}"
    t.true(not text, text, observed=np.array(seen, float))


def draw_layers(t, L, large=1):
    inputs = t.rng.integers(3, 20, L) * large + t.rng.integers(large)
    kept = inputs + t.rng.integers(10, 90, L) * large
    return inputs.tolist(), kept.tolist(), t.rng.integers(1, 300 // L, L).tolist()


def peaks(inputs, kept, times):
    """The peaks of all choices, from the least; it needn't be the peak of a good one."""
    all_of_them = (moments(choice, inputs, kept, times)[1] for choice in choices(len(kept)))
    return sorted({max(seen)[0] for seen in all_of_them})


@groups.check("everything fits")
def _(fn, t):
    cases = []
    for L in (1, 3, 5):
        stack = draw_layers(t, L)
        for more in (0, 1, 10**12):
            why = "all that the layers keep, and {more:,} bytes more"
            cases.append((*stack, sum(stack[1]) + more, why.format(more=more)))
    chosen(t, fn, *cases)


@groups.check("nothing fits")
def _(fn, t):
    cases = []
    for L in (1, 2, 5):
        stack = draw_layers(t, L)
        cases.append((*stack, max(stack[1]) - 1, "not even enough for the largest layer"))
        cases.append((*stack, peaks(*stack)[0] - 1, "a byte less than any choice needs"))
    chosen(t, fn, *cases)


@groups.check("two layers, with every memory that matters")
def _(fn, t):
    cases = []
    for _ in range(3):
        stack = draw_layers(t, 2)
        for peak in peaks(*stack):
            cases += [(*stack, peak, "two layers"), (*stack, peak - 1, "two layers, a byte less")]
    chosen(t, fn, *cases)


@groups.check("three layers, with every memory that matters")
def _(fn, t):
    cases = []
    for _ in range(2):
        stack = draw_layers(t, 3)
        for peak in peaks(*stack):
            cases += [(*stack, peak, "three layers"), (*stack, peak - 1, "three layers")]
    chosen(t, fn, *cases)


@groups.check("large inputs, which make groups of several layers worth it")
def _(fn, t):
    cases = []
    for _ in range(3):
        inputs = t.rng.integers(30, 60, 5)
        kept = inputs + t.rng.integers(1, 20, 5)
        stack = inputs.tolist(), kept.tolist(), t.rng.integers(1, 50, 5).tolist()
        found = peaks(*stack)
        cases += [
            (*stack, found[int(k)], "five layers") for k in t.rng.integers(0, len(found) // 2, 4)
        ]
    chosen(t, fn, *cases)


@groups.check("five layers, any memory")
def _(fn, t):
    cases = []
    for _ in range(4):
        stack = draw_layers(t, 5)
        found = peaks(*stack)
        cases += [(*stack, found[int(k)], "five layers") for k in t.rng.integers(0, len(found), 4)]
    chosen(t, fn, *cases)


@groups.check("twelve digits")
def _(fn, t):
    cases = []
    for L in (4, 5):
        stack = draw_layers(t, L, large=10**9 + 7)
        found = peaks(*stack)
        cases += [(*stack, found[int(k)], "large") for k in t.rng.integers(0, len(found), 3)]
    chosen(t, fn, *cases)


@groups.check("thirty layers")
def _(fn, t):
    inputs, kept, _ = draw_layers(t, 30, large=1001)
    times = t.rng.permutation(np.arange(30) % 10 + 5)  # 285 in all
    stack = inputs, kept, times.tolist()
    cases = [
        (*stack, int(share * sum(kept)), f"{share:.0%} of what all layers keep")
        for share in (0.2, 0.5)
    ]
    chosen(t, fn, *cases)


def mistaken_choice(name, hint, fn=None, **mistake):
    def mutant(inputs, kept, times, memory):
        return least_by_trying(inputs, kept, times, memory, **mistake)

    mutant = fn or mutant
    mutant.__name__ = name
    groups.mutant(hint)(mutant)


mistaken_choice(
    "input_counted_twice",
    "When a group runs again, you count its first layer's input twice: it's one of the bytes that this layer needs.",
    twice=True,
)
mistaken_choice(
    "earlier_layers_forgotten",
    "When a group runs again, what the layers before it keep is still in memory. You count only the group.",
    before=False,
)
mistaken_choice(
    "later_layers_counted",
    "When a group runs again, you count what all layers keep, those after the group too. Their backward pass is over, "
    "so nothing is left of them.",
    after=True,
    before=False,
)
mistaken_choice(
    "end_forgotten",
    "You look only at the moments when a group runs again. At the end of the forward pass all that is kept must "
    "fit as well.",
    end=False,
)
NEVER_LONGER = (
    "In your count, a group of several layers never pays. Either you try only single layers, or you keep the input of "
    "every layer in a group. One `jax.checkpoint` around a group keeps only its first layer's."
)
mistaken_choice("every_input_kept", NEVER_LONGER, keeps="all")
mistaken_choice(
    "single_layers",
    NEVER_LONGER,
    allowed=lambda L: [c for c in choices(L) if all(b == a + 1 for a, b in c)],
)
mistaken_choice(
    "last_input_kept",
    "You keep the input of a group's last layer. To run the group again one needs that of its first.",
    keeps="last",
)
mistaken_choice(
    "nothing_kept",
    "Your groups keep nothing in the forward pass. Each keeps the input of its first layer, or it couldn't run again.",
    keeps="nothing",
)
mistaken_choice(
    "layer_after_layer",
    "When a group runs again, you count only its largest layer. All its layers' bytes are in memory at once: that's "
    "the price of a group.",
    inside=max,
)
mistaken_choice(
    "strict",
    "You refuse a choice whose peak is exactly `memory`. A peak of at most `memory` fits.",
    strict=True,
)
mistaken_choice(
    "least_memory",
    "You return the choice with the lowest peak. Return the one with the least time among those that fit.",
    small=True,
)
mistaken_choice(
    "first_layer_paid",
    "You count the time of a group's first layer alone. The whole group runs again.",
    price=lambda times: times[0],
)
mistaken_choice(
    "longest_layer_paid",
    "You count the time of a group's longest layer alone. Its layers run one after another, so add up their times.",
    price=max,
)
mistaken_choice(
    "fewest_layers",
    "You look for the fewest layers that run again. Their times differ: look for the least time.",
    price=len,
)
mistaken_choice(
    "fewest_groups",
    "You look for the fewest groups. What counts is the time of all layers in them.",
    price=lambda times: 1,
)
mistaken_choice(
    "one_group",
    "You try only one group. There may be several, with other layers between them.",
    allowed=lambda L: [c for c in choices(L) if len(c) < 2],
)
mistaken_choice(
    "every_layer_in_a_group",
    "You put every layer into a group. A layer outside all groups keeps its bytes and doesn't run again.",
    allowed=lambda L: [c for c in choices(L) if sum(b - a for a, b in c) == L],
)
mistaken_choice(
    "first_layer_left_out",
    "Your groups never have the first layer, layer 0. It can run again like the others.",
    allowed=lambda L: [c for c in choices(L) if not c or c[0][0] > 0],
)


def empty_if_nothing_fits(inputs, kept, times, memory):
    found = least_by_trying(inputs, kept, times, memory)
    return [] if found is None else found


mistaken_choice(
    "empty_if_nothing_fits",
    "You return an empty list if no choice fits. It says that the stack fits as it is: return None.",
    empty_if_nothing_fits,
)


def last_layer_named(inputs, kept, times, memory):
    found = least_by_trying(inputs, kept, times, memory)
    return found and [(a, b - 1) for a, b in found]


mistaken_choice(
    "last_layer_named",
    "Your groups end with their last layer. `(a, b)` has the layers a to b - 1, as in a slice.",
    last_layer_named,
)


def neighbours_joined(inputs, kept, times, memory):
    found = least_by_trying(inputs, kept, times, memory)
    joined = []
    for a, b in found or ():
        if joined and joined[-1][1] == a:
            a = joined.pop()[0]
        joined.append((a, b))
    return found and joined


mistaken_choice(
    "neighbours_joined",
    "You join groups that follow one another without a gap. Two small groups need less at a time than one large.",
    neighbours_joined,
)


def from_last_to_first(inputs, kept, times, memory):
    found = least_by_trying(inputs, kept, times, memory)
    return found and found[::-1]


mistaken_choice(
    "from_last_to_first",
    "Your groups come from last to first. Return them from first to last.",
    from_last_to_first,
)


def one_entry_a_layer(inputs, kept, times, memory, best):
    """Goes through the layers as the solution does, but remembers a single choice for each."""
    least = [[] for _ in range(len(kept) + 1)]
    least[0] = [(0, 0, [])]
    for a, entries in enumerate(least[:-1]):
        for held, spent, found in sorted(entries, key=best)[:1]:
            if held + kept[a] <= memory:
                least[a + 1].append((held + kept[a], spent, found))
            for b in range(a + 1, len(kept) + 1):
                if held + sum(kept[a:b]) <= memory:
                    spent_b = spent + sum(times[a:b])
                    least[b].append((held + inputs[a], spent_b, [*found, (a, b)]))
    fits = [entry for entry in least[-1] if entry[0] <= memory]
    return min(fits, key=lambda entry: entry[1])[2] if fits else None


def fastest_only(inputs, kept, times, memory):
    return one_entry_a_layer(inputs, kept, times, memory, lambda e: (e[1], e[0]))


def smallest_only(inputs, kept, times, memory):
    return one_entry_a_layer(inputs, kept, times, memory, lambda e: (e[0], e[1]))


mistaken_choice(
    "fastest_only",
    "For each layer you go on only with the choice of the least time so far. A slower one that keeps less may be the "
    "only one that leaves room for what follows.",
    fastest_only,
)
mistaken_choice(
    "smallest_only",
    "For each layer you go on only with the choice that keeps least so far. One that keeps more may fit as well, and "
    "take less time.",
    smallest_only,
)


def cheapest_bytes_first(inputs, kept, times, memory):
    """Greedy: one layer after another, by time for each byte saved."""
    order = sorted(range(len(kept)), key=lambda i: times[i] / (kept[i] - inputs[i]))
    for count in range(len(kept) + 1):
        found = [(i, i + 1) for i in sorted(order[:count])]
        if max(moments(found, inputs, kept, times)[1])[0] <= memory:
            return found
    return None


mistaken_choice(
    "cheapest_bytes_first",
    "You add layers in the order of time for each byte saved until it fits. The last one added may save far more than "
    "is missing, and longer groups are never tried.",
    cheapest_bytes_first,
)
