"""The search: where it ends, what it takes from earlier searches, what it refuses, and real programs in the audit."""

import hashlib
import importlib.util
import itertools
import json
import os
import stat
import sys

import pytest

from minitext.compiler.options import KNOWN, SCOPED_VMEM, Option, refused
from minitext.compiler.targets import parse_target, topology_mesh
from minitext.config.config import load_config
from minitext.errors import UserError
from minitext.hardware import CHIPS
from minitext.perf import step_time, tune_options
from minitext.perf.tune_options import SETS, Search, Store, apply, dimensions, show
from minitext.terminal import show_bytes

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")

TARGET = "v6e:2x2"
START = ["model.layers=2", "mesh.data=1", "mesh.fsdp=4", "train.global_batch=32"]
COST = {"none": 10.0, "dots": 11.0, "names": 12.0, "full": 14.0}
SIZE = {"none": 40, "dots": 20, "names": 15, "full": 10}


def shares(words):
    """For each word a share of a step's time that is its own: between -3% and +3%."""
    return [hashlib.sha256(word.encode()).digest()[0] / 4250 - 0.03 for word in words]


def made_up(cfg, target):
    """A step's time and size by a formula: recomputing costs time, microbatches a little, and each option its share."""
    parts, remat = cfg.train.microbatches, cfg.model.remat
    size = SIZE[remat] // parts + 1
    if size > 12:
        return {"bytes": size, "refusal": "does not fit"}
    seconds = COST[remat] * (1 + 0.01 * parts) * (1 + sum(shares(cfg.xla.options)))
    return {"bytes": size, "seconds": seconds, "lower": seconds, "upper": seconds}


@pytest.fixture
def calls(monkeypatch):
    """Puts the formula in the compiler's place; returns the configurations that it was asked for."""
    asked = []

    def compile_apart(cfg, target):
        asked.append(cfg)
        return made_up(cfg, target)

    monkeypatch.setattr(tune_options, "compile_apart", compile_apart)
    return asked


def search(folder, budget=1000, target=TARGET, start=START):
    with Store(folder) as store:
        return Search(load_config("laptop", start), target, budget, lambda what, done: None).run(
            store
        )


def figures(found):
    return [(r.changes, r.seconds, r.bytes, r.refusal) for r in found.ranked]


def test_it_ends_where_no_dimension_helps(calls, tmp_path):
    cfg, target = load_config("laptop", START), parse_target(TARGET)
    found = search(tmp_path)
    assert found.finished and found.compiled == len(found.ranked) == len(calls)
    assert [r.order for r in found.ranked] == sorted(r.order for r in found.ranked)
    # Recomputing nothing is fastest, and fits in four microbatches only: two settings at once.
    assert found.start.seconds is None and found.gain(found.best) is None
    assert found.best.changes["train.microbatches"] == 4 and "model.remat" not in found.best.changes
    best = apply(cfg, found.best.changes)
    for dimension in dimensions(cfg, target, topology_mesh(target, cfg.mesh)):
        keys = {key for value in dimension for key in value}
        for value in ({}, *dimension):
            others = {k: v for k, v in found.best.changes.items() if k not in keys}
            one = made_up(apply(cfg, others | value), TARGET)
            assert one.get("seconds", 1e9) >= found.best.seconds
    written = load_config(None, [f"config={tmp_path / 'best.yml'}"])
    assert written == best and made_up(written, TARGET)["seconds"] == found.best.seconds


@pytest.mark.parametrize("after", [1, 7])
def test_a_stopped_search_goes_on_without_compiling_again(calls, tmp_path, monkeypatch, after):
    whole = search(tmp_path / "whole", 12)
    total, real = len(calls), tune_options.compile_apart

    def stop(cfg, target):
        if len(calls) == total + after:
            raise KeyboardInterrupt
        return real(cfg, target)

    with monkeypatch.context() as patch:
        patch.setattr(tune_options, "compile_apart", stop)
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path / "cut", 12)
    with (tmp_path / "cut" / "results.jsonl").open("a") as file:
        file.write('{"key": "cut off by a ki')
    found = search(tmp_path / "cut", 12)
    assert len(calls) == 2 * total and found.compiled == total - after
    assert figures(found) == figures(whole)
    again = search(tmp_path / "cut", 12)
    assert again.compiled == 0 and len(calls) == 2 * total and figures(again) == figures(whole)


def test_a_budget_counts_what_is_known_and_a_larger_one_goes_on(calls, tmp_path):
    few = search(tmp_path, budget=5)
    assert not few.finished and len(few.ranked) == few.compiled == len(calls) == 5
    assert search(tmp_path, budget=3).unused == 2 and len(calls) == 5
    more = search(tmp_path, budget=9)
    assert more.compiled == 4 and len(calls) == 9
    assert more.best.order <= few.best.order


