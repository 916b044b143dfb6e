"""The command that says how long a step should take.

Chapters: none.
"""

import json

from minitext.cli.arguments import Json, Settings, load, start, take_target
from minitext.errors import UserError


def predict(settings: Settings = None, as_json: Json = False) -> None:
    """Predict how long a preset's train step takes on TPUs that need not be there: target=v5e:2x4.

    Compiles the step and walks through the compiler's schedule: an interval from everything overlapped to nothing, a
    best estimate, and what the core does or waits for. Exits with 3 if the step does not fit.
    """
    target, settings = take_target(settings)
    if target is None:
        raise UserError("name one target, such as target=v5e:2x4 or target=v5p:4x4x4")
    cfg = load(settings)
    start()
    from minitext.perf import step_time

    found = step_time.predict_preset(cfg, target)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        step_time.print_step_time(found)
