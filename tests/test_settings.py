"""Settings: every row of the table generically, then llama-server's parsing rules one by one."""

import ast
import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.errors import ConfigError
from mlxcel.loading import AUTOMATIC_SLOTS
from mlxcel.settings import parse
from mlxcel.settings_table import TABLE
from mlxcel.settings_values import FALSE, OWN_FALSE, OWN_TRUE, TRUE
from mlxcel.usage import asked_for, help_text

PACKAGE = Path(__file__).parent.parent / "mlxcel"

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
FILES = (
    "api_key_file", "chat_template_file", "chat_template", "api_prefix", "ssl_key_file", "ssl_cert_file",
    "grammar_file", "json_schema", "json_schema_file", "slot_save_path", "ui_config_file",
)  # fmt: skip
# Acted on by the parser itself, or by sources.py, which runs before there are settings for it.
READ_ELSEWHERE = {
    "help", "version", "cache_list", "list_devices", "completion_bash", "api_key_file", "chat_template_file",
    "cache_reuse", "escape", "cache_dir", "hub_cache", "grammar_file", "json_schema_file", "ui_config_file",
}  # fmt: skip
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
def test_words_that_mean_true_to_llama_server(word):
    settings = parse([], {"LLAMA_ARG_ENDPOINT_METRICS": word, "LLAMA_ARG_LOG_JSONL": word, "LLAMA_ARG_REASONING": word})
    assert settings.metrics is True and settings.log_jsonl is True and settings.reasoning == "on"


@pytest.mark.parametrize("word", FALSE)
def test_words_that_mean_false_to_llama_server(word):
    settings = parse([], {"LLAMA_ARG_ENDPOINT_METRICS": word, "LLAMA_ARG_JINJA": word, "LLAMA_ARG_REASONING": word})
    assert settings.metrics is False and settings.jinja is False and settings.reasoning == "off"
    assert settings.notes == ()


@pytest.mark.parametrize("word", ["yes", "TRUE", "True", "no", " 1"])
def test_other_words_are_as_good_as_none_for_a_switch_but_noted_and_wrong_for_a_pair(word):
    settings = parse([], {"LLAMA_ARG_ENDPOINT_METRICS": word})
    assert settings.metrics is False and not settings.explicit("metrics")
    assert settings.notes[0].startswith("LLAMA_ARG_ENDPOINT_METRICS has no effect")
    with pytest.raises(ConfigError, match=r"^LLAMA_ARG_CACHE_PROMPT: invalid boolean value"):
        parse([], {"LLAMA_ARG_CACHE_PROMPT": word})


@pytest.mark.parametrize("word", [*OWN_TRUE, *OWN_FALSE])
@pytest.mark.parametrize("form", [str, str.upper, str.title, " {} ".format])
def test_our_own_booleans_are_read_in_any_case(word, form):
    expected = word in OWN_TRUE
    assert parse([], {"APC_ENABLED": form(word)}).apc_enabled is expected
    assert parse([f"--prompt-cache-enabled={form(word)}"], {}).prompt_cache_enabled is expected


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("true", False), ("0", False), ("", False)])
def test_diagnostics_act_on_a_literal_1_only(text, expected):
    assert parse([], {"MLXCEL_APC_TRACE": text}).apc_trace is expected


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
    assert parse(["--cache-reuse", "0"], {"LLAMA_ARG_CACHE_REUSE": "0"}).prompt_cache_enabled is True
    with pytest.raises(ConfigError, match="--cache-reuse"):
        parse(["--cache-reuse", "false"], {})


def test_cache_reuse_above_0_switches_the_cache_on_unless_our_own_names_say_otherwise():
    off = {"MLXCEL_PROMPT_CACHE_ENABLED": "false"}
    assert parse(["--cache-reuse", "256"], {"LLAMA_ARG_CACHE_REUSE": "0"}).prompt_cache_enabled is True
    assert parse(["--cache-reuse", "256"], off).prompt_cache_enabled is False
    assert parse(["--cache-reuse", "256", "--no-prompt-cache"], {}).prompt_cache_enabled is False


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


@pytest.mark.parametrize("text", ["1_0", "\N{ARABIC-INDIC DIGIT ONE}", "1.5", "12abc", "0x10", "", "9" * 5000])
def test_an_integer_is_plain_decimal_digits(text):
    with pytest.raises(ConfigError, match=r"^--ctx-size: "):
        parse(["--ctx-size", text], {})


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e39", "0_1", ""])
def test_a_number_is_finite(text):
    with pytest.raises(ConfigError, match=r"^LLAMA_ARG_TEMPERATURE: "):
        parse([], {"LLAMA_ARG_TEMPERATURE": text})


