"""From a checked request to generations: render, tokenise, hold against the vocabulary, name the cache context.

All of it is synchronous and safe in any thread, so that the caller may move a long prompt off the event loop.
It does not know the scheduler's state. Invariant: no token id outside the vocabulary leaves this module (MLX would
read beyond the embedding table), and every generation carries the request's salt or no cache context at all.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from mlxcel.api.constraint import Constrain
from mlxcel.api.conversation import Conversation
from mlxcel.api.fields import invalid
from mlxcel.api.options import Options
from mlxcel.api.requests import ChatRequest, Prompt, PromptRequest
from mlxcel.api.services import Services
from mlxcel.cache.key import CacheContext, SignatureParts
from mlxcel.cache.radix import common_prefix
from mlxcel.engine.sequence import Generation, Sampling
from mlxcel.errors import ContextExceeded, InvalidRequest, Unavailable
from mlxcel.prompt.signature import RAW_PROMPT_SIG, Signature, template_sig
from mlxcel.prompt.template import ChatTemplate

if TYPE_CHECKING:
    from mlxcel.engine.grammar import Grammar
    from mlxcel.engine.tokenizer import Tokenizer


T = TypeVar("T")

LONG_BODY = 20_000  # bytes; tokenising as much takes some ten milliseconds
FORMS = (b'"grammar"', b'"json_schema"', b'"response_format"')  # to compile one may take seconds
MAX_COMPILING = 16
MAX_TEXT = 8 << 20  # characters of one text: tokenising takes a second and some 50 MB for each million

_COMPILERS = ThreadPoolExecutor(2, thread_name_prefix="grammar")


async def off_loop(work: Callable[[Services, bytes], T], services: Services, body: bytes) -> T:
    """Do the work on a body: here when it is short, else in a thread, so that nobody's tokens wait for it.

    The tokenizer releases the GIL; what does not is still interrupted every few milliseconds.
    """
    if any(name in body for name in FORMS):
        return await _compiling(work, services, body)
    if len(body) >= LONG_BODY or services.settings.dry_multiplier or b'"dry_' in body:
        return await asyncio.to_thread(work, services, body)
    return work(services, body)


async def _compiling(work: Callable[[Services, bytes], T], services: Services, body: bytes) -> T:
    """What may compile a grammar for seconds has threads of its own, and few wait for them: nobody else's long prompt
    shall stand behind a hostile schema. Raises Unavailable."""
    if services.num_compiling >= MAX_COMPILING:
        raise Unavailable("too many grammars are being compiled, try again later", retry_after=5)
    services.num_compiling += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_COMPILERS, work, services, body)
    finally:
        services.num_compiling -= 1


def prepare_chat(services: Services, request: ChatRequest) -> list[Generation]:
    """One generation for each choice. Raises InvalidRequest."""
    template = chat_template(services)
    tokenizer = services.live.model.tokenizer
    text = render_chat(services, request.conversation)
    _check_length(services, len(text))
    tokens = tokenizer.encode(text, add_special=False)  # the template alone decides on BOS
    signature = _signature(template, request.conversation)
    context = _context(services, request.options, signature.hex, signature.parts)
    boundary = _boundary(services, template, request.conversation, text, tokens)
    return _generations(services, request.options, [(tokens, boundary)], context, "messages")


def prepare_prompts(services: Services, request: PromptRequest) -> list[Generation]:
    """One generation for each choice of each prompt, the choices of a prompt side by side. Raises InvalidRequest."""
    tokenizer = services.live.model.tokenizer
    for prompt in request.prompts:
        _check_length(services, sum(len(part) for part in prompt if isinstance(part, str)))
    texts = [tokenise(tokenizer, prompt, add_special=True) for prompt in request.prompts]
    prompts = [(tokens, len(tokens) - 1) for tokens in texts]
    context = _context(services, request.options, RAW_PROMPT_SIG)
    return _generations(services, request.options, prompts, context, "prompt")


def _boundary(
    services: Services, template: ChatTemplate, conversation: Conversation, text: str, tokens: array[int]
) -> int | None:
    """How many prompt tokens are history: what the next turn's prompt will begin with as well.

    That is the same conversation without the generation prompt, as far as the tokens agree. Rendered a second time
    only for models that are stored as snapshots; None where the template does not let the history stand by itself.
    """
    if services.live.model.reuse != "snapshots" or conversation.continue_final:
        return None
    history = _history(services, template, conversation)
    if not history or not text.startswith(history):
        return None
    known = services.live.model.tokenizer.encode(history, add_special=False)
    return min(common_prefix(tokens, known), len(tokens) - 1)


def _history(services: Services, template: ChatTemplate, conversation: Conversation) -> str | None:
    try:
        plain = replace(conversation, add_generation_prompt=False)
        return render(template, plain, keep_thinking=services.store.enabled)
    except InvalidRequest:
        return None


PROBES = ("ok", "Then tell me about the second of them, and why.")
"""Two next messages as unlike as can be: what their prompts have in common, any next turn begins with."""


def next_prefix(services: Services, conversation: Conversation, reply: str) -> array[int] | None:
    """The tokens that the next turn begins with when the client sends `reply` back; None when that is unknown."""
    template, tokenizer = chat_template(services), services.live.model.tokenizer
    history = _history(services, template, conversation)
    if history is None:
        return None
    prompts: list[array[int]] = []
    for probe in PROBES:
        turn = ({"role": "assistant", "content": reply}, {"role": "user", "content": probe})
        follow_up = replace(conversation, messages=conversation.messages + turn, add_generation_prompt=True)
        text = render(template, follow_up, keep_thinking=services.store.enabled)
        if not text.startswith(history):
            return None
        prompts.append(tokenizer.encode(text, add_special=False))
    first, second = prompts
    return first[: common_prefix(first, second)]


def chat_template(services: Services) -> ChatTemplate:
    if services.live.template is None:
        raise InvalidRequest("this model has no chat template: use /v1/completions, or start with --chat-template")
    return services.live.template


def render_chat(services: Services, conversation: Conversation) -> str:
    """The prompt that a chat is answered to."""
    return render(chat_template(services), conversation, keep_thinking=services.store.enabled)


def render(template: ChatTemplate, conversation: Conversation, *, keep_thinking: bool) -> str:
    """The prompt's text. A continued message's text is put after the generation prompt, as llama-server does.

    `keep_thinking` asks a template that can do it to keep the thinking of earlier turns, unless the request says
    otherwise: a template that strips it renders every turn differently, and the stored KV of the turn before is lost.
    It holds for all requests of a server whose cache is on, so that a cold twin renders the same prompt.

    The arguments of a replayed tool call are JSON inside JSON and may bring lone surrogates, which no tokenizer takes.
    """
    messages = list(conversation.messages)
    rest = str(messages.pop()["content"]) if conversation.continue_final else ""
    text = template.render(
        messages,
        tools=_shown_tools(template, conversation),
        add_generation_prompt=conversation.continue_final or conversation.add_generation_prompt,
        **_thinking(template, keep_thinking) | conversation.template_kwargs,
    )
    return (text + rest).encode(errors="replace").decode()


def _thinking(template: ChatTemplate, keep: bool) -> dict[str, Any]:
    """Not part of template_sig: it follows from the template and the server's settings, which do not change."""
    return {"preserve_thinking": True} if keep and "preserve_thinking" in template.variables else {}


