"""CuPy's compile error."""


class CompileException(Exception):  # noqa: N818  CuPy's name
    """A source does not compile."""

    def get_message(self) -> str:
        """What the compiler said."""
        return str(self)
