"""Every argument of every exercise matters: a solution that is always given one argument's usual value must fail.

A learner may take an argument for a constant: write 0.9 for `b1`, or `arange` for positions. Checks that never pass
anything else would give full marks for it. So each argument, and each entry of one that is a dictionary or a settings
object, is frozen in turn:

- an array at the first value of its shape and dtype that the checks passed with another seed;
- anything else at the value that they passed most often.
"""

import collections
import copy
import functools
import inspect
import types

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

from minitext.book.grading import registry, source
from minitext.book.grading.evaluate import Attempt

ROOT = registry.exercises_root()
CHAPTERS = sorted({name[:2] for name in registry.known_ids(ROOT)})
QUICK = [
    "03.classify", "03.crossover_batch", "07.mixture", "07.packing", "07.process_shard", "07.resume", "08.interval",
    "08.retention",
]  # fmt: skip
SEEDS = 1, 2  # one to see the usual values, one to freeze with
EACH = "each"  # in a path: every element of a list
NEEDLESS = {  # entries that the right answer doesn't depend on, by exercise
    "04.count": {
        f"predict_cost.cfg.{key}"  # a matrix product costs the same with any of these
        for key in (
            "attention",
            "dense_layers",
            "dense_mlp",
            "dtype",
            "embed_scale",
            "ffn",
            "logit_scale",
            "logit_softcap",
            "norm_eps",
            "norm_offset",
            "norms",
            "period",
            "remat",
            "remat_save",
            "residual_scale",
            "rope",
            "scan_layers",
        )
    },
    "09.spec_puzzle": {"place.mesh.one"},  # an axis of size one is called so
    "11.fsdp_rules": {"place_state.params.temperature"},  # a scalar, with nothing to vary
    "20.mfu": {"mfu.peaks.int8"},  # no model computes in it; it is there for who takes the largest
    "21.find_coordinator": {"find_job.env.HOME", "find_job.env.PATH"},  # they decide nothing
}
NAMES = {  # dictionaries whose keys name the pieces of one whole: freezing one piece says nothing
    "22.overlap": "overlap.seconds.",
    "22.interval": "interval.program.",
    "27.manifest": ("faults.files.", "faults.wanted."),
    "27.resume": "resume.record.",
}


def solution(exercise):
    """The solution's function (or class), run as a learner's file is."""
    path = ROOT / "solutions" / f"{exercise.stem}.py"
    pieces = source.split(path.read_text(encoding="utf-8"))
    module = types.ModuleType("answer")
    exec(compile(source.compose(pieces, exercise.id, path.name), path.name, "exec"), vars(module))
    return getattr(module, exercise.function)


