"""A way that bytes take, one transfer after the other: a queue in which congestion shows."""

from __future__ import annotations


class Lane:
    """One direction of a tier or a link. Transfers are served whole, in the order in which they are asked for.

    A transfer takes the longer of `bytes / bytes_per_s` and `operations / operations_per_s`.

    Args:
        bytes_per_s: above 0; infinite where bytes take no time.
        operations_per_s: above 0; infinite where nothing limits their number.
        operation_bytes: what one operation moves at most; a started one counts whole.
    """

    __slots__ = ("_operation_bytes", "_s_per_byte", "_s_per_operation", "busy_s", "free_s", "num_bytes", "waited_s")

    def __init__(
        self, bytes_per_s: float, operations_per_s: float = float("inf"), operation_bytes: int = 1 << 18
    ) -> None:
        self.free_s = 0.0
        """When all that was asked for will have been served."""
        self.busy_s = 0.0
        self.waited_s = 0.0
        """What transfers waited for those before them, together."""
        self.num_bytes = 0
        self._s_per_byte = 1.0 / bytes_per_s
        self._s_per_operation = 1.0 / operations_per_s
        self._operation_bytes = operation_bytes

    def duration_s(self, num_bytes: int) -> float:
        """What a transfer takes by itself."""
        duration_s = num_bytes * self._s_per_byte
        if self._s_per_operation:
            return max(duration_s, -(-num_bytes // self._operation_bytes) * self._s_per_operation)
        return duration_s

    def done_in_s(self, now_s: float, num_bytes: int) -> float:
        """How long after now a transfer would be done that is asked for now, waiting included."""
        duration_s = self.duration_s(num_bytes)
        return duration_s + self.free_s - now_s if self.free_s > now_s else duration_s

    def submit(self, earliest_s: float, num_bytes: int) -> tuple[float, float]:
        """Ask for a transfer that may begin at `earliest_s`.

        That may lie before now, for what could go on while it was computed: if the lane was free then, it went.

        Returns:
            When it begins, and when it ends.
        """
        begin_s = self.free_s
        if begin_s > earliest_s:
            self.waited_s += begin_s - earliest_s
        else:
            begin_s = earliest_s
        duration_s = num_bytes * self._s_per_byte
        if self._s_per_operation:
            duration_s = self.duration_s(num_bytes)
        self.busy_s += duration_s
        self.num_bytes += num_bytes
        self.free_s = end_s = begin_s + duration_s
        return begin_s, end_s


def submit_through(first: Lane, second: Lane, earliest_s: float, num_bytes: int) -> tuple[float, float]:
    """A transfer over two lanes at once: it flows when both have begun, and is done when both have ended (ours)."""
    begin_s, end_s = first.submit(earliest_s, num_bytes)
    other_begin_s, other_end_s = second.submit(earliest_s, num_bytes)
    return (
        begin_s if begin_s > other_begin_s else other_begin_s,
        end_s if end_s > other_end_s else other_end_s,
    )
