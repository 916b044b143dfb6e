"""Names and views of published tensors: both directions come from one row."""

import numpy as np
import pytest

from minitext.models.convert import KEEP, TRANSPOSED, Row, View

VIEWS = {
    "as it is": (KEEP, (5, 3)),
    "transposed": (TRANSPOSED, (5, 3)),
    "rows of a fused tensor": (
        View(shape=(12, 5), part=(slice(4, 10),), order=(1, 0)),
        (5, 6),
    ),
    "every second column": (
        View(shape=(2, 5, 8), part=(slice(None), slice(None), slice(1, None, 2))),
        (2, 5, 4),
    ),
    "interleaved rope": (
        View(shape=(8, 5), split=(2, 2, 2, 5), order=(3, 0, 2, 1)),
        (5, 8),
    ),
    "a part of each head": (
        View(shape=(12, 5), split=(3, 4, 5), part=(slice(None), slice(1, 3)), order=(2, 0, 1)),
        (5, 6),
    ),
    "a dimension of one": (View(shape=(6, 1, 4), part=(slice(None), 0)), (6, 4)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_writes_where_it_reads(name):
    view, ours = VIEWS[name]
    shape = view.theirs(ours)
    theirs = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    read = view.of(theirs).reshape(ours)
    assert len(np.unique(read)) == read.size
    written = np.full(shape, -1, np.float32)
    seen = view.of(written)
    seen[...] = read.reshape(seen.shape)
    mine = np.isin(theirs, read)
    np.testing.assert_array_equal(written, np.where(mine, theirs, -1))


@pytest.mark.parametrize("name", VIEWS)
def test_a_slice_of_ours_is_a_slice_of_theirs(name):
    view, ours = VIEWS[name]
    if not view.is_sliceable(ours):
        assert view.split is not None or 0 in view.part
        return
    theirs = np.arange(np.prod(view.theirs(ours))).reshape(view.theirs(ours))
    whole = view.of(theirs)
    bounds = tuple((size // 3, size - size // 4) for size in ours)
    wanted = whole[tuple(slice(*b) for b in bounds)]
    part = theirs[view.slices(ours, bounds)]
    order = view.order or range(part.ndim)
    np.testing.assert_array_equal(part.transpose(order), wanted)


def test_a_row_names_its_tensors():
    row = Row("l.{layer}.e.{expert}.w", "blocks.ffn.up", TRANSPOSED, layers=(3, 5), experts=2)
    assert row.leading == (2, 2)
    assert list(row.sources()) == [
        ((0, 0), "l.3.e.0.w"), ((0, 1), "l.3.e.1.w"), ((1, 0), "l.5.e.0.w"), ((1, 1), "l.5.e.1.w"),
    ]  # fmt: skip
    assert list(Row("norm.weight", "norm.scale").sources()) == [((), "norm.weight")]


def test_rows_and_views_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="layers"):
        Row("l.{layer}.w", "blocks.w")
    with pytest.raises(ValueError, match="experts"):
        Row("w", "blocks.w", experts=2)
    with pytest.raises(ValueError, match="shape"):
        View(part=(0,))
    with pytest.raises(ValueError, match="size"):
        View(shape=(4, 2), split=(3, 2))
