"""Every error of this package, under one root. Texts name the argument, the rule and the value."""


class WlbError(Exception):
    """Root of all errors that this package raises on purpose."""


class ConfigError(WlbError, ValueError):
    """An option or a combination of options is not usable."""


class DataError(WlbError, ValueError):
    """A data file is missing, truncated or holds values that cannot be trained on."""


class PackingError(WlbError, ValueError):
    """Documents cannot be placed under the caps given."""


class StateError(WlbError, ValueError):
    """A saved state does not belong to this data or to this configuration."""


class PlanMismatchError(WlbError, RuntimeError):
    """Ranks that must execute the same plan hold different ones."""


class PlanLostError(WlbError, RuntimeError):
    """A layer of a packed run was called without the plan of its micro-batch: what it would compute is wrong."""


class PatchError(WlbError, RuntimeError):
    """An upstream name is not what a patch of it was written against."""


class PlannerProcessError(WlbError, RuntimeError):
    """The process that plans ahead ended or did not answer in time."""


class ShardingError(WlbError, ValueError):
    """Tokens cannot be divided over context-parallel ranks as asked, or a plan does not fit what it is used on."""
