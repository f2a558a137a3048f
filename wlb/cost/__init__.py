"""Seconds that a piece of work takes: analytic, from a measured table, or fitted to measured micro-batches."""

from wlb.cost.analytic import CrossoverCost, TransformerShape
from wlb.cost.fitted import FittedCost, MeasuredMicroBatch, QuadraticTime, fit_cost
from wlb.cost.model import CostModel, RatioCost, ScaledCost, document_work_ns, micro_batch_work_ns
from wlb.cost.profiled import ProfiledCost
from wlb.cost.stages import PipelineCosts, equal_stages, load_pipeline_costs, stages_to_json

__all__ = [
    "CostModel",
    "CrossoverCost",
    "FittedCost",
    "MeasuredMicroBatch",
    "PipelineCosts",
    "ProfiledCost",
    "QuadraticTime",
    "RatioCost",
    "ScaledCost",
    "TransformerShape",
    "document_work_ns",
    "equal_stages",
    "fit_cost",
    "load_pipeline_costs",
    "micro_batch_work_ns",
    "stages_to_json",
]
