import itertools


# EXERCISE 22.fit
def fit(rows, devices, available, predict, ask):
    """Find the cheapest settings that the compiler accepts, asking seldom.

    Args:
      rows: rows of a step's batch, a Python int.
      devices: devices of the target, a Python int.
      available: bytes that a program may use on each of them.
      predict: predict(settings) returns bytes on each device. It is quick, and
        the compiler's figure is within a tenth of it: from predict / 1.1 to
        predict * 1.1.
      ask: ask(settings) compiles the step and returns whether the compiler
        takes it.

    Returns:
      The settings, a list such as ["model.remat=dots", "train.microbatches=2",
      "mesh.data=2", "mesh.fsdp=4"]; None if nothing fits.
    """
    # YOUR CODE HERE
    raise NotImplementedError("22.fit")


# EXERCISE 22.choose_mesh
def choose_mesh(sizes, slices, chips, memory, ici, dcn):
    """Find the mesh that fits and whose collectives take the least time.

    Args:
      sizes: bytes, Python ints: "weights" and "sums", which are sent, and
        "state", which is stored.
      slices: number of slices.
      chips: chips of a slice; both are powers of two.
      memory: bytes of a chip that the state may take.
      ici: bytes/s that a chip sends within its slice.
      dcn: bytes/s that a chip sends to other slices.

    Returns:
      ((data, fsdp, tensor), seconds, bytes that a chip sends within its slice,
      bytes that it sends to other slices), or None if the state fits on no
      mesh.
    """
    # YOUR CODE HERE
    raise NotImplementedError("22.choose_mesh")


# EXERCISE 22.overlap
def overlap(schedule, seconds):
    """Find how much of each transfer is hidden, and how much is exposed.

    Args:
      schedule: list of (name, opcode, operands), in the order in which the
        program runs; operands is a tuple of names.
      seconds: dict, name -> s. A start's entry is its transfer's time; a name
        without an entry takes no time.

    Returns:
      (total, waits): the seconds of the whole schedule, and a dict, name of the
      transfer -> (hidden, exposed) in s. A transfer has the name of its start.
    """
    # YOUR CODE HERE
    raise NotImplementedError("22.overlap")


# EXERCISE 22.interval
def interval(program, rates):
    """Bound the time of a step: everything overlaps, or nothing does.

    Args:
      program: dict, computation -> list of (opcode, what), in the order of its
        schedule. A step runs "main".
      rates: per second: "clock" in cycles; "ici", "dcn" and "host" in bytes.

    Returns:
      (fastest, slowest) in s.
    """
    # YOUR CODE HERE
    raise NotImplementedError("22.interval")
