"""Short by default; `make test-chaos` takes the profile with many more inputs."""

from hypothesis import HealthCheck, Phase, settings

COMMON = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "phases": [Phase.generate],  # shrinking would repeat hangs
}
settings.register_profile("chaos", max_examples=150, print_blob=True, **COMMON)
settings.register_profile("chaos-short", max_examples=5, derandomize=True, **COMMON)
