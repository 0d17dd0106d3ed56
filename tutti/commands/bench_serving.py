"""`tutti bench serve`, `ttft`, `workload` and `figures`: servers under load, and figures."""

from __future__ import annotations

from typing import Any

from tutti.commands.bench import bench_command
from tutti.commands.outcome import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNUSABLE

_SERVE = """\
Starts SGLang, configured as one of the compared systems, and runs until Ctrl-C. Writes a
description of the server to --info. Fails if the system is not installed."""
_SERVE_EXAMPLE = """\
  tutti bench serve tutti-hicache --model meta-llama/Llama-3.1-8B --dir /mnt/nvme/run1
  tutti bench serve hicache-file --model meta-llama/Llama-3.1-8B --dir /mnt/nvme/run2 --print"""
_TTFT = """\
Measures a running server at several request rates: time to first token (TTFT), time between tokens
(ITL, TPOT) and goodput. Requests arrive at random (Poisson) times, which are the same for every
system; latencies count from the time when a request is due. With --prefix-tokens, sends one prompt
at a time and measures TTFT against the length of the cached prefix."""
_TTFT_EXAMPLE = """\
  tutti bench ttft --workload leval-synthetic --rates 0.5 1 1.5 --system tutti --out results/tutti
  tutti bench ttft --compare results/tutti results/hicache-file
  tutti bench ttft --prefix-tokens 0 16384 28672 --total-tokens 32768 --system tutti --out results/p

A run that ends early (Ctrl-C, a lost server, a full disk) keeps its results, marked as partial."""
_WORKLOAD = """\
Describes a workload (lengths, documents, omissions, expected hit rates) and exports it for other
clients as OpenAI-style requests or as a trace in Mooncake's format."""
_WORKLOAD_EXAMPLE = """\
  tutti bench workload --workload loogle --data loogle/ --out loogle.jsonl
  tutti bench workload --workload leval-synthetic --capacity-tokens 400000 2000000"""
_FIGURES = """\
Draws a figure as PNG and SVG from results or from the CSV of an earlier call, and writes the CSV.
Without matplotlib (pip install matplotlib) only the CSV is written."""
_FIGURES_EXAMPLE = """\
  tutti bench figures rate results/tutti results/hicache-file --out figures/leval
  tutti bench figures rate figures/leval.csv --out figures/again
  tutti bench figures cost results/tutti results/hbm --out figures/cost --gpu-price 4"""


def _exit_code(result: dict[str, Any]) -> int:
    """A run that ended early fails the command although its results were kept."""
    if result.get("interrupted"):
        return EXIT_INTERRUPTED
    return EXIT_UNUSABLE if result.get("stopped") or result.get("output") else EXIT_OK


add_serve = bench_command("ttft.recipes", _SERVE, _SERVE_EXAMPLE, _exit_code, makes_dir=True)
add_ttft = bench_command("ttft.run", _TTFT, _TTFT_EXAMPLE, _exit_code)
add_workload = bench_command("ttft.workloads.export", _WORKLOAD, _WORKLOAD_EXAMPLE, _exit_code)
add_figures = bench_command("figures.run", _FIGURES, _FIGURES_EXAMPLE, _exit_code)
