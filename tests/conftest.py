"""Hypothesis without deadlines (shared cores), and few examples: small domains are exhausted."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "megamoe",
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", parent=settings.get_profile("megamoe"), max_examples=1000)
settings.load_profile("megamoe")
