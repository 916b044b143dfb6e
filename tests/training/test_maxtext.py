"""Checkpoints of MaxText in and out: every number stays, and a model says what it says elsewhere."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from flax import nnx

from minitext.checkpoint import leaves
from minitext.checkpoint import maxtext as checkpoints
from minitext.cli import main
from minitext.config import maxtext_command, maxtext_model
from minitext.config.config import resolve
from minitext.errors import UserError
from minitext.models import convert, families, maxtext_names
from minitext.models.transformer import Transformer
from minitext.training import maxtext, run_dir
from tests.conftest import audit_but

# Facts about MaxText's keys; the sizes are ours.
SIZES = {
    "base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 2, "base_mlp_dim": 48, "head_dim": 8,
    "base_num_decoder_layers": 4, "vocab_size": 260,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24}
LATENT = {
    "base_num_kv_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "first_num_dense_layers": 1, "base_num_decoder_layers": 3,
}  # fmt: skip
CASES = {
    "llama2": {"model_name": "llama2-7b"},
    "llama31": {"model_name": "llama3.1-8b"},
    "mistral": {"model_name": "mistral-7b"},
    "mixtral": {"model_name": "mixtral-8x7b", **MOE},
    "gemma": {"model_name": "gemma-2b"},
    "gemma2": {"model_name": "gemma2-2b", "sliding_window_size": 5},
    "gemma3": {"model_name": "gemma3-4b", "sliding_window_size": 5, "base_num_decoder_layers": 8},
    "qwen2": {"model_name": "qwen2.5-7b"},
    "qwen3": {"model_name": "qwen3-0.6b"},
    "qwen3moe": {"model_name": "qwen3-30b-a3b", **MOE},
    "deepseek2": {"model_name": "deepseek2-16b", **MOE, **LATENT, "q_lora_rank": 0},
    "deepseek3": {"model_name": "deepseek3-671b", **MOE, **LATENT, "q_lora_rank": 24},
}  # fmt: skip


def words(case: str, **more) -> list[str]:
    return [f"{key}={value}" for key, value in (SIZES | CASES[case] | more).items()]


def described(case: str):
    """MaxText's values, our model, and the names of its parameters."""
    values = maxtext_command.settings(words(case)).values
    model = resolve([("MaxText", maxtext_model.model_keys(values, exact=True))]).model
    return (
        values,
        model,
        maxtext_names.table(model, values["decoder_block"], maxtext_model.interleaves(values)),
    )


def drawn(model):
    """Random parameters, norms near one."""
    shapes = nnx.state(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))), nnx.Param)
    rng = np.random.default_rng(1)

    def draw(path, x):
        is_norm = "norm" in jax.tree_util.keystr(path) and not model.norm_offset
        return jnp.asarray(is_norm + 0.1 * rng.normal(size=x.shape), x.dtype)

    return jax.tree.map_with_path(draw, shapes)


def theirs(case: str, scanned: bool) -> dict[str, np.ndarray]:
    """A checkpoint's arrays as MaxText lays them out, with random numbers: written down here, not by our table."""
    rng = np.random.default_rng(0)
    s = SIZES | CASES[case]
    D, N, K, H, F, L, V = (s[k] for k in ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim",
                                          "base_mlp_dim", "base_num_decoder_layers", "vocab_size"))  # fmt: skip
    layer = {
        "self_attention/query/kernel": (D, N, H), "self_attention/key/kernel": (D, K, H),
        "self_attention/value/kernel": (D, K, H), "self_attention/out/kernel": (N, H, D), "mlp/wi_0/kernel": (D, F),
        "mlp/wi_1/kernel": (D, F), "mlp/wo/kernel": (F, D), "pre_self_attention_layer_norm/scale": (D,),
        "post_self_attention_layer_norm/scale": (D,),
    }  # fmt: skip
    shapes = {
        "token_embedder/embedding": (V, D),
        "decoder/decoder_norm/scale": (D,),
        "decoder/logits_dense/kernel": (D, V),
    }
    for name, shape in layer.items():
        if scanned:
            shapes[f"decoder/layers/{name}"] = (shape[0], L, *shape[1:])
        else:
            shapes |= {f"decoder/layers_{i}/{name}": shape for i in range(L)}
    return {
        name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()
    }


