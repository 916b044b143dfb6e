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
    # BEGIN SOLUTION
    for remat in ("none", "dots", "full"):
        for microbatches in range(1, rows + 1):
            if rows % (microbatches * devices):
                continue
            for fsdp in range(1, devices + 1):
                if devices % fsdp:
                    continue
                settings = [
                    f"model.remat={remat}",
                    f"train.microbatches={microbatches}",
                    f"mesh.data={devices // fsdp}",
                    f"mesh.fsdp={fsdp}",
                ]
                # Beyond this, even the compiler's lowest figure wouldn't fit.
                if predict(settings) <= 1.1 * available and ask(settings):
                    return settings
    return None
    # END SOLUTION


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
    # BEGIN SOLUTION

    def gather(whole, within, across):
        """Bytes over ICI and over DCN to gather, or reduce-scatter."""
        over_ici = whole * (within - 1) / within
        return over_ici, whole / within * (across - 1) / across

    def group(size, stride):
        """How many members a group has in a slice, and in how many slices."""
        within = min(size, max(1, chips // stride))
        return within, size // within

    devices, found = slices * chips, []
    powers = [2**n for n in range(devices.bit_length())]
    for tensor, fsdp in itertools.product(powers, powers):
        data = devices // (tensor * fsdp)
        fits = sizes["state"] / (fsdp * tensor) <= memory
        if tensor > chips or data < 1 or not fits:
            continue
        whole = sizes["weights"] / tensor
        terms = [
            (3, gather(whole, *group(fsdp, tensor))),
            (2, gather(whole / fsdp, *group(data, tensor * fsdp))),
            (2, gather(sizes["sums"] / (data * fsdp), *group(tensor, 1))),
        ]
        within = sum(times * bytes_[0] for times, bytes_ in terms)
        across = sum(times * bytes_[1] for times, bytes_ in terms)
        seconds = within / ici + across / dcn
        found.append(((data, fsdp, tensor), seconds, within, across))
    return min(found, key=lambda mesh: mesh[1]) if found else None
    # END SOLUTION


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
    # BEGIN SOLUTION
    blocking = (
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
    )
    clock, free, arrival, waits = 0.0, {}, {}, {}
    for name, opcode, operands in schedule:
        took = seconds.get(name, 0.0)
        if opcode.endswith("-done"):
            start = operands[0]
        elif opcode.endswith("-start") or opcode in blocking:
            start = name
            link = "host" if opcode.startswith("copy") else "ici"
            arrival[name] = max(clock, free.get(link, 0.0)) + took
            free[link] = arrival[name]
            if opcode.endswith("-start"):
                continue
        else:
            clock += took
            continue
        exposed = max(0.0, arrival[start] - clock)
        hidden = max(0.0, seconds.get(start, 0.0) - exposed)
        waits[start] = hidden, exposed
        clock += exposed
    return clock, waits
    # END SOLUTION


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
    # BEGIN SOLUTION
    links = {"fusion": "clock", "copy": "host", "send": "dcn"}
    busy = dict.fromkeys(rates, 0.0)

    def walk(computation, runs):
        for opcode, what in program[computation]:
            if opcode == "while":
                body, trips = what
                walk(body, runs * trips)
            elif not opcode.endswith("-done"):
                kind = opcode.removesuffix("-start")
                link = links.get(kind, "ici")
                busy[link] += runs * what / rates[link]

    walk("main", 1)
    return max(busy.values()), sum(busy.values())
    # END SOLUTION