def test_an_integer_fits_32_bits_unless_its_row_says_otherwise():
    assert parse(["--seed", "4294967295"], {}).seed == 0xFFFFFFFF
    with pytest.raises(ConfigError, match="--ctx-size: 2147483648 is more than 2147483647"):
        parse(["--ctx-size", "2147483648"], {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("4096", 4096), ("2G", 2 << 30), ("2GiB", 2 << 30), ("1 kb", 1024), ("3m", 3 << 20)],
)
def test_sizes_may_have_binary_units(text, expected):
    assert parse(["--prompt-cache-capacity-bytes", text], {}).prompt_cache_capacity_bytes == expected


def test_lists_follow_the_rules_of_csv():
    assert parse(["--alias", 'b, "a,1" ,,"say ""hi"""'], {}).alias == ("b", '"a', '1"', 'say "hi"')
    assert parse(["--alias", '"a,1",b'], {}).alias == ("a,1", "b")
    with pytest.raises(ConfigError, match=r"^--alias: not a comma-separated list"):
        parse(["--alias", "a\rb"], {})


@pytest.mark.parametrize("text", ["sha256", "SHA-256", " sha-256 "])
def test_a_hash_has_one_name_whatever_its_spelling(text):
    assert parse([], {"APC_HASH": text}).apc_hash == "sha256"


def test_biases_add_up():
    settings = parse(["-l", "15043+1", "-l", "2-0.5", "--logit-bias=7-inf"], {})
    assert settings.logit_bias == ((15043, 1.0), (2, -0.5), (7, float("-inf"))) and settings.notes == ()


@pytest.mark.parametrize("text", ["1", "1+", "+1", "1+inf", "1+nan", "-1+1", "1+20000", "99999999999+1"])
def test_a_bias_that_would_break_the_logits_is_refused(text):
    with pytest.raises(ConfigError, match=r"^--logit-bias: "):
        parse(["--logit-bias", text], {})


@pytest.mark.parametrize("text", ["[]", '"a"', "{", '{"a": NaN}', "[" * 100_000])
def test_template_variables_are_a_json_object(text):
    with pytest.raises(ConfigError, match=r"^--chat-template-kwargs: "):
        parse(["--chat-template-kwargs", text], {})


def test_stop_texts_add_up_and_their_escapes_are_read():
    words = ["-r", r"a\n", "-r", r"\x41\xea\xb0\x80\q\\", "-r", "가"]
    assert parse(words, {}).reverse_prompt == ("a\n", "A가\\q\\", "가")
    assert parse([*words, "--no-escape"], {}).reverse_prompt == (r"a\n", r"\x41\xea\xb0\x80\q\\", "가")


def test_breakers_are_read_like_stop_texts():
    assert parse(["--dry-sequence-breaker", r"\n", "--dry-sequence-breaker", "x"], {}).dry_sequence_breaker == (
        "\n",
        "x",
    )
    assert parse(["--dry-sequence-breaker", r"\n", "--no-escape"], {}).dry_sequence_breaker == (r"\n",)


def test_a_sampler_that_does_not_exist_is_noted():
    assert parse(["--samplers", "top-k;temp;", "--sampler-seq", "kt"], {}).notes == ()
    assert parse(["--samplers", "top_k;tmp"], {}).notes == ("--samplers: 'tmp' is no sampler, and left out",)
    assert parse(["--sampler-seq", "k?"], {}).notes == ("--sampler-seq: '?' is no sampler, and left out",)


def test_a_template_typed_or_named_on_the_command_line_beats_the_environment(tmp_path):
    file = tmp_path / "template"
    file.write_text("{{ file }}")
    by_file, by_text = ["--chat-template-file", str(file)], ["--chat-template", "{{ text }}"]
    environ = {"LLAMA_ARG_CHAT_TEMPLATE": "{{ variable }}"}
    assert parse([], environ).chat_template == "{{ variable }}"
    assert parse(by_file, environ).chat_template == "{{ file }}"
    assert parse(by_text, {"LLAMA_ARG_CHAT_TEMPLATE_FILE": str(file)}).chat_template == "{{ text }}"
    assert parse(by_text + by_file, {}).chat_template == "{{ file }}"


def test_the_name_of_a_built_in_template_is_not_taken_for_its_text():
    with pytest.raises(ConfigError, match=r"^LLAMA_ARG_CHAT_TEMPLATE: built-in templates"):
        parse([], {"LLAMA_ARG_CHAT_TEMPLATE": "chatml"})


@pytest.mark.parametrize("name", ["API_KEY_FILE", "CHAT_TEMPLATE_FILE", "SSL_KEY_FILE"])
@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_named_by_a_variable_and_not_readable_names_the_variable(tmp_path, name, content):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^LLAMA_ARG_{name}: cannot read "):
        parse([], {f"LLAMA_ARG_{name}": str(file)})


