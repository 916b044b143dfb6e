import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxprs_in_params

from minitext.book.grading import Exercise

# ------------------------------------------------------------------------------ cross_entropy

cross_entropy = Exercise(
    "06.cross_entropy",
    title="Cross-entropy that survives any padding",
    function="masked_cross_entropy",
    minutes=25,
    points=10,
    statement="""
Write `masked_cross_entropy(logits_BTV, targets_BT, mask_BT)`. It returns the **sum** of the losses
$-\\log \\operatorname{softmax}(x)_y$ over the positions whose mask is not 0, and the number of these
positions, both as float32 scalars. It does not divide; that is left to the caller.

- Compute in float32, even if the logits are bfloat16. Logits of $\\pm 90$, of $\\pm 10^4$, and
  entries of $-\\infty$ (a vocabulary padded to a round number) give the exact loss.
- A mask of any dtype means yes or no: 0.25, 2 and -1 count in full, as 1 does.
- Ignore a position with mask 0 completely. Its logits may be nan or infinite and its target out of
  range, as in the padding of a real batch, but this must affect neither the sum nor the
  **gradient**: the gradient is exactly 0 there and right everywhere else.
- A batch with nothing to predict gives (0, 0), without nan.
""",
    hints=(
        "What is the largest number in the row, and what happens if you subtract it from all "
        "of them? For the mask: which two numbers does the backward pass multiply there?",
        "`jnp.where(mask, loss, 0)` picks the right value, but its gradient is 0 times the "
        "derivative of the loss, and 0 times nan is nan. So the bad logits mustn't get in at "
        "all.",
        "First `x = jnp.where(mask[..., None], logits, 0).astype(jnp.float32)` and "
        "`targets = jnp.where(mask, targets, 0)`. Then `jax.nn.logsumexp(x, axis=-1)` minus "
        "`jnp.take_along_axis(x, targets[..., None], axis=-1)[..., 0]`, masked again and summed.",
    ),
    forbid=(
        "minitext.training.loss",
        "optax.losses",
        "optax.softmax_cross_entropy_with_integer_labels",
    ),
)


def nll_by_numpy(logits, targets, counts):
    """(sum, gradient) in float64."""
    x = np.asarray(logits, np.float64)
    total, grad = 0.0, np.zeros(x.shape)
    for b, t in np.argwhere(counts):
        row = x[b, t] - x[b, t].max()
        softmax = np.exp(row) / np.exp(row).sum()
        total += np.log(np.exp(row).sum()) - row[targets[b, t]]
        grad[b, t] = softmax
        grad[b, t, targets[b, t]] -= 1
    return total, grad


def text_batch(t, shape, scale=2.0, dtype=jnp.float32, share=0.7):
    B, T, V = shape
    logits = jnp.asarray(t.rng.normal(size=shape) * scale, dtype)
    targets = t.rng.integers(0, V, (B, T)).astype(np.int32)
    mask = (t.rng.random((B, T)) < share).astype(np.float32)
    mask[0, 0] = 1
    return logits, targets, mask


def loss_gradient(fn, logits, targets, mask):
    return jax.grad(lambda x: fn(x, targets, mask)[0])(logits)


@cross_entropy.check("the sum and the count")
def _(fn, t):
    for shape in ((3, 6, 10), (1, 1, 2)):
        logits, targets, mask = text_batch(t, shape)
        total, count = fn(logits, targets, mask)
        t.close(count, mask.sum(), why="the number of targets that count", dtype=np.float32)
        want = nll_by_numpy(logits, targets, mask != 0)[0]
        t.close(total, want, rtol=1e-5, why=f"the sum, logits {shape}", dtype=np.float32)


@cross_entropy.check("a mask of integers or of booleans is a mask")
def _(fn, t):
    logits, targets, mask = text_batch(t, (3, 6, 10))
    want = nll_by_numpy(logits, targets, mask != 0)[0]
    for dtype in (np.int32, np.bool_):
        total, count = fn(logits, targets, mask.astype(dtype))
        t.close(total, want, rtol=1e-5, why=f"the sum with a mask of {np.dtype(dtype)}")
        t.close(count, mask.sum(), why=f"the count with a mask of {np.dtype(dtype)}")


@cross_entropy.check("a mask that is neither 0 nor 1 counts in full")
def _(fn, t):
    logits, targets, _ = text_batch(t, (3, 6, 10))
    values = np.array([0, 1, 0.25, 0.5, 2, -1, -0.5, 3, 0] * 2, np.float32).reshape(3, 6)
    for dtype in (np.float32, np.int8):
        mask = values.astype(dtype)
        total, count = fn(logits, targets, mask)
        why = f"with masks of {', '.join(map(str, np.unique(mask)))}"
        t.close(count, (mask != 0).sum(), why=f"the count {why}", dtype=np.float32)
        want = nll_by_numpy(logits, targets, mask != 0)[0]
        t.close(total, want, rtol=1e-5, why=f"the sum {why}", dtype=np.float32)


def far_apart(t, *heights):
    """A batch whose positions lie at these heights in turn, so that one maximum doesn't suit two of them."""
    logits, targets, mask = text_batch(t, (3, 6, 10), share=1.0)
    return logits + np.resize(np.float32(heights), (3, 6, 1)), targets, mask


@cross_entropy.check("positions far apart")
def _(fn, t):
    logits, targets, mask = far_apart(t, 110.0, 0.0, 0.0, 110.0, 0.0)
    want = nll_by_numpy(logits, targets, mask != 0)[0]
    t.close(fn(logits, targets, mask)[0], want, rtol=1e-5, why="positions near 110 and near 0")


@cross_entropy.check("logits of +-90 and of +-10,000")
def _(fn, t):
    for size in (90.0, 1e4):
        logits, targets, mask = text_batch(t, (3, 6, 10))
        logits = jnp.asarray(t.rng.choice([-size, 0.0, size], logits.shape), jnp.float32)
        want = nll_by_numpy(logits, targets, mask != 0)[0]
        total = fn(logits, targets, mask)[0]
        t.close(total, want, rtol=1e-5, atol=1e-4, why=f"logits of +-{size:g}")
    logits, targets, mask = far_apart(t, -110.0, -90.0, -110.0, -130.0, -110.0)
    want = nll_by_numpy(logits, targets, mask != 0)[0]
    t.close(fn(logits, targets, mask)[0], want, rtol=1e-5, why="positions near -90 to -130")


@cross_entropy.check("a vocabulary padded with -inf")
def _(fn, t):
    logits, targets, mask = text_batch(t, (3, 6, 10))
    logits = logits.at[..., 8:].set(-jnp.inf)
    want, grad = nll_by_numpy(logits, targets := targets % 8, mask != 0)
    told = "0 times -inf is NaN: select the target's logit, don't multiply the others by 0"
    total = fn(logits, targets, mask)[0]
    zeros = nll_by_numpy(jnp.where(jnp.isfinite(logits), logits, 0), targets, mask != 0)[0]
    replaced = "You put 0 for -inf, and e^0 = 1 is added to the normaliser. Only where the mask is 0, put 0 in"
    t.close(total, want, rtol=1e-5, why="the sum", mistakes={told: np.nan, replaced: zeros})
    t.close(loss_gradient(fn, logits, targets, mask), grad, atol=1e-5, why="the gradient")


@cross_entropy.check("bfloat16 logits, float32 arithmetic")
def _(fn, t):
    logits, targets, mask = text_batch(t, (4, 64, 400), scale=3.0, dtype=jnp.bfloat16, share=0.9)
    want = nll_by_numpy(np.asarray(logits, np.float32), targets, mask != 0)[0]
    total, count = fn(logits, targets, mask)
    t.close(total, want, rtol=1e-5, why="the sum over bfloat16 logits", dtype=np.float32)
    t.close(count, mask.sum(), why="the count", dtype=np.float32)


@cross_entropy.check("the gradient is softmax minus one-hot, where the mask is not 0")
def _(fn, t):
    logits, targets, mask = text_batch(t, (3, 6, 10))
    grad = nll_by_numpy(logits, targets, mask != 0)[1]
    t.close(loss_gradient(fn, logits, targets, mask), grad, atol=1e-5, why="the gradient")


@cross_entropy.check("what stands under mask 0 is never looked at")
def _(fn, t):
    logits, targets, mask = text_batch(t, (3, 6, 10))
    want, grad = nll_by_numpy(logits, targets, mask != 0)
    rubbish = t.rng.choice([np.nan, np.inf, -np.inf], logits.shape).astype(np.float32)
    logits = jnp.where((mask != 0)[..., None], logits, rubbish)
    targets = np.where(mask != 0, targets, np.resize([-1, 10, 10**6], mask.shape)).astype(np.int32)
    told = "NaN under mask 0 got into it: 0 times NaN is NaN, so choose with `jnp.where`, don't multiply"
    total = fn(logits, targets, mask)[0]
    t.close(total, want, rtol=1e-5, why="the sum", mistakes={told: np.nan})
    got = loss_gradient(fn, logits, targets, mask)
    told = "the backward pass multiplies 0 by a derivative at NaN: NaN must be out before the first exponential"
    hidden = (mask == 0)[..., None]
    t.close(
        got, grad, atol=1e-5, why="the gradient", mistakes={told: np.where(hidden, np.nan, grad)}
    )


@cross_entropy.check("nothing to predict")
def _(fn, t):
    logits, targets, mask = text_batch(t, (3, 6, 10))
    total, count = fn(logits, targets, 0 * mask)
    t.close(total, 0.0, atol=0, why="the sum")
    t.close(count, 0.0, atol=0, why="the count")
    grad = loss_gradient(fn, logits, targets, 0 * mask)
    t.close(grad, np.zeros(grad.shape), atol=0, why="the gradient")


def nll(x_BTV, targets_BT):
    top = jax.lax.stop_gradient(jnp.max(x_BTV, axis=-1, keepdims=True))
    normalizer = jnp.log(jnp.sum(jnp.exp(x_BTV - top), axis=-1)) + top[..., 0]
    return normalizer - jnp.take_along_axis(x_BTV, targets_BT[..., None], axis=-1)[..., 0]


