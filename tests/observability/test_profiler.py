"""Profiles: a traced run of minitext itself, and traces of TPUs and GPUs in their documented layout."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData

from minitext.compiler.buffers import op_names
from minitext.distributed import devices
from minitext.errors import UserError
from minitext.observability import profiler, xplane
from minitext.observability.device_time import (
    Ops,
    account,
    find_devices,
    is_collective,
    length,
    union,
)
from minitext.observability.gpu_launches import assign_kernels
from minitext.observability.profile_report import SCOPES, find_scope, print_profile, summarise
from minitext.sharding.mesh import make_mesh
from minitext.training.step import abstract_batch, abstract_state, make_train_step
from tests.conftest import QUICK_FLAGS, TINY

WINDOW = ["train.steps=6", "profile.first_step=3", "profile.steps=3"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The directory of a run on two simulated devices that traced three of its six steps."""
    folder = tmp_path_factory.mktemp("traced")
    # In a separate process: other tests compile for TPUs, after which the profiler would crash.
    command = [
        sys.executable, "-m", "minitext", "train", *TINY, *WINDOW, f"run.dir={folder}", "run.name=a", "mesh.fsdp=2",
        "mesh.data=1", "train.eval_batches=1", "profile.dump_hlo=true", "model.layers=1",
    ]  # fmt: skip
    subprocess.run(
        command, check=True, capture_output=True, env=os.environ | {"XLA_FLAGS": QUICK_FLAGS}
    )
    return folder / "a"


# --- a run's own trace


def test_the_window_is_what_was_asked_for(traced):
    found = summarise(traced)
    assert found.program == "jit_train_step" and found.steps == 3
    planes = xplane.read(xplane.find(traced))
    host = [e for plane in planes for line in plane.lines for e in line.events]
    assert sorted(e.stats["step_num"] for e in host if e.name == "train") == [3, 4, 5]


def test_times_add_up_on_each_device(traced):
    found = summarise(traced)
    assert [d.name for d in found.devices] == ["CPU:0", "CPU:1"]
    for d in found.devices:
        assert np.isclose(d.busy + d.idle, found.seconds) and 0 <= d.idle_share < 1
        assert d.compute > 0 and d.exposed + d.hidden > 0  # fsdp gathers
        assert d.compute + d.exposed <= d.busy * (1 + 1e-9)
    total = sum(o.seconds for o in found.operations)
    assert np.isclose(sum(o.share for o in found.operations), 1)
    assert np.isclose(sum(found.scopes.values()), total)
    assert found.data_wait is not None and found.data_wait < found.seconds


def test_every_part_of_the_model_is_in_the_trace(traced):
    assert set(SCOPES) - {"moe"} <= set(summarise(traced).scopes)


def test_programs_are_those_that_the_compiler_dumped(traced):
    """What the trace stores against the text of the same program."""
    (text,) = (traced / "hlo").glob("*jit_train_step*cpu_after_optimizations.txt")
    dumped = op_names(text.read_text())
    (program,) = (p for p in xplane.programs(xplane.find(traced)) if p.name == "jit_train_step")
    assert dumped and {op: program.op_names[op] for op in dumped} == dumped
    assert {"all-gather", "fusion"} <= set(program.opcodes.values())
    assert program.bytes > 0
    assert summarise(traced).memory["program"] == program.bytes


def test_it_is_printed_as_json_and_as_tables(traced, capsys):
    found = summarise(traced)
    json.dumps(found.to_json())
    print_profile(found, rows=3)
    out = capsys.readouterr().out
    assert "CPU:1" in out and "attention" in out and found.operations[0].name in out


def test_the_ledger_has_the_time_of_the_trace(traced):
    from minitext.observability.goodput import measure

    assert measure(traced).seconds["profile"] > 0


# --- traces of chips, by the names that their planes and lines have in XProf


