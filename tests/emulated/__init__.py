"""A device without hardware: stands in for FlashInfer's layers behind `megamoe.kernels.flashinfer`.

It takes the bytes that an adapter hands over, inverts the layout, computes what a perfect kernel of
that recipe would, and is as strict about its inputs as the kernel is. Ranks are threads. Only tests
can reach it.
"""

from emulated.cluster import Cluster, ContractBroken, Trap, run_ranks
from emulated.device import Device, emulated

__all__ = ["Cluster", "ContractBroken", "Device", "Trap", "emulated", "run_ranks"]
