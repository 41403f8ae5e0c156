"""Version of Lumen, name of its distribution, and the error of mixed installations."""

__version__ = "0.1.0"
#: The name that `pip install` takes. The distribution `lumen` is a different project with a package of the same name.
DISTRIBUTION = "lumen-train"
#: Files and folders of the distribution `lumen` that Lumen does not have. All its versions have the first one.
FOREIGN_NAMES = ("dashboard.py", "pipeline.py", "sources", "views")


def make_mixed_files_error(folder: str, found: list[str]) -> ImportError:
    """Return the error of a folder that holds files of both distributions.

    Args:
        folder: The folder of the package.
        found: Names in the folder that the distribution `lumen` installed.
    """
    return ImportError(
        f"the folder {folder} mixes two packages: it holds Lumen {__version__}, the training library, and "
        f"{', '.join(found)} of the distribution lumen, a dashboard builder. An environment can hold only one of them. "
        f"To keep the training library, run: pip uninstall --yes lumen {DISTRIBUTION} && pip install {DISTRIBUTION}"
    )