def xspace(path, *planes):
    """Writes an XSpace: planes of (name, {line: [(event, start, end, stats)]}), times in microseconds."""
    text = ""
    for name, lines in planes:
        events = sorted({e[0] for line in lines.values() for e in line})
        stats = sorted({s for line in lines.values() for e in line for s in e[3]})
        text += f'planes {{ name: "{name}"\n'
        for number, (line, its) in enumerate(lines.items()):
            text += f'lines {{ id: {number} name: "{line}"\n'
            for event, start, end, values in its:
                text += (
                    f"events {{ metadata_id: {1 + events.index(event)} offset_ps: {start}000000 "
                )
                text += f"duration_ps: {end - start}000000 "
                for key, value in values.items():
                    kind = "int64_value" if isinstance(value, int) else "str_value"
                    text += f"stats {{ metadata_id: {1 + stats.index(key)} {kind}: {json.dumps(value)} }} "
                text += "}\n"
            text += "}\n"
        for table, entries in (("event_metadata", events), ("stat_metadata", stats)):
            for i, entry in enumerate(entries, 1):
                text += f'{table} {{ key: {i} value {{ id: {i} name: "{entry}" }} }}\n'
        text += "}\n"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


def ops(*events):
    return [(*event, {}) for event in events]


def test_a_tpus_lines(tmp_path):
    """Two steps: a loop holds a fusion; one all-gather is hidden but for its wait, an all-reduce is exposed."""
    one = ops(
        ("%while.1 = (f32[]) while(%t)", 0, 50),
        ("%fusion.2 = f32[8] fusion(%p)", 10, 40),
        ("%all-gather-start.3 = (f32[8]) all-gather-start(%p)", 50, 52),
        ("%convolution.4 = f32[8] convolution(%p)", 52, 80),
        ("%all-gather-done.3 = f32[8] all-gather-done(%s)", 80, 85),
        ("%all-reduce.5 = f32[8] all-reduce(%p)", 85, 95),
    )
    later = [(name, start + 100, end + 100, stats) for name, start, end, stats in one]
    modules = ops(("jit_train_step(77)", 0, 95), ("jit_train_step(77)", 100, 195))
    path = xspace(
        tmp_path / "a.xplane.pb",
        ("/device:TPU:0", {"XLA Modules": modules, "XLA Ops": one + later, "Steps": ops(("1", 0, 95))}),
        ("/host:CPU", {"python": ops(("data_wait", 90, 99), ("other", 0, 99))}),
    )  # fmt: skip
    found = summarise(path)
    assert (found.program, found.steps) == ("jit_train_step", 2)
    assert np.isclose(found.step_seconds, 100e-6) and np.isclose(found.seconds, 195e-6)
    times = {o.name: round(o.seconds * 1e6) for o in found.operations}
    assert times["while.1"] == 2 * 20 and times["fusion.2"] == 2 * 30
    (d,) = found.devices
    assert d.name == "TPU:0" and np.isclose(d.idle, 5e-6)
    assert np.isclose(d.compute, 2 * (30 + 28) * 1e-6)
    assert np.isclose(d.hidden, 2 * 28e-6) and np.isclose(d.exposed, 2 * (2 + 5 + 10) * 1e-6)
    assert np.isclose(found.data_wait, 9e-6)


def test_what_runs_beside_a_tpus_operations(tmp_path):
    lines = {
        "XLA Ops": ops(("fusion.1", 0, 60)),
        "Async XLA Ops": ops(("all-gather-start.2", 20, 70), ("copy-start.3", 0, 90)),
    }
    (d,) = summarise(xspace(tmp_path / "a.xplane.pb", ("/device:TPU:0", lines))).devices
    assert np.isclose(d.hidden, 40e-6) and np.isclose(d.exposed, 0)  # the program ends at 60


def test_a_gpus_streams(tmp_path):
    def kernel(name, start, end, op):
        return (
            name,
            start,
            end,
            {"hlo_op": op, "hlo_module": "jit_train_step", "correlation_id": start},
        )

    lines = {
        "Stream #13(Compute)": [kernel("gemm", 0, 30, "dot.1"), kernel("loop", 50, 60, "fusion.2")],
        "Stream #14(Collective)": [kernel("ncclDevKernel_AllGather", 20, 50, "all-gather-start.3")],
    }
    found = summarise(xspace(tmp_path / "a.xplane.pb", ("/device:GPU:0", lines)))
    (d,) = found.devices
    assert np.isclose(d.hidden, 10e-6) and np.isclose(d.exposed, 20e-6) and np.isclose(d.idle, 0)
    assert found.steps == 1  # the host's part isn't in this trace
    assert {o.name for o in found.operations} == {"dot.1", "fusion.2", "all-gather-start.3"}


