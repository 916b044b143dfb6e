"""Names of adapters are those of the projections beside which they stand, in every family that has them alone."""

import pytest

import minitext as mt
from minitext.config.lora import LoraConfig
from minitext.errors import UserError
from minitext.models import peft_names

TINY = ["model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64"]


def model(**lora):
    cfg = mt.load_config("laptop", TINY).model
    return cfg.model_copy(update={"lora": LoraConfig(rank=2, **lora)})


def test_names_and_settings_lead_back_to_the_model():
    cfg = model(modules=".*/(attention/[qk]|ffn/down)|unembed")
    table = peft_names.table(cfg, "llama")
    names = [name for row in table.rows for _, name in row.sources()]
    assert len(names) == 2 * (2 * 3 + 1)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert "base_model.model.lm_head.lora_B.weight" in names
    said = peft_names.describe(cfg, "llama")
    assert said["target_modules"] == ["down_proj", "k_proj", "lm_head", "q_proj"]
    found = peft_names.lora_config(said, names, cfg, "llama")
    assert (found.rank, found.alpha) == (cfg.lora.rank, cfg.lora.alpha)
    again = cfg.model_copy(update={"lora": found})
    assert {row.path for row in peft_names.table(again, "llama").rows} == {
        row.path for row in table.rows
    }


def test_projections_that_are_stored_together_have_no_names():
    with pytest.raises(UserError, match="phi3 has no tensor for blocks/attention/q alone"):
        peft_names.table(model(modules="blocks/attention/q"), "phi3")
    with pytest.raises(UserError, match="are for another one"):
        peft_names.lora_config(
            {"peft_type": "LORA", "r": 1, "lora_alpha": 1}, ["x"], model(), "llama"
        )