def careful_nll(logits_BTV, targets_BT, counts_BT, loss=nll):
    """Loss at every position, with zeros put in where nothing counts."""
    x_BTV = jnp.where(counts_BT[..., None], logits_BTV, 0).astype(jnp.float32)
    loss_BT = loss(x_BTV, jnp.where(counts_BT, targets_BT, 0))
    return jnp.where(counts_BT, loss_BT, 0.0)


@cross_entropy.mutant(
    "You take exponentials of the logits as they come. e^90 is more than float32 holds. Subtract "
    "the largest logit of the row first, and add it again after the logarithm."
)
def naive_exponentials(logits_BTV, targets_BT, mask_BT):
    def loss(x, targets):
        target = jnp.take_along_axis(x, targets[..., None], axis=-1)[..., 0]
        return jnp.log(jnp.sum(jnp.exp(x), axis=-1)) - target

    counts = mask_BT != 0
    return jnp.sum(careful_nll(logits_BTV, targets_BT, counts, loss)), jnp.sum(counts, dtype=float)


@cross_entropy.mutant(
    "You subtract the largest logit of the whole array. In a row far below it every exponential"
    " is 0, and its logarithm is -inf. Each row has its own largest logit: axis=-1, "
    "keepdims=True."
)
def one_maximum_for_all(logits_BTV, targets_BT, mask_BT):
    def loss(x, targets):
        top = jax.lax.stop_gradient(jnp.max(x))
        target = jnp.take_along_axis(x, targets[..., None], axis=-1)[..., 0]
        return jnp.log(jnp.sum(jnp.exp(x - top), axis=-1)) + top - target

    counts = mask_BT != 0
    return jnp.sum(careful_nll(logits_BTV, targets_BT, counts, loss)), jnp.sum(counts, dtype=float)


@cross_entropy.mutant(
    "You count a position only if its mask is exactly 1. It counts whenever the mask is not 0: "
    "compare with `!= 0`."
)
def counts_ones(logits_BTV, targets_BT, mask_BT):
    counts = mask_BT == 1
    return jnp.sum(careful_nll(logits_BTV, targets_BT, counts)), jnp.sum(counts, dtype=jnp.float32)


@cross_entropy.mutant(
    "You count a position if its mask is above 0. A negative mask is not 0 either: compare with"
    " `!= 0`."
)
def counts_above_zero(logits_BTV, targets_BT, mask_BT):
    counts = mask_BT > 0
    return jnp.sum(careful_nll(logits_BTV, targets_BT, counts)), jnp.sum(counts, dtype=jnp.float32)


@cross_entropy.mutant(
    "You count a position if its mask is at least a half, or you round it. It counts whenever "
    "the mask is not 0, however small it is."
)
def counts_from_a_half(logits_BTV, targets_BT, mask_BT):
    counts = mask_BT >= 0.5
    return jnp.sum(careful_nll(logits_BTV, targets_BT, counts)), jnp.sum(counts, dtype=jnp.float32)


@cross_entropy.mutant(
    "You add up the mask to count the positions. That is right only if every mask is 0 or 1: "
    "count the masks that are not 0."
)
def adds_up_the_mask(logits_BTV, targets_BT, mask_BT):
    loss = careful_nll(logits_BTV, targets_BT, mask_BT != 0)
    return jnp.sum(loss), jnp.sum(mask_BT, dtype=jnp.float32)


@cross_entropy.mutant(
    "You multiply the loss by the mask, so a mask of 0.25 counts a quarter. It is a yes or a no: choose "
    "with `jnp.where(mask != 0, ...)`."
)
def weighs_by_the_mask(logits_BTV, targets_BT, mask_BT):
    loss = careful_nll(logits_BTV, targets_BT, mask_BT != 0)
    return jnp.sum(loss * mask_BT), jnp.sum(mask_BT != 0, dtype=jnp.float32)


@cross_entropy.mutant(
    "You take the logarithm of the softmax plus a small number. A target whose probability is "
    "below that number costs the same however wrong the model is, so it learns nothing from it. "
    "Subtract logits from the logarithm of the normaliser; never form a probability."
)
def epsilon_in_the_logarithm(logits_BTV, targets_BT, mask_BT):
    def loss(x, targets):
        p = jax.nn.softmax(x, axis=-1)
        return -jnp.log(jnp.take_along_axis(p, targets[..., None], axis=-1)[..., 0] + 1e-9)

    counts = mask_BT != 0
    return jnp.sum(careful_nll(logits_BTV, targets_BT, counts, loss)), jnp.sum(counts, dtype=float)


@cross_entropy.mutant(
    "You multiply the loss by the mask. Zero times nan is nan, so one bad value in the padding "
    "spoils the whole batch. Choose with jnp.where, and keep the bad logits out to begin with."
)
def multiplied_by_the_mask(logits_BTV, targets_BT, mask_BT):
    mask_BT = (mask_BT != 0).astype(jnp.float32)
    loss_BT = nll(logits_BTV.astype(jnp.float32), targets_BT)
    return jnp.sum(loss_BT * mask_BT), jnp.sum(mask_BT)


@cross_entropy.mutant(
    "You multiply the logits by the mask before you compute anything. The place is right, but 0 times nan is nan: "
    "choose with jnp.where."
)
def logits_times_the_mask(logits_BTV, targets_BT, mask_BT):
    counts_BT = mask_BT != 0
    loss_BT = nll(
        logits_BTV * counts_BT[..., None].astype(jnp.float32), jnp.where(counts_BT, targets_BT, 0)
    )
    return jnp.sum(jnp.where(counts_BT, loss_BT, 0.0)), jnp.sum(counts_BT, dtype=jnp.float32)


@cross_entropy.mutant(
    "Your value is right, but your gradient is nan: with jnp.where applied to the loss, the "
    "backward pass still multiplies 0 by the derivative at the nan logits. Replace those logits"
    " by zeros before you compute anything."
)
def masked_too_late(logits_BTV, targets_BT, mask_BT):
    counts_BT = mask_BT != 0
    loss_BT = nll(logits_BTV.astype(jnp.float32), jnp.where(counts_BT, targets_BT, 0))
    return jnp.sum(jnp.where(counts_BT, loss_BT, 0.0)), jnp.sum(counts_BT, dtype=jnp.float32)


@cross_entropy.mutant(
    "You compute in the logits' own dtype. bfloat16 has 8 bits: a normaliser or a sum over "
    "hundreds of tokens is off in the third digit. Convert the logits to float32 first."
)
def in_bfloat16(logits_BTV, targets_BT, mask_BT):
    counts_BT = mask_BT != 0
    x_BTV = jnp.where(counts_BT[..., None], logits_BTV, 0)
    loss_BT = jnp.where(counts_BT, nll(x_BTV, jnp.where(counts_BT, targets_BT, 0)), 0)
    return jnp.sum(loss_BT).astype(jnp.float32), jnp.sum(counts_BT, dtype=jnp.float32)


@cross_entropy.mutant(
    "You count every position, B times T, whatever the mask says. The count is the number of "
    "positions whose mask is not 0."
)
def counts_the_padding(logits_BTV, targets_BT, mask_BT):
    total = jnp.sum(careful_nll(logits_BTV, targets_BT, mask_BT != 0))
    return total, jnp.float32(mask_BT.size)


@cross_entropy.mutant(
    "You return a mean. The sum is asked for: sums of several microbatches can be added, means "
    "cannot, and with nothing to predict a mean is 0 / 0."
)
def returns_the_mean(logits_BTV, targets_BT, mask_BT):
    counts = jnp.sum(mask_BT != 0, dtype=jnp.float32)
    return jnp.sum(careful_nll(logits_BTV, targets_BT, mask_BT != 0)) / counts, counts


@cross_entropy.mutant(
    "Your loss has the wrong sign. It is *minus* the logarithm of a probability, so it is never negative."
)
def negative(logits_BTV, targets_BT, mask_BT):
    counts_BT = mask_BT != 0
    total = jnp.sum(careful_nll(logits_BTV, targets_BT, counts_BT))
    return -total, jnp.sum(counts_BT, dtype=jnp.float32)


@cross_entropy.mutant(
    "You return the logarithm of the normaliser alone. The loss is that minus the target's logit."
)
def normaliser_alone(logits_BTV, targets_BT, mask_BT):
    counts_BT = mask_BT != 0
    loss = lambda x, targets: jax.nn.logsumexp(x, axis=-1)  # noqa: E731
    total = jnp.sum(careful_nll(logits_BTV, targets_BT, counts_BT, loss))
    return total, jnp.sum(counts_BT, dtype=jnp.float32)


@cross_entropy.mutant(
    "Your largest logit is subtracted before the exponentials and not added again after the "
    "logarithm. The target's logit must be compared with a normaliser of the same scale."
)
def maximum_not_added_again(logits_BTV, targets_BT, mask_BT):
    def loss(x, targets):
        top = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
        target = jnp.take_along_axis(x, targets[..., None], axis=-1)[..., 0]
        return jnp.log(jnp.sum(jnp.exp(x - top), axis=-1)) - target

    counts_BT = mask_BT != 0
    total = jnp.sum(careful_nll(logits_BTV, targets_BT, counts_BT, loss))
    return total, jnp.sum(counts_BT, dtype=jnp.float32)


@cross_entropy.mutant(
    "You take the logarithm to base 2. A loss in nats takes the natural logarithm."
)
def in_bits(logits_BTV, targets_BT, mask_BT):
    counts_BT = mask_BT != 0
    total = jnp.sum(careful_nll(logits_BTV, targets_BT, counts_BT)) / np.log(2)
    return total, jnp.sum(counts_BT, dtype=jnp.float32)


@cross_entropy.mutant("You return the count first. The sum comes first, then the count.")
def swapped(logits_BTV, targets_BT, mask_BT):
    counts_BT = mask_BT != 0
    total = jnp.sum(careful_nll(logits_BTV, targets_BT, counts_BT))
    return jnp.sum(counts_BT, dtype=jnp.float32), total


