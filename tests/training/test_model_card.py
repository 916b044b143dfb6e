"""Model cards say what the run directory says, and unknown where it says nothing."""

import json
import re

import pytest
import yaml

import minitext as mt
from minitext.config.config import to_yaml
from minitext.training import model_card, run_dir
from tests.conftest import TINY

PATH = "/home/someone/secret/tales of two.txt"


def write_run(folder, *settings, metrics=True):
    cfg = mt.load_config("laptop", [*TINY, "train.steps=9", *settings])
    folder.mkdir()
    (folder / "config.yml").write_text(to_yaml(cfg))
    lines = [
        {"step": 1, "loss": 5.0, "tokens": 100},
        {"step": 2, "loss": 4.25, "tokens": 90, "val_loss": 4.5},
        {"step": 3, "loss": 3.0, "tokens": 80, "val_loss": 3.5},
    ]
    if metrics:
        text = "\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo'
        (folder / "metrics.jsonl").write_text(text)
    return cfg


def read(text):
    """Returns the front matter, and the rows of the table."""
    _, front, rest = text.split("---\n", 2)
    rows = re.findall(r"^\| (.+?) \| (.*) \|$", rest, re.MULTILINE)
    return yaml.safe_load(front), dict(rows)


def make(folder, cfg, step=2, **more):
    options = {"form": "hf", "size": 4096, "dtype": "float32"} | more
    return model_card.card(folder, cfg, step, **options)


def test_a_card_says_what_the_run_says_up_to_the_step(tmp_path):
    cfg = write_run(tmp_path / "run", "data.source=files", f"data.path={PATH}")
    front, rows = read(make(tmp_path / "run", cfg, licence="apache-2.0"))
    assert front["license"] == rows["Licence"] == "apache-2.0"
    assert rows["Training data"] == "files: tales of two.txt"
    assert rows["Steps"] == "2 of 9" and rows["Tokens seen"] == "190 targets"
    assert rows["Loss in training"].startswith("4.2500") and "step 2" in rows["Loss in training"]
    assert rows["Loss in validation"].startswith("4.5000")
    assert "4.00 KiB (4,096 bytes)" in rows["Weights"]
    assert rows["Evaluation"].startswith("unknown")
    assert "someone" not in make(tmp_path / "run", cfg)


def test_merged_adapters_began_from_the_run_beside_which_they_were_trained(tmp_path):
    cfg = write_run(tmp_path / "run", "model.lora.rank=2", "checkpoint.load_parameters=runs/base")
    merged = cfg.replace({"model.lora.rank": 0, "checkpoint.load_parameters": None})
    assert read(make(tmp_path / "run", merged))[1]["Began from"] == "base"


def test_only_the_loss_of_a_language_model_is_in_nats_for_each_token(tmp_path):
    settings = ["objective.kind=preference", "data.source=preferences", "data.path=a.jsonl"]
    for name, words, said in (("a", [], "4.2500 nats/token at"), ("b", settings, "4.2500 at")):
        rows = read(make(tmp_path / name, write_run(tmp_path / name, *words)))[1]
        assert rows["Loss in training"] == f"{said} step 2"


def test_what_is_not_known_is_unknown(tmp_path):
    cfg = write_run(tmp_path / "run", metrics=False)
    front, rows = read(make(tmp_path / "run", cfg))
    assert front["license"] == "unknown"
    for title in ("Training data", "Objective", "Began from", "Steps", "Tokens seen", "Licence"):
        assert rows[title] == "unknown", title
    for title in ("Loss in training", "Loss in validation", "Evaluation"):
        assert rows[title].startswith("unknown"), title


def test_the_newest_evaluation_of_the_step_counts(tmp_path):
    folder = tmp_path / "run"
    cfg = write_run(folder)
    model_card.keep_evaluation(folder, 1, "validation", {"step": 1, "loss": 9.0})
    model_card.keep_evaluation(folder, 2, "validation", {"step": 2, "loss": 4.0})
    model_card.keep_evaluation(folder, 2, "arc_easy", {"acc": 0.25, "alias": "x", "known": True})
    model_card.keep_evaluation(folder, 2, "validation", {"step": 2, "loss": 4.5, "floor": None})
    _, rows = read(make(folder, cfg))
    assert rows["Evaluation"] == "validation: loss 4.5; arc_easy: acc 0.25"
    model_card.keep_evaluation(tmp_path / "nowhere", 2, "validation", {"loss": 1.0})


def test_names_stay_in_their_cells(tmp_path):
    folder = tmp_path / "a|b<script>"
    cfg = write_run(folder, "data.source=files", "data.path='/x/c|d <b>.txt'")
    text = make(folder, cfg)
    assert "<script>" not in text and "<b>" not in text
    assert len(read(text)[1]) == len(read(make(folder, cfg))[1])
    assert r"c\|d" in text


@pytest.mark.parametrize("licence", ["", " ", "a\nb", "x" * 101, "a\0b"])
def test_licences_that_cannot_be_meant_are_refused(tmp_path, minitext, licence):
    code, _, err = minitext("export", tmp_path, tmp_path / "out", "--license", licence)
    assert code == 2 and err.startswith("error: --license") and len(err.splitlines()) == 1


@pytest.mark.audit
def test_every_format_comes_with_its_card(tmp_path, minitext):
    """And the artefact, which has one too, runs what the run does."""
    words = [
        *TINY, "train.steps=2", "train.eval_batches=1", "model.layers=1", f"run.dir={tmp_path}", "run.name=run",
    ]  # fmt: skip
    assert not minitext("train", *words)[0]
    assert not minitext("eval", tmp_path / "run")[0]
    for form in ("orbax", "hf", "stablehlo"):
        code, _, err = minitext(
            "export", tmp_path / "run", tmp_path / form, "--format", form, "--license", "mit"
        )
        assert not code, err
        front, rows = read((tmp_path / form / "README.md").read_text())
        assert front["license"] == "mit" and rows["Steps"] == "2 of 2"
        assert rows["Evaluation"].startswith("validation: loss ")
    from minitext.inference import artefact
    from minitext.inference.shipped import generate

    loaded = artefact.load(tmp_path / "stablehlo")
    cfg, _, tokenizer, _ = run_dir.load_run(tmp_path / "run")
    said = loaded.manifest["text"]
    assert said["vocabulary"] == cfg.model.vocab and said["stop_tokens"] == [tokenizer.eod_id]
    assert said["context_length"] == cfg.data.seq_len and loaded.manifest["version"] == "2"
    prompt = tokenizer.encode("the queen")
    found = [int(x[0]) for x in generate.generate(*loaded, [prompt], 5)]
    words = ["--prompt", "the queen", "--max-tokens", "5", "--temperature", "0", "--json"]
    _, out, _ = minitext("generate", tmp_path / "run", *words)
    assert json.loads(out)["text"].startswith("the queen" + tokenizer.decode(found))
    code, _, err = minitext(
        "export", tmp_path / "run", tmp_path / "x.gguf", "--format", "gguf", "--license", "mit"
    )
    assert code == 2 and "--license" in err
    code, _, err = minitext(
        "export",
        tmp_path / "run",
        tmp_path / "full",
        "--format",
        "stablehlo",
        "--dtype",
        "bfloat16",
    )
    assert code == 2 and "--dtype" in err
