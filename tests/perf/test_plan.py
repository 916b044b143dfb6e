"""The search: what is tried, what its times are made of, what is compiled and said."""

import dataclasses
import importlib.util
import json
import math
import shlex
from types import SimpleNamespace

import pytest

from minitext.cli import main
from minitext.compiler.targets import parse_target
from minitext.config.config import load_config
from minitext.errors import UserError
from minitext.perf import plan
from minitext.perf.comms import Term
from minitext.perf.plan import (
    Candidate,
    Times,
    Work,
    enumerate_settings,
    link_rate,
    predict,
    search,
)
from minitext.training.compile import compile_preset

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
TINY = [
    "model.layers=2", "model.dtype=bfloat16", "model.embed=512", "model.heads=4", "model.kv_heads=2", "model.mlp=1024",
    "data.seq_len=256",
]  # fmt: skip


def choices(target, *settings, preset="laptop"):
    return list(enumerate_settings(load_config(preset, list(settings)), parse_target(target)))


@pytest.mark.parametrize("target", ["v5e:4x4", "v5p:4x4x4", "v5e:4x4 slices=3", "tpu7x:2x2x1"])
def test_every_mesh_takes_all_devices_and_slices_lie_along_data(target):
    parsed = parse_target(target)
    found = choices(target, *TINY)
    assert len({json.dumps(c) for c in found}) == len(found) > 20
    for c in found:
        assert (
            c["mesh.data"] * c["mesh.fsdp"] * c["mesh.tensor"] * c["mesh.expert"] == parsed.devices
        )
        assert c["mesh.data"] % parsed.slices == 0
        assert c["mesh.expert"] == 1  # a dense model has no use for it
        assert c["train.global_batch"] % (c["mesh.data"] * c["mesh.fsdp"]) == 0


def test_the_axes_that_cross_slices_take_their_factors():
    crossing = "mesh.dcn.data=2", "mesh.dcn.fsdp=2"
    found = choices("v5e:4x4 slices=4", *TINY, *crossing)
    assert {(c["mesh.data"], c["mesh.fsdp"]) for c in found} >= {(2, 32), (32, 2), (8, 2)}
    for c in found:
        assert math.prod(c[key] for key in plan.SEARCHED) == 64
        assert c["mesh.data"] % 2 == c["mesh.fsdp"] % 2 == 0
    with pytest.raises(UserError, match=r"mesh.dcn.fsdp=2 is for 4 slices and there are 2"):
        choices("v5e:4x4 slices=2", *TINY, *crossing)


def test_what_is_set_is_kept():
    found = choices("v5e:4x4", *TINY, "mesh.fsdp=4", "train.global_batch=64", "model.remat=full")
    assert {c["mesh.fsdp"] for c in found} == {4}
    assert {c["train.global_batch"] for c in found} == {64}
    assert {c["model.remat"] for c in found} == {"full"}
    assert {c["train.microbatches"] for c in found} == {1, 2, 4, 8, 16}
    fixed = choices("v5e:4x4", *TINY, "train.global_batch=64", "train.microbatches=2")
    assert {c["train.microbatches"] for c in fixed} == {2}
    assert any(c["mesh.expert"] == 8 for c in choices("v5e:4x4", preset="mixtral-8x7b"))
    assert not choices("v5e:4x4", "mesh.context=3")


def test_experts_are_searched_for_in_every_layer():
    """Experts of different layers are split over the same devices, whichever layer of a period has them."""
    moe = "{ffn: {kind: moe, experts: 8}}"
    for period, most in (
        (f"[{{}}, {moe}]", 8),
        (f"[{moe}, {{ffn: {{kind: moe, experts: 12}}}}]", 4),
    ):
        found = choices("v5e:4x4", *TINY, f"model.period={period}")
        assert max(c["mesh.expert"] for c in found) == most


