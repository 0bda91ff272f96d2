"""The exceptions that mean "your input, not our bug"."""


class InputError(Exception):
    """Bad input, told as *name* must *rule*, got *value*; *what to do*.

    Takes one or more problems, so that a check can report every offender and not the first.
    The command line prints them, one a line, and exits with `exit_code`.
    """

    exit_code = 2

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class DoesNotFitError(InputError):
    """A job that this host's free memory may not hold; it could run elsewhere, or smaller."""

    exit_code = 3
