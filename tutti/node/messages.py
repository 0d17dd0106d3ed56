"""The protocol between agent and clients: messages, their encoding and their frames.

A frame is the length of its body (u32, little-endian) and the body: one message in MessagePack, an
array that begins with the message's name.  Arrays of numbers travel as bytes, little-endian.  The
schema has a version; the agent's first answer refuses a client of another version.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import numpy as np

from tutti import errors
from tutti.base.arrays import U32, U64, Keys, Rows
from tutti.errors import AgentRefused, ConfigError, TuttiError, Unsupported
from tutti.medium.keys import KEY_NBYTES

try:
    import msgspec
except ImportError as _missing:
    raise Unsupported(
        "the agent and its clients need the package msgspec: pip install msgspec"
    ) from _missing

VERSION = 5
FRAME_NBYTES_MAX = 1 << 20
HEADER = struct.Struct("<I")
#: Most descriptors of members' files in one answer (SCM_MAX_FD of Linux is 253).
FILES_MAX = 250
#: Most keys, or descriptions of objects, in one request or answer, so that it fits into a message.
LISTED_MAX = 32768
DESCRIBED_MAX = 2048


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of requests and answers."""


class Hello(Message, tag="hello"):
    """Opens a session.  layout: the pool's, as JSON; empty for the agent's only pool.

    capacity: bytes of the pool that the agent makes if it has none of this layout.
    pool: instead of the layout, the start of the pool's name; see Pools.
    """

    version: int
    layout: str = ""
    capacity: int = 0
    pool: str = ""


class Pools(Message, tag="pools"):
    """Asks for the names of the agent's pools, open or not, without opening a session."""


class AskSpeeds(Message, tag="speeds"):
    """Asks for the speeds of the media (fields of at_open.Speeds), without opening a session."""


class Join(Message, tag="join"):
    """Adds a connection to a session."""

    session: bytes


class Match(Message, tag="match"):
    """See ObjectStore.match; pin: "" for none, "*" for a pin without a name."""

    keys: bytes
    pin: str = ""
    proven: bool = False


class Present(Message, tag="present"):
    """See ObjectStore.present."""

    keys: bytes
    pin: str = ""
    proven: bool = False


class Unpin(Message, tag="unpin"):
    """See ObjectStore.unpin; without a name, the pins of all look-ups of the sender's session."""

    name: str = ""


class PlanPut(Message, tag="put"):
    """Asks for slots for a chain of keys; see PutRequest.chain."""

    keys: bytes
    parent: bytes = b""
    depth: int = 0
    tenant: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] = 0
    expiry_64s: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = 0


class PlanLoad(Message, tag="load"):
    """Asks where objects are; see ObjectStore.load."""

    keys: bytes


class Moved(Message, tag="moved"):
    """Reports the end of a job.  status: u32 per page of the job, or empty if all succeeded.

    digests: of a put, u64 (pages, layers).  Only the end of a put is answered, by Written.
    """

    job: int
    status: bytes = b""
    digests: bytes = b""


class Call(Message, tag="call"):
    """Any other operation of a store, by its name and arguments."""

    name: str
    arguments: dict[str, Any] = {}


class Welcome(Message, tag="welcome"):
    """A session is open.  Descriptors of the members' files come with this answer (SCM_RIGHTS).

    geometry: layers, segments, lba_nbytes, group_slots, groups.  nsids: per member of the pool,
    the 1-based number of its file, or 0 if the member is missing or lost.  batch_pages: most keys
    of one PlanPut or PlanLoad.
    """

    version: int
    session: bytes
    layout: str
    geometry: list[Any]
    files: list[str]
    nsids: list[int]
    verify: str
    durability: str
    timeout_s: float
    batch_pages: int


class MoveJob(Message, tag="job"):
    """Pages to move.  slots: i64 per page.  pages: u32 numbers in the plan; empty for all.

    digests: u64 (pages, layers), to compare with if ``compare``.  whole: no layer is ready before
    all layers have been compared.
    """

    job: int
    slots: bytes
    rows: bytes = b""
    digests: bytes = b""
    compare: bool = False
    whole: bool = False


class Plan(Message, tag="plan"):
    """Answers PlanPut and PlanLoad.

    number: identifies a put; Written repeats it.  outcome: of a put, u8 per key; final if there
    are no jobs.
    status: u32 per key, for keys that no job moves; empty when all are 0.
    """

    number: int
    jobs: list[MoveJob]
    outcome: bytes = b""
    status: bytes = b""


class Written(Message, tag="written"):
    """A put has ended.  outcome: u8 per key.  status: u32 per key, or empty when all are 0."""

    number: int
    outcome: bytes
    status: bytes = b""


class Answer(Message, tag="answer"):
    """The result of a request whose answer has no message type of its own."""

    value: Any = None


