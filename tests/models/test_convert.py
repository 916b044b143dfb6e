"""Names and views of published tensors: both directions come from one row."""

import json
import math

import jax
import numpy as np
import pytest

from minitext.checkpoint import leaves, safetensors, stored
from minitext.checkpoint.weights import INDEX, open_weights
from minitext.config.config import load_config
from minitext.errors import UserError
from minitext.models import convert
from minitext.models.convert import KEEP, TRANSPOSED, Row, Table, View
from minitext.sharding.mesh import make_mesh
from minitext.training.step import abstract_state, init_state
from tests.conftest import audit_but

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


# --- onto the mesh and back


def small_config(**settings):
    pairs = ["model.layers=3", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=48"]  # fmt: skip
    return load_config("laptop", [*pairs, *(f"{k}={v}" for k, v in settings.items())])


def small_table(D=32, F=48, V=256) -> Table:
    """Names as Phi-3 has them, with fused tensors, and a strange view of the output projection."""
    L, q, kv = range(3), 32, 16
    fused = (q + 2 * kv, D)

    def part(start, stop, shape):
        return View(shape=shape, part=(slice(start, stop),), order=(1, 0))

    rows = (
        Row("embed", "embed.table"),
        Row("norm", "norm.scale"),
        Row("head", "unembed.w", TRANSPOSED),
        Row("{layer}.qkv", "blocks.attention.q.w", part(0, q, fused), L),
        Row("{layer}.qkv", "blocks.attention.k.w", part(q, q + kv, fused), L),
        Row("{layer}.qkv", "blocks.attention.v.w", part(q + kv, None, fused), L),
        Row("{layer}.o", "blocks.attention.o.w", View((D, D), (D, 2, 16), order=(2, 1, 0)), L),
        Row("{layer}.gate_up", "blocks.ffn.gate.w", View((D, 2 * F), part=(slice(None), slice(0, None, 2))), L),
        Row("{layer}.gate_up", "blocks.ffn.up.w", View((D, 2 * F), part=(slice(None), slice(1, None, 2))), L),
        Row("{layer}.down", "blocks.ffn.down.w", View((24, F), part=(slice(0, 8),), order=(1, 0)), L,
            into=View((F, D), part=(slice(None), slice(1, None, 4)))),
        Row("{layer}.down", "blocks.ffn.down.w", View((24, F), part=(slice(8, 24),), order=(1, 0)), L,
            into=View((F, D), (F, 8, 4), part=(slice(None), slice(None), slice(0, 4, 2)))),
        Row("{layer}.down3", "blocks.ffn.down.w", KEEP, L,
            into=View((F, D), part=(slice(None), slice(3, None, 4)))),
        Row("{layer}.norm1", "blocks.norm_attention.scale", KEEP, L),
        Row("{layer}.norm2", "blocks.norm_ffn.scale", KEEP, L),
    )  # fmt: skip
    return Table(rows, ignored=("*.inv_freq",), copies=(("copy", "embed"),))


def write_model(folder, params, table, extra=(), dtype="F32", change=()):
    """Writes the parameters, two tensors a file, with changes and extra tensors."""
    names = list(convert.tensors(table, params))
    arrays = dict(zip(names, convert.values(table, params), strict=True)) | dict(extra)
    for name, changed in dict(change).items():
        arrays[name] = changed(arrays[name])
    kind = stored.PLAIN[dtype]
    arrays = {name: array.astype(kind) for name, array in arrays.items() if array is not None}
    folder.mkdir()
    where = {}
    for i in range(0, len(arrays), 2):
        some = dict(list(arrays.items())[i : i + 2])
        file = f"part-{i}.safetensors"
        described = {name: (array.shape, dtype) for name, array in some.items()}
        safetensors.write(folder / file, described, some.values(), {})
        where |= dict.fromkeys(some, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return arrays


@pytest.fixture(scope="module")
def params():
    cfg = small_config()
    drawn = init_state(cfg, make_mesh(devices=jax.devices()[:1])).params
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), drawn)


def abstract(**mesh):
    cfg = small_config(**{f"mesh.{name}": size for name, size in mesh.items()})
    sizes = make_mesh(cfg.mesh, jax.devices()[: math.prod(mesh.values())])
    return abstract_state(cfg, sizes).params


MESHES = ({}, {"fsdp": 8}, {"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("chunk", audit_but([100], [100, convert.CHUNK]))
def test_parameters_come_back_equal_on_every_mesh(tmp_path, params, mesh, chunk, monkeypatch):
    monkeypatch.setattr(convert, "CHUNK", chunk)
    table = small_table()
    write_model(tmp_path / "m", params, table, {"rope.inv_freq": np.ones(3, np.float32)})
    wanted = abstract(**mesh)
    seen = []
    with open_weights(tmp_path / "m") as weights:
        read = convert.load(weights, table, wanted, seen.append)
        assert seen == sorted(seen)
    for (path, mine), like, theirs in zip(
        jax.tree_util.tree_leaves_with_path(read), jax.tree.leaves(wanted), jax.tree.leaves(params), strict=True
    ):  # fmt: skip
        assert mine.sharding == like.sharding, path
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs), str(path))


