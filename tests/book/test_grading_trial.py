"""What checks compare with, what exercises look like, and how sources are cut up."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.book.grading import Exercise, learner_number, source
from minitext.book.grading.evaluate import Attempt
from minitext.book.grading.trial import Failure, Trial, distance, observe

SOLVED = '''"""Two exercises."""

import os

import numpy as np


# EXERCISE 90.one
def one(x):
    """Twice the array."""
    # BEGIN SOLUTION
    return 2 * x
    # END SOLUTION


# EXERCISE 90.two
def two(x):
    if x is None:
        # BEGIN SOLUTION
        return 2
        # END SOLUTION
    return x
'''


@pytest.fixture
def trial():
    return Trial(seed=0, learner=5)


def failure(call, *args, **kwargs) -> str:
    with pytest.raises(Failure) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_close(trial):
    nan = np.array([1.0, np.nan, np.inf])
    trial.close(nan, nan)
    trial.close(jnp.asarray(nan, jnp.bfloat16), nan)
    trial.close({"a": jnp.ones(2), "b": [1.0]}, {"a": np.ones(2), "b": [1.0]})
    trial.close([1.0, 2.0], np.array([1.0, 2.0]))
    assert "shape (1, 3)" in failure(trial.close, nan[None], nan)
    assert "at [1] got 1, want nan" in failure(trial.close, np.array([1, 1, np.inf]), nan)
    assert "at [0]" in failure(trial.close, np.array([np.nan, np.nan, np.inf]), nan)
    for finite in (0.0, -69.0, 1e30, -np.inf):
        assert "want inf" in failure(trial.close, np.array([finite]), np.array([np.inf]), 1e-5)
    assert "structure" in failure(trial.close, {"a": 1.0}, {"b": 1.0})
    assert "['a']" in failure(trial.close, {"a": 1.0}, {"a": 2.0})
    assert "float64" in failure(trial.close, nan, nan, dtype="float32")
    assert failure(trial.close, 1.0, 2.0, why="it is two").endswith(": it is two")
    mistakes = {"that is three": 3.0, "that is a row": np.array([1.0, 5.0])}
    assert failure(trial.close, 3.0, 2.0, mistakes=mistakes).endswith(
        "got 3, want 2: that is three"
    )
    named = failure(trial.close, [1.0, 5.0], np.zeros(2), why="zeros", mistakes=mistakes)
    assert named.endswith("zeros. that is a row")
    for other in (4.0, "text"):
        assert "that is" not in failure(trial.close, other, 2.0, mistakes=mistakes)
    for junk in (None, "text", object(), [1, [2]], lambda: 1, {"a": 1}):
        assert "want an array" in failure(trial.close, junk, np.zeros(2))


def test_close_does_not_believe_the_answers_own_comparison(trial):
    class Yes(np.ndarray):
        def __eq__(self, other):
            return np.ones(self.shape, bool)

        def __sub__(self, other):
            return np.zeros(self.shape)

    lie = np.ones(3).view(Yes)
    failure(trial.close, lie, np.zeros(3))
    failure(trial.equal, lie, np.zeros(3))


def test_equal(trial):
    for same in (3, "a", None, True, (1, "b"), [1, (2,)], {"a": [1]}, jax.P("data"), np.arange(3)):
        trial.equal(same, same)
    trial.equal(np.int32(3), 3)
    trial.equal([1, 2], (1, 2))
    trial.equal(jax.random.key(3), jax.random.key(3))
    pairs = [
        (True, 1),
        (1, True),
        (None, 0),
        ("3", 3),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (2**60, 2**60 + 1),
    ]
    for got, want in pairs:
        failure(trial.equal, got, want)
    mistakes = {"those are swapped": [3, 1]}
    assert failure(trial.equal, [3, 1], [1, 3], mistakes=mistakes).endswith(": those are swapped")
    assert "swapped" not in failure(trial.equal, None, [1, 3], mistakes=mistakes)
    assert "at [1]: got 2, want 3" in failure(trial.equal, [1, 2], [1, 3])
    assert "at [1][0]: got 2, want 3" in failure(trial.equal, [(1, 1), (2, 1)], [(1, 1), (3, 1)])


def test_true_finite_raises(trial):
    trial.true(jnp.bool_(True))
    assert failure(trial.true, False, why="it must hold") == "it must hold"
    trial.finite({"a": jnp.zeros(2), "b": 1.0})
    assert "at [1] got nan" in failure(trial.finite, np.array([0.0, np.nan]))
    assert "got None" in failure(trial.finite, None)
    trial.raises(ValueError, int, "x", match="invalid")
    trial.raises((KeyError, IndexError), lambda: [][1])
    assert "nothing was raised" in failure(trial.raises, ValueError, int, "1")
    assert "must mention" in failure(trial.raises, ValueError, int, "x", match="shape")
    with pytest.raises(TypeError):
        trial.raises(ValueError, int, [])


def test_traces_primitives_and_compiled_text(trial):
    counted = trial.traces(lambda x: x + 1)
    for n in (2, 2, 3):
        counted(jnp.zeros(n))
    assert counted.count == 2
    jitted = jax.jit(lambda x, n: x * n, static_argnums=1)
    jitted(1.0, 2)
    counted = trial.traces(jitted)
    for n in (2, 3, 4):
        counted(1.0, n)
    assert counted.count == 2

    def body(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0]

    assert {"scan", "sin"} <= set(trial.primitives(jax.jit(body), 1.0))
    assert "sine" in trial.hlo(body, 1.0)
    x = jnp.zeros((256, 256))
    assert trial.temp_bytes(lambda x: jnp.sin(x @ x) @ x, x) >= x.nbytes


def test_rounding_noise_is_the_same_mistake_and_another_value_is_not():
    a = np.linspace(-1, 1, 50)
    noisy = distance(observe(a), observe(a * (1 + 1e-7)))
    other = distance(observe(a), observe(a * 1.01))
    assert noisy < 1e-6 < 1e-3 < other
    assert distance(observe(a), observe(a[None])) == float("inf")
    assert distance(observe("x"), observe(None)) == float("inf")
    assert distance(observe({"a": [a, a]}), observe({"a": [a]})) == float("inf")
    nan = observe(np.array([np.nan, 1.0]))
    assert distance(nan, nan) == 0.0


def test_a_check_that_compares_nothing_is_a_fault():
    exercise = Exercise("90.x", "t", "f", 10, 1, "s", ("a", "b", "c"))
    exercise.check("nothing")(lambda fn, t: None)
    assert "compared nothing" in Attempt(exercise, lambda: 1, 0, 0).run().failing[0].message


@pytest.mark.parametrize(
    "change",
    [{"id": "5.adamw"}, {"minutes": 5}, {"hints": ("a",)}, {"points": 0}, {"statement": " "}],
)
def test_an_exercise_outside_the_rules_is_refused(change):
    good = {
        "id": "05.adamw", "title": "t", "function": "f", "minutes": 10, "points": 1,
        "statement": "s", "hints": ("a", "b", "c"),
    }  # fmt: skip
    Exercise(**good)
    with pytest.raises(ValueError):
        Exercise(**(good | change))


def test_learner_numbers_are_stable_and_personal(monkeypatch):
    monkeypatch.setenv("MINITEXT_LEARNER", "ada")
    assert learner_number() == learner_number("ada") == 2130125190
    assert learner_number("ada") != learner_number("grace") != learner_number("\udcff")


@given(st.text(max_size=200), st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_text_composes_or_is_a_syntax_error(own, other):
    pieces = [source.Piece("", ""), source.Piece("05.a", own, 3), source.Piece("05.b", other, 9)]
    try:
        tree = source.compose(pieces, "05.a", "answer.py")
        source.forbidden(tree, ("math",))
    except SyntaxError:
        pass


FILE = """import numpy as np
# EXERCISE 05.a
def a(x, data):
    return helper(x)