@cross_entropy.mutant(
    "You shift the targets by one position. They are given as they are: the target of a position is "
    "under the same index."
)
def shifted_targets(logits_BTV, targets_BT, mask_BT):
    counts_BT = mask_BT != 0
    total = jnp.sum(careful_nll(logits_BTV[:, :-1], targets_BT[:, 1:], counts_BT[:, 1:]))
    return total, jnp.sum(counts_BT, dtype=jnp.float32)


@cross_entropy.mutant(
    "With nothing to predict your count is 1. The count is reported as it is; it is the caller who "
    "must not divide by 0."
)
def at_least_one(logits_BTV, targets_BT, mask_BT):
    counts_BT = mask_BT != 0
    total = jnp.sum(careful_nll(logits_BTV, targets_BT, counts_BT))
    return total, jnp.maximum(jnp.sum(counts_BT, dtype=jnp.float32), 1.0)


@cross_entropy.mutant(
    "You ignore the mask in the sum: padding is counted as text. Leave out the loss of every "
    "position whose mask is 0."
)
def sums_the_padding(logits_BTV, targets_BT, mask_BT):
    loss_BT = nll(logits_BTV.astype(jnp.float32), targets_BT)
    return jnp.sum(loss_BT), jnp.sum(mask_BT != 0, dtype=jnp.float32)


# ----------------------------------------------------------------------------------- donation

donation = Exercise(
    "06.donation",
    title="A step that donates its memory",
    function="make_donated_step",
    minutes=20,
    points=10,
    statement="""
`momentum_update` does the arithmetic of one step. Turn it into a training step: write
`make_donated_step(loss, learning_rate)`, which returns a **jitted** function
`(state, batch) -> (new state, metrics)` that writes the new state into the memory of the old one.

- After a step every array of the old state is deleted. The batch is not, because the caller may use
  it again.
- The compiled program reuses *all* the bytes of the state. It can write an array over another one
  only if both have the same shape and dtype, and parameters may be bfloat16.
- The new state has the structure, shapes and dtypes of the old one, so the second step reuses the
  program of the first.
- The metrics are read late, after further steps have been dispatched. So none of them may be an
  array that a later step deletes. `metrics["step"]` is the number of steps taken, an int32.
- Return the result of `jax.jit`, not a Python function around it: a wrapper cannot be lowered and
  inspected, and a copy made in it costs the memory that you wanted to save.
""",
    hints=(
        "What does `jax.jit` take as `donate_argnums`? And which of the two arguments does "
        "the caller no longer need?",
        "`momentum_update` returns float32 parameters. If the state holds bfloat16 ones, none"
        " of the old memory fits the new ones. The step's number goes into both the state and"
        " the metrics: return it twice from the jitted function, where each output gets an "
        "array of its own.",
        "Define `update(state, batch)` inside. Call `momentum_update`, convert each parameter to "
        "the dtype of the old one with `jax.tree.map`, add 1 to `state['step']`, return the new "
        "dictionary and the metrics. Then `return jax.jit(update, donate_argnums=0)`.",
    ),
)


class Regression:
    """A least-squares loss with ragged parameters of two dtypes; counts its traces."""

    def __init__(self, rng, features=7):
        self.rng, self.features, self.traces = rng, features, 0

    def loss(self, params, batch):
        self.traces += 1
        hidden = jnp.tanh(batch["x"] @ params["w"].astype(jnp.float32) + params["b"])
        error = hidden @ params["out"].astype(jnp.float32) - batch["y"]
        return jnp.mean(error**2 * batch["weight"])

    def state(self):
        F = self.features
        shapes = {"w": (F, 5), "b": (5,), "out": (5,)}
        dtypes = {"w": jnp.bfloat16, "b": jnp.float32, "out": jnp.bfloat16}
        draw = lambda s: self.rng.normal(size=s)  # noqa: E731
        params = {k: jnp.asarray(draw(s), dtypes[k]) for k, s in shapes.items()}
        velocity = {k: jnp.asarray(draw(s) * 0.1, jnp.float32) for k, s in shapes.items()}
        step = jnp.asarray(int(self.rng.integers(3, 99)), jnp.int32)
        return {"params": params, "velocity": velocity, "step": step}

    def batch(self, B=6):
        # Integers among the batch: nothing in the output could use their memory.
        x = self.rng.normal(size=(B, self.features))
        return {
            "x": jnp.asarray(x, jnp.float32),
            "y": jnp.asarray(self.rng.normal(size=B), jnp.float32),
            "weight": jnp.asarray(self.rng.integers(0, 2, B), jnp.int32),
        }


def expected_step(problem, state, batch, learning_rate):
    """The new state and metrics as NumPy arrays, from a step that donates nothing."""
    loss = lambda p: problem.loss(p, batch)  # noqa: E731
    value, grads = jax.value_and_grad(loss)(state["params"])
    grads = {k: np.asarray(g, np.float32) for k, g in grads.items()}
    velocity = {k: 0.9 * np.asarray(v) + grads[k] for k, v in state["velocity"].items()}
    params = {
        k: np.asarray(p, np.float32) - learning_rate * velocity[k]
        for k, p in state["params"].items()
    }
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    metrics = {"loss": float(value), "grad_norm": norm, "step": int(state["step"]) + 1}
    return {"params": params, "velocity": velocity, "step": int(state["step"]) + 1}, metrics


def quietly(step, *args):
    """The step's result and the warnings it raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = step(*args)
    return result, [str(w.message) for w in caught]


@donation.check("the step is a step of momentum")
def _(fn, t):
    problem, rate = Regression(t.rng), float(t.rng.uniform(0.1, 0.5))
    state, batch = problem.state(), problem.batch()
    step = fn(problem.loss, rate)
    want_state, want_metrics = expected_step(problem, state, batch, rate)
    (new, metrics), _ = quietly(step, state, batch)
    for name in ("velocity", "params"):
        for key, want in want_state[name].items():
            rtol = 1e-2 if name == "params" else 1e-4
            t.close(new[name][key], want, rtol=rtol, atol=1e-3, why=f"{name}[{key!r}]")
    t.equal(int(new["step"]), want_state["step"], why="the step in the new state")
    t.equal(sorted(metrics), sorted(want_metrics), why="the names of the metrics")
    for key, want in want_metrics.items():
        t.close(metrics[key], want, rtol=1e-3, why=f"metrics[{key!r}]")


@donation.check("the new state has the dtypes of the old one")
def _(fn, t):
    problem = Regression(t.rng)
    state, batch = problem.state(), problem.batch()
    want = jax.tree.map(lambda x: str(x.dtype), state)
    (new, metrics), _ = quietly(fn(problem.loss, 0.05), state, batch)
    t.equal(jax.tree.map(lambda x: str(x.dtype), new), want, why="dtypes")
    t.equal(str(metrics["step"].dtype), "int32", why="the dtype of metrics['step']")


@donation.check("four steps, one trace")
def _(fn, t):
    problem = Regression(t.rng)
    state, step = problem.state(), fn(problem.loss, 0.05)
    for _ in range(4):
        (state, _), _ = quietly(step, state, problem.batch())
    t.equal(problem.traces, 1, why="how often the loss was traced")


@donation.check("metrics can be read after later steps")
def _(fn, t):
    problem = Regression(t.rng)
    state, step, kept = problem.state(), fn(problem.loss, 0.05), []
    begun = int(state["step"])
    for _ in range(4):
        (state, metrics), _ = quietly(step, state, problem.batch())
        kept.append(metrics)
    gone = sorted({k for m in kept for k, v in m.items() if getattr(v, "is_deleted", bool)()})
    t.equal(gone, [], why="metrics that a later step has deleted")
    t.equal([int(m["step"]) for m in kept], list(range(begun + 1, begun + 5)), why="their steps")


@donation.check("the step is what jax.jit returned")
def _(fn, t):
    step = fn(Regression(t.rng).loss, 0.05)
    t.true(hasattr(step, "lower"), why="the step has no method `lower`: it is a Python function")


@donation.check("the batch is not given away")
def _(fn, t):
    problem = Regression(t.rng)
    state, batch, step = problem.state(), problem.batch(), fn(problem.loss, 0.05)
    (state, _), said = quietly(step, state, batch)
    unusable = [text.split("\n")[0] for text in said if "not usable" in text]
    t.equal(unusable, [], why="JAX warned about an array that was donated for nothing")
    t.true(not any(x.is_deleted() for x in jax.tree.leaves(batch)), why="the batch was deleted")


@donation.check("the old state is deleted")
def _(fn, t):
    problem = Regression(t.rng)
    state, step = problem.state(), fn(problem.loss, 0.05)
    quietly(step, state, problem.batch())
    leaves = jax.tree_util.tree_leaves_with_path(state)
    alive = [jax.tree_util.keystr(path) for path, x in leaves if not x.is_deleted()]
    t.equal(alive, [], why="arrays of the old state that still exist")


@donation.check("the compiled program reuses every byte of the state")
def _(fn, t):
    problem = Regression(t.rng)
    state, batch = problem.state(), problem.batch()
    compiled = t.compiled(fn(problem.loss, 0.05), state, batch)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    t.equal(compiled.memory_analysis().alias_size_in_bytes, size, why="bytes that are reused")
    t.true("input_output_alias" in compiled.as_text(), why="the HLO has no input_output_alias")


def momentum(loss, state, batch, learning_rate, keep_dtype=True):
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
    params = jax.tree.map(
        lambda p, v: (p.astype(jnp.float32) - learning_rate * v).astype(
            p.dtype if keep_dtype else jnp.float32
        ),
        state["params"],
        velocity,
    )
    step = state["step"] + 1
    metrics = {"loss": value, "grad_norm": optax.global_norm(grads), "step": step}
    return {"params": params, "velocity": velocity, "step": step}, metrics


@donation.mutant(
    "Nothing is donated, so the old and the new state exist side by side. Tell jax.jit which "
    "argument it may overwrite: donate_argnums=0."
)
def nothing_donated(loss, learning_rate):
    return jax.jit(lambda state, batch: momentum(loss, state, batch, learning_rate))


@donation.mutant(
    "You copy the state before you donate it. The copy is what gets overwritten; the old state "
    "stays, and nothing is saved. Hand over the state itself and return the jitted function."
)
def defensive_copy(loss, learning_rate):
    step = jax.jit(lambda s, b: momentum(loss, s, b, learning_rate), donate_argnums=0)
    return lambda state, batch: step(jax.tree.map(jnp.copy, state), batch)


@donation.mutant(
    "You donate the batch as well. No output has its shapes, so JAX warns that the buffers were"
    " not usable, and if one does fit, the caller's batch is gone. Donate only the state."
)
def batch_donated(loss, learning_rate):
    return jax.jit(lambda s, b: momentum(loss, s, b, learning_rate), donate_argnums=(0, 1))


@donation.mutant(
    "Parameters that were bfloat16 come back as float32. Their memory cannot be reused, and the "
    "next step is traced and compiled again for the new dtypes. Convert each to the dtype it had."
)
def float32_parameters(loss, learning_rate):
    return jax.jit(lambda s, b: momentum(loss, s, b, learning_rate, False), donate_argnums=0)


@donation.mutant(
    "metrics['step'] is the same array as in the new state. The next step takes that state and "
    "deletes it before the metric has been read. Make the metrics inside the jitted function: "
    "there each output gets memory of its own."
)
def metric_shared_with_the_state(loss, learning_rate):
    jitted = jax.jit(lambda s, b: momentum(loss, s, b, learning_rate), donate_argnums=0)

    def step(state, batch):
        new, metrics = jitted(state, batch)
        return new, metrics | {"step": new["step"]}

    return step


@donation.mutant(
    "You call jax.jit in every step, on a new function each time, so every step is traced and "
    "compiled. Jit once and return the result."
)
def jitted_in_every_step(loss, learning_rate):
    def step(state, batch):
        update = lambda s, b: momentum(loss, s, b, learning_rate)  # noqa: E731
        return jax.jit(update, donate_argnums=0)(state, batch)

    return step


@donation.mutant(
    "metrics['step'] is the step before this one: you read state['step'] before adding 1."
)
def step_before(loss, learning_rate):
    def update(state, batch):
        new, metrics = momentum(loss, state, batch, learning_rate)
        return new, metrics | {"step": state["step"]}

    return jax.jit(update, donate_argnums=0)


@donation.mutant(
    "The step's number never grows: the new state has that of the old one. Add 1 to it."
)
def never_counts(loss, learning_rate):
    def update(state, batch):
        new, metrics = momentum(loss, state, batch, learning_rate)
        return new | {"step": state["step"]}, metrics | {"step": state["step"]}

    return jax.jit(update, donate_argnums=0)


@donation.mutant(
    "Your new state has the old velocity. `momentum_update` returns the new one as its second result."
)
def old_velocity(loss, learning_rate):
    def update(state, batch):
        new, metrics = momentum(loss, state, batch, learning_rate)
        return new | {"velocity": state["velocity"]}, metrics

    return jax.jit(update, donate_argnums=0)


@donation.mutant("You return the metrics first. The new state comes first, then the metrics.")
def metrics_first(loss, learning_rate):
    return jax.jit(lambda s, b: momentum(loss, s, b, learning_rate)[::-1], donate_argnums=0)


@donation.mutant(
    "You donate the batch, argument 1. It is the state, argument 0, that the caller no longer needs."
)
def only_the_batch_donated(loss, learning_rate):
    return jax.jit(lambda s, b: momentum(loss, s, b, learning_rate), donate_argnums=1)


@donation.mutant(
    "Your new state lacks a part of the old one. It has the same three keys, so that it can go into "
    "the next step."
)
def state_without_its_step(loss, learning_rate):
    def update(state, batch):
        new, metrics = momentum(loss, state, batch, learning_rate)
        return {"params": new["params"], "velocity": new["velocity"]}, metrics

    return jax.jit(update, donate_argnums=0)


# --------------------------------------------------------------------------------- accumulate

accumulate = Exercise(
    "06.accumulate",
    title="Accumulation that weighs tokens equally",
    function="accumulated_gradient",
    minutes=25,
    points=10,
    statement="""
