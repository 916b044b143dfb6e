"""The commands that say what a configuration needs and does, before it runs.

Chapters: none.
"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from minitext.cli.arguments import Json, Settings, load, split_off, start
from minitext.devices import simulate_for
from minitext.errors import UserError


def compile_(settings: Settings = None, as_json: Json = False) -> None:
    """Compile a preset's train step for chips that need not be there: target=v5e:2x2.

    Prints whether it fits, bytes of arguments and temporaries per chip, collectives and compile time. Exits with 3,
    naming the largest tensors, if it does not fit.
    """
    targets, settings = split_off(settings, "target")
    if len(targets) != 1:
        raise UserError("name one target, such as target=v5e:2x2 or target=v5p:4x4x4")
    cfg = load(settings)
    start()
    from minitext import aot

    report = aot.compile_preset(cfg, targets[0])
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        aot.print_report(report)
    if not report.fits:
        raise typer.Exit(3)


def roofline(
    settings: Settings = None,
    rows: Annotated[int, typer.Option(min=0, help="operations to list, the longest first")] = 20,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="draw them: .svg, .png")] = None,
    as_json: Json = False,
) -> None:
    """Predict the time of a preset's train step from its FLOPs and bytes, here or on a chip: chip=v5p.

    On a chip the step is shared evenly by the devices of mesh.*, and what they tell each other takes no time. This
    machine's peak and bandwidth are measured once a day.
    """
    chips, settings = split_off(settings, "chip")
    cfg = load(settings)
    start()
    from minitext import roofline

    prediction = roofline.predict_step(cfg, chips[-1] if chips else None)
    if as_json:
        print(json.dumps(prediction.to_json()))
    else:
        roofline.print_prediction(prediction, cfg.model.dtype, rows)
    if plot is not None:
        from minitext.figures import draw_roofline, save_figure

        save_figure(plot, lambda: draw_roofline(prediction, cfg.model.dtype))


def optim_memory(settings: Settings = None, as_json: Json = False) -> None:
    """Compare the memory of a preset's training state under each optimizer, summed over all devices."""
    cfg = load(settings)
    start()
    from minitext import memory, train

    found = train.optimizer_memory(cfg)
    if as_json:
        print(json.dumps(found))
    else:
        memory.print_optimizers(found)


def shard(
    settings: Settings = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="draw them: .svg, .png")] = None,
    as_json: Json = False,
) -> None:
    """Print where every parameter of a preset lies on a mesh of any size: its dimensions, their axes, its bytes.

    No device is needed: minitext shard llama3-8b mesh.fsdp=16 mesh.tensor=4
    """
    cfg = load(settings)
    start()
    from minitext import shard_report

    found = shard_report.parameters(cfg)
    if as_json:
        print(json.dumps([asdict(parameter) for parameter in found]))
    else:
        shard_report.print_parameters(cfg, found)
    if plot is not None:
        from minitext.figures import draw_sharding, save_figure

        save_figure(plot, lambda: draw_sharding(found, shard_report.abstract_mesh(cfg)))


def memory_(settings: Settings = None, as_json: Json = False) -> None:
    """Predict the memory of a preset's train step, beside what the compiler says, here or for target=v5e:2x4."""
    targets, settings = split_off(settings, "target")
    cfg = load(settings)
    if len(targets) > 1:
        raise UserError("name one target, such as target=v5e:2x4, or none for this machine")
    start(None if targets else simulate_for(list(cfg.mesh.sizes().values()), cfg.mesh.simulate))
    from minitext import memory

    found = memory.predict_and_compile(cfg, targets[0] if targets else None)
    if as_json:
        print(json.dumps(found))
    else:
        memory.print_memory(found)


def comms(settings: Settings = None, as_json: Json = False) -> None:
    """Predict what devices send each other in a step, beside the program for simulated ones or for target=v5e:2x4."""
    targets, settings = split_off(settings, "target")
    cfg = load(settings)
    if len(targets) > 1:
        raise UserError("name one target, such as target=v5e:2x4, or none for simulated devices")
    start(
        None if targets else simulate_for(list(cfg.mesh.sizes().values()), cfg.mesh.simulate or 8)
    )
    from minitext import comms_report

    found = comms_report.audit_preset(cfg, targets[0] if targets else None)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        comms_report.print_audit(found)
