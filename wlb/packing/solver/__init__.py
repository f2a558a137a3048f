"""Packing by a maintained constraint solver: exact, slow, and the yardstick of the packers that are fast."""

from wlb.packing.solver.model import require_solver
from wlb.packing.solver.optimal import Solution, optimal, work_bound
from wlb.packing.solver.packer import SolverPacker

__all__ = ["Solution", "SolverPacker", "optimal", "require_solver", "work_bound"]
