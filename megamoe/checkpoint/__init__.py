"""Real checkpoints into :class:`megamoe.problem.MoEWeights`: right, or refused by name.

``families`` and ``storage`` are the tables of names, facts and formats. ``files`` and ``config``
are the doors; ``layer``, ``detect``, ``fused``, ``experts``, ``shared`` and ``router`` find a
layer's parts from headers; ``stack`` reads them into place, with ``scales`` checked on the way.
"""

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
