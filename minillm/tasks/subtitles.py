"""A transcript in the forms that players and OpenAI's API know: SubRip, WebVTT, and JSON."""

from typing import Any

from ..text.languages import LANGUAGES
from .transcription import Transcript


def srt(transcript: Transcript) -> str:
    """SubRip: segments numbered from 1, with hours, minutes, seconds and milliseconds after a comma."""
    blocks = [
        f"{number}\n{_clock(segment.start, ',')} --> {_clock(segment.end, ',')}\n{_line(segment.text)}\n"
        for number, segment in enumerate(transcript.segments, 1)
    ]
    return "\n".join(blocks)


def vtt(transcript: Transcript) -> str:
    """WebVTT (https://www.w3.org/TR/webvtt1/)."""
    blocks = [
        f"{_clock(segment.start, '.')} --> {_clock(segment.end, '.')}\n{_line(segment.text)}\n"
        for segment in transcript.segments
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def verbose_json(transcript: Transcript, task: str) -> dict[str, Any]:
    """OpenAI's verbose_json without what this engine does not compute, such as a probability of silence."""
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
            }
            for number, segment in enumerate(transcript.segments)
        ],
    }


def _line(text: str) -> str:
    """A subtitle's text: an arrow in it would end it."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    """00:01:02,345"""
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