def _shown_tools(template: ChatTemplate, conversation: Conversation) -> list[dict[str, Any]] | None:
    return list(conversation.tools) or None if "tools" in template.variables else None


def _signature(template: ChatTemplate, conversation: Conversation) -> Signature:
    return template_sig(
        template.source,
        conversation.template_kwargs,
        conversation.tool_choice,
        _shown_tools(template, conversation),
        conversation.continue_final,
    )


def _check_length(services: Services, num_chars: int) -> None:
    """A text that cannot fit is not tokenised: that takes some 500 bytes of memory for each of its own.

    A character has at least one byte, and no token stands for more than `longest` of them.
    """
    bounds = services.live.scheduler.bounds
    fewest = num_chars // services.live.model.tokenizer.longest
    if fewest >= bounds.n_ctx:
        raise ContextExceeded(fewest, bounds.n_ctx)


def tokenise(tokenizer: Tokenizer, prompt: Prompt, *, add_special: bool, parse_special: bool = True) -> array[int]:
    """Only text at the very beginning gets the special tokens that the model wants there. Raises InvalidRequest."""
    tokens: array[int] = array("i")
    for i, part in enumerate(prompt):
        if isinstance(part, str):
            if len(part) > MAX_TEXT:
                raise InvalidRequest(f"a text of {len(part)} characters is too long to tokenize: {MAX_TEXT} at most")
            part = tokenizer.encode(part, add_special=add_special and i == 0, parse_special=parse_special)
        tokens += part
    return tokens


