"""Numbers that a caller hands in, as float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradscope.errors import SchemaError


def real_array(values: ArrayLike, *, name: str) -> NDArray[np.float64]:
    """Returns the values as float64 of the same shape.

    Raises:
        SchemaError: They are no real numbers; `name` is what the caller calls them.
    """
    try:
        given = np.asarray(values)
        # Otherwise numpy would drop the imaginary part with a warning.
        return given.astype(np.float64, casting="same_kind" if given.dtype.kind == "c" else "unsafe")
    except (TypeError, ValueError) as error:
        raise SchemaError(f"{name} must be an array of real numbers: {error}.") from error
