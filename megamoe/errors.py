"""The exceptions megamoe raises on purpose, and the one form of their messages."""

from __future__ import annotations

from collections.abc import Mapping


class MegaMoEError(Exception):
    """Base of every error raised on purpose; anything else that escapes is a bug in megamoe."""


class BadInput(MegaMoEError, ValueError):
    """An argument or a file breaks its contract.

    Raised before any work: inputs are untouched, nothing was launched, and no rank is left waiting.
    """


class Unsupported(MegaMoEError):
    """A valid request that no kernel, or not the kernel asked for, can compute.

    `objections` maps each refused kernel to all its reasons. The message ends with them, one line
    per kernel.
    """

    objections: Mapping[str, tuple[str, ...]]

    def __init__(
        self, message: str, *, objections: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        # A plain dict, because an exception must survive pickling between worker processes.
        self.objections = {kernel: tuple(why) for kernel, why in (objections or {}).items()}
        refusals = (f"  {kernel}: {'; '.join(why)}" for kernel, why in self.objections.items())
        super().__init__("\n".join((message, *refusals)))


class Mismatch(MegaMoEError, AssertionError):
    """A verdict went against an output: it is not the layer, or not this recipe.

    Raised by the oracle and by the parity mode, never for a bad argument. The message names where
    (rank, token, slot, expert), the suspected fault, and the error against its budget.
    """


class RankFailure(MegaMoEError, RuntimeError):
    """The ranks of a group disagree, or one of them is gone.

    Raised on every healthy rank when the fingerprints differ before the first launch, and on use of
    a layer that its watchdog has marked dead.
    """


def one_line(subject: object, value: object, limit: str, remedy: str) -> str:
    """Return "{subject} {value} {limit}; {remedy}" on one line, whatever the value prints as.

    >>> one_line("hidden_size", 1000, "is not a multiple of 128", "pad to 1024")
    'hidden_size 1000 is not a multiple of 128; pad to 1024'
    """
    return " ".join(f"{subject} {value} {limit}; {remedy}".split())


def bad_input(subject: object, value: object, limit: str, remedy: str) -> BadInput:
    """Return (not raise) a `BadInput` whose message is `one_line` of the same arguments."""
    return BadInput(one_line(subject, value, limit, remedy))