def test_a_gpus_steps_are_told_by_the_calls_that_launched_them(tmp_path):
    """Without a gap between two steps, and with the rest of one that began before the trace did."""

    def kernel(start, end, call):
        return "loop", start, end, {"hlo_module": "jit_train_step", "correlation_id": call}

    kernels = [kernel(*k) for k in ((9, 10, 2), (10, 20, 3), (20, 40, 4), (40, 50, 5), (50, 70, 6))]
    run = "[0] GpuExecutable::ExecuteThunks"
    calls = [
        (run, 0, 9, {}),
        *(("cuLaunchKernel", at, at + 1, {"correlation_id": at}) for at in (3, 4)),
    ]
    more = [
        (run, 10, 14, {}),
        *(("cuLaunchKernel", at + 6, at + 7, {"correlation_id": at}) for at in (5, 6)),
    ]
    planes = (
        ("/device:GPU:0", {"Stream #14(Compute)": kernels}),
        ("/host:CPU", {"main": calls + more}),
    )
    found = summarise(xspace(tmp_path / "a.xplane.pb", *planes))
    assert found.steps == 2
    assert np.isclose(found.step_seconds, 30e-6) and np.isclose(found.seconds, 60e-6)


def test_an_h100s_kernels_find_their_operations():
    """Three steps of a model with 1B parameters, cut down to what they launch up to the end of the second layer.

    The steps were dispatched one after another, without waiting, in three command buffers of equal content.
    """
    found = summarise(Path(__file__).with_name("h100.xplane.pb"))
    assert found.steps == 3 and 0.45 < found.step_seconds < 0.46
    runs = {(o.name.partition("_sm90")[0], o.scope): 0 for o in found.operations}
    for o in found.operations:
        runs[o.name.partition("_sm90")[0], o.scope] += o.count
    steps_and_layers = 3 * 2
    assert runs["nvjet", "attention"] == steps_and_layers * len("qkvo")
    assert runs["nvjet", "ffn"] == steps_and_layers * len(("gate", "up", "down"))
    assert runs["flash_attention_forward", "attention"] == steps_and_layers
    assert {part for name, part in runs if name in ("nvjet", "flash_attention_forward")} == {
        "attention",
        "ffn",
    }
    products = {o.source.rpartition("/")[2] for o in found.operations if o.name.startswith("nvjet")}
    assert products == {"dot_general"}


SCHEDULE = [
    xplane.Launch(*launch)
    for launch in (("loop_add.4", "loop_add.4"), ("call.1", ""), ("call.2", ""), ("pallas.1", "flash"),
                   ("call.3", ""), ("loop_add.5", "loop_add.5"))
]  # fmt: skip
BUFFER = ["loop_add_4", "nvjet_a", "Memset 3", "nvjet_b", "flash__1", "nvjet_a", "loop_add_4"]
OPS = ["loop_add.4", "call.1", "", "call.2", "pallas.1", "call.3", "loop_add.5"]


def assigned(names, *schedules):
    stats = {"hlo_op": "command_buffer_1", "correlation_id": 7}
    line = [xplane.Event(name, i, i + 1.0, stats) for i, name in enumerate(names)]
    device, _ = assign_kernels(Ops("GPU:0", [line], [], []), list(schedules))
    return [e.op if e.stats != stats else "" for e in device.lines[0]]


def test_kernels_of_a_command_buffer_are_assigned_in_the_schedules_order():
    assert assigned(BUFFER, SCHEDULE) == OPS
    assert assigned(BUFFER, SCHEDULE, SCHEDULE[:5]) == OPS  # the other computation is too short
    later = [xplane.Launch("call.0", ""), xplane.Launch("sort.1", "sort.1")]
    assert assigned(BUFFER, later + SCHEDULE + later[::-1]) == OPS
    assert assigned(["nvjet_a", *BUFFER[4:]], SCHEDULE) == ["", *OPS[4:]]  # one of two calls


