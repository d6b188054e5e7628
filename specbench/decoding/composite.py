"""Drafters made of other drafters: their joint needs, and calls passed on to the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specbench.arrays import IntArray
from specbench.decoding.drafter import Drafter, ModelDrafter
from specbench.decoding.structs import (
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
    StepOutcome,
)
from specbench.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

# Needs of a composite if any of its parts has them, and those that all parts must have.
_ANY = (
    "logits", "prompt_logits", "first_logits", "tree_hidden", "draft_model", "reference",
    "overlap", "clock", "eager",
)  # fmt: skip
_ALL = ("tokens_only", "sampling")


@dataclass(kw_only=True, eq=False)
class Composite(ModelDrafter):
    """Base of drafters with parts. The composite's state scope holds for its parts too.

    A class defines `entries` and `own_needs`, and chooses between its parts in ``drafting``. It
    passes each outcome to the parts in ``observe``; the other calls are passed on here.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(isinstance(entry, Drafter) for entry in self.entries):
            return  # still names, which have no needs
        for part in self.parts:
            if part.needs.layout != "tree":
                raise ConfigurationError(
                    f"method={self.name} cannot hold {part.name} in the layout "
                    f"{part.needs.layout!r}: the target runs one tree a step. Choose its tree "
                    "layout."
                )
        drafting = [part.name for part in self.parts if part.needs.draft_model]
        if len(drafting) > 1:
            raise ConfigurationError(
                f"method={self.name} cannot hold {' and '.join(drafting)} together: they would "
                "overwrite each other in the draft model's one cache. Keep one of them."
            )

    @property
    def entries(self) -> Sequence[Any]:
        """The knob that names the parts, which a configuration turns into drafters."""
        raise NotImplementedError

    @property
    def own_needs(self) -> Needs:
        """Needs of its own besides its parts'; ``max_nodes`` counts their nodes too."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that it is made of.

        Raises:
            ConfigurationError: an entry is still a user's text and not a drafter.
        """
        for entry in self.entries:
            if not isinstance(entry, Drafter):
                raise ConfigurationError(
                    f"a part of method={self.name} must be a method, got {entry!r}. Write a "
                    "method's name."
                )
        return tuple(self.entries)

    @property
    def needs(self) -> Needs:
        """Its own needs and those of all parts.

        ``layout`` and ``max_nodes`` are not merged. The parts' artifacts get the part's index as a
        prefix of their name, so that two parts may have files of the same name.
        """
        base, parts = self.own_needs, [part.needs for part in self.parts]
        everyone = (base, *parts)
        artifacts = [
            replace(artifact, name=f"part{i}.{artifact.name}")
            for i, needs in enumerate(parts)
            for artifact in needs.artifacts
        ]
        layers = {layer for needs in everyone for layer in needs.hidden_layers}
        nodes = [needs.draft_nodes or needs.max_nodes for needs in everyone if needs.draft_model]
        flags: dict[str, Any] = {key: any(getattr(n, key) for n in everyone) for key in _ANY}
        flags |= {key: all(getattr(n, key) for n in everyone) for key in _ALL}
        return replace(
            base,
            hidden_layers=tuple(sorted(layers)),
            draft_nodes=max(nodes, default=0),
            heads=tuple(sorted({head for needs in everyone for head in needs.heads})),
            artifacts=(*base.artifacts, *artifacts),
            **flags,
        )

    def setup(self, context: DraftContext) -> None:
        for i, part in enumerate(self.parts):
            given, prefix = context.artifacts.items(), f"part{i}."
            files = {n.removeprefix(prefix): path for n, path in given if n.startswith(prefix)}
            part.setup(replace(context, artifacts=files))

    def reset(self) -> None:
        for part in self.parts:
            part.reset()

    def set_reference(self, output: IntArray) -> None:
        for part in self.parts:
            if part.needs.reference:
                part.set_reference(output)

    def observe_prompt(self, prompt: IntArray, logits: torch.Tensor) -> None:
        for part in self.parts:
            if part.needs.prompt_logits or part.needs.first_logits:
                part.observe_prompt(prompt, logits)

    def observe_prompt_hidden(self, prompt: IntArray, hidden: Mapping[int, torch.Tensor]) -> None:
        for part in self.parts:
            if layers := part.needs.hidden_layers:
                part.observe_prompt_hidden(prompt, {i: hidden[i] for i in layers})

    def begin(self, state: DecodeState) -> None:
        for part in self.parts:
            part.begin(state)

    def overlap(self, state: DecodeState, tree: DraftTree) -> None:
        for part in self.parts:
            if part.needs.overlap:
                part.overlap(state, tree)

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        for part in self.parts:
            part.observe(state, outcome)

    def end(self, state: DecodeState) -> None:
        for part in self.parts:
            part.end(state)

    def report(self) -> dict[str, ReportValue]:
        """Collect the parts' reports, with the part's name and a dot before each key."""
        reports = ((part.name, part.report()) for part in self.parts)
        return {f"{name}.{key}": value for name, part in reports for key, value in part.items()}

    def close(self) -> None:
        for part in self.parts:
            part.close()
