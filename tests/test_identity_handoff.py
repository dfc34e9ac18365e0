"""A model handed over to itself answers as if it had read itself: all classes, all ways to ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.errors import BadInput
from kvferry.models.cache import fork, forward
from kvferry.running import choices, decode
from kvferry.running.decode import Sampling
from kvferry.running.handoff import Handoff, Held
from kvferry.running.readings import Readings
from tests.tiny import CONTEXT, NAMES, OTHER, identity_map, loaded, random_map

QUESTION = "Who is the captain?"
QUESTIONS = (QUESTION, "When?", "At what time does the ferry leave the northern harbour, please?")
GREEDY = Sampling(max_new_tokens=12)
_FERRIES: dict[Any, Handoff] = {}


def ferry(name: str, **options: Any) -> Handoff:
    """One handoff for each name and options, from a model to itself."""
    key = (name, *sorted(options.items()))
    if key not in _FERRIES:
        model = loaded(name)
        _FERRIES[key] = Handoff(model, model, identity_map(model), **options)
    return _FERRIES[key]


def last_logits(handoff: Handoff, held: Held, question: str) -> Tensor:
    """Logits after the question's last token, ``[vocab]``."""
    tail = torch.cat((held.rest, handoff.layout.tail(question)))
    positions = torch.arange(held.length, held.length + tail.numel())
    with torch.no_grad():
        logits, _ = forward(
            held.loaded.model,
            tail[None],
            positions[None],
            cache=fork(held.loaded.model, held.cache),
            logits=1,
        )
    assert logits is not None
    return logits[0, -1]


WAYS = [
    pytest.param({}, id="anchors"),
    pytest.param({"tail_tokens": 7}, id="tail7"),
    pytest.param({"anchors": False}, id="mapped-prefix"),
    pytest.param({"anchors": False, "tail_tokens": 7}, id="mapped-prefix-tail7"),
    pytest.param({"tail_tokens": 10_000}, id="all-tail"),
]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_options_and_answer_are_the_native_ones(name: str, options: dict[str, Any]) -> None:
    handoff = ferry(name, **options)
    native = handoff.hand_over(CONTEXT, arm="receiver_native")
    moved = handoff.hand_over(CONTEXT, arm="transfer")
    want, got = (last_logits(handoff, held, QUESTION) for held in (native, moved))
    difference = float((want - got).abs().max())
    print(f"{name} {options}: max logit difference {difference:.1e}")
    assert difference < 1e-4
    # The figure means something only if the context matters.
    without = last_logits(handoff, handoff.hand_over("", arm="no_context"), QUESTION)
    assert float((want - without).abs().max()) > 0.1
    scores = [
        handoff.score_options(held, QUESTION, ["Ines", "Bo", "nobody"]) for held in (native, moved)
    ]
    assert scores[0].total == pytest.approx(scores[1].total, abs=1e-3)
    assert scores[0].best == scores[1].best
    answers = [handoff.answer(held, [QUESTION], sampling=GREEDY)[0] for held in (native, moved)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].text == answers[1].text
    assert answers[0].prompt_tokens == answers[1].prompt_tokens
    assert native.length == moved.length + int(moved.rest.numel())


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "qwen3", "stablelm-0.25", "mistral"])
def test_held_cache_continues_as_one_plain_reading_would(name: str) -> None:
    """Against transformers alone: the whole prompt in one forward pass, no cache of ours."""
    handoff = ferry(name)
    layout = handoff.layout
    prompt = torch.cat((layout.prefix(), layout.context(CONTEXT), layout.tail(QUESTION)))
    with torch.no_grad():
        plain = handoff.receiver.model(prompt[None]).logits[0, -1]
    got = last_logits(handoff, handoff.hand_over(CONTEXT), QUESTION)
    assert float((plain - got).abs().max()) < 1e-4
    with torch.no_grad():
        whole = handoff.receiver.model.generate(
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=12,
            do_sample=False,
        )
    new = whole[0, prompt.numel() :].tolist()
    new = new[: new.index(2)] if 2 in new else new
    answer = handoff(CONTEXT, QUESTION, sampling=GREEDY)
    assert list(answer.token_ids) == new


