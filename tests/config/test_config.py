"""Configuration: layers, provenance, and one clear line for every problem."""

from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from minitext.config.config import (
    Config,
    ConfigError,
    flatten,
    layout,
    load_config,
    presets,
    to_yaml,
)
from minitext.config.model import GQAConfig, MLAConfig, ModelConfig
from minitext.errors import UserError


def problems(*overrides, preset="laptop"):
    with pytest.raises(ConfigError) as caught:
        load_config(preset, overrides)
    assert caught.value.exit_code == 2
    for line in caught.value.problems:
        assert "\n" not in line and "Traceback" not in line and len(line) < 400
    return caught.value.problems


@pytest.mark.parametrize("preset", presets())
def test_preset_round_trips_through_its_resolved_file(preset, tmp_path):
    cfg = load_config(preset)
    (tmp_path / "config.yml").write_text(to_yaml(cfg))
    again = load_config(None, [f"config={tmp_path / 'config.yml'}"])
    assert again == cfg
    assert to_yaml(again) == to_yaml(cfg)


def test_layers_override_in_order_and_are_remembered(tmp_path):
    (tmp_path / "mine.yml").write_text("train: {steps: 7, seed: 3}\n")
    cfg = load_config("laptop", ["train.seed=5", f"config={tmp_path / 'mine.yml'}"])
    assert (cfg.train.steps, cfg.train.seed) == (7, 5)
    assert cfg.provenance("train.steps") == f"file {tmp_path / 'mine.yml'}"
    assert cfg.provenance("train.seed") == "command line"
    assert cfg.provenance("model.layers") == "preset laptop"
    assert cfg.provenance("optim.b1") == "default"
    assert "# command line" in to_yaml(cfg, provenance=True)


def test_configuration_is_frozen():
    with pytest.raises(ValidationError):
        load_config("laptop").train.steps = 3


def test_every_key_is_described_and_there_are_not_too_many():
    assert len(layout().keys) <= 200
    for key, field in layout().keys.items():
        assert field.description, key


NAMES = {
    "run.name", "data.text_key", "data.tfds_name", "data.tfds_split", "data.hf_name", "data.hf_subset", "data.hf_split",
    "model.lora.modules",
}  # fmt: skip


def test_every_key_that_names_a_path_refuses_addresses_and_knows_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    paths = [
        k
        for k, field in layout().keys.items()
        if field.annotation in (str, str | None) and k not in NAMES
    ]
    assert {"run.dir", "data.path", "checkpoint.local_dir"} < set(paths)
    needs = {
        "data.path": ["data.source=files"],
        "data.chat_template": ["data.source=conversations", "data.hf_name=a"],
    }
    for key in paths:
        assert load_config("laptop", [f"{key}=a:b/c.x", *needs.get(key, [])])
        cfg = load_config("laptop", [f"{key}=~/c.x", *needs.get(key, [])])
        assert flatten(cfg.model_dump())[key] == "/home/ada/c.x"
        for address in (
            "gs://b/a c",
            "S3://b/x",
            "gs:/b",
            "file:/x",
            "https://h/x",
            "hdfs://h:90/x",
        ):
            (line,) = problems(f"{key}={address}")
            assert line.startswith(f"{key}={address} is ")
    (line,) = problems(
        "data.source=mixture", "data.mixture=[{weight: 1, source: files, path: 'gs://b/x'}]"
    )
    assert line.startswith("data.mixture.0.path=gs://b/x is in a bucket")
    (line,) = problems("data.source=files", f"data.path={'n' * 300}.txt")
    assert "304 bytes, and 255 is the limit" in line
    (line,) = problems("run.dir=gs://b/runs")
    assert line.endswith("100000 b /mnt/b`, and name /mnt/b/runs")


def test_unknown_names_get_a_suggestion():
    assert "did you mean laptop" in problems(preset="laptp")[0]
    assert "did you mean model.heads" in problems("model.headz=3")[0]
    assert "did you mean optim.learning_rate" in problems("learning_rte=3")[0]


def test_a_section_without_keys_is_called_one(tmp_path):
    (tmp_path / "a.yml").write_text("train: 5\n")
    (line,) = problems(f"config={tmp_path}/a.yml")
    assert "train (file" in line and "is a section of keys: set one of them, such as train." in line
    (tmp_path / "a.yml").write_text("[5]\n")
    (line,) = problems(f"config={tmp_path}/a.yml")
    assert line == f"config={tmp_path}/a.yml: [5] is not a mapping of keys to values"


def test_all_problems_are_reported_together():
    found = problems(
        "model.embed=100", "model.heads=3", "train.microbatches=5", "data.source=files"
    )
    assert len(found) == 3
    assert any("model.embed=100" in f and "model.heads=3" in f and "1, 2, 4, 5" in f for f in found)
    assert any("train.microbatches=5" in f for f in found)
    assert any("data.path" in f for f in found)


