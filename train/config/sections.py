"""The sections of the configuration; the docstring under a field is its help."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from gradscope.train.episode import Style


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and field.annotation in (int, float):
            raise ValueError("input should be a number, not true or false")
        return value


class PluginSection(Section):
    """A section that names a plug-in; its further keys are that plug-in's own keyword-only options."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Registered name of the plug-in, or `module:attribute`."""

    @property
    def options(self) -> dict[str, Any]:
        """The plug-in's own options."""
        return dict(self.model_extra or {})


class WorkflowSection(PluginSection):
    """How several roles answer one problem together, and the options of that workflow."""

    name: str = "voting"
    """Workflow: see `gradscope list workflows`."""
    style: Style = "compact"
    """Wording of the prompts: `natural` sentences, or `compact` tags for the embedded model."""


class TaskSection(PluginSection):
    """Where problems come from, and the options of that task."""

    name: str = "stack_code"
    """Task: see `gradscope list tasks`."""


class ModelSection(Section):
    """The frozen base model that all policies adapt."""

    path: str = "tiny"
    """`tiny` (embedded), `smollm2`, a folder, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes CUDA when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the frozen weights; `auto` is float32 on the CPU and bfloat16 on CUDA. Adapters are float32."""
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    """Attention kernel; `auto` is sdpa. On CUDA eager repeats bit by bit, but takes much memory."""


