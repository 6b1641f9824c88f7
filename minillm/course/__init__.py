"""A course on the engine: lessons that import the modules that serve, and run them step by step.

lessons/     the lessons, a page of Markdown each: prose, and code in cells of at most ten lines
drawing.py   figures in the notebook's own colours
launching.py runs a learner's CUDA kernel
lesson.py    reads a lesson; writes it as a notebook; runs it as text
exercises/   what an answer to each exercise has to do, a file for each lesson
solutions/   an answer to each exercise, likewise

A lesson is Markdown and not a notebook: it can be read and compared line by line, and a learner's copy, which is a
notebook, is written where the learner works.
"""

from .drawing import BLUE, GREEN, ORANGE, PURPLE, drawing
from .exercises import check

__all__ = ["BLUE", "GREEN", "ORANGE", "PURPLE", "check", "drawing"]
