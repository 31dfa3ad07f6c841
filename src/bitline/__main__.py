"""`python -m bitline`, the same as the command."""

from bitline.cli.main import run

run()