def test_kernels_are_left_alone_where_counts_or_order_differ_from_the_schedule():
    split = [*BUFFER[:4], "splitKreduce", *BUFFER[4:]]
    assert assigned(split, SCHEDULE) == ["loop_add.4", "", "", "", "", *OPS[4:]]
    assert not any(assigned(["nvjet_a"], SCHEDULE))  # nothing to hold on to
    assert not any(assigned(["loop_add_4", "nvjet_a"], SCHEDULE))  # fits twice
    assert not any(assigned(["flash", *BUFFER], SCHEDULE))  # fits nowhere
    assert not any(assigned(BUFFER, SCHEDULE, SCHEDULE))


def test_a_command_buffers_kernels_have_names_of_their_own(tmp_path, monkeypatch):
    """As on an H100, whose traces name the buffer where others name the operation. Here their order tells nothing."""
    stats = {"hlo_op": "command_buffer_1", "hlo_module": "jit_train_step"}
    names = "loop_add_fusion_4", "nvjet_sm90", "scan", "flash"
    kernels = [(name, 30 * i, 30 * i + 30, stats) for i, name in enumerate(names)]
    sources = {"loop_add_fusion.4": "jit(train_step)/jvp(attention)/add", "call.1": "ffn/a"}
    sources |= {f"pallas.{i}": "jit(train_step)/jvp(attention)/pallas_call" for i in (1, 2)}
    sources |= {"pallas.3": "ffn/pallas_call", "pallas.4": "loss/pallas_call"}
    launched = [
        ("pallas.1", "flash"),
        ("pallas.2", "flash"),
        ("pallas.3", "scan"),
        ("pallas.4", "scan"),
    ]
    schedule = [xplane.Launch(*launch) for launch in launched]
    program = xplane.Program("jit_train_step", sources, {}, 0, [schedule])
    monkeypatch.setattr(xplane, "programs", lambda path: [program])
    lines = {"Stream #14(Compute,Memset)": kernels}
    found = summarise(xspace(tmp_path / "a.xplane.pb", ("/device:GPU:0", lines)))
    scopes = {operation.name: operation.scope for operation in found.operations}
    assert scopes == {
        "loop_add_fusion_4": "attention",
        "nvjet_sm90": "",
        "flash": "attention",
        "scan": "",
    }


def test_what_allocators_report(tmp_path):
    stats = {"peak_bytes_in_use": 7_000_000_000, "allocator_name": "TPU_0"}
    lines = {"XLA Ops": ops(("fusion.1", 0, 60))}
    host = {"threads": [("MemoryAllocation", 1, 1, stats)]}
    path = xspace(tmp_path / "a.xplane.pb", ("/device:TPU:0", lines), ("/host:CPU", host))
    assert summarise(path).memory == {"TPU_0": 7_000_000_000}


def test_a_collective_is_recognised_by_its_opcode_if_its_name_hides_it():
    """In a `shard_map` an all-reduce has the name of its primitive."""
    line = [
        xplane.Event("psum_invariant.1", 0.0, 30.0, {}),
        xplane.Event("fusion.2", 30.0, 50.0, {}),
    ]
    device = Ops("CPU:0", [line], [], [])
    window, opcodes = (0.0, 50.0), {"psum_invariant.1": "all-reduce", "fusion.2": "fusion"}
    known = account(device, window, opcodes)
    assert np.isclose(known.exposed, 30e-9) and np.isclose(known.compute, 20e-9)
    assert account(device, window).exposed == 0


# --- parts


intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda x: (min(x), max(x)))
)


