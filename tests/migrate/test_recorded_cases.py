"""What is planned in situations of a real run: SmolLM2-135M in bfloat16, a prefill and a decode worker on two cores.

Figures are reduced from `GET /debug/moves` of a running app, on a machine that others used heavily (`BUSY_MACHINE`),
and for a quiet one from load_tests/results and docs/engine-profile.md. The answers are worked out by hand:
milliseconds are of all 30 layers, and a load is compute alone: memory, of which nobody is short, changes little.
"""

from __future__ import annotations

import pytest

from migrate.cost_model import CostModel, LinkSpeed, MeasuredTimes, ModelSizes
from migrate.fleet import Fleet
from migrate.link_estimates import FIRST_GUESS, FIRST_LOADED_BYTES_PER_S
from migrate.move_settings import MoveSettings
from migrate.moves import LayerMove, Move
from migrate.placement import Placement
from migrate.planner import Plan, plan
from migrate.prediction import Prediction
from migrate.verdict import Situation
from migrate.worker_figures import WorkerFigures

LAYERS = 30
SIZES = ModelSizes(
    LAYERS, 3, layer_weight_bytes=7_340_032, page_bytes=4096, hidden_bytes=1152, query_bytes=384, key_bytes=128
)
HOME = {name: Placement.at_home(name, LAYERS, 3) for name in ("prefill", "decode")}


def times(prompt_ms: float, step_ms: float, row_ms: float, known_rows: float, **head: float) -> MeasuredTimes:
    token_s, step_s, row_s = (milliseconds / 1000 / LAYERS for milliseconds in (prompt_ms, step_ms, row_ms))
    return MeasuredTimes(token_s, step_s, row_s, full_batch=64, known_rows=known_rows, **head)


BUSY_MACHINE = times(2.732, 165.6, 16.65, 1.0, head_row_s=0.0294)
QUIET = times(0.7, 46.9, 1.1, 1.05)
QUIET_MANY_ROWS = times(0.7, 28.0, 1.15, 48.0)


def worker(name: str, **figures: float) -> WorkerFigures:
    return WorkerFigures(name, memory_bytes=1_287_782_400, total_blocks=2912, **figures)  # type: ignore[arg-type]


def planned(measured: MeasuredTimes, prefill: WorkerFigures, decode: WorkerFigures, *placed: Placement) -> Plan:
    cost = CostModel(SIZES, measured, LinkSpeed(FIRST_GUESS.bytes_per_s, FIRST_GUESS.latency_s),
                     loaded_byte_s=1 / FIRST_LOADED_BYTES_PER_S)  # fmt: skip
    where = {**HOME, **{placement.home: placement for placement in placed}}
    return plan(Situation(Fleet.of([prefill, decode], where.values(), cost)), MoveSettings())


def chosen(made: Plan) -> Prediction:
    (predicted,) = [verdict.prediction for verdict in made.verdicts if verdict.accepted]
    assert predicted is not None
    return predicted


PROMPTS = worker(
    "prefill", live_blocks=130, cached_blocks=600, prefill_tokens_per_s=1415, prefilled_tokens_per_s=1415,
    pending_prefill_tokens=15 * 1024, prefill_step_tokens=512,
)  # fmt: skip
THEIR_ANSWERS = worker("decode", live_blocks=66, cached_blocks=600, decode_tokens_per_s=21, running=1.05)
FEW_PROMPTS = worker(
    "prefill", live_blocks=8, cached_blocks=600, prefill_tokens_per_s=72, prefilled_tokens_per_s=72,
    prefill_step_tokens=64,
)  # fmt: skip
MANY_ANSWERS = worker("decode", live_blocks=960, cached_blocks=600, decode_tokens_per_s=578, running=48)


def test_prompts_beside_answers_one_at_a_time() -> None:
    # Prompts: (1,415 + 15,360 / 30) x 0.7 ms = 1.349, 0.045 a layer. Answers: 21 x 1,927 / 1,415 = 28.6 tokens/s, 2.1
    # in a step: 46.9 / 2.1 + 1.1 = 23.4 ms each, 0.670. Seven layers leave 1.034 and 0.985, eight 0.989 and 1.030.
    # They keep the decode worker busy 7 / 23 = 0.304 of the time: a step of 48.1 ms takes 69.1 ms.
    # 11 layers would be 11 / 19 of it, and 114 ms.
    made = planned(QUIET, PROMPTS, THEIR_ANSWERS)
    assert made.moves == (LayerMove("prefill", 23, 7, "prefill", "decode"),)
    predicted = chosen(made)
    assert predicted.after["prefill"].compute == pytest.approx(1.034, abs=1e-3)
    assert predicted.after["decode"].compute == pytest.approx(0.985, abs=1e-3)
    assert predicted.itl_before_s["decode"] == pytest.approx(0.0481, abs=1e-4)
    assert predicted.itl_after_s["decode"] == pytest.approx(0.0691, abs=1e-4)
    # 730 blocks of 3 x 7 lanes are 62.8 MB: at 50 MB/s 1.26 s, and 0.06 s at rest. Two calls at home wait for a chunk,
    # 512 x 0.7 ms, and one at the host for a step of 48.1 ms, at which it is 21 / 1.06 times a second.
    assert predicted.turns_s == pytest.approx(2 * 0.358 + 0.048 * 0.95, abs=2e-3)
    assert predicted.transfer_s == pytest.approx(1.32 + 0.76, abs=0.01)


