"""`tutti profile` and `tutti bench residency`: what the scheduler lives on, measured."""

from __future__ import annotations

from tutti.commands.bench import bench_command

_PROFILE = """\
Measures how long reads and writes of this medium take, alone and beside each other, and writes a
profile for the scheduler. The compute half is measured where there is a GPU, else estimated by a
roofline and marked so. An interrupted run goes on where it stopped."""
_PROFILE_EXAMPLE = """\
example:
  tutti profile --medium /mnt/nvme --model llama-3.1-8b --gpu H100 --out profile.json"""
_RESIDENCY = """\
Writes a working set of objects and reads it again and again while a control group limits memory,
in four ways: all through the page cache, with advice to it, all past it, and on two paths. Says how
often the page cache had what was read, how fast, and how late the slowest were. Needs root."""
_RESIDENCY_EXAMPLE = """\
example:
  tutti bench residency --dir /mnt/nvme --working-set 2GiB"""


add_profile = bench_command("profile.run", _PROFILE, _PROFILE_EXAMPLE)
add_residency = bench_command("residency.run", _RESIDENCY, _RESIDENCY_EXAMPLE)
