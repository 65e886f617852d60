"""The `args` of the Serve application, checked once and whole.

Serve drops unknown keys of its own blocks in silence and hands `args` on unread. Here every key is known, every value
has its range, and a refusal lists all problems at once: which key, what was given, what is allowed.

`EQUIPOISE_OVERLAY=path.yaml` names a mapping that is merged over `args` before they are checked, so that a
configuration written for GPUs can be tried on a laptop without being edited.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from actors.model_source import DEFAULT_MODEL
from app.default_sampling import SamplingSettings
from app.moves_settings import MovesSettings
from app.overlay import OVERLAY_VARIABLE, merged_with_overlay
from app.settings_block import MAX_GIB, SettingsBlock
from app.settings_error import SettingsError, problems_of, shown
from app.store_settings import StoreSettings
from migrate.load import Role

__all__ = [
    "AppSettings",
    "DispatchSettings",
    "EngineSettings",
    "IngressSettings",
    "PlanSettings",
    "Role",
    "RoleSettings",
    "SettingsError",
    "StoreSettings",
    "load_settings",
]


class _EngineFields(SettingsBlock):
    """The fields of EngineSettings, each checked for itself: what a role's overrides are checked with."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs. auto: CUDA where the worker was given a GPU, else the CPU."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of weights and KV. auto: the checkpoint's own; on the CPU float16 becomes bfloat16.",
    )
    block_tokens: int | None = Field(
        default=None,
        ge=16,
        multiple_of=16,
        description="Tokens in a KV block, a multiple of 16. null: 16, or 256 with flash attention, whose paged "
        "kernels want pages of 256 tokens.",
    )
    slab_pages: int = Field(
        default=16, ge=1, description="Pages in a slab, the grain in which device memory is dealt to lanes."
    )
    kv_cache_gib: float | None = Field(
        default=None,
        gt=0,
        le=MAX_GIB,
        description="Device memory for KV in GiB. null: what gpu_memory_utilization leaves on CUDA, 1 GiB on the CPU.",
    )
    kv_cache_blocks: int | None = Field(
        default=None, ge=1, description="Exactly so many KV blocks, instead of kv_cache_gib. null: as many as fit."
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that weights, working memory and KV may fill together. Unused on the CPU.",
    )
    max_batch_tokens: int = Field(
        default=512, ge=1, description="Tokens in one step at most, prompt chunks and decoding sequences together."
    )
    max_running_requests: int = Field(default=64, ge=1, description="Sequences in the running batch at most.")
    max_steps_in_flight: int = Field(
        default=2,
        ge=1,
        description="Steps under way at a time while some layers lie on other workers, so that all of these have "
        "something to compute (mode balanced).",
    )
    hosted_slice_ms: float | None = Field(
        default=None,
        gt=0,
        description="What another worker may take for its layers of a prompt's chunk, between two steps of its own "
        "(mode balanced): chunks are made accordingly, whatever that costs. null: as long as its own steps take, but "
        "no chunk is so short that a token costs much more than in a longer one.",
    )
    hosting_pause: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="While a worker runs layers of another's (mode balanced), its own decode steps are so many of "
        "their lengths apart, so that more requests share one and the other's steps find it free. 0: not at all.",
    )
    max_context_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Longest prompt plus answer in tokens, if the KV cache holds so many. null: the model's own limit.",
    )
    attention: Literal["auto", "torch", "flash"] = Field(
        default="auto",
        description="Attention kernels. auto: flash where flash-attn is installed and the device is CUDA, else "
        "the worker's own on the CPU, else torch.",
    )
    kernels: Literal["auto", "torch"] = Field(
        default="auto",
        description="Kernels on the CPU in bfloat16 and float32. auto: the worker's own, which a C++ compiler builds "
        "at the first start, else torch's.",
    )
    torch_threads: int = Field(default=1, ge=1, description="Threads of one worker's operators on the CPU.")
    cuda_graphs: bool = Field(default=True, description="Record decode steps as CUDA graphs. Not used on the CPU.")


