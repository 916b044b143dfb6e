"""The model section: the decoder and its attention and feed-forward variants.

Chapters: 6.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import field_validator

from minitext.config.section import Section, divisors, setting

# A layer's tensors that `model.remat_save` can keep; the layers mark them with `checkpoint_name`.
REMAT_NAMES = ("qkv", "attention", "attention_out", "gate_up", "hidden", "latents")
# Results of products with weights that the backward pass reads; attention's own products are recomputed.
PRODUCTS = ("latents", "qkv", "attention_out", "gate_up")

AttentionImpl = Literal["auto", "xla", "xla_blocked", "cudnn", "pallas_tpu", "pallas_gpu"]
ContextMethod = Literal["ring", "allgather"]
_IMPL = "implementation of the attention kernel"
_CONTEXT = "how tokens attend to the rest of a sequence split over mesh.context"


class GQAConfig(Section):
    """Grouped-query attention (Ainslie et al. 2023); `model` has its heads and widths."""

    kind: Literal["gqa"] = setting("gqa", "grouped-query attention")
    impl: AttentionImpl = setting("auto", _IMPL)
    context: ContextMethod = setting("ring", _CONTEXT)

    def problems_in(self, model: "ModelConfig") -> Iterator[str]:
        """Checks the model's heads and widths, and that no latents are to be kept."""
        if model.head_dim is None and model.embed % model.heads:
            yield (
                f"model.embed={model.embed} is not divisible by model.heads={model.heads}: choose model.heads "
                f"among {divisors(model.embed)}, or set model.head_dim"
            )
        elif model.H % 2:
            yield (
                f"model.head_dim={model.H} is odd, and rotary positions rotate pairs: choose model.heads so that "
                "embed / heads is even, or set an even model.head_dim"
            )
        if model.heads % model.K:
            yield (
                f"model.heads={model.heads} is not divisible by model.kv_heads={model.kv_heads}: choose "
                f"model.kv_heads among {divisors(model.heads)}"
            )
        if "latents" in model.remat_save:
            yield (
                "model.remat_save: only model.attention.kind=mla makes latents: leave them out with "
                "model.attention.kind=gqa"
            )

    def embed_sizes(self) -> dict[str, int]:
        """Returns other dimensions that are split like `model.embed`, as key -> size: none."""
        return {}


class MLAConfig(Section):
    """Multi-head latent attention (DeepSeek-AI 2024): keys and values are computed from one low-rank latent vector.

    The defaults have DeepSeek-V2's proportions at 32 per head, except that few heads need a smaller rank.
    """

    kind: Literal["mla"] = setting("mla", "multi-head latent attention")
    impl: AttentionImpl = setting("auto", _IMPL)
    context: ContextMethod = setting("ring", _CONTEXT)
    q_rank: int | None = setting(None, "mla: width of the queries' latent; null: no latent", ge=1)
    kv_rank: int = setting(64, "mla: width of the keys' and values' latent", ge=1)
    nope_dim: int = setting(32, "mla: width of a head's queries and keys without positions", ge=1)
    rope_dim: int = setting(16, "mla: width of the rotary part; its key serves all heads", ge=2)
    v_dim: int = setting(32, "mla: width of a head's values", ge=1)

    def problems(self) -> Iterator[str]:
        """Checks that the rotary width is even."""
        if self.rope_dim % 2:
            yield (
                f"model.attention.rope_dim={self.rope_dim} is odd, and rotary positions rotate pairs: choose an "
                "even one"
            )

    def problems_in(self, model: "ModelConfig") -> Iterator[str]:
        """Checks that the model sets nothing that only GQA uses."""
        if model.kv_heads is not None:
            yield (
                f"model.kv_heads={model.kv_heads} has no effect with model.attention.kind=mla, in which each head has "
                "its own keys and values: set model.kv_heads=null"
            )
        if model.head_dim is not None:
            yield (
                f"model.head_dim={model.head_dim} has no effect with model.attention.kind=mla: set it to null, and set "
                "model.attention.nope_dim, rope_dim and v_dim instead"
            )

    def embed_sizes(self) -> dict[str, int]:
        """Returns other dimensions that are split like `model.embed`, as key -> size: the latents, rows of matrices."""
        sizes = {"kv_rank": self.kv_rank} | ({"q_rank": self.q_rank} if self.q_rank else {})
        return {f"model.attention.{name}": size for name, size in sizes.items()}


