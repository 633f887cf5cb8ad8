"""Multi-turn chats against a running mlxcel server: how much of their prompts is cached, and whether it shows.

    python benchmarks/chats.py [URL] [--sessions 8] [--turns 6] [--tokens 32] [--system 16]

Sessions take turns, so that each finds the others' entries between its own. Every answer is compared with its cold
twin (the same request with cache_prompt: false): equal tokens, or a first difference where the cold run's two best
tokens lie within 0.05, and first-token log-probabilities within 1e-3. Prints the share of prompt tokens that was
cached from turn 2 on, and exits with 1 if an answer differed. `--system` is the length of the system prompt in
sentences of 16 tokens: 40 of them go past the 512-token window of a Gemma 3.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

import aiohttp

SYSTEM = "You are a helpful assistant. Answer in a sentence or two, plainly and truthfully. "
QUESTIONS = (
    "What is the capital of {}?",
    "Name a river there.",
    "What do people eat there?",
    "Which language do they speak?",
    "Is it warm in winter?",
    "Would you go there by train?",
)
PLACES = ("France", "Japan", "Kenya", "Peru", "Norway", "India", "Canada", "Egypt", "Chile", "Poland")


@dataclass
class Session:
    name: str
    messages: list[dict[str, str]] = field(default_factory=list)


@dataclass
class Totals:
    prompt: int = 0
    cached: int = 0
    compared: int = 0
    different: list[str] = field(default_factory=list)


async def ask(http: aiohttp.ClientSession, session: Session, tokens: int, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": session.messages,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "prompt_cache_key": session.name,
    }
    async with http.post("/v1/chat/completions", json=body | fields) as response:
        response.raise_for_status()
        return dict(await response.json())


def difference(warm: dict[str, Any], cold: dict[str, Any]) -> str | None:
    """What is wrong with a warm answer, or None."""
    ours, theirs = (reply["choices"][0]["logprobs"]["content"] for reply in (warm, cold))
    if abs(ours[0]["logprob"] - theirs[0]["logprob"]) > 1e-3:
        return f"first log-probability {ours[0]['logprob']:.5f}, cold {theirs[0]['logprob']:.5f}"
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a["token"] != b["token"]:
            best, second = (entry["logprob"] for entry in b["top_logprobs"])
            return None if best - second < 0.05 else f"token {at}: {a['token']!r}, cold {b['token']!r}"
    return None


async def turn(http: aiohttp.ClientSession, session: Session, number: int, tokens: int, totals: Totals) -> None:
    index = int(session.name.rpartition("-")[2])
    question = QUESTIONS[number % len(QUESTIONS)].format(PLACES[index % len(PLACES)])
    session.messages.append({"role": "user", "content": question})
    warm = await ask(http, session, tokens)
    cold = await ask(http, session, tokens, cache_prompt=False)
    totals.compared += 1
    if (wrong := difference(warm, cold)) is not None:
        totals.different.append(f"{session.name} turn {number + 1}: {wrong}")
    usage = warm["usage"]
    if number:
        totals.prompt += usage["prompt_tokens"]
        totals.cached += usage["prompt_tokens_details"]["cached_tokens"]
    session.messages.append({"role": "assistant", "content": warm["choices"][0]["message"]["content"]})


async def measure(url: str, sessions: int, turns: int, tokens: int, system: str) -> Totals:
    totals = Totals()
    chats = [Session(f"chat-{i}", [{"role": "system", "content": system}]) for i in range(sessions)]
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=600)) as http:
        for number in range(turns):
            await asyncio.gather(*(turn(http, chat, number, tokens, totals) for chat in chats))
            print(f"  turn {number + 1}/{turns}", file=sys.stderr)
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--system", type=int, default=16)
    args = parser.parse_args()
    totals = asyncio.run(measure(args.url, args.sessions, args.turns, args.tokens, SYSTEM * args.system))
    print(f"cached from turn 2 on: {totals.cached}/{totals.prompt} = {totals.cached / max(totals.prompt, 1):.3f}")
    print(f"answers equal to their cold twins: {totals.compared - len(totals.different)}/{totals.compared}")
    print("\n".join(totals.different))
    return 1 if totals.different else 0


if __name__ == "__main__":
    sys.exit(main())
