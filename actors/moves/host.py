"""A worker that hosts parts of others' instances: answers what their homes ask.

In its engine's thread is done what changes what lies where. Heads have another one (`head_service`), and so has all
that a move asks for while it copies: each question would wait for a step of the engine's otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from actors.engine.engine import Engine
from actors.engine.grants import Grant, Grants
from actors.engine.hosting import HostedInstance
from actors.engine.room import GrantRefusedError
from actors.engine.stage_work import decode_work, encode_done
from actors.engine_thread import EngineStoppedError, EngineThread
from actors.moves.head_service import head_service
from actors.moves.question_thread import QuestionThread
from actors.moves.questions import Fields, Kind, QuestionError, encode
from migrate.links.calls import Question, Tensors

Reply = tuple[bytes, Tensors]

logger = logging.getLogger("ray.serve")

_REFUSALS = (GrantRefusedError, EngineStoppedError, ValueError, KeyError)
"""What is wrong with a question, and not with this worker. Messages and transfers that are none are ValueErrors."""


class MoveHost:
    """Serves questions of other workers. A home is known by the link that it asks over: its worker id is its
    instance's, so that nobody reaches another's part."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._heads = head_service(thread.grants)
        self._copying = QuestionThread("hosted copies", self._copy)
        self._copies: dict[Kind, Callable[[Grants, Question], Reply]] = {
            Kind.WRITE_WEIGHTS: _write_weights,
            Kind.WRITE_PAGES: _write_pages,
            Kind.READ_WEIGHTS: _read_weights,
            Kind.READ_PAGES: _read_pages,
            Kind.USE_VERSION: _use_version,
            Kind.MOVE_BLOCKS: _move_blocks,
            Kind.DIRTY_POINT: _dirty_point,
            Kind.DIRTY_SINCE: _dirty_since,
        }
        self._work: dict[Kind, Callable[[Engine, Question], Reply]] = {
            Kind.STAGE: _run_stage,
            Kind.GRANT: _grant,
            Kind.RELEASE: _release,
        }

    def serve(self, question: Question) -> None:
        """Does not wait. See `LinkCalls`."""
        if question.message.kind == Kind.HEADS:
            self._heads.serve(question)
            return
        try:
            kind = Kind(question.message.kind)
        except ValueError:
            question.refuse(f"this worker knows no question of the kind {question.message.kind}")
            return
        if kind in self._copies:
            self._copying.serve(question)
            return
        work = self._work[kind]

        def done(future: Future[Reply]) -> None:
            error = future.exception()
            if error is None:
                question.answer(*future.result())
            else:
                _refuse(question, error)

        # Maybe after what the home asks for later: it changes nothing that its steps need before they have come back.
        call = self._thread.call_hosted if kind is Kind.STAGE else self._thread.call
        call(lambda engine: work(engine, question)).add_done_callback(done)

    def close(self) -> None:
        """Ends its threads; questions for heads and copies are not answered any more."""
        self._heads.close()
        self._copying.close()

    def _copy(self, question: Question) -> None:
        """In the copies' thread, in the order of the questions: one of a move that was given up comes before those of
        the next."""
        try:
            reply = self._copies[Kind(question.message.kind)](self._thread.grants, question)
        except _REFUSALS as error:
            _refuse(question, error)
        else:
            question.answer(*reply)


def _refuse(question: Question, error: BaseException) -> None:
    if not isinstance(error, _REFUSALS):
        logger.error("a question of worker %s failed", question.peer, exc_info=error)
    question.refuse(f"{type(error).__name__}: {error}")


def _hosted(grants: Grants, question: Question) -> HostedInstance:
    hosted = grants.instances.get(question.peer)
    if hosted is None:
        raise QuestionError(f"nothing of instance {question.peer!r} is hosted here")
    return hosted


def _check_version(hosted: HostedInstance, question: Question) -> None:
    version = question.message.version
    if hosted.version is None or version < hosted.version:
        raise QuestionError(f"the question has placement version {version}; here it is {hosted.version}")


