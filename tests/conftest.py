"""Settings every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Kernel builds and a busy machine make single examples slow: time is no measure of a test's result.
settings.register_profile(
    "clcomm", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("clcomm")
