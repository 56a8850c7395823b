"""Compiled programs on disk: a run that starts again need not compile again."""

from pathlib import Path

import jax


def use_compilation_cache(folder: str) -> None:
    """Keeps every compiled program in a folder and takes from it what is there.

    For the whole process; call before anything is compiled. The key of a program is its
    code, JAX's version, the flags and the devices, so runs can share the folder.

    Args:
      folder: Made if missing. Empty leaves JAX's own setting, which the environment
        variable JAX_COMPILATION_CACHE_DIR gives.

    Raises:
      ValueError: if the folder cannot be made.
    """
    if not folder:
        return
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compilation_cache={folder!r} cannot be used: {error}"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    # JAX leaves out what compiles in less than a second, of which a run has hundreds.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
