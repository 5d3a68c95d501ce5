"""Pictures, clips and films for the models that vLLM can show them to.

vLLM's own processor of the model scales them, makes their features and says how many tokens each takes; the
model's chat template says where each stands. Here is what lies between a request and those two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from adapters.chunk import Payload
from workers.engine import ItemError
from workers.engines.prompt import Content, Prompts
from workers.engines.vllm_thread import refusals

CLIP_RATE = 16_000  #: Hz, of a request's clips; vLLM resamples to what the model was made for
_FIELDS = {"image": "images", "audio": "audio", "video": "videos"}


class _Part(NamedTuple):
    kind: str
    number: int  #: which one of its kind in the request
    sound: int | None = None  #: of a film: the clip that is its own sound


class Media:
    """Makes vLLM's inputs of requests with media. Not for several threads at once.

    Args:
        engine: A vLLM engine.
        prompts: Of its tokenizer. A tokenizer without a chat template gets the one that vLLM finds.
    """

    def __init__(self, engine: Any, prompts: Prompts) -> None:
        self._renderer = engine.renderer
        self._prompts = prompts
        self._limits: dict[str, int] = {}
        config, tokenizer = engine.model_config, engine.get_tokenizer()
        if not config.is_multimodal_model:
            return
        from vllm.model_executor.models import ModelRegistry
        from vllm.renderers.hf import resolve_chat_template, resolve_chat_template_content_format

        self._limits = dict(self._renderer.get_mm_processor().info.allowed_mm_limits)
        template = resolve_chat_template(tokenizer, None, None, model_config=config)
        if template is not None:
            tokenizer.chat_template = template
        if (
            resolve_chat_template_content_format(template, None, "auto", tokenizer, model_config=config)
            == "string"
        ):
            model, _ = ModelRegistry.resolve_model_cls(config.architectures, config)
            prompts.placeholder = model.get_placeholder_str

    def wanted(self, request: Payload, heard: Mapping[int, str]) -> bool:
        """Whether there is anything to see, or to hear that has not been made text."""
        return any(
            part["type"] != "text" and not (part["type"] == "audio" and part["index"] in heard)
            for message in request.get("messages") or ()
            if not isinstance(message["content"], str)
            for part in message["content"]
        )

    def encode(self, request: Payload, heard: Mapping[int, str]) -> dict[str, Any]:
        """A request as vLLM's engine takes it, with tokens and features.

        Args:
            request: {"messages", "images": uint8 [H, W, 3] each, "audio": float32 [n] each, 16 kHz mono,
                "videos": uint8 [T, H, W, 3] each, "video_fps": frames a second of each}
            heard: Clips that are text already: number -> words.

        Raises :class:`ItemError` (400): a kind of part that the model does not take, too many of one, or one
        that the model's processor refuses.
        """
        parts: list[_Part] = []
        messages = [
            (str(message["role"]), self._content(message["content"], heard, parts))
            for message in request["messages"]
        ]
        sound = self._sound_of_films(parts)
        prompt: dict[str, Any] = {
            "prompt_token_ids": self._prompts.chat(messages),
            "multi_modal_data": self._data(request, parts, sound),
        }
        if sound:
            prompt["mm_processor_kwargs"] = {"use_audio_in_video": True}
        try:
            # Not vLLM's other cache: what it holds must be sent to the engine in the order of its making.
            (ready,) = self._renderer.render_cmpl([prompt], skip_mm_cache=True)
        except refusals() as error:
            raise ItemError(f"messages: {error}", status=400, param="messages") from error
        return dict(ready)

    def _content(self, content: Any, heard: Mapping[int, str], parts: list[_Part]) -> Content:
        if isinstance(content, str):
            return content
        known: list[dict[str, Any]] = []
        for part in content:
            kind = part["type"]
            if kind == "text":
                known.append({"type": "text", "text": part["text"]})
            elif kind == "audio" and part["index"] in heard:
                known.append({"type": "text", "text": heard[part["index"]]})
            else:
                parts.append(_Part(kind, part["index"], part.get("audio")))
                count = sum(each.kind == kind for each in parts)
                if count > self._limits.get(kind, 0):
                    raise _refused(self._too_many(kind))
                known.append({"type": kind, "number": count})
        return known

    def _too_many(self, kind: str) -> str:
        if most := self._limits.get(kind, 0):
            return f"the model takes at most {most} parts of type {kind}"
        takes = ", ".join(["text", *(other for other, most in self._limits.items() if most)])
        return f"the model takes no parts of type {kind}, only {takes}"

    def _sound_of_films(self, parts: Sequence[_Part]) -> bool:
        """Whether films are heard too. Where the model can't hear at all, they are silent."""
        films = [part for part in parts if part.kind == "video"]
        audible = [film for film in films if film.sound is not None]
        if not audible or not self._limits.get("audio"):
            return False
        if len(audible) < len(films) or any(part.kind == "audio" for part in parts):
            raise _refused("vllm takes the sound of all videos of a request and no other clip, or no sound")
        return True

    @staticmethod
    def _data(request: Payload, parts: Sequence[_Part], sound: bool) -> dict[str, list[Any]]:
        """Each kind's media, in the order of their places."""
        from PIL import Image

        data: dict[str, list[Any]] = {}
        for part in parts:
            medium: Any = request[_FIELDS[part.kind]][part.number]
            if part.kind == "image":
                medium = Image.fromarray(medium)
            elif part.kind == "audio":
                medium = (medium, CLIP_RATE)
            else:
                if sound:
                    data.setdefault("audio", []).append((request["audio"][part.sound], CLIP_RATE))
                medium = (medium, _timing(len(medium), request["video_fps"][part.number]))
            data.setdefault(part.kind, []).append(medium)
        return data


def _timing(frames: int, fps: float) -> dict[str, Any]:
    """What vLLM and transformers want to know of a film whose frames are all to be looked at."""
    return {
        "fps": fps,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
        "duration": frames / fps,
        "video_backend": "omni-broker",
        "do_sample_frames": False,
    }


def _refused(why: str) -> ItemError:
    return ItemError(f"messages: {why}", status=400, param="messages")
