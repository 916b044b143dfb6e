import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


# EXERCISE 11.gradient_equality
def make_gradient(loss_sum, mesh, microbatches):
    """Return a gradient over all devices that sends each number once.

    Args:
      loss_sum: pure function (params, some rows) -> (summed loss, number of
        target tokens), two float32 scalars.
      mesh: a mesh with the one axis "data".
      microbatches: the number of equal parts of each device's rows; they go
        through loss_sum one after another.

    Returns:
      A function (params, rows) -> (loss, gradient), which can be jitted.
        params: pytree of float32 arrays, the same on every device.
        rows: pytree of arrays [B, ...], split over "data".
        loss, gradient: the loss per target token of the whole batch, and its
          gradient with respect to params. The same on every device; 0 for a
          batch without target tokens.
    """
    # BEGIN SOLUTION

    def of_one_device(params, rows):
        def own(tree):
            return jax.tree.map(
                lambda x: jax.lax.pcast(x, "data", to="varying"), tree
            )

        # Without this, every iteration would sum the gradients over the
        # devices.
        params = own(params)

        def add(sums, part):
            (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(
                params, part
            )
            return jax.tree.map(jnp.add, sums, (total, count, grads)), None

        parts = jax.tree.map(
            lambda x: x.reshape(microbatches, -1, *x.shape[1:]), rows
        )
        zeros = (
            *own((jnp.zeros(()), jnp.zeros(()))),
            jax.tree.map(jnp.zeros_like, params),
        )
        sums, _ = jax.lax.scan(add, zeros, parts)
        total, count, grads = jax.lax.psum(sums, "data")
        share = 1.0 / jnp.maximum(count, 1.0)
        return total * share, jax.tree.map(lambda g: g * share, grads)

    return jax.shard_map(
        of_one_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    # END SOLUTION


# EXERCISE 11.fsdp_rules
def place_state(params, scheme, devices):
    """Specs of parameters, gradients and AdamW's moments; bytes on a device.

    Args:
      params: dict from name to (dimension names, shape), two tuples of equal
        length. All float32.
      scheme: "dp", "zero1", "zero2" or "fsdp".
      devices: Python int, the devices on the mesh axis "fsdp".

    Returns:
      (specs, bytes): specs is a dict from name to (spec of the parameter, of
        its gradient, of its moments), each a PartitionSpec with an entry for
        every dimension. bytes has three Python ints: those of parameters,
        gradients and moments on one device.

    Raises:
      ValueError: a parameter can't be cut as the scheme asks; the message has
        its name.
    """
    # BEGIN SOLUTION
    cut = {"dp": (), "zero1": (2,), "zero2": (1, 2), "fsdp": (0, 1, 2)}[scheme]
    specs, totals = {}, [0, 0, 0]
    for name, (dims, shape) in params.items():
        places = [i for i, dim in enumerate(dims) if dim == "embed"]
        places = places if devices > 1 else []
        if places and cut:
            size = shape[places[0]]
            if len(places) > 1:
                raise ValueError(f"{name}: two dimensions named embed")
            if size % devices:
                raise ValueError(f"{name}: embed={size} into {devices} parts")
        numbers = 1
        for size in shape:
            numbers *= size
        found = []
        for thing, each in enumerate((4, 4, 8)):
            split = places if thing in cut else []
            axes = ("fsdp" if i in split else None for i in range(len(dims)))
            found.append(P(*axes))
            totals[thing] += each * numbers // (devices if split else 1)
        specs[name] = tuple(found)
    return specs, tuple(totals)
    # END SOLUTION


# EXERCISE 11.hlo_budget
def wasteful_layer(x_BD, gate_DF, up_DF, down_FD):
    """Right values, poor program. It is given; don't change it."""
    dtype, whole = x_BD.dtype, P(None, None)
    gate_DF = jax.sharding.reshard(gate_DF, whole).astype(dtype)
    up_DF = jax.sharding.reshard(up_DF, whole).astype(dtype)
    h_BF = jax.nn.silu(x_BD @ gate_DF) * (x_BD @ up_DF)
    y_BD = jax.sharding.reshard(h_BF, whole) @ down_FD.astype(dtype)
    return x_BD + jax.sharding.reshard(y_BD, P("fsdp", None))


def thrifty_layer(x_BD, gate_DF, up_DF, down_FD):
    """Compute the same as wasteful_layer, within the budget.

    Args:
      x_BD: bfloat16 [B, D], sharded P("fsdp", None) on the mesh in use, whose
        axis is Explicit.
      gate_DF: float32 [D, F], sharded P("fsdp", None).
      up_DF: likewise.
      down_FD: float32 [F, D], sharded P(None, "fsdp").

    Returns:
      bfloat16 [B, D], sharded like x_BD.
    """
    # BEGIN SOLUTION

    # Recomputing the layer gathers its weights again, instead of keeping the
    # gathered ones.
    @jax.checkpoint
    def layer(x_BD, *weights):
        gate_DF, up_DF, down_FD = (
            jax.sharding.reshard(w.astype(x_BD.dtype), P(None, None))
            for w in weights
        )
        return x_BD + (jax.nn.silu(x_BD @ gate_DF) * (x_BD @ up_DF)) @ down_FD

    return layer(x_BD, gate_DF, up_DF, down_FD)
    # END SOLUTION


# EXERCISE 11.zero_stages
def stage_costs(cut, whole, devices, scheme, microbatches):
    """Bytes that a scheme holds and sends on each device.

    Args:
      cut: number of parameters that schemes can cut, a multiple of devices.
      whole: number of parameters that no scheme cuts, a multiple of devices
        too.
      devices: devices in the ring.
      scheme: "dp", "zero1", "zero2" or "fsdp".
      microbatches: in a step.

    Returns:
      (parameters, gradients, state, sent): Python ints; the first three are
        bytes stored on one device, the last the bytes that it sends in one
        step.
    """
    # BEGIN SOLUTION
    stage = ("dp", "zero1", "zero2", "fsdp").index(scheme)

    def held(each, from_stage):
        return (
            each * (cut // devices if stage >= from_stage else cut)
            + each * whole
        )

    def ring(numbers, each):  # an all-gather or a reduce-scatter
        return each * numbers * (devices - 1) // devices

    sent = 2 * ring(whole, 2)
    if scheme == "dp":
        sent += 2 * ring(cut, 2)
    if scheme == "zero1":
        sent += ring(cut, 2) + ring(cut, 4)
    if scheme == "zero2":
        sent += microbatches * ring(cut, 2) + ring(cut, 4)
    if scheme == "fsdp":
        sent += microbatches * 3 * ring(cut, 2)
    return held(4, 3), held(4, 2), held(8, 1), sent
    # END SOLUTION
