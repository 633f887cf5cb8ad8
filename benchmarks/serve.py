"""A running server as its clients see it: time to first token cold and warm, inter-token latency, throughput.

    python benchmarks/serve.py [NAME=]URL ... [--model ID] [--prompt-tokens 1500] [--repeats 3] [--json FILE]

Works against any OpenAI-compatible base URL (with or without /v1) on loopback or elsewhere; several servers are
measured in turn, one step of each at a time, so that a busy machine slows all of them. Figures are medians.

cold: a chat whose system prompt nobody has sent before. warm: the same system prompt, another question. again: the
very same request. itl: the median gap between two pieces of text. streams: tokens per second over N concurrent
answers of 48 tokens to short prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

ANSWER_TOKENS = 48
STREAMS = (1, 4, 8)
WORDS = "river stone window garden letter music market winter bridge silver forest harbor candle mirror".split()


@dataclass
class Peer:
    name: str
    url: str
    figures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Answer:
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    pieces: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def system_prompt(seed: int, tokens: int) -> str:
    """About `tokens` tokens: these words are one token each with most vocabularies."""
    rng = random.Random(seed)
    return f"Session {seed}. " + " ".join(rng.choice(WORDS) for _ in range(tokens - 12))


async def chat(
    session: aiohttp.ClientSession, peer: Peer, model: str, messages: list[dict[str, str]], n: int
) -> Answer:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": n,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, began, last = Answer(), time.perf_counter(), 0.0
    async with session.post(f"{peer.url}/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if usage := event.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.completion_tokens = usage["completion_tokens"]
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices", [])):
                now = time.perf_counter()
                if answer.pieces:
                    answer.gaps.append(now - last)
                else:
                    answer.first = now - began
                answer.pieces += 1
                last = now
    answer.first = answer.first or time.perf_counter() - began
    return answer


def turn(system: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


async def first_tokens(session: aiohttp.ClientSession, peer: Peer, model: str, seed: int, tokens: int) -> None:
    system = system_prompt(seed, tokens)
    cold = await chat(session, peer, model, turn(system, "What is the capital of France?"), 8)
    warm = await chat(session, peer, model, turn(system, "Which word comes first above?"), 8)
    again = await chat(session, peer, model, turn(system, "Which word comes first above?"), 8)
    for name, answer in (("cold", cold), ("warm", warm), ("again", again)):
        peer.figures[f"ttft {name} s"].append(answer.first)
        peer.figures[f"cached {name}"].append(answer.cached_tokens)
    peer.figures["prompt tokens"].append(cold.prompt_tokens)


async def throughput(session: aiohttp.ClientSession, peer: Peer, model: str, streams: int, seed: int) -> None:
    prompts = [turn("You tell stories.", f"Tell a long story number {seed}-{i}.") for i in range(streams)]
    began = time.perf_counter()
    answers = await asyncio.gather(*(chat(session, peer, model, p, ANSWER_TOKENS) for p in prompts))
    elapsed = time.perf_counter() - began
    peer.figures[f"streams {streams} tok/s"].append(sum(a.completion_tokens or a.pieces for a in answers) / elapsed)
    if streams == 1:
        peer.figures["itl ms"].append(1000 * statistics.median(answers[0].gaps or [0.0]))


async def measure(peers: list[Peer], model: str, repeats: int, prompt_tokens: int) -> None:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        seed = int(time.time())
        for peer in peers:  # what a first request compiles or loads is not what is measured
            await chat(session, peer, model, turn("Hello.", "Hi."), 4)
        for repeat in range(repeats):
            for peer in peers:
                await first_tokens(session, peer, model, seed + repeat, prompt_tokens)
                print(f"  {peer.name}: first tokens {repeat + 1}/{repeats}", file=sys.stderr)
            for streams in STREAMS:
                for peer in peers:
                    await throughput(session, peer, model, streams, seed + repeat)
            print(f"  streams {repeat + 1}/{repeats}", file=sys.stderr)


def table(peers: list[Peer]) -> str:
    names = list(peers[0].figures)
    lines = ["| | " + " | ".join(p.name for p in peers) + " |", "|---" * (len(peers) + 1) + "|"]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(f"{statistics.median(p.figures[name]):.3g}" for p in peers) + " |")
    return "\n".join(lines)


def parse_peer(text: str) -> Peer:
    name, _, url = text.rpartition("=") if "=" in text else (text, "", text)
    url = url.rstrip("/")
    return Peer(name, url if url.endswith("/v1") else f"{url}/v1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("servers", nargs="+", metavar="[NAME=]URL", type=parse_peer)
    parser.add_argument("--model", default="default_model", help="model id to send")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the raw figures there")
    args = parser.parse_args()
    asyncio.run(measure(args.servers, args.model, args.repeats, args.prompt_tokens))
    print(table(args.servers))
    if args.json:
        args.json.write_text(json.dumps({p.name: p.figures for p in args.servers}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
