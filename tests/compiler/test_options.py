"""Options reach the compiler of the step that they are for, and a refused one is named."""

import json

import jax
import pytest

from minitext.cli import main
from minitext.compiler import options
from minitext.compiler.targets import topology_mesh
from minitext.config.config import load_config, presets
from minitext.config.sections import XLAConfig
from minitext.errors import UserError
from minitext.sharding.mesh import make_mesh
from minitext.training.compile import compile_preset, describe
from tests.compiler.test_aot import needs_libtpu

VMEM = "xla_tpu_scoped_vmem_limit_kib"


def names(found):
    return [(option.name, option.value, option.source) for option in found]


def test_a_gpu_that_is_here_adds_in_a_fixed_order(one_device, monkeypatch):
    class Device:
        platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"

    mesh, fixed = jax.sharding.Mesh([Device()], "x"), "xla_gpu_exclude_nondeterministic_ops"
    assert options.compiler_options(XLAConfig(), mesh) is None  # a compiler knows it: it isn't here
    monkeypatch.setattr(jax, "devices", lambda: [*mesh.devices])
    assert names(options.chosen(XLAConfig(), mesh)) == [(fixed, "true", "always")]
    free = XLAConfig(options=(f"{fixed}=false",))
    assert names(options.chosen(free, mesh)) == [(fixed, "false", "xla.options")]
    monkeypatch.undo()
    for mesh in (one_device, one_device.abstract_mesh):
        assert options.compiler_options(XLAConfig(), mesh) is None


def test_options_reach_only_the_platform_that_they_name(one_device):
    cfg = XLAConfig(
        options=(
            f"--{VMEM}=1024",
            "xla_gpu_autotune_level=0",
            "xla_llvm_disable_expensive_passes=true",
        )
    )
    assert options.compiler_options(cfg, one_device) == {"xla_llvm_disable_expensive_passes": True}


@needs_libtpu
def test_later_sources_win():
    mesh = topology_mesh("v6e:1x1")
    both = XLAConfig(recommended=True, options=(f"{VMEM}=1024",))
    found = {option.name: option for option in options.chosen(both, mesh)}
    assert found[VMEM][1:] == ("1024", "xla.options")
    assert {o.source for o in found.values()} == {"recommended", "xla.options"}
    assert set(found) == set(options.RECOMMENDED["v6e"]) <= set(options.KNOWN)
    assert options.compiler_options(XLAConfig(recommended=True), topology_mesh("v5e:1x1")) is None


@needs_libtpu
@pytest.mark.parametrize("chip", options.RECOMMENDED)
def test_the_compiler_takes_what_is_recommended(chip):
    mesh = topology_mesh(f"{chip}:{'1x1' if chip == 'v6e' else '1x1x1'}")
    found = options.chosen(XLAConfig(recommended=True), mesh)
    assert len(found) == len(options.RECOMMENDED[chip]) and not list(options.refused(found, mesh))


@needs_libtpu
@pytest.mark.audit
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chip", options.RECOMMENDED)
@pytest.mark.parametrize("preset", [name for name in presets() if "laptop" not in name])
def test_every_preset_compiles_with_what_is_recommended(preset, chip):
    """On 256 chips, whether or not they have the memory for it: no option is refused, and no kernel by its options."""
    target = f"{chip}:{'16x16' if chip == 'v6e' else '8x8x4'}"
    cfg = load_config(preset, ["mesh.fsdp=256", "train.global_batch=256"])
    assert cfg.xla.recommended
    assert compile_preset(cfg, target).devices == 256


@needs_libtpu
@pytest.mark.audit
def test_the_compiler_takes_all_that_recipes_set():
    mesh = topology_mesh("v6e:1x1")
    known = [name for name in options.KNOWN if options.platform_of(name) != "gpu"]
    numbers = ("kib", "limit", "recv", "rerun", "reduce_scatter")
    found = [options.Option(n, "1" if n.endswith(numbers) else "true", "") for n in known]
    refused = {o.name: why for o, why in options.refused(found, mesh) if "no option" in why}
    assert not refused


