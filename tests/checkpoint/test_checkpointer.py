"""Round trips, damage, retention, full and read-only disks, killed writers, other meshes."""

import functools
import json
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minitext import files as disk
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.errors import UserError
from tests.checkpoint import on_a_mesh
from tests.conftest import QUICK_FLAGS, audit_but

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64", "float8_e4m3fn"]


class Pair(NamedTuple):
    left: object
    right: object


def state_of(step, size=64):
    return {"w": jnp.full((size, 4), step, jnp.float32), "count": jnp.int32(step)}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def run_with(steps, directory, keep=10, size=64):
    with Checkpointer(directory, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step, size), {"position": step}, wait=True)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(new, jax.Array) == isinstance(old, jax.Array)
        if isinstance(old, jax.Array):
            assert new.dtype == old.dtype and new.shape == old.shape
            if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
                new, old = jax.random.key_data(new), jax.random.key_data(old)
        else:
            assert type(new) is type(old)
        assert np.asarray(new).dtype == np.asarray(old).dtype
        assert np.asarray(new).shape == np.asarray(old).shape
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()


def script(code, *args, devices=1, prefix=(), check=True, **kwargs):
    """Runs Python code in a process of its own, with simulated devices."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "XLA_FLAGS": f"{QUICK_FLAGS} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, **kwargs)
    assert not check or done.returncode == 0, done.stderr
    return done


# Round trips


def arrays():
    def make(drawn):
        dtype, shape, on_jax, seed = drawn
        bits = np.random.default_rng(seed).integers(0, 256, (*shape, 8), np.uint8)
        values = bits.view(np.int64)[..., 0]
        with np.errstate(over="ignore"):
            values = values.astype(dtype) if dtype != "bool" else values % 2 == 0
        return jnp.asarray(values) if on_jax else np.asarray(values)

    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    return st.tuples(
        st.sampled_from(DTYPES).map(jnp.dtype), shapes, st.booleans(), st.integers(0, 99)
    ).map(make)


leaf = st.one_of(
    arrays(),
    st.builds(jax.random.key, st.integers(0, 9), impl=st.sampled_from(["rbg", None])),
    st.integers(-(2**60), 2**60),
    st.floats(),
    st.booleans(),
    st.just(np.float32(0.1)),
)
keys = st.text(st.characters(codec="utf-8", exclude_characters="."), max_size=8)
trees = st.recursive(
    leaf,
    lambda node: st.one_of(
        st.lists(node, max_size=3),
        st.dictionaries(keys, node, max_size=3),
        st.tuples(node, node).map(lambda pair: Pair(*pair)),
        st.tuples(node, st.none()),
    ),
    max_leaves=6,
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(st.characters(codec="utf-8"))),
    lambda node: st.one_of(st.lists(node, max_size=3), st.dictionaries(st.text(), node)),
    max_leaves=5,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(state=trees, position=json_values)
def test_any_pytree_comes_back_bit_for_bit(tmp_path_factory, state, position):
    directory = tmp_path_factory.mktemp("run")
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(7, state, {"position": position}, wait=True)
        restored = checkpointer.restore(state)
    assert restored is not None
    assert (restored.step, restored.data_state) == (7, {"position": position})
    assert_same(restored.state, state)
    shutil.rmtree(directory)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.scale = nnx.Param(jnp.ones(3), axes=("embed",))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_nnx_and_optax_states_keep_names_metadata_and_keys(tmp_path):
    model = Model(nnx.Rngs(0))
    params, rest = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
    state = {"params": params, "opt_state": optax.adamw(1e-3).init(params), "rest": rest}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {}, config={"model": {"embed": 3}}, wait=True)
        restored = checkpointer.restore(jax.eval_shape(lambda: state))
        facts = checkpointer.facts(1)
    assert restored is not None
    assert_same(restored.state, state)
    assert restored.state["params"]["scale"].get_metadata()["axes"] == ("embed",)
    assert facts["config"] == {"model": {"embed": 3}}
    names = facts["layout"]["leaves"]
    assert "params.blocks.0.kernel" in names and "opt_state.0.mu.blocks.0.kernel" in names
    assert names["rest.dropout.rngs.key"]["dtype"] == "key<fry>"


def test_donated_buffers_may_be_overwritten_while_the_save_runs(tmp_path):
    add = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)
    state = {f"w{i}": jnp.zeros((300, 1000)) for i in range(8)}
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state, {})
            for _ in range(5):
                state = add(state)
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            restored = checkpointer.restore(state, step=step)
            assert restored is not None
            assert all(np.all(np.asarray(x) == 5 * step) for x in restored.state.values())


def test_numpy_arrays_may_be_changed_while_the_save_runs(tmp_path):
    state = {f"w{i}": np.zeros((300, 1000), np.float32) for i in range(8)}
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state, {})
            for leaf in state.values():
                leaf += 1
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            restored = checkpointer.restore(state, step=step)
            assert restored is not None
            assert all(np.all(leaf == step) for leaf in restored.state.values())


def test_nothing_saved_restores_none_and_creates_nothing(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore(state_of(0)) is None
        assert checkpointer.steps() == [] and checkpointer.latest() is None
    assert not (tmp_path / "run").exists()


def test_part_of_a_state_is_read_only_when_asked_for(tmp_path):
    run_with([3], tmp_path)
    part = {"w": jax.ShapeDtypeStruct((64, 4), jnp.float32)}
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(part, partial=True)
        assert restored is not None and np.all(np.asarray(restored.state["w"]) == 3)
        with pytest.raises(UserError, match=r"count is int32\[\] there and absent here"):
            checkpointer.restore(part)


def test_importing_the_module_does_not_import_orbax():
    done = script(
        """
        import sys, minitext.checkpoint.checkpointer
        heavy = {"orbax", "tensorstore", "absl", "flax"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    assert done.stderr == ""


# Steps and retention


def test_the_newest_steps_are_kept(tmp_path):
    run_with([1, 2, 10, 9, 100], tmp_path, keep=2)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [10, 100] and checkpointer.latest() == 100
    assert sorted(os.listdir(tmp_path)) == ["10", "100"]


def test_multiples_of_keep_every_are_kept_as_well(tmp_path):
    with Checkpointer(tmp_path, keep=2, keep_every=4) as checkpointer:
        for step in range(1, 12):
            checkpointer.save(step, state_of(step), {})
    assert checkpointer.steps() == [4, 8, 10, 11]


def test_a_step_older_than_those_kept_is_not_deleted_by_its_own_save(tmp_path):
    run_with([10, 20, 5], tmp_path, keep=2)
    assert Checkpointer(tmp_path).steps() == [5, 10, 20]


def test_a_step_that_exists_is_replaced(tmp_path):
    run_with([4], tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, state_of(40), {"position": 40}, wait=True)
        restored = checkpointer.restore(state_of(0))
    assert restored is not None and restored.data_state == {"position": 40}
    assert np.all(np.asarray(restored.state["w"]) == 40)
    assert os.listdir(tmp_path) == ["4"]


def test_what_killed_saves_left_is_never_a_step_and_goes_with_the_next_save(tmp_path):
    run_with([1], tmp_path)
    shutil.copytree(tmp_path / "1", tmp_path / "2.1.tmp")
    shutil.copytree(tmp_path / "1", tmp_path / "1.old.tmp")
    (tmp_path / "notes").mkdir()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [1]
        restored = checkpointer.restore(state_of(0))
        assert restored is not None and restored.step == 1
        assert len(os.listdir(tmp_path)) == 4  # reading changes nothing
        checkpointer.save(2, state_of(2), {}, wait=True)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "notes"]