class Failure(Message, tag="failure"):
    """A request failed: the name of a class in tutti.errors, and its message."""

    kind: str
    message: str


Greeting = Hello | Pools | AskSpeeds | Join
Request = Greeting | Match | Present | Unpin | PlanPut | PlanLoad | Moved | Call
Reply = Welcome | Plan | Written | Answer | Failure

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def frame(message: Message) -> bytes:
    """The bytes of a message with its length.

    Raises ConfigError above FRAME_NBYTES_MAX, and for a number of more than 64 bits.
    """
    try:
        body: bytes = _encoder.encode(message)
    except OverflowError as error:
        raise ConfigError(f"a number does not fit into 64 bits: {error}") from error
    if len(body) > FRAME_NBYTES_MAX:
        raise ConfigError(
            f"the message has {len(body)} bytes, the limit is {FRAME_NBYTES_MAX}; use smaller"
            " batches"
        )
    return HEADER.pack(len(body)) + body


def body_nbytes(header: bytes | bytearray | memoryview) -> int:
    """The length of a body, from the header that ``header`` begins with.  Raises AgentRefused for
    lengths that are never sent.
    """
    nbytes: int = HEADER.unpack_from(header)[0]
    if not 0 < nbytes <= FRAME_NBYTES_MAX:
        raise AgentRefused(
            f"a message of {nbytes} bytes, at most {FRAME_NBYTES_MAX} are accepted; this is not a"
            " client of tutti, or its connection lost bytes"
        )
    return nbytes


def read_request(body: bytes | bytearray | memoryview) -> Any:
    """A request from its bytes.  Raises AgentRefused for anything else."""
    return _read(_requests, body)


def read_reply(body: bytes | bytearray | memoryview) -> Any:
    """An answer from its bytes.  Raises AgentRefused for anything else."""
    return _read(_replies, body)


def _read(decoder: Any, body: bytes | bytearray | memoryview) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AgentRefused(
            f"a message cannot be read ({error}); use the same version of tutti on both sides"
        ) from error


def keys_of(raw: bytes) -> Keys:
    """Keys (n, 16) from their bytes.  Raises ConfigError for a part of a key."""
    if len(raw) % KEY_NBYTES:
        raise ConfigError(f"{len(raw)} bytes are not whole keys of {KEY_NBYTES}")
    # A copy that can be written: native code gets its address in a third of the time.
    return np.frombuffer(bytearray(raw), np.uint8).reshape(-1, KEY_NBYTES)


def rows_of(job: MoveJob, pages: int) -> Rows:
    """Which of the ``pages`` of its plan a job moves, (n,).  Raises AgentRefused if the job does
    not have n slots, and for pages that the plan does not have.
    """
    n, rest = divmod(len(job.slots), 8)
    if not rest and len(job.rows) in (0, 4 * n):
        rows = np.frombuffer(job.rows, "<u4").astype(np.int64) if job.rows else np.arange(n)
        if not n or rows.max() < pages:
            return rows
    raise AgentRefused(
        f"a plan for {pages} pages has {len(job.slots)} bytes of slots and {len(job.rows)} of"
        " pages that do not fit; use the same version of tutti on both sides"
    )


def digests_of(job: MoveJob, pages: int, layers: int) -> U64:
    """The digests (pages, layers) that a job compares with.  Raises AgentRefused."""
    if len(job.digests) != 8 * pages * layers:
        raise AgentRefused(
            f"a plan has {len(job.digests)} bytes of digests for {pages} pages of {layers} layers;"
            " use the same version of tutti on both sides"
        )
    return np.frombuffer(job.digests, "<u8").reshape(pages, layers).copy()


def statuses_of(raw: bytes, n: int) -> U32:
    """Statuses (n,) from their bytes; empty bytes are success.  Raises ConfigError."""
    if not raw:
        return np.zeros(n, np.uint32)
    if len(raw) != 4 * n:
        raise ConfigError(f"{len(raw)} bytes of status for {n} pages")
    return np.frombuffer(raw, "<u4").astype(np.uint32)


def packed_status(status: U32) -> bytes:
    """Statuses (n,) as bytes for ``statuses_of``."""
    return status.astype("<u4").tobytes() if status.any() else b""


def failure_of(error: BaseException) -> Failure:
    """An error as an answer; one that is not a TuttiError is reported as a defect."""
    if isinstance(error, TuttiError):
        return Failure(type(error).__name__, str(error))
    what = f"{type(error).__name__}: {error}"
    return Failure("AgentRefused", f"the agent failed ({what}); its log has the traceback")


def error_of(failure: Failure) -> TuttiError:
    """The error that an answer describes."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, TuttiError):
        try:
            return kind(failure.message)
        except TypeError:  # its constructor needs more than a message
            pass
    return AgentRefused(failure.message)
