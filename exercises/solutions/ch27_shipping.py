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

    # BEGIN SOLUTION
    def means(x_BTD, length_B):
        at_T = jnp.arange(x_BTD.shape[1])
        before = ((0, 0), (window - 1, 0), (0, 0))
        size, step, add = (1, window, 1), (1, 1, 1), jax.lax.add
        sum_BTD = jax.lax.reduce_window(x_BTD, 0.0, add, size, step, before)
        count_T = jnp.minimum(at_T + 1, window)
        inside_BT = at_T < length_B[:, None]
        return jnp.where(inside_BT[..., None], sum_BTD / count_T[:, None], 0)

    b, t = jax.export.symbolic_shape("b, t")
    x = jax.ShapeDtypeStruct((b, t, width), jnp.float32)
    length = jax.ShapeDtypeStruct((b,), jnp.int32)
    exported = jax.export.export(jax.jit(means), platforms=platforms)(x, length)
    return bytes(exported.serialize())
    # END SOLUTION


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
    # BEGIN SOLUTION
    sizes = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
    found = []
    for name, said in manifest["files"].items():
        parts = name.split("/")
        if "\\" in name or any(part in ("", ".", "..") for part in parts):
            found.append(("unsafe", name))
        elif name not in files:
            found.append(("missing file", name))
        elif len(files[name]) != said["bytes"]:
            found.append(("size", name))
        elif hashlib.sha256(files[name]).hexdigest() != said["sha256"]:
            found.append(("hash", name))
    found += [("extra file", n) for n in files if n not in manifest["files"]]
    arrays = manifest["arrays"]
    found += [("extra array", n) for n in arrays if n not in wanted]
    for name, (dtype, shape) in wanted.items():
        if name not in arrays:
            found.append(("missing array", name))
            continue
        said = arrays[name]
        if said["dtype"] != dtype:
            found.append(("dtype", name))
        elif tuple(said["shape"]) != tuple(shape):
            found.append(("shape", name))
        else:
            room = manifest["files"].get(said["file"], {"bytes": 0})["bytes"]
            end = said["offset"] + sizes[dtype] * math.prod(shape)
            if said["offset"] < 0 or end > room:
                found.append(("outside", name))
    return sorted(found)
    # END SOLUTION


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

    # BEGIN SOLUTION
    def padded(length):
        return -(-length // multiple) * multiple

    sizes = sorted({padded(n) for n, many in count.items() if many})
    many = [sum(c for n, c in count.items() if padded(n) == s) for s in sizes]
    total = [0, *itertools.accumulate(many)]
    # best[j]: the first j sizes are served, by k buckets, the last at size j.
    best = [(0.0, [])] + [(math.inf, [])] * len(sizes)
    answer = best[-1]
    for _ in range(min(most, len(sizes))):
        new = [(math.inf, [])]
        for j in range(1, len(sizes) + 1):
            price = seconds(sizes[j - 1])
            spans = [(total[j] - n) * price for n in total[:j]]
            cost, i = min((best[i][0] + spans[i], i) for i in range(j))
            new.append((cost + compile_seconds, [*best[i][1], sizes[j - 1]]))
        best = new
        answer = min(answer, best[-1])
    return answer[1]
    # END SOLUTION


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
    # BEGIN SOLUTION
    sizes, latency, free, first = [], [], -math.inf, 0
    while first < len(arrivals):
        full = first + most - 1
        ready = arrivals[full] if full < len(arrivals) else math.inf
        start = max(free, min(ready, arrivals[first] + wait))
        batch = [a for a in arrivals[first : first + most] if a <= start]
        free = start + seconds(len(batch))
        sizes.append(len(batch))
        latency += [free - a for a in batch]
        first += len(batch)
    return sizes, latency
    # END SOLUTION


# EXERCISE 27.scaling_law
def fit_law(sizes, losses):
    """Fits loss = floor + a * size**-alpha.

    Args:
      sizes: [n] positive numbers, of any magnitude.
      losses: [n] positive numbers.

    Returns:
      (floor, a, alpha), with floor >= 0 and 0 < alpha <= 2.
    """
    # BEGIN SOLUTION
    sizes, losses = (np.asarray(x, np.float64) for x in (sizes, losses))
    small = sizes / sizes.min()  # or powers of large numbers lose their digits

    def best(alpha):
        powers = small**-alpha
        columns = np.stack([np.ones_like(powers), powers], 1) / losses[:, None]
        floor, a = np.linalg.lstsq(columns, np.ones(len(losses)))[0]
        if floor < 0:
            floor, column = 0.0, columns[:, 1]
            a = column.sum() / (column @ column)
        error = np.sum(((floor + a * powers) / losses - 1) ** 2)
        return error, floor, a

    low, high = 1e-3, 2.0
    for _ in range(5):
        grid = np.linspace(low, high, 101)
        at = min(range(101), key=lambda i: best(grid[i])[0])
        low, high = grid[max(at - 1, 0)], grid[min(at + 1, 100)]
    _, floor, a = best(grid[at])
    return floor, a * sizes.min() ** grid[at], grid[at]
    # END SOLUTION


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
    # BEGIN SOLUTION
    _, a, alpha, b, beta = law

    def trained(params):
        return (flops / params - 2 * served) / 6

    def slope(log):
        # d loss / d log params along the budget: falls below 0 while larger
        # models are better. D = (C/N - 2S)/6, so dD/dlogN = -(D + S/3).
        params = math.exp(log)
        data = trained(params)
        if data <= 0:
            return math.inf
        of_size = -a * alpha * params**-alpha
        return of_size + b * beta * data ** (-beta - 1) * (data + served / 3)

    # No more is trained on than there is: the model is at least so large.
    low = math.log(flops / (6 * tokens + 2 * served))
    high = math.log(flops) if served == 0 else math.log(flops / (2 * served))
    if slope(low) < 0:
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    params = math.exp(low)
    return params, trained(params)
    # END SOLUTION


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

    # BEGIN SOLUTION
    def now(files):
        return {file: digest(file) for file in files}

    left, ran = list(stages), []
    while left:
        to_come = {file for stage in left for file in stage["writes"]}
        stage = next(s for s in left if not to_come & set(s["reads"]))
        left.remove(stage)
        before = {"settings": stage["settings"], "reads": now(stage["reads"])}
        wrote = now(stage["writes"])
        known = record.get(stage["name"]) == before | {"writes": wrote}
        if known and None not in wrote.values():
            continue
        run(stage["name"])
        # What it read is what was there before: it may have changed since.
        save(stage["name"], before | {"writes": now(stage["writes"])})
        ran.append(stage["name"])
    return ran
    # END SOLUTION
