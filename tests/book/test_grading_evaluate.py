"""The hint that a wrong answer gets is that of its own mistake, or none in particular."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from minitext.book.grading import Exercise, evaluate, raising
from minitext.book.grading.watch import Watched

SEED, LEARNER = 3, 1


def rounding():
    """Round to the nearest even number, with two mutants."""
    exercise = Exercise("90.rounded", "Rounded", "rounded", 10, 1, "s", ("first", "b", "c"))

    @exercise.check("one number")
    def _(fn, t):
        t.close(fn(np.array([2.5])), np.array([2.0]))

    @exercise.check("negative numbers")
    def _(fn, t):
        t.close(fn(np.array([-2.5, -3.7, -0.2])), np.array([-2.0, -4.0, 0.0]))

    @exercise.check("large numbers")
    def _(fn, t):
        t.close(fn(np.array([1000.5, 1001.6])), np.array([1000.0, 1002.0]))

    @exercise.check("no numbers")
    def _(fn, t):
        t.equal(len(fn(np.zeros(0))), 0)

    @exercise.mutant("You round half up.")
    def half_up(x):
        return np.floor(x + 0.5)

    @exercise.mutant("You never round down.")
    def up(x):
        return np.ceil(x)

    return exercise


def half_up_in_another_way(x):
    return x + 0.5 - (x + 0.5) % 1


def half_up_and_of_no_numbers_none(x):
    return half_up_in_another_way(x) if len(x) else [0.0]


def half_up_below_a_thousand(x):  # passes a check that both mutants fail
    return np.where(x > 999, np.round(x), np.floor(x + 0.5))


def always_three(x):  # agrees with both mutants in the first check alone
    return np.full(len(x), 3.0)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (np.ceil, "You never round down."),
        (half_up_in_another_way, "You round half up."),
        (half_up_and_of_no_numbers_none, "You round half up."),  # and makes another mistake besides
        (half_up_below_a_thousand, "first"),
        (always_three, "first"),
    ],
)
def test_one_value_in_common_with_a_mutant_is_not_its_mistake(answer, hint):
    attempt = evaluate.Attempt(rounding(), answer, SEED, LEARNER).run()
    assert evaluate.choose_hint(attempt) == hint


def test_messages_of_exceptions_do_not_tell_mistakes_apart():
    exercise = Exercise("90.split", "Split", "split", 10, 1, "s", ("first", "b", "c"))

    @exercise.check("even")
    def _(fn, t):
        t.equal(fn(6), 3)

    @exercise.check("odd")
    def _(fn, t):
        t.equal(fn(7), 3)

    @exercise.mutant("You double.")
    def doubled(n):
        if n % 2:
            raise ValueError("odd")
        return 2 * n

    def answer(n):
        if n % 2:
            raise ValueError(f"{n} can't be halved")
        return n + n

    attempt = evaluate.Attempt(exercise, answer, SEED, LEARNER).run()
    assert evaluate.choose_hint(attempt) == "You double."


def test_a_mutant_runs_only_the_checks_that_tell_it_apart():
    exercise = Exercise("90.thrice", "Thrice", "thrice", 10, 1, "s", ("first", "b", "c"))
    for x in (1, 2, 3):

        @exercise.check(f"of {x}")
        def _(fn, t, x=x):
            t.equal(fn(x), 3 * x)

    runs = []

    @exercise.mutant("You square.")
    def squared(x):
        runs.append(("squared", x))
        return x * x

    @exercise.mutant("Not for two.")
    def but_two(x):
        runs.append(("but_two", x))
        return 3 * x if x != 2 else 4

    @exercise.mutant("Not for three.")
    def but_three(x):
        runs.append(("but_three", x))
        return 3 * x if x != 3 else 8

    attempt = evaluate.Attempt(exercise, lambda x: 2 * x if x == 2 else 3 * x, SEED, LEARNER).run()
    assert evaluate.choose_hint(attempt) == "Not for two."
    assert runs == [("squared", 2), ("squared", 1), ("but_two", 2), ("but_two", 1), ("but_two", 3)]


def test_another_exception_than_the_wanted_one_names_both():
    exercise = Exercise("90.refuses", "Refuses", "refuses", 10, 1, "s", ("first", "b", "c"))

    @exercise.check("a negative number")
    def _(fn, t):
        t.raises(ValueError, fn, -1)

    def asserts(x):
        assert x >= 0, "too small"

    failing = evaluate.Attempt(exercise, asserts, SEED, LEARNER).run().failing
    assert failing[0].message == "AssertionError: too small; called with -1; want ValueError"


def halving():
    exercise = Exercise("90.half", "Half", "half", 10, 1, "s", ("first", "b", "c"))

    @exercise.check("a pair")
    def _(fn, t):
        a, b = fn([4, 6], np.zeros((2, 3), np.float32))
        t.equal(a + b, 5)

    @exercise.check("its kind")
    def _(fn, t):
        t.equal(fn([4, 6]), (2, 3))

    return exercise


@pytest.mark.parametrize(
    ("answer", "message", "hint"),
    [
        (
            lambda x, y=None: (x[0] // 2, x[2]),
            "IndexError: list index out of range; called with [4, 6], float32[2, 3]",
            "You look past the end",
        ),
        (lambda x, y=None: [][2:].index(1), "ValueError: 1 is not in list", "first"),
        (
            lambda x, y=None: jax.grad(jnp.negative)(jnp.ones(2)),
            "TypeError: Gradient only defined for scalar-output functions",
            "`jax.grad` takes the derivative of a function whose result is a single number",
        ),
        (
            lambda x, y=None: {"half": 2}["Half"],
            "KeyError: 'Half'; called with [4, 6], float32[2, 3]",
            "You look up a key",
        ),
        (
            lambda x, y=None: (2, 3) if y is not None else None,
            "got None",
            "Your answer returns None",
        ),
    ],
)
def test_an_exception_that_no_mutant_raises_is_explained(answer, message, hint):
    attempt = evaluate.Attempt(halving(), answer, SEED, LEARNER).run()
    assert attempt.failing[0].message.startswith(message)
    assert evaluate.choose_hint(attempt).startswith(hint)


def test_what_a_check_raises_is_about_the_result():
    def nothing(x, y):
        pass

    attempt = evaluate.Attempt(halving(), nothing, SEED, LEARNER, source="answer.py").run()
    assert evaluate.choose_hint(attempt) == raising.NOTHING
    attempt = evaluate.Attempt(halving(), lambda x, y: 5, SEED, LEARNER, source="answer.py").run()
    assert evaluate.choose_hint(attempt).startswith(raising.RESULT)


def test_what_the_compiler_refuses_is_about_the_kernel():
    def narrow(x, y):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]

        block = pl.BlockSpec((5, 128), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=4, in_specs=[block], out_specs=block, out_shape=x)(x)

    exercise = Exercise("90.kernel", "Kernel", "kernel", 10, 1, "s", ("first", "b", "c"))

    @exercise.check("Mosaic compiles it")
    def _(fn, t):
        array = jax.ShapeDtypeStruct((20, 128), jnp.float32)
        t.true(jax.jit(fn).trace(array, array).lower(lowering_platforms=("tpu",)))

    attempt = evaluate.Attempt(exercise, narrow, SEED, LEARNER, source="answer.py").run()
    assert evaluate.choose_hint(attempt).startswith(raising.KERNEL)


@pytest.mark.parametrize("part", ["used", "compared"])
def test_a_none_within_the_result_is_not_the_whole_result(part):
    exercise = Exercise("90.pair", "Pair", "pair", 10, 1, "s", ("first", "b", "c"))

    @exercise.check("both")
    def _(fn, t):
        a, b = fn()
        t.equal(a + b if part == "used" else b, 5)

    attempt = evaluate.Attempt(exercise, lambda: (2, None), SEED, LEARNER, source="answer.py").run()
    assert evaluate.choose_hint(attempt) == raising.INSIDE


def test_a_function_that_an_answer_returns_may_return_nothing():
    exercise = Exercise("90.maker", "Maker", "maker", 10, 1, "s", ("first", "b", "c"))

    @exercise.check("what it makes")
    def _(fn, t):
        t.equal(fn()(3), 5)

    def maker():
        def made(x):
            pass

        return made

    attempt = evaluate.Attempt(exercise, maker, SEED, LEARNER, source="answer.py").run()
    assert evaluate.choose_hint(attempt) == raising.NOTHING


def test_a_call_that_raises_is_shown_in_brief():
    failing = Watched(lambda *given, key: given[99])
    with pytest.raises(IndexError) as caught:
        failing(list(range(50)), {"a": (1, "b")}, key=np.zeros(2))
    numbers = "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16..."
    shown = f"called with {numbers}, {{'a': (1, 'b')}}, key=float64[2]"
    assert caught.value.__notes__ == [shown]
