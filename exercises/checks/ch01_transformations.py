import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from minitext.book.grading import Exercise

# ---------------------------------------------------------------------------------- retracing

retracing = Exercise(
    "01.retracing",
    title="Stop the retracing",
    function="make_scorer",
    minutes=25,
    points=10,
    statement="""
Lines of source code come in every length, and each new length costs a trace and a compilation.
Write `make_scorer(score, max_length)`. It returns a function that scores a line of any length from
1 to `max_length`, but calls `score` only with lengths that are powers of two.

- Pad a line of `n` tokens to the smallest power of two that holds it: 1, 2, 4, 8, and so on. A line
  of 16 tokens isn't padded at all. For lines near `max_length`, the padded length may exceed
  `max_length`.
- Give `score` the tokens as int32, and a float32 mask with 1 for each token and 0 for padding, so
  that the answer is the same as for the line alone.
- However many lines you score, and whatever their integer dtype, `score` is traced at most once for
  each power of two.
- A line that is empty or longer than `max_length` raises `ValueError`.
""",
    hints=(
        "The trace cache belongs to the jitted function. How long does that function have to live?",
        "Do the padding in NumPy, before JAX sees the line. If JAX sees the number n as a shape "
        "or as a static argument, it traces again for each n. It may see n as data, that is, as "
        "a mask.",
        "`jitted = jax.jit(score)` once, outside the inner function. The padded length is "
        "`1 << (n - 1).bit_length()`. Fill `np.zeros(padded, np.int32)` with the line, build the "
        "mask from `np.arange(padded) < n`, and call `jitted(tokens_T, mask_T)`.",
    ),
)


class RecordingScore:
    """A masked score that notes each run of its Python code: one run a trace, if it is jitted."""

    def __init__(self, rng):
        self.value_V = jnp.asarray(rng.normal(size=256), jnp.float32)
        self.lengths = []
        self.traced = []
        self.dtypes = []

    def __call__(self, tokens_T, mask_T):
        self.dtypes.append([str(tokens_T.dtype), str(mask_T.dtype)])
        self.lengths.append(int(tokens_T.shape[0]))
        self.traced.append(isinstance(tokens_T, jax.core.Tracer))
        position_T = jnp.arange(1, tokens_T.shape[0] + 1, dtype=jnp.float32)
        return jnp.sum(self.value_V[tokens_T] * position_T * mask_T) / jnp.sum(mask_T)

    def of(self, line):
        """The answer for a line, in NumPy and without padding."""
        line = np.asarray(line)
        return np.mean(np.asarray(self.value_V)[line] * np.arange(1, len(line) + 1))


def random_line(t, n, dtype=np.int32):
    return t.rng.integers(0, 256 if dtype == np.uint8 else 120, n).astype(dtype)


@retracing.check("the padding does not change the score")
def _(fn, t):
    score = RecordingScore(t.rng)
    scorer = fn(score, 100)
    for n in (5, 1, 2, 3, 17, 63, 100):
        line = random_line(t, n)
        t.close(scorer(line), score.of(line), rtol=1e-4, atol=1e-4, why=f"a line of {n} tokens")


@retracing.check("a line is padded to the next power of two, and no further")
def _(fn, t):
    for n, want in ((5, 8), (16, 16), (17, 32), (1, 1), (33, 64)):
        score = RecordingScore(t.rng)
        fn(score, 200)(random_line(t, n))
        t.equal(score.lengths[0], want, why=f"the length that score sees for {n} tokens")
    for n, want in ((100, 128), (70, 128)):
        score = RecordingScore(t.rng)
        fn(score, n)(random_line(t, n))
        t.equal(score.lengths[0], want, why=f"the length that score sees, max_length={n}")


@retracing.check("int32 tokens and a float32 mask")
def _(fn, t):
    score = RecordingScore(t.rng)
    fn(score, 64)(random_line(t, 9))
    t.equal(score.dtypes[0], ["int32", "float32"], why="dtypes of tokens and mask")


@retracing.check("score runs under jit")
def _(fn, t):
    score = RecordingScore(t.rng)
    fn(score, 64)(random_line(t, 9))
    t.true(all(score.traced), why="score was called with arrays, not traced")


@retracing.check("many lines, few traces")
def _(fn, t):
    score = RecordingScore(t.rng)
    scorer = fn(score, 60)
    for n in (33, 40, 47, 60, 40, 33, 17, 20, 25, 32, 17):
        scorer(random_line(t, n))
    t.equal(len(score.lengths), 2, why="traces for 11 lines that need two padded lengths")


@retracing.check("a new integer dtype is no reason to trace again")
def _(fn, t):
    score = RecordingScore(t.rng)
    scorer = fn(score, 60)
    for dtype in (np.uint8, np.int32, np.int64):
        line = random_line(t, 30, dtype)
        t.close(
            scorer(line), score.of(line), rtol=1e-4, atol=1e-4, why=f"a line of {dtype.__name__}"
        )
    t.equal(len(score.lengths), 1, why="traces for three lines of one length and three dtypes")


@retracing.check("a line that is too long is refused")
def _(fn, t):
    scorer = fn(RecordingScore(t.rng), 20)
    t.raises(ValueError, lambda: scorer(random_line(t, 21)), why="21 tokens, max_length=20")


@retracing.check("an empty line is refused")
def _(fn, t):
    scorer = fn(RecordingScore(t.rng), 20)
    t.raises(ValueError, lambda: scorer(np.zeros(0, np.int32)), why="an empty line")


def pad_and_mask(line, padded, dtype=np.int32):
    tokens_T = np.zeros(padded, dtype)
    tokens_T[: len(line)] = line
    return tokens_T, (np.arange(padded) < len(line)).astype(np.float32)


def next_power(n):
    return 1 << (n - 1).bit_length()


def check_length(line, max_length):
    if not 1 <= len(line) <= max_length:
        raise ValueError(f"{len(line)} tokens")


@retracing.mutant(
    "Your mask is 1 on the padding too, so the padding's zeros are averaged in. The mask must "
    "know how long the line was before you padded it."
)
def mask_of_ones(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length)
        tokens_T, mask_T = pad_and_mask(line, next_power(len(line)))
        return jitted(tokens_T, np.ones_like(mask_T))

    return scorer


@retracing.mutant(
    "You pad every line to max_length. That is one trace, but a line of 5 tokens now costs as much "
    "as the longest one. Pad to the smallest power of two that holds the line."
)
def pad_to_the_longest(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length)
        return jitted(*pad_and_mask(line, max_length))

    return scorer


@retracing.mutant(
    "A line whose length is a power of two is padded to twice its length: `n.bit_length()` finds "
    "the power above n. Use `(n - 1).bit_length()`."
)
def one_power_too_far(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length)
        return jitted(*pad_and_mask(line, 1 << len(line).bit_length()))

    return scorer


@retracing.mutant(
    "You never pad beyond max_length. If that isn't a power of two, `score` sees one more "
    "length for the longest lines. Pad to the power of two, even if it is more than max_length."
)
def cut_at_max_length(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length)
        return jitted(*pad_and_mask(line, min(next_power(len(line)), max_length)))

    return scorer


@retracing.mutant(
    "Your mask is boolean, as a comparison makes it. `score` was promised float32, and `1 - mask` or "
    "`-mask` is an error for booleans. Convert it with `.astype(np.float32)`."
)
def mask_of_booleans(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length)
        tokens_T, mask_T = pad_and_mask(line, next_power(len(line)))
        return jitted(tokens_T, mask_T > 0)

    return scorer


@retracing.mutant("You never jit score: it runs op by op, in Python, for every line.")
def not_jitted(score, max_length):
    def scorer(line):
        check_length(line, max_length)
        return score(*map(jnp.asarray, pad_and_mask(line, next_power(len(line)))))

    return scorer


@retracing.mutant(
    "You call jax.jit on a new function each time (a lambda, a partial or an inner def). The cache "
    "of traces belongs to the function, so each call starts with an empty one. Make the jitted "
    "function once, outside the scorer."
)
def jit_anew_each_time(score, max_length):
    def scorer(line):
        check_length(line, max_length)
        tokens_T, mask_T = pad_and_mask(line, next_power(len(line)))
        return jax.jit(lambda tokens, mask: score(tokens, mask))(tokens_T, mask_T)

    return scorer


@retracing.mutant(
    "You pad, but the true length still reaches jit as a static argument, and each new value of a "
    "static argument is a new trace. Make the mask outside, in NumPy, and pass it as an array."
)
def length_is_static(score, max_length):
    @functools.partial(jax.jit, static_argnums=1)
    def masked(tokens_T, n):
        return score(tokens_T, (jnp.arange(tokens_T.shape[0]) < n).astype(jnp.float32))

    def scorer(line):
        check_length(line, max_length)
        return masked(pad_and_mask(line, next_power(len(line)))[0], len(line))

    return scorer


@retracing.mutant(
    "You keep the line's own dtype, and dtype is part of jit's key: uint8 and int32 lines of "
    "one length are two traces. Convert to int32 while you pad."
)
def keeps_the_dtype(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length)
        return jitted(*pad_and_mask(line, next_power(len(line)), line.dtype))

    return scorer


