"""Real checkpoints into :class:`megamoe.problem.MoEWeights`: right, or refused by name."""

from megamoe.checkpoint.demo import write_demo
from megamoe.checkpoint.load import load

__all__ = ["load", "write_demo"]
