"""Predictions: the longer of arithmetic and memory, shared by devices; here and on chips that are not."""

import json
from dataclasses import replace
from itertools import pairwise

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from minitext import hardware
from minitext.cli.main import app
from minitext.config.config import load_config
from minitext.errors import UserError
from minitext.perf import figures, roofline
from minitext.perf.cost import PARTS, Operation
from tests.conftest import audit_but

MACHINE = roofline.Machine("slow", {"float32": 1e9, "bfloat16": 2e9}, 1e8)
PRODUCT = Operation("dot_general", "f32[8,8]", "jvp()", "float32", 1e6, 1e4)


def test_an_operation_takes_the_longer_of_arithmetic_and_memory():
    assert MACHINE.ridge("float32") == 10
    assert MACHINE.seconds(PRODUCT) == 1e-3 and MACHINE.limit(PRODUCT) == "compute"
    assert MACHINE.seconds(replace(PRODUCT, dtype="bfloat16")) == 5e-4
    loaded = replace(PRODUCT, bytes=1e6)
    assert MACHINE.seconds(loaded) == 1e-2 and MACHINE.limit(loaded) == "memory"
    # Elementwise work isn't the matrix unit's: only its bytes count.
    assert MACHINE.seconds(replace(PRODUCT, name="exp")) == 1e-4
    assert MACHINE.peak("float16") == MACHINE.peak("float32")


@given(
    flops=st.floats(0, 1e15), size=st.floats(0, 1e12), runs=st.integers(1, 100),
    devices=st.integers(1, 512),
)  # fmt: skip
def test_devices_share_the_work(flops, size, runs, devices):
    op = replace(PRODUCT, flops=flops, bytes=size, runs=runs)
    alone, shared = (roofline.predict([op] * 3, MACHINE, n) for n in (1, devices))
    assert shared.seconds == pytest.approx(alone.seconds / devices)
    assert alone.seconds == pytest.approx(alone.parts["forward"])
    assert alone.seconds == pytest.approx(sum(row["seconds"] for row in alone.rows))
    assert [row["runs"] for row in alone.rows] == [3 * runs]


FEW = ("v4", "tpu7x", "a100-80", "b200")


@pytest.mark.parametrize("chips", audit_but([FEW], [FEW, tuple(hardware.CHIPS)]))
def test_every_chip_predicts_a_step_and_a_faster_one_is_faster(chips):
    cfg = load_config("laptop", ["model.dtype=bfloat16", "model.layers=1"])
    seconds = {name: roofline.predict_step(cfg, name).seconds for name in chips}
    assert min(seconds.values()) > 0
    for order in (("v4", "v5p", "tpu7x"), ("a100-80", "h100", "b200")):
        found = [seconds[name] for name in order if name in seconds]
        assert all(slow > fast for slow, fast in pairwise(found))


def test_a_type_that_a_chip_does_not_take_has_the_peak_of_bfloat16():
    for name, dtype in ("a100-80", "float8_e4m3fn"), ("v5e", "float8_e5m2"), ("tpu7x", "int8"):
        machine = roofline.chip_machine(hardware.CHIPS[name])
        assert machine.peak(dtype) == machine.peak("bfloat16")
    h100 = roofline.chip_machine(hardware.CHIPS["h100"])
    assert h100.peak("float8_e5m2") > h100.peak("bfloat16") > h100.peak("float32")


def test_a_model_of_any_size_is_predicted_without_memory_or_compiler():
    prediction = roofline.predict_step(load_config("llama2-70b", ["mesh.fsdp=64"]), "v5p")
    assert prediction.devices == 64 and tuple(prediction.parts) == PARTS
    peak_seconds = prediction.product_flops / 64 / hardware.CHIPS["v5p"].peak("bf16")
    assert peak_seconds < prediction.seconds < 3 * peak_seconds


@pytest.mark.audit
def test_quantized_products_take_the_chips_narrow_peak():
    sizes = ["mesh.fsdp=64", "model.layers=2"]
    seconds = {}
    for chip, dtype in (("v5p", "none"), ("v5p", "int8"), ("v5p", "fp8"), ("v6e", "int8")):
        rule = f"model.quantization=[{{module: blocks/.*, dtype: {dtype}}}]"
        prediction = roofline.predict_step(load_config("llama2-70b", [*sizes, rule]), chip)
        rows = [row for row in prediction.rows if row["operation"] == "dot_general"]
        seconds[chip, dtype] = prediction.seconds
        narrow = [row for row in rows if row["dtype"] in ("int8", "float8_e4m3fn")]
        assert bool(narrow) == (dtype != "none")
        name = "f8" if dtype == "fp8" and "f8" in hardware.CHIPS[chip].flops else dtype
        peak = hardware.CHIPS[chip].flops.get(name, hardware.CHIPS[chip].peak("bf16"))
        for row in narrow:
            if row["limit"] == "compute":
                assert row["seconds"] == pytest.approx(row["runs"] * row["flops"] / 64 / peak)
    # A v5p has no fp8 products: they cost as much as bf16's, and the rounding comes on top.
    assert seconds["v5p", "int8"] < seconds["v5p", "none"] < seconds["v5p", "fp8"]
    assert seconds["v6e", "int8"] < seconds["v5p", "int8"]


