"""Command lines: what is wrong with one becomes one line."""

import sys
from collections.abc import Callable

from absl import app, flags


def flags_parser(config: flags.FlagHolder) -> Callable[[list[str]], list[str]]:
    """Returns a ``flags_parser`` for `absl.app.run`.

    An unknown option ends with the nearest name.

    Args:
      config: the flag of the configuration file.
    """

    def parse(argv: list[str]) -> list[str]:
        try:
            arguments = app.parse_flags_with_usage(argv)
            config.value.lock()  # Only now does a file that is not there raise.
        except OSError as error:
            sys.exit(f"error: {' '.join(str(error).split())}")
        except (AttributeError, KeyError) as error:
            cause = error.args[0]
            if isinstance(cause, KeyError):
                cause = cause.args[0]
            sys.exit(f"error: unknown option {'. '.join(str(cause).splitlines())}")
        return arguments

    return parse
