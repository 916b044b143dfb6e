"""The command line: help, exit codes, and one clear line for bad input."""

import json
import os
import subprocess
import sys
import time

import pytest

from minitext.cli import main
from tests.conftest import QUICK_FLAGS


@pytest.fixture
def minitext(monkeypatch, capsys):
    """Runs the command line in this process; returns exit code, stdout and stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["minitext", *map(str, words)])
        try:
            main.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return call


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
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "minitext", "--help"], capture_output=True, text=True
        )
        times.append(time.perf_counter() - start)
    for command in ("train", "generate", "eval", "compile", "grade", "config", "doctor"):
        assert command in done.stdout
    assert min(times) < 1.5


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


def test_eval_answers_in_words_and_in_json(minitext, trained):
    code, out, _ = minitext("eval", trained)
    assert code == 0 and "nats/token, floor" in out and "perplexity" in out
    assert json.loads(minitext("eval", trained, "--json")[1])["step"] == 2


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
        (["generate"], "RUN"),
        (["launch", "local", "--processes", "0", "--", "train"], "--processes 0: input should be greater"),
        (["grade", "--seed", "soon"], "--seed soon: input should be a valid integer"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line_and_exit_code_2(minitext, words, named):
    code, out, err = minitext(*words)
    assert code == 2
    assert named in err and out == "" and err.count("\n") == 1


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


def test_a_run_of_another_model_is_refused_and_left_alone(minitext, trained):
    before = (trained / "config.yml").read_text()
    code, _, err = minitext(
        "train", f"run.dir={trained.parent}", "run.name=a", *SMALL, "model.mlp=32"
    )
    assert code == 2 and "model.mlp=16, not 32" in err
    assert (trained / "config.yml").read_text() == before
