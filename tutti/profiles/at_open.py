"""Finds the profile by which a pool is scheduled, so that users need not make one.

    schedule = find_schedule("auto", ["/mnt/nvme/pool.tutti"], layout)

"auto" takes the speed of the medium from the cache, or measures it in at most two seconds, or
estimates it; computing is estimated.  Devices are measured where their pool stores nothing, before
it is opened.  A file's profile is used when it is of this machine and model.  None and "off" mean
no schedule: puts and loads are issued at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tutti.base.units import KiB, MiB
from tutti.errors import ConfigError, ProfileError, TuttiError
from tutti.gio_uring.drives.generic_device import readable_path
from tutti.machine import machine_facts
from tutti.medium.layout import KVLayout
from tutti.pool import places
from tutti.pool.places import existing_folder, exists, is_device
from tutti.profiles.cache import CachedSpeeds
from tutti.profiles.medium_timing import Medium
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.loads_and_writes import Profile
from tutti.scheduler.policy import UNBOUNDED, Limits
from tutti.scheduler.profile import MACHINE_KEYS, TableProfile, estimated_document, load_profile
from tutti.scheduler.roofline import DENSE_MODELS, GPUS, ModelShape

AUTO, OFF = "auto", "off"
#: Where a profile came from, as `stats` and the metrics name it.
FILE, CACHE, MEASURED, ESTIMATED = "file", "cache", "measured", "estimated"
#: Values of the gauge in the metrics: 0 without a scheduler, 1 by an estimate, 2 by measurements.
SCHEDULING = {OFF: 0, ESTIMATED: 1, FILE: 2, CACHE: 2, MEASURED: 2}

#: The longest measurement, from the first byte of its file to the removal.
BUDGET_S = 2.0
_WRITTEN_S = 0.8  # from the start until the file must be written
_ROUNDS_S = 1.0  # from the start until the last round may begin
_FILE_NBYTES = 32 * MiB
_SIZES = (256 * KiB, 1 * MiB, 4 * MiB)
_SLICE_NBYTES = 256 * KiB
_ROOM = 4  # times the size of the file must be free
#: When the writes that wait take this long, they no longer wait for slack.
_PRESSING_US = 2_000_000.0
#: A write that waited longer goes without slack.
_WRITE_PATIENCE_US = 5_000_000.0

ProfileChoice = str | os.PathLike[str] | None

_log = logging.getLogger(__name__)


class _TooSlow(Exception):
    """The medium is too slow, or too full, to be measured."""


class Speeds(NamedTuple):
    """Speeds of media, for a process that cannot measure them, or an open pool of devices.

    io: as in a profile's document.  source: where they come from, see CACHE.  media: names of the
    drives.  facts: machine_facts of the first of them.
    """

    io: Mapping[str, Any]
    source: str
    media: Sequence[str]
    facts: Mapping[str, Any]


class OwnSpeeds(Speeds):
    """Speeds that this process has found, and logged."""


def find_speeds(members: Sequence[str], *, executor: str = "auto") -> OwnSpeeds:
    """Speeds of the media that have these members or folders, found as for `find_profile`."""
    folders, media = media_of(members)
    model = DENSE_MODELS["llama-3.1-8b"]  # any: only the speeds of the media are used
    profile, source = find_profile(AUTO, folders, model, executor=executor)
    machine = profile.document["machine"]
    facts = {name: machine[name] for name in ("filesystem", "disk") if name in machine}
    return OwnSpeeds(profile.document["io"], source, media, facts)


def before_opening(
    choice: ProfileChoice, members: Sequence[str], *, executor: str = "auto"
) -> Sequence[str] | Speeds:
    """What `find_schedule` takes after the opening: speeds of devices, if it will need them, which
    cannot be measured once their pool is open.  Raises ProfileError.
    """
    if choice is None or is_off(choice) or not any(map(is_device, members)):
        return members
    if choice != AUTO:
        given, media = load_profile(choice), media_of(members)[0]
        machine = machine_facts(media[0] if media else None)
        if not given.mismatches(machine, _model_of(given, None)):
            return members
    return find_speeds(members, executor=executor)


def is_off(choice: ProfileChoice) -> bool:
    """Whether a choice of profile means none.  Raises ConfigError for what is not a choice."""
    if choice is not None and not isinstance(choice, str | os.PathLike):
        raise ConfigError(
            f'profile is {choice!r}; pass "auto", the path of a file that `tutti profile` wrote, or'
            " None for no scheduling"
        )
    return choice is None or choice == OFF


def check_choice(choice: ProfileChoice) -> None:
    """Raises early what `find_schedule` would: ConfigError or ProfileError."""
    if choice is not None and not is_off(choice) and choice != AUTO:
        load_profile(choice)


def find_profile(
    choice: str | os.PathLike[str],
    media: Sequence[Path] | Speeds,
    model: ModelShape,
    *,
    executor: str = "auto",
    any_model: bool = False,
) -> tuple[TableProfile, str]:
    """The profile and its source; logs one line about it.

    media: as from `media_of`, or the speeds that were found before.
    any_model: a file's profile may be of another model.
    Raises ProfileError for a file that is not a profile.
    """
    if isinstance(media, Speeds):
        machine: Mapping[str, Any] = {**machine_facts(), **media.facts}
    else:
        machine = machine_facts(media[0] if media else None)
    if choice != AUTO:
        given = load_profile(choice)
        reasons = given.mismatches(machine, _model_of(given, None if any_model else model))
        if not reasons:
            _log.info("scheduling with the profile %s", choice)
            return given, FILE
        for reason in reasons:
            _log.warning("the profile %s is not used: %s", choice, reason)
        found, source = _find(media, model, machine, executor)
        return TableProfile(found.document, tuple(reasons)), source
    return _find(media, model, machine, executor)


def find_schedule(
    choice: ProfileChoice,
    members: Sequence[str] | Speeds,
    layout: KVLayout,
    *,
    executor: str = "auto",
) -> Schedule | None:
    """The schedule for a store of this layout; None if it issues its transfers at once.

    members: their paths, or the speeds that were found before.
    """
    if choice is None or is_off(choice):
        return None
    found: Sequence[Path] | Speeds
    if isinstance(members, Speeds):
        found, media = members, tuple(members.media)
    else:
        found, media = media_of(members)
    profile, source = find_profile(
        choice, found, model_of(layout), executor=executor, any_model=True
    )
    limits = store_limits(profile, layout.object_nbytes)
    return Schedule(profile, limits, source=source, media=media)


def media_of(members: Sequence[str]) -> tuple[list[Path], tuple[str, ...]]:
    """Where the media of these members can be measured, and their Schedule.media.

    A folder on each medium of files, or all devices; nowhere if there are both, or one is missing.
    """
    media = tuple(sorted({name for member in members for name in places.media_of(member)}))
    if any(map(is_device, members)):
        usable = all(is_device(one) and exists(readable_path(one)) for one in members)
        return [Path(member) for member in members if usable], media
    folders: dict[int, Path] = {}
    for member in members:
        folder = existing_folder(member)
        folders.setdefault(os.stat(folder).st_dev, folder)
    return list(folders.values()), media


def store_limits(profile: Profile, page_nbytes: int) -> Limits:
    """Limits of an embedded store: its callers keep the pages, so no put is dropped to free them.

    A caller may wait for each put before the next, so that the backlog never presses; therefore
    writes wait less long for slack than by default.
    """
    pressing = max(64, int(_PRESSING_US / max(1.0, profile.write_us(page_nbytes))))
    return Limits(
        locked_pages=UNBOUNDED,
        staged_pages=0,
        pressing_pages=pressing,
        write_patience_us=_WRITE_PATIENCE_US,
    )


def model_of(layout: KVLayout) -> ModelShape:
    """The shape of a layout's model, estimated where the model is not known."""
    known = DENSE_MODELS.get(layout.model or "")
    if known is not None:
        return known
    nbytes = max(1, layout.object_nbytes * layout.world // layout.page_size)
    return model_like(layout.model or "unnamed", layout.model_layers, nbytes)


def model_like(name: str, layers: int, kv_nbytes_per_token: int) -> ModelShape:
    """The shape of an unknown model: that of Llama-3.1-8B, scaled by the number of layers."""
    like = DENSE_MODELS["llama-3.1-8b"]
    scale = layers / like.layers
    return ModelShape(
        name,
        layers,
        like.parameters * scale,
        like.attention_width,
        kv_nbytes_per_token,
        like.weight_nbytes * scale,
    )


def _model_of(profile: TableProfile, served: ModelShape | None) -> ModelShape:
    """The profile's own model where its KV has the served shape; its name does not matter."""
    try:
        model = ModelShape(**profile.document["model"])
    except (ConfigError, KeyError, TypeError) as error:
        raise ProfileError(
            f"the profile does not name its model ({error}); run `tutti profile` again"
        ) from error
    if served is None:
        return model
    layers, nbytes = served.layers, served.kv_nbytes_per_token
    if (model.layers, model.kv_nbytes_per_token) == (layers, nbytes):
        return model
    return replace(model, name="the served model", layers=layers, kv_nbytes_per_token=nbytes)


def _find(
    media: Sequence[Path] | Speeds, model: ModelShape, machine: Mapping[str, Any], executor: str
) -> tuple[TableProfile, str]:
    document = estimated_document(model, GPUS["H100"], machine=machine)
    if isinstance(media, Speeds):
        return _told(media, document)
    estimated = TableProfile(document)
    why = "a pool with files and devices, or a missing device, is not measured; give a profile"
    if media:
        known = [machine_facts(one) for one in media]
        facts: dict[str, Any] = {key: [one.get(key) for one in known] for key in MACHINE_KEYS}
        facts["executor"] = executor
        cached = CachedSpeeds(facts)
        if (found := _cached(cached, document)) is None:
            with cached.alone(2 * BUDGET_S):
                if (found := _cached(cached, document)) is None:
                    try:
                        found = _measured(document, media, executor), MEASURED
                        cached.write(found[0].document["io"])
                    except (_TooSlow, TuttiError, OSError) as error:
                        why = str(error)
        if found is not None:
            profile, source = found
            _tell("from the cache" if source == CACHE else source, profile)
            return profile, source
    _log.warning("scheduling with an estimated profile: %s", why)
    return estimated, ESTIMATED


def _told(speeds: Speeds, document: Mapping[str, Any]) -> tuple[TableProfile, str]:
    """The profile with the speeds that were found before.  Raises ProfileError."""
    try:
        profile = TableProfile({**document, "medium": {}, "io": speeds.io})
    except (LookupError, TypeError) as error:
        raise ProfileError(f"the agent's speeds of the medium cannot be used: {error!r}") from error
    if not isinstance(speeds, OwnSpeeds):
        _tell(f"the agent's, {speeds.source}", profile)
    return profile, speeds.source


def _tell(medium: str, profile: TableProfile) -> None:
    _log.info(
        "scheduling with a profile: the medium is %s (%.2f GB/s read, interference %.1f), computing"
        " is estimated",
        *(medium, profile.read_gb_per_s, profile.interference),
    )


def _cached(cached: CachedSpeeds, document: Mapping[str, Any]) -> tuple[TableProfile, str] | None:
    io = cached.read()
    if io is None:
        return None
    try:
        return TableProfile({**document, "medium": {}, "io": io}), CACHE
    except (ProfileError, LookupError, TypeError) as error:
        cached.refused(error)
        return None


def _measured(document: Mapping[str, Any], media: Sequence[Path], executor: str) -> TableProfile:
    began_s = time.monotonic()
    has_files = all(one.is_dir() for one in media)
    for folder in media if has_files else ():
        stat = os.statvfs(folder)
        if stat.f_bavail * stat.f_frsize < _ROOM * _FILE_NBYTES:
            raise _TooSlow("the medium has no room for a measurement; free some space")

    def wrote(done: int, total: int) -> None:
        nonlocal began_s
        if done == 0:  # a device is open now, which took a time of its own
            began_s = time.monotonic()
        elif time.monotonic() > began_s + _WRITTEN_S and done < total:
            raise _TooSlow("the medium is too slow to be measured at a start; run `tutti profile`")

    paths = [str(one / f".tutti-profile-{os.getpid()}" if has_files else one) for one in media]
    force: Sequence[str] | None = () if has_files else None
    timeout_s = BUDGET_S if has_files else 30.0  # a stalled device cannot be opened either
    with Medium(
        paths, _FILE_NBYTES, _SIZES[-1], force, executor=executor, timeout_s=timeout_s, wrote=wrote
    ) as medium:
        times = _times(medium, began_s)
    io: dict[str, Any] = {"estimated": False, "read": [], "write": [], "both": []}
    for (direction, nbytes), runs in times.items():
        middle = [median(one) for one in zip(*runs, strict=True)]
        io[direction].append([nbytes, _SLICE_NBYTES, *middle])
    return TableProfile({**document, "medium": medium.facts, "io": io})


def _times(medium: Medium, began_s: float) -> dict[tuple[str, int], list[list[float]]]:
    """Microseconds of transfers by (direction, size), at least one of each.

    No transfer begins that would end too late if it took as long per byte as the one before.
    """
    times: dict[tuple[str, int], list[list[float]]] = {}
    transfers = [(direction, size) for direction in ("read", "write", "both") for size in _SIZES]
    us_per_byte = max(medium.time_us("read", _SIZES[0], _SLICE_NBYTES)) / _SIZES[0]  # warm-up
    while not times or time.monotonic() < began_s + _ROUNDS_S:
        for direction, nbytes in transfers:
            if time.monotonic() + us_per_byte * nbytes / 1e6 > began_s + BUDGET_S * 0.9:
                if len(times) < len(transfers):
                    raise _TooSlow("the medium is too slow to be measured at a start")
                return times
            took_us = medium.time_us(direction, nbytes, _SLICE_NBYTES)
            times.setdefault((direction, nbytes), []).append(took_us)
            us_per_byte = max(took_us) / nbytes
    return times
