"""The full-precision side: the policy, its critic, and their updates."""
