"""The table of chips, and the measured matmul peak."""

import json
import subprocess
import sys

import pytest

from minitext import hardware
from minitext.errors import UserError
from minitext.hardware import CHIPS

TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]

# JAX's own table, where it does not agree with Google's documents.
JAX_DIFFERS = {("v5p", "hbm_bandwidth")}


def jax_version(name):
    from jax._src.pallas.mosaic import tpu_info

    version = tpu_info.chip_version_from_device_kind(CHIPS[name].device_kinds[0])
    assert version is not None
    return version


def jax_info(name):
    """JAX's figures for one TensorCore of a chip."""
    from jax._src.pallas.mosaic import tpu_info

    version = jax_version(name)
    cores = version.num_physical_tensor_cores_per_chip
    return tpu_info._get_tpu_info_impl(version, cores), cores


@pytest.mark.parametrize("name", TPUS)
def test_clocks_are_those_of_the_peak(name):
    """Every core's matrix units do a multiply-add in each cycle, and programs never reach more than a link's peak."""
    chip = CHIPS[name]
    assert jax_info(name)[1] == chip.cores
    assert 1 + jax_version(name).supports_megacore == chip.device_cores
    side = 256 if name in ("v6e", "tpu7x") else 128
    assert chip.cores * chip.clock * 2 * 4 * side**2 == pytest.approx(chip.peak(), rel=0.01)
    assert chip.dcn_bandwidth < chip.host_bandwidth < chip.link_rate < chip.link_bandwidth


@pytest.mark.parametrize("name", TPUS)
def test_agrees_with_jax(name):
    info, cores = jax_info(name)
    chip = CHIPS[name]
    assert chip.vmem_bytes == info.vmem_capacity_bytes
    theirs = {
        "bf16": info.bf16_ops_per_second * cores,
        "f8": info.fp8_ops_per_second * cores,
        "int8": info.int8_ops_per_second * cores,
        "hbm_bytes": info.hbm_capacity_bytes * cores,
        "hbm_bandwidth": info.mem_bw_bytes_per_second * cores,
    }
    ours = {**chip.flops, "hbm_bytes": chip.hbm_bytes, "hbm_bandwidth": chip.hbm_bandwidth}
    for field, value in theirs.items():
        if value and (name, field) not in JAX_DIFFERS:
            assert ours[field] == pytest.approx(value, rel=0.03), field


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_rows_are_plausible(chip):
    assert CHIPS[chip.name] is chip and hash(chip) is not None
    assert chip.source and chip.device_kinds
    assert all(
        chip.flops[narrow] >= chip.flops["bf16"] for narrow in chip.flops.keys() & {"f8", "int8"}
    )
    # Ridge points of training chips lie between 100 and 700 FLOP per byte.
    assert 100 < chip.flops["bf16"] / chip.hbm_bandwidth < 700
    assert 0.9 < chip.usable_bytes * chip.devices / chip.hbm_bytes <= 1
    # A link carries less than memory does.
    assert chip.link_bandwidth * chip.links < chip.hbm_bandwidth
    with pytest.raises(TypeError):
        chip.flops["bf16"] = 1.0


def test_peak_understands_jax_names():
    assert CHIPS["v5e"].peak("bfloat16") == CHIPS["v5e"].peak() == 197e12
    assert CHIPS["v5e"].peak("float32") == 197e12
    assert CHIPS["h100"].peak("float32") == CHIPS["h100"].flops["tf32"]
    assert CHIPS["h100"].peak("float8_e4m3fn") == CHIPS["h100"].flops["f8"]
    with pytest.raises(UserError, match="v5p has no f8 matmul: choose among bf16, int8"):
        CHIPS["v5p"].peak("f8")


def test_import_leaves_jax_alone():
    code = "import sys, minitext.hardware; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path))
    return tmp_path / "matmul_peak.json"


def test_measures_this_machine(cache):
    rate = hardware.measure_matmul_peak()
    assert 1e9 < rate < 1e17
    ((kept, _),) = json.loads(cache.read_text()).values()
    assert kept == rate


@pytest.fixture
def measurements(monkeypatch):
    """Counts measurements; each gives a rate of its own."""
    made = []

    def measure(dtype, *, big):
        made.append(str(dtype))
        return 1e9 * len(made)

    monkeypatch.setattr(hardware, "_best_matmul_rate", measure)
    return made


def test_measures_once_per_type(cache, measurements):
    assert [hardware.measure_matmul_peak() for _ in range(3)] == [1e9] * 3
    assert hardware.measure_matmul_peak("bfloat16") == 2e9
    assert hardware.measure_matmul_peak(refresh=True) == 3e9
    assert hardware.measure_matmul_peak() == 3e9
    assert measurements == ["float32", "bfloat16", "float32"]


def test_measures_again_after_a_day_and_the_better_counts(cache, measurements, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert hardware.measure_matmul_peak() == 1e9
    monkeypatch.setattr("time.time", lambda: 1e9 + hardware.DAY + 1)
    assert hardware.measure_matmul_peak() == hardware.measure_matmul_peak() == 2e9
    monkeypatch.setattr(hardware, "_best_matmul_rate", lambda dtype, *, big: 1.0)
    assert hardware.measure_matmul_peak(refresh=True) == 2e9


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"a": "b"}', '{"a": 1.0}', "null", "\0"])
def test_damaged_cache_is_measured_anew(cache, measurements, damage):
    cache.write_text(damage)
    assert hardware.measure_matmul_peak() == 1e9
    assert hardware.measure_matmul_peak() == 1e9
    assert len(measurements) == 1


def test_cache_that_cannot_be_written(tmp_path, monkeypatch, measurements):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MINITEXT_CACHE", str(tmp_path / "file" / "below"))
    assert hardware.measure_matmul_peak() == 1e9
    assert hardware.measure_matmul_peak() == 2e9


@pytest.mark.parametrize("dtype", ["int8", "float31", "", "nonsense"])
def test_types_that_are_no_floats(cache, dtype):
    with pytest.raises(UserError, match="not a floating-point type"):
        hardware.measure_matmul_peak(dtype)
