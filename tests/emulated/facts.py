"""FlashInfer's records as our adapters assume them, made into classes."""

from __future__ import annotations

import dataclasses
from typing import Any

from megamoe.kernels.assumed import REQUIRED


def record(name: str, fields: dict[str, Any]) -> type:
    """A dataclass of that name: unknown and missing fields raise TypeError, as there."""
    return dataclasses.make_dataclass(
        name,
        [
            (field, Any)
            if default is REQUIRED
            else (field, Any, dataclasses.field(default=default))
            for field, default in sorted(fields.items(), key=lambda f: f[1] is not REQUIRED)
        ],
        eq=False,
    )
