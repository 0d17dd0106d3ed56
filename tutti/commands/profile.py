"""`tutti profile` and `tutti bench residency`: measurements for the scheduler."""

from __future__ import annotations

from tutti.commands.bench import bench_command

_PROFILE = """\
Measures read and write times of a drive, separately and concurrently, and writes a profile for the
scheduler. Compute times are measured on a GPU; without one they are estimated by a roofline and
marked as estimates. An interrupted run resumes."""
_PROFILE_EXAMPLE = """\
  tutti profile --medium /mnt/nvme --model llama-3.1-8b --gpu H100 --out profile.json"""
_RESIDENCY = """\
Compares four ways to read a pool when memory is short: through the page cache, through the page
cache with fadvise, with O_DIRECT, and with both paths in use. Reads a working set repeatedly while
a control group limits memory. Reports page cache hit rates, bandwidth and p99 latency.
Needs root."""
_RESIDENCY_EXAMPLE = """\
  tutti bench residency --dir /mnt/nvme --working-set 2GiB"""


add_profile = bench_command("profile.run", _PROFILE, _PROFILE_EXAMPLE)
add_residency = bench_command("residency.run", _RESIDENCY, _RESIDENCY_EXAMPLE)
