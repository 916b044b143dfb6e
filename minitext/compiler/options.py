"""Options of XLA's compiler for the train step: those that are always on, a chip's recommended ones, and the user's.

MaxText's recipes set them in LIBTPU_INIT_ARGS or XLA_FLAGS, before a process starts. Here they go along with the
program that they are meant for, so one process can compile for several chips, and a saved program says what it was made
with. `xla_tpu_...` and `xla_sc_...` (SparseCores) only reach a TPU's compiler, `xla_gpu_...` a GPU's, `xla_cpu_...` a
CPU's.

Chapters: 22.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from minitext.config.sections import XLAConfig
from minitext.errors import UserError, did_you_mean
from minitext.hardware import find_chip

# What options of MaxText's recipes (github.com/AI-Hypercomputer/tpu-recipes) do.
KNOWN = {
    "xla_tpu_scoped_vmem_limit_kib": "vector memory that one operation may use, so larger fusions and tiles",
    "xla_tpu_enable_async_collective_fusion": "collectives that run inside a matrix product",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "all-gathers too",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "over several products",
    "xla_tpu_overlap_compute_collective_tc": "collectives beside a TensorCore's work",
    "xla_enable_async_all_gather": "all-gathers that start early and are waited for late",
    "xla_tpu_enable_data_parallel_all_reduce_opt": "gradients reduced while the backward pass goes on",
    "xla_tpu_data_parallel_opt_different_sized_ops": "such reductions of any size",
    "xla_tpu_enable_all_experimental_scheduler_features": "all that the scheduler is trying out",
    "xla_tpu_enable_scheduler_memory_pressure_tracking": "a schedule that counts memory",
    "xla_tpu_host_transfer_overlap_limit": "transfers to the host that may be under way",
    "xla_tpu_aggressive_opt_barrier_removal": "barriers of rematerialisation that go early",
    "xla_lhs_prioritize_async_depth_over_stall": "long chains of collectives first",
    "xla_tpu_enable_ag_backward_pipelining": "a layer's all-gather during the layer before it",
    "xla_should_allow_loop_variant_parameter_in_chain": "such all-gathers in loops",
    "xla_should_add_loop_invariant_op_in_chain": "such all-gathers of what a loop leaves unchanged",
    "xla_max_concurrent_host_send_recv": "transfers between host and device at once",
    "xla_tpu_scheduler_percent_shared_memory_limit": "share of memory that the scheduler plans with",
    "xla_latency_hiding_scheduler_rerun": "times that a schedule is made anew with less memory",
    "xla_tpu_use_minor_sharding_for_major_trivial_input": "another layout for all-to-alls",
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "devices from which a reduce-scatter changes layouts",
    "xla_tpu_spmd_rng_bit_generator_unsafe": "random bits that depend on the mesh",
    "xla_tpu_assign_all_reduce_scatter_layout": "layouts chosen for reduce-scatters",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "all-gathers by the SparseCores",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "reduce-scatters by the SparseCores",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "all-reduces by the SparseCores",
    "xla_tpu_use_tc_device_shape_on_sc": "one SparseCore program for each TensorCore",
    "xla_sc_enable_instruction_fusion": "fusions on SparseCores",
    "xla_sc_disable_megacore_partitioning": "SparseCores that aren't divided between two TensorCores",
    "xla_gpu_exclude_nondeterministic_ops": "only operations that give the same bits in every run",
    "xla_gpu_enable_latency_hiding_scheduler": "collectives that overlap with compute",
    "xla_gpu_all_reduce_combine_threshold_bytes": "all-reduces joined up to this size",
    "xla_gpu_all_gather_combine_threshold_bytes": "all-gathers joined up to this size",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "reduce-scatters joined up to this size",
    "xla_gpu_triton_gemm_any": "matrix products by Triton wherever it can",
}
# By chip; xla.recommended=false leaves them out. The record step_time-2026-11-26.json has predictions without and with
# them: GPT-3 175B on 256 v6e takes 22.28 and 17.04 s a step, Llama 2 70B on 512 v5p 24.54 and 21.71, Llama 3 8B
# on 256 v6e 5.72 and 4.66, Mixtral 8x7B on 256 v5p 11.19 and 11.05.
SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"
SPARSE_CORE_COLLECTIVES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_enable_instruction_fusion": "false",
    "xla_sc_disable_megacore_partitioning": "true",
}
RECOMMENDED: dict[str, dict[str, str]] = {
    "v5p": {SCOPED_VMEM: "98304"},
    "v6e": {SCOPED_VMEM: "98304"} | SPARSE_CORE_COLLECTIVES,
}
FIXED_ORDER = "xla_gpu_exclude_nondeterministic_ops"
OF_A_PLATFORM = {"xla_tpu_": "tpu", "xla_sc_": "tpu", "xla_gpu_": "gpu", "xla_cpu_": "cpu"}


class Option(NamedTuple):
    """An option that a program is compiled with, and where it comes from: `always`, `recommended` or `xla.options`."""

    name: str
    value: str
    source: str

    @property
    def typed(self) -> str | bool:
        """The value as `jax.jit` takes it: the compilers for CPUs and GPUs want booleans where TPUs' take words."""
        return {"true": True, "false": False}.get(self.value.lower(), self.value)


