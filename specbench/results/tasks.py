"""Spec-Bench's six tasks, and which of them a category of a data set belongs to."""

from __future__ import annotations

# Spec-Bench's six, in the order of its tables, with the headings of their columns.
HEADINGS = {
    "mt_bench": "MT",
    "translation": "Trans",
    "summarization": "Sum",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
}
TASKS = tuple(HEADINGS)

# What tables call the whole of a run: no task may have this name.
OVERALL = "overall"

MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


def task_of(category: str) -> str:
    """Spec-Bench's task of a category; a category outside Spec-Bench is its own task."""
    return "mt_bench" if category in MT_BENCH_CATEGORIES else category
