"""What a family of picture or film models brings to the engines ``diffusion-text``, ``diffusion`` and
``diffusion-vae``: one subclass each of :class:`TextEncoder`, :class:`Denoiser` and :class:`Vae`, in files of
their own, named by ``options.family`` as "package.module:Class".

The engines know requests, steps and time; a family knows its modules, its schedule and its formulas. One
request is a *canvas*: latents that each step of its schedule makes less noisy. A canvas has *branches*: what
it is conditioned on ("positive"), and perhaps what it is to be led away from ("negative"). A *row* is one
branch of one canvas in one pass of the transformer. Rows of different requests share a pass, each with its
own step, so nothing that a row becomes may depend on its company.

Constructors load the weights (see :mod:`workers.families.parts`), on the engine's thread like all else here
unless it says otherwise. What they raise is fatal for the process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from adapters.chunk import Payload
from pipelines.options import DiffusionOptions, DiffusionTextOptions, DiffusionVaeOptions
from workers.engine import ItemError
from workers.engines.diffusion import schedule
from workers.engines.diffusion.tensors import as_tensor, copied

if TYPE_CHECKING:
    import torch

POSITIVE, NEGATIVE = "positive", "negative"

#: The conditions of one branch: name -> tensor.
Conditions = dict[str, Any]


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """A request's parameters. None: the family's default. A family with more of them makes a subclass."""

    width: Annotated[int, Meta(ge=1)] | None = None  #: pixels
    height: Annotated[int, Meta(ge=1)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0)] | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] = 0  #: pictures on the way; fewer where steps are few
    num_frames: Annotated[int, Meta(ge=1)] | None = None
    fps: Annotated[float, Meta(ge=0.1, le=1000)] | None = None  #: as the engine `film` can write it
    strength: Annotated[float, Meta(gt=0, le=1)] | None = None  #: how much of a given picture may change


class Request(NamedTuple):
    """What a caller sent, as a stage next to the caller sees it."""

    #: {"prompt": str}, perhaps "negative_prompt": str, "images": [uint8 [H, W, 3]], "mask": uint8 [H, W]
    payload: Payload
    wishes: Wishes
    seed: int


class Prompt(NamedTuple):
    """One text of a request."""

    branch: str  #: :data:`POSITIVE` or :data:`NEGATIVE`
    text: str
    images: tuple[Any, ...] = ()  #: uint8 [H, W, 3], for encoders that look at pictures too


class TextEncoder(ABC):
    """Prompts to conditions."""

    wishes: type[Wishes] = Wishes

    def __init__(self, model: str, options: DiffusionTextOptions, device: str) -> None:
        self.model = model
        self.options = options
        self.device = device

    @abstractmethod
    def prompts(self, request: Request) -> Sequence[Prompt]:
        """The texts to encode: what guidance needs in this request, the positive one first. No weights here:
        it runs on the event loop. Raises ItemError (400)."""

    @abstractmethod
    def encode(self, prompts: Sequence[Prompt]) -> list[Conditions]:
        """One pass: for each prompt its conditions, tensors on the CPU without a batch axis.

        The prompts are those of all requests that wait. What one becomes must not depend on the others. A
        mask that is all ones may be left out.
        """


@dataclass(eq=False)
class Canvas:
    """One request in the making. Made by :meth:`Denoiser.begin`."""

    latents: torch.Tensor  #: [1, ...]
    scheduler: Any  #: its own, see :func:`workers.engines.diffusion.schedule.scheduler_for`
    conditions: dict[str, Conditions]  #: branch -> its conditions, tensors [1, ...] on the device
    guidance: float = 1.0
    step: int = 0  #: the one that comes next; begins above 0 where a given picture keeps some of its own
    extras: dict[str, Any] = field(default_factory=dict)  #: the family's own: sizes, ids of positions
    caches: dict[str, Any] = field(default_factory=dict)  #: branch -> what a cache keeps of it

    @property
    def steps(self) -> int:
        """How many there are in all."""
        return len(self.scheduler.timesteps)

    @property
    def rows(self) -> list[Row]:
        """One for each of its branches."""
        return [Row(self, branch) for branch in self.conditions]

    @property
    def timestep(self) -> torch.Tensor:
        """Of the step that comes next, as the scheduler has it, 0-d."""
        timestep: torch.Tensor = self.scheduler.timesteps[self.step]
        return timestep


class Row(NamedTuple):
    """One branch of one canvas."""

    canvas: Canvas
    branch: str

    @property
    def conditions(self) -> Conditions:
        """Its own, tensors [1, ...]"""
        return self.canvas.conditions[self.branch]


class Denoiser(ABC):
    """Noise and conditions to latents. The defaults are those of models of flow matching."""

    wishes: type[Wishes] = Wishes
    transformers: Sequence[Any] = ()  #: those of diffusers that :meth:`forward` calls; without them no caches

    def __init__(self, model: str, options: DiffusionOptions, device: str) -> None:
        self.model = model
        self.options = options
        self.device = device

    @abstractmethod
    def begin(self, inputs: Mapping[str, list[Payload]], wishes: Wishes, seed: int) -> Canvas:
        """A canvas before its first step: noise drawn from the seed alone, its schedule set.

        Args:
            inputs: Producer's name -> all of its payloads; :func:`conditions_of` reads a text encoder's.
            wishes: Of the class that :attr:`wishes` names.
            seed: The job's.

        Raises ItemError for the job's own faults.
        """

    def key(self, row: Row) -> Hashable:
        """What must agree among the rows of one pass. Default: all shapes."""
        shapes = tuple((name, value.shape) for name, value in sorted(row.conditions.items()))
        return tuple(row.canvas.latents.shape), shapes

    @abstractmethod
    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """One pass: what the transformer says of each row, [rows, ...] in the shape of the latents."""

    def guide(self, canvas: Canvas, said: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Joins what was said of the branches, [1, ...] each.

        Default: classifier-free guidance (Ho and Salimans 2022), negative + scale * (positive - negative).
        """
        if NEGATIVE not in said:
            return said[POSITIVE]
        return said[NEGATIVE] + self.scale(canvas) * (said[POSITIVE] - said[NEGATIVE])

    def scale(self, canvas: Canvas) -> float:
        """Of guidance in the step that comes next. Default: the canvas' own in all steps."""
        return canvas.guidance

    def preview(self, canvas: Canvas, guided: torch.Tensor) -> torch.Tensor:
        """What the latents are on the way to, before the step is taken: for partial pictures, [1, ...].

        Default, for flow matching: x - sigma * v.
        """
        return canvas.latents - canvas.scheduler.sigmas[canvas.step].to(guided) * guided

    def advance(self, canvas: Canvas, guided: torch.Tensor) -> None:
        """Takes a step: new latents. The engine counts it."""
        canvas.latents = canvas.scheduler.step(guided, canvas.timestep, canvas.latents, return_dict=False)[0]

    def picture(self, canvas: Canvas, latents: torch.Tensor) -> Payload:
        """What the VAE gets: "latents" float32 without the batch axis, and whatever else it needs."""
        return {"latents": latents[0].float().cpu()}

    def state(self, canvas: Canvas) -> Payload:
        """All that changes from step to step, for a checkpoint; tensors in it are copies on the CPU."""
        return {"latents": copied(canvas.latents), **schedule.history(canvas.scheduler)}

    def restore(self, canvas: Canvas, state: Payload) -> None:
        """Puts a state into a canvas that has just begun; its ``step`` is set already."""
        canvas.latents = as_tensor(state["latents"]).to(canvas.latents)
        schedule.go_on(canvas.scheduler, state, canvas.step, canvas.latents)


