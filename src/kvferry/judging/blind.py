"""Two arms' answers compared blind: pairs in a drawn order, judged by a model or by people.

Owns the pairs, the sheet with its key, the verdicts and the figures. Nothing that a judge sees
names an arm. A model judge is asked about each pair twice, with the answers in both orders; an
answer wins only if both askings prefer it, else the pair is a tie. What judges is a value with two
methods (``Judge``); ``local_judge`` has one that runs here, an endpoint would be another.
One call: ``judge_pairs(judge, read_pairs(run, "transfer", "receiver_native", seed=0), folder)``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

from kvferry.errors import BadInput, CorruptFile
from kvferry.judging.answer_runs import NAMED
from kvferry.judging.paired_stats import sign_test
from kvferry.provenance import (
    add_record,
    code_version,
    machine,
    parse_json,
    read_object,
    read_records,
    sha256_text,
    sole_writer,
    sorted_json,
    start_records,
    write_json,
    write_text,
)
from kvferry.terminal import progress

VERSION = "blind-1"
Verdict = Literal["a", "b", "tie"]
_REFUSAL = re.compile(
    r"^\W*(i['’]?m sorry|sorry|i apologi[sz]e|unfortunately|as an ai|no text"
    r"|i (can ?not|can['’]t|am unable|am not able|do not have|don['’]t have)"
    r"|there is no (text|context|request))\b",
    re.IGNORECASE,
)
"""How answers begin that say they can't; counted, never judged by."""


class Judge(Protocol):
    """Says which of two answers is better, without knowing where they come from."""

    def describe(self) -> dict[str, Any]:
        """What judges, with its revision and its words: part of the record."""

    def odds(self, request: str, first: str, second: str) -> float:
        """Log-odds that the answer shown first is the better one."""


@dataclass(frozen=True)
class Pair:
    """Two answers to a request, as they are shown.

    Attributes:
        number: from 1, in the drawn order.
        first: the answer that is shown as A.
        first_is_a: whether that is the answer of the arm called ``a``; never shown.
    """

    number: int
    prompt_id: str
    request: str
    first: str
    second: str
    first_is_a: bool

    def answer(self, arm: Verdict) -> str:
        """The answer of arm ``a`` or ``b``."""
        return self.first if (arm == "a") == self.first_is_a else self.second

    def of(self, better: str) -> Verdict:
        """The arm behind a shown letter; anything but A and B is a tie."""
        if better not in ("A", "B"):
            return "tie"
        return "a" if (better == "A") == self.first_is_a else "b"


@dataclass(frozen=True)
class Pairs:
    """What is compared.

    Attributes:
        names: the arms called ``a`` and ``b``.
        map: whose run.
        missing: prompts without both answers.
    """

    names: tuple[str, str]
    map: str
    pairs: tuple[Pair, ...]
    missing: int
    seed: int

    @property
    def identity(self) -> str:
        """Sixteen hex digits over the pairs as they are shown; the arms can't be told from it."""
        shown = [[p.number, p.request, p.first, p.second] for p in self.pairs]
        return sha256_text(f"{VERSION} {json.dumps(shown)}")[:16]

    def about(self) -> dict[str, Any]:
        """For a record."""
        return {
            "a": self.names[0],
            "b": self.names[1],
            "map": self.map,
            "seed": self.seed,
            "pairs": len(self.pairs),
            "missing": self.missing,
            "identity": self.identity,
        }


def read_pairs(run: Path, a: str, b: str, *, seed: int, map: str | None = None) -> Pairs:
    """Pairs of a run of ``kvferry bench prompts``.

    Args:
        a: an arm.
        b: another one.
        seed: of the order, and of who is shown first (each arm in half of the pairs).
        map: whose answers; not needed if the run has one.

    Raises:
        BadInput: no such run, map or arms, or no prompt with both answers.
    """
    header = read_object(run / "header.json", "format")
    if header["format"] != "kvferry-answers-1":
        raise BadInput(
            expected=f"a run of kvferry bench prompts in {run}",
            got=str(header["format"]),
            next_step="name the folder that was its --out",
        )
    if not _sound(header):
        raise CorruptFile(
            expected=f"maps, and prompts with id and request, in {run / 'header.json'}",
            got="something else",
            next_step="restore the file, or remove that folder and run kvferry bench prompts again",
        )
    names = list(header["maps"])
    chosen = map if map is not None else names[0]
    if chosen not in names or (map is None and len(names) > 1):
        raise BadInput(
            expected=f"one of the run's maps: {', '.join(names)}",
            got=map or "none named",
            next_step=f"say --map {names[0]!r}",
        )
    answers: dict[str, dict[str, str]] = {}
    for row in read_records(run / "records.jsonl", keys=("text",), once=NAMED):
        if row["map"] == chosen:
            answers.setdefault(row["arm"], {})[row["prompt_id"]] = row["text"]
    if a == b or a not in answers or b not in answers:
        raise BadInput(
            expected=f"two arms among {', '.join(sorted(answers)) or 'none'}",
            got=f"{a} and {b}",
            next_step="choose two that the run has, or run kvferry bench prompts with --arms",
        )
    prompts = [p for p in header["prompts"] if p["id"] in answers[a] and p["id"] in answers[b]]
    if not prompts:
        raise BadInput(
            expected="prompts that both arms answered",
            got="none",
            next_step="let kvferry bench prompts finish",
        )
    draw = random.Random(f"{VERSION} {seed}")
    draw.shuffle(prompts)
    half = (len(prompts) + 1) // 2
    sides = [True] * half + [False] * (len(prompts) - half)
    draw.shuffle(sides)
    pairs = []
    for number, (prompt, first_is_a) in enumerate(zip(prompts, sides, strict=True), start=1):
        shown = (a, b) if first_is_a else (b, a)
        first, second = (answers[arm][prompt["id"]] for arm in shown)
        pairs.append(Pair(number, prompt["id"], prompt["request"], first, second, first_is_a))
    missing = len(header["prompts"]) - len(pairs)
    return Pairs((a, b), chosen, tuple(pairs), missing, seed)


