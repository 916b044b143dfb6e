import ml_dtypes
import numpy as np
import pytest

from minitext.book.grading import trial
from minitext.book.grading.likeness import LARGEST, likeness

WANT = np.random.default_rng(0).normal(size=(4, 5)) + 0.5
SQUARE = np.random.default_rng(1).normal(size=(2, 5, 5))
UPPER = np.arange(5)[:, None] < np.arange(5)


def said(got, want=WANT):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return likeness(got, want, None if got.shape != want.shape else got != want)


def changed(index, add=None, times=1.0):
    """WANT with another number added, or a factor, where `index` says."""
    got = WANT.copy()
    got[index] = got[index] * times if add is None else got[index] + add
    return got


@pytest.mark.parametrize(
    ("got", "want", "found"),
    [
        (0 * WANT, WANT, "all of yours are 0"),
        (-WANT, WANT, "every sign is wrong"),
        (2 * WANT, WANT, "each is 2 times what it should be"),
        (WANT / 12, WANT, "each is 1/12 of what it should be"),
        (WANT * 0.8173, WANT, "each is 0.8173 times what it should be"),
        (WANT * 1.5, WANT, "each is 3/2 of what it should be"),
        (WANT / np.log(2), WANT, "each is 1 / ln 2 times what it should be"),
        (WANT / 1024, WANT, "each is 1/2^10 of what it should be"),
        (WANT - 0.25, WANT, "each is too small by 0.25"),
        (WANT**2, WANT, "each is the square of what it should be"),
        (WANT[:, ::-1], WANT, "they are reversed along axis 1"),
        (np.roll(WANT, 1, 0), WANT, "each comes one place too late along axis 0"),
        (np.roll(WANT, -1, 1), WANT, "each comes one place too early along axis 1"),
        (np.roll(WANT, 2, 1), WANT, "each comes 2 places too late along axis 1"),
        (np.abs(WANT), WANT, "each is the absolute value of what it should be"),
        (np.floor(WANT), WANT, "each is rounded down from what it should be"),
        (WANT.cumsum(0), WANT, "each is the sum of the right ones up to it along axis 0"),
        (WANT.cumsum(1) - WANT, WANT, "each is the sum of the right ones before it along axis 1"),
        (WANT, WANT.cumsum(0), "the sums of yours along axis 0 are right"),
        (WANT[[2, 0, 3, 1]], WANT, "they are in another order along axis 0"),
        (
            WANT * [[2], [3], [4], [5.5]],
            WANT,
            "each entry along axis 0 has a factor of its own: 2 3 4 5.5",
        ),
        (
            WANT - [1, 2, 3, 4, 5],
            WANT,
            "each entry along axis 1 is off by a number of its own: -1 -2 -3 -4 ...",
        ),
        (np.arange(1, 9), np.arange(8), "each is too large by 1"),
        (SQUARE.swapaxes(1, 2), SQUARE, "axes 1 and 2 are swapped"),
        (np.roll(WANT, (1, 2), (0, 1)), WANT, "the values are the right ones, in another order"),
        (changed(2, add=[1, 2, 3, 4, 6]), WANT, "only those with index 2 along axis 0 are off"),
        (
            changed(np.s_[:, 3:], add=SQUARE[0, :4, :2]),
            WANT,
            "only the last 2 along axis 1 are off",
        ),
        (
            changed(np.s_[:, 1:3], times=3.0),
            WANT,
            "only those with indices 1 to 2 along axis 1 are off; each that is off is 3 times what "
            "it should be",
        ),
        (np.where(WANT > 0.5, WANT, 7.0), WANT, "all that are off are 7"),
        (WANT, np.where(WANT > 0.5, WANT, 0.0), "off are exactly those that should be 0"),
        (np.where(WANT > 0.5, WANT, 0.0), WANT, "those that are off are 0"),
        (
            SQUARE + UPPER * SQUARE[:1].swapaxes(1, 2),
            SQUARE,
            "only those above the diagonal of the last two axes are off",
        ),
        (
            WANT.astype(ml_dtypes.bfloat16),
            WANT,
            "none is off by more than 0.002 of the largest",
        ),
    ],
)
def test_an_array_is_explained(got, want, found):
    assert said(got, want) == found


@pytest.mark.parametrize(
    ("got", "want", "found"),
    [
        (-3.25, 3.25, "the sign is wrong"),
        (97, 96, "one too many"),
        (95, 96, "one too few"),
        (2 * 96, 96, "that is 2 times what it should be"),
        (96 / 2**20, 96, "that is 1/2^20 of what it should be"),
        (3.25**2, 3.25, "that is the square of what it should be"),
        (0.3, 0.7, "that is 1 minus what it should be"),
        (72, 96, "that is 3/4 of what it should be"),
        (3.25 * 1.073741824, 3.25, "that is 2^30 / 10^9 times what it should be"),
        (5, 5.3, "that is rounded down from what it should be"),
        (4, 2, ""),  # twice, the square, two more
        (3.7, 5.3, ""),
        (np.nan, 5.3, ""),
    ],
)
def test_a_number_is_explained(got, want, found):
    assert said(got, want) == found