class Vae(ABC):
    """Latents to pixels, and back where a pipeline takes pictures. Films are pixels too."""

    wishes: type[Wishes] = Wishes

    def __init__(self, model: str, options: DiffusionVaeOptions, device: str) -> None:
        self.model = model
        self.options = options
        self.device = device

    def key(self, item: Payload) -> Hashable:
        """What must agree among the latents of one pass. Default: their shape."""
        return tuple(item["latents"].shape)

    @abstractmethod
    def decode(self, items: Sequence[Payload]) -> list[Payload | Exception]:
        """One pass over what :meth:`Denoiser.picture` gave: {"image": uint8 [H, W, 3]} or
        {"frames": uint8 [F, H, W, 3], "fps": float} each; an exception in the place of what fails alone."""

    def encode_key(self, request: Request) -> Hashable:
        """What must agree among the requests of one pass of :meth:`encode`. Default: each has its own."""
        return id(request)

    def encode(self, requests: Sequence[Request]) -> list[Payload | Exception]:
        """One pass over requests with pictures: what the denoiser gets of each. For the option ``encodes``.

        Raises ItemError (400).
        """
        raise NotImplementedError(f"{type(self).__name__} takes no pictures")


def conditions_of(payloads: Sequence[Payload], device: Any, dtype: Any) -> dict[str, Conditions]:
    """Branch -> conditions, tensors [1, ...] on the device; floating-point ones in this dtype."""
    found: dict[str, Conditions] = {}
    for payload in payloads:
        conditions = {name: as_tensor(value) for name, value in payload.items() if name != "branch"}
        found[payload["branch"]] = {
            name: value[None].to(device, dtype if value.is_floating_point() else None)
            for name, value in conditions.items()
        }
    return found


def stacked(rows: Sequence[Row], name: str) -> torch.Tensor:
    """One condition of all rows, [rows, ...]. A row alone costs no copy."""
    import torch

    return torch.cat([row.conditions[name] for row in rows]) if len(rows) > 1 else rows[0].conditions[name]


def latents_of(rows: Sequence[Row]) -> torch.Tensor:
    """The latents of all rows, [rows, ...]"""
    import torch

    return torch.cat([row.canvas.latents for row in rows])


def timesteps_of(rows: Sequence[Row]) -> torch.Tensor:
    """The timesteps of all rows, [rows], each its own canvas' next."""
    import torch

    return torch.stack([row.canvas.timestep for row in rows])


def size_of(wishes: Wishes, *, default: int, multiple: int) -> tuple[int, int]:
    """(height, width) in pixels. Raises ItemError (400) for what is no multiple."""
    height, width = wishes.height or default, wishes.width or default
    for name, value in (("width", width), ("height", height)):
        if value % multiple:
            raise ItemError(
                f"size: the {name} of {value} pixels is no multiple of {multiple}", status=400, param="size"
            )
    return height, width
