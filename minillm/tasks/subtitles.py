"""A transcript in the forms that players and OpenAI's API know: SubRip, WebVTT, and JSON."""

from collections.abc import Sequence
from typing import Any

from ..text.languages import LANGUAGES
from .transcription import Segment, Transcript
from .word_times import Word

MEASURES = ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
"""Fields of a segment that thresholds need, where they were asked for"""


def srt(transcript: Transcript) -> str:
    """SubRip: segments, or words, numbered from 1, with hours, minutes, seconds and milliseconds after a comma."""
    blocks = [
        f"{number}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{_line(cue.text)}\n"
        for number, cue in enumerate(cues(transcript), 1)
    ]
    return "\n".join(blocks)


def vtt(transcript: Transcript) -> str:
    """WebVTT (https://www.w3.org/TR/webvtt1/)."""
    blocks = [f"{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{_line(cue.text)}\n" for cue in cues(transcript)]
    return "\n".join(["WEBVTT\n", *blocks])


def cues(transcript: Transcript) -> Sequence[Word | Segment]:
    """Words with their times, where they were asked for, or segments."""
    return transcript.words or transcript.segments


def verbose_json(transcript: Transcript, task: str) -> dict[str, Any]:
    """OpenAI's verbose_json; words and the measures of segments only where they were asked for."""
    words = [{"word": word.text.strip(), "start": word.start, "end": word.end} for word in transcript.words]
    return {
        "task": task,
        "language": LANGUAGES.get(transcript.language or "en", transcript.language),
        "duration": round(transcript.duration, 3),
        "text": transcript.text.strip(),
        "segments": [
            {
                "id": number,
                "start": round(segment.start, 3),
                "end": round(segment.end, 3),
                "text": segment.text,
                "tokens": segment.token_ids,
                **{name: value for name in MEASURES if (value := getattr(segment, name)) is not None},
            }
            for number, segment in enumerate(transcript.segments)
        ],
        **({"words": words} if words else {}),
    }


def _line(text: str) -> str:
    """A subtitle's text: an arrow in it would end it."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    """00:01:02,345"""
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
