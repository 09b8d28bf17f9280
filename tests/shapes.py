"""The shapes of a split program that the default settings have, given to calls in turn."""

import dataclasses

from sparse_decode.call import Call
from sparse_decode.plan import SHAPES, Config


def in_turn(call: Call, turn: int) -> Call:
    """The call with settings of one of the shapes; unchanged if its path may choose the splits."""
    if call.splits is None:
        return call
    shape = list(SHAPES.values())[turn % len(SHAPES)]
    return dataclasses.replace(call, config=Config(call.splits, **shape._asdict()))