def chosen(cfg: XLAConfig, mesh: Mesh | AbstractMesh) -> list[Option]:
    """Returns the options of a train step for a mesh's devices, by name; later sources win.

    A GPU's programs may add numbers in whatever order its threads finish, as in the gradient of a gather. There, an
    option that makes the compiler sort them first is always on. For a GPU that isn't here it can't be: it times matrix
    products.

    Args:
      cfg: the user's choice.
      mesh: the devices; an abstract one has none, and no option.
    """
    if not isinstance(mesh, Mesh):
        return []
    device = mesh.devices.flat[0]
    platform = "gpu" if device.platform == "cuda" else device.platform
    found: dict[str, Option] = {}
    if platform == "gpu" and device in jax.devices():
        found[FIXED_ORDER] = Option(FIXED_ORDER, "true", "always")
    chip = find_chip(device)
    if cfg.recommended and chip is not None:
        of_chip = RECOMMENDED.get(chip.name, {})
        found |= {name: Option(name, value, "recommended") for name, value in of_chip.items()}
    for name, value in cfg.pairs():
        if platform_of(name) in (None, platform):
            found[name] = Option(name, value, "xla.options")
    return [found[name] for name in sorted(found)]


def platform_of(name: str) -> str | None:
    """Returns the only platform that an option is for, or None."""
    return next((where for start, where in OF_A_PLATFORM.items() if name.startswith(start)), None)


def compiler_options(cfg: XLAConfig, mesh: Mesh | AbstractMesh) -> dict[str, Any] | None:
    """Returns `chosen` as `jax.jit` takes them, or None if there are none."""
    return {option.name: option.typed for option in chosen(cfg, mesh)} or None


def refused(options: Sequence[Option], mesh: Mesh) -> Iterator[tuple[Option, str]]:
    """Yields the options that the compiler for a mesh's devices doesn't take, each with its reason."""
    place = jax.sharding.NamedSharding(
        jax.sharding.Mesh(mesh.devices.reshape(-1)[:1], "one"), jax.sharding.PartitionSpec()
    )
    zero = jax.ShapeDtypeStruct((8,), "float32", sharding=place)
    for option in options:
        one = jax.jit(lambda x: x + 1, compiler_options={option.name: option.typed})
        try:
            one.lower(zero).compile()
        except jax.errors.JaxRuntimeError as error:
            yield option, _reason(option.name, str(error))


@contextlib.contextmanager
def refusals_named() -> Iterator[None]:
    """Turns the compiler's refusal of an option into one line.

    Raises:
      UserError: naming the option, and the most similar one that is known.
    """
    try:
        yield
    except IndexError as error:  # seen on an H100 with jaxlib 0.11.2
        if "raw_hash_map" not in str(error):
            raise
        raise UserError(
            "the compiler failed without saying why, as it does at cuDNN's attention in unscanned layers: set "
            "model.scan_layers=true, model.attention.impl=xla, or "
            f"xla.options=[{FIXED_ORDER}=false], which gives up bit-equal runs"
        ) from None
    except jax.errors.JaxRuntimeError as error:
        found = re.search(
            r"(?:No such compile option: '|into flag |While setting option )(\w+)", str(error)
        )
        if found is None:
            raise
        raise UserError(f"xla.options: {_reason(found[1], str(error))}") from None


def _reason(name: str, error: str) -> str:
    if "No such compile option" in error:
        return f"the compiler has no option {name}{did_you_mean(name, KNOWN)}: correct or remove it"
    return f"{name}: {' '.join(error.split())[:160]}: give another value"
