"""What a step sends is what the formula says, for every layout, on simulated CPU devices and by the TPU compiler."""

import dataclasses
import functools
import importlib.util
import json
import re

import jax
import numpy as np
import pytest

import minitext as mt
from minitext.book.layouts import LAYOUTS
from minitext.cli import main
from minitext.compiler.targets import parse_target, topology_mesh
from minitext.models.flops import count_params
from minitext.perf.comms import across_slices, notes, predict, sum_across
from minitext.perf.comms_audit import audit, by_kind, print_audit, read
from minitext.perf.step_time import compile_program
from minitext.sharding.mesh import abstract_mesh, make_mesh
from minitext.terminal import show_bytes
from tests.conftest import TINY, audit_but

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")

# Every size is one of its own, so that no two terms look alike by accident. A stage of 1F1B has two layers: of one
# that is in no loop, compilers merge forward and backward pass.
SIZES = [
    "model.layers=8", "model.heads=8", "model.kv_heads=4", "train.global_batch=16", "model.vocab=320", "mesh.data=1",
]  # fmt: skip
# Shards of whole tiles: smaller ones the TPU compiler moves in ways of its own.
TILES = [*SIZES, "model.embed=256", "model.mlp=512", "model.vocab=512", "data.seq_len=128"]


@functools.cache
def audited(*settings, target=None):
    """Each step is compiled once."""
    cfg = mt.load_config("laptop", [*TINY, *settings])
    return audit(cfg, topology_mesh(target, cfg.mesh) if target else make_mesh(cfg.mesh))


def small(layout, *other):
    return *SIZES, *LAYOUTS[layout].split(), *other


def tiles(layout, *other):
    return *TILES, *LAYOUTS[layout].split(), *other


@pytest.mark.parametrize("layout", audit_but(["pp, 1f1b"], LAYOUTS))
def test_simulated_devices_send_what_the_formula_says(layout):
    found = audited(*small(layout))
    assert found.differences() == {}
    assert by_kind(found.terms) == by_kind(found.compiled)
    assert found.notes == []


@needs_libtpu
@pytest.mark.parametrize("layout", audit_but(["fsdp"], LAYOUTS))
def test_tpus_send_what_the_formula_says(layout):
    found = audited(*tiles(layout), target="v5e:2x4")
    assert found.differences() == {} and found.backend == "tpu"
    assert found.notes == []


@needs_libtpu
@pytest.mark.audit
@pytest.mark.parametrize("more", [(), ("model.ffn.kind=moe", "model.ffn.experts=4")], ids=str)
def test_in_groups_of_64_a_tpu_sums_whole(more):
    """Each device keeps a 64th of what it gets: twice what a reduce-scatter would send."""
    sizes = ("model.embed=1024", "model.mlp=1024", "train.global_batch=64", "model.dtype=bfloat16")
    found = audited(*tiles("fsdp", "mesh.fsdp=64", *sizes, *more), target="v5p:4x4x4")
    assert found.differences() == {}
    assert not any(term.kind == "reduce-scatter" for term in found.compiled)


@needs_libtpu
@pytest.mark.audit
@pytest.mark.parametrize(
    ("target", "rows"), [("v6e:8x8", 16), ("v6e:8x8", 45), ("v5e:8x8", 16), ("v5p:2x4x8", 16)]
)
def test_over_a_large_slice_without_a_torus_a_tpu_sums_what_it_should_gather(target, rows):
    """Chips in two dimensions do that up to 16 MiB. Parts of 45 rows are no whole tiles, and yet nothing is padded."""
    sizes = (
        f"model.embed={64 * rows}", "model.head_dim=32", "model.mlp=8192", "train.global_batch=64",
        "model.dtype=bfloat16", "model.remat=full",
    )  # fmt: skip
    found = audited(*tiles("fsdp", "mesh.fsdp=64", *sizes), target=target)
    assert found.differences() == {}
    assert not any("parts of" in note for note in found.notes)
    gathered = {n for t in found.compiled if t.kind == "all-gather" for n in t.arrays}
    large = 64 * rows * 8192 * 2
    assert gathered == ({large} if large > 2**24 and "v5p" not in target else set())