@pytest.mark.parametrize("bad", [{"keep": 0}, {"step": -1}])
def test_impossible_numbers_are_refused(tmp_path, bad):
    with pytest.raises(ValueError, match="="), Checkpointer(tmp_path, bad.get("keep", 1)) as saver:
        saver.save(bad["step"], state_of(0), {})


# Damage

HARM = {
    "truncated to nothing": lambda path: os.truncate(path, 0),
    "truncated to half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "without its last byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "deleted": lambda path: path.unlink(),
    "one bit flipped": lambda path: flip(path, random.Random(path.name)),
}


def flip(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("harm", HARM)
def test_each_damaged_file_is_reported_and_the_step_before_restored(tmp_path, caplog, harm):
    run_with([10, 20], tmp_path)
    shutil.copytree(tmp_path / "20", tmp_path / "whole")
    names = [path.relative_to(tmp_path / "20") for path in files(tmp_path / "20")]
    assert len(names) >= 8
    for name in names:
        HARM[harm](tmp_path / "20" / name)
        caplog.clear()
        with Checkpointer(tmp_path) as checkpointer:
            restored = checkpointer.restore(abstract(state_of(0)))
        assert restored is not None and restored.step == 10
        assert np.all(np.asarray(restored.state["w"]) == 10)
        (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
        message = record.getMessage()
        assert str(tmp_path / "20") in message and f" {name} " in message and "\n" not in message
        shutil.rmtree(tmp_path / "20")
        shutil.copytree(tmp_path / "whole", tmp_path / "20")


def test_a_damaged_step_can_be_saved_again_and_is_kept_aside(tmp_path):
    run_with([1], tmp_path)
    for attempt in range(2):
        run_with([2], tmp_path)
        os.truncate(tmp_path / "2" / "facts.json", 3)
        with Checkpointer(tmp_path, keep=1) as checkpointer:
            restored = checkpointer.restore(state_of(0))
            assert restored is not None and restored.step == 1 and checkpointer.latest() == 1
            checkpointer.save(2, state_of(2), {}, wait=True)
            assert checkpointer.steps() == [2] and checkpointer.verify(2) is None
        aside = {path.name for path in tmp_path.glob("*.damaged*")}
        assert aside == {"2.damaged", "2.damaged.2"} if attempt else {"2.damaged"}
        assert all((tmp_path / name / "facts.json").stat().st_size == 3 for name in aside)
        run_with([1], tmp_path)


def test_a_damaged_step_that_somebody_removed_does_not_stop_the_next_save(tmp_path):
    run_with([1, 2], tmp_path)
    os.truncate(tmp_path / "2" / "facts.json", 3)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state_of(0)) is not None
        shutil.rmtree(tmp_path / "2")
        checkpointer.save(3, state_of(3), {}, wait=True)
        assert checkpointer.steps() == [1, 3]


@pytest.mark.parametrize("moment", ["verify", "facts"])
def test_a_step_that_the_run_deletes_while_it_is_read_gives_way_to_the_newer_one(
    tmp_path, caplog, monkeypatch, moment
):
    run_with([1, 2], tmp_path)
    with Checkpointer(tmp_path, keep=1) as writer, Checkpointer(tmp_path) as reader:
        read = getattr(reader, moment)

        def after_the_next_save(step):
            if step == 2:
                writer.save(3, state_of(3), {}, wait=True)
            return read(step)

        monkeypatch.setattr(reader, moment, after_the_next_save)
        restored = reader.restore(abstract(state_of(0)))
    assert restored is not None and restored.step == 3
    assert np.all(np.asarray(restored.state["w"]) == 3)
    assert not [r for r in caplog.records if "damaged" in r.getMessage()]


def test_a_step_that_is_deleted_while_its_leaves_are_read_is_named(tmp_path):
    run_with([1], tmp_path)
    with Checkpointer(tmp_path) as reader:
        found = reader.read_each(abstract(state_of(0)))
        assert found is not None and next(found[1])[0] == "count"
        shutil.rmtree(tmp_path / "1")
        with pytest.raises(UserError, match="1 was deleted while it was read"):
            next(found[1])


def test_a_step_is_there_while_the_one_that_it_replaces_is_deleted(tmp_path, monkeypatch):
    run_with([1], tmp_path)
    delete, steps = shutil.rmtree, []

    def watched(path, **more):
        steps.append(Checkpointer(tmp_path).steps())
        delete(path, **more)

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(shutil, "rmtree", watched)
        checkpointer.save(1, state_of(7), {}, wait=True)
        monkeypatch.undo()
    assert steps == [[1]] and os.listdir(tmp_path) == ["1"]


def test_damaged_steps_do_not_push_good_ones_out(tmp_path):
    run_with([1, 2, 3], tmp_path)
    for step in (2, 3):
        (tmp_path / f"{step}" / disk.MANIFEST).unlink()
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.restore(state_of(0)) is not None
        checkpointer.save(4, state_of(4), {}, wait=True)
        assert checkpointer.steps() == [1, 4]


def test_when_all_are_damaged_the_error_names_them_and_nothing_is_deleted(tmp_path):
    run_with([1, 2], tmp_path)
    for step in (1, 2):
        os.truncate(tmp_path / f"{step}" / "state" / "_METADATA", 10 * step)
    before = files(tmp_path)
    with pytest.raises(UserError) as caught, Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(state_of(0))
    message = str(caught.value)
    assert "step 1: state/_METADATA has 10 bytes, not " in message and "\n" not in message
    assert "step 2: state/_METADATA has 20 bytes, not " in message
    assert files(tmp_path) == before


def test_an_asked_step_must_exist_and_be_whole(tmp_path):
    run_with([1, 2], tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(state_of(0), step=1)
        assert restored is not None and restored.step == 1
        with pytest.raises(UserError, match=r"no checkpoint of step 3: choose among \[1, 2\]"):
            checkpointer.restore(state_of(0), step=3)
        (tmp_path / "2" / "facts.json").unlink()
        with pytest.raises(UserError, match=r"step 2: facts\.json is missing"):
            checkpointer.restore(state_of(0), step=2)


# Another model


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {"w": jnp.ones((64, 5)), "count": jnp.int32(0)},
            "w is float32[64,4] there and float32[64,5]",
        ),
        (
            {"w": jnp.ones((4, 64)), "count": jnp.int32(0)},
            "w is float32[64,4] there and float32[4,64]",
        ),
        (
            {"w": jnp.ones((64, 4), jnp.bfloat16), "count": jnp.int32(0)},
            "w is float32[64,4] there and bfloat16[64,4] here",
        ),
        ({"v": jnp.ones((64, 4)), "count": jnp.int32(0)}, "(and 1 more)"),
        (
            {"w": jnp.ones((64, 4)), "count": jnp.int32(0), "x": 1},
            "x is absent there and int64[] here",
        ),
    ],
)
def test_another_model_is_refused_by_name(tmp_path, other, told):
    run_with([1], tmp_path)
    with pytest.raises(UserError) as caught, Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(other)
    message = str(caught.value)
    assert told in message and "use the settings that it was trained with" in message
    assert str(tmp_path) in message and "\n" not in message


