"""Names for the array types that many modules pass to each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: ObjectKeys, (n, 16).
Keys = npt.NDArray[np.uint8]
#: Slot numbers, pool-wide, (n,).
Slots = npt.NDArray[np.int64]
#: Positions in the arrays of one call, (n,).
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
#: Types as numpy has them, which it takes at once; a class such as np.uint8 is looked up first.
UINT8, UINT32 = np.dtype(np.uint8), np.dtype(np.uint32)
#: The positions of most calls: a slice is made with less code of numpy than an arange.
FIRST_ROWS: Rows = np.arange(4096, dtype=np.int64)
FIRST_ROWS.flags.writeable = False