def test_deepseek_sends_on_its_pod_what_the_compiler_planned():
    """The figures are libtpu 0.0.51's for v5p:8x16x16, in a program that took minutes to compile.

    With parts of 28 rows, no whole tiles, gradients of some dense weights are summed whole, others are padded.
    """
    words = "mesh.fsdp=256", "mesh.expert=8", "train.global_batch=2048"
    cfg = mt.load_config("deepseek-v3", list(words))
    terms = predict(cfg, abstract_mesh(cfg.mesh), "tpu", parse_target("v5p:8x16x16"))
    found = {row.kind: row for row in by_kind(terms)}
    assert found["all-gather"].count == 1564
    assert found["all-gather"].bytes / 1e9 == pytest.approx(392.14, abs=0.01)
    assert found["ragged-all-to-all"].bytes / 1e9 == pytest.approx(163.48, abs=0.01)
    assert sum(row.moved for row in found.values()) / 1e9 == pytest.approx(758.4, rel=0.04)


@needs_libtpu
@pytest.mark.audit
def test_what_a_step_would_send_that_does_not_fit(capsys):
    """The compiler gathers as predicted; it splits sums beside products as large as these."""
    found = audited(*tiles("fsdp", "train.global_batch=65536"), target="v5e:2x4")
    assert not any(kind == "all-gather" for kind, *_ in found.differences())
    assert any(term.kind == "all-gather" for term in found.compiled)
    assert found.too_large.startswith("the step needs") and found.to_json()["too_large"]
    print_audit(found)
    assert "what it would send" in capsys.readouterr().out


def kinds(target, *settings):
    """The collectives over fsdp by formula, with their arrays' bytes."""
    more = "model.embed=1024", "model.mlp=16384", "model.dtype=bfloat16", "train.global_batch=4096"
    cfg = mt.load_config("laptop", [*TINY, *TILES, *more, *settings])
    terms = predict(cfg, abstract_mesh(cfg.mesh), "tpu", parse_target(target))
    found = {}
    for term in terms:
        if "weights" in term.name and term.group == cfg.mesh.fsdp:
            found.setdefault(term.kind, set()).update(term.arrays)
    return found


def test_the_network_decides_between_gathers_and_sums():
    """Whether a slice is a torus, and whether a group is all of it."""
    small, large = {2 * 1024 * 1024, 2 * 1024 * 512}, {2 * 1024 * 16384}
    every = small | large
    assert kinds("v6e:8x8", "mesh.fsdp=64") == {"all-gather": large, "all-reduce": every}
    assert kinds("v5p:2x4x8", "mesh.fsdp=64") == {"all-reduce": every, "reduce-scatter": every}
    assert kinds("v5p:4x4x4", "mesh.fsdp=64") == {"all-gather": every, "all-reduce": every}
    torus = {"all-gather": every, "reduce-scatter": every}
    assert kinds("v5p:4x8x8", "mesh.fsdp=64", "mesh.data=4") == torus
    assert kinds("v6e:4x8", "mesh.fsdp=32") == torus


@needs_libtpu
@pytest.mark.audit
def test_tpus_send_tokens_to_experts():
    """Rows of whole lanes: 320 elements of bfloat16 take as much as 512."""
    sizes = ("model.embed=320", "model.mlp=512", "model.dtype=bfloat16", "model.remat=full")
    experts = ("model.ffn.kind=moe", "model.ffn.experts=8", "mesh.expert=4", "mesh.data=2")
    found = audited(*TILES, "sharding.rules=ep", *sizes, *experts, target="v5e:2x4")
    assert found.differences() == {}
    rows = 16 // 8 * 128 * 2
    assert {t.arrays for t in found.compiled if t.kind == "ragged-all-to-all"} == {
        (rows * 512 * 2,)
    }
    (note,) = found.notes
    assert "sends what the router chose" in note


