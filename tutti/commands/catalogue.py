"""`tutti ls`, `rm`, `pin`, `export` and `import`: objects of a closed pool, or of an agent's."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from tutti.archive import ImportResult, chains_of, export_objects, import_objects
from tutti.arguments import above_zero, options, positive
from tutti.base.arrays import Keys
from tutti.base.terminal import facts, table
from tutti.base.units import format_nbytes
from tutti.commands.members import existing_members
from tutti.commands.outcome import EXIT_FAILED, EXIT_OK, EXIT_UNUSABLE, CommandResult, NotThere
from tutti.errors import AgentLost, ConfigError, KeySizeError, TuttiError
from tutti.interface import Store
from tutti.medium.keys import KEY_NBYTES, as_keys, chain_keys
from tutti.medium.slot_record import tenant_of
from tutti.node.connect import AGENT, connect, pools
from tutti.store import open as open_pool
from tutti.transfers.catalogue import ObjectInfo

_LISTED, _NAMED_MAX = 50, 8
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_RECOVERY_S = 600.0
ANSWER_S = 30.0  #: a busy agent may take longer than a server waits for a look-up
_EXAMPLE = """\
example: a pool that no process has open, then a pool of an agent (`tutti serve`)
  tutti {name} /mnt/nvme/pool.tutti {more}
  tutti {name} unix:/run/user/1000/tutti.sock {more}
