"""SGLang's test kit imports a benchmark on its way, which wants a package that no test uses."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec

if importlib.util.find_spec("datasets") is None:
    sys.modules["datasets"] = importlib.util.module_from_spec(ModuleSpec("datasets", None))
    sys.modules["datasets"].__dict__["load_dataset"] = None