# The formula must not be made for one configuration: one after the other, everything else is changed.
OTHERS = {
    "sizes": "model.layers=4 model.embed=48 model.mlp=96 model.kv_heads=8 data.seq_len=64 model.vocab=512",
    "tied": "model.tie_embeddings=true",
    "remat": "model.remat=full train.global_batch=32",
    "microbatches": "train.microbatches=2 train.global_batch=32",
    "bfloat16": "model.dtype=bfloat16 model.remat=full",
    "chunks": "train.loss_chunks=2",
    "int8": "sharding.gather_dtype=int8",
    "int8, in chunks": "sharding.gather_dtype=int8 train.loss_chunks=2",
}


VARIED_QUICKLY = [
    ("fsdp x tp x pp", "sizes"),
    ("fsdp x tp x cp", "remat"),
    ("tp_seq", "microbatches"),
    ("fsdp", "chunks"),
]
VARIED = [
    *VARIED_QUICKLY,
    *((layout, "tied") for layout in ("fsdp", "fsdp x tp x pp")),
    ("pp, circular", "microbatches"),
    *((layout, "bfloat16") for layout in ("cp x fsdp", "fsdp x tp x pp")),
    *((layout, "int8") for layout in ("fsdp", "fsdp x tp x pp", "pp, 1f1b")),
    ("fsdp x tp x cp", "int8, in chunks"),
]


@pytest.mark.slow
@pytest.mark.parametrize("varied", audit_but(VARIED_QUICKLY[1:3], VARIED))
def test_the_formula_follows_the_configuration(varied):
    layout, other = varied
    assert audited(*small(layout, *OTHERS[other].split())).differences() == {}