# Disks that refuse

ON_A_SMALL_DISK = """
    import json, os, subprocess, sys
    import jax.numpy as jnp, numpy as np
    from minitext.checkpoint.checkpointer import Checkpointer
    from minitext.errors import UserError

    place = sys.argv[1]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place], check=True)
    run = place + "/run"
    small = {"w": jnp.arange(1000.0)}
    noise = np.random.default_rng(0).normal(size=(40, 100_000)).astype("float32")
    large = {f"w{i}": jnp.asarray(row) for i, row in enumerate(noise)}
    told = {}
    def attempt(name, act):
        try:
            act()
            told[name] = None
        except UserError as error:
            told[name] = str(error)
        names = os.listdir(run) if os.path.exists(run) else []
        # Writes that were under way when another failed may end after the error is raised.
        told[name + " leaves"] = sorted(name for name in names if not name.endswith(".tmp"))
"""
FULL = """
    saver = Checkpointer(run)
    attempt("first", lambda: saver.save(0, large, {}, wait=True))
    saver.save(1, small, {}, wait=True)
    saver.save(2, large, {})
    attempt("background", lambda: saver.wait())
    saver.save(2, large, {})
    attempt("next save", lambda: saver.save(3, small, {}))
    attempt("again", lambda: saver.save(3, small, {}, wait=True))
    saver.save(4, large, {})
    attempt("close", saver.close)
    with Checkpointer(run) as saver:
        restored = saver.restore(small)
        saver.save(3, small, {}, wait=True)
    told["step"], told["names"] = restored.step, sorted(os.listdir(run))
    assert np.array_equal(restored.state["w"], small["w"])
    with open(place + "/filler", "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(512)):
                pass
        except OSError:
            pass
    with Checkpointer(run) as saver:  # not one more byte: the first mkdir or the first file fails
        attempt("to the last byte", lambda: saver.save(5, small, {}, wait=True))
    try:
        with Checkpointer(run) as saver:
            saver.save(6, large, {})
            raise KeyError("mine")
    except KeyError:
        told["own exception"] = "passes"
    print(json.dumps(told))
"""
READ_ONLY = """
    with Checkpointer(run) as saver:
        saver.save(1, small, {}, wait=True)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        attempt("save", lambda: saver.save(2, small, {}, wait=True))
        told["step"] = saver.restore(small).step
    with Checkpointer(place + "/new") as saver:
        attempt("first", lambda: saver.save(2, small, {}, wait=True))
    print(json.dumps(told))
"""


