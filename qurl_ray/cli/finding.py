"""The lines of the page of `qurl doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the page."""

    what: str
    found: str
    problem: str = ""
    """Sentence on what does not work because of it, and the remedy; "" if nothing."""
    fatal: bool = False
    """True if no run can start."""