def _sound(header: dict[str, Any]) -> bool:
    maps, prompts = header.get("maps"), header.get("prompts")
    return (
        isinstance(maps, dict)
        and bool(maps)
        and isinstance(prompts, list)
        and all(isinstance(p, dict) and {"id", "request"} <= set(p) for p in prompts)
    )


def judge_pairs(judge: Judge, found: Pairs, folder: Path) -> dict[str, Any]:
    """Ask a model judge about every pair in both orders; resumes.

    Args:
        folder: gets ``header.json``, ``records.jsonl`` and ``report.json``.

    Returns:
        the report.
    """
    header = {
        "format": "kvferry-judged-1",
        "judge": judge.describe(),
        "compared": found.about(),
        "code": code_version(),
        "machine": machine(),
    }
    with sole_writer(folder, "judge"):
        path = start_records(folder, header, same=("judge", "compared"), once=("pair",))
        done = {row["pair"] for row in read_records(path)}
        with progress(
            "judged", total=len(found.pairs), unit="pairs", done=float(len(done))
        ) as advance:
            for pair in found.pairs:
                if pair.number in done:
                    continue
                odds = [
                    judge.odds(pair.request, pair.first, pair.second),
                    judge.odds(pair.request, pair.second, pair.first),
                ]
                row = {"pair": pair.number, "prompt_id": pair.prompt_id, "odds_first": odds}
                add_record(path, row | {"verdict": verdict(pair, odds)})
                advance(1)
        rows = read_records(path, keys=("odds_first", "verdict"), once=("pair",))
        known = {pair.number for pair in found.pairs}
        if foreign := [row["pair"] for row in rows if row["pair"] not in known]:
            raise CorruptFile(
                expected=f"verdicts on pairs 1 to {len(known)} in {path}",
                got=f"one on {foreign[0]}",
                next_step="restore the file, or remove that line and run again",
            )
        report = figures(found, {row["pair"]: row["verdict"] for row in rows})
        report |= _of_both_orders(found, rows) | {"judge": header["judge"]}
        write_json(folder / "report.json", report)
    return report


def verdict(pair: Pair, odds: Sequence[float]) -> Verdict:
    """The arm that both askings prefer, else a tie.

    Args:
        odds: that the answer shown first is better: as in the pair, then with the two swapped.
    """
    if odds[0] > 0 > odds[1]:
        return pair.of("A")
    if odds[0] < 0 < odds[1]:
        return pair.of("B")
    return "tie"