def test_seconds_are_of_what_each_device_does():
    cfg = load_config("laptop", TINY)
    target = parse_target("v5e:4x4")
    work = Work(cfg, target)
    base = {"mesh.data": 1, "mesh.fsdp": 16, "train.global_batch": 16}
    one = predict(cfg.replace(base), target, work)
    four = predict(cfg.replace(base | {"train.global_batch": 64}), target, work)
    again = predict(cfg.replace(base | {"model.remat": "full"}), target, work)
    # Four times the rows, four times the products; weights are gathered as often.
    assert four.compute == pytest.approx(4 * one.compute) and four.ici == one.ici
    # The layers' forward pass once more: four passes in place of three.
    assert 1.1 * one.compute < again.compute < 4 / 3 * one.compute + 1e-9
    alone = predict(cfg.replace(base | {"mesh.data": 16, "mesh.fsdp": 1}), target, work)
    assert alone.ici < one.ici  # gradients once, weights never
    assert alone.hbm > one.hbm  # all update all parameters
    # These rules keep parameters whole; ZeRO splits the update.
    for rules, other in (("dp", alone), ("zero1", one)):
        found = predict(cfg.replace(base | {"sharding.rules": rules}), target, work)
        assert found.hbm == pytest.approx(other.hbm)


MOE = [*TINY, "model.ffn.kind=moe", "model.ffn.experts=64", "model.remat=full"]


def test_experts_are_read_whole_however_few_rows_they_get():
    cfg, target = load_config("laptop", MOE), parse_target("v5e:4x4")
    work = Work(cfg, target)
    base = {"mesh.data": 1, "mesh.fsdp": 16, "train.global_batch": 16}
    whole = predict(cfg.replace(base), target, work)
    split = predict(cfg.replace(base | {"mesh.fsdp": 4, "mesh.expert": 4}), target, work)
    assert split.compute == whole.compute
    # Forward, again, and the gradients of tokens and weights: of all experts, or of a fourth.
    size = 4 * 2 * 3 * 64 * 512 * 1024 * 2
    fourth = 0.75 * size / target.chip.hbm_bandwidth
    assert whole.hbm - split.hbm == pytest.approx(fourth, rel=0.05)
    # Weights need not be sent to a device that has no use for them.
    assert split.ici < whole.ici
    many = cfg.replace(base | {"train.global_batch": 64 * 16})
    rows = predict(many, target, work)
    assert rows.compute == pytest.approx(64 * whole.compute)