Write `accumulated_gradient(loss_sum, params, batch, microbatches)`. `loss_sum(params, part)`
returns the summed loss of some rows and their number of target tokens. Return the loss per target
token of the **whole** batch and its gradient, but process only one microbatch at a time.

- The result equals that of the whole batch at once, whatever the counts: some microbatches are
  full, some nearly empty, some have no target at all.
- Add in float32 and return a float32 gradient, even for bfloat16 parameters.
- A batch without any target gives a loss of 0 and a gradient of zeros.
- Use `jax.lax.scan`: the program is as large for 64 microbatches as for two, and only one
  microbatch's activations and gradients are alive at a time, in addition to the sums.
- If `microbatches` doesn't divide the number of rows, raise a `ValueError` that names both numbers.
""",
    hints=(
        "Write the loss of the whole batch as a fraction. Which part of it can be added up "
        "microbatch by microbatch, and which is computed only once?",
        "`loss_sum` returns two numbers and only the first is differentiated: "
        "`jax.value_and_grad(..., has_aux=True)`. The scan's carry is (sum of losses, sum of "
        "counts, sum of gradients), all float32.",
        "Reshape each array to [M, B // M, ...] and scan over it. In the body: `(total, count), "
        "grads = jax.value_and_grad(loss_sum, has_aux=True)(params, part)`; add all three to the "
        "carry. After the scan multiply by `1 / jnp.maximum(count, 1)`.",
    ),
    forbid=("minitext.training.step",),
)


class TokenModel:
    """A bigram model whose loss is a sum over masked tokens; notes how often it was traced."""

    def __init__(self, rng, vocab=9, width=4, dtype=jnp.float32):
        self.traces = 0
        self.params = {
            "embed": jnp.asarray(rng.normal(size=(vocab, width)), dtype),
            "out": [jnp.asarray(rng.normal(size=(width, vocab)), dtype), jnp.zeros(vocab, dtype)],
        }
        self.rng, self.vocab = rng, vocab

    def loss_sum(self, params, part):
        self.traces += 1
        hidden = jnp.tanh(params["embed"].astype(jnp.float32)[part["tokens"]])
        weight, bias = (x.astype(jnp.float32) for x in params["out"])
        loss = optax.softmax_cross_entropy_with_integer_labels(
            hidden @ weight + bias, part["targets"]
        )
        return jnp.sum(loss * part["mask"]), jnp.sum(part["mask"])

    def batch(self, counts, T=10):
        """One row for each entry of counts: that many target tokens."""
        B = len(counts)
        draw = lambda: self.rng.integers(0, self.vocab, (B, T)).astype(np.int32)  # noqa: E731
        mask = (np.arange(T) < np.asarray(counts)[:, None]).astype(np.float32)
        # Rows with few targets are unlike the others, so that a wrong weight shows.
        tokens = np.where(np.asarray(counts)[:, None] > T // 2, draw(), 0).astype(np.int32)
        return {"tokens": tokens, "targets": draw(), "mask": mask}

    def whole(self, batch):
        def mean(params):
            total, count = self.loss_sum(params, batch)
            return total / count

        params = jax.tree.map(lambda p: p.astype(jnp.float32), self.params)
        return jax.jit(jax.value_and_grad(mean))(params)


def compare_with_whole(fn, t, model, batch, microbatches, why, rtol=2e-5, atol=2e-6):
    loss, grads = fn(model.loss_sum, model.params, batch, microbatches)
    want_loss, want_grads = model.whole(batch)
    # Together: two mistakes may agree in the loss alone.
    got = {"loss": loss, "the gradient": grads}
    want = {"loss": want_loss, "the gradient": want_grads}
    t.close(got, want, rtol=rtol, atol=atol, why=why, dtype=np.float32)


def scans(jaxpr):
    """The scans in a jaxpr, and in those within it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from scans(inner)


@accumulate.check("equal microbatches")
def _(fn, t):
    model = TokenModel(t.rng)
    batch = model.batch([10] * 12)
    for microbatches in (1, 6):
        compare_with_whole(fn, t, model, batch, microbatches, f"{microbatches} microbatches")


@accumulate.check("microbatches with few and with many target tokens")
def _(fn, t):
    model = TokenModel(t.rng)
    batch = model.batch([10, 10, 10, 9, 10, 10, 1, 2, 1, 1, 2, 1])
    for microbatches in (2, 12):
        compare_with_whole(fn, t, model, batch, microbatches, f"{microbatches} microbatches")


@accumulate.check("a microbatch without target tokens")
def _(fn, t):
    model = TokenModel(t.rng)
    batch = model.batch([10, 7, 0, 0, 1, 3, 0, 0])
    compare_with_whole(fn, t, model, batch, 4, "two of four microbatches are empty")


@accumulate.check("nothing to predict at all")
def _(fn, t):
    model = TokenModel(t.rng)
    loss, grads = fn(model.loss_sum, model.params, model.batch([0] * 6), 3)
    t.close(loss, 0.0, atol=0, why="the loss")
    t.close(grads, jax.tree.map(jnp.zeros_like, model.params), atol=0, why="the gradient")


@accumulate.check("rows of other arrays, one row each, and a batch that is no dictionary")
def _(fn, t):
    w = jnp.asarray(t.rng.normal(size=3), jnp.float32)
    x = t.rng.normal(size=(5, 3)).astype(np.float32)
    weight = np.asarray([1, 0, 4, 2, 1], np.float32)

    def loss_sum(w, part):
        x, (weight,) = part
        return jnp.sum(weight * (x @ w) ** 2), jnp.sum(weight)

    loss, grad = fn(loss_sum, w, (x, [weight]), 5)
    y = x @ np.asarray(w)
    t.close(loss, (weight * y**2).sum() / 8, rtol=1e-5, why="the loss")
    t.close(grad, (2 * weight * y) @ x / 8, rtol=1e-5, atol=1e-5, why="the gradient")