@pytest.mark.parametrize(
    ("got", "found"),
    [
        (WANT.T, "the values are right, the axes are in another order"),
        (WANT[:, :, None], "the values are right, the shape isn't"),
        (WANT[1:], "1 entry missing at the beginning along axis 0"),
        (WANT[:, :3], "2 entries missing at the end along axis 1"),
        (
            WANT[[0, 1, 3]],
            "1 entry missing along axis 0, with index 2 of the right ones",
        ),
        (
            WANT[:, [0, 1, 1, 2, 2, 3, 4]],
            "2 entries too many along axis 1, with index 2, 4 of yours",
        ),
        (np.pad(WANT, ((0, 0), (0, 1))), "1 entry too many at the end along axis 1"),
        (WANT.sum(axis=0), "you return the sum of the right values over axis 0"),
        (WANT.mean(), "you return the mean of the right values over axes 0, 1"),
        (WANT[..., None] * [0.25, 0.75], "the sum of yours over axis 2 is right"),
        (np.ones((3, 3)), ""),
    ],
)
def test_another_shape_is_explained(got, found):
    assert said(got) == found


def test_nothing_is_said_of_another_array_a_large_one_an_empty_one_and_complex_numbers():
    rng = np.random.default_rng(2)
    assert said(rng.normal(size=WANT.shape)) == ""
    large = rng.normal(size=LARGEST + 1)
    assert likeness(-large, large, large != 0) == ""
    assert likeness(np.zeros((0, 3)), np.zeros(3)) == ""
    assert likeness(1j * WANT, WANT, WANT != 0) == ""


def test_a_failed_comparison_says_it():
    with pytest.raises(
        trial.Failure, match=r"20 of 20 values are off\); .*; every sign is wrong: why"
    ):
        trial.Trial(0, 0).close(-WANT, WANT, why="why")


@pytest.mark.parametrize(
    ("got", "want", "found"),
    [
        (192, 96, "got 192, want 96; that is 2 times what it should be"),
        (
            [0, 10, 20, 30],
            [10, 20, 30, 40],
            "at [0]: got 0, want 10; got [0, 10, 20, 30], want [10, 20, 30, 40]; "
            "each is too small by 10",
        ),
        # A number in a list may be an id.
        ([10, 96], [10, 97], "at [1]: got 96, want 97; got [10, 96], want [10, 97]"),
        ({"id": 192}, {"id": 96}, "at ['id']: got 192, want 96"),
        (
            ["100", "200", "x"],
            ["100", "300", "200"],
            "at [1]: got '200', want '300'; got ['100', '200', 'x'], want ['100', '300', '200']; "
            "missing: '300'; too many: 'x'",
        ),
        (
            (5, "a"),
            ("a", 5),
            "at [0]: got 5, want 'a'; got (5, 'a'), want ('a', 5); the two are swapped",
        ),
        (
            ["b", "a", "c"],
            ["a", "b", "c"],
            "at [0]: got 'b', want 'a'; got ['b', 'a', 'c'], want ['a', 'b', 'c']; "
            "the entries are the right ones, in another order",
        ),
        (
            {"a": 1, "b": 2},
            {"a": 1, "c": 2},
            "got the keys ['a', 'b'], want ['a', 'c']; missing: 'c'; too many: 'b'",
        ),
        (["a"] * 30, ["b"] * 30, "at [0]: got 'a', want 'b'"),  # too long to be shown whole
        (
            [1, 2, 3],
            [1, 2, 3, 4],
            "got 3 entries, want 4; got [1, 2, 3], want [1, 2, 3, 4]; "
            "1 entry missing at the end along axis 0",
        ),
        (
            np.array([[1, 2], [3, 4]]),
            np.array([[1, 2], [3, 5]]),
            "at [1, 1] got 4, want 5 (1 of 4 values are off); got [3 4], want [3 5]",
        ),
    ],
)
def test_exact_values_are_explained_as_a_whole(got, want, found):
    with pytest.raises(trial.Failure) as caught:
        trial.Trial(0, 0).equal(got, want)
    assert str(caught.value) == found


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_entries_that_are_no_numbers_have_no_factor(number):
    for got in (changed((0, slice(0, 3)), times=number), np.full_like(WANT, number)):
        assert "times" not in said(got)


@pytest.mark.parametrize(("got", "want"), [(1e300, 1.3e-20), (1e-300, 1.3e20), (1e308, 1e-5)])
def test_a_factor_that_overflows_is_no_error(got, want):
    assert said(got, want) == ""


def test_a_factor_near_one_is_said_with_its_digits():
    assert said(WANT * 1.0005) == "each is 1.0005 times what it should be"
    assert said(WANT * 1.00037) == "each is 1.00037 times what it should be"


def test_nothing_is_said_of_an_array_without_a_finite_number():
    want = -np.arange(1.0, 9.0)
    got = np.full(8, np.nan)  # the square root of each, but of much else too
    assert likeness(got, want, np.ones(8, bool)) == ""
