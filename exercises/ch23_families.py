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
    # YOUR CODE HERE
    raise NotImplementedError("23.rope_layout")


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
    # YOUR CODE HERE
    raise NotImplementedError("23.rope_scaling")


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
    # YOUR CODE HERE
    raise NotImplementedError("23.name_map")


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
    # YOUR CODE HERE
    raise NotImplementedError("23.dequantize")


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
    # YOUR CODE HERE
    raise NotImplementedError("23.sliding_window_cache")


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
    # YOUR CODE HERE
    raise NotImplementedError("23.shard_reader")


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
    # YOUR CODE HERE
    raise NotImplementedError("23.find_settings")
