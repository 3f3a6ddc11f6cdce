"""Triton kernels that only the trainer uses."""