def test_the_form_of_all_replies_is_typed_or_in_a_file(tmp_path):
    grammar, schema = tmp_path / "g.gbnf", tmp_path / "s.json"
    grammar.write_text('root ::= "é"')
    schema.write_text('{"b": 1,\n"a": "é"}')
    assert parse(["--grammar-file", str(grammar)], {}).grammar == 'root ::= "é"'
    assert parse(["--json-schema", '{"b":1}'], {}).json_schema == '{"b": 1}'
    for flag in ("--json-schema-file", "-jf"):
        assert parse([flag, str(schema)], {}).json_schema == '{"b": 1, "a": "é"}'


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--grammar-file", "/no/such"], "--grammar-file: cannot read"),
        (["--json-schema", "{"], "--json-schema: not JSON"),
        (["--grammar", "x", "--grammar-file", "y"], "--grammar and --grammar-file cannot be combined"),
        (["--grammar", "x", "--json-schema", "{}"], "--grammar and --json-schema cannot be combined"),
    ],
)
def test_a_form_that_cannot_be_read_or_is_given_twice_is_refused_by_name(words, error):
    with pytest.raises(ConfigError, match=f"^{error}"):
        parse(words, {})


def test_settings_of_the_page_are_a_json_object_typed_or_in_a_file(tmp_path):
    file = tmp_path / "page.json"
    file.write_text('{"a": 1}')
    assert parse(["--webui-config", '{"b": 2}'], {}).ui_config == {"b": 2}
    assert parse(["--ui-config-file", str(file)], {"LLAMA_ARG_UI_CONFIG": '{"b": 2}'}).ui_config == {"a": 1}
    assert parse(["--ui-config", '{"b": 2}'], {"LLAMA_ARG_UI_CONFIG_FILE": str(file)}).ui_config == {"b": 2}
    for text in ("[]", "{", "1"):
        with pytest.raises(ConfigError, match="^--ui-config: "):
            parse(["--ui-config", text], {})
        file.write_text(text)
        with pytest.raises(ConfigError, match="^LLAMA_ARG_UI_CONFIG_FILE: "):
            parse([], {"LLAMA_ARG_UI_CONFIG_FILE": str(file)})


def test_saved_slots_need_a_folder_that_exists(tmp_path):
    assert parse(["--slot-save-path", str(tmp_path)], {}).slot_save_path == str(tmp_path)
    with pytest.raises(ConfigError, match="^--slot-save-path: .* is not a folder"):
        parse(["--slot-save-path", str(tmp_path / "none")], {})


def test_https_needs_both_files(tmp_path):
    pem = tmp_path / "pem"
    pem.write_text("x")
    with pytest.raises(ConfigError, match=r"^--ssl-cert-file is missing"):
        parse(["--ssl-key-file", str(pem)], {})
    with pytest.raises(ConfigError, match=r"^--ssl-key-file is missing"):
        parse(["--ssl-cert-file", str(pem)], {})
    assert parse(["--ssl-cert-file", str(pem), "--ssl-key-file", str(pem)], {}).ssl_key_file == str(pem)


@pytest.mark.parametrize("text", ["", ",", " , ", '""'])
def test_a_flag_for_a_key_without_a_key_does_not_open_the_server(text):
    with pytest.raises(ConfigError, match=r"^--api-key: there is no key in it"):
        parse(["--api-key", text], {})


def test_an_empty_variable_for_a_key_is_as_good_as_none_and_noted():
    settings = parse([], {"LLAMA_API_KEY": ""})
    assert settings.api_key == () and settings.notes == ("LLAMA_API_KEY is empty, as if it were not set",)


def test_a_flag_is_not_taken_for_the_value_of_the_flag_before():
    with pytest.raises(ConfigError, match=r"^--api-key needs a value: KEY"):
        parse(["--api-key", "--metrics"], {})
    assert parse(["--n-predict", "-1", "-r", "--"], {}).reverse_prompt == ("--",)


@pytest.mark.parametrize(
    ("host", "port", "fails"),
    [
        ("127.0.0.1", "0", False),
        ("127.0.0.1,::1", "8080", False),
        ("127.0.0.1,/run/a.sock", "0", False),
        ("127.0.0.1,::1", "0", True),
        ("", "8080", True),
        ("127.0.0.1,", "8080", True),
    ],
)
def test_addresses_are_checked_before_anything_is_loaded(host, port, fails):
    words = ["--host", host, "--port", port]
    if not fails:
        assert parse(words, {}).host == host
        return
    with pytest.raises(ConfigError, match=r"--host|--port"):
        parse(words, {})


def test_the_prefix_of_the_routes_has_no_slash_at_its_end():
    assert [parse(["--api-prefix", p], {}).api_prefix for p in ("/llm", "/llm/", "/", "")] == ["/llm", "/llm", "", ""]