@accumulate.check("bfloat16 parameters, float32 sums")
def _(fn, t):
    model = TokenModel(t.rng, dtype=jnp.bfloat16)
    batch = model.batch([int(n) for n in t.rng.integers(1, 11, 256)])
    loss, grads = fn(model.loss_sum, model.params, batch, 256)
    kinds = jax.tree.map(lambda g: str(g.dtype), grads)
    t.equal(kinds, jax.tree.map(lambda g: "float32", grads), why="the dtypes of the gradient")
    want_loss, want_grads = model.whole(batch)
    t.close(loss, want_loss, rtol=1e-4, why="the loss")
    # Each microbatch's gradient comes in bfloat16, so it is good to 8 bits; the sum must stay so.
    t.close(grads, want_grads, rtol=5e-3, atol=5e-4, why="the gradient")


@accumulate.check("the program does not grow with the number of microbatches")
def _(fn, t):
    traced = []
    for microbatches in (2, 16):
        model = TokenModel(t.rng)
        run = lambda p, b, m=model, n=microbatches: fn(m.loss_sum, p, b, n)  # noqa: E731
        names = t.primitives(run, model.params, model.batch([10] * 32))
        traced.append(model.traces)
        t.true(
            "scan" in names, why=f"there is no scan in the jaxpr for {microbatches} microbatches"
        )
    t.true(traced[1] <= traced[0], why=f"loss_sum was traced {traced[1]} times for 16 microbatches")
    model = TokenModel(t.rng)
    run = lambda p, b: fn(model.loss_sum, p, b, 16)  # noqa: E731
    jaxpr = jax.make_jaxpr(run)(model.params, model.batch([10] * 32)).jaxpr
    most = max(eqn.params["unroll"] for eqn in scans(jaxpr))
    t.true(most <= 4, why=f"a scan is unrolled {most} times for 16 microbatches", observed=most)


@accumulate.check("one microbatch's activations at a time")
def _(fn, t):
    model = TokenModel(t.rng, vocab=64, width=32)
    batch = model.batch([32] * 64, T=32)
    size = {}
    for microbatches in (1, 16):
        run = lambda p, b, n=microbatches: fn(model.loss_sum, p, b, n)  # noqa: E731
        size[microbatches] = t.temp_bytes(run, model.params, batch)
    jaxpr = jax.make_jaxpr(run)(model.params, batch).jaxpr
    steps = " and ".join(str(eqn.params["length"]) for eqn in scans(jaxpr))
    why = f"temporary memory: {size[1]:,} bytes for 1 microbatch, {size[16]:,} for 16"
    why += f"; your scans have {steps} steps for 16 microbatches of 4 rows"
    t.true(size[16] < 0.5 * size[1], why=why)


@accumulate.check("one microbatch's gradient at a time")
def _(fn, t):
    model = TokenModel(t.rng, vocab=256, width=64)
    most = sum(p.nbytes for p in jax.tree.leaves(model.params))
    run = lambda p, b: fn(model.loss_sum, p, b, 16)  # noqa: E731
    jaxpr = jax.make_jaxpr(run)(model.params, model.batch([2] * 16, T=2)).jaxpr
    kept = [v.aval for eqn in scans(jaxpr) for v in eqn.outvars[eqn.params["num_carry"] :]]
    size = sum(aval.size * aval.dtype.itemsize for aval in kept)
    text = f"your scan returns {size:,} bytes for all microbatches; one gradient is {most:,}"
    t.true(size < 4 * most, why=text, observed="stacked")


@accumulate.check("rows that cannot be split are refused")
def _(fn, t):
    model = TokenModel(t.rng)
    batch = model.batch([10] * 10)
    args = (model.loss_sum, model.params, batch, 4)
    t.raises(ValueError, fn, *args, match="10", why="10 rows in 4 microbatches")
    t.raises(ValueError, fn, *args, match="4", why="10 rows in 4 microbatches")


def split_rows(batch, M):
    B = jax.tree.leaves(batch)[0].shape[0]
    if B % M:
        raise ValueError(f"{B} rows in {M} microbatches")
    return jax.tree.map(lambda x: x.reshape(M, B // M, *x.shape[1:]), batch)


def zeros_like(params, dtype=jnp.float32):
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype or p.dtype), params)
    return jnp.zeros(()), jnp.zeros(()), zeros


def summed(loss_sum, params, parts, weigh=lambda total, count: 1.0, dtype=jnp.float32, unroll=1):
    """Sums over microbatches of weigh(...) times loss and gradient, and of the counts."""

    def add(sums, part):
        (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, part)
        w = weigh(total, count)
        new = (w * total, count, jax.tree.map(lambda g: w * g, grads))
        return jax.tree.map(lambda s, n: s + n.astype(s.dtype), sums, new), None

    return jax.lax.scan(add, zeros_like(params, dtype), parts, unroll=unroll)[0]


def scaled(grads, share):
    return jax.tree.map(lambda g: (g * share).astype(jnp.float32), grads)


@accumulate.mutant(
    "You average each microbatch and then average the averages. A token in a microbatch of 3 then "
    "counts as much as a hundred in one of 300. Add up sums, and divide once by the total count."
)
def mean_of_means(loss_sum, params, batch, microbatches):
    parts = split_rows(batch, microbatches)
    weigh = lambda _, count: 1.0 / jnp.maximum(count, 1.0)  # noqa: E731
    total, _, grads = summed(loss_sum, params, parts, weigh)
    return total / microbatches, scaled(grads, 1.0 / microbatches)


@accumulate.mutant(
    "You unroll the scan, so the program holds every microbatch again. It takes as long to compile as a loop "
    "written out, and the compiler may run microbatches side by side: leave `unroll` at 1."
)
def unrolled(loss_sum, params, batch, microbatches):
    parts = split_rows(batch, microbatches)
    total, count, grads = summed(loss_sum, params, parts, unroll=True)
    return total / jnp.maximum(count, 1.0), scaled(grads, 1.0 / jnp.maximum(count, 1.0))


@accumulate.mutant(
    "Your scan returns every microbatch's gradient, and you add them up afterwards. M gradients are M times the "
    "parameters' memory: add each to a sum that the scan carries."
)
def stacked(loss_sum, params, batch, microbatches):
    def one(carry, part):
        (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, part)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return carry, (jnp.float32(total), jnp.float32(count), grads)

    found = jax.lax.scan(one, None, split_rows(batch, microbatches))[1]
    total, count, grads = jax.tree.map(lambda x: jnp.sum(x, axis=0), found)
    return total / jnp.maximum(count, 1.0), scaled(grads, 1.0 / jnp.maximum(count, 1.0))


@accumulate.mutant(
    "An empty microbatch gives 0 / 0: you divide by the count of each microbatch. Divide once, "
    "after the scan, by the count of all of them."
)
def divides_by_nothing(loss_sum, params, batch, microbatches):
    parts = split_rows(batch, microbatches)
    total, _, grads = summed(loss_sum, params, parts, lambda _, count: 1.0 / count)
    return total / microbatches, scaled(grads, 1.0 / microbatches)


@accumulate.mutant(
    "The loss is right, but the gradient is that of the sum: it was never divided by the number "
    "of target tokens, so the step's size would depend on how full the batch is."
)
def gradient_not_divided(loss_sum, params, batch, microbatches):
    total, count, grads = summed(loss_sum, params, split_rows(batch, microbatches))
    return total / jnp.maximum(count, 1.0), grads


@accumulate.mutant(
    "You return sums. Divide the loss and the gradient by the number of target tokens, once, at the end."
)
def never_divided(loss_sum, params, batch, microbatches):
    total, _, grads = summed(loss_sum, params, split_rows(batch, microbatches))
    return total, grads


@accumulate.mutant(
    "The gradient is right, but you return the summed loss. It is asked for per target token."
)
def loss_not_divided(loss_sum, params, batch, microbatches):
    total, count, grads = summed(loss_sum, params, split_rows(batch, microbatches))
    return total, scaled(grads, 1.0 / jnp.maximum(count, 1.0))


@accumulate.mutant(
    "You divide by the number of microbatches. The sum over all of them is divided by the number of "
    "target tokens, which `loss_sum` returns."
)
def divided_by_microbatches(loss_sum, params, batch, microbatches):
    total, _, grads = summed(loss_sum, params, split_rows(batch, microbatches))
    return total / microbatches, scaled(grads, 1.0 / microbatches)


@accumulate.mutant(
    "You divide by the number of rows. A row has many target tokens, or none: divide by the count "
    "that `loss_sum` returns, added up."
)
def divided_by_rows(loss_sum, params, batch, microbatches):
    B = jax.tree.leaves(batch)[0].shape[0]
    total, _, grads = summed(loss_sum, params, split_rows(batch, microbatches))
    return total / B, scaled(grads, 1.0 / B)


@accumulate.mutant(
    "Only one microbatch reaches your result: its sums replace those before. Add them to the carry."
)
def only_the_last(loss_sum, params, batch, microbatches):
    parts = jax.tree.map(lambda x: x[-1:], split_rows(batch, microbatches))
    total, count, grads = summed(loss_sum, params, parts)
    return total / jnp.maximum(count, 1.0), scaled(grads, 1.0 / jnp.maximum(count, 1.0))


@accumulate.mutant(
    "A batch without any target token gives nan: 0 / 0. Divide by jnp.maximum(count, 1)."
)
def nan_where_nothing_counts(loss_sum, params, batch, microbatches):
    total, count, grads = summed(loss_sum, params, split_rows(batch, microbatches))
    return total / count, scaled(grads, 1.0 / count)


@accumulate.mutant(
    "You add gradients in the parameters' own dtype. A bfloat16 sum stops growing after some "
    "hundred terms, when each new one is less than half a unit in its last place. Start the carry "
    "from float32 zeros and convert each gradient before you add it."
)
def sums_in_bfloat16(loss_sum, params, batch, microbatches):
    parts = split_rows(batch, microbatches)
    total, count, grads = summed(loss_sum, params, parts, dtype=None)
    share = 1.0 / jnp.maximum(count, 1.0)
    return total * share, scaled(grads, share)