def on_a_small_disk(tmp_path, code):
    own_mounts = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    try:
        allowed = subprocess.run([*own_mounts, *mount.split()], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("a disk of its own needs `unshare` from util-linux")
    if allowed.returncode:
        pytest.skip(f"a disk of its own cannot be mounted here: {allowed.stderr.strip()}")
    done = script(
        textwrap.dedent(ON_A_SMALL_DISK) + textwrap.dedent(code), tmp_path, prefix=own_mounts
    )
    return json.loads(done.stdout), done.stderr


def test_a_full_disk_is_one_line_and_the_last_good_step_stays(tmp_path):
    told, noise = on_a_small_disk(tmp_path, FULL)
    assert "No space left on device (ENOSPC): free some space" in told["first"]
    assert "(no step was saved before)" in told["first"] and told["first leaves"] == []
    for name, good in {"background": 1, "next save": 1, "close": 3, "to the last byte": 3}.items():
        assert f"(step {good} is intact): No space left on device (ENOSPC): free some" in told[name]
        assert "\n" not in told[name]
    assert told["background leaves"] == ["1"] and told["next save leaves"] == ["1"]
    assert told["again"] is None and told["close leaves"] == ["1", "3"] and told["step"] == 3
    assert told["names"] == ["1", "3"]
    assert told["to the last byte leaves"] == ["1", "3"]
    assert told["own exception"] == "passes"
    line = noise.strip()  # the save that failed behind the exception; nothing from Orbax
    assert "\n" not in line and "step 6 was not saved" in line


def test_a_read_only_disk_is_one_line_and_the_last_good_step_stays(tmp_path):
    told, noise = on_a_small_disk(tmp_path, READ_ONLY)
    assert "step 2 was not saved in" in told["save"] and "(step 1 is intact)" in told["save"]
    assert "Read-only file system (EROFS): choose a run.dir" in told["save"]
    assert told["save leaves"] == ["1"] and told["step"] == 1
    assert "(no step was saved before): Read-only file system" in told["first"]
    assert noise == ""


def test_a_file_where_the_directory_should_be_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "run"):
        with Checkpointer(directory) as checkpointer:
            with pytest.raises(UserError, match="choose a"):
                checkpointer.save(1, state_of(1), {})
            with pytest.raises(UserError, match="choose another"):
                checkpointer.restore(state_of(1))


