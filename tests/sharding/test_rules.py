"""Sharding rules: what they accept and refuse, and what they do to bytes; test_equality has the values."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from minitext.sharding.mesh import AXES, make_mesh
from minitext.sharding.rules import RULES, ShardingRules
from minitext.training.step import abstract_state, make_init
from tests.conftest import audit_but

names = st.sampled_from(["batch", "seq", "embed", "mlp", "heads", "vocab"])


@given(
    st.dictionaries(names, st.lists(st.sampled_from(AXES), max_size=2, unique=True).map(tuple)),
    st.lists(names),
)
def test_a_spec_has_one_entry_per_name_and_uses_no_axis_twice(table, asked):
    rules = ShardingRules(table)
    try:
        spec = rules.spec(asked)
    except ValueError as error:
        claimed = [axis for name in asked for axis in table.get(name, ())]
        assert set(asked) - set(table) or len(claimed) > len(set(claimed))
        assert any(repr(name) in str(error) for name in asked)
        return
    assert len(spec) == len(asked)
    used = [
        axis for entry in spec if entry for axis in ([entry] if isinstance(entry, str) else entry)
    ]
    assert len(used) == len(set(used))


def test_unknown_names_and_collisions_are_refused():
    rules = ShardingRules({"a": ("data",), "b": ("data", "fsdp"), "c": ()})
    assert rules.spec(("b", "c", None)) == P(("data", "fsdp"), None, None)
    assert rules.spec(("b",), drop=frozenset({"fsdp"})) == P("data")
    with pytest.raises(ValueError, match="unknown dimension name 'd'"):
        rules.spec(("d",))
    with pytest.raises(ValueError, match=r"'a' and 'b'.*'data'"):
        rules.spec(("a", "b"))


def test_rules_are_frozen_and_hashable():
    rules = ShardingRules({"a": ("data",)})
    with pytest.raises(TypeError):
        rules.table["a"] = ()
    assert hash(rules) == hash(ShardingRules({"a": ("data",)}))


def test_names_must_match_the_rank(one_device):
    with pytest.raises(ValueError, match="2 dimensions"):
        RULES["dp"].shard(jax.numpy.zeros((2, 2)), "batch")


def test_fsdp_splits_parameters_and_moments_eightfold(tiny):
    cfg = tiny("sharding.rules=fsdp", "mesh.fsdp=8")
    state = abstract_state(cfg, make_mesh(cfg.mesh))
    for tree in (state.params, state.opt_state):
        whole = sum(x.size for x in jax.tree.leaves(tree) if x.ndim)
        part = sum(
            np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree) if x.ndim
        )
        assert whole == 8 * part


@pytest.mark.parametrize("schedule", audit_but(["circular"], ["gpipe", "circular"]))
def test_no_device_draws_more_than_it_keeps(tiny, schedule):
    """A model may be too large for one device."""
    cfg = tiny(
        "mesh.fsdp=2", "mesh.tensor=2", "mesh.stage=2", f"pipeline.schedule={schedule}", "model.layers=8",
        "model.embed=128",
    )  # fmt: skip
    mesh = make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        memory = make_init(cfg, mesh).lower().compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes


def test_dp_replicates_parameters(tiny):
    cfg = tiny("sharding.rules=dp", "mesh.fsdp=8")
    for x in jax.tree.leaves(abstract_state(cfg, make_mesh(cfg.mesh)).params):
        assert x.sharding.is_fully_replicated
