"""MaxText's settings become ours: every key is mapped or named, and what they say together is the same step."""

import math

import pytest

from minitext.config import maxtext_command, maxtext_map, maxtext_model
from minitext.config.config import load_config, resolve
from minitext.config.maxtext_map import Machine, machine_of, train_words, translate
from minitext.config.quantization import QuantizationRule
from minitext.errors import UserError
from minitext.models.flops import count_params


def translated(words: str, machine: Machine | None = None):
    return translate(maxtext_command.read(words), machine or Machine("v5p", 16, 1, (2, 2, 4)))


def statuses(found) -> dict[str, str]:
    return {key.name: key.status for key in found.keys}


def test_values_that_are_not_taken_over_are_not_called_mapped():
    found = translated(
        "train.py base.yml dtype=float7 steps=-5 opt_type=lion data_shuffle_seed=.inf"
    )
    said = {key.name: key.ours for key in found.keys}
    assert set(statuses(found).values()) == {"none"}
    assert "not float7: model.dtype=bfloat16 is assumed" in said["dtype"]
    assert "-5 is no number of steps: 150,001 are assumed" in said["steps"]
    assert "not lion: adamw is assumed" in said["opt_type"]
    assert "data.seed doesn't take inf" in said["data_shuffle_seed"]
    assert found.cfg.model.dtype == "bfloat16" and found.cfg.train.steps == 150_001
    found = translated("train.py base.yml dtype=float32 steps=-1 learning_rate_schedule_steps=70")
    assert statuses(found) == dict.fromkeys(statuses(found), "mapped") | {
        "learning_rate_schedule_steps": statuses(found)["learning_rate_schedule_steps"]
    }
    assert found.cfg.train.steps == 70


def test_a_command_of_a_known_model():
    found = translated(
        "train.py base.yml model_name=llama2-7b per_device_batch_size=4 max_target_length=4096 ici_fsdp_parallelism=8 "
        "ici_tensor_parallelism=2 remat_policy=minimal steps=1000 warmup_steps_fraction=0.05 learning_rate=1e-3 "
        "gradient_accumulation_steps=2 dataset_type=synthetic z_loss_multiplier=1e-4 sa_block_q=512 bogus=1 "
        "enable_checkpointing=false hf_access_token=x run_name=a adam_b2=0.95"
    )
    cfg = found.cfg
    assert found.refused is None and cfg is not None
    assert count_params(cfg.model) == 6_738_415_616
    assert (
        cfg.train.global_batch == 4 * 16 * 2
        and cfg.train.microbatches == 2
        and cfg.data.seq_len == 4096
    )
    assert (cfg.mesh.fsdp, cfg.mesh.tensor, cfg.mesh.data) == (8, 2, 1)
    assert cfg.model.remat == "dots" and cfg.model.dtype == "bfloat16" and cfg.train.z_loss == 1e-4
    assert (
        cfg.optim.warmup_steps == 50
        and cfg.optim.learning_rate == 1e-3
        and cfg.data.source == "grammar"
    )
    said = statuses(found)
    assert said.pop("bogus") == "unknown"
    for key in ("sa_block_q", "enable_checkpointing", "hf_access_token"):
        assert said.pop(key) == "none"
    assert set(said.values()) <= {"mapped", "default"}
    assert all(key.ours for key in found.keys)
    # What is printed gives the same step.
    preset, *settings = found.words
    again = load_config(preset, settings)
    assert preset == "llama2-7b"
    assert again.replace({"train.eval_every": 100}) == cfg.replace({"train.eval_every": 100})


def test_every_model_is_mapped_or_refused_with_what_is_missing():
    sizes = {
        "llama3.1-8b": 8.03, "deepseek3-671b": 671.03, "mixtral-8x7b": 46.70, "gemma2-9b": 9.24, "gemma3-27b": 27.01,
        "qwen3-30b-a3b": 30.53, "gpt-oss-20b": 20.91, "kimi-k2-1t": 1026.41, "qwen3-next-80b-a3b": 79.67,
    }  # fmt: skip
    refused = {}
    for name in maxtext_model.facts()["models"]:
        values = (
            maxtext_model.facts()["defaults"]
            | {"model_name": name}
            | maxtext_model.named_model(name)
        )
        try:
            keys = maxtext_model.model_keys(values)
        except UserError as error:
            refused[name] = str(error)
            continue
        if name in sizes:
            assert (
                round(count_params(resolve([("MaxText", keys)]).model) / 1e9, 2) == sizes[name]
            ), name
    assert len(refused) == 23 and all("minitext lacks" in why for why in refused.values())
    assert "hyper-connections" in refused["deepseek4-284b"] and "LayerNorm" in refused["gpt3-175b"]
    other = translated("base.yml model_name=gemma2-2b local_rope_max_timescale=500").refused
    assert other is not None and "minitext has it with gemma3 alone" in other


