"""Compiling for chips that are not there, with the real TPU compiler."""

import dataclasses
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from minitext.cli import main
from minitext.compiler import aot
from minitext.compiler.report import Report
from minitext.compiler.targets import parse_target, topology_mesh
from minitext.config.config import load_config
from minitext.config.sections import MeshConfig
from minitext.distributed import devices
from minitext.errors import UserError
from minitext.hardware import CHIPS
from minitext.models.flops import count_params
from minitext.training.compile import advise, compile_preset
from tests.conftest import audit_but

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")

LAYERS, EMBED = 3, 128
SHARDED = [
    "mesh.data=1", "mesh.fsdp=-1", f"model.layers={LAYERS}", f"model.embed={EMBED}", "model.mlp=256",
    "model.scan_layers=true", "model.remat=full", "train.global_batch=64", "data.seq_len=128",
]  # fmt: skip


def abstract(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


# The train step


@pytest.fixture(scope="module", params=audit_but(["v5p:4x4x4"], ["v5e:2x2", "v5p:4x4x4"]))
def report(tiny, request):
    return compile_preset(tiny(*SHARDED), request.param)


@needs_libtpu
def test_the_train_step_compiles(report):
    chip = parse_target(report.target).chip
    assert report.fits and not report.advice
    assert report.hbm_bytes == chip.hbm_bytes and report.available_bytes == chip.usable_bytes
    assert report.mesh == {"fsdp": report.devices}
    # Donation works: the new state takes over the old one's memory, only metrics are new.
    assert report.alias_bytes > 0.95 * report.output_bytes > 0
    assert report.total_bytes >= report.argument_bytes + report.temp_bytes
    assert set(report.arguments) == {"state.params", "state.opt_state", "state.step", "batch"}
    assert sum(report.arguments.values()) == pytest.approx(report.argument_bytes, rel=0.02)
    assert report.compile_seconds > 0 and report.lower_seconds > 0
    assert report.largest == tuple(sorted(report.largest, key=lambda b: -b.bytes))


@needs_libtpu
def test_fsdp_gathers_weights_twice(report, tiny):
    """Every layer's weights are gathered for the forward and, rematerialised, the backward pass."""
    cfg = tiny(*SHARDED).model
    D, F, N, K, H = cfg.embed, cfg.mlp, cfg.heads, cfg.K, cfg.H
    weights = LAYERS * (D * H * (2 * N + 2 * K) + 3 * D * F)
    count, size = report.collectives["all-gather"]
    # TPUs multiply in bfloat16, so the compiler may convert before it gathers.
    assert 2 * weights * 2 <= size <= 2 * weights * 4 + 2 * cfg.vocab * D * 4
    # Seven matrices a layer; embedding and output layer are gathered once.
    assert 2 * 7 * LAYERS <= count <= 2 * 7 * LAYERS + 2


@needs_libtpu
def test_fallback_names_arguments_as_the_compiler_does(tiny):
    """Where the compiler leaves no dump, arguments are named from the abstract state."""
    from minitext.training.step import abstract_batch, abstract_state, make_train_step

    cfg = tiny(*SHARDED)
    mesh = topology_mesh("v5e:2x2", cfg.mesh)
    args = (abstract_state(cfg, mesh), abstract_batch(cfg, mesh))
    pieces = list(aot._abstract_buffers(make_train_step(cfg, mesh), args))
    assert aot._by_part(pieces).keys() == {"state.params", "state.opt_state", "state.step", "batch"}
    up = next(p for p in pieces if p.op == "state.params['blocks']['ffn']['up']['w'].value")
    assert (
        up.shape == f"f32[{LAYERS},{EMBED // 4},256]" and up.bytes == LAYERS * EMBED // 4 * 256 * 4
    )


# What does not fit


@pytest.fixture(scope="module")
def line_of_chips():
    return topology_mesh("v5e:2x2", MeshConfig(data=1, fsdp=4))


@needs_libtpu
def test_arguments_too_large(line_of_chips):
    """9 GiB of weights and as much of momentum on a chip of 16 GiB."""

    def step(state, batch):
        momentum = state["momentum"] * 0.9 + jnp.sum(batch)
        return {"weights": state["weights"] - momentum, "momentum": momentum}

    big = abstract(line_of_chips, (4, 9, 2**28), "fsdp")
    state = {"weights": big, "momentum": big}
    batch = abstract(line_of_chips, (8,), "fsdp")
    report = aot.compile_step(jax.jit(step, donate_argnums=0), (state, batch), line_of_chips)
    assert not report.fits
    assert report.available_bytes == CHIPS["v5e"].usable_bytes
    assert report.argument_bytes >= 18 * 2**30
    assert report.total_bytes == pytest.approx(report.argument_bytes, rel=0.05)
    assert {b.op for b in report.largest[:2]} == {"state['weights']", "state['momentum']"}
    assert {b.shape for b in report.largest[:2]} == {f"f32[1,9,{2**28}]"}


@needs_libtpu
def test_temporaries_too_large(line_of_chips):
    def loss(w, x):
        def layer(h, _):
            return jnp.tanh(h @ w), None

        return jnp.sum(jax.lax.scan(layer, x, length=100)[0])

    w = abstract(line_of_chips, (2048, 2048))
    x = abstract(line_of_chips, (4 * 2**15, 2048), "fsdp")
    report = aot.compile_step(jax.grad(loss), (w, x), line_of_chips, target="a v5e")
    assert not report.fits and report.target == "a v5e"
    # The scan keeps 100 activations of 2^15 x 2048 for the backward pass: 25 GiB in float32.
    assert report.temp_bytes > 25 * 2**30 > report.argument_bytes
    assert (
        report.largest[0].kind == "temporary" and report.largest[0].shape == "f32[100,32768,2048]"
    )
    assert report.largest[0].op.startswith("jit(loss)/jvp()/while/body")


@needs_libtpu
def test_other_refusals_are_raised(line_of_chips):
    from jax.experimental import pallas as pl

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    @jax.shard_map(out_specs=PartitionSpec("fsdp"), check_vma=False)
    def double(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    x = abstract(line_of_chips, (4 * 1024, 8192), "fsdp")
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        aot.compile_step(jax.jit(double), (x,), line_of_chips)


def test_devices_that_the_table_does_not_have(one_device):
    with pytest.raises(UserError, match="is a 'cpu': its memory is unknown"):
        aot.compile_step(lambda x: x, (abstract(one_device, (2,)),), one_device)


@needs_libtpu
def test_the_compilation_cache_stays_out_of_it(line_of_chips, tmp_path):
    was = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        x = abstract(line_of_chips, (1024,), "fsdp")
        aot.compile_step(lambda x: x + 1, (x,), line_of_chips)
        assert jax.config.jax_enable_compilation_cache
        assert not list(tmp_path.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", was)


# The command


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["minitext", "compile", *words])
    try:
        main.main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


@needs_libtpu
def test_command_says_what_is_too_large(monkeypatch, capsys):
    assert run(monkeypatch, "llama3-8b", "target=v5e:2x2", "--json") == 3
    report = json.loads(capsys.readouterr().out)
    assert not report["fits"] and report["largest"][0]["bytes"] > report["available_bytes"]
    assert any("train.microbatches" in line for line in report["advice"])
    assert any("target of 12 devices or more" in line for line in report["advice"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["laptop"], "name one target"),
        (["laptop", "target=v5e:2"], "takes 2 sizes"),
        (["nonsense", "target=v5e:2x2"], "unknown preset"),
        (["laptop", "slices=2"], "slices=2 belongs to a target"),
        (["laptop", "target=v5e:2x2", "slices=0"], "slices=0 is not a number of slices"),
        (["laptop", "target=v5e:2x2 slices=2", "slices=2"], "given twice"),
        (["laptop", "target=h100:2x8", "slices=2"], "GPUs have no slices"),
        pytest.param(
            ["laptop", "target=h100:2x8"],
            "needs JAX's CUDA plugin: pip install 'minitext[aot-gpu]'",
            marks=pytest.mark.skipif(devices.has_gpu_plugin(), reason="the plugin is installed"),
        ),
        pytest.param(
            ["laptop", "target=v5e:2x2", "slices=3", "mesh.data=1", "mesh.tensor=12"],
            "3 slices divide none of mesh.data=1, mesh.stage=1 and mesh.fsdp=1",
            marks=needs_libtpu,
        ),
        pytest.param(
            ["laptop", "target=v5e:2x2", "mesh.data=3"], "there are 4", marks=needs_libtpu
        ),
        pytest.param(
            ["laptop", "target=v5e:2x2", "train.global_batch=6"],
            "multiple of 4",
            marks=needs_libtpu,
        ),
    ],
)
def test_command_refuses_bad_input(monkeypatch, capsys, words, says):
    assert run(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.strip().splitlines()) == 1


@needs_libtpu
@pytest.mark.audit
@pytest.mark.timeout(900)
def test_a_large_model_for_many_slices(monkeypatch, capsys):
    """Layers of Llama 2 70B on 50,944 chips: each slice is a replica, and only gradients go from one to the next."""
    few = ["model.layers=2"]  # of all 80 the record of benchmarks/pods.py tells
    assert run(monkeypatch, "llama2-70b", *few, "target=v5e:16x16", "slices=199", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] and report["devices"] == 50_944
    assert report["mesh"] == {"data": 199, "fsdp": 256}
    assert report["changed"] == {"mesh.data": 199, "train.global_batch": 50_944}
    within, across = report["networks"]["ici"], report["networks"]["dcn"]
    part = count_params(load_config("llama2-70b", few).model) * 2 / 256  # bfloat16
    assert part <= across["bytes"] <= 1.05 * part
    assert across["sent"] == pytest.approx(2 * 198 / 199 * across["bytes"])
    assert within["sent"] > 100 * across["sent"]


def too_large(cfg, slices=1, **sizes):
    """A report of a step that does not fit, as far as advice reads it."""
    values = dict.fromkeys((f.name for f in dataclasses.fields(Report)), 0) | {
        "target": "v5e:4x4", "mesh": cfg.mesh.sizes(), "fits": False, "devices": 16 * slices, "available_bytes": 100,
        "slices": slices, "collectives": {}, "sent": {}, "largest": (), "advice": (), "changed": {},
    }  # fmt: skip
    return Report(**values | sizes)


@pytest.mark.parametrize(
    ("slices", "settings", "sizes", "words"),
    [
        (1, ["mesh.data=16"], {"arguments": {"state.params": 90}}, ["mesh.data=1 mesh.fsdp=-1"]),
        (1, ["mesh.data=1", "mesh.fsdp=16"], {"arguments": {"state.params": 90}}, ["target of 29 devices"]),
        (2, ["mesh.data=4", "mesh.fsdp=8"], {"arguments": {"state.params": 90}}, ["mesh.data=2 mesh.fsdp=-1"]),
        (2, ["mesh.data=2", "mesh.fsdp=16"], {"arguments": {"state.params": 90}}, ["slices of 29 devices"]),
        (1, ["mesh.data=1", "mesh.fsdp=2"], {"temp_bytes": 90, "arguments": {}}, ["model.remat=full", "4 rows"]),
    ],
)  # fmt: skip
def test_advice(tiny, slices, settings, sizes, words):
    cfg = tiny(*settings)
    said = "\n".join(advise(too_large(cfg, slices, **sizes), cfg))
    assert all(word in said for word in words), said


@pytest.mark.gpu_aot
def test_a_train_step_compiles_for_two_hosts_of_h100s(tiny):
    cfg = tiny("mesh.data=2", "mesh.fsdp=8", "train.global_batch=16")
    report = compile_preset(cfg, "h100:2x8")
    assert report.fits and report.devices == 16 and report.mesh == {"data": 2, "fsdp": 8}
    assert report.available_bytes == CHIPS["h100"].usable_bytes
    assert report.argument_bytes > 0 and report.collectives
    assert set(report.networks) == {"ici", "dcn"} and report.networks["dcn"] == (0, 0, 0.0)


@pytest.mark.gpu_aot
def test_a_gpu_adds_in_a_fixed_order_if_it_is_told_to():
    """The gradient of an embedding: added as threads finish, or sorted by token first."""
    place = NamedSharding(topology_mesh("h100:1x1x1"), PartitionSpec())
    shapes = [((320, 128), "bfloat16"), ((64,), "int32"), ((64, 128), "bfloat16")]
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]

    def program(**options):
        add = jax.jit(lambda table, ids, x: table.at[ids].add(x, out_sharding=place), **options)
        return add.lower(*args).compile().as_text()

    assert " sort(" not in program()
    assert " sort(" in program(compiler_options={"xla_gpu_exclude_nondeterministic_ops": True})


