"""Damage to the buffers of a weight version, {name: (codes, scale) or (values,)}: functions that change them."""

import numpy as np


def swapped(buffers):
    one, other = (n for n in buffers if n.endswith("q_proj.weight"))
    return buffers | {one: buffers[other], other: buffers[one]}


def dropped(buffers):
    return {name: parts for i, (name, parts) in enumerate(buffers.items()) if i != 4}


def transposed(buffers):
    name = next(n for n in buffers if n.endswith("down_proj.weight"))
    codes, scale = buffers[name]
    return buffers | {name: (np.ascontiguousarray(codes.T), scale)}
