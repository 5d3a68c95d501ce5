"""A pipeline as HTTP callers see it: a model with modalities, voices and parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from broker.gateway.errors import ApiError
from pipelines.graph import Endpoint, Pipeline

TEXT, AUDIO, IMAGE, VIDEO = "text", "audio", "image", "video"

#: OpenAI's voice names. Clients that people already have send one of them; each means the default voice.
OPENAI_VOICES = (
    "alloy",
    "ash",
    "ballad",
    "coral",
    "echo",
    "fable",
    "onyx",
    "nova",
    "sage",
    "shimmer",
    "verse",
    "marin",
    "cedar",
)
DEFAULT_VOICE = "default"


class Model:
    """One pipeline and what follows from its graph.

    Attributes:
        inputs: Modalities that a chat's messages may carry besides text.
        speakers: The stages that only audio needs: they get the voice and the speed.
        voices: Names of voices, the default first; empty: there is one, and it has no name of its own.
    """

    def __init__(self, pipeline: Pipeline, created: int) -> None:
        self.pipeline = pipeline
        self.name = pipeline.name
        self.created = created
        self.order = pipeline.order()
        self.inputs = pipeline.takes()
        self.speakers = self._speakers()
        self.voices = self._voices()

    def _needed(self, output: str) -> list[str]:
        if output not in self.pipeline.outputs:
            return []
        return self.pipeline.needed([output], set(), set(self.inputs))

    def _speakers(self) -> list[str]:
        text = set(self._needed(TEXT))
        return [stage for stage in self._needed(AUDIO) if stage not in text]

    def _voices(self) -> list[str]:
        for stage in self.speakers:
            voices = self.pipeline.stages[stage].options.get("voices")
            if voices:
                return [str(voice) for voice in voices]
        return []

    def endpoint(self, name: str) -> Endpoint:
        """How an HTTP endpoint uses the graph. Raises ApiError if the pipeline has no such endpoint."""
        endpoint = self.pipeline.endpoints.get(name)
        if endpoint is None:
            offered = ", ".join(self.pipeline.endpoints) or "none"
            raise ApiError(
                f"{self.name} has no {name} endpoint; it has {offered}", "model", code="unsupported_model"
            )
        return endpoint

    def modalities(self, endpoint: Endpoint) -> list[str]:
        """Those of an endpoint's outputs that a chat can carry, the default first."""
        return [name for name in endpoint.outputs if name in (TEXT, AUDIO, IMAGE)]

    def transcribes(self, endpoint: Endpoint) -> bool:
        """Whether the text output comes along with audio, at no other stage's cost."""
        return TEXT in endpoint.outputs and self.pipeline.outputs[TEXT] in self._needed(AUDIO)

    def voice(self, wanted: str | dict[str, str] | None, param: str) -> str | None:
        """The voice to ask the engines for; None: their default.

        Raises ApiError that lists the voices for a name that is none.
        """
        if wanted is None:
            return None
        name = wanted.get("id", "") if isinstance(wanted, dict) else wanted
        for voice in self.voices:
            if voice.casefold() == name.casefold():
                return voice
        if name == DEFAULT_VOICE or name in OPENAI_VOICES:
            return None
        offered = ", ".join([*self.voices, DEFAULT_VOICE])
        raise ApiError(
            f"no voice {name[:80]!r}; there are {offered} (OpenAI's names stand for {DEFAULT_VOICE})",
            param,
            code="unknown_voice",
        )

    def stage_params(self, entries: list[dict[str, Any] | None] | None) -> dict[str, dict[str, Any]]:
        """Each stage's parameters from a `sampling_params_list`.

        It has an entry for each stage, or for each of those that every request may run (without ``when``).
        Raises ApiError for another length.
        """
        if entries is None:
            return {}
        common = [name for name in self.order if not self.pipeline.stages[name].waits_for]
        stages = common if len(entries) == len(common) else self.order
        if len(entries) != len(stages):
            without = f", or {len(common)} without those that only media need" if common != stages else ""
            raise ApiError(
                f"sampling_params_list has {len(entries)} entries; {self.name} has {len(stages)} stages: "
                + ", ".join(stages)
                + without,
                "sampling_params_list",
            )
        return {stage: dict(entry) for stage, entry in zip(stages, entries, strict=True) if entry}

    def card(self) -> dict[str, Any]:
        """The entry of GET /v1/models: OpenAI's fields, and what the pipeline takes and gives."""
        outputs = [name for endpoint in self.pipeline.endpoints.values() for name in endpoint.outputs]
        given = [name for name in dict.fromkeys(outputs) if name in (TEXT, AUDIO, IMAGE, VIDEO)]
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "omni-broker",
            "description": self.pipeline.description,
            "endpoints": list(self.pipeline.endpoints),
            "input_modalities": [TEXT, *self.inputs],
            "output_modalities": given,
            "voices": self.voices,
            "stages": self.order,
        }


def listing(models: dict[str, Model]) -> bytes:
    """Body of GET /v1/models."""
    return msgspec.json.encode({"object": "list", "data": [model.card() for model in models.values()]})
