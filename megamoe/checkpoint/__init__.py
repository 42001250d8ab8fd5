"""Real checkpoints into :class:`megamoe.problem.MoEWeights`: right, or refused by name."""

from megamoe.checkpoint.cast import mxfp4_to_nvfp4
from megamoe.checkpoint.demo import write_demo
from megamoe.checkpoint.inspection import CheckpointRecord, LayerRecord, MoERecord, inspect
from megamoe.checkpoint.loading import load

__all__ = [
    "CheckpointRecord",
    "LayerRecord",
    "MoERecord",
    "inspect",
    "load",
    "mxfp4_to_nvfp4",
    "write_demo",
]