@accumulate.mutant(
    "You loop in Python: the program holds one copy of the loss for each microbatch, and takes "
    "longer to compile the more there are. Use jax.lax.scan."
)
def python_loop(loss_sum, params, batch, microbatches):
    parts = split_rows(batch, microbatches)
    sums = zeros_like(params)
    for i in range(microbatches):
        part = jax.tree.map(lambda x, i=i: x[i], parts)
        (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, part)
        sums = jax.tree.map(lambda s, n: s + n.astype(jnp.float32), sums, (total, count, grads))
    share = 1.0 / jnp.maximum(sums[1], 1.0)
    return sums[0] * share, scaled(sums[2], share)


@accumulate.mutant(
    "You silently leave out the rows that do not fill a microbatch. Lost data is a bug that is "
    "hard to find: raise a ValueError with both numbers."
)
def drops_the_rest(loss_sum, params, batch, microbatches):
    B = jax.tree.leaves(batch)[0].shape[0]
    kept = jax.tree.map(lambda x: x[: B - B % microbatches], batch)
    total, count, grads = summed(loss_sum, params, split_rows(kept, microbatches))
    share = 1.0 / jnp.maximum(count, 1.0)
    return total * share, scaled(grads, share)


# --------------------------------------------------------------------------------------- loop

loop = Exercise(
    "06.loop",
    title="Log one step while the next one runs",
    function="train_loop",
    minutes=20,
    points=10,
    statement="""
Write the loop: `train_loop(step, state, batches, start, steps, log)` takes steps `start + 1` to
`steps` and returns the last state. `step` returns at once, with promises; `float(metric)` waits.

- Read the metrics of a step **after** the next step was dispatched and **before** the one after
  that. If you read earlier, the device sits idle while Python writes. If you read later, metrics
  pile up, and a run that dies loses them.
- `log(number, values)` is called once for each step, in order, including the last one, with the
  step's number and a dict of Python floats.
- Take exactly `steps - start` batches. One batch too many would be lost, because the saved data
  position would be one ahead of the state. If `start == steps`, take nothing and log nothing.
- A batch takes memory: at most two may wait for their steps, that of the next step and one more.
""",
    hints=(
        "Keep the metrics of the step before this one in a variable. What is in it before the "
        "first step, and after the last?",
        "Each iteration dispatches first, then logs the pending metrics, then makes its own "
        "metrics pending, together with their step number. After the loop one is left.",
        "`for number in range(start + 1, steps + 1)`: `state, metrics = step(state, "
        "next(batches))`; if something is pending, log it; `pending = (number, metrics)`. "
        "After the loop log the pending metrics, if there are any. `{name: float(value) for "
        "name, value in metrics.items()}`.",
    ),
)


class Metric:
    """A scalar that notes when it is waited for."""

    def __init__(self, events, number, value):
        self.events, self.number, self.value = events, number, value

    def _wait(self):
        self.events.append(("read", self.number))
        return self

    def __float__(self):
        return float(self._wait().value)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._wait().value, dtype)

    def item(self):
        return float(self)

    def tolist(self):
        return float(self)

    def block_until_ready(self):
        return self._wait()


class Promise:
    """A leaf of the state, which notes when somebody waits for it."""

    def __init__(self, events, number):
        self.events, self.number = events, number

    def block_until_ready(self):
        self.events.append(("wait", self.number))
        return self


class Recorder:
    """A step, batches and a log that note the order of what is done with them."""

    def __init__(self, rng, start, total=100):
        self.events, self.logged, self.taken = [], [], 0
        self.values = rng.normal(size=start + total + 2)
        self.start = start

    def batches(self):
        while True:
            self.taken += 1
            self.events.append(("take", self.taken))
            yield self.start + self.taken

    def step(self, state, batch):
        number = state["taken"] + 1
        self.events.append(("dispatch", number))
        value = float(self.values[number])
        metrics = {"loss": Metric(self.events, number, value)}
        metrics["grad_norm"] = Metric(self.events, number, 2 * value)
        done = Promise(self.events, number)
        return {"taken": number, "seen": [*state["seen"], batch], "done": done}, metrics

    def log(self, number, values):
        self.events.append(("log", number))
        self.logged.append((number, values))

    def run(self, fn, steps):
        state = {"taken": self.start, "seen": list(range(1, self.start + 1))}
        return fn(self.step, state, self.batches(), self.start, steps, self.log)


@loop.check("every step is taken, on a batch of its own")
def _(fn, t):
    for start, steps in ((0, 5), (7, 10), (3, 4)):
        r = Recorder(t.rng, start)
        state = r.run(fn, steps)
        t.equal(state["taken"], steps, why=f"the last state's step, from {start} to {steps}")
        t.equal(state["seen"], list(range(1, steps + 1)), why="the batches, in order")


@loop.check("each step is logged once, in order, under its own number")
def _(fn, t):
    for start, steps in ((0, 6), (41, 44), (0, 1)):
        r = Recorder(t.rng, start)
        r.run(fn, steps)
        t.equal([n for n, _ in r.logged], list(range(start + 1, steps + 1)), why="numbers logged")
        for number, values in r.logged:
            want = {"loss": r.values[number], "grad_norm": 2 * r.values[number]}
            t.equal(sorted(values), sorted(want), why=f"names of the metrics of step {number}")
            got = [float(values[k]) for k in sorted(values)]
            t.close(got, [want[k] for k in sorted(want)], why=f"values of step {number}")


@loop.check("what is logged are Python floats")
def _(fn, t):
    r = Recorder(t.rng, 0)
    r.run(fn, 3)
    kinds = sorted({type(v).__name__ for _, values in r.logged for v in values.values()})
    t.equal(kinds, ["float"], why="types of the logged values")
    t.equal(len(json.dumps(r.logged)) > 0, True, why="they can be written as JSON")


@loop.check("a step is read after the next was dispatched")
def _(fn, t):
    r = Recorder(t.rng, 2)
    r.run(fn, 9)
    early = sorted(
        {
            number
            for kind, number in r.events
            if kind == "read"
            and number < 9
            and r.events.index(("dispatch", number + 1)) > r.events.index(("read", number))
        }
    )
    t.equal(
        early, [], why="steps whose metrics were waited for before the next step was dispatched"
    )


@loop.check("a state is never waited for while there are steps to come")
def _(fn, t):
    r = Recorder(t.rng, 0)
    r.run(fn, 7)
    waited = sorted({number for kind, number in r.events if kind == "wait" and number < 7})
    t.equal(waited, [], why="steps whose state was waited for")


@loop.check("and before the one after that")
def _(fn, t):
    r = Recorder(t.rng, 0)
    r.run(fn, 8)
    late = {}
    for number in range(1, 7):
        before = r.events[: r.events.index(("log", number))] if ("log", number) in r.events else []
        ahead = [later for kind, later in before if kind == "dispatch" and later > number]
        if len(ahead) != 1:
            late[number] = len(ahead)
    why = "how many later steps had been dispatched when a step was logged, where it was not 1"
    t.equal(late, {}, why=why)


@loop.check("not one batch too many")
def _(fn, t):
    for start, steps in ((0, 4), (5, 6), (0, 0), (12, 12)):
        r = Recorder(t.rng, start)
        r.run(fn, steps)
        t.equal(r.taken, steps - start, why=f"batches taken from step {start} to {steps}")


@loop.check("not all batches at once")
def _(fn, t):
    r = Recorder(t.rng, 0)
    r.run(fn, 9)
    ahead, most = 0, 0
    for kind, _ in r.events:
        ahead += (kind == "take") - (kind == "dispatch")
        most = max(most, ahead)
    t.true(most <= 2, why=f"{most} batches were waiting for their steps", observed=most)


@loop.check("nothing to do")
def _(fn, t):
    r = Recorder(t.rng, 30)
    state = r.run(fn, 30)
    t.equal(state["taken"], 30, why="the state")
    t.equal(r.events, [], why="steps dispatched or logged")


def floats(metrics):
    return {name: float(value) for name, value in metrics.items()}


def one_step_behind(step, state, batches, start, steps, log):
    pending = None
    for number in range(start + 1, steps + 1):
        state, metrics = step(state, next(batches))
        if pending is not None:
            log(number - 1, floats(pending))
        pending = metrics
    if pending is not None:
        log(steps, floats(pending))
    return state


@loop.mutant(
    "You take all batches before the first step. Nothing else in memory would be as large as the "
    "batches of a long run: call `next` in the loop."
)
def all_batches_first(step, state, batches, start, steps, log):
    taken = [next(batches) for _ in range(start, steps)]
    return one_step_behind(step, state, iter(taken), start, steps, log)


@loop.mutant(
    "You wait for the state of the step that you have just dispatched, with `block_until_ready`. Then "
    "the device has nothing to do while Python writes. Only the metrics of the step before are needed."
)
def waits_for_the_state(step, state, batches, start, steps, log):
    def waiting(state, batch):
        state, metrics = step(state, batch)
        return jax.block_until_ready(state), metrics

    return one_step_behind(waiting, state, batches, start, steps, log)


@loop.mutant(
    "You read each step's metrics before you dispatch the next step. float() waits, so the device "
    "has nothing to do while Python writes the line. Keep the metrics for one step."
)
def reads_at_once(step, state, batches, start, steps, log):
    for number in range(start + 1, steps + 1):
        state, metrics = step(state, next(batches))
        log(number, floats(metrics))
    return state


@loop.mutant(
    "You keep all metrics until the end. Nothing is visible while the run goes on, and if it "
    "dies, nothing was written. One step behind is enough."
)
def reads_at_the_end(step, state, batches, start, steps, log):
    kept = []
    for number in range(start + 1, steps + 1):
        state, metrics = step(state, next(batches))
        kept.append((number, metrics))
    for number, metrics in kept:
        log(number, floats(metrics))
    return state


