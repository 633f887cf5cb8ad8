"""Settings: every row of the table generically, then llama-server's parsing rules one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.errors import ConfigError
from mlxcel.settings import FALSE, TRUE, parse
from mlxcel.settings_table import TABLE
from mlxcel.usage import help_text

GOOD = {
    "int": "7", "float": "0.5", "str": "word", "list": "a,b", "json": '{"a": 1}', "bias": "5+1.5", "bytes": "2GiB",
    "switch": "true", "pair": "false", "bool": "false", "reuse": "7", "tristate": "on", "texts": "a,b", "exact": "1",
    "action": "",
}  # fmt: skip
VALUES = {
    "int": 7, "float": 0.5, "str": "word", "list": ("a", "b"), "json": {"a": 1}, "bias": ((5, 1.5),), "bytes": 2 << 30,
    "switch": True, "pair": False, "bool": False, "reuse": 7, "tristate": "on", "texts": ("a,b",), "exact": True,
    "action": True,
}  # fmt: skip
BAD = {
    "int": "7x", "float": "x", "json": "[", "bias": "x+1", "pair": "perhaps", "bool": "perhaps", "choice": "none!",
    "reuse": "x", "bytes": "2 apples", "tristate": "perhaps",
}  # fmt: skip
FILES = ("api_key_file", "chat_template_file", "chat_template", "api_prefix")
ACCEPTED = [r for r in TABLE if r.effect in ("works", "accepted")]
ROWS = [r for r in ACCEPTED if r.name not in FILES]


def good(row):
    if row.kind == "choice":
        return row.choices[-1]
    number = row.kind in ("int", "float", "reuse")
    fits = not number or (
        (row.low is None or row.low <= VALUES[row.kind]) and (row.high is None or row.high >= VALUES[row.kind])
    )
    return GOOD[row.kind] if fits else f"{row.low if row.low is not None else row.high:g}"


def value(row):
    text = good(row)
    if row.kind == "choice":
        return text
    return VALUES[row.kind] if text == GOOD[row.kind] else float(text)


@pytest.mark.parametrize("row", TABLE, ids=lambda r: r.name)
def test_a_row_has_its_default_when_nobody_says_anything(row):
    settings = parse([], {})
    assert getattr(settings, row.name) == row.default
    assert settings.origin(row.name) == "default" and not settings.explicit(row.name)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_every_flag_of_a_row_sets_it(row):
    for flag in row.flags:
        settings = parse([flag, good(row)] if row.takes_value else [flag], {})
        assert getattr(settings, row.name) == (value(row) if row.takes_value else True)
        assert settings.origin(row.name) == "command line"
    for flag in row.negative:
        assert getattr(parse([flag], {}), row.name) is False


@pytest.mark.parametrize("row", [r for r in ROWS if r.env], ids=lambda r: r.name)
def test_every_variable_of_a_row_sets_it(row):
    for name in row.env:
        settings = parse([], {name: good(row)})
        assert getattr(settings, row.name) == value(row)
        assert settings.origin(row.name) == f"environment {name}"


@pytest.mark.parametrize("row", [r for r in ROWS if r.kind in BAD], ids=lambda r: r.name)
def test_a_bad_value_names_its_flag_or_variable(row):
    if row.flags and row.kind != "pair":
        flag = row.flags[-1]
        with pytest.raises(ConfigError, match=f"^{flag}: "):
            parse([flag, BAD[row.kind]] if row.takes_value else [f"{flag}={BAD[row.kind]}"], {})
    for name in row.env:
        with pytest.raises(ConfigError, match=f"^{name}: "):
            parse([], {name: BAD[row.kind]})


@pytest.mark.parametrize("row", [r for r in ROWS if r.low is not None], ids=lambda r: r.name)
def test_a_number_below_its_range_is_refused(row):
    with pytest.raises(ConfigError, match=r"is less than|is not a number of bytes"):
        parse([row.flags[-1], str(int(row.low) - 1)], {})


@pytest.mark.parametrize("row", [r for r in ROWS if r.takes_value and r.flags], ids=lambda r: r.name)
def test_a_flag_without_its_value_is_refused_by_name(row):
    with pytest.raises(ConfigError, match=f"^{row.flags[0]} needs a value"):
        parse([row.flags[0]], {})


def test_no_flag_or_variable_belongs_to_two_rows():
    flags = [f for r in TABLE for f in (*r.flags, *r.negative)]
    names = [n for r in TABLE for n in r.env]
    assert len(flags) == len(set(flags)) and len(names) == len(set(names))


@pytest.mark.parametrize("row", [r for r in TABLE if r.effect in ("refused", "removed")], ids=lambda r: r.name)
def test_what_would_change_answers_is_refused_rather_than_ignored(row):
    for flag in row.flags:
        with pytest.raises(ConfigError, match=f"^{flag}( is not supported|: the argument has been removed)"):
            parse([flag, "x"], {})


# --- llama-server's rules


def test_underscores_in_long_flags_are_dashes():
    assert parse(["--ctx_size", "512"], {}).ctx_size == 512


def test_a_value_may_be_attached():
    assert parse(["--ctx-size=512"], {}).ctx_size == 512


def test_the_last_of_a_repeated_flag_wins_and_is_noted():
    settings = parse(["--port", "1", "--port", "2"], {})
    assert settings.port == 2 and "more than once" in settings.notes[0]


def test_the_command_line_beats_the_environment_and_says_so():
    settings = parse(["--port", "1"], {"LLAMA_ARG_PORT": "2"})
    assert settings.port == 1 and settings.notes == ("--port overrides LLAMA_ARG_PORT",)


def test_api_keys_add_up(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# comment\n\nfile-key\n")
    settings = parse(["--api-key", "a,b", "--api-key-file", str(file)], {"LLAMA_API_KEY": "env"})
    assert settings.api_key == ("env", "a", "b", "file-key")
    assert "env" not in str(settings.non_defaults()[-2:]) and "[redacted]" in str(settings.non_defaults())


@pytest.mark.parametrize("content", ["", "# only a comment\n"])
def test_a_key_file_without_keys_is_an_error(tmp_path, content):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigError, match="holds no key"):
        parse(["--api-key-file", str(file)], {})


def test_a_file_that_cannot_be_read_names_the_flag():
    with pytest.raises(ConfigError, match="--chat-template-file: cannot read /nowhere"):
        parse(["--chat-template-file", "/nowhere"], {})


@pytest.mark.parametrize("text", ["", "0", "false", "1"])
def test_the_negative_variable_of_a_pair_means_false_by_its_mere_presence(text):
    assert parse([], {"LLAMA_ARG_NO_CACHE_PROMPT": text, "LLAMA_ARG_CACHE_PROMPT": "true"}).cache_prompt is False


@pytest.mark.parametrize("word", TRUE)
def test_words_that_mean_true(word):
    assert parse([], {"LLAMA_ARG_ENDPOINT_METRICS": word, "APC_ENABLED": word.upper()}).metrics is True


@pytest.mark.parametrize("word", FALSE)
def test_words_that_mean_false(word):
    settings = parse([], {"LLAMA_ARG_ENDPOINT_METRICS": word, "APC_ENABLED": f" {word} "})
    assert settings.metrics is False and settings.apc_enabled is False


@pytest.mark.parametrize(
    ("word", "expected"),
    [("0", False), ("1", True), ("256", True), ("true", True), ("false", False), ("on", True), ("off", False),
     ("yes", True), ("no", False), ("enabled", True), ("disabled", False), ("TRUE", True), (" 0 ", False)],
)  # fmt: skip
def test_llama_arg_cache_reuse_takes_integers_and_booleans(word, expected):
    assert parse([], {"LLAMA_ARG_CACHE_REUSE": word}).prompt_cache_enabled is expected


def test_our_own_variable_is_read_before_the_llama_cpp_alias():
    environ = {"MLXCEL_PROMPT_CACHE_ENABLED": "true", "LLAMA_ARG_CACHE_REUSE": "0"}
    assert parse([], environ).prompt_cache_enabled is True
    assert parse(["--no-prompt-cache"], environ).prompt_cache_enabled is False
    assert parse(["--prompt-cache-enabled=false"], environ).prompt_cache_enabled is False


def test_cache_reuse_on_the_command_line_never_switches_the_cache_off():
    settings = parse(["--cache-reuse", "0"], {})
    assert settings.prompt_cache_enabled is True and not settings.without_effect()


def test_an_environment_file_written_for_llama_server_is_accepted():
    environ = {
        "LLAMA_ARG_MODEL": "/models/m.gguf", "LLAMA_ARG_CTX_SIZE": "8192", "LLAMA_ARG_N_PARALLEL": "4",
        "LLAMA_ARG_CACHE_REUSE": "256", "LLAMA_ARG_N_GPU_LAYERS": "99", "LLAMA_ARG_FLASH_ATTN": "on",
        "LLAMA_ARG_ENDPOINT_METRICS": "1", "LLAMA_API_KEY": "secret", "PATH": "/bin",
    }  # fmt: skip
    settings = parse([], environ)
    assert (settings.model, settings.ctx_size, settings.parallel) == ("/models/m.gguf", 8192, 4)
    assert settings.prompt_cache_enabled and settings.metrics and settings.api_key == ("secret",)
    assert set(settings.without_effect()) == {"LLAMA_ARG_N_GPU_LAYERS", "LLAMA_ARG_FLASH_ATTN"}


@pytest.mark.parametrize(
    "words", [["--nonsense"], ["word"], ["-x"], ["--metrics=1"], ["--port", "x"], ["--api-prefix", "x"]]
)
def test_nonsense_is_refused(words):
    with pytest.raises(ConfigError):
        parse(words, {})


@given(words=st.lists(st.text(max_size=8) | st.sampled_from([f for r in TABLE for f in r.flags]), max_size=6))
def test_any_command_line_parses_or_is_refused_in_one_line(words):
    try:
        parse([w for w in words if "file" not in w], {})
    except ConfigError as error:
        assert str(error)


def test_help_names_every_working_flag_and_variable_and_fits_its_width():
    text = help_text(80)
    for row in TABLE:
        if row.effect == "works":
            assert all(name in text for name in (*row.flags, *row.negative, *row.env)), row.name
    assert not [line for line in text.splitlines() if len(line) > 80 and not line.startswith("  -")]