def test_results_of_other_programs_are_not_used(calls, tmp_path, monkeypatch):
    first = search(tmp_path, budget=3)
    assert first.compiled == 3
    for words in ([*START, "model.layers=3"], [*START, "xla.options=[xla_tpu_a=1]"]):
        assert search(tmp_path, 3, start=words).compiled == 3
    assert search(tmp_path, 3, target="v5e:2x2").compiled == 3
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=1")
    assert search(tmp_path, 3).compiled == 3
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    version = tune_options.compile.metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(
            "importlib.metadata.version",
            lambda name: "0" if name == "libtpu" else version(name),
        )
        assert search(tmp_path, 3).compiled == 3
    same = search(tmp_path, 3)
    # What doesn't change the program doesn't count.
    assert search(tmp_path, 3, start=[*START, "run.name=a"]).compiled == 0
    assert same.compiled == 0 and same.unused == 15


def test_what_is_set_is_kept(calls, tmp_path):
    words = [*START, "model.remat=full", "train.microbatches=2",
             "xla.options=[xla_tpu_scoped_vmem_limit_kib=65536]"]  # fmt: skip
    found = search(tmp_path, start=words)
    for cfg in calls:
        assert cfg.model.remat == "full" and cfg.train.microbatches == 2
        assert cfg.xla.options[0] == "xla_tpu_scoped_vmem_limit_kib=65536"
        assert len({option.partition("=")[0] for option in cfg.xla.options}) == len(cfg.xla.options)
    assert {c for r in found.ranked for c in r.changes} <= {o for s in SETS.values() for o in s}


def test_a_recommended_set_can_be_left_out_and_is_not_tried_again():
    cfg = load_config("laptop", START)

    def values(target, cfg=cfg):
        parsed = parse_target(target)
        found = dimensions(cfg, parsed, topology_mesh(parsed, cfg.mesh))
        return [show(value) for value in itertools.chain(*found)]

    assert "-sparse_core_collectives" in values("v6e:2x2")
    assert "+sparse_core_collectives" not in values("v6e:2x2")
    assert "+sparse_core_collectives" in values("v5p:2x2x1")
    assert not [word for word in values("v5e:2x2") if "sparse" in word]
    # A device of v5p has the vector memory of two cores, one of tpu7x that of one.
    for target, kib in (("v5p:2x2x1", (32_768, 65_536)), ("tpu7x:2x1x1", (32_768,))):
        assert [w for w in values(target) if "vmem" in w] == [f"{SCOPED_VMEM}={n}" for n in kib]
    plain = load_config("laptop", [*START, "xla.recommended=false"])
    assert "+sparse_core_collectives" in values("v6e:2x2", plain)
    assert {option for options in SETS.values() for option in options} <= set(KNOWN)


def test_a_start_that_cannot_be_compiled_is_no_result(monkeypatch, tmp_path):
    monkeypatch.setattr(tune_options, "compile_apart", lambda *_: {"refusal": "no such kernel"})
    for folder in (tmp_path, tmp_path / "a" / "b"):
        for _ in range(2):
            with pytest.raises(UserError, match="no such kernel"):
                search(folder)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("kill -9 $$", "was killed"),
        ("echo 'F1126 12:00:00 a.cc:1] Check failed: x' >&2; echo more >&2; kill -6 $$", "stopped with -6: F1126"),
        ("echo 'INFO: a' >&2; echo 'the step needs a mesh' >&2; exit 2", "the step needs a mesh"),
        ("exit 1", "stopped with 1: nothing"),
    ],
)  # fmt: skip
def test_a_crash_is_a_result_with_its_reason(monkeypatch, tmp_path, script, said):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(compiler))
    found = tune_options.compile_apart(load_config("laptop", START), TARGET)
    assert list(found) == ["refusal"] and said in found["refusal"]
    assert found["refusal"].count("\n") == 0


