"""Predicted memory against what the TPU compiler plans, and against what autodiff keeps."""

import functools
import importlib.util
import json
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import minitext as mt
from minitext.cli import main
from minitext.config.model import REMAT_NAMES
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.hardware import CHIPS
from minitext.models.flops import count_adapters
from minitext.models.transformer import Transformer
from minitext.perf import memory
from minitext.perf.memory import heap, kept, predict, predict_and_compile, stored_bytes
from minitext.perf.sizes import Sizes
from minitext.sharding.mesh import abstract_mesh, make_mesh
from tests.conftest import audit_but

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")

SMALL = "model.embed=1024", "model.vocab=4096", "data.seq_len=2048"

# Adapters alone have gradients and moments.
LORA = (
    "v5e:2x2", "gpt2-124m", "mesh.fsdp=4", "train.global_batch=64", "data.seq_len=512", "model.vocab=4096",
    "model.remat=full", "model.lora.rank=16",
)  # fmt: skip
NF4 = "model.storage=[{module: embed|unembed, dtype: int8}, {dtype: nf4, block: 64}]"

# As different as they are few: each is compiled, and scanned layers make that as fast for many as for one.
CONFIGS = {
    # Float32, nothing recomputed: attention's probabilities of every layer are kept.
    "laptop": ("v5e:2x4", "laptop", "train.global_batch=1024", "model.scan_layers=true"),
    # A large vocabulary on many devices: its whole gradients at the update are the peak, and the heap has holes.
    "pod": (
        "v5p:4x4x4", "llama3-8b", "mesh.fsdp=64", "data.seq_len=2048", "train.global_batch=64",
    ),
    "ring": ("v5e:2x2", "gpt2-124m", "mesh.fsdp=2", "mesh.context=2", "train.global_batch=16"),
    # A pipeline that keeps all microbatches, and one that keeps as many as there are stages.
    "gpipe": (
        "v5e:2x2", "gpt2-124m", "mesh.stage=2", "mesh.tensor=2", "train.global_batch=16",
        "pipeline.schedule=gpipe", "model.remat=full",
    ),
    "1f1b": ("v5e:2x4", "gpt2-124m", "mesh.data=2", "mesh.stage=4", "train.global_batch=64"),
    # Layers that differ, and have more than plain ones: two scans, and several layers in one.
    "deepseek": (
        "v5e:2x4", "deepseek-v3", *SMALL, "model.layers=8", "model.dense_layers=2", "model.dense_mlp=4096",
        "model.mlp=512", "model.attention.q_rank=512", "model.attention.kv_rank=256", "model.ffn.experts=16",
        "model.ffn.experts_per_token=4", "model.heads=8", "train.global_batch=128",
    ),
    "gemma": (
        "v5e:2x4", "gemma3-4b", *SMALL, "model.layers=14", "model.heads=8", "model.head_dim=128", "model.mlp=4096",
        "model.attention.window=512", "train.global_batch=128",
    ),
    "gpt-oss": (
        "v5e:2x4", "gpt-oss-20b", *SMALL, "model.layers=8", "model.heads=16", "model.kv_heads=4", "model.mlp=1024",
        "model.ffn.experts=16", "train.global_batch=128",
    ),
    "qwen3-next": (
        "v5e:2x4", "qwen3-next", *SMALL, "model.layers=8", "model.heads=8", "model.head_dim=128",
        "model.ffn.experts=16", "model.ffn.experts_per_token=4", "data.seq_len=8192", "train.global_batch=16",
    ),
    "lora": LORA,
    # A layer's weights, sent in int8, are most of what a step works on.
    "int8": (
        "v5e:2x2", "llama3-8b", "mesh.fsdp=4", "train.global_batch=4", "data.seq_len=1024", "model.vocab=4096",
        "model.layers=8", "model.remat=full", "sharding.gather_dtype=int8",
    ),
    # Experts with biases, nothing recomputed.
    "kept": (
        "v5e:2x4", "gpt-oss-20b", *SMALL, "model.layers=8", "model.heads=16", "model.kv_heads=4", "model.mlp=1024",
        "model.ffn.experts=16", "train.global_batch=32", "model.remat=none",
    ),
}  # fmt: skip


@functools.cache
def found(name):
    target, preset, *settings = CONFIGS[name]
    return predict_and_compile(mt.load_config(preset, settings), target)


