"""Bytes of the routes between regions, in closed form."""


def sent_bytes(route, nbytes, members, listeners=0):
    """The mean of the bytes that one member sends, where all payloads are equal."""
    if route in ("all_gather", "pair"):
        return nbytes * (members - 1 + listeners)
    if route == "pass":
        return nbytes * (members > 1)
    return nbytes * (2 * (members - 1) + listeners) / members
