"""`minitext parity`: equal models are found equal, and a detail that is off is named with its layer."""

import json
import sys

import pytest

from minitext.errors import UserError
from minitext.inference import parity
from tests.conftest import audit_but
from tests.models import tiny_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("parity")
    tiny_models.theirs(*tiny_models.CASES["gemma2"]).save_pretrained(path)
    return path


@pytest.mark.audit
def test_equal_models_are_found_equal(folder, capsys):
    found = parity.compare(str(folder), length=12, continued=6)
    assert found.holds and (found.family, found.greedy) == ("gemma2", 6)
    assert len(found.layers) == 5 and max(found.layers) < 2e-5
    parity.print_parity(found)
    assert "equal but for rounding" in capsys.readouterr().out


@pytest.mark.parametrize("case", audit_but(("llama4",), ("gemma3", "llama4")))
def test_of_a_model_of_images_the_text_is_compared(case, tmp_path, capsys):
    tiny_models.theirs(*tiny_models.WRAPPED[case]).save_pretrained(tmp_path)
    found = parity.compare(str(tmp_path), length=8, continued=2)
    assert found.holds and found.family == f"{case}_text"
    parity.print_parity(found)
    assert "left unread" in found.unread and found.unread in capsys.readouterr().out


def test_the_first_layer_that_departs_is_named(folder, monkeypatch):
    read = parity.families.config

    def off(values):  # in the file every other layer has a window, from the first on
        types = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
        return read(values | {"layer_types": types})

    monkeypatch.setattr(parity.families, "config", off)
    found = parity.compare(str(folder), length=12, continued=1)
    assert not found.holds and found.differs == 1
    json.dumps(found.to_json())


def test_a_layer_of_nan_departs():
    assert parity.first_apart([1e-6, float("nan"), 1]) == 1
    assert parity.first_apart([1e-6, 0]) is None


def test_what_is_missing_is_said(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"has no config\.json"):
        parity.compare(str(tmp_path))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(UserError, match="is not JSON"):
        parity.compare(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"minitext\[parity\]"):
        parity.compare(str(folder))
