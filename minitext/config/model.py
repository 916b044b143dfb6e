"""The settings of the decoder.

Chapters: 6.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from minitext.config.section import Section, divisors

# Tensors of a layer that `model.remat_save` can keep; the layers mark them with `checkpoint_name`.
REMAT_NAMES = ("qkv", "attention", "attention_out", "gate_up", "hidden", "latents")
# What products with weights make and the backward pass reads; attention's own products are computed again.
PRODUCTS = ("latents", "qkv", "attention_out", "gate_up")

AttentionImpl = Literal["auto", "xla", "xla_blocked", "cudnn", "pallas_tpu", "pallas_gpu"]
ContextMethod = Literal["ring", "allgather"]
_IMPL = "implementation of the attention kernel"
_CONTEXT = "how tokens see the rest of a sequence split over mesh.context"


class GQAConfig(Section):
    """Grouped-query attention (Ainslie et al. 2023); heads and widths stand in `model`."""

    kind: Literal["gqa"] = Field(default="gqa", description="grouped-query attention")
    impl: AttentionImpl = Field(default="auto", description=_IMPL)
    context: ContextMethod = Field(default="ring", description=_CONTEXT)

    def faults_in(self, model: "ModelConfig") -> Iterator[str]:
        """Yields a fault for each of the model's values that does not go with this attention."""
        if model.head_dim is None and model.embed % model.heads:
            yield (
                f"model.embed={model.embed} is not divisible by model.heads={model.heads}: choose model.heads "
                f"among {divisors(model.embed)}, or set model.head_dim"
            )
        elif model.H % 2:
            yield (
                f"model.head_dim={model.H} is odd, and rotary positions turn pairs: choose model.heads so that "
                "embed / heads is even, or set an even model.head_dim"
            )
        if model.heads % model.K:
            yield (
                f"model.heads={model.heads} is not divisible by model.kv_heads={model.kv_heads}: choose "
                f"model.kv_heads among {divisors(model.heads)}"
            )
        if "latents" in model.remat_save:
            yield (
                "model.remat_save: latents are what model.attention.kind=mla makes: leave them out with "
                "model.attention.kind=gqa"
            )

    def embed_sizes(self) -> dict[str, int]:
        """Key -> size of further dimensions that are split as `model.embed` is: none."""
        return {}


class MLAConfig(Section):
    """Multi-head latent attention (DeepSeek-AI 2024): keys and values are made from one latent vector of low rank.

    The defaults are DeepSeek-V2's proportions at heads of 32, but for the rank, which is smaller with few heads.
    """

    kind: Literal["mla"] = Field(default="mla", description="multi-head latent attention")
    impl: AttentionImpl = Field(default="auto", description=_IMPL)
    context: ContextMethod = Field(default="ring", description=_CONTEXT)
    q_rank: int | None = Field(
        default=None, ge=1, description="mla: width of the queries' latent; null: they have none"
    )
    kv_rank: int = Field(
        default=64, ge=1, description="mla: width of the latent that keys and values are made from"
    )
    nope_dim: int = Field(
        default=32, ge=1, description="mla: width of a head's queries and keys without positions"
    )
    rope_dim: int = Field(
        default=16,
        ge=2,
        description="mla: width of the part with rotary positions, of one key for all heads",
    )
    v_dim: int = Field(default=32, ge=1, description="mla: width of a head's values")

    def faults(self) -> Iterator[str]:
        """Yields the fault if rotary positions have no pairs to turn."""
        if self.rope_dim % 2:
            yield (
                f"model.attention.rope_dim={self.rope_dim} is odd, and rotary positions turn pairs: choose an "
                "even one"
            )

    def faults_in(self, model: "ModelConfig") -> Iterator[str]:
        """Yields a fault for each of the model's values that has no use with this attention."""
        if model.kv_heads is not None:
            yield (
                f"model.kv_heads={model.kv_heads} has no use with model.attention.kind=mla, in which each head has "
                "its own keys and values: set model.kv_heads=null"
            )
        if model.head_dim is not None:
            yield (
                f"model.head_dim={model.head_dim} has no use with model.attention.kind=mla: set it to null, and "
                "model.attention.nope_dim, rope_dim and v_dim"
            )

    def embed_sizes(self) -> dict[str, int]:
        """Key -> size of further dimensions that are split as `model.embed` is: the latents, as rows of matrices."""
        sizes = {"kv_rank": self.kv_rank} | ({"q_rank": self.q_rank} if self.q_rank else {})
        return {f"model.attention.{name}": size for name, size in sizes.items()}


class SwiGLUConfig(Section):
    """Gated feed-forward layer (Shazeer 2020); its width stands in `model.mlp`."""

    kind: Literal["swiglu"] = Field(default="swiglu", description="gated linear unit with SiLU")