class SwiGLUConfig(Section):
    """Gated feed-forward layer (Shazeer 2020); `model.mlp` is its width."""

    kind: Literal["swiglu"] = setting("swiglu", "gated linear unit with SiLU")


class MoEConfig(Section):
    """Mixture of experts: many SwiGLU layers, each `model.mlp` wide; every token uses a few of them."""

    kind: Literal["moe"] = setting("moe", "mixture of experts")
    experts: int = setting(8, "feed-forward layers to choose from (E)", ge=2)
    experts_per_token: int = setting(2, "experts per token (k)", ge=1)
    shared_experts: int = setting(0, "more experts, run by every token as one wide layer", ge=0)
    router: Literal["softmax", "sigmoid"] = setting("softmax", "scores from the router's logits")
    normalize: bool = setting(True, "make the weights of a token's experts sum to 1")
    scaling: float = setting(1.0, "factor on the weights", gt=0)
    groups: int = setting(1, "groups of experts, such as those on one machine", ge=1)
    groups_per_token: int = setting(1, "groups from which a token's experts come", ge=1)
    capacity_factor: float | None = setting(
        None, "an expert's slots in even shares of a row; the rest is dropped; null: dropless", gt=0
    )
    balance_loss: float = setting(0.01, "weight of the load-balance loss per layer", ge=0)
    z_loss: float = setting(0.0, "weight of the router's squared log-normalizer per layer", ge=0)
    bias_rate: float = setting(0.0, "step size of load-balancing biases; 0: no biases", ge=0)

    def problems(self) -> Iterator[str]:
        """Checks that the numbers of experts and groups are compatible."""
        E, k, G, g = self.experts, self.experts_per_token, self.groups, self.groups_per_token
        if k > E:
            yield f"model.ffn.experts_per_token={k} is more than model.ffn.experts={E}: choose {E} at most"
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
    """The decoder: its sizes, numerics and how its layers run."""

    vocab: int = setting(320, "rows of the embedding table (V)", ge=2)
    layers: int = setting(4, "decoder layers (L)", ge=1)
    embed: int = setting(192, "width of the residual stream (D)", ge=1)
    heads: int = setting(6, "query heads (N)", ge=1)
    kv_heads: int | None = setting(None, "key and value heads (K); null: as many as heads", ge=1)
    head_dim: int | None = setting(None, "width of a head (H); null: embed / heads", ge=2)
    mlp: int = setting(512, "width of the feed-forward layer, or of each expert (F)", ge=1)
    rope_theta: float = setting(10_000.0, "base of the rotary frequencies", gt=0)
    norm_eps: float = setting(1e-6, "added to the mean square in RMSNorm", gt=0)
    tie_embeddings: bool = setting(False, "use the transposed embedding table as the output layer")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "compute type; parameters: float32")
    scan_layers: bool = setting(True, "run layers by lax.scan (compiles once) instead of unrolling")
    remat: Literal["none", "dots", "names", "full"] = setting(
        "none", "recomputed in backward: nothing, all but matmuls, all but remat_save, everything"
    )
    remat_save: tuple[str, ...] = setting(
        (), f"remat=names: a layer's tensors to keep, among {', '.join(REMAT_NAMES)}"
    )
    attention: GQAConfig | MLAConfig = setting(GQAConfig(), "attention", discriminator="kind")
    ffn: SwiGLUConfig | MoEConfig = setting(SwiGLUConfig(), "feed-forward", discriminator="kind")

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

    def problems(self) -> Iterator[str]:
        """Checks the rematerialised names and both variants."""
        yield from self.ffn.problems()
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
            yield f"model.remat_save=[{save}] has no effect with model.remat={self.remat}: set model.remat=names"
        yield from self.attention.problems()
        yield from self.attention.problems_in(self)