def test_tensors_go_in_and_out_bit_by_bit(tmp_path, params):
    table = small_table()
    for dtype, name in (("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16")):
        arrays = write_model(tmp_path / name, params, table, dtype=dtype)
        with open_weights(tmp_path / name) as weights:
            read = convert.load(weights, table, abstract(tensor=2))
        shapes, values = convert.tensors(table, read), convert.values(table, read)
        for (key, shape), value in zip(shapes.items(), values, strict=True):
            out = convert.rounded(value, name)
            assert out.shape == shape and out.tobytes() == arrays[key].tobytes(), key


def test_a_device_reads_its_own_rows_alone(tmp_path, params, monkeypatch):
    """Of a tensor split over its first dimension, a process with some of the devices reads their part."""
    table = small_table()
    write_model(tmp_path / "m", params, table)
    leaf_rows = {row.path: row for row in table.rows}
    like = leaves.named(abstract(tensor=2))["blocks.attention.q.w"]
    monkeypatch.setattr(
        type(like.sharding), "addressable_devices_indices_map",
        lambda self, shape: dict(list(self.devices_indices_map(shape).items())[:1]),
    )  # fmt: skip
    with open_weights(tmp_path / "m") as weights:
        shards = convert._Shards(like)
        row = leaf_rows["blocks.attention.q.w"]
        reader = convert._Reader(row, like, shards.held, weights, False)
        parts = list(reader.parts((1,), "1.qkv"))
        assert sum(map(reader.fill, parts)) == 16 * 32 * 4  # half of q's 32 rows, none of k and v
        (shard,) = shards.held.values()
        mine = leaves.named(params)["blocks.attention.q.w"]
        np.testing.assert_array_equal(shard[1], np.asarray(mine)[1, :, :16])


CHANGES = {
    "a tensor is missing": ({"1.down": lambda a: None}, {}, "1.down"),
    "a tensor is left over": ({}, {"more": np.ones(2, np.float32)}, "nothing uses the tensor more"),
    "a shape is another": ({"0.norm1": lambda a: a[1:]}, {}, "0.norm1 has the shape \\[31\\]"),
    "a shape is transposed": ({"2.down": lambda a: a.T}, {}, "2.down has the shape"),
    "a NaN": ({"1.o": lambda a: np.where(a == a.max(), np.nan, a)}, {}, "1.o has numbers that are NaN"),
    "an infinity": ({"norm": lambda a: np.full_like(a, np.inf)}, {}, "norm has numbers"),
    "a copy that differs": ({}, {"copy": np.ones((256, 32), np.float32)}, "copy differs from embed"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_match_is_named(tmp_path, params, name):
    change, extra, message = CHANGES[name]
    write_model(tmp_path / "m", params, small_table(), extra, change=change)
    with open_weights(tmp_path / "m") as weights, pytest.raises(UserError, match=message):
        convert.load(weights, small_table(), abstract())


def test_an_equal_copy_and_allowed_infinities_are_read(tmp_path, params):
    table = small_table()
    copy = {"copy": np.asarray(leaves.named(params)["embed.table"]).copy()}
    copy["copy"][3, 4] = np.nan
    endless = {"norm": lambda a: np.full_like(a, np.inf), "embed": lambda _: copy["copy"]}
    write_model(tmp_path / "m", params, table, copy, change=endless)
    with open_weights(tmp_path / "m") as weights:
        read = convert.load(weights, table, abstract(), allow_nonfinite=True)
    assert np.isinf(leaves.named(read)["norm.scale"]).all()


def test_huge_finite_numbers_are_finite():
    huge = np.full(100, 3e38, np.float32)
    assert not stored.has_nonfinite(huge)
    assert stored.has_nonfinite(np.append(huge, np.nan).astype(np.float32))
    for array in (huge, np.append(huge, np.nan).astype(np.float32)):
        with pytest.raises(UserError, match=r"3e\+38 is too large for float16"):
            convert.rounded(array, "float16")
    endless = np.array([np.inf, np.nan, 1], np.float32)
    np.testing.assert_array_equal(convert.rounded(endless, "float16"), endless)


def test_parameters_without_a_row_are_named(tmp_path, params):
    table = small_table()
    write_model(tmp_path / "m", params, table)
    fewer = Table(table.rows[1:])
    with open_weights(tmp_path / "m") as weights, pytest.raises(UserError, match="embed.table"):
        convert.load(weights, fewer, abstract())
    with pytest.raises(UserError, match="embed.table"):
        convert.tensors(fewer, params)
    more = Table((*table.rows, Row("norm", "norm.bias")))
    with open_weights(tmp_path / "m") as weights, pytest.raises(UserError, match="norm.bias"):
        convert.load(weights, more, abstract())
    holes = Table(tuple(row for row in table.rows if row.path != "blocks.attention.k.w"))
    cut = jax.tree.map(lambda x: x, params)
    del cut["blocks"]["attention"]["k"]
    with pytest.raises(ValueError, match="qkv"):
        convert.tensors(holes, cut)