@pytest.mark.parametrize(
    "override", ["train.steps=0", "train.steps=many", "train.steps=1.5", "data.seq_len=1", "optim.learning_rate=.nan",
                 "data.source=web", "model.kv_heads=3", "model.head_dim=3", "mesh.fsdp=0", "mesh.fsdp=-1", "steps",
                 "=3", "train=", "model.attention=null", "config=/nowhere.yml", "config=/", "train.steps=[1",
                 "a.b.c=1"],
)  # fmt: skip
def test_bad_override_is_one_line_that_names_its_key(override):
    key = override.partition("=")[0]
    assert any(key in problem for problem in problems(override))


@given(st.lists(st.text(max_size=40), max_size=3))
def test_any_text_as_override_resolves_or_says_why(texts):
    try:
        assert isinstance(load_config("laptop", texts), Config)
    except UserError as error:
        assert str(error)


_values = st.one_of(
    st.integers(), st.floats(), st.text(max_size=20), st.booleans(), st.none(), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(list(layout().keys)), _values, max_size=4))
def test_any_value_for_a_real_key_resolves_or_says_why(values):
    overrides = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in values.items()
    ]
    try:
        cfg = load_config("laptop", overrides)
    except UserError as error:
        assert str(error)
        return
    assert load_config("laptop", overrides) == cfg


def test_a_window_is_no_number_to_the_base_60():
    (problem,) = problems("profile.steps=6:8")
    assert "profile.steps=6:8" in problem and "whole number" in problem


def test_hostile_yaml_does_not_get_through():
    for value in (
        "[" * 5000,
        "&a [*a]",
        "!!python/object/apply:os.system [ls]",
        "9" * 5000,
        "\x00",
        "\ud800",
    ):
        problems(f"train.steps={value}")


MLA = ("model.attention.kind=mla", "model.attention.kv_rank=24")


def test_a_variant_has_its_own_keys_and_is_read_back(tmp_path):
    cfg = load_config("laptop", MLA)
    assert isinstance(cfg.model.attention, MLAConfig) and cfg.model.attention.kv_rank == 24
    (tmp_path / "config.yml").write_text(to_yaml(cfg, provenance=True))
    again = load_config(None, [f"config={tmp_path / 'config.yml'}"])
    assert again == cfg and "kv_rank: 24" in to_yaml(again)
    # A higher layer may choose the other kind; what was set for this one goes, what both have stays.
    settings = ["model.attention.impl=xla", *MLA]
    cfg = load_config("laptop", settings).replace({"model.attention.kind": "gqa"})
    assert cfg.model.attention == GQAConfig(impl="xla")
    assert cfg.provenance("model.attention.kv_rank") == "default"
    assert cfg.replace({"model.attention.kind": "mla"}).model.attention.impl == "xla"
    field = layout().keys["model.attention.kind"]
    assert get_args(field.annotation) == ("gqa", "mla", "deltanet") and field.default == "gqa"
    assert ModelConfig(attention={"impl": "xla"}).attention == GQAConfig(impl="xla")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["model.attention.kv_rank=3"], "has no effect with model.attention.kind=gqa: set model.attention.kind=mla"),
        (["model.attention.kind=mlp"], "model.attention.kind=mlp (command line): choose gqa or mla or deltanet"),
        (["model.attention.kind=[1]"], "choose gqa or mla or deltanet"),
        ([*MLA, "model.attention.rope_dim=5"], "model.attention.rope_dim=5 is odd"),
        ([*MLA, "model.attention.rope_dim=wide"], "model.attention.rope_dim=wide (command line): choose"),
        ([*MLA, "model.attention.v_dim=0"], "model.attention.v_dim=0 (command line): choose 1 or more"),
        ([*MLA, "model.kv_heads=2"], "model.kv_heads=2 has no effect"),
        ([*MLA, "model.head_dim=8"], "model.head_dim=8 has no effect"),
        (["model.remat=names", "model.remat_save=[latents]"], "leave them out with model.attention.kind=gqa"),
    ],
)  # fmt: skip
def test_a_variant_refuses_what_is_not_its_own(settings, says):
    (problem,) = problems(*settings)
    assert says in problem


def test_sections_check_themselves_when_made_alone():
    with pytest.raises(ValidationError, match=r"model\.heads=3"):
        ModelConfig(embed=100, heads=3)


def test_replace_checks_again():
    cfg = load_config("laptop")
    assert cfg.replace({"train.steps": 3}).train.steps == 3
    with pytest.raises(ConfigError):
        cfg.replace({"train.microbatches": 5})
