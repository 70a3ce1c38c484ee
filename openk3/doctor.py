"""`k3 doctor`: what this machine has, what is installed, what is missing, and the command that fixes it.

Each check is a small function that looks at one thing and never raises; `diagnose` runs them all. A check is "ok", a
"warning" (OpenK3 works, but slower, with less, or not quite as tested) or "missing" (it cannot work). The functions
take what they look at as arguments where a test wants to show them another machine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import openk3
from openk3.engine.threads import default_threads, usable_cores

MIN_PYTHON = (3, 11)

# What the kernels of PyTorch, and ours, look for on x86; in the order in which they matter.
_ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx_vnni", "avx512_vnni", "amx_bf16", "amx_int8")
_SHOWN_PACKAGES = ("torch", "numba", "transformers", "tokenizers")
_MIN_RAM, _MIN_DISK = 2 * 10**9, 2 * 10**9
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, how it stands, what was found, and the command that makes it better."""

    name: str
    status: Literal["ok", "warning", "missing"]
    found: str
    fix: str = ""


def diagnose() -> list[Check]:
    """Run every check. Imports torch, so it takes a few seconds."""
    cores = usable_cores()
    return [
        check_python(sys.version_info[:3]),
        check_cores(cores),
        check_isa(_read("/proc/cpuinfo"), platform.machine()),
        check_ram(_read("/proc/meminfo"), _read("/sys/fs/cgroup/memory.max")),
        *check_cache(),
        *check_packages(_requirements(), _pins()),
        check_kernels(cores, os.environ),
        check_torch(cores, os.environ),
        check_reproducibility(os.environ),
        check_browser(),
    ]


def healthy(checks: Iterable[Check]) -> bool:
    """Whether nothing required is missing."""
    return all(check.status != "missing" for check in checks)


def report_json(checks: Iterable[Check]) -> dict[str, Any]:
    checks = list(checks)
    return {"ok": healthy(checks), "checks": [asdict(check) for check in checks]}


def report_text(checks: Iterable[Check]) -> str:
    """The findings as lines for a terminal, each followed by its fix."""
    checks = list(checks)
    marks = {"ok": "ok     ", "warning": "warning", "missing": "MISSING"}
    lines = []
    for check in checks:
        lines.append(f"{marks[check.status]}  {check.name:<16}  {check.found}")
        if check.fix:
            lines.append(f"{'':<27}-> {check.fix}")
    bad = sum(check.status == "missing" for check in checks)
    lines.append("")
    lines.append(f"{bad} required things are missing" if bad else "everything that is required is here")
    return "\n".join(lines)


def check_python(version: tuple[int, ...]) -> Check:
    found = f"{'.'.join(map(str, version))} ({sys.executable})"
    if version[:2] >= MIN_PYTHON:
        return Check("python", "ok", found)
    wanted = ".".join(map(str, MIN_PYTHON))
    return Check("python", "missing", f"{found}; OpenK3 needs {wanted} or newer", f"python{wanted} -m venv .venv")


def check_cores(cores: int) -> Check:
    total = os.cpu_count() or cores
    return Check("cores", "ok", f"{cores}" if cores == total else f"{cores} of {total} usable by this process")