class PolicySection(Section):
    """Which slots share trainable parameters, and the shape of the adapters."""

    routing: Literal["shared", "isolated"] | dict[str, str] = "isolated"
    """`shared` (one adapter), `isolated` (one a role), or a map from role or slot to the adapter's name."""
    rank: int = Field(default=8, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale of the adapters' output, as alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that get an adapter: `all-linear` or a list of name endings."""


class RolloutSection(Section):
    """How episodes are sampled."""

    num_problems: int = Field(default=6, ge=1)
    """Problems in a training step."""
    group_size: int = 8
    """Episodes played on each problem; advantages compare these, so at least 2."""
    temperature: float = Field(default=0.7, gt=0)
    """Sampling temperature; the trainer divides its logits by the same number."""
    max_new_tokens: int = Field(default=12, ge=1)
    """Longest reply, its end token included; a longer one is cut and counted as truncated."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Longest prompt; an episode that needs a longer one is dropped from the step and counted."""
    max_batch_rows: int = Field(default=512, ge=1)
    """Rows decoded side by side; lower it when memory runs out. Samples do not depend on it."""


class AlgorithmSection(Section):
    """GRPO: rewards, advantages and the loss."""

    reward: Literal["outcome", "own"] = "outcome"
    """`outcome` gives every reply its episode's reward, `own` its own correctness where it can be graded."""
    group_by: Literal["slot", "role", "turn"] = "slot"
    """Replies compared with one another: those of one problem and slot, role, or role and turn."""
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted from a reward."""
    scale: Literal["std", "batch_std", "none"] = "std"
    """What the difference is divided by: the group's deviation, the whole batch's, or nothing."""
    ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off in the deviation."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the deviation."""
    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a group of one: 0, or reward / (1 + eps) as the reference study has it."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Lower clipping range of the probability ratio."""
    clip_high: float = Field(default=0.28, ge=0)
    """Upper clipping range of the probability ratio."""
    aggregation: Literal["sequence_mean_token_mean", "token_mean", "fixed_length", "sequence_sum"] = (
        "sequence_mean_token_mean"
    )
    """How token losses become one number; `fixed_length` divides by rollout.max_new_tokens."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps a policy takes on one rollout; problems are split evenly among them."""


class OptimSection(Section):
    """AdamW, one optimizer a policy, and the learning-rate schedule."""

    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up; `cosine` falls to 0 at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training steps over which the rate rises linearly to its peak."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """A policy's gradient is scaled down to this norm."""


class TrainSection(Section):
    """Length, seed and resources of a run."""

    steps: int = Field(default=40, ge=0)
    """Training steps; a resumed run may extend them."""
    seed: int = Field(default=0, ge=0)
    """Seed of problems, sampling and adapters; the embedded base model is the same for all seeds."""
    threads: int = Field(default=1, ge=0)
    """CPU threads of torch, 0 for its own choice; small models are fastest on one."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Padded tokens in one forward and backward pass; lower it when memory runs out."""
    checkpoint_every: int = Field(default=50, ge=0)
    """Steps between checkpoints, 0 for none; a best evaluation and the last step always leave one."""


class EvaluateSection(Section):
    """Evaluation on held-out problems during training."""

    every: int = Field(default=10, ge=0)
    """Steps between evaluations, 0 for none during training."""
    num_problems: int = Field(default=100, ge=1)
    """Held-out problems, the same ones every time; a task with fewer gives all it has."""
    at_start: bool = True
    """Whether the untrained policies are evaluated as step 0."""
    sampled: bool = True
    """Whether to evaluate at rollout.temperature, one episode a problem."""
    greedy: bool = True
    """Whether to evaluate with the most probable token."""


class ProbesSection(Section):
    """Measurement of each slot's gradient."""

    enabled: bool = True
    """Whether to measure; weights come out bit by bit the same either way, except in mode `fused`."""
    mode: Literal["auto", "observe", "fused"] = "auto"
    """How gradients are separated; see `gradscope.probes.attach`. `fused` is fastest on an accelerator."""
    cross: bool = True
    """Whether to measure products between halves of an update's problems, free of a problem's own noise."""
    attribution: Literal["role", "slot", "none"] = "role"
    """Whose contributions to applied changes are told apart; each is one more momentum in memory."""
    modules_every: int = Field(default=25, ge=0)
    """Updates of a policy between those told apart by module, 0 for none; jumps of the gradient add some."""
    rows_every: int = Field(default=0, ge=0)
    """Updates of a policy between those whose rows are all measured and sketched, 0 for none."""
    top_rows: int = Field(default=0, ge=0)
    """Rows with the largest gradients that every update keeps, with what was said."""
    sketch_dim: int = Field(default=256, ge=0)
    """Numbers in the sketch of a row's gradient; products of sketches are off by about 1 / sqrt of it."""
    sketch_seed: int = Field(default=0, ge=0)
    """Seed of the sketches; equal seeds can be compared across runs."""
    influence_every: int = Field(default=0, ge=0)
    """Updates of a policy between those whose functional influence is measured, 0 for none."""


class RunSection(Section):
    """What a run directory keeps."""

    fsync: Literal["never", "checkpoint", "record"] = "checkpoint"
    """When the log is forced to the disk, which matters when the machine goes down; a crash costs nothing."""
    episodes_every: int = Field(default=10, ge=0)
    """Steps between records of what was said (`episodes/`), 0 for none."""
    episodes_per_step: int = Field(default=8, ge=1)
    """Episodes recorded at such a step, spread over its problems."""
    episodes_max_megabytes: float = Field(default=20.0, gt=0)
    """When `episodes/` holds this much, nothing more is recorded there."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Latest checkpoints that are kept, beside the best one."""


class TrackingSection(Section):
    """How a run is followed while it goes on."""

    print_every: int = Field(default=10, ge=1)
    """Steps between printed lines where no terminal shows the progress."""
    to: tuple[str, ...] = ()
    """Trackers that get the run's scalars as it goes on: see `gradscope list exporters`."""
    project: str = Field(default="gradscope", min_length=1)
    """Project of the run, for trackers that have them."""
    name: str = ""
    """Name of the run there; empty for that of its directory."""


class Config(Section):
    """The whole configuration of a training run."""

    workflow: WorkflowSection = WorkflowSection()
    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    policy: PolicySection = PolicySection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    probes: ProbesSection = ProbesSection()
    run: RunSection = RunSection()
    tracking: TrackingSection = TrackingSection()


PLUGIN_SECTIONS = ("workflow", "task")
"""Sections whose further keys belong to the plug-in that they name."""


def section_model(section: str) -> type[Section]:
    """Returns the model of a section of `Config`."""
    return type(getattr(Config(), section))
