"""What devices send each other in one train step, by formulas.

`predict` sums what each kind of parallelism sends; every term is one line with a name. `minitext.perf.comms_audit` puts
the compiled program beside it: where both agree, the program sends nothing by accident. The formulas are those of
Austin et al. 2025 ("How to Scale Your Model", parts 3 and 5), and the cost of a ring that of Thakur et al. 2005.

Arrays are counted, not instructions, because compilers combine several collectives into one. Scalars (the loss, token
counts, norms) and integers (tokens, positions, segment ids) are left out: they are small, and no simple rule says where
a compiler merges them or moves them out of loops.

Chapters: 11, 12, 13.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from minitext.compiler.hlo import ring_bytes
from minitext.compiler.report import DCN
from minitext.compiler.targets import Target
from minitext.config.config import Config
from minitext.models.flops import adapted, count_attention
from minitext.models.moe import capacity
from minitext.perf.sizes import Matrix, Sizes, check_products, slices_of
from minitext.sharding.mesh import count_slices, show_factors
from minitext.sharding.pipeline_schedule import stored_groups
from minitext.terminal import show_bytes

LANES = 128  # elements in a row of a TPU's vector register
TILE_ROWS = 16  # rows in a bfloat16 tile of a TPU's memory
CHECKED = "TPU v5 lite", "TPU v6 lite"  # chips whose programs these formulas were checked against
MANY = 64  # devices of a slice that the TPU compiler sums and gathers over in ways of their own
SUMMED_BYTES = 2**24  # what it sums instead of gathering over so many chips in two dimensions


class Term(NamedTuple):
    """One line of the formula.

    Attributes:
      name: what is sent.
      kind: such as `all-gather`.
      group: devices in a group.
      arrays: bytes of each array on one device, counted as in `hlo.Collective`.
      runs: how often they are sent in one step.
    """

    name: str
    kind: str
    group: int
    arrays: tuple[int, ...]
    runs: int

    @property
    def count(self) -> int:
        """Arrays sent in one step."""
        return self.runs * len(self.arrays)

    @property
    def bytes(self) -> int:
        """Bytes of these arrays in one step."""
        return self.runs * sum(self.arrays)

    @property
    def moved(self) -> float:
        """Bytes that each device sends in one step, by the ring algorithms."""
        return self.runs * ring_bytes(self.kind, sum(self.arrays), self.group)

    def by_network(self) -> "Iterator[Term]":
        """Yields what is sent within a slice and, of kind `... (dcn)`, across slices.

        A gather crosses before the slices gather, and a sum after they have summed, so each device of a slice sends
        another part. TPUs sum across slices by an all-reduce, also if each device keeps only a part of the sum. A
        permute is counted as that of a device whose neighbour is in another slice.
        """
        slices = slices_of(self.group)
        within = int(self.group) // slices
        yield self._replace(group=within)
        if slices > 1:
            kind = "all-reduce" if self.kind == "reduce-scatter" else self.kind
            parts = 1 if kind.endswith(("permute", "to-all")) else within
            arrays = tuple(size // parts for size in self.arrays)
            yield Term(f"{self.name}, across slices", kind + DCN, slices, arrays, self.runs)


def check(cfg: Config) -> None:
    """Raises UserError if products are quantized, which `predict` does not know."""
    check_products(cfg.model, "what devices send")


def predict(
    cfg: Config, mesh: Mesh | AbstractMesh, backend: str, target: Target | None = None
) -> list[Term]:
    """Predicts what one train step sends, term by term.

    The formula depends on the compiler. The TPU compiler emits a reduce-scatter where each device keeps only a part of
    a sum, adds up what it sums over the same devices before it sends anything, sends bfloat16 where only matrix
    products read the result, and gathers a vector by an all-reduce if devices hold less than whole rows of it. XLA's
    CPU backend emits an all-reduce, sums each product on its own, one mesh axis after the other, and sends the compute
    type. It also knows which devices are in one slice, and does in two stages what crosses slices.

    Args:
      cfg: the configuration; its layers are assumed to be scanned. `mesh.dcn` says what crosses slices.
      mesh: the mesh.
      backend: `cpu` or `tpu`.
      target: the chips of an abstract mesh, whose network is otherwise taken to wrap around in all dimensions.

    Returns:
      The terms that are not empty. `notes` says where they may be wrong.

    Raises:
      UserError: if products are quantized.
    """
    check(cfg)
    s = Sizes(cfg, mesh, backend, target)
    terms = []
    trained = _gradients, _zero  # of weights, which beside adapters aren't trained
    parts = [pair for pair in PARTS if pair[0] not in trained] if cfg.model.lora.rank else PARTS
    for part, outside in parts:
        for kind in s.kinds:
            where = f"{kind.name}: " if kind.name else ""
            terms += [term._replace(name=where + term.name) for term in part(kind)]
        terms += outside(s)
    if s.tpu:
        terms = [part for term in terms for part in term.by_network()]
        terms = [part for term in terms for part in _gathers(s, term)]
    return [t for t in terms if t.group > 1 and t.count]


def across_slices(cfg: Config, mesh: Mesh | AbstractMesh) -> list[str]:
    """Says which axes `mesh.dcn` lets cross slices, and what each device of a TPU sends there in a step."""
    factors = cfg.mesh.dcn.factors()
    if not factors:
        return []
    sent = show_bytes(sum_across(predict(cfg, mesh, "tpu")))
    lines = [
        f"across {math.prod(factors.values())} slices: {show_factors(factors)}; each device sends {sent} to the others "
        "in a step"
    ]
    for axis in ("context", "tensor", "expert"):  # what crosses by these can't wait
        if axis in factors:
            only = {f"mesh.dcn.{other}": 1 for other in factors if other != axis}
            sent = show_bytes(sum_across(predict(cfg.replace(only), mesh, "tpu")))
            lines.append(
                f"mesh.dcn.{axis}={factors[axis]}: {sent} of that cross the slow network while a layer waits for them: "
                "let data, stage or fsdp cross instead"
            )
    return lines


def sum_across(terms: list[Term]) -> int:
    """Returns the bytes that each device sends to other slices."""
    return round(sum(term.moved for term in terms if term.kind.endswith(DCN)))


def notes(cfg: Config, mesh: Mesh | AbstractMesh, backend: str) -> list[str]:
    """Returns a line for each setting that `predict` does not model and that can make it differ from the program."""
    return list(_notes(cfg, mesh, backend)) if mesh.size > 1 else []


def _notes(cfg: Config, mesh: Mesh | AbstractMesh, backend: str) -> Iterator[str]:
    s, slices, chip = Sizes(cfg, mesh, backend), 1, ""
    if isinstance(mesh, Mesh):
        slices = count_slices(cfg.mesh, list(mesh.devices.flat))
        chip = mesh.devices.flat[0].device_kind
    if slices > 1 and s.tpu:
        yield f"{slices} slices: the compiler may send some arrays in rings round all slices"
    elif slices > 1:
        yield f"{slices} simulated slices: this compiler doesn't know which devices are in one"
    if backend not in ("cpu", "tpu"):
        yield f"the compiler for {backend}: this is the formula for XLA's CPU backend"
    if chip.startswith("TPU") and chip not in CHECKED:
        yield f"{chip}: this is the formula for v5e and v6e"
    if cfg.optim.kind == "muon" and s.fsdp * s.optimizer * s.tensor > 1:
        yield "optim.kind=muon: it multiplies whole matrices, which it gathers"
    groups = s.stages * stored_groups(cfg.pipeline, s.stages)
    layers = min(stack.repeats for stack in cfg.model.stacks.values()) // groups
    if (s.stages == 1 or s.one_f_one_b) and layers == 1:
        yield "one layer in a loop: compilers merge what its forward and backward pass send"
    if s.experts > 1 and s.tpu and any(k.moe and k.moe.capacity_factor is None for k in s.kinds):
        yield (
            "model.ffn.kind=moe: a ragged all-to-all sends what the router chose; an even share for each expert is "
            "counted"
        )
    if cfg.model.lora.rank and (s.tpu or s.optimizer * s.sequence * s.stages * s.experts > 1):
        yield (
            "model.lora: what adapters send is predicted for XLA's CPU backend alone, and for mesh.data, fsdp, context "
            "and tensor"
        )
    if cfg.train.loss_impl != "xla":
        yield f"train.loss_impl={cfg.train.loss_impl}: this is the formula for xla"
    ways = max(s.fsdp, s.optimizer)
    widths = {cfg.model.embed, *(width for kind in s.kinds for width in kind.latents)}
    rows = [width // ways for width in sorted(widths) if width // ways % TILE_ROWS]
    if s.tpu and ways > 1 and rows and not _sums_whole(s, ways):
        yield (
            f"weights in {ways} parts of {' and '.join(map(str, rows))} rows, no whole tiles of {TILE_ROWS}: the TPU "
            "compiler sums some whole, pads others to whole tiles, and sends their rows on by collective-permutes"
        )


def _sum_kind(s: Sizes, group: int) -> str:
    """Returns the collective that sums an array if each device of a group keeps one part.

    Only the TPU compiler emits a reduce-scatter, and not everywhere: see `_sums_whole`.
    """
    return "reduce-scatter" if s.tpu and not _sums_whole(s, group) else "all-reduce"


def _sums_whole(s: Sizes, group: int) -> bool:
    """Whether the TPU compiler has no reduce-scatter for a group, and no need of parts that are whole tiles.

    It has none over all of a slice of 64 devices or more, unless its chips form three dimensions without being a torus:
    found by compiling for v5e, v5p and v6e.
    """
    return _is_large_slice(s, group) and (s.target is None or s.target.is_flat or s.target.is_torus)


def _is_large_slice(s: Sizes, group: int) -> bool:
    """Whether a group is all of a slice with 64 devices or more, and maybe as much of other slices."""
    within = group // slices_of(group)
    return within >= MANY and within == s.slice_devices


def _gathers(s: Sizes, term: Term) -> Iterator[Term]:
    """Yields a term with those of its arrays that the TPU compiler gathers by adding up parts padded with zeros.

    Over all of a large slice it does so if the slice isn't a torus: with up to 16 MiB for chips in two dimensions, with
    all for chips in three. Found by compiling for v5e, v5p and v6e.
    """
    summed, target = (), s.target
    if target is not None and term.kind == "all-gather" and _is_large_slice(s, term.group):
        most = SUMMED_BYTES if target.is_flat else math.inf
        summed = tuple(n for n in term.arrays if n <= most and not target.is_torus)
    rest = tuple(n for n in term.arrays if n not in summed)
    yield term._replace(arrays=rest)
    yield term._replace(kind="all-reduce", arrays=summed)


def _scaled(numbers: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(number * size for number in numbers)


def _vector_kind(s: Sizes, group: int, width: int) -> str:
    """Returns the collective that gathers a vector."""
    return "all-reduce" if s.tpu and width // group % LANES else "all-gather"


def _vectors(s: Sizes, name: str, widths: tuple[int, ...], size: int, runs: int) -> Iterator[Term]:
    """Yields the gathers over fsdp of vectors with elements of `size` bytes."""
    for width in dict.fromkeys(widths):
        kind = _vector_kind(s, s.fsdp, width)
        same = tuple(size * w for w in widths if w == width)
        yield Term(name, kind, s.fsdp, same, runs)


def _fsdp(s: Sizes) -> Iterator[Term]:
    """Weights are gathered for the forward pass and again for the backward pass (Rajbhandari et al. 2020).

    Rounded ones have scales, which are gathered with them (Wang et al. 2023). Devices that split a row first find its
    largest number together.
    """
    r, weights, biases = s.runs, s.matrices, s.embed_biases
    # The last product of a layer is not needed again, nor is its bias, unless a norm or a gate follows. Experts send
    # for themselves.
    ends = s.dense and s.model.norms == "before" and not s.shared_gate
    yield from _weights(s, "all-gather of the weights, forward", weights, r.forward)
    yield from _weights(s, "all-gather of the weights, backward", weights, r.backward)
    yield from _vectors(s, "RMSNorm scales, forward", s.norms + s.latents, 4, r.forward)
    yield from _vectors(s, "biases, forward", biases, s.sent, r.forward)
    if s.shared_gate:
        yield from _vectors(s, "shared experts' gate, forward", (s.model.embed,), 4, r.forward)
    if not s.recomputes:
        return
    yield from _vectors(s, "RMSNorm scales, recomputed", s.norms + s.latents, 4, r.backward)
    again = biases[:-1] if ends and s.model.ffn.bias else biases
    yield from _vectors(s, "biases, recomputed", again, s.sent, r.backward)
    if s.shared_gate:
        yield from _vectors(s, "shared experts' gate, recomputed", (s.model.embed,), 4, r.backward)
    if s.converts:
        again = weights[:-1] if ends else weights
        yield from _weights(s, "weights, recomputed", again, r.backward)


def _weights(
    s: Sizes, name: str, matrices: tuple[Matrix, ...], runs: int, ways: int | None = None
) -> Iterator[Term]:
    """Yields the gathers of weights over fsdp, whose columns or rows `ways` devices split, by default `tensor`."""
    yield Term(name, "all-gather", s.fsdp, _sizes(matrices, s.sent_weight), runs)
    if s.rounded:
        largest = tuple(4 * m.stored // s.fsdp for m in matrices if m.split)
        yield Term(f"{name}: rows' largest", "all-reduce", ways or s.tensor, largest, runs)
        yield from _vectors(s, f"{name}: scales", tuple(m.stored for m in matrices), 4, runs)


def _fsdp_outside(s: Sizes) -> Iterator[Term]:
    """Embedding, output layer and last norm are gathered as the layers are, but not in every layer."""
    model, r, chunks = s.model, s.runs, s.cfg.train.loss_chunks
    # What a loop does not change is gathered before it. A TPU also takes it out of branches, unless the program
    # converts it there.
    in_ticks = s.one_f_one_b and (chunks > 1 or not s.tpu)
    last = 1 if not s.one_f_one_b else s.cfg.train.microbatches if s.tpu else r.outside
    head = r.outside if in_ticks else 1
    table = 1 if not s.tpu else head if model.tie_embeddings else last
    if s.tpu and model.dtype == "bfloat16":
        head, table = r.chunks, r.outside
    # A lookup is not a product: the table is sent in the compute type.
    yield Term("embedding table", "all-gather", s.fsdp, (s.table * s.sent,), table)
    matrix = Matrix(model.embed, model.vocab // s.vocab, "columns")
    for name, runs in _output_layer(s, head, in_ticks):
        if model.tie_embeddings:  # which is never rounded
            yield Term(name, "all-gather", s.fsdp, (s.table * s.sent_operand,), runs)
        else:
            yield from _weights(s, name, (matrix,), runs, s.vocab)
    yield from _vectors(s, "last RMSNorm's scale", (model.embed,), 4, last)


def _output_layer(s: Sizes, head: int, in_ticks: bool) -> Iterator[tuple[str, int]]:
    """Yields each gather of the output layer and how often it runs: the first, maybe in a pipeline's ticks, `head`."""
    tied, chunks = s.model.tie_embeddings, s.cfg.train.loss_chunks
    if not tied or in_ticks:
        yield "output layer", head
    if chunks > 1:
        yield "output layer, for each chunk", s.runs.chunks
    if s.converts and not tied:
        yield "output layer, backward", head if chunks == 1 else s.runs.chunks


