import math

import numpy as np


# EXERCISE 23.rope_layout
def reorder_rotary(rows, heads, fraction, layout):
    """Reorder a projection's rows for the other pairing of rotary features.

    Args:
      rows: NumPy array [heads * H, ...]: a weight [heads * H, D] of queries or
        keys, its bias [heads * H], or more dimensions.
      heads: heads of this projection, a Python int.
      fraction: share of each head's H features that rotate: the first
        int(H * fraction), an even number.
      layout: the pairing that the result has, "half" or "interleaved"; `rows`
        has the other one.

    Returns:
      NumPy array with the shape and the dtype of `rows`.
    """
    # BEGIN SOLUTION
    H = rows.shape[0] // heads
    rotated = int(H * fraction)
    order = np.arange(H)
    pairs = (2, -1) if layout == "interleaved" else (-1, 2)
    order[:rotated] = order[:rotated].reshape(pairs).T.ravel()
    by_head = rows.reshape(heads, H, *rows.shape[1:])
    return by_head[:, order].reshape(rows.shape)
    # END SOLUTION


# EXERCISE 23.rope_scaling
def scaled_frequencies(pairs, theta, factor, low_freq_factor, high_freq_factor, original_length):
    """Rotary frequencies by Llama 3.1's rule.

    Args:
      pairs: how many pairs of features rotate, a Python int.
      theta: base of the frequencies.
      factor: what slow frequencies are divided by, at least 1.
      low_freq_factor: wavelengths above original_length / low_freq_factor are
        stretched.
      high_freq_factor: wavelengths below original_length / high_freq_factor are
        kept; at least low_freq_factor.
      original_length: tokens of the texts that the model was first trained on.

    Returns:
      NumPy floats [pairs]: radians per position, the fastest first.
    """
    # BEGIN SOLUTION
    frequency = float(theta) ** (-np.arange(pairs) / pairs)
    # How often a pair turns within the original length: the rule is linear in it.
    turns = original_length * frequency / (2 * np.pi)
    if high_freq_factor > low_freq_factor:
        keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    else:
        keep = np.where(turns > high_freq_factor, 1.0, 0.0)
    return keep * frequency + (1 - keep) * frequency / factor
    # END SOLUTION


# EXERCISE 23.name_map
def convert_names(tensors, rows, shapes):
    """Turn a checkpoint's tensors into a tree of parameters.

    Args:
      tensors: dict, name -> NumPy array.
      rows: list of (pattern, path, transform). A pattern is a tensor's name;
        `{layer}` in it stands for the number of a layer. A path is our
        parameter's, such as "blocks.ffn.up". A transform is a function of one
        tensor that returns it as our parameter, of one layer.
      shapes: dict, path -> shape of every parameter that the model has, a
        tuple. Where the pattern has `{layer}`, its first entry is the number
        of layers.

    Returns:
      Nested dicts: that of "blocks.ffn.up" is at ["blocks"]["ffn"]["up"].

    Raises:
      ValueError: naming what is missing, left over, or of a wrong shape.
    """
    # BEGIN SOLUTION
    used, tree = set(), {}

    def converted(name, transform, shape):
        if name not in tensors:
            raise ValueError(f"there is no tensor {name}")
        used.add(name)
        value = transform(tensors[name])
        if value.shape != shape:
            raise ValueError(f"{name} becomes {value.shape}, and the model needs {shape}")
        return value

    for path in shapes:
        if path not in [row[1] for row in rows]:
            raise ValueError(f"no row sets the parameter {path}")
    for pattern, path, transform in rows:
        shape = shapes[path]
        if "{layer}" in pattern:
            names = [pattern.replace("{layer}", str(layer)) for layer in range(shape[0])]
            value = np.stack([converted(name, transform, shape[1:]) for name in names])
        else:
            value = converted(pattern, transform, shape)
        *folders, leaf = path.split(".")
        here = tree
        for folder in folders:
            here = here.setdefault(folder, {})
        here[leaf] = value
    if left := [name for name in tensors if name not in used]:
        raise ValueError(f"nothing uses the tensor {left[0]}")
    return tree
    # END SOLUTION


# EXERCISE 23.dequantize
def dequantize(data, kind, shape):
    """Turn the blocks of a quantized GGUF tensor into numbers.

    Args:
      data: bytes of the whole tensor.
      kind: "Q8_0" or "Q4_1".
      shape: tuple, the slowest dimension first. The last is a multiple of 32, or
        the tensor is refused.

    Returns:
      float32 NumPy array of that shape.

    Raises:
      ValueError: if the last dimension isn't a multiple of 32, or the number of
        bytes is wrong.
    """
    # BEGIN SOLUTION
    fields = {"Q8_0": [("d", "<f2"), ("q", "i1", 32)]}
    fields["Q4_1"] = [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]
    block = np.dtype(fields[kind])
    size = math.prod(shape) // 32 * block.itemsize
    if not shape or shape[-1] % 32 or len(data) != size:
        raise ValueError(f"{len(data)} bytes of {kind} can't be {shape}: want {size}")
    blocks = np.frombuffer(data, block)
    scale = blocks["d"].astype(np.float32)[:, None]
    q = blocks["q"]
    if kind == "Q8_0":
        return (scale * q).reshape(shape)
    q = np.concatenate([q & 15, q >> 4], axis=1)
    return (scale * q + blocks["m"].astype(np.float32)[:, None]).reshape(shape)
    # END SOLUTION
