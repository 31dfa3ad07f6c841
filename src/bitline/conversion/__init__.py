"""Quantized checkpoints from one format into another, without changing a value."""

from bitline.conversion.report import ConversionReport, LayerReport
from bitline.conversion.run import TARGETS, convert

__all__ = ["TARGETS", "ConversionReport", "LayerReport", "convert"]