def test_axes_within_and_across_slices():
    two = Machine("v5e", 16, 2, (4, 4))
    found = translated(
        "base.yml model_name=llama2-7b ici_tensor_parallelism=4 dcn_data_parallelism=2", two
    )
    assert found.cfg is not None
    assert (found.cfg.mesh.data, found.cfg.mesh.fsdp, found.cfg.mesh.tensor) == (2, 4, 4)
    across = translated(
        "base.yml model_name=llama2-7b dcn_fsdp_parallelism=2 dcn_data_parallelism=1", two
    )
    assert across.cfg is not None and across.cfg.mesh.fsdp == 32
    assert across.cfg.mesh.dcn.factors() == {"fsdp": 2}
    assert statuses(across)["dcn_fsdp_parallelism"] == "mapped"
    several = translated(
        "base.yml model_name=llama2-7b dcn_data_parallelism=-1 dcn_fsdp_parallelism=2 dcn_tensor_parallelism=2 "
        "dcn_tensor_sequence_parallelism=2 ici_tensor_parallelism=4",
        Machine("v5e", 16, 16, (4, 4)),
    )
    assert several.cfg is not None and several.cfg.mesh.sizes() == {
        "stage": 1, "data": 2, "fsdp": 8, "context": 1, "tensor": 16, "expert": 1,
    }  # fmt: skip
    assert several.cfg.mesh.dcn.factors() == {"data": 2, "fsdp": 2, "tensor": 4}
    assert {"mesh.dcn.data=2", "mesh.dcn.fsdp=2", "mesh.dcn.tensor=4"} <= set(several.words)
    with pytest.raises(UserError, match="ici_ axes multiply to 3"):
        translated("base.yml ici_fsdp_parallelism=3")
    with pytest.raises(UserError, match="one axis may be -1"):
        translated("base.yml ici_fsdp_parallelism=-1 ici_tensor_parallelism=-1")
    with pytest.raises(UserError, match="takes? 5|doesn't divide"):
        translated("base.yml ici_tensor_parallelism=5")


PARTS = {
    "opt_type=muon muon_beta=0.9 muon_weight_decay=0.2": {
        "optim.kind": "muon", "optim.b1": 0.9, "optim.weight_decay": 0.2,
    },
    "opt_type=sgd": {"optim.kind": "sgd", "optim.b1": 0.0, "optim.weight_decay": 0.0},
    "remat_policy=minimal_flash": {
        "model.remat": "names", "model.remat_save": ("qkv", "attention", "attention_out", "gate_up"),
    },
    "lr_schedule_type=wsd wsd_decay_steps_fraction=0.3": {"optim.schedule": "wsd", "optim.decay_share": 0.3},
    "remat_policy=custom context=device query_proj=device key_proj=device value_proj=device": {
        "model.remat": "names", "model.remat_save": ("attention", "qkv"),
    },
    "quantization=int8": {"model.quantization": (QuantizationRule(module="blocks/.*", dtype="int8"),)},
    "use_sft=true hf_path=a/b dataset_type=hf": {"data.source": "conversations", "data.hf_name": "a/b"},
    "use_dpo=true dpo.dpo_beta=0.2 hf_path=a/b": {"objective.kind": "preference", "objective.beta": 0.2},
    "rl.num_generations=4 rl.grpo_beta=0.1 rl.grpo_epsilon=0.3 dataset_name=a/b": {
        "objective.kind": "grpo", "objective.group": 4, "objective.kl": 0.1, "objective.clip": 0.3,
    },
    "lora.enable_lora=true lora.lora_rank=8 lora.lora_alpha=32": {"model.lora.rank": 8, "model.lora.alpha": 32},
    "profiler=xplane skip_first_n_steps_for_profiler=4 profiler_steps=2 run_name=a": {
        "profile.first_step": 5, "profile.steps": 2,
    },
    "per_device_batch_size=1.3 gradient_accumulation_steps=2": {"train.global_batch": 40},  # 20.8 on 16 devices
    "per_device_batch_size=0.05": {"train.global_batch": 1},
    "attention=dot_product": {"model.attention.impl": "xla"},
    "ici_context_parallelism=4 context_parallel_strategy=ring": {
        "mesh.context": 4, "model.attention.context": "ring",
    },
}  # fmt: skip


@pytest.mark.parametrize("words", PARTS)
def test_parts(words):
    found = translated(f"base.yml model_name=llama3.1-8b {words}")
    assert found.refused is None, found.refused
    for key, value in PARTS[words].items():
        node = found.cfg
        for part in key.split("."):
            node = getattr(node, part)
        assert node == value, key
    assert all(key.status in ("mapped", "default") for key in found.keys), found.keys