def _gradients(s: Sizes) -> Iterator[Term]:
    """Gradients are summed over all devices that saw other tokens; what is stored in parts stays in parts."""
    r = s.runs
    kind = _sum_kind(s, s.fsdp) if s.fsdp > 1 else "all-reduce"
    # A matrix that tensor parallelism doesn't split has the same gradient on each of those devices. If they can take
    # the parts that fsdp stores, each computes only one, and sends it to where it belongs.
    moves = s.fsdp > 1 and s.tensor % s.fsdp == 0
    whole = tuple(m for m in s.matrices if moves and not m.split)
    rest = tuple(m for m in s.matrices if not moves or m.split)
    yield from _sums(
        s, "weights", kind, _sizes(rest, s.sent), _keeps_sum(s, *_columns(rest)), r.backward
    )
    parts = tuple(size // s.fsdp for size in _sizes(whole, s.sent))
    for group in _groups(s, s.batch, s.context):
        yield Term(
            "gradient of the weights that all heads share", "all-reduce", group, parts, r.backward
        )
    name = "gradient of the weights that all heads share, to its device"
    yield Term(name, "collective-permute", s.fsdp, parts, r.backward)
    # Gradients of scales and biases are not products: they are summed over all devices at once, those of the residual
    # stream also over the devices that split its tokens, and what all heads share over the heads.
    residual = s.context * s.sequence
    sent = {
        "RMSNorm scales": (_scaled(s.norms, 4), residual),
        "latents' RMSNorm scales": (_scaled(s.latents, 4), s.context),
        "biases": (_scaled(s.embed_biases, s.sent), residual),
        "biases by head or feature": (_scaled(s.biases, s.sent), s.context),
        "sinks": (_scaled(s.sinks, 4), s.context),
        "RMSNorm scales over all heads": (_scaled(s.whole_norms, 4), s.context),
        "convolutions": (_scaled(s.taps, 4), s.context),
        "states' rates": (_scaled(s.rates, 4), s.context),
        "shared experts' gate": ((s.model.embed * s.sent,) * s.shared_gate, residual),
    }
    for name, (arrays, positions) in sent.items():
        for group in _groups(s, s.batch, positions):
            yield Term(f"gradient of {name}", "all-reduce", group, arrays, r.backward)
    for group in _groups(s, s.batch, s.context, s.tensor):
        arrays = _scaled(s.head_norms, 4)
        yield Term("gradient of heads' RMSNorm scales", "all-reduce", group, arrays, r.backward)


def _gradients_outside(s: Sizes) -> Iterator[Term]:
    """The same for embedding, output layer and last norm."""
    model, scale = s.model, 4 * s.model.embed
    (lookups, table), (products, head) = _outside(s, 1), _outside(s, s.cfg.train.loss_chunks)
    if not model.tie_embeddings:
        ways = s.fsdp if s.fsdp > 1 else s.optimizer
        kind = _sum_kind(s, ways) if ways > 1 else "all-reduce"
        yield from _sums(
            s, "output layer", kind, (head,), _keeps_sum(s, model.vocab // s.vocab), products
        )
    # A lookup is not a product: its gradient is summed over all devices at once.
    once_or_branch = s.cfg.train.microbatches == 1 or s.one_f_one_b
    split = once_or_branch and (s.replicas == s.fsdp or s.optimizer > 1)
    split = split and slices_of(s.replicas) == 1
    # A TPU first adds both uses of a tied table if they are float32, as the table is, and neither is in a loop.
    loop = s.one_f_one_b or (s.fsdp > 1 and s.cfg.train.loss_chunks > 1)
    twice = model.tie_embeddings and (model.dtype == "bfloat16" or not s.tpu or loop)
    for group in _groups(s, s.batch, s.context):
        kind = _sum_kind(s, group) if split and not _keeps_sum(s, None)[0] else "all-reduce"
        yield Term("gradient of the embedding table", kind, group, (table,), lookups)
        if twice:
            yield Term("gradient of the table as output layer", kind, group, (head,), products)
    for group in _groups(s, s.batch, s.context * s.sequence):
        yield Term("gradient of the last RMSNorm's scale", "all-reduce", group, (scale,), lookups)


def _sums(
    s: Sizes, name: str, kind: str, arrays: tuple[int, ...], keeps: tuple[bool, ...], runs: int
) -> Iterator[Term]:
    """Yields the sums of products' gradients: over fsdp into parts, and the parts over the rest."""
    yield from _over_fsdp(s, name, kind, arrays, keeps, runs)
    parts = tuple(size // s.fsdp for size in arrays)
    where = ", its part, over the rest" if s.fsdp > 1 else ""
    groups = _groups(s, s.batch, s.context) if s.fsdp == 1 else (s.replicas // s.fsdp,)
    for group in groups:
        last = kind if s.fsdp == 1 else "all-reduce"
        yield Term(f"gradient of the {name}{where}", last, group, parts, runs)


def _over_fsdp(
    s: Sizes, name: str, kind: str, arrays: tuple[int, ...], keeps: tuple[bool, ...], runs: int
) -> Iterator[Term]:
    """Yields the sums of gradients over `fsdp`: by `kind` into parts, and whole where a device keeps the sum."""
    parts, whole = (
        tuple(n for n, keep in zip(arrays, keeps, strict=True) if keep == k) for k in (False, True)
    )
    yield Term(f"gradient of the {name}, over fsdp", kind, s.fsdp, parts, runs)
    yield Term(f"gradient of the {name}, whole, over fsdp", "all-reduce", s.fsdp, whole, runs)


def _sizes(matrices: tuple[Matrix, ...], size: int) -> tuple[int, ...]:
    """Returns the bytes of matrices with elements of `size` bytes, before FSDP splits them."""
    return tuple(size * m.rows * m.columns for m in matrices)


def _columns(matrices: tuple[Matrix, ...]) -> tuple[int | None, ...]:
    """Returns the columns of each matrix on a device, None where they are `embed`."""
    return tuple(None if m.split == "rows" else m.columns for m in matrices)


def _keeps_sum(s: Sizes, *columns: int | None, size: int | None = None) -> tuple[bool, ...]:
    """Whether a gradient [embed, columns], or [..., embed] for None, is summed whole and then cut.

    The TPU compiler leaves the all-reduce of bfloat16 if a part is an odd number of lane rows of the array's last
    dimension, which is the longer one if the other is shorter than a lane row, and of any type if a part of that longer
    one is no whole number of lane rows: found by compiling for v5e and v6e. `size` is that of an element, by default
    the compute type's.
    """
    part = s.cfg.model.embed // max(s.fsdp, s.optimizer)
    odd = (size or s.sent) == 2 and part % (2 * LANES) == LANES
    narrow = odd or part % LANES > 0
    return tuple(s.tpu and (odd if n is None else n < LANES and narrow) for n in columns)


def _adapters(s: Sizes) -> Iterator[Term]:
    """Adapters x A B are sent like the weights they stand beside: A's inputs and B's outputs are split as these are."""
    r, steps, tokens = s.cfg.model.lora.rank, s.cfg.train.microbatches, s.layer_tokens
    kind = _sum_kind(s, s.fsdp) if s.fsdp > 1 else "all-reduce"
    split = dict.fromkeys(("heads", "kv_heads", "mlp"), s.tensor) | {"vocab": s.vocab}
    for one in adapted(s.cfg.model):
        runs = steps * one.layers // s.stages
        for name, width in zip(one.axes, (one.inputs, one.outputs), strict=True):
            size = r * width // split.get(name, 1)
            if name == "embed":
                # Weights' last product isn't needed again, as in `_fsdp`.
                last = one.axes[0] == "mlp" and s.model.norms == "before"
                again = ("recomputed",) * (s.recomputes and s.converts and not last)
                for which in ("forward", "backward", *again):
                    arrays = (size * s.sent_operand,)
                    yield Term(f"adapters, {which}", "all-gather", s.fsdp, arrays, runs)
                yield from _sums(s, "adapters", kind, (size * s.sent,), (False,), runs)
                continue
            for group in _groups(s, s.batch, s.context):
                arrays = (size * s.sent,)
                yield Term("gradient of the adapters", "all-reduce", group, arrays, runs)
        rows, columns = (split.get(name, 1) for name in one.axes)
        sums = (tokens * r * s.sent,)
        yield Term("adapters' sums, forward", "all-reduce", rows, sums, runs)
        if s.recomputes:
            yield Term("adapters' sums, recomputed", "all-reduce", rows, sums, runs)
        yield Term("adapters' sums, backward", "all-reduce", columns, sums, runs)


def _outside(s: Sizes, chunks: int) -> tuple[int, int]:
    """Returns how often a gradient of the embedding table or the output layer is summed, and its bytes.

    A sum that a loop accumulates is sent once by a TPU, in float32, if each device keeps all of it; not from a branch.
    """
    microbatches = s.cfg.train.microbatches
    accumulated = chunks > 1 or (microbatches > 1 and not s.scatters)
    if s.tpu and accumulated and s.fsdp == 1 and not s.one_f_one_b:
        return microbatches if s.scatters else 1, s.table * 4
    return s.runs.outside * chunks, s.table * s.sent


def _groups(s: Sizes, *groups: int) -> tuple[int, ...]:
    """Returns the groups of a sum over all tokens: XLA's CPU backend sums over rows, then over positions."""
    return (math.prod(groups),) if s.tpu else groups


def _zero(s: Sizes) -> Iterator[Term]:
    """ZeRO-1 and ZeRO-2 gather the updated parameters in float32, each kind of weight for all layers at once."""
    D, gate = s.model.embed, (s.model.embed,) if s.shared_gate else ()
    router = (D * s.moe.experts,) if s.moe else ()
    vectors = s.norms + s.latents + s.embed_biases + gate + s.routed_biases[2:]
    arrays = _scaled(s.layer + s.routed + router + vectors, 4 * s.layers * s.stages)
    yield Term("all-gather of the new parameters", "all-gather", s.optimizer, arrays, 1)


def _zero_outside(s: Sizes) -> Iterator[Term]:
    """The same for embedding, output layer and last norm."""
    D, tables = s.model.embed, (4 * s.table,) * (1 if s.model.tie_embeddings else 2)
    yield Term("all-gather of the new tables", "all-gather", s.optimizer, tables, 1)
    vector = _vector_kind(s, s.optimizer, D)
    yield Term("the last RMSNorm's new scale", vector, s.optimizer, (4 * D,), 1)


def _tensor(s: Sizes) -> Iterator[Term]:
    """Split features (Shoeybi et al. 2019), and split tokens between the products (Korthikanti et al. 2022).

    A row-parallel product (output, down) gives each device a part of a sum; in the backward pass, so do column-parallel
    ones (q, k, v; gate, up; output layer). Split tokens are gathered before a column-parallel product, and their
    gradients before a row-parallel one. Embedding and output layer are also split over the stages of a pipeline.
    """
    r, gather, tokens = s.runs, "all-gather", s.layer_tokens
    kind = _sum_kind(s, s.tensor) if s.sequence > 1 else "all-reduce"
    stream = tokens * s.model.embed
    one, sent = stream * s.sent, stream * s.sent_operand
    rows = (one,) * (1 + s.dense)  # attention's first, then that of the dense feed-forward layer
    routed = ((one * (s.moe.experts_per_token if s.moe.scale_input else 1)),) if s.moe else ()
    yield Term("row-parallel sums, forward", kind, s.tensor, rows + routed, r.forward)
    if s.recomputes:
        again = rows + routed if s.model.norms != "before" else rows[: 1 + s.shared_gate]
        again = again[1:] if "attention_out" in s.model.saved else again
        yield Term("row-parallel sums, recomputed", kind, s.tensor, again, r.backward)
    # A TPU adds up the gradients of one input first.
    inputs = tuple(m.rows for m in s.matrices if m.split == "columns")
    sums = _scaled(s.inputs if s.tpu else inputs, tokens * s.sent)
    if not s.tpu:
        sums += routed
    yield Term("column-parallel sums, backward", kind, s.tensor, sums, r.backward)
    key = (tokens * s.rope_key * s.sent,)
    if s.rope_key:
        yield Term("gradient of the heads' rotated key", "all-reduce", s.tensor, key, r.backward)
    # A norm over all heads first adds up its squares, and in the backward pass what its gradient has along a row.
    squares = (4 * tokens,) * len(s.whole_norms)
    yield Term("norms over all heads, forward", "all-reduce", s.tensor, squares, r.forward)
    if s.recomputes:
        name = "norms over all heads, recomputed"
        yield Term(name, "all-reduce", s.tensor, squares, r.backward)
    yield Term("norms over all heads, backward", "all-reduce", s.tensor, squares, r.backward)
    names = "tokens for q, k, v and gate, up"
    yield Term(f"{names}, forward", gather, s.sequence, (sent,) * 2, r.forward)
    # Experts keep the tokens that they got, unless the whole layer is recomputed.
    again = 1 + (s.dense or s.recomputes)
    yield Term(f"{names}, backward", gather, s.sequence, (sent,) * again, r.backward)
    gated = (sent,) * s.shared_gate
    yield Term("tokens for the shared experts' gate", gather, s.sequence, gated, r.backward)
    grads = "tokens' gradients for output and down"
    yield Term(grads, gather, s.sequence, (sent,) * 2, r.backward)


def _tensor_outside(s: Sizes) -> Iterator[Term]:
    """The same for embedding and output layer."""
    r, gather, chunks = s.runs, "all-gather", s.cfg.train.loss_chunks
    kind = _sum_kind(s, s.tensor) if s.sequence > 1 else "all-reduce"
    stream = s.tokens * s.model.embed
    one, sent = stream * s.sent, stream * s.sent_operand
    yield Term("embedding lookup, over vocab", kind, s.vocab, (one,), r.outside)
    yield Term("output layer's sum, backward", kind, s.vocab, (one // chunks,), r.chunks)
    passes = 1 if chunks == 1 else 2  # each chunk is recomputed
    tokens = (sent // chunks,) * passes
    yield Term("tokens for the output layer", gather, s.sequence, tokens, r.chunks)
    yield Term("tokens' gradients for the embedding", gather, s.sequence, (one,), r.outside)


def _loss(s: Sizes) -> Iterator[Term]:
    """The maximum and the sum of a logsumexp over a split vocabulary, and the target's logit, in float32."""
    chunks, runs = s.cfg.train.loss_chunks, s.runs.chunks
    one = 4 * s.tokens // chunks
    yield Term("loss: logsumexp and target over vocab", "all-reduce", s.vocab, (one,) * 3, runs)
    if chunks > 1:
        name = "loss: logsumexp over vocab, recomputed"
        yield Term(name, "all-reduce", s.vocab, (one,) * 2, runs)


def _context(s: Sizes) -> Iterator[Term]:
    """Attention over a split sequence: all keys and values at once, or around a ring (Liu et al. 2023)."""
    r, model, c = s.runs, s.model, s.context
    heads = count_attention(model)
    pair = tuple(s.layer_tokens * width // s.tensor for width in (heads.k, heads.v))
    sent = _scaled(pair, s.sent_operand)
    if model.attention.context == "allgather":
        whole, grads = _scaled(sent, c), _scaled(pair, s.sent * c)
        yield Term("keys and values, forward", "all-gather", c, whole, r.forward)
        if s.recomputes:
            yield Term("keys and values, recomputed", "all-gather", c, whole, r.backward)
        yield Term("gradients of keys and values", "reduce-scatter", c, grads, r.backward)
        return
    kind = "collective-permute"
    yield Term("ring: keys and values, forward", kind, c, sent, r.forward * (c - 1))
    if s.recomputes:  # both passes use what the first shift brings
        yield Term("ring: keys and values, recomputed", kind, c, sent, r.backward * (c - 2))
    yield Term("ring: keys and values, backward", kind, c, sent, r.backward * (c - 1))
    grads = _scaled(pair, 4)
    yield Term("ring: gradients of keys and values", kind, c, grads, r.backward * (c - 1))


def _context_outside(s: Sizes) -> Iterator[Term]:
    """A ring's tokens are brought back to the text's order."""
    if s.cfg.model.attention.context == "allgather":
        return
    kind, halves = "collective-permute", (s.tokens * s.model.embed * s.sent // 2,) * 2
    yield Term("ring: back to text order", kind, s.context, halves, s.runs.outside)
    yield Term("ring: back to text order, backward", kind, s.context, halves, s.runs.outside)


def _pipeline(s: Sizes) -> Iterator[Term]:
    """Stages send activations to the next stage (Huang et al. 2019), and the last stage sends its own to all of them.

    All stages send in every tick, whether they had work or not, and all share the vocabulary. The sum that broadcasts
    one stage's activations counts as many elements as it brings: the other stages add zeros.
    """
    kind, one = "collective-permute", s.layer_tokens * s.cfg.model.embed * s.sent
    yield Term("activations to the next stage", kind, s.stages, (one,), s.runs.ticks)
    yield Term("gradients to the previous stage", kind, s.stages, (one,), s.runs.ticks)
    one = s.tokens * s.cfg.model.embed * s.sent
    yield Term("last stage's activations to all", "all-reduce", s.stages, (one,), s.runs.outside)
    yield Term("first stage's gradients to all", "all-reduce", s.stages, (one,), s.runs.outside)


def _experts(s: Sizes) -> Iterator[Term]:
    """Tokens go to their experts and back by an all-to-all each way (Lepikhin et al. 2020), and so do gradients.

    Where the program needs sizes at compile time, each device sends every other as many slots as it could need; without
    a capacity, k for each token. A TPU sends only tokens that exist, each to its k experts.
    """
    if not s.moe:
        return
    r, k, E, D = s.runs, s.moe.experts_per_token, s.moe.experts, s.model.embed
    C = capacity(s.moe, s.cfg.data.seq_len)
    ragged = s.tpu and C is None
    if C is not None:
        slots = E * s.rows * C
    elif ragged:  # rows of whole lanes
        slots, lanes = s.layer_tokens * k, LANES * 4 // s.sent
        D = math.ceil(D / lanes) * lanes
    else:  # with weighted inputs each assignment is a token of its own
        most = k if s.moe.scale_input else min(k, E // s.experts)
        slots = s.experts * s.layer_tokens * most
    kind = "ragged-all-to-all" if ragged else "all-to-all"
    pieces = 1 if s.tpu else s.experts  # XLA's CPU backend sends an array for each device
    sent = (slots * D * s.sent // pieces,) * (2 * pieces)
    yield Term("tokens to experts and back, forward", kind, s.experts, sent, r.forward)
    if s.recomputes:
        yield Term("tokens to experts and back, recomputed", kind, s.experts, sent, r.backward)
    yield Term("gradients to experts and back", kind, s.experts, sent, r.backward)


def _expert_weights(s: Sizes) -> Iterator[Term]:
    """Experts' weights are gathered and their gradients summed as other weights are, within a `shard_map`."""
    if not s.moe:
        return
    r, E, D = s.runs, s.moe.experts, s.model.embed
    f = s.model.mlp // s.tensor
    experts = _scaled(s.routed, s.sent), s.experts, _keeps_sum(s, f, f, None)
    # The CPU compiler, too, keeps a reduce-scatter that a shard_map asks for.
    scatter = _sum_kind(s, s.fsdp) if s.tpu else "reduce-scatter"
    router = (4 * D * E,), 1, _keeps_sum(s, E, size=4)
    for name, (weights, ways, keeps) in {"router": router, "experts": experts}.items():
        sent, scales = weights, ()
        if s.rounded and name == "experts":
            sent = _scaled(s.routed, s.sent_weight)
            scales = (4 * E // s.experts * D,) * len(sent)
        for which, runs in ("forward", r.forward), ("backward", r.backward):
            yield Term(f"all-gather of the {name}, {which}", "all-gather", s.fsdp, sent, runs)
            yield Term(f"{name}' scales, {which}", "all-gather", s.fsdp, scales, runs)
            largest = tuple(size // s.fsdp for size in scales)
            yield Term(f"{name}' largest, {which}", "all-reduce", s.tensor, largest, runs)
        yield from _over_fsdp(s, name, scatter, weights, keeps, r.backward)
        parts, rest = tuple(size // s.fsdp for size in weights), s.replicas // s.fsdp // ways
        yield Term(f"gradient of the {name}, over the rest", "all-reduce", rest, parts, r.backward)
    chosen, mean = (4 * s.layer_tokens * s.moe.experts_per_token,), (4 * E,)
    if not s.moe.scale_input:
        yield Term("gradient of the router's weights", "all-reduce", s.tensor, chosen, r.backward)
    yield Term("router's mean shares", "all-reduce", s.replicas, mean, r.forward)
    if s.moe.router_bias:
        yield Term("gradient of the router's bias", "all-reduce", s.replicas, mean, r.backward)
    *whole, down = _scaled(s.routed_biases, s.sent) or (0,)
    if not whole:
        return
    name = "gradient of the experts' biases"
    yield Term("experts' biases, forward", "all-gather", s.fsdp, (down,), r.forward)
    if s.recomputes:
        yield Term("experts' biases, recomputed", "all-gather", s.fsdp, (down,), r.backward)
    yield Term(name, "all-reduce", s.replicas // s.experts, tuple(whole), r.backward)
    yield Term(f"{name}, over tensor", "all-reduce", s.tensor, (down,), r.backward)
    yield Term(f"{name}, over fsdp", scatter, s.fsdp, (down,), r.backward)
    rest = s.replicas // s.fsdp // s.experts
    yield Term(f"{name}, over the rest", "all-reduce", rest, (down // s.fsdp,), r.backward)


def _nothing(_: Sizes) -> Iterator[Term]:
    yield from ()


# What the layers of one kind send, and what is sent outside the layers.
PARTS = (
    (_fsdp, _fsdp_outside),
    (_gradients, _gradients_outside),
    (_zero, _zero_outside),
    (_nothing, _adapters),
    (_tensor, _tensor_outside),
    (_nothing, _loss),
    (_context, _context_outside),
    (_nothing, _pipeline),
    (_experts, _nothing),
    (_expert_weights, _nothing),
)