class EngineSettings(_EngineFields):
    """What one worker's model runner is built with."""

    @model_validator(mode="after")
    def _fields_agree(self) -> EngineSettings:
        if self.kv_cache_gib is not None and self.kv_cache_blocks is not None:
            raise ValueError(
                f"kv_cache_gib ({self.kv_cache_gib:g}) and kv_cache_blocks ({self.kv_cache_blocks}) are both given: "
                "at most one is allowed; leave the other out"
            )
        if self.attention == "flash":
            if self.device == "cpu":
                raise ValueError(
                    "attention 'flash' runs on CUDA only, and device is 'cpu': use attention 'torch' or 'auto'"
                )
            if self.block_tokens is not None and self.block_tokens % 256:
                raise ValueError(
                    f"attention 'flash' wants block_tokens in multiples of 256, and it is {self.block_tokens}: "
                    "use 256 or leave it out"
                )
        if self.max_batch_tokens < self.max_running_requests:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) is below max_running_requests "
                f"({self.max_running_requests}), but each running request takes one token a step: "
                "raise the first or lower the second"
            )
        return self


class RoleSettings(SettingsBlock):
    """The workers of one role: how many, what Ray reserves for each, and where they differ from `engine`."""

    replicas: int = Field(default=1, ge=1, description="Workers of this role.")
    num_cpus: float = Field(default=1.0, ge=0, description="CPUs that Ray reserves for each worker.")
    num_gpus: float = Field(default=0.0, ge=0, description="GPUs that Ray reserves for each worker.")
    engine: dict[str, Any] = Field(
        default_factory=dict, description="Keys of `engine` that differ for this role; they are merged over it."
    )

    @field_validator("engine")
    @classmethod
    def _overrides_are_engine_keys(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        _EngineFields.model_validate(overrides)
        return overrides


class DispatchSettings(SettingsBlock):
    """How a worker is chosen for a request."""

    policy: Literal["load_aware", "round_robin", "power_of_two", "prefix_aware"] = Field(
        default="load_aware",
        description="The rule. load_aware: the least pending work in seconds, wherever the cache lies.",
    )


class IngressSettings(SettingsBlock):
    """The HTTP front: admission, authentication, dispatch, health."""

    replicas: int = Field(default=1, ge=1, description="Ingress replicas.")
    num_cpus: float = Field(default=1.0, ge=0, description="CPUs that Ray reserves for each ingress replica.")
    api_keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with the names and hashes of the accepted API keys, one a line. null: no key is asked for, "
        "and only clients on the ingress's own machine are served.",
    )
    max_inflight_requests: int = Field(
        default=256, ge=1, description="Requests that one ingress replica has running at most."
    )
    max_queued_requests: int = Field(
        default=256, ge=0, description="Requests that wait in one ingress replica at most; one more is answered 429."
    )
    request_timeout_s: float = Field(
        default=600.0, gt=0, description="Seconds until a request that has not ended is cancelled."
    )
    priority_step_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="A request whose priority is larger by 1 waits, here and in a worker, as if it had come so many "
        "seconds later: it is overtaken for so long, and not for ever.",
    )
    grammar_cpu_s: float = Field(
        default=4.0,
        gt=0,
        le=60,
        description="Seconds of CPU that the check of a grammar or schema which is new to an ingress replica may take; "
        "one that takes longer is answered 400.",
    )
    tracing: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="`module:function` that each ingress replica calls at its start to set up OpenTelemetry; then "
        "every request leaves spans (docs/metrics.md). null: there are none.",
    )
    dispatch: DispatchSettings = Field(default_factory=DispatchSettings, description="Choice of workers.")
    stall_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds without progress, with work at hand, until /health says that a worker stalls; a step that "
        "takes longer has its worker replaced.",
    )


class PlanSettings(SettingsBlock):
    """Facts about the hardware for `python -m app.plan`; the running application does not read them."""

    device_memory_gib: float = Field(default=80.0, gt=0, le=MAX_GIB, description="Memory of one device in GiB.")
    object_store_gib: float | None = Field(
        default=None,
        gt=0,
        le=MAX_GIB,
        description="Size of Ray's object store on each node. One that is too small for store.dram_gib and what is in "
        "flight beside it is refused. null: it is not compared.",
    )