def test_the_kernels_counted_are_those_of_the_chip():
    cfg = load_config("laptop", ["model.layers=1"])
    here, there = (roofline.predict_step(cfg, chip).product_flops for chip in (None, "v5e"))
    assert (
        there > here
    )  # a CPU computes attention in blocks, and skips those that the mask excludes


@pytest.mark.parametrize("chip", [None, "v5p", "h100"])
def test_the_products_of_experts_are_counted_on_every_platform(chip):
    cfg = load_config("moe-laptop", ["model.layers=1", "data.seq_len=128"])
    m, ops = cfg.model, roofline.count_step(cfg, chip)
    counted = sum(op.runs * op.flops for op in ops if op.is_product and "moe" in op.where)
    tokens = cfg.train.global_batch * cfg.data.seq_len
    experts = 3 * m.embed * m.mlp * m.ffn.experts_per_token + m.embed * m.ffn.experts
    assert counted == pytest.approx(3 * 2 * tokens * experts, rel=0.02)


def test_an_unknown_chip_is_one_line():
    with pytest.raises(UserError, match="there is no chip 'v9': choose chip=v4, "):
        roofline.predict_step(load_config("laptop"), "v9")


def test_the_command_prints_a_table_or_json():
    run = CliRunner().invoke
    text = run(app, ["roofline", "laptop", "chip=v5p", "model.layers=1", "--rows", "99"]).stdout
    assert "v5p: 459 TFLOP/s in float32" in text and "dot_general" in text and "a step: " in text
    answer = json.loads(
        run(
            app, ["roofline", "laptop", "chip=h100", "mesh.data=8", "model.layers=1", "--json"]
        ).stdout
    )
    assert answer["devices"] == 8 and sum(answer["parts"].values()) == answer["seconds"]
    assert set(answer["rows"][0]) >= {"part", "operation", "flops", "bytes", "intensity", "limit"}
    assert isinstance(run(app, ["roofline", "chip=v9"]).exception, UserError)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operations_are_drawn_under_the_roof(dtype, tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    prediction = roofline.predict_step(
        load_config("laptop", [f"model.dtype={dtype}", "model.layers=1"]), "v5p"
    )
    axes = figures.draw_roofline(prediction, dtype).axes[0]
    roof = axes.lines[0]
    assert max(roof.get_ydata()) == prediction.machine.peak(dtype) / 1e9
    discs = [c for c in axes.collections if len(c.get_offsets())]
    drawn = [row for row in prediction.rows if row["flops"] and row["seconds"]]
    assert len(discs) == len(drawn)
    for disc in discs:
        x, y = disc.get_offsets()[0]
        limit = min(prediction.machine.peak("bfloat16"), x * prediction.machine.bandwidth) / 1e9
        assert y <= limit * 1.001
    plt.close("all")


def test_the_command_draws(tmp_path):
    run = CliRunner().invoke
    words = ["roofline", "chip=v5e", "model.layers=1"]
    run(app, [*words, "--rows", "0", "--plot", str(tmp_path / "a.svg")])
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    for file in (tmp_path / "a.docx", tmp_path / "no" / "a.png"):
        error = run(app, [*words, "--plot", str(file)]).exception
        assert isinstance(error, UserError) and str(file) in str(error)


def test_this_machine_is_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path))
    monkeypatch.setattr(hardware, "_best_matmul_rate", lambda *_, **__: 3e11)
    machine = roofline.this_machine("bfloat16")
    monkeypatch.setattr(hardware, "_best_copy_rate", None)
    assert roofline.this_machine("bfloat16") == machine
    assert set(machine.peaks) == {"float32", "bfloat16"} and machine.bandwidth > 1e8


def test_the_bandwidth_is_one_that_moving_bytes_reaches():
    assert jax.devices()[0].platform == "cpu"
    assert 1e8 < hardware.measure_bandwidth() < 5e12