@retracing.mutant(
    "A line longer than max_length, or an empty one, gets a score instead of a ValueError. Check "
    "the length before you pad."
)
def takes_any_length(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        line = line[:max_length]
        return jitted(*pad_and_mask(line, next_power(max(len(line), 1))))

    return scorer


@retracing.mutant("Your mask is the wrong way round: 1 on the padding, 0 on the line.")
def mask_upside_down(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length)
        tokens_T, mask_T = pad_and_mask(line, next_power(len(line)))
        return jitted(tokens_T, 1 - mask_T)

    return scorer


@retracing.mutant(
    "You refuse a line of exactly max_length tokens. That is the longest line the scorer accepts."
)
def refuses_the_longest(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length - 1)
        return jitted(*pad_and_mask(line, next_power(len(line))))

    return scorer


@retracing.mutant(
    "You pad to a multiple of some number, so there are as many traces as multiples. Powers of two are "
    "few: pad to the smallest that holds the line."
)
def multiple_of_eight(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length)
        return jitted(*pad_and_mask(line, -(-len(line) // 8) * 8))

    return scorer


@retracing.mutant("You never pad: each new length of a line is a new shape, and a new trace.")
def never_pads(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length)
        return jitted(*pad_and_mask(line, len(line)))

    return scorer


@retracing.mutant(
    "You pad to at least some length, such as 8. A line of one token is padded to 1, the smallest "
    "power of two."
)
def at_least_eight(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        check_length(line, max_length)
        return jitted(*pad_and_mask(line, max(next_power(len(line)), 8)))

    return scorer


@retracing.mutant(
    "An empty line is scored. It has no tokens to average over: raise a ValueError for it too."
)
def takes_empty_lines(score, max_length):
    jitted = jax.jit(score)

    def scorer(line):
        if len(line) > max_length:
            raise ValueError(f"{len(line)} tokens")
        return jitted(*pad_and_mask(line, next_power(max(len(line), 1))))

    return scorer


# ------------------------------------------------------------------------------------- pytree

pytree = Exercise(
    "01.pytree",
    title="Register a pytree",
    function="make_average_class",
    minutes=20,
    points=10,
    statement="""
`Average` keeps an exponential moving average of a model's parameters. The class is written, but JAX
doesn't know it, so `jit` refuses it as an argument. Register it, inside `make_average_class`, with
`jax.tree_util.register_pytree_node(Average, flatten, unflatten)`:

- `flatten(average)` returns `(children, aux_data)`. The children are `params` and `count`, in this
  order, and JAX traces them. The auxiliary data is `decay`, which becomes part of the tree's
  structure, so it's static.
- `unflatten(aux_data, children)` returns an `Average` again.

JAX compares auxiliary data with `==` to find an existing trace. And it doesn't promise to give
`unflatten` arrays: `jax.tree.map(str, average)` replaces each leaf by a string, `jax.eval_shape` by
a shape. Leave `__init__` and `update` as they are.
""",
    hints=(
        "Sort the three attributes. Which ones change from step to step and take part in the "
        "arithmetic, and which is a setting that the compiled program may take for granted?",
        "`__init__` checks and converts its arguments. Does that make sense if a leaf is a "
        "string? You can make an object of a class without running its `__init__`.",
        "`flatten` returns `(average.params, average.count), average.decay`. In `unflatten`, start "
        "with `average = object.__new__(Average)`, set its three attributes, and return it.",
    ),
)


def random_params(t, dtype=np.float32):
    shapes = {"embedding": (5, 3), "layers": [(3, 4), (4,)], "scale": ()}
    return jax.tree.map(
        lambda shape: jnp.asarray(t.rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def average_by_numpy(start, others, decay):
    result = [np.asarray(x, np.float64) for x in jax.tree.leaves(start)]
    for other in others:
        result = [
            decay * old + (1 - decay) * np.asarray(new, np.float64)
            for old, new in zip(result, jax.tree.leaves(other), strict=True)
        ]
    return result


@pytree.check("the leaves are the parameters, then the count")
def _(fn, t):
    params = random_params(t)
    average = fn()(params, 0.9, count=7)
    leaves = jax.tree.leaves(average)
    want = [x.shape for x in jax.tree.leaves(params)] + [()]
    t.true(
        all(hasattr(leaf, "shape") or isinstance(leaf, float) for leaf in leaves),
        why="a leaf is no array: is the class registered?",
    )
    t.equal(len(leaves), len(want), why="the number of leaves")
    t.equal([np.shape(leaf) for leaf in leaves], want, why="the shapes of the leaves, in order")
    t.equal(int(leaves[-1]), 7, why="the last leaf is the count")
    children = jax.tree.leaves(average, is_leaf=lambda x: x is not average)
    t.equal(len(children), 2, why="the children of an average are params, whole, and count")


@pytree.check("flatten, then unflatten, gives the average back")
def _(fn, t):
    cls, params, decay = fn(), random_params(t), float(t.rng.uniform(0.9, 0.9999))
    leaves, structure = jax.tree.flatten(cls(params, decay, count=3))
    back = jax.tree.unflatten(structure, leaves)
    t.true(isinstance(back, cls), why="unflatten must return an Average")
    t.equal(
        str(jax.tree.structure(back.params)),
        str(jax.tree.structure(params)),
        why="the structure of params",
    )
    t.equal(float(back.decay), decay, why="decay, to its last digit")
    t.equal(int(back.count), 3, why="count")


@pytree.check("jit traces five updates once, and they are right")
def _(fn, t):
    params, others = random_params(t), [random_params(t) for _ in range(5)]
    traces = []

    @jax.jit
    def update(average, new):
        traces.append(None)
        return average.update(new)

    average = fn()(params, 0.9)
    for other in others:
        average = update(average, other)
    got = np.concatenate([np.ravel(x) for x in jax.tree.leaves(average.params)])
    want = np.concatenate([np.ravel(x) for x in average_by_numpy(params, others, 0.9)])
    t.close(got, want, rtol=1e-5, atol=1e-6, why="the average after five updates")
    t.equal(int(average.count), 5, why="the count after five updates")
    t.equal(len(traces), 1, why="traces for five updates")


@pytree.check("decay is static")
def _(fn, t):
    cls, params = fn(), random_params(t)
    seen = []
    jax.jit(lambda average: seen.append(type(average.decay)))(cls(params, 0.5))
    t.equal(seen[0].__name__, "float", why="the type of decay inside jit")
    structures = [jax.tree.structure(cls(params, decay)) for decay in (0.5, 0.5, 0.99)]
    t.true(structures[0] == structures[1], why="equal decays must give equal structures")
    t.true(structures[0] != structures[2], why="different decays must give different structures")


@pytree.check("a leaf may be anything")
def _(fn, t):
    cls, params = fn(), random_params(t)
    average = cls(params, 0.9)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), average)
    t.equal(str(half.params["scale"].dtype), "bfloat16", why="tree.map to bfloat16")
    names = jax.tree.map(str, average)
    t.true(isinstance(names.count, str), why="tree.map may put strings in the leaves' place")
    shapes = jax.eval_shape(lambda a: a.update(params), average)
    t.equal(tuple(shapes.params["embedding"].shape), (5, 3), why="eval_shape")
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), average)
    many = jax.vmap(lambda a: a.update(params))(stacked)
    t.equal(tuple(many.params["embedding"].shape), (3, 5, 3), why="vmap over three averages")


def average_class(flatten, unflatten):
    """The exercise's class with another registration."""

    class Average:
        def __init__(self, params, decay=0.9, count=0):
            if not 0.0 < decay < 1.0:
                raise ValueError(f"decay={decay} is not in (0, 1)")
            self.params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
            self.decay = float(decay)
            self.count = jnp.asarray(count, jnp.int32)

        def update(self, params):
            keep = self.decay
            mixed = jax.tree.map(
                lambda old, new: keep * old + (1 - keep) * new, self.params, params
            )
            return Average(mixed, self.decay, self.count + 1)

    jax.tree_util.register_pytree_node(Average, flatten, functools.partial(unflatten, Average))
    return Average


def bare(cls, params, decay, count):
    average = object.__new__(cls)
    average.params, average.decay, average.count = params, decay, count
    return average


@pytree.mutant(
    "decay is one of your leaves, so jit traces it: inside, it is a tracer, Python cannot compare "
    "it, and a new decay is not a new program. Put it in the auxiliary data."
)
def decay_is_a_leaf():
    return average_class(
        lambda a: ((a.params, a.count, a.decay), None),
        lambda cls, aux, children: bare(cls, children[0], children[2], children[1]),
    )


@pytree.mutant(
    "count is missing from your leaves: an average that went through jit or tree.map has forgotten "
    "how many updates were made. Everything that changes from step to step is a child."
)
def count_is_lost():
    return average_class(
        lambda a: ((a.params,), a.decay),
        lambda cls, decay, children: bare(cls, children[0], decay, jnp.asarray(0, jnp.int32)),
    )


@pytree.mutant(
    "count is in your auxiliary data, so it is part of the structure: each new count is a new "
    "structure and a new trace, and inside jit it is a tracer, which has no hash. It is a "
    "child."
)
def count_is_static():
    return average_class(
        lambda a: ((a.params,), (a.decay, int(a.count))),
        lambda cls, aux, children: bare(cls, children[0], aux[0], jnp.asarray(aux[1], jnp.int32)),
    )


@pytree.mutant(
    "You flatten params yourself and give back a list of leaves, so its dictionary is lost. A "
    "child may be any pytree: hand over params whole and JAX flattens it."
)
def params_lose_their_structure():
    return average_class(
        lambda a: ((*jax.tree.leaves(a.params), a.count), a.decay),
        lambda cls, decay, children: bare(cls, list(children[:-1]), decay, children[-1]),
    )


@pytree.mutant(
    "Your children are the leaves of `params`, and then `count`. A child may be any pytree: return "
    "two children, `params` as it is and `count`, and JAX flattens the first for you."
)
def leaves_are_children():
    def flatten(a):
        leaves, structure = jax.tree.flatten(a.params)
        return (*leaves, a.count), (a.decay, structure)

    return average_class(
        flatten,
        lambda cls, aux, children: bare(
            cls, jax.tree.unflatten(aux[1], children[:-1]), aux[0], children[-1]
        ),
    )


@pytree.mutant(
    "The average comes back with another decay than it had: you round it. Two decays that differ "
    "in the fourth digit are two settings, so store the float itself."
)
def decay_is_rounded():
    return average_class(
        lambda a: ((a.params, a.count), round(a.decay, 3)),
        lambda cls, decay, children: bare(cls, children[0], decay, children[1]),
    )


@pytree.mutant(
    "You convert decay to float32, which has fewer digits. It's a Python float: keep it as it is."
)
def decay_in_float32():
    return average_class(
        lambda a: ((a.params, a.count), np.float32(a.decay)),
        lambda cls, decay, children: bare(cls, children[0], decay, children[1]),
    )


@pytree.mutant(
    "The average comes back with a decay of 0.9, whatever it was before. The decay has to be in the "
    "auxiliary data, because unflatten knows nothing else about the object."
)
def decay_is_lost():
    return average_class(
        lambda a: ((a.params, a.count), None),
        lambda cls, aux, children: bare(cls, children[0], 0.9, children[1]),
    )


class Settings:
    def __init__(self, decay):
        self.decay = decay


@pytree.mutant(
    "Your auxiliary data is an object that equals only itself, so no structure ever equals an "
    "earlier one and each call is traced again. Use the float itself."
)
def aux_equals_only_itself():
    return average_class(
        lambda a: ((a.params, a.count), Settings(a.decay)),
        lambda cls, aux, children: bare(cls, children[0], aux.decay, children[1]),
    )


@pytree.mutant(
    "Your unflatten calls Average(...), and __init__ converts its arguments to float32 arrays. "
    "JAX may replace a leaf by anything. Make the object with object.__new__(Average) and set "
    "its attributes."
)
def unflatten_runs_init():
    return average_class(
        lambda a: ((a.params, a.count), a.decay),
        lambda cls, decay, children: cls(children[0], decay, children[1]),
    )


@pytree.mutant("Your children come in another order: the parameters first, then the count.")
def count_first():
    return average_class(
        lambda a: ((a.count, a.params), a.decay),
        lambda cls, decay, children: bare(cls, children[1], decay, children[0]),
    )


@pytree.mutant(
    "Your flatten returns the auxiliary data first. It returns the children, then the auxiliary data."
)
def auxiliary_data_first():
    return average_class(
        lambda a: (a.decay, (a.params, a.count)),
        lambda cls, aux, children: bare(cls, aux[0], children, aux[1]),
    )


@pytree.mutant(
    "Your unflatten takes its arguments the other way round: JAX calls it with the auxiliary data "
    "first, then the children."
)
def unflatten_turned_round():
    return average_class(
        lambda a: ((a.params, a.count), a.decay),
        lambda cls, children, decay: bare(cls, children[0], decay, children[1]),
    )


@pytree.mutant("The class is never registered, so JAX takes an average for one leaf.")
def never_registered():
    plain = average_class(lambda a: ((a.params, a.count), a.decay), bare)
    return type("Average", (plain,), {})


@pytree.mutant(
    "Your unflatten returns the parts. It returns an `Average` again, with all three attributes set."
)
def returns_the_parts():
    return average_class(
        lambda a: ((a.params, a.count), a.decay),
        lambda cls, decay, children: (*children, decay),
    )


@pytree.mutant(
    "Your unflatten leaves out an attribute: an average has `params`, `count` and `decay`."
)
def attribute_left_out():
    def unflatten(cls, decay, children):
        average = bare(cls, children[0], decay, children[1])
        del average.decay
        return average

    return average_class(lambda a: ((a.params, a.count), a.decay), unflatten)


# ---------------------------------------------------------------------------------------- hvp

hvp = Exercise(
    "01.hvp",
    title="A Hessian-vector product",
    function="hessian_vector_product",
    minutes=15,
    points=10,
    statement="""
The Hessian of a loss with $n$ parameters has $n^2$ entries, more than two billion for the byte
model of this chapter. Its product with one vector has only $n$ entries, and costs little more than
two gradients.

Write `hessian_vector_product(f, params, vector)`. `params`, `vector` and the result are pytrees of
the same structure. Build no array that is larger than the largest one in the gradient of `f`, and
use no finite differences: the answer must be exact to float32 rounding.
""",
    hints=(
        "The Hessian is the derivative of the gradient. Which transformation gives a derivative "
        "along one direction?",
        "`jax.grad(f)` is a function like any other, from a pytree to a pytree, so you can "
        "transform it again.",
        "`jax.jvp(g, (params,), (vector,))` returns `g(params)` and the directional derivative of "
        "`g` along `vector`. Take `g = jax.grad(f)` and return the second one.",
    ),
)


def network_loss(t, inputs=6, hidden=5):
    """A loss of a pytree of ragged shapes, with its parameters and a direction."""
    x = jnp.asarray(t.rng.normal(size=(9, inputs)), jnp.float32)
    y = jnp.asarray(t.rng.normal(size=9), jnp.float32)

    def f(params):
        hidden_BF = jnp.tanh(x @ params["w"] + params["out"][1])
        return jnp.mean((hidden_BF @ params["out"][0] + params["b"] - y) ** 2)

    def draw():
        shapes = {"w": (inputs, hidden), "out": [(hidden,), (1,)], "b": ()}
        return jax.tree.map(
            lambda shape: jnp.asarray(t.rng.normal(size=shape), jnp.float32),
            shapes,
            is_leaf=lambda s: isinstance(s, tuple),
        )

    return f, draw(), draw()


def ravel(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def dense_product(f, params, vector):
    flat, unravel = ravel_pytree(params)
    hessian = jax.jit(jax.hessian(lambda x: f(unravel(x))))(flat)
    return np.asarray(hessian @ ravel_pytree(vector)[0])


def largest_array(closed_jaxpr):
    """The number of entries of the largest array in a jaxpr, with those inside its equations."""
    largest = 0
    for eqn in closed_jaxpr.eqns:
        largest = max([largest, *(int(np.prod(v.aval.shape)) for v in eqn.outvars)])
        for parameter in eqn.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                largest = max(largest, largest_array(inner))
    return largest


def shapes_of(tree):
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)


@hvp.check("the product with a Hessian known on paper")
def _(fn, t):
    a = t.rng.normal(size=(4, 4)).astype("float32")
    x, v = t.rng.normal(size=(2, 4)).astype("float32")
    got = fn(lambda x: 0.5 * x @ a @ x + jnp.sum(x**3) / 6, jnp.asarray(x), jnp.asarray(v))
    want = (0.5 * (a + a.T) + np.diag(x)) @ v
    told = "f(x) = x'Ax / 2 + sum(x^3) / 6"
    if getattr(got, "shape", None) == want.shape and np.allclose(got, want, 0.05, 0.05):
        told += ". That's near, but not exact: the difference of two gradients loses digits"
    t.close(got, want, rtol=1e-4, atol=1e-4, why=told)


@hvp.check("a pytree in, a pytree out")
def _(fn, t):
    f, params, vector = network_loss(t)
    got = fn(f, params, vector)
    t.equal(
        str(jax.tree.structure(got)), str(jax.tree.structure(params)), why="the result's structure"
    )
    t.equal(shapes_of(got), shapes_of(params), why="dtypes and shapes")
    want = dense_product(f, params, vector)
    t.close(ravel(got), want, rtol=1e-4, atol=1e-4, why="against the dense Hessian")


@hvp.check("exact for vectors of any length")
def _(fn, t):
    f, params, vector = network_loss(t)
    product = dense_product(f, params, vector)
    for scale in (1e-4, 1e4, 0.0):
        scaled = jax.tree.map(lambda v, s=scale: s * v, vector)
        want = product * scale
        tolerance = 1e-4 * scale * float(np.max(np.abs(ravel(vector))) + 1)
        t.close(
            ravel(fn(f, params, scaled)), want, rtol=1e-3, atol=tolerance, why=f"v times {scale}"
        )


@hvp.check("no array as large as the Hessian")
def _(fn, t):
    f, params, vector = network_loss(t, inputs=40, hidden=30)
    largest_of_gradient = largest_array(jax.make_jaxpr(jax.grad(f))(params).jaxpr)
    largest = largest_array(jax.make_jaxpr(lambda p, v: fn(f, p, v))(params, vector).jaxpr)
    t.true(
        largest <= largest_of_gradient,
        why=f"an array of {largest} entries; the gradient needs at most {largest_of_gradient}",
    )


@hvp.mutant(
    "You multiply the gradient by the vector, entry by entry. That has the right shapes, but no "
    "second derivative in it: differentiate the gradient."
)
def gradient_times_vector(f, params, vector):
    return jax.tree.map(lambda g, v: g * v, jax.grad(f)(params), vector)


@hvp.mutant(
    "You return the first result of jvp, which is the gradient itself. The derivative along the "
    "vector is the second."
)
def first_result(f, params, vector):
    return jax.jvp(jax.grad(f), (params,), (vector,))[0]


@hvp.mutant(
    "You return grad(f)(params + vector) - grad(f)(params). That is H v only if f is "
    "quadratic or the vector very short. Differentiate along the vector instead of stepping."
)
def whole_step(f, params, vector):
    moved = jax.tree.map(jnp.add, params, vector)
    return jax.tree.map(jnp.subtract, jax.grad(f)(moved), jax.grad(f)(params))


@hvp.mutant(
    "You take finite differences of the gradient. In float32 no step is right: a short one drowns "
    "in rounding, a long one leaves the tangent. jvp differentiates exactly."
)
def finite_differences(f, params, vector):
    step = 1e-3
    ahead = jax.grad(f)(jax.tree.map(lambda p, v: p + step * v, params, vector))
    behind = jax.grad(f)(jax.tree.map(lambda p, v: p - step * v, params, vector))
    return jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)


@hvp.mutant(
    "You build the whole Hessian and multiply. Right, but with n^2 entries: your model would need "
    "gigabytes. Push the vector through the gradient with jvp instead."
)
def whole_hessian(f, params, vector):
    flat, unravel = ravel_pytree(params)
    hessian = jax.hessian(lambda x: f(unravel(x)))(flat)
    return unravel(hessian @ ravel_pytree(vector)[0])


@hvp.mutant(
    "You differentiate f along the vector. That is a number, the gradient times the vector; it is the "
    "*gradient* that must be differentiated."
)
def slope_along_the_vector(f, params, vector):
    return jax.jvp(f, (params,), (vector,))[1]


@hvp.mutant(
    "You take the Hessian at the vector and multiply it by the parameters. The point is `params`; the "
    "tangent is `vector`."
)
def turned_round(f, params, vector):
    return jax.jvp(jax.grad(f), (vector,), (params,))[1]


@hvp.mutant(
    "You return v' H v, a number: the product is multiplied by the vector once more. H v alone is asked "
    "for."
)
def twice_the_vector(f, params, vector):
    return jax.jvp(lambda p: jax.jvp(f, (p,), (vector,))[1], (params,), (vector,))[1]


@hvp.mutant("You return both results of jvp. The product is the second alone.")
def both_results(f, params, vector):
    return jax.jvp(jax.grad(f), (params,), (vector,))


@hvp.mutant(
    "You use the diagonal of the Hessian alone. Each entry of H v is a sum over all entries of v."
)
def diagonal_alone(f, params, vector):
    flat, unravel = ravel_pytree(params)
    hessian = jax.hessian(lambda x: f(unravel(x)))(flat)
    return unravel(jnp.diag(hessian) * ravel_pytree(vector)[0])


# -------------------------------------------------------------------------------- per_example

per_example = Exercise(
    "01.per_example",
    title="Per-example gradients",
    function="clipped_mean_gradient",
    minutes=25,
    points=10,
    statement="""
One strange line in a batch can dominate its gradient, and the mean hides which line it was. Write
`clipped_mean_gradient(loss, params, batch, max_norm)`. It computes the gradient of each example
separately, shortens those that are longer than `max_norm`, and averages. (With noise added, this is
the step of differentially private training, DP-SGD.)

- The norm of an example is one number: the root of the sum of squares over *all* the leaves of its
  gradient, computed in float32 whatever the dtype of the parameters.
- A gradient whose norm is at most `max_norm` is left as it is. A longer one is multiplied by
  `max_norm / norm`. A gradient of zeros stays zeros. Norms and bounds of $10^{-6}$ are treated like
  any others.
- Return the mean, with the dtypes of `params`, and the norms before clipping.
- Don't loop over the batch, either in Python or in the jaxpr. The size of the jaxpr must not
  depend on B.
""",
    hints=(
        "`loss` takes one example. First make the gradient function for one example, and only"
        " then think about the batch.",
        "`in_axes` says which arguments have a batch axis. With it, each leaf of the gradient"
        " is [B, ...]; reshape the leaf to [B, everything else] to add up squares.",
        "`jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)`. Sum the squares of all "
        "leaves to [B] before the root. The factor is `jnp.minimum(1, max_norm / norms_B)`; "
        '`einsum("B,B...->B...", factor, g)` applies it to a leaf of any rank.',
    ),
)


def ragged_model(t, batch_size, dtype=np.float32):
    """A loss on ragged parameters (a matrix, a vector in a tuple, a scalar), and a batch."""

    def loss(params, example):
        hidden = jnp.tanh(example["x"] @ params["w"] + params["rest"][0])
        prediction = jnp.sum(hidden.astype(jnp.float32)) * params["rest"][1]
        return example["weight"] * (prediction - example["y"]) ** 2

    normal = t.rng.normal
    params = {
        "w": jnp.asarray(normal(size=(3, 4)), dtype),
        "rest": (jnp.asarray(normal(size=4), dtype), jnp.asarray(1.0 + normal() ** 2, jnp.float32)),
    }
    batch = {
        "x": jnp.asarray(normal(size=(batch_size, 3)), dtype),
        "y": jnp.asarray(normal(size=batch_size), jnp.float32),
        "weight": jnp.asarray(10.0 ** t.rng.uniform(-2, 2, batch_size), jnp.float32),
    }
    return loss, params, batch


def clipped_by_loop(loss, params, batch, max_norm):
    """The answer, one example at a time, in float64."""
    size = jax.tree.leaves(batch)[0].shape[0]
    grad = jax.jit(jax.grad(loss))
    total, norms = 0.0, []
    for i in range(size):
        example = jax.tree.map(lambda x, i=i: x[i], batch)
        gradient = ravel(grad(params, example)).astype(np.float64)
        norms.append(np.sqrt(np.sum(gradient**2)))
        total = total + gradient * min(1.0, max_norm / norms[-1] if norms[-1] else 1.0)
    return total / size, np.array(norms)


@per_example.check("the norms are those of whole gradients")
def _(fn, t):
    loss, params, batch = ragged_model(t, 7)
    _, norms = fn(loss, params, batch, 1.0)
    _, want = clipped_by_loop(loss, params, batch, 1.0)
    t.close(norms, want, rtol=1e-4, why="one norm for each example")


@per_example.check("long gradients are shortened, short ones are left alone")
def _(fn, t):
    loss, params, batch = ragged_model(t, 7)
    _, norms = clipped_by_loop(loss, params, batch, 1.0)
    for max_norm in (float(np.median(norms)), 1e9, 1e-3):
        gradient, _ = fn(loss, params, batch, max_norm)
        want, _ = clipped_by_loop(loss, params, batch, max_norm)
        t.close(
            ravel(gradient), want, rtol=1e-4, atol=1e-5 * max_norm if max_norm < 1e8 else 1e-4,
            why=f"the clipped mean, max_norm={max_norm:.3g}",
        )  # fmt: skip
    t.equal(shapes_of(gradient), shapes_of(params), why="dtypes and shapes of the mean")


@per_example.check("norms of a millionth, and a smaller bound")
def _(fn, t):
    loss, params, batch = ragged_model(t, 7)
    # Gradients that are all clipped have one length, whatever length they had.
    clipped, norms = clipped_by_loop(loss, params, batch, 1e-9)
    batch["weight"] = jnp.asarray(batch["weight"] * 3e-6 / norms, jnp.float32)
    gradient, _ = fn(loss, params, batch, 1e-6)
    why = "in units of max_norm"
    t.close(ravel(gradient) / 1e-6, clipped / 1e-9, rtol=1e-3, atol=1e-4, why=why)


@per_example.check("a batch of one")
def _(fn, t):
    loss, params, batch = ragged_model(t, 1)
    gradient, norms = fn(loss, params, batch, 0.5)
    want, want_norms = clipped_by_loop(loss, params, batch, 0.5)
    t.equal(tuple(norms.shape), (1,), why="the shape of the norms")
    t.close(norms, want_norms, rtol=1e-4, why="the norm")
    t.close(ravel(gradient), want, rtol=1e-4, atol=1e-6, why="the clipped gradient")


@per_example.check("an example without gradient stays zero")
def _(fn, t):
    loss, params, batch = ragged_model(t, 5)
    batch["weight"] = batch["weight"].at[2].set(0.0)
    gradient, norms = fn(loss, params, batch, 0.5)
    want, _ = clipped_by_loop(loss, params, batch, 0.5)
    t.finite(ravel(gradient), why="the example of weight 0 has a gradient of zeros")
    t.close(ravel(gradient), want, rtol=1e-4, atol=1e-6, why="the clipped mean")
    t.equal(float(norms[2]), 0.0, why="the norm of the example of weight 0")


@per_example.check("bfloat16 parameters: norms in float32, gradients in bfloat16")
def _(fn, t):
    width = 4096

    def loss(params, x):
        return jnp.sum(params["w"].astype(jnp.float32) * x)

    params = {"w": jnp.zeros(width, jnp.bfloat16)}
    batch = jnp.asarray(2.0 ** t.rng.integers(-3, 3, (3, width)), jnp.float32)
    gradient, norms = fn(loss, params, batch, 1e9)
    want = np.sqrt(np.sum(np.asarray(batch, np.float64) ** 2, axis=1))
    t.close(norms, want, rtol=1e-4, why="sums of 4096 squares")
    t.equal(str(norms.dtype), "float32", why="the dtype of the norms")
    t.equal(str(gradient["w"].dtype), "bfloat16", why="the dtype of the gradient")


@per_example.check("no loop over the batch")
def _(fn, t):
    counts = []
    for size in (2, 40):
        loss, params, batch = ragged_model(t, size)
        names = t.primitives(lambda p, b, loss=loss: fn(loss, p, b, 1.0), params, batch)
        t.true(not {"scan", "while"} & set(names), why="the jaxpr has a loop; vmap would batch it")
        counts.append(len(names))
    t.true(
        counts[0] == counts[1],
        why=f"{counts[0]} equations for a batch of 2, {counts[1]} for a batch of 40",
    )


def example_grads(loss, params, batch):
    return jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)


def squares(leaf):
    return jnp.sum(leaf.astype(jnp.float32).reshape(leaf.shape[0], -1) ** 2, axis=1)


def global_norms(grads):
    return jnp.sqrt(sum(squares(leaf) for leaf in jax.tree.leaves(grads)))


def scaled_mean(grads, scale_B, params, reduce=jnp.mean):
    def one(g, p):
        return reduce(jnp.einsum("B,B...->B...", scale_B, g.astype(jnp.float32)), axis=0).astype(
            p.dtype
        )

    return jax.tree.map(one, grads, params)


def safe_scale(norms_B, max_norm):
    return jnp.minimum(1.0, max_norm / norms_B)


@per_example.mutant(
    "You clip the mean of the batch. One long gradient has already drowned the others by then, and "
    "the mean's norm is not any example's. Clip before you average."
)
def clips_the_mean(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    mean = scaled_mean(grads, jnp.ones(jax.tree.leaves(grads)[0].shape[0]), params)
    norm = jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in jax.tree.leaves(mean)))
    clipped = jax.tree.map(lambda g: g * safe_scale(norm, max_norm), mean)
    return clipped, global_norms(grads)