def test_an_error_that_is_not_the_disk_s_is_not_dressed_up_as_one(tmp_path, monkeypatch):
    def broken(directory):
        raise ZeroDivisionError("a bug")

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(disk, "seal", broken)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            checkpointer.save(1, state_of(1), {}, wait=True)
    assert os.listdir(tmp_path) == []


# Killed writers

SAVES_UNTIL_KILLED = """
    import itertools, sys
    import jax, jax.numpy as jnp
    from minitext.checkpoint.checkpointer import Checkpointer

    saver = Checkpointer(sys.argv[1], keep=2)
    restored = saver.restore({"w": jax.ShapeDtypeStruct((500_000,), "float32")})
    first = 0 if restored is None else restored.step + 1
    print("first", first, flush=True)
    for step in itertools.count(first):
        saver.save(step, {"w": jnp.full(500_000, step, jnp.float32)}, {"position": step})
        print("saving", step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", audit_but([2], [2, 12]))
def test_a_writer_killed_at_any_moment_leaves_whole_steps(tmp_path, kills):
    rng = random.Random(0)
    last = -1
    for _ in range(kills):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", textwrap.dedent(SAVES_UNTIL_KILLED), str(tmp_path)]
        writer = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline().split() == ["first", str(last + 1)]
        begun = last + rng.randrange(6)
        for step in range(last + 1, begun + 1):
            assert writer.stdout.readline().split() == ["saving", str(step)]
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        writer.wait()
        with Checkpointer(tmp_path) as checkpointer:
            steps = checkpointer.steps()
            assert all(checkpointer.verify(step) is None for step in steps)
            if begun > 0:
                assert steps[-1] >= begun - 1  # each save waits for the one before it
            if steps:
                last = steps[-1]
                restored = checkpointer.restore({"w": jnp.zeros(500_000)})
                assert restored is not None and restored.data_state == {"position": last}
                assert np.all(np.asarray(restored.state["w"]) == last)
    assert last >= kills


# Other meshes and numbers of processes


def test_what_is_saved_on_eight_devices_is_restored_on_two_and_on_one(tmp_path):
    """And what a process saves that has one device is restored on eight."""
    on_a_mesh.save(tmp_path / "eight", (4, 2))
    saved_on = {"fsdp": 4, "tensor": 2}, "P('fsdp', 'tensor')"
    assert on_a_mesh.restore(tmp_path / "eight", (1, 2)) == saved_on
    alone = """
        import sys
        from tests.checkpoint import on_a_mesh

        on_a_mesh.restore(sys.argv[1], (1, 1))
        on_a_mesh.save(sys.argv[2], (1, 1))
        """
    assert script(alone, tmp_path / "eight", tmp_path / "one").stderr == ""
    assert on_a_mesh.restore(tmp_path / "one", (2, 4))[0] == {"fsdp": 1, "tensor": 1}


ON_TWO_PROCESSES = """
    import os, sys
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from minitext.checkpoint.checkpointer import Checkpointer
    from minitext.errors import UserError

    directory, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    mesh = jax.make_mesh((4,), ("data",))

    def state(step):
        values = np.full((8, 3), step, np.float32)
        sharding = NamedSharding(mesh, P("data"))
        return {"w": jax.make_array_from_callback((8, 3), sharding, lambda i: values[i])}

    with Checkpointer(directory, keep=2) as saver:
        assert saver.restore(state(0)) is None
        for step in (1, 2, 3):
            saver.save(step, state(step), {"position": step})
        saver.wait()
        restored = saver.restore(state(0))  # a barrier: process 0 has deleted step 1
        assert restored.step == 3 and saver.steps() == [2, 3]
        if process == 0:
            os.truncate(directory + "/3/facts.json", 9)
        restored = saver.restore(state(0))
        assert restored.step == 2 and restored.data_state == {"position": 2}
        assert all(np.all(shard.data == 2) for shard in restored.state["w"].addressable_shards)
        saver.save(3, state(30), {"position": 30})
        saver.wait()
        try:
            saver.restore(state(0), step=7)
            raise AssertionError("step 7 was restored")
        except UserError as error:
            print(error, flush=True)
    jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_save_and_one_restores(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(2) as pool:
        run = functools.partial(script, ON_TWO_PROCESSES, tmp_path, port, devices=2)
        first, second = pool.map(run, range(2))
    assert "has no checkpoint of step 7: choose among [2, 3]" in first.stdout
    assert "see the error of process 0" in second.stdout
    assert "facts.json has 9 bytes" in first.stderr and "damaged" not in second.stderr
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore({"w": jnp.zeros((8, 3))})
    assert restored is not None and (restored.step, restored.data_state) == (3, {"position": 30})
    assert np.all(np.asarray(restored.state["w"]) == 30)
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "3.damaged"]


