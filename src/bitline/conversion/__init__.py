"""Quantized checkpoints converted from one format into another, losslessly and verified by reading back."""

from bitline.conversion.report import ConversionReport, LayerReport
from bitline.conversion.run import convert
from bitline.conversion.targets import TARGETS

__all__ = ["TARGETS", "ConversionReport", "LayerReport", "convert"]
