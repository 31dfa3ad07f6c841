"""Readers as no package should offer them."""


class Half:
    """Lacks `layers`."""

    name = "half"

    def matches(self, source):
        return True


class Trips:
    """Trips over every checkpoint."""

    name = "trips"

    def matches(self, source):
        return source.config["no such key"]

    def layers(self, source):
        return []
