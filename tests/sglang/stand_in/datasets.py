"""SGLang's clients import this package, and none of their workloads here uses it."""

from __future__ import annotations

load_dataset = None