def test_the_same_as_it_was_recorded_on_a_busy_machine() -> None:
    # Prompts: (329.1 + 14,336 / 30) x 2.732 ms = 2.204. Answers: 4.33 x 2 (of 806.9 / 329.1 no more than two workers)
    # = 8.65 tokens/s; a step of one row was seen, so of two: 165.6 / 2 + 16.65 + 29.4 = 128.9 ms, 1.115.
    # Of the 1.09 between the two, seven layers of 0.0735 are 0.514 each way, eight 0.588.
    prefill = worker(
        "prefill", live_blocks=64, cached_blocks=832, prefill_tokens_per_s=329.07, prefilled_tokens_per_s=329.07,
        pending_prefill_tokens=14336, prefill_step_tokens=512,
    )  # fmt: skip
    decode = worker("decode", live_blocks=65, cached_blocks=768, decode_tokens_per_s=4.3258, running=1)
    made = planned(BUSY_MACHINE, prefill, decode)
    assert made.moves == (LayerMove("prefill", 23, 7, "prefill", "decode"),)
    assert chosen(made).before["prefill"].compute == pytest.approx(2.204, abs=2e-3)
    assert chosen(made).before["decode"].compute == pytest.approx(1.115, abs=2e-3)


def test_one_request_after_another() -> None:
    # A warm-up: 0.68 requests/s, each of them 0.72 s of prompt and 15 x 48 ms. 696 x 0.7 ms = 0.487, and 10.2 tokens/s
    # x (23.45 + 1.1) ms = 0.250. Nobody is short.
    prefill = worker("prefill", prefill_tokens_per_s=696, prefilled_tokens_per_s=696, prefill_step_tokens=512)
    decode = worker("decode", live_blocks=65, decode_tokens_per_s=10.2, running=1)
    assert planned(QUIET, prefill, decode).verdicts == ()


def test_a_single_answer_keeps_its_layers() -> None:
    # A loop that never rests: 1,000 / 48 tokens/s x 24.55 ms = 0.511. The other worker has nothing to do at all.
    decode = worker("decode", live_blocks=65, decode_tokens_per_s=20.8, running=1)
    assert planned(QUIET, worker("prefill"), decode).verdicts == ()


def test_answers_beside_short_prompts() -> None:
    # 48 answers in a step of 28 + 55.2 = 83.2 ms: 578 tokens/s, 64 in a full step: 1.5875 ms, 0.918. Prompts 0.050.
    # In two groups a token takes 2 x 28 / 64 + 1.15 = 2.025 ms, 1.170 in all, 0.039 a layer. Fourteen layers leave
    # 0.624 and 0.596, fifteen 0.585 and 0.635.
    # Groups of 24 take 55.6 ms: twice 16 / 30 of it is 59.3 ms from token to token.
    made = planned(QUIET_MANY_ROWS, FEW_PROMPTS, MANY_ANSWERS)
    assert made.moves == (LayerMove("decode", 16, 14, "decode", "prefill"),)
    predicted = chosen(made)
    assert predicted.before["decode"].compute == pytest.approx(0.918, abs=1e-3)
    assert predicted.after["decode"].compute == pytest.approx(0.624, abs=1e-3)
    assert predicted.after["prefill"].compute == pytest.approx(0.596, abs=1e-3)
    assert predicted.itl_before_s["decode"] == pytest.approx(0.0832, abs=1e-4)
    assert predicted.itl_after_s["decode"] == pytest.approx(0.0593, abs=1e-4)


AWAY_FROM_PREFILL = HOME["prefill"].with_layers_moved(23, 7, "decode")
AWAY_FROM_DECODE = HOME["decode"].with_layers_moved(16, 14, "prefill")


@pytest.mark.parametrize(
    ("measured", "prefill", "decode", "away", "move"),
    [
        # Prompts become few: their layers would make 0.050 of the prefill worker.
        (
            QUIET_MANY_ROWS,
            FEW_PROMPTS,
            MANY_ANSWERS,
            AWAY_FROM_PREFILL,
            LayerMove("prefill", 23, 7, "decode", "prefill"),
        ),
        # Prompts become many: layers of answers that wait for their chunks go home before any others leave.
        (QUIET, PROMPTS, THEIR_ANSWERS, AWAY_FROM_DECODE, LayerMove("decode", 16, 14, "prefill", "decode")),
        # All traffic becomes little.
        (QUIET, FEW_PROMPTS, worker("decode"), AWAY_FROM_PREFILL, LayerMove("prefill", 23, 7, "decode", "prefill")),
    ],
)
def test_when_the_load_swings_what_is_away_comes_home_first(
    measured: MeasuredTimes, prefill: WorkerFigures, decode: WorkerFigures, away: Placement, move: Move
) -> None:
    assert planned(measured, prefill, decode, away).moves == (move,)


def test_once_balanced_nothing_more_moves() -> None:
    # As in the first case, seven layers later: 1.3 times the prompts and the answers, which share steps of 1.9 rows.
    prompts = worker(
        "prefill", live_blocks=130, cached_blocks=600, prefill_tokens_per_s=1840, prefilled_tokens_per_s=1840,
        pending_prefill_tokens=13 * 1024, prefill_step_tokens=512,
    )  # fmt: skip
    answers = worker("decode", live_blocks=130, cached_blocks=600, decode_tokens_per_s=27, running=1.9)
    assert planned(times(0.7, 46.9, 1.1, 1.9), prompts, answers, AWAY_FROM_PREFILL).moves == ()
