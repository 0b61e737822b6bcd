"""The methods of `test_process_regions`, for its processes: they import no more than these need."""

from regions import test_same_numbers

import lowcomm_jax as lc


def streaming_int8():
    rule = lc.outer.nesterov(0.6, 0.85)
    codec = lc.compression.error_feedback(lc.compression.make("int8"), 0.9)
    pattern = ["^[abs]$", "^c$"]
    return lc.methods.streaming_diloco(4, 2, 1, 0.3, pattern=pattern, outer=rule, codec=codec)


METHODS = {**test_same_numbers.METHODS, "streaming_int8": streaming_int8}
