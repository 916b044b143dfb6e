"""A saved step: what it computes, that nothing is compiled, and what is refused."""

import importlib.util
import json
import zipfile

import jax
import numpy as np
import pytest

from minitext.cli import main
from minitext.data.batches import make_batches
from minitext.errors import UserError
from minitext.sharding.mesh import make_mesh
from minitext.training import compile as executable
from minitext.training.step import init_state

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
SETTINGS = ["mesh.data=2", "mesh.fsdp=4", "data.seq_len=16", "train.steps=3", "model.layers=1"]


def run(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["minitext", *words])
        try:
            main.main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


def words(cfg):
    """The settings of a configuration as they are given on the command line."""
    flat = executable.flatten(cfg.model_dump(mode="json"))
    sections = "model.", "data.seq", "data.source", "train.", "mesh."
    return [
        f"{k}={json.dumps(x)}" for k, x in flat.items() if k.startswith(sections) and x is not None
    ]


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """The configuration, the mesh and the file of a step for eight simulated devices, made by the command."""
    cfg = tiny(*SETTINGS)
    file = tmp_path_factory.mktemp("saved") / "step.zip"
    assert run("compile", "laptop", *words(cfg), "--save", str(file)) == 0
    return cfg.replace({"train.executable": str(file)}), make_mesh(cfg.mesh), file


def losses(cfg, mesh):
    batches = make_batches(
        cfg.data, mesh, vocab=cfg.model.vocab, global_batch=cfg.train.global_batch
    )
    state, found = init_state(cfg, mesh), []
    with jax.set_mesh(mesh):
        step = executable.make_or_load_step(cfg, mesh)
        for _ in range(cfg.train.steps):
            state, metrics = step(state, next(batches))
            found.append({name: np.asarray(x) for name, x in metrics.items()})
    return found, jax.device_get(state.params)


def test_a_saved_step_is_bit_equal_and_compiles_nothing(saved, monkeypatch):
    cfg, mesh, _ = saved
    from jax._src import compiler

    asked = []

    def record(backend, module, *rest, **options):
        asked.append(str(module.operation.attributes["sym_name"]))
        return original(backend, module, *rest, **options)

    original = compiler.compile_or_get_cached
    monkeypatch.setattr(compiler, "compile_or_get_cached", record)
    expected, params = losses(cfg.replace({"train.executable": None}), mesh)
    assert [name for name in asked if "train_step" in name]
    asked.clear()
    # The program that draws the parameters is still there, and the step is in the file.
    found, theirs = losses(cfg, mesh)
    assert not asked
    assert found == expected
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, theirs))


def test_the_file_holds_no_pickle(saved):
    with zipfile.ZipFile(saved[2]) as archive:
        assert sorted(archive.namelist()) == ["manifest.json", "program"]
        manifest = json.loads(archive.read("manifest.json"))
    assert manifest["devices"] == 8 and manifest["mesh"]["fsdp"] == 4
    assert manifest["settings"]["train.global_batch"] == 8
    assert "train.executable" not in manifest["settings"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optim.b2": 0.9}, "compiled with optim.b2=0.95, not 0.9"),
        ({"data.seq_len": 32}, "compiled with data.seq_len=16, not 32"),
        ({"train.on_nan": "skip"}, "compiled with train.on_nan=stop, not skip"),
        ({"mesh.data": 4, "mesh.fsdp": 2}, "mesh data=2 x fsdp=4, and here it is data=4 x fsdp=2"),
        ({"train.executable": "nowhere.zip"}, "nowhere.zip cannot be read .No such file"),
    ],
)
def test_another_step_is_refused(saved, changes, words):
    cfg = saved[0].replace(changes)
    with pytest.raises(UserError, match=words) as caught:
        executable.make_or_load_step(cfg, make_mesh(cfg.mesh))
    assert "\n" not in str(caught.value)


def test_what_does_not_change_the_step_may_change(saved):
    cfg = saved[0].replace({"train.eval_every": 7, "train.seed": 5, "checkpoint.keep": 1})
    assert executable.check_executable(cfg, saved[1])


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("jaxlib", "0.1", "for jaxlib 0.1, and here it is"),
        ("minitext", "9.9", "for minitext 9.9"),
        ("sources", "ab" * 32, "minitext's own source files .SHA-256. abababababab, and"),
        ("device_kind", "TPU v9", "for device TPU v9, and here it is cpu"),
        ("devices", 4, "number of devices 4, and here it is 8"),
        ("sha256", "0", "is damaged"),
        ("format", 2, "has format 2, not 1"),
    ],
)
def test_another_manifest_is_refused(saved, tmp_path, entry, value, words):
    cfg, mesh, file = saved
    manifest, program = executable.read(file)
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest | {entry: value}))
        archive.writestr("program", program)
    with pytest.raises(UserError, match=words) as caught:
        executable.check_executable(cfg.replace({"train.executable": str(other)}), mesh)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [0, 100, -30])
def test_a_damaged_file_is_refused(saved, tmp_path, cut):
    broken = tmp_path / "broken.zip"
    broken.write_bytes(saved[2].read_bytes()[:cut])
    with pytest.raises(UserError, match="is not a compiled step") as caught:
        executable.read(broken)
    assert "\n" not in str(caught.value)


def test_where_nothing_can_be_written_nothing_is_compiled(tmp_path, capsys):
    for path in (tmp_path / "no" / "step.zip", tmp_path, "/proc/step.zip"):
        assert run("compile", "laptop", "--save", str(path)) == 2
        assert "cannot be written: name a file" in capsys.readouterr().err


def test_train_refuses_another_step_before_it_makes_a_directory(saved, tmp_path, capsys):
    cfg = words(saved[0])
    assert run("train", "laptop", *cfg, f"run.dir={tmp_path}", "run.name=b", "optim.b1=0.8") == 2
    assert "compiled with optim.b1=0.9, not 0.8" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.audit
def test_train_runs_a_saved_step(saved, tmp_path):
    cfg, _, file = saved
    assert run("train", "laptop", *words(cfg), f"run.dir={tmp_path}", "run.name=a") == 0
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 3
    assert str(file) in (tmp_path / "a" / "config.yml").read_text()


@pytest.mark.audit
@needs_libtpu
def test_a_step_for_chips_that_are_not_here_is_saved(tiny, tmp_path):
    file = tmp_path / "step.zip"
    report = executable.save_for(tiny("mesh.data=1", "mesh.fsdp=-1"), "v5e:2x2", file)
    manifest, program = executable.read(file)
    assert report.fits and manifest["target"] == "v5e:2x2" and manifest["libtpu"]
    assert manifest["device_kind"] == "TPU v5 lite" and manifest["mesh"]["fsdp"] == 4
    assert len(program) == manifest["bytes"] > 10_000