a.__doc__ = 'mine'
print('kept')
# EXERCISE 05.b
TABLE = {}
TABLE['k'] = 1
TABLE.update(z=2)
def helper(x):
    return TABLE
print('dropped')
np.seterr()
data = train()
"""


def test_an_answer_takes_from_others_only_what_it_uses():
    kept = ast.unparse(source.compose(source.split(FILE), "05.a", "f")).split("\n")
    assert {"print('kept')", "TABLE.update(z=2)", "TABLE['k'] = 1", "def helper(x):"} <= set(kept)
    assert not {"print('dropped')", "np.seterr()", "data = train()"} & set(kept)


@pytest.mark.parametrize(
    "block",
    [
        "for i in range(3):\n    names[i] = i",
        "while len(names) < 3:\n    names.append(0)",
        "with here():\n    if names:\n        pass\n    else:\n        names = 3",
        "with there() as (names, _):\n    pass",
        "for names in range(3):\n    pass",
    ],
)
def test_an_answer_takes_the_blocks_that_give_its_names(block):
    others = f"{block}\nfor step in range(3):\n    train(step, names)"
    pieces = [source.Piece("", ""), source.Piece("", others), source.Piece("05.a", "a = names")]
    assert ast.unparse(source.compose(pieces, "05.a", "f")) == f"{block}\na = names"


def test_line_numbers_are_the_learners_own():
    tree = source.compose(source.split(FILE), "05.b", "f")
    assert [node.lineno for node in tree.body] == [1, 8, 9, 10, 11, 13, 14, 15]


def test_stub_and_sections():
    stub = source.stub(SOLVED)
    assert "SOLUTION" not in stub and "return 2" not in stub
    assert '    # YOUR CODE HERE\n    raise NotImplementedError("90.one")\n' in stub
    assert '        raise NotImplementedError("90.two")\n    return x' in stub
    assert list(source.sections(SOLVED)) == ["90.one", "90.two"]
    assert source.preamble(SOLVED) == "import os\n\nimport numpy as np"
    with pytest.raises(ValueError, match="unpaired"):
        source.stub(SOLVED.replace("    # END SOLUTION\n", "", 1))
    with pytest.raises(ValueError, match="0 solutions"):
        source.stub(SOLVED + "# EXERCISE 90.three\n")


@pytest.mark.parametrize(
    ("code", "used"),
    [
        ("import minitext.models.layers", True),
        ("from minitext.models import layers as l", True),
        ("from minitext.models.layers import Linear", True),
        ("import minitext as mt\nmt.models.layers.Linear", True),
        ("import importlib\nimportlib.import_module('minitext.models.layers')", True),
        ("import minitext\nminitext.layers_too", False),
        ("import minitext\nminitext.mesh", False),
        ("layers = 1\nlayers", False),
    ],
)
def test_forbidden_modules_are_found_by_any_name(code, used):
    assert bool(source.forbidden(ast.parse(code), ("minitext.models.layers",))) == used
