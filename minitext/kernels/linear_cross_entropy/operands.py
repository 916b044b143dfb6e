"""What the fused cross-entropy kernels ask of their operands.

Chapters: 16.
"""

from minitext.kernels.per_device import split


def reason(x_XD, w_DV, targets_X) -> str | None:
    """Returns why no kernel can take these shapes, or this split over devices; None if they can."""
    if not x_XD.size * w_DV.size:
        return f"it needs a token, a feature and a word: got x {x_XD.shape} and w {w_DV.shape}"
    x, w, targets = map(split, (x_XD, w_DV, targets_X))
    if x[1] is not None or w[0] is not None:
        return f"features must not be split over devices: x is split over {x} and w over {w}"
    if x[0] != targets[0]:
        return (
            f"targets must be split like their tokens: they are split over {targets} and x over {x}"
        )
    return None
