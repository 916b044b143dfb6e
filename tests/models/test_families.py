"""Published families: config.json and tensors in and out, and every number against transformers."""

import json
import math
import shutil
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import minitext as mt
from minitext import terminal
from minitext.book.equality import packed_batch
from minitext.checkpoint import leaves
from minitext.checkpoint.weights import open_weights
from minitext.config.config import presets, resolve
from minitext.errors import UserError
from minitext.inference.generate import Sampling, generate
from minitext.models import convert, families, flops
from minitext.models.hf_keys import differences, each_layer, fold, settings
from minitext.models.transformer import Transformer
from minitext.sharding.check import check_mesh
from minitext.sharding.mesh import make_mesh
from minitext.sharding.rules import RULES
from minitext.training.step import abstract_state, make_loss_fn, model_def
from tests.conftest import audit_but
from tests.models import tiny_models
from tests.models.tiny_models import (
    CASES,
    EXPERTS,
    GONE,
    LATENTS,
    ODD,
    ORIGINAL,
    PLAIN,
    SIZES,
    WRAPPED,
    tokens,
)

# Between them: scaled rotations, windows and periods, latents, groups and a dense prefix, sinks and biases, states.
QUICK = ("llama3", "gemma3", "deepseek", "gpt-oss", "qwen3-next")
LENGTH = 24  # beyond each window, chunk and original length of `CASES`
WITHIN = 2e-5  # of the largest logit


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    parent = tmp_path_factory.mktemp("families")
    return lambda case: tiny_models.pair(case, parent)


forward = nnx.jit(lambda model, tokens_BT: model(tokens_BT))


def theirs(model, tokens_BT):
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(tokens_BT), use_cache=False).logits.numpy()


def apart(a, b):
    """The largest difference, in parts of the largest number."""
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("case", audit_but(QUICK, CASES))
def test_logits(case, pair):
    both, tokens_BT = pair(case), tokens(LENGTH)
    assert apart(forward(both.ours, tokens_BT), theirs(both.theirs, tokens_BT)) < WITHIN


@pytest.mark.audit
@pytest.mark.parametrize("case", CASES)
def test_logits_at_every_length(case, pair):
    both = pair(case)
    for length in range(1, LENGTH + 1):
        tokens_BT = tokens(length)
        assert apart(forward(both.ours, tokens_BT), theirs(both.theirs, tokens_BT)) < WITHIN, length


IMAGE = 7  # the id that stands for an image in `WRAPPED`; in a text alone it's an ordinary token


# Lengths on both sides of the window and chunk of 5, and one beyond all else.
@pytest.mark.parametrize("length", audit_but([LENGTH], [4, 5, 6, LENGTH]))
@pytest.mark.parametrize("case", audit_but(("gemma3", "llama4"), WRAPPED))
def test_logits_of_a_wrapper_s_text(case, length, wrapped):
    both = wrapped(case)
    text = tokens(length)
    text[:, 1] = IMAGE
    assert apart(forward(both.ours, text), theirs(both.theirs, text)) < WITHIN


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    parent = tmp_path_factory.mktemp("wrapped")
    return cache(lambda case: tiny_models.both(*WRAPPED[case], parent / case))


def renamed(folder, target, rename):
    """Copies a model with other names of its tensors."""
    from safetensors.numpy import load_file, save_file

    target.mkdir()
    shutil.copy(folder / "config.json", target)
    tensors = load_file(folder / "model.safetensors")
    new = {rename(name): array for name, array in tensors.items()}
    save_file(new, target / "model.safetensors", {"format": "pt"})


def as_parameters(name):
    """The name that transformers 5 gives the parameter of such a tensor in Gemma 3."""
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    head, _, rest = name.partition(".")
    if head == "language_model":
        return f"model.language_model.{rest.removeprefix('model.')}"
    return f"model.{name}"


