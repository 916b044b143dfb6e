import itertools
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
def scaled_frequencies(
    pairs,
    theta,
    factor,
    low_freq_factor,
    high_freq_factor,
    original_length,
):
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
    # Turns within the original length: the rule is linear in them.
    turns = original_length * frequency / (2 * np.pi)
    low, high = low_freq_factor, high_freq_factor
    keep = np.where(turns > high, 1.0, 0.0)
    if high > low:
        keep = np.clip((turns - low) / (high - low), 0, 1)
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
            raise ValueError(f"{name} becomes {value.shape}, want {shape}")
        return value

    for path in shapes:
        if path not in [row[1] for row in rows]:
            raise ValueError(f"no row sets the parameter {path}")
    for pattern, path, transform in rows:
        shape = shapes[path]
        if "{layer}" in pattern:
            numbers = map(str, range(shape[0]))
            names = [pattern.replace("{layer}", number) for number in numbers]
            layers = [converted(name, transform, shape[1:]) for name in names]
            value = np.stack(layers)
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
      shape: tuple, the slowest dimension first. The last must be a multiple
        of 32.

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
        raise ValueError(f"{shape} takes {size} bytes, not {len(data)}")
    blocks = np.frombuffer(data, block)
    scale = blocks["d"].astype(np.float32)[:, None]
    q = blocks["q"]
    if kind == "Q8_0":
        return (scale * q).reshape(shape)
    q = np.concatenate([q & 15, q >> 4], axis=1)
    return (scale * q + blocks["m"].astype(np.float32)[:, None]).reshape(shape)
    # END SOLUTION


# EXERCISE 23.sliding_window_cache
def window_attention(q_TNH, k_TKH, v_TKH, window, cache=None):
    """Attention within a window, and the ring buffer for the next tokens.

    Args:
      q_TNH: [T, N, H] float32, queries of T new tokens.
      k_TKH: [T, K, H] float32, their keys. Each key head serves N / K
        neighbouring query heads.
      v_TKH: [T, K, H] float32, their values.
      window: how many tokens a query sees, its own among them.
      cache: what an earlier call returned, or None before the first token.

    Returns:
      (out_TNH, cache): float32 [T, N, H], and (keys, values, length). Keys and
      values are float32 [window, K, H]; token t is in slot t % window, and a
      slot that holds no token yet is 0. Length is the number of all tokens so
      far, a Python int.
    """
    # BEGIN SOLUTION
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    if cache is None:
        empty = np.zeros((window, K, H), np.float32)
        cache = empty, empty, 0
    old_k, old_v, length = cache
    # Attention first: late tokens overwrite what early ones still see.
    kept = np.arange(max(0, length - window), length)
    k_SKH = np.concatenate([old_k[kept % window], k_TKH])
    v_SKH = np.concatenate([old_v[kept % window], v_TKH])
    t = length + np.arange(T)[:, None]
    s = np.arange(length - len(kept), length + T)
    q_TKGH = q_TNH.reshape(T, K, N // K, H)
    logits_KGTS = np.einsum("TKGH,SKH->KGTS", q_TKGH, k_SKH) / math.sqrt(H)
    visible = (s <= t) & (s > t - window)
    logits_KGTS = np.where(visible, logits_KGTS, -np.inf)
    exps_KGTS = np.exp(logits_KGTS - logits_KGTS.max(-1, keepdims=True))
    probs_KGTS = exps_KGTS / exps_KGTS.sum(-1, keepdims=True)
    out_TKGH = np.einsum("KGTS,SKH->TKGH", probs_KGTS, v_SKH)
    # Of more new tokens than the window, only the last ones are kept.
    new = np.arange(max(0, T - window), T)
    keys, values = old_k.copy(), old_v.copy()
    keys[(length + new) % window] = k_TKH[new]
    values[(length + new) % window] = v_TKH[new]
    out_TNH = out_TKGH.reshape(T, N, H).astype(np.float32)
    return out_TNH, (keys, values, length + T)
    # END SOLUTION


# EXERCISE 23.shard_reader
def read_slice(file, start, dtype, shape, where):
    """Read one device's part of a tensor, and no byte more.

    Args:
      file: open for reading in binary, without a buffer. It has seek, read and
        tell.
      start: the byte of the file at which the tensor begins.
      dtype: of its numbers, a NumPy dtype.
      shape: of the whole tensor. The last dimension runs fastest in the file.
      where: (begin, end) for each dimension.

    Returns:
      The part, a NumPy array of this dtype.

    Raises:
      ValueError: if the part is not within the tensor, or the file ends before
        the part does.
    """
    # BEGIN SOLUTION
    inside = len(where) == len(shape) and all(
        0 <= a <= b <= n for (a, b), n in zip(where, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"{where} is not a part of a tensor {shape}")
    part = [b - a for a, b in where]
    if 0 in part:
        return np.empty(part, dtype)
    # From the last dimension that is cut on, the part's numbers are contiguous.
    cut = max((i for i, n in enumerate(shape) if part[i] < n), default=0)
    itemsize, offsets = np.dtype(dtype).itemsize, [start]
    for axis, (a, b) in enumerate(where[: cut + 1]):
        stride = itemsize * math.prod(shape[axis + 1 :])
        indices = range(a, a + 1 if axis == cut else b)
        offsets = [begin + i * stride for begin in offsets for i in indices]
    run = math.prod(part) * itemsize // len(offsets)
    data = bytearray()
    for offset in offsets:
        file.seek(offset)
        left = run
        while left:
            piece = file.read(left)  # may return fewer bytes
            if not piece:
                raise ValueError(f"the file ends at byte {file.tell()}")
            data += piece
            left -= len(piece)
    return np.frombuffer(data, dtype).reshape(part)
    # END SOLUTION


# EXERCISE 23.find_settings
def find_settings(ours, theirs, options, layers, vocab, longest):
    """Find the settings of each layer with which our decoder is theirs.

    Args:
      ours: function of (settings, tokens), with a dict for each layer and an
        integer array [T]. Returns a list with an array [T, D] for each layer:
        the residual stream after it.
      theirs: function of tokens that returns the same for their model.
      options: dict, name of a setting -> list of its possible values.
      layers: number of layers.
      vocab: tokens are below this number.
      longest: the most tokens that a prompt may have.

    Returns:
      List with a dict for each layer: name of a setting -> value.
    """
    # BEGIN SOLUTION
    # Long and varied: a window shows, and so does where a token looks.
    tokens = np.random.default_rng(0).integers(0, vocab, longest)
    want = theirs(tokens)
    combinations = itertools.product(*options.values())
    choices = [dict(zip(options, c, strict=True)) for c in combinations]
    settings = [choices[0]] * layers
    for layer in range(layers):
        distances = []
        for choice in choices:
            settings[layer] = choice
            stream = ours(settings, tokens)[layer]
            distances.append(np.abs(stream - want[layer]).max())
        settings[layer] = choices[int(np.argmin(distances))]
    return settings
    # END SOLUTION
