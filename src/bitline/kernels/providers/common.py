"""What the adapters share."""

from __future__ import annotations

from bitline.platform import PACKAGES, Platform
from bitline.types import YES, Verdict, no


def installed(platform: Platform, package: str, note: str = "") -> Verdict:
    """Is the package, by its import name, there; a refusal says what to install."""
    if package in platform.packages:
        return YES
    return no(f"the package {PACKAGES[package]} is not installed", f"pip install {PACKAGES[package]}{note}")
