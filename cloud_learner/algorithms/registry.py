"""Finds algorithms by name.

A third party adds one by an entry point in the group `vla_fleet.algorithms` that names its config, or gives its place,
`module:Config`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

from cloud_learner.algorithms.interface import AlgorithmConfig
from wire.errors import ConfigError, suggest

GROUP = "vla_fleet.algorithms"
_BUILT_IN = (
    EntryPoint("chunk-edit", "cloud_learner.algorithms.chunk_edit:ChunkEdit", GROUP),
    EntryPoint("hg-dagger", "cloud_learner.algorithms.hg_dagger:HGDagger", GROUP),
    EntryPoint("lwd", "cloud_learner.algorithms.lwd:Lwd", GROUP),
    EntryPoint("pi-rl", "cloud_learner.algorithms.pi_rl:PiRl", GROUP),
    EntryPoint("rlpd", "cloud_learner.algorithms.rlpd:Rlpd", GROUP),
    EntryPoint("thrifty-dagger", "cloud_learner.algorithms.thrifty_dagger:ThriftyDagger", GROUP),
    EntryPoint("recap", "cloud_learner.algorithms.recap:Recap", GROUP),
)


def known() -> dict[str, EntryPoint]:
    """Algorithms by name."""
    return {one.name: one for one in (*entry_points(group=GROUP), *_BUILT_IN)}


def get_algorithm(name: str) -> AlgorithmConfig:
    """The default config of the algorithm called `name`, or of the one at `module:Config`. Raises `ConfigError`."""
    module, _, attribute = name.partition(":")
    try:
        if attribute:
            made = getattr(importlib.import_module(module), attribute)
        else:
            found = known()
            if name not in found:
                raise ConfigError(
                    f"there is no algorithm '{name}': there are {', '.join(sorted(found))}, and module:Config for your "
                    f"own.{suggest(name, found)}"
                )
            made = found[name].load()
    except ConfigError:
        raise
    except Exception as error:  # whatever a module does when it is imported
        said = f"{type(error).__name__}: {error}"
        where = ""
        if attribute and isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            where = " Is its directory in PYTHONPATH?"
        raise ConfigError(f"algorithm '{name}' cannot be imported: {said.rstrip('.')}.{where}") from error
    if not (isinstance(made, type) and issubclass(made, AlgorithmConfig)):
        raise ConfigError(f"algorithm '{name}' is {made!r}, which is no subclass of AlgorithmConfig.")
    if missing := sorted(made.__abstractmethods__ | ({"name"} - set(dir(made)))):
        raise ConfigError(f"algorithm '{name}': {made.__name__} lacks {', '.join(missing)}; docs/algorithms.md.")
    try:
        return made()
    except TypeError as error:
        raise ConfigError(f"algorithm '{name}': every field needs a default ({error}).") from error