def _run_stage(engine: Engine, question: Question) -> Reply:
    hosted = _hosted(engine.grants, question)
    work, counters = decode_work(question.message.meta, question.message.tensors, hosted.limits), engine.counters
    started_s = time.perf_counter()
    done = hosted.run_checked(work)
    stage_s = time.perf_counter() - started_s
    counters.count_hosted(stage_s)
    return encode_done(replace(done, stage_us=round(stage_s * 1e6), host_step_us=round(counters.recent_step_s * 1e6)))


def _grant(engine: Engine, question: Question) -> Reply:
    layout = engine.loaded.layout
    # Room is made by moving own blocks, and lanes elsewhere have to follow before the next step: see `Granting`.
    if len(engine.loaded.lanes.lanes) < layout.num_layers * layout.num_kv_heads:
        raise GrantRefusedError("this worker's own layers or heads lie elsewhere; it takes others' when they are home")
    return grant_reply(*grant(engine, question)), ()


def grant(engine: Engine, question: Question) -> tuple[int, Grant | None]:
    """What a GRANT asks for: how many blocks, and the grant, unless the home has more blocks than that and is to give
    some up first. Raises GrantRefusedError, with nothing changed."""
    asked = Fields(question.message.meta).grant()
    what = question.peer, asked.lanes, asked.layers
    num_blocks = engine.grants.offer(*what, asked.wanted, asked.fingerprint)
    return num_blocks, None if num_blocks < asked.wanted.now else engine.grant(*what, num_blocks, asked.fingerprint)


def grant_reply(num_blocks: int, granted: Grant | None) -> bytes:
    """The answer to a GRANT."""
    layers = () if granted is None else granted.layers_to_copy
    return encode(num_blocks=num_blocks, layers=layers)


def _write_weights(grants: Grants, question: Question) -> Reply:
    hosted, fields = _hosted(grants, question), Fields(question.message.meta)
    (data,) = _tensors(question, 1)
    hosted.write_weights(fields.number("layer"), data, fields.hex("checksum"))
    return b"", ()


def _write_pages(grants: Grants, question: Question) -> Reply:
    hosted, chunk = _hosted(grants, question), Fields(question.message.meta).chunk()
    (data,) = _tensors(question, 1)
    if hosted.version is not None:  # else nothing is served from here yet: it moves here
        _check_version(hosted, question)
    hosted.write_pages(chunk, data)
    return b"", ()


def _use_version(grants: Grants, question: Question) -> Reply:
    hosted, version = _hosted(grants, question), Fields(question.message.meta).number("version")
    with hosted.lock:
        hosted.use_version(version)
    return b"", ()


def _release(engine: Engine, question: Question) -> Reply:
    fields = Fields(question.message.meta)
    lanes, layers = fields.lanes(), fields.numbers("layers")
    # Heads of a layer that was to come may have been here before, and stay: then its weights alone are given back.
    grown = engine.release(question.peer, lanes if lanes or layers else None, layers)
    return encode(grown_blocks=grown), ()


def _read_weights(grants: Grants, question: Question) -> Reply:
    data, checksum = _hosted(grants, question).read_weights(Fields(question.message.meta).number("layer"))
    return encode(checksum=checksum.hex()), (data,)


def _read_pages(grants: Grants, question: Question) -> Reply:
    hosted, chunk = _hosted(grants, question), Fields(question.message.meta).chunk()
    _check_version(hosted, question)
    return b"", (hosted.read_pages(chunk),)


def _move_blocks(grants: Grants, question: Question) -> Reply:
    _hosted(grants, question).move_blocks(Fields(question.message.meta).moves())
    return b"", ()


def _dirty_point(grants: Grants, question: Question) -> Reply:
    hosted = _hosted(grants, question)
    with hosted.lock:
        return encode(point=hosted.dirty_blocks.point()), ()


def _dirty_since(grants: Grants, question: Question) -> Reply:
    hosted, point = _hosted(grants, question), Fields(question.message.meta).number("point")
    with hosted.lock:
        return encode(blocks=hosted.dirty_blocks.since(point)), ()


def _tensors(question: Question, count: int) -> Tensors:
    tensors = question.message.tensors
    if len(tensors) != count:
        raise QuestionError(f"{len(tensors)} tensors came; expected {count}")
    return tensors