@pytest.mark.parametrize("case", ["gemma3", "gemma3-untied"])
def test_both_layouts_of_a_wrapper_hold_the_same(case, wrapped, tmp_path):
    both = wrapped(case)
    renamed(both.folder, tmp_path / "other", as_parameters)
    with open_weights(tmp_path / "other") as weights:
        assert set(weights.tensors) == set(both.theirs.state_dict()) - (
            {"lm_head.weight"} if both.cfg.tie_embeddings else set()
        )
    other = tiny_models.read_model(tmp_path / "other", both.cfg, both.name)
    ours, want = leaves.named(nnx.state(other)), leaves.named(nnx.state(both.ours))
    assert ours.keys() == want.keys()
    for name, array in ours.items():
        assert np.array_equal(array, want[name]), name


@pytest.mark.parametrize("case", ["gemma3", "llama4"])
def test_what_a_wrapper_leaves_unread(case, wrapped, tmp_path):
    both = wrapped(case)
    with open_weights(both.folder) as weights:
        table = families.table(both.cfg, both.name, weights.tensors)
        images = [n for n in weights.tensors if not n.startswith("language_model.")]
        assert {n for n in weights.tensors if table.ignores(n)} == set(images)
        size = sum(weights.tensors[name].size for name in images)
        line = table.left_unread(weights)
    assert f"{len(images)} tensors ({terminal.show_bytes(size)})" in line
    one = next(name for name in images if "layers.0" in name)
    other = one.replace("vision", "hearing", 1)
    renamed(both.folder, tmp_path / "other", lambda name: other if name == one else name)
    with pytest.raises(UserError, match=f"nothing uses the tensor {other}"):
        tiny_models.read_model(tmp_path / "other", both.cfg, both.name)
    # A text's tensor under the other layout's name is none of this one's.
    norm = "language_model.model.norm.weight"
    renamed(both.folder, tmp_path / "mixed", lambda n: as_parameters(n) if n == norm else n)
    with pytest.raises(UserError, match=f"needs the tensor {norm}, which is missing"):
        tiny_models.read_model(tmp_path / "mixed", both.cfg, both.name)


# As published with Gemma 3 4B, but for what says how to read images.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999, "eoi_token_index": 256_000,
    "eos_token_id": [1, 106], "image_token_index": 262_144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "vision_config": {},
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip


def test_the_keys_of_a_wrapper():
    """What text_config lacks is what transformers takes, and of keys beside it those count that count there."""
    from transformers import AutoConfig

    published = families.model_of(families.config(GEMMA3_4B))
    assert not differences(published, mt.load_config("gemma3-4b").model)
    text = families.text_config(GEMMA3_4B)
    assert (text["eos_token_id"], text["model_type"]) == ([1, 106], "gemma3_text")
    for name, wrapper in families.WRAPPERS.items():
        for given in ({}, {"text_config": None}, {"text_config": {"num_hidden_layers": 9}}):
            want = AutoConfig.for_model(name, **given).text_config.to_dict()
            assert families.config({"model_type": name} | given) == families.config(want)
            sizes = wrapper.sizes | (given.get("text_config") or {})
            assert {key: want[key] for key in sizes} == sizes


@pytest.mark.parametrize(
    "name, beside, inside, tied",
    [
        ("gemma3", {}, {"tie_word_embeddings": False}, True),
        ("gemma3", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
        ("gemma3", {"tie_word_embeddings": None}, {}, False),
        ("llama4", {"tie_word_embeddings": True}, {}, False),
        ("llama4", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),
    ],
)
def test_which_key_ties_a_wrapper_s_embeddings(name, beside, inside, tied):
    from transformers import AutoConfig, AutoModelForImageTextToText

    _, more = WRAPPED[name]
    values = more | beside | {"text_config": more["text_config"] | inside}
    assert families.config({"model_type": name} | values)["model.tie_embeddings"] == tied
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **values))
    assert bool(model.all_tied_weights_keys) == tied


