"""A worker that hosts parts of others' instances: answers what their homes ask, in its engine's thread. For heads
it has another one (`head_service`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from actors.engine.engine import Engine
from actors.engine.grants import Grant
from actors.engine.hosting import HostedInstance
from actors.engine.module_transfer import read_chunk, read_weights, write_chunk, write_weights
from actors.engine.room import GrantRefusedError
from actors.engine.stage_work import decode_work, encode_done
from actors.engine_thread import EngineStoppedError, EngineThread
from actors.moves.head_service import HeadService
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
        self._heads = HeadService(thread.grants)
        self._work: dict[Kind, Callable[[Engine, Question], Reply]] = {
            Kind.STAGE: _run_stage,
            Kind.OFFER: _offer,
            Kind.GRANT: _grant,
            Kind.WRITE_WEIGHTS: _write_weights,
            Kind.WRITE_PAGES: _write_pages,
            Kind.USE_VERSION: _use_version,
            Kind.RELEASE: _release,
            Kind.READ_WEIGHTS: _read_weights,
            Kind.READ_PAGES: _read_pages,
            Kind.MOVE_BLOCKS: _move_blocks,
            Kind.DIRTY_POINT: _dirty_point,
            Kind.DIRTY_SINCE: _dirty_since,
        }

    def serve(self, question: Question) -> None:
        """Does not wait. See `LinkCalls`."""
        if question.message.kind == Kind.HEADS:
            self._heads.serve(question)
            return
        try:
            work = self._work[Kind(question.message.kind)]
        except ValueError:
            question.refuse(f"this worker knows no question of the kind {question.message.kind}")
            return

        def done(future: Future[Reply]) -> None:
            error = future.exception()
            if error is None:
                question.answer(*future.result())
                return
            if not isinstance(error, _REFUSALS):
                logger.error("a question of worker %s failed", question.peer, exc_info=error)
            question.refuse(f"{type(error).__name__}: {error}")

        # Maybe after what the home asks for later: it changes nothing that its steps need before they have come back.
        is_stage = question.message.kind == Kind.STAGE
        call = self._thread.call_hosted if is_stage else self._thread.call
        call(lambda engine: work(engine, question)).add_done_callback(done)

    def close(self) -> None:
        """Ends its thread; questions for heads are not answered any more."""
        self._heads.close()


def _hosted(engine: Engine, question: Question) -> HostedInstance:
    hosted = engine.grants.instances.get(question.peer)
    if hosted is None:
        raise QuestionError(f"nothing of instance {question.peer!r} is hosted here")
    return hosted


def _check_version(hosted: HostedInstance, question: Question) -> None:
    version = question.message.version
    if hosted.version is None or version < hosted.version:
        raise QuestionError(f"the question has placement version {version}; here it is {hosted.version}")


def _run_stage(engine: Engine, question: Question) -> Reply:
    hosted = _hosted(engine, question)
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
    return grant_reply(grant(engine, question)), ()


def grant(engine: Engine, question: Question) -> Grant:
    """What a GRANT asks for. Raises GrantRefusedError, with nothing changed."""
    wanted = Fields(question.message.meta).grant()
    return engine.grant(question.peer, wanted.lanes, wanted.layers, wanted.num_blocks, wanted.fingerprint)


def _offer(engine: Engine, question: Question) -> Reply:
    return offer_reply(engine, question), ()


def offer_reply(engine: Engine, question: Question) -> bytes:
    """The answer to an OFFER. Raises GrantRefusedError."""
    fields = Fields(question.message.meta)
    lanes, layers, fingerprint = fields.lanes(), fields.numbers("layers"), fields.hex("fingerprint")
    return encode(num_blocks=engine.grants.offer(question.peer, lanes, layers, fields.wanted(), fingerprint))


def grant_reply(granted: Grant) -> bytes:
    """The answer to a GRANT."""
    return encode(layers=granted.layers_to_copy, num_blocks=granted.num_blocks)


def _write_weights(engine: Engine, question: Question) -> Reply:
    fields = Fields(question.message.meta)
    _hosted(engine, question)
    (data,) = _tensors(question, 1)
    write_weights(engine.loaded.layer_memory, fields.number("layer"), data, fields.hex("checksum"))
    return b"", ()


def _write_pages(engine: Engine, question: Question) -> Reply:
    hosted, chunk = _hosted(engine, question), Fields(question.message.meta).chunk()
    (data,) = _tensors(question, 1)
    if hosted.version is not None:  # else nothing is served from here yet: it moves here
        _check_version(hosted, question)
    with hosted.lock:
        write_chunk(engine.loaded.arena, hosted.lanes, chunk, data)
        engine.loaded.copies.computed()
        hosted.dirty_blocks.wrote(chunk.blocks)
    return b"", ()


def _use_version(engine: Engine, question: Question) -> Reply:
    _hosted(engine, question).use_version(Fields(question.message.meta).number("version"))
    return b"", ()


def _release(engine: Engine, question: Question) -> Reply:
    fields = Fields(question.message.meta)
    lanes, layers = fields.lanes(), fields.numbers("layers")
    grown = engine.release(question.peer, lanes or None, layers)
    return encode(grown_blocks=grown), ()


def _read_weights(engine: Engine, question: Question) -> Reply:
    _hosted(engine, question)
    data, checksum = read_weights(engine.loaded.layer_memory, Fields(question.message.meta).number("layer"))
    return encode(checksum=checksum.hex()), (data,)


def _read_pages(engine: Engine, question: Question) -> Reply:
    hosted, chunk = _hosted(engine, question), Fields(question.message.meta).chunk()
    _check_version(hosted, question)
    with hosted.lock:
        return b"", (read_chunk(engine.loaded.arena, hosted.lanes, chunk),)


def _move_blocks(engine: Engine, question: Question) -> Reply:
    _hosted(engine, question).move_blocks(Fields(question.message.meta).moves())
    return b"", ()


def _dirty_point(engine: Engine, question: Question) -> Reply:
    hosted = _hosted(engine, question)
    with hosted.lock:
        return encode(point=hosted.dirty_blocks.point()), ()


def _dirty_since(engine: Engine, question: Question) -> Reply:
    hosted, point = _hosted(engine, question), Fields(question.message.meta).number("point")
    with hosted.lock:
        return encode(blocks=hosted.dirty_blocks.since(point)), ()


def _tensors(question: Question, count: int) -> Tensors:
    tensors = question.message.tensors
    if len(tensors) != count:
        raise QuestionError(f"{len(tensors)} tensors came; expected {count}")
    return tensors