def saved(folder, arrays, full=False):
    """Writes arrays with Orbax alone, as parameters or within a training state."""
    tree: dict = {}
    for name, array in arrays.items():
        *path, leaf = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = array
    state = {"params": {"params": tree}}
    if full:
        moments = jax.tree.map(np.zeros_like, tree)
        state |= {
            "step": np.array(7),
            "opt_state": {"mu": {"params": moments}, "count": np.array(7)},
        }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(state))
    return folder


def read_back(folder) -> dict[str, np.ndarray]:
    """Reads a checkpoint's parameters with Orbax alone."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(folder)["params"]["params"]
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in flat}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


@pytest.mark.parametrize("scanned", audit_but([True], [True, False]))
def test_a_checkpoint_goes_in_and_out_bit_by_bit(tmp_path, scanned):
    arrays = theirs("llama31", scanned)
    saved(tmp_path / "5" / "items", arrays, full=True)
    mesh = ["mesh.fsdp=2", "mesh.tensor=2", "mesh.data=2"] if scanned else []
    found = maxtext.import_run(tmp_path, tmp_path / "run", words("llama31"), mesh)
    assert (
        found.is_scanned == scanned
        and found.left == ["opt_state", "step"]
        and found.block == "llama2"
    )
    assert found.parameters == sum(x.size for x in arrays.values())
    out = maxtext.export_run(tmp_path / "run", tmp_path / "out", scanned)
    assert out.is_exact and out.step == 0
    assert_same(read_back(out.items), arrays)
    said = yaml.safe_load((tmp_path / "out" / "model.yml").read_text())
    assert (
        said["base_emb_dim"] == 32
        and said["scan_layers"] == scanned
        and said["model_name"] == "llama3.1-8b"
    )
    # The other layout has the same numbers.
    other = maxtext.export_run(tmp_path / "run", tmp_path / "other", not scanned)
    again = maxtext.import_run(other.items, tmp_path / "again", words("llama31"))
    assert again.is_scanned != scanned
    for a, b in zip(
        *(leaves.named(run_dir.load_run(tmp_path / r)[1]).values() for r in ("run", "again")),
        strict=True,
    ):
        assert np.array_equal(a, b)


def test_the_commands(tmp_path, monkeypatch, capsys):
    arrays = theirs("llama2", False)
    saved(tmp_path / "c" / "12" / "items", arrays, full=True)
    (tmp_path / "config.yml").write_text(
        yaml.safe_dump(SIZES | CASES["llama2"] | {"learning_rate": 0.1})
    )

    def run(*line: str) -> str:
        monkeypatch.setattr("sys.argv", ["minitext", "maxtext", *line])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == 0
        return capsys.readouterr().err

    made = str(tmp_path / "run")
    said = run(
        "import",
        str(tmp_path / "c"),
        made,
        str(tmp_path / "config.yml"),
        "mesh.fsdp=8",
        "mesh.data=1",
    )
    assert "(llama2, unscanned)" in said and "left behind: opt_state, step" in said
    assert run_dir.read_config(made).mesh.fsdp == 8
    said = run("export", made, str(tmp_path / "out"), "--dtype", "bfloat16")
    assert (
        "numbers as they are" in said
        and f"load_parameters_path={tmp_path / 'out' / '0' / 'items'}" in said
    )
    back = read_back(tmp_path / "out" / "0" / "items")
    want = jnp.asarray(arrays["decoder/layers_2/mlp/wo/kernel"], jnp.bfloat16)
    assert np.array_equal(back["decoder/layers/mlp/wo/kernel"][:, 2], want)
    # What the export says of its model is enough to import it again.
    again = maxtext.import_run(
        tmp_path / "out", tmp_path / "again", [str(tmp_path / "out" / "model.yml")]
    )
    assert again.is_scanned and again.parameters == sum(x.size for x in arrays.values())


def test_neighbours_rotate_together_where_llama31_has_them():
    """Feature 2i of a head there is feature i here, and 2i + 1 is i + H/2; values and other blocks stay."""
    for case, pairs in (("llama31", True), ("llama2", False)):
        table = described(case)[2]
        rows = {row.path: row for row in table.rows}
        head = np.arange(32 * 4 * 8).reshape(32, 4, 8)
        ours = rows["blocks.attention.q.w"].view.of(head).reshape(32, 4, 8)
        wanted = np.concatenate([head[..., 0::2], head[..., 1::2]], -1) if pairs else head
        assert np.array_equal(ours, wanted)
        values = np.arange(32 * 2 * 8).reshape(32, 2, 8)
        assert np.array_equal(rows["blocks.attention.v.w"].view.of(values), values)


QUICK = ("deepseek3",)  # whose layers are stacked in another way


@pytest.mark.audit
@pytest.mark.parametrize(
    ("case", "scanned"),
    [
        pytest.param(case, scanned, marks=[] if scanned and case in QUICK else [pytest.mark.audit])
        for case in CASES
        for scanned in (True, False)
    ],
)
def test_every_family_is_written_and_read_with_the_same_numbers(tmp_path, case, scanned):
    values, model, table = described(case)
    params = drawn(model)
    stacks, cycle = maxtext_names.scan(model, values["decoder_block"])
    layers = model.layers // 2 if values["decoder_block"] == "gemma2" else model.layers
    arrays = maxtext.stacked_arrays(
        table, params, (stacks, cycle, layers) if scanned else None, 1, "float32"
    )
    checkpoints.write_checkpoint(tmp_path / "c", arrays)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    with checkpoints.open_checkpoint(tmp_path / "c") as weights:
        assert weights.is_scanned == scanned and not weights.left
        read = convert.load(weights, table, like)
    before, after = leaves.named(params), leaves.named(read)
    for name in before:
        assert np.array_equal(before[name], after[name]), name


HF = {
    "llama2": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5,
               "num_hidden_layers": 7},
    "deepseek3": {
        "model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
        "routed_scaling_factor": 2.5,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f == "llama2" else [pytest.mark.audit]) for f in HF],
)
def test_a_model_of_hugging_face_says_the_same_in_maxtexts_terms(family):
    """The scales that MaxText has in its weights are multiplied in, and the model with them has the same logits."""
    config = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-6, "eos_token_id": 1,
    } | HF[family]  # fmt: skip
    model = families.model_of(families.config(config))
    params = drawn(model)
    values, scaled, factors = maxtext.describe(model)
    assert values["decoder_block"] in (
        family,
        {"deepseek3": "deepseek"}.get(family),
        "llama2",
        "qwen2",
    )
    tokens = jax.random.randint(jax.random.key(2), (2, 12), 0, 64)
    with jax.default_matmul_precision("highest"):
        want = nnx.merge(nnx.graphdef(Transformer(model, rngs=nnx.Rngs(0))), params)(tokens)
        multiplied = maxtext.multiplied(params, factors)
        got = nnx.merge(nnx.graphdef(Transformer(scaled, rngs=nnx.Rngs(0))), multiplied)(tokens)
    scale = float(jnp.abs(want).max())
    np.testing.assert_allclose(got / scale, want / scale, atol=1e-5)


# --- what is refused


def test_checkpoints_of_another_shape_or_with_missing_parts_are_named(tmp_path):
    arrays = theirs("llama2", True)
    saved(tmp_path / "good", arrays)

    def refused(folder, *more: str) -> str:
        with pytest.raises(UserError) as error:
            maxtext.import_run(folder, tmp_path / "run", [*words("llama2"), *more])
        assert not (tmp_path / "run").exists() and "\n" not in str(error.value)
        return str(error.value)

    assert "the model needs 6" in refused(tmp_path / "good", "base_num_decoder_layers=6")
    assert "has the shape" in refused(tmp_path / "good", "base_mlp_dim=64")
    assert "param_scan_axis" in refused(tmp_path / "good", "param_scan_axis=3")
    assert "has no such model" in refused(tmp_path / "good", "model_name=llama9-1b")
    assert "vision" in refused(tmp_path / "good", "use_multimodal=true")
    without = {name: x for name, x in arrays.items() if "wo/kernel" not in name}
    assert "mlp/wo/kernel, which is missing" in refused(saved(tmp_path / "b", without))
    more = arrays | {"decoder/layers/mlp/extra/kernel": np.zeros((2, 4), np.float32)}
    assert "nothing uses the tensor decoder/layers_0/mlp/extra/kernel" in refused(
        saved(tmp_path / "c", more)
    )
    integers = arrays | {"decoder/decoder_norm/scale": np.ones(32, np.int8)}
    assert "is of type int8" in refused(saved(tmp_path / "d", integers))
    nan = arrays | {"decoder/decoder_norm/scale": np.full(32, np.nan, np.float32)}
    assert "NaN" in refused(saved(tmp_path / "e", nan))


def test_a_folder_that_is_damaged_or_no_checkpoint_is_refused(tmp_path):
    saved(tmp_path / "good", theirs("llama2", True))

    def refused(folder) -> str:
        with pytest.raises(UserError) as error:
            maxtext.import_run(folder, tmp_path / "run", words("llama2"))
        assert not (tmp_path / "run").exists() and "\n" not in str(error.value)
        return str(error.value)

    assert "has no _METADATA" in refused(tmp_path)
    assert "not a folder" in refused(tmp_path / "nowhere")
    for name in ("d", "ocdbt.process_0", "manifest.ocdbt"):
        broken = tmp_path / f"without-{name}"
        shutil.copytree(tmp_path / "good", broken)
        shutil.rmtree(broken / name) if (broken / name).is_dir() else (broken / name).unlink()
        assert "cannot be read" in refused(broken)
    torn = tmp_path / "torn"
    shutil.copytree(tmp_path / "good", torn)
    for file in (torn / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:40])
    assert "cannot be read" in refused(torn)
    said = json.loads((tmp_path / "good" / "_METADATA").read_text())
    trees = {
        "describes no tree": {},
        "an invalid name": {"x": {"key_metadata": [{"key": "../../x"}]}},
        "has no params": {"x": {"key_metadata": [{"key": "step"}]}},
    }
    for message, tree in trees.items():
        lying = tmp_path / message.replace(" ", "-")
        shutil.copytree(tmp_path / "good", lying)
        (lying / "_METADATA").write_text(json.dumps(said | {"tree_metadata": tree}))
        assert message in refused(lying)


@pytest.mark.parametrize("zarr3", [False, True])
def test_a_lost_part_of_an_array_is_not_read_as_zeros(tmp_path, zarr3):
    tree = {"params": {"params": {"a": np.ones((4, 2), np.float32), "b": np.zeros(3, np.float32)}}}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "c", args=ocp.args.PyTreeSave(tree))
    with checkpoints.open_checkpoint(tmp_path / "c") as weights:
        assert weights.read("a").all() and not weights.read("b").any()
        (tmp_path / "c" / "params.params.a" / ("c/0/0" if zarr3 else "0.0")).unlink()
        with pytest.raises(UserError, match="c: a cannot be read"):
            weights.read("a")


def test_metadata_that_does_not_say_whether_there_is_a_database(tmp_path):
    saved(tmp_path / "c", {"decoder/decoder_norm/scale": np.ones(4, np.float32)})
    said = json.loads((tmp_path / "c" / "_METADATA").read_text())
    assert said.pop("use_ocdbt") is True
    (tmp_path / "c" / "_METADATA").write_text(json.dumps(said))
    with checkpoints.open_checkpoint(tmp_path / "c") as weights:
        assert weights.read("decoder/decoder_norm/scale").all()


def test_a_model_that_maxtext_lacks_is_not_exported():
    model = families.model_of(families.config({
        "model_type": "phi3", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "partial_rotary_factor": 0.5, "sliding_window": 7,
    }))  # fmt: skip
    with pytest.raises(UserError, match="no block of MaxText's has this model"):
        maxtext.describe(model)