WRONG = (
    "base_emb_dim=wide", "scan_layers=perhaps", "steps=[1]", "per_device_batch_size=.nan",
    "num_experts=2.5 decoder_block=mixtral", "global_parameter_scale=3", "base_num_decoder_layers=99999999",
    "head_dim=-4", "vocab_size=1e30", "per_device_batch_size=-1", "per_device_batch_size=1e308",
)  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_values_of_the_wrong_type_are_refused_in_one_line(words):
    with pytest.raises(UserError) as error:
        found = translated(f"base.yml {words}")
        raise UserError(
            found.refused or "it was taken"
        )  # by our own settings, once it is one of them
    assert "\n" not in str(error.value)
    assert words.partition("=")[0].removeprefix("base_") in str(error.value)


def test_machines():
    assert machine_of("v5p-128", 1) == ("v5p", (4, 4, 4))
    assert machine_of("v5p-512", 1) == ("v5p", (4, 8, 8))
    assert machine_of("v6e-256", 2) == ("v6e", (16, 16))
    assert machine_of("v5litepod-16", 1) == ("v5e", (4, 4))
    assert machine_of("tpu7x-4x4x8", 1) == ("tpu7x", (4, 4, 8))
    assert machine_of("h100-mega-80gb-8", 4) == ("h100", (1, 4, 8))
    assert machine_of("n2-standard-8", 1) is None
    for count in (8, 16, 64, 1024):
        chip, shape = machine_of(f"v4-{count}", 1)
        assert chip == "v4" and math.prod(shape) == count // 2
    with pytest.raises(UserError, match="comes in slices"):
        machine_of("v5e-7", 1)


def test_the_shortest_words_give_the_configuration_back():
    for preset, more in (
        ("laptop", ["train.steps=7"]),
        ("mixtral-8x7b", []),
        ("gemma3-4b", ["mesh.fsdp=4"]),
    ):
        cfg = load_config(preset, more)
        words = train_words(cfg)
        assert words == [preset, *more]
    assert maxtext_map.same_key("learning_rate") == "optim.learning_rate"
    assert maxtext_map.same_key("use_qwix_quantization") is None


def test_a_conversation_has_one_source():
    found = translated("sft.yml model_name=qwen3-4b hf_path=a/b train_split=train")
    said = {key.name: key.ours for key in found.keys}
    assert (
        said["hf_path"] == "data.hf_name=a/b"
        and said["dataset_type"] == "data.source=conversations"
    )
    assert not said["train_split"].startswith("data.tfds_split=train")


def test_reinforcement_learning_has_a_length_and_batches_of_its_own():
    found = translated(
        "python3 -m maxtext.trainers.post_train.rl.train_rl model_name=llama3.1-8b num_batches=500 batch_size=32 "
        "rl.num_generations=8 rl.num_iterations=2 train_micro_batch_size=8 per_device_batch_size=3 steps=7"
    )
    cfg = found.cfg
    assert cfg is not None and (cfg.train.steps, cfg.optim.warmup_steps) == (1000, 100)
    assert (cfg.train.global_batch, cfg.train.microbatches) == (256, 4)
    assert (cfg.objective.prompts, cfg.objective.group, cfg.objective.max_tokens) == (32, 8, 768)
    assert cfg.optim.min_ratio == 0 and cfg.optim.b2 == 0.99 and cfg.data.hf_name == "openai/gsm8k"
    assert statuses(found) | {"steps": "none", "per_device_batch_size": "none"} == statuses(found)


def test_a_topology_that_was_taken_is_mapped():
    words = "model_name=llama2-7b compile_topology=v5p-32 compile_topology_num_slices=1"
    assert statuses(translated(words))["compile_topology"] == "mapped"
    other = translated(words, Machine("v5e", 16, 1, (4, 4)))
    assert statuses(other)["compile_topology"] == "by hand"


def test_the_compilers_options_go_along():
    words = (
        "export LIBTPU_INIT_ARGS='--xla_tpu_scoped_vmem_limit_kib=98304 --megascale_grpc_port=3'\n"
        "python3 -m maxtext.trainers.pre_train.train base.yml model_name=llama2-7b "
        "compile_xla_flags='--xla_tpu_enable_async_collective_fusion=true'"
    )
    found = translated(words)
    assert found.cfg is not None and found.cfg.xla.options == (
        "xla_tpu_scoped_vmem_limit_kib=98304", "xla_tpu_enable_async_collective_fusion=true",
    )  # fmt: skip
    assert statuses(found)["compile_xla_flags"] == "mapped"
    assert any("--megascale_grpc_port=3 in LIBTPU_INIT_ARGS" in note for note in found.notes)
