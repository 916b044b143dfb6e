"""Adapters mean the same here as in peft: logits, gradients, and the files in both directions."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from minitext.checkpoint import safetensors
from minitext.checkpoint.weights import open_weights
from minitext.config.lora import LoraConfig
from minitext.errors import UserError
from minitext.models import convert, peft_names
from minitext.models.transformer import Transformer
from minitext.training import peft, run, run_dir
from tests.conftest import audit_but
from tests.models.tiny_models import pair

TOKENS = np.random.default_rng(0).integers(1, 100, (2, 10))


def with_adapters(folder, found):
    """Our model of a tiny one of transformers with the adapters in a folder, and their names."""
    values = json.loads((folder / peft.SETTINGS).read_text())
    with open_weights(folder / peft.WEIGHTS) as weights:
        lora = peft_names.lora_config(values, weights.names(), found.cfg, found.name)
        cfg = found.cfg.model_copy(update={"lora": lora})
        graphdef, abstract, _ = nnx.split(
            nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))), nnx.LoRAParam, ...
        )
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), abstract
        )
        table = peft_names.table(cfg, found.name)
        adapters = convert.load(weights, table, like)
    return nnx.merge(graphdef, nnx.state(found.ours), adapters), table


@pytest.mark.parametrize("modules", audit_but(["all-linear"], [["q_proj", "v_proj"], "all-linear"]))
@pytest.mark.parametrize("rslora", audit_but([True], [False, True]))
def test_logits_and_gradients_are_pefts(tmp_path_factory, modules, rslora):
    theirs = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    found = pair("llama", tmp_path_factory.mktemp("llama"))
    config = theirs.LoraConfig(r=3, lora_alpha=8, target_modules=modules, use_rslora=rslora)
    model = theirs.get_peft_model(found.theirs, config)
    torch.manual_seed(0)
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data.copy_(0.15 * torch.randn(value.shape))
    folder = tmp_path_factory.mktemp("adapters")
    model.save_pretrained(folder)
    ours, table = with_adapters(folder, found)

    logits = model(torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(ours(TOKENS), logits.detach().numpy(), atol=2e-5)
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), torch.tensor(TOKENS[:, 1:]).flatten()
    )
    loss.backward()
    want = {
        name.replace(".default", ""): v.grad.numpy()
        for name, v in model.named_parameters()
        if v.grad is not None
    }
    graphdef, trained, rest = nnx.split(ours, nnx.LoRAParam, ...)

    def ours_loss(trained):
        logp_BTV = jax.nn.log_softmax(nnx.merge(graphdef, trained, rest)(TOKENS)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp_BTV, TOKENS[:, 1:, None], -1))

    value, grads = jax.jit(jax.value_and_grad(ours_loss))(trained)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-6)
    got = dict(zip(convert.tensors(table, grads), convert.values(table, grads), strict=True))
    assert got.keys() == want.keys() and len(got) == 3 * 2 * (2 if modules != "all-linear" else 7)
    for name, grad in got.items():
        # Terms cancel in the smallest entries: rounding is as large as the largest entries make it.
        atol = 2e-5 * np.abs(want[name]).max()
        np.testing.assert_allclose(grad, want[name], rtol=2e-4, atol=atol, err_msg=name)
    model.unload()  # leaves the cached model as it was


def test_what_peft_reads_is_what_it_writes(tmp_path_factory):
    theirs = pytest.importorskip("peft")
    found = pair("llama", tmp_path_factory.mktemp("llama"))
    lora = LoraConfig(rank=2, alpha=6, modules=".*/attention/[qo]")
    cfg = found.cfg.model_copy(update={"lora": lora})
    model = Transformer(cfg, rngs=nnx.Rngs(3))
    nnx.update(model, nnx.state(found.ours))
    state = nnx.state(model, nnx.LoRAParam)
    state = jax.tree.map(
        lambda x: 0.1 * jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), state
    )
    nnx.update(model, state)
    table, folder = peft_names.table(cfg, found.name), tmp_path_factory.mktemp("written")
    written = peft_names.describe(cfg, found.name)
    assert written["target_modules"] == ["o_proj", "q_proj"]
    (folder / peft.SETTINGS).write_text(json.dumps(written))
    tensors = {name: (shape, "F32") for name, shape in convert.tensors(table, state).items()}
    safetensors.write(
        folder / peft.WEIGHTS, tensors, convert.values(table, state), {"format": "pt"}
    )
    torch = pytest.importorskip("torch")
    read = theirs.PeftModel.from_pretrained(found.theirs, folder)
    with torch.no_grad():
        logits = read(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(model(TOKENS), logits, atol=2e-5)
    read.unload()


@pytest.mark.audit
def test_a_run_goes_out_and_comes_in_bit_equal(adapted, tmp_path):
    assert peft.export_peft(adapted / "tuned", tmp_path / "out") == 6
    count = peft.import_peft(tmp_path / "out", tmp_path / "back", adapted / "base")
    _, first, _, _ = run_dir.load_run(adapted / "tuned")
    cfg, second, _, _ = run_dir.load_run(tmp_path / "back")
    assert (cfg.model.lora.rank, cfg.model.lora.alpha) == (4, 8)
    adapters = jax.tree.leaves(nnx.to_pure_dict(first))
    for one, two in zip(adapters, jax.tree.leaves(nnx.to_pure_dict(second)), strict=True):
        np.testing.assert_array_equal(one, two)
    with open_weights(tmp_path / "out" / peft.WEIGHTS) as weights:
        assert weights.count == count
        names = weights.names()
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight" in names
    # It can be trained on.
    on = cfg.replace({"run.dir": str(tmp_path), "run.name": "on", "train.steps": 1, "optim.learning_rate": 0.01,
                      "checkpoint.load_parameters": str(tmp_path / "back")})  # fmt: skip
    run.train(on, Console(quiet=True))


@pytest.fixture(scope="module")
def exported(adapted, tmp_path_factory):
    """Adapters as peft keeps them; a test that changes them works on a copy."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    peft.export_peft(adapted / "tuned", folder)
    return folder


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "LOHA"}, "only LORA is read"),
        ({"use_dora": True}, "use_dora=true: adapters with it are not read"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"bias": "all"}, 'bias="all"'),
        ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights="pissa_niter_4": adapters with it are not read'),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens="),
        ({"r": 0}, "r=0 and lora_alpha=8.0: two positive numbers"),
        ({"r": 3}, "shape"),
    ],
)  # fmt: skip
def test_adapters_that_are_not_understood_are_refused(adapted, exported, tmp_path, change, says):
    shutil.copytree(exported, tmp_path / "out")
    values = json.loads((tmp_path / "out" / peft.SETTINGS).read_text())
    (tmp_path / "out" / peft.SETTINGS).write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=says) as error:
        peft.import_peft(tmp_path / "out", tmp_path / "back", adapted / "base")
    assert "\n" not in str(error.value) and not (tmp_path / "back").exists()


def test_a_run_without_adapters_has_none_to_export(adapted, tmp_path):
    with pytest.raises(UserError, match="has no adapters"):
        peft.export_peft(adapted / "base", tmp_path / "out")
