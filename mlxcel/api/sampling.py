"""How tokens are to be chosen: llama-server's sampling fields, read and limited.

It owns their names, defaults and ranges. What llama-server leaves unlimited is limited here to more than is of any
use, so that float32 arithmetic stays finite. It does not know the vocabulary: what breaks a repetition is still text.
Invariant: a `Sampling` needs no further check, and no sampler raises on it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import cast

from mlxcel.api.fields import Fields, invalid
from mlxcel.engine.sequence import Adaptive, Dry, Mirostat, SamplerName, Sampling, Xtc
from mlxcel.settings import Settings
from mlxcel.settings_values import SAMPLER_LETTERS, sampler_name

MAX_INT = (1 << 31) - 1
RANDOM_SEED = 0xFFFFFFFF
MAX_SAMPLERS = 32  # a name may come twice
MAX_BREAKERS = 32
BREAKERS = ("\n", ":", '"', "*")
DRY_BASE = 1.75


def read_sampling(fields: Fields, settings: Settings) -> Sampling:
    """`logit_bias` and the breakers of DRY are still empty: they may name tokens by their text."""
    temperature = fields.number("temperature", settings.temperature, 0.0, 1e3)
    return Sampling(
        temperature=temperature if temperature >= 1e-5 else 0.0,
        dynatemp_range=fields.number("dynatemp_range", settings.dynatemp_range, 0.0, 1e3),
        dynatemp_exponent=fields.number("dynatemp_exponent", settings.dynatemp_exp, -100.0, 100.0),
        top_k=fields.clamped("top_k", settings.top_k, 0, MAX_INT),
        top_p=fields.number("top_p", settings.top_p, 0.0, 1.0),
        min_p=fields.number("min_p", settings.min_p, 0.0, 1.0),
        typical_p=fields.number("typical_p", settings.typical_p, 0.0, 1.0),
        top_n_sigma=fields.number("top_n_sigma", settings.top_n_sigma, -1e3, 1e3),
        min_keep=min(fields.integer("min_keep", default=0, low=0), MAX_INT),
        xtc=Xtc(
            probability=fields.number("xtc_probability", settings.xtc_probability, 0.0, 1.0),
            threshold=fields.number("xtc_threshold", settings.xtc_threshold, 0.0, 1.0),
        ),
        dry=_dry(fields, settings),
        mirostat=Mirostat(
            version=fields.clamped("mirostat", settings.mirostat, 0, 2),
            tau=fields.number("mirostat_tau", settings.mirostat_ent, 0.0, 1e3),
            eta=fields.number("mirostat_eta", settings.mirostat_lr, -1e3, 1e3),
        ),
        adaptive=Adaptive(
            target=fields.number("adaptive_target", settings.adaptive_target, -1.0, 1.0),
            decay=fields.limited("adaptive_decay", settings.adaptive_decay, 0.0, 0.99),
        ),
        order=_order(fields.raw("samplers"), settings),
        repeat_penalty=fields.number("repeat_penalty", settings.repeat_penalty, 1e-3, 1e3),
        repeat_last_n=_last_n(fields, "repeat_last_n", settings.repeat_last_n),
        presence_penalty=fields.number("presence_penalty", settings.presence_penalty, -1e3, 1e3),
        frequency_penalty=fields.number("frequency_penalty", settings.frequency_penalty, -1e3, 1e3),
        seed=_seed(fields.integer("seed", default=settings.seed)),
    )


def read_breakers(fields: Fields, settings: Settings) -> tuple[str, ...]:
    """What ends a repetition for DRY. On the command line `none` stands for nothing."""
    texts = fields.array("dry_sequence_breakers", None)
    if texts is None:
        return tuple(text for text in settings.dry_sequence_breaker or BREAKERS if text != "none")
    if not texts or not all(isinstance(text, str) for text in texts):
        raise invalid("dry_sequence_breakers", "expected a non-empty array of strings")
    if len(texts) > MAX_BREAKERS:
        raise invalid("dry_sequence_breakers", f"at most {MAX_BREAKERS} are supported")
    return tuple(texts)


def _dry(fields: Fields, settings: Settings) -> Dry:
    """A base below 1 is as good as none."""
    bases = (fields.number("dry_base", settings.dry_base, -1e6, 1e6), settings.dry_base, DRY_BASE)
    return Dry(
        multiplier=fields.number("dry_multiplier", settings.dry_multiplier, -1e3, 1e3),
        base=next(base for base in bases if base >= 1.0),
        allowed_length=min(fields.integer("dry_allowed_length", default=settings.dry_allowed_length, low=0), MAX_INT),
        last_n=_last_n(fields, "dry_penalty_last_n", settings.dry_penalty_last_n),
    )


def _last_n(fields: Fields, name: str, default: int) -> int:
    """-1 is all there are: older builds of llama-server had it so."""
    last_n = fields.integer(name, default=default, low=-1)
    return MAX_INT if last_n < 0 else min(last_n, MAX_INT)


def _order(value: object, settings: Settings) -> tuple[SamplerName, ...]:
    """An array of names or a string of letters; of those that are not known nothing comes, as in llama-server."""
    if value is None:
        if settings.explicit("sampler_seq") and not settings.explicit("samplers"):
            value = settings.sampler_seq
        else:
            value = settings.samplers.split(";")
    names: Iterable[str | None]
    if isinstance(value, str):
        names = map(SAMPLER_LETTERS.get, value)
    elif isinstance(value, list) and all(isinstance(name, str) for name in value):
        names = map(sampler_name, value)
    else:
        raise invalid("samplers", "expected an array of names or a string of letters")
    order = tuple(cast(SamplerName, name) for name in names if name)
    if len(order) > MAX_SAMPLERS:
        raise invalid("samplers", f"at most {MAX_SAMPLERS} are supported")
    return order


def _seed(seed: int) -> int:
    """32 bits as in llama-server, whose -1 (all bits set) asks for a random one."""
    seed &= RANDOM_SEED
    return secrets.randbelow(RANDOM_SEED) if seed == RANDOM_SEED else seed
