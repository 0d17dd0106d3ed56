"""Protocol between agent and clients: messages, their encoding, and their frames.

A frame is the length of its body (u32, little-endian) and the body: one message in MessagePack, an
array that begins with the message's name.  Arrays of numbers travel as bytes, little-endian.  The
schema has a version; a client of another version is refused by the first answer.
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
#: Members' files that one answer can carry (SCM_MAX_FD of Linux is 253).
FILES_MAX = 250
#: Most keys of one request or answer, and most objects described in one; both fit into a message.
LISTED_MAX = 32768
DESCRIBED_MAX = 2048


class Message(msgspec.Struct, array_like=True, tag=True):
    """One request or one answer."""


class Hello(Message, tag="hello"):
    """Opens a session: which pool, as the JSON of its layout; empty when the agent has one.

    capacity: bytes of a pool that the agent is to make when it has none of this layout.
    pool: instead of the layout, how the pool's name begins; see Pools.
    """

    version: int
    layout: str = ""
    capacity: int = 0
    pool: str = ""


class Pools(Message, tag="pools"):
    """Asks, instead of opening a session, for the names of the agent's pools, open or not."""


class AskSpeeds(Message, tag="speeds"):
    """Asks, instead of opening a session, for the speeds of the media: a list as at_open.Speeds."""


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
    """A job ended.  status: u32 for each of its pages, empty for success.

    digests: of a put, u64 for each page and layer.  Answered by Written for a put only.
    """

    job: int
    status: bytes = b""
    digests: bytes = b""


class Call(Message, tag="call"):
    """Any other operation of a store, by name with its arguments."""

    name: str
    arguments: dict[str, Any] = {}


class Welcome(Message, tag="welcome"):
    """A session is open; the files of the pool's members come with this answer.

    geometry: layers, segments, lba_nbytes, group_slots, groups.  nsids: of each member of the pool,
    the number of its file from 1 on, 0 for one that is missing.  batch_pages: most keys of one
    PlanPut or PlanLoad.
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
    """Pages to move: a slot (i64) for each, and which of the plan they are (u32; empty for all).

    digests: u64 for each page and layer, to be compared when ``compare``.  whole: no layer counts
    before all have been compared.
    """

    job: int
    slots: bytes
    rows: bytes = b""
    digests: bytes = b""
    compare: bool = False
    whole: bool = False


class Plan(Message, tag="plan"):
    """Answers PlanPut and PlanLoad.

    number: of a put, as Written repeats it.  outcome: of a put, u8 for each key, or empty: final
    if it has no job.
    status: u32 for each key, empty when all are 0: of keys that need not be moved any more.
    """

    number: int
    jobs: list[MoveJob]
    outcome: bytes = b""
    status: bytes = b""


class Written(Message, tag="written"):
    """A put is over: the outcome (u8) and status (u32, or empty) of each key."""

    number: int
    outcome: bytes
    status: bytes = b""


class Answer(Message, tag="answer"):
    """The result of a request that has no answer of its own."""

    value: Any = None


class Failure(Message, tag="failure"):
    """A request failed: the name of a class of tutti.errors, and what to tell the caller."""

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
        raise ConfigError(f"the agent takes no number of more than 64 bits: {error}") from error
    if len(body) > FRAME_NBYTES_MAX:
        raise ConfigError(
            f"a message of {len(body)} bytes, at most {FRAME_NBYTES_MAX} are sent; ask for less"
            " at a time"
        )
    return HEADER.pack(len(body)) + body


def body_nbytes(header: bytes | bytearray | memoryview) -> int:
    """The length of a body from its header, which may have more behind it.  Raises AgentRefused
    for one that is never sent.
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
    """Which of the ``pages`` of its plan a job moves, (n,).  Raises AgentRefused for another n of
    slots, and for pages that the plan does not have.
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
    """What statuses_of reads."""
    return status.astype("<u4").tobytes() if status.any() else b""


def failure_of(error: BaseException) -> Failure:
    """An error as an answer; what is not from this project is called a defect."""
    if isinstance(error, TuttiError):
        return Failure(type(error).__name__, str(error))
    return Failure("AgentRefused", f"the agent failed ({type(error).__name__}: {error})")


def error_of(failure: Failure) -> TuttiError:
    """The error that an answer describes."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, TuttiError):
        try:
            return kind(failure.message)
        except TypeError:  # it takes more than a message
            pass
    return AgentRefused(failure.message)
