"""What is known of one request after it ended: the raw times, from which all statistics are made afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds on one monotonic clock of the load generator; only differences mean anything."""

    scheduled_s: float
    """When it was due: the planned time (open loop), or when its turn came (closed loop)."""
    wanted_output_tokens: int
    sent_s: float = 0.0
    """When the client began to send it. `sent_s - scheduled_s` is how late the client itself was."""
    chunk_s: list[float] = field(default_factory=list)
    """When each chunk that carries output arrived."""
    ended_s: float = 0.0
    prompt_tokens: int | None = None
    """As the server counted them; None when it did not say."""
    output_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    """The server's names of the tokens, where the request asks for log-probabilities of a completion."""
    error: str | None = None
    """Why it failed. A failed request may have chunks: those that came before the failure."""
    aborted: bool = False
    """The client closed the connection on purpose before the end."""

    @property
    def succeeded(self) -> bool:
        return self.error is None and not self.aborted
