import hashlib
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np


# EXERCISE 27.symbolic
def export_means(window, width, platforms):
    """One program that takes moving means of any batch of any length.

    Args:
      window: rows in a mean, an int of at least 1.
      width: features of a row, D.
      platforms: a tuple of names such as ("cpu", "tpu").

    Returns:
      bytes of the serialized program. It takes x_BTD [B, T, width] float32 and
      length_B [B] int32, and returns [B, T, width] float32.
    """
    # YOUR CODE HERE
    raise NotImplementedError("27.symbolic")


# EXERCISE 27.manifest
def faults(manifest, files, wanted):
    """All that is wrong with an artefact, before any of it is used.

    Args:
      manifest: {"files": {name: {"bytes": int, "sha256": str}},
        "arrays": {name: {"file": str, "offset": int, "dtype": str,
        "shape": list of ints}}}.
      files: {name: bytes}, what really is in the folder.
      wanted: {name: (dtype, shape)}, the arrays that the program takes.

    Returns:
      A sorted list of (kind, name), as the statement names the kinds.
    """
    # YOUR CODE HERE
    raise NotImplementedError("27.manifest")


# EXERCISE 27.buckets
def choose_buckets(count, seconds, most, compile_seconds, multiple):
    """The sizes to pad to that make a day of requests cheapest.

    Args:
      count: {length: how many requests have it}.
      seconds: seconds(size) is the time of one request of that padded size. It
        never gets shorter when size grows.
      most: how many sizes there may be.
      compile_seconds: what each size costs once.
      multiple: each size is a multiple of this.

    Returns:
      A list of sizes, ascending.
    """
    # YOUR CODE HERE
    raise NotImplementedError("27.buckets")


# EXERCISE 27.batcher
def batches(arrivals, most, wait, seconds):
    """What a batching server does with requests that arrive at known times.

    Args:
      arrivals: times at which requests arrive, ascending.
      most: how many requests a batch may have.
      wait: how long a request is kept waiting for company, at most, if the
        server is free.
      seconds: seconds(n) is the time that a batch of n takes.

    Returns:
      (sizes, latency): the size of each batch in order, and for each request
      the time from its arrival to the end of its batch.
    """
    # YOUR CODE HERE
    raise NotImplementedError("27.batcher")


# EXERCISE 27.scaling_law
def fit_law(sizes, losses):
    """Fits loss = floor + a * size**-alpha.

    Args:
      sizes: [n] positive numbers, of any magnitude.
      losses: [n] positive numbers.

    Returns:
      (floor, a, alpha), with floor >= 0 and 0 < alpha <= 2.
    """
    # YOUR CODE HERE
    raise NotImplementedError("27.scaling_law")


# EXERCISE 27.budget
def plan(flops, served, tokens, law):
    """The model that has the lowest loss for its price, training and use.

    Args:
      flops: what training and answering may cost together.
      served: tokens that the model will write in its life.
      tokens: how many different tokens of text there are.
      law: (floor, a, alpha, b, beta) of a fitted law.

    Returns:
      (params, trained): the size of the model, and the tokens to train it on.
    """
    # YOUR CODE HERE
    raise NotImplementedError("27.budget")


# EXERCISE 27.resume
def resume(stages, record, digest, run, save):
    """Runs those stages of a pipeline that must be run, and no others.

    Args:
      stages: dicts with "name", "reads", "writes" (lists of files) and
        "settings", in any order.
      record: {name: {"settings": ..., "reads": {file: digest}, "writes":
        {file: digest}}}, what is known of stages that were finished.
      digest: digest(file) is a file's digest now, None if it isn't there.
      run: run(name) runs a stage. It may raise.
      save: save(name, entry) keeps what is known of a stage for next time.

    Returns:
      The names of the stages that were run, in order.
    """
    # YOUR CODE HERE
    raise NotImplementedError("27.resume")
