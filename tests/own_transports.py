"""Transports as a user's module would have them, all of them wrong."""

import abc

from lowcomm_jax.exchange import Transport

number = 3


class Whole(Transport):
    """All members, which do nothing."""

    name, lingers = "whole", True

    def __init__(self, context):
        self.context = context

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


class NeedsAddressByPlace(Whole):
    """Needs a field of a config, and has no keyword for it."""

    def __init__(self, context, address, /):
        self.context, self.address = context, address


class TakesAny(Whole):
    """Takes any keyword."""

    def __init__(self, context, **settings):
        self.context, self.settings = context, settings


class NothingMade(Transport):
    """Has the constructor of a protocol, which takes nothing."""

    name, lingers = "nothing", True
    put, get, drop = Whole.put, Whole.get, Whole.drop


class ForNoContext(Whole):
    """Takes no context."""

    def __init__(self):
        self.context = None


class ContextByName(Whole):
    """Takes a context by its name alone."""

    def __init__(self, *, context):
        self.context = context


class LeavesOpen(Whole):
    """Leaves a method of its own to a class that inherits it."""

    def __init__(self, context):
        self.context = context

    @abc.abstractmethod
    def connect(self):
        """To the others."""


class NoProtocol:
    """Inherits nothing, and has no constructor."""

    name, lingers = "alone", True
    start = close = put = get = get_ahead = keep = drop = print
