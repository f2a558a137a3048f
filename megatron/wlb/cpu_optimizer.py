"""Lets the distributed optimizer load its state where PyTorch's Adam stands in for Transformer Engine's or Apex's.

Megatron-Core 0.19 falls short there in four places: the state of an optimizer that has made no step fails an assertion
without words; one `step` tensor is shared by all parameters, so that PyTorch's Adam counts every step once a parameter;
that tensor is then overwritten with the one of the empty optimizer; and a parameter that needs gradients is written in
place.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from megatron.wlb.patches.registry import replace


def replace_state_loading(undo: ExitStack) -> None:
    """Do all four as they are meant. Nothing to do where Megatron found Transformer Engine or Apex."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    state_dict = DistributedOptimizer.state_dict
    load_state_dict = DistributedOptimizer.load_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def state_dict_at_any_step(self: Any) -> Any:
        _begin(self.optimizer)
        return state_dict(self)

    def load_state_dict_apart(self: Any, state: Any) -> None:
        _begin(self.optimizer)
        load_state_dict(self, state)
        for of_parameter in self.optimizer.state.values():
            if "step" in of_parameter:
                of_parameter["step"] = of_parameter["step"].clone()

    def set_states_but_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        # The step has come with the state dictionary.
        with torch.no_grad():
            set_states(self, parameter, tensors | {"step": None})

    replace(undo, DistributedOptimizer, "state_dict", state_dict_at_any_step)
    replace(undo, DistributedOptimizer, "load_state_dict", load_state_dict_apart)
    replace(undo, DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states_but_step)


def _begin(optimizer: Any) -> None:
    """Adam's state before the first step, if it has none yet."""
    if optimizer.state or not isinstance(optimizer, torch.optim.Adam):  # AdamW is an Adam
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
