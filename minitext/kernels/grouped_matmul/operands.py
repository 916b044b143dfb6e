"""What the grouped matmul kernels share: checks of their operands, and how those vary over a mesh's manual axes.

Chapters: 19.
"""

import jax
import jax.numpy as jnp


def reason(lhs_MK, rhs_GKN, *types: str) -> str | None:
    """Returns why a kernel that multiplies `types` can't take these operands, or None."""
    if lhs_MK.dtype != rhs_GKN.dtype or lhs_MK.dtype not in map(jnp.dtype, types):
        names = f"{', '.join(types[:-1])} or {types[-1]}"
        return f"it multiplies {names}: got {lhs_MK.dtype} and {rhs_GKN.dtype}"
    if 0 in (*lhs_MK.shape, *rhs_GKN.shape):
        return f"it needs something to multiply: got shapes {lhs_MK.shape} and {rhs_GKN.shape}"
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and not mesh.are_all_axes_manual:
        return "on a mesh it multiplies what one device has: call it inside jax.shard_map"
    return None


def vary_alike(*args: jax.Array) -> list[jax.Array]:
    """Casts operands to vary along the same mesh axes, as a kernel needs.

    The gradient of such a cast is the sum over the axes that it adds.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in args]
    axes = frozenset().union(*varying)
    pairs = zip(args, varying, strict=True)
    return [jax.lax.pcast(x, tuple(axes - own), to="varying") for x, own in pairs]


def like(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Returns an array of another shape, in x's type, that varies along the same mesh axes."""
    return jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
