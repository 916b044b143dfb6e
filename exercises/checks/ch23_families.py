import itertools
import json
import math
import re
import time

import ml_dtypes
import numpy as np

from minitext.book.grading import Exercise
from minitext.book.grading.trial import Failure


def mistaken(exercise, name, hint, fn):
    fn.__name__ = name
    exercise.mutant(hint)(fn)


# -------------------------------------------------------------------------------- rope_layout

rope_layout = Exercise(
    "23.rope_layout",
    title="Two ways to pair rotary features",
    function="reorder_rotary",
    minutes=15,
    points=10,
    statement="""
RoPE rotates the features of a head in pairs. With h pairs, Hugging Face's checkpoints and ours pair feature i
with feature i + h: that is the layout `"half"`. Meta's checkpoints and GGUF files pair feature 2i with feature
2i + 1: the layout `"interleaved"`. Pair i has the same frequency in both. A checkpoint in one layout therefore
becomes one in the other when the rows of its query and key projections change their order.

Write `reorder_rotary(rows, heads, fraction, layout)`, which returns the rows in the layout `layout`. They are given in
the other one.

- `rows` is a weight [heads * H, D], or its bias [heads * H], or has more dimensions. Only the first
  dimension is reordered. It has all of the first head, then all of the second, and so on.
- Of each head, only the first `int(H * fraction)` features rotate: an even number, which may be 0. The others stay
  where they are.
- The result is a new array with the dtype of `rows`, which may be any, such as bfloat16 or an integer type.
""",
    hints=(
        "Write down the rows of one head with H = 6 in both layouts. Which row of one goes to row 1 of the "
        "other?",
        "In the half layout the rotating rows of a head are two blocks of h rows. Seen as an array [2, h], its "
        "column i is pair i. How would you read that array to have each pair side by side?",
        "Make `order = np.arange(H)` and replace its first `rotated` numbers: `.reshape(2, -1).T.ravel()` for "
        '"interleaved", `.reshape(-1, 2).T.ravel()` for "half". Then index the rows of every head with it: '
        "`rows.reshape(heads, H, ...)[:, order]`.",
    ),
)


