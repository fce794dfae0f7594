"""What pyproject.toml cannot say: the folder `train` is installed as `internvl_pack.train`; users have a `train.py`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["internvl_pack", "internvl_pack.*"]), "internvl_pack.train"],
    package_dir={"internvl_pack.train": "train"},
)
