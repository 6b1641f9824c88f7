"""Random input of every kind: whatever it is, the engine answers it or refuses it in one line.

A subject is a module with `prepare(folder)`, which returns a function of an input's number and its random generator.
That function runs the input; `outcome` says what it may end in. `child` runs a batch of inputs in a process of its own,
`harness` watches that process. To repeat one input, with its traceback: `python -m tests.fuzz SUBJECT NUMBER`.
"""
