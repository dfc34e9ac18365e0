"""A model that runs here as a blind judge: the likelier of two letters after our own prompt.

Owns the prompt's words. The letters' log-likelihoods are compared, so no answer has to be parsed.
Refuses pairs beyond the model's limit. One call: ``LocalJudge(load_model("qwen2.5-coder-1.5b"))``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.errors import ContextTooLong

if TYPE_CHECKING:
    from kvferry.models.load import LoadedModel

INSTRUCTION = (
    "Below are a request and two answers to it. Decide which answer does more of what the request "
    "asks for: right, to the point, easy to follow. Neither its length nor its place is a merit.\n"
    "\nRequest:\n"
)
BETWEEN = ("\n\nAnswer A:\n", "\n\nAnswer B:\n")
QUESTION = "Which of the two answers is better, A or B?"
CUE = "The better answer is"
NOTHING = "(no answer)"


class LocalJudge:
    """A loaded model that is asked which of two answers is better."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Bind the prompt to the model's chat template."""
        import torch

        from kvferry.models.cache import forward
        from kvferry.models.geometry import Geometry
        from kvferry.running.prompt import PromptLayout

        self.loaded = loaded
        layout = PromptLayout(instruction=INSTRUCTION, before_question="\n\n", cue=CUE)
        self.layout = layout.bind(loaded.tokenizer)
        self.limit = Geometry.from_config(loaded.model.config).max_positions
        self.letters = [self.layout.continuation(f" {letter}") for letter in "AB"]
        ids = self.layout.prefix().to(loaded.device)
        with torch.no_grad():
            positions = torch.arange(ids.numel(), device=loaded.device)
            _, self._prefix = forward(loaded.model, ids[None], positions[None])

    def describe(self) -> dict[str, Any]:
        """Model, revision and the words it is asked with."""
        return {
            "kind": "local",
            "model": self.loaded.spec,
            "revision": self.loaded.revision,
            "prompt": self.layout.text(
                "{request}" + BETWEEN[0] + "{A}" + BETWEEN[1] + "{B}", QUESTION
            ),
            "choice": "log-likelihood of ' A' against ' B'",
        }

    def odds(self, request: str, first: str, second: str) -> float:
        """Log-odds that the answer shown first is the better one.

        Raises:
            ContextTooLong: beyond the model's limit.
        """
        import torch

        from kvferry.running.decode import score

        shown = [text.strip() or NOTHING for text in (first, second)]
        body = request + BETWEEN[0] + shown[0] + BETWEEN[1] + shown[1]
        tail = torch.cat((self.layout.context(body), self.layout.tail(QUESTION)))
        longest = max(int(ids.numel()) for ids in self.letters)
        need = len(self.layout.prefix_ids) + int(tail.numel()) + longest
        if self.limit and need > self.limit:
            raise ContextTooLong(
                expected=f"at most {self.limit} tokens, the limit of {self.loaded.spec}",
                got=f"{need} for a request and two answers",
                next_step="judge with a model of a longer limit, or shorter answers",
            )
        a, b = score(self.loaded, self._prefix, tail, self.letters)
        return float(a.sum() - b.sum())