class MoEConfig(Section):
    """Mixture of experts: many SwiGLU layers `model.mlp` wide, of which each token gets a few."""

    kind: Literal["moe"] = Field(default="moe", description="mixture of experts")
    experts: int = Field(default=8, ge=2, description="feed-forward layers to choose from (E)")
    experts_per_token: int = Field(default=2, ge=1, description="experts of each token (k)")
    shared_experts: int = Field(
        default=0,
        ge=0,
        description="experts that all tokens get, besides; one layer as wide as all",
    )
    router: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="what makes scores of the router's logits"
    )
    normalize: bool = Field(
        default=True, description="whether the weights of a token's experts sum to 1"
    )
    scaling: float = Field(default=1.0, gt=0, description="factor on the weights")
    groups: int = Field(
        default=1, ge=1, description="groups of experts, such as those of one machine"
    )
    groups_per_token: int = Field(
        default=1, ge=1, description="groups from which a token's experts come"
    )
    capacity_factor: float | None = Field(
        default=None,
        gt=0,
        description="slots of an expert in even shares of a row, what is over is dropped; null: nothing is dropped",
    )
    balance_loss: float = Field(
        default=0.01, ge=0, description="weight of the load-balance loss, in each layer"
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        description="weight of the router's squared log-normalizer, in each layer",
    )
    bias_rate: float = Field(
        default=0.0,
        ge=0,
        description="change per step of biases that balance the load without a loss; 0: no biases",
    )

    def faults(self) -> Iterator[str]:
        """Yields a fault for numbers of experts and groups that do not go together."""
        E, k, G, g = self.experts, self.experts_per_token, self.groups, self.groups_per_token
        if k > E:
            yield (
                f"model.ffn.experts_per_token={k} is more than model.ffn.experts={E}: choose "
                f"{E} at most"
            )
        if E % G:
            yield (
                f"model.ffn.experts={E} is not divisible by model.ffn.groups={G}: choose "
                f"model.ffn.groups among {divisors(E)}"
            )
        elif g > G:
            yield (
                f"model.ffn.groups_per_token={g} is more than model.ffn.groups={G}: choose {G} at most"
            )
        elif G > 1 and k <= E and g * (E // G) < k:
            yield (
                f"model.ffn.groups_per_token={g} of {E // G} experts each are fewer than "
                f"model.ffn.experts_per_token={k}: choose model.ffn.groups_per_token={-(-k * G // E)} or more"
            )


class ModelConfig(Section):
    """The decoder: sizes, numerics and how its layers are run."""

    vocab: int = Field(default=320, ge=2, description="rows of the embedding table (V)")
    layers: int = Field(default=4, ge=1, description="decoder layers (L)")
    embed: int = Field(default=192, ge=1, description="width of the residual stream (D)")
    heads: int = Field(default=6, ge=1, description="query heads (N)")
    kv_heads: int | None = Field(
        default=None, ge=1, description="key and value heads (K); null: as many as heads"
    )
    head_dim: int | None = Field(
        default=None, ge=2, description="width of a head (H); null: embed / heads"
    )
    mlp: int = Field(
        default=512, ge=1, description="width of the feed-forward layer, or of each expert (F)"
    )
    rope_theta: float = Field(default=10_000.0, gt=0, description="base of the rotary frequencies")
    norm_eps: float = Field(default=1e-6, gt=0, description="added to the mean square in RMSNorm")
    tie_embeddings: bool = Field(
        default=False, description="whether the output layer is the embedding table transposed"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="compute type; parameters stay float32"
    )
    scan_layers: bool = Field(
        default=True, description="run layers by lax.scan (compiles once) instead of unrolled"
    )
    remat: Literal["none", "dots", "names", "full"] = Field(
        default="none",
        description="what the backward pass recomputes: nothing, all but matmuls, all but remat_save, or everything",
    )
    remat_save: tuple[str, ...] = Field(
        default=(),
        description=f"remat=names: a layer's tensors to keep, among {', '.join(REMAT_NAMES)}",
    )
    attention: GQAConfig | MLAConfig = Field(
        default=GQAConfig(), discriminator="kind", description="attention variant"
    )
    ffn: SwiGLUConfig | MoEConfig = Field(
        default=SwiGLUConfig(), discriminator="kind", description="feed-forward variant"
    )

    @field_validator("attention", mode="before")
    @classmethod
    def _gqa_by_default(cls, value: Any) -> Any:
        return {"kind": "gqa"} | value if isinstance(value, dict) else value

    @property
    def saved(self) -> tuple[str, ...]:
        """The named tensors that a rematerialised layer keeps for its backward pass."""
        return PRODUCTS if self.remat == "dots" else self.remat_save

    @property
    def K(self) -> int:
        """Key and value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def H(self) -> int:
        """Width of a head, resolved."""
        return self.head_dim or self.embed // self.heads

    def faults(self) -> Iterator[str]:
        """Yields a fault for each pair of values that do not go together."""
        yield from self.ffn.faults()
        save = ",".join(self.remat_save)
        if unknown := [name for name in self.remat_save if name not in REMAT_NAMES]:
            yield (
                f"model.remat_save=[{save}]: no tensor of a layer is called {', '.join(unknown)}: choose among "
                f"{', '.join(REMAT_NAMES)}"
            )
        if self.remat == "names" and not self.remat_save:
            yield (
                "model.remat=names keeps what model.remat_save lists, and it is empty: set for instance "
                "model.remat_save=[qkv,gate_up], or model.remat=full"
            )
        if self.remat != "names" and self.remat_save:
            yield f"model.remat_save=[{save}] has no use with model.remat={self.remat}: set model.remat=names"
        yield from self.attention.faults()
        yield from self.attention.faults_in(self)
