"""The command line: help, exit codes, and one clear line for bad input."""

import http.client
import inspect
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import typing
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import typer

from minitext.book.grading.command import grade
from minitext.cli import main
from minitext.cli.arguments import answer
from minitext.distributed import devices
from minitext.training import run
from tests.conftest import QUICK_FLAGS

SMALL = ["model.layers=1", "model.embed=16", "model.heads=2", "model.mlp=16", "data.seq_len=16", "train.global_batch=8",
         "data.source=grammar", "train.steps=2", "train.eval_batches=1", "train.sample_tokens=0"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny run, trained through the command line in a process of its own, as a person does."""
    directory = tmp_path_factory.mktemp("runs")
    command = [
        sys.executable,
        "-m",
        "minitext",
        "train",
        f"run.dir={directory}",
        "run.name=a",
        *SMALL,
    ]
    env = os.environ | {"XLA_FLAGS": QUICK_FLAGS}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "minitext generate" in done.stderr and done.stdout == ""
    return directory / "a"


def test_help_is_quick_and_names_the_commands():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "minitext", "--help"], capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    for command in ("train", "generate", "eval", "compile", "grade", "config", "doctor"):
        assert command in done.stdout
    # Its own work; how long it waits for a core is another matter.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_generate_is_repeatable_and_answers_in_json(minitext, trained):
    words = ["generate", trained, "--prompt", "Once", "--max-tokens", "5", "--json"]
    code, out, _ = minitext(*words)
    answer = json.loads(out)
    assert (
        code == 0
        and answer["step"] == 2
        and answer["text"].startswith("Once")
        and answer["tokens"] <= 5
    )
    assert minitext(*words)[1] == out
    code, text, _ = minitext(*words[:-1])
    assert code == 0 and text == answer["text"] + "\n"


def test_generate_answers_a_message_or_says_why_not(minitext, trained):
    for words in (["--prompt", "Once", "--chat", "Hi"], []):
        code, out, err = minitext("generate", trained, *words)
        assert code == 2 and not out and "either --prompt" in err and err.count("\n") == 1
    code, out, err = minitext("generate", trained, "--chat", "Hi")
    assert code == 2 and not out and "no chat template" in err and err.count("\n") == 1


def test_eval_answers_in_words_and_in_json(minitext, trained):
    code, out, _ = minitext("eval", trained)
    assert code == 0 and "nats/token, floor" in out and "perplexity" in out
    assert json.loads(minitext("eval", trained, "--json")[1])["step"] == 2


def test_an_answer_in_json_has_no_other_numbers_than_json(capsys):
    answer({"a": [math.nan, (1, 2.5)], "b": {"c": -math.inf}, "d": None}, True, print)
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": ["nan", [1, 2.5]], "b": {"c": "-inf"}, "d": None}


def test_config_show_and_explain(minitext):
    code, out, _ = minitext("config", "show", "laptop", "train.steps=3")
    assert code == 0 and "steps: 3" in out and "# command line" in out and "# preset laptop" in out
    assert json.loads(minitext("config", "show", "laptop", "--json")[1])["model"]["layers"]
    code, out, _ = minitext("config", "explain", "optim.b2")
    assert code == 0 and "decay of the second moment" in out
    assert "laptop" in minitext("config", "presets")[1]


def test_doctor_answers_in_json(minitext):
    code, out, _ = minitext("doctor", "--json")
    assert code == 0 and "devices" in json.loads(out)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "laptp"], "did you mean laptop"),
        (["train", "laptop", "gpt2-124m"], "one preset at most"),
        (["train", "model.headz=3"], "did you mean model.heads"),
        (["train", "train.steps=soon"], "train.steps=soon"),
        (["train", "model.heads=5"], "model.heads=5"),
        (["train", "mesh.fsdp=8", "mesh.data=1", "train.global_batch=12"], "train.global_batch=12"),
        (["train", "mesh.fsdp=3", "mesh.data=1", "mesh.simulate=8"], "mesh fsdp=3 needs"),
        (["train", "mesh.tensor=8"], "mesh.tensor=8"),
        (["train", "data.source=files", "data.path=/nowhere/at.txt"], "/nowhere/at.txt"),
        (["train", "config=/nowhere.yml"], "/nowhere.yml"),
        (["generate", "/nowhere", "--prompt", "x"], "not a run directory"),
        (["generate", "/nowhere", "--prompt", "x", "--temperature", "-1"], "temperature=-1"),
        (["eval", "/nowhere"], "not a run directory"),
        (["compile", "laptop"], "name one target"),
        (["compile", "laptop", "target=v9:2x2"], "v9"),
        (["config", "explain", "optim.b3"], "did you mean optim.b"),
        (["grade", "99.nothing"], "99"),
        (["nonsense"], "'nonsense': see minitext --help"),
        (["train", "--sped"], "No such option: --sped: see minitext train --help"),
        (["watch", "a", "b"], "argument(s) (b)"),
        (["serve", "/", "--kv-cache-dtype", "a\n"], "is not one of 'auto', 'int8', 'fp8'"),
        (["generate"], "RUN"),
        (["serve", "/", "--served-model-name", " "], "--served-model-name is empty"),
        (["serve", "/", "--max-model-len", "1"], "has no room for a prompt and an answer"),
        (["train", ""], "unknown preset ''"),
        (["train", "train.steps"], "train.steps"),
        (["train", "run.name=../../x"], "run.name=../../x is not the name of a folder in run.dir"),
        (["train", f"run.name={'x' * 400}"], "has a name of 400 bytes"),
        (["train", 'run.name="a\\0b"'], "has a control character"),
        (["train", "run.dir=\"\""], "run.dir='' is empty"),
        (["train", "data.source=files", "data.path=" + "x/" * 3000], "has 6000 bytes"),
        (["train", "mesh.data=1000000"], "ask for 1,000,000 devices"),
        (["comms", "mesh.data=1000000"], "ask for 1,000,000 devices"),
        (["generate", "", "--prompt", "x"], "'' is empty"),
        (["generate", "x" * 400, "--prompt", "x"], "has a name of 400 bytes"),
        (["generate", "/", "--prompt", "x", "--seed", "9" * 20], "--seed 99999999999999999999"),
        (["generate", "/", "--prompt", "x", "--seed", "-1"], "--seed -1"),
        (["watch", "/dev/null", "--once"], "/dev/null is a file"),
        (["watch", "/", "--every", "inf"], "--every"),
        (["goodput", "/", "--plot", ""], "'' is empty"),
        (["goodput", "/", "--plot", "/tmp"], "--plot /tmp cannot be written"),
        (["goodput", "/", "--plot", "plain"], "end its name in .svg or .png or .pdf"),
        (["shard", "--plot", "/nowhere/x.svg"], "name a file in a folder that is there"),
        (["export", "/", "/tmp"], "/tmp exists"),
        (["data", "pack", "/tmp"], "/tmp exists"),
        (["tune", "matmul", "chip=v5e", "m=0"], "tune tries block lengths of its own"),
        (["llo", "matmul", "m=0"], "m=0: a block's length"),
        (["llo", "matmul", "chip=v5e", "chip=v6e"], "chip=v5e and chip=v6e"),
        (["launch", "local", "--", "train", "laptp"], "did you mean laptop"),
        (["launch", "slurm", "--name", "a", "--", "train", "model.headz=1"], "did you mean model.heads"),
        (["launch", "k8s", "--name", "a", "--image", "", "--", "train"], "--image '' is not a name"),
        (["launch", "local", "--processes", "1000000", "--", "train"], "choose 1,024 or less"),
        (["launch", "local", "--processes", "0", "--", "train"], "--processes 0: choose 1 or more"),
        (["grade", "--seed", "soon"], "--seed soon: choose a whole number"),
        (["train", "config=~nobodyhere/x.yml"], "~nobodyhere/x.yml cannot be read"),
        (["train", "train.steps=[1"], "train.steps=[1 is not YAML (expected ',' or ']', but got the end)"),
        (["train", "optim.kind=adam"], "optim.kind=adam (command line): choose 'adamw', 'sgd',"),
        (["train", "data.mixture=5"], "data.mixture=5 (command line): write a list"),
        (["train", "model=5"], "model (command line) is a section of keys: set one of them"),
        (["config", "explain", ""], "'' (command line) is not a key"),
        (["roofline", "model.layers=" + "9" * 20], "choose 100,000 or less"),
        (["optim", "memory", "model.embed=" + "9" * 20], "choose 16,777,216 or less"),
        (["journey", "--budget", "inf"], "--budget inf: choose a finite number"),
        (["judge", __file__, "--budget", "mxu=200%"], "'mxu=200%' is not a budget"),
        (["llo", "matmul", "chip=v5e,"], "chip='' is not a TPU that minitext knows"),
        (["llo", "matmul", "m=8", "m=16"], "m is given twice"),
        (["launch", "slurm", "--name", "a", "--nodes", "9" * 20, "--", "train"], "choose 100,000 or less"),
        (["launch", "slurm", "--name", "a", "--partition", "a;b", "--", "train"], "--partition 'a;b' is not a name"),
        (["launch", "k8s", "--name", "a", "--image", "i", "--claim", "A_b", "--", "train"], "--claim 'A_b' is not a"),
        (["config", "show", "run.name=true"], "run.name=true (command line): choose something other"),
        (["grpo", "/", "objective.rewards=[]"], "/ is not a run directory"),
        (["launch", "k8s", "--name", "a", "--image", "i", "--gpus", "9" * 20, "--", "train"], "choose 1,024 or less"),
        (["train", "data.source=grammar", "train.executable=/dev/zero"], "/dev/zero is not a compiled step"),
        (["judge", __file__, "--budget", "vmem=1", "--budget", "vmem=2"], "--budget vmem is given twice"),
        (["import", "nowhere", "/proc/q"], "cannot write /proc/q: No such file or directory"),
        (["quantize", "/", "/proc/q"], "cannot write /proc/q: No such file or directory"),
        (["import", "/proc/self/mem", "out.gguf"], "/proc/self/mem cannot be read (Input/output error)"),
        (["compile", "target=v5e:2x2", "--save", "/dev/full"], "--save /dev/full cannot be written"),
        (["memory", "mesh.tensor=8", "mesh.data=1", "train.global_batch=8"], "not divisible by mesh.tensor=8"),
        (["memory", "model.embed=100000000"], "model.embed=100000000 (command line): choose 16,777,216 or less"),
        (["memory", "train.global_batch=100000000000"], "are 25,600,000,000,000 tokens"),
        (["compile", "target=v5e:2x4", "train.global_batch=100000000000"], "are 25,600,000,000,000 tokens"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line_and_exit_code_2(minitext, words, named):
    code, out, err = minitext(*words)
    assert code == 2
    assert named in err and out == "" and err.count("\n") == 1


def test_an_output_that_takes_no_more_is_one_line_or_none():
    words = [sys.executable, "-m", "minitext", "config", "show", "laptop", "run.name=é"]
    end, start = os.pipe()
    os.close(end)  # as `head` does when it has enough
    done = subprocess.run(words, stdout=start, stderr=subprocess.PIPE, text=True)
    os.close(start)
    assert (done.returncode, done.stderr) == (1, "")
    done = subprocess.run(
        words, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0 and b"name: \\xe9" in done.stdout, done.stderr
    if os.path.exists("/dev/full"):
        for more in (["show"], ["explain", "model"], ["--help"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([*words[:4], *more], stdout=full, stderr=subprocess.PIPE)
            said = b"error: the output cannot be written (No space left on device)\n"
            assert (done.returncode, done.stderr) == (1, said)


def test_a_platform_that_jax_lacks_is_one_line(minitext, monkeypatch):
    words = [sys.executable, "-m", "minitext", "doctor"]
    env = os.environ | {"JAX_PLATFORMS": "nonsense"}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: JAX: Unable to initialize backend 'nonsense'")
    monkeypatch.setattr(devices, "has_gpu_plugin", lambda: False)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    code, out, err = minitext("doctor")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "JAX_PLATFORMS=cuda,cpu: JAX's plugin for GPUs isn't installed" in err


TARGET = ["laptop", "target=v5e:2x2"]
XPK = ["launch", "xpk", "--name", "a", "--image", "i", "--cluster", "c", "--tpu-type", "v5p-8"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["roofline", "mesh.fsdp=4096"], "mesh.fsdp has no effect without a chip"),
        (["roofline", "chip=v5e", "mesh.simulate=8"], "mesh.simulate has no effect with chip=v5e"),
        (["roofline", "chip=v5e", "--rows", "3", "--json"], "--rows has no effect with --json"),
        *((name.split() + TARGET + ["mesh.simulate=8"], "mesh.simulate has no effect with target=v5e:2x2")
          for name in ("compile", "compile --options", "compile --save x.zip", "plan", "predict", "memory", "comms",
          "quantized", "predict-serving")),
        (["shard", "mesh.simulate=8"], "mesh.simulate has no effect here"),
        (["shard", "sharding.gather_dtype=int8"], "sharding.gather_dtype has no effect on what devices store"),
        (["roofline", "sharding.gather_dtype=int8"], "sharding.gather_dtype has no effect here, where communication"),
        (["optim", "memory", "sharding.gather_dtype=int8"], "sharding.gather_dtype has no effect on sums"),
        (["optim", "memory", "optim.kind=lion"], "optim.kind has no effect here"),
        (["optim", "memory", "mesh.fsdp=8"], "mesh.fsdp has no effect on sums over all devices"),
        (["profile", "/", "--rows", "3", "--json"], "--rows has no effect with --json"),
        (["watch", "/", "--every", "3", "--once"], "--every has no effect with --once"),
        (["watch", "/", "--every", "3", "--json"], "--every has no effect with --json"),
        (["journey", "--plan", "--run", "x"], "--run has no effect with --plan"),
        (["journey", "--plan", "--stages", "sft"], "--stages has no effect with --plan"),
        (["maxtext", "explain", "base.yml model_name=llama2-7b", "--compile"], "--compile needs chips"),
        (["grade", "--start", "x", "--seed", "3"], "--seed has no effect with --start"),
        (["grade", "04", "--solutions", "--json", "x.json"], "--json has no effect with --solutions"),
        (["grade", "04", "--mutants", "--answers", "/"], "--answers has no effect with --mutants"),
        (["grade", "04", "--notebook", "x.ipynb", "--answers", "/"], "--answers has no effect with --notebook"),
        (["grade", "04", "--all"], "04 has no effect with --all"),
    ],
)  # fmt: skip
def test_what_would_change_nothing_is_refused(minitext, words, named):
    code, out, err = minitext(*words)
    assert code == 2 and named in err and out == "" and err.count("\n") == 1, err


@pytest.mark.parametrize("launcher", [
    ["launch", "slurm", "--name", "a"], ["launch", "k8s", "--name", "a", "--image", "i"], XPK, ["launch", "local"],
])  # fmt: skip
def test_launchers_read_the_file_that_they_pass_on(minitext, tmp_path, launcher):
    file = tmp_path / "c.yml"
    for content, named in {
        None: "cannot be read",
        "train: [": "is not YAML",
        "train: {stepz: 3}": "did you mean train.steps",
    }.items():
        if content is not None:
            file.write_text(content)
        code, out, err = minitext(*launcher, "--", "train", f"config={file}")
        assert code == 2 and named in err and out == "" and err.count("\n") == 1, err


MERGES = "\n".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}], x: 1}}" if i else "a0: &a0 {x: 0}"
    for i in range(9)
)
BELOW = "[" * 100_000


@pytest.mark.parametrize(
    ("words", "content", "named"),
    [
        (["train", "config={file}"], None, "is not a file: name one"),
        (["train", "config={file}"], MERGES, "has more than 20,000 values"),
        (["train", "config={file}"], "#" * (2 << 20), "has more than 1,048,576 bytes"),
        (["train", "config={file}"], "train: {steps: 3}\ntrain: {seed: 1}", "has the key train twice"),
        (["maxtext", "explain", "{file}.yml"], MERGES, "has more than 20,000 values"),
        (["data", "preview", "byte", "{file}.jsonl"], None, "is not a file: name one"),
        (["data", "preview", "byte", "{file}.jsonl"], BELOW, ":1 is not a JSON object (nested too deep)"),
        (["data", "preview", "byte", "{file}.parquet"], "PAR1", "is not a Parquet file"),
        (["train", "data.source=files", "data.path={file}.txt"], None, "is not a file: name one"),
        (["train", "data.source=files", "data.path={file}.parquet"], None, "is not a file: name one"),
        (["judge", "{file}.py"], None, "is not a file: name one"),
    ],
)  # fmt: skip
def test_a_pipe_or_a_file_that_swells_is_one_line(minitext, tmp_path, words, content, named):
    path = tmp_path / words[-1].partition("{")[2].replace("}", "")
    if content is None:  # a named pipe, whose reader would wait for ever
        os.mkfifo(path)
    else:
        path.write_text(content)
    code, out, err = minitext(*(word.format(file=tmp_path / "file") for word in words))
    assert code == 2 and named in err and out == "" and err.count("\n") == 1, err
    assert os.listdir(tmp_path) == [path.name]


def test_a_yaml_alias_that_contains_itself_is_one_line(minitext, tmp_path):
    for text in ("train: &a {steps: *a}", "train: &a [*a]", "run: {name: &a [*a]}"):
        (tmp_path / "c.yml").write_text(text)
        code, out, err = minitext("train", f"config={tmp_path / 'c.yml'}")
        assert code == 2 and out == "" and err.count("\n") == 1


def test_eval_refuses_what_it_would_ignore(minitext, trained):
    for setting in ("model.layers=3", "optim.learning_rate=1.0", "run.name=b", "mesh.fsdp=2"):
        code, out, err = minitext("eval", trained, setting)
        assert code == 2 and out == "" and err.count("\n") == 1
        assert err.startswith(f"error: {setting} would have no effect on {trained}")
    for setting, named in {
        "data.tokenizer=bpe": "data.tokenizer=bpe",
        "data.path=my.txt": "data.path=my.txt has no effect with data.source=grammar",
    }.items():
        code, out, err = minitext("eval", trained, setting)
        assert code == 2 and named in err and out == "" and err.count("\n") == 1
    assert minitext("eval", trained, "model.layers=1", "train.global_batch=4")[0] == 0


def test_what_memory_cannot_hold_is_refused_before_it_is_taken(minitext, trained, tmp_path):
    asked = {
        "train.global_batch=100000000": ["train", *SMALL, "train.global_batch=100000000"],
        "lower them": ["eval", trained, "train.global_batch=100000000"],
        "choose a smaller one": ["train", *SMALL, "model.embed=400000"],
        "train.sample_tokens=100,000,000,000": ["train", *SMALL, "train.sample_tokens=100000000000"],
        "a prompt of 1,000,000 tokens": ["generate", trained, "--prompt", "x" * 1_000_000],
        "max_tokens=100,000,000,000": [
            "generate", trained, "--prompt", "x", "--max-tokens", "100000000000"
        ],
    }  # fmt: skip
    for named, words in asked.items():
        more = [f"run.dir={tmp_path}/runs"] if words[0] == "train" else []
        began = time.process_time()
        code, out, err = minitext(*words, *more)
        assert code == 3 and named in err and out == "" and err.count("\n") == 1, err
        assert time.process_time() - began < 5 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("moment", ["_refuse", "_write_config", "_introduce", "_log"])
def test_sigterm_before_the_first_step_is_one_line_and_leaves_nothing(
    minitext, tmp_path, monkeypatch, moment
):
    real = getattr(run, moment)

    def then_stop(*args):
        done = real(*args)
        os.kill(os.getpid(), signal.SIGTERM)
        return done

    monkeypatch.setattr(run, moment, then_stop)
    code, out, err = minitext("train", f"run.dir={tmp_path}/runs", "run.name=a", *SMALL)
    assert code == 143 and out == "" and os.listdir(tmp_path) == [], err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_may_not_be_read_is_one_line(minitext, trained, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "events.jsonl")

    # As root, who runs tests in containers, everything may be read.
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, how: False)
        code, out, err = minitext("goodput", trained)
        assert code == 2 and out == "" and f"{trained} cannot be read" in err
    monkeypatch.setattr("minitext.observability.goodput.measure", refuse)
    code, out, err = minitext("goodput", trained)
    assert code == 2 and out == "" and err.startswith("error: events.jsonl: Permission denied")


# Text that names no path, some only in one command; and the settings of eval, which are read after the run's own.
WORDS = {"serve host", "chat system", "serve api_key", "serve served_model_name", 
    "prompt", "chat", "key", "record", "learner", "name", "time", "partition", "cluster", "tpu_type", "image",
    "project", "zone", "claim", "llo settings", "tune settings", "eval settings", "grade which",
    "licence", "stages", "kinds", "chip", "budget", "journey settings", "explain command", "explain target",
}  # fmt: skip
ADDRESS = "ADDRESS"


def commands(app, *names):
    """Every command's words and function, found in the command line itself."""
    for command in app.registered_commands:
        yield [*names, command.name], command.callback
    for group in app.registered_groups:
        yield from commands(group.typer_instance, *names, group.name)


def ways_to_name_a_path():
    """The words of the command line for every argument, option and setting that may name one."""
    for names, function in [*commands(main.app), (["grade"], grade)]:
        given, types = {}, typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
        for name, about in typing.get_type_hints(function, include_extras=True).items():
            if not hasattr(about, "__metadata__"):  # the context, or what is returned
                continue
            option = isinstance(about.__metadata__[0], typer.models.OptionInfo)
            flag = [f"--{name.strip('_').replace('_', '-')}"] if option else []
            value = {"settings": [], "command": ["--", "train"]}.get(name, ["x"])
            given[name] = [*flag, *value]
        needed = [
            n
            for n, p in parameters.items()
            if n in given and (p.default is p.empty or n == "settings")
        ]
        for name in given:
            texts = {str, Path, list[str]} & {types[name], *typing.get_args(types[name])}
            if not texts or {name, f"{names[-1]} {name}"} & WORDS:
                continue
            if name in ("settings", "command"):
                target = ["target=v5e:2x2"] * (
                    names[0]
                    in (
                        "compile",
                        "plan",
                        "predict",
                        "predict-serving",
                        "quantized",
                        "tune-options",
                    )
                )
                words = [*given[name], f"config={ADDRESS}", *target]
            else:
                words = [*given[name][:-1], ADDRESS]
            words = {n: given[n] for n in needed} | {name: words}
            last = words.pop("command", [])  # after all options
            yield [*names, *(word for value in words.values() for word in value), *last]
    yield ["grade", "--start", ADDRESS]


@pytest.mark.parametrize("words", list(ways_to_name_a_path()), ids=" ".join)
def test_an_address_where_a_path_should_be_is_one_line(minitext, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address, fix in {
        "gs://b/e": "`gcsfuse --rename-dir-limit=100000 b /mnt/b`, and name /mnt/b/e",
        "s3://b/e/f": "`rclone mount --vfs-cache-mode writes s3:b /mnt/b`, and name /mnt/b/e/f",
        "https://h/e": "copy the files to this machine",
    }.items():
        code, out, err = minitext(*(word.replace(ADDRESS, address) for word in words))
        assert code == 2 and out == "" and err.count("\n") == 1
        assert address.split("//")[1] in err and fix in err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", ["MINITEXT_CACHE", "MINITEXT_EXERCISES"])
def test_an_address_in_the_environment_is_one_line(minitext, variable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, "gs://b/e")
    command = ["doctor"] if variable == "MINITEXT_CACHE" else ["grade", "05"]
    code, _, err = minitext(*command)
    assert code == 2 and err.count("\n") == 1 and "gs://b/e is in a bucket" in err
    assert list(tmp_path.iterdir()) == []


def test_a_command_without_words_shows_its_help(minitext):
    code, out, err = minitext("launch")
    assert code == 2 and "k8s" in out + err and "error" not in err


def test_bad_data_files_are_one_line(minitext, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 300)
    (tmp_path / "short.txt").write_text("too short")
    for name, words in {
        "empty.txt": "empty",
        "latin.txt": "UTF-8",
        "short.txt": "data.seq_len",
    }.items():
        code, _, err = minitext(
            "train", "data.source=files", f"data.path={tmp_path / name}", f"run.dir={tmp_path}/runs"
        )
        assert code == 2 and words in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("place", ["/proc", "/dev/null", "a file"])
def test_where_no_folder_can_be_made_the_system_says_why(minitext, trained, tmp_path, place):
    (tmp_path / "a file").touch()
    place = tmp_path / place  # an absolute one stays as it is
    said = "No such file or directory" if place.name == "proc" else "Not a directory"
    for words in (
        ["data", "pack", place / "e", "data.source=files", f"data.path={__file__}"],
        ["export", trained, place / "e"],
        ["train", *SMALL, f"run.dir={place}", "run.name=e"],
    ):
        code, out, err = minitext(*words)
        assert code == 2 and out == "" and err.count("\n") == 1
        assert f"cannot write {'to ' * (words[0] == 'train')}{place}/e: {said}" in err
        assert ("run.dir" in err) == (words[0] == "train") and "resume" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


def test_a_run_of_another_model_is_refused_and_left_alone(minitext, trained):
    before = (trained / "config.yml").read_text()
    code, _, err = minitext(
        "train", f"run.dir={trained.parent}", "run.name=a", *SMALL, "model.mlp=32"
    )
    assert code == 2 and "model.mlp=16, not 32" in err
    assert (trained / "config.yml").read_text() == before


# --- serve


MESH = ["--tensor-parallel-size", "2", "--data-parallel-size", "2"]


def start_serving(server, trained, said, *options):
    """Returns a server's process id and address."""
    said.touch()
    words = ["--port", "0", "--served-model-name", "it", *options]
    pid = server.start("serve", trained, *words, output=said)
    end = time.monotonic() + 60
    while not (found := re.search(r"ask it: curl (\S+)/v1/completions", said.read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)
    return pid, found[1]


@pytest.mark.parametrize("options", [[], pytest.param(MESH, marks=pytest.mark.audit)])
def test_a_run_is_served_until_sigterm(server, trained, tmp_path, options):
    pid, address = start_serving(server, trained, tmp_path / "said", *options)
    request = urllib.request.Request(
        f"{address}/v1/completions",
        b'{"prompt": "the", "max_tokens": 3}',
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["model"] == "it"
    os.kill(pid, signal.SIGTERM)
    assert server.wait() == 0
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_artefacts_are_served_until_sigterm(server, minitext, trained, tmp_path):
    """A run, exported and served without its code, goes on from a text as `minitext generate` does."""
    assert minitext("export", trained, tmp_path / "lm", "--format", "stablehlo")[0] == 0
    said = tmp_path / "said"
    said.touch()
    words = ["--port", "0", "--max-batch", "4"]
    pid = server.start("serve", tmp_path / "lm", *words, output=said)
    end = time.monotonic() + 60
    while not (found := re.search(r"served at (\S+/v2): a 2\n", said.read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)
    manifest = json.loads((tmp_path / "lm" / "manifest.json").read_text())

    datatypes = {"int32": "INT32", "float32": "FP32"}

    def ask(function, **arrays):
        types = manifest["functions"][function]["inputs"]
        inputs = [
            {"name": name, "shape": list(arrays[name].shape), "datatype": datatypes[x["dtype"]],
             "data": arrays[name].ravel().tolist()}
            for name, x in types.items()
        ]  # fmt: skip
        body = json.dumps({"inputs": inputs}).encode()
        path = f"{found[1]}/models/a.{function}/infer"
        request = urllib.request.Request(path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            outputs = json.load(answer)["outputs"]
        return {one["name"]: np.array(one["data"], "f4").reshape(one["shape"]) for one in outputs}

    prompt, sizes = np.frombuffer(b"the", np.uint8).astype("i4"), {"b": 1, "t": 3, "s": 8}
    room = {
        name: np.zeros([sizes.get(size, size) for size in x["shape"]], x["dtype"])
        for name, x in manifest["functions"]["prefill"]["inputs"].items()
    }
    outputs = ask("prefill", **{**room, "tokens": prompt[None], "lengths": np.array([3], "i4")})
    text = []
    for length in range(3, 7):
        text.append(int(outputs.pop("logits").argmax()))
        token = np.array(text[-1:], "i4")
        outputs = ask("decode", tokens=token, lengths=np.array([length], "i4"), **outputs)
    greedy = "generate", trained, "--prompt", "the", "--temperature", "0", "--max-tokens", "4"
    assert bytes(text).decode(errors="replace") in minitext(*greedy)[1]
    os.kill(pid, signal.SIGTERM)
    assert server.wait() == 0
    assert "Traceback" not in said.read_text()


@pytest.mark.audit
@pytest.mark.timeout(3600)
def test_twenty_thousand_requests_leave_memory_as_it_was(server, trained, tmp_path):
    """Sixteen readers ask for short texts, some as streams and some of which they leave early."""
    pid, address = start_serving(server, trained, tmp_path / "said")
    host, process = address.removeprefix("http://"), psutil.Process(pid)

    def read(numbers):
        connection = http.client.HTTPConnection(host, timeout=120)
        answered = 0
        for i in numbers:
            asked = {
                "prompt": "w" * (i % 5) + str(i),
                "max_tokens": 1 + i % 4,
                "seed": i,
                "stream": i % 7 == 0,
            }
            connection.request(
                "POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            if i % 49 == 0:  # a stream whose reader hangs up
                answer.read(1)
                connection.close()
                connection = http.client.HTTPConnection(host, timeout=120)
            else:
                body = answer.read()
                assert (
                    body.endswith(b"data: [DONE]\n\n")
                    if asked["stream"]
                    else json.loads(body)["choices"]
                )
            answered += 1
        connection.close()
        return answered

    sizes, each = [], 2_500
    with ThreadPoolExecutor(16) as readers:
        for part in range(8):
            numbers = range(part * each, (part + 1) * each)
            assert sum(readers.map(read, [numbers[k::16] for k in range(16)])) == each
            sizes.append(process.memory_info().rss)
    print("MiB after each 2,500 requests:", [size >> 20 for size in sizes])
    assert max(sizes[4:]) < sizes[3] * 1.02 + (4 << 20)
    os.kill(pid, signal.SIGTERM)
    assert server.wait() == 0
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_what_cannot_be_served_is_one_line(minitext, trained, tmp_path, monkeypatch):
    artefact = tmp_path / "artefact"
    artefact.mkdir()
    (artefact / "manifest.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            (
                [trained, "--port", port],
                f"cannot listen on 127.0.0.1:{port}: address already in use",
            ),
            (
                [trained, "--host", "no.such.host.invalid", "--port", 0],
                "cannot listen on no.such.host.invalid:0",
            ),
            ([tmp_path / "none", "--port", 0], "none"),
            ([trained, "--port", 0, "--api-key", " "], "the API key is empty"),
            ([trained, "--port", 70000], "--port"),
            ([trained, tmp_path], "is a run, and"),
            ([trained, trained], "are runs: serve one"),
            ([trained, "--max-batch", 4], "--max-batch has no effect on a run"),
            (
                [trained, "--port", 0, "--max-tokens-in-flight", 10**20],
                "lower --max-tokens-in-flight",
            ),
            ([artefact, "--adapter", "x=y"], "--adapter has no effect on artefacts"),
            ([artefact, "--port", 0], "is not an artefact's manifest"),
            ([tmp_path, "--port", 0], "is not an artefact's manifest"),
            ([artefact, "--max-batch", 0], "--max-batch"),
            ([artefact, "--max-wait-ms", "nan"], "--max-wait-ms"),
        ]
        for words, said in cases:
            code, out, err = minitext("serve", *words)
            assert (code, out, err.count("\n")) == (2, "", 1) and said in err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in ("minitext.inference.http_server", "minitext.inference.server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(name, raising=False)
    code, _, err = minitext("serve", trained)
    assert code == 2 and "pip install 'minitext[serve]'" in err and err.count("\n") == 1
