"""Generates the reference of the Python interface with pdoc; a warning is an error.

usage: reference.py FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc

import tutti

MODULES = (
    "tutti",
    "tutti.errors",
    "tutti.interface",
    "tutti.medium.keys",
    "tutti.medium.layout",
    "tutti.memory.host_memory",
    "tutti.node.connect",
    "tutti.store",
    "tutti.transfers.catalogue",
    "tutti.transfers.tickets",
)


def main(folder: str) -> None:
    """Writes the pages."""
    warnings.simplefilter("error")
    for name in tutti.__all__:  # imported on first use otherwise, which pdoc does not follow
        setattr(tutti, name, getattr(tutti, name))
    pdoc.render.configure(docformat="markdown", footer_text="Tutti")
    pdoc.pdoc(*MODULES, output_directory=Path(folder))
    print(f"{len(MODULES)} modules in {folder}/index.html")


if __name__ == "__main__":
    main(sys.argv[1])