def check_isa(cpuinfo: str, machine: str) -> Check:
    flags = next((set(line.split()) for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), set())
    model = next((line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    found = " ".join(
        filter(None, [machine, *(flag for flag in _ISA_FLAGS if flag in flags), f"({model})" * bool(model)])
    )
    if machine in ("x86_64", "AMD64") and flags and "avx2" not in flags:
        return Check("instruction set", "warning", f"{found}: without AVX2 generation is several times slower")
    return Check("instruction set", "ok", found)


def check_ram(meminfo: str, limit: str) -> Check:
    sizes = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    if "MemTotal" in sizes and "MemAvailable" in sizes:
        total, free = (int(sizes[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    else:
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit.strip().isdigit() and int(limit) < total:
        total, free = int(limit), min(free, int(limit))
    found = f"{_size(free)} free of {_size(total)}"
    if free < _MIN_RAM:
        return Check("memory", "warning", f"{found}; the default model with its cache takes about {_size(_MIN_RAM)}")
    return Check("memory", "ok", found)


def check_cache() -> Iterator[Check]:
    """The disk under the model cache, and the models in it."""
    from openk3.weights.registry import default_model
    from openk3.weights.store import cache_root, models_dir

    root = cache_root()
    home = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(home).free
    found, move = f"{_size(free)} free at {root}", "export OPENK3_HOME=/a/directory/with/room"
    if not (home.is_dir() and os.access(home, os.W_OK)):
        yield Check("disk", "missing", f"{root} cannot be written", move)
    elif free < _MIN_DISK:
        yield Check("disk", "warning", f"{found}; converting a model takes some times its size", move)
    else:
        yield Check("disk", "ok", found)

    models = sorted(path for path in models_dir().glob("*") if (path / "config.json").is_file())
    names = ", ".join(f"{path.name} ({_size(_disk_use(path))})" for path in models)
    default = default_model().alias
    if any(path.name.startswith(default) for path in models):
        yield Check("models", "ok", names)
    else:
        yield Check("models", "warning", f"{names or 'none'}; the default one is not here", f"k3 pull {default}")


def check_packages(requirements: Iterable[Requirement], pins: Mapping[str, str]) -> Iterator[Check]:
    """Every required package against the range it must lie in; those that matter most also against the tested version.

    Args:
        requirements: what OpenK3 needs.
        pins: exact versions it was tested with, by canonical name; empty where they are not known.
    """
    requirements = list(requirements)
    if not requirements:
        source = Path(openk3.__file__).parent.parent
        fix = f"{sys.executable} -m pip install --editable '{source}'"
        yield Check("packages", "warning", "openk3 is not installed, so what it needs is not known", fix)
        return
    fine = 0
    for requirement in requirements:
        name, pin = requirement.name, pins.get(canonicalize_name(requirement.name))
        wanted = f"{name}=={pin}" if pin else str(requirement)
        fix = f"{sys.executable} -m pip install '{wanted}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "missing", "not installed", fix)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield Check(name, "missing", f"{version}; OpenK3 needs {requirement.specifier}", fix)
        elif pin and version.partition("+")[0] != pin.partition("+")[0]:
            yield Check(name, "warning", f"{version}; tested with {pin}", fix)
        elif name in _SHOWN_PACKAGES:
            yield Check(name, "ok", version)
        else:
            fine += 1
    yield Check("other packages", "ok", f"{fine} required packages are installed in versions that fit")


def check_kernels(cores: int, environ: Mapping[str, str]) -> Check:
    """The compiled kernels, which run models on a CPU: their kind, their threads, and whether they are compiled yet."""
    try:
        from openk3.kernels import MISSING, are_compiled, describe
        from openk3.weights.registry import default_model
    except Exception as error:  # a broken installation can fail in any way
        reinstall = f"{sys.executable} -m pip install --force-reinstall numba"
        return Check("kernels", "missing", f"they cannot be imported, only PyTorch can run models: {error}", reinstall)
    if MISSING:
        return Check("kernels", "warning", f"not used, as {MISSING}: PyTorch runs the models, several times slower")
    threads = default_threads(environ)
    asked = environ.get("OMP_NUM_THREADS")
    found = f"{describe()}, {threads} threads" + (f" (OMP_NUM_THREADS={asked})" if asked else "")
    found = found.replace(" 1 threads", " 1 thread")
    if threads > cores:  # threads spin while they wait for each other: too many cost a multiple, not a fraction
        return Check("kernels", "warning", f"{found} on {cores} cores is slow", f"export OMP_NUM_THREADS={cores}")
    if not are_compiled():
        found += ", not compiled yet: the first answer waits for that, up to a minute"
        return Check("kernels", "warning", found, f"k3 pull {default_model().alias}")
    if threads < cores:
        return Check("kernels", "warning", f"{found} of {cores} cores are used", "unset OMP_NUM_THREADS")
    return Check("kernels", "ok", f"{found}, compiled; other devices and odd widths run in PyTorch")


def check_torch(cores: int, environ: Mapping[str, str]) -> Check:
    """Whether torch can be imported, and how many threads it will use."""
    try:
        import torch
    except Exception as error:  # a broken installation can fail in any way
        reinstall = f"{sys.executable} -m pip install --force-reinstall torch"
        return Check("torch threads", "missing", f"torch cannot be imported: {error}", reinstall)
    threads = torch.get_num_threads()
    asked = environ.get("OMP_NUM_THREADS")
    found = f"{threads}" + (f" (OMP_NUM_THREADS={asked})" if asked else "")
    if threads > cores:
        # OpenMP threads spin at barriers: more of them than cores costs a multiple, not a fraction.
        return Check("torch threads", "warning", f"{found} on {cores} cores is slow", f"export OMP_NUM_THREADS={cores}")
    if threads < cores:
        return Check("torch threads", "warning", f"{found} of {cores} cores are used", "unset OMP_NUM_THREADS")
    return Check("torch threads", "ok", found)


def check_reproducibility(environ: Mapping[str, str]) -> Check:
    """MKL's mode: without a fixed one, a result may depend on what else is in the batch."""
    mode = environ.get("MKL_CBWR", "")
    if mode.upper().endswith(",STRICT"):
        return Check("MKL mode", "ok", f"MKL_CBWR={mode}")
    found = f"MKL_CBWR={mode or '(empty)'}: the same request may give other tokens beside other requests"
    return Check("MKL mode", "warning", found, "unset MKL_CBWR")


def check_browser() -> Check:
    """A Chromium for the tests of the web workspace; nothing else needs one."""
    bundles = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    found = next(filter(None, map(shutil.which, _BROWSERS)), None) or next(map(str, bundles.glob("chromium*")), None)
    driver = importlib.util.find_spec("playwright") is not None
    if found and driver:
        return Check("chromium", "ok", f"{found} (for the tests of the web page)")
    steps = [] if driver else [f"{sys.executable} -m pip install playwright"]
    steps += [] if found else [f"{sys.executable} -m playwright install chromium"]
    what = " and ".join(["playwright"] * (not driver) + ["a browser"] * (not found))
    return Check("chromium", "warning", f"no {what}: the tests of the web page are skipped", " && ".join(steps))


def _requirements() -> list[Requirement]:
    """What the installed package says it needs, extras left out."""
    try:
        lines = importlib.metadata.requires("openk3") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = [Requirement(line) for line in lines]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def _pins() -> dict[str, str]:
    """Versions in constraints.txt, which lies beside the package in a source checkout; empty elsewhere."""
    pins: dict[str, str] = {}
    for line in _read(Path(openk3.__file__).parent.parent / "constraints.txt").splitlines():
        try:
            requirement = Requirement(line.partition("#")[0].strip())
        except InvalidRequirement:
            continue
        exact = [s.version for s in requirement.specifier if s.operator == "=="]
        if exact:
            pins[canonicalize_name(requirement.name)] = exact[0]
    return pins


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _disk_use(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