SAVES = """
    import sys
    from pathlib import Path
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from minitext.checkpoint.checkpointer import Checkpointer

    mesh = jax.make_mesh((4,), ("x",))
    where = NamedSharding(mesh, PartitionSpec("x"))
    def array(seed):
        rng = np.random.default_rng(seed)
        part = lambda index: rng.random((1, 8 << 20), np.float32)
        return jax.block_until_ready(jax.make_array_from_callback((4, 8 << 20), where, part))
    def peak():
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2**10
    limit = int(sys.argv[2]) or None
    with Checkpointer(Path(sys.argv[1]) / "first", at_once=limit) as checkpointer:  # Orbax's own memory
        checkpointer.save(0, {"x": array(9)}, {}, wait=True)
    state = {f"x{i}": array(i) for i in range(6)}
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    with Checkpointer(Path(sys.argv[1]) / "second", at_once=limit) as checkpointer:
        checkpointer.save(0, state, {}, wait=True)
    print((peak() - before) / 128)
"""


@pytest.mark.audit
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_a_save_holds_copies_of_no_more_than_it_was_allowed(tmp_path):
    def arrays_over(name, limit):
        program = [sys.executable, "-c", textwrap.dedent(SAVES), str(tmp_path / name), str(limit)]
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(program, env=os.environ | flags, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    assert arrays_over("one", 128 << 20) < 2 < arrays_over("all", 0)