def through(change, fn, name=""):
    """`fn` with its arguments passed through `change(path, value, has_entries)`; of a class, those of all its methods.

    A path is a tuple: the function's name, the argument's name, then the keys that lead to an entry.
    """
    name = name or fn.__name__
    if inspect.isclass(fn):
        methods = {
            key: through(change, method, key)
            for key, method in vars(fn).items()
            if inspect.isfunction(method)
        }
        return type(fn.__name__, (fn,), methods)
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def changed(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for key, value in bound.arguments.items():
            if key != "self":
                bound.arguments[key] = with_entries((name, key), value, change)
        return fn(*bound.args, **bound.kwargs)

    return changed


class Here:
    """An answer that is changed in this process only: sent to another one, it is the solution itself.

    So an exercise about several processes has to vary each argument where one process is enough to notice.
    """

    def __init__(self, change, fn):
        functools.update_wrapper(self, fn)
        self._fn, self._changed = fn, through(change, fn)

    def __call__(self, *args, **kwargs):
        return self._changed(*args, **kwargs)

    def __reduce__(self):
        return unchanged, (self._fn,)


def unchanged(fn):
    return fn


def with_entries(path, value, change):
    """`value` passed through `change`; if it has entries, each of them, unless the whole was changed."""
    dicts = type(value) is list and all(type(one) is dict for one in value)
    settings = isinstance(value, pydantic.BaseModel)
    named = type(value) is dict and all(isinstance(key, str) for key in value)
    has_entries = dicts or settings or named
    whole = change(path, value, has_entries)
    if whole is not value or not has_entries:
        return whole
    if dicts:
        return [with_entries((*path, EACH), one, change) for one in value]
    old = (
        {key: getattr(value, key) for key in type(value).model_fields} if settings else dict(value)
    )
    new = {key: change((*path, key), one, False) for key, one in old.items()}
    return value.model_copy(update=new) if settings else new


def kind(value):
    """Structure, shapes and dtypes of a pytree with arrays; None for a value without any."""
    leaves, structure = jax.tree.flatten(value)
    if not any(map(is_array, leaves)):
        return None
    shapes = [(np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]
    return str(structure), str(shapes)


def is_array(value):
    return isinstance(value, (jax.Array, np.ndarray))


def is_traced(value):
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def ones_like(value):
    """Ones for arrays whose values the checks never showed, because they were traced or of new shapes."""
    return jax.tree.map(lambda leaf: jnp.ones_like(leaf) if is_array(leaf) else leaf, value)


class Usual:
    """The values that the checks pass, by path, and the usual one among them."""

    def __init__(self):
        self.arrays = collections.defaultdict(dict)
        self.values = collections.defaultdict(collections.Counter)
        self.first = {}

    def see(self, path, value, has_entries):
        """Writes a value down and returns it."""
        of = kind(value)
        if has_entries or (is_array(value) and value.size == 0):
            return value
        if of is None:
            key = path, f"{type(value).__name__} {value!r}"
            self.values[path][key] += 1
            plain = isinstance(value, (list, tuple, set, dict))  # the answer may change them
            self.first.setdefault(key, copy.deepcopy(value) if plain else value)
        else:
            known = self.arrays[path]
            if not is_traced(value):
                known.setdefault(of, value.copy() if isinstance(value, np.ndarray) else value)
        return value

    def paths(self):
        return sorted({*self.arrays, *self.values})

    def frozen(self, path, value):
        """What the checks pass as a rule, in place of a value."""
        of = kind(value)
        if of is not None:
            known = self.arrays[path]
            return known[of] if of in known else ones_like(value)
        usual = self.first[self.values[path].most_common(1)[0][0]]
        return copy.deepcopy(usual) if isinstance(usual, (list, tuple, set, dict)) else usual


def unvaried(exercise, fn=None):
    """The paths whose values the checks could as well leave out."""
    fn = fn or solution(exercise)
    usual, learner = Usual(), registry.learner_number("a learner")
    seed, other = SEEDS
    changed = through if exercise.processes == 1 else Here
    assert Attempt(exercise, changed(usual.see, fn), seed, learner).run().passed, exercise.id
    found = []
    for frozen in usual.paths():

        def change(path, value, has_entries, frozen=frozen):
            return usual.frozen(path, value) if path == frozen else value

        attempt = Attempt(exercise, changed(change, fn), other, learner)
        if attempt.run(to_first_failure=True).passed:
            found.append(".".join(map(str, frozen)))
    pieces = {path for path in found if path.startswith(NAMES.get(exercise.id, " "))}
    return sorted(set(found) - pieces - NEEDLESS.get(exercise.id, set()))


def test_a_frozen_argument_is_found():
    exercise = registry.Exercise("90.scaled", "t", "scaled", 10, 1, "s", ("a", "b", "c"))

    @exercise.check("scaled")
    def _(fn, t):
        x = t.rng.normal(size=3)
        for by in (2, 2, 5):
            t.close(fn(x, np.arange(3), {"by": by, "plus": 1}), by * x + np.arange(3) + 1)

    def scaled(x, places, settings, least=0):
        assert least == 0
        return settings["by"] * x + places + settings["plus"]

    assert unvaried(exercise, scaled) == [
        "scaled.least", "scaled.places", "scaled.settings.plus",
    ]  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_every_argument_is_varied(name):
    (exercise,) = registry.select(ROOT, [name]).values()
    assert unvaried(exercise) == []


@pytest.mark.audit
@pytest.mark.timeout(1800)  # two minutes by itself; cores may be shared
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_argument_of_a_chapter_is_varied(chapter):
    exercises = registry.select(ROOT, [chapter]).values()
    found = {exercise.id: unvaried(exercise) for exercise in exercises}
    assert not any(found.values()), {id: paths for id, paths in found.items() if paths}
