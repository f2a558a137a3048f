"""Packages of this project: `wlb`, and its part of the `megatron` namespace (which has no __init__.py)."""

from setuptools import find_namespace_packages, setup

setup(
    packages=find_namespace_packages(include=["wlb", "wlb.*", "megatron.wlb", "megatron.wlb.*"]),
    # With this an editable install is one path file, so `megatron` stays a namespace of two folders.
    package_dir={"": "."},
)
