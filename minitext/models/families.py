"""The published families of models, each as data: what its config.json means, and what its tensors are called.

One decoder computes them all. A family is two lists of rows. Those of `keys` go between config.json and our settings;
`minitext.models.hf_keys` has their kinds. Those of `tensors` go between the names in a checkpoint and our parameters.
Each row serves both directions, so what comes in goes out as it was.

Sources: the configurations and models in transformers 5.23, read and compared number by number (`minitext parity`).

Chapters: 23.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from flax import nnx

from minitext.config.model import DeltaNetConfig, MLAConfig, ModelConfig, MoEConfig
from minitext.errors import UserError, did_you_mean
from minitext.models import convert, hf_keys
from minitext.models.convert import KEEP, TRANSPOSED, Table, View
from minitext.models.hf_keys import (
    WITHOUT_EFFECT,
    EmbedScale,
    Fixed,
    HeadDim,
    Implied,
    L2Norm,
    LinearLayers,
    LocalRotation,
    LogitScale,
    Only,
    QueryScalar,
    Rope,
    RotaryDim,
    Row,
    Same,
    SharedWidth,
    Temperature,
    TypedRope,
    Types,
    Unrotated,
    Unused,
    Window,
    checked,
    differences,
    every,
    every_step,
    expert_rows,
    first_dense,
    quoted,
    read,
    stacked,
    write,
)
from minitext.models.transformer import Transformer

LAYER = "model.layers.{layer}."


class Tensor(NamedTuple):
    """One of our parameters, or a part of it, and the tensors of a checkpoint that hold it.

    Attributes:
      name: of their tensors; `{layer}` and `{expert}` stand for numbers.
      ours: the parameter, below its layer if `name` has `{layer}`. The row counts where a layer has this parameter.
      view: how one of their tensors is seen as ours, or a layer's configuration -> this.
      into: the part of ours that it fills, or a layer's configuration -> this.
      when: whether the row counts for a layer's configuration.
    """

    name: str
    ours: str
    view: View | Callable[[ModelConfig], View] = KEEP
    into: View | Callable[[ModelConfig], View] = KEEP
    when: Callable[[ModelConfig], bool] = lambda _: True


class Family(NamedTuple):
    """A family.

    Attributes:
      architecture: the class of transformers that config.json names.
      keys: rows between config.json and our keys.
      tensors: rows between the checkpoint and our parameters.
      further_layers: layers after the model's own, which predict further tokens; minitext doesn't read them.
      ignored: patterns of tensors that minitext doesn't read, such as those layers under another name, or of images.
    """

    architecture: str
    keys: tuple[Row, ...]
    tensors: tuple[Tensor, ...]
    further_layers: int = 0
    ignored: tuple[str, ...] = ()


class Wrapper(NamedTuple):
    """A model of text and images together, of which minitext has the text.

    Attributes:
      text: the family of its text, whose keys are in `text_config`.
      sizes: transformers' values of keys that text_config may lack, and that the family's own config.json has.
      tied: whether a missing tie_word_embeddings means true, where the key beside text_config counts; None: where the
        one in it does.
      unused: keys of the family in text_config that the wrapper never reads.
    """

    text: str
    sizes: dict[str, int]
    tied: bool | None = None
    unused: tuple[str, ...] = ()


# Views of tensors. Letters as in the book; U, P, R and W are those of `minitext.models.mla`.

ALL = slice(None)


def _rows(part: Callable[[ModelConfig], tuple[int, slice]]) -> Callable[[ModelConfig], View]:
    """Returns the view of some rows of a tensor [rows, D], transposed."""

    def view(cfg: ModelConfig) -> View:
        rows, taken = part(cfg)
        return View(shape=(rows, cfg.embed), part=(taken,), order=(1, 0))

    return view


def _qkv(cfg: ModelConfig) -> tuple[int, int, int]:
    q = cfg.heads * cfg.H
    return q, q + cfg.K * cfg.H, q + 2 * cfg.K * cfg.H


_QUERIES = _rows(lambda cfg: (_qkv(cfg)[2], slice(0, _qkv(cfg)[0])))
_KEYS = _rows(lambda cfg: (_qkv(cfg)[2], slice(*_qkv(cfg)[:2])))
_VALUES = _rows(lambda cfg: (_qkv(cfg)[2], slice(*_qkv(cfg)[1:])))
_GATE_ROWS = _rows(lambda cfg: (2 * cfg.mlp, slice(0, cfg.mlp)))
_UP_ROWS = _rows(lambda cfg: (2 * cfg.mlp, slice(cfg.mlp, None)))


def _experts_part(
    taken: Callable[[int], slice], bias: bool = False
) -> Callable[[ModelConfig], View]:
    """Returns the view of some of the 2F features of all experts in one tensor [E, D, 2F], or of its bias [E, 2F]."""

    def view(cfg: ModelConfig) -> View:
        assert isinstance(cfg.ffn, MoEConfig)
        middle = () if bias else (cfg.embed,)
        part = (ALL,) * (1 + len(middle)) + (taken(cfg.mlp),)
        return View(shape=(cfg.ffn.experts, *middle, 2 * cfg.mlp), part=part)

    return view


def _stacked(taken: Callable[[int], slice]) -> Callable[[ModelConfig], View]:
    """Returns the view of some of the 2F features of all experts in one tensor [E, 2F, D]."""

    def view(cfg: ModelConfig) -> View:
        assert isinstance(cfg.ffn, MoEConfig)
        shape = cfg.ffn.experts, 2 * cfg.mlp, cfg.embed
        return View(shape, part=(ALL, taken(cfg.mlp)), order=(0, 2, 1))

    return view


_EVEN, _ODD = (lambda F: slice(0, None, 2)), (lambda F: slice(1, None, 2))
_FIRST, _SECOND = (lambda F: slice(0, F)), (lambda F: slice(F, None))


def _pairs(
    heads: Callable[[ModelConfig], int], bias: bool = False
) -> Callable[[ModelConfig], View]:
    """Returns the view of heads' features, of which theirs rotates neighbours and ours the halves with each other."""

    def view(cfg: ModelConfig) -> View:
        N, H, D = heads(cfg), cfg.H, cfg.embed
        if bias:
            return View(shape=(N * H,), split=(N, H // 2, 2), order=(0, 2, 1))
        return View(shape=(N * H, D), split=(N, H // 2, 2, D), order=(3, 0, 2, 1))

    return view


def _some_pairs(x: str, heads: Callable[[ModelConfig], int]) -> tuple[Tensor, ...]:
    """Returns rows for queries or keys: of each head some features from pairs to halves, and the others as they are."""

    def row(kind: str, theirs: Callable[[int], slice], ours: Callable[[int], slice]) -> Tensor:
        def part(cfg: ModelConfig) -> tuple[int, int, int]:
            return heads(cfg), cfg.H, cfg.rope.rotated(cfg.H)

        def view(cfg: ModelConfig) -> View:
            (N, H, rotated), D = part(cfg), cfg.embed
            if kind == "bias":
                return View((N * H,), (N, H), (ALL, theirs(rotated)))
            return View((N * H, D), (N, H, D), (ALL, theirs(rotated)), (2, 0, 1))

        def into(cfg: ModelConfig) -> View:
            (N, H, rotated), D = part(cfg), cfg.embed
            if kind == "bias":
                return View((N * H,), (N, H), (ALL, ours(rotated)))
            return View((D, N * H), (D, N, H), (ALL, ALL, ours(rotated)))

        name, parameter = f"{LAYER}self_attn.{x}_proj.{kind}", f"attention.{x}.{kind[0]}"
        return Tensor(name, parameter, view, into)

    return tuple(
        row(kind, theirs, ours)
        for kind in ("weight", "bias")
        for theirs, ours in (
            (lambda R: slice(0, R, 2), lambda R: slice(0, R // 2)),
            (lambda R: slice(1, R, 2), lambda R: slice(R // 2, R)),
            (lambda R: slice(R, None), lambda R: slice(R, None)),
        )
    )


def _mla(cfg: ModelConfig) -> MLAConfig:
    assert isinstance(cfg.attention, MLAConfig)
    return cfg.attention


def _latent_queries(name: str, **more: Any) -> tuple[Tensor, ...]:
    """Returns rows for queries: of each head U features as they are, and P features from pairs to halves."""

    def row(theirs: Callable[[int, int], slice], ours: Callable[[int, int], slice]) -> Tensor:
        def sizes(cfg: ModelConfig) -> tuple[int, int, int, int]:
            a = _mla(cfg)
            return cfg.heads, a.nope_dim, a.rope_dim, a.q_rank or cfg.embed

        def view(cfg: ModelConfig) -> View:
            N, U, P, D = sizes(cfg)
            split = N, U + P, D
            return View((N * (U + P), D), split, (ALL, theirs(U, P)), (2, 0, 1))

        def into(cfg: ModelConfig) -> View:
            N, U, P, D = sizes(cfg)
            return View((D, N * (U + P)), (D, N, U + P), (ALL, ALL, ours(U, P)))

        return Tensor(f"{LAYER}self_attn.{name}.weight", "attention.q.w", view, into, **more)

    return (
        row(lambda U, P: slice(0, U), lambda U, P: slice(0, U)),
        row(lambda U, P: slice(U, None, 2), lambda U, P: slice(U, U + P // 2)),
        row(lambda U, P: slice(U + 1, None, 2), lambda U, P: slice(U + P // 2, None)),
    )


def _latents() -> tuple[Tensor, ...]:
    """Returns rows for the latent of R features and the rotary key, whose P features go from pairs to halves."""

    def row(theirs: Callable[[int, int], slice], ours: Callable[[int, int], slice]) -> Tensor:
        def view(cfg: ModelConfig) -> View:
            R, P = _mla(cfg).kv_rank, _mla(cfg).rope_dim
            return View(shape=(R + P, cfg.embed), part=(theirs(R, P),), order=(1, 0))

        def into(cfg: ModelConfig) -> View:
            R, P = _mla(cfg).kv_rank, _mla(cfg).rope_dim
            return View(shape=(cfg.embed, R + P), part=(ALL, ours(R, P)))

        name = f"{LAYER}self_attn.kv_a_proj_with_mqa.weight"
        return Tensor(name, "attention.kv_down.w", view, into)

    return (
        row(lambda R, P: slice(0, R), lambda R, P: slice(0, R)),
        row(lambda R, P: slice(R, None, 2), lambda R, P: slice(R, R + P // 2)),
        row(lambda R, P: slice(R + 1, None, 2), lambda R, P: slice(R + P // 2, None)),
    )


def _from_latents(ours: str, taken: Callable[[MLAConfig], slice]) -> Tensor:
    """Returns the row for what makes keys or values of the latent: in each head first U features, then W."""

    def view(cfg: ModelConfig) -> View:
        a, N = _mla(cfg), cfg.heads
        both = a.nope_dim + a.v_dim
        return View((N * both, a.kv_rank), (N, both, a.kv_rank), (ALL, taken(a)), (2, 0, 1))

    return Tensor(f"{LAYER}self_attn.kv_b_proj.weight", ours, view)


def _gated_queries(ours: str, taken: Callable[[int], slice]) -> Tensor:
    """Returns the row for queries or their gate: of each head first H features of the queries, then H of the gate."""

    def view(cfg: ModelConfig) -> View:
        N, H, D = cfg.heads, cfg.H, cfg.embed
        return View((N * 2 * H, D), (N, 2 * H, D), (ALL, taken(H)), (2, 0, 1))

    return Tensor(f"{LAYER}self_attn.q_proj.weight", ours, view)


def _delta(cfg: ModelConfig) -> DeltaNetConfig:
    assert isinstance(cfg.attention, DeltaNetConfig)
    return cfg.attention


def _of_each_key_head(name: str, **widths: Callable[[DeltaNetConfig], int]) -> tuple[Tensor, ...]:
    """Returns rows for projections that one tensor holds: for each head of keys some rows of the first, and so on.

    Args:
      name: of the tensor.
      **widths: our projections -> how many rows of a head of keys are theirs.
    """

    def row(place: int) -> Tensor:
        def view(cfg: ModelConfig) -> View:
            a, D = _delta(cfg), cfg.embed
            sizes = [width(a) for width in widths.values()]
            first, K = sum(sizes[:place]), a.key_heads
            taken = slice(first, first + sizes[place])
            return View((K * sum(sizes), D), (K, sum(sizes), D), (ALL, taken), (2, 0, 1))

        ours = f"attention.{list(widths)[place]}.w"
        return Tensor(f"{LAYER}linear_attn.{name}.weight", ours, view)

    return tuple(row(place) for place in range(len(widths)))


def _convolution(ours: str, taken: Callable[[int, int], slice]) -> Tensor:
    """Returns the row for one part of the convolution of queries, keys and values, [features, 1, J]."""

    def view(cfg: ModelConfig) -> View:
        a = _delta(cfg)
        keys, values = a.key_heads * a.key_dim, a.value_heads * a.value_dim
        return View((2 * keys + values, 1, a.conv), part=(taken(keys, values), 0), order=(1, 0))

    return Tensor(f"{LAYER}linear_attn.conv1d.weight", f"attention.{ours}", view)


# Rows of tensors that several families share.


def _weight(theirs: str, ours: str) -> tuple[Tensor, ...]:
    """A projection, with its bias where the layer has one."""
    return (
        Tensor(f"{LAYER}{theirs}.weight", f"{ours}.w", TRANSPOSED),
        Tensor(f"{LAYER}{theirs}.bias", f"{ours}.b"),
    )


def _norm(theirs: str, ours: str) -> Tensor:
    return Tensor(f"{LAYER}{theirs}.weight", f"{ours}.scale")


ENDS = (
    Tensor("model.embed_tokens.weight", "embed.table"),
    Tensor("model.norm.weight", "norm.scale"),
    Tensor("lm_head.weight", "unembed.w", TRANSPOSED),
)
QKV = tuple(row for x in "qkv" for row in _weight(f"self_attn.{x}_proj", f"attention.{x}"))
OUT = _weight("self_attn.o_proj", "attention.o")
QK_NORM = (
    _norm("self_attn.q_norm", "attention.q_norm"),
    _norm("self_attn.k_norm", "attention.k_norm"),
)
BEFORE = (_norm("input_layernorm", "norm_attention"), _norm("post_attention_layernorm", "norm_ffn"))
AFTER = (
    _norm("post_attention_layernorm", "norm_attention_out"),
    _norm("post_feedforward_layernorm", "norm_ffn_out"),
)
BOTH = (
    _norm("input_layernorm", "norm_attention"),
    _norm("pre_feedforward_layernorm", "norm_ffn"),
    *AFTER,
)


def _gated(theirs: str, ours: str) -> tuple[Tensor, ...]:
    return tuple(
        r for x in ("gate", "up", "down") for r in _weight(f"{theirs}.{x}_proj", f"{ours}.{x}")
    )


MLP = _gated("mlp", "ffn")
GATE_UP = (
    Tensor(f"{LAYER}mlp.gate_up_proj.weight", "ffn.gate.w", _GATE_ROWS),
    Tensor(f"{LAYER}mlp.gate_up_proj.weight", "ffn.up.w", _UP_ROWS),
    *_weight("mlp.down_proj", "ffn.down"),
)


def _pairs_to_halves(x: str, heads: Callable[[ModelConfig], int]) -> tuple[Tensor, ...]:
    name, ours = f"{LAYER}self_attn.{x}_proj", f"attention.{x}"
    return (
        Tensor(f"{name}.weight", f"{ours}.w", _pairs(heads)),
        Tensor(f"{name}.bias", f"{ours}.b", _pairs(heads, True)),
    )


# Queries and keys whose neighbouring features rotate together.
PAIRS = (
    *_pairs_to_halves("q", lambda cfg: cfg.heads),
    *_pairs_to_halves("k", lambda cfg: cfg.K),
    *_weight("self_attn.v_proj", "attention.v"),
)
SOME_PAIRS = (
    *_some_pairs("q", lambda cfg: cfg.heads),
    *_some_pairs("k", lambda cfg: cfg.K),
    *_weight("self_attn.v_proj", "attention.v"),
)


def _experts(theirs: str, **names: str) -> tuple[Tensor, ...]:
    """A tensor for each matrix of each expert."""
    return tuple(
        Tensor(f"{LAYER}{theirs}.experts.{{expert}}.{name}.weight", f"ffn.{ours}", TRANSPOSED)
        for ours, name in names.items()
    )


def _router(theirs: str) -> Tensor:
    return Tensor(f"{LAYER}{theirs}.weight", "ffn.router", TRANSPOSED)


def _where(kind: str, *rows: Tensor) -> tuple[Tensor, ...]:
    """Returns rows that count in layers with this kind of attention, for another kind may use our names too."""
    return tuple(row._replace(when=lambda cfg: cfg.attention.kind == kind) for row in rows)


def _values_of(a: DeltaNetConfig) -> int:
    return a.value_heads // a.key_heads


DELTANET = (
    *_of_each_key_head(
        "in_proj_qkvz",
        q=lambda a: a.key_dim,
        k=lambda a: a.key_dim,
        v=lambda a: _values_of(a) * a.value_dim,
        gate=lambda a: _values_of(a) * a.value_dim,
    ),
    *_of_each_key_head("in_proj_ba", beta=_values_of, decay=_values_of),
    _convolution("q_conv", lambda keys, _: slice(0, keys)),
    _convolution("k_conv", lambda keys, _: slice(keys, 2 * keys)),
    _convolution("v_conv", lambda keys, _: slice(2 * keys, None)),
    Tensor(f"{LAYER}linear_attn.A_log", "attention.log_rate"),
    Tensor(f"{LAYER}linear_attn.dt_bias", "attention.time_bias"),
    _norm("linear_attn.norm", "attention.norm"),
    *_weight("linear_attn.out_proj", "attention.o"),
)
EXPERTS = (
    _router("mlp.gate"),
    *_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
)
MIXTRAL = (
    _router("block_sparse_moe.gate"),
    *_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
)
SHARED_EXPERT = (
    *_gated("mlp.shared_expert", "ffn.shared"),
    Tensor(
        f"{LAYER}mlp.shared_expert_gate.weight",
        "ffn.shared_gate",
        lambda cfg: View(shape=(1, cfg.embed)),
    ),
)
CHOICE_BIAS = Tensor(f"{LAYER}mlp.gate.e_score_correction_bias", "ffn.bias")
LLAMA = (*ENDS, *QKV, *OUT, *BEFORE, *MLP)

# Tensors of the vision tower, and of what makes token vectors of its output.
OF_IMAGES = tuple(
    f"{before}{name}.*"
    for before in ("", "model.")
    for name in ("vision_tower", "vision_model", "multi_modal_projector")
)

# Rows of keys that several families share.

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
BIASES = ("attention.qkv_bias", "attention.out_bias")


def _same_float(hf: str, ours: str, default: Any, **more: Any) -> Same:
    return Same(hf, ours, kind=float, default=default, **more)


def _switch(hf: str, *ours: str, default: bool = False) -> Same:
    return Same(hf, *ours, kind=bool, default=default)


def _base(
    *,
    eps: float = 1e-6,
    tied: bool = False,
    activation: str = "hidden_act",
    first: str = "silu",
    norms: str = "before",
    offset: bool = False,
    activations: Mapping[str, str] = ACTIVATIONS,
) -> tuple[Row, ...]:
    """Sizes, activation and norms, with transformers' values where config.json has none."""
    return (
        Same("vocab_size", "vocab"),
        Same("hidden_size", "embed"),
        Same("num_attention_heads", "heads"),
        _same_float("rms_norm_eps", "norm_eps", eps),
        _switch("tie_word_embeddings", "tie_embeddings", default=tied),
        Same(activation, "ffn.activation", kind=str, default=first, codes=activations),
        Fixed(norms=norms, norm_offset=offset, logit_scale=1.0),
    )


def _gqa(head_dim: Row | None = None, **ours: Any) -> tuple[Row, ...]:
    """Grouped-query attention, with settings of ours that the family always has."""
    return (
        Fixed(**{"attention__kind": "gqa", "ffn__kind": "swiglu"} | ours),
        Same("num_key_value_heads", "kv_heads", default=None),
        head_dim or HeadDim(),
    )


def _dense() -> Row:
    return Same("intermediate_size", "mlp")


def _moe(count: int, per_token: int, key: str = "num_experts", **ours: Any) -> tuple[Row, ...]:
    """Experts, with transformers' numbers where config.json has none, as in a model whose layers are all dense."""
    return (
        Same(key, "ffn.experts", default=count),
        Same("num_experts_per_tok", "ffn.experts_per_token", default=per_token),
        Fixed(**{f"ffn__{key}": value for key, value in ours.items()}),
    )


SPARSE = Fixed(ffn__kind="moe")
QWEN_WINDOWS = Types(
    lambda source, layers: [
        "sliding_attention"
        if source.values.get("use_sliding_window")
        and i >= source.take("max_window_layers", int, 28)
        else "full_attention"
        for i in range(len(layers))
    ],
    switch="use_sliding_window",
)
# Their biases exist, and move by this much in DeepSeek-V3's training.
SIGMOID = Fixed(ffn__router="sigmoid", ffn__bias_rate=0.001)


def _grouped(
    *, normalize: bool = True, groups: int = 1, chosen: int = 1, scaling: float = 1.0
) -> tuple[Row, ...]:
    """Sigmoid scores in groups, with a bias that only chooses (DeepSeek-V3, GLM-4.5)."""
    return (
        Same("n_group", "ffn.groups", default=groups),
        Same("topk_group", "ffn.groups_per_token", default=chosen),
        _same_float("routed_scaling_factor", "ffn.scaling", scaling),
        _switch("norm_topk_prob", "ffn.normalize", default=normalize),
        Same("n_shared_experts", "ffn.shared_experts", default=1),
        Only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1),
        SIGMOID,
    )


# Multi-head latent attention, of DeepSeek.
LATENT = (
    Fixed(attention__kind="mla", attention__latent_eps=1e-6),
    Same("q_lora_rank", "attention.q_rank", default=1536, null=None),
    Same("kv_lora_rank", "attention.kv_rank", default=512),
    Same("qk_nope_head_dim", "attention.nope_dim", default=128),
    Same("qk_rope_head_dim", "attention.rope_dim", default=64),
    Same("v_head_dim", "attention.v_dim", default=128),
    Implied("num_key_value_heads", ("heads",)),
    Implied("head_dim", ("attention.rope_dim",)),
    Implied("qk_head_dim", ("attention.nope_dim", "attention.rope_dim")),
    Only(attention_bias=False),
)
DEEPSEEK = (
    *ENDS,
    *BEFORE,
    *OUT,
    *_latent_queries("q_proj", when=lambda cfg: _mla(cfg).q_rank is None),
    *_latent_queries("q_b_proj", when=lambda cfg: _mla(cfg).q_rank is not None),
    *_weight("self_attn.q_a_proj", "attention.q_down"),
    _norm("self_attn.q_a_layernorm", "attention.q_norm"),
    *_latents(),
    _norm("self_attn.kv_a_layernorm", "attention.kv_norm"),
    _from_latents("attention.k_up.w", lambda a: slice(0, a.nope_dim)),
    _from_latents("attention.v_up.w", lambda a: slice(a.nope_dim, None)),
    *MLP,
    *EXPERTS,
    *_gated("mlp.shared_experts", "ffn.shared"),
)
# Factors on vectors, logits and what layers add, as a smaller model was tuned with (muP).
FACTORS = (
    _same_float("embedding_multiplier", "embed_scale", 1.0),
    _same_float("residual_multiplier", "residual_scale", 1.0),
)
GRANITE = (*FACTORS, _same_float("attention_multiplier", "attention.scale", 1.0))
GEMMA = (
    EmbedScale(),
    QueryScalar(),
    _switch("attention_bias", *BIASES),
    _dense(),
    Only(hidden_act=("gelu_pytorch_tanh", "gelu"), use_bidirectional_attention=False),
)


FAMILIES: dict[str, Family] = {
    # Llama 2, 3, 3.1, 3.2; SmolLM2.
    "llama": Family(
        "LlamaForCausalLM",
        (
            *_base(),
            *_gqa(),
            _dense(),
            _switch("attention_bias", *BIASES),
            _switch("mlp_bias", "ffn.bias"),
            Rope(),
            Only(rope_interleaved=False),
        ),
        LLAMA,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        (*_base(), *_gqa(), _dense(), Window(4096), Rope()),
        LLAMA,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        (
            *_base(eps=1e-5),
            *_gqa(),
            SPARSE,
            _dense(),
            *_moe(8, 2, "num_local_experts"),
            Window(),
            Rope(1e6),
        ),
        (
            *ENDS,
            *QKV,
            *OUT,
            *BEFORE,
            *MIXTRAL,
        ),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        (*_base(), *_gqa(attention__qkv_bias=True), _dense(), QWEN_WINDOWS, Rope()),
        LLAMA,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        (
            *_base(),
            *_gqa(HeadDim(128), attention__qk_norm="head"),
            _dense(),
            _switch("attention_bias", *BIASES),
            QWEN_WINDOWS,
            Rope(),
        ),
        (*LLAMA, *QK_NORM),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (
            *_base(),
            *_gqa(attention__qk_norm="head"),
            every_step(),
            *_moe(128, 8),
            _switch("norm_topk_prob", "ffn.normalize"),
            _switch("attention_bias", *BIASES),
            Window(4096, "use_sliding_window"),
            Rope(),
        ),
        (*LLAMA, *QK_NORM, *EXPERTS),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        (
            *_base(),
            *_gqa(),
            every_step(),
            *_moe(60, 4, shared_gate=True),
            SharedWidth(5632),
            _switch("norm_topk_prob", "ffn.normalize"),
            _switch("qkv_bias", "attention.qkv_bias", default=True),
            Types(
                lambda source, layers: [
                    "sliding_attention"
                    if source.values.get("use_sliding_window")
                    and i % 2 == 0
                    and i < source.take("max_window_layers", int, 28)
                    else "full_attention"
                    for i in range(len(layers))
                ],
                switch="use_sliding_window",
            ),
            Rope(),
        ),
        (
            *LLAMA,
            *EXPERTS,
            *SHARED_EXPERT,
        ),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        (
            *_base(offset=True),
            *_gqa(HeadDim(256), attention__qk_norm="head", attention__gate=True),
            LinearLayers(),
            Same("linear_num_key_heads", "attention.key_heads", default=16),
            Same("linear_num_value_heads", "attention.value_heads", default=32),
            Same("linear_key_head_dim", "attention.key_dim", default=128),
            Same("linear_value_head_dim", "attention.value_dim", default=128),
            Same("linear_conv_kernel_dim", "attention.conv", default=4),
            every_step(),
            *_moe(512, 10, shared_gate=True),
            SharedWidth(512),
            _switch("norm_topk_prob", "ffn.normalize", default=True),
            Rope(fraction=0.25),
            # The convolution has this activation too.
            Only(hidden_act=("silu", "swish"), attention_bias=False, use_sliding_window=False),
        ),
        (
            *ENDS,
            *BEFORE,
            *_where(
                "gqa",
                _gated_queries("attention.q.w", lambda H: slice(0, H)),
                _gated_queries("attention.gate.w", lambda H: slice(H, None)),
                *_weight("self_attn.k_proj", "attention.k"),
                *_weight("self_attn.v_proj", "attention.v"),
                *OUT,
                *QK_NORM,
            ),
            *_where("deltanet", *DELTANET),
            *MLP,
            *EXPERTS,
            *SHARED_EXPERT,
        ),
        ignored=("mtp.*",),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        (
            *_base(
                tied=True,
                activation="hidden_activation",
                first="gelu_pytorch_tanh",
                norms="both",
                offset=True,
            ),
            *_gqa(HeadDim(256)),
            *GEMMA,
            _same_float("attn_logit_softcapping", "attention.softcap", 50.0, null=None),
            _same_float("final_logit_softcapping", "logit_softcap", 30.0, null=None),
            Types(every(2)),
            Rope(),
        ),
        (*ENDS, *QKV, *OUT, *BOTH, *MLP),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        (
            *_base(
                tied=True,
                activation="hidden_activation",
                first="gelu_pytorch_tanh",
                norms="both",
                offset=True,
            ),
            *_gqa(HeadDim(256), attention__qk_norm="head"),
            *GEMMA,
            _same_float("final_logit_softcapping", "logit_softcap", None),
            Unused("attn_logit_softcapping"),  # its model never reads it
            Types(every(6, "sliding_window_pattern")),
            TypedRope(1e6, 1e4, "rope_local_base_freq"),
        ),
        (*ENDS, *QKV, *OUT, *QK_NORM, *BOTH, *MLP),
        ignored=OF_IMAGES,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        (
            *_base(eps=1e-5, norms="after"),
            *_gqa(attention__qk_norm="whole"),
            _dense(),
            _switch("attention_bias", *BIASES),
            Rope(),
        ),
        (*ENDS, *QKV, *OUT, *QK_NORM, *AFTER, *MLP),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        (
            *_base(eps=1e-5, norms="after"),
            *_gqa(attention__qk_norm="whole"),
            _dense(),
            _switch("attention_bias", *BIASES),
            Types(every(4)),
            TypedRope(5e5, 5e5),
        ),
        (*ENDS, *QKV, *OUT, *QK_NORM, *AFTER, *MLP),
    ),
    # Phi-3, Phi-3.5, Phi-4 and Phi-4-mini.
    "phi3": Family(
        "Phi3ForCausalLM",
        (
            *_base(eps=1e-5),
            *_gqa(HeadDim(written=False)),
            _dense(),
            Window(),
            Rope(
                kinds=("default", "longrope"), fraction=1.0, original=4096, old={"su": "longrope"}
            ),
            Only(attention_bias=False),
        ),
        (
            *ENDS,
            *BEFORE,
            *OUT,
            Tensor(f"{LAYER}self_attn.qkv_proj.weight", "attention.q.w", _QUERIES),
            Tensor(f"{LAYER}self_attn.qkv_proj.weight", "attention.k.w", _KEYS),
            Tensor(f"{LAYER}self_attn.qkv_proj.weight", "attention.v.w", _VALUES),
            *GATE_UP,
        ),
    ),
    # DeepSeek-V3 and R1; Kimi K2.
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (
            *_base(),
            *LATENT,
            first_dense(3),
            *_moe(256, 8, "n_routed_experts"),
            *_grouped(groups=8, chosen=4, scaling=2.5),
            Rope(),
            Only(rope_interleave=True),
        ),
        (*DEEPSEEK, CHOICE_BIAS),
        further_layers=1,
    ),
    # GLM-4.5, GLM-4.6 and GLM-4.5-Air.
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        (
            *_base(eps=1e-5),
            *_gqa(),
            Same(
                "use_qk_norm",
                "attention.qk_norm",
                kind=bool,
                default=False,
                codes={True: "head", False: "none"},
            ),
            _switch("attention_bias", "attention.qkv_bias"),
            first_dense(1),
            *_moe(128, 8, "n_routed_experts"),
            *_grouped(),
            Rope(fraction=0.5),
        ),
        (
            *LLAMA,
            *QK_NORM,
            *EXPERTS,
            CHOICE_BIAS,
            *_gated("mlp.shared_experts", "ffn.shared"),
        ),
        further_layers=1,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        (
            Same("vocab_size", "vocab"),
            Same("hidden_size", "embed"),
            Same("num_attention_heads", "heads"),
            _same_float("rms_norm_eps", "norm_eps", 1e-5),
            _switch("tie_word_embeddings", "tie_embeddings"),
            Only(hidden_act="silu", swiglu_alpha=1.702, swiglu_limit=7.0),
            Fixed(norms="before", norm_offset=False, logit_scale=1.0),
            *_gqa(HeadDim(64), attention__sinks=True),
            _switch("attention_bias", *BIASES, default=True),
            SPARSE,
            _dense(),
            *_moe(128, 4, "num_local_experts", activation="clamped", bias=True, router_bias=True),
            Types(every(2), 128),
            Rope(
                150_000.0,
                default={
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            ),
        ),
        (
            *ENDS,
            *QKV,
            *OUT,
            Tensor(f"{LAYER}self_attn.sinks", "attention.sinks"),
            *BEFORE,
            Tensor(f"{LAYER}mlp.router.weight", "ffn.router", TRANSPOSED),
            Tensor(f"{LAYER}mlp.router.bias", "ffn.router_bias"),
            Tensor(f"{LAYER}mlp.experts.gate_up_proj", "ffn.gate", _experts_part(_EVEN)),
            Tensor(f"{LAYER}mlp.experts.gate_up_proj", "ffn.up", _experts_part(_ODD)),
            Tensor(
                f"{LAYER}mlp.experts.gate_up_proj_bias", "ffn.gate_bias", _experts_part(_EVEN, True)
            ),
            Tensor(
                f"{LAYER}mlp.experts.gate_up_proj_bias", "ffn.up_bias", _experts_part(_ODD, True)
            ),
            Tensor(f"{LAYER}mlp.experts.down_proj", "ffn.down"),
            Tensor(f"{LAYER}mlp.experts.down_proj_bias", "ffn.down_bias"),
        ),
    ),
    # Llama 4 Scout and Maverick, their text.
    "llama4_text": Family(
        "Llama4ForCausalLM",
        (
            *_base(eps=1e-5),
            *_gqa(HeadDim(128)),
            _switch("attention_bias", *BIASES),
            Rope(5e5),
            Unrotated(),
            L2Norm(),
            Temperature(),
            Only(for_llm_compressor=False),
            Types(
                lambda _, layers: [
                    "full_attention" if layer["rope.kind"] == "none" else "chunked_attention"
                    for layer in layers
                ],
                8192,
                known=("full_attention", "chunked_attention"),
            ),
            expert_rows(),
            *_moe(
                16,
                1,
                "num_local_experts",
                router="sigmoid",
                normalize=False,
                scale_input=True,
                shared_experts=1,
            ),
        ),
        (
            *ENDS,
            *PAIRS,
            *OUT,
            *BEFORE,
            *_gated("feed_forward", "ffn"),
            Tensor(f"{LAYER}feed_forward.router.weight", "ffn.router", TRANSPOSED),
            Tensor(f"{LAYER}feed_forward.experts.gate_up_proj", "ffn.gate", _experts_part(_FIRST)),
            Tensor(f"{LAYER}feed_forward.experts.gate_up_proj", "ffn.up", _experts_part(_SECOND)),
            Tensor(f"{LAYER}feed_forward.experts.down_proj", "ffn.down"),
            *_gated("feed_forward.shared_expert", "ffn.shared"),
        ),
        ignored=OF_IMAGES,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        (
            *_base(tied=True),
            *_gqa(),
            _dense(),
            _switch("attention_bias", *BIASES),
            _switch("mlp_bias", "ffn.bias"),
            Rope(2e6),
            Unrotated(),
            Types(
                lambda source, layers: [
                    "sliding_attention"
                    if layer["rope.kind"] == "none"
                    and source.values.get("use_sliding_window")
                    and source.values.get("sliding_window")
                    else "full_attention"
                    for layer in layers
                ],
                None,
                switch="use_sliding_window",
            ),
        ),
        LLAMA,
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        (
            # An old file's "gelu" means the approximation by tanh too.
            *_base(
                tied=True,
                first="gelu_pytorch_tanh",
                offset=True,
                activations={"gelu_pytorch_tanh": "gelu_tanh"}
                | ACTIVATIONS
                | {"gelu": "gelu_tanh"},
            ),
            *_gqa(HeadDim(256)),
            EmbedScale(),
            _switch("attention_bias", *BIASES),
            _dense(),
            Rope(),
            Only(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False),
        ),
        LLAMA,
    ),
    # Gemma 2 without the norms of what its layers add.
    "vaultgemma": Family(
        "VaultGemmaForCausalLM",
        (
            *_base(
                tied=True, activation="hidden_activation", first="gelu_pytorch_tanh", offset=True
            ),
            *_gqa(HeadDim(256)),
            *GEMMA,
            _same_float("attn_logit_softcapping", "attention.softcap", 50.0, null=None),
            _same_float("final_logit_softcapping", "logit_softcap", 30.0, null=None),
            Types(every(2)),
            Rope(),
        ),
        (
            *ENDS,
            *QKV,
            *OUT,
            _norm("input_layernorm", "norm_attention"),
            _norm("pre_feedforward_layernorm", "norm_ffn"),
            *MLP,
        ),
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        (
            *_base(),
            *_gqa(),
            _dense(),
            Types(
                lambda source, layers: (
                    [
                        "full_attention"
                        if source.values.get("sliding_window", 4096) is None
                        else "sliding_attention"
                    ]
                    * len(layers)
                )
            ),
            Rope(),
        ),
        LLAMA,
    ),
    # Code World Model.
    "cwm": Family(
        "CwmForCausalLM",
        (
            *_base(eps=1e-5),
            *_gqa(HeadDim(128)),
            _dense(),
            _switch("mlp_bias", "ffn.bias"),
            Types(
                lambda _, layers: [
                    "sliding_attention" if i % 4 else "full_attention" for i in range(len(layers))
                ],
                8192,
            ),
            Rope(
                1e6,
                default={
                    "rope_theta": 1e6,
                    "rope_type": "llama3",
                    "factor": 16.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            ),
        ),
        LLAMA,
    ),
    # Seed-OSS 36B.
    "seed_oss": Family(
        "SeedOssForCausalLM",
        (
            *_base(),
            *_gqa(HeadDim(128)),
            _dense(),
            _switch("attention_bias", "attention.qkv_bias", default=True),
            _switch("attention_out_bias", "attention.out_bias"),
            _switch("mlp_bias", "ffn.bias"),
            Rope(),
            Unused("residual_dropout"),  # trains
        ),
        LLAMA,
    ),
    # Granite 3.
    "granite": Family(
        "GraniteForCausalLM",
        (
            *_base(),
            *_gqa(),
            *GRANITE,
            LogitScale("logits_scaling", divides=True),
            _dense(),
            _switch("attention_bias", *BIASES),
            _switch("mlp_bias", "ffn.bias"),
            Rope(),
        ),
        LLAMA,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        (
            *_base(),
            *_gqa(HeadDim(written=False)),
            *GRANITE,
            LogitScale("logits_scaling", divides=True),
            SPARSE,
            _dense(),
            *_moe(8, 2, "num_local_experts"),
            _switch("attention_bias", *BIASES),
            Rope(),
        ),
        (
            *ENDS,
            *QKV,
            *OUT,
            *BEFORE,
            _router("block_sparse_moe.router.layer"),
            Tensor(f"{LAYER}block_sparse_moe.input_linear.weight", "ffn.gate", _stacked(_FIRST)),
            Tensor(f"{LAYER}block_sparse_moe.input_linear.weight", "ffn.up", _stacked(_SECOND)),
            Tensor(
                f"{LAYER}block_sparse_moe.output_linear.weight", "ffn.down", View(order=(0, 2, 1))
            ),
        ),
    ),
    "hyperclovax": Family(
        "HyperCLOVAXForCausalLM",
        (
            *_base(),
            *_gqa(),
            *FACTORS,
            _same_float("attention_multiplier", "attention.scale", None),
            LogitScale("logits_scaling", divides=False),
            Same(
                "use_post_norm",
                "norms",
                kind=bool,
                default=True,
                codes={True: "both", False: "before"},
            ),
            _dense(),
            _switch("attention_bias", *BIASES),
            _switch("mlp_bias", "ffn.bias"),
            Rope(),
        ),
        (
            *LLAMA,
            _norm("post_norm1", "norm_attention_out"),
            _norm("post_norm2", "norm_ffn_out"),
        ),
    ),
    # GLM-4-9B of 2024.
    "glm": Family(
        "GlmForCausalLM",
        (
            *_base(eps=1.5625e-07),
            *_gqa(HeadDim(128)),
            _dense(),
            _switch("attention_bias", "attention.qkv_bias", default=True),
            Rope(fraction=0.5),
        ),
        (*ENDS, *SOME_PAIRS, *OUT, *BEFORE, *GATE_UP),
    ),
    # GLM-4-9B and 32B of April 2025, and Z1.
    "glm4": Family(
        "Glm4ForCausalLM",
        (
            *_base(eps=1.5625e-07, norms="both"),
            *_gqa(HeadDim(128)),
            _dense(),
            _switch("attention_bias", "attention.qkv_bias", default=True),
            Rope(fraction=0.5),
        ),
        (
            *ENDS,
            *SOME_PAIRS,
            *OUT,
            *BEFORE,
            _norm("post_self_attn_layernorm", "norm_attention_out"),
            _norm("post_mlp_layernorm", "norm_ffn_out"),
            *GATE_UP,
        ),
    ),
    "helium": Family(
        "HeliumForCausalLM",
        (
            *_base(eps=1e-8),
            *_gqa(HeadDim(128)),
            _dense(),
            _switch("attention_bias", "attention.qkv_bias"),
            _switch("mlp_bias", "ffn.bias"),
            Rope(1e5),
        ),
        (*ENDS, *PAIRS, *OUT, *BEFORE, *MLP),
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        (
            *_base(eps=1e-5, tied=True),
            *_gqa(HeadDim(128)),
            _dense(),
            _switch("use_bias", *BIASES, "ffn.bias"),
            Rope(5e5),
        ),
        (*ENDS, *PAIRS, *OUT, *BEFORE, *MLP),
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        (
            *_base(eps=1e-5, norms="after"),
            *_gqa(attention__qk_norm="head"),
            _dense(),
            Rope(),
            Types(every(4, "sliding_window_pattern")),
            LocalRotation(4096),
        ),
        (*ENDS, *QKV, *OUT, *QK_NORM, *AFTER, *MLP),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        (
            *_base(eps=1e-5),
            *_gqa(HeadDim(written=False), attention__qk_norm="whole"),
            SPARSE,
            _dense(),
            *_moe(64, 8),
            _switch("norm_topk_prob", "ffn.normalize"),
            _switch("attention_bias", *BIASES),
            Rope(),
        ),
        (*ENDS, *QKV, *OUT, *QK_NORM, *BEFORE, *EXPERTS),
    ),
    "flex_olmo": Family(
        "FlexOlmoForCausalLM",
        (
            *_base(norms="after"),
            *_gqa(attention__qk_norm="whole"),
            SPARSE,
            _dense(),
            *_moe(7, 5),
            _switch("norm_topk_prob", "ffn.normalize"),
            _switch("attention_bias", *BIASES),
            Rope(5e5),
        ),
        (*ENDS, *QKV, *OUT, *QK_NORM, *AFTER, *EXPERTS),
    ),
    # DeepSeek-V2-Lite; V2 chooses experts by groups whose score is their best expert's.
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        (
            *_base(),
            *LATENT,
            first_dense(0),
            *_moe(64, 6, "n_routed_experts", normalize=False),
            _same_float("routed_scaling_factor", "ffn.scaling", 1.0),
            Same("n_shared_experts", "ffn.shared_experts", default=2),
            Rope(),
            Only(
                topk_method="greedy",
                norm_topk_prob=False,
                scoring_func="softmax",
                moe_layer_freq=1,
                mlp_bias=False,
            ),
            Unused("n_group"),
            Unused("topk_group"),
        ),
        DEEPSEEK,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        (
            *_base(),
            *_gqa(attention__qk_norm="head"),
            _switch("attention_bias", *BIASES),
            first_dense(0),
            *_moe(128, 6, "n_routed_experts"),
            *_grouped(normalize=False),
            Types(
                lambda source, layers: [
                    "sliding_attention"
                    if source.values.get("sliding_window", 4096) is not None
                    and i >= source.take("max_window_layers", int, 62)
                    else "full_attention"
                    for i in range(len(layers))
                ]
            ),
            Rope(),
        ),
        (
            *LLAMA,
            *QK_NORM,
            *EXPERTS,
            CHOICE_BIAS,
            *_gated("mlp.shared_experts", "ffn.shared"),
        ),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        (
            *_base(),
            *_gqa(HeadDim(128), attention__qk_norm="whole"),
            SPARSE,
            _dense(),
            *_moe(256, 8, "num_local_experts"),
            SIGMOID,
            Rope(5e6, fraction=1.0),
            RotaryDim(),
            Only(scoring_func="sigmoid", use_qk_norm=True, use_routing_bias=True),
        ),
        (
            *ENDS,
            *QKV,
            *OUT,
            *QK_NORM,
            *BEFORE,
            *MIXTRAL,
            Tensor(f"{LAYER}block_sparse_moe.e_score_correction_bias", "ffn.bias"),
        ),
    ),
}

# The same models under another name.
ALIASES = {"kimi_k2": "deepseek_v3"}

WRAPPERS = {
    # Gemma 3 4B, 12B and 27B.
    "gemma3": Wrapper(
        "gemma3_text",
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
        tied=True,
        unused=("final_logit_softcapping",),
    ),
    # Llama 4 Scout and Maverick.
    "llama4": Wrapper(
        "llama4_text",
        {
            "vocab_size": 202_048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
        },
    ),
}
# Keys beside text_config that count for the text, and the others that a wrapper has.
BESIDE = (
    "eos_token_id", "bos_token_id", "pad_token_id", "quantization_config", "is_encoder_decoder", "add_cross_attention",
)  # fmt: skip
OF_WRAPPERS = {
    "text_config", "vision_config", "tie_word_embeddings", "mm_tokens_per_image", "image_token_index", "image_token_id",
    "boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id",
}  # fmt: skip

# What names of the text's tensors begin with in a wrapper: as published, and transformers 5's names of its parameters.
PREFIXES = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model."},
)


def family_of(values: Mapping[str, Any]) -> str:
    """Returns the family, a key of `FAMILIES`, of a config.json.

    Raises:
      UserError: if minitext doesn't have it.
    """
    name = text_config(values).get("model_type")
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in FAMILIES:
        known = [*FAMILIES, *ALIASES, *WRAPPERS]
        hint = did_you_mean(name, known) if isinstance(name, str) else ""
        raise UserError(
            f"config.json: model_type={quoted(name)} isn't known{hint}: minitext has {', '.join(known)}"
        )
    return name


def text_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a wrapper's text alone; any other config.json as it is.

    Raises:
      UserError: for a key beside text_config that isn't known.
    """
    name = values.get("model_type")
    wrapper = WRAPPERS.get(name) if isinstance(name, str) else None
    if wrapper is None:
        return dict(values)
    for key in sorted(set(values) - OF_WRAPPERS - WITHOUT_EFFECT - set(BESIDE)):
        if values[key] is not None:
            raise UserError(
                f"config.json: {key}={quoted(values[key])} ({name}): minitext doesn't know this key beside "
                "text_config; if it changes nothing, remove it"
            )
    inside = values.get("text_config")
    text = wrapper.sizes | ({} if inside is None else checked("text_config", inside, dict))
    text |= {key: values[key] for key in BESIDE if values.get(key) is not None}
    if wrapper.tied is not None:
        text["tie_word_embeddings"] = values.get("tie_word_embeddings", wrapper.tied)
    return text | dict.fromkeys(wrapper.unused) | {"model_type": wrapper.text}


def config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our keys for a model, such as `model.embed`, from its config.json.

    Args:
      values: config.json, parsed.

    Returns:
      Dotted keys with values for `minitext.config.config.resolve`.

    Raises:
      UserError: for a family, a key or a value that minitext doesn't have, naming it.
    """
    name = family_of(values)
    return read(FAMILIES[name].keys, text_config(values), name)


def to_hf(model: ModelConfig, max_length: int, first: str = "llama") -> dict[str, Any]:
    """Returns the config.json of a model: that of the first family that has all its settings.

    Args:
      model: the model. A factor on its logits, which most families lack, then goes into the final norm's scale
        (`logit_factor`).
      max_length: tokens of the longest text, unless the rotary positions say it.
      first: the family to try first, such as the one that the model came from.

    Raises:
      UserError: if no family has them all; names the settings that are in the way of the closest one.
    """
    closest: tuple[int, str, str] | None = None
    for name in dict.fromkeys([first, *FAMILIES]):
        family = FAMILIES[name]
        try:
            values = write(family.keys, model, max_length)
            back = model_of(read(family.keys, values, name))
        except UserError as error:
            wrong = [str(error)]
            far = 1000
        else:
            wrong = differences(model, back)
            far = len(wrong)
            if not wrong:
                # Where the key is missing, some families' default lies beyond a small vocabulary.
                named = {"architectures": [family.architecture], "model_type": name}
                return named | {"pad_token_id": None} | values
        if closest is None or far < closest[0]:
            closest = far, name, ", ".join(wrong)
    assert closest is not None
    raise UserError(f"no model of Hugging Face's has this form: {closest[1]} lacks {closest[2]}")


def model_of(keys: Mapping[str, Any]) -> ModelConfig:
    """Returns the model that `config`'s keys describe, with defaults for all others.

    Raises:
      ConfigError: for values that don't go together.
    """
    from minitext.config.config import resolve

    return resolve([("config.json", dict(keys))]).model


def table(model: ModelConfig, name: str | None = None, there: Collection[str] = ()) -> Table:
    """Returns the names of a model's parameters in a checkpoint of a family.

    Args:
      model: the model.
      name: the family, a key of `FAMILIES`; None: the one that `to_hf` finds.
      there: the names in the checkpoint, which show whether it is a wrapper's; by default it's the family's own.

    Raises:
      UserError: if the family has no name for one of the model's parameters.
    """
    family = FAMILIES[name or to_hf(model, 1)["model_type"]]
    prefixes = next(
        (p for p in PREFIXES if any(tensor.startswith(p["model."]) for tensor in there)), {}
    )
    shapes = parameter_paths(model)
    rows: list[convert.Row] = []
    for path, layers, cfg in stacked(model):
        for tensor in family.tensors:
            ours = f"{path}.{tensor.ours}"
            if LAYER in tensor.name and ours in shapes and tensor.when(cfg):
                experts = cfg.ffn.experts if "{expert}" in tensor.name else 0  # pyright: ignore
                rows.append(_row(tensor, ours, cfg, layers=layers, experts=experts))
    for tensor in family.tensors:
        if LAYER not in tensor.name and tensor.ours in shapes:
            rows.append(_row(tensor, tensor.ours, model))
    if missing := sorted(shapes - {row.path for row in rows}):
        raise UserError(f"{family.architecture} has no tensor for the parameter {missing[0]}")
    further = range(model.layers, model.layers + family.further_layers)
    ignored = (
        "*rotary_emb.inv_freq",
        *(f"model.layers.{layer}.*" for layer in further),
    )
    copies = (("lm_head.weight", "model.embed_tokens.weight"),) if model.tie_embeddings else ()
    return Table(
        tuple(replace(row, name=_prefixed(row.name, prefixes)) for row in rows),
        (*family.ignored, *(_prefixed(name, prefixes) for name in ignored)),
        tuple((_prefixed(a, prefixes), _prefixed(b, prefixes)) for a, b in copies),
    )


def _prefixed(name: str, prefixes: Mapping[str, str]) -> str:
    old = next((old for old in prefixes if name.startswith(old)), "")
    return prefixes.get(old, "") + name.removeprefix(old)


def _row(tensor: Tensor, path: str, cfg: ModelConfig, **more: Any) -> convert.Row:
    view, into = (v if isinstance(v, View) else v(cfg) for v in (tensor.view, tensor.into))
    return convert.Row(tensor.name, path, view, into=into, **more)


def parameter_paths(model: ModelConfig) -> set[str]:
    """Returns the paths of a model's parameters, such as `blocks.attention.q.w`."""
    abstract = nnx.state(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))), nnx.Param)
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(abstract)}


def logit_factor(model: ModelConfig, values: Mapping[str, Any]) -> float:
    """Returns the factor on a model's logits that its config.json has no key for: the final norm's scale takes it.

    Args:
      model: the model.
      values: its config.json, from `to_hf`.
    """
    return hf_keys.logit_factor(model) / hf_keys.logit_factor(model_of(config(values)))
