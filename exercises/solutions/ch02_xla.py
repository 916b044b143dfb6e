import re

import jax
import jax.numpy as jnp

from minitext.compiler import hlo


# EXERCISE 02.count_bytes
def bytes_moved(text):
    """Bytes that one run of a compiled program reads and writes.

    Args:
      text: the optimised module, `compiled.as_text()`.

    Returns:
      (read, written): two Python ints.
    """
    # BEGIN SOLUTION
    computations, entry = hlo.computations(text)

    def count(name):
        instructions = computations[name]
        size = {i.name: i.bytes for i in instructions}
        read = written = 0
        for i in instructions:
            if i.opcode in ("while", "call"):
                role = "body" if i.opcode == "while" else "to_apply"
                called = re.search(rf"\b{role}=%([\w.\-]+)", i.line)[1]
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.line)
                runs = int(trips[1]) if trips else 1
                inner_read, inner_written = count(called)
                read += runs * inner_read
                written += runs * inner_written
            elif i.opcode not in hlo.FREE:
                # An operand that is named twice is one array.
                read += sum(size[operand] for operand in set(i.operands))
                written += i.bytes
        return read, written

    return count(entry)
    # END SOLUTION


# EXERCISE 02.restore_fusion
def make_one_pass(limit):
    """Return a function that scales and clips a gated activation in one kernel.

    Args:
      limit: Python float > 0.

    Returns:
      fn(a_XF, b_XF, scale_F) -> y_XF, all float32: the first result of the
        broken version.
    """
    # BEGIN SOLUTION

    @jax.jit
    def one_pass(a_XF, b_XF, scale_F):
        h_XF = a_XF / (1 + jnp.exp(-a_XF)) * b_XF
        # A product with a diagonal matrix is an elementwise one.
        return jnp.clip(h_XF * scale_F, -limit, limit)

    return one_pass
    # END SOLUTION


# EXERCISE 02.read_collective
def bytes_sent(text):
    """Collectives that run, and bytes that each device sends, by kind.

    Args:
      text: an optimised module for several devices.

    Returns:
      {kind: (count, bytes)}: how many collectives of this kind one run
      executes, a Python int, and the bytes that one device sends in all of
      them, a float.
    """
    # BEGIN SOLUTION
    computations, entry = hlo.computations(text)
    devices = re.search(r"\bnum_partitions=(\d+)", text)

    def group_size(line):
        if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
            return listed[1].count(",") + 1
        if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
            return int(counted[1])
        named = r"replica_groups=mesh\[([^\]]*)\].*?\{('[^}]*)\}"
        if axes := re.search(named, line):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
            group = 1
            for name in re.findall(r"'(\w+)'", axes[2]):
                group *= int(sizes[name])
            return group
        return int(devices[1]) if devices else 1

    sent = {}

    def walk(name, runs):
        size = {i.name: i.bytes for i in computations[name]}
        for i in computations[name]:
            if i.opcode == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.line)
                body = re.search(r"\bbody=%([\w.\-]+)", i.line)[1]
                walk(body, runs * (int(trips[1]) if trips else 1))
            elif i.opcode in hlo.COLLECTIVES:
                given = sum(size[operand] for operand in i.operands)
                whole = max(i.bytes, given)
                n = group_size(i.line)
                share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}
                moved = whole * share.get(i.opcode, (n - 1) / n)
                count, total = sent.get(i.opcode, (0, 0.0))
                sent[i.opcode] = (count + runs, total + runs * moved)

    walk(entry, 1)
    return sent
    # END SOLUTION


# EXERCISE 02.roll_loop
def rolled(x_BD, w_LDD, b_LD):
    """Run L layers of tanh and relu in turn, in a program of constant size.

    Args:
      x_BD: float32 [B, D].
      w_LDD: float32 [L, D, D], L at least 1, even or odd.
      b_LD: float32 [L, D].

    Returns:
      (x_BD, size_L): the last layer's result, and for each layer the root of
      the mean square of its h_BD, float32 [L].
    """
    # BEGIN SOLUTION

    def layer(x_BD, w_DD, b_D, activation):
        h_BD = x_BD @ w_DD + b_D
        return x_BD + activation(h_BD), jnp.sqrt(jnp.mean(h_BD * h_BD))

    def two_layers(x_BD, weights):
        w_2DD, b_2D = weights
        x_BD, first = layer(x_BD, w_2DD[0], b_2D[0], jnp.tanh)
        x_BD, second = layer(x_BD, w_2DD[1], b_2D[1], jax.nn.relu)
        return x_BD, jnp.stack([first, second])

    L, D = b_LD.shape
    paired = L - L % 2
    w_P2DD = w_LDD[:paired].reshape(-1, 2, D, D)
    b_P2D = b_LD[:paired].reshape(-1, 2, D)
    x_BD, size_P2 = jax.lax.scan(two_layers, x_BD, (w_P2DD, b_P2D))
    size_L = size_P2.reshape(-1)
    if L % 2:
        x_BD, last = layer(x_BD, w_LDD[-1], b_LD[-1], jnp.tanh)
        size_L = jnp.append(size_L, last)
    return x_BD, size_L
    # END SOLUTION
