"""Hands a run's ledger to ml-goodput-measurement, Google's library for goodput, where it is installed.

    pip install 'minitext[goodput]'
    minitext goodput RUN --record JOB

Its recorder writes to Google Cloud Logging, where its calculator and MaxText's dashboards read. Steps are known to it
by their starts alone, and all time between two starts is a step's unless a custom event claims it.

Version 0.2.3 took every call, and its calculator read them back, with a stand-in for the cloud's log; no project in
Google Cloud was at hand.

Chapters: 20.
"""

import datetime
from pathlib import Path
from typing import Any

from minitext.errors import UserError
from minitext.observability.goodput import Event, read_events

# What its recorder has no name for. It knows preparation from the job's start to the first step, and data.
CUSTOM = ("evaluation", "sample", "save", "profile", "log")
PREPARATION = ("init", "restore")


def make_recorder(job: str) -> Any:
    """Returns a recorder of the library for a job's name; it needs credentials for Google Cloud.

    Raises:
      UserError: without the library, or without credentials.
    """
    try:
        from google.auth.exceptions import (  # pyright: ignore[reportMissingImports]
            DefaultCredentialsError,
        )
        from ml_goodput_measurement import goodput  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"recording needs ml-goodput-measurement ({error}): pip install 'minitext[goodput]'"
        ) from error
    try:
        return goodput.GoodputRecorder(job, f"goodput_{job}", logging_enabled=True)
    except DefaultCredentialsError as error:
        raise UserError(
            f"job {job} cannot be recorded without credentials for Google Cloud: gcloud auth application-default login"
        ) from error


def replay(directory: Path | str, recorder: Any) -> int:
    """Records every event of a run's ledger, and returns how many there are.

    Args:
      directory: the run directory.
      recorder: a `GoodputRecorder`, or what has its methods.

    Raises:
      UserError: if the directory holds no ledger.
    """
    events = read_events(directory)
    if not events:
        raise UserError(f"{directory} has no ledger: name a run directory, such as runs/NAME")
    started = None  # the step whose start was recorded last
    for event in events:
        begin, end = (_time(event.start + seconds) for seconds in (0, event.seconds))
        if event.event == "job_start":
            recorder.record_job_start_time(begin)
            recorder.record_tpu_init_start_time(begin)
            recorder.record_tpu_init_end_time(end)
            started = None
        elif event.event in PREPARATION:
            recorder.record_training_preparation_start_time(begin)
            recorder.record_training_preparation_end_time(end)
        elif event.event == "data_wait":
            recorder.record_data_loading_start_time(begin)
            recorder.record_data_loading_end_time(end)
        elif event.event in CUSTOM:
            recorder.record_custom_badput_event_start_time(begin, event.event)
            recorder.record_custom_badput_event_end_time(end, event.event)
        elif event.event == "job_end":
            recorder.record_job_end_time(end)
        elif _begins(event, started):
            recorder.record_step_start_time(event.step, begin)
            started = event.step
    return len(events)


def _begins(event: Event, started: int | None) -> bool:
    return event.event in ("step", "compile") and event.step not in (None, started)


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