@needs_libtpu
def test_a_refused_option_is_one_line(tiny, capsys, monkeypatch):
    with pytest.raises(
        UserError, match=f"no option xla_tpu_scoped_vmem_limit_kb .did you mean {VMEM}"
    ):
        compile_preset(
            tiny("xla.options=[xla_tpu_scoped_vmem_limit_kb=1]", "model.layers=1"), "v6e:1x1"
        )
    with pytest.raises(UserError, match=f"{VMEM}: .*another value"):
        compile_preset(tiny(f"xla.options=[{VMEM}=many]", "model.layers=1"), "v6e:1x1")
    for more, said in (
        (["xla.options=[xla_tpu_none=1]"], "no option xla_tpu_none"),
        (["--save=x"], "leave out --save"),
    ):
        monkeypatch.setattr(
            "sys.argv", ["minitext", "compile", "laptop", "target=v6e:2x2", "--options", *more]
        )
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("xla_cpu_none=1", "the compiler has no option xla_cpu_none"),
        ("xla_cpu_enable_fast_math=maybe", "xla_cpu_enable_fast_math: .*give another value"),
    ],
)
def test_training_names_an_option_that_is_refused(option, said, tiny, tmp_path):
    from minitext.training import run

    cfg = tiny(f"xla.options=[{option}]", "model.layers=1", f"run.dir={tmp_path}", "train.steps=1")
    with pytest.raises(UserError, match=said):
        run.train(cfg)


@pytest.mark.parametrize("word", ["true", "false", "True"])
def test_a_compiler_that_wants_booleans_takes_words(word, tiny):
    """TPUs' compilers take true and false as words, and those for CPUs and GPUs don't."""
    cfg, mesh = tiny(f"xla.options=[xla_cpu_enable_fast_math={word}]"), make_mesh()
    given = options.compiler_options(cfg.xla, mesh)
    assert jax.jit(lambda x: x + 1, compiler_options=given)(1) == 2
    assert not list(options.refused(options.chosen(cfg.xla, mesh), mesh))


def test_a_failure_at_cudnns_attention_is_one_line():
    with pytest.raises(UserError, match=r"model\.scan_layers=true"), options.refusals_named():
        raise IndexError("absl::container_internal::raw_hash_map<>::at")
    with pytest.raises(IndexError, match="else"), options.refusals_named():
        raise IndexError("something else")


@pytest.mark.gpu_aot
def test_the_compiler_for_gpus_takes_what_is_always_on(monkeypatch):
    mesh = topology_mesh("h100:1x1x1")
    monkeypatch.setattr(jax, "devices", lambda: list(mesh.devices.flat))
    found = options.chosen(XLAConfig(options=("xla_gpu_triton_gemm_any=true",)), mesh)
    assert {"always", "xla.options"} == {option.source for option in found}
    assert not list(options.refused(found, mesh))


@needs_libtpu
def test_the_command_lists_what_is_on_and_what_could_be(capsys, monkeypatch):
    words = ["laptop", "target=v6e:2x2", "--options", "--json"]
    monkeypatch.setattr("sys.argv", ["minitext", "compile", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code in (0, None)
    assert {one["name"] for one in found["on"]} == set(options.RECOMMENDED["v6e"])
    assert (
        found["recommended"][VMEM] == "98304"
        and "xla_gpu_triton_gemm_any" not in found["recommended"]
    )


@pytest.mark.parametrize(
    "text", ["rm -rf", "xla_tpu=", "=3", "xla_tpu_x=1;2", "tpu_x=1", "xla_" + "a" * 200 + "=1"]
)
def test_what_is_no_option_is_refused(text, tiny):
    with pytest.raises(UserError, match=r"xla\.options has"):
        tiny(f"xla.options=['{text}']")


@needs_libtpu
def test_a_saved_step_says_what_it_was_compiled_with(tiny):
    mesh = topology_mesh("v5e:1x1")
    plain, changed = (
        describe(tiny(*words), mesh) for words in ((), (f"xla.options=[{VMEM}=1024]",))
    )
    assert plain["config"] != changed["config"]
    assert changed["settings"]["xla.options"] == [f"{VMEM}=1024"]
