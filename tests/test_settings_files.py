"""llama.cpp's configuration files: where they are, what counts in them, and what they yield to."""

import pytest

from mlxcel.__main__ import main
from mlxcel.errors import ConfigError
from mlxcel.settings import parse
from mlxcel.settings_files import config_files, read_options


@pytest.fixture
def files(tmp_path):
    """Writes the machine's and the user's file and returns those that there are."""

    def write(system=None, user=None):
        home = tmp_path / "home"
        (home / ".config" / "llama.cpp").mkdir(parents=True)
        for path, text in ((tmp_path / "etc.ini", system), (home / ".config" / "llama.cpp" / "config.ini", user)):
            if text is not None:
                path.write_text(text)
        return config_files({"HOME": str(home)}, tmp_path / "etc.ini")

    return write


def test_a_machine_without_such_files_has_none(tmp_path):
    assert config_files({"HOME": str(tmp_path)}, tmp_path / "none") == config_files({}, tmp_path / "none") == []


def test_the_users_folder_of_configurations_may_be_moved(tmp_path):
    (tmp_path / "moved" / "llama.cpp").mkdir(parents=True)
    (tmp_path / "moved" / "llama.cpp" / "config.ini").write_text("port = 1")
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "moved")}
    assert config_files(environ, tmp_path / "none") == [tmp_path / "moved" / "llama.cpp" / "config.ini"]


def test_command_line_environment_users_and_machines_file_win_in_this_order(files):
    found = files("port = 1\nctx-size = 1\ntop-k = 1\nparallel = 1\n", "port = 2\nctx-size = 2\ntop-k = 2\n")
    settings = parse(["--port", "4"], {"LLAMA_ARG_PORT": "3", "LLAMA_ARG_CTX_SIZE": "3"}, found)
    assert (settings.port, settings.ctx_size, settings.top_k, settings.parallel) == (4, 3, 2, 1)
    assert settings.origin("top_k") == f"{found[1]}: top-k" and settings.origin("parallel") == f"{found[0]}: parallel"


@pytest.mark.parametrize("key", ["ctx-size", "ctx_size", "c", "LLAMA_ARG_CTX_SIZE"])
def test_an_option_is_a_flag_without_its_dashes_or_a_variable(files, key):
    assert parse([], {}, files(f"{key} = 512")).ctx_size == 512


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("metrics = on", "metrics", True),
        ("metrics = off", "metrics", False),
        ("cache-prompt = off", "cache_prompt", False),
        ("no-cache-prompt = true", "cache_prompt", False),
        ("no-cache-prompt = off", "cache_prompt", True),
        ("no-warmup=1", "warmup", False),
        ('chat-template-kwargs = {"a": "b = c"}', "chat_template_kwargs", {"a": "b = c"}),
        ("  host =  0.0.0.0 ; all of them", "host", "0.0.0.0"),
        ("host = a#b", "host", "a"),
        ("; host = b", "host", "127.0.0.1"),
    ],
)
def test_values_are_read_as_those_of_variables(files, line, name, value):
    assert getattr(parse([], {}, files(line)), name) == value


def test_only_the_sections_for_all_models_count_and_the_default_one_wins(files):
    text = "port = 1\n[*]\nport = 2\ntop-k = 2\n[some model]\ntop-k = 3\nno such = key\n[default]\nparallel = 4\n"
    settings = parse([], {}, files(text))
    assert (settings.port, settings.top_k, settings.parallel) == (1, 2, 4) and settings.notes == ()


def test_keys_of_all_sources_count(files):
    found = files("api-key = machine", "api-key = user,second")
    settings = parse(["--api-key", "typed"], {"LLAMA_API_KEY": "variable"}, found)
    assert settings.api_key == ("machine", "user", "second", "variable", "typed")


def test_what_this_program_does_not_know_is_noted_and_ignored(files):
    found = files("color = on\nhelp = 1\nport = 1")
    assert parse([], {}, found).notes == tuple(
        f"{found[0]}: {key} is no option of this server" for key in ("color", "help")
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [("port = x", "port: 'x' is not a"), ("lora = a", "lora is not supported"), ("\nport", "line 2 is")],
)
def test_an_error_names_the_file_and_the_option(files, text, error):
    found = files(text)
    with pytest.raises(ConfigError, match=f"^{found[0]}: {error}"):
        parse([], {}, found)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "x.ini").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"^cannot read .*x\.ini: not UTF-8"):
        list(read_options(tmp_path / "x.ini"))


def test_0_for_reuse_is_llama_cpps_default_and_switches_nothing_off(files):
    assert parse([], {}, files("cache-reuse = 0")).prompt_cache_enabled


def test_the_program_reads_them(tmp_path, monkeypatch, capsys):
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "config.ini").write_text("port = x")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main([]) == 2
    assert f"{tmp_path}/llama.cpp/config.ini: port: 'x'" in capsys.readouterr().err