# Layers that differ, or have more than plain ones.
PATTERNS = {
    "one bias": ["model.attention.out_bias=true"],
    "biases": [
        "model.attention.qkv_bias=true", "model.attention.out_bias=true", "model.ffn.bias=true",
    ],
    "gemma": [
        "model.norms=both", "model.norm_offset=true", "model.attention.qk_norm=head", "model.tie_embeddings=true",
        "model.period=[{attention: {window: 8}, mlp: 96}, {rope: {theta: 1.0e6}}]",
    ],
    "gpt-oss": [
        "model.attention.qkv_bias=true", "model.attention.out_bias=true", "model.attention.sinks=true",
        "model.ffn.kind=moe", "model.ffn.bias=true", "model.ffn.router_bias=true",
        "model.period=[{attention: {window: 8}}, {}]",
    ],
    "olmo": ["model.norms=after", "model.attention.qk_norm=head", "model.attention.gate=true"],
    "lora": ["model.lora.rank=6"],
    "olmo2": ["model.norms=after", "model.attention.qk_norm=whole"],
    "llama4": [
        "model.ffn.kind=moe", "model.ffn.scale_input=true", "model.ffn.shared_experts=1",
        "model.period=[{ffn: {kind: swiglu}, mlp: 96}, {}]",
    ],
    "mla": [
        "model.kv_heads=null", "model.attention.kind=mla", "model.attention.q_rank=48", "model.attention.kv_rank=40",
        "model.attention.nope_dim=12", "model.attention.rope_dim=8", "model.attention.v_dim=20",
    ],
    "deltanet": [
        "model.kv_heads=null", "model.attention.kind=deltanet", "model.attention.key_heads=4",
        "model.attention.value_heads=8", "model.attention.key_dim=12", "model.attention.value_dim=20",
    ],
    "qwen3-next": [
        "model.attention.gate=true", "model.attention.qk_norm=head", "model.ffn.kind=moe", "model.ffn.shared_experts=1",
        "model.ffn.shared_gate=true",
        "model.period=[{attention: {kind: deltanet, key_dim: 12, value_dim: 20}}, {}]",
    ],
}  # fmt: skip
PATTERNS["deepseek"] = [
    *PATTERNS["mla"], "model.layers=4", "model.dense_layers=2", "model.dense_mlp=80", "model.ffn.kind=moe",
    "model.ffn.shared_experts=1", "model.ffn.router=sigmoid", "model.ffn.bias_rate=0.1",
]  # fmt: skip
PATTERNED = [
    ("deepseek", "mesh.expert=2 mesh.fsdp=2 mesh.tensor=2"),
    ("deepseek", "mesh.fsdp=8 model.remat=full"),
    ("deepseek", "mesh.fsdp=4 mesh.context=2"),
    ("deepseek", "sharding.rules=zero2 mesh.data=2 mesh.fsdp=4"),
    ("deepseek", "sharding.rules=tp_seq mesh.data=4 mesh.tensor=2"),
    ("mla", "mesh.fsdp=4 mesh.tensor=2 model.attention.q_rank=null"),
    ("mla", "mesh.stage=2 mesh.fsdp=4"),
    ("deltanet", "mesh.stage=2 mesh.fsdp=2 mesh.tensor=2"),
    ("deltanet", "sharding.rules=tp_seq mesh.data=4 mesh.tensor=2"),
    ("qwen3-next", "mesh.expert=2 mesh.fsdp=2 mesh.tensor=2"),
    ("qwen3-next", "mesh.fsdp=4 mesh.tensor=2 model.remat=full"),
    ("qwen3-next", "sharding.rules=tp_seq mesh.data=4 mesh.tensor=2"),
    ("llama4", "mesh.fsdp=4 mesh.tensor=2"),
    ("llama4", "sharding.rules=tp_seq mesh.data=4 mesh.tensor=2"),
    ("gpt-oss", "sharding.rules=tp_seq mesh.data=4 mesh.tensor=2"),
    ("olmo", "mesh.fsdp=4 mesh.tensor=2 model.remat=full"),
    ("olmo2", "mesh.fsdp=4 mesh.tensor=2 model.remat=full"),
    ("olmo2", "mesh.fsdp=2 mesh.context=2 mesh.tensor=2"),
    ("olmo2", "sharding.rules=tp_seq mesh.data=4 mesh.tensor=2"),
    ("lora", "mesh.data=8"),
    ("lora", "mesh.fsdp=4 mesh.tensor=2 model.remat=dots"),
    ("lora", "mesh.fsdp=4 mesh.context=2"),
    ("lora", "mesh.fsdp=8 model.dtype=bfloat16 model.remat=full"),
    ("one bias", "mesh.fsdp=8 model.remat=full"),
    ("biases", "mesh.fsdp=4 mesh.tensor=2"),
    ("gemma", "mesh.fsdp=8"),
    ("gemma", "mesh.fsdp=4 mesh.tensor=2"),
    ("gemma", "mesh.fsdp=4 mesh.tensor=2 model.remat=full"),
    ("gpt-oss", "mesh.expert=2 mesh.fsdp=4"),
    ("gpt-oss", "mesh.fsdp=4 mesh.expert=2 model.remat=full model.dtype=bfloat16"),
    ("gpt-oss", "mesh.fsdp=8"),
    ("gpt-oss", "mesh.fsdp=8 model.remat=full"),
    ("gpt-oss", "mesh.fsdp=4 mesh.tensor=2"),
    ("gpt-oss", "mesh.expert=2 mesh.fsdp=2 mesh.tensor=2"),
]


PATTERNED_QUICKLY = [
    ("gemma", "mesh.fsdp=8"),
    ("olmo2", "mesh.fsdp=4 mesh.tensor=2 model.remat=full"),
    ("lora", "mesh.fsdp=4 mesh.tensor=2 model.remat=dots"),
]


@pytest.mark.parametrize("patterned", audit_but(PATTERNED_QUICKLY, PATTERNED))
def test_the_formula_knows_layers_that_differ(patterned):
    name, layout = patterned
    found = audited(*SIZES, *PATTERNS[name], *layout.split())
    assert found.differences() == {} and found.notes == []