@per_example.mutant(
    "You clip each leaf by its own norm, which turns the gradient's direction. One example has one "
    "norm: add the squares of all its leaves, then take the root."
)
def clips_each_leaf(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    leaves, structure = jax.tree.flatten(grads)
    clipped = [
        jnp.einsum("B,B...->B...", safe_scale(jnp.sqrt(squares(g)), max_norm), g) for g in leaves
    ]
    mean = jax.tree.unflatten(structure, [jnp.mean(g, axis=0) for g in clipped])
    return mean, global_norms(grads)


@per_example.mutant(
    "Your norm is the sum of the leaves' norms. Norms do not add: add the squares of all leaves, "
    "then take one root."
)
def adds_norms(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = sum(jnp.sqrt(squares(leaf)) for leaf in jax.tree.leaves(grads))
    return scaled_mean(grads, safe_scale(norms, max_norm), params), norms


@per_example.mutant(
    "You bring every gradient to length max_norm, so the short ones are lengthened. The factor is "
    "at most 1."
)
def lengthens_too(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = global_norms(grads)
    return scaled_mean(grads, max_norm / jnp.maximum(norms, 1e-12), params), norms


@per_example.mutant("You return the sum of the clipped gradients. Divide by the batch size.")
def sums(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = global_norms(grads)
    return scaled_mean(grads, safe_scale(norms, max_norm), params, jnp.sum), norms


@per_example.mutant(
    "An example whose gradient is zero gives nan: you divide it, or its clipped norm, by its norm, "
    "and 0 / 0 is not a number. jnp.minimum(1, max_norm / norm) divides max_norm instead."
)
def divides_zero_by_zero(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = global_norms(grads)
    return scaled_mean(grads, jnp.minimum(norms, max_norm) / norms, params), norms


@per_example.mutant(
    "You add a constant such as 1e-6 to the norm, to be safe from zero. Where norms are that small it "
    "changes the result. jnp.minimum(1, max_norm / norm) needs none: max_norm / 0 is inf, and the "
    "minimum makes it 1."
)
def constant_in_the_norm(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = global_norms(grads)
    return scaled_mean(grads, safe_scale(norms + 1e-6, max_norm), params), norms


@per_example.mutant(
    "You add the squares in bfloat16. It has 8 bits of fraction, so a running sum soon stops "
    "growing. Convert to float32 before you square and add."
)
def squares_in_bfloat16(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    squares_B = sum(
        jnp.sum((g.reshape(g.shape[0], -1)) ** 2, axis=1, dtype=g.dtype)
        for g in jax.tree.leaves(grads)
    )
    norms = jnp.sqrt(squares_B)
    return scaled_mean(grads, safe_scale(norms.astype(jnp.float32), max_norm), params), norms


@per_example.mutant(
    "You loop over the batch in Python: the jaxpr grows with B, and so does the time to compile. "
    "vmap makes one batched program of jax.grad(loss)."
)
def loops_in_python(loss, params, batch, max_norm):
    size = jax.tree.leaves(batch)[0].shape[0]
    each = [jax.grad(loss)(params, jax.tree.map(lambda x, i=i: x[i], batch)) for i in range(size)]
    grads = jax.tree.map(lambda *g: jnp.stack(g), *each)
    norms = global_norms(grads)
    return scaled_mean(grads, safe_scale(norms, max_norm), params), norms


@per_example.mutant("Your norms are sums of squares. Take the root.")
def squared_norms(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = global_norms(grads) ** 2
    return scaled_mean(grads, safe_scale(norms, max_norm), params), norms


@per_example.mutant("You return the norms after clipping. They are asked for as they were before.")
def norms_afterwards(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = global_norms(grads)
    return scaled_mean(grads, safe_scale(norms, max_norm), params), jnp.minimum(norms, max_norm)


@per_example.mutant(
    "You cut entries one by one to max_norm. It is the length of the whole gradient that is bounded."
)
def cuts_entries(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    cut = jax.tree.map(lambda g: jnp.clip(g, -max_norm, max_norm), grads)
    return scaled_mean(cut, jnp.ones_like(global_norms(grads)), params), global_norms(grads)


@per_example.mutant("You never clip: the mean is that of the whole gradients.")
def never_clips(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = global_norms(grads)
    return scaled_mean(grads, jnp.ones_like(norms), params), norms


@per_example.mutant(
    "You take one norm for the whole batch. Each example has its own: keep axis 0 when you add up "
    "squares."
)
def one_norm_for_the_batch(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = jnp.full_like(global_norms(grads), jnp.sqrt(jnp.sum(global_norms(grads) ** 2)))
    return scaled_mean(grads, safe_scale(norms, max_norm), params), norms


@per_example.mutant(
    "You return the gradients of all examples. They are averaged over the batch, axis 0."
)
def never_averages(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = global_norms(grads)
    return scaled_mean(grads, safe_scale(norms, max_norm), params, lambda g, axis: g), norms


@per_example.mutant("You return the norms first. The gradient comes first, then the norms.")
def norms_first(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = global_norms(grads)
    return norms, scaled_mean(grads, safe_scale(norms, max_norm), params)


@per_example.mutant(
    "Your mean is float32 for bfloat16 parameters. Each array of it has the dtype of its parameter."
)
def mean_in_float32(loss, params, batch, max_norm):
    grads = example_grads(loss, params, batch)
    norms = global_norms(grads)
    mean = scaled_mean(grads, safe_scale(norms, max_norm), params)
    return jax.tree.map(lambda g: g.astype(jnp.float32), mean), norms


# ---------------------------------------------------------------------------------- logsumexp

logsumexp = Exercise(
    "01.logsumexp",
    title="A gradient of your own: logsumexp",
    function="frugal_logsumexp",
    minutes=30,
    points=15,
    forbid=("jax.nn", "jax.scipy.special", "scipy"),
    statement="""
The loss of a language model is $\\log \\sum_v e^{x_v} - x_{\\text{target}}$. Its first term decides
both the memory and the accuracy of the loss, so write that term yourself, with its own rule for the
backward pass. Fill in three functions: the value, the forward rule, and the backward rule. The line
with `defvjp` is given.

- The value is exact to float32 rounding for logits of ±90 and ±10000, for a single logit, and in
  bfloat16 (add in float32, return float32). A logit of $-\\infty$ contributes nothing, and a row
  that has nothing else gives $-\\infty$.
- The gradient is $\\text{softmax}(x) \\cdot g$, where $g$ is the cotangent of the value. It has the
  dtype of the logits, and it is 0 wherever the logit is $-\\infty$, never nan.
- Between the two passes, keep only the logits in their own dtype and one float32 number a row. For
  bfloat16 logits [16, 4096] that is 128 KiB. If JAX differentiates the same formula in float32, it
  keeps the exponentials: 256 KiB and more.

The ready-made functions in `jax.nn` and `jax.scipy.special` are not allowed here.
""",
    hints=(
        "Subtracting the largest logit of a row changes neither the value (if you add it again) "
        "nor the softmax. What happens if that largest logit is -inf?",
        "softmax(x) is exp(x - logsumexp(x)). So the backward rule needs only the logits and "
        "the value, and can recompute the exponential.",
        "Forward: `x = logits.astype(jnp.float32)`; `top = jnp.max(x, -1, keepdims=True)`, but 0 "
        "where it is not finite; `value = log(sum(exp(x - top))) + top[..., 0]`; keep "
        "`(logits, value)`. Backward: `softmax = exp(x - value[..., None])` with the same care for "
        "-inf; return `((g[..., None] * softmax).astype(logits.dtype),)`, a tuple.",
    ),
)


def exact_logsumexp(x):
    """float64 logsumexp and softmax over the last axis; -inf rows give -inf and zeros."""
    x = np.asarray(x, np.float64)
    top = np.max(x, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    shifted = np.exp(x - top)
    total = shifted.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        value = (np.log(total) + top)[..., 0]
    return value, shifted / np.where(total == 0, 1.0, total)


def pullback(fn, logits, g):
    value, vjp = jax.vjp(fn, logits)
    return value, vjp(g)[0]


@logsumexp.check("plain logits, in any number of dimensions")
def _(fn, t):
    for shape in ((6,), (3, 5), (2, 3, 4)):
        x = t.rng.normal(size=shape).astype("float32")
        t.close(fn(jnp.asarray(x)), exact_logsumexp(x)[0], rtol=1e-5, atol=1e-6, why=f"{shape}")


@logsumexp.check("the gradient is softmax times the cotangent")
def _(fn, t):
    x = t.rng.normal(size=(3, 5)).astype("float32")
    g = t.rng.normal(size=3).astype("float32")
    value, gradient = pullback(fn, jnp.asarray(x), jnp.asarray(g))
    want, softmax = exact_logsumexp(x)
    t.close(gradient, g[:, None] * softmax, rtol=1e-4, atol=1e-6, why="a cotangent that is not 1")
    t.close(value, want, rtol=1e-5, atol=1e-6, why="the value, when it is differentiated")


@logsumexp.check("logits of 90, and rows far apart")
def _(fn, t):
    x = np.array(
        [[90.0, -90.0, 0.0], [-90.0, -91.0, -90.5], [1e4, 1e4 - 1, -1e4], [89.0, 90.0, 88.0]],
        np.float32,
    ) + t.rng.integers(-3, 4, (4, 1))
    x = x.astype(np.float32)
    value, gradient = pullback(fn, jnp.asarray(x), jnp.ones(4, jnp.float32))
    want, softmax = exact_logsumexp(x)
    t.close(value, want, rtol=1e-5, why="the value")
    t.close(gradient, softmax, rtol=1e-3, atol=1e-6, why="the gradient")


@logsumexp.check("one logit")
def _(fn, t):
    x = t.rng.normal(size=(4, 1)).astype("float32") * 50
    value, gradient = pullback(fn, jnp.asarray(x), jnp.ones(4, jnp.float32))
    t.close(value, x[:, 0], rtol=1e-5, why="the value is the logit")
    t.close(gradient, np.ones((4, 1)), rtol=1e-4, why="the gradient is 1")


@logsumexp.check("logits of -inf, and nothing but -inf")
def _(fn, t):
    x = t.rng.normal(size=(3, 4)).astype("float32")
    x[0, 2] = x[1, :3] = x[2, :] = -np.inf
    value, gradient = pullback(fn, jnp.asarray(x), jnp.ones(3, jnp.float32))
    want, softmax = exact_logsumexp(x)
    t.equal(np.isnan(np.asarray(value)).tolist(), [False] * 3, why="no value is nan")
    t.close(value[:2], want[:2], rtol=1e-5, atol=1e-6, why="the rows that have a finite logit")
    t.equal(float(value[2]), float("-inf"), why="the row that has none")
    t.close(gradient, softmax, rtol=1e-4, atol=1e-6, why="the gradient")


@logsumexp.check("bfloat16: add in float32, answer in float32, gradient in bfloat16")
def _(fn, t):
    x = jnp.asarray(t.rng.normal(size=(2, 4096)), jnp.bfloat16)
    value, gradient = pullback(fn, x, jnp.ones(2, jnp.float32))
    want, softmax = exact_logsumexp(np.asarray(x, np.float64))
    t.equal(str(value.dtype), "float32", why="the dtype of the value")
    t.close(value, want, rtol=1e-5, why="4096 terms")
    t.equal(str(gradient.dtype), "bfloat16", why="the dtype of the gradient")
    t.close(np.asarray(gradient, np.float64), softmax, rtol=2e-2, atol=1e-6, why="the gradient")


@logsumexp.check("what is kept for the backward pass is the logits and a number a row")
def _(fn, t):
    x = jnp.asarray(t.rng.normal(size=(16, 4096)), jnp.bfloat16)
    _, vjp = jax.vjp(fn, x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))
    t.true(
        kept <= x.nbytes + 16 * 4 + 64,
        why=f"{kept} bytes are kept; the logits have {x.nbytes} and 16 rows need 64",
    )


@logsumexp.check("vmap and jit")
def _(fn, t):
    x = t.rng.normal(size=(3, 4, 5)).astype("float32")
    got = jax.jit(jax.vmap(jax.grad(lambda row: jnp.sum(fn(row)))))(jnp.asarray(x))
    t.close(got, exact_logsumexp(x)[1], rtol=1e-4, atol=1e-6, why="the gradient of each row")


def top_of(x, axis=-1):
    top = jnp.max(x, axis=axis, keepdims=True)
    return jnp.where(jnp.isfinite(top), top, 0.0)


def good_forward(logits):
    x = logits.astype(jnp.float32)
    top = top_of(x)
    value = jnp.log(jnp.sum(jnp.exp(x - top), axis=-1)) + top[..., 0]
    return value, (logits, value)


def good_backward(residuals, g):
    logits, value = residuals
    finite = jnp.where(jnp.isfinite(value), value, 0.0)
    softmax = jnp.exp(logits.astype(jnp.float32) - finite[..., None])
    return ((g[..., None] * softmax).astype(logits.dtype),)


def wrong_logsumexp(name, hint, forward=good_forward, backward=good_backward):
    """Adds a mutant made of a forward and a backward rule."""

    def value(logits):
        return forward(logits)[0]

    value.__name__ = name
    answer = jax.custom_vjp(value)
    answer.defvjp(forward, backward)
    logsumexp.mutant(hint)(answer)


def unshifted_forward(logits):
    x = logits.astype(jnp.float32)
    value = jnp.log(jnp.sum(jnp.exp(x), axis=-1))
    return value, (logits, value)


wrong_logsumexp(
    "no_shift",
    "exp(90) is larger than the largest float32, so your sum overflows. Subtract the row's largest "
    "logit before exp, and add it again after log.",
    forward=unshifted_forward,
)


def one_top_forward(logits):
    x = logits.astype(jnp.float32)
    top = jnp.max(x)
    value = jnp.log(jnp.sum(jnp.exp(x - top), axis=-1)) + top
    return value, (logits, value)


wrong_logsumexp(
    "one_top_for_all_rows",
    "You subtract the largest logit of the whole array. In a row that lies far below it every exp "
    "underflows to 0. Each row has its own largest logit: axis=-1, keepdims=True.",
    forward=one_top_forward,
)


def forgetful_backward(residuals, g):
    logits, value = residuals
    return good_backward((logits, value), jnp.ones_like(g))


wrong_logsumexp(
    "cotangent_forgotten",
    "Your backward rule ignores g, the cotangent, and so is right only where g is 1. "
    "Multiply the softmax by g[..., None].",
    backward=forgetful_backward,
)


def naive_top_forward(logits):
    x = logits.astype(jnp.float32)
    top = jnp.max(x, axis=-1, keepdims=True)
    value = jnp.log(jnp.sum(jnp.exp(x - top), axis=-1)) + top[..., 0]
    return value, (logits, value)


wrong_logsumexp(
    "nothing_but_minus_infinity",
    "In a row of -inf the largest logit is -inf, and -inf - -inf is nan. Subtract 0 where the "
    "largest logit is not finite, in the forward rule and in the backward one.",
    forward=naive_top_forward,
)


def bfloat16_forward(logits):
    top = top_of(logits)
    total = jnp.sum(jnp.exp(logits - top), axis=-1, dtype=logits.dtype)
    value = (jnp.log(total) + top[..., 0]).astype(jnp.float32)
    return value, (logits, value)


wrong_logsumexp(
    "adds_in_bfloat16",
    "You compute in bfloat16: with 8 bits of fraction, a sum of thousands of terms is off in the "
    "second digit. Convert the logits to float32 first.",
    forward=bfloat16_forward,
)


def keeping_forward(logits):
    value, _ = good_forward(logits)
    finite = jnp.where(jnp.isfinite(value), value, 0.0)
    softmax = jnp.exp(logits.astype(jnp.float32) - finite[..., None])
    return value, (softmax, jnp.zeros(0, logits.dtype))


def keeping_backward(residuals, g):
    softmax, like = residuals
    return ((g[..., None] * softmax).astype(like.dtype),)


wrong_logsumexp(
    "keeps_the_softmax",
    "You keep the softmax, in float32, from the forward pass to the backward pass: twice the bytes "
    "of bfloat16 logits. Keep (logits, value) and compute the exponential again.",
    forward=keeping_forward,
    backward=keeping_backward,
)


@logsumexp.mutant(
    "Your function has no rule of its own: JAX differentiates the formula, and keeps float32 "
    "arrays of the logits' shape. The work belongs in the two rules that defvjp is given."
)
def plain_formula(logits):
    return good_forward(logits)[0]


def top_not_added_forward(logits):
    x = logits.astype(jnp.float32)
    value = good_forward(logits)[0]
    return value - top_of(x)[..., 0], (logits, value)


wrong_logsumexp(
    "top_not_added_again",
    "You subtract the largest logit before exp and don't add it again after log.",
    forward=top_not_added_forward,
)


def column_forward(logits):
    value, kept = good_forward(logits)
    return value[..., None], kept


wrong_logsumexp(
    "axis_of_length_one",
    "Your value keeps an axis of length 1. keepdims=True is for the subtraction; the value has one "
    "number for each row.",
    forward=column_forward,
    backward=lambda residuals, g: good_backward(residuals, g[..., 0]),
)


def other_axis_forward(logits):
    x = jnp.moveaxis(logits.astype(jnp.float32), 0, -1)
    return good_forward(x)


wrong_logsumexp(
    "over_the_first_axis",
    "You sum over an axis other than the last.",
    forward=other_axis_forward,
    backward=lambda residuals, g: (jnp.moveaxis(good_backward(residuals, g)[0], -1, 0),),
)


def no_logarithm_forward(logits):
    value, kept = good_forward(logits)
    return jnp.exp(value), kept


wrong_logsumexp(
    "no_logarithm",
    "You return the sum of the exponentials. Its logarithm is asked for.",
    forward=no_logarithm_forward,
)


def unnormalised_backward(residuals, g):
    logits, _ = residuals
    x = logits.astype(jnp.float32)
    return ((g[..., None] * jnp.exp(x - top_of(x))).astype(logits.dtype),)


wrong_logsumexp(
    "gradient_not_normalised",
    "Your gradient is exp(x - top) times g. It isn't divided by the row's sum: softmax is exp(x - "
    "value).",
    backward=unnormalised_backward,
)


def narrow_backward(residuals, g):
    logits, value = residuals
    finite = jnp.where(jnp.isfinite(value), value, 0.0).astype(logits.dtype)
    softmax = jnp.exp(logits - finite[..., None])
    return ((g[..., None] * softmax).astype(logits.dtype),)


wrong_logsumexp(
    "gradient_computed_in_bfloat16",
    "Your backward rule computes in the dtype of the logits. In bfloat16 `x - value` keeps 8 bits, and its exponential "
    "is off by percents: convert x to float32 first, and the gradient back at the end.",
    backward=narrow_backward,
)


def unguarded_backward(residuals, g):
    logits, value = residuals
    softmax = jnp.exp(logits.astype(jnp.float32) - value[..., None])
    return ((g[..., None] * softmax).astype(logits.dtype),)


wrong_logsumexp(
    "gradient_of_nothing_but_minus_infinity",
    "In a row of -inf the value is -inf too, and in your backward rule -inf - -inf is nan. The gradient there is 0.",
    backward=unguarded_backward,
)


def sigmoid_backward(residuals, g):
    (softmax,) = good_backward(residuals, jnp.ones_like(g))
    return ((g[..., None] * softmax * (1 - softmax)).astype(softmax.dtype),)


wrong_logsumexp(
    "softmax_differentiated",
    "You multiply by 1 - softmax, as if softmax itself were differentiated. The gradient of logsumexp is softmax.",
    backward=sigmoid_backward,
)


def floored_forward(logits):
    return good_forward(jnp.maximum(logits, jnp.asarray(-1e30, logits.dtype)))


wrong_logsumexp(
    "large_number_for_infinity",
    "You replace -inf by a large negative number. A row of nothing else must give -inf.",
    forward=floored_forward,
)


wrong_logsumexp(
    "cotangent_not_in_a_tuple",
    "Your backward rule returns an array. It returns a tuple with one cotangent for each argument, "
    "even if there is only one.",
    backward=lambda residuals, g: good_backward(residuals, g)[0],
)
wrong_logsumexp(
    "cotangent_as_it_comes",
    "You multiply g, which has no last axis, by the softmax, which has one. Give g a last axis of "
    "length 1.",
    backward=lambda residuals, g: (g * good_backward(residuals, jnp.ones_like(g))[0],),
)


def float32_backward(residuals, g):
    logits, value = residuals
    return good_backward((logits.astype(jnp.float32), value), g)


wrong_logsumexp(
    "gradient_in_float32",
    "Your gradient is float32 whatever the logits are. A cotangent has the dtype of its argument.",
    backward=float32_backward,
)


def wide_forward(logits):
    value, _ = good_forward(logits)
    return value, (logits.astype(jnp.float32), value, jnp.zeros(0, logits.dtype))


def wide_backward(residuals, g):
    logits, value, like = residuals
    return (good_backward((logits, value), g)[0].astype(like.dtype),)


wrong_logsumexp(
    "keeps_float32_logits",
    "You keep the logits in float32: twice the bytes of bfloat16 logits. Keep them as they came and "
    "convert them again in the backward rule.",
    forward=wide_forward,
    backward=wide_backward,
)


# ------------------------------------------------------------------------------------- reverse

reverse = Exercise(
    "01.reverse",
    title="Reverse mode",
    function="gradient",
    minutes=40,
    points=20,
    forbid=(
        "jax.grad", "jax.value_and_grad", "jax.vjp", "jax.jvp", "jax.linearize", "jax.linear_transpose", "jax.jacrev",
        "jax.jacfwd", "jax.jacobian", "jax.hessian", "jax.interpreters",
    ),
    statement="""
`jax.grad` reads a jaxpr and builds a backward pass from the rule of each primitive. Write that transformation yourself,
for functions of scalars.

`gradient(closed_jaxpr, args)` returns the derivatives of the function's only result with respect to each argument, at
`args`, as a tuple of float32 scalars.

- All values are float32 scalars. The primitives are `add`, `sub`, `mul`, `neg`, `sin`, `cos`, `exp`, and `jit`, which
  calls a function with a jaxpr of its own: `eqn.params["jaxpr"]`. That function may have any number of results, some
  of them unused, and may contain further calls.
- An operand is a variable or a literal; a literal has its number in `.val`, and variables have no such attribute. A
  jaxpr has constants too: `closed_jaxpr.consts` are the values of `closed_jaxpr.jaxpr.constvars`. An argument may be
  unused. The result may be an argument or a literal, and other equations may follow the one that computes it.
- `eqn.primitive.bind(*inputs, **eqn.params)` runs a primitive.
- `gradient` works on traced arguments, so that it can be compiled and differentiated. The program it makes is a few
  times as long as the function, however often the function uses a value, and however many arguments it has.
- You may not use JAX's own derivatives.
""",
    hints=(
        "Draw the graph of `y = x * sin(x) + x`. By how many paths does x reach y? What does each one contribute "
        "to the derivative, and when do you know that you've seen them all?",
        "Go through the equations twice. First in order, with a dict from variables to values. Then in reverse, with "
        "a dict from variables to cotangents: an equation takes its results' cotangents, and *adds* to those of its "
        "inputs. A `jit` equation does the same with a jaxpr and dicts of its own.",
        "Write `run(closed, args)`, which returns the results and a function `backward(cotangents)` that gives those "
        "of the arguments. For a `jit` equation, `run(eqn.params['jaxpr'], inputs)` already returns both. For "
        "others, `backward` is the primitive's rule with its inputs. Keep each equation's `backward` in a "
        "list, and call them in reverse.",
    ),
)  # fmt: skip


def has_gradient(t, fn, f, *args, rtol=1e-4, atol=1e-5, why=""):
    args = [jnp.float32(x) for x in args]
    got = fn(jax.make_jaxpr(f)(*args), args)
    t.true(isinstance(got, tuple), f"{why}: got a {type(got).__name__}, want a tuple")
    t.equal(len(got), len(args), why=f"{why}: derivatives in the tuple")
    want = jax.grad(f, argnums=tuple(range(len(args))))(*args)
    got = [np.asarray(x) for x in got]
    t.close(got, [np.asarray(x) for x in want], rtol=rtol, atol=atol, why=why)
    t.equal([str(x.dtype) for x in got], ["float32"] * len(args), why=f"{why}: dtypes")


def draw(t, count):
    return [float(x) for x in t.rng.uniform(0.5, 2.0, count) * t.rng.choice([-1, 1], count)]


def draw_program(t, length, arguments):
    """A function of many equations whose values are used in any order and any number of times."""
    two = {"add": jax.lax.add, "sub": jax.lax.sub, "mul": jax.lax.mul}
    one = {"sin": jax.lax.sin, "cos": jax.lax.cos, "neg": jax.lax.neg}
    plan = []
    for i in range(length):
        known = arguments + i
        pair = [int(x) for x in t.rng.integers(max(0, known - 6), known, size=2)]
        plan.append((str(t.rng.choice([*two, *one])), pair))

    def f(*args):
        values = list(args)
        for name, (i, j) in plan:
            if name in two:
                values.append(two[name](jax.lax.sin(values[i]), values[j]))
            else:
                values.append(one[name](values[i]))
        return values[-1] * values[-3]

    return f


@reverse.check("the rule of each primitive")
def _(fn, t):
    x, y = draw(t, 2)
    pairs = {"add": jax.lax.add, "sub": jax.lax.sub, "mul": jax.lax.mul}
    for name, primitive in pairs.items():
        has_gradient(t, fn, lambda x, y, p=primitive: p(x, y), x, y, why=name)
    for primitive in (jax.lax.neg, jax.lax.sin, jax.lax.cos, jax.lax.exp):
        has_gradient(t, fn, lambda x, p=primitive: p(x), x, why=primitive.__name__)


@reverse.check("equations one after another")
def _(fn, t):
    has_gradient(
        t, fn, lambda x: jnp.exp(-jnp.sin(jnp.cos(x))), *draw(t, 1), why="exp(-sin(cos(x)))"
    )
    has_gradient(
        t, fn, lambda x, y: jnp.sin(jnp.cos(x) * y) - y, *draw(t, 2), why="sin(cos(x) * y) - y"
    )


@reverse.check("a value that is used more than once")
def _(fn, t):
    has_gradient(t, fn, lambda x: x * x, *draw(t, 1), why="x * x")
    has_gradient(t, fn, lambda x: x * jnp.sin(x) + x, *draw(t, 1), why="x * sin(x) + x")


@reverse.check("literals and constants")
def _(fn, t):
    a, b, x = draw(t, 3)
    constant = jnp.float32(b)
    has_gradient(t, fn, lambda x: np.float32(a) * x - jnp.cos(x), x, why="a literal")
    has_gradient(t, fn, lambda x: jnp.sin(x * constant) + constant, x, why="a constant")
    tiny = np.float32(1e-6)
    has_gradient(t, fn, lambda x: tiny * x, x, atol=1e-12, why="a derivative of 1e-6")


@reverse.check("unused arguments, and results that no equation computes last")
def _(fn, t):
    x, y, z = draw(t, 3)
    has_gradient(t, fn, lambda x, y, z: jnp.sin(x) * z, x, y, z, why="the second is not used")
    has_gradient(t, fn, lambda x, y: y, x, y, why="the result is an argument")
    has_gradient(t, fn, lambda x: jnp.float32(2.0), x, why="the result is a literal")

    def dead(x, y):
        result = jnp.sin(x) * y
        jnp.cos(result) * x
        return result

    has_gradient(t, fn, dead, x, y, why="the result isn't the last equation's")


@reverse.check("a jitted function")
def _(fn, t):
    inner = jax.jit(lambda x, y: jnp.sin(x * y) - y)
    x, y = draw(t, 2)
    has_gradient(t, fn, lambda x, y: inner(y, x) * x, x, y, why="one call")
    nested = jax.jit(lambda x, y: jnp.cos(inner(x, x * y)) * x)
    has_gradient(t, fn, lambda x, y: nested(x, y) - inner(y, y), x, y, why="a call in a call")


@reverse.check("several results of a jitted function")
def _(fn, t):
    inner = jax.jit(lambda x, y: (x * y, y, jnp.sin(x), jnp.float32(3.0), jnp.cos(y)))

    def f(x, y):
        product, same, sine, three, _ = inner(x, y)
        return product * sine - same * three

    has_gradient(t, fn, f, *draw(t, 2), why="five results, one of them unused")


@reverse.check("a jitted function that is called twice")
def _(fn, t):
    inner = jax.jit(lambda x, y: jnp.sin(x) * y)
    has_gradient(t, fn, lambda x, y: inner(inner(x, y), x), *draw(t, 2), why="f(f(x, y), x)")


@reverse.check("long programs")
def _(fn, t):
    for arguments in (1, 4):
        f = draw_program(t, 25, arguments)
        has_gradient(t, fn, f, *draw(t, arguments), rtol=1e-3, why=f"{arguments} arguments")


def equations_in(jaxpr):
    """How many equations a jaxpr has, with those of the functions that it calls."""
    inner = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
    return len(jaxpr.eqns) + sum(equations_in(called) for called in inner)


def is_short(t, fn, f, count, why):
    args = [jnp.float32(0.5 + 0.1 * i) for i in range(count)]
    closed = jax.make_jaxpr(f)(*args)
    made = jax.make_jaxpr(lambda *args: fn(closed, args))(*args)
    before, after = equations_in(closed.jaxpr), equations_in(made.jaxpr)
    t.true(after <= 8 * before + 20, f"{why}: {before} equations became {after}", observed="long")


@reverse.check("a value that is used twice, ten times in a row")
def _(fn, t):
    def f(x):
        for _ in range(10):
            x = jnp.sin(x) * x
        return x

    is_short(t, fn, f, 1, "x = sin(x) * x, ten times")


@reverse.check("many arguments")
def _(fn, t):
    def f(*args):
        total = args[0]
        for x in args[1:]:
            total = jnp.sin(total) * x
        return total

    is_short(t, fn, f, 30, "30 arguments")


@reverse.check("the gradient's own derivative, compiled")
def _(fn, t):
    def f(x):
        return jnp.exp(jnp.sin(x)) * x

    x = jnp.float32(draw(t, 1)[0])
    closed = jax.make_jaxpr(f)(x)
    got = jax.jit(jax.grad(lambda x: fn(closed, (x,))[0]))(x)
    t.close(got, jax.grad(jax.grad(f))(x), rtol=1e-4, atol=1e-5, why="the second derivative")


RULES = {
    "add": lambda ct, x, y: (ct, ct),
    "sub": lambda ct, x, y: (ct, -ct),
    "mul": lambda ct, x, y: (ct * y, ct * x),
    "neg": lambda ct, x: (-ct,),
    "sin": lambda ct, x: (ct * jnp.cos(x),),
    "cos": lambda ct, x: (-ct * jnp.sin(x),),
    "exp": lambda ct, x: (ct * jnp.exp(x),),
}


def reversed_(
    closed_jaxpr, args, *, rules=RULES, start=lambda out: 1.0, add=lambda a, b: a + b, order=reversed,
    literal=lambda x: x.val, consts=True, missing=lambda: 0.0, result=lambda jaxpr: jaxpr.outvars, calls=True,
    shared=False, passed=lambda cts: cts, operands="pairs", inside=True,
):  # fmt: skip
    """The right answer, with what one gets wrong as arguments."""
    everywhere = {}, {}

    def is_literal(x):
        return hasattr(x, "val")

    def run(closed, args):
        jaxpr, pulls = closed.jaxpr, []
        values, total = everywhere if shared else ({}, {})
        if consts:
            values |= dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))

        def read(x):
            return literal(x) if is_literal(x) else values[x]

        for eqn in jaxpr.eqns:
            inputs = [read(x) for x in eqn.invars]
            if eqn.primitive.name == "jit" and calls:
                outs, inner = run(eqn.params["jaxpr"], inputs)
                if not inside:
                    inner = lambda cts, i=inputs: [0.0] * len(i)  # noqa: E731
                pull = lambda cts, inner=inner: inner(passed(cts))  # noqa: E731
            else:
                rule = rules[eqn.primitive.name]
                outs = [eqn.primitive.bind(*inputs, **eqn.params)]
                pull = lambda cts, i=inputs, r=rule: r(*cts, *i)  # noqa: E731
            values |= dict(zip(eqn.outvars, outs, strict=True))
            pulls.append((eqn, pull))

        def backward(cts):
            def give(variables, cts):
                named = [
                    pair for pair in zip(variables, cts, strict=True) if not is_literal(pair[0])
                ]
                for x, ct in dict(named).items() if operands == "dict" else named:
                    total[x] = add(total[x], ct) if x in total else ct

            give(result(jaxpr), cts)
            for eqn, pull in order(pulls):
                give(eqn.invars, pull([total.get(x, 0.0) for x in eqn.outvars]))
            return [total[x] if x in total else missing() for x in jaxpr.invars]

        return [read(x) for x in jaxpr.outvars], backward

    (out,), backward = run(closed_jaxpr, args)
    return tuple(jnp.float32(ct) for ct in backward([start(out)]))


@reverse.mutant(
    "You replace a variable's cotangent by the last one that comes in. Each equation that uses the variable "
    "contributes: add them."
)
def replaces(closed, args):
    return reversed_(closed, args, add=lambda a, b: b)


@reverse.mutant(
    "Your backward pass goes through the equations from first to last. An equation's cotangent is complete only when "
    "all later equations have been handled."
)
def from_first_to_last(closed, args):
    return reversed_(closed, args, order=list)


@reverse.mutant(
    "The two cotangents of your product are swapped: x gets y's factor, and y gets x's."
)
def product_swapped(closed, args):
    return reversed_(closed, args, rules=RULES | {"mul": lambda ct, x, y: (ct * x, ct * y)})


@reverse.mutant(
    "An equation may use one value twice, as x * x does. You put its contributions into a dict, where the second one "
    "takes the place of the first: add both."
)
def operands_in_a_dict(closed, args):
    return reversed_(closed, args, operands="dict")


@reverse.mutant("The derivative of -x is -1: the cotangent changes its sign.")
def neg_without_sign(closed, args):
    return reversed_(closed, args, rules=RULES | {"neg": lambda ct, x: (ct,)})


@reverse.mutant("The derivative of the sine is the cosine.")
def sin_of_input(closed, args):
    return reversed_(closed, args, rules=RULES | {"sin": lambda ct, x: (ct * jnp.sin(x),)})


@reverse.mutant(
    "You compute what a jitted function returns, but your backward pass doesn't go through its equations, as if its "
    "results were constants."
)
def calls_are_constant(closed, args):
    return reversed_(closed, args, inside=False)


@reverse.mutant("The second operand of a difference gets the cotangent with a minus sign.")
def sub_without_sign(closed, args):
    return reversed_(closed, args, rules=RULES | {"sub": lambda ct, x, y: (ct, ct)})


@reverse.mutant("The derivative of the cosine is minus the sine.")
def cos_without_sign(closed, args):
    return reversed_(closed, args, rules=RULES | {"cos": lambda ct, x: (ct * jnp.sin(x),)})


@reverse.mutant(
    "The derivative of exp is exp of the input. You multiply by the input, or leave the factor out."
)
def exp_of_input(closed, args):
    return reversed_(closed, args, rules=RULES | {"exp": lambda ct, x: (ct * x,)})


@reverse.mutant(
    "Your rules forget the cotangent that comes in: they return the primitive's own derivative. The chain rule "
    "multiplies the two."
)
def no_chain_rule(closed, args):
    def alone(rule):
        return lambda ct, *x: rule(1.0, *x)

    rules = RULES | {name: alone(RULES[name]) for name in ("mul", "sin", "cos", "exp")}
    return reversed_(closed, args, rules=rules)


@reverse.mutant("You look a literal up like a variable. It carries its number itself, in `.val`.")
def literals_are_variables(closed, args):
    return reversed_(closed, args, literal=lambda x: {}[x])


@reverse.mutant(
    "Your dict of values lacks the jaxpr's constants. `closed_jaxpr.consts` has their values, in the order of "
    "`closed_jaxpr.jaxpr.constvars`."
)
def no_constants(closed, args):
    return reversed_(closed, args, consts=False)


@reverse.mutant("You return a list. A tuple of the derivatives is asked for.")
def as_a_list(closed_jaxpr, args):
    return list(reversed_(closed_jaxpr, args))


@reverse.mutant("You treat small derivatives as 0. They are exact: leave them as they are.")
def small_is_zero(closed_jaxpr, args):
    found = reversed_(closed_jaxpr, args)
    return tuple(jnp.where(jnp.abs(x) < 1e-5, jnp.float32(0), x) for x in found)


@reverse.mutant("An argument that nothing uses has no cotangent in your dict. Its derivative is 0.")
def unused_is_missing(closed, args):
    return reversed_(closed, args, missing=lambda: {}["cotangent"])


@reverse.mutant(
    "You start the backward pass at the last equation. Start at `jaxpr.outvars`: equations after it may not matter, "
    "and there may be none at all."
)
def starts_at_the_last_equation(closed, args):
    def result(jaxpr):
        return jaxpr.eqns[-1].outvars if jaxpr.eqns and len(jaxpr.outvars) == 1 else jaxpr.outvars

    return reversed_(closed, args, result=result)


@reverse.mutant("You start with the function's value. The derivative of the result by itself is 1.")
def starts_with_the_value(closed, args):
    return reversed_(closed, args, start=lambda out: out)


@reverse.mutant(
    "You have no rule for `jit`. Handle its jaxpr, `eqn.params['jaxpr']`, as you handle the outer one."
)
def no_calls(closed, args):
    return reversed_(closed, args, calls=False)


@reverse.mutant(
    "All calls share one dict. A jitted function has a single jaxpr, so its second call overwrites the values of the "
    "first, and their cotangents mix. Give each call dicts of its own."
)
def one_dict_for_all(closed, args):
    return reversed_(closed, args, shared=True)


@reverse.mutant(
    "You pass a jitted function the cotangent of its first result only. It may have several: pass all of them."
)
def first_result_only(closed, args):
    return reversed_(closed, args, passed=lambda cts: [cts[0], *[0.0] * (len(cts) - 1)])


@reverse.mutant(
    "Your program doubles each time a value is used twice: you differentiate each use from there to the arguments. "
    "Add up a variable's cotangents first, then go on from it once."
)
def path_by_path(closed, args):
    def run(closed, args):
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))
        made = {}
        for eqn in jaxpr.eqns:
            inputs = [x.val if hasattr(x, "val") else values[x] for x in eqn.invars]
            if eqn.primitive.name == "jit":
                outs, pull = run(eqn.params["jaxpr"], inputs)
            else:
                outs = [eqn.primitive.bind(*inputs, **eqn.params)]
                rule = RULES[eqn.primitive.name]
                pull = lambda cts, i=inputs, r=rule: r(*cts, *i)  # noqa: E731
            values |= dict(zip(eqn.outvars, outs, strict=True))
            made |= {x: (eqn, i, pull) for i, x in enumerate(eqn.outvars)}

        def backward(cts):
            total = dict.fromkeys(jaxpr.invars, 0.0)

            def follow(x, ct):
                if x in total:
                    total[x] = total[x] + ct
                elif x in made:
                    eqn, i, pull = made[x]
                    cts = [ct if j == i else 0.0 for j in range(len(eqn.outvars))]
                    for y, inner in zip(eqn.invars, pull(cts), strict=True):
                        if not hasattr(y, "val"):
                            follow(y, inner)

            for x, ct in zip(jaxpr.outvars, cts, strict=True):
                if not hasattr(x, "val"):
                    follow(x, ct)
            return list(total.values())

        return [x.val if hasattr(x, "val") else values[x] for x in jaxpr.outvars], backward

    return tuple(jnp.float32(ct) for ct in run(closed, args)[1]([1.0]))


@reverse.mutant(
    "You go through the program once for each argument. That's the price of forward mode or of differences; one "
    "backward pass gives the derivatives by all arguments."
)
def once_for_each_argument(closed, args):
    return tuple(reversed_(closed, args)[i] for i in range(len(args)))


@reverse.mutant(
    "You take differences. In float32 they lose half of the digits. Use each primitive's exact derivative."
)
def differences(closed, args):
    def value(args):
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)[0]

    step, slopes = 1e-2, []
    for i, x in enumerate(args):
        there = [*args[:i], x + step, *args[i + 1 :]]
        slopes.append(jnp.float32((value(there) - value(args)) / step))
    return tuple(slopes)


@reverse.mutant(
    "You convert values to Python numbers, and a traced value isn't a number yet. Leave them arrays."
)
def python_numbers(closed, args):
    return reversed_(closed, [jnp.float32(float(x)) for x in args])