def _of_both_orders(found: Pairs, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How much the judge goes by the place, and which way it leans once that cancels out."""
    pairs = {pair.number: pair for pair in found.pairs}
    said = [value for row in rows for value in row["odds_first"]]
    lean = {"a": 0, "b": 0}
    for row in rows:
        as_shown, swapped = row["odds_first"]
        if as_shown != swapped:
            lean[pairs[row["pair"]].of("A" if as_shown > swapped else "B")] += 1
    return {
        "said_first": sum(value > 0 for value in said),
        "askings": len(said),
        "disagreed": sum((row["odds_first"][0] > 0) == (row["odds_first"][1] > 0) for row in rows),
        "lean": lean | {"p_two_sided": sign_test(lean["a"], lean["b"])},
    }


def figures(found: Pairs, verdicts: dict[int, Verdict]) -> dict[str, Any]:
    """Wins, ties and losses of ``a`` against ``b``, and what the answers are like.

    Args:
        verdicts: pair number -> verdict; pairs without one are counted as unanswered.
    """
    given = list(verdicts.values())
    wins, losses = given.count("a"), given.count("b")
    report: dict[str, Any] = {
        "compared": found.about(),
        "n": len(given),
        "unanswered": len(found.pairs) - len(given),
        "wins": wins,
        "ties": given.count("tie"),
        "losses": losses,
        "p_two_sided": sign_test(wins, losses),
        "same_answer": sum(pair.first == pair.second for pair in found.pairs),
        "answers": {},
    }
    arms: tuple[Verdict, Verdict] = ("a", "b")
    for arm, name in zip(arms, found.names, strict=True):
        texts = [pair.answer(arm) for pair in found.pairs]
        report["answers"][name] = {
            "empty": sum(not text.strip() for text in texts),
            "refusals": sum(bool(_REFUSAL.search(text)) for text in texts),
            "mean_words": fmean(len(text.split()) for text in texts),
        }
    return report


def write_sheet(found: Pairs, sheet: Path) -> dict[str, Path]:
    """A sheet to print, a file to fill in, and the key, which stays with whoever made them.

    Returns:
        the three paths, by ``sheet``, ``answers`` and ``key``.

    Raises:
        BadInput: there is a file to fill in already, or another sheet or key.
    """
    answers, key = sheet.with_suffix(".answers.jsonl"), sheet.with_suffix(".key.json")
    parts = [
        f"# Which answer is better?\n\nSheet {found.identity}, {len(found.pairs)} pairs.\n\n"
        "For each request, mark the answer that does more of what it asks for: right, to the "
        "point, easy to follow. Length alone is no merit. Some answers stop in the middle because "
        "all were limited alike. Mark *neither* if you can't tell them apart.\n"
    ]
    for pair in found.pairs:
        parts.append(
            f"## {pair.number}\n\nRequest:\n\n{_fenced(pair.request)}\n\n"
            f"Answer A:\n\n{_fenced(pair.first)}\n\nAnswer B:\n\n{_fenced(pair.second)}\n\n"
            "Better: [ ] A   [ ] B   [ ] neither\n"
        )
    shown = "\n".join(parts)
    kept = sorted_json({"compared": found.about(), "pairs": [asdict(pair) for pair in found.pairs]})
    # A kill between the files leaves the first ones: they are as they would be written now.
    for path, text in ((sheet, shown), (key, kept), (answers, None)):
        if path.exists() and (path.is_dir() or path.read_bytes() != (text or "").encode()):
            raise BadInput(
                expected=f"no file {path} yet",
                got="one that may be filled in" if path == answers else "something else",
                next_step="choose another --sheet, or remove it",
            )
    write_text(sheet, shown)
    write_text(key, kept)
    blank = [{"sheet": found.identity, "pair": p.number, "better": ""} for p in found.pairs]
    write_text(answers, "".join(json.dumps(row) + "\n" for row in blank))
    return {"sheet": sheet, "answers": answers, "key": key}


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"~+", text)), default=0)
    fence = "~" * max(3, longest + 1)
    return f"{fence}text\n{text.strip() or '(no answer)'}\n{fence}"


def read_sheet(found: Pairs, filled: Path) -> dict[int, Verdict]:
    """What a person marked: pair number -> verdict; blank lines are left out.

    Raises:
        BadInput: another sheet's file, an unknown or repeated pair, or another word than A, B,
            neither.
    """
    try:
        lines = filled.read_text(encoding="utf-8").removeprefix("\ufeff").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            expected=f"a readable file {filled}", got=str(error), next_step="check the path"
        ) from error
    pairs = {pair.number: pair for pair in found.pairs}
    verdicts: dict[int, Verdict] = {}
    marked: set[int] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        problem = ""
        try:
            row = parse_json(line)
            sheet, place = row["sheet"], row["pair"]
            if type(place) is not int:
                raise TypeError(f"pair {place!r}, no number")
            better = str(row["better"]).strip().upper()
        except (ValueError, LookupError, TypeError) as error:
            sheet, place, better, problem = "", 0, "", f"{type(error).__name__}: {error}"
        if not problem and sheet != found.identity:
            problem = f"sheet {sheet}, not {found.identity} (other arms, seed or answers)"
        elif not problem and (place not in pairs or place in marked):
            problem = f"pair {place}, unknown or marked before"
        elif not problem and better not in ("A", "B", "NEITHER", "TIE", ""):
            problem = f"the mark {better!r}"
        if problem:
            raise BadInput(
                expected=f"a pair's mark (A, B or neither) at {filled}:{number}",
                got=problem,
                next_step="fill in the file that was written with the sheet",
            )
        marked.add(place)
        if better:
            verdicts[place] = pairs[place].of(better)
    if not verdicts:
        raise BadInput(
            expected=f"a mark (A, B or neither) in {filled}",
            got=f"{len(marked)} pairs, none marked",
            next_step='write e.g. "better": "A" behind each pair that was judged',
        )
    return verdicts