@needs_libtpu
@pytest.mark.audit
@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("fsdp", "model.dtype=bfloat16 model.remat=full model.tie_embeddings=true"),
        ("fsdp", "model.dtype=bfloat16 train.microbatches=2 train.loss_chunks=2"),
        ("fsdp x tp x cp", "model.dtype=bfloat16"),  # sums of parts of whole lanes
        ("pp, 1f1b", "mesh.fsdp=1 mesh.data=2"),
    ],
)
def test_the_formula_follows_the_configuration_on_tpus(layout, other):
    found = audited(*tiles(layout, *other.split()), target="v5e:2x4")
    assert found.differences() == {} and found.notes == []


INT8 = (
    "model.embed=512", "model.head_dim=128", "model.mlp=1536", "model.dtype=bfloat16", "model.remat=full",
    "sharding.gather_dtype=int8",
)  # fmt: skip
EXPERTS = (
    "model.ffn.kind=moe", "model.ffn.experts=8", "model.ffn.experts_per_token=2", "model.ffn.capacity_factor=1.25",
)  # fmt: skip


@needs_libtpu
@pytest.mark.audit
@pytest.mark.parametrize("axes", ["fsdp=4", "fsdp=2 tensor=2", "data=2 fsdp=2"])
@pytest.mark.parametrize("experts", [(), EXPERTS], ids=["dense", "experts"])
def test_tpus_send_rounded_weights_and_their_scales(axes, experts):
    mesh = (f"mesh.{axis}" for axis in axes.split())
    found = audited(*TILES, *INT8, *experts, *mesh, target="v5e:2x2")
    assert found.differences() == {} and found.notes == []


def test_rounded_weights_take_half_the_bytes_and_each_row_a_scale():
    def sent(gather_dtype):
        cfg = mt.load_config("laptop", [*TINY, *TILES, *INT8[:-1], "mesh.fsdp=8", gather_dtype])
        terms = predict(cfg, abstract_mesh(cfg.mesh), "tpu")
        gathered = [t for t in terms if t.kind.startswith("all-") and "gradient" not in t.name]
        layers = [t for t in gathered if t.name.startswith("all-gather of the weights")]
        scales = sum(t.bytes for t in layers if t.name.endswith("scales"))
        return (
            sum(t.bytes for t in layers) - scales,
            scales,
            [t for t in terms if "gradient" in t.name],
        )

    (exact, none, sums), (rounded, scales, same) = (
        sent(f"sharding.gather_dtype={kind}") for kind in ("auto", "int8")
    )
    assert none == 0 and rounded * 2 == exact and sums == same
    assert scales == 2 * 8 * 7 * 512 * 4  # two passes, eight layers of seven weights with 512 rows


def test_one_device_sends_nothing(tiny):
    mesh = make_mesh(devices=jax.devices()[:1])
    cfg = tiny("model.layers=1")
    assert predict(cfg, mesh, "cpu") == [] and audit(cfg, mesh).compiled == []


def moved(kind, *settings):
    """What each device sends in a step by the formula."""
    cfg = mt.load_config("laptop", [*TINY, *TILES, *settings])
    return sum(t.moved for t in predict(cfg, make_mesh(cfg.mesh), kind))


def test_zero_costs_what_data_parallelism_costs_and_fsdp_half_as_much_again():
    """Rajbhandari et al. 2020, section 7: but for a reduce-scatter instead of the all-reduce, which a TPU makes."""
    weights = ("model.layers=48", "model.tie_embeddings=false")
    data = ("sharding.rules=dp", "mesh.data=8")
    dp = moved("tpu", *data, *weights)
    fsdp = moved("tpu", "sharding.rules=fsdp", "mesh.fsdp=8", "model.dtype=bfloat16", *weights)
    half = moved("tpu", *data, "model.dtype=bfloat16", *weights)
    assert half == pytest.approx(dp / 2, rel=0.02)
    assert fsdp == pytest.approx(1.5 * half, rel=0.05)


