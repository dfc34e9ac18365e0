"""A model handed over to itself by the identity map answers as if it had read itself."""

from __future__ import annotations

import pytest
import torch

from kvferry.models.cache import fork, forward
from kvferry.running.decode import Sampling
from kvferry.running.handoff import Handoff, Held
from tests.small_pair import CLASSES, identity_map, loaded, random_map

CONTEXT = "Ada has a red boat. Ben has a blue kite. Cleo lives in Oslo."
QUESTIONS = ["Who has a boat?", "Where does Cleo live, and who has the kite?", "Red?"]


def logits(held: Held, ferry: Handoff, question: str) -> torch.Tensor:
    tail = torch.cat((held.rest, ferry.layout.tail(question)))
    positions = torch.arange(held.length, held.length + tail.numel())
    with torch.no_grad():
        out, _ = forward(
            held.loaded.model,
            tail[None],
            positions[None],
            cache=fork(held.loaded.model, held.cache),
            logits=0,
        )
    assert out is not None
    return out[0, held.rest.numel() :]


@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.parametrize(("tail_tokens", "anchors"), [(0, True), (7, True), (0, False)])
def test_logits_within_1e_4_of_native(name: str, tail_tokens: int, anchors: bool) -> None:
    one = loaded(name)
    ferry = Handoff(one, one, identity_map(one), tail_tokens=tail_tokens, anchors=anchors)
    moved = ferry.hand_over(CONTEXT, arm="transfer")
    native = ferry.hand_over(CONTEXT, arm="receiver_native")
    assert moved.lossy
    assert not native.lossy
    assert moved.length + moved.rest.numel() == native.length
    difference = (
        (logits(moved, ferry, QUESTIONS[0]) - logits(native, ferry, QUESTIONS[0])).abs().max()
    )
    print(f"{name}: max logit difference {float(difference):.2e}")
    assert difference < 1e-4


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_generation_and_batches_equal_native(name: str) -> None:
    one = loaded(name)
    ferry = Handoff(one, one, identity_map(one))
    sampling = Sampling(max_new_tokens=12)
    moved, native = (ferry.hand_over(CONTEXT, arm=a) for a in ("transfer", "receiver_native"))
    batch = ferry.answer(moved, QUESTIONS, sampling=sampling)
    for question, answer in zip(QUESTIONS, batch, strict=True):
        alone = ferry.answer(native, [question], sampling=sampling)[0]
        assert answer.token_ids == alone.token_ids
    scores = [ferry.score_options(h, QUESTIONS[0], ["Ada", "Ben"]) for h in (moved, native)]
    assert scores[0].total == pytest.approx(scores[1].total, abs=1e-3)
    assert scores[0].best == scores[1].best


def test_streamed_equals_whole_and_can_be_closed() -> None:
    one = loaded("qwen2")
    ferry = Handoff(one, one, identity_map(one))
    held = ferry.hand_over(CONTEXT)
    before = held.length
    sampling = Sampling(max_new_tokens=10)
    whole = ferry.answer(held, [QUESTIONS[0]], sampling=sampling)[0]
    streamed = "".join(ferry.stream(held, QUESTIONS[0], sampling=sampling))
    assert streamed.strip() == whole.text
    pieces = ferry.stream(held, QUESTIONS[0], sampling=Sampling(max_new_tokens=300))
    next(pieces)
    pieces.close()
    assert held.length == before


def test_sampling_repeats_with_its_seed() -> None:
    one = loaded("llama")
    ferry = Handoff(one, one, identity_map(one))
    held = ferry.hand_over(CONTEXT)

    def sample(seed: int) -> tuple[int, ...]:
        sampling = Sampling(max_new_tokens=16, temperature=1.5, seed=seed)
        return ferry.answer(held, ["Who?"], sampling=sampling)[0].token_ids

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_unequal_depth_heads_and_dims() -> None:
    source = loaded("qwen2", layers=2, kv_heads=2)
    receiver = loaded("qwen3-qk-norm", seed=1, layers=4, kv_heads=1)
    ferry = Handoff(source, receiver, random_map(source, receiver))
    answer = ferry(CONTEXT, QUESTIONS[0], sampling=Sampling(max_new_tokens=4))
    assert len(answer.token_ids) <= 4
    assert {"source_prefill", "map", "inject", "tail", "first_token"} <= set(answer.timings)
    other = ferry(
        CONTEXT, QUESTIONS[0], arm="wrong_document", other_context="Something else entirely."
    )
    assert other.arm == "wrong_document"


def test_gradient_reaches_the_map_and_not_the_receiver() -> None:
    source = loaded("llama", layers=2)
    receiver = loaded("qwen2", seed=1)
    cache_map = random_map(source, receiver)
    weights = [t.weight.requires_grad_() for t in cache_map.targets.values()]
    ferry = Handoff(source, receiver, cache_map)
    held = ferry.hand_over(CONTEXT)
    tail = ferry.layout.tail(QUESTIONS[0])
    out, _ = forward(
        receiver.model,
        tail[None],
        torch.arange(held.length, held.length + tail.numel())[None],
        cache=fork(receiver.model, held.cache),
        logits=1,
    )
    assert out is not None
    out.logsumexp(-1).sum().backward()
    assert all(w.grad is not None and bool(w.grad.abs().sum() > 0) for w in weights)
    assert all(p.grad is None for p in receiver.model.parameters())
