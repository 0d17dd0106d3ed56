"""The command line: `tutti COMMAND ...`.

Every command is in a module that is imported when the command is named, so that `tutti --help` is
quick. A command is a function `add_NAME(parser)` that describes the command, adds its arguments and
sets `run`, a function from the parsed arguments to a `CommandResult`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tutti import __version__
from tutti.commands.outcome import (
    EXIT_DEFECT,
    EXIT_FAILED,
    EXIT_HUNG_UP,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    EXIT_UNREAD,
    EXIT_UNUSABLE,
    EXIT_USAGE,
    CommandResult,
    NotThere,
)
from tutti.commands.settings import configure
from tutti.errors import ConfigError, TuttiError, system_message

_EXIT_CODES = (
    (EXIT_OK, "success"),
    (EXIT_FAILED, "a check failed: damage, wrong bytes, or a named object that is not in the pool"),
    (EXIT_USAGE, "invalid arguments"),
    (EXIT_UNUSABLE, "the pool or device cannot be used; stderr has the reason and the remedy"),
    (EXIT_DEFECT, "a bug in tutti; stderr has the traceback"),
    (EXIT_HUNG_UP, "the terminal was closed (SIGHUP)"),
    (EXIT_INTERRUPTED, "interrupted (Ctrl-C)"),
    (EXIT_UNREAD, "the reader of the output closed the pipe"),
    (EXIT_TERMINATED, "terminated by SIGTERM, after cleaning up"),
)

_PACKAGE = Path(__file__).resolve().parent
#: The pages that help texts and errors call docs/NAME.md: installed, or those of the checkout.
_PAGES = _PACKAGE / "docs" if (_PACKAGE / "docs").exists() else _PACKAGE.parent / "docs"
_EPILOG = (
    "exit codes:\n"
    + "\n".join(f"  {code:<5}{meaning}" for code, meaning in _EXIT_CODES)
    + "\n\n`tutti COMMAND --help` describes a command and shows an example."
    + f"\nPages called docs/NAME.md are in\n  {_PAGES}"
    + "\nShell completion: pip install argcomplete, then"
    + ' eval "$(register-python-argcomplete tutti)".'
)

#: Name, module:function in tutti.commands, help text. A name of two words is a command of a group.
COMMANDS = (
    ("demo", "demo:add_demo", "measure the store on this disk, in about a minute"),
    ("format", "pool:add_format", "create an empty pool"),
    ("info", "pool:add_info", "show a pool's geometry and usage"),
    ("ls", "catalogue:add_ls", "list the chains of a pool"),
    ("rm", "catalogue:add_rm", "remove objects from a pool"),
    ("pin", "catalogue:add_pin", "protect objects from eviction, or set their expiry"),
    ("export", "catalogue:add_export", "write objects of a pool to a file"),
    ("import", "catalogue:add_import", "store the objects of an exported file"),
    ("stat", "stat:add_stat", "show the counters of an agent's pool"),
    ("serve", "serve:add_serve", "run the agent, which serves pools to other processes"),
    ("resize", "resize:add_resize", "change the size of a pool"),
    ("fsck", "fsck:add_fsck", "verify every object of a pool, and repair it"),
    ("probe", "probe:add_probe", "show which tiers work here and what blocks the others"),
    ("nvme list", "nvme:add_list", "list drives that can hold a pool"),
    ("bench bandwidth", "bench:add_bandwidth", "store and retrieve bandwidth in GB/s"),
    ("bench paths", "bench:add_paths", "compare the paths to drives"),
    ("bench peers", "bench:add_peers", "compare with SGLang's backends, plain files and fio"),
    ("bench ring", "bench:add_ring", "commands per second of the rings alone"),
    ("bench threads", "bench:add_threads", "gain from service threads and digest workers"),
    ("bench agent", "bench:add_agent", "cost of look-ups and plans over the agent's socket"),
    ("bench second-tier", "bench:add_second_tier", "compare the second tier with Mooncake alone"),
    ("bench submit", "bench:add_submit", "CPU time and driver calls of a load to a GPU"),
    ("bench window", "bench:add_window", "compare an adaptive window of commands with a fixed one"),
    ("bench short", "bench:add_short", "cost of transfers of a few pages"),
    ("bench placement", "bench:add_placement", "show the drive addresses of commands (emulated)"),
    ("bench eviction", "bench:add_eviction", "compare eviction policies on request traces"),
    ("bench residency", "bench:add_residency", "compare four uses of the page cache"),
    ("bench decisions", "bench:add_decisions", "CPU time of the scheduler's decisions"),
    ("bench slack", "bench:add_slack", "compare scheduling policies (simulated)"),
    ("bench serve", "bench_serving:add_serve", "start SGLang as one of the compared systems"),
    ("bench ttft", "bench_serving:add_ttft", "measure time to first token against request rate"),
    ("bench workload", "bench_serving:add_workload", "describe or export a workload"),
    ("bench figures", "bench_serving:add_figures", "draw results as PNG, SVG and CSV"),
    ("sglang command", "sglang:add_command", "print the command that starts SGLang"),
    ("sglang doctor", "sglang:add_doctor", "find problems that would prevent SGLang from running"),
    ("profile", "bench:add_profile", "measure the drive for the scheduler"),
    ("simulate", "bench:add_simulate", "simulate clusters and drives"),
    ("replay", "bench:add_replay", "replay a trace with real bytes and check every byte"),
)

#: Commands that servers need: their options can also be set by a file and by the environment.  Each
#: with the keys of its table in the file that belong to another command.
_CONFIGURED = {
    "serve": set(),
    "sglang command": set(),
    "sglang doctor": {"model", "option", "layout"},
}

_NUMBER_END = 2**63
_PLACES = {"path", "paths", "dir", "folder", "pool", "file", "out"}  # arguments that are paths
_LACKING = "the following arguments are required: "
_MISSPELT = re.compile(
    r"argument (?:COMMAND|WHAT): invalid choice: '([^']+)'|unrecognized arguments: (--[\w-]+)"
)

#: Help text of each group of commands.
GROUPS = {"nvme": "drives", "bench": "measure", "sglang": "run as SGLang's storage"}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of long texts; shows defaults, lists of values as they are typed."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, value = super()._get_help_string(action), action.default
        if text is None or not value or value is argparse.SUPPRESS:
            return text
        if "default" not in text:
            text += " (default: %(default)s)"
        values = value if isinstance(value, list | tuple) else [value]
        return text.replace("%(default)s", " ".join(map(str, values)).replace("%", "%%"))


class _Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated options, and whose errors suggest what was meant."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        options.setdefault("allow_abbrev", False)
        # A bench may define --json for itself; the one that is added last counts.
        super().__init__(conflict_handler="resolve", **options)

    def error(self, message: str) -> NoReturn:
        if message.startswith(_LACKING):
            self.print_usage(sys.stderr)
            name = message.removeprefix(_LACKING).split(", ")[0]
            many = [flag for flag, a in self._option_string_actions.items() if a.nargs == "+"]
            if many and not name.startswith("-"):
                message += f"; {name} comes before {many[0]}, which takes all words after it"
        raise ConfigError(f"{message}{self._meant(message)}; see `{self.prog} --help`")

    def _meant(self, message: str) -> str:
        """A hint for a misspelt command or option; empty where there is none."""
        wrong = _MISSPELT.match(message)
        if wrong is None:
            return ""
        known = {name.split()[-1]: f"tutti {name}" for name, *_ in COMMANDS}
        if wrong[2]:
            known = {option.strip("-"): option for option in self._option_string_actions}
        close = difflib.get_close_matches(wrong[1] or wrong[2].strip("-"), known, 1)
        if close:
            return f"; did you mean `{known[close[0]]}`?"
        to_sglang = wrong[2] and self.prog == "tutti sglang command"
        return "; SGLang's own arguments come after `--`" if to_sglang else ""


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the command that `argv` names is imported and knows its arguments."""
    parser = _Parser(
        prog="tutti",
        description="A key-value store on NVMe SSDs for the KV cache of large language models.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"tutti {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    groups: dict[str, Any] = {}
    words = [word for word in argv if not word.startswith("-")]  # the command's name comes first
    for name, where, summary in COMMANDS:
        group, _, leaf = name.rpartition(" ")
        if group and group not in groups:
            of_group = ", ".join(n.split()[1] for n, *_ in COMMANDS if n.startswith(group + " "))
            meaning = GROUPS[group]
            ending = f"`tutti {group} WHAT --help` describes one and shows an example."
            child = commands.add_parser(group, help=f"{meaning}: {of_group}", epilog=ending)
            groups[group] = child.add_subparsers(metavar="WHAT", required=True)
        place = groups[group] if group else commands
        child = place.add_parser(leaf, help=summary, description=summary)
        if name.split() == words[: 1 + bool(group)]:
            module, _, function = where.partition(":")
            getattr(import_module(f"tutti.commands.{module}"), function)(child)
            child.add_argument(
                "--json", action="store_true", help="print one JSON object instead of tables"
            )
            child.set_defaults(parser=child)
            if name in _CONFIGURED:
                configure(child, name.split()[0], os.environ, _CONFIGURED[name])
    return parser


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a command as Ctrl-C does."""


class _HungUp(_Terminated):
    """SIGHUP."""


_ENDS: dict[int, type[_Terminated]] = {signal.SIGTERM: _Terminated, signal.SIGHUP: _HungUp}


def _terminate(number: int, frame: object) -> NoReturn:
    # Only the first counts: `timeout` sends two, and the second must not interrupt the cleanup.
    for each in _ENDS:
        if signal.getsignal(each) is _terminate:
            signal.signal(each, lambda number, frame: None)
    raise _ENDS[number]


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into exceptions, unless another handler (or `nohup`) is set."""
    is_main = threading.current_thread() is threading.main_thread()
    mine = [each for each in _ENDS if is_main and signal.getsignal(each) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Raises SystemExit after --help and --version."""
    _occupy_streams()
    if "_ARGCOMPLETE" in os.environ:
        complete(os.environ.get("COMP_LINE", ""))
    with _orderly_end():
        return _run(sys.argv[1:] if argv is None else list(argv))


def complete(line: str) -> None:
    """Prints the completions of ``line`` for the shell, and ends the process."""
    import argcomplete

    argcomplete.autocomplete(build_parser(line.split()[1:]))


def _occupy_streams() -> None:
    """Opens /dev/null in place of closed standard streams.

    Otherwise the next file that is opened, perhaps a pool, gets the number of such a stream, and
    libraries and child processes would write their output to that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _run(argv: list[str]) -> int:
    as_json = "--json" in argv
    try:
        args, unknown = build_parser(argv).parse_known_args(argv)
        if unknown:  # the error comes from the command's own parser, which knows its options
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        _check_values(args)
        outcome: CommandResult = args.run(args)
        text = json.dumps(outcome.result, indent=2) if args.json else outcome.text
        return _print(text) or outcome.exit_code
    except (Exception, KeyboardInterrupt) as error:
        message, exit_code = _failure(error)
        return _fail(message, exit_code, type(error).__name__ if as_json else None)


def _check_values(args: argparse.Namespace) -> None:
    """Refuses numbers that are negative, infinite or NaN, and empty paths, for every option."""
    for action in args.parser._actions:
        name = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
        given = getattr(args, action.dest, None)
        for value in given if isinstance(given, list) else [given]:
            if value == "" and action.dest in _PLACES:
                args.parser.error(f"{name} is empty; pass a file, a folder or a device")
            if isinstance(value, int | float) and not 0 <= value < _NUMBER_END:
                args.parser.error(f"{name} is {value}; pass a number from 0 to 2^63 - 1")


def _failure(error: BaseException) -> tuple[str, int]:
    """The message and exit code of an error; prints the traceback of a bug to stderr."""
    if isinstance(error, _HungUp):
        return "the terminal was closed", EXIT_HUNG_UP
    if isinstance(error, _Terminated):
        return "terminated by SIGTERM", EXIT_TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", EXIT_INTERRUPTED
    if isinstance(error, ConfigError):
        return str(error), EXIT_USAGE
    if isinstance(error, NotThere):
        return str(error), EXIT_FAILED
    if isinstance(error, TuttiError):
        return str(error), EXIT_UNUSABLE
    if isinstance(error, OSError):
        return system_message(error), EXIT_UNUSABLE
    if isinstance(error, MemoryError):
        return "out of memory; use smaller sizes, or raise the limit (ulimit -v)", EXIT_UNUSABLE
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
    return "this is a bug in tutti; please report the lines above", EXIT_DEFECT


def _print(text: str) -> int:
    """Prints the result.  Returns 0, or the exit code where that fails."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has ended, as in `tutti info POOL | head -1`
        _give_up(sys.stdout)
        return EXIT_UNREAD
    except UnicodeEncodeError as error:  # a path that is not UTF-8, or a terminal without Unicode
        return _print(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
    except OSError as error:
        _give_up(sys.stdout)
        return _fail(f"cannot write the result: {system_message(error)}", EXIT_UNUSABLE)
    return EXIT_OK


def _fail(message: str, exit_code: int, kind: str | None = None) -> int:
    """Prints the message to stderr, and with ``kind`` also as JSON to stdout."""
    try:
        print(f"tutti: {message}", file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)
    if kind is not None:
        _print(json.dumps({"error": {"type": kind.lstrip("_"), "message": message}}))
    return exit_code


def _give_up(stream: TextIO) -> None:
    """Redirects a broken stream to /dev/null, or the interpreter would flush it again at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
