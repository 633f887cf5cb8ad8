"""A three-turn chat over HTTP with a tiny model of a family, against its cold twin, alone and beside two others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from mlxcel.engine.model import LoadedModel
from tests.http.serving import Served, encode, serving

NEW_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ROUTE = "/v1/chat/completions"
SYSTEM = "You are a careful assistant who answers in few words and never makes anything up, whoever it is that asks."
TURNS = ("What is the tallest mountain that anybody has ever climbed?", "And the second one?", "Who was there first?")


@dataclass(frozen=True, slots=True)
class Turn:
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    text: str
    prompt: int
    cached: int
    history: int

    @property
    def share(self) -> float:
        """How much of the history was not computed again; what any next message begins with does not count."""
        return min(self.cached / self.history, 1.0)

    def assert_same(self, other: Turn) -> None:
        assert self.tokens == other.tokens
        assert all(abs(a - b) < 1e-3 for a, b in zip(self.logprobs, other.logprobs, strict=True))


@dataclass
class Chat:
    served: Served
    session: str
    system: str = SYSTEM
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def ask(self, text: str, **members: Any) -> Turn:
        """Without adding to the conversation."""
        messages = [{"role": "system", "content": self.system}, *self.messages, {"role": "user", "content": text}]
        body = {
            "messages": messages,
            "temperature": 0,
            "max_tokens": 10,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 2,
            "prompt_cache_key": self.session,
        }
        status, answer = await self.served.post(ROUTE, body | members)
        assert status == 200, answer
        choice, usage = answer["choices"][0], answer["usage"]
        said = choice["logprobs"]["content"]
        return Turn(
            tuple(bytes(item["bytes"]) for item in said),
            tuple(item["logprob"] for item in said),
            choice["message"]["content"],
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["prompt_tokens"] - len(encode(NEW_TURN.format(text))),
        )

    async def turn(self, text: str) -> Turn:
        turn = await self.ask(text)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": turn.text}]
        return turn


@dataclass(frozen=True, slots=True)
class Outcome:
    """Turns as they were answered: with the cache, with next turns computed ahead as well, and beside others."""

    plain: list[Turn]
    warmed: list[Turn]
    beside: list[Turn]


async def three_turns(model: LoadedModel, pool: Any) -> Outcome:
    """Run it all; every answer has been held against its cold twin."""
    async with serving(model=model, pool=pool, disable_cache_warmup=True) as served:
        plain, cold = await _alone(served, "plain")
        chats = [Chat(served, "beside"), Chat(served, "b", SYSTEM[:60]), Chat(served, "c", SYSTEM[30:] * 2)]
        beside = []
        for text, twin in zip(TURNS, cold, strict=True):
            turn, *_ = await asyncio.gather(*(chat.turn(text) for chat in chats))
            turn.assert_same(twin)
            beside.append(turn)
    async with serving(model=model, pool=pool) as served:
        warmed, _ = await _alone(served, "warmed")
    return Outcome(plain, warmed, beside)


async def _alone(served: Served, session: str) -> tuple[list[Turn], list[Turn]]:
    chat, turns, twins = Chat(served, session), [], []
    for text in TURNS:
        twins.append(await chat.ask(text, cache_prompt=False))
        assert twins[-1].cached == 0
        turns.append(await chat.turn(text))
        turns[-1].assert_same(twins[-1])
        await _warmed_up(served, len(turns))
    return turns, twins


async def _warmed_up(served: Served, num: int) -> None:
    totals = served.services.snapshots.totals
    if served.scheduler.warms:
        await served.until(lambda: totals.warmups_run + totals.warmups_skipped >= num)
