"""Bad input meets an error that says what was expected, what came, and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.errors import (
    BadInput,
    ContextTooLong,
    KvferryError,
    NotFinite,
    TokenizerMismatch,
    UnsupportedGeometry,
    WrongPair,
)
from kvferry.maps.linear import LinearTarget
from kvferry.models.alignment import compare_tokenizers
from kvferry.running.decode import Sampling
from kvferry.running.handoff import Handoff
from kvferry.running.prompt import PromptLayout
from tests.small_pair import identity_map, loaded, random_map, tokenizer


@pytest.fixture(scope="module")
def ferry() -> Handoff:
    source, receiver = loaded("qwen2", layers=2), loaded("llama", seed=1)
    return Handoff(source, receiver, random_map(source, receiver))


@pytest.mark.parametrize("context", ["", "  \n\t "])
@pytest.mark.parametrize("arm", ["transfer", "receiver_native", "source_native"])
def test_an_empty_context(ferry: Handoff, context: str, arm: str) -> None:
    with pytest.raises(BadInput, match=r"empty context|white space"):
        ferry(context, "Who?", arm=arm)  # type: ignore[arg-type]


def test_an_empty_question(ferry: Handoff) -> None:
    with pytest.raises(BadInput, match="empty question"):
        ferry("Some text.", " ")
    held = ferry.hand_over("Some text.")
    with pytest.raises(BadInput, match="at least one question"):
        ferry.answer(held, [])


def test_a_context_beyond_the_limit_names_both_numbers(ferry: Handoff) -> None:
    with pytest.raises(ContextTooLong, match=r"at most 512 tokens.*got \d{3,}"):
        ferry("word " * 200, "Who?")
    held = ferry.hand_over("word " * 20)
    with pytest.raises(ContextTooLong, match="512"):
        ferry.answer(held, ["Who?"], sampling=Sampling(max_new_tokens=4000))


def test_unknown_arm_and_missing_other_document(ferry: Handoff) -> None:
    with pytest.raises(BadInput, match="an arm among"):
        ferry("Some text.", "Who?", arm="transferred")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="another document"):
        ferry("Some text.", "Who?", arm="wrong_document")


def test_a_map_the_other_way_round_or_of_another_revision(ferry: Handoff) -> None:
    with pytest.raises(WrongPair, match="other way round"):
        Handoff(ferry.receiver, ferry.source, ferry.map)
    folder = replace(ferry.source.folder, revision="f" * 64)
    other = replace(ferry.source, folder=folder)
    with pytest.raises(WrongPair, match="source revision"):
        Handoff(other, ferry.receiver, ferry.map)
    assert Handoff(other, ferry.receiver, ferry.map, allow_other_revision=True)


def test_tokenizers_that_disagree(ferry: Handoff) -> None:
    other = replace(ferry.receiver, tokenizer=tokenizer(shift=3))
    with pytest.raises(TokenizerMismatch, match="other ids"):
        Handoff(ferry.source, other, ferry.map)
    found = compare_tokenizers(ferry.source.tokenizer, other.tokenizer)
    assert not found.agree
    assert found.differing


def test_a_layout_with_another_prefix_than_the_map_s(ferry: Handoff) -> None:
    other = PromptLayout(instruction="Listen.\n\n")
    with pytest.raises(WrongPair, match="prompt layout"):
        Handoff(ferry.source, ferry.receiver, ferry.map, layout=other)
    assert Handoff(ferry.source, ferry.receiver, ferry.map, layout=PromptLayout(cue="It is"))


def test_nan_in_a_map_or_a_model() -> None:
    source, receiver = loaded("qwen2", layers=2), loaded("llama", seed=1)
    cache_map = random_map(source, receiver)
    broken = dict(cache_map.targets)
    weight = broken["1.V"].weight.clone()
    weight[0, 0] = torch.nan
    broken["1.V"] = LinearTarget(broken["1.V"].layers, weight, broken["1.V"].bias)
    cache_map.targets = broken
    with pytest.raises(NotFinite, match="layer 1"):
        Handoff(source, receiver, cache_map)("Some text.", "Who?")
    ill = loaded("qwen2", layers=2)
    with torch.no_grad():
        ill.model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.inf
    with pytest.raises(NotFinite):
        Handoff(ill, ill, identity_map(ill))("Some text.", "Who?")


def test_layer_kinds_not_run_are_refused_by_name() -> None:
    windowed = loaded("mistral", sliding_window=16)
    with pytest.raises(UnsupportedGeometry, match="sliding layers are not run yet"):
        Handoff(windowed, windowed, identity_map(windowed))


def test_special_tokens_in_a_context_stay_text(ferry: Handoff) -> None:
    ids = ferry.layout.context("before <e> after")
    assert ferry.source.tokenizer.eos_token_id not in ids.tolist()
    assert ferry.layout.tokenizer.decode(ids) == "before <e> after"


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask", "--map", "nowhere", "--context", "missing.txt", "--question", "Who?"],
        ["fit", "no-capture", "--out", "x"],
        ["check", "no-such-model", "smollm2-135m"],
        ["bench", "--map", "nowhere", "--lengths", "ten"],
        ["merge", "a", "b", "--out", "c"],
        ["models", "show", "qwen"],
        ["capture", "a", "b", "--corpus", "missing.txt", "--out", "x"],
    ],
)
def test_the_command_line_refuses_without_a_traceback(arguments: list[str], tmp_path) -> None:  # type: ignore[no-untyped-def]
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "next" in done.stderr
    assert not list(tmp_path.iterdir())


def test_errors_have_three_lines() -> None:
    lines = KvferryError(expected="a", got="b", next_step="c").lines()
    assert [line.split()[0] for line in lines] == ["expected", "got", "next"]


@pytest.mark.parametrize(
    "options", [{"temperature": float("nan")}, {"temperature": -1.0}, {"seed": 2**70}]
)
def test_sampling_that_no_generator_takes(options: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(BadInput, match="temperature 0, or"):
        Sampling(**options)
