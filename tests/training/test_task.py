"""A run trains for what its configuration says, and says so."""

import pytest
from rich.console import Console

from minitext.errors import UserError
from minitext.observability.metrics import read_metrics
from minitext.training import run
from minitext.training.task import PRETRAINING


def test_a_task_of_another_kind_is_refused(tiny, tmp_path):
    cfg = tiny(
        "objective.kind=preference",
        "data.source=preferences",
        "data.path=a.jsonl",
        f"run.dir={tmp_path}",
        "run.name=a",
    )
    with pytest.raises(
        UserError, match=r"objective.kind=preference, and the run is one of objective.kind=lm"
    ):
        run.train(cfg, Console(quiet=True), task=PRETRAINING)
    assert not (tmp_path / "a").exists()


def test_validation_goes_into_the_line_and_is_printed(tiny, tmp_path):
    cfg = tiny(
        f"run.dir={tmp_path}",
        "run.name=a",
        "train.steps=2",
        "model.layers=1",
        "train.eval_every=1",
        "train.eval_batches=1",
    )
    console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    directory = run.train(cfg, console, task=PRETRAINING)
    lines = read_metrics(directory)
    assert [set(line) & {"val_loss"} for line in lines] == [{"val_loss"}] * 2
    said = console.export_text()
    assert f"validation loss {lines[0]['val_loss']:.4f} nats/token" in said
