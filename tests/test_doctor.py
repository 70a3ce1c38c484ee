"""The doctor on this machine, and on others that its checks are told about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from openk3 import doctor
from openk3.doctor import Check, diagnose, healthy, report_json, report_text
from openk3.engine.threads import default_threads, usable_cores

MEMORY = "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:   {} kB\n"


def test_this_machine() -> None:
    checks = diagnose()
    names = [check.name for check in checks]
    for name in (
        "python",
        "cores",
        "instruction set",
        "memory",
        "disk",
        "models",
        "kernels",
        "torch threads",
        "MKL mode",
        "chromium",
    ):
        assert name in names
    assert len(set(names)) == len(names)
    assert healthy(checks)
    assert all(check.found for check in checks)
    incurable = ("memory", "instruction set")
    assert all(check.fix or check.status == "ok" or check.name in incurable for check in checks)
    assert report_json(checks)["ok"] is True
    assert report_text(checks).endswith("everything that is required is here")


def test_report() -> None:
    checks = [
        Check("a", "ok", "fine"),
        Check("b", "warning", "hm", "do this"),
        Check("c", "missing", "gone", "do that"),
    ]
    assert not healthy(checks)
    assert healthy(checks[:2])
    lines = [line.rstrip() for line in report_text(checks).splitlines()]
    assert [line.split() for line in lines[:3]] == [["ok", "a", "fine"], ["warning", "b", "hm"], ["->", "do", "this"]]
    assert lines[-1] == "1 required things are missing"


def test_old_python() -> None:
    assert doctor.check_python((3, 13, 0)).status == "ok"
    old = doctor.check_python((3, 10, 4))
    assert (old.status, old.fix) == ("missing", "python3.11 -m venv .venv")
    assert "OpenK3 needs 3.11 or newer" in old.found


def test_container_limits() -> None:
    assert doctor.usable_cores("50000 100000") == 1
    assert doctor.usable_cores("max 100000") == doctor.usable_cores("") >= 1
    small = doctor.check_ram(MEMORY.format(12_000_000), "1000000000\n")
    assert (small.status, small.found.split(";")[0]) == ("warning", "1.0 GB free of 1.0 GB")


def test_memory() -> None:
    assert doctor.check_ram(MEMORY.format(8_000_000), "max") == Check("memory", "ok", "8.2 GB free of 16.4 GB")
    assert doctor.check_ram(MEMORY.format(500_000), "").status == "warning"
    assert doctor.check_ram("", "").status in ("ok", "warning")  # no /proc: what sysconf knows


def test_instruction_sets() -> None:
    new = doctor.check_isa("model name\t: Fast\nflags\t\t: sse avx2 fma avx512_vnni\n", "x86_64")
    assert (new.status, new.found) == ("ok", "x86_64 avx2 fma avx512_vnni (Fast)")
    old = doctor.check_isa("flags\t\t: sse\n", "x86_64")
    assert old.status == "warning"
    assert "without AVX2" in old.found
    assert doctor.check_isa("", "arm64") == Check("instruction set", "ok", "arm64")


def test_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENK3_HOME", str(tmp_path / "not" / "yet"))
    disk, models = doctor.check_cache()
    assert disk.status in ("ok", "warning")
    assert str(tmp_path / "not" / "yet") in disk.found
    assert (models.status, models.fix) == ("warning", "k3 pull smollm2-135m")
    assert models.found == "none; the default one is not here"


def test_a_cache_below_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPENK3_HOME", str(tmp_path / "file" / "cache"))
    disk, _ = doctor.check_cache()
    assert (disk.status, disk.found) == ("missing", f"{tmp_path / 'file' / 'cache'} cannot be written")


def test_a_cache_with_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENK3_HOME", str(tmp_path))
    for name in ("smollm2-135m-abc", "other"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    (tmp_path / "models" / ".making-x").mkdir()
    _, models = doctor.check_cache()
    assert (models.status, models.found) == ("ok", "other (0 MB), smollm2-135m-abc (0 MB)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("OPENK3_HOME", str(tmp_path))
    disk, _ = doctor.check_cache()
    assert disk.status == "missing"
    assert disk.fix == "export OPENK3_HOME=/a/directory/with/room"


def test_packages() -> None:
    version = doctor.importlib.metadata.version("typer")
    required = [
        Requirement(line) for line in ("typer>=0.1", "typer>=999", "jinja2>=3", "no-such-package-here>=1", "torch>=2")
    ]
    good, new, absent, torch, others = doctor.check_packages([*required[:1], *required[1:]], {"typer": "0.0.1"})
    assert (good.status, good.found) == ("warning", f"{version}; tested with 0.0.1")
    assert (new.status, new.found) == ("missing", f"{version}; OpenK3 needs >=999")
    assert absent == Check(
        "no-such-package-here",
        "missing",
        "not installed",
        f"{sys.executable} -m pip install 'no-such-package-here>=1'",
    )
    assert (torch.name, torch.status) == ("torch", "ok")
    assert (others.name, others.found) == ("other packages", "1 required packages are installed in versions that fit")


def test_a_local_build_of_the_pinned_version_is_fine() -> None:
    version = doctor.importlib.metadata.version("torch").partition("+")[0]
    torch, _ = doctor.check_packages([Requirement("torch")], {"torch": f"{version}+other"})
    assert torch.status == "ok"


def test_packages_of_a_checkout_that_is_not_installed() -> None:
    (check,) = doctor.check_packages([], {})
    assert check.status == "warning"
    assert " -m pip install --editable " in check.fix


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from openk3 import kernels
    from openk3.kernels import describe

    monkeypatch.setattr(kernels, "are_compiled", lambda: True)
    good = doctor.check_kernels(2, {"OMP_NUM_THREADS": "2"})
    assert (good.status, good.found.split(";")[0]) == (
        "ok",
        f"{describe()}, 2 threads (OMP_NUM_THREADS=2), compiled",
    )
    few = doctor.check_kernels(4, {"OMP_NUM_THREADS": "1"})
    assert (few.status, few.fix) == ("warning", "unset OMP_NUM_THREADS")
    assert few.found == f"{describe()}, 1 thread (OMP_NUM_THREADS=1) of 4 cores are used"
    many = doctor.check_kernels(1, {"OMP_NUM_THREADS": "3"})
    assert (many.status, many.fix) == ("warning", "export OMP_NUM_THREADS=1")
    monkeypatch.setattr(kernels, "are_compiled", lambda: False)
    cold = doctor.check_kernels(2, {"OMP_NUM_THREADS": "2"})
    assert (cold.status, cold.fix) == ("warning", "k3 pull smollm2-135m")
    assert cold.found.endswith(", not compiled yet: the first answer waits for that, up to a minute")
    monkeypatch.setitem(sys.modules, "openk3.kernels", None)
    broken = doctor.check_kernels(2, {})
    assert (broken.status, broken.found.split(":")[0]) == (
        "missing",
        "they cannot be imported, only PyTorch can run models",
    )


def test_a_machine_without_compiled_kernels_uses_torch() -> None:
    """Numba's switch stands for all that the kernels may lack: the first answer comes from PyTorch, and says so."""
    ask = "import openk3\nwith openk3.load('smollm2-135m') as llm: print(llm.generate(prompt='Hello', max_tokens=2))"
    code = f"from openk3.doctor import check_kernels\nprint(check_kernels(2, {{}}).found)\n{ask}\n"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("not used, as NUMBA_DISABLE_JIT is set: PyTorch runs the models")
    assert "finish_reason='length'" in run.stdout


