"""Plug-ins with defects."""


class Half:
    """Has no `layers`."""

    name = "half"

    def matches(self, source):
        return True


class Trips:
    """Fails in `matches`, for every checkpoint."""

    name = "trips"

    def matches(self, source):
        return source.config["no such key"]

    def layers(self, source):
        return []