@loop.mutant(
    "The last step is never logged: when the loop ends its metrics are still pending. Log them "
    "after the loop."
)
def forgets_the_last(step, state, batches, start, steps, log):
    pending = None
    for number in range(start + 1, steps + 1):
        state, metrics = step(state, next(batches))
        if pending is not None:
            log(pending[0], floats(pending[1]))
        pending = number, metrics
    return state


@loop.mutant(
    "You log the metrics of one step under the number of the next. Keep the number together with "
    "the metrics."
)
def wrong_number(step, state, batches, start, steps, log):
    pending = None
    for number in range(start + 1, steps + 1):
        state, metrics = step(state, next(batches))
        if pending is not None:
            log(number, floats(pending))
        pending = metrics
    if pending is not None:
        log(steps + 1, floats(pending))
    return state


@loop.mutant(
    "You take a batch and then find that the run is over: `for batch in batches` has already "
    "called next. The data position that you would save is one batch ahead of the state. Count "
    "the steps, and call next only for a step that you take."
)
def one_batch_too_many(step, state, batches, start, steps, log):
    pending, number = None, start
    for batch in batches:
        number += 1
        if number > steps:
            break
        state, metrics = step(state, batch)
        if pending is not None:
            log(pending[0], floats(pending[1]))
        pending = number, metrics
    if pending is not None:
        log(pending[0], floats(pending[1]))
    return state


@loop.mutant(
    "You begin at step 1 whatever `start` is, so a resumed run trains too long and numbers its "
    "steps from 1 again. The first step is start + 1."
)
def ignores_start(step, state, batches, start, steps, log):
    return reads_behind(step, state, batches, 0, steps, log)


@loop.mutant(
    "You log the promises themselves, not numbers. Whoever writes them to a file has to wait for "
    "them, and they keep memory on the device. Turn them into floats first."
)
def logs_promises(step, state, batches, start, steps, log):
    return reads_behind(step, state, batches, start, steps, log, read=dict)


@loop.mutant(
    "You number the steps from `start`, not from start + 1. `start` steps were taken before, so the "
    "first one here is the next."
)
def numbers_from_start(step, state, batches, start, steps, log):
    earlier = lambda number, values: log(number - 1, values)  # noqa: E731
    return reads_behind(step, state, batches, start, steps, earlier)


@loop.mutant(
    "You take one step too few: `range(a, b)` ends before b. The step with the number `steps` is taken."
)
def one_step_too_few(step, state, batches, start, steps, log):
    return reads_behind(step, state, batches, start, max(start, steps - 1), log)


@loop.mutant("You take one step too many: the last one has the number `steps`.")
def one_step_too_many(step, state, batches, start, steps, log):
    return reads_behind(step, state, batches, start, steps + 1, log)


@loop.mutant(
    "You take `steps` steps from where the run is. `steps` is the number of the last step, so "
    "steps - start are left."
)
def takes_steps_more(step, state, batches, start, steps, log):
    return reads_behind(step, state, batches, start, start + steps, log)


@loop.mutant(
    "With start == steps there is nothing to log after the loop, and your last lines use what only "
    "the loop would have made."
)
def logs_nothing_at_the_end(step, state, batches, start, steps, log):
    pending = None
    for number in range(start + 1, steps + 1):
        state, metrics = step(state, next(batches))
        if pending is not None:
            log(pending[0], floats(pending[1]))
        pending = number, metrics
    log(number, floats(metrics))
    return state


@loop.mutant(
    "You return more than the state. Return the state after the last step, and nothing with it."
)
def returns_more(step, state, batches, start, steps, log):
    return reads_behind(step, state, batches, start, steps, log), steps


@loop.mutant("You log two steps behind. Dispatch a step, then log the one before it at once.")
def two_steps_behind(step, state, batches, start, steps, log):
    kept = []
    for number in range(start + 1, steps + 1):
        state, metrics = step(state, next(batches))
        kept.append((number, metrics))
        if len(kept) > 2:
            number, metrics = kept.pop(0)
            log(number, floats(metrics))
    for number, metrics in kept:
        log(number, floats(metrics))
    return state


def reads_behind(step, state, batches, start, steps, log, read=floats):
    pending = None
    for number in range(start + 1, steps + 1):
        state, metrics = step(state, next(batches))
        if pending is not None:
            log(pending[0], read(pending[1]))
        pending = number, metrics
    if pending is not None:
        log(pending[0], read(pending[1]))
    return state


# -------------------------------------------------------------------------------------- rerun

rerun = Exercise(
    "06.rerun",
    title="k steps and n steps are k + n steps",
    function="train_rows",
    minutes=35,
    points=10,
    statement="""
Write `train_rows(loss, optimizer, params, rows_RT, seed, steps, saved=None)`. It trains for `steps`
steps and returns the losses, as Python floats, and everything that is needed to go on. The stub's
docstring says which rows and which key belong to step i. The checks look at bit-equality:

- Two calls with equal arguments give equal losses and equal parameters, bit for bit, whatever was
  drawn from `np.random` in between. Another seed gives another run.
- Taking $k$ steps, and $n$ more from `saved`, gives the losses and the parameters of $k + n$ steps.
  This holds if the cut falls within an epoch, between two epochs, or before the first step; if
  there are several cuts; and if `saved` was written to a file and read back as NumPy arrays.
- `saved` can be used twice, and so can `params`: a call leaves its arguments unchanged.
- `saved` contains only arrays and numbers: no functions, no generators, no key objects.

Compile the step once, not again for each step. Your function keeps nothing between calls.
""",
    hints=(
        "List everything that differs between step 17 and step 18: parameters, the "
        "optimizer's moments and its count, the rows, the key. Which of them can be computed "
        "from `seed` and the number of the step, and which must be saved?",
        "Rows and key are functions of `seed` and i. So the only state is `params`, `opt_state` "
        "and i itself. `optimizer.init` belongs to a fresh run only.",
        "`saved = {'step': ..., 'params': ..., 'opt_state': ...}`. Start from "
        "`first = int(saved['step'])`, loop over `range(first, first + steps)`, and use "
        "`epoch, place = divmod(i, R // 4)`. Jit one `update(params, opt_state, rows, key)` and "
        "donate nothing.",
    ),
    seconds=120,
)


