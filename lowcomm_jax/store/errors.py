"""Errors between jobs: one class for each way in which a caller must react."""


class StoreUnavailable(Exception):
    """The key-value store cannot be read or written now: try again later."""


class Rejected(Exception):
    """Bytes fail their check (altered, cut, of another run): treat them as missing."""


class Unreadable(Exception):
    """A record is signed as it should be, and is none of its kind: this region must end.

    To skip it could part the regions: another one may read it, and land what it names.
    """


class Missing(Exception):
    """No region that can be reached holds these bytes now."""


class Lost(Exception):
    """A payload or state that this region needs is gone from all regions: it must join again."""


class Parted(Exception):
    """Regions have different anchors or decisions; the message says what each of them has.

    Attributes:
      heals: whether other regions go on, so that this one can join again and take their state.
    """

    def __init__(self, message: str, heals: bool):
        super().__init__(message)
        self.heals = heals


class Superseded(Exception):
    """Another job has taken this region's place: this job must end."""