@needs_libtpu
@pytest.mark.audit
@pytest.mark.parametrize("name", CONFIGS)
def test_the_prediction_is_what_the_compiler_plans(name):
    predicted, compiled = found(name)["predicted"], found(name)["compiled"]
    for part in ("parameters", "optimizer", "batch"):
        assert predicted[part] == compiled[part], part
    assert predicted["total"] == pytest.approx(compiled["total"], rel=0.1)
    # Not only because the state is most of it.
    assert predicted["temporaries"] == pytest.approx(compiled["temporaries"], rel=0.15)


@pytest.mark.audit
def test_deepseek_takes_on_its_pod_what_the_compiler_planned():
    """The figures are libtpu 0.0.51's for v5p:8x16x16, which took four minutes of processor time."""
    cfg = mt.load_config(
        "deepseek-v3", ["mesh.fsdp=256", "mesh.expert=8", "train.global_batch=2048"]
    )
    found = predict(cfg, abstract_mesh(cfg.mesh), "tpu", CHIPS["v5p"].vmem_bytes)
    assert found.parameters + found.optimizer + found.batch == 4_721_318_912
    assert found.temporaries == pytest.approx(52_298_519_520, rel=0.1)


# Here a layer's weights are most of what the step works on.
WIDE = (
    "v5e:2x2", "llama3-8b", "mesh.fsdp=4", "train.global_batch=4", "data.seq_len=1024", "model.vocab=4096",
    "model.layers=8", "model.remat=full", "model.lora.rank=16",
)  # fmt: skip


@needs_libtpu
@pytest.mark.audit
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [LORA, WIDE], ids=["gpt2", "llama3"])
def test_adapters_beside_four_bits_take_what_is_predicted(words):
    """The padding of narrow numbers in blocks, a tenth of them in gpt2, is the compiler's choice."""
    target, preset, *settings = words
    found = predict_and_compile(mt.load_config(preset, [*settings, NF4]), target)
    predicted, compiled = found["predicted"], found["compiled"]
    assert predicted["optimizer"] == compiled["optimizer"]
    assert predicted["parameters"] == pytest.approx(compiled["parameters"], rel=0.1)
    assert predicted["total"] == pytest.approx(compiled["total"], rel=0.1)


