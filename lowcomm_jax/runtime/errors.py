"""What can go wrong between jobs: one class for each way in which a caller must react."""


class StoreUnavailable(Exception):
    """The key-value store cannot be read or written now: try again later."""


class Rejected(Exception):
    """Bytes are not what they claim to be (altered, cut, of another run): treat them as missing."""


class Missing(Exception):
    """No region that can be reached holds these bytes now."""


class Lost(Exception):
    """What this region needs is gone with all regions that had it: this one must join again."""


class Parted(Exception):
    """Regions have different anchors or decisions; the message says what each of them has.

    Attributes:
      heals: other regions go on; this one can join again and take their state.
    """

    def __init__(self, message: str, heals: bool):
        super().__init__(message)
        self.heals = heals


class Superseded(Exception):
    """Another job has taken this region's place: this job must end."""