@pytest.mark.parametrize("arm", ["transfer", "receiver_native", "no_context"])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_questions_equals_them_one_by_one(name: str, arm: Any) -> None:
    handoff = ferry(name)
    held = handoff.hand_over(CONTEXT, arm=arm)
    together = handoff.answer(held, QUESTIONS, sampling=GREEDY)
    for question, answer in zip(QUESTIONS, together, strict=True):
        alone = handoff.answer(held, [question], sampling=GREEDY)[0]
        assert answer.token_ids == alone.token_ids
        assert answer.prompt_tokens == alone.prompt_tokens
        assert answer.decode_tokens_per_s is None
    lengths = {answer.prompt_tokens for answer in together}
    assert len(lengths) == 3


def test_padded_rows_stand_at_the_positions_they_would_have_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handoff = ferry("llama-yarn")
    held = handoff.hand_over(CONTEXT)
    tails = [handoff.layout.tail(question) for question in QUESTIONS]
    longest = max(int(tail.numel()) for tail in tails)
    seen: list[Tensor] = []
    decoder = handoff.receiver.model.get_decoder()
    hook = decoder.rotary_emb.register_forward_hook(
        lambda _m, args, kwargs, _o: seen.append(
            (kwargs["position_ids"] if "position_ids" in kwargs else args[1]).clone()
        ),
        with_kwargs=True,
    )
    try:
        handoff.answer(held, QUESTIONS, sampling=Sampling(max_new_tokens=2, min_new_tokens=2))
    finally:
        hook.remove()
    first, second = seen[0], seen[1]
    for row, tail in enumerate(tails):
        count = int(tail.numel())
        want = torch.arange(held.length, held.length + count)
        assert first[row, longest - count :].tolist() == want.tolist()
        assert second[row].tolist() == [held.length + count]


@pytest.mark.parametrize("arm", ["transfer", "receiver_native", "source_native", "no_context"])
def test_streaming_equals_not_streaming(arm: Any) -> None:
    handoff = ferry("qwen3")
    held = handoff.hand_over(CONTEXT, arm=arm)
    whole = handoff.answer(held, [QUESTION], sampling=Sampling(max_new_tokens=30))[0]
    pieces = list(handoff.stream(held, QUESTION, sampling=Sampling(max_new_tokens=30)))
    assert "".join(pieces).strip() == whole.text


def test_closing_a_stream_early_stops_the_work() -> None:
    handoff = ferry("llama")
    held = handoff.hand_over(CONTEXT)
    forwards = []
    hook = handoff.receiver.model.register_forward_hook(lambda *_: forwards.append(1))
    sampling = Sampling(max_new_tokens=300, min_new_tokens=300)
    try:
        pieces = handoff.stream(held, QUESTION, sampling=sampling)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        after_close = len(forwards)
    finally:
        hook.remove()
    assert after_close < 250
    assert len(forwards) == after_close
    assert handoff.answer(held, [QUESTION], sampling=GREEDY)


def test_a_failure_while_streaming_reaches_the_reader() -> None:
    from kvferry.errors import NotFinite
    from tests.tiny import build

    model = build("llama", seed=9)
    handoff = Handoff(model, model, identity_map(model))
    held = handoff.hand_over(CONTEXT)
    model.model.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(NotFinite):
        list(handoff.stream(held, QUESTION))
    with pytest.raises(NotFinite):
        handoff.answer(held, [QUESTION])


def test_sampling_repeats_with_its_seed_and_leaves_the_generator_alone() -> None:
    handoff = ferry("qwen2")
    held = handoff.hand_over(CONTEXT)

    def sample(seed: int, **more: Any) -> tuple[int, ...]:
        sampling = Sampling(max_new_tokens=16, temperature=1.5, seed=seed, **more)
        return handoff.answer(held, [QUESTION], sampling=sampling)[0].token_ids

    torch.manual_seed(11)
    untouched = torch.rand(3)
    torch.manual_seed(11)
    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(3, top_p=0.5) == sample(3, top_p=0.5)
    assert torch.equal(torch.rand(3), untouched)


