"""Settings of adapters are refused in one line where they can't be."""

import pytest

import minitext as mt
from minitext.config.config import ConfigError


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["model.lora.rank=-1"], "choose 0 or more"),
        (["model.lora.alpha=0"], "choose more than 0"),
        (["model.lora.modules='('"], "is not a regular expression"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(lines, says):
    with pytest.raises(ConfigError, match=says) as error:
        mt.load_config("laptop", ["model.lora.rank=4", *lines])
    assert "\n" not in str(error.value)


def test_the_factor_is_alpha_over_rank():
    assert (
        mt.load_config("laptop", ["model.lora.rank=4", "model.lora.alpha=6"]).model.lora.scale
        == 1.5
    )
