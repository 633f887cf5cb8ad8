"""Which slot a request runs in, as llama-server chooses it, under the real scheduler."""

from array import array
from dataclasses import replace

import pytest

from mlxcel.engine.sequence import Generation
from tests.harness import BOUNDS, CONTEXT, GREEDY, collect, scheduling
from tests.scripted import ScriptedEngine
from tests.segments import BYTES_PER_TOKEN
from tests.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
FIRST, SECOND = (TOKENIZER.encode(text * 10, add_special=False) for text in ("a conversation ", "quite another "))


def serving(**bounds):
    engine = ScriptedEngine(lambda prompt: [])
    return scheduling(engine, TOKENIZER, bounds=replace(BOUNDS, **bounds), bytes_per_token=BYTES_PER_TOKEN)


async def slot_of(scheduler, prompt: array, cache=CONTEXT, **fields) -> int:
    return (await collect(scheduler, Generation(prompt, GREEDY, 2, cache=cache, **fields))).end.slot


async def test_a_conversation_goes_on_in_its_slot_and_a_new_one_takes_the_slot_that_was_idle_longest():
    async with serving(num_slots=3) as scheduler:
        for _ in range(3):
            assert await slot_of(scheduler, FIRST) == 0
            assert await slot_of(scheduler, SECOND) == 1
        assert await slot_of(scheduler, FIRST + SECOND) == 0
        assert await slot_of(scheduler, SECOND[5:]) == 2
        assert await slot_of(scheduler, SECOND[6:]) == 1


async def test_without_similarity_slots_take_turns():
    async with serving(num_slots=3, similarity=0.0) as scheduler:
        assert [await slot_of(scheduler, FIRST) for _ in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize(("similarity", "slot"), [(0.1, 1), (0.4, 1), (0.6, 0)])
async def test_a_slot_must_begin_with_more_than_that_share_of_the_prompt(similarity, slot):
    async with serving(num_slots=2, similarity=similarity) as scheduler:
        await slot_of(scheduler, SECOND, slot=0)
        await slot_of(scheduler, FIRST, slot=1)
        assert await slot_of(scheduler, FIRST + FIRST[:-10]) == slot


async def test_the_choice_tells_nothing_of_another_salts_prompts_nor_of_those_that_opted_out():
    async with serving(num_slots=2) as scheduler:
        for kept, asking in (
            (replace(CONTEXT, salt="tenant"), CONTEXT),
            (CONTEXT, replace(CONTEXT, salt="tenant")),
            (None, CONTEXT),
            (CONTEXT, None),
        ):
            await slot_of(scheduler, FIRST, kept, slot=0)
            await slot_of(scheduler, SECOND, slot=1)
            await slot_of(scheduler, FIRST, kept, slot=0)
            assert await slot_of(scheduler, FIRST, asking) == 1


async def test_a_wanted_slot_is_taken_whatever_is_in_it():
    async with serving(num_slots=2) as scheduler:
        assert await slot_of(scheduler, FIRST) == 0
        assert await slot_of(scheduler, FIRST, slot=1) == 1
