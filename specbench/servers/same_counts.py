"""The counts of a run's answers side by side: what is equal must be counted alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbench.errors import CaseFailed
from specbench.results.records import CaseRecord

Texts = tuple[str, ...]
Engine = tuple[str, str]


@dataclass(slots=True)
class SameCounts:
    """Remembers the counts of a run.

    An engine gives a prompt one number of tokens, and an answer to it one number. Other engines on
    the same model may count a prompt otherwise, because their templates differ, and an answer's
    end token or not.
    """

    _prompts: dict[tuple[Engine, Texts], CaseRecord] = field(default_factory=dict)
    _answers: dict[tuple[Texts, str], dict[Engine, CaseRecord]] = field(default_factory=dict)

    def add(self, new: CaseRecord, dialogue: Texts) -> None:
        """Take an answer's counts in.

        Args:
            dialogue: what was answered: questions, and between them the answers that were quoted.

        Raises:
            CaseFailed: they contradict another answer's. Which of the two is wrong nobody can say.
        """
        assert new.served is not None
        engine = (new.engine, new.numerics)
        if new.n_prompt:
            known = self._prompts.setdefault((engine, dialogue), new)
            if known.n_prompt != new.n_prompt:
                raise _contradiction("a prompt", new.n_prompt, known.n_prompt, known)
        others = self._answers.setdefault((dialogue, new.served.text), {})
        for other_engine, other in others.items():
            if abs(other.n_new - new.n_new) > (other_engine != engine):
                raise _contradiction("a text", new.n_new, other.n_new, other)
        others.setdefault(engine, new)


def _contradiction(what: str, count: int, before: int, other: CaseRecord) -> CaseFailed:
    return CaseFailed(
        "bad_count",
        f"the server counts {count} tokens in {what} that had {before} for {other.label} "
        f"(case {other.case_id}, repeat {other.repeat})",
    )
