"""A module that exits the process when it is imported."""

import sys

sys.exit("goodbye")
