"""Which models the formulas for memory are for."""

import pytest

from minitext.cli import main
from minitext.errors import UserError
from minitext.perf.sizes import check_plain
from tests.conftest import TINY

MOE = "model.ffn.kind=moe"
# A setting that the formulas don't know, and how the refusal names it.
UNKNOWN = [
    (["model.dense_layers=1", MOE], "model.dense_layers=1"),
    (["model.period=[{}, {attention: {window: 8}}]"], "model.period"),
    (["model.period=[{mlp: 96}]"], "model.period"),
    (["model.norms=both"], "model.norms=both"),
    (["model.attention.qk_norm=head"], "model.attention.qk_norm=head"),
    (["model.attention.sinks=true"], "model.attention.sinks=true"),
    (["model.ffn.bias=true"], "model.ffn.bias=true"),
    ([MOE, "model.ffn.shared_experts=1", "model.ffn.shared_gate=true"], "model.ffn.shared_gate"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "named"), UNKNOWN, ids=str)
def test_a_model_that_the_formulas_dont_know_is_refused(tiny, settings, named):
    with pytest.raises(UserError, match="minitext compile") as refusal:
        check_plain(tiny(*settings).model, "memory")
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def test_plain_models_are_not_refused(tiny):
    for settings in ([], [MOE], ["model.attention.window=8", "model.logit_softcap=30"]):
        check_plain(tiny(*settings).model, "memory")


@pytest.mark.parametrize("command", ["memory", "plan"])
def test_the_commands_refuse_in_one_line(monkeypatch, capsys, command):
    words = [*TINY, "model.norms=after", *(["target=v5e:2x2"] if command == "plan" else [])]
    monkeypatch.setattr("sys.argv", ["minitext", command, "laptop", *words])
    with pytest.raises(SystemExit) as stop:
        main.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "model.norms=after" in error
    assert len(error.strip().splitlines()) == 1
