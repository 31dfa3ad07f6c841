"""Checkpoints written in another format, losslessly, or quantized by rounding to nearest; verified by reading back."""

from bitline.conversion.quantize import quantize_checkpoint
from bitline.conversion.report import ConversionReport, LayerReport
from bitline.conversion.run import convert
from bitline.conversion.targets import TARGETS

__all__ = ["TARGETS", "ConversionReport", "LayerReport", "convert", "quantize_checkpoint"]
