"""Replays a run's ledger into ml-goodput-measurement, Google's goodput library, if it is installed.

    pip install 'minitext[goodput]'
    minitext goodput RUN --record JOB

The library's recorder writes to Google Cloud Logging, which its calculator and MaxText's dashboards read. It knows
only the start of each step, and takes all time between two starts for a step's unless a custom event claims it.

Version 0.2.3 accepted every call, and its calculator read them back, with a stand-in for the cloud's log; no Google
Cloud project was available.

Chapters: 20.
"""

import datetime
from pathlib import Path
from typing import Any

from minitext.errors import UserError
from minitext.observability.goodput import read_ledger

# The recorder's names for our kinds of time. Apart from steps, it knows only preparation and data loading.
SPANS = {
    "job_start": "tpu_init",
    "init": "training_preparation",
    "restore": "training_preparation",
    "data_wait": "data_loading",
} | dict.fromkeys(("evaluation", "sample", "save", "profile", "log"), "custom_badput_event")


def make_recorder(job: str) -> Any:
    """Returns the library's recorder for a job of this name; it needs credentials for Google Cloud.

    Raises:
      UserError: if the library or the credentials are missing.
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
    """Records every event of a run's ledger with a `GoodputRecorder`, and returns how many there are.

    Raises:
      UserError: if the directory has no ledger.
    """
    events = read_ledger(directory)
    started = None  # the step whose start was recorded last
    for kind, start, seconds, step in events:
        begin, end = (
            datetime.datetime.fromtimestamp(t, datetime.UTC) for t in (start, start + seconds)
        )
        if kind == "job_start":
            recorder.record_job_start_time(begin)
            started = None
        if span := SPANS.get(kind):
            name = [kind] if span == "custom_badput_event" else []
            getattr(recorder, f"record_{span}_start_time")(begin, *name)
            getattr(recorder, f"record_{span}_end_time")(end, *name)
        elif kind == "job_end":
            recorder.record_job_end_time(end)
        elif kind in ("step", "compile") and step not in (None, started):
            recorder.record_step_start_time(step, begin)
            started = step
    return len(events)