# One function for one chip


@needs_libtpu
def test_kernels_compile_for_a_chip_or_the_reason_fits_a_line():
    pl = pytest.importorskip("jax.experimental.pallas")
    from jax.experimental.pallas import tpu as pltpu

    def doubled(rows, columns, limit=None):
        block = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
        limited = pltpu.CompilerParams(vmem_limit_bytes=limit)

        def kernel(x_ref, o_ref):
            o_ref[...] = 2 * x_ref[...]

        return lambda x: pl.pallas_call(
            kernel,
            grid=(2, 2),
            in_specs=[block],
            out_specs=block,
            out_shape=x,
            compiler_params=limited,
        )(x)

    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    for chip in (name for name, chip in CHIPS.items() if chip.platform == "tpu"):
        assert aot.compiles_for(chip, doubled(8, 128), x) is None, chip
    for fn, words in (
        (doubled(4, 128), r"divisible by 8 and 128.*\(4, 128\)"),
        (doubled(2048, 2048), "64.00M of VMEM, and the limit"),
        (doubled(128, 128, 2**16), "256.0K of VMEM, and the limit is 64.0K"),
        (lambda x: pl.pallas_call(lambda i, o: None, x)(x), "of VMEM, and the limit"),
        (lambda x: pl.pallas_call(lambda i, o: o.__setitem__(..., jnp.sort(i[...])), x)(x), "sort"),
    ):
        reason = aot.compiles_for("v5e", fn, x)
        assert re.search(words, reason), reason
        assert "\n" not in reason and ".py" not in reason
    with pytest.raises(UserError, match="v9"):
        aot.compiles_for("v9", doubled(8, 128), x)
    with pytest.raises(TypeError):  # what is wrong with the function itself is no refusal
        aot.compiles_for("v5e", lambda: None, x)
