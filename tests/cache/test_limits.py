"""Which limits the store gets: explicit values unchanged, the rest off the model."""

import pytest

from mlxcel.cache.limits import UNLIMITED, choose_limits, choose_snapshot_limits, is_recurrent
from mlxcel.settings import parse

GIB = 1 << 30


def limits(*argv: str, config=None, bytes_per_token=131_072, left=None, n_ctx=131_072, environ=None):
    return choose_limits(parse(argv, environ or {}), config or {"model_type": "llama"}, bytes_per_token, left, n_ctx)


def test_llama_3_1_8b_gets_six_gibibytes_and_one_line_that_says_so(caplog):
    caplog.set_level("INFO")
    assert limits().capacity_bytes == 6 * GIB
    assert "Applied model-aware prompt-cache KV store capacity default" in caplog.text


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["--prompt-cache-capacity-bytes", "1000"], {}, 1000),
        ([], {"MLXCEL_PROMPT_CACHE_CAPACITY_BYTES": "1000"}, 1000),
        (["--cache-ram", "5"], {}, 5 << 20),
        (["--cache-ram", "-1"], {}, UNLIMITED),
        (["--cache-ram", "0"], {}, 0),
        (["--cache-ram", "5", "--prompt-cache-capacity-bytes", "1000"], {}, 1000),
    ],
)
def test_an_explicit_capacity_is_never_changed(argv, environ, expected, caplog):
    caplog.set_level("INFO")
    assert limits(*argv, environ=environ).capacity_bytes == expected
    assert "Applied" not in caplog.text


def test_a_smaller_context_makes_a_smaller_default():
    assert limits("--ctx-size", "4096", n_ctx=4096).capacity_bytes == 3 * GIB


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "jamba"},
        {"model_type": "qwen_vl", "text_config": {"model_type": "qwen3_next"}},
        {"model_type": "new", "architectures": ["FalconMambaForCausalLM"]},
        {"architectures": ["NemotronHForCausalLM"]},
    ],
)
def test_apc_is_off_for_models_with_recurrent_layers(config):
    assert is_recurrent(config)
    assert limits(config=config).block_size is None


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": "qwen3", "architectures": ["Qwen3"]}])
def test_apc_is_as_asked_for_all_others(config):
    assert limits(config=config).block_size == 16
    assert limits("--apc-block-size", "32", config=config).block_size == 32
    assert limits("--apc-enabled=false", config=config).block_size is None


def test_every_row_of_the_guide_reaches_the_limits():
    chosen = limits(
        "--prompt-cache-max-entries", "7", "--prompt-cache-ttl", "8", "--prompt-cache-min-prefix", "9",
        "--apc-num-blocks", "10", "--apc-hash", "blake3", "--no-prompt-cache",
    )  # fmt: skip
    assert (chosen.max_entries, chosen.ttl, chosen.min_prefix) == (7, 8, 9)
    assert (chosen.num_blocks, chosen.hash, chosen.enabled) == (10, "blake3", False)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [([], (32, None)), (["--swa-checkpoints", "4", "-cms", "256"], (4, 256)), (["-ctxcp", "0", "-cms", "0"], (0, 0))],
)
def test_llama_servers_checkpoints_are_the_snapshots_of_a_session(argv, expected):
    found = choose_snapshot_limits(parse(argv, {}), 1000, 0, None, 4096)
    assert (found.per_session, found.min_step) == expected and bool(found.room) is bool(expected[0])