@pytest.mark.audit
@pytest.mark.parametrize("case", ODD)
def test_odd_configurations(case, tmp_path):
    name, more, edit = ODD[case]
    both, tokens_BT = tiny_models.both(name, more, tmp_path, edit), tokens(LENGTH)
    assert apart(forward(both.ours, tokens_BT), theirs(both.theirs, tokens_BT)) < WITHIN
    config = families.to_hf(both.cfg, 64, both.name)
    assert config["model_type"] == both.name


@pytest.mark.audit
@pytest.mark.parametrize("length", [63, 64, 65, 130])
def test_logits_on_both_sides_of_a_chunk_of_states(length, pair):
    both, tokens_BT = pair("qwen3-next"), tokens(length)
    assert apart(forward(both.ours, tokens_BT), theirs(both.theirs, tokens_BT)) < WITHIN


@pytest.mark.audit  # in `make test`, test_parity compares greedy tokens of a model with windows
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [3, ORIGINAL - 2])
def test_greedy_tokens(case, length, pair):
    import torch

    both, prompt = pair(case), tokens(length, 1)
    made = both.theirs.generate(
        torch.as_tensor(prompt), max_new_tokens=12, do_sample=False, use_cache=True
    )
    greedy = Sampling(temperature=0)
    ours = generate(
        both.cfg, nnx.state(both.ours), prompt[0].tolist(), max_tokens=12, sampling=greedy
    )
    assert list(ours) == made[0, length:].tolist()


@pytest.mark.parametrize("case", audit_but(("llama3",), CASES))
def test_gradients_of_every_parameter(case, pair, tmp_path):
    both, tokens_BT = pair(case), tokens(LENGTH)
    found = gradients_of_theirs(both.theirs, tokens_BT, tmp_path)

    def loss(model):
        logits_BTV = jax.nn.log_softmax(model(tokens_BT)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logits_BTV, tokens_BT[:, 1:, None], axis=-1))

    ours = published(both, nnx.jit(nnx.grad(loss))(both.ours))
    assert set(ours) == set(found)
    # What moves all of a query's logits alike, as most of a bias of keys does, changes nothing: of its gradient there
    # is only rounding. It's measured against the other parameters' gradients.
    least = 1e-3 * np.median([np.abs(array).max() for array in found.values()])
    for name, array in ours.items():
        most = max(np.abs(found[name]).max(), least)
        assert np.abs(array - found[name]).max() < 1e-4 * most, name


def published(both, state):
    """A state's arrays under the names of a checkpoint."""
    table = families.table(both.cfg, both.name)
    return dict(zip(convert.tensors(table, state), convert.values(table, state), strict=True))


def gradients_of_theirs(model, tokens_BT, folder):
    """The gradient of each tensor, under the name that the tensor has in a checkpoint.

    Transformers keeps experts together that a checkpoint has apart. So gradients stand in for the model while it is
    saved.
    """
    import torch
    from safetensors.numpy import load_file

    model.zero_grad()
    rows = torch.as_tensor(tokens_BT)
    logits = model(rows, use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1)
    ).backward()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.buffers():
            value.zero_()
        for value in model.parameters():
            value.copy_(torch.zeros_like(value) if value.grad is None else value.grad)
        model.save_pretrained(folder)
        model.load_state_dict(kept)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("case", audit_but(QUICK, CASES))
def test_what_comes_in_goes_out(case, pair):
    both = pair(case)
    out = published(both, nnx.state(both.ours))
    with open_weights(both.folder) as weights:
        assert set(out) == set(weights.tensors)
        for name, array in out.items():
            assert np.array_equal(array, weights.read(name)), name
    config = families.to_hf(both.cfg, 64, both.name)
    assert config["model_type"] == both.name
    assert not differences(families.model_of(families.config(config)), both.cfg)
    assert families.logit_factor(both.cfg, config) == pytest.approx(1, abs=1e-15)


