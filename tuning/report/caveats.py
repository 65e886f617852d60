"""What a simulated figure can say and what it cannot."""

from __future__ import annotations

from tuning.report.content import JobReport
from tuning.report.markup import Html, bullets, heading, paragraph, section
from tuning.report.quantities import duration, number

_SIMPLIFIED = (
    "Look-ups, dispatch and tokenizing take no time, and what instances report of themselves is never late.",
    "Prompts are computed one at a time on an instance, where the live system lets short ones share a step.",
    "The length of an answer is known beforehand and room for it is reserved, so that nobody is preempted.",
    "Devices, links and disks always reach the rates that their profile and the price book state.",
)


def caveats_section(report: JobReport) -> Html:
    """For who has to vouch for the figures."""
    trace = report.trace
    can = [
        "Which of two configurations is the better one under this traffic, where they differ clearly: both are "
        "replayed with the same requests, and eviction, times-to-live, dispatch and fetching are decided by the very "
        "rules of the live system.",
        "Whether more memory or disk still earns something, and from where on it does not.",
        "What an hour of a configuration costs at the prices given: that is arithmetic. The prices have a date and a "
        "source below; check them.",
    ]
    cannot = [
        f"What other traffic would make of it. This is one trace, {trace.name}: {number(trace.requests)} requests in "
        f"{duration(trace.span_s)}. Other hours have other traffic, and next month has other prompts.",
        f"Seconds as they will be measured. Times of steps come from {report.hardware.timing}. Take seconds for an "
        "estimate, and measure the chosen configuration before a promise to customers hangs on it.",
        "What fails. Nothing breaks, restarts or is updated here, and nobody else uses the network or the disks.",
        "What is not in the price book: discounts, taxes, data transfer, people.",
        "That nothing better lies between the configurations that were evaluated: the search leaves out what promises "
        "little, and the table of what was skipped says so.",
    ]
    if trace.rate_factor != 1:
        cannot.append(
            f"What {number(trace.rate_factor)} times the traffic really looks like: it is made of the same requests "
            f"with {number(1 / trace.rate_factor)} times the time between them, so that pauses within a conversation "
            "are not those of people."
        )
    return section(
        "caveats",
        "What these figures can and cannot say",
        [
            paragraph(
                "All figures but the prices are simulated: the requests of a trace are replayed through a model of the "
                "deployment, event by event."
            ),
            heading("They can say"),
            bullets(can),
            heading("They cannot say"),
            bullets(cannot),
            heading("What the simulation simplifies"),
            bullets(_SIMPLIFIED),
        ],
    )
