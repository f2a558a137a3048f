"""Reads what training runs wrote and says in numbers, a table and a picture where their time went."""

from wlb.report.comparison import BASE, compare, fit_first_half, fit_range, fit_runs, load_manifest
from wlb.report.prediction import StepModel, fit_steps
from wlb.report.run import WARM_UP_STEPS, TrainedRun, load_run
from wlb.report.table import table
from wlb.report.training_log import LoggedStep, parse_iteration

__all__ = [
    "BASE",
    "WARM_UP_STEPS",
    "LoggedStep",
    "StepModel",
    "TrainedRun",
    "compare",
    "fit_first_half",
    "fit_range",
    "fit_runs",
    "fit_steps",
    "load_manifest",
    "load_run",
    "parse_iteration",
    "table",
]