def test_top_p_near_zero_is_greedy() -> None:
    handoff = ferry("qwen2")
    held = handoff.hand_over(CONTEXT)
    narrow = Sampling(max_new_tokens=12, temperature=1.0, top_p=1e-6)
    assert (
        handoff.answer(held, [QUESTION], sampling=narrow)[0].token_ids
        == handoff.answer(held, [QUESTION], sampling=GREEDY)[0].token_ids
    )


def test_the_answer_stops_before_the_end_of_turn() -> None:
    handoff = ferry("qwen2")
    held = handoff.hand_over(CONTEXT)
    free = handoff.answer(held, [QUESTION], sampling=Sampling(max_new_tokens=8))[0].token_ids
    end = free[3]
    config = handoff.receiver.model.generation_config
    known = config.eos_token_id
    try:
        config.eos_token_id = [2, end]
        stopped = handoff.answer(held, [QUESTION], sampling=Sampling(max_new_tokens=8))[0]
    finally:
        config.eos_token_id = known
    assert stopped.token_ids == free[: free.index(end)]


def test_asking_twice_and_both_questions_leave_the_held_cache_alone() -> None:
    handoff = ferry("llama-linear")
    held = handoff.hand_over(CONTEXT)
    length = held.length
    first = handoff.answer(held, [QUESTION], sampling=GREEDY)[0].token_ids
    handoff.score_options(held, QUESTION, ["a", "b"])
    list(handoff.stream(held, "When?", sampling=GREEDY))
    assert held.length == length
    assert handoff.answer(held, [QUESTION], sampling=GREEDY)[0].token_ids == first


def test_option_scores_are_the_log_likelihoods_of_a_plain_forward() -> None:
    handoff = ferry("stablelm-0.25")
    held = handoff.hand_over(CONTEXT)
    options = ["Ines", "the captain of the other ship"]
    found = handoff.score_options(held, QUESTION, options)
    layout = handoff.layout
    prompt = torch.cat((layout.prefix(), layout.context(CONTEXT), layout.tail(QUESTION)))
    for place, option in enumerate(options):
        ids = layout.continuation(option)
        with torch.no_grad():
            logits = handoff.receiver.model(torch.cat((prompt, ids))[None]).logits[0]
        steps = logits[prompt.numel() - 1 : -1].log_softmax(-1).gather(1, ids[:, None])
        assert found.total[place] == pytest.approx(float(steps.sum()), abs=1e-3)
        assert found.per_token[place] == pytest.approx(float(steps.mean()), abs=1e-4)
    assert found.best == max(range(2), key=lambda i: found.per_token[i])


def test_wrong_document_is_the_other_text_handed_over() -> None:
    handoff = ferry("qwen3")
    wrong = handoff.hand_over(CONTEXT, arm="wrong_document", other_context=OTHER)
    other = handoff.hand_over(OTHER, arm="transfer")
    assert torch.equal(last_logits(handoff, wrong, QUESTION), last_logits(handoff, other, QUESTION))
    assert wrong.arm == "wrong_document"


def test_mapped_caches_are_labelled_and_native_ones_are_not() -> None:
    handoff = ferry("qwen3")
    lossy = {
        arm: handoff.hand_over(CONTEXT, arm=arm).lossy
        for arm in ("source_native", "transfer", "receiver_native", "no_context")
    }
    assert lossy == {
        "source_native": False,
        "transfer": True,
        "receiver_native": False,
        "no_context": False,
    }
    ids = {
        arm: handoff.hand_over(CONTEXT, arm=arm).identity
        for arm in ("transfer", "receiver_native", "no_context")
    }
    assert len(set(ids.values())) == 3


@pytest.mark.parametrize(
    ("one", "two"), [("llama", "qwen3"), ("stablelm-0.5", "llama-yarn"), ("qwen3", "stablelm-0.25")]
)
def test_unequal_geometries_hand_over_and_answer(one: str, two: str) -> None:
    source, receiver = loaded(one), loaded(two, 1)
    handoff = Handoff(source, receiver, random_map(source, receiver), tail_tokens=3)
    held = handoff.hand_over(CONTEXT)
    assert held.loaded is receiver
    assert torch.isfinite(last_logits(handoff, held, QUESTION)).all()
    answer = handoff(CONTEXT, QUESTION, sampling=GREEDY)
    assert answer.arm == "transfer"
    assert {"source_prefill", "map", "inject", "tail"} <= answer.timings.keys()
    assert answer.ttft_ms > 0
    assert answer.peak_memory_bytes > 0


