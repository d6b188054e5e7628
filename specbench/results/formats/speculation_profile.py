"""``speculation_profile.json``: how good a drafter is, by position of its draft. Free of torch.

The schema is version 1.0 of NVIDIA Model-Optimizer's pull requests 2247, 2313, 2315 and 2316
(``examples/specdec_bench/specdec_bench/speculation_profile.py``; no code taken). They are open and
publish no JSON schema: the models below are written from the code that writes the file, and ask for
more than it does: the identity and monotone rates, without which a file is refused.

Positions count from 0: entry i of the marginal rates is the share of steps whose first i + 1 draft
tokens were all accepted, entry i of the conditional ones that share among the steps that accepted
the first i. A length counts the bonus token, so position i ends at length i + 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specbench.errors import ResultsError, field_error
from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject

VERSION: Literal["1.0"] = "1.0"
TOLERANCE = 1e-6  # of the identity: theirs is .02, and their files are rounded to 6 digits

Rate = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Length = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Steps = Annotated[int, Field(ge=0)]


class Acceptance(BaseModel):
    """Acceptance of a set of steps.

    Attributes:
        conditional_accept_rates, marginal_accept_rates: by position, see above.
        mean_accept_length: tokens of a step, bonus included: 1 + the sum of the marginal rates.
        mean_accept_length_per_request: mean over requests of each one's own.
        acceptance_length_histogram: steps by their tokens.
    """

    model_config = ConfigDict(extra="allow")

    conditional_accept_rates: list[Rate]
    marginal_accept_rates: list[Rate]
    mean_accept_length: Length
    mean_accept_length_per_request: Length
    acceptance_length_histogram: dict[Annotated[int, Field(ge=1)], Steps]

    @model_validator(mode="after")
    def _check(self) -> Self:
        marginal, n = self.marginal_accept_rates, len(self.marginal_accept_rates)
        implied = 1 + math.fsum(marginal)
        if abs(implied - self.mean_accept_length) > TOLERANCE * (1 + n):
            raise ValueError(
                f"1 + the sum of marginal_accept_rates is {implied:.6f}, and mean_accept_length "
                f"is {self.mean_accept_length:.6f}"
            )
        if any(later > earlier + TOLERANCE for earlier, later in pairwise(marginal)):
            raise ValueError("marginal_accept_rates increase")
        product = 1.0
        for position, rate in enumerate(self.conditional_accept_rates):
            product *= rate
            if position >= n or abs(product - marginal[position]) > TOLERANCE * (2 + position):
                raise ValueError("conditional_accept_rates do not multiply to the marginal ones")
        steps = sum(self.acceptance_length_histogram.values())
        tokens = sum(length * c for length, c in self.acceptance_length_histogram.items())
        if not steps or abs(tokens / steps - self.mean_accept_length) > TOLERANCE:
            raise ValueError("mean_accept_length is not acceptance_length_histogram's")
        return self


class SpeculationProfile(Acceptance):
    """The file, of one drafter on one model.

    Attributes:
        measured: False of records that were made up; nobody's measurement.
        method: the drafting method; ``draft_checkpoint``: its draft model, None without one.
        num_speculative_tokens: entries of the rates: the deepest draft of the run.
        accept_length_model: ``measured_per_k``: other depths must be measured.
        per_category: acceptance by the data set's categories.
        measurement_conditions: what the numbers hold for.
        validation: their two checks, by our numbers.
    """

    schema_version: Literal["1.0"] = VERSION
    measured: bool
    method: str | None
    draft_checkpoint: dict[str, Any] | None
    target_model: dict[str, Any] | None
    num_speculative_tokens: Annotated[int, Field(ge=1)]
    block_size: int | None = None
    max_supported_k: int | None
    verification_method: Literal["longest_prefix", "block"] = "longest_prefix"
    accept_length_model: Literal["chain_analytic", "measured_per_k"] = "measured_per_k"
    accept_length_by_k: dict[str, Length]
    per_category: dict[str, Acceptance] | None
    measurement_conditions: dict[str, Any] | None
    validation: dict[str, Any] | None

    @model_validator(mode="after")
    def _spans(self) -> Self:
        if len(self.marginal_accept_rates) != self.num_speculative_tokens:
            raise ValueError("marginal_accept_rates are not num_speculative_tokens many")
        return self

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            specbench.storage.jsonl.DiskError: the disk is full or broken.
        """
        jsonl.write_json(path, self.model_dump(mode="json"))

    @staticmethod
    def read(path: Path) -> SpeculationProfile:
        """What a file of this schema holds.

        Raises:
            specbench.storage.jsonl.RecordError: it cannot be read, or contradicts itself.
        """
        try:
            return SpeculationProfile.model_validate(jsonl.read_json(path))
        except ValueError as error:
            raise jsonl.RecordError(f"{path}: {field_error(error)}.") from error


def profile_of(values: Mapping[str, Any], where: str) -> SpeculationProfile:
    """A checked profile of computed values, with the two checks that their files carry.

    Raises:
        ResultsError: the values contradict each other, above all the identity.
    """
    marginal: Sequence[float] = values["marginal_accept_rates"]
    reported, implied = values["mean_accept_length"], 1 + math.fsum(marginal)
    checks: JsonObject = {
        "mean_consistency": {
            "implied_mean_accept_length": implied,
            "reported_mean_accept_length": reported,
            "abs_delta": abs(implied - reported),
            "tolerance": TOLERANCE,
            "passed": True,  # else it is refused below
        },
        "marginal_monotonicity": {"passed": True, "violations": []},
    }
    try:
        return SpeculationProfile.model_validate({**values, "validation": checks})
    except ValueError as error:
        raise ResultsError(
            f"{where}: {field_error(error)}. Nothing was written: records and steps do not belong "
            "together. Measure anew: fresh=true."
        ) from error
