"""Arguments that several commands share: sizes, paths, and the layout of a page's KV."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from tutti.base.units import MiB, format_nbytes, parse_nbytes
from tutti.errors import ConfigError
from tutti.medium.layout import ITEMSIZE_NBYTES, MODELS, KVLayout
from tutti.model_config import model_layout

PAGE_SIZE = 64
_PORT_MAX = 65535
DTYPE = "bfloat16"


def options(parser: argparse._ActionsContainer) -> Callable[..., None]:
    """A short way to add options to a parser or a group of it."""

    def option(
        name: str,
        default: Any,
        what: str | None,
        kind: Callable[[str], Any] | Collection[str] = (),
        **more: Any,
    ) -> None:
        """name: the option, with its metavar if that differs.  kind: a type, or the choices.

        A number's type follows from the default.  A list takes one or more values; False without a
        kind is a flag.
        """
        name, _, metavar = name.partition(" ")
        given: dict[str, Any] = {"default": default, "help": what}
        if metavar:
            given["metavar"] = metavar
        first = default
        if isinstance(default, list | tuple) and "action" not in more:
            given["nargs"], first = "+", default[0] if default else None
        if default is False and not kind:
            given["action"] = "store_true"
        elif isinstance(first, int | float):
            given["type"] = type(first)
        if kind:
            given["type" if callable(kind) else "choices"] = kind
        parser.add_argument(name, **given | more)

    return option


def nbytes(text: str) -> int:
    """An argparse type: "64GiB" as bytes."""
    try:
        size = parse_nbytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size == 0:
        raise argparse.ArgumentTypeError("the size is 0 bytes; pass e.g. 8GiB")
    if text.strip().isdigit() and size < MiB:  # SGLang's own sizes are in GB
        raise argparse.ArgumentTypeError(f"{text} is {size} bytes; write the unit, e.g. {text}GiB")
    return size


def nbytes_text(text: str) -> str:
    """An argparse type: a size that is passed on as it was given."""
    nbytes(text)
    return text


def named_nbytes(text: str) -> tuple[str, int]:
    """An argparse type: "team=64GiB" as a name and bytes."""
    name, is_given, size = text.partition("=")
    if not (name and is_given):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SIZE; pass e.g. team=8GiB")
    return name, nbytes(size)


def say_capacity(size_nbytes: int) -> None:
    """Prints to stderr how a size was understood, before anything is allocated."""
    size = f"{format_nbytes(size_nbytes)} ({size_nbytes} bytes)"
    print(f"capacity: {size}", file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """An argparse type: an integer from 1."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def natural(text: str) -> int:
    """An argparse type: an integer from 0, such as a seed."""
    return 0 if text == "0" else positive(text)


def port(text: str) -> int:
    """An argparse type: the number of a TCP port."""
    number = positive(text)
    if number > _PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; ports are 1 to {_PORT_MAX}")
    return number


def above_zero(text: str) -> float:
    """An argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def member(text: str) -> str:
    """An argparse type: the path of a member of a pool; refuses the socket of an agent."""
    if text.startswith("unix:"):
        raise argparse.ArgumentTypeError(
            f"{text} is the socket of an agent; `tutti ls` and `tutti stat` show its pools"
        )
    return text


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for a pool's members, which are given in the order of the format."""
    parser.add_argument(
        "paths",
        nargs="+",
        type=member,
        metavar="PATH",
        help="file, folder with one pool, block device, or drive such as nvme:0000:03:00.0"
        " (docs/vfio.md); several paths form one pool and must always be given in the same order",
    )


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that describe one page of KV."""
    group = parser.add_argument_group(
        "layout of a page", "pass a model, or the dimensions that one rank stores"
    )
    option = options(group)
    what = "name of the model, stored in the pool: pages of other models never match. Its"
    what += " dimensions are read from config.json, in a folder or in Hugging Face's local cache;"
    option("--model NAME", None, f"{what} built in: {', '.join(sorted(MODELS))}")
    what = "use instead of --model; then pages of any model with these dimensions match"
    option("--any-model", False, what)
    option("--weights VERSION", "", "version of the weights, also stored")
    option("--layers N", None, "layers of the model", positive)
    option("--kv-heads N", None, "KV heads of this rank", positive)
    option("--head-dim N", None, "elements per head", positive)
    option("--mla KV_LORA_RANK:ROPE_DIM", None, "latent attention, e.g. 512:64", _mla)
    option("--page-size TOKENS", PAGE_SIZE, "tokens per page; a page is one object", positive)
    option("--dtype TYPE", DTYPE, "element type: %(choices)s", sorted(ITEMSIZE_NBYTES))


def layout_of(args: argparse.Namespace) -> KVLayout:
    """The layout that the arguments describe.  Raises ConfigError for too few or too many."""
    shape = _shape_of(args)
    if args.any_model == (args.model is not None):
        raise ConfigError("pass --model NAME, or --any-model so that pages of any model match")
    return replace(shape, model=args.model, weights=args.weights)


def _shape_of(args: argparse.Namespace) -> KVLayout:
    heads = (args.kv_heads, args.head_dim)
    is_given = args.mla is not None or args.layers is not None or heads != (None, None)
    if args.model in MODELS and is_given:
        raise ConfigError(
            "--model sets every dimension; remove --layers, --kv-heads, --head-dim and --mla"
        )
    if args.model is not None and not is_given:
        found = model_layout(args.model, args.page_size, args.dtype)
        if found is not None:
            return found
    if args.layers is None:
        known = f"no config.json found for {args.model!r}" if args.model else "no model is named"
        raise ConfigError(
            f"{known}; pass --model as a folder, a name in Hugging Face's local cache, or one of"
            f" {', '.join(sorted(MODELS))}; or pass --layers with --kv-heads and"
            " --head-dim, or with --mla"
        )
    if args.mla is not None and heads == (None, None):
        rank, rope_dim = args.mla
        return KVLayout.mla(args.layers, rank, rope_dim, args.page_size, args.dtype)
    if args.mla is None and None not in heads:
        return KVLayout.mha(args.layers, *heads, args.page_size, args.dtype)
    raise ConfigError(
        "pass --kv-heads and --head-dim, or --mla alone; the model's config.json has them"
    )


def _mla(text: str) -> tuple[int, int]:
    rank, colon, rope = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r}; write KV_LORA_RANK:ROPE_DIM, e.g. 512:64")
    return positive(rank), positive(rope)
