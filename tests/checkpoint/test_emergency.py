"""Copies on each process's own disk: whole or unused, the newest that all can have, and a lost disk made good."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from minitext.checkpoint.checkpointer import Checkpointer
from minitext.checkpoint.emergency import LocalCopies, from_peers, restore_newest
from minitext.errors import UserError
from minitext.observability.metrics import read_metrics
from minitext.training import run
from tests.conftest import QUICK_FLAGS


def a_state(step=0, shape=(4, 2)):
    mesh = jax.make_mesh(shape, ("data", "fsdp"))

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "w": put(np.full((8, 4), step, np.float32), "fsdp"),
        "count": put(np.int32(step)),
        "all": put(np.arange(8, dtype=np.int32) * step, ("data", "fsdp")),
    }


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.sharding == other.sharding and one.dtype == other.dtype
        assert np.array_equal(one, other)


def test_the_newest_of_copies_and_checkpoints_is_read(tmp_path):
    shared = Checkpointer(tmp_path / "run" / "checkpoints")
    copies = LocalCopies(str(tmp_path / "disk"), 10, tmp_path / "run", new=True)
    with shared, copies:
        wanted = abstract(a_state())
        assert restore_newest(shared, copies, wanted) is None
        for saver, step in ((copies, 10), (copies, 20), (shared, 20), (copies, 30)):
            saver.save(step, a_state(step), {"place": step})
        restored = restore_newest(shared, copies, wanted)
        assert restored is not None and (restored.step, restored.data_state) == (30, {"place": 30})
        assert_same(restored.state, a_state(30))
        shared.save(40, a_state(40), {"place": 40}, wait=True)
        restored = restore_newest(shared, copies, wanted)
        assert restored is not None and (restored.step, restored.data_state) == (40, {"place": 40})
    assert sorted(os.listdir(copies.folder)) == ["20", "30"]


def test_copies_serve_where_newer_shared_checkpoints_are_damaged(tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    with LocalCopies(str(tmp_path / "disk"), 10, tmp_path / "run", new=True) as copies:
        with Checkpointer(directory) as shared:
            for saver, step in ((shared, 10), (copies, 20), (shared, 30)):
                saver.save(step, a_state(step), {"place": step})
        for step in (30, 10):
            os.truncate(directory / str(step) / "facts.json", 3)
            with Checkpointer(directory) as shared:
                restored = restore_newest(shared, copies, abstract(a_state()))
                assert restored is not None and restored.data_state == {"place": 20}
                assert_same(restored.state, a_state(20))
                if step == 10:
                    shared.save(30, a_state(30), {}, wait=True)
    assert sorted(os.listdir(directory)) == ["10.damaged", "30", "30.damaged"]


def test_a_damaged_copy_one_of_another_mesh_and_one_of_an_earlier_run_do_not_serve(tmp_path):
    directory, disk = tmp_path / "run", str(tmp_path / "disk")
    with LocalCopies(disk, 1, directory, new=True) as copies:
        for step in (1, 2):
            copies.save(step, a_state(step), {})
    with LocalCopies(disk, 1, directory, new=False) as copies:
        (file,) = (copies.folder / "2").rglob("facts.json")
        file.write_text("{}")
        restored = copies.restore(abstract(a_state()), -1)
        assert restored is not None and restored.step == 1
        assert copies.restore(abstract(a_state()), 1) is None
        assert copies.restore(abstract(a_state(shape=(1, 8))), -1) is None
    with LocalCopies(disk, 1, tmp_path / "other" / "run", new=False) as copies:
        assert copies.restore(abstract(a_state()), -1) is None
    with LocalCopies(disk, 1, directory, new=True) as copies:
        assert copies.restore(abstract(a_state()), -1) is None


def test_a_run_goes_on_from_its_copies_bit_for_bit(tiny, tmp_path):
    settings = [
        "train.steps=5",
        "train.save_every=100",
        "train.eval_every=100",
        "train.eval_batches=1",
        "model.layers=1",
    ]
    settings += [f"run.dir={tmp_path}", "run.name=a"]

    def curve():
        return [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(tmp_path / "a")]

    local = [f"checkpoint.local_dir={tmp_path / 'disk'}", "checkpoint.local_every=2"]
    run.train(tiny(*settings, *local), Console(quiet=True))
    whole = curve()
    shutil.rmtree(tmp_path / "a" / "checkpoints")  # as if killed before the first
    console = Console(record=True, width=200)
    run.train(tiny(*settings, *local), console)
    assert "resuming after step 4" in console.export_text()
    assert curve() == whole and len(whole) == 5


@pytest.mark.parametrize("below", ["", "/copies/of"])
def test_a_file_in_the_folders_place_is_named(below, tiny, tmp_path):
    file = tmp_path / "disk"
    file.touch()
    cfg = tiny(f"run.dir={tmp_path}", "run.name=a", f"checkpoint.local_dir={file}{below}")
    said = f"checkpoint.local_dir={file}{below}: {file} is a file: name a folder"
    with pytest.raises(UserError, match=re.escape(said)):
        run.train(cfg, Console(quiet=True))
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs /proc, where no folder can be made"
)
def test_a_folder_that_cannot_be_made_is_refused_before_training(tiny, tmp_path):
    cfg = tiny(f"run.dir={tmp_path}", "run.name=a", "checkpoint.local_dir=/proc/x")
    with pytest.raises(UserError, match="checkpoint.local_dir=/proc/x cannot be written"):
        run.train(cfg, Console(quiet=True))
    assert not list(tmp_path.iterdir())


TWO_PROCESSES = """
    import json, shutil, sys
    from pathlib import Path
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from minitext.distributed import job as distributed
    from minitext.checkpoint.checkpointer import Checkpointer
    from minitext.distributed.cluster import Cluster
    from minitext.checkpoint.emergency import LocalCopies, restore_newest

    folder, port, me = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    distributed.start(Cluster("explicit", f"127.0.0.1:{port}", 2, me))
    assert jax.device_count() == 8
    # Layers of data parallelism lie across processes, so each of them holds all that is not split over data.
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))

    def state(step, split):
        def put(value, *spec):
            sharding = NamedSharding(mesh, P(*spec))
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
        odd = np.array([-0.0, 1e-42, np.inf, -1.5], np.float32)  # exact, zeros and signs too
        w = np.arange(32, dtype=np.float32).reshape(8, 4) * step
        return {"w": put(w, "fsdp"), "odd": put(odd), "step": put(np.int32(step)),
                "half": put(odd.astype(jax.numpy.bfloat16), "fsdp"), "split": put(w, "data" if split else "fsdp")}

    def restore(split):
        wanted = state(0, split)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted)
        with Checkpointer(folder / "run/checkpoints") as shared, copies(split) as own:
            restored = restore_newest(shared, own, abstract)
        for name, x in restored.state.items():
            for mine, there in zip(x.addressable_shards, state(restored.step, split)[name].addressable_shards):
                assert np.asarray(mine.data).tobytes() == np.asarray(there.data).tobytes(), name
        assert restored.data_state == {"place": restored.step}
        return restored.step

    def copies(split, new=False):
        return LocalCopies(str(folder / f"disk{me}"), 1, folder / f"run", new)

    def lose(process):
        distributed.barrier("lose")
        if me == process:
            shutil.rmtree(folder / f"disk{me}")
        distributed.barrier("lost")

    for split in (False, True):
        with Checkpointer(folder / "run/checkpoints") as shared, copies(split, new=True) as own:
            shared.save(1 + 10 * split, state(1 + 10 * split, split), {"place": 1 + 10 * split})
            for step in (2, 3):
                step += 10 * split
                own.save(step, state(step, split), {"place": step})
        distributed.barrier("saved")
        found = [restore(split)]
        if me == 1:  # killed before its last copy was whole
            shutil.rmtree(own.folder / str(3 + 10 * split))
        distributed.barrier("cut")
        found.append(restore(split))
        lose(0)
        found.append(restore(split))
        lose(1)
        found.append(restore(split))
        print("found", json.dumps(found), flush=True)
    distributed.finish()
"""


@pytest.mark.audit
def test_two_processes_find_the_newest_step_that_both_can_have(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{QUICK_FLAGS} --xla_force_host_platform_device_count=4",
    }  # fmt: skip
    script = textwrap.dedent(TWO_PROCESSES)

    def process(index):
        command = [sys.executable, "-c", script, str(tmp_path), str(port), str(index)]
        return subprocess.run(command, env=env, text=True, capture_output=True, timeout=300)

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(process, range(2)))
    for done in both:
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
        replicated, split = (json.loads(line.removeprefix("found ")) for line in lines)
        # With replicas the newest copy of either serves, also from the other's disk; without, only what both have,
        # and after a lost disk the shared checkpoint.
        assert replicated == [3, 3, 2, 1]
        assert split == [13, 12, 11, 11]


def test_peers_give_what_is_missing_and_only_that():
    """With one process, which holds all: the exchange leaves every bit as it is, in the memory where it is."""
    state = a_state(3)
    on_host = state["w"].sharding.with_memory_kind("pinned_host")
    state |= {"offloaded": jax.device_put(state["w"], on_host)}
    got = from_peers(abstract(state), state, {0})
    assert_same(got, state)
    assert got["offloaded"].sharding.memory_kind == "pinned_host"