def _generations(
    services: Services,
    options: Options,
    prompts: Iterable[tuple[array[int], int | None]],
    context: CacheContext | None,
    param: str,
) -> list[Generation]:
    tokenizer, bounds = services.live.model.tokenizer, services.live.scheduler.bounds
    grammar = _grammar(services, options.constraint)
    sampling = _sampling(services, options)
    generations = []
    for tokens, boundary in prompts:
        _check(tokens, tokenizer.vocab_size, param)
        own = replace(context, rope_regime=bounds.rope_regime(len(tokens))) if context else None
        for i in range(options.num_choices):
            generations.append(
                Generation(
                    prompt=tokens,
                    sampling=replace(sampling, seed=sampling.seed + i),
                    max_tokens=options.max_tokens,
                    stop=options.stop,
                    ignore_eos=options.ignore_eos,
                    top_logprobs=options.top_logprobs,
                    of_draw=options.post_sampling_probs,
                    cache=own,
                    boundary=boundary,
                    grammar=grammar,
                    slot=options.slot,
                    least_indent=options.n_indent,
                    max_ms=max(options.t_max_predict_ms, 0),
                    special=services.settings.special,
                )
            )
    return generations


def _sampling(services: Services, options: Options) -> Sampling:
    """With what was named by its text as tokens of this model."""
    model, sampling = services.live.model, options.sampling
    sampling = replace(sampling, logit_bias=_logit_bias(model.tokenizer, options))
    if not sampling.dry.is_on:
        return sampling
    return replace(sampling, dry=replace(sampling.dry, breakers=model.breakers.find(options.dry_breakers)))


def _grammar(services: Services, wanted: Constrain | None) -> Grammar | None:
    if wanted is None:
        return None
    try:
        return services.live.model.grammars.compile(wanted.kind, wanted.text)
    except ValueError as error:
        raise invalid(wanted.field, f"failed to compile: {error}") from None


def _check(tokens: array[int], vocab_size: int, param: str) -> None:
    if not tokens:
        raise invalid(param, "the prompt is empty: it has no tokens to process")
    if max(tokens) >= vocab_size:
        raise invalid(param, "a token id is out of the vocabulary")


def _logit_bias(tokenizer: Tokenizer, options: Options) -> tuple[tuple[int, float], ...]:
    """Ids out of the vocabulary are skipped as in llama-server: MLX would write beyond the logits."""
    biases: dict[int, float] = {}
    for key, bias in options.logit_bias:
        ids = [key] if isinstance(key, int) else tokenizer.encode(key, add_special=False)
        biases.update({token: bias for token in ids if 0 <= token < tokenizer.vocab_size})
    return tuple(biases.items())


def _context(
    services: Services, options: Options, signature: str, parts: SignatureParts | None = None
) -> CacheContext | None:
    """None: the prompt cache is neither read nor written."""
    if not options.cache_prompt or not services.store.enabled:
        return None
    return CacheContext(
        model_id=services.live.model.id,
        template_sig=signature,
        session_key=options.session_key,
        salt=options.salt,
        parts=parts,
    )
