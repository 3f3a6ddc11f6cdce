"""Triton kernels of the quantized linear layers. Imported only where Triton is installed."""
