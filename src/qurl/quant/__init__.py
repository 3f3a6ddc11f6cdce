"""Quantizers, quantized linear layers, UAQ and update tracking, for trainer and engines alike."""

from qurl.quant.formats import FORMATS, Format, Quantized, dequantize, get_format, quantize
from qurl.quant.linear import QuantLinear, quantized_copy
from qurl.quant.scaling import rescale_, unscale_

__all__ = [
    "FORMATS",
    "Format",
    "QuantLinear",
    "Quantized",
    "dequantize",
    "get_format",
    "quantize",
    "quantized_copy",
    "rescale_",
    "unscale_",
]