def test_an_audit_shows_what_differs(capsys):
    found = audited(*small("fsdp"))
    print_audit(found)
    text = capsys.readouterr().out
    assert "gradient of the weights" in text and "sends what the formula says" in text
    found = dataclasses.replace(found, compiled=found.compiled[:-1])
    print_audit(found)
    text = capsys.readouterr().out
    assert "differs" in text and "sends what the formula says" not in text
    assert found.to_json()["differences"]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("model.layers=1", "one layer in a loop"),
        ("optim.kind=muon", "optim.kind=muon"),
        ("model.lora.rank=8", "what adapters send"),
        ("model.embed=64", "8 parts of 8 rows, no whole tiles of 16"),
    ],
)
def test_what_is_not_predicted_is_said(other, told):
    cfg = mt.load_config("laptop", [*TINY, *tiles("fsdp", *other.split())])
    (note,) = notes(cfg, make_mesh(cfg.mesh), "tpu")
    assert told in note


@needs_libtpu
def test_what_is_not_predicted_of_slices_is_printed(capsys):
    cfg = mt.load_config("laptop", [*TINY, *tiles("dp")])
    told = notes(cfg, topology_mesh("v5e:2x2 slices=2", cfg.mesh), "tpu")
    print_audit(dataclasses.replace(audited(*small("fsdp")), notes=told))
    assert "not predicted: 2 slices" in capsys.readouterr().out


def predicted(preset, *settings):
    cfg = mt.load_config(preset, list(settings))
    return predict(cfg, abstract_mesh(cfg.mesh), "tpu")


def parts(cfg):
    """Bytes in bfloat16 of the matrices in layers, of the two tables, and in float32 of the norms."""
    table, norms = cfg.vocab * cfg.embed, (2 * cfg.layers + 1) * cfg.embed
    return 2 * (count_params(cfg) - 2 * table - norms), 2 * 2 * table, 4 * norms


@pytest.mark.parametrize("slices", [2, 199])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_replicas_send_the_gradients_of_a_device_across_slices(slices, microbatches):
    more = f"mesh.data={slices}", "mesh.fsdp=16", f"train.microbatches={microbatches}"
    batch = f"train.global_batch={slices * 16 * microbatches}"
    terms = predicted("llama2-70b", *more, batch, f"mesh.dcn.data={slices}")
    each = sum(parts(mt.load_config("llama2-70b").model)) * microbatches / 16
    # Rounded down where a device's part is no whole number of bytes.
    assert sum_across(terms) == pytest.approx(2 * (slices - 1) / slices * each)
    alone = predicted(
        "llama2-70b", "mesh.fsdp=16", more[2], f"train.global_batch={16 * microbatches}"
    )
    within = [t for t in terms if "(dcn)" not in t.kind]
    differ = {a.name for a, b in zip(within, alone, strict=True) if a != b}
    assert differ <= {"gradient of the embedding table"}  # summed whole, and then cut
    assert not sum_across(alone)


def test_parts_of_weights_cross_slices_twice_and_their_gradients_as_sums():
    """32 parts on two slices: each gather takes half of a 16th from the other slice, and a sum counts as two."""
    terms = predicted("llama2-70b", "mesh.fsdp=32", "mesh.dcn.fsdp=2", "train.global_batch=32")
    layers, tables, norms = parts(mt.load_config("llama2-70b").model)
    assert sum_across(terms) == pytest.approx((4 * layers + 3 * tables) / 32, rel=1e-4)
    assert norms / layers < 1e-4  # what is left out here


def test_stages_send_activations_across_slices():
    sizes = "mesh.stage=4", "mesh.dcn.stage=2", "sharding.rules=pp", "mesh.data=1", "model.layers=8"
    terms = predicted("laptop", *TINY, *sizes)
    whole = predicted("laptop", *TINY, *sizes, "mesh.dcn.stage=1")
    sent, same = (
        [t for t in found if t.name.startswith("activations to the next")]
        for found in (terms, whole)
    )
    assert [t.kind for t in sent] == ["collective-permute", "collective-permute (dcn)"]
    assert {(t.arrays, t.runs) for t in sent} == {(t.arrays, t.runs) for t in same}


