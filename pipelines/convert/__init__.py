"""Converters of downloaded models, each a module with ``convert(source: Path, target: Path) -> None``.

``source`` is the folder with the unpacked files (of no interest for a model that is made from nothing),
``target`` a folder to be created. They are run by
``python -m pipelines.convert NAME SOURCE TARGET``, in a process of its own.
"""

MISSING_LIBRARY = 3  #: exit code: a library that the converter needs is not installed