def test_only_experts_are_split_over_the_devices_of_experts():
    cfg = load_config("laptop", MOE)
    count = plan.count_params(cfg.model)
    experts = 2 * 3 * 64 * 512 * 1024

    def held(**axes):
        return plan.parameters(cfg.replace({f"mesh.{axis}": size for axis, size in axes.items()}))

    assert held() == count and held(data=4) == count
    assert held(fsdp=2, tensor=2) == count // 4
    assert held(fsdp=2, expert=4) == (count - experts + experts // 4) // 2


def test_an_all_to_all_crosses_the_middle_of_a_dimension():
    line, ring = parse_target("v5e:4x4"), parse_target("v5p:4x4x4")
    sent = Term("tokens", "all-to-all", 4, (1000,), 3)
    assert plan.send_seconds(line, sent) == pytest.approx(3000 / line.chip.link_rate)
    assert plan.send_seconds(ring, sent) == pytest.approx(3000 / 2 / ring.chip.link_rate)
    # A group of 16 has four times the links, each with as much to carry.
    wide = sent._replace(group=16)
    assert plan.send_seconds(line, wide) == plan.send_seconds(line, sent)
    gathered = sent._replace(kind="all-gather")
    assert plan.send_seconds(line, gathered) == pytest.approx(2250 / line.chip.link_rate)


def test_memory_is_predicted_first_for_the_fewest_rows(monkeypatch):
    """If these need too much, so do all others of the same mesh and remat policy."""
    asked = []

    def need(cfg, target):
        rows, remat = cfg.train.global_batch, cfg.model.remat
        asked.append((rows, remat))
        return target.chip.usable_bytes + (1 if remat == "none" or rows > 8 else 0)

    def candidate(batch, remat):
        mesh = dict(zip(plan.SEARCHED, (1, 4, 1, 1), strict=True))
        settings = mesh | {"train.global_batch": batch, "model.remat": remat}
        return Candidate(settings, 1, Times(1.0, 0.0, 0.0, 0.0))

    monkeypatch.setattr(plan, "_predict_memory", need)
    found = [candidate(rows, remat) for remat in ("none", "full") for rows in (16, 8, 4)]
    args = load_config("laptop", TINY), found, parse_target("v5e:2x2"), 1, lambda *_: None
    (kept,), too_large, smallest = plan._select_fitting(*args)
    assert asked == [(4, "none"), (4, "full"), (16, "full"), (8, "full")]
    assert kept.settings["train.global_batch"] == 8 and kept.crowded and too_large == 4
    assert smallest == args[2].chip.usable_bytes


def test_what_is_not_trained_beside_adapters_has_no_moments():
    """Of llama3.1-8b the parameters fit on four chips, and parameters with their moments don't."""
    target = parse_target("v5e:2x2")
    sizes = ["mesh.fsdp=4", "mesh.data=1", "train.global_batch=4", "data.seq_len=1024"]
    whole, adapters = (
        plan._predict_memory(load_config("llama3.1-8b", [*sizes, *more]), target)
        for more in (["model.remat=full"], ["model.remat=full", "model.lora.rank=8"])
    )
    assert adapters < target.chip.usable_bytes < whole


def test_links_of_as_many_dimensions_as_a_group_needs():
    rate = parse_target("v5e:2x2").chip.link_rate
    assert link_rate(parse_target("v5e:4x4"), 4) == rate  # a line
    assert link_rate(parse_target("v5e:4x4"), 16) == 2 * rate
    assert link_rate(parse_target("v5e:16x16"), 16) == 2 * rate  # a ring
    assert link_rate(parse_target("v5e:16x16"), 256) == 4 * rate
    assert link_rate(parse_target("v5p:4x4x4"), 64) == 6 * parse_target("v5p:4x4x4").chip.link_rate


def test_times_say_what_limits():
    times = Times(3.0, 1.0, 2.0, 5.0)
    assert (times.hidden, times.waited, times.limit) == (5.0, 11.0, "DCN")
    unknown = Times(3.0, 1.0, 2.0, None)
    assert (unknown.hidden, unknown.waited, unknown.limit) == (4.0, 6.0, "compute")
    assert Candidate({}, 1, times, crowded=True).limit == "DCN, memory"


def test_a_network_that_is_not_known_is_said_and_not_counted_free():
    target = parse_target("v5e:4x4 slices=2")
    unknown = dataclasses.replace(target, chip=dataclasses.replace(target.chip, dcn_bandwidth=0.0))
    cfg = load_config("laptop", TINY)
    assert list(plan._notes(cfg, target)) == ["across 2 slices: mesh.data by 2"]
    assert "bandwidth of v5e on the data-centre network is not known" in "".join(
        plan._notes(cfg, unknown)
    )
    assert plan.dcn_seconds(1e9, unknown.chip) is None
    assert plan.dcn_seconds(3.125e9, target.chip) == 1.0


@pytest.mark.parametrize(
    ("target", "settings", "words"),
    [
        ("h100:2x8", [], "memory and the network of TPUs only"),
        ("v5e:4x4", ["mesh.fsdp=3"], "no mesh of 16 devices goes with"),
        (
            "v5e:4x4",
            ["model.lora.rank=4", "model.storage=[{dtype: int8}]"],
            "model.storage: the formulas for what",
        ),
        ("v5e:4x4", ["model.ffn.kind=moe", "mesh.expert=3"], "no mesh of 16 devices goes with"),
        (
            "v5e:4x4",
            ["train.global_batch=7", "model.heads=7", "model.embed=98"],
            "no mesh of 16 devices",
        ),
    ],
)
def test_refusals_are_one_line(target, settings, words):
    with pytest.raises(UserError, match=words) as caught:
        search(load_config("laptop", settings), target)
    assert "\n" not in str(caught.value)


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["minitext", "plan", *words])
    try:
        main.main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


