"""minillm transcribe: what is said in WAV files."""

import argparse
from typing import Any

from ..progress_bar import bars_aside
from .options import add_generation_options, add_model_options, generation_fields, load_engine
from .output import as_json, show
from .parser import Parser

FIELDS = ("num_beams", "temperature", "seed", "max_new_tokens", "no_repeat_ngram_size", "repetition_penalty")
FORMATS = ("text", "json", "srt", "vtt")
DESCRIPTION = """\
Write down what is said in WAV files, by a model of the family whisper: one
channel or several, 16,000 samples a second, of any length. The language is
detected if none is given."""
EPILOG = """examples:
  minillm transcribe -m openai/whisper-base talk.wav
  minillm transcribe -m openai/whisper-base --format srt talk.wav > talk.srt
  ffmpeg -i talk.mp3 -ar 16000 -ac 1 -c:a pcm_s16le talk.wav
"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument("files", nargs="+", metavar="FILE.wav", help="sounds")
    add_model_options(parser, needed="a model of the family whisper")
    group = parser.add_argument_group("transcript")
    group.add_argument("--language", metavar="NAME", help="code or English name, such as de or German")
    group.add_argument(
        "--task", choices=("transcribe", "translate"), default="transcribe", help="translate: into English"
    )
    group.add_argument("--timestamps", action="store_true", help="a line for each segment, with its times")
    group.add_argument(
        "--initial-prompt", metavar="TEXT", help="text that was said before, or shows how names are spelled"
    )
    group.add_argument("--words", action="store_true", help="a line for each word, with its times")
    group.add_argument(
        "--condition-on-prev-tokens", action="store_true", help="tell each window of 30 seconds the text before it"
    )
    group.add_argument(
        "--temperatures",
        type=_numbers,
        metavar="T,T,...",
        help="decode a doubtful window again at these, such as 0,0.2,0.4,0.6,0.8,1",
    )
    group.add_argument(
        "--compression-ratio-threshold", type=float, metavar="X", help="doubtful: text that compresses more, as by 1.35"
    )
    group.add_argument(
        "--logprob-threshold", type=float, metavar="X", help="doubtful: a lower mean log-probability, as -1"
    )
    group.add_argument(
        "--no-speech-threshold",
        type=float,
        metavar="P",
        help="left out: unlikely text where silence is likelier, as 0.6",
    )
    group.add_argument("--format", choices=FORMATS, default="text", help="json, srt and vtt have times (default: text)")
    add_generation_options(parser, only=FIELDS)


def _numbers(text: str) -> list[float]:
    """Numbers with commas between."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between, found {text!r:.80}") from None


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..tasks.fallback import THRESHOLDS
    from ..tasks.sound_files import read_wav
    from ..tasks.subtitles import cues, srt, verbose_json, vtt

    sounds = [read_wav(file) for file in args.files]  # before the model is loaded
    options: dict[str, Any] = {"language": args.language, "task": args.task, "prompt": args.initial_prompt}
    options |= {name: getattr(args, name) for name in ("temperatures", *THRESHOLDS)}
    options["condition_on_prev_tokens"] = args.condition_on_prev_tokens or None
    timed: Any = "word" if args.words else True if args.timestamps or args.format != "text" else None
    fields = generation_fields(args)
    if args.temperatures:
        fields.pop("do_sample", None)  # which --seed sets
    with load_engine(args, sequences=fields.get("num_beams", 1), any_task=True, prefix_cache=False) as engine:
        for file, sound in zip(args.files, sounds, strict=True):
            transcript = engine.transcribe(sound, timestamps=timed, **options, **fields)
            with bars_aside():
                if args.format == "json":
                    show(as_json({"file": file, **verbose_json(transcript, args.task)}))
                elif args.format != "text":
                    show({"srt": srt, "vtt": vtt}[args.format](transcript), end="")
                elif args.timestamps or args.words:
                    for cue in cues(transcript):
                        show(f"[{cue.start:.2f} --> {cue.end:.2f}] {cue.text.strip()}")
                else:
                    show(transcript.text.strip())