def test_among_the_variables_of_a_row_the_first_wins():
    assert parse([], {"LLAMA_ARG_UBATCH": "512", "MLXCEL_PREFILL_CHUNK": "64"}).ubatch_size == 64


def test_a_misspelt_variable_is_noted_and_others_are_not():
    settings = parse([], {"MLXCEL_PROMT_CACHE_TTL": "1", "LLAMA_ARG_NO_JINJA": "", "LLAMA_CACHE": "/x", "HOME": "/"})
    assert settings.notes == ("MLXCEL_PROMT_CACHE_TTL is no variable of this server",)


def test_a_misspelt_flag_is_told_its_neighbour():
    with pytest.raises(ConfigError, match=r"^invalid argument: --ctx-siez=1 \(did you mean --ctx-size\?\); see --help"):
        parse(["--ctx-siez=1"], {})


def test_what_asks_for_the_default_is_not_called_without_effect():
    settings = parse(
        ["--jinja", "-fa", "auto", "--no-mmap"], {"LLAMA_ARG_NO_MMPROJ_AUTO": "1", "LLAMA_ARG_THREADS": "-1"}
    )
    assert settings.without_effect() == ["--no-mmap", "LLAMA_ARG_NO_MMPROJ_AUTO"]


def test_secrets_are_in_no_log_line():
    settings = parse(["--api-key", "hush"], {"HF_TOKEN": "quiet"})
    shown = " ".join(settings.non_defaults())
    assert "hush" not in shown + repr(settings) and "quiet" not in shown + repr(settings) and "[redacted]" in shown


def test_settings_do_not_change():
    settings = parse(["--port", "1"], {})
    with pytest.raises(AttributeError, match="cannot be changed"):
        settings.port = 2
    with pytest.raises(AttributeError, match="no setting 'prot'"):
        settings.prot  # noqa: B018
    assert copy.copy(settings).port == 1


# --- the table and the rest of the program


def attributes_read():
    """Names that the program reads off something called settings."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "settings":
                yield node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("settings.origin", "settings.explicit")
            ):
                yield node.args[0].value


def test_the_program_reads_settings_that_exist_and_all_those_that_are_said_to_work():
    read = set(attributes_read()) - {"parse", "notes", "origin", "source", "explicit", "non_defaults", "without_effect"}
    works = {row.name for row in TABLE if row.effect == "works"}
    assert read - works == set()
    assert works - read == READ_ELSEWHERE


def test_the_help_says_how_many_slots_automatic_is():
    row = next(row for row in TABLE if row.name == "parallel")
    assert f"-1 is {AUTOMATIC_SLOTS}," in row.help and row.default_text == f"-1: {AUTOMATIC_SLOTS}"


@pytest.mark.parametrize("flag", ["-h", "--help", "--usage"])
def test_help_is_given_whatever_else_is_wrong(flag):
    assert asked_for(["--port", "x", flag]) == "help"
    assert asked_for(["--version", "--help"]) == "version" and asked_for(["--port", "1"]) is None


@given(words=st.lists(st.text(max_size=8) | st.sampled_from([f for r in TABLE for f in r.flags]), max_size=6))
def test_any_command_line_parses_or_is_refused_in_one_line(words):
    try:
        parse([w for w in words if "file" not in w], {})
    except ConfigError as error:
        assert str(error)


@given(row=st.sampled_from([r for r in ROWS if r.env and r.flags and r.kind != "pair"]), text=st.text(max_size=12))
def test_a_variable_is_read_like_its_flag_or_refused_by_name(row, text):
    """Whatever the text: its row's type and range, or one error that begins with the variable."""
    try:
        by_variable = getattr(parse([], {row.env[0]: text}), row.name)
    except ConfigError as error:
        assert str(error).startswith(row.env[0])
        return
    if row.takes_value and row.kind != "reuse" and text and not text.startswith("--"):
        assert getattr(parse([row.flags[0], text], {}), row.name) == by_variable


@given(number=st.integers(-(1 << 40), 1 << 40), row=st.sampled_from([r for r in ROWS if r.kind == "int" and r.flags]))
def test_an_integer_arrives_as_it_was_given_or_is_out_of_its_range(number, row):
    low, high = (-(2**31) if row.low is None else row.low), (2**31 - 1 if row.high is None else row.high)
    try:
        assert getattr(parse([row.flags[0], str(number)], {}), row.name) == number
        assert low <= number <= high
    except ConfigError:
        assert not low < number <= high


def test_help_names_every_working_flag_and_variable_and_fits_its_width():
    text = help_text(80)
    for row in TABLE:
        if row.effect == "works":
            assert all(name in text for name in (*row.flags, *row.negative, *row.env)), row.name
    assert not [line for line in text.splitlines() if len(line) > 80 and not line.startswith("  -")]