def test_where_nothing_fits_it_says_so(monkeypatch, capsys):
    assert (
        run(monkeypatch, "llama2-70b", "target=v5e:2x2", "train.global_batch=4", "model.remat=full")
        == 3
    )
    said = capsys.readouterr().out
    assert "none fits" in said and "choose more chips a slice than 4" in said
    assert run(monkeypatch, "llama2-70b") == 2
    assert "name one target" in capsys.readouterr().err


def test_the_commands_can_be_given_to_a_shell(monkeypatch, capsys):
    best = SimpleNamespace(settings={"mesh.fsdp": 4})
    monkeypatch.setattr(
        plan, "search", lambda *args: SimpleNamespace(best=best, to_json=lambda: {})
    )
    words = ["laptop", "model.remat=names", "model.remat_save=[qkv, attention]"]
    target = ["target=v5e:2x2", "slices=2"]
    assert run(monkeypatch, *words, *target, "--json") == 0
    found = map(shlex.split, json.loads(capsys.readouterr().out)["commands"])
    words.append("mesh.fsdp=4")
    assert [*found] == [["minitext", "compile", *words, *target], ["minitext", "train", *words]]


@needs_libtpu
@pytest.mark.audit
def test_the_best_are_compiled_and_ranked(monkeypatch, capsys):
    settings = [
        *TINY,
        "train.global_batch=16",
        "mesh.tensor=1",
        "model.remat=none",
        "train.microbatches=1",
    ]
    assert run(monkeypatch, "laptop", *settings, "target=v5e:2x2", "--compile", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["ranked"]
    assert first["seconds"]["best"] <= second["seconds"]["best"]
    for candidate in found["ranked"]:
        report = candidate["report"]
        assert report["fits"] and report["total_bytes"] <= report["available_bytes"]
        # Of so small a step the prediction counts what the vector memory holds, too.
        assert report["argument_bytes"] <= candidate["memory"] <= 3 * report["total_bytes"]
        assert candidate["times"]["ici"] > 0 and candidate["times"]["dcn"] == 0
        # The time is that of the compiled schedule.
        assert candidate["seconds"]["best"] == candidate["step"]["seconds"] > 0
        assert (
            candidate["seconds"]["lower"]
            <= candidate["seconds"]["best"]
            <= candidate["seconds"]["upper"]
        )
        assert candidate["limit"] in ("compute", "HBM bandwidth", "ICI")
    compile_, train = found["commands"]
    assert (
        compile_.startswith("minitext compile laptop model.layers=2")
        and "target=v5e:2x2" in compile_
    )
    assert f"mesh.fsdp={first['settings']['mesh.fsdp']}" in train and "target" not in train
    assert train.count("train.global_batch=") == 1
    # The command does what it says.
    cfg = load_config("laptop", shlex.split(train)[3:])
    assert compile_preset(cfg, "v5e:2x2").total_bytes == first["report"]["total_bytes"]


@needs_libtpu
@pytest.mark.audit
def test_a_mesh_with_experts_is_compiled(monkeypatch, capsys):
    settings = [
        *MOE,
        "model.ffn.experts=8",
        "train.global_batch=16",
        "train.microbatches=1",
        "mesh.expert=2",
    ]
    assert run(monkeypatch, "laptop", *settings, "target=v5e:2x2", "--compile", "1", "--json") == 0
    (first,) = json.loads(capsys.readouterr().out)["ranked"]
    assert first["settings"]["mesh.expert"] == 2 and first["report"]["fits"]
    assert "ragged-all-to-all" in first["report"]["collectives"]
    assert first["seconds"]["best"] == first["step"]["seconds"] > 0