def rope_layout_with(
    *, swapped=False, one_way=None, whole=False, fraction=True, last=False, mixed=False, across=False,
    columns=False, rounds=int, reverse=False, bias=True, wide=False, to=("interleaved", "half"),
    bias_heads=True,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(rows, heads, fraction_, layout):
        if layout not in to or (not bias and rows.ndim == 1):
            return rows.copy()
        heads = heads if bias_heads or rows.ndim > 1 else 1
        given = rows
        rows = np.moveaxis(rows, -1, 0) if columns else rows
        n = 1 if whole else heads
        H = rows.shape[0] // n
        share = fraction_ if fraction else 1.0
        rotated = rounds(H * share)
        order = np.arange(H)
        interleave = (layout == "interleaved") != swapped
        if one_way is not None:
            interleave = one_way
        part = slice(H - rotated, H) if last else slice(rotated)
        pairs = order[part].reshape((2, -1) if interleave else (-1, 2)).T
        order[part] = (pairs[:, ::-1] if reverse else pairs).ravel()
        if mixed:
            out = rows.reshape(H, n, *rows.shape[1:])[order].reshape(rows.shape)
        elif across:
            out, all_ = rows.copy(), int(rows.shape[0] * fraction_)
            out[:all_] = rows.reshape(n, H, *rows.shape[1:])[:, order].reshape(rows.shape)[:all_]
        else:
            out = rows.reshape(n, H, *rows.shape[1:])[:, order].reshape(rows.shape)
        out = np.moveaxis(out, 0, -1) if columns else out
        return out.astype(np.float32) if wide else out.astype(given.dtype)

    return fn


right_layout = rope_layout_with()


def layouts_agree(fn, t, rows, heads, fraction, why, layouts=("interleaved", "half")):
    rows.setflags(write=False)
    for layout in layouts:
        want = right_layout(rows, heads, fraction, layout)
        got = fn(rows, heads, fraction, layout)
        H = len(rows) // heads
        mistakes = {
            "Only the first head is reordered": np.concatenate([want[:H], rows[H:]]),
            "Only the last head is reordered": np.concatenate([rows[:-H], want[-H:]]),
        }
        t.close(got, want, 0, 0, f"{why}, to {layout!r}", rows.dtype, mistakes)


@rope_layout.check("one head of six features, to interleaved")
def _(fn, t):
    rows = np.arange(6, dtype=np.float32) + 10 * float(t.rng.integers(1, 9))
    want = rows[[0, 3, 1, 4, 2, 5]]
    t.close(fn(rows, 1, 1.0, "interleaved"), want, 0, 0, "rows 0 to 5 of one head", np.float32)


@rope_layout.check("one head of six features, to half")
def _(fn, t):
    rows = np.arange(6, dtype=np.float32) + 10 * float(t.rng.integers(1, 9))
    want = rows[[0, 2, 4, 1, 3, 5]]
    t.close(fn(rows, 1, 1.0, "half"), want, 0, 0, "rows 0 to 5 of one head", np.float32)


@rope_layout.check("several heads of a square weight")
def _(fn, t):
    for heads, H in ((3, 8), (5, 6)):
        rows = t.rng.normal(size=(heads * H, heads * H)).astype(np.float32)
        layouts_agree(fn, t, rows, heads, 1.0, f"{heads} heads of {H}, D = {heads * H}")


@rope_layout.check("a part of each head rotates")
def _(fn, t):
    for heads, H, fraction in ((3, 12, 0.5), (2, 16, 0.25), (4, 10, 0.6)):
        rows = t.rng.normal(size=(heads * H, 7)).astype(np.float32)
        layouts_agree(fn, t, rows, heads, fraction, f"{heads} heads of {H}, fraction {fraction}")


@rope_layout.check("a fraction that is rounded down")
def _(fn, t):
    rows = t.rng.normal(size=(3 * 14, 5)).astype(np.float32)
    layouts_agree(fn, t, rows, 3, 0.49, "3 heads of 14, fraction 0.49")  # 6.86


@rope_layout.check("nothing rotates")
def _(fn, t):
    for heads, H, fraction in ((2, 6, 0.0), (3, 8, 0.1)):
        rows = t.rng.normal(size=(heads * H, 5)).astype(np.float32)
        layouts_agree(fn, t, rows, heads, fraction, f"{heads} heads of {H}, fraction {fraction}")


@rope_layout.check("biases")
def _(fn, t):
    for heads, H, fraction in ((1, 16, 1.0), (6, 8, 1.0), (3, 12, 0.5)):
        rows = t.rng.normal(size=heads * H).astype(np.float32)
        layouts_agree(
            fn, t, rows, heads, fraction, f"a bias of {heads} heads of {H}, fraction {fraction}"
        )


@rope_layout.check("other dtypes and more dimensions")
def _(fn, t):
    heads, H = 3, 10
    for dtype in (ml_dtypes.bfloat16, np.float16, np.int8, np.int64, np.float64):
        rows = t.rng.integers(-99, 99, (heads * H, 4)).astype(dtype)
        layouts_agree(fn, t, rows, heads, 0.8, f"dtype {np.dtype(dtype)}")
    rows = t.rng.normal(size=(heads * H, 4, 3)).astype(np.float32)
    layouts_agree(fn, t, rows, heads, 1.0, "rows of shape [4, 3]")


mistaken(
    rope_layout,
    "the_other_direction",
    "You reorder in the wrong direction: `layout` names what the result has, and `rows` has the other one.",
    rope_layout_with(swapped=True),
)
mistaken(
    rope_layout,
    "always_to_interleaved",
    "You go from half to interleaved whatever `layout` says. The way back is another order, except for H = 4.",
    rope_layout_with(one_way=True),
)
mistaken(
    rope_layout,
    "always_to_half",
    "You go from interleaved to half whatever `layout` says. The way back is another order, except for H = 4.",
    rope_layout_with(one_way=False),
)
mistaken(
    rope_layout,
    "all_heads_as_one",
    "You reorder the projection as if it were a single head, and mix the rows of different heads. Each head is "
    "reordered by itself.",
    rope_layout_with(whole=True),
)
mistaken(
    rope_layout,
    "heads_and_features_exchanged",
    "You split the rows into [H, heads]. The heads follow one another, so the first dimension is [heads, H].",
    rope_layout_with(mixed=True),
)
mistaken(
    rope_layout,
    "fraction_ignored",
    "You reorder whole heads. Only the first int(H * fraction) features of a head rotate, and the rest stays.",
    rope_layout_with(fraction=False),
)
mistaken(
    rope_layout,
    "last_features_rotate",
    "You reorder the last features of each head. The ones that rotate are the first.",
    rope_layout_with(last=True),
)
mistaken(
    rope_layout,
    "fraction_of_all_rows",
    "You reorder the first fraction of all rows: the first heads as a whole, and the last not at all. It's a "
    "fraction of each head's features, in every head.",
    rope_layout_with(across=True, fraction=False),
)
mistaken(
    rope_layout,
    "rounded_to_the_nearest",
    "You round H * fraction to the nearest number. It's `int(H * fraction)`, which rounds down, and always even.",
    rope_layout_with(rounds=round),
)
mistaken(
    rope_layout,
    "columns_reordered",
    "You reorder the last dimension. A projection here is [out, in]: the features of its heads are its rows, the "
    "first dimension.",
    rope_layout_with(columns=True),
)
mistaken(
    rope_layout,
    "second_before_first",
    "You exchange the two features of each pair. The first of a pair comes first in both layouts.",
    rope_layout_with(reverse=True),
)
mistaken(
    rope_layout,
    "unchanged",
    "You return the rows in the order in which they came.",
    rope_layout_with(to=()),
)
mistaken(
    rope_layout,
    "half_unchanged",
    'You reorder rows only if `layout` is "interleaved". For "half" they come in interleaved, and are reordered too.',
    rope_layout_with(to=("interleaved",)),
)
mistaken(
    rope_layout,
    "interleaved_unchanged",
    'You reorder rows only if `layout` is "half". For "interleaved" they come in as halves, and are reordered too.',
    rope_layout_with(to=("half",)),
)
mistaken(
    rope_layout,
    "a_bias_as_one_head",
    "You reorder a bias as if it belonged to a single head. It has all heads, one after another, as a weight has.",
    rope_layout_with(bias_heads=False),
)


def two_dimensions_only(rows, heads, fraction, layout):
    by_head = rows.reshape(heads, -1, rows.shape[1])
    return right_layout(by_head.reshape(rows.shape), heads, fraction, layout)


mistaken(
    rope_layout,
    "two_dimensions_only",
    "Your answer needs a second dimension. A bias has only one, and other tensors have more than two: split the first "
    "dimension, and keep `rows.shape[1:]`.",
    two_dimensions_only,
)
mistaken(
    rope_layout,
    "biases_kept",
    "You leave a bias as it is. It's added to the features that the rows produce, so it's reordered like them.",
    rope_layout_with(bias=False),
)
mistaken(
    rope_layout,
    "always_float32",
    "You return float32 whatever the dtype of `rows`. Nothing is computed here, so nothing changes the dtype.",
    rope_layout_with(wide=True),
)

# ------------------------------------------------------------------------------- rope_scaling

rope_scaling = Exercise(
    "23.rope_scaling",
    title="Llama 3.1's frequencies",
    function="scaled_frequencies",
    minutes=20,
    points=10,
    compare=3e-7,  # frequencies span six orders of magnitude, and observations are compared relative to the largest
    forbid=("minitext.models.rope",),
    statement="""
Llama 3 was trained on texts of 8,192 tokens and then stretched to 131,072. Pairs that turn quickly have met every angle
and are kept. Pairs that turn slowly are slowed further, which brings the angles of a long text back into the range
that the model knows. Write `scaled_frequencies(pairs, theta, factor, low_freq_factor, high_freq_factor,
original_length)`, which returns the frequency of each pair in radians per position.

- Before scaling, pair i has the frequency $f_i = \\theta^{-i/h}$, where h is `pairs`. Its wavelength is the number
  of positions in which it turns once, $2\\pi / f_i$.
- A wavelength shorter than `original_length / high_freq_factor` keeps its frequency.
- A wavelength longer than `original_length / low_freq_factor` has its frequency divided by `factor`.
- Between the two the frequency is $s f_i + (1 - s) f_i / \\text{factor}$. The share s rises linearly with
  `original_length / wavelength`, from 0 where that is `low_freq_factor` to 1 where it is `high_freq_factor`.
- If `low_freq_factor` equals `high_freq_factor`, nothing is between them: a pair is either kept or divided.
""",
    hints=(
        "Compute `original_length / wavelength` for every pair: how often does it turn within the original length? "
        "What does the rule say for a pair that turns more often than `high_freq_factor`?",
        "With `turns = original_length / wavelength`, the share that is kept is s = (turns - low) / (high - low) "
        "between the two, 1 above `high` and 0 below `low`. One clip does all three.",
        "`keep = np.clip((turns - low) / (high - low), 0, 1)`, and the result is `keep * f + (1 - keep) * f / factor`. "
        "Where low equals high, `keep` is `turns > high`.",
    ),
)


def rope_scaling_with(
    *, wavelength=lambda f: 2 * np.pi / f, exponent=1.0, swapped=False, blend="turns", kept=False, low_=None,
    high_=None, factor_=None, length_=None, equal="both", theta_=None, ends=False, times=False, clips=True,
    longer=False,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(pairs, theta, factor, low_freq_factor, high_freq_factor, original_length):
        low, high = low_ or low_freq_factor, high_ or high_freq_factor
        factor, length = factor_ or factor, length_ or original_length
        length = length * factor if longer else length
        count = pairs - 1 if ends else pairs
        f = float(theta_ or theta) ** (-exponent * np.arange(pairs) / max(count, 1))
        waves = wavelength(f)
        turns = length / waves
        if high > low:
            s = (turns - low) / (high - low)
            if blend == "wavelength":
                s = (length / low - waves) / (length / low - length / high)
            s = np.clip(s, 0, 1) if clips else s
            if blend == "step":
                s = np.where(turns > low, 1.0, 0.0)
            if blend == "reversed":
                s = np.where((s > 0) & (s < 1), 1 - s, s)
        else:
            s = np.where(turns > high, 1.0, 0.0) if equal == "both" else np.full(pairs, equal)
        if swapped:
            s = 1 - s
        slow = f * factor if times else f / factor
        if blend == "logarithms":
            return np.exp(s * np.log(f) + (1 - s) * np.log(slow))
        if blend == "none":
            return f
        if blend == "all":
            return slow
        if blend == "waves":  # the wavelengths are blended
            return 1 / (s / f + (1 - s) / slow)
        return s * f + (1 - s) * slow

    return fn


right_scaling = rope_scaling_with()


def frequencies_agree(fn, t, why, *args):
    got = fn(*args)
    names = "pairs={}, theta={:g}, factor={:g}, low={:g}, high={:g}, length={}"
    pairs, theta, factor, *rest = args
    mistakes = {
        "The base is multiplied by the factor, as in another method; here it stays": right_scaling(
            pairs, theta * factor, factor, *rest
        ),
        "That is only the base multiplied by the factor, which is another method": (
            (theta * factor) ** (-np.arange(pairs) / pairs)
        ),
        "Those are wavelengths": 2 * np.pi / right_scaling(*args),
        "Those are turns per position, not radians": right_scaling(*args) / (2 * np.pi),
    }
    told = f"{why}: {names.format(*args)}"
    t.close(got, right_scaling(*args), 1e-5, 0, told, mistakes=mistakes)
    t.true(
        getattr(got, "dtype", np.dtype("O")).kind == "f",
        f"got {type(got).__name__}, want NumPy floats",
        1,
    )


@rope_scaling.check("frequencies that are all kept")
def _(fn, t):
    theta = float(t.rng.integers(2_000, 50_000))
    frequencies_agree(fn, t, "every wavelength is short", 24, theta, 8.0, 1.0, 4.0, 10**7)


@rope_scaling.check("Llama 3.1's own numbers")
def _(fn, t):
    frequencies_agree(fn, t, "Llama 3.1", 64, 5e5, 8.0, 1.0, 4.0, 8192)


@rope_scaling.check("frequencies that are all stretched")
def _(fn, t):
    factor = float(t.rng.uniform(2, 30))
    frequencies_agree(fn, t, "every wavelength is long", 16, 1e4, factor, 1.0, 4.0, 5)


@rope_scaling.check("other factors, lengths and bases")
def _(fn, t):
    for _ in range(6):
        low, factor = float(t.rng.uniform(0.3, 2.5)), float(t.rng.uniform(1.5, 40))
        high, theta = low + float(t.rng.uniform(2, 12)), 10 ** float(t.rng.uniform(3.5, 6))
        pairs, length = int(t.rng.integers(40, 90)), int(t.rng.integers(500, 20_000))
        frequencies_agree(fn, t, "other numbers", pairs, theta, factor, low, high, length)


@rope_scaling.check("factors that are equal")
def _(fn, t):
    factor, theta = float(t.rng.uniform(2, 30)), float(t.rng.integers(10_000, 20_000))
    frequencies_agree(fn, t, "nothing is between", 32, theta, factor, 2.5, 2.5, 4000)


@rope_scaling.check("one pair, and a factor of 1")
def _(fn, t):
    frequencies_agree(fn, t, "one pair", 1, 1e4, 8.0, 1.0, 4.0, 10)
    frequencies_agree(fn, t, "a factor of 1", 20, 1e4, 1.0, 1.0, 4.0, 2048)


mistaken(
    rope_scaling,
    "twice_the_exponent",
    "Your frequencies before scaling fall twice as fast, or half as fast, as they should. Pair i of h has theta to "
    "the power of -i/h.",
    rope_scaling_with(exponent=2.0),
)
mistaken(
    rope_scaling,
    "half_the_exponent",
    "You divide i by all features of a head. `pairs` is already half of them: the exponent is -i / pairs.",
    rope_scaling_with(exponent=0.5),
)
mistaken(
    rope_scaling,
    "last_pair_at_theta",
    "You spread the exponents from 0 to 1 with both ends. The last pair has -(h - 1)/h.",
    rope_scaling_with(ends=True),
)
mistaken(
    rope_scaling,
    "wavelength_without_two_pi",
    "You use 1/f as the wavelength. A frequency is in radians per position, and one turn is 2 pi radians.",
    rope_scaling_with(wavelength=lambda f: 1 / f),
)
mistaken(
    rope_scaling,
    "fast_ones_stretched",
    "You stretch the fast pairs and keep the slow ones. Short wavelengths are the fast pairs: those are kept.",
    rope_scaling_with(swapped=True),
)
mistaken(
    rope_scaling,
    "blend_reversed",
    "Between the two wavelengths your blend runs the wrong way: a pair near the kept ones should be nearly kept. s "
    "is the share of the frequency that was there before.",
    rope_scaling_with(blend="reversed"),
)
mistaken(
    rope_scaling,
    "no_blend",
    "You switch at one wavelength. Between the two of the rule is a blend. (If you exchange the two factors, nothing "
    "seems to be between them.)",
    rope_scaling_with(blend="step"),
)
mistaken(
    rope_scaling,
    "linear_in_the_wavelength",
    "Your s is linear in the wavelength. The rule is linear in original_length / wavelength, in how often a pair "
    "turns.",
    rope_scaling_with(blend="wavelength"),
)
mistaken(
    rope_scaling,
    "wavelengths_blended",
    "You blend wavelengths and take the frequency of the result. The rule blends the two frequencies.",
    rope_scaling_with(blend="waves"),
)
mistaken(
    rope_scaling,
    "multiplied_by_the_factor",
    "You multiply slow frequencies by the factor. They must become slower still: divide.",
    rope_scaling_with(times=True),
)
mistaken(
    rope_scaling,
    "llamas_constants",
    "Your result is right for Llama 3.1's own low and high factors and for no others. Use the arguments.",
    rope_scaling_with(low_=1.0, high_=4.0),
)
mistaken(
    rope_scaling,
    "llamas_length",
    "You have 8192 in your code. The original length is an argument.",
    rope_scaling_with(length_=8192),
)
mistaken(
    rope_scaling,
    "llamas_factor",
    "You have 8 in your code. The factor is an argument.",
    rope_scaling_with(factor_=8.0),
)
mistaken(
    rope_scaling,
    "divided_by_zero",
    "With equal factors you divide by zero. There is nothing between them then: a pair is kept or stretched.",
    rope_scaling_with(equal=np.nan),
)
mistaken(
    rope_scaling,
    "equal_and_kept",
    "With equal factors you keep every pair. A pair slower than the one border that is left is still stretched.",
    rope_scaling_with(equal=1.0),
)
mistaken(
    rope_scaling,
    "equal_and_stretched",
    "With equal factors you stretch every pair. A pair faster than the one border that is left is still kept.",
    rope_scaling_with(equal=0.0),
)
mistaken(
    rope_scaling,
    "share_not_clipped",
    "Your share s leaves the range from 0 to 1. Outside of the two borders the line doesn't go on: s stays 0 or 1.",
    rope_scaling_with(clips=False),
)
mistaken(
    rope_scaling,
    "logarithms_blended",
    "You blend the logarithms of the two frequencies. The rule blends the frequencies themselves.",
    rope_scaling_with(blend="logarithms"),
)
mistaken(
    rope_scaling,
    "nothing_stretched",
    "You return the frequencies from before scaling. Those of the slow pairs are divided by `factor`.",
    rope_scaling_with(blend="none"),
)
mistaken(
    rope_scaling,
    "everything_stretched",
    "You divide every frequency by `factor`. Pairs with short wavelengths keep theirs.",
    rope_scaling_with(blend="all"),
)
mistaken(
    rope_scaling,
    "borders_from_the_new_length",
    "Your borders come from the stretched length, `factor` times too long. They come from `original_length`.",
    rope_scaling_with(longer=True),
)
mistaken(
    rope_scaling,
    "llamas_high_factor",
    "You have a high factor of 4 in your code. It's an argument.",
    rope_scaling_with(high_=4.0),
)
mistaken(
    rope_scaling,
    "llamas_low_factor",
    "You have a low factor of 1 in your code. It's an argument.",
    rope_scaling_with(low_=1.0),
)

# ----------------------------------------------------------------------------------- name_map

name_map = Exercise(
    "23.name_map",
    title="One table of names",
    function="convert_names",
    minutes=25,
    points=10,
    forbid=("minitext.models.convert", "jax", "flax"),
    statement="""
Write `convert_names(tensors, rows, shapes)`, which turns the tensors of a published checkpoint into a tree of our
parameters. A table says how: one row for each parameter.

- A row is (pattern, path, transform). A pattern without `{layer}` is the name of one tensor. The transform of
  that tensor is the parameter.
- In a pattern, `{layer}` stands for a layer's number: 0, 1, 2, without leading zeros. The parameter has all layers
  stacked, layer 0 first. `shapes[path]` is its shape, and the first entry says how many layers there are, at least
  one. Transform each layer's tensor, then stack.
- Several rows may read the same tensor, each with a transform of its own: a fused projection for queries, keys and
  values, for example. Each path has at most one row, and every row's path is in `shapes`.
- Each dot in a path goes one level down in the tree, and a dot in a pattern is just a dot. Every parameter is one
  array, with the dtype that the transform returns. A tensor may be a scalar.

Four faults raise a `ValueError`. Its message has the full name of the tensor or path at fault (of one of them, if
there are several), and must not name a tensor with nothing wrong:

1. a tensor that no row reads, such as one of a layer that the model doesn't have;
2. a path of `shapes` that no row sets;
3. a tensor that a row needs and that isn't there, such as layer 2 where only 0, 1 and 3 are;
4. a tensor whose transform doesn't have the shape that the model needs.
""",
    hints=(
        "Two loops find all four faults: one over what the table asks for, one over what the checkpoint has. Which "
        "faults does each of them see?",
        "For a pattern with `{layer}` you know the names before you look: put 0 to L - 1 into it, with L from "
        "`shapes`. Transform each tensor, compare its shape with `shapes[path][1:]`, and stack. Keep a set of the "
        "names that you have read.",
        "`names = [pattern.replace('{layer}', str(i)) for i in range(shape[0])]`; for each: raise if it isn't in "
        "`tensors`, add it to `used`, transform, compare shapes. Put the result at the end of "
        "`tree.setdefault(folder, {})` for every part of the path but the last. At the end raise for the first name "
        "that isn't in `used`.",
    ),
)


def stacked_after(transform, arrays):
    return transform(np.stack(arrays))


def name_map_with(
    *, order=int, transformed=True, after=False, unread=True, unset=True, gaps=True, beyond=True, shapes_=True,
    reshape=False, wildcard=False, tree_=True, error=ValueError, all_names=False, wide=False, count_only=False,
    consumes=False, last_axis=False, by_prefix=False, broadcast=False, zeros=False, levels=99, overwrites=False,
    early=False, gives_up=False, stacks=True, guarded=True,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(tensors, rows, shapes):
        try:
            return convert(tensors, rows, shapes)
        except ValueError:
            if not gives_up:
                raise
        return None

    def convert(tensors, rows, shapes):
        left, tree = dict(tensors), {}
        used = set()

        def fail(text, name):
            raise error(f"{text} {sorted(tensors) if all_names else '' if count_only else name}")

        def found(pattern):
            """Number of a layer -> name, of the tensors that a pattern matches."""
            text = re.escape(pattern).replace(r"\{layer\}", r"(\d+)")
            text = text.replace(r"\.", ".") if wildcard else text
            matches = {name: re.fullmatch(text, name) for name in left if isinstance(name, str)}
            return {
                str(int(m.group(1))) if zeros else m.group(1): name
                for name, m in matches.items()
                if m
            }

        def one(name, transform, shape):
            if name not in left and guarded:
                fail("there is no tensor", name)
            used.add(name)
            value = left.pop(name) if consumes else left[name]
            if early and value.shape != shape:
                fail(f"{value.shape} and not {shape}:", name)
            value = transform(value) if transformed else value
            if reshape and value.size == math.prod(shape):
                value = value.reshape(shape)
            if broadcast and value.shape != shape:
                value = np.broadcast_to(value, shape)
            if shapes_ and value.shape != shape:
                fail(f"{value.shape} and not {shape}:", name)
            return value

        for path in shapes:
            if unset and path not in [row[1] for row in rows]:
                fail("no row sets", path)
        for pattern, path, transform in rows:
            shape = shapes[path]
            if "{layer}" in pattern:
                numbers = found(pattern)
                layers = sorted(numbers, key=order)
                if gaps:
                    layers = sorted(map(str, range(shape[0])), key=order)
                names = [numbers.get(n, pattern.replace("{layer}", n)) for n in layers]
                if not gaps and beyond:
                    names = names[: shape[0]]
                if after:
                    used.update(names)
                    value = stacked_after(transform, [left[name] for name in names])
                else:
                    values = [one(name, transform, shape[1:]) for name in names]
                    value = np.stack(values, axis=-1 if last_axis else 0) if stacks else values
                if by_prefix or zeros:
                    used.update(name for name in numbers.values())
            else:
                value = one(pattern, transform, shape)
            value = value.astype(np.float32) if wide else value
            here, parts = tree, path.split(".", levels) if tree_ else [path]
            if overwrites and len(parts) > 1:
                here[parts[0]] = {}
            for part in parts[:-1]:
                here = here.setdefault(part, {})
            here[parts[-1]] = value
        remaining = [name for name in tensors if name not in used]
        if unread and remaining:
            fail("nothing uses", remaining[0])
        return tree

    return fn


right_names = name_map_with()


class Checkpoint:
    """A small checkpoint with its table, and the shapes of the model."""

    def __init__(self, t, layers, dtype=np.float32, D=4, F=6):
        self.t, self.layers, self.dtype = t, layers, dtype
        self.tensors, self.rows, self.shapes = {}, [], {}
        self.tensor("model.embed_tokens.weight", (9, D))
        self.row("model.embed_tokens.weight", "embed", lambda x: x, (9, D))
        for i in range(layers):
            self.tensor(f"model.layers.{i}.mlp.up_proj.weight", (F, D))
            self.tensor(f"model.layers.{i}.self_attn.qkv.weight", (D + 4, D))
            self.tensor(f"model.layers.{i}.input_layernorm.weight", (D,))
            self.tensor(f"model.layers.{i}.scale", ())
        layer = "model.layers.{layer}."
        self.row(layer + "mlp.up_proj.weight", "blocks.ffn.up", np.transpose, (layers, D, F))
        self.row(
            layer + "self_attn.qkv.weight", "blocks.attention.q", lambda x: x[:D].T, (layers, D, D)
        )
        self.row(
            layer + "self_attn.qkv.weight", "blocks.attention.kv",
            lambda x: x[D:].reshape(2, 2, D), (layers, 2, 2, D),
        )  # fmt: skip
        self.row(
            layer + "input_layernorm.weight",
            "blocks.norms.before.scale",
            lambda x: x + 1,
            (layers, D),
        )
        self.row(layer + "scale", "blocks.scale", lambda x: x, (layers,))
        self.tensor("lm_head.weight", (9, D))
        self.row("lm_head.weight", "unembed", np.transpose, (D, 9))

    def tensor(self, name, shape):
        self.tensors[name] = np.asarray(self.t.rng.integers(-99, 99, shape)).astype(self.dtype)

    def row(self, pattern, path, transform, shape):
        self.rows.append((pattern, path, transform))
        self.shapes[path] = shape

    def shuffled(self):
        """The arguments, with names and rows in an order of chance."""
        names = [list(self.tensors)[i] for i in self.t.rng.permutation(len(self.tensors))]
        for name in names:
            self.tensors[name].setflags(write=False)
        rows = [self.rows[i] for i in self.t.rng.permutation(len(self.rows))]
        return {name: self.tensors[name] for name in names}, rows, dict(self.shapes)


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def trees_agree(fn, t, checkpoint, why):
    arguments = checkpoint.shuffled()
    want = dict(flat(right_names(*arguments)))
    try:
        got = fn(*arguments)
    except ValueError as error:
        said = str(error)
        named = [name for name in arguments[0] if name in said]
        told = f"nothing is wrong with this checkpoint, but you raise ValueError: {said[:200]}"
        if named:
            told += (
                f" ({named[0]} is there, and its shape is right; several rows may read one tensor)"
            )
        raise Failure(
            f"{why}: {told}", ("refused", re.sub(r"[0-9]+", "0", (named or [said])[0]))
        ) from None
    t.true(isinstance(got, dict), f"{why}: got {type(got).__name__}, want a dict", observed=1)
    paths = sorted(str(path) for path in keys_of(got))
    t.equal(paths, sorted(keys_of(nested(want))), why=f"{why}, the keys at each level of the tree")
    seen = dict(flat(got))
    for path, value in want.items():
        array = hasattr(seen[path], "dtype")
        t.true(
            array, f"{path} of {why} is a {type(seen[path]).__name__}, want an array", "no array"
        )
        t.close(seen[path], value, 0, 0, f"{path} of {why}", value.dtype)


def nested(values):
    tree = {}
    for path, value in values.items():
        here = tree
        *folders, leaf = path.split(".")
        for folder in folders:
            here = here.setdefault(folder, {})
        here[leaf] = value
    return tree


def keys_of(tree, level=0):
    """The keys of nested dicts, with their level in front."""
    for key, value in tree.items():
        yield f"{level} {key}"
        if isinstance(value, dict):
            yield from keys_of(value, level + 1)


def refuses(fn, t, checkpoint, culprit, why):
    """The answer raises ValueError with the full name at fault, and no other tensor's."""
    arguments = checkpoint.shuffled()
    name = rf"(?<![\w.]){re.escape(culprit)}(?![\w.]*\w)"
    said = ""

    def call():
        nonlocal said
        try:
            return fn(*arguments)
        except ValueError as error:
            said = str(error)
            raise

    t.raises(ValueError, call, why=f"{why}, {culprit}")
    t.true(
        bool(re.search(name, said)),
        f"{why}: the message {said[:200]!r} doesn't name {culprit}",
        said,
    )
    others = [n for n in arguments[0] if n != culprit and n not in culprit and n in said]
    t.true(
        not others,
        f"{why}: the message names {culprit}, and {(others or [''])[0]} too",
        "names others",
    )


def one_of(fn, t, checkpoint, pattern, why):
    """The answer raises ValueError and names one of the tensors that `pattern` matches."""
    said = ""

    def call():
        nonlocal said
        try:
            return fn(*checkpoint.shuffled())
        except ValueError as error:
            said = str(error)
            raise

    t.raises(ValueError, call, why=why)
    t.true(
        bool(re.search(pattern, said)),
        f"{why}: the message {said[:200]!r} names no tensor at fault",
        said,
    )


@name_map.check("three layers")
def _(fn, t):
    trees_agree(fn, t, Checkpoint(t, 3), "3 layers")


@name_map.check("twelve layers, and one")
def _(fn, t):
    trees_agree(fn, t, Checkpoint(t, 12), "12 layers")
    trees_agree(fn, t, Checkpoint(t, 1, D=5, F=3), "1 layer")


@name_map.check("dtypes")
def _(fn, t):
    for dtype in (ml_dtypes.bfloat16, np.float16, np.int8):
        trees_agree(fn, t, Checkpoint(t, 2, dtype), f"dtype {np.dtype(dtype)}")


@name_map.check("square weights")
def _(fn, t):
    trees_agree(fn, t, Checkpoint(t, 4, D=4, F=4), "weights with equal sides")


@name_map.check("a tensor that nothing reads")
def _(fn, t):
    for name in ("model.layers.1.mlp.up_proj.bias", "rotary.inv_freq"):
        checkpoint = Checkpoint(t, 3)
        checkpoint.tensor(name, (4,))
        refuses(fn, t, checkpoint, name, "a tensor is left over")


@name_map.check("a layer too many")
def _(fn, t):
    checkpoint = Checkpoint(t, 3)
    checkpoint.tensor("model.layers.3.mlp.up_proj.weight", (6, 4))
    refuses(fn, t, checkpoint, "model.layers.3.mlp.up_proj.weight", "the model has 3 layers")


@name_map.check("a name that differs in a dot")
def _(fn, t):
    checkpoint = Checkpoint(t, 3)
    checkpoint.tensors["model.layers.1_mlp.up_proj.weight"] = checkpoint.tensors.pop(
        "model.layers.1.mlp.up_proj.weight"
    )
    # Which of the two faults is found first is the answer's choice.
    one_of(
        fn,
        t,
        checkpoint,
        r"model\.layers\.1[._]mlp\.up_proj\.weight",
        "layer 1 of up_proj is missing, and nothing reads 1_mlp: a ValueError that names either",
    )


@name_map.check("a layer's number written with a zero")
def _(fn, t):
    checkpoint = Checkpoint(t, 3)
    checkpoint.tensor("model.layers.01.mlp.up_proj.weight", (6, 4))
    refuses(
        fn, t, checkpoint, "model.layers.01.mlp.up_proj.weight", "01 is not the number of a layer"
    )


@name_map.check("a parameter that nothing sets")
def _(fn, t):
    for path, shape in (("blocks.ffn.gate", (3, 4, 6)), ("norm", (4,))):
        checkpoint = Checkpoint(t, 3)
        checkpoint.shapes[path] = shape
        refuses(fn, t, checkpoint, path, "no row sets a parameter")


@name_map.check("the same tensors and parameters, with rows")
def _(fn, t):
    # What other checks want refused is read here.
    for layers, D, F in ((2, 5, 3), (3, 4, 6)):
        checkpoint = Checkpoint(t, layers, D=D, F=F)
        for i in range(layers):
            checkpoint.tensor(f"model.layers.{i}.mlp.up_proj.bias", (F,))
            checkpoint.tensor(f"model.layers.{i}.mlp.gate_proj.weight", (F, D))
        layer = "model.layers.{layer}.mlp."
        checkpoint.row(layer + "up_proj.bias", "blocks.ffn.bias", lambda x: x, (layers, F))
        checkpoint.row(layer + "gate_proj.weight", "blocks.ffn.gate", np.transpose, (layers, D, F))
        for name, path, shape in (
            ("model.norm.weight", "norm", (D,)),
            ("rotary.inv_freq", "rotary", (D,)),
            ("model.layers.01.mlp.up_proj.weight", "odder", (F, D)),
            ("model.layers.1_mlp.up_proj.weight", "odd", (F, D)),
        ):
            checkpoint.tensor(name, shape)
            checkpoint.row(name, path, lambda x: x, shape)
        trees_agree(fn, t, checkpoint, f"{layers} layers with more parameters")


@name_map.check("a gap in the layers")
def _(fn, t):
    for layer in (0, int(t.rng.integers(1, 3)), 3):
        checkpoint, name = Checkpoint(t, 4), f"model.layers.{layer}.input_layernorm.weight"
        del checkpoint.tensors[name]
        refuses(fn, t, checkpoint, name, "a layer's tensor is missing")


@name_map.check("a tensor that is missing")
def _(fn, t):
    checkpoint = Checkpoint(t, 2)
    del checkpoint.tensors["lm_head.weight"]
    refuses(fn, t, checkpoint, "lm_head.weight", "a tensor is missing")


@name_map.check("a wrong shape")
def _(fn, t):
    layer = int(t.rng.integers(0, 3))
    for name, shape in (
        (f"model.layers.{layer}.mlp.up_proj.weight", (4, 6)),
        (f"model.layers.{layer}.input_layernorm.weight", (1,)),
        ("lm_head.weight", (4, 9)),
    ):
        checkpoint = Checkpoint(t, 3)
        checkpoint.tensor(name, shape)
        refuses(fn, t, checkpoint, name, f"a shape of {shape}")


@name_map.check("every layer has the wrong shape")
def _(fn, t):
    checkpoint = Checkpoint(t, 2)
    for layer in range(2):
        checkpoint.tensor(f"model.layers.{layer}.mlp.up_proj.weight", (5, 4))
    one_of(
        fn,
        t,
        checkpoint,
        r"model\.layers\.[01]\.mlp\.up_proj\.weight",
        "layers of a shape of (5, 4)",
    )


mistaken(
    name_map,
    "missing_is_a_key_error",
    "A tensor that isn't there raises a KeyError from your dictionary. It's one of the four faults: a ValueError that "
    "names the tensor.",
    name_map_with(guarded=False),
)
mistaken(
    name_map,
    "layers_sorted_as_text",
    'You sort the layers as text, where "10" comes before "2". Sort numbers, or count from 0.',
    name_map_with(order=str),
)
mistaken(
    name_map,
    "not_transformed",
    "You stack the tensors as they are. Apply the row's transform to each.",
    name_map_with(transformed=False, shapes_=False),
)
mistaken(
    name_map,
    "stacked_first",
    "You stack the layers and transform the stack. A transform is a function of one layer's tensor: a transposition "
    "of the stack would move the layers too.",
    name_map_with(after=True),
)
mistaken(
    name_map,
    "stacked_last",
    "You stack the layers along the last dimension. The number of layers is the first entry of the shape.",
    name_map_with(last_axis=True),
)
mistaken(
    name_map,
    "a_flat_dict",
    "You return one dict with the whole paths as keys. Each dot of a path goes one level down.",
    name_map_with(tree_=False),
)
mistaken(
    name_map,
    "two_levels",
    "You split a path at its first dot only. Each dot goes one level down, however many there are.",
    name_map_with(levels=1),
)
mistaken(
    name_map,
    "branches_overwritten",
    'You begin a new dict for a folder that is there already, and lose what was in it: "blocks" has many parameters.',
    name_map_with(overwrites=True),
)
mistaken(
    name_map,
    "lists_of_layers",
    "You return a list with an array for each layer. The parameter is one array: stack them.",
    name_map_with(stacks=False),
)
mistaken(
    name_map,
    "shapes_before_the_transform",
    "You compare the shapes of tensors as they are in the checkpoint. `shapes` has those of our parameters, so compare "
    "after the transform.",
    name_map_with(early=True),
)
mistaken(
    name_map,
    "numbers_parsed",
    'You turn the digits of a name into a number, and "01" counts as layer 1. Count the layers, make each name, and '
    "look it up.",
    name_map_with(zeros=True),
)
mistaken(
    name_map,
    "no_exception",
    "You find the fault and then return None. Raise the ValueError, and the caller can't go on with half a model.",
    name_map_with(gives_up=True),
)
mistaken(
    name_map,
    "consumed",
    "You remove a tensor when a row has read it, and the next row doesn't find it. Several rows may read one "
    "tensor: note what was used in a set.",
    name_map_with(consumes=True),
)
mistaken(
    name_map,
    "always_float32",
    "You return float32 whatever the checkpoint has. The dtype is what the transform returns.",
    name_map_with(wide=True),
)
mistaken(
    name_map,
    "unread_ignored",
    "You ignore tensors that no row reads. A bias that the model doesn't know, left out in silence, is just the kind "
    "of mistake that this table is for.",
    name_map_with(unread=False),
)
mistaken(
    name_map,
    "further_layers_ignored",
    "A tensor counts as read as soon as a pattern fits its name. One of a layer that the model doesn't have is left "
    "over too.",
    name_map_with(by_prefix=True),
)
mistaken(
    name_map,
    "unset_ignored",
    "You return a tree without one of the model's parameters. Compare the paths of the rows with those of `shapes`.",
    name_map_with(unset=False),
)
mistaken(
    name_map,
    "gaps_closed",
    "You stack the layers that are there, and close the gap. Every number from 0 to the model's last must be there.",
    name_map_with(gaps=False),
)
mistaken(
    name_map,
    "shapes_unchecked",
    "You don't compare shapes. A tensor of another size, or of the same size and another shape, gets through.",
    name_map_with(shapes_=False),
)
mistaken(
    name_map,
    "reshaped",
    "You reshape a tensor to what the model needs. A weight that should have been transposed fits too, and its numbers "
    "are then in the wrong order.",
    name_map_with(reshape=True),
)
mistaken(
    name_map,
    "broadcast",
    "You let NumPy spread a tensor over the shape that the model needs. A norm of one number is a fault, not a norm.",
    name_map_with(broadcast=True),
)
mistaken(
    name_map,
    "any_character_for_a_dot",
    "In your regular expression a dot stands for any character. Escape the pattern, or replace `{layer}` with each "
    "number and look the name up.",
    name_map_with(wildcard=True),
)
mistaken(
    name_map,
    "a_key_error",
    "A missing tensor comes out as a KeyError, from the dict that doesn't have it. Look first, and raise a ValueError "
    "that has the name.",
    name_map_with(error=KeyError),
)
mistaken(
    name_map,
    "names_everything",
    "Your message lists all tensors. With a thousand of them the one at fault is never found: name only that.",
    name_map_with(all_names=True),
)
mistaken(
    name_map,
    "names_nothing",
    "Your message doesn't say which tensor or path is at fault. Put its full name in.",
    name_map_with(count_only=True),
)

# --------------------------------------------------------------------------------- dequantize

dequantization = Exercise(
    "23.dequantize",
    title="Numbers from a GGUF file's blocks",
    function="dequantize",
    minutes=25,
    points=10,
    seconds=30.0,
    forbid=("gguf", "minitext.checkpoint", "minitext.models"),
    statement="""
llama.cpp stores weights in blocks of 32 numbers that share a scale. Write `dequantize(data, kind, shape)`, which
turns the bytes of a tensor into a float32 array of its shape.

| kind | bytes of a block, in their order | number j of the block |
|---|---|---|
| `Q8_0` | scale d: float16; then 32 values q: int8 | $d\\,q_j$ |
| `Q4_1` | scale d: float16; minimum m: float16; then 16 bytes with two values of 4 bits each | $d\\,q_j + m$ |

- In a Q4_1 block, the low four bits of the 16 bytes are the values $q_0$ to $q_{15}$, and the high four bits are
  $q_{16}$ to $q_{31}$. Each is a number from 0 to 15.
- Numbers are little-endian. The arithmetic is in float32.
- The blocks run along the last dimension, row after row, and none reaches from one row into the next. A shape whose
  last dimension isn't a multiple of 32 is a `ValueError`, even where the total number of values is a multiple. So is a
  number of bytes that doesn't fit the shape.
- Two million numbers must take less than a second. A Python loop over them would need hours for a real model.
""",
    hints=(
        "How many bytes does a block of each kind have? Read as an array of blocks, the data has one row for each "
        "block. Which columns of that row are the scale?",
        "`np.frombuffer(data, np.uint8).reshape(-1, 34)`, then `.view` some of its columns as float16 or int8; or give "
        'frombuffer a structured dtype such as `[("d", "<f2"), ("q", "i1", 32)]`. Convert to float32 before you '
        "multiply.",
        "With `q` the [blocks, 16] bytes of Q4_1, the values are `np.concatenate([q & 15, q >> 4], axis=1)`, the "
        "result `(d[:, None] * values + m[:, None]).reshape(shape)`, with d and m in float32.",
    ),
)


def dequantize_with(
    *, nibbles="halves", signed=True, order="<", wide=np.float32, centred=False, minus=False, exchanged=False,
    checks_bytes=True, checks_rows=True, dtype=np.float32, columns=False, fortran=False, loops=False, plus=True,
    masked=True, minimum=True, arithmetic_shift=False, error=ValueError, one_dimension=False,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(data, kind, shape):
        size = {"Q8_0": 34, "Q4_1": 20}[kind]
        if checks_rows and (not shape or shape[-1] % 32):
            raise error(f"{shape} has no rows of whole blocks")
        if checks_bytes and len(data) != math.prod(shape) // 32 * size:
            raise error(f"{len(data)} bytes")
        data = data[: len(data) // size * size]
        raw = np.frombuffer(data, np.uint8).reshape(-1, size)
        count = len(raw)
        halves = (
            np.frombuffer(data, np.uint8)[: 2 * count].reshape(-1, 2) if columns else raw[:, :2]
        )
        d = np.ascontiguousarray(halves).view(order + "f2").astype(wide)
        if kind == "Q8_0":
            q = np.ascontiguousarray(raw[:, 2:])
            if columns:
                q = np.frombuffer(data, np.uint8)[2 * count :].reshape(-1, 32)
            values = d * (q.view(np.int8) if signed else q).astype(wide)
            if loops:
                values = np.array(
                    [
                        float(d[i, 0]) * int(np.int8(x))
                        for i, b in enumerate(q.view(np.int8))
                        for x in b
                    ]
                )
        else:
            m = np.ascontiguousarray(raw[:, 2:4]).view(order + "f2").astype(wide)
            if exchanged:
                d, m = m, d
            low, high = raw[:, 4:] & 15, raw[:, 4:] >> 4
            low = low if masked else raw[:, 4:]
            high = raw[:, 4:].view(np.int8) >> 4 if arithmetic_shift else high
            if nibbles == "pairs":
                q = np.stack([low, high], axis=2).reshape(-1, 32)
            elif nibbles == "high first":
                q = np.concatenate([high, low], axis=1)
            else:
                q = np.concatenate([low, high], axis=1)
            q = q.astype(wide) - (8 if centred else 0)
            m = -m if minus else m if minimum else 0
            values = d * q + m if plus else d * (q + m)
        values = np.resize(values, math.prod(shape)) if values.size != math.prod(shape) else values
        values = values.reshape(shape[::-1]).T if fortran else values.reshape(shape)
        values = values.ravel() if one_dimension else values
        return values.astype(dtype)

    return fn


right_numbers = dequantize_with()


def some_blocks(t, kind, count, scale=None):
    """Bytes of blocks with every value of the bits, scales of both signs, and 0."""
    d = (t.rng.normal(size=count) if scale is None else np.full(count, scale)).astype("<f2")
    parts = [d.view(np.uint8).reshape(-1, 2)]
    if kind == "Q4_1":
        parts.append(t.rng.normal(size=count).astype("<f2").view(np.uint8).reshape(-1, 2))
    parts.append(t.rng.integers(0, 256, (count, 16 if kind == "Q4_1" else 32)).astype(np.uint8))
    return np.concatenate(parts, axis=1).tobytes()


def numbers_agree(fn, t, kind, shape, why, data=None):
    data = some_blocks(t, kind, math.prod(shape) // 32) if data is None else data
    want = right_numbers(data, kind, shape)
    got, mistakes = fn(data, kind, shape), {}
    if kind == "Q8_0":
        blocks = np.frombuffer(data, np.dtype([("d", "<f2"), ("q", "u1", 32)]))
        scale, shifted = blocks["d"][:, None].astype(np.float64), blocks["q"].astype(np.int64) - 128
        mistakes["You subtract 128 from bytes; an int8 has a sign of its own"] = np.reshape(
            scale * shifted, shape
        )
    t.close(got, want, 1e-6, 0, f"{why}: {kind} of shape {shape}", np.float32, mistakes)


@dequantization.check("one block of Q8_0")
def _(fn, t):
    numbers_agree(fn, t, "Q8_0", (32,), "one block")


@dequantization.check("one block of Q4_1")
def _(fn, t):
    numbers_agree(fn, t, "Q4_1", (32,), "one block")


@dequantization.check("rows of Q8_0")
def _(fn, t):
    for shape in ((5, 64), (3, 2, 96), (32, 32)):
        numbers_agree(fn, t, "Q8_0", shape, "rows")


@dequantization.check("rows of Q4_1")
def _(fn, t):
    for shape in ((5, 64), (3, 2, 96), (32, 32)):
        numbers_agree(fn, t, "Q4_1", shape, "rows")


@dequantization.check("the ends of float16 and int8")
def _(fn, t):
    for scale in (65504.0, -65504.0, 6e-8, 0.0):
        for kind in ("Q8_0", "Q4_1"):
            data = some_blocks(t, kind, 6, scale)
            numbers_agree(fn, t, kind, (2, 96), f"a scale of {scale:g}", data)
    data = np.float16(0.5).tobytes() + bytes([128, 127, 0, 255] * 8)
    numbers_agree(fn, t, "Q8_0", (1, 32), "values of -128, 127, 0 and -1", data)


@dequantization.check("bytes that don't fit")
def _(fn, t):
    for kind, more in (
        ("Q8_0", 34),
        ("Q4_1", 20),
        ("Q8_0", -34),
        ("Q4_1", -20),
        ("Q8_0", 1),
        ("Q4_1", -1),
    ):
        data = some_blocks(t, kind, 6)
        data = data + bytes(more) if more > 0 else data[:more]
        t.raises(
            ValueError,
            fn,
            data,
            kind,
            (3, 64),
            why=f"{kind}, {abs(more)} bytes too {'many' if more > 0 else 'few'}",
        )


@dequantization.check("rows that aren't whole blocks")
def _(fn, t):
    for kind in ("Q8_0", "Q4_1"):
        for shape in ((4, 16), (32, 3), (2, 48), (64, 1)):
            data = some_blocks(t, kind, math.prod(shape) // 32)
            t.raises(ValueError, fn, data, kind, shape, why=f"{kind} of shape {shape}")


@dequantization.check("two million numbers")
def _(fn, t):
    data = some_blocks(t, "Q8_0", 2**16)
    want = right_numbers(data, "Q8_0", (2**10, 2**11))
    for _ in range(3):  # the machine may be busy with something else
        began = time.perf_counter()
        got = fn(data, "Q8_0", (2**10, 2**11))
        seconds = time.perf_counter() - began
        if seconds < 1:
            break
    t.close(got[::64], want[::64], 1e-6, 0, "two million numbers", np.float32)
    t.true(
        seconds < 1, f"two million numbers took {seconds:.1f} s: is there a loop over them?", "slow"
    )


mistaken(
    dequantization,
    "neighbours_share_a_byte",
    "You treat the two values of a byte as neighbours. The low bits of all 16 bytes are the first 16 values, and "
    "the high bits the other 16.",
    dequantize_with(nibbles="pairs"),
)
mistaken(
    dequantization,
    "high_bits_first",
    "You have the high four bits first. The low ones are the values 0 to 15.",
    dequantize_with(nibbles="high first"),
)
mistaken(
    dequantization,
    "low_bits_not_masked",
    "Your first 16 values of a Q4_1 block are whole bytes, from 0 to 255. Keep the low four bits: `& 15`.",
    dequantize_with(masked=False),
)
mistaken(
    dequantization,
    "high_bits_signed",
    "Your last 16 values of a Q4_1 block go below 0: the bytes were read as int8, and `>>` copies their sign. Read "
    "them as uint8.",
    dequantize_with(arithmetic_shift=True),
)
mistaken(
    dequantization,
    "minimum_forgotten",
    "You leave the minimum out. A Q4_1 block has one after its scale, and it's added to every value.",
    dequantize_with(minimum=False),
)
mistaken(
    dequantization,
    "one_dimension",
    "You return the numbers in one dimension. Give them the tensor's shape.",
    dequantize_with(one_dimension=True),
)
mistaken(
    dequantization,
    "an_assertion",
    "You refuse the right cases with an AssertionError. Assertions are for your own mistakes, and `python -O` drops "
    "them: raise a ValueError.",
    dequantize_with(error=AssertionError),
)
mistaken(
    dequantization,
    "bytes_without_sign",
    "You read the values of Q8_0 as 0 to 255. They are int8.",
    dequantize_with(signed=False),
)
mistaken(
    dequantization,
    "big_endian",
    "You read the scale with its bytes in the wrong order. It's little-endian.",
    dequantize_with(order=">"),
)
mistaken(
    dequantization,
    "multiplied_in_float16",
    "You multiply in float16. Large scales overflow, and others lose bits: convert to float32 first.",
    dequantize_with(wide=np.float16),
)
mistaken(
    dequantization,
    "centred",
    "You subtract 8 from the four bits, as Q4_0 does. Q4_1 has a minimum instead.",
    dequantize_with(centred=True),
)
mistaken(
    dequantization,
    "minimum_subtracted",
    "You subtract the minimum. It's added.",
    dequantize_with(minus=True),
)
mistaken(
    dequantization,
    "scale_and_minimum_exchanged",
    "You read the minimum as the scale. The scale comes first in a block.",
    dequantize_with(exchanged=True),
)
mistaken(
    dequantization,
    "minimum_scaled",
    "You scale the minimum too. It's added after the multiplication.",
    dequantize_with(plus=False),
)
mistaken(
    dequantization,
    "scales_together",
    "You read all scales first and then all values. Every block has its own scale in front of its values.",
    dequantize_with(columns=True),
)
mistaken(
    dequantization,
    "dimensions_reversed",
    "You fill the array with the first dimension running fastest. The last one does.",
    dequantize_with(fortran=True),
)
mistaken(
    dequantization,
    "float64",
    "Your result is float64. The arithmetic and the result are float32.",
    dequantize_with(wide=np.float64, dtype=np.float64),
)
mistaken(
    dequantization,
    "bytes_unchecked",
    "You don't compare the number of bytes with the shape. Missing numbers are then made up, or NumPy raises an "
    "error of its own.",
    dequantize_with(checks_bytes=False),
)
mistaken(
    dequantization,
    "rows_unchecked",
    "You accept any shape with the right number of values. A block doesn't reach from one row into the next, so the "
    "last dimension is a multiple of 32.",
    dequantize_with(checks_rows=False),
)
mistaken(
    dequantization,
    "a_loop_over_numbers",
    "Your answer is right, but it goes through the numbers one by one in Python. Let NumPy do all blocks at once.",
    dequantize_with(loops=True),
)

# -------------------------------------------------------------------------- sliding_window_cache

window_cache = Exercise(
    "23.sliding_window_cache",
    title="A cache no longer than the window",
    function="window_attention",
    minutes=30,
    points=15,
    forbid=("minitext.inference", "minitext.kernels", "minitext.models"),
    statement="""
In a layer with a window, the query at position t sees positions t - window + 1 to t. Older keys are never needed
again, so a cache of `window` slots is enough: a ring buffer, in which token t goes into slot t % window and overwrites
what was there.

Write `window_attention(q_TNH, k_TKH, v_TKH, window, cache=None)`. It computes the attention of T new tokens and returns
`(out_TNH, cache)`, with the cache that the next call gets.

- T is 1 when a model generates. When it reads a prompt, T is any number, even more than the window, and the tokens
  may continue a text that has already begun. A text in pieces, whatever their lengths, gives the same output as the
  text in one call.
- Logits are divided by $\\sqrt{H}$. Each of the K key heads serves N / K neighbouring query heads.
- The cache is `(keys, values, length)`: two float32 arrays [window, K, H], and the total number of tokens so far as a
  Python int. A slot that no token has reached is 0 and is not seen. Before the first token the cache is None.
- A caller may continue twice from the same cache, so don't change it. The output is float32, and correct even if
  logits are very large or very small.
""",
    hints=(
        "The text has 10 tokens, the window is 4, and 3 more tokens come. Which positions does the first of them see, "
        "and in which slots are they? Which of those slots will the other two overwrite?",
        "Compute the attention first, over the tokens in the ring and the new ones together, with the position of "
        "each. Update the ring afterwards. If there are more new tokens than `window`, only the last ones stay.",
        "`kept = np.arange(max(0, length - window), length)` are the positions in the ring, `kept % window` their "
        "slots. Concatenate these keys with the new ones; query t sees position s where t - window < s <= t. Then "
        "`keys = old.copy()` and `keys[(length + new) % window] = k_TKH[new]` with "
        "`new = np.arange(max(0, T - window), T)`.",
    ),
)


def window_with(
    *, more=0, causal=True, neighbours=True, scaled=True, ring_first=False, empty=False, from_zero=False,
    adds=True, keeps_last=True, in_place=False, list_=False, safe=True, dtype=np.float32, forgets=False,
    whole_int=True, python_int=True, in_order=False, masked=-np.inf, renormalised=True, offset=True, one_top=False,
    scale=None, drops_first=False,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(q_TNH, k_TKH, v_TKH, window, cache=None):
        (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
        if cache is None:
            cache = (np.zeros((window, K, H), np.float32), np.zeros((window, K, H), np.float32), 0)
        old_k, old_v, length = cache
        new = np.arange(max(0, T - window), T) if keeps_last else np.arange(min(T, window))
        slots = (new if from_zero else length + new) % window
        keys, values = (old_k, old_v) if in_place else (old_k.copy(), old_v.copy())
        kept = np.arange(max(0, length - window + T * drops_first), length)
        if list_:
            held = old_k[window - len(kept) :], old_v[window - len(kept) :]
        else:
            held = old_k[kept % window], old_v[kept % window]
        if in_order:
            held = old_k[: len(kept)], old_v[: len(kept)]
        seen = held[0].copy(), held[1].copy()
        if list_:
            keys = np.concatenate([old_k, k_TKH])[-window:].astype(np.float32)
            values = np.concatenate([old_v, v_TKH])[-window:].astype(np.float32)
        else:
            keys[slots], values[slots] = k_TKH[new], v_TKH[new]
        k, v = np.concatenate([seen[0], k_TKH]), np.concatenate([seen[1], v_TKH])
        s = np.arange(length - len(kept), length + T)
        t = length + np.arange(T)[:, None]
        if ring_first:  # only what the ring has after all new tokens
            s = np.arange(max(0, length + T - window), length + T)
            k, v = keys[s % window], values[s % window]
        if forgets:
            k, v, s = k_TKH, v_TKH, length + np.arange(T)
        t_seen = t if offset else t - length
        visible = s > t_seen - window - more
        if causal:
            visible &= s <= t_seen
        if empty and length + T < window:
            free = window - length - T
            k = np.concatenate([np.zeros((free, K, H), k.dtype), k])
            v = np.concatenate([np.zeros((free, K, H), v.dtype), v])
            visible = np.concatenate([np.ones((T, free), bool), visible], axis=1)
        q = q_TNH.reshape((T, K, N // K, H) if neighbours else (T, N // K, K, H))
        q = q if neighbours else q.swapaxes(1, 2)
        by = {None: math.sqrt(H), "H": H, "N": math.sqrt(N)}[scale]
        logits = np.einsum("TKGH,SKH->KGTS", q, k) / (by if scaled else 1)
        logits = np.where(visible, logits, masked) if renormalised else logits
        top = logits.max() if one_top else logits.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0) if safe else 0
        with np.errstate(all="ignore"):
            exps = np.exp(logits - top).astype(np.float32)
            probs = exps / exps.sum(-1, keepdims=True)
            probs = probs if renormalised else probs * visible
        out = np.einsum("KGTS,SKH->TKGH", probs, v)
        out = (out if neighbours else out.swapaxes(1, 2)).reshape(T, N, H).astype(dtype)
        total = length + T if adds else T
        total = total if whole_int else min(total, window)
        return out, (keys, values, total if python_int else np.int64(total))

    return fn


right_window = window_with()


def window_inputs(t, T, N, K, H, size=1.0):
    def draw(heads):
        return t.rng.normal(size=(T, heads, H)).astype(np.float32)

    arrays = np.float32(size) * draw(N), np.float32(size) * draw(K), draw(K)
    for array in arrays:
        array.setflags(write=False)
    return arrays


def frozen(cache):
    """A cache that nobody can change."""
    keys, values, length = cache
    keys, values = np.array(keys), np.array(values)
    keys.setflags(write=False)
    values.setflags(write=False)
    return keys, values, length


def windows_agree(fn, t, window, pieces, heads=(4, 2, 6), size=1.0, why=""):
    """Pieces of one text, each from the cache before it: the outputs, and what is in the ring."""
    q, k, v = window_inputs(t, sum(pieces), *heads, size)
    cache = wanted = None
    at = 0
    for T in pieces:
        part = slice(at, at + T)
        at += T
        text = f"{why}window {window}, pieces {pieces}, up to token {at}"
        got, cache = fn(q[part], k[part], v[part], window, cache)
        want, wanted = right_window(q[part], k[part], v[part], window, wanted)
        t.close(got, want, 1e-4, 1e-5, f"output: {text}", np.float32)
        keys, values, length = cache
        t.true(
            type(length) is int,
            f"length is a {type(length).__name__}, want a Python int: {text}",
            "not an int",
        )
        t.true(length == at, f"length is {length!r}: {text}", length)
        for name, one, mine, other in (
            ("keys", keys, *wanted[:2]),
            ("values", values, *wanted[1::-1]),
        ):
            mistakes = {
                "Both arrays of the cache hold the same: perhaps they are one array": other,
                "They are in the order of the tokens: token t is in slot t % window": np.roll(
                    mine, -at, axis=0
                ),
            }
            told = f"{name} in their slots: {text}"
            t.close(one, mine, 0, 0, told, np.float32, mistakes)


@window_cache.check("a text shorter than the window")
def _(fn, t):
    windows_agree(fn, t, 9, (5,))


@window_cache.check("a text longer than the window")
def _(fn, t):
    windows_agree(fn, t, 4, (11,))


@window_cache.check("one token at a time")
def _(fn, t):
    windows_agree(fn, t, 5, (1,) * 13, heads=(6, 3, 4))


@window_cache.check("pieces that go over the end of the ring")
def _(fn, t):
    windows_agree(fn, t, 7, (5, 4, 1, 6))


@window_cache.check("pieces longer than the window, and as long")
def _(fn, t):
    windows_agree(fn, t, 4, (3, 9, 4, 1, 2), heads=(6, 2, 4))


@window_cache.check("other windows, heads and pieces")
def _(fn, t):
    for _ in range(4):
        K = int(t.rng.integers(1, 4))
        pieces = tuple(int(n) for n in t.rng.integers(1, 12, 4))
        heads = (K * int(t.rng.integers(1, 4)), K, int(t.rng.integers(3, 9)))
        windows_agree(fn, t, int(t.rng.integers(2, 9)), pieces, heads)


@window_cache.check("a window of one token")
def _(fn, t):
    windows_agree(fn, t, 1, (3, 1, 2))


@window_cache.check("large logits")
def _(fn, t):
    windows_agree(fn, t, 5, (8, 1), size=14.0, why="logits up to several hundred: ")


@window_cache.check("logits far below zero")
def _(fn, t):
    # Every visible logit is about -32,768 and exact in float32: a hidden one that is "only" -10,000 would win.
    T, N, K, H, window = 7, 4, 2, 4, 3
    q = np.full((T, N, H), 128, np.float32)
    k = np.full((T, K, H), -128, np.float32)
    k[..., 0] += t.rng.integers(0, 4, (T, K)) / np.float32(64)
    v = t.rng.normal(size=(T, K, H)).astype(np.float32)
    cache = wanted = None
    for part in (slice(0, 2), slice(2, 6), slice(6, 7)):
        got, cache = fn(q[part], k[part], v[part], window, cache)
        want, wanted = right_window(q[part], k[part], v[part], window, wanted)
        why = f"logits of about -32768, window {window}, tokens {part.start} to {part.stop - 1}"
        t.close(got, want, 1e-4, 1e-5, why, np.float32)


@window_cache.check("two texts from one cache")
def _(fn, t):
    q, k, v = window_inputs(t, 12, 4, 2, 6)
    _, cache = right_window(q[:6], k[:6], v[:6], 4)
    for part in (slice(6, 9), slice(9, 12)):
        given = frozen(cache)
        try:
            got = fn(q[part], k[part], v[part], 4, given)[0]
        except ValueError as error:
            t.true("read-only" not in str(error), "the cache that was given was changed", "changed")
            raise
        want = right_window(q[part], k[part], v[part], 4, cache)[0]
        t.close(got, want, 1e-4, 1e-5, "from the same cache", np.float32)


mistaken(
    window_cache,
    "one_token_too_many",
    "Your queries see one token more than the window. A window of 4 is the token itself and three before it.",
    window_with(more=1),
)
mistaken(
    window_cache,
    "one_token_too_few",
    "Your queries see one token less than the window. A window of 4 is the token itself and three before it.",
    window_with(more=-1),
)
mistaken(
    window_cache,
    "the_future",
    "Your queries see the tokens after them that come in the same call.",
    window_with(causal=False),
)
mistaken(
    window_cache,
    "old_ones_dropped_first",
    "Of the old tokens you keep only those that stay in the ring after this call. The first of the new tokens still "
    "see older ones.",
    window_with(drops_first=True),
)
mistaken(
    window_cache,
    "ring_updated_first",
    "You put all new tokens into the ring before the attention. The late ones overwrite what the early ones still see.",
    window_with(ring_first=True),
)
mistaken(
    window_cache,
    "the_past_forgotten",
    "Your queries see the tokens of their own call alone. Those in the cache count too, as far as the window reaches.",
    window_with(forgets=True),
)
mistaken(
    window_cache,
    "empty_slots_seen",
    "Slots that no token has reached take part in your softmax. A key of zeros has a logit of 0, not minus infinity.",
    window_with(empty=True),
)
mistaken(
    window_cache,
    "slots_from_zero",
    "You count slots from the start of the call. Token t of the whole text is in slot t % window.",
    window_with(from_zero=True),
)
mistaken(
    window_cache,
    "first_tokens_kept",
    "Of more tokens than the window you keep the first. The next token needs the last ones.",
    window_with(keeps_last=False),
)
mistaken(
    window_cache,
    "length_of_the_call",
    "Your length is that of the last call. It counts all tokens so far.",
    window_with(adds=False),
)
mistaken(
    window_cache,
    "length_stops_at_the_window",
    "Your length stops at the window. It keeps counting, because it says which slot comes next.",
    window_with(whole_int=False),
)
mistaken(
    window_cache,
    "a_list_that_moves",
    "You move the older tokens up and add new ones at the end. In a ring buffer every token stays in its slot, "
    "t % window, and only the slots of the new ones are written.",
    window_with(list_=True),
)
mistaken(
    window_cache,
    "heads_in_turns",
    "You give query head n the key head n % K. Each key head serves N / K neighbours: n // (N / K).",
    window_with(neighbours=False),
)
mistaken(
    window_cache,
    "no_scale",
    "You don't divide the logits by sqrt(H).",
    window_with(scaled=False),
)
mistaken(
    window_cache,
    "scaled_by_H",
    "You divide the logits by H. It's the square root of H.",
    window_with(scale="H"),
)
mistaken(
    window_cache,
    "scaled_by_heads",
    "You divide the logits by the square root of the number of heads. It's that of H, the features of one head.",
    window_with(scale="N"),
)
mistaken(
    window_cache,
    "slots_in_order",
    "You read the ring from slot 0 on as if its tokens were in order. Once it has gone round, the oldest token is in "
    "the middle: position t is in slot t % window.",
    window_with(in_order=True),
)
mistaken(
    window_cache,
    "positions_of_the_call",
    "You count the new tokens' positions from 0 in each call, and those of the cache from the start of the text. Both "
    "count from the start of the text.",
    window_with(offset=False),
)
mistaken(
    window_cache,
    "hidden_logits_of_zero",
    "You set the logits of hidden tokens to 0. Their exponential is then 1: the logit has to be minus infinity.",
    window_with(masked=0.0),
)
mistaken(
    window_cache,
    "hidden_logits_not_low_enough",
    "A hidden token gets weight where all the visible logits are very low. Your mask's number isn't low enough: take "
    "minus infinity.",
    window_with(masked=-1e4),
)
mistaken(
    window_cache,
    "masked_after_the_softmax",
    "You hide tokens after the softmax, and the weights that are left don't add up to 1.",
    window_with(renormalised=False),
)
mistaken(
    window_cache,
    "one_maximum_for_all",
    "You subtract one maximum from all rows. Where another row's logits are hundreds lower, every exponential is 0, "
    "and 0 / 0 is NaN. Each row has its own maximum.",
    window_with(one_top=True),
)
mistaken(
    window_cache,
    "a_numpy_length",
    "Your length is a NumPy integer. Make it an int.",
    window_with(python_int=False),
)
mistaken(
    window_cache,
    "exponentials_overflow",
    "Your softmax overflows where logits are large. Subtract each row's largest logit first.",
    window_with(safe=False),
)
mistaken(
    window_cache,
    "cache_changed",
    "You write into the arrays of the cache that you were given. Copy them first.",
    window_with(in_place=True),
)
mistaken(
    window_cache,
    "float64_output",
    "Your output is float64. NumPy's sqrt of an int is a float64 number, and arrays that meet one may become float64.",
    window_with(dtype=np.float64),
)

# ---------------------------------------------------------------------------------- shard_reader

shard_reader = Exercise(
    "23.shard_reader",
    title="Only the bytes that a device needs",
    function="read_slice",
    minutes=25,
    points=15,
    forbid=("safetensors", "minitext.checkpoint", "mmap"),
    statement="""
A checkpoint of 800 GB is read by hundreds of devices, and each of them keeps a part of every tensor. Write
`read_slice(file, start, dtype, shape, where)`, which reads that part and nothing else.

- The tensor begins at byte `start`. Its numbers follow one another, the last dimension running fastest.
- `where` has a pair (begin, end) for each dimension, such as `((0, 576), (384, 768))`. The result is a NumPy array of
  the part's shape and of `dtype`, which may be bfloat16 from ml_dtypes.
- `file` has `seek(position)`, `read(count)` and `tell()`, like a file opened with `buffering=0`. So `read` may return
  fewer bytes than you ask for, and none at the end of the file. Its position may be anywhere when you get it.
- Read every byte of the part once, and no other byte. Bytes that are contiguous in the file take one `read`: a single
  one for some rows of a matrix, but one for each row if you need half of the columns.
- A part that isn't within the tensor is a `ValueError`, even if it is empty, and so is a file that ends too early. An
  empty part within the tensor reads nothing and is returned with its shape, such as [0, 5].
""",
    hints=(
        "A tensor is [2, 3, 4], and you need all of dimension 0, row 1 of dimension 1 and all of dimension 2. How many "
        "contiguous pieces is that, and how long is each? What if you need half of dimension 2 as well?",
        "Find the last dimension that you need only a part of. Everything after it is contiguous, and so is your "
        "range along it. Each choice of indices before it is a piece of its own.",
        "With `cut` that dimension, a piece begins at `start` plus the sum of index times stride, where the stride of "
        "a dimension is `itemsize * math.prod(shape[axis + 1:])`. For each: seek, then read until the piece is whole "
        "or `read` returns nothing. `np.frombuffer(data, dtype).reshape(part)` makes the array.",
    ),
)


class LoggedFile:
    """A file in memory that notes what is asked of it; each read returns at most `most` bytes."""

    def __init__(self, data, most=None):
        self.data, self.most, self.at = bytes(data), most, 3  # somebody has read from it before
        self.asked, self.returned = [], []

    def seek(self, position):
        self.at = int(position)
        return self.at

    def tell(self):
        return self.at

    def read(self, count=-1):
        count = len(self.data) - self.at if count is None or count < 0 else int(count)
        self.asked.append((self.at, count))
        found = self.data[
            self.at : self.at + (count if self.most is None else min(count, self.most))
        ]
        self.returned += range(self.at, self.at + len(found))
        self.at += len(found)
        return found


def reader_with(
    *, short=True, start_counts=True, checks=True, ends=True, one_run=False, by_row=False, by_number=False,
    whole=False, itemsize=None, reverse=False, transposed=False, wide=False, empty=True, first=False,
    empty_first=False, refuses_empty=False, seeks=True, first_cut=False, begins=True, error=ValueError, flat=False,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(file, start, dtype, shape, where):
        inside = len(where) == len(shape)
        if empty_first and any(a == b for a, b in where):
            return np.empty([b - a for a, b in where], dtype)
        inside = inside and all(0 <= a <= b <= n for (a, b), n in zip(where, shape, strict=True))
        if refuses_empty:
            inside = inside and all(a < b for a, b in where)
        if checks and not inside:
            raise ValueError(f"{where} is not a part of {shape}")
        if not checks:
            where = tuple(
                (max(0, min(a, n)), max(0, min(b, n)))
                for (a, b), n in zip(where, shape, strict=False)
            )
        start = start if start_counts else 0
        size = itemsize or np.dtype(dtype).itemsize
        part = [b - a for a, b in where]
        if 0 in part:
            if not empty:
                file.seek(start)
                file.read(math.prod(shape) * size)
            return np.empty(part, dtype)
        if whole:  # everything, and then the part
            part_of, ranges = shape, tuple(slice(a, b) for a, b in where)
            where = tuple((0, n) for n in shape)
        else:
            part_of, ranges = part, ...
        cut = max((i for i, n in enumerate(shape) if where[i][1] - where[i][0] < n), default=0)
        if by_row and shape:
            cut = len(shape) - 1
        if first:
            cut = 0
        if first_cut:
            cut = min((i for i, n in enumerate(shape) if where[i][1] - where[i][0] < n), default=0)
        given, where = where, where if begins else tuple((0, b - a) for a, b in where)
        if by_number and shape:
            cut = len(shape)
        offsets = [start]
        for axis, (a, b) in enumerate(where[: cut + 1]):
            stride = size * math.prod(shape[axis + 1 :] if not reverse else shape[:axis])
            offsets = [
                offset + i * stride
                for offset in offsets
                for i in range(a, a + 1 if axis == cut else b)
            ]
        where = given
        run = math.prod(b - a for a, b in where) * size // len(offsets)
        if one_run:  # from the first number to the last
            end = offsets[-1] + run
            skips = [o - offsets[0] for o in offsets]
            offsets, length = offsets[:1], end - offsets[0]
        else:
            skips, length = None, run
        data = bytearray()
        for offset in offsets:
            if seeks or offset:
                file.seek(offset)
            left = length
            while left:
                piece = file.read(left)
                if not piece:
                    if ends:
                        raise error("the file ends within the tensor")
                    piece = bytes(left)
                data += piece
                left -= len(piece)
                if not short:
                    data += bytes(left)
                    left = 0
        if skips is not None:
            data = bytearray(b"".join(data[s : s + run] for s in skips))
        if size != np.dtype(dtype).itemsize:
            data = np.resize(
                np.frombuffer(bytes(data), np.uint8), math.prod(part_of) * np.dtype(dtype).itemsize
            )
            data = bytearray(data.tobytes())
        out = np.frombuffer(data, dtype)
        out = out.reshape(part_of[::-1]).T if transposed else out.reshape(part_of)
        out = out[ranges] if whole else out
        out = out.ravel() if flat else out
        return out.astype(np.float32) if wide else out

    return fn


right_part = reader_with()


def stored_tensor(t, shape, dtype, before=0, after=0):
    """The bytes of a tensor with others around it, and the tensor."""
    dtype = np.dtype(dtype)
    tensor = t.rng.integers(-99, 99, shape).astype(dtype)
    around = (t.rng.integers(0, 256, n, dtype=np.uint8).tobytes() for n in (before, after))
    return next(around) + tensor.tobytes() + next(around), tensor


def needed_reads(start, itemsize, shape, where):
    """The contiguous pieces of a part, (position, bytes), in the order of the file."""
    index = np.arange(math.prod(shape)).reshape(shape)[tuple(slice(a, b) for a, b in where)].ravel()
    breaks = np.flatnonzero(np.diff(index) > 1) + 1
    return [
        (start + int(piece[0]) * itemsize, len(piece) * itemsize)
        for piece in np.split(index, breaks)
        if len(piece)
    ]


def part_is_read(fn, t, shape, where, dtype=np.float32, before=40, most=None):
    data, tensor = stored_tensor(t, shape, dtype, before, 24)
    file = LoggedFile(data, most)
    where = tuple(where)
    pieces = needed_reads(before, tensor.dtype.itemsize, shape, where)
    why = f"{np.dtype(dtype)} {list(shape)}, part {where}"
    if most is not None:
        why += f", `read` returns at most {most} bytes at a time"
    try:
        got = fn(file, before, np.dtype(dtype), tuple(shape), where)
    except ValueError as error:
        error.add_note(f"want the part of {why}")
        raise
    begins = [at for at, count in file.asked if count]
    for i, (mine, (at, _)) in enumerate(zip(begins, pieces, strict=False)):
        if mine != at and most is None:
            why += f"; your read number {i} begins at byte {mine}, and the part's piece {i} at byte {at}"
            break
    t.close(got, tensor[tuple(slice(a, b) for a, b in where)], 0, 0, why, dtype)
    wanted = {b for at, count in pieces for b in range(at, at + count)}
    extra, twice = len(set(file.returned) - wanted), len(file.returned) - len(set(file.returned))
    t.true(not extra, f"{extra} bytes were read that the part doesn't need: {why}", extra)
    t.true(not twice, f"{twice} bytes were read more than once: {why}", twice)
    if most is None:
        reads = len([ask for ask in file.asked if ask[1]])
        t.true(
            reads == len(pieces), f"{reads} reads for {len(pieces)} contiguous pieces: {why}", reads
        )


@shard_reader.check("a whole tensor")
def _(fn, t):
    part_is_read(fn, t, (5, 7), ((0, 5), (0, 7)))
    part_is_read(fn, t, (3, 2, 4), ((0, 3), (0, 2), (0, 4)), before=0)


@shard_reader.check("some rows")
def _(fn, t):
    part_is_read(fn, t, (6, 5), ((2, 5), (0, 5)))
    part_is_read(fn, t, (6, 3, 5), ((2, 5), (0, 3), (0, 5)))


@shard_reader.check("some columns")
def _(fn, t):
    part_is_read(fn, t, (6, 8), ((0, 6), (3, 7)))
    part_is_read(fn, t, (6, 8), ((1, 4), (0, 3)))


@shard_reader.check("a dimension in the middle")
def _(fn, t):
    part_is_read(fn, t, (4, 6, 5), ((0, 4), (2, 4), (0, 5)))
    part_is_read(fn, t, (2, 3, 5, 4), ((1, 2), (1, 3), (0, 5), (0, 4)))


@shard_reader.check("other dtypes")
def _(fn, t):
    for dtype in (ml_dtypes.bfloat16, np.float16, np.int8, np.int32, np.float64):
        part_is_read(fn, t, (6, 8), ((2, 6), (1, 7)), dtype)


@shard_reader.check("any shape and part")
def _(fn, t):
    for _ in range(12):
        shape = tuple(int(n) for n in t.rng.integers(1, 6, t.rng.integers(1, 5)))
        begins = [int(t.rng.integers(0, n)) for n in shape]
        where = [(a, int(t.rng.integers(a + 1, n + 1))) for a, n in zip(begins, shape, strict=True)]
        part_is_read(fn, t, shape, where, before=int(t.rng.integers(0, 99)))


@shard_reader.check("reads that return less than was asked for")
def _(fn, t):
    part_is_read(fn, t, (6, 8), ((0, 6), (0, 8)), most=50)
    part_is_read(fn, t, (6, 8), ((1, 5), (2, 8)), most=7)


@shard_reader.check("one number, and none")
def _(fn, t):
    part_is_read(fn, t, (), ())
    part_is_read(fn, t, (4, 5), ((2, 3), (4, 5)))
    for where in (((2, 2), (0, 5)), ((0, 4), (5, 5))):
        part_is_read(fn, t, (4, 5), where)


@shard_reader.check("parts that aren't within the tensor")
def _(fn, t):
    data, _ = stored_tensor(t, (4, 5), np.float32, 40, 400)
    for where in (
        ((0, 5), (0, 5)), ((-1, 2), (0, 5)), ((0, 4), (2, 6)), ((3, 2), (0, 5)), ((0, 4),), ((0, 4), (0, 5), (0, 1)),
        ((5, 5), (0, 5)), ((0, 4), (-1, -1)),
    ):  # fmt: skip
        args = LoggedFile(data), 40, np.dtype(np.float32), (4, 5), where
        t.raises(ValueError, fn, *args, why=f"part {where} of [4, 5]")


@shard_reader.check("a file that ends too early")
def _(fn, t):
    data, _ = stored_tensor(t, (4, 5), np.float32, 40)
    for lost in (1, 4, 70):
        for where in (((0, 4), (0, 5)), ((1, 4), (2, 5))):
            args = LoggedFile(data[:-lost]), 40, np.dtype(np.float32), (4, 5), where
            t.raises(ValueError, fn, *args, why=f"{lost} bytes are missing, part {where}")


mistaken(
    shard_reader,
    "start_forgotten",
    "You count positions from the start of the file. The tensor begins at byte `start`.",
    reader_with(start_counts=False),
)
mistaken(
    shard_reader,
    "everything_read",
    "You read the whole tensor and cut the part out. That is what a device with little memory can't do.",
    reader_with(whole=True),
)
mistaken(
    shard_reader,
    "from_first_to_last",
    "You read everything between the first number and the last. Of half of the columns, each row is its own piece.",
    reader_with(one_run=True),
)
mistaken(
    shard_reader,
    "a_read_for_each_row",
    "You read row by row, also where rows follow one another in the file. A part with whole rows is one piece.",
    reader_with(by_row=True),
)
mistaken(
    shard_reader,
    "a_read_for_each_number",
    "You read number by number. What is contiguous in the file takes one read.",
    reader_with(by_number=True),
)
mistaken(
    shard_reader,
    "first_dimension_alone",
    "You treat the part as one piece, whatever is cut. It is one only if nothing after the first dimension is cut.",
    reader_with(first=True),
)
mistaken(
    shard_reader,
    "first_cut_instead_of_last",
    "You treat everything after the first dimension that is cut as contiguous. It's the last one that decides.",
    reader_with(first_cut=True),
)
mistaken(
    shard_reader,
    "begins_forgotten",
    "Your indices begin at 0 in every dimension. The part begins where `where` says.",
    reader_with(begins=False),
)
mistaken(
    shard_reader,
    "one_dimension",
    "You return the numbers in one dimension. Give them the part's shape.",
    reader_with(flat=True),
)
mistaken(
    shard_reader,
    "no_seek_to_the_start",
    "You don't seek where the position is 0. The file may have been read before, so seek for every piece.",
    reader_with(seeks=False),
)
mistaken(
    shard_reader,
    "empty_before_checked",
    "You return an empty part before you check where it is. One outside the tensor is a mistake too.",
    reader_with(empty_first=True),
)
mistaken(
    shard_reader,
    "empty_refused",
    "You refuse an empty part. A device may have nothing of a tensor: return an empty array of the part's shape.",
    reader_with(refuses_empty=True),
)
mistaken(
    shard_reader,
    "end_of_file_error",
    "You raise another exception than ValueError where the file ends.",
    reader_with(error=EOFError),
)
mistaken(
    shard_reader,
    "first_dimension_fastest",
    "Your strides grow from the first dimension on. The last dimension runs fastest in the file.",
    reader_with(reverse=True),
)
mistaken(
    shard_reader,
    "four_bytes_each",
    "You count four bytes a number. How many there are depends on the dtype.",
    reader_with(itemsize=4),
)
mistaken(
    shard_reader,
    "one_read_is_enough",
    "You take what the first `read` returns. It may be less than you asked for: read again until the piece is whole.",
    reader_with(short=False),
)
mistaken(
    shard_reader,
    "parts_unchecked",
    "You don't check that the part is within the tensor. What is read then belongs to another tensor.",
    reader_with(checks=False),
)
mistaken(
    shard_reader,
    "zeros_after_the_end",
    "You fill up with zeros where the file ends. A file that is too short is a ValueError.",
    reader_with(ends=False),
)
mistaken(
    shard_reader,
    "dimensions_reversed_in_the_result",
    "Your result has its numbers in the order of the first dimension running fastest. The last one does, in the file "
    "and in NumPy.",
    reader_with(transposed=True),
)
mistaken(
    shard_reader,
    "float32_always",
    "You return float32 whatever the tensor's dtype. A copy of twice the size is what a slice should avoid.",
    reader_with(wide=True),
)
mistaken(
    shard_reader,
    "an_empty_part_read",
    "You read something for a part that has no numbers.",
    reader_with(empty=False),
)

# --------------------------------------------------------------------------------- find_settings

find_settings = Exercise(
    "23.find_settings",
    title="Which settings are theirs?",
    function="find_settings",
    minutes=35,
    points=20,
    statement="""
You have somebody's model, the program that they ran it with, and your own decoder with its switches. All names and
shapes fit, but the numbers don't. Some settings are off, and you don't know which, or in which layers. Write
`find_settings(ours, theirs, options, layers, vocab, longest)`, which finds the settings that their program uses.

- `theirs(tokens)` returns a list with a NumPy array [T, D] for each layer: the residual stream after it. `tokens` is an
  integer array [T] of your choice, with numbers below `vocab`. T is at most `longest`.
- `ours(settings, tokens)` returns the same for your decoder. `settings` is a list with a dict for each layer.
- `options` has the values that each setting may have, such as `{"window": [None, 6, 20], "base": [1e4, 1e6]}`. Each
  layer has settings of its own, and any number of them may be off.
- Return the settings of `theirs`: a list with a dict for each layer, which has a value for each name in `options`.
- The two programs round differently. With the right settings their numbers agree to about six digits.
- Running a model is expensive. Call `theirs` at most 3 times, and `ours` at most twice for each layer and
  combination of values. With 5 layers and 24 combinations that makes 240 calls. Trying every layer's combinations with
  every other layer's would take millions.
""",
    hints=(
        "Look at the stream after layer 0 alone. On which layers' settings does it depend? Once it agrees, what do you "
        "know about the stream after layer 1?",
        "On which prompts is a window of 20 the same as none? On which are two bases of rope the same? And if numbers "
        "never agree exactly, which of the combinations do you take?",
        "Draw `longest` tokens at random. For layer 0, 1, 2 and so on: try every combination (`itertools.product`) in "
        "this layer, with the layers before it as found. Keep the one whose stream after this layer is nearest to "
        "theirs.",
    ),
)


class Decoder:
    """A small decoder in float64 whose layers have settings of their own, and what was asked of it."""

    def __init__(self, t, layers, vocab, longest, spread=1.0, D=8):
        self.layers, self.vocab, self.longest, self.D = layers, vocab, longest, D
        names = "q", "k", "v", "o", "up", "down"
        self.table = t.rng.normal(size=(vocab, D))
        self.table[:, 0] *= spread
        self.weights = [
            {name: t.rng.normal(size=(D, D)) / math.sqrt(D) for name in names}
            for _ in range(layers)
        ]
        self.table[1] = self.table[0]  # a prompt of these two looks varied and isn't
        for w in self.weights:  # and the sum of a stream's features says nothing
            for name in ("o", "down"):
                w[name] -= w[name].mean(axis=1, keepdims=True)
        self.calls = 0

    def __call__(self, settings, tokens, dtype=np.float64):
        self.calls += 1
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or not 1 <= len(tokens) <= self.longest:
            raise ValueError(
                f"tokens have the shape {tokens.shape}, want [T] with T at most {self.longest}"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab:
            raise ValueError(
                f"tokens are from {tokens.min()} to {tokens.max()}, with a vocabulary of {self.vocab}"
            )
        if len(settings) != self.layers:
            raise ValueError(
                f"settings for {len(settings)} layers, and the model has {self.layers}"
            )
        x, found = self.table[tokens].astype(dtype), []
        for layer, w in zip(settings, self.weights, strict=True):
            x = self.layer(layer, x, {name: value.astype(dtype) for name, value in w.items()})
            found.append(x)
        return found

    def layer(self, settings, x, w):
        T, D = x.shape
        at = np.arange(T)
        epsilon = settings.get("epsilon", 1e-5)

        def norm(y):
            return (y / np.sqrt(np.mean(y**2, -1, keepdims=True) + epsilon)).astype(x.dtype)

        h = norm(x)
        angle = at[:, None] * settings.get("base", 100.0) ** (-np.arange(D // 2) / (D // 2))

        def rotated(y):
            a, b = y[:, : D // 2], y[:, D // 2 :]
            cos, sin = np.cos(angle), np.sin(angle)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], 1).astype(x.dtype)

        logits = 0.4 * rotated(h @ w["q"]) @ rotated(h @ w["k"]).T
        cap, window = settings.get("softcap"), settings.get("window")
        logits = cap * np.tanh(logits / cap) if cap else logits
        seen = at[None] <= at[:, None]
        if window:
            seen &= at[None] > at[:, None] - window
        logits = np.where(seen, logits, -np.inf)
        exps = np.exp(logits - logits.max(-1, keepdims=True))
        x = x + (exps / exps.sum(-1, keepdims=True)).astype(x.dtype) @ (h @ w["v"]) @ w["o"]
        up = norm(x) @ w["up"]
        kinds = {"relu": lambda u: np.maximum(u, 0), "tanh": np.tanh}
        active = kinds.get(settings.get("activation"), lambda u: u / (1 + np.exp(-u)))
        return x + active(up).astype(x.dtype) @ w["down"]


NAMES = "window", "base", "activation", "epsilon", "softcap"


def options_of_chance(t, names):
    """Values that each of these settings may have, in an order of chance."""
    windows = [None, int(t.rng.integers(3, 6)), int(t.rng.integers(7, 10))]
    bases = [float(t.rng.integers(5, 20)), float(t.rng.integers(80, 200))]
    activations = [("silu", "relu", "tanh")[i] for i in t.rng.permutation(3)[:2]]
    epsilons = [float(t.rng.uniform(1e-6, 1e-5)), float(t.rng.uniform(0.05, 0.2))]
    caps = [None, float(t.rng.uniform(1.5, 2.5))]
    all_ = dict(zip(NAMES, (windows, bases, activations, epsilons, caps), strict=True))
    return {name: [all_[name][i] for i in t.rng.permutation(len(all_[name]))] for name in names}


def combinations(options):
    return [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]


def what_was_tried(calls, want, layer, longest):
    """What the calls of `ours` say about a wrong answer, whose first wrong layer this is."""
    if not calls:
        return "you never call `ours`"
    if max(len(tokens) for _, tokens in calls) < longest:
        return f"your prompts are shorter than {longest} tokens: a short one may not tell settings apart"
    if all(len(set(tokens)) <= 2 for _, tokens in calls):
        return "your prompts have hardly any different tokens: such a prompt may not tell settings apart"
    if len(want) > 1 and all(one == tried[0] for tried, _ in calls for one in tried):
        return "you only tried settings that are the same in all layers, and each has its own"
    after = [tried[layer] for tried, _ in calls if tried[:layer] == want[:layer]]
    if want[layer] not in after and all(
        any(one[name] == value for one in after) for name, value in want[layer].items()
    ):
        return (
            f"in layer {layer} you tried each value of {want[layer]}, but never all of them together: settings of "
            "one layer can't be found one by one"
        )
    if want[layer] not in after:
        return (
            f"you never tried {want[layer]} in layer {layer} while the layers before it were right"
        )
    return (
        f"you did try {want[layer]} in layer {layer}, and preferred other streams: compare the stream after it, "
        "number by number, since later streams aren't right yet, and in a sum differences cancel"
    )


def settings_found(fn, t, names, layers, longest, usual=(), alike=False, spread=1.0):
    """Whether the answer finds settings of chance, in as few calls as it may have; layers in `usual` have the first."""
    options = options_of_chance(t, names)
    choices, vocab = combinations(options), int(t.rng.integers(12, 60))
    decoder, their_calls = Decoder(t, layers, vocab, longest, spread), 0
    want = [
        choices[0 if layer in usual else int(t.rng.integers(1, len(choices)))]
        for layer in range(layers)
    ]
    want = want[:1] * layers if alike else want

    def theirs(tokens):
        nonlocal their_calls
        their_calls += 1
        found = decoder(want, tokens)
        decoder.calls -= 1
        return found

    calls = []

    def ours(settings, tokens):
        found = decoder(settings, tokens, np.float32)
        calls.append(([dict(one) for one in settings], [int(token) for token in tokens]))
        return found

    got = fn(
        ours,
        theirs,
        options,
        layers,
        vocab,
        longest,
    )
    why = f"{layers} layers, options {options}, prompts of up to {longest}"
    t.true(isinstance(got, (list, tuple)), f"got {type(got).__name__}, want a list", "no list")
    t.true(len(got) == layers, f"settings for {len(got)} layers, want {layers}", len(got))
    wrong = [
        (i, n)
        for i in range(layers)
        for n in options
        if not (isinstance(got[i], dict) and n in got[i])
    ]
    t.true(not wrong, f"a layer has no value for a setting: {(wrong or [''])[0]}", str(wrong))
    off = [(i, n) for i in range(layers) for n in options if got[i][n] != want[i][n]]
    layer, name = (off or [(0, names[0])])[0]
    t.true(
        not off,
        f"layer {layer}: got {name}={got[layer][name]}, want {want[layer][name]} ({len(off)} settings are off; "
        f"{what_was_tried(calls, want, layer, longest)}): {why}",
        str([[got[i][n] for n in options] for i in range(layers)]),
    )
    most = 2 * layers * len(choices)
    t.true(their_calls <= 3, f"{their_calls} calls of theirs, want at most 3", their_calls)
    t.true(
        decoder.calls <= most,
        f"{decoder.calls} calls of ours, want at most {most}: {why}",
        decoder.calls,
    )


@find_settings.check("one layer")
def _(fn, t):
    settings_found(fn, t, ("activation", "epsilon"), 1, 12)


@find_settings.check("layers that are all alike")
def _(fn, t):
    settings_found(fn, t, ("activation", "base", "epsilon"), 3, 16, alike=True)


@find_settings.check("layers that differ")
def _(fn, t):
    settings_found(fn, t, ("activation", "epsilon", "softcap"), 5, 14, usual=(0, 2))


@find_settings.check("windows")
def _(fn, t):
    for _ in range(3):
        settings_found(fn, t, ("window", "activation"), 4, 17)
        settings_found(fn, t, ("window",), 6, 11, usual=(0,))


@find_settings.check("rotations")
def _(fn, t):
    for _ in range(3):
        settings_found(fn, t, ("base", "softcap"), 4, 20)
        settings_found(fn, t, ("base",), 6, 15, usual=(1, 2))


@find_settings.check("all at once, and a feature that is large")
def _(fn, t):
    for _ in range(2):
        settings_found(fn, t, NAMES, 6, 24)
    settings_found(fn, t, ("window", "base", "activation"), 5, 18, spread=200.0)


def settings_with(
    *, tokens="random", judged="own", order=1, exact=False, alike=False, times=1, more=0, their_times=1, first=False,
    one_by_one=False,
):  # fmt: skip
    """The solution with a mistake that is asked for."""

    def fn(ours, theirs, options, layers, vocab, longest):
        rng = np.random.default_rng(5)
        count = {"few": 4, "one": 1}.get(tokens, longest + more)
        prompt = np.full(count, 7) if tokens == "alike" else rng.integers(0, vocab, count)
        for _ in range(their_times):
            want = theirs(prompt)
        choices = combinations(options)
        found = [choices[0]] * layers

        def apart(tried, layer):
            for _ in range(times):
                got = ours(tried, prompt)
            at = -1 if judged == "last" else layer
            if exact:
                return 0.0 if np.array_equal(got[at], want[at]) else 1.0
            return float(np.abs(got[at] - want[at]).max())

        if alike:
            return [min(choices, key=lambda choice: apart([choice] * layers, layers - 1))] * layers
        for layer in range(layers)[::order]:
            if one_by_one:
                for name, values in options.items():
                    each = [{**found[layer], name: value} for value in values]
                    tried = [[*found[:layer], one, *found[layer + 1 :]] for one in each]
                    found[layer] = each[int(np.argmin([apart(one, layer) for one in tried]))]
                continue
            tried = [[*found[:layer], choice, *found[layer + 1 :]] for choice in choices]
            found[layer] = choices[int(np.argmin([apart(one, layer) for one in tried]))]
            if first and layer == 0:
                break
        return found

    return fn


mistaken(
    find_settings,
    "one_token",
    "Your prompt is a single token. It only sees itself, so nothing that attention does can show.",
    settings_with(tokens="one"),
)
mistaken(
    find_settings,
    "too_short_a_prompt",
    "Your prompt is shorter than a window, which then hides nothing. Take as many tokens as you may have.",
    settings_with(tokens="few"),
)
mistaken(
    find_settings,
    "the_same_token",
    "All tokens of your prompt are the same. Their values are too, so it doesn't matter how much each is looked at.",
    settings_with(tokens="alike"),
)
mistaken(
    find_settings,
    "judged_by_the_last_layer",
    "You judge a layer by the model's last stream, which has the mistakes of all later layers in it. Judge it by its "
    "own.",
    settings_with(judged="last"),
)
mistaken(
    find_settings,
    "from_the_last_layer",
    "You begin with the last layer. Its input is wrong until all layers before it are right: go from front to back.",
    settings_with(order=-1),
)
mistaken(
    find_settings,
    "equal_or_not",
    "You look for streams that are exactly equal, and the two programs round differently. Take the nearest.",
    settings_with(exact=True),
)
mistaken(
    find_settings,
    "all_layers_alike",
    "You give all layers the same settings. Each layer has its own.",
    settings_with(alike=True),
)
mistaken(
    find_settings,
    "first_layer_only",
    "You stop after the first layer that was off. Later ones may be off too.",
    settings_with(first=True),
)
mistaken(
    find_settings,
    "one_setting_at_a_time",
    "You choose a layer's settings one at a time. While another one of them is off, the nearest value need not be the "
    "right one: try the combinations.",
    settings_with(one_by_one=True),
)
mistaken(
    find_settings,
    "too_many_calls",
    "Your settings are right, but you call `ours` too often. Each combination is needed once for each layer.",
    settings_with(times=3),
)
mistaken(
    find_settings,
    "theirs_too_often",
    "You call `theirs` more often than you may. One prompt is enough: keep what it returned.",
    settings_with(their_times=4),
)
mistaken(
    find_settings,
    "too_long_a_prompt",
    "Your prompt has more than `longest` tokens.",
    settings_with(more=1),
)