def test_gradient_reaches_the_map_and_not_the_models() -> None:
    source, receiver = loaded("llama"), loaded("qwen3", 1)
    cache_map = random_map(source, receiver)
    for target in cache_map.targets.values():
        target.weight.requires_grad_()
    handoff = Handoff(source, receiver, cache_map)
    held = handoff.hand_over(CONTEXT)
    tail = handoff.layout.tail(QUESTION)
    positions = torch.arange(held.length, held.length + tail.numel())[None]
    logits, _ = forward(
        receiver.model, tail[None], positions, cache=fork(receiver.model, held.cache), logits=1
    )
    assert logits is not None
    logits.log_softmax(-1)[0, -1, 5].backward()
    assert all(
        t.weight.grad is not None and float(t.weight.grad.abs().max()) > 0
        for t in cache_map.targets.values()
    )
    assert all(p.grad is None for m in (source, receiver) for p in m.model.parameters())


def test_readings_are_shared_between_arms_and_stay_exact() -> None:
    model = loaded("llama")
    readings = Readings(2)
    handoff = Handoff(model, model, identity_map(model), readings=readings)
    native = handoff.hand_over(CONTEXT, arm="receiver_native")
    calls = []
    hook = model.model.get_decoder().register_forward_hook(lambda *_: calls.append(1))
    try:
        moved = handoff.hand_over(CONTEXT, arm="transfer")
        assert not calls
        handoff.hand_over(CONTEXT + " And so on.", arm="transfer")
        assert len(calls) == 1
    finally:
        hook.remove()
    assert moved.lossy
    difference = last_logits(handoff, native, QUESTION) - last_logits(handoff, moved, QUESTION)
    assert float(difference.abs().max()) < 1e-4


def test_the_twin_without_anchors_maps_the_prefix_too() -> None:
    source, receiver = loaded("llama"), loaded("qwen3", 1)
    handoff = Handoff(source, receiver, random_map(source, receiver))
    twin = handoff.without_anchors()
    assert twin.without_anchors() is twin
    assert handoff.anchors
    held, bare = handoff.hand_over(CONTEXT), twin.hand_over(CONTEXT)
    assert held.length == bare.length
    prefix = len(handoff.layout.prefix_ids)
    for mine, theirs in zip(held.cache.layers, bare.cache.layers, strict=True):
        assert torch.equal(mine.keys[:, :, prefix:], theirs.keys[:, :, prefix:])
        assert not torch.allclose(mine.keys[:, :, :prefix], theirs.keys[:, :, :prefix])


def test_score_alone_with_one_token_options() -> None:
    handoff = ferry("llama")
    held = handoff.hand_over(CONTEXT)
    scores = decode.score(
        held.loaded, held.cache, handoff.layout.tail(QUESTION), [torch.tensor([9])]
    )
    want = last_logits(handoff, held, QUESTION).log_softmax(-1)[9]
    assert float(scores[0][0]) == pytest.approx(float(want), abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "stablelm-0.5"])
@pytest.mark.parametrize("tokens", [1, 100, choices.BATCH_TOKENS])
def test_options_of_many_questions_at_once_score_as_one_by_one(
    kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "BATCH_TOKENS", tokens)
    handoff = ferry(kind)
    held = handoff.hand_over(CONTEXT)
    length = held.length
    asked = [
        choices.Asked(
            handoff.layout.tail(QUESTION + " And then?" * place),
            tuple(torch.arange(7 + place, 7 + place + size) for size in sizes),
        )
        for place, sizes in enumerate([(1, 1), (3, 1, 2), (2,), (1,), (4, 4, 1)])
    ]
    found = choices.option_scores(held.loaded, held.cache, asked)
    assert held.cache.get_seq_length() == length
    for one, scores in zip(asked, found, strict=True):
        want = decode.score(held.loaded, held.cache, one.tail, list(one.options))
        assert [each.shape for each in scores] == [each.shape for each in want]
        for mine, theirs in zip(scores, want, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(max_new_tokens=12, temperature=1.5)])
