"""MaxText's keys: each is answered with what minitext says, in one line, wherever it is written."""

import re

import pytest

from minitext.cli import main
from minitext.config import maxtext
from minitext.config.config import Config, ConfigError, layout, load_config

ROWS = [row for group in maxtext.groups() for row in group["rows"]]
SECTIONS = "|".join(Config.model_fields)

# MaxText's key -> what the answer must name: our keys, or how minitext does it where it has none.
SAID = {
    "hf_train_files": ["data.path", "data.source=files"],
    "dataset_type": ["data.source"],
    "global_parameter_scale": ["no key", "model.embed"],
    "per_device_batch_size": ["train.global_batch"],
    "ici_fsdp_parallelism": ["mesh.fsdp"],
    "dcn_data_parallelism": ["mesh.dcn.data", "mesh.data"],
    "dcn_expert_parallelism": ["mesh.dcn.expert"],
    "remat_policy": ["model.remat"],
    "base_emb_dim": ["model.embed"],
    "base_num_decoder_layers": ["model.layers"],
    "steps": ["train.steps"],
    "learning_rate": ["optim.learning_rate"],
    "enable_checkpointing": ["no key", "train.save_every"],
    "checkpoint_period": ["train.save_every"],
    "load_parameters_path": ["checkpoint.load_parameters"],
    "attention": ["model.attention.impl"],
    "megablox": ["no key", "grouped product"],
    "sparse_matmul": ["no key", "grouped product"],
    "capacity_factor": ["model.ffn.capacity_factor"],
    "packing": ["no key", "always packed"],
    "max_target_length": ["data.seq_len"],
    "tokenizer_path": ["data.tokenizer"],
    "run_name": ["run.name"],
    "base_output_directory": ["run.dir"],
    "profiler": ["profile.first_step"],
    "hf_path": ["data.hf_name"],
    "hf_name": ["data.hf_subset"],
    "gradient_accumulation_steps": ["train.microbatches"],
    "scan_layers": ["model.scan_layers"],
    "base_num_kv_heads": ["model.kv_heads"],
    "weight_dtype": ["no key", "float32"],
    "opt_type": ["optim.kind"],
    "compile_topology": ["target=v5p:4x4x4"],
    "collect_stack_trace": ["until May 2026", "train.hang_seconds"],
    "stack_trace_interval_seconds": ["until May 2026", "train.hang_seconds"],
}


def test_every_key_of_ours_in_the_answers_exists():
    """Also the choices: `data.source=files` is a value that the key takes."""
    known = layout().keys
    named = {
        (key, value)
        for row in ROWS
        for text in (row.get("here", ""), row.get("none", ""), row.get("note", ""))
        for key, value in re.findall(rf"\b((?:{SECTIONS})\.\w+(?:\.\w+)*)(?:=([\w]+))?", text)
    }
    assert len(named) > 80
    assert not {key for key, _ in named} - set(known)
    for key, value in named:
        if value:
            assert value in str(known[key].annotation) or value == "true", f"{key}={value}"


def test_the_answers_are_well_formed():
    found = [key for row in ROWS for key in row["maxtext"]]
    assert len(found) == len(set(found)) > 700
    for row in ROWS:
        assert ("here" in row) != ("none" in row), row
        assert set(row) <= {"maxtext", "here", "none", "note", "until"}, row
        assert all("\n" not in str(text) for text in row.values())
    assert not set(found) & set(layout().keys)


def refused_in_lines(monkeypatch, capsys, *words: str) -> list[str]:
    """The lines with which a command refuses its words."""
    monkeypatch.setattr("sys.argv", ["minitext", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


def refused(monkeypatch, capsys, *words: str) -> str:
    """The one line with which a command refuses its words."""
    (line,) = refused_in_lines(monkeypatch, capsys, *words)
    return line


@pytest.mark.parametrize("key", SAID)
def test_a_command_answers_with_ours(key, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(monkeypatch, capsys, "train", "laptop", f"{key}=4")
    assert line.startswith(f"error: {key} (command line) ")
    assert "MaxText" in line and all(word in line for word in SAID[key])
    assert not list(tmp_path.iterdir())


def test_files_python_and_explain_answer_too(tmp_path):
    file = tmp_path / "there.yml"
    file.write_text("per_device_batch_size: 12.0\ntokenizer_path: assets/tokenizer\n")
    with pytest.raises(ConfigError) as there:
        load_config(None, [f"config={file}"])
    assert len(there.value.problems) == 2
    for problem, ours in zip(
        there.value.problems, ("train.global_batch", "data.tokenizer"), strict=True
    ):
        assert f"(file {file}) is MaxText's name" in problem and ours in problem
    with pytest.raises(ConfigError, match="mesh.fsdp"):
        load_config("laptop").replace({"ici_fsdp_parallelism": 4})


def test_a_whole_file_of_maxtext_is_answered_on_one_screen(monkeypatch, capsys, tmp_path):
    file = tmp_path / "base.yml"
    keys = [row["maxtext"][0] for row in ROWS]
    file.write_text("".join(f"{key}: 1\n" for key in keys))
    lines = refused_in_lines(monkeypatch, capsys, "train", f"config={file}")
    assert len(lines) == 13
    assert all(key in line for key, line in zip(keys[:12], lines[:12], strict=True))
    assert f"and {len(keys) - 12} more" in lines[-1] and "book/maxtext.md" in lines[-1]
    with pytest.raises(ConfigError) as every:
        load_config("laptop", [f"config={file}"])
    assert len(every.value.problems) == len(keys)  # Python has them all


def test_explain_answers_too(monkeypatch, capsys):
    line = refused(monkeypatch, capsys, "config", "explain", "checkpoint_period")
    assert "train.save_every" in line


def test_a_file_where_a_preset_belongs_is_told_where_it_goes(monkeypatch, capsys):
    line = refused(monkeypatch, capsys, "train", "src/maxtext/configs/base.yml", "steps=3")
    assert "did you mean config=src/maxtext/configs/base.yml?" in line


def test_a_misspelt_key_of_ours_is_still_corrected():
    with pytest.raises(ConfigError, match=r"unknown key \(did you mean train.steps\?\)"):
        load_config("laptop", ["train.stepz=3"])


def test_a_run_with_known_keys_never_reads_the_answers():
    maxtext.groups.cache_clear()
    load_config("laptop", ["train.steps=3"])
    assert maxtext.groups.cache_info().currsize == 0