def test_default_threads() -> None:
    assert default_threads({"OMP_NUM_THREADS": "3"}) == default_threads({"OMP_NUM_THREADS": "003"}) == 3
    assert default_threads({"OMP_NUM_THREADS": "40000"}) == default_threads({"OMP_NUM_THREADS": "9" * 6000}) == 256
    assert default_threads({}) == default_threads({"OMP_NUM_THREADS": "0"}) == usable_cores() >= 1


def test_threads() -> None:
    import torch

    threads = torch.get_num_threads()
    assert doctor.check_torch(threads, {}) == Check("torch threads", "ok", str(threads))
    few = doctor.check_torch(threads + 1, {"OMP_NUM_THREADS": "1"})
    assert (few.status, few.fix) == ("warning", "unset OMP_NUM_THREADS")
    many = doctor.check_torch(threads - 1, {})
    assert (many.status, many.fix) == ("warning", f"export OMP_NUM_THREADS={threads - 1}")


def test_reproducibility() -> None:
    assert doctor.check_reproducibility({"MKL_CBWR": "AVX2,STRICT"}).status == "ok"
    for mode in ({}, {"MKL_CBWR": "AVX2"}):
        check = doctor.check_reproducibility(mode)
        assert (check.status, check.fix) == ("warning", "unset MKL_CBWR")


def test_no_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    check = doctor.check_browser()
    assert check.status == "warning"
    assert check.fix == f"{sys.executable} -m pip install playwright && {sys.executable} -m playwright install chromium"
    (tmp_path / "chromium-1234").mkdir()
    monkeypatch.undo()
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    assert doctor.check_browser().status in ("ok", "warning")
