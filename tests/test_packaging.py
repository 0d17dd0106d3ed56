"""What an installation looks like: editable from anywhere, and as a wheel."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ["LICENSE", "MANIFEST.in", "bench", "docs", "integration", "kernels", "tutti"]
FOLDERS = {
    "tutti": "tutti",
    "tutti.bench": "bench",
    "tutti.gio_uring": "tutti/gio_uring",
    "tutti.integration": "integration",
    "tutti.integration.sglang": "integration/sglang",
    "tutti.kernels": "kernels",
    "tutti.scheduler": "tutti/scheduler",
}
BUILD = ["pyproject.toml", "setup.py"]

pytestmark = pytest.mark.timeout(400)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def classes(module: ModuleType) -> list[type]:
    return [found for found in vars(module).values() if isinstance(found, type)]


@pytest.mark.parametrize(("name", "folder"), FOLDERS.items(), ids=FOLDERS.keys())
def test_packages_import_from_any_directory(name: str, folder: str, tmp_path: Path) -> None:
    # -I keeps the current directory and PYTHONPATH out: only the installation can answer.
    code = f"import {name} as package; print(package.__file__)"
    file = run(sys.executable, "-I", "-c", code, cwd=tmp_path).strip()
    assert Path(file).samefile(ROOT / folder / "__init__.py")


def test_no_top_level_names_besides_tutti(tmp_path: Path) -> None:
    # Other distributions own these names; an installation of Tutti must not answer to them.
    code = (
        "import importlib.util as u; print([n for n in ('kernels', 'bench', 'integration')"
        f" if (s := u.find_spec(n)) and str(s.origin).startswith({str(ROOT)!r})])"
    )
    assert run(sys.executable, "-I", "-c", code, cwd=tmp_path).strip() == "[]"


def test_the_package_loads_its_exports_on_first_use(tmp_path: Path) -> None:
    code = "import sys, tutti; print([m for m in sys.modules if m.startswith('tutti.')])"
    assert run(sys.executable, "-I", "-c", code, cwd=tmp_path).strip() == "[]"


def test_compiled_classes_have_no_interpreted_base() -> None:
    """mypyc does not refuse one, whose weak references would overwrite the class's vtable."""
    for path in (ROOT / "tutti").glob("*/*.cpython-*.so"):
        module = importlib.import_module(f"tutti.{path.parent.name}.{path.name.split('.')[0]}")
        for compiled in filter(lambda found: "__mypyc_attrs__" in vars(found), classes(module)):
            for base in compiled.__mro__:
                assert base.__module__ in ("builtins", "typing") or "__mypyc_attrs__" in vars(base)


def test_a_missing_export_says_what_there_is() -> None:
    import tutti

    with pytest.raises(AttributeError, match="'KVLayout', 'LoadTicket', 'ObjectStore'"):
        _ = tutti.opne


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without network from a copy, so that the checkout's build/ plays no part.

    What the checkout has compiled is not compiled again: it lies where the build looks for it, and
    is newer than what mypyc will make.
    """
    source = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "results")
    for name in SOURCES + BUILD:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=skip)
        else:
            shutil.copy(path, source / name)
    compiled = source / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for library in ROOT.glob("tutti/**/*.so"):
        target = compiled / library.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
        os.utime(target, (time.time() + 3600, time.time() + 3600))
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "-w", str(source)]
    run(sys.executable, "-m", "pip", "wheel", *flags, str(source), cwd=source)
    (built,) = source.glob("*.whl")
    return built


def test_wheel_serves_every_python_3(wheel: Path) -> None:
    assert "-py3-none-linux_" in wheel.name


def test_wheel_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        "tutti/_native.so",
        "tutti/bench/__init__.py",
        "tutti/docs/vfio.md",
        "tutti/gio_uring/__init__.py",
        "tutti/integration/sglang/__init__.py",
        "tutti/kernels/__init__.py",
        "tutti/py.typed",
        "tutti/scheduler/__init__.py",
    }
    assert expected <= names
    top = {name.split("/")[0] for name in names}
    assert {entry for entry in top if not entry.endswith(".dist-info")} == {"tutti"}


def test_wheel_carries_every_device_source(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = ROOT / "kernels"
    sources = [p for kind in ("include/**/*.h", "**/*.cu", "**/*.cuh") for p in kernels.glob(kind)]
    assert sources
    assert {f"tutti/kernels/{p.relative_to(kernels)}" for p in sources} <= names


_MISUSED = """
import tutti

layout = tutti.KVLayout.mha(2, 1, 64, 64, "float16", model="test")
tutti.no_such_name
tutti.open(nonsense=3)
with tutti.open("pool", layout, "8MiB") as store:
    store.no_such_method()
    store.allocate_memory(pages="four")
    ticket = store.load([b"k" * 16], [0])
    ticket.parts
    ticket.wait_layer("first")
with tutti.connect("socket") as remote:
    remote.no_such_method()
"""

_USED = """
import numpy as np

import tutti

layout = tutti.KVLayout.mha(2, 1, 64, 64, "float16", model="test")
keys = tutti.chain_keys(layout.fingerprint, np.arange(640), 64)


def work(store: tutti.Store) -> int:
    store.allocate_memory(pages=10)
    put: tutti.PutTicket = store.put(keys, np.arange(len(keys)))
    stored: int = put.wait(10.0).stored
    n = store.match(keys)
    ticket: tutti.LoadTicket = store.load(keys[:n], np.arange(n))
    for layer in range(layout.layers):
        ticket.wait_layer(layer)
    failed: int = ticket.failed().size
    assert ticket.done and keys[0].tobytes() in store and len(store) == stored
    return stored - failed


with tutti.open("pool", layout, capacity="8MiB") as opened:
    work(opened)
with tutti.connect("socket", layout) as remote:
    work(remote)
"""


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and what it requires, nothing else."""
    environment = tmp_path_factory.mktemp("user")
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), cwd=environment)
    python = environment / "bin/python"
    install = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q"]
    run(sys.executable, *install, str(wheel), cwd=environment)
    packages = next(environment.glob("lib/python3*/site-packages"))
    for folder in ("numpy", "numpy.libs", "xxhash"):
        (packages / folder).symlink_to(Path(np.__file__).parent.parent / folder)
    return python


def test_a_type_checker_knows_the_api(user: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "used.py").write_text(_USED)
    (tmp_path / "misused.py").write_text(_MISUSED)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(user)]
    command += ["--config-file", "", "--cache-dir", "cache", "used.py", "misused.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert not done.stderr, done.stderr
    errors = [line.split(":") for line in done.stdout.splitlines() if ": error:" in line]
    found = {(file, int(number)) for file, number, *_ in errors}
    assert found == {("misused.py", number) for number in (5, 6, 8, 9, 11, 12, 14)}, done.stdout


def test_help_shows_the_api_without_any_extra(user: Path, tmp_path: Path) -> None:
    code = "import sys, tutti; sys.modules['msgspec'] = None; print(dir(tutti)); help(tutti)"
    shown = run(str(user), "-I", "-c", code, cwd=tmp_path)
    for name in ("open", "connect", "KVLayout", "ObjectStore", "wait_layer", "match", "deallocate"):
        assert name in shown
