"""What can go wrong between jobs, one class for each way a caller must react."""


class StoreUnavailable(Exception):
    """The key-value store cannot be read or written just now: try again later."""


class Rejected(Exception):
    """Bytes that are not what they claim to be (altered, cut, of another run): as if missing."""


class Missing(Exception):
    """No region that can be reached holds these bytes just now."""


class Lost(Exception):
    """What this region needs is gone with everyone who had it: it must come in anew."""


class Parted(Exception):
    """Regions have other anchors, or decided otherwise; the message says what each of them has.

    Attributes:
      heals: other regions go on; this one can come back and take their state.
    """

    def __init__(self, message: str, heals: bool):
        super().__init__(message)
        self.heals = heals


class Superseded(Exception):
    """Another job has taken this region's place: this one must end."""
