"""What handoff refuses, and that every refusal says what was expected and what came."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.errors import (
    BadInput,
    ContextTooLong,
    NotFinite,
    TokenizerMismatch,
    UnsupportedGeometry,
    WrongPair,
)
from kvferry.maps.cache_map import CacheMap
from kvferry.maps.linear import LinearTarget
from kvferry.models.alignment import compare_tokenizers, require_ids_in_range
from kvferry.models.load import LoadedModel, ModelFolder
from kvferry.running.decode import Sampling
from kvferry.running.handoff import ARMS, Handoff
from kvferry.running.prompt import PromptLayout
from tests.tiny import CONTEXT, LAYOUT, build, identity_map, loaded, random_map, tiny_tokenizer

SHORT = Sampling(max_new_tokens=4)


@pytest.fixture(scope="module")
def handoff() -> Handoff:
    source, receiver = loaded("llama"), loaded("qwen3", 1)
    return Handoff(source, receiver, random_map(source, receiver))


def _revised(model: LoadedModel, revision: str) -> LoadedModel:
    return replace(model, folder=ModelFolder(Path("tiny"), model.spec, revision))


@pytest.mark.parametrize("arm", [*ARMS])
@pytest.mark.parametrize("context", ["", "   \n\t ", "\u00a0\u2003"])
def test_a_context_without_text(handoff: Handoff, arm: Any, context: str) -> None:
    with pytest.raises(BadInput, match="context"):
        handoff(context, "Who?", arm=arm)


@pytest.mark.parametrize("question", ["", "  \n"])
def test_a_question_without_text_is_refused_before_anything_is_read(
    handoff: Handoff, question: str
) -> None:
    calls: list[int] = []
    hook = handoff.source.model.get_decoder().register_forward_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(BadInput, match="question"):
            handoff(CONTEXT, question)
    finally:
        hook.remove()
    assert not calls


def test_no_questions_and_no_options(handoff: Handoff) -> None:
    held = handoff.hand_over(CONTEXT)
    with pytest.raises(BadInput, match="at least one question"):
        handoff.answer(held, [])
    for options in ([], ["one"], ["one", "  "]):
        with pytest.raises(BadInput, match="two or more options"):
            handoff.score_options(held, "Who?", options)


@pytest.mark.parametrize("arm", ["source_native", "transfer", "receiver_native", "wrong_document"])
def test_a_context_beyond_the_limit_names_both_numbers(handoff: Handoff, arm: Any) -> None:
    long = "#" * 600  # one token a character
    with pytest.raises(ContextTooLong) as caught:
        handoff.hand_over(long, arm=arm, other_context=long)
    prefix = len(handoff.layout.prefix_ids)
    assert "at most 512 tokens" in str(caught.value)
    assert f"got {prefix + 601} (prefix {prefix}, context 600" in str(caught.value)


@pytest.mark.parametrize("tail_tokens", [0, 16])
def test_the_limit_counts_question_and_answer(tail_tokens: int) -> None:
    model = loaded("llama")
    handoff = Handoff(model, model, identity_map(model), tail_tokens=tail_tokens)
    prefix = len(handoff.layout.prefix_ids)
    question = int(handoff.layout.tail("Who?").numel())
    room = 512 - prefix - question - SHORT.max_new_tokens
    for arm in ("transfer", "receiver_native"):
        held = handoff.hand_over("#" * room, arm=arm)  # type: ignore[arg-type]
        assert handoff.answer(held, ["Who?"], sampling=SHORT)
        held = handoff.hand_over("#" * (room + 1), arm=arm)  # type: ignore[arg-type]
        with pytest.raises(ContextTooLong, match="got 513"):
            handoff.answer(held, ["Who?"], sampling=SHORT)
        with pytest.raises(ContextTooLong, match="got 513"):
            handoff.stream(held, "Who?", sampling=SHORT)


def test_the_limit_counts_options_too(handoff: Handoff) -> None:
    room = 512 - len(handoff.layout.prefix_ids) - int(handoff.layout.tail("Who?").numel())
    held = handoff.hand_over("#" * (room - 3))
    assert handoff.score_options(held, "Who?", ["###", "#"])
    with pytest.raises(ContextTooLong, match="at most 512"):
        handoff.score_options(held, "Who?", ["#####", "#"])


@pytest.mark.parametrize("allow", [False, True])
def test_a_map_of_the_other_direction(allow: bool) -> None:
    source, receiver = loaded("llama"), loaded("qwen3", 1)
    with pytest.raises(WrongPair, match="other way round"):
        Handoff(receiver, source, random_map(source, receiver), allow_other_revision=allow)


@pytest.mark.parametrize("side", ["source", "receiver"])
def test_another_revision_only_when_allowed(side: str) -> None:
    models = {"source": loaded("llama"), "receiver": loaded("qwen3", 1)}
    cache_map = random_map(models["source"], models["receiver"])
    models[side] = _revised(models[side], "f" * 64)
    with pytest.raises(WrongPair, match=f"{side} revision .* got revision ffff"):
        Handoff(models["source"], models["receiver"], cache_map)
    allowed = Handoff(models["source"], models["receiver"], cache_map, allow_other_revision=True)
    assert allowed(CONTEXT, "Who?", sampling=SHORT)


@pytest.mark.parametrize(
    ("source", "receiver"),
    [("qwen3", "qwen3"), ("llama", "stablelm-0.25"), ("stablelm-0.25", "qwen3")],
)
def test_another_revision_of_another_shape_is_refused_even_when_allowed(
    source: str, receiver: str
) -> None:
    cache_map = random_map(loaded("llama"), loaded("llama", 1))
    with pytest.raises(WrongPair, match="layers"):
        Handoff(loaded(source), loaded(receiver, 1), cache_map, allow_other_revision=True)


def test_another_depth_is_refused_even_when_allowed() -> None:
    cache_map = random_map(loaded("llama"), loaded("llama", 1))
    deeper = build("llama", seed=1, num_hidden_layers=4)
    with pytest.raises(WrongPair, match="4 layers"):
        Handoff(loaded("llama"), deeper, cache_map, allow_other_revision=True)


def test_tokenizers_that_disagree() -> None:
    other = tiny_tokenizer(vocab=290, lines=("other words entirely, and 13 more of those",))
    found = compare_tokenizers(loaded("llama").tokenizer, other)
    assert not found.agree
    assert found.differing
    assert found.only_source + found.only_receiver > 0
    receiver = build("qwen3", seed=1, tokenizer=other)
    with pytest.raises(TokenizerMismatch, match="entries in common"):
        Handoff(loaded("llama"), receiver, random_map(loaded("llama"), receiver))


def test_tokenizers_that_agree_but_for_added_entries() -> None:
    more = tiny_tokenizer()
    more.add_tokens(["<tool>"])
    found = compare_tokenizers(tiny_tokenizer(), more)
    assert found.agree
    assert found.only_receiver == 1
    assert found.only_source == 0
    assert "1 entries differ" in found.reason
    assert compare_tokenizers(more, tiny_tokenizer()).only_source == 1
    assert "same id" in compare_tokenizers(more, more).reason


def test_ids_beyond_the_embeddings() -> None:
    small = build("qwen3", seed=1, vocab_size=260)
    source = loaded("llama")
    handoff = Handoff(source, small, random_map(source, small), layout=None)
    with pytest.raises(TokenizerMismatch, match="below 260"):
        handoff.hand_over(CONTEXT, arm="receiver_native")
    with pytest.raises(TokenizerMismatch, match="below 260"):
        handoff.hand_over(CONTEXT)


def test_ids_beyond_the_embeddings_in_question_tail_or_option() -> None:
    layout = PromptLayout(instruction="####", before_question="####")
    source = loaded("llama")
    tokenizer = tiny_tokenizer(template=None)
    small = build("qwen3", seed=1, tokenizer=tokenizer, vocab_size=260)
    cache_map = random_map(source, small)
    cache_map.config.layout.update(layout.to_dict())
    cache_map.config.layout_identity = layout.bind(tokenizer).identity
    handoff = Handoff(source, small, cache_map, tail_tokens=0)
    word = "The"
    assert max(handoff.layout.context(word)) >= 260
    held = handoff.hand_over("####")
    with pytest.raises(TokenizerMismatch, match="below 260"):
        handoff.answer(held, [word], sampling=SHORT)
    with pytest.raises(TokenizerMismatch, match="below 260"):
        list(handoff.stream(held, word, sampling=SHORT))
    with pytest.raises(TokenizerMismatch, match="below 260"):
        handoff.score_options(held, "#", [word, "#"])


def test_require_ids_in_range_names_the_model() -> None:
    require_ids_in_range(torch.tensor([0, 299]), 300, "m")
    require_ids_in_range(torch.empty(0, dtype=torch.int64), 300, "m")
    with pytest.raises(TokenizerMismatch, match="embeddings of m; got 300"):
        require_ids_in_range(torch.tensor([0, 300]), 300, "m")
    with pytest.raises(TokenizerMismatch, match="got -1"):
        require_ids_in_range(torch.tensor([0, -1]), 300, "m")


def test_an_unknown_arm(handoff: Handoff) -> None:
    with pytest.raises(BadInput, match=r"an arm among .*transfer.*'teleport'"):
        handoff(CONTEXT, "Who?", arm="teleport")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="an arm among"):
        handoff.hand_over_ids(torch.arange(9), arm="teleport")  # type: ignore[arg-type]


def test_wrong_document_without_another_document(handoff: Handoff) -> None:
    with pytest.raises(BadInput, match="another document"):
        handoff(CONTEXT, "Who?", arm="wrong_document")
    with pytest.raises(BadInput, match="context"):
        handoff(CONTEXT, "Who?", arm="wrong_document", other_context=" ")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_numbers_that_are_not_finite_in_the_map(value: float, part: str) -> None:
    source, receiver = loaded("llama"), loaded("qwen3", 1)
    good = random_map(source, receiver)
    targets = dict(good.targets)
    target = targets["2.V"]
    parts = {"weight": target.weight.clone(), "bias": target.bias.clone()}
    parts[part].view(-1)[5] = value
    targets["2.V"] = LinearTarget(target.layers, parts["weight"], parts["bias"])
    handoff = Handoff(source, receiver, CacheMap(good.config, targets))
    with pytest.raises(NotFinite, match="layer 2"):
        handoff(CONTEXT, "Who?")
    assert handoff(CONTEXT, "Who?", arm="receiver_native", sampling=SHORT)


@pytest.mark.parametrize("arm", ["transfer", "source_native"])
def test_nan_in_the_source_s_weights(arm: Any) -> None:
    source, receiver = build("llama", seed=3), loaded("qwen3", 1)
    source.model.get_decoder().layers[1].mlp.down_proj.weight.data[0, 0] = math.nan
    handoff = Handoff(source, receiver, random_map(source, receiver))
    with pytest.raises(NotFinite):
        handoff(CONTEXT, "Who?", arm=arm)


@pytest.mark.parametrize("ask", ["answer", "stream", "score_options"])
def test_nan_in_the_receiver_s_weights(ask: str) -> None:
    source, receiver = loaded("llama"), build("qwen3", seed=3)
    receiver.model.get_decoder().norm.weight.data[0] = math.nan
    handoff = Handoff(source, receiver, random_map(source, receiver))
    held = handoff.hand_over(CONTEXT)
    ways = {
        "answer": lambda: handoff.answer(held, ["Who?"]),
        "stream": lambda: list(handoff.stream(held, "Who?")),
        "score_options": lambda: handoff.score_options(held, "Who?", ["a", "b"]),
    }
    with pytest.raises(NotFinite):
        ways[ask]()


def test_a_negative_tail() -> None:
    model = loaded("llama")
    with pytest.raises(BadInput, match="got -1"):
        Handoff(model, model, identity_map(model), tail_tokens=-1)


def test_a_layout_with_another_prefix_than_the_map_s() -> None:
    model = loaded("llama")
    with pytest.raises(WrongPair, match="prompt layout of the map"):
        Handoff(
            model, model, identity_map(model), layout=replace(LAYOUT, instruction="Now listen:\n")
        )
    # What follows the context may differ: the map never saw it.
    other = Handoff(model, model, identity_map(model), layout=replace(LAYOUT, cue="It is"))
    assert other(CONTEXT, "Who?", sampling=SHORT)


def test_models_that_are_not_run_yet_are_refused_by_name() -> None:
    model = build("mistral", sliding_window=16)
    with pytest.raises(UnsupportedGeometry, match="tiny-mistral-0: sliding layers"):
        Handoff(model, model, identity_map(model))


@pytest.mark.parametrize("tokens", [0, -3])
def test_no_new_tokens_is_bad_input(handoff: Handoff, tokens: int) -> None:
    held = handoff.hand_over(CONTEXT)
    with pytest.raises(BadInput, match="token"):
        handoff.answer(held, ["Who?"], sampling=Sampling(max_new_tokens=tokens))
