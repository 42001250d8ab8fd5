"""One thread a worker; Hypothesis without deadlines and with few examples: small domains are
exhausted instead.
"""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # pytest-xdist brings the parallelism; threads on top of it only spin

settings.register_profile(
    "megamoe",
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", parent=settings.get_profile("megamoe"), max_examples=1000)
settings.load_profile("megamoe")
