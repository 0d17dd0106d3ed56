"""`make soak SECONDS=... SEED=...`: the oracle test, for as long as it is given.

python -m soak --seconds 60 --seed 1 --out soak.json
python -m soak --only kills --episode 12345    one episode again, by the seed that was printed
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
from collections import Counter
from pathlib import Path

from soak.actors import ACTORS, RUNNERS
from soak.run import Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="JSON, written every minute")
    parser.add_argument("--dir", type=Path, default=None, help="folder of the pools")
    parser.add_argument("--only", nargs="+", choices=ACTORS, default=list(ACTORS), metavar="ACTOR")
    parser.add_argument("--without", nargs="+", choices=ACTORS, default=[], metavar="ACTOR")
    parser.add_argument("--episode", type=int, default=None, help="seed of one episode to repeat")
    args = parser.parse_args()
    if args.dir is not None:
        args.dir.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.CRITICAL)  # callbacks fail on purpose
    with tempfile.TemporaryDirectory(prefix="soak-", dir=args.dir) as folder:
        if args.episode is not None:
            tally: Counter[str] = Counter()
            ACTORS[args.only[0]](args.episode, Path(folder), tally)
            print(dict(tally))
            return 0
        seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
        chosen = set(args.only) - set(args.without)
        runners = [[name for name in runner if name in chosen] for runner in RUNNERS]
        runners = [runner for runner in runners if runner]
        print(f"seed {seed}, {args.seconds:g} s, runners {runners}", flush=True)
        report = Soak(ACTORS, runners, seed, Path(folder), args.out).run(args.seconds)
    for name, number in sorted(report.counts.items()):
        print(f"{name:40} {number}")
    print(f"{report.found} findings")
    return 1 if report.found else 0


if __name__ == "__main__":
    raise SystemExit(main())
