"""How close the steps of a replay are to a live run's, and what cannot be replayed."""

from __future__ import annotations

from specbench.decoding.composite import Composite
from specbench.decoding.drafter import Drafter
from specbench.decoding.head_drafter import HeadDrafter
from specbench.decoding.structs import Needs
from specbench.errors import NeedsNotMet
from specbench.replay import states
from specbench.replay.traces import Traces

# Of drafters of tokens, of heads, of others.
EXACT, ROUNDED, APPROXIMATE = "exact", "exact up to rounding", "approximate"


def replay_kind(drafter: Drafter, traces: Traces) -> str:
    """``exact``, ``exact up to rounding`` or ``approximate``.

    Raises:
        NeedsNotMet: the drafter needs the model; says what to do.
    """
    if drafter.needs.clock:
        raise NeedsNotMet(
            f"method={drafter.name} goes by the time that its steps take, and a replay takes none. "
            "Type method.reward=priced, or run it live (runner=offline)."
        )
    if _tokens_suffice(drafter):
        return EXACT
    if _states_suffice(drafter):
        if traces.hidden_states is None:
            raise NeedsNotMet(
                f"method={drafter.name} reads the target's hidden states, and {traces.path} holds "
                f"none. {how_to_record(traces.config.get('model', {}).get('name', 'MODEL'))}"
            )
        return ROUNDED
    needs = drafter.needs
    not_recorded = needs.hidden_layers or needs.draft_model or needs.overlap
    if isinstance(drafter, Composite) or not_recorded or not needs.logits:
        raise NeedsNotMet(
            f"method={drafter.name} needs {_wanted(needs)}, which a recorded output does not have: "
            "it cannot be replayed. Run it live (runner=offline), or leave it out."
        )
    if needs.prompt_logits:
        raise NeedsNotMet(
            f"method={drafter.name} learns from the prompt's logits, which are not recorded. Type "
            "method.learn_prompt=false, or run it live (runner=offline)."
        )
    wanted = getattr(drafter, "k", 1)
    if traces.top < wanted:
        raise NeedsNotMet(
            f"method={drafter.name} learns from the {wanted} likeliest tokens at each position, "
            f"and {traces.path} holds {traces.top}. Record them: run ar there with record=true."
        )
    return APPROXIMATE


def _tokens_suffice(drafter: Drafter) -> bool:
    if isinstance(drafter, Composite):
        return all(_tokens_suffice(part) for part in drafter.parts)
    if drafter.needs.hidden_layers:
        return False
    # The reference output is what the traces are.
    return drafter.needs.tokens_only or drafter.needs.reference


def _states_suffice(drafter: Drafter) -> bool:
    """Whether it looks at committed tokens and their states alone, not at rejected nodes."""
    if isinstance(drafter, Composite):
        return all(_tokens_suffice(part) or _states_suffice(part) for part in drafter.parts)
    needs = drafter.needs
    return isinstance(drafter, HeadDrafter) and not (
        needs.tree_hidden or needs.logits or needs.prompt_logits or needs.draft_model
    )


def check_layers(drafter: Drafter, traces: Traces) -> None:
    """Refuse a head that reads other hidden states than were recorded."""
    assert traces.hidden_states is not None
    n_layers, recorded = traces.hidden_states
    wanted = {states.place(layer, n_layers) for layer in drafter.needs.hidden_layers}
    if missing := sorted(wanted - recorded):
        layers = sorted((wanted | recorded) - {n_layers})
        raise NeedsNotMet(
            f"method={drafter.name} reads the hidden states {', '.join(map(str, missing))}, and "
            f"{traces.path} holds {', '.join(map(str, sorted(recorded)))}. "
            f"{how_to_record(traces.config['model']['name'], layers)}"
        )


def how_to_record(model: str, layers: list[int] | None = None) -> str:
    """The command that records a model's hidden states, for an error message."""
    more = f" 'record_layers={layers}'" if layers else ""
    return (
        f"Type: python run.py method=ar model={model} record=states{more}, with the questions "
        "wanted, and name its folder in runner.traces."
    )


def _wanted(needs: Needs) -> str:
    """What of the model a drafter asked for, in words."""
    kinds = {
        "a draft model": needs.draft_model,
        "hidden states": bool(needs.hidden_layers),
        "logits": needs.logits or needs.prompt_logits,
    }
    found = [word for word, asked in kinds.items() if asked]
    return " and ".join(found) or "the target's choices at its own draft nodes"
