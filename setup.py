"Package metadata comes from settings.ini, the one place that states it."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
cfg = ConfigParser(delimiters="=")
cfg.read(here / "settings.ini", encoding="utf-8")
cfg = cfg["DEFAULT"]
extras = {k.removesuffix("_requirements"): cfg[k].split() for k in cfg if k.endswith("_requirements")}
extras["notebooks"] += extras["paper"]
extras["dev"] += extras["notebooks"] + extras["cluster"] + extras["hub"]

setup(name=cfg["lib_name"], version=cfg["version"], description=cfg["description"], author=cfg["author"],
      license="Apache-2.0", long_description=(here / "README.md").read_text(encoding="utf-8"),
      long_description_content_type="text/markdown", packages=find_packages(include=["qk_geometry*"]),
      python_requires=f">={cfg['min_python']}", install_requires=cfg["requirements"].split(), extras_require=extras,
      entry_points={"console_scripts": cfg["console_scripts"].split()}, zip_safe=False)