def test_what_should_not_cross_slices_is_said_with_its_bytes():
    sizes = "mesh.data=2", "mesh.tensor=4", "mesh.dcn.data=2", "mesh.dcn.tensor=2"
    cfg = mt.load_config("laptop", [*TINY, *sizes])
    which, cost = across_slices(cfg, abstract_mesh(cfg.mesh))
    assert which.startswith("across 4 slices: mesh.data by 2 and mesh.tensor by 2; each")
    only = sum_across(predicted("laptop", *TINY, *sizes, "mesh.dcn.data=1"))
    assert cost.startswith(f"mesh.dcn.tensor=2: {show_bytes(only)} of that") and only > 0
    assert not across_slices(
        cfg.replace({"mesh.dcn.data": 1, "mesh.dcn.tensor": 1}), abstract_mesh(cfg.mesh)
    )


@needs_libtpu
@pytest.mark.audit
def test_groups_across_slices_are_those_of_the_mesh():
    """Two axes cross: each group of the program has one device from each slice along one axis, or along both."""
    words = (
        "mesh.data=2 mesh.fsdp=16 mesh.dcn.data=2 mesh.dcn.fsdp=2 model.embed=512 model.heads=8 model.mlp=1536 "
        "model.vocab=4096 model.dtype=bfloat16 model.remat=full data.seq_len=256 train.global_batch=64 "
        "model.scan_layers=true"
    )
    cfg, target = mt.load_config("laptop", words.split()), "v5e:2x4 slices=4"
    report, text = compile_program(cfg, target)
    assert report.across == {"data": 2, "fsdp": 2}
    mesh = topology_mesh(target, cfg.mesh)
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 2, 8)  # data, fsdp
    over_fsdp = {frozenset(g) for g in ids.transpose(0, 2, 1).reshape(-1, 2).tolist()}
    over_data = {frozenset(g) for g in ids.transpose(1, 2, 0).reshape(-1, 2).tolist()}
    found = {}
    for groups, kind in re.findall(
        r'_xla_megascale_target=\{(\{[\d,{}]+\})\},_xla_megascale_transfer_type="(\w+)"', text
    ):
        listed = {frozenset(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", groups)}
        assert listed in (over_fsdp, over_data)
        found.setdefault(kind, []).append(listed)
    # Weights are gathered over fsdp; gradients are summed over fsdp, and their parts over data.
    assert all(g == over_fsdp for g in found["ALL_GATHER"])
    assert over_fsdp in found["ALL_REDUCE"] and over_data in found["ALL_REDUCE"]
    assert (
        '_xla_megascale_target="{1,2,3,4}' in text
    )  # all slices: the embedding table's gradient, and norms'
    audit = read(text, cfg, mesh, "tpu")
    want, got = ({row.kind: row.moved for row in by_kind(t)} for t in (audit.terms, audit.compiled))
    assert got["all-gather (dcn)"] == pytest.approx(want["all-gather (dcn)"], rel=1e-3)
    # The embedding table's gradient crosses in float32 here, and is a tenth of what is summed.
    assert 0 < got["all-reduce (dcn)"] / want["all-reduce (dcn)"] - 1 < 0.15
    assert report.networks["dcn"][2] == pytest.approx(sum_across(audit.compiled), rel=1e-3)


def test_the_command(monkeypatch, capsys):
    words = ["minitext", "comms", "laptop", "--json", *TINY, *small("fsdp")]
    monkeypatch.setattr("sys.argv", words)
    try:
        main.main()
    except SystemExit as stop:
        assert not stop.code
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"] == found["compiled"] and not found["differences"]
    assert {t["name"] for t in found["terms"]} >= {"all-gather of the weights, forward"}
