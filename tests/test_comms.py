"""What a step sends is what the formula says, for every layout, on simulated CPU devices and by the TPU compiler."""

import functools
import importlib.util
import json

import jax
import pytest

from minitext import cli
from minitext.comms import predict
from minitext.comms_report import audit, by_kind, print_audit
from minitext.mesh import make_mesh
from minitext.targets import topology_mesh

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")

# Every size is one of its own, so that no two terms look alike by accident.
SIZES = [
    "model.layers=3",
    "model.heads=8",
    "model.kv_heads=4",
    "train.global_batch=16",
    "model.vocab=320",
]
# Shards of whole tiles: smaller ones the TPU compiler moves in ways of its own.
TILES = [
    *SIZES, "model.embed=256", "model.mlp=512", "model.vocab=512", "data.seq_len=128", "model.layers=2",
]  # fmt: skip

LAYOUTS = {
    "dp": "sharding.rules=dp",
    "fsdp": "sharding.rules=fsdp mesh.fsdp=8",
    "hybrid": "sharding.rules=fsdp mesh.fsdp=4 mesh.data=2",
    "zero1": "sharding.rules=zero1 mesh.fsdp=8",
    "zero2": "sharding.rules=zero2 mesh.fsdp=8",
    "tp": "sharding.rules=tp mesh.tensor=4 mesh.data=2",
    "tp_seq": "sharding.rules=tp_seq mesh.tensor=4 mesh.data=2",
    "fsdp_tp": "sharding.rules=fsdp_tp mesh.fsdp=2 mesh.tensor=2",
    "allgather": "sharding.rules=cp mesh.context=8 model.attention.context=allgather",
    "ring": "sharding.rules=cp mesh.context=8",
    "ring_fsdp": "sharding.rules=cp mesh.context=2 mesh.fsdp=4",
    "all": "sharding.rules=all mesh.fsdp=2 mesh.tensor=2 mesh.context=2",
}  # fmt: skip


def audited(cfg, target=None):
    mesh = topology_mesh(target, cfg.mesh) if target else make_mesh(cfg.mesh)
    return audit(cfg, mesh)


def some(cases, quick):
    """Marks the cases slow that are not among the quick ones; each compiles a step."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("layout", some(LAYOUTS, ("fsdp", "zero1", "tp_seq", "all")))
def test_simulated_devices_send_what_the_formula_says(tiny, layout):
    found = audited(tiny(*SIZES, *LAYOUTS[layout].split()))
    assert found.differences() == {}
    assert by_kind(found.terms) == by_kind(found.compiled)


# The formula must not be made for one configuration: one after the other, everything else is changed.
OTHERS = {
    "sizes": "model.layers=2 model.embed=48 model.mlp=96 model.kv_heads=8 data.seq_len=64 model.vocab=512",
    "tied": "model.tie_embeddings=true",
    "remat": "model.remat=full train.global_batch=32",
    "microbatches": "train.microbatches=2 train.global_batch=32",
    "bfloat16": "model.dtype=bfloat16",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "other"),
    [
        *((layout, "sizes") for layout in ("zero1", "tp_seq", "ring_fsdp")),
        *((layout, "tied") for layout in ("fsdp", "all")),
        *((layout, "remat") for layout in ("fsdp_tp", "ring", "allgather")),
        *((layout, "microbatches") for layout in ("zero2", "all")),
        *((layout, "bfloat16") for layout in ("tp", "fsdp")),
    ],
)
def test_the_formula_follows_the_configuration(tiny, layout, other):
    cfg = tiny(*SIZES, *LAYOUTS[layout].split(), *OTHERS[other].split())
    assert audited(cfg).differences() == {}


@needs_libtpu
@pytest.mark.parametrize(
    "case",
    [
        "fsdp model.dtype=bfloat16 model.remat=full model.tie_embeddings=true",
        "all model.remat=full",
        *(pytest.param(case, marks=pytest.mark.slow) for case in (
            "dp model.dtype=bfloat16 train.microbatches=2",
            "fsdp",
            "hybrid",
            "zero1",
            "tp model.dtype=bfloat16",
            "tp_seq model.remat=full",
            "fsdp_tp model.tie_embeddings=true",
            "allgather model.dtype=bfloat16",
            "ring",
        )),
    ],
)  # fmt: skip
def test_tpus_send_what_the_formula_says(tiny, case):
    layout, *other = case.split()
    found = audited(tiny(*TILES, *LAYOUTS[layout].split(), *other), "v5e:2x4")
    assert found.differences() == {} and found.backend == "tpu"


def test_one_device_sends_nothing(tiny):
    mesh = make_mesh(devices=jax.devices()[:1])
    assert predict(tiny(), mesh, "cpu") == [] and audit(tiny(), mesh).compiled == []


@functools.cache
def moved(kind, *settings):
    """What each device sends in a step by the formula."""
    from conftest import TINY

    import minitext as mt

    cfg = mt.load_config("laptop", [*TINY, *SIZES, *settings])
    terms = predict(cfg, make_mesh(cfg.mesh), kind)
    return sum(t.moved for t in terms)


def test_zero_costs_what_data_parallelism_costs_and_fsdp_half_as_much_again():
    """Rajbhandari et al. 2020, section 7: but for a reduce-scatter instead of the all-reduce, which a TPU makes."""
    weights = ("model.layers=48", "model.tie_embeddings=false")
    dp = moved("tpu", "sharding.rules=dp", *weights)
    fsdp = moved("tpu", "sharding.rules=fsdp", "mesh.fsdp=8", "model.dtype=bfloat16", *weights)
    half = moved("tpu", "sharding.rules=dp", "model.dtype=bfloat16", *weights)
    assert half == pytest.approx(dp / 2, rel=0.02)
    assert fsdp == pytest.approx(1.5 * half, rel=0.05)


def test_an_audit_shows_what_differs(tiny, capsys):
    found = audited(tiny(*SIZES, *LAYOUTS["dp"].split()))
    print_audit(found)
    text = capsys.readouterr().out
    assert "gradient of the weights" in text and "sends what the formula says" in text
    found.compiled.pop()
    print_audit(found)
    text = capsys.readouterr().out
    assert "differs" in text and "sends what the formula says" not in text
    assert found.to_json()["differences"]


def test_the_command(monkeypatch, capsys):
    from conftest import TINY

    words = [*TINY, *SIZES, *LAYOUTS["fsdp"].split(), "mesh.data=1"]
    monkeypatch.setattr("sys.argv", ["minitext", "comms", "laptop", "--json", *words])
    try:
        cli.main()
    except SystemExit as stop:
        assert not stop.code
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"] == found["compiled"] and not found["differences"]
    assert {t["name"] for t in found["terms"]} >= {"all-gather of the weights, forward"}