"""


def _add_pool(parser: argparse.ArgumentParser, name: str, more: str) -> None:
    parser.epilog = _EXAMPLE.format(name=name, more=more)
    parser.add_argument(
        "pool",
        metavar="POOL",
        help="file, folder or device of a closed pool, or unix:SOCKET of an agent",
    )
    what = "another file, folder or device of the same pool; repeat it for each"
    options(parser)("--member PATH", [], what, dest="members", action="append")
    add_pool_name(parser)


def add_pool_name(parser: argparse.ArgumentParser) -> None:
    """Adds `--pool`."""
    what = "name of one of the agent's pools, or its first letters; `tutti ls` lists the names"
    options(parser)("--pool NAME", "", what, dest="name")


def _add_keys(parser: argparse.ArgumentParser) -> None:
    key = "32 hexadecimal digits, as `tutti ls` shows; the exit code is 1 if one is not in the pool"
    parser.add_argument("keys", nargs="*", metavar="KEY", help=key)
    option = options(parser)
    option("--namespace NAME", None, "all objects of this namespace")
    option("--tokens FILE", None, "file of token ids: selects the pages of this prompt")
    option("--chain", False, "include all pages that follow in the same chains")


def add_ls(parser: argparse.ArgumentParser) -> None:
    _add_pool(parser, "ls", "--namespace team")
    option = options(parser)
    option("--namespace NAME", None, "show this namespace only")
    option("--limit N", _LISTED, "chains to show, longest first", positive)
    parser.set_defaults(run=ls)


def add_rm(parser: argparse.ArgumentParser) -> None:
    _add_pool(parser, "rm", "00112233445566778899aabbccddeeff --chain")
    _add_keys(parser)
    parser.set_defaults(run=rm)


def add_pin(parser: argparse.ArgumentParser) -> None:
    _add_pool(parser, "pin", "00112233445566778899aabbccddeeff --chain")
    _add_keys(parser)
    option = options(parser)
    option("--undo", False, "unpin them")
    option("--ttl SECONDS", None, "also remove them after this time", above_zero)
    parser.set_defaults(run=pin)


def add_export(parser: argparse.ArgumentParser) -> None:
    _add_pool(parser, "export", "--namespace docs --out docs.tkv")
    _add_keys(parser)
    options(parser)("--out FILE", None, "file to create", required=True)
    parser.set_defaults(run=export)


def add_import(parser: argparse.ArgumentParser) -> None:
    _add_pool(parser, "import", "docs.tkv --namespace docs")
    parser.add_argument("file", metavar="FILE", help="file that `tutti export` wrote")
    options(parser)("--namespace NAME", "", "namespace of the imported objects")
    parser.set_defaults(run=import_)


def ls(args: argparse.Namespace) -> CommandResult:
    """Lists the chains of every pool, by their first pages."""
    return of_each_pool(args, lambda name: _ls(args, name))


def of_each_pool(args: argparse.Namespace, show: Callable[[str], CommandResult]) -> CommandResult:
    """The result of ``show`` for the named pool, or for each of an agent that has several."""
    several = args.pool.startswith(AGENT) and not args.name
    names = pools(args.pool) if several else [args.name]
    if not names:
        text = "the agent has no pools yet; it creates one when a client connects with a layout"
        return CommandResult({"pools": {}}, text)
    if len(names) < 2:
        return show(args.name)
    shown = {name: _shown(show, name) for name in names}
    text = "\n\n".join(f"pool  {name}\n{each.text}" for name, each in shown.items())
    result = {"pools": {name: each.result for name, each in shown.items()}}
    return CommandResult(result, text, max(each.exit_code for each in shown.values()))


def _shown(show: Callable[[str], CommandResult], name: str) -> CommandResult:
    """One of several pools, or why it cannot be opened, so that the others are shown all the same.

    Raises AgentLost, and ConfigError for arguments.
    """
    try:
        return show(name)
    except (AgentLost, ConfigError):
        raise
    except TuttiError as error:
        print(f"tutti: pool {name}: {error}", file=sys.stderr, flush=True)
        found = {"type": type(error).__name__, "message": str(error)}
        return CommandResult({"error": found}, f"error: {error}", EXIT_UNUSABLE)


def _ls(args: argparse.Namespace, name: str) -> CommandResult:
    with _opened(args, name) as store:
        infos = store.catalogue.objects(store.catalogue.keys(args.namespace))
        page_size = store.layout.page_size
        names = {tenant_of(each): each for each in store.stats().get("namespaces", ())}
    if args.namespace is not None:
        names[tenant_of(args.namespace)] = args.namespace
    chains = chains_of(infos)
    chains.sort(key=len, reverse=True)
    shown = chains[: args.limit]
    rows = [_row(chain, page_size, names) for chain in shown]
    headings = ["first page", "last page", "tokens", "size", "age", "loads", "pinned", "expires"]
    if any(row[-1] for row in rows):
        headings.append("namespace")
    rows = [row[: len(headings)] for row in rows]
    text = facts(
        [
            ("objects", f"{len(infos)}, {format_nbytes(sum(info.nbytes for info in infos))}"),
            ("chains", f"{len(chains)}, {len(shown)} shown"),
        ]
    )
    objects = [_numbers(info, names) for chain in shown for info in chain]
    return CommandResult(
        {"objects": len(infos), "chains": len(chains), "listed": objects},
        f"{text}\n\n{table(headings, rows)}" if rows else text,
    )


def rm(args: argparse.Namespace) -> CommandResult:
    with _chosen(args) as (store, keys):
        gone = store.catalogue.delete(keys)
    return CommandResult({"removed": gone}, f"{gone} objects removed")


def pin(args: argparse.Namespace) -> CommandResult:
    with _chosen(args) as (store, keys):
        count = store.catalogue.unpin(keys) if args.undo else store.catalogue.pin(keys)
        if args.ttl is not None:
            store.catalogue.expire(keys, args.ttl)
    what = "unpinned" if args.undo else "pinned"
    return CommandResult({what: count}, f"{count} objects {what}")


def export(args: argparse.Namespace) -> CommandResult:
    """Writes objects to a file, which appears when it is complete."""
    part = Path(f"{args.out}.part")
    with _chosen(args) as (store, keys):
        if Path(args.out).exists():
            raise ConfigError(f"{args.out} exists; pass another file, or remove it first")
        try:
            # Prompts can be recovered from KV, so the file is the user's own, as a pool is.
            with os.fdopen(os.open(part, _NEW, 0o600), "wb") as file:
                count = export_objects(store, keys, file)
                file.flush()
                os.fsync(file.fileno())
            part.rename(args.out)
        except FileExistsError as error:
            raise ConfigError(f"{part} exists; remove it if no export is running") from error
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = args.out
            raise
        nbytes = count * store.layout.object_nbytes
        left = len(keys) - count
    text = f"{count} objects exported, {format_nbytes(nbytes)}"
    if left:
        text += f", {left} left out: evicted, expiring, with damaged records, or beyond pin_share"
    result = {"exported": count, "left_out": left, "payload_nbytes": nbytes}
    return CommandResult(result, text, EXIT_FAILED if left else EXIT_OK)


def import_(args: argparse.Namespace) -> CommandResult:
    """Stores the objects of a file."""
    with Path(args.file).open("rb") as file, _opened(args, args.name) as store:
        result: ImportResult = import_objects(store, file, namespace=args.namespace)
    text = f"{result.stored} objects stored, {result.present} in the pool already"
    if result.dropped:
        text += (
            f", {result.dropped} dropped: the pool is full of objects in use, a quota or a budget"
            " of writes is used up, or the agent was away"
        )
    return CommandResult(dict(vars(result)), text, EXIT_FAILED if result.dropped else EXIT_OK)


def _row(chain: list[ObjectInfo], page_size: int, names: Mapping[int, str]) -> tuple[object, ...]:
    expiries = [info.expires_s for info in chain if info.expires_s is not None]
    return (
        chain[0].key.hex(),
        chain[-1].key.hex(),
        f"{chain[0].depth * page_size}-{(chain[-1].depth + 1) * page_size}",
        format_nbytes(sum(info.nbytes for info in chain)),
        f"{max(info.age_s for info in chain)} s",
        sum(info.hits for info in chain),
        sum(info.pinned for info in chain),
        f"{max(0, min(expiries))} s" if expiries else "never",  # below 0: removed in a moment
        ", ".join(sorted({_namespace(info.tenant, names) for info in chain} - {""})),
    )


def _numbers(info: ObjectInfo, names: Mapping[int, str]) -> dict[str, object]:
    key, parent = info.key.hex(), info.parent.hex()
    return {**vars(info), "key": key, "parent": parent, "namespace": _namespace(info.tenant, names)}


def _namespace(tenant: int, names: Mapping[int, str]) -> str:
    """The name, or the number where the name is not known: a pool stores only numbers."""
    return names.get(tenant, f"#{tenant}") if tenant else ""


@contextmanager
def _chosen(args: argparse.Namespace) -> Iterator[tuple[Store, Keys]]:
    """The pool, and the keys that the arguments name, each once.

    Raises ConfigError when they name none, and NotThere for keys that are not in the pool: at once
    if none is, otherwise at the end.
    """
    if not args.keys and args.namespace is None and args.tokens is None:
        raise ConfigError(
            "no objects are named; pass keys as `tutti ls` shows them, --namespace, or --tokens"
        )
    keys = list(dict.fromkeys(_key(text) for text in args.keys))
    with _opened(args, args.name) as store:
        there = {info.key for info in store.catalogue.objects(as_keys(keys))}
        missing = [key.hex() for key in keys if key not in there]
        more = f" and {len(missing) - _NAMED_MAX} more" if len(missing) > _NAMED_MAX else ""
        absent = NotThere(f"not in the pool: {', '.join(missing[:_NAMED_MAX])}{more}")
        keys = [key for key in keys if key in there]
        if args.tokens is not None:
            keys += [key.tobytes() for key in _prompt_keys(store, args.tokens)]
        if args.namespace is not None:
            keys += [key.tobytes() for key in store.catalogue.keys(args.namespace)]
        if missing and not keys:
            raise absent
        if args.chain:
            keys = _with_followers(keys, store.catalogue.objects(store.catalogue.keys()))
        yield store, as_keys(list(dict.fromkeys(keys)))
        if missing:
            raise absent


def _prompt_keys(store: Store, file: str) -> Keys:
    """Keys of the prompt's pages that are in the pool, as this package or SGLang names them.

    Raises ConfigError for a file without token ids, NotThere if no page of the prompt is here.
    """
    try:
        words = re.split(r"[\s,\[\]]+", Path(file).read_text().strip())
        tokens = np.array([word for word in words if word], np.int64)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{file} is not a list of token ids: {error}") from error
    layout = store.layout
    keys = chain_keys(layout.fingerprint, tokens, layout.page_size)
    found = store.match(keys)
    if not found:
        with suppress(ImportError):
            from tutti.integration.sglang.page_keys import prompt_keys

            keys = prompt_keys(layout.fingerprint, tokens, layout.page_size)
            found = store.match(keys)
    if not found:
        raise NotThere(
            f"no page of this prompt of {tokens.size} tokens is in the pool; pages of SGLang are"
            " found where sglang is installed, unless stored with a cache salt or after new weights"
        )
    return keys[:found]


def _with_followers(keys: list[bytes], infos: Sequence[ObjectInfo]) -> list[bytes]:
    chosen = set(keys)
    for info in sorted(infos, key=lambda each: each.depth):
        if info.parent in chosen:
            chosen.add(info.key)
    return sorted(chosen)


def _key(text: str) -> bytes:
    with suppress(ValueError):
        if len(key := bytes.fromhex(text)) == KEY_NBYTES:
            return key
    raise KeySizeError(f"{text!r} is not a key; pass 32 hexadecimal digits")


@contextmanager
def _opened(args: argparse.Namespace, name: str) -> Iterator[Store]:
    is_agent = args.pool.startswith(AGENT)
    if name and not is_agent:
        raise ConfigError(f"--pool is only for agents, but {args.pool} is not one; remove it")
    if args.members and is_agent:
        raise ConfigError("--member is only for closed pools; remove it for an agent")
    store: Store = (
        connect(args.pool, pool=name, profile=None, lookup_timeout_s=ANSWER_S)
        if is_agent
        else open_pool(existing_members([args.pool, *args.members]), profile=None)
    )
    with store:
        store.wait_recovered(_RECOVERY_S)
        yield store