DENSE = EXPERTS | {"mlp_only_layers": [0, 1, 2], "num_experts": 8}
SHARED = {"shared_expert_intermediate_size": 40}


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("deepseek_v3", LATENTS | EXPERTS | {"first_k_dense_replace": 3}),
        ("glm4_moe", EXPERTS | {"first_k_dense_replace": 3}),
        ("llama4_text", {"moe_layers": [], "intermediate_size_mlp": 40}),
        ("llama4_text", {"no_rope_layers": [0, 0, 0]}),
        ("qwen2_moe", DENSE | SHARED),
        ("qwen3_moe", DENSE),
        ("qwen3_next", DENSE | SHARED),
        ("qwen3_next", EXPERTS | SHARED | {"layer_types": ["linear_attention"] * 3}),
        ("smollm3", {"no_rope_layers": [0, 0, 0]}),
    ],
)
def test_a_model_without_one_kind_of_layer_goes_out(family, values):
    from transformers import AutoConfig

    given = AutoConfig.for_model(family, **SIZES | values).to_dict()
    model = families.model_of(families.config(given))
    config = families.to_hf(model, 64, family)
    assert not differences(families.model_of(families.config(config)), model)


@pytest.mark.audit
@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_what_goes_out(case, pair, tmp_path):
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM

    both, tokens_BT = pair(case), tokens(LENGTH)
    out = published(both, nnx.state(both.ours))
    save_file(
        {k: np.ascontiguousarray(v) for k, v in out.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    (tmp_path / "config.json").write_text(json.dumps(families.to_hf(both.cfg, 64, both.name)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert np.array_equal(theirs(model, tokens_BT), theirs(both.theirs, tokens_BT))


# A setting -> another value; the size of each parameter stays.
OTHER = {
    "norms": {"both": "before"},
    "ffn.activation": {"silu": "gelu", "gelu": "silu", "gelu_tanh": "gelu", "clamped": "silu"},
    "ffn.router": {"softmax": "sigmoid", "sigmoid": "softmax"},
    "attention.qk_norm": {"l2": "none"},
    "rope.fraction": {1.0: 0.5, 0.5: 1.0, 0.75: 0.5, 0.34: 0.5, 0.25: 0.5},
    "ffn.groups": {4: 2},
}


# Lengths and numbers that may be smaller while all parameters keep their shapes.
SMALLER = (
    "attention.window", "attention.chunk", "attention.temperature_length", "ffn.experts_per_token",
    "ffn.groups_per_token", "rope.max_length",
)  # fmt: skip


def flips(cfg):
    """Yields the settings of each layer after one of its settings changed, and the change, for all that can change."""
    layers = [settings(layer) for layer in each_layer(cfg)]
    values = {}
    for layer in layers:
        for key, value in layer.items():
            values.setdefault(key, []).append(value)
    for key, found in sorted(values.items()):
        if len(set(map(str, found))) > 1 and key not in (
            "attention.kind",
            "ffn.kind",
        ):  # which layers have it
            yield (
                f"{key} by layer",
                [own | other_layer(own, key, layers[i - 1]) for i, own in enumerate(layers)],
            )
        value = next((v for v in found if v is not None), None)
        if (other := flip(key, value)) is not None:
            yield (
                f"{key}={other}",
                [own | ({key: other} if own.get(key) is not None else {}) for own in layers],
            )


def other_layer(own, key, before):
    """What a layer takes over from the one before it so that it has its `key`."""
    section = key.rpartition(".")[0]
    kind = f"{section}.kind"
    if section == "rope" and own.get(kind) != before.get(
        kind
    ):  # settings of one kind mean nothing to another
        return {k: v for k, v in before.items() if k.startswith("rope.")}
    return {key: before[key]} if key in own and key in before else {}


def flip(key, value):
    """Another value of a setting, or None."""
    if key in OTHER:
        return OTHER[key].get(value)
    if key == "rope.original_length":
        return value // 4
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return 0.1 if key.endswith("_eps") else value * 1.5
    if isinstance(value, int):
        return value - 1 if key in SMALLER else None
    return value[::-1] if isinstance(value, tuple) and value else None


def as_model(layers):
    """The configuration of a model with these settings of each layer."""
    said = []
    for own in layers:
        own = own | {"ffn.bias_rate": 0.001 * own.get("ffn.bias_rate", 0)}
        if "attention.temperature_scale" in own:
            own["attention.temperature_scale"] = own["attention.temperature_scale"] or 0.1
        said.append(own)
    return families.model_of(fold(said))


@pytest.mark.audit
@pytest.mark.timeout(0)
@pytest.mark.parametrize("case", CASES)
def test_every_switch_counts(case, pair):
    both = pair(case)
    state, seen = nnx.state(both.ours), set()
    for change, layers in flips(both.cfg):
        try:
            cfg = as_model(layers)
        except UserError:  # a rule forbids it, so that it can't be wrong unnoticed
            continue
        graphdef, abstract = nnx.split(
            nnx.eval_shape(lambda cfg=cfg: Transformer(cfg, rngs=nnx.Rngs(0)))
        )
        if shapes(abstract) != shapes(state):  # a tensor would be missing or left over
            continue
        model = nnx.merge(graphdef, state)
        assert any(
            apart(forward(model, text), theirs(both.theirs, text)) > WITHIN
            for text in (tokens(LENGTH), tokens(8))
        ), f"{change} changes nothing"
        seen.add(change.partition("=")[0])
    assert {"norm_eps", "embed_scale", "residual_scale"} <= seen


def shapes(state):
    return {name: leaf.shape for name, leaf in leaves.named(state).items()}


# Eight devices in three ways, but where a family can't be split so.
LAYOUT = {"fsdp": 2, "tensor": 2, "context": 2}
LAYOUTS = {
    "qwen3-next": LAYOUT | {"context": 1, "data": 2},
    "phi3-long": LAYOUT | {"tensor": 1, "fsdp": 4},
}


def on_mesh(both, **layout):
    """The model's configuration for training on such a mesh, and the mesh."""
    keys = {f"mesh.{axis}": size for axis, size in layout.items()}
    keys |= {"data.seq_len": LENGTH, "train.global_batch": 8, "train.sample_tokens": 0}
    cfg = resolve([("config.json", families.config(both.config)), ("test", keys)])
    return cfg, make_mesh(cfg.mesh, devices=jax.devices()[: math.prod(layout.values())])


def logits_loss_and_gradients(both, **layout):
    """Of rows with two documents each, with the parameters read straight onto the mesh."""
    cfg, mesh = on_mesh(both, **layout)
    check_mesh(cfg, mesh)
    batch = packed_batch(cfg, mesh, 0)
    with open_weights(both.folder) as weights:
        params = convert.load(
            weights, families.table(cfg.model, both.name), abstract_state(cfg, mesh).params
        )
    graphdef, loss_fn = model_def(cfg), make_loss_fn(cfg)

    def run(params, batch):
        names = "tokens", "positions", "segment_ids"
        rows = [RULES[cfg.sharding.rules].shard(batch[name], "batch", "seq") for name in names]
        return nnx.merge(graphdef, params)(*rows), jax.value_and_grad(loss_fn, has_aux=True)(
            params, batch
        )

    with jax.set_mesh(mesh):
        logits, ((loss, _), grads) = jax.jit(run)(params, batch)
    return np.asarray(logits), float(loss), jax.device_get(leaves.named(grads))


@pytest.mark.audit  # other tests in `make test` have plain models on such meshes
@pytest.mark.parametrize("case", CASES)
def test_eight_devices_compute_what_one_does(case, pair):
    both = pair(case)
    logits, loss, grads = logits_loss_and_gradients(both, **LAYOUTS.get(case, LAYOUT))
    want, want_loss, want_grads = logits_loss_and_gradients(both, data=1)
    assert apart(logits, want) < WITHIN
    assert loss == pytest.approx(want_loss, rel=WITHIN)
    least = 1e-3 * np.median([np.abs(array).max() for array in want_grads.values()])
    for name, array in want_grads.items():
        most = max(np.abs(array).max(), least)
        assert np.abs(grads[name] - array).max() < 1e-4 * most, name


@pytest.mark.parametrize(
    "case, words",
    [
        ("qwen3-next", "mesh.context=2 cannot be combined"),
        ("phi3-long", "model.kv_heads=1 is not divisible by mesh.tensor=2"),
    ],
)  # fmt: skip
def test_what_eight_devices_cannot_split_is_refused(case, words, pair):
    cfg, mesh = on_mesh(pair(case), **LAYOUT)
    with pytest.raises(UserError) as error:
        check_mesh(cfg, mesh)
    assert words in str(error.value) and "\n" not in str(error.value)


OLD = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
NEW = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}


def config(name="llama", **more):
    return {"model_type": name} | SIZES | more


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("llama", OLD, NEW),
        ("mixtral", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("gemma3_text",
         {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
         {"rope_parameters": {
             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}}),
        ("phi3",
         {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
          "original_max_position_embeddings": 16},
         {"rope_parameters": {
             "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4,
             "partial_rotary_factor": 1.0}, "original_max_position_embeddings": 16}),
        ("gpt_oss", {"rope_theta": 15e4}, {"rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096, "rope_theta": 15e4}}),
    ],
)  # fmt: skip
def test_both_spellings_of_rope(name, old, new):
    more = {"num_local_experts": 4} if name in ("mixtral", "gpt_oss") else {}
    found = families.config(config(name, **more, **old))
    assert found == families.config(config(name, **more, **new))
    # What goes out has both spellings, and they say the same.
    out = families.to_hf(families.model_of(found), 64, name)
    without = {
        k: v
        for k, v in out.items()
        if k not in ("rope_scaling", "rope_theta", "rope_local_base_freq")
    }
    assert families.config(without) == families.config(out)
    if name != "gemma3_text":
        assert families.config(
            {k: v for k, v in out.items() if k != "rope_parameters"}
        ) == families.config(out)


@pytest.mark.parametrize(
    "name, more, word",
    [
        ("gpt2", {}, "model_type='gpt2'"),
        (None, {}, "model_type=None"),
        (["llama"], {}, "model_type=['llama']"),
        ("llama", {"hidden_act": "relu2"}, "hidden_act='relu2'"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama", OLD | {"rope_parameters": NEW["rope_parameters"] | {"factor": 3.0}}, "factor"),
        ("llama", {"rope_theta": 2e4} | NEW, "rope_theta"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}}, "beta_fast=1"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("llama", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("llama", {"hidden_size": "many"}, "hidden_size='many'"),
        ("llama", {"hidden_size": True}, "hidden_size=True"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types has 1 entries"),
        ("gemma2", {"layer_types": ["linear_attention"] * 3}, "'linear_attention'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"rope_parameters": PLAIN}, "rope_parameters"),
        ("olmo3", {"rope_theta": 1e4}, "rope_theta=10000.0"),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_type, not type"),
        ("olmo3", {"rope_parameters": {"full_attention": tiny_models.YARN | {"truncate": False}}}, "truncate"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ("gpt_oss", {"num_local_experts": 4, "swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ("gpt_oss", {"num_local_experts": 4, "num_experts": 8}, "num_local_experts"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave=None"),
        ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 25},
         "shared_expert_intermediate_size=25"),
        ("llama", {"rope_scaling": {"type": ["yarn"]}}, "rope_type=['yarn']"),
        ("llama", {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1}},
         "original_max_position_embeddings=1"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=[1]"),
        ("phi", {}, "model_type='phi'"),
        ("starcoder2", {}, "model_type='starcoder2'"),
        ("cohere", {}, "model_type='cohere'"),
        ("gemma3", {}, "hidden_size=32 (gemma3)"),  # beside text_config, where it counts for nothing
        ("gemma3", dict.fromkeys(SIZES) | {"text_config": [1]}, "text_config=[1] is not a mapping"),
        ("llama4", dict.fromkeys(SIZES) | {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window=None"),
        ("cwm", {"rope_theta": 1e4}, "rope_theta=10000.0"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling=0.0"),
        ("granite", {"residual_multiplier": -1.0}, "residual_scale=-1.0"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG'"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("deepseek_v2", {"num_key_value_heads": 4, "topk_method": "group_limited_greedy", "moe_intermediate_size": 24},
         "topk_method='group_limited_greedy'"),
        ("minimax_m2", {"rotary_dim": 64, "partial_rotary_factor": 0.25}, "rotary_dim=64"),
    ],
)  # fmt: skip
def test_what_is_refused(name, more, word):
    moe = {
        "kv_lora_rank": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
    }
    values = config(name, **(moe if name == "deepseek_v3" else {}) | more)
    with pytest.raises(UserError) as error:
        families.model_of(families.config(values))
    assert word in str(error.value) and "\n" not in str(error.value)


def leaves_of(values, path=()):
    """Yields the path and the value of each key, in mappings too."""
    for key, value in values.items():
        yield (*path, key), value
        if isinstance(value, dict):
            yield from leaves_of(value, (*path, key))


def others(value):
    """A key's other values: none at all, null, and another of its type."""
    yield from (GONE, None)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, list):
        yield value[::-1]


def changed(values, path, other):
    """Returns a copy with another value at a path, or without it."""
    first, *rest = path
    if rest:
        return values | {first: changed(values[first], rest, other)}
    return {k: v for k, v in (values | {first: other}).items() if v is not GONE}


# What no key of a family has, or has by default.
MORE = {
    "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1, "sliding_window_pattern": 2,
    "mlp_bias": True, "attention_bias": True, "head_dim": 10, "norm_topk_prob": True, "experts_per_token": 3,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 123.0, "query_pre_attn_scalar": 5,
    "partial_rotary_factor": 0.5, "initial_context_length": 8, "original_max_position_embeddings": 8,
    "tie_word_embeddings": True, "num_nextn_predict_layers": 1, "router_jitter_noise": 0.3, "moe_layer_freq": 2,
    "pretraining_tp": 2,
}  # fmt: skip


@pytest.mark.audit
@pytest.mark.timeout(0)
@pytest.mark.parametrize("case", CASES)
def test_no_key_of_a_configuration_is_misread(case):
    """What is read is what transformers makes of it, and what changes nothing here changes nothing there."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    name, more = CASES[case]

    def read(values):
        return families.model_of(families.config(values | {"model_type": name}))

    def resolve(values):
        found = AutoConfig.for_model(name, **values).to_dict()
        return {key: value for key, value in found.items() if key != "model_type"}

    given = resolve(SIZES | more)
    base, text, compared, unchanged = read(given), tokens(LENGTH, 1), 0, 0
    want = theirs(tiny_models.theirs(name, given), text)
    tried = [(path, other) for path, value in leaves_of(given) for other in others(value)]
    tried += [((key,), other) for key, other in MORE.items()]
    for path, other in tried:
        if path[0] in ("vocab_size", "num_hidden_layers", "return_dict"):
            continue
        values = changed(given, path, other)
        try:
            ours, resolved = read(values), resolve(values)
        except (UserError, StrictDataclassError, ValueError, TypeError, KeyError):  # refused
            continue
        if path != ("num_key_value_heads",):  # the tensors' shapes show what it is by default
            assert read(resolved) == ours, (path, other)
            compared += 1
        if ours != base:
            continue
        try:
            found = theirs(tiny_models.theirs(name, values), text)
        except (RuntimeError, TypeError, ValueError, KeyError, UnboundLocalError):
            continue  # transformers cannot run it
        assert apart(found, want) < WITHIN, (path, other)
        unchanged += 1
    assert compared > 50 and unchanged > 20


def test_a_key_that_is_missing_and_one_that_is_null():
    """A missing key has transformers' default; null is none, or false."""

    def read(name, **more):
        return families.model_of(families.config(config(name, **more)))

    assert (read("gemma2").attention.softcap, read("gemma2").logit_softcap) == (50.0, 30.0)
    off = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert off.attention.softcap is None and off.logit_softcap is None
    sizes = LATENTS | {
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 20,
        "n_routed_experts": 16,
    }
    deepseek = read("deepseek_v3", **sizes)
    assert (deepseek.ffn.groups, deepseek.ffn.groups_per_token, deepseek.ffn.scaling) == (8, 4, 2.5)
    assert deepseek.ffn.normalize and deepseek.attention.q_rank == 1536
    null = read("deepseek_v3", **sizes, norm_topk_prob=None, q_lora_rank=None)
    assert not null.ffn.normalize and null.attention.q_rank is None
    for model, name in ((off, "gemma2"), (null, "deepseek_v3")):
        out = families.to_hf(model, 64, name)
        assert out["model_type"] == name
        assert families.model_of(families.config(out)) == model
    # Phi-3's original length is a key of its own.
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    inside = scaling | {"original_max_position_embeddings": ORIGINAL}
    assert read("phi3", rope_scaling=inside).rope.original_length == 4096
    outside = read("phi3", rope_scaling=scaling, original_max_position_embeddings=ORIGINAL)
    assert outside.rope.original_length == ORIGINAL


def test_a_model_that_no_family_has():
    cfg = mt.load_config("laptop", ["model.norms=after", "model.embed_scale=3.0"]).model
    with pytest.raises(UserError, match="norms|embed_scale"):
        families.to_hf(cfg, 64)


def test_models_of_minitext_go_out():
    for preset, name in [("laptop", "llama"), ("moe-laptop", "mixtral"), ("gpt2-124m", "llama")]:
        cfg = mt.load_config(preset).model
        assert families.to_hf(cfg, 64)["model_type"] == name
        factor = families.logit_factor(cfg, families.to_hf(cfg, 64))
        assert factor == (768**-0.5 if preset == "gpt2-124m" else 1.0)


def test_layers_fold_and_unfold():
    values = config(
        "gemma3_text", num_hidden_layers=8, layer_types=["full_attention", "sliding_attention"] * 4
    )
    cfg = families.model_of(families.config(values))
    assert len(cfg.period) == 2
    values["layer_types"][5] = "full_attention"
    layers = each_layer(families.model_of(families.config(values)))
    windows = [settings(layer)["attention.window"] is not None for layer in layers]
    assert windows == [kind == "sliding_attention" for kind in values["layer_types"]]
    prefix = config("glm4_moe", num_hidden_layers=7, first_k_dense_replace=3, n_routed_experts=8,
                    moe_intermediate_size=24)  # fmt: skip
    cfg = families.model_of(families.config(prefix))
    assert (cfg.dense_layers, cfg.dense_mlp, cfg.mlp, cfg.period) == (
        3,
        SIZES["intermediate_size"],
        24,
        (),
    )
    assert [settings(layer)["ffn.kind"] for layer in each_layer(cfg)] == ["swiglu"] * 3 + [
        "moe"
    ] * 4


# Billions of parameters: as published, or the sum of the published tensors' sizes.
PUBLISHED = {
    "llama2-7b": 6_738_415_616, "llama2-70b": 68_976_648_192, "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248, "llama3.1-405b": 405_853_388_800, "llama3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008, "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704,
    "gemma2-9b": 9_241_705_984, "gemma3-4b": 3_880_263_168, "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360, "qwen3-30b-a3b": 30_532_122_624, "olmo2-7b": 7_298_617_344,
    "phi3-mini": 3_821_079_552, "phi4": 14_659_507_200, "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "glm4.5": 352_797_829_024, "llama4-scout": 107_769_861_120, "qwen3-next": 79_674_391_296,
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_their_published_size_and_family(preset):
    cfg = mt.load_config(preset).model
    assert flops.count_params(cfg) == PUBLISHED[preset]
    families.to_hf(cfg, 4096)


def test_every_family_has_a_case():
    """So that its logits, tokens, gradients, files and switches are all compared."""
    assert {name for name, _ in CASES.values()} == set(families.FAMILIES)


def test_every_published_preset_is_counted():
    ours = {"laptop", "moe-laptop", "gpt2-124m", "gpt3-175b"}
    assert set(presets()) == set(PUBLISHED) | ours
