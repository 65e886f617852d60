"""What the job refuses."""

from __future__ import annotations


class JobError(ValueError):
    """Something given can't be used. The message says what, and what to do."""