def test_the_model_s_own_sampling_defaults_do_not_count(sampling: Sampling) -> None:
    """As Qwen's instruct models ship them."""
    from tests.tiny import build

    model = build("qwen2", seed=0)
    handoff = Handoff(model, model, identity_map(model))
    held = handoff.hand_over(CONTEXT)
    plain = handoff.answer(held, [QUESTION], sampling=sampling)[0].token_ids
    defaults = {
        "do_sample": True,
        "temperature": 0.1,
        "top_k": 2,
        "top_p": 0.5,
        "repetition_penalty": 1.9,
    }
    for key, value in defaults.items():
        setattr(model.model.generation_config, key, value)
    assert handoff.answer(held, [QUESTION], sampling=sampling)[0].token_ids == plain


def test_what_is_held_has_a_name_of_its_own() -> None:
    """Other anchors or another tail: other entries, so no store may take one for the other."""
    ways = [{}, {"anchors": False}, {"tail_tokens": 7}]
    names = [ferry("llama", **way).hand_over(CONTEXT).identity for way in ways]
    assert len(set(names)) == 3
    assert ferry("llama").hand_over(CONTEXT).identity == names[0]


def test_half_precision_models_hand_over() -> None:
    from tests.tiny import build

    model = build("qwen3", seed=0)
    model.model.to(torch.bfloat16)
    half = type(model)(
        model.model, model.tokenizer, model.folder, torch.bfloat16, torch.device("cpu")
    )
    handoff = Handoff(half, half, identity_map(half), allow_other_precision=True)
    native = handoff.hand_over(CONTEXT, arm="receiver_native")
    moved = handoff.hand_over(CONTEXT)
    want, got = (last_logits(handoff, held, QUESTION).float() for held in (native, moved))
    without = last_logits(handoff, handoff.hand_over("", arm="no_context"), QUESTION).float()
    assert float((want - got).norm()) < 0.1 * float((want - without).norm())
    assert handoff(CONTEXT, QUESTION, sampling=GREEDY)


@pytest.mark.parametrize(
    "temperature",
    [0.0, 1.5],
)
def test_streams_at_once_give_what_each_gives_alone(temperature: float) -> None:
    from concurrent.futures import ThreadPoolExecutor

    handoff = ferry("qwen2")
    held = handoff.hand_over(CONTEXT)
    sampling = Sampling(max_new_tokens=24, min_new_tokens=24, temperature=temperature, seed=3)

    def text(_: int) -> str:
        return "".join(handoff.stream(held, QUESTION, sampling=sampling))

    alone = text(0)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(text, range(9))) == [alone] * 9


@pytest.mark.parametrize("arm", ["transfer", "receiver_native", "no_context"])
def test_a_question_read_once_is_answered_and_scored_alike(arm: Any) -> None:
    handoff = ferry("llama", tail_tokens=3)
    held = handoff.hand_over(CONTEXT, arm=arm)
    asked = handoff.with_question(held, QUESTION, cue="It is")
    plain = handoff.answer(held, [QUESTION], sampling=GREEDY, cue="It is")[0]
    shared = handoff.answer(asked, [QUESTION], sampling=GREEDY, cue="It is")[0]
    assert shared.token_ids == plain.token_ids
    assert shared.prompt_tokens == plain.prompt_tokens
    assert shared.timings.keys() == plain.timings.keys()
    options = ["at seven", "late"]
    one = handoff.score_options(held, QUESTION, options, cue="It is")
    two = handoff.score_options(asked, QUESTION, options, cue="It is")
    assert two.total == pytest.approx(one.total, abs=1e-4)
    assert asked.identity != held.identity
    assert held.asked is None
    with pytest.raises(BadInput, match="question that was read"):
        handoff.answer(asked, ["Another one?"], cue="It is")
