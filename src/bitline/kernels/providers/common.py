"""Checks that several adapters share."""

from __future__ import annotations

from bitline.platform import PACKAGES, Platform
from bitline.types import YES, Verdict, no


def installed(platform: Platform, package: str) -> Verdict:
    """Whether the package (by its import name) is installed; a refusal says what to install."""
    if package in platform.packages:
        return YES
    return no(f"the package {PACKAGES[package].distribution} is not installed", PACKAGES[package].install)


def triton_available(platform: Platform) -> Verdict:
    """Triton with a GPU, or with its interpreter on a CPU."""
    found = installed(platform, "triton")
    if found and platform.vendor == "cpu" and not platform.interpreted:
        return no("Triton has no compiler for CPUs; only its interpreter runs here", "TRITON_INTERPRET=1, for tests")
    return found