def test_two_searches_in_one_folder_are_one_too_many(calls, tmp_path):
    with Store(tmp_path), pytest.raises(UserError, match="another search is at work in"):
        search(tmp_path)
    assert search(tmp_path, 2).compiled == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f: (f.mkdir(), (f / "notes.txt").write_text("")), "has files, and none is a results.jsonl"),
        (lambda f: (f.mkdir(), (f / "results.jsonl").mkdir()), "has files, and none is a results.jsonl"),
        (lambda f: (f.mkdir(), os.mkfifo(f / "results.jsonl")), "has files, and none is a results.jsonl"),
        (lambda f: (f.mkdir(), (f / "results.jsonl").touch(), (f / "best.yml").mkdir()), "best.yml is a folder"),
        (lambda f: f.write_text(""), "cannot write"),
        (lambda f: (f.mkdir(), (f / "results.jsonl").write_text("{}\n")), "line 1 of"),
        (lambda f: (f.mkdir(), (f / "results.jsonl").write_bytes(b"\xff\n")), "not UTF-8"),
        (lambda f: (f.mkdir(), (f / "results.jsonl").write_text('{"key": "a", "changes": 3}\n')), "line 1 of"),
        (lambda f: f.symlink_to("/proc/nowhere"), "cannot write"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_a_searchs_is_refused_and_left_alone(calls, tmp_path, make, said):
    folder = tmp_path / "folder"
    make(folder)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=said) as found:
        search(folder)
    assert "\n" not in str(found.value) and not calls
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_the_command_answers_in_a_table_and_in_json(calls, minitext, tmp_path):
    words = ["tune-options", "laptop", f"target={TARGET}", *START, "--save", tmp_path / "a"]
    code, out, _ = minitext(*words, "--budget", "8")
    assert code == 0 and "8 candidates, 8 of them compiled now; the budget is spent" in out
    assert f"minitext train config={tmp_path}/a/best.yml" in out and "does not fit" in out
    code, out, _ = minitext(*words, "--budget", "8", "--json")
    found = json.loads(out)
    assert code == 0 and found["compiled"] == 0 and len(found["ranked"]) == 8
    assert found["preset"] == f"{tmp_path}/a/best.yml" and found["ranked"][0]["gain"] is None
    code, out, _ = minitext(*words[:-1], tmp_path / "b", "--budget", "1")
    assert code == 3 and "none fits" in out and not (tmp_path / "b" / "best.yml").exists()


def test_a_folder_of_its_own_is_made_for_preset_and_target(calls, minitext, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["tune-options", "target=v6e:1x2", "slices=2", "mesh.fsdp=2", "--budget", "2"]
    assert minitext(*words)[0] == 3
    assert os.listdir("runs") == ["tune-laptop-v6e-1x2-slices-2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["laptop"], "name one target"),
        (["laptop", "target=h100:1x8"], "only the TPU compiler dumps its schedule"),
        (["laptop", "target=v5e:2x2", "--budget", "0"], "--budget 0: choose 1 or more"),
        (["laptop", "target=v5e:2x2", "mesh.fsdp=3", "mesh.data=1"], "mesh"),
        (["laptop", "target=v5e:2x2", "mesh.simulate=4"], "mesh.simulate has no effect"),
        (["laptop", "target=v5e:2x2", "--save", "gs://b/c"], "gs://b/c is in a bucket"),
        (["laptop", "target=v5e:2x2", "--save", ""], "'' is empty"),
        (["laptop", "target=v5e:2x2", "--save", "/proc/x"], "cannot write /proc/x"),
        (["laptop", "target=v4:1x1x1", "model.remat=none", "train.microbatches=1",
          "xla.options=[" + ",".join(f"{o}=1" for s in SETS.values() for o in s) + "]"], "nothing is left to try"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(calls, minitext, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = minitext("tune-options", *words)
    assert code == 2 and said in err and out == "" and err.count("\n") == 1, err
    assert not calls and os.listdir() == []


@pytest.mark.audit
@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_every_set_of_options_is_one_that_the_compiler_takes(chip):
    target = parse_target(f"{chip}:{'x'.join('1' * (CHIPS[chip].links // 2))}")
    mesh = topology_mesh(target)
    found = dimensions(load_config("laptop", ["xla.recommended=false"]), target, mesh)
    values = itertools.chain(*found)
    options = [
        Option(n, v, "") for value in values for n, v in value.items() if n.startswith("xla_")
    ]
    assert options and not list(refused(options, mesh))


@pytest.mark.audit
def test_a_real_search_resumes_and_its_preset_is_predicted_the_same(tmp_path):
    """The program, its time and its size are those of `minitext predict` and `compile` for the file that's written."""
    words = [*START[1:], "model.layers=1", "data.seq_len=128", "xla.recommended=false"]
    found = search(tmp_path, 3, "v5e:2x2", words)
    assert found.compiled == 3
    again = search(tmp_path, 3, "v5e:2x2", words)
    assert again.compiled == 0 and figures(again) == figures(found)
    written = load_config(None, [f"config={tmp_path / 'best.yml'}"])
    report, program = step_time.compile_program(written, "v5e:2x2")
    step = step_time.predict_program(program, written, parse_target("v5e:2x2"))
    best = found.best
    assert (step.seconds, step.lower, step.upper) == (best.seconds, best.lower, best.upper)
    assert report.total_bytes == best.bytes


@pytest.mark.audit
def test_a_real_program_that_does_not_fit_says_how_large_it_is():
    words = [*START[1:], "model.layers=1", "model.vocab=4_000_000"]
    found = tune_options.compile_apart(load_config("laptop", words), "v5e:2x2")
    # The logits alone: 8 of 32 rows on a chip, 256 tokens each, 4 bytes.
    assert set(found) == {"bytes", "refusal"} and found["bytes"] > 8 * 256 * 4_000_000 * 4
    assert found["refusal"] == f"does not fit: {show_bytes(found['bytes'])} of 15.75 GiB"