def test_frozen_weights_have_no_gradients_and_no_moments():
    """A step that trains adapters needs less than one that trains all, by the moments and the gradients of the rest."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    lines = [
        "model.embed=64",
        "model.vocab=64",
        "model.layers=8",
        "train.global_batch=1",
        "data.seq_len=16",
    ]
    whole = predict(mt.load_config("laptop", lines), mesh, "cpu")
    cfg = mt.load_config("laptop", [*lines, "model.lora.rank=2"])
    found = predict(cfg, mesh, "cpu")
    adapters = 4 * count_adapters(cfg.model)
    assert found.parameters == whole.parameters + adapters
    assert 2 * adapters <= found.optimizer <= 2 * adapters + 16
    assert found.moments["layer"]["gradients"] == found.moments["update"]["gradients"] == adapters
    stored = predict(
        mt.load_config("laptop", [*lines, "model.lora.rank=2", "model.storage=[{dtype: int8}]"]),
        mesh,
        "cpu",
    )
    assert found.parameters - stored.parameters > 2 * (whole.parameters / 3)


def test_a_large_array_finds_no_room_in_small_holes():
    moments = {
        "loss": {"activations kept": 10, "output layer's weight": 6, "logits": 4},
        "layer": {"logits": 4, "gradients": 7},
        "update": {"gradients": 7, "tables' gradients": 12},
    }
    # Logits lie at 16..20; gradients begin at 0; of the tables' 12 there is room for 9 below the logits.
    assert heap(moments | {"layer": {"logits": 4, "gradients": 7}}) == {
        "loss": 20, "layer": 20, "update": 19,
    }  # fmt: skip
    waiting = moments | {"update": {"logits": 4} | moments["update"]}
    assert heap(waiting)["update"] == 32


@pytest.mark.parametrize(
    ("shape", "itemsize", "size"),
    [
        ((), 4, 512),
        ((768,), 4, 4096),
        ((256,), 4, 1024),
        ((4, 128), 4, 4 * 128 * 4),
        ((12, 768), 4, 16 * 768 * 4),
        ((128, 320), 4, 128 * 320 * 4),  # 320 rows of 128, not 128 of 384
        ((1, 256), 4, 1024),
        ((3, 100, 200), 2, 3 * 128 * 208 * 2),  # 200 rows of 100: tiles of 16 x 128
        ((58, 28, 2048), 4, 64 * 28 * 2048 * 4),  # 58 rows waste less than 28
        ((58, 32, 28, 2048), 4, 58 * 32 * 28 * 2048 * 4),
    ],
)
def test_tiles_are_filled_up(shape, itemsize, size):
    assert stored_bytes(shape, itemsize, "tpu") == size
    assert stored_bytes(shape, itemsize, "cpu") == math.prod(shape) * itemsize


NAMES = tuple(name for name in REMAT_NAMES if name != "latents")  # which only MLA has


@pytest.mark.parametrize("save", [(), *((name,) for name in NAMES), NAMES])
def test_what_is_kept_is_what_autodiff_keeps(tiny, save):
    remat = ("model.remat=names", f"model.remat_save=[{','.join(save)}]")
    keeps_what_is_counted(tiny(*PLAIN, *(remat if save else ("model.remat=full",))))


PLAIN = "model.dtype=bfloat16", "model.scan_layers=true"
UNLIKE = {
    "prefix": ("model.layers=5", "model.dense_layers=2", "model.dense_mlp=96", "model.ffn.kind=moe"),
    "mla": ("model.attention.kind=mla", "model.kv_heads=null", "model.attention.q_rank=24"),
    "period": (
        "model.layers=6", "model.period=[{attention: {window: 8}}, {mlp: 96, attention: {gate: true}}]",
        "model.norms=both",
    ),
    "deltanet": ("model.layers=6", "model.period=[{attention: {kind: deltanet}}, {}]"),
}  # fmt: skip


@pytest.mark.parametrize("remat", audit_but(["dots"], ["full", "dots"]))
@pytest.mark.parametrize("name", UNLIKE)
def test_what_unlike_layers_keep_is_what_autodiff_keeps(tiny, name, remat):
    keeps_what_is_counted(tiny(*PLAIN, *UNLIKE[name], f"model.remat={remat}"))


def keeps_what_is_counted(cfg):
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(cfg.model, rngs=nnx.Rngs(0))))
    tokens = jnp.zeros((cfg.train.global_batch, cfg.data.seq_len), jnp.int32)

    def loss(params):
        return nnx.merge(graphdef, params).hidden(tokens, None, tokens)[0].sum()

    residuals = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
    # Stacks over the layers in the compute type; the parameters, which are kept too, are float32.
    repeats = {stack.repeats for stack in cfg.model.stacks.values()}
    stacks = [
        x
        for x in jax.tree.leaves(residuals)
        if x.dtype == jnp.bfloat16 and x.ndim > 2 and x.shape[0] in repeats
    ]
    sizes = sum(x.size * 2 for x in stacks)
    kinds = Sizes(cfg, make_mesh(devices=jax.devices()[:1]), "cpu").kinds
    assert sizes == sum(kind.layers * kept(kind) for kind in kinds)


def test_fsdp_leaves_an_eighth_and_what_is_replicated(tiny):
    whole = predict(tiny(), make_mesh(devices=jax.devices()[:1]), "cpu")
    cfg = tiny("sharding.rules=fsdp", "mesh.fsdp=8")
    part = predict(cfg, make_mesh(cfg.mesh), "cpu")
    state, of_whole = (m.parameters + m.optimizer for m in (part, whole))
    assert 0 < part.replicated < 100  # the optimizer's counters
    assert state - part.replicated == (of_whole - part.replicated) / 8


def test_offloaded_state_is_the_hosts(tiny):
    mesh = make_mesh(MeshConfig(data=1), devices=jax.devices()[:1])
    here, away = (predict(tiny(f"optim.offload={x}"), mesh, "cpu") for x in (False, True))
    assert away.optimizer == 0 and away.host == here.optimizer > 0


@pytest.mark.audit
def test_remat_saves_memory_in_a_scan_and_not_in_an_unrolled_stack():
    """XLA's CPU backend merges what an unrolled program computes twice; a loop's iterations it cannot."""

    def temporaries(scan, remat):
        settings = (f"model.scan_layers={scan}", f"model.remat={remat}", "model.layers=6")
        cfg = mt.load_config("laptop", [*settings, "mesh.data=1"])
        mesh = make_mesh(cfg.mesh, devices=jax.devices()[:1])
        return compile_on(cfg, mesh)

    assert temporaries(True, "full") < 0.6 * temporaries(True, "none")
    assert temporaries(False, "full") > 0.9 * temporaries(False, "none")


def compile_on(cfg, mesh):
    from minitext.training.step import abstract_batch, abstract_state, make_train_step

    args = abstract_state(cfg, mesh), abstract_batch(cfg, mesh)
    with jax.set_mesh(mesh):
        compiled = make_train_step(cfg, mesh).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["minitext", "memory", *words])
    try:
        main.main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


TINY = [
    "model.layers=1", "model.embed=32", "model.heads=2", "model.mlp=32", "data.seq_len=32", "data.source=grammar",
]  # fmt: skip


def test_command_without_a_target_compiles_for_what_is_there(monkeypatch, capsys):
    assert run(monkeypatch, "laptop", *TINY, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    predicted, compiled = result["predicted"], result["compiled"]
    arguments = sum(predicted[part] for part in ("parameters", "optimizer", "batch"))
    assert result["devices"] == 8 and arguments == compiled["arguments"]
    assert run(monkeypatch, "laptop", *TINY) == 0
    shown = capsys.readouterr().out
    assert "optimizer state" in shown and "peak: " in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["laptop", "target=v5e:2x4", "target=v5e:2x2"], "name one target"),
        (["laptop", "target=v5e:2"], "takes 2 sizes"),
        (["laptop", *TINY, "train.loss_chunks=5"], "data.seq_len=32 is not divisible"),
    ],
)
def test_command_refuses_bad_input(monkeypatch, capsys, words, says):
    assert run(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.strip().splitlines()) == 1


STATES = ["model.attention.kind=deltanet", "model.attention.key_dim=128", "mesh.data=1"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([*STATES, "model.attention.value_dim=128"], "model.remat=none"),
        (
            [*STATES, "model.attention.value_dim=96", "model.remat=full"],
            "model.attention.value_dim=96",
        ),
        (
            [*STATES, "model.attention.value_dim=128", "model.remat=full", "train.global_batch=8"],
            "train.global_batch=8, 8 rows on a device",
        ),
        (
            ["model.period=[{}, {attention: {kind: deltanet}}]", "mesh.data=1", "model.remat=full"],
            "model.attention.key_dim=48",
        ),
    ],
)
def test_what_no_formula_knows_is_refused(monkeypatch, capsys, settings, named):
    refuses(monkeypatch, capsys, "memory", settings, named)


@pytest.mark.parametrize("other", ["model.ffn.kind=moe", "pipeline.schedule=gpipe"])
def test_weights_sent_in_int8_are_refused_where_no_formula_knows_them(other):
    axes = ["mesh.stage=2", "mesh.data=1"] if "pipeline" in other else ["mesh.data=2"]
    cfg = mt.load_config(
        "laptop", [*TINY, "model.layers=2", "sharding.gather_dtype=int8", other, *axes]
    )
    with pytest.raises(UserError, match=f"gather_dtype=int8 with {other}: the formulas for memory"):
        predict(cfg, abstract_mesh(cfg.mesh), "tpu")


def test_a_search_without_a_formula_is_refused(monkeypatch, capsys):
    """It chooses rows and what to recompute, but no widths."""
    refuses(monkeypatch, capsys, "plan", STATES, "model.attention.value_dim=48")


def refuses(monkeypatch, capsys, command, settings, named):
    target = "target=v5e:1x1"
    monkeypatch.setattr(
        "sys.argv", ["minitext", command, "laptop", *TINY, "model.layers=2", *settings, target]
    )
    with pytest.raises(SystemExit) as stop:
        main.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and named in error and "minitext compile" in error
    assert len(error.strip().splitlines()) == 1


def test_notes_say_where_the_formulas_end():
    cfg = mt.load_config("laptop", ["model.remat=full", "optim.kind=muon"])
    notes = "\n".join(memory._notes(cfg, "gpu"))
    for word in ("gpu", "unrolled", "never holds all the scores", "muon"):
        assert word in notes
    assert not list(memory._notes(mt.load_config("gpt2-124m"), "tpu"))
