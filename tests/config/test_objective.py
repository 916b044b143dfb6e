"""Objectives in a configuration: every setting has an effect, and those of another kind are refused."""

import pytest

import minitext as mt
from minitext.config.config import ConfigError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["objective.kind=preference", "objective.margin=1"], "no effect with objective.loss=dpo"),
        (
            ["objective.kind=preference", "objective.loss=ipo", "objective.label_smoothing=0.1"],
            "objective.label_smoothing=0.1 has no effect",
        ),
        (["objective.kind=preference", "objective.beta=0"], "objective.beta=0"),
        (["objective.beta=1"], "no effect with objective.kind=lm"),
        (["objective.kind=rl"], "objective.kind=rl"),
    ],
)
def test_settings_without_an_effect_are_refused(words, said):
    with pytest.raises(ConfigError) as error:
        mt.load_config("laptop", words)
    assert said in str(error.value)


def test_kinds():
    assert mt.load_config("laptop").objective.kind == "lm"
    words = ["objective.kind=preference", "objective.loss=simpo", "objective.margin=1"]
    data = ["data.source=preferences", "data.path=pairs.jsonl"]
    assert mt.load_config("laptop", words + data).objective.margin == 1
    for half in (words, data):
        with pytest.raises(ConfigError, match="pairs of answers"):
            mt.load_config("laptop", half)