@given(intervals, st.integers(0, 20), st.integers(20, 40))
def test_a_union_covers_each_moment_once(some, start, end):
    found = union(some, (start, end))
    covered = {t for a, b in some for t in range(max(a, start), min(b, end))}
    assert length(found) == len(covered)
    assert {t for a, b in found for t in range(int(a), int(b))} == covered


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(train_step)/transpose(jvp(attention))/norm/mul", "norm"),
        ("jit(train_step)/(reduce_sum:transpose(jvp(ffn))/dot_general)", "ffn"),
        ("jit(train_step)/jvp(loss)/logits/dot_general", "logits"),
        ("jit(train_step)/optimizer/add", "optimizer"),
        ("jit(my_ffn)/jvp()/attention", ""),
        ("", ""),
    ],
)
def test_parts_of_the_model_are_found_in_names(name, scope):
    assert find_scope(name) == scope


def test_names_reach_a_mixture_of_experts_program(tiny):
    cfg = tiny("model.ffn.kind=moe", "mesh.data=1")
    mesh = make_mesh(cfg.mesh, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        lowered = make_train_step(cfg, mesh).lower(
            abstract_state(cfg, mesh), abstract_batch(cfg, mesh)
        )
    text = lowered.as_text(debug_info=True)
    assert {find_scope(name) for name in re.findall(r'loc\("([^"]*)"', text)} >= set(SCOPES) - {
        "ffn"
    }


@pytest.mark.parametrize(
    ("op", "sends"),
    [("all-gather-start.3", True), ("reduce-scatter.1", True), ("async-collective-done", True), ("reduce.4", False),
     ("ncclDevKernel_AllReduce", True), ("fusion.7", False), ("all_gather", False)],
)  # fmt: skip
def test_collectives_are_recognised_by_name(op, sends):
    assert is_collective(op) == sends


def test_a_folder_without_a_trace_and_a_broken_one_are_one_line_errors(tmp_path):
    with pytest.raises(UserError, match="profile.first_step=10"):
        summarise(tmp_path)
    (tmp_path / "a.xplane.pb").write_bytes(b"\xff\xff\xff")
    with pytest.raises(UserError, match="is not a trace"):
        summarise(tmp_path)
    with pytest.raises(UserError, match="no operation of a device"):
        summarise(xspace(tmp_path / "a.xplane.pb", ("/host:CPU", {"main": ops(("train", 0, 9))})))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: os.mkfifo(f), "is not a file"),
        (lambda f: f.symlink_to("/dev/zero"), "is not a file"),
        (lambda f: f.symlink_to("nowhere"), "cannot be read"),
        (lambda f: f.symlink_to(f.name), "cannot be read"),
        (lambda f: (f.touch(), os.truncate(f, 2**31)), "2,147,483,648 bytes, too many"),
        # Planes, metadata, entries, stats and bytes, of which the last are no program.
        (lambda f: f.write_bytes(f.with_name("whole").read_bytes() + b"\n\x1d\x12\x0e/host:metadata"
                                 b'"\x0b\x12\x09*\x07' b"2\x05\xff\xff\xff\xff\xff"), "is not a trace"),
    ],
    ids=["pipe", "device", "gone", "round", "long", "program"],
)  # fmt: skip
def test_a_file_that_cannot_be_a_trace_is_refused_in_one_line(traced, tmp_path, damage, said):
    (tmp_path / "whole").write_bytes(xplane.find(traced).read_bytes())
    damage(tmp_path / "a.xplane.pb")
    with pytest.raises(UserError, match=said) as found:
        summarise(tmp_path)
    assert "\n" not in str(found.value)


