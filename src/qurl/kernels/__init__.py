"""Triton kernels of the trainer. Imported only where Triton is installed."""
