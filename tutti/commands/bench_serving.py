"""`tutti bench serve`, `ttft`, `workload` and `figures`: servers under load, and figures."""

from __future__ import annotations

from typing import Any

from tutti.commands.bench import bench_command
from tutti.commands.outcome import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNUSABLE

_SERVE_EXAMPLE = """\
  tutti bench serve tutti-hicache --model meta-llama/Llama-3.1-8B --dir /mnt/nvme/run1
  tutti bench serve hicache-file --model meta-llama/Llama-3.1-8B --dir /mnt/nvme/run2 --print"""
_TTFT_EXAMPLE = """\
  tutti bench ttft --workload leval-synthetic --rates 0.5 1 1.5 --system tutti --out results/tutti
  tutti bench ttft --compare results/tutti results/hicache-file
  tutti bench ttft --prefix-tokens 0 16384 28672 --total-tokens 32768 --system tutti --out results/p

A run that ends early (Ctrl-C, a lost server, a full disk) keeps its results, marked as partial."""
_WORKLOAD_EXAMPLE = """\
  tutti bench workload --workload loogle --data loogle/ --out loogle.jsonl
  tutti bench workload --workload leval-synthetic --capacity-tokens 400000 2000000"""
_FIGURES_EXAMPLE = """\
  tutti bench figures rate results/tutti results/hicache-file --out figures/leval
  tutti bench figures rate figures/leval.csv --out figures/again
  tutti bench figures cost results/tutti results/hbm --out figures/cost --gpu-price 4"""


def _exit_code(result: dict[str, Any]) -> int:
    """A run that ended early fails the command although its results were kept."""
    if result.get("interrupted"):
        return EXIT_INTERRUPTED
    return EXIT_UNUSABLE if result.get("stopped") or result.get("output") else EXIT_OK


add_serve = bench_command("ttft.recipes", _SERVE_EXAMPLE, _exit_code, makes_dir=True)
add_ttft = bench_command("ttft.run", _TTFT_EXAMPLE, _exit_code)
add_workload = bench_command("ttft.workloads.export", _WORKLOAD_EXAMPLE, _exit_code)
add_figures = bench_command("figures.run", _FIGURES_EXAMPLE, _exit_code)