class AppSettings(SettingsBlock):
    """Everything under `args` of the application."""

    model: str = Field(
        default=DEFAULT_MODEL,
        min_length=1,
        description="Folder in Hugging Face layout, .gguf file, Hub id (org/name), or, for tests, "
        "random/FAMILY-LAYERSxHEADS.",
    )
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name that clients give as `model`. null: the name that `model` resolves to.",
    )
    mode: Literal["static", "monolithic", "balanced"] = Field(
        default="static",
        description="static: prefill and decode on separate workers. monolithic: each worker does both. balanced: as "
        "static, and layers move between workers while they serve.",
    )
    default_sampling: SamplingSettings = Field(
        default_factory=SamplingSettings, description="How tokens are chosen where a request does not say."
    )
    engine: EngineSettings = Field(default_factory=EngineSettings, description="The model runner, for all roles.")
    prefill: RoleSettings = Field(
        default_factory=RoleSettings, description="Prefill workers (modes static and balanced)."
    )
    decode: RoleSettings = Field(
        default_factory=RoleSettings, description="Decode workers (modes static and balanced)."
    )
    monolithic: RoleSettings = Field(default_factory=RoleSettings, description="Workers of mode monolithic.")
    moves: MovesSettings = Field(
        default_factory=MovesSettings, description="When modules move between workers (mode balanced)."
    )
    store: StoreSettings = Field(default_factory=StoreSettings, description="The global KV store.")
    ingress: IngressSettings = Field(default_factory=IngressSettings, description="The HTTP front.")
    plan: PlanSettings = Field(default_factory=PlanSettings, description="Hardware facts for app.plan.")

    @model_validator(mode="after")
    def _roles_agree(self) -> AppSettings:
        for role in self.roles:
            try:
                engine = self.engine_for(role)
            except ValidationError as error:
                reasons = "; ".join(entry["msg"].removeprefix("Value error, ") for entry in error.errors())
                raise ValueError(f"{role}.engine, merged over engine: {reasons}") from error
            workers = self.role(role)
            if engine.device == "cuda" and workers.num_gpus == 0:
                raise ValueError(
                    f"{role}: device is 'cuda' but {role}.num_gpus is 0, so that Ray would give its workers no GPU: "
                    f"set {role}.num_gpus, or device 'auto' or 'cpu'"
                )
        if self.mode != "monolithic":
            prefill, decode = self.engine_for("prefill"), self.engine_for("decode")
            if prefill.block_tokens is None and (prefill.device, prefill.attention) != (
                decode.device,
                decode.attention,
            ):
                raise ValueError(
                    "prefill and decode differ in device or attention, so that their blocks might differ in size: "
                    "give engine.block_tokens"
                )
            for key in ("dtype", "block_tokens", "max_context_tokens"):
                ours, theirs = getattr(prefill, key), getattr(decode, key)
                if ours != theirs:
                    raise ValueError(
                        f"prefill.engine.{key} ({ours}) and decode.engine.{key} ({theirs}) differ, but KV that one "
                        "side computes is read by the other: give both the same"
                    )
        return self

    @property
    def has_store(self) -> bool:
        """Whether there is a global store: to hand prompts over through it, or to share them."""
        return self.mode != "monolithic" or self.store.share_prefixes

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the mode has workers for."""
        return ("monolithic",) if self.mode == "monolithic" else ("prefill", "decode")

    def role(self, role: Role) -> RoleSettings:
        """The workers of one role."""
        return {"prefill": self.prefill, "decode": self.decode, "monolithic": self.monolithic}[role]

    def engine_for(self, role: Role) -> EngineSettings:
        """`engine` with the role's own keys merged over it.

        Giving one of kv_cache_gib and kv_cache_blocks for the role takes the other of `engine` away.

        Raises: pydantic.ValidationError: the merged settings contradict each other.
        """
        merged = self.engine.model_dump(exclude_unset=True)
        overrides = self.role(role).engine
        for given, other in (("kv_cache_gib", "kv_cache_blocks"), ("kv_cache_blocks", "kv_cache_gib")):
            if overrides.get(given) is not None:
                merged.pop(other, None)
        return EngineSettings.model_validate(merged | overrides)


def load_settings(args: Mapping[str, Any] | None, overlay_path: str | Path | None = None) -> AppSettings:
    """Checks the application's `args`, with an overlay merged over them first.

    Args:
        args: the mapping under `args:` of the application; None counts as empty (all defaults).
        overlay_path: YAML file with a mapping in the shape of `args`. None: the one that EQUIPOISE_OVERLAY names, if
            any. Mappings are merged key by key; anything else, lists and null included, replaces what was there.

    Raises: SettingsError, with everything that is wrong.
    """
    merged: Mapping[str, Any] = {} if args is None else args
    if not isinstance(merged, Mapping):
        raise SettingsError([f"args: given {shown(merged)}, allowed is a mapping of settings"])
    path = overlay_path if overlay_path is not None else os.environ.get(OVERLAY_VARIABLE)
    if path:
        merged = merged_with_overlay(merged, Path(path))
    try:
        return AppSettings.model_validate(dict(merged))
    except ValidationError as error:
        problems = problems_of(error, AppSettings, {"engine": EngineSettings})
        if path:
            problems.append(f"(the settings checked were args with the overlay {path} merged over them)")
        raise SettingsError(problems) from error