class NoisyFit:
    """A loss whose value depends on parameters, rows and key; and all that train_rows needs."""

    def __init__(self, rng, R=14, T=5, seed=None, optimizer=None, power=2):
        self.rows, self.power = rng.normal(size=(R, T)).astype(np.float32), power
        shapes = {"w": (T, 3), "b": (3,)}
        self.params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
        self.seed = int(rng.integers(1, 10**6)) if seed is None else seed
        self.optimizer = optimizer or optax.adam(0.05)
        self.traces = 0

    def loss(self, params, rows, key):
        self.traces += 1
        keep = jax.random.bernoulli(key, 0.7, (4, 3))
        hidden = jnp.tanh(rows @ params["w"] + params["b"]) * keep
        return jnp.mean((jnp.sum(hidden, axis=1) - rows[:, 0]) ** self.power)

    def call(self, fn, steps, saved=None, **changes):
        args = {"params": self.params, "rows": self.rows, "seed": self.seed} | changes
        return fn(
            self.loss, self.optimizer, args["params"], args["rows"], args["seed"], steps, saved
        )

    def expected(self, steps):
        """Losses and parameters from a plain loop that is not compiled as a whole."""
        params, opt_state, losses = self.params, self.optimizer.init(self.params), []
        R = len(self.rows)
        for i in range(steps):
            order = np.random.default_rng([self.seed, i // (R // 4)]).permutation(R)
            begin = 4 * (i % (R // 4))
            rows = self.rows[order[begin : begin + 4]]
            key = jax.random.fold_in(jax.random.key(self.seed), i)
            value, grads = jax.value_and_grad(self.loss)(params, rows, key)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(value))
        return losses, params


def to_numpy(tree):
    return jax.tree.map(np.array, tree)


@rerun.check("rows and key of each step")
def _(fn, t):
    R = int(t.rng.integers(9, 12))
    rows = np.arange(R, dtype=np.float32)[:, None]
    seed = int(t.rng.integers(1000))

    def of_rows(params, rows, key):
        return jnp.sum(rows[:, 0] * 16.0 ** jnp.arange(len(rows))) + 0 * params["w"]

    def of_key(params, rows, key):
        return jax.random.uniform(key) + 0 * params["w"]

    np.random.seed(int(t.rng.integers(1000)))  # an answer that draws from it is recognised
    losses = fn(of_rows, optax.sgd(0.1), {"w": jnp.zeros(())}, rows, seed, 4)[0]
    t.equal(len(losses), 4, why="the number of losses")
    orders = [np.random.default_rng([seed, e]).permutation(R) for e in (0, 1)]
    want = [orders[i // (R // 4)][4 * (i % (R // 4)) :][:4].tolist() for i in range(4)]
    got = [[int(x) // 16**j % 16 for j in range(4)] for x in np.nan_to_num(losses)]
    off = [i for i in range(4) if got[i] != want[i]]
    why = f"step {off[0]} takes the rows {got[off[0]]} of {R}, want {want[off[0]]}" if off else ""
    t.true(not off, why=why, observed=np.array(got))
    keys = fn(of_key, optax.sgd(0.1), {"w": jnp.zeros(())}, rows, seed, 4)[0]
    key, folded = jax.random.key(seed), jax.random.fold_in
    want = [float(jax.random.uniform(folded(key, i))) for i in range(4)]
    mistakes = {
        "Every step has the key of the seed": [float(jax.random.uniform(key))] * 4,
        "Each step has the key of the next one": [
            *want[1:],
            float(jax.random.uniform(folded(key, 4))),
        ],
        "The keys count the steps of an epoch": [want[i % (R // 4)] for i in range(4)],
        "The keys are those of the epochs": [want[i // (R // 4)] for i in range(4)],
        "Each key is split off the one before": split_off(key, 4, 0),
        "Each key is a part of the one before": split_off(key, 4, 1),
        "The seed's key is split into as many as there are steps": [
            float(jax.random.uniform(part)) for part in jax.random.split(key, 4)
        ],
    }
    why = f"numbers drawn from the keys of four steps, seed {seed}"
    t.close(keys, want, why=why, mistakes=mistakes)


def split_off(key, steps, own):
    """Numbers from keys that are split off one after another; `own` says which half the step has."""
    drawn = []
    for _ in range(steps):
        halves = jax.random.split(key)
        key = halves[1 - own]
        drawn.append(float(jax.random.uniform(halves[own])))
    return drawn


@rerun.check("the steps are those that seed and number define")
def _(fn, t):
    problem = NoisyFit(t.rng)
    losses, saved = problem.call(fn, 5)  # an epoch of three steps, and two steps of the next
    want, params = problem.expected(5)
    t.equal(len(losses), 5, why="the number of losses")
    kinds = sorted({type(value).__name__ for value in losses})
    t.equal(kinds, ["float"], why="the types of the losses")
    t.close(losses, want, rtol=1e-4, atol=1e-5, why="the losses of five steps")
    t.close(saved["params"], params, rtol=1e-3, atol=1e-4, why="the parameters after five steps")
    problem = NoisyFit(t.rng, optimizer=optax.sgd(0.02, momentum=0.5), power=4)
    losses, saved = problem.call(fn, 2)
    want, params = problem.expected(2)
    t.close(losses, want, rtol=1e-4, atol=1e-5, why="the losses of another problem and optimizer")
    t.close(saved["params"], params, rtol=1e-3, atol=1e-4, why="its parameters after two steps")


@rerun.check("again, bit for bit")
def _(fn, t):
    problem = NoisyFit(t.rng)
    first, saved = problem.call(fn, 5)
    want = to_numpy(saved["params"])
    np.random.seed(int(t.rng.integers(1000)))
    again, saved = problem.call(fn, 5)
    t.equal(again, first, why="losses of the second call")
    t.equal(to_numpy(saved["params"]), want, why="parameters of the second call")
    other = problem.call(fn, 5, seed=problem.seed + 1)[0]
    t.true(other != first, why="another seed gave the same losses")


def check_cuts(fn, t, problem, cuts, through=lambda saved: saved):
    """Runs sum(cuts) steps whole and in pieces; losses and parameters must be equal."""
    want, whole = problem.call(fn, sum(cuts))
    want_params = to_numpy(whole["params"])
    losses, saved = [], None
    for steps in cuts:
        part, saved = problem.call(fn, steps, saved)
        losses += part
        saved = through(saved)
    text = " + ".join(map(str, cuts))
    t.equal(losses, want, why=f"losses of {text} steps")
    t.equal(to_numpy(saved["params"]), want_params, why=f"parameters after {text} steps")


@rerun.check("cut within an epoch")
def _(fn, t):
    check_cuts(fn, t, NoisyFit(t.rng), (2, 3))


@rerun.check("cut between epochs, twice, and before the first step")
def _(fn, t):
    check_cuts(fn, t, NoisyFit(t.rng), (3, 4))
    check_cuts(fn, t, NoisyFit(t.rng, R=4), (0, 2, 1, 1))


@rerun.check("through a file")
def _(fn, t):
    problem = NoisyFit(t.rng)
    saved = problem.call(fn, 2)[1]
    odd = sorted(
        type(x).__name__
        for x in jax.tree.leaves(saved)
        if not isinstance(x, (jax.Array, np.ndarray, np.generic, int, float))
        or jnp.issubdtype(getattr(x, "dtype", np.int32), jax.dtypes.prng_key)
    )
    t.equal(odd, [], why="leaves of `saved` that are neither arrays nor numbers")
    check_cuts(fn, t, problem, (2, 3), through=to_numpy)


@rerun.check("nothing that was given is used up")
def _(fn, t):
    problem = NoisyFit(t.rng)
    rows = problem.rows.copy()
    saved = problem.call(fn, 4)[1]
    first = problem.call(fn, 3, saved)[0]
    gone = [x for x in jax.tree.leaves((saved, problem.params)) if getattr(x, "is_deleted", bool)()]
    t.equal(len(gone), 0, why="arrays of `saved` or `params` that were deleted")
    t.equal(
        problem.call(fn, 3, saved)[0], first, why="losses of a second call with the same `saved`"
    )
    t.equal(problem.rows, rows, why="the rows were changed")


@rerun.check("one program for all steps")
def _(fn, t):
    problem = NoisyFit(t.rng)
    saved = problem.call(fn, 1)[1]
    problem.traces = 0
    problem.call(fn, 6, saved)
    t.true(problem.traces <= 2, why=f"the loss was traced {problem.traces} times for 6 steps")


def trainer(
    order=lambda seed, epoch, R: np.random.default_rng([seed, epoch]).permutation(R),
    key=lambda seed, i, first: jax.random.fold_in(jax.random.key(seed), i),
    batch_number=lambda i, first: i,
    keep_opt_state=True,
    donate=(),
    jit_once=True,
    per_epoch=lambda R: R // 4,
    early=True,
    convert=float,
    number=lambda first, steps: first + steps,
):
    """A correct train_rows but for what is passed."""

    def train_rows(loss, optimizer, params, rows_RT, seed, steps, saved=None):
        def update(params, opt_state, rows, key):
            value, grads = jax.value_and_grad(loss)(params, rows, key)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            return params, opt_state, value if early else loss(params, rows, key)

        step = jax.jit(update, donate_argnums=donate)
        saved = saved or {"step": 0, "params": params, "opt_state": optimizer.init(params)}
        first, params = int(saved["step"]), saved["params"]
        opt_state = saved["opt_state"] if keep_opt_state else optimizer.init(params)
        R, losses = len(rows_RT), []
        for i in range(first, first + steps):
            if not jit_once:
                step = jax.jit(functools.partial(update))
            epoch, place = divmod(batch_number(i, first), per_epoch(R))
            rows = rows_RT[order(seed, epoch, R)[4 * place : 4 * place + 4]]
            params, opt_state, value = step(params, opt_state, rows, key(seed, i, first))
            losses.append(convert(value))
        return losses, {"step": number(first, steps), "params": params, "opt_state": opt_state}

    return train_rows


def wrong_rerun(name, hint, **changes):
    fn = trainer(**changes)
    fn.__name__ = name
    rerun.mutant(hint)(fn)


wrong_rerun(
    "optimizer_begins_anew",
    "A resumed call starts with fresh moments: you call optimizer.init again. Adam then forgets "
    "its averages and its count, and its first steps are too long. The optimizer's state belongs "
    "in `saved`.",
    keep_opt_state=False,
)
wrong_rerun(
    "data_begins_anew",
    "A resumed call begins again with the first rows of the first epoch. Which rows a step takes "
    "must follow from the step's number over all calls, not from the loop counter of this call.",
    batch_number=lambda i, first: i - first,
)
wrong_rerun(
    "keys_begin_anew",
    "A resumed call uses the keys of the first steps again: you fold in the loop counter of this "
    "call, or start splitting from the seed's key once more. Fold in the step's number over all "
    "calls.",
    key=lambda seed, i, first: jax.random.fold_in(jax.random.key(seed), i - first),
)
wrong_rerun(
    "global_shuffle",
    "You shuffle with NumPy's global generator. Whoever drew from it before changes your run, and "
    "it is not in `saved`. Make a generator from the seed and the epoch.",
    order=lambda seed, epoch, R: np.random.permutation(R),
)
wrong_rerun(
    "one_order_for_all_epochs",
    "Every epoch has the same order: the epoch's number must go into the seed of the generator, "
    "`np.random.default_rng([seed, epoch])`.",
    order=lambda seed, epoch, R: np.random.default_rng([seed, 0]).permutation(R),
)
wrong_rerun(
    "gives_away_what_it_was_given",
    "You donate the parameters and the optimizer's state to your step. The first step deletes the "
    "arrays of `params` and `saved`, which belong to the caller. Donate nothing, or copy once "
    "before the first step.",
    donate=(0, 1),
)
wrong_rerun(
    "one_key_for_all_steps",
    "Every step uses the same key, so its noise is the same in all of them. Fold the step's "
    "number into the key of the seed.",
    key=lambda seed, i, first: jax.random.key(seed),
)
wrong_rerun(
    "compiled_in_every_step",
    "You make a new jitted function in every step, so each one is traced and compiled. Jit once, "
    "before the loop, and pass rows and key as arguments.",
    jit_once=False,
)
wrong_rerun(
    "loss_after_the_update",
    "You compute a step's loss with the parameters after its update. The loss of a step is that with "
    "the parameters it begins with: take it from value_and_grad.",
    early=False,
)
wrong_rerun(
    "losses_left_as_arrays",
    "Your losses are arrays. They are asked for as Python floats.",
    convert=lambda value: value,
)
wrong_rerun(
    "counts_this_call_alone",
    "You save the number of steps of this call. After a second cut the third call begins too early: "
    "save the steps of all calls.",
    number=lambda first, steps: steps,
)
wrong_rerun(
    "last_rows_are_used",
    "Your epoch has a last, shorter batch. It has R // 4 steps: the R % 4 rows left over are not used.",
    per_epoch=lambda R: -(-R // 4),
)
wrong_rerun(
    "seed_plus_epoch",
    "You add the epoch to the seed. Then a run with the next seed has the same orders, one epoch "
    "earlier. The generator's seed is the list `[seed, epoch]`.",
    order=lambda seed, epoch, R: np.random.default_rng(seed + epoch).permutation(R),
)
wrong_rerun(
    "rows_in_order",
    "You take the rows in the order they come in. Each epoch has the order of a permutation.",
    order=lambda seed, epoch, R: np.arange(R),
)
wrong_rerun(
    "keys_from_one",
    "Your steps, or their keys, count from 1. The first step is step 0.",
    key=lambda seed, i, first: jax.random.fold_in(jax.random.key(seed), i + 1),
)
