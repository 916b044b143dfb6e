"""Launchers: what they write is what their systems read, and a job's processes live and end together."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fastjsonschema
import pytest
import yaml
from typer.testing import CliRunner

from minitext.cli.main import app
from minitext.distributed import launch
from minitext.distributed.cluster import Cluster, find_cluster
from minitext.distributed.launch import local, schedulers
from minitext.errors import UserError

# `jsonschema` would say the same, and takes two seconds to import where its formats are installed.
validate = fastjsonschema.compile(
    json.loads(Path(__file__).with_name("jobset.v1alpha2.json").read_text()), use_formats=False
)
TRAIN = ["train", "laptop", "train.steps=5"]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Returns a function that puts a shell script in Python's place, as what each process runs."""

    def put(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\nhere={tmp_path}\nid=$MINITEXT_PROCESS_ID\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return put


def test_lines_have_their_process_and_their_stream(stand_in, capsys):
    stand_in('echo "I am $id of $MINITEXT_PROCESSES: $*"; echo "oh" >&2')
    assert local.launch(TRAIN, processes=3) == 0
    out, err = capsys.readouterr()
    words = "-m minitext train laptop train.steps=5"
    assert sorted(out.splitlines()) == [f"[{i}] I am {i} of 3: {words}" for i in range(3)]
    assert sorted(err.splitlines()) == [f"[{i}] oh" for i in range(3)]


@pytest.mark.parametrize("end, code", [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_code_is_that_of_the_first_failure(end, code, stand_in, capsys):
    stand_in(f"if [ $id = 1 ]; then {end}; fi; sleep 0.3; exit 1")
    assert local.launch(TRAIN, processes=2) == code
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"launch: process 1 of 2 ended first, with exit code {code}")


def test_processes_that_do_not_end_after_a_failure_are_killed(stand_in, monkeypatch):
    monkeypatch.setattr(local, "PATIENCE", 0.2)
    stand_in("if [ $id = 0 ]; then exit 1; fi; exec sleep 60")
    began = time.monotonic()
    assert local.launch(TRAIN, processes=3) == 1
    assert time.monotonic() - began < 30


def test_where_the_system_starts_no_more_processes_none_is_left(stand_in, monkeypatch):
    start, started = subprocess.Popen, []

    def start_two(*words, **more):
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(start(*words, **more))
        return started[-1]

    stand_in("exec sleep 60")
    monkeypatch.setattr(subprocess, "Popen", start_two)
    with pytest.raises(UserError, match=r"process 2 of 3 cannot be started \(Resource temp"):
        local.launch(TRAIN, processes=3)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_a_failed_job_is_started_again_as_often_as_allowed(stand_in, tmp_path, capsys):
    stand_in('echo x >> $here/log$id; [ "$(wc -l < $here/log$id)" -ge 3 ]')
    assert local.launch(TRAIN, processes=2, restarts=1) == 1
    assert local.launch(TRAIN, processes=2, restarts=1) == 0
    assert "restart 1 of 1" in capsys.readouterr().err
    assert (tmp_path / "log0").read_text().count("x") == 3


def test_a_refusal_is_not_tried_again(stand_in, tmp_path):
    stand_in("echo x >> $here/log$id; exit 2")
    assert local.launch(TRAIN, processes=1, restarts=5) == 2
    assert (tmp_path / "log0").read_text() == "x\n"


@pytest.mark.parametrize("number", local.FORWARDED)
def test_signals_go_to_every_process_and_stop_restarts(number, stand_in, tmp_path):
    name = number.name.removeprefix("SIG")
    end = "exit 0" if number == signal.SIGUSR1 else "exit 5"
    stand_in(
        f"trap 'touch $here/got$id; {end}' {name}; touch $here/up$id; while :; do sleep 0.05; done"
    )

    def send():
        while len(list(tmp_path.glob("up*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=send)
    thread.start()
    code = local.launch(TRAIN, processes=2, restarts=3)
    thread.join()
    assert code == (0 if number == signal.SIGUSR1 else 5)
    assert {p.name for p in tmp_path.glob("got*")} == {"got0", "got1"}
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("devices", [None, 4])
def test_what_launch_local_sets_is_the_explicit_row(devices):
    old = {"MINITEXT_CLUSTER": "none", "MINITEXT_LOCAL_DEVICES": "9", "SLURM_NTASKS": "7"}
    env = local.environment_of(old, 1, 2, 1234, devices)
    ids = None if devices else (1,)
    assert find_cluster(env) == Cluster("explicit", "127.0.0.1:1234", 2, 1, ids)
    assert env.get("MINITEXT_LOCAL_DEVICES") == (str(devices) if devices else None)
    assert (env.get("JAX_PLATFORMS") == "cpu") == bool(devices)


def test_a_run_gets_a_name_unless_it_has_one():
    assert launch.with_run_name(TRAIN, "a") == [*TRAIN, "run.name=a"]
    for named in ("run.name=b", "config=runs/b/config.yml"):
        assert launch.with_run_name([*TRAIN, named], "a") == [*TRAIN, named]
    for wrong in ([], ["generate"], ["laptop"]):
        with pytest.raises(UserError, match="put the train command after --"):
            launch.with_run_name(wrong, "a")


@pytest.mark.parametrize("name", ["", "Big", "a_b", "a-", "1a", "a" * 41, "a b", "a\n"])
def test_names_that_a_system_refuses_are_refused(name):
    with pytest.raises(UserError, match="--name"):
        launch.check_name(name)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"time": "soon"}, "--time soon"),
        ({"processes_per_node": 3, "gpus_per_node": 8}, "--processes-per-node 3"),
        ({"processes_per_node": 2}, "--gpus-per-node 0"),
    ],
)
def test_what_sbatch_could_not_do_is_refused(options, told):
    with pytest.raises(UserError, match=told):
        schedulers.slurm_script(TRAIN, name="a", nodes=2, **options)


@pytest.mark.parametrize(
    "code, count, requeued", [(0, 0, 0), (1, 0, 1), (1, 3, 0), (2, 0, 0), (137, 2, 1)]
)
def test_the_sbatch_script_runs_the_command_and_requeues_failures(code, count, requeued, tmp_path):
    words = [*TRAIN, "data.path=my text.txt", "run.name=big"]
    text = schedulers.slurm_script(
        words, name="big", nodes=4, gpus_per_node=8, processes_per_node=8, partition="p"
    )
    for line in ("--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--partition=p"):
        assert f"#SBATCH {line}\n" in text
    for name, body in (
        ("srun", f'printf "%s\\n" "$@" > {tmp_path}/srun.log; exit {code}'),
        ("scontrol", f"echo $@ >> {tmp_path}/requeued"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/bin:/usr/bin",
        "SLURM_JOB_ID": "5",
        "SLURM_RESTART_COUNT": str(count),
    }
    assert subprocess.run(["bash"], input=text, text=True, env=env).returncode == code
    told = (tmp_path / "srun.log").read_text().splitlines()
    assert told[-len(words) - 1 :] == ["minitext", *words]
    assert (tmp_path / "requeued").exists() == bool(requeued)


def test_sbatch_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="there is no sbatch"):
        schedulers.submit("")


def test_the_xpk_command_carries_the_train_command_as_one_word():
    words = schedulers.xpk_command(
        [*TRAIN, "data.path=a b"],
        name="big",
        cluster="c",
        tpu_type="v5p-128",
        image="i",
        slices=2,
        project="p",
        zone="z",
    )
    assert words[:3] == ["xpk", "workload", "create"] and words[-1] == "--dry-run"
    given = dict(re.fullmatch(r"--([a-z-]+)(?:=(.*))?", word).groups() for word in words[3:])
    assert given["num-slices"] == "2" and given["tpu-type"] == "v5p-128" and given["zone"] == "z"
    assert shlex.split(given["command"]) == ["minitext", *TRAIN, "data.path=a b"]


def test_xpk_runs_where_it_is_installed(tmp_path, monkeypatch):
    command = ["launch", "xpk", "--name", "big", "--cluster", "c", "--tpu-type", "v6e-16"]
    command += ["--image", "i", "--", *TRAIN]
    monkeypatch.setenv("PATH", str(tmp_path))
    without = CliRunner().invoke(app, command)
    assert without.exit_code == 0 and "pip install xpk" in without.stderr
    (tmp_path / "xpk").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/log\nexit 4\n')
    (tmp_path / "xpk").chmod(0o755)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 4
    assert shlex.split(done.stdout)[1:] == (tmp_path / "log").read_text().splitlines()


@pytest.mark.parametrize("more", [{}, {"gpus": 8, "claim": "runs"}])
def test_the_jobset_is_valid_and_its_pods_find_each_other(more):
    made = schedulers.jobset(TRAIN, name="big", image="i", processes=3, **more)
    read = yaml.safe_load(yaml.safe_dump(made))
    validate(read)
    job = read["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]
    labels = {
        "jobset.sigs.k8s.io/jobset-name": "big",
        "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
        "jobset.sigs.k8s.io/job-index": "0",
    }
    for index in range(job["template"]["spec"]["completions"]):
        env = {"JOB_COMPLETION_INDEX": str(index)}
        for entry in pod["containers"][0]["env"]:
            path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            env[entry["name"]] = entry.get("value") or labels[path.split("'")[1]]
        expected = Cluster("jobset", "big-train-0-0.big:8476", 3, index)
        assert find_cluster(env) == expected
    assert pod["containers"][0]["command"] == ["minitext", *TRAIN]


def test_the_schema_refuses_what_kubernetes_would():
    made = schedulers.jobset(TRAIN, name="big", image="i", processes=3)
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["completionModes"] = "Indexed"
    with pytest.raises(fastjsonschema.JsonSchemaValueException, match="completionModes"):
        validate(made)


def test_the_commands_print_what_the_functions_make():
    done = CliRunner().invoke(app, ["launch", "k8s", "--name", "big", "--image", "i", "--", *TRAIN])
    assert done.exit_code == 0
    validate(yaml.safe_load(done.stdout))
    assert "run.name=big" in done.stdout
    done = CliRunner().invoke(app, ["launch", "slurm", "--name", "big", "--", *TRAIN])
    assert done.stdout.startswith("#!/bin/bash\n") and "run.name=big" in done.stdout


@pytest.mark.parametrize(
    ("options", "words", "told"),
    [
        ([], [], "note: run.dir=runs is inside each container"),
        ([], ["run.dir=/runs"], "note: run.dir=/runs is inside each container"),
        (["--claim", "disk"], [], "add --claim NAME"),
        (["--claim", "disk"], ["run.dir=/runs2"], "note: run.dir=/runs2 is"),
        (["--claim", "disk"], ["run.dir=/runs"], ""),
        (["--claim", "disk"], ["run.dir=/runs/mine"], ""),
        ([], ["config={folder}/x.yml"], ""),
    ],
)
def test_a_run_that_a_restart_would_not_find_is_told(tmp_path, options, words, told):
    (tmp_path / "x.yml").write_text("train: {steps: 3}")
    words = [word.format(folder=tmp_path) for word in words]
    command = ["launch", "k8s", "--name", "big", "--image", "i", *options, "--", "train", *words]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and yaml.safe_load(done.stdout)["kind"] == "JobSet"
    assert told in done.stderr if told else not done.stderr
