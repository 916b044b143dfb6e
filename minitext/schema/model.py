"""The settings of the decoder.

Chapters: 6.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from minitext.schema.section import Section, divisors

# Tensors of a layer that `model.remat_save` can keep; the layers mark them with `checkpoint_name`.
REMAT_NAMES = ("qkv", "attention", "attention_out", "gate_up", "hidden")
# What products with weights make and the backward pass reads; attention's own products are computed again.
PRODUCTS = ("qkv", "attention_out", "gate_up")


class GQAConfig(Section):
    """Grouped-query attention (Ainslie et al. 2023); heads and widths stand in `model`."""

    kind: Literal["gqa"] = Field(default="gqa", description="grouped-query attention")
    impl: Literal["auto", "xla", "xla_blocked", "cudnn"] = Field(
        default="auto", description="implementation of the attention kernel"
    )
    context: Literal["ring", "allgather"] = Field(
        default="ring", description="how tokens see the rest of a sequence split over mesh.context"
    )


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
    attention: GQAConfig = Field(default=GQAConfig(), description="attention variant")
    ffn: SwiGLUConfig | MoEConfig = Field(
        default=SwiGLUConfig(), discriminator="kind", description="feed-forward variant"
    )

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
        if self.head_dim is None and self.embed % self.heads:
            yield (
                f"model.embed={self.embed} is not divisible by model.heads={self.heads}: choose model.heads "
                f"among {divisors(self.embed)}, or set model.head_dim"
            )
        elif self.H % 2:
            yield (
                f"model.head_dim={self.H} is odd, and rotary positions turn pairs: choose model.heads so that "
                "embed / heads is even, or set an even model.head_dim"
            )
        if self.heads % self.K:
            yield (
                f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}: choose "
                f"model.kv_heads among {divisors(self.heads)}"
            )