def test_the_newest_trace_is_taken(tmp_path):
    for name in ("2026_01_01_00_00_02", "2026_01_01_00_00_10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "host.xplane.pb").touch()
    assert xplane.find(tmp_path).parent.name == "2026_01_01_00_00_10"
    for name, time in (("process-0", "2026_01_01_00_00_12"), ("process-1", "2026_01_01_00_00_13")):
        (tmp_path / name / time).mkdir(parents=True)
        (tmp_path / name / time / "host.xplane.pb").touch()
    assert "process-0" in xplane.find(tmp_path).parts


def test_a_cpus_devices_are_told_apart(traced):
    for device in find_devices(xplane.read(xplane.find(traced))):
        for event in (e for line in device.lines for e in line):
            assert f"CPU:{event.stats['device_ordinal']}" == device.name


# --- settings


def test_a_window_beyond_the_run_is_an_error(tiny):
    with pytest.raises(
        UserError, match=r"ends at step 10, after train.steps=8: set profile.first_step=6"
    ):
        tiny("train.steps=8", "profile.first_step=8", "profile.steps=3")
    assert tiny("train.steps=8", "profile.first_step=6", "profile.steps=3")


def test_a_number_of_steps_without_a_first_one_is_an_error(tiny):
    with pytest.raises(UserError, match=r"profile.steps=5 with profile.first_step=null traces"):
        tiny("profile.steps=5")
    assert tiny("profile.steps=3").profile.first_step is None  # the default, as in saved files


def test_a_port_in_use_or_out_of_range_is_refused(tiny, tmp_path, monkeypatch):
    # Other tests compile for TPUs.
    monkeypatch.setattr(devices, "check_profiler", lambda: None)
    with socket.create_server(("", 0)) as taken:
        for port in (taken.getsockname()[1], 65535):
            monkeypatch.setattr(jax, "process_index", lambda port=port: int(port == 65535))
            with pytest.raises(
                UserError, match=f"profile.port={port}: cannot listen on port"
            ) as told:
                profiler.check(tiny(f"profile.port={port}"), tmp_path, "cpu")
            assert "\n" not in str(told.value)


SERVER = """
import socket, sys
from pathlib import Path
from minitext.observability import profiler as profile
from minitext.config.config import load_config
cfg = load_config("laptop", [f"profile.port={sys.argv[1]}"])
profile.check(cfg, Path("a"), "cpu")
with profile.Window(cfg, Path("a")):
    socket.create_connection(("localhost", int(sys.argv[1])), timeout=10).close()
"""


def test_a_run_listens_on_the_port_that_was_asked_for():
    """Requesting a trace is XProf's part. In a separate process, because a process can start only one server."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    done = subprocess.run([sys.executable, "-c", SERVER, str(port)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dumps_requested_too_late_or_without_a_tpu_are_refused(tiny, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="only TPUs have LLO"):
        profiler.check(tiny("profile.dump_llo=true", "run.name=a"), tmp_path, "cpu")
    with pytest.raises(UserError, match="with the command minitext train"):
        profiler.check(tiny("profile.dump_hlo=true", "run.name=a"), tmp_path, "cpu")
    with pytest.raises(UserError, match="set run.name"):
        tiny("profile.dump_hlo=true")
    with pytest.raises(UserError, match="whose path has a space"):
        profiler.dump_programs(tiny("profile.dump_hlo=true", "run.dir=my runs", "run.name=a"))
    cfg = tiny(
        "profile.dump_hlo=true", "profile.dump_llo=true", f"run.dir={tmp_path}", "run.name=a"
    )
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "--given=1")
    profiler.dump_programs(cfg)
    assert all(
        os.environ[name].startswith("--given=1 ") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    )
    profiler.check(cfg, tmp_path / "a", "tpu")


def test_a_process_that_compiled_for_tpus_is_refused(tiny, tmp_path, monkeypatch):
    def refuse():
        raise UserError("start a new one")

    monkeypatch.setattr(devices, "check_profiler", refuse)
    profiler.check(tiny(), tmp_path, "cpu")
    with pytest.raises(UserError, match="start a new one"):
        profiler.check(tiny(*WINDOW), tmp_path, "cpu")


@pytest.mark.parametrize(
    ("start", "stop", "traced_steps"),
    [(0, 8, [3, 4, 5]), (3, 8, [4, 5]), (6, 8, []), (0, 4, [3, 4])],
)
def test_the_window_opens_and_closes_once(tiny, tmp_path, monkeypatch, start, stop, traced_steps):
    """Also in a run that resumes or ends inside it."""
    on, found = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: on.append(True))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: on.pop())
    with profiler.Window(tiny(*WINDOW), tmp_path) as window:
        window.switch(start)
        for step in range(start + 1, stop + 1):
            found += [step] if on else []
            traced, due = bool(on), window.is_due(step, False)
            window(step, None)
            assert (bool(on) != traced) == due
    assert found == traced_steps and not on
