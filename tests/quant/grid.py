"""The grid of FP8."""

import numpy as np

E4M3 = np.array(
    [m / 8 * 2**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)
"""The values of an 8-bit float that are not negative: 3 bits of mantissa, exponents from -6, one nan."""
