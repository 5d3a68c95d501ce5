"""Text to phoneme ids, with espeak-ng through piper-tts (an optional library: it is GPL-3.0)."""

from __future__ import annotations

from workers.engines.vits import Voice
from workers.optional import library

PAD, BEGIN, END = "_", "^", "$"

#: A longer sentence is divided: the model's attention takes memory by the square of the length.
LIMIT = 400


class Phonemizer:
    """Turns sentences into what a voice's acoustic model reads. Not for several threads at once."""

    def __init__(self, voice: Voice) -> None:
        self._espeak = library("piper.phonemize_espeak", "speech").EspeakPhonemizer()
        self._language = voice.espeak.voice
        self._ids = voice.phoneme_id_map

    def ids(self, text: str) -> list[list[int]]:
        """The ids of each utterance of a text: begin, then each phoneme with padding after it, then end.

        Mostly a sentence is one utterance. Text without anything to speak gives none.
        """
        utterances = []
        for phonemes in self._espeak.phonemize(self._language, text):
            known = [phoneme for phoneme in phonemes if phoneme in self._ids]
            if any(phoneme.isalnum() for phoneme in known):
                utterances += [self._framed(part) for part in divided(known)]
        return utterances

    def _framed(self, phonemes: list[str]) -> list[int]:
        pad = self._ids[PAD]
        ids = [*self._ids[BEGIN], *pad]
        for phoneme in phonemes:
            ids += [*self._ids[phoneme], *pad]
        return ids + self._ids[END]


def divided(phonemes: list[str], limit: int = LIMIT) -> list[list[str]]:
    """Parts of at most ``limit`` phonemes, cut after spaces where there are any."""
    parts = []
    while len(phonemes) > limit:
        spaces = [i + 1 for i, phoneme in enumerate(phonemes[:limit]) if phoneme == " "]
        cut = spaces[-1] if spaces else limit
        parts.append(phonemes[:cut])
        phonemes = phonemes[cut:]
    return [*parts, phonemes]
