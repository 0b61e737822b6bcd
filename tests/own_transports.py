"""Transports as a user's module would have them, all of them wrong."""

from lowcomm_jax.exchange import Transport

number = 3


class Whole(Transport):
    """All members, which do nothing."""

    name, lingers = "whole", True

    def put(self, name, data):
        """Nothing."""

    def get(self, name, nbytes, holders):
        """Nothing."""

    def drop(self, name, shared):
        """Nothing."""


class NeedsPlace(Whole):
    """Needs a field of a config."""

    def __init__(self, context, address):
        self.context, self.address = context, address


class NeedsBucket(Whole):
    """Needs what no config has."""

    def __init__(self, context, bucket, listen=None):
        self.context, self.bucket = context, bucket


class SaysLater(Whole):
    """Does not know its name before it is made."""

    @property
    def name(self):
        """Of the transport."""
        return "later"


class Half(Transport):
    """What has to be there, in part."""

    name = "half"

    def put(self, name, data):
        """Nothing."""
